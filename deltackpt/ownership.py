"""Who publishes what: every element of every tensor gets one owner among the ranks that hold it. Pure.

A rank holds boxes of tensors. Where ranks hold the same bytes, these are dealt out so that all ranks own about as many
bytes; the others of them can take over. What belongs to one owner, and is held by the same ranks, is one part.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from deltackpt.errors import ConfigError, FormatError
from deltackpt.layout import BITS, Layout
from deltackpt.partition import Box

_CUT_BYTES = 64 << 10
"""A box of fewer bytes is not cut for balance."""
_ROUNDS = 50
"""Rounds of balancing; with nested sets of holders one is enough."""


class Inventory(msgspec.Struct, frozen=True):
    """What one rank holds: names, safetensors dtypes and shapes of whole tensors, and the box of each that it holds.

    Sorted by name and box; one name may be there with several boxes.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    boxes: list[Box]


@dataclass(frozen=True)
class Part:
    """Boxes of one owner, sorted by tensor. holders: ranks that have all of them, the owner first; none: frozen."""

    boxes: tuple[tuple[int, Box], ...]
    holders: tuple[int, ...]


def join_layout(inventories: Mapping[int, Inventory]) -> Layout:
    """Return the layout of all that ranks hold. Raises ConfigError naming two ranks that differ about a tensor."""
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for rank, inventory in sorted(inventories.items()):
        for name, dtype, shape in zip(inventory.names, inventory.dtypes, inventory.shapes, strict=True):
            known = found.setdefault(name, (dtype, shape, rank))
            if known[:2] != (dtype, shape):
                raise ConfigError(
                    f"tensor {name} is {known[0]}{list(known[1])} on rank {known[2]} and {dtype}{list(shape)} on rank "
                    f"{rank}; expected the same whole tensor on both"
                )
    try:
        return Layout(list(found), [f[0] for f in found.values()], [f[1] for f in found.values()])
    except FormatError as exc:
        raise ConfigError(str(exc)) from exc


def divide(layout: Layout, inventories: Mapping[int, Inventory]) -> list[Part]:
    """Return the parts of a layout, each element with elements in one; tensors that no rank holds are the last part.

    Raises ConfigError naming a tensor of which some elements are on no rank, or one that the layout does not have.
    """
    cells: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
    of_tensor: list[dict[Box, list[int]]] = [{} for _ in layout.names]
    for rank, inventory in sorted(inventories.items()):
        for name, box in zip(inventory.names, inventory.boxes, strict=True):
            t = layout.position.get(name)
            if t is None:
                raise ConfigError(f"tensor {name}, held by rank {rank}, is not in the layout; leave it out")
            if all(end > begin for begin, end in box):
                ranks = of_tensor[t].setdefault(box, [])
                if not ranks or ranks[-1] != rank:
                    ranks.append(rank)
    frozen: list[tuple[int, Box]] = []
    # Most tensors of a model are cut like many others.
    known: dict[tuple[object, ...], list[tuple[Box, tuple[int, ...]]]] = {}
    for t, (count, boxes) in enumerate(zip(layout.count.tolist(), of_tensor, strict=True)):
        if not count:
            continue
        if not boxes:
            frozen.append((t, _full(layout.shapes[t])))
            continue
        key = (layout.shapes[t], *((box, *ranks) for box, ranks in boxes.items()))
        if key not in known:
            known[key] = _cells(layout, t, boxes)
        for box, holders in known[key]:
            cells.setdefault(holders, []).append((t, box))
    found = _deal(layout, cells)
    return [*found, Part(tuple(frozen), ())] if frozen else found


def _full(shape: Sequence[int]) -> Box:
    return tuple((0, extent) for extent in shape)


def _cells(layout: Layout, t: int, boxes: Mapping[Box, list[int]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Cut a tensor into boxes each of which is held as a whole by some ranks."""
    shape = layout.shapes[t]
    if len(boxes) == 1 and _full(shape) in boxes:
        return [(box, tuple(ranks)) for box, ranks in boxes.items()]
    cuts = [sorted({0, extent} | {x for box in boxes for x in box[d]}) for d, extent in enumerate(shape)]
    held: dict[Box, list[int]] = {}
    for box, ranks in boxes.items():
        # Of each dimension, the pieces that lie in the box.
        pieces = [
            list(itertools.pairwise(cut[bisect.bisect_left(cut, begin) : bisect.bisect_left(cut, end) + 1]))
            for cut, (begin, end) in zip(cuts, box, strict=True)
        ]
        for cell in itertools.product(*pieces):
            held.setdefault(cell, []).extend(ranks)
    if sum(_volume(cell) for cell in held) != math.prod(shape):
        gap = next(c for c in itertools.product(*(itertools.pairwise(cut) for cut in cuts)) if c not in held)
        raise ConfigError(
            f"tensor {layout.names[t]}, {list(shape)}: no rank holds its elements {list(map(list, gap))}; "
            "expected every element on a rank"
        )
    return [(cell, tuple(sorted(set(ranks)))) for cell, ranks in sorted(held.items())]


def _volume(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


def _nbytes(layout: Layout, t: int, box: Box) -> float:
    return _volume(box) * BITS[layout.dtypes[t]] / 8


def _deal(layout: Layout, cells: Mapping[tuple[int, ...], list[tuple[int, Box]]]) -> list[Part]:
    """Give every cell, or the pieces of it, an owner."""
    sets = sorted(cells, key=lambda holders: (len(holders), holders))
    sizes = {holders: sum(_nbytes(layout, t, box) for t, box in cells[holders]) for holders in sets}
    shares = _shares(sets, sizes)
    owned: dict[tuple[int, tuple[int, ...]], list[tuple[int, Box]]] = {}
    for holders in sets:
        waiting = list(reversed(cells[holders]))
        for rank in holders:
            room = shares[holders][rank]
            mine = owned.setdefault((rank, holders), [])
            while waiting and (rank == holders[-1] or room > 0):
                t, box = waiting[-1]
                size = _nbytes(layout, t, box)
                if rank != holders[-1] and size > room:
                    cut = _cut(layout, t, box, room / size) if size > _CUT_BYTES else None
                    if cut is None and room < size / 2:
                        break
                    if cut is not None:
                        box, waiting[-1] = cut[0], (t, cut[1])
                        mine.append((t, box))
                        break
                waiting.pop()
                mine.append((t, box))
                room -= size
    parts = []
    for (rank, holders), boxes in sorted(owned.items()):
        if boxes:
            turn = holders.index(rank)
            parts.append(Part(tuple(sorted(boxes)), holders[turn:] + holders[:turn]))
    return parts


def _shares(
    sets: Sequence[tuple[int, ...]], sizes: Mapping[tuple[int, ...], float]
) -> dict[tuple[int, ...], dict[int, float]]:
    """Return how many bytes of each set each of its holders is to own, so that the ranks' sums are as equal as can be.

    Each round takes the shares of one set back and fills the lowest ranks first; that converges.
    """
    load: dict[int, float] = {rank: 0.0 for holders in sets for rank in holders}
    shares: dict[tuple[int, ...], dict[int, float]] = {holders: dict.fromkeys(holders, 0.0) for holders in sets}
    for _ in range(_ROUNDS):
        moved = 0.0
        for holders in sets:
            before = shares[holders]
            rest = {rank: load[rank] - before[rank] for rank in holders}
            level = _level(sorted(rest.values()), sizes[holders])
            shares[holders] = {rank: max(0.0, level - rest[rank]) for rank in holders}
            for rank in holders:
                load[rank] = rest[rank] + shares[holders][rank]
                moved = max(moved, abs(shares[holders][rank] - before[rank]))
        if moved < _CUT_BYTES:
            break
    return shares


def _level(loads: Sequence[float], size: float) -> float:
    """Return the level to which loads, ascending, rise when `size` is poured onto the lowest of them."""
    total = size
    for n, load in enumerate(loads, 1):
        total += load
        if n == len(loads) or total / n <= loads[n]:
            return total / n
    return total


def _cut(layout: Layout, t: int, box: Box, share: float) -> tuple[Box, Box] | None:
    """Cut a box in two across its first dimension that can be cut, the first piece about this share of it."""
    bits = BITS[layout.dtypes[t]]
    for d, (begin, end) in enumerate(box):
        if end - begin < 2:
            continue
        # Between whole bytes, counted from the beginning of the tensor.
        unit = 8 // math.gcd(8, bits * math.prod(layout.shapes[t][d + 1 :]))
        at = begin + round((end - begin) * share)
        at -= at % unit
        if not begin < at < end:
            return None
        return (*box[:d], (begin, at), *box[d + 1 :]), (*box[:d], (at, end), *box[d + 1 :])
    return None
