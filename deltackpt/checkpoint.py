"""Checkpoint folders in the Hugging Face form: safetensors files, an index, side files.

Reads them strictly (the index and the files must agree), maps them, and writes new ones. Never writes through
a link.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from deltackpt.digest import U64
from deltackpt.errors import ConfigError, DeltaError, FormatError, NotFound, StoreError
from deltackpt.layout import I64, Layout
from deltackpt.manifest import Placement, ShardFile, require_file_name
from deltackpt.shard import Header, header_bytes, header_length, parse_header
from deltackpt.store import LocalStore, Store, store_error, sync_folder, write_all

INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX = 256 << 20
_FILE_BYTES = 5 << 30
"""Weights per file of a checkpoint that has no serving checkpoint to follow."""
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".npz", ".tflite",
)  # fmt: skip
"""Files with these endings are weights (or their state), never side files."""


@dataclass(frozen=True)
class Checkpoint:
    """Where each tensor of a checkpoint lies.

    file: index into placement.files per tensor; offset: its first byte in that file; nbytes: size of each file.
    """

    layout: Layout
    placement: Placement
    file: I64
    offset: I64
    nbytes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        headers: Mapping[str, Header],
        *,
        modes: Mapping[str, int],
        index: str | None = None,
        index_metadata: str = "{}",
    ) -> Checkpoint:
        """Build from the parsed header of every file, by file name."""
        entries = [(name, tensor) for name in sorted(headers) for tensor in headers[name].tensors]
        holder: dict[str, str] = {}
        for name, tensor in entries:
            if tensor.name in holder:
                raise FormatError(f"tensor {tensor.name} is in {holder[tensor.name]} and in {name} (duplicate)")
            holder[tensor.name] = name
        layout = Layout([t.name for _, t in entries], [t.dtype for _, t in entries], [t.shape for _, t in entries])
        files, nbytes = [], []
        file, offset = np.zeros(len(entries), np.int64), np.zeros(len(entries), np.int64)
        for number, name in enumerate(sorted(headers)):
            header = headers[name]
            tensors = tuple(layout.position[t.name] for t in header.tensors)
            file[list(tensors)] = number
            offset[list(tensors)] = [header.data + t.begin for t in header.tensors]
            files.append(ShardFile(name, tensors, header.metadata, modes.get(name, 0o644)))
            nbytes.append(header.data + (header.tensors[-1].end if header.tensors else 0))
        placement = Placement(tuple(files), index, index_metadata)
        return cls(layout, placement, file, offset, tuple(nbytes))


def read_header(store: Store, key: str, what: str) -> Header:
    """Read and parse the header of a safetensors object."""
    nbytes = store.size(key)
    start = bytearray(min(nbytes, 64))
    store.read_into(key, memoryview(start))
    raw = bytearray(header_length(bytes(start), nbytes, what))
    store.read_into(key, memoryview(raw), offset=8)
    return parse_header(bytes(raw), nbytes, what)


@dataclass(frozen=True)
class Folder:
    """A checkpoint folder as it was found. side_files: name to mode; stamp: what changes when a file changes."""

    path: str
    checkpoint: Checkpoint
    side_files: Mapping[str, int]
    stamp: tuple[tuple[str, int, int], ...]

    def file_path(self, number: int) -> str:
        """Path of a weight file by its number in the placement."""
        return os.path.join(self.path, self.checkpoint.placement.files[number].name)

    def require_unchanged(self) -> None:
        """Raise ConfigError if a weight file was replaced or written since the folder was opened."""
        for old in self.stamp:
            with suppress(FileNotFoundError):
                if stamp_of(self.path, [old[0]]) == (old,):
                    continue
            raise ConfigError(f"{self.path}/{old[0]} changed while it was read; let the trainer finish, run again")


def stamp_of(path: str, names: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and mtime of each file: what changes when a file changes."""
    found = [(name, os.stat(os.path.join(path, name))) for name in names]
    return tuple((name, s.st_size, s.st_mtime_ns) for name, s in found)


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read a checkpoint folder, or a single safetensors file. Raises ConfigError or FormatError, naming the file."""
    path = os.path.abspath(path)
    try:
        if os.path.isfile(path):
            return _open(os.path.dirname(path), [os.path.basename(path)], None, side_files=False)
        names = sorted(os.listdir(path))
    except FileNotFoundError as exc:
        raise ConfigError(f"{path} does not exist; expected a checkpoint folder") from exc
    except OSError as exc:
        raise store_error(exc, f"reading {path}") from exc
    indexes = [n for n in names if n.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise ConfigError(f"{path} has {len(indexes)} index files: {' '.join(indexes)}; expected at most one")
    if indexes:
        return _open(path, None, indexes[0], side_files=True)
    weights = [n for n in names if n.endswith(".safetensors") and not n.startswith(".")]
    if not weights:
        raise ConfigError(f"{path} has no safetensors file; expected a Hugging Face checkpoint folder")
    return _open(path, weights, None, side_files=True)


def _open(path: str, weights: Sequence[str] | None, index: str | None, *, side_files: bool) -> Folder:
    weight_map, index_metadata = _read_index(path, index) if index else ({}, "{}")
    names = sorted(set(weight_map.values())) if weights is None else list(weights)
    store = LocalStore(path)
    headers, modes = {}, {}
    for name in names:
        what = os.path.join(path, name)
        require_file_name(name, f"{path}: file", folders=False)  # readers refuse all others
        try:
            headers[name] = read_header(store, name, what)
        except NotFound as exc:
            raise ConfigError(f"{what} does not exist, but {index} names it") from exc
        modes[name] = stat.S_IMODE(os.stat(what).st_mode) & 0o777
    checkpoint = Checkpoint.of(headers, modes=modes, index=index, index_metadata=index_metadata)
    if index:
        _require_index(checkpoint, weight_map, os.path.join(path, index))
    side = dict(_side_files(path, "")) if side_files else {}
    return Folder(path, checkpoint, side, stamp_of(path, names))


def weight_files(path: str) -> list[str]:
    """Return the names of the files that a loader would take from a folder, whole or not: the index and what it names.

    Without an index, all safetensors files.
    """
    names = sorted(os.listdir(path))
    indexes = [n for n in names if n.endswith(INDEX_SUFFIX)]
    if not indexes:
        return [n for n in names if n.endswith(".safetensors") and not n.startswith(".")]
    found = set(indexes)
    for index in indexes:
        # What cannot be read names nothing, and is replaced or removed itself.
        with suppress(DeltaError):
            found |= set(_read_index(path, index)[0].values())
    return sorted(found)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, object] | None = None


def _read_index(path: str, index: str) -> tuple[dict[str, str], str]:
    what = os.path.join(path, index)
    try:
        with open(what, "rb") as file:
            raw = file.read(_MAX_INDEX + 1)
        if len(raw) > _MAX_INDEX:
            raise FormatError(f"{what}: more than {_MAX_INDEX} bytes")
        content = msgspec.json.decode(raw, type=_Index)
    except OSError as exc:
        raise store_error(exc, f"reading {what}") from exc
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise FormatError(f"{what}: not an index of a checkpoint: {exc}") from exc
    metadata = {k: v for k, v in (content.metadata or {}).items() if k != "total_size"}
    named_by = {file: name for name, file in content.weight_map.items()}
    for held, name in named_by.items():
        require_file_name(held, f"{what}: weight_map of {name}:", folders=False)
        if not held.endswith(".safetensors"):
            raise FormatError(f"{what}: weight_map of {name}: {held} is not a safetensors file")
    return content.weight_map, msgspec.json.encode(metadata, order="sorted").decode()


def _require_index(checkpoint: Checkpoint, weight_map: Mapping[str, str], what: str) -> None:
    files = checkpoint.placement.files
    held = {n: files[int(f)].name for n, f in zip(checkpoint.layout.names, checkpoint.file, strict=True)}
    for name, file in weight_map.items():
        if held.get(name) != file:
            raise FormatError(f"{what} names {name} in {file}, but the file does not hold it")
    for name, file in held.items():
        if name not in weight_map:
            raise FormatError(f"{what} does not name {name}, which {file} holds")


def _side_files(path: str, prefix: str) -> Iterator[tuple[str, int]]:
    for entry in sorted(os.scandir(os.path.join(path, prefix)), key=lambda e: e.name):
        name = prefix + entry.name
        if entry.name.startswith(".") or name.endswith((".index.json", *_WEIGHTS)):
            continue
        if entry.is_dir(follow_symlinks=False):  # a link may lead anywhere, or in a circle
            yield from _side_files(path, name + "/")
        elif entry.is_file():
            require_file_name(name, f"{path}: side file")
            yield name, stat.S_IMODE(entry.stat().st_mode) & 0o777


def index_bytes(checkpoint: Checkpoint) -> bytes:
    """Write the index file of a checkpoint, with the true total size."""
    files = checkpoint.placement.files
    metadata = json.loads(checkpoint.placement.index_metadata)
    metadata["total_size"] = checkpoint.layout.total_bytes
    weight_map = {n: files[int(f)].name for n, f in zip(checkpoint.layout.names, checkpoint.file, strict=True)}
    return msgspec.json.format(msgspec.json.encode({"metadata": metadata, "weight_map": weight_map}), indent=2) + b"\n"


@contextmanager
def mapped(paths: Sequence[str], *, writable: bool = False) -> Iterator[list[int]]:
    """Map files and yield the address of each. writable: stores go to the files."""
    maps: list[mmap.mmap] = []
    try:
        maps.extend(_map(path, writable) for path in paths)
        yield [int(np.frombuffer(m, np.uint8).__array_interface__["data"][0]) for m in maps]
        if writable:
            for m in maps:
                m.flush()
    except OSError as exc:
        raise store_error(exc, f"working on {os.path.commonpath(paths) if paths else 'no file'}") from exc
    finally:
        for m in maps:
            m.close()


def _map(path: str, writable: bool) -> mmap.mmap:
    try:
        with open(path, "r+b" if writable else "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    except OSError as exc:
        raise store_error(exc, f"mapping {path}") from exc
    except ValueError as exc:
        raise StoreError(f"mapping {path}: it is empty; it changed while it was read") from exc


def addresses(checkpoint: Checkpoint, files: Sequence[int]) -> U64:
    """Return the address of each tensor, given the address at which each file is mapped."""
    base = np.array(files, np.uint64)
    return base[checkpoint.file] + checkpoint.offset.astype(np.uint64) if len(base) else np.empty(0, np.uint64)


def placed(layout: Layout, placement: Placement) -> tuple[Checkpoint, list[bytes]]:
    """Return where tensors lie in files that are yet to be written, and the header of each file."""
    file, offset = np.zeros(len(layout.names), np.int64), np.zeros(len(layout.names), np.int64)
    headers, nbytes = [], []
    for number, shard in enumerate(placement.files):
        tensors = list(shard.tensors)
        entries = [(layout.names[t], layout.dtypes[t], layout.shapes[t], int(layout.nbytes[t])) for t in tensors]
        header = header_bytes(entries, shard.metadata)
        sizes = layout.nbytes[tensors] if tensors else np.empty(0, np.int64)
        file[tensors] = number
        offset[tensors] = len(header) + np.cumsum(sizes) - sizes
        headers.append(header)
        nbytes.append(len(header) + int(sizes.sum()))
    return Checkpoint(layout, placement, file, offset, tuple(nbytes)), headers


def default_placement(layout: Layout) -> Placement:
    """Return the files of a checkpoint that follows no other: in name order, cut by size, named as is usual."""
    cuts, held = [[]], 0  # type: list[list[int]], int
    for t, nbytes in enumerate(layout.nbytes.tolist()):
        if held and held + nbytes > _FILE_BYTES:
            cuts.append([])
            held = 0
        cuts[-1].append(t)
        held += nbytes
    metadata = {"format": "pt"}
    if len(cuts) == 1:
        return Placement((ShardFile("model.safetensors", tuple(cuts[0]), metadata),))
    names = [f"model-{n + 1:05d}-of-{len(cuts):05d}.safetensors" for n in range(len(cuts))]
    files = tuple(ShardFile(name, tuple(cut), metadata) for name, cut in zip(names, cuts, strict=True))
    return Placement(files, "model.safetensors.index.json")


def create_file(path: str, head: bytes, nbytes: int, mode: int) -> None:
    """Make a new file of `nbytes` that begins with `head`; its space is reserved, so that mapped stores cannot fail."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, mode)
            write_all(fd, memoryview(head))
            if nbytes > len(head):
                os.posix_fallocate(fd, 0, nbytes)
        finally:
            os.close(fd)
    except OSError as exc:
        raise store_error(exc, f"writing {path}") from exc


def sync_file(path: str) -> None:
    """Make a file's bytes durable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        raise store_error(exc, f"writing {path}") from exc


def replace_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Write a small file whole or not at all, durably."""
    temporary = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, mode)
            write_all(fd, memoryview(data))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_folder(os.path.dirname(path))
    except OSError as exc:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise store_error(exc, f"writing {path}") from exc


@dataclass(frozen=True)
class Run:
    """Bytes that lie together in both checkpoints: file number and offset on each side."""

    source: int
    source_offset: int
    target: int
    target_offset: int
    nbytes: int


def copy_runs(source: Checkpoint, target: Checkpoint) -> list[Run]:
    """Return the copies that fill the data sections of `target` from `source`; both have the same layout."""
    runs: list[Run] = []
    sizes = source.layout.nbytes.tolist()
    where = list(
        zip(source.file.tolist(), source.offset.tolist(), target.file.tolist(), target.offset.tolist(), strict=True)
    )
    for shard in target.placement.files:
        for t in shard.tensors:
            if not sizes[t]:
                continue
            run = Run(*where[t], sizes[t])
            last = runs[-1] if runs else None
            if (
                last
                and (last.source, last.target) == (run.source, run.target)
                and last.source_offset + last.nbytes == run.source_offset
                and last.target_offset + last.nbytes == run.target_offset
            ):
                runs[-1] = Run(
                    last.source, last.source_offset, last.target, last.target_offset, last.nbytes + run.nbytes
                )
            else:
                runs.append(run)
    return runs
