"""Prune removes what nothing needs, and nothing else: two phases, any death, any clock, readers exact throughout."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import make_cases
import pytest
from faults import FaultStore
from helpers import cli_good, cli_run, manifest_of, refused

from deltackpt.anchor import make_anchor
from deltackpt.codec import Bytes
from deltackpt.errors import ChainError, ConfigError, FormatError, NotFound, Unavailable
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.lease import Lease, lease_key, put_lease, set_channel
from deltackpt.manifest import LEVEL, Pruned, decode, encode, pruned_anchor_key, pruned_key
from deltackpt.prune import PruneReport, delete_tag, prune_store, set_tag, store_now, tags
from deltackpt.publish import publish_folder
from deltackpt.reader import Reader
from deltackpt.store import LocalStore
from deltackpt.verify import verify_store

NOW = 1_900_000_000.0
ALL = ["0", "1", "2", "3", "4", "4+", "5", "6", "6+", "7", "8"]
NEWEST = ["6+", "7", "8"]


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """v0 to v8, and a store of them with anchors beside versions 4 and 6."""
    root = tmp_path_factory.mktemp("master")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        make_cases.chain(root, 8)
        for v in range(9):
            publish_folder(str(root / f"v{v}"), str(root / "store"), anchors=False, run_id="run")
        for v in (4, 6):
            make_anchor(str(root / "store"), v)
        yield root


@pytest.fixture
def path(master: Path, tmp_path: Path) -> Path:
    """A store of one's own."""
    shutil.copytree(master / "store", tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> LocalStore:
    return LocalStore(path)


def data(path: Path) -> list[str]:
    """Versions whose data is there, 4+ for the anchor beside version 4."""
    names = [p.name for p in (path / "data").iterdir()]
    return sorted(f"{int(n[:20])}{'+' if n[20:].startswith('-anchor-') else ''}" for n in names)


def records(path: Path) -> list[str]:
    """Pieces that are declared gone, named as in `data`."""
    names = [p.name for p in (path / "pruned").glob("0*.json")] if (path / "pruned").exists() else []
    return sorted(f"{int(n[:20])}{'+' if '-anchor' in n else ''}" for n in names)


def kept(report: PruneReport) -> list[str]:
    return [f"{r.version}{'+' if r.kind == 'anchor' else ''}" for r in report.rows if r.state == "kept"]


def why(report: PruneReport, version: int, kind: str) -> tuple[str, ...]:
    (row,) = [r for r in report.rows if (r.version, r.kind) == (version, kind)]
    return row.why


def at_once(store: LocalStore, **options: object) -> PruneReport:
    """Declare and remove in one run."""
    return prune_store(store, dry_run=False, grace_s=0.0, clock=lambda _: NOW, **options)  # type: ignore[arg-type]  # any


def pull(path: Path, dest: Path, version: int | None = None) -> Path:
    with Follower(str(path), CheckpointTarget(dest)) as follower:
        prepared = follower.prepare(version)
        assert prepared is not None
        prepared.apply()
    return dest


def exact(master: Path, path: Path, *versions: int) -> None:
    """A newcomer gets each of the versions, bit for bit."""
    for version in versions:
        dest = path.parent / f"newcomer-{version}"
        shutil.rmtree(dest, ignore_errors=True)
        pull(path, dest, version)
        assert make_cases.ckpt_digest(dest) == make_cases.ckpt_digest(master / f"v{version}")


def lease(
    store: LocalStore, id: str, *, version: int | None, staged: int | None = None, expires: float = NOW + 60
) -> Lease:
    store_id = Reader(store).info.store_id
    made = Lease(
        format=LEVEL, id=id, store_id=store_id, created=expires - 900, expires=expires, duration_s=900,
        version=version, staged=staged,
    )  # fmt: skip
    put_lease(store, made)
    return made


# ---------------------------------------------------------------- two phases


def test_dry_run_changes_nothing_and_says_what_stays_and_why(store: LocalStore, path: Path) -> None:
    before = make_cases.tree_digest(path)
    report = prune_store(store)
    assert make_cases.tree_digest(path) == before
    assert report.dry_run
    assert kept(report) == NEWEST
    assert why(report, 6, "anchor") == ("newest chain", "newest anchor")
    assert why(report, 7, "delta") == ("newest chain",)
    assert why(report, 5, "delta") == ()
    assert {r.state for r in report.rows} == {"kept", "removable"}
    sizes = {(r.version, r.kind): r.nbytes for r in report.rows}
    assert sizes[7, "delta"] == manifest_of(path, 7).totals.stored
    assert report.kept == sizes[6, "anchor"] + sizes[7, "delta"] + sizes[8, "delta"]
    assert report.kept + report.removable == sum(sizes.values())


def test_first_run_declares_and_a_run_after_the_grace_removes(store: LocalStore, path: Path, master: Path) -> None:
    now = NOW

    def run() -> PruneReport:
        return prune_store(store, dry_run=False, grace_s=3600.0, clock=lambda _: now)

    report = run()
    assert (report.removed, report.due_s, data(path)) == (0, 3600.0, ALL)
    assert records(path) == ["0", "1", "2", "3", "4", "4+", "5", "6"]
    assert decode((path / pruned_key(3)).read_bytes(), Pruned, "") == Pruned(LEVEL, 3, NOW)
    exact(master, path, 6, 7, 8)
    now += 3599
    report = run()
    assert (report.removed, report.due_s, data(path)) == (0, 1.0, ALL)
    now += 1
    report = run()
    assert (report.removed > 0, report.removable, report.due_s) == (True, 0, None)
    assert data(path) == NEWEST
    exact(master, path, 6, 7, 8)
    again = run()
    assert (again.removed, again.removable) == (0, 0)


def test_manifests_and_objects_by_content_are_never_removed(store: LocalStore, path: Path) -> None:
    folders = ("manifests", "layouts", "placements", "files", "anchors")
    before = {f: sorted(os.listdir(path / f)) for f in folders if (path / f).exists()}
    at_once(store)
    assert {f: sorted(os.listdir(path / f)) for f in before} == before
    report = verify_store(store, deep=True)
    assert (report.problems, report.anchors, report.rebuilt) == ((), (6,), 3)


def test_time_is_that_of_the_store(store: LocalStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "modified", lambda _self, _key: 5_000.0)
    assert store_now(store) == 5_000.0
    prune_store(store, dry_run=False)
    assert decode((path / pruned_key(0)).read_bytes(), Pruned, "").declared == 5_000.0


@pytest.mark.parametrize("record", [b"{}\n", b"", encode(Pruned(LEVEL, 1, NOW + 1e9))])
def test_record_without_a_time_or_from_the_future_is_made_anew(store: LocalStore, path: Path, record: bytes) -> None:
    (path / "pruned").mkdir()
    (path / pruned_key(1)).write_bytes(record)
    prune_store(store, dry_run=False, grace_s=60.0, clock=lambda _: NOW)
    assert decode((path / pruned_key(1)).read_bytes(), Pruned, "") == Pruned(LEVEL, 1, NOW)
    assert data(path) == ALL


def test_what_is_needed_again_within_the_grace_is_whole_again(store: LocalStore, path: Path, master: Path) -> None:
    prune_store(store, dry_run=False, clock=lambda _: NOW)
    prune_store(store, dry_run=False, keep=8, clock=lambda _: NOW + 10_000)
    # The deltas into the two anchors are still not needed, and their time has come.
    assert (data(path), records(path)) == ([d for d in ALL if d not in ("4", "6")], ["4", "6"])
    exact(master, path, 1, 3, 5)


# ---------------------------------------------------------------- what stays


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, NEWEST),
        ({"keep": 2}, NEWEST),
        ({"keep": 4}, ["4+", "5", *NEWEST]),
        ({"keep": 6}, ["0", "1", "2", "3", "4+", "5", *NEWEST]),
        ({"keep_every": 5}, ["0", "4+", "5", *NEWEST]),
        ({"keep_every": 3}, ["0", "1", "2", "3", *NEWEST]),
        ({"keep": 100}, ["0", "1", "2", "3", "4+", "5", *NEWEST]),
    ],
)
def test_kept_versions_keep_their_chain_back_to_an_anchor(
    store: LocalStore, path: Path, master: Path, options: dict[str, int], expected: list[str]
) -> None:
    at_once(store, **options)
    assert data(path) == expected
    newest = range(max(0, 9 - options.get("keep", 0)), 9)
    every = range(0, 9, options["keep_every"]) if "keep_every" in options else ()
    exact(master, path, *{*newest, *every, 6, 7, 8})


def test_budget_gives_up_the_oldest_first(store: LocalStore, path: Path) -> None:
    everything = prune_store(store, keep=100).kept
    assert kept(prune_store(store, budget=everything)) == ["0", "1", "2", "3", "4+", "5", *NEWEST]
    # Versions 0 to 3 are one chain: giving up the first gains nothing, giving up the last frees all.
    assert kept(prune_store(store, budget=everything - 1)) == ["4+", "5", *NEWEST]
    report = prune_store(store, budget=1)
    assert kept(report) == NEWEST
    assert report.over == report.kept - 1


def test_budget_gives_up_what_the_other_rules_keep(store: LocalStore) -> None:
    report = prune_store(store, keep_every=4)
    assert kept(report) == ["0", "4+", *NEWEST]
    tight = prune_store(store, keep_every=4, budget=report.kept - 1)
    assert kept(tight) == ["4+", *NEWEST]
    assert tight.over == 0


def test_lease_keeps_its_version_and_its_way_to_the_head(store: LocalStore, path: Path) -> None:
    lease(store, "sampler-1", version=5)
    reader = Reader(store)
    reader.load()
    assert [s.version for s in reader.plan(8, local=5).steps] == [6, 7, 8]
    report = at_once(store)
    assert data(path) == ["4+", "5", "6", *NEWEST]
    assert why(report, 6, "delta") == ("lease sampler-1",)


def test_lease_for_which_an_anchor_is_the_shorter_way_keeps_its_version_only(store: LocalStore, path: Path) -> None:
    lease(store, "sampler-1", version=2)
    reader = Reader(store)
    reader.load()
    assert reader.plan(8, local=2).anchor == 6
    at_once(store)
    assert data(path) == ["0", "1", "2", *NEWEST]


def test_lease_keeps_what_is_staged_before_the_first_apply(store: LocalStore, path: Path) -> None:
    lease(store, "new", version=None, staged=5)
    at_once(store)
    assert data(path) == ["4+", "5", "6", *NEWEST]


def test_lease_holds_by_its_own_clock_or_by_that_of_the_store(store: LocalStore, path: Path) -> None:
    made = lease(store, "slow-clock", version=5, expires=1000.0)
    written = store.modified(lease_key(made.id))
    report = prune_store(store, dry_run=False, grace_s=1e9, clock=lambda _: written + 899)
    assert "5" in kept(report)
    report = prune_store(store, dry_run=False, grace_s=1e9, clock=lambda _: written + 900)
    assert kept(report) == NEWEST


def test_lease_on_another_stores_versions_keeps_nothing(store: LocalStore) -> None:
    made = lease(store, "sampler-1", version=5)
    foreign = {**json.loads(encode(made)), "store_id": "another"}
    (Path(store.root) / lease_key("sampler-1")).write_text(json.dumps(foreign))
    assert kept(prune_store(store)) == NEWEST


def test_leases_may_be_elsewhere(store: LocalStore, tmp_path: Path) -> None:
    elsewhere = LocalStore(tmp_path / "leases")
    elsewhere.put("store.json", [b"{}"])
    made = lease(store, "sampler-1", version=5)
    store.delete(lease_key("sampler-1"))
    put_lease(elsewhere, made)
    assert kept(prune_store(store)) == NEWEST
    assert kept(prune_store(store, lease_store=elsewhere)) == ["4+", "5", "6", *NEWEST]


def test_lease_that_cannot_be_read_stops_everything(store: LocalStore, path: Path) -> None:
    lease(store, "sampler-1", version=5)
    (path / lease_key("sampler-1")).write_text('{"format": 1}\n')
    with pytest.raises(FormatError, match="sampler-1"):
        at_once(store)
    assert (data(path), records(path)) == (ALL, [])


def test_channel_keeps_its_version(store: LocalStore, path: Path, master: Path) -> None:
    set_channel(store, "eval", 3)
    report = at_once(store)
    assert data(path) == ["0", "1", "2", "3", *NEWEST]
    assert why(report, 3, "delta") == ("channel eval",)
    exact(master, path, 3)


def test_tag_keeps_its_version_until_it_is_removed(store: LocalStore, path: Path, master: Path) -> None:
    assert set_tag(store, "best", 5) == 5
    assert set_tag(store, "best", 5) == 5
    assert tags(store) == {"best": 5}
    with pytest.raises(ConfigError, match="tag best is on version 5 already"):
        set_tag(store, "best", 6)
    report = at_once(store)
    assert data(path) == ["4+", "5", *NEWEST]
    assert why(report, 5, "delta") == ("tag best",)
    delete_tag(store, "best")
    with pytest.raises(ConfigError, match="has no tag best; it has none"):
        delete_tag(store, "best")
    at_once(store)
    assert data(path) == NEWEST
    with pytest.raises(ChainError, match="version 5 cannot be rebuilt"):
        set_tag(store, "late", 5)


def test_name_of_a_tag_is_a_plain_word(store: LocalStore) -> None:
    for name in ("", "a/b", "../x", ".hidden", "x y", "x\n"):
        with pytest.raises(ConfigError, match="no name of a tag"):
            set_tag(store, name, 8)


def test_chain_without_a_newer_anchor_loses_nothing(store: LocalStore, path: Path) -> None:
    for name in ("anchors", "data"):
        for found in (path / name).glob("*"):
            if name == "anchors":
                found.unlink()
            elif "-anchor-" in found.name:
                shutil.rmtree(found)
    report = prune_store(store)
    assert (report.removable, kept(report)) == (0, ["0", "1", "2", "3", "4", "5", "6", "7", "8"])


def test_anchor_with_a_file_cut_short_is_not_relied_on(store: LocalStore, path: Path) -> None:
    (folder,) = (path / "data").glob(f"{6:020d}-anchor-*")
    weights = sorted(folder.glob("*.safetensors"))[0]
    weights.write_bytes(weights.read_bytes()[:-1])
    assert kept(prune_store(store)) == ["4+", "5", "6", "7", "8"]


def test_nothing_is_removed_when_the_head_cannot_be_rebuilt(store: LocalStore, path: Path) -> None:
    (folder,) = (path / "data").glob(f"{7:020d}-*")
    shutil.rmtree(folder)
    with pytest.raises(ChainError, match="nothing is pruned, the newest version cannot be rebuilt"):
        at_once(store)
    assert records(path) == []


def test_store_without_a_version_has_nothing_to_prune(tmp_path: Path) -> None:
    empty = LocalStore(tmp_path / "empty")
    empty.put("store.json", [b'{"format": 1, "store_id": "x", "created": 0}\n'])
    with pytest.raises(NotFound, match="no version yet"):
        prune_store(empty)


def test_rewound_head_keeps_the_chain_that_it_rests_on(store: LocalStore, path: Path, master: Path) -> None:
    assert publish_folder(str(master / "v2"), str(path), run_id="run", resume=True, anchors=False).kind == "rewind"
    at_once(store)
    # The newest anchor and what follows it stay too: a follower that is at version 8 undoes from there.
    assert data(path) == ["0", "1", "2", *NEWEST]
    with Follower(str(path), CheckpointTarget(path.parent / "dest")) as follower:
        prepared = follower.prepare()
        assert prepared is not None
        assert prepared.apply() == 9
    assert make_cases.ckpt_digest(path.parent / "dest") == make_cases.ckpt_digest(master / "v2")


def test_trainer_that_goes_back_to_a_pruned_version_commits_a_delta(
    store: LocalStore, path: Path, master: Path
) -> None:
    """A rewind to a version that nobody can rebuild would have cut off every follower."""
    at_once(store)
    manifest = publish_folder(str(master / "v2"), str(path), run_id="run", resume=True, anchors=False)
    assert (manifest.version, manifest.kind, manifest.base) == (9, "delta", 8)
    pull(path, path.parent / "dest")
    assert make_cases.ckpt_digest(path.parent / "dest") == make_cases.ckpt_digest(master / "v2")


class Meanwhile(LocalStore):
    """Calls something before the first prune record is put."""

    def __init__(self, root: Path, call: Callable[[], object]) -> None:
        super().__init__(root)
        self._call: Callable[[], object] | None = call

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        if key.startswith("pruned/0") and self._call is not None:
            call, self._call = self._call, None
            call()
        super().put(key, parts, if_absent=if_absent)


def test_rewind_that_comes_between_is_seen_before_anything_is_removed(path: Path, master: Path) -> None:
    def rewind() -> None:
        publish_folder(str(master / "v2"), str(path), run_id="run", resume=True, anchors=False)

    at_once(Meanwhile(path, rewind))
    assert {"0", "1", "2", *NEWEST} <= set(data(path))
    at_once(LocalStore(path))
    assert not {"0", "1", "2"} & set(records(path))
    pull(path, path.parent / "dest")
    assert make_cases.ckpt_digest(path.parent / "dest") == make_cases.ckpt_digest(master / "v2")


def test_lease_that_comes_between_keeps_the_data(path: Path) -> None:
    at_once(Meanwhile(path, lambda: lease(LocalStore(path), "late", version=5)))
    assert data(path) == ["4+", "5", "6", *NEWEST]


def test_versions_that_come_between_are_left_alone(path: Path, master: Path) -> None:
    def publish() -> None:
        publish_folder(str(master / "v0"), str(path), run_id="run", anchors=False)

    at_once(Meanwhile(path, publish))
    assert data(path) == ["6+", "7", "8", "9"]


def test_version_by_reference_is_kept_only_while_it_is_the_way(tmp_path: Path, master: Path) -> None:
    path = tmp_path / "store"
    for v in range(3):
        publish_folder(str(master / f"v{v}"), str(path), anchors=False, anchor_ref=v == 0, run_id="run")
    store = LocalStore(path)
    assert kept(prune_store(store)) == ["0", "1", "2"]
    make_anchor(str(path), 1, anchor_source=str(master / "v0"))
    at_once(store)
    assert data(path) == ["1+", "2"]


# ---------------------------------------------------------------- readers


def test_reader_plans_around_a_record_without_trying(store: LocalStore, path: Path) -> None:
    prune_store(store, dry_run=False, clock=lambda _: NOW)
    watched = FaultStore(store)
    reader = Reader(watched)
    reader.load()
    assert reader.anchors().keys() == {6}
    way = reader.plan(8, local=3)
    assert (way.anchor, [s.version for s in way.steps]) == (6, [7, 8])
    assert [o for o in watched.operations if o.split()[1].startswith("data/")] == []
    assert reader.pruned() == frozenset(range(7))
    assert reader.pruned(since=4) == frozenset({4, 5, 6})


def test_follower_one_version_behind_asks_for_no_records(store: LocalStore) -> None:
    watched = FaultStore(store)
    reader = Reader(watched)
    reader.load(since=7)
    before = len(watched.operations)
    reader.plan(8, local=7)
    assert watched.operations[before:] == []


def test_version_that_cannot_be_rebuilt_is_refused_by_name(store: LocalStore, path: Path) -> None:
    at_once(store)
    refused(
        lambda: pull(path, path.parent / "dest", 3), "version 3", "anchors: 6", error="ChainError", store=path
    )  # fmt: skip


def test_anchor_that_goes_between_plan_and_fetch_is_replaced_by_a_newer_one(
    store: LocalStore, path: Path, master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower had planned on the anchor, and ended with NotFound when it was gone."""
    shutil.rmtree(next((path / "data").glob(f"{6:020d}-anchor-*")))
    (path / "anchors" / f"{6:020d}.json").unlink()
    target, began = CheckpointTarget(path.parent / "dest"), []
    stage = target.stage

    def slow(reader: Reader, way: object) -> object:
        if not began:
            began.append(way)
            make_anchor(str(path), 8)
            at_once(LocalStore(path))
        return stage(reader, way)  # type: ignore[arg-type]  # what it was given

    monkeypatch.setattr(target, "stage", slow)
    with Follower(str(path), target) as follower:
        prepared = follower.prepare(8)
        assert prepared is not None
        assert prepared.plan.anchor == 8
        prepared.apply()
    assert began[0].anchor == 4
    assert make_cases.ckpt_digest(path.parent / "dest") == make_cases.ckpt_digest(master / "v8")


def test_pruned_anchor_is_never_made_again(store: LocalStore, path: Path) -> None:
    set_tag(store, "way", 4)
    (path / "pruned").mkdir()
    (path / pruned_anchor_key(4)).write_bytes(encode(Pruned(LEVEL, 4, NOW)))
    before = data(path)
    with pytest.raises(ConfigError, match="the anchor of version 4 was pruned"):
        make_anchor(str(path), 4)
    assert data(path) == before


# ---------------------------------------------------------------- litter


def _attempt(path: Path, name: str, age_s: float) -> Path:
    file = path / "data" / name / "00000.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"x" * 10)
    os.utime(file, (NOW - age_s, NOW - age_s))
    return file


def test_attempts_that_lost_or_died_are_swept(store: LocalStore, path: Path) -> None:
    gone = [
        _attempt(path, f"{7:020d}-{'a' * 16}", 0),
        _attempt(path, f"{6:020d}-anchor-{'b' * 16}", 0),
        _attempt(path, f"{8:020d}-anchor-{'c' * 16}", 86401),
        _attempt(path, f"{9:020d}-{'d' * 16}", 86401),
    ]
    stays = [
        _attempt(path, f"{8:020d}-anchor-{'e' * 16}", 86399),
        _attempt(path, f"{9:020d}-{'f' * 16}", 86399),
        _attempt(path, "somebody-elses", 1e6),
    ]
    assert prune_store(store, keep=100).litter in (2, 3, 4)
    report = at_once(store, keep=100)
    assert report.litter == 4
    assert [f.exists() for f in gone] == [False] * 4
    assert [f.exists() for f in stays] == [True] * 3


def test_manifest_that_names_foreign_data_does_not_make_prune_remove_it(store: LocalStore, path: Path) -> None:
    """Keys in a manifest are the writer's words: what prune removes is only ever data of the version itself."""
    survey_of = manifest_of(path, 3)
    assert survey_of.shards[0].key.startswith(f"data/{3:020d}-")
    from deltackpt.prune import Piece, _Survey

    survey = _Survey(Reader(store), {"data/x": {"data/x/y"}}, folders={Piece(3): "data/x"})
    assert survey.keys(Piece(3)) == []


# ---------------------------------------------------------------- death


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """v0 to v3, and a store of them with an anchor beside version 2."""
    root = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        make_cases.chain(root, 3)
        for v in range(4):
            publish_folder(str(root / f"v{v}"), str(root / "store"), anchors=False)
        make_anchor(str(root / "store"), 2)
        yield root


def _operations(small: Path, folder: Path) -> int:
    shutil.copytree(small / "store", folder)
    watched = FaultStore(LocalStore(folder))
    prune_store(watched, dry_run=False, grace_s=0.0)
    assert data(folder) == ["2+", "3"]
    return len(watched.operations)


@pytest.mark.parametrize("when", ["before", "after"])
def test_death_at_any_operation_leaves_readers_exact_and_the_next_run_finishes(
    small: Path, tmp_path: Path, when: str
) -> None:
    count = _operations(small, tmp_path / "count")
    assert count > 40
    for at in range(1, count + 1):
        path = tmp_path / f"store-{at}"
        shutil.copytree(small / "store", path)
        dying = FaultStore(LocalStore(path), at=at, when=when)  # type: ignore[arg-type]  # a literal
        with contextlib.suppress(Unavailable):
            prune_store(dying, dry_run=False, grace_s=0.0)
            # Only an answer that was an error of its own, such as that there is no next manifest, cannot be lost.
            assert when == "after"
        dest = pull(path, tmp_path / f"dest-{at}")
        assert make_cases.ckpt_digest(dest) == make_cases.ckpt_digest(small / "v3"), dying.operations[-1]
        prune_store(LocalStore(path), dry_run=False, grace_s=0.0)
        assert (data(path), records(path)) == (["2+", "3"], ["0", "1", "2"]), dying.operations[-1]
        assert verify_store(LocalStore(path)).problems == ()
        shutil.rmtree(path)
        shutil.rmtree(dest)


def test_two_at_once_do_the_same_work(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    shutil.copytree(small / "store", path)
    at_once(Meanwhile(path, lambda: at_once(LocalStore(path))))
    assert (data(path), records(path)) == (["2+", "3"], ["0", "1", "2"])


# ---------------------------------------------------------------- commands


def test_command_is_a_dry_run_without_yes(path: Path) -> None:
    before = make_cases.tree_digest(path)
    result = cli_run("prune", path)
    assert result.exit_code == 0
    assert make_cases.tree_digest(path) == before
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["VERSIONS", "DATA", "SIZE", "STATE"]
    assert [line.split()[:2] for line in lines[1:-2]] == [
        ["0", "full"], ["1-6", "delta"], ["4", "anchor"], ["6", "anchor"], ["7-8", "delta"],
    ]  # fmt: skip
    assert lines[5].endswith("kept       newest chain")
    assert lines[-2].endswith("not needed; nothing was changed")
    assert lines[-1] == "--yes declares it gone, and a run 1 h later removes it"


def test_command_removes_with_yes(path: Path) -> None:
    answer = cli_good("prune", path, "--keep", "2", "--yes")
    assert (answer["dry_run"], answer["bytes_removed"], data(path)) == (False, 0, ALL)
    assert 3590 < answer["due_s"] <= 3600
    answer = cli_good("prune", path, "--keep", "2", "--yes", "--grace", "0")
    assert (answer["bytes_removable"], answer["due_s"], data(path)) == (0, None, NEWEST)
    assert answer["bytes_removed"] > 0
    kinds = {(d["version"], d["kind"]): d["state"] for d in answer["data"]}
    assert (kinds[0, "full"], kinds[4, "anchor"], kinds[8, "delta"]) == ("removed", "removed", "kept")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7", 7), ("7B", 7), ("7k", 7000), ("2KiB", 2048), ("1.5 GB", 1_500_000_000), ("1TiB", 1 << 40)],
)
def test_bytes_are_written_as_people_do(text: str, nbytes: int) -> None:
    from deltackpt.cli_store import _Bytes

    assert _Bytes().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "5 iB", "1.2.3", "٣"])
def test_bytes_that_are_no_number_are_a_usage_error(path: Path, text: str) -> None:
    result = cli_run("prune", path, "--budget", text)
    assert result.exit_code == 2
    assert result.stderr.startswith("deltackpt: Invalid value for '--budget'")


def test_tag_command_sets_lists_and_removes(path: Path) -> None:
    assert cli_good("tag", path, "best", "4")["version"] == 4
    assert cli_good("tag", path, "last")["version"] == 8
    assert cli_good("tag", path)["tags"] == {"best": 4, "last": 8}
    cli_good("tag", path, "best", "--delete")
    assert cli_run("tag", path).stdout == "last  version 8\n"
    assert cli_run("tag", path, "--delete").exit_code == 2
    assert cli_run("tag", path, "last", "3", "--delete").exit_code == 2
    assert cli_run("tag", path, "far", "99").exit_code == 40


def test_store_that_is_none_is_refused(tmp_path: Path) -> None:
    for line in (["prune", tmp_path], ["prune", tmp_path, "--yes"], ["tag", tmp_path, "x"]):
        result = cli_run(*line)
        assert result.exit_code == 10, result.output
        assert "holds no store" in result.stderr
    assert list(tmp_path.iterdir()) == []
