"""Checkpoint folders: read strictly, mapped, laid out again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import make_cases
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from strategies import layouts, random_bytes

from deltackpt.checkpoint import (
    Checkpoint,
    Run,
    addresses,
    copy_runs,
    create_file,
    index_bytes,
    mapped,
    open_folder,
    placed,
    replace_file,
)
from deltackpt.errors import ConfigError, FormatError, StoreError
from deltackpt.kernels import view
from deltackpt.layout import Layout
from deltackpt.manifest import Placement, ShardFile

INDEX = "model.safetensors.index.json"


def contents(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of a folder, read through its mapping."""
    folder = open_folder(path)
    checkpoint = folder.checkpoint
    layout = checkpoint.layout
    with mapped([folder.file_path(n) for n in range(len(checkpoint.placement.files))]) as files:
        places = addresses(checkpoint, files).tolist()
        return {
            name: (layout.dtypes[i], list(layout.shapes[i]), view(places[i], int(layout.nbytes[i])).tobytes())
            for i, name in enumerate(layout.names)
        }


def one_file(path: Path, *tensors: tuple[str, str, tuple[int, ...], bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(make_cases.st_bytes(list(tensors)))
    return path


W = ("w", "F32", (2,), bytes(range(8)))


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "case", ["p01_zero_size_and_scalars", "p02_f4_e8m0", "p03_unaligned", "p08_bitwise_dtypes", "p12_reshard"]
)
def test_folder_is_read_as_the_case_says(case: str, cases: Callable[[str], Path]) -> None:
    folder = cases(case)
    for label, tensors in json.loads((folder / "expect.json").read_text())["versions"].items():
        found = contents(folder / label)
        assert {n: [d, s, hashlib.sha256(b).hexdigest()] for n, (d, s, b) in found.items()} == tensors


def test_placement_holds_files_modes_metadata_and_index(cases: Callable[[str], Path]) -> None:
    folder = cases("p12_reshard") / "v0"
    first, second = folder / make_cases.shard_name(1, 2), folder / make_cases.shard_name(2, 2)
    first.chmod(0o640)
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] |= {"total_parameters": 7, "note": "é"}
    (folder / INDEX).write_text(json.dumps(index))
    checkpoint = open_folder(folder).checkpoint
    assert [(f.name, f.mode, f.metadata) for f in checkpoint.placement.files] == [
        (first.name, 0o640, {"format": "pt"}),
        (second.name, second.stat().st_mode & 0o777, {"format": "pt"}),
    ]
    assert checkpoint.placement.index == INDEX
    assert json.loads(checkpoint.placement.index_metadata) == {"total_parameters": 7, "note": "é"}
    assert checkpoint.nbytes == (first.stat().st_size, second.stat().st_size)


def test_single_file_is_a_checkpoint_without_side_files(tmp_path: Path) -> None:
    one_file(tmp_path / "m" / "model.safetensors", W)
    (tmp_path / "m" / "config.json").write_text("{}")
    folder = open_folder(tmp_path / "m" / "model.safetensors")
    assert (folder.side_files, folder.checkpoint.placement.index) == ({}, None)
    assert [f.name for f in folder.checkpoint.placement.files] == ["model.safetensors"]


def test_side_files_are_everything_that_is_neither_weights_nor_hidden(tmp_path: Path) -> None:
    one_file(tmp_path / "model.safetensors", W)
    kept = ["config.json", "tokenizer.model", "merges.txt", "1_Pooling/config.json", "é b.txt"]
    left = ["pytorch_model.bin", "x.pt", "pytorch_model.bin.index.json", ".gitattributes", ".cache/x.json", "old.gguf"]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "config.json").chmod(0o600)
    side = open_folder(tmp_path).side_files
    assert sorted(side) == sorted(kept)
    assert side["config.json"] == 0o600


def test_linked_folder_is_not_followed(tmp_path: Path) -> None:
    """A link to the folder itself ended in an error of the operating system."""
    one_file(tmp_path / "model.safetensors", W)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "config.json").write_text("{}")
    assert list(open_folder(tmp_path).side_files) == ["config.json"]


def test_side_file_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    one_file(tmp_path / "model.safetensors", W)
    (tmp_path / os.fsdecode(b"bad\xff.json")).write_text("{}")
    with pytest.raises(FormatError, match="is not a plain name inside the folder"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["a:b.safetensors", "a\\b.safetensors", "a\nb.safetensors"])
def test_weight_file_whose_name_readers_refuse_is_refused(name: str, tmp_path: Path) -> None:
    """It could be published, but no reader would take the placement."""
    one_file(tmp_path / name, W)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(FormatError, match="is not a plain name inside the folder"):
            open_folder(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "does not exist; expected a checkpoint folder"),
        (lambda p: p.mkdir(), "has no safetensors file; expected a Hugging Face checkpoint folder"),
        (lambda p: one_file(p / ".hidden.safetensors", W), "has no safetensors file"),
    ],
)
def test_path_that_is_no_checkpoint_is_a_config_error(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "m")
    with pytest.raises(ConfigError, match=message):
        open_folder(tmp_path / "m")


def test_two_indexes_are_a_config_error(tmp_path: Path) -> None:
    one_file(tmp_path / "model.safetensors", W)
    for name in (INDEX, "other.safetensors.index.json"):
        (tmp_path / name).write_text('{"weight_map":{}}')
    with pytest.raises(ConfigError, match=r"2 index files: model.safetensors.index.json other.safetensors.index.json"):
        open_folder(tmp_path)


def test_tensor_in_two_files_is_refused_by_name(tmp_path: Path) -> None:
    one_file(tmp_path / "a.safetensors", W)
    one_file(tmp_path / "b.safetensors", W)
    with pytest.raises(FormatError, match=r"tensor w is in a\.safetensors and in b\.safetensors \(duplicate\)"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "[]", "{}", '{"weight_map":[]}', '{"weight_map":{"w":3}}', '{"weight_map":{"w":null}}',
        '{"weight_map":{},"metadata":[]}', '{"later":' + "[" * 100_000 + "]" * 100_000 + ',"weight_map":{}}',
        '{"weight_map":{"w":"\\ud800.safetensors"}}',
    ],
    ids=range(10),
)  # fmt: skip
def test_index_that_is_none_is_a_format_error(text: str, tmp_path: Path) -> None:
    one_file(tmp_path / "model.safetensors", W)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError, match=INDEX):
        open_folder(tmp_path)


def test_index_must_name_every_tensor_of_its_files(tmp_path: Path) -> None:
    one_file(tmp_path / "a.safetensors", W, ("v", "U8", (1,), b"x"))
    (tmp_path / INDEX).write_text('{"weight_map":{"w":"a.safetensors"}}')
    with pytest.raises(FormatError, match=r"does not name v, which a\.safetensors holds"):
        open_folder(tmp_path)


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize("name", ["dup", "dup_same_range"])
def test_p04_repeated_name_is_refused(name: str, cases: Callable[[str], Path]) -> None:
    with pytest.raises(FormatError, match=rf"{name}\.safetensors: w is there twice \(duplicate\)"):
        open_folder(cases("p04_duplicate_keys") / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trailing", r"last tensor b\), but \d+ bytes were found"),
        ("hole", "tensor b begins at 24 and leaves a hole"),
        ("shape_too_big", r"tensor b: F32\[1000, 1000\] needs 4000000 bytes"),
        ("begin_after_end", r"tensor b: .* hold -16"),
        ("past_eof", r"last tensor b\), but \d+ bytes were found"),
        ("negative", "tensor a: "),
        ("overflow", "tensor b: .*more than 2"),
    ],
)
def test_p05_offsets_that_lie_are_refused_by_file_and_tensor(
    name: str, message: str, cases: Callable[[str], Path]
) -> None:
    folder = cases("p05_offsets_lie")
    assert sorted(contents(folder / "good.safetensors")) == ["a", "b"]
    with pytest.raises(FormatError, match=rf"{name}\.safetensors: .*{message}"):
        open_folder(folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut_tail", r"the tensors end at byte \d+ \(last tensor lm_head\.weight\), but \d+ bytes were found"),
        ("cut_in_header", r"header length \d+, but the file has only 100 bytes; it is cut short"),
        ("empty", "0 bytes found, a safetensors file has at least 8"),
        ("seven_bytes", "7 bytes found, a safetensors file has at least 8"),
        ("lfs_pointer", r"a git-lfs pointer of \d+ bytes, not weights"),
        ("html", "an HTML page of 64 bytes, not weights"),
    ],
)
def test_p06_shard_that_is_not_all_there_is_refused(name: str, message: str, cases: Callable[[str], Path]) -> None:
    with pytest.raises(FormatError, match=rf"model-00002-of-00002\.safetensors: {message}"):
        open_folder(cases("p06_torn_or_pointer") / name)


def test_p06_zeros_where_weights_were_do_parse(cases: Callable[[str], Path]) -> None:
    assert len(open_folder(cases("p06_torn_or_pointer") / "zero_filled_tail").checkpoint.layout.names) == 15


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("absent", None), ("empty", {}), ("strings", {"format": "pt", "note": 'é\n"q"'}), ("null_value", None),
        ("only_metadata", {"format": "pt"}),
    ],
)  # fmt: skip
def test_p07_metadata_is_kept_as_it_is(
    name: str, metadata: dict[str, str] | None, cases: Callable[[str], Path]
) -> None:
    path = cases("p07_metadata") / f"{name}.safetensors"
    checkpoint = open_folder(path).checkpoint
    assert checkpoint.placement.files[0].metadata == metadata
    # Written again, the reference reader finds the same.
    _, headers = placed(checkpoint.layout, checkpoint.placement)
    again = path.with_name("again.safetensors")
    again.write_bytes(headers[0] + bytes(checkpoint.layout.total_bytes))
    with safe_open(again, "np") as file:
        assert file.metadata() == metadata or (metadata == {} and file.metadata() is None)


@pytest.mark.parametrize("name", ["int_value", "reserved_as_tensor"])
def test_p07_metadata_that_is_no_map_of_strings_is_refused(name: str, cases: Callable[[str], Path]) -> None:
    with pytest.raises(FormatError, match=rf"{name}\.safetensors: .*__metadata__"):
        open_folder(cases("p07_metadata") / f"{name}.safetensors")


def test_p09_missing_shard_and_missing_tensor_are_refused_by_name(cases: Callable[[str], Path]) -> None:
    folder = cases("p09_missing_and_stray")
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors does not exist, but .* names it"):
        open_folder(folder / "missing")
    with pytest.raises(FormatError, match=r"names mtp\.fc\.weight in model-00002-of-00002\.safetensors, but the file"):
        open_folder(folder / "index_lacks_tensor")


def test_p09_stray_files_are_neither_read_nor_published(cases: Callable[[str], Path]) -> None:
    folder = open_folder(cases("p09_missing_and_stray") / "local_stray")
    names = [make_cases.shard_name(1, 2), make_cases.shard_name(2, 2)]
    assert [f.name for f in folder.checkpoint.placement.files] == names
    assert list(folder.side_files) == ["config.json"]
    assert len(folder.checkpoint.layout.names) == 15


def test_p09_total_size_is_worked_out_never_copied(cases: Callable[[str], Path]) -> None:
    folder = cases("p09_missing_and_stray") / "v1"
    index = json.loads((folder / INDEX).read_text())
    true = index["metadata"]["total_size"]
    for wrong in (96, "many", None):
        index["metadata"]["total_size"] = wrong
        (folder / INDEX).write_text(json.dumps(index))
        checkpoint = open_folder(folder).checkpoint
        assert json.loads(checkpoint.placement.index_metadata) == {}
        again = json.loads(index_bytes(checkpoint))
        assert again == {"metadata": {"total_size": true}, "weight_map": index["weight_map"]}


@pytest.mark.parametrize("name", ["dotdot", "absolute", "sneaky", "nul", "empty"])
def test_p10_index_that_leaves_its_folder_is_refused(name: str, cases: Callable[[str], Path]) -> None:
    folder = cases("p10_path_traversal")
    with pytest.raises(FormatError, match=r"weight_map of secret: .* is not a plain name inside the folder"):
        open_folder(folder / name)


def test_p42_header_above_the_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    for length in (100_000_001, 1 << 63):
        path = tmp_path / f"{length}.safetensors"
        with open(path, "wb") as file:
            file.write(length.to_bytes(8, "little") + b"{")
            file.truncate(min(length + 40, 200_000_000))
        with pytest.raises(FormatError, match=f"header length {length} is above the limit of 100000000"):
            open_folder(path)


# ---------------------------------------------------------------- changes under the reader


@pytest.mark.parametrize("change", ["longer", "touched", "replaced"])
def test_file_that_changed_since_it_was_opened_is_refused(change: str, cases: Callable[[str], Path]) -> None:
    path = cases("p12_reshard") / "v0"
    folder = open_folder(path)
    folder.require_unchanged()
    target = path / make_cases.shard_name(2, 2)
    if change == "longer":
        with open(target, "ab") as file:
            file.write(b"x")
    elif change == "touched":
        os.utime(target, ns=(1, 1))
    else:
        shutil.copy(path / make_cases.shard_name(1, 2), target)
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors changed while it was read"):
        folder.require_unchanged()


def test_file_that_vanished_since_it_was_opened_is_refused(cases: Callable[[str], Path]) -> None:
    """It raised FileNotFoundError."""
    path = cases("p12_reshard") / "v0"
    folder = open_folder(path)
    (path / make_cases.shard_name(2, 2)).unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors"):
        folder.require_unchanged()


# ---------------------------------------------------------------- mapping


def test_writable_mapping_reaches_the_file_and_a_readable_one_does_not_touch_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    with mapped([str(path)]) as (address,):
        assert view(address, 10_000).tobytes() == bytes(10_000)
    with mapped([str(path)], writable=True) as (address,):
        view(address, 10_000)[9_999] = 7
    assert path.read_bytes() == bytes(9_999) + b"\7"


def test_descriptors_are_closed_whatever_happens(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    with mapped([str(tmp_path / "x")] * 5):
        pass
    with pytest.raises(StoreError), mapped([str(tmp_path / "x"), str(tmp_path / "y")]):
        pass
    with pytest.raises(KeyError), mapped([str(tmp_path / "x")]):
        raise KeyError
    assert count() == before


def test_error_names_the_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    """It named the one before; an empty file raised ValueError."""
    paths = [str(tmp_path / name) for name in ("x", "y", "z")]
    (tmp_path / "x").write_bytes(b"x")
    with pytest.raises(StoreError, match=f"mapping {paths[1]}: No such file"), mapped(paths):
        pass
    (tmp_path / "y").write_bytes(b"")
    with pytest.raises(StoreError, match=f"mapping {paths[1]}: it is empty"), mapped(paths):
        pass


def test_no_file_is_mapped_to_no_address() -> None:
    with mapped([]) as files:
        checkpoint, _ = placed(Layout([], [], []), Placement(()))
        assert addresses(checkpoint, files).tolist() == []


# ---------------------------------------------------------------- writing


def test_new_file_has_its_size_head_and_mode_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x"
    create_file(str(path), b"head", 5000, 0o640)
    assert path.read_bytes() == b"head" + bytes(4996)
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(StoreError, match=f"writing {path}: File exists"):
        create_file(str(path), b"other", 5, 0o644)
    create_file(str(tmp_path / "head only"), b"head", 4, 0o644)
    assert (tmp_path / "head only").read_bytes() == b"head"


def test_small_file_is_replaced_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"old")
    (tmp_path / "link").symlink_to("blob")
    replace_file(str(tmp_path / "link"), b"new", 0o640)
    assert (tmp_path / "blob").read_bytes() == b"old"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_bytes() == b"new"
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["blob", "link"]


@given(layouts(), st.data())
def test_placed_files_are_those_that_open_folder_finds(layout: Layout, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    where = [data.draw(st.integers(0, count - 1)) for _ in layout.names]
    order = data.draw(st.permutations(range(len(layout.names))))
    files = [
        ShardFile(f"{n}.safetensors", tuple(t for t in order if where[t] == n), {"n": str(n)}) for n in range(count)
    ]
    checkpoint, headers = placed(layout, Placement(tuple(files)))
    tensors = random_bytes(layout, 1)
    for n, (file, header) in enumerate(zip(files, headers, strict=True)):
        body = b"".join(tensors[t] for t in file.tensors)
        assert checkpoint.nbytes[n] == len(header) + len(body)
        for t in file.tensors:
            at = int(checkpoint.offset[t])
            assert checkpoint.file[t] == n
            assert (header + body)[at : at + len(tensors[t])] == tensors[t]


# ---------------------------------------------------------------- copies


def checkpoint_of(layout: Layout, *files: tuple[int, ...]) -> Checkpoint:
    shards = tuple(ShardFile(f"{n}.safetensors", tensors) for n, tensors in enumerate(files))
    return placed(layout, Placement(shards))[0]


FIVE = Layout(["a", "b", "c", "d", "e"], ["U8"] * 5, [[10], [20], [0], [40], [50]])


def test_tensors_that_lie_together_on_both_sides_are_one_run() -> None:
    source = checkpoint_of(FIVE, (0, 1, 2, 3, 4))
    target = checkpoint_of(FIVE, (0, 1), (4, 3, 2))
    begins = [int(source.offset[0]), int(target.offset[0]), int(target.offset[4])]
    assert copy_runs(source, target) == [
        Run(0, begins[0], 0, begins[1], 30),
        Run(0, begins[0] + 70, 1, begins[2], 50),
        Run(0, begins[0] + 30, 1, begins[2] + 50, 40),
    ]


def test_same_placement_is_one_run_per_file_and_empty_tensors_none() -> None:
    source = checkpoint_of(FIVE, (0, 1, 2, 3), (4,))
    assert [(r.source, r.target, r.nbytes) for r in copy_runs(source, source)] == [(0, 0, 70), (1, 1, 50)]
    empty = checkpoint_of(Layout(["a"], ["U8"], [[0]]), (0,))
    assert copy_runs(empty, empty) == []


@given(layouts(), st.data())
def test_runs_copy_every_byte_of_every_tensor_once(layout: Layout, data: st.DataObject) -> None:
    sides = []
    for _ in range(2):
        order = data.draw(st.permutations(range(len(layout.names))))
        cut = data.draw(st.integers(0, len(order)))
        sides.append(checkpoint_of(layout, tuple(order[:cut]), tuple(order[cut:])))
    source, target = sides
    tensors = random_bytes(layout, 2)

    def place(checkpoint: Checkpoint) -> list[np.ndarray]:
        blobs = [np.zeros(n, np.uint8) for n in checkpoint.nbytes]
        for t, tensor in enumerate(tensors):
            at = int(checkpoint.offset[t])
            blobs[int(checkpoint.file[t])][at : at + len(tensor)] = np.frombuffer(tensor, np.uint8)
        return blobs

    read, expected = place(source), place(target)
    written = [np.zeros_like(b) for b in expected]
    copied = 0
    for run in copy_runs(source, target):
        chunk = read[run.source][run.source_offset : run.source_offset + run.nbytes]
        written[run.target][run.target_offset : run.target_offset + run.nbytes] = chunk
        copied += run.nbytes
    assert [w.tobytes() for w in written] == [e.tobytes() for e in expected]
    assert copied == layout.total_bytes
