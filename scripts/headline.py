"""Publish a large model from one GPU, follow it on the same or another through a real store; the end is bit-exact.

Memory is counted honestly: the trainer's weights, its base and the follower's weights are three copies.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Literal, TypeAlias, cast

import numpy as np
import torch

from deltackpt import Follower, Publisher, TensorTarget
from deltackpt.cuda import Cuda

Rows: TypeAlias = list[dict[str, object]]


def layer_shapes(form: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Tensors of one layer: bf16 matrices, or expert linears as packed codes, block scales and two scalars.

    many: smaller ones, 230,000 tensors in 42.5 GB; one: bytes without any division.
    """
    if form == "bf16":
        return {f"w{i}": ((6144, 2048), torch.bfloat16) for i in range(16)}
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if form == "one":
        return {"w": ((95_846_400,), torch.uint8)}
    rows, columns = (1024, 640) if form == "many" else (2048, 3072)
    for e in range(32):
        for p in ("gate", "up", "down"):
            shapes[f"{e}.{p}.weight"] = ((rows, columns), torch.uint8)
            shapes[f"{e}.{p}.weight_scale"] = ((rows, columns // 8), torch.float8_e4m3fn)
            shapes[f"{e}.{p}.weight_scale_2"] = ((), torch.float32)
            shapes[f"{e}.{p}.input_scale"] = ((), torch.float32)
    return shapes


def make(form: str, gb: float, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tensors of about `gb` 10^9 bytes, as views of few allocations."""
    shapes = layer_shapes(form)
    sizes = {n: torch.Size(s).numel() * torch.empty(0, dtype=d).element_size() for n, (s, d) in shapes.items()}
    layer = sum(sizes.values())
    if form == "one":
        whole = round(gb * 1e9 / layer) * layer
        return {"w": torch.randint(0, 256, (whole,), dtype=torch.uint8, device=device)}
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
        for raw in torch.split(tensor.view(torch.uint8).view(-1, tensor.element_size()), 1 << 26):
            hit = torch.rand(len(raw), device=raw.device, generator=generator) < density
            raw[:, 0] ^= hit.to(torch.uint8) * torch.randint(
                1, 8, (len(raw),), dtype=torch.uint8, device=raw.device, generator=generator
            )


def warm_host(nbytes: int) -> None:
    """Touch host memory once and give it back: a virtual machine may have to be given its pages first."""
    np.ones(nbytes, np.uint8)


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Its bytes, a gigabyte at a time."""
    return torch.split(tensor.reshape(-1).view(torch.uint8), 1 << 30)


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors hold the same bits."""
    return all(
        torch.equal(mine, other.to(mine.device))
        for n in left
        for mine, other in zip(pieces(left[n]), pieces(right[n]), strict=True)
    )


def run(
    form: str, density: float, gb: float, versions: int, store: Path, target: torch.device, ways: list[str],
    base_on: Literal["device", "host"],
) -> Rows:  # fmt: skip
    """Publish `versions` steps in each way, see --way; two of masks, which are slow. Return medians."""
    source = torch.device("cuda", 0)
    trainer = make(form, gb, source)
    nbytes = sum(t.numel() * t.element_size() for t in trainer.values())
    sampler = {n: torch.empty_like(t, device=target) for n, t in trainer.items()}
    warm_host(12 << 30)
    found: Rows = []
    follower = None
    for way in ways:
        codec, _, kind = way.partition(":")
        publisher = Publisher(
            str(store), run_id="headline", anchors=False, codec=codec, form=kind or "sparse", base_on=base_on
        )
        publisher.publish(trainer)
        follower = follower or Follower(str(store), TensorTarget(sampler))
        while (prepared := follower.prepare()) is not None:
            prepared.apply()
        torch.cuda.synchronize()
        baseline = torch.cuda.memory_allocated(source)
        torch.cuda.reset_peak_memory_stats(source)
        rows = []
        for version in range(1, 1 + (2 if kind else versions)):
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
        peak = torch.cuda.max_memory_allocated(source) - baseline
        publisher.close()
        medians = [statistics.median(r[i] for r in rows[1:] or rows) for i in range(6)]
        names = (
            "trainer_blocked_s", "published_s", "staged_s", "sampling_blocked_s", "end_to_end_s", "payload_bytes"
        )  # fmt: skip
        found.append({
            "form": form, "way": way, "base_on": base_on, "gb": round(nbytes / 1e9, 1),
            "tensors": len(trainer), "density": density,
            "exact": equal(trainer, sampler), **{n: round(m, 4) for n, m in zip(names, medians, strict=True)},
            "extra_device_mib": round(peak / 2**20),
        })  # fmt: skip
        print(json.dumps(found[-1]), flush=True)
        del publisher
    shutil.rmtree(store)
    return found


class Products:
    """A loop of bf16 matrix products in a thread and on a stream of its own.

    done: when each was done, by the device's clock, set against the host's: this thread may be late to see it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stop, self.done = device, threading.Event(), list[float]()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        a, b, c = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=self._device) for _ in range(3))
        under_way: deque[torch.cuda.Event] = deque()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with torch.cuda.stream(stream):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
            begin.record()
            begin.synchronize()
            began = time.perf_counter()
            while not self._stop.is_set():
                torch.mm(a, b, out=c)
                under_way.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]  # as above
                under_way[-1].record()
                # As far ahead as a training step's launches are: Python is busy elsewhere now and then.
                if len(under_way) > 32:
                    done = under_way.popleft()
                    done.synchronize()
                    self.done.append(began + begin.elapsed_time(done) / 1e3)

    def __enter__(self) -> Products:
        self._thread.start()
        time.sleep(1.0)  # until it runs at its pace
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def rate(self, spans: list[tuple[float, float]]) -> float:
        """Products a second within some spans of time."""
        return sum(begin <= t < end for t in self.done for begin, end in spans) / sum(e - b for b, e in spans)


def overlap(gb: float, versions: int, store: Path, codec: str, *, on_device: bool) -> dict[str, object]:
    """What a loop of matrix products keeps of its rate beside a publisher's background part, and beside a follower.

    on_device: whether frames are decoded by nvCOMP, else on the CPU.
    """
    device = torch.device("cuda", 0)
    trainer = make("bf16", gb, device)
    sampler = {n: torch.empty_like(t) for n, t in trainer.items()}
    publisher = Publisher(str(store), run_id="headline", anchors=False, codec=codec)
    publisher.publish(trainer)
    target = TensorTarget(sampler)
    follower = Follower(str(store), target)
    cast("Cuda", target.device(None)).nvcomp = on_device
    prepared = follower.prepare()
    assert prepared is not None
    prepared.apply()
    background: list[tuple[float, float]] = []
    staging: list[tuple[float, float]] = []
    alone: list[tuple[float, float]] = []
    with Products(device) as products:
        for version in range(1, versions + 1):
            began = time.perf_counter()
            time.sleep(0.5)
            alone.append((began, time.perf_counter()))
            step(trainer, 0.01, version)
            pending = publisher.submit(trainer)
            began = time.perf_counter()
            pending.result()
            background.append((began, time.perf_counter()))
            for _ in range(3):
                began = time.perf_counter()
                prepared = follower.prepare()
                assert prepared is not None
                staging.append((began, time.perf_counter()))
            prepared.apply()
    staged_ms = statistics.median(end - begin for begin, end in staging) * 1e3
    rates = [products.rate(spans) for spans in (alone, background, staging)]
    publisher.close()
    return {
        "codec": codec, "decoded": "GPU" if on_device else "CPU", "gb": gb, "staged_ms": round(staged_ms, 1),
        "alone_per_s": round(rates[0], 1), "beside_publisher": round(rates[1] / rates[0], 3),
        "beside_follower": round(rates[2] / rates[0], 3), "exact": equal(trainer, sampler),
    }  # fmt: skip


def main() -> None:
    """Run both layouts, or the chosen one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=44.0, help="bytes of model, in 10^9")
    parser.add_argument("--form", choices=("bf16", "nvfp4", "many", "one"), action="append")
    parser.add_argument("--way", action="append", help="codec of the frames; with :mask for that form; default zstd")
    parser.add_argument("--base-on", choices=("device", "host"), default="device", help="where the base is")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--store", type=Path, default=Path("/dev/shm"), help="folder for the store")
    parser.add_argument("--overlap", action="store_true", help="what a loop of matrix products keeps of its rate")
    parser.add_argument("--two", action="store_true", help="follow on a second GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = torch.device("cuda", 1 if options.two else 0)
    rows: Rows = []
    if options.overlap:
        for codec, on_device in (("zstd", True), ("zstd", False), ("ans", True)):
            store = Path(tempfile.mkdtemp(prefix="deltackpt-headline-", dir=options.store))
            try:
                print(json.dumps(overlap(options.gb, options.versions, store, codec, on_device=on_device)), flush=True)
            finally:
                shutil.rmtree(store, ignore_errors=True)
            torch.cuda.empty_cache()
        return
    ways = options.way or ["zstd"]
    for form in options.form or ("bf16", "nvfp4"):
        store = Path(tempfile.mkdtemp(prefix="deltackpt-headline-", dir=options.store))
        density = 0.01 if form == "bf16" else 0.00375
        try:
            rows += run(form, density, options.gb, options.versions, store, target, ways, options.base_on)
        finally:
            shutil.rmtree(store, ignore_errors=True)
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
