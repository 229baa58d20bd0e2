"""Failure cases P37 to P40, and P33's part about locks: full disks, kills, modes, overlapping jobs.

Faults are made by the cases' own hook, in processes of their own; where every place is gone through, the processes are
forked from a warm one, and a sample runs as anybody would start it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import make_cases
import pytest
from helpers import cli_good, cli_run, command, data_files, exact, expected, recorded, refused, visible
from processes import Server

from deltackpt.errors import Busy, ConfigError, StoreError
from deltackpt.folder import CheckpointTarget, read_record
from deltackpt.follow import Follower
from deltackpt.publish import publish_folder
from deltackpt.store import LocalStore
from deltackpt.verify import verify_store

NOBODY = 65534
MODES = ("replace", "switch", "in-place")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    warm = Server(tmp_path_factory.mktemp("children"))
    yield warm
    warm.close()


def publish(root: Path, *versions: int, anchors: bool = False) -> None:
    for v in versions:
        publish_folder(str(root / f"v{v}"), str(root / "store"), anchors=anchors)


def require_whole(store: Path) -> None:
    """Assert that all that a store shows is there, to the last byte."""
    assert verify_store(LocalStore(store), deep=True, scratch=str(store.parent)).problems == ()


def leftovers(store: Path) -> list[str]:
    """Return the temporary files of a store."""
    temporary = store / ".tmp"
    return sorted(os.listdir(temporary)) if temporary.exists() else []


# ---------------------------------------------------------------- P37: publish


def published_or_refused(root: Path, code: int, text: str) -> bool:
    """Assert that a publish of v1 was refused whole, or committed whole. Returns whether it was refused."""
    store = root / "store"
    require_whole(store)
    assert leftovers(store) == []
    if code == 0:
        assert visible(store) == [0, 1]
        return False
    assert code in (10, 13), text
    assert text.count("\n") == 1
    assert visible(store) == [0]
    assert not [f for f in data_files(store) if f.startswith(f"data/{1:020d}-")]
    return True


def count_fsyncs(root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many calls of fsync a publish of v1 makes, its anchor included."""
    copy, count, real = fresh_store(root, "counted"), [0], os.fsync

    def counted(fd: int) -> None:
        count[0] += 1
        real(fd)

    with monkeypatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(copy / "state"))
        patched.setattr(os, "fsync", counted)
        publish_folder(str(copy / "v1"), str(copy / "store"))
    assert count[0] > 20
    return count[0]


def fresh_store(root: Path, name: str) -> Path:
    """Return a folder like `root` with a copy of its store and of this host's records."""
    copy = root / name
    copy.mkdir()
    shutil.copytree(root / "store", copy / "store")
    shutil.copytree(os.environ["XDG_STATE_HOME"], copy / "state")
    for label in ("v0", "v1", "v2", "v3", "local"):
        if (root / label).exists():
            (copy / label).symlink_to(root / label)
    return copy


def test_p37_publish_within_a_thousand_bytes_is_refused(cases: Callable[[str], Path], server: Server) -> None:
    root = cases("p37_enospc_fsync")
    publish(root, 0)
    child = server.run("publish", root / "v1", root / "store", FAULT_FSIZE="1000")
    assert published_or_refused(root, child.wait(), child.text)
    assert "no space" in child.text
    # Once there is room.
    assert cli_good("publish", root / "v1", root / "store")["version"] == 1
    require_whole(root / "store")


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_p37_publish_with_any_fsync_failing_is_refused_or_whole(
    error: str, cases: Callable[[str], Path], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of this host that could not be kept took the shards of a committed version away."""
    root = cases("p37_enospc_fsync")
    publish(root, 0)
    refusals = 0
    for n in range(1, count_fsyncs(root, monkeypatch) + 1):
        copy = fresh_store(root, f"{error}-{n}")
        child = server.run(
            "publish", copy / "v1", copy / "store", FAULT=f"fsync:{n}:{error}", XDG_STATE_HOME=str(copy / "state")
        )
        if published_or_refused(copy, child.wait(), child.text):
            refusals += 1
            assert "no space" in child.text.lower() or error == "EIO"
        again = server.run("publish", copy / "v1", copy / "store", XDG_STATE_HOME=str(copy / "state"))
        assert again.exit_code == 0, again.text
        cli_good("pull", copy / "store", copy / "pulled")
        assert make_cases.ckpt_digest(copy / "pulled") == expected(root)["versions"]["v1"]
    assert refusals >= 4


def test_p37_first_publish_on_a_full_disk_leaves_no_version(cases: Callable[[str], Path], server: Server) -> None:
    root = cases("p37_enospc_fsync")
    child = server.run("publish", root / "v0", root / "store", FAULT_FSIZE="1000")
    assert child.exit_code == 10, child.text
    assert "no space" in child.text
    assert visible(root / "store") == []
    assert data_files(root / "store") == []
    assert cli_good("publish", root / "v0", root / "store")["version"] == 0


# ---------------------------------------------------------------- P37: pull


def pulled_or_honest(root: Path, local: Path, code: int, text: str, mode: str) -> None:
    """Assert that v0 is still there, or v1 is, or the copy says that it is not clean; then make it v1."""
    expect = expected(root)
    record = read_record(str(local))
    if record is not None and record.pending is not None:
        assert code != 0
        assert cli_run("verify", local, "--against", root / "store").exit_code == 50
    else:
        held = make_cases.ckpt_digest(local / "current" if mode == "switch" else local)
        assert held == expect["versions"]["v1" if code == 0 else f"v{recorded(local) or 0}"]
    assert code in (0, 10, 13), text
    if code:
        assert text.count("\n") == 1
    cli_good("pull", root / "store", local, "--mode", mode)
    exact(local, expect, 1)


def local_copy(root: Path, name: str, mode: str) -> Path:
    local = root / name
    if mode == "switch":
        cli_good("pull", root / "store", local, "--version", "0", "--mode", mode)
    else:
        shutil.copytree(root / "local", local)
    return local


@pytest.mark.parametrize("mode", MODES)
def test_p37_pull_within_a_thousand_bytes_is_refused(mode: str, cases: Callable[[str], Path], server: Server) -> None:
    root = cases("p37_enospc_fsync")
    publish(root, 0, 1)
    local = local_copy(root, "copy", mode)
    before = make_cases.tree_digest(local)
    child = server.run("pull", root / "store", local, "--mode", mode, FAULT_FSIZE="1000")
    assert child.exit_code == 10, child.text
    assert "no space" in child.text
    assert make_cases.tree_digest(local) == before
    pulled_or_honest(root, local, child.exit_code, child.text, mode)


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("mode", MODES)
def test_p37_pull_with_any_fsync_failing_is_refused_or_recovers(
    mode: str, error: str, cases: Callable[[str], Path], server: Server
) -> None:
    root = cases("p37_enospc_fsync")
    publish(root, 0, 1)
    failures = 0
    for n in range(1, 100):
        local = local_copy(root, f"{error}-{n}", mode)
        child = server.run("pull", root / "store", local, "--mode", mode, FAULT=f"fsync:{n}:{error}")
        pulled_or_honest(root, local, child.wait(), child.text, mode)
        if child.exit_code == 0:
            break
        failures += 1
    assert failures >= 5


def test_p37_a_sample_as_anybody_starts_it(cases: Callable[[str], Path]) -> None:
    root = cases("p37_enospc_fsync")
    publish(root, 0)
    hook = f"{root / 'faults'}:{Path(__file__).parent.parent}"
    done = command("publish", root / "v1", root / "store", PYTHONPATH=hook, FAULT="fsync:1:ENOSPC")
    assert published_or_refused(root, done.returncode, done.stderr)
    publish(root, 1)
    done = command("pull", root / "store", root / "local", PYTHONPATH=hook, FAULT_FSIZE="1000")
    assert done.returncode == 10
    pulled_or_honest(root, root / "local", done.returncode, done.stderr, "replace")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 kB that has 4 kB left."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk to the last byte."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    return filler


def test_p37_publish_to_a_full_disk(small_disk: Path, cases: Callable[[str], Path]) -> None:
    root = cases("p37_enospc_fsync")
    store = small_disk / "store"
    publish_folder(str(root / "v0"), str(store))
    filler = fill(small_disk)
    refused(["publish", root / "v1", store], "no space", error=StoreError, store=store)
    filler.unlink()
    assert cli_good("publish", root / "v1", store, "--no-anchors")["version"] == 1
    assert verify_store(LocalStore(store), deep=True).problems == ()


@pytest.mark.parametrize("mode", MODES)
def test_p37_pull_to_a_full_disk(mode: str, small_disk: Path, cases: Callable[[str], Path]) -> None:
    root = cases("p37_enospc_fsync")
    publish(root, 0, 1)
    local = small_disk / "local"
    cli_good("pull", root / "store", local, "--version", "0", "--mode", mode)
    filler = fill(small_disk)
    refused(["pull", root / "store", local, "--mode", mode], "no space", error=StoreError)
    exact(local, expected(root), 0)
    filler.unlink()
    cli_good("pull", root / "store", local, "--mode", mode)
    exact(local, expected(root), 1)


# ---------------------------------------------------------------- P38


def test_p38_a_publisher_killed_anywhere_leaves_whole_versions_and_little_litter(
    cases: Callable[[str], Path], server: Server
) -> None:
    root = cases("p38_kill_mid_publish")
    expect = expected(root)
    shutil.copytree(root / "litter", root / "store")
    publish(root, 0)
    clean = fresh_store(root, "clean")
    for v in (1, 2, 3):
        child = server.run("publish", clean / f"v{v}", clean / "store", XDG_STATE_HOME=str(clean / "state"))
        assert child.exit_code == 0, child.text
    kills = [f"{call}:{n}:KILL" for call in ("write", "fsync", "link") for n in range(1, 12)]
    killed = 0
    for fault in kills:
        if killed == 20:
            break
        copy = fresh_store(root, fault.replace(":", "-"))
        store, state = copy / "store", str(copy / "state")
        child = server.run("publish", copy / "v1", store, FAULT=fault, XDG_STATE_HOME=state)
        if child.exit_code == 0:
            continue
        assert child.exit_code == -signal.SIGKILL, child.text
        killed += 1
        require_whole(store)
        seen = visible(store)
        assert seen in ([0], [0, 1])
        cli_good("pull", store, copy / "seen")
        assert make_cases.ckpt_digest(copy / "seen") == expect["versions"][f"v{seen[-1]}"]
        for v in (1, 2, 3):
            child = server.run("publish", copy / f"v{v}", store, XDG_STATE_HOME=state)
            assert child.exit_code == 0, child.text
        require_whole(store)
        cli_good("pull", store, copy / "seen")
        assert make_cases.ckpt_digest(copy / "seen") == expect["versions"]["v3"]
        # Of one attempt: two shards, an index, side files and a record of an anchor, at the most.
        more = len(make_cases.tree_digest(store)) - len(make_cases.tree_digest(clean / "store"))
        attempts = {f.split("/")[1] for f in data_files(store)} - named_folders(store)
        assert len(attempts) <= 1, attempts
        assert more <= 6 + (len(seen) - 1) * 4
        assert leftovers(store) == []
        for name in os.listdir(root / "litter"):
            assert (store / name).read_bytes() == b"\0" * 64
    assert killed == 20


def named_folders(store: Path) -> set[str]:
    """Return the data folders that a manifest or an anchor names."""
    records = [p.read_text() for kind in ("manifests", "anchors") for p in (store / kind).glob("*.json")]
    return {p.name for p in (store / "data").iterdir() if any(p.name in text for text in records)}


def test_p38_scratch_of_a_killed_publisher_is_swept(cases: Callable[[str], Path]) -> None:
    """A copy of the weights was left for a day, and from then on no publisher could write to the store."""
    root = cases("p38_kill_mid_publish")
    publish(root, 0)
    temporary = root / "store" / ".tmp"
    old = temporary / "deltackpt-anchor-x1y2"
    (old / "checkpoint").mkdir(parents=True)
    (old / "checkpoint" / "model.safetensors").write_bytes(b"\0" * 64)
    os.utime(old, (0, 0))
    process = subprocess.Popen(["true"])
    process.wait()
    host = os.uname().nodename
    (temporary / f"{host}-{process.pid}-abc" / "checkpoint").mkdir(parents=True)
    (temporary / f"{host}-{os.getpid()}-abc").mkdir()
    (temporary / "other.host-7-abc").mkdir()
    publish(root, 1)
    assert leftovers(root / "store") == sorted([f"{host}-{os.getpid()}-abc", "other.host-7-abc"])


# ---------------------------------------------------------------- P39


@pytest.fixture
def open_root(cases: Callable[[str], Path]) -> Iterator[Path]:
    """Case P39 where another user can get at it: pytest's own folders are for its user only."""
    root = cases("p39_modes_and_readonly")
    with tempfile.TemporaryDirectory(prefix="deltackpt-test-") as shared:
        os.chmod(shared, 0o755)
        yield Path(shutil.copytree(root, Path(shared) / "case"))


def as_user(server: Server, root: Path) -> Callable[..., Any]:
    """Return a way to run commands as a user who may not do everything."""
    uid = NOBODY if os.getuid() == 0 else None
    state = root / "state-of-user"
    state.mkdir()
    if uid is not None:
        for path in (root, state, *root.rglob("*")):
            os.chown(path, uid, uid)

    def run(*arguments: str | Path, **options: Any) -> Any:
        return server.run(*arguments, uid=uid, XDG_STATE_HOME=str(state), **options)

    return run


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664)])
def test_p39_files_of_a_store_have_the_modes_of_the_umask(
    umask: int, mode: int, open_root: Path, server: Server
) -> None:
    run = as_user(server, open_root)
    for v in (0, 1):
        child = run("publish", open_root / f"v{v}", open_root / "store", umask=umask)
        assert child.exit_code == 0, child.text
    found = [p for p in (open_root / "store").rglob("*") if p.is_file()]
    assert len(found) > 10
    assert {p.stat().st_mode & 0o777 for p in found} == {mode}


@pytest.mark.parametrize("way", ["replace", "in-place"])
def test_p39_pulled_shards_keep_their_modes(way: str, open_root: Path, server: Server) -> None:
    run = as_user(server, open_root)
    for v in (0, 1):
        assert run("publish", open_root / f"v{v}", open_root / "store").exit_code == 0
    child = run("pull", open_root / "store", open_root / "local", "--mode", way)
    assert child.exit_code == 0, child.text
    exact(open_root / "local", expected(open_root), 1)
    assert {p.stat().st_mode & 0o777 for p in (open_root / "local").glob("*.safetensors")} == {0o640}


def make_read_only(folder: Path) -> None:
    """Take the right to write from all users of a folder and what is in it."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_p39_a_store_that_cannot_be_written_is_read_without_trying(open_root: Path, server: Server) -> None:
    run = as_user(server, open_root)
    store = open_root / "store"
    for v in (0, 1):
        assert run("publish", open_root / f"v{v}", store).exit_code == 0
    make_read_only(store)
    before = make_cases.tree_digest(store)
    # Any attempt to open something for writing there would end the process.
    child = run("pull", store, open_root / "local", FAULT="open:*:KILL", FAULT_MATCH=f"{store}/.tmp")
    assert child.exit_code == 0, child.text
    exact(open_root / "local", expected(open_root), 1)
    assert make_cases.tree_digest(store) == before
    child = run("publish", open_root / "v0", store)
    assert child.exit_code == 10
    assert "no permission" in child.text


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_p39_a_folder_that_cannot_be_written_is_refused(at: int, mode: str, open_root: Path, server: Server) -> None:
    run = as_user(server, open_root)
    for v in (0, 1):
        assert run("publish", open_root / f"v{v}", open_root / "store").exit_code == 0
    local = open_root / "fixed"
    assert run("pull", open_root / "store", local, "--version", str(at), "--mode", mode).exit_code == 0
    make_read_only(local)
    before = make_cases.tree_digest(local)
    child = run("pull", open_root / "store", local, "--mode", mode)
    assert child.exit_code == 10, child.text
    assert str(local) in child.text
    assert "read-only" in child.text
    assert "already" not in child.text
    assert make_cases.tree_digest(local) == before
    exact(local, expected(open_root), at)


# ---------------------------------------------------------------- P40


@pytest.mark.parametrize("mode", MODES)
def test_p40_of_two_pulls_at_once_one_works(mode: str, cases: Callable[[str], Path], server: Server) -> None:
    root = cases("p40_overlap_lock")
    expect = expected(root)
    publish(root, 0, 1, 2)
    busy = 0
    for n in range(20):
        local = local_copy(root, f"copy-{n}", mode)
        pair = [server.start("pull", root / "store", local, "--mode", mode) for _ in range(2)]
        codes = sorted(child.wait() for child in pair)
        assert codes in ([0, 0], [0, 4]), [child.text for child in pair]
        busy += codes == [0, 4]
        exact(local, expect, 2)
    # They start within a millisecond of each other; that none met the other would mean that there is no lock.
    assert busy > 0


@pytest.mark.parametrize("fault", ["fsync:2", "replace:2", "replace:4"])
def test_p40_a_killed_holder_blocks_nobody(fault: str, cases: Callable[[str], Path], server: Server) -> None:
    root = cases("p40_overlap_lock")
    publish(root, 0, 1, 2)
    child = server.run("pull", root / "store", root / "local", FAULT=f"{fault}:KILL")
    assert child.exit_code == -signal.SIGKILL
    began = time.monotonic()
    again = server.run("pull", root / "store", root / "local")
    assert again.exit_code == 0, again.text
    exact(root / "local", expected(root), 2)
    assert time.monotonic() - began < 5


def test_p40_a_killed_holder_blocks_nobody_who_starts_it_as_usual(cases: Callable[[str], Path]) -> None:
    root = cases("p40_overlap_lock")
    publish(root, 0, 1, 2)
    hook = f"{root / 'faults'}:{Path(__file__).parent.parent}"
    killed = command(
        "pull", root / "store", root / "local", PYTHONPATH=hook, FAULT="replace:2:KILL", FAULT_MATCH=str(root)
    )
    assert killed.returncode == -signal.SIGKILL
    assert recorded(root / "local") is None
    done = command("pull", root / "store", root / "local")
    assert done.returncode == 0, done.stderr
    exact(root / "local", expected(root), 2)


@pytest.mark.parametrize("mode", MODES)
def test_p40_a_stopped_holder_is_never_overtaken(mode: str, cases: Callable[[str], Path], server: Server) -> None:
    """However long it is stopped: the clock of the second pull is a day ahead."""
    root = cases("p40_overlap_lock")
    publish(root, 0, 1, 2)
    local = local_copy(root, "copy", mode)
    child = server.start("pull", root / "store", local, "--mode", mode, FAULT="replace:2:STOP", FAULT_MATCH=str(root))
    child.wait_stopped()
    try:
        before = make_cases.tree_digest(local)
        second = server.run("pull", root / "store", local, "--mode", mode, CLOCK="86400")
        assert second.exit_code == 4, second.text
        assert str(local) in second.text
        assert make_cases.tree_digest(local) == before
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert child.wait() == 0, child.text
    exact(local, expected(root), 2)


# ---------------------------------------------------------------- P33: locks


def test_p33_without_locks_nothing_is_pulled(cases: Callable[[str], Path], server: Server) -> None:
    root = cases("p33_no_flock_exdev")
    publish(root, 0, 1)
    local = root / "local"
    before = make_cases.tree_digest(local)
    child = server.run("pull", root / "store", local, FAULT="flock:*:ENOLCK")
    assert child.exit_code == ConfigError.exit_code
    assert str(local) in child.text
    assert "--lock" in child.text
    other = root / "elsewhere.lock"
    child = server.run("pull", root / "store", local, "--lock", other, FAULT="flock:*:ENOLCK")
    assert child.exit_code == ConfigError.exit_code
    assert str(other) in child.text
    assert make_cases.tree_digest(local) == before
    child = server.run("pull", root / "store", local, "--lock", other)
    assert child.exit_code == 0, child.text
    exact(local, expected(root), 1)


def test_p33_a_lock_elsewhere_holds_off_others_who_name_it(cases: Callable[[str], Path]) -> None:
    root = cases("p33_no_flock_exdev")
    publish(root, 0, 1)
    lock = root / "elsewhere.lock"
    holder = CheckpointTarget(root / "local", lock=str(lock))
    with Follower(str(root / "store"), holder) as follower:
        follower.prepare(0)
        refused(
            ["pull", root / "store", root / "local", "--lock", lock], str(root / "local"),
            error=Busy, local=root / "local",
        )  # fmt: skip
    cli_good("pull", root / "store", root / "local", "--lock", lock)
    exact(root / "local", expected(root), 1)


def test_p33_a_rename_across_devices_never_shows_a_part(cases: Callable[[str], Path], server: Server) -> None:
    """The first rename of each kind of file meets EXDEV; the file is copied beside its name, and renamed there."""
    root = cases("p33_no_flock_exdev")
    publish(root, 0, 1)
    for n in (1, 2):
        name, local = make_cases.shard_name(n, 2), shutil.copytree(root / "local", root / f"local-{n}")
        child = server.run("pull", root / "store", local, FAULT="replace:1:EXDEV", FAULT_MATCH=name)
        assert child.exit_code == 0, child.text
        exact(local, expected(root), 1)
        assert sorted(os.listdir(local)) == sorted([*os.listdir(root / "local"), ".deltackpt"])


# ---------------------------------------------------------------- Ctrl-C


INTERRUPTED = "deltackpt: interrupted; the same command may be run again\n"


def interrupts(server: Server, *arguments: str | Path) -> Iterator[int]:
    """Run a command with Ctrl-C at each piece of work, until it has fewer; yields after each run that was ended."""
    for number in range(1, 100):
        child = server.run(*arguments, "--threads", "2", INTERRUPT_AT=str(number))
        if child.wait() == 0:
            break
        assert (child.wait(), child.text) == (130, INTERRUPTED)
        yield number
    assert number > 2


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_in_the_middle_of_any_work_of_a_pull_ends_it_in_good_order(
    mode: str, cases: Callable[[str], Path], server: Server
) -> None:
    """The folder was unmapped while threads wrote to it, and the process died by SIGSEGV."""
    root = cases("p14_torn_apply")
    publish(root, 0, 1, 2)
    cli_good("pull", root / "store", root / "start", "--version", "0", "--mode", mode)
    dest = root / "dest"
    shutil.copytree(root / "start", dest, symlinks=True)
    for _ in interrupts(server, "pull", root / "store", dest, "--mode", mode):
        cli_good("pull", root / "store", dest, "--mode", mode)
        assert make_cases.same_ckpt(dest / "current" if mode == "switch" else dest, root / "v2")
        shutil.rmtree(dest)
        shutil.copytree(root / "start", dest, symlinks=True)
    assert make_cases.same_ckpt(dest / "current" if mode == "switch" else dest, root / "v2")


def test_ctrl_c_in_the_middle_of_any_work_of_a_publish_leaves_nothing(
    cases: Callable[[str], Path], server: Server
) -> None:
    root = cases("p14_torn_apply")
    publish(root, 0, 1)
    before = data_files(root / "store")
    for _ in interrupts(server, "publish", root / "v2", root / "store", "--no-anchors"):
        assert visible(root / "store") == [0, 1]
        assert data_files(root / "store") == before
    require_whole(root / "store")
    assert visible(root / "store") == [0, 1, 2]


def test_second_ctrl_c_ends_a_process_that_waits_for_its_work(cases: Callable[[str], Path], server: Server) -> None:
    root = cases("p14_torn_apply")
    publish(root, 0, 1)
    child = server.run("pull", root / "store", root / "dest", "--threads", "2", INTERRUPT_AT="1", INTERRUPT_TIMES="2")
    assert (child.wait(), child.text) == (-signal.SIGINT, "")
    cli_good("pull", root / "store", root / "dest")
    assert make_cases.same_ckpt(root / "dest", root / "v1")
    assert sorted(os.listdir(root / "dest" / ".deltackpt")) == ["apply.log", "state.json"]


def test_copy_of_a_killed_anchor_is_swept_by_the_next_publish(cases: Callable[[str], Path], server: Server) -> None:
    """A whole copy of the model stayed in the store for a day."""
    root = cases("p14_torn_apply")
    publish(root, 0, 1)
    child = server.run("anchor", root / "store", FAULT="link:1:KILL")
    assert child.wait() == -signal.SIGKILL
    (scratch,) = (root / "store" / ".tmp").glob("*/checkpoint")
    assert make_cases.same_ckpt(scratch, root / "v1")
    publish(root, 2)
    assert leftovers(root / "store") == []
