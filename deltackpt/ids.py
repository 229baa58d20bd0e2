"""Position ids as weights: planes of values that say, wherever they come out, which checkpoint element they were.

Every element has an id among the elements of its dtype. A plane gives each element one digit of its id, written as a
value that a loader does not stumble over: finite, positive, of ordinary size. The last plane is the check: values
from all over the dtype, that a copy keeps and that a cast, a clamp or arithmetic cannot give by chance. No element has
the same value in the first plane and in the check, so that what never varies is no copy of any of them. Pure but for
torch, which makes the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deltackpt.digest import keys
from deltackpt.errors import ConfigError
from deltackpt.layout import DTYPES, I64, Layout, element_width

if TYPE_CHECKING:
    import torch

Bits = npt.NDArray[np.unsignedinteger[Any]]

_PIECE = 1 << 15
"""Elements that are decoded at once: what is made on the way stays in a cache."""


@dataclass(frozen=True)
class Alphabet:
    """The bit patterns base + (digit << shift) of the digits below 2^bits, and what no value may be.

    odd: (mask, pattern, flip): bits that are `pattern` under `mask` are infinite or no number; `flip` ends that.
    """

    base: int
    shift: int
    bits: int
    odd: tuple[tuple[int, int, int], ...] = ()


ALPHABETS: Mapping[str, Alphabet] = {
    "F64": Alphabet(0x3FE0 << 48, 37, 16, ((0x7FF0 << 48, 0x7FF0 << 48, 1 << 52),)),
    "F32": Alphabet(0x3F000000, 8, 16, ((0x7F800000, 0x7F800000, 1 << 23),)),
    "F16": Alphabet(0x2000, 0, 13, ((0x7C00, 0x7C00, 0x400),)),
    "BF16": Alphabet(0x3780, 0, 12, ((0x7F80, 0x7F80, 0x80),)),
    "F8_E4M3": Alphabet(0x10, 0, 6, ((0x7F, 0x7F, 1),)),
    "F8_E5M2": Alphabet(0x20, 0, 6, ((0x7C, 0x7C, 4),)),
    "F8_E4M3FNUZ": Alphabet(0x20, 0, 6, ((0xFF, 0x80, 1),)),
    "F8_E5M2FNUZ": Alphabet(0x20, 0, 6, ((0xFF, 0x80, 1),)),
    "F8_E8M0": Alphabet(0x60, 0, 6, ((0xFF, 0xFF, 1),)),
    "C64": Alphabet(
        0x3F800000_3F000000, 8, 16, ((0x7F800000, 0x7F800000, 1 << 23), (0x7F800000 << 32, 0x7F800000 << 32, 1 << 55))
    ),
    "I64": Alphabet(0, 0, 16),
    "U64": Alphabet(0, 0, 16),
    "I32": Alphabet(0, 0, 16),
    "U32": Alphabet(0, 0, 16),
    "I16": Alphabet(0, 0, 14),
    "U16": Alphabet(0, 0, 14),
    "I8": Alphabet(0, 0, 7),
    "U8": Alphabet(0, 0, 7),
    "F4": Alphabet(0, 0, 7),
    "BOOL": Alphabet(0, 0, 1),
}


@lru_cache
def _patterns(dtype: str) -> Bits:
    """Return the bit pattern of each digit."""
    alphabet = ALPHABETS[dtype]
    wide = np.arange(1 << alphabet.bits, dtype=np.uint64) << np.uint64(alphabet.shift)
    bits: Bits = (wide + np.uint64(alphabet.base)).astype(f"<u{element_width(dtype)}")
    return bits


class Planes:
    """The planes of a layout. Ids count the elements of each dtype, in layout order.

    passes: how many planes there are; the last one is the check. Raises ConfigError for a dtype that torch lacks.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.tensors_of: dict[str, I64] = {}
        self.first_of: dict[str, I64] = {}
        digits = 1
        for dtype in sorted(set(layout.dtypes)):
            if dtype not in ALPHABETS:
                name = layout.names[layout.dtypes.index(dtype)]
                raise ConfigError(
                    f"tensor {name} is {dtype}, which torch cannot hold; plans are made with torch tensors"
                )
            tensors = np.array([i for i, d in enumerate(layout.dtypes) if d == dtype and layout.count[i]], np.int64)
            self.tensors_of[dtype] = tensors
            self.first_of[dtype] = np.concatenate(([0], np.cumsum(layout.count[tensors]))).astype(np.int64)
            digits = max(digits, self._digits(dtype))
        self.passes = digits + 1

    def elements(self, dtype: str) -> int:
        """Return how many elements, so ids, a dtype has."""
        return int(self.first_of[dtype][-1])

    def _digits(self, dtype: str) -> int:
        return max(1, -(-(self.elements(dtype) - 1).bit_length() // ALPHABETS[dtype].bits))

    def values(self, dtype: str, plane: int, ids: I64) -> Bits:
        """Return the bit patterns of elements in a plane, as unsigned integers of their width."""
        alphabet, width = ALPHABETS[dtype], element_width(dtype)
        if plane < self.passes - 1:
            ordinary: Bits = _patterns(dtype)[(ids >> (alphabet.bits * plane)) & ((1 << alphabet.bits) - 1)]
            return ordinary
        first = self.values(dtype, 0, ids)
        if dtype == "BOOL":
            return first ^ np.uint8(1)
        # The upper bits: the lowest one of a key is always set.
        bits: Bits = (keys(ids.astype(np.uint64)) >> np.uint64(64 - 8 * width)).astype(f"<u{width}")
        for mask, pattern, flip in alphabet.odd:
            bits ^= (bits & mask == pattern) * bits.dtype.type(flip)
        bits ^= bits == first
        return bits

    def _in_a_row(self, dtype: str, plane: int, first: int, count: int) -> Bits:
        """Return `values` of consecutive ids."""
        run = 1 << (ALPHABETS[dtype].bits * plane)  # so many elements have one digit
        if plane == self.passes - 1 or run == 1:
            return self.values(dtype, plane, np.arange(first, first + count, dtype=np.int64))
        begin = np.arange(first - first % run, first + count, run, dtype=np.int64)
        edges = np.clip(np.append(begin, first + count), first, None)
        return self.values(dtype, plane, begin).repeat(np.diff(edges))

    def tensors(self, plane: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a plane as named tensors of the layout's dtypes and shapes; each owns its memory."""
        first = np.zeros(len(self.layout.names), np.int64)
        for dtype, tensors in self.tensors_of.items():
            first[tensors] = self.first_of[dtype][:-1]
        for i, (begin, count) in enumerate(zip(first.tolist(), self.layout.count.tolist(), strict=True)):
            dtype = self.layout.dtypes[i]
            values = self._in_a_row(dtype, plane, begin, count)
            yield self.layout.names[i], as_tensor(values.view(np.uint8), dtype, self.layout.shapes[i])

    def decode(self, dtype: str, planes: Sequence[Bits]) -> I64:
        """Return the id that each place shows in all planes, the check included; -1 where it shows none.

        planes: for each pass the bit patterns of the same places.
        """
        ids = np.empty(len(planes[0]), np.int64)
        for begin in range(0, len(ids), _PIECE):
            piece = slice(begin, begin + _PIECE)
            ids[piece] = self._decode(dtype, [bits[piece] for bits in planes])
        return ids

    def _decode(self, dtype: str, planes: Sequence[Bits]) -> I64:
        alphabet = ALPHABETS[dtype]
        ids = np.zeros(len(planes[0]), np.int64)
        good = np.ones(len(ids), bool)
        for plane, bits in enumerate(planes[:-1]):
            digit = bits - bits.dtype.type(alphabet.base)
            if alphabet.shift:
                good &= digit & digit.dtype.type((1 << alphabet.shift) - 1) == 0
                digit >>= digit.dtype.type(alphabet.shift)
            if plane < self._digits(dtype):
                good &= digit < 1 << alphabet.bits
                ids |= (digit.astype(np.int64) & ((1 << alphabet.bits) - 1)) << (alphabet.bits * plane)
            else:
                good &= digit == 0
        good &= ids < self.elements(dtype)
        good &= self.values(dtype, self.passes - 1, ids) == planes[-1]
        ids[~good] = -1
        return ids

    def owner(self, dtype: str, ids: I64) -> I64:
        """Return the tensor, by its index in the layout, to which each id belongs."""
        return self.tensors_of[dtype][np.searchsorted(self.first_of[dtype], ids, side="right") - 1]


@lru_cache
def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's name for a dtype of a layout. Raises ConfigError where this torch has none."""
    import torch

    name = next(n for n, d in DTYPES.items() if d == dtype)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"torch {torch.__version__} has no {name}, which the checkpoint uses; install a newer one")
    return found


def as_tensor(raw: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return bytes as a tensor of a layout's dtype and header shape. It shares the memory of `raw`."""
    import torch

    if dtype == "F4" and shape:
        # Torch counts packed pairs, a safetensors header counts elements.
        shape = (*shape[:-1], shape[-1] // 2)
    return torch.from_numpy(raw).view(torch_dtype(dtype)).view(tuple(shape))
