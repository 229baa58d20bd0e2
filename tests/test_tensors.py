"""Live tensors: what can be published and followed in place, and what is refused, by name and untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from helpers import raw_of, refused, tensor_of

from deltackpt import backend, tensors
from deltackpt.arena import Capability
from deltackpt.errors import ChainError, ConfigError, IntegrityError, Poisoned
from deltackpt.follow import Follower, Prepared
from deltackpt.kernels import view
from deltackpt.publish import Publisher
from deltackpt.reader import Reader
from deltackpt.store import open_store
from deltackpt.tensors import Choice, StagedTensors, TensorTarget, choose, collect, find_twins

torch = pytest.importorskip("torch")

Tensors = dict[str, Any]

DTYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F4": 1,
}  # fmt: skip
"""Bytes of a stored element of every dtype that torch and safetensors share."""


def known(dtype: str) -> bool:
    try:
        tensor_of(dtype, (2,), bytes(DTYPES[dtype] * (1 if dtype == "F4" else 2)))
    except AttributeError:
        return False
    return True


HERE = [d for d in DTYPES if known(d)]


def noise(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """A tensor of random bits; of its own memory."""
    elements = int(np.prod(shape)) // (2 if dtype == "F4" else 1)
    bits = np.random.default_rng(seed).integers(0, 256, elements * DTYPES[dtype], dtype=np.uint8)
    return tensor_of(dtype, shape, (bits & 1).tobytes() if dtype == "BOOL" else bits.tobytes())


def follow(store: Path, tensors: Tensors, version: int | None = None) -> Prepared:
    prepared = Follower(str(store), TensorTarget(tensors)).prepare(version)
    assert prepared is not None
    return prepared


def raws(tensors: Tensors) -> dict[str, bytes]:
    return {name: raw_of(tensor) for name, tensor in tensors.items()}


def places(tensors: Tensors) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in tensors.items()}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def publish(store: Path, *versions: Tensors) -> None:
    """Publish tensors, version after version, from a new publisher."""
    with Publisher(str(store), anchors=False, run_id="r") as publisher:
        for tensors in versions:
            publisher.publish(tensors)


# ---------------------------------------------------------------- dtypes and shapes


@pytest.mark.parametrize("dtype", HERE)
def test_every_dtype_goes_through_in_place(store: Path, dtype: str) -> None:
    shapes = {"flat": (38,), "empty": (0, 2), "grid": (3, 4)} | ({} if dtype == "F4" else {"scalar": ()})
    old = {n: noise(dtype, s, i) for i, (n, s) in enumerate(shapes.items())}
    new = {n: noise(dtype, s, i + 10) for i, (n, s) in enumerate(shapes.items())}
    publish(store, old, new)
    live = {n: noise(dtype, s, i) for i, (n, s) in enumerate(shapes.items())}
    before = places(live)
    prepared = follow(store, live)
    assert (prepared.previous, raws(live)) == (0, raws(old))
    assert prepared.apply() == 1
    assert raws(live) == raws(new)
    assert places(live) == before


def test_all_torch_dtypes_that_safetensors_has_were_tried() -> None:
    assert set(HERE) >= set(DTYPES) - {"F4"}
    assert ("F4" in HERE) == hasattr(torch, "float4_e2m1fn_x2")


def test_tensors_without_any_bytes_are_followed(store: Path) -> None:
    publish(store, {"e": torch.empty(0, 3)}, {"e": torch.empty(0, 3)})
    live = {"e": torch.empty(0, 3)}
    # Nothing tells such versions apart: the tensors hold the newest.
    assert Follower(str(store), TensorTarget(live)).prepare() is None
    assert follow(store, live, 0).previous == 1


def strided(seed: int) -> Tensors:
    """Views of every kind, each of memory of its own; 'padded' lies in the middle of a larger storage."""
    rng = torch.Generator().manual_seed(seed)

    def fresh(*shape: int) -> Any:
        return torch.randn(*shape, generator=rng)

    return {
        "whole": fresh(4, 6),
        "transposed": fresh(4, 6).T,
        "columns": fresh(4, 6)[:, ::2],
        "row": fresh(4, 6)[1],
        "permuted": fresh(2, 3, 4).permute(2, 0, 1),
        "padded": fresh(100)[10:90],
        "scalar": fresh(3)[1],
        "offset bytes": fresh(64).to(torch.bfloat16)[1:],
        "complex": torch.view_as_complex(fresh(5, 3, 2)).T,
    }


def test_strided_tensors_keep_address_and_strides_and_their_gaps(store: Path) -> None:
    publish(store, strided(0), strided(1), strided(2))
    live = strided(0)
    before = places(live)
    base = live["columns"]._base
    gaps = base.reshape(4, 6)[:, 1::2].clone()
    for version in (1, 2, 0):
        assert follow(store, live, version).apply() == version
        assert raws(live) == raws(strided(version))
        assert places(live) == before
        assert torch.equal(base.reshape(4, 6)[:, 1::2], gaps)


def test_strided_tensors_are_reseeded_from_an_anchor(store: Path) -> None:
    publish(store, strided(0), strided(1))
    live = strided(7)
    before = places(live)
    prepared = follow(store, live)
    assert (prepared.previous, prepared.plan.anchor) == (None, 0)
    prepared.apply()
    assert raws(live) == raws(strided(1))
    assert places(live) == before


def test_gradients_and_parameters_are_left_as_they_are(store: Path) -> None:
    old, new = torch.ones(4), torch.full((4,), 2.0)
    publish(store, {"w": old}, {"w": new})
    parameter = torch.nn.Parameter(old.clone())
    (parameter.sum() * 3).backward()
    follow(store, {"w": parameter}).apply()
    assert torch.equal(parameter.detach(), new)
    assert (parameter.requires_grad, parameter.is_leaf) == (True, True)
    assert torch.equal(parameter.grad, torch.full((4,), 3.0))


def test_one_follower_walks_forwards_and_back(store: Path) -> None:
    versions = [{"w": noise("BF16", (300, 70), seed)} for seed in range(4)]
    publish(store, *versions)
    live = {"w": noise("BF16", (300, 70), 0)}
    follower = Follower(str(store), TensorTarget(live))
    at = 0
    for version in (3, 1, 2, 0):
        prepared = follower.prepare(version)
        assert prepared is not None
        assert (prepared.previous, prepared.apply()) == (at, version)
        assert raws(live) == raws(versions[version])
        at = version
    assert follower.prepare(0) is None


def test_prepare_touches_nothing_and_a_discarded_one_can_be_prepared_again(store: Path) -> None:
    old, new = {"w": torch.zeros(8)}, {"w": torch.ones(8)}
    publish(store, old, new)
    live = {"w": torch.zeros(8)}
    follower = Follower(str(store), TensorTarget(live))
    first = follower.prepare()
    assert first is not None
    first.discard()
    assert raws(live) == raws(old)
    second = follower.prepare()
    assert second is not None
    second.apply()
    assert raws(live) == raws(new)


# ---------------------------------------------------------------- refusals


Change = Callable[[Tensors], None]


def set_(name: str, value: Any) -> Change:
    return lambda tensors: tensors.__setitem__(name, value)


def drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop("b"), ["tensor b", "does not have it"]),
        (set_("extra", torch.ones(3)), ["tensor extra", "not published"]),
        (set_("b", torch.zeros(4, dtype=torch.bfloat16)), ["tensor b", "F32", "BF16", "nothing is cast"]),
        (set_("b", torch.zeros(4, dtype=torch.int32)), ["tensor b", "F32", "I32"]),
        (set_("b", torch.zeros(2, 2)), ["tensor b", "[4]", "[2, 2]", "nothing is broadcast"]),
        (set_("b", torch.zeros(1)), ["tensor b", "[4]", "[1]"]),
        (set_("b", torch.zeros(())), ["tensor b", "[4]", "[]"]),
        (set_("b", torch.zeros(4, device="meta")), ["tensor b", "meta", "CPU"]),
        (set_("b", torch.zeros(4, dtype=torch.complex128)), ["tensor b", "complex128"]),
        (set_("b", torch.zeros(1).expand(4)), ["tensor b", "itself"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name_and_untouched(
    store: Path, change: Change, named: list[str]
) -> None:
    publish(store, {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.ones(4), "b": torch.ones(4)})
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}
    change(live)
    follower = Follower(str(store), TensorTarget(live))
    refused(follower.prepare, *named, error=ConfigError, store=store)
    assert torch.equal(live["a"], torch.zeros(4))


def test_partly_overlapping_views_are_refused_by_name(store: Path) -> None:
    publish(store, {"a": torch.zeros(4), "b": torch.zeros(4)})
    memory = torch.zeros(6)
    live = {"a": memory[:4], "b": memory[2:]}
    refused(Follower(str(store), TensorTarget(live)).prepare, "tensor b", "overlaps", error=ConfigError)
    # Same bytes, other shape: no equal view either.
    publish(store.with_name("two"), {"a": torch.zeros(4), "b": torch.zeros(2, 2)})
    live = {"a": memory[:4], "b": memory[:4].view(2, 2)}
    refused(Follower(str(store.with_name("two")), TensorTarget(live)).prepare, "overlaps", error=ConfigError)
    assert torch.equal(memory, torch.zeros(6))


def test_interleaved_views_of_one_storage_are_followed(store: Path) -> None:
    old = {"even": torch.zeros(6), "left": torch.zeros(3, 2), "odd": torch.zeros(6), "right": torch.zeros(3, 2)}
    new = {n: torch.full_like(t, i + 1.0) for i, (n, t) in enumerate(old.items())}
    publish(store, old, new)
    line, grid = torch.zeros(12), torch.zeros(3, 4)
    live = {"even": line[::2], "odd": line[1::2], "left": grid[:, :2], "right": grid[:, 2:]}
    follow(store, live).apply()
    assert line.tolist() == [1.0, 3.0] * 6
    assert grid.tolist() == [[2.0, 2.0, 4.0, 4.0]] * 3


def test_twins_are_found_by_equal_view_and_others_are_not(store: Path) -> None:
    shared = torch.zeros(4)
    layout = collect({"a": shared, "b": shared, "c": torch.zeros(4)}).layout
    tensors = {"a": shared, "b": shared[:], "c": torch.zeros(4)}
    assert find_twins(tensors, layout) == {"b": "a"}
    assert find_twins({"e": torch.empty(0), "f": torch.empty(0)}, layout) == {}


def test_tied_tensors_that_a_version_changes_differently_are_refused(store: Path) -> None:
    publish(store, {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
    shared = torch.zeros(4)
    refused(
        Follower(str(store), TensorTarget({"a": shared, "b": shared})).prepare,
        "a than for b",
        "untie",
        error=ConfigError,
    )
    assert torch.equal(shared, torch.zeros(4))


def test_tied_tensors_are_not_reseeded_with_two_different_values(store: Path) -> None:
    """A reseed wrote only one of the two values and called the target clean."""
    publish(store, {"a": torch.zeros(4), "b": torch.ones(4)})
    shared = torch.full((4,), 9.0)
    refused(
        Follower(str(store), TensorTarget({"a": shared, "b": shared})).prepare, "a than for b", "untie",
        error=ConfigError,
    )  # fmt: skip
    assert torch.equal(shared, torch.full((4,), 9.0))


def test_tied_tensors_are_reseeded_and_go_on(store: Path) -> None:
    first = {"a": torch.zeros(4), "b": torch.zeros(4)}
    publish(store, first)
    shared = torch.full((4,), 9.0)
    follower = Follower(str(store), TensorTarget({"a": shared, "b": shared}))
    prepared = follower.prepare()
    assert prepared is not None
    prepared.apply()
    assert torch.equal(shared, torch.zeros(4))
    publish(store, {"a": torch.ones(4), "b": torch.ones(4)})
    again = follower.prepare()
    assert again is not None
    assert again.previous == 0
    again.apply()
    assert torch.equal(shared, torch.ones(4))


def test_other_layout_published_later_asks_for_a_new_target(store: Path) -> None:
    publish(store, {"a": torch.zeros(4)})
    live = {"a": torch.zeros(4)}
    follower = Follower(str(store), TensorTarget(live))
    assert follower.prepare() is None
    with Publisher(str(store), new_lineage=True) as publisher:
        publisher.publish({"a": torch.zeros(2, 2)})
    refused(follower.prepare, "tensor a", "[2, 2]", "[4]", error=ConfigError)


# ---------------------------------------------------------------- what goes wrong in an apply


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.T], ids=["contiguous", "transposed"])
def test_bit_flipped_behind_our_back_in_a_changed_element_undoes_everything(
    store: Path, view: Callable[[Any], Any]
) -> None:
    old = {"a": torch.zeros(3, 3), "b": torch.zeros(3, 3)}
    new = {"a": torch.ones(3, 3), "b": torch.ones(3, 3)}
    later = {"a": torch.full((3, 3), 2.0), "b": torch.full((3, 3), 2.0)}
    publish(store, old, new, later)
    live = {"a": view(torch.zeros(3, 3)), "b": view(torch.zeros(3, 3))}
    follower = Follower(str(store), TensorTarget(live))
    prepared = follower.prepare()
    assert prepared is not None
    live["b"][1, 2] = 5.0
    wrong = raws(live)
    with pytest.raises(IntegrityError, match="version 2: b did not change as published, all was undone"):
        prepared.apply()
    assert raws(live) == wrong
    # The remedy that the message names: what is found now is no version, so it is reseeded.
    again = follower.prepare()
    assert again is not None
    assert (again.previous, again.plan.anchor) == (None, 0)
    again.apply()
    assert raws(live) == raws(later)


def test_bit_flipped_in_an_element_that_does_not_change_is_found_by_the_next_full_look(store: Path) -> None:
    old = {"a": torch.zeros(8)}
    new = {"a": torch.cat([torch.ones(4), torch.zeros(4)])}
    publish(store, old, new)
    live = {"a": torch.zeros(8)}
    prepared = follow(store, live)
    live["a"][7] = 5.0
    # Increments prove the flips, not the rest: this is the documented limit.
    assert prepared.apply() == 1
    again = Follower(str(store), TensorTarget(live)).prepare()
    assert again is not None
    assert again.previous is None
    again.apply()
    assert raws(live) == raws(new)


def test_interrupted_apply_leaves_the_target_poisoned_until_it_is_reseeded(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = {"a": torch.zeros(8)}, {"a": torch.ones(8)}
    publish(store, old, new)
    live = {"a": torch.zeros(8)}
    follower = Follower(str(store), TensorTarget(live))
    prepared, second = follower.prepare(), follower.prepare()
    assert prepared is not None
    assert second is not None

    def interrupted(*_: object, **__: object) -> None:
        live["a"][:3] = 7.0
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(backend, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared.apply()
    with pytest.raises(Poisoned, match="prepare again to reseed"):
        second.apply()
    third = follower.prepare()
    assert third is not None
    assert (third.previous, third.plan.anchor) == (None, 0)
    third.apply()
    assert raws(live) == raws(new)
    assert follower.prepare() is None


def test_reseed_on_request_overwrites_what_is_right_already(store: Path) -> None:
    publish(store, {"a": torch.zeros(8)}, {"a": torch.ones(8)})
    live = {"a": torch.ones(8)}
    prepared = Follower(str(store), TensorTarget(live)).prepare(reseed=True)
    assert prepared is not None
    assert (prepared.previous, prepared.plan.anchor) == (None, 0)
    prepared.apply()
    assert torch.equal(live["a"], torch.ones(8))


def test_version_that_is_not_there_is_refused(store: Path) -> None:
    publish(store, {"a": torch.zeros(8)})
    follower = Follower(str(store), TensorTarget({"a": torch.zeros(8)}))
    refused(lambda: follower.prepare(3), "version 3", error=ChainError)


# ---------------------------------------------------------------- what can be published


class Wrapped(torch.Tensor):  # type: ignore[misc]
    """A tensor subclass without memory of its own, as the sharded tensors of torch.distributed are."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> Any:
        raise AssertionError("nothing is to be computed")


def collected(params: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    layout = collect(params).layout
    return list(zip(layout.names, layout.dtypes, layout.shapes, strict=True))


def test_published_tensors_may_be_torch_or_numpy_a_mapping_or_pairs() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    pairs: Iterable[tuple[str, Any]] = [
        ("t", torch.zeros(2, 3)),
        ("n", np.zeros((4, 1), np.int16)),
        ("b", np.zeros(5, ml_dtypes.bfloat16)),
        ("f8", np.zeros(5, ml_dtypes.float8_e4m3fn)),
        ("e8", np.zeros(5, ml_dtypes.float8_e8m0fnu)),
        ("z", np.zeros((), np.float64)),
    ]
    expected = [
        ("b", "BF16", (5,)), ("e8", "F8_E8M0", (5,)), ("f8", "F8_E4M3", (5,)), ("n", "I16", (4, 1)),
        ("t", "F32", (2, 3)), ("z", "F64", ()),
    ]  # fmt: skip
    assert collected(pairs) == expected
    assert collected(dict(pairs)) == expected
    assert collected(p for p in pairs) == expected


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], ["tensor a", "duplicate"]),
        ({"": torch.zeros(2)}, ["''", "reserved"]),
        ({"__metadata__": torch.zeros(2)}, ["__metadata__", "reserved"]),
        ({"a": torch.zeros(2, device="meta")}, ["tensor a", "meta"]),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, ["tensor a", "complex128"]),
        ({"a": np.zeros(2, np.complex128)}, ["tensor a", "complex128"]),
        ({"a": np.zeros(2, np.longdouble)}, ["tensor a", "has no safetensors dtype"]),
        ({"a": np.array(["x"])}, ["tensor a", "has no safetensors dtype"]),
        ({"a": np.array([None])}, ["tensor a", "object"]),
        ({"a": torch.zeros(2).to_sparse()}, ["tensor a", "sparse"]),
        ({"a": [1.0, 2.0]}, ["tensor a", "list"]),
        ({"a": None}, ["tensor a", "NoneType"]),
        ({"a": np.float32(1)}, ["tensor a", "float32"]),
        ({"a": torch.zeros(2, dtype=torch.complex64).conj()}, ["tensor a", "conjugate"]),
        ({"a": torch.zeros(2, dtype=torch.complex64).conj().imag}, ["tensor a", "negated"]),
        ({"a": Wrapped(torch.zeros(2))}, ["tensor a", "Wrapped", "sharded over ranks"]),
        ({7: torch.zeros(2)}, ["7"]),
    ],
)  # fmt: skip
def test_what_cannot_be_published_is_refused_by_name(params: Any, named: list[str]) -> None:
    refused(lambda: collect(params), *named, error=ConfigError)


def test_bytes_collected_are_those_of_the_elements_in_order() -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    swapped = np.arange(6, dtype=">f4").reshape(2, 3)
    params = {
        "cut": whole[:, ::2], "swapped": swapped, "turned": swapped.T, "v": whole.T,
    }  # fmt: skip
    live = collect(params)
    from deltackpt.kernels import view

    found = {
        n: view(int(live.addresses[i]), int(live.layout.nbytes[i])).tobytes() for i, n in enumerate(live.layout.names)
    }
    assert found["cut"] == whole[:, ::2].contiguous().numpy().tobytes()
    assert found["v"] == whole.T.contiguous().numpy().tobytes()
    assert found["swapped"] == np.arange(6, dtype="<f4").tobytes()
    assert found["turned"] == np.ascontiguousarray(swapped.T.astype("<f4")).tobytes()


# ---------------------------------------------------------------- which backend


def test_auto_takes_what_the_device_allows_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("cpu") == Choice("cpu", "cpu", "the tensors are in host memory")
    assert choose("mps:0") == Choice("mps:0", "torch", "mps:0 is no NVIDIA GPU")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choose("cuda:1") == Choice("cuda:1", "torch", "cuda:1 is an AMD GPU (HIP 6.4)")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("deltackpt.tensors.find_spec", lambda _name: None)
    assert choose("cuda:0") == Choice(
        "cuda:0", "torch", "cuda-core is not installed; pip install 'deltackpt[cuda13]' (or cuda12)"
    )
    monkeypatch.setattr("deltackpt.tensors.find_spec", lambda _name: object())
    for mask, installed, name, reason in (
        (0, True, "cuda", "an NVIDIA GPU; the driver reports no Decompression Engine"),
        (6, False, "cuda", "an NVIDIA GPU; its Decompression Engine is not used, since nvCOMP is not installed"),
        (6, True, "de", "the driver reports a Decompression Engine for lz4, snappy"),
    ):
        monkeypatch.setattr("deltackpt.arena.capability", lambda _, m=mask: Capability(m, 1 << 22))
        monkeypatch.setattr("deltackpt.libnvcomp.installed", lambda i=installed: i)
        assert choose("cuda:0") == Choice("cuda:0", name, reason)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_backend_that_can_work_there_is_taken_by_name(backend: str) -> None:
    assert choose("cpu", backend) == Choice("cpu", backend, "asked for by name")


@pytest.mark.parametrize(
    ("on", "backend", "message"),
    [
        ("cpu", "gpu", "backend 'gpu' is unknown; expected one of auto cpu cuda de torch"),
        ("xpu:0", "cpu", "tensors on xpu:0: backend cpu works in host memory; move them there, or take backend auto"),
        ("cpu", "cuda", "backend cuda cannot be used: cpu is no NVIDIA GPU; take backend auto or torch"),
        ("npu:0", "cuda", "backend cuda cannot be used: npu:0 is no NVIDIA GPU; take backend auto or torch"),
        ("cpu", "de", "backend de cannot be used: cpu is no NVIDIA GPU; take backend auto or torch"),
    ],
)
def test_backend_that_cannot_work_there_is_refused_and_not_replaced(on: str, backend: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(on, backend)
    assert message in str(caught.value)


def test_cuda_is_never_taken_on_hip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match=r"tensors on cuda:0: backend cuda .* cuda:0 is an AMD GPU \(HIP 6.4\)"):
        choose("cuda:0", "cuda")


def test_target_and_publisher_refuse_a_backend_before_anything_is_written(store: Path) -> None:
    with Publisher(str(store), backend="cuda") as publisher, pytest.raises(ConfigError, match="backend cuda"):
        publisher.publish({"w": torch.zeros(2)})
    assert not list(store.glob("manifests/*"))
    publish(store, {"w": torch.zeros(2)})
    with pytest.raises(ConfigError, match="backend cuda"):
        Follower(str(store), TensorTarget({"w": torch.zeros(2)}, backend="cuda")).prepare()


# ---------------------------------------------------------------- looked up outside the pause


def move(follower: Follower) -> Prepared:
    prepared = follower.prepare()
    assert prepared is not None
    prepared.apply()
    return prepared


def test_tensor_that_was_given_other_memory_since_it_was_staged_is_named_and_nothing_is_written(store: Path) -> None:
    trainer = {"a": torch.arange(100.0), "b": torch.arange(50.0)}
    live = {name: torch.nn.Parameter(torch.zeros_like(t)) for name, t in trainer.items()}
    with Publisher(str(store), anchors=False) as publisher, Follower(str(store), TensorTarget(live)) as follower:
        publisher.publish(trainer)
        first = follower.prepare()
        assert first is not None
        first.apply()
        trainer["a"][3] = 7.0
        trainer["b"][4] = 8.0
        publisher.publish(trainer)
        staged = follower.prepare()
        assert staged is not None
        before = live["b"].detach()
        live["b"].data = live["b"].data.clone()
        with pytest.raises(ConfigError, match="tensor b was given other memory since it was staged; prepare again"):
            staged.apply()
        assert before.tolist() == list(range(50))
        assert live["a"].tolist() == list(range(100))
        assert live["b"].tolist() == list(range(50))
        again = follower.prepare()
        assert again is not None
        assert again.apply() == 1
    assert live["a"].tolist() == trainer["a"].tolist()
    assert live["b"].tolist() == trainer["b"].tolist()


def test_tensor_that_does_not_change_is_looked_up_in_the_pause_too(store: Path) -> None:
    trainer = {"a": torch.arange(100.0), "b": torch.arange(50.0)}
    live = {name: torch.nn.Parameter(torch.zeros_like(t)) for name, t in trainer.items()}
    with Publisher(str(store), anchors=False) as publisher, Follower(str(store), TensorTarget(live)) as follower:
        publisher.publish(trainer)
        move(follower)
        trainer["a"][3] = 7.0
        publisher.publish(trainer)
        staged = follower.prepare()
        assert staged is not None
        live["b"].data = torch.ones(50)
        with pytest.raises(ConfigError, match="tensor b was given other memory since it was staged; prepare again"):
            staged.apply()
        assert live["a"].tolist() == list(range(100))


def test_other_memory_is_believed_only_when_it_was_proven_again(store: Path) -> None:
    """As after sleep and wake: the tensor that no delta changes has other bytes where it is now."""
    trainer = {"a": torch.arange(100.0), "b": torch.arange(50.0)}
    live = {name: torch.nn.Parameter(torch.zeros_like(t)) for name, t in trainer.items()}
    target = TensorTarget(live)
    with Publisher(str(store), anchors=False) as publisher, Follower(str(store), target) as follower:
        publisher.publish(trainer)
        move(follower)
        live["b"].data = live["b"].data.clone()
        assert target.open(follower.reader) == 0
        live["b"].data = torch.ones(50)
        trainer["a"][3] = 7.0
        publisher.publish(trainer)
        move(follower)
    assert live["a"].tolist() == trainer["a"].tolist()
    assert live["b"].tolist() == trainer["b"].tolist()


def test_undo_in_other_memory_is_refused(store: Path) -> None:
    trainer = {"a": torch.arange(100.0)}
    live = {"a": torch.nn.Parameter(torch.zeros(100))}
    with Publisher(str(store), anchors=False) as publisher, Follower(str(store), TensorTarget(live)) as follower:
        publisher.publish(trainer)
        move(follower)
        trainer["a"][3] = 7.0
        publisher.publish(trainer)
        applied = move(follower)
        assert isinstance(applied.staging, StagedTensors)
        live["a"].data = live["a"].data.clone()
        with pytest.raises(Poisoned, match="undoing version 1: tensor a was given other memory since; reseed"):
            applied.staging.undo()
        move(follower)  # reseeds
    assert live["a"].tolist() == trainer["a"].tolist()


def test_tensors_that_look_as_before_are_recognised_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"b": torch.zeros(4, 3), "a": torch.zeros(5, dtype=torch.int8)}
    layout = collect(given).layout
    roster = tensors.Roster.of(given, layout, "cuda:0")
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    assert tensors._recognise(given, roster) is None  # in host memory
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    live = tensors._recognise(given, roster)
    assert live is not None
    assert live.layout is layout
    assert [t is given[n] for t, n in zip(live.kept, ("a", "b"), strict=True)] == [True, True]
    others: dict[str, dict[str, torch.Tensor]] = {
        "another shape": {**given, "b": torch.zeros(3, 4)},
        "another dtype": {**given, "a": torch.zeros(5, dtype=torch.uint8)},
        "strided": {**given, "b": torch.zeros(3, 4).T},
        "negated view": {**given, "b": torch._neg_view(torch.zeros(4, 3))},
        "another class": {**given, "b": torch.nn.Parameter(torch.zeros(4, 3))},
        "another name": {"c": given["b"], "a": given["a"]},
        "one more": {**given, "c": torch.zeros(1)},
        "another order": {"a": given["a"], "b": given["b"]},
    }
    for what, changed in others.items():
        assert tensors._recognise(changed, roster) is None, what
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 1)
    assert tensors._recognise(given, roster) is None


def test_anchor_reaches_a_device_by_copies_that_stay_inside_one_tensor(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {f"t{i}": torch.full((n,), i + 1, dtype=torch.uint8) for i, n in enumerate((5, 11, 3, 40))}
    with Publisher(str(store), anchors=False) as publisher:
        publisher.publish(trainer)
    memory = np.zeros(59, np.uint8)
    begin = int(memory.__array_interface__["data"][0])
    begins = np.array([0, 5, 16, 19], np.uint64)
    copies: list[tuple[int, int]] = []

    class Other:
        def copy(self, target: int, source: int, nbytes: int) -> None:
            copies.append((target - begin, nbytes))
            view(target, nbytes)[:] = view(source, nbytes)

    monkeypatch.setattr(tensors, "_BOUNCE", 14)
    reader = Reader(open_store(str(store)))
    reader.load()
    tensors.read_anchor(reader.anchor(0), cast("tensors.Device", Other()), begins + np.uint64(begin), 1)
    assert memory.tolist() == [1] * 5 + [2] * 11 + [3] * 3 + [4] * 40
    assert copies == [(0, 5), (5, 9), (14, 2), (16, 3), (19, 9), (28, 14), (42, 14), (56, 3)]
