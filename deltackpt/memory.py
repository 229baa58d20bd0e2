"""Memory of live tensors: on the host by its address, on another device through torch.

Bytes are copied from and to host memory; single elements are read, and exchanged for others, where they are. Whose
memory it is, and when it may be written, is the caller's business. Needs torch and numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from deltackpt.errors import ConfigError
from deltackpt.kernels import U8, view
from deltackpt.layout import I64
from deltackpt.pool import in_order

if TYPE_CHECKING:
    import torch

Elements: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

DEVICES = frozenset({"cpu", "cuda"})
"""Types of devices whose memory is reached from its address."""
BY_ADDRESS = frozenset({"cpu"})
"""Those where numpy reaches it."""


class DeviceBytes:
    """Memory of a GPU as torch takes it without a copy; a tensor keeps the object."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def on_host(device: torch.device) -> bool:
    """Say whether numpy reaches the memory of a device."""
    return device.type in BY_ADDRESS


def _tensor(device: torch.device, address: int, nbytes: int) -> torch.Tensor:
    """Return the bytes at an address. The caller keeps the memory alive."""
    import torch

    if device.type == "cpu":
        return torch.from_numpy(view(address, nbytes))
    return torch.as_tensor(DeviceBytes(address, nbytes), device=device)


def _settle(device: torch.device) -> None:
    """Return when all that was begun on a device, on whichever stream, has ended."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read(device: torch.device, address: int, nbytes: int) -> U8:
    """Return bytes of a device in host memory: those themselves where it is the host's, else a copy."""
    if on_host(device):
        return view(address, nbytes)
    _settle(device)
    copy: U8 = _tensor(device, address, nbytes).to("cpu", copy=True).numpy()
    return copy


def write(device: torch.device, address: int, raw: U8) -> None:
    """Overwrite bytes of a device."""
    import torch

    if on_host(device):
        view(address, len(raw))[:] = raw
        return
    _settle(device)
    _tensor(device, address, len(raw)).copy_(torch.from_numpy(np.ascontiguousarray(raw)))
    _settle(device)


# ---------------------------------------------------------------- single elements


@dataclass(frozen=True)
class Piece:
    """Elements of one width in a memory, what they are and what they will be. at: indices of that width, rising."""

    at: I64
    old: Elements
    new: Elements

    @property
    def undone(self) -> Piece:
        """The way back."""
        return Piece(self.at, self.new, self.old)


class Exchange(Protocol):
    """Values that are ready to be written where others are now."""

    @property
    def undone(self) -> Exchange:
        """The way back."""

    def unchanged(self) -> bool:
        """Say whether memory still has the old values."""

    def run(self) -> bool:
        """Write the new values if memory has the old ones; if it has not anywhere, leave all as it was: False."""


class Memory(Protocol):
    """A stretch of memory on one device, from the first to the last of some tensors. Only they may be touched."""

    def take(self, width: int, at: I64) -> Elements:
        """Return elements, given by indices of their width."""

    def exchange(self, pieces: Sequence[Piece], threads: int | None) -> Exchange:
        """Make ready what is to be written. Pieces do not overlap."""


def memory_at(device: torch.device, address: int, nbytes: int) -> Memory:
    """Return the memory at an address; both it and its size are multiples of 8."""
    return HostMemory(address, nbytes) if on_host(device) else DeviceMemory(device, address, nbytes)


class HostMemory:
    """Memory of the host."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._bytes = view(address, nbytes)

    def elements(self, width: int) -> Elements:
        """Return all of it, as elements."""
        return self._bytes.view(f"<u{width}")

    def take(self, width: int, at: I64) -> Elements:
        """See Memory."""
        return self.elements(width)[at]

    def exchange(self, pieces: Sequence[Piece], threads: int | None) -> HostExchange:
        """See Memory."""
        return HostExchange(self, pieces, threads)


@dataclass(frozen=True)
class HostExchange:
    """See Exchange. Pieces are compared and written side by side: each stays in a cache meanwhile."""

    memory: HostMemory
    pieces: Sequence[Piece]
    threads: int | None

    @property
    def undone(self) -> HostExchange:
        """See Exchange."""
        return HostExchange(self.memory, [p.undone for p in self.pieces], self.threads)

    def unchanged(self) -> bool:
        """See Exchange."""

        def work(piece: Piece) -> bool:
            return np.array_equal(self.memory.elements(piece.old.itemsize)[piece.at], piece.old)

        return all(list(in_order(work, self.pieces, self.threads)))

    def run(self) -> bool:
        """See Exchange."""
        written: list[Piece] = []

        def work(piece: Piece) -> bool:
            memory = self.memory.elements(piece.old.itemsize)
            if not np.array_equal(memory[piece.at], piece.old):
                return False
            memory[piece.at] = piece.new
            written.append(piece)
            return True

        if all(list(in_order(work, self.pieces, self.threads))):
            return True
        for piece in written:
            self.memory.elements(piece.old.itemsize)[piece.at] = piece.old
        return False


class DeviceMemory:
    """Memory of a device, on a stream of its own: what is read of it does not wait for what the engine computes."""

    def __init__(self, device: torch.device, address: int, nbytes: int) -> None:
        import torch

        self.device = device
        self._bytes = _tensor(device, address, nbytes)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def stream(self) -> torch.cuda.StreamContext:
        """Put what is begun inside on the stream."""
        import torch

        return torch.cuda.stream(self._stream)

    def elements(self, width: int) -> torch.Tensor:
        """Return all of it, as elements. Signed: torch can index those of every width."""
        return self._bytes.view(_signed(width))

    def take(self, width: int, at: I64) -> Elements:
        """See Memory."""
        import torch

        with self.stream():
            found = self.elements(width)[torch.from_numpy(at).to(self.device)].cpu()
        taken: Elements = found.numpy().view(f"<u{width}")
        return taken

    def exchange(self, pieces: Sequence[Piece], threads: int | None) -> DeviceExchange:
        """See Memory. Raises ConfigError where the device has no room for the values."""
        import torch

        widths = sorted({p.old.itemsize for p in pieces})
        try:
            with self.stream():
                columns = [self._columns(w, [p for p in pieces if p.old.itemsize == w]) for w in widths]
        except torch.cuda.OutOfMemoryError as exc:
            need = sum(p.at.nbytes + p.old.nbytes + p.new.nbytes for p in pieces)
            raise ConfigError(
                f"{self.device} has no room for the {need} bytes of a version's changes; leave the engine less memory"
            ) from exc
        _settle(self.device)
        return DeviceExchange(self, columns)

    def _columns(self, width: int, pieces: Sequence[Piece]) -> _Columns:
        import torch

        count, dtype = sum(len(p.at) for p in pieces), _signed(width)
        at = torch.empty(count, dtype=torch.int64, device=self.device)
        old, new = (torch.empty(count, dtype=dtype, device=self.device) for _ in range(2))
        begin = 0
        for piece in pieces:
            mine = slice(begin, begin := begin + len(piece.at))
            at[mine] = torch.from_numpy(piece.at)
            for whole, part in ((old, piece.old), (new, piece.new)):
                whole[mine] = torch.from_numpy(part.view(f"<i{width}"))
        return _Columns(width, at, old, new)


@dataclass(frozen=True)
class _Columns:
    """All pieces of one width, on the device."""

    width: int
    at: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True)
class DeviceExchange:
    """See Exchange. All pieces of a width are one; all are compared before any is written."""

    memory: DeviceMemory
    columns: Sequence[_Columns] = field(repr=False)

    @property
    def undone(self) -> DeviceExchange:
        """See Exchange."""
        return DeviceExchange(self.memory, [_Columns(c.width, c.at, c.new, c.old) for c in self.columns])

    def unchanged(self) -> bool:
        """See Exchange."""
        import torch

        with self.memory.stream():
            return all(torch.equal(self.memory.elements(c.width)[c.at], c.old) for c in self.columns)

    def run(self) -> bool:
        """See Exchange."""
        # What the engine has begun, on whichever stream, still reads the old values.
        _settle(self.memory.device)
        if not self.unchanged():
            return False
        with self.memory.stream():
            for one in self.columns:
                self.memory.elements(one.width)[one.at] = one.new
        _settle(self.memory.device)
        return True


def _signed(width: int) -> torch.dtype:
    import torch

    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
