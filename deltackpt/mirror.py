"""Mirror: copy new versions from one store to another, byte for byte. Never copies what a checksum denies.

Data first, then objects by content, the manifest last: DST is a store of its own at every moment, and whatever a killed
run left is used or replaced by the next one. Several runs at once do the same work and all succeed. In SRC nothing is
written but a lease. Longer than most modules: the order of copies, and what a killed run may leave, are one
argument.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, overload

import numpy as np
import xxhash

from deltackpt.chain import Entry
from deltackpt.codec import Bytes
from deltackpt.errors import AlreadyExists, ChainError, ConfigError, IntegrityError, NotFound, Unavailable
from deltackpt.lease import Keeper, Lease, lease_id
from deltackpt.manifest import (
    LEVEL,
    MAX_MANIFEST,
    Anchor,
    Manifest,
    Pruned,
    StoreInfo,
    anchor_key,
    decode,
    decode_anchor,
    digest,
    encode,
    manifest_key,
    pruned_key,
)
from deltackpt.reader import Reader, manifest_key_of, read_chunks
from deltackpt.store import LocalStore, Store, read

CHUNK = 32 << 20
"""Bytes held at a time: as large as a shard, so that large files take no more memory than those."""
_MAX_RECORD = 1 << 30

Start: TypeAlias = int | Literal["newest"] | None
Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class MirrorReport:
    """What one pass did. versions: those that came to DST; without_data: of these, those whose data did not.

    head: version at which DST is now. nbytes: copied; found: bytes that an earlier run had left, checked.
    """

    versions: tuple[int, ...]
    without_data: tuple[int, ...]
    anchors: tuple[int, ...]
    head: int | None
    nbytes: int
    found: int


# ---------------------------------------------------------------- one object


class _Hasher(Protocol):
    def update(self, data: Bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class _Object:
    """An object to copy and what it must be. nbytes: None where only its digest is known."""

    key: str
    what: str
    nbytes: int | None
    xxh3_128: str | None = None
    sha256: str | None = None

    def checks(self) -> list[tuple[_Hasher, str]]:
        """Hashes to compute, and what must come out."""
        found: list[tuple[_Hasher, str]] = []
        if self.xxh3_128 is not None:
            found.append((xxhash.xxh3_128(), self.xxh3_128))
        if self.sha256 is not None:
            found.append((hashlib.sha256(), self.sha256))
        return found


class _Parts(Sequence[Bytes]):
    """An object's bytes, read as they are asked for. The last part is given out only if all are what they must be."""

    def __init__(
        self, store: Store, wanted: _Object, nbytes: int, renew: Callable[[], None], threads: int | None
    ) -> None:
        self._store, self._wanted, self.nbytes = store, wanted, nbytes
        self._renew, self._threads = renew, threads

    def __len__(self) -> int:
        return -(-self.nbytes // CHUNK)

    @overload
    def __getitem__(self, at: int) -> Bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Bytes]: ...
    def __getitem__(self, at: int | slice) -> Bytes | Sequence[Bytes]:
        raise TypeError("parts are checked in order; iterate over them")

    def __iter__(self) -> Iterator[Bytes]:
        checks = self._wanted.checks()
        for begin in range(0, max(1, self.nbytes), CHUNK):
            part = memoryview(np.empty(min(CHUNK, self.nbytes - begin), np.uint8)).cast("B")
            read_chunks(self._store, self._wanted.key, part, begin, self._threads)
            for hasher, _ in checks:
                hasher.update(part)
            if begin + CHUNK >= self.nbytes and any(h.hexdigest() != expected for h, expected in checks):
                raise IntegrityError(
                    f"{self._wanted.what}: checksum of {self._wanted.key} in {self._store.url} differs; it is damaged "
                    "there, see deltackpt verify"
                )
            self._renew()
            if len(part):
                yield part


# ---------------------------------------------------------------- what to copy


@dataclass(frozen=True)
class _Step:
    """What comes along with the manifest of a version. data: its own; anchor: the one beside its delta."""

    version: int
    data: bool
    anchor: bool


class Mirror:
    """Keeps the store `dst` a copy of `src`. Not for use by several threads at once.

    start: from where an empty dst is filled: from the newest anchor at or before that version; None: from the
    beginning. lease_store: where the lease goes, by default into src; where it cannot be written, that is said and the
    copy goes on.
    """

    def __init__(
        self,
        src: Store,
        dst: Store,
        *,
        start: Start = None,
        lease_store: Store | None = None,
        threads: int | None = None,
        now: Callable[[], float] = time.time,
        say: Say = lambda _: None,
    ) -> None:
        self.src, self.dst, self._start, self._threads = src, dst, start, threads
        self._now, self._say = now, say
        self._from, self._to = Reader(src, threads=threads), Reader(dst, threads=threads)
        self._seen: set[str] = set()
        self._reached: dict[int, bool] = {}
        self._stale: frozenset[int] = frozenset()
        self._nbytes = self._found = 0
        self._ready = False
        self._lease_store = src if lease_store is None else lease_store
        self._keeper: Keeper | None = None

    # ------------------------------------------------------------ passes

    def once(self) -> MirrorReport:
        """Copy what is new. Raises ConfigError or ChainError where dst is no copy of src."""
        self._nbytes = self._found = 0
        self._prepare()
        done: list[int] = []
        bare: list[int] = []
        anchors: list[int] = []
        while batch := self._next_batch():
            try:
                self._copy(batch)
            except NotFound:
                # Pruned since it was looked at: then the way to go is another one.
                known = self._pruned | self._without_anchor
                self._look()
                if self._pruned | self._without_anchor == known:
                    raise
                continue
            done += [s.version for s in batch]
            bare += [s.version for s in batch if not s.data]
            anchors += [s.version for s in batch if s.anchor]
            self._hold()
        head = self._head
        return MirrorReport(tuple(done), tuple(bare), tuple(anchors), head, self._nbytes, self._found)

    def watch(self, stop: threading.Event, *, poll_s: float, done: Callable[[MirrorReport], None]) -> None:
        """Copy what is new until `stop` is set; a store that does not answer is waited for."""
        failures = 0
        while not stop.is_set():
            try:
                report = self.once()
            except Unavailable as exc:
                failures += 1
                self._say(f"{exc}; trying again")
            else:
                failures = 0
                if report.versions:
                    done(report)
            stop.wait(poll_s * random.uniform(0.9, 1.1) * min(2**failures, 64))

    def _prepare(self) -> None:
        """Know both stores; after the first time only what is new."""
        if not self._ready:
            self._require_two()
            self._make_store()
            self._load()
            # Of a run that was killed, and that may have had another way.
            self._stale = self._to.pruned(since=0 if self._head is None else self._head + 1)
            self._ready = True
        else:
            self._to.refresh()
            self._from.refresh()
        self._hold()
        if self._head != self._from_head:
            self._look()

    def _require_two(self) -> None:
        urls = [os.path.realpath(s.root) if isinstance(s, LocalStore) else s.url for s in (self.src, self.dst)]
        if urls[0] == urls[1]:
            raise ConfigError(f"SRC and DST are the same store, {self.src.url}; name another DST")

    def _make_store(self) -> None:
        """Give dst the same store.json."""
        info = self._from.info
        raw = read(self.src, "store.json", limit=MAX_MANIFEST)
        try:
            self.dst.put("store.json", [raw])
        except AlreadyExists:
            held = decode(read(self.dst, "store.json", limit=MAX_MANIFEST), StoreInfo, "store.json")
            if held.store_id != info.store_id:
                raise ConfigError(
                    f"{self.dst.url} is store {held.store_id}, {self.src.url} is store {info.store_id}; "
                    "name an empty DST, or the mirror of this SRC"
                ) from None

    def _load(self) -> None:
        listed = [int(k[10:-5]) for k in self.dst.keys("manifests/") if k == manifest_key_of(k)]
        if not listed:
            self._from.load()
            return
        self._to.load(since=max(listed))
        head = self._to.head
        assert head is not None
        version = head.manifest.version
        self._from.load(since=version)
        theirs = self._from.history.get(version)
        if theirs is None:
            raise ChainError(
                f"{self.dst.url} is at version {version}, {self.src.url} ends at {self._from_head}; "
                "are SRC and DST swapped?"
            )
        if theirs.digest != head.digest:
            raise self._forked(version)

    def _forked(self, version: int) -> ChainError:
        return ChainError(
            f"version {version} of {self.dst.url} is not that of {self.src.url}: the streams forked; "
            "name an empty DST, and stop what publishes into this one"
        )

    @property
    def _head(self) -> int | None:
        return self._to.head.manifest.version if self._to.head else None

    @property
    def _from_head(self) -> int | None:
        return self._from.head.manifest.version if self._from.head else None

    # ------------------------------------------------------------ the way

    def _look(self) -> None:
        """Find out what src still has, and where an empty dst begins."""
        since = 0 if self._head is None else self._head + 1
        self._pruned = self._from.pruned(since=since)
        self._anchors = {v for v in self._from.anchors() if v >= since}
        self._without_anchor = frozenset(self._from.history) - self._anchors
        self._first = self._find_first() if self._head is None and self._start is not None else 0

    def _find_first(self) -> int:
        assert self._from_head is not None
        want = self._from_head if self._start == "newest" or self._start is None else self._start
        self._from.manifest(want)
        found = [v for v in self._anchors if v <= want]
        if not found:
            raise ChainError(
                f"{self.src.url} has no anchor at or before version {want}; make one with deltackpt anchor, "
                "or leave out --from"
            )
        return max(found)

    def _next_batch(self) -> list[_Step]:
        """Return the next versions up to one that dst can rebuild; until it is there, none of them can be."""
        batch: list[_Step] = []
        reached = self._reached
        for version in range(0 if self._head is None else self._head + 1, (self._from_head or 0) + 1):
            if version not in self._from.history:
                break
            step = self._step(self._from.manifest(version), reached)
            batch.append(step)
            if reached[version]:
                return batch
        if batch:
            raise ChainError(
                f"versions {batch[0].version} to {batch[-1].version} cannot be rebuilt from what {self.src.url} still "
                "has and the mirror holds; make an anchor there with deltackpt anchor, then mirror again"
            )
        return batch

    def _step(self, manifest: Manifest, reached: dict[int, bool]) -> _Step:
        version, base = manifest.version, manifest.base
        there = version not in self._pruned and version >= self._first
        if manifest.kind == "full":
            reached[version] = there
            return _Step(version, there, False)
        assert base is not None
        tied = reached[base] if base in reached else self._holds(base)
        whole = tied and (there or manifest.kind != "delta")
        anchor = not whole and version in self._anchors and version >= self._first
        reached[version] = whole or anchor
        return _Step(version, whole, anchor)

    def _holds(self, version: int) -> bool:
        """Say whether dst can rebuild one of its versions."""
        if version != self._head:
            return self._to.reachable(version)
        # The head can be, unless a run was killed between the first and the last manifest of a batch.
        records, anchors = self._to.pruned(since=version), self._to.anchors()
        manifest = self._to.manifest(version)
        if version in anchors or manifest.kind in ("full", "delta"):
            return version in anchors or version not in records
        return self._to.reachable(version)

    # ------------------------------------------------------------ copies

    def _copy(self, batch: list[_Step]) -> None:
        for step in batch:
            manifest = self._from.manifest(step.version)
            what = f"version {step.version}"
            if step.data:
                for shard in manifest.shards:
                    self._put(_Object(shard.key, what, shard.nbytes, shard.xxh3_128, shard.sha256))
                if manifest.anchor is not None:
                    self._put_anchor(manifest, manifest.anchor.key, manifest.anchor.sha256)
            if step.anchor:
                self._put_anchor(manifest, anchor_key(step.version), None)
            self._put_objects(manifest, what)
        for step in batch:
            self._commit(step)

    def _put_objects(self, manifest: Manifest, what: str) -> None:
        found = [_Object(f"{k}/{d}.json", what, None, sha256=d) for k, d in _tables(manifest)]
        found += [_Object(f"files/{s.sha256}", what, s.nbytes, sha256=s.sha256) for s in manifest.side_files]
        for wanted in found:
            if wanted.key not in self._seen:
                self._put(wanted)
                self._seen.add(wanted.key)

    def _put_anchor(self, manifest: Manifest, key: str, content: str | None) -> None:
        """Copy an anchor's files, then its record."""
        what = f"anchor of version {manifest.version}"
        anchor: Anchor = decode_anchor(read(self.src, key, limit=_MAX_RECORD), manifest.version)
        if anchor.folder is not None:
            self._from.anchor(manifest.version)
            for file in anchor.files:
                self._put(_Object(f"{anchor.folder}/{file.name}", what, file.nbytes, file.xxh3_128, file.sha256))
        self._put(_Object(key, what, None, sha256=content))

    def _put(self, wanted: _Object) -> None:
        """Copy one object; one that is there already is looked at, byte by byte, and replaced if it is damaged."""
        nbytes = self.src.size(wanted.key)
        if wanted.nbytes is not None and nbytes != wanted.nbytes:
            raise IntegrityError(
                f"{wanted.what}: {wanted.key} has {nbytes} bytes in {self.src.url}, {wanted.nbytes} are expected; "
                "it is damaged there, see deltackpt verify"
            )
        if self._sound(wanted, nbytes):
            self._found += nbytes
            return
        parts = _Parts(self.src, wanted, nbytes, self._renew, self._threads)
        try:
            # Replaced, if it is there and damaged: never gone in between, for another mirror may count on it.
            self.dst.put(wanted.key, parts, if_absent=not self._exists(wanted.key))
        except AlreadyExists:
            if not self._sound(wanted, nbytes):
                raise
        self._nbytes += nbytes

    def _exists(self, key: str) -> bool:
        try:
            self.dst.size(key)
        except NotFound:
            return False
        return True

    def _sound(self, wanted: _Object, nbytes: int) -> bool:
        """Say whether dst has the object, whole."""
        try:
            if self.dst.size(wanted.key) != nbytes:
                return False
            parts = _Parts(self.dst, wanted, nbytes, self._renew, self._threads)
            if wanted.checks():
                for _ in parts:
                    pass
                return True
            theirs = _Parts(self.src, wanted, nbytes, self._renew, self._threads)
            return all(a == b for a, b in zip(parts, theirs, strict=True))
        except (IntegrityError, NotFound):
            return False

    def _commit(self, step: _Step) -> None:
        version = step.version
        entry = self._from.history[version]
        key = manifest_key(version)
        if step.data and version in self._stale:
            self.dst.delete(pruned_key(version))
        elif not step.data and entry.manifest.kind in ("full", "delta") and not self._exists(key):
            self._put_record(version)
        raw = read(self.src, key, limit=MAX_MANIFEST)
        if digest(raw) != entry.digest:
            raise IntegrityError(f"{key} of {self.src.url} has changed since it was read; it is damaged there")
        try:
            self.dst.put(key, [raw])
        except AlreadyExists:
            if digest(read(self.dst, key, limit=MAX_MANIFEST)) != entry.digest:
                raise self._forked(version) from None
        self._to.history[version] = Entry(entry.manifest, entry.digest)

    def _put_record(self, version: int) -> None:
        """Say in dst that it does not have the data of a version."""
        try:
            raw = read(self.src, pruned_key(version), limit=MAX_MANIFEST)
        except NotFound:
            raw = encode(Pruned(LEVEL, version, self._now()))
        try:
            self.dst.put(pruned_key(version), [raw])
        except AlreadyExists:
            return

    # ------------------------------------------------------------ the lease

    def _hold(self) -> None:
        """Say in src which version dst has, so that the way from there to the head stays."""
        if self._keeper is None:
            lease = Lease(
                format=LEVEL, id=lease_id(self.dst.url), store_id=self._from.info.store_id, created=0.0, expires=0.0,
                duration_s=0.0, mode="mirror", host=socket.gethostname(), dest=self.dst.url,
            )  # fmt: skip
            self._keeper = Keeper(self._lease_store, lease, now=self._now, say=self._say)
        # An empty dst needs what it begins with.
        staged = self._from_head if self._head is None else None
        self._keeper.update(version=self._head, staged=staged, error=None)

    def _renew(self) -> None:
        if self._keeper is not None:
            self._keeper.renew()


def _tables(manifest: Manifest) -> list[tuple[str, str]]:
    found = [("layouts", manifest.layout), ("placements", manifest.placement)]
    return found if manifest.partition is None else [*found, ("partitions", manifest.partition)]


def mirror_store(
    src: Store, dst: Store, *, start: Start = None, lease_store: Store | None = None, threads: int | None = None,
    say: Say = lambda _: None,
) -> MirrorReport:  # fmt: skip
    """Copy what dst does not have yet from src, once. See Mirror."""
    return Mirror(src, dst, start=start, lease_store=lease_store, threads=threads, say=say).once()
