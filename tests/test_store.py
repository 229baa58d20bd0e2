"""Stores: one contract, proved on a local folder, bare and wrapped; then what is special to a folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from faults import FaultStore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import BUCKET, ENVIRONMENT, Fault, Server, proxy

from deltackpt import local as module
from deltackpt.errors import AlreadyExists, ConfigError, DeltaError, IntegrityError, NotFound, StoreError, Unavailable
from deltackpt.store import LocalStore, Retrying, Store, open_remote, open_store, read, read_exactly, store_error

T = TypeVar("T")

ROOT = Path(__file__).parent.parent

KINDS = (
    "local",
    "wrapped",
    "retrying",
    "memory",
    "moto-obstore",
    "moto-fsspec",
    "seaweedfs-obstore",
    "seaweedfs-fsspec",
)


def opened(kind: str, url: str) -> Store:
    """Open a store of a kind; each call gives one of its own."""
    if kind == "wrapped":
        return FaultStore(LocalStore(url))
    if kind == "retrying":
        # Every other operation fails first, in turn before and after it was done.
        return Retrying(Flaky(LocalStore(url)), sleep=lambda _: None)
    if kind in ("local", "memory"):
        return open_store(url)
    return Retrying(open_remote(url))


class Flaky(FaultStore):
    """Every odd operation fails, and every other failure is a lost answer."""

    def _run(self, kind: str, key: str, work: Callable[[], T]) -> T:
        with self._lock:
            self.operations.append(f"{kind} {key}")
            number = len(self.operations)
        result = None if number % 4 == 1 else work()
        if number % 2:
            raise Unavailable("injected: the store did not answer")
        return cast("T", result)


@dataclass(frozen=True)
class Place:
    """Where the stores of a test lie. server: that of a bucket."""

    kind: str
    url: str
    server: Server | None

    def open(self, more: str = "") -> Store:
        return opened(self.kind, self.url + more)

    @property
    def is_local(self) -> bool:
        return self.kind in ("local", "wrapped", "retrying")

    def objects(self) -> dict[str, int]:
        """Everything that lies under the root, temporary files too, and its size; by other means than the package's."""
        if self.is_local:
            root = Path(self.url)
            return {str(p.relative_to(root)): p.stat().st_size for p in root.rglob("*") if p.is_file()}
        if self.kind == "memory":
            from fsspec.implementations.memory import MemoryFileSystem

            root = "/" + self.url.partition("://")[2] + "/"
            store: dict[str, Any] = MemoryFileSystem.store
            return {k.removeprefix(root): v.size for k, v in store.items() if k.startswith(root)}
        assert self.server is not None
        root = self.url.partition(f"://{BUCKET}/")[2] + "/"
        with contextlib.closing(self.server.client()) as client:
            uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
            found = client.list_objects_v2(Bucket=BUCKET, Prefix=root).get("Contents", [])
        unfinished = {f"unfinished {u['Key']}": 0 for u in uploads if u["Key"].startswith(root)}
        return unfinished | {f["Key"].removeprefix(root): f["Size"] for f in found}


def get(store: Store, key: str) -> bytes:
    return read(store, key, limit=1 << 20)


def files(root: Path) -> list[str]:
    """All files under a root, temporary ones too."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@pytest.fixture
def place(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A root of its own for each test."""
    name = secrets.token_hex(6)
    if kind in ("local", "wrapped", "retrying"):
        return Place(kind, str(tmp_path / "root"), None)
    if kind == "memory":
        return Place(kind, f"memory://{name}", None)
    which, _, client = kind.partition("-")
    server: Server = request.getfixturevalue(which)
    for variable, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.endpoint}).items():
        monkeypatch.setenv(variable, value)
    return Place(kind, f"{'fsspec+' if client == 'fsspec' else ''}s3://{BUCKET}/{name}", server)


# Two of these run at once: every thread creates the same keys.
_RACE = """
import json, sys, threading
from test_store import opened
from deltackpt.errors import AlreadyExists
kind, url, me, threads, rounds = sys.argv[1:]
store = opened(kind, url)
won, lock, barrier = [], threading.Lock(), threading.Barrier(int(threads))

def work(thread):
    for round in range(int(rounds)):
        barrier.wait()
        name = f"{me}-{thread}"
        try:
            store.put(f"race/{round}", [name.encode(), b"." * 5000])
        except AlreadyExists:
            continue
        with lock:
            won.append((round, name))

print("ready", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=work, args=(n,)) for n in range(int(threads))]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps(won))
"""


def race(place: Place, threads: int, rounds: int) -> list[tuple[int, str]]:
    """Let two processes create the same keys; returns who won which round."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    arguments = [sys.executable, "-c", _RACE, place.kind, place.url]
    racers = [
        subprocess.Popen(
            [*arguments, who, str(threads), str(rounds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for who in ("left", "right")
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [(int(r), str(name)) for racer in racers for r, name in json.loads(racer.communicate()[0])]
    assert [racer.returncode for racer in racers] == [0, 0]
    return won


@pytest.mark.parametrize("kind", KINDS)
class TestContract:
    """What every store must do."""

    @pytest.fixture
    def store(self, place: Place) -> Store:
        return place.open()

    def test_put_joins_its_parts_of_any_buffer(self, store: Store) -> None:
        store.put("a/b", [b"one", memoryview(b"two"), bytearray(b"three"), b""])  # type: ignore[list-item]  # any buffer
        assert get(store, "a/b") == b"onetwothree"
        assert store.size("a/b") == 11
        store.put("a/empty", [])
        assert get(store, "a/empty") == b""
        assert list(store.keys("a/")) == ["a/b", "a/empty"]

    def test_put_makes_the_root(self, store: Store, place: Place) -> None:
        assert place.objects() == {}
        store.put("a/b/c", [b"x"])
        assert get(store, "a/b/c") == b"x"
        assert place.objects() == {"a/b/c": 1}

    def test_exclusive_create_keeps_the_first_bytes(self, store: Store, place: Place) -> None:
        store.put("a/b", [b"first"])
        with pytest.raises(AlreadyExists, match="a/b exists already"):
            store.put("a/b", [b"second, longer"])
        assert get(store, "a/b") == b"first"
        assert list(place.objects()) == ["a/b"]

    def test_put_that_is_not_exclusive_replaces(self, store: Store, place: Place) -> None:
        store.put("a/b", [b"first"], if_absent=False)
        store.put("a/b", [b"second"], if_absent=False)
        assert get(store, "a/b") == b"second"
        assert list(place.objects()) == ["a/b"]

    def test_exclusive_create_has_one_winner_among_processes_and_threads(self, kind: str, place: Place) -> None:
        if kind == "memory":
            pytest.skip("memory:// is one process's own")
        # SeaweedFS lets those that lose wait, some of them for a second; moto takes one request after the other.
        threads, rounds = (3, 10) if kind.startswith(("seaweedfs", "moto")) else (12, 30)
        won = race(place, threads, rounds)
        assert sorted(r for r, _ in won) == list(range(rounds))
        store = place.open()
        for number, name in won:
            assert get(store, f"race/{number}") == name.encode() + b"." * 5000
        assert sorted(place.objects()) == sorted(f"race/{n}" for n in range(rounds))

    def test_exclusive_create_has_one_winner_among_threads(self, place: Place) -> None:
        store, won = place.open(), []
        barrier = threading.Barrier(4)

        def work(number: int) -> None:
            barrier.wait()
            with contextlib.suppress(AlreadyExists):
                store.put("a/b", [b"%d" % number])
                won.append(number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [get(store, "a/b")] == [b"%d" % n for n in won]

    def test_error_of_the_parts_comes_out_and_leaves_nothing(self, store: Store, place: Place) -> None:
        class Parts(list[bytes]):
            def __iter__(self) -> Iterator[bytes]:
                yield b"x" * 1000
                raise IntegrityError("the source is damaged")

        store.put("a/old", [b"old"])
        for if_absent, key in ((True, "a/new"), (False, "a/old")):
            with pytest.raises(IntegrityError, match="the source is damaged"):
                store.put(key, Parts(), if_absent=if_absent)
        assert place.objects() == {"a/old": 3}
        assert get(store, "a/old") == b"old"

    def test_ranges_are_read_into_the_callers_buffer(self, store: Store) -> None:
        store.put("a/b", [bytes(range(100))])
        out = bytearray(b"\xff" * 12)
        store.read_into("a/b", memoryview(out)[2:10], offset=50)
        assert bytes(out) == b"\xff\xff" + bytes(range(50, 58)) + b"\xff\xff"
        store.read_into("a/b", memoryview(out)[:0], offset=100)

    def test_threads_read_ranges_at_the_same_time(self, store: Store) -> None:
        content = bytes(range(256)) * 4096
        store.put("a/b", [content])
        out = bytearray(len(content))
        step = 1 << 16

        def fill(begin: int) -> None:
            store.read_into("a/b", memoryview(out)[begin : begin + step], offset=begin)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(fill, range(0, len(content), step)))
        assert bytes(out) == content

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (99, 2), (100, 1), (500, 1)])
    def test_object_that_ends_early_is_an_integrity_error(self, store: Store, offset: int, nbytes: int) -> None:
        store.put("a/b", [bytes(100)])
        with pytest.raises(IntegrityError, match=f"a/b: it ends at byte .*, {offset + nbytes} were expected"):
            store.read_into("a/b", memoryview(bytearray(nbytes)), offset=offset)

    @pytest.mark.parametrize("room", [0, 1, 99, 100, 101, 5000])
    def test_beginning_of_an_object_comes_with_its_size(self, store: Store, room: int) -> None:
        body = bytes(range(100))
        store.put("a/b", [body])
        out = bytearray(b"." * room)
        assert store.get("a/b", memoryview(out)) == 100
        assert bytes(out) == (body + b"." * room)[:room]

    def test_empty_object_has_no_bytes_and_a_missing_one_is_not_found(self, store: Store) -> None:
        store.put("a/empty", [])
        out = bytearray(b"..")
        assert store.get("a/empty", memoryview(out)) == 0
        assert out == b".."
        with pytest.raises(NotFound):
            store.get("a/missing", memoryview(out))

    def test_small_read_of_more_than_one_request_is_whole(self, store: Store) -> None:
        body = secrets.token_bytes((256 << 10) + 1)
        store.put("a/b", [body])
        assert read(store, "a/b", limit=len(body)) == body
        with pytest.raises(IntegrityError, match=f"{len(body)} bytes found, at most {len(body) - 1} are expected"):
            read(store, "a/b", limit=len(body) - 1)

    def test_small_read_refuses_a_large_object_before_it_reads(self, store: Store) -> None:
        store.put("a/b", [bytes(101)])
        with pytest.raises(IntegrityError, match="a/b: 101 bytes found, at most 100 are expected"):
            read(store, "a/b", limit=100)
        assert read(store, "a/b", limit=101) == bytes(101)

    def test_missing_key_is_not_found(self, store: Store) -> None:
        store.put("a/b", [b"x"])
        for missing in ("a/c", "c/a", "a"):
            with pytest.raises(NotFound, match=missing):
                store.size(missing)
            with pytest.raises(NotFound, match=missing):
                store.modified(missing)
        for missing in ("a/c", "c/a"):
            with pytest.raises(NotFound, match=missing):
                store.read_into(missing, memoryview(bytearray(1)))

    def test_root_that_cannot_be_seen_is_not_not_found(self, kind: str, place: Place) -> None:
        """A root folder that is not there, and a bucket that is not."""
        if kind == "memory":
            pytest.skip("memory:// has no root that could be missing")
        url = place.url.replace(BUCKET, "no-such-bucket")
        for work in (
            lambda s: s.size("a/b"),
            lambda s: s.modified("a/b"),
            lambda s: s.read_into("a/b", memoryview(bytearray(1))),
            lambda s: list(s.keys("a/")),
        ):
            with pytest.raises(StoreError, match="does not exist or cannot be seen") as caught:
                work(opened(kind, url))  # type: ignore[no-untyped-call]  # one of the four
            assert caught.type is StoreError

    def test_time_of_writing_is_by_the_stores_clock(self, store: Store) -> None:
        store.put("a/b", [b"x"])
        assert abs(store.modified("a/b") - time.time()) < 5

    def test_keys_are_sorted_whatever_the_folders(self, kind: str, store: Store) -> None:
        made = ["a/0-x/y", "a/0.json", "a/0", "a/b/c/d", "b/x"]
        # SeaweedFS has folders, and puts what is in one before a sibling whose name goes on.
        made += [] if kind.startswith("seaweedfs") else ["a/b.c"]
        for key in made:
            store.put(key, [b"x"])
        assert list(store.keys("a/")) == sorted(k for k in made if k.startswith("a/"))
        assert list(store.keys("a/b/")) == ["a/b/c/d"]
        assert list(store.keys("nothing/")) == []

    @settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_listing_after_a_key_is_the_rest_of_the_listing(self, kind: str, place: Place, data: st.DataObject) -> None:
        # As above: on SeaweedFS no name may go on where a folder's ends, and no key of this package does.
        pattern = r"[a-c-]{2}(/[a-c0]{2}){0,2}" if "seaweedfs" in kind else r"[a-c.-]{1,2}(/[a-c0-]{1,2}){0,2}"
        names = data.draw(st.sets(st.from_regex(pattern, fullmatch=True), max_size=12))
        store = place.open(f"/{secrets.token_hex(6)}")
        keys = []
        for name in sorted(names):
            parts = name.split("/")
            prefixes = {"/".join(parts[:n]) for n in range(1, len(parts))}
            if prefixes & names or {".", ".."} & set(parts):
                continue  # a name cannot be an object and a folder
            store.put(f"a/{name}", [b""])
            keys.append(f"a/{name}")
        if keys or not place.is_local:
            assert list(store.keys("a/")) == sorted(keys)
            after = data.draw(st.sampled_from(["", "a/b.", "a/zz", *keys]))
            assert list(store.keys("a/", after=after)) == sorted(k for k in keys if k > after)

    def test_delete_is_idempotent_and_frees_the_key(self, store: Store) -> None:
        store.put("a/b", [b"one"])
        store.put("a/c", [b"two"])
        store.delete("a/b")
        store.delete("a/b")
        store.delete("never/there")
        assert list(store.keys("a/")) == ["a/c"]
        store.put("a/b", [b"three"])
        assert get(store, "a/b") == b"three"

    def test_two_roots_side_by_side_do_not_see_each_other(self, place: Place) -> None:
        one, two = place.open("/x"), place.open("/x-more")
        one.put("a/b", [b"one"])
        two.put("a/b", [b"two"])
        assert (get(one, "a/b"), get(two, "a/b")) == (b"one", b"two")
        assert list(one.keys("a/")) == ["a/b"]
        assert sorted(place.objects()) == ["x-more/a/b", "x/a/b"]

    def test_another_process_s_objects_are_seen_at_once(self, place: Place) -> None:
        """A listing or a look that was made before must not be the answer."""
        mine, other = place.open(), place.open()
        other.put("a/0", [b"x"])
        assert list(mine.keys("a/")) == ["a/0"]
        with pytest.raises(NotFound):
            mine.size("a/1")
        other.put("a/1", [b"x"])
        other.put("a/0", [b"longer"], if_absent=False)
        assert list(mine.keys("a/")) == ["a/0", "a/1"]
        assert (mine.size("a/0"), get(mine, "a/0"), mine.size("a/1")) == (6, b"longer", 1)


LOCAL = ("local", "wrapped", "retrying")


@pytest.mark.parametrize("kind", LOCAL)
def test_p31_store_works_under_odd_roots(kind: str, cases: Callable[[str], Path]) -> None:
    folder = cases("p31_odd_roots")
    names = json.loads((folder / "expect.json").read_text())["roots"]
    assert len(names) == 13
    for name in names:
        # Twice: nothing is nested in what the first run made.
        for run in range(2):
            store = opened(kind, str(folder / "roots" / name))
            store.put("data/x", [name.encode()], if_absent=run == 0)
            assert get(store, "data/x") == name.encode()
            assert list(store.keys("data/")) == ["data/x"]
        assert files(folder / "roots" / name) == ["data/x"]
    assert sorted(p.name for p in (folder / "roots").iterdir()) == sorted(names)


# ---------------------------------------------------------------- large objects


@pytest.mark.parametrize("kind", [k for k in KINDS if "-" in k])
class TestLargeObjects:
    """What does not fit a single request goes in parts."""

    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("deltackpt.remote.SINGLE", 6 << 20)
        for name in ("fsspecstore", "obstorestore"):
            monkeypatch.setattr(f"deltackpt.{name}.PART", 5 << 20)  # S3 takes no smaller ones

    def test_it_is_put_in_parts_and_read_back(self, place: Place) -> None:
        store, content = place.open(), random.Random(1).randbytes(13 << 20)
        store.put("data/x", [content[:100], memoryview(content)[100 : 9 << 20], content[9 << 20 :]])
        out = bytearray(len(content))
        store.read_into("data/x", memoryview(out))
        assert bytes(out) == content
        assert place.objects() == {"data/x": len(content)}
        with pytest.raises(AlreadyExists):
            store.put("data/x", [bytes(7 << 20)])

    def test_source_that_breaks_off_leaves_no_object_and_no_unfinished_upload(self, place: Place) -> None:
        class Parts(list[bytes]):
            def __iter__(self) -> Iterator[bytes]:
                yield bytes(11 << 20)
                raise IntegrityError("the source is damaged")

        with pytest.raises(IntegrityError, match="the source is damaged"):
            place.open().put("data/x", Parts())
        assert place.objects() == {}

    @pytest.mark.parametrize("fault", ["busy", "refuse", "lost", "denied"])
    def test_part_that_fails_leaves_no_unfinished_upload(
        self, place: Place, fault: Fault, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert place.server is not None
        with proxy(place.server) as faults:
            monkeypatch.setenv("AWS_ENDPOINT_URL", faults.endpoint)
            store = open_remote(place.url)
            faults.reset(lambda _, line: fault if "partNumber=2" in line else "")
            with pytest.raises(StoreError, match=r"no permission|try again"):
                store.put("data/x", [bytes(13 << 20)])
            assert place.objects() == {}
            faults.reset()
            store.put("data/x", [bytes(13 << 20)])
        assert place.objects() == {"data/x": 13 << 20}


# ---------------------------------------------------------------- FaultStore itself


def test_fault_before_leaves_the_store_alone_and_after_loses_the_answer(tmp_path: Path) -> None:
    local = LocalStore(tmp_path)
    for when, kept in (("before", False), ("after", True)):
        store = FaultStore(local, at=2, when=when)  # type: ignore[arg-type]  # one of the two
        store.put(f"{when}/1", [b"x"])
        with pytest.raises(Unavailable, match="injected"):
            store.put(f"{when}/2", [b"x"])
        store.put(f"{when}/3", [b"x"])
        assert list(local.keys(f"{when}/")) == [f"{when}/1", *([f"{when}/2"] if kept else []), f"{when}/3"]
        assert store.operations == [f"put {when}/{n}" for n in (1, 2, 3)]


def test_fault_counts_the_chosen_kinds_only(tmp_path: Path) -> None:
    store = FaultStore(LocalStore(tmp_path), at=1, kinds={"delete"}, error=lambda: StoreError("chosen"))
    store.put("a/b", [b"x"])
    assert get(store, "a/b") == b"x"
    with pytest.raises(StoreError, match="chosen"):
        store.delete("a/b")
    assert store.operations == ["delete a/b"]


# ---------------------------------------------------------------- a local folder


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


@pytest.mark.parametrize("kind", ["local", "wrapped"])
def test_write_that_fails_half_way_leaves_no_key_and_no_temporary_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    store = opened(kind, str(root))
    store.put("a/old", [b"old"])

    def write(fd: int, parts: list[memoryview]) -> int:
        if len(parts[0]) > 10:
            return os.write(fd, parts[0][:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for if_absent, key in ((True, "a/new"), (False, "a/old")):
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "writev", write)
            with pytest.raises(StoreError, match=f"writing {key}.*: no space .*; free some and run again") as caught:
                store.put(key, [b"0123456789abcdef"], if_absent=if_absent)
        assert caught.type is StoreError
    assert files(root) == ["a/old"]
    assert get(store, "a/old") == b"old"
    store.put("a/new", [b"0123456789abcdef"])
    assert get(store, "a/new") == b"0123456789abcdef"


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775), (0o077, 0o600, 0o700)]
)
def test_p39_modes_follow_the_umask(
    mask: int, file: int, folder: int, local: LocalStore, umask: Callable[[int], int]
) -> None:
    umask(mask)
    for if_absent in (True, False):
        local.put("data/x/y", [b"x"], if_absent=if_absent)
        root = Path(local.root)
        assert (root / "data/x/y").stat().st_mode & 0o777 == file
        assert [p.stat().st_mode & 0o777 for p in (root, root / "data", root / "data/x")] == [folder] * 3


def dead_process() -> int:
    """Number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_litter_of_dead_writers_is_swept_and_of_living_ones_kept(tmp_path: Path) -> None:
    host, folder = socket.gethostname(), tmp_path / ".tmp"
    folder.mkdir()
    dead, living = f"{host}-{dead_process()}-aa", f"{host}-{os.getpid()}-bb"
    old, fresh, odd = "other-host.example-12-cc", "other-host.example-13-dd", "what"
    for name in (dead, living, old, fresh, odd):
        (folder / name).write_bytes(b"x")
    long_ago = time.time() - 2 * 86400
    os.utime(folder / old, (long_ago, long_ago))
    os.utime(folder / living, (long_ago, long_ago))
    LocalStore(tmp_path).put("a/b", [b"x"])
    assert sorted(p.name for p in folder.iterdir()) == sorted([living, fresh, odd])


def test_reading_a_store_writes_nothing(local: LocalStore) -> None:
    local.put("a/b", [b"x"])
    root = Path(local.root)
    before = {p: p.stat().st_mtime_ns for p in [root, *root.rglob("*")]}
    other = LocalStore(local.root)
    other.size("a/b")
    get(other, "a/b")
    list(other.keys("a/"))
    assert {p: p.stat().st_mtime_ns for p in [root, *root.rglob("*")]} == before


def test_put_and_its_folder_are_synced_before_it_returns(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put("a/first", [b"x"])
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(module.os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    local.put("a/b", [b"x"])
    assert [s.rpartition("/")[0] for s in synced[:1]] == [f"{local.root}/.tmp"]
    assert synced[1:] == [f"{local.root}/a"]


def test_failed_sync_of_the_folder_is_an_unknown_outcome(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    local.put("a/first", [b"x"])

    def fail(folder: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module, "sync_folder", fail)
    with pytest.raises(Unavailable, match="after it got its name; put it again"):
        local.put("a/b", [b"x"])


def test_root_that_is_a_file_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    store = LocalStore(tmp_path / "file")
    for work in (lambda: store.put("a/b", [b"x"]), lambda: store.size("a/b"), lambda: list(store.keys("a/"))):
        with pytest.raises(StoreError) as caught:
            work()
        assert caught.type is StoreError


def test_folder_emptied_by_a_delete_between_its_making_and_the_link_is_made_again(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting the last object of a folder removes the folder, under a writer that had just seen it."""
    local.put("a/b", [b"x"])
    real, calls = os.link, []

    def link(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 1:
            local.delete("a/b")
        real(source, target)

    monkeypatch.setattr(module.os, "link", link)
    local.put("a/c", [b"y"])
    assert files(Path(local.root)) == ["a/c"]


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (errno.ENOSPC, StoreError, r"writing x: no space \(No space left on device\); free some and run again"),
        (errno.EDQUOT, StoreError, "no space"),
        (errno.EFBIG, StoreError, "no space"),
        (errno.EROFS, StoreError, "read-only"),
        (errno.EACCES, StoreError, "writing x: no permission"),
        (errno.EPERM, StoreError, "no permission"),
        (errno.ENOTDIR, StoreError, "writing x: Not a directory"),
        (errno.ENAMETOOLONG, StoreError, "writing x: File name too long"),
        (errno.EIO, Unavailable, "writing x: Input/output error; try again"),
        (errno.ESTALE, Unavailable, "try again"),
        (errno.ETIMEDOUT, Unavailable, "try again"),
        (errno.EINTR, Unavailable, "try again"),
        (errno.EAGAIN, Unavailable, "try again"),
        (errno.EBUSY, Unavailable, "try again"),
        (errno.ENOTCONN, Unavailable, "try again"),
    ],
)
def test_error_of_the_system_says_whether_a_retry_can_help(number: int, kind: type[DeltaError], message: str) -> None:
    error = store_error(OSError(number, os.strerror(number)), "writing x")
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_what_cannot_be_read_is_never_not_found(
    number: int, local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put("a/b", [b"x"])

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    for name, work in (
        ("open", lambda: local.read_into("a/b", memoryview(bytearray(1)))),
        ("preadv", lambda: local.read_into("a/b", memoryview(bytearray(1)))),
        ("stat", lambda: local.size("a/b")),
        ("scandir", lambda: list(local.keys("a/"))),
        ("unlink", lambda: local.delete("a/b")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module.os, name, fail)
            error = None
            try:
                work()
            except StoreError as exc:
                error = exc
        assert error is not None, name
        assert not isinstance(error, NotFound), name


def test_interrupted_reads_and_writes_are_continued(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, preadv = os.writev, os.preadv
    with monkeypatch.context() as patch:
        # 4 + 2 of the first part, then its end with the beginning of the next one.
        takes = iter([[4], [2], [4, 1], [2], [9]])
        patch.setattr(
            module.os, "writev", lambda fd, parts: writev(fd, [p[:n] for p, n in zip(parts, next(takes), strict=False)])
        )
        local.put("a/b", [bytes(range(10)), b"", b"end"])
        patch.setattr(module.os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:4]], at))
        assert get(local, "a/b") == bytes(range(10)) + b"end"


def test_read_exactly_names_what_ends_early(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    with (
        open(tmp_path / "x", "rb") as file,
        pytest.raises(IntegrityError, match="the shard: it ends at byte 5, 6 were"),
    ):
        read_exactly(file.fileno(), memoryview(bytearray(3)), 3, "the shard")


# ---------------------------------------------------------------- URLs


def test_path_and_file_url_name_the_same_store(tmp_path: Path, cases: Callable[[str], Path]) -> None:
    names = json.loads((cases("p31_odd_roots") / "expect.json").read_text())["roots"]
    for name in [*names, "100%", "a%2Fb"]:
        path = tmp_path / name
        for url in (path, str(path), f"{path}/", path.as_uri(), path.as_uri() + "/"):
            assert open_store(url).url == str(path), url


def test_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("here")
    monkeypatch.chdir("/")
    assert store.url == str(tmp_path / "here")


def test_opening_makes_nothing(tmp_path: Path) -> None:
    open_store(tmp_path / "root")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "the store URL is empty"),
        ("s3://", "s3:// names no bucket; expected s3://bucket/prefix"),
        ("s3:///x", "names no bucket"),
        ("s3://b/a/../c", "the part '[.][.]' has no meaning in a bucket; leave it out"),
        ("gopher://data/x", "no kind of store is called gopher; expected a path or for example s3://bucket/prefix"),
        ("fsspec+file:///tmp/x", "fsspec writes local files in place; name the path itself"),
        ("fsspec+local:///tmp/x", "fsspec writes local files in place"),
        ("simplecache::s3://b/x", "chained URLs go through caches; name the store itself"),
        ("file://data/x", "names a host"),
        ("file:///tmp/hash#1", "percent"),
        ("file:///tmp/q?mark", "percent"),
    ],
)
def test_url_that_is_not_understood_is_a_config_error(url: str, message: str) -> None:
    """file://data/x used to open /x, and file:///tmp/hash#1 opened /tmp/hash."""
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_local_host_may_be_named() -> None:
    assert open_store("file://localhost/tmp/x").url == "/tmp/x"


class Made(list[bytes]):
    """Forty parts of a MiB; notes how much is in the temporary file as each is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__([bytes([number]) * (1 << 20) for number in range(40)])
        self.root, self.written = root, list[int]()

    def __iter__(self) -> Iterator[bytes]:
        for part in super().__iter__():
            self.written.append(sum(path.stat().st_size for path in (self.root / ".tmp").iterdir()))
            yield part


def test_parts_are_written_as_they_come(tmp_path: Path) -> None:
    """A file of a full copy, which is read from elsewhere part by part, was in memory as a whole."""
    parts = Made(tmp_path)
    LocalStore(tmp_path).put("data/x", parts)
    assert (tmp_path / "data/x").read_bytes() == b"".join(parts)
    assert parts.written[:40:16] == [0, 16 << 20, 32 << 20]
