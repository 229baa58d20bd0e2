"""Kernels: numpy and numba give the same bytes, and those that the format says."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DENSITIES, SIZES, Memory
from test_digest import plain_key

from deltackpt import kernels
from deltackpt.errors import FormatError
from deltackpt.kernels import DENSE, READ, SET, XOR, Columns, Extracted, Slice, require_counts, slices
from deltackpt.layout import TILE, Segments

MASK = (1 << 64) - 1
HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
either = pytest.mark.parametrize("jit", [False, pytest.param(True, marks=needs_numba)], ids=["numpy", "numba"])


@dataclass(frozen=True)
class Rows:
    """Runs of elements with two contents each."""

    segments: Segments
    old: list[bytes]
    new: list[bytes]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """One to five rows of one width, each with its own share of changes, runs of changes among them."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    counts = draw(st.lists(st.sampled_from([n for n in SIZES if n]), min_size=1, max_size=5))
    starts = [draw(st.integers(0, 3)) * TILE for _ in counts]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old, new = [], []
    for count in counts:
        before = np.frombuffer(rng.bytes(count * width), f"<u{width}")
        after = before.copy()
        hit = rng.random(count) < draw(st.sampled_from(DENSITIES))
        if draw(st.booleans()):
            first = int(rng.integers(0, count))
            hit[first : first + draw(st.integers(0, 300))] = True
        flips = np.frombuffer(rng.bytes(count * width), f"<u{width}")
        after[hit] ^= flips[hit]
        old.append(before.tobytes())
        new.append(after.tobytes())
    return Rows(Segments(width, np.arange(len(counts)), np.array(starts), np.array(counts)), old, new)


def plain_difference(width: int, start: int, old: bytes, new: bytes) -> int:
    """Fingerprint difference of a row, word by word."""
    word = start * width // 4
    old, new = old + bytes(-len(old) % 4), new + bytes(-len(new) % 4)
    before, after = np.frombuffer(old, "<u4"), np.frombuffer(new, "<u4")
    total = 0
    for i in np.flatnonzero(before != after).tolist():
        total += (int(after[i]) - int(before[i])) * plain_key(word + i)
    return total & MASK


def plain_columns(given_rows: Rows) -> tuple[list[int], bytes, bytes, bytes, bytes]:
    """Counts, gap.0, gap.1, joined values and joined dense elements, as section 5 of the format says."""
    width = given_rows.segments.width
    counts, gaps, values, dense = [], [], b"", b""
    for old, new in zip(given_rows.old, given_rows.new, strict=True):
        flips = np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)
        for first in range(0, len(flips) // width, TILE):
            tile = flips[first * width : (first + TILE) * width].reshape(-1, width)
            at = np.flatnonzero(tile.any(axis=1))
            if 4 * len(at) > len(tile):
                counts.append(0xFFFF)
                dense += tile.tobytes()
                continue
            counts.append(len(at))
            values += tile[at].tobytes()
            previous = -1
            for position in at.tolist():
                gaps.append(position - previous - 1)
                previous = position
    return counts, bytes(g & 255 for g in gaps), bytes(g >> 8 for g in gaps), values, dense


def lists(columns: Columns) -> tuple[list[int], bytes, bytes, bytes, bytes]:
    return (
        columns.counts.tolist(), columns.gaps[0].tobytes(), columns.gaps[1].tobytes(),
        columns.values.T.tobytes(), columns.dense.T.tobytes(),
    )  # fmt: skip


def extract(given_rows: Rows, jit: bool, skew: int = 0) -> Extracted:
    old, new = Memory(given_rows.old, skew), Memory(given_rows.new, skew + 1)
    extracted = kernels.extract(given_rows.segments, old.addresses, new.addresses, jit=jit)
    assert (old.tensors(), new.tensors()) == (given_rows.old, given_rows.new)
    return extracted


def copy(columns: Columns) -> Columns:
    return Columns(columns.counts.copy(), columns.gaps.copy(), columns.values.copy(), columns.dense.copy())


# ---------------------------------------------------------------- extract


@either
@given(rows(), st.integers(0, 15))
def test_extracted_columns_are_those_of_the_format(jit: bool, given_rows: Rows, skew: int) -> None:
    extracted = extract(given_rows, jit, skew)
    assert lists(extracted.columns) == plain_columns(given_rows)
    width, starts = given_rows.segments.width, given_rows.segments.start.tolist()
    contents = list(zip(starts, given_rows.old, given_rows.new, strict=True))
    assert extracted.fingerprints.tolist() == [plain_difference(width, *c) for c in contents]
    changed = [
        np.count_nonzero(np.frombuffer(o, f"<u{width}") != np.frombuffer(n, f"<u{width}")) for _, o, n in contents
    ]
    assert extracted.changed.tolist() == changed


@needs_numba
@settings(max_examples=200)
@given(rows(), st.integers(0, 63))
def test_numba_extracts_the_same_bytes_as_numpy(given_rows: Rows, skew: int) -> None:
    one, other = extract(given_rows, False, skew), extract(given_rows, True, skew)
    assert lists(one.columns) == lists(other.columns)
    assert one.fingerprints.tolist() == other.fingerprints.tolist()
    assert one.changed.tolist() == other.changed.tolist()


@either
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("length", "changed", "dense"),
    [
        (1, 0, False), (1, 1, True), (3, 1, True), (4, 1, False), (5, 1, False), (7, 1, False), (7, 2, True),
        (8, 2, False), (8, 3, True), (100, 25, False), (100, 26, True), (101, 25, False), (101, 26, True),
        (8192, 2048, False), (8192, 2049, True),
    ],
)  # fmt: skip
def test_tile_is_dense_iff_four_times_its_changes_exceed_its_length(
    jit: bool, width: int, length: int, changed: int, dense: bool
) -> None:
    new = np.zeros((length, width), np.uint8)
    new[length - changed :, width - 1] = 0x80
    segments = Segments(width, np.array([0]), np.array([0]), np.array([length]))
    columns = extract(Rows(segments, [bytes(length * width)], [new.tobytes()]), jit).columns
    assert columns.counts.tolist() == [DENSE if dense else changed]
    assert columns.dense.shape == (width, length if dense else 0)
    assert columns.gaps.shape == (2, 0 if dense else changed)


@either
def test_positions_are_gaps_from_the_previous_change_and_begin_anew_in_each_tile(jit: bool) -> None:
    new = np.zeros(20_000, "<u2")
    new[[0, 1, 300, 8191, 8192, 16384, 19_999]] = [1, 0x0203, 3, 4, 5, 6, 0x8007]
    segments = Segments(2, np.array([0]), np.array([0]), np.array([20_000]))
    columns = extract(Rows(segments, [bytes(40_000)], [new.tobytes()]), jit).columns
    assert columns.counts.tolist() == [4, 1, 2]
    # gaps 0, 0, 298, 7890; 0; 0, 3614
    assert columns.gaps.tolist() == [[0, 0, 42, 210, 0, 0, 30], [0, 0, 1, 30, 0, 0, 14]]
    assert columns.values.tolist() == [[1, 3, 3, 4, 5, 6, 7], [0, 2, 0, 0, 0, 0, 0x80]]
    assert columns.dense.shape == (2, 0)


@either
def test_result_owns_its_memory(jit: bool) -> None:
    """Scratch memory is used again by the next call."""
    segments = Segments(2, np.array([0]), np.array([0]), np.array([1000]))
    ones = Rows(segments, [bytes(2000)], [bytes([1, 0] * 100 + [0, 0] * 900)])
    first = extract(ones, jit)
    before = lists(first.columns)
    extract(Rows(segments, [bytes(2000)], [bytes([7, 7] * 1000)]), jit)
    assert lists(first.columns) == before


# ---------------------------------------------------------------- apply


@either
@given(rows(), st.integers(0, 15), st.sampled_from([20_000, 70_000, 1 << 30]))
def test_apply_turns_old_into_new_and_twice_restores(jit: bool, given_rows: Rows, skew: int, cut: int) -> None:
    extracted = extract(given_rows, jit=False)
    memory = Memory(given_rows.old, skew)
    edge = memory.between()
    pieces = slices(given_rows.segments, extracted.columns, cut)

    def run() -> list[int]:
        total = np.zeros(len(given_rows.old), np.uint64)
        for piece in pieces:
            segments = piece.segments
            offset = (segments.start - given_rows.segments.start[segments.tensor]) * segments.width
            kernels.check(piece, extracted.columns, jit=jit)
            addresses = memory.addresses[segments.tensor] + offset.astype(np.uint64)
            fp = kernels.apply(piece, addresses, extracted.columns, jit=jit)
            np.add.at(total, segments.tensor, fp)
        return total.tolist()

    assert run() == extracted.fingerprints.tolist()
    assert memory.tensors() == given_rows.new
    assert run() == [-fp & MASK for fp in extracted.fingerprints.tolist()]
    assert memory.tensors() == given_rows.old
    assert memory.between() == edge


@either
@given(rows())
def test_read_leaves_memory_alone_and_set_writes_what_it_read(jit: bool, given_rows: Rows) -> None:
    extracted = extract(given_rows, jit=False)
    columns = copy(extracted.columns)
    whole = Slice(given_rows.segments, 0, 0, 0)
    memory = Memory(given_rows.old)
    fp = kernels.apply(whole, memory.addresses, columns, mode=READ, jit=jit)
    assert fp.tolist() == extracted.fingerprints.tolist()
    assert memory.tensors() == given_rows.old
    # Now the columns hold new values: written any number of times, over old, torn or new elements.
    torn = [o[: len(o) // 2] + n[len(n) // 2 :] for o, n in zip(given_rows.old, given_rows.new, strict=True)]
    for content in (given_rows.old, given_rows.new, torn):
        memory = Memory(content)
        fp = kernels.apply(whole, memory.addresses, columns, mode=SET, jit=jit)
        assert memory.tensors() == given_rows.new
        width, starts = given_rows.segments.width, given_rows.segments.start.tolist()
        triples = zip(starts, content, given_rows.new, strict=True)
        assert fp.tolist() == [plain_difference(width, *t) for t in triples]


@needs_numba
@given(rows(), st.sampled_from([XOR, SET, READ]), st.integers(0, 15))
def test_numba_applies_the_same_bytes_as_numpy(given_rows: Rows, mode: int, skew: int) -> None:
    columns = extract(given_rows, jit=False).columns
    results = []
    for jit in (False, True):
        memory, mine = Memory(given_rows.old, skew), copy(columns)
        whole = Slice(given_rows.segments, 0, 0, 0)
        fp = kernels.apply(whole, memory.addresses, mine, mode=mode, jit=jit)
        results.append((fp.tolist(), memory.tensors(), lists(mine)))
    assert results[0] == results[1]


@given(rows(), st.sampled_from([9_000, 20_000, 70_000]))
def test_slices_share_out_tiles_changes_and_dense_elements(given_rows: Rows, cut: int) -> None:
    columns = extract(given_rows, jit=False).columns
    pieces = slices(given_rows.segments, columns, cut)
    views = [p.of(columns) for p in pieces]
    joined = Columns(
        np.concatenate([v.counts for v in views]),
        np.concatenate([v.gaps for v in views], axis=1),
        np.concatenate([v.values for v in views], axis=1),
        np.concatenate([v.dense for v in views], axis=1),
    )
    assert lists(joined) == lists(columns)
    assert sum(p.segments.nbytes for p in pieces) == given_rows.segments.nbytes


# ---------------------------------------------------------------- fingerprint


@either
@given(rows(), st.integers(0, 15))
def test_difference_of_full_passes_is_the_difference_that_extract_found(jit: bool, given_rows: Rows, skew: int) -> None:
    old, new = Memory(given_rows.old, skew), Memory(given_rows.new, skew)
    before = kernels.fingerprint(given_rows.segments, old.addresses, jit=jit)
    after = kernels.fingerprint(given_rows.segments, new.addresses, jit=jit)
    assert (after - before).tolist() == extract(given_rows, jit).fingerprints.tolist()


@either
@pytest.mark.parametrize("nbytes", [1, 3, 4, 5, 262_143, 262_144, 262_145, 1_000_003])
def test_full_pass_is_the_sum_over_all_words(jit: bool, nbytes: int) -> None:
    raw = np.random.default_rng(nbytes).bytes(nbytes)
    segments = Segments(1, np.array([0]), np.array([TILE]), np.array([nbytes]))
    memory = Memory([raw], 3)
    fp = kernels.fingerprint(segments, memory.addresses, jit=jit)
    assert fp.tolist() == [plain_difference(1, TILE, bytes(nbytes), raw)]


# ---------------------------------------------------------------- hostile columns


def columns_of(counts: list[int], gaps: list[int]) -> Columns:
    gap = np.array(gaps, np.int64)
    return Columns(
        np.array(counts, np.uint16),
        np.array([gap & 255, gap >> 8], np.uint8).reshape(2, -1),
        np.ones((2, len(gaps)), np.uint8),
        np.zeros((2, 0), np.uint8),
    )


# Tiles of 8192, 8192 and 100 elements.
THREE = Segments(2, np.array([0, 1]), np.array([0, 0]), np.array([16384, 100]))


@either
@pytest.mark.parametrize(
    ("counts", "gaps"),
    [
        ([1, 1, 1], [8191, 8191, 99]),
        ([2, 0, 2], [0, 8190, 0, 98]),
        ([0, 0, 100], [0] * 100),
        ([8192, 0, 0], [0] * 8192),
        ([0, DENSE, 1], [99]),
        ([0, 0, 0], []),
    ],
)
def test_last_position_may_be_the_last_element(jit: bool, counts: list[int], gaps: list[int]) -> None:
    kernels.check(Slice(THREE, 0, 0, 0), columns_of(counts, gaps), jit=jit)


@either
@pytest.mark.parametrize(
    ("counts", "gaps", "tile"),
    [
        ([1, 1, 1], [8192, 0, 0], 0),
        ([1, 1, 1], [0, 65535, 0], 1),
        ([1, 1, 1], [0, 0, 100], 2),
        ([2, 0, 2], [0, 8191, 0, 0], 0),
        ([2, 0, 2], [0, 0, 50, 49], 2),
        ([8192, 0, 0], [*[0] * 8191, 1], 0),
        ([0, DENSE, 1], [100], 2),
        ([8192, 8192, 0], [0] * 8192 + [65535] * 8192, 1),
    ],
)
def test_position_outside_its_tile_is_refused(jit: bool, counts: list[int], gaps: list[int], tile: int) -> None:
    columns = columns_of(counts, gaps)
    with pytest.raises(
        FormatError, match=f"tile {tile}: its last change lies outside its {[8192, 8192, 100][tile]} el"
    ):
        kernels.check(Slice(THREE, 0, 0, 0), columns, jit=jit)


@either
def test_check_of_a_later_slice_looks_at_its_own_columns(jit: bool) -> None:
    columns = columns_of([1, 1, 1], [0, 0, 100])
    pieces = slices(THREE, columns, 16384)
    assert [p.tile for p in pieces] == [0, 1, 2]
    for piece in pieces[:2]:
        kernels.check(piece, columns, jit=jit)
    with pytest.raises(FormatError, match="tile 2: "):
        kernels.check(pieces[2], columns, jit=jit)


def test_counts_demand_changes_and_dense_elements() -> None:
    lengths = THREE.tile_lengths
    assert require_counts(lengths, np.array([5, DENSE, 100], np.uint16)) == (105, 8192)
    assert require_counts(lengths, np.array([8192, 8192, DENSE], np.uint16)) == (16384, 100)


@pytest.mark.parametrize("counts", [[8193, 0, 0], [0, 65534, 0], [0, 0, 101]])
def test_count_above_the_length_of_its_tile_is_refused(counts: list[int]) -> None:
    with pytest.raises(FormatError, match=r"tile \d has \d+ elements and counts \d+ changes"):
        require_counts(THREE.tile_lengths, np.array(counts, np.uint16))
