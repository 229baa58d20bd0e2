"""The wire format that slime, miles and SGLang's `/pull_weights` share: folders `weight_v<version>`. Never writes.

A *delta* folder holds, of every tensor that changed, one zstd stream of `new XOR old`, or of positions and new bytes,
and the checksum of the whole new tensor; its index, written last, says so. Every other folder with weights is a *full*
one, an ordinary checkpoint. The format has no run id, no layout and no checksum of files: the sidecar adds them, for
readers that know it.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import xxhash
import zstandard

from deltackpt.checkpoint import read_header
from deltackpt.codec import Bytes
from deltackpt.digest import sha256
from deltackpt.errors import ConfigError, FormatError, IntegrityError, NotFound, Unavailable, UnsupportedFormat
from deltackpt.kernels import U8
from deltackpt.manifest import Checksum, Count, Digest, Fingerprint, decode, require_file_name, require_level
from deltackpt.shard import Header
from deltackpt.store import LocalStore, read

INDEX = "model.safetensors.index.json"
SIDECAR = ".deltackpt.json"
"""Hidden, so that a full folder that is published again does not carry it along."""
_MAX_INDEX = 256 << 20
_MAX_WINDOW = 1 << 27
_LEVEL = 1
"""Of zstd: what their publishers use."""

Encoding: TypeAlias = Literal["xor", "overwrite"]
ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite")


def _blake3(raw: Bytes) -> str:
    try:
        import blake3
    except ImportError as exc:
        raise ConfigError("blake3 checksums need the package blake3; pip install 'deltackpt[blake3]'") from exc
    return str(blake3.blake3(raw).hexdigest())


CHECKSUM = "xxh3-128"
_CHECKSUMS: Mapping[str, Callable[[Bytes], str]] = {
    CHECKSUM: xxhash.xxh3_128_hexdigest,
    "adler32": lambda raw: f"{zlib.adler32(raw):08x}",
    "blake3": _blake3,
}
"""Of all bytes of a new tensor, by the name in the index."""


def folder_name(version: int) -> str:
    """Return the name of a version's folder."""
    return f"weight_v{version:06d}"


def numbers(path: str) -> list[int]:
    """Return the versions that have a folder below `path`, sorted; none where there is no such path."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    found = [int(n[8:]) for n in names if re.fullmatch(r"weight_v[0-9]{6,18}", n)]
    return sorted(n for n in found if folder_name(n) in names)


# ---------------------------------------------------------------- records


class File(msgspec.Struct, frozen=True):
    """A shard of a delta folder as it was written."""

    name: str
    nbytes: Count
    xxh3_128: Checksum


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """What this package knows of a folder that it wrote, beside it.

    store_id, lineage, run_id, step: of the store's version with the same number. manifest, prev: digests of its
    manifest and of the one before. layout, state: of all weights after it. files: the shards of a delta.
    """

    format: int
    store_id: str
    lineage: str
    version: Count
    manifest: Digest
    prev: str
    layout: Digest
    state: Fingerprint
    run_id: str
    step: int | None
    files: tuple[File, ...]


class _Metadata(msgspec.Struct):
    delta_encoding: str | None = None
    version: int | str | None = None
    base_version: int | str | None = None
    compression_format: str | None = None
    checksum_format: str | None = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: _Metadata | None = None


@dataclass(frozen=True)
class Payload:
    """A changed tensor: its zstd stream, a view of a shard, and the checksum of all its new bytes."""

    stored: memoryview = field(repr=False)
    checksum: str


@dataclass(frozen=True)
class WireVersion:
    """A folder as it was found. base: version that a delta builds on, None for a full one.

    identity: digest of what it says of its tensors; two folders of one number from two runs differ in it. tensors: the
    changed ones of a delta by name.
    """

    number: int
    path: str
    base: int | None
    identity: str
    sidecar: Sidecar | None
    encoding: Encoding = "xor"
    checksum: str = CHECKSUM
    tensors: Mapping[str, Payload] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return folder_name(self.number)

    def decode(self, tensor: str, old: U8) -> U8:
        """Return all new bytes of a changed tensor, given the old ones. Raises FormatError, IntegrityError."""
        payload, what = self.tensors[tensor], f"{self.path}: tensor {tensor}"
        try:
            new = _DECODERS[self.encoding](payload.stored, old)
        except FormatError as exc:
            raise FormatError(f"{what}: {exc}") from exc
        except zstandard.ZstdError as exc:
            raise FormatError(f"{what}: no zstd stream of {self.encoding} for {len(old)} bytes: {exc}") from exc
        found = _CHECKSUMS[self.checksum](memoryview(new))
        if found != payload.checksum:
            raise IntegrityError(
                f"{what}: {self.checksum} of its new bytes is {found}, {payload.checksum} is expected: the folder is "
                "damaged, or made from other weights; publish it again, or begin with a full version"
            )
        return new


# ---------------------------------------------------------------- payloads


def encode_payload(mask: U8, new: U8, encoding: Encoding) -> bytes:
    """Return the stream of a tensor: one zstd frame that declares its size. mask: new XOR old; both all its bytes."""
    raw: bytes | memoryview = memoryview(mask)
    if encoding == "overwrite":
        at = np.flatnonzero(mask)
        raw = b"".join((np.uint32(len(at)).tobytes(), at.astype("<u4").tobytes(), new[at].tobytes()))
    return zstandard.ZstdCompressor(level=_LEVEL).compress(raw)


def checksum_of(new: U8) -> str:
    """Return the checksum of a tensor that this package writes."""
    return _CHECKSUMS[CHECKSUM](memoryview(new))


def index_bytes(version: int, encoding: Encoding, weight_map: Mapping[str, str]) -> bytes:
    """Return the index of a delta folder on the version before."""
    metadata = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding,
        "compression_format": "zstd", "checksum_format": CHECKSUM,
    }  # fmt: skip
    content = {"metadata": metadata, "weight_map": dict(weight_map)}
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


class _Stream:
    """A zstd stream of one or several frames, read piece by piece, so that nothing is believed about its size."""

    def __init__(self, stored: memoryview) -> None:
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._reader = reader.stream_reader(stored, read_across_frames=True)

    def fill(self, out: U8) -> None:
        done, into = 0, memoryview(out)
        while done < len(out):
            got = self._reader.readinto(into[done:])
            if not got:
                raise FormatError(f"its stream ends after {done} of {len(out)} bytes")
            done += got

    def end(self) -> None:
        if self._reader.read(1):
            raise FormatError("its stream goes on after the last byte that is due")


def _decode_xor(stored: memoryview, old: U8) -> U8:
    stream, new = _Stream(stored), np.empty(len(old), np.uint8)
    stream.fill(new)
    stream.end()
    new ^= old
    return new


def _decode_overwrite(stored: memoryview, old: U8) -> U8:
    stream, head = _Stream(stored), np.empty(4, np.uint8)
    stream.fill(head)
    count = int(head.view("<u4")[0])
    if count > len(old):
        raise FormatError(f"it overwrites {count} bytes of {len(old)}")
    at, values = np.empty(4 * count, np.uint8), np.empty(count, np.uint8)
    stream.fill(at)
    stream.fill(values)
    stream.end()
    positions = at.view("<u4").astype(np.int64)
    if np.any(np.diff(positions) <= 0):
        raise FormatError("its positions do not ascend")
    if count and positions[-1] >= len(old):
        raise FormatError(f"position {positions[-1]} lies outside its {len(old)} bytes")
    new = old.copy()
    new[positions] = values
    return new


_DECODERS: Mapping[str, Callable[[memoryview, U8], U8]] = {"xor": _decode_xor, "overwrite": _decode_overwrite}


# ---------------------------------------------------------------- folders


def open_version(path: str, number: int) -> WireVersion | None:
    """Read the folder of a version below `path`, all but a full one's weights; None: it is not whole yet.

    Only what the index names counts: it is written last, and other files may be litter. Raises FormatError naming file
    and tensor; Unavailable where a shard that the index names cannot be seen; IntegrityError where the sidecar denies
    a shard.
    """
    folder = os.path.join(path, folder_name(number))
    store = LocalStore(folder)
    try:
        raw = read(store, INDEX, limit=_MAX_INDEX)
    except NotFound:
        # Their full versions may be a single file; shards of a delta never have this name.
        if not os.path.exists(os.path.join(folder, "model.safetensors")):
            return None
        return _full(folder, number, b"")
    index = decode(raw, _Index, os.path.join(folder, INDEX))
    if index.metadata is None or index.metadata.delta_encoding is None:
        return _full(folder, number, raw)
    return _open_delta(folder, number, index.metadata, index.weight_map)


def read_sidecar(folder: str) -> Sidecar | None:
    """Return the sidecar of a folder, None where it has none. Raises UnsupportedFormat for a newer one."""
    try:
        raw = read(LocalStore(folder), SIDECAR, limit=_MAX_INDEX)
    except NotFound:
        return None
    what = os.path.join(folder, SIDECAR)
    require_level(raw, what)
    return decode(raw, Sidecar, what)


def _full(folder: str, number: int, index: bytes) -> WireVersion:
    sidecar = read_sidecar(folder)
    said = index if sidecar is None else sidecar.manifest.encode()
    return WireVersion(number, folder, None, _identity(number, None, [said]), sidecar)


def _identity(number: int, base: int | None, content: Sequence[bytes]) -> str:
    return sha256(b"\0".join([str(number).encode(), str(base).encode(), *content]))


def _open_delta(folder: str, number: int, metadata: _Metadata, weight_map: Mapping[str, str]) -> WireVersion:
    what = os.path.join(folder, INDEX)
    encoding = next((e for e in ENCODINGS if e == metadata.delta_encoding), None)
    if encoding is None:
        raise UnsupportedFormat(f"{what}: delta_encoding {metadata.delta_encoding!r}; expected xor or overwrite")
    if metadata.compression_format != "zstd":
        raise UnsupportedFormat(f"{what}: compression_format {metadata.compression_format!r}; expected zstd")
    checksum = metadata.checksum_format
    if checksum is None or checksum not in _CHECKSUMS:
        raise UnsupportedFormat(
            f"{what}: checksum_format {checksum!r} is not read; publish with {' or '.join(_CHECKSUMS)}"
        )
    _CHECKSUMS[checksum](b"")  # what it needs is missed here, before anything is read
    version, base = (_number(n, what) for n in (metadata.version, metadata.base_version))
    if version != number:
        raise FormatError(f"{what}: it says version {version}")
    if base >= number:
        raise FormatError(f"{what}: version {number} cannot build on version {base}")
    sidecar = read_sidecar(folder)
    tensors = dict(_payloads(folder, weight_map, sidecar))
    said = [f"{name}\0{tensors[name].checksum}".encode() for name in sorted(tensors)]
    return WireVersion(number, folder, base, _identity(number, base, said), sidecar, encoding, checksum, tensors)


def _number(value: int | str | None, what: str) -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise FormatError(f"{what}: version or base_version is {value!r}; expected a number")
    return int(text)


def _payloads(folder: str, weight_map: Mapping[str, str], sidecar: Sidecar | None) -> Iterator[tuple[str, Payload]]:
    """Yield what the index names. A tensor in two shards counts once: applied twice, an XOR would undo itself."""
    checksums: dict[str, tuple[str, str]] = {}
    missing = dict(weight_map)
    for name in sorted(set(weight_map.values())):
        require_file_name(name, f"{os.path.join(folder, INDEX)}: file", folders=False)
        header, data = _read_shard(folder, name, sidecar)
        for tensor in header.tensors:
            what = f"{os.path.join(folder, name)}: tensor {tensor.name}"
            if tensor.name not in weight_map:
                raise FormatError(f"{what} is not named by the index")
            if tensor.dtype != "U8" or len(tensor.shape) != 1:
                raise FormatError(f"{what} is {tensor.dtype} {list(tensor.shape)}; expected bytes, U8 in one dimension")
            checksum = (header.metadata or {}).get(tensor.name)
            if checksum is None:
                raise FormatError(f"{what} has no checksum in __metadata__")
            other, said = checksums.setdefault(tensor.name, (name, checksum))
            if said != checksum:
                raise FormatError(f"{what} has another checksum here than in {other}")
            if weight_map[tensor.name] == name:
                del missing[tensor.name]
                yield tensor.name, Payload(data[header.data + tensor.begin : header.data + tensor.end], checksum)
    for lost, name in missing.items():
        raise FormatError(f"{os.path.join(folder, INDEX)} names {lost} in {name}, which does not hold it")


def _read_shard(folder: str, name: str, sidecar: Sidecar | None) -> tuple[Header, memoryview]:
    store, what = LocalStore(folder), os.path.join(folder, name)
    try:
        data = memoryview(np.empty(store.size(name), np.uint8)).cast("B")
        store.read_into(name, data)
        if sidecar is not None:
            known = next((f for f in sidecar.files if f.name == name), None)
            if known is None or (known.nbytes, known.xxh3_128) != (len(data), xxhash.xxh3_128_hexdigest(data)):
                raise IntegrityError(f"{what}: it is not the file that {SIDECAR} names; export the version again")
        return read_header(store, name, what), data
    except NotFound as exc:
        raise Unavailable(f"{what} is named by the index, but it cannot be seen; try again") from exc
