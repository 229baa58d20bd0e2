"""Files of full copies, put together from what several ranks have put: exact, and by few requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from deltackpt.anchor import Source, put_assembled, put_piece
from deltackpt.layout import Layout
from deltackpt.manifest import ShardFile
from deltackpt.partition import Box
from deltackpt.store import LocalStore


class Counting(LocalStore):
    """Counts reads."""

    reads = 0

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        self.reads += 1
        super().read_into(key, out, offset=offset)


def test_small_tensors_that_lie_side_by_side_are_read_together(tmp_path: Path) -> None:
    names = [f"w{i:04d}" for i in range(1000)]
    layout = Layout(names, ["I16"] * 1000, [[4, 6]] * 1000)
    values = np.arange(24_000, dtype=np.int16).reshape(1000, 4, 6)
    store = Counting(tmp_path)
    sources: dict[int, list[Source]] = {t: [] for t in range(1000)}
    # Of each tensor one rank has the left half, another the right one; of the last ten, upper and lower.
    cut: tuple[Box, Box] = ((0, 4), (0, 3)), ((0, 4), (3, 6))
    rows: tuple[Box, Box] = ((0, 2), (0, 6)), ((2, 4), (0, 6))
    for rank in (0, 1):
        key, boxes = f"data/piece-{rank}", []
        for t in range(1000):
            box = (cut if t < 990 else rows)[rank]
            sources[t].append(Source(store, key, 24 * t, box, 24_000))
            boxes.append(np.ascontiguousarray(values[t][tuple(slice(*d) for d in box)]).reshape(-1).view(np.uint8))
        put_piece(store, key, lambda _, boxes=boxes: iter(boxes), np.zeros(1000, np.uint64), lambda: None)
    steps: list[int] = []
    file = ShardFile("model.safetensors", tuple(range(1000)))
    made = put_assembled(store, "data/copy", layout, file, sources, lambda: steps.append(1))
    found = load_file(tmp_path / "data/copy/model.safetensors")
    assert all(np.array_equal(found[name], values[t]) for t, name in enumerate(names))
    assert made.nbytes == (tmp_path / "data/copy/model.safetensors").stat().st_size
    assert store.reads == 2
    assert len(steps) >= 1000
