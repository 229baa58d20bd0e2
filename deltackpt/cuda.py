"""The CUDA backend: the same calls as `backend`, for tensors on an NVIDIA GPU.

Changes are extracted, applied and fingerprinted on the device, by one launch for all tensors; frames are compressed and
decompressed on the CPU while the device goes on. Memory of its own: tables of 10 bytes a tile, two windows of columns,
and the columns of what is staged. The only module that needs cuda-core; torch owns all device memory. Longer
than most modules: the tables, windows and launches of a device are of no use apart.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from deltackpt import backend
from deltackpt import codec as codecs
from deltackpt.digest import U64
from deltackpt.errors import ConfigError, FormatError, Poisoned
from deltackpt.kernels import require_counts
from deltackpt.layout import TILE, Layout, Tiling
from deltackpt.shard import COUNTS, DENSE, GAP, PLANE_FRAME, VALUE, EncodedGroup, Frame

if TYPE_CHECKING:
    import torch

_THREADS = 256
_WINDOW = 4 << 30
"""Bytes of weights per extract launch; whole groups."""
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
        names = ("extract_1", "extract_2", "extract_4", "extract_8", "compact", "scan", "check", "apply", "fingerprint")
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
        self.columns: list[_Columns] = []
        self.ready: list[torch.cuda.Event] = []
        self.fp: U64 = np.empty(0, np.uint64)
        self.changed: np.ndarray[Any, np.dtype[np.int64]] = np.empty(0, np.int64)

    def groups(self) -> Generator[EncodedGroup, None, None]:
        """Yield the encoded groups, sorted."""
        threads = self._threads or backend.default_threads()
        for columns, ready in zip(self.columns, self.ready, strict=True):
            ready.synchronize()
            cuts = [
                (place.group, plane, raw[begin : begin + PLANE_FRAME])
                for place in columns.places
                for plane, raw in columns.planes(place).items()
                for begin in range(0, len(raw), PLANE_FRAME)
            ]
            stored = codecs.encode_many(self._codec, [raw for _, _, raw in cuts], threads)
            frames: dict[int, list[Frame]] = {}
            for (group, plane, raw), (used, data) in zip(cuts, stored, strict=True):
                frames.setdefault(group, []).append(Frame(plane, 0, used, codecs.RAW, len(raw), data))
            for group, of_group in frames.items():
                yield self._group(group, of_group)

    def _group(self, group: int, frames: list[Frame]) -> EncodedGroup:
        rows = slice(*self.tables.row_begin[group : group + 2])
        touched = np.flatnonzero(self.changed[rows])
        tensor = self.tables.tensor[rows][touched]
        return EncodedGroup(group, tuple(frames), tensor, self.fp[rows][touched], int(self.changed[rows].sum()))

    def advance(self, base: U64) -> None:
        """Apply the columns at the addresses of the base."""
        for ready in self.ready:
            ready.synchronize()
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
        """Start the copy of all columns to pinned memory."""
        import torch

        changed = np.flatnonzero((np.diff(self.k) > 0) | (np.diff(self.d) > 0)).tolist()
        if not changed:
            return
        k, d = int(self.k[-1]), int(self.d[-1])
        places = [
            _Place(
                self.groups[i], int(self.tables.tile_begin[self.groups[i]]) - self.first, int(self.k[i]), int(self.d[i])
            )
            for i in changed
        ]
        nbytes = 2 * self.tiles + (2 + self.width) * k + self.width * d
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        copies.wait_stream(torch.cuda.current_stream())
        at = 0
        with torch.cuda.stream(copies):
            for part in (self.counts.view(torch.uint8), self.sparse.view(-1), self.dense.view(-1)):
                host[at : at + len(part)].copy_(part, non_blocking=True)
                part.record_stream(copies)
                at += len(part)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            event.record()
        result.columns.append(_Columns(self.layout, host, self.tiles, k, d, tuple(places)))
        result.ready.append(event)


# ---------------------------------------------------------------- stage and apply


@dataclass(frozen=True)
class _Place:
    """Where a group's columns begin: its first tile, sparse change and dense element."""

    group: int
    tile: int
    k: int
    d: int


@dataclass(frozen=True)
class _Columns:
    """Columns of groups of one width in one pinned buffer: counts, gap.0, gap.1, value.0 .., dense.0 ..

    k, d: bytes of a sparse and of a dense plane.
    """

    layout: Layout
    host: torch.Tensor
    tiles: int
    k: int
    d: int
    places: tuple[_Place, ...]

    def planes(self, place: _Place) -> dict[int, np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return the planes of a group that are not empty, by number, sorted."""
        segments, raw, at = self.layout.groups[place.group], self.host.numpy(), 2 * self.tiles
        width = segments.width
        counts = raw[2 * place.tile : 2 * (place.tile + segments.tiles)]
        k, d = require_counts(segments.tile_lengths, counts.view("<u2"))
        found = {COUNTS: counts}
        for plane in (GAP, GAP + 1, *range(VALUE, VALUE + width)):
            found[plane] = raw[at + place.k : at + place.k + k]
            at += self.k
        for plane in range(DENSE, DENSE + width):
            found[plane] = raw[at + place.d : at + place.d + d]
            at += self.d
        return {plane: p for plane, p in found.items() if len(p)}


class StagedColumns:
    """Columns of a version in device memory, ready for the one launch."""

    def __init__(self, layout: Layout, device: torch.device, columns: Sequence[_Columns]) -> None:
        import torch

        self.layout, self.tables, self.device = layout, _tables(layout, device), device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        records = np.zeros(sum(len(c.places) for c in columns), _GROUP)
        self.tiles = sum(layout.groups[p.group].tiles for c in columns for p in c.places)
        before = row = 0
        with torch.cuda.stream(stream):
            self._bad = torch.full((1,), -1, dtype=torch.int32, device=device)
            offset = torch.empty(max(1, self.tiles), dtype=torch.int64, device=device)
            self._held = [offset]
            for part in columns:
                memory = part.host.to(device, non_blocking=True)
                self._held += [memory, part.host]
                gaps = memory.data_ptr() + 2 * part.tiles
                for place in part.places:
                    segments = layout.groups[place.group]
                    values = gaps + 2 * part.k
                    records[row] = (
                        memory.data_ptr() + 2 * place.tile, gaps + place.k, values + place.k,
                        values + segments.width * part.k + place.d, offset.data_ptr() + 8 * before, part.k, part.d,
                        self.tables.tile_begin[place.group], segments.tiles, segments.width, before,
                    )  # fmt: skip
                    before += segments.tiles
                    row += 1
            self.groups = row
            self._records = torch.from_numpy(records.view(np.uint8)).to(device)
            if row:
                kernels = _kernels(device.index or 0)
                kernels("scan", row, 1024, *self.tables.rows, self._records)
                kernels(
                    "check", -(-self.tiles * 32 // _THREADS), _THREADS, *self.tables.rows, self._records,
                    np.uint32(row), np.uint32(self.tiles), self._bad,
                )  # fmt: skip
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._done.record(stream)

    def wait(self) -> None:
        """Return when everything is in device memory and checked. Raises FormatError for a change outside its tile."""
        self._done.synchronize()
        bad = int(self._bad.item())
        if bad >= 0:
            raise FormatError(f"tile {bad} of the version: its last change lies outside the tile")

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
    """Decode groups on the CPU, side by side, into pinned memory; bring their columns to the device, check them there.

    encoded: group number and its frames, sorted by plane and place. Raises FormatError before anything is applied.
    """

    import torch

    def work(item: tuple[int, Sequence[Frame]]) -> _Columns:
        group, frames = item

        held: list[torch.Tensor] = []

        def allocate(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
            held.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
            return held[0].numpy()

        columns = backend.decode_columns(layout, group, frames, threads=1, allocate=allocate)
        tiles, k, d = len(columns.counts), columns.gaps.shape[1], columns.dense.shape[1]
        return _Columns(layout, held[0], tiles, k, d, (_Place(group, 0, 0, 0),))

    return StagedColumns(layout, device, list(backend.in_order(work, encoded, threads)))


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

    def hold(self, tensors: Sequence[object]) -> tuple[object, U64]:
        """See backend.Device."""
        return tensors, backend.pointers(tensors)

    def encode(self, layout: Layout, old: U64, new: U64, *, codec: str, form: str) -> Extraction:
        """See backend.Device."""
        if form != "sparse" or codec not in codecs.NAMES or codec == "ans":
            raise ConfigError(f"codec {codec!r} with form {form!r} is not made on a GPU; expected zstd and sparse")
        return extract(layout, old, new, self.device, codec=codec, threads=self.threads)

    def stage(self, tiling: Tiling, groups: Iterable[tuple[int, Sequence[Frame]]]) -> list[StagedColumns]:
        """See backend.Device. Raises ConfigError for a version in parts."""
        if not isinstance(tiling, Layout):
            raise ConfigError(
                f"tensors on {self.device}: versions that were published in parts are applied on the CPU only; "
                "follow with tensors on the CPU, or publish from one process"
            )
        staged = stage(tiling, groups, self.device, threads=self.threads)
        staged.wait()
        return [staged]

    def apply(self, tiling: Tiling, staged: Sequence[object], tensors: U64) -> U64:
        """See backend.Device. Returns when the device is done."""
        total = np.zeros(len(tiling.layout.names), np.uint64)
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
