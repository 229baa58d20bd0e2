"""What a live module holds: every tensor that can be reached from it, and the memory behind them.

Parameters, buffers, plain attributes; lists, dicts, objects, closures and bound methods on the way. Never writes.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from deltackpt.digest import sha256
from deltackpt.errors import ConfigError
from deltackpt.kernels import U8
from deltackpt.memory import DEVICES, on_host, read, write

if TYPE_CHECKING:
    import torch

_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, np.ndarray, np.generic)


@dataclass(frozen=True)
class View:
    """A tensor in its region.

    names: where it is reached; offset: bytes from the region's begin; width: bytes of an element; stride: in elements.
    """

    names: tuple[str, ...]
    offset: int
    dtype: str
    width: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """Memory that one tensor, or several that overlap, take up; the name is that of the first one reached."""

    name: str
    nbytes: int
    views: tuple[View, ...]
    address: int = field(compare=False)
    device: torch.device = field(compare=False)

    @property
    def on_host(self) -> bool:
        """Whether `read` gives the memory itself."""
        return on_host(self.device)

    def read(self) -> U8:
        """Return its bytes, not to be written; on the host they are no copy, and valid while the tensors are kept."""
        return read(self.device, self.address, self.nbytes)

    def write(self, raw: U8) -> None:
        """Overwrite its bytes."""
        write(self.device, self.address, raw)


@dataclass(frozen=True)
class _Found:
    """A tensor where it was reached. holder[key] is what must still be that tensor; None: it was in a closure."""

    name: str
    tensor: torch.Tensor
    holder: object
    key: object


class Live:
    """The tensors of a module at one moment. It keeps them alive.

    state: patterns (`*.kv_cache*`) of names that are working memory and no weights. Raises ConfigError by name for
    tensors that are neither on the CPU nor on a GPU, or have no plain memory. Tensors without memory (meta) are passed
    over.
    """

    def __init__(self, module: object, *, state: Sequence[str] = ()) -> None:
        found = list(_reach(module))
        left_out = {id(f.tensor) for f in found if any(fnmatchcase(f.name, p) for p in state)}
        self._found = [f for f in found if id(f.tensor) not in left_out]
        self._addresses = [f.tensor.data_ptr() for f in self._found]
        self.regions = tuple(_regions(self._found))

    @functools.cached_property
    def signature(self) -> str:
        """SHA-256 over names, sizes, dtypes, shapes and strides: equal for modules that one plan fits."""
        regions = [
            [r.name, r.nbytes, [[v.names, v.offset, v.dtype, v.shape, v.stride] for v in r.views]] for r in self.regions
        ]
        return sha256(json.dumps(regions).encode())

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(r.nbytes for r in self.regions)

    def unmoved(self) -> bool:
        """Say whether the module still holds these very tensors, at the same addresses."""
        return all(_held(f) for f in self._found) and self._addresses == [f.tensor.data_ptr() for f in self._found]


def _held(found: _Found) -> bool:
    if isinstance(found.holder, dict):
        return found.holder.get(found.key) is found.tensor
    if isinstance(found.holder, list):
        n = found.key
        return isinstance(n, int) and n < len(found.holder) and found.holder[n] is found.tensor
    return True


def _reach(module: object) -> Iterator[_Found]:
    """Yield every tensor with memory that can be reached, in a fixed order; equal ones once for every way."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(module, torch.nn.Module):
        raise ConfigError(f"a torch module is expected, found a {type(module).__name__}")
    seen: dict[int, object] = {}
    stack: list[tuple[str, object, object, object]] = [("", module, None, None)]
    while stack:
        name, thing, holder, key = stack.pop()
        if isinstance(thing, torch.Tensor):
            if thing.is_meta or thing.numel() == 0:
                continue
            if thing.device.type not in DEVICES:
                raise ConfigError(f"tensor {name} is on {thing.device}; plans are made for the CPU and for GPUs (cuda)")
            if thing.layout != torch.strided or thing.data_ptr() == 0:
                raise ConfigError(
                    f"tensor {name}, a {type(thing).__name__} ({thing.layout}), has no plain memory to plan"
                )
            yield _Found(name, thing, holder, key)
        if isinstance(thing, _LEAVES) or id(thing) in seen:
            continue
        seen[id(thing)] = thing  # kept, so that no other object gets this id
        stack.extend(reversed(list(_parts(name, thing, torch.nn.Module))))


def _parts(name: str, thing: object, modules: type) -> Iterator[tuple[str, object, object, object]]:
    """Yield what an object leads to: its name, itself, and where it is held."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield _join(name, key), value, thing, key
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for i, value in enumerate(thing):
            yield f"{name}[{i}]", value, thing, i
    elif isinstance(thing, functools.partial):
        yield f"{name}.args", thing.args, None, None
        yield f"{name}.keywords", thing.keywords, None, None
        yield f"{name}.func", thing.func, None, None
    elif isinstance(thing, types.MethodType):
        yield f"{name}.__self__", thing.__self__, None, None
        yield f"{name}.__func__", thing.__func__, None, None
    elif isinstance(thing, types.FunctionType):
        for variable, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            try:
                yield f"{name}.{variable}", cell.cell_contents, None, None
            except ValueError:  # not bound yet
                continue
        yield f"{name}.__defaults__", thing.__defaults__, None, None
    own = getattr(thing, "__dict__", None)
    if isinstance(own, dict) and not isinstance(thing, (dict, types.FunctionType)):
        # Parameters and buffers first: they have the names that checkpoints use.
        hidden = ("_parameters", "_buffers", "_modules") if isinstance(thing, modules) else ()
        for store in hidden:
            for key, value in own[store].items():
                yield _join(name, key), value, own[store], key
        for key, value in own.items():
            if key not in hidden:
                yield _join(name, key), value, own, key


def _join(name: str, key: object) -> str:
    if not isinstance(key, str):
        return f"{name}[{key!r}]"
    return f"{name}.{key}" if name else key


def _regions(found: Sequence[_Found]) -> Iterator[Region]:
    """Merge tensors that overlap in one storage; in the order of their names."""
    views: dict[tuple[int, int, str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    width: dict[str, int] = {}
    for f in found:
        dtype = str(f.tensor.dtype).removeprefix("torch.")
        width[dtype] = f.tensor.element_size()
        place = (f.tensor.untyped_storage().data_ptr(), f.tensor.data_ptr())
        names = views.setdefault((*place, dtype, tuple(f.tensor.shape), tuple(f.tensor.stride())), [])
        if f.name not in names:
            names.append(f.name)
    order = {f.name: i for i, f in reversed(list(enumerate(found)))}
    device = {f.name: f.tensor.device for f in found}
    together: list[tuple[int, int, int, list[tuple[int, View]]]] = []  # storage, begin, end, views by address
    for (storage, address, dtype, shape, stride), names in sorted(views.items(), key=lambda v: v[0][:2]):
        span = (sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1) * width[dtype]
        one = (address, View(tuple(names), 0, dtype, width[dtype], shape, stride))
        if together and together[-1][0] == storage and address < together[-1][2]:
            _, begin, end, before = together.pop()
            together.append((storage, begin, max(end, address + span), [*before, one]))
        else:
            together.append((storage, address, address + span, [one]))
    regions = []
    for _, begin, end, inside in together:
        inside.sort(key=lambda v: (order[v[1].names[0]], v[0]))
        placed = tuple(replace(v, offset=address - begin) for address, v in inside)
        name = placed[0].names[0]
        regions.append(Region(name, end - begin, placed, begin, device[name]))
    yield from sorted(regions, key=lambda r: order[r.name])
