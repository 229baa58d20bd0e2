"""What others store for a changed checkpoint, and our codec in the same dress: candidates for `bench`.

The baselines do what their projects do, vectorised, with scratch memory that is reused, so that a ratio says something
about the format and not about careless code. Imports no torch. Longer than most modules: seven
candidates, one after the other.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import cramjam
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from deltackpt import backend
from deltackpt.digest import xxh3_64
from deltackpt.errors import ConfigError, IntegrityError
from deltackpt.layout import Layout
from deltackpt.shard import CHANGE, FRAME, EncodedGroup

T = TypeVar("T")
Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
Index: TypeAlias = npt.NDArray[np.signedinteger[Any]]

BLOCK = 2 << 20
"""Bytes that rivals XOR and hash at a time, and of one block of the double compression."""
BATCH = 1 << 20
"""Tensors are handed to a thread in batches of at least this many bytes."""
ESCAPE = 0xFFFF
"""A u16 gap that means: skip this many elements, none of them changed."""
PATCH_LIMIT = 2_000_000_000
"""`zstd --patch-from` cannot take a larger reference."""


@dataclass(frozen=True, eq=False)
class Pair:
    """One tensor before and after: contiguous bytes of equal length, elements of `width` bytes."""

    name: str
    old: Bytes
    new: Bytes
    width: int

    def __post_init__(self) -> None:
        if self.old.size != self.new.size or self.old.size % self.width:
            raise ConfigError(
                f"tensor {self.name}: {self.old.size} bytes before, {self.new.size} after, "
                f"elements of {self.width}; expected equal sizes in whole elements"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of one side."""
        return self.old.size


@dataclass(frozen=True, eq=False)
class Part:
    """What a baseline stores for one tensor: its index in the pairs, frames, a digest or b""."""

    tensor: int
    frames: tuple[bytes | Bytes, ...]
    digest: bytes = b""

    @property
    def stored(self) -> int:
        """Bytes of frames and digest; names and headers are left out for every candidate."""
        return len(self.digest) + sum(len(frame) for frame in self.frames)


@dataclass(frozen=True, eq=False)
class Payload:
    """One encoded update: parts of a baseline, or groups of ours and the checksums of frames."""

    parts: Sequence[Part] = ()
    groups: Sequence[EncodedGroup] = ()
    checksums: Sequence[int] = ()

    @property
    def stored(self) -> int:
        """Bytes to send; of ours with padding and the shard index."""
        frames = sum(len(group.frames) for group in self.groups)
        changes = sum(len(group.tensor) for group in self.groups)
        index = frames * FRAME.itemsize + changes * CHANGE.itemsize
        parts = sum(part.stored for part in self.parts)
        return index + parts + sum(group.stored for group in self.groups)


class Crew:
    """Worker threads, each with codec contexts and scratch memory of its own; one runs inline."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._local = threading.local()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def each(self, task: Callable[[int], T], nbytes: Sequence[int]) -> list[T]:
        """Return task(i) for every i, in order; nbytes[i] is the work of i."""
        if self._pool is None:
            return [task(i) for i in range(len(nbytes))]
        batches, first, total = [], 0, 0
        for i, size in enumerate(nbytes):
            total += size
            if total >= BATCH or i + 1 == len(nbytes):
                batches.append(range(first, i + 1))
                first, total = i + 1, 0
        run = self._pool.map(lambda batch: [task(i) for i in batch], batches)
        return [result for batch in run for result in batch]

    def scratch(self, nbytes: int, slot: int = 0) -> Bytes:
        """Return `nbytes` of this thread's memory; valid until its next call with this slot."""
        buffers: dict[int, Bytes] = self._local.__dict__.setdefault("buffers", {})
        if slot not in buffers or buffers[slot].size < nbytes:
            buffers[slot] = np.empty(nbytes, np.uint8)
        return buffers[slot][:nbytes]

    def compress(self, raw: bytes | Bytes) -> bytes:
        """Return one zstd frame, level 1, with its content size and no checksum."""
        contexts = self._local.__dict__
        if "encoder" not in contexts:
            contexts["encoder"] = zstandard.ZstdCompressor(level=1)
        frame: bytes = contexts["encoder"].compress(raw)
        return frame

    def decompress(self, frame: bytes | Bytes) -> Bytes:
        """Return the bytes of one zstd frame."""
        contexts = self._local.__dict__
        if "decoder" not in contexts:
            contexts["decoder"] = zstandard.ZstdDecompressor()
        return np.frombuffer(contexts["decoder"].decompress(frame), np.uint8)


@dataclass(frozen=True, eq=False)
class Live:
    """Weights that an apply changes in place: one array of bytes per pair, widths, addresses."""

    tensors: Sequence[Bytes]
    widths: Sequence[int]
    addresses: npt.NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "addresses", addresses(self.tensors))

    @classmethod
    def like(cls, pairs: Sequence[Pair]) -> Live:
        """Allocate room for every tensor, each at a multiple of 64 bytes."""
        starts = np.cumsum([0] + [-(-pair.nbytes // 64) * 64 for pair in pairs])
        arena = np.empty(int(starts[-1]) + 64, np.uint8)
        base = -arena.ctypes.data % 64
        tensors = [arena[base + s :][: p.nbytes] for s, p in zip(starts, pairs, strict=False)]
        return cls(tensors, [pair.width for pair in pairs])

    def elements(self, i: int) -> Words:
        """Return tensor i as unsigned integers of its element width."""
        return self.tensors[i].view(unsigned(self.widths[i]))

    def reset(self, pairs: Sequence[Pair]) -> None:
        """Copy the old tensors back."""
        for tensor, pair in zip(self.tensors, pairs, strict=True):
            np.copyto(tensor, pair.old)

    def check(self, pairs: Sequence[Pair], name: str) -> None:
        """Raise IntegrityError unless every tensor equals its new bytes."""
        for tensor, pair in zip(self.tensors, pairs, strict=True):
            if not np.array_equal(tensor, pair.new):
                raise IntegrityError(f"{name}: tensor {pair.name} differs after apply")


def addresses(tensors: Sequence[Bytes]) -> npt.NDArray[np.uint64]:
    """Return the address of each array's first byte."""
    return np.array([t.__array_interface__["data"][0] for t in tensors], np.uint64)


class Candidate(Protocol):
    """One way to store an update. `apply` turns live old weights into new ones, in place."""

    name: str

    def encode(self, pairs: Sequence[Pair], crew: Crew) -> Payload:
        """Return what is stored; unchanged tensors are left out."""

    def apply(self, payload: Payload, live: Live, crew: Crew) -> None:
        """Decode and apply. Raises IntegrityError where the format can tell."""


def unsigned(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(f"<u{width}")


def sizes_of(pairs: Sequence[Pair]) -> list[int]:
    return [pair.nbytes for pair in pairs]


def _encode_each(pairs: Sequence[Pair], crew: Crew, encode: Callable[[int, Pair], Part | None]) -> Payload:
    parts = crew.each(lambda i: encode(i, pairs[i]), sizes_of(pairs))
    return Payload([part for part in parts if part is not None])


def _apply_each(payload: Payload, live: Live, crew: Crew, apply: Callable[[Part], None]) -> None:
    sizes = [live.tensors[part.tensor].size for part in payload.parts]
    crew.each(lambda i: apply(payload.parts[i]), sizes)


def _changed(pair: Pair) -> Index:
    """Indices of the changed elements, int64, ascending."""
    kind = unsigned(pair.width)
    return np.flatnonzero(pair.old.view(kind) != pair.new.view(kind))


class MaskZstd:
    """XOR mask, one zstd-1 frame a tensor, xxh3-128 of the whole new tensor (slime, miles, SkyRL).

    Apply XORs and hashes in pieces of 2 MiB, as SGLang's `_apply_delta` does.
    """

    name = "(a) mask + zstd-1, xxh3-128 of all"

    def encode(self, pairs: Sequence[Pair], crew: Crew) -> Payload:
        """Return a frame and a digest for each changed tensor."""

        def one(i: int, pair: Pair) -> Part | None:
            mask = np.bitwise_xor(pair.old, pair.new, out=crew.scratch(pair.nbytes))
            if not mask.max(initial=0):
                return None
            return Part(i, (crew.compress(mask),), xxhash.xxh3_128_digest(pair.new.data))

        return _encode_each(pairs, crew, one)

    def apply(self, payload: Payload, live: Live, crew: Crew) -> None:
        """XOR each changed tensor and compare its digest."""

        def one(part: Part) -> None:
            weights, mask = live.tensors[part.tensor], crew.decompress(part.frames[0])
            digest = xxhash.xxh3_128()
            for s in range(0, weights.size, BLOCK):
                piece = weights[s : s + BLOCK]
                np.bitwise_xor(piece, mask[s : s + BLOCK], out=piece)
                digest.update(piece.data)
            if digest.digest() != part.digest:
                raise IntegrityError(f"tensor {part.tensor}: digest differs after apply")

        _apply_each(payload, live, crew, one)


class IndexValue:
    """Flat int32 index (int64 from 2^31 elements) and new value (TRL, verl): no check at all."""

    name = "(b) int32 index + value"

    def encode(self, pairs: Sequence[Pair], crew: Crew) -> Payload:
        """Return indices and values of each changed tensor."""

        def one(i: int, pair: Pair) -> Part | None:
            index = _changed(pair)
            if not index.size:
                return None
            values = pair.new.view(unsigned(pair.width))[index]
            if pair.nbytes // pair.width <= 1 << 31:
                index = index.astype(np.int32)
            return Part(i, (index.view(np.uint8), values.view(np.uint8)))

        return _encode_each(pairs, crew, one)

    def apply(self, payload: Payload, live: Live, crew: Crew) -> None:
        """Scatter the values."""

        def one(part: Part) -> None:
            weights = live.elements(part.tensor)
            index, values = (np.frombuffer(frame, np.uint8) for frame in part.frames)
            places = index.view(np.int64 if weights.size > 1 << 31 else np.int32)
            weights[places] = values.view(weights.dtype)

        _apply_each(payload, live, crew, one)


class GapValue:
    """u16 gaps, new values, each column zstd-1 (PULSE; slime's first format without its zstd).

    Gap: unchanged elements since the change before. ESCAPE skips 65,535 elements and has no value.
    """

    name = "(c) u16 gap + value + zstd-1"

    def encode(self, pairs: Sequence[Pair], crew: Crew) -> Payload:
        """Return two frames for each changed tensor."""

        def one(i: int, pair: Pair) -> Part | None:
            index = _changed(pair)
            if not index.size:
                return None
            values = pair.new.view(unsigned(pair.width))[index].view(np.uint8)
            return Part(i, (crew.compress(_gaps(index).view(np.uint8)), crew.compress(values)))

        return _encode_each(pairs, crew, one)

    def apply(self, payload: Payload, live: Live, crew: Crew) -> None:
        """Sum the gaps and scatter the values."""

        def one(part: Part) -> None:
            weights = live.elements(part.tensor)
            gaps, values = (crew.decompress(frame) for frame in part.frames)
            weights[_places(gaps.view(np.uint16))] = values.view(weights.dtype)

        _apply_each(payload, live, crew, one)


def _gaps(index: Index) -> npt.NDArray[np.uint16]:
    gaps = np.diff(index, prepend=-1) - 1
    if gaps.max() < ESCAPE:
        return gaps.astype(np.uint16)
    escapes = gaps // ESCAPE
    column = np.full(index.size + int(escapes.sum()), ESCAPE, np.uint16)
    column[np.cumsum(escapes + 1) - 1] = gaps - escapes * ESCAPE
    return column


def _places(gaps: npt.NDArray[np.uint16]) -> Index:
    steps = gaps.astype(np.int64)
    if gaps.max(initial=0) < ESCAPE:
        steps += 1
        steps[:1] -= 1
        return np.cumsum(steps, out=steps)
    kept = gaps != ESCAPE
    steps += kept
    places: Index = np.cumsum(steps)[kept] - 1
    return places


class DoubleMask:
    """XOR mask in blocks of 2 MiB, each an LZ4 block inside a zstd-1 frame; zero blocks absent."""

    name = "(d) mask, LZ4 then zstd-1"

    def encode(self, pairs: Sequence[Pair], crew: Crew) -> Payload:
        """Return one frame per block, empty for a block without changes."""

        def block(old: Bytes, new: Bytes) -> bytes:
            mask = np.bitwise_xor(old, new, out=crew.scratch(old.size))
            if not mask.max(initial=0):
                return b""
            inner = crew.scratch(BLOCK + BLOCK // 255 + 64, 1)
            size = cramjam.lz4.compress_block_into(mask.data, inner.data, store_size=False)
            return crew.compress(inner[:size])

        def one(i: int, pair: Pair) -> Part | None:
            starts = range(0, pair.nbytes, BLOCK)
            frames = tuple(block(pair.old[s : s + BLOCK], pair.new[s : s + BLOCK]) for s in starts)
            return Part(i, frames) if any(frames) else None

        return _encode_each(pairs, crew, one)

    def apply(self, payload: Payload, live: Live, crew: Crew) -> None:
        """Undo both compressions and XOR, block by block."""

        def one(part: Part) -> None:
            weights = live.tensors[part.tensor]
            for k, frame in enumerate(part.frames):
                if not len(frame):
                    continue
                piece = weights[k * BLOCK : (k + 1) * BLOCK]
                mask = crew.scratch(piece.size)
                raw = crew.decompress(frame)
                cramjam.lz4.decompress_block_into(raw.data, mask.data, output_len=mask.size)
                np.bitwise_xor(piece, mask, out=piece)

        _apply_each(payload, live, crew, one)


class FullCopy:
    """All new bytes, copied once into a buffer to send and once into the live weights."""

    name = "(f) full copy"
    piece = 16 << 20

    def __init__(self, pairs: Sequence[Pair]) -> None:
        # Allocated and touched here: a sender that copies whole models keeps its buffer.
        self._buffer = Live.like(pairs)
        self._buffer.reset(pairs)

    def _copy(self, sources: Sequence[Bytes], targets: Sequence[Bytes], crew: Crew) -> None:
        pieces = [
            (source[s : s + self.piece], target[s : s + self.piece])
            for source, target in zip(sources, targets, strict=True)
            for s in range(0, source.size, self.piece)
        ]
        crew.each(lambda i: np.copyto(pieces[i][1], pieces[i][0]), [p[0].size for p in pieces])

    def encode(self, pairs: Sequence[Pair], crew: Crew) -> Payload:
        """Copy the new tensors into the buffer."""
        self._copy([pair.new for pair in pairs], self._buffer.tensors, crew)
        return Payload([Part(i, (t,)) for i, t in enumerate(self._buffer.tensors)])

    def apply(self, payload: Payload, live: Live, crew: Crew) -> None:
        """Copy the buffer into the live tensors."""
        self._copy(self._buffer.tensors, live.tensors, crew)


class PatchFrom:
    """`zstd -1 --patch-from`: old and new checkpoint as files in memory where there is room.

    Apply includes loading the patched file into the live tensors; files are written beforehand.
    """

    name = "(e) zstd -1 --patch-from"

    def __init__(self, pairs: Sequence[Pair], folder: Path) -> None:
        self._folder = folder
        for side in ("old", "new"):
            with open(folder / side, "wb") as file:
                for pair in pairs:
                    file.write(getattr(pair, side))

    @staticmethod
    def missing(nbytes: int) -> str:
        """Say why it cannot be measured, or nothing."""
        if shutil.which("zstd") is None:
            return "no zstd command here"
        if nbytes > PATCH_LIMIT:
            return f"takes at most {PATCH_LIMIT / 1e9:.0f} GB"
        return "" if nbytes else "no bytes"

    @staticmethod
    def folder(nbytes: int) -> tempfile.TemporaryDirectory[str]:
        """Make a folder for three files of `nbytes`, in memory if there is room."""
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 * nbytes
        return tempfile.TemporaryDirectory(prefix="bench-", dir=memory if roomy else None)

    def _zstd(self, *arguments: str) -> None:
        command = ["zstd", "-q", "-q", "-f", "--patch-from=old", *arguments]
        subprocess.run(command, cwd=self._folder, check=True)

    def encode(self, pairs: Sequence[Pair], crew: Crew) -> Payload:
        """Return one frame for the whole model."""
        self._zstd("-1", f"-T{crew.threads}", "new", "-o", "patch")
        return Payload([Part(0, ((self._folder / "patch").read_bytes(),))])

    def apply(self, payload: Payload, live: Live, crew: Crew) -> None:
        """Write the patched file and read it into the live tensors."""
        (self._folder / "patch").write_bytes(bytes(payload.parts[0].frames[0]))
        self._zstd("-d", "--long=31", "patch", "-o", "patched")
        with open(self._folder / "patched", "rb") as file:
            for tensor in live.tensors:
                file.readinto(tensor.data)


class Ours:
    """deltackpt's own groups, from the same memory; decode and apply check and fingerprint."""

    def __init__(self, pairs: Sequence[Pair], codec: str, form: str) -> None:
        self.name = f"deltackpt {form}, {codec}"
        self._codec, self._form = codec, form
        # Numbers as names: the layout sorts by name, and must keep the order of the pairs.
        self._layout = Layout(
            [f"{i:08d}" for i in range(len(pairs))],
            [f"U{8 * pair.width}" for pair in pairs],
            [(pair.nbytes // pair.width,) for pair in pairs],
        )
        self._old = addresses([pair.old for pair in pairs])
        self._new = addresses([pair.new for pair in pairs])

    def encode(self, pairs: Sequence[Pair], crew: Crew) -> Payload:
        """Return the groups that hold changes."""
        encoded = backend.encode(
            self._layout, self._old, self._new, codec=self._codec, form=self._form, threads=crew.threads
        )
        groups = list(encoded)
        return Payload(groups=groups, checksums=_checksums(groups))

    def apply(self, payload: Payload, live: Live, crew: Crew) -> None:
        """Check frames, decode all groups, XOR them in, compare the change of fingerprints."""
        if _checksums(payload.groups) != payload.checksums:
            raise IntegrityError(f"{self.name}: a frame's checksum differs")
        staged = backend.decode(self._layout, payload.groups, threads=crew.threads)
        found = backend.apply(self._layout, staged, live.addresses, threads=crew.threads)
        for group in payload.groups:
            found[group.tensor] -= group.fingerprint
        if found.any():
            raise IntegrityError(f"{self.name}: fingerprints differ after apply")


def _checksums(groups: Sequence[EncodedGroup]) -> list[int]:
    return [xxh3_64(frame.stored) for group in groups for frame in group.frames]
