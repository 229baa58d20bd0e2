"""What a rank of a sharded trainer or sampler holds: boxes of tensors, from DTensors, slices and streams of tensors.

Needs torch only for torch's own tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from deltackpt.errors import ConfigError
from deltackpt.ownership import Inventory
from deltackpt.partition import Box
from deltackpt.tensors import bits, describe, describe_array, one_place

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

    from deltackpt.tensors import Array

    Piece: TypeAlias = "Slice | tuple[str, Array]"
    Pieces: TypeAlias = "Mapping[str, Array] | Iterable[Piece]"


@dataclass(frozen=True)
class Slice:
    """A box of a tensor. shape: of the whole tensor; box: (begin, end) of each dimension; tensor: its elements.

    Shape and box in the elements of a safetensors header: of torch's float4_e2m1fn_x2 two for each of the tensor's.
    """

    name: str
    shape: Sequence[int]
    box: Sequence[tuple[int, int]]
    tensor: Array = field(repr=False)


@dataclass(frozen=True)
class _Given:
    """A tensor of torch as it was given, contiguous. at: its place among what is held."""

    name: str
    kind: type
    dtype: object
    layout: object
    shape: Sequence[int]
    stride: tuple[int, ...]
    box: tuple[Sequence[int], Sequence[tuple[int, int]]]
    at: int


@dataclass(frozen=True)
class Held:
    """Boxes that a rank holds, sorted by name and box. kept: of each a contiguous tensor or array.

    on: the torch device on which all of them are; given: all in the order in which they came, if they can be known
    again.
    """

    inventory: Inventory
    on: str
    kept: tuple[Array, ...] = field(repr=False)
    given: tuple[_Given, ...] = field(default=(), repr=False)

    def told(self) -> Held:
        """Return the same without what keeps the memory alive: only to know it again."""
        return replace(self, kept=())


def hold(params: Pieces, before: Held | None = None) -> Held:
    """Return what a rank holds. Raises ConfigError by name for what cannot be published, or is given twice.

    before: what it held last; where it gives the same tensors, as a trainer does, they need not be described again.

    A mapping or a list is read where it lies, and must not change while it is published; strided memory is copied. Of
    any other iterable each tensor is copied as it comes, where it is, since it may be freed or filled anew before the
    next one.
    """
    if before is not None and (again := _again(params, before)) is not None:
        return again
    copied = not isinstance(params, (Mapping, Sequence))
    given: list[Slice] = []
    found: dict[tuple[str, Box], tuple[str, tuple[int, ...], Array]] = {}
    places: dict[str, object] = {}
    for piece in _pieces(params):
        dtype, shape, box, kept = _piece(piece, copied=copied)
        if not copied:
            given.append(piece)
        if (piece.name, box) in found:
            raise ConfigError(f"tensor {piece.name} is given twice (duplicate), both times with box {list(box)}")
        found[piece.name, box] = (dtype, shape, kept)
        places[piece.name] = "cpu" if isinstance(kept, np.ndarray) else kept.device
    order = sorted(found, key=lambda key: (key[0].encode("utf-8", "surrogatepass"), key[1]))
    entries = [found[key] for key in order]
    inventory = Inventory(
        [k[0] for k in order], [e[0] for e in entries], [e[1] for e in entries], [k[1] for k in order]
    )
    at = {key: i for i, key in enumerate(order)}
    known = [_known(piece, at[key]) for piece, key in zip(given, found, strict=True)] if given else []
    whole = tuple(one for one in known if one is not None)
    on, kept_all = one_place(places), tuple(e[2] for e in entries)
    return Held(inventory, on, kept_all, whole if len(whole) == len(order) else ())


def _known(piece: Slice, at: int) -> _Given | None:
    """Note a tensor, if it is read where it lies."""
    tensor = piece.tensor
    if isinstance(tensor, np.ndarray) or not tensor.is_contiguous():
        return None
    box = (piece.shape, piece.box)
    return _Given(piece.name, type(tensor), tensor.dtype, tensor.layout, tensor.shape, tensor.stride(), box, at)


def _again(params: Pieces, before: Held) -> Held | None:
    """Return what is held if it is, tensor by tensor, what was held before, perhaps elsewhere in memory; else None."""
    if not isinstance(params, (Mapping, Sequence)) or not before.given or len(params) != len(before.given):
        return None
    import torch

    kept, on = list[object](before.given), torch.device(before.on)
    pieces = cast(
        "Iterable[Slice | tuple[str, torch.Tensor]]", params.items() if isinstance(params, Mapping) else params
    )
    for one, known in zip(pieces, before.given, strict=True):
        if isinstance(one, Slice):
            name, tensor, box = one.name, cast("torch.Tensor", one.tensor), (one.shape, one.box)
        else:
            (name, tensor), box = one, ((), ())
        # What an object of the same class has at the same place is not looked at again.
        if (
            name != known.name
            or type(tensor) is not known.kind
            or tensor.dtype is not known.dtype
            or tensor.layout is not known.layout
            or tensor.shape != known.shape
            or tensor.stride() != known.stride
            or box != known.box
            or tensor.device != on
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            return None
        kept[known.at] = tensor
    return replace(before, kept=tuple(cast("list[Array]", kept)))


def _pieces(params: Pieces) -> Iterator[Slice]:
    for given in params.items() if isinstance(params, Mapping) else params:
        if isinstance(given, Slice):
            yield given
            continue
        name, tensor = cast("tuple[str, Array]", given)
        if is_dtensor(tensor):
            yield dtensor_slice(name, cast("DTensor", tensor))
        else:
            yield Slice(name, (), (), tensor)


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
        box = [(0, end - begin) for begin, end in box]
    return Slice(name, whole, box, local)


def _piece(piece: Slice, *, copied: bool) -> tuple[str, tuple[int, ...], Box, Array]:
    """Return dtype, whole shape, box, and a contiguous tensor or array: the one that was given, unless copied."""
    name, tensor = piece.name, piece.tensor
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise ConfigError(f"tensor name {name!r} is reserved by safetensors, or no text; rename the tensor")
    if isinstance(tensor, np.ndarray):
        dtype, local, _, whole = describe_array(name, tensor)
        array = cast("np.ndarray[tuple[int, ...], np.dtype[np.generic]]", whole)
        kept: Array = array.copy() if copied else array
    else:
        dtype, local = describe(name, tensor)
        kept = tensor if tensor.is_contiguous() else bits(tensor).contiguous()
        if copied and kept.data_ptr() == tensor.data_ptr():
            kept = bits(kept).clone()
    if not piece.box and not piece.shape:
        return dtype, local, tuple((0, n) for n in local), kept
    shape, box = tuple(piece.shape), tuple((int(b), int(e)) for b, e in piece.box)
    inside = len(shape) == len(box) and all(0 <= b <= e <= n for (b, e), n in zip(box, shape, strict=True))
    if not inside or tuple(e - b for b, e in box) != local:
        raise ConfigError(
            f"tensor {name}: box {[list(b) for b in box]} of shape {list(shape)} with {list(local)} elements here; "
            "expected a box inside the shape, of as many elements"
        )
    return dtype, shape, box, kept


def cut(kept: Array, width: int, shape: Sequence[int], box: tuple[slice, ...]) -> Array:
    """Return a box of what is held, copied, where that is. width, shape: of its elements, as integers."""
    if isinstance(kept, np.ndarray):
        return np.ascontiguousarray(kept.reshape(-1).view(np.uint8).view(f"<u{width}").reshape(shape)[box])
    return bits(kept).reshape(tuple(shape))[box].contiguous()
