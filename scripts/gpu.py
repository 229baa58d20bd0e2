"""Everything that needs an NVIDIA GPU: the CUDA backend against the CPU one, bit for bit, then its speed."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from deltackpt import backend, cuda, nvcomp
from deltackpt.digest import U64
from deltackpt.layout import Layout
from deltackpt.shard import EncodedGroup, Fetched, assemble, parse_index

DEVICE = torch.device("cuda", 0)
DTYPES = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}


def addresses(tensors: list[torch.Tensor]) -> U64:
    """Address of each tensor's bytes."""
    return np.array([t.data_ptr() for t in tensors], np.uint64)


def place(content: np.ndarray, shift: int, device: torch.device) -> torch.Tensor:
    """Put bytes on a device, `shift` bytes past an aligned address."""
    out = torch.empty(len(content) + 64, dtype=torch.uint8, device=device)[shift : shift + len(content)]
    out.copy_(torch.from_numpy(content))
    return out


def same(left: list[EncodedGroup], right: list[EncodedGroup]) -> None:
    """Fail unless two encodings are the same, byte for byte."""
    assert [g.group for g in left] == [g.group for g in right]
    for a, b in zip(left, right, strict=True):
        assert a.changed == b.changed
        assert np.array_equal(a.tensor, b.tensor)
        assert np.array_equal(a.fingerprint, b.fingerprint)
        assert [(f.plane, f.codec, f.raw) for f in a.frames] == [(f.plane, f.codec, f.raw) for f in b.frames]
        assert all(bytes(f.stored) == bytes(g.stored) for f, g in zip(a.frames, b.frames, strict=True))


def stored(layout: Layout, groups: list[EncodedGroup], device: cuda.Cuda) -> Fetched:
    """Return groups as a follower sees them: in a shard that was fetched."""
    image = assemble("data/shard", groups)
    memory = device.room(image.shard.nbytes)
    memory[:] = b"".join(bytes(part) for part in image.parts)
    return Fetched(image.shard, parse_index(image.shard, memory, layout), memory)


WAYS = (
    ("zstd", "sparse", "cpu", None), ("zstd", "sparse", "nvcomp", None), ("ans", "sparse", "nvcomp", None),
    ("deflate", "sparse", "arenas", nvcomp.CUDA), ("lz4", "mask", "nvcomp", None), ("zstd", "mask", "cpu", None),
)  # fmt: skip
"""Codec and form of what is published, who decodes it, and the engine of `cuda.Cuda`."""


def compare(seed: int) -> None:
    """One random layout: encode, stage, apply and fingerprint on both backends."""
    rng = np.random.default_rng(seed)
    sizes = [0, 1, 3, 7, 8, 31, 4096, 8191, 8192, 8193, 20000, 100_000]
    n = int(rng.integers(1, 40))
    dtypes = [str(rng.choice(list(DTYPES))) for _ in range(n)]
    counts = [int(rng.choice(sizes)) for _ in range(n)]
    layout = Layout([f"t{i:03d}" for i in range(n)], dtypes, [(c,) for c in counts])
    old = [rng.integers(0, 256, int(b), dtype=np.uint8) for b in layout.nbytes]
    new = []
    for content in old:
        changed = content.copy()
        mask = rng.random(len(changed)) < rng.choice([0.0, 0.001, 0.01, 0.1, 0.5, 1.0])
        changed[mask] ^= rng.integers(1, 256, int(mask.sum()), dtype=np.uint8)
        new.append(changed)
    shifts = [int(rng.choice([0, 16, 8, 4, 2, 1, 3])) for _ in old]
    host = [[place(c, s, torch.device("cpu")) for c, s in zip(side, shifts, strict=True)] for side in (old, new)]
    on_gpu = [[place(c, s, DEVICE) for c, s in zip(side, shifts, strict=True)] for side in (old, new)]
    expected = list(backend.encode(layout, addresses(host[0]), addresses(host[1]), threads=2))
    made = cuda.extract(layout, addresses(on_gpu[0]), addresses(on_gpu[1]), DEVICE, threads=4)
    same(expected, list(made.groups()))
    total = np.zeros(n, np.uint64)
    for group in expected:
        total[group.tensor] += group.fingerprint
    for codec, form, decoder, engine in WAYS:
        tensors = [place(c, s, DEVICE) for c, s in zip(old, shifts, strict=True)]
        base = [place(c, s, DEVICE) for c, s in zip(old, shifts, strict=True)]
        device = cuda.Cuda(str(DEVICE), 4, engine)
        device.nvcomp = decoder != "cpu"
        made = device.encode(layout, addresses(base), addresses(on_gpu[1]), codec=codec, form=form)
        staged = device.stage(layout, [stored(layout, list(made.groups()), device)])
        assert np.array_equal(device.apply(layout, staged, addresses(tensors)), total)
        made.advance(addresses(base))
        for followed, advanced, new_one in zip(tensors, base, on_gpu[1], strict=True):
            assert torch.equal(followed, new_one), (codec, form, decoder)
            assert torch.equal(advanced, new_one), (codec, form, decoder)
    assert np.array_equal(
        cuda.fingerprints(layout, addresses(on_gpu[1]), DEVICE), backend.fingerprints(layout, addresses(host[1]))
    )


def seconds(work: Callable[[], object], times: int = 7) -> float:
    """Median time of a call, the device idle before and after."""
    work()
    spent = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def weights(n: int, density: float, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random elements, and a copy with a share of them changed in the low bits."""
    torch.manual_seed(0)
    old = torch.empty(n * width, dtype=torch.uint8, device=DEVICE)
    new = torch.empty_like(old)
    step = 1 << 26
    for i in range(0, n, step):
        k = min(step, n - i)
        a = torch.randint(0, 256, (k, width), dtype=torch.uint8, device=DEVICE)
        b = a.clone()
        hit = torch.rand(k, device=DEVICE) < density
        b[:, 0] ^= hit.to(torch.uint8) * torch.randint(1, 8, (k,), dtype=torch.uint8, device=DEVICE)
        old[i * width : (i + k) * width], new[i * width : (i + k) * width] = a.flatten(), b.flatten()
    return old, new


def extract_only(layout: Layout, tables: cuda._Tables, old: U64, new: U64) -> None:
    """Extract and put in order, window after window; nothing goes to the host but the sums."""
    kernels = cuda._kernels(0)
    sides = (tables.row_addresses(old), tables.row_addresses(new))
    zeros = [cuda._zeros(len(tables.tensor), DEVICE, torch.int64) for _ in range(2)]
    for groups in cuda._windows(layout):
        window = cuda._Window(layout, tables, groups)
        window.extract(kernels, sides, (zeros[0], zeros[1]))
        window.compact(kernels, sides, (zeros[0], zeros[1]))


def speed(gb: float) -> list[dict[str, object]]:
    """Rates of the kernels in TB/s of model, beside the copy bandwidth of the same run."""
    rows: list[dict[str, object]] = []
    for width, dtype, density in ((2, "BF16", 0.01), (2, "BF16", 0.02), (2, "BF16", 0.05), (1, "U8", 0.0075)):
        torch.cuda.empty_cache()
        n = int(gb * 1e9) // width // 8192 * 8192
        old, new = weights(n, density, width)
        layout = Layout(["w"], [dtype], [(n,)])
        a, b = addresses([old]), addresses([new])
        copy = torch.empty_like(old)
        t_copy = seconds(lambda: copy.copy_(old))  # noqa: B023 - called at once
        tables = cuda._tables(layout, DEVICE)
        fp = cuda._zeros(len(tables.tensor), DEVICE, torch.int64)
        t_extract = seconds(lambda: extract_only(layout, tables, a, b))  # noqa: B023
        device = cuda.Cuda(str(DEVICE))
        times: dict[str, list[float]] = {"encode": [], "stage": []}
        for _ in range(6):
            began = time.perf_counter()
            encoded = list(device.encode(layout, a, b, codec="zstd", form="sparse").groups())
            times["encode"].append(time.perf_counter() - began)
            fetched = stored(layout, encoded, device)
            began = time.perf_counter()
            (staged,) = device.stage(layout, [fetched])
            times["stage"].append(time.perf_counter() - began)
        t_encode, t_stage = (statistics.median(times[n][3:]) for n in ("encode", "stage"))
        rows_at, sums = tables.row_addresses(addresses([copy])), fp.clone()
        t_apply = seconds(lambda: staged.apply(rows_at, sums))  # noqa: B023
        copy.copy_(old)
        cuda.apply(staged, addresses([copy]))
        exact = torch.equal(copy, new)
        t_fingerprint = seconds(lambda: cuda.fingerprints(layout, b, DEVICE))  # noqa: B023
        nbytes = n * width
        rows.append(
            {
                "dtype": dtype, "density": density, "gb": round(nbytes / 1e9, 1), "exact": exact,
                "copy_tb_s": round(2 * nbytes / t_copy / 1e12, 2),
                "extract_tb_s": round(nbytes / t_extract / 1e12, 2), "extract_of_copy": round(t_copy / t_extract, 2),
                "encode_ms": round(t_encode * 1e3, 1), "stage_ms": round(t_stage * 1e3, 1),
                "apply_tb_s": round(nbytes / t_apply / 1e12, 2), "apply_ms": round(t_apply * 1e3, 2),
                "fingerprint_tb_s": round(nbytes / t_fingerprint / 1e12, 2),
                "stored_of_raw": round(sum(g.stored for g in encoded) / nbytes, 5),
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Compare, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=8.0, help="bytes of model for the speeds, in 10^9")
    parser.add_argument("--cases", type=int, default=60, help="random layouts to compare")
    parser.add_argument("--json", type=Path, help="write the speeds here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device; this script needs one")
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for seed in range(options.cases):
        compare(seed)
    print(f"{options.cases} random layouts: the CUDA backend gives the bytes of the CPU backend", flush=True)
    rows = speed(options.gb)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
