"""Records of the store: manifest, placement, anchor, prune record. Pure: bytes in, records out.

Keys and rules: `manifests/FORMAT.md` sections 1 and 2. Readers ignore unknown fields and refuse unknown
`needs`; they keep the bytes they read and never encode a record again to check it.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from deltackpt.digest import sha256
from deltackpt.errors import ConfigError, FormatError, UnsupportedFormat

LEVEL = 1
"""Format level that this package writes."""
LEVELS = (1,)
"""Format levels that this package reads."""
ANS = "nvcomp-ans-6"
"""Needed where frames are ans: the bitstream of this major version of nvCOMP."""
FEATURES: frozenset[str] = frozenset({ANS})
"""Values of `needs` that this package knows."""
MAX_MANIFEST = 16 << 20
"""Bytes; a larger manifest or small record is refused before it is read."""

# The length too: in a pattern, $ also matches before a newline at the end.
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Fingerprint: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$", max_length=16)]
Checksum: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Version: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
Mode: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=0o777)]
Kind: TypeAlias = Literal["full", "delta", "empty", "rewind"]

T = TypeVar("T")


class StoreInfo(msgspec.Struct, frozen=True):
    """`store.json`: made once by exclusive create."""

    format: int
    store_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    created: float


class Shard(msgspec.Struct, frozen=True):
    """One shard of a version. frames, tensors: byte ranges of its two index tables in the object."""

    key: str
    nbytes: Count
    xxh3_128: Checksum
    frames: tuple[Count, Count]
    tensors: tuple[Count, Count]
    sha256: Digest | None = None


class SideFile(msgspec.Struct, frozen=True):
    """A file beside the weights (config, tokenizer); its bytes are under `files/<sha256>`."""

    name: str
    sha256: Digest
    nbytes: Count
    mode: Mode = 0o644


class Object(msgspec.Struct, frozen=True):
    """A small object of the store, by key and digest."""

    key: str
    sha256: Digest


class Totals(msgspec.Struct, frozen=True):
    """elements, changed: stored elements; raw, stored: bytes of the weights and of the shards.

    changed_bytes: of the changed elements.
    """

    elements: Count
    changed: Count
    raw: Count
    stored: Count
    changed_bytes: Count | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version. Its exclusive create under `manifests/<version>.json` is the commit.

    prev: digest of the manifest before it, empty for version 0. base: delta and empty: version - 1;
    rewind: the version whose state this one equals. partition: the parts of a delta, None for whole tensors.
    present: one bit per group (bit g%8 of byte g//8), set where the shards hold data of the group.
    anchor: the full copy that a `full` version starts from.
    times: stage times in ms, as known before the commit.
    """

    format: int
    store_id: str
    lineage: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    version: Version
    kind: Kind
    layout: Digest
    placement: Digest
    state: Fingerprint
    nonce: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    prev: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$", max_length=64)] = ""
    base: Version | None = None
    epoch: Count = 0
    run_id: str = ""
    step: Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)] | None = None
    created: float = 0.0
    needs: tuple[str, ...] = ()
    anchor: Object | None = None
    partition: Digest | None = None
    present: bytes = b""
    shards: tuple[Shard, ...] = ()
    side_files: tuple[SideFile, ...] = ()
    totals: Totals
    times: dict[str, float] = {}
    metadata: dict[str, str] = {}


class ShardFile(msgspec.Struct, frozen=True):
    """One safetensors file of a checkpoint folder. tensors: layout indices in offset order."""

    name: str
    tensors: tuple[Count, ...]
    metadata: dict[str, str] | None = None
    mode: Mode = 0o644


class Placement(msgspec.Struct, frozen=True):
    """Which file of a checkpoint folder holds which tensor; under `placements/<digest>.json`.

    index: name of the index file, None for a folder without one; index_metadata: its `metadata`
    object as JSON text, without `total_size`, which is always computed.
    """

    files: tuple[ShardFile, ...]
    index: str | None = None
    index_metadata: str = "{}"


class AnchorFile(msgspec.Struct, frozen=True):
    """One file of an anchor. sha256: only where the file lies outside the store (by reference)."""

    name: str
    nbytes: Count
    xxh3_128: Checksum
    sha256: Digest | None = None


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """A full copy of a version: an ordinary checkpoint folder.

    folder: key prefix of its files; None: by reference, the reader must be told where the files are
    (`source` says where they were). files: every file of the folder, or by reference the weights only.
    fingerprints: u64 little-endian of every tensor in layout order.
    """

    format: int
    version: Version
    layout: Digest
    placement: Digest
    state: Fingerprint
    folder: str | None
    files: tuple[AnchorFile, ...]
    fingerprints: bytes
    source: str = ""


class Pruned(msgspec.Struct, frozen=True):
    """Says that data of a version is gone, or will be. declared: Unix seconds of the store's clock."""

    format: int
    version: Version
    declared: float


def manifest_key(version: int) -> str:
    """Key of a version's manifest."""
    return f"manifests/{version:020d}.json"


def anchor_key(version: int) -> str:
    """Key of an anchor made beside a version's delta."""
    return f"anchors/{version:020d}.json"


def pruned_key(version: int) -> str:
    """Key of the record that says that a version's data is gone."""
    return f"pruned/{version:020d}.json"


def pruned_anchor_key(version: int) -> str:
    """Key of the record that says that the files of an anchor made beside a version's delta are gone."""
    return f"pruned/{version:020d}-anchor.json"


def data_prefix(version: int, attempt: str) -> str:
    """Key prefix of one attempt at a version's data."""
    return f"data/{version:020d}-{attempt}"


_IMMUTABLE = ("data/", "files/", "layouts/", "partitions/", "placements/")


def immutable(key: str) -> bool:
    """Say whether what is under a key never changes and is named with its checksum, so that any copy of it will do.

    Manifests do not change either, but whether there is one more of them only the store itself can tell.
    """
    return key.startswith(_IMMUTABLE)


def encode(record: msgspec.Struct) -> bytes:
    """Write a record as one line of JSON. Raises ConfigError for text that is not Unicode."""
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError as exc:
        raise ConfigError(f"a name or value is not valid Unicode ({exc.reason}); JSON cannot hold it") from exc


def digest(data: bytes) -> str:
    """Return the digest by which the next manifest names this one: of its first line."""
    return sha256(data[: data.index(b"\n") + 1] if b"\n" in data else data)


def decode(data: bytes, record: type[T], what: str) -> T:
    """Parse a record. what: named in errors. Raises FormatError with the path of the fault."""
    try:
        return msgspec.json.decode(data, type=record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise FormatError(f"{what}: {exc}") from exc


class _Header(msgspec.Struct):
    format: int = 0
    needs: tuple[str, ...] = ()


def require_level(data: bytes, what: str) -> _Header:
    """Raise UnsupportedFormat, before anything else is looked at, if a record is for a newer reader."""
    header = decode(data, _Header, what)
    if header.format not in LEVELS:
        raise UnsupportedFormat(f"{what}: format level {header.format}, this reader knows {LEVELS}; update deltackpt")
    return header


def decode_manifest(data: bytes, version: int) -> Manifest:
    """Parse the manifest of `version`; a second line may hold a signature.

    Raises UnsupportedFormat for a level or a need that this package does not know, FormatError for all else.
    """
    what = f"manifest of version {version}"
    line, newline, _ = data.partition(b"\n")
    if not newline:
        raise FormatError(f"{what}: no newline at the end of the first line, it may be cut short")
    header = require_level(line, what)
    if unknown := set(header.needs) - FEATURES:
        raise UnsupportedFormat(f"{what}: needs {sorted(unknown)}; update deltackpt")
    manifest = decode(line, Manifest, what)
    if manifest.version != version:
        raise FormatError(f"{what}: it says version {manifest.version}")
    _check(manifest, what)
    return manifest


def _check(manifest: Manifest, what: str) -> None:
    kind, version = manifest.kind, manifest.version
    if (manifest.prev == "") != (version == 0):
        raise FormatError(f"{what}: prev must be empty for version 0 and only there")
    expected = {
        "full": manifest.base is None and manifest.anchor is not None and not manifest.shards,
        "delta": manifest.base == version - 1 and bool(manifest.shards) and any(manifest.present),
        "empty": manifest.base == version - 1 and not manifest.shards and not any(manifest.present),
        "rewind": manifest.base is not None and manifest.base < version and not manifest.shards,
    }
    if not expected[kind]:
        raise FormatError(f"{what}: base, anchor, shards or present do not fit kind {kind!r}")
    if manifest.anchor is not None:
        require_key(manifest.anchor.key, f"{what}: anchor")
    if manifest.partition is not None and kind != "delta":
        raise FormatError(f"{what}: it is {kind} and has no parts, but names a partition")
    for shard in manifest.shards:
        require_key(shard.key, f"{what}: shard key")
        if not (shard.frames[0] <= shard.frames[1] <= shard.tensors[0] <= shard.tensors[1] <= shard.nbytes):
            raise FormatError(f"{what}: index ranges of {shard.key} are not inside the shard")
    names = [side.name for side in manifest.side_files]
    for name in names:
        require_file_name(name, f"{what}: side file")
    if len(set(names)) != len(names):
        raise FormatError(f"{what}: two files have the same name among its side files")


_KEY = re.compile(r"[a-z]+(/[A-Za-z0-9._+=@-]+)+")


def require_key(key: str, what: str) -> None:
    """Raise FormatError unless `key` is a plain key that stays inside the store."""
    if not _KEY.fullmatch(key) or any(p in (".", "..") for p in key.split("/")):
        raise FormatError(f"{what} {key!r} is not a plain key inside the store")


def require_file_name(name: str, what: str, *, folders: bool = True) -> None:
    """Raise FormatError unless `name` is a relative path that stays inside its folder.

    folders: whether parts separated by `/` are allowed. Hidden names and this package's own are not.
    """
    parts = name.split("/")
    bad = (
        not name
        or any(p in ("", ".", "..") or p.startswith(".") for p in parts)
        or any(ord(c) < 32 or "\ud800" <= c <= "\udfff" or c in "\\:" for c in name)
        or (len(parts) > 1 and not folders)
        or len(name.encode()) > 1024
    )
    if bad:
        raise FormatError(f"{what} {name!r} is not a plain name inside the folder")


def decode_placement(data: bytes, tensors: int) -> Placement:
    """Parse a placement for a layout of `tensors` tensors; each must stand in exactly one file."""
    placement = decode(data, Placement, "placement")
    seen = sorted(i for file in placement.files for i in file.tensors)
    if seen != list(range(tensors)):
        raise FormatError("placement: it does not name every tensor exactly once")
    names = [file.name for file in placement.files]
    if placement.index is not None:
        names.append(placement.index)
    for name in names:
        require_file_name(name, "placement: file", folders=False)
    if len(set(names)) != len(names):
        raise FormatError("placement: two files have the same name")
    if not isinstance(decode(placement.index_metadata.encode(), object, "placement: index_metadata"), dict):
        raise FormatError("placement: index_metadata is not a JSON object")
    return placement


def decode_anchor(data: bytes, version: int, tensors: int | None = None) -> Anchor:
    """Parse the anchor record of `version`; tensors: number of tensors in its layout, if known."""
    what = f"anchor of version {version}"
    require_level(data, what)
    anchor = decode(data, Anchor, what)
    if anchor.version != version:
        raise FormatError(f"{what}: it says version {anchor.version}")
    if tensors is not None and len(anchor.fingerprints) != 8 * tensors:
        raise FormatError(f"{what}: {len(anchor.fingerprints)} bytes of fingerprints for {tensors} tensors")
    if anchor.folder is not None:
        require_key(anchor.folder, f"{what}: folder")
    for file in anchor.files:
        require_file_name(file.name, f"{what}: file")
    return anchor
