"""SliceTarget: what one rank of a sharded sampler holds, boxes of tensors, brought from version to version in place.

Of every version only the groups are fetched that have elements of these boxes. Storage, strides and addresses stay. A
rank alone can prove what it holds as a whole, tensors and parts; the rest is proven by the sum over all ranks, for
which `boxes` and `sums` are there. Longer than most modules because boxes are held against tensors, parts and files.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from deltackpt.backend import BoxDevice, Device
from deltackpt.chain import Plan, Step
from deltackpt.digest import U64, sha256
from deltackpt.errors import ChainError, ConfigError, Poisoned
from deltackpt.holding import Slice, dtensor_slice, is_dtensor
from deltackpt.kernels import Place, first_elements
from deltackpt.layout import BITS, I64, Layout, Mask, Segments
from deltackpt.partition import MAX_DIMENSIONS, Partition, join_levels
from deltackpt.reader import AnchorSource, Delta, Reader, named, requests, source_lacks
from deltackpt.tensors import Memory as TensorMemory
from deltackpt.tensors import StagedTensors, TensorTarget, bits, describe, find_twins, first_moved

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

_BLOCK = 64 << 20
"""Bytes of an anchor that are read at a time on the way to strided memory."""


class SliceTarget(TensorTarget):
    """Boxes of tensors, on the CPU or on an NVIDIA GPU, as the target of a follower.

    slices: `Slice`s, or (name, tensor) of torch DTensors and whole tensors, also as a mapping. They stay the caller's
    and are written only inside `Prepared.apply`. Equal boxes that share memory are written once. Names that are not
    held are not fetched. version: that the slices hold already, by the caller's word; as far as this rank can see, it
    is proven. Without it the first version is read from an anchor: of every tensor the rows of its first dimension
    that hold something. The bytes that a version took are in `Prepared.staging.nbytes`. backend: see tensors.choose.
    """

    def __init__(
        self,
        slices: Mapping[str, torch.Tensor] | Iterable[Slice | tuple[str, torch.Tensor]],
        *,
        version: int | None = None,
        backend: str = "auto",
    ) -> None:
        given = [_slice(one) for one in (slices.items() if isinstance(slices, Mapping) else slices)]
        self._slices: dict[str, Slice] = {}
        for one in given:
            label = f"{one.name}{[list(cut) for cut in one.box]}"
            if label in self._slices:
                raise ConfigError(f"slice {label} is given twice (duplicate)")
            self._slices[label] = one
        super().__init__(
            {label: cast("torch.Tensor", one.tensor) for label, one in self._slices.items()}, backend=backend
        )
        self._word = version
        self._held: Held | None = None
        self._table: U64 = np.empty(0, np.uint64)

    def device(self, threads: int | None) -> BoxDevice:
        """Return the backend of the device that holds the slices. Raises ConfigError where it cannot reach boxes."""
        device = super().device(threads)
        assert self.choice is not None
        if self.choice.backend == "torch":
            raise ConfigError(
                f"slices on {self.choice.on}: backend torch ({self.choice.reason}) follows whole tensors only; "
                "use a TensorTarget, or slices on an NVIDIA GPU or in host memory"
            )
        return cast("BoxDevice", device)

    def held(self) -> Held:
        """Return the boxes, as they lie in the layout of the store."""
        assert self._held is not None, "open comes first"
        return self._held

    def open(self, reader: Reader, *, reseed: bool = False) -> int | None:
        """Return the version that is held; see TensorTarget. Slices that were given other memory are looked through."""
        if self._held is None or self._held.moved() is None:
            return super().open(reader, reseed=reseed)
        before, self._word, self._layout = self._table, self._version, None
        version = super().open(reader, reseed=reseed)
        self._word = None
        if version is not None and not np.array_equal(self._table, before):
            # No version's, as far as this rank can see.
            self._version = version = None
        return version

    def boxes(self) -> U64:
        """Return a number for each box that is held; equal boxes have equal numbers on all hosts."""
        return self.held().numbers

    def sums(self, reader: Reader) -> U64:
        """Return what each box adds to the state fingerprint of the version that is held."""
        held = self.held()
        return held.layout.weights[held.tensor] * self._table

    def memory(self, layout: Layout, device: Device) -> TensorMemory:
        """Return nothing to be copied: slices are worked on where they are."""
        return _Direct(layout, self.held())

    def _require_fit(self, layout: Layout) -> None:
        self._twins = find_twins(self._tensors, layout)
        self._held = Held(layout, self._slices, self._twins)

    def _identify(self, reader: Reader, layout: Layout) -> int | None:
        self._table = self._pass_over(reader.threads)
        version, self._word = self._word, None
        if version is None:
            return None
        if reader.manifest(version).layout != layout.digest:
            raise ConfigError(f"version {version} has another layout than the newest one; the slices cannot hold it")
        expected = reader.fingerprints(version)
        held = self.held()
        wrong = held.names(held.whole & (self._table != expected[held.tensor]))
        if wrong:
            raise ChainError(f"the slices do not hold version {version}: {named(wrong)} differs; ask for a reseed")
        return version

    def _pass_over(self, threads: int | None) -> U64:
        """Return what each box adds to the fingerprint of its tensor, by a full pass."""
        held = self.held()
        return self.device(threads).box_fingerprints(held.layout, held.tensor, held.place)

    def stage(self, reader: Reader, plan: Plan) -> StagedSlices:
        """Fetch what the boxes need, decode and check it; the slices are not touched."""
        return StagedSlices(self, reader, plan)


class _Direct(TensorMemory):
    """No shadows: strides and boxes that share memory are known to the boxes."""

    def __init__(self, layout: Layout, held: Held) -> None:
        self.layout, self._boxes, self.addresses = layout, held, np.zeros(len(layout.names), np.uint64)

    def shadow(self, wanted: Mask) -> None:
        """Nothing to make."""

    def write_back(self) -> None:
        """Nothing to copy."""

    def forget(self) -> None:
        """Nothing to forget."""

    def moved(self) -> str | None:
        """Return the name of a tensor of which a box was given other memory since, None if there is none."""
        return self._boxes.moved()


def _slice(given: Slice | tuple[str, torch.Tensor]) -> Slice:
    if isinstance(given, Slice):
        return given
    name, tensor = given
    if is_dtensor(tensor):
        return dtensor_slice(name, cast("DTensor", tensor))
    shape = describe(name, tensor)[1]
    return Slice(name, shape, [(0, n) for n in shape], tensor)


# ---------------------------------------------------------------- boxes of a layout


class Held:
    """Boxes in a layout and in memory, those without elements left out. Arrays, one row a box; in stored elements.

    begin, end, shape, step (n, dimensions): missing dimensions come first, as 0..1 of 1; first: where each has its
    first; step: from element to element in memory; owner: the box itself, or the one whose memory it shares. A tensor
    that is never cut other than by rows may be held as one dimension. tensors: what was given of each; memory: its
    elements as integers, which keep it alive.
    """

    def __init__(self, layout: Layout, slices: Mapping[str, Slice], twins: Mapping[str, str]) -> None:
        self.layout = layout
        rows = [(label, _Row(layout, one)) for label, one in slices.items() if 0 not in tuple(one.tensor.shape)]
        self.labels = [label for label, _ in rows]
        wide = max((len(row.shape) for _, row in rows), default=1)

        def table(name: str, missing: int) -> I64:
            filled = np.full((len(rows), wide), missing, np.int64)
            for out, (_, row) in zip(filled, rows, strict=True):
                numbers = getattr(row, name)
                out[wide - len(numbers) :] = numbers
            return filled

        self.begin, self.end, self.shape, self.step = (
            table(name, missing) for name, missing in (("begin", 0), ("end", 1), ("shape", 1), ("step", 1))
        )
        self.first = np.array([wide - len(row.shape) for _, row in rows], np.int64)
        self.tensor = np.array([row.tensor for _, row in rows], np.int64)
        self.address = np.array([row.address for _, row in rows], np.uint64)
        self.tensors = [cast("torch.Tensor", slices[label].tensor) for label in self.labels]
        self.memory = [bits(tensor) for tensor in self.tensors]
        number = {label: i for i, label in enumerate(self.labels)}
        self.owner = np.array([number[twins.get(label, label)] for label in self.labels], np.int64)
        for i, j in enumerate(self.owner.tolist()):
            if not np.array_equal(self.begin[i], self.begin[j]) or not np.array_equal(self.shape[i], self.shape[j]):
                raise ConfigError(f"slices {self.labels[i]} and {self.labels[j]} share memory, but are other boxes")
        self._reaches: dict[str, Reach] = {}

    def moved(self) -> str | None:
        """Return the name of a tensor of which a box was given other memory since, None if there is none."""
        at = first_moved(self.tensors, self.address)
        return None if at is None else self.layout.names[int(self.tensor[at])]

    def names(self, chosen: Mask) -> list[str]:
        """Return the names of the tensors of some boxes."""
        return [self.layout.names[int(t)] for t in np.unique(self.tensor[chosen])]

    @cached_property
    def stride(self) -> I64:
        """From element to element in the whole tensors."""
        stride = np.ones_like(self.shape)
        stride[:, :-1] = np.cumprod(self.shape[:, :0:-1], axis=1)[:, ::-1]
        return stride

    @cached_property
    def whole(self) -> Mask:
        """Which boxes are a whole tensor."""
        whole: Mask = ((self.begin == 0) & (self.end == self.shape)).all(axis=1)
        return whole

    @cached_property
    def place(self) -> Place:
        """Where the boxes are, each as a whole."""
        extent = self.end - self.begin
        element = (self.begin * self.stride).sum(axis=1)
        return Place(self.address, element, extent, self.stride, self.step, np.zeros_like(extent), extent)

    @cached_property
    def numbers(self) -> U64:
        """A number for each box, of the layout, the tensor and the box."""
        found = []
        for t, begin, end, first in zip(
            self.tensor.tolist(), self.begin.tolist(), self.end.tolist(), self.first.tolist(), strict=True
        ):
            text = f"{self.layout.digest} {t} {begin[first:]} {end[first:]}"
            found.append(int(sha256(text.encode())[:16], 16))
        return np.array(found, np.uint64)

    def reach(self, tiling: Layout | Partition) -> Reach:
        """Return what of a tiling these boxes have."""
        if tiling.digest not in self._reaches:
            # A stream has few partitions, one after the other.
            if len(self._reaches) > 3:
                self._reaches.clear()
            self._reaches[tiling.digest] = Reach(self, tiling)
        return self._reaches[tiling.digest]


class _Row:
    """One slice in stored elements, after all checks. Raises ConfigError by name."""

    def __init__(self, layout: Layout, given: Slice) -> None:
        name, shape, box = given.name, tuple(given.shape), [(int(b), int(e)) for b, e in given.box]
        if name not in layout.position:
            raise ConfigError(f"tensor {name} is not published and would go stale; leave it out of the target")
        self.tensor = t = layout.position[name]
        tensor = cast("torch.Tensor", given.tensor)
        dtype, local = describe(name, tensor)
        if dtype != layout.dtypes[t]:
            raise ConfigError(f"tensor {name} is {layout.dtypes[t]} in the store and {dtype} here; nothing is cast")
        if shape != layout.shapes[t]:
            raise ConfigError(
                f"tensor {name} has shape {list(layout.shapes[t])} in the store and is a box of {list(shape)} here"
            )
        inside = len(box) == len(shape) and all(0 <= b <= e <= n for (b, e), n in zip(box, shape, strict=True))
        if not inside or tuple(e - b for b, e in box) != local:
            raise ConfigError(
                f"tensor {name}: box {[list(b) for b in box]} of shape {list(shape)} with {list(local)} elements here; "
                "expected a box inside the shape, of as many elements"
            )
        self.address = tensor.data_ptr()
        bits, unit = BITS[dtype], 8 * int(layout.width[t])
        ends = [shape[-1], *box[-1]] if shape else []
        if not shape:
            self.shape, self.begin, self.end, self.step = [1], [0], [1], [1]
        elif len(shape) > MAX_DIMENSIONS or any(n * bits % unit for n in ends):
            if box[1:] != [(0, n) for n in shape[1:]] or not tensor.is_contiguous():
                raise ConfigError(
                    f"tensor {name}, {dtype}{list(shape)}: a box of {[list(b) for b in box]} cannot be followed; "
                    "cut it by rows, into contiguous memory"
                )
            row = 8 * int(layout.nbytes[t]) // shape[0]
            self.shape, self.step = [int(layout.count[t])], [1]
            self.begin, self.end = [box[0][0] * row // unit], [box[0][1] * row // unit]
        else:
            self.shape = [*shape[:-1], shape[-1] * bits // unit]
            self.begin = [*(b for b, _ in box[:-1]), box[-1][0] * bits // unit]
            self.end = [*(e for _, e in box[:-1]), box[-1][1] * bits // unit]
            self.step = list(tensor.stride())


# ---------------------------------------------------------------- boxes against groups


class Reach:
    """What of the groups of a tiling some boxes hold.

    wanted: whether each group has an element of them. Passes: of several boxes of one tensor each is in another.
    """

    def __init__(self, held: Held, tiling: Layout | Partition) -> None:
        self.tiling = tiling
        self._located: list[object] | None = None
        own = np.flatnonzero(held.owner == np.arange(len(held.owner)))
        self.passes: list[_Pass] = []
        while len(own):
            _, first = np.unique(held.tensor[own], return_index=True)
            self.passes.append(_Pass(held, tiling, own[first]))
            own = np.delete(own, first)
        wanted = [any(one.meets(rows) for one in self.passes) for rows in tiling.groups]
        self.wanted: Mask = np.array(wanted, bool)
        boxes = len(tiling.boxes.tensor) if isinstance(tiling, Partition) else len(tiling.names)
        covered = np.zeros(boxes, bool)
        for one in self.passes:
            one.proves = one.box[one.inside & ~covered[one.box]]
            covered[one.proves] = True
        # What is published of a tensor by one part is proven where all boxes of it are inside of what is held.
        self.keys = tiling.pairs if isinstance(tiling, Partition) else np.arange(len(tiling.names))
        self.pair = np.searchsorted(self.keys, tiling.pair) if isinstance(tiling, Partition) else self.keys
        self.proven = np.ones(len(self.keys), bool)
        np.logical_and.at(self.proven, self.pair, covered)

    def locate(self, device: BoxDevice) -> list[object]:
        """Return where the boxes of each pass are, as the device wants to be told; looked up once."""
        if self._located is None:
            self._located = [device.locate(self.tiling, one.where) for one in self.passes]
        return self._located

    def expected(self, delta: Delta, *, undo: bool) -> U64:
        """Return what a delta says that each key adds to its tensor's fingerprint."""
        total = np.zeros(len(self.keys), np.uint64)
        parts = self.tiling.parts if isinstance(self.tiling, Partition) else 1
        for fetched in delta.fetched:
            changes = fetched.index.changes
            keys = changes["tensor"].astype(np.int64) * parts + changes["part"]
            np.add.at(total, np.searchsorted(self.keys, keys), changes["fingerprint"])
        return np.zeros_like(total) - total if undo else total

    def names(self, keys: Mask) -> list[str]:
        """Return the names of the tensors of some keys."""
        parts = self.tiling.parts if isinstance(self.tiling, Partition) else 1
        return [self.tiling.layout.names[int(t)] for t in np.unique(self.keys[keys] // parts)]


class _Pass:
    """At most one held box of each tensor, against the boxes of a tiling (whole tensors of a layout).

    box, held: boxes of the tiling and the held ones that meet them; inside: whether it is held as a whole. Of each such
    pair: where it is in memory (`place`, with addresses of the tiling's box), and, where both are runs of elements
    of the tensor that lie side by side in memory too, where the tensor would begin (`tensor_at`, else 0).
    """

    def __init__(self, held: Held, tiling: Layout | Partition, chosen: I64) -> None:
        layout = tiling.layout
        of_tensor = np.full(len(layout.names), -1, np.int64)
        of_tensor[held.tensor[chosen]] = chosen
        partition = tiling if isinstance(tiling, Partition) else None
        tensor = np.arange(len(layout.names)) if partition is None else partition.boxes.tensor
        box = np.flatnonzero(of_tensor[tensor] >= 0)
        mine = of_tensor[tensor[box]]
        shape = held.shape[mine]
        if partition is None:
            begin, end = np.zeros_like(shape), shape
        else:
            begin, end = partition.ranges(box, shape, held.first[mine])
        low, high = np.maximum(held.begin[mine] - begin, 0), np.minimum(held.end[mine], end) - begin
        meet = np.flatnonzero((low < high).all(axis=1))
        box, mine, begin, end, low, high = (x[meet] for x in (box, mine, begin, end, low, high))
        extent, stride, step = end - begin, held.stride[mine], held.step[mine]
        width = layout.width[held.tensor[mine]]
        moved = ((begin - held.begin[mine]) * step).sum(axis=1) * width
        address = held.address[mine] + moved.astype(np.uint64)
        self.place = Place(address, (begin * stride).sum(axis=1), extent, stride, step, low, high)
        self.box, self.mine, self.proves = box, mine, box
        self.inside = ((low == 0) & (high == extent)).all(axis=1)
        self.at = np.full(len(tensor), -1, np.int64)
        self.at[box] = np.arange(len(box))
        # First and last element of the box of the tiling that are held.
        order = np.ones_like(extent)
        order[:, :-1] = np.cumprod(extent[:, :0:-1], axis=1)[:, ::-1]
        self.lowest, self.highest = (low * order).sum(axis=1), ((high - 1) * order).sum(axis=1)
        offset, levels, strides = join_levels(held.begin, held.end, held.shape)
        run = (levels[:, :-1] == 1).all(axis=1) & ((strides[:, -1] == 1) | (levels[:, -1] == 1))
        extents = held.end - held.begin
        packed = np.ones_like(extents)
        packed[:, :-1] = np.cumprod(extents[:, :0:-1], axis=1)[:, ::-1]
        run &= ((held.step == packed) | (extents == 1)).all(axis=1)
        self.run_begin, self.run_end = offset[mine], offset[mine] + levels[mine].prod(axis=1)
        self.tensor_at = np.where(
            run[mine], held.address[mine] - (offset[mine] * width).astype(np.uint64), np.uint64(0)
        )
        if partition is not None:
            self.tensor_at[partition.boxes.strided[box]] = 0

    def _pairs(self, rows: Segments) -> I64:
        return self.at[rows.tensor if rows.box is None else rows.box]

    def meets(self, rows: Segments) -> bool:
        """Say whether some rows of the tiling have an element that is held."""
        pair = self._pairs(rows)
        here = np.flatnonzero(pair >= 0)
        start, count, pair = rows.start[here], rows.count[here], pair[here]
        return bool(((start <= self.highest[pair]) & (start + count > self.lowest[pair])).any())

    def where(self, rows: Segments) -> tuple[U64, Place | None]:
        """Return addresses and place of some rows; see kernels.apply."""
        nowhere = np.zeros(len(rows.tensor), np.uint64)
        if not len(self.box):
            return nowhere, None
        pair = self._pairs(rows)
        first = first_elements(rows)
        whole = (pair >= 0) & (self.tensor_at[pair] != 0)
        whole &= (self.run_begin[pair] <= first) & (first + rows.count <= self.run_end[pair])
        addresses = np.where(whole, self.tensor_at[pair] + (first * rows.width).astype(np.uint64), nowhere)
        # Elsewhere the changes of the box of the tiling are looked through for those that are here.
        part = (pair >= 0) & ~whole
        part &= (rows.start <= self.highest[pair]) & (rows.start + rows.count > self.lowest[pair])
        if not part.any():
            return addresses, None
        place = self.place.take(pair)
        return addresses, Place(**(vars(place) | {"address": np.where(part, place.address, nowhere)}))


# ---------------------------------------------------------------- staging


@dataclass(frozen=True)
class _Rows:
    """Rows of the first dimension of a tensor in a file of an anchor, of which a held box has something."""

    box: int
    begin: int
    end: int


class StagedSlices(StagedTensors):
    """Decoded columns of the groups that the boxes need. nbytes: what was fetched for it."""

    target: SliceTarget

    def __init__(self, target: SliceTarget, reader: Reader, plan: Plan) -> None:
        self.nbytes = 0
        self._added = np.zeros(len(target.held().tensor), np.uint64)
        super().__init__(target, reader, plan)

    def _fetch(self, reader: Reader, versions: Sequence[int]) -> Generator[Delta]:
        for version in versions:
            tiling = reader.tiling(reader.manifest(version))
            reach = self.target.held().reach(tiling)
            reach.locate(self.target.device(self.threads))
            delta = reader.delta(version, reach.wanted, room=self.device.room)
            self.nbytes += delta.nbytes
            yield delta

    def _require_twins(self, version: int, table: U64) -> None:
        held = self.target.held()
        differ = table[held.tensor] != table[held.tensor[held.owner]]
        if differ.any():
            raise ConfigError(
                f"version {version} has other values for {held.names(differ)[0]} than for the tensor with which it "
                "shares its memory here; untie them"
            )

    def apply(self) -> None:
        """Write the slices. After an error that leaves them between versions the target is Poisoned."""
        self._added[:] = 0
        super().apply()
        self.target._table = self.target._table + self._added

    def undo(self) -> int | None:
        """Take back what `apply` has done; see StagedTensors."""
        self._added[:] = 0
        version = super().undo()
        self.target._table = self.target._table + self._added
        return version

    def _flip(
        self,
        delta: Delta,
        staged: Sequence[object],
        step: Step,
        memory: TensorMemory,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[str]:
        meanwhile()
        held = self.target.held()
        reach = held.reach(delta.tiling)
        total = np.zeros(len(reach.keys), np.uint64)
        added = np.zeros(len(held.tensor), np.uint64)
        device = self.target.device(self.threads)
        for one, located in zip(reach.passes, reach.locate(device), strict=True):
            found = device.apply_rows(delta.tiling, staged, located)
            np.add.at(added, one.mine, found[one.box])
            np.add.at(total, reach.pair[one.proves], found[one.proves])
        self._added += added[held.owner]
        wrong = reach.proven & (total != reach.expected(delta, undo=step.undo))
        return reach.names(wrong)

    def _reseed(self, anchor: AnchorSource) -> None:
        target, held = self.target, self.target.held()
        self.nbytes += _read_boxes(held, anchor, self.threads)
        target._table = target._pass_over(self.threads)
        wrong = held.names(held.whole & (target._table != anchor.fingerprints[held.tensor]))
        if wrong:
            what = f"anchor of version {anchor.anchor.version} is damaged; make another anchor"
            if anchor.anchor.folder is None:
                what = source_lacks(anchor.anchor, anchor.store)
            raise Poisoned(f"{what}: {named(wrong)} differs")


def _read_boxes(held: Held, anchor: AnchorSource, threads: int | None) -> int:
    """Read every box from the files of an anchor; returns the bytes that were read."""
    import torch

    checkpoint = anchor.checkpoint
    work: list[_Rows] = []
    row_bytes = np.zeros(len(held.tensor), np.int64)
    for i in np.flatnonzero(held.owner == np.arange(len(held.owner))).tolist():
        first, width = int(held.first[i]), int(held.layout.width[held.tensor[i]])
        row_bytes[i] = int(held.shape[i, first + 1 :].prod()) * width
        rows = max(1, _BLOCK // int(row_bytes[i]))
        begin, end = int(held.begin[i, first]), int(held.end[i, first])
        work += [_Rows(i, b, min(b + rows, end)) for b in range(begin, end, rows)]

    def read(rows: _Rows) -> int:
        i, t = rows.box, int(held.tensor[rows.box])
        first, width = int(held.first[i]), int(held.layout.width[t])
        count = rows.end - rows.begin
        block = np.empty(count * int(row_bytes[i]), np.uint8)
        offset = int(checkpoint.offset[t]) + rows.begin * int(row_bytes[i])
        key = anchor.keys[int(checkpoint.file[t])]
        anchor.store.read_into(key, memoryview(block).cast("B"), offset=offset)
        shape = [count, *held.shape[i, first + 1 :].tolist()]
        cut = zip(held.begin[i, first + 1 :].tolist(), held.end[i, first + 1 :].tolist(), strict=True)
        elements = block if width == 1 else block.view(f"<i{width}")
        mine = torch.from_numpy(elements.reshape(shape)[(slice(None), *(slice(b, e) for b, e in cut))])
        memory = held.memory[i]
        if memory.dim() != len(shape):
            memory = memory.view(-1)
        with torch.inference_mode():  # tensors of it may be written inside only
            memory[rows.begin - int(held.begin[i, first]) :][:count].copy_(mine)
        return len(block)

    total = sum(requests(anchor.store, read, work, threads))
    if held.tensors and held.tensors[0].is_cuda:
        # Other threads have copied, on streams of theirs.
        torch.cuda.synchronize(held.tensors[0].device)
    return total
