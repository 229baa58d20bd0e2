"""What the words EXACT and REFUSE of the failure cases mean, as assertions, and ways to run commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import make_cases
import pytest
from click.testing import CliRunner, Result
from safetensors import safe_open

import deltackpt
from deltackpt.cli import cli
from deltackpt.errors import DeltaError
from deltackpt.folder import read_record
from deltackpt.manifest import Manifest, decode_manifest

if TYPE_CHECKING:
    import torch

REPOSITORY = Path(deltackpt.__file__).parent.parent

Expect = dict[str, Any]
"""The expect.json of a case."""
State = tuple[object, ...]


def expected(root: Path) -> Expect:
    """Return the expect.json of a built case."""
    found: Expect = json.loads((root / "expect.json").read_text())
    return found


# ---------------------------------------------------------------- commands


def command(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "deltackpt", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | env,
        text=True,
        capture_output=True,
        timeout=120,
    )


def cli_run(*arguments: str | Path) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli, [*map(str, arguments)], prog_name="deltackpt")


def errors(result: Result) -> str:
    """Return what a command wrote on stderr, without what the first one on a machine says of its compiled kernels."""
    lines = result.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("deltackpt: compiling kernels for this machine"))


def cli_good(*arguments: str | Path) -> dict[str, Any]:
    """Run with --json in this process; exit 0, nothing on stderr. Returns the answer."""
    result = cli_run(*arguments, "--json")
    assert (result.exit_code, errors(result)) == (0, ""), result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


# ---------------------------------------------------------------- states


def state_of(root: Path) -> State:
    """Return all that a folder holds, in a form that can be compared."""
    folders = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_dir() and not p.is_symlink())
    return (*folders, *make_cases.tree_digest(root).items())


def holder(local: Path) -> Path:
    """Return the folder that holds the weights of a local copy: itself, or where switch mode's `current` leads."""
    return local / "current" if (local / "current").is_symlink() else local


def recorded(local: Path) -> int | None:
    """Return the version that a local copy is recorded to hold; None without a record, or while one is pending."""
    outer, inner = read_record(str(local)), read_record(str(holder(local)))
    if inner is None or not inner.manifest or inner.pending is not None or (outer and outer.pending):
        return None
    return inner.version


def visible(store: Path) -> list[int]:
    """Return the versions that a store shows, by number."""
    return sorted(int(p.stem) for p in (store / "manifests").glob("*.json"))


def manifest_of(store: Path, version: int) -> Manifest:
    """Return a manifest as the store holds it."""
    return decode_manifest((store / "manifests" / f"{version:020d}.json").read_bytes(), version)


def data_files(store: Path) -> list[str]:
    """Return the paths of all shards and anchor files of a store, also of attempts that no manifest names."""
    return sorted(str(p.relative_to(store)) for p in (store / "data").rglob("*") if p.is_file())


# ---------------------------------------------------------------- EXACT


def holds(local: Path, expect: Expect, label: str) -> None:
    """Assert that a folder has every tensor of a version as expected, no other name, and readable, agreeing files."""
    folder = holder(local)
    assert make_cases.ckpt_digest(folder) == expect["versions"][label]
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text()) if index.exists() else None
    names = set(content["weight_map"].values()) if content else {p.name for p in folder.glob("*.safetensors")}
    in_shards: dict[str, str] = {}
    for name in sorted(names):
        with safe_open(folder / name, framework="np") as file:
            for tensor in file.keys():  # noqa: SIM118  # not a mapping
                assert tensor not in in_shards
                in_shards[tensor] = name
                part = file.get_slice(tensor)
                dtype, shape, _ = expect["versions"][label][tensor]
                assert (part.get_dtype(), part.get_shape()) == (dtype, shape)
    assert set(in_shards) == set(expect["versions"][label])
    if content:
        assert content["weight_map"] == in_shards
        tensors = make_cases.read_ckpt(folder).values()
        assert content["metadata"]["total_size"] == sum(len(raw) for _, _, raw in tensors)


def exact(local: Path, expect: Expect, version: int, label: str | None = None) -> None:
    """Assert EXACT(version). label: its name in expect.json, by default v<version>. Exit 0 is for the caller to see."""
    holds(local, expect, f"v{version}" if label is None else label)
    assert recorded(local) == version


# ---------------------------------------------------------------- REFUSE


def refused(
    action: Callable[[], object] | Iterable[str | Path],
    *named: str,
    error: type[DeltaError] | str,
    local: Path | Iterable[Path] = (),
    store: Path | None = None,
) -> str:
    """Assert REFUSE(named) and return the message. That the next good command works is for the caller to see.

    action: what must raise `error`, or a command line that must exit with that class's code, on one line of stderr.
    Each of `named` is in the message. The folders `local` are as before: files, modes, records; nothing was left
    beside them. The store shows no new version, and no file of a version or attempt is new or gone.
    """
    kind = error if isinstance(error, type) else getattr(deltackpt, error)
    folders = [local] if isinstance(local, Path) else list(local)
    before = [make_cases.tree_digest(f) for f in folders]
    beside = [sorted(p.name for p in f.parent.iterdir()) for f in folders]
    shown = (visible(store), data_files(store)) if store else None
    message = _failure(action, kind)
    for name in named:
        assert name in message, message
    assert [make_cases.tree_digest(f) for f in folders] == before
    assert [sorted(p.name for p in f.parent.iterdir()) for f in folders] == beside
    assert ((visible(store), data_files(store)) if store else None) == shown
    return message


def _failure(action: Callable[[], object] | Iterable[str | Path], kind: type[DeltaError]) -> str:
    if callable(action):
        with pytest.raises(DeltaError) as caught:
            action()
        assert caught.type is kind, f"{caught.type.__name__} instead of {kind.__name__}: {caught.value}"
        return str(caught.value)
    result = cli_run(*action, "--json")
    assert result.stdout, result.stderr
    answer = json.loads(result.stdout)
    assert (answer.get("error"), result.exit_code) == (kind.__name__, kind.exit_code), result.output
    assert errors(result) == f"deltackpt: {answer['message']}\n"
    message: str = answer["message"]
    return message


# ---------------------------------------------------------------- live tensors

DEVICE = os.environ.get("DELTACKPT_TEST_DEVICE", "cpu")
"""Where live tensors are made. `scripts/gpu` runs some tests with those of a GPU."""

_TORCH = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip


def tensor_of(dtype: str, shape: Sequence[int], raw: bytes) -> torch.Tensor:
    """Return a live tensor of its own memory with these bytes; dtype and shape as in a safetensors header."""
    import torch

    if dtype == "F4":
        shape = [*shape[:-1], shape[-1] // 2]
    made = torch.empty(tuple(shape), dtype=getattr(torch, _TORCH[dtype]), device=DEVICE)
    if raw:
        flat = made.view(-1) if made.dim() == 0 else made
        flat.view(torch.uint8).view(-1).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return made


def raw_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in the order of its elements."""
    from deltackpt.tensors import bits

    return bits(tensor).cpu().contiguous().reshape(-1).numpy().tobytes()


def live(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint folder as live ones."""
    return {name: tensor_of(*held) for name, held in make_cases.read_ckpt(folder).items()}


def live_exact(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Assert that live tensors are those of a checkpoint folder, byte for byte, dtype and shape included."""
    expect = make_cases.read_ckpt(folder)
    assert set(tensors) == set(expect)
    for name, tensor in tensors.items():
        dtype, shape, raw = expect[name]
        like = tensor_of(dtype, shape, raw)
        assert (name, tensor.dtype, tensor.shape) == (name, like.dtype, like.shape)
        assert raw_of(tensor) == raw, name
