"""Publish a large model from one GPU, follow it on the same or another through a real store; the end is bit-exact.

Memory is counted honestly: the trainer's weights, its base and the follower's weights are three copies.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from deltackpt import Follower, Publisher, TensorTarget


def layer_shapes(form: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Tensors of one layer: bf16 matrices, or expert linears as packed codes, block scales and two scalars."""
    if form == "bf16":
        return {f"w{i}": ((6144, 2048), torch.bfloat16) for i in range(16)}
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for e in range(32):
        for p in ("gate", "up", "down"):
            shapes[f"{e}.{p}.weight"] = ((2048, 3072), torch.uint8)
            shapes[f"{e}.{p}.weight_scale"] = ((2048, 384), torch.float8_e4m3fn)
            shapes[f"{e}.{p}.weight_scale_2"] = ((), torch.float32)
            shapes[f"{e}.{p}.input_scale"] = ((), torch.float32)
    return shapes


def make(form: str, gb: float, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tensors of about `gb` 10^9 bytes, as views of few allocations."""
    shapes = layer_shapes(form)
    sizes = {n: torch.Size(s).numel() * torch.empty(0, dtype=d).element_size() for n, (s, d) in shapes.items()}
    layer = sum(sizes.values())
    tensors = {}
    for i in range(max(1, round(gb * 1e9 / layer))):
        block = torch.randint(0, 256, (layer,), dtype=torch.uint8, device=device)
        at = 0
        for n, (shape, dtype) in shapes.items():
            part = block[at : at + sizes[n]]
            if part.data_ptr() % torch.empty(0, dtype=dtype).element_size():
                raise AssertionError("sizes are multiples of the element")
            tensors[f"layers.{i:03d}.{n}"] = part.view(dtype).view(shape)
            at += sizes[n]
    return tensors


def step(tensors: dict[str, torch.Tensor], density: float, seed: int) -> None:
    """Change a share of the elements in their low bits, in place."""
    generator = torch.Generator(device=next(iter(tensors.values())).device).manual_seed(seed)
    for tensor in tensors.values():
        if tensor.numel() < 1024:
            continue
        raw = tensor.view(torch.uint8).view(-1, tensor.element_size())
        hit = torch.rand(len(raw), device=raw.device, generator=generator) < density
        raw[:, 0] ^= hit.to(torch.uint8) * torch.randint(
            1, 8, (len(raw),), dtype=torch.uint8, device=raw.device, generator=generator
        )


def warm_host(nbytes: int) -> None:
    """Touch host memory once and give it back: a virtual machine may have to be given its pages first."""
    np.ones(nbytes, np.uint8)


def run(
    form: str, density: float, gb: float, versions: int, store: Path, target: torch.device, codec: str
) -> dict[str, object]:
    """Publish `versions` steps; return medians."""
    source = torch.device("cuda", 0)
    trainer = make(form, gb, source)
    nbytes = sum(t.numel() * t.element_size() for t in trainer.values())
    sampler = {n: torch.empty_like(t, device=target) for n, t in trainer.items()}
    publisher = Publisher(str(store), run_id="headline", anchors=False, codec=codec)
    publisher.publish(trainer, step=0)
    follower = Follower(str(store), TensorTarget(sampler))
    prepared = follower.prepare()
    assert prepared is not None
    prepared.apply()
    for n in trainer:
        assert torch.equal(
            trainer[n].reshape(-1).view(torch.uint8), sampler[n].reshape(-1).view(torch.uint8).to(source)
        ), n
    warm_host(12 << 30)
    torch.cuda.synchronize()
    baseline = torch.cuda.memory_allocated(source)
    torch.cuda.reset_peak_memory_stats(source)
    rows = []
    for version in range(1, versions + 1):
        step(trainer, density, version)
        torch.cuda.synchronize()
        began = time.perf_counter()
        pending = publisher.submit(trainer, step=version)
        blocked = time.perf_counter() - began
        manifest = pending.result()
        published = time.perf_counter() - began
        prepared = follower.prepare()
        assert prepared is not None
        staged = time.perf_counter() - began
        prepared.apply()
        torch.cuda.synchronize()
        applied = time.perf_counter() - began
        del prepared  # its columns are of no use any more
        rows.append((blocked, published, staged - published, applied - staged, applied, manifest.totals.stored))
    exact = all(
        torch.equal(trainer[n].reshape(-1).view(torch.uint8), sampler[n].reshape(-1).view(torch.uint8).to(source))
        for n in trainer
    )
    peak = torch.cuda.max_memory_allocated(source) - baseline
    publisher.close()
    shutil.rmtree(store)
    medians = [statistics.median(r[i] for r in rows[1:] or rows) for i in range(6)]
    names = ("trainer_blocked_s", "published_s", "staged_s", "sampling_blocked_s", "end_to_end_s", "payload_bytes")
    return {
        "form": form, "codec": codec, "gb": round(nbytes / 1e9, 1), "tensors": len(trainer), "density": density,
        "exact": exact,
        **{n: round(m, 4) for n, m in zip(names, medians, strict=True)}, "extra_device_mib": round(peak / 2**20),
    }  # fmt: skip


def main() -> None:
    """Run both layouts, or the chosen one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=44.0, help="bytes of model, in 10^9")
    parser.add_argument("--form", choices=("bf16", "nvfp4"), action="append")
    parser.add_argument("--codec", default="zstd", help="codec of the frames")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--store", type=Path, default=Path("/dev/shm"), help="folder for the store")
    parser.add_argument("--two", action="store_true", help="follow on a second GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = torch.device("cuda", 1 if options.two else 0)
    rows = []
    for form in options.form or ("bf16", "nvfp4"):
        store = Path(tempfile.mkdtemp(prefix="deltackpt-headline-", dir=options.store))
        density = {"bf16": 0.01, "nvfp4": 0.00375}[form]
        try:
            rows.append(run(form, density, options.gb, options.versions, store, target, options.codec))
        finally:
            shutil.rmtree(store, ignore_errors=True)
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
