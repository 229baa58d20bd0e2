"""Safetensors headers and delta shards: bytes to records and back. Pure.

The header parser is strict (bounded, no holes, no overlaps, no repeated names, exact end of file); it serves the
user's checkpoint files and this package's own shards, which are safetensors files too (`manifests/FORMAT.md`, 5).
"""

from __future__ import annotations

import json
import operator
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from deltackpt.codec import Bytes
from deltackpt.digest import U64, xxh3_64
from deltackpt.errors import FormatError
from deltackpt.layout import I64, Layout, tensor_nbytes
from deltackpt.manifest import Shard
from deltackpt.partition import Partition

MAX_HEADER = 100_000_000
"""Bytes of a safetensors header, as the reference reader limits it."""
ALIGN = 16
"""Frames begin at multiples of this many bytes in the shard."""
PLANE_FRAME = 1 << 18
"""Raw bytes of every frame of a plane but its last."""
MASK_FRAME = 2 << 20
"""Raw bytes of every frame of a mask but its last."""

COUNTS, GAP, VALUE, DENSE, MASK = 0, 1, 8, 16, 32
"""Plane numbers: counts; gap.0 and gap.1; value.0 ..; dense.0 ..; mask."""

FRAME = np.dtype(
    [("offset", "<u8"), ("stored", "<u4"), ("raw", "<u4"), ("group", "<u4"), ("plane", "u1"),
     ("codec", "u1"), ("outer", "u1"), ("block", "u1"), ("checksum", "<u8")]
)  # fmt: skip
"""Index record of a frame, 32 bytes. offset: in the shard; block: number of a mask frame; checksum: xxh3-64."""
CHANGE = np.dtype([("tensor", "<u4"), ("part", "<u4"), ("fingerprint", "<u8")])
"""Index record of a changed tensor, 16 bytes: what the groups of this shard add to its fingerprint."""


class Tensor(NamedTuple):
    """A header entry; begin, end: bytes in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A parsed header. tensors: in offset order; data: where the data section begins in the file."""

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str] | None
    data: int


def header_length(start: bytes, nbytes: int, what: str) -> int:
    """Return the header's length from the first bytes of a file of `nbytes`. Raises FormatError."""
    length = struct.unpack_from("<Q", start)[0] if len(start) >= 8 else None
    if length is not None and length <= MAX_HEADER and 8 + length <= nbytes:
        return int(length)
    if start.startswith(b"version https://git-lfs"):
        raise FormatError(f"{what}: a git-lfs pointer of {nbytes} bytes, not weights; fetch the real file")
    if start.lstrip()[:1] == b"<":
        raise FormatError(f"{what}: an HTML page of {nbytes} bytes, not weights; fetch the real file")
    if length is None:
        raise FormatError(f"{what}: {nbytes} bytes found, a safetensors file has at least 8; it may be cut short")
    if length > MAX_HEADER:
        raise FormatError(f"{what}: header length {length} is above the limit of {MAX_HEADER}")
    raise FormatError(f"{what}: header length {length}, but the file has only {nbytes} bytes; it is cut short")


class _Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


_decode_entry = msgspec.json.Decoder(_Entry).decode
_SPACED_COLON = re.compile(rb'"[ \t\r\n]+:')
_place = operator.attrgetter("begin", "end", "name")


def _require_no_duplicates(raw: bytes, what: str) -> None:
    def hook(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise FormatError(f"{what}: {name} is there twice (duplicate)")
            seen.add(name)

    try:
        json.loads(raw, object_pairs_hook=hook)
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"{what}: the header is not what safetensors defines: {exc}") from exc


def parse_header(raw: bytes, nbytes: int, what: str) -> Header:
    """Parse a header, without its length field, of a file of `nbytes`. what: the file, for errors."""
    if raw[:1] != b"{":
        raise FormatError(f"{what}: the header does not begin with a brace")
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        keys = 4 * len(entries) - 3 * ("__metadata__" in entries)
        metadata = msgspec.json.decode(entries.pop("__metadata__", b"null"), type=dict[str, str] | None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise FormatError(f"{what}: the header or its __metadata__ is not what safetensors defines: {exc}") from exc
    # Without escapes, and without white space before colons, each key shows as one quote and colon. Where there are
    # more than the parser kept, or where that cannot be told, a slower parser looks for keys that are there twice.
    if raw.count(b'":') != keys + len(metadata or ()) or b"\\" in raw or _SPACED_COLON.search(raw):
        _require_no_duplicates(raw, what)
    data = 8 + len(raw)
    tensors = [_tensor(name, entry, what) for name, entry in entries.items()]
    tensors.sort(key=_place)
    cursor = 0
    for tensor in tensors:
        if tensor.begin != cursor:
            kind = "overlaps the one before it" if tensor.begin < cursor else "leaves a hole before it"
            raise FormatError(f"{what}: tensor {tensor.name} begins at {tensor.begin} and {kind}, expected {cursor}")
        cursor = tensor.end
    if data + cursor != nbytes:
        last = tensors[-1].name if tensors else "none"
        raise FormatError(
            f"{what}: the tensors end at byte {data + cursor} (last tensor {last}), but {nbytes} bytes were found"
        )
    return Header(tuple(tensors), metadata, data)


def _tensor(name: str, raw: msgspec.Raw, what: str) -> Tensor:
    try:
        entry = _decode_entry(raw)
        nbytes = tensor_nbytes(name, entry.dtype, entry.shape)
    except msgspec.MsgspecError as exc:
        raise FormatError(f"{what}: tensor {name}: {exc}") from exc
    except FormatError as exc:
        raise FormatError(f"{what}: {exc}") from exc
    begin, end = entry.data_offsets
    if end - begin != nbytes:
        raise FormatError(
            f"{what}: tensor {name}: {entry.dtype}{list(entry.shape)} needs {nbytes} bytes, "
            f"data_offsets {[begin, end]} hold {end - begin}"
        )
    return Tensor(name, entry.dtype, entry.shape, begin, end)


def header_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: dict[str, str] | None, align: int = 8
) -> bytes:
    """Write a header with its length field; tensors: (name, dtype, shape, nbytes) in offset order.

    Padded with spaces so that the data section begins at a multiple of `align`.
    """
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    begin = 0
    for name, dtype, shape, nbytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
        begin += nbytes
    raw = msgspec.json.encode(entries)
    raw += b" " * (-(8 + len(raw)) % align)
    if len(raw) > MAX_HEADER:
        raise FormatError(f"a header of {len(raw)} bytes is above the limit of {MAX_HEADER}; use more files")
    return struct.pack("<Q", len(raw)) + raw


@dataclass(frozen=True)
class Frame:
    """One compressed frame. stored: its bytes; raw: bytes that it decodes into; outer: RAW without an outer codec."""

    plane: int
    block: int
    codec: int
    outer: int
    raw: int
    stored: Bytes = field(repr=False)

    @cached_property
    def checksum(self) -> int:
        """xxh3-64 of the stored bytes."""
        return xxh3_64(self.stored)


@dataclass(frozen=True)
class EncodedGroup:
    """One changed group: its frames sorted by plane and place, and what changed.

    tensor, fingerprint: changed tensors, sorted, and their fingerprint differences; changed: elements; part: whose.
    """

    group: int
    frames: tuple[Frame, ...]
    tensor: I64
    fingerprint: U64
    changed: int
    part: int = 0

    @property
    def stored(self) -> int:
        """Bytes in the shard, padding included."""
        return sum(-(-len(f.stored) // ALIGN) * ALIGN for f in self.frames)


@dataclass(frozen=True)
class ShardImage:
    """A shard ready to be stored: its parts in order, and its entry in the manifest."""

    parts: tuple[Bytes, ...]
    shard: Shard


_PADDING = bytes(ALIGN)
_OF_FRAME = ("raw", "plane", "codec", "outer", "block", "checksum")
_of_frame = operator.attrgetter(*_OF_FRAME)


def assemble(key: str, groups: Sequence[EncodedGroup]) -> ShardImage:
    """Lay groups, sorted by number, of one or more parts out as one shard."""
    touched: dict[tuple[int, int], int] = {}
    for group in groups:
        for tensor, fp in zip(group.tensor.tolist(), group.fingerprint.tolist(), strict=True):
            place = (tensor, group.part)
            touched[place] = (touched.get(place, 0) + fp) & 0xFFFFFFFFFFFFFFFF
    changes = np.array([(*place, touched[place]) for place in sorted(touched)], CHANGE)
    members = [(group.group, frame) for group in groups for frame in group.frames]
    frames = np.zeros(len(members), FRAME)
    index_nbytes = frames.nbytes + changes.nbytes
    index_nbytes += -index_nbytes % ALIGN
    entries = [("index", "U8", [index_nbytes], index_nbytes)]
    entries += [(f"group.{g.group}", "U8", [g.stored], g.stored) for g in groups]
    header = header_bytes(entries, None, ALIGN)
    begin = len(header)
    stored = np.array([len(f.stored) for _, f in members], np.int64)
    padding = -stored % ALIGN
    ends = begin + index_nbytes + np.cumsum(stored + padding)
    if members:
        frames["offset"], frames["stored"] = ends - stored - padding, stored
        frames["group"] = [group for group, _ in members]
        for name, column in zip(_OF_FRAME, zip(*(_of_frame(f) for _, f in members), strict=True), strict=True):
            frames[name] = column
    body: list[Bytes] = []
    for (_, frame), gap in zip(members, padding.tolist(), strict=True):
        body.append(frame.stored)
        if gap:
            body.append(_PADDING[:gap])
    index = (frames.tobytes() + changes.tobytes()).ljust(index_nbytes, b"\0")
    parts = (header, index, *body)
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    middle = begin + frames.nbytes
    nbytes = int(ends[-1]) if members else begin + index_nbytes
    shard = Shard(key, nbytes, hasher.hexdigest(), (begin, middle), (middle, middle + changes.nbytes))
    return ShardImage(parts, shard)


@dataclass(frozen=True)
class Index:
    """The two tables of a shard: frames (FRAME records) and changes (CHANGE records)."""

    frames: npt.NDArray[np.void]
    changes: npt.NDArray[np.void]


@dataclass(frozen=True)
class Fetched:
    """A shard in memory, checked against its checksums. index: frames of the groups that were read, and all changes.

    data: the shard, or only these frames, which then have their places there; nbytes: how many bytes were read.
    """

    shard: Shard
    index: Index
    data: memoryview = field(repr=False)
    nbytes: int = 0

    def frames(self, group: int) -> list[Frame]:
        """Return the frames of a group, sorted by plane and place; they are views of `data`."""
        records = self.index.frames
        low, high = np.searchsorted(records["group"], [group, group + 1])
        return [
            Frame(plane, block, codec, outer, raw, self.data[offset : offset + stored])
            for offset, stored, raw, _, plane, codec, outer, block, _ in records[low:high].tolist()
        ]

    def groups(self) -> Iterator[tuple[int, list[Frame]]]:
        """Yield each group's number and its frames, sorted by plane and place."""
        for group in np.unique(self.index.frames["group"]).tolist():
            yield group, self.frames(group)


def parse_index(shard: Shard, data: memoryview, tiling: Layout | Partition) -> Index:
    """Read the tables of a shard. Raises FormatError unless both are in order and in bounds.

    data: as long as the shard; only what lies before the end of the tables is looked at.
    """
    what = f"shard {shard.key}"
    header = parse_header(bytes(data[8 : 8 + header_length(bytes(data[:64]), len(data), what)]), len(data), what)
    if not header.tensors or header.tensors[0].name != "index" or shard.frames[0] != header.data:
        raise FormatError(f"{what}: the first tensor is not the index that the manifest names")
    index_end = header.data + header.tensors[0].end
    for (begin, end), record in ((shard.frames, FRAME), (shard.tensors, CHANGE)):
        if (end - begin) % record.itemsize or end > index_end:
            raise FormatError(f"{what}: index range {begin}..{end} does not hold whole records")
    frames = np.frombuffer(data[slice(*shard.frames)], FRAME)
    changes = np.frombuffer(data[slice(*shard.tensors)], CHANGE)
    # No sum wraps around: an offset beyond the shard is cut off at its end, where no frame fits.
    end = np.minimum(frames["offset"], np.uint64(len(data))) + frames["stored"]
    order = np.lexsort((frames["offset"], frames["plane"], frames["group"]))
    if np.any(order != np.arange(len(frames))):
        raise FormatError(f"{what}: frames are not sorted by group, plane and offset")
    by_offset = np.argsort(frames["offset"], kind="stable")
    begins, ends = frames["offset"][by_offset], end[by_offset]
    if len(frames) and (begins[0] < index_end or ends.max() > len(data) or np.any(begins[1:] < ends[:-1])):
        raise FormatError(f"{what}: frames overlap or lie outside the shard")
    if np.any(frames["offset"] % np.uint64(ALIGN)):
        raise FormatError(f"{what}: a frame does not begin at a multiple of {ALIGN}")
    if len(frames) and (frames["group"].max() >= len(tiling.groups) or np.any(frames["stored"] == 0)):
        raise FormatError(f"{what}: a frame is empty or names a group that the layout does not have")
    partition = tiling if isinstance(tiling, Partition) else None
    parts = 1 if partition is None else partition.parts
    pairs = changes["tensor"].astype(np.int64) * parts + changes["part"]
    if len(changes) and (changes["tensor"].max() >= len(tiling.layout.names) or np.any(pairs[1:] <= pairs[:-1])):
        raise FormatError(f"{what}: changed tensors are not sorted, or not in the layout")
    if partition is None:
        if np.any(changes["part"] != 0):
            raise FormatError(f"{what}: names a part, but the version has none")
    else:
        of_frames = [partition.part_of(g) for g in np.unique(frames["group"]).tolist()]
        if np.any(changes["part"] >= parts) or not np.isin(changes["part"], of_frames).all():
            raise FormatError(f"{what}: names a part of which it has no data")
        if not np.isin(pairs, partition.pairs).all():
            raise FormatError(f"{what}: names a tensor of which the part has no box")
    return Index(frames, changes)
