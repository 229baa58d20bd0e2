"""Partitions: what they cut, how they are written, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import Ranks, encode_parts
from strategies import Memory, box_layouts, elements_of, layouts, pairs, partitions

import deltackpt.backend as module
import deltackpt.layout
import deltackpt.partition
from deltackpt.backend import READ, SET, apply, decode, decode_group, encode, fingerprints, pack, part_fingerprints
from deltackpt.errors import FormatError
from deltackpt.layout import Layout
from deltackpt.partition import Partition

HAS_NUMBA = importlib.util.find_spec("numba") is not None


@pytest.fixture(params=["numpy", pytest.param("numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="no numba"))])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run with these kernels, whatever the size of the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "use_jit", lambda _layout: request.param == "numba")
        yield request.param


# ---------------------------------------------------------------- encoding

CUT = Layout(["a", "b", "c", "d", "e"], ["BF16", "F4", "F32", "U8", "F32"], [[4, 6], [2, 8], [], [5], [0, 2]])
PARTS = [[(3, ((0, 2),)), (0, ((0, 4), (0, 3)))], [(0, ((0, 4), (3, 6))), (2, None), (1, None)], [], [(3, ((2, 5),))]]
ENCODED = (
    b'{"layout":"%b","parts":['
    b'{"whole":[],"rows":[3,0,2],"boxes":[[0,0,4,0,3]]},'
    b'{"whole":[1,2],"rows":[],"boxes":[[0,0,4,3,6]]},'
    b'{"whole":[],"rows":[],"boxes":[]},'
    b'{"whole":[],"rows":[3,2,5],"boxes":[]}]}\n'
)


def test_partition_is_written_byte_for_byte() -> None:
    partition = Partition(CUT, PARTS)
    assert partition.encoded == ENCODED.replace(b"%b", CUT.digest.encode())
    assert Partition.decode(partition.encoded, CUT).places(1) == [(0, ((0, 4), (3, 6))), (1, ((0, 2), (0, 8))), (2, ())]
    assert partition.digest == "4438a34cf6a1aea21d4360a49608efd88dca63c38a2d48e43e0f28f6f95cc3f2"


def test_groups_are_those_of_part_0_then_of_part_1() -> None:
    partition = Partition(CUT, PARTS)
    assert [(g.width, g.tensor.tolist(), g.count.tolist()) for g in partition.groups] == [
        (1, [3], [2]), (2, [0], [12]), (1, [1], [8]), (2, [0], [12]), (4, [2], [1]), (1, [3], [3]),
    ]  # fmt: skip
    assert partition.group_begin.tolist() == [0, 2, 5, 5, 6]
    assert [partition.part_of(g) for g in range(6)] == [0, 0, 1, 1, 1, 3]
    assert partition.group_names(5) == "d of part 3"


def test_whole_tensors_of_one_part_are_the_groups_of_the_layout() -> None:
    layout = Layout(["a", "b", "c"], ["U8", "F32", "U8"], [[9000], [3, 3], [5]])
    partition = Partition(layout, [[(0, None), (1, None), (2, None)]])
    for mine, own in zip(partition.groups, layout.groups, strict=True):
        assert [mine.tensor.tolist(), mine.start.tolist(), mine.count.tolist()] == [
            own.tensor.tolist(), own.start.tolist(), own.count.tolist(),
        ]  # fmt: skip


def test_large_parts_have_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltackpt.layout, "GROUP_BYTES", 10_000)
    layout = Layout(["a"], ["U8"], [[40_000]])
    partition = Partition(layout, [[(0, ((0, 30_000),))], [(0, ((30_000, 40_000),))]])
    assert [(g.start.tolist(), g.count.tolist()) for g in partition.groups] == [
        ([0], [16_384]), ([16_384], [8_192]), ([24_576], [5_424]), ([0], [10_000]),
    ]  # fmt: skip


@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    layout = data.draw(st.one_of(layouts(), box_layouts()))
    partition = data.draw(partitions(layout))
    again = Partition.decode(partition.encoded, layout)
    assert again.encoded == partition.encoded
    assert again.digest == partition.digest
    assert [again.places(p) for p in range(again.parts)] == [partition.places(p) for p in range(partition.parts)]
    # By numpy's own indexing: every element in exactly one box, and where Boxes says.
    seen = [np.zeros(n, np.int64) for n in layout.count.tolist()]
    for p in range(again.parts):
        for i, (t, box) in enumerate(again.places(p), int(again.box_begin[p])):
            expected = elements_of(layout, t, box)
            seen[t][expected] += 1
            coordinates = np.unravel_index(np.arange(len(expected)), again.boxes.extent[i])
            found = again.boxes.offset[i] + sum(
                c * s for c, s in zip(coordinates, again.boxes.stride[i].tolist(), strict=True)
            )
            assert found.tolist() == expected.tolist()
            assert bool(again.boxes.strided[i]) == bool((np.diff(expected) != 1).any())
    assert all((s == 1).all() for s in seen)


# ---------------------------------------------------------------- refusals


def refused(parts: list[list[tuple[int, object]]], layout: Layout = CUT) -> str:
    with pytest.raises(FormatError) as caught:
        Partition(layout, parts)  # type: ignore[arg-type]  # hostile
    return str(caught.value)


REST = [(0, None), (1, None), (2, None)]


def test_every_element_is_in_exactly_one_part() -> None:
    assert "tensor d: parts hold 0 of its 5 elements" in refused([REST])
    assert "tensor d: parts hold 4 of its 5 elements" in refused([REST, [(3, ((0, 4),))]])
    assert "tensor d: parts hold 6 of its 5 elements" in refused([REST, [(3, ((0, 4),)), (3, ((3, 5),))]])
    # The right number of elements, but one hole and one of them twice.
    assert "tensor d: parts hold 5 of its 5" in refused([REST, [(3, ((0, 2),)), (3, ((1, 3),)), (3, ((4, 5),))]])
    assert "tensor d" in refused([[*REST, (3, ((0, 3),))], [(3, ((0, 5),))]])


def test_boxes_that_overlap_as_much_as_they_leave_out_are_refused() -> None:
    """The volume is right, and so are all corners of the tensor: only the corners inside do not cancel out."""
    four = [((0, 2), (0, 3)), ((2, 4), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (3, 6))]
    rest = [(1, None), (2, None), (3, None)]
    Partition(CUT, [[*rest, *((0, box) for box in four)]])
    for wrong in (((0, 2), (2, 5)), ((1, 3), (3, 6)), ((0, 2), (0, 3))):
        assert "tensor a: parts hold 24 of its 24" in refused([rest, [(0, b) for b in (*four[:2], wrong, four[3])]])


def test_rows_and_boxes_of_one_tensor_are_held_against_each_other() -> None:
    rest = [(1, None), (2, None), (3, None)]
    boxes = [((2, 4), (0, 1)), ((2, 4), (1, 6))]
    Partition(CUT, [rest, [(0, ((0, 2), (0, 6)))], [(0, box) for box in boxes]])
    assert "tensor a" in refused([rest, [(0, ((0, 3), (0, 6)))], [(0, box) for box in boxes]])
    assert "tensor a" in refused([rest, [(0, None)], [(0, box) for box in boxes]])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ([(0, ((0, 4),))], "a box of 1 dimensions, it has 2"),
        ([(0, ((0, 5), (0, 6)))], "a run of rows is empty, or lies outside"),
        ([(0, ((3, 3), (0, 6)))], "a run of rows is empty, or lies outside"),
        ([(0, ((0, 4), (3, 7)))], "a box is empty, or lies outside"),
        ([(0, ((0, 4), (3, 3)))], "a box is empty, or lies outside"),
        ([(1, ((0, 2), (0, 3)))], "not cut between whole bytes"),
        ([(4, None)], "it has no elements, and is in no part"),
    ],
)
def test_impossible_boxes_are_refused_by_name(part: list[tuple[int, object]], message: str) -> None:
    assert message in refused([part])


def test_packed_rows_are_cut_between_whole_bytes_only() -> None:
    layout = Layout(["t"], ["F4"], [[4, 3]])
    Partition(layout, [[(0, ((0, 2), (0, 3)))], [(0, ((2, 4), (0, 3)))]])
    assert "does not begin and end with whole bytes" in refused(
        [[(0, ((0, 1), (0, 3)))], [(0, ((1, 4), (0, 3)))]], layout
    )


def test_tensors_of_many_dimensions_are_cut_by_rows_only() -> None:
    layout = Layout(["t"], ["U8"], [[2, 2, 2, 2, 2, 2]])
    full = ((0, 2),) * 5
    Partition(layout, [[(0, ((0, 1), *full))], [(0, ((1, 2), *full))]])
    cut = [[(0, (*full, (0, 1)))], [(0, (*full, (1, 2)))]]
    assert "cannot be cut other than by rows" in refused(cut, layout)


def hostile(**change: object) -> str:
    raw = json.loads(Partition(CUT, PARTS).encoded)
    for key, value in change.items():
        if key == "layout":
            raw["layout"] = value
        else:
            raw["parts"][0][key] = value
    with pytest.raises(FormatError) as caught:
        Partition.decode(json.dumps(raw, separators=(",", ":")).encode() + b"\n", CUT)
    return str(caught.value)


def test_hostile_encodings_are_refused() -> None:
    assert "it cuts layout 000" in hostile(layout="0" * 64)
    assert "end in half an entry" in hostile(whole=[1])
    assert "end in half an entry" in hostile(rows=[1, 2])
    assert "not in the layout" in hostile(whole=[0, 6])
    assert "not in the layout" in hostile(whole=[1 << 40, 1 << 40])
    assert "not in the layout" in hostile(whole=[3, 0])
    assert "whole tensors, the layout has 5" in hostile(whole=[0, 4] * 1000)
    assert "not in the layout" in hostile(rows=[5, 0, 1])
    assert "a run of all rows is the whole tensor" in hostile(rows=[3, 0, 5])
    assert "lies outside" in hostile(rows=[3, 1 << 40, 1 << 45])
    assert "lies outside" in hostile(rows=[2, 0, 1])
    assert "a box is not in the layout" in hostile(boxes=[[]])
    assert "another number of dimensions" in hostile(boxes=[[0, 0, 4, 0]])
    assert "cannot be cut other than by rows" in hostile(boxes=[[3, 0, 2]])
    assert "is a run of rows" in hostile(boxes=[[0, 0, 3, 0, 6]])
    assert "`int` <=" in hostile(rows=[1 << 70, 0, 1])
    assert "`int` >= 0" in hostile(rows=[-1, 0, 1])
    assert "unknown field" in hostile(extra=[])


def test_what_is_not_canonical_is_refused() -> None:
    raw = Partition(CUT, PARTS).encoded
    for other in (raw[:-1], raw.replace(b"[1,2]", b"[1,1,2,1]"), raw.replace(b",", b", ", 1)):
        with pytest.raises(FormatError, match="canonical"):
            Partition.decode(other, CUT)


def test_a_partition_above_its_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Partition(CUT, PARTS).encoded
    monkeypatch.setattr(deltackpt.partition, "MAX_PARTITION", len(raw) - 1)
    with pytest.raises(FormatError, match="bytes are above the limit"):
        Partition.decode(raw, CUT)
    monkeypatch.setattr(deltackpt.partition, "MAX_PARTS", 3)
    assert "4 parts are above the limit" in refused(PARTS)
    monkeypatch.setattr(deltackpt.partition, "MAX_BOXES", -1)
    assert "more boxes than the limit" in refused([[(0, None), (1, None), (2, None), (3, None), (3, None)]])


# ---------------------------------------------------------------- encode, decode, apply


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", ["sparse", "mask"])
@settings(max_examples=40)
@given(st.data())
def test_any_partition_gives_what_whole_tensors_give(form: str, data: st.DataObject) -> None:
    pair = data.draw(pairs(st.one_of(layouts(), box_layouts())))
    layout, partition = pair.layout, data.draw(partitions(pair.layout))
    threads, skew = data.draw(st.sampled_from([1, 2])), data.draw(st.integers(0, 15))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltackpt.layout, "GROUP_BYTES", data.draw(st.sampled_from([20_000, 256 << 20])))
        patch.setattr(module, "PIECE", data.draw(st.sampled_from([10_000, 16 << 20])))
        encoded = encode_parts(partition, pair.old, pair.new, form=form, threads=threads)
        groups = list(itertools.chain.from_iterable(encoded))
        memory = Memory(pair.old, skew)
        edge = memory.between()
        staged = decode(partition, groups, threads=threads)
        difference = apply(partition, staged, memory.addresses, threads=threads)
        assert memory.tensors() == pair.new
        assert memory.between() == edge
        # As redo journals do it: new values instead of flips, twice.
        again = Memory(pair.old, skew)
        values = decode(partition, groups, threads=threads)
        seen = apply(partition, values, again.addresses, mode=READ, threads=threads)
        assert again.tensors() == pair.old
        redo = [decode_group(partition, g.group, g.frames) for g in (pack(partition, s) for s in values)]
        for _ in range(2):
            apply(partition, redo, again.addresses, mode=SET, threads=threads)
        assert again.tensors() == pair.new
        apply(partition, staged, memory.addresses, threads=threads)
        assert memory.tensors() == pair.old
    before, after = Memory(pair.old), Memory(pair.new)
    whole = list(encode(layout, before.addresses, after.addresses))
    expected, told = np.zeros(len(layout.names), np.uint64), np.zeros(len(layout.names), np.uint64)
    for total, of in ((expected, whole), (told, groups)):
        for group in of:
            np.add.at(total, group.tensor, group.fingerprint)
    assert difference.tolist() == seen.tolist() == told.tolist() == expected.tolist()
    assert sum(g.changed for g in groups) == sum(g.changed for g in whole)
    assert [g.part for g in groups] == [partition.part_of(g.group) for g in groups]
    assert [g.group for g in groups] == sorted(g.group for g in groups)


@pytest.mark.usefixtures("kernels")
@given(st.data())
def test_fingerprints_of_parts_add_up(data: st.DataObject) -> None:
    pair = data.draw(pairs(st.one_of(layouts(), box_layouts())))
    layout, partition = pair.layout, data.draw(partitions(pair.layout))
    ranks = Ranks(partition, pair.old)
    total = np.zeros(len(layout.names), np.uint64)
    for p in range(partition.parts):
        mine = slice(int(partition.box_begin[p]), int(partition.box_begin[p + 1]))
        found = part_fingerprints(partition, p, ranks.memory[p].addresses, threads=2)
        np.add.at(total, partition.boxes.tensor[mine], found)
    memory = Memory(pair.old)
    assert total.tolist() == fingerprints(layout, memory.addresses).tolist()


@pytest.mark.skipif(not HAS_NUMBA, reason="no numba")
@given(st.data())
def test_numpy_and_numba_write_the_same_bytes(data: st.DataObject) -> None:
    pair = data.draw(pairs(box_layouts()))
    partition = data.draw(partitions(pair.layout))
    found = []
    for jit in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "use_jit", lambda _layout, jit=jit: jit)
            groups = itertools.chain.from_iterable(encode_parts(partition, pair.old, pair.new, codec="raw"))
            found.append(
                [
                    (dataclasses.astuple(g)[:1], [(f.plane, bytes(f.stored)) for f in g.frames], g.fingerprint.tolist())
                    for g in groups
                ]
            )
    assert found[0] == found[1]


def test_column_boxes_keep_dense_tiles() -> None:
    """Half of the columns change: half of every tile of the whole tensor, all of one part and nothing of the other."""
    layout = Layout(["t"], ["U8"], [[128, 128]])
    old = bytes(128 * 128)
    new = np.zeros((128, 128), np.uint8)
    new[:, :64] = 1
    partition = Partition(layout, [[(0, ((0, 128), (0, 64)))], [(0, ((0, 128), (64, 128)))]])
    (group,), none = encode_parts(partition, [old], [new.tobytes()], codec="raw")
    assert none == []
    assert [(f.plane, f.raw) for f in group.frames] == [(0, 2), (16, 8192)]
    assert (group.group, group.part, group.changed) == (0, 0, 8192)


def test_60000_tensors_in_eight_parts_are_cut_and_read_in_numpy() -> None:
    """No timing: but with Python per element in the check this would show in the suite's slowest tests."""
    names = [f"{i:06d}" for i in range(60_000)]
    layout = Layout(names, ["BF16"] * 60_000, [[64, 128]] * 60_000)
    partition = Partition(layout, [[(t, None) for t in range(r, 60_000, 8)] for r in range(8)])
    again = Partition.decode(partition.encoded, layout)
    assert len(partition.encoded) < 500_000
    assert again.group_begin.tolist() == [0, *itertools.accumulate([1] * 8)]
