"""A trial of decompression on a device, as `doctor` shows it: what the driver says, and what was seen to work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deltackpt import arena, nvcomp
from deltackpt import codec as codecs
from deltackpt.errors import IntegrityError
from deltackpt.libnvcomp import load

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Evidence:
    """What a trial showed of decompression on a device. mask, limit: of the driver; *_capable: pointer attribute 21.

    backend: asked for and used, which is one thing, since neither replaces the other. frames, stored, raw: how many,
    and their bytes, went from host memory into device memory and came out right.
    """

    nvcomp: str
    mask: int
    limit: int
    backend: str
    codecs: tuple[str, ...]
    host_capable: bool
    device_capable: bool
    frames: int
    stored: int
    raw: int


def probe(device: torch.device, *, backend: int) -> Evidence:
    """Decompress frames that the CPU made, out of a host arena into a device arena, and compare every byte.

    With HARDWARE each codec that the engine reads, with CUDA each that an engine might. A failure raises what it is;
    bytes that differ are an IntegrityError. Takes about 16 MiB and well under a second.
    """
    found = arena.capability(device)
    engine = arena.Capability(~0, 0).codecs
    tried = tuple(n for n in engine if backend == nvcomp.CUDA or n in found.codecs)
    if not tried:
        nvcomp.require_engine(codecs.LZ4, device, 0)
    frame, n = 1 << 18, 8
    rng = np.random.default_rng(0)
    raw = rng.integers(1, 256, (n, frame), np.uint8) * (rng.random((n, frame), np.float32) < 0.01)
    stored_total = 0
    host, out = arena.host_memory(n * frame, device), arena.device_memory(n * frame, device)
    places = np.arange(n, dtype=np.int64) * frame
    due = np.full(n, frame, np.int64)
    for name in tried:
        codec = codecs.NAMES.index(name)
        frames = [codecs.encode(codec, row)[1] for row in raw]
        nbytes = np.array([len(f) for f in frames], np.int64)
        offset = np.cumsum(nvcomp.aligned(nbytes)) - nvcomp.aligned(nbytes)
        for at, content in zip(offset.tolist(), frames, strict=True):
            host.numpy()[at : at + len(content)] = np.frombuffer(content, np.uint8)
        scratch = arena.device_memory(nvcomp.scratch_nbytes(codec, due, device, backend=backend), device)
        out.zero_()
        nvcomp.decompress(codec, host, offset, nbytes, out, places, due, backend=backend, scratch=scratch).wait()
        if not np.array_equal(out.cpu().numpy().reshape(n, frame), raw):
            raise IntegrityError(
                f"{name} frames by {nvcomp.BACKENDS[backend]} on {device} hold other bytes than went in"
            )
        stored_total += int(nbytes.sum())
    return Evidence(
        load().version, found.mask, found.limit, nvcomp.BACKENDS[backend], tried, arena.capable(host, device),
        arena.capable(out, device), n * len(tried), stored_total, n * frame * len(tried),
    )  # fmt: skip
