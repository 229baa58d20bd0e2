"""What a fleet says of itself in a store: channels (which version a group shall run) and leases (which one is in use).

A channel is a row of numbered records that are never overwritten or deleted; the newest counts. Making the next number
exclusively is the compare-and-swap that object stores do not have in one common form. A lease is overwritten by its
owner. No follower needs a lease to be right.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from deltackpt.digest import sha256
from deltackpt.errors import AlreadyExists, ConfigError, NotFound, StoreError, Unavailable
from deltackpt.manifest import LEVEL, MAX_MANIFEST, Version, decode, encode, manifest_key, require_level
from deltackpt.store import Store, read

_ATTEMPTS = 6
_RACES = 100
"""Lost races after which setting a channel is given up: somebody sets it in a loop."""
_NAME = re.compile(r"[A-Za-z0-9._+=@-]{1,200}")

NONE = "none"
"""What `expect` says of a channel that does not exist yet."""


# ---------------------------------------------------------------- channels


class ChannelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of a channel, under `channels/<name>/<20 digits>.json`; never overwritten or deleted."""

    format: int
    version: Version
    created: float
    nonce: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    note: str = ""


@dataclass(frozen=True)
class Channel:
    """A channel as last set. number: how often it was set before."""

    name: str
    number: int
    record: ChannelRecord

    @property
    def version(self) -> int:
        """The version that followers of the channel shall run."""
        return self.record.version


def channel_key(name: str, number: int) -> str:
    """Key of one setting of a channel."""
    return f"channels/{name}/{number:020d}.json"


def require_name(name: str, what: str) -> None:
    """Raise ConfigError unless `name` can be a part of a key."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(f"{what} {name!r}: expected 1 to 200 letters, digits and . _ + = @ -")


def _setting(store: Store, name: str, number: int) -> Channel | None:
    key = channel_key(name, number)
    try:
        raw = read(store, key, limit=MAX_MANIFEST)
    except NotFound:
        return None
    require_level(raw, key)
    return Channel(name, number, decode(raw, ChannelRecord, key))


def read_channel(store: Store, name: str) -> Channel | None:
    """Return a channel as last set, None if it never was."""
    require_name(name, "channel")
    numbers = _numbers(store, f"channels/{name}/")
    if not numbers:
        return None
    found = _setting(store, name, max(numbers))
    return found and (newer_setting(store, name, after=found.number) or found)


def newer_setting(store: Store, name: str, *, after: int) -> Channel | None:
    """Return the newest setting past number `after` (-1: past none). One request, no listing, where there is none."""
    found = None
    while newer := _setting(store, name, after + 1):
        found, after = newer, newer.number
    return found


def _numbers(store: Store, prefix: str) -> list[int]:
    names = [key[len(prefix) : -5] for key in store.keys(prefix) if key.endswith(".json")]
    return [int(n) for n in names if n.isascii() and n.isdigit() and len(n) == 20]


def channels(store: Store) -> list[Channel]:
    """Return all channels of a store by name; their versions must stay reachable."""
    names = {key.split("/")[1] for key in store.keys("channels/") if key.count("/") == 2}
    found = (read_channel(store, name) for name in sorted(names) if _NAME.fullmatch(name))
    return [channel for channel in found if channel is not None]


def set_channel(
    store: Store,
    name: str,
    version: int,
    *,
    expect: int | str | None = None,
    note: str = "",
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Channel:
    """Set a channel to a version of the store. Setting what it names already writes nothing.

    expect: the version that it must name before, or NONE. Raises AlreadyExists if it names another one; ConfigError
    for a version that the store does not have; Unavailable when the outcome is unknown: set it again.
    """
    require_name(name, "channel")
    try:
        store.size(manifest_key(version))
    except NotFound as exc:
        raise ConfigError(f"version {version} is not in {store.url}; deltackpt log shows those that are") from exc
    record = ChannelRecord(format=LEVEL, version=version, created=now(), nonce=secrets.token_hex(16), note=note)
    held = read_channel(store, name)
    for _ in range(_RACES):
        _require_expected(name, held, expect)
        if held is not None and (held.version, held.record.note) == (version, note):
            return held
        made = Channel(name, 0 if held is None else held.number + 1, record)
        if _create(store, made, sleep):
            return made
        held = read_channel(store, name)
    raise Unavailable(f"channel {name} of {store.url} is set by others all the time; set it again, or stop them")


def _require_expected(name: str, held: Channel | None, expect: int | str | None) -> None:
    found = NONE if held is None else held.version
    if expect is not None and expect != found:
        raise AlreadyExists(
            f"channel {name} names {_words(found)}, {_words(expect)} was expected; "
            "look at it with deltackpt channel get"
        )


def _words(version: int | str) -> str:
    return "no version" if version == NONE else f"version {version}"


def _create(store: Store, made: Channel, sleep: Callable[[float], None]) -> bool:
    """Put a setting; False if another one has its number. A lost answer is asked for again with the same bytes."""
    key = channel_key(made.name, made.number)
    for attempt in range(_ATTEMPTS):
        try:
            store.put(key, [encode(made.record)])
            return True
        except AlreadyExists:
            there = _setting(store, made.name, made.number)
            return there is not None and there.record.nonce == made.record.nonce
        except Unavailable:
            if attempt == _ATTEMPTS - 1:
                raise
            sleep(min(2.0, 0.05 * 2**attempt))
    raise AssertionError


# ---------------------------------------------------------------- leases

LEASE_S = 900.0
"""How long a lease holds without being renewed: some missed renewals, but not a dead host for long."""
_RENEW_S = LEASE_S / 3
_CHANGE_S = 10.0
"""An error that comes and goes is not written more often."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What one follower uses, under `followers/<id>.json`. version: None before the first apply; staged: on its way in.

    Until `expires` (by the follower's clock, `duration_s` after `created`) what leads from `version`, or where that is
    None from an anchor to `staged`, to the newest version must stay.
    """

    format: int
    id: str
    store_id: str
    created: float
    expires: float
    duration_s: float
    version: Version | None = None
    staged: Version | None = None
    channel: str | None = None
    error: str | None = None
    mode: str = ""
    host: str = ""
    dest: str = ""
    software: str = ""

    def live(self, now: float) -> bool:
        """Say whether the lease still holds."""
        return now < self.expires


def lease_key(id: str) -> str:
    """Key of a follower's lease."""
    return f"followers/{id}.json"


def lease_id(dest: str) -> str:
    """Return the id of a follower by this host and the path that it keeps up to date."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:100] or "host"
    return f"{host}-{sha256(os.fsencode(os.path.realpath(dest)))[:12]}"


def put_lease(store: Store, lease: Lease) -> None:
    """Write or renew a lease."""
    store.put(lease_key(lease.id), [encode(lease)], if_absent=False)


def leases(store: Store, *, store_id: str | None = None) -> list[Lease]:
    """Return all leases by id, also those that have expired. store_id: only those on this store's versions.

    Raises FormatError naming one that cannot be read: what it needs is not known.
    """
    found = []
    for key in store.keys("followers/"):
        if not key.endswith(".json"):
            continue
        try:
            raw = read(store, key, limit=MAX_MANIFEST)
        except NotFound:
            continue  # removed since
        require_level(raw, key)
        lease = decode(raw, Lease, key)
        if store_id is None or lease.store_id == store_id:
            found.append(lease)
    return found


class Keeper:
    """Keeps the lease of one follower. What cannot be written is said once and tried again later.

    now: seconds, for the record and for when to renew. say: takes the one line that a failure is worth.
    """

    def __init__(self, store: Store, lease: Lease, *, now: Callable[[], float], say: Callable[[str], None]) -> None:
        self._store, self._now, self._say = store, now, say
        self._wanted = lease
        self._written: Lease | None = None
        self._tried: float | None = None
        self._said: str | None = None

    def update(self, *, version: int | None, staged: int | None, error: str | None) -> None:
        """Say what the follower uses now; written where that matters, or in time to stay alive."""
        if error is not None:
            error = error.encode("utf-8", "backslashreplace").decode()[:1000]
        self._wanted = msgspec.structs.replace(self._wanted, version=version, staged=staged, error=error)
        if self._due():
            self._write()

    def renew(self) -> None:
        """Write the lease again if it is time to."""
        if self._due():
            self._write()

    def _due(self) -> bool:
        wanted, written = self._wanted, self._written
        since = None if self._tried is None else self._now() - self._tried
        if since is None or since < 0:
            return True
        if written is None or self._said is not None:
            return since >= _CHANGE_S
        if wanted.version != written.version:
            return True
        changed = (wanted.error, wanted.staged) != (written.error, written.staged)
        return since >= (_CHANGE_S if changed else _RENEW_S)

    def _write(self) -> None:
        self._tried = now = self._now()
        lease = msgspec.structs.replace(self._wanted, created=now, expires=now + LEASE_S, duration_s=LEASE_S)
        try:
            put_lease(self._store, lease)
        except StoreError as exc:
            # Whatever a lease would protect can be had from an anchor: following goes on.
            if str(exc) != self._said:
                self._say(f"no lease in {self._store.url}: {exc}; prune may remove what this follower needs")
            self._said = str(exc)
        else:
            self._written, self._said = lease, None
