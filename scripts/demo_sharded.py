"""Train a small model on four ranks with HSDP, publish every step, follow it with two tensor-parallel samplers.

A sampler is two ranks, here threads, which go from version to version together, each with half of every matrix: of the
rows in one sampler, of the columns in the other.

Alone it starts four processes, and kills rank 3 in the middle of a publish: its replica takes its part over, the
version is committed, and the ranks start again from it. Under `torchrun --nproc-per-node 4` the same file is one rank,
and none is killed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from deltackpt import (
    DeltaError,
    Follower,
    Group,
    Publisher,
    Replica,
    Slice,
    SliceTarget,
    StoreBoard,
    TensorTarget,
    open_store,
)

STEPS, KILLED_AT, RANKS, LIMIT_S = 8, 4, 4, 300.0


def model() -> torch.nn.Sequential:
    """Return a network whose rows do not divide evenly."""
    torch.manual_seed(0)
    sizes = [257, 512, 333]
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1]).to(torch.bfloat16)


def load(net: torch.nn.Module, store: str) -> None:
    """Bring a whole model to the newest version."""
    with Follower(store, TensorTarget(net.state_dict())) as follower:
        prepared = follower.prepare()
        if prepared is not None:
            prepared.apply()


def train(store: str, first: int, last: int, killed_at: int) -> None:
    """Be one rank: train from version to version, and publish what this rank holds."""
    rank = dist.get_rank()
    # The board lies in the store: no process hosts it, so that any may die.
    group = Group.of_torch(lease_s=5.0, store=open_store(store))
    publisher = Publisher(store, group=group, run_id="demo", threads=1)
    net = model()
    if first:
        load(net, store)
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(first, last):
        torch.manual_seed(100 * step + rank)
        inputs = torch.randn(16, 257, dtype=torch.bfloat16)
        loss = (net(inputs) - inputs[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 3 and step == killed_at:
            die_in_upload()
        began = time.perf_counter()
        manifest = publisher.publish(net.state_dict(), step=step)
        if rank == 0:
            print(
                f"step {step}: version {manifest.version} ({manifest.kind}, {len(manifest.shards)} shards, "
                f"{manifest.totals.stored:,} of {manifest.totals.raw:,} bytes), {time.perf_counter() - began:.2f} s",
                flush=True,
            )
        if step == killed_at:
            return  # rank 3 is dead: torch.distributed cannot go on without it, publishing could
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in net.state_dict().items()}
    if rank == 0:
        torch.save(whole, Path(store).parent / "trained.pt")
    dist.barrier()


def die_in_upload() -> None:
    """Make this process kill itself when it begins to put its next shard."""
    from deltackpt.local import LocalStore

    real = LocalStore.put

    def put(self: LocalStore, key: str, *arguments: object, **options: object) -> None:
        if key.startswith("data/"):
            print("rank 3: killed while it uploads", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, key, *arguments, **options)  # type: ignore[arg-type]  # as given

    LocalStore.put = put  # type: ignore[method-assign]


def follow(store: str) -> None:
    """Follow with two samplers of two tensor-parallel ranks, cut by rows and by columns; compare with the trainer."""
    trained = torch.load(Path(store).parent / "trained.pt")
    for dim, cut in enumerate(("rows", "columns")):
        with ThreadPoolExecutor(2) as pool:
            ranks = list(pool.map(partial(sampler, store, trained, dim), (0, 1), timeout=LIMIT_S))
        for rank, (version, held) in enumerate(ranks):
            nbytes = 0
            for part in held:
                mine = torch.as_tensor(part.tensor)
                nbytes += mine.nbytes
                expected = trained[part.name][tuple(slice(*edges) for edges in part.box)]
                if not torch.equal(mine.view(torch.int16), expected.view(torch.int16)):
                    raise SystemExit(f"sampler cut by {cut}, rank {rank}: {part.name} differs from the trainer's")
            print(f"sampler cut by {cut}, rank {rank}: version {version}, bit for bit the trainer's ({nbytes:,} bytes)")


def sampler(store: str, trained: dict[str, torch.Tensor], dim: int, rank: int) -> tuple[int, list[Slice]]:
    """Be a rank of a sampler: hold half of every matrix, go through all versions together with the other rank."""
    held = []
    for name, tensor in trained.items():
        box = [(0, extent) for extent in tensor.shape]
        if dim < tensor.dim():
            half = -(-tensor.shape[dim] // 2)
            box[dim] = (rank * half, min((rank + 1) * half, tensor.shape[dim]))
        mine = torch.zeros([end - begin for begin, end in box], dtype=tensor.dtype)
        held.append(Slice(name, tuple(tensor.shape), tuple(box), mine))
    follower = Follower(store, SliceTarget(held))
    follower.reader.load()
    assert follower.reader.head is not None
    version = -1
    with Replica(follower, Group(rank, 2, StoreBoard(open_store(f"{store}-samplers"), f"cut-{dim}"))) as replica:
        for goal in range(follower.reader.head.manifest.version + 1):
            joint = replica.prepare(goal, wait_s=LIMIT_S)
            assert joint is not None
            version = joint.apply()
    return version, held


def start(store: str, first: int, last: int, killed_at: int) -> list[int]:
    """Start four ranks and wait for their end; returns their exit codes."""
    with tempfile.NamedTemporaryFile() as meeting:
        meeting.close()
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, store, str(first), str(last), str(killed_at)],
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MEETING": meeting.name},
            )
            for rank in range(RANKS)
        ]
        try:
            return [rank.wait(timeout=LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()


def main() -> None:
    """Run as a rank, or start the ranks."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        alone = "MEETING" in os.environ
        where = f"file://{os.environ['MEETING']}" if alone else "env://"
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not alone:
            store = sys.argv[1] if len(sys.argv) > 1 else f"/tmp/demo-sharded-{os.getppid()}/store"
            first, last, killed_at = 0, STEPS, -1
        else:
            store, (first, last, killed_at) = sys.argv[1], [int(a) for a in sys.argv[2:5]]
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
        train(store, first, last, killed_at)
        if killed_at < 0 or killed_at >= last:
            dist.destroy_process_group()
        if not alone and rank == 0:
            follow(store)
            shutil.rmtree(Path(store).parent, ignore_errors=True)
        sys.stdout.flush()
        os._exit(0)  # gloo waits in its destructors for ranks that are dead
    with tempfile.TemporaryDirectory(prefix="demo-sharded-") as folder:
        store = os.path.join(folder, "store")
        codes = start(store, 0, STEPS, KILLED_AT)
        if codes != [0, 0, 0, -signal.SIGKILL]:
            raise SystemExit(f"exit codes {codes}; rank 3 alone was to die")
        print("all ranks start again, from what was published last", flush=True)
        codes = start(store, KILLED_AT + 1, STEPS, -1)
        if any(codes):
            raise SystemExit(f"exit codes {codes}; all ranks were to end well")
        follow(store)


if __name__ == "__main__":
    try:
        main()
    except DeltaError as exc:
        raise SystemExit(f"{type(exc).__name__}: {exc}") from exc
