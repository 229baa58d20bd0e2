"""Stores: one contract, proved on a local folder, bare and wrapped; then what is special to a folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import FaultStore
from hypothesis import given
from hypothesis import strategies as st

from deltackpt import store as module
from deltackpt.errors import AlreadyExists, ConfigError, DeltaError, IntegrityError, NotFound, StoreError, Unavailable
from deltackpt.store import LocalStore, Store, open_store, read, read_exactly, store_error

ROOT = Path(__file__).parent.parent

MAKERS: dict[str, Callable[[Path], Store]] = {
    "local": lambda root: LocalStore(root),
    "wrapped": lambda root: FaultStore(LocalStore(root)),
}


def get(store: Store, key: str) -> bytes:
    return read(store, key, limit=1 << 20)


def files(root: Path) -> list[str]:
    """All files under a root, temporary ones too."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


# Two of these run at once, eight threads each: every thread creates the same keys.
_RACE = """
import json, sys, threading
from test_store import MAKERS
from pathlib import Path
from deltackpt.errors import AlreadyExists
maker, root, me = sys.argv[1:]
store = MAKERS[maker](Path(root))
won, lock, barrier = [], threading.Lock(), threading.Barrier(8)

def work(thread):
    for round in range(10):
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
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(json.dumps(won))
"""


@pytest.mark.parametrize("maker", MAKERS)
class TestContract:
    """What every store must do."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "root"

    @pytest.fixture
    def store(self, maker: str, root: Path) -> Store:
        return MAKERS[maker](root)

    def test_put_joins_its_parts_of_any_buffer(self, store: Store) -> None:
        store.put("a/b", [b"one", memoryview(b"two"), bytearray(b"three"), b""])  # type: ignore[list-item]  # any buffer
        assert get(store, "a/b") == b"onetwothree"
        assert store.size("a/b") == 11
        store.put("a/empty", [])
        assert get(store, "a/empty") == b""

    def test_put_makes_the_root(self, store: Store, root: Path) -> None:
        assert not root.exists()
        store.put("a/b/c", [b"x"])
        assert get(store, "a/b/c") == b"x"

    def test_exclusive_create_keeps_the_first_bytes(self, store: Store, root: Path) -> None:
        store.put("a/b", [b"first"])
        with pytest.raises(AlreadyExists, match="a/b exists already"):
            store.put("a/b", [b"second, longer"])
        assert get(store, "a/b") == b"first"
        assert files(root) == ["a/b"]

    def test_put_that_is_not_exclusive_replaces(self, store: Store, root: Path) -> None:
        store.put("a/b", [b"first"], if_absent=False)
        store.put("a/b", [b"second"], if_absent=False)
        assert get(store, "a/b") == b"second"
        assert files(root) == ["a/b"]

    def test_exclusive_create_has_one_winner_among_processes_and_threads(self, maker: str, root: Path) -> None:
        root.mkdir()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", _RACE, maker, root, who],
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
        won = [w for racer in racers for w in json.loads(racer.communicate()[0])]
        assert [racer.returncode for racer in racers] == [0, 0]
        assert sorted(r for r, _ in won) == list(range(10))
        for number, name in won:
            assert (root / "race" / str(number)).read_bytes() == name.encode() + b"." * 5000
        assert files(root) == sorted(f"race/{n}" for n in range(10))

    def test_write_that_fails_half_way_leaves_no_key_and_no_temporary_file(
        self, store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("a/old", [b"old"])
        real = os.write

        def write(fd: int, data: memoryview) -> int:
            if len(data) > 10:
                return real(fd, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        for if_absent, key in ((True, "a/new"), (False, "a/old")):
            with monkeypatch.context() as patch:
                patch.setattr(module.os, "write", write)
                with pytest.raises(
                    StoreError, match=f"writing {key}.*: no space .*; free some and run again"
                ) as caught:
                    store.put(key, [b"0123456789abcdef"], if_absent=if_absent)
            assert caught.type is StoreError
        assert files(root) == ["a/old"]
        assert get(store, "a/old") == b"old"
        store.put("a/new", [b"0123456789abcdef"])
        assert get(store, "a/new") == b"0123456789abcdef"

    def test_ranges_are_read_into_the_callers_buffer(self, store: Store) -> None:
        store.put("a/b", [bytes(range(100))])
        out = bytearray(b"\xff" * 12)
        store.read_into("a/b", memoryview(out)[2:10], offset=50)
        assert bytes(out) == b"\xff\xff" + bytes(range(50, 58)) + b"\xff\xff"
        store.read_into("a/b", memoryview(out)[:0], offset=100)

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (99, 2), (100, 1), (500, 1)])
    def test_object_that_ends_early_is_an_integrity_error(self, store: Store, offset: int, nbytes: int) -> None:
        store.put("a/b", [bytes(100)])
        with pytest.raises(IntegrityError, match=f"a/b: it ends at byte .*, {offset + nbytes} were expected"):
            store.read_into("a/b", memoryview(bytearray(nbytes)), offset=offset)

    def test_small_read_refuses_a_large_object_before_it_reads(self, store: Store) -> None:
        store.put("a/b", [bytes(101)])
        with pytest.raises(IntegrityError, match="a/b: 101 bytes found, at most 100 are expected"):
            read(store, "a/b", limit=100)
        assert read(store, "a/b", limit=101) == bytes(101)

    def test_missing_key_is_not_found(self, store: Store) -> None:
        store.put("a/b", [b"x"])
        for missing in ("a/c", "c/a"):
            with pytest.raises(NotFound, match=missing):
                store.size(missing)
            with pytest.raises(NotFound, match=missing):
                store.read_into(missing, memoryview(bytearray(1)))

    def test_root_that_cannot_be_seen_is_not_not_found(self, store: Store) -> None:
        for work in (
            lambda: store.size("a/b"),
            lambda: store.read_into("a/b", memoryview(bytearray(1))),
            lambda: list(store.keys("a/")),
        ):
            with pytest.raises(StoreError, match="does not exist or cannot be seen") as caught:
                work()
            assert caught.type is StoreError

    def test_keys_are_sorted_whatever_the_folders(self, store: Store) -> None:
        made = ["a/0", "a/0-x/y", "a/0.json", "a/0/z", "a/b/c/d", "a/b.c", "b/x"]
        made.remove("a/0/z")  # a/0 is an object, so no folder
        for key in reversed(made):
            store.put(key, [b"x"])
        assert list(store.keys("a/")) == sorted(k for k in made if k.startswith("a/"))
        assert list(store.keys("a/b/")) == ["a/b/c/d"]
        assert list(store.keys("nothing/")) == []

    @given(
        names=st.sets(st.from_regex(r"[a-c.-]{1,2}(/[a-c0-]{1,2}){0,2}", fullmatch=True), max_size=12), data=st.data()
    )
    def test_listing_after_a_key_is_the_rest_of_the_listing(
        self, maker: str, tmp_path_factory: pytest.TempPathFactory, names: set[str], data: st.DataObject
    ) -> None:
        store = MAKERS[maker](tmp_path_factory.mktemp("keys"))
        keys = []
        for name in sorted(names):
            parts = name.split("/")
            prefixes = {"/".join(parts[:n]) for n in range(1, len(parts))}
            if prefixes & names or {".", ".."} & set(parts):
                continue  # a name cannot be an object and a folder
            store.put(f"a/{name}", [b""])
            keys.append(f"a/{name}")
        assert list(store.keys("a/")) == sorted(keys)
        after = data.draw(st.sampled_from(["", "a/b", "a/zz", *keys]))
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

    def test_p31_store_works_under_odd_roots(self, maker: str, cases: Callable[[str], Path]) -> None:
        folder = cases("p31_odd_roots")
        names = json.loads((folder / "expect.json").read_text())["roots"]
        assert len(names) == 13
        for name in names:
            # Twice: nothing is nested in what the first run made.
            for run in range(2):
                store = MAKERS[maker](folder / "roots" / name)
                store.put("data/x", [name.encode()], if_absent=run == 0)
                assert get(store, "data/x") == name.encode()
                assert list(store.keys("data/")) == ["data/x"]
            assert files(folder / "roots" / name) == ["data/x"]
        assert sorted(p.name for p in (folder / "roots").iterdir()) == sorted(names)


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
    write, preadv = os.write, os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", lambda fd, data: write(fd, data[:3]))
        local.put("a/b", [bytes(range(10)), b"end"])
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
        ("s3://bucket/x", "stores at s3:// are not supported; expected a path or file://"),
        ("gs://bucket", "stores at gs:// are not supported"),
        ("s3://run [1] a/x", "not supported"),
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
