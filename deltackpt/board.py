"""Boards and rounds: small values by which the processes of a group tell each other what they decided. Never weights.

Two kinds under one interface: torch's TCPStore, which ends with the process that hosts it, and a store of versions,
which outlives every process. Every call is bounded.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from deltackpt import errors
from deltackpt.errors import AlreadyExists, ConfigError, DeltaError, NotFound, Unavailable
from deltackpt.store import Store, read

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

MAX_VALUE = 16 << 20
"""Bytes of a value: a manifest is the largest."""


class Board(Protocol):
    """Values by key. All calls raise Unavailable where the board does not answer in time.

    poll_s: how long to wait between two looks, at least; a look costs that much less.
    """

    poll_s: float

    def create(self, key: str, value: bytes) -> bytes:
        """Set a key that has no value yet; returns the value that it has then: this one, or whoever was first."""

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes | None:
        """Return a value, None where there is none."""

    def drop(self, keys: Iterable[str]) -> None:
        """Forget keys; it is no error if one has no value."""


def _line(exc: RuntimeError) -> str:
    """Return the first line of an error of torch: a C++ backtrace follows it."""
    return str(exc).partition("\n")[0]


class TcpBoard:
    """A board in a TCPStore of torch, under a prefix. timeout_s: how long it may take to answer.

    A TCPStore itself waits for a host that is stopped for as long as that lasts. So its calls are made in a thread.
    """

    poll_s = 0.002

    def __init__(self, store: TCPStore, *, prefix: str = "deltackpt", timeout_s: float = 10.0) -> None:
        self._store, self._prefix, self._timeout_s = store, prefix, timeout_s
        self._calls: queue.SimpleQueue[tuple[Future[object], Callable[[], object]]] = queue.SimpleQueue()
        self._lost = ""
        threading.Thread(target=self._serve, name="deltackpt-board", daemon=True).start()

    def _serve(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as exc:  # handed to the thread that asks
                future.set_exception(exc)

    def _ask(self, call: Callable[[], T]) -> T:
        if self._lost:
            raise Unavailable(self._lost)
        future: Future[T] = Future()
        self._calls.put((future, call))  # type: ignore[arg-type]  # a Future[T] takes the T that its call returns
        try:
            return future.result(self._timeout_s)
        except Late:
            found = f"no answer in {self._timeout_s:g} s"
        except RuntimeError as exc:  # all errors of torch.distributed are
            found = _line(exc)
        self._lost = f"the group's TCPStore is lost ({found}); start the group again, or let the store be its board"
        raise Unavailable(self._lost)

    def create(self, key: str, value: bytes) -> bytes:
        """See Board.create."""
        # An empty value is what TCPStore expects of a key that is not there.
        found = self._ask(lambda: self._store.compare_set(f"{self._prefix}/{key}", "", value))  # type: ignore[arg-type]  # bytes are taken
        return bytes(found)

    def put(self, key: str, value: bytes) -> None:
        """See Board.put."""
        self._ask(lambda: self._store.set(f"{self._prefix}/{key}", value))  # type: ignore[arg-type]  # bytes are taken

    def get(self, key: str) -> bytes | None:
        """See Board.get."""
        name = f"{self._prefix}/{key}"
        # Keys are dropped only when nobody asks for them any more.
        return self._ask(lambda: bytes(self._store.get(name)) if self._store.check([name]) else None)

    def drop(self, keys: Iterable[str]) -> None:
        """See Board.drop."""
        for key in keys:
            self._ask(lambda name=f"{self._prefix}/{key}": self._store.delete_key(name))  # type: ignore[misc]  # bound at once


class StoreBoard:
    """A board in a store of versions, under `board/<session>/`: no process hosts it, so any may die.

    session: of this start of the group, never used before: what an earlier one left would be taken for its own.
    """

    poll_s = 0.1

    def __init__(self, store: Store, session: str) -> None:
        if not session or not all(c.isalnum() or c in "._+=@-" for c in session) or session.strip(".") == "":
            raise ConfigError(f"session {session!r}: expected letters, digits and ._+=@- as in a key of the store")
        self.session = session
        self._store, self._prefix = store, f"board/{session}"

    def create(self, key: str, value: bytes) -> bytes:
        """See Board.create."""
        name = f"{self._prefix}/{key}"
        try:
            self._store.put(name, [value])
            return value
        except AlreadyExists:
            return read(self._store, name, limit=MAX_VALUE)

    def put(self, key: str, value: bytes) -> None:
        """See Board.put."""
        self._store.put(f"{self._prefix}/{key}", [value], if_absent=False)

    def get(self, key: str) -> bytes | None:
        """See Board.get."""
        name = f"{self._prefix}/{key}"
        try:
            return read(self._store, name, limit=MAX_VALUE)
        except NotFound:
            return None

    def drop(self, keys: Iterable[str]) -> None:
        """See Board.drop."""
        for key in keys:
            self._store.delete(f"{self._prefix}/{key}")


def sweep_boards(store: Store, keep: str) -> None:
    """Remove what groups left that are gone; what cannot be removed is in nobody's way."""
    with contextlib.suppress(Unavailable):
        for key in list(store.keys("board/")):
            if not key.startswith(f"board/{keep}/"):
                store.delete(key)


@dataclass
class Counted:
    """A board that counts what goes through it. sent, received: bytes of keys and values of this process."""

    board: Board
    sent: int = 0
    received: int = 0
    poll_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.poll_s = self.board.poll_s

    def create(self, key: str, value: bytes) -> bytes:
        """See Board.create."""
        found = self.board.create(key, value)
        self.sent += len(key) + len(value)
        self.received += len(found)
        return found

    def put(self, key: str, value: bytes) -> None:
        """See Board.put."""
        self.board.put(key, value)
        self.sent += len(key) + len(value)

    def get(self, key: str) -> bytes | None:
        """See Board.get."""
        found = self.board.get(key)
        self.sent += len(key)
        self.received += len(found or b"")
        return found

    def drop(self, keys: Iterable[str]) -> None:
        """See Board.drop."""
        self.board.drop(keys)


@dataclass
class Within:
    """The keys of a board under a prefix."""

    board: Board
    prefix: str
    poll_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.poll_s = self.board.poll_s

    def create(self, key: str, value: bytes) -> bytes:
        """See Board.create."""
        return self.board.create(f"{self.prefix}/{key}", value)

    def put(self, key: str, value: bytes) -> None:
        """See Board.put."""
        self.board.put(f"{self.prefix}/{key}", value)

    def get(self, key: str) -> bytes | None:
        """See Board.get."""
        return self.board.get(f"{self.prefix}/{key}")

    def drop(self, keys: Iterable[str]) -> None:
        """See Board.drop."""
        self.board.drop(f"{self.prefix}/{key}" for key in keys)


@dataclass(frozen=True)
class Group:
    """The processes that publish together: this one's rank, how many there are, and their board.

    lease_s: a rank that shows no progress for this long is out, and others do its work where they can.
    """

    rank: int
    size: int
    board: Board
    lease_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} of {self.size}: expected 0 to {self.size - 1}")
        if not self.lease_s > 0:
            raise ConfigError(f"a lease of {self.lease_s} s; expected more than 0")

    @classmethod
    def tcp(
        cls, host: str, port: int, *, rank: int, size: int, lease_s: float = 60.0, prefix: str = "deltackpt"
    ) -> Group:
        """Join by a TCPStore that is served already. prefix: of this start of the group, never used before there."""
        from datetime import timedelta

        from torch._C._distributed_c10d import TCPStore

        try:
            store = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(lease_s, 1.0))
            )
        except RuntimeError as exc:
            raise Unavailable(
                f"no TCPStore at {host}:{port} ({str(exc).partition(chr(10))[0]}); start it first"
            ) from exc
        return cls(rank, size, TcpBoard(store, prefix=prefix, timeout_s=max(lease_s, 1.0)), lease_s)

    @classmethod
    def of_torch(cls, *, lease_s: float = 60.0, store: Store | None = None) -> Group:
        """Join as torch.distributed is set up (torchrun does it); collective.

        The board is a TCPStore that rank 0 serves, or the store of versions where that is given: then rank 0 may die.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised; call init_process_group first")
        rank, size = dist.get_rank(), dist.get_world_size()
        said: list[object] = [secrets.token_hex(8), "", 0]
        served = None
        if rank == 0 and store is None:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            served = serve_tcp(host, timeout_s=max(lease_s, 1.0))
            said = [said[0], host, served.port]
        dist.broadcast_object_list(said, src=0)
        session = str(said[0])
        if store is not None:
            return cls(rank, size, StoreBoard(store, session), lease_s)
        if served is not None:
            return cls(rank, size, TcpBoard(served, prefix=session, timeout_s=max(lease_s, 1.0)), lease_s)
        return cls.tcp(str(said[1]), int(str(said[2])), rank=rank, size=size, lease_s=lease_s, prefix=session)


def serve_tcp(host: str = "127.0.0.1", port: int = 0, *, timeout_s: float = 60.0) -> TCPStore:
    """Serve a TCPStore from this process for as long as the result is kept; `.port` says where."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


# ---------------------------------------------------------------- rounds


class Trouble(msgspec.Struct, frozen=True):
    """Why a rank, or a round, failed. kind: class of errors.py; gone: the rank does nothing more in this round."""

    kind: str
    text: str
    gone: bool = False

    @classmethod
    def of(cls, exc: BaseException, *, gone: bool = False) -> Trouble:
        """Describe an error; what is not of this package is a reason to try again."""
        if isinstance(exc, DeltaError):
            return cls(type(exc).__name__, str(exc), gone)
        return cls("Unavailable", f"{type(exc).__name__}: {exc}; publish again", gone)

    def error(self) -> DeltaError:
        """Return the error."""
        kind = getattr(errors, self.kind, DeltaError)
        found: DeltaError = kind(self.text)
        return found


class Watch:
    """Who of a group gets on, through all of its rounds.

    A lease is kept by progress: each rank counts its steps, and one whose count stands still for the length of the
    lease, by the clock of who looks, is out. Who is out when a round ends is out in the next one too until its count
    moves, so that a death is waited for once. Between rounds nobody counts: all others have a lease from there.
    """

    def __init__(self, group: Group, board: Board, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.group, self.board, self._clock = group, board, clock
        self._number, self._steps, self._told, self._began = 0, 0, -math.inf, -math.inf
        self._seen: dict[int, tuple[bytes | None, float]] = {}
        self._looked: dict[int, float] = {}
        self._out: set[int] = set()

    def begin(self, number: int) -> None:
        """Go on to a round."""
        self._number, self._told, self._began = number, -math.inf, self._clock()
        self._looked.clear()
        self._seen = {rank: seen for rank, seen in self._seen.items() if rank in self._out}

    def waited(self) -> bool:
        """Whether the round has lasted for a lease."""
        return self._clock() - self._began >= self.group.lease_s

    def step(self) -> None:
        """Say that this rank makes progress; told to others some ten times per lease."""
        self._steps += 1
        now = self._clock()
        if now - self._told >= self.group.lease_s / 10:
            self._told = now
            self.board.put(f"steps/{self.group.rank}", b"%d %d" % (self._number, self._steps))

    def look(self, rank: int) -> bool:
        """Look at the count of a rank, some twenty times per lease; returns whether it was time to."""
        now = self._clock()
        if now - self._looked.get(rank, -math.inf) < self.group.lease_s / 20:
            return False
        self._looked[rank] = now
        found = self.board.get(f"steps/{rank}")
        if found is not None and int(found.partition(b" ")[0]) > self._number:
            found = b"later"  # whatever it does now, it does nothing more in this round
        if rank not in self._seen or self._seen[rank][0] != found:
            self._seen[rank] = (found, now)
            self._out.discard(rank)
        return True

    def out(self, rank: int) -> bool:
        """Whether a rank that was looked at has shown no progress for the length of the lease."""
        if self._clock() - self._seen[rank][1] >= self.group.lease_s:
            self._out.add(rank)
        return rank in self._out


_AHEAD = 8
"""Ranks that all watch, though a living one before them decides: those of them that die together cost one lease."""


class Forgotten(Exception):
    """The values of a round were dropped while this rank was still in it: what it finds there decides nothing."""


class Round:
    """One thing that a group does together: values under keys of its own.

    Nothing is decided by who is out: it says only who goes on. Every decision is the value of a key that is created
    once, so that two who both go on agree, and a rank that wakes up follows what was decided. watch: of all rounds.
    """

    def __init__(self, watch: Watch, number: int) -> None:
        self.group, self.board, self.number, self._watch = watch.group, watch.board, number, watch
        self._made: list[str] = []
        self.troubles: dict[int, Trouble] = {}
        watch.begin(number)

    def forget(self) -> None:
        """Drop what this rank has set. That it is gone is said first, and stays: a key could be created again."""
        if self.get("over") is None:
            self.board.create(self.key("over"), b"1")
        self.board.drop(self._made)

    def _require_kept(self) -> None:
        if self.get("over") is not None:
            raise Forgotten

    def waited(self) -> bool:
        """Whether this round has lasted for a lease, here."""
        return self._watch.waited()

    def key(self, name: str) -> str:
        """Return a key of this round."""
        return f"r{self.number}/{name}"

    def get(self, name: str) -> bytes | None:
        """Return a value of this round."""
        return self.board.get(self.key(name))

    def put(self, name: str, value: bytes) -> None:
        """Set a value that only this rank sets."""
        self._made.append(self.key(name))
        self.board.put(self.key(name), value)

    def create(self, name: str, value: bytes) -> bytes:
        """Decide; returns what was decided, here or by who was first."""
        self._made.append(self.key(name))
        return self.board.create(self.key(name), value)

    def step(self) -> None:
        """Say that this rank makes progress."""
        self._watch.step()

    def out(self, rank: int) -> bool:
        """Whether a rank has said that it is gone, or has shown no progress for the length of the lease."""
        if rank == self.group.rank:
            return False
        if self._watch.look(rank):
            self.failed(rank)
        trouble = self.troubles.get(rank)
        return (trouble is not None and trouble.gone) or self._watch.out(rank)

    def failed(self, rank: int) -> Trouble | None:
        """Return why a rank leaves its work to others, if it does."""
        if rank not in self.troubles and (raw := self.get(f"trouble/{rank}")) is not None:
            self.troubles[rank] = msgspec.json.decode(raw, type=Trouble)
        return self.troubles.get(rank)

    def fail(self, trouble: Trouble) -> None:
        """Say that this rank leaves its work to others."""
        self.troubles[self.group.rank] = trouble
        self.put(f"trouble/{self.group.rank}", msgspec.json.encode(trouble))

    def _all(self, ranks: Sequence[int], ends: Callable[[int], object]) -> bool:
        """Whether something is so of all of `ranks`; the first few are all asked."""
        return all([ends(rank) for rank in ranks[:_AHEAD]]) and all(ends(rank) for rank in ranks[_AHEAD:])

    def lost(self, ranks: Sequence[int]) -> bool:
        """Whether all of `ranks` are out or failed."""
        return self._all(ranks, lambda rank: self.out(rank) or self.failed(rank))

    def turn(self, ranks: Sequence[int]) -> bool:
        """Whether it is this rank's turn: it is the first of `ranks` that is neither out nor failed."""
        mine = self.group.rank
        return mine in ranks and mine not in self.troubles and self.lost(ranks[: ranks.index(mine)])

    def leads(self, ranks: Sequence[int]) -> bool:
        """Whether this rank decides: every lower one of `ranks` is out; if it is none of them, all are."""
        mine = self.group.rank
        return self._all([rank for rank in ranks if rank < mine or mine not in ranks], self.out)

    def decided(
        self,
        name: str,
        ranks: Sequence[int],
        decide: Callable[[], bytes | None],
        *,
        idle: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Return what was decided under a key; whoever leads asks `decide` until it returns a value.

        idle: called between looks, on every rank. Ends as soon as `decide` of a rank that lives does: what it waits
        for must be bounded by leases. Raises Forgotten where the others went on so long ago that nothing is known.
        """
        pause = self.board.poll_s
        while True:
            found = self.get(name)
            # Who may have to decide soon has to know by then who is out.
            for rank in ranks if found is None and self.group.rank in ranks[:_AHEAD] else ():
                self.out(rank)
            if found is None and self.leads(ranks):
                self._require_kept()
                if (value := decide()) is not None:
                    found = self.create(name, value)
            if found is not None:
                self._require_kept()
                return found
            self.step()
            idle()
            time.sleep(pause)
            pause = min(2 * pause, max(self.board.poll_s, self.group.lease_s / 100))
