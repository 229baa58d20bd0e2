"""Digests and fingerprints: pure functions over bytes.

Digest means SHA-256 in hex. Checksums of stored bytes are xxh3. A fingerprint is the multilinear sum
of `manifests/FORMAT.md` section 7: u32 words w_j of a tensor, zero-padded, fp = sum w_j * K(j) mod 2^64
with K(j) = splitmix64(j) | 1 (Steele, Lea, Flood 2014: the finaliser of j + 0x9E3779B97F4A7C15).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

U64: TypeAlias = npt.NDArray[np.uint64]
Buffer: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8]"

_MASK = (1 << 64) - 1


def sha256(data: Buffer) -> str:
    """Return the SHA-256 of `data` in hex."""
    return hashlib.sha256(data).hexdigest()


def xxh3_64(data: Buffer) -> int:
    """Return xxh3-64 of `data`, seed 0."""
    import xxhash  # not there inside of engines, which read nothing that is stored

    return xxhash.xxh3_64_intdigest(data)


def keys(words: U64) -> U64:
    """Return K(j) for each word index j."""
    z = words + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def contribution(width: int, elements: U64, values: U64) -> U64:
    """Return what each element adds to its tensor's fingerprint.

    elements: index of the element in its tensor; values: its bits, zero-extended to u64.
    Linear in `values` mod 2^64, so new minus old may be passed for widths up to 4.
    """
    if width == 8:
        low, high = values & np.uint64(0xFFFFFFFF), values >> np.uint64(32)
        word = elements * np.uint64(2)
        return low * keys(word) + high * keys(word + np.uint64(1))
    offset = elements * np.uint64(width)
    shift = (offset & np.uint64(3)) << np.uint64(3)
    return (values << shift) * keys(offset >> np.uint64(2))


def tensor_weight(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return H_t, by which a tensor's fingerprint enters the state fingerprint.

    First 8 bytes, little-endian, of SHA-256 over `name NUL dtype NUL d0,d1,...`, lowest bit set.
    """
    text = f"{name}\0{dtype}\0{','.join(map(str, shape))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") | 1


def state_fingerprint(weights: U64, fingerprints: U64) -> int:
    """Return the sum over tensors of H_t * fp_t mod 2^64."""
    return int((weights * fingerprints).sum(dtype=np.uint64)) & _MASK


def fp_hex(value: int) -> str:
    """Write a fingerprint for JSON: 16 hex digits."""
    return f"{value & _MASK:016x}"
