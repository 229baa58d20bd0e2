"""Failure cases P14 to P18, P25 and P43: chains, torn applies, restarts, a long life.

RECOVER(v): after an interruption the next plain pull gives EXACT(v), and until then nothing calls the copy clean.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import make_cases
import pytest
from helpers import REPOSITORY, Expect, cli_good, cli_run, exact, expected, manifest_of, recorded, refused, visible
from processes import Server, Stopped, torn_apply

from deltackpt import backend
from deltackpt.anchor import make_anchor
from deltackpt.errors import ChainError, ConfigError, DeltaError, IntegrityError
from deltackpt.folder import CheckpointTarget, read_record
from deltackpt.follow import Follower
from deltackpt.publish import publish_folder
from deltackpt.reader import Reader
from deltackpt.store import open_store

MODES = ("replace", "switch", "in-place")
IN_PLACE_AND_REPLACE = ("in-place", "replace")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    warm = Server(tmp_path_factory.mktemp("children"))
    yield warm
    warm.close()


def publish_all(root: Path, count: int, store: str = "store") -> None:
    """Publish v0 to v<count - 1> of a case, without anchors beside deltas."""
    for v in range(count):
        publish_folder(str(root / f"v{v}"), str(root / store), anchors=False)


def remove_data(store: Path, *versions: int) -> None:
    """Delete shards and anchor files of versions, as somebody short of space does."""
    for version in versions:
        folders = list((store / "data").glob(f"{version:020d}-*"))
        assert folders or manifest_of(store, version).kind == "empty"
        for folder in folders:
            shutil.rmtree(folder)


def payload(store: Path, version: int) -> Path:
    """Return the only shard of a version."""
    (shard,) = manifest_of(store, version).shards
    return store / shard.key


def flip(store: Path, version: int, tensor: str) -> None:
    """Flip one bit in the middle of a frame of a version's delta, of the group that holds a tensor."""
    reader = Reader(open_store(store))
    reader.load()
    delta = reader.delta(version)
    (group,) = (n for n, g in enumerate(delta.layout.groups) if delta.layout.position[tensor] in g.tensor)
    (fetched,) = delta.fetched
    record = next(r for r in fetched.index.frames if r["group"] == group)
    path = payload(store, version)
    raw = bytearray(path.read_bytes())
    raw[int(record["offset"]) + int(record["stored"]) // 2] ^= 1
    path.write_bytes(raw)


def not_called_clean(local: Path, root: Path, expect: Expect, old: int, new: int) -> bool:
    """Assert that a copy is one of two versions, whole, or says that it is not clean. Returns whether it is dirty."""
    store = root / "store"
    result = cli_run("verify", local, "--against", store, "--json")
    record = read_record(str(local))
    if record is not None and record.pending is not None:
        assert result.exit_code == 50, result.output
        assert json.loads(result.stdout)["pending"] == record.pending.version
        return True
    found = make_cases.ckpt_digest(local)
    version = recorded(local)
    assert found == expect["versions"][f"v{old if version is None else version}"]
    assert version in (None, old, new)
    assert result.exit_code == 0, result.output
    return False


# ---------------------------------------------------------------- P14


@pytest.mark.parametrize("mode", IN_PLACE_AND_REPLACE)
@pytest.mark.parametrize("how", ["KILL", "TERM", "RAISE"])
def test_p14_an_apply_that_stops_after_any_tensor_is_rolled_forward(
    how: str, mode: str, cases: Callable[[str], Path], server: Server
) -> None:
    root = cases("p14_torn_apply")
    expect, store = expected(root), root / "store"
    publish_all(root, 4)
    stops = {"KILL": -signal.SIGKILL, "TERM": -signal.SIGTERM, "RAISE": 70}
    dirty = 0
    for k in range(16):
        local = shutil.copytree(root / "local", root / f"local-{k}")
        child = server.run(
            "pull", store, local, "--version", "1", "--mode", mode, STOP_AFTER=str(k), STOP_HOW=how, STOP_MODE=mode
        )
        assert child.exit_code == stops[how], child.text
        dirty += not_called_clean(local, root, expect, 0, 1)
        cli_good("pull", store, local, "--version", "1", "--mode", mode)
        exact(local, expect, 1)
        cli_good("pull", store, local, "--mode", mode)
        exact(local, expect, 3)
    # An in-place apply is dirty wherever it stops; a replace is still building beside the files.
    assert dirty == (16 if mode == "in-place" else 0)


@pytest.mark.parametrize("mode", MODES)
def test_p14_an_apply_killed_at_any_rename_is_rolled_forward(
    mode: str, cases: Callable[[str], Path], server: Server
) -> None:
    root = cases("p14_torn_apply")
    expect, store = expected(root), root / "store"
    publish_all(root, 4)
    killed = 0
    for k in range(1, 20):
        local = root / f"local-{k}"
        if mode == "switch":
            cli_good("pull", store, local, "--version", "0", "--mode", mode)
        else:
            shutil.copytree(root / "local", local)
        child = server.run("pull", store, local, "--version", "1", "--mode", mode, FAULT=f"replace:{k}:KILL")
        killed += child.exit_code == -signal.SIGKILL
        if mode != "switch":
            not_called_clean(local, root, expect, 0, 1)
        cli_good("pull", store, local, "--version", "1", "--mode", mode)
        exact(local, expect, 1)
        cli_good("pull", store, local, "--mode", mode)
        exact(local, expect, 3)
        if child.exit_code == 0:
            break
    # replace: the record, two files, their index, the record; in-place: two records; switch: a record and the link.
    assert killed == {"replace": 5, "in-place": 2, "switch": 2}[mode]


def test_p14_the_same_follower_goes_on_after_an_apply_that_raised(
    cases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took its own memory for the truth: where stores to a map leave the time of a file alone, as on tmpfs, it
    went on from half-written files."""
    root = cases("p14_torn_apply")
    expect, local = expected(root), root / "local"
    publish_all(root, 4)
    monkeypatch.setattr(backend, "apply", backend.apply)  # put back whatever happens
    monkeypatch.setattr("deltackpt.folder.CheckpointTarget._stamp", lambda _self, record: record.stamp)

    def fail() -> None:
        raise Stopped("stopped by the test")

    with Follower(str(root / "store"), CheckpointTarget(local, mode="in-place")) as follower:
        prepared = follower.prepare(1)
        assert prepared is not None
        torn_apply(7, fail)
        with pytest.raises(Stopped):
            prepared.apply()
        again = follower.prepare(3)
        assert again is not None
        assert again.previous == 1
        again.apply()
        exact(local, expect, 3)


# ---------------------------------------------------------------- P15


def states(root: Path) -> list[Path]:
    """Return local copies at v0, with the state of v2, and a fresh one."""
    at_2 = shutil.copytree(root / "v2", root / "at-2")
    return [root / "local", at_2, root / "fresh"]


def test_p15_pruned_deltas_are_bridged_by_a_later_anchor(cases: Callable[[str], Path]) -> None:
    root = cases("p15_pruned_chain")
    expect, store = expected(root), root / "store"
    publish_all(root, 7)
    make_anchor(str(store), 4)
    remove_data(store, 1, 2, 3)
    for local in states(root):
        assert cli_good("pull", store, local)["anchor"] == 4
        exact(local, expect, 6)


@pytest.mark.parametrize("state", ["local", "at-2", "fresh"])
def test_p15_without_a_later_anchor_no_delta_is_applied(
    state: str, cases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cases("p15_pruned_chain")
    store = root / "store"
    publish_all(root, 7)
    remove_data(store, 1, 2, 3)
    states(root)
    local, applied = root / state, []
    real = backend.apply
    monkeypatch.setattr(backend, "apply", lambda *a, **k: (applied.append(1), real(*a, **k))[1])
    if local.exists():
        message = refused(["pull", store, local], "no way", error=ChainError, local=local, store=store)
    else:
        message = refused(["pull", store, local], "no way", error=ChainError, store=store)
        assert not local.exists()
    missing = message.partition("deltas missing from the store: ")[2].partition(";")[0].split(", ")
    assert missing
    assert set(missing) <= {"1", "2", "3"}
    assert applied == []
    assert recorded(local) in (None, 0)


def test_p15_a_gap_of_manifests_is_named(cases: Callable[[str], Path]) -> None:
    root = cases("p15_pruned_chain")
    store, local = root / "store", root / "local"
    publish_all(root, 7)
    for version in (1, 2, 3):
        (store / "manifests" / f"{version:020d}.json").unlink()
    refused(["pull", store, local], "version 1", "missing", error=ChainError, local=local)


# ---------------------------------------------------------------- P16


def flipped(root: Path) -> tuple[Path, Path, bytes]:
    """Publish v0 to v2 and flip a byte of version 1's payload; returns store, shard and its good bytes."""
    store = root / "store"
    publish_all(root, 3)
    shard = payload(store, 1)
    good = shard.read_bytes()
    flip(store, 1, "model.norm.weight")
    return store, shard, good


@pytest.mark.parametrize("mode", IN_PLACE_AND_REPLACE)
@pytest.mark.parametrize("version", [1, 2])
def test_p16_a_flipped_payload_byte_is_refused_by_cli(version: int, mode: str, cases: Callable[[str], Path]) -> None:
    root = cases("p16_failed_apply_reported")
    expect, local = expected(root), root / "local"
    store, shard, good = flipped(root)
    refused(
        ["pull", store, local, "--version", str(version), "--mode", mode],
        "version 1", "tensors", "model.norm.weight", error=IntegrityError, local=local, store=store,
    )  # fmt: skip
    assert recorded(local) in (None, 0)
    shard.write_bytes(good)
    cli_good("pull", store, local, "--mode", mode)
    exact(local, expect, 2)


@pytest.mark.parametrize("mode", IN_PLACE_AND_REPLACE)
def test_p16_a_flipped_payload_byte_is_refused_by_sdk(mode: Any, cases: Callable[[str], Path]) -> None:
    root = cases("p16_failed_apply_reported")
    expect, local = expected(root), root / "local"
    store, shard, good = flipped(root)
    with Follower(str(store), CheckpointTarget(local, mode=mode)) as follower:
        refused(follower.prepare, "version 1", "model.norm.weight", error=IntegrityError, local=local, store=store)
        shard.write_bytes(good)
        prepared = follower.prepare()
        assert prepared is not None
        assert (prepared.previous, prepared.apply()) == (0, 2)
    exact(local, expect, 2)


def follow_once(root: Path, mode: Any) -> list[str]:
    """Follow with callbacks until the first update or error; returns what was called."""
    calls: list[str] = []
    stop = threading.Event()

    def resume(version: int) -> None:
        calls.append(f"resume {version}")
        stop.set()

    with Follower(str(root / "store"), CheckpointTarget(root / "local", mode=mode)) as follower:
        try:
            follower.run(stop, pause=lambda v: calls.append(f"pause {v}"), resume=resume)
        except DeltaError as exc:
            calls.append(str(exc))
    return calls


@pytest.mark.parametrize("mode", IN_PLACE_AND_REPLACE)
def test_p16_a_flipped_payload_byte_runs_no_callback(mode: str, cases: Callable[[str], Path]) -> None:
    root = cases("p16_failed_apply_reported")
    expect, local = expected(root), root / "local"
    _, shard, good = flipped(root)
    (message,) = follow_once(root, mode)
    assert "version 1" in message
    assert "model.norm.weight" in message
    assert recorded(local) in (None, 0)
    assert make_cases.ckpt_digest(local) == expect["versions"]["v0"]
    shard.write_bytes(good)
    assert follow_once(root, mode) == ["pause 2", "resume 2"]
    exact(local, expect, 2)


def flip_one_result_byte(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Make every apply that writes flip one byte of its result, in the last tensor by name."""
    real, writes = backend.apply, backend.SET if mode == "in-place" else backend.XOR

    def wrong(layout: Any, staged: Any, where: Any, *, mode: int = backend.XOR, threads: int | None = None) -> Any:
        from deltackpt.kernels import view

        found = real(layout, staged, where, mode=mode, threads=threads)
        if mode == writes:
            view(int(where[-1]), 1)[0] += 1
        return found

    monkeypatch.setattr(backend, "apply", wrong)


def test_p16_a_wrong_result_byte_is_refused_and_changes_nothing(
    cases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cases("p16_failed_apply_reported")
    expect, local, store = expected(root), root / "local", root / "store"
    publish_all(root, 3)
    with monkeypatch.context() as patched:
        flip_one_result_byte(patched, "replace")
        refused(
            ["pull", store, local, "--version", "1"], "version 1", "model.norm.weight",
            error=IntegrityError, local=local, store=store,
        )  # fmt: skip
        with Follower(str(store), CheckpointTarget(local)) as follower:
            refused(lambda: follower.prepare(1), "version 1", "model.norm.weight", error=IntegrityError, local=local)
        (message,) = follow_once(root, "replace")
        assert "model.norm.weight" in message
        assert recorded(local) in (None, 0)
    assert follow_once(root, "replace") == ["pause 2", "resume 2"]
    exact(local, expect, 2)


def test_p16_a_wrong_result_byte_in_place_is_never_a_version(
    cases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the new version was written before the result was looked at; the next pull believed it."""
    root = cases("p16_failed_apply_reported")
    expect, local, store = expected(root), root / "local", root / "store"
    publish_all(root, 3)
    with monkeypatch.context() as patched:
        flip_one_result_byte(patched, "in-place")
        result = cli_run("pull", store, local, "--version", "1", "--mode", "in-place", "--json")
        answer = json.loads(result.stdout)
        assert (answer["error"], result.exit_code) == ("Poisoned", 50)
        assert "version 1" in answer["message"]
        assert "model.norm.weight" in answer["message"]
        record = read_record(str(local))
        assert record is not None
        assert record.pending is not None
        assert record.version == 0
        assert cli_run("verify", local, "--against", store).exit_code == 50
        assert cli_run("pull", store, local, "--version", "1", "--mode", "in-place").exit_code == 50
    cli_good("pull", store, local, "--mode", "in-place")
    exact(local, expect, 2)


def test_p16_a_wrong_result_byte_in_place_runs_no_resume(
    cases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message named --reseed, which met the same error again."""
    root = cases("p16_failed_apply_reported")
    expect, local = expected(root), root / "local"
    publish_all(root, 3)
    with monkeypatch.context() as patched:
        flip_one_result_byte(patched, "in-place")
        paused, message = follow_once(root, "in-place")
        assert paused == "pause 2"
        assert "model.norm.weight" in message
        assert recorded(local) is None
    # The byte was wrong before the last delta was journaled: no journal has it, and a plain pull says so.
    assert cli_run("pull", root / "store", local, "--mode", "in-place").exit_code == 50
    cli_good("pull", root / "store", local, "--mode", "in-place", "--reseed")
    exact(local, expect, 2)


# ---------------------------------------------------------------- P17


def test_p17_an_anchor_made_beside_a_delta_holds_all_tensors(cases: Callable[[str], Path]) -> None:
    root = cases("p17_anchor_complete")
    expect, store = expected(root), root / "store"
    publish_all(root, 5)
    cli_good("anchor", store, "--version", "3")
    remove_data(store, 0, 1, 2)
    reader = Reader(open_store(store))
    reader.load()
    assert len(reader.anchor(3).checkpoint.layout.names) == 15
    cli_good("pull", store, root / "fresh-3", "--version", "3")
    exact(root / "fresh-3", expect, 3)
    cli_good("pull", store, root / "fresh-4")
    exact(root / "fresh-4", expect, 4)


# ---------------------------------------------------------------- P18


def files_of(store: Path) -> dict[str, tuple[str, ...]]:
    """Return the digests of all that makes up the versions of a store."""
    return {k: v for k, v in make_cases.tree_digest(store).items() if k.startswith(("manifests", "data"))}


@pytest.mark.parametrize("way", ["resume", "run-id"])
def test_p18_a_restarted_trainer_goes_on_only_with_leave(
    way: str, cases: Callable[[str], Path], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cases("p18_trainer_restart")
    expect, store, local = expected(root), root / "store", root / "local"
    run = ["--run-id", "run-7"] if way == "run-id" else []
    for v in range(6):
        cli_good("publish", root / f"v{v}", store, "--no-anchors", *run)
    cli_good("pull", store, local)
    exact(local, expect, 5)
    before = files_of(store)
    # A new process on another host: no local record.
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state-of-another-host"))
    new = root / "resume" / "v4"
    refused(["publish", new, store], "store is at version 5", "--resume", error=ConfigError, local=local, store=store)
    refused(
        ["publish", new, store, "--run-id", "run-8"], "store is at version 5", "run-id",
        error=ConfigError, local=local, store=store,
    )  # fmt: skip
    go_on = run or ["--resume"]
    child = server.run("publish", new, store, "--no-anchors", *go_on, "--json")
    assert child.exit_code == 0, child.text
    answer = json.loads(child.text)
    assert (answer["version"], answer["base"]) == (6, 5)
    assert {k: v for k, v in files_of(store).items() if k in before} == before
    cli_good("pull", store, local)
    exact(local, expect, 6, "resume/v4")
    # The host has its record now.
    child = server.run("publish", root / "resume" / "v5", store, "--no-anchors", *run, "--json")
    assert (child.exit_code, json.loads(child.text)["version"]) == (0, 7)
    cli_good("pull", store, local)
    exact(local, expect, 7, "resume/v5")


def test_p18_a_trainer_back_at_an_earlier_version_gets_a_new_number(
    cases: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cases("p18_trainer_restart")
    expect, store, local = expected(root), root / "store", root / "local"
    publish_all(root, 6)
    cli_good("pull", store, local)
    before = files_of(store)
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state-of-another-host"))
    answer = cli_good("publish", root / "v3", store, "--resume")
    assert (answer["version"], answer["kind"], answer["base"]) == (6, "rewind", 3)
    cli_good("pull", store, local)
    exact(local, expect, 6, "v3")
    assert cli_good("publish", root / "resume" / "v4", store, "--no-anchors")["version"] == 7
    cli_good("pull", store, local)
    exact(local, expect, 7, "resume/v4")
    assert {k: v for k, v in files_of(store).items() if k in before} == before


def test_p18_a_reader_never_goes_to_a_lower_number_unasked(cases: Callable[[str], Path]) -> None:
    """A store whose newest manifests cannot be seen is behind, not rewound."""
    root = cases("p18_trainer_restart")
    expect, store, local = expected(root), root / "store", root / "local"
    publish_all(root, 6)
    cli_good("pull", store, local)
    hidden = store / "manifests" / f"{5:020d}.json"
    raw = hidden.read_bytes()
    hidden.unlink()
    result = cli_run("pull", store, local)
    assert result.exit_code != 0, result.output
    exact(local, expect, 5)
    hidden.write_bytes(raw)
    cli_good("pull", store, local, "--version", "2")
    exact(local, expect, 2)


# ---------------------------------------------------------------- P25


def test_p25_killed_between_the_two_shards_it_says_so_and_recovers(
    cases: Callable[[str], Path], server: Server
) -> None:
    root = cases("p25_scale_and_weight_split")
    expect, store, local = expected(root), root / "store", root / "local"
    publish_all(root, 2)
    second = make_cases.shard_name(2, 2)
    # The second shard's rename is the one call of os.replace that names it.
    child = server.run("pull", store, local, FAULT="replace:1:KILL", FAULT_MATCH=second)
    assert child.exit_code == -signal.SIGKILL, child.text
    held = make_cases.ckpt_digest(local)
    assert held["l0.weight"] == expect["versions"]["v1"]["l0.weight"]
    assert held["l0.weight_scale_inv"] == expect["versions"]["v0"]["l0.weight_scale_inv"]
    assert recorded(local) is None
    assert not_called_clean(local, root, expect, 0, 1)
    cli_good("pull", store, local)
    exact(local, expect, 1)


def test_p25_killed_in_place_between_the_two_shards_it_says_so_and_recovers(
    cases: Callable[[str], Path], server: Server
) -> None:
    root = cases("p25_scale_and_weight_split")
    expect, store, local = expected(root), root / "store", root / "local"
    publish_all(root, 2)
    # By name l0.weight, l0.weight_scale_inv, l1.weight: whatever is cut off, weights and scales do not fit.
    child = server.run(
        "pull", store, local, "--mode", "in-place", STOP_AFTER="5", STOP_HOW="KILL", STOP_MODE="in-place"
    )
    assert child.exit_code == -signal.SIGKILL, child.text
    assert make_cases.ckpt_digest(local) not in expect["versions"].values()
    assert recorded(local) is None
    assert not_called_clean(local, root, expect, 0, 1)
    cli_good("pull", store, local)
    exact(local, expect, 1)


# ---------------------------------------------------------------- P43

SOAK = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.store import LocalStore

store, local, mode, stops = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
reads = []
real = LocalStore.read_into
def counted(self, key, out, *, offset=0):
    if key.startswith("data/"):
        reads.append(key)
    real(self, key, out, offset=offset)
LocalStore.read_into = counted
get = LocalStore.get
def counted_get(self, key, out):
    if key.startswith("data/"):
        reads.append(key)
    return get(self, key, out)
LocalStore.get = counted_get

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

found = {"descriptors": [], "rss": {}}
with Follower(store, CheckpointTarget(local, mode=mode)) as follower:
    follower.prepare(0)
    found["descriptors"].append(descriptors())
    for version in stops:
        prepared = follower.prepare(version)
        assert prepared.apply() == version
        found["rss"][version] = rss()
        found["descriptors"].append(descriptors())
found["reads"], found["distinct"] = len(reads), len(set(reads))
print(json.dumps(found))
"""


@pytest.mark.parametrize("mode", IN_PLACE_AND_REPLACE)
def test_p43_fifty_versions_at_once_or_one_by_one_cost_fifty_reads(mode: str, cases: Callable[[str], Path]) -> None:
    root = cases("p43_long_chain_soak")
    expect, store = expected(root), root / "store"
    publish_all(root, 51)
    for name, stops in (("at-once", [50]), ("one-by-one", list(range(1, 51)))):
        local = shutil.copytree(root / "local", root / name)
        child = subprocess.run(
            [sys.executable, "-c", SOAK, str(store), str(local), mode, json.dumps(stops)],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, text=True, capture_output=True, timeout=120,
        )  # fmt: skip
        assert (child.returncode, child.stderr) == (0, "")
        found = json.loads(child.stdout)
        assert (found["reads"], found["distinct"]) == (50, 50)
        before, *after = found["descriptors"]
        assert all(abs(n - before) <= 2 for n in after)
        if "10" in found["rss"]:
            assert found["rss"]["50"] - found["rss"]["10"] <= 20 << 20
        exact(local, expect, 50)
    assert visible(store) == list(range(51))
