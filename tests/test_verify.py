"""Checking a store and a local folder: every kind of damage is found, and nothing whole is called damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import make_cases
import msgspec
import pytest
import xxhash

from deltackpt import backend, folder, publish
from deltackpt.anchor import make_anchor
from deltackpt.checkpoint import addresses, mapped, open_folder
from deltackpt.errors import (
    ChainError,
    ConfigError,
    DeltaError,
    FormatError,
    IntegrityError,
    NotFound,
    Poisoned,
    StoreError,
)
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.manifest import (
    Manifest,
    Shard,
    anchor_key,
    data_prefix,
    decode_manifest,
    digest,
    encode,
    manifest_key,
    pruned_key,
)
from deltackpt.publish import publish_folder
from deltackpt.shard import EncodedGroup, assemble
from deltackpt.store import open_store
from deltackpt.verify import FolderReport, StoreReport, ranges, verify_folder, verify_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """v0 to v3, and a store that holds them as versions 0 to 3."""
    make_cases.chain(tmp_path, 3)
    for v in range(4):
        publish_folder(str(tmp_path / f"v{v}"), str(tmp_path / "store"), step=10 * v, anchors=False)
    return tmp_path


def pull(root: Path, version: int | None = None, mode: str = "replace") -> Path:
    dest = root / "dest"
    with Follower(str(root / "store"), CheckpointTarget(dest, mode=mode)) as follower:  # type: ignore[arg-type]  # a mode
        prepared = follower.prepare(version)
        assert prepared is not None
        prepared.apply()
    return dest


def look(root: Path, **options: object) -> StoreReport:
    return verify_store(open_store(root / "store"), **options)  # type: ignore[arg-type]  # options by name


def look_at(root: Path, dest: Path) -> FolderReport:
    return verify_folder(dest, open_store(root / "store"))


def kinds(problems: tuple[DeltaError, ...]) -> list[type[DeltaError]]:
    return [type(p) for p in problems]


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def manifest_of(root: Path, version: int) -> Manifest:
    return decode_manifest((root / "store" / manifest_key(version)).read_bytes(), version)


def rewrite(root: Path, version: int, **changes: object) -> None:
    """Edit a manifest as a hostile or broken writer might: later ones name its new digest."""
    for v in range(version, 1 + max(int(p.stem) for p in (root / "store" / "manifests").iterdir())):
        path = root / "store" / manifest_key(v)
        if v == version:
            edited = msgspec.structs.replace(manifest_of(root, v), **changes)
        else:
            before = (root / "store" / manifest_key(v - 1)).read_bytes()
            edited = msgspec.structs.replace(manifest_of(root, v), prev=digest(before))
        path.write_bytes(encode(edited))


def shard_path(root: Path, version: int, number: int = 0) -> Path:
    return root / "store" / manifest_of(root, version).shards[number].key


# ---------------------------------------------------------------- a store


@pytest.mark.parametrize(("deep", "rebuilt"), [(False, 0), (True, 4)])
def test_whole_store_has_no_problem(root: Path, deep: bool, rebuilt: int) -> None:
    make_anchor(str(root / "store"), 2)
    before = make_cases.tree_digest(root / "store")
    report = look(root, deep=deep)
    assert report.problems == ()
    assert report.notes == ()
    assert report.versions == (0, 1, 2, 3)
    assert report.anchors == (0, 2)
    assert report.rebuilt == rebuilt
    assert make_cases.tree_digest(root / "store") == before


def test_store_that_does_not_exist_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="store"):
        verify_store(open_store(tmp_path / "nothing"))


def test_store_without_versions_is_said(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text('{"format":1,"store_id":"s","created":0}\n')
    report = look(tmp_path, deep=True)
    assert report.problems == ()
    assert report.notes == ("the store has no version yet",)


def test_every_damaged_version_is_listed(root: Path) -> None:
    flip(shard_path(root, 1))
    flip(shard_path(root, 3))
    problems = look(root).problems
    assert kinds(problems) == [IntegrityError, IntegrityError]
    assert "version 1: " in str(problems[0])
    assert "version 3: " in str(problems[1])


def test_every_damaged_shard_of_a_version_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "SHARD_BYTES", 1)
    make_cases.chain(tmp_path, 1)
    for v in range(2):
        publish_folder(str(tmp_path / f"v{v}"), str(tmp_path / "store"))
    assert len(manifest_of(tmp_path, 1).shards) == 2
    for number in range(2):
        flip(shard_path(tmp_path, 1, number))
    problems = look(tmp_path).problems
    assert kinds(problems) == [IntegrityError, IntegrityError]
    assert "00000.safetensors" in str(problems[0])
    assert "00001.safetensors" in str(problems[1])


def test_short_shard_is_found_by_its_size(root: Path) -> None:
    path = shard_path(root, 2)
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = look(root).problems
    assert isinstance(problem, IntegrityError)
    assert "bytes found" in str(problem)


def test_lost_shard_is_not_found(root: Path) -> None:
    shard_path(root, 2).unlink()
    (problem,) = look(root).problems
    assert isinstance(problem, NotFound)
    assert "version 2" in str(problem)


def test_deep_goes_on_after_a_damaged_version_from_the_next_anchor(root: Path) -> None:
    make_anchor(str(root / "store"), 3)
    flip(shard_path(root, 1))
    report = look(root, deep=True)
    assert kinds(report.problems) == [IntegrityError]
    assert report.rebuilt == 2
    assert report.notes == ("not rebuilt, no whole chain leads there: versions 1-2",)


def test_pruned_version_is_said_and_is_no_problem(root: Path) -> None:
    make_anchor(str(root / "store"), 2)
    for v in (0, 1):
        (root / "store" / pruned_key(v)).parent.mkdir(exist_ok=True)
        (root / "store" / pruned_key(v)).write_text("{}\n")
        for path in (root / "store" / "data").glob(f"{v:020d}-*"):
            shutil.rmtree(path)
    report = look(root, deep=True)
    assert report.problems == ()
    assert report.pruned == (0, 1)
    assert report.anchors == (2,)
    assert report.rebuilt == 2


def test_head_that_no_newcomer_can_reach_is_a_problem(root: Path) -> None:
    (root / "store" / pruned_key(0)).parent.mkdir()
    (root / "store" / pruned_key(0)).write_text("{}\n")
    (problem,) = look(root).problems
    assert isinstance(problem, ChainError)
    assert "no way from nothing to version 3" in str(problem)


def test_missing_manifest_is_named(root: Path) -> None:
    (root / "store" / manifest_key(1)).unlink()
    problem = look(root).problems[0]
    assert isinstance(problem, ChainError)
    assert str(problem) == "no manifest of version 1, but version 2 is there"


def test_broken_manifest_does_not_hide_later_faults(root: Path) -> None:
    (root / "store" / manifest_key(1)).write_text("{}\n")
    flip(shard_path(root, 3))
    problems = look(root).problems
    assert kinds(problems)[0] is not IntegrityError
    assert "version 1" in str(problems[0])
    assert "version 3" in str(problems[-1])
    assert isinstance(problems[-1], IntegrityError)


def test_edited_manifest_breaks_the_chain_behind_it(root: Path) -> None:
    path = root / "store" / manifest_key(1)
    path.write_bytes(encode(msgspec.structs.replace(manifest_of(root, 1), run_id="another")))
    (problem,) = look(root).problems
    assert isinstance(problem, ChainError)
    assert "version 2 follows a manifest" in str(problem)


def test_manifest_of_another_store_is_found(root: Path) -> None:
    rewrite(root, 3, store_id="elsewhere")
    (problem,) = look(root).problems
    assert isinstance(problem, FormatError)
    assert "elsewhere" in str(problem)


@pytest.mark.parametrize("kind", ["layouts", "placements", "files"])
def test_damaged_object_is_found_once(root: Path, kind: str) -> None:
    for path in (root / "store" / kind).iterdir():
        flip(path, 3)
    (problem,) = look(root, deep=True).problems
    assert isinstance(problem, IntegrityError)
    assert f"version 0: {kind}/" in str(problem)


def test_totals_that_lie_are_found(root: Path) -> None:
    totals = manifest_of(root, 2).totals
    rewrite(root, 2, totals=msgspec.structs.replace(totals, stored=totals.stored + 1))
    (problem,) = look(root).problems
    assert isinstance(problem, FormatError)
    assert "stored bytes" in str(problem)


def test_state_that_does_not_follow_from_the_changes_is_found(root: Path) -> None:
    rewrite(root, 3, state="0" * 16)
    (problem,) = look(root).problems
    assert isinstance(problem, FormatError)
    assert "lead to state" in str(problem)


def test_empty_version_with_another_state_is_found(root: Path) -> None:
    publish_folder(str(root / "v3"), str(root / "store"), anchors=False)
    rewrite(root, 4, state="0" * 16)
    (problem,) = look(root).problems
    assert isinstance(problem, FormatError)
    assert "it is empty" in str(problem)


def replace_delta(root: Path, version: int, wrong: Path) -> None:
    """Give a version the flips that lead to `wrong`, under the fingerprints that it had: checksums all fit."""
    old, new, other = (open_folder(p) for p in (root / f"v{version - 1}", root / f"v{version}", wrong))
    paths = [[f.file_path(n) for n in range(len(f.checkpoint.placement.files))] for f in (old, new, other)]
    with mapped(paths[0]) as a, mapped(paths[1]) as b, mapped(paths[2]) as c:
        layout, base = old.checkpoint.layout, addresses(old.checkpoint, a)
        honest = list(backend.encode(layout, base, addresses(new.checkpoint, b)))
        bad = list(backend.encode(layout, base, addresses(other.checkpoint, c)))
        groups = [
            EncodedGroup(x.group, y.frames, x.tensor, x.fingerprint, x.changed)
            for x, y in zip(honest, bad, strict=True)
        ]
        image = assemble(f"{data_prefix(version, 'f' * 16)}/00000.safetensors", groups)
        path = root / "store" / image.shard.key
        path.parent.mkdir()
        path.write_bytes(b"".join(bytes(p) for p in image.parts))
    shard: Shard = image.shard
    totals = msgspec.structs.replace(manifest_of(root, version).totals, stored=shard.nbytes)
    rewrite(root, version, shards=(shard,), totals=totals)


def test_flips_that_belie_their_own_index_are_found_only_by_deep(root: Path) -> None:
    make_cases.write_ckpt(root / "wrong", make_cases.mutate(make_cases.tiny(), 7))
    replace_delta(root, 1, root / "wrong")
    assert look(root).problems == ()
    report = look(root, deep=True)
    (problem,) = report.problems
    assert isinstance(problem, IntegrityError)
    assert "version 1" in str(problem)
    assert "came out wrong" in str(problem)
    assert report.notes == ("not rebuilt, no whole chain leads there: versions 2-3",)


def test_damaged_anchor_file_is_found(root: Path) -> None:
    anchor = make_anchor(str(root / "store"), 2)
    flip(root / "store" / str(anchor.folder) / "model-00002-of-00002.safetensors")
    flip(root / "store" / str(anchor.folder) / "config.json")
    problems = look(root).problems
    assert kinds(problems) == [IntegrityError, IntegrityError]
    assert "model-00002-of-00002.safetensors" in str(problems[0])
    assert "config.json" in str(problems[1])


def test_lost_anchor_file_is_found(root: Path) -> None:
    anchor = make_anchor(str(root / "store"), 2)
    (root / "store" / str(anchor.folder) / "config.json").unlink()
    assert kinds(look(root).problems) == [NotFound]


def test_anchor_with_other_bytes_under_fitting_checksums_is_found_only_by_deep(root: Path) -> None:
    anchor = make_anchor(str(root / "store"), 2)
    path = root / "store" / str(anchor.folder) / "model-00001-of-00002.safetensors"
    flip(path)
    files = tuple(
        msgspec.structs.replace(f, xxh3_128=xxhash.xxh3_128_hexdigest(path.read_bytes())) if f.name == path.name else f
        for f in anchor.files
    )
    (root / "store" / anchor_key(2)).write_bytes(encode(msgspec.structs.replace(anchor, files=files)))
    assert look(root).problems == ()
    report = look(root, deep=True)
    (problem,) = report.problems
    assert isinstance(problem, IntegrityError)
    assert "differs in the anchor" in str(problem)
    assert report.rebuilt == 4


def test_anchor_by_reference_is_checked_where_its_files_are(tmp_path: Path) -> None:
    make_cases.chain(tmp_path, 1)
    publish_folder(str(tmp_path / "v0"), str(tmp_path / "store"), anchor_ref=True)
    report = look(tmp_path)
    assert report.problems == ()
    assert "by reference" in report.notes[0]
    assert look(tmp_path, anchor_source=str(tmp_path / "v0"), deep=True).rebuilt == 1
    flip(tmp_path / "v0" / "model-00001-of-00002.safetensors")
    problems = look(tmp_path, anchor_source=str(tmp_path / "v0")).problems
    assert kinds(problems) == [IntegrityError]


def test_deep_follows_rewinds_empties_new_layouts_and_lineages(root: Path) -> None:
    store = str(root / "store")
    assert publish_folder(str(root / "v1"), store, resume=True).kind == "rewind"
    assert publish_folder(str(root / "v1"), store).kind == "empty"
    assert publish_folder(str(root / "v2"), store).kind == "delta"
    shards = make_cases.tiny()
    first = next(iter(shards))
    shards[first].append(make_cases.T("extra.weight", "F32", (4, 4), 5))
    make_cases.write_ckpt(root / "wider", shards)
    assert publish_folder(str(root / "wider"), store, relayout=True).kind == "full"
    assert publish_folder(str(root / "v0"), store, new_lineage=True).kind == "full"
    report = look(root, deep=True)
    assert report.problems == ()
    assert report.rebuilt == 9


def test_no_scratch_space_is_a_store_error(root: Path) -> None:
    with pytest.raises(StoreError, match="bytes of scratch in"):
        look(root, deep=True, scratch=str(root / "missing"))


def test_ranges_join_neighbours() -> None:
    assert ranges([7, 0, 1, 2, 9, 10]) == "0-2, 7, 9-10"
    assert ranges([]) == ""


# ---------------------------------------------------------------- a local folder


@pytest.mark.parametrize("mode", ["replace", "switch"])
def test_pulled_folder_is_clean(root: Path, mode: str) -> None:
    dest = pull(root, 2, mode)
    before = make_cases.tree_digest(dest)
    report = look_at(root, dest)
    assert report.problems == ()
    assert (report.version, report.recorded, report.pending) == (2, 2, None)
    assert make_cases.tree_digest(dest) == before


def test_folder_without_record_is_known_by_its_bytes(root: Path) -> None:
    report = look_at(root, root / "v1")
    assert report.problems == ()
    assert (report.version, report.recorded) == (1, None)
    assert report.notes == ("the folder has no record; it is known by its fingerprint only",)


def test_changed_byte_names_its_tensor_even_under_an_old_time_stamp(root: Path) -> None:
    dest = pull(root)
    path = dest / "model-00002-of-00002.safetensors"
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = look_at(root, dest)
    assert report.version is None
    assert report.tensors == ("lm_head.weight",)
    (problem,) = report.problems
    assert isinstance(problem, ChainError)
    assert "lm_head.weight" in str(problem)


def test_folder_whose_record_lies_is_told_what_it_holds(root: Path) -> None:
    dest = pull(root, 3)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        shutil.copy(root / "v1" / name, dest / name)
    report = look_at(root, dest)
    assert (report.version, report.recorded) == (1, 3)
    assert len(report.tensors) == 15
    assert kinds(report.problems) == [ChainError]
    assert "it holds version 1" in str(report.problems[0])


def test_changed_and_lost_side_files_are_listed(root: Path) -> None:
    dest = pull(root)
    (dest / "config.json").write_text("{}")
    report = look_at(root, dest)
    assert report.files == ("config.json",)
    assert kinds(report.problems) == [IntegrityError]
    (dest / "config.json").unlink()
    assert "is missing" in str(look_at(root, dest).problems[0])


def interrupt(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stop a pull of version 3 after the first of its renames."""
    dest = pull(root, 1)
    with monkeypatch.context() as patch:
        renames = []

        def rename(source: str, target: str) -> None:
            if renames:
                raise KeyboardInterrupt
            renames.append(target)
            os.replace(source, target)

        patch.setattr(folder, "_rename", rename)
        with pytest.raises(KeyboardInterrupt):
            pull(root, 3)
    return dest


def test_interrupted_folder_is_never_called_clean(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = interrupt(root, monkeypatch)
    report = look_at(root, dest)
    assert report.pending == 3
    assert isinstance(report.problems[0], Poisoned)
    pull(root, 2)
    assert look_at(root, dest).problems == ()


def test_folder_of_another_store_is_a_chain_error(root: Path) -> None:
    dest = pull(root)
    publish_folder(str(root / "v0"), str(root / "other"))
    report = verify_folder(dest, open_store(root / "other"))
    assert kinds(report.problems) == [ChainError, ChainError]
    assert "follows store" in str(report.problems[0])


def test_other_model_is_no_version(root: Path) -> None:
    make_cases.write_ckpt(root / "foreign", make_cases.tiny(seed=500))
    report = look_at(root, root / "foreign")
    assert report.version is None
    assert kinds(report.problems) == [ChainError]


def test_folder_with_other_tensors_names_the_first(root: Path) -> None:
    dest = pull(root)
    for path in dest.glob("model*"):
        path.unlink()
    (dest / "model.safetensors").write_bytes(make_cases.st_bytes([make_cases.T("w", "F32", (2,), 0)]))
    (problem,) = look_at(root, dest).problems
    assert "lm_head.weight is missing" in str(problem)


def test_split_into_other_files_is_a_note(root: Path) -> None:
    tensors = [t for shard in make_cases.tiny().values() for t in shard]
    make_cases.write_ckpt(root / "one", {"model.safetensors": tensors}, index=False)
    report = look_at(root, root / "one")
    assert report.version == 0
    assert report.problems == ()
    assert "other files" in report.notes[1]


@pytest.mark.parametrize("name", ["nothing", "v0/config.json"])
def test_path_that_is_no_folder_is_refused(root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        look_at(root, root / name)


def test_record_is_plain_json(root: Path) -> None:
    # Support scripts read it.
    assert json.loads((pull(root, 2) / ".deltackpt" / "state.json").read_text())["version"] == 2
