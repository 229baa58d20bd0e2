"""The other side of the wire format: a reader and a publisher as slime and miles have them, from its description.

Independent of the package: json, safetensors' own layout, zstandard and xxhash alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import make_cases
import xxhash
import zstandard

Weights = dict[str, bytes]

INDEX = "model.safetensors.index.json"


class TheirError(Exception):
    """Their reader answers 400."""


def weights(folder: Path) -> Weights:
    """Bytes of every tensor of a checkpoint folder."""
    return {name: raw for name, (_, _, raw) in make_cases.read_ckpt(folder).items()}


def index_of(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    return json.loads(path.read_text()) if path.exists() else {}


def name_of(version: int) -> str:
    return f"weight_v{version:06d}"


class TheirReader:
    """A host: its weights and the version that its marker names. Does all that theirs does, faults included."""

    def __init__(self, base: Path) -> None:
        self.weights, self.version = weights(base), 0

    def pull(self, source: Path, target: int) -> None:
        if self.version >= target:
            return
        chain: list[int] = []
        at = target
        while at != self.version:
            chain.append(at)
            metadata = index_of(source / name_of(at)).get("metadata", {})
            if not (source / name_of(at)).is_dir():
                raise TheirError(f"{name_of(at)} is not there")
            if "delta_encoding" not in metadata:
                break
            at = int(metadata["base_version"])
        for version in reversed(chain):
            self._take(source / name_of(version))
            self.version = version

    def _take(self, folder: Path) -> None:
        metadata = index_of(folder).get("metadata", {})
        if "delta_encoding" not in metadata:
            self.weights = weights(folder)
            return
        assert metadata["compression_format"] == "zstd"
        assert metadata["checksum_format"] == "xxh3-128"
        for path in sorted(folder.glob("*.safetensors")):
            entries, checksums = make_cases.read_st(path)
            for name, (dtype, shape, stored) in entries.items():
                assert dtype == "U8"
                assert list(shape) == [len(stored)]
                # One call, one frame: what follows it would be lost.
                raw = zstandard.ZstdDecompressor().decompress(stored)
                old = self.weights[name]
                if metadata["delta_encoding"] == "xor":
                    new = bytes(a ^ b for a, b in zip(old, raw, strict=True))
                else:
                    (count,) = struct.unpack_from("<I", raw)
                    at = struct.unpack_from(f"<{count}I", raw, 4)
                    changed = bytearray(old)
                    for position, value in zip(at, raw[4 + 4 * count :], strict=True):
                        changed[position] = value
                    new = bytes(changed)
                self.weights[name] = new
                if xxhash.xxh3_128_hexdigest(new) != checksums[name]:
                    raise TheirError(f"{name}: checksum differs")


def payload(old: bytes, new: bytes, encoding: str, *, frames: int = 1) -> bytes:
    """A tensor's stream as their publisher makes it."""
    if encoding == "xor":
        raw = bytes(a ^ b for a, b in zip(old, new, strict=True))
    else:
        at = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        raw = struct.pack(f"<I{len(at)}I", len(at), *at) + bytes(new[i] for i in at)
    cut = -(-len(raw) // frames)
    compressor = zstandard.ZstdCompressor(level=1)
    return b"".join(compressor.compress(raw[i * cut : (i + 1) * cut]) for i in range(frames))


def publish(
    source: Path,
    version: int,
    old: Weights,
    new: Weights,
    *,
    encoding: str = "xor",
    ranks: int = 2,
    frames: int = 1,
    digest: Any = xxhash.xxh3_128_hexdigest,
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """Write a delta folder as their trainer does: one shard a rank that has a changed tensor, the index last."""
    folder = source / name_of(version)
    folder.mkdir(parents=True)
    changed = sorted(name for name in new if new[name] != old[name])
    shards = [part for part in (changed[rank::ranks] for rank in range(ranks)) if part]
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        streams = {name: payload(old[name], new[name], encoding, frames=frames) for name in names}
        entries = [(name, "U8", (len(stored),), stored) for name, stored in streams.items()]
        (folder / file).write_bytes(make_cases.st_bytes(entries, {name: digest(new[name]) for name in names}))
        weight_map |= dict.fromkeys(names, file)
    said = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding,
        "compression_format": "zstd", "checksum_format": "xxh3-128", **(metadata or {}),
    }  # fmt: skip
    (folder / INDEX).write_text(json.dumps({"metadata": said, "weight_map": weight_map}))
    return folder
