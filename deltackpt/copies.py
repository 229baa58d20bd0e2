"""Full copies of what ranks hold: a piece of each part, put by who holds it, and files, each put together by one rank.

No rank has more than some 80 MiB of what others hold. A file has one writer, so that any store will do; the price is
that every byte is put twice. `AnchorTry` makes an anchor in this way, beside what is published next.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from deltackpt import backend
from deltackpt.anchor import Source, Weights, assembled_anchor, put_assembled, put_piece, read_piece
from deltackpt.board import Board, Forgotten, Group, Round, Trouble, Watch, Within
from deltackpt.chain import Entry
from deltackpt.checkpoint import Checkpoint, Folder, addresses, mapped
from deltackpt.digest import U64
from deltackpt.errors import ConfigError, DeltaError, Unavailable
from deltackpt.ground import Ground
from deltackpt.layout import BITS
from deltackpt.manifest import Anchor, AnchorFile, Shard, anchor_key, data_prefix, encode
from deltackpt.partition import Box
from deltackpt.reader import Reader
from deltackpt.store import LocalStore, Store
from deltackpt.writer import put_once

_PUTS = 4
"""Objects that one rank puts at a time."""

_json = msgspec.json
_log = logging.getLogger(__name__)


class Superseded(Exception):
    """What a rank is at work on was decided without it."""


class Puts:
    """Puts under way in threads. They are left alone, and not waited for, where others have done their work.

    step: called when they get on; look: called else, raises Superseded where others have.
    """

    def __init__(self, step: Callable[[], None], look: Callable[[], None]) -> None:
        self.begun: list[Future[Shard | None]] = []
        self._step, self._look, self._steps = step, look, 0

    def begin(self, work: Callable[[], Shard | None]) -> None:
        """Begin a put; waits while too many are under way."""
        while sum(not put.done() for put in self.begun) >= _PUTS:
            self._wait()
        future: Future[Shard | None] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as exc:  # handed to the thread that asks
                future.set_exception(exc)

        self.begun.append(future)
        # A daemon: one that hangs must not keep the process from its end.
        threading.Thread(target=run, name="deltackpt-put", daemon=True).start()

    def step(self) -> None:
        """Say, from a put, that it gets on."""
        self._steps += 1

    def _wait(self) -> None:
        before = self._steps
        done, _ = wait([put for put in self.begun if not put.done()], 0.1, FIRST_COMPLETED)
        if done or self._steps != before:
            self._step()
        else:
            self._look()

    def end(self) -> Iterator[Shard]:
        """Wait for all of them, and yield what they return."""
        while not all(put.done() for put in self.begun):
            self._wait()
        for put in self.begun:
            if (shard := put.result()) is not None:
                yield shard


# ---------------------------------------------------------------- one copy


@dataclass(frozen=True)
class Frozen:
    """Where the tensors are that no rank holds. keys: of each file; fingerprints: of the tensors of a part."""

    store: Store
    keys: Sequence[str]
    checkpoint: Checkpoint
    fingerprints: Callable[[int], U64]


def frozen_in_folder(folder: Folder, ground: Ground, threads: int | None) -> Frozen:
    """Return those of a serving checkpoint, whose layout is that of the group."""
    names = [shard.name for shard in folder.checkpoint.placement.files]

    def fingerprints(part: int) -> U64:
        with mapped([folder.file_path(n) for n in range(len(names))]) as maps:
            where = addresses(folder.checkpoint, maps)[ground.tensor(part)]
            return backend.part_fingerprints(ground.partition, part, where, threads=threads)

    return Frozen(LocalStore(folder.path), names, folder.checkpoint, fingerprints)


def frozen_in_store(store: Store, ground: Ground) -> Frozen:
    """Return those of the newest anchor. Nobody changes them; what did before, the fingerprint of the state finds."""
    reader = Reader(store)
    reader.load()
    anchors = [v for v in reader.anchors() if reader.manifest(v).layout == ground.layout.digest]
    if not anchors:
        raise ConfigError("tensors that no rank holds are in no anchor of the same layout")
    source = reader.anchor(max(anchors))
    return Frozen(source.store, source.keys, source.checkpoint, lambda part: source.fingerprints[ground.tensor(part)])


@dataclass
class Copy:
    """A full copy that the ranks of a round make, as one of them works on it.

    prefix: where the files go; frozen: asked only where a part has no holder; share: told of every object that other
    ranks may put too, and rely on. Pieces are named by part.
    """

    store: Store
    round: Round
    ground: Ground
    roster: Sequence[int]
    prefix: str
    frozen: Callable[[], Frozen]
    share: Callable[[str], None]
    threads: int | None
    _files: dict[int, AnchorFile] = field(default_factory=dict)
    _found: Frozen | None = None
    _where: dict[int, list[Source]] | None = None

    def put_piece(self, part: int, key: str, step: Callable[[], None], look: Callable[[], None]) -> int:
        """Put all bytes of a part that this rank holds; returns what they add to the fingerprint of the state."""
        table = self.ground.fingerprints(part, self.ground.mine[part].base)
        puts, boxes = Puts(step, look), partial(self.ground.base_bytes, part)
        puts.begin(lambda: put_piece(self.store, key, boxes, table, puts.step))
        list(puts.end())
        return self.ground.weighted(part, table)

    def put_files(self, pieces: Mapping[int, str]) -> None:
        """Put the files whose turn it is to be put by this rank, when all pieces are there."""
        if not self._complete(pieces):
            return
        for number, shard in enumerate(self.ground.placement.files):
            if self._file_done(number):
                continue
            turn = number % len(self.roster)
            if not self.round.turn((*self.roster[turn:], *self.roster[:turn])):
                continue
            self.share(f"{self.prefix}/{shard.name}")
            try:
                sources = self._sources(pieces)
                file = put_assembled(self.store, self.prefix, self.ground.layout, shard, sources, self.round.step)
            except DeltaError as exc:
                self.round.fail(Trouble.of(exc))
                return
            self.round.create(f"file/{number}", _json.encode(file))

    def files_done(self) -> bool:
        """Whether all files are there."""
        return all([self._file_done(number) for number in range(len(self.ground.placement.files))])

    def finish(self, version: int, pieces: Mapping[int, str]) -> Anchor:
        """Put the other files of a copy whose files are there; returns its record, which is not put yet."""
        ground = self.ground
        table = np.zeros(len(ground.layout.names), np.uint64)
        for part, holders in enumerate(ground.holders):
            found = self._piece_table(part, pieces[part]) if holders else self._frozen().fingerprints(part)
            np.add.at(table, ground.tensor(part), found)
        files = tuple(self._files[n] for n in range(len(ground.placement.files)))
        return assembled_anchor(
            self.store, ground.writer.reader, self.prefix, weights_of(ground), version, table, files, self.share
        )

    def _complete(self, pieces: Mapping[int, str]) -> bool:
        return all(part in pieces for part, holders in enumerate(self.ground.holders) if holders)

    def _file_done(self, number: int) -> bool:
        if number not in self._files and (raw := self.round.get(f"file/{number}")) is not None:
            self._files[number] = _json.decode(raw, type=AnchorFile)
        return number in self._files

    def _frozen(self) -> Frozen:
        if self._found is None:
            self._found = self.frozen()
        return self._found

    def _sources(self, pieces: Mapping[int, str]) -> dict[int, list[Source]]:
        """Return where the boxes of every tensor lie."""
        if self._where is not None:
            return self._where
        ground, found = self.ground, dict[int, list[Source]]()
        for part, boxes in enumerate(ground.boxes):
            offset, end = 0, self._nbytes(part)
            for t, box in boxes:
                if part in pieces:
                    source = Source(self.store, pieces[part], offset, box, end)
                    offset += self._box_nbytes(t, box)
                else:
                    frozen, checkpoint = self._frozen(), self._frozen().checkpoint
                    file = int(checkpoint.file[t])
                    where = frozen.keys[file], int(checkpoint.offset[t])
                    source = Source(frozen.store, *where, box, checkpoint.nbytes[file])
                found.setdefault(t, []).append(source)
        self._where = found
        return found

    def _box_nbytes(self, t: int, box: Box) -> int:
        return math.prod(end - begin for begin, end in box) * BITS[self.ground.layout.dtypes[t]] // 8

    def _nbytes(self, part: int) -> int:
        return sum(self._box_nbytes(t, box) for t, box in self.ground.boxes[part])

    def _piece_table(self, part: int, key: str) -> U64:
        return read_piece(self.store, key, self._nbytes(part), len(self.ground.boxes[part]))


def weights_of(ground: Ground) -> Weights:
    """Describe the weights of a group, which are in no one's memory."""
    return Weights(ground.layout, ground.placement, ground.terms.side_files, np.empty(0, np.uint64))


# ---------------------------------------------------------------- an anchor, beside what is published next


class _Verdict(msgspec.Struct, frozen=True):
    """The record of an anchor whose files are there, or why there is none; unknown: whether its record is there."""

    record: bytes = b""
    why: str = ""
    unknown: bool = False


class AnchorTry:
    """An attempt of a group at an anchor of its base, which is version `head`; begins at once, in a thread.

    A round of its own, so that nobody waits for it who publishes, with one exception: the base must not change before
    `let_go` has returned. Like a publish it is decided once, by the record or by giving up, before the record is put;
    so no record can ever name files that were taken back. A rank that is out before its pieces are put, or that
    `let_go` gave up, ends it for all: an anchor can be made of a later version as well.
    """

    def __init__(
        self,
        store: Store,
        group: Group,
        board: Board,
        ground: Ground,
        head: Entry,
        attempt: str,
        roster: Sequence[int],
        before: AnchorTry | None,
    ) -> None:
        within = Within(board, f"anchor-{attempt}")
        self._lease_s, self._before, self._rank = group.lease_s, before, group.rank
        self.round = Round(Watch(Group(group.rank, group.size, within, group.lease_s), within), 0)
        self._ground, self._head, self._roster = ground, head, roster
        self._pieces: dict[int, str] = {}
        self._own: list[str] = []
        self._files: list[str] = []
        prefix = data_prefix(head.manifest.version, f"anchor-{attempt}")
        frozen = partial(frozen_in_store, store, ground)
        # One thread: the trainer wants the others.
        self._copy = Copy(store, self.round, ground, roster, prefix, frozen, self._files.append, 1)
        self._steps, self._lock, self._put, self._given_up = 0, threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="deltackpt-anchor", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether this rank knows how it ended, or can no longer find out."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end; bounded by leases, as all that it waits for is."""
        self._thread.join()

    def let_go(self, step: Callable[[], None]) -> None:
        """Wait until the base is no longer read; a put that stands still for the length of the lease is given up."""
        seen, since = self._steps, time.monotonic()
        while not self._put.wait(0.01):
            if self._steps != seen:
                seen, since = self._steps, time.monotonic()
                step()
            elif time.monotonic() - since >= self._lease_s:
                with self._lock:
                    self._given_up = True
                return

    def _run(self) -> None:
        version = self._head.manifest.version
        try:
            if self._before is not None:
                self._before.join()
                self._before._forget()
                self._before = None
            if why := self._work():
                _log.warning("version %d is committed, but an anchor that is due was not made: %s", version, why)
        except Forgotten:
            with contextlib.suppress(DeltaError):
                self._forget()  # what was claimed since would stay
        except Exception as exc:
            _log.warning("version %d is committed; what became of an anchor that is due is not known: %s", version, exc)
        finally:
            self._put.set()

    def _forget(self) -> None:
        """Take what this rank has set off the board."""
        self.round.forget()
        self.round.board.drop([f"steps/{self._rank}"])

    def _work(self) -> str:
        """Go through all stages; returns why there is no anchor, if there is none."""
        try:
            with contextlib.suppress(Superseded):
                self._put_pieces()
        except DeltaError as exc:
            self.round.fail(Trouble.of(exc))
        self._put.set()
        raw = self.round.decided("verdict", self._roster, self._decide, idle=self._put_files)
        verdict = _json.decode(raw, type=_Verdict)
        if verdict.record:
            put = self.round.decided("done", self._roster, lambda: self._put_record(verdict.record))
            verdict = _json.decode(put, type=_Verdict)
        self._clean(files=not verdict.record and not verdict.unknown)
        return verdict.why

    def _put_pieces(self) -> None:
        """Put the pieces of the parts that are this rank's to put, and tell them, unless the base has changed."""
        for part in self._ground.mine:
            if self._owner(part) != self._rank:
                continue
            key = f"{data_prefix(self._head.manifest.version, f'anchor-{secrets.token_hex(8)}')}/piece-{part:05d}"
            self._own.append(key)
            self._copy.put_piece(part, key, self._step, self._look)
            with self._lock:
                self._require_base()
                self.round.create(f"part/{part}", key.encode())

    def _owner(self, part: int) -> int:
        return next(rank for rank in self._ground.holders[part] if rank in self._roster)

    def _step(self) -> None:
        self._steps += 1
        self.round.step()

    def _look(self) -> None:
        self._require_base()
        if self.round.get("verdict") is not None:
            raise Superseded

    def _require_base(self) -> None:
        if self._given_up:
            raise Unavailable(f"putting a piece stood still for {self._lease_s:g} s, and the next version is there")

    def _told(self) -> bool:
        """Whether all pieces are there; looks for those that are."""
        held = [part for part, holders in enumerate(self._ground.holders) if holders]
        for part in held:
            if part not in self._pieces and (raw := self.round.get(f"part/{part}")) is not None:
                self._pieces[part] = raw.decode()
        return len(self._pieces) == len(held)

    def _put_files(self) -> None:
        if self._told():
            self._copy.put_files(self._pieces)

    def _decide(self) -> bytes | None:
        if not self._told():
            for part, holders in enumerate(self._ground.holders):
                if holders and part not in self._pieces and self.round.lost((self._owner(part),)):
                    return self._dropped(self._owner(part))
            return None
        if not self._copy.files_done():
            return self._dropped(self._roster[0]) if self.round.lost(self._roster) else None
        try:
            anchor = self._copy.finish(self._head.manifest.version, self._pieces)
        except DeltaError as exc:
            return _json.encode(_Verdict(why=str(exc)))
        if anchor.state != self._head.manifest.state:
            return _json.encode(_Verdict(why="the pieces do not add up to the version; make one by deltackpt anchor"))
        return _json.encode(_Verdict(encode(anchor)))

    def _dropped(self, rank: int) -> bytes:
        trouble = self.round.failed(rank)
        found = trouble.text if trouble else f"it made no progress for {self._lease_s:g} s"
        return _json.encode(_Verdict(why=f"rank {rank}: {found}"))

    def _put_record(self, record: bytes) -> bytes:
        try:
            found = put_once(self._copy.store, anchor_key(self._head.manifest.version), record)
        except DeltaError as exc:
            return _json.encode(_Verdict(why=str(exc), unknown=True))
        return _json.encode(_Verdict(record) if found == record else _Verdict(why="somebody else made one"))

    def _clean(self, *, files: bool) -> None:
        """Remove what nothing needs any more: what this rank has put, and, by one rank, what the dead ones have."""
        keys = [*self._own, *(self._files if files else ())]
        if self.round.leads(self._roster):
            keys += self._pieces.values()
            keys += [f"{self._copy.prefix}/{s.name}" for s in self._ground.placement.files] if files else []
        for key in dict.fromkeys(keys):
            with contextlib.suppress(DeltaError):
                self._copy.store.delete(key)
