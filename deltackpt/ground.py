"""What a rank of a sharded trainer knows for all rounds: the terms of its group, and the parts that it holds.

Of each part that it holds a rank has the base, a copy of its bytes at the head, in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from deltackpt.digest import U64, state_fingerprint
from deltackpt.holding import Held
from deltackpt.kernels import U8, view
from deltackpt.layout import BITS, Layout
from deltackpt.manifest import Placement, SideFile
from deltackpt.ownership import Inventory
from deltackpt.partition import Box, Partition
from deltackpt.shard import EncodedGroup
from deltackpt.writer import Grant, Writer


class Terms(msgspec.Struct, frozen=True):
    """What holds for all rounds of a group, by digest where it is an object of the store.

    sets: ranks that hold the same bytes; parts: of each its set and its owner, none of a part that is frozen.
    """

    grant: Grant
    layout: str
    placement: str
    partition: str
    side_files: tuple[SideFile, ...]
    sets: list[tuple[int, ...]]
    parts: list[tuple[int, int] | None]


@dataclass(frozen=True)
class Place:
    """Where a box of a part lies in what the rank holds. cut: how to take it out where it does not lie side by side."""

    held: int
    offset: int
    nbytes: int
    shape: tuple[int, ...] = ()
    cut: tuple[slice, ...] | None = None


def place_in(layout: Layout, t: int, box: Box, held: int, of: Box) -> Place:
    """Return where a box lies in the one that is held."""
    bits, width = BITS[layout.dtypes[t]], int(layout.width[t])
    shape = [end - begin for begin, end in of]
    at = [begin - low for (begin, _), (low, _) in zip(box, of, strict=True)]
    size = [end - begin for begin, end in box]
    nbytes = int(np.prod(size, dtype=np.int64)) * bits // 8
    full = [a == b for a, b in zip(size, shape, strict=True)]
    first = next((d for d, n in enumerate(size) if n > 1), len(size))
    if all(full[first + 1 :]):
        offset = 0
        for index, n in zip(at, shape, strict=True):
            offset = offset * n + index
        return Place(held, offset * bits // 8, nbytes)
    units = 8 * width
    shape[-1], at[-1], size[-1] = (n * bits // units for n in (shape[-1], at[-1], size[-1]))
    return Place(held, 0, nbytes, tuple(shape), tuple(slice(a, a + n) for a, n in zip(at, size, strict=True)))


@dataclass
class Mine:
    """A part that this rank holds. base: addresses of its boxes; new: of the new ones, in this round."""

    number: int
    places: list[Place]
    base: U64
    new: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    encoded: list[EncodedGroup] | None = None
    fingerprint: int | None = None
    _kept: list[object] = field(default_factory=list)
    _found_in: object = None
    _cuts: list[int] = field(default_factory=list)

    def take(self, held: Held, layout: Layout, tensor: Sequence[int]) -> None:
        """Find the new bytes."""
        self._kept, self.encoded, self.fingerprint = [], None, None
        if held.memory is not self._found_in:
            self._found_in = held.memory
            self.new = np.array([held.address[place.held] + place.offset for place in self.places], np.uint64)
            self._cuts = [i for i, place in enumerate(self.places) if place.cut is not None]
        for i in self._cuts:
            place = self.places[i]
            whole = held.memory[place.held].view(f"<u{int(layout.width[tensor[i]])}").reshape(place.shape)
            memory = np.ascontiguousarray(whole[place.cut]).reshape(-1).view(np.uint8)
            self._kept.append(memory)
            self.new[i] = int(memory.__array_interface__["data"][0])

    def boxes(self, where: U64) -> list[U8]:
        """Return the bytes of all boxes."""
        return [view(a, place.nbytes) for a, place in zip(where.tolist(), self.places, strict=True)]

    def copy(self) -> None:
        """Make the base what is new."""
        for base, new in zip(self.boxes(self.base), self.boxes(self.new), strict=True):
            base[:] = new


class Ground:
    """What a rank knows for all rounds: the terms, and the parts that it holds, with its base of each."""

    def __init__(self, terms: Terms, writer: Writer, rank: int, inventory: Inventory) -> None:
        self.terms, self.writer, self.inventory = terms, writer, inventory
        reader = writer.reader
        self.layout: Layout = reader.layout(terms.layout)
        self.partition: Partition = reader.partition(terms.partition, self.layout)
        self.placement: Placement = reader.placement_of(terms.placement, self.layout)
        self.holders = [_holders(terms, part) for part in range(len(terms.parts))]
        self.boxes = [self.partition.places(part) for part in range(self.partition.parts)]
        position = self.layout.position
        held: dict[int, list[tuple[int, Box]]] = {}
        for i, (name, box) in enumerate(zip(inventory.names, inventory.boxes, strict=True)):
            held.setdefault(position[name], []).append((i, box))
        mine = [part for part, holders in enumerate(self.holders) if rank in holders]
        places = {part: [_find(self.layout, t, box, held[t]) for t, box in self.boxes[part]] for part in mine}
        sizes = [place.nbytes for part in mine for place in places[part]]
        self.memory = np.empty(sum(sizes) + 1, np.uint8)
        ends = np.cumsum(np.array([0, *sizes], np.uint64)) + np.uint64(self.memory.__array_interface__["data"][0])
        self.mine: dict[int, Mine] = {}
        begin = 0
        for part in mine:
            self.mine[part] = Mine(part, places[part], ends[begin : begin + len(places[part])].astype(np.uint64))
            begin += len(places[part])

    def tensor(self, part: int) -> list[int]:
        """Return the tensor of each box of a part."""
        return [t for t, _ in self.boxes[part]]

    def weighted(self, part: int, fingerprints: U64) -> int:
        """Return the sum of H_t * fp over the boxes of a part."""
        return state_fingerprint(self.layout.weights[self.tensor(part)], fingerprints)


def _holders(terms: Terms, part: int) -> tuple[int, ...]:
    given = terms.parts[part]
    if given is None:
        return ()
    ranks, owner = terms.sets[given[0]], given[1]
    turn = ranks.index(owner)
    return ranks[turn:] + ranks[:turn]


def _find(layout: Layout, t: int, box: Box, held: Sequence[tuple[int, Box]]) -> Place:
    for i, of in held:
        if all(low <= begin and end <= high for (begin, end), (low, high) in zip(box, of, strict=True)):
            return place_in(layout, t, box, i, of)
    raise AssertionError("a holder of a part has each of its boxes in one piece")
