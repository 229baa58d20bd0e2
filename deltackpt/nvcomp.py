"""Frames in device memory to compressed frames and back, many in one call, by nvCOMP.

Only RAW bitstreams: what nvCOMP compresses `codec` decompresses and the other way round, except for ans, which only
nvCOMP reads. All work goes to torch's current stream of the memory's device, and every frame lies at a multiple of 16
bytes, which is what the most demanding of the codecs asks for and what shards do anyway.

**Only bytes whose checksum was compared may come here.** On corrupt frames nvCOMP's decoders read and write where they
should not, or give wrong bytes and report success; for bytes that nobody vouches for there is `codec.decode`. A frame
can therefore only fail here if whoever compressed it was wrong, or the device is.

A CUDA error is fatal: the context is lost, Poisoned is raised, and only a new process can use the device again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deltackpt import arena
from deltackpt import codec as codecs
from deltackpt.errors import ConfigError, FormatError, IntegrityError, Poisoned
from deltackpt.layout import I64
from deltackpt.libnvcomp import FORMATS, STATUS, Format, Library, load

if TYPE_CHECKING:
    import torch

HARDWARE, CUDA = 1, 2
"""Who decompresses: a Decompression Engine, or kernels. As nvcompDecompressBackend_t; its 0 chooses by itself."""
BACKENDS = {HARDWARE: "hardware", CUDA: "cuda"}

ENTROPY, MATCHES = 0, 1
"""How deflate compresses: Huffman codes alone, right for columns, or with matches, right for masks."""

ALIGN = 16
"""Frames begin at multiples of this many bytes of memory, on either side."""
LONGEST = 1 << 24
"""Bytes of a frame, on either side: the least of the limits of nvCOMP's codecs."""

_PAGES = 256 << 20
"""Device memory for compressed frames at their worst size. More frames are compressed in several batches."""
_TEMP = 512 << 20
"""Device memory that a codec works in; zstd wants three times what it decodes. More go in several batches."""
_UNSET = -1
"""Status before a decoder gave one; none of nvCOMP's."""

# ---------------------------------------------------------------- the device

_COPY = r"""
extern "C" __global__ void copy(const unsigned char* const* from, unsigned char* const* to, const long long* nbytes) {
  // Frames are aligned to 16 bytes; grid: frames, slices of each.
  const long long n = nbytes[blockIdx.x], whole = n / 16, step = (long long)gridDim.y * blockDim.x;
  const long long first = (long long)blockIdx.y * blockDim.x + threadIdx.x;
  const uint4* a = (const uint4*)from[blockIdx.x];
  uint4* b = (uint4*)to[blockIdx.x];
  for (long long i = first; i < whole; i += step) b[i] = a[i];
  for (long long i = whole * 16 + first; i < n; i += step) to[blockIdx.x][i] = from[blockIdx.x][i];
}
"""
_SLICES = 8


@lru_cache
def _copy_kernel(index: int) -> Any:
    from cuda.core import Device, Program, ProgramOptions

    device = Device(index)
    device.set_current()
    major, minor = device.compute_capability
    options = ProgramOptions(std="c++17", arch=f"sm_{major}{minor}")
    return Program(_COPY, code_type="c++", options=options).compile("cubin").get_kernel("copy")


@contextmanager
def fatal(what: str) -> Iterator[None]:
    """Turn an error of the device, of this work or of earlier work, into Poisoned."""
    try:
        yield
    except RuntimeError as exc:
        # torch has a class of its own for these only since 2.8.
        if not str(exc).startswith("CUDA error"):
            raise
        raise Poisoned(f"{what}: {str(exc).splitlines()[0]}; the CUDA context is lost, restart the process") from exc


class Queue:
    """torch's current stream of a device, at the moment when this is made."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device, self._torch = device, torch
        self.handle = torch.cuda.current_stream(device).cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def current(self) -> torch.cuda.device:
        """Return a context in which the device is the current one, as nvCOMP needs it."""
        return self._torch.cuda.device(self.device)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory, aligned to 256 bytes."""
        return self._torch.empty(max(1, nbytes), dtype=self._torch.uint8, device=self.device)

    def upload(self, rows: Sequence[I64], memory: torch.Tensor) -> torch.Tensor:
        """Put a table i64[rows, n] into device memory; the host does not wait for the stream."""
        # A copy out of pageable memory would wait until all earlier work of the stream is done.
        host = self._torch.empty((len(rows), len(rows[0])), dtype=self._torch.int64, pin_memory=True)
        np.stack(rows, out=host.numpy())
        table = memory[: host.nbytes].view(self._torch.int64).view(host.shape)
        return table.copy_(host, non_blocking=True)

    def download(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Copy to pinned host memory; it is there once the event is."""
        host = self._torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
        host.copy_(memory, non_blocking=True)
        event = self._torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(self._torch.cuda.current_stream(self.device))
        return host, event

    def copy(self, source: torch.Tensor, target: torch.Tensor, nbytes: torch.Tensor) -> None:
        """Launch a copy of one frame per row; i64[n] in device memory: addresses, and bytes."""
        from cuda.core import Device, LaunchConfig, launch

        kernel = _copy_kernel(self.device.index or 0)
        device = Device(self.device.index or 0)
        device.set_current()
        config = LaunchConfig(grid=(len(source), _SLICES), block=256)
        addresses = [np.uint64(t.data_ptr()) for t in (source, target, nbytes)]
        launch(device.create_stream(self), config, kernel, *addresses)


class _Scratch:
    """Device memory for tables and temporaries: of the caller, or of torch."""

    def __init__(self, queue: Queue, memory: torch.Tensor | None) -> None:
        self._queue, self._memory, self._used = queue, memory, 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory that nobody else has taken, aligned to 256 bytes."""
        if self._memory is None:
            return self._queue.empty(nbytes)
        begin = self._used
        self._used = begin + -(-max(1, nbytes) // 256) * 256
        if self._used > len(self._memory):
            raise ConfigError(
                f"scratch of {len(self._memory)} bytes, at least {self._used} are needed; see nvcomp.scratch_nbytes"
            )
        return self._memory[begin : begin + nbytes]


# ---------------------------------------------------------------- frames


def _require_frames(what: str, memory: torch.Tensor, offset: I64, nbytes: I64, *, disjoint: bool) -> None:
    """Raise unless each frame lies in memory, where nvCOMP can take it, and on no other if `disjoint`.

    FormatError for rows out of bounds, ConfigError for memory that does not fit.
    """
    if len(offset) != len(nbytes):
        raise ConfigError(f"{what}: {len(offset)} offsets and {len(nbytes)} sizes")
    if str(memory.dtype) != "torch.uint8" or memory.dim() != 1 or not memory.is_contiguous():
        raise ConfigError(f"{what}: {memory.dtype} {tuple(memory.shape)} found, contiguous bytes are expected")
    bad = np.flatnonzero((nbytes <= 0) | (nbytes > LONGEST) | (offset < 0) | (offset > len(memory) - nbytes))
    if len(bad):
        i = int(bad[0])
        raise FormatError(
            f"{what}: frame {i} of {nbytes[i]} bytes at {offset[i]} does not lie in {len(memory)} bytes, or is longer "
            f"than {LONGEST}"
        )
    bad = np.flatnonzero((offset + memory.data_ptr()) % ALIGN)
    if len(bad):
        i = int(bad[0])
        raise ConfigError(
            f"{what}: frame {i} begins at address {memory.data_ptr() + int(offset[i]):#x}; lay frames out at "
            f"multiples of {ALIGN}"
        )
    if disjoint:
        order = np.argsort(offset, kind="stable")
        if np.any((offset + nbytes)[order][:-1] > offset[order][1:]):
            raise FormatError(f"{what}: two frames overlap")


def _format(codec: int) -> Format:
    if codec not in FORMATS:
        name = codecs.NAMES[codec] if 0 <= codec < len(codecs.NAMES) else "unknown"
        raise ConfigError(f"codec {codec} ({name}) is not one of nvCOMP's: {[codecs.NAMES[c] for c in FORMATS]}")
    return FORMATS[codec]


@dataclass(frozen=True)
class Compressed:
    """Compressed frames, one after the other at multiples of 16, with zeros between them.

    memory: u8 on the device, as many bytes as the frames take; behind it lies room for all raw bytes, which stays
    allocated for as long as the tensor does, so copy it out and let it go. offset, nbytes: i64[n] in it. codec: u8[n],
    what `compress` was told, or RAW for frames that keep more than 97 % of their bytes, as in `codec.encode`.
    """

    memory: torch.Tensor
    offset: I64
    nbytes: I64
    codec: npt.NDArray[np.uint8]


def compress(codec: int, raw: torch.Tensor, offset: I64, nbytes: I64, *, algorithm: int = ENTROPY) -> Compressed:
    """Compress frames of device memory; waits for the device once, at the end, for the sizes.

    raw: u8, on a GPU; offset, nbytes: i64[n], n > 0, in bytes, each frame at a multiple of 16. algorithm: for deflate.
    Read on torch's current stream: raw must not change before the call returns. Device memory used meanwhile: the raw
    bytes of all frames once more, 256 MiB of pages, and at most 256 MiB that the codec works in. Raises ConfigError for
    what is not taken here, FormatError for rows out of bounds, IntegrityError for frames that could not be compressed,
    Poisoned for a CUDA error.
    """
    import torch

    form, library = _format(codec), load()
    what = f"frames to compress with {codecs.NAMES[codec]}"
    _require_frames(what, raw, offset, nbytes, disjoint=False)
    queue = Queue(raw.device)
    with fatal(what), queue.current():
        n, longest = len(offset), int(nbytes.max())
        options = form.compress_options(algorithm)
        page = aligned(library.ask(form, "CompressGetMaxOutputChunkSize", longest, options, None))
        step, room = _batch(library, form, options, nbytes, max(1, _PAGES // page), queue.handle)
        temp = queue.empty(room)
        table = queue.upload([offset + raw.data_ptr(), nbytes], queue.empty(16 * n))
        pages = queue.empty(step * page)
        page_at = torch.arange(step, dtype=torch.int64, device=raw.device) * page + pages.data_ptr()
        # Zeros lie between frames, so that equal frames make equal shards.
        memory = torch.zeros(int(aligned(nbytes).sum()), dtype=torch.uint8, device=raw.device)
        size = torch.zeros(n, dtype=torch.int64, device=raw.device)
        status = torch.full((n,), _UNSET, dtype=torch.int32, device=raw.device)
        rows = torch.empty((4, n), dtype=torch.int64, device=raw.device)
        end = torch.zeros(1, dtype=torch.int64, device=raw.device)
        for begin in range(0, n, step):
            span = slice(begin, begin + step)
            source, whole = table[0, span], table[1, span]
            count = len(source)
            library(
                form, "CompressAsync", source.data_ptr(), whole.data_ptr(), longest, count, temp.data_ptr(), room,
                page_at.data_ptr(), size[span].data_ptr(), options, status[span].data_ptr(), queue.handle,
            )  # fmt: skip
            plain = size[span] > codecs.GAIN * whole.double()
            stored = torch.where(plain, whole, size[span])
            taken = aligned(stored)
            ends = torch.cumsum(taken, 0) + end
            begins = ends - taken
            end = ends[-1:]
            queue.copy(torch.where(plain, source, page_at[:count]), begins + memory.data_ptr(), stored)
            rows[0, span], rows[1, span], rows[2, span], rows[3, span] = begins, stored, plain, status[span]
        found, event = queue.download(rows)
        event.synchronize()
    at, stored_nbytes, is_plain, statuses = found.numpy().copy()
    _require_statuses(what, statuses)
    used = int(at[-1] + aligned(stored_nbytes[-1]))
    kinds = np.where(is_plain != 0, codecs.RAW, codec).astype(np.uint8)
    return Compressed(memory[:used], at, stored_nbytes, kinds)


def aligned(nbytes: Any) -> Any:
    """Round bytes up to where the next frame may begin."""
    return -(-nbytes // ALIGN) * ALIGN


def _require_statuses(what: str, statuses: npt.NDArray[Any]) -> None:
    bad = np.flatnonzero(statuses)
    if len(bad):
        status = int(statuses[bad[0]])
        answer = "nothing" if status == _UNSET else f"{status} ({STATUS.get(status, 'unknown')})"
        raise IntegrityError(
            f"{what}: nvCOMP answers {answer} for frame {bad[0]} and {len(bad) - 1} others; try again, or use the CPU"
        )


@dataclass(frozen=True)
class Check:
    """What a decoder will have said of its frames, once the device is there."""

    what: str
    due: I64
    results: torch.Tensor
    event: torch.cuda.Event
    held: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Return when all frames are decoded and each has its length.

        Raises IntegrityError where nvCOMP reports no success, FormatError where a frame has another length than is due,
        Poisoned for a CUDA error.
        """
        with fatal(self.what):
            self.event.synchronize()
        actual, statuses = self.results.numpy()
        _require_statuses(self.what, statuses)
        bad = np.flatnonzero(actual != self.due)
        if len(bad):
            i = int(bad[0])
            raise FormatError(f"{self.what}: frame {i} holds {actual[i]} bytes, {self.due[i]} are due")


def decompress(
    codec: int,
    stored: torch.Tensor | Sequence[torch.Tensor],
    offset: I64,
    nbytes: I64,
    out: torch.Tensor,
    out_offset: I64,
    out_nbytes: I64,
    *,
    backend: int = CUDA,
    scratch: torch.Tensor | None = None,
) -> Check:
    """Decompress frames into device memory, each to its place; does not wait for the device.

    stored: u8, on the device, or host memory that it reads in place: pinned, or `arena.host_memory`; where there are
    several, offsets count through all of them. **Checksums were compared before.** offset, nbytes: i64[n], n > 0.
    out: u8, on a GPU; out_offset, out_nbytes: i64[n], where each frame goes and how many bytes it has to have. Bytes;
    every frame at a multiple of 16; those of `out` on no other.
    scratch: u8 on the device, at least `scratch_nbytes`, for tables and for what the decoder works in; without it they
    come from torch. HARDWARE never falls back to kernels; stored, out and scratch have to be capable, see `arena`, and
    nvCOMP may wait for what the stream was given before: use a stream of its own.

    All is put on torch's current stream. stored, out and scratch belong to the call until that stream has passed it, at
    the latest when `Check.wait` returns: memory of another stream or of the host must not be written or freed before;
    what torch allocated on the current stream may be let go at once. Until then nobody may rely on `out`. Raises
    ConfigError, FormatError for rows out of bounds, Poisoned for a CUDA error.
    """
    import torch

    form, library = _format(codec), load()
    what = f"{codecs.NAMES[codec]} frames by {BACKENDS[backend]}"
    memories, address = _located(what, stored, offset, nbytes, out.device)
    _require_frames(f"{what}, decoded", out, out_offset, out_nbytes, disjoint=True)
    if len(offset) != len(out_offset):
        raise ConfigError(f"{what}: {len(offset)} frames for {len(out_offset)} places")
    if backend == HARDWARE:
        require_engine(codec, out.device, max(int(nbytes.max()), int(out_nbytes.max())))
    queue = Queue(out.device)
    with fatal(what), queue.current():
        n, options, memory = len(offset), form.decompress_options(backend), _Scratch(queue, scratch)
        rows = [address, nbytes, out_offset + out.data_ptr(), out_nbytes]
        source, size, target, due = queue.upload(rows, memory.take(32 * n))
        # Hardware writes only the low half of a size.
        actual = memory.take(8 * n).view(torch.int64).zero_()
        status = memory.take(4 * n).view(torch.int32).fill_(_UNSET)
        if backend == HARDWARE:
            _require_capable((*memories, out, actual), out.device)
        step, room = _batch(library, form, options, out_nbytes, n, queue.handle)
        temp = memory.take(room)
        for begin in range(0, n, step):
            span = slice(begin, begin + step)
            library(
                form, "DecompressAsync", source[span].data_ptr(), size[span].data_ptr(), due[span].data_ptr(),
                actual[span].data_ptr(), len(source[span]), temp.data_ptr(), room, target[span].data_ptr(), options,
                status[span].data_ptr(), queue.handle,
            )  # fmt: skip
        both = memory.take(16 * n).view(torch.int64).view(2, n)
        both[0], both[1] = actual, status
        results, event = queue.download(both)
    return Check(what, out_nbytes, results, event, (source, actual, status, temp, both))


def _batch(
    library: Library, form: Format, options: ctypes.Structure, nbytes: I64, most: int, stream: int
) -> tuple[int, int]:
    """Return how many frames go into one call, `most` at most, and the bytes that the codec works in meanwhile.

    nbytes: of the frames when they are not compressed.
    """
    call = "CompressGetTempSize" if isinstance(options, form.compress) else "DecompressGetTempSize"
    longest, everything = int(nbytes.max()), int(nbytes.sum())

    def room(count: int) -> int:
        total = min(everything, count * longest)
        return library.ask(form, call, count, longest, options, None, total, stream)

    step = min(most, len(nbytes))
    wanted = room(step)
    if wanted > _TEMP:
        step = max(1, step * _TEMP // wanted)
        wanted = room(step)
    return step, wanted


def scratch_nbytes(codec: int, out_nbytes: I64, device: torch.device, *, backend: int = CUDA) -> int:
    """Return the bytes of scratch that `decompress` of such frames needs."""
    form, queue, n = _format(codec), Queue(device), len(out_nbytes)
    with queue.current():
        _, room = _batch(load(), form, form.decompress_options(backend), out_nbytes, n, queue.handle)
    return sum(-(-max(1, part) // 256) * 256 for part in (32 * n, 8 * n, 4 * n, room, 16 * n))


def place(
    stored: torch.Tensor | Sequence[torch.Tensor], offset: I64, out: torch.Tensor, out_offset: I64, nbytes: I64
) -> None:
    """Copy frames that are stored raw to their places, on torch's current stream; does not wait for the device.

    Arguments, alignment and the life of memory as in `decompress`. Raises ConfigError, and FormatError for rows out of
    bounds.
    """
    what = "raw frames"
    _, address = _located(what, stored, offset, nbytes, out.device)
    _require_frames(f"{what}, placed", out, out_offset, nbytes, disjoint=True)
    queue = Queue(out.device)
    with queue.current():
        rows = [address, out_offset + out.data_ptr(), nbytes]
        source, target, size = queue.upload(rows, queue.empty(24 * len(offset)))
        queue.copy(source, target, size)


def _located(
    what: str, stored: torch.Tensor | Sequence[torch.Tensor], offset: I64, nbytes: I64, device: torch.device
) -> tuple[Sequence[torch.Tensor], I64]:
    """Return the memories and the address of each frame. Raises as `_require_frames` and `_require_readable` do."""
    if len(offset) != len(nbytes):
        raise ConfigError(f"{what}, stored: {len(offset)} offsets and {len(nbytes)} sizes")
    memories = stored if isinstance(stored, Sequence) else [stored]
    begins = np.cumsum([0, *(len(m) for m in memories)])
    which = np.clip(np.searchsorted(begins, offset, side="right") - 1, 0, len(memories) - 1)
    for i, memory in enumerate(memories):
        mine = which == i
        _require_frames(f"{what}, stored", memory, offset[mine] - begins[i], nbytes[mine], disjoint=False)
        _require_readable(what, memory, device)
    pointers = np.array([m.data_ptr() for m in memories], np.int64)
    return memories, offset - begins[which] + pointers[which]


def _require_readable(what: str, stored: torch.Tensor, device: torch.device) -> None:
    """Raise ConfigError unless the device reads this memory."""
    if stored.device == device or (
        stored.device.type == "cpu" and (stored.is_pinned() or arena.capable(stored, device))
    ):
        return
    raise ConfigError(f"{what}: stored on {stored.device}, {device} cannot read them there; pin or copy them")


def require_engine(codec: int, device: torch.device, longest: int) -> None:
    """Raise ConfigError unless the driver says that the device's Decompression Engine reads such frames."""
    found, name = arena.capability(device), codecs.NAMES[codec]
    if not found.reads(codec):
        raise ConfigError(
            f"no Decompression Engine of {device} reads {name}: the driver reports mask {found.mask:#x} "
            f"({', '.join(found.codecs) or 'nothing'}); use backend cuda or cpu"
        )
    if longest > found.limit:
        raise ConfigError(
            f"a {name} frame of {longest} bytes, the Decompression Engine of {device} takes at most {found.limit}; "
            "use backend cuda or cpu"
        )


def _require_capable(memories: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raise ConfigError unless the Decompression Engine reaches all of this memory."""
    for memory in memories:
        if not arena.capable(memory, device):
            raise ConfigError(
                f"memory at {memory.data_ptr():#x} on {memory.device} is not capable of hardware decompression "
                "(pointer attribute 21 is 0); take stored, out and scratch from arena, or use backend cuda"
            )
