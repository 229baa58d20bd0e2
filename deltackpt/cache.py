"""Host cache: what the followers of one host read of a store, fetched once. A store around a store.

Immutable objects are kept, whole, and only those: never a manifest, a channel or a lease. An object gets its name in
the cache when it has the checksum that the manifest, the anchor's record or its own name says, and is proven again
whenever somebody begins to read it. A process that dies leaves nothing that others wait for: all locks are flocks.

The folder belongs to one user and lies on a local filesystem or in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import xxhash

from deltackpt.codec import Bytes
from deltackpt.digest import sha256
from deltackpt.errors import IntegrityError, NotFound
from deltackpt.local import read_exactly, store_error
from deltackpt.manifest import MAX_MANIFEST, Anchor, anchor_key, decode_anchor, decode_manifest, immutable, manifest_key
from deltackpt.store import Store, read

CACHE_NBYTES = 32 << 30
"""Bytes that a cache holds at most, unless another bound is given."""
STALLED_S = 60.0
"""Who fills an entry and shows no sign of life for so long is not waited for: slow links bring a chunk in this time."""
_CHUNK = 16 << 20
_REQUESTS = 12
"""Requests in flight for one large object."""
_WAIT_S = 0.01
_LOOKS = 3
_PART = ".part"
_TRAILER = 16
_MAX_ANCHOR = 1 << 30
_REMEMBERED = 256


class _Known(NamedTuple):
    """What an object must be. sha256: its digest; else xxh3_128 is its checksum."""

    nbytes: int
    xxh3_128: str = ""
    sha256: str = ""


class Cached:
    """A store whose immutable objects are read through a folder of this host.

    Any number of processes and threads may share the folder, also for several stores. nbytes: bound for all files in
    it; what was not read for longest goes first, and nothing goes while it is read. An object that finds no room
    is read from the store itself. served: bytes that this object read from the folder; fetched: bytes of immutable
    objects that it had from the store.
    """

    def __init__(
        self,
        store: Store,
        folder: str | os.PathLike[str],
        *,
        nbytes: int = CACHE_NBYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store, self.url, self.folder = store, store.url, os.path.abspath(folder)
        # While one thread of a reader fetches an object, another one waits for a piece of it.
        self.requests = 2 * store.requests
        self.served = self.fetched = 0
        self._nbytes, self._clock, self._sleep = nbytes, clock, sleep
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._identity = ""
        self._known: dict[str, dict[str, _Known]] = {}
        self._proven: dict[str, tuple[int, int, int]] = {}

    # ------------------------------------------------------------ the store

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        """See Store.put."""
        self.store.put(key, parts, if_absent=if_absent)

    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """See Store.keys."""
        return self.store.keys(prefix, after=after)

    def delete(self, key: str) -> None:
        """See Store.delete. What hosts have of the object stays until it must make room."""
        self.store.delete(key)

    def modified(self, key: str) -> float:
        """See Store.modified."""
        return self.store.modified(key)

    def size(self, key: str) -> int:
        """See Store.size. An object that is in the cache is there."""
        if immutable(key):
            with contextlib.suppress(FileNotFoundError):
                return os.stat(self._path(key)).st_size - _TRAILER
        return self.store.size(key)

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        """See Store.read_into."""
        with self._entry(key, begins=offset == 0) as fd:
            if fd is None:
                self.store.read_into(key, out, offset=offset)
                self._count(0, len(out) if immutable(key) else 0)
                return
            nbytes = os.fstat(fd).st_size - _TRAILER
            if offset + len(out) > nbytes:
                raise IntegrityError(f"{key}: it ends at byte {nbytes}, {offset + len(out)} were expected")
            self._read(fd, out, offset, key)

    def get(self, key: str, out: memoryview) -> int:
        """See Store.get."""
        with self._entry(key, begins=True) as fd:
            if fd is None:
                nbytes = self.store.get(key, out)
                self._count(0, min(len(out), nbytes) if immutable(key) else 0)
                return nbytes
            nbytes = os.fstat(fd).st_size - _TRAILER
            self._read(fd, out[:nbytes], 0, key)
            return nbytes

    def _read(self, fd: int, out: memoryview, offset: int, key: str) -> None:
        try:
            read_exactly(fd, out, offset, key)
        except OSError as exc:
            raise store_error(exc, f"reading {key} in the cache {self.folder}") from exc
        self._count(len(out), 0)

    def _count(self, served: int, fetched: int) -> None:
        with self._lock:
            self.served += served
            self.fetched += fetched

    # ------------------------------------------------------------ entries

    def _path(self, key: str) -> str:
        if not self._identity:
            # A mirror has the store.json of its source, and so shares its entries.
            self._identity = sha256(read(self.store, "store.json", limit=MAX_MANIFEST))
        return os.path.join(self.folder, sha256(f"{self._identity} {key}".encode())[:40])

    @contextlib.contextmanager
    def _entry(self, key: str, *, begins: bool) -> Iterator[int | None]:
        """Lend a descriptor of a proven entry that cannot be evicted meanwhile; None: read the store itself.

        begins: a pass over the object begins here, so that it is proven again.
        """
        if not immutable(key):
            yield None
            return
        path = self._path(key)
        try:
            os.makedirs(self.folder, exist_ok=True)
            fd = self._find(key, path, begins)
        except OSError as exc:
            raise store_error(exc, f"caching {key} in {self.folder}") from exc
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    def _find(self, key: str, path: str, begins: bool) -> int | None:
        for _ in range(_LOOKS):
            fd = self._opened(path, begins)
            if fd is not None:
                return fd
            part = os.open(path + _PART, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            kept = False
            try:
                locked = self._flock(part, fcntl.LOCK_EX, path + _PART)
                if locked is None:
                    continue  # whoever held it has finished, or it was evicted
                if not locked:
                    return None
                if os.path.exists(path):
                    os.unlink(path + _PART)
                    continue
                kept = self._fill(part, key, path)
                return part if kept else None
            finally:
                if not kept:
                    os.close(part)
        return None

    def _opened(self, path: str, begins: bool) -> int | None:
        """Open an entry; None where there is none, or it is damaged and was removed."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        kept = False
        try:
            if not self._flock(fd, fcntl.LOCK_SH, path):
                return None
            if begins or self._proven.get(path) != _state(fd):
                if not _sound(fd):
                    os.unlink(path)
                    return None
                self._remember(path, fd)
                # By hand, because filesystems are mounted without times of reading.
                os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))
            kept = True
            return fd
        finally:
            if not kept:
                os.close(fd)

    def _remember(self, path: str, fd: int) -> None:
        if len(self._proven) >= _REMEMBERED:
            self._proven.clear()
        self._proven[path] = _state(fd)

    def _flock(self, fd: int, kind: int, path: str) -> bool | None:
        """Lock an open file; None when it has another name by now, or none.

        False: whoever holds it has shown no sign of life for STALLED_S.
        """
        since, seen = self._clock(), -1
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                return True if _is(fd, path) else None
            if not _is(fd, path):
                return None
            if (sign := os.fstat(fd).st_mtime_ns) != seen:
                since, seen = self._clock(), sign
            elif self._clock() - since > STALLED_S:
                return False
            self._sleep(_WAIT_S)

    # ------------------------------------------------------------ filling

    def _fill(self, fd: int, key: str, path: str) -> bool:
        """Fetch an object into its locked part file and give it its name; False: it is not for the cache."""
        done = False
        try:
            known = self._expected(key)
            if known is None or not self._make_room(fd, known.nbytes + _TRAILER):
                return False
            self._fetch(fd, key, known)
            os.rename(path + _PART, path)
            done = True
        finally:
            if not done:
                os.unlink(path + _PART)
        self._remember(path, fd)
        # Readers may come; evictors stay out.
        fcntl.flock(fd, fcntl.LOCK_SH)
        return True

    def _fetch(self, fd: int, key: str, known: _Known) -> None:
        nbytes = known.nbytes
        with mmap.mmap(fd, nbytes + _TRAILER) as mapped, memoryview(mapped) as view:

            def get(begin: int) -> None:
                with view[begin : min(begin + _CHUNK, nbytes)] as out:
                    self.store.read_into(key, out, offset=begin)
                os.utime(fd)  # the sign of life that others wait by

            begins = range(0, nbytes, _CHUNK)
            if len(begins) > 1:
                with ThreadPoolExecutor(min(_REQUESTS, len(begins)), "deltackpt-cache") as pool:
                    list(pool.map(get, begins))
            else:
                get(0)
            with view[:nbytes] as whole:
                checksum = xxhash.xxh3_128(whole)
                right = sha256(whole) == known.sha256 if known.sha256 else checksum.hexdigest() == known.xxh3_128
            if not right:
                raise IntegrityError(f"{key}: the {nbytes} bytes that came have another checksum; fetch it again")
            view[nbytes:] = checksum.digest()
        self._count(0, nbytes)

    def _make_room(self, fd: int, nbytes: int) -> bool:
        """Reserve bytes for a part file, at the cost of what was read longest ago; False: there is no room."""
        if nbytes > self._nbytes:
            return False
        gate = os.path.join(self.folder, "lock")
        lock = os.open(gate, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not self._flock(lock, fcntl.LOCK_EX, gate):
                return False
            os.ftruncate(fd, 0)
            found = []
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        found.append((status.st_atime_ns, status.st_size, entry.path))
            total = sum(size for _, size, _ in found)
            for _, size, path in sorted(found):
                if total + nbytes <= self._nbytes:
                    break
                if size and _evict(path):
                    total -= size
            if total + nbytes > self._nbytes:
                return False
            os.posix_fallocate(fd, 0, nbytes)
            return True
        finally:
            os.close(lock)

    # ------------------------------------------------------------ what objects must be

    def _expected(self, key: str) -> _Known | None:
        """Return what an object must be; None: no record names it with a checksum."""
        kind, name, *_ = key.split("/")
        if kind != "data":
            return _Known(self.store.size(key), sha256=name.partition(".")[0])
        with self._asking:
            if not self._known.get(name):
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                try:
                    self._known[name] = self._named(name)
                except NotFound:
                    return None
            return self._known[name].get(key)

    def _named(self, attempt: str) -> dict[str, _Known]:
        """Return the objects of an attempt that its version's manifest, or the record of its anchor, names."""
        number, _, rest = attempt.partition("-")
        if len(number) != 20 or not (number.isascii() and number.isdigit()):
            return {}
        version = int(number)
        if rest.startswith("anchor-"):
            return _files(decode_anchor(read(self.store, anchor_key(version), limit=_MAX_ANCHOR), version))
        raw = read(self.store, manifest_key(version), limit=MAX_MANIFEST)
        manifest = decode_manifest(raw, version)
        if manifest.anchor is not None:
            raw = read(self.store, manifest.anchor.key, limit=_MAX_ANCHOR)
            if sha256(raw) != manifest.anchor.sha256:
                raise IntegrityError(f"{manifest.anchor.key}: SHA-256 differs from the manifest of version {version}")
            return _files(decode_anchor(raw, version))
        return {shard.key: _Known(shard.nbytes, xxh3_128=shard.xxh3_128) for shard in manifest.shards}


def _files(anchor: Anchor) -> dict[str, _Known]:
    return {f"{anchor.folder}/{f.name}": _Known(f.nbytes, xxh3_128=f.xxh3_128) for f in anchor.files}


def _is(fd: int, path: str) -> bool:
    """Say whether a path still leads to an open file."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _state(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _sound(fd: int) -> bool:
    """Say whether an entry has the checksum that stands at its end."""
    nbytes = os.fstat(fd).st_size - _TRAILER
    if nbytes < 0:
        return False
    checksum = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(1 << 20, nbytes)))
    for begin in range(0, nbytes, 1 << 20):
        part = buffer[: min(1 << 20, nbytes - begin)]
        read_exactly(fd, part, begin, "a cached object")
        checksum.update(part)
    return os.pread(fd, _TRAILER, nbytes) == checksum.digest()


def _evict(path: str) -> bool:
    """Remove an entry, or the rest of one whose maker is gone, unless it is in use."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(fd, path):
            os.unlink(path)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
