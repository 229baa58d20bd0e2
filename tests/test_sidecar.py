"""What a sidecar hands over, and a worker of an engine that has torch and numpy alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltackpt.changes import map_changes
from deltackpt.errors import ChainError
from deltackpt.layout import Layout
from deltackpt.publish import publish_folder
from deltackpt.reader import Reader
from deltackpt.sidecar import Sidecar
from deltackpt.store import open_store

ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "blake3", "click", "cramjam", "fsspec", "msgspec", "numba", "rich", "safetensors", "xxhash", "zstandard"
        }:
            raise ModuleNotFoundError(f"{name} is not there", name=name)

sys.meta_path.insert(0, Absent())
"""

WORKER = """
import contextlib, json, types

import numpy as np
import torch

def module(name, **members):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)

module("vllm", __version__="0.32.0")
module("vllm.config", set_current_vllm_config=lambda _: contextlib.nullcontext())
module(
    "vllm.model_executor.model_loader.reload",
    initialize_layerwise_reload=lambda _: None, finalize_layerwise_reload=lambda *_: None,
)

from deltackpt.vllm import DeltaEngine

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(128, 8), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.qk[64 * (name == "k"):][:64].copy_(tensor.flip(1))

    def holds(self, n):
        given = [torch.from_numpy(np.load(f"{name}{n}.npy")).flip(1) for name in "qk"]
        return torch.equal(self.qk, torch.cat(given))

layout, changes = sys.argv[1:]
model = Model()
model.load_weights((name, torch.from_numpy(np.load(f"{name}0.npy"))) for name in "qk")
some = types.SimpleNamespace
engine = DeltaEngine(None, some(
    parallel_config=some(data_parallel_index=0, world_size=1, rank=0), lora_config=None,
    model_config=some(model="v0", dtype="torch.float32", quantization=None), device_config=some(device_type="cuda"),
), "cpu", model)
engine.init_transfer_engine(engine.parse_init_info({"layout": layout, "folder": "own", "token": "t"}))
with open("own/worker-0.json") as file:
    print(json.load(file)["weights"])
engine.update_weights({"stage": changes, "token": "t"})
engine._thread.join(60)
assert model.holds(0)
engine.update_weights({"apply": "t"})
assert model.holds(1)
engine.update_weights({"path": "v0"})
assert model.holds(0)
assert "msgspec" not in sys.modules
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Versions 0 to 2 of two tensors; the second changes one element of each, the third all."""
    made = {n: np.arange(512, dtype=np.float32).reshape(64, 8) + i for i, n in enumerate("qk")}
    for version in range(3):
        if version == 1:
            made = {n: np.where(a == 100, np.float32(-1), a) for n, a in made.items()}
        elif version == 2:
            made = {n: a * np.float32(1.5) for n, a in made.items()}
        (tmp_path / f"v{version}").mkdir()
        save_file(made, tmp_path / f"v{version}" / "model.safetensors")
        for name, array in made.items():
            np.save(tmp_path / f"{name}{version}.npy", array)
        publish_folder(tmp_path / f"v{version}", tmp_path / "store", run_id="r", anchors=False)
    return tmp_path


def state(root: Path, version: int) -> int:
    reader = Reader(open_store(str(root / "store")))
    reader.load()
    return int(reader.manifest(version).state, 16)


def sidecar(root: Path) -> Sidecar:
    return Sidecar(open_store(str(root / "store")), str(root / "own"))


def test_changes_lead_from_what_the_workers_hold_to_the_version(root: Path) -> None:
    handed = sidecar(root)
    assert Layout.decode(Path(handed.layout(1)).read_bytes()).names == ("k", "q")
    found = map_changes(handed.changes(1, {state(root, 0)}))
    assert (found.base, found.state) == (state(root, 0), state(root, 1))
    # Of k the element that was 99 + 1, of q, after the 512 of k, the one that was 100.
    assert found.flips[2].elements.tolist() == [99, 612]
    assert found.flips[2].bits.tolist() == [0x42C80000 ^ 0xBF800000] * 2
    assert len(map_changes(handed.changes(1, {state(root, 1)})).flips[2].elements) == 0


def test_one_version_is_there_whatever_a_sidecar_that_was_killed_has_left(root: Path) -> None:
    (root / "own").mkdir()
    for left in ("changes-0123", "changes-4567.tmp"):
        (root / "own" / left).write_bytes(b"left")
    handed = sidecar(root)
    path = handed.changes(1, {state(root, 0)})
    assert [str(p) for p in (root / "own").iterdir()] == [path]
    handed.sweep()
    assert list((root / "own").iterdir()) == []


def test_what_no_changes_lead_to_is_to_be_loaded_whole(root: Path) -> None:
    handed, first = sidecar(root), state(root, 0)
    for version, states, why in (
        (1, {first, state(root, 1)}, "hold weights of 2 states"),
        (1, {7}, "is no version of"),
        (2, {first}, "larger than the weights"),
    ):
        with pytest.raises(ChainError, match=why):
            handed.changes(version, states)
    assert not (root / "own").exists()


def test_worker_needs_torch_and_numpy_alone(root: Path) -> None:
    handed = sidecar(root)
    layout = handed.layout(1)
    (root / "alone.py").write_text(ALONE + WORKER)
    command = [sys.executable, "alone.py", layout, handed.changes(1, {state(root, 0)})]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{state(root, 0):016x}\n", "")
