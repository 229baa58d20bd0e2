"""Everything that is read from a store, checked: manifests, layouts, deltas, anchors. Never writes.

Longer than most modules because each kind of object is held against the others before anybody sees it.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash

from deltackpt.backend import Staged, decode_group
from deltackpt.chain import Entry, History, Plan, check_link, newest_with_state, plan
from deltackpt.checkpoint import Checkpoint, read_header
from deltackpt.digest import U64, fp_hex, sha256, state_fingerprint, xxh3_64
from deltackpt.errors import ChainError, ConfigError, FormatError, IntegrityError, NotFound, StoreError
from deltackpt.layout import Layout, Mask
from deltackpt.manifest import (
    MAX_MANIFEST,
    Anchor,
    AnchorFile,
    Manifest,
    Placement,
    Shard,
    SideFile,
    StoreInfo,
    anchor_key,
    decode,
    decode_anchor,
    decode_manifest,
    decode_placement,
    digest,
    manifest_key,
    pruned_anchor_key,
    pruned_key,
    require_level,
)
from deltackpt.partition import MAX_PARTITION, Partition
from deltackpt.pool import in_order
from deltackpt.shard import ALIGN, Fetched, Frame, Index, header_length, parse_header, parse_index
from deltackpt.store import LocalStore, Store, read

A = TypeVar("A")
B = TypeVar("B")

_MAX_OBJECT = 1 << 30
_CHUNK = 16 << 20
_KEPT, _WORTH = 2, 1 << 20
"""How many shards' memory is kept to be used again, and from which size on."""
_CHECKS = 4
"""Shards that are checked at a time: more hashing than memory can feed, and few that wait for the caller."""
_UNSEEN = 64 << 20
"""A shard up to this size gets its room before the store has said that it is so large."""


@dataclass(frozen=True)
class Delta:
    """A version's delta in memory. fingerprints: what it adds to each tensor's fingerprint, walked forwards.

    tiling: what its groups are made of, the layout or a partition of it.
    """

    version: int
    layout: Layout
    tiling: Layout | Partition
    fetched: tuple[Fetched, ...]
    fingerprints: U64

    @property
    def nbytes(self) -> int:
        """Bytes that were read."""
        return sum(f.nbytes for f in self.fetched)

    def groups(self) -> Iterator[tuple[int, list[Frame]]]:
        """Yield each group's number and its frames, sorted by plane and place."""
        for fetched in self.fetched:
            yield from fetched.groups()

    def staged(self, *, threads: int | None = None) -> Iterator[Staged]:
        """Decode and check one group after the other."""
        for group, frames in self.groups():
            try:
                yield decode_group(self.tiling, group, frames, threads=threads)
            except FormatError as exc:
                raise type(exc)(f"version {self.version}: {exc}") from exc


@dataclass(frozen=True)
class AnchorSource:
    """Where the files of an anchor lie: in `store`, file number n of the checkpoint under keys[n]."""

    anchor: Anchor
    store: Store
    keys: tuple[str, ...]
    checkpoint: Checkpoint

    @property
    def fingerprints(self) -> U64:
        """Fingerprint of each tensor."""
        return np.frombuffer(self.anchor.fingerprints, "<u8").astype(np.uint64)


class Reader:
    """A view of one store that grows with it. Not for use by several threads at once.

    anchor_source: a local folder that holds the files of an anchor made by reference.
    """

    def __init__(self, store: Store, *, anchor_source: str | None = None, threads: int | None = None) -> None:
        self.store, self.threads = store, threads
        self._anchor_source = anchor_source
        self.history: History = {}
        self._layouts: dict[str, Layout] = {}
        self._placements: dict[str, Placement] = {}
        self._partitions: dict[str, Partition] = {}
        self._info: StoreInfo | None = None
        self._room = _Room()

    # ------------------------------------------------------------ manifests

    @property
    def info(self) -> StoreInfo:
        """`store.json`. Raises StoreError where there is no store."""
        if self._info is None:
            try:
                raw = read(self.store, "store.json", limit=MAX_MANIFEST)
            except NotFound as exc:
                raise StoreError(f"{self.store.url} holds no store (no store.json); publish to it first") from exc
            require_level(raw, "store.json")
            self._info = decode(raw, StoreInfo, "store.json")
        return self._info

    @property
    def head(self) -> Entry | None:
        """The newest version that was seen."""
        return self.history[max(self.history)] if self.history else None

    def load(self, since: int | None = None) -> None:
        """Read all manifests, or those from `since` on where that one exists."""
        info = self.info
        self.history = {}
        if since is not None and (entry := self._entry(since)):
            self.history[since] = entry
        else:
            listed = [int(k[10:-5]) for k in self.store.keys("manifests/") if k == manifest_key_of(k)]
            done = self._extend(listed)
            if done + 1 < len(listed):
                raise ChainError(
                    f"manifest of version {listed[done]} is missing, but version {listed[done + 1]} is there"
                )
        first = self.history.get(min(self.history, default=0))
        if first and first.manifest.store_id != info.store_id:
            raise FormatError(f"manifests belong to store {first.manifest.store_id}, store.json is {info.store_id}")
        self.refresh()

    def refresh(self) -> bool:
        """Read the manifests that came since; returns whether there were any.

        One request where there are none; the more have come, the more are asked for at a time.
        """
        before, ahead = len(self.history), 1
        while self._extend(range(begin := max(self.history, default=-1) + 1, begin + ahead)) == ahead:
            ahead = min(2 * ahead, max(1, self.store.requests))
        return len(self.history) > before

    def _extend(self, versions: Sequence[int]) -> int:
        """Read manifests up to the first one that is not there; returns how many were."""
        done = 0
        with closing(requests(self.store, self._entry, versions, self.threads)) as entries:
            for version, entry in zip(versions, entries, strict=True):
                if entry is None:
                    break
                self._append(version, entry)
                done += 1
        return done

    def _append(self, version: int, entry: Entry) -> None:
        if self.history:
            last = max(self.history)
            if version != last + 1:
                raise ChainError(f"manifest of version {last + 1} is missing, but version {version} is there")
            check_link(self.history[last], entry)
            self._check_tie(entry)
        elif version != 0:
            raise ChainError(f"manifest of version 0 is missing, but version {version} is there")
        self.history[version] = entry

    def _check_tie(self, entry: Entry) -> None:
        """Raise FormatError unless a version without a delta holds what the version that it names holds."""
        manifest = entry.manifest
        if manifest.kind not in ("empty", "rewind") or manifest.base is None:
            return
        base = self.history.get(manifest.base) or self._entry(manifest.base)
        if base is None:
            raise ChainError(
                f"version {manifest.version} is based on version {manifest.base}, whose manifest is missing"
            )
        if (base.manifest.state, base.manifest.layout) != (manifest.state, manifest.layout):
            raise FormatError(
                f"version {manifest.version} is {manifest.kind}, "
                f"but its state or layout is not that of version {manifest.base}"
            )

    def _entry(self, version: int) -> Entry | None:
        try:
            raw = read(self.store, manifest_key(version), limit=MAX_MANIFEST)
        except NotFound:
            return None
        return Entry(decode_manifest(raw, version), digest(raw))

    def manifest(self, version: int) -> Manifest:
        """Return a loaded manifest. Raises ChainError if the store does not have it."""
        if version not in self.history:
            end = self.head.manifest.version if self.head else "nothing"
            raise ChainError(f"version {version} is not in the store, which ends at {end}")
        return self.history[version].manifest

    # ------------------------------------------------------------ objects by content

    def _object(self, kind: str, content: str, suffix: str = ".json", limit: int = _MAX_OBJECT) -> bytes:
        key = f"{kind}/{content}{suffix}"
        raw = read(self.store, key, limit=limit)
        if sha256(raw) != content:
            raise IntegrityError(
                f"{key}: SHA-256 of its {len(raw)} bytes is {sha256(raw)[:12]}, not its name; fetch it again"
            )
        return raw

    def layout(self, content: str) -> Layout:
        """Return a layout by digest."""
        if content not in self._layouts:
            self._layouts[content] = Layout.decode(self._object("layouts", content))
        return self._layouts[content]

    def tiling(self, manifest: Manifest) -> Layout | Partition:
        """Return what the groups of a version are made of: its layout, or the partition that it was published in."""
        layout = self.layout(manifest.layout)
        return layout if manifest.partition is None else self.partition(manifest.partition, layout)

    def partition(self, content: str, layout: Layout) -> Partition:
        """Return a partition of a layout by digest."""
        if content not in self._partitions:
            raw = self._object("partitions", content, limit=MAX_PARTITION)
            self._partitions[content] = Partition.decode(raw, layout)
        found = self._partitions[content]
        if found.layout is not layout:
            raise FormatError(f"partition {content[:12]} cuts another layout than that of the version that names it")
        return found

    def placement_of(self, content: str, layout: Layout) -> Placement:
        """Return a placement of a layout by digest."""
        if content not in self._placements:
            self._placements[content] = decode_placement(self._object("placements", content), len(layout.names))
        return self._placements[content]

    def placement(self, manifest: Manifest) -> Placement:
        """Return the placement of a version."""
        placement = self.placement_of(manifest.placement, self.layout(manifest.layout))
        taken = {f.name for f in placement.files} | {placement.index}
        for side in manifest.side_files:
            if side.name in taken:
                raise FormatError(f"version {manifest.version}: side file {side.name!r} has the name of a weight file")
        return placement

    def side_file(self, side: SideFile) -> bytes:
        """Return the bytes of a side file."""
        return self._object("files", side.sha256, "")

    # ------------------------------------------------------------ deltas

    def delta(
        self, version: int, wanted: Mask | None = None, *, room: Callable[[int], memoryview] | None = None
    ) -> Delta:
        """Fetch a version's shards and check all that can be checked before decoding.

        wanted: whether each group is to be fetched; then of every shard only its tables are read, and the frames of
        these groups, into memory that `room` gives. Raises NotFound when its data is gone, IntegrityError or
        FormatError naming version and tensors.
        """
        if wanted is not None:
            manifest = self.manifest(version)
            tiling = self.tiling(manifest)
            whole = self._joined(manifest, tiling, self._fetch_tables(manifest.shards, tiling, version))
            fetched = self._fetch_groups(whole.fetched, wanted, version, room or self._room.take)
            return replace(whole, fetched=tuple(fetched))
        with closing(self.deltas([version])) as found:
            return next(found)

    def deltas(self, versions: Iterable[int], *, room: Callable[[int], memoryview] | None = None) -> Generator[Delta]:
        """Yield deltas in order, see `delta`; what comes next is fetched while the caller has the one before.

        room: gives memory for each shard, of so many bytes. Who leaves before the last one has to close the iterator.
        """
        wanted = [(self.manifest(v), self.tiling(self.manifest(v))) for v in versions]
        shards = [(manifest.version, shard, tiling) for manifest, tiling in wanted for shard in manifest.shards]
        with closing(self._fetch_all(shards, room or self._room.take)) as fetched:
            for manifest, tiling in wanted:
                yield self._joined(manifest, tiling, tuple(itertools.islice(fetched, len(manifest.shards))))

    def _joined(self, manifest: Manifest, tiling: Layout | Partition, fetched: tuple[Fetched, ...]) -> Delta:
        """Return the delta that a version's shards are, checked against its manifest."""
        version, layout = manifest.version, self.layout(manifest.layout)
        groups = [g for f in fetched for g in np.unique(f.index.frames["group"]).tolist()]
        present = np.flatnonzero(np.unpackbits(np.frombuffer(manifest.present, np.uint8), bitorder="little"))
        if sorted(groups) != present.tolist():
            raise FormatError(
                f"version {version}: shards hold groups {sorted(groups)}, the manifest names {present.tolist()}"
            )
        total = np.zeros(len(layout.names), np.uint64)
        for one in fetched:
            np.add.at(total, one.index.changes["tensor"], one.index.changes["fingerprint"])  # of several parts
        before = self.history.get(version - 1)
        if before is not None:
            state = fp_hex(int(before.manifest.state, 16) + state_fingerprint(layout.weights, total))
            if state != manifest.state:
                raise FormatError(
                    f"version {version}: its changed tensors lead to state {state}, the manifest says {manifest.state}"
                )
        return Delta(version, layout, tiling, fetched, total)

    def _fetch_tables(self, shards: Sequence[Shard], tiling: Layout | Partition, version: int) -> tuple[Fetched, ...]:
        """Read the header and the tables of shards; the rest of their memory is not touched."""

        def get(shard: Shard) -> Fetched:
            _require_size(version, shard, self.store.size(shard.key))
            data = memoryview(np.empty(shard.nbytes, np.uint8)).cast("B")
            self.store.read_into(shard.key, data[: shard.tensors[1]], offset=0)
            return Fetched(shard, parse_index(shard, data, tiling), data, shard.tensors[1])

        return tuple(requests(self.store, get, shards, self.threads))

    def _fetch_groups(
        self, tables: Sequence[Fetched], wanted: Mask, version: int, room: Callable[[int], memoryview]
    ) -> Iterator[Fetched]:
        """Read the frames of the groups that are wanted, side by side, each checked against its own checksum."""
        runs: list[_Run] = []
        chosen: list[Fetched] = []
        for one in tables:
            frames = one.index.frames[wanted[one.index.frames["group"]]]
            if not len(frames):
                chosen.append(replace(one, index=Index(frames, one.index.changes), data=memoryview(b"")))
                continue
            begin = frames["offset"].astype(np.int64)
            order = np.argsort(begin)
            begin, end = begin[order], (begin + frames["stored"])[order]
            # What lies side by side, but for padding, is read at once.
            apart = np.flatnonzero(begin[1:] - end[:-1] >= ALIGN) + 1
            first, last = begin[np.insert(apart, 0, 0)], end[np.append(apart - 1, -1)]
            to = np.cumsum(-(-(last - first) // ALIGN) * ALIGN)
            data = room(int(to[-1]))
            to -= -(-(last - first) // ALIGN) * ALIGN
            for b, e, t in zip(first.tolist(), last.tolist(), to.tolist(), strict=True):
                for at in range(b, e, _CHUNK):
                    stop = min(at + _CHUNK, e)
                    runs.append(_Run(one.shard.key, at, data[t + at - b : t + stop - b]))
            moved = np.repeat(to - first, np.diff(apart, prepend=0, append=len(begin)))
            frames["offset"][order] = (begin + moved).astype(np.uint64)
            read_bytes = one.nbytes + int((last - first).sum())
            chosen.append(Fetched(one.shard, Index(frames, one.index.changes), data, read_bytes))

        def get(run: _Run) -> None:
            self.store.read_into(run.key, run.data, offset=run.begin)

        for _ in requests(self.store, get, runs, self.threads):
            pass
        for found in chosen:
            try:
                self.check_frames(found)
            except IntegrityError as exc:
                raise IntegrityError(f"version {version}: {exc}; fetch it again") from exc
            yield found

    def fetch(self, shard: Shard, tiling: Layout | Partition, version: int) -> Fetched:
        """Fetch one shard and check it."""
        with closing(self._fetch_all([(version, shard, tiling)], self._room.take)) as found:
            return next(found)

    def _fetch_all(
        self, wanted: Sequence[tuple[int, Shard, Layout | Partition]], room: Callable[[int], memoryview]
    ) -> Generator[Fetched]:
        """Fetch shards with several requests at a time; each is checked while the next ones come."""

        def look(item: tuple[int, Shard, Layout | Partition]) -> None:
            version, shard, _ = item
            _require_size(version, shard, self.store.size(shard.key))

        # Before much room is made for what a manifest claims; of small ones the first request says it.
        for _ in requests(self.store, look, [w for w in wanted if w[1].nbytes > _UNSEEN], self.threads):
            pass

        def pieces() -> Iterator[_Piece]:
            for version, shard, tiling in wanted:
                data = room(shard.nbytes)
                for begin in range(0, max(1, shard.nbytes), _CHUNK):
                    yield _Piece(version, shard, tiling, data, begin)

        def get(piece: _Piece) -> _Piece:
            out = piece.data[piece.begin : piece.begin + _CHUNK]
            if piece.begin == 0:
                _require_size(piece.version, piece.shard, self.store.get(piece.shard.key, out))
            else:
                self.store.read_into(piece.shard.key, out, offset=piece.begin)
            return piece

        def check(piece: _Piece) -> Fetched:
            version, shard, tiling, data, _ = piece
            if xxhash.xxh3_128_hexdigest(data) != shard.xxh3_128:
                raise IntegrityError(
                    f"version {version}: shard {shard.key}: checksum differs{_where(shard, data, tiling)}; "
                    "fetch it again"
                )
            return Fetched(shard, parse_index(shard, data, tiling), data, shard.nbytes)

        with closing(requests(self.store, get, pieces(), self.threads)) as found:
            last = (piece for piece in found if piece.begin + _CHUNK >= piece.shard.nbytes)
            with closing(in_order(check, last, min(_CHECKS, self.threads or _CHECKS))) as fetched:
                yield from fetched

    def check_frames(self, fetched: Fetched) -> None:
        """Raise IntegrityError unless every frame has its own checksum too (range reads rely on it)."""
        for record in fetched.index.frames:
            stored = fetched.data[int(record["offset"]) :][: int(record["stored"])]
            if xxh3_64(stored) != int(record["checksum"]):
                raise IntegrityError(
                    f"shard {fetched.shard.key}: checksum of a frame of group {record['group']} differs"
                )

    # ------------------------------------------------------------ anchors

    def anchors(self) -> dict[int, int]:
        """Return the versions that have an anchor which is not pruned, and its bytes of weights."""
        listed = {int(k[8:-5]) for k in self.store.keys("anchors/") if k == anchor_key_of(k)}
        full = {v for v, e in self.history.items() if e.manifest.kind == "full"}
        records = set(self.store.keys("pruned/"))
        found = {v for v in listed - full if pruned_anchor_key(v) not in records}
        found |= {v for v in full if pruned_key(v) not in records}
        return {v: self.history[v].manifest.totals.raw for v in found if v in self.history}

    def anchor(self, version: int) -> AnchorSource:
        """Return an anchor's record and where its files are."""
        manifest = self.manifest(version)
        if manifest.anchor is not None:
            raw = read(self.store, manifest.anchor.key, limit=_MAX_OBJECT)
            if sha256(raw) != manifest.anchor.sha256:
                raise IntegrityError(f"{manifest.anchor.key}: SHA-256 differs from the manifest of version {version}")
        else:
            raw = read(self.store, anchor_key(version), limit=_MAX_OBJECT)
        layout = self.layout(manifest.layout)
        anchor = decode_anchor(raw, version, len(layout.names))
        if (anchor.layout, anchor.state) != (manifest.layout, manifest.state):
            raise FormatError(f"anchor of version {version}: layout or state differs from the manifest")
        state = state_fingerprint(layout.weights, np.frombuffer(anchor.fingerprints, "<u8"))
        if fp_hex(state) != anchor.state:
            raise FormatError(
                f"anchor of version {version}: fingerprints lead to state {fp_hex(state)}, not {anchor.state}"
            )
        return self._locate(anchor, layout)

    def _locate(self, anchor: Anchor, layout: Layout) -> AnchorSource:
        store, prefix = self.store, f"{anchor.folder}/"
        weights = [f for f in anchor.files if f.name.endswith(".safetensors")]
        if anchor.folder is None:
            store, prefix = self._require_source(anchor, weights), ""
        for file in weights:
            nbytes = store.size(prefix + file.name)
            if nbytes != file.nbytes:
                raise IntegrityError(f"{prefix}{file.name}: {nbytes} bytes found, the anchor has {file.nbytes}")
        headers = {f.name: read_header(store, prefix + f.name, prefix + f.name) for f in weights}
        checkpoint = Checkpoint.of(headers, modes={})
        if checkpoint.layout.digest != layout.digest and anchor.folder is None:
            raise ConfigError(f"{source_lacks(anchor, store)}: its tensors have other names, shapes or dtypes")
        if checkpoint.layout.digest != layout.digest:
            raise IntegrityError(
                f"anchor of version {anchor.version}: its files do not hold the layout {layout.digest[:12]}"
            )
        keys = tuple(prefix + f.name for f in checkpoint.placement.files)
        return AnchorSource(anchor, store, keys, checkpoint)

    def _require_source(self, anchor: Anchor, weights: Sequence[AnchorFile]) -> LocalStore:
        """Return the folder with the files of an anchor by reference. Raises ConfigError if it cannot be that one."""
        if self._anchor_source is None:
            raise ConfigError(
                f"anchor of version {anchor.version} is by reference (made from {anchor.source}); "
                "name a folder that holds its files with --anchor-source"
            )
        store = LocalStore(self._anchor_source)
        for file in weights:
            try:
                nbytes = store.size(file.name)
            except NotFound as exc:
                raise ConfigError(f"{source_lacks(anchor, store)}: {file.name} is not there") from exc
            if nbytes != file.nbytes:
                raise ConfigError(
                    f"{source_lacks(anchor, store)}: {file.name} has {nbytes} bytes there, {file.nbytes} in the anchor"
                )
        return store

    # ------------------------------------------------------------ plans

    def plan(self, want: int, *, local: int | None, missing: frozenset[int] = frozenset()) -> Plan:
        """Return the cheapest way to `want` around versions that are missing or pruned."""
        while True:
            found = self._cheapest(want, local, missing)
            used = frozenset(step.version for step in found.steps)
            # One step behind, and a request would be spent on every version: the newest deltas are the last to go,
            # and one that is gone shows when it is fetched.
            if len(used) < 2 and found.anchor is None:
                return found
            gone = self.pruned(since=min(used, default=found.version)) & used
            if not gone:
                return found
            missing |= gone

    def _cheapest(self, want: int, local: int | None, missing: frozenset[int]) -> Plan:
        """Look for anchors only where the deltas alone do not do."""
        raw = self.manifest(want).totals.raw
        try:
            by_deltas = plan(self.history, want, local=local, anchors={}, missing=missing)
            if by_deltas.nbytes <= raw:
                return by_deltas
        except ChainError:
            if 0 not in self.history:
                self.load()
        return plan(self.history, want, local=local, anchors=self.anchors(), missing=missing)

    def reachable(self, version: int) -> bool:
        """Say whether a newcomer can get to a version: whole chains lead there from an anchor that is there."""
        if 0 not in self.history:
            self.load()
        try:
            self.plan(version, local=None)
        except ChainError:
            return False
        return True

    def pruned(self, *, since: int = 0) -> frozenset[int]:
        """Return the versions, from `since` on, whose own data is declared gone."""
        after = pruned_key(since - 1) if since else ""
        return frozenset(int(k[7:-5]) for k in self.store.keys("pruned/", after=after) if k == pruned_key_of(k))

    def is_pruned(self, version: int) -> bool:
        """Say whether a prune record declares a version's data gone."""
        try:
            self.store.size(pruned_key(version))
        except NotFound:
            return False
        return True

    def identify(self, layout: str, state: int) -> int | None:
        """Return the newest version that has this layout and state."""
        if 0 not in self.history:
            self.load()
        return newest_with_state(self.history, layout, fp_hex(state))

    def fingerprints(self, version: int) -> U64:
        """Return the fingerprint of every tensor of a version, from the nearest anchor and the index tables."""
        if 0 not in self.history:
            self.load()
        way = self.plan(version, local=None)
        assert way.anchor is not None
        total = self.anchor(way.anchor).fingerprints
        with closing(self.deltas([step.version for step in way.steps])) as deltas:
            for step, delta in zip(way.steps, deltas, strict=True):
                total = total - delta.fingerprints if step.undo else total + delta.fingerprints
        return total


def source_lacks(anchor: Anchor, store: Store) -> str:
    """Say that a folder is not the one that an anchor by reference was made from."""
    return (
        f"{store.url} does not hold the files of the anchor of version {anchor.version} (made from {anchor.source}); "
        "name the folder that does with --anchor-source"
    )


def manifest_key_of(key: str) -> str:
    """Return the manifest key that `key` would be if its name is a number, else an empty text."""
    name = key[10:-5]
    return manifest_key(int(name)) if name.isascii() and name.isdigit() else ""


def anchor_key_of(key: str) -> str:
    """Return the anchor key that `key` would be if its name is a number, else an empty text."""
    name = key[8:-5]
    return anchor_key(int(name)) if name.isascii() and name.isdigit() else ""


def pruned_key_of(key: str) -> str:
    """Return the key of a prune record that `key` would be if its name is a number, else an empty text."""
    name = key[7:-5]
    return pruned_key(int(name)) if name.isascii() and name.isdigit() else ""


class _Room:
    """Memory for shards. What nobody looks at any more is used again: new pages cost as much time as their bytes."""

    def __init__(self) -> None:
        self._free: deque[np.ndarray[tuple[int], np.dtype[np.uint8]]] = deque(maxlen=_KEPT)

    def take(self, nbytes: int) -> memoryview:
        """Return room that is the caller's until it and all views of it are gone."""
        try:
            found = self._free.pop()
        except IndexError:
            found = np.empty(0, np.uint8)
        if not nbytes <= found.size <= 2 * nbytes:
            found = np.empty(nbytes, np.uint8)
        lent = found[:nbytes]
        if nbytes >= _WORTH:
            weakref.finalize(lent, self._free.append, found).atexit = False
        return memoryview(lent).cast("B")


def _require_size(version: int, shard: Shard, nbytes: int) -> None:
    """Raise IntegrityError unless a shard is as long as the manifest says."""
    if nbytes != shard.nbytes:
        raise IntegrityError(
            f"version {version}: shard {shard.key}: {nbytes} bytes found, {shard.nbytes} expected; fetch it again"
        )


class _Run(NamedTuple):
    """Bytes of a shard that one request fetches into their place, besides its tables. begin: in the shard."""

    key: str
    begin: int
    data: memoryview


class _Piece(NamedTuple):
    """A part of a shard that one request fetches into its place in `data`."""

    version: int
    shard: Shard
    tiling: Layout | Partition
    data: memoryview
    begin: int


@lru_cache
def _pool(requests: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(requests, thread_name_prefix="deltackpt-get")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_pool.cache_clear)


def requests(store: Store, work: Callable[[A], B], items: Iterable[A], threads: int | None) -> Generator[B]:
    """Yield work(item) in order, with as many requests at a time as make the store fast.

    They wait in threads of their own: a server has time for more of them than this host has CPUs.
    """
    if store.requests:
        return in_order(work, items, store.requests, pool=_pool(store.requests))
    return in_order(work, items, threads)


def read_chunks(store: Store, key: str, out: memoryview, offset: int, threads: int | None) -> None:
    """Fill `out` from an object with several requests at a time."""
    begins = range(0, len(out), _CHUNK)
    for _ in requests(store, lambda b: store.read_into(key, out[b : b + _CHUNK], offset=offset + b), begins, threads):
        pass


def _where(shard: Shard, data: memoryview, tiling: Layout | Partition) -> str:
    """Say which tensors a damaged shard concerns, as far as its own tables can still tell."""
    try:
        raw = bytes(data[8 : 8 + header_length(bytes(data[:64]), len(data), shard.key)])
        parse_header(raw, len(data), shard.key)
        index = parse_index(shard, data, tiling)
    except FormatError:
        return " (its header or index is damaged)"
    for record in index.frames:
        if xxh3_64(data[int(record["offset"]) :][: int(record["stored"])]) != int(record["checksum"]):
            return f" (tensors {tiling.group_names(int(record['group']))})"
    return " (outside the frames)"


def compare_fingerprints(layout: Layout, found: U64, expected: U64) -> list[str]:
    """Return the names of the tensors whose fingerprints differ."""
    return [layout.names[int(t)] for t in np.flatnonzero(found != expected)]


def named(names: list[str]) -> str:
    """Write a list of tensor names short."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def versions(history: Mapping[int, Entry]) -> list[Manifest]:
    """Return manifests, oldest first."""
    return [history[v].manifest for v in sorted(history)]
