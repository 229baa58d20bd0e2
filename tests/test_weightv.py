"""The wire format of slime, miles and SGLang: both ways, bit for bit, and their readers' faults answered."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import make_cases
import numpy as np
import pytest
import wire
import zstandard
from helpers import REPOSITORY, cli_good, manifest_of, refused, visible
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Server
from wire import TheirError, TheirReader, name_of

from deltackpt.errors import (
    ChainError,
    ConfigError,
    FormatError,
    IntegrityError,
    StoreError,
    Unavailable,
    UnsupportedFormat,
)
from deltackpt.export import Exporter, ExportReport
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.ingest import Importer, ImportReport
from deltackpt.lease import leases
from deltackpt.prune import prune_store
from deltackpt.publish import Publisher, publish_folder
from deltackpt.store import LocalStore
from deltackpt.verify import verify_store
from deltackpt.weightv import SIDECAR, Payload, WireVersion, encode_payload, index_bytes, open_version


def odd() -> dict[str, list[tuple[str, str, tuple[int, ...], bytes]]]:
    """A model with what breaks readers of this format: scalars without dimensions, packed and empty tensors."""
    shards = make_cases.tiny()
    more = [
        make_cases.T("input_scale", "F32", (), 7), make_cases.T("packed.weight", "F4", (6, 4), 8),
        make_cases.T("scales", "F8_E4M3", (3,), 9), ("empty", "BF16", (0, 4), b""),
    ]  # fmt: skip
    first = next(iter(shards))
    return shards | {first: shards[first] + more}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """v0 to v4 and a store of them: version 3 changes nothing, version 5 goes back to v1."""
    root = tmp_path_factory.mktemp("master")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        make_cases.chain(root, 4, base=odd())
        shutil.rmtree(root / "v3")
        shutil.copytree(root / "v2", root / "v3")
        shutil.copytree(root / "v1", root / "v5")
        for v in range(6):
            publish_folder(str(root / f"v{v}"), str(root / "store"), anchors=False, run_id="run", resume=v == 5)
        assert [manifest_of(root / "store", v).kind for v in range(6)] == [
            "full", "delta", "delta", "empty", "delta", "rewind",
        ]  # fmt: skip
        yield root


@pytest.fixture
def store(master: Path, tmp_path: Path) -> Path:
    shutil.copytree(master / "store", tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def exported(store: Path, out: Path, **options: object) -> ExportReport:
    return Exporter(LocalStore(store), str(out), **options).once()  # type: ignore[arg-type]  # any


def imported(out: Path, store: Path, **options: object) -> ImportReport:
    job = Importer(str(out), LocalStore(store), **options)  # type: ignore[arg-type]  # any
    try:
        return job.once()
    finally:
        job.close()


def pulled(store: Path, dest: Path, version: int) -> dict[str, list[object]]:
    """What a newcomer gets of a version."""
    shutil.rmtree(dest, ignore_errors=True)
    with Follower(str(store), CheckpointTarget(dest)) as follower:
        prepared = follower.prepare(version)
        assert prepared is not None
        prepared.apply()
    digests: dict[str, list[object]] = make_cases.ckpt_digest(dest)
    return digests


def theirs(master: Path, out: Path, versions: Sequence[int], *, base: int = 0) -> None:
    """A host of theirs gets each of the versions, bit for bit."""
    host = TheirReader(master / f"v{base}")
    host.version = base
    for version in versions:
        host.pull(out, version)
        assert host.version == version
        assert host.weights == wire.weights(master / f"v{version}"), version


# ---------------------------------------------------------------- export


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_their_reader_gets_every_exported_version_bit_for_bit(
    store: Path, out: Path, master: Path, encoding: str
) -> None:
    report = exported(store, out, encoding=encoding)
    assert (report.versions, report.full, report.head) == ((1, 2, 3, 4, 5), (), 5)
    assert sorted(p.name for p in out.iterdir() if not p.name.startswith(".")) == [name_of(v) for v in range(1, 6)]
    theirs(master, out, [1, 2, 3, 4, 5])
    theirs(master, out, [5])


def test_exported_folder_is_what_the_format_says(store: Path, out: Path, master: Path) -> None:
    exported(store, out)
    index = json.loads((out / name_of(2) / wire.INDEX).read_text())
    assert index["metadata"] == {
        "version": "000002", "base_version": "000001", "delta_encoding": "xor", "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }  # fmt: skip
    old, new = wire.weights(master / "v1"), wire.weights(master / "v2")
    changed = {name for name in new if new[name] != old[name]}
    assert index["weight_map"] == dict.fromkeys(changed, "model-00000-of-00001.safetensors")
    entries, checksums = make_cases.read_st(out / name_of(2) / "model-00000-of-00001.safetensors")
    assert set(entries) == set(checksums) == changed
    for name, (_, _, stored) in entries.items():
        assert zstandard.frame_content_size(stored) == len(new[name])
    assert sorted(p.name for p in (out / name_of(2)).iterdir()) == [
        SIDECAR, "model-00000-of-00001.safetensors", wire.INDEX,
    ]  # fmt: skip
    nothing = json.loads((out / name_of(3) / wire.INDEX).read_text())
    assert nothing["weight_map"] == {}


def test_index_is_these_bytes() -> None:
    assert index_bytes(7, "overwrite", {"a": "model-00000-of-00001.safetensors"}) == (
        b'{\n  "metadata": {\n    "version": "000007",\n    "base_version": "000006",\n'
        b'    "delta_encoding": "overwrite",\n    "compression_format": "zstd",\n    "checksum_format": "xxh3-128"\n'
        b'  },\n  "weight_map": {\n    "a": "model-00000-of-00001.safetensors"\n  }\n}\n'
    )


def test_shards_are_numbered_and_cut_by_size(
    store: Path, out: Path, master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltackpt.export.SHARD_BYTES", 60)
    exported(store, out)
    shards = sorted(p.name for p in (out / name_of(1)).glob("*.safetensors"))
    assert len(shards) > 3
    assert shards == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    theirs(master, out, [1, 2, 3, 4, 5])


def test_tensors_that_lie_in_several_groups_are_whole(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltackpt.layout.GROUP_BYTES", 32768)
    rng = np.random.default_rng(5)
    old = {n: rng.integers(0, 9, size, np.int16) for n, size in (("a", 40000), ("b", 7), ("c", 50000))}
    new = {n: values.copy() for n, values in old.items()}
    for values in new.values():
        values[::5] += 1
    with Publisher(str(tmp_path / "store"), anchors=False) as publisher:
        publisher.publish(old)
        publisher.publish(new)
        publisher.publish({**new, "b": old["b"]})
    exported(tmp_path / "store", out)
    pulled(tmp_path / "store", tmp_path / "base", 0)
    host = TheirReader(tmp_path / "base")
    host.pull(out, 1)
    assert host.weights == {n: v.tobytes() for n, v in new.items()}
    host.pull(out, 2)
    assert host.weights["b"] == old["b"].tobytes()


def test_export_goes_on_where_it_was(store: Path, out: Path, master: Path) -> None:
    exported(store, out)
    before = make_cases.tree_digest(out)
    shutil.rmtree(out / name_of(5))
    shutil.rmtree(out / name_of(4))
    assert exported(store, out).versions == (4, 5)
    assert make_cases.tree_digest(out) == before
    assert exported(store, out) == ExportReport((), (), 5, 0)


def test_one_exporter_follows_and_restores_nothing_twice(store: Path, out: Path, master: Path) -> None:
    job = Exporter(LocalStore(store), str(out))
    job.once()
    publish_folder(str(master / "v4"), str(store), run_id="run", anchors=False)
    shutil.rmtree(next((store / "data").glob("0*0-*")))  # what a restart would need
    assert job.once().versions == (6,)
    host = TheirReader(master / "v0")
    host.pull(out, 6)
    assert host.weights == wire.weights(master / "v4")


def test_pruned_beginning_is_said_and_a_full_copy_goes_on(store: Path, out: Path, master: Path) -> None:
    (store / "manifests" / f"{5:020d}.json").unlink()
    cli_good("anchor", store, "--version", "4")
    prune_store(LocalStore(store), keep=1, dry_run=False, grace_s=0.0)
    message = refused(lambda: exported(store, out), "--from newest", error=ChainError)
    assert "version 1 cannot be rebuilt" in message
    report = exported(store, out, start="newest")
    assert (report.versions, report.full) == ((4,), (4,))
    host = TheirReader(master / "v0")
    host.pull(out, 4)
    assert host.weights == wire.weights(master / "v4")
    assert sorted(p.name for p in (out / name_of(4)).iterdir()) == sorted(
        [SIDECAR, *(p.name for p in (master / "v4").iterdir())]
    )


def test_export_that_fell_behind_a_prune_goes_on_with_a_full_copy(store: Path, out: Path, master: Path) -> None:
    (store / "manifests" / f"{5:020d}.json").unlink()
    exported(store, out)
    for v in (2, 3, 4):
        shutil.rmtree(out / name_of(v))
    cli_good("anchor", store, "--version", "4")
    shutil.rmtree(store / "followers")
    prune_store(LocalStore(store), keep=1, dry_run=False, grace_s=0.0)
    refused(lambda: exported(store, out), "version 2 cannot be rebuilt", error=ChainError)
    assert exported(store, out, start=4).full == (4,)
    theirs(master, out, [1, 4])


def test_start_begins_an_empty_folder_with_a_full_copy(store: Path, out: Path, master: Path) -> None:
    report = exported(store, out, start=2)
    assert (report.versions, report.full) == ((2, 3, 4, 5), (2,))
    theirs(master, out, [4, 5])
    assert exported(store, out, start="newest").versions == ()


def test_new_layout_is_a_full_folder_and_deltas_go_on_from_it(store: Path, out: Path, tmp_path: Path) -> None:
    shards = make_cases.tiny()
    for n, change in enumerate((shards, make_cases.mutate(shards, 9))):
        make_cases.write_ckpt(tmp_path / "other", change)
        publish_folder(str(tmp_path / "other"), str(store), run_id="run", relayout=n == 0, anchors=False)
    report = exported(store, out)
    assert (report.versions, report.full) == ((1, 2, 3, 4, 5, 6, 7), (6,))
    host = TheirReader(tmp_path / "other")
    host.version = 0
    host.pull(out, 7)
    assert host.weights == wire.weights(tmp_path / "other")


def test_export_refuses_folders_of_another_stream(store: Path, out: Path, master: Path, tmp_path: Path) -> None:
    wire.publish(out, 1, wire.weights(master / "v0"), wire.weights(master / "v1"))
    refused(lambda: exported(store, out), "not written by this package", error=ConfigError, local=out)
    shutil.rmtree(out)
    publish_folder(str(master / "v0"), str(tmp_path / "other"))
    publish_folder(str(master / "v1"), str(tmp_path / "other"))
    exported(tmp_path / "other", out)
    refused(lambda: exported(store, out), "name another folder", error=ConfigError, local=out)
    refused(lambda: exported(store, store), "is a store", error=ConfigError)


def test_export_refuses_a_stream_that_forked(store: Path, out: Path, master: Path) -> None:
    exported(store, out)
    shutil.rmtree(store)
    shutil.copytree(master / "store", store)
    for version in (4, 5):
        (store / "manifests" / f"{version:020d}.json").unlink()
    for v in (0, 2):
        publish_folder(str(master / f"v{v}"), str(store), run_id="run", resume=True, anchors=False)
    refused(lambda: exported(store, out), "is no version 5", error=ChainError, local=out)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The warm process that runs commands which die."""
    warm = Server(tmp_path_factory.mktemp("children"))
    yield warm
    warm.close()


@pytest.mark.parametrize("call", ["link", "rename"])
def test_export_killed_at_any_file_leaves_whole_folders_and_the_next_run_finishes(
    store: Path, out: Path, master: Path, server: Server, call: str
) -> None:
    for version in (3, 4, 5):
        (store / "manifests" / f"{version:020d}.json").unlink()
    killed, nth = [], 0
    while True:
        nth += 1
        fault = {"FAULT": f"{call}:{nth}:KILL", "FAULT_MATCH": str(out)}
        if server.run("export", store, out, "--threads", "1", **fault).exit_code == 0:
            break
        named = [p.name for p in out.iterdir() if not p.name.startswith(".")]
        killed.append(len(named))
        host = TheirReader(master / "v0")
        for version in range(1, len(named) + 1):
            host.pull(out, version)
            assert host.weights == wire.weights(master / f"v{version}")
        assert exported(store, out).head == 2
        theirs(master, out, [1, 2])
        # What the dead one had begun is swept by the next one that writes.
        assert [*(out / ".tmp").iterdir()] == []
        shutil.rmtree(out)
    # Shard, index and sidecar of each version are linked; the shard, then the folder get their names.
    assert killed == ([0, 0, 0, 1, 1, 1] if call == "link" else [0, 0, 1, 1])


def test_import_killed_before_any_commit_goes_on_from_the_last_one(
    master: Path, out: Path, tmp_path: Path, server: Server
) -> None:
    new = [wire.weights(master / f"v{v}") for v in range(3)]
    for v in (1, 2):
        wire.publish(out, v, new[v - 1], new[v])
    for nth in (1, 2, 3):
        store = tmp_path / f"s{nth}"
        fault = {"FAULT": f"link:{nth}:KILL", "FAULT_MATCH": "manifests/"}
        assert server.run("import", out, store, "--base", master / "v0", **fault).exit_code == -signal.SIGKILL
        assert visible(store) == list(range(nth - 1))
        assert imported(out, store, base=str(master / "v0")).head == 2
        head = visible(store)[-1]
        assert manifest_of(store, head).step == 2
        assert pulled(store, tmp_path / "dest", head) == make_cases.ckpt_digest(master / "v2")


def test_two_exporters_make_the_same_folders_and_one_says_that_it_lost(store: Path, out: Path, master: Path) -> None:
    class Late(Exporter):
        def _write(self, *arguments: object) -> int:
            nbytes = super()._write(*arguments)  # type: ignore[arg-type]  # any
            exported(store, out)
            return nbytes

    with pytest.raises(StoreError, match="making weight_v000001"):
        Late(LocalStore(store), str(out)).once()
    theirs(master, out, [1, 2, 3, 4, 5])


def test_exporter_holds_a_lease(store: Path, out: Path) -> None:
    exported(store, out)
    (lease,) = leases(LocalStore(store))
    assert (lease.mode, lease.dest, lease.version) == ("export", str(out), 5)


def test_overwrite_refuses_a_tensor_whose_positions_do_not_fit(
    store: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltackpt.export.POSITIONS", 500)
    with pytest.raises(ConfigError, match=r"has 512 bytes.*export with --encoding xor"):
        exported(store, out, encoding="overwrite")
    assert exported(store, out).head == 5


# ---------------------------------------------------------------- import


@pytest.mark.parametrize(("encoding", "frames"), [("xor", 1), ("xor", 3), ("overwrite", 1), ("overwrite", 2)])
def test_their_stream_becomes_a_store_bit_for_bit(
    master: Path, out: Path, tmp_path: Path, encoding: str, frames: int
) -> None:
    new = [wire.weights(master / f"v{v}") for v in range(6)]
    for v in range(1, 6):
        wire.publish(out, v, new[v - 1], new[v], encoding=encoding, frames=frames)
    report = imported(out, tmp_path / "s", base=str(master / "v0"))
    assert report == ImportReport((1, 2, 3, 4, 5), 5)
    manifests = [manifest_of(tmp_path / "s", v) for v in range(6)]
    assert [m.step for m in manifests] == [0, 1, 2, 3, 4, 5]
    assert [m.kind for m in manifests] == ["full", "delta", "delta", "empty", "delta", "delta"]
    for v in range(6):
        assert pulled(tmp_path / "s", tmp_path / "dest", v) == make_cases.ckpt_digest(master / f"v{v}")
    assert (tmp_path / "dest" / "config.json").exists()
    assert verify_store(LocalStore(tmp_path / "s"), deep=True).problems == ()


def test_import_goes_on_where_it_was(master: Path, out: Path, tmp_path: Path) -> None:
    new = [wire.weights(master / f"v{v}") for v in range(5)]
    wire.publish(out, 1, new[0], new[1])
    assert imported(out, tmp_path / "s", base=str(master / "v0")).imported == (1,)
    assert imported(out, tmp_path / "s").imported == ()
    assert visible(tmp_path / "s") == [0, 1]
    wire.publish(out, 2, new[1], new[2])
    shutil.rmtree(out / name_of(1))
    assert imported(out, tmp_path / "s").imported == (2,)
    # A publisher that begins claims the stream by a version that changes nothing.
    assert [manifest_of(tmp_path / "s", v).kind for v in visible(tmp_path / "s")] == [
        "full", "delta", "empty", "delta",
    ]  # fmt: skip
    assert pulled(tmp_path / "s", tmp_path / "dest", 3) == make_cases.ckpt_digest(master / "v2")


def test_full_version_begins_a_stream_and_later_ones_are_deltas(master: Path, out: Path, tmp_path: Path) -> None:
    new = [wire.weights(master / f"v{v}") for v in range(5)]
    shutil.copytree(master / "v0", out / name_of(3))
    wire.publish(out, 4, new[0], new[1], metadata={"version": 4, "base_version": 3})
    shutil.copytree(master / "v2", out / name_of(9))
    make_cases.write_ckpt(out / name_of(10), make_cases.tiny())
    report = imported(out, tmp_path / "s")
    assert report == ImportReport((3, 4, 9, 10), 10)
    kinds = [manifest_of(tmp_path / "s", v).kind for v in visible(tmp_path / "s")]
    assert kinds == ["full", "delta", "delta", "full"]
    assert pulled(tmp_path / "s", tmp_path / "dest", 2) == make_cases.ckpt_digest(master / "v2")
    assert pulled(tmp_path / "s", tmp_path / "dest", 3) == make_cases.ckpt_digest(out / name_of(10))


def test_full_version_of_one_file_needs_no_index(master: Path, out: Path, tmp_path: Path) -> None:
    tensors = [t for shard in odd().values() for t in shard]
    make_cases.write_ckpt(out / name_of(1), {"model.safetensors": tensors}, index=False)
    assert imported(out, tmp_path / "s").imported == (1,)
    assert pulled(tmp_path / "s", tmp_path / "dest", 0) == make_cases.ckpt_digest(out / name_of(1))


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_export_and_import_are_a_round_trip(
    store: Path, out: Path, tmp_path: Path, master: Path, encoding: str
) -> None:
    exported(store, out, encoding=encoding)
    assert imported(out, tmp_path / "s", base=str(master / "v0")).head == 5
    states = [[manifest_of(s, v).state for v in range(6)] for s in (store, tmp_path / "s")]
    assert states[0] == states[1]
    exported(tmp_path / "s", tmp_path / "again", encoding=encoding)
    for v in range(1, 6):
        for name in [wire.INDEX, *(p.name for p in (out / name_of(v)).glob("*.safetensors"))]:
            assert (out / name_of(v) / name).read_bytes() == (tmp_path / "again" / name_of(v) / name).read_bytes()


def test_stream_of_a_store_is_bound_to_it(store: Path, out: Path, tmp_path: Path, master: Path) -> None:
    """Their format has no lineage; the sidecar has."""
    exported(store, out)
    for v in (3, 4, 5):
        shutil.move(out / name_of(v), tmp_path / name_of(v))
    imported(out, tmp_path / "s", base=str(master / "v0"))
    other = tmp_path / "other"
    for v in (0, 1, 2, 4):
        publish_folder(str(master / f"v{v}"), str(other), anchors=False)
    exported(other, tmp_path / "others")
    shutil.copytree(tmp_path / "others" / name_of(3), out / name_of(3))
    refused(lambda: imported(out, tmp_path / "s"), "follows another weight_v000002", error=ChainError)
    shutil.rmtree(out / name_of(3))
    shutil.move(tmp_path / name_of(3), out / name_of(3))
    assert imported(out, tmp_path / "s").imported == (3,)


# ---------------------------------------------------------------- their readers' faults, and our answers


def test_stream_that_was_begun_again_is_seen_and_never_taken_for_the_old_one(
    master: Path, out: Path, tmp_path: Path
) -> None:
    """Theirs keeps the old run's weights and reports success, since versions are bare numbers."""
    new = [wire.weights(master / f"v{v}") for v in range(5)]
    for v in (1, 2):
        wire.publish(out, v, new[v - 1], new[v])
    imported(out, tmp_path / "s", base=str(master / "v0"))
    host = TheirReader(master / "v0")
    host.pull(out, 2)
    shutil.rmtree(out)
    wire.publish(out, 1, new[0], new[4])
    host.pull(out, 1)
    assert host.weights == new[2]
    refused(lambda: imported(out, tmp_path / "s"), "begun again", "--new-lineage", error=ChainError)
    wire.publish(out, 2, new[4], new[1])
    wire.publish(out, 3, new[1], new[2])
    refused(lambda: imported(out, tmp_path / "s"), "begun again", error=ChainError)
    report = imported(out, tmp_path / "s", base=str(master / "v0"), new_lineage=True)
    assert report.imported == (1, 2, 3)
    head = visible(tmp_path / "s")[-1]
    assert pulled(tmp_path / "s", tmp_path / "dest", head) == make_cases.ckpt_digest(master / "v2")


def test_going_back_is_done_by_the_store(master: Path, out: Path, tmp_path: Path) -> None:
    """Theirs answers success to an older version, and keeps the newer one."""
    new = [wire.weights(master / f"v{v}") for v in range(5)]
    for v in (1, 2):
        wire.publish(out, v, new[v - 1], new[v])
    host = TheirReader(master / "v0")
    host.pull(out, 2)
    host.pull(out, 1)
    assert host.weights == new[2]
    imported(out, tmp_path / "s", base=str(master / "v0"))
    cli_good("pull", tmp_path / "s", tmp_path / "dest")
    assert cli_good("pull", tmp_path / "s", tmp_path / "dest", "--step", "1")["version"] == 1
    assert make_cases.ckpt_digest(tmp_path / "dest") == make_cases.ckpt_digest(master / "v1")


def test_damaged_folder_costs_nothing_and_a_good_one_goes_on(master: Path, out: Path, tmp_path: Path) -> None:
    """Theirs writes first and checks then: after one bad shard no good one helps any more."""
    new = [wire.weights(master / f"v{v}") for v in range(5)]
    wire.publish(out, 1, new[0], new[1])
    bad = dict(new[2])
    first = sorted(name for name in new[2] if new[2][name] != new[1][name])[0]
    bad[first] = bytes(len(bad[first]))
    folder = wire.publish(out, 2, new[1], bad, digest=_digests(new[2]))
    host = TheirReader(master / "v0")
    job = Importer(str(out), LocalStore(tmp_path / "s"), base=str(master / "v0"))
    with pytest.raises(TheirError):
        host.pull(out, 2)
    with pytest.raises(IntegrityError, match=f"weight_v000002: tensor {first}: xxh3-128 of its new bytes"):
        job.once()
    assert visible(tmp_path / "s") == [0, 1]
    shutil.rmtree(folder)
    wire.publish(out, 2, new[1], new[2])
    with pytest.raises(TheirError):
        host.pull(out, 2)
    assert job.once().imported == (2,)
    job.close()
    assert pulled(tmp_path / "s", tmp_path / "dest", visible(tmp_path / "s")[-1]) == make_cases.ckpt_digest(
        master / "v2"
    )


def _digests(new: wire.Weights) -> object:
    """Checksums of the weights that were meant, in the order in which the publisher asks."""
    import xxhash

    by_length = {len(raw): xxhash.xxh3_128_hexdigest(raw) for raw in new.values()}
    return lambda raw: next((xxhash.xxh3_128_hexdigest(n) for n in new.values() if n == raw), by_length[len(raw)])


def test_newcomer_needs_no_chain_back_to_the_beginning(master: Path, out: Path, tmp_path: Path) -> None:
    """Theirs needs every folder between its version and the target; ours says which one is missing, and has anchors."""
    new = [wire.weights(master / f"v{v}") for v in range(5)]
    for v in (1, 2):
        wire.publish(out, v, new[v - 1], new[v])
    imported(out, tmp_path / "s", base=str(master / "v0"))
    shutil.rmtree(out / name_of(1))
    with pytest.raises(TheirError):
        TheirReader(master / "v0").pull(out, 2)
    with pytest.raises(ConfigError, match="name the checkpoint of version 1 with --base"):
        imported(out, tmp_path / "fresh")
    cli_good("anchor", tmp_path / "s", "--version", "2")
    prune_store(LocalStore(tmp_path / "s"), keep=1, dry_run=False, grace_s=0.0)
    assert pulled(tmp_path / "s", tmp_path / "dest", 2) == make_cases.ckpt_digest(master / "v2")
    wire.publish(out, 4, new[2], new[4])
    with pytest.raises(ChainError, match="weight_v000004 builds on version 3"):
        imported(out, tmp_path / "s")


def test_tensor_in_two_shards_counts_once(master: Path, out: Path, tmp_path: Path) -> None:
    """Stages that share a tensor both write it; applied twice, theirs is back at the old bytes."""
    old, new = (wire.weights(master / f"v{v}") for v in (0, 1))
    folder = wire.publish(out, 1, old, new, ranks=1)
    name = "lm_head.weight"
    stored = wire.payload(old[name], new[name], "xor")
    _, checksums = make_cases.read_st(folder / "model-00000-of-00001.safetensors")
    twice = make_cases.st_bytes([(name, "U8", (len(stored),), stored)], {name: checksums[name]})
    (folder / "model-00001-of-00002.safetensors").write_bytes(twice)
    # A shard that the index does not name is litter.
    with pytest.raises(TheirError):
        TheirReader(master / "v0").pull(out, 1)
    assert imported(out, tmp_path / "litter", base=str(master / "v0")).imported == (1,)
    index = wire.index_of(folder)
    other = next(n for n in index["weight_map"] if n != name)
    stored = wire.payload(old[other], new[other], "xor")
    entries = [(name, "U8", (len(s),), s) for s in [wire.payload(old[name], new[name], "xor")]]
    entries.append((other, "U8", (len(stored),), stored))
    both = make_cases.st_bytes(entries, {n: checksums[n] for n in (name, other)})
    (folder / "model-00001-of-00002.safetensors").write_bytes(both)
    index["weight_map"][other] = "model-00001-of-00002.safetensors"
    (folder / wire.INDEX).write_text(json.dumps(index))
    assert imported(out, tmp_path / "named", base=str(master / "v0")).imported == (1,)
    assert pulled(tmp_path / "named", tmp_path / "dest", 1) == make_cases.ckpt_digest(master / "v1")


def test_weights_that_a_delta_leaves_alone_are_proven_too(store: Path, out: Path, tmp_path: Path, master: Path) -> None:
    """Theirs never looks at them: a wrong base stays wrong in silence."""
    shards = make_cases.mutate(odd(), 77, only=("empty", "model.norm.weight"))
    make_cases.write_ckpt(tmp_path / "wrong", shards)
    only = make_cases.mutate(odd(), 1, only=("scales",))
    for n, content in enumerate((odd(), only)):
        make_cases.write_ckpt(tmp_path / f"n{n}", content)
        publish_folder(str(tmp_path / f"n{n}"), str(tmp_path / "few"), anchors=False)
    exported(tmp_path / "few", out)
    host = TheirReader(tmp_path / "wrong")
    host.pull(out, 1)
    assert host.weights != wire.weights(tmp_path / "n1")
    with pytest.raises(IntegrityError, match="tensors that it leaves alone differ"):
        imported(out, tmp_path / "s", base=str(tmp_path / "wrong"))
    assert visible(tmp_path / "s") == [0]


def test_two_streams_do_not_share_a_store(master: Path, out: Path, store: Path) -> None:
    old, new = (wire.weights(master / f"v{v}") for v in (0, 1))
    wire.publish(out, 1, old, new)
    refused(lambda: imported(out, store, base=str(master / "v0")), "was not imported", error=ConfigError, store=store)


def test_other_checksums_are_read_or_named(master: Path, out: Path, tmp_path: Path) -> None:
    old, new = (wire.weights(master / f"v{v}") for v in (0, 1))
    wire.publish(
        out, 1, old, new, metadata={"checksum_format": "adler32"}, digest=lambda raw: f"{zlib.adler32(raw):08x}"
    )
    assert imported(out, tmp_path / "s", base=str(master / "v0")).imported == (1,)
    for key, value in (("checksum_format", "md5"), ("compression_format", "lz4"), ("delta_encoding", "add")):
        shutil.rmtree(out)
        wire.publish(out, 1, old, new, metadata={key: value})
        with pytest.raises(UnsupportedFormat, match=f"{key} '{value}'"):
            imported(out, tmp_path / value, base=str(master / "v0"))


def test_blake3_checksums_are_read(master: Path, out: Path, tmp_path: Path) -> None:
    blake3 = pytest.importorskip("blake3", reason="pip install 'deltackpt[blake3]'")
    old, new = (wire.weights(master / f"v{v}") for v in (0, 1))

    def digest(raw: bytes) -> str:
        return str(blake3.blake3(raw).hexdigest())

    assert digest(b"abc") == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    wire.publish(out, 1, old, new, metadata={"checksum_format": "blake3"}, digest=digest)
    assert imported(out, tmp_path / "s", base=str(master / "v0")).imported == (1,)
    shutil.rmtree(out)
    wire.publish(out, 1, old, new, metadata={"checksum_format": "blake3"}, digest=lambda raw: digest(raw + b" "))
    with pytest.raises(IntegrityError, match="blake3 of its new bytes is"):
        imported(out, tmp_path / "t", base=str(master / "v0"))


def test_blake3_checksums_without_its_package_are_named(
    master: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    old, new = (wire.weights(master / f"v{v}") for v in (0, 1))
    wire.publish(out, 1, old, new, metadata={"checksum_format": "blake3"})
    with pytest.raises(ConfigError, match=r"pip install 'deltackpt\[blake3\]'"):
        imported(out, tmp_path / "s", base=str(master / "v0"))


# ---------------------------------------------------------------- folders that break the format


def broken(out: Path, master: Path, **options: object) -> Path:
    old, new = (wire.weights(master / f"v{v}") for v in (0, 1))
    return wire.publish(out, 1, old, new, **options)  # type: ignore[arg-type]  # any


def test_folder_without_an_index_is_not_whole_yet(master: Path, out: Path, tmp_path: Path) -> None:
    folder = broken(out, master)
    (folder / wire.INDEX).rename(folder / f"{wire.INDEX}.tmp")
    assert imported(out, tmp_path / "s", base=str(master / "v0")) == ImportReport((), None)
    (folder / f"{wire.INDEX}.tmp").rename(folder / wire.INDEX)
    (folder / "model-00001-of-00002.safetensors").rename(out / "away")
    with pytest.raises(Unavailable, match="cannot be seen"):
        imported(out, tmp_path / "s", base=str(master / "v0"))
    assert numbers_in(out) == [1]


def numbers_in(out: Path) -> list[int]:
    from deltackpt.weightv import numbers

    return numbers(str(out))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"version": "000002"}, "it says version 2"),
        ({"version": "one"}, "expected a number"),
        ({"base_version": None}, "expected a number"),
        ({"base_version": 1}, "cannot build on version 1"),
    ],
)
def test_index_that_contradicts_its_folder_is_refused(
    master: Path, out: Path, metadata: dict[str, object], message: str
) -> None:
    broken(out, master, metadata=metadata)
    with pytest.raises(FormatError, match=message):
        open_version(str(out), 1)


def test_index_and_shards_must_agree(master: Path, out: Path) -> None:
    folder = broken(out, master, ranks=1)
    index = wire.index_of(folder)
    shard = "model-00000-of-00001.safetensors"
    for change, message in (
        ({**index["weight_map"], "more": shard}, "names more in .*, which does not hold it"),
        (dict(list(index["weight_map"].items())[1:]), "is not named by the index"),
        ({**index["weight_map"], "x": "../../etc/passwd"}, "not a plain name"),
    ):
        (folder / wire.INDEX).write_text(json.dumps(index | {"weight_map": change}))
        with pytest.raises(FormatError, match=message):
            open_version(str(out), 1)
    (folder / wire.INDEX).write_text(json.dumps(index))
    entries, checksums = make_cases.read_st(folder / shard)
    content = [(n, *e) for n, e in entries.items()]
    for tensors, said, message in (
        (content, {}, "has no checksum in __metadata__"),
        ([(n, "I8", s, raw) for n, _, s, raw in content], checksums, "expected bytes"),
        ([(n, "U8", (1, *s), raw) for n, _, s, raw in content], checksums, "expected bytes"),
    ):
        (folder / shard).write_bytes(make_cases.st_bytes(tensors, said))
        with pytest.raises(FormatError, match=message):
            open_version(str(out), 1)


def test_shard_that_the_sidecar_denies_is_refused(store: Path, out: Path, tmp_path: Path, master: Path) -> None:
    exported(store, out)
    shard = out / name_of(1) / "model-00000-of-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(IntegrityError, match=r"is not the file that \.deltackpt\.json names"):
        imported(out, tmp_path / "s", base=str(master / "v0"))


OLD = np.arange(64, dtype=np.uint8)


def decoded(stored: bytes, encoding: str, checksum: str = "") -> bytes:
    version = WireVersion(
        1, "weight_v000001", 0, "", None, encoding, tensors={"t": Payload(memoryview(stored), checksum)}
    )  # type: ignore[arg-type]  # any
    return version.decode("t", OLD).tobytes()


def packed(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(raw)


def positions(*at: int, values: bytes = b"", count: int | None = None) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in (len(at) if count is None else count, *at)) + values


@pytest.mark.parametrize(
    ("stored", "encoding", "message"),
    [
        (packed(bytes(63)), "xor", "ends after 63 of 64 bytes"),
        (packed(bytes(65)), "xor", "goes on after the last byte"),
        (packed(bytes(64)) + packed(b"x"), "xor", "goes on after the last byte"),
        (packed(bytes(64)) + b"not zstd", "xor", "no zstd stream|goes on"),
        (packed(bytes(64))[:-3], "xor", "ends after|no zstd stream"),
        (b"", "xor", "ends after 0 of 64 bytes"),
        (b"\x00" * 40, "xor", "no zstd stream"),
        (make_cases.zstd_frame(rle=(7, 1 << 30)), "xor", "goes on after the last byte"),
        (packed(positions(1, values=b"ab")), "overwrite", "goes on after the last byte"),
        (packed(positions(1, 2, values=b"a")), "overwrite", "ends after 1 of 2 bytes"),
        (packed(positions(2, 1, values=b"ab")), "overwrite", "positions do not ascend"),
        (packed(positions(3, 3, values=b"ab")), "overwrite", "positions do not ascend"),
        (packed(positions(64, values=b"a")), "overwrite", "position 64 lies outside its 64 bytes"),
        (packed(positions(count=65)), "overwrite", "overwrites 65 bytes of 64"),
        (packed(positions(count=2**32 - 1)), "overwrite", "overwrites 4294967295 bytes of 64"),
        (packed(b"\x00"), "overwrite", "ends after 1 of 4 bytes"),
    ],
)  # fmt: skip
def test_hostile_stream_is_refused_before_anything_is_written(stored: bytes, encoding: str, message: str) -> None:
    before = OLD.copy()
    with pytest.raises(FormatError, match=message):
        decoded(stored, encoding)
    assert np.array_equal(OLD, before)


def test_stream_of_wrong_bytes_is_an_integrity_error() -> None:
    with pytest.raises(IntegrityError, match="tensor t: xxh3-128"):
        decoded(packed(bytes(64)), "xor", "00" * 16)


@settings(max_examples=40)
@given(
    old=st.binary(max_size=300), flips=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 255)), max_size=20),
    encoding=st.sampled_from(["xor", "overwrite"]),
)  # fmt: skip
def test_payloads_round_trip(old: bytes, flips: list[tuple[int, int]], encoding: str) -> None:
    import xxhash

    before = np.frombuffer(old, np.uint8)
    new = before.copy()
    for at, flip in flips:
        if at < len(new):
            new[at] ^= flip
    stored = encode_payload(before ^ new, new, encoding)  # type: ignore[arg-type]  # literal
    assert zstandard.frame_content_size(stored) >= 0
    checksum = xxhash.xxh3_128_hexdigest(new.tobytes())
    tensors = {"t": Payload(memoryview(stored), checksum)}
    version = WireVersion(1, "folder", 0, "", None, encoding, tensors=tensors)  # type: ignore[arg-type]  # literal
    assert version.decode("t", before).tobytes() == new.tobytes()
    assert stored == wire.payload(old, new.tobytes(), encoding)


# ---------------------------------------------------------------- commands and watching


class Passes(threading.Event):
    """An event that is set after some waits, and does something in each: a clock that needs no time."""

    def __init__(self, *work: object) -> None:
        super().__init__()
        self.work = list(work)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if self.work:
            self.work.pop(0)()  # type: ignore[operator]  # callables
        else:
            self.set()
        return self.is_set()


def test_watching_exporter_makes_folders_as_versions_come(master: Path, out: Path, tmp_path: Path) -> None:
    store, seen, said = tmp_path / "live", [], []

    def publish(v: int) -> None:
        publish_folder(str(master / f"v{v}"), str(store), run_id="run", anchors=False)

    publish(0)
    manifests = store / "manifests"
    job = Exporter(LocalStore(store), str(out), say=said.append)
    stop = Passes(lambda: publish(1), lambda: publish(2), lambda: manifests.rename(store / "x"))
    job.watch(stop, poll_s=1.0, done=lambda report: seen.append(report.versions))
    assert seen == [(1,), (2,)]
    assert said == []
    theirs(master, out, [1, 2])


def test_watching_importer_takes_folders_as_they_come_and_waits_for_what_is_not_whole(
    master: Path, out: Path, tmp_path: Path
) -> None:
    new = [wire.weights(master / f"v{v}") for v in range(3)]
    seen: list[tuple[int, ...]] = []
    said: list[str] = []
    shard = out / name_of(2) / "model-00000-of-00002.safetensors"

    def half() -> None:
        wire.publish(out, 2, new[1], new[2])
        shard.rename(out / "away")

    job = Importer(str(out), LocalStore(tmp_path / "s"), base=str(master / "v0"), say=said.append)
    stop = Passes(lambda: wire.publish(out, 1, new[0], new[1]), half, lambda: (out / "away").rename(shard))
    job.watch(stop, poll_s=1.0, done=lambda report: seen.append(report.imported))
    job.close()
    assert seen == [(1,), (2,)]
    assert len(said) == 1
    assert said[0].endswith("but it cannot be seen; try again; trying again")


def test_commands_export_and_import_and_say_so(store: Path, out: Path, tmp_path: Path, master: Path) -> None:
    answer = cli_good("export", store, out, "--format", "weight-v")
    assert (answer["versions"], answer["full"], answer["head"]) == ([1, 2, 3, 4, 5], [], 5)
    answer = cli_good("import", out, tmp_path / "s", "--base", master / "v0")
    assert answer == {"dir": str(out), "store": str(tmp_path / "s"), "imported": [1, 2, 3, 4, 5], "head": 5}
    refused(["import", out, tmp_path / "fresh"], "--base", error=ConfigError)
    refused(["export", out, tmp_path / "x"], "holds no store", error=StoreError)


@pytest.mark.parametrize("name", ["export", "import"])
def test_watching_command_ends_well_on_sigterm(store: Path, out: Path, tmp_path: Path, master: Path, name: str) -> None:
    exported(store, out)
    arguments = [str(store), str(tmp_path / "new")]
    if name == "import":
        arguments = [str(out), str(tmp_path / "new"), "--base", str(master / "v0")]
    watcher = subprocess.Popen(
        [sys.executable, "-m", "deltackpt", name, *arguments, "--watch", "--poll", "60", "--json"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert watcher.stderr is not None
        line = watcher.stderr.readline()
        while "compiling kernels" in line:
            line = watcher.stderr.readline()
        expected = "at version 5 (5 versions, " if name == "export" else "at weight_v000005 (5 folders imported)"
        assert expected in line
        watcher.send_signal(signal.SIGTERM)
        out_text, err = watcher.communicate(timeout=60)
    finally:
        watcher.kill()
        watcher.wait(10)
    assert (watcher.returncode, err) == (0, "")
    assert json.loads(out_text)["head"] == 5
