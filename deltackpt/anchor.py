"""Full copies of a version: what a stream starts from, and anchors made beside deltas, by anybody."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from deltackpt import backend
from deltackpt.chain import since_anchor
from deltackpt.checkpoint import Checkpoint, Folder, addresses, index_bytes, mapped, open_folder, placed
from deltackpt.codec import Bytes
from deltackpt.digest import U64, fp_hex, sha256, state_fingerprint
from deltackpt.errors import ConfigError, DeltaError, StoreError, Unavailable
from deltackpt.folder import CheckpointTarget, read_record
from deltackpt.follow import Follower
from deltackpt.kernels import view
from deltackpt.layout import Layout
from deltackpt.manifest import (
    LEVEL,
    Anchor,
    AnchorFile,
    Object,
    Placement,
    SideFile,
    anchor_key,
    data_prefix,
    encode,
    pruned_anchor_key,
)
from deltackpt.reader import Reader
from deltackpt.store import LocalStore, Store, open_store, store_error, temporary_prefix
from deltackpt.writer import Draft, Upload, Writer, put_once

ANCHOR_SHARE = 0.5
"""An anchor is due when the deltas since the last one exceed this share of the weights."""


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
    return Draft(
        "full", source.layout, source.placement, source.side_files, int(anchor.state, 16),
        changed=source.layout.total_elements, changed_bytes=source.layout.total_bytes,
        anchor=Object(key, sha256(raw)), times=times,
    )  # fmt: skip


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
