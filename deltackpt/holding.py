"""What a rank of a sharded trainer or sampler holds: boxes of tensors, from slices and DTensors.

Needs torch only for torch's own tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltackpt.errors import ConfigError
from deltackpt.tensors import describe

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from deltackpt.tensors import Array


@dataclass(frozen=True)
class Slice:
    """A box of a tensor. shape: of the whole tensor; box: (begin, end) of each dimension; tensor: its elements.

    Shape and box in the elements of a safetensors header: of torch's float4_e2m1fn_x2 two for each of the tensor's.
    """

    name: str
    shape: Sequence[int]
    box: Sequence[tuple[int, int]]
    tensor: Array = field(repr=False)


def is_dtensor(tensor: object) -> bool:
    """Say whether a tensor is one of torch's DTensors."""
    # Whoever passes one has imported its module.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def dtensor_slice(name: str, tensor: DTensor) -> Slice:
    """Return the box of a DTensor that is on this rank. Raises ConfigError for one that is no box of final values."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(f"tensor {name} has placements {tensor.placements}: sums that are not made; reduce it first")
    local = tensor.to_local().detach()
    try:
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    except (RuntimeError, NotImplementedError, ValueError) as exc:
        raise ConfigError(f"tensor {name} has placements {tensor.placements}, which are no box: {exc}") from exc
    if tuple(shape) != tuple(local.shape):
        raise ConfigError(
            f"tensor {name}: this rank holds {list(local.shape)} of {list(tensor.shape)}, where "
            f"{tensor.placements} mean {list(shape)}; pass a Slice with its box"
        )
    box = [(int(o), int(o) + int(n)) for o, n in zip(offset, shape, strict=True)]
    whole = [int(n) for n in tensor.shape]
    if describe(name, local)[0] == "F4" and whole:
        box[-1], whole[-1] = (2 * box[-1][0], 2 * box[-1][1]), 2 * whole[-1]
    if not local.numel():
        # Where an uneven split leaves nothing, torch's offset may lie anywhere.
        box = [(0, 0)] * len(whole)
    return Slice(name, whole, box, local)
