"""Publishing by many ranks: each publishes the part that it holds, one commits. Never moves weights between them.

A publish is a round (`board.Round`): ranks arrive, one plans, each does its parts, one decides, one commits. Whatever
is decided is created once, and the decision to commit is the manifest itself, so that any rank can put its bytes.
Longer than most modules: the stages of a round share what they know of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import zstandard

from deltackpt import backend
from deltackpt.anchor import Source, Weights, assembled_draft, put_assembled, put_piece, read_piece
from deltackpt.board import Counted, Forgotten, Group, Round, StoreBoard, Trouble, Watch, sweep_boards
from deltackpt.chain import Entry
from deltackpt.checkpoint import addresses, default_placement, mapped, open_folder
from deltackpt.digest import U64, sha256, state_fingerprint
from deltackpt.errors import ConfigError, DeltaError, NotFound, Unavailable
from deltackpt.holding import Held, hold
from deltackpt.kernels import U8, view
from deltackpt.layout import BITS, Layout, Segments
from deltackpt.manifest import (
    MAX_MANIFEST,
    AnchorFile,
    Manifest,
    Placement,
    Shard,
    SideFile,
    data_prefix,
    encode,
    manifest_key,
)
from deltackpt.ownership import Inventory, Part, divide, join_layout
from deltackpt.partition import Box, Partition
from deltackpt.shard import EncodedGroup, assemble
from deltackpt.store import LocalStore, Store, open_store, read
from deltackpt.tensors import restore_into
from deltackpt.writer import SHARD_BYTES, Draft, Grant, Writer

if TYPE_CHECKING:
    from deltackpt.holding import Pieces

_PUTS = 4
"""Shards that one rank puts at a time."""
_KEPT = 4
"""Rounds whose values stay on the board: a rank that slept for longer has to start again."""

_json = msgspec.json


# ---------------------------------------------------------------- what ranks tell each other


class _Arrival(msgspec.Struct, frozen=True):
    """A rank is here. inventory: digest of what it holds."""

    inventory: str
    step: int | None


class _Terms(msgspec.Struct, frozen=True):
    """What holds for all rounds of a group, by digest where it is an object of the store.

    sets: ranks that hold the same bytes; parts: of each its set and its owner, none of a part that is frozen.
    """

    grant: Grant
    layout: str
    placement: str
    partition: str
    side_files: tuple[SideFile, ...]
    sets: list[tuple[int, ...]]
    parts: list[tuple[int, int] | None]


class _Plan(msgspec.Struct, frozen=True):
    """Who takes part, in which version, and how. settled: whether the commit that was left open was made.

    attempt: of a full copy.
    """

    roster: tuple[int, ...] = ()
    trouble: Trouble | None = None
    settled: bool | None = None
    terms: _Terms | None = None
    kind: Literal["full", "adopt", "delta"] = "delta"
    attempt: str = ""
    version: int = 0


class _PartDone(msgspec.Struct, frozen=True):
    """A part was put. fingerprint: weighted sum of its changes, or of all its bytes in a full copy (key: of these)."""

    rank: int
    fingerprint: int
    shards: tuple[Shard, ...] = ()
    groups: tuple[int, ...] = ()
    changed: int = 0
    changed_bytes: int = 0
    times: dict[str, float] = {}
    key: str = ""


class _Decision(msgspec.Struct, frozen=True):
    """The manifest to commit, or why there is none. fingerprints: of the parts, as committed.

    doubt: a part, and two ranks that hold it differently.
    """

    manifest: bytes = b""
    trouble: Trouble | None = None
    fingerprints: tuple[int, ...] = ()
    doubt: tuple[int, int, int] | None = None


class _Adopt(msgspec.Struct, frozen=True):
    """What to do with a store that has versions: a decision, or else the base is rebuilt from the head."""

    decision: _Decision | None


class _Done(msgspec.Struct, frozen=True):
    """The manifest was put, unless there is trouble; unknown: whether it was is not known."""

    trouble: Trouble | None = None
    unknown: bool = False


# ---------------------------------------------------------------- memory of one rank


@dataclass(frozen=True)
class _Place:
    """Where a box of a part lies in what the rank holds. cut: how to take it out where it does not lie side by side."""

    held: int
    offset: int
    nbytes: int
    shape: tuple[int, ...] = ()
    cut: tuple[slice, ...] | None = None


def _place(layout: Layout, t: int, box: Box, held: int, of: Box) -> _Place:
    bits, width = BITS[layout.dtypes[t]], int(layout.width[t])
    shape = [end - begin for begin, end in of]
    at = [begin - low for (begin, _), (low, _) in zip(box, of, strict=True)]
    size = [end - begin for begin, end in box]
    nbytes = int(np.prod(size, dtype=np.int64)) * bits // 8
    full = [a == b for a, b in zip(size, shape, strict=True)]
    first = next((d for d, n in enumerate(size) if n > 1), len(size))
    if all(full[first + 1 :]):
        offset = 0
        for index, n in zip(at, shape, strict=True):
            offset = offset * n + index
        return _Place(held, offset * bits // 8, nbytes)
    units = 8 * width
    shape[-1], at[-1], size[-1] = (n * bits // units for n in (shape[-1], at[-1], size[-1]))
    return _Place(held, 0, nbytes, tuple(shape), tuple(slice(a, a + n) for a, n in zip(at, size, strict=True)))


@dataclass
class _Mine:
    """A part that this rank holds. base: addresses of its boxes; new: of the new ones, in this round."""

    number: int
    places: list[_Place]
    base: U64
    new: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    encoded: list[EncodedGroup] | None = None
    fingerprint: int | None = None
    _kept: list[object] = field(default_factory=list)
    _found_in: object = None
    _cuts: list[int] = field(default_factory=list)

    def take(self, held: Held, layout: Layout, tensor: Sequence[int]) -> None:
        """Find the new bytes."""
        self._kept, self.encoded, self.fingerprint = [], None, None
        if held.memory is not self._found_in:
            self._found_in = held.memory
            self.new = np.array([held.address[place.held] + place.offset for place in self.places], np.uint64)
            self._cuts = [i for i, place in enumerate(self.places) if place.cut is not None]
        for i in self._cuts:
            place = self.places[i]
            whole = held.memory[place.held].view(f"<u{int(layout.width[tensor[i]])}").reshape(place.shape)
            memory = np.ascontiguousarray(whole[place.cut]).reshape(-1).view(np.uint8)
            self._kept.append(memory)
            self.new[i] = int(memory.__array_interface__["data"][0])

    def boxes(self, where: U64) -> list[U8]:
        """Return the bytes of all boxes."""
        return [view(a, place.nbytes) for a, place in zip(where.tolist(), self.places, strict=True)]

    def copy(self) -> None:
        """Make the base what is new."""
        for base, new in zip(self.boxes(self.base), self.boxes(self.new), strict=True):
            base[:] = new


class _Ground:
    """What a rank knows for all rounds: the terms, and the parts that it holds, with its base of each."""

    def __init__(self, terms: _Terms, writer: Writer, rank: int, inventory: Inventory) -> None:
        self.terms, self.writer, self.inventory = terms, writer, inventory
        reader = writer.reader
        self.layout: Layout = reader.layout(terms.layout)
        self.partition: Partition = reader.partition(terms.partition, self.layout)
        self.placement: Placement = reader.placement_of(terms.placement, self.layout)
        self.holders = [_holders(terms, part) for part in range(len(terms.parts))]
        self.boxes = [self.partition.places(part) for part in range(self.partition.parts)]
        position = self.layout.position
        held: dict[int, list[tuple[int, Box]]] = {}
        for i, (name, box) in enumerate(zip(inventory.names, inventory.boxes, strict=True)):
            held.setdefault(position[name], []).append((i, box))
        mine = [part for part, holders in enumerate(self.holders) if rank in holders]
        places = {part: [_find(self.layout, t, box, held[t]) for t, box in self.boxes[part]] for part in mine}
        sizes = [place.nbytes for part in mine for place in places[part]]
        self.memory = np.empty(sum(sizes) + 1, np.uint8)
        ends = np.cumsum(np.array([0, *sizes], np.uint64)) + np.uint64(self.memory.__array_interface__["data"][0])
        self.mine: dict[int, _Mine] = {}
        begin = 0
        for part in mine:
            self.mine[part] = _Mine(part, places[part], ends[begin : begin + len(places[part])].astype(np.uint64))
            begin += len(places[part])

    def tensor(self, part: int) -> list[int]:
        """Return the tensor of each box of a part."""
        return [t for t, _ in self.boxes[part]]

    def weighted(self, part: int, fingerprints: U64) -> int:
        """Return the sum of H_t * fp over the boxes of a part."""
        return state_fingerprint(self.layout.weights[self.tensor(part)], fingerprints)


def _holders(terms: _Terms, part: int) -> tuple[int, ...]:
    given = terms.parts[part]
    if given is None:
        return ()
    ranks, owner = terms.sets[given[0]], given[1]
    turn = ranks.index(owner)
    return ranks[turn:] + ranks[:turn]


def _find(layout: Layout, t: int, box: Box, held: Sequence[tuple[int, Box]]) -> _Place:
    for i, of in held:
        if all(low <= begin and end <= high for (begin, end), (low, high) in zip(box, of, strict=True)):
            return _place(layout, t, box, i, of)
    raise AssertionError("a holder of a part has each of its boxes in one piece")


# ---------------------------------------------------------------- the publisher


class Collective:
    """Publishes what the ranks of a group hold. Every call is made by all of them. Not for use by several threads.

    frozen: "refuse" tensors of the serving checkpoint, or of the store, that no rank holds, or "carry" them over.
    Other arguments: see publish.Publisher. The base, a copy of what this rank holds, is in its host memory.
    """

    def __init__(
        self,
        url: str | Store,
        group: Group,
        *,
        serving: str | None = None,
        run_id: str | None = None,
        resume: bool = False,
        new_lineage: bool = False,
        codec: str = "zstd",
        form: str = "sparse",
        frozen: Literal["refuse", "carry"] = "refuse",
        anchors: bool = True,
        threads: int | None = None,
    ) -> None:
        if frozen not in ("refuse", "carry"):
            raise ConfigError(f"frozen {frozen!r}: expected refuse or carry")
        self.store, self.group, self.board = open_store(url), group, Counted(group.board)
        self.serving = open_folder(serving) if serving is not None else None
        self.run_id, self.resume, self.new_lineage = run_id, resume, new_lineage
        self.codec, self.form, self.frozen, self.threads = codec, form, frozen, threads
        self.anchors = anchors
        self.ground: _Ground | None = None
        self.open: tuple[_Ground, bytes] | None = None
        self.broken = ""
        self._watch, self._rounds = Watch(group, self.board), 0
        self._past: list[Round] = []
        self._held: Held | None = None

    def publish(
        self, params: Pieces, *, step: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Manifest:
        """Commit what all ranks hold as the next version; returns, on every rank, after the commit.

        Raises on every rank alike. After an error no base has advanced, and the next publish is a new try.
        """
        if self.broken:
            raise ConfigError(self.broken)
        while len(self._past) > _KEPT:
            self._past.pop(0).forget()
        round_ = Round(self._watch, self._rounds)
        self._rounds += 1
        self._past.append(round_)
        try:
            held = hold(params, self._held)
            self._held = held.told()
            return _Publish(self, round_, held, step, metadata).run()
        except _Ended as exc:
            raise exc.trouble.error() from exc.__cause__
        except Forgotten as exc:
            self.broken = (
                f"rank {self.group.rank} stood still for so long that the others have forgotten the publish that it "
                "was in; make a new Publisher on every rank"
            )
            raise ConfigError(self.broken) from exc
        except BaseException as exc:
            # The others need not wait for the lease to run out.
            with contextlib.suppress(Unavailable):
                round_.fail(Trouble.of(exc, gone=True))
            raise

    def close(self) -> None:
        """Nothing to wait for. Values of the last rounds stay on the board: others may not have read them yet."""


class _Ended(Exception):
    """A round was decided to fail."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.text)
        self.trouble = trouble


class _Superseded(Exception):
    """A round was decided while this rank was still at work on it."""


@dataclass
class _Publish:
    """One round, as one rank goes through it."""

    owner: Collective
    round: Round
    held: Held
    step: int | None
    metadata: Mapping[str, str] | None
    done: dict[int, _PartDone] = field(default_factory=dict)
    files: dict[int, AnchorFile] = field(default_factory=dict)
    put: list[str] = field(default_factory=list)
    told: int = 0  # of `put`, the first so many are known to the others, who may commit them
    plan: _Plan = field(default_factory=_Plan)
    version: int = 0
    _ground: _Ground | None = None

    @property
    def rank(self) -> int:
        return self.round.group.rank

    @property
    def ground(self) -> _Ground:
        ground = self._ground
        assert ground is not None
        return ground

    def run(self) -> Manifest:
        """Go through all stages."""
        self._arrive()
        everybody = range(self.round.group.size)
        self.plan = _json.decode(self.round.decided("plan", everybody, self._make_plan), type=_Plan)
        self._settle_open()
        if self.plan.trouble is not None:
            self.owner.broken = ""
            raise _Ended(self.plan.trouble)
        self._enter()
        try:
            decision = self._work()
        except BaseException:
            self._take_back((), self.put[self.told :])
            raise
        if decision.trouble is not None:
            self.owner.broken = ""
            self._take_back(())
            raise _Ended(decision.trouble)
        return self._commit(decision)

    # ------------------------------------------------------------ arriving and planning

    def _arrive(self) -> None:
        raw = _json.encode(self.held.inventory)
        content = sha256(raw)
        ground = self.owner.ground
        if ground is None:
            self.round.put(f"inventory/{self.rank}", zstandard.ZstdCompressor(3).compress(raw))
        elif ground.inventory != self.held.inventory:
            what = _differs(ground.inventory, self.held.inventory)
            raise ConfigError(
                f"rank {self.rank} holds other tensors or boxes than before ({what}); make a new Publisher on every "
                "rank"
            )
        self.round.step()
        # From here on the others may commit; who does not learn whether they did has no base that can be relied on.
        self.owner.broken = (
            f"rank {self.rank} left a publish before it knew how it ended; make a new Publisher on every rank"
        )
        self.round.put(f"arrival/{self.rank}", _json.encode(_Arrival(content, self.step)))

    def _make_plan(self) -> bytes | None:
        """Decide who takes part, as soon as all have arrived who are not out."""
        arrived: dict[int, _Arrival] = {}
        for rank in range(self.round.group.size):
            raw = self.round.get(f"arrival/{rank}")
            if raw is not None:
                arrived[rank] = _json.decode(raw, type=_Arrival)
            elif trouble := self.round.failed(rank):
                return _json.encode(_Plan(trouble=Trouble(trouble.kind, f"rank {rank}: {trouble.text}")))
            elif not self.round.out(rank):
                return None
        first = self.owner.ground is None
        missing = [rank for rank in range(self.round.group.size) if rank not in arrived]
        if missing and not self._covered(arrived) and not self.round.waited():
            return None  # one that was out before may be back
        try:
            settled = self._settle()
            if first and missing:
                raise Unavailable(
                    f"rank {missing[0]} did not begin to publish within {self.round.group.lease_s:g} s, and what it "
                    "holds is not known yet; publish again with all ranks"
                )
            steps = {arrival.step for arrival in arrived.values()}
            if len(steps) > 1:
                low, high = (next(r for r, a in arrived.items() if a.step == s) for s in list(steps)[:2])
                raise ConfigError(
                    f"rank {low} publishes step {arrived[low].step}, rank {high} step {arrived[high].step}; "
                    "expected the same step on all ranks"
                )
            terms: _Terms | None = None
            kind: Literal["full", "adopt", "delta"] = "delta"
            if self.owner.ground is None:
                terms, kind, head = self._make_terms()
            else:
                head = self.owner.ground.writer.head
                self.owner.ground.writer.require_step(self.step)
        except DeltaError as exc:
            return _json.encode(_Plan(trouble=Trouble.of(exc)))
        version = head.manifest.version + 1 if head else 0
        return _json.encode(_Plan(tuple(arrived), None, settled, terms, kind, secrets.token_hex(8), version))

    def _covered(self, ranks: Container[int]) -> bool:
        """Whether some ranks hold every part."""
        ground = self.owner.ground
        return ground is not None and all(any(r in ranks for r in holders) for holders in ground.holders if holders)

    def _make_terms(self) -> tuple[_Terms, Literal["full", "adopt"], Entry | None]:
        """Claim the right to write, and cut the layout into parts; returns the head too."""
        owner = self.owner
        inventories = {rank: self._inventory(rank) for rank in range(self.round.group.size)}
        writer = Writer(
            owner.store, run_id=owner.run_id, resume=owner.resume, new_lineage=owner.new_lineage, threads=owner.threads
        )
        writer.require_step(self.step)
        layout, placement, side_files = self._layout(writer, inventories)
        parts = divide(layout, inventories)
        frozen = parts[-1].boxes if parts and not parts[-1].holders else ()
        full = writer.head is None or owner.new_lineage
        if frozen and owner.frozen == "refuse":
            raise ConfigError(
                f"tensor {layout.names[frozen[0][0]]} and {len(frozen) - 1} others are held by no rank; publish them, "
                'or carry them over with frozen="carry"'
            )
        partition = Partition(layout, [part.boxes for part in parts])
        if not full:
            writer.claim()
        if isinstance(owner.group.board, StoreBoard):
            sweep_boards(owner.store, owner.group.board.session)
        terms = _terms(writer, layout, placement, partition, side_files, parts)
        return terms, "full" if full else "adopt", writer.head

    def _layout(
        self, writer: Writer, inventories: Mapping[int, Inventory]
    ) -> tuple[Layout, Placement, tuple[SideFile, ...]]:
        """Return the layout of the version: of the serving checkpoint, else of the head, else what ranks hold."""
        joined, serving, head = join_layout(inventories), self.owner.serving, writer.head
        going_on = head is not None and not self.owner.new_lineage
        if serving is not None:
            layout, placement = serving.checkpoint.layout, serving.checkpoint.placement
            side_files = writer.side_files(serving)
            if head is not None and going_on:
                writer.reader.layout(head.manifest.layout).require_same(layout)
        elif head is not None and going_on:
            layout, placement = writer.reader.layout(head.manifest.layout), writer.reader.placement(head.manifest)
            side_files = head.manifest.side_files
        else:
            return joined, default_placement(joined), ()
        for name, dtype, shape in zip(joined.names, joined.dtypes, joined.shapes, strict=True):
            t = layout.position.get(name)
            if t is None or (layout.dtypes[t], layout.shapes[t]) != (dtype, shape):
                known = "is not there" if t is None else f"is {layout.dtypes[t]}{list(layout.shapes[t])}"
                raise ConfigError(
                    f"tensor {name} is {dtype}{list(shape)} on the ranks; in the checkpoint that samplers load "
                    f"it {known}"
                )
        return layout, placement, side_files

    def _inventory(self, rank: int) -> Inventory:
        raw = self.round.get(f"inventory/{rank}")
        if raw is None:
            raise Unavailable(
                f"rank {rank} goes on from rounds that rank {self.rank} does not know; make a new Publisher on every "
                "rank"
            )
        return _json.decode(zstandard.ZstdDecompressor().decompress(raw), type=Inventory)

    def _enter(self) -> None:
        """Make ready to work: take the terms where they are new, and find the new bytes of all parts."""
        owner, terms = self.owner, self.plan.terms
        if terms is not None:
            writer = Writer(owner.store, threads=owner.threads, grant=terms.grant)
            self._ground = _Ground(terms, writer, self.rank, self.held.inventory)
        else:
            self._ground = owner.ground
            if self._ground is None:
                owner.broken = f"rank {self.rank} missed the round that planned; make a new Publisher on every rank"
                raise ConfigError(owner.broken)
        ground = self.ground
        head = ground.writer.head
        self.version = head.manifest.version + 1 if head else 0
        if self.version != self.plan.version:
            owner.broken = (
                f"rank {self.rank} has the base of version {self.version}, the others that of version "
                f"{self.plan.version}; make a new Publisher on every rank"
            )
            raise ConfigError(owner.broken)
        for part, mine in ground.mine.items():
            mine.take(self.held, ground.layout, ground.tensor(part))
            self.round.step()
            if self.plan.kind != "delta":
                mine.copy()

    # ------------------------------------------------------------ a commit that was left open

    def _settle(self) -> bool | None:
        """Find out whether the commit that was left open was made."""
        if self.owner.open is None:
            return None
        ground, raw = self.owner.open
        writer = ground.writer
        if not writer.unsettled:
            writer.begin(raw)
        try:
            writer.settle()
        except Unavailable:
            raise
        except DeltaError:
            return False
        return True

    def _settle_open(self) -> None:
        settled = self.plan.settled
        if self.owner.open is None or (settled is None and self.plan.trouble is not None):
            return
        ground, raw = self.owner.open
        if settled is None:
            settled = self._committed(raw)
        self.owner.open = None
        if settled:
            self._advance(ground, raw)
        else:
            ground.writer.forget()

    def _committed(self, raw: bytes) -> bool:
        """Whether a manifest was put of which the others know that it was, or was not."""
        version = msgspec.json.decode(raw, type=Manifest).version
        try:
            return read(self.owner.store, manifest_key(version), limit=MAX_MANIFEST) == raw
        except NotFound:
            return False

    def _advance(self, ground: _Ground, raw: bytes) -> Manifest:
        """Bring the base to what was committed, by the very changes that were compared."""
        self.owner.ground = None  # interrupted, it is no version's
        writer = ground.writer
        writer.forget()
        version = ground.writer.head.manifest.version if ground.writer.head else -1
        manifest = msgspec.json.decode(raw, type=Manifest)
        if manifest.version > version:
            manifest = writer.learn(raw)
        for mine in ground.mine.values():
            if mine.encoded is not None:
                first = int(ground.partition.box_begin[mine.number])

                def where(rows: Segments, base: U64 = mine.base, first: int = first) -> tuple[U64, None]:
                    assert rows.box is not None
                    return base[rows.box - first] + (rows.start * rows.width).astype(np.uint64), None

                for group in mine.encoded:
                    staged = backend.decode(ground.partition, [group], threads=self.owner.threads)
                    backend.apply_rows(ground.partition, staged, where, threads=self.owner.threads)
        writer.resume = writer.new_lineage = self.owner.resume = self.owner.new_lineage = False
        self.owner.ground = ground
        return manifest

    # ------------------------------------------------------------ the work

    def _work(self) -> _Decision:
        """Do this rank's share until the round is decided."""
        kind = self.plan.kind
        if kind == "adopt":
            self._report()
            adopt = _json.decode(self.round.decided("adopt", self.plan.roster, self._make_adopt), type=_Adopt)
            if adopt.decision is not None:
                return self._doubt(adopt.decision)
            self._rebuild()
        if kind == "full":
            self._do_parts()
            self._report()
            raw = self.round.decided("decision", self.plan.roster, self._decide_full, idle=self._do_files)
        else:
            self._do_parts()
            self._report(again=kind == "adopt")
            raw = self.round.decided("decision", self.plan.roster, self._decide_delta, idle=self._do_parts)
        return self._doubt(_json.decode(raw, type=_Decision))

    def _candidates(self, part: int) -> tuple[int, ...]:
        return tuple(rank for rank in self.ground.holders[part] if rank in self.plan.roster)

    def _part_done(self, part: int) -> bool:
        if part not in self.done and (raw := self.round.get(f"part/{part}")) is not None:
            self.done[part] = _json.decode(raw, type=_PartDone)
        return part in self.done

    def _do_parts(self) -> None:
        """Publish the parts whose turn it is to be published by this rank: its own, and those of ranks that are out."""
        for part, mine in self.ground.mine.items():
            if self._part_done(part) or not self.round.turn(self._candidates(part)):
                continue
            began = len(self.put)
            try:
                done = self._put_piece(mine) if self.plan.kind == "full" else self._put_part(mine)
            except _Superseded:
                return
            except DeltaError as exc:
                # Others that hold the same go on with it; where none does, this becomes the error of the round.
                self.round.fail(Trouble.of(exc))
                return
            self.told = len(self.put)
            self.done[part] = _json.decode(self.round.create(f"part/{part}", _json.encode(done)), type=_PartDone)
            if self.done[part].rank != self.rank:
                self._take_back((), self.put[began:])

    def _look(self, part: int) -> None:
        """Raise _Superseded if the part, or the round, is done without this rank."""
        if self._part_done(part) or self.round.get("decision") is not None:
            raise _Superseded

    def _put_part(self, mine: _Mine) -> _PartDone:
        """Encode a part and put its shards."""
        owner, ground = self.owner, self.ground
        prefix = data_prefix(self.version, secrets.token_hex(8))
        groups = backend.encode_part(
            ground.partition, mine.number, mine.base, mine.new,
            codec=owner.codec, form=owner.form, threads=owner.threads,
        )  # fmt: skip
        puts = _Puts(self.round, lambda: self._look(mine.number))
        kept: list[EncodedGroup] = []
        waiting: list[EncodedGroup] = []
        began = time.perf_counter()

        def close_shard() -> None:
            key, mine_now = f"{prefix}/{mine.number:05d}-{len(puts.begun):05d}.safetensors", list(waiting)
            waiting.clear()

            def work() -> Shard:
                image = assemble(key, mine_now)
                owner.store.put(key, image.parts)
                return image.shard

            self.put.append(key)
            puts.begin(work)

        with contextlib.closing(groups):
            for group in groups:
                self.round.step()
                kept.append(group)
                waiting.append(group)
                if sum(g.stored for g in waiting) >= SHARD_BYTES:
                    close_shard()
        encoded = time.perf_counter()
        if waiting:
            close_shard()
        shards = tuple(puts.end())
        times = {"encode_ms": (encoded - began) * 1e3, "upload_ms": (time.perf_counter() - encoded) * 1e3}
        mine.encoded, mine.fingerprint = kept, self._sum(kept)
        width = [ground.partition.groups[g.group].width for g in kept]
        changed_bytes = sum(g.changed * w for g, w in zip(kept, width, strict=True))
        return _PartDone(
            self.rank, mine.fingerprint, shards, tuple(g.group for g in kept),
            sum(g.changed for g in kept), changed_bytes, times,
        )  # fmt: skip

    def _sum(self, groups: Sequence[EncodedGroup]) -> int:
        weights = self.ground.layout.weights
        return sum(state_fingerprint(weights[g.tensor], g.fingerprint) for g in groups) & 0xFFFFFFFFFFFFFFFF

    def _put_piece(self, mine: _Mine) -> _PartDone:
        """Put all bytes of a part, for the files of a full copy."""
        began = time.perf_counter()
        table = backend.part_fingerprints(self.ground.partition, mine.number, mine.base, threads=self.owner.threads)
        key = f"{data_prefix(self.version, secrets.token_hex(8))}/piece-{mine.number:05d}"
        puts = _Puts(self.round, lambda: self._look(mine.number))
        self.put.append(key)
        puts.begin(lambda: put_piece(self.owner.store, key, mine.boxes(mine.base), table, puts.step))
        list(puts.end())
        mine.fingerprint = self.ground.weighted(mine.number, table)
        return _PartDone(self.rank, mine.fingerprint, key=key, times={"upload_ms": (time.perf_counter() - began) * 1e3})

    def _report(self, *, again: bool = False) -> None:
        """Tell the fingerprints of all parts that this rank holds: those of the same part must be equal."""
        ground = self.ground
        for mine in ground.mine.values():
            if mine.fingerprint is not None:
                continue
            self.round.step()
            if self.plan.kind == "delta" or again:
                groups = backend.encode_part(
                    ground.partition, mine.number, mine.base, mine.new, codec="raw", threads=self.owner.threads
                )
                mine.encoded = list(groups)
                mine.fingerprint = self._sum(mine.encoded)
            else:
                table = backend.part_fingerprints(ground.partition, mine.number, mine.base, threads=self.owner.threads)
                mine.fingerprint = ground.weighted(mine.number, table)
        if self.rank in self.plan.roster:
            told = {str(mine.number): mine.fingerprint for mine in ground.mine.values()}
            self.round.put("held-again/" * again + f"held/{self.rank}", _json.encode(told))

    def _reports(self, *, again: bool = False) -> dict[int, dict[int, int]] | None:
        """Return what each rank told of each part, None while one that lives has yet to."""
        found: dict[int, dict[int, int]] = {}
        for rank in self.plan.roster:
            raw = self.round.get("held-again/" * again + f"held/{rank}")
            if raw is not None:
                for part, fingerprint in _json.decode(raw, type=dict[int, int]).items():
                    found.setdefault(part, {})[rank] = fingerprint
            elif not self.round.out(rank):
                return None
        return found

    def _differ(self, reports: Mapping[int, Mapping[int, int]]) -> _Decision | None:
        for part, told in sorted(reports.items()):
            if part in self.done:
                told = {self.done[part].rank: self.done[part].fingerprint, **told}
            ranks = list(told)
            for rank in ranks[1:]:
                if told[rank] != told[ranks[0]]:
                    first, second = sorted((ranks[0], rank))
                    return _Decision(doubt=(part, first, second))
        return None

    def _doubt(self, decision: _Decision) -> _Decision:
        """Find the tensor that two ranks hold differently, where that was decided to be so."""
        if decision.doubt is None:
            return decision
        (part, *ranks), ground = decision.doubt, self.ground
        if self.rank in ranks:
            table = backend.part_fingerprints(ground.partition, part, ground.mine[part].new, threads=self.owner.threads)
            self.round.put(f"doubt/{self.rank}", zstandard.compress(table.astype("<u8").tobytes()))
        until, tables = time.monotonic() + min(10.0, self.round.group.lease_s), []
        for rank in ranks:
            while (raw := self.round.get(f"doubt/{rank}")) is None and time.monotonic() < until:
                self.round.step()
                time.sleep(self.round.board.poll_s)
            tables.append(np.frombuffer(zstandard.decompress(raw), "<u8") if raw is not None else None)
        tensors = ground.tensor(part)
        what = f"one of {len(tensors)} tensors, {ground.layout.names[tensors[0]]} .."
        if tables[0] is not None and tables[1] is not None and (tables[0] != tables[1]).any():
            what = f"tensor {ground.layout.names[tensors[int(np.flatnonzero(tables[0] != tables[1])[0])]]}"
        text = (
            f"{what} differs between rank {ranks[0]} and rank {ranks[1]}, which should hold the same bytes; nothing "
            "was published: bring the copies together first"
        )
        return _Decision(trouble=Trouble("ConfigError", text))

    # ------------------------------------------------------------ deciding

    def _waiting(self) -> _Decision | bool:
        """Say whether parts are still to come; if one cannot, decide so."""
        waiting = False
        for part, holders in enumerate(self.ground.holders):
            if not holders or self._part_done(part):
                continue
            candidates = self._candidates(part)
            if self.round.lost(candidates):
                return self._lost(part, holders)
            waiting = True
        return waiting

    def _lost(self, part: int, holders: Sequence[int]) -> _Decision:
        names = [self.ground.layout.names[t] for t in self.ground.tensor(part)]
        what = f"{len(names)} tensors, {names[0]} .. {names[-1]}" if len(names) > 1 else f"tensor {names[0]}"
        for rank in holders:
            trouble = self.round.failed(rank)
            if trouble is not None:
                text = f"rank {rank}, of its part of {what}: {trouble.text}"
                return _Decision(trouble=Trouble(trouble.kind, text))
        ranks = " and ".join(f"rank {rank}" for rank in holders)
        text = (
            f"{ranks} made no progress for {self.round.group.lease_s:g} s, and no other rank holds the same part of "
            f"{what}; nothing was published: publish again with ranks that hold it"
        )
        return _Decision(trouble=Trouble("Unavailable", text))

    def _decide_delta(self) -> bytes | None:
        waiting = self._waiting()
        if isinstance(waiting, _Decision):
            return _json.encode(waiting)
        reports = None if waiting else self._reports(again=self.plan.kind == "adopt")
        if reports is None:
            return None
        if differ := self._differ(reports):
            return _json.encode(differ)
        ground, done = self.ground, self.done
        writer = ground.writer
        assert writer.head is not None
        groups = frozenset(g for d in done.values() for g in d.groups)
        state = int(writer.head.manifest.state, 16) + sum(d.fingerprint for d in done.values())
        draft = Draft(
            "delta" if groups else "empty", ground.layout, ground.placement, ground.terms.side_files, state,
            writer.head.manifest.version, tuple(s for p in sorted(done) for s in done[p].shards), groups,
            sum(d.changed for d in done.values()), sum(d.changed_bytes for d in done.values()),
            times=self._times(), partition=ground.partition if groups else None,
        )  # fmt: skip
        return self._decision(draft)

    def _times(self) -> dict[str, float]:
        """Return of each stage the time of the slowest part."""
        names = {name for done in self.done.values() for name in done.times}
        return {name: max(done.times.get(name, 0.0) for done in self.done.values()) for name in sorted(names)}

    def _decision(self, draft: Draft) -> bytes:
        try:
            raw = self.ground.writer.compose(draft, step=self.step, metadata=self.metadata)
        except DeltaError as exc:
            return _json.encode(_Decision(trouble=Trouble.of(exc)))
        told = tuple(self.done[p].fingerprint if p in self.done else 0 for p in range(len(self.ground.holders)))
        return _json.encode(_Decision(raw, None, told))

    # ------------------------------------------------------------ a full copy

    def _sources(self) -> dict[int, list[Source]]:
        """Return where the boxes of every tensor lie, when all parts are put."""
        ground, found = self.ground, dict[int, list[Source]]()
        for part, boxes in enumerate(ground.boxes):
            offset = 0
            for t, box in boxes:
                if part in self.done:
                    cells = int(np.prod([end - begin for begin, end in box], dtype=np.int64))
                    source = Source(self.owner.store, self.done[part].key, offset, box)
                    offset += cells * BITS[ground.layout.dtypes[t]] // 8
                else:
                    source = self._frozen(t, box)
                found.setdefault(t, []).append(source)
        return found

    def _frozen(self, t: int, box: Box) -> Source:
        folder = self.owner.serving
        assert folder is not None, "only a serving checkpoint has tensors that no rank holds in a full version"
        checkpoint = folder.checkpoint
        name = checkpoint.placement.files[int(checkpoint.file[t])].name
        return Source(LocalStore(folder.path), name, int(checkpoint.offset[t]), box)

    def _do_files(self) -> None:
        """Put the files whose turn it is to be put by this rank, when all parts are there."""
        self._do_parts()
        ground, roster = self.ground, self.plan.roster
        if any(holders and not self._part_done(part) for part, holders in enumerate(ground.holders)):
            return
        prefix = data_prefix(self.version, self.plan.attempt)
        for number, shard in enumerate(ground.placement.files):
            if self._file_done(number):
                continue
            turn = number % len(roster)
            if not self.round.turn((*roster[turn:], *roster[:turn])):
                continue
            self._share(f"{prefix}/{shard.name}")
            try:
                file = put_assembled(self.owner.store, prefix, ground.layout, shard, self._sources(), self.round.step)
            except DeltaError as exc:
                self.round.fail(Trouble.of(exc))
                return
            self.round.create(f"file/{number}", _json.encode(file))

    def _share(self, key: str) -> None:
        """Note an object that other ranks may put too, and rely on."""
        self.put.append(key)
        self.told = len(self.put)

    def _file_done(self, number: int) -> bool:
        if number not in self.files and (raw := self.round.get(f"file/{number}")) is not None:
            self.files[number] = _json.decode(raw, type=AnchorFile)
        return number in self.files

    def _decide_full(self) -> bytes | None:
        waiting = self._waiting()
        if isinstance(waiting, _Decision):
            return _json.encode(waiting)
        reports = None if waiting else self._reports()
        if reports is None:
            return None
        if differ := self._differ(reports):
            return _json.encode(differ)
        ground = self.ground
        if not all([self._file_done(number) for number in range(len(ground.placement.files))]):
            if self.round.lost(self.plan.roster):
                trouble = next(t for t in self.round.troubles.values())
                return _json.encode(_Decision(trouble=trouble))
            return None
        table = np.zeros(len(ground.layout.names), np.uint64)
        source = Weights(ground.layout, ground.placement, ground.terms.side_files, np.empty(0, np.uint64))
        try:
            for part, holders in enumerate(ground.holders):
                np.add.at(table, ground.tensor(part), self._piece_table(part) if holders else self._frozen_table(part))
            prefix = data_prefix(self.version, self.plan.attempt)
            files = tuple(self.files[n] for n in range(len(ground.placement.files)))
            draft = assembled_draft(ground.writer, prefix, source, self.version, table, files, self._share)
        except DeltaError as exc:
            return _json.encode(_Decision(trouble=Trouble.of(exc)))
        return self._decision(dataclasses.replace(draft, times=self._times()))

    def _piece_table(self, part: int) -> U64:
        boxes, layout = self.ground.boxes[part], self.ground.layout
        bits = sum(int(np.prod([e - b for b, e in box], dtype=np.int64)) * BITS[layout.dtypes[t]] for t, box in boxes)
        return read_piece(self.owner.store, self.done[part].key, bits // 8, len(boxes))

    def _frozen_table(self, part: int) -> U64:
        folder = self.owner.serving
        assert folder is not None, "see _frozen"
        files = [folder.file_path(n) for n in range(len(folder.checkpoint.placement.files))]
        with mapped(files) as maps:
            where = addresses(folder.checkpoint, maps)[self.ground.tensor(part)]
            return backend.part_fingerprints(self.ground.partition, part, where, threads=self.owner.threads)

    # ------------------------------------------------------------ going on from a store

    def _make_adopt(self) -> bytes | None:
        """Find out whether the ranks hold a version; else the base has to be rebuilt."""
        reports, ground = self._reports(), self.ground
        if reports is None:
            return None
        if differ := self._differ(reports):
            return _json.encode(_Adopt(differ))
        missing = [p for p, holders in enumerate(ground.holders) if holders and p not in reports]
        if missing:
            return _json.encode(_Adopt(self._lost(missing[0], ground.holders[missing[0]])))
        if any(not holders for holders in ground.holders):
            return _json.encode(_Adopt(None))  # what is frozen has no fingerprint here
        writer = ground.writer
        head, reader = writer.head, writer.reader
        assert head is not None
        state = sum(next(iter(told.values())) for told in reports.values()) & 0xFFFFFFFFFFFFFFFF
        version = reader.identify(ground.layout.digest, state)
        if version is None or (version != head.manifest.version and not reader.reachable(version)):
            return _json.encode(_Adopt(None))
        kind: Literal["empty", "rewind"] = "empty" if version == head.manifest.version else "rewind"
        draft = Draft(kind, ground.layout, ground.placement, ground.terms.side_files, state, version)
        return _json.encode(_Adopt(_json.decode(self._decision(draft), type=_Decision)))

    def _rebuild(self) -> None:
        """Make the base of this rank the head of the store."""
        ground, layout = self.ground, self.ground.layout
        head = ground.writer.head
        assert head is not None
        memory = np.empty(layout.total_bytes + 1, np.uint8)
        ends = np.cumsum(np.array([0, *layout.nbytes.tolist()], np.uint64))[:-1].astype(np.uint64)
        where = ends + np.uint64(memory.__array_interface__["data"][0])
        self.round.step()
        restore_into(ground.writer.reader, head.manifest.version, backend.Cpu(self.owner.threads), where)
        self.round.step()
        full = [tuple((0, n) for n in shape) for shape in layout.shapes]
        whole = [view(a, n) for a, n in zip(where.tolist(), layout.nbytes.tolist(), strict=True)]
        held = Held(Inventory([], [], [], []), tuple(whole), tuple(where.tolist()), ())
        for part, mine in ground.mine.items():
            places = [_place(layout, t, box, t, full[t]) for t, box in ground.boxes[part]]
            head_part = _Mine(part, places, mine.base)
            head_part.take(held, layout, ground.tensor(part))
            head_part.copy()
            mine.encoded = mine.fingerprint = None

    # ------------------------------------------------------------ committing

    def _commit(self, decision: _Decision) -> Manifest:
        """Commit what was decided: one rank puts the manifest, and any other can in its place."""
        owner, ground = self.owner, self.ground
        owner.open = (ground, decision.manifest)
        owner.broken = ""  # what becomes of the commit, the next round finds out
        raw = self.round.decided("done", self.plan.roster, lambda: self._put_manifest(decision.manifest))
        done = _json.decode(raw, type=_Done)
        if done.trouble is not None and done.unknown:
            raise _Ended(done.trouble)
        owner.open = None
        if done.trouble is not None:
            ground.writer.forget()
            self._take_back(())
            raise _Ended(done.trouble)
        for part, mine in ground.mine.items():
            if decision.fingerprints[part] != mine.fingerprint and part in self.done:
                owner.broken = (
                    f"rank {self.rank} holds other bytes than rank {self.done[part].rank}, which published them; "
                    "bring the copies together and make a new Publisher on every rank"
                )
                raise ConfigError(owner.broken)
        manifest = self._advance(ground, decision.manifest)
        prefix = data_prefix(self.version, self.plan.attempt)
        self._take_back([shard.key for shard in manifest.shards], [k for k in self.put if not k.startswith(prefix)])
        return manifest

    def _put_manifest(self, raw: bytes) -> bytes:
        writer = self.ground.writer
        try:
            if not writer.unsettled:
                writer.begin(raw)
            writer.settle()
        except DeltaError as exc:
            return _json.encode(_Done(Trouble.of(exc), isinstance(exc, Unavailable)))
        return _json.encode(_Done())

    def _take_back(self, named: Sequence[str], keys: Sequence[str] | None = None) -> None:
        """Remove what this rank has put and no manifest names; what cannot be removed is swept by a later commit."""
        for key in self.put if keys is None else keys:
            if key not in named:
                with contextlib.suppress(DeltaError):
                    self.owner.store.delete(key)


class _Puts:
    """Puts under way in threads. They are left alone, and not waited for, where others have done their work.

    look: raises _Superseded where that is so.
    """

    def __init__(self, round_: Round, look: Callable[[], None]) -> None:
        self.begun: list[Future[Shard | None]] = []
        self._round, self._look, self._steps = round_, look, 0

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
            self._round.step()
        else:
            self._look()

    def end(self) -> Iterator[Shard]:
        """Wait for all of them, and yield what they return."""
        while not all(put.done() for put in self.begun):
            self._wait()
        for put in self.begun:
            if (shard := put.result()) is not None:
                yield shard


def _terms(
    writer: Writer,
    layout: Layout,
    placement: Placement,
    partition: Partition,
    side_files: tuple[SideFile, ...],
    parts: Sequence[Part],
) -> _Terms:
    sets = sorted({tuple(sorted(part.holders)) for part in parts if part.holders})
    index = {ranks: i for i, ranks in enumerate(sets)}
    return _Terms(
        Grant(writer.lineage, writer.epoch, writer.run_id),
        writer.put_object("layouts", layout.encoded),
        writer.put_object("placements", encode(placement)),
        writer.put_object("partitions", partition.encoded),
        side_files,
        sets,
        [(index[tuple(sorted(p.holders))], p.holders[0]) if p.holders else None for p in parts],
    )


def _differs(before: Inventory, after: Inventory) -> str:
    """Say where two inventories differ first."""
    for old, new in zip(before.names, after.names, strict=False):
        if old != new:
            return f"{new} where {old} was" if new not in before.names else f"{old} is missing"
    if len(before.names) != len(after.names):
        longer = before.names if len(before.names) > len(after.names) else after.names
        return f"{longer[min(len(before.names), len(after.names))]} is {'missing' if longer is before.names else 'new'}"
    at = next(
        i for i in range(len(before.names))
        if (before.dtypes[i], before.shapes[i], before.boxes[i]) != (after.dtypes[i], after.shapes[i], after.boxes[i])
    )  # fmt: skip
    return f"{before.names[at]} has another dtype, shape or box"
