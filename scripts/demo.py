"""The demo: one process trains and publishes every step, another follows, every byte is compared.

Run by ./scripts/demo. Weights pass through the store alone; the trainer saves its own copy of each
version elsewhere, only to be compared with, and removes it.
"""

import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from deltackpt import Manifest

# Long enough for a slow machine to load torch and compile kernels.
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Applied:
    """What the follower reports of one version; a problem ends the demo."""

    version: int
    apply_ms: float
    problem: str = ""


@dataclass(frozen=True)
class Row:
    """One version as both sides saw it."""

    manifest: "Manifest"
    full_nbytes: int
    publish_ms: float
    applied: Applied

    @property
    def nbytes(self) -> int:
        """What the follower fetched: a full version is a plain copy and has no shards."""
        full = self.manifest.kind == "full"
        return self.full_nbytes if full else self.manifest.totals.stored


@contextmanager
def follower(store: str, saved: Path) -> Iterator[Connection]:
    """Run the second process; what it reports arrives on the connection."""
    # spawn, as fork would copy the trainer's threads' locks in whatever state they are.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=follow, args=(store, saved, theirs), daemon=True)
    child.start()
    # Only the child holds this end now, so that its death is seen here as the end of the pipe.
    theirs.close()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()


def follow(store: str, saved: Path, reports: Connection) -> None:
    """Keep a live model at the newest version: all that the second process does."""
    # Ctrl-C reaches both processes; the trainer ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for applied in applied_versions(store, saved):
            reports.send(applied)
    # The trainer is the one that talks to the person, so everything goes there.
    except Exception as exc:
        reports.send(Applied(-1, 0.0, f"follower: {type(exc).__name__}: {exc}"))


def applied_versions(store: str, saved: Path) -> Iterator[Applied]:
    """Apply each version to live tensors and compare them with what the trainer saved."""
    import torch
    from finetune import model_folder
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    from deltackpt import Follower, TensorTarget

    # Random weights: every byte that is right afterwards has come through the store.
    model = BertModel(BertConfig.from_pretrained(model_folder())).bfloat16()
    live = model.state_dict()
    source = Follower(store, TensorTarget(live))
    while (prepared := source.prepare(wait_s=PATIENCE_S)) is not None:
        start = time.perf_counter()
        version = prepared.apply()
        apply_ms = (time.perf_counter() - start) * 1e3
        truth = load_file(saved / f"{version}.safetensors")
        if truth.keys() != live.keys():
            yield Applied(version, apply_ms, f"version {version} has other tensors")
        for name, tensor in truth.items():
            if not torch.equal(tensor.view(torch.uint8), live[name].view(torch.uint8)):
                yield Applied(version, apply_ms, f"version {version} differs in {name}")
        yield Applied(version, apply_ms)


def train(store: str, saved: Path, *, steps: int, lr: float) -> list[Row]:
    """Fine-tune, publish each step, and wait until the follower has compared it."""
    from finetune import finetune
    from safetensors.torch import save_file

    from deltackpt import Publisher

    rows: list[Row] = []
    with ExitStack() as stack:
        publisher = stack.enter_context(closing(Publisher(store, run_id="demo")))
        reports = None
        for step, (weights, loss) in enumerate(finetune(steps, lr=lr)):
            # A fresh store counts its versions from 0, as the steps do.
            truth = saved / f"{step}.safetensors"
            save_file(weights, truth)
            start = time.perf_counter()
            manifest = publisher.publish(weights, step=step)
            publish_ms = (time.perf_counter() - start) * 1e3
            # Not sooner: before the first version there is nothing to follow.
            if reports is None:
                reports = stack.enter_context(follower(store, saved))
            # Waiting keeps both sides from being timed while the other one computes.
            applied = next_report(reports)
            if not applied.problem and applied.version != manifest.version:
                raise DemoError(f"follower is at {applied.version}, not at {manifest.version}")
            truth.unlink()
            full_nbytes = sum(tensor.nbytes for tensor in weights.values())
            rows.append(Row(manifest, full_nbytes, publish_ms, applied))
            what = "pretrained" if loss is None else f"loss {loss:.3f}"
            click.echo(f"step {step:2}  {what:10}  version {manifest.version}: follower identical")
    return rows


class DemoError(Exception):
    """The demo did not show what it is there to show."""


def next_report(reports: Connection) -> Applied:
    """Wait for the follower; raise for whatever keeps it from being identical."""
    if not reports.poll(PATIENCE_S):
        raise DemoError(f"the follower said nothing for {PATIENCE_S:.0f} s")
    try:
        applied = reports.recv()
    except EOFError:
        raise DemoError("the follower process died") from None
    assert isinstance(applied, Applied)
    if applied.problem:
        raise DemoError(applied.problem)
    return applied


def show(rows: Sequence[Row], store: str) -> None:
    """Print the table and how to go on."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="one delta a step")
    for heading in (
        "version", "changed %", "bytes", "ratio to full", "bytes per\nchanged value",
        "publish\nms", "apply\nms",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        totals = row.manifest.totals
        delta = row.manifest.kind == "delta"
        table.add_row(
            str(row.manifest.version),
            f"{100 * totals.changed / totals.elements:.3f}" if delta else row.manifest.kind,
            f"{row.nbytes:,}",
            f"1 : {row.full_nbytes / row.nbytes:.0f}" if row.nbytes else "-",
            f"{row.nbytes / totals.changed:.2f}" if delta else "-",
            f"{row.publish_ms:.0f}",
            f"{row.applied.apply_ms:.1f}",
        )
    Console().print(table)
    moved = sum(row.nbytes for row in rows[1:])
    full = sum(row.full_nbytes for row in rows[1:])
    click.echo(
        f"{len(rows)} versions, in the follower byte for byte what the trainer saved.\n"
        f"{len(rows) - 1} deltas: {moved / 1e6:.1f} MB; as full copies: {full / 1e6:.0f} MB.\n"
        f"The store is {store}; go on with:\n  .venv/bin/deltackpt log {store}"
    )


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--lr", type=float, default=1e-6, show_default=True, help="AdamW's learning rate.")
@click.option("--store", type=Path, help="A new or empty folder; by default a temporary one.")
def main(steps: int, lr: float, store: Path | None) -> None:
    """Fine-tune a small real model, publish every step, follow it from a second process."""
    from deltackpt import DeltaError

    if store is None:
        store = Path(tempfile.mkdtemp(prefix="deltackpt-demo-")) / "store"
    elif store.exists() and (not store.is_dir() or any(store.iterdir())):
        raise click.UsageError(f"{store} is not empty; the demo wants a new store")
    url = str(store.absolute())
    click.echo(f"store: {url}\nloading the model")
    try:
        with tempfile.TemporaryDirectory(prefix="deltackpt-saved-") as saved:
            rows = train(url, Path(saved), steps=steps, lr=lr)
    except (DeltaError, DemoError, OSError) as exc:
        raise click.ClickException(str(exc)) from exc
    show(rows, url)


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as exc:
        sys.exit(f"Error: {exc}; ./scripts/demo makes the environment that has it")
