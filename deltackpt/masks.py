"""Groups in mask form on a GPU: columns laid out as masks, and masks turned into columns, some groups at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from deltackpt.errors import FormatError
from deltackpt.launch import DeviceColumns, Launch, Tables, row_sums
from deltackpt.layout import I64
from deltackpt.shard import MASK_FRAME
from deltackpt.window import Window, windows

if TYPE_CHECKING:
    import torch

BATCH = 1 << 30
"""Bytes of masks that are in device memory at a time, or one group: a decoder needs many frames to be busy."""


class Masks:
    """Room on the device for the masks of groups, batch after batch; all work goes to torch's current stream.

    group: numbers, sorted, each once. batches: ranges of places in `group`; begin: of each group's mask in `memory`.
    """

    def __init__(self, tables: Tables, group: I64, allocate: Callable[[int], torch.Tensor]) -> None:
        self.tables, self.group = tables, group
        self.batches: list[range] = []
        self.begin = np.zeros(len(group), np.int64)
        self._ends = np.zeros(len(group), np.int64)
        first, end = 0, 0
        for i, nbytes in enumerate(tables.group_nbytes[group].tolist()):
            room = -(-nbytes // MASK_FRAME) * MASK_FRAME
            if end and end + room > BATCH:
                self.batches.append(range(first, i))
                first, end = i, 0
            self.begin[i], end = end, end + room
            self._ends[i] = end
        if len(group):
            self.batches.append(range(first, len(group)))
        self.memory = allocate(int(self._ends.max(initial=1)))
        self.at = tables.put(self._row_addresses(self.memory.data_ptr()))

    def _row_addresses(self, memory: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return the address of each row of the tiling in its mask, 0 of those of other groups."""
        tables = self.tables
        found = np.zeros(len(tables.count), np.uint64)
        nbytes = tables.count * tables.width
        before = np.cumsum(nbytes) - nbytes
        for group, begin in zip(self.group.tolist(), self.begin.tolist(), strict=True):
            rows = slice(*tables.row_begin[group : group + 2].tolist())
            found[rows] = (memory + begin + before[rows] - before[rows.start]).astype(np.uint64)
        return found

    def clear(self, batch: range) -> torch.Tensor:
        """Return the memory of a batch, all zeros."""
        return self.memory[: self._ends[batch.stop - 1]].zero_()

    def fill(self, batch: range, columns: DeviceColumns) -> torch.Tensor:
        """Lay columns out; returns the memory of the batch. columns: of all of `group`."""
        memory, tables = self.clear(batch), self.tables
        Launch(tables, columns.take(slice(batch.start, batch.stop)))("apply", row_sums(tables), first=[self.at])
        return memory

    def windows(self, batch: range) -> list[Window]:
        """Return the windows of a batch, of groups that follow each other."""
        groups = self.group[batch.start : batch.stop]
        runs = np.split(groups, np.flatnonzero(np.diff(groups) != 1) + 1)
        found = (windows(self.tables, range(int(run[0]), int(run[-1]) + 1)) for run in runs)
        return [Window(self.tables, some) for run in found for some in run]


class Readout:
    """Turns masks that have been decoded into columns: their changes are what differs from nothing."""

    def __init__(self, masks: Masks) -> None:
        import torch

        tables = masks.tables
        self.masks = masks
        longest = int((tables.count * tables.width).max(initial=1))
        self._nothing = torch.zeros(longest, dtype=torch.uint8, device=tables.device)
        nothing = np.full(len(tables.count), self._nothing.data_ptr(), np.uint64)
        self._sides = (tables.put(nothing), masks.at)
        self._sums = (row_sums(tables), row_sums(tables))

    def begin(self, batch: range) -> list[Window]:
        """Launch the search for changes in the masks of a batch."""
        found = self.masks.windows(batch)
        for window in found:
            window.extract(self._sides, self._sums)
        return found

    def finish(self, found: list[Window]) -> list[DeviceColumns]:
        """Put the changes in order; waits until the masks have been read. Raises FormatError for a mask of zeros."""
        columns = []
        for window in found:
            made = window.compact(self._sides, self._sums)
            groups = np.empty(0, np.int64) if made is None else made[1].group
            empty = np.setdiff1d(np.arange(window.groups.start, window.groups.stop), groups)
            if len(empty):
                number = int(empty[0])
                raise FormatError(
                    f"group {number} ({self.masks.tables.tiling.group_names(number)}): it holds no change"
                )
            if made is not None:
                columns.append(made[1])
        return columns
