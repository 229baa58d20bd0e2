"""PlannedTarget: a live module, laid out by an engine, that is brought from version to version in place.

What is fetched is turned into changes of live memory while sampling goes on, and held against what is published: old
values are read, never written, so a wrong base shows before anything stands still. The pause is the flips alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from deltackpt.backend import Cpu, apply
from deltackpt.chain import Plan
from deltackpt.digest import U64, state_fingerprint
from deltackpt.errors import ChainError, ConfigError, IntegrityError, Poisoned
from deltackpt.folder import signed
from deltackpt.layout import I64
from deltackpt.live import Live
from deltackpt.plans import Refresh, ScatterPlan, refresh_all
from deltackpt.reader import Reader, compare_fingerprints, named
from deltackpt.tensors import collect, restore_into
from deltackpt.through import Flips, changes, flips_of, merged, read_through, write_through

if TYPE_CHECKING:
    import torch


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
        self._flips: Flips | None = None
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

    def _staged(self, reader: Reader, plan: Plan) -> Flips:
        scatter = self.target.plan
        published = np.zeros(len(scatter.layout.names), np.uint64)
        groups: dict[int, list[tuple[I64, U64]]] = {}
        with closing(reader.deltas([step.version for step in plan.steps])) as deltas:
            for step, delta in zip(plan.steps, deltas, strict=True):
                published += signed(delta, step)
                for group, found in changes(scatter, delta, reader.threads):
                    groups.setdefault(group, []).append(found)
        flips = flips_of(scatter, [merged(c) for _, c in sorted(groups.items())], self.target.addresses, self.threads)
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

    def _flip(self, flips: Flips) -> bool:
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
