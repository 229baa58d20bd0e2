"""Ranks that train with torch.distributed itself: DTensors of FSDP2, tensor parallel, HSDP. For `ranks`."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def model() -> torch.nn.Sequential:
    """Layers whose rows do not divide by the number of ranks."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.ReLU(), torch.nn.Linear(7, 9)).to(torch.bfloat16)


def train(order: dict[str, Any], rank: int, port: int, output: Path) -> None:
    """Publish a model of DTensors after each step; rank 0 writes what the whole tensors are."""
    from deltackpt.board import Group
    from deltackpt.publish import Publisher

    torch.set_num_threads(1)
    size, kind = order["size"], order["kind"]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)
    group = Group.of_torch(lease_s=order["lease_s"])
    net = model()
    if kind == "torch-fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    elif kind == "torch-hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")))
    elif kind == "torch-2d":  # FSDP over tensor parallel, both across the first dimension
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        for layer in (net[0], net[2]):
            for name, parameter in list(layer.named_parameters()):
                sharded = distribute_tensor(parameter.data, mesh["tp"], [Shard(0)])
                setattr(layer, name, torch.nn.Parameter(sharded))
        fully_shard(net, mesh=mesh["dp"])
    else:
        mesh = init_device_mesh("cpu", (size,))
        for layer, dim in ((net[0], 0), (net[2], 1)):
            for name, parameter in list(layer.named_parameters()):
                placement = Shard(dim) if dim < parameter.dim() else Replicate()
                layer.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, [placement])))
    publisher = Publisher(order["store"], group=group, run_id="run", threads=1)
    with output.open("a") as file:
        for step in order["steps"]:
            with torch.no_grad():
                for parameter in net.parameters():
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    local[local.abs() < 0.1 * step] *= 1.5
            manifest = publisher.publish(net.state_dict(), step=step)
            print(json.dumps(["version", manifest.version, manifest.kind, 0.0]), file=file, flush=True)
            whole = {n: t.full_tensor() for n, t in net.state_dict().items()}
            if rank == 0:
                arrays = {n: t.view(torch.int16).numpy() for n, t in whole.items()}
                np.savez(output.parent / f"whole-{step}.npz", **arrays)
    dist.barrier()
    publisher.close()
    dist.destroy_process_group()
