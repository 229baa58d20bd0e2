"""The command line. Turns options into calls and results into text, or with `--json` into one JSON object.

Importing it loads click and little else; every command imports what it needs. Longer than most modules
because the options and help texts of all commands belong side by side.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import click

from deltackpt.errors import ChainError, ConfigError, DeltaError

if TYPE_CHECKING:
    from deltackpt.layout import Tiling
    from deltackpt.manifest import Manifest, Placement
    from deltackpt.reader import Reader
    from deltackpt.store import Store
    from deltackpt.verify import FolderReport, StoreReport

F = TypeVar("F", bound=Callable[..., None])
Mode: TypeAlias = Literal["replace", "switch", "in-place"]

CODECS = ("zstd", "deflate", "lz4", "snappy", "raw")
FORMS = ("sparse", "mask")
MODES = ("replace", "switch", "in-place")


class _Place(click.Path):
    """A path or URL. Its type is for shell completion: what is wrong with it is for the library to say."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse an empty text: a variable that is not set would mean the working folder."""
        if not os.fspath(value):
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)


class _Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic only in newer releases of click
    """A number of bytes, with or without a unit: 500GB, 1.5TB, 64GiB."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([KMGTP]?)(I?)B?", str(value).strip(), re.I | re.ASCII)
        if match is None or (match[3] and not match[2]):
            self.fail(f"{value!r} is no number of bytes; expected for example 500GB or 64GiB.", param, ctx)
        return int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].upper()])


_PATH = _Place(readable=False)
_STEP = click.IntRange(min=0, max=1 << 62)
_INTERRUPTED = 130
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SHOWN = 20
"""Rows of `log`, and names in a list, unless all are asked for."""


# ---------------------------------------------------------------- output


@dataclass
class Output:
    """How the running command answers. json: one object on stdout instead of text, also for an error.

    storage, single_writer: how it opens stores. data_url, data_storage: where it reads immutable objects.
    """

    json: bool = False
    storage: dict[str, str] = field(default_factory=dict)
    single_writer: bool = False
    data_url: str | None = None
    data_storage: dict[str, str] = field(default_factory=dict)

    def result(self, fields: Mapping[str, object], text: str) -> None:
        """Print what a command found."""
        click.echo(json.dumps(fields) if self.json else _printable(text))

    def error(self, kind: str, message: str, exit_code: int, fields: Mapping[str, object] | None = None) -> None:
        """Print an error: one line on stderr; with --json also an object, with `fields` of a result that has faults."""
        line = _printable(" ".join(message.split()))
        click.echo(f"deltackpt: {line}", err=True)
        if self.json:
            error = {"error": kind, "message": line, "exit_code": exit_code}
            click.echo(json.dumps({**(fields or {}), **error}))


def _printable(text: str) -> str:
    """Escape what no stream can encode: file names need not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


class _Lines(logging.Handler):
    """Puts messages of the package on stderr, wherever that leads now."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"deltackpt: {record.getMessage()}", err=True)


@contextlib.contextmanager
def _messages() -> Iterator[None]:
    logger, handler = logging.getLogger("deltackpt"), _Lines()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextlib.contextmanager
def _stage(text: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal that something is going on; yields what changes the text. Silent in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    # As Text, because brackets in a path are no markup.
    with Console(stderr=True).status(Text(text)) as status:
        yield lambda more: status.update(Text(f"{text}: {more}"))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let the first Ctrl-C end the command in good order, and a second one the process, at once."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def first(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _reported(ctx: click.Context) -> Iterator[None]:
    """Turn errors into one line and the exit code of their class."""
    output: Output = ctx.obj
    try:
        yield
    except click.ClickException as exc:
        where = exc.ctx.command_path if isinstance(exc, click.UsageError) and exc.ctx else ctx.command_path
        output.error("UsageError", f"{exc.format_message()} See {where} --help.", exc.exit_code)
        ctx.exit(exc.exit_code)
    except DeltaError as exc:
        output.error(type(exc).__name__, str(exc), exc.exit_code)
        ctx.exit(exc.exit_code)
    except KeyboardInterrupt:
        output.error("Interrupted", "interrupted; the same command may be run again", _INTERRUPTED)
        ctx.exit(_INTERRUPTED)
    except OSError as exc:
        # click ends quietly when the reader of our output has gone.
        if exc.errno == errno.EPIPE or os.environ.get("DELTACKPT_DEBUG"):
            raise
        output.error(type(exc).__name__, f"{exc}; set DELTACKPT_DEBUG=1 to see where", 1)
        ctx.exit(1)


_ELSEWHERE = {
    "channel": "cli_fleet", "doctor": "cli_doctor", "export": "cli_compat", "import": "cli_compat",
    "mirror": "cli_store", "prune": "cli_store", "status": "cli_fleet", "tag": "cli_store", "watch": "cli_fleet",
}  # fmt: skip
"""Modules of the commands that are not in this one; imported by name when a command is used."""


class _Cli(click.Group):
    """The group of all commands; answers errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name."""
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"deltackpt.{_ELSEWHERE[cmd_name]}")
        # import is a word of Python
        command: click.Command = getattr(module, "import_" if cmd_name == "import" else cmd_name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command."""
        # Known before anything is parsed: an error in the options must be an object too.
        ctx.obj = Output(json="--json" in args)
        with _reported(ctx):
            return super().parse_args(ctx, args or ["--help"])

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        with _messages(), _reported(ctx), _interruptible():
            return super().invoke(ctx)


def _set_json(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.obj.json = True


_json_option = click.option(
    "--json", is_flag=True, expose_value=False, is_eager=True, callback=_set_json,
    help="Print one JSON object on stdout, also for an error.",
)  # fmt: skip


def _set_storage(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> None:
    ctx.obj.storage.update(_pairs(ctx, param, pairs))


def _set_single_writer(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    ctx.obj.single_writer = value


def _open(url: str, options: Mapping[str, str] | None = None) -> Store:
    """Open a store by the options of the running command, or by others."""
    from deltackpt.store import open_store

    output: Output = click.get_current_context().obj
    options = output.storage if options is None else options
    return open_store(url, options=options, single_writer=output.single_writer)


def _open_source(url: str) -> Store:
    """Open the store that the running command follows; its immutable objects may come from elsewhere."""
    from deltackpt.store import open_store

    output: Output = click.get_current_context().obj
    return open_store(
        url, options=output.storage, single_writer=output.single_writer,
        data_url=output.data_url, data_options=output.data_storage,
    )  # fmt: skip


def _set_data_url(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    ctx.obj.data_url = value


def _set_data_storage(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> None:
    ctx.obj.data_storage.update(_pairs(ctx, param, pairs))


def _data_options(command: F) -> F:
    """Add the two options that say where immutable objects are read."""
    url = click.option(
        "--data-url", type=_PATH, expose_value=False, callback=_set_data_url, metavar="URL",
        help="A mirror of STORE, or a cache before it: shards and other immutable objects are read there, what it "
        "lacks and all manifests from STORE.",
    )  # fmt: skip
    storage = click.option(
        "--data-option", multiple=True, expose_value=False, callback=_set_data_storage, metavar="KEY=VALUE",
        help="How to reach --data-url, as --storage-option for STORE; may be given several times.",
    )  # fmt: skip
    return url(storage(command))


def _cached(store: Store, folder: str | None, nbytes: int) -> Store:
    """Return a store whose objects come through a cache of this host, if there is one."""
    from deltackpt.cache import Cached

    return store if folder is None else Cached(store, folder, nbytes=nbytes)


_storage_option = click.option(
    "--storage-option", multiple=True, expose_value=False, callback=_set_storage, metavar="KEY=VALUE",
    envvar="DELTACKPT_STORAGE_OPTION", show_envvar=True,
    help="How to reach a bucket: endpoint, region, path_style, profile, anonymous, or a setting of its client; may be "
    "given several times. [default: the usual AWS environment]",
)  # fmt: skip
_single_writer_option = click.option(
    "--single-writer", is_flag=True, expose_value=False, callback=_set_single_writer,
    help="Promise that nobody else writes, where a server ignores conditional writes.",
)  # fmt: skip
_threads_option = click.option(
    "--threads", type=click.IntRange(min=1), envvar="DELTACKPT_THREADS", metavar="N",
    help="CPU threads to use. [default: all CPUs of this process]",
)  # fmt: skip
_scratch_option = click.option(
    "--scratch", type=_PATH, metavar="DIR",
    help="Folder for a temporary copy of the weights, where one is needed.",
)  # fmt: skip
_cache_option = click.option(
    "--cache", type=_PATH, metavar="DIR",
    help="Folder on a disk or in the memory of this host, through which all followers here fetch each object once.",
)  # fmt: skip
_cache_size_option = click.option(
    "--cache-size", type=_Bytes(), metavar="BYTES", default="32GiB", show_default=True,
    help="Bound for --cache; what was not read for longest goes first.",
)  # fmt: skip
_anchor_source_option = click.option(
    "--anchor-source", type=_PATH, metavar="DIR",
    help="Folder that holds the files of an anchor made with --anchor-ref.",
)  # fmt: skip


def _show_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"deltackpt {version('deltackpt')}")
        except PackageNotFoundError:
            click.echo("deltackpt, run from a folder without being installed")
        ctx.exit()


@click.group(cls=_Cli, context_settings={"auto_envvar_prefix": "DELTACKPT", "help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
    allow_from_autoenv=False, help="Print the version of this program.",
)  # fmt: skip
def cli() -> None:
    """Publish model weights as exact XOR deltas, and follow them.

    STORE is a folder (or file:// URL) or a bucket (s3://bucket/prefix, gs://, az://) that holds versions, CKPT and DEST
    are checkpoint folders of safetensors files.

    \b
      deltackpt publish out/step-100 /mnt/fs/run7 --step 100
      deltackpt pull /mnt/fs/run7 /models/policy
      deltackpt log /mnt/fs/run7

    Every option can be set by DELTACKPT_<COMMAND>_<OPTION>, for example DELTACKPT_PULL_MODE=switch. DELTACKPT_DEBUG=1
    shows where an unexpected error comes from.

    Exit codes: 0 done; 2 usage; 3 the call does not fit; 4 busy; 10 the store refused (11 not found, 12 another
    publisher was first, 13 no answer, try again); 20 broken format (21 newer format); 30 wrong bytes; 40 wrong base or
    a gap (--reseed); 50 an apply did not finish; 130 interrupted; 1 anything else.

    Shell completion: eval "$(_DELTACKPT_COMPLETE=bash_source deltackpt)", or zsh_source, or fish_source.
    """


# ---------------------------------------------------------------- words and figures


def size(nbytes: float) -> str:
    """Write a number of bytes for people: 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def percent(part: float, whole: float) -> str:
    """Write a share for people; what is not nothing never reads as 0 %."""
    if not whole:
        return "-"
    share = 100 * part / whole
    return f"{share:.2f} %" if share >= 0.01 or not part else "<0.01 %"


def age(seconds: float) -> str:
    """Write a length of time for people: 5 min."""
    for limit, unit in ((60, "s"), (3600, "min"), (86400, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / (limit // 60 if limit < 86400 else 3600):.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def count(number: int, noun: str) -> str:
    """Write a number with its noun: 1 delta, 2 deltas."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out in columns; the first two are words, the others figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _times(times: Mapping[str, float]) -> str:
    """Write stage times: encode 120 ms, upload 13 ms."""
    return ", ".join(f"{name.removesuffix('_ms').replace('_', ' ')} {ms:.0f} ms" for name, ms in times.items())


def _stored(manifest: Manifest) -> int:
    """Bytes that a follower who has nothing else fetches for a version: its shards, or all weights of a full one."""
    return manifest.totals.raw if manifest.kind == "full" else manifest.totals.stored


def _version_fields(manifest: Manifest) -> dict[str, object]:
    return {
        "version": manifest.version, "kind": manifest.kind, "base": manifest.base, "step": manifest.step,
        "lineage": manifest.lineage, "run_id": manifest.run_id, "epoch": manifest.epoch, "created": manifest.created,
        "state": manifest.state, "elements": manifest.totals.elements, "changed": manifest.totals.changed,
        "bytes_raw": manifest.totals.raw, "bytes_stored": _stored(manifest),
    }  # fmt: skip


def _milliseconds(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(ms, 3) for name, ms in times.items()}


# ---------------------------------------------------------------- publish


def _pairs(_ctx: click.Context, _param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE.")
        found[key] = value
        _text(_ctx, _param, pair)
    return found


def _text(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Refuse bytes that are no UTF-8: a manifest cannot hold them."""
    if value is not None and _printable(value) != value:
        raise click.BadParameter(f"{_printable(value)!r} is not UTF-8.")
    return value


@cli.command()
@click.argument("checkpoint", type=_PATH, metavar="CKPT")
@click.argument("store", type=_PATH)
@click.option(
    "--step", type=_STEP, metavar="N", help="Training step of these weights; it may not fall without --resume."
)
@click.option(
    "--run-id", envvar="DELTACKPT_RUN_ID", show_envvar=True, callback=_text,
    help="Name of the training run; the same name goes on with a stream, another one is refused.",
)  # fmt: skip
@click.option(
    "--base", type=_PATH, metavar="DIR",
    help="Folder that holds the newest version. [default: the one published last, or rebuilt from STORE]",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with a stream that another run or host has written.")
@click.option("--new-lineage", is_flag=True, help="Start again with a full version; followers have to reseed.")
@click.option("--relayout", is_flag=True, help="Allow other names, shapes or dtypes, by a full version.")
@click.option("--anchor-ref", is_flag=True, help="A full version names the files of CKPT by digest, not copied.")
@click.option("--no-anchors", is_flag=True, help="Do not make an anchor when one is due.")
@click.option("--codec", type=click.Choice(CODECS), default="zstd", show_default=True, help="Codec of the frames.")
@click.option(
    "--form", type=click.Choice(FORMS), default="sparse", show_default=True,
    help="How changes are stored: as sparse columns, or as the XOR mask.",
)  # fmt: skip
@click.option(
    "--metadata", multiple=True, callback=_pairs, metavar="KEY=VALUE",
    help="Text to keep in the manifest; may be given several times.",
)  # fmt: skip
@click.option(
    "--mirror", type=_PATH, metavar="DIR",
    help="Folder to keep at the newest version and to use as the base, for trainers that overwrite CKPT.",
)  # fmt: skip
@_anchor_source_option
@_scratch_option
@_threads_option
@_storage_option
@_single_writer_option
@_json_option
@click.pass_obj
def publish(
    output: Output,
    checkpoint: str,
    store: str,
    step: int | None,
    run_id: str | None,
    base: str | None,
    resume: bool,
    new_lineage: bool,
    relayout: bool,
    anchor_ref: bool,
    no_anchors: bool,
    codec: str,
    form: str,
    metadata: dict[str, str],
    mirror: str | None,
    anchor_source: str | None,
    scratch: str | None,
    threads: int | None,
) -> None:
    """Publish the checkpoint folder CKPT as the next version of STORE.

    The first version is a full copy, every later one the changes against the version before.

    \b
      deltackpt publish out/step-100 /mnt/fs/run7 --step 100
      deltackpt publish out/step-101 /mnt/fs/run7 --step 101 --base out/step-100 --metadata reward=0.31
    """
    from deltackpt.publish import publish_folder

    with _stage(f"publishing {checkpoint}"):
        manifest = publish_folder(
            checkpoint, _open(store), base=base, step=step, run_id=run_id, resume=resume, new_lineage=new_lineage,
            relayout=relayout, anchor_ref=anchor_ref, mirror=mirror,
            anchor_source=anchor_source, anchors=not no_anchors, codec=codec, form=form,
            scratch=scratch, metadata=metadata, threads=threads,
        )  # fmt: skip
    by_reference = manifest.kind == "full" and anchor_ref
    stored = 0 if by_reference else _stored(manifest)
    fields = {
        "store": store, **_version_fields(manifest), "bytes_stored": stored,
        "bytes_changed": manifest.totals.changed_bytes, **_milliseconds(manifest.times),
    }  # fmt: skip
    facts: list[str] = [manifest.kind]
    if manifest.kind == "delta":
        facts.append(f"{percent(manifest.totals.changed, manifest.totals.elements)} changed")
    if manifest.kind == "rewind":
        facts.append(f"the weights of version {manifest.base}")
    if by_reference:
        facts.append("weights named where they are")
    elif stored:
        facts.append(f"{size(stored)} of {size(manifest.totals.raw)} stored")
    if manifest.times:
        facts.append(_times(manifest.times))
    output.result(fields, f"{store}: version {manifest.version} ({', '.join(facts)})")


# ---------------------------------------------------------------- pull


@cli.command()
@click.argument("store", type=_PATH)
@click.argument("dest", type=_PATH)
@click.option(
    "--version", type=click.IntRange(min=0), metavar="N",
    help="Version to pull; it may be older than the local one. [default: the newest]",
)  # fmt: skip
@click.option("--step", type=_STEP, metavar="N", help="Pull the newest version that has this training step.")
@click.option(
    "--mode", type=click.Choice(MODES),
    help="[default: what DEST was made with, else replace] "
    "replace: new files beside the old ones, then renamed. switch: folders v<version> and a link `current`. "
    "in-place: new values are written into the files; a reader that has them mapped can see a mix meanwhile.",
)  # fmt: skip
@click.option("--reseed", is_flag=True, help="Replace weights in DEST that belong to no version.")
@click.option(
    "--lock", type=_PATH, metavar="FILE",
    help="File on a local disk to lock, where the filesystem of DEST has no locks.",
)  # fmt: skip
@_cache_option
@_cache_size_option
@_data_options
@_anchor_source_option
@_threads_option
@_storage_option
@_json_option
@click.pass_obj
def pull(
    output: Output,
    store: str,
    dest: str,
    version: int | None,
    step: int | None,
    mode: Mode | None,
    reseed: bool,
    lock: str | None,
    cache: str | None,
    cache_size: int,
    anchor_source: str | None,
    threads: int | None,
) -> None:
    """Bring the checkpoint folder DEST to a version of STORE.

    Everything is fetched and verified before DEST is touched. An empty or new DEST starts from an anchor.

    \b
      deltackpt pull /mnt/fs/run7 /models/policy
      deltackpt pull /mnt/fs/run7 /models/policy --version 12
      deltackpt pull /mnt/fs/run7 /dev/shm/policy --mode switch
    """
    from deltackpt.cache import Cached
    from deltackpt.folder import OWN, CheckpointTarget
    from deltackpt.follow import Follower
    from deltackpt.ledger import ApplyLog, applied

    if version is not None and step is not None:
        raise click.UsageError("--version and --step cannot be given together.")
    target = CheckpointTarget(dest, mode=mode, lock=lock)
    opened = _cached(_open_source(store), cache, cache_size)
    with (
        _stage(f"pulling into {dest}") as say,
        Follower(opened, target, anchor_source=anchor_source, threads=threads) as follower,
    ):
        if step is not None:
            version = _version_of_step(follower.reader, step)
        prepared = follower.prepare(version, reseed=reseed)
        if prepared is not None:
            say(f"applying version {prepared.version}")
            prepared.apply()
        reader = follower.reader
        assert reader.head is not None
        at = prepared.version if prepared else reader.head.manifest.version if version is None else version
        # While the folder is locked.
        log, entry = ApplyLog(os.path.join(target.path, OWN, "apply.log")), reader.history[at]
        if prepared is not None and prepared.previous != at:
            log.add(applied(prepared, entry, time.time()))
        else:
            log.found(entry, time.time())
    if prepared is None:
        fields = {"dest": dest, "version": at, "previous": at, "mode": target.mode, "anchor": None, "deltas": 0}
        fields |= {"bytes_raw": reader.manifest(at).totals.raw, "bytes_fetched": 0, "bytes_reseeded": 0}
        fields["adopted"] = False
        output.result(fields, f"{dest}: at version {at} already")
        return
    plan, manifest = prepared.plan, reader.manifest(prepared.version)
    fetched = opened.fetched if isinstance(opened, Cached) else plan.nbytes
    adopted = prepared.previous == prepared.version
    seeded = 0 if plan.anchor is None else reader.manifest(plan.anchor).totals.raw
    fields = {
        "dest": dest, "version": prepared.version, "previous": prepared.previous, "mode": target.mode,
        "anchor": plan.anchor, "deltas": len(plan.steps), "bytes_raw": manifest.totals.raw,
        "bytes_fetched": fetched, "bytes_reseeded": seeded, "adopted": adopted, **_milliseconds(prepared.times),
    }  # fmt: skip
    if adopted:
        output.result(fields, f"{dest}: found to hold version {prepared.version}, recorded now")
        return
    way = f"version {prepared.version}"
    if prepared.previous is not None:
        way = f"version {prepared.previous} -> {prepared.version}"
    sources = [] if plan.anchor is None else [f"anchor of version {plan.anchor}"]
    if plan.steps or not sources:
        sources.append(count(len(plan.steps), "delta"))
    facts = [
        " and ".join(sources), f"{size(fetched)} fetched",
        f"staged {prepared.times['stage_ms']:.0f} ms", f"applied {prepared.times['apply_ms']:.0f} ms",
    ]  # fmt: skip
    output.result(fields, f"{dest}: {way} ({', '.join(facts)})")


def _version_of_step(reader: Reader, step: int) -> int:
    reader.load()
    found = [v for v, entry in reader.history.items() if entry.manifest.step == step]
    if not found:
        steps = [e.manifest.step for e in reader.history.values() if e.manifest.step is not None]
        known = f"its steps are {min(steps)} to {max(steps)}" if steps else "its versions have no steps"
        raise ChainError(f"no version in {reader.store.url} has step {step}; {known}")
    return max(found)


# ---------------------------------------------------------------- log and show


@cli.command()
@click.argument("store", type=_PATH)
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N",
    help=f"Show the newest N versions. [default: {_SHOWN}; with --json all]",
)  # fmt: skip
@_storage_option
@_json_option
@click.pass_obj
def log(output: Output, store: str, limit: int | None) -> None:
    """List the versions of STORE, newest first.

    SIZE is what a follower fetches for a version: its shards, or all weights of a full one; RATIO is its share of all
    weights.

    \b
      deltackpt log /mnt/fs/run7
      deltackpt log /mnt/fs/run7 --limit 100 --json
    """
    from deltackpt.reader import Reader
    from deltackpt.verify import listed_versions

    opened = _open(store)
    reader = Reader(opened)
    if limit is None and not output.json:
        limit = _SHOWN
    store_id, versions = reader.info.store_id, listed_versions(opened)
    reader.load(since=None if limit is None or not versions else max(0, versions[-1] - limit + 1))
    found = [reader.history[v].manifest for v in sorted(reader.history, reverse=True)][:limit]
    fields = {"store": store, "store_id": store_id, "versions": [_version_fields(m) for m in found]}
    output.result(fields, _log_text(store, found))


def _log_text(store: str, manifests: Sequence[Manifest]) -> str:
    if not manifests:
        return f"{store}: no version yet"
    now = time.time()
    rows = [("VERSION", "KIND", "BASE", "STEP", "CHANGED", "SIZE", "RATIO", "AGE")]
    for m in manifests:
        base, step = ("-" if n is None else str(n) for n in (m.base, m.step))
        changed = percent(m.totals.changed, m.totals.elements)
        ratio = percent(_stored(m), m.totals.raw)
        rows.append((str(m.version), m.kind, base, step, changed, size(_stored(m)), ratio, age(now - m.created)))
    lines = [columns(rows)]
    if older := manifests[-1].version:
        lines.append(f"{count(older, 'older version')}; --limit shows more")
    return "\n".join(lines)


@cli.command()
@click.argument("store", type=_PATH)
@click.argument("version", type=click.IntRange(min=0), required=False)
@_storage_option
@_json_option
@click.pass_obj
def show(output: Output, store: str, version: int | None) -> None:
    """Show all that STORE says of one VERSION.

    Without VERSION the newest one. A manifest, and what its layout, placement and partition come to.

    \b
      deltackpt show /mnt/fs/run7
      deltackpt show /mnt/fs/run7 12 --json
    """
    import msgspec

    from deltackpt.reader import Reader
    from deltackpt.verify import listed_versions, read_entry

    opened = _open(store)
    reader = Reader(opened)
    _ = reader.info  # where there is no store, say that
    if version is None:
        version = max(listed_versions(opened), default=0)
    entry = read_entry(opened, version)
    placement = reader.placement(entry.manifest)
    manifest: dict[str, object] = msgspec.to_builtins(entry.manifest)
    summary = _layout_summary(reader.tiling(entry.manifest), placement)
    pruned = reader.is_pruned(version)
    fields = {"store": store, "digest": entry.digest, "pruned": pruned, "manifest": manifest, "layout": summary}
    output.result(fields, _show_text(entry.digest, pruned, manifest, summary))


def _layout_summary(tiling: Tiling, placement: Placement) -> dict[str, object]:
    layout = tiling.layout
    dtypes: dict[str, dict[str, int]] = {}
    for dtype, nbytes in zip(layout.dtypes, layout.nbytes.tolist(), strict=True):
        one = dtypes.setdefault(dtype, {"tensors": 0, "bytes": 0})
        one["tensors"] += 1
        one["bytes"] += nbytes
    files = [
        {"name": f.name, "tensors": len(f.tensors), "bytes": int(layout.nbytes[list(f.tensors)].sum())}
        for f in placement.files
    ]
    return {
        "tensors": len(layout.names), "elements": layout.total_elements, "bytes": layout.total_bytes,
        "groups": len(tiling.groups), "dtypes": dtypes, "files": files,
    }  # fmt: skip


def _show_text(digest: str, pruned: bool, manifest: Mapping[str, object], layout: Mapping[str, object]) -> str:
    lines = [("digest", digest), ("pruned", "yes" if pruned else "no")]
    for name, value in manifest.items():
        if isinstance(value, (list, tuple)):
            lines.append((name, count(len(value), "entry").replace("entrys", "entries")))
            lines += [("", _words(one)) for one in value]
        else:
            lines.append((name, _words(value)))
    lines += [(f"layout {name}", _words(v)) for name, v in layout.items() if name != "files"]
    files = layout["files"]
    assert isinstance(files, list)
    lines += [("layout file", _words(one)) for one in files]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in lines)


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_words(v)}" for k, v in value.items()) or "-"
    return "-" if value is None or value == "" else str(value)


# ---------------------------------------------------------------- verify


@cli.command()
@click.argument("path", type=_PATH, metavar="STORE|DEST")
@click.option("--against", type=_PATH, metavar="STORE", help="Check the local folder DEST against this store instead.")
@click.option("--deep", is_flag=True, help="Also rebuild every version of STORE and compare all its bytes.")
@_data_options
@_anchor_source_option
@_scratch_option
@_threads_option
@_storage_option
@_json_option
@click.pass_obj
def verify(
    output: Output,
    path: str,
    against: str | None,
    deep: bool,
    anchor_source: str | None,
    scratch: str | None,
    threads: int | None,
) -> None:
    """Check a whole STORE, or the local folder DEST with --against.

    Lists everything that is wrong; the exit code is that of the first fault. --deep needs scratch space for one copy
    of the weights, and for a second one where there are anchors beside deltas.

    \b
      deltackpt verify /mnt/fs/run7
      deltackpt verify /mnt/fs/run7 --deep --scratch /dev/shm
      deltackpt verify /models/policy --against /mnt/fs/run7
    """
    from deltackpt.verify import verify_folder, verify_store

    if against is not None:
        if deep:
            raise click.UsageError("--deep is for a store; a local folder is always checked in full.")
        with _stage(f"checking {path}"):
            local = verify_folder(path, _open_source(against), threads=threads)
        fields, lines = _folder_report(path, against, local)
        _finish(output, fields, lines, local.problems, path)
        return
    store = _open_source(path)
    _require_store(store, path)
    with _stage(f"checking {path}") as say:
        found = verify_store(
            store, deep=deep, anchor_source=anchor_source, scratch=scratch, threads=threads, progress=say
        )
    fields, lines = _store_report(path, found, deep)
    _finish(output, fields, lines, found.problems, path)


def _require_store(store: Store, path: str) -> None:
    if not os.path.exists(os.path.join(path, "store.json")) and _looks_local(path):
        raise ConfigError(f"{store.url} is a checkpoint folder, no store; name its store with --against")


def _looks_local(path: str) -> bool:
    """Say whether a folder is, or holds, a checkpoint."""
    try:
        names = os.listdir(path)
    except OSError:
        return False  # who opens it as a store says why
    return ".deltackpt" in names or "current" in names or any(n.endswith(".safetensors") for n in names)


def _store_report(path: str, report: StoreReport, deep: bool) -> tuple[dict[str, object], list[str]]:
    from deltackpt.verify import ranges

    fields: dict[str, object] = {
        "store": path, "store_id": report.store_id, "versions": list(report.versions), "pruned": list(report.pruned),
        "anchors": list(report.anchors), "deep": deep, "rebuilt": report.rebuilt, "bytes_checked": report.nbytes,
        "notes": list(report.notes),
    }  # fmt: skip
    facts = [count(len(report.versions), "version"), count(len(report.anchors), "anchor")]
    facts.append(f"{size(report.nbytes)} read")
    if deep:
        facts.append(f"{count(report.rebuilt, 'version')} rebuilt")
    lines = [f"{path}: {', '.join(facts)}"]
    if report.pruned:
        lines.append(f"pruned: versions {ranges(report.pruned)}")
    return fields, lines + [f"note: {note}" for note in report.notes]


def _folder_report(path: str, against: str, report: FolderReport) -> tuple[dict[str, object], list[str]]:
    fields: dict[str, object] = {
        "dest": path, "store": against, "version": report.version, "recorded": report.recorded,
        "pending": report.pending, "bytes_checked": report.nbytes, "tensors": list(report.tensors),
        "files": list(report.files), "notes": list(report.notes),
    }  # fmt: skip
    if report.pending is not None:
        lines = [f"{path}: not clean, an apply of version {report.pending} did not finish"]
    elif report.version is None:
        lines = [f"{path}: no version of {against}"]
    else:
        lines = [f"{path}: weights of version {report.version} ({size(report.nbytes)} read)"]
    shown = [f"differs: {name}" for name in report.tensors[:_SHOWN]]
    if len(report.tensors) > _SHOWN:
        shown.append(f"differs: {len(report.tensors) - _SHOWN:,} more tensors")
    return fields, lines + shown + [f"note: {note}" for note in report.notes]


def _finish(
    output: Output, fields: dict[str, object], lines: list[str], problems: Sequence[DeltaError], path: str
) -> None:
    """Print a report; with problems, leave with the exit code of the first."""
    fields["problems"] = [{"error": type(p).__name__, "message": str(p), "exit_code": p.exit_code} for p in problems]
    fields["ok"] = not problems
    if not problems:
        output.result(fields, "\n".join([*lines, "no fault found"]))
        return
    if not output.json:
        click.echo("\n".join([*lines, *(f"{type(p).__name__}: {p}" for p in problems)]))
    first = problems[0]
    more = "" if len(problems) == 1 else f"{count(len(problems), 'fault')} in {path}, the first: "
    output.error(type(first).__name__, f"{more}{first}", first.exit_code, fields)
    click.get_current_context().exit(first.exit_code)


# ---------------------------------------------------------------- anchor


@cli.command()
@click.argument("store", type=_PATH)
@click.option(
    "--version", type=click.IntRange(min=0), metavar="N",
    help="Version to copy. [default: the newest]",
)  # fmt: skip
@_anchor_source_option
@_scratch_option
@_threads_option
@_storage_option
@_single_writer_option
@_json_option
@click.pass_obj
def anchor(
    output: Output, store: str, version: int | None, anchor_source: str | None, scratch: str | None, threads: int | None
) -> None:
    """Make a full copy of a version inside STORE.

    The copy is an ordinary checkpoint folder. New followers start from the nearest anchor. A version that has one
    already keeps it.

    \b
      deltackpt anchor /mnt/fs/run7
      deltackpt anchor /mnt/fs/run7 --version 12
    """
    from deltackpt.anchor import make_anchor

    with _stage(f"making an anchor in {store}"):
        made = make_anchor(_open(store), version, scratch=scratch, anchor_source=anchor_source, threads=threads)
    nbytes = sum(f.nbytes for f in made.files)
    fields = {
        "store": store, "version": made.version, "folder": made.folder, "source": made.source,
        "files": [{"name": f.name, "bytes": f.nbytes} for f in made.files], "bytes_stored": nbytes,
    }  # fmt: skip
    where = f"{store}/{made.folder}" if made.folder is not None else f"by reference to {made.source}"
    facts = f"{count(len(made.files), 'file')}, {size(nbytes)}"
    output.result(fields, f"{store}: anchor of version {made.version} ({facts}) {where}")


# ---------------------------------------------------------------- bench


@cli.command()
@click.argument("old", type=_PATH)
@click.argument("new", type=_PATH)
@click.option(
    "--limit", type=click.IntRange(min=1), default=4096, show_default=True, metavar="MIB",
    help="Measure whole tensors spread over the model, together at most this many MiB.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Timed runs of each candidate."
)
@_json_option
@click.pass_obj
def bench(output: Output, old: str, new: str, limit: int, repeats: int) -> None:
    """Measure what deltas save from OLD to NEW.

    OLD and NEW are checkpoint folders. Our codecs and forms beside what other projects store, a full copy included,
    and plain advice.

    \b
      deltackpt bench out/step-100 out/step-101
    """
    from pathlib import Path

    import msgspec

    from deltackpt.bench import advice, machine_line, run_checkpoints, table

    with _stage(f"measuring {old} and {new}"):
        report = run_checkpoints(Path(old), Path(new), limit_nbytes=limit << 20, repeats=repeats)
    fields: dict[str, object] = msgspec.to_builtins(report)
    fields["advice"] = advice(report)
    output.result(fields, f"{table(report)}\n\n{advice(report)}\n\n{machine_line(report.machine)}")


def main() -> None:
    """Run the command line."""
    cli()
