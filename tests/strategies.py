"""Hypothesis strategies for layouts and pairs of versions, and memory to hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from deltackpt.digest import U64
from deltackpt.layout import BITS, Layout
from deltackpt.partition import Box, Partition

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


@st.composite
def partitions(draw: st.DrawFn, layout: Layout, max_parts: int = 4) -> Partition:
    """Partitions of a layout: tensors whole, cut into rows or into boxes, dealt out to parts in any order."""
    count = draw(st.integers(1, max_parts))
    parts: list[list[tuple[int, Box | None]]] = [[] for _ in range(count)]
    for t, shape in enumerate(layout.shapes):
        if layout.count[t] == 0:
            continue
        boxes: list[Box] = [tuple((0, n) for n in shape)]
        for _ in range(draw(st.integers(0, 3)) if shape else 0):
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            axis = draw(st.integers(0, len(shape) - 1))
            boxes += _halves(layout.dtypes[t], shape, box, axis, draw(st.floats(0, 1)))
        for box in boxes:
            whole = box == tuple((0, n) for n in shape)
            parts[draw(st.integers(0, count - 1))].append((t, None if whole else box))
    return Partition(layout, parts)


def _halves(dtype: str, shape: Sequence[int], box: Box, axis: int, share: float) -> list[Box]:
    """Cut a box in two where that is allowed, between whole bytes; else return it."""
    begin, end = box[axis]
    packed = BITS[dtype] < 8
    # Packed elements fill bytes in blocks, which only the last dimension cuts; other cuts need it to fill them.
    step = {4: 2, 6: 4}[BITS[dtype]] if packed and axis == len(shape) - 1 else 1
    at = begin + int((end - begin) * share) // step * step
    if not begin < at < end or (packed and shape[-1] % {4: 2, 6: 4}[BITS[dtype]]):
        return [box]
    return [(*box[:axis], half, *box[axis + 1 :]) for half in ((begin, at), (at, end))]


def elements_of(layout: Layout, tensor: int, box: Box | None) -> np.ndarray:
    """Numbers of the stored elements of a box, row-major: by numpy's own indexing."""
    if box is None:
        return np.arange(layout.count[tensor])
    shape, bits = list(layout.shapes[tensor]), BITS[layout.dtypes[tensor]]
    cuts = [list(cut) for cut in box]
    if bits < 8 and (shape[-1] * bits) % 8:
        # Rows that do not fill bytes: a box of them is a run.
        row = int(np.prod(shape[1:])) * bits
        return np.arange(cuts[0][0] * row // 8, cuts[0][1] * row // 8)
    if bits < 8:
        shape[-1] = shape[-1] * bits // 8
        cuts[-1] = [c * bits // 8 for c in cuts[-1]]
    return np.arange(layout.count[tensor]).reshape(shape)[tuple(slice(*c) for c in cuts)].ravel()


@dataclass(frozen=True)
class Pair:
    """Two versions of the tensors of a layout."""

    layout: Layout
    old: list[bytes]
    new: list[bytes]


@st.composite
def box_layouts(draw: st.DrawFn, dtypes: Sequence[str] = tuple(BITS), max_tensors: int = 4) -> Layout:
    """Layouts with tensors of up to four dimensions, which can be cut in each."""
    names = draw(st.lists(st.text(max_size=8), min_size=1, max_size=max_tensors, unique=True))
    chosen = [draw(st.sampled_from(dtypes)) for _ in names]
    extents = st.one_of(st.integers(1, 12), st.sampled_from((64, 130)))
    shapes = [draw(st.lists(extents, max_size=4)) for _ in names]
    for dtype, shape in zip(chosen, shapes, strict=True):
        while int(np.prod(shape)) > 60_000:
            shape.pop(0)
        if BITS[dtype] < 8:
            block = {4: 2, 6: 4}[BITS[dtype]]
            shape[-1:] = [-(-shape[-1] // block) * block] if shape else [block]
    return Layout(names, chosen, shapes)


@st.composite
def pairs(draw: st.DrawFn, of: st.SearchStrategy[Layout] | None = None) -> Pair:
    """A layout and two versions of it, from nothing changed to everything changed."""
    layout = draw(layouts() if of is None else of)
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
