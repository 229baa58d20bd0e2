"""Publish the same versions by one process and by 1, 2 and 4 ranks, and say what went through their board.

The tensors are split over the ranks by name, or with --replicas each is held by that many ranks. Time runs from the
moment when the last rank begins to the moment when the last one knows that the version is committed, and is the median
of all versions after the first. All threads of the machine are shared out to the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

from deltackpt import Group, Publisher, serve_tcp
from deltackpt.collective import Collective

LIMIT_S = 900.0


def tensors(count: int, nbytes: int) -> dict[str, torch.Tensor]:
    """Random bf16 matrices of `nbytes` together."""
    rows = max(1, nbytes // count // 2 // 64)
    generator = torch.Generator().manual_seed(1)
    return {f"layers.{i:06d}.weight": torch.randn(rows, 64, generator=generator).bfloat16() for i in range(count)}


def step(held: dict[str, torch.Tensor], version: int) -> None:
    """Flip the lowest bit of one element in a hundred."""
    for name, tensor in held.items():
        rng = np.random.default_rng([version, int(name.split(".")[1])])
        where = torch.from_numpy(rng.integers(0, tensor.numel(), max(1, tensor.numel() // 100)))
        flat = tensor.view(torch.int16).view(-1)
        flat[where] = flat[where] ^ 1


def be_rank(options: argparse.Namespace) -> None:
    """Be one rank; prints what it saw as one line of JSON."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    whole = tensors(options.tensors, options.mb << 20)
    held = {n: t for i, (n, t) in enumerate(whole.items()) if (i - rank) % size < options.replicas}
    group = Group.tcp("127.0.0.1", int(os.environ["PORT"]), rank=rank, size=size, lease_s=300.0)
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    publisher = Collective(options.store, group, run_id="bench", threads=threads)
    times, passed = [], [0]
    for version in range(options.versions + 1):
        if version:
            step(held, version)
        began = time.monotonic()
        publisher.publish(held, step=version)
        times.append((began, time.monotonic()))
        passed.append(publisher.board.sent + publisher.board.received)
    print(json.dumps({"times": times, "passed": np.diff(passed).tolist(), "owned": owned(publisher, rank)}))


def owned(publisher: Collective, rank: int) -> int:
    """Return the bytes of weights that a rank publishes."""
    ground = publisher.ground
    assert ground is not None
    boxes, begin = ground.partition.boxes, ground.partition.box_begin
    nbytes = boxes.count * ground.layout.width[boxes.tensor]
    return sum(
        int(nbytes[begin[part] : begin[part + 1]].sum())
        for part, holders in enumerate(ground.holders)
        if holders and holders[0] == rank
    )


def run(options: argparse.Namespace, size: int) -> None:
    """Start the ranks, wait for their end, print a row."""
    served = serve_tcp(timeout_s=300.0)
    with tempfile.TemporaryDirectory(prefix="bench-sharded-", dir=options.folder) as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--store", os.path.join(folder, "store")],
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "PORT": str(served.port)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            told = [json.loads(rank.communicate(timeout=LIMIT_S)[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    rounds = list(zip(*(t["times"] for t in told), strict=True))
    spent = [max(end for _, end in one) - max(begin for begin, _ in one) for one in rounds]
    passed = [sum(one) for one in zip(*(t["passed"] for t in told), strict=True)]
    shares = [t["owned"] for t in told]
    print(
        f"{size} ranks: first {spent[0]:.2f} s, then {statistics.median(spent[1:]):.3f} s a version; through the board "
        f"{passed[0]:,} bytes, then {int(statistics.median(passed[1:])):,}; "
        f"own {min(shares):,} to {max(shares):,} bytes",
        flush=True,
    )


def alone(options: argparse.Namespace) -> None:
    """One process with all tensors and all threads; prints a row."""
    held, spent = tensors(options.tensors, options.mb << 20), []
    with tempfile.TemporaryDirectory(prefix="bench-sharded-", dir=options.folder) as folder:
        publisher = Publisher(os.path.join(folder, "store"), run_id="bench", anchors=False)
        for version in range(options.versions + 1):
            if version:
                step(held, version)
            began = time.monotonic()
            publisher.publish(held, step=version)
            spent.append(time.monotonic() - began)
        publisher.close()
    print(f"alone: first {spent[0]:.2f} s, then {statistics.median(spent[1:]):.3f} s a version", flush=True)


def main() -> None:
    """Parse the command line; run all rows, or one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=256)
    parser.add_argument("--mb", type=int, default=512, help="MiB of bf16 weights")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--replicas", type=int, default=1, help="ranks that hold each tensor")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm", help="where the store is made")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_rank(options)
        return
    print(f"{options.tensors:,} tensors, {options.mb} MiB, 1 % changed, each on {options.replicas} ranks")
    alone(options)
    for size in options.ranks:
        run(options, size)


if __name__ == "__main__":
    main()
