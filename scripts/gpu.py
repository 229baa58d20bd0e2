"""Everything that needs an NVIDIA GPU: the CUDA backend against the CPU one, bit for bit, then its speed."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from deltackpt import backend, cuda, extraction, launch, masks, nvcomp, window
from deltackpt.digest import U64
from deltackpt.holding import Slice
from deltackpt.layout import Layout
from deltackpt.partition import Box, Partition
from deltackpt.shard import EncodedGroup, Fetched, assemble, parse_index
from deltackpt.slices import Held, Reach
from deltackpt.tensors import bits

DEVICE = torch.device("cuda", 0)
DTYPES = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}
OF_WIDTH = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}
"""A torch dtype of each of them, by its bytes."""


def addresses(tensors: list[torch.Tensor]) -> U64:
    """Address of each tensor's bytes."""
    return np.array([t.data_ptr() for t in tensors], np.uint64)


def place(content: np.ndarray, shift: int, device: torch.device) -> torch.Tensor:
    """Put bytes on a device, `shift` bytes past an aligned address."""
    out = torch.empty(len(content) + 64, dtype=torch.uint8, device=device)[shift : shift + len(content)]
    out.copy_(torch.from_numpy(content))
    return out


def pinned(content: np.ndarray, shift: int, device: cuda.Cuda) -> torch.Tensor:
    """As `place`, in host memory on which the device works."""
    memory, _ = device.allocate(len(content) + 64, in_host=True)
    out = cast("torch.Tensor", memory)[shift : shift + len(content)]
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


def stored(tiling: Layout | Partition, groups: list[EncodedGroup], device: cuda.Cuda) -> Fetched:
    """Return groups as a follower sees them: in a shard that was fetched."""
    image = assemble("data/shard", groups)
    memory = device.room(image.shard.nbytes)
    memory[:] = b"".join(bytes(part) for part in image.parts)
    return Fetched(image.shard, parse_index(image.shard, memory, tiling), memory)


WAYS = (
    ("zstd", "sparse", "cpu", None), ("zstd", "sparse", "nvcomp", None), ("ans", "sparse", "nvcomp", None),
    ("deflate", "sparse", "arenas", nvcomp.CUDA), ("lz4", "mask", "nvcomp", None), ("zstd", "mask", "nvcomp", None),
    ("snappy", "mask", "arenas", nvcomp.CUDA), ("deflate", "mask", "cpu", None), ("raw", "mask", "nvcomp", None),
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
    made = extraction.extract(layout, addresses(on_gpu[0]), addresses(on_gpu[1]), DEVICE, threads=4)
    same(expected, list(made.groups()))
    total = np.zeros(n, np.uint64)
    for group in expected:
        total[group.tensor] += group.fingerprint
    masks.BATCH = int(rng.choice([1 << 20, 1 << 30]))  # every group by itself, or all at once
    for codec, form, decoder, engine in WAYS:
        tensors = [place(c, s, DEVICE) for c, s in zip(old, shifts, strict=True)]
        device = cuda.Cuda(str(DEVICE), 4, engine)
        device.nvcomp = decoder != "cpu"
        base = [place(c, s, DEVICE) for c, s in zip(old, shifts, strict=True)]
        if decoder == "cpu":
            base = [pinned(c, s, device) for c, s in zip(old, shifts, strict=True)]
        made = device.encode(layout, addresses(base), addresses(on_gpu[1]), codec=codec, form=form)
        staged = device.stage(layout, [stored(layout, list(made.groups()), device)])
        assert np.array_equal(device.apply(layout, staged, addresses(tensors)), total)
        made.advance(addresses(base))
        for followed, advanced, new_one in zip(tensors, base, on_gpu[1], strict=True):
            assert torch.equal(followed, new_one), (codec, form, decoder)
            assert torch.equal(advanced.to(DEVICE), new_one), (codec, form, decoder)
    assert np.array_equal(
        cuda.fingerprints(layout, addresses(on_gpu[1]), DEVICE), backend.fingerprints(layout, addresses(host[1]))
    )


def random_partition(rng: np.random.Generator, layout: Layout, parts: int) -> Partition:
    """Cut tensors in two along random dimensions, some times, and deal the boxes out."""
    dealt: list[list[tuple[int, Box | None]]] = [[] for _ in range(parts)]
    for t, shape in enumerate(layout.shapes):
        boxes: list[Box] = [tuple((0, n) for n in shape)]
        for _ in range(int(rng.integers(0, 4))):
            box = boxes.pop(int(rng.integers(len(boxes))))
            axis = int(rng.integers(len(box)))
            begin, end = box[axis]
            at = int(rng.integers(begin, end))
            cuts = [(begin, at), (at, end)] if at > begin else [(begin, end)]
            boxes += [(*box[:axis], cut, *box[axis + 1 :]) for cut in cuts]
        for box in boxes:
            dealt[int(rng.integers(parts))].append((t, box))
    return Partition(layout, dealt)


def cut(layout: Layout, content: np.ndarray, tensor: int, box: Box) -> np.ndarray:
    """Return the bytes of a box, side by side."""
    elements = content.view(f"<u{layout.width[tensor]}").reshape(layout.shapes[tensor])
    return np.ascontiguousarray(elements[tuple(slice(*c) for c in box)]).reshape(-1).view(np.uint8)


def strided(rng: np.random.Generator, layout: Layout, content: np.ndarray, tensor: int, box: Box) -> Slice:
    """Return a box of a tensor in memory on the device: side by side, with room between its rows, or transposed."""
    width = int(layout.width[tensor])
    unit = OF_WIDTH[width]
    shape = [e - b for b, e in box]
    kind = int(rng.integers(3))
    if kind == 0:
        memory = torch.empty(shape, dtype=unit, device=DEVICE)
    elif kind == 1:
        memory = torch.empty([n + 3 for n in shape], dtype=unit, device=DEVICE)[tuple(slice(1, n + 1) for n in shape)]
    else:
        memory = torch.empty(shape[::-1], dtype=unit, device=DEVICE).permute(*range(len(shape))[::-1])
    raw = torch.from_numpy(cut(layout, content, tensor, box).copy()).to(DEVICE)
    bits(memory).copy_(raw.view(bits(memory).dtype).reshape(shape))
    return Slice(layout.names[tensor], layout.shapes[tensor], box, memory)


def compare_parts(seed: int) -> None:
    """One random layout, cut for publishing and cut otherwise for following, on both backends."""
    rng = np.random.default_rng(seed)
    shapes = [(1,), (9000,), (64, 40), (300, 70), (7, 33, 50), (5, 4, 3, 200)]
    n = int(rng.integers(1, 8))
    dtypes = [str(rng.choice(list(DTYPES))) for _ in range(n)]
    layout = Layout([f"t{i}" for i in range(n)], dtypes, [shapes[int(rng.integers(len(shapes)))] for _ in range(n)])
    old = [rng.integers(0, 256, int(b), dtype=np.uint8) for b in layout.nbytes]
    new = []
    for content in old:
        hit = rng.random(len(content)) < rng.choice([0.001, 0.01, 0.1, 0.5])
        new.append(content ^ hit * rng.integers(1, 256, len(content), dtype=np.uint8))
    parts = random_partition(rng, layout, int(rng.integers(1, 4)))
    cpu, total, encoded = backend.Cpu(2), np.zeros(n, np.uint64), list[EncodedGroup]()
    for part in range(parts.parts):
        places = parts.places(part)
        sides = [[torch.from_numpy(cut(layout, c[t], t, b).copy()) for t, b in places] for c in (old, new)]
        expected = list(backend.encode_part(parts, part, addresses(sides[0]), addresses(sides[1]), threads=2))
        held = [[tensor.to(DEVICE) for tensor in side] for side in sides]
        before, after = map(addresses, held)
        made = cuda.Cuda(str(DEVICE), 2).encode_part(parts, part, before, after, codec="zstd", form="sparse")
        same(expected, list(made.groups()))
        made.advance(before)
        assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))
        encoded += expected
        for group in expected:
            np.add.at(total, group.tensor, group.fingerprint)
    ranks = random_partition(rng, layout, 2)
    for decoder in ("cpu", "nvcomp"):
        device = cuda.Cuda(str(DEVICE), 2)
        device.nvcomp = decoder == "nvcomp"
        fetched = stored(parts, encoded, device)
        staged = device.stage(parts, [fetched])
        tensors = [torch.from_numpy(c.copy()).to(DEVICE) for c in old]
        assert np.array_equal(device.apply(parts, staged, addresses(tensors)), total)
        assert all(torch.equal(t.cpu(), torch.from_numpy(c)) for t, c in zip(tensors, new, strict=True))
        for rank in range(ranks.parts):
            slices = {f"{i}": strided(rng, layout, old[t], t, b) for i, (t, b) in enumerate(ranks.places(rank))}
            host = {k: replace(s, tensor=cast("torch.Tensor", s.tensor).cpu()) for k, s in slices.items()}
            here, there = Held(layout, slices, {}), Held(layout, host, {})
            ours, theirs = Reach(here, parts), Reach(there, parts)
            for mine, one in zip(ours.locate(device), theirs.locate(cpu), strict=True):
                found = device.apply_rows(parts, staged, mine)
                assert np.array_equal(found, cpu.apply_rows(parts, cpu.stage(parts, [fetched]), one))
            for (t, b), one in zip(ranks.places(rank), slices.values(), strict=True):
                due = torch.from_numpy(cut(layout, new[t], t, b).copy())
                raw = bits(cast("torch.Tensor", one.tensor)).contiguous().reshape(-1).view(torch.uint8).cpu()
                assert torch.equal(raw, due), (seed, decoder, layout.names[t], b)
            sums = device.box_fingerprints(layout, here.tensor, here.place)
            assert np.array_equal(sums, cpu.box_fingerprints(layout, there.tensor, there.place))


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


def extract_only(tables: launch.Tables, old: U64, new: U64) -> None:
    """Extract and put in order, window after window; nothing goes to the host but the sums."""
    sides = (tables.whole(old).runs, tables.whole(new).runs)
    sums = (launch.row_sums(tables), launch.row_sums(tables))
    for groups in window.windows(tables, range(len(tables.group_tiles))):
        one = window.Window(tables, groups)
        one.extract(sides, sums)
        one.compact(sides, sums)


def speed(gb: float) -> list[dict[str, object]]:
    """Rates of the kernels in TB/s of model, beside the copy bandwidth of the same run."""
    rows: list[dict[str, object]] = []
    for width, dtype, density in ((2, "BF16", 0.01), (2, "BF16", 0.02), (2, "BF16", 0.05), (1, "U8", 0.0075)):
        torch.cuda.empty_cache()
        n = int(gb * 1e9) // width // 8192 * 8192
        old, new = weights(n, density, width)
        layout = Layout(["w"], [dtype], [(n // 8192, 8192)])
        a, b = addresses([old]), addresses([new])
        copy = torch.empty_like(old)
        t_copy = seconds(lambda: copy.copy_(old))  # noqa: B023 - called at once
        tables = launch.tables_of(layout, DEVICE)
        t_extract = seconds(lambda: extract_only(tables, a, b))  # noqa: B023
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
        where, sums = tables.whole(addresses([copy])), launch.row_sums(tables)
        t_apply = seconds(lambda: staged.apply(where, sums))  # noqa: B023
        copy.copy_(old)
        cuda.apply(staged, where)
        exact = torch.equal(copy, new)
        # A tensor-parallel rank's half of the columns.
        half, due = (side.view(-1, 2, 4096 * width)[:, 0].contiguous() for side in (old, new))
        mine = Slice("w", (n // 8192, 8192), ((0, n // 8192), (0, 4096)), half.view(OF_WIDTH[width]))
        (there,) = Reach(Held(layout, {"w": mine}, {}), layout).locate(device)
        device.apply_rows(layout, [staged], there)
        exact &= torch.equal(half, due)
        t_columns = seconds(lambda: staged.apply(cast("launch.Where", there), sums))  # noqa: B023
        t_fingerprint = seconds(lambda: cuda.fingerprints(layout, b, DEVICE))  # noqa: B023
        nbytes = n * width
        rows.append(
            {
                "dtype": dtype, "density": density, "gb": round(nbytes / 1e9, 1), "exact": exact,
                "copy_tb_s": round(2 * nbytes / t_copy / 1e12, 2),
                "extract_tb_s": round(nbytes / t_extract / 1e12, 2), "extract_of_copy": round(t_copy / t_extract, 2),
                "encode_ms": round(t_encode * 1e3, 1), "stage_ms": round(t_stage * 1e3, 1),
                "apply_tb_s": round(nbytes / t_apply / 1e12, 2), "apply_ms": round(t_apply * 1e3, 2),
                "apply_columns_tb_s": round(nbytes / 2 / t_columns / 1e12, 2),
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
        compare_parts(seed)
    print(
        f"{options.cases} random layouts, whole, in parts and in strided slices: the CUDA backend gives the bytes of "
        "the CPU backend",
        flush=True,
    )
    rows = speed(options.gb)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
