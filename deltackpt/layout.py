"""Layouts: which tensors a version has, and the tiles and groups that follow from them.

Pure: no I/O. Rules in `manifests/FORMAT.md` sections 3 and 4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from deltackpt.digest import U64, sha256, tensor_weight
from deltackpt.errors import ConfigError, FormatError

I64: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

TILE = 8192
"""Elements per tile."""
GROUP_BYTES = 256 << 20
"""Groups begin at the first tile at or past each multiple of this many bytes."""

BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one header element of each safetensors dtype."""

MAX_BYTES = 1 << 45
"""No tensor, and no checkpoint, is larger (32 TiB): the groups of a hostile layout stay countable."""

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
"""Names of torch dtypes and of the same dtypes in safetensors."""


def element_width(dtype: str) -> int:
    """Return the bytes of one stored element: 2, 4, 8, or 1 for everything of 8 bits and less."""
    return max(1, BITS[dtype] // 8)


def tensor_nbytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return a tensor's size. Raises FormatError for an unknown dtype, an impossible shape or name."""
    try:
        name.encode()
    except UnicodeEncodeError as exc:
        raise FormatError(f"tensor {name!r}: the name is not valid Unicode") from exc
    if dtype not in BITS:
        raise FormatError(f"tensor {name}: dtype {dtype!r} is unknown; expected one of {' '.join(BITS)}")
    bits = BITS[dtype]
    for extent in shape:
        if extent < 0:
            raise FormatError(f"tensor {name}: shape {list(shape)} has a negative extent")
        bits *= extent
        # At once, before hostile extents grow into a number of a million digits.
        if extent > MAX_BYTES or bits > MAX_BYTES * 8:
            raise FormatError(f"tensor {name}: a shape of {len(shape)} extents needs more than 2^45 bytes")
    if bits % 8:
        raise FormatError(f"tensor {name}: {dtype}{list(shape)} is {bits} bits, not whole bytes")
    return bits // 8


class _Tensors(TypedDict):
    tensors: list[tuple[str, str, list[int]]]


@dataclass(frozen=True)
class Boxes:
    """Boxes of tensors, in stored elements, joined to as few dimensions as they need. int64.

    tensor: index in the layout. Element e of a box, counted row-major, has the coordinates c that `extent` (n, levels)
    gives it, and is element offset + sum of c * stride of its tensor. Unused levels come first and have extent 1.
    """

    tensor: I64
    offset: I64
    extent: I64
    stride: I64

    @cached_property
    def count(self) -> I64:
        """Elements of each box."""
        count: I64 = self.extent.prod(axis=1)
        return count

    @cached_property
    def strided(self) -> Mask:
        """Whether the elements of a box do not lie side by side in its tensor."""
        found: Mask = (self.extent[:, :-1] > 1).any(axis=1) | ((self.extent[:, -1] > 1) & (self.stride[:, -1] != 1))
        return found


@dataclass(frozen=True)
class Segments:
    """Consecutive tiles of one element width, as runs of elements inside tensors or inside boxes of them.

    tensor: index in the layout; start: first element, a multiple of TILE; count: elements, at least 1.
    Arrays of equal length, int64. Tiles of a run: ceil(count / TILE). box: index in `boxes` of the box in which
    `start` counts; where boxes is None, elements are counted in the whole tensor.
    """

    width: int
    tensor: I64
    start: I64
    count: I64
    box: I64 | None = None
    boxes: Boxes | None = None

    @property
    def plain(self) -> Segments:
        """The same tiles as if every box were a tensor."""
        return self if self.boxes is None else replace(self, box=None, boxes=None)

    @cached_property
    def tiles(self) -> int:
        """Number of tiles."""
        return int((-(-self.count // TILE)).sum())

    @cached_property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return int(self.count.sum()) * self.width

    @cached_property
    def tile_lengths(self) -> I64:
        """Number of elements of each tile, in order."""
        per = -(-self.count // TILE)
        lengths = np.full(int(per.sum()), TILE, np.int64)
        lengths[np.cumsum(per) - 1] = self.count - (per - 1) * TILE
        return lengths

    def cut(self, nbytes: int) -> Iterator[Segments]:
        """Yield the same tiles in pieces that begin at multiples of `nbytes` of weights.

        A piece is longer than `nbytes` by less than one tile.
        """
        sizes = self.count * self.width
        end = np.cumsum(sizes)
        row, element = 0, 0
        for boundary in range(nbytes, self.nbytes + nbytes, nbytes):
            # The cut lies in the run that holds the boundary, at its first tile at or past it.
            last = min(int(np.searchsorted(end, boundary, side="left")), len(end) - 1)
            before = boundary - int(end[last] - sizes[last])
            upto = min(-(-before // (TILE * self.width)) * TILE, int(self.count[last]))
            if (last, upto) <= (row, element):
                continue
            rows = slice(row, last + 1)
            start, count = self.start[rows].copy(), self.count[rows].copy()
            count[-1] = upto
            start[0] += element
            count[0] -= element
            box = None if self.box is None else self.box[rows]
            yield Segments(self.width, self.tensor[rows], start, count, box, self.boxes)
            row, element = (last + 1, 0) if upto == int(self.count[last]) else (last, upto)


class Tiling(Protocol):
    """What the groups of a delta are made of: whole tensors (`Layout`), or the boxes of parts (`Partition`)."""

    @property
    def layout(self) -> Layout:
        """The tensors."""

    @property
    def groups(self) -> tuple[Segments, ...]:
        """The tiles of every group."""

    def group_names(self, group: int) -> str:
        """Say which tensors a group holds."""

    def __hash__(self) -> int:
        """Hash by identity: what is derived from a tiling is kept beside it."""


def form_groups(rows: Segments) -> Iterator[Segments]:
    """Cut a sequence of tiles into groups."""
    return rows.cut(GROUP_BYTES)


def name_group(layout: Layout, rows: Segments) -> str:
    """Say which tensors a group holds: its only one, or the first and the last."""
    first, last = layout.names[int(rows.tensor[0])], layout.names[int(rows.tensor[-1])]
    return first if first == last else f"{first} .. {last}"


class Layout:
    """The tensors of a checkpoint, sorted by the UTF-8 bytes of their names.

    names, dtypes (safetensors names), shapes (header elements) are parallel. Immutable.
    Raises FormatError for unknown dtypes, impossible shapes and repeated names.
    """

    def __init__(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        order = sorted(range(len(names)), key=lambda i: names[i].encode("utf-8", "surrogatepass"))
        self.names = tuple(names[i] for i in order)
        self.dtypes = tuple(dtypes[i] for i in order)
        self.shapes = tuple(tuple(shapes[i]) for i in order)
        for left, right in zip(self.names, self.names[1:], strict=False):
            if left == right:
                raise FormatError(f"tensor {left}: the name is there twice (duplicate)")
        sizes = [tensor_nbytes(*t) for t in zip(self.names, self.dtypes, self.shapes, strict=True)]
        if sum(sizes) > MAX_BYTES:
            raise FormatError("the tensors need more than 2^45 bytes together")
        self.nbytes: I64 = np.array(sizes, np.int64)
        self.width: I64 = np.array([element_width(d) for d in self.dtypes], np.int64)
        self.count: I64 = self.nbytes // self.width if len(sizes) else self.nbytes

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(self.nbytes.sum())

    @cached_property
    def total_elements(self) -> int:
        """Stored elements of all tensors (packed types count bytes)."""
        return int(self.count.sum())

    @cached_property
    def position(self) -> dict[str, int]:
        """Index of each tensor name."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def weights(self) -> U64:
        """H_t of every tensor (`digest.tensor_weight`)."""
        tensors = zip(self.names, self.dtypes, self.shapes, strict=True)
        return np.array([tensor_weight(*t) for t in tensors], np.uint64)

    @cached_property
    def encoded(self) -> bytes:
        """The object stored under `layouts/<digest>.json`."""
        tensors = list(zip(self.names, self.dtypes, self.shapes, strict=True))
        return json.dumps({"tensors": tensors}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `encoded`."""
        return sha256(self.encoded)

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Parse a stored layout. Raises FormatError unless it is in canonical order."""
        import msgspec  # not there inside of engines, which are told a layout by their sidecar

        try:
            tensors = msgspec.json.decode(data, type=_Tensors)["tensors"]
        except msgspec.MsgspecError as exc:
            raise FormatError(f"layout: {exc}") from exc
        layout = cls([t[0] for t in tensors], [t[1] for t in tensors], [t[2] for t in tensors])
        if layout.names != tuple(t[0] for t in tensors):
            raise FormatError("layout: tensors are not sorted by name")
        if layout.encoded != data:
            raise FormatError("layout: it is not in the canonical form that its digest stands for")
        return layout

    @cached_property
    def groups(self) -> tuple[Segments, ...]:
        """The tiles of every group, numbered by width, then by place in the layout."""
        groups: list[Segments] = []
        for width in (1, 2, 4, 8):
            tensor = np.flatnonzero((self.width == width) & (self.count > 0)).astype(np.int64)
            if len(tensor):
                whole = Segments(width, tensor, np.zeros_like(tensor), self.count[tensor])
                groups.extend(form_groups(whole))
        return tuple(groups)

    @property
    def layout(self) -> Layout:
        """This layout: a tiling of whole tensors."""
        return self

    def group_names(self, group: int) -> str:
        """Say which tensors a group holds: its only one, or the first and the last."""
        return name_group(self, self.groups[group])

    def has(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> bool:
        """Say whether these tensors, in any order, are the ones of this layout."""
        if len(names) != len(self.names):
            return False
        position = self.position
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            i = position.get(name)
            if i is None or self.dtypes[i] != dtype or self.shapes[i] != shape:
                return False
        return True

    def require_same(self, other: Layout) -> None:
        """Raise ConfigError naming the first tensor in which `other` differs from this layout."""
        if self.digest == other.digest:
            return
        mine, theirs = self.position, other.position
        what = None
        for name in self.names:
            if name not in theirs:
                added = [n for n in other.names if n not in mine]
                what = f"tensor {name} is missing" + (f" ({added[0]} is new)" if added else "")
                break
            i, j = mine[name], theirs[name]
            if self.dtypes[i] != other.dtypes[j]:
                what = f"tensor {name} is {other.dtypes[j]}, was {self.dtypes[i]}"
            elif self.shapes[i] != other.shapes[j]:
                what = f"tensor {name} has shape {list(other.shapes[j])}, was {list(self.shapes[i])}"
            if what:
                break
        if what is None:
            what = f"tensor {next(n for n in other.names if n not in mine)} is new"
        raise ConfigError(
            f"{what}; a delta needs the same names, dtypes and shapes: "
            "publish those, or start from a full version with --relayout"
        )
