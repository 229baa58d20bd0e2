"""Frame codecs: exactly the bytes that are due, or an error, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_cases import zstd_frame

from deltackpt import codec
from deltackpt.codec import ANS, DEFLATE, LZ4, RAW, SNAPPY, ZSTD, decode, decode_bounded, encode
from deltackpt.errors import FormatError, UnsupportedFormat

CODECS = (ZSTD, DEFLATE, LZ4, SNAPPY)
each_codec = pytest.mark.parametrize("number", CODECS, ids=lambda n: codec.NAMES[n])


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def test_names_and_numbers_are_the_literal_ones() -> None:
    assert codec.NAMES == ("raw", "zstd", "deflate", "lz4", "snappy", "ans")
    assert (RAW, ZSTD, DEFLATE, LZ4, SNAPPY, ANS) == (0, 1, 2, 3, 4, 5)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("number", [RAW, *CODECS], ids=lambda n: codec.NAMES[n])
@pytest.mark.parametrize("nbytes", [1, 2, 15, 16, 17, 65535, 65536, 262143, 262144, 2 << 20])
@pytest.mark.parametrize("kind", ["zeros", "noise", "mixed"])
def test_round_trip(number: int, nbytes: int, kind: str) -> None:
    raw = {"zeros": bytes(nbytes), "noise": noise(nbytes), "mixed": noise(nbytes // 2) + bytes(nbytes - nbytes // 2)}[
        kind
    ]
    used, stored = encode(number, raw)
    assert used in (number, RAW)
    assert len(stored) <= nbytes
    assert bytes(decode(used, stored, nbytes)) == raw


@each_codec
@given(
    st.binary(min_size=1, max_size=3000), st.integers(1, 40), st.sampled_from([bytes, memoryview, bytearray, "array"])
)
def test_round_trip_of_any_bytes_in_any_buffer(number: int, raw: bytes, times: int, buffer: object) -> None:
    raw *= times
    given = np.frombuffer(raw, np.uint8) if buffer == "array" else buffer(raw)  # type: ignore[operator]
    used, stored = encode(number, given)
    again = np.frombuffer(bytes(stored), np.uint8) if buffer == "array" else memoryview(bytes(stored))
    assert bytes(decode(used, again, len(raw))) == raw


@each_codec
def test_frame_that_gains_under_three_percent_is_stored_raw(number: int) -> None:
    raw = noise(10_000)
    used, stored = encode(number, raw)
    assert (used, stored) == (RAW, raw)
    assert stored is raw


@each_codec
def test_frame_that_gains_more_is_compressed(number: int) -> None:
    used, stored = encode(number, noise(9_000) + bytes(1_000))
    assert used == number
    assert 9_000 < len(stored) <= 9_700


def test_frames_are_what_other_tools_read() -> None:
    raw = b"delta" * 1000
    assert zlib.decompress(bytes(encode(DEFLATE, raw)[1]), -15) == raw
    assert bytes(encode(ZSTD, raw)[1])[:4] == b"\x28\xb5\x2f\xfd"
    # LZ4 block without a size: the token of five literals and a long match; snappy: the length as a varint.
    assert bytes(encode(LZ4, raw)[1])[:6] == b"\x5fdelta"
    assert bytes(encode(SNAPPY, raw)[1])[:2] == b"\x88\x27"


# ---------------------------------------------------------------- hostile frames


@each_codec
@pytest.mark.parametrize("nbytes", [100, 262144])
def test_truncated_frame_is_refused(number: int, nbytes: int) -> None:
    _, stored = encode(number, noise(nbytes // 2) + bytes(nbytes - nbytes // 2))
    for cut in (1, 2, 7, len(stored) // 2, len(stored)):
        with pytest.raises(FormatError, match=codec.NAMES[number]):
            decode(number, bytes(stored)[:-cut], nbytes)


@each_codec
@pytest.mark.parametrize("nbytes", [100, 262144])
def test_wrong_length_is_refused(number: int, nbytes: int) -> None:
    _, stored = encode(number, bytes(nbytes))
    for due in (0, 1, nbytes - 1, nbytes + 1, 2 * nbytes, 1 << 22):
        with pytest.raises(FormatError, match=codec.NAMES[number]):
            decode(number, stored, due)


@each_codec
@pytest.mark.parametrize("nbytes", [100, 262144])
def test_bytes_after_the_frame_are_refused(number: int, nbytes: int) -> None:
    _, stored = encode(number, noise(nbytes // 2) + bytes(nbytes - nbytes // 2))
    for byte in range(256):
        with pytest.raises(FormatError, match=codec.NAMES[number]):
            decode(number, bytes(stored) + bytes([byte]), nbytes)
    for more in (bytes(16), noise(16), bytes(stored), b"\x28\xb5\x2f\xfd", struct.pack("<II", 0x184D2A50, 0)):
        with pytest.raises(FormatError, match=codec.NAMES[number]):
            decode(number, bytes(stored) + more, nbytes)


def test_raw_frame_of_another_length_is_refused() -> None:
    for stored in (b"", b"abc", b"abcde"):
        with pytest.raises(FormatError, match=rf"raw frame holds {len(stored)} bytes, 4 are due"):
            decode(RAW, stored, 4)


@each_codec
@given(st.binary(max_size=300), st.integers(0, 1000))
def test_any_bytes_decode_into_what_is_due_or_raise_format_error(number: int, stored: bytes, due: int) -> None:
    try:
        assert len(decode(number, stored, due)) == due
    except FormatError:
        return


@each_codec
def test_spoilt_frames_decode_into_what_is_due_or_raise_format_error(number: int) -> None:
    _, stored = encode(number, noise(300) + bytes(700))
    rng = random.Random(0)
    for _ in range(2000):
        spoilt = bytearray(stored)
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        try:
            assert len(decode(number, spoilt, 1000)) == 1000
        except FormatError:
            continue


def test_ans_is_unsupported_and_other_numbers_are_unknown() -> None:
    with pytest.raises(UnsupportedFormat, match="only a GPU with nvCOMP"):
        decode(ANS, b"x", 1)
    for number in (6, 255):
        with pytest.raises(FormatError, match=f"codec number {number} is unknown"):
            decode(number, b"x", 1)


# ---------------------------------------------------------------- the outer zstd


def test_outer_zstd_gives_up_to_the_limit() -> None:
    for nbytes in (1, 99, 100):
        assert bytes(decode_bounded(zstd_frame(bytes(nbytes)), 100)) == bytes(nbytes)


@pytest.mark.parametrize(
    "stored",
    [
        zstd_frame(bytes(101)),
        zstd_frame(bytes(50), "none"),
        zstd_frame(bytes(50)) + b"\0",
        zstd_frame(bytes(50))[:-1],
        zstd_frame(b""),
        zstd_frame(bytes(50), 1 << 50),
        zstd_frame(bytes(50), (1 << 64) - 1),
        b"",
        b"\x28\xb5\x2f",
        b"no zstd at all, but long enough",
        noise(40),
    ],
    ids=range(11),
)
def test_hostile_outer_frame_is_a_format_error(stored: bytes) -> None:
    """Bytes that are no zstd used to raise the library's own error."""
    with pytest.raises(FormatError, match="zstd"):
        decode_bounded(stored, 100)


# ---------------------------------------------------------------- cases


def test_p34_awkward_frames_give_all_their_bytes_or_an_error(cases: Callable[[str], Path]) -> None:
    folder = cases("p34_zstd_frames")
    frames = json.loads((folder / "expect.json").read_text())["frames"]
    assert len(frames) == 9
    decoded = set()
    for name, plain in frames.items():
        stored = (folder / f"{name}.zst").read_bytes()
        lengths = {10_239, 10_240, 10_241} if plain is None else {plain[0]}
        for due in lengths:
            try:
                raw = bytes(decode(ZSTD, stored, due))
            except FormatError:
                continue
            assert plain is not None, name
            assert [len(raw), hashlib.sha256(raw).hexdigest()] == plain, name
            decoded.add(name)
    assert decoded == {"with_size", "no_size"}


def test_p34_frames_beside_the_right_one_are_never_shortened(cases: Callable[[str], Path]) -> None:
    folder = cases("p34_zstd_frames")
    for name in ("two_frames", "skippable_first", "cut", "size_says_less", "size_says_more"):
        stored = (folder / f"{name}.zst").read_bytes()
        for due in (1, 5, 4_000, 10_233, 10_239, 10_240, 10_241, 14_240):
            with pytest.raises(FormatError):
                decode(ZSTD, stored, due)


_BOMBS = """
import json, sys, zlib
from pathlib import Path
import cramjam
from deltackpt.codec import DEFLATE, LZ4, SNAPPY, ZSTD, decode, decode_bounded
from deltackpt.errors import FormatError

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

frames = {p.name: (ZSTD, p.read_bytes()) for p in Path(sys.argv[1]).glob("*.zst")}
squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
frames["deflate"] = (DEFLATE, b"".join(squeeze.compress(bytes(1 << 20)) for _ in range(256)) + squeeze.flush())
frames["lz4"] = (LZ4, b"\\x1f\\0\\1\\0" + b"\\xff" * (1 << 20) + b"\\0\\x50abcde")
frames["snappy"] = (SNAPPY, b"\\xff\\xff\\xff\\xff\\x0f" + bytes(cramjam.snappy.compress_raw(bytes(1 << 20)))[3:])
before = peak()
grown = {}
for name, (codec, stored) in frames.items():
    for due in (4096, 0):
        try:
            decode(codec, stored, due)
            raise SystemExit(f"{name} decoded")
        except FormatError:
            pass
    if codec == ZSTD:
        try:
            decode_bounded(stored, 4096)
            raise SystemExit(f"{name} decoded")
        except FormatError:
            pass
    grown[name] = peak() - before
print(json.dumps(grown))
"""


def test_p35_bombs_are_refused_within_64_mib(cases: Callable[[str], Path]) -> None:
    folder = cases("p35_zstd_bombs")
    # In a process of its own: the peak of this one is that of all tests before.
    done = subprocess.run([sys.executable, "-c", _BOMBS, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert set(grown) == {
        "declares_1PiB.zst", "holds_1GiB.zst", "holds_1GiB_no_size.zst", "deflate", "lz4", "snappy",
    }  # fmt: skip
    assert max(grown.values()) < 64 << 10, grown


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("declares_1PiB", "declares 1125899906842624 bytes, 4096 are due"),
        ("holds_1GiB", "declares 1073741824 bytes, 4096 are due"),
        ("holds_1GiB_no_size", "does not decode into 4096 bytes"),
    ],
)
def test_p35_refusal_names_both_sizes(name: str, message: str, cases: Callable[[str], Path]) -> None:
    stored = (cases("p35_zstd_bombs") / f"{name}.zst").read_bytes()
    with pytest.raises(FormatError, match=message):
        decode(ZSTD, stored, 4096)
