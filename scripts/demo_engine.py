"""The demo with a sampler that generates: a causal language model in one process, its trainer in another.

Run by ./scripts/demo --engine transformers. The sampler generates all the time; `Follower.run` stages each version
beside it and stops it only to apply. After every version its logits are compared, bit for bit, with those of a model
that was freshly loaded from what the trainer saved. The weights are random: what is shown is that they arrive.
"""

import multiprocessing
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from finetune import SENTENCES  # before transformers is loaded: it keeps it from asking a hub

from deltackpt.errors import DeltaError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from deltackpt import Manifest

PATIENCE_S = 180.0
_TURN, _LENGTH = 8, 64
"""Tokens between two moments at which weights may change; tokens of a sequence, then another one is begun."""


class EngineError(Exception):
    """The sampler did not end where the trainer is."""


@dataclass(frozen=True)
class Sampled:
    """What the sampler reports of one version. tokens: generated since the version before; a problem ends the demo."""

    version: int
    tokens: int
    staged: int
    pause_ms: float
    problem: str = ""


def new_model(seed: int, dtype: str = "bfloat16") -> "LlamaForCausalLM":
    """Return a small causal language model with random weights and a tied head."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # One for each process, so that they do not wait for each other on two cores.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    # Made in its dtype: a cast afterwards also rounds buffers that no checkpoint holds, and a fresh load does not.
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    # Untyped in transformers.
    model: LlamaForCausalLM = LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    model.eval()
    return model


def probe() -> "Tensor":
    """Return the tokens on which logits are compared: bytes of a sentence."""
    import torch

    return torch.tensor([list(SENTENCES[0].encode())])


# ---------------------------------------------------------------- the sampler


class Sampler:
    """Generates until it is stopped; the one lock is held for a few tokens, or for an apply."""

    def __init__(self, model: "LlamaForCausalLM") -> None:
        self.model, self.tokens = model, 0
        self._turn = threading.Lock()
        self._paused = 0.0

    def generate(self, stop: threading.Event) -> None:
        """Generate text, a few tokens a turn: keys and values are of one version always."""
        import torch

        tokens = probe()[:, :1]
        while not stop.is_set():
            with self._turn:
                tokens = self.model.generate(
                    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=_TURN, do_sample=True,
                    pad_token_id=0, eos_token_id=None,
                )  # fmt: skip
                self.tokens += _TURN
            if tokens.shape[1] >= _LENGTH:
                tokens = probe()[:, :1]
            # A lock is not fair: without this the one who waits to apply might wait for long.
            time.sleep(0)

    def pause(self, _version: int) -> None:
        """Return when no token is being computed; none is from then on."""
        self._turn.acquire()
        self._paused = time.perf_counter()

    def resume(self, _version: int) -> float:
        """Let generation go on; returns how long it stood still, in ms."""
        pause_ms = (time.perf_counter() - self._paused) * 1e3
        self._turn.release()
        return pause_ms

    def differs(self, saved: Path) -> str:
        """Say in what the live model differs from one that is freshly loaded; nothing if their logits are equal."""
        import torch
        from transformers import LlamaForCausalLM

        fresh = LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)  # in eval mode, as the live one is
        with self._turn, torch.inference_mode():
            ours, theirs = (m(input_ids=probe(), use_cache=False).logits for m in (self.model, fresh))
        if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
            return f"{int((ours != theirs).sum())} of {ours.numel()} logits differ from a fresh load"
        return ""


def sample(store: str, saved: Path, reports: Connection) -> None:
    """Keep a model that generates at the newest version: all that the second process does."""
    # Ctrl-C reaches both processes; the trainer ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()
    try:
        _sample(store, saved, reports, stop)
    # The trainer is the one that talks to the person, so everything goes there.
    except Exception as exc:
        reports.send(Sampled(-1, 0, 0, 0.0, f"sampler: {type(exc).__name__}: {exc}"))
    finally:
        stop.set()


def _sample(store: str, saved: Path, reports: Connection, stop: threading.Event) -> None:
    from transformers.utils import logging

    from deltackpt import Follower, TensorTarget

    logging.disable_progress_bar()
    # Other random weights than the trainer's: every bit that is right afterwards has come through the store.
    sampler = Sampler(new_model(seed=1))
    seen = at_pause = 0

    def pause(version: int) -> None:
        nonlocal at_pause
        at_pause = sampler.tokens
        sampler.pause(version)

    def resume(version: int) -> None:
        nonlocal seen
        pause_ms = sampler.resume(version)
        problem = sampler.differs(saved / str(version))
        reports.send(Sampled(version, sampler.tokens - seen, at_pause - seen, pause_ms, problem))
        seen = sampler.tokens

    generating = threading.Thread(target=sampler.generate, args=(stop,), daemon=True)
    generating.start()
    # Both names of the tied head are given; their one storage is written once.
    with Follower(store, TensorTarget(sampler.model.state_dict())) as follower:
        prepared = follower.prepare(reseed=True)
        assert prepared is not None, "random weights are no version"
        pause(prepared.version)
        prepared.apply()
        resume(prepared.version)
        follower.run(stop, pause=pause, resume=resume, poll_s=0.05)


@contextmanager
def sampling(store: str, saved: Path) -> Iterator[Connection]:
    """Run the sampler's process; what it reports arrives on the connection."""
    # spawn, as fork would copy the trainer's threads' locks in whatever state they are.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=sample, args=(store, saved, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        child.terminate()
        child.join(10)


# ---------------------------------------------------------------- the trainer


def train(store: str, saved: Path, *, steps: int, lr: float) -> "list[tuple[Manifest, Sampled]]":
    """Train on bytes of the sentences, publish each step, and wait until the sampler has compared its logits."""
    import torch
    from transformers.utils import logging

    from deltackpt import Publisher
    from deltackpt.callbacks import serving_weights

    logging.disable_progress_bar()
    # The trainer works in fp32; what is published is its rounding to bf16, as an RL trainer does it.
    master, serving = new_model(seed=0, dtype="float32").train(), new_model(seed=0)
    serving.load_state_dict(master.state_dict())
    optimizer = torch.optim.AdamW(master.parameters(), lr=lr)
    width = min(len(s) for s in SENTENCES)
    batch = torch.tensor([list(s.encode()[:width]) for s in SENTENCES])
    rows = []
    with closing(Publisher(store, run_id="demo")) as publisher, _later() as begin:
        for step in range(steps + 1):
            loss = None
            if step:
                loss = master(input_ids=batch, labels=batch).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                serving.load_state_dict(master.state_dict())
            serving.save_pretrained(saved / str(step))
            manifest = publisher.publish(serving_weights(serving), step=step)
            # Not sooner: before the first version there is nothing to follow.
            report = _report(begin(lambda: sampling(store, saved)))
            if report.version != manifest.version:
                raise EngineError(f"the sampler is at {report.version}, not at {manifest.version}")
            rows.append((manifest, report))
            what = "random weights" if loss is None else f"loss {loss.item():.3f}"
            click.echo(f"step {step:2}  {what:14}  version {manifest.version}: logits as of a fresh load")
    return rows


@contextmanager
def _later() -> "Iterator[Callable[[Callable[[], Any]], Connection]]":
    """Yield what enters a context at its first call and leaves it at the end."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        entered: list[Connection] = []

        def begin(make: Callable[[], Any]) -> Connection:
            if not entered:
                entered.append(stack.enter_context(make()))
            return entered[0]

        yield begin


def _report(reports: Connection) -> Sampled:
    if not reports.poll(PATIENCE_S):
        raise EngineError(f"the sampler said nothing for {PATIENCE_S:.0f} s")
    try:
        report = reports.recv()
    except EOFError:
        raise EngineError("the sampler's process died") from None
    assert isinstance(report, Sampled)
    if report.problem:
        raise EngineError(f"version {report.version}: {report.problem}")
    return report


def show(rows: "Sequence[tuple[Manifest, Sampled]]") -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="a sampler that generates all the time")
    for heading in ("version", "changed %", "bytes", "tokens since\nthe one before", "generation\nstood still, ms"):
        table.add_column(heading, justify="right")
    for manifest, report in rows:
        totals, delta = manifest.totals, manifest.kind == "delta"
        table.add_row(
            str(manifest.version), f"{100 * totals.changed / totals.elements:.3f}" if delta else manifest.kind,
            f"{totals.stored if delta else totals.raw:,}", str(report.staged), f"{report.pause_ms:.1f}",
        )  # fmt: skip
    Console().print(table)
    click.echo(f"{len(rows)} versions; after each, all logits were bit for bit those of a fresh load.")


def through_transformers(*, steps: int, lr: float) -> None:
    """Run the demo in temporary folders, which are removed."""
    with tempfile.TemporaryDirectory(prefix="deltackpt-demo-") as work:
        try:
            rows = train(str(Path(work) / "store"), Path(work) / "saved", steps=steps, lr=lr)
        except DeltaError as exc:
            raise EngineError(str(exc)) from exc
    show(rows)
