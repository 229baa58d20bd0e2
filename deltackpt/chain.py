"""Chains of versions: what a valid history is, and the cheapest way from one version to another. Pure.

Every version but a `full` one is tied to one other version by a delta (or by nothing at all: `empty`, `rewind`).
XOR undoes itself, so each tie can be walked both ways, and a plan is a shortest path.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from deltackpt.errors import ChainError, FormatError
from deltackpt.manifest import Manifest


@dataclass(frozen=True)
class Entry:
    """A manifest and the digest that the next one must name."""

    manifest: Manifest
    digest: str


History = dict[int, Entry]
"""Consecutive versions by number."""


def check_link(before: Entry, after: Entry) -> None:
    """Raise ChainError or FormatError unless `after` may follow `before`."""
    old, new = before.manifest, after.manifest
    what = f"version {new.version}"
    if new.prev != before.digest:
        raise ChainError(
            f"{what} follows a manifest {new.prev[:12]}, version {old.version} has {before.digest[:12]}: "
            "the stream was forked or edited; do not use it"
        )
    if new.store_id != old.store_id:
        raise FormatError(f"{what} belongs to store {new.store_id}, expected {old.store_id}")
    if new.epoch < old.epoch:
        raise FormatError(f"{what} has epoch {new.epoch}, version {old.version} already had {old.epoch}")
    if new.kind != "full" and (new.lineage, new.layout) != (old.lineage, old.layout):
        raise FormatError(f"{what} changes lineage or layout without being a full version")


@dataclass(frozen=True)
class Step:
    """One delta to apply; undo: it is walked from its version to the one before."""

    version: int
    undo: bool

    @property
    def back(self) -> Step:
        """The same delta, walked the other way."""
        return Step(self.version, not self.undo)


@dataclass(frozen=True)
class Plan:
    """How to reach `version`: start from what the target holds (anchor None) or from an anchor, then the steps."""

    version: int
    anchor: int | None
    steps: tuple[Step, ...]
    nbytes: int


def _neighbours(history: Mapping[int, Entry], missing: Set[int]) -> dict[int, list[tuple[int, int, Step | None]]]:
    """Ties of each version: (other version, bytes to fetch, delta to apply)."""
    ties: dict[int, list[tuple[int, int, Step | None]]] = {v: [] for v in history}
    for version, entry in history.items():
        manifest = entry.manifest
        base = manifest.base
        if base is None or base not in history:
            continue
        if manifest.kind == "delta":
            if version not in missing:
                stored = manifest.totals.stored
                ties[base].append((version, stored, Step(version, undo=False)))
                ties[version].append((base, stored, Step(version, undo=True)))
        else:
            ties[base].append((version, 0, None))
            ties[version].append((base, 0, None))
    return ties


def plan(
    history: Mapping[int, Entry],
    want: int,
    *,
    local: int | None,
    anchors: Mapping[int, int],
    missing: Set[int] = frozenset(),
) -> Plan:
    """Return the way to `want` that fetches the fewest bytes.

    local: version that the target holds, None to reseed. anchors: bytes of each anchor by version.
    missing: versions whose delta is gone. Raises ChainError that names what is missing.
    """
    if want not in history:
        raise ChainError(f"version {want} is not in the store, which ends at {max(history, default='nothing')}")
    ties = _neighbours(history, missing)
    # Of equal cost: no reseed, then fewer ties, then the one found first; what follows is never compared.
    queue: list[tuple[int, bool, int, int, int, int | None, tuple[Step, ...]]] = []
    found = itertools.count()
    if local is not None and local in history:
        queue.append((0, False, 0, next(found), local, None, ()))
    queue.extend((nbytes, True, 0, next(found), v, v, ()) for v, nbytes in sorted(anchors.items()) if v in history)
    heapq.heapify(queue)
    done: set[int] = set()
    while queue:
        cost, reseeds, hops, _, version, anchor, steps = heapq.heappop(queue)
        if version == want:
            return Plan(want, anchor, steps, cost)
        if version in done:
            continue
        done.add(version)
        for other, nbytes, step in ties[version]:
            if other not in done:
                longer = steps if step is None else (*steps, step)
                heapq.heappush(queue, (cost + nbytes, reseeds, hops + 1, next(found), other, anchor, longer))
    raise ChainError(_no_way(want, local, anchors, missing))


def _no_way(want: int, local: int | None, anchors: Mapping[int, int], missing: Set[int]) -> str:
    start = "nothing" if local is None else f"version {local}"
    gone = ", ".join(map(str, sorted(missing))) or "none"
    return (
        f"no way from {start} to version {want}: deltas missing from the store: {gone}; "
        f"anchors: {', '.join(map(str, sorted(anchors))) or 'none'}; restore the missing data or make an anchor"
    )


def newest_with_state(history: Mapping[int, Entry], layout: str, state: str) -> int | None:
    """Return the newest version with this layout digest and state fingerprint."""
    for version in sorted(history, reverse=True):
        manifest = history[version].manifest
        if (manifest.layout, manifest.state) == (layout, state):
            return version
    return None


def since_anchor(history: Mapping[int, Entry], anchors: Set[int], head: int) -> Iterator[Manifest]:
    """Yield the versions from `head` back to the first one that has an anchor, that one not included."""
    version: int | None = head
    while version is not None and version not in anchors and version in history:
        manifest = history[version].manifest
        yield manifest
        version = manifest.base
