"""Live memory through a scatter plan: read and written as whole tensors, and the changes of deltas mapped to it.

Only addresses: whose memory it is, and when it may be written, is the caller's business (`planned`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from deltackpt.backend import READ, Staged, apply, in_order
from deltackpt.digest import U64, contribution
from deltackpt.errors import IntegrityError
from deltackpt.kernels import U8, Columns, fingerprint, in_tensors, positions, use_jit, view
from deltackpt.layout import I64, TILE, Segments
from deltackpt.places import last_at
from deltackpt.plans import ScatterPlan
from deltackpt.reader import Delta

Elements: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_PIECE = 64 << 20
"""Bytes of weights that are read through a plan at once."""


# ---------------------------------------------------------------- flips


@dataclass(frozen=True)
class Flips:
    """Changes of live memory. added: to the fingerprint of each checkpoint tensor, by what is here of it; live: to that
    of each live tensor; read_ms: how long reading the places took.
    """

    staged: Sequence[Staged]
    added: U64
    live: U64
    read_ms: float


def changes(plan: ScatterPlan, delta: Delta, threads: int | None) -> Iterator[tuple[int, tuple[I64, U64]]]:
    """Yield each group's number, and its changes: elements of the checkpoint, counted through, and flips."""
    numbering = plan.source_numbering
    for staged in delta.staged(threads=threads):
        segments = delta.tiling.groups[staged.group]
        at, values = positions(segments, staged.columns)
        at, values = at[values != 0], values[values != 0]
        if segments.boxes is None:
            yield staged.group, (at + numbering.of_group[staged.group], values)
            continue
        # A group of a part has elements of any groups of the layout, in an order of its own.
        tensor, element = in_tensors(segments, at)
        elements = numbering.of_tensor[tensor] + element
        order = np.argsort(elements)
        elements, values = elements[order], values[order]
        cuts = np.searchsorted(elements, numbering.of_group)
        for group in np.flatnonzero(np.diff(cuts)).tolist():
            mine = slice(int(cuts[group]), int(cuts[group + 1]))
            yield group, (elements[mine], values[mine])


def merged(changes: Sequence[tuple[I64, U64]]) -> tuple[I64, U64]:
    """Join the changes of several deltas to one group: flips of one element meet."""
    if len(changes) == 1:
        return changes[0]
    elements, values = (np.concatenate(c) for c in zip(*changes, strict=True))
    order = np.argsort(elements, kind="stable")
    elements, values = elements[order], values[order]
    first = np.flatnonzero(np.diff(elements, prepend=-1))
    values = np.bitwise_xor.reduceat(values, first)
    return elements[first][values != 0], values[values != 0]


def flips_of(plan: ScatterPlan, groups: Sequence[tuple[I64, U64]], addresses: U64, threads: int | None) -> Flips:
    """Map changes to live memory, and read there what they will do."""
    staged: list[Staged] = []
    added = np.zeros(len(plan.layout.names), np.uint64)
    live_added = np.zeros(len(plan.live.names), np.uint64)
    read_ms = 0.0
    for width in (1, 2, 4, 8):
        mine = [g for g in groups if len(g[0]) and plan.layout.width[plan.source_numbering.owner(g[0][:1])[0]] == width]
        if not mine:
            continue
        elements, values = (np.concatenate(c) for c in zip(*mine, strict=True))
        found = [one.find(elements) for one in plan.maps]
        which = np.concatenate([w for w, _ in found])
        live = np.concatenate([at for _, at in found])
        copies = np.repeat(np.arange(len(found)), [len(w) for w, _ in found])
        if not (live[1:] > live[:-1]).all():
            order = np.argsort(live, kind="stable")
            which, live, copies = which[order], live[order], copies[order]
        here = list(_columns(plan, live, values[which]))
        began = time.perf_counter()
        reading = [
            Staged(s.group, Columns(s.columns.counts, s.columns.gaps, s.columns.values.copy(), s.columns.dense))
            for s in here
        ]
        live_added += apply(plan.live, reading, addresses, mode=READ, threads=threads)
        read_ms += (time.perf_counter() - began) * 1e3
        new = np.concatenate([_elements(s.columns.values) for s in reading]) if reading else np.empty(0, np.uint64)
        old = new ^ values[which]
        added += _added(plan, width, elements, which, copies, old, new)
        staged += here
    return Flips(staged, added, live_added, read_ms)


def _columns(plan: ScatterPlan, live: I64, values: U64) -> Iterator[Staged]:
    """Lay changes of live elements, sorted, out as columns of the live layout's groups."""
    bounds = np.searchsorted(live, plan.live_numbering.of_group)
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        part = slice(bounds[number], bounds[number + 1])
        group = plan.live.groups[number]
        at = live[part] - plan.live_numbering.of_group[number]
        begin = np.cumsum(group.count) - group.count
        row = last_at(begin, at)
        inside = at - begin[row]
        per = -(-group.count // TILE)
        tile = (np.cumsum(per) - per)[row] + inside // TILE
        place = inside % TILE
        gap = np.where(np.diff(tile, prepend=-1) != 0, place, np.diff(place, prepend=0) - 1)
        counts = np.bincount(tile, minlength=group.tiles).astype(np.uint16)
        nothing = np.empty((group.width, 0), np.uint8)
        yield Staged(
            number, Columns(counts, _planes(gap.astype(np.uint64), 2), _planes(values[part], group.width), nothing)
        )


def _planes(values: U64, width: int) -> U8:
    return np.ascontiguousarray(values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T)


def _elements(planes: U8) -> U64:
    """Undo `_planes`."""
    wide = np.zeros((planes.shape[1], 8), np.uint8)
    wide[:, : len(planes)] = planes.T
    return wide.view("<u8").reshape(-1)


def _added(plan: ScatterPlan, width: int, elements: I64, which: I64, copies: I64, old: U64, new: U64) -> U64:
    """Return what the changes add to the fingerprints of the checkpoint's tensors. Raises IntegrityError for copies
    of one element that are not equal.
    """
    numbering = plan.source_numbering
    before, after = np.zeros(len(elements), np.uint64), np.zeros(len(elements), np.uint64)
    first = copies == 0
    before[which[first]], after[which[first]] = old[first], new[first]
    if (odd := np.flatnonzero(before[which] != old)).size:
        name = plan.layout.names[int(numbering.owner(elements[which[odd[:1]]])[0])]
        raise IntegrityError(f"copies of {name} in the module are not equal; nothing was written; reseed")
    place = last_at(numbering.first, elements)
    inside = (elements - numbering.first[place]).astype(np.uint64)
    if width == 8:
        terms = contribution(width, inside, after) - contribution(width, inside, before)
    else:
        terms = contribution(width, inside, after - before)
    total = np.zeros(len(plan.layout.names), np.uint64)
    if len(terms):
        begin = np.flatnonzero(np.diff(place, prepend=-1))
        total[numbering.order[place[begin]]] = np.add.reduceat(terms, begin)
    return total


# ---------------------------------------------------------------- whole tensors


def _batches(plan: ScatterPlan, nbytes: int) -> Iterator[I64]:
    """Yield the tensors that are here, in part or whole, in pieces of one width and about `nbytes`."""
    layout = plan.layout
    order = plan.source_numbering.order
    order = order[plan.landed[order] > 0]
    for width in (1, 2, 4, 8):
        mine = order[layout.width[order] == width]
        if len(mine):
            piece = np.cumsum(layout.nbytes[mine]) // nbytes
            yield from np.split(mine, np.flatnonzero(np.diff(piece)) + 1)


def read_through(plan: ScatterPlan, addresses: U64, *, against: U64 | None = None, threads: int | None = None) -> U64:
    """Return the fingerprint of what is here of each checkpoint tensor: a full pass over live memory.

    against: addresses of contiguous tensors that must have the same values. Raises IntegrityError, naming the tensor,
    where they have not, or where copies of one element are not equal.
    """
    jit = use_jit(plan.layout)

    def work(tensors: I64) -> tuple[I64, U64]:
        width = int(plan.layout.width[tensors[0]])
        count = plan.layout.count[tensors]
        begin = np.cumsum(count) - count
        scratch = np.zeros(int(count.sum()), f"<u{width}")
        for t, at, n in zip(tensors.tolist(), begin.tolist(), count.tolist(), strict=True):
            here = scratch[at : at + n]
            _move(plan, 0, t, here, addresses, write=False)
            _require_equal(plan, t, here, addresses, None if against is None else view(against[t], n * width))
        where = np.uint64(scratch.__array_interface__["data"][0]) + (begin * width).astype(np.uint64)
        return tensors, fingerprint(Segments(width, tensors, np.zeros_like(count), count), where, jit=jit)

    table = np.zeros(len(plan.layout.names), np.uint64)
    for tensors, sums in in_order(work, _batches(plan, _PIECE), threads):
        table[tensors] = sums
    return table


def _require_equal(plan: ScatterPlan, tensor: int, here: Elements, addresses: U64, given: U8 | None) -> None:
    """Raise IntegrityError unless copies, and the values that are given, equal what was read of a tensor."""
    name = plan.layout.names[tensor]
    for number in range(1, len(plan.maps)):
        copy = here.copy()
        _move(plan, number, tensor, copy, addresses, write=False)
        if not np.array_equal(copy, here):
            raise IntegrityError(f"copies of {name} in the module are not equal; load it again")
    if given is None:
        return
    expected = given.view(here.dtype)
    if not plan.whole[tensor]:
        landed = plan.maps[0].expand(_boxes(plan, 0, tensor))[0] - plan.source_numbering.of_tensor[tensor]
        here, expected = here[landed], expected[landed]
    if not np.array_equal(here, expected):
        raise IntegrityError(
            f"{name}, read through the plan, is not what was loaded: the engine's start-up load lays it out in another "
            "way than the load that the plan was made with; use the engine's own reload"
        )


def write_through(plan: ScatterPlan, addresses: U64, where: U64, *, threads: int | None = None) -> None:
    """Write contiguous tensors, at the addresses `where`, to all their places in live memory."""

    def work(tensors: I64) -> None:
        for t in tensors.tolist():
            given = view(where[t], int(plan.layout.nbytes[t])).view(f"<u{plan.layout.width[t]}")
            for number in range(len(plan.maps)):
                _move(plan, number, t, given, addresses, write=True)

    for _ in in_order(work, _batches(plan, _PIECE), threads):
        pass


_MANY = 64
"""Boxes of a tensor from which on it is quicker to go by a list of elements."""


def _boxes(plan: ScatterPlan, number: int, tensor: int) -> slice:
    """Return the boxes of a map that lie in a tensor."""
    first = plan.source_numbering.of_tensor[tensor]
    return slice(*np.searchsorted(plan.maps[number].source, [first, first + plan.layout.count[tensor]]).tolist())


def _move(plan: ScatterPlan, number: int, tensor: int, elements: Elements, addresses: U64, *, write: bool) -> None:
    """Copy a tensor's elements from their places in live memory, or to them."""
    one, boxes = plan.maps[number], _boxes(plan, number, tensor)
    first, width = int(plan.source_numbering.of_tensor[tensor]), elements.itemsize
    numbering = plan.live_numbering
    rows = numbering.owner(one.live[boxes])
    if boxes.stop - boxes.start > _MANY:
        source, live = one.expand(boxes)
        owner = numbering.owner(live)
        for row in np.unique(rows).tolist():
            mine = owner == row
            at, place = source[mine] - first, live[mine] - numbering.of_tensor[row]
            memory = view(addresses[row], int(plan.live.nbytes[row])).view(elements.dtype)
            if write:
                memory[place] = elements[at]
            else:
                elements[at] = memory[place]
        return
    begin = int(elements.__array_interface__["data"][0])
    for source, live, kind, row in zip(
        one.source[boxes].tolist(), one.live[boxes].tolist(), one.kind[boxes].tolist(), rows.tolist(), strict=True
    ):
        extent, step, live_step = one.shapes[kind].T.tolist()
        here = _strided(begin + (source - first) * width, elements.dtype, extent, step)
        place = int(addresses[row]) + (live - int(numbering.of_tensor[row])) * width
        there = _strided(place, elements.dtype, extent, live_step)
        if write:
            there[...] = here
        else:
            here[...] = there


def _strided(address: int, dtype: np.dtype[np.unsignedinteger[Any]], extent: list[int], step: list[int]) -> Elements:
    base = view(address, dtype.itemsize).view(dtype)
    strides = [s * dtype.itemsize if n > 1 else 0 for n, s in zip(extent, step, strict=True)]
    return np.lib.stride_tricks.as_strided(base, extent, strides)
