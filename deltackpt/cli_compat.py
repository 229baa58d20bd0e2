"""Commands that speak the wire format of others: export, import. Imported when one of them is used."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from deltackpt.cli import (
    _PATH,
    Output,
    _json_option,
    _open,
    _single_writer_option,
    _stage,
    _storage_option,
    _text,
    _threads_option,
    count,
    size,
)
from deltackpt.cli_store import _From, _terminable, _Terminated

if TYPE_CHECKING:
    from deltackpt.export import ExportReport, Start
    from deltackpt.ingest import ImportReport
    from deltackpt.weightv import Encoding

_format_option = click.option(
    "--format", "format_", type=click.Choice(("weight-v",)), default="weight-v", show_default=True, expose_value=False,
    help="Wire format of the folders: that of slime, miles and SGLang's /pull_weights.",
)  # fmt: skip
_watch_option = click.option("--watch", is_flag=True, help="Go on, until SIGTERM: take each version as it comes.")
_poll_option = click.option(
    "--poll", type=click.FloatRange(min=0.05), default=5.0, show_default=True, metavar="S",
    help="Seconds between two looks for a new version, with --watch.",
)  # fmt: skip
_log = logging.getLogger("deltackpt")


@click.command()
@click.argument("store", type=_PATH)
@click.argument("folder", type=_PATH, metavar="DIR")
@_format_option
@click.option(
    "--encoding", type=click.Choice(("xor", "overwrite")), default="xor", show_default=True,
    help="What a delta holds: new XOR old, or positions and new bytes.",
)  # fmt: skip
@click.option(
    "--from", "start", type=_From(), metavar="VERSION|newest",
    help="Begin an empty DIR with a full copy of this version, and go on so where versions were pruned.",
)  # fmt: skip
@_watch_option
@_poll_option
@_threads_option
@_storage_option
@_json_option
@click.pass_obj
def export(
    output: Output,
    store: str,
    folder: str,
    encoding: Encoding,
    start: Start,
    watch: bool,
    poll: float,
    threads: int | None,
) -> None:
    """Republish STORE as folders DIR/weight_v<version>, for readers of slime, miles and SGLang.

    Each version keeps its number. Readers begin with version 0 as their own checkpoint (deltackpt pull STORE CKPT
    --version 0), or with a full folder. Run it again to go on. It holds one copy of the weights in memory.

    \b
      deltackpt export /mnt/fs/run7 /mnt/fs/run7-weights --format weight-v
      deltackpt export /mnt/fs/run7 /mnt/fs/run7-weights --from newest --watch
    """
    from deltackpt.export import Exporter

    job = Exporter(_open(store), folder, encoding=encoding, start=start, threads=threads, say=_log.warning)
    if not watch:
        with _stage(f"exporting {store}"):
            report = job.once()
        output.result({"store": store, "dir": folder, **asdict(report)}, f"{folder}: {_export_words(report)}")
        return
    made, nbytes, head = 0, 0, None

    def done(report: ExportReport) -> None:
        nonlocal made, nbytes, head
        made, nbytes, head = made + len(report.versions), nbytes + report.nbytes, report.head
        _log.info("%s: %s", folder, _export_words(report))

    try:
        with _terminable():
            job.watch(threading.Event(), poll_s=poll, done=done)
    except _Terminated:
        fields = {"store": store, "dir": folder, "head": head, "made": made, "nbytes": nbytes}
        output.result(fields, f"{folder}: stopped after {count(made, 'version')}, {size(nbytes)} written")


def _export_words(report: ExportReport) -> str:
    if report.head is None:
        return "nothing to export yet: readers begin with version 0"
    if not report.versions:
        return f"at version {report.head} already"
    facts = [count(len(report.versions), "version"), f"{size(report.nbytes)} written"]
    facts += [f"version {v} in full" for v in report.full]
    return f"at version {report.head} ({', '.join(facts)})"


@click.command("import")
@click.argument("folder", type=_PATH, metavar="DIR")
@click.argument("store", type=_PATH)
@_format_option
@click.option("--base", type=_PATH, metavar="CKPT", help="Checkpoint that the first delta builds on; needed once.")
@click.option(
    "--run-id", envvar="DELTACKPT_RUN_ID", show_envvar=True, callback=_text,
    help="Name of the training run; the same name goes on with a stream, another one is refused.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with a store that another run or host has written.")
@click.option("--new-lineage", is_flag=True, help="DIR was begun again: start with a full version; followers reseed.")
@_watch_option
@_poll_option
@_threads_option
@_storage_option
@_single_writer_option
@_json_option
@click.pass_obj
def import_(
    output: Output,
    folder: str,
    store: str,
    base: str | None,
    run_id: str | None,
    resume: bool,
    new_lineage: bool,
    watch: bool,
    poll: float,
    threads: int | None,
) -> None:
    """Publish the folders DIR/weight_v<version> of slime or miles as versions of STORE.

    Each becomes one version, with its number as the step, once it is proven; where one is damaged, or not the next,
    STORE ends before it. Run it again to go on. It holds two copies of the weights in memory.

    \b
      deltackpt import /mnt/fs/slime-deltas /mnt/fs/run7 --base /models/base
      deltackpt import /mnt/fs/slime-deltas /mnt/fs/run7 --watch
    """
    from deltackpt.ingest import Importer

    job = Importer(
        folder, _open(store), base=base, run_id=run_id, resume=resume, new_lineage=new_lineage, threads=threads,
        say=_log.warning,
    )  # fmt: skip
    if not watch:
        with _stage(f"importing {folder}"):
            report = job.once()
            job.close()
        output.result({"dir": folder, "store": store, **asdict(report)}, f"{store}: {_import_words(report)}")
        return
    taken, head = 0, None

    def done(report: ImportReport) -> None:
        nonlocal taken, head
        taken, head = taken + len(report.imported), report.head
        _log.info("%s: %s", store, _import_words(report))

    try:
        with _terminable():
            job.watch(threading.Event(), poll_s=poll, done=done)
    except _Terminated:
        fields = {"dir": folder, "store": store, "head": head, "taken": taken}
        output.result(fields, f"{store}: stopped after {count(taken, 'folder')}")


def _import_words(report: ImportReport) -> str:
    if report.head is None:
        return "nothing to import yet"
    if not report.imported:
        return f"at weight_v{report.head:06d} already"
    return f"at weight_v{report.head:06d} ({count(len(report.imported), 'folder')} imported)"
