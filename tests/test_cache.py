"""The host cache: each object is fetched once, right or not at all, within a bound, whoever dies."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from faults import FaultStore
from helpers import REPOSITORY, cli_good, cli_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltackpt.cache import STALLED_S, Cached
from deltackpt.errors import IntegrityError, NotFound, StoreError
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.manifest import immutable
from deltackpt.mirror import mirror_store
from deltackpt.publish import Publisher
from deltackpt.reader import Reader
from deltackpt.store import LocalStore, Store

TRAILER = 16


def objects(root: Path) -> dict[str, bytes]:
    """All objects of a store that a cache may hold, by other means than the package's."""
    found = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and ".tmp" not in p.parts}
    return {k: v for k, v in sorted(found.items()) if immutable(k) and not k.endswith("/anchor.json")}


def get(store: Store, key: str, nbytes: int, *, offset: int = 0) -> bytes:
    out = bytearray(nbytes)
    store.read_into(key, memoryview(out), offset=offset)
    return bytes(out)


def entries(cache: Path) -> list[Path]:
    return sorted(p for p in cache.iterdir() if p.name != "lock")


def total(cache: Path) -> int:
    return sum(p.stat().st_size for p in cache.iterdir())


def reads(store: FaultStore) -> Counter[str]:
    """How often each object that a cache may hold was read from the store itself."""
    keys = [o.split()[1] for o in store.operations if o.startswith("read_into ")]
    return Counter(k for k in keys if immutable(k) and not k.endswith("/anchor.json"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the store of all tests is made by the first of them, which has a state folder of its own by then."""
    return tmp_path_factory.mktemp("built") / "store"


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """A store with a full version, six deltas of some hundred bytes each, and an anchor made later."""
    if not built.exists():
        weights = {"a": np.zeros(40_000, np.int16), "b": np.zeros((3, 500), np.float32)}
        with contextlib.closing(Publisher(str(built), run_id="r")) as publisher:
            for version in range(7):
                weights["a"][version::97] += version
                publisher.publish(weights, step=version)
        assert cli_good("anchor", built)["version"] == 6
    shutil.copytree(built, tmp_path / "store")
    return tmp_path / "store"


class Clock:
    """Time that passes only in sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1.0)


class TestOnce:
    def test_each_object_is_fetched_once_and_read_right(self, root: Path, tmp_path: Path) -> None:
        counted = FaultStore(LocalStore(root))
        for _ in range(3):
            store = Cached(counted, tmp_path / "cache")
            for key, content in objects(root).items():
                assert store.size(key) == len(content)
                assert get(store, key, len(content)) == content
                assert get(store, key, 3, offset=len(content) // 2) == content[len(content) // 2 :][:3]
        assert set(reads(counted)) == set(objects(root))
        assert set(reads(counted).values()) == {1}
        assert len(entries(tmp_path / "cache")) == len(objects(root))

    def test_second_follower_of_a_host_fetches_nothing(self, root: Path, tmp_path: Path) -> None:
        counted = FaultStore(LocalStore(root))
        found = set()
        for version in (2, 6):
            for number in range(3):
                target = CheckpointTarget(str(tmp_path / f"dest{number}"))
                with Follower(counted, target, cache=str(tmp_path / "cache")) as follower:
                    prepared = follower.prepare(version)
                    assert prepared is not None
                    assert prepared.apply() == version
                found.add((version, (tmp_path / f"dest{number}" / "model.safetensors").read_bytes()))
        assert set(reads(counted).values()) == {1}
        assert len(found) == 2

    def test_manifests_and_channels_are_never_kept(self, root: Path, tmp_path: Path) -> None:
        counted = FaultStore(LocalStore(root))
        store = Cached(counted, tmp_path / "cache")
        for key in ("store.json", "manifests/00000000000000000003.json", "anchors/00000000000000000006.json"):
            content = (root / key).read_bytes()
            assert get(store, key, len(content)) == content
            assert get(store, key, len(content)) == content
            assert counted.operations.count(f"read_into {key}") == 2
        assert not (tmp_path / "cache").exists()
        with pytest.raises(NotFound):
            store.size("manifests/00000000000000000007.json")

    def test_new_version_is_seen_at_once(self, root: Path, tmp_path: Path) -> None:
        reader = Reader(Cached(LocalStore(root), tmp_path / "cache"))
        reader.load()
        with contextlib.closing(Publisher(str(root), run_id="r")) as publisher:
            publisher.publish({"a": np.ones(40_000, np.int16), "b": np.ones((3, 500), np.float32)})
        assert reader.refresh()
        assert reader.delta(7).nbytes == reader.manifest(7).totals.stored

    def test_mirror_shares_the_entries_of_its_source(self, root: Path, tmp_path: Path) -> None:
        mirror_store(LocalStore(root), LocalStore(tmp_path / "mirror"), start=0)
        for key, content in objects(root).items():
            get(Cached(LocalStore(root), tmp_path / "cache"), key, len(content))
        counted = FaultStore(LocalStore(tmp_path / "mirror"))
        store = Cached(counted, tmp_path / "cache")
        for key, content in objects(tmp_path / "mirror").items():
            assert get(store, key, len(content)) == content
        assert not reads(counted)

    def test_pruned_object_is_read_from_the_cache(self, root: Path, tmp_path: Path) -> None:
        store = Cached(LocalStore(root), tmp_path / "cache")
        key, content = next((k, c) for k, c in objects(root).items() if k.startswith("data/00000000000000000003-"))
        assert get(store, key, len(content)) == content
        store.delete(key)
        assert not (root / key).exists()
        assert (store.size(key), get(store, key, len(content))) == (len(content), content)

    def test_object_that_no_record_names_is_not_kept(self, root: Path, tmp_path: Path) -> None:
        store = LocalStore(root)
        for attempt in ("00000000000000000099-0123456789abcdef", "00000000000000000003-0123456789abcdef", "x"):
            key = f"data/{attempt}/x"
            store.put(key, [b"litter"])
            assert get(Cached(store, tmp_path / "cache"), key, 6) == b"litter"
        assert entries(tmp_path / "cache") == []

    def test_missing_object_is_not_found_and_leaves_nothing(self, root: Path, tmp_path: Path) -> None:
        key = next(k for k in objects(root) if k.startswith("data/00000000000000000003-"))
        (root / key).unlink()
        store = Cached(LocalStore(root), tmp_path / "cache")
        with pytest.raises(NotFound):
            store.size(key)
        with pytest.raises(NotFound):
            get(store, key, 5)
        assert entries(tmp_path / "cache") == []

    def test_range_past_the_end_is_an_integrity_error(self, root: Path, tmp_path: Path) -> None:
        store = Cached(LocalStore(root), tmp_path / "cache")
        key, content = next(iter(objects(root).items()))
        with pytest.raises(IntegrityError, match=f"it ends at byte {len(content)}, {len(content) + 1} were expected"):
            get(store, key, 2, offset=len(content) - 1)


class TestRight:
    @given(data=st.data())
    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_damaged_entry_is_fetched_again(self, root: Path, tmp_path: Path, data: st.DataObject) -> None:
        store = Cached(LocalStore(root), tmp_path / "cache")
        key = data.draw(st.sampled_from(sorted(objects(root))))
        content = objects(root)[key]
        before = set(entries(tmp_path / "cache")) if (tmp_path / "cache").exists() else set()
        for entry in before:
            entry.unlink()
        assert get(store, key, len(content)) == content
        (entry,) = entries(tmp_path / "cache")
        raw = bytearray(entry.read_bytes())
        assert len(raw) == len(content) + TRAILER
        if data.draw(st.booleans()):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        else:
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        entry.write_bytes(raw)
        assert get(store, key, len(content)) == content
        assert entry.read_bytes()[:-TRAILER] == content

    def test_damage_that_leaves_no_trace_in_times_is_found_by_the_next_pass(self, root: Path, tmp_path: Path) -> None:
        store = Cached(LocalStore(root), tmp_path / "cache")
        key, content = next((k, c) for k, c in objects(root).items() if k.startswith("data/00000000000000000003-"))
        assert get(store, key, len(content)) == content
        (entry,) = entries(tmp_path / "cache")
        times = entry.stat()
        with entry.open("r+b") as file:
            file.write(bytes([content[0] ^ 1]))
        os.utime(entry, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert get(store, key, len(content)) == content

    def test_bytes_that_differ_from_the_manifest_get_no_name(self, root: Path, tmp_path: Path) -> None:
        for key, content in objects(root).items():
            (root / key).write_bytes(bytes([content[0] ^ 1]) + content[1:])
            store = Cached(LocalStore(root), tmp_path / "cache")
            with pytest.raises(IntegrityError, match="another checksum; fetch it again"):
                get(store, key, len(content))
            assert entries(tmp_path / "cache") == []
            (root / key).write_bytes(content)
            assert get(store, key, len(content)) == content
            entries(tmp_path / "cache")[0].unlink()

    def test_fetch_that_breaks_off_leaves_nothing(self, root: Path, tmp_path: Path) -> None:
        key, content = next((k, c) for k, c in objects(root).items() if k.startswith("data/00000000000000000003-"))
        broken = FaultStore(LocalStore(root), kinds=("read_into",))
        get(Cached(broken, tmp_path / "cache"), key, len(content))
        for at in range(1, len(broken.operations) + 1):
            for entry in entries(tmp_path / "cache"):
                entry.unlink()
            store = Cached(FaultStore(LocalStore(root), at=at, kinds=("read_into",)), tmp_path / "cache")
            with pytest.raises(StoreError, match="injected"):
                get(store, key, len(content))
            assert entries(tmp_path / "cache") == []
            assert get(store, key, len(content)) == content

    def test_folder_that_cannot_be_made_is_named(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file")
        key = next(iter(objects(root)))
        with pytest.raises(StoreError, match=f"caching {key} in {tmp_path / 'cache'}: File exists"):
            get(Cached(LocalStore(root), tmp_path / "cache"), key, 1)


class TestBound:
    def test_what_was_not_read_for_longest_goes_first(self, root: Path, tmp_path: Path) -> None:
        keys = [k for v in (1, 2, 3, 4) for k in objects(root) if k.startswith(f"data/{v:020d}-")]
        contents = [objects(root)[k] for k in keys]
        assert len(keys) == 4
        counted = FaultStore(LocalStore(root))
        bound = sum(len(c) + TRAILER for c in contents[:3])
        store = Cached(counted, tmp_path / "cache", nbytes=bound)
        for n in (0, 1, 2):
            get(store, keys[n], len(contents[n]))
        stamps = {e: e.stat().st_atime_ns for e in entries(tmp_path / "cache")}
        assert len(set(stamps.values())) == 3
        get(store, keys[0], len(contents[0]))
        get(store, keys[3], len(contents[3]))
        counted.operations.clear()
        get(store, keys[0], len(contents[0]))
        get(store, keys[3], len(contents[3]))
        assert not reads(counted)
        get(store, keys[1], len(contents[1]))
        assert list(reads(counted)) == [keys[1]]
        assert total(tmp_path / "cache") <= bound

    @given(bound=st.integers(0, 200_000), order=st.lists(st.integers(0, 30), max_size=30))
    @settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_bound_holds_after_every_read(self, root: Path, tmp_path: Path, bound: int, order: list[int]) -> None:
        found, cache = list(objects(root).items()), tmp_path / secrets.token_hex(8)
        store = Cached(LocalStore(root), cache, nbytes=bound)
        for number in order:
            key, content = found[number % len(found)]
            assert get(store, key, len(content)) == content
            assert not cache.exists() or total(cache) <= bound

    def test_object_larger_than_the_bound_is_read_past_the_cache(self, root: Path, tmp_path: Path) -> None:
        key, content = max(objects(root).items(), key=lambda item: len(item[1]))
        store = Cached(LocalStore(root), tmp_path / "cache", nbytes=len(content) + TRAILER - 1)
        assert get(store, key, len(content)) == content
        assert entries(tmp_path / "cache") == []
        assert (store.served, store.fetched) == (0, len(content))

    def test_what_is_being_read_is_not_evicted(self, root: Path, tmp_path: Path) -> None:
        (first, one), (second, two), *_ = [(k, c) for k, c in objects(root).items() if k.startswith("data/0")]
        store = Cached(LocalStore(root), tmp_path / "cache", nbytes=max(len(one), len(two)) + TRAILER)
        get(store, first, len(one))
        (entry,) = entries(tmp_path / "cache")
        with entry.open("rb") as reading:
            fcntl.flock(reading, fcntl.LOCK_SH)
            assert get(store, second, len(two)) == two
            assert entries(tmp_path / "cache") == [entry]
        assert get(store, second, len(two)) == two
        assert entries(tmp_path / "cache") != [entry]
        assert len(entries(tmp_path / "cache")) == 1


_KILLED = """
import os, signal, sys
from deltackpt.cache import Cached
from deltackpt.store import LocalStore
class Dies(LocalStore):
    def read_into(self, key, out, *, offset=0):
        if key == sys.argv[3]:
            os.kill(os.getpid(), signal.SIGKILL)
        super().read_into(key, out, offset=offset)
Cached(Dies(sys.argv[1]), sys.argv[2]).read_into(sys.argv[3], memoryview(bytearray(1)))
"""

_READER = """
import json, random, sys, threading
from deltackpt.cache import Cached
from deltackpt.store import LocalStore
root, cache, bound, seed = sys.argv[1:5]
keys = json.loads(sys.argv[5])
class Counted(LocalStore):
    fetched = []
    def read_into(self, key, out, *, offset=0):
        self.fetched.append(key)
        super().read_into(key, out, offset=offset)
store = Cached(Counted(root), cache, nbytes=int(bound))
faults = []
def work(seed):
    chance = random.Random(seed)
    for key in chance.sample(list(keys) * 6, len(keys) * 6):
        want = open(f"{root}/{key}", "rb").read()
        out = bytearray(len(want))
        store.read_into(key, memoryview(out))
        if out != want:
            faults.append(key)
threads = [threading.Thread(target=work, args=(f"{seed}{n}",)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps({"faults": faults, "fetched": [k for k in Counted.fetched if k in set(keys)]}))
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )


class TestOthers:
    def test_process_that_dies_while_it_fetches_keeps_nobody_waiting(self, root: Path, tmp_path: Path) -> None:
        key, content = next((k, c) for k, c in objects(root).items() if k.startswith("data/00000000000000000003-"))
        dead = python(_KILLED, root, tmp_path / "cache", key)
        assert dead.wait(timeout=60) == -9
        dead.communicate()
        (part,) = entries(tmp_path / "cache")
        assert part.name.endswith(".part")
        assert get(Cached(LocalStore(root), tmp_path / "cache"), key, len(content)) == content
        assert entries(tmp_path / "cache") == [part.with_suffix("")]

    def test_rest_of_a_dead_process_makes_room(self, root: Path, tmp_path: Path) -> None:
        (dying, one), (other, two), *_ = [(k, c) for k, c in objects(root).items() if k.startswith("data/0")]
        dead = python(_KILLED, root, tmp_path / "cache", dying)
        assert dead.wait(timeout=60) == -9
        dead.communicate()
        assert total(tmp_path / "cache") == len(one) + TRAILER
        store = Cached(LocalStore(root), tmp_path / "cache", nbytes=max(len(one), len(two)) + TRAILER)
        assert get(store, other, len(two)) == two
        assert [e.stat().st_size for e in entries(tmp_path / "cache")] == [len(two) + TRAILER]

    def test_holder_without_a_sign_of_life_is_read_past(self, root: Path, tmp_path: Path) -> None:
        key, content = next((k, c) for k, c in objects(root).items() if k.startswith("data/00000000000000000003-"))
        get(Cached(LocalStore(root), tmp_path / "cache"), key, len(content))
        (entry,) = entries(tmp_path / "cache")
        entry.rename(entry.with_name(entry.name + ".part"))
        clock = Clock()
        with open(entry.with_name(entry.name + ".part"), "r+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            store = Cached(LocalStore(root), tmp_path / "cache", clock=clock, sleep=clock.sleep)
            assert get(store, key, len(content)) == content
            assert STALLED_S < clock.now < STALLED_S + 3
            assert not entry.exists()

    def test_holder_that_makes_progress_is_waited_for(self, root: Path, tmp_path: Path) -> None:
        key, content = next((k, c) for k, c in objects(root).items() if k.startswith("data/00000000000000000003-"))
        get(Cached(LocalStore(root), tmp_path / "cache"), key, len(content))
        (entry,) = entries(tmp_path / "cache")
        part = entry.with_name(entry.name + ".part")
        entry.rename(part)
        clock = Clock()
        with open(part, "r+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX)

            def sleep(seconds: float) -> None:
                clock.sleep(seconds)
                os.utime(part, ns=(1, int(clock.now)))
                if clock.now > 10 * STALLED_S:
                    part.rename(entry)
                    fcntl.flock(held, fcntl.LOCK_UN)

            counted = FaultStore(LocalStore(root))
            assert get(Cached(counted, tmp_path / "cache", clock=clock, sleep=sleep), key, len(content)) == content
            assert not reads(counted)

    @pytest.mark.parametrize("share", [10.0, 0.4])
    def test_processes_and_threads_race(self, root: Path, tmp_path: Path, share: float) -> None:
        """With room for all each object is fetched once; with room for some the bytes are right and the bound holds."""
        keys = [k for k in objects(root) if k.startswith("data/")]
        bound = int(share * sum(len(objects(root)[k]) + TRAILER for k in keys))
        running = [python(_READER, root, tmp_path / "cache", bound, seed, json.dumps(keys)) for seed in range(3)]
        fetched: Counter[str] = Counter()
        for one in running:
            out, _ = one.communicate(timeout=120)
            assert one.returncode == 0
            answer = json.loads(out)
            assert answer["faults"] == []
            fetched.update(answer["fetched"])
        assert total(tmp_path / "cache") <= bound
        assert not list((tmp_path / "cache").glob("*.part")) or share < 1
        # Records of anchors are read by each process to learn what their files must be.
        once = {k: n for k, n in fetched.items() if not k.endswith("anchor.json")}
        if share > 1:
            assert set(once.values()) == {1}

    def test_threads_of_one_reader_share_a_large_object(self, tmp_path: Path) -> None:
        """More threads wait for pieces of it than there are requests for it: nobody waits for a thread of the other."""
        store = tmp_path / "store"
        weights = {"a": np.random.default_rng(1).integers(0, 1 << 16, 20 << 20, np.uint16)}
        with contextlib.closing(Publisher(str(store), run_id="r")) as publisher:
            publisher.publish(weights)
        key, content = next((k, c) for k, c in objects(store).items() if len(c) > 32 << 20)
        counted = FaultStore(LocalStore(store))
        cached = Cached(counted, tmp_path / "cache")
        barrier = threading.Barrier(24)

        def piece(n: int) -> bool:
            barrier.wait(timeout=60)
            begin = n * (1 << 20)
            return get(cached, key, 1 << 20, offset=begin) == content[begin : begin + (1 << 20)]

        with ThreadPoolExecutor(24) as pool:
            assert all(pool.map(piece, range(24)))
        assert reads(counted)[key] == 3  # chunks of 16 MiB


class TestCommands:
    def test_second_pull_fetches_nothing(self, root: Path, tmp_path: Path) -> None:
        options = ("--cache", tmp_path / "cache", "--cache-size", "1GB")
        first = cli_good("pull", root, tmp_path / "one", *options)
        second = cli_good("pull", root, tmp_path / "two", *options)
        assert first["bytes_fetched"] > 0
        assert second["bytes_fetched"] == 0
        assert (first["version"], second["version"]) == (6, 6)
        one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()

    def test_watch_reads_through_the_cache(self, root: Path, tmp_path: Path) -> None:
        cli_good("pull", root, tmp_path / "one", "--cache", tmp_path / "cache")
        for key in objects(root):
            if key.startswith("data/") and key.endswith(".safetensors"):
                (root / key).write_bytes(b"")  # whoever reads it finds out
        result = cli_run("watch", root, tmp_path / "two", "--once", "--no-lease", "--cache", tmp_path / "cache")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "two" / "current" / "model.safetensors").is_file()
