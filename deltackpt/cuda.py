"""The CUDA backend: the same calls as `backend`, for tensors on an NVIDIA GPU.

Changes are extracted, put in order, applied and fingerprinted on the device, by one launch for all tensors of a window
or of a version. Frames are compressed on the CPU or by nvCOMP, and decompressed by nvCOMP, by a Decompression Engine or
on the CPU. Memory of its own: tables of 10 bytes a tile, two windows of changes, the columns of what is published or
staged, and what nvCOMP works in. The only module that needs cuda-core besides `nvcomp`; torch owns the memory, but
for arenas. Longer than most modules: the tables, windows and launches of a device are of no use apart.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from deltackpt import arena, backend, libnvcomp, nvcomp
from deltackpt import codec as codecs
from deltackpt.codec import Bytes
from deltackpt.digest import U64
from deltackpt.errors import ConfigError, FormatError, Poisoned
from deltackpt.kernels import U8, Columns, Place, first_elements
from deltackpt.layout import I64, TILE, Layout, Segments, Tiling
from deltackpt.partition import Partition
from deltackpt.pool import default_threads, in_order, submit
from deltackpt.shard import ALIGN, COUNTS, DENSE, FRAME, GAP, MASK, PLANE_FRAME, VALUE, EncodedGroup, Fetched, Frame

if TYPE_CHECKING:
    import torch

    from deltackpt.nvcomp import Check

KERNELS = (
    "extract_1", "extract_2", "extract_4", "extract_8", "compact", "scan", "check", "apply", "scatter", "fingerprint",
    "fingerprint_boxes",
)  # fmt: skip
"""Entry points of kernels.cu."""
_THREADS = 256
_WINDOW = 4 << 30
"""Bytes of weights per extract launch; whole groups."""
_ROOM = 1 / 64
"""Share of a window's elements for which room is made at first; a window with more changes is extracted again."""
_SPARE = 1.25
"""Room that is made for a window from then on, in terms of what it needed last."""
_ON_DEVICE = (codecs.ANS, codecs.DEFLATE, codecs.LZ4, codecs.SNAPPY)
"""Codecs of which columns are compressed on the device; the zstd of a CPU makes smaller frames as fast."""

_GROUP = np.dtype(
    [("counts", "<u8"), ("gaps", "<u8"), ("values", "<u8"), ("dense", "<u8"), ("offset", "<u8"), ("k", "<u8"),
     ("d", "<u8"), ("stride", "<u8"), ("dense_stride", "<u8"), ("first_tile", "<u4"), ("tiles", "<u4"),
     ("width", "<u4"), ("before", "<u4")]
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
        self._kernels = {n: code.get_kernel(n) for n in KERNELS}

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


@lru_cache
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return the stream of this process for a kind of work beside the user's."""
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _put(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    import torch

    signed = array if array.itemsize == 1 else array.view(f"<i{array.itemsize}")
    return torch.from_numpy(signed).to(device)


def _tiles(count: I64) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the row and the number in it of every tile of rows of so many elements, u32."""
    per_row = -(-count // TILE)
    row = np.repeat(np.arange(len(count), dtype=np.uint32), per_row)
    first = np.cumsum(per_row) - per_row
    return row, (np.arange(len(row)) - np.repeat(first, per_row)).astype(np.uint32)


@dataclass(frozen=True)
class _Where:
    """Where the rows of a tiling are, on the device.

    runs: address of each row that lies side by side, else 0; boxes: what `scatter` is told of the others, if any.
    """

    runs: torch.Tensor
    boxes: Sequence[Any] | None = None


class _Tables:
    """The tiles and rows of a tiling in device memory; see kernels.cu. In host memory, of each row:

    tensor; box: index of its box, of a layout that of its tensor; start: element of the box at which it begins; first:
    element of the tensor, if the row is a run of them there; count, width; strided: whether it is none.
    """

    def __init__(self, tiling: Tiling, device: torch.device) -> None:
        self.tiling, self.device, self.put = tiling, device, partial(_put, device=device)
        groups = tiling.groups

        def column(of: Callable[[Segments], I64]) -> I64:
            return np.concatenate([np.empty(0, np.int64), *map(of, groups)])

        self.tensor, self.count = column(lambda g: g.tensor), column(lambda g: g.count)
        self.box = column(lambda g: g.tensor if g.box is None else g.box)
        self.start, self.first = column(lambda g: g.start), column(first_elements)
        self.width = column(lambda g: np.full(len(g.tensor), g.width))
        self.boxes = tiling.boxes if isinstance(tiling, Partition) else None
        self.strided = np.zeros(len(self.box), bool) if self.boxes is None else self.boxes.strided[self.box]
        self.row_begin = np.cumsum([0] + [len(g.tensor) for g in groups])
        self.tile_begin = np.cumsum([0] + [g.tiles for g in groups])
        self.tiles = int(self.tile_begin[-1])
        self.needed: dict[int, tuple[int, int]] = {}
        """Sparse changes and dense elements that the window beginning with a group had last."""
        self.group_tiles = np.array([g.tiles for g in groups], np.int64)
        self.group_width = np.array([g.width for g in groups], np.int64)
        self.group_elements = np.array([int(g.count.sum()) for g in groups], np.int64)
        self.rows = (*map(self.put, _tiles(self.count)), self.put(self.count), self.put(self.first))
        self.row_width = self.put(self.width.astype(np.uint8))
        # On the device, since a copy there would wait for the kernel before it.
        self.last_tiles = self.put(self.tile_begin[1:] - 1)
        self.tile_length = self.put(column(lambda g: g.tile_lengths).astype(np.int16))

    @cached_property
    def row_start(self) -> torch.Tensor:
        """`start` on the device."""
        return self.put(self.start)

    def whole(self, tensors: U64) -> _Where:
        """Contiguous tensors at these addresses."""
        runs = self.put(self.run_addresses(tensors))
        if self.boxes is None or not self.strided.any():
            return _Where(runs)
        begin = tensors[self.tensor] + (self.boxes.offset[self.box] * self.width).astype(np.uint64)
        begin[~self.strided] = 0
        return _Where(runs, (self.row_start, self.put(begin), *self._strides))

    def run_addresses(self, tensors: U64) -> U64:
        """Return the address of each row, given that of each contiguous tensor; 0 of those that are no run there."""
        found: U64 = tensors[self.tensor] + (self.first * self.width).astype(np.uint64)
        found[self.strided] = 0
        return found

    @cached_property
    def _strides(self) -> tuple[torch.Tensor, torch.Tensor, np.uint32]:
        assert self.boxes is not None
        nowhere = np.zeros(len(self.box), np.uint64)
        return self._levels(Place.of(self.boxes, self.box, nowhere, self.boxes.stride[self.box]))

    def _levels(self, place: Place) -> tuple[torch.Tensor, torch.Tensor, np.uint32]:
        return self.put(place.first), _levels(place, self.device), np.uint32(place.extent.shape[1])

    def located(self, runs: U64, place: Place | None) -> _Where:
        """Rows at these addresses, others at these places; see kernels.apply."""
        if place is None:
            return _Where(self.put(runs))
        return _Where(self.put(runs), (self.row_start, self.put(place.address), *self._levels(place)))

    def apart(self, boxes: U64, first: int) -> U64:
        """Return the address of each row of boxes that lie side by side, as tensors of their own, from `first` on."""
        inside = (self.box >= first) & (self.box < first + len(boxes))
        found = np.zeros(len(self.box), np.uint64)
        found[inside] = boxes[self.box[inside] - first] + (self.start * self.width)[inside].astype(np.uint64)
        return found

    def looked_at(self, boxes: U64, first: int) -> Sequence[Any] | None:
        """Return what `scatter` is told of the strided rows of such boxes, None if there is none."""
        mine = self.strided & (self.box >= first) & (self.box < first + len(boxes))
        if self.boxes is None or not mine.any():
            return None
        begin = np.zeros(len(self.box), np.uint64)
        begin[mine] = boxes[self.box[mine] - first]
        return self.located(begin, Place.of(self.boxes, self.box, begin)).boxes

    def per_tensor(self, per_row: U64) -> U64:
        """Add values of rows up per tensor, mod 2^64."""
        total = np.zeros(len(self.tiling.layout.names), np.uint64)
        np.add.at(total, self.tensor, per_row)
        return total

    def per_box(self, per_row: U64) -> U64:
        """Add values of rows up per box, mod 2^64."""
        total = np.zeros(len(self.tiling.layout.names if self.boxes is None else self.boxes.tensor), np.uint64)
        np.add.at(total, self.box, per_row)
        return total


def _levels(place: Place, device: torch.device) -> torch.Tensor:
    """Upload the levels of boxes, as the kernels read them."""
    columns = (place.extent, place.stride, place.step, place.low, place.high)
    return _put(np.ascontiguousarray(np.stack(columns, axis=2)), device)


@lru_cache(maxsize=4)
def _tables(tiling: Tiling, device: torch.device) -> _Tables:
    return _Tables(tiling, device)


def _zeros(n: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.zeros(n, dtype=torch.int64, device=device)


def _sums(tables: _Tables) -> torch.Tensor:
    return _zeros(len(tables.tensor), tables.device)


def _unsigned(per_row: torch.Tensor) -> U64:
    found: U64 = per_row.cpu().numpy().view(np.uint64)
    return found


# ---------------------------------------------------------------- columns


def _aligned(nbytes: I64, align: int) -> I64:
    return -(-nbytes // align) * align


class _Shape:
    """Where the columns of groups lie in one memory: of each its counts, gaps, values and dense planes.

    group: numbers; k, d: sparse changes and dense elements; begin: bytes before each group's counts, a multiple of
    ALIGN. Planes begin at multiples of `align` bytes after that.
    """

    def __init__(self, tables: _Tables, group: I64, k: I64, d: I64, align: int = ALIGN) -> None:
        self.group, self.k, self.d = group, k, d
        self.tiles, self.width = tables.group_tiles[group], tables.group_width[group]
        self.first_tile = tables.tile_begin[group]
        self.stride, self.dense_stride = _aligned(k, align), _aligned(d, align)
        self.gaps = _aligned(2 * self.tiles, align)
        sizes = _aligned(self.gaps + (2 + self.width) * self.stride + self.width * self.dense_stride, ALIGN)
        self.begin = np.cumsum(sizes) - sizes
        self.nbytes = int(sizes.sum())

    def plane_begin(self, row: I64, plane: I64) -> I64:
        """Return where planes begin in the memory. row: index in `group`, not its number."""
        stride, dense_stride, width = self.stride[row], self.dense_stride[row], self.width[row]
        sparse = np.where(plane < VALUE, plane - GAP, plane - VALUE + 2) * stride
        dense = (2 + width) * stride + (plane - DENSE) * dense_stride
        inside = self.gaps[row] + np.where(plane < DENSE, sparse, dense)
        return self.begin[row] + np.where(plane == COUNTS, 0, inside)

    def sizes(self, row: int) -> dict[int, int]:
        """Return the bytes of each plane of a group, by number, sorted; empty ones too."""
        width = int(self.width[row])
        found = {COUNTS: 2 * int(self.tiles[row])}
        found |= dict.fromkeys((GAP, GAP + 1, *range(VALUE, VALUE + width)), int(self.k[row]))
        return found | dict.fromkeys(range(DENSE, DENSE + width), int(self.d[row]))

    def planes(self, row: int, memory: U8) -> dict[int, U8]:
        """Return the planes of a group that are not empty, by number, sorted."""
        sizes = self.sizes(row)
        plane = np.array(list(sizes), np.int64)
        begins = self.plane_begin(np.full(len(plane), row), plane).tolist()
        return {p: memory[b : b + n] for (p, n), b in zip(sizes.items(), begins, strict=True) if n}

    def frames(self) -> tuple[I64, I64, I64, I64]:
        """Return how all planes are cut into frames: row in `group`, plane, where it begins in the memory, bytes."""
        planes = [(r, plane, n) for r in range(len(self.group)) for plane, n in self.sizes(r).items()]
        row, plane, nbytes = np.array(planes, np.int64).reshape(-1, 3).T
        cuts = -(-nbytes // PLANE_FRAME)
        of = np.repeat(np.arange(len(nbytes)), cuts)
        inside = (np.arange(len(of)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * PLANE_FRAME
        rest = np.minimum(nbytes[of] - inside, PLANE_FRAME)
        return row[of], plane[of], self.plane_begin(row, plane)[of] + inside, rest

    def records(self, memory: int, offset: int) -> np.ndarray[Any, Any]:
        """Return the records of all groups. memory, offset: addresses of the columns and of a u64 for each tile."""
        found = np.zeros(len(self.group), _GROUP)
        before = np.cumsum(self.tiles) - self.tiles
        found["counts"] = memory + self.begin
        found["gaps"] = memory + self.begin + self.gaps
        found["values"] = found["gaps"] + (2 * self.stride).astype(np.uint64)
        found["dense"] = found["gaps"] + ((2 + self.width) * self.stride).astype(np.uint64)
        found["offset"] = offset + 8 * before
        found["before"] = before
        for name in ("k", "d", "stride", "dense_stride", "first_tile", "tiles", "width"):
            found[name] = getattr(self, name)
        return found


@dataclass(frozen=True)
class _Columns:
    """Columns of groups in device memory. records: by which kernels find them; held: the memory in which they lie."""

    group: I64
    tiles: int
    records: np.ndarray[Any, Any]
    held: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, shape: _Shape, memory: torch.Tensor) -> _Columns:
        """Columns that lie in `memory` as `shape` says, with room for an offset of each tile."""
        import torch

        tiles = int(shape.tiles.sum())
        offset = torch.empty(max(1, tiles), dtype=torch.int64, device=memory.device)
        return cls(shape.group, tiles, shape.records(memory.data_ptr(), offset.data_ptr()), (memory, offset))

    @classmethod
    def joined(cls, columns: Sequence[_Columns]) -> _Columns:
        """Return columns that lie in several memories as one."""
        if len(columns) == 1:
            return columns[0]
        records = np.concatenate([np.empty(0, _GROUP), *(c.records for c in columns)])
        records["before"] = np.cumsum(records["tiles"]) - records["tiles"]
        group = np.concatenate([np.empty(0, np.int64), *(c.group for c in columns)])
        return cls(group, sum(c.tiles for c in columns), records, tuple(t for c in columns for t in c.held))


class _Launch:
    """Launches over the columns of groups, one warp for each tile. records: on the device."""

    def __init__(self, tables: _Tables, columns: _Columns) -> None:
        self.tables, self.columns = tables, columns
        self.records = tables.put(columns.records.view(np.uint8))
        self._kernels = _kernels(tables.device.index or 0)

    def __call__(self, name: str, *args: Any, first: Sequence[Any] = ()) -> None:
        """Launch a kernel. first: what comes before the records, args: what comes after their number."""
        if self.columns.tiles:
            blocks = -(-self.columns.tiles * 32 // _THREADS)
            groups, tiles = np.uint32(len(self.columns.group)), np.uint32(self.columns.tiles)
            self._kernels(name, blocks, _THREADS, *self.tables.rows, *first, self.records, groups, tiles, *args)


# ---------------------------------------------------------------- encode


class Extraction:
    """The columns of all changed groups, with what they add to each row's fingerprint.

    Made by `extract`. An Encoding: `groups` compresses, `advance` applies the columns to the base.
    """

    def __init__(
        self, tables: _Tables, address: Callable[[U64], U64], part: int, codec: int, form: str, threads: int | None
    ) -> None:
        self.tables, self.form = tables, form
        self._address, self._part = address, part
        self._codec, self._threads = codec, threads or default_threads()
        self._parts: list[tuple[_Columns, Callable[[], Future[list[tuple[Frame, ...]]]]]] = []
        self.fp: U64 = np.empty(0, np.uint64)
        self.changed: I64 = np.empty(0, np.int64)

    def add(self, shape: _Shape, columns: _Columns) -> None:
        """Take the columns of a window; those that are compressed on the host set out for it."""
        import torch

        stream = _stream(self.tables.device, "publish")
        stream.wait_stream(torch.cuda.current_stream())
        if self.form == "sparse" and self._codec in _ON_DEVICE and libnvcomp.installed():
            # At once: no thread of the CPU is busy with it.
            made = submit(1, partial(self._on_device, shape, columns))
            self._parts.append((columns, lambda: made))
            return
        with torch.cuda.stream(stream):
            memory = columns.held[0]
            host = torch.empty(len(memory), dtype=torch.uint8, pin_memory=True).copy_(memory, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            ready.record()
        # Not before the trainer may go on: threads that compress would hold up the one that extracts.
        work = partial(self._on_host, shape, host, ready)
        self._parts.append((columns, lambda: submit(1, work)))

    def _on_host(self, shape: _Shape, host: torch.Tensor, ready: torch.cuda.Event) -> list[tuple[Frame, ...]]:
        """Compress on the CPU."""
        ready.synchronize()
        raw, tiling = host.numpy(), self.tables.tiling
        if self.form == "mask":
            return [
                backend.mask_frames(
                    tiling, group, _host_columns(tiling.groups[group], shape.planes(row, raw)), self._codec,
                    self._threads,
                )
                for row, group in enumerate(shape.group.tolist())
            ]  # fmt: skip
        row, plane, begin, nbytes = shape.frames()
        cuts = [raw[b : b + n] for b, n in zip(begin.tolist(), nbytes.tolist(), strict=True)]
        if self._codec == codecs.ZSTD:
            stored = codecs.encode_many(self._codec, cuts, self._threads)
        else:
            stored = list(in_order(partial(codecs.encode, self._codec), cuts, self._threads))
        return _by_row(len(shape.group), row, plane, nbytes, stored)

    def _on_device(self, shape: _Shape, columns: _Columns) -> list[tuple[Frame, ...]]:
        """Compress where the columns are, and bring only that to the host."""
        import torch

        row, plane, begin, nbytes = shape.frames()
        with torch.cuda.stream(_stream(self.tables.device, "publish")):
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
        with torch.cuda.stream(_stream(tables.device, "publish")):
            fp = _sums(tables)
            columns = _Columns.joined([columns for columns, _ in self._parts])
            _Launch(tables, columns)("apply", fp, first=[tables.put(self._address(base))])
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


def _host_columns(segments: Segments, planes: dict[int, U8]) -> Columns:
    """Return planes in host memory as the columns of a group."""

    def joined(first: int, n: int) -> U8:
        found = [planes[p] for p in range(first, first + n) if p in planes]
        return np.stack(found) if found else np.empty((n, 0), np.uint8)

    width = segments.width
    return Columns(planes[COUNTS].view("<u2"), joined(GAP, 2), joined(VALUE, width), joined(DENSE, width))


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
    tables, kernels = _tables(tiling, device), _kernels(device.index or 0)
    address: Callable[[U64], U64] = tables.run_addresses
    groups, boxes = range(len(tiling.groups)), None
    if isinstance(tiling, Partition):
        first = int(tiling.box_begin[part])
        address = partial(tables.apart, first=first)
        groups = range(*tiling.group_begin[part : part + 2].tolist())
        boxes = tables.looked_at(old, first)
    result = Extraction(tables, address, part, codecs.NAMES.index(codec), form, threads)
    sides = (tables.put(address(old)), tables.put(address(new)))
    sums = (_sums(tables), _sums(tables))
    looked = _sums(tables)
    waiting: _Window | None = None
    # The device extracts the next window while this thread reads the sums of the one before.
    for some in itertools.chain(_windows(tables, groups), [None]):
        window = None if some is None else _Window(tables, some)
        if window is not None:
            window.extract(kernels, sides, sums)
        if waiting is not None and (found := waiting.compact(kernels, sides, sums)) is not None:
            if boxes is not None:
                _Launch(tables, found[1])("scatter", np.uint32(False), looked, first=boxes)
            result.add(*found)
        waiting = window
    result.fp = _unsigned(sums[0])
    if boxes is not None:
        # Which elements of its tensor a strided row changed is known only by its box.
        result.fp = np.where(tables.strided, _unsigned(looked), result.fp)
    result.changed = sums[1].cpu().numpy()
    return result


def _windows(tables: _Tables, groups: range) -> Iterator[range]:
    """Runs of groups of one width, about _WINDOW bytes each."""
    begin, nbytes = groups.start, 0
    for g in groups:
        of = tables.group_elements[g] * tables.group_width[g]
        if g > begin and (tables.group_width[g] != tables.group_width[begin] or nbytes + of > _WINDOW):
            yield range(begin, g)
            begin, nbytes = g, 0
        nbytes += of
    if begin < groups.stop:
        yield range(begin, groups.stop)


class _Window:
    """Whole groups of one width, and the changes that an extract launch finds in them, in the order in which it did."""

    def __init__(self, tables: _Tables, groups: range) -> None:
        self.tables, self.groups = tables, groups
        self.width = int(tables.group_width[groups.start])
        self.first, last = int(tables.tile_begin[groups.start]), int(tables.tile_begin[groups.stop])
        self.tiles = last - self.first
        elements = int(tables.group_elements[groups.start : groups.stop].sum())
        k, d = tables.needed.get(groups.start, (int(_ROOM * elements), 0))
        self.room, self.dense_room = int(_SPARE * k) + TILE, int(_SPARE * d)

    def extract(self, kernels: _Kernels, sides: _Pair, sums: _Pair) -> None:
        """Launch; the sums per group are on their way to the host when this returns."""
        import torch

        device, tables = self.tables.device, self.tables
        cursor = _zeros(2, device)
        self.counts = torch.empty(self.tiles, dtype=torch.int16, device=device)
        self.place = torch.empty(self.tiles, dtype=torch.int32, device=device)
        self.sparse = torch.empty((2 + self.width, self.room), dtype=torch.uint8, device=device)
        self.dense = torch.empty((self.width, self.dense_room), dtype=torch.uint8, device=device)
        blocks = -(-self.tiles // (2 if self.width == 1 else 1))
        kernels(
            f"extract_{self.width}", blocks, _THREADS, *tables.rows, *sides, np.uint32(self.first),
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

    def compact(self, kernels: _Kernels, sides: _Pair, sums: _Pair) -> tuple[_Shape, _Columns] | None:
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
            self.extract(kernels, sides, sums)
        tables.needed[self.groups.start] = int(k[-1]), int(d[-1])
        k, d = np.diff(k, prepend=0), np.diff(d, prepend=0)
        touched = np.flatnonzero((k > 0) | (d > 0))
        if not len(touched):
            return None
        shape = _Shape(tables, self.groups.start + touched, k[touched], d[touched])
        columns = _Columns.of(shape, torch.empty(shape.nbytes, dtype=torch.uint8, device=tables.device))
        _Launch(tables, columns)(
            "compact", self.counts, self.place, self.taken, self.sparse, self.dense, np.uint64(self.room),
            np.uint64(self.dense_room), np.uint32(self.first),
        )  # fmt: skip
        return shape, columns


# ---------------------------------------------------------------- stage and apply


class StagedColumns:
    """Columns of a version in device memory, ready for the one launch. Made on the stream that stages.

    held: what is being copied and decoded from, until that is done; checks: what the decoders will have said.
    """

    def __init__(self, tables: _Tables, columns: _Columns, held: list[object], checks: Sequence[Check] = ()) -> None:
        import torch

        self.tables, self._held, self._checks = tables, held, checks
        self._launch = _Launch(tables, columns)
        self._bad = torch.full((2,), -1, dtype=torch.int32, device=tables.device)
        if columns.tiles:
            _kernels(tables.device.index or 0)(
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

    def apply(self, where: _Where, fp: torch.Tensor) -> None:
        """Launch the apply on torch's current stream; `fp` is added to, per row."""
        import torch

        torch.cuda.current_stream().wait_event(self._done)
        self._launch("apply", fp, first=[where.runs])
        if where.boxes is not None:
            self._launch("scatter", np.uint32(True), fp, first=where.boxes)


def stage(
    tiling: Tiling,
    fetched: Sequence[Fetched],
    device: torch.device,
    *,
    on_device: bool,
    engine: int | None = None,
    threads: int | None = None,
) -> StagedColumns:
    """Bring the columns of all groups to the device and check them there.

    on_device: frames of columns are decoded by nvCOMP where the columns go, else on the CPU, side by side, as masks and
    what has an outer codec are in any case. engine: see Cuda. Raises FormatError before anything is applied.
    """
    import torch

    tables = _tables(tiling, device)
    fetched = [one for one in fetched if len(one.index.frames)]
    with torch.cuda.stream(_stream(device, "stage")):
        if not on_device:
            groups = (group for one in fetched for group in one.groups())
            return StagedColumns(tables, *_decode_on_host(tables, groups, threads))
        wrapped = [
            np.unique(f["group"][(f["plane"] == MASK) | (f["outer"] != codecs.RAW)])
            for f in (one.index.frames for one in fetched)
        ]
        on_host = ((g, one.frames(g)) for one, groups in zip(fetched, wrapped, strict=True) for g in groups.tolist())
        columns, held = _decode_on_host(tables, on_host, threads)
        try:
            decoded, more, checks = _decode_on_device(tables, fetched, wrapped, engine)
        except BaseException:
            # What a decoder still reads must not be freed, and then be something else.
            torch.cuda.current_stream().synchronize()
            raise
        return StagedColumns(tables, _Columns.joined([decoded, columns]), held + more, checks)


def _decode_on_device(
    tables: _Tables, fetched: Sequence[Fetched], left_out: Sequence[np.ndarray[Any, Any]], engine: int | None
) -> tuple[_Columns, list[object], list[Check]]:
    """Decode the frames of columns out of host memory into that of the device. left_out: groups of each shard.

    Returns the columns, what they are made from, and what the decoders will have said.
    """
    import torch

    kept = [~np.isin(f.index.frames["group"], groups) for f, groups in zip(fetched, left_out, strict=True)]
    frames = np.concatenate([np.empty(0, FRAME), *(f.index.frames[k] for f, k in zip(fetched, kept, strict=True))])
    shape, place = _require_columns(tables, frames)
    if engine is None:
        memory = torch.empty(max(1, shape.nbytes), dtype=torch.uint8, device=tables.device)
    else:
        memory = arena.device_memory(max(1, shape.nbytes), tables.device)
    host = [torch.frombuffer(f.data, dtype=torch.uint8) for f in fetched]
    if engine is not None or (frames["codec"] == codecs.ZSTD).any():
        stored = host  # slow decoders read in place as fast, and need the room that a copy would take
    else:
        stored = [shard.to(tables.device, non_blocking=True) for shard in host]
    sizes = np.array([len(s) for s in stored], np.int64)
    begins = np.cumsum(sizes) - sizes
    offset = np.repeat(begins, [int(k.sum()) for k in kept]) + frames["offset"].astype(np.int64)
    nbytes, raw = frames["stored"].astype(np.int64), frames["raw"].astype(np.int64)
    checks = []
    for codec in np.unique(frames["codec"]).tolist():
        some = frames["codec"] == codec
        if codec == codecs.RAW:
            nvcomp.place(stored, offset[some], memory, place[some], nbytes[some])
        else:
            by, scratch = nvcomp.CUDA, None
            if engine is not None and codec in arena.READS:
                by = engine
                need = nvcomp.scratch_nbytes(codec, raw[some], tables.device, backend=by)
                scratch = arena.device_memory(need, tables.device)
            rows = (offset[some], nbytes[some], memory, place[some], raw[some])
            checks.append(nvcomp.decompress(codec, stored, *rows, backend=by, scratch=scratch))
    return _Columns.of(shape, memory), [*host, *stored], checks


def _require_columns(tables: _Tables, frames: np.ndarray[Any, Any]) -> tuple[_Shape, I64]:
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
    uneven |= (frames["block"] != 0) | (frames["codec"] == codecs.RAW) & (frames["stored"] != frames["raw"])
    uneven |= frames["codec"] >= len(codecs.NAMES)
    bad = np.flatnonzero(wrong[row] | uneven)
    if len(bad):
        first = int(group[bad[0]])
        sizes = {p: int(n) for p, n in enumerate(planes[row[bad[0]]].tolist()) if n}
        raise FormatError(
            f"group {first} ({tables.tiling.group_names(first)}): frames of {sizes} bytes by plane, or how they are "
            "cut, do not make up its columns"
        )
    shape = _Shape(tables, numbers, k, d)
    return shape, shape.plane_begin(row, plane) + in_plane * PLANE_FRAME


def _decode_on_host(
    tables: _Tables, groups: Iterable[tuple[int, Sequence[Frame]]], threads: int | None
) -> tuple[_Columns, list[object]]:
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
    shape = _Shape(tables, group, k, d, align=1)
    memory = torch.empty(max(1, shape.nbytes), dtype=torch.uint8, device=tables.device)
    for begin, (*_, host) in zip(shape.begin.tolist(), found, strict=True):
        memory[begin : begin + len(host)].copy_(host, non_blocking=True)
    return _Columns.of(shape, memory), [f[3] for f in found]


def apply(staged: StagedColumns, where: _Where, meanwhile: Callable[[], None] = lambda: None) -> U64:
    """Apply staged columns in place; returns what that added to fingerprints, by row.

    Returns when the device is done; `meanwhile` is called while it works.
    """
    fp = _sums(staged.tables)
    with nvcomp.fatal("applying"):
        staged.apply(where, fp)
        meanwhile()
        return _unsigned(fp)


def fingerprints(layout: Layout, tensors: U64, device: torch.device) -> U64:
    """Return the fingerprint of each tensor: a full pass over device memory."""
    tables = _tables(layout, device)
    fp = _sums(tables)
    if tables.tiles:
        _kernels(device.index or 0)(
            "fingerprint", tables.tiles, _THREADS, *tables.rows, tables.whole(tensors).runs, tables.row_width, fp
        )
    return tables.per_tensor(_unsigned(fp))


def box_fingerprints(width: I64, place: Place, device: torch.device) -> U64:
    """Return what boxes, all of each there, add to the fingerprints of their tensors. width: of each one's elements."""
    put = partial(_put, device=device)
    count: I64 = place.extent.prod(axis=1)
    row, index = _tiles(count)
    fp = _zeros(len(count), device)
    if len(row):
        _kernels(device.index or 0)(
            "fingerprint_boxes", len(row), _THREADS, put(row), put(index), put(count), put(np.zeros_like(count)),
            put(width.astype(np.uint8)), put(place.address), put(place.first), _levels(place, device),
            np.uint32(place.extent.shape[1]), fp,
        )  # fmt: skip
    return _unsigned(fp)


class Cuda:
    """Tensors on one NVIDIA GPU. See backend.Device.

    on: torch device, as text. engine: who decompresses what a Decompression Engine reads, out of memory that it
    reaches: nvcomp.HARDWARE, or nvcomp.CUDA, which goes the same way by kernels; None: kernels, and memory of torch.
    Raises ConfigError, naming what to install, where it cannot work.
    """

    detached = True

    def __init__(self, on: str, threads: int | None = None, engine: int | None = None) -> None:
        import torch

        self.device, self.threads, self.engine = torch.device(on), threads, engine
        if torch.version.hip is not None:
            raise ConfigError(f"tensors on {on}: an AMD GPU; move them to the CPU")
        if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
            raise ConfigError(f"tensors on {on} need cuda-core; pip install 'deltackpt[cuda13]' (or cuda12)")
        self.nvcomp = engine is not None or libnvcomp.installed()
        if engine == nvcomp.HARDWARE and not arena.capability(self.device).mask:
            raise ConfigError(f"tensors on {on}: the driver reports no Decompression Engine; take backend cuda or auto")

    def room(self, nbytes: int) -> memoryview:
        """Return host memory that the device reads in place. See backend.Device."""
        import torch

        if self.engine is not None:
            return memoryview(arena.host_memory(nbytes, self.device).numpy())
        return memoryview(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy())

    def hold(self, tensors: Sequence[object]) -> tuple[object, U64]:
        """See backend.Device."""
        import torch

        return tensors, np.fromiter(map(torch.Tensor.data_ptr, cast("Sequence[torch.Tensor]", tensors)), np.uint64)

    def encode(self, layout: Layout, old: U64, new: U64, *, codec: str, form: str) -> Extraction:
        """See backend.Device."""
        return self._encode(layout, 0, old, new, codec, form)

    def encode_part(self, partition: Partition, part: int, old: U64, new: U64, *, codec: str, form: str) -> Extraction:
        """Compare two copies of the boxes of a part, as ranks hold them; see backend.encode_part."""
        return self._encode(partition, part, old, new, codec, form)

    def _encode(self, tiling: Tiling, part: int, old: U64, new: U64, codec: str, form: str) -> Extraction:
        if codec not in codecs.NAMES:
            raise ConfigError(f"codec {codec!r} is unknown; expected one of {' '.join(codecs.NAMES)}")
        if codec == "ans" and (form != "sparse" or not self.nvcomp):
            raise ConfigError(f"codec 'ans' with form {form!r}: it is made by nvCOMP only, of columns; install it")
        if form not in ("sparse", "mask"):
            raise ConfigError(f"form {form!r} is unknown; expected sparse or mask")
        return extract(tiling, old, new, self.device, part=part, codec=codec, form=form, threads=self.threads)

    def stage(self, tiling: Tiling, fetched: Sequence[Fetched]) -> list[StagedColumns]:
        """See backend.Device."""
        staged = stage(tiling, fetched, self.device, on_device=self.nvcomp, engine=self.engine, threads=self.threads)
        staged.wait()
        return [staged]

    def apply(
        self, tiling: Tiling, staged: Sequence[object], tensors: U64, meanwhile: Callable[[], None] = lambda: None
    ) -> U64:
        """See backend.Device. Returns when the device is done."""
        columns = _only(staged)
        return columns.tables.per_tensor(apply(columns, columns.tables.whole(tensors), meanwhile))

    def locate(self, tiling: Tiling, where: Callable[[Segments], tuple[U64, Place | None]]) -> _Where:
        """See backend.BoxDevice."""
        tables = _tables(tiling, self.device)
        found = [where(rows) for rows in tiling.groups]
        runs = np.concatenate([np.empty(0, np.uint64), *(runs for runs, _ in found)])
        if all(place is None for _, place in found):
            return tables.located(runs, None)
        levels = next(place.extent.shape[1] for _, place in found if place is not None)
        places = [Place.nowhere(len(runs), levels) if place is None else place for runs, place in found]
        return tables.located(runs, Place.joined(places))

    def apply_rows(self, tiling: Tiling, staged: Sequence[object], located: object) -> U64:
        """See backend.BoxDevice. Returns when the device is done."""
        columns = _only(staged)
        assert isinstance(located, _Where)
        return columns.tables.per_box(apply(columns, located))

    def box_fingerprints(self, layout: Layout, tensor: I64, place: Place) -> U64:
        """See backend.BoxDevice."""
        return box_fingerprints(layout.width[tensor], place, self.device)

    def fingerprints(self, layout: Layout, tensors: U64) -> U64:
        """See backend.Device."""
        return fingerprints(layout, tensors, self.device)

    def allocate(self, nbytes: int, *, in_host: bool = False) -> tuple[object, int]:
        """See backend.Device. Host memory is pinned, and read and written by the kernels where it is."""
        import torch

        if in_host:
            memory = arena.pinned_memory(nbytes, self.device)
        else:
            memory = torch.empty(max(1, nbytes), dtype=torch.uint8, device=self.device)
        return memory, memory.data_ptr()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See backend.Device."""
        from cuda.bindings import driver

        (error,) = driver.cuMemcpy(target, source, nbytes)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise Poisoned(f"copying {nbytes} bytes on {self.device}: {error.name}; the CUDA context is lost, restart")


def _only(staged: Sequence[object]) -> StagedColumns:
    (columns,) = staged
    assert isinstance(columns, StagedColumns)
    return columns
