"""What a store can do, found out by trying: exclusive creates above all, which commit a version.

Several servers that speak S3 answer 200 to a conditional write and overwrite. So before its first exclusive create on
a store every host tries, alone and in a race, and remembers a good answer for a week.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from deltackpt.codec import Bytes
from deltackpt.errors import AlreadyExists, ConfigError, DeltaError, IntegrityError, StoreError

_log = logging.getLogger(__name__)

KEPT_S = 7 * 86400.0
RACERS, ROUNDS = 4, 4
SKEW_S = 300.0
"""A clock that differs by more is wrong; S3 refuses requests at 900."""


class Probed(Protocol):
    """What is tried of a store."""

    url: str

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None: ...
    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None: ...
    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]: ...
    def delete(self, key: str) -> None: ...
    def modified(self, key: str) -> float: ...


class Found(msgspec.Struct, frozen=True):
    """What a store can do.

    exclusive: a second create is refused; race: also one at the same moment. ranges: parts of objects are read as
    asked for. listed: a new object is listed at once. deletes: objects can be removed. skew_s: the store's clock minus
    ours. tier: 1 is all of it; 2 has exclusive creates, but not all else; 3 has none, and needs a single writer.
    """

    url: str
    exclusive: bool
    race: bool
    ranges: bool
    listed: bool
    deletes: bool
    skew_s: float
    when: float

    @property
    def tier(self) -> int:
        if not (self.exclusive and self.race):
            return 3
        return 1 if self.ranges and self.listed and self.deletes and abs(self.skew_s) < SKEW_S else 2


def probe(store: Probed, *, now: Callable[[], float] = time.time) -> Found:
    """Try a store, by some 40 small requests under `probe/`, all removed again. Raises what the first write raises."""
    folder = f"probe/{secrets.token_hex(8)}"
    key = f"{folder}/first"
    made = [key]
    try:
        began = now()
        store.put(key, [b"first"])
        skew = store.modified(key) - (began + now()) / 2
        ranges = _reads(store, key)
        alone = _refuses(store, key) and _holds(store, key, b"first")
        listed = list(store.keys(f"{folder}/")) == [key]
        names = [f"{folder}/race-{n}" for n in range(ROUNDS)] if alone else []
        made += names
        race = alone and all(_race(store, name) for name in names)
    finally:
        deletes = True
        for one in made:
            try:
                store.delete(one)
            except DeltaError:
                deletes = False
    # A store may tell whole seconds, so that up to one of them says nothing.
    skew = 0.0 if abs(skew) < 2 else round(skew, 1)
    return Found(store.url, alone, race, ranges, listed, deletes, skew, now())


def _refuses(store: Probed, key: str) -> bool:
    try:
        store.put(key, [b"second"])
    except AlreadyExists:
        return True
    return False


def _holds(store: Probed, key: str, data: bytes) -> bool:
    found = bytearray(len(data))
    try:
        store.read_into(key, memoryview(found))
    except IntegrityError:
        return False
    return bytes(found) == data


def _reads(store: Probed, key: str) -> bool:
    found = bytearray(3)
    try:
        store.read_into(key, memoryview(found), offset=1)
    except (StoreError, IntegrityError):
        return False
    return bytes(found) == b"irs"


def _race(store: Probed, key: str) -> bool:
    """Create one key by several threads at the same moment: one wins, and its bytes stay."""
    won: list[bytes] = []
    failed: list[DeltaError] = []
    barrier = threading.Barrier(RACERS)

    def run(number: int) -> None:
        mine = f"racer {number}".encode()
        barrier.wait()
        try:
            store.put(key, [mine])
        except AlreadyExists:
            return
        except DeltaError as exc:
            failed.append(exc)
            return
        won.append(mine)

    threads = [threading.Thread(target=run, args=(n,), name="deltackpt-probe") for n in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return len(won) == 1 and _holds(store, key, won[0])


# ---------------------------------------------------------------- what this host knows


def _record_path(place: str) -> str:
    name = hashlib.sha256(place.encode()).hexdigest()[:32]
    root = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(root, "deltackpt", "probes", f"{name}.json")


def remembered(place: str, *, now: Callable[[], float] = time.time) -> Found | None:
    """Return what this host found out about a place, an endpoint and bucket, within the last week."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        with open(_record_path(place), "rb") as file:
            found = msgspec.json.decode(file.read(), type=Found)
        if 0 <= now() - found.when < KEPT_S:
            return found
    return None


def remember(place: str, found: Found) -> None:
    """Keep what was found for others on this host. It is a saving only: where it cannot be kept, it is found again."""
    path = _record_path(place)
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(msgspec.json.encode(found))
        os.replace(temporary, path)


def exclusive(store: Probed, place: str, *, single_writer: bool = False) -> bool:
    """Say whether the store's exclusive create is one. Raises ConfigError if not, unless there is a single writer."""
    found = remembered(place)
    if found is None:
        found = probe(store)
        # A bad answer is not kept: the server may be another one tomorrow.
        if found.tier < 3:
            remember(place, found)
            if found.tier == 2:
                _log.warning("%s: %s", store.url, "; ".join(flaws(found)))
    if found.tier < 3:
        return True
    why = flaws(found)[0]
    if not single_writer:
        raise ConfigError(
            f"{store.url}: {why}, so two publishers could overwrite each other; use another server, or "
            "promise with --single-writer that there is one"
        )
    _log.warning(
        "%s: %s; by --single-writer there is no other writer, and nothing stops one", store.url, flaws(found)[0]
    )
    return False


def flaws(found: Found) -> list[str]:
    """Say in words what a store lacks, the worst first."""
    words = []
    if not found.exclusive:
        words.append("the server ignores conditional writes (a second create of a key overwrote the first)")
    elif not found.race:
        words.append("the server checks before it writes (of several creates at the same moment more than one won)")
    if not found.ranges:
        words.append("parts of objects are not read as asked for")
    if not found.listed:
        words.append("a new object is not listed at once")
    if not found.deletes:
        words.append("objects cannot be deleted")
    if abs(found.skew_s) >= SKEW_S:
        words.append(f"its clock is {found.skew_s:+.0f} s off ours")
    return words
