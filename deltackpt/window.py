"""Comparing two copies of groups on a GPU: one launch for a window of them, then their changes put in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from deltackpt.launch import THREADS, DeviceColumns, Launch, Shape, Tables, kernels_of, zeros
from deltackpt.layout import TILE

if TYPE_CHECKING:
    import torch

_WINDOW = 4 << 30
"""Bytes of weights per extract launch; whole groups."""
_ROOM = 1 / 64
"""Share of a window's elements for which room is made at first; a window with more changes is extracted again."""
_SPARE = 1.25
"""Room that is made for a window from then on, in terms of what it needed last."""
Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


def windows(tables: Tables, groups: range) -> Iterator[range]:
    """Runs of groups of one width, about _WINDOW bytes each."""
    begin, nbytes = groups.start, 0
    for g in groups:
        of = tables.group_nbytes[g]
        if g > begin and (tables.group_width[g] != tables.group_width[begin] or nbytes + of > _WINDOW):
            yield range(begin, g)
            begin, nbytes = g, 0
        nbytes += of
    if begin < groups.stop:
        yield range(begin, groups.stop)


class Window:
    """Whole groups of one width, and the changes that an extract launch finds in them, in the order in which it did."""

    def __init__(self, tables: Tables, groups: range) -> None:
        self.tables, self.groups = tables, groups
        self.width = int(tables.group_width[groups.start])
        self.first, last = int(tables.tile_begin[groups.start]), int(tables.tile_begin[groups.stop])
        self.tiles = last - self.first
        elements = int(tables.group_elements[groups.start : groups.stop].sum())
        k, d = tables.needed.get(groups.start, (int(_ROOM * elements), 0))
        self.room, self.dense_room = int(_SPARE * k) + TILE, int(_SPARE * d)

    def extract(self, sides: Pair, sums: Pair) -> None:
        """Launch; the sums per group are on their way to the host when this returns."""
        import torch

        device, tables = self.tables.device, self.tables
        cursor = zeros(2, device)
        self.counts = torch.empty(self.tiles, dtype=torch.int16, device=device)
        self.place = torch.empty(self.tiles, dtype=torch.int32, device=device)
        self.sparse = torch.empty((2 + self.width, self.room), dtype=torch.uint8, device=device)
        self.dense = torch.empty((self.width, self.dense_room), dtype=torch.uint8, device=device)
        blocks = -(-self.tiles // (2 if self.width == 1 else 1))
        kernels_of(device.index or 0)(
            f"extract_{self.width}", blocks, THREADS, *tables.rows, *sides, np.uint32(self.first),
            np.uint32(self.tiles), cursor, self.counts, self.place, self.sparse, self.dense, np.uint64(self.room),
            np.uint64(self.dense_room), *sums,
        )  # fmt: skip
        is_dense = self.counts == -1
        lengths = tables.tile_length[self.first : self.first + self.tiles] * is_dense
        mine = torch.where(is_dense, 0, self.counts).to(torch.int64) + (lengths.to(torch.int64) << 32)
        ends = torch.cumsum(mine, 0)
        self.taken = ends - mine
        last = tables.last_tiles[self.groups.start : self.groups.stop] - self.first
        self._ends = torch.empty(len(last), dtype=torch.int64, pin_memory=True)
        self._ends.copy_(ends[last], non_blocking=True)
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._ready.record()

    def compact(self, sides: Pair, sums: Pair) -> tuple[Shape, DeviceColumns] | None:
        """Put the changes in order, None where there are none; extracts again where there was too little room."""
        import torch

        tables = self.tables
        while True:
            self._ready.synchronize()
            ends = self._ends.numpy()
            k, d = ends & 0xFFFFFFFF, ends >> 32
            if k[-1] <= self.room and d[-1] <= self.dense_room:
                break
            self.room, self.dense_room = int(k[-1]), int(d[-1])
            rows = slice(*tables.row_begin[[self.groups.start, self.groups.stop]].tolist())
            for per_row in sums:
                per_row[rows] = 0
            self.extract(sides, sums)
        tables.needed[self.groups.start] = int(k[-1]), int(d[-1])
        k, d = np.diff(k, prepend=0), np.diff(d, prepend=0)
        touched = np.flatnonzero((k > 0) | (d > 0))
        if not len(touched):
            return None
        shape = Shape(tables, self.groups.start + touched, k[touched], d[touched])
        columns = DeviceColumns.of(shape, torch.empty(shape.nbytes, dtype=torch.uint8, device=tables.device))
        Launch(tables, columns)(
            "compact", self.counts, self.place, self.taken, self.sparse, self.dense, np.uint64(self.room),
            np.uint64(self.dense_room), np.uint32(self.first),
        )  # fmt: skip
        return shape, columns
