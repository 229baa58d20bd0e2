"""Replica: the ranks of one sampler. All go to a version, or all stay at the one before. Moves no weights itself.

Each rank follows the store with a target of its own. They meet on a board, in rounds. The first rank that wants a
version writes it down as the goal of the round; all stage it and say so; when all have, all apply it and say so; and
whoever sees first how it went writes down how the round ended: once, so that there are no two opinions. A rank that has
applied and reads that the round failed takes it back, with the columns that are still staged.

A rank shows that it lives by a thread that writes a number every quarter of the group's lease. No wait is longer than
that lease, for a rank that is dead or stopped, or than a limit, for one that lives and does not come. A rank that is
started again takes its place in the next round. While the board cannot be reached nothing can be decided.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec
import numpy as np

from deltackpt.board import Board, Group
from deltackpt.digest import U64, fp_hex, sha256
from deltackpt.errors import ChainError, ConfigError, Fenced, RankFailed, Unavailable
from deltackpt.follow import POLL_S, Follower, Prepared, Staging, Target
from deltackpt.reader import Reader

STAGE_S, APPLY_S = 600.0, 60.0
"""How long a rank that lives is waited for: while sampling goes on, and while it stands still."""
_BEATS = 4


class Member(Target, Protocol):
    """The target of a rank. What it stages has `undo` too: see Reversible."""

    def boxes(self) -> U64:
        """Return a number for each part of the model that is held; equal parts have equal numbers on all ranks."""

    def sums(self, reader: Reader) -> U64:
        """Return what each of the boxes adds to the state fingerprint of the version that is held."""


class Reversible(Staging, Protocol):
    """A staged version that can be taken back after its apply."""

    def undo(self) -> int | None:
        """Take the apply back; returns the version that the target holds then, None if it has to be reseeded."""


class _Said(msgspec.Struct, frozen=True):
    """What a rank says in a round. who: of all that ever took its place; why: empty if it went well.

    boxes: digest of the list of its boxes; shares: sum of each class of boxes, see `shares`.
    """

    who: str
    why: str = ""
    boxes: str = ""
    shares: dict[str, str] = {}


class _End(msgspec.Struct, frozen=True):
    """How a round ended. why: empty if all ranks are at its goal."""

    why: str = ""


# ---------------------------------------------------------------- the fingerprint of a group


def classes(held: Sequence[U64]) -> list[U64]:
    """Return for each rank and box a number that is equal for boxes which the same ranks hold."""
    everything, place = np.unique(np.concatenate(held), return_inverse=True)
    marks = np.random.default_rng(0).integers(1, 1 << 63, len(held), np.uint64)
    holders = np.zeros(len(everything), np.uint64)
    ends = np.cumsum([len(h) for h in held])
    ranks = [place[end - len(h) : end] for h, end in zip(held, ends, strict=True)]
    for mark, mine in zip(marks, ranks, strict=True):
        np.add.at(holders, np.unique(mine), mark)
    return [holders[mine] for mine in ranks]


def shares(classes_held: U64, sums: U64) -> dict[str, str]:
    """Return the sum, mod 2^64, of the boxes of each class that a rank holds."""
    kinds, place = np.unique(classes_held, return_inverse=True)
    totals = np.zeros(len(kinds), np.uint64)
    np.add.at(totals, place, sums)
    return {fp_hex(int(kind)): fp_hex(int(total)) for kind, total in zip(kinds, totals, strict=True)}


def disagreement(said: Sequence[Mapping[str, str]], state: str) -> str:
    """Return what is wrong with the shares of all ranks, by rank; empty if they are together the state.

    Boxes that several ranks hold count once, and have to be the same there.
    """
    total = 0
    for kind in sorted({kind for one in said for kind in one}):
        found: dict[str, list[int]] = {}
        for rank, one in enumerate(said):
            if kind in one:
                found.setdefault(one[kind], []).append(rank)
        if len(found) > 1:
            most = max(map(len, found.values()))
            common = [value for value, ranks in found.items() if len(ranks) == most]
            odd = [r for value, ranks in found.items() for r in ranks if len(common) > 1 or value != common[0]]
            return f"rank {', '.join(map(str, sorted(odd)))}: other weights than on the ranks that hold the same part"
        total += int(next(iter(found)), 16)
    if fp_hex(total) != state:
        return (
            f"ranks 0 to {len(said) - 1}: their parts make the state {fp_hex(total)}, the version's is {state}; "
            "they hold other weights than they should, or not every part of the model"
        )
    return ""


# ---------------------------------------------------------------- rounds


class Replica:
    """One rank of a sampler whose ranks decide together. Not for use by several threads at once.

    follower: of this rank, with a TensorTarget or SliceTarget; it stays the caller's. group: rank, number of ranks,
    board and lease. stage_s, apply_s: how long a rank that lives is waited for, before the apply and in it. To be
    closed: until then a thread says that this rank lives.
    """

    def __init__(
        self,
        follower: Follower,
        group: Group,
        *,
        stage_s: float = STAGE_S,
        apply_s: float = APPLY_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not hasattr(follower.target, "boxes"):
            raise ConfigError(
                f"a {type(follower.target).__name__} cannot be taken back; expected a TensorTarget or a SliceTarget"
            )
        self.follower, self.group = follower, group
        self._board: Board = group.board
        self._limits = {"staged": stage_s, "applied": apply_s}
        self._clock, self._sleep = clock, sleep
        self._who = secrets.token_hex(8)
        self._joint: Joint | None = None
        self._boxes: dict[str, U64] = {}
        self._heard: dict[int, _Said] = {}
        self._board.put(f"replica/member/{group.rank}", self._who.encode())
        self._round = int(self._board.get("replica/round") or 0)
        self._closed = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="deltackpt-pulse", daemon=True)
        self._pulse.start()

    def close(self) -> None:
        """End the thread; for the others this rank is dead when its lease has passed."""
        self._closed.set()
        self._pulse.join(self.group.lease_s)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat(self) -> None:
        count = 0
        while True:
            # Who cannot reach the board is dead for the others; they decide without it.
            with suppress(Unavailable):
                self._board.put(f"replica/beat/{self.group.rank}", f"{self._who} {count}".encode())
            count += 1
            if self._closed.wait(self.group.lease_s / _BEATS):
                return

    def prepare(self, version: int | None = None, *, wait_s: float | None = None) -> Joint | None:
        """Stage `version`, or the newest one, on all ranks; returns when all have, and no weights were touched.

        Every rank has to call this, again and again; the first one that wants something decides what. Returns None when
        no rank wants anything within wait_s. Raises RankFailed, on all ranks, when one of them failed: call again to
        try again; Fenced when another process has taken the place of this rank.
        """
        deadline = self._clock() + (wait_s or 0.0)
        self._settle()
        while True:
            self._require_place()
            while self._read("end", _End) is not None:
                self._next()
            joint = self._join(version)
            if joint is not None:
                return joint
            if self._clock() >= deadline:
                return None
            self._sleep(max(0.0, min(max(self._board.poll_s, POLL_S / 10), deadline - self._clock())))

    def _settle(self) -> None:
        """Bring to its end what an earlier call left undecided."""
        joint = self._joint
        if joint is not None and joint.applied:
            # If the others have decided already, that stands.
            joint.finish(self._end(f"rank {self.group.rank}: it was interrupted while it waited for the decision"))
        elif joint is not None:
            joint.discard()

    def _require_place(self) -> None:
        rank = self.group.rank
        if self._board.get(f"replica/member/{rank}") != self._who.encode():
            raise Fenced(f"another process has taken the place of rank {rank}; end this one")

    # ------------------------------------------------------------ the board

    def _key(self, what: str) -> str:
        return f"replica/{self._round}/{what}"

    def _read(self, what: str, kind: type[_End]) -> _End | None:
        raw = self._board.get(self._key(what))
        return None if raw is None else msgspec.json.decode(raw, type=kind)

    def _said(self, phase: str, rank: int) -> _Said | None:
        raw = self._board.get(self._key(f"{phase}/{rank}"))
        return None if raw is None else msgspec.json.decode(raw, type=_Said)

    def _say(self, phase: str, said: _Said) -> None:
        """Say how a phase went here. Raises RankFailed if an earlier process of this rank has said something."""
        raw = self._board.create(self._key(f"{phase}/{self.group.rank}"), msgspec.json.encode(said))
        if msgspec.json.decode(raw, type=_Said).who != self._who:
            self._require_place()
            raise self._failed(self._end(f"rank {self.group.rank}: it was started again in the middle of a round"))

    def _end(self, why: str) -> _End:
        """Write down how the round ended, unless somebody has; returns what counts."""
        raw = self._board.create(self._key("end"), msgspec.json.encode(_End(why)))
        return msgspec.json.decode(raw, type=_End)

    def _next(self) -> None:
        """Go on to the next round. What this rank said in the last one is kept: others may still ask for it."""
        rank, before = self.group.rank, self._round - 1
        if before >= 0:
            whose = [f"replica/{before}/{phase}/{rank}" for phase in ("staged", "applied")]
            self._board.drop([*whose, f"replica/{before}/goal"] if rank == 0 else whose)
        self._round += 1
        # A hint for ranks that start again: the ends of all rounds stay, so that they find their way from any.
        self._board.put("replica/round", str(self._round).encode())

    def _failed(self, end: _End) -> RankFailed:
        """Return the error that the end of a round is, and go on to the next one."""
        why = end.why or f"rank {self.group.rank}: it was late, the others went on; call again"
        self._joint = None
        self._next()
        return RankFailed(why)

    # ------------------------------------------------------------ staging

    def _join(self, version: int | None) -> Joint | None:
        """Stage what the round is for, or begin it; None: there is nothing to do."""
        raw = self._board.get(self._key("goal"))
        try:
            prepared = self.follower.prepare(version) if raw is None else self._staged(int(raw))
        except Unavailable as exc:
            if raw is None:
                raise
            raise self._give_up("staged", exc) from exc
        except Exception as exc:
            reader = self.follower.reader
            want = reader.head.manifest.version if version is None and reader.head is not None else version
            if raw is None and want not in reader.history:
                raise
            if raw is None:
                self._board.create(self._key("goal"), str(want).encode())
            raise self._give_up("staged", exc) from exc
        if raw is None:
            if prepared is None:
                return None
            raw = self._board.create(self._key("goal"), str(prepared.version).encode())
            if int(raw) != prepared.version:
                prepared.discard()
                return None  # somebody else was first: stage that, when the round is looked at again
        return self._agree(int(raw), prepared)

    def _staged(self, goal: int) -> Prepared | None:
        """Stage the goal of a round, which another rank may have seen earlier."""
        until = self._clock() + self.group.lease_s
        while True:
            try:
                return self.follower.prepare(goal)
            except ChainError:
                head = self.follower.reader.head
                if head is None or head.manifest.version >= goal or self._clock() > until:
                    raise
            self._sleep(max(self._board.poll_s, POLL_S / 10))

    def _give_up(self, phase: str, exc: Exception) -> RankFailed:
        """Tell the others that this rank failed; returns what to raise here."""
        why = f"rank {self.group.rank}: {str(exc) or type(exc).__name__}"
        self._say(phase, _Said(self._who, why))
        return self._failed(self._end(why))

    def _agree(self, goal: int, prepared: Prepared | None) -> Joint:
        """Say that the goal is staged here, and wait until it is everywhere."""
        self._joint = joint = Joint(self, goal, prepared)
        mine = cast(Member, self.follower.target).boxes().astype("<u8")
        name = sha256(mine.tobytes())
        if name not in self._boxes:
            self._board.create(f"replica/boxes/{name}", mine.tobytes())
        self._say("staged", _Said(self._who, boxes=name))
        end = self._wait("staged", goal)
        if end is not None:
            joint.finish(end)
        held = [self._held(self._heard[rank].boxes) for rank in range(self.group.size)]
        joint.classes = classes(held)[self.group.rank]
        return joint

    def _held(self, name: str) -> U64:
        if name not in self._boxes:
            raw = self._board.get(f"replica/boxes/{name}")
            assert raw is not None
            self._boxes[name] = np.frombuffer(raw, "<u8").astype(np.uint64)
        return self._boxes[name]

    # ------------------------------------------------------------ waiting

    def _wait(self, phase: str, goal: int) -> _End | None:
        """Wait until all ranks have said how a phase went, or the round has ended.

        After `staged` None says that all have staged; after `applied` there always is an end.
        """
        limit_s = self._limits[phase]
        until = self._clock() + limit_s
        beats = _Beats(self._board, self.group, self._clock)
        said: dict[int, _Said] = {}
        self._heard = said
        while True:
            end = self._read("end", _End)
            if end is not None:
                return end
            for rank in set(range(self.group.size)) - said.keys():
                found = self._said(phase, rank)
                if found is not None:
                    said[rank] = found
            failed = next((one.why for _, one in sorted(said.items()) if one.why), "")
            if failed:
                return self._end(failed)
            missing = sorted(set(range(self.group.size)) - said.keys())
            if not missing:
                return None if phase == "staged" else self._end(self._judge(goal, said))
            for rank in beats.dead(missing):
                return self._end(f"rank {rank}: no sign of life for {self.group.lease_s:g} s; start it again")
            if self._clock() > until:
                return self._end(f"rank {missing[0]}: it lives, but has not {phase} version {goal} in {limit_s:g} s")
            self._sleep(self._board.poll_s)

    def _judge(self, goal: int, said: Mapping[int, _Said]) -> str:
        state = self.follower.reader.manifest(goal).state
        return disagreement([said[rank].shares for rank in range(self.group.size)], state)


class _Beats:
    """Who lives: seen by this process's own clock, since it began to look."""

    def __init__(self, board: Board, group: Group, clock: Callable[[], float]) -> None:
        self._board, self._lease_s, self._clock = board, group.lease_s, clock
        self._seen: dict[int, tuple[bytes | None, float]] = {}
        self._next = clock()

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return those of the ranks that have shown nothing new for a lease."""
        now = self._clock()
        if now < self._next:
            return []
        self._next = now + self._lease_s / (2 * _BEATS)
        for rank in ranks:
            beat = self._board.get(f"replica/beat/{rank}")
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now)
        return [rank for rank in ranks if now - self._seen[rank][1] > self._lease_s]


@dataclass
class Joint:
    """A version that every rank has staged. prepared: None where it is held already."""

    replica: Replica
    goal: int
    prepared: Prepared | None
    classes: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    applied: bool = False

    @property
    def version(self) -> int:
        """The version that all ranks go to."""
        return self.goal

    def apply(self) -> int:
        """Apply on all ranks, or on none; returns the version. Sampling stands still until all have decided.

        Raises RankFailed where a rank failed: what was done here is undone, and the weights are those from before.
        Poisoned, if that failed too. Unavailable where the board is lost before the decision is known: the next
        `prepare` brings it to its end.
        """
        replica, target = self.replica, cast(Member, self.replica.follower.target)
        end = replica._read("end", _End)
        if end is None:
            try:
                if self.prepared is not None:
                    self.prepared.apply()
            except Exception as exc:
                raise replica._give_up("applied", exc) from exc
            self.applied = True
            said = shares(self.classes, target.sums(replica.follower.reader))
            try:
                replica._say("applied", _Said(replica._who, shares=said))
            except RankFailed as exc:
                self._take_back()
                raise exc
            end = replica._wait("applied", self.goal)
        self.finish(end)
        return self.goal

    def discard(self) -> None:
        """Forget the version; no rank goes to it."""
        replica = self.replica
        if not self.applied and replica._joint is self:
            end = replica._end(f"rank {replica.group.rank}: it did not apply version {self.goal}")
            with suppress(RankFailed):
                self.finish(end)

    def finish(self, end: _End | None) -> None:
        """Do as the round ended. Raises RankFailed unless all ranks are at the version."""
        assert end is not None
        if not end.why and self.applied:
            self.replica._joint = None
            self.replica._next()
            return
        if self.applied:
            self._take_back()
        elif self.prepared is not None:
            self.prepared.discard()
        raise self.replica._failed(end)

    def _take_back(self) -> None:
        self.applied = False
        if self.prepared is not None:
            cast(Reversible, self.prepared.staging).undo()
