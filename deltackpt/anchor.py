"""Full copies of a version: what a stream starts from, and anchors made beside deltas, by anybody."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import xxhash

from deltackpt import backend
from deltackpt.chain import since_anchor
from deltackpt.checkpoint import Checkpoint, Folder, addresses, index_bytes, mapped, open_folder, placed
from deltackpt.codec import Bytes
from deltackpt.digest import U64, fp_hex, sha256, state_fingerprint
from deltackpt.errors import AlreadyExists, ConfigError, DeltaError, StoreError, Unavailable
from deltackpt.folder import CheckpointTarget, read_record
from deltackpt.follow import Follower
from deltackpt.kernels import view
from deltackpt.layout import BITS, Layout
from deltackpt.manifest import (
    LEVEL,
    Anchor,
    AnchorFile,
    Object,
    Placement,
    ShardFile,
    SideFile,
    anchor_key,
    data_prefix,
    encode,
    pruned_anchor_key,
)
from deltackpt.partition import Box
from deltackpt.reader import Reader
from deltackpt.shard import header_bytes
from deltackpt.store import LocalStore, Store, open_store, store_error, temporary_prefix
from deltackpt.writer import Draft, Upload, Writer, put_once

ANCHOR_SHARE = 0.5
"""An anchor is due when the deltas since the last one exceed this share of the weights."""
_PIECE = 16 << 20
"""Bytes read at a time from the pieces of a full copy."""
_AHEAD, _LEAST = 64 << 20, 256 << 10
"""Bytes of all pieces that are held to be used next, and of one piece at least."""


@dataclass(frozen=True)
class Weights:
    """The new weights: layout, where they go in a folder, and the address of each tensor's contiguous bytes."""

    layout: Layout
    placement: Placement
    side_files: tuple[SideFile, ...]
    addresses: U64


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
    source: Weights,
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
    files += [_put_file(writer_store, prefix, side.name, [reader.side_file(side)], put) for side in source.side_files]
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
    source: Weights, version: int, table: U64, folder: str | None, files: tuple[AnchorFile, ...], origin: str = ""
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


# ---------------------------------------------------------------- from pieces that several processes have put


@dataclass(frozen=True)
class Source:
    """Where the bytes of a box of a tensor lie, row-major: from `offset` on in an object, whose weights go to `end`."""

    store: Store
    key: str
    offset: int
    box: Box
    end: int


class _InOrder(Sequence[Bytes]):
    """Parts of an object that are made as they are asked for, one after the other."""

    def __len__(self) -> int:
        raise TypeError("how many parts there are is known at their end; iterate over them")

    @overload
    def __getitem__(self, at: int) -> Bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Bytes]: ...
    def __getitem__(self, at: int | slice) -> Bytes | Sequence[Bytes]:
        raise TypeError("parts are read in order; iterate over them")


class _Piece(_InOrder):
    """See `put_piece`."""

    def __init__(self, boxes: Callable[[int], Iterator[Bytes]], fingerprints: U64, step: Callable[[], None]) -> None:
        self._boxes, self._fingerprints, self._step = boxes, fingerprints, step

    def __iter__(self) -> Iterator[Bytes]:
        for part in self._boxes(_PIECE):
            self._step()
            yield part
        yield self._fingerprints.astype("<u8").tobytes()


def put_piece(
    store: Store, key: str, boxes: Callable[[int], Iterator[Bytes]], fingerprints: U64, step: Callable[[], None]
) -> None:
    """Put the bytes of a part: its boxes one after the other, then what each adds to the fingerprint of its tensor.

    boxes: yields their bytes, at most so many at a time, and does so anew for another try; step: called as the bytes
    are asked for. Both perhaps in another thread.
    """
    store.put(key, _Piece(boxes, fingerprints, step))


def read_piece(store: Store, key: str, nbytes: int, boxes: int) -> U64:
    """Return the fingerprints of a piece that holds so many bytes of weights."""
    out = bytearray(8 * boxes)
    store.read_into(key, memoryview(out), offset=nbytes)
    return np.frombuffer(out, "<u8").astype(np.uint64)


class _Assembled(_InOrder):
    """A checkpoint file whose tensors are read from pieces as they are asked for, some 16 MiB at a time.

    step: called between reads.
    """

    def __init__(
        self, layout: Layout, shard: ShardFile, sources: Mapping[int, Sequence[Source]], step: Callable[[], None]
    ) -> None:
        self._layout, self._shard, self._sources, self._step = layout, shard, sources, step
        entries = [(layout.names[t], layout.dtypes[t], layout.shapes[t], int(layout.nbytes[t])) for t in shard.tensors]
        self.header = header_bytes(entries, shard.metadata)
        self.nbytes = len(self.header) + sum(entry[3] for entry in entries)
        self.hasher = xxhash.xxh3_128()

    def __iter__(self) -> Iterator[Bytes]:
        self.hasher = xxhash.xxh3_128()
        self._ahead = _Ahead(len({source.key for t in self._shard.tensors for source in self._sources.get(t, ())}))
        self.hasher.update(self.header)
        yield self.header
        for t in self._shard.tensors:
            if self._layout.nbytes[t]:
                for part in self._tensor(t):
                    self._step()
                    self.hasher.update(part)
                    yield part

    def _tensor(self, t: int) -> Iterator[Bytes]:
        shape, bits = self._layout.shapes[t], BITS[self._layout.dtypes[t]]
        sources = sorted(self._sources[t], key=lambda s: s.box)
        if all(s.box[1:] == tuple((0, n) for n in shape[1:]) for s in sources):
            for source in sources:
                cells = math.prod(end - begin for begin, end in source.box)
                yield from self._ahead.read(source, 0, cells * bits // 8)
            return
        # Of the last dimension, bytes.
        whole = [*shape[:-1], shape[-1] * bits // 8]
        row = math.prod(whole[1:])
        rows = max(1, _PIECE // row)
        for begin in range(0, whole[0], rows):
            end = min(begin + rows, whole[0])
            out = np.empty((end - begin, *whole[1:]), np.uint8)
            for source in sources:
                box = [*source.box[:-1], tuple(c * bits // 8 for c in source.box[-1])]
                low, high = max(begin, box[0][0]), min(end, box[0][1])
                if low < high:
                    inner = [e - b for b, e in box[1:]]
                    first, size = (low - box[0][0]) * math.prod(inner), (high - low) * math.prod(inner)
                    found = np.concatenate([np.frombuffer(p, np.uint8) for p in self._ahead.read(source, first, size)])
                    place = (slice(low - begin, high - begin), *(slice(b, e) for b, e in box[1:]))
                    out[place] = found.reshape(high - low, *inner)
            yield memoryview(out).cast("B")


class _Ahead:
    """Reads of several objects, some of each ahead: what is small lies side by side there, and a request is dear."""

    def __init__(self, objects: int) -> None:
        self._nbytes = max(_LEAST, min(_PIECE, _AHEAD // max(1, objects)))
        self._held: dict[str, tuple[int, memoryview]] = {}

    def read(self, source: Source, first: int, nbytes: int) -> Iterator[Bytes]:
        """Yield bytes of a box, which stay what they are."""
        at, end = source.offset + first, source.offset + first + nbytes
        while at < end:
            begin, held = self._held.get(source.key, (0, memoryview(b"")))
            if not begin <= at < begin + len(held):
                begin, size = at, min(self._nbytes, source.end - at)
                held = memoryview(np.empty(size, np.uint8)).cast("B")
                source.store.read_into(source.key, held, offset=at)
                self._held[source.key] = begin, held
            part = held[at - begin : end - begin]
            at += len(part)
            yield part


def put_assembled(
    store: Store,
    prefix: str,
    layout: Layout,
    shard: ShardFile,
    sources: Mapping[int, Sequence[Source]],
    step: Callable[[], None],
) -> AnchorFile:
    """Put one file of a full copy from the pieces of all parts; another process may have put the same one."""
    parts = _Assembled(layout, shard, sources, step)
    try:
        store.put(f"{prefix}/{shard.name}", parts)
    except AlreadyExists:
        for _ in parts:
            pass
    return AnchorFile(shard.name, parts.nbytes, parts.hasher.hexdigest())


def assembled_anchor(
    store: Store,
    reader: Reader,
    prefix: str,
    source: Weights,
    version: int,
    table: U64,
    files: tuple[AnchorFile, ...],
    put: Callable[[str], None],
) -> Anchor:
    """Put the other files of a copy whose weight files were put by `put_assembled`; returns its record, not put yet."""
    placement = source.placement
    checkpoint, _ = placed(source.layout, placement)
    small = [] if placement.index is None else [(placement.index, index_bytes(checkpoint))]
    small += [(side.name, reader.side_file(side)) for side in source.side_files]
    for name, raw in small:
        with contextlib.suppress(AlreadyExists):
            _put_file(store, prefix, name, [raw], put)
        files = (*files, AnchorFile(name, len(raw), xxhash.xxh3_128_hexdigest(raw)))
    return _anchor_record(source, version, table, prefix, files)


def assembled_draft(store: Store, source: Weights, anchor: Anchor, put: Callable[[str], None]) -> Draft:
    """Return the draft of a full version from the record that `assembled_anchor` made; puts it."""
    raw, key = encode(anchor), f"{anchor.folder}/anchor.json"
    put(key)
    with contextlib.suppress(AlreadyExists):
        store.put(key, [raw])
    return _full(source, anchor, Object(key, sha256(raw)), {})


def _full(source: Weights, anchor: Anchor, record: Object, times: dict[str, float]) -> Draft:
    return Draft(
        "full", source.layout, source.placement, source.side_files, int(anchor.state, 16),
        changed=source.layout.total_elements, changed_bytes=source.layout.total_bytes,
        anchor=record, times=times,
    )  # fmt: skip


def full_draft(writer: Writer, upload: Upload, source: Weights, reference: Folder | None = None) -> Draft:
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
    return _full(source, anchor, Object(key, sha256(raw)), times)


@contextlib.contextmanager
def scratch_folder(store: Store, scratch: str | None) -> Iterator[str]:
    """Yield the path of a checkpoint folder, yet to be made, that is removed at the end.

    It lies in a local store itself, where there is room for a copy of the weights, or in `scratch`.
    """
    prefix = "deltackpt-"
    try:
        if scratch is None and isinstance(store, LocalStore):
            # By this name the next one who writes to the store sweeps it, if this process is killed.
            scratch, prefix = os.path.join(store.root, ".tmp"), temporary_prefix()
            os.makedirs(scratch, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=scratch)
    except OSError as exc:
        raise store_error(exc, f"making a temporary folder in {scratch or tempfile.gettempdir()}") from exc
    with folder as root:
        yield os.path.join(root, "checkpoint")


def make_anchor(
    url: str | Store,
    version: int | None = None,
    *,
    scratch: str | None = None,
    anchor_source: str | None = None,
    threads: int | None = None,
) -> Anchor:
    """Make a full copy of a version (the newest by default) beside its delta, from the store alone.

    scratch: folder for a temporary copy of the checkpoint; by default in a local store itself, else the system's.
    anchor_source: folder that holds the files of an anchor by reference, where there is no other to start from.
    Returns the anchor's record; if the version has one already, that one.
    """
    store = open_store(url)
    with scratch_folder(store, scratch) as path:
        target = CheckpointTarget(path)
        with Follower(url, target, anchor_source=anchor_source, threads=threads) as follower:
            prepared = follower.prepare(version)
            assert prepared is not None, "an empty folder holds no version"
            reader, manifest = follower.reader, follower.reader.manifest(prepared.version)
            if prepared.version in reader.anchors():
                prepared.discard()
                return reader.anchor(prepared.version).anchor
            if pruned_anchor_key(prepared.version) in set(store.keys("pruned/")):
                prepared.discard()
                raise ConfigError(
                    f"the anchor of version {prepared.version} was pruned and cannot be made again; "
                    "name another version, or none for the newest"
                )
            prepared.apply()
            record = read_record(target.path)
            assert record is not None
            folder = open_folder(target.path)
            with mapped([folder.file_path(n) for n in range(len(folder.checkpoint.placement.files))]) as files:
                source = Weights(
                    folder.checkpoint.layout,
                    reader.placement(manifest),
                    manifest.side_files,
                    addresses(folder.checkpoint, files),
                )
                prefix = data_prefix(prepared.version, f"anchor-{secrets.token_hex(8)}")
                keys: list[str] = []
                named = False  # whether a record names the files, or may
                try:
                    anchor = _put_anchor(store, reader, prefix, source, prepared.version, record.table(), keys.append)
                    raw = encode(anchor)
                    named = True
                    named = put_once(store, anchor_key(prepared.version), raw) == raw
                except StoreError as exc:
                    named = named and isinstance(exc, Unavailable)
                    raise
                finally:
                    if not named:
                        for key in keys:
                            with contextlib.suppress(DeltaError):
                                store.delete(key)
            return anchor if named else reader.anchor(prepared.version).anchor


def anchor_due(reader: Reader) -> bool:
    """Say whether replaying from the last anchor would fetch more than its share of the weights."""
    head = reader.head
    if head is None:
        return False
    anchors = set(reader.anchors())
    replay = sum(m.totals.stored for m in since_anchor(reader.history, anchors, head.manifest.version))
    return replay > ANCHOR_SHARE * head.manifest.totals.raw
