"""Failure cases P01 to P13: odd files, dtypes and folders. Each test is a case of cases.md under its number."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import make_cases
import msgspec
import numpy as np
import pytest
from helpers import (
    Expect,
    cli_good,
    data_files,
    exact,
    expected,
    holds,
    live,
    live_exact,
    manifest_of,
    recorded,
    refused,
    visible,
)
from make_cases import shard_name, st_bytes

from deltackpt.digest import sha256
from deltackpt.errors import ChainError, ConfigError, FormatError
from deltackpt.follow import Follower
from deltackpt.manifest import Anchor, Manifest, Object, Placement, decode_anchor, encode, manifest_key
from deltackpt.publish import Publisher
from deltackpt.reader import Reader
from deltackpt.store import open_store
from deltackpt.tensors import TensorTarget

Build = Callable[[str], Path]
MODES = ("replace", "switch", "in-place")


def changed(store: Path, version: int) -> set[str]:
    """Names of the tensors that a version's delta has bytes for."""
    reader = Reader(open_store(store))
    reader.load()
    delta = reader.delta(version)
    return {delta.layout.names[int(t)] for f in delta.fetched for t in f.index.changes["tensor"]}


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name, dtype and shape of all tensors of a folder."""
    return {name: (dtype, tuple(shape)) for name, (dtype, shape, _) in make_cases.ckpt_digest(folder).items()}


def one_file(path: Path, content: bytes) -> Path:
    """Make a checkpoint folder with one weight file."""
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(content)
    return path


def everything(root: Path) -> list[str]:
    """Paths of all files below a folder, temporary ones of stores aside."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


# ---------------------------------------------------------------- P01


def publish_and_pull(root: Path, mode: str = "replace") -> tuple[Path, Path]:
    """Publish v0 and v1 and bring a copy of v0 to v1. Returns store and copy."""
    store, local = root / "store", root / "local"
    cli_good("publish", root / "v0", store)
    cli_good("publish", root / "v1", store, "--no-anchors")
    if mode == "switch":
        local = root / "switched"
        cli_good("pull", store, local, "--mode", mode, "--version", "0")
    answer = cli_good("pull", store, local, "--mode", mode)
    assert (answer["previous"], answer["version"], answer["deltas"], answer["anchor"]) == (0, 1, 1, None)
    return store, local


def test_p01_empty_tensors_and_scalars_arrive_and_cost_nothing(cases: Build) -> None:
    root = cases("p01_zero_size_and_scalars")
    store, local = publish_and_pull(root)
    exact(local, expected(root), 1)
    scalars = {f"experts.{e}.input_scale" for e in range(3)}
    assert changed(store, 1) == {*scalars, "logit_scale"}
    assert len(headers(local)) == 11
    # A group is what payload is stored for: no group has an empty tensor.
    layout = Reader(open_store(store)).layout(manifest_of(store, 1).layout)
    with_payload = {layout.names[int(t)] for group in layout.groups for t in group.tensor}
    assert set(layout.names) - with_payload == {"scaled_fp8", "pad.empty", "pad.empty2"}
    assert cli_good("verify", store, "--deep")["ok"] is True
    assert cli_good("verify", local, "--against", store)["version"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_p01_shard_of_only_empty_tensors_round_trips(tmp_path: Path, mode: str) -> None:
    empties = [("e0", "F8_E4M3", (0,), b""), ("e1", "BF16", (4, 0, 3), b"")]
    expect: Expect = {"versions": {}}
    for v in range(2):
        scalar = ("w", "F32", (), struct.pack("<f", 1.0 + v))
        folder = make_cases.write_ckpt(tmp_path / f"v{v}", {shard_name(1, 2): [scalar], shard_name(2, 2): empties})
        expect["versions"][f"v{v}"] = make_cases.ckpt_digest(folder)
    shutil.copytree(tmp_path / "v0", tmp_path / "local")
    _, local = publish_and_pull(tmp_path, mode)
    exact(local, expect, 1)


@pytest.mark.parametrize("mode", MODES)
def test_p01_checkpoint_of_only_empty_tensors_round_trips(tmp_path: Path, mode: str) -> None:
    tensors = [("e0", "F8_E4M3", (0,), b""), ("e1", "BF16", (4, 0, 3), b"")]
    folder = one_file(tmp_path / "v0", st_bytes(tensors))
    for _ in range(2):
        cli_good("publish", folder, tmp_path / "store")
    cli_good("pull", tmp_path / "store", tmp_path / "local", "--mode", mode)
    exact(tmp_path / "local", {"versions": {"v0": make_cases.ckpt_digest(folder)}}, 1, "v0")
    assert manifest_of(tmp_path / "store", 1).kind == "empty"


# ---------------------------------------------------------------- P02


def test_p02_fp4_and_e8m0_arrive_with_one_byte_changed(cases: Build) -> None:
    root = cases("p02_f4_e8m0")
    store, local = publish_and_pull(root)
    exact(local, expected(root), 1)
    assert changed(store, 1) == {"l.weight", "l.scale"}
    dtype, shape, new = make_cases.read_ckpt(local)["l.weight"]
    old = make_cases.read_ckpt(root / "v0")["l.weight"][2]
    assert (dtype, shape, len(new)) == ("F4", (2, 8), 8)
    assert [i for i in range(8) if old[i] != new[i]] == [5]


def test_p02_packed_fp4_tensor_is_followed_in_place(cases: Build) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no packed FP4 dtype")
    root = cases("p02_f4_e8m0")
    publish_and_pull(root)
    tensors = live(root / "v0")
    assert (tensors["l.weight"].dtype, list(tensors["l.weight"].shape)) == (torch.float4_e2m1fn_x2, [2, 4])
    places = {n: t.data_ptr() for n, t in tensors.items()}
    prepared = Follower(str(root / "store"), TensorTarget(tensors)).prepare()
    assert prepared is not None
    assert (prepared.previous, prepared.apply()) == (0, 1)
    live_exact(tensors, root / "v1")
    assert {n: t.data_ptr() for n, t in tensors.items()} == places


# ---------------------------------------------------------------- P03


@pytest.mark.parametrize("mode", MODES)
def test_p03_data_on_odd_addresses_is_pulled_on_cpu(cases: Build, mode: str) -> None:
    root = cases("p03_unaligned")
    for v in range(2):
        raw = (root / f"v{v}" / "model.safetensors").read_bytes()
        assert struct.unpack("<Q", raw[:8])[0] % 2 == 1
    store, local = publish_and_pull(root, mode)
    exact(local, expected(root), 1)
    assert not list(local.glob("*.index.json"))
    assert changed(store, 1) == {"b.f32", "d.i64"}


# ---------------------------------------------------------------- P04, P05: a file as source and as local copy


def refused_both_ways(root: Path, bad: Path, store: Path, *named: str) -> None:
    """Assert that a bad file is refused as what is published, alone or in a folder, and as what is pulled into."""
    refused(["publish", bad, store], *named, bad.name, error=FormatError, local=bad.parent, store=store)
    folder = one_file(root / "folders" / bad.stem, bad.read_bytes())
    for action in (["publish", folder, store], ["publish", folder, root / f"new-{bad.stem}"], ["pull", store, folder]):
        refused(action, *named, "model.safetensors", error=FormatError, local=folder, store=store)
    assert visible(root / f"new-{bad.stem}") == []
    # No hand cleaning: the very folder can be given good weights.
    cli_good("pull", store, folder, "--reseed")
    assert recorded(folder) == 0


@pytest.mark.parametrize("label", ["dup", "dup_same_range"])
def test_p04_name_twice_in_a_header_is_refused(cases: Build, label: str) -> None:
    root = cases("p04_duplicate_keys")
    store = root / "store"
    cli_good("publish", one_file(root / "good", st_bytes([make_cases.T("w", "F32", (2,), 1)])), store)
    refused_both_ways(root, root / f"{label}.safetensors", store, "w", "duplicate")
    cli_good("publish", root / "good", store)


P05 = {
    "trailing": "b", "shape_too_big": "b", "begin_after_end": "b", "past_eof": "b", "negative": "a", "overflow": "b",
    "hole": "b",
}  # fmt: skip


def test_p05_good_file_is_published_and_pulled(cases: Build) -> None:
    root = cases("p05_offsets_lie")
    assert {f"{label}.safetensors" for label in (*P05, "good")} == set(expected(root)["readable"])
    cli_good("publish", root / "good.safetensors", root / "store")
    local = one_file(root / "local", (root / "good.safetensors").read_bytes())
    cli_good("publish", one_file(root / "folder", (root / "good.safetensors").read_bytes()), root / "second")
    cli_good("pull", root / "second", local)
    exact(local, {"versions": {"good": make_cases.ckpt_digest(root / "folder")}}, 0, "good")


@pytest.mark.parametrize("label", P05)
def test_p05_offsets_that_lie_are_refused_before_anything_is_allocated(cases: Build, label: str) -> None:
    root = cases("p05_offsets_lie")
    store, bad = root / "store", root / f"{label}.safetensors"
    cli_good("publish", one_file(root / "good", (root / "good.safetensors").read_bytes()), store)
    refused_both_ways(root, bad, store, f"tensor {P05[label]}")
    tracemalloc.start()
    try:
        refused(["publish", bad, root / "other"], error=FormatError)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- P06

P06 = {
    "cut_tail": ("the tensors end at byte {full}", "{found} bytes were found"),
    "cut_in_header": ("header length {header}", "the file has only {found} bytes"),
    "empty": ("{found} bytes found", "at least 8"),
    "seven_bytes": ("{found} bytes found", "at least 8"),
    "lfs_pointer": ("git-lfs pointer of {found} bytes",),
    "html": ("HTML page of {found} bytes",),
}


@pytest.mark.parametrize("label", P06)
def test_p06_torn_shard_is_refused_with_the_bytes_expected_and_found(cases: Build, label: str) -> None:
    root = cases("p06_torn_or_pointer")
    store, local, name = root / "store", root / "local", shard_name(2, 2)
    whole = (root / "v1" / name).read_bytes()
    broken = (root / label / name).read_bytes()
    sizes = {"full": len(whole), "header": struct.unpack("<Q", whole[:8])[0], "found": len(broken)}
    named = [name, *(text.format(**sizes) for text in P06[label])]
    refused(["publish", root / label, root / "first"], *named, error=FormatError, local=root / label)
    assert visible(root / "first") == []
    for v in range(2):
        cli_good("publish", root / f"v{v}", store)
    refused(["publish", root / label, store], *named, error=FormatError, local=root / label, store=store)
    cli_good("pull", store, local)
    (local / name).write_bytes(broken)
    cli_good("publish", root / "v2", store)
    refused(["pull", store, local], *named, error=FormatError, local=local, store=store)
    cli_good("pull", store, local, "--reseed")
    exact(local, expected(root), 2)


@pytest.mark.parametrize("same_mtime", [False, True])
@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_p06_zero_filled_tail_is_refused_on_the_base_checksum(cases: Build, mode: str, same_mtime: bool) -> None:
    root = cases("p06_torn_or_pointer")
    store, local, name = root / "store", root / "local", shard_name(2, 2)
    for v in range(2):
        cli_good("publish", root / f"v{v}", store)
    cli_good("pull", store, local, "--mode", mode)
    before = (local / name).stat()
    (local / name).write_bytes((root / "zero_filled_tail" / name).read_bytes())
    assert (local / name).stat().st_size == before.st_size
    if same_mtime:
        os.utime(local / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    cli_good("publish", root / "v2", store)
    pull = ["pull", store, local, "--mode", mode]
    refused(pull, "lm_head.weight", "differs from version 1", error=ChainError, local=local, store=store)
    cli_good(*pull, "--reseed")
    exact(local, expected(root), 2)


def test_p06_zero_filled_tail_parses_and_is_published_as_what_it_is(cases: Build) -> None:
    root = cases("p06_torn_or_pointer")
    for label in ("v0", "zero_filled_tail"):
        cli_good("publish", root / label, root / "store")
    cli_good("pull", root / "store", root / "local")
    assert make_cases.same_ckpt(root / "local", root / "zero_filled_tail")


# ---------------------------------------------------------------- P07

P07 = {
    "absent": {}, "empty": {}, "strings": {"format": "pt", "note": "é\n\"q\""}, "null_value": {},
    "only_metadata": {"format": "pt"},
}  # fmt: skip


@pytest.mark.parametrize("label", P07)
def test_p07_metadata_arrives_as_it_was(cases: Build, label: str) -> None:
    root = cases("p07_metadata")
    store, local = root / "store", root / "local"
    source = one_file(root / label, (root / f"{label}.safetensors").read_bytes())
    cli_good("publish", source, store)
    cli_good("pull", store, local)
    exact(local, {"versions": {label: make_cases.ckpt_digest(source)}}, 0, label)
    assert (make_cases.read_st(local / "model.safetensors")[1] or {}) == P07[label]
    # By way of a delta too.
    tensors, metadata = make_cases.read_st(source / "model.safetensors")
    new = [(n, dtype, shape, bytes(b ^ 1 for b in raw)) for n, (dtype, shape, raw) in tensors.items()]
    (source / "model.safetensors").write_bytes(st_bytes(new, metadata))
    cli_good("publish", source, store)
    cli_good("pull", store, local)
    exact(local, {"versions": {label: make_cases.ckpt_digest(source)}}, 1, label)
    assert (make_cases.read_st(local / "model.safetensors")[1] or {}) == P07[label]


def test_p07_change_of_metadata_alone_arrives(cases: Build) -> None:
    root = cases("p07_metadata")
    store, local = root / "store", root / "local"
    for label in ("absent", "strings"):
        cli_good("publish", one_file(root / label, (root / f"{label}.safetensors").read_bytes()), store)
        cli_good("pull", store, local)
        assert (make_cases.read_st(local / "model.safetensors")[1] or {}) == P07[label]
    assert (manifest_of(store, 1).kind, recorded(local)) == ("empty", 1)


@pytest.mark.parametrize("label", ["int_value", "reserved_as_tensor"])
def test_p07_metadata_that_is_no_map_of_strings_is_refused(cases: Build, label: str) -> None:
    root = cases("p07_metadata")
    store, bad = root / "store", root / f"{label}.safetensors"
    cli_good("publish", one_file(root / "good", (root / "absent.safetensors").read_bytes()), store)
    refused_both_ways(root, bad, store, "__metadata__")
    cli_good("publish", root / "good", store)


def test_p07_live_tensor_of_the_reserved_name_is_refused(tmp_path: Path) -> None:
    w = np.ones(4, np.float32)
    with Publisher(str(tmp_path / "store")) as publisher:
        refused(
            lambda: publisher.publish({"w": w, "__metadata__": w}), "__metadata__", error=ConfigError,
            store=tmp_path / "store",
        )  # fmt: skip
        assert data_files(tmp_path / "store") == []
        assert publisher.publish({"w": w}).version == 0


# ---------------------------------------------------------------- P08

P08 = {"f32": 2, "bf16": 2, "f16": 2, "c64": 1, "bool": 1, "u64": 1, "i8": 1, "e4m3": 2, "u16": 1, "f64": 1}


@pytest.mark.parametrize("mode", MODES)
def test_p08_changes_that_compare_equal_are_sent(cases: Build, mode: str) -> None:
    root = cases("p08_bitwise_dtypes")
    store, local = publish_and_pull(root, mode)
    exact(local, expected(root), 1)
    assert manifest_of(store, 1).totals.changed == 14 == sum(P08.values())
    assert changed(store, 1) == set(P08)


@pytest.mark.parametrize("name", P08)
def test_p08_changed_elements_of_each_dtype_are_counted(cases: Build, name: str) -> None:
    root = cases("p08_bitwise_dtypes")
    for v in range(2):
        dtype, shape, raw = make_cases.read_ckpt(root / f"v{v}")[name]
        cli_good("publish", one_file(root / f"only{v}", st_bytes([(name, dtype, shape, raw)])), root / "store")
    assert manifest_of(root / "store", 1).totals.changed == P08[name]


def test_p08_live_tensors_are_published_and_followed_bit_for_bit(cases: Build) -> None:
    pytest.importorskip("torch")
    root = cases("p08_bitwise_dtypes")
    store, follower = root / "store", live(root / "v0")
    with Publisher(str(store), serving=str(root / "v0")) as publisher:
        publisher.publish(live(root / "v0"))
        assert publisher.publish(live(root / "v1")).totals.changed == 14
    prepared = Follower(str(store), TensorTarget(follower)).prepare()
    assert prepared is not None
    assert (prepared.previous, prepared.apply()) == (0, 1)
    live_exact(follower, root / "v1")
    cli_good("pull", store, root / "local")
    exact(root / "local", expected(root), 1)


# ---------------------------------------------------------------- P09

_watching: list[list[str]] = []


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _watching and isinstance(arguments[0], str):
        _watching[-1].append(os.path.abspath(arguments[0]))


@contextmanager
def opened() -> Iterator[list[str]]:
    """Collect the paths of all files that this process opens."""
    if not hasattr(sys, "_deltackpt_watched"):
        sys.addaudithook(_note_open)  # for good: a hook cannot be taken back
        sys._deltackpt_watched = True  # type: ignore[attr-defined]
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def test_p09_missing_shard_is_refused_by_name(cases: Build) -> None:
    root = cases("p09_missing_and_stray")
    for store in (root / "store", root / "new"):
        if store.name == "store":
            cli_good("publish", root / "v0", store)
        refused(
            ["publish", root / "missing", store], "model-00002-of-00002.safetensors", error=ConfigError,
            local=root / "missing", store=store,
        )  # fmt: skip
        cli_good("publish", root / "v1", store)


def test_p09_tensor_that_only_the_index_names_is_refused_by_name(cases: Build) -> None:
    root = cases("p09_missing_and_stray")
    bad = root / "index_lacks_tensor"
    for store in (root / "store", root / "new"):
        if store.name == "store":
            cli_good("publish", root / "v0", store)
        refused(["publish", bad, store], "mtp.fc.weight", error=FormatError, local=bad, store=store)
        cli_good("publish", root / "v1", store)


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_p09_stray_weight_files_are_neither_read_nor_published_nor_touched(cases: Build, mode: str) -> None:
    root = cases("p09_missing_and_stray")
    store, local = root / "store", root / "local_stray"
    strays = {name: sha256((local / name).read_bytes()) for name in (
        "consolidated.safetensors", "model-00001-of-00009.safetensors",
    )}  # fmt: skip
    with opened() as paths:
        cli_good("publish", local, store)
        cli_good("publish", root / "v1", store)
        cli_good("pull", store, local, "--mode", mode)
    exact(local, expected(root), 1)
    assert {name: sha256((local / name).read_bytes()) for name in strays} == strays
    assert str(local / shard_name(1, 2)) in paths
    assert not {str(local / name) for name in strays} & set(paths)
    published = manifest_of(store, 0)
    assert [s.name for s in published.side_files] == ["config.json"]
    assert [f.name for f in Reader(open_store(store)).placement(published).files] == [
        shard_name(1, 2),
        shard_name(2, 2),
    ]
    cli_good("pull", store, root / "fresh")
    assert sorted(p.name for p in (root / "fresh").glob("*.safetensors")) == [shard_name(1, 2), shard_name(2, 2)]


def test_p09_stale_total_size_is_never_trusted(cases: Build) -> None:
    root = cases("p09_missing_and_stray")
    index = "model.safetensors.index.json"
    content = json.loads((root / "v0" / index).read_text())
    assert content["metadata"]["total_size"] == 1888
    content["metadata"] = {"total_size": 96, "note": "kept"}
    (root / "v0" / index).write_text(json.dumps(content))
    cli_good("publish", root / "v0", root / "store")
    cli_good("pull", root / "store", root / "fresh")
    exact(root / "fresh", expected(root), 0)
    assert json.loads((root / "fresh" / index).read_text())["metadata"] == {"note": "kept", "total_size": 1888}


# ---------------------------------------------------------------- P10

CLIMBING = ["dotdot", "absolute", "sneaky", "nul", "empty"]


def climbing_value(root: Path, label: str) -> str:
    value: str = json.loads((root / label / "model.safetensors.index.json").read_text())["weight_map"]["secret"]
    return value


def assert_nothing_climbed(root: Path, store: Path, before: list[str]) -> None:
    """Assert that the victim is as it was, its content is in no store, and no file is new outside the store."""
    victim = root / "victim.safetensors"
    assert sha256(victim.read_bytes()) == expected(root)["victim"]
    secret = make_cases.read_st(victim)[0]["secret"][2]
    for path in store.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes()
    assert [p for p in everything(root) if not p.startswith(("store/", "new/"))] == before


@pytest.mark.parametrize("label", CLIMBING)
def test_p10_weight_map_that_climbs_out_is_refused(cases: Build, label: str) -> None:
    root = cases("p10_path_traversal")
    store, bad, value = root / "store", root / label, climbing_value(root, label)
    before = everything(root)
    cli_good("publish", root / "v0", store)
    for action in (["publish", bad, store], ["publish", bad, root / "new"], ["pull", store, bad]):
        refused(action, repr(value), "secret", error=FormatError, local=bad, store=store)
    assert visible(root / "new") == []
    assert_nothing_climbed(root, store, before)
    cli_good("publish", root / "v1", store)
    cli_good("pull", store, bad, "--reseed")
    exact(bad, expected(root), 1)


Forge = Callable[[Path, str], None]


def rewrite_head(store: Path, edit: Callable[[Manifest], Manifest]) -> None:
    """Replace the manifest of version 1, the newest."""
    (store / manifest_key(1)).write_bytes(encode(edit(manifest_of(store, 1))))


def forge_placement(store: Path, edit: Callable[[Placement], Placement]) -> None:
    placement = Reader(open_store(store)).placement(manifest_of(store, 1))
    raw = encode(edit(placement))
    (store / "placements" / f"{sha256(raw)}.json").write_bytes(raw)
    rewrite_head(store, lambda m: msgspec.structs.replace(m, placement=sha256(raw)))


def weight_file(store: Path, value: str) -> None:
    def edit(placement: Placement) -> Placement:
        first, *others = placement.files
        return msgspec.structs.replace(placement, files=(msgspec.structs.replace(first, name=value), *others))

    forge_placement(store, edit)


def index_file(store: Path, value: str) -> None:
    forge_placement(store, lambda p: msgspec.structs.replace(p, index=value))


def side_file(store: Path, value: str) -> None:
    def edit(manifest: Manifest) -> Manifest:
        (side,) = manifest.side_files
        return msgspec.structs.replace(manifest, side_files=(msgspec.structs.replace(side, name=value),))

    rewrite_head(store, edit)


def shard_key(store: Path, value: str) -> None:
    def edit(manifest: Manifest) -> Manifest:
        (shard,) = manifest.shards
        return msgspec.structs.replace(manifest, shards=(msgspec.structs.replace(shard, key=value),))

    rewrite_head(store, edit)


def anchor_of_manifest(store: Path, value: str) -> None:
    def edit(manifest: Manifest) -> Manifest:
        named = Object(value, "0" * 64)
        return msgspec.structs.replace(manifest, kind="full", base=None, shards=(), present=b"", anchor=named)

    rewrite_head(store, edit)


def forge_anchor(store: Path, edit: Callable[[Anchor], Anchor]) -> None:
    """Put a copy of version 0's anchor record, edited, as that of a full version 1."""
    first = manifest_of(store, 0)
    assert first.anchor is not None
    anchor = decode_anchor((store / first.anchor.key).read_bytes(), 0)
    raw = encode(edit(msgspec.structs.replace(anchor, version=1)))
    (store / "data" / "forged").mkdir()
    (store / "data/forged/anchor.json").write_bytes(raw)

    def full(manifest: Manifest) -> Manifest:
        named = Object("data/forged/anchor.json", sha256(raw))
        return msgspec.structs.replace(
            manifest, kind="full", base=None, shards=(), present=b"", anchor=named, state=first.state
        )

    rewrite_head(store, full)


def anchor_folder(store: Path, value: str) -> None:
    forge_anchor(store, lambda a: msgspec.structs.replace(a, folder=value))


def anchor_file(store: Path, value: str) -> None:
    def edit(anchor: Anchor) -> Anchor:
        first, *others = anchor.files
        return msgspec.structs.replace(anchor, files=(msgspec.structs.replace(first, name=value), *others))

    forge_anchor(store, edit)


FORGERIES: list[Forge] = [
    weight_file, index_file, side_file, shard_key, anchor_of_manifest, anchor_folder, anchor_file,
]  # fmt: skip


@pytest.mark.parametrize("forge", FORGERIES)
def test_p10_store_that_names_a_file_outside_is_refused(cases: Build, forge: Forge) -> None:
    root = cases("p10_path_traversal")
    for number, label in enumerate(CLIMBING):
        store, local, value = root / f"store/{number}", root / f"new/{number}", climbing_value(root, label)
        for v in range(2):
            cli_good("publish", root / f"v{v}", store, "--no-anchors")
        by_anchor = forge in (anchor_of_manifest, anchor_folder, anchor_file)
        if by_anchor:
            make_cases.write_ckpt(local, make_cases.tiny(seed=500))
        else:
            shutil.copytree(root / "local", local)
        reseed = ["--reseed"] if by_anchor else []
        before = [p for p in everything(root) if not p.startswith(("store/", "new/"))]
        good = (store / manifest_key(1)).read_bytes()
        forge(store, value)
        for target in (local, root / f"new/fresh{number}"):
            refused(["pull", store, target, *reseed], repr(value), error=FormatError, local=local, store=store)
            assert not (root / f"new/fresh{number}").exists()
        assert_nothing_climbed(root, store, before)
        (store / manifest_key(1)).write_bytes(good)
        cli_good("pull", store, local, *reseed)
        exact(local, expected(root), 1)


# ---------------------------------------------------------------- P11


def assert_blobs_are_whole(root: Path, expect: Expect) -> None:
    """Assert that every blob hashes to its name and that the other snapshot still holds v0, through its links."""
    hub = root / "hub" / "models--t--t"
    blobs = list((hub / "blobs").iterdir())
    assert len(blobs) == 4
    for blob in blobs:
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    other = hub / "snapshots" / ("1" * 40)
    assert all(p.is_symlink() for p in other.iterdir())
    holds(other, expect, "v0")


def test_p11_hugging_face_cache_snapshot_gets_real_files_and_its_blobs_survive(cases: Build) -> None:
    root = cases("p11_hf_cache_symlinks")
    store, expect = root / "store", expected(root)
    local = root / expect["local"]
    (root / "v2" / "config.json").write_text('{"architectures":["Other"]}\n')
    cli_good("publish", root / "v0", store)
    for v in (1, 2):
        cli_good("publish", root / f"v{v}", store)
        cli_good("pull", store, local)
        exact(local, expect, v)
        assert_blobs_are_whole(root, expect)
    assert not [p for p in local.iterdir() if p.is_symlink()]
    assert (local / "config.json").read_text() == '{"architectures":["Other"]}\n'


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_p11_writing_in_place_through_a_link_is_refused_with_advice(cases: Build, link: str) -> None:
    root = cases("p11_hf_cache_symlinks")
    store, expect = root / "store", expected(root)
    local = root / expect["local"]
    if link == "hard":
        for path in list(local.iterdir()):
            blob = path.resolve()
            path.unlink()
            os.link(blob, path)
    for v in range(2):
        cli_good("publish", root / f"v{v}", store)
    refused(
        ["pull", store, local, "--mode", "in-place"], "is a link", "--mode replace", error=ConfigError,
        local=local, store=store,
    )  # fmt: skip
    assert_blobs_are_whole(root, expect)
    cli_good("pull", store, local, "--mode", "replace")
    exact(local, expect, 1)
    assert_blobs_are_whole(root, expect)


# ---------------------------------------------------------------- P12


def by_glob(folder: Path) -> dict[str, object]:
    """What a loader that takes every weight file of a folder sees; a name in two files is an error."""
    found: dict[str, object] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = make_cases.read_st(path)[0]
        assert not set(tensors) & set(found)
        found |= tensors
    return found


P12_FILES = {
    1: ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"],
    2: ["model.safetensors"],
}


def assert_resharded(local: Path, expect: Expect, version: int) -> None:
    exact(local, expect, version)
    folder = local / "current" if (local / "current").is_symlink() else local
    assert by_glob(folder) == make_cases.read_ckpt(folder)
    assert sorted(p.name for p in folder.glob("*.safetensors")) == P12_FILES[version]
    assert (folder / "model.safetensors.index.json").exists() == (version == 1)


@pytest.mark.parametrize("mode", ["replace", "switch"])
def test_p12_resharded_versions_leave_no_old_file(cases: Build, mode: str) -> None:
    root = cases("p12_reshard")
    store, expect = root / "store", expected(root)
    straight = root / "straight"
    if mode == "replace":
        shutil.copytree(root / "local", straight)
    cli_good("publish", root / "v0", store)
    step_by_step = root / "local" if mode == "replace" else root / "switched"
    cli_good("pull", store, step_by_step, "--mode", mode)
    cli_good("pull", store, straight, "--mode", mode)
    for v in (1, 2):
        assert cli_good("publish", root / f"v{v}", store)["kind"] == "delta"
        assert cli_good("pull", store, step_by_step, "--mode", mode)["previous"] == v - 1
        assert_resharded(step_by_step, expect, v)
    assert cli_good("pull", store, straight, "--mode", mode)["previous"] == 0
    assert_resharded(straight, expect, 2)
    # And back again.
    cli_good("pull", store, straight, "--mode", mode, "--version", "1")
    assert_resharded(straight, expect, 1)


def test_p12_resharding_in_place_is_refused_with_advice(cases: Build) -> None:
    root = cases("p12_reshard")
    store, local = root / "store", root / "local"
    for v in range(2):
        cli_good("publish", root / f"v{v}", store)
    refused(["pull", store, local, "--mode", "in-place"], "--mode replace", error=ConfigError, local=local, store=store)
    cli_good("pull", store, local, "--mode", "replace")
    assert_resharded(local, expected(root), 1)


# ---------------------------------------------------------------- P13

Q = "model.layers.0.self_attn.q_proj.weight"
P13 = {
    "added": ("mtp.fc.weight", "is new"),
    "removed": ("lm_head.weight", "is missing"),
    "renamed": ("model.embed_tokens.weight", "is missing", "model.language_model.embed_tokens.weight", "is new"),
    "reshaped": (Q, "[4, 16]", "was [8, 8]"),
    "grown": (Q, "[16, 8]", "was [8, 8]"),
    "retyped": (Q, "F16", "was BF16"),
    "fused": ("model.layers.0.mlp.experts.0.w1.weight", "is missing", "model.layers.0.mlp.experts.gate_up_proj"),
}


@pytest.mark.parametrize("label", P13)
def test_p13_other_set_of_tensors_is_refused_by_name_and_with_relayout_exact(cases: Build, label: str) -> None:
    root = cases("p13_tensor_set_changes")
    store, local, expect = root / "store", root / "local", expected(root)
    cli_good("publish", root / "v0", store)
    cli_good("pull", store, local)
    refused(
        ["publish", root / label, store], *P13[label], "--relayout", error=ConfigError, local=root / label, store=store
    )
    cli_good("pull", store, local)
    exact(local, expect, 0)
    assert cli_good("publish", root / label, store, "--relayout")["kind"] == "full"
    cli_good("pull", store, local)
    exact(local, expect, 1, label)
    assert headers(local) == headers(root / label) != headers(root / "v0")


@pytest.mark.parametrize("label", P13)
def test_p13_other_set_of_live_tensors_is_refused_by_name(cases: Build, label: str) -> None:
    pytest.importorskip("torch")
    root = cases("p13_tensor_set_changes")
    store = root / "store"
    with Publisher(str(store)) as publisher:
        publisher.publish(live(root / "v0"))
        refused(lambda: publisher.publish(live(root / label)), *P13[label], error=ConfigError, store=store)
        publisher.publish(live(root / "v0"))
    cli_good("pull", store, root / "pulled")
    exact(root / "pulled", expected(root), 1, "v0")
