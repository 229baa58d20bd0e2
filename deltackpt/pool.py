"""Work by several threads, in order; and one such pass over tensors in memory, fingerprints.

Runs inside of engines, so it needs numpy alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import numpy as np

from deltackpt.digest import U64
from deltackpt.kernels import fingerprint, first_elements, use_jit
from deltackpt.layout import Layout, Segments

PIECE = 16 << 20
"""Bytes of weights per task: long enough to hide the cost of a task, short enough to keep all threads busy."""

A = TypeVar("A")
B = TypeVar("B")


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="deltackpt")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_pool.cache_clear)


def default_threads() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def submit(threads: int, work: Callable[[], B]) -> Future[B]:
    """Begin a piece of work in a pool of so many threads."""
    return _pool(threads).submit(work)


def in_order(
    work: Callable[[A], B], items: Iterable[A], threads: int | None, *, pool: ThreadPoolExecutor | None = None
) -> Generator[B]:
    """Yield work(item) in order while about twice `threads` items are under way.

    However it ends, no work is under way after that, nor begins: memory that it uses may be given back. A signal
    handler may raise anywhere in here. Who leaves before the last item has to close the iterator.
    """
    threads = threads or default_threads()
    if threads == 1:
        yield from map(work, items)
        return
    pool, waiting = pool or _pool(threads), deque[Future[B]]()
    try:
        for item in items:
            # Known before it is begun: between the two an exception may come.
            waiting.append(Future())
            pool.submit(_fulfil, waiting[-1], work, item)
            if len(waiting) > 2 * threads + 2:  # one slow item must not leave the others idle
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    finally:
        interrupt: BaseException | None = None
        while waiting:
            try:
                for future in waiting:
                    future.cancel()
                for future in waiting:
                    if not future.cancelled():
                        future.exception()
                waiting.clear()
            except BaseException as exc:  # raised when all has ended
                interrupt = exc
        if interrupt is not None:
            raise interrupt


def _fulfil(future: Future[B], work: Callable[[A], B], item: A) -> None:
    """Do a piece of work in a thread of a pool, unless it was cancelled."""
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(work(item))
    except BaseException as exc:  # handed to the thread that asks
        future.set_exception(exc)
    finally:
        del future  # its error knows this frame


def _first(waiting: deque[Future[B]]) -> B:
    """Return the first result, and forget it only then: who is interrupted while he waits still knows it."""
    result = waiting[0].result()
    waiting.popleft()
    return result


def row_addresses(segments: Segments, tensors: U64) -> U64:
    """Return the address of each row, given the address of each tensor; 0 of rows that are no run of elements there."""
    found: U64 = tensors[segments.tensor] + (first_elements(segments) * segments.width).astype(np.uint64)
    if segments.boxes is not None and segments.box is not None:
        found[segments.boxes.strided[segments.box]] = 0
    return found


def fingerprints(layout: Layout, tensors: U64, *, threads: int | None = None) -> U64:
    """Return the fingerprint of each tensor: a full pass over memory."""
    jit = use_jit(layout)
    total = np.zeros(len(layout.names), np.uint64)

    def work(piece: Segments) -> tuple[Segments, U64]:
        return piece, fingerprint(piece, row_addresses(piece, tensors), jit=jit)

    pieces = (piece for group in layout.groups for piece in group.cut(PIECE))
    for segments, fp in in_order(work, pieces, threads):
        total[segments.tensor] += fp
    return total
