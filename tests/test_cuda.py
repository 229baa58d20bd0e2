"""The CUDA backend: what can be held without a GPU, and, where there is one, that it gives the CPU's bytes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the CUDA backend works on torch tensors")

from deltackpt import cuda  # noqa: E402 - after the check for torch
from deltackpt.errors import ConfigError  # noqa: E402
from deltackpt.layout import TILE, Layout  # noqa: E402

SOURCE = Path(cuda.__file__).with_name("kernels.cu").read_text()


def test_group_record_has_the_fields_of_the_kernels_struct() -> None:
    body = re.search(r"struct Group \{(.*?)\};", SOURCE, re.DOTALL)
    assert body is not None
    fields = re.findall(r"[*\s,](\w+)(?=[,;])", re.sub(r"//.*", "", body.group(1)))
    assert fields == list(cuda._GROUP.names)
    assert cuda._GROUP.itemsize == 88
    offsets = [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 76, 80, 84]
    assert [cuda._GROUP.fields[n][1] for n in cuda._GROUP.names] == offsets


def test_every_kernel_that_is_looked_up_is_in_the_source() -> None:
    written = set(re.findall(r"^(?:extern .*\n?)?.*?\b(\w+)\(ROWS", SOURCE, re.MULTILINE)) | {"fingerprint"}
    expanded = {f"extract_{w}" for w in re.findall(r"^EXTRACT\((\d), \d\)", SOURCE, re.MULTILINE)}
    assert set(cuda.KERNELS) <= written | expanded


def test_kernels_and_layout_agree_on_the_tile() -> None:
    assert f"constexpr int TILE = {TILE};" in SOURCE


def test_tables_name_the_row_and_place_of_every_tile() -> None:
    layout = Layout(["a", "b", "c"], ["U8", "BF16", "U8"], [(TILE + 1,), (3 * TILE,), (5,)])
    tables = cuda._tables(layout, torch.device("cpu"))
    row, index, count, start = (t.numpy() for t in tables.rows)
    # Rows: a and c of width 1, then b of width 2.
    assert tables.tensor.tolist() == [0, 2, 1]
    assert row.tolist() == [0, 0, 1, 2, 2, 2]
    assert index.tolist() == [0, 1, 0, 0, 1, 2]
    assert count.tolist() == [TILE + 1, 5, 3 * TILE]
    assert start.tolist() == [0, 0, 0]
    assert tables.row_width.tolist() == [1, 1, 2]
    assert tables.tile_length.tolist() == [TILE, 1, 5, TILE, TILE, TILE]
    addresses = tables.row_addresses(np.array([1000, 2000, 3000], np.uint64))
    assert addresses.tolist() == [1000, 3000, 2000]


def test_columns_lie_plane_after_plane_and_group_after_group() -> None:
    layout = Layout(["a", "b"], ["U8", "BF16"], [(3 * TILE,), (TILE,)])
    tables = cuda._tables(layout, torch.device("cpu"))
    group, k, d = (np.array(x, np.int64) for x in ([0, 1], [5, 17], [TILE, 0]))
    shape = cuda._Shape(tables, group, k, d)
    # Group 0: 6 bytes of counts, gap.0 gap.1 value.0 of 5, dense.0 of a tile; group 1: 2 bytes, 4 planes of 17.
    second = 16 + 3 * 16 + TILE
    assert shape.begin.tolist() == [0, second]
    assert shape.nbytes == second + 16 + 4 * 32
    planes = shape.planes(0, np.arange(shape.nbytes).astype(np.uint8))
    assert {p: (int(x[0]), len(x)) for p, x in planes.items()} == {
        0: (0, 6), 1: (16, 5), 2: (32, 5), 8: (48, 5), 16: (64, TILE)
    }  # fmt: skip
    records = shape.records(1 << 20, 1 << 30)
    assert (records["counts"] - (1 << 20)).tolist() == [0, second]
    assert (records["gaps"] - (1 << 20)).tolist() == [16, second + 16]
    assert (records["values"] - (1 << 20)).tolist() == [48, second + 16 + 64]
    assert (records["dense"] - (1 << 20)).tolist() == [64, second + 16 + 128]
    assert (records["offset"] - (1 << 30)).tolist() == [0, 24]
    assert records["stride"].tolist() == [16, 32]
    assert records["dense_stride"].tolist() == [TILE, 0]
    assert [records[n].tolist() for n in ("before", "first_tile", "tiles", "width")] == [[0, 3], [0, 3], [3, 1], [1, 2]]
    packed = cuda._Shape(tables, group, k, d, align=1)
    assert packed.begin.tolist() == [0, -(-(6 + 15 + TILE) // 16) * 16]
    assert (packed.records(0, 0)["values"] - packed.begin.astype(np.uint64)).tolist() == [16, 2 + 34]


def test_windows_are_whole_groups_of_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltackpt.layout.GROUP_BYTES", 2 * TILE)
    monkeypatch.setattr(cuda, "_WINDOW", 4 * TILE)
    layout = Layout(["a", "b"], ["U8", "BF16"], [(6 * TILE,), (2 * TILE,)])
    assert [g.width for g in layout.groups] == [1, 1, 1, 2, 2]
    assert list(cuda._windows(layout)) == [range(0, 2), range(2, 3), range(3, 5)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_tensors_of_other_devices_are_refused_by_name() -> None:
    from deltackpt.tensors import collect

    with pytest.raises(ConfigError, match="tensor w is on meta"):
        collect({"w": torch.empty(3, device="meta")})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_backend_gives_the_bytes_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "scripts"), *sys.path])
    import gpu

    for seed in range(40):
        gpu.compare(seed)
