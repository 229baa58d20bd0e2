"""A store in a folder of a POSIX filesystem, and the words in which the operating system refuses.

Nothing is written in place: a file gets its name when it is whole and durable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import unquote_to_bytes

from deltackpt.codec import Bytes
from deltackpt.errors import AlreadyExists, ConfigError, IntegrityError, NotFound, StoreError, Unavailable

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNKNOWN = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN}


def store_error(exc: OSError, what: str) -> StoreError:
    """Translate an error of the operating system; the class says whether a retry can help."""
    reason = exc.strerror or str(exc)
    if exc.errno in _NO_SPACE:
        return StoreError(f"{what}: no space ({reason}); free some and run again")
    if exc.errno == errno.EROFS:
        return StoreError(f"{what}: read-only ({reason})")
    if exc.errno in (errno.EACCES, errno.EPERM):
        return StoreError(f"{what}: no permission for this user ({reason})")
    if exc.errno in _UNKNOWN:
        return Unavailable(f"{what}: {reason}; try again")
    return StoreError(f"{what}: {reason}")


_TEMPORARY = ".tmp"
_STALE_S = 86400.0
"""A temporary file of another host is litter after this time."""


def temporary_prefix() -> str:
    """Return how names of temporary files and folders begin: they say whose they are, so that others can sweep them."""
    return f"{socket.gethostname()}-{os.getpid()}-"


class LocalStore:
    """A store in a folder of a POSIX filesystem.

    Every write goes to a temporary file under the root, is fsynced, and gets its name by link (exclusive) or rename,
    followed by an fsync of the folder.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(root)
        self.url = self.root
        self.requests = 0
        self._swept = False

    def _path(self, key: str) -> str:
        return os.path.join(self.root, *key.split("/"))

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        """See Store.put."""
        path = self._path(key)
        try:
            self._make_folder(os.path.dirname(path))
            temporary = self._write(parts)
        except OSError as exc:
            raise store_error(exc, f"writing {key} in {self.root}") from exc
        try:
            self._name(temporary, path, os.link if if_absent else os.rename)
        except FileExistsError as exc:
            raise AlreadyExists(f"{key} exists already") from exc
        except OSError as exc:
            raise store_error(exc, f"writing {key} in {self.root}") from exc
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        try:
            sync_folder(os.path.dirname(path))
        except OSError as exc:
            raise Unavailable(f"writing {key}: {exc.strerror}, after it got its name; put it again") from exc

    def _name(self, temporary: str, path: str, give: Callable[[str, str], None]) -> None:
        try:
            give(temporary, path)
        except FileNotFoundError:
            # A delete has emptied the folder since, and removed it.
            self._make_folder(os.path.dirname(path))
            give(temporary, path)

    def _write(self, parts: Sequence[Bytes]) -> str:
        folder = os.path.join(self.root, _TEMPORARY)
        self._make_folder(folder)
        if not self._swept:
            self._sweep(folder)
            self._swept = True
        temporary = os.path.join(folder, temporary_prefix() + secrets.token_hex(8))
        # The mode is left to the umask: readers may be other users.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                _write_parts(fd, parts)
                os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            os.unlink(temporary)
            raise
        return temporary

    def _sweep(self, folder: str) -> None:
        """Remove temporary files and folders whose writer is gone; what cannot be removed is left."""
        host = socket.gethostname()
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            owner, _, rest = entry.name.rpartition("-")[0].rpartition("-")
            with contextlib.suppress(OSError):
                if owner == host and rest.isdigit():
                    stale = not os.path.exists(f"/proc/{rest}")
                else:
                    stale = time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_S
                if stale and entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif stale:
                    os.unlink(entry.path)

    def _make_folder(self, folder: str) -> None:
        if os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        if parent != folder:
            self._make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        sync_folder(parent)

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        """See Store.read_into."""
        fd = self._open(key)
        try:
            read_exactly(fd, out, offset, key)
        except OSError as exc:
            raise store_error(exc, f"reading {key} in {self.root}") from exc
        finally:
            os.close(fd)

    def get(self, key: str, out: memoryview) -> int:
        """See Store.get."""
        fd = self._open(key)
        try:
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                raise self._not_found(key)
            read_exactly(fd, out[: found.st_size], 0, key)
            return found.st_size
        except OSError as exc:
            raise store_error(exc, f"reading {key} in {self.root}") from exc
        finally:
            os.close(fd)

    def _open(self, key: str) -> int:
        try:
            return os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise self._not_found(key) from exc
        except OSError as exc:
            raise store_error(exc, f"reading {key} in {self.root}") from exc

    def _not_found(self, key: str) -> StoreError:
        if not os.path.isdir(self.root):
            return StoreError(f"{self.root} does not exist or cannot be seen; expected the folder of a store")
        return NotFound(f"{key} is not in {self.root}")

    def _stat(self, key: str) -> os.stat_result:
        try:
            found = os.stat(self._path(key))
        except FileNotFoundError as exc:
            raise self._not_found(key) from exc
        except OSError as exc:
            raise store_error(exc, f"reading {key} in {self.root}") from exc
        if stat.S_ISDIR(found.st_mode):
            raise self._not_found(key)
        return found

    def size(self, key: str) -> int:
        """See Store.size."""
        return self._stat(key).st_size

    def modified(self, key: str) -> float:
        """See Store.modified."""
        return self._stat(key).st_mtime

    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """See Store.keys."""
        if not os.path.isdir(self.root):
            raise self._not_found(prefix)
        yield from self._walk(prefix.rstrip("/"), after)

    def _walk(self, folder: str, after: str) -> Iterator[str]:
        try:
            with os.scandir(self._path(folder)) as entries:
                # Folders sort with their slash, so that keys come out in order.
                found = sorted((e.name + "/" if e.is_dir() else e.name) for e in entries)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise store_error(exc, f"listing {folder} in {self.root}") from exc
        for name in found:
            key = f"{folder}/{name}"
            if name.endswith("/"):
                yield from self._walk(key[:-1], after)
            elif key > after:
                yield key

    def delete(self, key: str) -> None:
        """See Store.delete."""
        path = self._path(key)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise store_error(exc, f"deleting {key} in {self.root}") from exc
        # A folder is no object: an empty one is litter. It may have been filled again since.
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))


_IOV = 1024
"""Parts of one write; Linux takes no more."""
_BATCH = 16 << 20
"""Bytes of parts that are asked for before they are written."""


def _write_parts(fd: int, parts: Iterable[Bytes]) -> None:
    """Write all bytes of the parts, none of them copied, as they come: a full copy may not fit into memory."""
    waiting: list[memoryview] = []
    nbytes = 0
    for part in parts:
        if len(part):
            waiting.append(memoryview(part).cast("B"))
            nbytes += len(waiting[-1])
        if nbytes >= _BATCH or len(waiting) == _IOV:
            _write_batch(fd, waiting)
            waiting, nbytes = [], 0
    _write_batch(fd, waiting)


def _write_batch(fd: int, waiting: list[memoryview]) -> None:
    at = 0
    while at < len(waiting):
        done = os.writev(fd, waiting[at:])
        while done:
            taken = min(done, len(waiting[at]))
            waiting[at] = waiting[at][taken:]
            done -= taken
            at += not waiting[at]


def write_all(fd: int, data: memoryview) -> None:
    """Write all bytes to a descriptor."""
    while data:
        data = data[os.write(fd, data[: 1 << 30]) :]


def read_exactly(fd: int, out: memoryview, offset: int, what: str) -> None:
    """Fill `out` from a descriptor. Raises IntegrityError if the file ends first."""
    done = 0
    while done < len(out):
        n = os.preadv(fd, [out[done : done + (1 << 30)]], offset + done)
        if n == 0:
            raise IntegrityError(f"{what}: it ends at byte {offset + done}, {offset + len(out)} were expected")
        done += n


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def local_path(url: str) -> str:
    """Return the path that a file:// URL names."""
    host, _, path = url.partition("://")[2].partition("/")
    if host not in ("", "localhost"):
        raise ConfigError(f"{url} names a host, {host}; expected file:/// and an absolute path")
    if "#" in path or "?" in path:
        raise ConfigError(f"{url}: # and ? end the path of a URL; percent-encode them, or give a plain path")
    return os.fsdecode(unquote_to_bytes("/" + path))
