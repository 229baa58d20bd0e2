"""Failure cases of running samplers: P20, P23, P26 to P28 and P42. Each test is a case of cases.md by its number."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import make_cases
import msgspec
import pytest
from helpers import (
    cli_good,
    exact,
    expected,
    holder,
    holds,
    live,
    live_exact,
    manifest_of,
    raw_of,
    recorded,
    refused,
)  # fmt: skip
from make_cases import shard_name

from deltackpt import tensors as tensors_module
from deltackpt.errors import ChainError, ConfigError, FormatError, IntegrityError
from deltackpt.follow import Follower
from deltackpt.manifest import Manifest, encode, manifest_key
from deltackpt.publish import Publisher
from deltackpt.reader import Reader
from deltackpt.store import open_store
from deltackpt.tensors import TensorTarget

if TYPE_CHECKING:
    import torch

Build = Callable[[str], Path]
MODES = ("replace", "switch", "in-place")


def publish(root: Path, *labels: str) -> Path:
    """Publish versions without anchors, so that the deltas are what followers take. Returns the store."""
    for label in labels:
        cli_good("publish", root / label, root / "store", "--no-anchors")
    return root / "store"


def changed(store: Path, version: int) -> list[str]:
    """Names of the tensors that a version's delta has bytes for."""
    reader = Reader(open_store(store))
    reader.load()
    delta = reader.delta(version)
    return [delta.layout.names[int(t)] for f in delta.fetched for t in f.index.changes["tensor"]]


# ---------------------------------------------------------------- P20


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """Which file is under each weight name, and when it was written."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in holder(folder).glob("*.safetensors")}


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_p20_nothing_changed_writes_no_tensor_and_one_changed_tensor_arrives(cases: Build, mode: str) -> None:
    root = cases("p20_empty_delta")
    store, local, expect = publish(root, "v0"), root / "local", expected(root)
    cli_good("pull", store, local, "--mode", mode)
    exact(local, expect, 0)
    publish(root, "v1", "v2")
    before = identities(local)
    answer = cli_good("pull", store, local, "--mode", mode, "--version", "1")
    assert (answer["previous"], answer["version"], answer["bytes_fetched"]) == (0, 1, 0)
    exact(local, expect, 1)
    assert identities(local) == before
    assert (manifest_of(store, 1).kind, manifest_of(store, 1).shards) == ("empty", ())
    cli_good("pull", store, local, "--mode", mode)
    exact(local, expect, 2)
    assert changed(store, 2) == ["model.norm.weight"]


Edit = Callable[[Manifest], Manifest]
EDITS: dict[str, Edit] = {
    "no groups listed": lambda m: msgspec.structs.replace(m, present=bytes(len(m.present))),
    "no bitmap": lambda m: msgspec.structs.replace(m, present=b""),
    "no shards listed": lambda m: msgspec.structs.replace(m, shards=()),
    "no tensors listed": lambda m: msgspec.structs.replace(
        m, shards=tuple(msgspec.structs.replace(s, tensors=(s.tensors[0], s.tensors[0])) for s in m.shards)
    ),
    "called empty": lambda m: msgspec.structs.replace(m, kind="empty"),
    "called empty, nothing listed": lambda m: msgspec.structs.replace(m, kind="empty", present=b"", shards=()),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", MODES)
def test_p20_manifest_whose_list_was_emptied_is_refused(cases: Build, mode: str, edit: str) -> None:
    root = cases("p20_empty_delta")
    store, local = publish(root, "v0", "v1", "v2"), root / "copy"
    cli_good("pull", store, local, "--mode", mode, "--version", "1")
    good = manifest_of(store, 2)
    (store / manifest_key(2)).write_bytes(encode(EDITS[edit](good)))
    refused(["pull", store, local, "--mode", mode], "version 2", error=FormatError, local=local, store=store)
    exact(local, expected(root), 1)
    (store / manifest_key(2)).write_bytes(encode(good))
    cli_good("pull", store, local, "--mode", mode)
    exact(local, expected(root), 2)


# ---------------------------------------------------------------- P23


@pytest.mark.parametrize("mode", ["replace", "in-place"])
@pytest.mark.parametrize(
    ("name", "named"), [("local", "lm_head.weight differs from version 0 (1 of 15 tensors)"), ("local_other", "of 15 ")]
)
def test_p23_wrong_base_is_refused_and_reseeded_on_request(cases: Build, mode: str, name: str, named: str) -> None:
    root = cases("p23_wrong_base")
    store, local = publish(root, "v0", "v1"), root / name
    pull = ["pull", store, local, "--mode", mode]
    refused(pull, named, "--reseed", error=ChainError, local=local, store=store)
    refused([*pull, "--version", "0"], named, "--reseed", error=ChainError, local=local, store=store)
    answer = cli_good(*pull, "--reseed")
    assert (answer["previous"], answer["anchor"], answer["bytes_reseeded"]) == (None, 0, 1888)
    exact(local, expected(root), 1)


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_p23_base_that_went_wrong_after_a_pull_is_refused(cases: Build, mode: str) -> None:
    root = cases("p23_wrong_base")
    store = publish(root, "v0")
    copy = root / "copy"
    cli_good("pull", store, copy, "--mode", mode)
    for name in (shard_name(1, 2), shard_name(2, 2)):
        (copy / name).write_bytes((root / "local" / name).read_bytes())
    publish(root, "v1")
    pull = ["pull", store, copy, "--mode", mode]
    refused(pull, "lm_head.weight differs from version 0", error=ChainError, local=copy, store=store)
    cli_good(*pull, "--reseed")
    exact(copy, expected(root), 1)


def test_p23_live_tensors_of_another_model_are_reseeded(cases: Build) -> None:
    pytest.importorskip("torch")
    root = cases("p23_wrong_base")
    store = publish(root, "v0", "v1")
    for name in ("local", "local_other"):
        tensors = live(root / name)
        prepared = Follower(str(store), TensorTarget(tensors)).prepare()
        assert prepared is not None
        # Live tensors start as garbage in most engines: weights of no version are reseeded, never XORed.
        assert (prepared.previous, prepared.plan.anchor) == (None, 0)
        prepared.apply()
        live_exact(tensors, root / "v1")


# ---------------------------------------------------------------- P26

READER = """
import json, mmap, os, select, sys
import numpy as np

path, begin = sys.argv[1], int(sys.argv[2])
with open(path, "rb") as file:
    old = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "<u2", offset=begin)
seen, sizes, looks = set(), set(), 0
print("watching", flush=True)
while True:
    told = select.select([0], [], [], 0)[0]
    seen.update((int(old.min()), int(old.max())))
    sizes.add(os.stat(path).st_size)
    looks += 1
    if told:
        break
fresh = np.fromfile(path, "<u2", offset=begin)
json.dump({"seen": sorted(seen), "sizes": sorted(sizes), "looks": looks,
           "fresh": sorted({int(fresh.min()), int(fresh.max())})}, sys.stdout)
"""


@dataclass
class Watched:
    """What another process saw. seen: values in its mapping; sizes: of the file; fresh: values after opening anew."""

    seen: list[int]
    sizes: list[int]
    looks: int
    fresh: list[int]


@contextmanager
def watching(path: Path, begin: int) -> Iterator[Callable[[], Watched]]:
    """Let another process map a file and look at it over and over; yields what ends it and returns its report."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(path), str(begin)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    try:
        assert reader.stdout.readline() == "watching\n"

        def report() -> Watched:
            out, _ = reader.communicate("stop\n", timeout=60)
            assert reader.returncode == 0  # -7 would be SIGBUS
            return Watched(**json.loads(out))

        yield report
    finally:
        reader.kill()
        reader.communicate()


P26_NAME = shard_name(1, 1)


def p26_size(root: Path, label: str) -> int:
    return (root / label / P26_NAME).stat().st_size


@pytest.mark.parametrize("mode", MODES)
def test_p26_mapped_reader_never_meets_a_short_or_torn_file(cases: Build, mode: str) -> None:
    root = cases("p26_mmap_reader")
    store, local = publish(root, "v0"), root / "local"
    if mode == "switch":
        local = root / "switched"
        cli_good("pull", store, local, "--mode", mode)
    begin = p26_size(root, "v0") - (4 << 20)
    shard = holder(local) / P26_NAME if mode != "switch" else local / "current" / P26_NAME
    publish(root, "v1")
    with watching(shard, begin) as report:
        assert cli_good("pull", store, local, "--mode", mode)["deltas"] == 1
        first = report()
    exact(local, expected(root), 1)
    assert first.sizes == [p26_size(root, "v0")]
    assert first.fresh == [0x3F81]
    if mode == "in-place":
        # Its mapping is of the very file that is written: a mix can show on the way, the new values in the end.
        assert set(first.seen) <= {0x3F80, 0x3F81}
        assert first.seen[-1] == 0x3F81
    else:
        assert first.seen == [0x3F80]
    cli_good("publish", root / "v2_grown", store, "--relayout")
    with watching(shard, begin) as report:
        cli_good("pull", store, local, "--mode", mode)
        second = report()
    exact(local, expected(root), 2, "v2_grown")
    # Other shapes need a new file in every mode.
    assert second.seen == [0x3F81]
    assert set(second.sizes) <= {p26_size(root, "v1"), p26_size(root, "v2_grown")}
    assert second.fresh == [0x4000]


def test_p26_documents_say_that_a_mapped_reader_can_see_a_mix(cases: Build) -> None:
    from click.testing import CliRunner

    from deltackpt.cli import cli

    text = " ".join(CliRunner().invoke(cli, ["pull", "--help"], terminal_width=200).output.split())
    assert "a reader that has them mapped can see a mix" in text


# ---------------------------------------------------------------- P27


def p27_live(torch: Any, v: int = 0) -> dict[str, torch.Tensor]:
    """The live tensors of the case, each with memory of its own: whole, transposed, sliced, and one row."""

    def a() -> torch.Tensor:
        made: torch.Tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6).clone()
        made[1, 2] += v
        return made

    return {"row": a(), "col": a().T, "cut": a()[:, ::2], "bias": a()[1]}


def places(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {n: (t.data_ptr(), t.stride()) for n, t in tensors.items()}


def test_p27_strided_tensors_are_published_and_applied_in_place(cases: Build) -> None:
    torch = pytest.importorskip("torch")
    root = cases("p27_live_layouts")
    store = root / "store"
    tensors = p27_live(torch)
    assert [tuple(t.stride()) for t in tensors.values()] == [(6, 1), (1, 6), (6, 2), (1,)]
    before = places(tensors)
    with Publisher(str(store)) as publisher:
        publisher.publish(p27_live(torch))
        cli_good("pull", store, root / "pulled")
        holds(root / "pulled", expected(root), "v0")
        publisher.publish(p27_live(torch, 1))
    cli_good("pull", store, root / "pulled")
    exact(root / "pulled", expected(root), 1)
    prepared = Follower(str(store), TensorTarget(tensors)).prepare()
    assert prepared is not None
    assert (prepared.previous, prepared.apply()) == (0, 1)
    live_exact(tensors, root / "v1")
    assert places(tensors) == before
    # What lies between the elements of a slice is not theirs to write.
    base = tensors["cut"]._base
    assert base is not None
    skipped = torch.arange(24, dtype=torch.float32).reshape(4, 6)[:, 1::2]
    assert torch.equal(base.reshape(4, 6)[:, 1::2], skipped)


@pytest.mark.parametrize(
    ("name", "replace", "named"),
    [
        ("bias", lambda t: t.bfloat16(), ("bias", "F32", "BF16", "nothing is cast")),
        ("col", lambda t: t.T, ("col", "[6, 4]", "[4, 6]", "nothing is broadcast")),
    ],
)
def test_p27_other_dtype_or_shape_is_refused_and_nothing_touched(
    cases: Build, name: str, replace: Callable[[Any], Any], named: tuple[str, ...]
) -> None:
    torch = pytest.importorskip("torch")
    root = cases("p27_live_layouts")
    store = publish(root, "v0", "v1")
    tensors = p27_live(torch)
    tensors[name] = replace(tensors[name])
    before = {n: (t.data_ptr(), raw_of(t)) for n, t in tensors.items()}
    follower = Follower(str(store), TensorTarget(tensors))
    refused(follower.prepare, *named, error=ConfigError, store=store)
    assert {n: (t.data_ptr(), raw_of(t)) for n, t in tensors.items()} == before
    good = p27_live(torch)
    prepared = Follower(str(store), TensorTarget(good)).prepare()
    assert prepared is not None
    prepared.apply()
    live_exact(good, root / "v1")


# ---------------------------------------------------------------- P28

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def follow_tied(root: Path, store: Path, label: str) -> dict[str, torch.Tensor]:
    """Bring two names of one storage from v0 to v1."""
    shared = live(root / f"{label}v0")[EMBED]
    tensors = {EMBED: shared, HEAD: shared}
    prepared = Follower(str(store), TensorTarget(tensors)).prepare()
    assert prepared is not None
    assert (prepared.previous, prepared.apply()) == (0, 1)
    assert tensors[EMBED].data_ptr() == tensors[HEAD].data_ptr() == shared.data_ptr()
    return tensors


@pytest.mark.parametrize("label", ["", "embed_only_"])
def test_p28_both_names_of_a_tied_tensor_read_the_new_version(cases: Build, label: str) -> None:
    pytest.importorskip("torch")
    root = cases("p28_tied_live")
    store = publish(root, f"{label}v0", f"{label}v1")
    tensors = follow_tied(root, store, label)
    new = make_cases.read_ckpt(root / "v1")[EMBED][2]
    assert new != make_cases.read_ckpt(root / "v0")[EMBED][2]
    assert [raw_of(tensors[n]) for n in (EMBED, HEAD)] == [new, new]


def test_p28_applying_once_per_name_would_leave_the_old_version_and_is_noticed(
    cases: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof that the test above can fail: without the knowledge of twins the XOR is applied twice."""
    pytest.importorskip("torch")
    root = cases("p28_tied_live")
    store = publish(root, "v0", "v1")
    monkeypatch.setattr(tensors_module, "find_twins", lambda tensors, layout: {})
    with pytest.raises(IntegrityError, match="did not change as published"):
        follow_tied(root, store, "")
    monkeypatch.setattr(tensors_module, "compare_fingerprints", lambda layout, found, wanted: [])
    tensors = follow_tied(root, store, "")
    assert raw_of(tensors[EMBED]) == make_cases.read_ckpt(root / "v0")[EMBED][2]


# ---------------------------------------------------------------- P42


def summary(folder: Path) -> dict[str, object]:
    digest = make_cases.ckpt_digest(folder)
    return {"tensors": len(digest), "sha256": hashlib.sha256(json.dumps(digest, sort_keys=True).encode()).hexdigest()}


@pytest.fixture(scope="module")
def p42(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("p42")
    make_cases.build(make_cases.CASES, root, ["p42_many_tensors_and_header_cap"])
    return root / "p42_many_tensors_and_header_cap"


@pytest.mark.slow
def test_p42_sixty_thousand_tensors_are_exact(p42: Path) -> None:
    expect, local = expected(p42), p42 / "local"
    assert cli_good("publish", p42 / "v0", p42 / "store")["kind"] == "full"
    store = publish(p42, "v1")
    assert (len(changed(store, 1)), manifest_of(store, 1).totals.changed) == (300, 300)
    answer = cli_good("pull", store, local)
    assert (answer["previous"], answer["version"], answer["deltas"]) == (0, 1, 1)
    assert summary(local) == expect["summary"]["v1"]
    assert (expect["summary"]["v1"]["tensors"], recorded(local)) == (60_000, 1)
    assert cli_good("verify", store)["ok"] is True
    assert cli_good("verify", local, "--against", store)["ok"] is True


def bytes_read() -> int:
    """What this process has read so far, from caches too."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize(("label", "length"), [("header_100000001", 100_000_001), ("header_2e63", 2**63)])
@pytest.mark.parametrize("use", ["publish", "pull"])
def test_p42_header_above_the_limit_is_refused_unread(
    p42: Path, tmp_path: Path, label: str, length: int, use: str
) -> None:
    good = make_cases.write_ckpt(tmp_path / "good", make_cases.tiny())
    store, bad = tmp_path / "store", p42 / f"{label}.safetensors"
    cli_good("publish", good, store)
    action: list[str | Path] = ["publish", bad, store]
    if use == "pull":
        local = tmp_path / "local"
        local.mkdir()
        os.link(bad, local / "model.safetensors")
        action = ["pull", store, local]
    tracemalloc.start()
    try:
        before = bytes_read()
        named = f"{label if use == 'publish' else 'model'}.safetensors: header length {length} is above the limit"
        refused(action, named, error=FormatError)
        assert bytes_read() - before < 1 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert os.listdir(store / "manifests") == [f"{0:020d}.json"]
    cli_good("publish", good, store)
    if use == "pull":
        assert (tmp_path / "local" / "model.safetensors").stat().st_ino == bad.stat().st_ino
        cli_good("pull", store, tmp_path / "local", "--reseed")
        assert recorded(tmp_path / "local") == 1
