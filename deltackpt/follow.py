"""Followers: look for a newer version, stage it while the target is in use, apply it in a short moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deltackpt.cache import CACHE_NBYTES, Cached
from deltackpt.chain import Entry, Plan
from deltackpt.errors import ChainError, NotFound, Unavailable
from deltackpt.reader import Reader
from deltackpt.store import Store, open_store

POLL_S = 1.0
"""Seconds between two looks for a new version."""


def weight_version(entry: Entry) -> str:
    """Return the name under which engines and logs know the weights of a version, for ever."""
    return f"{entry.manifest.lineage}.{entry.manifest.version}.{entry.digest[:12]}"


class Staging(Protocol):
    """A version that is fetched, decoded and checked."""

    def apply(self) -> None:
        """Bring the target to the version."""

    def discard(self) -> None:
        """Forget it; the target is as before."""


class Target(Protocol):
    """What holds the weights of a follower. settled: all else that belongs to the version is there too."""

    settled: bool

    def open(self, reader: Reader, *, reseed: bool = False) -> int | None:
        """Return the version that the target is proven to hold; None: reseed."""

    def stage(self, reader: Reader, plan: Plan) -> Staging:
        """Fetch and check what the plan needs, touching nothing."""

    def close(self) -> None:
        """Release the target."""


@dataclass(frozen=True)
class Prepared:
    """A staged version. previous: what the target holds now; times: fetch_ms and process_ms together as stage_ms."""

    version: int
    previous: int | None
    plan: Plan
    staging: Staging
    times: dict[str, float]

    def apply(self) -> int:
        """Bring the target to the version in place; the only moment sampling must stand still.

        Returns the version. Raises IntegrityError when the target was left as it was, Poisoned when not.
        """
        began = time.perf_counter()
        self.staging.apply()
        self.times["apply_ms"] = (time.perf_counter() - began) * 1e3
        return self.version

    def discard(self) -> None:
        """Forget the version; the target is as before."""
        self.staging.discard()


class Follower:
    """Follows the store at `url` with one target. Not for use by several threads at once.

    cache: a folder that the followers of this host share, so that each object is fetched once; cache_nbytes: its bound.
    """

    def __init__(
        self,
        url: str | Store,
        target: Target,
        *,
        cache: str | None = None,
        cache_nbytes: int = CACHE_NBYTES,
        anchor_source: str | None = None,
        threads: int | None = None,
    ) -> None:
        self.target = target
        store = open_store(url)
        if cache is not None:
            store = Cached(store, cache, nbytes=cache_nbytes)
        self.reader = Reader(store, anchor_source=anchor_source, threads=threads)

    def close(self) -> None:
        """Release the target."""
        self.target.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(
        self, version: int | None = None, *, wait_s: float | None = None, reseed: bool = False
    ) -> Prepared | None:
        """Fetch, verify and decode `version`, or the newest one; weights are not touched.

        wait_s: how long to wait for something new; None: not at all. reseed: weights of no version may be replaced.
        Returns None when the target holds the version already. Raises ChainError when no chain leads to it; Unavailable
        when the store ends before what the target holds: a target goes back only when it is asked to.
        """
        deadline = time.monotonic() + (wait_s or 0.0)
        while True:
            if not self.reader.history:
                self.reader.load()
            elif version not in self.reader.history:
                # Else a manifest that cannot be read would keep from the versions before it.
                self.reader.refresh()
            if self.reader.head is None:
                if time.monotonic() >= deadline:
                    raise NotFound(f"{self.reader.store.url} has no version yet; publish one first")
            else:
                local = self.target.open(self.reader, reseed=reseed)
                want = self.reader.head.manifest.version if version is None else version
                self.reader.manifest(want)
                if version is None and local is not None and local > want:
                    raise Unavailable(
                        f"{self.reader.store.url} ends at version {want}, the target holds version {local}: the newest "
                        "manifests cannot be seen; try again, or name a version to go back to"
                    )
                if local != want or not self.target.settled:
                    return self._stage(want, local)
                if time.monotonic() >= deadline:
                    return None
            time.sleep(max(0.0, min(POLL_S / 10, deadline - time.monotonic())))

    def _stage(self, want: int, local: int | None) -> Prepared:
        """Stage along the cheapest way; data that turns out to be gone is planned around."""
        missing: frozenset[int] = frozenset()
        began = time.perf_counter()
        lost: NotFound | None = None
        tried: Plan | None = None
        while True:
            try:
                plan = self.reader.plan(want, local=local, missing=missing)
            except ChainError as exc:
                if lost is None:
                    raise
                # Which file it is helps more than that the chain has a hole.
                raise ChainError(f"{lost}; {exc}") from lost
            if lost is not None and plan == tried:
                raise lost
            tried = plan
            try:
                staging = self.target.stage(self.reader, plan)
            except NotFound as exc:
                # The next plan also leaves out an anchor that was pruned since.
                missing, lost = missing | self._gone(plan), exc
                continue
            times = {"stage_ms": (time.perf_counter() - began) * 1e3}
            return Prepared(want, local, plan, staging, times)

    def _gone(self, plan: Plan) -> frozenset[int]:
        """Return the versions of a plan whose shards are not all there."""
        gone = set()
        for step in plan.steps:
            for shard in self.reader.manifest(step.version).shards:
                try:
                    self.reader.store.size(shard.key)
                except NotFound:
                    gone.add(step.version)
        return frozenset(gone)

    def run(
        self,
        stop: threading.Event,
        *,
        pause: Callable[[int], None],
        resume: Callable[[int], None],
        poll_s: float = POLL_S,
    ) -> None:
        """Follow until `stop` is set: stage each newest version, call pause(version), apply, call resume(version).

        Unavailable while staging is waited out; every other error ends the loop and is raised, without a resume after
        an apply that failed: what the target holds then is for the caller to decide.
        """
        while not stop.is_set():
            try:
                prepared = self.prepare()
            except Unavailable:
                stop.wait(poll_s)
                continue
            if prepared is None:
                stop.wait(poll_s)
                continue
            pause(prepared.version)
            prepared.apply()
            resume(prepared.version)
