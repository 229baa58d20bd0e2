"""Ranks of a sharded sampler: each follows with the boxes that it holds, fetches what they need, and no other byte."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import DEVICE, raw_of, tensor_of
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import Stream
from strategies import box_layouts, changed_bytes, elements_of, partitions, random_bytes

import deltackpt.layout
from deltackpt.board import Group, StoreBoard
from deltackpt.errors import ChainError, ConfigError, DeltaError, IntegrityError, Poisoned, RankFailed
from deltackpt.follow import Follower, Prepared
from deltackpt.holding import Slice
from deltackpt.layout import Layout
from deltackpt.partition import Box, Partition
from deltackpt.replica import Replica
from deltackpt.slices import SliceTarget, StagedSlices
from deltackpt.store import LocalStore

torch = pytest.importorskip("torch")

HAS_NUMBA = importlib.util.find_spec("numba") is not None
HERE = [d for d in ("BF16", "U8", "F32", "I64", "F4", "F8_E4M3") if d != "F4" or hasattr(torch, "float4_e2m1fn_x2")]

LAYOUT = Layout(["a", "b", "c", "s"], ["BF16", "U8", "F32", "I16"], [[64, 40], [9000], [6, 10, 7], []])
COLUMNS = Partition(
    LAYOUT,
    [
        [(0, ((0, 64), (0, 10))), (1, ((0, 4000),))],
        [(0, ((0, 64), (10, 40))), (1, ((4000, 9000),)), (2, None), (3, None)],
    ],
)


def whole(layout: Layout, tensor: int) -> Box:
    return tuple((0, n) for n in layout.shapes[tensor])


def raw_box(layout: Layout, content: bytes, tensor: int, box: Box) -> bytes:
    flat = np.frombuffer(content, f"<u{layout.width[tensor]}")
    return bytes(flat[elements_of(layout, tensor, box)].tobytes())


def slices_of(layout: Layout, contents: Sequence[bytes], held: Sequence[tuple[int, Box]]) -> list[Slice]:
    """What a rank holds of a version, each slice in memory of its own."""
    return [
        Slice(
            layout.names[t], layout.shapes[t], box,
            tensor_of(layout.dtypes[t], [e - b for b, e in box], raw_box(layout, contents[t], t, box)),
        )
        for t, box in held
    ]  # fmt: skip


def raws(slices: Sequence[Slice]) -> list[bytes]:
    return [raw_of(one.tensor) for one in slices]


def due(made: Stream, version: int, slices: Sequence[Slice]) -> list[bytes]:
    position = made.layout.position
    return [
        raw_box(made.layout, made.contents[version][position[s.name]], position[s.name], tuple(s.box)) for s in slices
    ]


def move(follower: Follower, version: int | None = None) -> Prepared:
    prepared = follower.prepare(version)
    assert prepared is not None
    prepared.apply()
    return prepared


def fetched(prepared: Prepared) -> int:
    assert isinstance(prepared.staging, StagedSlices)
    return prepared.staging.nbytes


@pytest.fixture
def made(tmp_path: Path) -> Stream:
    """Versions 0 to 3: full, columns, whole tensors, columns."""
    contents = [random_bytes(LAYOUT, 0)]
    for seed, density in ((1, 0.02), (2, 0.4), (3, 0.05)):
        contents.append(changed_bytes(LAYOUT, contents[-1], density, seed))
    stream = Stream(tmp_path / "store", LAYOUT, contents[0])
    for new, partition in zip(contents[1:], (COLUMNS, None, COLUMNS), strict=True):
        stream.publish(new, partition)
    return stream


HOLDINGS: dict[str, list[tuple[int, Box]]] = {
    "columns": [(0, ((0, 64), (10, 40)))],
    "columns of two parts": [(0, ((0, 64), (5, 25)))],
    "rows": [(0, ((3, 40), (0, 40))), (1, ((100, 8300),))],
    "rows and columns": [(0, ((3, 40), (7, 30)))],
    "whole tensors": [(2, whole(LAYOUT, 2)), (3, ())],
    "experts": [(2, ((2, 4), (0, 10), (0, 7)))],
    "middle dimension": [(2, ((0, 6), (3, 9), (0, 7)))],
    "all dimensions": [(2, ((1, 5), (3, 9), (2, 6)))],
    "several boxes of a tensor": [(0, ((0, 10), (0, 40))), (0, ((20, 64), (0, 8))), (0, ((20, 64), (30, 40)))],
    "nothing": [],
}


@pytest.mark.parametrize("holding", HOLDINGS)
def test_slices_follow_forwards_and_backwards(made: Stream, holding: str) -> None:
    slices = slices_of(LAYOUT, made.contents[0], HOLDINGS[holding])
    places = [(s.tensor.data_ptr(), s.tensor.stride()) for s in slices]
    target = SliceTarget(slices, version=0)
    follower = Follower(made.url, target)
    assert follower.prepare(0) is None
    for version in (1, 2, 3, 0, 3, 1):
        move(follower, version)
        assert raws(slices) == due(made, version, slices)
    assert follower.prepare(1) is None
    assert [(s.tensor.data_ptr(), s.tensor.stride()) for s in slices] == places


@pytest.mark.parametrize("holding", HOLDINGS)
def test_slices_of_nothing_known_are_read_from_an_anchor(made: Stream, holding: str) -> None:
    slices = slices_of(LAYOUT, [bytes(n) for n in LAYOUT.nbytes.tolist()], HOLDINGS[holding])
    follower = Follower(made.url, SliceTarget(slices))
    move(follower)
    assert raws(slices) == due(made, 3, slices)


def test_slices_in_strided_memory_are_written_where_they_are(made: Stream) -> None:
    """A transposed matrix, and columns of a larger buffer of which the rest stays as it is."""
    first, second = slices_of(LAYOUT, made.contents[0], [(0, ((0, 64), (10, 40))), (2, ((0, 6), (3, 9), (0, 7)))])
    turned = torch.empty((30, 64), dtype=torch.bfloat16, device=DEVICE).t().copy_(first.tensor)
    buffer = torch.full((6, 10, 9), 7.0, device=DEVICE)
    inside = buffer[:, 2:8, 1:8].copy_(second.tensor)
    slices = [Slice(first.name, first.shape, first.box, turned), Slice(second.name, second.shape, second.box, inside)]
    follower = Follower(made.url, SliceTarget(slices, version=0))
    for version in (3, 1):
        move(follower, version)
        assert raws(slices) == due(made, version, slices)
    assert SliceTarget(slices).memory is not None
    move(Follower(made.url, SliceTarget(slices)), 2)
    assert raws(slices) == due(made, 2, slices)
    buffer[:, 2:8, 1:8] = 7.0
    assert bool((buffer == 7.0).all())


@pytest.mark.parametrize(
    "kernels", ["numpy", pytest.param("numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="no numba"))]
)
@settings(max_examples=12)
@given(data=st.data())
def test_any_ranks_follow_any_parts_and_their_sums_are_the_state(
    kernels: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltackpt.backend.use_jit", lambda _layout: kernels == "numba")
        _follow_as_ranks(data, tmp_path_factory)


def _follow_as_ranks(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    layout = data.draw(box_layouts(HERE))
    made = Stream(tmp_path_factory.mktemp("s") / "store", layout, random_bytes(layout, 7))
    for seed in range(2):
        new = changed_bytes(layout, made.contents[-1], data.draw(st.sampled_from((0.01, 0.5))), seed)
        made.publish(new, data.draw(st.one_of(st.none(), partitions(layout))))
    ranks = data.draw(partitions(layout))
    total = 0
    for rank in range(ranks.parts):
        slices = slices_of(layout, made.contents[0], ranks.places(rank))
        target = SliceTarget(slices, version=0)
        follower = Follower(made.url, target)
        move(follower, 2)
        assert raws(slices) == due(made, 2, slices)
        total += int(target.sums(follower.reader).sum(dtype=np.uint64))
        # Kept up from the changes alone: a full pass finds the same.
        again = SliceTarget(slices, version=2)
        again.open(follower.reader)
        assert again.sums(follower.reader).tolist() == target.sums(follower.reader).tolist()
        move(follower, 1)
        assert raws(slices) == due(made, 1, slices)
    state = follower.reader.manifest(2).state
    assert f"{total % 2**64:016x}" == state


# ---------------------------------------------------------------- what is fetched


@pytest.fixture
def experts(tmp_path: Path) -> Iterator[Stream]:
    """16 experts of 32 KiB in groups of 64 KiB; everything changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltackpt.layout, "GROUP_BYTES", 64 << 10)
        layout = Layout([f"expert.{e:02d}" for e in range(16)], ["U8"] * 16, [[32 << 10]] * 16)
        first = random_bytes(layout, 1)
        stream = Stream(tmp_path / "experts", layout, first)
        stream.publish(changed_bytes(layout, first, 0.1, 1))
        by_rank = Partition(layout, [[(e, None) for e in range(r, 16, 4)] for r in range(4)])
        stream.publish(changed_bytes(layout, stream.contents[-1], 0.1, 2), by_rank)
        yield stream


@pytest.mark.parametrize(("held", "version", "share"), [((4, 5), 1, 1 / 8), ((1, 5, 9, 13), 2, 1 / 4)])
def test_a_rank_fetches_the_groups_that_hold_its_experts(
    experts: Stream, held: tuple[int, ...], version: int, share: float
) -> None:
    layout = experts.layout
    slices = slices_of(layout, experts.contents[version - 1], [(e, whole(layout, e)) for e in held])
    follower = Follower(experts.url, SliceTarget(slices, version=version - 1))
    prepared = move(follower, version)
    assert raws(slices) == due(experts, version, slices)
    stored = follower.reader.manifest(version).totals.stored
    tables = sum(s.tensors[1] for s in follower.reader.manifest(version).shards)
    assert 0.9 * share * (stored - tables) < fetched(prepared) - tables < 1.1 * share * (stored - tables)


def test_a_reseed_reads_the_rows_that_are_held(experts: Stream) -> None:
    layout = experts.layout
    slices = slices_of(layout, experts.contents[0], [(3, ((1000, 5000),)), (7, whole(layout, 7))])
    assert fetched(move(Follower(experts.url, SliceTarget(slices)), 0)) == 4000 + (32 << 10)


def test_damage_in_a_group_that_is_not_held_is_not_met_and_in_one_that_is_names_it(experts: Stream) -> None:
    layout = experts.layout
    reader = Follower(experts.url, SliceTarget([])).reader
    reader.load()
    delta = reader.delta(2)
    record = next(f for f in delta.fetched[1].index.frames if f["plane"] == 8)
    path = Path(experts.url) / delta.fetched[1].shard.key
    raw = bytearray(path.read_bytes())
    raw[int(record["offset"])] ^= 1
    path.write_bytes(raw)
    for rank in range(4):
        slices = slices_of(layout, experts.contents[1], [(e, whole(layout, e)) for e in range(rank, 16, 4)])
        follower = Follower(experts.url, SliceTarget(slices, version=1))
        if rank != 1:
            move(follower, 2)
            continue
        with pytest.raises(IntegrityError, match=r"version 2: .*checksum of a frame of group 2 differs; fetch it"):
            follower.prepare(2)
        assert raws(slices) == due(experts, 1, slices)


# ---------------------------------------------------------------- proofs


def test_slices_that_changed_under_the_target_are_undone(made: Stream) -> None:
    slices = slices_of(LAYOUT, made.contents[0], [(0, ((0, 64), (0, 10))), (2, whole(LAYOUT, 2))])
    follower = Follower(made.url, SliceTarget(slices, version=0))
    assert follower.prepare(0) is None
    prepared = follower.prepare(1)
    assert prepared is not None
    # The part of the trainer is what this rank holds of `a`: so its changes are proven, though it is no whole tensor.
    slices[0].tensor.view(torch.int16).bitwise_xor_(0x0100)
    before = raws(slices)
    with pytest.raises(IntegrityError, match="a did not change as published, all was undone"):
        prepared.apply()
    assert raws(slices) == before
    move(follower)  # reseeds
    assert raws(slices) == due(made, 3, slices)


def test_interrupted_apply_is_poisoned_and_reseeded(made: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = slices_of(LAYOUT, made.contents[0], [(0, ((0, 64), (3, 20))), (2, whole(LAYOUT, 2))])
    target = SliceTarget(slices, version=0)
    follower = Follower(made.url, target)
    prepared = follower.prepare(1)
    assert prepared is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(target.device(None)), "apply_rows", lambda *_args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared.apply()
    with pytest.raises(Poisoned):
        prepared.apply()
    move(follower, 1)
    assert raws(slices) == due(made, 1, slices)


def test_slices_that_are_given_other_memory_are_not_taken_for_those_that_were_staged(made: Stream) -> None:
    slices = slices_of(LAYOUT, made.contents[0], [(0, ((0, 64), (3, 20))), (2, whole(LAYOUT, 2))])
    target = SliceTarget(slices, version=0)
    follower = Follower(made.url, target)
    prepared = follower.prepare(1)
    assert prepared is not None
    old = slices[0].tensor.detach()
    slices[0].tensor.data = old.clone()
    with pytest.raises(ConfigError, match="tensor a was given other memory since it was staged; prepare again"):
        prepared.apply()
    assert raws(slices) == due(made, 0, slices)
    assert raw_of(old) == raws(slices)[0]
    move(follower, 1)
    assert raws(slices) == due(made, 1, slices)
    # Other memory with other bytes, of which no whole is held: this rank cannot know of which version they are.
    slices[0].tensor.data = slices[0].tensor + 1
    assert target.open(follower.reader) is None
    move(follower, 2)
    assert raws(slices) == due(made, 2, slices)


def test_slices_that_are_given_other_memory_before_an_anchor_is_read_are_named(made: Stream) -> None:
    slices = slices_of(LAYOUT, [bytes(n) for n in LAYOUT.nbytes.tolist()], [(0, ((0, 64), (3, 20)))])
    follower = Follower(made.url, SliceTarget(slices))
    prepared = follower.prepare(0)
    assert prepared is not None
    slices[0].tensor.data = slices[0].tensor.clone()
    with pytest.raises(ConfigError, match="tensor a was given other memory since it was staged; prepare again"):
        prepared.apply()
    move(follower, 0)
    assert raws(slices) == due(made, 0, slices)


def test_apply_can_be_taken_back(made: Stream) -> None:
    slices = slices_of(LAYOUT, made.contents[0], [(0, ((0, 64), (3, 20))), (2, whole(LAYOUT, 2))])
    target = SliceTarget(slices, version=0)
    follower = Follower(made.url, target)
    follower.prepare(0)
    before = target.sums(follower.reader).tolist()
    prepared = move(follower, 3)
    assert isinstance(prepared.staging, StagedSlices)
    assert prepared.staging.undo() == 0
    assert raws(slices) == due(made, 0, slices)
    assert target.sums(follower.reader).tolist() == before
    move(follower, 3)
    assert raws(slices) == due(made, 3, slices)


def test_ranks_of_a_replica_go_to_a_version_together_and_their_sum_is_its_state(made: Stream, tmp_path: Path) -> None:
    """Two ranks: columns of one tensor, rows of another, one whole on both. Then one rank's columns are wrong."""
    held = [
        [(0, ((0, 64), (0, 20))), (1, ((0, 5000),)), (2, whole(LAYOUT, 2))],
        [(0, ((0, 64), (20, 40))), (1, ((5000, 9000),)), (2, whole(LAYOUT, 2)), (3, ())],
    ]
    ranks = [slices_of(LAYOUT, made.contents[0], boxes) for boxes in held]

    def follow(rank: int, versions: Sequence[int]) -> list[int | str]:
        board = StoreBoard(LocalStore(tmp_path / "board"), "session")
        target = SliceTarget(ranks[rank], version=0)
        with Replica(Follower(made.url, target), Group(rank, 2, board, 3600.0), stage_s=60.0, apply_s=60.0) as replica:
            found: list[int | str] = []
            for version in versions:
                joint = replica.prepare(version, wait_s=60.0)
                assert joint is not None
                try:
                    found.append(joint.apply())
                except RankFailed as exc:
                    found.append(str(exc))
                if version == 2:
                    ranks[rank][0].tensor.view(torch.int16).bitwise_xor_(rank << 8)
            return found

    with ThreadPoolExecutor(2) as pool:
        found = [f.result(timeout=120) for f in [pool.submit(follow, rank, (1, 2, 3)) for rank in range(2)]]
    assert [f[:2] for f in found] == [[1, 2], [1, 2]]
    # A column that is part of no whole: nobody alone could see it.
    for slices, one in zip(ranks, found, strict=True):
        assert "their parts make the state" in str(one[2])
        assert raws(slices)[1:] == due(made, 2, slices)[1:]


def test_version_by_word_is_held_against_the_tensors_that_are_whole(made: Stream) -> None:
    slices = slices_of(LAYOUT, made.contents[1], [(0, ((0, 64), (3, 20))), (2, whole(LAYOUT, 2))])
    with pytest.raises(ChainError, match="the slices do not hold version 2: c differs"):
        Follower(made.url, SliceTarget(slices, version=2)).prepare()
    assert Follower(made.url, SliceTarget(slices, version=1)).prepare(1) is None


def test_names_that_share_memory_are_written_once(tmp_path: Path) -> None:
    layout = Layout(["embed", "head", "rest"], ["F32"] * 3, [[8, 6], [8, 6], [5]])
    first = random_bytes(layout, 3)
    first[1] = first[0]
    second = changed_bytes(layout, first, 0.3, 4)
    second[1] = second[0]
    made = Stream(tmp_path / "store", layout, first)
    made.publish(second, Partition(layout, [[(0, None)], [(1, None), (2, None)]]))
    (one,) = slices_of(layout, first, [(0, ((0, 8), (2, 5)))])
    slices = [one, Slice("head", one.shape, one.box, one.tensor)]
    target = SliceTarget(slices, version=0)
    follower = Follower(made.url, target)
    move(follower)
    assert raws(slices) == due(made, 1, slices)
    assert len(set(target.boxes().tolist())) == 2
    third = [second[0], first[1], second[2]]
    made.publish(third)
    with pytest.raises(ConfigError, match="version 2 has other values for head"):
        follower.prepare()


def test_equal_boxes_have_equal_numbers_and_others_have_not(made: Stream) -> None:
    def numbers(*held: tuple[int, Box]) -> list[int]:
        target = SliceTarget(slices_of(LAYOUT, made.contents[0], held), version=0)
        follower = Follower(made.url, target)
        follower.prepare(0)
        return [int(n) for n in target.boxes()]

    a, b = (0, ((0, 64), (3, 20))), (0, ((0, 64), (3, 21)))
    assert numbers(a, (3, ())) == [*numbers(a), *numbers((3, ()))]
    assert numbers(a) != numbers(b)


# ---------------------------------------------------------------- refusals


def refused(made: Stream, *slices: Slice | tuple[str, Any]) -> str:
    with pytest.raises(DeltaError) as caught:
        Follower(made.url, SliceTarget(list(slices))).prepare()
    assert type(caught.value) is ConfigError
    return str(caught.value)


def test_slices_that_do_not_fit_are_refused_by_name(made: Stream) -> None:
    (good,) = slices_of(LAYOUT, made.contents[0], [(0, ((0, 64), (0, 10)))])
    assert "tensor x is not published" in refused(made, Slice("x", good.shape, good.box, good.tensor))
    assert "tensor a is BF16 in the store and F32 here" in refused(
        made, Slice("a", good.shape, good.box, good.tensor.float())
    )
    assert "tensor a has shape [64, 40] in the store" in refused(made, Slice("a", (64, 10), good.box, good.tensor))
    assert "expected a box inside the shape" in refused(made, Slice("a", good.shape, ((0, 64), (35, 45)), good.tensor))
    assert "expected a box inside the shape" in refused(made, Slice("a", good.shape, ((0, 64), (0, 11)), good.tensor))
    assert "is given twice" in refused(made, good, good)
    assert "overlaps another tensor in memory" in refused(
        made, good, Slice("a", good.shape, ((0, 63), (0, 10)), good.tensor[1:])
    )
    assert "is a box of [64, 39] here" in refused(made, ("a", torch.empty(64, 39, dtype=torch.bfloat16, device=DEVICE)))


def test_slices_are_refused_by_a_backend_that_follows_whole_tensors(made: Stream) -> None:
    (one,) = slices_of(LAYOUT, made.contents[0], [(0, ((0, 64), (0, 10)))])
    with pytest.raises(ConfigError, match=r"backend torch \(asked for by name\) follows whole tensors only"):
        Follower(made.url, SliceTarget([one], backend="torch")).prepare()


def test_names_that_share_memory_but_are_other_boxes_are_refused(tmp_path: Path) -> None:
    layout = Layout(["embed", "head"], ["F32"] * 2, [[8, 6], [8, 6]])
    made = Stream(tmp_path / "store", layout, random_bytes(layout, 3))
    (one,) = slices_of(layout, made.contents[0], [(0, ((0, 4), (0, 6)))])
    other = Slice("head", one.shape, ((4, 8), (0, 6)), one.tensor)
    assert re.search("slices .* share memory, but are other boxes", refused(made, one, other))


def test_dtensors_say_which_box_is_here(made: Stream) -> None:
    distributed = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    distributed.init_process_group("fake", rank=1, world_size=4, store=fake.FakeStore())
    try:
        mesh = init_device_mesh(DEVICE, (2, 2))
        (column, expert, copy) = slices_of(
            LAYOUT, made.contents[0], [(0, ((0, 64), (20, 40))), (2, ((0, 6), (5, 10), (0, 7))), (3, ())]
        )
        tensors = {
            "a": DTensor.from_local(column.tensor, mesh, [Replicate(), Shard(1)], run_check=False),
            "c": DTensor.from_local(expert.tensor, mesh, [Replicate(), Shard(1)], run_check=False),
            "s": DTensor.from_local(copy.tensor, mesh, [Replicate(), Replicate()], run_check=False),
        }
        follower = Follower(made.url, SliceTarget(tensors, version=0))
        move(follower)
        assert raws([column, expert, copy]) == due(made, 3, [column, expert, copy])
    finally:
        distributed.destroy_process_group()
