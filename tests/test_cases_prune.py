"""Failure cases P22 and P32, and of P15 what prune has to do with it: EXACT whatever is pruned, and when."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import cli_good, data_files, exact, expected, manifest_of, recorded, refused, visible

from deltackpt.anchor import make_anchor
from deltackpt.errors import ChainError, IntegrityError
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.lease import leases
from deltackpt.manifest import pruned_key
from deltackpt.mirror import mirror_store
from deltackpt.prune import prune_store
from deltackpt.publish import publish_folder
from deltackpt.reader import Reader
from deltackpt.store import LocalStore

Cases = Callable[[str], Path]
FAR = 4_070_908_800.0
"""The first second of the year 2099."""


def publish_all(root: Path, count: int, *, anchors: tuple[int, ...] = ()) -> Path:
    """Publish v0 to v<count - 1>, with anchors beside the named ones."""
    for v in range(count):
        publish_folder(str(root / f"v{v}"), str(root / "store"), anchors=False)
        if v in anchors:
            make_anchor(str(root / "store"), v)
    return root / "store"


def prune(store: Path, *options: str) -> None:
    cli_good("prune", store, "--yes", "--grace", "0", *options)


def versions_with_data(store: Path) -> list[int]:
    return sorted({int(name.split("/")[1][:20]) for name in data_files(store)})


# ---------------------------------------------------------------- P15


@pytest.mark.parametrize("start", ["local", "v2", None])
def test_p15_pruned_chain_is_crossed_by_the_anchor(cases: Cases, start: str | None) -> None:
    root = cases("p15_pruned_chain")
    store = publish_all(root, 7, anchors=(4,))
    if start == "v2":
        shutil.rmtree(root / "local")
        shutil.copytree(root / "v2", root / "local")
        assert cli_good("pull", store, root / "local", "--version", "2")["version"] == 2
    elif start is None:
        shutil.rmtree(root / "local")
    prune(store)
    assert versions_with_data(store) == [4, 5, 6]
    answer = cli_good("pull", store, root / "local")
    assert (answer["anchor"], answer["deltas"]) == (4, 2)
    exact(root / "local", expected(root), 6)


def test_p15_chain_without_an_anchor_is_not_pruned(cases: Cases) -> None:
    root = cases("p15_pruned_chain")
    store = publish_all(root, 7)
    prune(store)
    assert versions_with_data(store) == [0, 1, 2, 3, 4, 5, 6]
    cli_good("pull", store, root / "local")
    exact(root / "local", expected(root), 6)


@pytest.mark.parametrize("start", ["local", None])
def test_p15_hole_that_no_anchor_bridges_is_refused_before_any_delta_is_applied(
    cases: Cases, start: str | None
) -> None:
    root = cases("p15_pruned_chain")
    store = publish_all(root, 7)
    for v in (1, 2, 3):
        (store / pruned_key(v)).parent.mkdir(exist_ok=True)
        (store / pruned_key(v)).write_text("{}\n")
        shutil.move(next((store / "data").glob(f"{v:020d}-*")), root / f"data-{v}")
    if start is None:
        refused(["pull", store, root / "fresh"], "1, 2, 3", error=ChainError, store=store)
        assert not (root / "fresh").exists() or recorded(root / "fresh") is None
        return
    refused(["pull", store, root / "local"], "1, 2, 3", error=ChainError, local=root / "local", store=store)
    make_anchor_of_what_is_there(root, store)
    cli_good("pull", store, root / "local")
    exact(root / "local", expected(root), 6)


def make_anchor_of_what_is_there(root: Path, store: Path) -> None:
    """Bring the data back for as long as it takes to make an anchor of version 4."""
    for v in (1, 2, 3):
        (store / pruned_key(v)).unlink()
        name = manifest_of(store, v).shards[0].key.split("/")[1]
        shutil.move(root / f"data-{v}", store / "data" / name)
    make_anchor(str(store), 4)
    prune(store)


# ---------------------------------------------------------------- P22


@pytest.fixture
def p22(cases: Cases) -> Path:
    """v0 to v8 in a store without a newer anchor, so that a reader at v2 goes by deltas."""
    root = cases("p22_prune_race")
    publish_all(root, 9)
    return root


def at_delta(monkeypatch: pytest.MonkeyPatch, version: int, act: Callable[[], object]) -> None:
    """Do something once, when a reader is about to fetch a version's delta."""
    real, acted = LocalStore.get, []

    def get(self: LocalStore, key: str, out: memoryview) -> int:
        if key.startswith(f"data/{version:020d}-") and not acted:
            acted.append(True)
            act()
        return real(self, key, out)

    monkeypatch.setattr(LocalStore, "get", get)


@pytest.mark.parametrize("mode", ["replace", "switch", "in-place"])
def test_p22_reader_paused_in_the_middle_gets_there_by_a_newer_anchor(
    p22: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    store = p22 / "store"
    if mode == "switch":
        shutil.rmtree(p22 / "local")
    cli_good("pull", store, p22 / "local", "--version", "2", "--mode", mode)

    def meanwhile() -> None:
        make_anchor(str(store), 7)
        prune(store, "--keep", "2")
        assert versions_with_data(store) == [7, 8]

    at_delta(monkeypatch, 5, meanwhile)
    # By one thread, so that what comes next is not fetched before.
    answer = cli_good("pull", store, p22 / "local", "--mode", mode, "--threads", "1")
    assert (answer["version"], answer["anchor"], answer["deltas"]) == (8, 7, 1)
    exact(p22 / "local", expected(p22), 8)


def test_p22_reader_within_the_grace_is_not_disturbed(p22: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = p22 / "store"

    def meanwhile() -> None:
        make_anchor(str(store), 7)
        assert cli_good("prune", store, "--keep", "2", "--yes")["bytes_removed"] == 0

    at_delta(monkeypatch, 5, meanwhile)
    answer = cli_good("pull", store, p22 / "local", "--threads", "1")
    assert (answer["anchor"], answer["deltas"]) == (None, 6)
    exact(p22 / "local", expected(p22), 8)


def test_p22_reader_between_two_pulls(p22: Path) -> None:
    store = p22 / "store"
    assert cli_good("pull", store, p22 / "local", "--version", "4")["deltas"] == 2
    make_anchor(str(store), 7)
    prune(store, "--keep", "2")
    refused(
        ["pull", store, p22 / "local", "--version", "5"], "version 5", error=ChainError, local=p22 / "local",
        store=store,
    )  # fmt: skip
    cli_good("pull", store, p22 / "local")
    exact(p22 / "local", expected(p22), 8)


def test_p22_newest_anchor_and_all_after_it_are_never_removed(p22: Path) -> None:
    store = p22 / "store"
    prune(store, "--keep", "2")
    assert versions_with_data(store) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    make_anchor(str(store), 6)
    prune(store, "--keep", "1")
    assert versions_with_data(store) == [6, 7, 8]
    prune(store, "--budget", "1")
    assert versions_with_data(store) == [6, 7, 8]


def test_p22_lease_of_the_slow_reader_keeps_its_way(p22: Path) -> None:
    store = p22 / "store"
    cli_good("pull", store, p22 / "local", "--version", "7")
    shutil.copytree(p22 / "local", p22 / "watched")
    from deltackpt.lease import Lease, put_lease

    made = Lease(
        format=1, id="slow", store_id=Reader(LocalStore(store)).info.store_id, created=0.0, expires=FAR,
        duration_s=900.0, version=7,
    )  # fmt: skip
    put_lease(LocalStore(store), made)
    make_anchor(str(store), 8)
    prune(store)
    assert [lease.id for lease in leases(LocalStore(store))] == ["slow"]
    # Its version with all that it rests on, and the deltas from there, which are fewer bytes than the anchor.
    assert versions_with_data(store) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    shutil.rmtree(store / "followers")
    prune(store)
    assert versions_with_data(store) == [8]
    cli_good("pull", store, p22 / "watched")
    exact(p22 / "watched", expected(p22), 8)


# ---------------------------------------------------------------- P32


def touch(root: Path, when: Callable[[Path], float]) -> None:
    for path in sorted(root.rglob("*")):
        os.utime(path, (when(path), when(path)))


def test_p32_version_that_was_prefetched_and_then_replaced_is_never_applied(cases: Cases) -> None:
    root = cases("p32_same_size_same_mtime")
    for who in ("A", "B"):
        publish_folder(str(root / "v0"), str(root / "store"), run_id="r", anchors=False) if who == "A" else None
        if who == "A":
            shutil.copytree(root / "store", root / "first")
        publish_folder(
            str(root / who), str(root / ("store" if who == "A" else "first")), run_id="r", base=str(root / "v0"),
            anchors=False,
        )  # fmt: skip
    with Follower(str(root / "store"), CheckpointTarget(root / "local")) as follower:
        prepared = follower.prepare()
        assert prepared is not None
        assert prepared.version == 1
        # B in A's place: names of A's files where there are such, equal sizes and times.
        shutil.rmtree(root / "store")
        shutil.copytree(root / "first", root / "store")
        touch(root / "store", lambda _: 1_700_000_000.0)
        prepared.discard()
    cli_good("pull", root / "store", root / "local")
    exact(root / "local", expected(root), 1, "B")


def test_p32_other_bytes_under_the_same_name_size_and_time_are_refused(cases: Cases) -> None:
    root = cases("p32_same_size_same_mtime")
    store = publish_all(root, 4)
    with Follower(str(store), CheckpointTarget(root / "local")) as follower:
        prepared = follower.prepare(1)
        assert prepared is not None
        prepared.discard()
    shard = store / manifest_of(store, 1).shards[0].key
    raw = shard.read_bytes()
    other = bytearray(raw)
    other[-1] ^= 1
    info = shard.stat()
    shard.write_bytes(bytes(other))
    os.utime(shard, (info.st_atime, info.st_mtime))
    refused(["pull", store, root / "local"], "version 1", error=IntegrityError, local=root / "local", store=store)
    with pytest.raises(IntegrityError, match="version 1"):
        mirror_store(LocalStore(store), LocalStore(root / "mirror"))
    shard.write_bytes(raw)
    cli_good("pull", store, root / "local")
    exact(root / "local", expected(root), 3)
    mirror_store(LocalStore(store), LocalStore(root / "mirror"))
    cli_good("pull", root / "mirror", root / "newcomer")
    exact(root / "newcomer", expected(root), 3)


@pytest.mark.parametrize("clock", ["all zero", "newest zero, oldest 2099", "all 2099"])
def test_p32_silly_clocks_change_nothing(cases: Cases, clock: str) -> None:
    root = cases("p32_same_size_same_mtime")
    store = publish_all(root, 4, anchors=(2,))
    prune(store, "--keep", "100")
    cli_good("prune", store, "--yes")

    def when(path: Path) -> float:
        if clock == "newest zero, oldest 2099":
            return FAR if f"{0:020d}" in str(path) else 0.0
        return 0.0 if clock == "all zero" else FAR

    touch(store, when)
    cli_good("pull", store, root / "local")
    exact(root / "local", expected(root), 3)
    # Declared an hour ago or not: that does not hang on the times of files.
    assert cli_good("prune", store, "--yes")["bytes_removed"] == 0
    assert versions_with_data(store) == [0, 1, 2, 3]
    touch(store, when)
    prune_store(LocalStore(store), dry_run=False, grace_s=0.0)
    assert versions_with_data(store) == [2, 3]
    mirror_store(LocalStore(store), LocalStore(root / "mirror"))
    for name in ("store", "mirror"):
        cli_good("pull", root / name, root / f"newcomer-{name}")
        exact(root / f"newcomer-{name}", expected(root), 3)
    assert visible(store) == [0, 1, 2, 3]
