"""PlannedTarget: a live module, laid out by an engine, that is brought from version to version in place.

What is fetched is turned into changes of live memory while sampling goes on, and held against what is published: old
values are read, never written, so a wrong base shows before anything stands still. The pause is the flips alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from deltackpt.backend import READ, Cpu, Staged, apply, in_order
from deltackpt.chain import Plan
from deltackpt.digest import U64, contribution, state_fingerprint
from deltackpt.errors import ChainError, ConfigError, IntegrityError, Poisoned
from deltackpt.folder import signed
from deltackpt.kernels import U8, Columns, fingerprint, in_tensors, positions, use_jit, view
from deltackpt.layout import I64, TILE, Segments
from deltackpt.live import Live
from deltackpt.reader import Delta, Reader, compare_fingerprints, named
from deltackpt.scatter import Refresh, ScatterPlan, batches, refresh_all
from deltackpt.tensors import collect, restore_into

if TYPE_CHECKING:
    import torch

Elements: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_PIECE = 64 << 20
"""Bytes of weights that are read through a plan at once."""


class PlannedTarget:
    """A live module, through a plan, as the target of a follower. Weights are written only inside `Prepared.apply`.

    derived: the refresh calls for the plan's derived tensors; they run inside every apply, after the flips.

    The plan is believed only when it has been proven on real weights: either what it reads from the module is a version
    of the store (`open` looks), or `prove` was told what the engine has loaded. A rank that holds only parts of tensors
    needs `prove`, since published fingerprints are of whole tensors. Raises ConfigError where module and plan differ.
    """

    def __init__(
        self, module: torch.nn.Module, plan: ScatterPlan, *, derived: Mapping[str, Refresh] | None = None
    ) -> None:
        self.module, self.plan, self.settled = module, plan, True
        self._refreshes = dict(derived or {})
        if missing := sorted(set(plan.derived) ^ set(self._refreshes)):
            raise ConfigError(f"{missing[0]}: the plan has derived {list(plan.derived)}; pass a refresh call for each")
        self._version: int | None = None
        self._poisoned = False
        self._proven = False
        self._table: U64 | None = None
        """What the fingerprints of the elements that are here add up to, per tensor, as far as it is known."""
        self._state: int | None = None
        """State fingerprint of the weights that `prove` was given, until the module changes."""
        self._bind()

    def _bind(self) -> None:
        self._live = Live(self.module, state=self.plan.state)
        if self._live.signature != self.plan.signature:
            raise ConfigError(
                "the module's tensors are not those that the plan was made for; if it was reloaded or put to sleep, "
                "load it as before, or make a new plan"
            )
        self.addresses = self.plan.addresses(self._live)

    def recheck(self) -> None:
        """Believe nothing until the next `open`: for after sleep, wake, a reload, or anything else unknown."""
        self._version = None

    # ------------------------------------------------------------ proofs

    def prove(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hold all that the plan reads from the module against the weights that the engine has loaded.

        weights: the whole checkpoint, named tensors of the plan's layout. Raises IntegrityError naming what differs:
        then the engine's start-up load lays weights out in another way than the load that the plan was made with.
        """
        self._bind()
        layout = self.plan.layout
        given = collect(dict(weights), layout)
        layout.require_same(given.layout)
        table = read_through(self.plan, self.addresses, against=given.addresses)
        self._state = state_fingerprint(layout.weights, Cpu().fingerprints(layout, given.addresses))
        self._table, self._proven, self._poisoned, self._version = table, True, False, None

    def open(self, reader: Reader, *, reseed: bool = False) -> int | None:
        """Return the version that the module is proven to hold; None: it must be reseeded.

        Raises ConfigError for a store of another layout, and for a reseed through a plan that was never proven here;
        ChainError when the module holds no version of the store and no reseed was asked for.
        """
        head = reader.head
        if head is None:
            raise ConfigError(f"{reader.store.url} has no version yet; publish one first")
        if head.manifest.layout != self.plan.layout.digest:
            reader.layout(head.manifest.layout).require_same(self.plan.layout)
        if not self._live.unmoved():
            self._bind()
            self._version = None
        if self._version is None and not self._poisoned:
            try:
                self._version = self._identify(reader)
            except IntegrityError:
                if not reseed:
                    raise
        if self._version is not None and not reseed:
            return self._version
        if not reseed and not self._poisoned:
            raise ChainError(
                f"the module, read through its plan, holds no version of {reader.store.url}: either it was loaded from "
                "other weights, or the engine's start-up load lays them out in another way than its reload; "
                "load a version of the store by the engine's loader, or ask for a reseed"
            )
        if not self._proven:
            raise ConfigError(
                "a reseed would write through a plan that was never proven on this module; load a version of the store "
                "by the engine's loader, or call prove() with the weights that it has loaded"
            )
        return None

    def _identify(self, reader: Reader) -> int | None:
        """Read the whole module through the plan and return the version that it is."""
        layout = self.plan.layout
        if not self.plan.whole.all() and self._table is None:
            t = int(np.flatnonzero(~self.plan.whole)[0])
            raise ConfigError(
                f"{self.plan.landed[t]} of {layout.count[t]} elements of {layout.names[t]} are in this module, "
                "and what is published is about whole tensors; call prove() with the weights that the engine has loaded"
            )
        table = read_through(self.plan, self.addresses, threads=reader.threads)
        if self.plan.whole.all():
            self._state = state_fingerprint(layout.weights, table)
        elif not np.array_equal(table, self._table):  # type: ignore[arg-type]  # not None, as seen above
            return None
        assert self._state is not None
        version = reader.identify(layout.digest, self._state)
        if version is not None:
            self._table, self._proven = table, True
        return version

    def close(self) -> None:
        """Nothing to release: the module is the caller's."""

    def stage(self, reader: Reader, plan: Plan) -> StagedPlan:
        """Fetch, decode, check, and turn into changes of live memory; the module is not touched."""
        return StagedPlan(self, reader, plan)


class StagedPlan:
    """A version, ready for the one short apply.

    forecast_ms: how long reading the memory that the flips will change took, which is about what the apply will take;
    of a reseed it is not known (None).
    """

    def __init__(self, target: PlannedTarget, reader: Reader, plan: Plan) -> None:
        self.target, self.version, self.threads = target, plan.version, reader.threads
        self.base = target._version
        manifest = reader.manifest(plan.version)
        if manifest.layout != target.plan.layout.digest:
            raise ConfigError(f"version {plan.version} has another layout than the plan; make a new plan")
        self.state = int(manifest.state, 16)
        self._state_before = target._state
        self.forecast_ms: float | None = None
        self._weights: tuple[object, U64] | None = None
        self._flips: _Flips | None = None
        if plan.anchor is None:
            self._flips = self._staged(reader, plan)
            self.forecast_ms = self._flips.read_ms
        else:
            layout = target.plan.layout
            memory = np.empty(layout.total_bytes, np.uint8)
            where = np.uint64(memory.__array_interface__["data"][0]) + (
                np.cumsum(layout.nbytes) - layout.nbytes
            ).astype(np.uint64)
            restore_into(reader, plan.version, Cpu(reader.threads), where, plan)
            self._weights = (memory, where)

    def _staged(self, reader: Reader, plan: Plan) -> _Flips:
        scatter = self.target.plan
        published = np.zeros(len(scatter.layout.names), np.uint64)
        groups: dict[int, list[tuple[I64, U64]]] = {}
        for step in plan.steps:
            delta = reader.delta(step.version)
            published += signed(delta, step)
            for group, changes in _changes(scatter, delta, reader.threads):
                groups.setdefault(group, []).append(changes)
        flips = _flips(scatter, [_merged(c) for _, c in sorted(groups.items())], self.target.addresses, self.threads)
        whole = scatter.whole
        if wrong := compare_fingerprints(
            scatter.layout, np.where(whole, flips.added, 0), np.where(whole, published, 0)
        ):
            self.target.recheck()
            raise IntegrityError(
                f"version {plan.version}: {named(wrong)} would not change as published; nothing was written; reseed"
            )
        return flips

    def apply(self) -> None:
        """Write the module. After an error that leaves it between versions the target is Poisoned."""
        target = self.target
        if target._poisoned and self._weights is None:
            raise Poisoned("an earlier apply did not finish; prepare again to reseed")
        if (self._flips is not None and target._version != self.base) or not target._live.unmoved():
            target.recheck()
            raise IntegrityError("the module was changed or moved since this version was staged; prepare again")
        target._poisoned, target._version = True, None
        if self._weights is not None:
            target._table = self._reseed(self._weights[1])
        elif self._flips is not None:
            if not self._flip(self._flips):
                self._flip(self._flips)
                target._poisoned = False
                raise IntegrityError(
                    f"version {self.version}: the module did not change as staged, all was undone; reseed"
                )
            assert target._table is not None
            target._table = target._table + self._flips.added
        self._finish(self.version, self.state)

    def undo(self) -> None:
        """Go back to the version before an apply that has ended well, as when another rank of a group failed.

        Raises ConfigError after a reseed, which cannot be undone; Poisoned when the module is at neither version now.
        """
        target = self.target
        if self._flips is None or target._version != self.version or self.base is None:
            raise ConfigError(f"version {self.version} was not applied last, or was a reseed; it cannot be undone")
        target._poisoned, target._version = True, None
        found = apply(target.plan.live, self._flips.staged, target.addresses, threads=self.threads)
        if not np.array_equal(found, -self._flips.live):
            raise Poisoned(f"version {self.base} did not come back; prepare again to reseed")
        assert target._table is not None
        target._table = target._table - self._flips.added
        self._finish(self.base, self._state_before)

    def _flip(self, flips: _Flips) -> bool:
        """Flip bits; say whether old values turned into new ones as they were read while staging."""
        target = self.target
        found = apply(target.plan.live, flips.staged, target.addresses, threads=self.threads)
        return np.array_equal(found, flips.live)

    def _reseed(self, where: U64) -> U64:
        """Overwrite all that is planned and prove the result."""
        target = self.target
        write_through(target.plan, target.addresses, where, threads=self.threads)
        try:
            return read_through(target.plan, target.addresses, against=where, threads=self.threads)
        except IntegrityError as exc:
            raise Poisoned(f"a reseed did not take: {exc}") from exc

    def _finish(self, version: int, state: int | None) -> None:
        target = self.target
        try:
            refresh_all(target._refreshes)
        except Exception as exc:
            raise Poisoned(f"version {version} is there, but a refresh call failed ({exc}); prepare again") from exc
        target._state, target._version, target._poisoned = state, version, False

    def discard(self) -> None:
        """Forget what was staged; nothing was written."""
        self._flips, self._weights = None, None


# ---------------------------------------------------------------- flips


@dataclass(frozen=True)
class _Flips:
    """Changes of live memory. added: to the fingerprint of each checkpoint tensor, by what is here of it; live: to that
    of each live tensor; read_ms: how long reading the places took.
    """

    staged: Sequence[Staged]
    added: U64
    live: U64
    read_ms: float


def _changes(plan: ScatterPlan, delta: Delta, threads: int | None) -> Iterator[tuple[int, tuple[I64, U64]]]:
    """Yield each group's number, and its changes: elements of the checkpoint, counted through, and flips."""
    numbering = plan.source_numbering
    for staged in delta.staged(threads=threads):
        segments = delta.tiling.groups[staged.group]
        at, values = positions(segments, staged.columns)
        at, values = at[values != 0], values[values != 0]
        if segments.boxes is None:
            yield staged.group, (at + numbering.of_group[staged.group], values)
            continue
        # A group of a part has elements of any groups of the layout, in an order of its own.
        tensor, element = in_tensors(segments, at)
        elements = numbering.of_tensor[tensor] + element
        order = np.argsort(elements)
        elements, values = elements[order], values[order]
        cuts = np.searchsorted(elements, numbering.of_group)
        for group in np.flatnonzero(np.diff(cuts)).tolist():
            mine = slice(int(cuts[group]), int(cuts[group + 1]))
            yield group, (elements[mine], values[mine])


def _merged(changes: Sequence[tuple[I64, U64]]) -> tuple[I64, U64]:
    """Join the changes of several deltas to one group: flips of one element meet."""
    if len(changes) == 1:
        return changes[0]
    elements, values = (np.concatenate(c) for c in zip(*changes, strict=True))
    order = np.argsort(elements, kind="stable")
    elements, values = elements[order], values[order]
    first = np.flatnonzero(np.diff(elements, prepend=-1))
    values = np.bitwise_xor.reduceat(values, first)
    return elements[first][values != 0], values[values != 0]


def _flips(plan: ScatterPlan, groups: Sequence[tuple[I64, U64]], addresses: U64, threads: int | None) -> _Flips:
    """Map changes to live memory, and read there what they will do."""
    staged: list[Staged] = []
    added = np.zeros(len(plan.layout.names), np.uint64)
    live_added = np.zeros(len(plan.live.names), np.uint64)
    read_ms = 0.0
    for width in (1, 2, 4, 8):
        mine = [g for g in groups if len(g[0]) and plan.layout.width[plan.source_numbering.owner(g[0][:1])[0]] == width]
        if not mine:
            continue
        elements, values = (np.concatenate(c) for c in zip(*mine, strict=True))
        found = [one.find(elements) for one in plan.maps]
        which = np.concatenate([w for w, _ in found])
        live = np.concatenate([at for _, at in found])
        copies = np.repeat(np.arange(len(found)), [len(w) for w, _ in found])
        order = np.argsort(live, kind="stable")
        which, live, copies = which[order], live[order], copies[order]
        here = list(_columns(plan, live, values[which]))
        began = time.perf_counter()
        reading = [
            Staged(s.group, Columns(s.columns.counts, s.columns.gaps, s.columns.values.copy(), s.columns.dense))
            for s in here
        ]
        live_added += apply(plan.live, reading, addresses, mode=READ, threads=threads)
        read_ms += (time.perf_counter() - began) * 1e3
        new = np.concatenate([_elements(s.columns.values) for s in reading]) if reading else np.empty(0, np.uint64)
        old = new ^ values[which]
        added += _added(plan, width, elements, which, copies, old, new)
        staged += here
    return _Flips(staged, added, live_added, read_ms)


def _columns(plan: ScatterPlan, live: I64, values: U64) -> Iterator[Staged]:
    """Lay changes of live elements, sorted, out as columns of the live layout's groups."""
    bounds = np.searchsorted(live, plan.live_numbering.of_group)
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        part = slice(bounds[number], bounds[number + 1])
        group = plan.live.groups[number]
        at = live[part] - plan.live_numbering.of_group[number]
        begin = np.cumsum(group.count) - group.count
        row = np.searchsorted(begin, at, side="right") - 1
        inside = at - begin[row]
        per = -(-group.count // TILE)
        tile = (np.cumsum(per) - per)[row] + inside // TILE
        place = inside % TILE
        gap = np.where(np.diff(tile, prepend=-1) != 0, place, np.diff(place, prepend=0) - 1)
        counts = np.bincount(tile, minlength=group.tiles).astype(np.uint16)
        nothing = np.empty((group.width, 0), np.uint8)
        yield Staged(
            number, Columns(counts, _planes(gap.astype(np.uint64), 2), _planes(values[part], group.width), nothing)
        )


def _planes(values: U64, width: int) -> U8:
    return np.ascontiguousarray(values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T)


def _elements(planes: U8) -> U64:
    """Undo `_planes`."""
    wide = np.zeros((planes.shape[1], 8), np.uint8)
    wide[:, : len(planes)] = planes.T
    return wide.view("<u8").reshape(-1)


def _added(plan: ScatterPlan, width: int, elements: I64, which: I64, copies: I64, old: U64, new: U64) -> U64:
    """Return what the changes add to the fingerprints of the checkpoint's tensors. Raises IntegrityError for copies
    of one element that are not equal.
    """
    before, after = np.zeros(len(elements), np.uint64), np.zeros(len(elements), np.uint64)
    first = copies == 0
    before[which[first]], after[which[first]] = old[first], new[first]
    tensors = plan.source_numbering.owner(elements)
    if (odd := np.flatnonzero(before[which] != old)).size:
        name = plan.layout.names[int(tensors[which[odd[0]]])]
        raise IntegrityError(f"copies of {name} in the module are not equal; nothing was written; reseed")
    inside = (elements - plan.source_numbering.of_tensor[tensors]).astype(np.uint64)
    terms = contribution(width, inside, after) - contribution(width, inside, before)
    total = np.zeros(len(plan.layout.names), np.uint64)
    if len(terms):
        begin = np.flatnonzero(np.diff(tensors, prepend=-1))
        total[tensors[begin]] = np.add.reduceat(terms, begin)
    return total


# ---------------------------------------------------------------- whole tensors


def read_through(plan: ScatterPlan, addresses: U64, *, against: U64 | None = None, threads: int | None = None) -> U64:
    """Return the fingerprint of what is here of each checkpoint tensor: a full pass over live memory.

    against: addresses of contiguous tensors that must have the same values. Raises IntegrityError, naming the tensor,
    where they have not, or where copies of one element are not equal.
    """
    jit = use_jit(plan.layout)

    def work(tensors: I64) -> tuple[I64, U64]:
        width = int(plan.layout.width[tensors[0]])
        count = plan.layout.count[tensors]
        begin = np.cumsum(count) - count
        scratch = np.zeros(int(count.sum()), f"<u{width}")
        for t, at, n in zip(tensors.tolist(), begin.tolist(), count.tolist(), strict=True):
            here = scratch[at : at + n]
            _move(plan, 0, t, here, addresses, write=False)
            _require_equal(plan, t, here, addresses, None if against is None else view(against[t], n * width))
        where = np.uint64(scratch.__array_interface__["data"][0]) + (begin * width).astype(np.uint64)
        return tensors, fingerprint(Segments(width, tensors, np.zeros_like(count), count), where, jit=jit)

    table = np.zeros(len(plan.layout.names), np.uint64)
    for tensors, sums in in_order(work, batches(plan, _PIECE), threads):
        table[tensors] = sums
    return table


def _require_equal(plan: ScatterPlan, tensor: int, here: Elements, addresses: U64, given: U8 | None) -> None:
    """Raise IntegrityError unless copies, and the values that are given, equal what was read of a tensor."""
    name = plan.layout.names[tensor]
    for number in range(1, len(plan.maps)):
        copy = here.copy()
        _move(plan, number, tensor, copy, addresses, write=False)
        if not np.array_equal(copy, here):
            raise IntegrityError(f"copies of {name} in the module are not equal; load it again")
    if given is None:
        return
    expected = given.view(here.dtype)
    if not plan.whole[tensor]:
        landed = plan.maps[0].expand(_boxes(plan, 0, tensor))[0] - plan.source_numbering.of_tensor[tensor]
        here, expected = here[landed], expected[landed]
    if not np.array_equal(here, expected):
        raise IntegrityError(
            f"{name}, read through the plan, is not what was loaded: the engine's start-up load lays it out in another "
            "way than the load that the plan was made with; use the engine's own reload"
        )


def write_through(plan: ScatterPlan, addresses: U64, where: U64, *, threads: int | None = None) -> None:
    """Write contiguous tensors, at the addresses `where`, to all their places in live memory."""

    def work(tensors: I64) -> None:
        for t in tensors.tolist():
            given = view(where[t], int(plan.layout.nbytes[t])).view(f"<u{plan.layout.width[t]}")
            for number in range(len(plan.maps)):
                _move(plan, number, t, given, addresses, write=True)

    for _ in in_order(work, batches(plan, _PIECE), threads):
        pass


_MANY = 64
"""Boxes of a tensor from which on it is quicker to go by a list of elements."""


def _boxes(plan: ScatterPlan, number: int, tensor: int) -> slice:
    """Return the boxes of a map that lie in a tensor."""
    first = plan.source_numbering.of_tensor[tensor]
    return slice(*np.searchsorted(plan.maps[number].source, [first, first + plan.layout.count[tensor]]).tolist())


def _move(plan: ScatterPlan, number: int, tensor: int, elements: Elements, addresses: U64, *, write: bool) -> None:
    """Copy a tensor's elements from their places in live memory, or to them."""
    one, boxes = plan.maps[number], _boxes(plan, number, tensor)
    first, width = int(plan.source_numbering.of_tensor[tensor]), elements.itemsize
    numbering = plan.live_numbering
    rows = numbering.owner(one.live[boxes])
    if boxes.stop - boxes.start > _MANY:
        source, live = one.expand(boxes)
        owner = numbering.owner(live)
        for row in np.unique(rows).tolist():
            mine = owner == row
            at, place = source[mine] - first, live[mine] - numbering.of_tensor[row]
            memory = view(addresses[row], int(plan.live.nbytes[row])).view(elements.dtype)
            if write:
                memory[place] = elements[at]
            else:
                elements[at] = memory[place]
        return
    begin = int(elements.__array_interface__["data"][0])
    for source, live, kind, row in zip(
        one.source[boxes].tolist(), one.live[boxes].tolist(), one.kind[boxes].tolist(), rows.tolist(), strict=True
    ):
        extent, step, live_step = one.shapes[kind].T.tolist()
        here = _strided(begin + (source - first) * width, elements.dtype, extent, step)
        place = int(addresses[row]) + (live - int(numbering.of_tensor[row])) * width
        there = _strided(place, elements.dtype, extent, live_step)
        if write:
            there[...] = here
        else:
            here[...] = there


def _strided(address: int, dtype: np.dtype[np.unsignedinteger[Any]], extent: list[int], step: list[int]) -> Elements:
    base = view(address, dtype.itemsize).view(dtype)
    strides = [s * dtype.itemsize if n > 1 else 0 for n, s in zip(extent, step, strict=True)]
    return np.lib.stride_tricks.as_strided(base, extent, strides)
