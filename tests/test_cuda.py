"""The CUDA backend: what can be held without a GPU, and, where there is one, that it gives the CPU's bytes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the CUDA backend works on torch tensors")

from deltackpt import backend, codec, cuda, launch, masks, staging, window  # noqa: E402 - after the check for torch
from deltackpt.errors import ConfigError, FormatError  # noqa: E402
from deltackpt.holding import Slice  # noqa: E402
from deltackpt.layout import TILE, Layout  # noqa: E402
from deltackpt.manifest import Shard  # noqa: E402
from deltackpt.partition import Box, Partition  # noqa: E402
from deltackpt.shard import CHANGE, FRAME, EncodedGroup, Fetched, Index, assemble, parse_index  # noqa: E402
from deltackpt.slices import Held, Reach  # noqa: E402

SOURCE = Path(cuda.__file__).with_name("kernels.cu").read_text()


def test_group_record_has_the_fields_of_the_kernels_struct() -> None:
    body = re.search(r"struct Group \{(.*?)\};", SOURCE, re.DOTALL)
    assert body is not None
    fields = re.findall(r"[*\s,](\w+)(?=[,;])", re.sub(r"//.*", "", body.group(1)))
    assert fields == list(launch.GROUP.names)
    assert launch.GROUP.itemsize == 88
    offsets = [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 76, 80, 84]
    assert [launch.GROUP.fields[n][1] for n in launch.GROUP.names] == offsets


def test_every_kernel_that_is_looked_up_is_in_the_source() -> None:
    written = set(re.findall(r"^(?:extern .*\n?)?.*?\b(\w+)\(ROWS", SOURCE, re.MULTILINE))
    expanded = {f"extract_{w}" for w in re.findall(r"^EXTRACT\((\d), \d\)", SOURCE, re.MULTILINE)}
    assert set(launch.KERNELS) <= written | expanded


def test_kernels_and_layout_agree_on_the_tile() -> None:
    assert f"constexpr int TILE = {TILE};" in SOURCE


def test_tables_name_the_row_and_place_of_every_tile() -> None:
    layout = Layout(["a", "b", "c"], ["U8", "BF16", "U8"], [(TILE + 1,), (3 * TILE,), (5,)])
    tables = launch.tables_of(layout, torch.device("cpu"))
    row, index, count, start = (t.numpy() for t in tables.rows)
    # Rows: a and c of width 1, then b of width 2.
    assert tables.tensor.tolist() == [0, 2, 1]
    assert row.tolist() == [0, 0, 1, 2, 2, 2]
    assert index.tolist() == [0, 1, 0, 0, 1, 2]
    assert count.tolist() == [TILE + 1, 5, 3 * TILE]
    assert start.tolist() == [0, 0, 0]
    assert tables.row_width.tolist() == [1, 1, 2]
    assert tables.tile_length.tolist() == [TILE, 1, 5, TILE, TILE, TILE]
    where = tables.whole(np.array([1000, 2000, 3000], np.uint64))
    assert where.runs.tolist() == [1000, 3000, 2000]
    assert where.boxes is None


def test_columns_lie_plane_after_plane_and_group_after_group() -> None:
    layout = Layout(["a", "b"], ["U8", "BF16"], [(3 * TILE,), (TILE,)])
    tables = launch.tables_of(layout, torch.device("cpu"))
    group, k, d = (np.array(x, np.int64) for x in ([0, 1], [5, 17], [TILE, 0]))
    shape = launch.Shape(tables, group, k, d)
    # Group 0: 6 bytes of counts, gap.0 gap.1 value.0 of 5, dense.0 of a tile; group 1: 2 bytes, 4 planes of 17.
    second = 16 + 3 * 16 + TILE
    assert shape.begin.tolist() == [0, second]
    assert shape.nbytes == second + 16 + 4 * 32
    assert shape.sizes(0) == {0: 6, 1: 5, 2: 5, 8: 5, 16: TILE}
    row, plane, begin, nbytes = (x.tolist() for x in shape.frames())
    assert [x for x in zip(row, plane, begin, nbytes, strict=True) if x[0] == 0] == [
        (0, 0, 0, 6), (0, 1, 16, 5), (0, 2, 32, 5), (0, 8, 48, 5), (0, 16, 64, TILE)
    ]  # fmt: skip
    records = shape.records(1 << 20, 1 << 30)
    assert (records["counts"] - (1 << 20)).tolist() == [0, second]
    assert (records["gaps"] - (1 << 20)).tolist() == [16, second + 16]
    assert (records["values"] - (1 << 20)).tolist() == [48, second + 16 + 64]
    assert (records["dense"] - (1 << 20)).tolist() == [64, second + 16 + 128]
    assert (records["offset"] - (1 << 30)).tolist() == [0, 24]
    assert records["stride"].tolist() == [16, 32]
    assert records["dense_stride"].tolist() == [TILE, 0]
    assert [records[n].tolist() for n in ("first_tile", "tiles", "width")] == [[0, 3], [3, 1], [1, 2]]
    packed = launch.Shape(tables, group, k, d, align=1)
    assert packed.begin.tolist() == [0, -(-(6 + 15 + TILE) // 16) * 16]
    assert (packed.records(0, 0)["values"] - packed.begin.astype(np.uint64)).tolist() == [16, 2 + 34]


def test_tables_of_a_partition_tell_runs_from_boxes_with_strides() -> None:
    """Rows 0 to 63 of `a` whole, columns 0 to 9 and 10 to 39 of the rest: a run and two strided boxes."""
    layout = Layout(["a", "b"], ["BF16", "U8"], [(256, 400), (7,)])
    cuts: list[list[tuple[int, Box | None]]] = [
        [(0, ((0, 64), (0, 400))), (1, None)],
        [(0, ((64, 256), (0, 300))), (0, ((64, 256), (300, 400)))],
    ]
    tables = launch.tables_of(Partition(layout, cuts), torch.device("cpu"))
    # By part and width: b, the run of a, then the two boxes of part 1 (57,600 and 19,200 elements).
    assert tables.tensor.tolist() == [1, 0, 0, 0]
    assert tables.box.tolist() == [1, 0, 2, 3]
    assert tables.strided.tolist() == [False, False, True, True]
    where = tables.whole(np.array([10_000, 500], np.uint64))
    assert where.runs.tolist() == [500, 10_000, 0, 0]
    assert where.boxes is not None
    start, at, first, levels, n = where.boxes
    assert start.tolist() == [0, 0, 0, 0]
    assert at.tolist() == [0, 0, 10_000 + 2 * 64 * 400, 10_000 + 2 * (64 * 400 + 300)]
    assert first.tolist()[2:] == [64 * 400, 64 * 400 + 300]
    assert int(n) == 2
    # Of each level: extent, stride in the tensor, step in memory, low, high.
    assert levels.tolist()[2:] == [
        [[192, 400, 400, 0, 192], [300, 1, 1, 0, 300]],
        [[192, 400, 400, 0, 192], [100, 1, 1, 0, 100]],
    ]
    boxes = np.array([1000, 2000, 3000, 4000], np.uint64)
    assert tables.apart(boxes[2:], 2).tolist() == [0, 0, 3000, 4000]
    assert tables.looked_at(boxes[:2], 0) is None
    looked = tables.looked_at(boxes[2:], 2)
    assert looked is not None
    assert looked[1].tolist() == [0, 0, 3000, 4000]
    assert looked[3].tolist()[2:] == [
        [[192, 400, 300, 0, 192], [300, 1, 1, 0, 300]],
        [[192, 400, 100, 0, 192], [100, 1, 1, 0, 100]],
    ]
    assert tables.per_tensor(np.array([1, 2, 3, 4], np.uint64)).tolist() == [9, 1]
    assert tables.per_box(np.array([1, 2, 3, 4], np.uint64)).tolist() == [2, 1, 3, 4]


def test_places_of_slices_are_uploaded_for_the_rows_of_a_version() -> None:
    """Columns 5 to 24 of a matrix of 64 by 40 in memory of 20 columns; the version was published as whole tensors."""
    layout = Layout(["a", "b"], ["BF16", "U8"], [(64, 40), (7,)])
    box = ((0, 64), (5, 25))
    slices = {"a": Slice("a", (64, 40), box, torch.empty((64, 20), dtype=torch.bfloat16))}
    held = Held(layout, slices, {})
    device = cuda.Cuda.__new__(cuda.Cuda)
    device.device = torch.device("cpu")
    (one,) = Reach(held, layout).passes
    where = device.locate(layout, one.where)
    assert where.runs.tolist() == [0, 0]
    assert where.boxes is not None
    _, at, first, levels, n = where.boxes
    # Five elements before the slice the tensor's row would begin.
    assert at.tolist() == [0, int(held.address[0]) - 10]
    assert (first.tolist()[1], int(n)) == (0, 2)
    assert levels.tolist()[1] == [[64, 40, 20, 0, 64], [40, 1, 1, 5, 25]]


def test_windows_are_whole_groups_of_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltackpt.layout.GROUP_BYTES", 2 * TILE)
    monkeypatch.setattr(window, "_WINDOW", 4 * TILE)
    layout = Layout(["a", "b"], ["U8", "BF16"], [(6 * TILE,), (2 * TILE,)])
    assert [g.width for g in layout.groups] == [1, 1, 1, 2, 2]
    tables = launch.tables_of(layout, torch.device("cpu"))
    assert list(window.windows(tables, range(5))) == [range(0, 2), range(2, 3), range(3, 5)]
    assert list(window.windows(tables, range(1, 4))) == [range(1, 3), range(3, 4)]


def test_room_of_a_window_is_what_it_needed_last_and_a_quarter_more() -> None:
    layout = Layout(["a", "b"], ["U8", "BF16"], [(64 * TILE,), (128 * TILE,)])
    tables = launch.tables_of(layout, torch.device("cpu"))
    tables.needed.clear()
    first = [window.Window(tables, groups) for groups in window.windows(tables, range(2))]
    assert [(w.room, w.dense_room) for w in first] == [(1.25 * TILE + TILE, 0), (2.5 * TILE + TILE, 0)]
    tables.needed[1] = (100, 2 * TILE)
    again = [window.Window(tables, groups) for groups in window.windows(tables, range(2))]
    assert [(w.room, w.dense_room) for w in again] == [(1.25 * TILE + TILE, 0), (125 + TILE, 2.5 * TILE)]


def encoded(density: float) -> tuple[Layout, list[EncodedGroup], np.ndarray[Any, Any]]:
    """Groups of two widths in which some tiles are dense, and their FRAME records."""
    layout = Layout(["a", "b"], ["U8", "BF16"], [(40 * TILE + 5,), (50 * TILE,)])
    rng = np.random.default_rng(1)
    old = [rng.integers(0, 256, int(n), np.uint8) for n in layout.nbytes]
    new = [c ^ (rng.random(len(c)) < density) * rng.integers(1, 256, len(c), np.uint8) for c in old]
    for content, before in zip(new, old, strict=True):
        content[: 2 * TILE] = before[: 2 * TILE] ^ 1
    sides = [np.array([c.__array_interface__["data"][0] for c in side], np.uint64) for side in (old, new)]
    groups = list(backend.encode(layout, *sides, threads=1))
    image = assemble("data/shard", groups)
    data = b"".join(bytes(part) for part in image.parts)
    return layout, groups, parse_index(image.shard, memoryview(data), layout).frames


@pytest.mark.parametrize("density", [0.001, 0.2])
def test_frames_go_where_the_planes_of_their_group_lie(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backend, launch, staging):
        monkeypatch.setattr(module, "PLANE_FRAME", 1 << 14)
    layout, groups, frames = encoded(density)
    tables = launch.tables_of(layout, torch.device("cpu"))
    shape, place = staging._require_columns(tables, frames)
    memory = np.zeros(shape.nbytes, np.uint8)
    all_frames = [frame for group in groups for frame in group.frames]
    assert (max(sum(f.plane == 8 for f in g.frames) for g in groups) > 2) == (density > 0.1)
    for begin, frame in zip(place.tolist(), all_frames, strict=True):
        memory[begin : begin + frame.raw] = np.frombuffer(codec.decode(frame.codec, frame.stored, frame.raw), np.uint8)
    for row, group in enumerate(groups):
        expected = backend.decode_columns(layout, group.group, group.frames)
        planes = {0: expected.counts.view(np.uint8)} | {1 + i: p for i, p in enumerate(expected.gaps)}
        planes |= {8 + i: p for i, p in enumerate(expected.values)} | {16 + i: p for i, p in enumerate(expected.dense)}
        for plane, content in planes.items():
            begin = int(shape.plane_begin(np.array([row]), np.array([plane]))[0])
            assert np.array_equal(memory[begin : begin + len(content)], content)
    # The same planes, cut again, are the same frames.
    row, plane, begin, nbytes = shape.frames()
    assert plane.tolist() == [f.plane for f in all_frames]
    assert nbytes.tolist() == [f.raw for f in all_frames]
    assert begin.tolist() == place.tolist()


@pytest.mark.parametrize(
    ("field", "plane", "value"),
    [("raw", 0, 1), ("raw", 1, 5), ("raw", 8, 0), ("block", 2, 1), ("plane", 8, 9), ("plane", 16, 40), ("codec", 1, 6)],
)
def test_frames_that_make_up_no_columns_are_refused_before_room_is_made(field: str, plane: int, value: int) -> None:
    layout, _, frames = encoded(0.001)
    tables = launch.tables_of(layout, torch.device("cpu"))
    wrong = frames.copy()
    wrong[field][np.flatnonzero(frames["plane"] == plane)[0]] = value
    with pytest.raises(FormatError, match=r"group 0 \(a\): frames of .* do not make up its columns"):
        staging._require_columns(tables, wrong)


def test_version_of_which_nothing_is_here_has_no_columns() -> None:
    """As for a rank whose groups did not change: shards were fetched, and no frame of them."""
    tables = launch.tables_of(Layout(["a"], ["BF16"], [(TILE,)]), torch.device("cpu"))
    on_host, held = staging._decode_on_host(tables, [], 1)
    for joined in (launch.DeviceColumns.joined([]), launch.DeviceColumns.joined([on_host])):
        assert (joined.tiles, len(joined.records), len(joined.group), held) == (0, 0, 0, [])


def test_group_with_more_changes_than_elements_is_refused_before_room_is_made() -> None:
    layout = Layout(["a"], ["U8"], [(TILE,)])
    tables = launch.tables_of(layout, torch.device("cpu"))
    frames = np.zeros(4, FRAME)
    frames["plane"], frames["raw"], frames["stored"] = [0, 1, 2, 8], [2, TILE + 1, TILE + 1, TILE + 1], 1
    frames["codec"] = codec.ZSTD
    with pytest.raises(FormatError, match=r"group 0 \(a\)"):
        staging._require_columns(tables, frames)


def masked(monkeypatch: pytest.MonkeyPatch, codecs_of: tuple[str, ...] = ("lz4",)) -> tuple[Layout, list[Any], Any]:
    """Groups 0, 1, 3 and 4 of a layout of five as masks in small frames, what changed in each tensor, and the shard."""
    monkeypatch.setattr("deltackpt.layout.GROUP_BYTES", 2 * TILE)
    for module in (backend, masks, staging):
        monkeypatch.setattr(module, "MASK_FRAME", 1 << 12)
    monkeypatch.setattr(masks, "BATCH", 5 * TILE)
    layout = Layout(["a", "b", "c"], ["U8", "BF16", "BF16"], [(6 * TILE - 5,), (TILE - 1,), (TILE + 3,)])
    assert [(g.width, g.nbytes) for g in layout.groups] == [
        (1, 2 * TILE), (1, 2 * TILE), (1, 2 * TILE - 5), (2, 4 * TILE - 2), (2, 6)
    ]  # fmt: skip
    rng = np.random.default_rng(5)
    changes = [(rng.random(int(n)) < 0.02) * rng.integers(1, 256, int(n), np.uint8) for n in layout.nbytes]
    changes[0][4 * TILE :] = 0
    changes[0][:5000] = 0  # the first frame is absent
    changes[2][-1] = 1
    old = [rng.integers(0, 256, int(n), np.uint8) for n in layout.nbytes]
    new = [o ^ c for o, c in zip(old, changes, strict=True)]
    sides = [np.array([c.__array_interface__["data"][0] for c in side], np.uint64) for side in (old, new)]
    groups = [
        g
        for i, name in enumerate(codecs_of)
        for g in backend.encode(layout, *sides, codec=name, form="mask", threads=1)
        if g.group % len(codecs_of) == i
    ]
    assert sorted(g.group for g in groups) == [0, 1, 3, 4]
    image = assemble("data/shard", sorted(groups, key=lambda g: g.group))
    data = memoryview(bytearray(b"".join(bytes(part) for part in image.parts)))
    return layout, changes, Fetched(image.shard, parse_index(image.shard, data, layout), data)


@pytest.mark.parametrize("names", [("lz4",), ("zstd",), ("raw", "snappy", "deflate")])
def test_masks_are_decoded_to_where_the_rows_of_their_groups_are_looked_for(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, changes, fetched = masked(monkeypatch, names)
    tables = launch.tables_of(layout, torch.device("cpu"))
    frames = staging._Frames.of([fetched], lambda n: memoryview(bytearray(n)), 1)
    staging._require_masks(tables, frames.records)
    held = masks.Masks(tables, np.array([0, 1, 3, 4]), lambda n: torch.full((n,), 7, dtype=torch.uint8))
    # 16,384 bytes each of the first two; 32,766 and 6 in frames of 4,096.
    assert held.batches == [range(2), range(2, 4)]
    assert held.begin.tolist() == [0, 2 * TILE, 0, 4 * TILE]
    assert len(held.memory) == 4 * TILE + 4096
    assert [[w.groups for w in held.windows(batch)] for batch in held.batches] == [[range(2)], [range(3, 5)]]
    found = [np.zeros_like(c) for c in changes]
    for batch in held.batches:
        memory = held.clear(batch)
        assert not memory.any()
        groups = held.group[batch.start : batch.stop]
        some = frames.take(np.isin(frames.records["group"], groups))
        stored = some.stripped(layout)
        everything = np.concatenate([m.numpy() for m in stored.memories])
        row = np.searchsorted(held.group, some.records["group"])
        place = held.begin[row] + some.records["block"].astype(np.int64) * 4096
        at = zip(some.records["codec"], stored.offset, stored.nbytes, some.records["raw"], place, strict=True)
        for kind, offset, nbytes, raw, begin in at:
            content = codec.decode(int(kind), everything[offset : offset + nbytes], int(raw))
            memory[begin : begin + int(raw)] = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        at_row = held.at.numpy().view(np.uint64)
        for i in np.flatnonzero(at_row):
            group = int(np.searchsorted(tables.row_begin, i, side="right")) - 1
            if group in groups:
                begin, n = int(at_row[i]) - held.memory.data_ptr(), int(tables.count[i] * tables.width[i])
                first = int(tables.first[i] * tables.width[i])
                found[tables.tensor[i]][first : first + n] = memory.numpy()[begin : begin + n]
    for mine, due in zip(found, changes, strict=True):
        assert np.array_equal(mine, due)


@pytest.mark.parametrize(
    ("field", "frame", "value"),
    [("raw", 0, 4095), ("raw", -1, 4096), ("block", 1, 1), ("block", -1, 1), ("plane", 0, 1), ("codec", 2, 6),
     ("outer", 2, 3), ("outer", 2, 0)],
)  # fmt: skip
def test_frames_that_make_up_no_mask_are_refused_before_they_are_read(
    field: str, frame: int, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, _, fetched = masked(monkeypatch)
    frames = fetched.index.frames.copy()
    frames[field][frame] = value
    if field == "outer" and value == codec.RAW:
        frames["codec"][frame] = codec.RAW  # then it is not as long as it says
    group = 0 if frame >= 0 else 4
    with pytest.raises(FormatError, match=rf"group {group} \(.*\): frame of \d+ bytes of plane \d+, block \d+, is not"):
        staging._require_masks(launch.tables_of(layout, torch.device("cpu")), frames)


@pytest.mark.parametrize(
    ("codec_of", "raw", "words"),
    [(codec.LZ4, 20, "outer zstd frame declares 4096 bytes, at most 87 are possible"),
     (codec.RAW, 4095, "outer zstd frame declares 4096 bytes, 4095 are due")],
)  # fmt: skip
def test_outer_frame_of_another_length_is_refused_before_it_is_decoded(codec_of: int, raw: int, words: str) -> None:
    layout = Layout(["a"], ["U8"], [(TILE,)])
    stored = codec.encode(codec.ZSTD, bytes(4096))[1]
    frames = np.zeros(1, FRAME)
    frames["stored"], frames["raw"], frames["codec"], frames["outer"] = len(stored), raw, codec_of, codec.ZSTD
    shard = Shard("data/shard", len(stored), "", (0, 0), (0, 0))
    fetched = Fetched(shard, Index(frames, np.zeros(0, CHANGE)), memoryview(bytearray(stored)))
    some = staging._Frames.of([fetched], lambda n: memoryview(bytearray(n)), 1)
    with pytest.raises(FormatError, match=rf"^group 0 \(a\): {words}"):
        some.stripped(layout)


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
        gpu.compare_parts(seed)
