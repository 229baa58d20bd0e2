"""Publish versions by ranks that are killed and stopped at random, follow them by samplers that are, check every byte.

Ranks are processes; each part of the model is on two of them. At random moments one of them gets SIGKILL, or SIGSTOP
and later SIGCONT; at others all are killed and a group of another size goes on. A sampler of two ranks, each with half
of the rows, and one of whole tensors are treated alike, and start again. A process that is left alone goes through
every version and compares it with what the trainer has at that step.

Fails if a byte of a version is wrong, a process ends by an error that says nothing of a fault, a call takes longer
than its bound (a lease for itself, one for each fault near it, the time it was stopped, and --slack), or something is
left in the store that no version names, but for the board of the last group and tries at anchors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltackpt import (
    ConfigError,
    DeltaError,
    Fenced,
    Follower,
    Group,
    NotFound,
    Publisher,
    RankFailed,
    Replica,
    Slice,
    SliceTarget,
    StoreBoard,
    TensorTarget,
    Unavailable,
    anchor,
    open_store,
)
from deltackpt.reader import Reader
from deltackpt.verify import verify_store

SHAPES = {"embed": (301, 48), "experts.0": (80, 32), "experts.1": (80, 33), "norm": (48,), "out": (48, 120), "s": ()}
STALLED_S = 300.0
LIMIT_S = 14400

Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int16]]]


class Weights:
    """What the trainer has at a step; goes forwards and backwards."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.step = 0
        self.arrays: Arrays = {name: rng.integers(0, 1 << 15, shape).astype(np.int16) for name, shape in SHAPES.items()}

    def go(self, step: int) -> Arrays:
        """Go to a step."""
        while self.step != step:
            change = max(self.step, self.step + (1 if step > self.step else -1))
            rng = np.random.default_rng([7, change])
            for name, held in self.arrays.items():
                if name != "embed" or change % 2:
                    flat = held.reshape(-1)
                    flat[rng.integers(0, flat.size, max(1, flat.size // 50))] ^= np.int16(change)
            self.step += 1 if step > self.step else -1
        return self.arrays


def digest(parts: list[Any]) -> str:
    """SHA-256 of arrays or tensors, one after the other."""
    found = hashlib.sha256()
    for part in parts:
        found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def rows(name: str, shape: tuple[int, ...], part: int, parts: int) -> tuple[int, int]:
    """Rows of a tensor that one of so many parts has; of vectors and scalars all have all."""
    if len(shape) < 2:
        return 0, shape[0] if shape else 0
    size = -(-shape[0] // parts)
    return min(part * size, shape[0]), min((part + 1) * size, shape[0])


@dataclass(frozen=True)
class Where:
    """Paths of a soak, and its lease."""

    folder: Path
    lease_s: float

    @property
    def store(self) -> str:
        return str(self.folder / "store")

    @property
    def end(self) -> Path:
        """Says, when it is there, that no version follows any more."""
        return self.folder / "end"

    def say(self, who: str, **fields: object) -> None:
        """Append a line to what a process says."""
        with (self.folder / f"{who}.log").open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def said(self, who: str) -> Iterator[dict[str, Any]]:
        """Yield what a process said; a line that it was killed in is left out."""
        path = self.folder / f"{who}.log"
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def head(self) -> int:
        """The newest version, -1 before the first."""
        folder = self.folder / "store" / "manifests"
        return max((int(name[:20]) for name in os.listdir(folder)), default=-1) if folder.exists() else -1


# ---------------------------------------------------------------- processes


def rank(where: Where, group: int, number: int, size: int, first: int, last: int, resume: bool) -> None:
    """Publish steps, each again until it is there; a part of the model is on rank n and on n + size / 2."""
    board = StoreBoard(open_store(where.store), f"group-{group}")
    anchor.ANCHOR_SHARE = 0.0  # one is always due
    publisher = Publisher(
        where.store, group=Group(number, size, board, where.lease_s), run_id="soak", threads=1, resume=resume
    )
    weights, step, half = Weights(), first, size // 2
    while step <= last:
        arrays, held = weights.go(step), []
        for name, shape in SHAPES.items():
            begin, end = rows(name, shape, number % half, half)
            box = [(begin, end), *((0, n) for n in shape[1:])] if shape else []
            held.append(Slice(name, shape, box, arrays[name][begin:end]) if shape else (name, arrays[name]))
        began, why = time.monotonic(), ""
        try:
            publisher.publish(held, step=step)
        except DeltaError as exc:
            why = f"{type(exc).__name__}: {exc}"
            if not isinstance(exc, Unavailable):
                raise
        finally:
            where.say(f"group-{group}-{number}", what="publish", begin=began, end=time.monotonic(), why=why)
        step += not why
    publisher.close()


def holds(
    where: Where, who: str, reader: Reader, version: int, parts: list[Any], of: Callable[[Arrays], list[Any]]
) -> None:
    """Compare what a process holds with the trainer's weights."""
    step = reader.manifest(version).step
    assert step is not None
    if digest(parts) != digest(of(Weights().go(step))):
        raise SystemExit(f"{who}: version {version} is not what the trainer had at step {step}")


def sampler(where: Where, who: str, every: bool) -> None:
    """Follow with whole tensors; every: through each version, else to the newest one."""
    live = {name: torch.zeros(shape, dtype=torch.int16) for name, shape in SHAPES.items()}
    version = -1
    with Follower(where.store, TensorTarget(live), threads=1) as follower:
        while True:
            ended = where.end.exists()
            newest = where.head()
            if version < newest:
                try:
                    prepared = follower.prepare(version + 1 if every else None)
                except (NotFound, Unavailable):
                    continue
                if prepared is not None:
                    version = prepared.apply()
                    holds(where, who, follower.reader, version, list(live.values()), lambda a: list(a.values()))
                    where.say(who, what="version", version=version, previous=prepared.previous)
            elif ended:
                return
            else:
                time.sleep(0.05)


def member(where: Where, number: int) -> None:
    """Be one of two ranks of a sampler."""
    cut = {name: rows(name, shape, number, 2) for name, shape in SHAPES.items()}
    held = []
    for name, shape in SHAPES.items():
        begin, end = cut[name]
        box = [(begin, end), *((0, n) for n in shape[1:])] if shape else []
        held.append(Slice(name, shape, box, torch.zeros([e - b for b, e in box], dtype=torch.int16)))

    def mine(arrays: Arrays) -> list[Any]:
        return [a[slice(*cut[name])] if a.shape else a for name, a in arrays.items()]

    follower = Follower(where.store, SliceTarget(held), threads=1)
    group = Group(number, 2, StoreBoard(open_store(where.store + "-samplers"), "pair"), where.lease_s)
    version = -1
    with Replica(follower, group, stage_s=30.0, apply_s=10.0) as replica:
        while not (where.end.exists() and version == where.head()):
            began, why = time.monotonic(), ""
            try:
                joint = replica.prepare(wait_s=0.5)
                if joint is not None:
                    version = joint.apply()
                    holds(where, f"pair-{number}", follower.reader, version, [s.tensor for s in held], mine)
            except (RankFailed, Unavailable, NotFound) as exc:
                why, joint = f"{type(exc).__name__}: {exc}", None
            if why or joint is not None:
                fields = {"what": "joint", "begin": began, "end": time.monotonic(), "why": why, "version": version}
                where.say(f"pair-{number}", **fields)


def start(where: Where, who: str, work: Callable[[], None]) -> int:
    """Start a process; returns its id. 0 is its exit code if all is well, 3 after an error, 4 after a wrong byte."""
    pid = os.fork()
    if pid:
        return pid
    code = 4
    try:
        signal.alarm(LIMIT_S)
        work()
        code = 0
    except (Unavailable, Fenced, ConfigError) as exc:
        where.say(who, what="ended", why=f"{type(exc).__name__}: {exc}")
        code = 3
    except BaseException:
        where.say(who, what="broken", why=traceback.format_exc())
    os._exit(code)


# ---------------------------------------------------------------- the conductor


@dataclass
class Fault:
    """A signal that was sent. until: when a stopped process went on."""

    who: str
    at: float
    until: float


@dataclass
class Soak:
    """What runs, and what was done to it."""

    where: Where
    chance: random.Random
    versions: int
    running: dict[str, int] = field(default_factory=dict)
    stopped: dict[str, Fault] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    groups: int = 0

    def begin(self, who: str, work: Callable[[], None]) -> None:
        """Start a process under a name."""
        self.running[who] = start(self.where, who, work)

    def begin_sampler(self, who: str) -> None:
        """Start a sampler, or one of its ranks."""
        if who.startswith("pair"):
            self.begin(who, lambda: member(self.where, int(who[-1])))
        else:
            self.begin(who, lambda: sampler(self.where, who, every=who == "checker"))

    def begin_group(self, *, last: bool) -> None:
        """Start ranks that go on after the newest version, or with it again, or with an earlier one."""
        head, step = self.where.head(), -1
        if head >= 0:
            reader = Reader(open_store(self.where.store))
            reader.load(since=head)
            found = reader.manifest(head).step
            assert found is not None
            step = found
        back = 0 if last or step < 3 else self.chance.choice((0, 0, 0, 1, 1, 3))
        size = self.chance.choice((4, 4, 4, 2, 6))
        first = step + 1 - back
        until = first + max(0, self.versions - head - 2) if last else first + 10_000
        number, self.groups = self.groups, self.groups + 1
        for n in range(size):
            work = (self.where, number, n, size, first, until, back > 1)
            self.begin(f"group-{number}-{n}", lambda work=work: rank(*work))  # type: ignore[misc]  # bound at once
        self.done[f"groups of {size} ranks"] += 1

    def ranks(self) -> list[str]:
        """Names of the ranks that run."""
        return [who for who in self.running if who.startswith("group")]

    def kill(self, who: str) -> None:
        """Kill a process."""
        os.kill(self.running.pop(who), signal.SIGKILL)
        now = time.monotonic()
        self.faults.append(Fault(who, now, now))
        self.stopped.pop(who, None)

    def strike(self) -> None:
        """Kill or stop something."""
        who = self.chance.choice([*self.ranks() * 2, "pair-0", "pair-1", "whole"])
        if who not in self.running or who in self.stopped:
            return
        kind = "rank" if who.startswith("group") else "sampler"
        if self.chance.random() < 0.4:
            self.kill(who)
            self.done[f"{kind} killed"] += 1
        else:
            now = time.monotonic()
            fault = Fault(who, now, now + self.where.lease_s * self.chance.choice((0.1, 0.5, 1.5, 2.5)))
            os.kill(self.running[who], signal.SIGSTOP)
            self.faults.append(fault)
            self.stopped[who] = fault
            self.done[f"{kind} stopped"] += 1

    def tend(self) -> None:
        """Let those go on whose time has come, take note of those that ended, start samplers again."""
        now = time.monotonic()
        for who, fault in list(self.stopped.items()):
            if now >= fault.until:
                os.kill(self.running[who], signal.SIGCONT)
                del self.stopped[who]
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            ended = [who for who, one in self.running.items() if one == pid]
            for who in ended:
                del self.running[who]
                self.stopped.pop(who, None)
                code = os.waitstatus_to_exitcode(status)
                if code not in (0, 3):
                    raise SystemExit(f"{who} ended with {code}: {list(self.where.said(who))[-1:]}")
                self.done["ended by an error"] += code == 3
        if self.where.head() >= 0 and not self.where.end.exists():
            for who in ("checker", "whole", "pair-0", "pair-1"):
                if who not in self.running:
                    self.begin_sampler(who)

    def run(self) -> None:
        """Go through all groups, then let everything come to rest."""
        target, seen, moved = 0, -1, time.monotonic()
        strike_at = moved
        while (head := self.where.head()) < self.versions - 6:
            now = time.monotonic()
            self.tend()
            if head != seen:
                seen, moved = head, now
            if now - moved > STALLED_S:
                raise SystemExit(f"no version after {head} in {STALLED_S:g} s")
            if not self.ranks() or head >= target:
                for who in self.ranks():
                    self.kill(who)
                self.begin_group(last=False)
                target, strike_at = head + self.chance.randrange(3, 15), now + self.chance.uniform(1.0, 4.0)
            if now >= strike_at:
                self.strike()
                strike_at = now + self.chance.expovariate(3 / self.where.lease_s)
            time.sleep(0.02)
        self.finish()

    def finish(self) -> None:
        """Publish the last versions with nobody killed; wait until all samplers are there."""
        for who in self.ranks():
            self.kill(who)
        until = time.monotonic() + STALLED_S
        while self.stopped and time.monotonic() < until:
            self.tend()
            time.sleep(0.02)
        self.begin_group(last=True)
        while self.running and time.monotonic() < until:
            self.tend()
            if not self.ranks():
                self.where.end.touch()
            time.sleep(0.02)
        if self.running:
            raise SystemExit(f"{', '.join(self.running)} did not come to an end in {STALLED_S:g} s")

    # ------------------------------------------------------------ claims

    def judge(self, slack_s: float) -> None:
        """Hold everything against the claims; prints what was seen."""
        head = self.where.head()
        checked = {line["version"] for line in self.where.said("checker") if line["what"] == "version"}
        if missing := sorted(set(range(head + 1)) - checked):
            raise SystemExit(f"versions {missing} were not checked")
        report = verify_store(open_store(self.where.store), deep=True)
        if report.problems:
            raise SystemExit(f"verify --deep: {report.problems[0]}")
        self.require_clean()
        self.done["anchors made by ranks"] = sum(1 for _ in open_store(self.where.store).keys("anchors/"))
        longest = {"publish": 0.0, "joint": 0.0}
        errors: Counter[str] = Counter()
        for path in sorted(self.where.folder.glob("*.log")):
            for line in self.where.said(path.stem):
                if line["what"] not in longest:
                    continue
                errors[f"{line['what']}: {line['why'].partition(':')[0] or 'well'}"] += 1
                took = line["end"] - line["begin"]
                longest[line["what"]] = max(longest[line["what"]], took)
                if took > (bound := self.bound(path.stem, line["begin"], line["end"]) + slack_s):
                    raise SystemExit(f"{path.stem}: a call took {took:.1f} s, its bound was {bound:.1f} s: {line}")
        print(f"{head + 1} versions, every byte of each as the trainer had it; {dict(sorted(self.done.items()))}")
        print(f"calls: {dict(sorted(errors.items()))}; longest { ({k: round(v, 1) for k, v in longest.items()}) } s")
        print("nothing is left in the store but what versions name, tries at anchors, and the board of the last group")

    def bound(self, who: str, begin: float, end: float) -> float:
        """Seconds that a call may take: a lease, one more for each fault near it, and the time it was stopped."""
        lease, family = self.where.lease_s, who.rpartition("-")[0]
        mine = [fault for fault in self.faults if fault.who.rpartition("-")[0] == family]
        near = [fault for fault in mine if begin - 3 * lease < fault.until and fault.at < end]
        return lease * (1 + len(near)) + sum(f.until - f.at for f in near if f.who == who)

    def require_clean(self) -> None:
        """Raise SystemExit for a temporary file, or an object that no version names."""
        store = open_store(self.where.store)
        reader = Reader(store)
        reader.load()
        named = {s.key for e in reader.history.values() for s in e.manifest.shards}
        prefixes = {e.manifest.anchor.key.rpartition("/")[0] for e in reader.history.values() if e.manifest.anchor}
        prefixes |= {f"{folder}" for v in reader.anchors() if (folder := reader.anchor(v).anchor.folder)}
        left = [k for k in store.keys("data/") if k not in named and k.rpartition("/")[0] not in prefixes]
        left = [k for k in left if "-anchor-" not in k]  # of a try that was killed; a pruner removes it after a day
        left += list(store.keys("followers/"))
        left += [k for k in store.keys("board/") if not k.startswith(f"board/group-{self.groups - 1}/")]
        left += [str(path) for path in (self.where.folder / "store" / ".tmp").glob("*")]
        if left:
            raise SystemExit(f"left in the store: {left[:5]} and {max(0, len(left) - 5)} more")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--lease", type=float, default=4.0, help="seconds")
    parser.add_argument("--slack", type=float, default=10.0, help="seconds that a call may take besides its leases")
    parser.add_argument("--folder", default=None, help="where everything is made; kept then")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    torch.set_num_threads(1)
    print(f"seed {seed}, {options.versions} versions, leases of {options.lease:g} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-sharded-") as temporary:
        where = Where(Path(options.folder or temporary), options.lease)
        where.folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(where, random.Random(seed), options.versions)
        began = time.monotonic()
        try:
            soak.run()
            soak.judge(options.slack)
        finally:
            for pid in soak.running.values():
                os.kill(pid, signal.SIGKILL)
        print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except DeltaError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")
