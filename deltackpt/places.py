"""Places: where elements of a checkpoint are in live memory, as strided boxes. Pure.

Elements of a layout are counted through: its tensors by width, then in layout order, which is the order of its groups.
A place map sends elements of a checkpoint layout to elements of a live layout. It is made of boxes: nested
strides from a first source element to a first live one. Boxes of one map do not overlap in the source, nor interleave:
each begins after the one before has ended. Every box lies in one tensor on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from deltackpt.errors import FormatError
from deltackpt.layout import I64, Layout

Mask: TypeAlias = npt.NDArray[np.bool_]

_FAR = 1 << 62
_FEW = 4
"""A pair of runs is worth a box of its own only if that many pairs are alike."""


class Numbering:
    """The elements of a layout, counted through. order: tensors by width; first: of each in that order, and the end."""

    def __init__(self, layout: Layout) -> None:
        self.order = np.argsort(layout.width, kind="stable").astype(np.int64)
        self.first: I64 = np.concatenate(([0], np.cumsum(layout.count[self.order]))).astype(np.int64)
        self.of_tensor = np.empty(len(layout.names), np.int64)
        """First element of each tensor, by its index in the layout."""
        self.of_tensor[self.order] = self.first[:-1]
        sizes = [int(g.count.sum()) for g in layout.groups]
        self.of_group: I64 = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        """First element of each group, and the end."""

    def owner(self, elements: I64) -> I64:
        """Return the tensor to which each element belongs, by its index in the layout."""
        tensors: I64 = self.order[np.searchsorted(self.first, elements, side="right") - 1]
        return tensors


@dataclass(frozen=True)
class PlaceMap:
    """Boxes, sorted. source, live: first element of each; kind: its shape, a row of `shapes`.

    shapes: (kinds, depth, 3): of each dimension, outermost first, its extent, source step and live step.
    """

    source: I64
    live: I64
    kind: I64
    shapes: I64

    @cached_property
    def extent(self) -> I64:
        """Elements of each box."""
        per: I64 = np.prod(self.shapes[:, :, 0], axis=1)
        return per[self.kind]

    @property
    def elements(self) -> int:
        """Elements of all boxes."""
        return int(self.extent.sum())

    def find(self, elements: I64) -> tuple[I64, I64]:
        """Return which of these source elements have a place (indices), and their live elements."""
        if not len(self.source) or not len(elements):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        box = np.searchsorted(self.source, elements, side="right") - 1
        rest = elements - self.source[box]
        good = box >= 0
        live, kind = self.live[box].copy(), self.kind[box]
        for dim in range(self.shapes.shape[1]):
            extent, step, live_step = self.shapes[:, dim, :].T
            if (extent == 1).all():
                continue
            at = rest // step[kind]
            good &= at < extent[kind]
            rest -= at * step[kind]
            live += at * live_step[kind]
        good &= rest == 0
        which = np.flatnonzero(good)
        return which, live[which]

    def expand(self, boxes: slice = slice(None)) -> tuple[I64, I64]:
        """Return all source elements of boxes, and the live element of each."""
        sources, lives = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        kinds = self.kind[boxes]
        for kind in np.unique(kinds):
            mine = np.flatnonzero(kinds == kind)
            source, live = self.source[boxes][mine, None], self.live[boxes][mine, None]
            for extent, step, live_step in self.shapes[kind].tolist():
                if extent > 1:
                    at = np.arange(extent)
                    source = (source[:, :, None] + at * step).reshape(len(mine), -1)
                    live = (live[:, :, None] + at * live_step).reshape(len(mine), -1)
            sources.append(source.reshape(-1))
            lives.append(live.reshape(-1))
        return np.concatenate(sources), np.concatenate(lives)

    def require_inside(self, source: Numbering, live: Numbering) -> None:
        """Raise FormatError unless boxes are in order, each inside one tensor on both sides."""
        dims = self.shapes
        shaped = dims.ndim == 3 and dims.shape[2] == 3 and (dims[:, :, 0] >= 1).all() and (dims[:, :, 1] >= 1).all()
        equal = len({len(self.source), len(self.live), len(self.kind)}) == 1
        if not shaped or not equal or not ((self.kind >= 0) & (self.kind < len(dims))).all():
            raise FormatError("a place map has boxes without a shape")
        reach = (dims[:, :, 0] - 1) * np.where(dims[:, :, 0] > 1, dims[:, :, 1], 0)
        live_reach = (dims[:, :, 0] - 1) * dims[:, :, 2]
        end = self.source + reach.sum(axis=1)[self.kind]
        low = self.live + np.minimum(live_reach, 0).sum(axis=1)[self.kind]
        high = self.live + np.maximum(live_reach, 0).sum(axis=1)[self.kind]
        for begin, last, numbering in ((self.source, end, source), (low, high, live)):
            inside = (begin >= 0) & (last < numbering.first[-1])
            if not inside.all() or (numbering.owner(begin) != numbering.owner(last)).any():
                raise FormatError("a place map has a box outside its tensor")
        inner = np.flip(np.cumsum(np.flip(reach, axis=1), axis=1), axis=1)
        nested = (dims[:, :-1, 1] > inner[:, 1:]) | (dims[:, :-1, 0] == 1)
        if (self.source[1:] <= end[:-1]).any() or not nested.all():
            raise FormatError("a place map has boxes that overlap")


def compress(source: I64, live: I64, count: I64, tensor: I64, row: I64) -> list[PlaceMap]:
    """Return place maps for runs: `count` consecutive source elements that are consecutive in live memory too.

    The first map has a place for every source element that has any; the others further copies. tensor, row: where each
    run lies, in the checkpoint and in the live layout; runs lie in one of each.
    """
    order = np.argsort(source, kind="stable")
    source, live, count, tensor, row = (a[order] for a in (source, live, count, tensor, row))
    if (source[1:] < np.maximum.accumulate(source + count)[:-1]).any():
        source, live, count, tensor, row = _cut(source, live, count, tensor, row)
    # Runs of equal source are equal in length now: copies of the same elements.
    new = np.concatenate(([True], source[1:] != source[:-1])) if len(source) else np.empty(0, bool)
    begin = np.maximum.accumulate(np.where(new, np.arange(len(source)), 0)) if len(source) else source
    copy = np.arange(len(source)) - begin
    return [
        _boxes(*(a[copy == n] for a in (source, live, count, tensor, row))) for n in range(int(copy.max(initial=0)) + 1)
    ]


def _cut(source: I64, live: I64, count: I64, tensor: I64, row: I64) -> tuple[I64, I64, I64, I64, I64]:
    """Cut runs wherever one of them begins or ends, and sort them."""
    marks = np.unique(np.concatenate((source, source + count)))
    low, high = np.searchsorted(marks, source), np.searchsorted(marks, source + count)
    pieces = high - low
    run = np.repeat(np.arange(len(source)), pieces)
    mark = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + np.repeat(low, pieces)
    begin = marks[mark]
    order = np.argsort(begin, kind="stable")
    cut = (begin, live[run] + begin - source[run], marks[mark + 1] - begin, tensor[run], row[run])
    source, live, count, tensor, row = (a[order] for a in cut)
    return source, live, count, tensor, row


def _boxes(source: I64, live: I64, count: I64, tensor: I64, row: I64) -> PlaceMap:
    """Fold runs that follow each other in equal steps, again and again."""
    lengths, kind = np.unique(count, return_inverse=True)
    shapes = np.stack((lengths, np.ones_like(lengths), np.ones_like(lengths)), axis=1)[:, None, :]
    shapes[lengths == 1, 0, 1:] = [_FAR, 0]
    kind = kind.astype(np.int64)
    while len(source) > 1:
        starts, size, step, live_step = _fold(source, live, kind, tensor, row)
        if len(starts) == len(source):
            break
        rows = np.stack((kind[starts], size, step, live_step), axis=1)
        unique, folded = np.unique(rows, axis=0, return_inverse=True)
        outer = unique[:, None, 1:]
        shapes = np.concatenate((outer, shapes[unique[:, 0]]), axis=1)
        kind, source, live = folded.reshape(-1).astype(np.int64), source[starts], live[starts]
        tensor, row = tensor[starts], row[starts]
    return PlaceMap(source, live, kind, _tight(shapes))


def _fold(source: I64, live: I64, kind: I64, tensor: I64, row: I64) -> tuple[I64, I64, I64, I64]:
    """Return the first boxes of series of alike boxes in equal steps, how many each has, and the two steps."""
    alike = (np.diff(kind) == 0) & (np.diff(tensor) == 0) & (np.diff(row) == 0)
    step, live_step = np.diff(source), np.diff(live)
    steady = np.zeros(len(source), bool)
    steady[2:] = alike[1:] & alike[:-1] & (np.diff(step) == 0) & (np.diff(live_step) == 0)
    hard = np.concatenate(([True], ~alike))
    start = _starts(hard, ~hard & ~steady)
    starts, size = _series(start)
    pair = size == 2
    if pair.any():
        # A pair here and a pair there are no pattern: each would be a shape of its own.
        at = starts[pair]
        keys = np.stack((kind[at], step[at], live_step[at]), axis=1)
        _, which, often = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        start[at[often[which.reshape(-1)] < _FEW] + 1] = True
        starts, size = _series(start)
    last = np.minimum(starts, max(0, len(step) - 1))
    alone = size == 1
    return starts, size, np.where(alone, _FAR, step[last]), np.where(alone, 0, live_step[last])


def _starts(hard: Mask, soft: Mask) -> Mask:
    """Return where series begin: where they must, and where the step changes unless one has just begun."""
    here = np.arange(len(hard))
    before = np.maximum.accumulate(np.where(soft, 0, here))  # the last place where the step did not change
    odd = (here - before) % 2 == 1
    begun: Mask = hard | (soft & (odd != hard[before]))
    return begun


def _series(start: Mask) -> tuple[I64, I64]:
    starts = np.flatnonzero(start)
    return starts, np.diff(np.append(starts, len(start)))


def _tight(shapes: I64) -> I64:
    """Move dimensions of extent 1 out of the way and drop those that no shape has."""
    unit = shapes[:, :, 0] == 1
    order = np.argsort(~unit, axis=1, kind="stable")
    shapes = np.take_along_axis(shapes, order[:, :, None], axis=1)
    used = int((shapes[:, :, 0] > 1).sum(axis=1).max(initial=1))
    return np.ascontiguousarray(shapes[:, shapes.shape[1] - max(1, used) :])


def runs_of(elements: I64, live: I64, numbering: Numbering, row: int) -> tuple[I64, I64, I64, I64, I64]:
    """Return the runs in one live row: source, live, count, tensor, row. elements: of consecutive live ones, sorted."""
    cut = np.flatnonzero((np.diff(elements) != 1) | (np.diff(live) != 1)) + 1
    begin = np.concatenate(([0], cut))
    source, count = elements[begin], np.diff(np.append(begin, len(elements)))
    # Tensors lie back to back: a run may go on from one to the next.
    at = np.searchsorted(numbering.first, source, side="right")
    pieces = np.searchsorted(numbering.first, source + count - 1, side="right") - at + 1
    run = np.repeat(np.arange(len(source)), pieces)
    piece = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    low = np.maximum(source[run], numbering.first[at[run] - 1 + piece])
    high = np.minimum((source + count)[run], numbering.first[at[run] + piece])
    run, low, high = (a[high > low] for a in (run, low, high))
    live = live[begin][run] + low - source[run]
    return low, live, high - low, numbering.owner(low), np.full(len(low), row, np.int64)
