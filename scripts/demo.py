"""The demo: one process trains and publishes every step, another follows, every byte is compared.

Run by ./scripts/demo. Weights pass through the store alone; the trainer saves its own copy of each
version elsewhere, only to be compared with, and removes it. With --s3 the store is a bucket of a real
S3 server on this host, and `deltackpt watch` keeps a folder as a third process, which dies once.
"""

import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from deltackpt import Manifest

# Long enough for a slow machine to load torch and compile kernels.
PATIENCE_S = 120.0


class DemoError(Exception):
    """The demo did not show what it is there to show."""


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


def train(store: str, saved: Path, *, steps: int, lr: float, sidecar: "Sidecar | None" = None) -> list[Row]:
    """Fine-tune, publish each step, and wait until the follower has compared it. The last copy stays in `saved`."""
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
            if sidecar is not None:
                sidecar.published(manifest.version)
            # Waiting keeps both sides from being timed while the other one computes.
            applied = next_report(reports)
            if not applied.problem and applied.version != manifest.version:
                raise DemoError(f"follower is at {applied.version}, not at {manifest.version}")
            if step < steps:
                truth.unlink()
            full_nbytes = sum(tensor.nbytes for tensor in weights.values())
            rows.append(Row(manifest, full_nbytes, publish_ms, applied))
            what = "pretrained" if loss is None else f"loss {loss:.3f}"
            click.echo(f"step {step:2}  {what:10}  version {manifest.version}: follower identical")
    return rows


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


# ---------------------------------------------------------------- a bucket, and a process that is killed


def deltackpt(*arguments: str) -> list[str]:
    """Return a command line of this environment's deltackpt."""
    return [sys.executable, "-m", "deltackpt", *arguments]


class Sidecar:
    """`deltackpt watch` on a folder: killed while version `killed` comes in, started again `missed` versions later."""

    def __init__(self, store: str, work: Path, *, steps: int) -> None:
        self.store, self.dest, self._log = store, work / "folder", work / "watch.log"
        self.killed = (steps + 1) // 2
        self.back = min(steps, self.killed + 2)
        self._process: subprocess.Popen[bytes] | None = None
        self._while = "had nothing to do"
        self._return_s = 0.0

    def published(self, version: int) -> None:
        """Do what is due when a version has been published."""
        if version == 0:
            self._start()
        if version == self.killed - 1:
            self._reach(version)
        if version == self.killed:
            self._kill(version)
        if version == self.back:
            self._start()
            start = time.perf_counter()
            self._reach(version)
            self._return_s = time.perf_counter() - start

    def _start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                deltackpt("watch", self.store, str(self.dest), "--poll", "0.2", "--log", "json"),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _events(self) -> list[dict[str, Any]]:
        # The last line may still be on its way.
        lines = self._log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def _applies(self) -> list[dict[str, Any]]:
        return [event for event in self._events() if event["event"] == "applied"]

    def _reach(self, version: int) -> None:
        """Wait until the folder is at a version."""
        assert self._process is not None
        deadline = time.monotonic() + PATIENCE_S
        while not any(event["version"] == version for event in self._applies()):
            if self._process.poll() is not None:
                raise DemoError(f"deltackpt watch ended with {self._process.returncode}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise DemoError(f"deltackpt watch is not at version {version} after {PATIENCE_S:.0f} s")
            time.sleep(0.02)

    def _last_words(self) -> str:
        return self._log.read_text().strip().rpartition("\n")[2]

    def _staging(self) -> bool:
        return any((self.dest / ".deltackpt").glob("stage-*"))

    def _kill(self, version: int) -> None:
        """Send SIGKILL as soon as the version is being staged."""
        assert self._process is not None
        deadline = time.monotonic() + PATIENCE_S
        while not self._staging() and time.monotonic() < deadline:
            if any(event["version"] == version for event in self._applies()):
                break  # too fast to be caught
            time.sleep(0.001)
        self._process.kill()
        self._process.wait()
        # What it left is proof: nothing else can have removed or made it since.
        if self._staging():
            self._while = f"was staging version {version}"
        click.echo(f"deltackpt watch: killed (SIGKILL) while it {self._while}")

    def finish(self, version: int, truth: Path) -> str:
        """End the process in order, compare the folder; returns the line about the kill."""
        self._reach(version)
        assert self._process is not None
        self._process.terminate()
        if self._process.wait(PATIENCE_S):
            raise DemoError(f"deltackpt watch ended with {self._process.returncode}: {self._last_words()}")
        if self._staging():
            raise DemoError("deltackpt watch left what it had staged")
        require_equal(self.dest / "current", truth)
        run(deltackpt("verify", str(self.dest / "current"), "--against", self.store))
        applies = self._applies()
        back = next(event for event in applies if event["version"] == self.back)
        deltas = f"{back['deltas']} delta{'s' if back['deltas'] != 1 else ''}"
        return (
            f"deltackpt watch was killed (SIGKILL) while it {self._while}, started again at version {self.back}, and "
            f"went from {back['previous']} to {self.back} in one apply of {deltas} within {self._return_s:.1f} s; "
            f"its folder at version {version} is identical too, by deltackpt verify --against."
        )

    def close(self) -> None:
        """End the process, however it is."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def run(command: Sequence[str]) -> None:
    """Run a command that must succeed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise DemoError(f"{' '.join(command[2:4])} did not end within {PATIENCE_S:.0f} s") from None
    if done.returncode:
        raise DemoError(f"{' '.join(command[2:4])} ended with {done.returncode}: {done.stderr.strip()}")


def require_equal(folder: Path, truth: Path) -> None:
    """Compare every byte of every tensor of a checkpoint folder with what the trainer saved."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    wanted = load_file(truth)
    if found.keys() != wanted.keys():
        raise DemoError("the folder has other tensors")
    for name, tensor in wanted.items():
        if not torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8)):
            raise DemoError(f"the folder differs in {name}")


def through_s3(*, steps: int, lr: float) -> None:
    """Run the demo against SeaweedFS with both followers; everything is removed at the end."""
    from weed import BUCKET, environment, seaweedfs

    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltackpt-demo-")))
        saved = work / "saved"
        saved.mkdir()
        endpoint = stack.enter_context(seaweedfs(work / "weed"))
        stack.enter_context(environment(endpoint, work / "state"))
        store = f"s3://{BUCKET}/demo"
        click.echo(f"store: {store} of SeaweedFS at {endpoint}\nloading the model")
        sidecar = stack.enter_context(closing(Sidecar(store, work, steps=steps)))
        rows = train(store, saved, steps=steps, lr=lr, sidecar=sidecar)
        line = sidecar.finish(steps, saved / f"{steps}.safetensors")
        run(deltackpt("verify", store))
    show(rows)
    click.echo(line)


# ---------------------------------------------------------------- the end


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
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
        f"{len(rows) - 1} deltas: {moved / 1e6:.1f} MB; as full copies: {full / 1e6:.0f} MB."
    )


def through_folder(store: Path | None, *, steps: int, lr: float) -> None:
    """Run the demo in a folder, which stays."""
    if store is None:
        store = Path(tempfile.mkdtemp(prefix="deltackpt-demo-")) / "store"
    elif store.exists() and (not store.is_dir() or any(store.iterdir())):
        raise click.UsageError(f"{store} is not empty; the demo wants a new store")
    url = str(store.absolute())
    click.echo(f"store: {url}\nloading the model")
    with tempfile.TemporaryDirectory(prefix="deltackpt-saved-") as saved:
        rows = train(url, Path(saved), steps=steps, lr=lr)
    show(rows)
    click.echo(f"The store is {url}; go on with:\n  .venv/bin/deltackpt log {url}")


def _end(_number: int, _frame: object) -> None:
    raise DemoError("ended by SIGTERM")


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--lr", type=float, default=1e-6, show_default=True, help="AdamW's learning rate.")
@click.option("--store", type=Path, help="A new or empty folder; by default a temporary one.")
@click.option("--s3", is_flag=True, help="Through a real S3 server on this host, with a watcher that is killed once.")
@click.option("--engine", type=click.Choice(("transformers",)), help="The second process generates text all the time.")
def main(steps: int, lr: float, store: Path | None, s3: bool, engine: str | None) -> None:
    """Fine-tune a small real model, publish every step, follow it from a second process."""
    from demo_engine import EngineError, through_transformers
    from weed import NotStarted

    from deltackpt import DeltaError

    if s3 and store is not None:
        raise click.UsageError("--s3 has its own store; leave --store out")
    if engine is not None and (s3 or store is not None):
        raise click.UsageError("--engine has its own store; leave --store and --s3 out")
    # So that what was started is stopped.
    signal.signal(signal.SIGTERM, _end)
    try:
        if engine is not None:
            through_transformers(steps=steps, lr=lr)
        elif s3:
            through_s3(steps=steps, lr=lr)
        else:
            through_folder(store, steps=steps, lr=lr)
    except (DeltaError, DemoError, EngineError, NotStarted, OSError) as exc:
        raise click.ClickException(str(exc)) from exc


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as exc:
        sys.exit(f"Error: {exc}; ./scripts/demo makes the environment that has it")
