"""Channels and leases: records of a fleet in a store."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from faults import FaultStore

from deltackpt.errors import AlreadyExists, ConfigError, FormatError, StoreError, Unavailable, UnsupportedFormat
from deltackpt.lease import (
    NONE,
    Keeper,
    Lease,
    channel_key,
    channels,
    lease_id,
    lease_key,
    leases,
    newer_setting,
    put_lease,
    read_channel,
    set_channel,
)
from deltackpt.store import LocalStore, Store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store that shows versions 0 to 9; what they hold is of no matter here."""
    made = LocalStore(tmp_path / "store")
    for version in range(10):
        made.put(f"manifests/{version:020d}.json", [b"{}\n"])
    return made


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def no_sleep(_: float) -> None:
    pass


# ---------------------------------------------------------------- channels


def test_channel_names_the_version_it_was_set_to_last(store: LocalStore) -> None:
    assert read_channel(store, "rollout") is None
    for version in (3, 7, 2):
        set_channel(store, "rollout", version, now=lambda: 5.0, note="n")
    found = read_channel(store, "rollout")
    assert found is not None
    assert (found.version, found.number, found.record.created, found.record.note) == (2, 2, 5.0, "n")


def test_settings_are_numbered_records_that_stay(store: LocalStore) -> None:
    set_channel(store, "eval", 1, now=lambda: 12.5)
    first = Path(store.root, "channels", "eval", "00000000000000000000.json").read_bytes()
    record = msgspec.json.decode(first)
    assert record == {"format": 1, "version": 1, "created": 12.5, "nonce": record["nonce"], "note": ""}
    set_channel(store, "eval", 2)
    assert list(store.keys("channels/")) == [
        "channels/eval/00000000000000000000.json",
        "channels/eval/00000000000000000001.json",
    ]
    assert Path(store.root, "channels", "eval", "00000000000000000000.json").read_bytes() == first


def test_setting_what_a_channel_names_already_writes_nothing(store: LocalStore) -> None:
    set_channel(store, "eval", 4)
    set_channel(store, "eval", 4)
    assert list(store.keys("channels/")) == ["channels/eval/00000000000000000000.json"]


def test_expected_version_must_be_the_one_named(store: LocalStore) -> None:
    set_channel(store, "eval", 4, expect=NONE)
    set_channel(store, "eval", 5, expect=4)
    with pytest.raises(AlreadyExists, match=r"^channel eval names version 5, version 4 was expected; look at it with "):
        set_channel(store, "eval", 6, expect=4)
    with pytest.raises(AlreadyExists, match=r"^channel eval names version 5, no version was expected; "):
        set_channel(store, "eval", 6, expect=NONE)
    with pytest.raises(AlreadyExists, match=r"^channel new names no version, version 1 was expected; "):
        set_channel(store, "new", 2, expect=1)
    assert [(c.name, c.version) for c in channels(store)] == [("eval", 5)]


def test_version_that_the_store_lacks_is_refused(store: LocalStore) -> None:
    with pytest.raises(ConfigError, match=r"^version 10 is not in .*; deltackpt log shows those that are$"):
        set_channel(store, "eval", 10)
    assert list(store.keys("channels/")) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "x\n", "x" * 201])
def test_name_that_is_no_part_of_a_key_is_refused(store: LocalStore, name: str) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 200 letters"):
        set_channel(store, name, 1)


def test_one_of_many_setters_with_the_same_expectation_wins(store: LocalStore) -> None:
    set_channel(store, "eval", 0)
    won: list[int] = []
    start = threading.Barrier(8)

    def setter(version: int) -> None:
        start.wait()
        try:
            set_channel(store, "eval", version, expect=0)
            won.append(version)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=setter, args=(version,)) for version in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_channel(store, "eval")
    assert found is not None
    assert (won, found.number) == ([found.version], 1)


def test_setters_without_expectation_all_get_through(store: LocalStore) -> None:
    threads = [threading.Thread(target=set_channel, args=(store, "eval", version)) for version in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(store.keys("channels/eval/"))) == 8


@pytest.mark.parametrize("when", ["before", "after"])
def test_lost_answer_sets_the_channel_once(store: LocalStore, when: str) -> None:
    faulty = FaultStore(store, at=1, when="after" if when == "after" else "before", kinds=["put"])
    made = set_channel(faulty, "eval", 6, sleep=no_sleep)
    assert (made.number, made.version) == (0, 6)
    assert list(store.keys("channels/")) == ["channels/eval/00000000000000000000.json"]


def test_store_that_never_answers_is_unavailable_after_six_puts(store: LocalStore) -> None:
    class Silent(FaultStore):
        def put(self, key: str, parts: object, *, if_absent: bool = True) -> None:
            self.operations.append(f"put {key}")
            raise Unavailable("no answer")

    silent, pauses = Silent(store), list[float]()
    with pytest.raises(Unavailable, match=r"^no answer$"):
        set_channel(silent, "eval", 6, sleep=pauses.append)
    assert silent.operations.count("put channels/eval/00000000000000000000.json") == 6
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8]


def test_look_at_a_known_channel_is_one_request_and_no_listing(store: LocalStore) -> None:
    held = set_channel(store, "eval", 6)
    counted = FaultStore(store)
    assert newer_setting(counted, "eval", after=held.number) is None
    assert counted.operations == ["get channels/eval/00000000000000000001.json"]


def test_look_at_a_known_channel_finds_all_that_came_since(store: LocalStore) -> None:
    held = set_channel(store, "eval", 1)
    for version in (2, 3, 1):
        set_channel(store, "eval", version)
    found = newer_setting(store, "eval", after=held.number)
    assert found is not None
    assert (found.version, found.number) == (1, 3)


def test_setting_of_a_newer_format_and_a_broken_one_are_told_apart(store: LocalStore) -> None:
    store.put(channel_key("newer", 0), [b'{"format": 2}\n'])
    store.put(channel_key("broken", 0), [b'{"format": 1, "version": -1}\n'])
    with pytest.raises(UnsupportedFormat, match=r"^channels/newer/0{20}\.json: format level 2"):
        read_channel(store, "newer")
    with pytest.raises(FormatError, match=r"^channels/broken/0{20}\.json: .*version"):
        read_channel(store, "broken")


def test_names_that_are_no_number_are_not_settings(store: LocalStore) -> None:
    set_channel(store, "eval", 1)
    for name in ("eval/1.json", "eval/00000000000000000009.txt", "README"):
        store.put(f"channels/{name}", [b"x"])
    assert [(c.name, c.version, c.number) for c in channels(store)] == [("eval", 1, 0)]


# ---------------------------------------------------------------- leases

LEASE = Lease(format=1, id="host-1", store_id="s", created=0.0, expires=0.0, duration_s=900.0)


def read_lease(store: Store) -> Lease:
    (found,) = leases(store)
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeper(store: LocalStore, clock: Clock, said: list[str]) -> Keeper:
    return Keeper(store, LEASE, now=clock, say=said.append)


def test_lease_holds_for_fifteen_minutes_by_the_clock_of_its_follower(store: Store, keeper: Keeper) -> None:
    keeper.update(version=4, staged=None, error=None)
    found = read_lease(store)
    assert (found.version, found.created, found.expires, found.duration_s) == (4, 1000.0, 1900.0, 900.0)
    assert found.live(1899.9)
    assert not found.live(1900.0)


def test_lease_is_renewed_after_a_third_of_its_time(store: Store, keeper: Keeper, clock: Clock) -> None:
    keeper.update(version=4, staged=None, error=None)
    clock.seconds = 1299.0
    keeper.renew()
    assert read_lease(store).created == 1000.0
    clock.seconds = 1300.0
    keeper.renew()
    assert read_lease(store).created == 1300.0


def test_new_version_is_written_at_once_and_an_error_within_ten_seconds(
    store: Store, keeper: Keeper, clock: Clock
) -> None:
    keeper.update(version=4, staged=None, error=None)
    keeper.update(version=5, staged=None, error="e1")
    assert (read_lease(store).version, read_lease(store).error) == (5, "e1")
    keeper.update(version=5, staged=6, error="e2")
    assert (read_lease(store).staged, read_lease(store).error) == (None, "e1")
    clock.seconds += 10
    keeper.update(version=5, staged=6, error="e2")
    assert (read_lease(store).staged, read_lease(store).error) == (6, "e2")


def test_clock_that_is_set_back_does_not_stop_renewal(store: Store, keeper: Keeper, clock: Clock) -> None:
    keeper.update(version=4, staged=None, error=None)
    clock.seconds = 10.0
    keeper.renew()
    assert read_lease(store).created == 10.0


def test_lease_that_cannot_be_written_is_said_once_and_tried_again(
    store: LocalStore, clock: Clock, said: list[str]
) -> None:
    class ReadOnly(FaultStore):
        broken = True

        def put(self, key: str, parts: list[bytes], *, if_absent: bool = True) -> None:  # type: ignore[override]
            if self.broken:
                raise StoreError("writing followers: no permission")
            self.store.put(key, parts, if_absent=if_absent)

    limited = ReadOnly(store)
    keeper = Keeper(limited, LEASE, now=clock, say=said.append)
    for _ in range(5):
        keeper.update(version=4, staged=None, error=None)
        clock.seconds += 100
    assert said == [
        f"no lease in {store.url}: writing followers: no permission; prune may remove what this follower needs"
    ]
    limited.broken = False
    keeper.renew()
    assert read_lease(store).version == 4


def test_leases_on_other_stores_are_told_apart(store: LocalStore) -> None:
    put_lease(store, LEASE)
    put_lease(store, msgspec.structs.replace(LEASE, id="host-2", store_id="t"))
    assert [one.id for one in leases(store)] == ["host-1", "host-2"]
    assert [one.id for one in leases(store, store_id="t")] == ["host-2"]


def test_lease_that_cannot_be_read_is_no_absent_lease(store: LocalStore) -> None:
    store.put(lease_key("broken"), [b"{}\n"])
    with pytest.raises(UnsupportedFormat, match=r"^followers/broken\.json: format level 0"):
        leases(store)


def test_error_that_is_not_unicode_is_escaped(store: Store, keeper: Keeper) -> None:
    keeper.update(version=4, staged=None, error="a\udcff.safetensors")
    assert read_lease(store).error == "a\\udcff.safetensors"


def test_two_paths_to_one_folder_have_one_lease(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert lease_id(str(tmp_path / "a")) == lease_id(str(tmp_path / "link"))
    assert lease_id(str(tmp_path / "a")) != lease_id(str(tmp_path / "b"))
