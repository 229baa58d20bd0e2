"""Failure cases of a watcher: P21, P29, P41, and P40 as far as watch --once is concerned."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import make_cases
import pytest
from helpers import Expect, cli_run, command, exact, expected, holds, recorded, refused
from processes import Server
from watching import Hiding, Told, flip_data, follow, start, without_data

from deltackpt.anchor import make_anchor
from deltackpt.errors import ChainError
from deltackpt.publish import publish_folder
from deltackpt.store import LocalStore, Store

Build = Callable[[str], Path]
MODES = ("replace", "switch", "in-place")


def publish(root: Path, version: int) -> Callable[[], object]:
    """Return what publishes a version of a case."""
    return lambda: publish_folder(root / f"v{version}", root / "store", run_id="r", anchors=False)


def holding(root: Path, expect: Expect, version: int) -> Callable[[], None]:
    """Return what asserts EXACT(version) of the local copy."""
    return lambda: exact(root / "local", expect, version)


def nothing() -> None:
    pass


# ---------------------------------------------------------------- P21


@pytest.mark.parametrize("mode", MODES)
def test_p21_version_whose_payload_shows_late_is_waited_for(cases: Build, mode: str) -> None:
    root = cases("p21_manifest_before_shards")
    expect, told, hidden = expected(root), Told(), list[str]()
    if mode == "switch":
        (root / "local").rename(root / "seed")
    publish(root, 0)()

    def show_manifest_only() -> None:
        hidden.append("data/00000000000000000001-")
        publish(root, 1)()

    acts = [show_manifest_only, holding(root, expect, 0), nothing, hidden.clear, nothing, nothing]
    watcher, _ = follow(
        root / "store", root / "local", *acts, holding(root, expect, 1), mode=mode, told=told,
        wrap=lambda store: Hiding(store, hidden),
    )  # fmt: skip
    assert told.lines("error")
    assert all("data/00000000000000000001-" in line for line in told.lines("error"))
    assert (watcher.state.applied, watcher.state.last_error) == (1, None)


def test_p21_payload_that_never_shows_is_refused_after_the_set_time_and_v2_taken_when_whole(cases: Build) -> None:
    root = cases("p21_manifest_before_shards")
    expect, told = expected(root), Told()
    hidden = ["data/00000000000000000001-"]
    for version in (0, 1):
        publish(root, version)()

    def given_up() -> bool:
        return "given-up" in told.names()

    def whole_v2() -> None:
        holds(root / "local", expect, "v0")
        publish(root, 2)()
        # Version 2 builds on what nobody can see: whole it is with an anchor.
        make_anchor(str(root / "store"), 2)

    def hide(store: Store) -> Store:
        return Hiding(store, hidden)

    # The anchor is made by one who sees everything.
    acts = [given_up, whole_v2, nothing]
    follow(root / "store", root / "local", *acts, holding(root, expect, 2), told=told, wrap=hide, give_up_s=60.0)
    first_try, last_try = (told.lines("error")[n] for n in (0, -1))
    assert "data/00000000000000000001-" in first_try
    assert last_try.endswith("given up after 60 s, looking for a newer one")


def test_p21_once_refuses_by_name_after_the_set_time(cases: Build) -> None:
    root = cases("p21_manifest_before_shards")
    publish(root, 0)()
    watcher, _ = start(root / "store", root / "local")
    assert watcher.once().applied == 0
    publish(root, 1)()
    back = without_data(root / "store", 1)

    def once() -> None:
        watcher, _ = start(root / "store", root / "local", *[nothing] * 100, give_up_s=10.0)
        watcher.once()

    # One who looks only once names the file too.
    for action in (once, ["pull", root / "store", root / "local"]):
        refused(action, f"data/{1:020d}-", "version 1", error=ChainError, local=root / "local", store=root / "store")
    back()
    watcher, _ = start(root / "store", root / "local")
    assert watcher.once().applied == 1
    exact(root / "local", expected(root), 1)


def test_p21_manifest_is_the_last_thing_that_a_publisher_writes(cases: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    root = cases("p21_manifest_before_shards")
    written: list[str] = []
    real = LocalStore.put

    def put(self: LocalStore, key: str, parts: list[bytes], *, if_absent: bool = True) -> None:
        real(self, key, parts, if_absent=if_absent)
        written.append(key)

    monkeypatch.setattr(LocalStore, "put", put)
    for version in range(3):
        written.clear()
        publish(root, version)()
        assert written[-1] == f"manifests/{version:020d}.json"
        assert [key for key in written if key.startswith("manifests/")] == written[-1:]


# ---------------------------------------------------------------- P29


def test_p29_each_version_of_another_process_arrives_within_one_poll(cases: Build) -> None:
    root = cases("p29_stale_listing")
    expect, told = expected(root), Told()

    def from_elsewhere(version: int) -> Callable[[], None]:
        def act() -> None:
            done = command("publish", root / f"v{version}", root / "store", "--run-id", "r", "--no-anchors")
            assert done.returncode == 0, done.stderr

        return act

    from_elsewhere(0)()
    acts = [act for version in (1, 2, 3) for act in (from_elsewhere(version), holding(root, expect, version))]
    watcher, _ = follow(root / "store", root / "local", holding(root, expect, 0), *acts, told=told)
    assert told.lines("error") == []
    assert watcher.state.applied == 3


# ---------------------------------------------------------------- P40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    warm = Server(tmp_path_factory.mktemp("children"))
    yield warm
    warm.close()


def published(root: Path) -> Expect:
    for version in range(3):
        publish(root, version)()
    return expected(root)


@pytest.mark.parametrize("mode", MODES)
def test_p40_of_a_pull_and_a_watch_at_once_one_works(mode: str, cases: Build, server: Server) -> None:
    root = cases("p40_overlap_lock")
    expect = published(root)
    for n in range(10):
        local = root / f"local-{n}"
        common = (root / "store", local, "--mode", mode)
        started = [server.start("watch", *common, "--once"), server.start("pull", *common)]
        codes = [child.wait() for child in started]
        assert set(codes) <= {0, 4}, [child.text for child in started]
        assert 0 in codes
        exact(local, expect, 2)


@pytest.mark.parametrize("fault", ["replace:1:KILL", "rename:1:KILL", "fsync:2:KILL", "flock:1:KILL"])
def test_p40_a_killed_watch_blocks_nobody(fault: str, cases: Build, server: Server) -> None:
    root = cases("p40_overlap_lock")
    expect = published(root)
    killed = server.run("watch", root / "store", root / "local", "--once", "--mode", "replace", FAULT=fault)
    assert killed.exit_code == -signal.SIGKILL
    again = server.run("watch", root / "store", root / "local", "--once", "--mode", "replace")
    assert again.exit_code == 0, again.text
    exact(root / "local", expect, 2)


def test_p40_a_stopped_pull_is_never_overtaken_by_a_watch(cases: Build, server: Server) -> None:
    root = cases("p40_overlap_lock")
    expect = published(root)
    holder = server.start("pull", root / "store", root / "local", FAULT="replace:1:STOP", FAULT_MATCH="model-00001-of-")
    holder.wait_stopped()
    before = make_cases.tree_digest(root / "local")
    result = cli_run("watch", root / "store", root / "local", "--once")
    assert result.exit_code == 4
    assert result.stderr.endswith(f"deltackpt: {root}/local is held by another process; wait for it to end\n")
    assert make_cases.tree_digest(root / "local") == before
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.wait() == 0
    exact(root / "local", expect, 2)


# ---------------------------------------------------------------- P41


@pytest.mark.parametrize("mode", MODES)
def test_p41_bad_payload_and_a_failing_hook_are_logged_and_survived(cases: Build, mode: str) -> None:
    root = cases("p41_watch_survives")
    expect, told = expected(root), Told()
    if mode == "switch":
        (root / "local").rename(root / "seed")
    for version in (0, 1):
        publish(root, version)()

    def bad_v2() -> None:
        publish(root, 2)()
        flip_data(root / "store", 2)

    def repair_after_two_failures() -> bool:
        if len(told.lines("error")) < 2:
            return False
        flip_data(root / "store", 2)
        return True

    hook = (
        f'echo "$DELTACKPT_VERSION" >>{root}/hooks; [ $DELTACKPT_VERSION != 3 ] || [ $(grep -c 3 {root}/hooks) != 1 ]'
    )
    acts = [
        bad_v2, repair_after_two_failures, holding(root, expect, 2),
        publish(root, 3), holding(root, expect, 3), publish(root, 4), holding(root, expect, 4),
    ]  # fmt: skip
    watcher, _ = follow(root / "store", root / "local", *acts, mode=mode, command=hook, told=told)
    errors = told.lines("error")
    assert [("version 2 cannot be had" in line, "the hook (--exec) for version 3 " in line) for line in errors] == [
        (True, False), (True, False), (False, True)
    ]  # fmt: skip
    assert (root / "hooks").read_text().split() == ["1", "2", "3", "3", "4"]
    assert (watcher.state.applied, watcher.state.last_error, watcher.state.failures) == (4, None, 3)
    assert recorded(root / "local") == 4


def test_p41_error_that_nobody_foresaw_ends_the_process(cases: Build) -> None:
    root = cases("p41_watch_survives")
    publish(root, 0)()

    def broken(store: Store) -> Store:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        follow(root / "store", root / "local", wrap=broken)
