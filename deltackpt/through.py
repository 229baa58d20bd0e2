"""Live memory through a scatter plan: read and written as whole tensors, and changes of a checkpoint mapped to it.

Whose memory it is, and when it may be written, is the caller's business (`module`). Needs numpy alone, and torch for
memory of other devices than the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deltackpt.changes import Changes, Flips
from deltackpt.digest import U64, contribution
from deltackpt.errors import ConfigError, IntegrityError
from deltackpt.kernels import U8, fingerprint, use_jit, view
from deltackpt.layout import I64, Segments
from deltackpt.live import Region
from deltackpt.memory import Elements, Exchange, HostMemory, Memory, Piece, memory_at
from deltackpt.places import Numbering, last_at
from deltackpt.plans import ScatterPlan
from deltackpt.pool import in_order

if TYPE_CHECKING:
    import torch

_AT_ONCE = 1 << 16
"""Changes per task: what is made on the way stays in a cache."""

_PIECE = 64 << 20
"""Bytes of weights that are read through a plan at once."""


# ---------------------------------------------------------------- single elements


class Located:
    """A plan's places in one module: each live element as an index into one stretch of memory, of its width.

    Valid while the module keeps its tensors. Raises ConfigError for memory whose elements are not aligned, and for
    planned tensors on several devices.
    """

    def __init__(self, plan: ScatterPlan, regions: Sequence[Region]) -> None:
        self.plan, live, numbering = plan, plan.live, plan.live_numbering
        addresses = plan.addresses(regions)
        planned = {row.region for row in plan.rows}
        first: dict[torch.device, str] = {}
        for region in regions:
            if region.name in planned:
                first.setdefault(region.device, region.name)
        if len(first) > 1:
            some = ", ".join(f"{name} on {device}" for device, name in first.items())
            raise ConfigError(f"planned tensors are on several devices ({some}); use the engine's own reload")
        begin = int(addresses.min(initial=1 << 63)) // 8 * 8
        end = int((addresses + live.nbytes.astype(np.uint64)).max(initial=begin))
        self.memory: Memory = HostMemory(0, 0)
        for device in first:
            self.memory = memory_at(device, begin, (end - begin) // 8 * 8 + 8)
        offset = (addresses - np.uint64(begin)).astype(np.int64)
        if (odd := np.flatnonzero(offset % live.width)).size:
            raise ConfigError(f"{live.names[odd[0]]} is not aligned to its elements; use the engine's own reload")
        shift = offset // live.width - numbering.of_tensor
        self.maps = tuple(replace(m, live=m.live + shift[numbering.owner(m.live)]) for m in plan.maps)


def look(located: Located, changes: Changes, threads: int | None) -> tuple[Exchange, U64]:
    """Find the places of changes and read what is there.

    Returns the exchange that makes them, and what it adds to the fingerprint of each checkpoint tensor, by what is here
    of it. Raises IntegrityError for copies of one element that are not equal.
    """
    plan = located.plan

    def work(part: Flips) -> tuple[Piece, I64, U64]:
        memory, width = located.memory, part.bits.itemsize
        which, at = located.maps[0].find(part.elements)
        elements, bits = part.elements[which], part.bits[which]
        old = memory.take(width, at)
        places, values, flips = [at], [old], [bits]
        for copies in located.maps[1:]:
            # The first map has every element that is here.
            which, at = copies.find(elements)
            if (odd := np.flatnonzero(memory.take(width, at) != old[which])).size:
                name = plan.layout.names[int(plan.source_numbering.owner(elements[which[odd[:1]]])[0])]
                raise IntegrityError(f"copies of {name} in the module are not equal; nothing was written; reseed")
            places.append(at)
            values.append(old[which])
            flips.append(bits[which])
        at, values_, flips_ = np.concatenate(places), np.concatenate(values), np.concatenate(flips)
        if not (at[1:] > at[:-1]).all():
            order = np.argsort(at, kind="stable")
            at, values_, flips_ = at[order], values_[order], flips_[order]
        return Piece(at, values_, values_ ^ flips_), *_added(plan.source_numbering, elements, old, old ^ bits)

    parts = (
        Flips(one.elements[n : n + _AT_ONCE], one.bits[n : n + _AT_ONCE])
        for one in changes.flips
        for n in range(0, len(one.elements), _AT_ONCE)
    )
    pieces = []
    total = np.zeros(len(plan.layout.names), np.uint64)
    for piece, tensors, sums in in_order(work, parts, threads):
        pieces.append(piece)
        total[tensors] += sums
    return located.memory.exchange(pieces, threads), total


def _added(numbering: Numbering, elements: I64, old: Elements, new: Elements) -> tuple[I64, U64]:
    """Return tensors, and what turning old values of their elements into new ones adds to their fingerprints."""
    if not len(elements):
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    width, before, after = old.itemsize, old.astype(np.uint64), new.astype(np.uint64)
    place = last_at(numbering.first, elements)
    inside = (elements - numbering.first[place]).astype(np.uint64)
    if width == 8:
        terms = contribution(width, inside, after) - contribution(width, inside, before)
    else:
        terms = contribution(width, inside, after - before)
    begin = np.flatnonzero(np.diff(place, prepend=-1))
    return numbering.order[place[begin]], np.add.reduceat(terms, begin)


# ---------------------------------------------------------------- whole tensors


class Image:
    """What is planned of a module, in host memory: its own memory where it is there, else a copy.

    addresses: of each tensor of the live layout; valid as long as the image and the module's tensors are held.
    """

    def __init__(self, plan: ScatterPlan, regions: Sequence[Region]) -> None:
        planned = {row.region for row in plan.rows}
        self._raw = [(r, r.read()) for r in regions if r.name in planned]
        self.addresses = plan.addresses(
            replace(r, address=int(raw.__array_interface__["data"][0])) for r, raw in self._raw
        )

    def write_back(self) -> None:
        """Make the module what the image is now."""
        for region, raw in self._raw:
            if not region.on_host:
                region.write(raw)


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


def read_through(plan: ScatterPlan, image: Image, *, against: U64 | None = None, threads: int | None = None) -> U64:
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
            _move(plan, 0, t, here, image.addresses, write=False)
            _require_equal(plan, t, here, image.addresses, None if against is None else view(against[t], n * width))
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


def write_through(plan: ScatterPlan, image: Image, where: U64, *, threads: int | None = None) -> None:
    """Write contiguous tensors, at the addresses `where`, to all their places in live memory."""

    def work(tensors: I64) -> None:
        for t in tensors.tolist():
            given = view(where[t], int(plan.layout.nbytes[t])).view(f"<u{plan.layout.width[t]}")
            for number in range(len(plan.maps)):
                _move(plan, number, t, given, image.addresses, write=True)

    for _ in in_order(work, _batches(plan, _PIECE), threads):
        pass
    image.write_back()


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
