"""Places: where elements of a checkpoint are in live memory, as strided boxes. Pure.

Elements of a layout are counted through: its tensors by width, then in layout order, which is the order of its groups.
A place map sends elements of a checkpoint layout to elements of a live layout. It is made of boxes: nested
strides from a first source element to a first live one. Boxes of one map do not overlap in the source, nor interleave:
each begins after the one before has ended. Every box lies in one tensor on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
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


def last_at(bounds: I64, elements: I64) -> I64:
    """Return for each element which bound is the last at or before it; -1 where none is. Both are sorted."""
    if not len(elements):
        return np.empty(0, np.int64)
    low, high = np.searchsorted(bounds, elements[[0, -1]], side="right").tolist()
    bounds = bounds[low:high]  # the others are before the first element, or after the last one
    if len(bounds) > len(elements):
        last: I64 = np.searchsorted(bounds, elements, side="right") + (low - 1)
        return last
    cuts = np.searchsorted(elements, bounds)
    return np.repeat(np.arange(low - 1, high), np.diff(cuts, prepend=0, append=len(elements)))


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
        """Return which of these source elements, sorted, have a place (indices), and their live elements."""
        if not len(self.source) or not len(elements):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        box = last_at(self.source, elements)
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
        return which, live if len(which) == len(live) else live[which]

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


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive source elements that are `step` apart in live memory; each in one tensor on both sides.

    source, live: first element of each; tensor: of the checkpoint; row: of the live layout.
    """

    source: I64
    live: I64
    count: I64
    step: I64
    tensor: I64
    row: I64

    def take(self, which: I64 | Mask) -> Runs:
        """Return some of them."""
        return Runs(*(a[which] for a in vars(self).values()))

    def moved(self, numbering: Numbering, row: int) -> Runs:
        """Return runs in a live row that is alone as runs in that row of a live layout."""
        return replace(self, live=self.live + numbering.of_tensor[row], row=np.full_like(self.row, row))

    @staticmethod
    def join(runs: Sequence[Runs]) -> Runs:
        """Return all of them."""
        nothing = np.empty(0, np.int64)
        return Runs(*(np.concatenate([nothing, *(getattr(r, f.name) for r in runs)]) for f in fields(Runs)))


def runs_of(elements: I64, live: I64, first: I64) -> Runs:
    """Return the runs in one live row. elements: of the checkpoint, where each is: `live`, sorted.

    first: the first element of each tensor, and the end; the tensors of the runs are counted in this order.
    """
    if not len(elements):
        return Runs.join([])
    if not (rises := bool((elements[1:] > elements[:-1]).all())):
        order = np.argsort(elements, kind="stable")
        if rises := bool((np.diff(elements[order]) > 0).all()):
            elements, live = elements[order], live[order]
    hard = np.concatenate(([True], np.diff(elements) != 1))
    if rises:
        inside = slice(*np.searchsorted(first, elements[[0, -1]], side="right").tolist())
        hard[np.searchsorted(elements, first[inside])] = True
    else:
        # Several copies, which would take turns if they were sorted; they are cut as they lie in live memory.
        hard[1:] |= np.diff(np.searchsorted(first, elements, side="right")) != 0
    step = np.diff(live)
    starts, count = _series(hard, np.zeros_like(elements), step)
    steps = np.ones_like(starts)
    steps[count > 1] = step[starts[count > 1]]
    tensor = np.searchsorted(first, elements[starts], side="right") - 1
    return Runs(elements[starts], live[starts], count, steps, tensor, np.zeros_like(starts))


def compress(runs: Runs) -> list[PlaceMap]:
    """Return place maps for runs.

    The first map has a place for every source element that has any; the others further copies.
    """
    runs = runs.take(np.argsort(runs.source, kind="stable"))
    if (runs.source[1:] < np.maximum.accumulate(runs.source + runs.count)[:-1]).any():
        runs = _cut(runs)
    # Runs of equal source are equal in length now: copies of the same elements.
    new = np.diff(runs.source, prepend=-1) != 0
    copy = np.arange(len(new)) - np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    return [_boxes(runs.take(copy == n)) for n in range(int(copy.max(initial=0)) + 1)]


def _cut(runs: Runs) -> Runs:
    """Cut runs wherever one of them begins or ends, and sort them."""
    marks = np.unique(np.concatenate((runs.source, runs.source + runs.count)))
    low = np.searchsorted(marks, runs.source)
    pieces = np.searchsorted(marks, runs.source + runs.count) - low
    run = np.repeat(np.arange(len(pieces)), pieces)
    mark = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces) + low[run]
    begin, old = marks[mark], runs.take(run)
    live = old.live + (begin - old.source) * old.step
    cut = Runs(begin, live, marks[mark + 1] - begin, old.step, old.tensor, old.row)
    return cut.take(np.argsort(begin, kind="stable"))


def _boxes(runs: Runs) -> PlaceMap:
    """Fold runs that follow each other in equal steps, again and again."""
    forms, kind = _kinds(runs.count, runs.step)
    shapes = np.stack((forms[:, 0], np.where(forms[:, 0] > 1, 1, _FAR), forms[:, 1]), axis=1)[:, None, :]
    source, live, tensor, row = runs.source, runs.live, runs.tensor, runs.row
    while len(source) > 1:
        step, live_step = np.diff(source), np.diff(live)
        alike = (np.diff(kind) == 0) & (np.diff(tensor) == 0) & (np.diff(row) == 0)
        starts, size = _series(np.concatenate(([True], ~alike)), kind, step, live_step)
        if len(starts) == len(source):
            break
        last, alone = np.minimum(starts, len(step) - 1), size == 1
        steps = np.where(alone, _FAR, step[last]), np.where(alone, 0, live_step[last])
        forms, folded = _kinds(kind[starts], size, *steps)
        shapes = np.concatenate((forms[:, None, 1:], shapes[forms[:, 0]]), axis=1)
        kind, source, live, tensor, row = folded, source[starts], live[starts], tensor[starts], row[starts]
    return PlaceMap(source, live, kind, _tight(shapes))


def _kinds(*columns: I64) -> tuple[I64, I64]:
    """Return the different rows, and which of them each row is."""
    forms, kind = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return forms, kind.reshape(-1).astype(np.int64)


def _series(hard: Mask, kind: I64, *steps: I64) -> tuple[I64, I64]:
    """Return where series of equal steps begin, and how long they are. hard: where one must begin, as at 0."""
    soft = np.ones(len(hard), bool)
    soft[2:] = hard[1:-1]
    for step in steps:
        soft[2:] |= step[1:] != step[:-1]
    soft &= ~hard
    at = _starts(hard, soft)
    size = np.diff(np.append(at, len(hard)))
    if (pair := size == 2).any():
        # A pair here and a pair there are no pattern: each would be a shape of its own.
        first = at[pair]
        _, which = _kinds(kind[first], *(s[first] for s in steps))
        at = np.sort(np.concatenate((at, first[np.bincount(which)[which] < _FEW] + 1)))
        size = np.diff(np.append(at, len(hard)))
    return at, size


def _starts(hard: Mask, soft: Mask) -> I64:
    """Return where series begin: where they must, and where the step changes unless one has just begun."""
    changes = np.flatnonzero(soft)
    first = np.diff(changes, prepend=-1) != 1
    before = (changes[first] - 1)[np.cumsum(first) - 1]  # the last place where the step did not change
    odd = (changes - before) % 2 == 1
    return np.sort(np.concatenate((np.flatnonzero(hard), changes[odd != hard[before]])))


def _tight(shapes: I64) -> I64:
    """Move dimensions of extent 1 out of the way and drop those that no shape has."""
    unit = shapes[:, :, 0] == 1
    order = np.argsort(~unit, axis=1, kind="stable")
    shapes = np.take_along_axis(shapes, order[:, :, None], axis=1)
    used = int((shapes[:, :, 0] > 1).sum(axis=1).max(initial=1))
    return np.ascontiguousarray(shapes[:, shapes.shape[1] - max(1, used) :])
