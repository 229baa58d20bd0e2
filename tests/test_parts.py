"""Versions that were published in parts: every reader takes them as it takes others, and refuses what is hostile."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from helpers import cli_run
from hypothesis import given, settings
from hypothesis import strategies as st
from make_cases import read_ckpt
from parts import Stream
from strategies import Memory, box_layouts, changed_bytes, partitions, random_bytes
from wire import TheirReader

from deltackpt import backend
from deltackpt.anchor import make_anchor
from deltackpt.checkpoint import Folder, default_placement
from deltackpt.digest import state_fingerprint
from deltackpt.errors import DeltaError, FormatError, IntegrityError
from deltackpt.export import Exporter
from deltackpt.folder import CheckpointTarget
from deltackpt.follow import Follower
from deltackpt.layout import Layout
from deltackpt.manifest import Manifest, decode_manifest, digest, encode, manifest_key
from deltackpt.mirror import mirror_store
from deltackpt.partition import Partition
from deltackpt.prune import prune_store
from deltackpt.reader import Reader
from deltackpt.store import LocalStore
from deltackpt.verify import verify_store
from deltackpt.writer import Draft

Mode = Literal["replace", "switch", "in-place"]

LAYOUT = Layout(
    ["a", "b", "c", "empty", "s"], ["BF16", "U8", "F32", "F32", "I16"], [[64, 40], [9000], [30, 7], [0], []]
)
COLUMNS = Partition(
    LAYOUT,
    [
        [(0, ((0, 64), (0, 10))), (1, ((0, 4000),))],
        [(0, ((0, 64), (10, 40))), (1, ((4000, 9000),)), (2, None), (4, None)],
    ],
)
ROWS = Partition(
    LAYOUT, [[(0, ((0, 3), (0, 40))), (4, None)], [(0, ((3, 64), (0, 40))), (1, None)], [(2, None)]]
)  # fmt: skip


def stream(root: Path) -> Stream:
    """Versions 0 to 4: full, columns, whole tensors, rows, columns in one shard."""
    contents = [random_bytes(LAYOUT, 0)]
    for seed, density in ((1, 0.01), (2, 0.3), (3, 0.01), (4, 0.5)):
        contents.append(changed_bytes(LAYOUT, contents[-1], density, seed))
    made = Stream(root / "store", LAYOUT, contents[0])
    made.publish(contents[1], COLUMNS)
    made.publish(contents[2])
    made.publish(contents[3], ROWS)
    made.publish(contents[4], COLUMNS, together=True)
    return made


def pull(made: Stream, dest: Path, version: int | None = None, mode: Mode = "replace") -> dict[str, bytes]:
    with Follower(made.url, CheckpointTarget(dest, mode=mode)) as follower:
        if prepared := follower.prepare(version):
            prepared.apply()
    held = dest / "current" if mode == "switch" else dest
    return {name: raw for name, (_, _, raw) in read_ckpt(held).items()}


def named(made: Stream, version: int) -> dict[str, bytes]:
    return dict(zip(made.layout.names, made.contents[version], strict=True))


@pytest.mark.parametrize("mode", ["replace", "switch", "in-place"])
def test_every_version_is_pulled_bit_exact_forwards_and_backwards(tmp_path: Path, mode: Mode) -> None:
    made = stream(tmp_path)
    for version in (0, 1, 2, 3, 4, 3, 1, 4, 0):
        assert pull(made, tmp_path / "dest", version, mode) == named(made, version)


def test_newcomers_catch_up_over_versions_with_different_partitions(tmp_path: Path) -> None:
    made = stream(tmp_path)
    assert pull(made, tmp_path / "dest") == named(made, 4)


@settings(max_examples=12)
@given(data=st.data())
def test_any_partition_reconstructs_what_one_process_publishes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    layout = data.draw(box_layouts())
    made = Stream(tmp_path_factory.mktemp("s") / "store", layout, random_bytes(layout, 7))
    for seed in range(2):
        new = changed_bytes(layout, made.contents[-1], data.draw(st.sampled_from((0.01, 0.5))), seed)
        made.publish(new, data.draw(partitions(layout)), together=data.draw(st.booleans()))
    reader = Reader(LocalStore(made.url))
    reader.load()
    assert [e.manifest.version for e in reader.history.values()] == [0, 1, 2]
    report = verify_store(LocalStore(made.url), deep=True)
    assert (report.problems, report.rebuilt) == ((), 3)


def test_deep_verify_mirror_and_anchor_take_parts(tmp_path: Path) -> None:
    made = stream(tmp_path)
    make_anchor(made.url, 3)
    mirror_store(LocalStore(made.url), LocalStore(tmp_path / "mirror"))
    assert sorted(p.name for p in (tmp_path / "mirror/partitions").iterdir()) == sorted(
        f"{p.digest}.json" for p in (COLUMNS, ROWS)
    )
    for store, anchors in ((made.url, (0, 3)), (tmp_path / "mirror", (0,))):
        report = verify_store(LocalStore(store), deep=True)
        assert (report.problems, report.rebuilt, report.anchors) == ((), 5, anchors)


def test_show_counts_the_groups_of_the_partition(tmp_path: Path) -> None:
    """It said the number of groups that the layout would have without parts."""
    made = stream(tmp_path)
    shown = [json.loads(cli_run("show", made.url, version, "--json").output) for version in ("1", "2")]
    assert [one["layout"]["groups"] for one in shown] == [5, 3]


def test_prune_keeps_or_removes_a_version_with_the_shards_of_all_its_parts(tmp_path: Path) -> None:
    """Those of all parts but the first were taken for litter, and removed from versions that were to be kept."""
    made = stream(tmp_path)
    prune_store(LocalStore(made.url), dry_run=False, grace_s=0)
    assert pull(made, tmp_path / "all") == named(made, 4)
    make_anchor(made.url, 3)
    prune_store(LocalStore(made.url), keep=1, dry_run=False, grace_s=0)
    assert len(list((tmp_path / "store/partitions").iterdir())) == 2
    assert {path.name[:20] for path in (tmp_path / "store/data").iterdir() if any(path.iterdir())} == {
        f"{3:020d}", f"{4:020d}"
    }  # fmt: skip
    assert pull(made, tmp_path / "dest") == named(made, 4)


def test_rewind_crosses_versions_in_parts(tmp_path: Path) -> None:
    made = stream(tmp_path)
    reader = Reader(LocalStore(made.url))
    reader.load()
    assert pull(made, tmp_path / "dest") == named(made, 4)
    held = Memory(made.contents[1])
    table = backend.fingerprints(LAYOUT, held.addresses)
    assert reader.fingerprints(1).tolist() == table.tolist()
    draft = Draft("rewind", LAYOUT, default_placement(LAYOUT), (), state_fingerprint(LAYOUT.weights, table), 1)
    made.writer.commit(draft)
    made.contents.append(made.contents[1])
    made.publish(made.contents[2], ROWS)
    assert pull(made, tmp_path / "dest", 5) == named(made, 1)
    assert pull(made, tmp_path / "dest") == named(made, 2)


def test_live_tensors_follow_versions_in_parts(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from helpers import DEVICE, raw_of, tensor_of

    from deltackpt.tensors import TensorTarget

    made = stream(tmp_path)
    tensors = {
        n: tensor_of(d, s, raw)
        for n, d, s, raw in zip(LAYOUT.names, LAYOUT.dtypes, LAYOUT.shapes, made.contents[0], strict=True)
    }
    tensors["c"] = torch.empty((7, 30), device=DEVICE).t().copy_(tensors["c"])  # strided: through a shadow
    follower = Follower(made.url, TensorTarget(tensors))
    for version in (0, 3, 4, 1, 0):
        if prepared := follower.prepare(version):
            prepared.apply()
        assert {n: raw_of(t) for n, t in tensors.items()} == named(made, version)


def test_a_module_follows_versions_in_parts_through_its_scatter_plan(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from helpers import raw_of, tensor_of

    from deltackpt.planned import PlannedTarget
    from deltackpt.scatter import make_plan

    made = stream(tmp_path)
    names = [n for n, count in zip(LAYOUT.names, LAYOUT.count, strict=True) if count]
    module = torch.nn.Module()
    shapes = {n: tensor_of(d, s, b"") for n, d, s in zip(LAYOUT.names, LAYOUT.dtypes, LAYOUT.shapes, strict=True)}
    for name in names:
        held = shapes[name].t().contiguous() if shapes[name].dim() == 2 else shapes[name]
        module.register_buffer(name, held)

    def load(weights: Iterable[tuple[str, object]]) -> None:
        for name, tensor in weights:
            if name in names:
                assert isinstance(tensor, torch.Tensor)
                getattr(module, name).copy_(tensor.t() if tensor.dim() == 2 else tensor)

    def weights(version: int) -> list[tuple[str, object]]:
        tensors = zip(LAYOUT.names, LAYOUT.dtypes, LAYOUT.shapes, made.contents[version], strict=True)
        return [(n, tensor_of(d, s, raw)) for n, d, s, raw in tensors]

    load(weights(0))
    plan = make_plan(module, load, LAYOUT)
    with Follower(made.url, PlannedTarget(module, plan)) as follower:
        for version in (1, 4, 2, 0):
            prepared = follower.prepare(version)
            assert prepared is not None
            prepared.apply()
            held = {n: raw_of(t) for n, t in module.named_buffers()}
            load(weights(version))
            assert {n: raw_of(t) for n, t in module.named_buffers()} == held, version


def test_their_reader_gets_exported_versions_in_parts(tmp_path: Path) -> None:
    made = stream(tmp_path)
    pull(made, tmp_path / "base", 0)
    Exporter(LocalStore(made.url), str(tmp_path / "out")).once()
    host = TheirReader(tmp_path / "base")
    for version in (1, 2, 3, 4):
        host.pull(tmp_path / "out", version)
        assert {n: host.weights[n] for n in LAYOUT.names} == named(made, version)


def test_in_place_apply_that_was_killed_is_finished_from_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stream(tmp_path)
    pull(made, tmp_path / "dest", 0)
    real = CheckpointTarget._set_values

    def torn(self: CheckpointTarget, folder: Folder, tiling: Partition, staged: list[backend.Staged]) -> None:
        # Half of the values are in the file when the process ends.
        real(self, folder, tiling, staged[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointTarget, "_set_values", torn)
        with pytest.raises(KeyboardInterrupt):
            pull(made, tmp_path / "dest", 1, "in-place")
    assert pull(made, tmp_path / "dest", 1, "in-place") == named(made, 1)
    assert pull(made, tmp_path / "dest", 0, "in-place") == named(made, 0)


# ---------------------------------------------------------------- hostile


def rewrite(made: Stream, **changes: object) -> None:
    """Edit the manifest of the newest version as a hostile writer might."""
    path = Path(made.url) / manifest_key(4)
    path.write_bytes(encode(msgspec.structs.replace(decode_manifest(path.read_bytes(), 4), **changes)))


def refusal(made: Stream, tmp_path: Path) -> DeltaError:
    """Pulling the newest version fails, the folder keeps the one before, and deep verify names the newest one alone."""
    pull(made, tmp_path / "dest", 3)
    with pytest.raises(DeltaError) as caught:
        pull(made, tmp_path / "dest")
    assert pull(made, tmp_path / "dest", 3) == named(made, 3)
    report = verify_store(LocalStore(made.url), deep=True)
    assert report.problems
    assert all("version 4" in str(p) for p in report.problems)
    return caught.value


def manifest_of(made: Stream) -> Manifest:
    return decode_manifest((Path(made.url) / manifest_key(4)).read_bytes(), 4)


def test_partition_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    made = stream(tmp_path)
    path = Path(made.url) / f"partitions/{COLUMNS.digest}.json"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"4000", b"4001"))
    with pytest.raises(IntegrityError, match=rf"partitions/{COLUMNS.digest}.json: SHA-256"):
        pull(made, tmp_path / "dest")
    report = verify_store(LocalStore(made.url))
    assert {type(p) for p in report.problems} == {IntegrityError}
    path.write_bytes(raw)
    assert pull(made, tmp_path / "dest") == named(made, 4)


def test_data_of_a_part_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """A takeover and the late original: XORed twice, the change would vanish."""
    made = stream(tmp_path)
    shards = manifest_of(made).shards
    rewrite(made, shards=(*shards, *shards))
    assert "the manifest names" in str(refusal(made, tmp_path))


def test_group_of_a_part_that_is_missing_is_refused(tmp_path: Path) -> None:
    made = stream(tmp_path)
    rewrite(made, present=b"\xff")
    assert "the manifest names" in str(refusal(made, tmp_path))


def test_version_in_parts_read_by_another_partition_is_refused(tmp_path: Path) -> None:
    made = stream(tmp_path)
    rewrite(made, partition=ROWS.digest)
    assert type(refusal(made, tmp_path)) is FormatError
    rewrite(made, partition=None)
    with pytest.raises(FormatError):
        pull(made, tmp_path / "dest")


def test_partition_of_another_layout_is_refused(tmp_path: Path) -> None:
    made = stream(tmp_path)
    other = Partition(Layout(["x"], ["U8"], [[4]]), [[(0, None)]])
    (Path(made.url) / f"partitions/{other.digest}.json").write_bytes(other.encoded)
    rewrite(made, partition=other.digest)
    assert "partition: it cuts layout" in str(refusal(made, tmp_path))


def test_digest_of_the_manifest_covers_the_partition(tmp_path: Path) -> None:
    made = stream(tmp_path)
    before = digest((Path(made.url) / manifest_key(4)).read_bytes())
    rewrite(made, partition=ROWS.digest)
    assert digest((Path(made.url) / manifest_key(4)).read_bytes()) != before
