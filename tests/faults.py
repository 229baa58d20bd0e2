"""A store that fails on purpose: counts operations, raises before or after the n-th of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, TypeVar

from deltackpt.codec import Bytes
from deltackpt.errors import Unavailable
from deltackpt.store import Store

T = TypeVar("T")


def _lost() -> Exception:
    return Unavailable("injected: the store did not answer")


class FaultStore:
    """Wraps a store. `operations` lists what was asked for, as "put manifests/0.json".

    at: number of the operation that fails, from 1 on, None for never; counts only those in `kinds` (put, read_into,
    get, size, keys, delete, modified), all by default. when: "before" the store has seen it, or "after", which is a
    lost answer.
    """

    def __init__(
        self,
        store: Store,
        *,
        at: int | None = None,
        when: Literal["before", "after"] = "before",
        kinds: Collection[str] = ("put", "read_into", "get", "size", "keys", "delete", "modified"),
        error: Callable[[], Exception] = _lost,
    ) -> None:
        self.store, self.url, self.requests = store, store.url, store.requests
        self.at, self.when, self.kinds, self.error = at, when, kinds, error
        self.operations: list[str] = []
        self._lock = threading.Lock()

    def _run(self, kind: str, key: str, work: Callable[[], T]) -> T:
        fails = False
        if kind in self.kinds:
            with self._lock:
                self.operations.append(f"{kind} {key}")
                fails = len(self.operations) == self.at
        if fails and self.when == "before":
            raise self.error()
        result = work()
        if fails:
            raise self.error()
        return result

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        self._run("put", key, lambda: self.store.put(key, parts, if_absent=if_absent))

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        self._run("read_into", key, lambda: self.store.read_into(key, out, offset=offset))

    def get(self, key: str, out: memoryview) -> int:
        return self._run("get", key, lambda: self.store.get(key, out))

    def size(self, key: str) -> int:
        return self._run("size", key, lambda: self.store.size(key))

    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
        return iter(self._run("keys", prefix, lambda: list(self.store.keys(prefix, after=after))))

    def delete(self, key: str) -> None:
        self._run("delete", key, lambda: self.store.delete(key))

    def modified(self, key: str) -> float:
        return self._run("modified", key, lambda: self.store.modified(key))
