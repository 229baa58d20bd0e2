"""The CUDA backend: the same calls as `backend`, for tensors on an NVIDIA GPU.

Changes are extracted, put in order, applied and fingerprinted on the device, by one launch for all tensors of a window
or of a version. Memory of its own: what `launch`, `extraction` and `staging` name, and what nvCOMP works in. Needs
cuda-core.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from deltackpt import arena, libnvcomp, nvcomp
from deltackpt import codec as codecs
from deltackpt.backend import whole_boxes
from deltackpt.digest import U64
from deltackpt.errors import ConfigError, Poisoned
from deltackpt.extraction import Extraction, extract
from deltackpt.kernels import Place
from deltackpt.launch import (
    THREADS,
    Where,
    kernels_of,
    levels_of,
    put_on,
    row_sums,
    tables_of,
    tile_numbers,
    unsigned,
    zeros,
)
from deltackpt.layout import I64, Layout, Segments, Tiling
from deltackpt.partition import Partition
from deltackpt.shard import Fetched
from deltackpt.staging import StagedColumns, stage

if TYPE_CHECKING:
    import torch


def apply(staged: StagedColumns, where: Where, meanwhile: Callable[[], None] = lambda: None) -> U64:
    """Apply staged columns in place; returns what that added to fingerprints, by row.

    Returns when the device is done; `meanwhile` is called while it works.
    """
    fp = row_sums(staged.tables)
    with nvcomp.fatal("applying"):
        staged.apply(where, fp)
        meanwhile()
        return unsigned(fp)


def fingerprints(layout: Layout, tensors: U64, device: torch.device) -> U64:
    """Return the fingerprint of each tensor: a full pass over device memory."""
    tables = tables_of(layout, device)
    fp = row_sums(tables)
    if tables.tiles:
        kernels_of(device.index or 0)(
            "fingerprint", tables.tiles, THREADS, *tables.rows, tables.whole(tensors).runs, tables.row_width, fp
        )
    return tables.per_tensor(unsigned(fp))


def box_fingerprints(width: I64, place: Place, device: torch.device) -> U64:
    """Return what boxes, all of each there, add to the fingerprints of their tensors. width: of each one's elements."""
    put = partial(put_on, device=device)
    count: I64 = place.extent.prod(axis=1)
    row, index = tile_numbers(count)
    fp = zeros(len(count), device)
    if len(row):
        kernels_of(device.index or 0)(
            "fingerprint_boxes", len(row), THREADS, put(row), put(index), put(count), put(np.zeros_like(count)),
            put(width.astype(np.uint8)), put(place.address), put(place.first), levels_of(place, device),
            np.uint32(place.extent.shape[1]), fp,
        )  # fmt: skip
    return unsigned(fp)


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
        """See backend.Device."""
        return self._encode(partition, part, old, new, codec, form)

    def part_fingerprints(self, partition: Partition, part: int, boxes: U64) -> U64:
        """See backend.Device."""
        tensor, place = whole_boxes(partition, part, boxes)
        return self.box_fingerprints(partition.layout, tensor, place)

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
        staged = stage(
            tiling,
            fetched,
            self.device,
            room=self.room,
            on_device=self.nvcomp,
            engine=self.engine,
            threads=self.threads,
        )
        staged.wait()
        return [staged]

    def apply(
        self, tiling: Tiling, staged: Sequence[object], tensors: U64, meanwhile: Callable[[], None] = lambda: None
    ) -> U64:
        """See backend.Device. Returns when the device is done."""
        columns = _only(staged)
        return columns.tables.per_tensor(apply(columns, columns.tables.whole(tensors), meanwhile))

    def locate(self, tiling: Tiling, where: Callable[[Segments], tuple[U64, Place | None]]) -> Where:
        """See backend.BoxDevice."""
        tables = tables_of(tiling, self.device)
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
        assert isinstance(located, Where)
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
        import torch
        from cuda.bindings import driver

        # In a thread that is new to the device, this also makes its context the current one.
        torch.cuda.current_stream(self.device).synchronize()
        (error,) = driver.cuMemcpy(target, source, nbytes)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise Poisoned(f"copying {nbytes} bytes on {self.device}: {error.name}; the CUDA context is lost, restart")


def _only(staged: Sequence[object]) -> StagedColumns:
    (columns,) = staged
    assert isinstance(columns, StagedColumns)
    return columns
