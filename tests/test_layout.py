"""Layouts, tiles and groups."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from strategies import layouts

import deltackpt.layout as module
from deltackpt.errors import ConfigError, FormatError
from deltackpt.layout import BITS, TILE, Layout, Segments, element_width, tensor_nbytes
from deltackpt.shard import header_bytes


@pytest.mark.parametrize(
    ("dtype", "shape", "width", "nbytes"),
    [
        ("BOOL", (3,), 1, 3),
        ("U8", (3,), 1, 3),
        ("I8", (3,), 1, 3),
        ("F8_E4M3", (3,), 1, 3),
        ("F8_E5M2", (3,), 1, 3),
        ("F8_E8M0", (4,), 1, 4),
        ("F8_E4M3FNUZ", (3,), 1, 3),
        ("F8_E5M2FNUZ", (3,), 1, 3),
        ("F4", (2, 8), 1, 8),
        ("F4", (0, 4), 1, 0),
        ("F6_E2M3", (4,), 1, 3),
        ("F6_E3M2", (2, 4), 1, 6),
        ("I16", (5,), 2, 10),
        ("U16", (5,), 2, 10),
        ("F16", (5,), 2, 10),
        ("BF16", (4, 0, 3), 2, 0),
        ("I32", (2, 3), 4, 24),
        ("U32", (2, 3), 4, 24),
        ("F32", (), 4, 4),
        ("I64", (2,), 8, 16),
        ("U64", (2,), 8, 16),
        ("F64", (), 8, 8),
        ("C64", (2, 2), 8, 32),
    ],
)
def test_width_and_size_of_every_dtype(dtype: str, shape: tuple[int, ...], width: int, nbytes: int) -> None:
    assert element_width(dtype) == width
    assert tensor_nbytes("w", dtype, shape) == nbytes
    assert Layout(["w"], [dtype], [shape]).count.tolist() == [nbytes // width]


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_reference_reader_knows_every_dtype_and_its_size(dtype: str, tmp_path: object) -> None:
    nbytes = tensor_nbytes("w", dtype, [4])
    path = f"{tmp_path}/w.safetensors"
    with open(path, "wb") as file:
        file.write(header_bytes([("w", dtype, [4], nbytes)], None) + bytes(nbytes))
    with safe_open(path, "np") as opened:
        assert list(opened.keys()) == ["w"]


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("F128", (2,), r"tensor w: dtype 'F128' is unknown"),
        ("F4", (3,), r"tensor w: F4\[3\] is 12 bits, not whole bytes"),
        ("F6_E2M3", (2,), r"tensor w: F6_E2M3\[2\] is 12 bits, not whole bytes"),
        ("F32", (-1,), r"tensor w: shape \[-1\] has a negative extent"),
        ("F32", (2**62, 8), r"tensor w: a shape of 2 extents needs more than 2\^45 bytes"),
        ("U8", (2**45 + 1,), r"tensor w: a shape of 1 extents needs more than 2\^45 bytes"),
    ],
)
def test_impossible_tensor_is_refused_by_name(dtype: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Layout(["w"], [dtype], [shape])


@pytest.mark.parametrize("extent", [2**45 + 1, 2**64, 2**70])
def test_extent_beyond_every_integer_of_the_format_is_refused_even_beside_a_zero(extent: int) -> None:
    """Such a layout was encoded, but no reader could decode it."""
    with pytest.raises(FormatError, match=r"more than 2\^45 bytes"):
        Layout(["w"], ["U8"], [[extent, 0]])


def test_many_large_extents_are_refused_before_they_are_multiplied_out() -> None:
    """The product had as many digits as the header had extents: minutes of work for a small file."""
    with pytest.raises(FormatError, match=r"needs more than 2\^45 bytes"):
        tensor_nbytes("w", "U8", [2**62] * 200_000)


def test_name_that_is_no_unicode_text_is_refused() -> None:
    """It raised UnicodeEncodeError, which is no error of this package."""
    with pytest.raises(FormatError, match="not valid Unicode"):
        Layout(["a\ud800"], ["U8"], [[1]])


def test_sum_of_sizes_is_limited() -> None:
    with pytest.raises(FormatError, match=r"more than 2\^45 bytes together"):
        Layout(["a", "b"], ["U8", "U8"], [[2**45], [1]])


def test_repeated_name_is_refused() -> None:
    with pytest.raises(FormatError, match=r"tensor w: the name is there twice \(duplicate\)"):
        Layout(["w", "a", "w"], ["U8"] * 3, [[1], [1], [2]])


def test_tensors_are_sorted_by_utf8_bytes() -> None:
    # As UTF-16 the emoji would come before the private-use character.
    names = ["\ue000", "\U0001f600", "é", "z", "Z", "", "a.b", "a"]
    assert Layout(names, ["U8"] * 8, [[1]] * 8).names == ("", "Z", "a", "a.b", "z", "é", "\ue000", "\U0001f600")


def test_encoded_layout_and_digest_are_the_literal_ones() -> None:
    layout = Layout(["b", "a"], ["F32", "BF16"], [[], [2, 3]])
    assert layout.encoded == b'{"tensors":[["a","BF16",[2,3]],["b","F32",[]]]}\n'
    assert layout.digest == "4575ad1c8bf7fec0ae90ebd4a1ad19d5530b8c4c68d9d5fe1ad51e58f9b7a023"
    assert (layout.total_bytes, layout.total_elements) == (16, 7)


@given(layouts())
def test_decode_gives_the_encoded_layout_back(layout: Layout) -> None:
    again = Layout.decode(layout.encoded)
    assert (again.names, again.dtypes, again.shapes) == (layout.names, layout.dtypes, layout.shapes)
    assert again.encoded == layout.encoded


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([["b", "U8", [1]], ["a", "U8", [1]]], "not sorted by name"),
        ([["a", "U8", [1]], ["a", "U8", [1]]], "duplicate"),
        ([["a", "U7", [1]]], "dtype 'U7' is unknown"),
        ([["a", "U8", [-1]]], "negative extent"),
        ([["a", "U8"]], "length"),
        ([["a", "U8", [1.5]]], "int"),
        ("none", "array"),
    ],
)
def test_decode_refuses_what_is_not_canonical(tensors: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Layout.decode(msgspec.json.encode({"tensors": tensors}))


def test_decode_refuses_bytes_that_are_no_json() -> None:
    with pytest.raises(FormatError, match="layout: "):
        Layout.decode(b'{"tensors":[["a"')


@pytest.mark.parametrize("data", [b'{"later":1,"tensors":[]}\n', b'{"tensors":[]}', b'{"tensors": []}\n'])
def test_decode_refuses_all_but_the_one_way_to_write_a_layout(data: bytes) -> None:
    """Its digest is worked out from the tensors, and must be that of the bytes."""
    with pytest.raises(FormatError, match="that its digest stands for"):
        Layout.decode(data)


# ---------------------------------------------------------------- require_same


def small(*changes: tuple[str, str, list[int]] | str) -> Layout:
    """Layout of a, b, c with some replaced, added, or (given as a name) left out."""
    tensors = {name: (name, "F32", [2]) for name in "abc"}
    for change in changes:
        if isinstance(change, str):
            del tensors[change]
        else:
            tensors[change[0]] = change
    return Layout(*zip(*tensors.values(), strict=True))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (small("b"), "tensor b is missing;"),
        (small("b", ("bb", "F32", [2])), r"tensor b is missing \(bb is new\);"),
        (small(("d", "F32", [2])), "tensor d is new;"),
        (small(("b", "F16", [2])), "tensor b is F16, was F32;"),
        (small(("b", "F32", [1, 2])), r"tensor b has shape \[1, 2\], was \[2\];"),
        (small(("b", "F16", [4])), "tensor b is F16, was F32;"),
        (small("c", ("a", "I32", [2])), "tensor a is I32, was F32;"),
    ],
)
def test_require_same_names_the_first_difference(other: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small().require_same(other)


def test_require_same_accepts_an_equal_layout() -> None:
    small().require_same(small())


# ---------------------------------------------------------------- tiles and groups


@st.composite
def segments(draw: st.DrawFn) -> Segments:
    width = draw(st.sampled_from([1, 2, 4, 8]))
    counts = draw(st.lists(st.sampled_from([1, 2, 8191, 8192, 8193, 16384, 20001, 100_000]), min_size=1, max_size=8))
    starts = [draw(st.integers(0, 5)) * TILE for _ in counts]
    return Segments(width, np.arange(len(counts)), np.array(starts), np.array(counts))


def tiles_of(piece: Segments) -> list[tuple[int, int, int]]:
    """(tensor, first element, length) of every tile."""
    found = []
    for tensor, start, count in zip(piece.tensor.tolist(), piece.start.tolist(), piece.count.tolist(), strict=True):
        found += [(tensor, start + i, min(TILE, count - i)) for i in range(0, count, TILE)]
    return found


@given(segments())
def test_tile_lengths_are_8192_but_for_the_last_of_a_row(whole: Segments) -> None:
    assert whole.tile_lengths.tolist() == [length for _, _, length in tiles_of(whole)]
    assert whole.tiles == len(tiles_of(whole))


@given(segments(), st.sampled_from([999, 8192, 65536, 65537, 200_000, 1 << 30]))
def test_cut_keeps_all_tiles_and_begins_at_the_first_tile_at_or_past_each_multiple(whole: Segments, step: int) -> None:
    expected: list[list[tuple[int, int, int]]] = []
    nbytes, boundary = 0, 0
    for tile in tiles_of(whole):
        if nbytes >= boundary:
            expected.append([])
            boundary = (nbytes // step + 1) * step
        expected[-1].append(tile)
        nbytes += tile[2] * whole.width
    pieces = list(whole.cut(step))
    assert [tiles_of(p) for p in pieces] == expected
    assert sum(p.nbytes for p in pieces) == whole.nbytes
    assert all(p.width == whole.width and (p.start % TILE == 0).all() and (p.count > 0).all() for p in pieces)


def test_groups_are_numbered_by_width_then_by_place_and_skip_empty_tensors() -> None:
    layout = Layout(
        ["a", "b", "c", "d", "e", "f"], ["F32", "U8", "F4", "BF16", "F64", "F32"], [[9], [3], [2, 8], [5], [], [0]]
    )
    found = [(g.width, g.tensor.tolist(), g.start.tolist(), g.count.tolist()) for g in layout.groups]
    assert found == [(1, [1, 2], [0, 0], [3, 8]), (2, [3], [0], [5]), (4, [0], [0], [9]), (8, [4], [0], [1])]
    assert [layout.group_names(g) for g in range(4)] == ["b .. c", "d", "a", "e"]


def test_groups_are_cut_at_the_first_tile_at_or_past_256_mib() -> None:
    # One tensor of 600 MiB in bf16 after a small one: 10 bytes shift every cut to the next tile.
    layout = Layout(["a", "w"], ["BF16", "BF16"], [[5], [300 << 20]])
    found = [(g.tensor.tolist(), g.start.tolist(), g.count.tolist()) for g in layout.groups]
    assert found == [([0, 1], [0, 0], [5, 134217728]), ([1], [134217728], [134217728]), ([1], [268435456], [46137344])]


@pytest.mark.parametrize("group_bytes", [999, 16384, 50_000])
@given(layout=layouts())
def test_groups_hold_every_stored_element_once(layout: Layout, group_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GROUP_BYTES", group_bytes)
        groups = layout.groups
    seen = {t: 0 for t in range(len(layout.names))}
    for group in groups:
        assert 0 < group.nbytes < group_bytes + TILE * group.width
        for tensor, start, length in tiles_of(group):
            assert seen[tensor] == start
            assert layout.width[tensor] == group.width
            seen[tensor] += length
    assert list(seen.values()) == layout.count.tolist()
    assert [g.width for g in groups] == sorted(g.width for g in groups)


def test_layout_without_tensors_has_no_groups() -> None:
    layout = Layout([], [], [])
    assert (layout.groups, layout.total_bytes, layout.encoded) == ((), 0, b'{"tensors":[]}\n')
