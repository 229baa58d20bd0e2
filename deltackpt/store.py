"""Stores: keys and bytes under a root. The only module that knows where a store's bytes lie, and that retries.

A put is whole or not there at all. An exclusive create has one winner. "Cannot see" is never "not there".
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Protocol, TypeVar

from deltackpt.codec import Bytes
from deltackpt.errors import AlreadyExists, ConfigError, IntegrityError, NotFound, Unavailable
from deltackpt.local import LocalStore, local_path, read_exactly, store_error, sync_folder, temporary_prefix, write_all
from deltackpt.manifest import immutable
from deltackpt.probe import Found, exclusive, probe, remember

__all__ = [
    "Elsewhere", "LocalStore", "Retrying", "Store", "open_store", "probe_store", "read", "read_exactly", "store_error",
    "sync_folder", "temporary_prefix", "write_all",
]  # fmt: skip

T = TypeVar("T")


class Store(Protocol):
    """What the rest of the package needs of a store.

    requests: how many at a time make it fast; 0: as many as there are threads to work with.
    """

    url: str
    requests: int

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        """Write the parts, joined, under a key: durable and whole, or an error.

        parts: iterated in order, once for each try; they may be read from elsewhere only then, and an error that they
        raise comes out of here, with nothing under the key. if_absent: raises AlreadyExists when the key is taken.
        Unavailable: the outcome is unknown.
        """

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        """Fill `out` with the bytes from `offset` on. Raises NotFound; IntegrityError if the object is shorter."""

    def get(self, key: str, out: memoryview) -> int:
        """Fill `out` with the first bytes of an object, as many as there are; return how many the whole object has.

        One request, where the object fits. Raises NotFound.
        """

    def size(self, key: str) -> int:
        """Return the bytes of an object. Raises NotFound."""

    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """Yield the keys below `prefix` (which ends with a slash) that sort after `after`, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object; it is no error if it is gone."""

    def modified(self, key: str) -> float:
        """Return when an object was written, in Unix seconds of the store's own clock. Raises NotFound."""


_SMALL = 256 << 10
"""Bytes of an object that one request may bring before its size is known: more than most manifests have."""


def read(store: Store, key: str, *, limit: int) -> bytes:
    """Return a small object. Raises IntegrityError if it is larger than `limit` bytes."""
    out = bytearray(min(limit, _SMALL))
    nbytes = store.get(key, memoryview(out))
    if nbytes > limit:
        raise IntegrityError(f"{key}: {nbytes} bytes found, at most {limit} are expected")
    if nbytes <= len(out):
        return bytes(memoryview(out)[:nbytes])
    had = len(out)
    out += bytes(nbytes - had)
    store.read_into(key, memoryview(out)[had:], offset=had)
    return bytes(out)


# ---------------------------------------------------------------- retries

TRIES = 7
FIRST_S, LONGEST_S = 0.2, 10.0
"""Pauses between tries: at random up to 0.2 s, doubled each time. Six of them last 6 s on average, 13 s at most."""
_COMPARED = 16 << 20


class Retrying:
    """A store that asks again where an answer may come yet, with pauses that grow and are drawn at random.

    exclusive: whether the store's exclusive create is one, asked before the first; where it is not, there is one
    writer by the user's word, and it looks before it writes.
    """

    def __init__(
        self,
        store: Store,
        *,
        exclusive: Callable[[], bool] = lambda: True,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
        tries: int = TRIES,
    ) -> None:
        self.store, self.url, self.requests = store, store.url, store.requests
        self._ask, self._sleep, self._draw, self._tries = exclusive, sleep, draw, tries
        self._lock = threading.Lock()
        self._exclusive: bool | None = None

    def _try(self, work: Callable[[], T]) -> T:
        for number in range(self._tries - 1):
            with contextlib.suppress(Unavailable):
                return work()
            self._sleep(self._draw() * min(LONGEST_S, FIRST_S * 2**number))
        return work()

    def _is_exclusive(self) -> bool:
        with self._lock:
            if self._exclusive is None:
                self._exclusive = self._ask()
            return self._exclusive

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        """See Store.put. A key that holds these very bytes is no error: after a lost answer they are ours."""
        if if_absent and not self._is_exclusive():
            try:
                self.size(key)
            except NotFound:
                if_absent = False
            else:
                raise AlreadyExists(f"{key} exists already")
        try:
            self._try(lambda: self.store.put(key, parts, if_absent=if_absent))
        except AlreadyExists:
            # Clients too send a write again whose answer was lost, and say nothing of it.
            if not self._holds(key, parts):
                raise

    def _holds(self, key: str, parts: Sequence[Bytes]) -> bool:
        """Say whether an object is these bytes, and nothing else."""
        offset, nbytes = 0, self.size(key)
        for part in parts:
            view = memoryview(part).cast("B")
            for begin in range(0, len(view), _COMPARED):
                wanted = view[begin : begin + _COMPARED]
                if offset + len(wanted) > nbytes:
                    return False
                found = bytearray(len(wanted))
                self.read_into(key, memoryview(found), offset=offset)
                if found != wanted:
                    return False
                offset += len(wanted)
        return offset == nbytes

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        """See Store.read_into."""
        self._try(lambda: self.store.read_into(key, out, offset=offset))

    def get(self, key: str, out: memoryview) -> int:
        """See Store.get."""
        return self._try(lambda: self.store.get(key, out))

    def size(self, key: str) -> int:
        """See Store.size."""
        return self._try(lambda: self.store.size(key))

    def modified(self, key: str) -> float:
        """See Store.modified."""
        return self._try(lambda: self.store.modified(key))

    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """See Store.keys. A listing that breaks off goes on after the last key it gave."""
        pages: Iterator[str] | None = None

        def step() -> str:
            nonlocal pages
            try:
                if pages is None:
                    pages = self.store.keys(prefix, after=after)
                return next(pages, "")
            except Unavailable:
                pages = None
                raise

        while key := self._try(step):
            after = key
            yield key

    def delete(self, key: str) -> None:
        """See Store.delete."""
        self._try(lambda: self.store.delete(key))


# ---------------------------------------------------------------- copies elsewhere


class Elsewhere:
    """A store whose immutable objects are read from copies in another place: a mirror, or a cache before it.

    What the copies lack is read from the store itself, for a mirror may be behind. All else is the store's own.
    """

    def __init__(self, store: Store, copies: Store) -> None:
        self.store, self.copies, self.url, self.requests = store, copies, store.url, copies.requests

    def _read(self, key: str, work: Callable[[Store], T]) -> T:
        if immutable(key):
            with contextlib.suppress(NotFound):
                return work(self.copies)
        return work(self.store)

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        """See Store.put."""
        self.store.put(key, parts, if_absent=if_absent)

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        """See Store.read_into."""
        self._read(key, lambda store: store.read_into(key, out, offset=offset))

    def get(self, key: str, out: memoryview) -> int:
        """See Store.get."""
        return self._read(key, lambda store: store.get(key, out))

    def size(self, key: str) -> int:
        """See Store.size."""
        return self._read(key, lambda store: store.size(key))

    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """See Store.keys."""
        return self.store.keys(prefix, after=after)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        self.store.delete(key)

    def modified(self, key: str) -> float:
        """See Store.modified."""
        return self.store.modified(key)


# ---------------------------------------------------------------- URLs


def open_store(
    url: str | os.PathLike[str] | Store,
    *,
    options: Mapping[str, str] | None = None,
    single_writer: bool = False,
    data_url: str | os.PathLike[str] | Store | None = None,
    data_options: Mapping[str, str] | None = None,
) -> Store:
    """Return the store at a URL; a store is returned as it is. It need not exist yet, and nothing is asked of it.

    url: a path, file://, a bucket (s3://, gs://, az://, by obstore where that is installed, else by fsspec), or any
    other URL that fsspec knows; fsspec+s3:// is by fsspec always. options: endpoint, region, path_style, profile,
    anonymous, or what the client itself takes. single_writer: there is no other writer, so that a store which cannot
    create exclusively will do. data_url: a place with copies of the store's immutable objects, a mirror or an HTTP
    cache, from which they are read as far as it has them; data_options: its options.
    """
    if data_url is not None:
        origin = open_store(url, options=options, single_writer=single_writer)
        return Elsewhere(origin, open_store(data_url, options=data_options))
    if not isinstance(url, (str, os.PathLike)):
        return url
    text = os.fspath(url)
    if "::" in text and "://" in text:
        raise ConfigError(f"{text}: chained URLs go through caches; name the store itself")
    scheme, separator, _ = text.partition("://")
    if not separator or not scheme.replace("+", "").replace("-", "").isalnum():
        if not text:
            raise ConfigError("the store URL is empty; expected a path, file:// or a bucket as s3://bucket/prefix")
        return LocalStore(text)
    if scheme.lower() == "file":
        return LocalStore(local_path(text))
    remote = open_remote(text, options)
    ask = partial(exclusive, Retrying(remote), remote.place, single_writer=single_writer)
    return Retrying(remote, exclusive=ask)


def probe_store(url: str, *, options: Mapping[str, str] | None = None) -> Found:
    """Try what the store at a URL can do, and remember it for this host."""
    store = open_store(url, options=options)
    if isinstance(store, Retrying):
        remote = open_remote(url, options)
        found = probe(Retrying(remote))
        if found.tier < 3:
            remember(remote.place, found)
        return found
    return probe(store)


class _Remote(Store, Protocol):
    """A store on a server. place: its endpoint and bucket, which all stores there share."""

    place: str


def open_remote(url: str, options: Mapping[str, str] | None = None) -> _Remote:
    """Return the store at a URL as its client gives it: every request is one try."""
    scheme, _, rest = url.partition("://")
    forced, plus, inner = scheme.lower().partition("+")
    if plus and forced == "fsspec":
        scheme, url = inner, f"{inner}://{rest}"
    else:
        plus, scheme = "", scheme.lower()
        url = f"{scheme}://{rest}"
    from deltackpt import fsspecstore, obstorestore

    if scheme in obstorestore.SCHEMES and not plus and find_spec("obstore") is not None:
        from deltackpt.remote import parse

        return obstorestore.ObstoreStore(parse(url), options)
    if scheme in ("file", "local"):
        raise ConfigError(f"{url}: fsspec writes local files in place; name the path itself")
    fsspecstore.require_known(scheme, url)
    return fsspecstore.FsspecStore(url, options)
