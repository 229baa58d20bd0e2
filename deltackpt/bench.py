"""Measure deltas on pairs of tensors: our codecs and what others store, side by side, in one run.

Every candidate's result is compared byte for byte with the new tensors. Never writes to its input,
and imports no torch. The baselines do what their projects do, vectorised, with scratch memory that
is reused, so that a ratio says something about the format and not about careless code.

Longer than a module should be because all candidates must share one harness and be read together.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import math
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import cramjam
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from deltackpt import backend
from deltackpt.checkpoint import open_folder
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
        return self.tensors[i].view(_unsigned(self.widths[i]))

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


def _unsigned(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(f"<u{width}")


def _sizes(pairs: Sequence[Pair]) -> list[int]:
    return [pair.nbytes for pair in pairs]


def _encode_each(pairs: Sequence[Pair], crew: Crew, encode: Callable[[int, Pair], Part | None]) -> Payload:
    parts = crew.each(lambda i: encode(i, pairs[i]), _sizes(pairs))
    return Payload([part for part in parts if part is not None])


def _apply_each(payload: Payload, live: Live, crew: Crew, apply: Callable[[Part], None]) -> None:
    sizes = [live.tensors[part.tensor].size for part in payload.parts]
    crew.each(lambda i: apply(payload.parts[i]), sizes)


def _changed(pair: Pair) -> Index:
    """Indices of the changed elements, int64, ascending."""
    kind = _unsigned(pair.width)
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
            values = pair.new.view(_unsigned(pair.width))[index]
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
            values = pair.new.view(_unsigned(pair.width))[index].view(np.uint8)
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


@dataclass(frozen=True)
class Census:
    """What changed, over all pairs: elements, of them changed, and the iid bound in bytes."""

    elements: int
    changed: int
    bound_nbytes: float


def census(pairs: Sequence[Pair]) -> Census:
    """Count changes and compute the size that coding each change independently cannot beat.

    Bound = N H(d) / 8 for positions, d = changed / N, plus changed * H(XOR values) / 8 with the
    empirical distribution; elements of one width are one population. Only a model that knows
    where changes cluster can go below.
    """
    elements = changed = 0
    bound = 0.0
    for width in (1, 2, 4, 8):
        members = [pair for pair in pairs if pair.width == width]
        total = sum(pair.nbytes for pair in members) // width
        counts = _value_counts(members, width)
        flips = int(counts.sum())
        elements, changed = elements + total, changed + flips
        if flips:
            shares = counts[counts > 0] / flips
            entropy = float(-(shares * np.log2(shares)).sum())
            bound += (total * _binary_entropy(flips / total) + flips * entropy) / 8
    return Census(elements, changed, bound)


def _binary_entropy(p: float) -> float:
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p) if 0 < p < 1 else 0.0


def _value_counts(pairs: Sequence[Pair], width: int) -> Index:
    """How often each XOR value that is not zero occurs; the order means nothing."""
    if width <= 2:
        table = np.zeros(1 << 8 * width, np.int64)
        for values in _flips(pairs, width):
            table += np.bincount(values, minlength=table.size)
        return table
    seen = list(_flips(pairs, width))
    if not seen:
        return np.zeros(0, np.int64)
    counts: Index = np.unique(np.concatenate(seen), return_counts=True)[1]
    return counts


def _flips(pairs: Sequence[Pair], width: int) -> Iterator[Words]:
    kind = _unsigned(width)
    for pair in pairs:
        for s in range(0, pair.nbytes, 8 * BLOCK):
            mask = pair.old[s : s + 8 * BLOCK].view(kind) ^ pair.new[s : s + 8 * BLOCK].view(kind)
            yield mask[mask != 0]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate at one number of threads. Times in seconds, the best and the median repetition.

    Speeds count bytes of the model (one side); no apply speed where nothing was stored. Ratios
    are to (a) at the same number of threads: size below 1 is smaller, speed above 1 is faster.
    peak: anonymous memory above the inputs and the live tensors while encoding and applying, the
    payload included.
    """

    name: str
    threads: int
    stored_nbytes: int
    fraction: float | None
    bytes_per_change: float | None
    of_bound: float | None
    encode_s: float
    encode_median_s: float
    apply_s: float
    apply_median_s: float
    encode_gb_s: float
    apply_gb_s: float | None
    size_ratio: float | None = None
    encode_ratio: float | None = None
    apply_ratio: float | None = None
    peak_nbytes: int | None = None


class Machine(msgspec.Struct, frozen=True):
    """Where a report was measured."""

    cpu: str
    cores: int
    memory_nbytes: int
    system: str
    python: str
    versions: dict[str, str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one input. model_nbytes > raw_nbytes where only a sample was measured."""

    title: str
    model_nbytes: int
    raw_nbytes: int
    tensors: int
    elements: int
    changed: int
    bound_nbytes: float
    repeats: int
    rows: list[Row]
    skipped: dict[str, str]
    machine: Machine

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(eq=False)
class _Trial:
    """A candidate at a number of threads, and its times so far."""

    candidate: Candidate
    crew: Crew
    stored: int = 0
    peak: int | None = None
    encode_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)

    def once(self, pairs: Sequence[Pair], live: Live) -> None:
        """Encode, apply to old weights, compare, note the times."""
        live.reset(pairs)
        begin = time.perf_counter()
        payload = self.candidate.encode(pairs, self.crew)
        encoded = time.perf_counter()
        self.candidate.apply(payload, live, self.crew)
        applied = time.perf_counter()
        live.check(pairs, self.candidate.name)
        self.stored = payload.stored
        self.encode_s.append(encoded - begin)
        self.apply_s.append(applied - encoded)

    def warm(self, pairs: Sequence[Pair], live: Live, *, memory: bool) -> None:
        """Run once untimed; with `memory`, note the peak."""
        if memory:
            with _peak_anonymous() as peak:
                self.once(pairs, live)
            # The full copy's buffer was there before.
            self.peak = max(peak[0], self.stored)
        else:
            self.once(pairs, live)
        self.encode_s.clear()
        self.apply_s.clear()


def _anonymous_nbytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def _peak_anonymous() -> Iterator[list[int]]:
    """Yield a list whose only item becomes the growth of RssAnon at its highest, in bytes."""
    gc.collect()
    # Memory that the allocator kept from the candidate before would hide this one's.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    before = _anonymous_nbytes()
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _anonymous_nbytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak[0] = max(peak[0], _anonymous_nbytes() - before, 0)


def run(
    pairs: Sequence[Pair],
    *,
    title: str,
    model_nbytes: int | None = None,
    threads: Sequence[int] | None = None,
    repeats: int = 5,
    ours: Sequence[tuple[str, str]] = (("zstd", "sparse"), ("zstd", "mask"), ("lz4", "mask")),
    memory: bool = True,
) -> Report:
    """Measure every candidate on `pairs`, round-robin, and compare each result with the new bytes.

    ours: (codec, form) of deltackpt's rows. threads: one and all cores if not given.
    Raises IntegrityError if any candidate yields other bytes than the new ones.
    """
    raw = sum(_sizes(pairs))
    counts = [1, os.cpu_count() or 1] if threads is None else threads
    live = Live.like(pairs)
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        candidates = _baselines(pairs, stack, skipped)
        candidates += [Ours(pairs, codec, form) for codec, form in ours]
        _compile(ours)
        # Touched now, so that its pages are not taken for the first candidate's.
        live.reset(pairs)
        trials = [
            _Trial(candidate, stack.enter_context(Crew(count)))
            for count in dict.fromkeys(counts)
            for candidate in candidates
        ]
        for trial in trials:
            # The zstd command's memory is not ours to see.
            trial.warm(pairs, live, memory=memory and not isinstance(trial.candidate, PatchFrom))
        for _ in range(repeats):
            for trial in trials:
                trial.once(pairs, live)
    total = census(pairs)
    return Report(
        title=title,
        model_nbytes=raw if model_nbytes is None else model_nbytes,
        raw_nbytes=raw,
        tensors=len(pairs),
        elements=total.elements,
        changed=total.changed,
        bound_nbytes=total.bound_nbytes,
        repeats=repeats,
        rows=_rows(trials, raw, total),
        skipped=skipped,
        machine=machine(),
    )


def _baselines(pairs: Sequence[Pair], stack: ExitStack, skipped: dict[str, str]) -> list[Candidate]:
    """Make all baselines; `skipped` gets the reason for each that cannot be measured."""
    candidates: list[Candidate] = [MaskZstd(), IndexValue(), GapValue(), DoubleMask()]
    raw = sum(_sizes(pairs))
    if reason := PatchFrom.missing(raw):
        skipped[PatchFrom.name] = reason
    else:
        folder = stack.enter_context(PatchFrom.folder(raw))
        candidates.append(PatchFrom(pairs, Path(folder)))
    return [*candidates, FullCopy(pairs)]


def _compile(ours: Sequence[tuple[str, str]]) -> None:
    """Run our kernels once on small tensors of every width: compilation is no part of a row.

    Loads the compiled kernels where numba is installed, as any large model would.
    """
    if importlib.util.find_spec("numba") is not None:
        importlib.import_module("deltackpt.jit")
    rng = np.random.default_rng(0)
    pairs = []
    for width in (1, 2, 4, 8):
        old = rng.integers(0, 256, 4096 * width, np.uint8)
        new = old.copy()
        new[::997] ^= 1
        pairs.append(Pair(f"{width}", old, new, width))
    live = Live.like(pairs)
    for codec, form in ours:
        for threads in (1, 2):
            with Crew(threads) as crew:
                _Trial(Ours(pairs, codec, form), crew).once(pairs, live)


def _quotient(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _rows(trials: Sequence[_Trial], raw: int, total: Census) -> list[Row]:
    reference = {t.crew.threads: t for t in trials if isinstance(t.candidate, MaskZstd)}
    rows = []
    for trial in trials:
        a = reference[trial.crew.threads]
        encode_s, apply_s = min(trial.encode_s), min(trial.apply_s)
        rows.append(
            Row(
                name=trial.candidate.name,
                threads=trial.crew.threads,
                stored_nbytes=trial.stored,
                fraction=_quotient(trial.stored, raw),
                bytes_per_change=_quotient(trial.stored, total.changed),
                of_bound=_quotient(trial.stored, total.bound_nbytes),
                encode_s=encode_s,
                encode_median_s=statistics.median(trial.encode_s),
                apply_s=apply_s,
                apply_median_s=statistics.median(trial.apply_s),
                encode_gb_s=raw / encode_s / 1e9,
                apply_gb_s=raw / apply_s / 1e9 if trial.stored else None,
                size_ratio=_quotient(trial.stored, a.stored),
                encode_ratio=min(a.encode_s) / encode_s,
                apply_ratio=min(a.apply_s) / apply_s if trial.stored and a.stored else None,
                peak_nbytes=trial.peak,
            )
        )
    return rows


def machine() -> Machine:
    """Describe this machine and the libraries that the rows depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    packages = ("deltackpt", "numpy", "numba", "zstandard", "cramjam", "xxhash")
    return Machine(
        cpu=cpu,
        cores=os.cpu_count() or 1,
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions={package: _installed(package) for package in packages},
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def machine_line(where: Machine) -> str:
    """Name a machine in one line."""
    versions = ", ".join(f"{name} {number}" for name, number in where.versions.items())
    return (
        f"{where.cpu}, {where.cores} cores, {where.memory_nbytes / 2**30:.0f} GiB, {where.system}, "
        f"Python {where.python}, {versions}"
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def heading(report: Report) -> str:
    """Say in one line what was measured."""
    sample = ""
    if report.model_nbytes > report.raw_nbytes:
        sample = f" (a sample of {report.model_nbytes / 1e6:,.1f} MB)"
    return (
        f"{report.title}: {report.raw_nbytes / 1e6:,.1f} MB{sample}, {report.tensors:,} tensors, "
        f"{report.changed:,} of {report.elements:,} elements changed ({report.density:.4%}); "
        f"iid entropy bound {report.bound_nbytes:,.0f} bytes"
    )


def table(report: Report) -> str:
    """Lay a report out as text, one line a row."""
    head = (
        f"{'':36s} {'thr':>3} {'bytes':>13} {'% raw':>8} {'B/chg':>6} {'/bound':>6} "
        f"{'enc GB/s':>8} {'app GB/s':>8} {'size/a':>6} {'enc/a':>6} {'app/a':>6} {'peak MiB':>8}"
    )
    lines = [heading(report), head]
    for row in report.rows:
        share = None if row.fraction is None else row.fraction * 100
        peak = None if row.peak_nbytes is None else row.peak_nbytes / 2**20
        lines.append(
            f"{row.name:36s} {row.threads:3d} {row.stored_nbytes:13,d} {_cell(share, '.4f'):>8} "
            f"{_cell(row.bytes_per_change, '.2f'):>6} {_cell(row.of_bound, '.2f'):>6} "
            f"{row.encode_gb_s:8.2f} {_cell(row.apply_gb_s, '.2f'):>8} "
            f"{_cell(row.size_ratio, '.2f'):>6} {_cell(row.encode_ratio, '.2f'):>6} "
            f"{_cell(row.apply_ratio, '.2f'):>6} {_cell(peak, '.0f'):>8}"
        )
    lines += [f"{name}: not measured, {reason}" for name, reason in report.skipped.items()]
    return "\n".join(lines)


def advice(report: Report) -> str:
    """Say in plain words whether deltas pay on these weights, and how much at which bandwidth.

    Uses our row at the most threads that is done first at 10 Gbit/s; times scale to the whole
    model where it is a sample.
    """
    rows = [row for row in report.rows if row.name.startswith("deltackpt")]
    if not rows or not report.raw_nbytes:
        return "Nothing was measured: the checkpoints hold no bytes."
    if not report.changed:
        return "Nothing changed: a version costs one small manifest and no weights."
    most = max(row.threads for row in rows)
    best = min(
        (row for row in rows if row.threads == most),
        key=lambda row: row.stored_nbytes * 8 / 10e9 + row.encode_s + row.apply_s,
    )
    share = best.stored_nbytes / report.raw_nbytes
    facts = (
        f"{report.density:.2%} of the elements changed; {best.name} stores {share:.2%} of the "
        f"bytes, {best.stored_nbytes / report.changed:.2f} bytes per changed element."
    )
    if share > 0.5:
        return (
            f"{facts}\nDo not use deltas here: over half of the bytes would be sent anyway, and "
            "every receiver would still decode them. Publish full copies, or compare two "
            "checkpoints that are fewer steps apart."
        )
    scale = report.model_nbytes / report.raw_nbytes
    lines = [facts]
    for gbit_s in (1, 10, 100):
        full = report.model_nbytes * 8 / (gbit_s * 1e9)
        delta = full * share + (best.encode_s + best.apply_s) * scale
        if delta < full:
            verdict = f"saves {_seconds(full - delta)} per update against a full copy"
        else:
            verdict = f"costs {_seconds(delta - full)} more per update than a full copy"
        lines.append(
            f"At {gbit_s} Gbit/s this {verdict} ({_seconds(delta)} with encode and apply on "
            f"{most} threads here, {_seconds(full)} for the copy's transfer alone)."
        )
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


@dataclass(frozen=True, eq=False)
class Weights:
    """A mapped checkpoint: its layout, and the bytes of each tensor in layout order."""

    layout: Layout
    tensors: Sequence[Bytes]


def read_checkpoint(path: Path) -> Weights:
    """Map a checkpoint folder or a single safetensors file; the mapping lives as long as a view.

    Raises ConfigError or FormatError, naming the file.
    """
    folder = open_folder(path)
    checkpoint = folder.checkpoint
    files = []
    for number in range(len(checkpoint.nbytes)):
        with open(folder.file_path(number), "rb") as file:
            content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        files.append(np.frombuffer(content, np.uint8))
    places = zip(checkpoint.file.tolist(), checkpoint.offset.tolist(), checkpoint.layout.nbytes.tolist(), strict=True)
    return Weights(checkpoint.layout, [files[f][o : o + n] for f, o, n in places])


def pair_up(old: Weights, new: Weights) -> list[Pair]:
    """Pair the tensors of two checkpoints. Raises ConfigError at the first that differs in kind."""
    old.layout.require_same(new.layout)
    widths = old.layout.width.tolist()
    return [Pair(*both) for both in zip(old.layout.names, old.tensors, new.tensors, widths, strict=True)]


def sample(pairs: Sequence[Pair], limit_nbytes: int) -> list[Pair]:
    """Return whole tensors spread evenly over the model, together at most `limit_nbytes`.

    All of them if they fit.
    """
    total = sum(_sizes(pairs))
    if total <= limit_nbytes:
        return list(pairs)
    chosen, seen, taken = [], 0, 0
    for pair in pairs:
        seen += pair.nbytes
        if taken + pair.nbytes <= seen * limit_nbytes / total:
            taken += pair.nbytes
            chosen.append(pair)
    return chosen


def run_checkpoints(old: Path, new: Path, *, limit_nbytes: int = 4 << 30, repeats: int = 3) -> Report:
    """Measure two checkpoint folders, or a sample of larger ones. Writes nothing into them."""
    pairs = pair_up(read_checkpoint(old), read_checkpoint(new))
    return run(
        sample(pairs, limit_nbytes), title=f"{old.name} -> {new.name}", model_nbytes=sum(_sizes(pairs)), repeats=repeats
    )
