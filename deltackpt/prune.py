"""Prune: remove data that nothing needs. Never a manifest, nor what the head, a lease, a channel or a tag needs.

In two phases, each safe to kill: a record under `pruned/` declares data gone, so that readers plan around it; the data
itself is removed by a later run, after a grace period by the store's clock. Whatever a killed run left is finished by
the next one. Longer than most modules: what is needed is found and found again by the same steps.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from deltackpt.chain import plan
from deltackpt.errors import AlreadyExists, ChainError, ConfigError, FormatError, NotFound
from deltackpt.lease import Lease, channels, lease_key, leases
from deltackpt.manifest import (
    LEVEL,
    MAX_MANIFEST,
    Anchor,
    Manifest,
    Pruned,
    anchor_key,
    data_prefix,
    decode,
    decode_anchor,
    encode,
    pruned_anchor_key,
    pruned_key,
)
from deltackpt.reader import Reader, anchor_key_of
from deltackpt.store import Store, read

GRACE_S = 3600.0
"""Between a prune record and the removal: longer than a reader needs for what it has planned to fetch."""
LITTER_S = 86400.0
"""An attempt that no record names is dead when nothing was added to it for this long."""
_CLOCK = "pruned/clock.json"
_MAX_RECORD = 1 << 30

State: TypeAlias = Literal["kept", "removable", "declared", "removed"]


class Piece(NamedTuple):
    """What is removed together: a version's own data, or the anchor made beside its delta."""

    version: int
    beside: bool = False

    @property
    def record(self) -> str:
        """Key of its prune record."""
        return pruned_anchor_key(self.version) if self.beside else pruned_key(self.version)


@dataclass(frozen=True)
class Row:
    """A piece as `prune_store` reports it. kind: delta, full or anchor. why: who needs it; empty if nobody.

    nbytes: what it takes in the store now. declared: when its prune record was made, by the store's clock.
    """

    version: int
    kind: str
    nbytes: int
    state: State
    why: tuple[str, ...]
    declared: float | None = None


@dataclass(frozen=True)
class PruneReport:
    """What stays and why, what goes. removed, litter: bytes removed by this run, or that could be by a dry one.

    over: bytes by which all that is needed exceeds the budget. due_s: until the first declared data may be removed.
    """

    dry_run: bool
    rows: tuple[Row, ...]
    kept: int
    removable: int
    removed: int
    litter: int
    over: int
    due_s: float | None


# ---------------------------------------------------------------- tags


class Tag(msgspec.Struct, frozen=True):
    """A version that is never pruned, under `tags/<name>.json`."""

    version: int
    created: float


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}")


def _tag_key(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a tag; use letters, digits and . _ + = @ -")
    return f"tags/{name}.json"


def tags(store: Store) -> dict[str, int]:
    """Return the version of each tag."""
    keys = [k for k in store.keys("tags/") if k.endswith(".json") and _NAME.fullmatch(k[5:-5])]
    return {k[5:-5]: decode(read(store, k, limit=MAX_MANIFEST), Tag, k).version for k in keys}


def set_tag(store: Store, name: str, version: int | None = None, *, clock: Callable[[], float] = time.time) -> int:
    """Tag a version, the newest by default, so that it is never pruned. Raises ConfigError if the name is taken."""
    key, reader = _tag_key(name), Reader(store)
    reader.load()
    if version is None:
        if reader.head is None:
            raise NotFound(f"{store.url} has no version yet; publish one first")
        version = reader.head.manifest.version
    reader.manifest(version)
    if not reader.reachable(version):
        raise ChainError(f"version {version} cannot be rebuilt from {store.url} any more; tag one that can")
    try:
        store.put(key, [encode(Tag(version, clock()))])
    except AlreadyExists:
        held = tags(store)[name]
        if held != version:
            raise ConfigError(
                f"tag {name} is on version {held} already; remove it first, with --delete, or take another name"
            ) from None
    return version


def delete_tag(store: Store, name: str) -> None:
    """Remove a tag. Raises ConfigError if there is none."""
    key = _tag_key(name)
    if name not in tags(store):
        raise ConfigError(f"{store.url} has no tag {name}; it has {', '.join(sorted(tags(store))) or 'none'}")
    store.delete(key)


# ---------------------------------------------------------------- what is there


@dataclass
class _Survey:
    """A store as it is now. present: keys under `data/` by their folder; whole: pieces that can be used.

    declared: when each piece was declared gone; None for a record that does not say.
    """

    reader: Reader
    present: dict[str, set[str]]
    declared: dict[Piece, float | None] = field(default_factory=dict)
    folders: dict[Piece, set[str]] = field(default_factory=dict)
    sizes: dict[Piece, int] = field(default_factory=dict)
    whole: set[Piece] = field(default_factory=set)
    by_reference: set[int] = field(default_factory=set)

    @property
    def head(self) -> int:
        assert self.reader.head is not None
        return self.reader.head.manifest.version

    def manifest(self, version: int) -> Manifest:
        return self.reader.history[version].manifest

    def anchors(self, *, by_reference: bool = True) -> dict[int, int]:
        """Versions with a usable anchor, and its bytes."""
        found = {p.version for p in self.whole if p.beside or self.manifest(p.version).kind == "full"}
        found -= set() if by_reference else self.by_reference
        return {v: self.manifest(v).totals.raw for v in found}

    def anchor_piece(self, version: int) -> Piece:
        return Piece(version, beside=self.manifest(version).kind != "full")

    def missing(self) -> frozenset[int]:
        """Versions whose delta cannot be used."""
        deltas = (v for v, e in self.reader.history.items() if e.manifest.kind == "delta")
        return frozenset(v for v in deltas if Piece(v) not in self.whole)

    def keys(self, piece: Piece) -> list[str]:
        """Keys of a piece that are still there; only such as are of its version, whatever a manifest may name."""
        own = [f for f in self.folders.get(piece, ()) if f.startswith(data_prefix(piece.version, ""))]
        return sorted(key for folder in own for key in self.present.get(folder, ()))


def _folder(key: str) -> str:
    """Return the attempt that an object below `data/` is of."""
    return "/".join(key.split("/")[:2])


def _survey(store: Store, reader: Reader) -> _Survey:
    # The listing first: what is committed while it runs is then known, and no litter.
    present: dict[str, set[str]] = defaultdict(set)
    for key in store.keys("data/"):
        present[_folder(key)].add(key)
    if reader.history:
        reader.refresh()
    else:
        reader.load()
    if reader.head is None:
        raise NotFound(f"{store.url} has no version yet; publish one first")
    survey = _Survey(reader, present)
    records = set(store.keys("pruned/"))
    beside = {int(k[8:-5]) for k in store.keys("anchors/") if k == anchor_key_of(k)}
    for version, entry in reader.history.items():
        manifest, piece = entry.manifest, Piece(version)
        if manifest.kind == "delta":
            _add_delta(survey, manifest)
        elif manifest.anchor is not None:
            _add_anchor(store, survey, piece, manifest.anchor.key)
        if version in beside and manifest.kind != "full":
            _add_anchor(store, survey, Piece(version, beside=True), anchor_key(version))
    for piece in survey.folders:
        if piece.record in records:
            # When, is of interest only where something is left to be removed.
            survey.declared[piece] = _declared(store, piece) if survey.keys(piece) else 0.0
    return survey


def _declared(store: Store, piece: Piece) -> float | None:
    """Return when a piece was declared gone, by the store's clock; None if its record does not say."""
    with contextlib.suppress(FormatError, NotFound):
        return decode(read(store, piece.record, limit=MAX_MANIFEST), Pruned, piece.record).declared
    return None


def _add_delta(survey: _Survey, manifest: Manifest) -> None:
    piece = Piece(manifest.version)
    # Of a version that was published in parts, each part has a folder of its own.
    survey.folders[piece] = {_folder(s.key) for s in manifest.shards}
    there = [s for s in manifest.shards if s.key in survey.present.get(_folder(s.key), ())]
    survey.sizes[piece] = sum(s.nbytes for s in there)
    if len(there) == len(manifest.shards):
        survey.whole.add(piece)


def _add_anchor(store: Store, survey: _Survey, piece: Piece, key: str) -> None:
    """Look whether every file of an anchor is there, at its size."""
    kind = "anchor-" if piece.beside else ""
    attempts = [f for f in survey.present if f.startswith(data_prefix(piece.version, kind))]
    survey.folders[piece] = set() if piece.beside else {_folder(key)}
    survey.sizes[piece] = 0
    if not attempts:
        return
    try:
        anchor: Anchor = decode_anchor(read(store, key, limit=_MAX_RECORD), piece.version)
    except NotFound:
        # Its record is removed last, so nothing else is left either.
        return
    if anchor.folder is None:
        survey.whole.add(piece)
        survey.by_reference.add(piece.version)
        return
    survey.folders[piece] = {anchor.folder}
    held = survey.present.get(anchor.folder, set())
    there = [f for f in anchor.files if f"{anchor.folder}/{f.name}" in held]
    survey.sizes[piece] = sum(f.nbytes for f in there)
    with contextlib.suppress(NotFound):
        if len(there) == len(anchor.files) and all(
            store.size(f"{anchor.folder}/{f.name}") == f.nbytes for f in anchor.files
        ):
            survey.whole.add(piece)


# ---------------------------------------------------------------- what is needed


class _Needs:
    """Who needs which piece of a store."""

    def __init__(self, survey: _Survey) -> None:
        self.survey = survey
        self.history, self.missing = survey.reader.history, survey.missing()
        self.anchors = survey.anchors()
        self.why: dict[Piece, list[str]] = defaultdict(list)

    def add(self, pieces: Iterable[Piece], why: str) -> None:
        for piece in pieces:
            if why not in self.why[piece]:
                self.why[piece].append(why)

    def restore(
        self, version: int, *, done: set[int] | None = None, anchors: Mapping[int, int] | None = None
    ) -> list[Piece]:
        """Return what it takes to rebuild a version: the chain back to an anchor. Raises ChainError.

        done: versions that are rebuilt by what the caller has already; grows.
        """
        known = self.anchors if anchors is None else anchors
        found: list[Piece] = []
        walked: list[int] = []
        at: int | None = version
        while at is not None and at not in known:
            if done is not None and at in done:
                done.update(walked)
                return found
            manifest = self.history[at].manifest
            if manifest.kind == "full" or at in self.missing:
                # By undoing, perhaps, from an anchor that came later.
                way = plan(self.history, version, local=None, anchors=known, missing=self.missing)
                assert way.anchor is not None
                return [self.survey.anchor_piece(way.anchor), *(Piece(s.version) for s in way.steps)]
            walked.append(at)
            if manifest.kind == "delta":
                found.append(Piece(at))
            at = manifest.base
        assert at is not None, "only a full version has no base"
        if done is not None:
            done.update(walked)
        return [*found, self.survey.anchor_piece(at)]

    def head(self) -> None:
        """The newest chain, the newest anchor, and every delta after it."""
        head = self.survey.head
        try:
            self.add(self.restore(head), "newest chain")
        except ChainError as exc:
            raise ChainError(f"nothing is pruned, the newest version cannot be rebuilt: {exc}") from exc
        newest = max(self.anchors)
        self.add([self.survey.anchor_piece(newest)], "newest anchor")
        self.add((Piece(v) for v in range(newest + 1, head + 1) if Piece(v) in self.survey.whole), "newest chain")
        with contextlib.suppress(ChainError):
            # Files outside the store are not the store's to rely on.
            self.add(self.restore(head, anchors=self.survey.anchors(by_reference=False)), "newest chain")

    def version(self, version: int, why: str) -> None:
        """A version that somebody relies on, as far as it can still be rebuilt."""
        if version in self.history:
            with contextlib.suppress(ChainError):
                self.add(self.restore(version), why)

    def lease(self, version: int, why: str) -> None:
        """A follower's version, and the deltas of its way to the head unless an anchor is the shorter way."""
        self.version(version, why)
        if version in self.history:
            with contextlib.suppress(ChainError):
                anchors = self.survey.anchors(by_reference=False)
                way = plan(self.history, self.survey.head, local=version, anchors=anchors, missing=self.missing)
                self.add((Piece(s.version) for s in way.steps if way.anchor is None), why)

    def kept(self, versions: list[int], budget: int | None) -> int:
        """Versions kept by the rules, the oldest given up to meet a budget; returns the bytes by which it is missed."""
        sizes = self.survey.sizes
        chosen: set[Piece] = set()
        needed = set(self.why)

        def nbytes(dropped: int) -> int:
            nonlocal chosen
            chosen, done = set(), set[int]()
            for version in versions[dropped:]:
                with contextlib.suppress(ChainError):
                    chosen |= set(self.restore(version, done=done))
            return sum(sizes[p] for p in chosen | needed)

        count = 0
        if budget is not None:
            # Fewer versions never need more.
            count = bisect.bisect_left(range(len(versions)), -budget, key=lambda n: -nbytes(n))
        total = nbytes(count)
        self.add(chosen, "kept")
        return max(0, total - budget) if budget is not None else 0


def _wanted(head: int, keep: int | None, keep_every: int | None, budget: int | None) -> list[int]:
    if keep is None and keep_every is None:
        return [] if budget is None else list(range(head + 1))
    newest = range(max(0, head + 1 - (keep or 0)), head + 1)
    every = range(0, head + 1, keep_every) if keep_every else ()
    return sorted({*newest, *every})


def store_now(store: Store) -> float:
    """Return the time by the store's own clock: that of an object written now."""
    store.put(_CLOCK, [b"{}\n"], if_absent=False)
    return store.modified(_CLOCK)


def live_leases(store: Store, store_id: str, now: float) -> list[Lease]:
    """Return the leases on a store's versions that hold at `now` by their own clock or by that of `store`."""
    return [found for found in leases(store, store_id=store_id) if found.live(now) or _renewed(store, found, now)]


def _renewed(store: Store, lease: Lease, now: float) -> bool:
    """Say whether a lease was written lately: its owner's clock may be slow."""
    with contextlib.suppress(NotFound):
        return now < store.modified(lease_key(lease.id)) + lease.duration_s
    return False


def _needs(
    survey: _Survey, lease_store: Store, now: float, versions: list[int], budget: int | None
) -> tuple[_Needs, int]:
    needs, store = _Needs(survey), survey.reader.store
    needs.head()
    for lease in live_leases(lease_store, survey.reader.info.store_id, now):
        held = {v for v in (lease.version, lease.staged) if v is not None}
        for version in sorted(held):
            needs.lease(version, f"lease {lease.id}")
    for channel in channels(store):
        needs.version(channel.version, f"channel {channel.name}")
    for name, version in sorted(tags(store).items()):
        needs.version(version, f"tag {name}")
    return needs, needs.kept(versions, budget)


# ---------------------------------------------------------------- litter


def _litter(survey: _Survey, now: float) -> list[str]:
    """Keys of attempts that lost or died: those of committed versions, and those that nobody adds to any more."""
    store, found = survey.reader.store, []
    named = set[str]().union(*survey.folders.values())
    made = {p.version for p in survey.folders if p.beside}
    for folder, keys in sorted(survey.present.items()):
        match = re.fullmatch(r"data/(\d{20})-(anchor-)?[0-9a-f]{16}", folder)
        if match is None or folder in named:
            continue
        version = int(match[1])
        decided = version in made if match[2] else version in survey.reader.history
        if decided or now - max(_modified(store, k) for k in keys) > LITTER_S:
            found += sorted(keys)
    return found


def _modified(store: Store, key: str) -> float:
    try:
        return store.modified(key)
    except NotFound:
        return 0.0


# ---------------------------------------------------------------- prune


def prune_store(
    store: Store,
    *,
    keep: int | None = None,
    keep_every: int | None = None,
    budget: int | None = None,
    dry_run: bool = True,
    grace_s: float = GRACE_S,
    lease_store: Store | None = None,
    clock: Callable[[Store], float] = store_now,
) -> PruneReport:
    """Remove data that nothing needs, or only say what could be removed.

    keep: the newest versions stay; keep_every: so do those that it divides; with neither, all that fits the budget.
    budget: bytes under which the oldest of these are given up. Always kept are the newest chain, and what live leases
    (in `lease_store`, by default the store itself), channels and tags need; each with its chain back to an anchor.

    A first run declares; data declared at least grace_s ago, by the store's clock, is removed. What is needed again by
    then is kept, and its record withdrawn. Raises ChainError, removing nothing, if the head cannot be rebuilt.
    """
    run = _Run(store, lease_store or store, keep, keep_every, budget, grace_s)
    _ = run.reader.info  # where there is no store, nothing is written
    now = time.time() if dry_run else clock(store)
    survey, needs, over = run.look(now)
    litter = _litter(survey, now)
    if dry_run:
        return run.report(True, survey, needs, now, 0, litter, over)
    run.declare(survey, needs, now)
    for key in litter:
        store.delete(key)
    removed = 0
    if run.due(survey, needs, now):
        # Again: a lease, a channel or a rewind may have come since.
        survey, needs, over = run.look(now)
        for piece in run.due(survey, needs, now):
            for key in survey.keys(piece):
                store.delete(key)
            removed += survey.sizes[piece]
            survey.sizes[piece] = 0
            for folder in survey.folders[piece]:
                survey.present.pop(folder, None)
    return run.report(False, survey, needs, now, removed, litter, over)


@dataclass
class _Run:
    """One call of `prune_store`."""

    store: Store
    lease_store: Store
    keep: int | None
    keep_every: int | None
    budget: int | None
    grace_s: float
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = Reader(self.store)

    def look(self, now: float) -> tuple[_Survey, _Needs, int]:
        survey = _survey(self.store, self.reader)
        versions = _wanted(survey.head, self.keep, self.keep_every, self.budget)
        needs, over = _needs(survey, self.lease_store, now, versions, self.budget)
        return survey, needs, over

    def declare(self, survey: _Survey, needs: _Needs, now: float) -> None:
        """Make the records what they should be: of all that nobody needs, and of nothing else that is whole."""
        for piece in sorted(survey.folders):
            declared = survey.declared.get(piece, 0.0)
            if piece in needs.why:
                if piece in survey.declared:
                    self.store.delete(piece.record)
                    del survey.declared[piece]
                continue
            if declared is None or declared > now:
                # It does not say when, or the store's clock went back: from now on, then.
                self.store.delete(piece.record)
            elif piece in survey.declared:
                continue
            with contextlib.suppress(AlreadyExists):
                self.store.put(piece.record, [encode(Pruned(LEVEL, piece.version, now))])
            survey.declared[piece] = now

    def due(self, survey: _Survey, needs: _Needs, now: float) -> list[Piece]:
        """Pieces whose data may be removed, oldest first."""
        return [p for p in sorted(survey.folders) if survey.keys(p) and self.wait(survey, needs, p, now) == 0.0]

    def wait(self, survey: _Survey, needs: _Needs, piece: Piece, now: float) -> float | None:
        """Seconds until a piece may be removed; None if it is needed or not declared."""
        declared = survey.declared.get(piece)
        if piece in needs.why or declared is None or declared > now:
            return None
        return max(0.0, declared + self.grace_s - now)

    def report(
        self, dry_run: bool, survey: _Survey, needs: _Needs, now: float, removed: int, litter: list[str], over: int
    ) -> PruneReport:
        rows = []
        for piece in sorted(survey.folders):
            why, there = tuple(needs.why.get(piece, ())), bool(survey.keys(piece))
            state: State = "kept"
            if not why:
                state = "removed" if not there else "declared" if piece in survey.declared else "removable"
            kind = "anchor" if piece.beside else survey.manifest(piece.version).kind
            declared = survey.declared.get(piece) if there else None
            rows.append(Row(piece.version, kind, survey.sizes[piece], state, why, declared))
        waits = [w for p in survey.folders if survey.keys(p) and (w := self.wait(survey, needs, p, now)) is not None]
        return PruneReport(
            dry_run,
            tuple(rows),
            sum(r.nbytes for r in rows if r.state == "kept"),
            sum(r.nbytes for r in rows if r.state != "kept"),
            removed,
            len(litter),
            over,
            min(waits, default=None),
        )
