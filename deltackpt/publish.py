"""Publishing: one version after the other, each committed by one exclusive create.

Order of writes: shards under a unique attempt, objects by content, then the manifest. The base advances only after
that, and by the very delta that was published, so base and store cannot drift apart.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import xxhash

from deltackpt import backend
from deltackpt.chain import Entry, check_link, since_anchor
from deltackpt.checkpoint import Checkpoint, Folder, addresses, index_bytes, mapped, open_folder, placed, replace_file
from deltackpt.codec import Bytes
from deltackpt.digest import U64, fp_hex, sha256, state_fingerprint
from deltackpt.errors import AlreadyExists, ConfigError, DeltaError, Fenced, NotFound, StoreError, Unavailable
from deltackpt.folder import CheckpointTarget, difference, fingerprint_folder, read_record
from deltackpt.follow import Follower
from deltackpt.kernels import view
from deltackpt.layout import Layout
from deltackpt.manifest import (
    LEVEL,
    Anchor,
    AnchorFile,
    Manifest,
    Object,
    Placement,
    Shard,
    ShardFile,
    SideFile,
    StoreInfo,
    Totals,
    anchor_key,
    data_prefix,
    decode_manifest,
    digest,
    encode,
    manifest_key,
)
from deltackpt.reader import Reader
from deltackpt.shard import EncodedGroup, assemble
from deltackpt.store import LocalStore, Store, open_store

if TYPE_CHECKING:
    from deltackpt.tensors import Params

SHARD_BYTES = 32 << 20
"""A shard is closed when it holds this many bytes."""
_FILE_BYTES = 5 << 30
"""Weights per file of a checkpoint that has no serving checkpoint to follow."""
_ATTEMPTS = 8
"""Puts of a manifest whose outcome is unknown, about ten seconds in all."""
ANCHOR_SHARE = 0.5
"""An anchor is due when the deltas since the last one exceed this share of the weights."""


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
    except (FileNotFoundError, msgspec.MsgspecError):
        # A record that is not readable proves nothing, like one that is not there.
        return HostRecord(())


@dataclass(frozen=True)
class Draft:
    """What a version holds, before it is committed."""

    kind: Literal["full", "delta", "empty", "rewind"]
    layout: Layout
    placement: Placement
    side_files: tuple[SideFile, ...]
    state: int
    base: int | None = None
    shards: tuple[Shard, ...] = ()
    groups: frozenset[int] = frozenset()
    changed: int = 0
    anchor: Object | None = None
    times: dict[str, float] = field(default_factory=dict)


class Writer:
    """The right to commit the next version of a store.

    run_id: the run that continues the stream; without one, this host's record that it wrote the head is the authority.
    Raises ConfigError where neither holds, unless `resume` or `new_lineage` says how to go on.
    """

    def __init__(
        self,
        store: Store,
        *,
        run_id: str | None = None,
        resume: bool = False,
        new_lineage: bool = False,
        threads: int | None = None,
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
        if head is not None:
            self._require_authority(head)

    @property
    def head(self) -> Entry | None:
        """The newest version."""
        return self.reader.head

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
            with open(os.path.join(folder.path, name), "rb") as file:
                data = file.read()
            found.append(SideFile(name, self.put_object("files", data, ""), len(data), mode))
        return tuple(found)

    # ------------------------------------------------------------ commit

    def require_step(self, step: int | None) -> None:
        """Raise ConfigError if the step falls, unless resuming."""
        last = self.head.manifest.step if self.head else None
        if step is not None and last is not None and step < last and not (self.resume or self.new_lineage):
            raise ConfigError(
                f"step {step} is before step {last} of version {self.head.manifest.version}; use --resume"
            )  # type: ignore[union-attr]  # last is its step

    def commit(self, draft: Draft, *, step: int | None = None, metadata: Mapping[str, str] | None = None) -> Manifest:
        """Make a draft the next version. Raises AlreadyExists or Fenced if another publisher was first.

        Unavailable: the outcome is unknown; `settle` must come before anything else.
        """
        head = self.head
        version = head.manifest.version + 1 if head else 0
        bits = np.zeros(-(-len(draft.layout.groups) // 8) * 8, np.uint8)
        bits[list(draft.groups)] = 1
        began = time.perf_counter()
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
            present=np.packbits(bits, bitorder="little").tobytes(),
            shards=draft.shards,
            side_files=draft.side_files,
            totals=Totals(
                draft.layout.total_elements,
                draft.changed,
                draft.layout.total_bytes,
                sum(s.nbytes for s in draft.shards),
            ),
            times={k: round(v, 3) for k, v in draft.times.items()},
            metadata=dict(metadata or {}),
        )
        raw = encode(manifest)
        entry = Entry(decode_manifest(raw, version), digest(raw))
        if head is not None:
            check_link(head, entry)
        self._pending = (entry, raw)
        self._remember((*(() if head is None else (head.digest,)), entry.digest))
        self.settle()
        times = manifest.times | {"manifest_publish_ms": round((time.perf_counter() - began) * 1e3, 3)}
        return msgspec.structs.replace(manifest, times=times)

    def settle(self) -> None:
        """Put a manifest whose outcome is unknown again, the same bytes, until the store answers."""
        if self._pending is None:
            return
        entry, raw = self._pending
        version = entry.manifest.version
        for attempt in range(_ATTEMPTS):
            try:
                self.store.put(manifest_key(version), [raw])
            except AlreadyExists:
                self._require_own(entry, raw)
            except Unavailable:
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(min(2.0, 0.05 * 2**attempt))
                continue
            except DeltaError:
                self._pending = None
                raise
            self._pending = None
            self.reader.history[version] = entry
            self._remember((entry.digest,))
            return

    def _require_own(self, entry: Entry, raw: bytes) -> None:
        version = entry.manifest.version
        found = bytearray(self.store.size(manifest_key(version)))
        self.store.read_into(manifest_key(version), memoryview(found))
        if bytes(found) == raw:
            return
        self._pending = None
        other = decode_manifest(bytes(found), version)
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
        """Keep where the checkpoint of the head lies: the next publish can take it as its base."""
        self._remember(self.host.digests, path)

    def sweep(self, version: int) -> None:
        """Remove the attempts at a committed version that lost or died. Anchors and the winner are left alone."""
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


# ---------------------------------------------------------------- deltas


@dataclass
class _Upload:
    """Shards of one attempt: collected, put, and taken back if the attempt fails."""

    writer: Writer
    prefix: str
    keys: list[str] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    seconds: float = 0.0

    def put(self, groups: list[EncodedGroup]) -> None:
        image = assemble(f"{self.prefix}/{len(self.shards):05d}.safetensors", groups)
        began = time.perf_counter()
        self.keys.append(image.shard.key)
        self.writer.store.put(image.shard.key, image.parts)
        self.seconds += time.perf_counter() - began
        self.shards.append(image.shard)

    def take_back(self) -> None:
        for key in self.keys:
            with contextlib.suppress(DeltaError):
                self.writer.store.delete(key)


@contextlib.contextmanager
def _attempt(writer: Writer, kind: str = "") -> Iterator[_Upload]:
    """One attempt at the next version; whatever it has put is removed unless it ends in a commit, or may have."""
    version = writer.head.manifest.version + 1 if writer.head else 0
    upload = _Upload(writer, data_prefix(version, secrets.token_hex(8)))
    try:
        yield upload
    except BaseException:
        if writer._pending is None:
            upload.take_back()
        raise


def _encode(
    writer: Writer,
    upload: _Upload,
    layout: Layout,
    old: U64,
    new: U64,
    codec: str,
    form: str,
    keep: list[EncodedGroup] | None,
) -> tuple[U64, frozenset[int], int, dict[str, float]]:
    """Encode and put all groups. Returns fingerprint differences, groups, changed elements and times."""
    began = time.perf_counter()
    change, numbers, changed = np.zeros(len(layout.names), np.uint64), set(), 0
    waiting: list[EncodedGroup] = []
    for group in backend.encode(layout, old, new, codec=codec, form=form, threads=writer.reader.threads):
        change[group.tensor] += group.fingerprint
        numbers.add(group.group)
        changed += group.changed
        waiting.append(group)
        if keep is not None:
            keep.append(group)
        if sum(g.stored for g in waiting) >= SHARD_BYTES:
            upload.put(waiting)
            waiting = []
    if waiting:
        upload.put(waiting)
    total = time.perf_counter() - began
    times = {"encode_ms": (total - upload.seconds) * 1e3, "upload_ms": upload.seconds * 1e3}
    return change, frozenset(numbers), changed, times


def _delta(
    writer: Writer,
    upload: _Upload,
    source: _Source,
    old: U64,
    *,
    codec: str,
    form: str,
    keep: list[EncodedGroup] | None = None,
    times: dict[str, float] | None = None,
) -> Draft:
    """Return the draft of what leads from the head, whose bytes are at `old`, to the source."""
    head = writer.head
    assert head is not None
    layout = source.layout
    change, groups, changed, spent = _encode(writer, upload, layout, old, source.addresses, codec, form, keep)
    state = int(head.manifest.state, 16) + state_fingerprint(layout.weights, change)
    return Draft(
        "delta" if groups else "empty", layout, source.placement, source.side_files, state, head.manifest.version,
        tuple(upload.shards), groups, changed, times=(times or {}) | spent,
    )  # fmt: skip


@dataclass(frozen=True)
class _Source:
    """The new weights: layout, where they go in a folder, and the address of each tensor's contiguous bytes."""

    layout: Layout
    placement: Placement
    side_files: tuple[SideFile, ...]
    addresses: U64


# ---------------------------------------------------------------- full versions and anchors


def _file_parts(checkpoint: Checkpoint, headers: list[bytes], number: int, where: U64) -> list[Bytes]:
    """Return the parts of a checkpoint file: its header and its tensors, neighbours in memory joined."""
    parts: list[Bytes] = [headers[number]]
    begin, end = 0, 0
    for t in checkpoint.placement.files[number].tensors:
        nbytes = int(checkpoint.layout.nbytes[t])
        if nbytes == 0:
            continue
        address = int(where[t])
        if address != end:
            if end > begin:
                parts.append(view(begin, end - begin))
            begin = address
        end = address + nbytes
    if end > begin:
        parts.append(view(begin, end - begin))
    return parts


def _put_anchor(
    writer_store: Store,
    reader: Reader,
    prefix: str,
    source: _Source,
    version: int,
    table: U64,
    put: Callable[[str], None],
) -> Anchor:
    """Put a full copy as an ordinary checkpoint folder; returns its record, which is not put yet."""
    checkpoint, headers = placed(source.layout, source.placement)
    files = []
    for number, shard in enumerate(source.placement.files):
        parts = _file_parts(checkpoint, headers, number, source.addresses)
        files.append(_put_file(writer_store, prefix, shard.name, parts, put))
    if source.placement.index is not None:
        files.append(_put_file(writer_store, prefix, source.placement.index, [index_bytes(checkpoint)], put))
    for side in source.side_files:
        files.append(_put_file(writer_store, prefix, side.name, [reader.side_file(side)], put))
    return _anchor_record(source, version, table, prefix, tuple(files))


def _put_file(store: Store, prefix: str, name: str, parts: list[Bytes], put: Callable[[str], None]) -> AnchorFile:
    hasher, nbytes = xxhash.xxh3_128(), 0
    for part in parts:
        hasher.update(part)
        nbytes += len(part)
    put(f"{prefix}/{name}")
    store.put(f"{prefix}/{name}", parts)
    return AnchorFile(name, nbytes, hasher.hexdigest())


def _anchor_record(
    source: _Source, version: int, table: U64, folder: str | None, files: tuple[AnchorFile, ...], origin: str = ""
) -> Anchor:
    return Anchor(
        format=LEVEL,
        version=version,
        layout=source.layout.digest,
        placement=sha256(encode(source.placement)),
        state=fp_hex(state_fingerprint(source.layout.weights, table)),
        folder=folder,
        files=files,
        fingerprints=table.astype("<u8").tobytes(),
        source=origin,
    )


def _reference_files(folder: Folder) -> tuple[AnchorFile, ...]:
    """Describe files that stay where they are, by size and digest."""
    import hashlib

    found = []
    for number, shard in enumerate(folder.checkpoint.placement.files):
        with open(folder.file_path(number), "rb") as file:
            content = (
                hashlib.file_digest(file, "sha256").hexdigest()
                if hasattr(hashlib, "file_digest")
                else sha256(file.read())
            )
        with mapped([folder.file_path(number)]) as (address,):
            nbytes = folder.checkpoint.nbytes[number]
            found.append(AnchorFile(shard.name, nbytes, xxhash.xxh3_128_hexdigest(view(address, nbytes)), content))
    return tuple(found)


def _full(writer: Writer, upload: _Upload, source: _Source, reference: Folder | None = None) -> Draft:
    """Return the draft of a full version: everything, as an anchor of its own."""
    began = time.perf_counter()
    version = writer.head.manifest.version + 1 if writer.head else 0
    table = backend.fingerprints(source.layout, source.addresses, threads=writer.reader.threads)
    times = {"fingerprint_ms": (time.perf_counter() - began) * 1e3}
    began = time.perf_counter()
    if reference is None:
        anchor = _put_anchor(writer.store, writer.reader, upload.prefix, source, version, table, upload.keys.append)
    else:
        anchor = _anchor_record(source, version, table, None, _reference_files(reference), reference.path)
    raw = encode(anchor)
    key = f"{upload.prefix}/anchor.json"
    upload.keys.append(key)
    writer.store.put(key, [raw])
    times["upload_ms"] = (time.perf_counter() - began) * 1e3
    return Draft(
        "full", source.layout, source.placement, source.side_files, int(anchor.state, 16),
        changed=source.layout.total_elements, anchor=Object(key, sha256(raw)), times=times,
    )  # fmt: skip


def make_anchor(
    url: str, version: int | None = None, *, scratch: str | None = None, threads: int | None = None
) -> Anchor:
    """Make a full copy of a version (the newest by default) beside its delta, from the store alone.

    scratch: folder for a temporary copy of the checkpoint; by default in a local store itself, else the system's.
    Returns the anchor's record; if the version has one already, that one.
    """
    store = open_store(url)
    if scratch is None and isinstance(store, LocalStore):
        scratch = os.path.join(store.root, ".tmp")
        os.makedirs(scratch, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="deltackpt-anchor-", dir=scratch) as root:
        target = CheckpointTarget(os.path.join(root, "checkpoint"))
        with Follower(url, target, threads=threads) as follower:
            prepared = follower.prepare(version)
            assert prepared is not None, "an empty folder holds no version"
            reader, manifest = follower.reader, follower.reader.manifest(prepared.version)
            if prepared.version in reader.anchors():
                prepared.discard()
                return reader.anchor(prepared.version).anchor
            prepared.apply()
            record = read_record(target.path)
            assert record is not None
            folder = open_folder(target.path)
            with mapped([folder.file_path(n) for n in range(len(folder.checkpoint.placement.files))]) as files:
                source = _Source(
                    folder.checkpoint.layout,
                    reader.placement(manifest),
                    manifest.side_files,
                    addresses(folder.checkpoint, files),
                )
                prefix = data_prefix(prepared.version, f"anchor-{secrets.token_hex(8)}")
                keys: list[str] = []
                try:
                    anchor = _put_anchor(store, reader, prefix, source, prepared.version, record.table(), keys.append)
                    store.put(anchor_key(prepared.version), [encode(anchor)])
                except BaseException as exc:
                    for key in keys:
                        with contextlib.suppress(DeltaError):
                            store.delete(key)
                    if isinstance(exc, AlreadyExists):
                        return reader.anchor(prepared.version).anchor
                    raise
            return anchor


def anchor_due(reader: Reader) -> bool:
    """Say whether replaying from the last anchor would fetch more than its share of the weights."""
    head = reader.head
    if head is None:
        return False
    anchors = set(reader.anchors())
    replay = sum(m.totals.stored for m in since_anchor(reader.history, anchors, head.manifest.version))
    return replay > ANCHOR_SHARE * head.manifest.totals.raw


# ---------------------------------------------------------------- from a checkpoint folder


def publish_folder(
    checkpoint: str,
    url: str,
    *,
    base: str | None = None,
    step: int | None = None,
    run_id: str | None = None,
    resume: bool = False,
    new_lineage: bool = False,
    relayout: bool = False,
    anchor_ref: bool = False,
    anchors: bool = True,
    codec: str = "zstd",
    form: str = "sparse",
    scratch: str | None = None,
    metadata: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> Manifest:
    """Publish a checkpoint folder as the next version of the store at `url`.

    base: a folder that holds the head; without it the folder published last, if it still holds the head, or a copy
    rebuilt from the store under `scratch`. A fingerprint proves the base each time. anchor_ref: a full version leaves the weights
    where they are and names them by digest.
    """
    folder = open_folder(checkpoint)
    writer = Writer(open_store(url), run_id=run_id, resume=resume, new_lineage=new_lineage, threads=threads)
    writer.require_step(step)
    head = writer.head
    files = [folder.file_path(n) for n in range(len(folder.checkpoint.placement.files))]
    full = head is None or new_lineage
    if head is not None and not full:
        old = writer.reader.layout(head.manifest.layout)
        if old.digest != folder.checkpoint.layout.digest:
            if not relayout:
                old.require_same(folder.checkpoint.layout)
            full = True
    with mapped(files) as maps, _attempt(writer) as upload:
        source = _Source(
            folder.checkpoint.layout,
            folder.checkpoint.placement,
            writer.side_files(folder),
            addresses(folder.checkpoint, maps),
        )
        if full:
            draft = _full(writer, upload, source, folder if anchor_ref else None)
        else:
            draft = _folder_delta(writer, upload, source, base, scratch, codec=codec, form=form)
        folder.require_unchanged()
        manifest = writer.commit(draft, step=step, metadata=metadata)
    writer.remember_checkpoint(folder.path)
    writer.sweep(manifest.version)
    if anchors and not full and anchor_due(writer.reader):
        make_anchor(url, manifest.version, scratch=scratch, threads=threads)
    return manifest


def _folder_delta(
    writer: Writer, upload: _Upload, source: _Source, base: str | None, scratch: str | None, *, codec: str, form: str
) -> Draft:
    head = writer.head
    assert head is not None
    began = time.perf_counter()
    if writer.resume and (rewind := _rewind(writer, source)):
        return rewind
    with _base(writer, base, scratch) as held:
        files = [held.file_path(n) for n in range(len(held.checkpoint.placement.files))]
        with mapped(files) as maps:
            times = {"base_ms": (time.perf_counter() - began) * 1e3}
            old = addresses(held.checkpoint, maps)
            draft = _delta(writer, upload, source, old, codec=codec, form=form, times=times)
        held.require_unchanged()
        return draft


def _rewind(writer: Writer, source: _Source) -> Draft | None:
    """Return the draft of a rewind if the new weights are an earlier version's, bit for bit."""
    table = backend.fingerprints(source.layout, source.addresses, threads=writer.reader.threads)
    state = state_fingerprint(source.layout.weights, table)
    version = writer.reader.identify(source.layout.digest, state)
    head = writer.head
    assert head is not None
    if version is None:
        return None
    kind: Literal["empty", "rewind"] = "empty" if version == head.manifest.version else "rewind"
    return Draft(kind, source.layout, source.placement, source.side_files, state, version)


@contextlib.contextmanager
def _base(writer: Writer, base: str | None, scratch: str | None) -> Iterator[Folder]:
    """Yield a folder that is proven to hold the head."""
    head = writer.head
    assert head is not None
    if base is not None:
        folder = open_folder(base)
        if not _holds(writer, folder, head):
            table = fingerprint_folder(folder, writer.reader.threads)
            what = difference(writer.reader, folder.checkpoint.layout, table)
            raise ConfigError(
                f"--base {base} does not hold version {head.manifest.version}: {what}; leave it out or name another"
            )
        yield folder
        return
    known = writer.host.checkpoint
    if known is not None:
        with contextlib.suppress(DeltaError):
            folder = open_folder(known)
            if _holds(writer, folder, head):
                yield folder
                return
    if scratch is None and isinstance(writer.store, LocalStore):
        scratch = os.path.join(writer.store.root, ".tmp")
        os.makedirs(scratch, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="deltackpt-base-", dir=scratch) as root:
        target = CheckpointTarget(os.path.join(root, "checkpoint"))
        with Follower(writer.store.url, target, threads=writer.reader.threads) as follower:
            prepared = follower.prepare(head.manifest.version)
            assert prepared is not None, "an empty folder holds no version"
            prepared.apply()
        yield open_folder(target.path)


def _holds(writer: Writer, folder: Folder, head: Entry) -> bool:
    layout = folder.checkpoint.layout
    if layout.digest != head.manifest.layout:
        return False
    table = fingerprint_folder(folder, writer.reader.threads)
    return fp_hex(state_fingerprint(layout.weights, table)) == head.manifest.state


# ---------------------------------------------------------------- from a trainer's tensors


def default_placement(layout: Layout) -> Placement:
    """Return the files of a checkpoint that follows no other: in name order, cut by size, named as is usual."""
    cuts, held = [[]], 0  # type: list[list[int]], int
    for t, nbytes in enumerate(layout.nbytes.tolist()):
        if held and held + nbytes > _FILE_BYTES:
            cuts.append([])
            held = 0
        cuts[-1].append(t)
        held += nbytes
    metadata = {"format": "pt"}
    if len(cuts) == 1:
        return Placement((ShardFile("model.safetensors", tuple(cuts[0]), metadata),))
    names = [f"model-{n + 1:05d}-of-{len(cuts):05d}.safetensors" for n in range(len(cuts))]
    files = tuple(ShardFile(name, tuple(cut), metadata) for name, cut in zip(names, cuts, strict=True))
    return Placement(files, "model.safetensors.index.json")


class Publisher:
    """Publishes a trainer's tensors, step by step. Not for use by several threads at once.

    serving: the checkpoint folder that samplers load; its layout, files and side files are followed, and tensors that
    do not fit it are refused by name. Without it the first publish decides. anchors: make one in the background
    when it is due. The base, a copy of all published tensors, is held in host memory.

    On a store that has versions already, it claims the next epoch, so that an earlier publisher is fenced; the first
    publish finds out by fingerprint which version the trainer holds, or rebuilds the head from the store.
    """

    def __init__(
        self,
        url: str,
        *,
        serving: str | None = None,
        run_id: str | None = None,
        resume: bool = False,
        new_lineage: bool = False,
        codec: str = "zstd",
        form: str = "sparse",
        anchors: bool = True,
        threads: int | None = None,
    ) -> None:
        self.url, self._codec, self._form, self._anchors = url, codec, form, anchors
        self._serving = open_folder(serving) if serving is not None else None
        self._writer = Writer(open_store(url), run_id=run_id, resume=resume, new_lineage=new_lineage, threads=threads)
        self._threads = threads
        self._side_files = self._writer.side_files(self._serving) if self._serving else ()
        self._base: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._addresses: U64 | None = None
        self._layout: Layout | None = None
        self._placement: Placement | None = None
        self._unsettled: list[EncodedGroup] | None = None
        self._background: _Background | None = None
        if self._writer.head is not None and not new_lineage:
            self._writer.claim()

    def publish(
        self, params: Params, *, step: int | None = None, metadata: Mapping[str, str] | None = None
    ) -> Manifest:
        """Commit the tensors as the next version; returns after the commit.

        params: mapping or iterable of (name, torch tensor or numpy array) on the CPU; read only, not kept. Raises ConfigError
        naming a tensor that does not fit; then, as after every error, the base is what it was.
        """
        from deltackpt.tensors import collect

        self._raise_background()
        self._settle()
        live = collect(params)
        writer = self._writer
        writer.require_step(step)
        if self._serving is not None:
            self._serving.checkpoint.layout.require_same(live.layout)
        if self._layout is None and writer.head is not None and not writer.new_lineage:
            self._adopt(live.layout)
        if self._layout is not None:
            self._layout.require_same(live.layout)
        with _attempt(writer) as upload:
            if self._layout is None:
                manifest = self._first(upload, live.layout, live.addresses, step, metadata)
            else:
                manifest = self._next(upload, live.addresses, step, metadata)
        writer.sweep(manifest.version)
        self._start_anchor()
        return manifest

    def _first(
        self, upload: _Upload, layout: Layout, where: U64, step: int | None, metadata: Mapping[str, str] | None
    ) -> Manifest:
        placement = self._serving.checkpoint.placement if self._serving else default_placement(layout)
        base, held = _arena(layout, placement)
        # The base is copied first and everything is written from it: what is published is what is kept.
        for t, nbytes in enumerate(layout.nbytes.tolist()):
            if nbytes:
                view(int(held[t]), nbytes)[:] = view(int(where[t]), nbytes)
        draft = _full(self._writer, upload, _Source(layout, placement, self._side_files, held))
        manifest = self._writer.commit(draft, step=step, metadata=metadata)
        self._writer.new_lineage = False
        self._base, self._addresses, self._layout, self._placement = base, held, layout, placement
        return manifest

    def _next(self, upload: _Upload, where: U64, step: int | None, metadata: Mapping[str, str] | None) -> Manifest:
        layout, placement, held = self._layout, self._placement, self._addresses
        assert layout is not None
        assert placement is not None
        assert held is not None
        source = _Source(layout, placement, self._side_files, where)
        groups: list[EncodedGroup] = []
        draft = _delta(self._writer, upload, source, held, codec=self._codec, form=self._form, keep=groups)
        try:
            manifest = self._writer.commit(draft, step=step, metadata=metadata)
        except Unavailable:
            self._unsettled = groups
            raise
        self._advance(groups)
        self._writer.resume = False
        return manifest

    def _advance(self, groups: list[EncodedGroup]) -> None:
        """Bring the base to what was committed, by the delta itself."""
        assert self._layout is not None
        assert self._addresses is not None
        staged = (backend.decode_group(self._layout, g.group, g.frames, threads=self._threads) for g in groups)
        backend.apply(self._layout, staged, self._addresses, threads=self._threads)

    def _settle(self) -> None:
        """Find out what became of a commit without an answer, and advance if it was made."""
        if self._unsettled is not None:
            self._writer.settle()
            self._advance(self._unsettled)
            self._unsettled = None

    def _adopt(self, layout: Layout) -> None:
        """Rebuild the base from the store: version for version what the head holds."""
        head = self._writer.head
        assert head is not None
        reader = self._writer.reader
        known = reader.layout(head.manifest.layout)
        known.require_same(layout)
        placement = reader.placement(head.manifest)
        base, held = _arena(known, placement)
        from deltackpt.tensors import restore_into

        restore_into(reader, head.manifest.version, held)
        self._base, self._addresses, self._layout, self._placement = base, held, known, placement
        if not self._side_files:
            self._side_files = head.manifest.side_files

    def _start_anchor(self) -> None:
        if self._anchors and self._background is None and anchor_due(self._writer.reader):
            version = self._writer.head.manifest.version  # type: ignore[union-attr]  # something was just committed
            self._background = _Background(lambda: make_anchor(self.url, version, threads=1))

    def _raise_background(self) -> None:
        if self._background is not None and self._background.done():
            background, self._background = self._background, None
            background.result()

    def close(self) -> None:
        """Wait for an anchor that is being made; raises the error with which it ended."""
        if self._background is not None:
            background, self._background = self._background, None
            background.result()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Background:
    """One piece of work in a thread of its own; its error comes out of `result`."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as exc:  # handed to the thread that asks
                self._error = exc

        self._thread = threading.Thread(target=run, name="deltackpt-anchor")
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _arena(layout: Layout, placement: Placement) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], U64]:
    """Return memory for all tensors, file after file as a folder holds them, and their addresses in it."""
    base = np.empty(max(1, layout.total_bytes), np.uint8)
    order = np.array([t for f in placement.files for t in f.tensors], np.int64)
    sizes = layout.nbytes[order] if len(order) else layout.nbytes
    held = np.zeros(len(layout.names), np.uint64)
    held[order] = (np.cumsum(sizes) - sizes).astype(np.uint64) + np.uint64(base.__array_interface__["data"][0])
    return base, held
