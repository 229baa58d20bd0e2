"""The CUDA backend: the same calls as `backend`, for tensors on an NVIDIA GPU.

Changes are extracted, applied and fingerprinted on the device, by one launch for all tensors; frames are compressed and
decompressed on the CPU while the device goes on. Memory of its own: tables of 10 bytes a tile, two windows of columns,
and the columns of what is staged. The only module that needs cuda-core; torch owns all device memory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from deltackpt import backend
from deltackpt import codec as codecs
from deltackpt.backend import Staged
from deltackpt.digest import U64
from deltackpt.errors import ConfigError, Poisoned
from deltackpt.layout import TILE, Layout
from deltackpt.shard import COUNTS, DENSE, GAP, PLANE_FRAME, VALUE, EncodedGroup, Frame

if TYPE_CHECKING:
    import torch

_THREADS = 256
_WINDOW = 4 << 30
"""Bytes of weights per extract launch; whole groups."""
_TASK = 4 << 20
"""Raw bytes of a plane that one task compresses; whole frames."""
_ROOM = 1 / 32
"""Share of a window's elements for which room is made at first; a window with more changes is extracted again."""

_GROUP = np.dtype(
    [("counts", "<u8"), ("gaps", "<u8"), ("values", "<u8"), ("dense", "<u8"), ("offset", "<u8"), ("k", "<u8"),
     ("d", "<u8"), ("first_tile", "<u4"), ("tiles", "<u4"), ("width", "<u4"), ("before", "<u4")]
)  # fmt: skip
"""struct Group of kernels.cu."""


class _Kernels:
    """The compiled kernels of one device; cached on disk by source and architecture."""

    def __init__(self, device: int) -> None:
        from cuda.core import Device, LaunchConfig, ObjectCode, Program, ProgramOptions, launch

        self._launch, self._config = launch, LaunchConfig
        self.device = Device(device)
        self.device.set_current()
        major, minor = self.device.compute_capability
        source = Path(__file__).with_name("kernels.cu").read_text()
        architecture = f"sm_{major}{minor}"
        name = hashlib.sha256(f"{architecture}\n{source}".encode()).hexdigest()
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        cached = Path(root, "deltackpt", f"{name}.cubin")
        if cached.exists():
            code = ObjectCode.from_cubin(cached.read_bytes())
        else:
            options = ProgramOptions(std="c++17", arch=architecture)
            code = Program(source, code_type="c++", options=options).compile("cubin")
            cached.parent.mkdir(parents=True, exist_ok=True)
            temporary = cached.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(bytes(code.code))
            temporary.replace(cached)
        names = ("extract_1", "extract_2", "extract_4", "extract_8", "compact", "scan", "apply", "fingerprint")
        self._kernels = {n: code.get_kernel(n) for n in names}

    def __call__(self, name: str, blocks: int, threads: int, *args: Any) -> None:
        """Launch on torch's current stream. Tensors are passed by address, numpy scalars as they are."""
        import torch

        stream = self.device.create_stream(_Stream(torch.cuda.current_stream().cuda_stream))
        values = [np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args]
        self._launch(stream, self._config(grid=blocks, block=threads), self._kernels[name], *values)


_Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True)
class _Stream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@lru_cache
def _kernels(device: int) -> _Kernels:
    return _Kernels(device)


class _Tables:
    """The tiles and rows of a layout in device memory; see kernels.cu."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        import torch

        groups = layout.groups
        rows = [g.tensor for g in groups]
        self.tensor = np.concatenate(rows) if rows else np.empty(0, np.int64)
        self.start = np.concatenate([g.start for g in groups]) if groups else np.empty(0, np.int64)
        self.count = np.concatenate([g.count for g in groups]) if groups else np.empty(0, np.int64)
        self.width = np.repeat([g.width for g in groups], [len(r) for r in rows]).astype(np.int64)
        self.row_begin = np.cumsum([0] + [len(r) for r in rows])
        per_row = -(-self.count // TILE)
        self.tiles = int(per_row.sum())
        self.tile_begin = np.cumsum([0] + [g.tiles for g in groups])
        first = np.cumsum(per_row) - per_row
        tile_row = np.repeat(np.arange(len(per_row), dtype=np.uint32), per_row)
        tile_index = (np.arange(self.tiles) - np.repeat(first, per_row)).astype(np.uint32)

        def put(array: np.ndarray[Any, Any]) -> torch.Tensor:
            signed = array if array.itemsize == 1 else array.view(f"<i{array.itemsize}")
            return torch.from_numpy(signed).to(device)

        self.device, self.put = device, put
        self.rows = (put(tile_row), put(tile_index), put(self.count), put(self.start))
        self.row_width = put(self.width.astype(np.uint8))
        lengths = np.concatenate([g.tile_lengths for g in groups]) if groups else np.empty(0, np.int64)
        self.tile_length = put(lengths.astype(np.int16))

    def row_addresses(self, tensors: U64) -> torch.Tensor:
        """Upload the address of each row, given that of each tensor."""
        return self.put(tensors[self.tensor] + (self.start * self.width).astype(np.uint64))

    def per_tensor(self, layout: Layout, per_row: torch.Tensor) -> U64:
        """Add values of rows up per tensor, mod 2^64."""
        total = np.zeros(len(layout.names), np.uint64)
        np.add.at(total, self.tensor, per_row.cpu().numpy().view(np.uint64))
        return total


@lru_cache(maxsize=4)
def _tables(layout: Layout, device: torch.device) -> _Tables:
    return _Tables(layout, device)


def _zeros(n: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.zeros(max(1, n), dtype=dtype, device=device)


# ---------------------------------------------------------------- encode


class Extraction:
    """Columns of all changed groups, in pinned host memory, with what they add to each row's fingerprint.

    Made by `extract`. An Encoding: `groups` compresses, `advance` applies the columns to the base.
    """

    def __init__(self, layout: Layout, tables: _Tables, codec: str, threads: int | None) -> None:
        self.layout, self.tables, self._codec, self._threads = layout, tables, codecs.NAMES.index(codec), threads
        self.columns: list[_DeviceGroup] = []
        self.ready: list[torch.cuda.Event] = []
        self.fp: U64 = np.empty(0, np.uint64)
        self.changed: np.ndarray[Any, np.dtype[np.int64]] = np.empty(0, np.int64)

    def groups(self) -> Iterator[EncodedGroup]:
        """Yield the encoded groups, sorted."""
        tasks = [
            (i, plane, raw[begin : begin + _TASK])
            for i, group in enumerate(self.columns)
            for plane, raw in group.planes(self.layout).items()
            for begin in range(0, len(raw), _TASK)
        ]

        def work(task: tuple[int, int, Any]) -> tuple[int, list[Frame]]:
            i, plane, raw = task
            self.ready[i].synchronize()
            begins = range(0, len(raw), PLANE_FRAME)
            return i, [backend.compress(plane, 0, self._codec, raw[b : b + PLANE_FRAME], False) for b in begins]

        waiting: list[Frame] = []
        at = 0
        for i, frames in backend.in_order(work, tasks, self._threads):
            if i != at:
                yield self._group(at, waiting)
                waiting, at = [], i
            waiting += frames
        if waiting:
            yield self._group(at, waiting)

    def _group(self, i: int, frames: list[Frame]) -> EncodedGroup:
        group = self.columns[i].group
        rows = slice(*self.tables.row_begin[group : group + 2])
        touched = np.flatnonzero(self.changed[rows])
        tensor = self.tables.tensor[rows][touched]
        return EncodedGroup(group, tuple(frames), tensor, self.fp[rows][touched], int(self.changed[rows].sum()))

    def advance(self, base: U64) -> None:
        """Apply the columns at the addresses of the base."""
        apply(StagedColumns(self.layout, self.tables.device, self.columns), base)


def extract(
    layout: Layout, old: U64, new: U64, device: torch.device, *, codec: str = "zstd", threads: int | None = None
) -> Extraction:
    """Compare two copies of the tensors on a device and bring the columns of the changes to host memory.

    old, new: u64 device address of each tensor's contiguous bytes. Returns when both copies have been read; the columns
    may still be on their way.
    """
    import torch

    tables, kernels = _tables(layout, device), _kernels(device.index or 0)
    result = Extraction(layout, tables, codec, threads)
    sides = (tables.row_addresses(old), tables.row_addresses(new))
    sums = (_zeros(len(tables.tensor), device, torch.int64), _zeros(len(tables.tensor), device, torch.int64))
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    waiting: _Window | None = None
    # The device extracts the next window while this thread reads the sums of the one before.
    for window in [*(_Window(layout, tables, groups) for groups in _windows(layout)), None]:
        if window is not None:
            window.extract(kernels, sides, sums)
        if waiting is not None:
            waiting.compact(kernels, sides, sums)
            waiting.to_host(result, copies)
        waiting = window
    result.fp = sums[0].cpu().numpy().view(np.uint64)
    result.changed = sums[1].cpu().numpy()
    return result


def _windows(layout: Layout) -> Iterator[range]:
    """Runs of groups of one width, about _WINDOW bytes each."""
    begin, nbytes = 0, 0
    for g, group in enumerate(layout.groups):
        if g > begin and (group.width != layout.groups[begin].width or nbytes + group.nbytes > _WINDOW):
            yield range(begin, g)
            begin, nbytes = g, 0
        nbytes += group.nbytes
    if begin < len(layout.groups):
        yield range(begin, len(layout.groups))


class _Window:
    """Whole groups of one width, and the columns that an extract launch makes of them.

    k, d: sparse changes and dense elements before each group, and in all.
    """

    def __init__(self, layout: Layout, tables: _Tables, groups: range) -> None:
        self.layout, self.tables, self.groups = layout, tables, groups
        self.width = layout.groups[groups.start].width
        self.first, last = int(tables.tile_begin[groups.start]), int(tables.tile_begin[groups.stop])
        self.tiles = last - self.first
        self.room = int(sum(int(layout.groups[g].count.sum()) for g in groups) * _ROOM) + TILE
        self.dense_room = 0

    def extract(self, kernels: _Kernels, sides: _Pair, sums: _Pair) -> None:
        """Launch; the sums per group are on their way to the host when this returns."""
        import torch

        device, tables = self.tables.device, self.tables
        cursor = _zeros(2, device, torch.int64)
        self.counts = torch.empty(self.tiles, dtype=torch.int16, device=device)
        self.place = torch.empty(self.tiles, dtype=torch.int32, device=device)
        self.sparse = torch.empty((2 + self.width, self.room), dtype=torch.uint8, device=device)
        self.dense = torch.empty((self.width, self.dense_room), dtype=torch.uint8, device=device)
        kernels(
            f"extract_{self.width}", self.tiles, _THREADS, *tables.rows, *sides, np.uint32(self.first), cursor,
            self.counts, self.place, self.sparse, self.dense, np.uint64(self.room), np.uint64(self.dense_room), *sums,
        )  # fmt: skip
        is_dense = self.counts == -1
        lengths = tables.tile_length[self.first : self.first + self.tiles] * is_dense
        taken = torch.where(is_dense, 0, self.counts).to(torch.int64) + (lengths.to(torch.int64) << 32)
        ends = torch.cumsum(taken, 0)
        self.offset = ends - taken
        last = tables.tile_begin[self.groups.start + 1 : self.groups.stop + 1] - self.first - 1
        self._ends = torch.empty(len(last), dtype=torch.int64, pin_memory=True)
        self._ends.copy_(ends[torch.as_tensor(last, device=device)], non_blocking=True)
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._ready.record()

    def compact(self, kernels: _Kernels, sides: _Pair, sums: _Pair) -> None:
        """Put the columns in order; extracts again where there was too little room."""
        import torch

        while True:
            self._ready.synchronize()
            ends = self._ends.numpy()
            self.k = np.concatenate(([0], ends & 0xFFFFFFFF))
            self.d = np.concatenate(([0], ends >> 32))
            if self.k[-1] <= self.room and self.d[-1] <= self.dense_room:
                break
            self.room, self.dense_room = int(self.k[-1]), int(self.d[-1])
            rows = slice(*self.tables.row_begin[[self.groups.start, self.groups.stop]].tolist())
            for per_row in sums:
                per_row[rows] = 0
            self.extract(kernels, sides, sums)
        k, d = int(self.k[-1]), int(self.d[-1])
        sparse = torch.empty((2 + self.width, k), dtype=torch.uint8, device=self.tables.device)
        dense = torch.empty((self.width, d), dtype=torch.uint8, device=self.tables.device)
        kernels(
            "compact", -(-self.tiles * 32 // _THREADS), _THREADS, np.uint32(self.tiles), np.uint32(self.width),
            self.counts, self.place, self.offset, self.sparse, self.dense, np.uint64(self.room),
            np.uint64(self.dense_room), sparse, dense, np.uint64(k), np.uint64(d), *self.tables.rows,
            np.uint32(self.first),
        )  # fmt: skip
        self.sparse, self.dense = sparse, dense

    def to_host(self, result: Extraction, copies: torch.cuda.Stream) -> None:
        """Start copies of the planes to pinned memory, group by group."""
        import torch

        copies.wait_stream(torch.cuda.current_stream())
        for i, g in enumerate(self.groups):
            (k, k_end), (d, d_end) = self.k[i : i + 2].tolist(), self.d[i : i + 2].tolist()
            if (k, d) == (k_end, d_end):
                continue
            tiles = slice(*(self.tables.tile_begin[g : g + 2] - self.first).tolist())
            counts = self.counts[tiles].view(torch.uint8)
            n, m, at = k_end - k, d_end - d, len(counts)
            nbytes = at + (2 + self.width) * n + self.width * m
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(copies):
                host[:at].copy_(counts, non_blocking=True)
                for planes, begin, end in ((self.sparse, k, k_end), (self.dense, d, d_end)):
                    for plane in planes:
                        host[at : at + end - begin].copy_(plane[begin:end], non_blocking=True)
                        at += end - begin
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                event.record()
            result.columns.append(_DeviceGroup(g, host, n, m))
            result.ready.append(event)
        for tensor in (self.counts, self.sparse, self.dense):
            tensor.record_stream(copies)


# ---------------------------------------------------------------- stage and apply


@dataclass(frozen=True)
class _DeviceGroup:
    """Columns of a group in one pinned buffer: counts, gap.0, gap.1, value.0 .., dense.0 ..; k, d: plane lengths."""

    group: int
    host: torch.Tensor
    k: int
    d: int

    def planes(self, layout: Layout) -> dict[int, np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return the planes that are not empty, by number, sorted."""
        raw, segments = self.host.numpy(), layout.groups[self.group]
        sizes = {COUNTS: 2 * segments.tiles, GAP: self.k, GAP + 1: self.k}
        sizes |= {VALUE + j: self.k for j in range(segments.width)} | {DENSE + j: self.d for j in range(segments.width)}
        planes, at = {}, 0
        for plane, nbytes in sizes.items():
            if nbytes:
                planes[plane] = raw[at : at + nbytes]
            at += nbytes
        return planes


class StagedColumns:
    """Columns of a version in device memory, ready for the one launch."""

    def __init__(self, layout: Layout, device: torch.device, groups: Sequence[_DeviceGroup]) -> None:
        import torch

        self.layout, self.tables, self.device = layout, _tables(layout, device), device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        records = np.zeros(len(groups), _GROUP)
        self._held: list[torch.Tensor] = []
        before = 0
        with torch.cuda.stream(self._stream):
            for i, group in enumerate(sorted(groups, key=lambda g: g.group)):
                width = layout.groups[group.group].width
                first, last = self.tables.tile_begin[group.group : group.group + 2].tolist()
                columns = group.host.to(device, non_blocking=True)
                offset = torch.empty(last - first, dtype=torch.int64, device=device)
                gaps = columns.data_ptr() + 2 * (last - first)
                values = gaps + 2 * group.k
                records[i] = (
                    columns.data_ptr(), gaps, values, values + width * group.k, offset.data_ptr(),
                    group.k, group.d, first, last - first, width, before,
                )  # fmt: skip
                before += last - first
                self._held += [columns, offset, group.host]
            self.tiles, self.groups = before, len(groups)
            self._records = torch.from_numpy(records.view(np.uint8).copy()).to(device)
            if groups:
                _kernels(device.index or 0)("scan", len(groups), 1024, *self.tables.rows, self._records)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._done.record(self._stream)

    def wait(self) -> None:
        """Return when everything is in device memory."""
        self._done.synchronize()

    def apply(self, rows: torch.Tensor, fp: torch.Tensor) -> None:
        """Launch the apply on torch's current stream; `fp` is added to, per row."""
        import torch

        torch.cuda.current_stream().wait_event(self._done)
        if self.tiles:
            blocks = -(-self.tiles * 32 // _THREADS)
            _kernels(self.device.index or 0)(
                "apply", blocks, _THREADS, *self.tables.rows, rows, self._records,
                np.uint32(self.groups), np.uint32(self.tiles), fp,
            )  # fmt: skip


def stage(
    layout: Layout, encoded: Iterable[tuple[int, Sequence[Frame]]], device: torch.device, *, threads: int | None = None
) -> StagedColumns:
    """Decode and check groups on the CPU, side by side, and bring their columns to the device.

    encoded: group number and its frames, sorted by plane and place. Raises FormatError before anything is applied.
    """

    def work(item: tuple[int, Sequence[Frame]]) -> _DeviceGroup:
        group, frames = item
        return _pin(layout, backend.decode_group(layout, group, frames, threads=1))

    return StagedColumns(layout, device, list(backend.in_order(work, encoded, threads)))


def _pin(layout: Layout, staged: Staged) -> _DeviceGroup:
    import torch

    columns = staged.columns
    parts = (
        columns.counts.view(np.uint8),
        columns.gaps.reshape(-1),
        columns.values.reshape(-1),
        columns.dense.reshape(-1),
    )
    host = torch.empty(sum(map(len, parts)), dtype=torch.uint8, pin_memory=True)
    np.concatenate(parts, out=host.numpy())
    return _DeviceGroup(staged.group, host, columns.gaps.shape[1], columns.dense.shape[1])


def apply(staged: StagedColumns, tensors: U64) -> U64:
    """Apply staged columns in place; returns what that added to the fingerprint of each tensor.

    tensors: u64 device address of each tensor's contiguous bytes. Returns when the device is done.
    """
    import torch

    tables = staged.tables
    fp = _zeros(len(tables.tensor), staged.device, torch.int64)
    staged.apply(tables.row_addresses(tensors), fp)
    return tables.per_tensor(staged.layout, fp)


def fingerprints(layout: Layout, tensors: U64, device: torch.device) -> U64:
    """Return the fingerprint of each tensor: a full pass over device memory."""
    import torch

    tables = _tables(layout, device)
    fp = _zeros(len(tables.tensor), device, torch.int64)
    if tables.tiles:
        _kernels(device.index or 0)(
            "fingerprint", tables.tiles, _THREADS, *tables.rows, tables.row_addresses(tensors), tables.row_width,
            np.uint32(tables.tiles), fp,
        )  # fmt: skip
    return tables.per_tensor(layout, fp)


class Cuda:
    """Tensors on one NVIDIA GPU. See backend.Device.

    on: torch device, as text. Raises ConfigError, naming what to install, where it cannot work.
    """

    detached = True

    def __init__(self, on: str, threads: int | None = None) -> None:
        import torch

        self.device, self.threads = torch.device(on), threads
        if torch.version.hip is not None:
            raise ConfigError(f"tensors on {on}: an AMD GPU; move them to the CPU")
        if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
            raise ConfigError(f"tensors on {on} need cuda-core; pip install 'deltackpt[cuda13]' (or cuda12)")

    def encode(self, layout: Layout, old: U64, new: U64, *, codec: str, form: str) -> Extraction:
        """See backend.Device."""
        if form != "sparse" or codec not in codecs.NAMES or codec == "ans":
            raise ConfigError(f"codec {codec!r} with form {form!r} is not made on a GPU; expected zstd and sparse")
        return extract(layout, old, new, self.device, codec=codec, threads=self.threads)

    def stage(self, layout: Layout, groups: Iterable[tuple[int, Sequence[Frame]]]) -> list[StagedColumns]:
        """See backend.Device."""
        staged = stage(layout, groups, self.device, threads=self.threads)
        staged.wait()
        return [staged]

    def apply(self, layout: Layout, staged: Sequence[object], tensors: U64) -> U64:
        """See backend.Device. Returns when the device is done."""
        total = np.zeros(len(layout.names), np.uint64)
        for columns in staged:
            assert isinstance(columns, StagedColumns)
            total = total + apply(columns, tensors)
        return total

    def fingerprints(self, layout: Layout, tensors: U64) -> U64:
        """See backend.Device."""
        return fingerprints(layout, tensors, self.device)

    def allocate(self, nbytes: int) -> tuple[object, int]:
        """See backend.Device."""
        import torch

        memory = torch.empty(max(1, nbytes), dtype=torch.uint8, device=self.device)
        return memory, memory.data_ptr()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See backend.Device."""
        from cuda.bindings import driver

        (error,) = driver.cuMemcpy(target, source, nbytes)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise Poisoned(f"copying {nbytes} bytes on {self.device}: {error.name}; the CUDA context is lost, restart")
