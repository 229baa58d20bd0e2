"""nvCOMP on a GPU: every pairing with the CPU's codecs, corrupt frames, arenas of a Decompression Engine, then speeds.

Prints a line per check and exits with 1 if one failed. Takes about a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu import seconds

from deltackpt import arena, libnvcomp, nvcomp, trial
from deltackpt import codec as codecs
from deltackpt.digest import xxh3_64
from deltackpt.errors import ConfigError, DeltaError, FormatError, IntegrityError, Poisoned
from deltackpt.layout import I64, TILE
from deltackpt.shard import MASK_FRAME, PLANE_FRAME

DEVICE = torch.device("cuda", 0)
PORTABLE = ("lz4", "snappy", "deflate", "zstd")
ROWS = (("ans", 0), ("lz4", 0), ("snappy", 0), ("deflate", nvcomp.ENTROPY), ("deflate", nvcomp.MATCHES), ("zstd", 0))
"""Codecs of the table, and the algorithm of deflate."""
CORRUPTIONS = ("flips", "half", "random")
LIMIT_S = 60


def number(codec: str) -> int:
    """Return the codec's number."""
    return codecs.NAMES.index(codec)


# ---------------------------------------------------------------- frames


def layout(nbytes: I64) -> I64:
    """Offsets of frames one after the other, at multiples of 16."""
    taken: I64 = nvcomp.aligned(nbytes)
    return np.cumsum(taken) - taken


def to_device(frames: Sequence[bytes]) -> tuple[torch.Tensor, I64, I64]:
    """Frames in device memory; offsets and sizes."""
    nbytes = np.array([len(f) for f in frames], np.int64)
    offset = layout(nbytes)
    memory = np.zeros(int(nvcomp.aligned(nbytes).sum()), np.uint8)
    for at, frame in zip(offset.tolist(), frames, strict=True):
        memory[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
    return torch.from_numpy(memory).to(DEVICE), offset, nbytes


def sizes(rng: np.random.Generator, n: int) -> list[int]:
    """Frame sizes from 1 byte to 2 MiB, most of them small, all edges among them."""
    edges = [1, 2, 3, 7, 15, 16, 17, 31, 63, 64, 65, 255, 256, 257, 4095, 4096, 65535, 65536, 65537, PLANE_FRAME - 1,
             PLANE_FRAME, PLANE_FRAME + 1, MASK_FRAME - 1, MASK_FRAME]  # fmt: skip
    small = np.exp(rng.uniform(0, np.log(1 << 15), n)).astype(int).tolist()
    large = np.exp(rng.uniform(np.log(1 << 15), np.log(MASK_FRAME), n // 40)).astype(int).tolist()
    return [*edges, *small, *large]


def mask_bytes(rng: np.random.Generator, nbytes: int, density: float) -> bytes:
    """The XOR of bf16 weights: the low byte of a share of the elements."""
    content = np.zeros(nbytes, np.uint8)
    hit = rng.random(len(content[::2])) < density
    content[::2][hit] = rng.integers(1, 32, int(hit.sum()))
    return content.tobytes()


def column_bytes(rng: np.random.Generator, nbytes: int, plane: int) -> bytes:
    """A plane: low bytes of gaps, high bytes of gaps, low bytes of values, high bytes of values, noise."""
    if plane < 2:
        return ((rng.geometric(0.01, nbytes) - 1) >> 8 * plane).astype(np.uint8).tobytes()
    if plane < 4:
        values = np.array([1, 1, 1, 1, 3, 3, 7, 15, 31, 255], np.uint8)[rng.integers(0, 10, nbytes)]
        return (values >> 7 * (plane - 2)).tobytes()
    return rng.bytes(nbytes)


@cache
def frames_of(form: str, n: int) -> list[bytes]:
    """Frames of one form, of all sizes."""
    rng = np.random.default_rng(0)
    densities = itertools.cycle((0.0, 0.002, 0.01, 0.05, 0.5))
    planes = itertools.cycle(range(5))
    if form == "mask":
        return [mask_bytes(rng, k, next(densities)) for k in sizes(rng, n)]
    return [column_bytes(rng, k, next(planes)) for k in sizes(rng, n)]


def decode(
    made: nvcomp.Compressed, out: torch.Tensor, offset: I64, nbytes: I64, codec: int, backend: int = nvcomp.CUDA
) -> nvcomp.Check | None:
    """Put compressed frames, raw ones among them, to their places; the check of those that were compressed."""
    plain = made.codec == codecs.RAW
    if plain.any():
        nvcomp.place(made.memory, made.offset[plain], out, offset[plain], nbytes[plain])
    if plain.all():
        return None
    rest = ~plain
    return nvcomp.decompress(
        codec, made.memory, made.offset[rest], made.nbytes[rest], out, offset[rest], nbytes[rest], backend=backend
    )


def same(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless two tensors hold the same bytes."""
    if not torch.equal(found, expected):
        raise AssertionError(f"{what}: {int((found != expected).sum())} of {len(found)} bytes differ")


# ---------------------------------------------------------------- checks


def pairings(form: str, codec: str, n: int, pool: ThreadPoolExecutor) -> str:
    """CPU to GPU, GPU to CPU, GPU to GPU; ans only the last."""
    frames = frames_of(form, n)
    raw, offset, nbytes = to_device(frames)
    kind = number(codec)
    said = []
    if codec != "ans":
        # Not `codec.encode`: it stores small frames raw, and those are to be decoded here too.
        stored, at, k = to_device(list(pool.map(codecs._ENCODERS[kind], frames)))
        out = torch.zeros_like(raw)
        nvcomp.decompress(kind, stored, at, k, out, offset, nbytes).wait()
        same("CPU to GPU", out, raw)
        said.append(f"CPU to GPU {len(frames)}")
    for algorithm in (nvcomp.ENTROPY, nvcomp.MATCHES) if codec == "deflate" else (nvcomp.ENTROPY,):
        made = nvcomp.compress(kind, raw, offset, nbytes, algorithm=algorithm)
        packed = int((made.codec == kind).sum())
        if not packed:
            raise AssertionError("no frame was compressed")
        if codec != "ans":
            memory = made.memory.cpu().numpy()

            def back(i: int) -> bool:
                part = memory[made.offset[i] : made.offset[i] + made.nbytes[i]]  # noqa: B023 - called at once
                return bytes(codecs.decode(int(made.codec[i]), part, len(frames[i]))) == frames[i]  # noqa: B023

            if not all(pool.map(back, range(len(frames)))):
                raise AssertionError("GPU to CPU: bytes differ")
            said.append(f"GPU to CPU {packed} of {len(frames)} compressed")
        out = torch.zeros_like(raw)
        check = decode(made, out, offset, nbytes, kind)
        if check is not None:
            check.wait()
        same("GPU to GPU", out, raw)
        said.append(f"GPU to GPU {packed} of {len(frames)} compressed")
    return ", ".join(said)


def example(codec: str, n: int = 400) -> tuple[torch.Tensor, I64, I64, nvcomp.Compressed]:
    """Frames of columns and what they are compressed to."""
    raw, offset, nbytes = to_device(frames_of("columns", n))
    return raw, offset, nbytes, nvcomp.compress(number(codec), raw, offset, nbytes)


def does_not_wait(codec: str) -> str:
    """The device is kept busy; decompress returns while it still is."""
    raw, offset, nbytes, made = example(codec)
    out = torch.zeros_like(raw)
    for _ in range(3):
        # At first kernels are loaded and pinned memory is allocated, which may wait.
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # torch leaves it so
        check = decode(made, out, offset, nbytes, number(codec))
        assert check is not None
        done = check.event.query()  # type: ignore[no-untyped-call]  # torch leaves it so
        check.wait()
    if done:
        raise AssertionError("the device was done when decompress returned")
    same(codec, out, raw)
    return "returned while the device was busy with earlier work"


def other_stream_and_thread(codec: str) -> str:
    """A thread that never touched the device, on a stream of its own."""
    raw, offset, nbytes, made = example(codec)
    out = torch.zeros_like(raw)
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):  # type: ignore[no-untyped-call]  # torch leaves it so
                check = decode(made, out, offset, nbytes, number(codec))
                if check is not None:
                    check.wait()
                torch.cuda.current_stream().synchronize()
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT_S)
    if failed:
        raise failed[0]
    same(codec, out, raw)
    return "exact"


def from_pinned_memory(codec: str) -> str:
    """Compressed frames are read in pinned host memory, in place."""
    raw, offset, nbytes, made = example(codec)
    host = made.memory.cpu().pin_memory()
    out = torch.zeros_like(raw)
    check = decode(dataclasses.replace(made, memory=host), out, offset, nbytes, number(codec))
    if check is not None:
        check.wait()
    torch.cuda.synchronize()
    same(codec, out, raw)
    return "exact"


def driver() -> str:
    """What the driver says of the device, whatever comes of it."""
    with arena._current(DEVICE) as found:
        numbers = {n: arena._attribute(found, n, DEVICE) for n in (136, 137, 134, 141)}
    return (
        f"algorithm mask {numbers[136]:#x}, longest frame {numbers[137]}, host memory node {numbers[134]}, "
        f"maps host memory {numbers[141]}"
    )


def arenas() -> str:
    """The path of a Decompression Engine, decoded by kernels, out of both arenas."""
    evidence = trial.probe(DEVICE, backend=nvcomp.CUDA)
    if not (evidence.host_capable and evidence.device_capable):
        raise AssertionError(f"pointer attribute 21 is 0: {evidence}")
    ours = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    return (
        f"{json.dumps(dataclasses.asdict(evidence))}; attribute 21 of torch's memory: "
        f"{int(arena.capable(ours, DEVICE))}, of its pinned memory: {int(arena.capable(pinned, DEVICE))}"
    )


def arena_is_given_back() -> str:
    """Memory of arenas returns to the system with the last tensor."""
    free = torch.cuda.mem_get_info(DEVICE)[0]
    held = arena.device_memory(1 << 30, DEVICE)
    part = held[1 << 20 : 2 << 20]
    del held
    inside = torch.cuda.mem_get_info(DEVICE)[0]
    part.fill_(1)
    del part
    after = torch.cuda.mem_get_info(DEVICE)[0]
    if free - inside < 1 << 30 or free - after > 64 << 20:
        raise AssertionError(f"free before {free}, while held {inside}, after {after}")
    return "1 GiB"


def hardware() -> str:
    """Asked for by name: it runs where the driver reports an engine, and is refused in one line elsewhere."""
    found = arena.capability(DEVICE)
    if found.mask:
        return json.dumps(dataclasses.asdict(trial.probe(DEVICE, backend=nvcomp.HARDWARE)))
    try:
        trial.probe(DEVICE, backend=nvcomp.HARDWARE)
    except ConfigError as exc:
        if "\n" in str(exc) or "mask 0x0" not in str(exc):
            raise
        return f"refused: {exc}"
    raise AssertionError("an engine that the driver does not report was used")


def hardware_unasked() -> str:
    """What nvCOMP itself says to HARDWARE where there is no engine; a record, not a check."""
    if arena.capability(DEVICE).mask:
        return "there is an engine"
    raw, offset, nbytes = to_device(frames_of("mask", 10))
    made = nvcomp.compress(number("lz4"), raw, offset, nbytes)
    with replaced(nvcomp, "require_engine", lambda *_: None):
        try:
            check = decode(made, torch.zeros_like(raw), offset, nbytes, number("lz4"), nvcomp.HARDWARE)
            if check is not None:
                check.wait()
        except DeltaError as exc:
            return f"{type(exc).__name__}: {exc}"
    return "nvCOMP decoded"


@contextmanager
def replaced(module: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


# ---------------------------------------------------------------- corrupt frames, each in a process of its own


def corrupt(stored: bytes, how: str) -> bytes:
    """Damage a frame."""
    rng = np.random.default_rng(1)
    content = np.frombuffer(stored, np.uint8).copy()
    if how == "flips":
        content[rng.choice(len(content), min(20, len(content)), replace=False)] ^= 255
    elif how == "half":
        hit = rng.random(len(content)) < 0.5
        content[hit] = rng.integers(0, 256, int(hit.sum()))
    else:
        content[:] = rng.integers(0, 256, len(content))
    return content.tobytes()


def corrupt_child(codec: str, how: str) -> None:
    """Decode good frames with a damaged one among them; print what came of it."""
    kind = number(codec)
    rng = np.random.default_rng(2)
    frames = [column_bytes(rng, PLANE_FRAME, 1) for _ in range(8)]
    raw, offset, nbytes = to_device(frames)
    made = nvcomp.compress(kind, raw, offset, nbytes)
    memory = made.memory.cpu().numpy()
    stored = [memory[a : a + k].tobytes() for a, k in zip(made.offset, made.nbytes, strict=True)]
    assert int(made.codec[3]) == kind, "the frame was not compressed"
    checksum = xxh3_64(stored[3])
    stored[3] = corrupt(stored[3], how)
    front = "refused" if xxh3_64(stored[3]) != checksum else "accepted"
    damaged, at, k = to_device(stored)
    out = torch.zeros_like(raw)
    torch.cuda.synchronize()
    print(json.dumps({"checksum": front, "decoder": f"hangs for more than {LIMIT_S} s"}), flush=True)
    try:
        nvcomp.decompress(kind, damaged, at, k, out, offset, nbytes).wait()
        torch.cuda.synchronize()
        good = torch.equal(out, raw)
        others = all(
            torch.equal(out[a : a + n], raw[a : a + n])
            for i, (a, n) in enumerate(zip(offset.tolist(), nbytes.tolist(), strict=True))
            if i != 3
        )
        decoder = "right bytes" if good else "wrong bytes, success" if others else "wrong bytes in other frames too"
    except (FormatError, IntegrityError) as exc:
        decoder = f"{type(exc).__name__}: {exc}"
    except (Poisoned, RuntimeError) as exc:
        decoder = f"context lost ({str(exc).splitlines()[0]})"
    print(json.dumps({"checksum": front, "decoder": decoder}), flush=True)


def corruptions(pool: ThreadPoolExecutor) -> list[tuple[str, Callable[[], str]]]:
    """A check per codec and damage: the checksum in front refuses; what the decoder would do is on record."""

    def run(codec: str, how: str) -> str:
        command = [sys.executable, __file__, "--corrupt", codec, how]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            told, errors = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            told, errors = child.communicate(timeout=LIMIT_S)
        # Two lines, the first before the decoder begins: what holds if there is no second.
        lines = [line for line in told.splitlines() if line.startswith("{")]
        if not lines:
            raise AssertionError(f"exit {child.returncode}: {errors.strip().splitlines()[-1:]}")
        found = json.loads(lines[-1])
        if found["checksum"] != "refused":
            raise AssertionError(f"the checksum accepts damage: {found}")
        return f"refused by the checksum; the decoder alone: {found['decoder']}"

    jobs = [(c, h) for c in ("ans", *PORTABLE) for h in CORRUPTIONS]
    running = [(c, h, pool.submit(run, c, h)) for c, h in jobs]
    return [(f"corrupt {c} frame, {h}", future.result) for c, h, future in running]


# ---------------------------------------------------------------- speed


@dataclasses.dataclass(frozen=True)
class Sample:
    """Content for the table. model: bytes of weights that it stands for; planes: each is cut into frames by itself."""

    name: str
    model: int
    planes: tuple[torch.Tensor, ...]
    frame: int

    def packed(self) -> tuple[torch.Tensor, I64, I64]:
        """All planes in one tensor; offsets and sizes of the frames."""
        begins = layout(np.array([len(p) for p in self.planes], np.int64))
        memory = torch.zeros(
            int(begins[-1]) + int(nvcomp.aligned(len(self.planes[-1]))), dtype=torch.uint8, device=DEVICE
        )
        offset, nbytes = [], []
        for begin, plane in zip(begins.tolist(), self.planes, strict=True):
            memory[begin : begin + len(plane)] = plane
            cuts = np.arange(0, len(plane), self.frame, dtype=np.int64)
            offset.append(begin + cuts)
            nbytes.append(np.minimum(self.frame, len(plane) - cuts))
        return memory, np.concatenate(offset), np.concatenate(nbytes)


def bf16_xor(n: int) -> torch.Tensor:
    """XOR of n bf16 weights before and after a step that changes about 1 % of them."""
    w = torch.randn(n, device=DEVICE) * 0.02
    step = torch.randn(n, device=DEVICE).clamp_(-3, 3) * (0.5 * 5e-7)
    return w.bfloat16().view(torch.int16) ^ (w - step).bfloat16().view(torch.int16)


def byte_xor(n: int) -> torch.Tensor:
    """XOR of n bytes of packed 4-bit codes, 0.375 % of them changed, one code to its neighbour."""
    changes = torch.tensor([1, 3, 1, 7, 16, 48, 16, 112], dtype=torch.uint8, device=DEVICE)
    value = changes[torch.randint(0, 8, (n,), device=DEVICE)]
    return value * (torch.rand(n, device=DEVICE) < 0.00375)


def samples(gb: float) -> list[Sample]:
    """Columns of `gb` 10^9 bytes of model, and the mask of as many as fit into 2^30 bytes."""
    found = []
    for what, width, make in (("bf16 1 %", 2, bf16_xor), ("bytes 0.375 %", 1, byte_xor)):
        torch.manual_seed(0)
        step = 1 << 26
        rounds = max(1, int(gb * 1e9 / width) // step)
        masks, columns = [], []
        for i in range(rounds):
            xor = make(step)
            if i * step * width < 1 << 30:
                masks.append(xor.view(torch.uint8))
            at = xor.nonzero().view(-1)
            tile = at // TILE
            before = torch.cat((at[:1] * 0 - 1, at[:-1]))
            gap = at - torch.maximum(before, tile * TILE - 1) - 1
            counts = torch.bincount(tile, minlength=step // TILE).to(torch.int16).view(torch.uint8)
            values = xor[at].view(torch.uint8).view(-1, width)
            columns.append([counts, gap.to(torch.uint8), (gap >> 8).to(torch.uint8), *values.unbind(1)])
        planes = tuple(torch.cat(parts) for parts in zip(*columns, strict=True))
        found.append(Sample(f"mask, {what}", sum(map(len, masks)), (torch.cat(masks),), MASK_FRAME))
        found.append(Sample(f"columns, {what}", rounds * step * width, planes, PLANE_FRAME))
    return found


def row(sample: Sample, codec: str, algorithm: int) -> dict[str, object]:
    """Size and speeds of one codec on one sample; raises if a byte differs."""
    kind = number(codec)
    raw, offset, nbytes = sample.packed()
    out = torch.zeros_like(raw)
    made = nvcomp.compress(kind, raw, offset, nbytes, algorithm=algorithm)
    t_compress = seconds(lambda: nvcomp.compress(kind, raw, offset, nbytes, algorithm=algorithm), 3)

    def back() -> None:
        check = decode(made, out, offset, nbytes, kind)
        if check is not None:
            check.wait()

    t_decompress = seconds(back, 3)
    same(sample.name, out, raw)
    total, stored = int(nbytes.sum()), int(made.nbytes.sum())
    return {
        "content": sample.name, "codec": codec + ("", " (matches)")[algorithm], "frames": len(nbytes), "raw": total,
        "stored": stored, "of_raw": round(stored / total, 4), "of_model": round(stored / sample.model, 5),
        "raw_frames": int((made.codec == codecs.RAW).sum()), "compress_gb_s": round(total / t_compress / 1e9, 1),
        "decompress_gb_s": round(total / t_decompress / 1e9, 1),
        "compress_model_gb_s": round(sample.model / t_compress / 1e9),
        "decompress_model_gb_s": round(sample.model / t_decompress / 1e9),
    }  # fmt: skip


def copy_gb_s() -> float:
    """Bandwidth of a copy on the device, bytes read and written."""
    a = torch.zeros(1 << 31, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return round(2 * len(a) / seconds(lambda: b.copy_(a)) / 1e9)


def table(gb: float) -> dict[str, object]:
    """Sizes and speeds of all codecs, and of some with other bounds on memory."""
    rows, bounds = [], []
    content = samples(gb)
    for sample in content:
        for codec, algorithm in ROWS:
            rows.append(row(sample, codec, algorithm))
            print(json.dumps(rows[-1]), flush=True)
    for mib in (64, 1024):
        with replaced(nvcomp, "_PAGES", mib << 20), replaced(nvcomp, "_TEMP", mib << 20):
            for codec in ("ans", "deflate", "zstd"):
                bounds.append({"bound_mib": mib, **row(content[1], codec, 0)})
                print(json.dumps(bounds[-1]), flush=True)
    return {"copy_gb_s": copy_gb_s(), "rows": rows, "bounds": bounds}


# ---------------------------------------------------------------- all of it


def attempt(name: str, work: Callable[[], str]) -> bool:
    """Run a check and print its line."""
    began = time.perf_counter()
    try:
        said = work()
    except Exception as exc:
        traceback.print_exc()
        print(f"FAIL {name}: {type(exc).__name__}: {exc}", flush=True)
        return False
    print(f"ok   {name}: {said} ({time.perf_counter() - began:.1f} s)", flush=True)
    return True


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=2000, help="frames of each pairing")
    parser.add_argument("--gb", type=float, default=16.0, help="bytes of model for the speeds, in 10^9; 0: no speeds")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--corrupt", nargs=2, metavar=("CODEC", "HOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device; this script needs one")
    if options.corrupt:
        corrupt_child(*options.corrupt)
        return
    library = libnvcomp.load()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, nvCOMP {library.version} of {library.path}"
    print(machine, flush=True)
    results: dict[str, bool] = {}
    with ThreadPoolExecutor() as pool:
        checks: list[tuple[str, Callable[[], str]]] = [
            (f"pairings of {codec} on {form}", partial(pairings, form, codec, options.frames, pool))
            for form in ("mask", "columns")
            for codec in ("ans", *PORTABLE)
        ]
        for codec in ("ans", *PORTABLE):
            checks += [
                (f"{codec} does not wait", partial(does_not_wait, codec)),
                (f"{codec} on another stream and thread", partial(other_stream_and_thread, codec)),
                (f"{codec} out of pinned memory", partial(from_pinned_memory, codec)),
            ]
        checks += [
            ("the driver says", driver), ("arenas, by kernels", arenas),
            ("an arena is given back", arena_is_given_back), ("hardware by name", hardware),
            ("hardware, past our own check", hardware_unasked),
        ]  # fmt: skip
        for name, work in checks:
            results[name] = attempt(name, work)
        torch.cuda.empty_cache()
    with ThreadPoolExecutor(8) as children:
        for name, work in corruptions(children):
            results[name] = attempt(name, work)
    measured: dict[str, object] = {}
    if options.gb:

        def speeds() -> str:
            measured.update(table(options.gb))
            return f"every byte came back; a copy moves {measured['copy_gb_s']} GB/s"

        results["speeds"] = attempt("speeds", speeds)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "checks": results, **measured}, indent=1) + "\n")
    failed = [name for name, good in results.items() if not good]
    print(f"{len(results) - len(failed)} of {len(results)} checks passed" + (f"; failed: {failed}" if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
