"""Immutable objects from a mirror or a cache, manifests from the store; two buckets of two servers."""

from __future__ import annotations

import secrets
from pathlib import Path

import make_cases
import pytest
from faults import FaultStore
from helpers import cli_good, cli_run, errors, visible
from servers import BUCKET, ENVIRONMENT, Server, proxy
from watching import follow

# On the path since servers was imported.
from fileserver import serving  # isort: skip

from deltackpt.errors import IntegrityError, NotFound
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.lease import leases
from deltackpt.manifest import immutable
from deltackpt.mirror import mirror_store
from deltackpt.publish import publish_folder
from deltackpt.store import Elsewhere, LocalStore, open_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """v0 to v3, `store` with all of them, `copy` with those up to v2."""
    make_cases.chain(tmp_path, 3)
    for v in range(4):
        publish_folder(str(tmp_path / f"v{v}"), str(tmp_path / "store"), run_id="r", anchors=False)
        if v == 2:
            mirror_store(LocalStore(tmp_path / "store"), LocalStore(tmp_path / "copy"))
    return tmp_path


@pytest.mark.parametrize(
    ("key", "is_immutable"),
    [
        ("data/00000000000000000001-aa/0.safetensors", True), ("layouts/ab.json", True), ("placements/ab.json", True),
        ("partitions/ab.json", True), ("files/ab", True), ("store.json", False),
        ("manifests/00000000000000000001.json", False), ("anchors/00000000000000000001.json", False),
        ("pruned/00000000000000000001.json", False), ("channels/eval/0.json", False), ("followers/a.json", False),
        ("tags/best.json", False), ("probe/x", False),
    ],
)  # fmt: skip
def test_immutable_is_what_is_never_written_again(key: str, is_immutable: bool) -> None:
    assert immutable(key) is is_immutable


def test_only_immutable_objects_come_from_the_copies_and_what_they_lack_from_the_store(root: Path) -> None:
    store, copies = FaultStore(LocalStore(root / "store")), FaultStore(LocalStore(root / "copy"))
    with Follower(Elsewhere(store, copies), CheckpointTarget(root / "dest")) as follower:
        for version in (2, 3):
            store.operations.clear()
            prepared = follower.prepare(version)
            assert prepared is not None
            prepared.apply()
            assert make_cases.same_ckpt(root / "dest", root / f"v{version}")
            asked = {line.split(" ")[1].partition("/")[0] for line in store.operations}
            assert not asked & {"layouts", "placements", "files"}
            assert ("data" in asked) == (version == 3)
    assert {line.split(" ")[1].partition("/")[0] for line in copies.operations} >= {"data", "layouts", "placements"}
    assert all(immutable(line.split(" ")[1]) for line in copies.operations)


def test_object_that_nobody_has_is_not_found_and_writes_go_to_the_store(root: Path) -> None:
    both = open_store(root / "store", data_url=root / "copy")
    with pytest.raises(NotFound, match=f"not in {root}/store"):
        both.size("data/x")
    both.put("data/x", [b"12"])
    assert (both.size("data/x"), list(both.keys("data/", after="data/w"))) == (2, ["data/x"])
    assert both.modified("data/x") > 0
    assert not (root / "copy" / "data" / "x").exists()
    both.delete("data/x")
    assert not (root / "store" / "data" / "x").exists()


def test_damaged_copy_is_refused_and_without_it_the_pull_works(root: Path) -> None:
    (shard,) = (root / "copy").glob(f"data/{1:020d}-*/*")
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    result = cli_run("pull", root / "store", root / "dest", "--data-url", root / "copy")
    assert result.exit_code == IntegrityError.exit_code
    assert "checksum differs" in errors(result)
    assert cli_good("pull", root / "store", root / "dest")["version"] == 3
    assert make_cases.same_ckpt(root / "dest", root / "v3")


def test_pull_watch_and_verify_read_data_over_plain_http(root: Path, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with serving(root, tmp_path / "log") as server:
        copy = f"{server.endpoint}/copy"
        assert cli_good("pull", root / "store", root / "dest", "--data-url", copy)["version"] == 3
        assert make_cases.same_ckpt(root / "dest", root / "v3")
        asked = server.requests()
        assert any("GET /copy/data/" in line and line.endswith(" 206") for line in asked)
        assert all(immutable(line.split(" ")[1].removeprefix("/copy/")) for line in asked if "/copy/" in line)
        assert cli_good("verify", root / "store", "--deep", "--data-url", copy)["ok"]
        assert cli_good("verify", root / "dest", "--against", root / "store", "--data-url", copy)["ok"]
        watched = root / "watched"
        done = cli_run("watch", root / "store", watched, "--once", "--mode", "replace", "--data-url", copy)
        assert done.exit_code == 0, errors(done)
        assert make_cases.same_ckpt(watched, root / "v3")
    # The mirror's, and the watcher's.
    assert sorted(one.version or 0 for one in leases(LocalStore(root / "store"))) == [2, 3]
    assert not (root / "copy" / "followers").exists()


def test_place_of_the_copies_that_is_not_there_is_named(root: Path) -> None:
    result = cli_run("pull", root / "store", root / "dest", "--data-url", root / "nowhere")
    assert result.exit_code == 10
    assert f"{root}/nowhere does not exist or cannot be seen" in errors(result)


def test_watcher_goes_on_where_copies_are_behind(root: Path) -> None:
    both = open_store(root / "store", data_url=root / "copy")
    watcher, _ = follow(both, root / "dest", mode="replace")
    assert (watcher.state.applied, watcher.state.last_error) == (3, None)


def test_mirror_goes_from_one_server_to_another(seaweedfs: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy is the other server: what is written by it is asked of no other."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    here, there = f"s3://{BUCKET}/{secrets.token_hex(6)}", f"s3://{BUCKET}/{secrets.token_hex(6)}"
    with proxy(seaweedfs) as other:
        src, dst = f"endpoint={seaweedfs.endpoint}", f"endpoint={other.endpoint}"
        cli_good("mirror", root / "store", here, "--dst-option", src)
        assert other.requests == []
        done = cli_good("mirror", here, there, "--storage-option", src, "--dst-option", dst)
        assert done["head"] == 3
        other.reset()
        source = ("--storage-option", src, "--data-url", there, "--data-option", dst)
        assert cli_good("pull", here, root / "dest", *source)["version"] == 3
        assert sum("/data/" in line for line in other.requests) >= 4
        assert not any("manifests" in line for line in other.requests)
    assert make_cases.same_ckpt(root / "dest", root / "v3")
    assert visible(root / "store") == [0, 1, 2, 3]
