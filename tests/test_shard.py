"""Safetensors headers and delta shards."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import flat_shape, layouts

from deltackpt.errors import FormatError
from deltackpt.layout import BITS, Layout, tensor_nbytes
from deltackpt.manifest import Shard
from deltackpt.shard import (
    CHANGE,
    FRAME,
    EncodedGroup,
    Frame,
    Header,
    Index,
    assemble,
    header_bytes,
    header_length,
    parse_header,
    parse_index,
)


def parse(file: bytes, what: str = "f") -> Header:
    """Parse the header of a whole file, as the package reads one."""
    length = header_length(file[:64], len(file), what)
    return parse_header(file[8 : 8 + length], len(file), what)


def refusal_of(file: bytes, what: str = "f") -> str:
    """Why a file is refused, empty if it is read."""
    try:
        parse(file, what)
    except FormatError as exc:
        return str(exc)
    return ""


def file_of(header: bytes | str | dict[str, object], data: int = 0) -> bytes:
    """Bytes of a file with this header and `data` bytes behind it."""
    if isinstance(header, dict):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def tensor(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def reference(file: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the safetensors library reads."""
    found = safetensors.deserialize(file)
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in found}


# ---------------------------------------------------------------- length of the header


@pytest.mark.parametrize("length", [100_000_001, 2**32, 2**63, 2**64 - 1])
def test_header_length_above_the_limit_is_refused_before_anything_is_read(length: int) -> None:
    with pytest.raises(FormatError, match=f"f: header length {length} is above the limit of 100000000"):
        header_length(struct.pack("<Q", length) + b"{", 2**62, "f")


@pytest.mark.parametrize(
    ("start", "nbytes", "message"),
    [
        (b"", 0, "0 bytes found, a safetensors file has at least 8"),
        (b"\x02\0\0\0\0\0\0", 7, "7 bytes found, a safetensors file has at least 8"),
        (struct.pack("<Q", 100), 107, "header length 100, but the file has only 107 bytes; it is cut short"),
        (b"version https://git-lfs.github.com/spec/v1\n", 130, "a git-lfs pointer of 130 bytes, not weights"),
        (b"<!DOCTYPE html>", 64, "an HTML page of 64 bytes, not weights"),
        (b"<?xml version='1.0'?><Error>", 200, "an HTML page of 200 bytes, not weights"),
    ],
)
def test_file_that_is_not_there_in_full_is_refused_with_bytes_found(start: bytes, nbytes: int, message: str) -> None:
    with pytest.raises(FormatError, match=f"^f: {message}"):
        header_length(start, nbytes, "f")


def test_header_may_fill_the_file() -> None:
    assert header_length(struct.pack("<Q", 2), 10, "f") == 2


# ---------------------------------------------------------------- parsing


def test_header_gives_tensors_in_offset_order_with_their_places() -> None:
    file = file_of(
        {"b": tensor(offsets=[2, 6]), "a": tensor("BF16", [], [0, 2]), "e": tensor("F32", [0, 3], [6, 6])}, 6
    )
    header = parse(file)
    assert [tuple(t) for t in header.tensors] == [
        ("a", "BF16", (), 0, 2), ("b", "U8", (4,), 2, 6), ("e", "F32", (0, 3), 6, 6),
    ]  # fmt: skip
    assert (header.metadata, header.data) == (None, len(file) - 6)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        # not the JSON of a header
        ("", 0, "does not begin with a brace"),
        ("{", 0, "not what safetensors defines"),
        (b'{"\xff":1}', 0, "not what safetensors defines"),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", 0, "not what safetensors defines"),
        ('{"a\\n":' + "9" * 5000 + "}", 0, "not what safetensors defines"),
        ("[" * 100_000, 0, "does not begin with a brace"),
        ('{"a":' * 100_000, 0, "not what safetensors defines"),
        ("[]", 0, "does not begin with a brace"),
        (" {}", 0, "does not begin with a brace"),
        ("{}{}", 0, "not what safetensors defines"),
        # repeated names
        ('{"a":1,"a":2}', 0, r"a is there twice \(duplicate\)"),
        ('{"w":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1, "dtype is there twice"),
        ('{"__metadata__":{"k":"1","k":"2"}}', 0, "k is there twice"),
        ('{"__metadata__":{},"__metadata__":{}}', 0, "__metadata__ is there twice"),
        (r'{"a":1,"\u0061":2}', 0, "a is there twice"),
        # fields of a tensor
        ({"w": 3}, 0, "tensor w: Expected `object`, got `int`"),
        ({"w": {"dtype": "U8", "shape": [4]}}, 4, "tensor w: Object missing required field `data_offsets`"),
        ({"w": tensor(stride=[1])}, 4, "tensor w: Object contains unknown field `stride`"),
        ({"w": tensor(7)}, 4, r"tensor w: .*\$\.dtype"),
        ({"w": tensor(shape="4")}, 4, r"tensor w: .*\$\.shape"),
        ({"w": tensor(offsets={"0": 4})}, 4, r"tensor w: .*\$\.data_offsets"),
        ({"w": tensor("U7")}, 4, "tensor w: dtype 'U7' is unknown"),
        ({"w": tensor(shape=[4.0])}, 4, r"tensor w: .*\$\.shape\[0\]"),
        ({"w": tensor(shape=[-4])}, 4, r"tensor w: .*\$\.shape\[0\]"),
        ({"w": tensor(shape=[True, 4])}, 4, r"tensor w: .*\$\.shape\[0\]"),
        ({"w": tensor(shape=[None])}, 4, r"tensor w: .*\$\.shape\[0\]"),
        ({"w": tensor(offsets=[0])}, 4, r"tensor w: .*\$\.data_offsets"),
        ({"w": tensor(offsets=[0, 4, 4])}, 4, r"tensor w: .*\$\.data_offsets"),
        ({"w": tensor(offsets=[-4, 0])}, 4, r"tensor w: .*\$\.data_offsets"),
        ({"w": tensor(offsets=[0.0, 4])}, 4, r"tensor w: .*\$\.data_offsets"),
        # sizes
        ({"w": tensor(shape=[5])}, 4, r"tensor w: U8\[5\] needs 5 bytes, data_offsets \[0, 4\] hold 4"),
        ({"w": tensor(offsets=[4, 0])}, 4, r"tensor w: U8\[4\] needs 4 bytes, data_offsets \[4, 0\] hold -4"),
        ({"w": tensor("F4", [3], [0, 1])}, 1, r"tensor w: F4\[3\] is 12 bits, not whole bytes"),
        ({"w": tensor("F32", [2**62, 8])}, 4, r"tensor w: .* needs more than 2\^45 bytes"),
        ({"w": tensor(shape=[0, 2**70], offsets=[0, 0])}, 0, r"tensor w: .* needs more than 2\^45 bytes"),
        # places
        ({"w": tensor(offsets=[1, 5])}, 5, "tensor w begins at 1 and leaves a hole before it, expected 0"),
        (
            {"v": tensor(), "w": tensor(offsets=[8, 12])},
            12,
            "tensor w begins at 8 and leaves a hole before it, expected 4",
        ),
        ({"v": tensor(), "w": tensor(offsets=[2, 6])}, 6, "tensor w begins at 2 and overlaps the one before it"),
        ({"v": tensor(), "w": tensor()}, 4, "tensor w begins at 0 and overlaps the one before it, expected 4"),
        ({"w": tensor()}, 3, r"the tensors end at byte \d+ \(last tensor w\), but \d+ bytes were found"),
        ({"w": tensor()}, 5, r"the tensors end at byte \d+ \(last tensor w\), but \d+ bytes were found"),
        ({}, 1, r"the tensors end at byte 10 \(last tensor none\), but 11 bytes were found"),
        # metadata
        ({"__metadata__": {"step": 3}}, 0, "__metadata__ is not .*: Expected `str`, got `int`"),
        ({"__metadata__": {"x": None}}, 0, "__metadata__ is not .*: Expected `str`, got `null`"),
        ({"__metadata__": []}, 0, "__metadata__ is not .*: Expected `object | null`, got `array`"),
        ({"__metadata__": tensor()}, 4, "__metadata__ is not .*: Expected `str`, got `array`"),
        # text that cannot be written again
        (r'{"\ud800":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', 1, "not what safetensors defines"),
        (r'{"__metadata__":{"k":"\ud800"}}', 0, "not what safetensors defines"),
        (r'{"__metadata__":{"\ud800":"v"}}', 0, "not what safetensors defines"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_hostile_header_is_a_format_error(header: bytes | str | dict[str, object], data: int, message: str) -> None:
    with pytest.raises(FormatError, match=f"^f: .*{message}"):
        parse(file_of(header, data))


def test_repeated_name_at_the_end_of_a_large_header_is_found_in_one_pass() -> None:
    """Each name used to be counted among all others: a small file kept the reader busy for minutes."""
    names = ",".join(f'"{i}":1' for i in [*range(100_000), 99_999])
    with pytest.raises(FormatError, match="99999 is there twice"):
        parse(file_of("{" + names + "}"))


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "note": 'é\n"q"'}])
def test_written_header_is_read_back(metadata: dict[str, str] | None) -> None:
    tensors = [("é", "BF16", (2, 3), 12), ("a", "F32", (), 4), ("n", "U8", (0,), 0)]
    file = header_bytes(tensors, metadata) + bytes(16)
    header = parse(file)
    assert [(t.name, t.dtype, t.shape, t.end - t.begin) for t in header.tensors] == tensors
    assert header.metadata == metadata
    assert header.data == len(file) - 16


def test_header_bytes_are_the_literal_ones() -> None:
    assert header_bytes([("w", "F32", [2], 8)], {"format": "pt"}) == (
        b'\x58\0\0\0\0\0\0\0{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   '
    )


@pytest.mark.parametrize("align", [1, 8, 16])
@pytest.mark.parametrize("name", ["w" * n for n in range(17)])
def test_data_section_begins_at_a_multiple_of_the_alignment(align: int, name: str) -> None:
    assert len(header_bytes([(name, "U8", [1], 1)], None, align)) % align == 0


def test_null_metadata_reads_as_absent() -> None:
    assert parse(file_of('{"__metadata__":null}')).metadata is None


# ---------------------------------------------------------------- against the reference reader


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Well-formed files, most of them spoilt in one place."""
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=4), max_size=4, unique=True))
    entries: dict[str, object] = {}
    if draw(st.booleans()):
        entries["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
    end = 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = [draw(st.integers(0, 2)), *flat_shape(dtype, draw(st.integers(0, 3)))]
        nbytes = tensor_nbytes(name, dtype, shape)
        entries[name] = tensor(dtype, shape, [end, end + nbytes])
        end += nbytes
    text = json.dumps(entries, ensure_ascii=draw(st.booleans()))
    raw = text.encode() + b" " * draw(st.integers(0, 9))
    spoil = draw(st.sampled_from(["no", "no", "byte", "digit", "data", "length"]))
    if spoil == "byte" and raw:
        at = draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at + 1 :]
    if spoil == "digit" and (places := [i for i, c in enumerate(raw) if chr(c).isdigit()]):
        at = draw(st.sampled_from(places))
        raw = raw[:at] + draw(st.sampled_from([b"0", b"1", b"7", b"-1", b"00", b"1.0", b"9" * 20])) + raw[at + 1 :]
    length = len(raw) + (draw(st.integers(-3, 3)) if spoil == "length" else 0)
    data = end + (draw(st.integers(-2, 2)) if spoil == "data" else 0)
    return struct.pack("<Q", max(length, 0)) + raw + bytes(i % 251 for i in range(max(data, 0)))


@settings(max_examples=400)
@given(files())
def test_parser_agrees_with_the_reference_reader(file: bytes) -> None:
    """What the library reads is read the same, and what it refuses is refused, but for repeats of a name."""
    assume(b"-0" not in file)  # 0 to us, to the library a float
    try:
        expected = reference(file)
    except safetensors.SafetensorError:
        with pytest.raises(FormatError):
            parse(file)
        return
    refusal = refusal_of(file)
    if refusal:
        assert any(reason in refusal for reason in ("duplicate", "contains unknown field", "begin with a brace")), (
            refusal
        )
        return
    header = parse(file)
    found = {
        t.name: (t.dtype, t.shape, file[header.data + t.begin : header.data + t.end]) for t in header.tensors
    }  # fmt: skip
    assert found == expected


@given(st.binary(max_size=200))
def test_parser_raises_nothing_but_format_error(raw: bytes) -> None:
    for file in (raw, file_of(raw), file_of(b'{"' + raw)):
        try:
            parse(file)
        except FormatError:
            continue


@pytest.mark.parametrize("case", ["p04_duplicate_keys", "p05_offsets_lie", "p07_metadata"])
def test_files_of_the_cases_are_read_or_refused_by_name(case: str, cases: Callable[[str], Path]) -> None:
    folder = cases(case)
    expect = json.loads((folder / "expect.json").read_text())
    for path in sorted(folder.glob("*.safetensors")):
        readable = expect["readable"].get(path.name, False)
        refusal = refusal_of(path.read_bytes(), path.name)
        assert refusal.startswith("" if readable else f"{path.name}: "), path.name
        assert bool(refusal) != readable, path.name


# ---------------------------------------------------------------- shards


def frame(nbytes: int, plane: int = 0, **fields: int) -> Frame:
    values = {"block": 0, "codec": 1, "outer": 0, "raw": 3 * nbytes} | fields
    return Frame(plane=plane, stored=bytes(range(nbytes)), **values)


LAYOUT = Layout(["a", "b", "c"], ["U8", "BF16", "F32"], [[100], [100], [100]])
GROUPS = [
    EncodedGroup(0, (frame(5), frame(16, 1), frame(1, 1)), np.array([0]), np.array([7], np.uint64), 3),
    EncodedGroup(2, (frame(33, 8, codec=4, outer=1),), np.array([2]), np.array([2**64 - 1], np.uint64), 9),
]


def test_assembled_shard_is_the_literal_one() -> None:
    image = assemble("data/x/s.safetensors", GROUPS)
    blob = b"".join(bytes(p) for p in image.parts)
    shard = image.shard
    # 4 frames of 32 bytes, 2 changes of 16; the header takes 208.
    assert (shard.key, shard.nbytes, shard.frames, shard.tensors) == (
        "data/x/s.safetensors", len(blob), (208, 336), (336, 368),
    )  # fmt: skip
    frames = np.frombuffer(blob[208:336], FRAME)
    assert frames["offset"].tolist() == [368, 384, 400, 416]
    assert frames["stored"].tolist() == [5, 16, 1, 33]
    assert frames["raw"].tolist() == [15, 48, 3, 99]
    assert frames["group"].tolist() == [0, 0, 0, 2]
    assert frames["plane"].tolist() == [0, 1, 1, 8]
    assert frames["codec"].tolist() == [1, 1, 1, 4]
    assert frames["outer"].tolist() == [0, 0, 0, 1]
    assert np.frombuffer(blob[336:368], CHANGE).tolist() == [(0, 0, 7), (2, 0, 2**64 - 1)]
    assert blob[368:373] == bytes(range(5))
    assert blob[373:384] == bytes(11)
    assert len(blob) == 416 + 48
    assert {n: (d, s) for n, (d, s, _) in reference(blob).items()} == {
        "index": ("U8", (160,)), "group.0": ("U8", (48,)), "group.2": ("U8", (48,)),
    }  # fmt: skip


def test_records_have_the_literal_places() -> None:
    assert FRAME.itemsize == 32
    assert {n: f[1] for n, f in FRAME.fields.items()} == {
        "offset": 0, "stored": 8, "raw": 12, "group": 16, "plane": 20, "codec": 21, "outer": 22, "block": 23,
        "checksum": 24,
    }  # fmt: skip
    assert CHANGE.itemsize == 16
    assert {n: f[1] for n, f in CHANGE.fields.items()} == {"tensor": 0, "part": 4, "fingerprint": 8}


def test_groups_that_share_a_tensor_add_up_its_change() -> None:
    groups = [
        EncodedGroup(0, (frame(1),), np.array([0]), np.array([2**64 - 1], np.uint64), 1),
        EncodedGroup(1, (frame(1),), np.array([0, 1]), np.array([3, 5], np.uint64), 2),
    ]
    image = assemble("data/x/s", groups)
    blob = b"".join(bytes(p) for p in image.parts)
    assert np.frombuffer(blob[slice(*image.shard.tensors)], CHANGE).tolist() == [(0, 0, 2), (1, 0, 5)]


@st.composite
def encoded_groups(draw: st.DrawFn) -> tuple[Layout, list[EncodedGroup]]:
    layout = draw(layouts().filter(lambda g: len(g.groups) > 0))
    groups = []
    for number in sorted(draw(st.sets(st.integers(0, len(layout.groups) - 1), min_size=1))):
        planes = sorted(draw(st.lists(st.integers(0, 40), min_size=1, max_size=5)))
        frames = tuple(frame(draw(st.integers(1, 100)), p) for p in planes)
        tensor = layout.groups[number].tensor
        groups.append(EncodedGroup(number, frames, tensor, np.arange(len(tensor), dtype=np.uint64), 1))
    return layout, groups


@given(encoded_groups())
def test_index_gives_back_every_frame_at_a_multiple_of_16(made: tuple[Layout, list[EncodedGroup]]) -> None:
    layout, groups = made
    image = assemble("data/x/s", groups)
    blob = b"".join(bytes(p) for p in image.parts)
    index = parse_index(image.shard, memoryview(blob), layout)
    frames = [(g.group, f) for g in groups for f in g.frames]
    assert (index.frames["offset"] % 16 == 0).all()
    assert [
        (r["group"], r["plane"], blob[int(r["offset"]) : int(r["offset"] + r["stored"])]) for r in index.frames
    ] == [(g, f.plane, f.stored) for g, f in frames]
    assert set(index.changes["tensor"].tolist()) == {t for g in groups for t in g.tensor.tolist()}
    assert set(reference(blob)) == {"index", *(f"group.{g.group}" for g in groups)}


def spoilt(
    edit: Callable[[np.ndarray, np.ndarray], None], shard_edit: dict[str, object] | None = None
) -> tuple[Shard, bytearray]:
    """A shard whose tables were edited, and which says so itself."""
    image = assemble("data/x/s", GROUPS)
    blob = bytearray(b"".join(bytes(p) for p in image.parts))
    shard = image.shard
    edit(
        np.frombuffer(memoryview(blob)[slice(*shard.frames)], FRAME),
        np.frombuffer(memoryview(blob)[slice(*shard.tensors)], CHANGE),
    )
    values = {f: getattr(shard, f) for f in ("key", "nbytes", "xxh3_128", "frames", "tensors")}
    return Shard(**(values | (shard_edit or {}))), blob


def put(field: str, row: int, value: int) -> Callable[[np.ndarray, np.ndarray], None]:
    def edit(frames: np.ndarray, changes: np.ndarray) -> None:
        table = frames if field in frames.dtype.names else changes
        table[field][row] = value

    return edit


def swap(table: int, i: int, j: int) -> Callable[[np.ndarray, np.ndarray], None]:
    def edit(*tables: np.ndarray) -> None:
        tables[table][[i, j]] = tables[table][[j, i]]

    return edit


def no_edit(_frames: np.ndarray, _changes: np.ndarray) -> None:
    """Leave the tables as they are."""


def test_unspoilt_shard_is_read() -> None:
    shard, blob = spoilt(no_edit)
    assert isinstance(parse_index(shard, memoryview(blob), LAYOUT), Index)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("offset", 1, 372), "frames overlap or lie outside the shard"),
        (put("stored", 0, 17), "frames overlap or lie outside the shard"),
        (put("stored", 3, 49), "frames overlap or lie outside the shard"),
        (put("stored", 3, 2**32 - 1), "frames overlap or lie outside the shard"),
        (put("offset", 0, 352), "frames overlap or lie outside the shard"),
        (put("offset", 0, 0), "frames overlap or lie outside the shard"),
        (put("offset", 3, 2**62), "frames overlap or lie outside the shard"),
        (put("offset", 3, 2**64 - 16), "frames overlap or lie outside the shard"),
        (put("offset", 1, 408), "frames are not sorted by group, plane and offset"),
        (put("group", 0, 1), "frames are not sorted by group, plane and offset"),
        (put("plane", 0, 2), "frames are not sorted by group, plane and offset"),
        (swap(0, 0, 1), "frames are not sorted by group, plane and offset"),
        (swap(0, 2, 3), "frames are not sorted by group, plane and offset"),
        (put("group", 3, 3), "a frame is empty or names a group that the layout does not have"),
        (put("group", 3, 2**32 - 1), "a frame is empty or names a group that the layout does not have"),
        (put("stored", 2, 0), "a frame is empty or names a group that the layout does not have"),
        (swap(1, 0, 1), "changed tensors are not sorted, or not in the layout"),
        (put("tensor", 1, 0), "changed tensors are not sorted, or not in the layout"),
        (put("tensor", 1, 3), "changed tensors are not sorted, or not in the layout"),
        (put("part", 1, 1), "names a part, but the version has none"),
    ],
)
def test_hostile_table_is_a_format_error(edit: Callable[[np.ndarray, np.ndarray], None], message: str) -> None:
    """An offset near 2^64 used to pass: its end wrapped around to the start of the shard."""
    shard, blob = spoilt(edit)
    with pytest.raises(FormatError, match=f"^shard data/x/s: {message}"):
        parse_index(shard, memoryview(blob), LAYOUT)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"frames": (208, 335)}, "index range 208..335 does not hold whole records"),
        ({"tensors": (336, 367)}, "index range 336..367 does not hold whole records"),
        ({"tensors": (336, 384)}, "index range 336..384 does not hold whole records"),
        ({"frames": (176, 336)}, "the first tensor is not the index that the manifest names"),
        ({"frames": (240, 336)}, "the first tensor is not the index that the manifest names"),
    ],
)
def test_index_range_that_is_not_the_index_is_refused(ranges: dict[str, object], message: str) -> None:
    shard, blob = spoilt(no_edit, ranges)
    with pytest.raises(FormatError, match=message):
        parse_index(shard, memoryview(blob), LAYOUT)


@pytest.mark.parametrize("nbytes", [0, 7, 8, 100, 207, 300, 463])
def test_shard_that_was_cut_is_refused(nbytes: int) -> None:
    shard, blob = spoilt(no_edit)
    with pytest.raises(FormatError, match=r"^shard data/x/s: "):
        parse_index(shard, memoryview(blob)[:nbytes], LAYOUT)
