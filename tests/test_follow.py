"""Followers: which requests they make, and what cannot keep them from a version."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import make_cases
import numpy as np
import pytest
from faults import FaultStore

from deltackpt import Publisher
from deltackpt.errors import FormatError
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.manifest import manifest_key
from deltackpt.publish import publish_folder
from deltackpt.store import LocalStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """v0 to v2, and `store` that holds them as versions 0 to 2."""
    make_cases.chain(tmp_path, 2)
    for v in range(3):
        publish_folder(str(tmp_path / f"v{v}"), str(tmp_path / "store"), anchors=False)
    return tmp_path


def test_named_version_that_was_seen_is_prepared_without_a_look_for_newer_ones(root: Path) -> None:
    store = FaultStore(LocalStore(root / "store"))
    with Follower(store, CheckpointTarget(root / "dest")) as follower:
        prepared = follower.prepare(0)
        assert prepared is not None
        prepared.apply()
        store.operations.clear()
        assert follower.prepare(0) is None
        assert store.operations == []
        assert follower.prepare() is not None
        assert f"get {manifest_key(3)}" in store.operations


def test_broken_manifest_keeps_nobody_from_a_version_that_was_seen_before_it(root: Path) -> None:
    with Follower(str(root / "store"), CheckpointTarget(root / "dest")) as follower:
        prepared = follower.prepare(1)
        assert prepared is not None
        prepared.apply()
        (root / "store" / manifest_key(3)).write_text("{}\n")
        prepared = follower.prepare(2)
        assert prepared is not None
        prepared.apply()
        assert make_cases.same_ckpt(root / "dest", root / "v2")
        with pytest.raises(FormatError):
            follower.prepare()
        with pytest.raises(FormatError):
            follower.prepare(3)


def catch_up(root: Path, requests: int) -> list[str]:
    """Bring a follower from version 0 to 50 at once; returns what was asked of the store, which likes `requests`."""
    weights = np.zeros(4096, np.float32)
    with contextlib.closing(Publisher(str(root / "store"), run_id="r", anchors=False)) as publisher:
        for version in range(51):
            weights[version::64] += 1
            publisher.publish({"w": weights})
            if version == 0:
                with Follower(str(root / "store"), CheckpointTarget(root / "dest")) as first:
                    seed = first.prepare()
                    assert seed is not None
                    seed.apply()
    store = FaultStore(LocalStore(root / "store"))
    store.requests = requests
    with Follower(store, CheckpointTarget(root / "dest")) as follower:
        follower.reader.load(since=0)
        prepared = follower.prepare()
        assert prepared is not None
        assert (prepared.apply(), len(prepared.plan.steps)) == (50, 50)
    return store.operations


@pytest.mark.parametrize("requests", [0, 12])
def test_catching_up_over_fifty_versions_is_one_request_a_manifest_and_one_a_payload(
    tmp_path: Path, requests: int
) -> None:
    asked = catch_up(tmp_path, requests)
    # The one that is not there twice: when the others were read, and when the newest was asked for.
    wanted = [f"get {manifest_key(v)}" for v in (*range(52), 51)]
    assert sorted(line for line in asked if "manifests/" in line) == wanted
    payload = [line for line in asked if "data/" in line]
    assert sorted(line.split("/")[1][:20] for line in payload) == [f"{v:020d}" for v in range(1, 51)]
    assert {line.split(" ")[0] for line in payload} == {"get"}
    rest = sorted(line.split("/")[0] for line in asked if "manifests/" not in line and "data/" not in line)
    assert rest == ["get layouts", "get placements", "get store.json", "keys anchors", "keys pruned", "keys pruned"]


def test_folder_that_another_pull_makes_at_the_same_moment_is_shared(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two first pulls into one new folder: the slower one said "File exists"."""
    real = os.makedirs

    def late(path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        if path == str(root / "dest") and not os.path.exists(path):
            os.mkdir(path)
        real(path, mode, exist_ok)

    monkeypatch.setattr(os, "makedirs", late)
    with Follower(str(root / "store"), CheckpointTarget(root / "dest")) as follower:
        prepared = follower.prepare()
        assert prepared is not None
        prepared.apply()
    assert make_cases.same_ckpt(root / "dest", root / "v2")
