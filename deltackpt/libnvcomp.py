"""nvCOMP's C interface, as far as this package calls it: structures, prototypes, the library itself. Needs no torch.

nvCOMP is never shipped with this package. Exactly one major version is admitted: names, arguments and the numbers of
enumerations changed with every one so far, and so did ans streams.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from deltackpt import codec as codecs
from deltackpt.errors import ConfigError, Poisoned

MAJOR = 6
"""The major version of nvCOMP that is admitted."""
_SONAME = f"libnvcomp.so.{MAJOR}"

STATUS = {
    0: "Success", 10: "InvalidValue", 11: "NotSupported", 12: "CannotDecompress", 13: "BadChecksum",
    14: "CannotVerifyChecksums", 15: "OutputBufferTooSmall", 16: "WrongHeaderLength", 17: "Alignment",
    18: "ChunkSizeTooLarge", 19: "CannotCompress", 20: "WrongInputLength", 21: "BatchSizeTooLarge",
    22: "SubChunkCountTooLarge", 23: "SubChunkCountTooSmall", 24: "OutputBufferAlignmentTooSmall",
    1000: "CudaError", 10000: "Internal",
}  # fmt: skip
"""nvcompStatus_t."""

_INSTALL = "pip install 'deltackpt[cuda13]' (or cuda12)"

_i32, _u8, _size, _address = ctypes.c_int32, ctypes.c_uint8, ctypes.c_size_t, ctypes.c_void_p


class AnsCompress(ctypes.Structure):
    """nvcompBatchedANSCompressOpts_t; all zero: bytes, with nvCOMP's defaults."""

    _fields_ = (
        ("type", _i32), ("data_type", _i32), ("max_sub_chunk_count", _u8), ("states_per_lane", _u8),
        ("histogram_reduction_log2", _u8), ("reserved", _u8 * 53),
    )  # fmt: skip


class AnsDecompress(ctypes.Structure):
    """nvcompBatchedANSDecompressOpts_t."""

    _fields_ = (
        ("backend", _i32), ("data_type", _i32), ("max_sub_chunk_count", _u8), ("states_per_lane", _u8),
        ("skip_validate", _u8), ("reserved", _u8 * 53),
    )  # fmt: skip


class Lz4Compress(ctypes.Structure):
    """nvcompBatchedLZ4CompressOpts_t; all zero: bytes, not shuffled, which is what other decoders of LZ4 read."""

    _fields_ = (("data_type", _i32), ("bitshuffle_mode", _i32), ("reserved", _u8 * 56))


class Lz4Decompress(ctypes.Structure):
    """nvcompBatchedLZ4DecompressOpts_t."""

    _fields_ = (
        ("backend", _i32), ("sort_before_hw_decompress", _i32), ("data_type", _i32), ("bitshuffle_mode", _i32),
        ("reserved", _u8 * 48),
    )  # fmt: skip


class SnappyCompress(ctypes.Structure):
    """nvcompBatchedSnappyCompressOpts_t."""

    _fields_ = (("reserved", _u8 * 64),)


class SnappyDecompress(ctypes.Structure):
    """nvcompBatchedSnappyDecompressOpts_t."""

    _fields_ = (("backend", _i32), ("sort_before_hw_decompress", _i32), ("reserved", _u8 * 56))


class DeflateCompress(ctypes.Structure):
    """nvcompBatchedDeflateCompressOpts_t. algorithm: 0 to 5, larger is smaller and slower."""

    _fields_ = (("algorithm", _i32), ("reserved", _u8 * 60))


class DeflateDecompress(ctypes.Structure):
    """nvcompBatchedDeflateDecompressOpts_t."""

    _fields_ = (("backend", _i32), ("sort_before_hw_decompress", _i32), ("reserved", _u8 * 56))


class ZstdCompress(ctypes.Structure):
    """nvcompBatchedZstdCompressOpts_t."""

    _fields_ = (("reserved", _u8 * 64),)


class ZstdDecompress(ctypes.Structure):
    """nvcompBatchedZstdDecompressOpts_t."""

    _fields_ = (("backend", _i32), ("reserved", _u8 * 60))


class Alignments(ctypes.Structure):
    """nvcompAlignmentRequirements_t."""

    _fields_ = (("input", _size), ("output", _size), ("temp", _size))


class Properties(ctypes.Structure):
    """nvcompProperties_t."""

    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


@dataclass(frozen=True)
class Format:
    """How nvCOMP calls a codec in its symbols, and its options, which are 64 bytes by value."""

    name: str
    compress: type[ctypes.Structure]
    decompress: type[ctypes.Structure]

    def compress_options(self, algorithm: int) -> ctypes.Structure:
        """Return the options for compression; algorithm: for deflate."""
        return self.compress(algorithm=algorithm) if self.compress is DeflateCompress else self.compress()

    def decompress_options(self, backend: int) -> ctypes.Structure:
        """Return the options for decompression."""
        if self.decompress is AnsDecompress:
            return self.decompress(backend=backend, data_type=_FROM_STREAM)
        return self.decompress(backend=backend)


_FROM_STREAM = 0xFF
"""NVCOMP_TYPE_BITS: an ans stream says itself what it was made of."""

FORMATS = {
    codecs.ANS: Format("ANS", AnsCompress, AnsDecompress),
    codecs.LZ4: Format("LZ4", Lz4Compress, Lz4Decompress),
    codecs.SNAPPY: Format("Snappy", SnappyCompress, SnappyDecompress),
    codecs.DEFLATE: Format("Deflate", DeflateCompress, DeflateDecompress),
    codecs.ZSTD: Format("Zstd", ZstdCompress, ZstdDecompress),
}
"""By codec number; each has the same calls."""


def prototypes(form: Format) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of each call of a codec, by what follows its name in the symbol."""
    c, d = form.compress, form.decompress
    return {
        "CompressGetRequiredAlignments": (c, _address),
        "DecompressGetRequiredAlignments": (d, _address),
        "CompressGetMaxOutputChunkSize": (_size, c, _address),
        "CompressGetTempSize": (_size, _size, c, _address, _size, _address),
        "DecompressGetTempSize": (_size, _size, d, _address, _size, _address),
        "CompressAsync": (
            _address, _address, _size, _size, _address, _size, _address, _address, c, _address, _address,
        ),
        "DecompressAsync": (
            _address, _address, _address, _address, _size, _address, _size, _address, d, _address, _address,
        ),
    }  # fmt: skip


def require(status: int, what: str) -> None:
    """Raise unless a call succeeded: Poisoned for a CUDA error, else ConfigError."""
    if status == 0:
        return
    name = STATUS.get(status, "unknown")
    if status in (1000, 10000):
        raise Poisoned(f"{what}: nvCOMP answers {status} ({name}); the CUDA context is lost, restart the process")
    raise ConfigError(f"{what}: nvCOMP answers {status} ({name}); use another codec or backend")


class Library:
    """nvCOMP, loaded. version: like "6.0.0"; path: where from."""

    def __init__(self, handle: Any, path: str) -> None:
        properties = Properties()
        require(handle.nvcompGetProperties(ctypes.byref(properties)), f"nvcompGetProperties of {path}")
        number = properties.version
        self.path, self.version = path, f"{number // 1000}.{number % 1000 // 100}.{number % 100}"
        if number // 1000 != MAJOR:
            raise ConfigError(f"nvCOMP {self.version} found at {path}, {MAJOR} is expected; {_INSTALL}")
        self._handle = handle
        for form in FORMATS.values():
            for call, arguments in prototypes(form).items():
                getattr(handle, f"nvcompBatched{form.name}{call}").argtypes = arguments

    def __call__(self, form: Format, call: str, *arguments: Any) -> None:
        """Call; raises what `require` raises."""
        name = f"nvcompBatched{form.name}{call}"
        require(getattr(self._handle, name)(*arguments), name)

    def ask(self, form: Format, call: str, *arguments: Any) -> int:
        """Call what answers with one size, at the place where `arguments` has None."""
        answer = _size()
        where = ctypes.addressof(answer)
        self(form, call, *(where if a is None else a for a in arguments))
        return answer.value

    def alignments(self, form: Format, options: ctypes.Structure) -> tuple[int, int, int]:
        """Ask which multiples of addresses a codec needs: input, output, temp."""
        answer = Alignments()
        call = (
            "CompressGetRequiredAlignments" if isinstance(options, form.compress) else "DecompressGetRequiredAlignments"
        )
        self(form, call, options, ctypes.addressof(answer))
        return answer.input, answer.output, answer.temp


def _folders() -> list[Path]:
    """Return where nvCOMP's wheel keeps its libraries, if it is installed."""
    # Not by import: older wheels of NVIDIA's make `nvidia` a package of one place, which hides those in others.
    return [folder for entry in sys.path if (folder := Path(entry, "nvidia", "libnvcomp", "lib64")).is_dir()]


@lru_cache
def installed() -> bool:
    """Say whether there is an nvCOMP, of whatever version: one that is not admitted is an error when it is used."""
    if _folders():
        return True
    try:
        ctypes.CDLL(_SONAME)
    except OSError:
        return False
    return True


@lru_cache
def load() -> Library:
    """Load nvCOMP: the wheel's, else the system's. Raises ConfigError: what was found, and what to install."""
    folders = _folders()
    for folder in folders:
        if (folder / _SONAME).exists():
            return Library(ctypes.CDLL(str(folder / _SONAME)), str(folder / _SONAME))
    try:
        return Library(ctypes.CDLL(_SONAME), _SONAME)
    except OSError as exc:
        found = ", ".join(sorted(p.name for f in folders for p in f.glob("libnvcomp.so*"))) or "none"
        raise ConfigError(f"{_SONAME} is expected, found: {found}; {_INSTALL}") from exc
