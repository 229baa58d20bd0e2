"""Check a whole store, or a local folder against one, and list everything that is wrong. Never writes to either.

A reader stops at the first fault; this module goes on, so that one look shows the extent of a damage. A fault is
the error that a reader would raise. Longer than most modules because every object of a store has its check here.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash

from deltackpt import backend
from deltackpt.chain import Entry, Plan, Step, check_link, plan
from deltackpt.checkpoint import Folder, open_folder
from deltackpt.digest import U64, fp_hex, sha256, state_fingerprint
from deltackpt.errors import ChainError, ConfigError, DeltaError, FormatError, IntegrityError, NotFound, Poisoned
from deltackpt.folder import Record, difference, fingerprint_folder, read_record, same_split, signed
from deltackpt.layout import Layout
from deltackpt.manifest import (
    MAX_MANIFEST,
    AnchorFile,
    Manifest,
    Shard,
    SideFile,
    decode_manifest,
    digest,
    manifest_key,
    pruned_key,
)
from deltackpt.reader import AnchorSource, Delta, Reader, compare_fingerprints, manifest_key_of, named
from deltackpt.store import LocalStore, Store, read, store_error
from deltackpt.tensors import read_anchor

_CHUNK = 16 << 20
_ALIGN = 64

Progress = Callable[[str], None]
"""Gets a few words about what is looked at now."""


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True)
class StoreReport:
    """What was found in a store. nbytes: bytes of shards and anchors that were read; rebuilt: how many versions were.

    pruned: versions whose data is gone by a prune record, which is no fault. notes: what could not be checked, and why.
    """

    store_id: str
    versions: tuple[int, ...]
    pruned: tuple[int, ...]
    anchors: tuple[int, ...]
    rebuilt: int
    nbytes: int
    notes: tuple[str, ...]
    problems: tuple[DeltaError, ...]


@dataclass(frozen=True)
class FolderReport:
    """What a local folder holds. version: None if no version of the store; recorded: what its own record says.

    tensors: names of those that differ from the version it should hold; files: side files that differ.
    """

    path: str
    version: int | None
    recorded: int | None
    pending: int | None
    nbytes: int
    tensors: tuple[str, ...]
    files: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[DeltaError, ...]


def listed_versions(store: Store) -> list[int]:
    """Return the versions that have a manifest, sorted. Reads no manifest."""
    return [int(k[10:-5]) for k in store.keys("manifests/") if k == manifest_key_of(k)]


def read_entry(store: Store, version: int) -> Entry:
    """Read and check one manifest by itself. Raises ChainError if the store does not have it."""
    try:
        raw = read(store, manifest_key(version), limit=MAX_MANIFEST)
    except NotFound as exc:
        end = max(listed_versions(store), default="nothing")
        raise ChainError(f"version {version} is not in the store, which ends at {end}") from exc
    return Entry(decode_manifest(raw, version), digest(raw))


# ---------------------------------------------------------------- a store


def verify_store(
    store: Store,
    *,
    deep: bool = False,
    anchor_source: str | None = None,
    scratch: str | None = None,
    threads: int | None = None,
    progress: Progress = _silent,
) -> StoreReport:
    """Check every object that the store's manifests name, and how the manifests hang together.

    deep: also rebuild every version in a temporary file under `scratch`, as large as the weights (two such files where
    there are anchors beside deltas), and compare fingerprints of all bytes. anchor_source: folder of an anchor made
    by reference.
    Raises StoreError where there is no store; what is wrong inside one is in the report.
    """
    reader = Reader(store, anchor_source=anchor_source, threads=threads)
    check = _StoreCheck(reader, reader.info.store_id, progress)
    check.read_manifests()
    check.find_pruned()
    check.find_anchors()
    with contextlib.ExitStack() as stack:
        rebuild = stack.enter_context(_Rebuild(check, scratch)) if deep else None
        for version in sorted(reader.history):
            progress(f"version {version} of {max(reader.history)}")
            delta = check.check_version(version)
            anchor = check.check_anchor(version) if version in check.anchors else None
            if rebuild is not None:
                rebuild.visit(version, delta, anchor)
        rebuilt = rebuild.count if rebuild is not None else 0
        if rebuild is not None and rebuild.skipped:
            check.notes.append(f"not rebuilt, no whole chain leads there: versions {ranges(rebuild.skipped)}")
    check.require_reachable()
    return StoreReport(
        reader.info.store_id, tuple(sorted(reader.history)), tuple(sorted(check.pruned)), tuple(sorted(check.anchors)),
        rebuilt, check.nbytes, tuple(check.notes), tuple(check.problems),
    )  # fmt: skip


@dataclass
class _StoreCheck:
    """Faults found so far. seen: objects by content that were checked; bad: versions whose delta cannot be used."""

    reader: Reader
    store_id: str
    progress: Progress
    problems: list[DeltaError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pruned: set[int] = field(default_factory=set)
    anchors: dict[int, int] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)
    nbytes: int = 0
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def add(self, exc: DeltaError, version: int) -> None:
        """Note a fault, and make sure that it names the version."""
        what = f"version {version}"
        self.problems.append(exc if what in str(exc) else type(exc)(f"{what}: {exc}"))

    @contextlib.contextmanager
    def collect(self, version: int) -> Iterator[None]:
        """Note a fault instead of raising it."""
        try:
            yield
        except DeltaError as exc:
            self.add(exc, version)

    # ------------------------------------------------------------ manifests

    def read_manifests(self) -> None:
        """Read all manifests and hold each against the one before."""
        store, before = self.reader.store, None
        versions = listed_versions(store)
        due = 0
        for version in versions:
            if version != due:
                gap = f"version {due}" if version - due == 1 else f"versions {due}-{version - 1}"
                self.problems.append(ChainError(f"no manifest of {gap}, but version {version} is there"))
                before = None
            due = version + 1
            self.progress(f"manifest {version} of {versions[-1]}")
            try:
                entry = read_entry(store, version)
            except DeltaError as exc:
                self.add(exc, version)
                before = None
                continue
            if entry.manifest.store_id != self.store_id:
                self.add(FormatError(f"it belongs to store {entry.manifest.store_id}, not {self.store_id}"), version)
            elif before is not None:
                with self.collect(version):
                    check_link(before, entry)
            self.reader.history[version] = before = entry

    def find_pruned(self) -> None:
        """Find the versions whose data is declared gone."""
        keys = set(self.reader.store.keys("pruned/"))
        self.pruned = {v for v in self.reader.history if pruned_key(v) in keys}

    def find_anchors(self) -> None:
        """Find the versions that have an anchor."""
        self.anchors = self.reader.anchors()

    def require_reachable(self) -> None:
        """Note if a newcomer cannot get to the head although no object is damaged."""
        head = self.reader.head
        if head is None:
            self.notes.append("the store has no version yet")
        elif not self.problems:
            with self.collect(head.manifest.version):
                plan(self.reader.history, head.manifest.version, local=None, anchors=self.anchors, missing=self.pruned)

    # ------------------------------------------------------------ one version

    def check_version(self, version: int) -> Delta | None:
        """Check all that a manifest names but anchors; returns the delta of a `delta` version that is whole."""
        manifest = self.reader.manifest(version)
        self._once("layouts", manifest.layout, version, lambda: self.reader.layout(manifest.layout))
        if self._layout(version) is None:
            # Nothing else of the version can be read, and the layout is listed already.
            self.bad.add(version)
            return None
        self._once("placements", manifest.placement, version, lambda: self.reader.placement(manifest))
        if manifest.partition is not None:
            self._once("partitions", manifest.partition, version, lambda: self.reader.tiling(manifest))
        for side in manifest.side_files:
            self._once("files", side.sha256, version, partial(self._require_side_file, side))
        with self.collect(version):
            self._require_totals(manifest)
        with self.collect(version):
            self._require_same_state(manifest)
        if manifest.kind != "delta" or version in self.pruned:
            return None
        return self._check_shards(version, manifest)

    def _layout(self, version: int) -> Layout | None:
        try:
            return self.reader.layout(self.reader.manifest(version).layout)
        except DeltaError:
            return None

    def _once(self, kind: str, content: str, version: int, load: Callable[[], object]) -> None:
        if (kind, content) not in self._seen:
            self._seen.add((kind, content))
            with self.collect(version):
                load()

    def _require_side_file(self, side: SideFile) -> None:
        nbytes = len(self.reader.side_file(side))
        if nbytes != side.nbytes:
            raise FormatError(f"side file {side.name} has {nbytes} bytes, the manifest says {side.nbytes}")

    def _require_totals(self, manifest: Manifest) -> None:
        totals, stored = manifest.totals, sum(s.nbytes for s in manifest.shards)
        if totals.stored != stored:
            raise FormatError(f"its totals say {totals.stored} stored bytes, its shards have {stored}")
        layout = self.reader.layout(manifest.layout)
        if (totals.raw, totals.elements) != (layout.total_bytes, layout.total_elements):
            raise FormatError(
                f"its totals say {totals.elements} elements in {totals.raw} bytes, "
                f"its layout has {layout.total_elements} in {layout.total_bytes}"
            )
        if totals.changed > totals.elements:
            raise FormatError(f"its totals say {totals.changed} changed elements of {totals.elements}")

    def _require_same_state(self, manifest: Manifest) -> None:
        """A version without payload has the state of its base. The state of a delta is checked with its shards."""
        base = self.reader.history.get(manifest.base) if manifest.base is not None else None
        if base is None or manifest.kind not in ("empty", "rewind"):
            return
        if (manifest.layout, manifest.state) != (base.manifest.layout, base.manifest.state):
            raise FormatError(
                f"it is {manifest.kind} and has state {manifest.state}, "
                f"but its base, version {manifest.base}, has {base.manifest.state}"
            )

    def _check_shards(self, version: int, manifest: Manifest) -> Delta | None:
        try:
            delta = self.reader.delta(version)
            for fetched in delta.fetched:
                self.reader.check_frames(fetched)
        except DeltaError as exc:
            self.bad.add(version)
            if isinstance(exc, NotFound) and self.reader.is_pruned(version):
                # Pruned since the listing.
                self.pruned.add(version)
                return None
            for fault in self._shard_faults(manifest) or [exc]:
                self.add(fault, version)
            return None
        self.nbytes += delta.nbytes
        return delta

    def _shard_faults(self, manifest: Manifest) -> list[DeltaError]:
        """Look at every shard of a version that cannot be used as a whole."""
        try:
            tiling = self.reader.tiling(manifest)
        except DeltaError:
            return []  # listed already, and without it no shard can be read

        def fault(shard: Shard) -> DeltaError | None:
            try:
                self.reader.check_frames(self.reader.fetch(shard, tiling, manifest.version))
            except DeltaError as exc:
                return exc
            return None

        return [found for shard in manifest.shards if (found := fault(shard))]

    # ------------------------------------------------------------ anchors

    def check_anchor(self, version: int) -> AnchorSource | None:
        """Check the record and every file of an anchor; returns it if it is whole."""
        if self._layout(version) is None:
            return None
        try:
            source = self.reader.anchor(version)
        except ConfigError as exc:
            # The only ConfigError: its files are somewhere else, and nobody said where.
            self.notes.append(f"not checked: {exc}")
            return None
        except DeltaError as exc:
            self.add(exc, version)
            return None
        before = len(self.problems)
        prefix = "" if source.anchor.folder is None else f"{source.anchor.folder}/"
        for file in source.anchor.files:
            self.progress(f"anchor of version {version}: {file.name}")
            with self.collect(version):
                self._check_file(source.store, prefix + file.name, file, version)
        return source if len(self.problems) == before else None

    def _check_file(self, store: Store, key: str, file: AnchorFile, version: int) -> None:
        what = f"anchor of version {version}: {key}"
        nbytes = store.size(key)
        if nbytes != file.nbytes:
            raise IntegrityError(f"{what}: {nbytes} bytes found, {file.nbytes} expected")
        fast, slow = xxhash.xxh3_128(), hashlib.sha256()
        chunk = memoryview(bytearray(min(_CHUNK, nbytes)))
        for begin in range(0, nbytes, _CHUNK):
            part = chunk[: min(_CHUNK, nbytes - begin)]
            store.read_into(key, part, offset=begin)
            fast.update(part)
            if file.sha256 is not None:
                slow.update(part)
        self.nbytes += nbytes
        if fast.hexdigest() != file.xxh3_128 or file.sha256 not in (None, slow.hexdigest()):
            raise IntegrityError(f"{what}: checksum differs; make another anchor")


# ---------------------------------------------------------------- rebuild


class _Arena:
    """Memory for the tensors of a layout in a temporary file: its pages need no anonymous memory."""

    def __init__(self, layout: Layout, scratch: str | None) -> None:
        room = -(-layout.nbytes // _ALIGN) * _ALIGN
        nbytes = max(_ALIGN, int(room.sum()))
        try:
            with tempfile.TemporaryFile(prefix="deltackpt-verify-", dir=scratch) as file:
                # Reserved, so that a full disk is an error here and not a signal later.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self._map = mmap.mmap(file.fileno(), nbytes)
        except OSError as exc:
            raise store_error(exc, f"{nbytes} bytes of scratch in {scratch or tempfile.gettempdir()}") from exc
        base = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])
        self.addresses: U64 = (np.cumsum(room) - room).astype(np.uint64) + np.uint64(base)

    def close(self) -> None:
        self._map.close()


class _Rebuild:
    """Goes through the versions of a store as a follower would, with one copy of the weights in a temporary file."""

    def __init__(self, check: _StoreCheck, scratch: str | None) -> None:
        self._check, self._reader, self._scratch = check, check.reader, scratch
        self._held: int | None = None
        self._arena: _Arena | None = None
        self._layout: Layout | None = None
        self._table: U64 = np.empty(0, np.uint64)
        self.count = 0
        self.skipped: list[int] = []

    def __enter__(self) -> _Rebuild:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def _drop(self) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena, self._held = None, None

    def visit(self, version: int, delta: Delta | None, anchor: AnchorSource | None) -> None:
        """Bring the copy to `version` and compare all its bytes; also those of its anchor.

        Raises StoreError where there is no room for a copy, which is no fault of the store.
        """
        manifest = self._reader.manifest(version)
        steps = self._steps(manifest)
        if steps is None:
            self._held = None
            if anchor is None:
                self.skipped.append(version)
                return
            self._drop()
            self._layout = self._reader.layout(manifest.layout)
            self._arena = _Arena(self._layout, self._scratch)
        try:
            if steps is not None:
                self._walk(manifest, steps, delta)
            elif anchor is not None:
                self._load(anchor, manifest)
        except DeltaError as exc:
            # What the copy holds is not known any more.
            self._held = None
            self._check.bad.add(version)
            self._check.add(exc, version)
            return
        self._held = version
        self.count += 1
        if steps is not None and anchor is not None:
            self._compare_anchor(anchor, manifest)

    def _steps(self, manifest: Manifest) -> tuple[Step, ...] | None:
        """Return the deltas that lead from the copy to a version, None where there is no way."""
        version, gone = manifest.version, self._check.pruned | self._check.bad
        if self._held is None or manifest.kind == "full":
            return None
        if manifest.kind != "rewind" and self._held == manifest.base:
            if manifest.kind == "empty":
                return ()
            return None if version in gone else (Step(version, undo=False),)
        try:
            way: Plan = plan(self._reader.history, version, local=self._held, anchors={}, missing=gone)
        except ChainError:
            return None
        return way.steps

    def _walk(self, manifest: Manifest, steps: Iterable[Step], delta: Delta | None) -> None:
        assert self._arena is not None
        assert self._layout is not None
        threads = self._reader.threads
        for step in steps:
            own = delta if delta is not None and step.version == delta.version else self._reader.delta(step.version)
            backend.apply(own.tiling, own.staged(threads=threads), self._arena.addresses, threads=threads)
            self._table = self._table + signed(own, step)
        self._require(manifest, self._arena, self._table, "came out wrong")

    def _load(self, anchor: AnchorSource, manifest: Manifest) -> None:
        assert self._arena is not None
        read_anchor(anchor, backend.Cpu(), self._arena.addresses, self._reader.threads)
        self._table = anchor.fingerprints
        self._require(manifest, self._arena, self._table, "differs in the anchor")

    def _compare_anchor(self, anchor: AnchorSource, manifest: Manifest) -> None:
        layout = self._reader.layout(manifest.layout)
        arena = _Arena(layout, self._scratch)
        try:
            with self._check.collect(manifest.version):
                read_anchor(anchor, backend.Cpu(), arena.addresses, self._reader.threads)
                self._require(manifest, arena, self._table, "differs in the anchor")
        finally:
            arena.close()

    def _require(self, manifest: Manifest, arena: _Arena, table: U64, fault: str) -> None:
        layout = self._reader.layout(manifest.layout)
        found = backend.fingerprints(layout, arena.addresses, threads=self._reader.threads)
        if wrong := compare_fingerprints(layout, found, table):
            raise IntegrityError(f"version {manifest.version}: {named(wrong)} {fault}")
        state = fp_hex(state_fingerprint(layout.weights, found))
        if state != manifest.state:
            raise IntegrityError(f"version {manifest.version}: rebuilt state is {state}, not {manifest.state}")


def ranges(versions: Iterable[int]) -> str:
    """Write version numbers short: 0-4, 7."""
    runs: list[list[int]] = []
    for version in sorted(set(versions)):
        if runs and runs[-1][1] == version - 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# ---------------------------------------------------------------- a local folder


def verify_folder(path: str | os.PathLike[str], store: Store, *, threads: int | None = None) -> FolderReport:
    """Say which version a local folder holds, by a full pass over its weights, and where it differs from its record.

    An apply that did not finish is a fault, whatever the files hold. Raises ConfigError where there is no
    checkpoint, StoreError where there is no store.
    """
    root = os.path.abspath(path)
    if not os.path.isdir(root):
        raise ConfigError(f"{root} does not exist or is no folder; expected a folder that deltackpt pull fills")
    reader = Reader(store, threads=threads)
    reader.load()
    link = os.path.join(root, "current")
    # Resolved once: a switch meanwhile must not mix two versions.
    held = os.path.realpath(link) if os.path.islink(link) else root
    outer, record = read_record(root), read_record(held)
    check = _FolderCheck(reader, root, record)
    pending = outer.pending.version if outer is not None and outer.pending is not None else None
    if pending is not None:
        check.problems.append(
            Poisoned(
                f"{root}: an apply of version {pending} began and did not finish; run deltackpt pull to finish it, "
                "and do not load the folder before"
            )
        )
    try:
        check.look(open_folder(held), threads)
    except DeltaError as exc:
        if pending is None:
            raise
        check.problems.append(exc)
    recorded = record.version if record is not None else None
    return FolderReport(
        root, check.version, recorded, pending, check.nbytes,
        tuple(check.tensors), tuple(check.files), tuple(check.notes), tuple(check.problems),
    )  # fmt: skip


@dataclass
class _FolderCheck:
    reader: Reader
    path: str
    record: Record | None
    version: int | None = None
    nbytes: int = 0
    tensors: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[DeltaError] = field(default_factory=list)

    def look(self, folder: Folder, threads: int | None) -> None:
        """Find out what the folder holds, and hold it against its record and the store."""
        layout = folder.checkpoint.layout
        table = fingerprint_folder(folder, threads)
        folder.require_unchanged()
        self.nbytes = layout.total_bytes
        state = fp_hex(state_fingerprint(layout.weights, table))
        expected = self._recorded()
        if expected is not None and (expected.layout, expected.state) == (layout.digest, state):
            self.version = expected.version
        else:
            self.version = self.reader.identify(layout.digest, int(state, 16))
        if expected is not None and self.version != expected.version:
            self._compare(layout, table, expected)
        elif self.version is None:
            self.problems.append(
                ChainError(f"{self.path} holds no version of this store: {difference(self.reader, layout, table)}")
            )
        if self.version is not None:
            self._compare_files(folder, self.reader.manifest(self.version))

    def _recorded(self) -> Manifest | None:
        """Return the manifest of the recorded version if it is one of this store."""
        record, history = self.record, self.reader.history
        if record is None:
            self.notes.append("the folder has no record; it is known by its fingerprint only")
            return None
        if record.store_id != self.reader.info.store_id:
            self.problems.append(
                ChainError(f"{self.path} follows store {record.store_id}, this is {self.reader.info.store_id}")
            )
            return None
        entry = history.get(record.version)
        if not record.manifest:
            return None  # the first pull into it did not finish
        if entry is None or entry.digest != record.manifest:
            self.problems.append(ChainError(f"{self.path} holds version {record.version} of another stream"))
            return None
        return entry.manifest

    def _compare(self, layout: Layout, table: U64, expected: Manifest) -> None:
        """Say where the folder differs from the version that its record names."""
        where = f"{self.path}: its record says version {expected.version}"
        holds = "no version of this store" if self.version is None else f"version {self.version}"
        theirs = self.reader.layout(expected.layout)
        try:
            theirs.require_same(layout)
        except ConfigError as exc:
            self.problems.append(ChainError(f"{where}, but {str(exc).partition(';')[0]}"))
            return
        self.tensors = compare_fingerprints(layout, table, self._table(theirs, expected))
        what = named(self.tensors) if self.tensors else "something"
        self.problems.append(
            ChainError(
                f"{where}, but it holds {holds}: {what} differs ({len(self.tensors)} of {len(table)} tensors); "
                "deltackpt pull --reseed replaces it"
            )
        )

    def _table(self, layout: Layout, expected: Manifest) -> U64:
        """Return the fingerprints that the recorded version has: the record's own, if they lead to its state."""
        assert self.record is not None
        table = self.record.table()
        if len(table) == len(layout.names) and fp_hex(state_fingerprint(layout.weights, table)) == expected.state:
            return table
        return self.reader.fingerprints(expected.version)

    def _compare_files(self, folder: Folder, manifest: Manifest) -> None:
        store = LocalStore(folder.path)
        for side in manifest.side_files:
            try:
                same = store.size(side.name) == side.nbytes
                same = same and sha256(read(store, side.name, limit=side.nbytes)) == side.sha256
                fault = None if same else "differs from"
            except NotFound:
                fault = "is missing, it belongs to"
            if fault:
                self.files.append(side.name)
                self.problems.append(IntegrityError(f"{self.path}: {side.name} {fault} version {manifest.version}"))
        if not same_split(folder.checkpoint.placement, self.reader.placement(manifest)):
            self.notes.append(f"the weights are split into other files than those of version {manifest.version}")
