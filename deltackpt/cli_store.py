"""Commands that look after a store: prune, tag, mirror. Part of the command line, imported when one of them is used."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from deltackpt.cli import (
    _PATH,
    Output,
    _Bytes,
    _json_option,
    _open,
    _pairs,
    _single_writer_option,
    _stage,
    _storage_option,
    _threads_option,
    age,
    columns,
    count,
    size,
)

if TYPE_CHECKING:
    from types import FrameType

    from deltackpt.mirror import MirrorReport, Start
    from deltackpt.prune import PruneReport, Row


class _From(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic only in newer releases of click
    """A version, or the word for the newest."""

    name = "version"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        text = str(value)
        if text == "newest" or isinstance(value, int):
            return value
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            self.fail(f"{text!r} is neither a version nor 'newest'.", param, ctx)
        return int(text)


_lease_url_option = click.option(
    "--lease-url", type=_PATH, metavar="URL", help="Where the leases are. [default: the store itself]"
)


# ---------------------------------------------------------------- prune


@click.command()
@click.argument("store", type=_PATH)
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Keep the newest N versions.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="K", help="Keep every version that K divides.")
@click.option(
    "--budget", type=_Bytes(), metavar="BYTES",
    help="Give up the oldest kept versions until all data takes no more than this, for example 2TB.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Do it. Without this, nothing is changed.")
@click.option(
    "--grace", type=click.FloatRange(min=0), default=3600.0, show_default=True, metavar="S",
    help="Seconds between declaring data gone and removing it.",
)  # fmt: skip
@_lease_url_option
@_storage_option
@_single_writer_option
@_json_option
@click.pass_obj
def prune(
    output: Output,
    store: str,
    keep: int | None,
    keep_every: int | None,
    budget: int | None,
    yes: bool,
    grace: float,
    lease_url: str | None,
) -> None:
    """Remove data of STORE that nothing needs.

    Always kept: manifests; the newest chain; what leases of followers, channels and tags need; each with its chain
    back to an anchor. Without --keep, --keep-every or --budget, nothing else. A run with --yes declares data gone and
    removes what an earlier run declared, so run it twice, or from cron.

    \b
      deltackpt prune /mnt/fs/run7 --keep 100 --keep-every 500
      deltackpt prune /mnt/fs/run7 --budget 2TB --yes
    """
    from deltackpt.prune import prune_store

    leases = _open(lease_url) if lease_url is not None else None
    with _stage(f"looking at {store}"):
        report = prune_store(
            _open(store), keep=keep, keep_every=keep_every, budget=budget, dry_run=not yes, grace_s=grace,
            lease_store=leases,
        )  # fmt: skip
    fields = {
        "store": store, "dry_run": report.dry_run, "bytes_kept": report.kept, "bytes_removable": report.removable,
        "bytes_removed": report.removed, "litter": report.litter, "bytes_over_budget": report.over,
        "due_s": report.due_s, "data": [asdict(r) for r in report.rows],
    }  # fmt: skip
    output.result(fields, "\n".join(_prune_lines(store, report, grace)))


def _prune_lines(store: str, report: PruneReport, grace: float) -> Iterator[str]:
    runs = list(_runs([r for r in report.rows if r.nbytes or r.state != "removed"]))
    if runs:
        head = ("VERSIONS", "DATA", "SIZE")
        table = columns([head, *((_span(run), run[0].kind, size(sum(r.nbytes for r in run))) for run in runs)])
        words = ["STATE", *(f"{run[0].state:<9}  {', '.join(run[0].why)}".rstrip() for run in runs)]
        yield from (f"{line}  {word}" for line, word in zip(table.split("\n"), words, strict=True))
    wait = "" if report.due_s is None else f", the oldest {f'in {age(report.due_s)}' if report.due_s else 'now'}"
    if report.dry_run:
        yield f"{store}: {size(report.kept)} kept, {size(report.removable)} not needed{wait}; nothing was changed"
        if report.removable or report.litter:
            yield f"--yes declares it gone, and a run {age(grace)} later removes it"
    else:
        later = f", {size(report.removable)} declared, to be removed by a later run{wait}" if report.removable else ""
        yield f"{store}: {size(report.removed)} removed{later}; {size(report.kept)} kept"
    if report.litter:
        verb = "left" if report.dry_run else "removed, left"
        yield f"{count(report.litter, 'file')} {verb} by attempts that lost or died"
    if report.over:
        yield f"{size(report.over)} over the budget is needed; a newer anchor may free some: deltackpt anchor {store}"


def _runs(rows: list[Row]) -> Iterator[list[Row]]:
    """Join neighbours of one kind and fate."""
    open_runs: dict[str, list[Row]] = {}
    done: list[list[Row]] = []
    for row in rows:
        run = open_runs.get(row.kind)
        if run is None or (run[-1].state, run[-1].why) != (row.state, row.why):
            open_runs[row.kind] = run = []
            done.append(run)
        run.append(row)
    yield from done


def _span(run: list[Row]) -> str:
    first, last = run[0].version, run[-1].version
    return str(first) if first == last else f"{first}-{last}"


# ---------------------------------------------------------------- tag


@click.command()
@click.argument("store", type=_PATH)
@click.argument("name", required=False)
@click.argument("version", type=click.IntRange(min=0), required=False)
@click.option("--delete", is_flag=True, help="Remove the tag; the version may then be pruned.")
@_storage_option
@_single_writer_option
@_json_option
@click.pass_obj
def tag(output: Output, store: str, name: str | None, version: int | None, delete: bool) -> None:
    """Name a VERSION of STORE that is never pruned.

    Without VERSION the newest one; without NAME, list the tags. A tag does not move: remove it, and set it again.

    \b
      deltackpt tag /mnt/fs/run7 best-eval 4200
      deltackpt tag /mnt/fs/run7
      deltackpt tag /mnt/fs/run7 best-eval --delete
    """
    from deltackpt.prune import delete_tag, set_tag, tags

    opened = _open(store)
    if name is None:
        if delete:
            raise click.UsageError("--delete needs the name of a tag.")
        found = tags(opened)
        lines = [f"{n}  version {v}" for n, v in sorted(found.items())]
        output.result({"store": store, "tags": found}, "\n".join(lines) or f"{store}: no tag")
    elif delete:
        if version is not None:
            raise click.UsageError("--delete takes no version.")
        delete_tag(opened, name)
        output.result({"store": store, "tag": name, "version": None}, f"{store}: tag {name} removed")
    else:
        at = set_tag(opened, name, version)
        output.result({"store": store, "tag": name, "version": at}, f"{store}: tag {name} is version {at}")


# ---------------------------------------------------------------- mirror


class _Terminated(BaseException):
    """SIGTERM came: what is being written is taken back, the next run goes on from there."""


@contextmanager
def _terminable() -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command()
@click.argument("src", type=_PATH)
@click.argument("dst", type=_PATH)
@click.option("--watch", is_flag=True, help="Go on, until SIGTERM: copy each version as it comes.")
@click.option(
    "--poll", type=click.FloatRange(min=0.05), default=5.0, show_default=True, metavar="S",
    help="Seconds between two looks for a new version, with --watch.",
)  # fmt: skip
@click.option(
    "--from", "start", type=_From(), metavar="VERSION|newest",
    help="Begin an empty DST with the newest anchor at or before this version. [default: with all that SRC has]",
)  # fmt: skip
@click.option(
    "--dst-option", "dst_options", multiple=True, callback=_pairs, metavar="KEY=VALUE",
    help="How to reach DST where it is not as SRC is, which goes by --storage-option; may be given several times. "
    "[default: as SRC]",
)  # fmt: skip
@_lease_url_option
@_threads_option
@_storage_option
@_single_writer_option
@_json_option
@click.pass_obj
def mirror(
    output: Output,
    src: str,
    dst: str,
    watch: bool,
    poll: float,
    start: Start,
    dst_options: dict[str, str],
    lease_url: str | None,
    threads: int | None,
) -> None:
    """Copy new versions from the store SRC to the store DST.

    DST becomes a store of its own, with the same versions, byte for byte; what comes later than its first anchor comes
    as deltas. Everything is checked on the way. Run it again to go on; runs may overlap.

    \b
      deltackpt mirror /mnt/fs/run7 /mnt/other/run7
      deltackpt mirror /mnt/fs/run7 /mnt/other/run7 --from newest --watch
      deltackpt mirror s3://here/run7 s3://there/run7 --dst-option region=eu-central-1 --dst-option profile=there
    """
    import logging

    from deltackpt.mirror import Mirror

    leases = _open(lease_url) if lease_url is not None else None
    log = logging.getLogger("deltackpt")
    job = Mirror(
        _open(src), _open(dst, dst_options or None), start=start, lease_store=leases, threads=threads, say=log.warning
    )  # fmt: skip
    if not watch:
        with _stage(f"mirroring {src}"):
            report = job.once()
        output.result({"src": src, "dst": dst, **asdict(report)}, f"{dst}: {_mirror_words(report)}")
        return
    copied, nbytes, head = 0, 0, None

    def done(report: MirrorReport) -> None:
        nonlocal copied, nbytes, head
        copied, nbytes, head = copied + len(report.versions), nbytes + report.nbytes, report.head
        log.info("%s: %s", dst, _mirror_words(report))

    try:
        with _terminable():
            job.watch(threading.Event(), poll_s=poll, done=done)
    except _Terminated:
        fields = {"src": src, "dst": dst, "head": head, "copied": copied, "nbytes": nbytes}
        output.result(fields, f"{dst}: stopped after {count(copied, 'version')}, {size(nbytes)} copied")


def _mirror_words(report: MirrorReport) -> str:
    if report.head is None:
        return "SRC has no version yet"
    if not report.versions:
        return f"at version {report.head} already"
    facts = [count(len(report.versions), "version"), f"{size(report.nbytes)} copied"]
    if report.without_data:
        facts.append(f"{count(len(report.without_data), 'version')} without data")
    facts += [f"from the anchor of version {v}" for v in report.anchors]
    return f"at version {report.head} ({', '.join(facts)})"
