"""The CPU backend: encode, decode and apply groups with a pool of threads.

Memory: encode holds a few pieces and the frames of one group; decode holds the columns of what it was given.
Kernels and codecs release the GIL, so threads run side by side. Longer than most modules: encode and decode
share planes, frames and the pool, and each is half of what the other one means.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from deltackpt import codec as codecs
from deltackpt.codec import Bytes
from deltackpt.digest import U64
from deltackpt.errors import ConfigError, FormatError
from deltackpt.kernels import (
    READ,
    SET,
    U8,
    XOR,
    Columns,
    Extracted,
    Place,
    Slice,
    check,
    extract,
    fingerprint_boxes,
    require_counts,
    slices,
    use_jit,
    view,
)
from deltackpt.kernels import apply as apply_slice
from deltackpt.layout import I64, Layout, Segments, Tiling
from deltackpt.partition import Partition
from deltackpt.pool import PIECE, default_threads, fingerprints, in_order, row_addresses, submit
from deltackpt.shard import COUNTS, DENSE, GAP, MASK, MASK_FRAME, PLANE_FRAME, VALUE, EncodedGroup, Fetched, Frame

__all__ = [
    "READ", "SET", "XOR", "Staged", "apply", "apply_rows", "decode", "decode_group", "encode", "encode_part",
    "fingerprints", "pack", "part_fingerprints",
]  # fmt: skip

A = TypeVar("A")
B = TypeVar("B")


def _strided_rows(segments: Segments, tensors: U64) -> Place | None:
    """Return where the rows are that are no run of elements in their tensor, None if there is none."""
    boxes, box = segments.boxes, segments.box
    if boxes is None or box is None or not (strided := boxes.strided[box]).any():
        return None
    begin = tensors[segments.tensor] + (boxes.offset[box] * segments.width).astype(np.uint64)
    return Place.of(boxes, box, np.where(strided, begin, np.uint64(0)), boxes.stride[box])


# ---------------------------------------------------------------- encode


class _Plane:
    """Bytes of one plane, waiting to be cut into frames of equal size."""

    def __init__(self, frame: int) -> None:
        self.frame, self.waiting, self.nbytes = frame, [np.empty(0, np.uint8)], 0

    def add(self, more: U8) -> Iterator[U8]:
        self.waiting.append(more)
        self.nbytes += len(more)
        if self.nbytes >= self.frame:
            joined = np.concatenate(self.waiting)
            whole = self.nbytes // self.frame * self.frame
            yield from joined[:whole].reshape(-1, self.frame)
            self.waiting, self.nbytes = [joined[whole:].copy()], self.nbytes - whole

    def rest(self) -> Iterator[U8]:
        if self.nbytes:
            yield np.concatenate(self.waiting)


def encode(
    layout: Layout, old: U64, new: U64, *, codec: str = "zstd", form: str = "sparse", threads: int | None = None
) -> Generator[EncodedGroup, None, None]:
    """Yield the groups in which two copies of the tensors differ.

    old, new: u64 address of each tensor's contiguous bytes, in layout order; the caller keeps them alive and unchanged
    until the last group is there or the generator is closed.
    codec: of the frames; with form "mask" the inner codec, and zstd around it. form: "sparse" or "mask".
    """
    groups = range(len(layout.groups))
    found = _extract(layout, groups, row_addresses, old, new, threads)
    return encode_extracted(layout, 0, found, codec=codec, form=form, threads=threads)


def encode_part(
    partition: Partition,
    part: int,
    old: U64,
    new: U64,
    *,
    codec: str = "zstd",
    form: str = "sparse",
    threads: int | None = None,
) -> Generator[EncodedGroup, None, None]:
    """Yield the groups of one part in which two copies of its boxes differ, with their numbers in the version.

    old, new: u64 address of each box of the part, in the order of `partition.places(part)`; the elements of a box lie
    side by side, row-major, as in a tensor of its own. Otherwise as `encode`.
    """
    found = _extract(partition, partition.groups_of(part), box_address(partition, part), old, new, threads)
    return encode_extracted(partition, part, found, codec=codec, form=form, threads=threads)


def box_address(partition: Partition, part: int) -> Callable[[Segments, U64], U64]:
    """Return what gives the address of each row of a part, from those of its boxes; see `encode_part`."""
    first = int(partition.box_begin[part])

    def address(rows: Segments, boxes: U64) -> U64:
        assert rows.box is not None
        return boxes[rows.box - first] + (rows.start * rows.width).astype(np.uint64)

    return address


@dataclass(frozen=True)
class Piece:
    """Some tiles of a group, and what changed in them."""

    group: int
    rows: Segments
    extracted: Extracted


def _extract(
    tiling: Tiling, groups: range, address: Callable[[Segments, U64], U64], old: U64, new: U64, threads: int | None
) -> Generator[Piece]:
    """Yield the pieces of the groups, in order."""
    jit = use_jit(tiling.layout)

    def compare(item: tuple[int, Segments]) -> Piece:
        group, rows = item
        return Piece(group, rows, extract(rows, address(rows, old), address(rows, new), jit=jit))

    yield from in_order(compare, ((g, rows) for g in groups for rows in tiling.groups[g].cut(PIECE)), threads)


def encode_extracted(
    tiling: Tiling, part: int, pieces: Generator[Piece], *, codec: str, form: str, threads: int | None
) -> Generator[EncodedGroup, None, None]:
    """Yield the changed groups of pieces that come in order. Otherwise as `encode`."""
    if codec not in codecs.NAMES or codec == "ans":
        raise ConfigError(f"codec {codec!r} is unknown; expected one of {' '.join(codecs.NAMES[:-1])}")
    if form not in ("sparse", "mask"):
        raise ConfigError(f"form {form!r} is unknown; expected sparse or mask")
    number = codecs.NAMES.index(codec)
    group: _Group | None = None
    with contextlib.closing(pieces):
        for piece in pieces:
            if group is None or group.number != piece.group:
                if group is not None and (done := group.finish()):
                    yield done
                make = _SparseGroup if form == "sparse" else _MaskGroup
                group = make(piece.group, tiling, number, threads or default_threads(), part)
            group.add(piece.rows, piece.extracted)
        if group is not None and (done := group.finish()):
            yield done


class _Group:
    """A group that is being encoded: pieces come in order, frames are compressed as soon as they are full."""

    def __init__(self, number: int, tiling: Tiling, codec: int, threads: int, part: int = 0) -> None:
        self.number, self.tiling, self.codec, self.threads, self.part = number, tiling, codec, threads, part
        self.frames: list[tuple[int, int, Future[Frame] | Frame]] = []
        self.fingerprints = np.zeros(len(tiling.layout.names), np.uint64)
        self.touched = np.zeros(len(tiling.layout.names), bool)
        self.changed = 0

    def add(self, piece: Segments, extracted: Extracted) -> None:
        rows = np.flatnonzero(extracted.changed)
        self.changed += int(extracted.changed.sum())
        tensors = piece.tensor[rows]
        np.add.at(self.fingerprints, tensors, extracted.fingerprints[rows])  # a tensor may have several boxes
        self.touched[tensors] = True

    def compress(self, plane: int, block: int, raw: U8) -> None:
        if self.threads == 1:
            self.frames.append((plane, block, compress(plane, block, self.codec, raw)))
        else:
            task = submit(self.threads, partial(compress, plane, block, self.codec, raw))
            self.frames.append((plane, block, task))

    def finish(self) -> EncodedGroup | None:
        if not self.changed:
            return None
        tensor = np.flatnonzero(self.touched)
        return EncodedGroup(self.number, self.finished(), tensor, self.fingerprints[tensor], self.changed, self.part)

    def finished(self) -> tuple[Frame, ...]:
        """Return all frames, sorted by plane and place."""
        self.flush()
        # Stable: frames of a plane stay in order.
        ordered = sorted(self.frames, key=lambda f: f[0])
        return tuple(f if isinstance(f, Frame) else f.result() for _, _, f in ordered)

    def flush(self) -> None:
        raise AssertionError("a form flushes its own planes")


def compress(plane: int, block: int, codec: int, raw: U8) -> Frame:
    """Compress a frame; one of a mask with zstd around it, unless that is its codec."""
    used, stored = codecs.encode(codec, raw)
    wrap = codecs.RAW
    if plane == MASK and used in (codecs.DEFLATE, codecs.LZ4, codecs.SNAPPY):
        wrap, stored = codecs.encode(codecs.ZSTD, stored)
    return Frame(plane, block, used, wrap, len(raw), stored)


class _SparseGroup(_Group):
    def __init__(self, number: int, tiling: Tiling, codec: int, threads: int, part: int = 0) -> None:
        super().__init__(number, tiling, codec, threads, part)
        width = tiling.groups[number].width
        planes = [COUNTS, GAP, GAP + 1, *range(VALUE, VALUE + width), *range(DENSE, DENSE + width)]
        self.planes = {plane: _Plane(PLANE_FRAME) for plane in planes}

    def add(self, piece: Segments, extracted: Extracted) -> None:
        super().add(piece, extracted)
        self.feed(extracted.columns)

    def feed(self, columns: Columns) -> None:
        self._feed(COUNTS, columns.counts.astype("<u2").view(np.uint8))
        for first, planes in ((GAP, columns.gaps), (VALUE, columns.values), (DENSE, columns.dense)):
            for i, plane in enumerate(planes):
                self._feed(first + i, plane)

    def _feed(self, plane: int, more: U8) -> None:
        for raw in self.planes[plane].add(more):
            self.compress(plane, 0, raw)

    def flush(self) -> None:
        for plane, waiting in self.planes.items():
            for raw in waiting.rest():
                self.compress(plane, 0, raw)


class _MaskGroup(_Group):
    def __init__(self, number: int, tiling: Tiling, codec: int, threads: int, part: int = 0) -> None:
        super().__init__(number, tiling, codec, threads, part)
        self.mask, self.block = _Plane(MASK_FRAME), 0

    def add(self, piece: Segments, extracted: Extracted) -> None:
        super().add(piece, extracted)
        self.feed(Slice(piece, 0, 0, 0), extracted.columns)

    def feed(self, piece: Slice, columns: Columns) -> None:
        """Turn the columns of the next slice into its mask."""
        segments = piece.segments
        mask = np.zeros(segments.nbytes, np.uint8)
        rows = _row_offsets(segments) + np.uint64(mask.__array_interface__["data"][0])
        flat = Slice(segments.plain, piece.tile, piece.k, piece.d)
        apply_slice(flat, rows, columns, jit=use_jit(self.tiling.layout))
        for raw in self.mask.add(mask):
            self._store(raw)

    def _store(self, raw: U8) -> None:
        if raw.any():
            self.compress(MASK, self.block, raw)
        self.block += 1

    def flush(self) -> None:
        for raw in self.mask.rest():
            self._store(raw)


def pack(tiling: Tiling, staged: Staged) -> EncodedGroup:
    """Lay columns out as raw frames: the form in which a redo journal keeps new values."""
    group = _SparseGroup(staged.group, tiling, codecs.RAW, threads=1)
    group.feed(staged.columns)
    group.changed = int(np.count_nonzero(staged.columns.counts))
    packed = group.finish()
    assert packed is not None, "a staged group holds a change"
    return packed


def _row_offsets(segments: Segments) -> U64:
    """Offset of each row when the rows lie back to back."""
    sizes = segments.count * segments.width
    return (np.cumsum(sizes) - sizes).astype(np.uint64)


# ---------------------------------------------------------------- decode


@dataclass(frozen=True)
class Staged:
    """A decoded and checked group, ready to be applied."""

    group: int
    columns: Columns


def decode(tiling: Tiling, groups: Iterable[EncodedGroup], *, threads: int | None = None) -> list[Staged]:
    """Decode encoded groups; raises FormatError for columns that do not fit their tiles."""
    return [decode_group(tiling, g.group, g.frames, threads=threads) for g in groups]


def decode_group(tiling: Tiling, group: int, frames: Sequence[Frame], *, threads: int | None = None) -> Staged:
    """Decode the frames of a group, sorted by plane and place, into checked columns.

    Nothing is allocated before the sizes that the frames announce have been held against the layout.
    """
    columns = decode_columns(tiling, group, frames, threads=threads)
    jit, pieces = use_jit(tiling.layout), slices(tiling.groups[group], columns, PIECE)
    try:
        for _ in in_order(lambda s: check(s, columns, jit=jit), pieces, threads):
            pass
    except FormatError as exc:
        raise type(exc)(f"group {group} ({tiling.group_names(group)}): {exc}") from exc
    return Staged(group, columns)


def _allocate(nbytes: int) -> U8:
    return np.empty(nbytes, np.uint8)


def decode_columns(
    tiling: Tiling,
    group: int,
    frames: Sequence[Frame],
    *,
    threads: int | None = None,
    allocate: Callable[[int], U8] = _allocate,
) -> Columns:
    """Decode the frames of a group into columns; positions are yet to be checked.

    The columns lie one after the other (counts, gaps, values, dense) in memory that `allocate` gives: once, when its
    size is known and has been held against the layout.
    """
    segments = tiling.groups[group].plain
    try:
        if frames and frames[0].plane == MASK:
            found = _decode_mask(segments, frames, threads, use_jit(tiling.layout))
            k, d = found.gaps.shape[1], found.dense.shape[1]
            columns = _columns_in(
                allocate(2 * segments.tiles + (2 + segments.width) * k + segments.width * d), segments, k, d
            )
            for part, source in zip(vars(columns).values(), vars(found).values(), strict=True):
                part[...] = source
        else:
            columns = _decode_planes(segments, frames, threads, allocate)
        if not np.any(columns.counts):
            raise FormatError("it holds no change")
    except FormatError as exc:
        raise type(exc)(f"group {group} ({tiling.group_names(group)}): {exc}") from exc
    return columns


def _decompress(frame: Frame) -> Bytes:
    stored = frame.stored
    if frame.outer == codecs.ZSTD:
        stored = codecs.decode_bounded(stored, codecs.inner_limit(frame.raw))
    elif frame.outer != codecs.RAW:
        raise FormatError(f"outer codec number {frame.outer} is unknown")
    return codecs.decode(frame.codec, stored, frame.raw)


def _decode_planes(
    segments: Segments, frames: Sequence[Frame], threads: int | None, allocate: Callable[[int], U8]
) -> Columns:
    width = segments.width
    of_plane: dict[int, list[Frame]] = {}
    for frame in frames:
        of_plane.setdefault(frame.plane, []).append(frame)
    expected = {COUNTS, GAP, GAP + 1, *range(VALUE, VALUE + width), *range(DENSE, DENSE + width)}
    if not set(of_plane) <= expected:
        raise FormatError(f"planes {sorted(of_plane)} where {sorted(expected)} are possible")
    counts = np.empty(2 * segments.tiles, np.uint8)
    _fill({COUNTS: counts}, of_plane, threads)
    k, d = require_counts(segments.tile_lengths, counts.view("<u2"))
    sizes = {p: k for p in (GAP, GAP + 1, *range(VALUE, VALUE + width))}
    sizes |= {p: d for p in range(DENSE, DENSE + width)}
    for plane, nbytes in sizes.items():
        _require_frames(plane, of_plane.get(plane, []), nbytes)
    columns = _columns_in(allocate(len(counts) + (2 + width) * k + width * d), segments, k, d)
    columns.counts[:] = counts.view("<u2")
    rows = {GAP + i: columns.gaps[i] for i in range(2)}
    rows |= {VALUE + i: columns.values[i] for i in range(width)} | {DENSE + i: columns.dense[i] for i in range(width)}
    _fill(rows, of_plane, threads)
    return columns


def _columns_in(memory: U8, segments: Segments, k: int, d: int) -> Columns:
    """Return columns that lie in `memory` one after the other: counts, gaps, values, dense."""
    parts = np.split(memory, np.cumsum([2 * segments.tiles, 2 * k, segments.width * k]))
    counts, gaps, values, dense = parts
    width = segments.width
    return Columns(counts.view("<u2"), gaps.reshape(2, k), values.reshape(width, k), dense.reshape(width, d))


def _require_frames(plane: int, frames: Sequence[Frame], nbytes: int) -> None:
    """Raise FormatError unless the frames are cut as the format says and hold `nbytes` together."""
    whole, rest = divmod(nbytes, PLANE_FRAME)
    due = [PLANE_FRAME] * whole + [rest] * (rest > 0)
    if [f.raw for f in frames] != due or any(f.block for f in frames):
        raise FormatError(f"plane {plane}: frames hold {sum(f.raw for f in frames)} bytes, the counts demand {nbytes}")


def _fill(rows: dict[int, U8], of_plane: dict[int, list[Frame]], threads: int | None) -> None:
    """Decode the frames of each plane into its row."""
    tasks: list[tuple[U8, Frame]] = []
    for plane, row in rows.items():
        frames = of_plane.get(plane, [])
        _require_frames(plane, frames, len(row))
        tasks += [(row[i * PLANE_FRAME :][: f.raw], f) for i, f in enumerate(frames)]

    def work(task: tuple[U8, Frame]) -> None:
        row, frame = task
        row[:] = np.frombuffer(_decompress(frame), np.uint8)

    for _ in in_order(work, tasks, threads):
        pass


def _decode_mask(segments: Segments, frames: Sequence[Frame], threads: int | None, jit: bool) -> Columns:
    """Decode a mask into columns, so that there is one way to apply."""
    whole, rest = divmod(segments.nbytes, MASK_FRAME)
    blocks = [f.block for f in frames]
    for frame in frames:
        due = MASK_FRAME if frame.block < whole else rest if frame.block == whole else 0
        if frame.plane != MASK or frame.raw != due or not due:
            raise FormatError(f"mask frame {frame.block}: {frame.raw} bytes announced, or it lies outside the group")
    if any(a >= b for a, b in itertools.pairwise(blocks)):
        raise FormatError("mask frames are not sorted")
    mask = np.zeros(segments.nbytes, np.uint8)

    def work(frame: Frame) -> None:
        row = mask[frame.block * MASK_FRAME :][: frame.raw]
        row[:] = np.frombuffer(_decompress(frame), np.uint8)

    for _ in in_order(work, frames, threads):
        pass
    pieces = list(segments.cut(PIECE))
    zeros = np.zeros(max(int((p.count * p.width).max()) for p in pieces), np.uint8)
    begins = np.cumsum([0] + [p.nbytes for p in pieces[:-1]])

    def columns_of(item: tuple[Segments, int]) -> Columns:
        piece, begin = item
        here = _row_offsets(piece) + np.uint64(mask[begin:].__array_interface__["data"][0])
        nothing = np.full(len(here), zeros.__array_interface__["data"][0], np.uint64)
        return extract(piece, nothing, here, jit=jit).columns

    found = list(in_order(columns_of, zip(pieces, begins.tolist(), strict=True), threads))
    return Columns(
        np.concatenate([c.counts for c in found]),
        np.concatenate([c.gaps for c in found], axis=1),
        np.concatenate([c.values for c in found], axis=1),
        np.concatenate([c.dense for c in found], axis=1),
    )


# ---------------------------------------------------------------- apply


def apply(
    tiling: Tiling, staged: Iterable[Staged], tensors: U64, *, mode: int = XOR, threads: int | None = None
) -> U64:
    """Apply groups in place; returns what that added to the fingerprint of each tensor, mod 2^64.

    tensors: u64 address of each tensor's contiguous bytes. mode: see kernels.apply. One thread owns a tile.
    """

    def where(segments: Segments) -> tuple[U64, Place | None]:
        return row_addresses(segments, tensors), _strided_rows(segments, tensors)

    found = apply_rows(tiling, staged, where, mode=mode, threads=threads)
    if not isinstance(tiling, Partition):
        return found
    total = np.zeros(len(tiling.layout.names), np.uint64)
    np.add.at(total, tiling.boxes.tensor, found)
    return total


def apply_rows(
    tiling: Tiling,
    staged: Iterable[Staged],
    where: Callable[[Segments], tuple[U64, Place | None]],
    *,
    mode: int = XOR,
    threads: int | None = None,
) -> U64:
    """Apply groups to what is there of them; returns what that added to fingerprints, by box (tensor of a layout).

    where: addresses and place of some rows; see kernels.apply. Called by several threads.
    """
    jit = use_jit(tiling.layout)
    boxes = tiling.boxes.count if isinstance(tiling, Partition) else tiling.layout.count
    total = np.zeros(len(boxes), np.uint64)

    def work(item: tuple[Slice, Columns]) -> tuple[Segments, U64]:
        piece, columns = item
        addresses, place = where(piece.segments)
        return piece.segments, apply_slice(piece, addresses, columns, mode=mode, jit=jit, place=place)

    items = ((s, g.columns) for g in staged for s in slices(tiling.groups[g.group], g.columns, PIECE))
    for segments, fp in in_order(work, items, threads):
        total[segments.tensor if segments.box is None else segments.box] += fp
    return total


class Encoding(Protocol):
    """What is about to be published: encoded groups, and the way to bring the base to it."""

    def groups(self) -> Generator[EncodedGroup, None, None]:
        """Yield the changed groups, once; closed, it reads no tensor any more."""

    def advance(self, base: U64) -> None:
        """Apply what `groups` has yielded at the addresses of the base, given as those of the old tensors were."""


class Device(Protocol):
    """Memory with tensors in it, and the work on them. Addresses are u64, one a tensor, of contiguous bytes.

    They are those that `hold` and `allocate` gave, or inside of what those gave: pointers, or numbers of the device's.
    detached: `encode` has read the new tensors when it returns, so that they may change while groups are made.
    """

    detached: bool

    def hold(self, tensors: Sequence[object]) -> tuple[object, U64]:
        """Return what is to be held as long as these contiguous tensors or arrays are used, and their addresses."""

    @property
    def room(self) -> Callable[[int], memoryview] | None:
        """What gives host memory from which shards are staged fastest; None: any is as good."""

    def encode(self, layout: Layout, old: U64, new: U64, *, codec: str, form: str) -> Encoding:
        """Compare two copies of the tensors."""

    def encode_part(self, partition: Partition, part: int, old: U64, new: U64, *, codec: str, form: str) -> Encoding:
        """Compare two copies of the boxes of a part; see `encode_part` of this module."""

    def part_fingerprints(self, partition: Partition, part: int, boxes: U64) -> U64:
        """Return what each box of a part adds to the fingerprint of its tensor; see `encode_part` for `boxes`."""

    def stage(self, tiling: Tiling, fetched: Sequence[Fetched]) -> Sequence[object]:
        """Decode and check all groups of shards, which stay as they are until the result was applied or dropped.

        Raises FormatError.
        """

    def apply(
        self, tiling: Tiling, staged: Sequence[object], tensors: U64, meanwhile: Callable[[], None] = lambda: None
    ) -> U64:
        """Flip bits in place; returns what that added to each fingerprint. meanwhile: called once, beside the work."""

    def fingerprints(self, layout: Layout, tensors: U64) -> U64:
        """Return the fingerprint of each tensor."""

    def allocate(self, nbytes: int, *, in_host: bool = False) -> tuple[object, int]:
        """Return memory, to be held, and its address.

        in_host: of the host, on which the device works in place; ConfigError where it cannot.
        """

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes; each address may be of this device or of the host."""


class BoxDevice(Device, Protocol):
    """A device that reaches boxes of tensors where they lie, with whatever strides; see kernels.Place."""

    def locate(self, tiling: Tiling, where: Callable[[Segments], tuple[U64, Place | None]]) -> object:
        """Prepare for `apply_rows` what is here of a tiling. where: see `apply_rows` of this module."""

    def apply_rows(self, tiling: Tiling, staged: Sequence[object], located: object) -> U64:
        """Flip bits of what is here, in place; returns what that added to fingerprints, by box (tensor of a layout)."""

    def box_fingerprints(self, layout: Layout, tensor: I64, place: Place) -> U64:
        """Return what boxes, all of each there, add to the fingerprints of their tensors. tensor: index of each."""


class HostDevice(Device, Protocol):
    """A device whose groups are encoded and decoded in host memory."""

    def stage_groups(self, tiling: Tiling, groups: Iterable[tuple[int, Sequence[Frame]]]) -> Sequence[object]:
        """Decode and check groups: number, and frames sorted by plane and place. See `Device.stage`."""


class Cpu:
    """Tensors in host memory."""

    detached = False
    room = None

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads

    def hold(self, tensors: Sequence[object]) -> tuple[object, U64]:
        """See Device."""
        return tensors, pointers(tensors)

    def encode(self, layout: Layout, old: U64, new: U64, *, codec: str, form: str) -> Encoding:
        """See Device."""
        groups = encode(layout, old, new, codec=codec, form=form, threads=self.threads)
        return HostEncoding(self, layout, groups, partial(self.apply, layout))

    def encode_part(
        self, partition: Partition, part: int, old: U64, new: U64, *, codec: str, form: str
    ) -> HostEncoding:
        """See Device."""
        groups = encode_part(partition, part, old, new, codec=codec, form=form, threads=self.threads)
        address = box_address(partition, part)

        def apply_part(staged: Sequence[object], boxes: U64) -> U64:
            return self.apply_rows(partition, staged, lambda rows: (address(rows, boxes), None))

        return HostEncoding(self, partition, groups, apply_part)

    def part_fingerprints(self, partition: Partition, part: int, boxes: U64) -> U64:
        """See Device."""
        return part_fingerprints(partition, part, boxes, threads=self.threads)

    def stage(self, tiling: Tiling, fetched: Sequence[Fetched]) -> list[Staged]:
        """See Device."""
        return self.stage_groups(tiling, itertools.chain.from_iterable(one.groups() for one in fetched))

    def stage_groups(self, tiling: Tiling, groups: Iterable[tuple[int, Sequence[Frame]]]) -> list[Staged]:
        """Decode and check groups: number, and frames sorted by plane and place."""
        return [decode_group(tiling, group, frames, threads=self.threads) for group, frames in groups]

    def apply(
        self, tiling: Tiling, staged: Sequence[object], tensors: U64, meanwhile: Callable[[], None] = lambda: None
    ) -> U64:
        """See Device."""
        meanwhile()
        return apply(tiling, cast("Sequence[Staged]", staged), tensors, threads=self.threads)

    def locate(self, tiling: Tiling, where: Callable[[Segments], tuple[U64, Place | None]]) -> object:
        """See BoxDevice."""
        return where

    def apply_rows(self, tiling: Tiling, staged: Sequence[object], located: object) -> U64:
        """See BoxDevice."""
        where = cast("Callable[[Segments], tuple[U64, Place | None]]", located)
        return apply_rows(tiling, cast("Sequence[Staged]", staged), where, threads=self.threads)

    def box_fingerprints(self, layout: Layout, tensor: I64, place: Place) -> U64:
        """See BoxDevice."""
        return box_fingerprints(layout, tensor, place, threads=self.threads)

    def fingerprints(self, layout: Layout, tensors: U64) -> U64:
        """See Device."""
        return fingerprints(layout, tensors, threads=self.threads)

    def allocate(self, nbytes: int, *, in_host: bool = False) -> tuple[object, int]:
        """See Device."""
        memory = np.empty(max(1, nbytes), np.uint8)
        return memory, int(memory.__array_interface__["data"][0])

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See Device."""
        view(target, nbytes)[:] = view(source, nbytes)


def pointers(tensors: Sequence[object]) -> U64:
    """Return the address of the first byte of torch tensors and numpy arrays, as they give it."""
    found = (
        t.__array_interface__["data"][0] if isinstance(t, np.ndarray) else cast("Any", t).data_ptr() for t in tensors
    )
    return np.fromiter(found, np.uint64, len(tensors))


@dataclass
class HostEncoding:
    """Groups that are encoded in host memory. The base is brought on by decoding them again."""

    device: HostDevice
    tiling: Tiling
    encoded: Generator[EncodedGroup, None, None]
    apply: Callable[[Sequence[object], U64], U64]
    kept: list[EncodedGroup] = field(default_factory=list)

    def groups(self) -> Generator[EncodedGroup, None, None]:
        with contextlib.closing(self.encoded):
            for group in self.encoded:
                self.kept.append(group)
                yield group

    def advance(self, base: U64) -> None:
        for group in self.kept:
            self.apply(self.device.stage_groups(self.tiling, [(group.group, group.frames)]), base)


def part_fingerprints(partition: Partition, part: int, boxes: U64, *, threads: int | None = None) -> U64:
    """Return what each box of a part adds to the fingerprint of its tensor: a full pass over memory.

    boxes: addresses as for `encode_part`. Over all parts, the boxes of a tensor add up to its fingerprint.
    """
    tensor, place = whole_boxes(partition, part, boxes)
    return box_fingerprints(partition.layout, tensor, place, threads=threads)


def whole_boxes(partition: Partition, part: int, boxes: U64) -> tuple[I64, Place]:
    """Return the tensor of each box of a part, and where they are; see `encode_part` for `boxes`."""
    rows = np.arange(partition.box_begin[part], partition.box_begin[part + 1])
    return partition.boxes.tensor[rows], Place.of(partition.boxes, rows, boxes)


def box_fingerprints(layout: Layout, tensor: I64, place: Place, *, threads: int | None = None) -> U64:
    """Return what boxes, all of each there, add to the fingerprints of their tensors. tensor: index of each."""
    jit, width = use_jit(layout), layout.width[tensor]
    total = np.zeros(len(tensor), np.uint64)
    tasks: list[tuple[int, I64]] = []
    for w in np.unique(width).tolist():
        rows = np.flatnonzero(width == w)
        piece = np.cumsum(place.extent[rows].prod(axis=1) * w) // PIECE
        tasks += [(w, some) for some in np.split(rows, np.flatnonzero(np.diff(piece)) + 1)]

    def work(task: tuple[int, I64]) -> tuple[I64, U64]:
        w, rows = task
        return rows, fingerprint_boxes(w, place.take(rows), jit=jit)

    for rows, fp in in_order(work, tasks, threads):
        total[rows] = fp
    return total
