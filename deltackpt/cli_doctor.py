"""`doctor`: what this machine, its GPUs, a store and a local folder are able to do. Imported when it is used."""

from __future__ import annotations

import contextlib
import os
import re
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltackpt.cli import _PATH, Output, _json_option, _looks_local, _open, _stage, _storage_option, _words, age, size
from deltackpt.errors import DeltaError

if TYPE_CHECKING:
    import torch

BACKENDS = ("auto", "cpu", "cuda", "de", "torch")


@click.command()
@click.argument("path", type=_PATH, metavar="[STORE|DEST]", required=False)
@click.option(
    "--write-probe", type=_PATH, metavar="URL",
    help="Try what the store at URL can do, by some 40 small objects that are removed again.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(BACKENDS), default="auto", envvar="DELTACKPT_BACKEND", show_default=True,
    help="Say whether this one can be used for tensors on each GPU, or on the CPU where there is none.",
)  # fmt: skip
@_storage_option
@_json_option
@click.pass_obj
def doctor(output: Output, path: str | None, write_probe: str | None, backend: str) -> None:
    """Describe this machine and its GPUs, a STORE or a local DEST.

    \b
      deltackpt doctor
      deltackpt doctor --backend cuda
      deltackpt doctor /mnt/fs/run7
      deltackpt doctor /models/policy --json
      deltackpt doctor --write-probe s3://bucket/run7
    """
    machine, gpus = _doctor_machine(path), _doctor_gpus(backend)
    others: dict[str, dict[str, object]] = {}
    if path is not None:
        if not os.path.exists(os.path.join(path, "store.json")) and _looks_local(path):
            others["dest"] = _doctor_dest(path)
        else:
            others["store"] = _doctor_store(path)
    if write_probe is not None:
        others["probe"] = _doctor_probe(output, write_probe)
    lines = []
    for part in (machine, *(gpus or [{"gpus": _no_gpu()}]), *others.values()):
        width = max(map(len, part))
        lines += [
            f"{name.replace('_', ' ').ljust(width)}  {_doctor_words(name, value)}" for name, value in part.items()
        ]
    output.result({"machine": machine, "gpus": gpus, **others}, "\n".join(lines))


def _doctor_words(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if name.startswith("bytes_") and isinstance(value, int):
        return size(value)
    return _words(value)


def _doctor_machine(path: str | None) -> dict[str, object]:
    import shutil
    import tempfile

    from deltackpt.bench import machine
    from deltackpt.pool import default_threads

    where = machine()
    versions = {**where.versions, **_installed("click", "msgspec", "rich", "safetensors", "torch")}
    free = {}
    for folder in dict.fromkeys((os.getcwd(), tempfile.gettempdir(), "/dev/shm", path or os.getcwd())):
        with contextlib.suppress(OSError):
            free[folder] = size(shutil.disk_usage(folder).free)
    numba = versions["numba"] != "not installed"
    return {
        "python": where.python, "system": where.system, "cpu": where.cpu, "cores": where.cores,
        "threads": default_threads(), "bytes_memory": where.memory_nbytes, "packages": versions,
        "numba": numba, "compiled_kernels": _compiled_kernels() if numba else 0, "free": free,
    }  # fmt: skip


def _doctor_gpus(backend: str) -> list[dict[str, object]]:
    """Describe the devices of torch beside the CPU. Raises ConfigError where a backend asked for cannot be used."""
    from deltackpt.tensors import choose

    found = _devices()
    for on in found or ["cpu"]:
        choose(on, backend)
    return [_doctor_gpu(on, backend) for on in found]


def _devices() -> list[str]:
    """Return the devices of torch beside the CPU, as text."""
    if find_spec("torch") is None:
        return []
    import torch

    found = []
    for kind in ("cuda", "xpu", "mps", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found += [f"{kind}:{index}" for index in range(module.device_count())]
    return found


def _no_gpu() -> str:
    if find_spec("torch") is None:
        return "none, torch is not installed"
    import torch

    return f"none, torch {torch.__version__} sees no device"


def _doctor_gpu(on: str, backend: str) -> dict[str, object]:
    import torch

    from deltackpt.tensors import choose

    choice, device = choose(on, backend), torch.device(on)
    # mps has no such call
    of = getattr(getattr(torch, device.type), "get_device_properties", lambda _: None)(device)
    nvidia = device.type == "cuda" and torch.version.hip is None
    runtime = (
        f"CUDA {torch.version.cuda}" if nvidia else f"HIP {torch.version.hip}" if torch.version.hip else device.type
    )
    fields: dict[str, object] = {
        "device": on, "name": getattr(of, "name", None), "bytes_memory": getattr(of, "total_memory", None),
        "driver": _nvidia_driver() if nvidia else getattr(of, "driver_version", None),
        "torch": f"{torch.__version__} ({runtime})",
        "backend_asked": backend, "backend": choice.backend, "reason": choice.reason,
    }  # fmt: skip
    return fields | (_engine(device) if nvidia else {})


def _nvidia_driver() -> str | None:
    """Return the version of the kernel's driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found and found[0]


def _engine(device: torch.device) -> dict[str, object]:
    """Say what the driver tells of the Decompression Engine, and try it; without one, try the same by kernels."""
    from deltackpt import arena, nvcomp
    from deltackpt.libnvcomp import load
    from deltackpt.trial import probe

    fields: dict[str, object] = {}
    try:
        fields["nvcomp"] = load().version
    except DeltaError as exc:
        fields["nvcomp"] = str(exc)
    try:
        says = arena.capability(device)
        fields |= {"engine_mask": says.mask, "engine_reads": says.codecs, "bytes_engine_limit": says.limit}
        seen = probe(device, backend=nvcomp.HARDWARE if says.codecs else nvcomp.CUDA)
    except DeltaError as exc:
        return fields | {"trial": str(exc)}
    return fields | {
        "trial": f"{seen.frames} frames came out right", "trial_by": seen.backend, "trial_codecs": seen.codecs,
        "bytes_trial_stored": seen.stored, "bytes_trial_raw": seen.raw,
        "host_arena_capable": seen.host_capable, "device_arena_capable": seen.device_capable,
    }  # fmt: skip


def _installed(*packages: str) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in packages:
        found[package] = "not installed"
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _compiled_kernels() -> int:
    """Count the kernels that numba has on disk, in any of the places where it keeps them."""
    own = Path(__file__).parent
    given = os.environ.get("NUMBA_CACHE_DIR")
    wide = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    places = [own / "__pycache__", *([Path(given)] if given else []), wide]
    return len({f.name for place in places if place.is_dir() for f in place.rglob("jit.*.nbi")})


def _doctor_store(path: str) -> dict[str, object]:
    from deltackpt.reader import Reader
    from deltackpt.store import LocalStore
    from deltackpt.verify import listed_versions, read_entry

    store = _open(path)
    reader = Reader(store)
    fields: dict[str, object] = {"store": store.url, "store_id": reader.info.store_id, "format": reader.info.format}
    if isinstance(store, LocalStore):
        fields["readable"] = os.access(store.root, os.R_OK | os.X_OK)
        fields["writable"] = os.access(store.root, os.W_OK | os.X_OK)
    versions = listed_versions(store)
    fields["versions"] = len(versions)
    if versions:
        manifest = read_entry(store, versions[-1]).manifest
        fields |= {
            "head": manifest.version, "head_kind": manifest.kind, "head_step": manifest.step,
            "head_age": age(time.time() - manifest.created), "lineage": manifest.lineage, "epoch": manifest.epoch,
            "run_id": manifest.run_id, "bytes_raw": manifest.totals.raw,
        }  # fmt: skip
    return fields


def _doctor_probe(output: Output, url: str) -> dict[str, object]:
    from deltackpt.probe import flaws
    from deltackpt.store import probe_store

    with _stage(f"trying {url}"):
        found = probe_store(url, options=output.storage)
    tiers = {1: "1, all that is needed", 2: "2, safe to write to, but", 3: "3, only with --single-writer:"}
    return {
        "url": found.url, "tier": found.tier, "verdict": " ".join([tiers[found.tier], "; ".join(flaws(found))]).strip(),
        "exclusive_create": found.exclusive, "one_winner_of_a_race": found.race, "range_reads": found.ranges,
        "listed_at_once": found.listed, "deletes": found.deletes, "clock_skew_s": found.skew_s,
    }  # fmt: skip


def _doctor_dest(path: str) -> dict[str, object]:
    from deltackpt.checkpoint import open_folder
    from deltackpt.folder import read_record

    root = os.path.abspath(path)
    link = os.path.join(root, "current")
    switch = os.path.islink(link)
    held = os.path.realpath(link) if switch else root
    outer, record = read_record(root), read_record(held)
    fields: dict[str, object] = {
        "dest": root, "mode": "switch" if switch else "replace or in-place",
        "writable": os.access(root, os.W_OK | os.X_OK),
        "version": record.version if record is not None and record.manifest else None,
        "store_id": record.store_id if record is not None else None,
        "pending": outer.pending.version if outer is not None and outer.pending is not None else None,
    }  # fmt: skip
    try:
        folder = open_folder(held)
    except DeltaError as exc:
        return fields | {"weights": f"cannot be read: {exc}"}
    names = [f.name for f in folder.checkpoint.placement.files]
    infos = {name: os.lstat(os.path.join(held, name)) for name in names}
    links = [n for n, info in infos.items() if os.path.islink(os.path.join(held, n)) or info.st_nlink > 1]
    weights = sum(folder.checkpoint.nbytes)
    side = sum(os.stat(os.path.join(held, name)).st_size for name in folder.side_files)
    return fields | {
        "tensors": len(folder.checkpoint.layout.names), "bytes_raw": folder.checkpoint.layout.total_bytes,
        "files": len(names), "links_refused_by_in_place": links,
        "bytes_written_by_a_switch": weights + side, "bytes_written_by_a_replace": weights,
    }  # fmt: skip
