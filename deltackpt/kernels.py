"""Kernels on the CPU: extract changes, apply them, fingerprint, check columns. Pure: memory to memory.

Two implementations with the same bytes: numba where it is installed and the work is worth its import, numpy
otherwise. Memory is given by address: rows of `Segments` and one u64 address each, of the row's first element.
The caller keeps that memory alive and, for `apply`, to itself. Longer than most modules: each numpy kernel stands
beside the call of its compiled twin.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from deltackpt.digest import U64, contribution, keys
from deltackpt.errors import FormatError
from deltackpt.layout import I64, TILE, Boxes, Layout, Segments

U8: TypeAlias = npt.NDArray[np.uint8]
U16: TypeAlias = npt.NDArray[np.uint16]

DENSE = 0xFFFF
"""Count of a dense tile."""
XOR, SET, READ, LOOK = 0, 1, 2, 3
"""Modes of apply: flip the bits; write the values as they are; leave memory and turn flips into new values; leave both
(boxes only)."""

JIT_BYTES, JIT_TENSORS = 64 << 20, 5000
"""Below both, numpy is done before numba is imported and loaded (0.5 s)."""
_CACHED = 256 << 10
"""Bytes per numpy pass, so that intermediate arrays stay in the cache."""

_UNIT = {1: np.uint8(0), 2: np.uint16(0), 4: np.uint32(0), 8: np.uint64(0)}
_local = threading.local()


@dataclass(frozen=True)
class Columns:
    """The changes of consecutive tiles of one width.

    counts: u16 per tile, DENSE for a dense one. gaps (2, n), values (width, n): byte planes of the sparse changes.
    dense (width, m): byte planes of all elements of the dense tiles.
    """

    counts: U16
    gaps: U8
    values: U8
    dense: U8


@dataclass(frozen=True)
class Extracted:
    """Columns of some rows, and per row what changed: fingerprint difference and number of elements."""

    columns: Columns
    fingerprints: U64
    changed: I64


@dataclass(frozen=True)
class Place:
    """Where boxes are, one a row; element e of a box, counted row-major in `extent` (n, levels), has coordinates c.

    In its tensor it is element first + sum of c * stride. In memory it lies sum of c * step elements after `address`,
    if low <= c < high in every level; else it is not here. Rows at address 0 are not meant at all. int64, u64.
    """

    address: U64
    first: I64
    extent: I64
    stride: I64
    step: I64
    low: I64
    high: I64

    @classmethod
    def of(cls, boxes: Boxes, rows: I64, address: U64, step: I64 | None = None) -> Place:
        """Boxes that are there as a whole: with these steps, or side by side as a box of their own."""
        extent = boxes.extent[rows]
        if step is None:
            step = np.ones_like(extent)
            step[:, :-1] = np.cumprod(extent[:, :0:-1], axis=1)[:, ::-1]
        return cls(address, boxes.offset[rows], extent, boxes.stride[rows], step, np.zeros_like(extent), extent)

    @classmethod
    def nowhere(cls, rows: int, levels: int) -> Place:
        """Rows that are not meant."""
        zero = np.zeros((rows, levels), np.int64)
        return cls(np.zeros(rows, np.uint64), np.zeros(rows, np.int64), zero + 1, zero, zero, zero, zero)

    @classmethod
    def joined(cls, places: Sequence[Place]) -> Place:
        """Return the rows of several as one; all have as many levels."""
        return cls(*(np.concatenate(columns) for columns in zip(*(vars(p).values() for p in places), strict=True)))

    def take(self, rows: I64) -> Place:
        """Return some of the rows."""
        return Place(**{name: column[rows] for name, column in vars(self).items()})


def use_jit(layout: Layout) -> bool:
    """Say whether work on weights of this layout goes through numba."""
    if "deltackpt.jit" in sys.modules:
        return True
    large = layout.total_bytes >= JIT_BYTES or len(layout.names) >= JIT_TENSORS
    return large and importlib.util.find_spec("numba") is not None


def _scratch(name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Memory of this thread that is used again by the next call; its content is garbage."""
    held: dict[tuple[str, int | tuple[int, ...]], npt.NDArray[np.generic]] = _local.__dict__.setdefault("held", {})
    if (name, shape) not in held:
        held[name, shape] = np.empty(shape, dtype)
    return held[name, shape]


def first_elements(segments: Segments) -> I64:
    """Return the element of its tensor with which each row begins, if the row is one run of elements there."""
    if segments.boxes is None or segments.box is None:
        return segments.start
    return segments.boxes.offset[segments.box] + segments.start


def extract(segments: Segments, old: U64, new: U64, *, jit: bool) -> Extracted:
    """Compare two copies of the rows and return the columns; the result owns its memory.

    old, new: address of each row; the elements of a box lie side by side. A tile is dense iff 4 * changed > its length.
    """
    found = (_extract_jit if jit else _extract_numpy)(segments, old, new)
    boxes, box = segments.boxes, segments.box
    if boxes is None or box is None or not (strided := boxes.strided[box]).any():
        return found
    # Which elements of its tensor a strided row changed is known only by its box.
    begin = np.where(strided, old - (segments.start * segments.width).astype(np.uint64), np.uint64(0))
    again = _scatter(Slice(segments, 0, 0, 0), Place.of(boxes, box, begin), found.columns, LOOK, jit)
    return Extracted(found.columns, np.where(strided, again, found.fingerprints), found.changed)


def _extract_jit(segments: Segments, old: U64, new: U64) -> Extracted:
    from deltackpt import jit

    width, elements = segments.width, int(segments.count.sum())
    room = 1 << max(16, (elements - 1).bit_length())  # few sizes, so that scratch is found again
    gaps = _scratch("gaps", (2, room // 4 + TILE), np.uint8)
    values = _scratch("values", (width, room // 4 + TILE), np.uint8)
    dense = _scratch("dense", (width, room), np.uint8)
    lists = _scratch("lists", (5, TILE + 1), np.uint64)  # masks, where, at, before, after
    counts = np.empty(segments.tiles, np.uint16)
    fp, changed = np.empty(len(old), np.uint64), np.empty(len(old), np.int64)
    k, d = jit.extract(
        _UNIT[width], old, new, segments.count, first_elements(segments),
        counts, gaps, values, dense, fp, changed, *lists,
    )  # fmt: skip
    columns = Columns(counts, gaps[:, :k].copy(), values[:, :k].copy(), dense[:, :d].copy())  # type: ignore[arg-type]  # u8 scratch
    return Extracted(columns, fp, changed)


def view(address: int, nbytes: int) -> U8:
    """Return the bytes at an address as an array. The caller keeps the memory alive."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(int(address)), np.uint8)


def _gather(segments: Segments, addresses: U64) -> npt.NDArray[np.unsignedinteger]:
    """Return all elements of the rows, one after the other, as unsigned integers of their width."""
    width = segments.width
    rows = [view(a, n * width) for a, n in zip(addresses.tolist(), segments.count.tolist(), strict=True)]
    joined = rows[0] if len(rows) == 1 else np.concatenate(rows)
    elements: npt.NDArray[np.unsignedinteger] = joined.view(f"<u{width}")
    return elements


def _element(segments: Segments, at: I64) -> U64:
    """Return the index in its tensor of each element, given its index in all elements of the rows."""
    first = np.cumsum(segments.count) - segments.count
    row = np.searchsorted(first, at, side="right") - 1
    boxes, inside = segments.boxes, at - first[row] + segments.start[row]
    if boxes is None or segments.box is None:
        return inside.astype(np.uint64)
    box = segments.box[row]
    found = boxes.offset[box]
    for level in range(boxes.extent.shape[1] - 1, -1, -1):
        inside, index = np.divmod(inside, boxes.extent[box, level])
        found = found + index * boxes.stride[box, level]
    return found.astype(np.uint64)


def _row_sums(segments: Segments, terms: U64, at: I64) -> U64:
    """Add the terms of the elements `at` up per row, mod 2^64."""
    bounds = np.concatenate(([0], np.cumsum(segments.count)))
    running = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
    cut = running[np.searchsorted(at, bounds)]
    return cut[1:] - cut[:-1]


def _changes(segments: Segments, at: I64, before: U64, after: U64) -> U64:
    """Return per row what turning `before` into `after` adds to the fingerprint."""
    element = _element(segments, at)
    terms = contribution(segments.width, element, after) - contribution(segments.width, element, before)
    return _row_sums(segments, terms, at)


def _planes(values: npt.NDArray[np.unsignedinteger], width: int) -> U8:
    raw = values.astype(f"<u{width}").view(np.uint8).reshape(len(values), width)
    return np.ascontiguousarray(raw.T)


def _extract_numpy(segments: Segments, old: U64, new: U64) -> Extracted:
    before, after = _gather(segments, old), _gather(segments, new)
    at = np.flatnonzero(before != after)
    return extracted(segments, at, before[at], after[at])


def extracted(
    segments: Segments, at: I64, before: npt.NDArray[np.unsignedinteger], after: npt.NDArray[np.unsignedinteger]
) -> Extracted:
    """Return what `extract` returns, from the elements that differ.

    at: their indices in all elements of the rows, sorted; before, after: their bits, unsigned, of the rows' width.
    """
    lengths = segments.tile_lengths
    first = np.cumsum(lengths) - lengths
    tile = np.searchsorted(first, at, side="right") - 1
    counts = np.bincount(tile, minlength=len(lengths))
    dense_tile = 4 * counts > lengths
    is_sparse = ~dense_tile[tile]
    dense_of, tile = tile[~is_sparse], tile[is_sparse]
    in_tile = at[is_sparse] - first[tile]
    gap = np.where(np.diff(tile, prepend=-1) != 0, in_tile, np.diff(in_tile, prepend=0) - 1)
    flips = before ^ after
    dense_end = np.cumsum(np.where(dense_tile, lengths, 0))
    dense: npt.NDArray[np.unsignedinteger] = np.zeros(int(dense_end[-1]), f"<u{segments.width}")
    in_dense = at[~is_sparse]
    dense[in_dense - (first + lengths - dense_end)[dense_of]] = flips[~is_sparse]
    columns = Columns(
        np.where(dense_tile, DENSE, counts).astype(np.uint16),
        _planes(gap.astype(np.uint64), 2),
        _planes(flips[is_sparse], segments.width),
        _planes(dense, segments.width),
    )
    fp = _changes(segments, at, before.astype(np.uint64), after.astype(np.uint64))
    return Extracted(columns, fp, _row_sums(segments, np.ones(len(at), np.uint64), at).astype(np.int64))


def positions(segments: Segments, columns: Columns) -> tuple[I64, U64]:
    """Return where the changes are, as indices into all elements of the rows, sorted, and their values."""
    lengths = segments.tile_lengths
    first = np.cumsum(lengths) - lengths
    dense_tile = columns.counts == DENSE
    n = np.where(dense_tile, 0, columns.counts).astype(np.int64)
    steps = columns.gaps[0].astype(np.int64) + (columns.gaps[1].astype(np.int64) << 8) + 1
    running = np.cumsum(steps)
    before = np.concatenate(([0], running))[np.cumsum(n) - n]
    sparse = running - np.repeat(before, n) - 1 + np.repeat(first, n)
    if not dense_tile.any():
        return sparse, join_planes(columns.values)
    dense = np.flatnonzero(np.repeat(dense_tile, lengths))
    at = np.concatenate((sparse, dense))
    values = np.concatenate((join_planes(columns.values), join_planes(columns.dense)))
    order = np.argsort(at, kind="stable")
    return at[order], values[order]


def in_tensors(segments: Segments, at: I64) -> tuple[I64, I64]:
    """Return tensor and element in it of elements of the rows, given their indices in all elements of the rows."""
    first = np.cumsum(segments.count) - segments.count
    row = np.searchsorted(first, at, side="right") - 1
    rest = at - first[row] + segments.start[row]
    if segments.boxes is None or segments.box is None:
        return segments.tensor[row], rest
    box = segments.box[row]
    element = segments.boxes.offset[box]
    for level in range(segments.boxes.extent.shape[1] - 1, -1, -1):
        rest, c = np.divmod(rest, segments.boxes.extent[box, level])
        element = element + c * segments.boxes.stride[box, level]
    return segments.tensor[row], element


def join_planes(planes: U8) -> U64:
    """Return the elements whose byte planes are the rows of `planes`, zero-extended to u64."""
    width = len(planes)
    return np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1).astype(np.uint64)


@dataclass(frozen=True)
class Slice:
    """Consecutive tiles of a group with the places of their columns: tile, sparse change, dense element."""

    segments: Segments
    tile: int
    k: int
    d: int

    def of(self, columns: Columns) -> Columns:
        """Return views of the columns of these tiles."""
        counts = columns.counts[self.tile : self.tile + self.segments.tiles]
        dense_tile = counts == DENSE
        k = self.k + int(counts[~dense_tile].sum(dtype=np.int64))
        d = self.d + int(self.segments.tile_lengths[dense_tile].sum())
        return Columns(counts, columns.gaps[:, self.k : k], columns.values[:, self.k : k], columns.dense[:, self.d : d])


def slices(segments: Segments, columns: Columns, nbytes: int) -> list[Slice]:
    """Cut a group's columns into slices of about `nbytes` of weights, for threads that share nothing."""
    pieces = list(segments.cut(nbytes))
    if len(pieces) == 1:
        return [Slice(segments, 0, 0, 0)]
    dense_tile = columns.counts == DENSE
    sparse_before = np.concatenate(([0], np.cumsum(np.where(dense_tile, 0, columns.counts), dtype=np.int64)))
    dense_before = np.concatenate(([0], np.cumsum(np.where(dense_tile, segments.tile_lengths, 0))))
    tiles = np.cumsum([0] + [p.tiles for p in pieces[:-1]])
    return [
        Slice(piece, int(tile), int(sparse_before[tile]), int(dense_before[tile]))
        for piece, tile in zip(pieces, tiles, strict=True)
    ]


def apply(
    piece: Slice, addresses: U64, columns: Columns, *, mode: int = XOR, jit: bool, place: Place | None = None
) -> U64:
    """Apply the columns of a slice to its rows; returns the fingerprint difference per row.

    addresses: of each row, whose elements lie side by side in memory and in their tensor; 0 passes over it. place:
    where the other rows are. columns: of the whole group, checked. mode: XOR flips; SET writes the column values as
    they are; READ leaves memory alone and replaces the column values by what XOR would have written.
    """
    if place is None:
        return (_apply_jit if jit else _apply_numpy)(piece, addresses, columns, mode)
    fp = _scatter(piece, place, columns, mode, jit)
    if addresses.any():
        fp += (_apply_jit if jit else _apply_numpy)(piece, addresses, columns, mode)
    return fp


def _apply_jit(piece: Slice, addresses: U64, columns: Columns, mode: int) -> U64:
    from deltackpt import jit

    segments = piece.segments
    fp = np.zeros(len(addresses), np.uint64)
    at, values = _scratch("at", (3, TILE), np.uint64), _scratch("values of a tile", (2, TILE), np.uint64)
    jit.apply(
        _UNIT[segments.width], mode, addresses, segments.count, first_elements(segments), columns.counts, piece.tile,
        columns.gaps, columns.values, piece.k, columns.dense, piece.d, fp, at, *values,
    )  # fmt: skip
    return fp


def _apply_numpy(piece: Slice, addresses: U64, columns: Columns, mode: int) -> U64:
    segments, width = piece.segments, piece.segments.width
    mine = piece.of(columns)
    at, values = positions(segments, mine)
    bounds = np.concatenate(([0], np.cumsum(segments.count)))
    cut = np.searchsorted(at, bounds)
    # Equal in rows that are passed over, and for READ what the columns have.
    before, after = values.copy(), values.copy()
    for row in np.flatnonzero((np.diff(cut) > 0) & (addresses != 0)):
        here = slice(cut[row], cut[row + 1])
        memory = view(addresses[row], int(segments.count[row]) * width).view(f"<u{width}")
        where = at[here] - bounds[row]
        before[here] = memory[where]
        after[here] = values[here] if mode == SET else before[here] ^ values[here]
        if mode != READ:
            memory[where] = after[here].astype(memory.dtype)
    if mode == READ:
        _replace_values(segments, mine, at, after)
    return _changes(segments, at, before, after)


def _scatter(piece: Slice, place: Place, columns: Columns, mode: int, jit: bool) -> U64:
    """Apply the columns of a slice to rows that are boxes; see apply."""
    segments = piece.segments
    fp = np.zeros(len(place.address), np.uint64)
    if jit:
        from deltackpt import jit as compiled

        levels = np.stack((place.extent, place.stride, place.step, place.low, place.high))
        compiled.scatter(
            _UNIT[segments.width], mode, place.address, place.first, levels, segments.count, segments.start,
            columns.counts, piece.tile, columns.gaps, columns.values, piece.k, columns.dense, piece.d, fp,
        )  # fmt: skip
        return fp
    width, mine = segments.width, piece.of(columns)
    at, values = positions(segments, mine)
    after = values.copy()
    bounds = np.concatenate(([0], np.cumsum(segments.count)))
    cut = np.searchsorted(at, bounds)
    for row in np.flatnonzero((np.diff(cut) > 0) & (place.address != 0)):
        rest = at[cut[row] : cut[row + 1]] - bounds[row] + segments.start[row]
        element, moved = np.full_like(rest, place.first[row]), np.zeros_like(rest)
        inside = np.ones(len(rest), bool)
        for level in range(place.extent.shape[1] - 1, -1, -1):
            rest, c = np.divmod(rest, place.extent[row, level])
            element += c * place.stride[row, level]
            moved += c * place.step[row, level]
            inside &= (place.low[row, level] <= c) & (c < place.high[row, level])
        if not inside.any():
            continue
        here, moved = cut[row] + np.flatnonzero(inside), moved[inside]
        lowest = int(moved.min())
        # From the first element to the last: the box need not begin where memory does.
        begin = (int(place.address[row]) + lowest * width) & 0xFFFFFFFFFFFFFFFF
        memory = view(begin, (int(moved.max()) - lowest + 1) * width).view(f"<u{width}")
        before = memory[moved - lowest].astype(np.uint64)
        after[here] = values[here] if mode == SET else before ^ values[here]
        if mode in (XOR, SET):
            memory[moved - lowest] = after[here].astype(memory.dtype)
        index = element[inside].astype(np.uint64)
        terms = contribution(width, index, after[here]) - contribution(width, index, before)
        fp[row] = terms.sum(dtype=np.uint64)
    if mode == READ:
        _replace_values(segments, mine, at, after)
    return fp


def _replace_values(segments: Segments, columns: Columns, at: I64, values: U64) -> None:
    """Write new values into the value and dense planes of columns whose changes are at `at`."""
    in_dense = np.repeat(columns.counts == DENSE, segments.tile_lengths)[at]
    columns.values[:] = _planes(values[~in_dense], segments.width)
    columns.dense[:] = _planes(values[in_dense], segments.width)


def fingerprint(segments: Segments, addresses: U64, *, jit: bool) -> U64:
    """Return what the bytes of each row add to the fingerprint of its tensor. Rows of whole tensors only."""
    nbytes = segments.count * segments.width
    offset = segments.start * segments.width
    fp = np.empty(len(addresses), np.uint64)
    if jit:
        from deltackpt import jit as compiled

        compiled.fingerprint(addresses, nbytes, offset, fp)
        return fp
    for row, (address, n, byte) in enumerate(zip(addresses.tolist(), nbytes.tolist(), offset.tolist(), strict=True)):
        total = np.uint64(0)
        for begin in range(0, n, _CACHED):
            part = view(address + begin, min(_CACHED, n - begin))
            padded = np.concatenate((part, np.zeros(-len(part) % 4, np.uint8))) if len(part) % 4 else part
            first = (byte + begin) // 4  # a row starts at a multiple of TILE elements
            index = np.arange(first, first + len(padded) // 4, dtype=np.uint64)
            total = np.add(total, (padded.view("<u4") * keys(index)).sum(dtype=np.uint64), dtype=np.uint64)
        fp[row] = total
    return fp


def fingerprint_boxes(width: int, place: Place, *, jit: bool) -> U64:
    """Return what the elements of each box, which are all there, add to the fingerprint of its tensor."""
    fp = np.empty(len(place.address), np.uint64)
    if jit:
        from deltackpt import jit as compiled

        compiled.fingerprint_boxes(width, place.address, place.first, place.extent, place.stride, place.step, fp)
        return fp
    for row, address in enumerate(place.address.tolist()):
        extent, step = place.extent[row].tolist(), place.step[row].tolist()
        span = 1 + sum((n - 1) * s for n, s in zip(extent, step, strict=True))
        memory = view(address, span * width).view(f"<u{width}")
        here = np.lib.stride_tricks.as_strided(memory, extent, [s * width for s in step])
        index = np.full(extent, place.first[row])
        for axis, (n, stride) in enumerate(zip(extent, place.stride[row].tolist(), strict=True)):
            index += (np.arange(n) * stride).reshape([-1 if a == axis else 1 for a in range(len(extent))])
        terms = contribution(width, index.ravel().astype(np.uint64), here.ravel().astype(np.uint64))
        fp[row] = terms.sum(dtype=np.uint64)
    return fp


def require_counts(lengths: I64, counts: U16) -> tuple[int, int]:
    """Return the sparse changes and dense elements that the counts demand. Raises FormatError for a bad count."""
    dense_tile = counts == DENSE
    bad = np.flatnonzero(~dense_tile & (counts > lengths))
    if len(bad):
        tile = int(bad[0])
        raise FormatError(f"tile {tile} has {lengths[tile]} elements and counts {counts[tile]} changes")
    return int(counts[~dense_tile].sum(dtype=np.int64)), int(lengths[dense_tile].sum())


def check(piece: Slice, columns: Columns, *, jit: bool) -> None:
    """Raise FormatError unless the last position of every tile of the slice is inside it.

    Positions only grow, so that is enough. Counts have passed require_counts.
    """
    lengths = piece.segments.tile_lengths
    counts = columns.counts[piece.tile : piece.tile + len(lengths)]
    if jit:
        from deltackpt import jit as compiled

        bad = int(compiled.check(lengths, counts, columns.gaps, piece.k))
    else:
        n = np.where(counts == DENSE, 0, counts).astype(np.int64)
        k = piece.k + np.cumsum(n)
        steps = columns.gaps[0].astype(np.int64) + (columns.gaps[1].astype(np.int64) << 8) + 1
        running = np.concatenate(([0], np.cumsum(steps)))
        outside = np.flatnonzero(running[k] - running[k - n] > lengths)
        bad = int(outside[0]) if len(outside) else -1
    if bad >= 0:
        raise FormatError(f"tile {piece.tile + bad}: its last change lies outside its {lengths[bad]} elements")
