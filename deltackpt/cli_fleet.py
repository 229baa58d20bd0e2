"""Commands of the fleet: watch, channel, status. Part of the command line, imported when one of them is used.

Longer than most modules: most of it are the options of watch, with their help."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import click

from deltackpt.cli import (
    _PATH,
    MODES,
    Mode,
    Output,
    _anchor_source_option,
    _cache_option,
    _cache_size_option,
    _cached,
    _data_options,
    _json_option,
    _open,
    _open_source,
    _printable,
    _single_writer_option,
    _storage_option,
    _text,
    _threads_option,
    age,
    columns,
)
from deltackpt.errors import DeltaError, NotFound

if TYPE_CHECKING:
    from types import FrameType

    from deltackpt.lease import Channel, Lease
    from deltackpt.watch import Event, State, Watcher

_GRACE_S = 2.0
"""How long decoding and copying may go on after SIGTERM before they are cut off; applies and hooks never are."""
_SECONDS = click.FloatRange(min=0, max=1e9)
_lease_url_option = click.option(
    "--lease-url", type=_PATH, metavar="URL",
    help="Another store for the leases, so that followers need no right to write to STORE.",
)  # fmt: skip


# ---------------------------------------------------------------- watch


@click.command()
@click.argument("store", type=_PATH)
@click.argument("dest", type=_PATH)
@click.option("--channel", metavar="NAME", help="Follow this channel, forwards and backwards. [default: the newest]")
@click.option(
    "--poll", "poll_s", type=click.FloatRange(min=0.01, max=1e6), default=1.0, show_default=True, metavar="S",
    help="Seconds between two looks for something new; each is spread by a quarter.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Look once, bring DEST up to date and end: for cron.")
@click.option(
    "--exec", "command", metavar="CMD",
    help="Run CMD by the shell after each apply, with DELTACKPT_VERSION, DELTACKPT_PREVIOUS and DELTACKPT_DEST; "
    "it is run again until it exits with 0, also after a restart.",
)  # fmt: skip
@click.option(
    "--engine", metavar="URL",
    help="Let the engine at vllm+http://HOST:PORT or sglang+http://HOST:PORT load each version from DEST, before CMD.",
)  # fmt: skip
@click.option(
    "--kv", type=click.Choice(("reset", "keep")), default="reset", show_default=True,
    help="What the engine has cached for running requests: computed again with the new weights, or kept.",
)  # fmt: skip
@click.option(
    "--draft", type=click.Choice(("follow", "none")),
    help="What becomes of the engine's draft model: updated too, or left as it is. [default: refuse one]",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(MODES),
    help="How DEST is kept, see pull. [default: what DEST was made with, for a new one switch]",
)  # fmt: skip
@click.option("--hold", is_flag=True, help="Stage what comes, apply only what POST /apply orders; needs --control.")
@click.option("--reseed", is_flag=True, help="At the start, replace weights in DEST that belong to no version.")
@click.option(
    "--give-up", "give_up_s", type=_SECONDS, default=60.0, show_default=True, metavar="S",
    help="Report a version that cannot be had as given up after this time; with --once, end.",
)  # fmt: skip
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), metavar="P", help="Serve /metrics, /healthz and /readyz."
)
@click.option(
    "--control", metavar="ADDR",
    help="Serve GET /state and POST /apply too, on 127.0.0.1:PORT or unix:PATH.",
)  # fmt: skip
@click.option("--heartbeat", type=_PATH, metavar="FILE", help="Write FILE with every sign of life, for probes.")
@click.option("--wake", type=_PATH, metavar="FIFO", help="Poll at once when something is written to FIFO.")
@_lease_url_option
@click.option("--lease-id", metavar="ID", help="Name of the lease. [default: from this host and DEST]")
@click.option("--no-lease", is_flag=True, help="Write no lease; prune does not know then what DEST needs.")
@click.option(
    "--lock", type=_PATH, metavar="FILE",
    help="File on a local disk to lock, where the filesystem of DEST has no locks.",
)  # fmt: skip
@click.option(
    "--log", "log_format", type=click.Choice(("text", "json")), default="text", show_default=True,
    help="What happens, on stderr: one line each, for people or as JSON.",
)  # fmt: skip
@_cache_option
@_cache_size_option
@_data_options
@_anchor_source_option
@_threads_option
@_storage_option
@_json_option
@click.pass_obj
def watch(
    output: Output,
    store: str,
    dest: str,
    channel: str | None,
    poll_s: float,
    once: bool,
    command: str | None,
    engine: str | None,
    kv: Literal["reset", "keep"],
    draft: Literal["follow", "none"] | None,
    mode: Mode | None,
    hold: bool,
    reseed: bool,
    give_up_s: float,
    metrics_port: int | None,
    control: str | None,
    heartbeat: str | None,
    wake: str | None,
    lease_url: str | None,
    lease_id: str | None,
    no_lease: bool,
    lock: str | None,
    log_format: Literal["text", "json"],
    cache: str | None,
    cache_size: int,
    anchor_source: str | None,
    threads: int | None,
) -> None:
    """Keep the checkpoint folder DEST at the newest version of STORE.

    Stages while DEST is in use and applies many versions in one go. A poll that fails says so and the next one tries
    again; what no poll can mend ends the watcher with its exit code. SIGTERM finishes an apply that has begun, or drops
    what is being staged, and exits 0. SIGHUP polls at once.

    \b
      deltackpt watch /mnt/fs/run7 /dev/shm/policy
      deltackpt watch /mnt/fs/run7 /models/policy --once --mode replace
      deltackpt watch /mnt/fs/run7 /dev/shm/policy --engine vllm+http://127.0.0.1:8000
      deltackpt watch /mnt/fs/run7 /dev/shm/policy --channel rollout --exec 'curl -fsS -X POST localhost:8000/reload'
    """
    from deltackpt import control as http
    from deltackpt import watch as module
    from deltackpt.engine import Engine
    from deltackpt.folder import OWN
    from deltackpt.lease import require_name
    from deltackpt.sidecar import Sidecar

    if hold and control is None:
        raise click.UsageError("--hold needs --control: nothing could give an order otherwise.")
    if no_lease and (lease_url or lease_id):
        raise click.UsageError("--no-lease cannot be given with --lease-url or --lease-id.")
    for name, what in ((channel, "channel"), (lease_id, "lease id")):
        if name is not None:
            require_name(name, what)
    if engine is None and draft is not None:
        raise click.UsageError("--draft needs --engine.")
    say = _text_log if log_format == "text" else _json_log
    source = _cached(_open_source(store), cache, cache_size)
    own = os.path.join(os.path.abspath(dest), OWN, "engine")
    driven = None if engine is None else Engine(engine, Sidecar(source, own), kv=kv, draft=draft)
    with contextlib.ExitStack() as stack:
        if log_format == "json":
            stack.enter_context(_only_json(output))
        pace = stack.enter_context(contextlib.closing(module.Pace()))
        if wake is not None:
            stack.enter_context(module.fifo(wake, pace))
        watcher = module.Watcher(
            source, dest, channel=channel, mode=mode, poll_s=poll_s,
            give_up_s=give_up_s, hold=hold, reseed=reseed, command=command, engine=driven,
            lease_store=None if no_lease else _open(lease_url or store), lease_name=lease_id, heartbeat=heartbeat,
            lock=lock, anchor_source=anchor_source, threads=threads, pace=pace, say=say,
        )  # fmt: skip
        if driven is not None:
            how = {"engine": driven.url, "kv": kv, "draft": draft}
            say(module.Event("info", "driving", f"driving {driven.url} (kv {kv}, draft {draft or 'refused'})", how))
        if metrics_port is not None:
            port = stack.enter_context(http.serve_metrics(watcher, metrics_port))
            say(module.Event("info", "listening", f"metrics on port {port}", {"metrics_port": port}))
        if control is not None:
            address = stack.enter_context(http.serve_control(watcher, control))
            say(module.Event("info", "listening", f"control at {address}", {"control": address}))

        def cut_off() -> None:
            say(module.Event("info", "stopped", module.STOPPED))
            output.result(_fields(watcher.state), _ended(watcher.state, once))
            sys.stdout.flush()

        stack.enter_context(_signals(watcher, cut_off))
        state = _follow(watcher, once)
    output.result(_fields(state), _ended(state, once))


def _follow(watcher: Watcher, once: bool) -> State:
    if once:
        return watcher.once()
    watcher.run()
    return watcher.state


def _fields(state: State) -> dict[str, object]:
    import msgspec

    found: dict[str, object] = msgspec.to_builtins(state)
    return found


def _ended(state: State, once: bool) -> str:
    if not once:
        return f"{state.dest}: stopped at {_version(state.applied)}"
    return f"{state.dest}: at {_version(state.applied)}{'' if state.applies else ' already'}"


def _version(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"


def _text_log(event: Event) -> None:
    click.echo(f"deltackpt: {' '.join(_printable(event.message).split())}", err=True)


def _json_log(event: Event) -> None:
    line = {"time": time.time(), "level": event.level, "event": event.name, "message": event.message, **event.fields}
    click.echo(json.dumps(line), err=True)


class _JsonLines(logging.Handler):
    """Makes messages of the package lines of the JSON log."""

    def emit(self, record: logging.LogRecord) -> None:
        from deltackpt.watch import Event

        _json_log(Event("info", "message", record.getMessage()))


@contextlib.contextmanager
def _only_json(output: Output) -> Iterator[None]:
    """Let messages of the package, and the error that ends a watcher, be lines of the JSON log."""
    from deltackpt.watch import Event

    logger = logging.getLogger("deltackpt")
    before, logger.handlers = logger.handlers, [_JsonLines()]
    try:
        yield
    except DeltaError as exc:
        kind = {"error": type(exc).__name__, "exit_code": exc.exit_code}
        _json_log(Event("error", "ended", str(exc), kind))
        if output.json:
            click.echo(json.dumps({"error": kind["error"], "message": str(exc), "exit_code": exc.exit_code}))
        click.get_current_context().exit(exc.exit_code)
    finally:
        logger.handlers = before


@contextlib.contextmanager
def _signals(watcher: Watcher, ended: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM and SIGINT end a watcher and SIGHUP wake it; only the main thread can.

    ended: says the result, where the process has to be cut off while it decodes or copies.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        watcher.terminate()
        signal.setitimer(signal.ITIMER_REAL, _GRACE_S, _GRACE_S)

    def cut_off(_number: int, _frame: FrameType | None) -> None:
        if watcher.reading:
            # Threads are at work in memory of this one: no way out but at once. Nothing that was read is of use.
            try:
                watcher.sweep()
                ended()
            finally:
                os._exit(0)

    def poll(_number: int, _frame: FrameType | None) -> None:
        watcher.wake()

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {
        signal.SIGALRM: cut_off, signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: poll
    }  # fmt: skip
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- channel


@click.group()
def channel() -> None:
    """Say which version the followers of a channel shall run.

    \b
      deltackpt channel set /mnt/fs/run7 eval 4200
      deltackpt channel get /mnt/fs/run7 eval
      deltackpt watch /mnt/fs/run7 /models/policy --channel eval
    """


def _expected(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == "none":
        return value
    if not (value.isascii() and value.isdigit()):
        raise click.BadParameter(f"{value!r} is neither a version nor none.")
    return int(value)


@channel.command("set")
@click.argument("store", type=_PATH)
@click.argument("name")
@click.argument("version", type=click.IntRange(min=0))
@click.option(
    "--expect", callback=_expected, metavar="OLD",
    help="Only if the channel names version OLD now; `none`: only if it names none yet.",
)  # fmt: skip
@click.option("--note", default="", callback=_text, help="Text to keep with the setting.")
@_storage_option
@_single_writer_option
@_json_option
@click.pass_obj
def channel_set(output: Output, store: str, name: str, version: int, expect: int | str | None, note: str) -> None:
    """Let the channel NAME of STORE name VERSION; followers go there, forwards or backwards.

    \b
      deltackpt channel set /mnt/fs/run7 rollout 4200
      deltackpt channel set /mnt/fs/run7 rollout 4201 --expect 4200 --note 'reward 0.31'
    """
    from deltackpt.lease import set_channel

    made = set_channel(_open(store), name, version, expect=expect, note=note)
    output.result({"store": store, **_channel_fields(made)}, f"{store}: channel {name} names version {made.version}")


@channel.command("get")
@click.argument("store", type=_PATH)
@click.argument("name")
@_storage_option
@_json_option
@click.pass_obj
def channel_get(output: Output, store: str, name: str) -> None:
    """Show which version the channel NAME of STORE names.

    \b
      deltackpt channel get /mnt/fs/run7 rollout
    """
    from deltackpt.lease import read_channel

    found = read_channel(_open(store), name)
    if found is None:
        raise NotFound(f"{store} has no channel {name}; deltackpt channel set makes one, deltackpt status lists them")
    output.result({"store": store, **_channel_fields(found)}, str(found.version))


def _channel_fields(found: Channel) -> dict[str, object]:
    record = found.record
    return {
        "channel": found.name, "version": found.version, "number": found.number, "created": record.created,
        "note": record.note,
    }  # fmt: skip


# ---------------------------------------------------------------- status


@click.command()
@click.argument("store", type=_PATH)
@_lease_url_option
@_storage_option
@_json_option
@click.pass_obj
def status(output: Output, store: str, lease_url: str | None) -> None:
    """Show the newest version of STORE, its channels and its followers.

    \b
      deltackpt status /mnt/fs/run7
      deltackpt status /mnt/fs/run7 --lease-url /mnt/fs/leases --json
    """
    from deltackpt.lease import channels, leases
    from deltackpt.reader import Reader
    from deltackpt.verify import listed_versions, read_entry

    opened = _open(store)
    store_id = Reader(opened).info.store_id
    found = listed_versions(opened)
    head = read_entry(opened, found[-1]).manifest if found else None
    named, now = channels(opened), time.time()
    held = leases(_open(lease_url) if lease_url else opened, store_id=store_id)
    newest = None
    if head is not None:
        newest = {
            "version": head.version, "kind": head.kind, "step": head.step, "lineage": head.lineage,
            "created": head.created,
        }  # fmt: skip
    fields = {
        "store": store, "store_id": store_id, "head": newest,
        "channels": [_channel_fields(one) for one in named],
        "followers": [_lease_fields(one, now) for one in held],
    }  # fmt: skip
    lines = [f"{store}: no version yet"]
    if head is not None:
        step = "" if head.step is None else f", step {head.step}"
        lines = [f"{store}: version {head.version} ({head.kind}{step}, {age(now - head.created)} old)"]
    lines += ["", *_channel_lines(named, now)] if named else ["no channels"]
    lines += ["", *_lease_lines(held, None if head is None else head.version, now)] if held else ["no followers"]
    output.result(fields, "\n".join(lines))


def _channel_lines(named: Sequence[Channel], now: float) -> list[str]:
    rows = [("CHANNEL", "NOTE", "VERSION", "SET")]
    rows += [
        (one.name, one.record.note or "-", str(one.version), f"{age(now - one.record.created)} ago") for one in named
    ]
    return [columns(rows)]


def _lease_lines(held: Sequence[Lease], head: int | None, now: float) -> list[str]:
    rows = [("FOLLOWER", "CHANNEL", "VERSION", "BEHIND", "STAGED", "MODE", "SEEN", "LEASE")]
    for one in held:
        behind = "-" if one.version is None or head is None else str(head - one.version)
        rows.append((
            one.id, one.channel or "-", _or_dash(one.version), behind, _or_dash(one.staged), one.mode,
            f"{age(now - one.created)} ago", "live" if one.live(now) else "expired",
        ))  # fmt: skip
    return [columns(rows), *(f"{one.id}: {one.error}" for one in held if one.error is not None)]


def _or_dash(version: int | None) -> str:
    return "-" if version is None else str(version)


def _lease_fields(one: Lease, now: float) -> dict[str, object]:
    return {
        "id": one.id, "version": one.version, "staged": one.staged, "channel": one.channel, "error": one.error,
        "mode": one.mode, "host": one.host, "dest": one.dest, "software": one.software, "created": one.created,
        "expires": one.expires, "live": one.live(now),
    }  # fmt: skip
