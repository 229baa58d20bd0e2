"""TensorTarget: live torch tensors that are brought from version to version in place.

Storage, strides and addresses stay. No cast, no broadcast, ever. Longer than most modules: describing, staging,
applying and undoing are one life of the same tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from deltackpt.backend import Cpu, Device, pointers
from deltackpt.chain import Plan, Step
from deltackpt.checkpoint import Checkpoint
from deltackpt.digest import U64, state_fingerprint
from deltackpt.errors import ConfigError, FormatError, IntegrityError, Poisoned
from deltackpt.folder import signed
from deltackpt.kernels import view
from deltackpt.layout import DTYPES, Layout, Mask
from deltackpt.reader import AnchorSource, Delta, Reader, compare_fingerprints, named, read_chunks, source_lacks
from deltackpt.store import Store

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = torch.Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]
    Params: TypeAlias = "Mapping[str, Array] | Iterable[tuple[str, Array]] | Live"

BACKENDS = ("auto", "cpu", "cuda", "de", "torch")
"""See `choose`."""


@lru_cache(maxsize=64)
def _dtype_of(dtype: object) -> str | None:
    return DTYPES.get(str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Roster:
    """What a mapping of contiguous tensors on a GPU looked like: those that look alike need no second description.

    names: in the mapping's order; types, dtypes, shapes: of each tensor; ordered: puts a list into the layout's order.
    """

    layout: Layout
    names: list[str]
    types: list[type]
    dtypes: list[object]
    shapes: list[torch.Size]
    ordered: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
    on: str

    @classmethod
    def of(cls, params: Mapping[str, torch.Tensor], layout: Layout, on: str) -> Roster:
        """Note what tensors look like."""
        import torch

        tensors, place = list(params.values()), {name: i for i, name in enumerate(params)}
        dtypes, shapes = list(map(_DTYPE, tensors)), list(map(torch.Tensor.size, tensors))
        ordered = _picker([place[n] for n in layout.names])
        return cls(layout, list(params), list(map(type, tensors)), dtypes, shapes, ordered, on)


_DTYPE, _IS_CUDA = operator.attrgetter("dtype"), operator.attrgetter("is_cuda")


@dataclass(frozen=True)
class Live:
    """Tensors that are being published, in layout order: contiguous ones, or copies.

    on: the torch device on which all of them are.
    """

    layout: Layout
    kept: tuple[object, ...]
    on: str
    roster: Roster | None = None

    @property
    def addresses(self) -> U64:
        """Address of the first byte of each, as torch gives it."""
        return pointers(self.kept)


def collect(params: Params, known: Layout | None = None, roster: Roster | None = None) -> Live:
    """Return the layout and the memory of named tensors. Strided ones are copied. Raises ConfigError by name.

    known: a layout that they may have; then it is that very object, with all that was derived from it. roster: of the
    tensors before these. Tensors that are described already are taken as they are.
    """
    if isinstance(params, Live):
        return params
    if isinstance(params, Mapping) and roster is not None and (live := _recognise(params, roster)) is not None:
        return live
    found: dict[str, tuple[str, tuple[int, ...], int, object]] = {}
    places: dict[str, object] = {}
    host = "cpu"
    for name, tensor in params.items() if isinstance(params, Mapping) else params:
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise ConfigError(f"tensor name {name!r} is reserved by safetensors, or no text; rename the tensor")
        if name in found:
            raise ConfigError(f"tensor {name} is given twice (duplicate)")
        if isinstance(tensor, np.ndarray):
            found[name], places[name] = describe_array(name, tensor), host
        else:
            dtype, shape = describe(name, tensor)
            whole = tensor if tensor.is_contiguous() else bits(tensor).contiguous()
            found[name], places[name] = (dtype, shape, whole.data_ptr(), whole), tensor.device
    dtypes, shapes = [f[0] for f in found.values()], [f[1] for f in found.values()]
    layout = (
        known if known is not None and known.has(list(found), dtypes, shapes) else Layout(list(found), dtypes, shapes)
    )
    kept, on = tuple(found[n][3] for n in layout.names), one_place(places)
    made = None
    if (
        isinstance(params, Mapping)
        and on.startswith("cuda")
        and "C64" not in dtypes
        and all(f[3] is params[n] for n, f in found.items())
    ):
        made = Roster.of(cast("Mapping[str, torch.Tensor]", params), layout, on)
    return Live(layout, kept, on, made)


def _recognise(params: Mapping[str, Array], roster: Roster) -> Live | None:
    """Return the tensors if they look like those of the roster."""
    import torch

    # Map over methods in C, one after the other: of 25,000 tensors, a line of Python for each takes longer than their
    # changes, and so does the garbage collector with a tuple for each.
    tensors = cast("list[torch.Tensor]", list(params.values()))
    if list(params) != roster.names or list(map(type, tensors)) != roster.types:
        return None
    if list(map(_DTYPE, tensors)) != roster.dtypes:
        return None
    if not all(map(operator.eq, map(torch.Tensor.size, tensors), roster.shapes)):
        return None
    if not all(map(_IS_CUDA, tensors)) or not all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    if set(map(torch.Tensor.get_device, tensors)) != {torch.device(roster.on).index}:
        return None
    if any(map(torch.Tensor.is_neg, tensors)):
        return None
    return Live(roster.layout, roster.ordered(tensors), roster.on, roster)


def _picker(order: list[int]) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """Return what puts a list in this order."""
    if len(order) < 2:
        return tuple
    return operator.itemgetter(*order)


def one_place(places: Mapping[str, object]) -> str:
    """Return the torch device of all tensors, by name. Raises ConfigError where there are several."""
    first, on = next(iter(places.items()), ("", "cpu"))
    if len(set(map(str, set(places.values())))) > 1:
        name, place = next((n, p) for n, p in places.items() if str(p) != str(on))
        raise ConfigError(f"tensor {name} is on {place}, but {first} is on {on}; one device is expected")
    return str(on)


@dataclass(frozen=True)
class Choice:
    """The backend for tensors on a torch device, by name, and why it is that one."""

    on: str
    backend: str
    reason: str

    def device(self, threads: int | None) -> Device:
        """Return the backend. Raises ConfigError, naming what is missing."""
        if self.backend == "cpu":
            return Cpu(threads)
        if self.backend == "torch":
            from deltackpt.torchdevice import Torch

            return Torch(self.on, threads)
        from deltackpt.cuda import Cuda
        from deltackpt.nvcomp import HARDWARE

        return Cuda(self.on, threads, HARDWARE if self.backend == "de" else None)


def choose(on: str, backend: str = "auto") -> Choice:
    """Choose the backend for tensors on a torch device.

    auto: cpu for host memory; for an NVIDIA GPU de where the driver reports a Decompression Engine and nvCOMP is there,
    else cuda where it can work; else torch. One that is asked for by name is taken or refused, never replaced. Raises
    ConfigError, naming what is missing.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown; expected one of {' '.join(BACKENDS)}")
    kind = on.partition(":")[0]
    lacks = _cuda_lacks(on)
    if backend == "auto":
        if kind == "cpu":
            return Choice(on, "cpu", "the tensors are in host memory")
        if lacks is None:
            return _choose_engine(on)
        return Choice(on, "torch", lacks)
    if backend == "cpu" and kind != "cpu":
        raise ConfigError(f"tensors on {on}: backend cpu works in host memory; move them there, or take backend auto")
    if backend in ("cuda", "de") and lacks is not None:
        raise ConfigError(f"tensors on {on}: backend {backend} cannot be used: {lacks}; take backend auto or torch")
    return Choice(on, backend, "asked for by name")


def _choose_engine(on: str) -> Choice:
    """Choose between the backends of an NVIDIA GPU, by what the driver says and what is installed."""
    import torch

    from deltackpt import arena, libnvcomp

    try:
        found = arena.capability(torch.device(on))
    except ConfigError as exc:
        return Choice(on, "cuda", f"an NVIDIA GPU; whether it has a Decompression Engine is not known: {exc}")
    if not found.mask:
        return Choice(on, "cuda", "an NVIDIA GPU; the driver reports no Decompression Engine")
    if not libnvcomp.installed():
        return Choice(on, "cuda", "an NVIDIA GPU; its Decompression Engine is not used, since nvCOMP is not installed")
    return Choice(on, "de", f"the driver reports a Decompression Engine for {', '.join(found.codecs)}")


def _cuda_lacks(on: str) -> str | None:
    """Say why the cuda backend cannot work there; None: it can."""
    if on.partition(":")[0] != "cuda":
        return f"{on} is no NVIDIA GPU"
    import torch

    if torch.version.hip is not None:
        return f"{on} is an AMD GPU (HIP {torch.version.hip})"
    if find_spec("cuda") is None or find_spec("cuda.core") is None:
        return "cuda-core is not installed; pip install 'deltackpt[cuda13]' (or cuda12)"
    return None


def describe_array(
    name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> tuple[str, tuple[int, ...], int, object]:
    """Return dtype, shape, address and owner of an array's contiguous bytes. Raises ConfigError for other dtypes."""
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None or dtype == "F4":
        raise ConfigError(
            f"tensor {name}: numpy's {array.dtype} has no safetensors dtype; convert it before publishing"
        )
    whole = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return dtype, array.shape, int(whole.__array_interface__["data"][0]), whole


def describe(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's safetensors dtype and header shape. Raises ConfigError for what cannot be stored."""
    torch = sys.modules.get("torch")  # whoever passes a tensor has imported it
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"tensor {name} is a {type(tensor).__name__}; expected a torch tensor or a numpy array")
    dtype = _dtype_of(tensor.dtype)
    if dtype is None:
        raise ConfigError(f"tensor {name}: {tensor.dtype} has no safetensors dtype; convert it before publishing")
    if tensor.device.type == "meta":
        raise ConfigError(f"tensor {name} is on meta, where nothing has memory; put it on the CPU or on another device")
    if tensor.layout != torch.strided or (tensor.numel() and tensor.data_ptr() == 0):
        raise ConfigError(
            f"tensor {name}, a {type(tensor).__name__} ({tensor.layout}), has no plain memory on this host: "
            "it is sparse, or sharded over ranks; pass a dense local tensor"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(f"tensor {name} is a conjugate or negated view of other bits; resolve it first")
    shape = tuple(tensor.shape)
    if dtype == "F4":
        # Torch counts packed pairs, a safetensors header counts elements.
        shape = (*shape[:-1], 2 * shape[-1]) if shape else shape
    return dtype, shape


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, so that copies cannot touch a bit."""
    import torch

    unit = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(unit)


class TensorTarget:
    """Live tensors by name, on the CPU or on one other device of torch, as the target of a follower.

    The tensors stay the caller's; they are written only inside `Prepared.apply`. Names that share one storage
    are written once. Every name must be in the published layout or share the storage of one that is. backend: see
    `choose`; choice: which it became and why, once the tensors were looked at.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, backend: str = "auto") -> None:
        self._tensors, self._backend = dict(tensors), backend
        self.choice: Choice | None = None
        self.settled = True
        self._version: int | None = None
        self._poisoned = False
        self._layout: Layout | None = None
        self._twins: dict[str, str] = {}
        self._device: Device | None = None
        self._memory: Memory | None = None

    def device(self, threads: int | None) -> Device:
        """Return the backend of the device that holds the tensors."""
        if self._device is None:
            self.choice = choose(one_place({n: t.device for n, t in self._tensors.items()}), self._backend)
            self._device = self.choice.device(threads)
        return self._device

    def open(self, reader: Reader, *, reseed: bool = False) -> int | None:
        """Return the version that the tensors are proven to hold; None: they must be reseeded.

        Tensors that were given other memory since are proven again. Raises ConfigError naming the tensor whose dtype,
        shape or name does not fit the store.
        """
        head = reader.head
        if head is None:
            raise ConfigError(f"{reader.store.url} has no version yet; publish one first")
        layout = reader.layout(head.manifest.layout)
        moved = self._memory is not None and self._memory.moved() is not None
        if self._layout is None or self._layout.digest != layout.digest or moved:
            self._require_fit(layout)
            self._layout, self._version, self._memory = layout, None, None
        if reseed or self._poisoned:
            return None
        if self._version is None:
            self._version = self._identify(reader, layout)
        return self._version

    def boxes(self) -> U64:
        """Return a number for each part of the model that is held here; equal parts have equal numbers on all hosts.

        See `deltackpt.replica`. This target holds all of the model: one part.
        """
        assert self._layout is not None
        return np.array([int(self._layout.digest[:16], 16)], np.uint64)

    def sums(self, reader: Reader) -> U64:
        """Return what each of the boxes adds to the state fingerprint of the version that is held, as proven here."""
        assert self._version is not None
        return np.array([int(reader.manifest(self._version).state, 16)], np.uint64)

    def _identify(self, reader: Reader, layout: Layout) -> int | None:
        """Return the version that a full pass proves the tensors to hold."""
        table = self._fingerprints(layout, reader.threads)
        return reader.identify(layout.digest, state_fingerprint(layout.weights, table))

    def close(self) -> None:
        """Nothing to release: the tensors are the caller's."""

    def _require_fit(self, layout: Layout) -> None:
        for name in layout.names:
            if name not in self._tensors:
                raise ConfigError(f"tensor {name} is published, but the target does not have it; add it")
            dtype, shape = describe(name, self._tensors[name])
            i = layout.position[name]
            if dtype != layout.dtypes[i]:
                raise ConfigError(f"tensor {name} is {layout.dtypes[i]} in the store and {dtype} here; nothing is cast")
            if shape != layout.shapes[i]:
                raise ConfigError(
                    f"tensor {name} has shape {list(layout.shapes[i])} in the store and {list(shape)} here; "
                    "nothing is broadcast"
                )
        self._twins = find_twins(self._tensors, layout)
        for name in self._tensors:
            if name not in layout.position and name not in self._twins:
                raise ConfigError(f"tensor {name} is not published and would go stale; leave it out of the target")

    def memory(self, layout: Layout, device: Device) -> Memory:
        """Return addresses for all tensors of the layout, as they were when they were proven; see Memory."""
        if self._memory is None or self._memory.layout is not layout:
            self._memory = Memory(layout, self._tensors, self._twins, device)
        return self._memory

    def _fingerprints(self, layout: Layout, threads: int | None) -> U64:
        device = self.device(threads)
        memory = self.memory(layout, device)
        memory.shadow(np.ones(len(layout.names), bool))
        try:
            return device.fingerprints(layout, memory.addresses)
        finally:
            memory.forget()

    def stage(self, reader: Reader, plan: Plan) -> StagedTensors:
        """Fetch, decode and check everything; the tensors are not touched."""
        return StagedTensors(self, reader, plan)


def find_twins(tensors: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, str]:
    """Return the names whose memory is that of another name, by that name.

    Raises ConfigError where tensors overlap in any other way: in-place writes would meet.
    """
    owner: dict[tuple[object, ...], str] = {}
    twins: dict[str, str] = {}
    by_storage: dict[int, list[str]] = {}
    for name in sorted(tensors, key=lambda n: (n not in layout.position, n.encode())):
        tensor = tensors[name]
        if tensor.numel() == 0:
            continue
        place = (_first_byte(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place in owner:
            twins[name] = owner[place]
        else:
            owner[place] = name
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in by_storage.values():
        _require_apart({n: tensors[n] for n in names})
    return twins


def _first_byte(tensor: torch.Tensor) -> object:
    """Say where a tensor begins; equal answers mean the same byte."""
    if tensor.device.type in ("cpu", "cuda"):
        return tensor.data_ptr()
    # Elsewhere a pointer may be opaque (mps), and one plus an offset another one.
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset()


def _require_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError if tensors of one storage share a byte with each other or with themselves."""
    import torch

    if len(tensors) == 1 and next(iter(tensors.values())).is_contiguous():
        return
    storage = next(iter(tensors.values())).untyped_storage()
    used = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    for name, tensor in tensors.items():
        width = tensor.element_size()
        shape = (*tensor.shape, width)
        stride = (*(s * width for s in tensor.stride()), 1)
        mine = used.as_strided(shape, stride, tensor.data_ptr() - storage.data_ptr())
        before = int(used.sum(dtype=torch.int64))
        if bool(mine.any()):
            raise ConfigError(f"tensor {name} overlaps another tensor in memory; only equal views may share storage")
        mine.fill_(1)
        if int(used.sum(dtype=torch.int64)) - before != tensor.numel() * width:
            raise ConfigError(f"tensor {name} overlaps itself in memory (expanded?); pass a real tensor")


def look_up(tensors: Sequence[torch.Tensor]) -> U64:
    """Return the address of each tensor's first byte, as fast as Python gives them."""
    import torch

    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))


def first_moved(tensors: Sequence[torch.Tensor], found: U64) -> int | None:
    """Return the number of the first tensor that is no longer where it was found, None if there is none."""
    at = np.flatnonzero(look_up(tensors) != found)
    return int(at[0]) if len(at) else None


class Memory:
    """Addresses of contiguous bytes for every tensor of a layout.

    Contiguous tensors are used as they are. Strided ones, and all but one of those that share memory, are worked on
    through shadows: contiguous copies that `write_back` returns (twins are dropped, since their owner was written).
    The memory is held: what was written to it by mistake, because a tensor was given other memory, can be taken back.
    """

    def __init__(
        self, layout: Layout, tensors: Mapping[str, torch.Tensor], twins: Mapping[str, str], device: Device
    ) -> None:
        self.layout, self._tensors, self._twins, self._device = layout, tensors, twins, device
        self._shadows: dict[int, torch.Tensor] = {}
        self._in_order = [tensors[n] for n in layout.names]
        self._found = look_up(self._in_order)
        indirect = np.array([n in twins or not tensors[n].is_contiguous() for n in layout.names], bool)
        self._indirect = np.flatnonzero(indirect & (layout.nbytes > 0)).tolist()
        self._own = np.zeros(len(layout.names), np.uint64)
        direct = np.flatnonzero(~indirect)
        self._held, self._own[direct] = device.hold([self._in_order[i].detach() for i in direct.tolist()])
        self._held_shadows: list[object] = []
        self.addresses = self._own.copy()

    def moved(self) -> str | None:
        """Return the name of a tensor that was given other memory since, None if there is none."""
        at = first_moved(self._in_order, self._found)
        return None if at is None else self.layout.names[at]

    def shadow(self, wanted: Mask) -> None:
        """Make shadows of the indirect tensors that are wanted, from what they hold now."""
        for i in self._indirect:
            if wanted[i]:
                copy = bits(self._tensors[self.layout.names[i]]).contiguous()
                if copy.data_ptr() == self._tensors[self.layout.names[i]].data_ptr():
                    copy = copy.clone()
                self._shadows[i] = copy
                held, self.addresses[i : i + 1] = self._device.hold([copy])
                self._held_shadows.append(held)

    def write_back(self) -> None:
        """Copy strided shadows to their tensors, and forget all shadows."""
        for i, copy in self._shadows.items():
            if self.layout.names[i] not in self._twins:
                bits(self._tensors[self.layout.names[i]]).copy_(copy)
        self.forget()

    def forget(self) -> None:
        """Forget all shadows."""
        self._shadows.clear()
        self._held_shadows.clear()
        self.addresses[:] = self._own


class StagedTensors:
    """Decoded columns, ready for the one short apply."""

    def __init__(self, target: TensorTarget, reader: Reader, plan: Plan) -> None:
        self.target, self.plan, self.version = target, plan, plan.version
        self.previous = target._version
        self.threads, self.device = reader.threads, target.device(reader.threads)
        layout = target._layout
        assert layout is not None
        wanted = reader.manifest(plan.version)
        if wanted.layout != layout.digest:
            raise ConfigError(f"version {plan.version} has another layout than these tensors; make a new target")
        self.layout = layout
        self.anchor: AnchorSource | None = None if plan.anchor is None else reader.anchor(plan.anchor)
        if self.anchor is not None:
            self._require_twins(self.anchor.anchor.version, self.anchor.fingerprints)
        self.deltas: list[tuple[Delta, Sequence[object]]] = []
        with contextlib.closing(self._fetch(reader, [step.version for step in plan.steps])) as deltas:
            for delta in deltas:
                self.deltas.append((delta, stage_delta(self.device, delta)))
                self._require_twins(delta.version, delta.fingerprints)
        # Looked up here: for 25,000 tensors that takes as long as their apply on a GPU.
        self.memory = target.memory(layout, self.device)
        self._touched = np.zeros(len(layout.names), bool)
        for delta, _ in self.deltas:
            self._touched |= delta.fingerprints != 0

    def _fetch(self, reader: Reader, versions: Sequence[int]) -> Generator[Delta]:
        """Fetch of each version what this target needs."""
        return reader.deltas(versions, room=self.device.room)

    def _require_twins(self, version: int, table: U64) -> None:
        """Raise ConfigError unless names of one storage have equal fingerprints in what is about to be written."""
        for twin, owner in self.target._twins.items():
            if twin in self.layout.position:
                mine, theirs = (int(table[self.layout.position[n]]) for n in (twin, owner))
                if mine != theirs:
                    raise ConfigError(
                        f"version {version} has other values for {owner} than for {twin}, "
                        "but here they share one storage; untie them"
                    )

    def apply(self) -> None:
        """Write the tensors. After an error that leaves them between versions the target is Poisoned."""
        target = self.target
        if target._poisoned and self.anchor is None:
            raise Poisoned("an earlier apply did not finish; prepare again to reseed")
        target._poisoned, target._version = True, None
        if self.anchor is not None:
            target._memory = None  # nothing of what is there is relied on: wherever it is now
            self.memory = target.memory(self.layout, self.device)
            self._reseed(self.anchor)
        memory = self.memory
        memory.shadow(self._touched)
        found: list[str | None] = []
        wrong = self._apply(memory, lambda: found.append(memory.moved()))
        if not self.deltas:
            found.append(memory.moved())
        if (moved := next(iter(found), None)) is not None:
            self._undo(len(self.deltas) if wrong is None else 0, memory)
            memory.forget()
            target._poisoned = self.anchor is not None
            raise ConfigError(f"tensor {moved} was given other memory since it was staged; prepare again")
        memory.write_back()
        if wrong is None:
            target._version, target._poisoned = self.version, False
            return
        # Everything was undone: the bits are those from before, but they are not the version they were taken for.
        target._poisoned = self.anchor is not None
        raise IntegrityError(
            f"version {self.version}: {named(wrong)} did not change as published, all was undone; reseed"
        )

    def _apply(self, memory: Memory, meanwhile: Callable[[], None]) -> list[str] | None:
        """Apply all deltas; where one does not do what was published undo them and return the names."""
        for n, ((delta, staged), step) in enumerate(zip(self.deltas, self.plan.steps, strict=True)):
            wrong = self._flip(delta, staged, step, memory, meanwhile if n == 0 else lambda: None)
            if wrong:
                self._undo(n + 1, memory)
                return wrong
        return None

    def _undo(self, applied: int, memory: Memory) -> list[str]:
        """Take back the first deltas, the last one first; returns the names of tensors that did not change back."""
        wrong: list[str] = []
        for (delta, staged), step in list(zip(self.deltas, self.plan.steps, strict=True))[:applied][::-1]:
            found = self._flip(delta, staged, step.back, memory)
            wrong = wrong or found
        return wrong

    def _flip(
        self,
        delta: Delta,
        staged: Sequence[object],
        step: Step,
        memory: Memory,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Apply one delta; returns the names of tensors that did not change as published."""
        found = self.device.apply(delta.tiling, staged, memory.addresses, meanwhile)
        return compare_fingerprints(self.layout, found, signed(delta, step))

    def undo(self) -> int | None:
        """Take back what `apply` has done, by the same columns; returns the version that the tensors hold then.

        None after an apply that began from an anchor: there is no way back, the target has to be reseeded. Raises
        Poisoned if the tensors were changed in between.
        """
        target = self.target
        assert target._version == self.version
        target._poisoned, target._version = True, None
        if self.anchor is not None:
            return None
        memory = self.memory
        if (moved := memory.moved()) is not None:
            raise Poisoned(f"undoing version {self.version}: tensor {moved} was given other memory since; reseed")
        memory.shadow(self._touched)
        wrong = self._undo(len(self.deltas), memory)
        memory.write_back()
        if wrong:
            raise Poisoned(f"undoing version {self.version}: {named(wrong)} did not change back; reseed")
        target._version, target._poisoned = self.previous, False
        return self.previous

    def _reseed(self, anchor: AnchorSource) -> None:
        """Overwrite every tensor from an anchor and prove the result."""
        memory = self.memory
        memory.shadow(np.ones(len(self.layout.names), bool))
        read_anchor(anchor, self.device, memory.addresses, self.threads)
        found = self.device.fingerprints(self.layout, memory.addresses)
        memory.write_back()
        if wrong := compare_fingerprints(self.layout, found, anchor.fingerprints):
            what = f"anchor of version {anchor.anchor.version} is damaged; make another anchor"
            if anchor.anchor.folder is None:
                what = source_lacks(anchor.anchor, anchor.store)
            raise Poisoned(f"{what}: {named(wrong)} differs")

    def discard(self) -> None:
        """Forget the columns; nothing was written."""
        self.deltas.clear()


def stage_delta(device: Device, delta: Delta) -> Sequence[object]:
    """Decode and check a delta for a device."""
    try:
        return device.stage(delta.tiling, delta.fetched)
    except FormatError as exc:
        raise type(exc)(f"version {delta.version}: {exc}") from exc


_BOUNCE = 256 << 20
"""Bytes of host memory through which an anchor reaches a device."""


def read_anchor(anchor: AnchorSource, device: Device, where: U64, threads: int | None) -> None:
    """Read every tensor of an anchor to its address; what lies together on both sides is read at once."""
    checkpoint: Checkpoint = anchor.checkpoint
    for number, shard in enumerate(checkpoint.placement.files):
        tensors = np.array(shard.tensors, np.int64)
        tensors = tensors[checkpoint.layout.nbytes[tensors] > 0]
        offset, nbytes, place = checkpoint.offset[tensors], checkpoint.layout.nbytes[tensors], where[tensors]
        together = (place[1:] - place[:-1] == nbytes[:-1].astype(np.uint64)) & (offset[1:] - offset[:-1] == nbytes[:-1])
        for run in np.split(np.arange(len(tensors)), np.flatnonzero(~together) + 1):
            if len(run):
                key, begin = anchor.keys[number], int(offset[run[0]])
                _read_to(anchor.store, key, begin, device, int(place[run[0]]), nbytes[run].tolist(), threads)


def _read_to(
    store: Store, key: str, offset: int, device: Device, address: int, sizes: Sequence[int], threads: int | None
) -> None:
    """Read tensors that lie side by side, in an object and from an address of a device on."""
    nbytes = sum(sizes)
    if isinstance(device, Cpu):
        read_chunks(store, key, memoryview(view(address, nbytes)).cast("B"), offset, threads)
        return
    bounce = np.empty(min(nbytes, _BOUNCE), np.uint8)
    ends = np.cumsum(sizes)
    for begin in range(0, nbytes, _BOUNCE):
        part = bounce[: min(_BOUNCE, nbytes - begin)]
        read_chunks(store, key, memoryview(part).cast("B"), offset + begin, threads)
        source = int(part.__array_interface__["data"][0])
        # Neighbours may be allocations of their own, and no copy of a device goes over the end of one.
        inside = ends[(ends > begin) & (ends < begin + len(part))].tolist()
        for first, last in itertools.pairwise([begin, *inside, begin + len(part)]):
            device.copy(address + first, source + first - begin, last - first)


def restore_into(reader: Reader, version: int, device: Device, where: U64, plan: Plan | None = None) -> None:
    """Write a version of the store, whole and proven, to the addresses of its layout; plan: from which anchor."""
    layout = reader.layout(reader.manifest(version).layout)
    plan = plan or reader.plan(version, local=None)
    assert plan.anchor is not None
    anchor = reader.anchor(plan.anchor)
    read_anchor(anchor, device, where, reader.threads)
    table = anchor.fingerprints
    with contextlib.closing(reader.deltas([step.version for step in plan.steps])) as deltas:
        for step, delta in zip(plan.steps, deltas, strict=True):
            device.apply(delta.tiling, stage_delta(device, delta), where)
            table = table + signed(delta, step)
    found = device.fingerprints(layout, where)
    if wrong := compare_fingerprints(layout, found, table):
        raise IntegrityError(f"version {version}: {named(wrong)} came out wrong; the store is damaged")
