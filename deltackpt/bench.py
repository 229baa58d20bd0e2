"""Measure deltas on pairs of tensors: the candidates of `baselines`, side by side, in one run.

Every candidate's result is compared byte for byte with the new tensors. Never writes to its input.
Longer than most modules: what is measured, how, and what follows from it stand in one place, to be read together.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import math
import mmap
import os
import platform
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import numpy as np

from deltackpt.baselines import (
    BLOCK,
    Bytes,
    Candidate,
    Crew,
    DoubleMask,
    FullCopy,
    GapValue,
    Index,
    IndexValue,
    Live,
    MaskZstd,
    Ours,
    Pair,
    PatchFrom,
    Words,
    sizes_of,
    unsigned,
)
from deltackpt.checkpoint import open_folder
from deltackpt.layout import Layout


@dataclass(frozen=True)
class Census:
    """What changed, over all pairs: elements, of them changed, and the iid bound in bytes."""

    elements: int
    changed: int
    bound_nbytes: float


def census(pairs: Sequence[Pair]) -> Census:
    """Count changes and compute the size that coding each change independently cannot beat.

    Bound = N H(d) / 8 for positions, d = changed / N, plus changed * H(XOR values) / 8 with the
    empirical distribution; elements of one width are one population. Only a model that knows
    where changes cluster can go below.
    """
    elements = changed = 0
    bound = 0.0
    for width in (1, 2, 4, 8):
        members = [pair for pair in pairs if pair.width == width]
        total = sum(pair.nbytes for pair in members) // width
        counts = _value_counts(members, width)
        flips = int(counts.sum())
        elements, changed = elements + total, changed + flips
        if flips:
            shares = counts[counts > 0] / flips
            entropy = float(-(shares * np.log2(shares)).sum())
            bound += (total * _binary_entropy(flips / total) + flips * entropy) / 8
    return Census(elements, changed, bound)


def _binary_entropy(p: float) -> float:
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p) if 0 < p < 1 else 0.0


def _value_counts(pairs: Sequence[Pair], width: int) -> Index:
    """How often each XOR value that is not zero occurs; the order means nothing."""
    if width <= 2:
        table = np.zeros(1 << 8 * width, np.int64)
        for values in _flips(pairs, width):
            table += np.bincount(values, minlength=table.size)
        return table
    seen = list(_flips(pairs, width))
    if not seen:
        return np.zeros(0, np.int64)
    counts: Index = np.unique(np.concatenate(seen), return_counts=True)[1]
    return counts


def _flips(pairs: Sequence[Pair], width: int) -> Iterator[Words]:
    kind = unsigned(width)
    for pair in pairs:
        for s in range(0, pair.nbytes, 8 * BLOCK):
            mask = pair.old[s : s + 8 * BLOCK].view(kind) ^ pair.new[s : s + 8 * BLOCK].view(kind)
            yield mask[mask != 0]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate at one number of threads. Times in seconds, the best and the median repetition.

    Speeds count bytes of the model (one side); no apply speed where nothing was stored. Ratios
    are to (a) at the same number of threads: size below 1 is smaller, speed above 1 is faster.
    peak: anonymous memory above the inputs and the live tensors while encoding and applying, the
    payload included.
    """

    name: str
    threads: int
    stored_nbytes: int
    fraction: float | None
    bytes_per_change: float | None
    of_bound: float | None
    encode_s: float
    encode_median_s: float
    apply_s: float
    apply_median_s: float
    encode_gb_s: float
    apply_gb_s: float | None
    size_ratio: float | None = None
    encode_ratio: float | None = None
    apply_ratio: float | None = None
    peak_nbytes: int | None = None


class Machine(msgspec.Struct, frozen=True):
    """Where a report was measured."""

    cpu: str
    cores: int
    memory_nbytes: int
    system: str
    python: str
    versions: dict[str, str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one input. model_nbytes > raw_nbytes where only a sample was measured."""

    title: str
    model_nbytes: int
    raw_nbytes: int
    tensors: int
    elements: int
    changed: int
    bound_nbytes: float
    repeats: int
    rows: list[Row]
    skipped: dict[str, str]
    machine: Machine

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(eq=False)
class _Trial:
    """A candidate at a number of threads, and its times so far."""

    candidate: Candidate
    crew: Crew
    stored: int = 0
    peak: int | None = None
    encode_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)

    def once(self, pairs: Sequence[Pair], live: Live) -> None:
        """Encode, apply to old weights, compare, note the times."""
        live.reset(pairs)
        begin = time.perf_counter()
        payload = self.candidate.encode(pairs, self.crew)
        encoded = time.perf_counter()
        self.candidate.apply(payload, live, self.crew)
        applied = time.perf_counter()
        live.check(pairs, self.candidate.name)
        self.stored = payload.stored
        self.encode_s.append(encoded - begin)
        self.apply_s.append(applied - encoded)

    def warm(self, pairs: Sequence[Pair], live: Live, *, memory: bool) -> None:
        """Run once untimed; with `memory`, note the peak."""
        if memory:
            with _peak_anonymous() as peak:
                self.once(pairs, live)
            # The full copy's buffer was there before.
            self.peak = max(peak[0], self.stored)
        else:
            self.once(pairs, live)
        self.encode_s.clear()
        self.apply_s.clear()


def _anonymous_nbytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def _peak_anonymous() -> Iterator[list[int]]:
    """Yield a list whose only item becomes the growth of RssAnon at its highest, in bytes."""
    gc.collect()
    # Memory that the allocator kept from the candidate before would hide this one's.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    before = _anonymous_nbytes()
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _anonymous_nbytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak[0] = max(peak[0], _anonymous_nbytes() - before, 0)


def run(
    pairs: Sequence[Pair],
    *,
    title: str,
    model_nbytes: int | None = None,
    threads: Sequence[int] | None = None,
    repeats: int = 5,
    ours: Sequence[tuple[str, str]] = (("zstd", "sparse"), ("zstd", "mask"), ("lz4", "mask")),
    memory: bool = True,
) -> Report:
    """Measure every candidate on `pairs`, round-robin, and compare each result with the new bytes.

    ours: (codec, form) of deltackpt's rows. threads: one and all cores if not given.
    Raises IntegrityError if any candidate yields other bytes than the new ones.
    """
    raw = sum(sizes_of(pairs))
    counts = [1, os.cpu_count() or 1] if threads is None else threads
    live = Live.like(pairs)
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        candidates = _baselines(pairs, stack, skipped)
        candidates += [Ours(pairs, codec, form) for codec, form in ours]
        _compile(ours)
        # Touched now, so that its pages are not taken for the first candidate's.
        live.reset(pairs)
        trials = [
            _Trial(candidate, stack.enter_context(Crew(count)))
            for count in dict.fromkeys(counts)
            for candidate in candidates
        ]
        for trial in trials:
            # The zstd command's memory is not ours to see.
            trial.warm(pairs, live, memory=memory and not isinstance(trial.candidate, PatchFrom))
        for _ in range(repeats):
            for trial in trials:
                trial.once(pairs, live)
    total = census(pairs)
    return Report(
        title=title,
        model_nbytes=raw if model_nbytes is None else model_nbytes,
        raw_nbytes=raw,
        tensors=len(pairs),
        elements=total.elements,
        changed=total.changed,
        bound_nbytes=total.bound_nbytes,
        repeats=repeats,
        rows=_rows(trials, raw, total),
        skipped=skipped,
        machine=machine(),
    )


def _baselines(pairs: Sequence[Pair], stack: ExitStack, skipped: dict[str, str]) -> list[Candidate]:
    """Make all baselines; `skipped` gets the reason for each that cannot be measured."""
    candidates: list[Candidate] = [MaskZstd(), IndexValue(), GapValue(), DoubleMask()]
    raw = sum(sizes_of(pairs))
    if reason := PatchFrom.missing(raw):
        skipped[PatchFrom.name] = reason
    else:
        folder = stack.enter_context(PatchFrom.folder(raw))
        candidates.append(PatchFrom(pairs, Path(folder)))
    return [*candidates, FullCopy(pairs)]


def _compile(ours: Sequence[tuple[str, str]]) -> None:
    """Run our kernels once on small tensors of every width: compilation is no part of a row.

    Loads the compiled kernels where numba is installed, as any large model would.
    """
    if importlib.util.find_spec("numba") is not None:
        importlib.import_module("deltackpt.jit")
    rng = np.random.default_rng(0)
    pairs = []
    for width in (1, 2, 4, 8):
        old = rng.integers(0, 256, 4096 * width, np.uint8)
        new = old.copy()
        new[::997] ^= 1
        pairs.append(Pair(f"{width}", old, new, width))
    live = Live.like(pairs)
    for codec, form in ours:
        for threads in (1, 2):
            with Crew(threads) as crew:
                _Trial(Ours(pairs, codec, form), crew).once(pairs, live)


def _quotient(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _rows(trials: Sequence[_Trial], raw: int, total: Census) -> list[Row]:
    reference = {t.crew.threads: t for t in trials if isinstance(t.candidate, MaskZstd)}
    rows = []
    for trial in trials:
        a = reference[trial.crew.threads]
        encode_s, apply_s = min(trial.encode_s), min(trial.apply_s)
        rows.append(
            Row(
                name=trial.candidate.name,
                threads=trial.crew.threads,
                stored_nbytes=trial.stored,
                fraction=_quotient(trial.stored, raw),
                bytes_per_change=_quotient(trial.stored, total.changed),
                of_bound=_quotient(trial.stored, total.bound_nbytes),
                encode_s=encode_s,
                encode_median_s=statistics.median(trial.encode_s),
                apply_s=apply_s,
                apply_median_s=statistics.median(trial.apply_s),
                encode_gb_s=raw / encode_s / 1e9,
                apply_gb_s=raw / apply_s / 1e9 if trial.stored else None,
                size_ratio=_quotient(trial.stored, a.stored),
                encode_ratio=min(a.encode_s) / encode_s,
                apply_ratio=min(a.apply_s) / apply_s if trial.stored and a.stored else None,
                peak_nbytes=trial.peak,
            )
        )
    return rows


def machine() -> Machine:
    """Describe this machine and the libraries that the rows depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    packages = ("deltackpt", "numpy", "numba", "zstandard", "cramjam", "xxhash")
    return Machine(
        cpu=cpu,
        cores=os.cpu_count() or 1,
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions={package: _installed(package) for package in packages},
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def machine_line(where: Machine) -> str:
    """Name a machine in one line."""
    versions = ", ".join(f"{name} {number}" for name, number in where.versions.items())
    return (
        f"{where.cpu}, {where.cores} cores, {where.memory_nbytes / 2**30:.0f} GiB, {where.system}, "
        f"Python {where.python}, {versions}"
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def heading(report: Report) -> str:
    """Say in one line what was measured."""
    sample = ""
    if report.model_nbytes > report.raw_nbytes:
        sample = f" (a sample of {report.model_nbytes / 1e6:,.1f} MB)"
    return (
        f"{report.title}: {report.raw_nbytes / 1e6:,.1f} MB{sample}, {report.tensors:,} tensors, "
        f"{report.changed:,} of {report.elements:,} elements changed ({report.density:.4%}); "
        f"iid entropy bound {report.bound_nbytes:,.0f} bytes"
    )


def table(report: Report) -> str:
    """Lay a report out as text, one line a row."""
    head = (
        f"{'':36s} {'thr':>3} {'bytes':>13} {'% raw':>8} {'B/chg':>6} {'/bound':>6} "
        f"{'enc GB/s':>8} {'app GB/s':>8} {'size/a':>6} {'enc/a':>6} {'app/a':>6} {'peak MiB':>8}"
    )
    lines = [heading(report), head]
    for row in report.rows:
        share = None if row.fraction is None else row.fraction * 100
        peak = None if row.peak_nbytes is None else row.peak_nbytes / 2**20
        lines.append(
            f"{row.name:36s} {row.threads:3d} {row.stored_nbytes:13,d} {_cell(share, '.4f'):>8} "
            f"{_cell(row.bytes_per_change, '.2f'):>6} {_cell(row.of_bound, '.2f'):>6} "
            f"{row.encode_gb_s:8.2f} {_cell(row.apply_gb_s, '.2f'):>8} "
            f"{_cell(row.size_ratio, '.2f'):>6} {_cell(row.encode_ratio, '.2f'):>6} "
            f"{_cell(row.apply_ratio, '.2f'):>6} {_cell(peak, '.0f'):>8}"
        )
    lines += [f"{name}: not measured, {reason}" for name, reason in report.skipped.items()]
    return "\n".join(lines)


def advice(report: Report) -> str:
    """Say in plain words whether deltas pay on these weights, and how much at which bandwidth.

    Uses our row at the most threads that is done first at 10 Gbit/s; times scale to the whole
    model where it is a sample.
    """
    rows = [row for row in report.rows if row.name.startswith("deltackpt")]
    if not rows or not report.raw_nbytes:
        return "Nothing was measured: the checkpoints hold no bytes."
    if not report.changed:
        return "Nothing changed: a version costs one small manifest and no weights."
    most = max(row.threads for row in rows)
    best = min(
        (row for row in rows if row.threads == most),
        key=lambda row: row.stored_nbytes * 8 / 10e9 + row.encode_s + row.apply_s,
    )
    share = best.stored_nbytes / report.raw_nbytes
    facts = (
        f"{report.density:.2%} of the elements changed; {best.name} stores {share:.2%} of the "
        f"bytes, {best.stored_nbytes / report.changed:.2f} bytes per changed element."
    )
    if share > 0.5:
        return (
            f"{facts}\nDo not use deltas here: over half of the bytes would be sent anyway, and "
            "every receiver would still decode them. Publish full copies, or compare two "
            "checkpoints that are fewer steps apart."
        )
    scale = report.model_nbytes / report.raw_nbytes
    lines = [facts]
    for gbit_s in (1, 10, 100):
        full = report.model_nbytes * 8 / (gbit_s * 1e9)
        delta = full * share + (best.encode_s + best.apply_s) * scale
        if delta < full:
            verdict = f"saves {_seconds(full - delta)} per update against a full copy"
        else:
            verdict = f"costs {_seconds(delta - full)} more per update than a full copy"
        lines.append(
            f"At {gbit_s} Gbit/s this {verdict} ({_seconds(delta)} with encode and apply on "
            f"{most} threads here, {_seconds(full)} for the copy's transfer alone)."
        )
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


@dataclass(frozen=True, eq=False)
class Weights:
    """A mapped checkpoint: its layout, and the bytes of each tensor in layout order."""

    layout: Layout
    tensors: Sequence[Bytes]


def read_checkpoint(path: Path) -> Weights:
    """Map a checkpoint folder or a single safetensors file; the mapping lives as long as a view.

    Raises ConfigError or FormatError, naming the file.
    """
    folder = open_folder(path)
    checkpoint = folder.checkpoint
    files = []
    for number in range(len(checkpoint.nbytes)):
        with open(folder.file_path(number), "rb") as file:
            content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        files.append(np.frombuffer(content, np.uint8))
    places = zip(checkpoint.file.tolist(), checkpoint.offset.tolist(), checkpoint.layout.nbytes.tolist(), strict=True)
    return Weights(checkpoint.layout, [files[f][o : o + n] for f, o, n in places])


def pair_up(old: Weights, new: Weights) -> list[Pair]:
    """Pair the tensors of two checkpoints. Raises ConfigError at the first that differs in kind."""
    old.layout.require_same(new.layout)
    widths = old.layout.width.tolist()
    return [Pair(*both) for both in zip(old.layout.names, old.tensors, new.tensors, widths, strict=True)]


def sample(pairs: Sequence[Pair], limit_nbytes: int) -> list[Pair]:
    """Return whole tensors spread evenly over the model, together at most `limit_nbytes`.

    All of them if they fit.
    """
    total = sum(sizes_of(pairs))
    if total <= limit_nbytes:
        return list(pairs)
    chosen, seen, taken = [], 0, 0
    for pair in pairs:
        seen += pair.nbytes
        if taken + pair.nbytes <= seen * limit_nbytes / total:
            taken += pair.nbytes
            chosen.append(pair)
    return chosen


def run_checkpoints(old: Path, new: Path, *, limit_nbytes: int = 4 << 30, repeats: int = 3) -> Report:
    """Measure two checkpoint folders, or a sample of larger ones. Writes nothing into them."""
    pairs = pair_up(read_checkpoint(old), read_checkpoint(new))
    return run(
        sample(pairs, limit_nbytes),
        title=f"{old.name} -> {new.name}",
        model_nbytes=sum(sizes_of(pairs)),
        repeats=repeats,
    )
