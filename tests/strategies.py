"""Hypothesis strategies for layouts and pairs of versions, and memory to hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from deltackpt.digest import U64
from deltackpt.layout import BITS, Layout

SIZES = (0, 1, 2, 3, 5, 63, 64, 65, 1000, 8191, 8192, 8193, 16384, 20001)
"""Stored elements of a tensor: blocks of 64 bytes and tiles of 8,192 elements, and one off."""
DENSITIES = (0.0, 0.0001, 0.01, 0.249, 0.25, 0.26, 0.9, 1.0)
"""Share of elements that change: a tile is dense from over 0.25 on."""


def flat_shape(dtype: str, units: int) -> list[int]:
    """Shape, in header elements, of a tensor of whole stored bytes."""
    return [units * {4: 2, 6: 4}.get(BITS[dtype], 1)]


@st.composite
def layouts(draw: st.DrawFn, dtypes: Sequence[str] = tuple(BITS), max_tensors: int = 6) -> Layout:
    """Layouts of mixed dtypes with 0-d, empty, tiny and many-tile tensors."""
    names = draw(st.lists(st.text(max_size=8), min_size=1, max_size=max_tensors, unique=True))
    chosen = [draw(st.sampled_from(dtypes)) for _ in names]
    shapes = []
    for dtype in chosen:
        kind = draw(st.sampled_from(["flat", "flat", "0-d", "3-d"]))
        flat = flat_shape(dtype, draw(st.sampled_from(SIZES)))
        if kind == "0-d" and BITS[dtype] >= 8:
            shapes.append([])
        elif kind == "3-d":
            shapes.append([1, *flat, 1])
        else:
            shapes.append(flat)
    return Layout(names, chosen, shapes)


def random_bytes(layout: Layout, seed: int) -> list[bytes]:
    """Contents of every tensor."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(n) for n in layout.nbytes.tolist()]


def changed_bytes(layout: Layout, contents: Sequence[bytes], density: float, seed: int) -> list[bytes]:
    """Flip random bits in about `density` of the elements of every tensor."""
    rng = np.random.default_rng([seed, 1])
    result = []
    for content, width in zip(contents, layout.width.tolist(), strict=True):
        flat = np.frombuffer(content, f"<u{width}").copy()
        hit = rng.random(len(flat)) < density
        flips = rng.integers(1, 1 << min(8 * width, 63), int(hit.sum()), dtype=np.uint64, endpoint=False)
        flat[hit] ^= flips.astype(flat.dtype)
        result.append(flat.tobytes())
    return result


@dataclass(frozen=True)
class Pair:
    """Two versions of the tensors of a layout."""

    layout: Layout
    old: list[bytes]
    new: list[bytes]


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """A layout and two versions of it, from nothing changed to everything changed."""
    layout = draw(layouts())
    seed = draw(st.integers(0, 2**32 - 1))
    old = random_bytes(layout, seed)
    return Pair(layout, old, changed_bytes(layout, old, draw(st.sampled_from(DENSITIES)), seed))


class Memory:
    """Tensors in one buffer, as a mapped file holds them. skew: how far each lies from a multiple of 16."""

    def __init__(self, tensors: Sequence[bytes], skew: int = 0) -> None:
        self.sizes = [len(t) for t in tensors]
        self.offsets: list[int] = []
        end = 0
        for size in self.sizes:
            self.offsets.append(end + skew)
            end += -(-(skew + size) // 16) * 16
        self.buffer = np.zeros(end + 80, np.uint8)
        start = self.buffer.__array_interface__["data"][0]
        self.base = -start % 16
        for offset, tensor in zip(self.offsets, tensors, strict=True):
            self.buffer[self.base + offset :][: len(tensor)] = np.frombuffer(tensor, np.uint8)
        self.addresses: U64 = np.array([start + self.base + o for o in self.offsets], np.uint64)

    def tensors(self) -> list[bytes]:
        """Return the bytes of every tensor."""
        places = zip(self.offsets, self.sizes, strict=True)
        return [self.buffer[self.base + o :][:n].tobytes() for o, n in places]

    def between(self) -> bytes:
        """Return all bytes that belong to no tensor."""
        mine = np.ones(len(self.buffer), bool)
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            mine[self.base + offset :][:size] = False
        return self.buffer[mine].tobytes()
