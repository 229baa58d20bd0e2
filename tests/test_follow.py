"""Followers: which requests they make, and what cannot keep them from a version."""

from __future__ import annotations

from pathlib import Path

import make_cases
import pytest
from faults import FaultStore

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
