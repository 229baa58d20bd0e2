"""Partitions: which part of a version owns which boxes of which tensors, and the tiles and groups that follow.

Pure: no I/O. Rules in `manifests/FORMAT.md` section 7. Without a loop over boxes where a version has many: a model of
60,000 tensors is cut and checked in a fraction of a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from deltackpt.digest import sha256
from deltackpt.errors import FormatError
from deltackpt.layout import BITS, I64, MAX_BYTES, Boxes, Layout, Segments, form_groups, name_group

MAX_PARTITION = 64 << 20
"""Bytes of an encoded partition."""
MAX_PARTS = 1 << 14
"""Parts of a partition."""
MAX_BOXES = 1 << 20
"""Boxes of a partition."""
MAX_DIMENSIONS = 5
"""Dimensions of a tensor that may be cut in another dimension than its first."""

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A box of a tensor: of each dimension (begin, end), in header elements."""

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """whole: runs of whole tensors, (first, count) each; rows: (tensor, begin, end) each, cut in dimension 0 alone;

    boxes: of each the tensor, then (begin, end) of every dimension.
    """

    whole: list[_Number]
    rows: list[_Number]
    boxes: list[list[_Number]]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layout: str
    parts: list[_Part]


class Partition:
    """Parts of a layout, each a list of boxes; every element of every tensor is in exactly one. Immutable.

    parts: how many; boxes: of all parts, part after part, sorted by tensor and first element. The boxes of part p are
    those from box_begin[p] to box_begin[p + 1], its groups those from group_begin[p] to group_begin[p + 1].
    """

    def __init__(self, layout: Layout, parts: Sequence[Iterable[tuple[int, Box | None]]]) -> None:
        """Cut a layout. parts: of each the boxes, as (index of the tensor, box or None for all of it), in any order.

        Tensors without elements are in no part. Raises FormatError naming a tensor that is not covered exactly once, or
        is cut where it cannot be.
        """
        self._build(layout, [_part_of(layout, part) for part in parts])

    @classmethod
    def decode(cls, data: bytes, layout: Layout) -> Partition:
        """Parse a stored partition of a layout. Raises FormatError unless it keeps every rule."""
        if len(data) > MAX_PARTITION:
            raise FormatError(f"partition: {len(data)} bytes are above the limit of {MAX_PARTITION}")
        try:
            record = msgspec.json.decode(data, type=_Record)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise FormatError(f"partition: {exc}") from exc
        if record.layout != layout.digest:
            raise FormatError(f"partition: it cuts layout {record.layout[:12]}, the version has {layout.digest[:12]}")
        found = cls.__new__(cls)
        found._build(layout, record.parts)
        if found.encoded != data:
            raise FormatError("partition: it is not in the canonical form that its digest stands for")
        return found

    def _build(self, layout: Layout, parts: list[_Part]) -> None:
        if len(parts) > MAX_PARTS:
            raise FormatError(f"partition: {len(parts)} parts are above the limit of {MAX_PARTS}")
        if sum(len(p.whole) // 2 + len(p.rows) // 3 + len(p.boxes) for p in parts) > MAX_BOXES + len(layout.names):
            raise FormatError(f"partition: it has more boxes than the limit of {MAX_BOXES}")
        self.layout, self.parts = layout, len(parts)
        whole, rows, cuts = _whole(layout, parts), _rows(layout, parts), _Cuts(layout, parts)
        runs = _Runs(*(np.concatenate(pair) for pair in zip(whole.columns(), rows.columns(), strict=True)))
        _require_cover(layout, runs, cuts)
        n, tensor = len(runs.part), np.concatenate((runs.tensor, cuts.tensor))
        offset = np.concatenate((runs.offset, cuts.offset))
        extent = np.ones((len(tensor), cuts.extent.shape[1]), np.int64)
        stride = np.ones_like(extent)
        extent[:n, -1], extent[n:], stride[n:] = runs.count, cuts.extent, cuts.stride
        part = np.concatenate((runs.part, cuts.part))
        order = np.lexsort((offset, tensor, part))
        self._part, self._cuts, self._cut_ranges = part[order], cuts.given, (cuts.begin, cuts.end)
        # As encoded. Of a whole tensor _end is 0; of a box _begin is -1, and _end its number among the boxes.
        self._begin = np.concatenate((runs.begin, np.full_like(cuts.part, -1)))[order]
        self._end = np.concatenate((runs.end, np.arange(len(cuts.part))))[order]
        self.boxes = Boxes(tensor[order], offset[order], extent[order], stride[order])
        self.box_begin: I64 = np.searchsorted(self._part, np.arange(self.parts + 1)).astype(np.int64)

    @cached_property
    def encoded(self) -> bytes:
        """The object stored under `partitions/<digest>.json`."""
        parts = []
        for p in range(self.parts):
            mine = slice(int(self.box_begin[p]), int(self.box_begin[p + 1]))
            tensor, begin, end = self.boxes.tensor[mine], self._begin[mine], self._end[mine]
            whole = tensor[(begin == 0) & (end == 0)]
            first = np.flatnonzero(np.diff(whole, prepend=-2) != 1)
            runs = np.stack((whole[first], np.diff(first, append=len(whole))), axis=1)
            cut = (begin >= 0) & (end > 0)
            rows = np.stack((tensor[cut], begin[cut], end[cut]), axis=1)
            boxes = [self._cuts[i] for i in end[begin < 0].tolist()]
            parts.append(_Part(runs.ravel().tolist(), rows.ravel().tolist(), boxes))
        return msgspec.json.encode(_Record(self.layout.digest, parts)) + b"\n"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `encoded`."""
        return sha256(self.encoded)

    @cached_property
    def _groups(self) -> tuple[tuple[Segments, ...], I64]:
        groups: list[Segments] = []
        begin = [0]
        width, count = self.layout.width[self.boxes.tensor], self.boxes.count
        for p in range(self.parts):
            mine = slice(int(self.box_begin[p]), int(self.box_begin[p + 1]))
            for w in (1, 2, 4, 8):
                box = np.flatnonzero(width[mine] == w) + mine.start
                if len(box):
                    rows = Segments(w, self.boxes.tensor[box], np.zeros_like(box), count[box], box, self.boxes)
                    groups.extend(form_groups(rows))
            begin.append(len(groups))
        return tuple(groups), np.array(begin, np.int64)

    @property
    def groups(self) -> tuple[Segments, ...]:
        """The tiles of every group: those of part 0, then those of part 1, and so on."""
        return self._groups[0]

    @property
    def group_begin(self) -> I64:
        """Number of the first group of each part, and at the end the number of groups."""
        return self._groups[1]

    def groups_of(self, part: int) -> range:
        """Return the groups of a part."""
        return range(*self.group_begin[part : part + 2].tolist())

    def part_of(self, group: int) -> int:
        """Return the part that a group belongs to."""
        return int(np.searchsorted(self.group_begin, group, side="right")) - 1

    def group_names(self, group: int) -> str:
        """Say which tensors a group holds, and of which part."""
        return f"{name_group(self.layout, self.groups[group])} of part {self.part_of(group)}"

    def places(self, part: int) -> list[tuple[int, Box]]:
        """Return the boxes of a part in order: index of the tensor, and its box in header elements."""
        found: list[tuple[int, Box]] = []
        for i in range(int(self.box_begin[part]), int(self.box_begin[part + 1])):
            t, begin, end = int(self.boxes.tensor[i]), int(self._begin[i]), int(self._end[i])
            full = tuple((0, extent) for extent in self.layout.shapes[t])
            if begin < 0:
                given = self._cuts[end][1:]
                found.append((t, tuple(zip(given[::2], given[1::2], strict=True))))
            else:
                found.append((t, ((begin, end), *full[1:]) if end else full))
        return found

    def ranges(self, boxes: I64, shape: I64, first: I64) -> tuple[I64, I64]:
        """Return begin and end of some boxes in every dimension of their tensors, in stored elements.

        shape: of their tensors in stored elements, (n, dimensions), missing dimensions first and 1; first: where each
        has its first dimension. A tensor that is never cut other than by rows may be given as one dimension.
        """
        begin, end = np.zeros_like(shape), shape.copy()
        axis = first[:, None]
        row = shape.prod(axis=1) // np.take_along_axis(shape, axis, 1)[:, 0]
        offset, stop = self.boxes.offset[boxes], self.boxes.offset[boxes] + self.boxes.count[boxes]
        np.put_along_axis(begin, axis, (offset // row)[:, None], 1)
        np.put_along_axis(end, axis, (stop // row)[:, None], 1)
        cut = np.flatnonzero(self._begin[boxes] < 0)
        if len(cut):
            wide = min(shape.shape[1], self._cut_ranges[0].shape[1])
            for out, of in zip((begin, end), self._cut_ranges, strict=True):
                out[cut] = np.arange(2)[int(out is end)]
                out[cut, -wide:] = of[self._end[boxes[cut]], -wide:]
        return begin, end

    @cached_property
    def pair(self) -> I64:
        """Of each box: tensor * parts + part."""
        return self.boxes.tensor * self.parts + self._part

    @cached_property
    def pairs(self) -> I64:
        """Sorted: every tensor * parts + part of which there is a box."""
        return np.unique(self.pair)


def _part_of(layout: Layout, boxes: Iterable[tuple[int, Box | None]]) -> _Part:
    """Sort boxes into the three kinds; the runs of whole tensors are joined by the encoding."""
    whole: list[int] = []
    rows: list[int] = []
    cuts: list[list[int]] = []
    shapes = layout.shapes
    for t, box in boxes:
        shape = shapes[t]
        if box is None:
            whole += (t, 1)
            continue
        if len(box) != len(shape):
            raise FormatError(f"tensor {layout.names[t]}: a box of {len(box)} dimensions, it has {len(shape)}")
        partial = [d for d, (cut, extent) in enumerate(zip(box, shape, strict=True)) if cut != (0, extent)]
        if not partial:
            whole += (t, 1)
        elif partial == [0]:
            rows += (t, *box[0])
        else:
            cuts.append([t, *itertools.chain.from_iterable(box)])
    return _Part(whole, rows, cuts)


def _table(parts: Sequence[list[int]], width: int, what: str) -> tuple[I64, I64]:
    """Return the number of the part and the numbers of each entry. Raises FormatError for a cut entry."""
    sizes = np.array([len(p) for p in parts], np.int64)
    if np.any(sizes % width):
        raise FormatError(f"partition: {what} of part {int(np.flatnonzero(sizes % width)[0])} end in half an entry")
    flat = np.fromiter(itertools.chain.from_iterable(parts), np.int64, int(sizes.sum()))
    return np.repeat(np.arange(len(parts), dtype=np.int64), sizes // width), flat.reshape(-1, width)


def _require(layout: Layout, good: npt.ArrayLike, tensor: I64, what: str) -> None:
    """Raise FormatError naming the first tensor for which something does not hold."""
    bad = np.flatnonzero(~np.asarray(good))
    if len(bad):
        t = int(tensor[bad[0]])
        name = layout.names[t] if 0 <= t < len(layout.names) else f"number {t} of {len(layout.names)}"
        raise FormatError(f"partition: tensor {name}: {what}")


@dataclass(frozen=True)
class _Runs:
    """Boxes whose elements lie side by side.

    offset, count: in stored elements; begin, end: rows, both 0 of a whole tensor.
    """

    part: I64
    tensor: I64
    offset: I64
    count: I64
    begin: I64
    end: I64

    def columns(self) -> tuple[I64, ...]:
        """The arrays, in order."""
        return self.part, self.tensor, self.offset, self.count, self.begin, self.end


def _whole(layout: Layout, parts: Sequence[_Part]) -> _Runs:
    """Return the whole tensors of all parts."""
    part, runs = _table([p.whole for p in parts], 2, "whole tensors")
    first, count = runs[:, 0], runs[:, 1]
    tensors = len(layout.names)
    _require(layout, (first + count <= tensors) & (count > 0), first, "a run of whole tensors is not in the layout")
    if int(count.sum()) > tensors:
        raise FormatError(f"partition: {int(count.sum())} whole tensors, the layout has {tensors}")
    tensor = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
    _require(layout, layout.count[tensor] > 0, tensor, "it has no elements, and is in no part")
    zero = np.zeros_like(tensor)
    return _Runs(np.repeat(part, count), tensor, zero, layout.count[tensor], zero, zero)


def _rows(layout: Layout, parts: Sequence[_Part]) -> _Runs:
    """Return the runs of rows of all parts."""
    part, rows = _table([p.rows for p in parts], 3, "rows")
    tensor, begin, end = rows[:, 0], rows[:, 1], rows[:, 2]
    _require(layout, tensor < len(layout.names), tensor, "a run of rows is not in the layout")
    extent = np.array([s[0] if s else 0 for s in layout.shapes], np.int64)[tensor]
    inside = (begin < end) & (end <= extent) & (layout.count[tensor] > 0)
    _require(layout, inside, tensor, "a run of rows is empty, or lies outside of it")
    _require(layout, (begin > 0) | (end < extent), tensor, "a run of all rows is the whole tensor")
    bits, unit = 8 * layout.nbytes[tensor] // extent, 8 * layout.width[tensor]
    cuts = (begin * bits % unit == 0) & (end * bits % unit == 0)
    _require(layout, cuts, tensor, "a run of rows does not begin and end with whole bytes")
    offset = begin * bits // unit
    return _Runs(part, tensor, offset, end * bits // unit - offset, begin, end)


class _Cuts:
    """Boxes that are cut in another dimension than the first, in stored elements.

    given: as encoded. begin, end, shape (n, dimensions): missing dimensions come first, as 0..1 of 1. offset,
    extent, stride: see Boxes.
    """

    def __init__(self, layout: Layout, parts: Sequence[_Part]) -> None:
        self.given = [box for p in parts for box in p.boxes]
        self.part = np.repeat(np.arange(len(parts), dtype=np.int64), [len(p.boxes) for p in parts])
        self.tensor = np.array([box[0] if box else len(layout.names) for box in self.given], np.int64)
        _require(layout, self.tensor < len(layout.names), self.tensor, "a box is not in the layout")
        dims = np.array([len(layout.shapes[t]) for t in self.tensor.tolist()], np.int64)
        sizes = np.array([len(box) for box in self.given], np.int64)
        _require(layout, sizes == 1 + 2 * dims, self.tensor, "a box has another number of dimensions")
        _require(layout, (dims > 1) & (dims <= MAX_DIMENSIONS), self.tensor, "it cannot be cut other than by rows")
        wide = int(dims.max(initial=1))
        ranges = np.zeros((len(self.given), wide, 2), np.int64)
        ranges[:, :, 1] = 1
        held = np.arange(wide) >= wide - dims[:, None]
        ranges[np.repeat(held, 2, axis=1).reshape(len(held), wide, 2)] = np.fromiter(
            itertools.chain.from_iterable(box[1:] for box in self.given), np.int64, int(2 * dims.sum())
        )
        shape = stored_shapes(layout, self.tensor, wide)
        header = np.ones((len(self.given), wide), np.int64)
        header[held] = np.fromiter(
            itertools.chain.from_iterable(layout.shapes[t] for t in self.tensor.tolist()), np.int64, int(dims.sum())
        )
        begin, end = ranges[:, :, 0], ranges[:, :, 1]
        inside = ((begin < end) & (end <= header)).all(axis=1)
        _require(layout, inside, self.tensor, "a box is empty, or lies outside of it")
        inner = np.arange(wide) > wide - dims[:, None]
        cut = ((begin > 0) | (end < header)) & inner
        _require(
            layout, cut.any(axis=1), self.tensor, "a box that is cut in its first dimension alone is a run of rows"
        )
        bits = np.array([BITS[layout.dtypes[t]] for t in self.tensor.tolist()], np.int64)
        units = 8 * layout.width[self.tensor]
        bytes_ = [(x[:, -1] * bits % units == 0) for x in (begin, end, header)]
        _require(layout, bytes_[0] & bytes_[1] & bytes_[2], self.tensor, "a box is not cut between whole bytes")
        begin[:, -1] = begin[:, -1] * bits // units
        end[:, -1] = end[:, -1] * bits // units
        self.begin, self.end, self.shape = begin, end, shape
        self.offset, self.extent, self.stride = join_levels(begin, end, shape)


def stored_shapes(layout: Layout, tensor: I64, wide: int) -> I64:
    """Return shapes in stored elements, (n, wide), missing dimensions first and 1.

    Meant for tensors whose last dimension fills whole bytes.
    """
    shapes = np.ones((len(tensor), wide), np.int64)
    for i, t in enumerate(tensor.tolist()):
        shape = layout.shapes[t]
        if shape:
            shapes[i, wide - len(shape) :] = shape
            shapes[i, -1] = shape[-1] * BITS[layout.dtypes[t]] // (8 * int(layout.width[t]))
    return shapes


def join_levels(begin: I64, end: I64, shape: I64) -> tuple[I64, I64, I64]:
    """Return offset, extent and stride of boxes given by ranges, (n, dimensions); see Boxes.

    A dimension that a box fills is joined with the one before it; levels that no box needs are left out.
    """
    extent = end - begin
    stride = np.ones_like(shape)
    stride[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    offset = (begin * stride).sum(axis=1)
    for level in range(1, shape.shape[1]):
        full = extent[:, level] == shape[:, level]
        extent[full, level] *= extent[full, level - 1]
        extent[full, level - 1] = 1
    order = np.argsort(extent > 1, axis=1, kind="stable")
    extent, stride = np.take_along_axis(extent, order, 1), np.take_along_axis(stride, order, 1)
    levels = max(1, int((extent > 1).sum(axis=1).max(initial=1)))
    return offset, extent[:, -levels:], stride[:, -levels:]


def _require_cover(layout: Layout, runs: _Runs, cuts: _Cuts) -> None:
    """Raise FormatError unless the boxes hold every element of every tensor exactly once."""
    is_cut = np.zeros(len(layout.names), bool)
    is_cut[cuts.tensor] = True
    mine, own = np.flatnonzero(~is_cut[runs.tensor]), np.flatnonzero(~is_cut & (layout.count > 0))
    begin, count = runs.offset[mine][:, None], runs.count[mine][:, None]
    _require_corners(layout, runs.tensor[mine], begin, begin + count, own, layout.count[own][:, None])
    mine, own = np.flatnonzero(is_cut[runs.tensor]), np.flatnonzero(is_cut)
    tensor, wide = runs.tensor[mine], cuts.shape.shape[1]
    # Rows of such a tensor are boxes too: they begin and end in its first dimension.
    shape = stored_shapes(layout, tensor, wide)
    low, high = np.zeros_like(shape), shape.copy()
    first = wide - np.array([len(layout.shapes[t]) for t in tensor.tolist()], np.int64)[:, None]
    row = shape.prod(axis=1) // np.take_along_axis(shape, first, 1)[:, 0]
    np.put_along_axis(low, first, (runs.offset[mine] // row)[:, None], 1)
    np.put_along_axis(high, first, ((runs.offset[mine] + runs.count[mine]) // row)[:, None], 1)
    _require_corners(
        layout,
        np.concatenate((tensor, cuts.tensor)),
        np.concatenate((low, cuts.begin)),
        np.concatenate((high, cuts.end)),
        own,
        stored_shapes(layout, own, wide),
    )


def _require_corners(layout: Layout, tensor: I64, begin: I64, end: I64, own: I64, shape: I64) -> None:
    """Raise FormatError unless boxes, (n, dimensions), of the tensors `own`, of these shapes, cover each exactly once.

    The sum of the indicators of boxes has, as its mixed difference, each box's corners with alternating signs. It is
    the indicator of the tensor if and only if these cancel out but for the tensor's own corners.
    """
    place = np.zeros(len(layout.names), np.int64)
    place[own] = np.arange(len(own))
    strides = np.ones_like(shape)
    strides[:, :-1] = np.cumprod((shape + 1)[:, :0:-1], axis=1)[:, ::-1]
    owner = np.concatenate((place[tensor], np.arange(len(own))))
    low, high = np.concatenate((begin, np.zeros_like(shape))), np.concatenate((end, shape))
    weight = np.repeat((1, -1), (len(tensor), len(own)))
    corners, signs = [], []
    for chosen in itertools.product((False, True), repeat=shape.shape[1]):
        corners.append((np.where(chosen, high, low) * strides[owner]).sum(axis=1))
        signs.append(weight * (-1) ** sum(chosen))
    at, owners = np.concatenate(corners), np.tile(owner, len(corners))
    order = np.lexsort((at, owners))
    at, owners, sign = at[order], owners[order], np.concatenate(signs)[order]
    if not len(at):
        return
    first = np.flatnonzero((np.diff(at, prepend=-1) != 0) | (np.diff(owners, prepend=-1) != 0))
    wrong = first[np.add.reduceat(sign, first) != 0]
    if len(wrong):
        t = int(own[owners[wrong[0]]])
        held = int((end - begin)[tensor == t].prod(axis=1).sum())
        raise FormatError(
            f"partition: tensor {layout.names[t]}: parts hold {held} of its {int(layout.count[t])} elements, "
            "or some of them twice; each must be in exactly one part"
        )
