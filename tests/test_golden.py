"""Frozen bytes: the stores of manifests/examples/ and the vectors of manifests/FORMAT.md section 10.

Nothing here is regenerated. A test that fails means that this code misreads, or writes differently, what is out there.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from safetensors import safe_open

from deltackpt import backend
from deltackpt.digest import fp_hex, keys, state_fingerprint, tensor_weight
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.layout import Layout
from deltackpt.manifest import Kind
from deltackpt.reader import Reader
from deltackpt.shard import EncodedGroup, assemble
from deltackpt.store import LocalStore
from deltackpt.verify import verify_store

EXAMPLES = Path(__file__).parent.parent / "manifests" / "examples"
STORES = ("codecs", "mask", "parts", "sparse")
Tensors = dict[str, tuple[str, list[int], str]]


def expected(name: str) -> dict[int, Tensors]:
    found = json.loads((EXAMPLES / name / "expected.json").read_text(encoding="utf-8"))
    return {int(v): {t: tuple(entry) for t, entry in tensors.items()} for v, tensors in found.items()}


def tensors_of(folder: Path) -> Tensors:
    """Read every safetensors file with struct and json alone: dtype, shape and SHA-256 of each tensor."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            raw = data[8 + length + begin : 8 + length + end]
            found[name] = (entry["dtype"], entry["shape"], hashlib.sha256(raw).hexdigest())
    return found


def pull(name: str, folder: Path, version: int) -> None:
    with Follower(str(EXAMPLES / name / "store"), CheckpointTarget(folder)) as follower:
        if prepared := follower.prepare(version):
            prepared.apply()


def test_every_example_is_in_this_test() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir()) == sorted(STORES)


@pytest.mark.parametrize("name", STORES)
def test_every_version_is_pulled_bit_exact_into_an_empty_folder(name: str, tmp_path: Path) -> None:
    for version, tensors in expected(name).items():
        pull(name, tmp_path / str(version), version)
        assert tensors_of(tmp_path / str(version)) == tensors


@pytest.mark.parametrize("name", STORES)
def test_every_version_is_pulled_bit_exact_forwards_and_backwards(name: str, tmp_path: Path) -> None:
    versions = expected(name)
    for version in [*sorted(versions), *sorted(versions, reverse=True)]:
        pull(name, tmp_path / "folder", version)
        assert tensors_of(tmp_path / "folder") == versions[version]


@pytest.mark.parametrize("name", STORES)
def test_every_frame_checksum_and_fingerprint_holds(name: str) -> None:
    reader = Reader(LocalStore(EXAMPLES / name / "store"))
    reader.load()
    for version, entry in reader.history.items():
        layout = reader.layout(entry.manifest.layout)
        assert fp_hex(state_fingerprint(layout.weights, reader.fingerprints(version))) == entry.manifest.state
        if entry.manifest.kind == "delta":
            for fetched in reader.delta(version).fetched:
                reader.check_frames(fetched)


@pytest.mark.parametrize("name", STORES)
def test_deep_verify_finds_no_fault(name: str, tmp_path: Path) -> None:
    report = verify_store(LocalStore(EXAMPLES / name / "store"), deep=True, scratch=str(tmp_path))
    assert report.problems == ()
    assert report.rebuilt == len(report.versions) == len(expected(name))


def test_parts_example_has_whole_tensors_rows_boxes_and_a_version_that_is_not_cut() -> None:
    reader = Reader(LocalStore(EXAMPLES / "parts" / "store"))
    reader.load()
    cut = [e.manifest.partition for e in reader.history.values()]
    assert [c is not None for c in cut] == [False, True, True, True, False]
    partitions = [json.loads((EXAMPLES / "parts" / "store" / "partitions" / f"{c}.json").read_text()) for c in cut if c]
    kinds = [{kind for part in p["parts"] for kind in ("whole", "rows", "boxes") if part[kind]} for p in partitions]
    assert kinds == [{"whole"}, {"whole", "rows"}, {"whole", "boxes"}]
    assert [len(e.manifest.shards) for e in reader.history.values()] == [0, 2, 3, 1, 1]


def test_sparse_example_has_every_kind_of_version_and_every_dtype() -> None:
    reader = Reader(LocalStore(EXAMPLES / "sparse" / "store"))
    reader.load()
    kinds: list[Kind] = [e.manifest.kind for e in reader.history.values()]
    assert kinds == ["full", "delta", "empty", "rewind", "delta", "delta"]
    assert [e.manifest.base for e in reader.history.values()] == [None, 0, 1, 0, 3, 4]
    assert [e.manifest.epoch for e in reader.history.values()] == [0, 0, 0, 1, 1, 1]
    assert sorted(reader.anchors()) == [0, 5]
    assert {dtype for dtype, _, _ in expected("sparse")[0].values()} == {
        "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2",
        "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "I64", "U64", "F64", "C64",
    }  # fmt: skip


def test_sparse_example_brings_side_files_and_the_index_of_each_version(tmp_path: Path) -> None:
    pull("sparse", tmp_path / "a", 3)
    assert (tmp_path / "a/config.json").read_bytes() == b'{"a": 1}'
    assert (tmp_path / "a/tokenizer/vocab.txt").read_bytes() == b"a\nb\n"
    index = json.loads((tmp_path / "a/model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"license": "Apache-2.0", "total_size": 9146}
    assert sorted(index["weight_map"]) == sorted(expected("sparse")[3])
    pull("sparse", tmp_path / "a", 5)
    assert (tmp_path / "a/config.json").read_bytes() == b"{}"
    assert sorted(p.name for p in (tmp_path / "a").iterdir() if p.name != ".deltackpt") == [
        "config.json", "model.safetensors", "tokenizer",
    ]  # fmt: skip


def test_mask_example_uses_every_inner_codec_and_the_outer_one() -> None:
    reader = Reader(LocalStore(EXAMPLES / "mask" / "store"))
    reader.load()
    used = {}
    for version in range(1, 6):
        frames = reader.delta(version).fetched[0].index.frames
        assert set(frames["plane"].tolist()) == {32}
        used[version] = set(zip(frames["codec"].tolist(), frames["outer"].tolist(), strict=True))
    # lz4 in zstd, deflate alone, snappy in zstd, zstd alone, raw
    assert used == {1: {(3, 1)}, 2: {(2, 0)}, 3: {(4, 1)}, 4: {(1, 0)}, 5: {(0, 0)}}


def test_codecs_example_uses_every_codec_and_raw_where_nothing_is_gained() -> None:
    reader = Reader(LocalStore(EXAMPLES / "codecs" / "store"))
    reader.load()
    used = {v: set(reader.delta(v).fetched[0].index.frames["codec"].tolist()) for v in range(1, 5)}
    assert used == {1: {0}, 2: {0, 2}, 3: {0, 3}, 4: {0, 4}}


# ---------------------------------------------------------------- the worked example of FORMAT.md section 10

LAYOUT = Layout(["a", "b"], ["BF16", "BF16"], [[6], [6]])
OLD = np.array([0x3F80] * 6 + [0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0], "<u2")
NEW = np.array([0x3F80] * 4 + [0x3F81, 0x3F80] + [0x4000, 0x4041, 0x4080, 0x40A0, 0xC0C2, 0x40E0], "<u2")

HEADER = (
    b"\x88\0\0\0\0\0\0\0"
    b'{"index":{"dtype":"U8","shape":[256],"data_offsets":[0,256]},'
    b'"group.0":{"dtype":"U8","shape":[112],"data_offsets":[256,368]}}           '
)
INDEX = bytes.fromhex(
    "9001000000000000 04000000 04000000 00000000 00 00 00 00 939edc49d76cc182"
    "a001000000000000 01000000 01000000 00000000 01 00 00 00 7286bf324b28b273"
    "b001000000000000 01000000 01000000 00000000 02 00 00 00 dbec4e07f4df4bc4"
    "c001000000000000 01000000 01000000 00000000 08 00 00 00 ebce86ebd2f92ee1"
    "d001000000000000 01000000 01000000 00000000 09 00 00 00 dbec4e07f4df4bc4"
    "e001000000000000 06000000 06000000 00000000 10 00 00 00 c09417da2de67317"
    "f001000000000000 06000000 06000000 00000000 11 00 00 00 f6609f2625b83ac8"
    "00000000 00000000 cf56971cde355897"
    "01000000 00000000 9e2d45b225f5d8f1"
)
DATA = b"".join(
    bytes.fromhex(plane).ljust(16, b"\0")
    for plane in ("0100ffff", "04", "00", "01", "00", "000100000200", "000000008000")
)


def where(array: np.ndarray) -> np.ndarray:
    """Address of each of the two tensors, which lie back to back."""
    return np.array([array.ctypes.data, array.ctypes.data + 12], np.uint64)


def groups(codec: str, form: str = "sparse") -> list[EncodedGroup]:
    return list(backend.encode(LAYOUT, where(OLD), where(NEW), codec=codec, form=form))


def test_worked_example_is_written_byte_for_byte() -> None:
    image = assemble("data/x/00000.safetensors", groups("raw"))
    assert b"".join(bytes(part) for part in image.parts) == HEADER + INDEX + DATA
    assert (image.shard.nbytes, image.shard.frames, image.shard.tensors) == (512, (144, 368), (368, 400))
    assert image.shard.xxh3_128 == "225ebb040b133be0a8a1011d96956eb4"


def test_worked_example_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    (tmp_path / "shard.safetensors").write_bytes(HEADER + INDEX + DATA)
    with safe_open(tmp_path / "shard.safetensors", "np") as file:
        assert file.get_tensor("index").tobytes() == INDEX
        assert file.get_tensor("group.0").tobytes() == DATA


def test_worked_example_as_a_mask_is_one_frame_of_both_tensors() -> None:
    (group,) = groups("raw", "mask")
    (frame,) = group.frames
    assert (frame.plane, frame.block, frame.codec, frame.outer, frame.raw) == (32, 0, 0, 0, 24)
    assert bytes(frame.stored).hex() == "0000000000000000010000000000010000000000" + "02800000"


def test_worked_example_undoes_itself() -> None:
    held = NEW.copy()
    backend.apply(LAYOUT, backend.decode(LAYOUT, groups("zstd")), where(held))
    assert held.tolist() == OLD.tolist()


def test_long_planes_are_cut_into_zstd_frames_that_stand_alone() -> None:
    """400,000 dense bytes: a frame of 262,144 and one of the rest, read with the zstandard library alone."""
    layout = Layout(["t"], ["U8"], [[400_000]])
    old, new = np.zeros(400_000, np.uint8), np.full(400_000, 7, np.uint8)
    encoded = backend.encode(layout, *(np.array([a.ctypes.data], np.uint64) for a in (old, new)))
    (group,) = encoded
    frames = [f for f in group.frames if f.plane == 16]
    assert [(f.plane, f.block, f.codec, f.outer, f.raw) for f in group.frames] == [
        (0, 0, 1, 0, 98), (16, 0, 1, 0, 262_144), (16, 0, 1, 0, 137_856),
    ]  # fmt: skip
    assert zstandard.ZstdDecompressor().decompress(bytes(group.frames[0].stored)) == b"\xff\xff" * 49
    for frame in frames:
        assert zstandard.ZstdDecompressor().decompress(bytes(frame.stored)) == b"\x07" * frame.raw


def test_positions_and_gaps_begin_again_in_every_tile() -> None:
    """Changes at 0, 1 and 8191 of the first tile, and at 5 of the second."""
    layout = Layout(["t"], ["U8"], [[8200]])
    old = np.zeros(8200, np.uint8)
    new = old.copy()
    new[[0, 1, 8191, 8197]] = [1, 2, 3, 4]
    (group,) = backend.encode(layout, *(np.array([a.ctypes.data], np.uint64) for a in (old, new)), codec="raw")
    planes = {f.plane: bytes(f.stored).hex() for f in group.frames}
    # 8189 = 0x1ffd unchanged elements lie between 1 and 8191; a tile of 8 with one change is sparse.
    assert planes == {0: "03000100", 1: "0000fd05", 2: "00001f00", 8: "01020304"}


def test_tile_is_dense_from_more_than_a_quarter_on() -> None:
    layout = Layout(["a", "b"], ["U8", "U8"], [[8], [8]])
    old = np.zeros(16, np.uint8)
    new = old.copy()
    new[[0, 1, 8, 9, 10]] = 1
    at = (np.array([a.ctypes.data, a.ctypes.data + 8], np.uint64) for a in (old, new))
    (group,) = backend.encode(layout, *at, codec="raw")
    planes = {f.plane: bytes(f.stored).hex() for f in group.frames}
    assert planes == {0: "0200ffff", 1: "0000", 2: "0000", 8: "0101", 16: "0101010000000000"}


def test_mask_frames_of_zeros_are_absent_and_the_block_number_says_which() -> None:
    layout = Layout(["t"], ["U8"], [[2 * (2 << 20) + 5]])
    old = np.zeros(2 * (2 << 20) + 5, np.uint8)
    new = old.copy()
    new[-1] = 9
    at = (np.array([a.ctypes.data], np.uint64) for a in (old, new))
    (group,) = backend.encode(layout, *at, codec="raw", form="mask")
    assert [(f.plane, f.block, f.raw, bytes(f.stored)) for f in group.frames] == [(32, 2, 5, b"\0\0\0\0\x09")]
    backend.apply(layout, backend.decode(layout, [group]), np.array([old.ctypes.data], np.uint64))
    assert old[-1] == 9
    assert not old[:-1].any()


def test_layout_is_written_byte_for_byte() -> None:
    assert LAYOUT.encoded == b'{"tensors":[["a","BF16",[6]],["b","BF16",[6]]]}\n'
    assert LAYOUT.digest == "eb572c94c4b7f8e87e913cab910636727a96a7f6055dde8e430e239dc06116af"
    strange = Layout(['\x01\n"\\/\x7f\u00e9\u2028'], ["U8"], [[]])
    assert strange.encoded == b'{"tensors":[["\\u0001\\n\\"\\\\/\x7f\xc3\xa9\xe2\x80\xa8","U8",[]]]}\n'


def test_names_are_sorted_as_utf8() -> None:
    assert Layout(["\U0001f600", "\uff5e", "a", "B"], ["U8"] * 4, [[1]] * 4).names == ("B", "a", "\uff5e", "\U0001f600")


# ---------------------------------------------------------------- fingerprints


def test_first_keys() -> None:
    assert [fp_hex(k) for k in keys(np.arange(4, dtype=np.uint64)).tolist()] == [
        "e220a8397b1dcdaf", "910a2dec89025cc1", "975835de1c9756cf", "1d0b14e4db018fed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "count", "raw", "fingerprint"),
    [
        ("U8", 3, "010203", "1c1d8c891fc62baf"),
        ("U8", 5, "0102030405", "d73ce95e88d1fb74"),
        ("BF16", 3, "803f00408040", "8913cdfabce38900"),
        ("F32", 2, "0000803f000000c0", "a8cbaa15a8800000"),
        ("F64", 1, "000000000000f03f", "4378070a73f00000"),
        ("I64", 1, "ffffffffffffffff", "90f55449fbdfd590"),
    ],
)
def test_fingerprints_of_small_tensors(dtype: str, count: int, raw: str, fingerprint: str) -> None:
    held = np.frombuffer(bytes.fromhex(raw), np.uint8).copy()
    layout = Layout(["t"], [dtype], [[count]])
    assert fp_hex(int(backend.fingerprints(layout, np.array([held.ctypes.data], np.uint64))[0])) == fingerprint
    # By hand, from the definition.
    padded = held.tobytes() + bytes(-held.nbytes % 4)
    words = np.frombuffer(padded, "<u4").astype(np.uint64)
    by_hand = sum(int(w) * int(k) for w, k in zip(words, keys(np.arange(len(words), dtype=np.uint64)), strict=True))
    assert fp_hex(by_hand) == fingerprint


def test_tensor_weights() -> None:
    assert fp_hex(tensor_weight("a", "BF16", [6])) == "443ef76d3b624b2d"
    assert fp_hex(tensor_weight("b", "BF16", [6])) == "bbb7c9d722ee30f1"
    assert fp_hex(tensor_weight("scalar", "F32", [])) == "5c75d59a1148a3bf"
    # The definition, in the words of FORMAT.md.
    digest = hashlib.sha256(b"t\0F32\0002,3").digest()
    assert tensor_weight("t", "F32", [2, 3]) == int.from_bytes(digest[:8], "little") | 1
