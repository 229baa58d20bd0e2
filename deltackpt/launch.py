"""What the CUDA backend's kernels work on: tables of a tiling, columns of groups in device memory, and their launches.

Tables of 10 bytes a tile. Kernels are compiled once for each architecture. torch owns the memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltackpt.digest import U64
from deltackpt.kernels import Place, first_elements
from deltackpt.layout import I64, TILE, Segments, Tiling
from deltackpt.partition import Partition
from deltackpt.shard import ALIGN, COUNTS, DENSE, GAP, PLANE_FRAME, VALUE

if TYPE_CHECKING:
    import torch

KERNELS = (
    "extract_1", "extract_2", "extract_4", "extract_8", "compact", "scan", "check", "apply", "scatter", "fingerprint",
    "fingerprint_boxes",
)  # fmt: skip
"""Entry points of kernels.cu."""
THREADS = 256

GROUP = np.dtype(
    [("counts", "<u8"), ("gaps", "<u8"), ("values", "<u8"), ("dense", "<u8"), ("offset", "<u8"), ("k", "<u8"),
     ("d", "<u8"), ("stride", "<u8"), ("dense_stride", "<u8"), ("first_tile", "<u4"), ("tiles", "<u4"),
     ("width", "<u4"), ("before", "<u4")]
)  # fmt: skip
"""struct Group of kernels.cu."""


class Kernels:
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


@dataclass(frozen=True)
class _Stream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@lru_cache
def kernels_of(device: int) -> Kernels:
    return Kernels(device)


@lru_cache
def stream_of(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return the stream of this process for a kind of work beside the user's."""
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def put_on(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    import torch

    signed = array if array.itemsize == 1 else array.view(f"<i{array.itemsize}")
    return torch.from_numpy(signed).to(device)


def tile_numbers(count: I64) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the row and the number in it of every tile of rows of so many elements, u32."""
    per_row = -(-count // TILE)
    row = np.repeat(np.arange(len(count), dtype=np.uint32), per_row)
    first = np.cumsum(per_row) - per_row
    return row, (np.arange(len(row)) - np.repeat(first, per_row)).astype(np.uint32)


@dataclass(frozen=True)
class Where:
    """Where the rows of a tiling are, on the device.

    runs: address of each row that lies side by side, else 0; boxes: what `scatter` is told of the others, if any.
    """

    runs: torch.Tensor
    boxes: Sequence[Any] | None = None


class Tables:
    """The tiles and rows of a tiling in device memory; see kernels.cu. In host memory, of each row:

    tensor; box: index of its box, of a layout that of its tensor; start: element of the box at which it begins; first:
    element of the tensor, if the row is a run of them there; count, width; strided: whether it is none.
    """

    def __init__(self, tiling: Tiling, device: torch.device) -> None:
        self.tiling, self.device, self.put = tiling, device, partial(put_on, device=device)
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
        self.group_nbytes = self.group_elements * self.group_width
        self.rows = (*map(self.put, tile_numbers(self.count)), self.put(self.count), self.put(self.first))
        self.row_width = self.put(self.width.astype(np.uint8))
        # On the device, since a copy there would wait for the kernel before it.
        self.last_tiles = self.put(self.tile_begin[1:] - 1)
        self.tile_length = self.put(column(lambda g: g.tile_lengths).astype(np.int16))

    @cached_property
    def row_start(self) -> torch.Tensor:
        """`start` on the device."""
        return self.put(self.start)

    def whole(self, tensors: U64) -> Where:
        """Contiguous tensors at these addresses."""
        runs = self.put(self.run_addresses(tensors))
        if self.boxes is None or not self.strided.any():
            return Where(runs)
        begin = tensors[self.tensor] + (self.boxes.offset[self.box] * self.width).astype(np.uint64)
        begin[~self.strided] = 0
        return Where(runs, (self.row_start, self.put(begin), *self._strides))

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
        return self.put(place.first), levels_of(place, self.device), np.uint32(place.extent.shape[1])

    def located(self, runs: U64, place: Place | None) -> Where:
        """Rows at these addresses, others at these places; see kernels.apply."""
        if place is None:
            return Where(self.put(runs))
        return Where(self.put(runs), (self.row_start, self.put(place.address), *self._levels(place)))

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


def levels_of(place: Place, device: torch.device) -> torch.Tensor:
    """Upload the levels of boxes, as the kernels read them."""
    columns = (place.extent, place.stride, place.step, place.low, place.high)
    return put_on(np.ascontiguousarray(np.stack(columns, axis=2)), device)


@lru_cache(maxsize=4)
def tables_of(tiling: Tiling, device: torch.device) -> Tables:
    return Tables(tiling, device)


def zeros(n: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.zeros(n, dtype=torch.int64, device=device)


def row_sums(tables: Tables) -> torch.Tensor:
    return zeros(len(tables.tensor), tables.device)


def unsigned(per_row: torch.Tensor) -> U64:
    found: U64 = per_row.cpu().numpy().view(np.uint64)
    return found


def _aligned(nbytes: I64, align: int) -> I64:
    return -(-nbytes // align) * align


class Shape:
    """Where the columns of groups lie in one memory: of each its counts, gaps, values and dense planes.

    group: numbers; k, d: sparse changes and dense elements; begin: bytes before each group's counts, a multiple of
    ALIGN. Planes begin at multiples of `align` bytes after that.
    """

    def __init__(self, tables: Tables, group: I64, k: I64, d: I64, align: int = ALIGN) -> None:
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
        found = np.zeros(len(self.group), GROUP)
        found["counts"] = memory + self.begin
        found["gaps"] = memory + self.begin + self.gaps
        found["values"] = found["gaps"] + (2 * self.stride).astype(np.uint64)
        found["dense"] = found["gaps"] + ((2 + self.width) * self.stride).astype(np.uint64)
        found["offset"] = offset + 8 * (np.cumsum(self.tiles) - self.tiles)
        for name in ("k", "d", "stride", "dense_stride", "first_tile", "tiles", "width"):
            found[name] = getattr(self, name)
        return found


@dataclass(frozen=True)
class DeviceColumns:
    """Columns of groups in device memory. records: by which kernels find them; held: the memory in which they lie."""

    group: I64
    records: np.ndarray[Any, Any]
    held: tuple[torch.Tensor, ...]

    @property
    def tiles(self) -> int:
        """Tiles of all groups."""
        return int(self.records["tiles"].sum())

    @classmethod
    def of(cls, shape: Shape, memory: torch.Tensor) -> DeviceColumns:
        """Columns that lie in `memory` as `shape` says, with room for an offset of each tile."""
        import torch

        tiles = int(shape.tiles.sum())
        offset = torch.empty(max(1, tiles), dtype=torch.int64, device=memory.device)
        return cls(shape.group, shape.records(memory.data_ptr(), offset.data_ptr()), (memory, offset))

    @classmethod
    def joined(cls, columns: Sequence[DeviceColumns]) -> DeviceColumns:
        """Return columns that lie in several memories as one."""
        if len(columns) == 1:
            return columns[0]
        records = np.concatenate([np.empty(0, GROUP), *(c.records for c in columns)])
        group = np.concatenate([np.empty(0, np.int64), *(c.group for c in columns)])
        return cls(group, records, tuple(t for c in columns for t in c.held))

    def take(self, some: slice) -> DeviceColumns:
        """Return those of some of the groups."""
        return replace(self, group=self.group[some], records=self.records[some])


class Launch:
    """Launches over the columns of groups, one warp for each tile. records: on the device."""

    def __init__(self, tables: Tables, columns: DeviceColumns) -> None:
        self.tables, self.columns = tables, columns
        records = columns.records.copy()
        records["before"] = np.cumsum(records["tiles"]) - records["tiles"]
        self.records = tables.put(records.view(np.uint8))
        self._kernels = kernels_of(tables.device.index or 0)

    def __call__(self, name: str, *args: Any, first: Sequence[Any] = ()) -> None:
        """Launch a kernel. first: what comes before the records, args: what comes after their number."""
        if self.columns.tiles:
            blocks = -(-self.columns.tiles * 32 // THREADS)
            groups, tiles = np.uint32(len(self.columns.group)), np.uint32(self.columns.tiles)
            self._kernels(name, blocks, THREADS, *self.tables.rows, *first, self.records, groups, tiles, *args)
