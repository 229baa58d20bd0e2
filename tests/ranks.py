"""Ranks of a sharded trainer for tests: children of one warm process, which may be told to die or to stop at a stage.

Run as a script, this module is the warm process. Each order starts a child that serves a TCPStore, and the ranks.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).parent.parent
LIMIT_S = 240.0
"""No order takes longer, whatever happens."""

Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[Any]]]

SHAPES = {"embed": (101, 24), "experts.0": (40, 16), "experts.1": (40, 16), "norm": (24,), "out": (24, 60), "scale": ()}


def state(step: int) -> Arrays:
    """Weights of a step: a few elements of every tensor change each time, those of the first tensor seldom."""
    rng = np.random.default_rng(7)
    found: Arrays = {name: rng.integers(0, 1 << 15, shape).astype(np.int16) for name, shape in SHAPES.items()}
    for k in range(1, step + 1):
        rng = np.random.default_rng([7, k])
        for name, held in found.items():
            if name != "embed" or k % 2:
                flat = held.reshape(-1)
                flat[rng.integers(0, flat.size, max(1, flat.size // 50))] ^= np.int16(k)
    return found


DEVICE = os.environ.get("DELTACKPT_TEST_DEVICE", "cpu")
"""Where ranks have their tensors; see helpers.DEVICE."""


def share(kind: str, rank: int, size: int, weights: Any, on: str = "") -> Any:
    """Return what a rank of `size` holds of the weights, as it gives it to the publisher.

    on: the torch device on which it has them; "": in arrays.
    """
    from deltackpt.holding import Slice

    if on:
        import torch

        weights = {name: torch.from_numpy(array.copy()).to(on) for name, array in weights.items()}

    def rows(name: str, part: int, parts: int) -> Slice:
        whole = weights[name]
        step = -(-whole.shape[0] // parts)
        begin, end = min(part * step, whole.shape[0]), min((part + 1) * step, whole.shape[0])
        box = [(begin, end), *((0, n) for n in whole.shape[1:])]
        return Slice(name, whole.shape, box, whole[begin:end])

    def columns(name: str, part: int, parts: int) -> Slice:
        whole = weights[name]
        step = -(-whole.shape[1] // parts)
        begin, end = part * step, min((part + 1) * step, whole.shape[1])
        return Slice(name, whole.shape, [(0, whole.shape[0]), (begin, end)], whole[:, begin:end])

    matrices = [n for n in weights if weights[n].ndim == 2]
    small = [(n, weights[n]) for n in weights if weights[n].ndim < 2]
    if kind == "replicas":
        return dict(weights)
    if kind == "rows":  # uneven, and of the smallest tensors some ranks hold nothing
        return [*(rows(n, rank, size) for n in [*matrices, "norm"]), ("scale", weights["scale"])]
    if kind == "columns":
        return [*(columns(n, rank, size) for n in matrices), *small]
    if kind == "hsdp":  # two replicas of two halves
        return [*(rows(n, rank % 2, 2) for n in matrices), *small]
    if kind == "experts":
        mine = [(n, weights[n]) for n in matrices if n == f"experts.{rank % 2}"]
        return [*mine, *(rows(n, rank, size) for n in matrices if "experts" not in n), *small]
    if kind == "stages":  # a pipeline: names split over ranks, the embedding tied in the last stage; a stream
        names = [n for i, n in enumerate(weights) if i % size == rank or (n == "embed" and rank == size - 1)]
        return _stream(weights, names)
    if kind == "mixed":  # rank 0 holds everything, the others halves of it
        return dict(weights) if rank == 0 else [columns(n, (rank - 1) % 2, 2) for n in matrices]
    raise AssertionError(kind)


def _stream(weights: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield tensors in a buffer that is filled anew for each: who keeps one without a copy loses it."""
    for name in names:
        buffer = copy.deepcopy(weights[name])
        yield name, buffer
        buffer[...] = -1


# ---------------------------------------------------------------- stages at which to end


def fault(stage: str, step: int, action: str) -> None:
    """Make this rank end (KILL, STOP) or fail (RAISE) at a stage of a step: the first time that it comes there."""
    from deltackpt import backend, collective, copies
    from deltackpt.board import Round
    from deltackpt.errors import StoreError
    from deltackpt.local import LocalStore

    now = {"step": -1}

    def strike() -> None:
        if now["step"] == step:
            now["step"] = -2
            if action == "RAISE":
                raise StoreError("no space left (by the test)")
            os.kill(os.getpid(), getattr(signal, f"SIG{action}"))

    def before(owner: Any, name: str, when: Any = lambda *_: True) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            if when(*args):
                strike()
            return real(*args, **options)

        setattr(owner, name, wrapped)

    def after(owner: Any, name: str, when: Any = lambda *_: True) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            if when(*args):
                strike()
            return found

        setattr(owner, name, wrapped)

    publish = collective.Collective.publish

    def counted(self: Any, params: Any, *, step: int, **options: Any) -> Any:
        if now["step"] != -2:
            now["step"] = step
        return publish(self, params, step=step, **options)

    collective.Collective.publish = counted  # type: ignore[method-assign]
    if stage == "before-arrival":
        before(collective._Publish, "_arrive")
    elif stage == "after-arrival":
        after(collective._Publish, "_arrive")
    elif stage == "plan":
        before(Round, "create", lambda _, name, __: name == "plan")
    elif stage == "encode":
        before(backend, "encode_part")
    elif stage == "upload":
        before(LocalStore, "put", lambda _, key, *__: key.startswith("data/"))
    elif stage == "uploaded":
        after(LocalStore, "put", lambda _, key, *__: key.startswith("data/"))
    elif stage == "claimed":
        after(Round, "create", lambda _, name, __: name.startswith("part/"))
    elif stage == "file":
        before(copies, "put_assembled")
    elif stage == "anchor-piece":
        before(LocalStore, "put", lambda _, key, *__: "/piece-" in key and "-anchor-" in key)
    elif stage == "anchor-told":
        after(
            Round, "create", lambda _, name, __: name.startswith("part/") and current_thread().name.endswith("anchor")
        )
    elif stage == "verdict":
        before(Round, "create", lambda _, name, __: name == "verdict")
    elif stage == "record":
        before(LocalStore, "put", lambda _, key, *__: key.startswith("anchors/"))
    elif stage == "recorded":
        after(LocalStore, "put", lambda _, key, *__: key.startswith("anchors/"))
    elif stage == "decided":
        after(Round, "create", lambda _, name, __: name == "decision")
    elif stage == "commit":
        before(LocalStore, "put", lambda _, key, *__: key.startswith("manifests/"))
    elif stage == "committed":
        after(LocalStore, "put", lambda _, key, *__: key.startswith("manifests/"))
    else:
        raise AssertionError(stage)


# ---------------------------------------------------------------- a rank


def _rank(order: dict[str, Any], rank: int, port: int, output: Path) -> None:
    from deltackpt import anchor
    from deltackpt.board import Group, StoreBoard
    from deltackpt.errors import DeltaError
    from deltackpt.publish import Publisher
    from deltackpt.store import open_store

    if mine := order["faults"].get(str(rank)):
        fault(*mine)
    size, lease_s = order["size"], order["lease_s"]
    if order["board"] == "store":
        group = Group(rank, size, StoreBoard(open_store(order["store"]), order["session"]), lease_s)
    else:
        group = Group.tcp("127.0.0.1", port, rank=rank, size=size, lease_s=lease_s)
    publisher = Publisher(order["store"], group=group, run_id="run", threads=1, **order["options"])
    on = DEVICE if DEVICE != "cpu" else "cpu" if order["options"].get("backend") == "torch" else ""
    if order["options"]["anchors"]:
        anchor.ANCHOR_SHARE = 0.0  # due after every version
    with output.open("a") as file:
        for step in order["steps"]:
            weights = state(step)
            weights.pop(order["without"], None)
            if rank == order["wrong"]:
                weights["out"] = weights["out"] ^ np.int16(64)
            began = time.monotonic()
            try:
                given = share(order["kind"], rank, size, weights, on)
                manifest = publisher.publish(given, step=order["named"] or step)
                found = ["version", manifest.version, manifest.kind]
            except DeltaError as exc:
                found = ["error", type(exc).__name__, str(exc)]
            said = [*found, round(time.monotonic() - began, 3)]
            print(json.dumps(said), file=file, flush=True)
            if order["rest"]:
                publisher.close()  # waits for an anchor; a publisher goes on after that
        publisher.close()


def _serve(write: int) -> None:
    from deltackpt.board import serve_tcp

    served = serve_tcp()
    os.write(write, b"%d\n" % served.port)
    time.sleep(LIMIT_S)


def _fork(work: Any, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        signal.alarm(int(LIMIT_S))
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(order: dict[str, Any]) -> list[int]:
    """Run all ranks to their end; those that stop go on when the others have ended. Returns their exit codes.

    Where the order says `together`, the first death is that of all, as under torchrun.
    """
    folder = Path(order["folder"])
    read, write = os.pipe()
    host = _fork(lambda: _serve(write), folder / "host.log")
    port = int(os.read(read, 16)) if order["board"] == "tcp" else 0
    ranks = {}
    for rank in range(order["size"]):
        work = _work_of(order, rank, port, folder)
        ranks[_fork(work, folder / f"rank-{rank}.log")] = rank
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if pid in ranks and os.WIFSTOPPED(status):
            stopped.add(pid)
        elif pid in ranks:
            codes[pid] = os.waitstatus_to_exitcode(status)
            stopped.discard(pid)
            if order["together"] and codes[pid] < 0:
                for one in ranks.keys() - codes.keys():
                    os.kill(one, signal.SIGKILL)
        if stopped and len(codes) + len(stopped) == len(ranks):
            for one in stopped:
                os.kill(one, signal.SIGCONT)
            stopped.clear()
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    os.close(read)
    os.close(write)
    return [codes[pid] for pid in ranks]


def _work_of(order: dict[str, Any], rank: int, port: int, folder: Path) -> Any:
    if order["kind"].startswith("torch-"):
        from sharded_torch import train

        return lambda: train(order, rank, port, folder / f"rank-{rank}.json")
    return lambda: _rank(order, rank, port, folder / f"rank-{rank}.json")


def _main() -> None:
    import torch
    import torch.distributed.tensor  # loaded once, for all ranks

    import deltackpt.collective
    import deltackpt.publish  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


# ---------------------------------------------------------------- in the test


@dataclass(frozen=True)
class Outcome:
    """What became of the ranks. codes: exit codes, minus the signal that ended one; said: lines of each rank."""

    codes: list[int]
    said: list[list[list[Any]]]
    logs: list[str]

    def versions(self, rank: int) -> list[int]:
        """Versions that a rank has published, in order; asserts that it saw no error."""
        assert all(line[0] == "version" for line in self.said[rank]), self
        return [line[1] for line in self.said[rank]]


class Ranks:
    """The warm process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        folder: Path,
        kind: str,
        steps: list[int],
        *,
        size: int = 4,
        lease_s: float = 60.0,
        faults: dict[int, tuple[str, int, str]] | None = None,
        board: str = "tcp",
        store: Path | None = None,
        wrong: int = -1,
        without: str = "",
        named: int = 0,
        together: bool = False,
        rest: bool = False,
        anchors: bool = False,
        **options: Any,
    ) -> Outcome:
        """Let ranks publish steps to `folder/store`. faults: of a rank the stage, the step and what happens there.

        wrong: a rank with other bytes than its replica; without: a tensor that no rank has; named: number of the step;
        together: whether the death of one is that of all; rest: whether to wait for anchors after each version.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        run = folder / f"run-{len(list(folder.glob('run-*')))}"
        run.mkdir(parents=True)
        order = {
            "folder": str(run), "store": str(store or folder / "store"), "kind": kind, "steps": steps, "size": size,
            "lease_s": lease_s, "faults": {str(r): f for r, f in (faults or {}).items()}, "board": board,
            "session": run.name, "wrong": wrong, "without": without, "named": named, "together": together,
            "rest": rest, "options": options | {"anchors": anchors},
        }  # fmt: skip
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        said, logs = [], []
        for rank in range(size):
            lines, log = run / f"rank-{rank}.json", run / f"rank-{rank}.log"
            said.append([json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else [])
            logs.append(log.read_text() if log.exists() else "")
        return Outcome(codes, said, logs)

    def close(self) -> None:
        """End the warm process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=LIMIT_S)
        self._process.stdout.close()


@contextmanager
def started() -> Iterator[Ranks]:
    """Yield a warm process."""
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _main()
