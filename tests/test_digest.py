"""Fingerprints and digests against literal values, worked out with plain integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Memory

from deltackpt import backend
from deltackpt.digest import contribution, fp_hex, keys, sha256, state_fingerprint, tensor_weight, xxh3_64
from deltackpt.layout import Layout

MASK = (1 << 64) - 1


def plain_key(j: int) -> int:
    z = (j + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def plain_fingerprint(raw: bytes) -> int:
    raw += bytes(-len(raw) % 4)
    return sum(int.from_bytes(raw[i : i + 4], "little") * plain_key(i // 4) for i in range(0, len(raw), 4)) & MASK


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def fingerprint(dtype: str, raw: bytes) -> int:
    layout = Layout(["w"], [dtype], [[len(raw) * 8 // {"U8": 8, "BF16": 16, "F32": 32, "I64": 64}[dtype]]])
    memory = Memory([raw])
    return int(backend.fingerprints(layout, memory.addresses)[0])


def test_keys_are_the_literal_ones() -> None:
    assert keys(u64(0, 1, 2, 3, 12345, 2**32)).tolist() == [
        0xE220A8397B1DCDAF,
        0x910A2DEC89025CC1,
        0x975835DE1C9756CF,
        0x1D0B14E4DB018FED,
        0x22118258A9D111A1,
        0xC42C5A1AA3820139,
    ]


@given(st.lists(st.integers(0, MASK), max_size=20))
def test_keys_are_odd_and_match_plain_integers(words: list[int]) -> None:
    assert keys(u64(*words)).tolist() == [plain_key(j) for j in words]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", 0),
        (b"\x01", 0xE220A8397B1DCDAF),
        (b"abcde", 0xEA1C1E1A03A38574),
        (bytes(range(16)), 0x1460EE0B03C0AC98),
        (b"\xff" * 7, 0xF47BF9E5BCDFD590),
        (bytes(9), 0),
    ],
)
def test_fingerprint_of_bytes_pads_the_last_word_with_zeros(raw: bytes, expected: int) -> None:
    assert fingerprint("U8", raw) == expected


def test_fingerprint_depends_on_bytes_not_on_dtype() -> None:
    raw = bytes(range(16))
    assert {fingerprint(d, raw) for d in ("U8", "BF16", "F32", "I64")} == {0x1460EE0B03C0AC98}


@given(st.binary(max_size=100))
def test_fingerprint_matches_plain_integers(raw: bytes) -> None:
    assert fingerprint("U8", raw) == plain_fingerprint(raw)


def test_width_8_adds_two_words_with_two_keys() -> None:
    # Element 1 of a F64 tensor: words 2 and 3.
    assert contribution(8, u64(1), u64(0x8000000000000001)).tolist() == [0x4D8FDD49C9756CF]


def test_falling_value_is_extended_with_zeros_before_the_difference() -> None:
    # bf16 element 3 lies in the upper half of word 1: 0x3f80 becomes 0x3f7f.
    new, old = contribution(2, u64(3), u64(0x3F7F)), contribution(2, u64(3), u64(0x3F80))
    assert (new - old).tolist() == [-0x10000 * 0x910A2DEC89025CC1 & MASK]


@pytest.mark.parametrize("width", [1, 2, 4])
@given(data=st.data())
def test_difference_of_values_gives_the_difference_of_contributions(width: int, data: st.DataObject) -> None:
    value = st.integers(0, (1 << 8 * width) - 1)
    element, old, new = data.draw(st.integers(0, 2**40)), data.draw(value), data.draw(value)
    at = u64(element)
    both = contribution(width, at, u64(new)) - contribution(width, at, u64(old))
    assert contribution(width, at, u64(new) - u64(old)).tolist() == both.tolist()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@given(data=st.data())
def test_contributions_of_all_elements_add_up_to_the_fingerprint(width: int, data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=64).map(lambda b: b[: len(b) // width * width]))
    values = np.frombuffer(raw, f"<u{width}").astype(np.uint64)
    total = contribution(width, np.arange(len(values), dtype=np.uint64), values).sum(dtype=np.uint64)
    assert int(total) == plain_fingerprint(raw)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "expected"),
    [
        ("w", "F32", (2, 3), 0x9CCC2597446B6597),
        ("scale", "F32", (), 0x058E8CE26149FB47),
        ("é", "BF16", (0, 7), 0x9D6DEEE3A033B56F),
        ("l.weight", "F4", (2, 8), 0x707415988156D4F9),
    ],
)
def test_tensor_weight_is_the_literal_one(name: str, dtype: str, shape: tuple[int, ...], expected: int) -> None:
    assert tensor_weight(name, dtype, shape) == expected


def test_state_fingerprint_weighs_each_tensor() -> None:
    layout = Layout(["w", "scale"], ["F32", "F32"], [[2, 3], []])
    memory = Memory([b"\0\0\x80\x3f", bytes(range(24))])  # in layout order: scale, w
    table = backend.fingerprints(layout, memory.addresses)
    assert table.tolist() == [0x4209E484E8800000, 0x687795F671128E64]
    assert state_fingerprint(layout.weights, table) == 0x83BFCDDB136B70FC


def test_fp_hex_has_16_digits_and_wraps() -> None:
    assert fp_hex(0) == "0000000000000000"
    assert fp_hex(-1) == "ffffffffffffffff"
    assert fp_hex(1 << 64 | 0xAB) == "00000000000000ab"


def test_checksums_are_the_published_ones() -> None:
    assert sha256(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert xxh3_64(b"") == 0x2D06800538D394C2
    assert xxh3_64(b"deltackpt") == 0xDDBE61D616191AF9
