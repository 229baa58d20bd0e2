"""The torch backend: the same calls as `backend`, for tensors on whatever device torch has, by its plain operations.

Frames are compressed and decompressed on the CPU, and columns are made there; bits are compared, flipped and
fingerprinted where the tensors are. Memory of its own on the device: the columns of what is staged, and some 300 MB
of intermediate results. Torch has no u64: int64 wraps alike, and what a right shift brings in is masked off.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from deltackpt.backend import HostEncoding, Piece, Staged, box_address, decode_group, encode_extracted
from deltackpt.digest import U64
from deltackpt.errors import ConfigError, DeltaError, Poisoned
from deltackpt.kernels import DENSE, U16, extracted, view
from deltackpt.layout import I64, TILE, Layout, Segments, Tiling
from deltackpt.partition import Partition
from deltackpt.pool import PIECE, in_order, row_addresses
from deltackpt.shard import Fetched, Frame

if TYPE_CHECKING:
    import torch

_WORK = 4 << 20
"""Changed elements that are flipped at once, or less than a tile more: 60 bytes each while that lasts."""
_FIRST = 1 << 62
"""Below lies host memory, from here on the numbers by which tensors are known: pointers of some devices are opaque."""


@dataclass(frozen=True, eq=False)
class _Memory:
    """A contiguous tensor or array, and the number of its first byte."""

    begin: int
    tensor: torch.Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]

    @cached_property
    def flat(self) -> torch.Tensor:
        """Its bytes."""
        import torch

        if isinstance(self.tensor, np.ndarray):
            return torch.from_numpy(view(self.tensor.__array_interface__["data"][0], self.tensor.nbytes))
        return self.tensor.detach().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class StagedGroup:
    """A decoded and checked group. Counts are in host memory, the planes of `kernels.Columns` on the device."""

    group: int
    counts: U16
    gaps: torch.Tensor
    values: torch.Tensor
    dense: torch.Tensor


class Torch:
    """Tensors on one torch device. See backend.Device.

    on: the device, as text. Not for use by several threads at once. Raises ConfigError for a device without memory.
    """

    detached = False
    room = None

    def __init__(self, on: str, threads: int | None = None) -> None:
        import torch

        self.device, self.threads = torch.device(on), threads
        if self.device.type == "meta":
            raise ConfigError("tensors on meta have no memory; materialise them first")
        self._memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()
        self._begins: list[int] = []
        self._next = _FIRST
        self._lock = threading.Lock()

    def hold(self, tensors: Sequence[object]) -> tuple[list[_Memory], U64]:
        """See backend.Device."""
        held = [self._enter(tensor) for tensor in tensors]  # type: ignore[arg-type]  # the protocol knows no torch
        return held, np.array([memory.begin for memory in held], np.uint64)

    def _enter(self, tensor: torch.Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> _Memory:
        with self._lock:
            memory = _Memory(self._next, tensor)
            self._memories[memory.begin] = memory
            if len(self._begins) > 2 * len(self._memories):
                self._begins = sorted(self._memories)  # those that nobody holds any more are forgotten
            else:
                self._begins.append(memory.begin)
            # Never side by side: a run of bytes that is read at once lies in one tensor.
            self._next += int(tensor.nbytes) + 1
            return memory

    def _bytes(self, address: int, nbytes: int) -> torch.Tensor:
        """Return bytes of what is held, or of the host."""
        import torch

        if address < _FIRST:
            return torch.from_numpy(view(address, nbytes))
        begins = self._begins
        memory = self._memories[begins[bisect.bisect_right(begins, address) - 1]]
        return memory.flat[address - memory.begin :][:nbytes]

    def allocate(self, nbytes: int, *, in_host: bool = False) -> tuple[object, int]:
        """See backend.Device."""
        import torch

        if in_host:
            raise ConfigError(
                f"tensors on {self.device}: backend torch cannot work on a base in host memory; leave base_on out"
            )
        with self._words(ConfigError, "free memory of the device, or move the tensors to the CPU"):
            memory = self._enter(torch.empty(max(1, nbytes), dtype=torch.uint8, device=self.device))
        return memory, memory.begin

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See backend.Device."""
        with self._words(Poisoned, "reseed"):
            self._bytes(target, nbytes).copy_(self._bytes(source, nbytes))

    @contextlib.contextmanager
    def _words(self, kind: type[DeltaError], remedy: str) -> Iterator[None]:
        """Raise what torch says as an error of this package. Tensors of inference mode may be written inside."""
        import torch

        try:
            with torch.inference_mode():
                yield
        except RuntimeError as exc:
            raise kind(f"torch on {self.device}: {str(exc).splitlines()[0]}; {remedy}") from exc

    # ------------------------------------------------------------ encode

    def encode(self, layout: Layout, old: U64, new: U64, *, codec: str, form: str) -> HostEncoding:
        """See backend.Device."""
        pieces = self._extract(layout, range(len(layout.groups)), row_addresses, old, new)
        groups = encode_extracted(layout, 0, pieces, codec=codec, form=form, threads=self.threads)
        return HostEncoding(self, layout, groups, partial(self.apply, layout))

    def encode_part(
        self, partition: Partition, part: int, old: U64, new: U64, *, codec: str, form: str
    ) -> HostEncoding:
        """See backend.Device."""
        pieces = self._extract(partition, partition.groups_of(part), box_address(partition, part), old, new)
        groups = encode_extracted(partition, part, pieces, codec=codec, form=form, threads=self.threads)
        return HostEncoding(self, partition, groups, partial(self._apply_part, partition, part))

    def _extract(
        self, tiling: Tiling, groups: range, address: Callable[[Segments, U64], U64], old: U64, new: U64
    ) -> Generator[Piece]:
        """Yield what changed, piece by piece. Torch is called in the thread of the caller, on its stream."""
        yield from in_order(_columns, self._differences(tiling, groups, address, old, new), self.threads)

    def _differences(
        self, tiling: Tiling, groups: range, address: Callable[[Segments, U64], U64], old: U64, new: U64
    ) -> Iterator[_Difference]:
        for group in groups:
            for rows in tiling.groups[group].cut(PIECE):
                with self._words(ConfigError, "free memory of the device, or move the tensors to the CPU"):
                    before, after = (self._gather(rows, address(rows, side)) for side in (old, new))
                    at = (before != after).nonzero().view(-1)
                    found = (at.int().cpu(), before[at].cpu(), after[at].cpu())
                unsigned = f"<u{rows.width}"
                yield _Difference(
                    group, rows, found[0].numpy().astype(np.int64),
                    found[1].numpy().view(unsigned), found[2].numpy().view(unsigned),
                )  # fmt: skip

    def _gather(self, rows: Segments, begins: U64) -> torch.Tensor:
        """Return all elements of the rows, one after the other, as integers of their width."""
        import torch

        width = rows.width
        sizes = (rows.count * width).tolist()
        parts = [self._bytes(begin, nbytes) for begin, nbytes in zip(begins.tolist(), sizes, strict=True)]
        joined = parts[0] if len(parts) == 1 and _aligned(parts[0], width) else torch.cat(parts)
        return joined.view(_unit(width))

    # ------------------------------------------------------------ stage and apply

    def stage(self, tiling: Tiling, fetched: Sequence[Fetched]) -> list[StagedGroup]:
        """See backend.Device. Decodes and checks on the CPU."""
        return self.stage_groups(tiling, itertools.chain.from_iterable(one.groups() for one in fetched))

    def stage_groups(self, tiling: Tiling, groups: Iterable[tuple[int, Sequence[Frame]]]) -> list[StagedGroup]:
        """See backend.HostDevice."""
        return [self._upload(decode_group(tiling, n, frames, threads=self.threads)) for n, frames in groups]

    def _upload(self, staged: Staged) -> StagedGroup:
        import torch

        columns = staged.columns
        with self._words(ConfigError, "free memory of the device, or move the tensors to the CPU"):
            planes = [torch.from_numpy(p).to(self.device) for p in (columns.gaps, columns.values, columns.dense)]
        return StagedGroup(staged.group, columns.counts, *planes)

    def apply(
        self, tiling: Tiling, staged: Sequence[object], tensors: U64, meanwhile: Callable[[], None] = lambda: None
    ) -> U64:
        """See backend.Device. Returns when the device is done."""
        meanwhile()
        total = np.zeros(len(tiling.layout.names), np.uint64)
        with self._words(Poisoned, "reseed"):
            for group in staged:
                assert isinstance(group, StagedGroup)
                for flips in _flips(tiling.groups[group.group], group):
                    np.add.at(total, flips.rows.tensor, self._flip(flips, tiling.layout, tensors))
        return total

    def _flip(self, flips: _Flips, layout: Layout, tensors: U64) -> U64:
        """Write; returns what that added to the fingerprint of each row."""
        rows, element = flips.rows, _in_tensors(flips)
        before, after = self._write(flips, element, tensors[rows.tensor], layout.nbytes[rows.tensor])
        return _sums(_changes(rows.width, element, before, after), flips.count)

    def _apply_part(self, partition: Partition, part: int, staged: Sequence[object], boxes: U64) -> U64:
        """Flip bits of the boxes of a part; returns what that added to the fingerprint of each tensor."""
        first, total = int(partition.box_begin[part]), np.zeros(len(partition.layout.names), np.uint64)
        with self._words(Poisoned, "reseed"):
            for group in staged:
                assert isinstance(group, StagedGroup)
                for flips in _flips(partition.groups[group.group], group):
                    rows = flips.rows
                    assert rows.box is not None
                    nbytes = partition.boxes.extent[rows.box].prod(axis=1) * rows.width
                    before, after = self._write(flips, flips.element, boxes[rows.box - first], nbytes)
                    np.add.at(
                        total, rows.tensor, _sums(_changes(rows.width, _in_tensors(flips), before, after), flips.count)
                    )
        return total

    def _write(
        self, flips: _Flips, element: torch.Tensor, begins: U64, sizes: I64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write elements of memories, one a row; returns them as they were and as they are."""
        import torch

        width = flips.rows.width
        memories = [self._bytes(address, n) for address, n in zip(begins.tolist(), sizes.tolist(), strict=True)]
        where = torch.split(element, flips.count.tolist())
        before = torch.cat([_read(memory, at, width) for memory, at in zip(memories, where, strict=True)])
        after = before ^ flips.value
        for memory, at, values in zip(memories, where, torch.split(after, flips.count.tolist()), strict=True):
            _write(memory, at, width, values)
        return before, after

    # ------------------------------------------------------------ fingerprints

    def fingerprints(self, layout: Layout, tensors: U64) -> U64:
        """See backend.Device."""
        total = np.zeros(len(layout.names), np.uint64)
        with self._words(ConfigError, "free memory of the device, or move the tensors to the CPU"):
            for group in layout.groups:
                for rows in group.cut(PIECE):
                    total[rows.tensor] += self._fingerprint(rows, tensors)
        return total

    def part_fingerprints(self, partition: Partition, part: int, boxes: U64) -> U64:
        """See backend.Device. Element by element, since those of a box need not lie side by side in their tensor."""
        import torch

        first, address = int(partition.box_begin[part]), box_address(partition, part)
        total = np.zeros(len(boxes), np.uint64)
        with self._words(ConfigError, "free memory of the device, or move the tensors to the CPU"):
            for group in partition.groups_of(part):
                for rows in partition.groups[group].cut(PIECE):
                    assert rows.box is not None
                    value = _zero_extended(self._gather(rows, address(rows, boxes)), rows.width)
                    element = torch.arange(len(value), device=self.device)
                    element += _repeat(rows.start - (np.cumsum(rows.count) - rows.count), rows.count, self.device)
                    at = _in_tensors(_Flips(rows, rows.count, element, value))
                    terms = _changes(rows.width, at, torch.zeros_like(value), value)
                    np.add.at(total, rows.box - first, _sums(terms, rows.count))
        return total

    def _fingerprint(self, rows: Segments, tensors: U64) -> U64:
        """Return what the bytes of each row add to the fingerprint of its tensor."""
        import torch

        begins = tensors[rows.tensor] + (rows.start * rows.width).astype(np.uint64)
        nbytes = rows.count * rows.width
        padding = torch.zeros(3, dtype=torch.uint8, device=self.device)
        parts = []
        for begin, n in zip(begins.tolist(), nbytes.tolist(), strict=True):
            parts += [self._bytes(begin, n), padding[: -n % 4]]
        words = torch.cat(parts).view(torch.int32).long().bitwise_and_(0xFFFFFFFF)
        count = -(-nbytes // 4)
        # A row starts at a multiple of TILE elements, so at a whole word.
        first = rows.start * rows.width // 4 - (np.cumsum(count) - count)
        index = _repeat(first, count, self.device)
        index += torch.arange(len(words), device=self.device)
        words *= _keys(index)
        return _sums(words, count)


@dataclass(frozen=True)
class _Difference:
    """Elements of some rows that differ, in host memory: index in all elements of the rows, bits before and after."""

    group: int
    rows: Segments
    at: I64
    before: npt.NDArray[np.unsignedinteger]
    after: npt.NDArray[np.unsignedinteger]


def _columns(found: _Difference) -> Piece:
    return Piece(found.group, found.rows, extracted(found.rows, found.at, found.before, found.after))


@dataclass(frozen=True)
class _Flips:
    """Changes of rows that all have some. count: of each row; element: where in its row's tensor or box; value: XOR.

    element, value: int64 on the device, row after row.
    """

    rows: Segments
    count: I64
    element: torch.Tensor
    value: torch.Tensor


def _flips(segments: Segments, staged: StagedGroup) -> Iterator[_Flips]:
    """Yield the changes of a group, about _WORK at a time, those of sparse tiles and of dense ones apart."""
    import torch

    device = staged.gaps.device
    lengths, dense_tile = segments.tile_lengths, staged.counts == DENSE
    per_row = -(-segments.count // TILE)
    row = np.repeat(np.arange(len(per_row)), per_row)
    first = segments.start[row] + (np.arange(segments.tiles) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * TILE
    sparse, dense = np.where(dense_tile, 0, staged.counts).astype(np.int64), np.where(dense_tile, lengths, 0)
    for tiles, begin, end in _pieces(sparse):
        n = sparse[tiles]
        steps = staged.gaps[0, begin:end].long() + (staged.gaps[1, begin:end].long() << 8) + 1
        running = torch.cumsum(steps, 0)
        # The last position of the tile before, seen from the first element of the piece.
        before = torch.cat((running.new_zeros(1), running))[torch.from_numpy(np.cumsum(n) - n).to(device)]
        at = torch.repeat_interleave(before, torch.from_numpy(n).to(device), output_size=end - begin)
        element = running - 1 - at + _repeat(first[tiles], n, device)
        yield _of_rows(segments, row[tiles], n, element, _join(staged.values[:, begin:end]))
    for tiles, begin, end in _pieces(dense):
        n = dense[tiles]
        element = torch.arange(end - begin, device=device) + _repeat(first[tiles] - (np.cumsum(n) - n), n, device)
        yield _of_rows(segments, row[tiles], n, element, _join(staged.dense[:, begin:end]))


def _pieces(changes: I64) -> Iterator[tuple[I64, int, int]]:
    """Yield tiles with changes, about _WORK of them at a time, and where these begin and end in their planes."""
    tiles = np.flatnonzero(changes)
    ends = np.cumsum(changes[tiles])
    begin = 0
    for some in np.split(np.arange(len(tiles)), np.flatnonzero(np.diff(ends // _WORK)) + 1):
        if len(some):
            end = int(ends[some[-1]])
            yield tiles[some], begin, end
            begin = end


def _of_rows(segments: Segments, row: I64, n: I64, element: torch.Tensor, value: torch.Tensor) -> _Flips:
    """Return the changes of tiles as those of rows. row: of each tile, sorted; n: changes of each."""
    which, begin = np.unique(row, return_index=True)
    box = None if segments.box is None else segments.box[which]
    rows = Segments(
        segments.width, segments.tensor[which], segments.start[which], segments.count[which], box, segments.boxes
    )
    return _Flips(rows, np.add.reduceat(n, begin), element, value)


def _in_tensors(flips: _Flips) -> torch.Tensor:
    """Return where in its tensor each change is; see `layout.Boxes`."""
    import torch

    boxes, box, device = flips.rows.boxes, flips.rows.box, flips.element.device
    if boxes is None or box is None:
        return flips.element
    rest, found = flips.element, _repeat(boxes.offset[box], flips.count, device)
    for level in range(boxes.extent.shape[1] - 1, -1, -1):
        extent = _repeat(boxes.extent[box, level], flips.count, device)
        found = found + rest % extent * _repeat(boxes.stride[box, level], flips.count, device)
        rest = torch.div(rest, extent, rounding_mode="floor")
    return found


def _repeat(values: I64, count: I64, device: torch.device) -> torch.Tensor:
    """Return each value as often as its count says, on the device."""
    import torch

    if len(values) == 1:
        return torch.full((int(count[0]),), int(values[0]), device=device)
    each = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (values, count))
    return torch.repeat_interleave(*each, output_size=int(count.sum()))


def _unit(width: int) -> torch.dtype:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]


def _aligned(memory: torch.Tensor, width: int) -> bool:
    """Say whether bytes can be viewed as integers of this width."""
    return memory.storage_offset() % width == 0 and memory.data_ptr() % width == 0


def _zero_extended(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return integers of a width as int64, without their sign."""
    return values.long() if width in (1, 8) else values.long() & ((1 << 8 * width) - 1)


def _join(planes: torch.Tensor) -> torch.Tensor:
    """Return the elements whose byte planes are the rows of `planes`, as int64."""
    value = planes[0].long()
    for byte in range(1, len(planes)):
        value |= planes[byte].long() << 8 * byte
    return value


def _read(memory: torch.Tensor, at: torch.Tensor, width: int) -> torch.Tensor:
    """Return elements of memory, zero-extended to int64; byte by byte where it is not aligned."""
    import torch

    if _aligned(memory, width):
        return _zero_extended(memory.view(_unit(width))[at], width)
    return _join(torch.stack([memory[at * width + byte] for byte in range(width)]))


def _write(memory: torch.Tensor, at: torch.Tensor, width: int, values: torch.Tensor) -> None:
    """Write elements of memory; each has one place in `at`."""
    import torch

    if _aligned(memory, width):
        memory.view(_unit(width))[at] = values.to(_unit(width))
        return
    for byte in range(width):
        memory[at * width + byte] = (values >> 8 * byte & 0xFF).to(torch.uint8)


# ---------------------------------------------------------------- fingerprints: digest.keys and contribution, in int64


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (z >> by).bitwise_and_((1 << 64 - by) - 1)


def _keys(words: torch.Tensor) -> torch.Tensor:
    z = words + _signed(0x9E3779B97F4A7C15)
    for by, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= _shifted(z, by)
        z *= _signed(factor)
    z ^= _shifted(z, 31)
    z |= 1
    return z


def _changes(width: int, element: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return what each element adds to its tensor's fingerprint by becoming another."""
    if width == 8:
        low, word = (after & 0xFFFFFFFF) - (before & 0xFFFFFFFF), element * 2
        return low * _keys(word) + (_shifted(after, 32) - _shifted(before, 32)) * _keys(word + 1)
    offset = element * width
    return (after - before << ((offset & 3) << 3)) * _keys(offset >> 2)


def _sums(terms: torch.Tensor, count: I64) -> U64:
    """Add runs of terms up, mod 2^64. count: terms of each, at least 1. Returns when they are there."""
    import torch

    running = torch.cumsum(terms, 0)[torch.from_numpy(np.cumsum(count) - 1).to(terms.device)]
    ends: U64 = running.cpu().numpy().view(np.uint64)
    ends[1:] -= ends[:-1].copy()
    return ends
