"""Decode on a GPU: bring columns and masks to the device, check them there, and hold them ready for the one launch.

Frames are decompressed by nvCOMP's kernels, by a Decompression Engine or on the CPU; what has a second codec around the
first loses that on the CPU. Masks become columns at once, so that there is one way to apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from deltackpt import arena, backend, nvcomp
from deltackpt import codec as codecs
from deltackpt.errors import FormatError
from deltackpt.kernels import U8
from deltackpt.launch import DeviceColumns, Launch, Shape, Tables, Where, kernels_of, stream_of, tables_of
from deltackpt.layout import I64, Tiling
from deltackpt.masks import Masks, Readout
from deltackpt.pool import in_order
from deltackpt.shard import COUNTS, DENSE, FRAME, GAP, MASK, MASK_FRAME, PLANE_FRAME, VALUE, Fetched, Frame
from deltackpt.window import Window

if TYPE_CHECKING:
    import torch

    from deltackpt.nvcomp import Check


class StagedColumns:
    """Columns of a version in device memory, ready for the one launch. Made on the stream that stages.

    held: what is being copied and decoded from, until that is done; checks: what the decoders will have said.
    """

    def __init__(
        self, tables: Tables, columns: DeviceColumns, held: list[object], checks: Sequence[Check] = ()
    ) -> None:
        import torch

        self.tables, self._held, self._checks = tables, held, checks
        self._launch = Launch(tables, columns)
        self._bad = torch.full((2,), -1, dtype=torch.int32, device=tables.device)
        if columns.tiles:
            kernels_of(tables.device.index or 0)(
                "scan", len(columns.group), 1024, *tables.rows, self._launch.records, self._bad
            )
            self._launch("check", self._bad)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._done.record()

    def wait(self) -> None:
        """Return when everything is in device memory and checked. Raises FormatError for columns that do not fit."""
        # Before the checks: when one of them raises, nothing that is freed is still being read.
        with nvcomp.fatal("staging"):
            self._done.synchronize()
        self._held.clear()
        for check in self._checks:
            check.wait()
        group, tile = self._bad.tolist()
        if group >= 0:
            number = int(self._launch.columns.group[group])
            raise FormatError(
                f"group {number} ({self.tables.tiling.group_names(number)}): its counts are not those of its columns"
            )
        if tile >= 0:
            raise FormatError(f"tile {tile} of the version: its last change lies outside the tile")

    def apply(self, where: Where, fp: torch.Tensor) -> None:
        """Launch the apply on torch's current stream; `fp` is added to, per row."""
        import torch

        torch.cuda.current_stream().wait_event(self._done)
        self._launch("apply", fp, first=[where.runs])
        if where.boxes is not None:
            self._launch("scatter", np.uint32(True), fp, first=where.boxes)


_RUN = 16
"""Frames that a thread strips in one task: handing a task over costs as much as one of them."""


@dataclass(frozen=True)
class _Frames:
    """Frames of shards in host memory, sorted by group, plane and place. records: FRAME; shard: of each, in `fetched`.

    room: see Cuda.
    """

    fetched: Sequence[Fetched]
    records: np.ndarray[Any, Any]
    shard: I64
    room: Callable[[int], memoryview]
    threads: int | None

    @classmethod
    def of(cls, fetched: Sequence[Fetched], room: Callable[[int], memoryview], threads: int | None) -> _Frames:
        """All frames that were fetched; a group is in one shard."""
        records = np.concatenate([np.empty(0, FRAME), *(one.index.frames for one in fetched)])
        shard = np.repeat(np.arange(len(fetched)), [len(one.index.frames) for one in fetched])
        order = np.argsort(records["group"], kind="stable")
        return cls(fetched, records[order], shard[order], room, threads)

    def take(self, some: slice | np.ndarray[Any, np.dtype[np.bool_]]) -> _Frames:
        """Return some of them."""
        return replace(self, records=self.records[some], shard=self.shard[some])

    def stripped(self, tiling: Tiling) -> _Stored:
        """Take outer codecs off, on the CPU: a decoder of the device reads one codec at a time. Raises FormatError."""
        import torch

        memories = [torch.frombuffer(one.data, dtype=torch.uint8) for one in self.fetched]
        sizes = np.array([len(m) for m in memories], np.int64)
        begins = np.cumsum(sizes) - sizes
        offset = begins[self.shard] + self.records["offset"].astype(np.int64)
        nbytes = self.records["stored"].astype(np.int64)
        wrapped = np.flatnonzero(self.records["outer"] != codecs.RAW)
        if not len(wrapped):
            return _Stored(memories, offset, nbytes)
        stored, inside = list[memoryview](), list[int]()
        for i, record in zip(wrapped.tolist(), self.records[wrapped].tolist(), strict=True):
            begin, n, raw, group, _, codec, *_ = record
            frame = self.fetched[int(self.shard[i])].data[begin : begin + n]
            try:
                inside.append(codecs.content_size(frame, codecs.inner_limit(raw)))
                if codec == codecs.RAW and inside[-1] != raw:
                    raise FormatError(f"outer zstd frame declares {inside[-1]} bytes, {raw} are due")
            except FormatError as exc:
                raise FormatError(f"group {group} ({tiling.group_names(group)}): {exc}") from exc
            stored.append(frame)
        nbytes[wrapped] = inside
        taken = nvcomp.aligned(nbytes[wrapped])
        memory = self.room(int(taken.sum()))
        places = (np.cumsum(taken) - taken).tolist()

        def strip(some: slice) -> None:
            for frame, begin, n in zip(stored[some], places[some], inside[some], strict=True):
                memory[begin : begin + n] = memoryview(codecs.decode(codecs.ZSTD, frame, n))

        for _ in in_order(strip, (slice(i, i + _RUN) for i in range(0, len(stored), _RUN)), self.threads):
            pass
        offset[wrapped] = sizes.sum() + np.array(places, np.int64)
        return _Stored([*memories, torch.frombuffer(memory, dtype=torch.uint8)], offset, nbytes)


@dataclass(frozen=True)
class _Stored:
    """Where frames are that a decoder of the device reads. memories: in host memory; offset: through all of them."""

    memories: list[torch.Tensor]
    offset: I64
    nbytes: I64


def stage(
    tiling: Tiling,
    fetched: Sequence[Fetched],
    device: torch.device,
    *,
    room: Callable[[int], memoryview],
    on_device: bool,
    engine: int | None = None,
    threads: int | None = None,
) -> StagedColumns:
    """Bring the columns of all groups to the device and check them there.

    on_device: frames are decoded by nvCOMP where the columns go, outer codecs by the CPU before that; else all by the
    CPU, side by side. room, engine: see Cuda. Raises FormatError before anything is applied.
    """
    import torch

    tables = tables_of(tiling, device)
    fetched = [one for one in fetched if len(one.index.frames)]
    with torch.cuda.stream(stream_of(device, "stage")):
        if not on_device:
            groups = (group for one in fetched for group in one.groups())
            return StagedColumns(tables, *_decode_on_host(tables, groups, threads))
        frames = _Frames.of(fetched, room, threads)
        masked = np.isin(frames.records["group"], frames.records["group"][frames.records["plane"] == MASK])
        parts = [(_decode_columns, frames.take(~masked)), (_decode_masks, frames.take(masked))]
        try:
            decoded = [decode(tables, some, engine) for decode, some in parts if len(some.records)]
        except BaseException:
            # What a decoder still reads must not be freed, and then be something else.
            torch.cuda.current_stream().synchronize()
            raise
        columns = DeviceColumns.joined([one for of, _, _ in decoded for one in of])
        held = [one for _, of, _ in decoded for one in of]
        return StagedColumns(tables, columns, held, [one for *_, of in decoded for one in of])


_Decoded: TypeAlias = "tuple[list[DeviceColumns], list[object], list[Check]]"
"""Columns, what they are still being made from, and what the decoders will have said."""


def _decode_columns(tables: Tables, frames: _Frames, engine: int | None) -> _Decoded:
    """Decode frames of columns out of host memory into that of the device."""
    records = frames.records
    shape, place = _require_columns(tables, records)
    stored = frames.stripped(tables.tiling)
    memory = _room(engine, tables.device)(max(1, shape.nbytes))
    if engine is not None or (records["codec"] == codecs.ZSTD).any():
        source = stored.memories  # slow decoders read in place as fast, and need the room that a copy would take
    else:
        source = [one.to(tables.device, non_blocking=True) for one in stored.memories]
    checks = _decompress(records, source, stored, memory, place, engine)
    return [DeviceColumns.of(shape, memory)], [*stored.memories, *source], checks


def _decode_masks(tables: Tables, frames: _Frames, engine: int | None) -> _Decoded:
    """Decode masks on the device, a batch at a time, while the CPU strips the frames of the next one."""
    records = frames.records
    _require_masks(tables, records)
    masks = Masks(tables, np.unique(records["group"]).astype(np.int64), _room(engine, tables.device))
    readout, found = Readout(masks), list[DeviceColumns]()
    checks: list[Check] = []
    windows: list[Window] = []
    being_read: _Stored | None = None

    def finish() -> None:
        """Take what the batch before has become. Then the memory of its masks and of its frames is free again."""
        for check in checks:
            check.wait()
        found.extend(readout.finish(windows))

    for batch in masks.batches:
        first, last = masks.group[[batch.start, batch.stop - 1]].tolist()
        some = frames.take(slice(*np.searchsorted(records["group"], [first, last + 1]).tolist()))
        stored = some.stripped(tables.tiling)
        finish()
        memory, row = masks.clear(batch), np.searchsorted(masks.group, some.records["group"])
        place = masks.begin[row] + some.records["block"].astype(np.int64) * MASK_FRAME
        checks = _decompress(some.records, stored.memories, stored, memory, place, engine)
        windows, being_read = readout.begin(batch), stored
    finish()
    del being_read
    return found, [], []


def _room(engine: int | None, device: torch.device) -> Callable[[int], torch.Tensor]:
    """Return what gives device memory into which frames are decoded."""
    import torch

    if engine is not None:
        return partial(arena.device_memory, device=device)
    return partial(torch.empty, dtype=torch.uint8, device=device)


def _decompress(
    records: np.ndarray[Any, Any], source: Sequence[torch.Tensor], stored: _Stored, memory: torch.Tensor, place: I64,
    engine: int | None,
) -> list[Check]:  # fmt: skip
    """Decompress frames into device memory, all of a codec in one batch. place: where each goes."""
    raw = records["raw"].astype(np.int64)
    checks = []
    for codec in np.unique(records["codec"]).tolist():
        some = records["codec"] == codec
        offset, nbytes = stored.offset[some], stored.nbytes[some]
        if codec == codecs.RAW:
            nvcomp.place(source, offset, memory, place[some], nbytes)
            continue
        by, scratch = nvcomp.CUDA, None
        if engine is not None and codec in arena.READS:
            by = engine
            need = nvcomp.scratch_nbytes(codec, raw[some], memory.device, backend=by)
            scratch = arena.device_memory(need, memory.device)
        rows = (offset, nbytes, memory, place[some], raw[some])
        checks.append(nvcomp.decompress(codec, source, *rows, backend=by, scratch=scratch))
    return checks


def _require_masks(tables: Tables, frames: np.ndarray[Any, Any]) -> None:
    """Raise FormatError unless frames are masks of their groups, cut as the format says. frames: FRAME records."""
    group, block, raw = (frames[n].astype(np.int64) for n in ("group", "block", "raw"))
    whole, rest = np.divmod(tables.group_nbytes[group], MASK_FRAME)
    due = np.where(block < whole, MASK_FRAME, np.where(block == whole, rest, 0))
    unsorted = (np.diff(group, prepend=-1) == 0) & (np.diff(block, prepend=-1) <= 0)
    plain = (frames["codec"] == codecs.RAW) & (frames["outer"] == codecs.RAW)
    bad = (frames["plane"] != MASK) | (raw != due) | (due == 0) | unsorted | plain & (frames["stored"] != raw)
    bad |= (frames["codec"] >= len(codecs.NAMES)) | ~np.isin(frames["outer"], (codecs.RAW, codecs.ZSTD))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise FormatError(
            f"group {group[i]} ({tables.tiling.group_names(int(group[i]))}): frame of {raw[i]} bytes of plane "
            f"{frames['plane'][i]}, block {block[i]}, is not the next one of its mask, or not cut as masks are"
        )


def _require_columns(tables: Tables, frames: np.ndarray[Any, Any]) -> tuple[Shape, I64]:
    """Return the shape of the columns that frames make up, and where in its memory each frame goes.

    frames: FRAME records, sorted by group, plane and place. Raises FormatError unless they are cut as the format says
    and the planes of each group fit each other; whether the counts demand as much is seen when they are decoded.
    """
    group, plane, raw = (frames[n].astype(np.int64) for n in ("group", "plane", "raw"))
    begins = np.flatnonzero(np.diff(group * 256 + plane, prepend=-1))
    lengths = np.diff(begins, append=len(frames))
    in_plane = np.arange(len(frames)) - np.repeat(begins, lengths)
    last = np.repeat(begins + lengths, lengths) - 1 == np.arange(len(frames))
    numbers, row = np.unique(group, return_inverse=True)
    planes = np.zeros((len(numbers), 256), np.int64)
    np.add.at(planes, (row, plane), raw)
    tiles, width = tables.group_tiles[numbers], tables.group_width[numbers]
    k, d = planes[:, GAP], planes[:, DENSE]
    due = np.zeros_like(planes)
    due[:, COUNTS] = 2 * tiles
    for first, number, size in ((GAP, np.full(len(numbers), 2), k), (VALUE, width, k), (DENSE, width, d)):
        for p in range(8 if first != GAP else 2):
            due[:, first + p] = np.where(p < number, size, 0)
    # Before room is made for what frames announce.
    wrong = (planes != due).any(axis=1) | (k + d == 0) | (k + d > tables.group_elements[numbers])
    uneven = (raw != PLANE_FRAME) & ~(last & (raw > 0) & (raw < PLANE_FRAME))
    plain = (frames["codec"] == codecs.RAW) & (frames["outer"] == codecs.RAW)
    uneven |= (frames["block"] != 0) | plain & (frames["stored"] != frames["raw"])
    uneven |= (frames["codec"] >= len(codecs.NAMES)) | ~np.isin(frames["outer"], (codecs.RAW, codecs.ZSTD))
    bad = np.flatnonzero(wrong[row] | uneven)
    if len(bad):
        first = int(group[bad[0]])
        sizes = {p: int(n) for p, n in enumerate(planes[row[bad[0]]].tolist()) if n}
        raise FormatError(
            f"group {first} ({tables.tiling.group_names(first)}): frames of {sizes} bytes by plane, or how they are "
            "cut, do not make up its columns"
        )
    shape = Shape(tables, numbers, k, d)
    return shape, shape.plane_begin(row, plane) + in_plane * PLANE_FRAME


def _decode_on_host(
    tables: Tables, groups: Iterable[tuple[int, Sequence[Frame]]], threads: int | None
) -> tuple[DeviceColumns, list[object]]:
    """Decode groups on the CPU; returns their columns, and the host memory from which they are still being copied."""
    import torch

    def work(item: tuple[int, Sequence[Frame]]) -> tuple[int, int, int, torch.Tensor]:
        group, frames = item
        held: list[torch.Tensor] = []

        def allocate(nbytes: int) -> U8:
            held.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
            return held[0].numpy()

        columns = backend.decode_columns(tables.tiling, group, frames, threads=1, allocate=allocate)
        return group, columns.gaps.shape[1], columns.dense.shape[1], held[0]

    found = list(in_order(work, groups, threads))
    group, k, d = (np.array([f[i] for f in found], np.int64) for i in range(3))
    shape = Shape(tables, group, k, d, align=1)
    memory = torch.empty(max(1, shape.nbytes), dtype=torch.uint8, device=tables.device)
    for begin, (*_, host) in zip(shape.begin.tolist(), found, strict=True):
        memory[begin : begin + len(host)].copy_(host, non_blocking=True)
    return DeviceColumns.of(shape, memory), [f[3] for f in found]
