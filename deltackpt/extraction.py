"""Encode on a GPU: extract what changed, put it in order, bring it to the host, and compress it there or before.

Two windows of changes are in device memory at a time, and the columns of all that changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from deltackpt import backend, libnvcomp, nvcomp
from deltackpt import codec as codecs
from deltackpt.codec import Bytes
from deltackpt.digest import U64
from deltackpt.kernels import U8
from deltackpt.launch import DeviceColumns, Launch, Shape, Tables, row_sums, stream_of, tables_of, unsigned
from deltackpt.layout import I64, Tiling
from deltackpt.masks import Masks
from deltackpt.partition import Partition
from deltackpt.pool import default_threads, in_order, submit
from deltackpt.shard import MASK, MASK_FRAME, EncodedGroup, Frame
from deltackpt.window import Window, windows

if TYPE_CHECKING:
    import torch

_ON_DEVICE = (codecs.ANS, codecs.DEFLATE, codecs.LZ4, codecs.SNAPPY)
"""Codecs of which columns are compressed on the device; the zstd of a CPU makes smaller frames as fast."""


class Extraction:
    """The columns of all changed groups, with what they add to each row's fingerprint.

    Made by `extract`. An Encoding: `groups` compresses, `advance` applies the columns to the base.
    """

    def __init__(
        self, tables: Tables, address: Callable[[U64], U64], part: int, codec: int, form: str, threads: int | None
    ) -> None:
        self.tables, self.form = tables, form
        self._address, self._part = address, part
        self._codec, self._threads = codec, threads or default_threads()
        self._parts: list[tuple[DeviceColumns, Callable[[], Future[list[tuple[Frame, ...]]]]]] = []
        self.fp: U64 = np.empty(0, np.uint64)
        self.changed: I64 = np.empty(0, np.int64)

    def add(self, shape: Shape, columns: DeviceColumns) -> None:
        """Take the columns of a window; those that are compressed on the host set out for it."""
        import torch

        stream = stream_of(self.tables.device, "publish")
        stream.wait_stream(torch.cuda.current_stream())
        if self.form == "sparse" and self._codec in _ON_DEVICE and libnvcomp.installed():
            # At once: no thread of the CPU is busy with it.
            made = submit(1, partial(self._on_device, shape, columns))
            self._parts.append((columns, lambda: made))
            return
        if self.form == "mask":
            self._parts.append((columns, lambda: submit(1, partial(self._as_masks, columns))))
            return
        with torch.cuda.stream(stream):
            memory = columns.held[0]
            host = torch.empty(len(memory), dtype=torch.uint8, pin_memory=True).copy_(memory, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            ready.record()
        # Not before the trainer may go on: threads that compress would hold up the one that extracts.
        work = partial(self._on_host, shape, host, ready)
        self._parts.append((columns, lambda: submit(1, work)))

    def _on_host(self, shape: Shape, host: torch.Tensor, ready: torch.cuda.Event) -> list[tuple[Frame, ...]]:
        """Compress on the CPU."""
        ready.synchronize()
        raw = host.numpy()
        row, plane, begin, nbytes = shape.frames()
        cuts = [raw[b : b + n] for b, n in zip(begin.tolist(), nbytes.tolist(), strict=True)]
        if self._codec == codecs.ZSTD:
            stored = codecs.encode_many(self._codec, cuts, self._threads)
        else:
            stored = list(in_order(partial(codecs.encode, self._codec), cuts, self._threads))
        return _by_row(len(shape.group), row, plane, nbytes, stored)

    def _as_masks(self, columns: DeviceColumns) -> list[tuple[Frame, ...]]:
        """Lay the columns out as masks on the device, batch after batch, and compress each on the CPU meanwhile."""
        import torch

        tables, found = self.tables, list[tuple[Frame, ...]]()
        with torch.cuda.stream(stream_of(tables.device, "publish")):
            room = partial(torch.empty, dtype=torch.uint8, device=tables.device)
            masks = Masks(tables, columns.group, room)
            waiting: tuple[range, torch.Tensor, torch.cuda.Event] | None = None
            for batch in [*masks.batches, None]:
                made = None
                if batch is not None:
                    memory = masks.fill(batch, columns)
                    # A memory of its own, which raw frames keep.
                    host = torch.empty(len(memory), dtype=torch.uint8, pin_memory=True).copy_(memory, non_blocking=True)
                    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                    ready.record()
                    made = (batch, host, ready)
                if waiting is not None:
                    found += self._compressed(masks, *waiting)
                waiting = made
        return found

    def _compressed(
        self, masks: Masks, batch: range, host: torch.Tensor, ready: torch.cuda.Event
    ) -> list[tuple[Frame, ...]]:
        ready.synchronize()
        raw = host.numpy()
        group, begin = (of[batch.start : batch.stop] for of in (masks.group, masks.begin))
        nbytes = self.tables.group_nbytes[group]
        cuts = [
            (row, block, raw[b + at : b + min(at + MASK_FRAME, n)])
            for row, (b, n) in enumerate(zip(begin.tolist(), nbytes.tolist(), strict=True))
            for block, at in enumerate(range(0, n, MASK_FRAME))
        ]

        def work(cut: tuple[int, int, U8]) -> tuple[int, Frame | None]:
            row, block, content = cut
            return row, backend.compress(MASK, block, self._codec, content) if content.any() else None

        found: list[list[Frame]] = [[] for _ in group]
        for row, frame in in_order(work, cuts, self._threads):
            if frame is not None:
                found[row].append(frame)
        return [tuple(frames) for frames in found]

    def _on_device(self, shape: Shape, columns: DeviceColumns) -> list[tuple[Frame, ...]]:
        """Compress where the columns are, and bring only that to the host."""
        import torch

        row, plane, begin, nbytes = shape.frames()
        with torch.cuda.stream(stream_of(self.tables.device, "publish")):
            made = nvcomp.compress(self._codec, columns.held[0], begin, nbytes)
            host = torch.empty(len(made.memory), dtype=torch.uint8, pin_memory=True).copy_(made.memory).numpy()
        stored = [
            (int(codec), host[b : b + n])
            for codec, b, n in zip(made.codec, made.offset.tolist(), made.nbytes.tolist(), strict=True)
        ]
        return _by_row(len(shape.group), row, plane, nbytes, stored)

    def groups(self) -> Generator[EncodedGroup, None, None]:
        """Compress window after window, while the caller has the groups before; yields them, sorted."""
        begun = [begin() for _, begin in self._parts]
        try:
            for (columns, _), made in zip(self._parts, begun, strict=True):
                for group, frames in zip(columns.group.tolist(), made.result(), strict=True):
                    rows = slice(*self.tables.row_begin[group : group + 2])
                    touched = np.flatnonzero(self.changed[rows])
                    tensor, of = np.unique(self.tables.tensor[rows][touched], return_inverse=True)
                    fp = np.zeros(len(tensor), np.uint64)
                    np.add.at(fp, of, self.fp[rows][touched])  # a tensor may have several boxes
                    yield EncodedGroup(group, frames, tensor, fp, int(self.changed[rows].sum()), self._part)
        finally:
            for made in begun:
                made.cancel()

    def advance(self, base: U64) -> None:
        """Apply the columns at the addresses of the base."""
        import torch

        tables = self.tables
        with torch.cuda.stream(stream_of(tables.device, "publish")):
            fp = row_sums(tables)
            columns = DeviceColumns.joined([columns for columns, _ in self._parts])
            Launch(tables, columns)("apply", fp, first=[tables.put(self._address(base))])
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            done.record()
        done.synchronize()
        self._parts.clear()


def _by_row(
    rows: int, row: I64, plane: I64, nbytes: I64, stored: Sequence[tuple[int, Bytes]]
) -> list[tuple[Frame, ...]]:
    """Return the frames of each group, given those of all."""
    found: list[list[Frame]] = [[] for _ in range(rows)]
    for r, p, n, (codec, data) in zip(row.tolist(), plane.tolist(), nbytes.tolist(), stored, strict=True):
        found[r].append(Frame(p, 0, codec, codecs.RAW, n, data))
    return [tuple(frames) for frames in found]


def extract(
    tiling: Tiling,
    old: U64,
    new: U64,
    device: torch.device,
    *,
    part: int = 0,
    codec: str = "zstd",
    form: str = "sparse",
    threads: int | None = None,
) -> Extraction:
    """Compare two copies of the tensors on a device; their changes are brought to the host and compressed meanwhile.

    old, new: u64 device address of each tensor's contiguous bytes; of a partition, that of each box of the part, whose
    elements lie side by side. Returns when both copies have been read; the columns may still be on their way.
    """
    tables = tables_of(tiling, device)
    address: Callable[[U64], U64] = tables.run_addresses
    groups, boxes = range(len(tiling.groups)), None
    if isinstance(tiling, Partition):
        first = int(tiling.box_begin[part])
        address = partial(tables.apart, first=first)
        groups = tiling.groups_of(part)
        boxes = tables.looked_at(old, first)
    result = Extraction(tables, address, part, codecs.NAMES.index(codec), form, threads)
    sides = (tables.put(address(old)), tables.put(address(new)))
    sums = (row_sums(tables), row_sums(tables))
    looked = row_sums(tables)
    waiting: Window | None = None
    # The device extracts the next window while this thread reads the sums of the one before.
    for some in itertools.chain(windows(tables, groups), [None]):
        window = None if some is None else Window(tables, some)
        if window is not None:
            window.extract(sides, sums)
        if waiting is not None and (found := waiting.compact(sides, sums)) is not None:
            if boxes is not None:
                Launch(tables, found[1])("scatter", np.uint32(False), looked, first=boxes)
            result.add(*found)
        waiting = window
    result.fp = unsigned(sums[0])
    if boxes is not None:
        # Which elements of its tensor a strided row changed is known only by its box.
        result.fp = np.where(tables.strided, unsigned(looked), result.fp)
    result.changed = sums[1].cpu().numpy()
    return result
