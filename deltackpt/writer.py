"""The right to write to a store: authority, epochs, and the commit of one version.

Order of writes: shards under a unique attempt, objects by content, then the manifest, by one exclusive create. Longer
than most modules: who may write, and how an unknown outcome is settled, decide each other.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import msgspec
import numpy as np

from deltackpt.chain import Entry, check_link
from deltackpt.checkpoint import Folder, replace_file
from deltackpt.digest import fp_hex, sha256
from deltackpt.errors import AlreadyExists, ConfigError, DeltaError, Fenced, NotFound, StoreError, Unavailable
from deltackpt.layout import Layout
from deltackpt.manifest import (
    LEVEL,
    Manifest,
    Object,
    Placement,
    Shard,
    SideFile,
    StoreInfo,
    Totals,
    data_prefix,
    decode_manifest,
    digest,
    encode,
    manifest_key,
)
from deltackpt.partition import Partition
from deltackpt.reader import Reader
from deltackpt.shard import EncodedGroup, assemble
from deltackpt.store import Store, read, store_error

SHARD_BYTES = 16 << 20
"""A shard is closed when it holds this many bytes."""
_ATTEMPTS = 8
"""Puts of a manifest whose outcome is unknown, about ten seconds in all."""


def put_once(store: Store, key: str, raw: bytes) -> bytes:
    """Put a record that names data: the same bytes again, until the store answers.

    Returns what the key holds then: these bytes, or another writer's. Raises Unavailable where that stayed unknown:
    what the record names must be left alone. After one lost answer not even a refusal proves that nothing was written.
    """
    unknown: DeltaError | None = None
    for attempt in range(_ATTEMPTS):
        if unknown is not None:
            time.sleep(min(2.0, 0.05 * 2 ** (attempt - 1)))
        try:
            store.put(key, [raw])
            return raw
        except AlreadyExists:
            try:
                return read(store, key, limit=store.size(key))
            except DeltaError as exc:
                unknown = exc
        except Unavailable as exc:
            unknown = exc
        except StoreError as exc:
            if unknown is None:
                raise
            unknown = exc
    raise Unavailable(f"{key}: it is not known whether it was written; try again: {unknown}") from unknown


class HostRecord(msgspec.Struct, frozen=True):
    """What this host knows of a store that it publishes to. digests: of the head it wrote, or was about to write."""

    digests: tuple[str, ...]
    checkpoint: str | None = None


def host_record_path(store_id: str) -> str:
    """Return where this host keeps its record of a store."""
    root = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(root, "deltackpt", f"{store_id}.json")


def _read_host_record(store_id: str) -> HostRecord:
    try:
        with open(host_record_path(store_id), "rb") as file:
            return msgspec.json.decode(file.read(), type=HostRecord)
    except (OSError, msgspec.MsgspecError):
        # A record that is not readable proves nothing, like one that is not there.
        return HostRecord(())


@dataclass(frozen=True)
class Draft:
    """What a version holds, before it is committed. groups: numbers of the groups that the shards hold.

    partition: for a delta in parts; then its shards are those of all parts, each made by `assemble` from groups of
    `backend.encode_part`, and `state` is that of the base plus the changes of all of them.
    """

    kind: Literal["full", "delta", "empty", "rewind"]
    layout: Layout
    placement: Placement
    side_files: tuple[SideFile, ...]
    state: int
    base: int | None = None
    shards: tuple[Shard, ...] = ()
    groups: frozenset[int] = frozenset()
    changed: int = 0
    changed_bytes: int = 0
    anchor: Object | None = None
    times: dict[str, float] = field(default_factory=dict)
    partition: Partition | None = None
    needs: tuple[str, ...] = ()


class Grant(msgspec.Struct, frozen=True):
    """The right of a writer, as it gives it to the other processes of its group."""

    lineage: str
    epoch: int
    run_id: str


class Writer:
    """The right to commit the next version of a store.

    run_id: the run that continues the stream; without one, this host's record that it wrote the head is the authority.
    Raises ConfigError where neither holds, unless `resume` or `new_lineage` says how to go on. grant: the right that
    another process of the same group has proven.
    """

    def __init__(
        self,
        store: Store,
        *,
        run_id: str | None = None,
        resume: bool = False,
        new_lineage: bool = False,
        threads: int | None = None,
        grant: Grant | None = None,
    ) -> None:
        self.store, self.run_id = store, run_id or os.environ.get("DELTACKPT_RUN_ID") or ""
        self.resume, self.new_lineage = resume, new_lineage
        self.reader = Reader(store, threads=threads)
        self._make_store()
        self.reader.load()
        self.host = _read_host_record(self.reader.info.store_id)
        head = self.head
        self.epoch = head.manifest.epoch if head else 0
        self.lineage = secrets.token_hex(8) if head is None or new_lineage else head.manifest.lineage
        self._pending: tuple[Entry, bytes] | None = None
        if grant is not None:
            self.lineage, self.epoch, self.run_id = grant.lineage, grant.epoch, grant.run_id
        elif head is not None:
            self._require_authority(head)

    @property
    def head(self) -> Entry | None:
        """The newest version."""
        return self.reader.head

    @property
    def unsettled(self) -> bool:
        """Whether a commit was begun whose outcome is unknown."""
        return self._pending is not None

    def _make_store(self) -> None:
        try:
            _ = self.reader.info
        except Unavailable:
            raise
        except StoreError:
            info = StoreInfo(LEVEL, secrets.token_hex(8), time.time())
            with contextlib.suppress(AlreadyExists):
                self.store.put("store.json", [encode(info)])

    def _require_authority(self, head: Entry) -> None:
        manifest = head.manifest
        if self.resume or self.new_lineage:
            if not self.run_id and manifest.run_id and not self.new_lineage:
                self.run_id = manifest.run_id
            self.epoch += 1
            return
        if self.run_id:
            if self.run_id == manifest.run_id:
                return
            who = f"run {manifest.run_id!r}" if manifest.run_id else "a run without an id"
        elif head.digest in self.host.digests and not manifest.run_id:
            return
        else:
            who = f"run {manifest.run_id!r}" if manifest.run_id else "another host or process"
        raise ConfigError(
            f"store is at version {manifest.version}, written by {who}; to go on from it use --resume "
            "(or its --run-id), to start again use --new-lineage"
        )

    def claim(self) -> None:
        """Commit an empty version with the next epoch, so that every earlier publisher is fenced."""
        for _ in range(_ATTEMPTS):
            head = self.head
            if head is None:
                return
            manifest = head.manifest
            self.sweep(manifest.version)  # who committed it may have died before it did
            self.epoch = manifest.epoch + 1
            layout = self.reader.layout(manifest.layout)
            draft = Draft(
                "empty",
                layout,
                self.reader.placement(manifest),
                manifest.side_files,
                int(manifest.state, 16),
                manifest.version,
            )
            try:
                self.commit(draft, step=manifest.step)
                return
            except AlreadyExists:
                self.reader.refresh()
        raise Unavailable(f"{self.store.url}: other publishers commit faster than an epoch can be claimed; stop them")

    # ------------------------------------------------------------ objects

    def put_object(self, kind: str, data: bytes, suffix: str = ".json") -> str:
        """Store bytes under their digest, and return it."""
        content = sha256(data)
        key = f"{kind}/{content}{suffix}"
        try:
            self.store.size(key)
        except NotFound:
            with contextlib.suppress(AlreadyExists):
                self.store.put(key, [data])
        return content

    def side_files(self, folder: Folder) -> tuple[SideFile, ...]:
        """Store the side files of a folder."""
        found = []
        for name, mode in folder.side_files.items():
            path = os.path.join(folder.path, name)
            try:
                with open(path, "rb") as file:
                    data = file.read()
            except OSError as exc:
                raise store_error(exc, f"reading {path}") from exc
            found.append(SideFile(name, self.put_object("files", data, ""), len(data), mode))
        return tuple(found)

    # ------------------------------------------------------------ commit

    def require_step(self, step: int | None) -> None:
        """Raise ConfigError if the step falls, unless resuming."""
        if self.head is None or self.resume or self.new_lineage:
            return
        last, version = self.head.manifest.step, self.head.manifest.version
        if step is not None and last is not None and step < last:
            raise ConfigError(f"step {step} is before step {last} of version {version}; use --resume")

    def commit(self, draft: Draft, *, step: int | None = None, metadata: Mapping[str, str] | None = None) -> Manifest:
        """Make a draft the next version. Raises AlreadyExists or Fenced if another publisher was first.

        Unavailable: the outcome is unknown; `settle` must come before anything else.
        """
        began = time.perf_counter()
        raw = self.compose(draft, step=step, metadata=metadata)
        manifest = self.begin(raw)
        self.settle()
        times = manifest.times | {"manifest_publish_ms": round((time.perf_counter() - began) * 1e3, 3)}
        return msgspec.structs.replace(manifest, times=times)

    def compose(self, draft: Draft, *, step: int | None = None, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the manifest that makes a draft the next version, after the objects that it names were put."""
        head = self.head
        version = head.manifest.version + 1 if head else 0
        partition = draft.partition
        tiling = draft.layout if partition is None else partition
        bits = np.zeros(-(-len(tiling.groups) // 8) * 8, np.uint8)
        bits[list(draft.groups)] = 1
        manifest = Manifest(
            format=self.reader.info.format,
            store_id=self.reader.info.store_id,
            lineage=self.lineage,
            version=version,
            kind=draft.kind,
            layout=self.put_object("layouts", draft.layout.encoded),
            placement=self.put_object("placements", encode(draft.placement)),
            state=fp_hex(draft.state),
            nonce=secrets.token_hex(16),
            prev=head.digest if head else "",
            base=draft.base,
            epoch=self.epoch,
            run_id=self.run_id,
            step=step,
            created=time.time(),
            anchor=draft.anchor,
            needs=draft.needs,
            partition=None if partition is None else self.put_object("partitions", partition.encoded),
            present=np.packbits(bits, bitorder="little").tobytes(),
            shards=draft.shards,
            side_files=draft.side_files,
            totals=Totals(
                draft.layout.total_elements,
                draft.changed,
                draft.layout.total_bytes,
                sum(s.nbytes for s in draft.shards),
                draft.changed_bytes,
            ),
            times={k: round(v, 3) for k, v in draft.times.items()},
            metadata=dict(metadata or {}),
        )
        return encode(manifest)

    def begin(self, raw: bytes) -> Manifest:
        """Begin to commit a manifest made by `compose`, here or by another process of the group; `settle` ends it."""
        head = self.head
        version = head.manifest.version + 1 if head else 0
        entry = Entry(decode_manifest(raw, version), digest(raw))
        if head is not None:
            check_link(head, entry)
        self._remember((*(() if head is None else (head.digest,)), entry.digest))
        self._pending = (entry, raw)
        return entry.manifest

    def settle(self) -> None:
        """Put a manifest whose outcome is unknown again, the same bytes, until the store answers."""
        if self._pending is None:
            return
        entry, raw = self._pending
        version = entry.manifest.version
        try:
            found = put_once(self.store, manifest_key(version), raw)
        except Unavailable:
            raise
        except DeltaError:
            self._pending = None
            raise
        if found != raw:
            self._pending = None
            self._lost(entry, found)
        # Committed: whatever happens from here on, this version stands and its data stays.
        self.reader.history[version] = entry
        self._pending = None
        with contextlib.suppress(DeltaError):
            self._remember((entry.digest,))  # the record that was written before has this digest too
        self.sweep(version)

    def learn(self, raw: bytes) -> Manifest:
        """Take note of the next version, which another process of the group has committed."""
        manifest = self.begin(raw)
        assert self._pending is not None
        self.reader.history[manifest.version], self._pending = self._pending[0], None
        return manifest

    def forget(self) -> None:
        """Give up a commit that was begun: another process of the group has found that it was not made."""
        self._pending = None

    def _lost(self, entry: Entry, found: bytes) -> NoReturn:
        version = entry.manifest.version
        other = decode_manifest(found, version)
        if other.epoch > entry.manifest.epoch:
            raise Fenced(
                f"version {version} exists and has epoch {other.epoch}, this publisher {entry.manifest.epoch}; stop"
            )
        raise AlreadyExists(f"version {version} exists already, written by another publisher; stop one of them")

    def _remember(self, digests: tuple[str, ...], checkpoint: str | None = None) -> None:
        """Keep on this host which head it wrote."""
        self.host = HostRecord(digests, checkpoint or self.host.checkpoint)
        path = host_record_path(self.reader.info.store_id)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"{path} cannot be written ({exc.strerror}); set XDG_STATE_HOME") from exc
        replace_file(path, msgspec.json.encode(self.host))

    def remember_checkpoint(self, path: str) -> None:
        """Keep where the checkpoint of the head lies: the next publish can take it as its base, or does without."""
        with contextlib.suppress(DeltaError):
            self._remember(self.host.digests, path)

    def sweep(self, version: int) -> None:
        """Remove the attempts at a committed version that lost or died. Anchors and the winner are left alone.

        What cannot be removed now is left: the version is committed, and litter is in nobody's way.
        """
        with contextlib.suppress(StoreError):
            self._sweep(version)

    def _sweep(self, version: int) -> None:
        manifest = self.reader.manifest(version)
        named = [s.key for s in manifest.shards] + ([manifest.anchor.key] if manifest.anchor else [])
        keep = {key.rpartition("/")[0] for key in named}
        prefix = f"data/{version:020d}-"
        for key in list(self.store.keys("data/", after=prefix)):
            if not key.startswith(prefix):
                break
            folder = key.rpartition("/")[0]
            if re.fullmatch(r"[0-9a-f]{16}", folder[len(prefix) :]) and folder not in keep:
                self.store.delete(key)


_UPLOADS = 8
"""Shards that are put at a time; so many more wait in memory at most."""


@dataclass
class Upload:
    """Shards of one attempt: put by threads, and taken back if the attempt fails."""

    writer: Writer
    prefix: str
    keys: list[str] = field(default_factory=list)
    shards: tuple[Shard, ...] = ()
    _puts: list[Future[Shard]] = field(default_factory=list)
    _pool: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def parallel(self) -> Iterator[None]:
        """Let `put` work in threads; `shards` is filled at the end, when all are put."""
        with ThreadPoolExecutor(_UPLOADS, thread_name_prefix="deltackpt-put") as pool:
            self._pool = pool
            yield
            self.shards = tuple(put.result() for put in self._puts)

    def put(self, groups: list[EncodedGroup]) -> None:
        """Begin to put groups as the next shard; waits while too many are under way."""
        assert self._pool is not None
        number = len(self._puts)
        key = f"{self.prefix}/{number:05d}.safetensors"
        self.keys.append(key)

        def work() -> Shard:
            image = assemble(key, groups)
            self.writer.store.put(key, image.parts)
            return image.shard

        self._puts.append(self._pool.submit(work))
        if number >= 2 * _UPLOADS:
            self._puts[number - 2 * _UPLOADS].result()

    def take_back(self) -> None:
        for key in self.keys:
            with contextlib.suppress(DeltaError):
                self.writer.store.delete(key)


@contextlib.contextmanager
def attempt(writer: Writer, kind: str = "") -> Iterator[Upload]:
    """One attempt at the next version; whatever it has put is removed unless it ends in a commit, or may have."""
    version = writer.head.manifest.version + 1 if writer.head else 0
    upload = Upload(writer, data_prefix(version, secrets.token_hex(8)))
    try:
        yield upload
    except BaseException:
        if not writer.unsettled and version not in writer.reader.history:
            upload.take_back()
        raise
