"""CheckpointTarget: a checkpoint folder on disk that is brought from version to version.

Three modes. `switch`: immutable folders `v<version>` and an atomic link `current`. `replace`: new files are built
beside the old ones and renamed under a journal that a later start rolls forward. `in-place`: new values are written
into the files under a redo journal of absolute values, so that replaying it twice does no harm. No mode writes through
a link. Longer than most modules because the three modes share one lock, one record and one recovery.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from deltackpt import backend
from deltackpt.backend import READ, SET, Staged
from deltackpt.chain import Plan, Step
from deltackpt.checkpoint import (
    Checkpoint,
    Folder,
    Run,
    addresses,
    copy_runs,
    create_file,
    index_bytes,
    mapped,
    open_folder,
    placed,
    replace_file,
    stamp_of,
    sync_file,
    weight_files,
)
from deltackpt.digest import U64, sha256, state_fingerprint
from deltackpt.errors import (
    Busy,
    ChainError,
    ConfigError,
    DeltaError,
    FormatError,
    IntegrityError,
    Poisoned,
    StoreError,
)
from deltackpt.kernels import fingerprint, view
from deltackpt.layout import Layout, Segments, Tiling
from deltackpt.manifest import LEVEL, Placement, Shard, decode
from deltackpt.partition import Partition
from deltackpt.reader import Delta, Reader, compare_fingerprints, named, requests, source_lacks
from deltackpt.shard import Fetched, ShardImage, assemble, parse_index
from deltackpt.store import LocalStore, Store, store_error, sync_folder

OWN = ".deltackpt"
"""Folder of this package inside a target."""
_STATE = "state.json"
_KEPT = (_STATE, "apply.log", "hook.json", "engine")
"""What stays in it from one process to the next; everything else is left over from an interrupted one."""
_KEEP = 2
"""Versions that switch mode keeps: readers of the one before `current` may still be at work."""
_COPY = 64 << 20


class Pending(msgspec.Struct, frozen=True):
    """An apply that has begun.

    moves: (from, to) below the folder; removes: files to unlink; redo: journal of in-place mode, and partition that of
    the delta in it.
    """

    version: int
    moves: tuple[tuple[str, str], ...] = ()
    removes: tuple[str, ...] = ()
    redo: str | None = None
    partition: str | None = None


class Record(msgspec.Struct, frozen=True):
    """What a folder holds. fingerprints: u64 of each tensor; stamp: (name, size, mtime in ns) of each weight file.

    pending: set from before the first change of the folder until it is whole again; then `next_` is what it becomes.
    """

    format: int
    store_id: str
    lineage: str
    version: int
    manifest: str
    layout: str
    placement: str
    fingerprints: bytes
    stamp: tuple[tuple[str, int, int], ...]
    pending: Pending | None = None
    next_: Record | None = msgspec.field(default=None, name="next")

    def table(self) -> U64:
        """Fingerprint of each tensor."""
        return np.frombuffer(self.fingerprints, "<u8").astype(np.uint64)


def read_record(path: str) -> Record | None:
    """Return the record of a folder, None where there is none."""
    try:
        with open(os.path.join(path, OWN, _STATE), "rb") as file:
            return decode(file.read(), Record, f"{path}/{OWN}/{_STATE}")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise store_error(exc, f"reading {path}/{OWN}/{_STATE}") from exc


def _write_record(path: str, record: Record) -> None:
    replace_file(os.path.join(path, OWN, _STATE), msgspec.json.encode(record) + b"\n")


class CheckpointTarget:
    """A checkpoint folder as the target of a follower.

    mode: "replace", "switch" or "in-place"; by default what the folder was made with, else replace.
    lock: a file on a local disk to lock instead of the folder, for filesystems that cannot lock.
    Between `open` and `close` no other process may change the folder (Busy).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: Literal["replace", "switch", "in-place"] | None = None,
        lock: str | None = None,
    ) -> None:
        if mode not in (None, "replace", "switch", "in-place"):
            raise ConfigError(f"mode {mode!r} is unknown; expected replace, switch or in-place")
        if not os.fspath(path):
            raise ConfigError("the path of the checkpoint folder is empty")
        self.path, self._lock_path = os.path.abspath(path), lock
        if os.path.exists(os.path.join(self.path, "store.json")):
            raise ConfigError(f"{self.path} is a store; name another folder for the checkpoint")
        switched = os.path.islink(os.path.join(self.path, "current"))
        self.mode = mode or ("switch" if switched else "replace")
        self._lock: int | None = None
        self._made = False
        self.record: Record | None = None
        self._folder: Folder | None = None
        self._begun = False
        self.settled = True

    # ------------------------------------------------------------ lock

    def _acquire(self) -> None:
        if self._lock is not None:
            return
        try:
            if not os.path.isdir(self.path):
                try:
                    os.makedirs(self.path)
                    self._made = True
                except FileExistsError:
                    # Made by another one at the same moment; a file in its place is said below.
                    if not os.path.isdir(self.path):
                        raise
            # Also where nothing would have to be written: "up to date" must not hide that the next pull will fail.
            for folder in (self.path, self._own()):
                if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
                    raise StoreError(f"{folder} is read-only for this user; pull as its owner, or into another folder")
            if self._lock_path is None:
                fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            else:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as exc:
            raise store_error(exc, f"locking {self._lock_path or self.path}") from exc
        try:
            # The kernel drops this lock when the holder dies, and only then.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(fd)
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise Busy(f"{self.path} is held by another process; wait for it to end") from exc
            raise ConfigError(
                f"{self._lock_path or self.path} cannot be locked ({exc.strerror}); "
                "name a file on a local disk with --lock"
            ) from exc
        self._lock = fd

    def close(self) -> None:
        """Release the folder. One that `open` made and nothing was put into is removed."""
        if self._lock is not None:
            if self._made:
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)
            os.close(self._lock)
            self._lock = None

    # ------------------------------------------------------------ open

    @property
    def current(self) -> str:
        """Folder that holds the weights: the target itself, or where `current` points."""
        return os.path.join(self.path, "current") if self.mode == "switch" else self.path

    def open(self, reader: Reader, *, reseed: bool = False) -> int | None:
        """Lock the folder, finish what an interrupted apply left, and return the version that it is proven to hold.

        None: it holds no weights. With reseed, weights of no version count as none, and the first look is at every
        byte. Raises Busy; ChainError naming a tensor where the folder holds something else.
        """
        self._acquire()
        if self.record is not None and not self._begun and self.record.stamp == self._stamp(self.record):
            return self.record.version
        self._require_mode()
        try:
            self._recover(reader)
            self.record, self._folder, self._begun = read_record(self.current), None, False
            return self._identify(reader, whole=reseed)
        except DeltaError:
            if not reseed:
                raise
            self.record, self._folder, self.settled = None, None, True
            return None

    def _stamp(self, record: Record) -> tuple[tuple[str, int, int], ...] | None:
        """What the weight files look like now; None if one is missing."""
        try:
            names = [name for name, _, _ in record.stamp]
            if all(os.access(os.path.join(self.current, name), os.R_OK) for name in names):
                return stamp_of(self.current, names)
        except OSError:
            pass  # one is gone
        return None

    def held(self) -> Folder | None:
        """Return the folder that the record describes, None where there is none."""
        if self._folder is None and self.record is not None:
            self._folder = open_folder(self.current)
        return self._folder

    def _require_mode(self) -> None:
        link = os.path.join(self.path, "current")
        names = [n for n in os.listdir(self.path) if n != OWN]
        if self.mode == "switch" and names and not os.path.islink(link):
            if all(n.startswith((".", "v")) for n in names):
                return
            raise ConfigError(f"{self.path} is a plain folder; switch mode needs an empty one, or use --mode replace")
        if self.mode != "switch" and os.path.islink(link):
            raise ConfigError(f"{self.path} was made by switch mode; use --mode switch")

    def _identify(self, reader: Reader, *, whole: bool) -> int | None:
        record = self.record
        if record is None and not _has_weights(self.current):
            return None
        if record is not None and record.store_id != reader.info.store_id:
            raise ChainError(f"{self.path} follows store {record.store_id}, this is {reader.info.store_id}; --reseed")
        if record is None:
            self._folder = open_folder(self.current)
            return self._adopt(reader, self._folder)
        if whole or record.stamp != self._stamp(record):
            self._folder = folder = open_folder(self.current)
            layout = folder.checkpoint.layout
            if layout.digest != record.layout:
                raise ChainError(
                    f"{self.path}: its files no longer hold the tensors of version {record.version}; --reseed"
                )
            wrong = compare_fingerprints(layout, fingerprint_folder(folder, reader.threads), record.table())
            if wrong:
                raise ChainError(
                    f"{self.path}: {named(wrong)} differs from version {record.version}; --reseed replaces it"
                )
        entry = reader.history.get(record.version)
        if entry is not None and entry.digest != record.manifest:
            raise ChainError(f"{self.path} holds version {record.version} of another stream; --reseed")
        return record.version

    def _adopt(self, reader: Reader, folder: Folder) -> int | None:
        layout = folder.checkpoint.layout
        table = fingerprint_folder(folder, reader.threads)
        version = reader.identify(layout.digest, state_fingerprint(layout.weights, table))
        if version is None:
            raise ChainError(
                f"{self.path} holds no version of this store: {difference(reader, layout, table)}; --reseed replaces it"
            )
        self.record, self.settled = make_record(reader, version, table, folder.stamp, placement=""), False
        return version

    # ------------------------------------------------------------ recovery

    def _recover(self, reader: Reader) -> None:
        """Roll an interrupted apply forward; remove what an interrupted stage left."""
        record = read_record(self.path)
        if record is not None and record.pending is not None:
            if record.pending.redo is not None:
                self._replay(reader, record)
            else:
                self._finish_moves(record)
        try:
            with os.scandir(self._own()) as entries:
                found = list(entries)
            for entry in found:
                if entry.name not in _KEPT:
                    shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise store_error(exc, f"cleaning {self._own()}") from exc

    def _own(self) -> str:
        return os.path.join(self.path, OWN)

    def _finish_moves(self, record: Record) -> None:
        """Make all moves of a pending replace that are not made yet, then declare the folder clean."""
        pending, after = record.pending, record.next_
        assert pending is not None
        assert after is not None
        try:
            for source, target in pending.moves:
                staged = os.path.join(self.path, source)
                if os.path.lexists(staged):
                    os.makedirs(os.path.dirname(os.path.join(self.path, target)), exist_ok=True)
                    _rename(staged, os.path.join(self.path, target))
            for name in pending.removes:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, name))
            for folder in {os.path.dirname(os.path.join(self.path, t)) for _, t in pending.moves} | {self.path}:
                sync_folder(folder)
        except OSError as exc:
            raise store_error(exc, f"replacing files in {self.path}") from exc
        _write_record(self.path, self._require_whole(after))

    def _require_whole(self, after: Record) -> Record:
        """Return the record of files that are all in their place. Raises Poisoned if one is not the one that was made.

        A journal alone is no proof: somebody may have emptied the folder of the staged files.
        """
        if after.stamp == self._stamp(after):
            return after
        folder = open_folder(self.path)
        layout = folder.checkpoint.layout
        if layout.digest == after.layout and not compare_fingerprints(
            layout, fingerprint_folder(folder), after.table()
        ):
            return msgspec.structs.replace(after, stamp=folder.stamp)
        raise Poisoned(
            f"{self.path}: an apply of version {after.version} was interrupted and its files are gone; --reseed"
        )

    def _replay(self, reader: Reader, record: Record) -> None:
        """Write the new values of a pending in-place apply, again or for the first time, and check all."""
        pending, after = record.pending, record.next_
        assert pending is not None
        assert pending.redo is not None
        assert after is not None
        layout = reader.layout(record.layout)
        try:
            folder = open_folder(self.path)
        except (ConfigError, FormatError) as exc:
            raise Poisoned(
                f"{self.path}: an apply was interrupted and its files no longer open; --reseed: {exc}"
            ) from exc
        if folder.checkpoint.layout.digest != record.layout:
            raise Poisoned(f"{self.path}: an apply was interrupted and its files no longer fit; --reseed")
        tiling = layout if pending.partition is None else reader.partition(pending.partition, layout)
        self._set_values(folder, tiling, _read_redo(os.path.join(self._own(), pending.redo), reader, tiling))
        wrong = compare_fingerprints(layout, fingerprint_folder(folder, reader.threads), after.table())
        if wrong:
            raise Poisoned(f"{self.path}: {named(wrong)} is damaged after an interrupted apply; --reseed")
        stamp = open_folder(self.path).stamp
        _write_record(self.path, msgspec.structs.replace(after, stamp=stamp))

    def _set_values(self, folder: Folder, tiling: Tiling, staged: Sequence[Staged]) -> None:
        files = range(len(folder.checkpoint.placement.files))
        with mapped([folder.file_path(n) for n in files], writable=True) as maps:
            # Values, not flips: writing them twice does no harm.
            backend.apply(tiling, staged, addresses(folder.checkpoint, maps), mode=SET)
        for n in files:
            sync_file(folder.file_path(n))

    # ------------------------------------------------------------ stage

    def stage(self, reader: Reader, plan: Plan) -> StagedFolder | StagedValues:
        """Fetch, check and build what leads to plan.version; the folder's own files are not touched."""
        if self.mode == "in-place" and plan.anchor is None and plan.steps:
            held = self.held()
            assert held is not None
            return StagedValues(self, reader, plan, held)
        return StagedFolder(self, reader, plan)

    def begin(self) -> None:
        """Note that the folder is about to be changed: until `commit` only what is on disk says what it holds."""
        self._begun, self._made = True, False

    def commit(self, record: Record) -> None:
        """Take over a new record after an apply."""
        self.record, self._folder, self._begun, self.settled = record, None, False, True

    def make_own(self, path: str) -> None:
        """Make this package's folder inside `path`."""
        try:
            os.makedirs(os.path.join(path, OWN), exist_ok=True)
        except OSError as exc:
            raise store_error(exc, f"writing {path}/{OWN}") from exc


def _has_weights(path: str) -> bool:
    return os.path.isdir(path) and any(
        n.endswith((".safetensors", ".safetensors.index.json")) and not n.startswith(".") for n in os.listdir(path)
    )


def _rename(source: str, target: str) -> None:
    """Rename; across filesystems copy beside the target first, so that the final name is never a partial file."""
    try:
        os.replace(source, target)
    except OSError as exc:
        if exc.errno != errno.EXDEV:
            raise
        beside = f"{target}.{secrets.token_hex(4)}.tmp"
        shutil.copy2(source, beside)
        sync_file(beside)
        os.replace(beside, target)
        os.unlink(source)


def fingerprint_folder(folder: Folder, threads: int | None = None) -> U64:
    """Return the fingerprint of each tensor: a full pass over the files."""
    checkpoint = folder.checkpoint
    with mapped([folder.file_path(n) for n in range(len(checkpoint.placement.files))]) as files:
        return backend.fingerprints(checkpoint.layout, addresses(checkpoint, files), threads=threads)


def difference(reader: Reader, layout: Layout, table: U64) -> str:
    """Say how weights of no version differ from the nearest anchor."""
    best: tuple[int, str] | None = None
    for version in sorted(reader.anchors()):
        theirs = reader.layout(reader.manifest(version).layout)
        try:
            theirs.require_same(layout)
        except ConfigError as exc:
            best = best or (len(table), str(exc).split(";")[0])
            continue
        wrong = compare_fingerprints(theirs, table, reader.anchor(version).fingerprints)
        if not wrong:
            return f"it holds version {version}"
        if best is None or len(wrong) < best[0]:
            best = (len(wrong), f"{named(wrong)} differs from version {version} ({len(wrong)} of {len(table)} tensors)")
    return best[1] if best else "it has no anchor to compare with"


def make_record(
    reader: Reader, version: int, table: U64, stamp: tuple[tuple[str, int, int], ...], *, placement: str
) -> Record:
    """Return the record of a folder that holds a version."""
    entry = reader.history[version]
    manifest = entry.manifest
    return Record(
        LEVEL, manifest.store_id, manifest.lineage, version, entry.digest, manifest.layout,
        placement, table.astype("<u8").tobytes(), stamp,
    )  # fmt: skip


class _Source:
    """Where the copied bytes come from: the target's own files or an anchor's."""

    def __init__(self, target: CheckpointTarget, reader: Reader, plan: Plan) -> None:
        if plan.anchor is None:
            held, record = target.held(), target.record
            assert held is not None
            assert record is not None
            self.store: Store = LocalStore(held.path)
            self.checkpoint = held.checkpoint
            self.keys = tuple(f.name for f in held.checkpoint.placement.files)
            self.table = record.table()
            self.name = f"{target.path} differs from version {record.version}; --reseed replaces it"
        else:
            anchor = reader.anchor(plan.anchor)
            self.store, self.keys, self.checkpoint = anchor.store, anchor.keys, anchor.checkpoint
            self.table = anchor.fingerprints
            self.name = f"the anchor of version {plan.anchor} is damaged; make another with deltackpt anchor"
            if anchor.anchor.folder is None:
                self.name = source_lacks(anchor.anchor, anchor.store)

    def copy(self, target: Checkpoint, files: Sequence[memoryview], threads: int | None) -> None:
        """Fill the data sections of mapped files."""
        chunks = [(run, begin) for run in copy_runs(self.checkpoint, target) for begin in range(0, run.nbytes, _COPY)]

        def work(item: tuple[Run, int]) -> None:
            run, begin = item
            n = min(_COPY, run.nbytes - begin)
            out = files[run.target][run.target_offset + begin :][:n]
            self.store.read_into(self.keys[run.source], out, offset=run.source_offset + begin)

        for _ in requests(self.store, work, chunks, threads):
            pass


class StagedFolder:
    """New files, built and verified beside the old ones; `apply` gives them their names."""

    def __init__(self, target: CheckpointTarget, reader: Reader, plan: Plan) -> None:
        self.target, self.version = target, plan.version
        self.manifest = reader.manifest(plan.version)
        self.placement = reader.placement(self.manifest)
        root = target.path
        target.make_own(root)
        self.stage = os.path.join(root, OWN, f"stage-{secrets.token_hex(8)}")
        try:
            os.mkdir(self.stage)
            self.built = self._needs_build(plan)
            table = self._build(reader, plan) if self.built else _Source(target, reader, plan).table
            self._side_files(reader)
            self.record = make_record(reader, plan.version, table, self._stamp(), placement=self.manifest.placement)
        except OSError as exc:
            self.discard()
            raise store_error(exc, f"writing {self.stage}") from exc
        except BaseException:
            self.discard()
            raise

    def _needs_build(self, plan: Plan) -> bool:
        held = self.target.held()
        if self.target.mode == "switch" or plan.steps or plan.anchor is not None or held is None:
            return True
        return not same_split(held.checkpoint.placement, self.placement)

    def _build(self, reader: Reader, plan: Plan) -> U64:
        layout, threads = reader.layout(self.manifest.layout), reader.threads
        checkpoint, headers = placed(layout, self.placement)
        paths = []
        for shard, header, nbytes in zip(self.placement.files, headers, checkpoint.nbytes, strict=True):
            paths.append(os.path.join(self.stage, shard.name))
            create_file(paths[-1], header, nbytes, self._mode(shard.name, shard.mode))
        source = _Source(self.target, reader, plan)
        table = source.table
        with mapped(paths, writable=True) as files:
            views = [memoryview(view(a, n)).cast("B") for a, n in zip(files, checkpoint.nbytes, strict=True)]
            source.copy(checkpoint, views, threads)
            where = addresses(checkpoint, files)
            with contextlib.closing(reader.deltas([step.version for step in plan.steps])) as deltas:
                for step, delta in zip(plan.steps, deltas, strict=True):
                    backend.apply(delta.tiling, delta.staged(threads=threads), where, threads=threads)
                    table = table + signed(delta, step)
            found = backend.fingerprints(layout, where, threads=threads)
        wrong = compare_fingerprints(layout, found, table)
        if wrong:
            raise self._explain(reader, source, layout.position[wrong[0]], wrong)
        for path in paths:
            sync_file(path)
        return table

    def _explain(self, reader: Reader, source: _Source, tensor: int, wrong: list[str]) -> DeltaError:
        """Tell a wrong base from a wrong apply, by the fingerprint of the tensor that was copied."""
        layout = source.checkpoint.layout
        raw = np.empty(int(layout.nbytes[tensor]), np.uint8)
        offset = int(source.checkpoint.offset[tensor])
        key = source.keys[int(source.checkpoint.file[tensor])]
        source.store.read_into(key, memoryview(raw).cast("B"), offset=offset)
        rows = Segments(int(layout.width[tensor]), np.array([tensor]), np.array([0]), layout.count[[tensor]])
        where = np.array([raw.__array_interface__["data"][0]], np.uint64)
        if fingerprint(rows, where, jit=False)[0] != source.table[tensor]:
            return ChainError(f"{source.name}: {named(wrong)} in {key} differs")
        return IntegrityError(f"version {self.version}: {named(wrong)} came out wrong, nothing was changed; run again")

    def _mode(self, name: str, otherwise: int) -> int:
        """A file keeps the mode that it has in the target."""
        try:
            return os.stat(os.path.join(self.target.current, name)).st_mode & 0o777
        except FileNotFoundError:
            return otherwise

    def _side_files(self, reader: Reader) -> None:
        if self.placement.index is not None and (self.built or self.target.record is None):
            checkpoint, _ = placed(reader.layout(self.manifest.layout), self.placement)
            self._put(self.placement.index, index_bytes(checkpoint), self._mode(self.placement.index, 0o644))
        for side in self.manifest.side_files:
            if self.target.mode == "switch" or _sha256_of(os.path.join(self.target.current, side.name)) != side.sha256:
                self._put(side.name, reader.side_file(side), self._mode(side.name, side.mode))

    def _put(self, name: str, data: bytes, mode: int) -> None:
        path = os.path.join(self.stage, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        create_file(path, data, len(data), mode)
        sync_file(path)

    def _names(self) -> list[str]:
        found = []
        for folder, _, names in os.walk(self.stage):
            found += [os.path.relpath(os.path.join(folder, n), self.stage) for n in names]
        return sorted(found)

    def _stamp(self) -> tuple[tuple[str, int, int], ...]:
        root = self.stage if self.built else self.target.current
        found = [(f.name, os.stat(os.path.join(root, f.name))) for f in self.placement.files]
        return tuple(sorted((name, s.st_size, s.st_mtime_ns) for name, s in found))

    def apply(self) -> None:
        """Give the new files their names. Interrupted, it is finished by the next `open`."""
        if self.target.mode == "switch":
            self._switch()
        else:
            self._replace()
        self.target.commit(self.record)

    def _replace(self) -> None:
        target = self.target
        stage = os.path.relpath(self.stage, target.path)
        moves = tuple((f"{stage}/{n}", n) for n in self._names())
        folder = target.held()
        if folder is None:
            # Whatever lies there is replaced; a file of other weights left beside the new ones would be loaded too.
            before = weight_files(target.path)
        else:
            held = folder.checkpoint.placement
            before = [f.name for f in held.files] + ([held.index] if held.index else [])
        target.begin()
        after = {f.name for f in self.placement.files} | {self.placement.index}
        removes = tuple(n for n in before if n not in after)
        start = target.record or msgspec.structs.replace(self.record, version=0, manifest="", stamp=())
        pending = Pending(self.version, moves, removes)
        record = msgspec.structs.replace(start, pending=pending, next_=self.record)
        if moves or removes:
            _write_record(target.path, record)
            target._finish_moves(record)
        else:
            _write_record(target.path, self.record)
        self.discard()

    def _switch(self) -> None:
        target = self.target
        name = f"v{self.version}"
        final, link = os.path.join(target.path, name), os.path.join(target.path, "current")
        target.make_own(self.stage)
        _write_record(self.stage, self.record)
        try:
            for folder, _, _ in os.walk(self.stage):
                sync_folder(folder)
            if os.path.lexists(link) and os.readlink(link) == name:
                # The version is rebuilt: readers are moved to the new folder, not changed under.
                name = f"v{self.version}.{secrets.token_hex(4)}"
                final = os.path.join(target.path, name)
            elif os.path.lexists(final):
                shutil.rmtree(final)
            os.rename(self.stage, final)
            sync_folder(target.path)
            temporary = os.path.join(target.path, OWN, secrets.token_hex(8))
            os.symlink(name, temporary)
            os.replace(temporary, link)
            sync_folder(target.path)
            folders = [n for n in os.listdir(target.path) if n.startswith("v") and n != name]
            folders.sort(key=lambda n: os.stat(os.path.join(target.path, n)).st_mtime_ns)
            for old in folders[: max(0, len(folders) - (_KEEP - 1))]:
                shutil.rmtree(os.path.join(target.path, old))
        except OSError as exc:
            raise store_error(exc, f"switching {target.path} to version {self.version}") from exc

    def discard(self) -> None:
        """Remove what was built."""
        shutil.rmtree(self.stage, ignore_errors=True)
        own = os.path.join(self.target.path, OWN)
        with contextlib.suppress(OSError):
            os.rmdir(own)


def _sha256_of(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return sha256(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None


def same_split(left: Placement, right: Placement) -> bool:
    """Say whether two placements put the same tensors into the same files, modes aside."""

    def plain(placement: Placement) -> Placement:
        return msgspec.structs.replace(
            placement, files=tuple(msgspec.structs.replace(f, mode=0) for f in placement.files)
        )

    return plain(left) == plain(right)


def signed(delta: Delta, step: Step) -> U64:
    """Return what walking a step adds to each fingerprint."""
    return np.zeros_like(delta.fingerprints) - delta.fingerprints if step.undo else delta.fingerprints


class StagedValues:
    """Checked deltas for in-place mode; `apply` goes from version to version, each one under its own journal."""

    def __init__(self, target: CheckpointTarget, reader: Reader, plan: Plan, held: Folder) -> None:
        self.target, self.reader, self.plan, self.version = target, reader, plan, plan.version
        manifest = reader.manifest(plan.version)
        if not same_split(held.checkpoint.placement, reader.placement(manifest)):
            raise ConfigError(
                f"version {plan.version} is split into other files; in-place cannot do that, use --mode replace"
            )
        for number in range(len(held.checkpoint.placement.files)):
            info = os.lstat(held.file_path(number))
            if stat.S_ISLNK(info.st_mode) or info.st_nlink > 1:
                raise ConfigError(
                    f"{held.file_path(number)} is a link, and writing in place would change it under its other name; "
                    "use --mode replace"
                )
        self._journal: str | None = None
        with contextlib.closing(reader.deltas([step.version for step in plan.steps])) as deltas:
            self.deltas = list(deltas)
        for delta in self.deltas:
            for _ in delta.staged(threads=reader.threads):
                pass  # decoded once before anything is touched, so that a bad payload is harmless

    def apply(self) -> None:
        """Write the new values. Interrupted, it is finished by the next `open`."""
        target, held = self.target, self.target.held()
        assert held is not None
        assert target.record is not None
        layout, table = held.checkpoint.layout, target.record.table()
        wrong = compare_fingerprints(layout, fingerprint_folder(held, self.reader.threads), table)
        if wrong:
            raise ChainError(
                f"{target.path}: {named(wrong)} differs from version {target.record.version}; --reseed replaces it"
            )
        target.begin()
        record = target.record
        for step, delta in zip(self.plan.steps, self.deltas, strict=True):
            table = table + signed(delta, step)
            manifest = self.reader.manifest(step.version)
            reached = manifest.base if step.undo else step.version
            assert reached is not None
            after = make_record(self.reader, reached, table, (), placement=manifest.placement)
            self._write(held, delta, record, after)
            record = after
        # Pending until here: a version is recorded when the files were seen to hold it.
        wrong = compare_fingerprints(layout, fingerprint_folder(held, self.reader.threads), table)
        if wrong:
            raise Poisoned(
                f"{target.path}: {named(wrong)} came out wrong in version {self.version}; pull again, or --reseed"
            )
        last = make_record(self.reader, self.version, table, open_folder(target.path).stamp, placement=record.placement)
        _write_record(target.path, last)
        target.commit(last)
        self._remove_journal()

    def _remove_journal(self) -> None:
        """Remove the journal that no record names any more; one that cannot be removed now goes at the next `open`."""
        with contextlib.suppress(OSError):
            if self._journal is not None:
                os.unlink(self._journal)
        self._journal = None

    def _write(self, held: Folder, delta: Delta, before: Record, after: Record) -> None:
        """One delta: new values into the journal, then into the files, which are `after`, unseen, from then on."""
        target, layout = self.target, held.checkpoint.layout
        staged = list(delta.staged(threads=self.reader.threads))
        files = [held.file_path(n) for n in range(len(held.checkpoint.placement.files))]
        with mapped(files) as maps:
            # READ turns flips into new values and leaves the files alone.
            change = backend.apply(delta.tiling, staged, addresses(held.checkpoint, maps), mode=READ)
        if wrong := compare_fingerprints(layout, change, after.table() - before.table()):
            raise ChainError(
                f"{target.path}: {named(wrong)} differs from version {before.version}; --reseed replaces it"
            )
        target.make_own(target.path)
        redo = f"redo-{secrets.token_hex(8)}"
        path = os.path.join(target.path, OWN, redo)
        tiling = delta.tiling
        partition = tiling.digest if isinstance(tiling, Partition) else None
        pending = Pending(after.version, redo=redo, partition=partition)
        try:
            _write_redo(path, assemble("redo/journal", [backend.pack(tiling, s) for s in staged]))
            _write_record(target.path, msgspec.structs.replace(before, pending=pending, next_=after))
        except DeltaError:
            found = read_record(target.path)
            if found is None or found.pending != pending:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        self._remove_journal()
        self._journal = path
        target._set_values(held, tiling, staged)

    def discard(self) -> None:
        """Nothing to remove: staged deltas are only in memory."""


def _write_redo(path: str, image: ShardImage) -> None:
    """Write a journal of in-place mode, durably."""
    try:
        with open(path, "xb") as file:
            file.write(msgspec.json.encode(image.shard) + b"\n")
            file.writelines(image.parts)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(os.path.dirname(path))
    except OSError as exc:
        raise store_error(exc, f"writing {path}") from exc


def _read_redo(path: str, reader: Reader, tiling: Layout | Partition) -> list[Staged]:
    """Read a journal of in-place mode. Raises Poisoned if it is gone or damaged: the values are nowhere else."""
    try:
        with open(path, "rb") as file:
            head = file.readline()
            data = memoryview(file.read())
        shard = decode(head, Shard, path)
        fetched = Fetched(shard, parse_index(shard, data, tiling), data)
        reader.check_frames(fetched)
        groups = np.unique(fetched.index.frames["group"]).tolist()
        return [backend.decode_group(tiling, g, fetched.frames(g)) for g in groups]
    except FileNotFoundError as exc:
        raise Poisoned(f"{path} is gone, and an apply was interrupted; --reseed") from exc
    except OSError as exc:
        raise store_error(exc, f"reading {path}") from exc
    except (FormatError, IntegrityError) as exc:
        raise Poisoned(f"{path} is damaged, and an apply was interrupted; --reseed: {exc}") from exc
