"""PlannedTarget: a live module, laid out by an engine, that a follower brings from version to version in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from deltackpt.backend import Cpu
from deltackpt.chain import Plan
from deltackpt.digest import U64
from deltackpt.errors import ChainError, ConfigError, IntegrityError
from deltackpt.module import NEVER_PROVEN, PlannedModule, StagedChanges
from deltackpt.plans import Refresh, ScatterPlan
from deltackpt.reader import Reader
from deltackpt.tensors import restore_into
from deltackpt.walk import walk

if TYPE_CHECKING:
    import torch


class PlannedTarget:
    """A live module, through a plan, as the target of a follower. Weights are written only inside `Prepared.apply`.

    derived: the refresh calls for the plan's derived tensors; they run inside every apply, after the weights.

    The plan is believed only when it has been proven on real weights: either what it reads from the module is a version
    of the store (`open` looks), or `prove` was told what the engine has loaded. A rank that holds only parts of tensors
    needs `prove`, since published fingerprints are of whole tensors. Raises ConfigError where module and plan differ.
    """

    def __init__(
        self, module: torch.nn.Module, plan: ScatterPlan, *, derived: Mapping[str, Refresh] | None = None
    ) -> None:
        self.module, self.plan, self.settled = PlannedModule(module, plan, derived=derived), plan, True
        self._known: tuple[int, int] | None = None
        """A state fingerprint, and the version that it was applied or found as."""

    def recheck(self) -> None:
        """Believe nothing until the next `open`: for after sleep, wake, a reload, or anything else unknown."""
        self.module.recheck()

    def prove(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See PlannedModule."""
        self.module.prove(weights)

    def open(self, reader: Reader, *, reseed: bool = False) -> int | None:
        """Return the version that the module is proven to hold; None: it must be reseeded.

        Raises ConfigError for a store of another layout, and for a reseed through a plan that was never proven here;
        ChainError when the module holds no version of the store and no reseed was asked for.
        """
        head, module = reader.head, self.module
        if head is None:
            raise ConfigError(f"{reader.store.url} has no version yet; publish one first")
        if head.manifest.layout != self.plan.layout.digest:
            reader.layout(head.manifest.layout).require_same(self.plan.layout)
        module.threads = reader.threads
        try:
            version = self._version(reader, module.identify())
        except IntegrityError:
            if not reseed:
                raise
            version = None
        if version is not None:
            module.proven = True
            if not reseed:
                return version
        else:
            module.recheck()  # it may be loaded by its engine before the next try
        if not reseed and not module.poisoned:
            raise ChainError(
                f"the module, read through its plan, holds no version of {reader.store.url}: either it was loaded from "
                "other weights, or the engine's start-up load lays them out in another way than its reload; "
                "load a version of the store by the engine's loader, or ask for a reseed"
            )
        if not module.proven:
            raise ConfigError(NEVER_PROVEN)
        return None

    def _version(self, reader: Reader, state: int | None) -> int | None:
        if state is None:
            return None
        if self._known is None or self._known[0] != state:
            version = reader.identify(self.plan.layout.digest, state)
            self._known = None if version is None else (state, version)
        return None if self._known is None else self._known[1]

    def close(self) -> None:
        """Nothing to release: the module is the caller's."""

    def stage(self, reader: Reader, plan: Plan) -> StagedPlan:
        """Fetch, decode, check, and turn into new values for live memory; the module is not touched."""
        return StagedPlan(self, reader, plan)


class StagedPlan:
    """A version, ready for the one short apply.

    forecast_ms: see StagedChanges; of a reseed it is not known (None).
    """

    def __init__(self, target: PlannedTarget, reader: Reader, plan: Plan) -> None:
        self.target, self.version = target, plan.version
        manifest, layout, state = reader.manifest(plan.version), target.plan.layout, target.module.state
        if manifest.layout != layout.digest:
            raise ConfigError(f"version {plan.version} has another layout than the plan; make a new plan")
        self.state = int(manifest.state, 16)
        self.forecast_ms: float | None = None
        self._changes: StagedChanges | None = None
        self._weights: tuple[object, U64] | None = None
        if plan.anchor is None:
            assert state is not None
            self._before = target._known
            try:
                self._changes = target.module.stage(walk(reader, plan, state))
            except IntegrityError as exc:
                raise IntegrityError(f"version {plan.version}: {exc}") from exc
            self.forecast_ms = self._changes.forecast_ms
        else:
            memory = np.empty(layout.total_bytes, np.uint8)
            begin = np.uint64(memory.__array_interface__["data"][0])
            where = begin + (np.cumsum(layout.nbytes) - layout.nbytes).astype(np.uint64)
            restore_into(reader, plan.version, Cpu(reader.threads), where, plan)
            self._weights = (memory, where)

    def apply(self) -> None:
        """Write the module. After an error that leaves it between versions the target is Poisoned."""
        if self._changes is not None:
            self._changes.apply()
        elif self._weights is not None:
            self.target.module.reseed(self._weights[1])
        self.target._known = (self.state, self.version)

    def undo(self) -> None:
        """Go back to the version before an apply that has ended well, as when another rank of a group failed.

        Raises ConfigError after a reseed, which cannot be undone; Poisoned when the module is at neither version now.
        """
        if self._changes is None:
            raise ConfigError(f"version {self.version} was a reseed, which cannot be undone")
        self._changes.undo()
        self.target._known = self._before

    def discard(self) -> None:
        """Forget what was staged; nothing was written."""
        self._changes, self._weights = None, None
