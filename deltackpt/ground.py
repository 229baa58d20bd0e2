"""What a rank of a sharded trainer knows for all rounds: the terms of its group, and the parts that it holds.

Of each part that it holds a rank has the base, a copy of its bytes at the head, in memory that its device allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from deltackpt.backend import Cpu, Device, Encoding
from deltackpt.digest import U64, state_fingerprint
from deltackpt.holding import cut
from deltackpt.kernels import U8, view
from deltackpt.layout import BITS, I64, Layout
from deltackpt.manifest import Placement, SideFile
from deltackpt.ownership import Inventory
from deltackpt.partition import Box, Partition
from deltackpt.writer import Grant, Writer

if TYPE_CHECKING:
    from deltackpt.tensors import Array


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
    """A part that this rank holds. base: addresses of its boxes; new: of the new ones, in this round.

    encoding: how the one becomes the other, once that was found out.
    """

    number: int
    places: list[Place]
    base: U64
    new: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    encoding: Encoding | None = None
    fingerprint: int | None = None
    _kept: object = None

    def __post_init__(self) -> None:
        self._held = np.array([place.held for place in self.places], np.int64)
        self._offset = np.array([place.offset for place in self.places], np.uint64)
        self._cuts = [(i, place, place.cut) for i, place in enumerate(self.places) if place.cut is not None]

    def take(self, kept: Sequence[Array], where: U64, device: Device, width: I64) -> None:
        """Find the new bytes in what is held, and at which addresses. width: of the elements of each box."""
        self.encoding, self.fingerprint, self._kept = None, None, None
        self.new = where[self._held] + self._offset
        if self._cuts:
            cuts = [cut(kept[place.held], int(width[i]), place.shape, box) for i, place, box in self._cuts]
            self._kept, self.new[[i for i, _, _ in self._cuts]] = device.hold(cuts)

    def copy(self, device: Device) -> None:
        """Make the base what is new."""
        for base, new, place in zip(self.base.tolist(), self.new.tolist(), self.places, strict=True):
            if place.nbytes:
                device.copy(base, new, place.nbytes)


class Ground:
    """What a rank knows for all rounds: the terms, and the parts that it holds, with its base of each.

    base_in_host: the base is in host memory, on which the device works in place.
    """

    def __init__(
        self, terms: Terms, writer: Writer, rank: int, inventory: Inventory, device: Device, *, base_in_host: bool
    ) -> None:
        self.terms, self.writer, self.inventory, self.device = terms, writer, inventory, device
        self._in_host = base_in_host or isinstance(device, Cpu)
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
        self._memory, at = device.allocate(sum(sizes), in_host=base_in_host)
        ends = np.cumsum(np.array([0, *sizes], np.uint64)) + np.uint64(at)
        self.mine: dict[int, Mine] = {}
        begin = 0
        for part in mine:
            self.mine[part] = Mine(part, places[part], ends[begin : begin + len(places[part])].astype(np.uint64))
            begin += len(places[part])

    def tensor(self, part: int) -> list[int]:
        """Return the tensor of each box of a part."""
        return [t for t, _ in self.boxes[part]]

    def base_bytes(self, part: int, most: int) -> Iterator[U8]:
        """Yield the bytes of the base of a part, in host memory, at most so many at a time."""
        mine = self.mine[part]
        for address, place in zip(mine.base.tolist(), mine.places, strict=True):
            for at in range(0, place.nbytes, most):
                nbytes = min(most, place.nbytes - at)
                if self._in_host:
                    yield view(address + at, nbytes)
                else:
                    host = np.empty(nbytes, np.uint8)
                    self.device.copy(int(host.__array_interface__["data"][0]), address + at, nbytes)
                    yield host

    def width(self, part: int) -> I64:
        """Return the width of the elements of each box of a part."""
        return self.layout.width[self.tensor(part)]

    def fingerprints(self, part: int, boxes: U64) -> U64:
        """Return what each box of a part adds to the fingerprint of its tensor."""
        return self.device.part_fingerprints(self.partition, part, boxes)

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
