"""A store republished in the wire format of slime, miles and SGLang, for their readers.

Never changes a folder that has its name: it is built beside, and renamed when it is whole and durable.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import xxhash

from deltackpt import backend
from deltackpt.anchor import scratch_folder
from deltackpt.backend import Cpu
from deltackpt.chain import Step, plan
from deltackpt.checkpoint import Folder, addresses, mapped
from deltackpt.codec import Bytes
from deltackpt.errors import ChainError, ConfigError, IntegrityError, Unavailable
from deltackpt.folder import OWN, CheckpointTarget, signed
from deltackpt.follow import Follower
from deltackpt.kernels import U8, view
from deltackpt.layout import Layout
from deltackpt.lease import Keeper, Lease, lease_id
from deltackpt.manifest import LEVEL
from deltackpt.pool import in_order
from deltackpt.reader import Delta, Reader, compare_fingerprints, named
from deltackpt.shard import header_bytes
from deltackpt.store import LocalStore, Store, store_error, sync_folder
from deltackpt.tensors import Live, restore_into
from deltackpt.weightv import (
    ENCODINGS,
    INDEX,
    SIDECAR,
    Encoding,
    File,
    Sidecar,
    checksum_of,
    encode_payload,
    folder_name,
    index_bytes,
    numbers,
    read_sidecar,
)

POSITIONS = 1 << 32
"""Bytes that the positions of the overwrite encoding can tell apart."""
SHARD_BYTES = 256 << 20
"""A shard is closed when it holds this many bytes; they are in memory until then."""

Start: TypeAlias = int | Literal["newest"] | None


class Copy:
    """All tensors of a version in memory, back to back in layout order."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._memory = np.empty(max(1, layout.total_bytes), np.uint8)
        begin = np.uint64(self._memory.__array_interface__["data"][0])
        self.addresses = (np.cumsum(layout.nbytes) - layout.nbytes).astype(np.uint64) + begin

    def tensor(self, number: int) -> U8:
        """Return the bytes of a tensor, to be read and written."""
        return view(int(self.addresses[number]), int(self.layout.nbytes[number]))

    def live(self) -> Live:
        """Describe the tensors for a publisher."""
        tensors = tuple(self.tensor(n) for n in range(len(self.addresses)))
        return Live(self.layout, tensors, "cpu")

    def load(self, folder: Folder) -> None:
        """Fill it from a checkpoint folder of the same layout."""
        paths = [folder.file_path(n) for n in range(len(folder.checkpoint.placement.files))]
        with mapped(paths) as files:
            for number, where in enumerate(addresses(folder.checkpoint, files).tolist()):
                mine = self.tensor(number)
                mine[...] = view(where, len(mine))


def poll(once: Callable[[], None], stop: threading.Event, poll_s: float, say: Callable[[str], None]) -> None:
    """Look for what is new until `stop` is set; what does not answer is waited for."""
    failures = 0
    while not stop.is_set():
        try:
            once()
            failures = 0
        except Unavailable as exc:
            failures += 1
            say(f"{exc}; trying again")
        stop.wait(poll_s * random.uniform(0.9, 1.1) * min(2**failures, 64))


@dataclass(frozen=True)
class ExportReport:
    """What one pass did. versions: folders that were made; full: those of them that are whole checkpoints.

    head: number of the newest folder; None: there is none. nbytes: written.
    """

    versions: tuple[int, ...]
    full: tuple[int, ...]
    head: int | None
    nbytes: int


@dataclass(frozen=True)
class _Packed:
    """A changed tensor, ready to be written."""

    name: str
    stored: bytes
    checksum: str


class Exporter:
    """Republishes a store as folders `weight_v<version>` below `path`. Not for use by several threads at once.

    Readers begin with version 0 as a checkpoint folder of their own, as `pull --version 0` makes one. Versions keep
    their numbers; each folder has its name when it is whole. start: begin instead with a full copy of this version, and
    go on with one where versions were pruned. Holds one copy of the weights in memory, and a lease in the store.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        *,
        encoding: Encoding = "xor",
        start: Start = None,
        threads: int | None = None,
        now: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if encoding not in ENCODINGS:
            raise ConfigError(f"encoding {encoding!r} is unknown; expected one of {' '.join(ENCODINGS)}")
        self.path, self._encoding, self._start, self._threads = os.path.abspath(path), encoding, start, threads
        if os.path.exists(os.path.join(self.path, "store.json")):
            raise ConfigError(f"{self.path} is a store; name another folder for the exported versions")
        self._reader, self._now, self._say = Reader(store, threads=threads), now, say
        self._target = LocalStore(self.path)
        self._at: int | None = None
        self._copy: Copy | None = None
        self._keeper: Keeper | None = None

    def once(self) -> ExportReport:
        """Make the folders of all versions that have none yet.

        Raises ChainError where the next version cannot be made and no start says how to go on, or where the folders are
        those of another stream.
        """
        reader = self._reader
        if reader.history:
            reader.refresh()
        else:
            reader.load()
        if reader.head is None:
            return ExportReport((), (), None, 0)
        head = reader.head.manifest.version
        made: list[int] = []
        full: list[int] = []
        nbytes = 0
        at = self._find() if self._at is None else self._at
        self._hold(at)
        gone = reader.pruned(since=at)
        while at < head:
            version = at + 1
            if not (at == 0 and self._start) and self._can_walk(version, gone):
                nbytes += self._make_delta(version)
            else:
                version = self._full_from(at, head)
                nbytes += self._make_full(version)
                full.append(version)
            made.append(version)
            self._at = at = version
            self._hold(at)
        return ExportReport(tuple(made), tuple(full), at if at or made else None, nbytes)

    def watch(self, stop: threading.Event, *, poll_s: float, done: Callable[[ExportReport], None]) -> None:
        """Make folders as versions come, until `stop` is set; a store that does not answer is waited for."""

        def once() -> None:
            report = self.once()
            if report.versions:
                done(report)

        poll(once, stop, poll_s, self._say)

    # ------------------------------------------------------------ the way

    def _find(self) -> int:
        """Return the number at which the folders are. 0: there is none yet, and readers begin with version 0."""
        found = numbers(self.path)
        if not found:
            return 0
        number, folder = found[-1], os.path.join(self.path, folder_name(found[-1]))
        sidecar, entry = read_sidecar(folder), self._reader.history.get(found[-1])
        if sidecar is None:
            raise ConfigError(f"{folder} was not written by this package; name an empty folder to export to")
        if sidecar.store_id != self._reader.info.store_id:
            raise ConfigError(
                f"{folder} is of store {sidecar.store_id}, this is {self._reader.info.store_id}; name another folder"
            )
        if entry is None or entry.digest != sidecar.manifest:
            raise ChainError(f"{folder} is no version {number} of {self._reader.store.url}; name an empty folder")
        return number

    def _can_walk(self, version: int, gone: frozenset[int]) -> bool:
        """Say whether the flips from the version before can be had."""
        manifest = self._reader.manifest(version)
        if manifest.kind == "full" or any(step.version in gone for step in self._steps(version)):
            return False
        return self._copy is not None or self._reader.reachable(version - 1)

    def _steps(self, version: int) -> Sequence[Step]:
        return plan(self._reader.history, version, local=version - 1, anchors={}).steps

    def _full_from(self, at: int, head: int) -> int:
        """Return the version after `at` of which a full copy is made."""
        start = head if self._start == "newest" else self._start
        begins = at == 0 and start
        if not begins and self._reader.manifest(at + 1).kind == "full" and self._reader.reachable(at + 1):
            return at + 1
        if start is None or start <= at:
            raise ChainError(
                f"version {at + 1} cannot be rebuilt from what {self._reader.store.url} still has; "
                "--from newest goes on with a full copy of the newest version"
            )
        self._reader.manifest(start)
        return start

    def _hold(self, at: int) -> None:
        """Say in the store which version was exported last, so that the way from there to the head stays."""
        if self._keeper is None:
            lease = Lease(
                format=LEVEL, id=lease_id(self.path), store_id=self._reader.info.store_id, created=0.0, expires=0.0,
                duration_s=0.0, mode="export", host=socket.gethostname(), dest=self.path,
            )  # fmt: skip
            self._keeper = Keeper(self._reader.store, lease, now=self._now, say=self._say)
        self._keeper.update(version=at, staged=None, error=None)

    # ------------------------------------------------------------ folders

    @contextmanager
    def _folder(self, version: int) -> Iterator[tuple[str, list[File]]]:
        """Yield the path of a folder yet to be made, and a list for its shards; named at the end, with its sidecar."""
        files: list[File] = []
        try:
            with scratch_folder(self._target, None) as stage:
                yield stage, files
                self._put(stage, SIDECAR, [msgspec.json.encode(self._sidecar(version, files)) + b"\n"])
                # Refused where another exporter was first: a folder that has its name is never replaced.
                os.rename(stage, os.path.join(self.path, folder_name(version)))
                sync_folder(self.path)
        except OSError as exc:
            raise store_error(exc, f"making {folder_name(version)} in {self.path}") from exc

    def _sidecar(self, version: int, files: list[File]) -> Sidecar:
        entry = self._reader.history[version]
        manifest = entry.manifest
        return Sidecar(
            format=LEVEL, store_id=manifest.store_id, lineage=manifest.lineage, version=version, manifest=entry.digest,
            prev=manifest.prev, layout=manifest.layout, state=manifest.state, run_id=manifest.run_id,
            step=manifest.step, files=tuple(files),
        )  # fmt: skip

    def _put(self, stage: str, name: str, parts: Sequence[Bytes]) -> int:
        self._target.put(f"{os.path.relpath(stage, self.path)}/{name}", parts)
        return sum(len(part) for part in parts)

    def _make_full(self, version: int) -> int:
        """Make an ordinary checkpoint folder; readers begin again with it."""
        self._copy = None
        with self._folder(version) as (stage, _):
            with Follower(self._reader.store, CheckpointTarget(stage), threads=self._threads) as follower:
                prepared = follower.prepare(version)
                assert prepared is not None, "an empty folder holds no version"
                prepared.apply()
            shutil.rmtree(os.path.join(stage, OWN))
        return self._reader.manifest(version).totals.raw

    def _make_delta(self, version: int) -> int:
        """Make a folder of the tensors that changed since the version before."""
        reader = self._reader
        if self._copy is None:
            self._copy = Copy(reader.layout(reader.manifest(version).layout))
            restore_into(reader, version - 1, Cpu(self._threads), self._copy.addresses)
        # While its bits are flipped it is no version's; after an error the next pass restores another.
        copy, self._copy = self._copy, None
        self._require_positions(copy.layout)
        steps = self._steps(version)
        with contextlib.closing(reader.deltas([step.version for step in steps])) as deltas:
            walk = _Walk(copy, list(zip(deltas, steps, strict=True)), self._threads)
        with self._folder(version) as (stage, files):
            nbytes = self._write(stage, files, version, walk)
            walk.require_proven(version)
        self._copy = copy
        return nbytes

    def _require_positions(self, layout: Layout) -> None:
        if self._encoding == "overwrite" and len(layout.nbytes) and layout.nbytes.max() >= POSITIONS:
            name = layout.names[int(layout.nbytes.argmax())]
            raise ConfigError(
                f"tensor {name} has {layout.nbytes.max()} bytes, and positions of 32 bits cannot name them; "
                "export with --encoding xor"
            )

    def _write(self, stage: str, files: list[File], version: int, walk: _Walk) -> int:
        """Write shards and index of a delta."""
        waiting: list[_Packed] = []
        shards: list[list[str]] = []

        def close() -> None:
            entries = [(p.name, "U8", [len(p.stored)], len(p.stored)) for p in waiting]
            parts: list[Bytes] = [header_bytes(entries, {p.name: p.checksum for p in waiting})]
            parts += [p.stored for p in waiting]
            hasher = xxhash.xxh3_128()
            for part in parts:
                hasher.update(part)
            nbytes = self._put(stage, f"shard-{len(shards)}", parts)
            files.append(File("", nbytes, hasher.hexdigest()))
            shards.append([p.name for p in waiting])
            waiting.clear()

        with contextlib.closing(walk.packed(self._encoding)) as found:
            for one in found:
                waiting.append(one)
                if sum(len(p.stored) for p in waiting) >= SHARD_BYTES:
                    close()
        if waiting:
            close()
        weight_map: dict[str, str] = {}
        for number, tensors in enumerate(shards):
            # The names count the shards, which are known only now.
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            os.rename(os.path.join(stage, f"shard-{number}"), os.path.join(stage, name))
            files[number] = msgspec.structs.replace(files[number], name=name)
            weight_map |= dict.fromkeys(tensors, name)
        index = index_bytes(version, self._encoding, weight_map)
        return sum(f.nbytes for f in files) + self._put(stage, INDEX, [index])


class _Walk:
    """Brings a copy of the weights from one version to the next, and packs what that flips, tensor by tensor."""

    def __init__(self, copy: Copy, deltas: Sequence[tuple[Delta, Step]], threads: int | None) -> None:
        self._copy, self._deltas, self._threads = copy, deltas, threads
        self._found = np.zeros(len(copy.layout.names), np.uint64)

    def packed(self, encoding: Encoding) -> Generator[_Packed, None, None]:
        """Yield every changed tensor; the copy holds the new version afterwards."""

        def pack(item: tuple[int, U8]) -> _Packed:
            tensor, mask = item
            new = self._copy.tensor(tensor)
            return _Packed(self._copy.layout.names[tensor], encode_payload(mask, new, encoding), checksum_of(new))

        with contextlib.closing(self._flips()) as flips:
            yield from in_order(pack, flips, self._threads)

    def _flips(self) -> Generator[tuple[int, U8], None, None]:
        """Flip the copy group by group; yield (tensor, new XOR old) as soon as no later group touches the tensor."""
        layout, masks = self._copy.layout, dict[int, U8]()
        where = np.zeros(len(layout.names), np.uint64)
        left = np.zeros(len(layout.names), np.int64)
        for delta, _ in self._deltas:
            for group, _ in delta.groups():
                left[np.unique(delta.tiling.groups[group].tensor)] += 1
        # Of several deltas, the groups of one number together, so that few masks are open at a time.
        staged = [zip(itertools.repeat(delta.tiling), delta.staged(threads=self._threads)) for delta, _ in self._deltas]
        for tiling, one in heapq.merge(*staged, key=lambda pair: pair[1].group):
            tensors = np.unique(tiling.groups[one.group].tensor).tolist()
            for t in tensors:
                if t not in masks:
                    masks[t] = np.zeros(int(layout.nbytes[t]), np.uint8)
                    where[t] = masks[t].__array_interface__["data"][0]
            backend.apply(tiling, [one], where, threads=self._threads)
            self._found += backend.apply(tiling, [one], self._copy.addresses, threads=self._threads)
            left[tensors] -= 1
            for t in tensors:
                if left[t] == 0:
                    mask = masks.pop(t)
                    if mask.any():
                        yield t, mask

    def require_proven(self, version: int) -> None:
        """Raise IntegrityError unless the copy did what the deltas say, by the fingerprints of what was flipped."""
        expected = np.zeros_like(self._found)
        for delta, step in self._deltas:
            expected += signed(delta, step)
        if wrong := compare_fingerprints(self._copy.layout, self._found, expected):
            raise IntegrityError(f"version {version}: {named(wrong)} did not change as published; run again")
