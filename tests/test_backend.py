"""Encode, decode and apply over whole layouts; what hostile columns meet."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Memory, Pair, changed_bytes, pairs, random_bytes

import deltackpt.backend as module
import deltackpt.layout
from deltackpt import codec as codecs
from deltackpt.backend import READ, SET, Staged, apply, decode, decode_group, encode, fingerprints, pack
from deltackpt.errors import ConfigError, FormatError, UnsupportedFormat
from deltackpt.layout import Layout, Segments
from deltackpt.shard import DENSE, GAP, MASK, VALUE, EncodedGroup, Frame, assemble

HAS_NUMBA = importlib.util.find_spec("numba") is not None
CODECS = ("raw", "zstd", "deflate", "lz4", "snappy")
FORMS = ("sparse", "mask")


@pytest.fixture(params=["numpy", pytest.param("numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="no numba"))])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run with these kernels, whatever the size of the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "use_jit", lambda _layout: request.param == "numba")
        yield request.param


def encoded(layout: Layout, old: list[bytes], new: list[bytes], **options: object) -> list[EncodedGroup]:
    before, after = Memory(old), Memory(new)
    return list(encode(layout, before.addresses, after.addresses, **options))  # type: ignore[arg-type]  # by name


def table(layout: Layout, contents: list[bytes]) -> np.ndarray:
    memory = Memory(contents)
    return fingerprints(layout, memory.addresses)


# ---------------------------------------------------------------- round trips


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", FORMS)
@given(
    pair=pairs(),
    codec=st.sampled_from(CODECS),
    threads=st.sampled_from([1, 2]),
    skew=st.integers(0, 15),
    group_bytes=st.sampled_from([20_000, 256 << 20]),
    piece=st.sampled_from([10_000, 16 << 20]),
)
def test_round_trip(form: str, pair: Pair, codec: str, threads: int, skew: int, group_bytes: int, piece: int) -> None:
    layout = pair.layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deltackpt.layout, "GROUP_BYTES", group_bytes)
        patch.setattr(module, "PIECE", piece)
        groups = encoded(layout, pair.old, pair.new, codec=codec, form=form, threads=threads)
        memory = Memory(pair.old, skew)
        edge = memory.between()
        staged = decode(layout, groups, threads=threads)
        difference = apply(layout, staged, memory.addresses, threads=threads)
        assert memory.tensors() == pair.new
        back = apply(layout, staged, memory.addresses, threads=threads)
        assert memory.tensors() == pair.old
        assert memory.between() == edge
    expected = table(layout, pair.new) - table(layout, pair.old)
    assert difference.tolist() == expected.tolist()
    assert (difference + back).tolist() == [0] * len(layout.names)
    # What the groups say about themselves.
    told = np.zeros(len(layout.names), np.uint64)
    for group in groups:
        told[group.tensor] += group.fingerprint
        assert group.tensor.tolist() == sorted(set(group.tensor.tolist()))
    assert told.tolist() == expected.tolist()
    widths = layout.width.tolist()
    flat = [
        (np.frombuffer(o, f"<u{w}"), np.frombuffer(n, f"<u{w}"))
        for o, n, w in zip(pair.old, pair.new, widths, strict=True)
    ]
    assert sum(g.changed for g in groups) == sum(int((a != b).sum()) for a, b in flat)
    assert {t for g in groups for t in g.tensor.tolist()} == {i for i, (a, b) in enumerate(flat) if (a != b).any()}


@given(pairs(), st.sampled_from(CODECS), st.sampled_from(FORMS))
def test_threads_and_kernels_change_no_byte(pair: Pair, codec: str, form: str) -> None:
    made = []
    for jit, threads in ((False, 1), (False, 2), *((HAS_NUMBA, n) for n in (1, 2))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "use_jit", lambda _layout, jit=jit: jit)
            groups = encoded(pair.layout, pair.old, pair.new, codec=codec, form=form, threads=threads)
        made.append(b"".join(bytes(p) for p in assemble("data/x/s", groups).parts))
    assert set(made) == {made[0]}


@given(pairs())
def test_both_forms_decode_into_the_same_columns(pair: Pair) -> None:
    found = []
    for form in FORMS:
        staged = decode(pair.layout, encoded(pair.layout, pair.old, pair.new, form=form))
        found.append(
            [
                (s.group, *(getattr(s.columns, c).tobytes() for c in ("counts", "gaps", "values", "dense")))
                for s in staged
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("form", FORMS)
def test_unchanged_groups_are_not_yielded(form: str) -> None:
    layout = Layout(["a", "b", "c"], ["U8", "BF16", "F32"], [[9000], [9000], [9000]])
    old = random_bytes(layout, 0)
    assert encoded(layout, old, old, form=form) == []
    new = [old[0], old[1], old[2][:-1] + bytes([old[2][-1] ^ 1])]
    (group,) = encoded(layout, old, new, form=form)
    assert (group.group, group.tensor.tolist(), group.changed) == (2, [2], 1)


def test_layout_without_elements_has_nothing_to_encode() -> None:
    layout = Layout(["a", "b"], ["F32", "U8"], [[0, 3], [0]])
    assert encoded(layout, [b"", b""], [b"", b""]) == []
    assert fingerprints(layout, Memory([b"", b""]).addresses).tolist() == [0, 0]


@given(pairs())
def test_packed_new_values_are_decoded_and_written_over_anything(pair: Pair) -> None:
    """The redo journal: columns of new values, laid out raw, written with SET."""
    layout = pair.layout
    staged = decode(layout, encoded(layout, pair.old, pair.new))
    memory = Memory(pair.old)
    apply(layout, staged, memory.addresses, mode=READ)
    assert memory.tensors() == pair.old
    packed = [pack(layout, s) for s in staged]
    assert {f.codec for g in packed for f in g.frames} <= {codecs.RAW}
    again = [decode_group(layout, g.group, g.frames) for g in packed]
    for contents in (pair.old, pair.new):
        memory = Memory(contents)
        apply(layout, again, memory.addresses, mode=SET)
        assert memory.tensors() == pair.new


@pytest.mark.parametrize(("option", "value"), [("codec", "ans"), ("codec", "gzip"), ("form", "dense")])
def test_unknown_codec_or_form_is_a_config_error(option: str, value: str) -> None:
    layout = Layout(["a"], ["U8"], [[1]])
    with pytest.raises(ConfigError, match=f"{option} '{value}' is unknown; expected one of|expected sparse or mask"):
        encoded(layout, [b"a"], [b"b"], **{option: value})


# ---------------------------------------------------------------- frames


def frames_of(group: EncodedGroup) -> list[tuple[int, int, int]]:
    """(plane, block, raw bytes) of each frame."""
    return [(f.plane, f.block, f.raw) for f in group.frames]


def test_dense_planes_are_cut_every_262144_bytes() -> None:
    layout = Layout(["w"], ["BF16"], [[300_000]])
    old = random_bytes(layout, 1)
    (group,) = encoded(layout, old, [bytes(b ^ 0xFF for b in old[0])])
    # 37 tiles, all dense.
    assert frames_of(group) == [
        (0, 0, 74), (16, 0, 262_144), (16, 0, 37_856), (17, 0, 262_144), (17, 0, 37_856),
    ]  # fmt: skip


def test_sparse_planes_are_cut_every_262144_bytes() -> None:
    layout = Layout(["w"], ["U8"], [[2_400_000]])
    new = np.zeros(2_400_000, np.uint8)
    new[::8] = 1
    (group,) = encoded(layout, [bytes(2_400_000)], [new.tobytes()])
    # 293 tiles, 300,000 changes.
    assert frames_of(group) == [
        (0, 0, 586), (1, 0, 262_144), (1, 0, 37_856), (2, 0, 262_144), (2, 0, 37_856), (8, 0, 262_144), (8, 0, 37_856),
    ]  # fmt: skip
    assert group.changed == 300_000


def test_plane_of_exactly_one_frame_has_no_empty_one_behind_it() -> None:
    layout = Layout(["w"], ["U8"], [[262_144]])
    (group,) = encoded(layout, [bytes(262_144)], [b"\1" * 262_144])
    assert frames_of(group) == [(0, 0, 64), (16, 0, 262_144)]


def test_masks_are_cut_every_2_mib_and_leave_out_frames_of_zeros() -> None:
    layout = Layout(["w"], ["U8"], [[9 << 20]])
    new = np.zeros(9 << 20, np.uint8)
    new[[0, (4 << 20) - 1, 4 << 20, (9 << 20) - 1]] = 1
    (group,) = encoded(layout, [bytes(9 << 20)], [new.tobytes()], form="mask")
    assert frames_of(group) == [(32, 0, 2 << 20), (32, 1, 2 << 20), (32, 2, 2 << 20), (32, 4, 1 << 20)]


@pytest.mark.parametrize(
    ("codec", "form", "expected"),
    [
        ("zstd", "sparse", {(1, 0)}), ("lz4", "sparse", {(3, 0)}), ("raw", "sparse", {(0, 0)}),
        ("zstd", "mask", {(1, 0)}), ("deflate", "mask", {(2, 1)}), ("lz4", "mask", {(3, 1)}),
        ("snappy", "mask", {(4, 1)}), ("raw", "mask", {(0, 0)}),
    ],
)  # fmt: skip
def test_mask_frames_of_an_inner_codec_are_wrapped_in_zstd(
    codec: str, form: str, expected: set[tuple[int, int]]
) -> None:
    layout = Layout(["w"], ["U8"], [[1 << 20]])
    new = np.zeros(1 << 20, np.uint8)
    new[::8192] = np.arange(128)  # element 0 stays as it is
    (group,) = encoded(layout, [bytes(1 << 20)], [new.tobytes()], codec=codec, form=form)
    large = [f for f in group.frames if f.raw > 1000]
    used = {(f.codec, f.outer) for f in (large or group.frames)}
    assert used <= expected | {(0, 0)}
    assert form == "sparse" or used == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
@pytest.mark.parametrize("density", [0.24, 0.26, 1.0])
def test_shard_is_never_above_1_01_of_the_weights(form: str, codec: str, dtype: str, density: float) -> None:
    units = (1 << 20) // {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}[dtype]
    layout = Layout(["a", "b"], [dtype, dtype], [[units - 5000], [5000]])
    old = random_bytes(layout, 3)
    # Other random bytes: every byte of a flip is random too.
    new = random_bytes(layout, 4) if density == 1.0 else changed_bytes(layout, old, density, 5)
    image = assemble("data/x/s", encoded(layout, old, new, codec=codec, form=form))
    assert image.shard.nbytes <= 1.01 * layout.total_bytes


# ---------------------------------------------------------------- hostile columns

LAYOUT = Layout(["a", "b"], ["BF16", "BF16"], [[20_000], [100]])  # tiles of 8192, 8192, 3616 and 100
OLD = random_bytes(LAYOUT, 7)


def valid(form: str = "sparse", codec: str = "zstd") -> list[Frame]:
    """Frames of a group whose tile 1 is dense and whose others hold a few changes."""
    new = [np.frombuffer(o, "<u2").copy() for o in OLD]
    new[0][[0, 5, 8191, 19_999]] ^= 0x0101
    new[0][8192:16384] ^= 0x8001
    new[1][99] ^= 1
    (group,) = encoded(LAYOUT, OLD, [n.tobytes() for n in new], form=form, codec=codec)
    return list(group.frames)


def raw_frame(plane: int, content: bytes, **fields: int) -> Frame:
    return Frame(
        **({"plane": plane, "block": 0, "codec": 0, "outer": 0, "raw": len(content), "stored": content} | fields)
    )  # type: ignore[arg-type]  # by name


def replaced(frames: list[Frame], plane: int, **fields: object) -> list[Frame]:
    return [dataclasses.replace(f, **fields) if f.plane == plane else f for f in frames]  # type: ignore[arg-type]  # by name


def with_plane(frames: list[Frame], plane: int, content: bytes) -> list[Frame]:
    return [raw_frame(plane, content) if f.plane == plane else f for f in frames]


def plane(frames: list[Frame], number: int) -> bytes:
    (found,) = (f for f in frames if f.plane == number)
    return bytes(codecs.decode(found.codec, found.stored, found.raw))


def counts(*values: int) -> bytes:
    return np.array(values, "<u2").tobytes()


def test_valid_frames_are_decoded() -> None:
    frames = valid()
    assert [(f.plane, f.raw) for f in frames] == [
        (0, 8), (1, 5), (2, 5), (8, 5), (9, 5), (16, 8192), (17, 8192),
    ]  # fmt: skip
    assert plane(frames, 0) == counts(3, 0xFFFF, 1, 1)
    assert isinstance(decode_group(LAYOUT, 0, frames), Staged)
    assert decode_group(LAYOUT, 0, frames).columns.counts.tolist() == [3, 0xFFFF, 1, 1]


HOSTILE: dict[str, Callable[[list[Frame]], list[Frame]]] = {
    # counts
    "no frame at all": lambda f: [],
    "no counts": lambda f: f[1:],
    "counts of a tile too few": lambda f: with_plane(f, 0, counts(3, 0xFFFF, 1)),
    "counts of a tile too many": lambda f: with_plane(f, 0, counts(3, 0xFFFF, 1, 1, 0)),
    "count above its tile": lambda f: with_plane(f, 0, counts(3, 0xFFFF, 1, 101)),
    "count far above its tile": lambda f: with_plane(f, 0, counts(3, 0xFFFF, 0xFFFE, 1)),
    "counts demand more": lambda f: with_plane(f, 0, counts(4, 0xFFFF, 1, 1)),
    "counts demand less": lambda f: with_plane(f, 0, counts(2, 0xFFFF, 1, 1)),
    "counts demand another dense tile": lambda f: with_plane(f, 0, counts(3, 0xFFFF, 1, 0xFFFF)),
    "counts demand no dense tile": lambda f: with_plane(f, 0, counts(3, 0, 1, 1)),
    "no change": lambda f: [raw_frame(0, counts(0, 0, 0, 0))],
    # positions
    "position outside the last tile": lambda f: with_plane(f, GAP, plane(f, GAP)[:-1] + b"\x64"),
    "position far outside": lambda f: with_plane(f, GAP + 1, b"\xff" * 5),
    "positions swapped between tiles": lambda f: with_plane(f, GAP + 1, plane(f, GAP + 1)[::-1]),
    # planes
    "a gap plane too short": lambda f: with_plane(f, GAP, plane(f, GAP)[:-1]),
    "a value plane too long": lambda f: with_plane(f, VALUE, plane(f, VALUE) + b"\0"),
    "a dense plane too short": lambda f: with_plane(f, DENSE, plane(f, DENSE)[:-1]),
    "a gap plane missing": lambda f: [x for x in f if x.plane != GAP + 1],
    "a value plane missing": lambda f: [x for x in f if x.plane != VALUE + 1],
    "a dense plane missing": lambda f: [x for x in f if x.plane != DENSE],
    "a value plane of a wider type": lambda f: sorted([*f, raw_frame(VALUE + 2, bytes(5))], key=lambda x: x.plane),
    "a dense plane of a wider type": lambda f: [*f, raw_frame(DENSE + 2, bytes(8192))],
    "an unknown plane": lambda f: [*f, raw_frame(200, b"x")],
    "a mask behind planes": lambda f: [*f, raw_frame(MASK, bytes(40_200))],
    "a frame twice": lambda f: sorted([*f, f[1]], key=lambda x: x.plane),
    "an empty frame behind a plane": lambda f: sorted([*f, raw_frame(VALUE, b"")], key=lambda x: x.plane),
    "a plane in two frames": lambda f: sorted(
        [*(x for x in f if x.plane != VALUE), raw_frame(VALUE, b"\1"), raw_frame(VALUE, b"\1\1\1\1")],
        key=lambda x: x.plane,
    ),
    "a block number in a plane": lambda f: replaced(f, VALUE, block=1),
    # frames
    "raw size says more": lambda f: replaced(f, DENSE, raw=8193),
    "raw size says gigabytes": lambda f: replaced(f, DENSE, raw=2**32 - 1),
    "content shorter than its raw size": lambda f: replaced(f, VALUE, stored=b"\1\1\1\1"),
    "content longer than its raw size": lambda f: replaced(f, VALUE, stored=b"\1" * 6),
    "content of another codec": lambda f: replaced(f, DENSE, codec=codecs.LZ4),
    "unknown codec": lambda f: replaced(f, DENSE, codec=77),
    "unknown outer codec": lambda f: replaced(f, DENSE, outer=codecs.LZ4),
    "outer zstd around nothing": lambda f: replaced(f, VALUE, outer=codecs.ZSTD),
    "bytes after a frame": lambda f: replaced(f, DENSE, stored=bytes(f[5].stored) + b"\0"),
    "cut frame": lambda f: replaced(f, DENSE, stored=bytes(f[5].stored)[:-1]),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("spoil", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("threads", [1, 2])
def test_hostile_columns_are_a_format_error_that_names_the_group(
    spoil: Callable[[list[Frame]], list[Frame]], threads: int
) -> None:
    frames = spoil(valid())
    with pytest.raises(FormatError, match=r"^group 0 \(a \.\. b\): "):
        decode_group(LAYOUT, 0, frames, threads=threads)


HOSTILE_MASKS: dict[str, Callable[[list[Frame]], list[Frame]]] = {
    "block just outside": lambda f: replaced(f, MASK, block=1),
    "block far outside": lambda f: replaced(f, MASK, block=255),
    "block twice": lambda f: [f[0], f[0]],
    "raw size of a whole frame": lambda f: replaced(f, MASK, raw=2 << 20),
    "raw size says less": lambda f: replaced(f, MASK, raw=40_199),
    "raw size says nothing": lambda f: replaced(f, MASK, raw=0, stored=b""),
    "all zeros": lambda f: [raw_frame(MASK, bytes(40_200))],
    "a plane behind the mask": lambda f: [*f, raw_frame(100, b"x")],
    "outer frame is no zstd": lambda f: replaced(f, MASK, stored=b"no zstd at all, but long enough"),
    "outer frame is missing": lambda f: replaced(f, MASK, outer=codecs.RAW),
    "outer frame cut": lambda f: replaced(f, MASK, stored=bytes(f[0].stored)[:-1]),
    "bytes after the outer frame": lambda f: replaced(f, MASK, stored=bytes(f[0].stored) + b"\0"),
    "inner codec is another": lambda f: replaced(f, MASK, codec=codecs.SNAPPY),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("spoil", HOSTILE_MASKS.values(), ids=HOSTILE_MASKS.keys())
def test_hostile_mask_is_a_format_error_that_names_the_group(spoil: Callable[[list[Frame]], list[Frame]]) -> None:
    frames = valid("mask", "lz4")
    assert [(f.plane, f.block, f.raw, f.codec, f.outer) for f in frames] == [(32, 0, 40_200, 3, 1)]
    assert isinstance(decode_group(LAYOUT, 0, frames), Staged)
    with pytest.raises(FormatError, match=r"^group 0 \(a \.\. b\): "):
        decode_group(LAYOUT, 0, spoil(frames))


def test_mask_block_past_a_last_frame_of_one_byte_is_refused() -> None:
    """One byte is broadcast to no bytes without an error, so the block used to vanish."""
    layout = Layout(["w"], ["U8"], [[(2 << 20) + 1]])
    first = raw_frame(MASK, b"\1" + bytes((2 << 20) - 1))
    for block in (2, 3, 255):
        with pytest.raises(FormatError, match="outside the group"):
            decode_group(layout, 0, [first, raw_frame(MASK, b"\1", block=block)])


def test_ans_frame_is_unsupported_not_broken() -> None:
    with pytest.raises(UnsupportedFormat, match=r"^group 0 \(a \.\. b\): "):
        decode_group(LAYOUT, 0, replaced(valid(), DENSE, codec=codecs.ANS))


@pytest.mark.parametrize("inner", [codecs.RAW, codecs.LZ4])
def test_outer_bomb_is_refused_by_its_declared_size(inner: int) -> None:
    squeeze = codecs._compressor().compress(bytes(64 << 20))
    frames = [raw_frame(MASK, squeeze, raw=40_200, codec=inner, outer=codecs.ZSTD)]
    with pytest.raises(FormatError, match="outer zstd frame declares 67108864 bytes, at most 46964 are possible"):
        decode_group(LAYOUT, 0, frames)


@given(st.integers(0, 2**32 - 1), st.sampled_from(FORMS), st.sampled_from(CODECS))
def test_spoilt_frames_are_refused_or_stay_inside_the_tensors(seed: int, form: str, codec: str) -> None:
    """Checksums are the writer's own; a kernel must not leave a tensor whatever the columns say."""
    rng = np.random.default_rng(seed)
    frames = valid(form, codec)
    for _ in range(int(rng.integers(1, 3))):
        at = int(rng.integers(0, len(frames)))
        stored = bytearray(bytes(frames[at].stored))
        stored[int(rng.integers(0, len(stored)))] ^= 1 << int(rng.integers(0, 8))
        frames[at] = dataclasses.replace(frames[at], stored=bytes(stored))
    memory = Memory(OLD)
    edge = memory.between()
    try:
        staged = decode_group(LAYOUT, 0, frames)
    except FormatError:
        assert memory.tensors() == OLD
        return
    apply(LAYOUT, [staged], memory.addresses)
    assert memory.between() == edge


def test_what_is_closed_before_its_end_reads_no_tensor_any_more() -> None:
    """A group could not be stored, and the weights were unmapped while others were still compared."""
    names = [f"t{n:02d}" for n in range(40)]
    memory = Memory([bytes(8192)] * 40)
    other = Memory([bytes([1]) * 8192] * 40)
    running: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        real = module.extract

        def extract(piece: Segments, *where: Any, jit: bool) -> Any:
            running.append(1)
            found = real(piece, *where, jit=jit)
            running.pop()
            return found

        patch.setattr(module, "extract", extract)
        patch.setattr(module, "PIECE", 8192)
        patch.setattr(deltackpt.layout, "GROUP_BYTES", 8192)
        layout = Layout(names, ["U8"] * 40, [(8192,)] * 40)
        encoding = module.Cpu(2).encode(layout, memory.addresses, other.addresses, codec="raw", form="sparse")
        groups = encoding.groups()
        assert next(groups).group == 0
        groups.close()
        assert running == []
        assert list(encoding.groups()) == []
