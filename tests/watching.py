"""A watcher under a clock that tests move: nothing sleeps, chance has no say, what is told is kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltackpt.errors import NotFound
from deltackpt.store import Store
from deltackpt.watch import Event, Pace, Watcher


class Script(Pace):
    """A clock that moves by sleeping only. Each sleep runs the next act; with none left the watcher is stopped.

    An act may return False: it wants to be run again by the next sleep.
    """

    def __init__(self, *acts: Callable[[], object]) -> None:
        # Without super(): there is nothing to listen on.
        self.seconds, self.acts = 1000.0, list(acts)
        self.slept: list[float] = []
        self.watcher: Watcher | None = None

    def listen(self, fd: int) -> None:
        pass

    def ring(self) -> None:
        pass

    def close(self) -> None:
        pass

    def now(self) -> float:
        return self.seconds

    def date(self) -> float:
        return self.seconds

    def uniform(self, low: float, high: float) -> float:
        return high

    def wait(self, seconds: float) -> bool:
        self.slept.append(seconds)
        self.seconds += seconds
        if not seconds:
            return False
        if not self.acts:
            assert self.watcher is not None
            self.watcher.terminate()
        elif self.acts[0]() is not False:
            self.acts.pop(0)
        return False


class Told(list[Event]):
    """What a watcher told."""

    def lines(self, level: str) -> list[str]:
        """Messages of one level."""
        return [event.message for event in self if event.level == level]

    def names(self) -> list[str]:
        """Names of all events."""
        return [event.name for event in self]


def start(
    store: Path | str | Store, dest: Path, *acts: Callable[[], object], told: Told | None = None, **options: Any
) -> tuple[Watcher, Script]:
    """Make a watcher of `store` whose sleeps run `acts`, one each."""
    pace = Script(*acts)
    url = str(store) if isinstance(store, Path) else store
    watcher = Watcher(url, str(dest), pace=pace, say=Told().append if told is None else told.append, **options)
    pace.watcher = watcher
    return watcher, pace


def follow(
    store: Path | str | Store, dest: Path, *acts: Callable[[], object], **options: Any
) -> tuple[Watcher, Script]:
    """Let a watcher run until the acts are played; returns it ended."""
    watcher, pace = start(store, dest, *acts, **options)
    watcher.run()
    return watcher, pace


class Hiding:
    """A store some of whose keys are not to be seen, as on a network filesystem that lags."""

    def __init__(self, store: Store, hidden: list[str]) -> None:
        self.store, self.url, self.hidden = store, store.url, hidden

    def _look(self, key: str) -> None:
        if any(part in key for part in self.hidden):
            raise NotFound(f"{key} is not in {self.url}")

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        self._look(key)
        self.store.read_into(key, out, offset=offset)

    def get(self, key: str, out: memoryview) -> int:
        self._look(key)
        return self.store.get(key, out)

    def size(self, key: str) -> int:
        self._look(key)
        return self.store.size(key)

    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
        return (k for k in self.store.keys(prefix, after=after) if not any(part in k for part in self.hidden))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def without_data(store: Path, version: int) -> Callable[[], None]:
    """Take the data of a version away; returns what brings it back."""
    (folder,) = (store / "data").glob(f"{version:020d}-*")
    away = store.parent / f"away-{folder.name}"
    shutil.move(folder, away)

    def back() -> None:
        shutil.move(away, folder)

    return back


def flip_data(store: Path, version: int) -> None:
    """Change one byte of a version's first shard, or change it back."""
    shard = min((store / "data").glob(f"{version:020d}-*/*"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    os.chmod(shard, 0o644)
    shard.write_bytes(raw)
