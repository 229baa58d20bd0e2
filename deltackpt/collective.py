"""Publishing by many ranks: each publishes the part that it holds, one commits. Never moves weights between them.

A publish is a round (`board.Round`): ranks arrive, one plans, each does its parts, one decides, one commits. Whatever
is decided is created once, and the decision to commit is the manifest itself, so that any rank can put its bytes.
Longer than most modules: the stages of a round share what they know of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

import msgspec
import numpy as np
import zstandard

from deltackpt.anchor import anchor_due, assembled_draft
from deltackpt.backend import Cpu, Device
from deltackpt.board import Counted, Forgotten, Group, Round, StoreBoard, Trouble, Watch, sweep_boards
from deltackpt.chain import Entry
from deltackpt.checkpoint import default_placement, open_folder
from deltackpt.copies import AnchorTry, Copy, Frozen, Puts, Superseded, frozen_in_folder, weights_of
from deltackpt.digest import U64, sha256, state_fingerprint
from deltackpt.errors import ConfigError, DeltaError, NotFound, Unavailable
from deltackpt.ground import Ground, Mine, Terms, place_in
from deltackpt.holding import Held, hold
from deltackpt.kernels import view
from deltackpt.layout import Layout
from deltackpt.manifest import MAX_MANIFEST, Manifest, Placement, Shard, SideFile, data_prefix, encode, manifest_key
from deltackpt.ownership import Inventory, Part, divide, join_layout
from deltackpt.partition import Partition
from deltackpt.shard import EncodedGroup, assemble
from deltackpt.store import Store, open_store, read
from deltackpt.tensors import Choice, choose, restore_into
from deltackpt.writer import SHARD_BYTES, Draft, Grant, Writer

if TYPE_CHECKING:
    from deltackpt.holding import Pieces

_KEPT = 4
"""Rounds whose values stay on the board: a rank that slept for longer has to start again."""

_json = msgspec.json


# ---------------------------------------------------------------- what ranks tell each other


class _Arrival(msgspec.Struct, frozen=True):
    """A rank is here. inventory: digest of what it holds."""

    inventory: str
    step: int | None


class _Plan(msgspec.Struct, frozen=True):
    """Who takes part, in which version, and how. settled: whether the commit that was left open was made.

    attempt: of a full copy.
    """

    roster: tuple[int, ...] = ()
    trouble: Trouble | None = None
    settled: bool | None = None
    terms: Terms | None = None
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
    """The manifest was put, unless there is trouble; unknown: whether it was is not known.

    anchor: name of the try at an anchor of this version, where one is due.
    """

    trouble: Trouble | None = None
    unknown: bool = False
    anchor: str = ""


# ---------------------------------------------------------------- the publisher


class Collective:
    """Publishes what the ranks of a group hold. Every call is made by all of them. Not for use by several threads.

    frozen: "refuse" tensors of the serving checkpoint, or of the store, that no rank holds, or "carry" them over.
    Other arguments: see publish.Publisher. The base, a copy of what this rank holds, is where its tensors are, or in
    pinned host memory.
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
        backend: str = "auto",
        base_in_host: bool = False,
    ) -> None:
        if frozen not in ("refuse", "carry"):
            raise ConfigError(f"frozen {frozen!r}: expected refuse or carry")
        self.store, self.group, self.board = open_store(url), group, Counted(group.board)
        self.serving = open_folder(serving) if serving is not None else None
        self.run_id, self.resume, self.new_lineage = run_id, resume, new_lineage
        self.codec, self.form, self.frozen, self.threads = codec, form, frozen, threads
        self.anchors, self.anchor = anchors, cast("AnchorTry | None", None)
        self.backend, self.base_in_host, self.choice = backend, base_in_host, cast("Choice | None", None)
        self.ground: Ground | None = None
        self.open: tuple[Ground, bytes] | None = None
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
            device = self._device_of(held)
            kept, where = device.hold(held.kept)
            manifest = _Publish(self, round_, held, device, where, step, metadata).run()
            del kept  # what it holds was read
            return manifest
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

    def _device_of(self, held: Held) -> Device:
        """Return the backend. It stays that of the first tensors: the base is in its memory."""
        if self.choice is None:
            choice = choose(held.on, self.backend)
            self._device, self.choice = choice.device(self.threads), choice
        if self.choice.on != held.on:
            raise ConfigError(
                f"the tensors of rank {self.group.rank} are on {held.on}, those before were on {self.choice.on}; make "
                "a new Publisher on every rank"
            )
        return self._device

    def close(self) -> None:
        """Wait for an anchor that is being made; what becomes of it is no error, since its version is committed.

        Values of the last rounds stay on the board: others may not have read them yet.
        """
        if self.anchor is not None:
            self.anchor.join()


class _Ended(Exception):
    """A round was decided to fail."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.text)
        self.trouble = trouble


@dataclass
class _Publish:
    """One round, as one rank goes through it."""

    owner: Collective
    round: Round
    held: Held
    device: Device
    where: U64
    step: int | None
    metadata: Mapping[str, str] | None
    done: dict[int, _PartDone] = field(default_factory=dict)
    put: list[str] = field(default_factory=list)
    told: int = 0  # of `put`, the first so many are known to the others, who may commit them
    plan: _Plan = field(default_factory=_Plan)
    version: int = 0
    _ground: Ground | None = None

    @property
    def rank(self) -> int:
        return self.round.group.rank

    @property
    def ground(self) -> Ground:
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
            terms: Terms | None = None
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

    def _make_terms(self) -> tuple[Terms, Literal["full", "adopt"], Entry | None]:
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
            self._ground = Ground(
                terms, writer, self.rank, self.held.inventory, self.device, base_in_host=owner.base_in_host
            )
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
            mine.take(self.held.kept, self.where, self.device, ground.width(part))
            self.round.step()
            if self.plan.kind != "delta":
                mine.copy(self.device)

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

    def _advance(self, ground: Ground, raw: bytes) -> Manifest:
        """Bring the base to what was committed, by the very changes that were compared."""
        if self.owner.anchor is not None:
            self.owner.anchor.let_go(self.round.step)
        self.owner.ground = None  # interrupted, it is no version's
        writer = ground.writer
        writer.forget()
        version = ground.writer.head.manifest.version if ground.writer.head else -1
        manifest = msgspec.json.decode(raw, type=Manifest)
        if manifest.version > version:
            manifest = writer.learn(raw)
        for mine in ground.mine.values():
            if mine.encoding is not None:
                mine.encoding.advance(mine.base)
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
            except Superseded:
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
        """Raise Superseded if the part, or the round, is done without this rank."""
        if self._part_done(part) or self.round.get("decision") is not None:
            raise Superseded

    def _put_part(self, mine: Mine) -> _PartDone:
        """Encode a part and put its shards."""
        owner, ground = self.owner, self.ground
        prefix = data_prefix(self.version, secrets.token_hex(8))
        mine.encoding = self.device.encode_part(
            ground.partition, mine.number, mine.base, mine.new, codec=owner.codec, form=owner.form
        )
        puts = Puts(self.round.step, lambda: self._look(mine.number))
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

        with contextlib.closing(mine.encoding.groups()) as groups:
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
        mine.fingerprint = self._sum(kept)
        width = [ground.partition.groups[g.group].width for g in kept]
        changed_bytes = sum(g.changed * w for g, w in zip(kept, width, strict=True))
        return _PartDone(
            self.rank, mine.fingerprint, shards, tuple(g.group for g in kept),
            sum(g.changed for g in kept), changed_bytes, times,
        )  # fmt: skip

    def _sum(self, groups: Sequence[EncodedGroup]) -> int:
        weights = self.ground.layout.weights
        return sum(state_fingerprint(weights[g.tensor], g.fingerprint) for g in groups) & 0xFFFFFFFFFFFFFFFF

    def _put_piece(self, mine: Mine) -> _PartDone:
        """Put all bytes of a part, for the files of a full copy."""
        began = time.perf_counter()
        key = f"{data_prefix(self.version, secrets.token_hex(8))}/piece-{mine.number:05d}"
        self.put.append(key)
        mine.fingerprint = self._copy.put_piece(
            mine.number, key, self.round.step, lambda: self._look(mine.number)
        )  # fmt: skip
        return _PartDone(self.rank, mine.fingerprint, key=key, times={"upload_ms": (time.perf_counter() - began) * 1e3})

    def _report(self, *, again: bool = False) -> None:
        """Tell the fingerprints of all parts that this rank holds: those of the same part must be equal."""
        ground = self.ground
        for mine in ground.mine.values():
            if mine.fingerprint is not None:
                continue
            self.round.step()
            if self.plan.kind == "delta" or again:
                mine.encoding = self.device.encode_part(
                    ground.partition, mine.number, mine.base, mine.new, codec="raw", form="sparse"
                )
                mine.fingerprint = self._sum(list(mine.encoding.groups()))
            else:
                table = ground.fingerprints(mine.number, mine.base)
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
            table = ground.fingerprints(part, ground.mine[part].new)
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

    @cached_property
    def _copy(self) -> Copy:
        owner = self.owner

        def frozen() -> Frozen:
            assert owner.serving is not None, "only of a serving checkpoint may a full version have frozen tensors"
            return frozen_in_folder(owner.serving, self.ground, owner.threads)

        prefix = data_prefix(self.version, self.plan.attempt)
        return Copy(owner.store, self.round, self.ground, self.plan.roster, prefix, frozen, self._share, owner.threads)

    def _pieces(self) -> dict[int, str]:
        return {part: done.key for part, done in self.done.items()}

    def _do_files(self) -> None:
        """Put the files whose turn it is to be put by this rank, when all parts are there."""
        self._do_parts()
        if all([self._part_done(part) for part, holders in enumerate(self.ground.holders) if holders]):
            self._copy.put_files(self._pieces())

    def _share(self, key: str) -> None:
        """Note an object that other ranks may put too, and rely on."""
        self.put.append(key)
        self.told = len(self.put)

    def _decide_full(self) -> bytes | None:
        waiting = self._waiting()
        if isinstance(waiting, _Decision):
            return _json.encode(waiting)
        reports = None if waiting else self._reports()
        if reports is None:
            return None
        if differ := self._differ(reports):
            return _json.encode(differ)
        if not self._copy.files_done():
            if self.round.lost(self.plan.roster):
                trouble = next(t for t in self.round.troubles.values())
                return _json.encode(_Decision(trouble=trouble))
            return None
        try:
            anchor = self._copy.finish(self.version, self._pieces())
            draft = assembled_draft(self.owner.store, weights_of(self.ground), anchor, self._share)
        except DeltaError as exc:
            return _json.encode(_Decision(trouble=Trouble.of(exc)))
        return self._decision(dataclasses.replace(draft, times=self._times()))

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
        restore_into(ground.writer.reader, head.manifest.version, Cpu(self.owner.threads), where)
        self.round.step()
        full = [tuple((0, n) for n in shape) for shape in layout.shapes]
        whole = [view(a, n) for a, n in zip(where.tolist(), layout.nbytes.tolist(), strict=True)]
        for part, mine in ground.mine.items():
            places = [place_in(layout, t, box, t, full[t]) for t, box in ground.boxes[part]]
            head_part = Mine(part, places, mine.base)
            head_part.take(whole, where, Cpu(), ground.width(part))
            head_part.copy(self.device)
            mine.encoding = mine.fingerprint = None

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
        if done.anchor:
            self._begin_anchor(done.anchor)
        prefix = data_prefix(self.version, self.plan.attempt)
        self._take_back([shard.key for shard in manifest.shards], [k for k in self.put if not k.startswith(prefix)])
        return manifest

    def _begin_anchor(self, attempt: str) -> None:
        owner, ground = self.owner, self.ground
        assert ground.writer.head is not None
        owner.anchor = AnchorTry(
            owner.store, owner.group, owner.board, ground, ground.writer.head, attempt, self.plan.roster, owner.anchor
        )

    def _put_manifest(self, raw: bytes) -> bytes:
        writer = self.ground.writer
        try:
            if not writer.unsettled:
                writer.begin(raw)
            writer.settle()
        except DeltaError as exc:
            return _json.encode(_Done(Trouble.of(exc), isinstance(exc, Unavailable)))
        return _json.encode(_Done(anchor=secrets.token_hex(8) if self._anchor_due() else ""))

    def _anchor_due(self) -> bool:
        owner = self.owner
        if not owner.anchors or (owner.anchor is not None and not owner.anchor.over):
            return False
        with contextlib.suppress(DeltaError):  # then a later version asks again
            return anchor_due(self.ground.writer.reader)
        return False

    def _take_back(self, named: Sequence[str], keys: Sequence[str] | None = None) -> None:
        """Remove what this rank has put and no manifest names; what cannot be removed is swept by a later commit."""
        for key in self.put if keys is None else keys:
            if key not in named:
                with contextlib.suppress(DeltaError):
                    self.owner.store.delete(key)


def _terms(
    writer: Writer,
    layout: Layout,
    placement: Placement,
    partition: Partition,
    side_files: tuple[SideFile, ...],
    parts: Sequence[Part],
) -> Terms:
    sets = sorted({tuple(sorted(part.holders)) for part in parts if part.holders})
    index = {ranks: i for i, ranks in enumerate(sets)}
    return Terms(
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
