"""The sidecar: keeps a checkpoint folder at the version that it shall have, for as long as it is let.

It never goes back unasked, never ends an apply half-way, and is never alive and silent: a poll that fails says so in
one line, and what no later poll can mend ends the process with the error's exit code. Longer than most modules because
one loop owns all of the watcher's state, and its rules are read together.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import selectors
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import msgspec

from deltackpt.engine import Engine, EngineFailed
from deltackpt.errors import (
    ChainError,
    ConfigError,
    DeltaError,
    FormatError,
    IntegrityError,
    NotFound,
    Poisoned,
    SignatureError,
    StoreError,
    Unavailable,
    UnsupportedFormat,
)
from deltackpt.folder import OWN, CheckpointTarget, read_record
from deltackpt.follow import POLL_S, Follower, Prepared, weight_version
from deltackpt.lease import Channel, Keeper, Lease, lease_id, newer_setting, read_channel
from deltackpt.ledger import ApplyLog, Heartbeat, Hook, HookFailed, Owed, applied, way
from deltackpt.manifest import LEVEL
from deltackpt.reader import Reader
from deltackpt.store import Store, store_error

GIVE_UP_S = 60.0
"""How long a version that cannot be had is tried before it is reported as given up."""
SILENT_S = 900.0
"""Without a sign of life for so long, a watcher counts as hung; decoding and copying have none of their own."""
STOPPED = "stopped; what was being staged is dropped, the next start stages it again"
_BACKOFF_S = (0.2, 30.0)
_SIGN_S = 1.0

Level: TypeAlias = Literal["info", "warning", "error"]
Mode: TypeAlias = Literal["replace", "switch", "in-place"]


class Pace:
    """Clock, chance and sleep of a watcher. `ring` ends a sleep, also from a signal handler or another thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell = os.pipe()
        for fd in self._bell:
            os.set_blocking(fd, False)
        self.listen(self._bell[0])

    def now(self) -> float:
        """Return seconds that only grow."""
        return time.monotonic()

    def date(self) -> float:
        """Return seconds since 1970."""
        return time.time()

    def uniform(self, low: float, high: float) -> float:
        """Return a random number."""
        return random.uniform(low, high)

    def listen(self, fd: int) -> None:
        """Let bytes on a descriptor end a sleep too."""
        self._selector.register(fd, selectors.EVENT_READ)

    def wait(self, seconds: float) -> bool:
        """Sleep; returns whether it was ended early."""
        ready = self._selector.select(max(0.0, seconds))
        for key, _ in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(key.fd, 4096):
                    pass
        return bool(ready)

    def ring(self) -> None:
        """End the sleep that is, or the next one."""
        with contextlib.suppress(BlockingIOError):  # it is full of rings
            os.write(self._bell[1], b"\0")

    def close(self) -> None:
        """Release what it listens on."""
        self._selector.close()
        for fd in self._bell:
            os.close(fd)


@contextlib.contextmanager
def fifo(path: str, pace: Pace) -> Iterator[None]:
    """Let whatever is written to a FIFO end a sleep; it is made if it is missing."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        # For writing too: without a writer it would be at its end all the time.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise store_error(exc, f"opening the FIFO {path}") from exc
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise ConfigError(f"{path} is no FIFO; name another path, it is made if it is missing")
        pace.listen(fd)
        yield
    finally:
        os.close(fd)


class Backoff:
    """Growing pauses with full jitter."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._failures = pace, 0

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        low, high = _BACKOFF_S
        limit = min(high, low * 2.0 ** min(self._failures, 60))
        self._failures += 1
        return max(low, self._pace.uniform(0.0, limit))

    def reset(self) -> None:
        """Begin again after a success."""
        self._failures = 0


@dataclass(frozen=True)
class Event:
    """Something to tell. fields: for programs."""

    level: Level
    name: str
    message: str
    fields: Mapping[str, object] = field(default_factory=dict)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A watcher as seen from outside. goal: what it shall hold, None while that is not known.

    head: newest version seen; staged: on its way in, or waiting for an order. since: of the process; *_time: seconds
    since 1970. times: of the last apply. engine_version: weight version as read back from the engine, None while it
    cannot be read; pause_ms: how long the engine last stood still.
    """

    store: str
    dest: str
    mode: str
    channel: str | None
    ordered: int | None = None
    goal: int | None = None
    applied: int | None = None
    weight_version: str | None = None
    staged: int | None = None
    head: int | None = None
    hook_owed: int | None = None
    last_error: str | None = None
    error_time: float | None = None
    since: float = 0.0
    poll_time: float | None = None
    applied_time: float | None = None
    polls: int = 0
    failures: int = 0
    applies: int = 0
    hook_failures: int = 0
    bytes_fetched: int = 0
    stage_ms: float = 0.0
    apply_ms: float = 0.0
    stage_ms_total: float = 0.0
    apply_ms_total: float = 0.0
    engine: str | None = None
    engine_version: str | None = None
    pause_ms: float | None = None


class _Stopped(BaseException):
    """Ends a stage where it reads. No Exception, so that nothing takes it for an error."""


@dataclass
class _Fault:
    """A version that cannot be had."""

    version: int
    since: float
    backoff: Backoff
    retry_at: float = 0.0


class _Felt:
    """A store whose reads are signs of life; all else is the store's own."""

    def __init__(self, store: Store, sign: Callable[[], None]) -> None:
        self._store, self._sign = store, sign

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        """See Store.read_into."""
        self._sign()
        self._store.read_into(key, out, offset=offset)
        self._sign()

    def get(self, key: str, out: memoryview) -> int:
        """See Store.get."""
        self._sign()
        nbytes = self._store.get(key, out)
        self._sign()
        return nbytes

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class Watcher:
    """Keeps `dest` at a version of the store at `url`: the newest, a channel's, or the one last ordered.

    hold: stage the newest or the channel's version, and apply only what is ordered. command: run by the shell after
    each apply. engine: brought to what the folder holds after each apply, before the command. lease_store: where to put
    a lease, None: nowhere. wrap: put around the store, for tests.

    `run` and `once` belong to one thread; `order`, `wake` and `state` may be used by all; `terminate` by a signal
    handler of that thread.
    """

    def __init__(
        self,
        url: str | Store,
        dest: str,
        *,
        channel: str | None = None,
        mode: Mode | None = None,
        poll_s: float = POLL_S,
        give_up_s: float = GIVE_UP_S,
        hold: bool = False,
        reseed: bool = False,
        command: str | None = None,
        engine: Engine | None = None,
        lease_store: Store | None = None,
        lease_name: str | None = None,
        heartbeat: str | None = None,
        lock: str | None = None,
        anchor_source: str | None = None,
        threads: int | None = None,
        pace: Pace | None = None,
        say: Callable[[Event], None] = lambda _: None,
        wrap: Callable[[Store], Store] = lambda store: store,
    ) -> None:
        self.url = url if isinstance(url, str) else url.url
        self.dest, self.channel = os.path.abspath(dest), channel
        self._poll_s, self._give_up_s, self._hold, self._reseed = poll_s, give_up_s, hold, reseed
        self._pace, self._say, self._wrap = Pace() if pace is None else pace, say, wrap
        self._owns_pace = pace is None

        mode = mode or _mode_of(self.dest)

        def make() -> Follower:
            target = CheckpointTarget(self.dest, mode=mode, lock=lock)
            return Follower(url, target, anchor_source=anchor_source, threads=threads)

        self._make = make
        first = CheckpointTarget(self.dest, mode=mode, lock=lock)
        self.mode = first.mode
        own = os.path.join(self.dest, OWN)
        self._log = ApplyLog(os.path.join(own, "apply.log"))
        self._hook = None if command is None else Hook(command, self.dest, os.path.join(own, "hook.json"))
        self._engine = engine
        if engine is not None and self.mode != "switch":
            raise ConfigError(f"{self.dest} is kept in {self.mode} mode; an engine loads from a folder in switch mode")
        self._heart = None if heartbeat is None else Heartbeat(heartbeat)
        self._lease_store, self._lease_name = lease_store, lease_name
        self._keeper: Keeper | None = None
        self._follower: Follower | None = None
        self._opened = False
        self._channel: Channel | None = None
        self._listed = False
        self._staged: Prepared | None = None
        self._fault: _Fault | None = None
        self._backoff = Backoff(self._pace)
        self._orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._hurry = self._stopping = self._reading = False
        self._waiting_for: str | None = None
        self._missing: list[str] = []
        self._sign_lock, self._signed = threading.Lock(), self._pace.now()
        self._state = State(
            store=self.url, dest=self.dest, mode=self.mode, channel=channel, since=self._pace.date(),
            engine=None if engine is None else engine.url,
        )  # fmt: skip

    # ------------------------------------------------------------ from outside

    @property
    def state(self) -> State:
        """What is known now."""
        return self._state

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return self._pace.now() - self._signed

    def order(self, version: int | None) -> None:
        """Ask for a version to be held until the next order; None: again the channel's or the newest one."""
        self._orders.put(version)
        self.wake()

    def wake(self) -> None:
        """Poll now."""
        self._hurry = True
        self._pace.ring()

    def terminate(self) -> None:
        """End soon: a begun apply is finished, a stage ends with its next read, a hook is asked to end."""
        self._stopping = True
        if self._hook is not None:
            self._hook.terminate()
        self._pace.ring()

    @property
    def reading(self) -> bool:
        """Whether it is staging or opening its folder: work that may be cut off at any place."""
        return self._reading

    def sweep(self) -> None:
        """Remove what a stage has written, before the process is ended in the middle of it."""
        own = os.path.join(self.dest, OWN)
        with contextlib.suppress(OSError):
            for name in os.listdir(own):
                if name.startswith("stage-"):
                    shutil.rmtree(os.path.join(own, name), ignore_errors=True)

    # ------------------------------------------------------------ loops

    def run(self) -> None:
        """Follow until `terminate`. Raises the error that no later poll can mend."""
        with self._until_stopped():
            while not self._stopping:
                self._pace.wait(self.step())

    def once(self) -> State:
        """Look once and bring `dest` up to date. What may pass is waited for until the give-up time is over."""
        began = self._pace.now()
        with self._until_stopped():
            while not self._stopping:
                try:
                    self._poll()
                    break
                except DeltaError as exc:
                    self._note_error(exc)
                    passing = isinstance(exc, (Unavailable, EngineFailed)) or (
                        self._fault is not None and not _final(exc)
                    )
                    if not passing or self._pace.now() - began >= self._give_up_s:
                        raise
                    self._tell("warning", "failed", f"{exc}; trying again", self._error_fields(exc))
                    self._pace.wait(self._backoff.next())
            self._live()
            if self._waiting_for is not None and not self._stopping:
                raise NotFound(self._waiting_for)
        return self._state

    @contextlib.contextmanager
    def _until_stopped(self) -> Iterator[None]:
        try:
            yield
        except _Stopped:
            self._tell("info", "stopped", STOPPED)
        finally:
            self.close()

    def close(self) -> None:
        """Drop what is staged and release the folder."""
        self._drop_staged()
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        if self._owns_pace:
            self._pace.close()
            self._owns_pace = False

    def step(self) -> float:
        """Poll once; returns the seconds to wait before the next poll. Raises what ends a watcher."""
        self._signed = self._pace.now()
        normal = self._poll_s * self._pace.uniform(0.75, 1.25)
        try:
            changed = self._poll()
        except DeltaError as exc:
            self._note_error(exc)
            if _final(exc):
                self._live()
                raise
            delay = self._failed(exc, normal)
        else:
            self._backoff.reset()
            delay = 0.0 if changed else normal
            if self._fault is None:
                self._set(last_error=None)
        self._live()
        return delay

    def _failed(self, exc: DeltaError, normal: float) -> float:
        """Say in one line why a poll failed; returns the pause that follows."""
        fault, now = self._fault, self._pace.now()
        if fault is not None and fault.retry_at <= now:
            # News are looked for as ever; only the version is left alone for a while.
            tried = now - fault.since
            given_up = tried >= self._give_up_s
            # The last try before giving up is made when the time is over, not some pause later.
            pause = (
                max(self._give_up_s, _BACKOFF_S[1]) if given_up else min(fault.backoff.next(), self._give_up_s - tried)
            )
            fault.retry_at = now + pause
            text = f"version {fault.version} cannot be had: {exc}"
            if given_up:
                text += f"; given up after {tried:.0f} s, looking for a newer one"
            self._tell("error", "given-up" if given_up else "failed", text, self._error_fields(exc))
            return normal
        self._tell("error", "failed", str(exc), self._error_fields(exc))
        return normal if isinstance(exc, (HookFailed, EngineFailed)) else self._backoff.next()

    def _error_fields(self, exc: DeltaError) -> dict[str, object]:
        return {"error": type(exc).__name__, "exit_code": exc.exit_code, "goal": self._state.goal}

    def _note_error(self, exc: DeltaError) -> None:
        self._set(
            last_error=f"{type(exc).__name__}: {exc}", error_time=self._pace.date(), failures=self._state.failures + 1
        )

    # ------------------------------------------------------------ one poll

    def _poll(self) -> bool:
        """Look, stage, apply, bring the engine along, run the hook; returns whether a version was applied."""
        self._set(polls=self._state.polls + 1, poll_time=self._pace.date())
        hurry, self._hurry = self._hurry, False
        if hurry and self._fault is not None:
            self._fault.retry_at = self._pace.now()
        while not self._orders.empty():
            self._set(ordered=self._orders.get())
        self._missing = []
        self._log.flush()
        follower, changed = self._open(), False
        if follower is not None:
            goal, ahead = self._look(follower.reader)
            self._set(goal=goal, head=max(follower.reader.history))
            changed = goal is not None and self._reach(follower, goal)
            if ahead is not None:
                self._stage_ahead(follower, ahead)
        self._bring_engine()
        self._run_hook()
        self._say_missing()
        return changed

    def _open(self) -> Follower | None:
        """Return the follower with its folder locked and its history read; None while there is no version."""
        if self._follower is None:
            follower = self._make()
            follower.reader.store = cast(Store, _Felt(self._wrap(follower.reader.store), self._sign))
            self._follower, self._opened = follower, False
        follower, reader = self._follower, self._follower.reader
        target = follower.target
        assert isinstance(target, CheckpointTarget)
        if not reader.history:
            record = read_record(target.current)
            reader.load(since=record.version if record is not None and record.manifest else None)
            if not reader.history:
                self._missing.append(f"{self.url} has no version yet; publish one first")
                return None
        if self._keeper is None and self._lease_store is not None:
            self._keeper = self._make_keeper(self._lease_store, reader.info.store_id)
        if not self._opened:
            with self._cut_off_by_stop():
                held = target.open(reader, reseed=self._reseed)
            self._reseed = self._reseed and held is None
            self._found(reader, held)
            self._opened = True
        return follower

    def _make_keeper(self, store: Store, store_id: str) -> Keeper:
        lease = Lease(
            format=LEVEL, id=self._lease_name or lease_id(self.dest), store_id=store_id, created=0.0, expires=0.0,
            duration_s=0.0, channel=self.channel, mode=self.mode, host=socket.gethostname(), dest=_text(self.dest),
            software=_software(),
        )  # fmt: skip
        return Keeper(store, lease, now=self._pace.date, say=lambda text: self._tell("warning", "lease", text))

    def _found(self, reader: Reader, version: int | None) -> None:
        """Take over what the folder holds when it is opened."""
        entry = None if version is None else reader.history.get(version)
        name = None if entry is None else weight_version(entry)
        self._set(applied=version, weight_version=name)
        holds = "nothing yet" if version is None else f"version {version}"
        self._tell("info", "opened", f"{self.dest} holds {holds}", {"applied": version, "weight_version": name})
        if entry is not None:
            self._log.found(entry, self._pace.date())

    def _look(self, reader: Reader) -> tuple[int | None, int | None]:
        """Return the version to hold and the one to stage ahead; None: not there yet, or none."""
        ordered = self._state.ordered
        offered = self._offered(reader) if ordered is None or self._hold else None
        if ordered is not None:
            reader.refresh()
            goal = self._known(reader, ordered, f"version {ordered} was ordered")
        else:
            goal = self._state.applied if self._hold else offered
        return goal, offered if self._hold else None

    def _offered(self, reader: Reader) -> int | None:
        """Return the version of the channel, or the newest one. One request where there is nothing new."""
        if self.channel is not None:
            return self._channel_version(reader, self.channel)
        reader.refresh()
        newest, applied = max(reader.history), self._state.applied
        if applied is not None and applied > newest:
            raise Unavailable(
                f"{self.url} ends at version {newest}, {self.dest} holds version {applied}: "
                "the newest manifests cannot be seen; trying again"
            )
        return newest

    def _channel_version(self, reader: Reader, name: str) -> int | None:
        if not self._listed:
            self._channel = read_channel(reader.store, name)
            self._listed = True
        else:
            number = -1 if self._channel is None else self._channel.number
            self._channel = newer_setting(reader.store, name, after=number) or self._channel
        if self._channel is None:
            self._missing.append(f"channel {name} of {self.url} names no version yet; deltackpt channel set does")
            return None
        version = self._channel.version
        return self._known(reader, version, f"channel {name} names version {version}")

    def _known(self, reader: Reader, version: int, why: str) -> int | None:
        """Return the version if the store has it."""
        if version < min(reader.history):
            reader.load()
        if version > max(reader.history):
            reader.refresh()
        if version in reader.history:
            return version
        self._missing.append(f"{why}, {self.url} ends at version {max(reader.history)}; waiting for it")
        return None

    def _say_missing(self) -> None:
        text = "; ".join(self._missing) or None
        if text is not None and text != self._waiting_for:
            self._tell("warning", "waiting", text)
        self._waiting_for = text

    # ------------------------------------------------------------ stage and apply

    def _reach(self, follower: Follower, goal: int) -> bool:
        """Bring the folder to a version; returns whether it was changed."""
        if goal == self._state.applied and follower.target.settled:
            if not self._hold:
                self._fault = None
            return False
        if self._left_alone(goal):
            return False
        prepared = self._staged
        if prepared is None or prepared.version != goal:
            self._drop_staged()
            prepared = self._stage(follower, goal)
        self._staged = None
        if prepared is None:
            return False
        self._apply(follower, prepared)
        return True

    def _stage_ahead(self, follower: Follower, version: int) -> None:
        """Stage what will probably be ordered."""
        if version == self._state.applied:
            self._drop_staged()
            self._fault = None
        elif not self._left_alone(version) and (self._staged is None or self._staged.version != version):
            self._drop_staged()
            self._staged = self._stage(follower, version)
            self._tell("info", "staged", f"version {version} staged, waiting for an order", {"version": version})

    def _left_alone(self, version: int) -> bool:
        fault = self._fault
        return fault is not None and fault.version == version and self._pace.now() < fault.retry_at

    def _stage(self, follower: Follower, version: int) -> Prepared | None:
        self._set(staged=version)
        if self._keeper is not None and self._state.applied is None:
            self._live()  # nothing else says yet that the data is needed
        try:
            with self._cut_off_by_stop():
                prepared = follower.prepare(version, reseed=self._reseed)
        except DeltaError as exc:
            self._set(staged=None)
            self._blame(version, exc)
            raise
        except _Stopped:
            self._set(staged=None)
            raise
        self._fault, self._reseed = None, False
        return prepared

    @contextlib.contextmanager
    def _cut_off_by_stop(self) -> Iterator[None]:
        self._reading = True
        try:
            self._require_going()
            yield
        finally:
            self._reading = False

    def _require_going(self) -> None:
        # Raised where bytes are read, by whoever reads them: from a signal handler it could come between a task's
        # start and the note that it must be waited for, and the task would write to memory that is given back.
        if self._stopping and self._reading:
            raise _Stopped

    def _blame(self, version: int, exc: DeltaError) -> None:
        """Note that it is this version that cannot be had, if that is so."""
        passing = isinstance(exc, (IntegrityError, NotFound, FormatError, ChainError)) and not _final(exc)
        if passing and (self._fault is None or self._fault.version != version):
            self._fault = _Fault(version, self._pace.now(), Backoff(self._pace))

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.discard()
            self._staged = None
            self._set(staged=None)

    def _apply(self, follower: Follower, prepared: Prepared) -> None:
        before = self._state
        if self._hook is not None:
            owed = self._hook.owed()
            self._hook.owe(prepared.version, prepared.previous if owed is None else owed.previous)
        try:
            prepared.apply()
        except DeltaError as exc:
            # What the folder holds now is for the next opening to find out.
            self._blame(prepared.version, exc)
            self._set(staged=None)
            follower.close()
            self._follower = None
            raise
        entry, plan = follower.reader.history[prepared.version], prepared.plan
        stage_ms, apply_ms = prepared.times["stage_ms"], prepared.times["apply_ms"]
        self._set(
            applied=prepared.version, weight_version=weight_version(entry), staged=None,
            applied_time=self._pace.date(), applies=before.applies + 1,
            bytes_fetched=before.bytes_fetched + plan.nbytes, stage_ms=stage_ms, apply_ms=apply_ms,
            stage_ms_total=before.stage_ms_total + stage_ms, apply_ms_total=before.apply_ms_total + apply_ms,
        )  # fmt: skip
        fields = applied(prepared, entry, self._pace.date())
        came = "" if prepared.previous is None else f"from version {prepared.previous}, "
        self._tell(
            "info", "applied",
            f"version {prepared.version} applied ({came}{way(plan)}, {plan.nbytes:,} bytes fetched, "
            f"staged {stage_ms:.0f} ms, applied {apply_ms:.0f} ms)", fields,
        )  # fmt: skip
        self._log.add(fields)

    def _bring_engine(self) -> None:
        """Bring the engine to what the folder holds, if it does not say that it has it."""
        version, name = self._state.applied, self._state.weight_version
        if self._engine is None or version is None or name is None or self._stopping:
            return
        try:
            loaded = self._engine.reach(version, name, os.path.realpath(os.path.join(self.dest, "current")))
        except DeltaError:
            self._set(engine_version=None)
            raise
        self._set(engine_version=loaded.weight_version)
        if loaded.pause_ms is not None:
            self._set(pause_ms=loaded.pause_ms)
            self._tell(
                "info", "loaded", f"version {version} {loaded.how} in {self._engine.url}, which stood still for "
                f"{loaded.pause_ms:.0f} ms", {"weight_version": name, "pause_ms": round(loaded.pause_ms, 3)},
            )  # fmt: skip

    def _run_hook(self) -> None:
        """Run the hook if the version that it was last run for is not the one applied."""
        applied = self._state.applied
        if self._hook is None or applied is None:
            return
        owed = self._hook.owed()
        if owed is None or (owed.version != applied and owed.previous == applied):
            self._set(hook_owed=None)
            return
        self._set(hook_owed=applied)
        if self._stopping:
            return
        try:
            self._hook.run(Owed(applied, owed.previous))
        except HookFailed:
            self._set(hook_failures=self._state.hook_failures + 1)
            raise
        self._set(hook_owed=None)

    # ------------------------------------------------------------ signs of life

    def _sign(self) -> None:
        """Note that bytes have come; called by any thread that reads."""
        self._require_going()
        now = self._pace.now()
        if now - self._signed < _SIGN_S or not self._sign_lock.acquire(blocking=False):
            return
        try:
            self._signed = now
            if self._keeper is not None:
                self._keeper.renew()
            # A heartbeat that cannot be written is no fault of the data; the end of the poll says it.
            with contextlib.suppress(StoreError):
                self._beat()
        finally:
            self._sign_lock.release()

    def _live(self) -> None:
        """Say after a poll what is held."""
        with self._sign_lock:
            self._signed = self._pace.now()
            state = self._state
            if self._keeper is not None:
                self._keeper.update(version=state.applied, staged=state.staged, error=state.last_error)
            try:
                self._beat()
            except StoreError as exc:
                self._tell("error", "heartbeat", f"no heartbeat: {exc}", {"error": type(exc).__name__})

    def _beat(self) -> None:
        if self._heart is not None:
            state = self._state
            self._heart.beat({
                "time": self._pace.date(), "applied": state.applied, "goal": state.goal, "head": state.head,
                "error": state.last_error,
            })  # fmt: skip

    def _tell(self, level: Level, name: str, message: str, fields: Mapping[str, object] | None = None) -> None:
        self._say(Event(level, name, message, fields or {}))

    def _set(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)


def _mode_of(dest: str) -> Mode | None:
    """Return the mode of a folder for which none was named, None for what it was made with."""
    try:
        names = [name for name in os.listdir(dest) if name != OWN]
    except OSError:
        names = []
    # Also where the first switch was interrupted before there was a link.
    return "switch" if all(re.fullmatch(r"v\d+(\..*)?", name) for name in names) else None


def _final(exc: DeltaError) -> bool:
    """Say whether no later poll can mend it. A chain with a hole where data cannot be seen may be whole again."""
    if isinstance(exc, ChainError):
        return not isinstance(exc.__cause__, NotFound)
    return isinstance(exc, (ConfigError, Poisoned, UnsupportedFormat, SignatureError))


def _text(path: str) -> str:
    return path.encode("utf-8", "backslashreplace").decode()


def _software() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"deltackpt {version('deltackpt')}"
    except PackageNotFoundError:
        return "deltackpt"
