"""Sizes and speeds of deltas beside the baselines, and of the whole command line, on this machine.

Without options: synthetic inputs (made as RL training would, no run behind them), all candidates,
one table each. Inputs have fixed seeds and are made a tensor at a time. The other sections run
`deltackpt` itself in a temporary folder. Long because every section is a different measurement.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from deltackpt import bench
from deltackpt.baselines import Pair
from deltackpt.bench import Report

F32: TypeAlias = npt.NDArray[np.float32]
U64: TypeAlias = npt.NDArray[np.uint64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

ROWS, COLUMNS = 2048, 1536
"""A quarter of an expert's linear layer in GLM-5; both are multiples of the FP8 block of 128."""
SIGMA = 0.02
"""Standard deviation of the weights."""
MOMENTUM = 0.229
"""Stationary standard deviation of m <- 0.9 m + 0.1 g with g ~ N(0, 1): Adam's update over lr."""


class Measure(msgspec.Struct, frozen=True):
    """One number of a section, its unit, and what the issue asks for, as text."""

    section: str
    name: str
    value: float
    unit: str
    target: str = ""


class Results(msgspec.Struct, frozen=True):
    """What --json writes."""

    machine: bench.Machine
    reports: list[Report]
    measures: list[Measure]


# --- inputs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One optimiser step of one matrix: fp32 master weights before and after, ROWS x COLUMNS."""

    name: str
    old: F32
    new: F32


def steps(elements: int, lr: float, seed: int = 0) -> Iterator[Step]:
    """Yield matrices of together about `elements`, at least one of 128 rows.

    new = old - lr * m with m drawn from its stationary distribution. No mask is drawn: changes in
    the published dtype come from rounding alone.
    """
    left, i = max(elements // COLUMNS, 128), 0
    while left >= 128:
        shape = (min(left, ROWS) // 128 * 128, COLUMNS)
        rng = np.random.default_rng([seed, i])
        old = rng.standard_normal(shape, dtype=np.float32) * np.float32(SIGMA)
        new = old - rng.standard_normal(shape, dtype=np.float32) * np.float32(MOMENTUM * lr)
        yield Step(f"layers.{i}.weight", old, new)
        left, i = left - shape[0], i + 1


def _bytes(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bf16(elements: int, lr: float) -> list[Pair]:
    """Make bf16 weights cast from an fp32 master before and after a step."""
    from ml_dtypes import bfloat16

    return [
        Pair(s.name, _bytes(s.old.astype(bfloat16)), _bytes(s.new.astype(bfloat16)), 2) for s in steps(elements, lr)
    ]


def _fp8(master: F32) -> list[Bytes]:
    """Quantise from the bf16 cast in blocks of 128 x 128: E4M3 codes, fp32 scales amax / 448."""
    from ml_dtypes import bfloat16, float8_e4m3fn

    rows, columns = master.shape
    blocks = master.astype(bfloat16).astype(np.float32).reshape(rows // 128, 128, columns // 128, 128)
    scale = np.abs(blocks).max(axis=(1, 3), keepdims=True) / np.float32(448)
    return [_bytes((blocks / scale).astype(float8_e4m3fn)), _bytes(scale)]


def _nvfp4(master: F32) -> list[Bytes]:
    """Quantise from the bf16 cast: E2M1 codes, E4M3 scales per 16, fp32 scale, input scale."""
    from ml_dtypes import bfloat16, float4_e2m1fn, float8_e4m3fn

    blocks = master.astype(bfloat16).astype(np.float32).reshape(-1, 16)
    amax = np.abs(blocks).max(axis=1, keepdims=True)
    whole = amax.max() / np.float32(6 * 448)
    scale = (amax / 6 / whole).astype(float8_e4m3fn)
    scaled = blocks / (scale.astype(np.float32) * whole)
    codes = np.clip(scaled, -6, 6).astype(float4_e2m1fn).view(np.uint8).reshape(-1) & 15
    packed = codes[::2] | codes[1::2] << 4
    return [_bytes(packed), _bytes(scale), _bytes(np.array([whole])), _bytes(np.ones(1, np.float32))]


def fp8(elements: int, lr: float) -> list[Pair]:
    """Make block-scaled FP8 weights before and after a step."""
    kinds = (("", 1), ("_scale_inv", 4))
    return [
        Pair(s.name + suffix, old, new, width)
        for s in steps(elements, lr)
        for (suffix, width), old, new in zip(kinds, _fp8(s.old), _fp8(s.new), strict=True)
    ]


def nvfp4(elements: int, lr: float) -> list[Pair]:
    """Make packed NVFP4 weights before and after a step; the input scale is frozen."""
    kinds = (("", 1), ("_scale", 1), ("_scale_2", 4), ("_input_scale", 4))
    return [
        Pair(s.name + suffix, old, new, width)
        for s in steps(elements, lr)
        for (suffix, width), old, new in zip(kinds, _nvfp4(s.old), _nvfp4(s.new), strict=True)
    ]


def nvfp4_uniform(elements: int, share: float) -> list[Pair]:
    """Move a `share` of the codes to a neighbouring magnitude, at uniform positions.

    Not rounding-derived: the constant that Stitch's synthetic deltas use.
    """
    pairs, rng = [], np.random.default_rng(1)
    for pair in nvfp4(elements, 0.0):
        new = pair.old.copy()
        if pair.name.endswith("weight"):
            for shift in (0, 4):
                at = np.flatnonzero(rng.random(new.size, dtype=np.float32) < share)
                code = new[at] >> shift & 7
                up = rng.integers(0, 2, at.size, np.uint8) * 2
                # 0 has no smaller and 7 no larger neighbour.
                moved = np.where(code == 0, 1, np.where(code == 7, 6, code + up - 1)).astype(np.uint8)
                new[at] ^= (code ^ moved) << shift
        pairs.append(Pair(pair.name, pair.old, new, pair.width))
    return pairs


def unchanged(elements: int) -> list[Pair]:
    """Make bf16 weights and an equal copy of them."""
    return [Pair(p.name, p.old, p.old.copy(), 2) for p in bf16(elements, 0.0)]


def replaced(elements: int) -> list[Pair]:
    """Make bf16 weights and others that have nothing in common with them."""
    from ml_dtypes import bfloat16

    both = zip(steps(elements, 0.0), steps(elements, 0.0, seed=1), strict=True)
    return [Pair(a.name, _bytes(a.old.astype(bfloat16)), _bytes(b.old.astype(bfloat16)), 2) for a, b in both]


INPUTS: dict[str, Callable[[int], list[Pair]]] = {
    "bf16, s 0.02, lr 1e-6": lambda n: bf16(n, 1e-6),
    "bf16, s 0.02, lr 3e-6": lambda n: bf16(n, 3e-6),
    "FP8 128x128 blocks, s 0.02, lr 1e-6": lambda n: fp8(n, 1e-6),
    "NVFP4 packed, s 0.02, lr 3e-6": lambda n: nvfp4(n, 3e-6),
    "NVFP4 packed, s 0.02, 0.375 % of codes +-1": lambda n: nvfp4_uniform(n, 0.00375),
    "bf16, nothing changed": unchanged,
    "bf16, everything changed": replaced,
}


def changed_bytes(pairs: Sequence[Pair]) -> float:
    """Return the share of bytes that differ."""
    total = sum(pair.nbytes for pair in pairs)
    return sum(int(np.count_nonzero(p.old != p.new)) for p in pairs) / max(total, 1)


def synthetic(options: argparse.Namespace) -> Iterator[Report]:
    """Measure every input whose name contains --only, one after the other."""
    for name, make in INPUTS.items():
        if options.only.lower() in name.lower():
            pairs = make(options.elements)
            title = f"synthetic {name}, {changed_bytes(pairs):.3%} of bytes"
            yield bench.run(pairs, title=title, repeats=options.repeats)


def real(options: argparse.Namespace) -> Iterator[Report]:
    """Measure each step of the demo's fine-tuning."""
    import torch
    from finetune import finetune

    states = (
        {name: tensor.flatten().view(torch.uint8).numpy() for name, tensor in state.items()}
        for state, _ in finetune(options.real)
    )
    for step, (old, new) in enumerate(pairwise(states), 1):
        pairs = [Pair(name, old[name], new[name], 2) for name in sorted(old)]
        title = f"real fine-tuning, step {step}, {changed_bytes(pairs):.3%} of bytes"
        yield bench.run(pairs, title=title, repeats=options.repeats)


def goals(report: Report) -> str:
    """Put our first candidate beside the goals for bf16: size, speed on one core, scaling."""
    ours = [row for row in report.rows if row.name.startswith("deltackpt")]
    rows = [row for row in ours if row.name == ours[0].name]
    one, most = rows[0], rows[-1]
    if None in (one.size_ratio, one.of_bound, one.encode_ratio, one.apply_ratio):
        return ""
    return (
        f"{one.name}: size {one.size_ratio:.2f} of (a) (goal 0.60), {one.of_bound:.2f} of the "
        f"bound (goal 1.20), encode {one.encode_ratio:.2f} x (a) (goal 2.5), "
        f"apply {one.apply_ratio:.2f} x (a) (goal 2.5); {most.threads} threads against 1: encode "
        f"{one.encode_s / most.encode_s:.2f} x, apply {one.apply_s / most.apply_s:.2f} x (goal 1.7)"
    )


# --- the machine ------------------------------------------------------------------------------


def _sum(words: U64) -> int:
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return int(total)


def _differing(old: U64, new: U64) -> int:
    count = 0
    for i in range(old.size):
        count += old[i] != new[i]
    return count


def bandwidth(nbytes: int, repeats: int) -> Iterator[Measure]:
    """Measure memcpy and, with numba, reading one array and comparing two, on 1 and 2 threads.

    memcpy counts the bytes copied once; reading and comparing count every byte read.
    """
    # Not zeros: pages that were never written are all the same page, which stays in the cache.
    old = np.arange(nbytes // 8, dtype=np.uint64)
    new, out = old.copy(), old.copy()
    tasks: dict[str, Callable[[slice], object]] = {"memcpy": lambda part: np.copyto(out[part], old[part])}
    try:
        import numba
    except ImportError:
        print("numba is not installed: read bandwidth is not measured")
    else:
        total, differing = (numba.njit(nogil=True)(kernel) for kernel in (_sum, _differing))
        tasks["read (sum)"] = lambda part: total(old[part])
        tasks["read (compare two)"] = lambda part: differing(old[part], new[part])
    for name, task in tasks.items():
        task(slice(0, 8))
        for threads in (1, 2):
            parts = [slice(s, s + (1 << 19)) for s in range(0, old.size, 1 << 19)]
            spent = []
            with ThreadPoolExecutor(threads) as pool:
                for _ in range(repeats):
                    begin = time.perf_counter()
                    list(pool.map(task, parts))
                    spent.append(time.perf_counter() - begin)
            sides = 2 if "two" in name else 1
            gb_s = sides * old.nbytes / min(spent) / 1e9
            yield Measure("machine", f"{name}, {threads} threads", gb_s, "GB/s")


# --- the command line -------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A finished command: seconds of wall clock and the highest RssAnon that was seen, in bytes."""

    seconds: float
    peak_nbytes: int


def command(*arguments: object) -> list[str]:
    """Return the `deltackpt` command of this interpreter's environment with its arguments."""
    script = Path(sys.executable).with_name("deltackpt")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "deltackpt"]
    return program + [str(argument) for argument in arguments]


def deltackpt(*arguments: object) -> Finished:
    """Run a command to its end, polling its memory. Exits with its errors if it fails."""
    begin, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as output:
        run = subprocess.Popen(command(*arguments), stdout=output, stderr=subprocess.STDOUT)
        status = Path(f"/proc/{run.pid}/status")
        while run.poll() is None:
            peak = max(peak, _rss_anon(status))
            time.sleep(0.002)
        seconds = time.perf_counter() - begin
        if run.returncode:
            output.seek(0)
            sys.exit(f"{command(*arguments)} exited {run.returncode}:\n{output.read().decode()}")
    return Finished(seconds, peak)


def _rss_anon(status: Path) -> int:
    try:
        fields = status.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return next((int(f.split()[1]) << 10 for f in fields if f.startswith("RssAnon:")), 0)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor to write: safetensors dtype and shape, and its bytes as pieces in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterator[bytes]]


def write_safetensors(path: Path, tensors: Sequence[Stored]) -> None:
    """Write one safetensors file without holding its bytes."""
    header, offset = {}, 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for piece in tensor.pieces():
                file.write(piece)


def write_checkpoint(folder: Path, files: Sequence[Sequence[Stored]]) -> None:
    """Write a checkpoint folder: shards, and their index if there are several."""
    total = len(files)
    names = [f"model-{k + 1:05d}-of-{total:05d}.safetensors" for k in range(total)]
    if total == 1:
        names = ["model.safetensors"]
    for name, tensors in zip(names, files, strict=True):
        write_safetensors(folder / name, tensors)
    if total > 1:
        weight_map = {t.name: name for name, ts in zip(names, files, strict=True) for t in ts}
        nbytes = sum(t.nbytes for tensors in files for t in tensors)
        index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stored(name: str, dtype: str, shape: tuple[int, ...], content: bytes) -> Stored:
    """Return a tensor whose bytes are at hand."""
    return Stored(name, dtype, shape, len(content), lambda: iter([content]))


def help_time() -> Iterator[Measure]:
    """Time `deltackpt --help`, the median of 7 runs."""
    deltackpt("--help")
    spent = statistics.median(deltackpt("--help").seconds for _ in range(7))
    yield Measure("command line", "deltackpt --help", spent, "s", "< 0.3")


def warm_pull(work: Path) -> Iterator[Measure]:
    """Time pulling one small delta, and pulling when there is nothing new."""
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 256, 2 << 20, np.uint8)
    store, dest, spent, base = work / "store", work / "dest", [], None
    for version in range(5):
        weights[version::997] ^= 1
        folder = work / f"v{version}"
        content = weights.tobytes()
        write_checkpoint(folder, [[stored("w", "BF16", (1 << 20,), content)]])
        extra = () if base is None else ("--base", base)
        deltackpt("publish", folder, store, "--run-id", "bench", *extra)
        spent.append(deltackpt("pull", store, dest).seconds)
        base = folder
    # The first seeds the folder, the second may compile.
    yield Measure("command line", "warm pull of a 2 MiB model", statistics.median(spent[2:]), "s", "< 1.5")
    again = statistics.median(deltackpt("pull", store, dest).seconds for _ in range(3))
    yield Measure("command line", "pull with nothing new", again, "s")


def write_large(folder: Path, block: Bytes, copies: int) -> None:
    """Write `copies` equal bf16 tensors of one block, about 1 GiB a file."""
    content = block.tobytes()
    names = [f"layers.{i}.weight" for i in range(copies)]
    per = max(1, (1 << 30) // len(content))
    tensors = [stored(name, "BF16", (len(content) // 2,), content) for name in names]
    write_checkpoint(folder, [tensors[i : i + per] for i in range(0, copies, per)])


def _nbytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def memory(work: Path, gib: float) -> Iterator[Measure]:
    """Measure peak RssAnon of publish and pull on a large bf16 model, 0.96 % changed.

    The model repeats one block of 64 MiB: frames are far shorter, so sizes are those of any model.
    """
    pairs = bf16(1 << 25, 1e-6)
    old, new = (np.concatenate([getattr(p, side) for p in pairs]) for side in ("old", "new"))
    copies = max(1, round(gib * 2**30 / old.size))
    del pairs
    write_large(work / "v0", old, copies)
    write_large(work / "v1", new, copies)
    del old, new
    store, dest, publish = work / "store", work / "dest", ("publish", "--run-id", "bench")
    section = f"{gib:g} GiB model"

    def report(name: str, done: Finished, payload: int) -> Iterator[Measure]:
        limit = 512 + payload / 2**20
        yield Measure(section, f"{name}: peak RssAnon", done.peak_nbytes / 2**20, "MiB", f"<= {limit:.0f}")
        yield Measure(section, f"{name}: wall clock", done.seconds, "s")

    yield from report("publish of the first version", deltackpt(*publish, work / "v0", store), 0)
    yield from report("pull of the first version", deltackpt("pull", store, dest), 0)
    before = _nbytes_below(store)
    done = deltackpt(*publish, work / "v1", store, "--base", work / "v0")
    payload = _nbytes_below(store) - before
    yield Measure(section, "payload of the delta", payload / 2**20, "MiB")
    yield from report("publish of the delta", done, payload)
    yield from report("pull of the delta", deltackpt("pull", store, dest), payload)
    _require_equal(work / "v1", dest)


def _require_equal(left: Path, right: Path) -> None:
    for pair in bench.pair_up(bench.read_checkpoint(left), bench.read_checkpoint(right)):
        step = 64 << 20
        for s in range(0, pair.nbytes, step):
            if not np.array_equal(pair.old[s : s + step], pair.new[s : s + step]):
                sys.exit(f"{right}: tensor {pair.name} differs from {left}")


def write_many(folder: Path, weights: Bytes, experts: int) -> None:
    """Write 4 tiny NVFP4-style tensors for each row of `weights` (n, 8), in 4 files."""
    one = np.ones(1, np.float32).tobytes()
    files: list[list[Stored]] = [[], [], [], []]
    for j, row in enumerate(weights):
        layer, rest = divmod(j, 3 * experts)
        projection = ("gate_proj", "up_proj", "down_proj")[rest % 3]
        name = f"model.layers.{layer}.mlp.experts.{rest // 3}.{projection}"
        files[j % 4] += [
            stored(f"{name}.weight", "U8", (4, 2), row.tobytes()),
            stored(f"{name}.weight_scale", "F8_E4M3", (4, 1), b"\x38" * 4),
            stored(f"{name}.weight_scale_2", "F32", (), one),
            stored(f"{name}.input_scale", "F32", (), one),
        ]
    write_checkpoint(folder, files)


def many_tensors(work: Path) -> Iterator[Measure]:
    """Time publish and pull of 60,000 tensors, and of a version in which 300 of them changed."""
    section, experts = "60,000 tensors", 250
    weights = np.random.default_rng(1).integers(0, 256, (20 * experts * 3, 8), np.uint8)
    write_many(work / "v0", weights, experts)
    weights[::50, 3] ^= 1
    write_many(work / "v1", weights, experts)
    store, dest, publish = work / "store", work / "dest", ("publish", "--run-id", "bench")
    for version, limit in ((0, "20"), (1, "5")):
        folder = work / f"v{version}"
        base = ("--base", work / "v0") if version else ()
        published = deltackpt(*publish, folder, store, *base).seconds
        pulled = deltackpt("pull", store, dest).seconds
        what = "300 changed" if version else "first version"
        yield Measure(section, f"{what}: publish", published, "s")
        yield Measure(section, f"{what}: pull", pulled, "s")
        yield Measure(section, f"{what}: both", published + pulled, "s", f"< {limit}")
    _require_equal(work / "v1", dest)


def long_log(work: Path, versions: int) -> Iterator[Measure]:
    """Time `log` of a store with many tiny versions, made through the Python API."""
    from deltackpt import Publisher

    section, weights = f"store of {versions:,} versions", np.zeros(4096, np.float32)
    begin = time.perf_counter()
    publisher = Publisher(str(work / "store"), run_id="bench")
    for version in range(versions):
        weights[version % weights.size] += 1
        publisher.publish({"w": weights})
    each = (time.perf_counter() - begin) / versions
    yield Measure(section, "publish through the Python API", each * 1e3, "ms a version")
    deltackpt("log", work / "store")
    spent = statistics.median(deltackpt("log", work / "store").seconds for _ in range(3))
    yield Measure(section, "log", spent, "s", "< 1")


def store_section(work: Path, repeats: int, mib: int) -> Iterator[Measure]:
    """Measure buckets beside raw clients. In a file of its own, as it starts servers."""
    from bench_store import store_lines
    from weed import NotStarted

    try:
        for line in store_lines(work, repeats, mib):
            yield Measure("store", *line)
    except NotStarted as exc:
        sys.exit(f"Error: {exc}")


# --- main -------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--elements", type=int, default=1 << 26, help="weights of each synthetic input")
    add("--repeats", type=int, default=5, help="timed repetitions; the best counts")
    add("--only", default="", help="only synthetic inputs whose name contains this")
    add("--no-synthetic", action="store_true", help="leave the synthetic inputs out")
    add("--real", type=int, metavar="STEPS", help="steps of the demo's real fine-tuning")
    add("--machine", action="store_true", help="memcpy and read bandwidth")
    add("--cli", action="store_true", help="--help and a small warm pull")
    add("--memory", action="store_true", help="peak memory of publish and pull; about 5 x --gib of disk")
    add("--gib", type=float, default=4.0, help="size of the model of --memory")
    add("--many", action="store_true", help="60,000 tensors")
    add("--log", action="store_true", help="log of a store with --versions versions")
    add("--versions", type=int, default=2000)
    add("--store", action="store_true", help="buckets: fetching, polls, catching up; about 4 x --mib of disk")
    add("--mib", type=int, default=512, help="size of the version of --store")
    add("--all", action="store_true", help="every section")
    add("--work", type=Path, help="folder for temporary files (default: the system's)")
    add("--json", type=Path, help="write the results here")
    return parser.parse_args()


def sections(options: argparse.Namespace) -> Iterator[Measure]:
    """Run the chosen sections, each in an empty folder that is removed after it."""
    chosen: list[tuple[bool, Callable[[Path], Iterator[Measure]]]] = [
        (options.machine, lambda _: bandwidth(256 << 20, options.repeats)),
        (options.cli, lambda _: help_time()),
        (options.cli, warm_pull),
        (options.memory, lambda work: memory(work, options.gib)),
        (options.many, many_tensors),
        (options.log, lambda work: long_log(work, options.versions)),
        (options.store, lambda work: store_section(work, options.repeats, options.mib)),
    ]
    for wanted, section in chosen:
        if wanted or options.all:
            work = Path(tempfile.mkdtemp(prefix="deltackpt-bench-", dir=options.work))
            try:
                yield from section(work)
            finally:
                shutil.rmtree(work)


def by_step(reports: Sequence[Report]) -> str:
    """Lay out one line per real step: our first row beside (a), on one thread."""
    lines = [f"{'':52s} {'changed':>9} {'bytes':>10} {'% raw':>7} {'B/chg':>6} {'/bound':>6} size/a"]
    for report in reports:
        row = next(r for r in report.rows if r.name.startswith("deltackpt"))
        numbers = (row.fraction, row.bytes_per_change, row.of_bound, row.size_ratio)
        share, per, bound, ratio = (float("nan") if n is None else n for n in numbers)
        lines.append(
            f"{report.title.partition(', ')[2]:52s} {report.density:9.3%} "
            f"{row.stored_nbytes:10,d} {share:7.3%} {per:6.2f} {bound:6.2f} {ratio:6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what was asked for; print as it comes, write the JSON at the end."""
    options = parse()
    print(bench.machine_line(bench.machine()), flush=True)
    print("Speeds in GB of model a second, the best of the repetitions; ratios to (a).", flush=True)
    reports: list[Report] = []
    if not options.no_synthetic:
        for report in synthetic(options):
            reports.append(report)
            print(f"\n{bench.table(report)}", flush=True)
            if report.title.startswith("synthetic bf16") and "lr" in report.title:
                print(goals(report), flush=True)
    if options.real:
        steps_done = list(real(options))
        reports += steps_done
        print(f"\n{bench.table(steps_done[0])}\n\n{by_step(steps_done)}", flush=True)
    measures = []
    for measure in sections(options):
        measures.append(measure)
        target = f"   (target {measure.target})" if measure.target else ""
        line = f"{measure.section:22s} {measure.name:56s} {measure.value:10.3f} {measure.unit}"
        print(line + target, flush=True)
    if options.json is not None:
        results = Results(bench.machine(), reports, measures)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


if __name__ == "__main__":
    main()
