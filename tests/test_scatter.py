"""Scatter plans: where a loader puts weights is found by content, followed in place, and refused where it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers import DEVICE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltackpt.errors import ChainError, ConfigError, DeltaError, IntegrityError, Poisoned
from deltackpt.follow import Follower
from deltackpt.ids import ALPHABETS, Planes
from deltackpt.layout import Layout
from deltackpt.live import Live
from deltackpt.places import Numbering, Runs, compress, runs_of
from deltackpt.planned import PlannedTarget, StagedPlan
from deltackpt.plans import ScatterPlan, load_plan, save_plan
from deltackpt.publish import Publisher
from deltackpt.scatter import cached_plan, make_plan
from deltackpt.tensors import describe
from deltackpt.through import Located

torch = pytest.importorskip("torch")
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
nn = torch.nn

Tensors = dict[str, Any]
Weights = Iterable[tuple[str, Any]]

BF16, F32, F8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("memory")


@pytest.fixture(params=["address", "torch"] if DEVICE == "cpu" else ["torch"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How live memory is reached: on a CPU also as if it were a device's."""
    if request.param == "torch":
        monkeypatch.setattr("deltackpt.memory.BY_ADDRESS", frozenset())
    return str(request.param)


def zeros(*shape: Any, **options: Any) -> Any:
    return torch.zeros(*shape, device=DEVICE, **options)


def refused(error: type[DeltaError], text: str, action: Callable[..., object], *given: Any, **options: Any) -> None:
    with pytest.raises(error) as caught:
        action(*given, **options)
    assert text in str(caught.value)


def layout_of(checkpoint: Tensors) -> Layout:
    described = [describe(n, t) for n, t in checkpoint.items()]
    return Layout(list(checkpoint), [d for d, _ in described], [s for _, s in described])


def values(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    made = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(made.random(shape) < 0.5)
    if dtype.is_floating_point:
        return torch.from_numpy(made.normal(size=shape)).to(dtype)
    return torch.from_numpy(made.integers(0, 127, size=shape)).to(dtype)


class Engine(nn.Module):  # type: ignore[misc, name-defined]  # torch is not typed here
    """Parameters, and a loader that copies a checkpoint into them in its own way."""

    checkpoint: ClassVar[dict[str, tuple[tuple[int, ...], Any]]]

    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def load(self, weights: Weights) -> None:
        for name, weight in weights:
            self.put(name, weight)

    def put(self, name: str, weight: Any) -> None:
        raise NotImplementedError

    def version(self, seed: int) -> Tensors:
        return {n: values(seed * 100 + i, s, d) for i, (n, (s, d)) in enumerate(self.checkpoint.items())}


class Fused(Engine):
    """QKV of one matrix, with a bias; gate and up of another."""

    checkpoint: ClassVar = {
        "q": ((8, 16), BF16), "k": ((4, 16), BF16), "v": ((4, 16), BF16), "gate": ((12, 16), BF16),
        "up": ((12, 16), BF16), "q_bias": ((8,), BF16),
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__(qkv=zeros(16, 16, dtype=BF16), up_gate=zeros(24, 16, dtype=BF16), bias=zeros(16, dtype=BF16))

    def put(self, name: str, weight: Any) -> None:
        if name == "q_bias":
            self.bias[:8] = weight
        elif name in ("gate", "up"):
            self.up_gate[12 * (name == "gate") :][:12].copy_(weight)
        else:
            begin = {"q": 0, "k": 8, "v": 12}[name]
            self.qkv[begin : begin + len(weight)].copy_(weight)


class Experts(Engine):
    """Experts stacked, gate beside up, each transposed."""

    checkpoint: ClassVar = {
        f"{e}.{n}": ((6, 8) if n != "down" else (8, 6), BF16) for e in range(3) for n in ("gate", "up", "down")
    }

    def __init__(self) -> None:
        super().__init__(w13=zeros(3, 8, 12, dtype=BF16), w2=zeros(3, 6, 8, dtype=BF16))

    def put(self, name: str, weight: Any) -> None:
        expert, kind = name.split(".")
        if kind == "down":
            self.w2[int(expert)].copy_(weight.t())
        else:
            self.w13[int(expert)][:, 6 * (kind == "up") :][:, :6].copy_(weight.t())


class Shuffled(Engine):
    """Rows in another order, rows of two matrices in turns, columns backwards."""

    checkpoint: ClassVar = {"a": ((16, 8), BF16), "gate": ((6, 8), F32), "up": ((6, 8), F32), "back": ((5, 7), F32)}

    def __init__(self) -> None:
        super().__init__(a=zeros(16, 8, dtype=BF16), both=zeros(6, 2, 8, dtype=F32), back=zeros(5, 7, dtype=F32))

    def put(self, name: str, weight: Any) -> None:
        if name == "a":
            self.a.copy_(weight[torch.from_numpy(np.random.default_rng(1).permutation(16))])
        elif name == "back":
            self.back.copy_(weight.flip(1))
        else:
            self.both[:, int(name == "up")].copy_(weight)


class Blocks(Engine):
    """Block-major weights, scales in the order of 128 x 4 tiles, 8-bit weights held as 32-bit words."""

    checkpoint: ClassVar = {
        "w": ((32, 64), BF16), "scale": ((256, 8), torch.uint8), "packed": ((16, 64), F8),
        "zero": ((16, 4), torch.int32),
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__(
            w=zeros(4, 8, 8, 8, dtype=BF16),
            scale=zeros(2, 2, 32, 4, 4, dtype=torch.uint8),
            packed=zeros(16, 16, dtype=torch.int32),
            zero=zeros(4, 16, dtype=torch.int32),
        )

    def put(self, name: str, weight: Any) -> None:
        if name == "w":
            self.w.copy_(weight.view(4, 8, 8, 8).transpose(1, 2))
        elif name == "scale":
            self.scale.copy_(weight.view(2, 4, 32, 2, 4).permute(0, 3, 2, 1, 4))
        elif name == "packed":
            self.packed.copy_(weight.contiguous().view(torch.int32))
        else:
            self.zero.copy_(weight.t())


class Vocabulary(Engine):
    """A padded vocabulary; the head shares the memory of the embedding, a third matrix is a copy of it."""

    checkpoint: ClassVar = {"embed": ((21, 8), BF16), "norm": ((8,), F32)}

    def __init__(self) -> None:
        super().__init__(embed=zeros(32, 8, dtype=BF16), norm=zeros(8, dtype=F32))
        self.head = self.embed
        self.register_buffer("draft", zeros(21, 8, dtype=BF16))

    def put(self, name: str, weight: Any) -> None:
        if name == "norm":
            self.norm.copy_(weight)
        else:
            self.embed[:21].copy_(weight)
            self.embed[21:].zero_()
            self.draft.copy_(weight)


class Attributes(Engine):
    """Weights in lists, dicts, objects and closures; one buffer for all, of several widths; a transposed view."""

    checkpoint: ClassVar = {
        "listed": ((3, 4), BF16), "named": ((5,), torch.float16), "held": ((4,), F32), "closed": ((6,), torch.float64),
        "mask": ((9,), torch.bool), "wide": ((6, 4), BF16), "narrow": ((8,), F8), "view": ((4, 6), BF16),
        "integer": ((3,), torch.int64), "empty": ((0, 4), BF16), "scalar": ((), F32),
    }  # fmt: skip

    class Holder:
        def __init__(self) -> None:
            self.held = zeros(4)
            self.scalar = zeros(())

    def __init__(self) -> None:
        super().__init__()
        self.listed = [zeros(3, 4, dtype=BF16)]
        self.named = {"x": (zeros(5, dtype=torch.float16),)}
        self.holder = self.Holder()
        closed = zeros(6, dtype=torch.float64)
        self.forward_closed = lambda: closed
        self.mask = zeros(9, dtype=torch.bool)
        self.integer = zeros(3, dtype=torch.int64)
        self.pool = zeros(64, dtype=torch.uint8)
        self.wide, self.narrow = self.pool[:48].view(BF16).view(6, 4), self.pool[56:].view(F8)
        self.view = nn.Parameter(zeros(6, 4, dtype=BF16).t(), requires_grad=False)

    def put(self, name: str, weight: Any) -> None:
        if name == "empty":
            return
        here = {
            "listed": self.listed[0], "named": self.named["x"][0], "held": self.holder.held,
            "scalar": self.holder.scalar, "closed": self.forward_closed(), "view": self.view,
        }  # fmt: skip
        (here[name] if name in here else getattr(self, name)).copy_(weight)


class Widened(Engine):
    """bfloat16 held as float32: the same 16 bits above zeros, so no cast that matters."""

    checkpoint: ClassVar = {"router": ((4, 8), BF16)}

    def __init__(self) -> None:
        super().__init__(router=zeros(4, 8))

    def put(self, name: str, weight: Any) -> None:
        self.router.copy_(weight)


class Replaced(Engine):
    """Post-load processing that makes new parameters, as a first load into an empty module does."""

    checkpoint: ClassVar = {"w": ((6, 8), BF16), "both": ((8, 8), BF16)}

    def __init__(self) -> None:
        half = zeros(4, 8, dtype=BF16)
        super().__init__(w=zeros(8, 6, dtype=BF16), top=half, low=half.clone())

    def put(self, name: str, weight: Any) -> None:
        if name == "w":
            self.w = nn.Parameter(weight.t().contiguous().to(DEVICE), requires_grad=False)
        else:
            self.top, self.low = (
                nn.Parameter(h.to(DEVICE, copy=True), requires_grad=False) for h in (weight[::2], weight[1::2])
            )


class Rank(Engine):
    """Rank 1 of 2: columns of one matrix, rows of another, half of a vocabulary, experts 2 and 3 of four."""

    checkpoint: ClassVar = {
        "column": ((8, 12), BF16), "row": ((8, 12), BF16), "embed": ((10, 4), BF16), "norm": ((12,), BF16),
        **{f"expert{e}": ((4, 4), BF16) for e in range(4)},
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__(
            column=zeros(8, 6, dtype=BF16), row=zeros(4, 12, dtype=BF16),
            embed=zeros(8, 4, dtype=BF16), norm=zeros(12, dtype=BF16),
            experts=zeros(2, 4, 4, dtype=BF16),
        )  # fmt: skip

    def put(self, name: str, weight: Any) -> None:
        if name.startswith("expert"):
            if int(name[6:]) >= 2:
                self.experts[int(name[6:]) - 2].copy_(weight)
        elif name == "column":
            self.column.copy_(weight[:, 6:])
        elif name == "row":
            self.row.copy_(weight[4:])
        elif name == "embed":
            self.embed[:2].copy_(weight[8:])
        else:
            self.norm.copy_(weight)


WHOLE = [Fused, Experts, Shuffled, Blocks, Vocabulary, Attributes, Replaced, Widened]


def memory_of(module: Any) -> dict[str, bytes]:
    return {r.name: r.read().tobytes() for r in Live(module).regions}


def changed(tensors: Tensors, seed: int, share: float) -> Tensors:
    """Turn a share of the values of every tensor, and all of one tensor."""
    made = np.random.default_rng(seed)
    whole = sorted(tensors)[seed % len(tensors)]
    out = {}
    for name, tensor in tensors.items():
        new = tensor.clone()
        other = values(int(made.integers(1 << 30)), tuple(tensor.shape), tensor.dtype)
        into, source = (t.view(-1).view(torch.uint8).numpy().reshape(-1, t.element_size()) for t in (new, other))
        pick = made.random(tensor.numel()) < (1 if name == whole else share)
        into[pick] = source[pick]
        out[name] = new
    return out


def planned(engine: Engine, **options: Any) -> ScatterPlan:
    return make_plan(engine, engine.load, layout_of(engine.version(0)), **options)


def loaded(kind: Callable[[], Engine], weights: Tensors) -> dict[str, bytes]:
    """The memory of a module that has just been made and loaded."""
    fresh = kind()
    fresh.load(weights.items())
    return memory_of(fresh)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def publish(store: str, *versions: Tensors) -> None:
    with Publisher(store, anchors=False, run_id="r") as publisher:
        for tensors in versions:
            publisher.publish(tensors)


def moved_to(follower: Follower, version: int | None = None, **options: Any) -> StagedPlan:
    prepared = follower.prepare(version, **options)
    assert prepared is not None
    prepared.apply()
    assert isinstance(prepared.staging, StagedPlan)
    return prepared.staging


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("kind", WHOLE)
def test_module_follows_to_what_a_fresh_load_gives(kind: Callable[[], Engine], store: str) -> None:
    engine = kind()
    versions = [engine.version(1)]
    for seed, share in ((1, 0.1), (2, 0.5), (3, 0.02)):
        versions.append(changed(versions[-1], seed, share))
    publish(store, *versions)
    engine.load(versions[0].items())
    before = memory_of(engine)
    plan = planned(engine)
    assert memory_of(engine) == before  # planning leaves no trace
    assert plan.whole.all()
    follower = Follower(store, PlannedTarget(engine, plan))
    for version in (1, 2, 0, 3, 1):  # one step, catching up, back, over several
        moved_to(follower, version)
        assert memory_of(engine) == loaded(kind, versions[version])
    assert follower.prepare(1) is None


@pytest.mark.parametrize("kind", [*WHOLE, Rank])
def test_reseed_writes_all_places_through_the_plan(kind: Callable[[], Engine], store: str) -> None:
    engine = kind()
    first = engine.version(1)
    second = changed(first, 1, 0.3)
    publish(store, first, second)
    engine.load(second.items())
    target = PlannedTarget(engine, planned(engine))
    target.prove(second.items())
    for region in Live(engine).regions:
        if region.name in {row.region for row in target.plan.rows}:
            raw = region.read().copy()
            raw[: len(raw) // 2] ^= 0x11
            region.write(raw)
    target.recheck()
    follower = Follower(store, target)
    prepared = follower.prepare(1, reseed=True)
    assert prepared is not None
    prepared.apply()
    target.prove(second.items())
    fresh = kind()
    fresh.load(second.items())
    if target.plan.coverage.constant == 0:
        assert memory_of(engine) == memory_of(fresh)
    assert moved_to(follower, 0).version == 0


def test_plan_of_regular_copies_is_a_few_boxes() -> None:
    plan = planned(Fused())
    assert [len(m.source) for m in plan.maps] == [6]
    plan = planned(Experts())
    assert [len(m.source) for m in plan.maps] == [9]
    assert plan.coverage.planned == plan.coverage.live == 3 * 144 * 2


def test_coverage_counts_bytes() -> None:
    assert str(planned(Vocabulary()).coverage) == (
        "880 live bytes: 80.00 % planned, 20.00 % constant, 0.00 % derived; 100.00 % of the checkpoint is here"
    )
    rank = planned(Rank()).coverage
    assert (rank.checkpoint, rank.landed) == (616, 296)


def test_rank_follows_with_what_it_holds_once_it_was_told_what_was_loaded(store: str) -> None:
    engine = Rank()
    versions = [engine.version(1)]
    for seed in (1, 2, 3):
        versions.append(changed(versions[-1], seed, 0.2))
    publish(store, *versions)
    engine.load(versions[1].items())
    target = PlannedTarget(engine, planned(engine))
    follower = Follower(store, target)
    refused(ConfigError, "48 of 96 elements of column are in this module", follower.prepare)
    refused(IntegrityError, "column, read through the plan, is not what was loaded", target.prove, versions[2].items())
    target.prove(versions[1].items())
    assert follower.prepare(1) is None
    for version in (2, 3, 0):
        moved_to(follower, version)
        assert memory_of(engine) == loaded(Rank, versions[version])
        target.recheck()  # as after sleep and wake
        assert follower.prepare(version) is None


# ---------------------------------------------------------------- what is refused


class Odd(Engine):
    """One weight that is copied, and one with which something else is done."""

    checkpoint: ClassVar = {"w": ((6, 8), BF16), "x": ((4, 8), BF16)}

    def __init__(self, live: Any, put: Callable[[Any, Any], object]) -> None:
        super().__init__(w=zeros(6, 8, dtype=BF16), x=live)
        self.how = put

    def put(self, name: str, weight: Any) -> None:
        if name == "w":
            self.w.copy_(weight)
        else:
            self.how(self.x, weight)


ARITHMETIC = "is computed from the weights (arithmetic, requantisation)"

ODD = {
    "cast": (zeros(4, 8, dtype=torch.float64), lambda x, w: x.copy_(w), "(float64[4, 8]) is a cast of x (BF16)"),
    "cast to half": (zeros(4, 8, dtype=torch.float16), lambda x, w: x.copy_(w), "x (float16[4, 8]) is"),
    "plus one": (zeros(4, 8, dtype=BF16), lambda x, w: x.copy_(w + 1), ARITHMETIC),
    "times two": (zeros(4, 8, dtype=BF16), lambda x, w: x.copy_(w * 2), ARITHMETIC),
    "absolute": (zeros(4, 8, dtype=BF16), lambda x, w: x.copy_(w.abs()), ARITHMETIC),
    "clamped": (zeros(4, 8, dtype=BF16), lambda x, w: x.copy_(w.clamp(-448, 448)), ARITHMETIC),
    "merged": (zeros(8, dtype=BF16), lambda x, w: x.copy_(w[0] * w[1]), ARITHMETIC),
    "requantised": (
        zeros(4, 8, dtype=torch.int8), lambda x, w: x.copy_((w.float() / w.float().abs().max() * 127).round()),
        ARITHMETIC,
    ),
    "largest": (zeros((), dtype=BF16), lambda x, w: x.copy_(w.abs().max()), ARITHMETIC),
    "nibbles": (
        zeros(4, 16, dtype=torch.uint8),
        lambda x, w: x.copy_(((w.view(torch.uint8) & 15) << 4) | (w.view(torch.uint8) >> 4)), ARITHMETIC,
    ),
    "random": (zeros(4, 8, dtype=BF16), lambda x, w: x.normal_(), ARITHMETIC),
    "counted": (zeros(1), lambda x, w: x.fill_(7), "shows nothing of what was loaded"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_copy_is_refused_by_name_and_the_module_is_as_before(what: str) -> None:
    live, put, message = ODD[what]
    engine = Odd(live.clone(), put)
    engine.w.copy_(engine.version(1)["w"])
    before = memory_of(engine)
    with pytest.raises(ConfigError) as caught:
        planned(engine)
    assert str(caught.value).startswith("1 live tensors cannot be planned: x ")
    assert message in str(caught.value)
    assert memory_of(engine) == before


def test_refusal_lists_all_that_cannot_be_planned() -> None:
    engine = Odd(zeros(4, 8), lambda x, w: x.copy_(w))
    engine.more = [zeros(1) for _ in range(14)]
    engine.how = lambda x, w: [t.fill_(float(w.sum())) for t in (x, *engine.more)]
    with pytest.raises(ConfigError) as caught:
        planned(engine)
    assert str(caught.value).startswith("15 live tensors cannot be planned: x (float32[4, 8]) is computed")
    assert "more[10] (float32[1])" in str(caught.value)
    assert "more[11]" not in str(caught.value)
    assert "; and 3 more. Name a refresh call for each, or use the engine's own reload" in str(caught.value)


def test_working_memory_is_left_alone_when_it_is_named() -> None:
    engine = Odd(zeros(4, 8, dtype=BF16), lambda x, w: x.copy_(w))
    engine.kv_cache = zeros(8)
    engine.how = lambda x, w: (x.copy_(w), engine.kv_cache.add_(1))
    with pytest.raises(ConfigError, match="kv_cache"):
        planned(engine)
    engine.kv_cache.fill_(3)
    plan = planned(engine, state=["*kv_cache"])
    assert engine.kv_cache[0] > 3  # not put back either
    assert {row.region for row in plan.rows} == {"w", "x"}


def test_derived_tensor_is_refreshed_inside_the_apply(store: str) -> None:
    engine = Odd(zeros(4, 8, dtype=BF16), lambda x, w: x.copy_(w))
    engine.copy = zeros(4, 8, dtype=torch.float64)
    engine.how = lambda x, w: engine.copy.copy_(x.copy_(w))
    refresh = {"copy": lambda: engine.copy.copy_(engine.x)}
    first = engine.version(1)
    second = changed(first, 1, 0.5)
    publish(store, first, second)
    engine.load(first.items())
    refused(ConfigError, "copy (float64[4, 8]) is a cast of x (BF16)", planned, engine)
    wrong = {"copy": lambda: engine.copy.copy_(engine.x + 1)}
    with pytest.raises(ConfigError, match="the refresh call for copy does not give what the loader gives"):
        planned(engine, derived=wrong)
    plan = planned(engine, derived=refresh)
    assert plan.coverage.derived > 0
    refused(ConfigError, "pass a refresh call for each", PlannedTarget, engine, plan)
    moved_to(Follower(store, PlannedTarget(engine, plan, derived=refresh)))
    assert torch.equal(engine.copy.cpu(), second["x"].double())


def test_refresh_call_that_fails_poisons_and_a_reseed_mends(store: str) -> None:
    engine = Odd(zeros(4, 8, dtype=BF16), lambda x, w: x.copy_(w))
    engine.copy = zeros(4, 8, dtype=torch.float64)
    engine.how = lambda x, w: engine.copy.copy_(x.copy_(w))
    broken = []

    def refresh() -> None:
        if broken:
            raise RuntimeError("no memory")
        engine.copy.copy_(engine.x)

    first = engine.version(1)
    publish(store, first, changed(first, 1, 0.5))
    engine.load(first.items())
    target = PlannedTarget(engine, planned(engine, derived={"copy": refresh}), derived={"copy": refresh})
    follower = Follower(store, target)
    prepared = follower.prepare()
    assert prepared is not None
    broken.append(True)
    refused(Poisoned, "a refresh call failed (no memory)", prepared.apply)
    broken.clear()
    assert moved_to(follower).version == 1
    assert torch.equal(engine.copy, engine.x.double())


def test_loader_that_leaves_other_tensors_is_refused() -> None:
    engine = Odd(zeros(4, 8, dtype=BF16), lambda x, w: x.copy_(w))
    engine.how = lambda x, w: setattr(engine, "x", nn.Parameter(w.t().contiguous(), requires_grad=False))
    with pytest.raises(Poisoned, match=r"planning left other tensors .*x was bfloat16\[4, 8\], is bfloat16\[8, 4\]"):
        planned(engine)


class Packing(Engine):
    """A linear layer whose weights a library has packed: torch knows the number under which it keeps them, no more."""

    checkpoint: ClassVar = {"w": ((4, 8), BF16), "b": ((4,), BF16)}
    library: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        super().__init__(b=zeros(4, dtype=BF16))
        self.handle = zeros((), dtype=torch.int64)

    def put(self, name: str, weight: Any) -> None:
        if name == "b":
            self.b.copy_(weight)
            return
        number = int(self.handle) + 64
        self.library.pop(int(self.handle), None)
        self.library[number] = weight.clone()
        self.handle = torch.tensor(number)


def test_number_of_packed_weights_is_not_put_back_and_the_weights_have_to_be_loaded_again() -> None:
    engine = Packing()
    engine.load(engine.version(1).items())
    refused(Poisoned, "planning changed handle, 64-bit integers as no tensor of the checkpoint has", planned, engine)
    assert int(engine.handle) in engine.library
    assert torch.equal(engine.b.cpu(), engine.version(1)["b"])


def test_loader_that_fails_leaves_the_module_as_it_was() -> None:
    engine = Odd(zeros(4, 8, dtype=BF16), lambda x, w: 1 / 0)
    engine.load([("w", engine.version(1)["w"])])
    before = memory_of(engine)
    with pytest.raises(ZeroDivisionError):
        planned(engine)
    assert memory_of(engine) == before


# ---------------------------------------------------------------- proofs on real weights


class Trap(Fused):
    """A start-up load that lays weights out in another way than every load after it."""

    def __init__(self) -> None:
        super().__init__()
        self.started = False

    def load(self, weights: Weights) -> None:
        super().load(weights)
        if not self.started:
            self.up_gate.copy_(self.up_gate.roll(12, 0))
        self.started = True


def test_plan_that_a_reload_gives_but_the_start_up_load_does_not_is_refused(store: str) -> None:
    engine = Trap()
    first = engine.version(1)
    publish(store, first, changed(first, 1, 0.1))
    engine.load(first.items())
    before = memory_of(engine)
    target = PlannedTarget(engine, planned(engine))
    follower = Follower(store, target)
    refused(ChainError, "or the engine's start-up load lays them out in another way", follower.prepare)
    refused(IntegrityError, "gate, read through the plan, is not what was loaded", target.prove, first.items())
    refused(ConfigError, "a plan that was never proven on this module", follower.prepare, reseed=True)
    assert memory_of(engine) == before
    engine.load(first.items())  # from here on the module is as the plan says
    moved_to(follower)


def test_module_of_other_weights_is_refused_unless_a_reseed_is_asked_for(store: str) -> None:
    engine = Fused()
    first, other = engine.version(1), engine.version(2)
    publish(store, first)
    engine.load(other.items())
    target = PlannedTarget(engine, planned(engine))
    follower = Follower(store, target)
    refused(ChainError, "holds no version of", follower.prepare)
    target.prove(other.items())
    refused(ChainError, "holds no version of", follower.prepare)
    moved_to(follower, reseed=True)
    assert memory_of(engine) == loaded(Fused, first)


def test_weights_changed_by_others_are_seen_before_anything_is_written(store: str) -> None:
    engine = Fused()
    first = engine.version(1)
    publish(store, first, changed(first, 1, 1.0))
    engine.load(first.items())
    target = PlannedTarget(engine, planned(engine))
    follower = Follower(store, target)
    assert follower.prepare(0) is None
    engine.qkv[3, 3] += 1
    before = memory_of(engine)
    refused(IntegrityError, "version 1: q would not change as published; nothing was written; reseed", follower.prepare)
    assert memory_of(engine) == before
    refused(ChainError, "holds no version of", follower.prepare)


def test_weights_changed_after_staging_are_undone(store: str) -> None:
    engine = Fused()
    first = engine.version(1)
    publish(store, first, changed(first, 1, 1.0))
    engine.load(first.items())
    follower = Follower(store, PlannedTarget(engine, planned(engine)))
    prepared = follower.prepare()
    assert prepared is not None
    engine.qkv[3, 3] += 1
    before = memory_of(engine)
    refused(IntegrityError, "the module's weights are not what was staged, all was undone", prepared.apply)
    assert memory_of(engine) == before


def test_moved_tensors_are_seen_before_anything_is_written_and_proven_again(store: str) -> None:
    engine = Fused()
    first = engine.version(1)
    second = changed(first, 1, 0.2)
    publish(store, first, second)
    engine.load(first.items())
    follower = Follower(store, PlannedTarget(engine, planned(engine)))
    prepared = follower.prepare()
    assert prepared is not None
    engine.qkv = nn.Parameter(engine.qkv.clone(), requires_grad=False)
    before = memory_of(engine)
    refused(IntegrityError, "changed or moved since this version was staged; prepare again", prepared.apply)
    assert memory_of(engine) == before
    moved_to(follower)
    assert memory_of(engine) == loaded(Fused, second)
    engine.qkv = nn.Parameter(engine.qkv.float(), requires_grad=False)
    refused(ConfigError, "the module's tensors are not those that the plan was made for", follower.prepare)


def test_apply_of_a_group_of_ranks_can_be_undone(store: str) -> None:
    engine = Experts()
    first = engine.version(1)
    second = changed(first, 1, 0.2)
    publish(store, first, second)
    engine.load(first.items())
    before = memory_of(engine)
    follower = Follower(store, PlannedTarget(engine, planned(engine)))
    staged = moved_to(follower)
    staged.undo()
    assert memory_of(engine) == before
    refused(ConfigError, "was not applied last", staged.undo)
    moved_to(follower)
    assert memory_of(engine) == loaded(Experts, second)


def test_interrupted_apply_is_reseeded(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Shuffled()
    first = engine.version(1)
    second = changed(first, 1, 0.2)
    publish(store, first, second)
    engine.load(first.items())
    follower = Follower(store, PlannedTarget(engine, planned(engine)))
    prepared, again = follower.prepare(), follower.prepare()
    assert prepared is not None
    assert again is not None

    def interrupted(*_: object, **__: object) -> object:
        engine.a.zero_()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        for memory in ("Host", "Device"):
            patch.setattr(f"deltackpt.memory.{memory}Exchange.run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared.apply()
    refused(Poisoned, "an earlier apply did not finish", again.apply)
    moved_to(follower)
    assert memory_of(engine) == loaded(Shuffled, second)


def test_copies_that_differ_are_refused(store: str) -> None:
    engine = Vocabulary()
    first = engine.version(1)
    publish(store, first)
    engine.load(first.items())
    target = PlannedTarget(engine, planned(engine))
    engine.draft[3, 3] += 1
    refused(IntegrityError, "copies of embed in the module are not equal", Follower(store, target).prepare)


def test_store_of_another_layout_is_refused(store: str) -> None:
    engine = Fused()
    first = engine.version(1)
    publish(store, first | {"more": torch.zeros(2)})
    engine.load(first.items())
    follower = Follower(store, PlannedTarget(engine, planned(engine)))
    refused(ConfigError, "tensor more is missing", follower.prepare)


# ---------------------------------------------------------------- devices


class Many(Engine):
    """Tensors that stay alone."""

    checkpoint: ClassVar = {f"w{i:03}": ((4,), BF16) for i in range(200)}

    def __init__(self) -> None:
        super().__init__(**{n: zeros(s, dtype=d) for n, (s, d) in self.checkpoint.items()})

    def put(self, name: str, weight: Any) -> None:
        getattr(self, name).copy_(weight)


class Launched(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Counts what torch is told to do."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_pause_takes_no_more_launches_for_more_tensors(tmp_path: Path, memory: str) -> None:
    counts = []
    for kind in (Fused, Many):
        engine = kind()
        first = engine.version(1)
        second = changed(first, 1, 1.0)
        store = str(tmp_path / kind.__name__)
        publish(store, first, second)
        engine.load(first.items())
        prepared = Follower(store, PlannedTarget(engine, planned(engine))).prepare()
        assert prepared is not None
        with Launched() as launched:
            prepared.apply()
        assert memory_of(engine) == loaded(kind, second)
        counts.append(launched.count)
    assert counts[0] == counts[1]
    assert (counts[0] > 0) == (memory == "torch")


@pytest.mark.parametrize("memory", ["torch"], indirect=True)
def test_version_for_whose_changes_a_device_has_no_room_is_refused_and_comes_later(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Fused()
    first = engine.version(1)
    second = changed(first, 1, 1.0)
    publish(store, first, second)
    engine.load(first.items())
    follower = Follower(store, PlannedTarget(engine, planned(engine)))

    def full(*_: object) -> object:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr("deltackpt.memory.DeviceMemory._columns", full)
        refused(ConfigError, " bytes of a version's changes; leave the engine less memory", follower.prepare)
    moved_to(follower)
    assert memory_of(engine) == loaded(Fused, second)


def test_planned_tensors_on_several_devices_are_refused() -> None:
    engine = Fused()
    plan, (one, *others) = planned(engine), Live(engine).regions
    regions = [one, *(replace(r, device=torch.device("meta")) for r in others)]
    refused(ConfigError, f"(qkv on {one.device}, up_gate on meta); use the engine's own reload", Located, plan, regions)


def test_tensor_whose_memory_has_no_plain_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltackpt.live.DEVICES", frozenset())
    refused(ConfigError, "tensor qkv is on cpu" if DEVICE == "cpu" else "tensor qkv is on cuda", Live, Fused())


# ---------------------------------------------------------------- on disk


def test_plan_is_made_once_and_kept_by_layout_module_and_setting(tmp_path: Path) -> None:
    calls = 0

    def counted(weights: Weights) -> None:
        nonlocal calls
        calls += 1
        engine.load(weights)

    engine = Experts()
    layout = layout_of(engine.version(0))
    first = cached_plan(tmp_path, engine, counted, layout, setting="engine 1, 1 rank")
    made = calls
    again = cached_plan(tmp_path, Experts(), counted, layout, setting="engine 1, 1 rank")
    assert (calls, made) == (made, 3 - 1)
    assert again.coverage == first.coverage
    for kept, one in zip(again.maps, first.maps, strict=True):
        assert all(np.array_equal(vars(kept)[k], getattr(one, k)) for k in ("source", "live", "kind", "shapes"))
    cached_plan(tmp_path, engine, counted, layout, setting="engine 2, 1 rank")
    assert calls == 2 * made
    assert len(list(tmp_path.iterdir())) == 2


def test_damaged_plan_is_refused(tmp_path: Path) -> None:
    engine = Experts()
    plan, path = planned(engine), tmp_path / "one.plan"
    save_plan(plan, path)
    raw = path.read_bytes()
    for damaged in (
        raw[:-1],
        raw[:100],
        b"",
        bytes([raw[0] ^ 1]) + raw[1:],
        raw[:200] + bytes([raw[200] ^ 1]) + raw[201:],
    ):
        path.write_bytes(damaged)
        refused(IntegrityError, "remove it, and the plan is made again", load_plan, path, plan.layout)
    path.write_bytes(raw)
    refused(ConfigError, "is a plan for layout", load_plan, path, layout_of(Fused().version(0)))


@pytest.mark.parametrize("key", ["source", "live", "kind", "shapes"])
@pytest.mark.parametrize("number", [-1, 1 << 40])
def test_plan_that_reaches_outside_is_refused(tmp_path: Path, key: str, number: int) -> None:
    engine = Experts()
    plan, path = planned(engine), tmp_path / "one.plan"
    getattr(plan.maps[0], key).reshape(-1)[-1] = number
    save_plan(plan, path)
    refused(IntegrityError, "is no plan", load_plan, path, plan.layout)


# ---------------------------------------------------------------- ids


def test_every_dtype_has_ordinary_values_that_decode_to_their_ids() -> None:
    known = [d for d in ALPHABETS if d != "F4"]
    layout = Layout([d.lower() for d in known], known, [(3, 50) if d != "BOOL" else (2,) for d in known])
    planes = Planes(layout)
    for dtype in known:
        ids = np.arange(planes.elements(dtype))
        shown = [planes.values(dtype, plane, ids) for plane in range(planes.passes)]
        assert planes.decode(dtype, shown).tolist() == ids.tolist()
        assert (shown[0] != shown[-1]).all()  # what never varies is no copy of any of them
        for plane in range(planes.passes):
            tensor = dict(planes.tensors(plane))[dtype.lower()]
            if tensor.dtype.is_floating_point:
                assert torch.isfinite(tensor.double()).all()
                assert plane == planes.passes - 1 or (tensor.float() > 0).all()
        shown[-1] = shown[-1] ^ shown[-1].dtype.type(1)
        assert (planes.decode(dtype, shown) == -1).all()


# ---------------------------------------------------------------- places


def by_rows(draw: st.DrawFn, elements: Any) -> list[Any]:
    """Lay elements out in some live rows: whole, cut, transposed, shuffled, twice, or with holes."""
    ways = st.sampled_from(["whole", "columns", "transposed", "rows", "elements", "backwards", "holes"])
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.sampled_from([1, 2, 4, 6]))
        some = elements[: len(elements) // width * width].reshape(-1, width)
        made, way = np.random.default_rng(draw(st.integers(0, 9))), draw(ways)
        laid = {
            "whole": some, "columns": some[:, width // 2 :], "transposed": some.T, "rows": made.permutation(some),
            "elements": made.permutation(some.reshape(-1)), "backwards": some[::-1], "holes": some,
        }[way].reshape(-1)  # fmt: skip
        rows.append(np.where(made.random(len(laid)) < 0.3, -1, laid) if way == "holes" else laid)
    return rows


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, list[Any]]:
    shapes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    source = Layout([f"t{i}" for i in range(len(shapes))], ["BF16"] * len(shapes), [(n,) for n in shapes])
    return source, by_rows(draw, np.arange(sum(shapes)))


@given(layouts())
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_place_maps_have_every_place_and_no_other(case: tuple[Layout, list[Any]]) -> None:
    source, rows = case
    live = Layout([f"r{i}" for i in range(len(rows))], ["U16"] * len(rows), [(len(r),) for r in rows])
    numbering, live_numbering = Numbering(source), Numbering(live)
    found = [runs_of(r[r >= 0], np.flatnonzero(r >= 0), numbering.first) for r in rows]
    runs = Runs.join([f.moved(live_numbering, i) for i, f in enumerate(found)])
    shown = np.full(int(live_numbering.first[-1]), -1)
    for number, one in enumerate(compress(runs)):
        one.require_inside(numbering, live_numbering)
        elements, places = one.expand()
        assert len(set(elements.tolist())) == len(elements)
        assert (shown[places] == -1).all()
        shown[places] = elements
        which, where = one.find(np.arange(int(numbering.first[-1])))
        assert sorted(zip(which.tolist(), where.tolist(), strict=True)) == sorted(
            zip(elements.tolist(), places.tolist(), strict=True)
        )
        if number == 0:  # has all that is anywhere
            assert set(elements.tolist()) == {e for r in rows for e in r.tolist() if e >= 0}
    assert shown.tolist() == [e for r in rows for e in r.tolist()]
