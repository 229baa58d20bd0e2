"""PlannedModule: a live module, laid out by an engine, whose weights are changed in place through a plan.

Changes are turned into values for live memory while sampling goes on, and held against what is published: old values
are read, never written, so a wrong base shows before anything stands still. The pause is the exchange alone. Runs
inside of engines, and knows no store: torch and numpy are all it needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deltackpt.changes import Changes
from deltackpt.digest import U64, state_fingerprint
from deltackpt.errors import ConfigError, IntegrityError, Poisoned
from deltackpt.ids import torch_dtype
from deltackpt.layout import Layout
from deltackpt.live import Live
from deltackpt.memory import Exchange
from deltackpt.plans import Refresh, ScatterPlan, refresh_all
from deltackpt.pool import fingerprints
from deltackpt.through import Image, Located, look, read_through, write_through

if TYPE_CHECKING:
    import torch

NEVER_PROVEN = (
    "a reseed would write through a plan that was never proven on this module; load a version of the store "
    "by the engine's loader, or call prove() with the weights that it has loaded"
)


class PlannedModule:
    """A live module and its plan. state: fingerprint of the weights that it holds, as far as it is known.

    derived: the refresh calls for the plan's derived tensors; they run after every change. proven: what the plan reads
    has been seen to be real weights; before that nothing is written. poisoned: weights may be a mix of two versions.
    Raises ConfigError where module and plan differ.
    """

    def __init__(
        self, module: torch.nn.Module, plan: ScatterPlan, *, derived: Mapping[str, Refresh] | None = None
    ) -> None:
        self.module, self.plan = module, plan
        self.threads: int | None = None
        self.state: int | None = None
        self.proven = self.poisoned = False
        self._refreshes = dict(derived or {})
        if missing := sorted(set(plan.derived) ^ set(self._refreshes)):
            raise ConfigError(f"{missing[0]}: the plan has derived {list(plan.derived)}; pass a refresh call for each")
        self._told: tuple[U64, int] | None = None
        """Of a rank with parts of tensors: what is here adds up to these fingerprints when the whole has this state."""
        self._bind()

    def _bind(self) -> None:
        self._live = Live(self.module, state=self.plan.state)
        if self._live.signature != self.plan.signature:
            raise ConfigError(
                "the module's tensors are not those that the plan was made for; if it was reloaded or put to sleep, "
                "load it as before, or make a new plan"
            )
        self._located = Located(self.plan, self._live.regions)

    def _image(self) -> Image:
        return Image(self.plan, self._live.regions)

    def recheck(self) -> None:
        """Believe nothing until the next `identify`: for after sleep, wake, a reload, or anything else unknown."""
        self.state = None

    def unmoved(self) -> bool:
        """Say whether the module still has the tensors that were looked up."""
        return self._live.unmoved()

    def identify(self) -> int | None:
        """Return the state fingerprint of the weights, read anew unless it is known; None: they may be a mix.

        Raises ConfigError for a rank with parts of tensors that was never told what was loaded (`prove`).
        """
        if not self.unmoved():
            self._bind()
            self.state = None
        if self.state is not None or self.poisoned:
            return self.state
        plan, layout = self.plan, self.plan.layout
        whole = bool(plan.whole.all())
        if not whole and self._told is None:
            t = int(np.flatnonzero(~plan.whole)[0])
            raise ConfigError(
                f"{plan.landed[t]} of {layout.count[t]} elements of {layout.names[t]} are in this module, "
                "and what is published is about whole tensors; call prove() with the weights that the engine has loaded"
            )
        table = read_through(plan, self._image(), threads=self.threads)
        if whole:
            self.state = state_fingerprint(layout.weights, table)
        elif self._told is not None and np.array_equal(table, self._told[0]):
            self.state = self._told[1]
        if self.state is not None:
            self._told = table, self.state
        return self.state

    def prove(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hold all that the plan reads from the module against the weights that the engine has loaded.

        weights: the whole checkpoint, named tensors of the plan's layout. Raises IntegrityError naming what differs:
        then the engine's start-up load lays weights out in another way than the load that the plan was made with.
        """
        self._bind()
        held = hold(self.plan.layout, weights)
        self._take(held.addresses)

    def reseed(self, where: U64) -> None:
        """Overwrite all that is planned with contiguous tensors, given by address, and prove the result.

        Raises ConfigError for a module that was never proven, Poisoned where the result is another.
        """
        if not self.proven:
            raise ConfigError(NEVER_PROVEN)
        self._bind()
        self.state, self.poisoned = None, True
        write_through(self.plan, self._image(), where, threads=self.threads)
        try:
            self._take(where)
        except IntegrityError as exc:
            raise Poisoned(f"a reseed did not take: {exc}") from exc
        self._refresh()

    def _take(self, where: U64) -> None:
        """Take the tensors at `where` for what the module holds, if it does."""
        layout = self.plan.layout
        table = read_through(self.plan, self._image(), against=where, threads=self.threads)
        self.state = state_fingerprint(layout.weights, fingerprints(layout, where, threads=self.threads))
        self._told, self.proven, self.poisoned = (table, self.state), True, False

    def stage(self, changes: Changes) -> StagedChanges:
        """Turn changes into new values for live memory, and hold them against what is published. Nothing is written.

        The base of changes is a published state: a module that has it is proven. Raises IntegrityError.
        """
        plan = self.plan
        if changes.layout != plan.layout.digest:
            raise ConfigError(f"the changes are for layout {changes.layout[:12]}, not the plan's; make a new plan")
        if self.identify() is None or self.state != changes.base:
            raise IntegrityError("the module does not hold what the changes begin with; reseed")
        self.proven = True
        exchange, added = look(self._located, changes, self.threads)
        wrong = np.flatnonzero(plan.whole & (added != changes.added))
        if wrong.size:
            self.recheck()
            more = f" and {wrong.size - 1} more" if wrong.size > 1 else ""
            raise IntegrityError(
                f"{plan.layout.names[wrong[0]]}{more} would not change as published; nothing was written; reseed"
            )
        return StagedChanges(self, changes, exchange, added)

    def _change(self, exchange: Exchange, added: U64, state: int) -> bool:
        """Change the weights to those of another state; False: they are not what was staged, and were left so."""
        assert self._told is not None
        self.state, self.poisoned = None, True
        if not exchange.run():
            self.poisoned = False
            return False
        self._told = self._told[0] + added, state
        self._refresh()
        self.state = state
        return True

    def _refresh(self) -> None:
        self.poisoned = True
        try:
            refresh_all(self._refreshes)
        except Exception as exc:
            self.state = None
            raise Poisoned(f"the weights are there, but a refresh call failed ({exc}); prepare again") from exc
        self.poisoned = False


class StagedChanges:
    """Changes that are ready for the one short apply.

    forecast_ms: how long reading all places once more took, which is about what the apply will take.
    """

    def __init__(self, module: PlannedModule, changes: Changes, exchange: Exchange, added: U64) -> None:
        self._module, self._exchange, self._added = module, exchange, added
        self.base, self.state = changes.base, changes.state
        began = time.perf_counter()
        same = exchange.unchanged()
        self.forecast_ms = (time.perf_counter() - began) * 1e3
        if not same:
            module.recheck()
            raise IntegrityError("the module is written to while a version is staged; nothing was written; reseed")

    def apply(self) -> None:
        """Write the module. After an error that leaves it between versions it is poisoned."""
        module = self._module
        if module.poisoned:
            raise Poisoned("an earlier apply did not finish; prepare again to reseed")
        if module.state != self.base or not module.unmoved():
            module.recheck()
            raise IntegrityError("the module was changed or moved since this version was staged; prepare again")
        if not module._change(self._exchange, self._added, self.state):
            raise IntegrityError("the module's weights are not what was staged, all was undone; reseed")

    def undo(self) -> None:
        """Go back to what was there before an apply that has ended well, as when another rank of a group failed.

        Raises ConfigError unless that apply was the last; Poisoned when the module is at neither version now.
        """
        module = self._module
        if module.poisoned or module.state != self.state or not module.unmoved():
            raise ConfigError("this version was not applied last; it cannot be undone")
        if not module._change(self._exchange.undone, -self._added, self.base):
            module.poisoned = True
            raise Poisoned("the version before did not come back; prepare again to reseed")


@dataclass(frozen=True)
class Held:
    """Contiguous tensors of a layout, in its order. addresses: of each, valid as long as this is held."""

    tensors: tuple[torch.Tensor, ...]
    addresses: U64


def hold(layout: Layout, weights: Iterable[tuple[str, torch.Tensor]]) -> Held:
    """Hold named tensors in host memory; they must be those of a layout. Raises ConfigError by name."""
    found = dict(weights)
    tensors = []
    for name, dtype, nbytes in zip(layout.names, layout.dtypes, layout.nbytes.tolist(), strict=True):
        tensor = found.pop(name, None)
        if tensor is None:
            raise ConfigError(f"tensor {name} is missing from the weights; give the whole checkpoint")
        if tensor.dtype != torch_dtype(dtype) or tensor.nbytes != nbytes:
            raise ConfigError(f"tensor {name} is {tensor.dtype} of {tensor.nbytes} bytes, not {dtype} of {nbytes}")
        tensors.append(tensor.cpu().contiguous())
    if found:
        raise ConfigError(f"tensor {next(iter(found))} is not in the layout of the plan; make a new plan")
    return Held(tuple(tensors), np.array([t.data_ptr() for t in tensors], np.uint64))
