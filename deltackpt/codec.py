"""Frame codecs: one frame of bytes to one compressed frame and back, on the CPU. Pure.

A decoder returns exactly the bytes that are due or raises FormatError; it allocates no more than that, whatever
the frame declares. Adding a codec is a change of the format.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import cramjam
import numpy as np
import numpy.typing as npt
import zstandard

from deltackpt.errors import FormatError, UnsupportedFormat

Bytes: TypeAlias = "bytes | memoryview | npt.NDArray[np.uint8]"

RAW, ZSTD, DEFLATE, LZ4, SNAPPY, ANS = range(6)
NAMES = ("raw", "zstd", "deflate", "lz4", "snappy", "ans")
"""Codec names by their number in the shard index."""

GAIN = 0.97
"""A frame that keeps more than this share of its bytes is stored raw."""

_local = threading.local()


def _zstd_parameters() -> zstandard.ZstdCompressionParameters:
    # Columns have next to no matches: few and long ones, looked up in a table that stays in the cache, cost less to
    # look for and leave more to the entropy coder. Against level 1 on columns at 1 % changed: 2.3 % smaller, a quarter
    # faster to write, a third faster to read.
    return zstandard.ZstdCompressionParameters(
        window_log=18,
        chain_log=6,
        hash_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        strategy=zstandard.STRATEGY_FAST,
    )


def _compressor() -> zstandard.ZstdCompressor:
    # A compressor object serves one thread at a time; making one costs more than a small frame.
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_zstd_parameters())
    compressor: zstandard.ZstdCompressor = _local.compressor
    return compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    decompressor: zstandard.ZstdDecompressor = _local.decompressor
    return decompressor


def _deflate(raw: Bytes) -> bytes:
    return bytes(cramjam.deflate.compress(np.frombuffer(raw, np.uint8), level=1))


def _lz4(raw: Bytes) -> bytes:
    return bytes(cramjam.lz4.compress_block(np.frombuffer(raw, np.uint8), store_size=False))


def _snappy(raw: Bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(np.frombuffer(raw, np.uint8)))


def _encode_zstd(raw: Bytes) -> bytes:
    return _compressor().compress(memoryview(raw))


_ENCODERS: dict[int, Callable[[Bytes], bytes]] = {
    ZSTD: _encode_zstd, DEFLATE: _deflate, LZ4: _lz4, SNAPPY: _snappy,
}  # fmt: skip


def encode(codec: int, raw: Bytes) -> tuple[int, Bytes]:
    """Compress one frame. Returns the codec that was used, RAW where compression gains under 3 %, and the bytes.

    The result of RAW is `raw` itself, not a copy.
    """
    if codec == RAW:
        return RAW, raw
    stored = _ENCODERS[codec](raw)
    if len(stored) > GAIN * len(raw):
        return RAW, raw
    return codec, stored


def encode_many(codec: int, raws: Sequence[Bytes], threads: int) -> list[tuple[int, Bytes]]:
    """Compress many frames, into the bytes that `encode` gives; zstd's own threads need the interpreter only once."""
    if codec != ZSTD:
        return [encode(codec, raw) for raw in raws]
    # Each thread gets a run of them: planes that are slow to compress are dealt out to all.
    order = [i for first in range(threads) for i in range(first, len(raws), threads)]
    found = _compressor().multi_compress_to_buffer([memoryview(raws[i]) for i in order], threads=threads)
    segments: list[Bytes] = [b""] * len(raws)
    for n, i in enumerate(order):
        segments[i] = memoryview(found[n])  # type: ignore[arg-type]  # it is a buffer
    pairs = zip(raws, segments, strict=True)
    return [(RAW, raw) if len(stored) > GAIN * len(raw) else (ZSTD, stored) for raw, stored in pairs]


def _decode_zstd(stored: Bytes, nbytes: int) -> bytes:
    # The content size is checked before the library may allocate it.
    declared = zstandard.get_frame_parameters(bytes(stored[:18])).content_size
    if declared not in (nbytes, zstandard.CONTENTSIZE_UNKNOWN):
        raise FormatError(f"zstd frame declares {declared} bytes, {nbytes} are due")
    if nbytes == 0:
        # A limit of 0 means "no limit" to the library; one byte is enough to see that there is something.
        raise FormatError("zstd frame where no bytes are due")
    return _decompressor().decompress(memoryview(stored), max_output_size=nbytes, allow_extra_data=False)


def _decode_deflate(stored: Bytes, nbytes: int) -> bytes:
    stream = zlib.decompressobj(-15)
    raw = stream.decompress(stored, nbytes + 1)
    if not stream.eof or stream.unused_data:
        raise FormatError(f"deflate frame does not end after {nbytes} bytes, or bytes follow it")
    return raw


def _decode_lz4(stored: Bytes, nbytes: int) -> bytes:
    out = np.empty(nbytes, np.uint8)
    written = cramjam.lz4.decompress_block_into(np.frombuffer(stored, np.uint8), out, output_len=nbytes)
    if written != nbytes:
        raise FormatError(f"lz4 frame holds {written} bytes, {nbytes} are due")
    return out  # type: ignore[return-value]  # any buffer serves


def _decode_snappy(stored: Bytes, nbytes: int) -> bytes:
    source = np.frombuffer(stored, np.uint8)
    declared = cramjam.snappy.decompress_raw_len(source)
    if declared != nbytes:
        raise FormatError(f"snappy frame declares {declared} bytes, {nbytes} are due")
    out = np.empty(nbytes, np.uint8)
    cramjam.snappy.decompress_raw_into(source, out)
    return out  # type: ignore[return-value]  # any buffer serves


_DECODERS: dict[int, Callable[[Bytes, int], bytes]] = {
    ZSTD: _decode_zstd, DEFLATE: _decode_deflate, LZ4: _decode_lz4, SNAPPY: _decode_snappy,
}  # fmt: skip


def decode(codec: int, stored: Bytes, nbytes: int) -> Bytes:
    """Decompress one frame into exactly `nbytes` bytes. Raises FormatError, and UnsupportedFormat for ans."""
    if codec == RAW:
        if len(stored) != nbytes:
            raise FormatError(f"raw frame holds {len(stored)} bytes, {nbytes} are due")
        return stored
    if codec == ANS:
        raise UnsupportedFormat("frame is ans, which only a GPU with nvCOMP reads")
    if codec not in _DECODERS:
        raise FormatError(f"codec number {codec} is unknown")
    try:
        raw = _DECODERS[codec](stored, nbytes)
    except (zstandard.ZstdError, zlib.error, cramjam.DecompressionError, ValueError) as exc:
        raise FormatError(f"{NAMES[codec]} frame does not decode into {nbytes} bytes: {exc}") from exc
    if len(raw) != nbytes:
        raise FormatError(f"{NAMES[codec]} frame holds {len(raw)} bytes, {nbytes} are due")
    return raw


def inner_limit(nbytes: int) -> int:
    """Return the most bytes that an inner codec makes of a frame of `nbytes`: none grows it by more."""
    return nbytes + nbytes // 6 + 64


def content_size(stored: Bytes, limit: int) -> int:
    """Return the length of what is inside an outer zstd frame. Raises FormatError for more than `limit` bytes."""
    try:
        declared = zstandard.get_frame_parameters(bytes(stored[:18])).content_size
    except zstandard.ZstdError as exc:
        raise FormatError(f"outer zstd frame: {exc}") from exc
    if declared > limit:
        raise FormatError(f"outer zstd frame declares {declared} bytes, at most {limit} are possible")
    return declared


def decode_bounded(stored: Bytes, limit: int) -> Bytes:
    """Take the outer zstd off a frame; what is inside may have any length up to `limit` bytes."""
    return decode(ZSTD, stored, content_size(stored, limit))
