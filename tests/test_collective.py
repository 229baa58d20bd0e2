"""Publishing by many ranks: exact however the weights are cut, and whoever dies or stops on the way."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import ranks
import torch
from helpers import data_files, manifest_of, visible

from deltackpt.anchor import make_anchor
from deltackpt.board import Group, StoreBoard
from deltackpt.codec import Bytes
from deltackpt.follow import Follower
from deltackpt.manifest import Anchor
from deltackpt.prune import LITTER_S, prune_store, store_now
from deltackpt.publish import Publisher
from deltackpt.store import LocalStore, open_store
from deltackpt.tensors import TensorTarget
from deltackpt.verify import verify_store


@pytest.fixture(scope="module")
def warm() -> Iterator[ranks.Ranks]:
    with ranks.started() as found:
        yield found


def followed(store: Path, version: int | None = None, like: ranks.Arrays | None = None) -> ranks.Arrays:
    """Return the weights that a follower ends with, of int16 or of the same bits."""
    live = {n: torch.zeros(v.shape, dtype=torch.int16) for n, v in (like or ranks.state(0)).items()}
    with Follower(str(store), TensorTarget(live)) as follower:
        prepared = follower.prepare(version)
        assert prepared is not None
        prepared.apply()
    return {n: t.numpy() for n, t in live.items()}


def equal(left: ranks.Arrays, right: ranks.Arrays) -> None:
    assert set(left) == set(right)
    for name in left:
        assert np.array_equal(left[name], right[name]), name


def exact(store: Path, steps: dict[int, int]) -> None:
    """Assert that versions hold what the trainer had at these steps, and that the store has no fault or litter."""
    for version, step in steps.items():
        equal(followed(store, version), ranks.state(step))
    assert visible(store) == list(range(len(visible(store))))
    report = verify_store(open_store(str(store)), deep=True)
    assert not report.problems, report
    named = {s.key for v in visible(store) for s in manifest_of(store, v).shards}
    folders = {key.rpartition("/")[0] for key in named} | {
        a.key.rpartition("/")[0] for v in visible(store) if (a := manifest_of(store, v).anchor)
    }
    folders |= {anchor.folder for anchor in anchors(store).values() if anchor.folder}
    assert {f.rpartition("/")[0] for f in data_files(store)} <= folders


def anchors(store: Path) -> dict[int, Anchor]:
    """Return the records of anchors beside deltas."""
    found = sorted((store / "anchors").glob("*.json"))
    return {int(path.stem): msgspec.json.decode(path.read_bytes(), type=Anchor) for path in found}


# ---------------------------------------------------------------- however the weights are cut


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "auto") for kind in ("replicas", "rows", "columns", "hsdp", "experts", "stages", "mixed")),
        *((kind, "torch") for kind in ("stages", "mixed")),
    ],
)
def test_ranks_publish_what_one_process_would(warm: ranks.Ranks, tmp_path: Path, kind: str, backend: str) -> None:
    outcome = warm.run(tmp_path, kind, [0, 1, 2], backend=backend)
    assert outcome.codes == [0, 0, 0, 0], outcome.logs
    assert [outcome.versions(rank) for rank in range(4)] == [[0, 1, 2]] * 4
    exact(tmp_path / "store", {0: 0, 1: 1, 2: 2})
    with Publisher(str(tmp_path / "single"), run_id="run", threads=1) as publisher:
        for step in (0, 1, 2):
            manifest = publisher.publish(ranks.state(step), step=step)
            found = manifest_of(tmp_path / "store", step)
            assert (found.kind, found.state, found.layout) == (manifest.kind, manifest.state, manifest.layout)
            assert found.totals.changed == manifest.totals.changed
    files = [next((tmp_path / s).glob("data/*/model.safetensors")).read_bytes() for s in ("store", "single")]
    assert files[0] == files[1]


@pytest.mark.parametrize("kind", ["torch-fsdp", "torch-hsdp", "torch-tp", "torch-2d"])
def test_dtensors_are_published_as_the_whole_tensors_that_they_are(
    warm: ranks.Ranks, tmp_path: Path, kind: str
) -> None:
    outcome = warm.run(tmp_path, kind, [0, 1, 2])
    assert outcome.codes == [0, 0, 0, 0], outcome.logs
    for step in (0, 1, 2):
        with np.load(tmp_path / "run-0" / f"whole-{step}.npz") as whole:
            like = {n: whole[n] for n in whole.files}
        live = {n: torch.zeros(v.shape, dtype=torch.bfloat16) for n, v in like.items()}
        with Follower(str(tmp_path / "store"), TensorTarget(live)) as follower:
            prepared = follower.prepare(step)
            assert prepared is not None
            prepared.apply()
        equal({n: t.view(torch.int16).numpy() for n, t in live.items()}, like)


# ---------------------------------------------------------------- whoever dies, stops or fails

LEASE_S = 4.0


def test_stages_at_which_ranks_die_do_not_stop_their_replicas(warm: ranks.Ranks, tmp_path: Path) -> None:
    faults = {3: ("encode", 1, "KILL"), 0: ("decided", 3, "KILL")}
    outcome = warm.run(tmp_path, "hsdp", [0, 1, 2, 3, 4], lease_s=LEASE_S, faults=faults)
    assert outcome.codes == [-9, 0, 0, -9], outcome.logs
    assert outcome.versions(1) == outcome.versions(2) == [0, 1, 2, 3, 4]
    exact(tmp_path / "store", {k: k for k in range(5)})


@pytest.mark.parametrize(
    ("one", "leader"),
    [("before-arrival", "commit"), ("after-arrival", "committed"), ("upload", "plan"), ("uploaded", "claimed")],
)
def test_a_rank_and_then_the_one_that_commits_die(warm: ranks.Ranks, tmp_path: Path, one: str, leader: str) -> None:
    outcome = warm.run(
        tmp_path, "hsdp", [0, 1, 2], lease_s=LEASE_S, faults={3: (one, 1, "KILL"), 0: (leader, 2, "KILL")}
    )
    assert outcome.codes == [-9, 0, 0, -9], outcome.logs
    assert outcome.versions(1) == outcome.versions(2) == [0, 1, 2]
    exact(tmp_path / "store", {0: 0, 1: 1, 2: 2})


@pytest.mark.parametrize(("stage", "rank"), [("upload", 3), ("commit", 0)])
def test_a_rank_that_stops_follows_what_the_others_decided(
    warm: ranks.Ranks, tmp_path: Path, stage: str, rank: int
) -> None:
    outcome = warm.run(tmp_path, "hsdp", [0, 1, 2], lease_s=LEASE_S, faults={rank: (stage, 1, "STOP")})
    assert outcome.codes == [0, 0, 0, 0], outcome.logs
    assert [outcome.versions(r) for r in range(4)] == [[0, 1, 2]] * 4
    exact(tmp_path / "store", {0: 0, 1: 1, 2: 2})


def test_a_rank_that_cannot_write_leaves_its_part_to_a_replica(warm: ranks.Ranks, tmp_path: Path) -> None:
    outcome = warm.run(tmp_path, "hsdp", [0, 1, 2], faults={1: ("upload", 1, "RAISE")})
    assert outcome.codes == [0, 0, 0, 0], outcome.logs
    assert [outcome.versions(r) for r in range(4)] == [[0, 1, 2]] * 4
    exact(tmp_path / "store", {0: 0, 1: 1, 2: 2})


def test_a_rank_that_fails_after_it_has_told_its_part_leaves_it_to_the_others(
    warm: ranks.Ranks, tmp_path: Path
) -> None:
    """It removed its shards, though the others went on and committed them; and it went on from a base of before."""
    outcome = warm.run(tmp_path, "rows", [0, 1, 2], size=3, faults={1: ("claimed", 1, "RAISE")}, lease_s=LEASE_S)
    assert outcome.codes == [0, 0, 0], outcome.logs
    assert [line[:2] for line in outcome.said[1]] == [["version", 0], ["error", "StoreError"], ["error", "ConfigError"]]
    assert "rank 1 left a publish before it knew how it ended" in outcome.said[1][2][2]
    for rank in (0, 2):
        assert [line[:2] for line in outcome.said[rank]] == [["version", 0], ["version", 1], ["error", "Unavailable"]]
    equal(followed(tmp_path / "store", 1), ranks.state(1))


@pytest.mark.parametrize(("stage", "action"), [("encode", "KILL"), ("upload", "STOP")])
def test_a_part_that_only_one_rank_held_fails_the_publish_everywhere(
    warm: ranks.Ranks, tmp_path: Path, stage: str, action: str
) -> None:
    outcome = warm.run(tmp_path, "rows", [0, 1], lease_s=LEASE_S, faults={2: (stage, 1, action)})
    for rank in (0, 1, 3):
        (_, first), (kind, error, text) = outcome.said[rank][0][:2], outcome.said[rank][1][:3]
        assert (first, kind, error) == (0, "error", "Unavailable")
        assert "rank 2 made no progress for 4 s, and no other rank holds the same part of" in text
    assert visible(tmp_path / "store") == [0]
    # The whole group starts again, with another number of ranks: nothing of the failed try is left.
    again = warm.run(tmp_path, "rows", [1, 2], size=3)
    assert again.codes == [0, 0, 0], again.logs
    # The epoch was claimed by an empty version.
    assert [again.versions(rank) for rank in range(3)] == [[2, 3]] * 3
    exact(tmp_path / "store", {0: 0, 1: 0, 2: 1, 3: 2})


def test_a_full_version_survives_the_death_of_a_replica(warm: ranks.Ranks, tmp_path: Path) -> None:
    faults = {3: ("uploaded", 0, "KILL"), 0: ("file", 0, "KILL")}
    outcome = warm.run(tmp_path, "hsdp", [0, 1], lease_s=LEASE_S, faults=faults)
    assert outcome.codes == [-9, 0, 0, -9], outcome.logs
    assert outcome.versions(1) == outcome.versions(2) == [0, 1]
    exact(tmp_path / "store", {0: 0, 1: 1})


def test_a_board_in_the_store_outlives_any_rank(warm: ranks.Ranks, tmp_path: Path) -> None:
    outcome = warm.run(tmp_path, "hsdp", [0, 1], board="store", lease_s=LEASE_S, faults={0: ("claimed", 1, "KILL")})
    assert outcome.codes == [-9, 0, 0, 0], outcome.logs
    assert outcome.versions(1) == outcome.versions(2) == outcome.versions(3) == [0, 1]
    exact(tmp_path / "store", {0: 0, 1: 1})


# ---------------------------------------------------------------- a group that ends as a whole


def clean(store: Path) -> None:
    """Assert that every version holds what the trainer had at its step, and that the store has no fault or litter."""
    exact(store, {v: step for v in visible(store) if (step := manifest_of(store, v).step) is not None})
    assert list((store / ".tmp").glob("*")) == []


def test_a_first_version_that_is_killed_with_its_group_at_any_stage_is_swept(warm: ranks.Ranks, tmp_path: Path) -> None:
    for stage, rank in (("uploaded", 3), ("file", 0), ("decided", 0), ("commit", 0), ("committed", 0)):
        outcome = warm.run(tmp_path, "hsdp", [0], faults={rank: (stage, 0, "KILL")}, together=True)
        assert outcome.codes == [-9] * 4, outcome.logs
    # The last one had committed it, and left the pieces from which its files were made.
    assert visible(tmp_path / "store") == [0]
    assert warm.run(tmp_path, "hsdp", [0, 1]).versions(0) == [2, 3]
    clean(tmp_path / "store")


def test_a_version_that_is_killed_with_its_group_at_any_stage_is_swept_by_the_next(
    warm: ranks.Ranks, tmp_path: Path
) -> None:
    warm.run(tmp_path, "hsdp", [0])
    stages = [
        ("before-arrival", 3), ("plan", 0), ("encode", 1), ("upload", 2), ("uploaded", 3), ("decided", 0),
        ("commit", 0), ("committed", 0),
    ]  # fmt: skip
    for step, (stage, rank) in enumerate(stages):
        # What the group before this one was killed in is published first.
        outcome = warm.run(tmp_path, "hsdp", [step, step + 1], faults={rank: (stage, step + 1, "KILL")}, together=True)
        assert outcome.codes == [-9] * 4, outcome.logs
    outcome = warm.run(tmp_path, "rows", [8, 9], size=3)
    assert [line[0] for line in outcome.said[0]] == ["version", "version"]
    clean(tmp_path / "store")


# ---------------------------------------------------------------- anchors


def prune_later(store: Path) -> None:
    """Prune what is left of anchors: anybody may be at work on one, until nothing was added to it for a day."""
    prune_store(open_store(str(store)), keep_every=1, dry_run=False, clock=lambda of: store_now(of) + 2 * LITTER_S)


@pytest.mark.parametrize("kind", ["hsdp", "columns"])
def test_ranks_make_the_anchors_that_one_process_would(warm: ranks.Ranks, tmp_path: Path, kind: str) -> None:
    outcome = warm.run(tmp_path, kind, [0, 1, 2], anchors=True, rest=True)
    assert outcome.codes == [0, 0, 0, 0], outcome.logs
    with Publisher(str(tmp_path / "single"), run_id="run", threads=1, anchors=False) as publisher:
        for step in (0, 1, 2):
            publisher.publish(ranks.state(step), step=step)
    found = anchors(tmp_path / "store")
    assert sorted(found) == [1, 2]
    for version, made in found.items():
        alone = make_anchor(str(tmp_path / "single"), version)
        assert (made.files, made.fingerprints, made.state) == (alone.files, alone.fingerprints, alone.state)
        for file in made.files:
            left, right = (tmp_path / s / f.folder / file.name for s, f in (("store", made), ("single", alone)))
            assert left.read_bytes() == right.read_bytes()
    clean(tmp_path / "store")


def test_an_anchor_of_ranks_has_the_tensors_that_none_of_them_holds(warm: ranks.Ranks, tmp_path: Path) -> None:
    warm.run(tmp_path, "rows", [0])
    outcome = warm.run(tmp_path, "rows", [1], without="experts.1", frozen="carry", anchors=True, rest=True)
    assert outcome.codes == [0, 0, 0, 0], outcome.logs
    assert sorted(anchors(tmp_path / "store")) == [2]
    for path in tmp_path.glob("store/data/*0-*"):
        shutil.rmtree(path)  # what is left is the anchor
    equal(followed(tmp_path / "store", 2), ranks.state(1) | {"experts.1": ranks.state(0)["experts.1"]})


def test_an_anchor_whose_maker_dies_is_dropped_and_made_of_a_later_version(warm: ranks.Ranks, tmp_path: Path) -> None:
    faults = {3: ("anchor-piece", 1, "KILL"), 0: ("record", 2, "KILL")}
    outcome = warm.run(tmp_path, "hsdp", [0, 1, 2, 3], lease_s=2.0, faults=faults, anchors=True, rest=True)
    assert outcome.codes == [-9, 0, 0, -9], outcome.logs
    assert outcome.versions(1) == outcome.versions(2) == [0, 1, 2, 3]
    assert "version 1 is committed, but an anchor that is due was not made: rank 3: it made no" in outcome.logs[1]
    # That of version 2 was put by the next rank.
    assert sorted(anchors(tmp_path / "store")) == [2, 3]
    clean(tmp_path / "store")


def test_anchors_that_were_killed_with_their_group_are_whole_or_pruned(warm: ranks.Ranks, tmp_path: Path) -> None:
    store = tmp_path / "store"
    warm.run(tmp_path, "hsdp", [0])
    stages = [("anchor-piece", 1), ("anchor-told", 2), ("file", 0), ("recorded", 0)]
    for step, (stage, rank) in enumerate(stages):
        faults = {rank: (stage, step + 1, "KILL")}
        outcome = warm.run(tmp_path, "hsdp", [step + 1], faults=faults, anchors=True, rest=True, together=True)
        assert outcome.codes[rank] == -9, outcome.logs
    outcome = warm.run(tmp_path, "rows", [5], size=3, anchors=True, rest=True)
    assert outcome.codes == [0, 0, 0], outcome.logs
    assert {visible(store)[-3], visible(store)[-1]} <= set(anchors(store))
    prune_later(store)
    clean(store)


def test_no_anchor_is_made_of_a_base_that_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The put of a piece hangs for longer than the lease; meanwhile the next version is published."""
    monkeypatch.setattr("deltackpt.anchor.ANCHOR_SHARE", 0.0)
    hanging, released = threading.Event(), threading.Event()

    class Hanging(LocalStore):
        def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
            if "/piece-" in key and f"{1:020d}-anchor-" in key:
                hanging.set()
                assert released.wait(60)
            super().put(key, parts, if_absent=if_absent)

    store = Hanging(str(tmp_path / "store"))
    group = Group(0, 1, StoreBoard(store, "one"), lease_s=0.3)
    with Publisher(store, group=group, run_id="run", threads=1) as publisher:
        for step in (0, 1):
            publisher.publish(ranks.state(step), step=step)
        assert hanging.wait(60)
        publisher.publish(ranks.state(2), step=2)
        released.set()
    assert "an anchor that is due was not made: rank 0: putting a piece stood still for 0.3 s" in caplog.text
    assert 1 not in anchors(tmp_path / "store")
    prune_later(tmp_path / "store")
    clean(tmp_path / "store")


# ---------------------------------------------------------------- what is refused, and going on


def test_replicas_that_differ_are_refused_by_tensor_and_ranks(warm: ranks.Ranks, tmp_path: Path) -> None:
    outcome = warm.run(tmp_path, "hsdp", [0], wrong=2)
    for rank in range(4):
        kind, error, text, _ = outcome.said[rank][0]
        assert (kind, error) == ("error", "ConfigError")
        assert "tensor out differs between rank 0 and rank 2" in text
    assert visible(tmp_path / "store") == []


def test_tensors_that_no_rank_holds_are_named_or_carried_over(warm: ranks.Ranks, tmp_path: Path) -> None:
    with Publisher(str(tmp_path / "store"), run_id="run", threads=1) as publisher:
        publisher.publish(ranks.state(0), step=0)
    outcome = warm.run(tmp_path, "rows", [1], without="experts.1")
    for rank in range(4):
        assert outcome.said[rank][0][:2] == ["error", "ConfigError"]
        assert "tensor experts.1 and 0 others are held by no rank" in outcome.said[rank][0][2]
    again = warm.run(tmp_path, "rows", [1, 2], without="experts.1", frozen="carry")
    assert again.codes == [0, 0, 0, 0], again.logs
    found = followed(tmp_path / "store")
    equal(found, ranks.state(2) | {"experts.1": ranks.state(0)["experts.1"]})


def test_a_group_that_holds_an_earlier_version_rewinds_to_it(warm: ranks.Ranks, tmp_path: Path) -> None:
    warm.run(tmp_path, "rows", [0, 1, 2])
    again = warm.run(tmp_path, "columns", [1, 2], size=2, resume=True)
    assert again.codes == [0, 0], again.logs
    assert [line[:3] for line in again.said[0]] == [["version", 4, "rewind"], ["version", 5, "delta"]]
    exact(tmp_path / "store", {2: 2, 4: 1, 5: 2})
