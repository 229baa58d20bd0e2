"""The torch backend gives the bytes of the CPU backend, on whatever torch calls a device; here, on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import raw_of
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import encode_parts
from strategies import Memory, Pair, box_layouts, pairs, partitions, random_bytes

import deltackpt.layout
from deltackpt import backend
from deltackpt.backend import Cpu
from deltackpt.digest import keys
from deltackpt.errors import ConfigError, FormatError, Poisoned
from deltackpt.follow import Follower
from deltackpt.layout import Layout
from deltackpt.publish import Publisher
from deltackpt.shard import EncodedGroup, Frame, assemble
from deltackpt.tensors import Choice, TensorTarget

torch = pytest.importorskip("torch", reason="the torch backend works on torch tensors")

from deltackpt import torchdevice  # noqa: E402 - after the check for torch
from deltackpt.torchdevice import Torch  # noqa: E402

CODECS = ("raw", "zstd", "deflate", "lz4", "snappy")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Torch's own threads cost more than they give here, and much more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Held:
    """Tensors of a torch backend, each `skew` bytes into a storage of its own."""

    def __init__(self, device: Torch, contents: list[bytes], skew: int = 0) -> None:
        self.storages = [torch.zeros(len(c) + 32, dtype=torch.uint8) for c in contents]
        self.tensors = [s[skew : skew + len(c)] for s, c in zip(self.storages, contents, strict=True)]
        for tensor, content in zip(self.tensors, contents, strict=True):
            tensor.copy_(torch.from_numpy(np.frombuffer(content, np.uint8).copy()))
        self.held, self.addresses = device.hold(self.tensors)

    def contents(self) -> list[bytes]:
        return [t.numpy().tobytes() for t in self.tensors]

    def around(self) -> int:
        """What lies around the tensors, added up."""
        return sum(int(s.long().sum()) for s in self.storages) - sum(int(t.long().sum()) for t in self.tensors)


def image(groups: list[EncodedGroup]) -> bytes:
    return b"".join(bytes(p) for p in assemble("data/x/s", groups).parts)


def frames(groups: list[EncodedGroup]) -> Iterator[tuple[int, tuple[Frame, ...]]]:
    return ((g.group, g.frames) for g in groups)


@given(
    pair=pairs(),
    codec=st.sampled_from(CODECS),
    form=st.sampled_from(["sparse", "mask"]),
    skew=st.integers(0, 15),
    group_bytes=st.sampled_from([20_000, 256 << 20]),
    piece=st.sampled_from([10_000, 16 << 20]),
    work=st.sampled_from([9_000, 4 << 20]),
)
@settings(max_examples=20)
def test_bytes_and_fingerprints_are_those_of_the_cpu_backend(
    pair: Pair, codec: str, form: str, skew: int, group_bytes: int, piece: int, work: int
) -> None:
    layout, device = pair.layout, Torch("cpu", threads=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltackpt.layout, "GROUP_BYTES", group_bytes)
        patch.setattr(torchdevice, "PIECE", piece)
        patch.setattr(torchdevice, "_WORK", work)
        before, after = Memory(pair.old), Memory(pair.new)
        expected = list(backend.encode(layout, before.addresses, after.addresses, codec=codec, form=form))
        old, new = Held(device, pair.old, skew), Held(device, pair.new, skew // 2)
        encoding = device.encode(layout, old.addresses, new.addresses, codec=codec, form=form)
        groups = list(encoding.groups())
        assert image(groups) == image(expected)
        assert [g.fingerprint.tolist() for g in groups] == [g.fingerprint.tolist() for g in expected]
        assert [g.changed for g in groups] == [g.changed for g in expected]
        edge = old.around()
        table = backend.fingerprints(layout, before.addresses)
        assert device.fingerprints(layout, old.addresses).tolist() == table.tolist()
        staged = device.stage_groups(layout, frames(groups))
        difference = device.apply(layout, staged, old.addresses)
        assert old.contents() == pair.new
        assert difference.tolist() == (backend.fingerprints(layout, after.addresses) - table).tolist()
        back = device.apply(layout, staged, old.addresses)
        assert (old.contents(), old.around()) == (pair.old, edge)
        assert (difference + back).tolist() == [0] * len(layout.names)
        encoding.advance(old.addresses)
        assert old.contents() == pair.new


@given(pairs(box_layouts()), st.data())
@settings(max_examples=20)
def test_versions_in_parts_are_applied_as_on_the_cpu(pair: Pair, choices: st.DataObject) -> None:
    partition, device = choices.draw(partitions(pair.layout)), Torch("cpu", threads=1)
    groups = [g for part in encode_parts(partition, pair.old, pair.new) for g in part]
    here, there = Memory(pair.old), Held(device, pair.old, choices.draw(st.integers(0, 15)))
    expected = backend.apply(partition, backend.decode(partition, groups), here.addresses)
    found = device.apply(partition, device.stage_groups(partition, frames(groups)), there.addresses)
    assert there.contents() == pair.new
    assert found.tolist() == expected.tolist()


def test_keys_wrap_as_u64_do() -> None:
    words = np.array([0, 1, 2, 3, 2**31, 2**40 + 7], np.uint64)
    found = torchdevice._keys(torch.from_numpy(words.view(np.int64))).numpy().view(np.uint64)
    assert [f"{k:016x}" for k in found.tolist()[:4]] == [
        "e220a8397b1dcdaf", "910a2dec89025cc1", "975835de1c9756cf", "1d0b14e4db018fed",
    ]  # fmt: skip
    assert found.tolist() == keys(words).tolist()


def test_columns_that_do_not_fit_are_refused_before_the_device_sees_them() -> None:
    layout, device = Layout(["w"], ["U8"], [[100]]), Torch("cpu")
    frame = [Frame(plane, 0, 0, 0, len(c), c) for plane, c in [(0, b"\1\0"), (1, b"\x64"), (2, b"\0"), (8, b"\1")]]
    with pytest.raises(FormatError, match="tile 0: its last change lies outside its 100 elements"):
        device.stage_groups(layout, [(0, frame)])


# ---------------------------------------------------------------- memory


def test_copies_go_between_device_and_host_and_inside_of_what_was_allocated() -> None:
    device = Torch("cpu")
    memory, begin = device.allocate(10)
    host = np.arange(10, dtype=np.uint8)
    device.copy(begin, host.__array_interface__["data"][0], 10)
    device.copy(begin + 6, begin + 1, 3)
    back = np.zeros(4, np.uint8)
    device.copy(back.__array_interface__["data"][0], begin + 5, 4)
    assert back.tolist() == [5, 1, 2, 3]
    del memory


def test_a_base_in_host_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="backend torch cannot work on a base in host memory; leave base_on out"):
        Torch("cpu").allocate(10, in_host=True)


def test_what_nobody_holds_any_more_is_forgotten() -> None:
    device = Torch("cpu")
    kept, addresses = device.hold([torch.arange(3)])
    for _ in range(50):
        device.hold([torch.zeros(1000)] * 3)
    gc.collect()
    assert list(device._memories) == addresses.tolist()
    assert len(device._begins) < 20
    assert device._bytes(int(addresses[0]) + 8, 8).view(torch.int64).tolist() == [1]
    del kept


def test_arrays_that_cannot_be_written_are_held() -> None:
    device = Torch("cpu")
    array = np.frombuffer(b"abcd", np.uint8)
    held, addresses = device.hold([array])
    assert bytes(device._bytes(int(addresses[0]), 4).tolist()) == b"abcd"
    del held


def test_tensors_of_inference_mode_are_written() -> None:
    layout, device = Layout(["w"], ["I64"], [[3]]), Torch("cpu")
    with torch.inference_mode():
        live = torch.zeros(3, dtype=torch.int64)
    new = torch.tensor([1, 0, -1])
    held, addresses = device.hold([live, new])
    groups = list(device.encode(layout, addresses[:1], addresses[1:], codec="zstd", form="sparse").groups())
    device.apply(layout, device.stage_groups(layout, frames(groups)), addresses[:1])
    assert live.tolist() == [1, 0, -1]
    del held


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensors on meta have no memory; materialise them first"):
        Torch("meta")


@pytest.mark.parametrize(("method", "error"), [("apply", Poisoned), ("fingerprints", ConfigError)])
def test_what_torch_cannot_do_is_an_error_of_this_package(
    monkeypatch: pytest.MonkeyPatch, method: str, error: type[Exception]
) -> None:
    layout, device = Layout(["w"], ["U8"], [[3]]), Torch("cpu")
    held, addresses = device.hold([torch.zeros(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)])
    groups = list(device.encode(layout, addresses[:1], addresses[1:], codec="raw", form="sparse").groups())
    staged = device.stage_groups(layout, frames(groups))

    def no_cumsum(*_: Any) -> Any:
        raise NotImplementedError("cumsum is not there\nand more")

    monkeypatch.setattr(torch, "cumsum", no_cumsum)
    arguments = (layout, staged, addresses[:1]) if method == "apply" else (layout, addresses[:1])
    with pytest.raises(error, match=r"^torch on cpu: cumsum is not there; "):
        getattr(device, method)(*arguments)
    del held


def test_both_backends_copy_and_hold_alike() -> None:
    contents = random_bytes(Layout(["a", "b"], ["U8", "F32"], [[5], [3]]), 0)
    for device in (Cpu(), Torch("cpu")):
        tensors = [torch.from_numpy(np.frombuffer(c, np.uint8).copy()) for c in contents]
        held, addresses = device.hold(tensors)
        memory, begin = device.allocate(12)
        device.copy(begin, int(addresses[1]), 12)
        tensors[1].zero_()
        device.copy(int(addresses[1]), begin, 12)
        assert tensors[1].numpy().tobytes() == contents[1]
        del held, memory


# ---------------------------------------------------------------- publishers and targets


DTYPES = ("float64", "float32", "bfloat16", "complex64", "int64", "int16", "uint8", "bool", "float8_e4m3fn")


def weights(seed: int) -> dict[str, Any]:
    """Tensors of many dtypes: contiguous, strided, in the middle of a storage, tied, empty, without dimensions."""
    rng = np.random.default_rng(seed)

    def fresh(dtype: str, *shape: int) -> Any:
        kind = getattr(torch, dtype)
        raw = rng.integers(0, 2, (*shape, kind.itemsize), dtype=np.uint8)
        return torch.from_numpy(raw).view(kind).reshape(shape)

    found = {f"{dtype} {n}": fresh(dtype, n) for dtype in DTYPES for n in (1, 9_001)}
    found["transposed"] = fresh("float32", 40, 300).T
    found["odd address"] = fresh("uint8", 1001)[1:]
    found["scalar"] = fresh("float32", 1)[0]
    found["empty"] = torch.empty(0, 4, dtype=torch.bfloat16)
    found["tied"] = found["bfloat16 9001"]
    return found


def raws(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: raw_of(tensor) for name, tensor in tensors.items()}


def test_publisher_and_target_go_through_torch_and_write_the_same_store(tmp_path: Path) -> None:
    shards = []
    for name in ("cpu", "torch"):
        with Publisher(str(tmp_path / name), backend=name, run_id="r", anchors=False) as publisher:
            for seed in range(3):
                publisher.publish(weights(seed))
            assert publisher.choice == Choice("cpu", name, "asked for by name")
        shards.append(sorted(p.read_bytes() for p in tmp_path.glob(f"{name}/data/*/*.safetensors")))
    assert shards[0] == shards[1]
    assert len(shards[0]) == 3
    live = weights(0)
    places = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in live.items()}
    target = TensorTarget(live, backend="torch")
    assert target.choice is None
    follower = Follower(str(tmp_path / "torch"), target)
    for version in (1, 2, 0):
        prepared = follower.prepare(version)
        assert prepared is not None
        assert prepared.apply() == version
        assert raws(live) == raws(weights(version))
    assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in live.items()} == places
    assert target.choice == Choice("cpu", "torch", "asked for by name")


def test_torch_target_is_reseeded_from_an_anchor(tmp_path: Path) -> None:
    with Publisher(str(tmp_path / "s"), run_id="r", anchors=False) as publisher:
        publisher.publish(weights(0))
        publisher.publish(weights(1))
    live = weights(5)
    prepared = Follower(str(tmp_path / "s"), TensorTarget(live, backend="torch")).prepare()
    assert prepared is not None
    assert (prepared.previous, prepared.plan.anchor) == (None, 0)
    prepared.apply()
    assert raws(live) == raws(weights(1))


@pytest.mark.parametrize(("held", "kind"), [(1, "empty"), (0, "rewind"), (7, "delta")])
def test_torch_publisher_goes_on_from_what_the_store_holds(tmp_path: Path, held: int, kind: str) -> None:
    store = str(tmp_path / "s")
    with Publisher(store, run_id="r", anchors=False) as publisher:
        publisher.publish(weights(0))
        publisher.publish(weights(1))
    with Publisher(store, run_id="r", anchors=False, backend="torch") as publisher:
        manifest = publisher.publish(weights(held))
        assert manifest.kind == kind
        publisher.publish(weights(3))
    live = weights(1)
    prepared = Follower(store, TensorTarget(live)).prepare()
    assert prepared is not None
    prepared.apply()
    assert raws(live) == raws(weights(3))


def test_numpy_arrays_are_published_through_torch(tmp_path: Path) -> None:
    with Publisher(str(tmp_path / "s"), backend="torch", anchors=False) as publisher:
        publisher.publish({"w": np.arange(100, dtype=np.int16)})
        assert publisher.publish({"w": np.arange(1, 101, dtype=np.int16)}).totals.changed == 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_torch_works_where_a_gpu_holds_the_tensors(tmp_path: Path) -> None:
    def on_gpu(seed: int) -> dict[str, Any]:
        found = {name: tensor.cuda() for name, tensor in weights(seed).items()}
        return found | {"tied": found["bfloat16 9001"]}

    shards = []
    for name, made in (("cpu", weights), ("torch", on_gpu)):
        with Publisher(str(tmp_path / name), backend=name, run_id="r", anchors=False) as publisher:
            for seed in range(3):
                publisher.publish(made(seed))
        shards.append(sorted(p.read_bytes() for p in tmp_path.glob(f"{name}/data/*/*.safetensors")))
    assert shards[0] == shards[1]
    live = on_gpu(5)
    follower = Follower(str(tmp_path / "torch"), TensorTarget(live, backend="torch"))
    for version in (1, 2, 0):
        prepared = follower.prepare(version)
        assert prepared is not None
        assert prepared.apply() == version
        assert raws({name: tensor.cpu() for name, tensor in live.items()}) == raws(weights(version))
