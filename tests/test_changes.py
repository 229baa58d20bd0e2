"""Changes as a file, and a module that follows them with torch and numpy alone, as inside of an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltackpt.changes import Changes, Flips, map_changes, write_changes
from deltackpt.errors import IntegrityError
from deltackpt.publish import publish_folder
from deltackpt.reader import Reader
from deltackpt.store import open_store
from deltackpt.walk import walk

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


def changes() -> Changes:
    flips = [Flips(np.empty(0, np.int64), np.empty(0, f"<u{width}")) for width in (1, 4, 8)]
    flips.insert(1, Flips(np.array([3, 9], np.int64), np.array([0x8001, 7], np.uint16)))
    return Changes("ab" * 32, 1 << 63, 5, np.array([0, 1 << 63], np.uint64), tuple(flips))


def test_mapped_changes_are_those_that_were_written_and_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "changes"
    write_changes(changes(), str(path))
    found = map_changes(str(path))
    path.unlink()
    assert (found.layout, found.base, found.state) == ("ab" * 32, 1 << 63, 5)
    assert found.added.tolist() == [0, 1 << 63]
    assert [(one.elements.tolist(), one.bits.tolist()) for one in found.flips] == [
        ([], []), ([3, 9], [0x8001, 7]), ([], []), ([], [])
    ]  # fmt: skip
    assert [one.bits.itemsize for one in found.flips] == [1, 2, 4, 8]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "expected"),
    [(lambda raw: raw[:-8], "it ends early"), (lambda raw: raw[8:], "holds no changes"),
     (lambda raw: raw.replace(b'"level": 1', b'"level": 2'), "was written by another release")],
)  # fmt: skip
def test_file_of_other_bytes_is_refused(what: object, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "changes"
    write_changes(changes(), str(path))
    assert callable(what)
    path.write_bytes(what(path.read_bytes()))
    with pytest.raises(IntegrityError, match=expected):
        map_changes(str(path))


def test_module_is_planned_changed_and_reseeded_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for version in (0, 1):
        made = {n: rng.standard_normal((4, 8)).astype(np.float32) for n in ("q", "k")}
        (tmp_path / f"v{version}").mkdir()
        save_file(made, tmp_path / f"v{version}" / "model.safetensors")
        for name, array in made.items():
            np.save(tmp_path / f"{name}{version}.npy", array)
        publish_folder(tmp_path / f"v{version}", tmp_path / "store", run_id="r", anchors=False)
    reader = Reader(open_store(str(tmp_path / "store")))
    reader.load()
    base = int(reader.manifest(0).state, 16)
    write_changes(walk(reader, reader.plan(1, local=0), base), str(tmp_path / "changes"))
    (tmp_path / "alone.py").write_text(
        ALONE
        + """
import numpy as np
import torch
from deltackpt.changes import map_changes
from deltackpt.layout import Layout
from deltackpt.module import PlannedModule, hold
from deltackpt.scatter import make_plan

qk = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)
model = torch.nn.Module()
model.qk = qk

def load(weights):
    for name, tensor in weights:
        qk[4 * (name == "k"):][:4].copy_(tensor.flip(1))

def version(n):
    return {name: torch.from_numpy(np.load(f"{name}{n}.npy")) for name in "qk"}

def holds(n):
    return torch.equal(qk, torch.cat([version(n)["q"], version(n)["k"]]).flip(1))

load(version(0).items())
planned = PlannedModule(model, make_plan(model, load, Layout(["q", "k"], ["F32"] * 2, [(4, 8)] * 2)))
staged = planned.stage(map_changes("changes"))
assert holds(0)
staged.apply()
assert holds(1)
held = hold(planned.plan.layout, version(0).items())
planned.reseed(held.addresses)
assert holds(0)
print("held", "msgspec" in sys.modules)
"""
    )
    done = subprocess.run([sys.executable, "alone.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("held False\n", "")
