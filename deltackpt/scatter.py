"""Scatter plans: where every byte of every checkpoint tensor lands in a live module, found by content.

The engine's own loader is run a few times, on planes of position ids (`ids`), and what comes out is read: any way of
copying is a plan, whatever the loader did on the way. The world is closed: each byte that can be reached from the
module is planned, constant, or derived by a call that the caller names; anything else is refused, with the list.
A plan says nothing about how the engine's *start-up* load laid out its weights: `planned` proves that on real weights.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from deltackpt.digest import sha256
from deltackpt.errors import ConfigError, Poisoned
from deltackpt.ids import Bits, Planes, torch_dtype
from deltackpt.kernels import U8
from deltackpt.layout import DTYPES, I64, Layout, element_width
from deltackpt.live import Live, Region, View
from deltackpt.places import Numbering, Runs, compress, runs_of
from deltackpt.plans import LEVEL, UNSIGNED, Coverage, Refresh, Row, ScatterPlan, load_plan, refresh_all, save_plan
from deltackpt.pool import in_order

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    Load: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_ADDRESSES = frozenset({"int64", "uint64"})
"""Dtypes, as torch names them, in which an engine may keep addresses."""
_NAMED = 12
"""Tensors that a refusal lists; the rest is counted."""


def make_plan(
    module: torch.nn.Module,
    load: Load,
    layout: Layout,
    *,
    setting: str = "",
    derived: Mapping[str, Refresh] | None = None,
    state: Sequence[str] = (),
    threads: int | None = None,
) -> ScatterPlan:
    """Find out where `load` puts the tensors of `layout` in `module`. The module is left as it was, bit for bit.

    load: runs the engine's whole way from checkpoint tensors, an iterable of (name, tensor), to a module that is ready,
    post-load processing included. It is called a few times (3 for 16-bit weights of up to 16 million elements, one more
    for each factor 4,096), with tensors that it may keep or change.
    derived: refresh calls by live tensor; each is proven here: it must give what the loader gave.
    state: patterns of names that are working memory, as `*.kv_cache*`; they are neither saved nor looked at.

    Needs host memory for a copy of the live tensors. Sampling must stand still meanwhile. Raises ConfigError with the
    list of what cannot be planned, cast or computed; Poisoned when the module could not be put back.
    """
    planes = Planes(layout)
    refreshes = dict(derived or {})
    before = Live(module, state=state)
    saved = {r.name: r.read().copy() for r in before.regions}
    seen: list[dict[str, bytes]] = []
    try:
        for plane in range(planes.passes):
            load(planes.tensors(plane))
            after = Live(module, state=state)
            if after.signature != before.signature:
                raise ConfigError(f"the loader leaves other tensors than it found: {_difference(before, after)}")
            seen.append(dict(in_order(partial(_pack, check=plane == planes.passes - 1), after.regions, threads)))
        if refreshes:
            _prove_refreshes(Live(module, state=state), refreshes)
    finally:
        _put_back(Live(module, state=state), before, saved, layout)
    return _Decoding(planes, before, saved, seen, tuple(sorted(refreshes))).plan(setting, tuple(state), threads)


def cached_plan(
    folder: str | Path,
    module: torch.nn.Module,
    load: Load,
    layout: Layout,
    *,
    setting: str,
    derived: Mapping[str, Refresh] | None = None,
    state: Sequence[str] = (),
    threads: int | None = None,
) -> ScatterPlan:
    """Return the plan kept in `folder` for this layout, module and setting, or make it and keep it there.

    setting: everything else that decides where weights land: engine, its version, ranks and sizes of all parallel
    groups, quantisation. Otherwise as `make_plan`. A plan from disk is checked: nothing in it can reach outside of
    the module's memory; whether it fits the weights is proven by whoever uses it.
    """
    signature = Live(module, state=state).signature
    key = sha256(json.dumps([LEVEL, layout.digest, signature, setting, sorted(derived or {}), list(state)]).encode())
    path = Path(folder) / f"{key}.plan"
    if path.exists():
        return load_plan(path, layout)
    plan = make_plan(module, load, layout, setting=setting, derived=derived, state=state, threads=threads)
    save_plan(plan, path)
    return plan


def _pack(region: Region, *, check: bool) -> tuple[str, bytes]:
    """Keep what a region shows. Digits repeat, so that little is left of them; the check plane is stored as it is."""
    return region.name, zlib.compress(memoryview(region.read()), 0 if check else 1)


def _put_back(live: Live, before: Live, saved: Mapping[str, U8], layout: Layout) -> None:
    if live.signature != before.signature:
        raise Poisoned(
            f"planning left other tensors in the module than it found ({_difference(before, live)}); "
            "load it again by the engine's own loader"
        )
    weights = {str(torch_dtype(dtype)).removeprefix("torch.") for dtype in layout.dtypes}
    left = []
    for region in live.regions:
        # An engine may keep the address of memory that torch does not know, as of weights that a library has packed.
        # Another one's address, written there, would be followed.
        address = all(v.dtype in _ADDRESSES - weights for v in region.views)
        if address and not np.array_equal(region.read(), saved[region.name]):
            left.append(region.name)
        else:
            region.write(saved[region.name])
    if left:
        raise Poisoned(
            f"planning changed {left[0]}, 64-bit integers as no tensor of the checkpoint has, and left them: they may "
            "be an address of weights that cannot be reached; load the weights again by the engine's own loader"
        )


def _difference(before: Live, after: Live) -> str:
    """Name a tensor in which two walks differ."""
    old, new = (
        {v.names[0]: (v.dtype, v.shape, v.stride, r.name) for r in x.regions for v in r.views} for x in (before, after)
    )
    for name in [*old, *new]:
        if old.get(name) != new.get(name):
            was, now = ("absent" if t is None else f"{t[0]}{list(t[1])}" for t in (old.get(name), new.get(name)))
            return f"{name} was {was}, is {now}"
    return "the same tensors overlap otherwise"


def _prove_refreshes(live: Live, refreshes: Mapping[str, Refresh]) -> None:
    """Raise ConfigError unless the calls give back, from nothing, what the loader gave."""
    places = {n: (r, v) for r in live.regions for v in r.views for n in v.names}
    if missing := [n for n in refreshes if n not in places]:
        raise ConfigError(f"{missing[0]} is to be refreshed, but no such tensor can be reached from the module")
    given = {}
    for name in refreshes:
        region, one = places[name]
        raw, mine = region.read().copy(), _bytes_of(one)
        given[name] = raw[mine]
        raw[mine] = ~raw[mine]
        region.write(raw)
    refresh_all(refreshes)
    for name in refreshes:
        region, one = places[name]
        if not np.array_equal(region.read()[_bytes_of(one)], given[name]):
            raise ConfigError(f"the refresh call for {name} does not give what the loader gives; correct it")


def _bytes_of(one: View) -> I64:
    """Return the bytes that a view takes up, as indices into its region."""
    width = one.width
    at = np.array([one.offset], np.int64)
    for extent, step in zip((*one.shape, width), (*(s * width for s in one.stride), 1), strict=True):
        if extent > 1:
            at = (at[:, None] + np.arange(extent) * step).reshape(-1)
    return at


@dataclass(frozen=True)
class _Piece:
    """What was found out about a region. bytes_*: how many; runs: of places; problems: by live tensor."""

    planned: int
    constant: int
    derived: int
    runs: tuple[tuple[int, Runs], ...]  # width, and runs in a row that is alone
    problems: tuple[str, ...]


class _Decoding:
    """Reads ids from what the loader left."""

    def __init__(
        self,
        planes: Planes,
        live: Live,
        saved: Mapping[str, U8],
        seen: Sequence[Mapping[str, bytes]],
        derived: tuple[str, ...],
    ) -> None:
        self.planes, self.regions, self.saved, self.seen, self.derived = planes, live.regions, saved, seen, derived
        self.signature = live.signature
        self.numbering = Numbering(planes.layout)

    def plan(self, setting: str, state: tuple[str, ...], threads: int | None) -> ScatterPlan:
        """Decode all regions. Raises ConfigError with what is left over."""
        layout = self.planes.layout
        pieces = list(in_order(self._decode, self.regions, threads))
        if problems := [p for piece in pieces for p in piece.problems]:
            more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
            raise ConfigError(
                f"{len(problems)} live tensors cannot be planned: {'; '.join(problems[:_NAMED])}{more}. "
                "Name a refresh call for each, or use the engine's own reload"
            )
        rows = tuple(
            Row(region.name, width, region.nbytes // width)
            for region, piece in zip(self.regions, pieces, strict=True)
            for width in sorted({w for w, _ in piece.runs})
        )  # fmt: skip
        live = Layout([r.name for r in rows], [UNSIGNED[r.width] for r in rows], [(r.count,) for r in rows])
        numbering = Numbering(live)
        runs = [
            found.moved(numbering, live.position[Row(region.name, width, 0).name])
            for region, piece in zip(self.regions, pieces, strict=True)
            for width, found in piece.runs
        ]
        maps = tuple(compress(Runs.join(runs)))
        owner = self.numbering.owner(maps[0].source)
        coverage = Coverage(
            sum(r.nbytes for r in self.regions),
            sum(p.planned for p in pieces),
            sum(p.constant for p in pieces),
            sum(p.derived for p in pieces),
            layout.total_bytes,
            int((maps[0].extent * layout.width[owner]).sum()),
        )
        return ScatterPlan(layout, self.signature, setting, state, self.derived, rows, maps, coverage)

    def _decode(self, region: Region) -> _Piece:
        shown = [np.frombuffer(zlib.decompress(s[region.name]), np.uint8) for s in self.seen]
        # What is the same whatever was loaded, the real weights included, depends on none of them.
        open_ = np.zeros(region.nbytes, np.uint8)
        for now in shown:
            open_ |= now != self.saved[region.name]
        runs = []
        for dtype in self._candidates(region):
            if not open_.any():
                break
            width = element_width(dtype)
            whole = slice(region.nbytes // width * width)
            elements = open_[whole].view(f"<u{width}")
            at = np.flatnonzero(elements)
            ids = self.planes.decode(dtype, [now[whole].view(elements.dtype)[at] for now in shown])
            at, ids = at[ids >= 0], ids[ids >= 0]
            if len(at):
                elements[at] = 0
                runs.append((width, self._runs(dtype, ids, at)))
        planned = sum(w * int(found.count.sum()) for w, found in runs)
        derived, problems = 0, list[str]()
        if open_.any():
            for one in region.views:
                mine = _bytes_of(one)
                if set(one.names) & set(self.derived):
                    derived += int(open_[mine].sum())
                    open_[mine] = 0
            problems = [self._problem(one, shown) for one in region.views if open_[_bytes_of(one)].any()]
            if not problems and open_.any():
                problems.append(f"{region.name}: bytes between its elements change")
        return _Piece(planned, region.nbytes - planned - derived, derived, tuple(runs), tuple(problems))

    def _candidates(self, region: Region) -> list[str]:
        """Dtypes whose ids a region may show: those of its tensors first, then wide ones before narrow ones."""
        own = [DTYPES.get(v.dtype) for v in region.views]
        known = sorted(self.planes.tensors_of, key=lambda d: (d not in own, -element_width(d), d))
        return [d for d in known if self.planes.elements(d)]

    def _runs(self, dtype: str, ids: I64, at: I64) -> Runs:
        """Return the runs of ids of a dtype, as elements of the layout."""
        tensors, first = self.planes.tensors_of[dtype], self.planes.first_of[dtype]
        found = runs_of(ids, at, first)
        tensor = tensors[found.tensor]
        elements = found.source - first[found.tensor] + self.numbering.of_tensor[tensor]
        return replace(found, source=elements, tensor=tensor)

    def _problem(self, one: View, shown: Sequence[U8]) -> str:
        """Name a live tensor that shows no ids, and say what was done to the weights."""
        what = f"{one.names[0]} ({one.dtype}{list(one.shape)})"
        if all(np.array_equal(now, shown[0]) for now in shown):
            return f"{what} changes with a load, but shows nothing of what was loaded"
        mine, own = _bytes_of(one), DTYPES.get(one.dtype)
        for dtype in self.planes.tensors_of:
            if own in (None, dtype) or not self.planes.elements(dtype):
                continue
            ids = self.planes.decode(dtype, [_converted(now[mine], own, dtype) for now in shown])
            if (ids >= 0).mean() > 0.5:
                tensor = int(self.planes.owner(dtype, ids[ids >= 0][:1])[0])
                return f"{what} is a cast of {self.planes.layout.names[tensor]} ({dtype})"
        return f"{what} is computed from the weights (arithmetic, requantisation)"


def _converted(raw: U8, dtype: str, to: str) -> Bits:
    """Return values of one dtype as bit patterns of another."""
    import torch

    tensor = torch.from_numpy(raw.copy()).view(torch_dtype(dtype)).to(torch_dtype(to))
    bits: Bits = tensor.view(torch.uint8).numpy().view(f"<u{element_width(to)}")
    return bits
