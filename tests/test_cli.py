"""The command line as a user and a script meet it: output, exit codes, JSON, help."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click
import make_cases
import pytest
from click.testing import CliRunner, Result
from helpers import errors

import deltackpt
from deltackpt import cli as module
from deltackpt import codec, folder, publish
from deltackpt.cli import age, cli, columns, count, percent, size
from deltackpt.errors import ConfigError, DeltaError, Unavailable
from deltackpt.manifest import manifest_key, pruned_key
from deltackpt.publish import publish_folder
from deltackpt.store import LocalStore

COMMANDS = [
    "anchor", "bench", "doctor", "export", "import", "log", "mirror", "prune", "publish", "pull", "show", "status",
    "tag", "verify", "watch",
]  # fmt: skip
GROUPS = ["channel"]
REPOSITORY = Path(deltackpt.__file__).parent.parent


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: v0 to v3, and `store` that holds them as versions 0 to 3, steps 0 to 30."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("DELTACKPT_")]:
        monkeypatch.delenv(name)
    make_cases.chain(tmp_path, 3)
    for v in range(4):
        publish_folder(f"v{v}", "store", step=10 * v, run_id="r", anchors=False)
    return tmp_path


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, env=env, prog_name="deltackpt")


def good(*arguments: str) -> str:
    result = run(*arguments)
    assert (result.exit_code, errors(result)) == (0, "")
    return result.stdout


def answer(*arguments: str) -> dict[str, object]:
    """Run with --json; the answer is exactly one object on one line, and nothing on stderr."""
    text = good(*arguments, "--json")
    assert text.count("\n") == 1
    found: dict[str, object] = json.loads(text)
    return found


def refused(exit_code: int, kind: str, *arguments: str) -> str:
    """Run as text and with --json; both end alike, with one line on stderr. Returns the message."""
    plain = run(*arguments)
    assert plain.exit_code == exit_code, plain.output
    assert re.fullmatch(r"deltackpt: [^\n]+\n", errors(plain))
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code
    assert result.stderr.count("\n") == 1
    assert result.stdout.count("\n") == 1
    error = json.loads(result.stdout)
    assert (error["error"], error["exit_code"]) == (kind, exit_code)
    assert result.stderr == f"deltackpt: {error['message']}\n"
    message: str = error["message"]
    return message


def process(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | env
    return subprocess.run(
        [sys.executable, "-m", "deltackpt", *arguments], cwd=cwd, env=environment, text=True, capture_output=True
    )


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def one_shard(root: Path, version: int) -> Path:
    (path,) = (root / "store" / "data").glob(f"{version:020d}-*/*.safetensors")
    return path


# ---------------------------------------------------------------- publish


def test_first_publish_is_full_and_later_ones_are_deltas(root: Path) -> None:
    assert good("publish", "v0", "new").startswith("new: version 0 (full, 1.9 kB of 1.9 kB stored, ")
    text = good("publish", "v1", "new", "--no-anchors")
    assert re.match(
        r"new: version 1 \(delta, 2\.93 % changed, [\d.]+ k?B of 1\.9 kB stored, base \d+ ms, encode ", text
    )
    assert "new: version 2 (empty, " in good("publish", "v1", "new", "--no-anchors")


def test_publish_json_has_times_and_bytes_under_their_names(root: Path) -> None:
    first = answer("publish", "v0", "new", "--step", "7", "--run-id", "a", "--metadata", "reward=0.5")
    assert (first["version"], first["kind"], first["step"], first["run_id"]) == (0, "full", 7, "a")
    assert (first["bytes_raw"], first["bytes_stored"], first["bytes_changed"]) == (1888, 1888, 1888)
    second = answer("publish", "v1", "new", "--run-id", "a", "--no-anchors")
    assert (second["version"], second["kind"], second["base"], second["store"]) == (1, "delta", 0, "new")
    for name in ("encode_ms", "upload_ms", "manifest_publish_ms"):
        assert isinstance(second[name], float)
    # 24 elements of two bytes and 3 of four.
    assert second["bytes_changed"] == 60
    assert answer("show", "new", "0")["manifest"]["metadata"] == {"reward": "0.5"}  # type: ignore[index]  # an object


def test_publish_json_counts_changed_bytes_where_all_elements_are_alike(root: Path) -> None:
    for name, last in (("a", 1), ("b", 2)):
        Path(name).mkdir()
        Path(name, "m.safetensors").write_bytes(make_cases.st_bytes([("w", "BF16", (4,), bytes(6) + bytes([last, 0]))]))
    good("publish", "a", "new")
    assert answer("publish", "b", "new", "--no-anchors")["bytes_changed"] == 2


def test_publish_by_reference_stores_no_weights(root: Path) -> None:
    assert answer("publish", "v0", "new", "--anchor-ref")["bytes_stored"] == 0
    assert "by reference" in refused(3, "ConfigError", "pull", "new", "dest")
    assert refused(3, "ConfigError", "pull", "new", "dest", "--anchor-source", "store") == (
        f"{root}/store does not hold the files of the anchor of version 0 (made from {root}/v0); name the folder that "
        "does with --anchor-source: model-00001-of-00002.safetensors is not there"
    )
    assert "dest: version 0 (anchor of version 0, " in good("pull", "new", "dest", "--anchor-source", "v0")


def test_every_publish_option_reaches_the_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    known = publish_folder("v3", "store", run_id="r", anchors=False)

    def spy(checkpoint: str, store: LocalStore, **options: object) -> object:
        seen.update(options, arguments=(checkpoint, store.url))
        return known

    monkeypatch.setattr(publish, "publish_folder", spy)
    good(
        *("publish", "v3", "store", "--step", "5", "--run-id", "r", "--base", "v2", "--resume", "--new-lineage"),
        *("--relayout", "--anchor-ref", "--no-anchors", "--codec", "lz4", "--form", "mask", "--scratch", "tmp"),
        *("--threads", "2", "--metadata", "a=b=c", "--metadata", "d=", "--mirror", "m", "--anchor-source", "s"),
    )
    assert seen == {
        "arguments": ("v3", str(root / "store")), "step": 5, "run_id": "r", "base": "v2", "resume": True,
        "new_lineage": True, "relayout": True, "anchor_ref": True, "anchors": False, "codec": "lz4", "form": "mask",
        "scratch": "tmp", "threads": 2, "metadata": {"a": "b=c", "d": ""}, "mirror": "m", "anchor_source": "s",
    }  # fmt: skip


def test_codecs_offered_are_those_that_a_cpu_writes() -> None:
    assert sorted(module.CODECS) == sorted(set(codec.NAMES) - {"ans"})


def test_run_id_comes_from_the_environment(root: Path) -> None:
    result = run("publish", "v3", "store", "--no-anchors", env={"DELTACKPT_RUN_ID": "r"})
    assert result.exit_code == 0
    refused(3, "ConfigError", "publish", "v3", "store")


# ---------------------------------------------------------------- pull


def test_pull_says_where_it_came_from_and_what_it_cost(root: Path) -> None:
    text = good("pull", "store", "dest", "--version", "1")
    assert re.fullmatch(
        r"dest: version 1 \(anchor of version 0 and 1 delta, [\d.]+ kB fetched, staged \d+ ms, applied \d+ ms\)\n", text
    )
    assert re.match(r"dest: version 1 -> 3 \(2 deltas, ", good("pull", "store", "dest"))
    assert make_cases.same_ckpt(root / "dest", root / "v3")
    assert good("pull", "store", "dest") == "dest: at version 3 already\n"
    assert re.match(r"dest: version 3 -> 2 \(1 delta, ", good("pull", "store", "dest", "--version", "2"))
    assert make_cases.same_ckpt(root / "dest", root / "v2")


def test_pull_json_has_times_and_bytes_under_their_names(root: Path) -> None:
    first = answer("pull", "store", "dest", "--version", "2")
    assert (first["version"], first["previous"], first["anchor"], first["deltas"]) == (2, None, 0, 2)
    assert (first["bytes_raw"], first["bytes_reseeded"]) == (1888, 1888)
    second = answer("pull", "store", "dest")
    assert (second["version"], second["previous"], second["anchor"], second["deltas"]) == (3, 2, None, 1)
    assert second["bytes_fetched"] == one_shard(root, 3).stat().st_size
    assert second["bytes_reseeded"] == 0
    assert isinstance(second["stage_ms"], float)
    assert isinstance(second["apply_ms"], float)
    third = answer("pull", "store", "dest")
    assert (third["version"], third["previous"], third["deltas"], third["bytes_fetched"]) == (3, 3, 0, 0)


def test_pull_into_a_folder_that_holds_the_version_already_records_it(root: Path) -> None:
    shutil.copytree("v3", "dest")
    before = make_cases.ckpt_digest("dest")
    assert good("pull", "store", "dest") == "dest: found to hold version 3, recorded now\n"
    assert make_cases.ckpt_digest("dest") == before
    assert good("pull", "store", "dest") == "dest: at version 3 already\n"
    shutil.rmtree("dest")
    shutil.copytree("v1", "dest")
    assert re.match(r"dest: version 1 -> 3 \(2 deltas, ", good("pull", "store", "dest"))
    shutil.rmtree("dest")
    shutil.copytree("v3", "dest")
    found = answer("pull", "store", "dest")
    assert (found["adopted"], found["version"], found["previous"], found["bytes_fetched"]) == (True, 3, 3, 0)
    assert answer("pull", "store", "dest")["adopted"] is False


def test_pull_goes_on_in_the_mode_that_the_folder_was_made_with(root: Path) -> None:
    good("pull", "store", "dest", "--version", "1", "--mode", "switch")
    assert answer("pull", "store", "dest")["mode"] == "switch"
    assert make_cases.same_ckpt(root / "dest" / "current", root / "v3")
    assert "was made by switch mode" in refused(3, "ConfigError", "pull", "store", "dest", "--mode", "replace")


def test_publish_keeps_a_mirror_for_a_trainer_that_overwrites_its_checkpoint(root: Path) -> None:
    shutil.copytree("v0", "out")
    assert answer("publish", "out", "new", "--mirror", "mirror")["kind"] == "full"
    for v in (1, 2):
        shutil.rmtree("out")
        shutil.copytree(f"v{v}", "out")
        assert answer("publish", "out", "new", "--mirror", "mirror", "--no-anchors")["kind"] == "delta"
        assert make_cases.same_ckpt(root / "mirror", root / f"v{v}")


def test_pull_by_step_takes_the_newest_version_that_has_it(root: Path) -> None:
    good("publish", "v2", "store", "--step", "30", "--run-id", "r", "--no-anchors")
    assert answer("pull", "store", "dest", "--step", "30")["version"] == 4
    assert answer("pull", "store", "dest", "--step", "10")["version"] == 1
    message = refused(40, "ChainError", "pull", "store", "dest", "--step", "11")
    assert message == f"no version in {root}/store has step 11; its steps are 0 to 30"


@pytest.mark.parametrize(("mode", "weights"), [("replace", "dest"), ("switch", "dest/current"), ("in-place", "dest")])
def test_pull_works_in_every_mode(root: Path, mode: str, weights: str) -> None:
    good("pull", "store", "dest", "--version", "1", "--mode", mode)
    good("pull", "store", "dest", "--mode", mode, "--threads", "1", "--lock", "lock")
    assert make_cases.same_ckpt(root / weights, root / "v3")


def test_pull_mode_comes_from_the_environment(root: Path) -> None:
    assert run("pull", "store", "dest", env={"DELTACKPT_PULL_MODE": "switch"}).exit_code == 0
    assert os.readlink("dest/current") == "v3"


def test_reseed_replaces_weights_of_no_version(root: Path) -> None:
    make_cases.write_ckpt("dest", make_cases.tiny(seed=500))
    before = make_cases.tree_digest("dest")
    assert "--reseed" in refused(40, "ChainError", "pull", "store", "dest")
    assert make_cases.tree_digest("dest") == before
    good("pull", "store", "dest", "--reseed")
    assert make_cases.same_ckpt(root / "dest", root / "v3")


def test_pull_into_a_folder_that_cannot_be_written_is_never_up_to_date(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The user who runs the tests may be root, whom no mode bits stop.
    good("pull", "store", "dest")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(root / "dest") and access(path, mode))
    message = refused(10, "StoreError", "pull", "store", "dest")
    assert message == f"{root}/dest is read-only for this user; pull as its owner, or into another folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="no mode bits stop root")
def test_mode_bits_of_the_destination_are_respected(root: Path) -> None:
    good("pull", "store", "dest")
    os.chmod("dest", 0o555)
    try:
        refused(10, "StoreError", "pull", "store", "dest")
    finally:
        os.chmod("dest", 0o755)


# ---------------------------------------------------------------- log and show


def test_log_lists_newest_first(root: Path) -> None:
    lines = good("log", "store").splitlines()
    assert lines[0].split() == ["VERSION", "KIND", "BASE", "STEP", "CHANGED", "SIZE", "RATIO", "AGE"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["3", "delta", "2", "30"], ["2", "delta", "1", "20"], ["1", "delta", "0", "10"], ["0", "full", "-", "0"],
    ]  # fmt: skip
    assert re.search(r" 100\.00 %  1\.9 kB  100\.00 %  \d+ s$", lines[4])


def test_log_is_cut_at_its_limit_and_says_so(root: Path) -> None:
    lines = good("log", "store", "--limit", "2").splitlines()
    assert [line.split()[0] for line in lines] == ["VERSION", "3", "2", "2"]
    assert lines[-1] == "2 older versions; --limit shows more"


def test_log_json_has_all_versions_unless_limited(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHOWN", 2)
    found = answer("log", "store")
    assert [v["version"] for v in found["versions"]] == [3, 2, 1, 0]  # type: ignore[attr-defined]  # a list
    assert found["versions"][0]["bytes_stored"] == one_shard(root, 3).stat().st_size  # type: ignore[index]  # a list
    found = answer("log", "store", "--limit", "1")
    assert [v["version"] for v in found["versions"]] == [3]  # type: ignore[attr-defined]  # a list


def test_log_reads_only_the_manifests_that_it_shows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    get = LocalStore.get

    def spy(self: LocalStore, key: str, out: memoryview) -> int:
        keys.append(key)
        return get(self, key, out)

    monkeypatch.setattr(LocalStore, "get", spy)
    good("log", "store", "--limit", "2")
    assert [key for key in keys if key != manifest_key(4)] == ["store.json", manifest_key(2), manifest_key(3)]


def test_log_of_a_store_without_versions_says_so(root: Path) -> None:
    Path("empty").mkdir()
    shutil.copy("store/store.json", "empty")
    assert good("log", "empty") == "empty: no version yet\n"
    assert answer("log", "empty")["versions"] == []


def test_show_has_every_field_of_the_manifest(root: Path) -> None:
    text = good("show", "store", "1")
    for line in ("version          1", "kind             delta", "step             10", "run_id           r"):
        assert line in text.splitlines()
    assert "layout dtypes    BF16 tensors 12, bytes 1792, F32 tensors 3, bytes 96" in text.splitlines()
    shown = answer("show", "store", "1")
    assert shown["manifest"]["version"] == 1  # type: ignore[index]  # an object
    assert shown["pruned"] is False
    assert shown["layout"] == {
        "tensors": 15, "elements": 920, "bytes": 1888, "groups": 2,
        "dtypes": {"BF16": {"tensors": 12, "bytes": 1792}, "F32": {"tensors": 3, "bytes": 96}},
        "files": [
            {"name": "model-00001-of-00002.safetensors", "tensors": 7, "bytes": 928},
            {"name": "model-00002-of-00002.safetensors", "tensors": 8, "bytes": 960},
        ],
    }  # fmt: skip


def test_show_takes_the_newest_version_by_default(root: Path) -> None:
    assert answer("show", "store")["manifest"]["version"] == 3  # type: ignore[index]  # an object
    assert refused(40, "ChainError", "show", "store", "9") == "version 9 is not in the store, which ends at 3"


def test_show_says_that_data_is_pruned(root: Path) -> None:
    Path("store", pruned_key(1)).parent.mkdir()
    Path("store", pruned_key(1)).write_text("{}\n")
    assert answer("show", "store", "1")["pruned"] is True


# ---------------------------------------------------------------- verify


def test_verify_of_a_whole_store_finds_no_fault(root: Path) -> None:
    assert good("verify", "store").endswith(" read\nno fault found\n")
    assert ", 4 versions rebuilt\n" in good("verify", "store", "--deep")
    found = answer("verify", "store", "--deep")
    assert (found["ok"], found["problems"], found["versions"], found["rebuilt"]) == (True, [], [0, 1, 2, 3], 4)


def test_verify_lists_every_fault_and_leaves_with_the_first(root: Path) -> None:
    flip(one_shard(root, 1))
    one_shard(root, 3).unlink()
    result = run("verify", "store")
    assert result.exit_code == 30
    assert result.stderr.startswith("deltackpt: 2 faults in store, the first: version 1: shard ")
    assert [line.split(":")[0] for line in result.stdout.splitlines()[1:]] == ["IntegrityError", "NotFound"]
    refused(30, "IntegrityError", "verify", "store")
    found = json.loads(run("verify", "store", "--json").stdout)
    assert [p["exit_code"] for p in found["problems"]] == [30, 11]
    assert found["ok"] is False
    assert found["versions"] == [0, 1, 2, 3]


def test_verify_against_a_store_says_which_version_a_folder_holds(root: Path) -> None:
    good("pull", "store", "dest", "--version", "2")
    assert good("verify", "dest", "--against", "store") == (
        "dest: weights of version 2 (1.9 kB read)\nno fault found\n"
    )
    flip(root / "dest" / "model-00002-of-00002.safetensors")
    assert "lm_head.weight differs" in refused(40, "ChainError", "verify", "dest", "--against", "store")
    assert "differs: lm_head.weight\n" in run("verify", "dest", "--against", "store").stdout
    found = json.loads(run("verify", "dest", "--against", "store", "--json").stdout)
    assert (found["version"], found["recorded"], found["tensors"]) == (None, 2, ["lm_head.weight"])


def test_verify_of_a_folder_without_its_store_says_what_to_type(root: Path) -> None:
    assert refused(3, "ConfigError", "verify", "v0").endswith("name its store with --against")


def test_interrupted_pull_is_called_so_by_verify_and_doctor(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good("pull", "store", "dest", "--version", "1")

    def stop(_source: str, _target: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_rename", stop)
        assert run("pull", "store", "dest").exit_code == 130
    refused(50, "Poisoned", "verify", "dest", "--against", "store")
    assert run("verify", "dest", "--against", "store").stdout.startswith("dest: not clean, an apply of version 3 ")
    assert answer("doctor", "dest")["dest"]["pending"] == 3  # type: ignore[index]  # an object
    good("pull", "store", "dest")
    good("verify", "dest", "--against", "store")


# ---------------------------------------------------------------- anchor, bench, doctor


def test_anchor_is_a_checkpoint_that_any_tool_reads(root: Path) -> None:
    text = good("anchor", "store", "--version", "2")
    assert text.startswith("store: anchor of version 2 (4 files, ")
    made = answer("anchor", "store", "--version", "2")
    assert made["version"] == 2
    assert make_cases.same_ckpt(root / "store" / str(made["folder"]), root / "v2")
    assert answer("verify", "store", "--deep")["anchors"] == [0, 2]


def test_bench_prints_a_table_and_advice(root: Path) -> None:
    text = good("bench", "v0", "v1", "--repeats", "1")
    assert "v0 -> v1: " in text
    assert "At 10 Gbit/s this " in text or "Do not use deltas here" in text
    found = answer("bench", "v0", "v1", "--repeats", "1", "--limit", "1")
    assert {row["name"] for row in found["rows"]} >= {"deltackpt sparse, zstd", "(f) full copy"}  # type: ignore[attr-defined]  # a list
    assert isinstance(found["advice"], str)


def test_doctor_describes_machine_store_and_folder(root: Path) -> None:
    machine = answer("doctor")["machine"]
    assert machine["threads"] == len(os.sched_getaffinity(0))  # type: ignore[index]  # an object
    store = answer("doctor", "store")["store"]
    assert isinstance(store, dict)
    assert (store["head"], store["format"], store["versions"], store["writable"]) == (3, 1, 4, True)
    good("pull", "store", "dest")
    os.link("dest/model-00001-of-00002.safetensors", "twin")
    dest = answer("doctor", "dest")["dest"]
    assert isinstance(dest, dict)
    assert (dest["version"], dest["pending"], dest["mode"]) == (3, None, "replace or in-place")
    assert dest["links_refused_by_in_place"] == ["model-00001-of-00002.safetensors"]
    weights = sum(p.stat().st_size for p in Path("dest").glob("*.safetensors"))
    assert dest["bytes_written_by_a_replace"] == weights
    assert dest["bytes_written_by_a_switch"] == weights + Path("dest/config.json").stat().st_size
    assert "writable" in good("doctor", "dest")


def test_doctor_says_in_one_line_that_there_is_no_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltackpt.cli_doctor._devices", list)
    assert answer("doctor")["gpus"] == []
    (line,) = [line for line in good("doctor").splitlines() if line.startswith("gpus")]
    assert re.fullmatch(r"gpus  none, torch .*", line)
    result = run("doctor", "--backend", "cuda")
    assert (result.exit_code, "backend cuda cannot be used: cpu is no NVIDIA GPU" in result.stderr) == (3, True)


def test_doctor_shows_what_a_decompression_engine_was_seen_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from deltackpt import arena, libnvcomp, trial

    asked = []

    def probe(device: object, *, backend: int) -> trial.Evidence:
        asked.append((str(device), backend))
        return trial.Evidence("6.0.0", 7, 4 << 20, "hardware", ("deflate", "lz4"), True, True, 16, 50_000, 4 << 20)

    monkeypatch.setattr("deltackpt.cli_doctor._devices", lambda: ["cuda:0"])
    monkeypatch.setattr("deltackpt.cli_doctor._nvidia_driver", lambda: "580.65.06")
    monkeypatch.setattr("deltackpt.tensors.find_spec", lambda _name: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    properties = SimpleNamespace(name="NVIDIA B200", total_memory=180 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(arena, "capability", lambda _device: arena.Capability(7, 4 << 20))
    monkeypatch.setattr(trial, "probe", probe)
    monkeypatch.setattr(libnvcomp, "installed", lambda: True)
    (gpu,) = answer("doctor")["gpus"]  # type: ignore[misc]  # a list
    assert asked == [("cuda:0", 1)]
    assert {k: v for k, v in gpu.items() if k not in ("nvcomp", "torch")} == {
        "device": "cuda:0", "name": "NVIDIA B200", "bytes_memory": 180 << 30, "driver": "580.65.06",
        "backend_asked": "auto", "backend": "de",
        "reason": "the driver reports a Decompression Engine for deflate, lz4, snappy",
        "engine_mask": 7, "engine_reads": ["deflate", "lz4", "snappy"], "bytes_engine_limit": 4 << 20,
        "trial": "16 frames came out right", "trial_by": "hardware", "trial_codecs": ["deflate", "lz4"],
        "bytes_trial_stored": 50_000, "bytes_trial_raw": 4 << 20,
        "host_arena_capable": True, "device_arena_capable": True,
    }  # fmt: skip
    assert gpu["torch"].endswith(" (CUDA 13.0)")
    assert "engine reads" in good("doctor", "--backend", "cuda")

    def none(device: object) -> arena.Capability:
        raise ConfigError(f"no driver for {device}; install it")

    monkeypatch.setattr(arena, "capability", none)
    (gpu,) = answer("doctor")["gpus"]  # type: ignore[misc]  # a list
    assert gpu["trial"] == "no driver for cuda:0; install it"
    assert gpu["backend"] == "cuda"
    assert str(gpu["reason"]).endswith("Decompression Engine is not known: no driver for cuda:0; install it")


def test_backends_of_the_command_line_are_those_of_the_package() -> None:
    from deltackpt import cli_doctor, tensors

    assert cli_doctor.BACKENDS == tensors.BACKENDS


def test_doctor_looks_behind_the_link_of_switch_mode(root: Path) -> None:
    good("pull", "store", "dest", "--mode", "switch")
    dest = answer("doctor", "dest")["dest"]
    assert isinstance(dest, dict)
    assert (dest["mode"], dest["version"], dest["links_refused_by_in_place"]) == ("switch", 3, [])


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command"),
        (["--nonsense"], "No such option"),
        (["publish", "v0"], "Missing argument 'STORE'"),
        (["pull", "store", "dest", "--mode", "copy"], "'copy' is not one of"),
        (["pull", "store", "dest", "--version", "1", "--step", "10"], "--version and --step cannot be given together"),
        (["pull", "store", "dest", "--version", "-1"], "-1"),
        (["publish", "v0", "store", "--metadata", "novalue"], "'novalue' is not KEY=VALUE"),
        (["verify", "v0", "--against", "store", "--deep"], "--deep is for a store"),
        (["publish", "v0", "store", "--metadata", "a=\udcff"], "'a=\\\\udcff' is not UTF-8"),
        (["publish", "v0", "store", "--run-id", "\udcff"], "is not UTF-8"),
        (["publish", "v0", "store", "--step", "-1"], "-1"),
        (["publish", "v0", "store", "--step", str(1 << 63)], "9223372036854775808"),
        (["pull", "store", ""], "the path is empty"),
        (["log", "store", "--threads", "2"], "No such option"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(root: Path, arguments: list[str], message: str) -> None:
    found = refused(2, "UsageError", *arguments)
    assert message in found
    assert found.endswith(" --help.")


def test_call_that_does_not_fit_is_exit_code_3(root: Path) -> None:
    assert "does not exist" in refused(3, "ConfigError", "publish", "missing", "store", "--run-id", "r")
    assert "--resume" in refused(3, "ConfigError", "publish", "v1", "store", "--run-id", "another")


@pytest.mark.parametrize("store", ["v0", "v0/store", "v0/../v0/store"])
def test_store_inside_its_checkpoint_is_refused(root: Path, store: str) -> None:
    before = make_cases.tree_digest("v0")
    message = refused(3, "ConfigError", "publish", "v0", store)
    assert f" lies inside the checkpoint {root}/v0; " in message
    assert make_cases.tree_digest("v0") == before


def test_pull_into_a_store_is_refused(root: Path) -> None:
    before = make_cases.tree_digest("store")
    message = refused(3, "ConfigError", "pull", "store", "store")
    assert message == f"{root}/store is a store; name another folder for the checkpoint"
    assert make_cases.tree_digest("store") == before


def test_file_name_that_is_not_utf8_can_be_printed(root: Path) -> None:
    name = os.fsdecode(b"d\xff")
    assert good("pull", "store", name).startswith("d\\udcff: version 3 (")
    assert answer("pull", "store", name)["dest"] == name
    assert "d\\udcff/x" in refused(3, "ConfigError", "publish", f"{name}/x", "store")


def test_locked_destination_is_exit_code_4(root: Path) -> None:
    good("pull", "store", "dest", "--version", "1")
    holder = os.open("dest", os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert "held by another process" in refused(4, "Busy", "pull", "store", "dest")
    finally:
        os.close(holder)
    good("pull", "store", "dest")


@pytest.mark.parametrize("command", ["log", "show", "verify", "doctor"])
def test_store_that_is_not_there_is_exit_code_10(root: Path, command: str) -> None:
    refused(10, "StoreError", command, "nowhere")
    assert not Path("nowhere").exists()


def test_pull_from_a_store_without_versions_is_exit_code_11(root: Path) -> None:
    Path("empty").mkdir()
    shutil.copy("store/store.json", "empty")
    assert "has no version yet" in refused(11, "NotFound", "pull", "empty", "dest")


def test_publisher_that_lost_the_race_is_exit_code_12(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("store", "rival")
    publish_folder("v1", "rival", run_id="r", anchors=False)
    put = LocalStore.put

    def late(self: LocalStore, key: str, parts: list[bytes], *, if_absent: bool = True) -> None:
        if key == manifest_key(4):
            shutil.copy(f"rival/{key}", f"store/{key}")
        put(self, key, parts, if_absent=if_absent)

    monkeypatch.setattr(LocalStore, "put", late)
    result = run("publish", "v2", "store", "--run-id", "r", "--json")
    assert result.exit_code == 12
    assert json.loads(result.stdout)["error"] == "AlreadyExists"


def test_store_that_does_not_answer_is_exit_code_13(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(_self: LocalStore, key: str, _out: memoryview) -> int:
        raise Unavailable(f"{key}: no answer; try again")

    monkeypatch.setattr(LocalStore, "get", get)
    refused(13, "Unavailable", "log", "store")


def test_broken_manifest_is_exit_code_20(root: Path) -> None:
    Path("store", manifest_key(3)).write_text('{"format":1}\n')
    for command in (["log", "store"], ["show", "store"], ["verify", "store"], ["pull", "store", "dest"]):
        assert "version 3" in refused(20, "FormatError", *command)


def test_newer_format_is_exit_code_21(root: Path) -> None:
    Path("store", manifest_key(3)).write_text('{"format":99}\n')
    assert "update deltackpt" in refused(21, "UnsupportedFormat", "log", "store")


def test_wrong_bytes_are_exit_code_30_and_touch_nothing(root: Path) -> None:
    good("pull", "store", "dest", "--version", "2")
    before = make_cases.tree_digest("dest")
    flip(one_shard(root, 3))
    assert "version 3" in refused(30, "IntegrityError", "pull", "store", "dest")
    assert make_cases.tree_digest("dest") == before


def test_version_that_is_not_there_is_exit_code_40(root: Path) -> None:
    refused(40, "ChainError", "pull", "store", "dest", "--version", "9")


def test_interrupt_is_exit_code_130(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(publish, "publish_folder", stop)
    refused(130, "Interrupted", "publish", "v0", "store")


def test_error_of_the_system_is_one_line_and_a_traceback_only_on_demand(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "/x")

    monkeypatch.setattr(publish, "publish_folder", fail)
    message = refused(1, "OSError", "publish", "v0", "store")
    assert message == "[Errno 5] Input/output error: '/x'; set DELTACKPT_DEBUG=1 to see where"
    assert isinstance(run("publish", "v0", "store", env={"DELTACKPT_DEBUG": "1"}).exception, OSError)


def test_message_of_several_lines_is_joined(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeltaError("one\n  two")

    monkeypatch.setattr(publish, "publish_folder", fail)
    assert refused(1, "DeltaError", "publish", "v0", "store") == "one two"


def test_messages_of_the_package_go_to_stderr(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = publish_folder("v3", "store", run_id="r", anchors=False)

    def speak(*_: object, **__: object) -> object:
        logging.getLogger("deltackpt").info("compiling kernels")
        return known

    monkeypatch.setattr(publish, "publish_folder", speak)
    result = run("publish", "v3", "store", "--json")
    assert result.stderr == "deltackpt: compiling kernels\n"
    assert json.loads(result.stdout)["version"] == 4
    assert logging.getLogger("deltackpt").handlers == []


# ---------------------------------------------------------------- real processes


def test_commands_are_silent_in_a_pipe_but_for_their_answer(root: Path) -> None:
    for arguments in (
        ["publish", "v3", "store", "--run-id", "r", "--no-anchors"], ["pull", "store", "dest"], ["log", "store"],
        ["show", "store"], ["verify", "store"], ["verify", "dest", "--against", "store"], ["anchor", "store"],
        ["doctor", "dest"],
    ):  # fmt: skip
        done = process(*arguments, cwd=root)
        assert (done.returncode, done.stderr) == (0, ""), arguments
        assert done.stdout
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout)


def test_exit_code_and_one_line_leave_the_process(root: Path) -> None:
    done = process("pull", "nowhere", "dest", "--json", cwd=root)
    assert done.returncode == 10
    assert json.loads(done.stdout)["exit_code"] == 10
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_reader_that_goes_away_is_no_error(root: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m deltackpt show store | true"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-c", command], cwd=root, env=environment, text=True, capture_output=True)
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["deltackpt", "deltackpt.cli"])
def test_import_loads_nothing_heavy(name: str) -> None:
    code = f"import sys, {name}; print([m for m in {HEAVY!r} if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True)
    assert done.stdout == "[]\n"


HEAVY = ["cramjam", "fsspec", "msgspec", "numba", "numpy", "rich", "safetensors", "torch", "xxhash", "zstandard"]


def test_help_starts_in_a_third_of_a_second(root: Path) -> None:
    # The best of three: another test may have the processor.
    best = 9.9
    for _ in range(3):
        began = time.perf_counter()
        assert process("--help", cwd=root).returncode == 0
        best = min(best, time.perf_counter() - began)
    assert best < 0.3


def test_every_public_name_can_be_imported() -> None:
    for name in deltackpt.__all__:
        assert getattr(deltackpt, name) is not None
    assert set(deltackpt.__all__) <= set(dir(deltackpt))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = deltackpt.nonsense


def test_shell_completion_comes_with_the_command() -> None:
    code = "from deltackpt.cli import cli; cli(prog_name='deltackpt')"
    for env, expected in (
        ({"_DELTACKPT_COMPLETE": "zsh_source"}, "#compdef deltackpt"),
        ({"_DELTACKPT_COMPLETE": "zsh_complete", "COMP_WORDS": "deltackpt pu", "COMP_CWORD": "1"}, "plain\npublish\n"),
        ({"_DELTACKPT_COMPLETE": "zsh_complete", "COMP_WORDS": "deltackpt pull --mo", "COMP_CWORD": "2"}, "--mode"),
    ):
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | env
        done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True)
        assert expected in done.stdout


# ---------------------------------------------------------------- help


def test_commands_are_those_of_the_design() -> None:
    assert cli.list_commands(click.Context(cli)) == sorted([*COMMANDS, *GROUPS])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_and_every_command_answers_json(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert [o.name for o in options if not o.help] == []
    assert "--json" in {flag for o in options for flag in o.opts}
    text = good(name, "--help")
    assert text.startswith(f"Usage: deltackpt {name} [OPTIONS]")
    assert "Examples" in text or f"  deltackpt {name} " in text


def test_every_line_of_the_help_that_shows_a_command_parses() -> None:
    texts = [good("--help"), *(good(name, "--help") for name in COMMANDS)]
    lines = {line.strip() for text in texts for line in text.splitlines() if re.match(r" +deltackpt [a-z]", line)}
    assert len(lines) >= 14
    for line in lines:
        name, *arguments = shlex.split(line)[1:]
        context = click.Context(cli, info_name="deltackpt", obj=module.Output())
        command = cli.get_command(context, name)
        assert command is not None
        command.make_context(name, arguments, parent=context)


def test_help_is_shown_without_a_command() -> None:
    assert good() == good("--help") == good("-h")


def test_version_of_the_program_is_not_set_by_the_environment() -> None:
    assert good("--version").startswith("deltackpt")
    assert run("log", "--help", env={"DELTACKPT_VERSION": "5"}).exit_code == 0


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (87_300_000, "87.3 MB"), (4e9, "4.0 GB"), (5.5e15, "5500.0 TB")],
)
def test_sizes_are_decimal(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 5, "0.00 %"), (1, 1_000_000, "<0.01 %"), (1, 8, "12.50 %"), (0, 0, "-")]
)
def test_share_that_is_not_nothing_never_reads_as_nothing(part: int, whole: int, text: str) -> None:
    assert percent(part, whole) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (86400 * 3, "3 d")]
)
def test_ages_have_one_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_figures_are_aligned_to_the_right() -> None:
    assert columns([("A", "B", "C"), ("1", "x", "10")]) == "A  B   C\n1  x  10"
    assert count(1, "delta") == "1 delta"
    assert count(2000, "delta") == "2,000 deltas"
