"""A stream in the wire format of slime, miles and SGLang turned into a store. Never writes below the stream's folder.

Their readers patch a folder in place and check it afterwards; here a folder is proven before it becomes a version, so a
damaged one costs nothing, and the store remembers what was read, so a stream that was begun again is seen.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltackpt import backend
from deltackpt.backend import Cpu
from deltackpt.checkpoint import open_folder
from deltackpt.digest import fp_hex, state_fingerprint
from deltackpt.errors import ChainError, ConfigError, FormatError, IntegrityError, StoreError, Unavailable
from deltackpt.export import Copy, poll
from deltackpt.manifest import Manifest
from deltackpt.pool import in_order
from deltackpt.publish import Publisher, publish_folder
from deltackpt.reader import Reader
from deltackpt.store import Store
from deltackpt.tensors import restore_into
from deltackpt.weightv import WireVersion, folder_name, numbers, open_version

_NUMBER, _IDENTITY, _MANIFEST = "weight_v", "weight_v_identity", "weight_v_manifest"
"""Metadata of an imported version: the folder's number, what it said of its tensors, and the digest in its sidecar."""


@dataclass(frozen=True)
class ImportReport:
    """What one pass did. imported: numbers of the folders that were published; head: the newest one in the store."""

    imported: tuple[int, ...]
    head: int | None


@dataclass(frozen=True)
class _Place:
    """Where the store is in the stream of folders. version: the store's; the others as in its metadata."""

    number: int
    version: int
    identity: str
    manifest: str


class Importer:
    """Publishes folders `weight_v<version>` below `path` in a store. Not for use by several threads at once.

    base: the checkpoint that a stream of deltas begins with, needed once. Each folder is one version of the store, with
    its number as the step. Whatever fails, the store ends at the last good folder, and the next pass goes on there.
    Holds two copies of the weights in memory, one of them the publisher's.
    """

    def __init__(
        self,
        path: str,
        store: Store,
        *,
        base: str | None = None,
        run_id: str | None = None,
        resume: bool = False,
        new_lineage: bool = False,
        threads: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path, self._store, self._base, self._threads = os.path.abspath(path), store, base, threads
        self._run_id, self._resume, self._new_lineage, self._say = run_id, resume, new_lineage, say
        self._at: _Place | None = None
        self._copy: Copy | None = None
        self._publisher: Publisher | None = None

    def close(self) -> None:
        """Wait for an anchor that is being made; raises the error with which that ended."""
        self._copy = None
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            publisher.close()

    def once(self) -> ImportReport:
        """Publish the folders that are new and whole.

        Raises ChainError where they do not continue what the store holds: a folder is missing, or the stream was begun
        again; FormatError, IntegrityError for a folder that is broken, which may be put right and tried again.
        """
        imported: list[int] = []
        if self._at is None and not self._new_lineage:
            self._at = self._find()
        found = numbers(self.path)
        if self._at is not None:
            self._require_same_stream(found, self._at)
        for number in found:
            if self._at is not None and number <= self._at.number:
                continue
            one = open_version(self.path, number)
            if one is None:
                break
            try:
                self._publish(one)
            except BaseException:
                # What is in memory is no version's now; the store says from where to go on.
                self._copy, self._publisher, self._at = None, None, None
                raise
            imported.append(number)
        return ImportReport(tuple(imported), None if self._at is None else self._at.number)

    def watch(self, stop: threading.Event, *, poll_s: float, done: Callable[[ImportReport], None]) -> None:
        """Publish folders as they come, until `stop` is set; a store that does not answer is waited for."""

        def once() -> None:
            report = self.once()
            if report.imported:
                done(report)

        poll(once, stop, poll_s, self._say)

    # ------------------------------------------------------------ the way

    def _find(self) -> _Place | None:
        """Return where the store is in the stream; None: nothing was published yet."""
        reader = Reader(self._store, threads=self._threads)
        try:
            reader.load()
        except Unavailable:
            raise
        except StoreError:
            return None  # the publisher makes it
        for version in sorted(reader.history, reverse=True):
            manifest = reader.manifest(version)
            said = manifest.metadata
            if said.get(_NUMBER, "").isdigit():
                return _Place(int(said[_NUMBER]), version, said.get(_IDENTITY, ""), said.get(_MANIFEST, ""))
            if manifest.kind != "empty":
                raise ConfigError(
                    f"version {version} of {self._store.url} was not imported; name a store of its own for the stream"
                )
        return None

    def _require_same_stream(self, found: Sequence[int], at: _Place) -> None:
        """Raise ChainError if the folders are no longer those that were imported: their publishers begin again at 1."""
        if not found or found[0] > at.number:
            return  # nothing yet, or removed up to there
        if found[-1] == at.number and self._copy is not None:
            return  # nothing new since the last pass
        one = open_version(self.path, at.number) if at.number in found else None
        if one is None or one.identity != at.identity:
            raise ChainError(
                f"{self.path} is not the stream of which {self._store.url} holds {folder_name(at.number)}: "
                "it was begun again; import it into another store, or with --new-lineage and --base"
            )

    def _publish(self, one: WireVersion) -> None:
        at = self._at
        if one.base is None:
            self._publish_full(one.path, one)
            return
        if at is None:
            if self._base is None:
                raise ConfigError(f"{one.name} is a delta; name the checkpoint of version {one.base} with --base")
            self._begin(self._base, one.base, {_NUMBER: str(one.base)})
            at = self._at
            assert at is not None
        if one.base != at.number:
            raise ChainError(
                f"{one.name} builds on version {one.base}, {self._store.url} holds {at.number}; "
                "put the folders between back, or begin again from a full version"
            )
        if one.sidecar is not None and at.manifest and one.sidecar.prev != at.manifest:
            raise ChainError(f"{one.name} follows another {folder_name(at.number)} than the one that was imported")
        if self._copy is None or self._publisher is None:
            self._restore(at)
        assert self._copy is not None
        self._flip(self._copy, one)
        self._commit(one, self._copy)

    def _begin(self, path: str, number: int, metadata: dict[str, str]) -> None:
        """Publish a checkpoint folder as the first version of the stream."""
        folder = open_folder(path)
        self._copy = Copy(folder.checkpoint.layout)
        self._copy.load(folder)
        folder.require_unchanged()
        self._publisher = Publisher(
            self._store, serving=path, run_id=self._run_id, resume=self._resume, new_lineage=self._new_lineage,
            threads=self._threads,
        )  # fmt: skip
        manifest = self._publisher.publish(self._copy.live(), step=number, metadata=metadata)
        self._took(manifest)

    def _publish_full(self, path: str, one: WireVersion) -> None:
        if self._at is None:
            self._begin(path, one.number, _metadata(one))
            return
        folder = open_folder(path)
        if self._copy is None or self._publisher is None:
            self._restore(self._at)
        assert self._copy is not None
        if folder.checkpoint.layout.digest == self._copy.layout.digest:
            self._copy.load(folder)
            folder.require_unchanged()
            self._commit(one, self._copy)
            return
        self.close()
        manifest = publish_folder(
            path, self._store, step=one.number, run_id=self._run_id, relayout=True, metadata=_metadata(one),
            threads=self._threads,
        )  # fmt: skip
        self._took(manifest)

    def _restore(self, at: _Place) -> None:
        reader = Reader(self._store, threads=self._threads)
        reader.load()
        self._copy = Copy(reader.layout(reader.manifest(at.version).layout))
        restore_into(reader, at.version, Cpu(self._threads), self._copy.addresses)
        self._publisher = Publisher(self._store, run_id=self._run_id, resume=self._resume, threads=self._threads)

    def _flip(self, copy: Copy, one: WireVersion) -> None:
        """Bring the copy to a delta; every tensor is proven by its checksum before it is written."""
        position = copy.layout.position
        for name in one.tensors:
            if name not in position:
                raise FormatError(f"{one.path}: tensor {name} is not in the version before; begin with a full one")

        def work(name: str) -> None:
            mine = copy.tensor(position[name])
            mine[...] = one.decode(name, mine)

        for _ in in_order(work, one.tensors, self._threads):
            pass
        if one.sidecar is not None and one.sidecar.layout == copy.layout.digest:
            table = backend.fingerprints(copy.layout, copy.addresses, threads=self._threads)
            state = fp_hex(state_fingerprint(copy.layout.weights, table))
            if state != one.sidecar.state:
                raise IntegrityError(
                    f"{one.path}: the weights come to state {state}, {one.sidecar.state} is expected: tensors that it "
                    "leaves alone differ; begin with the right --base"
                )

    def _commit(self, one: WireVersion, copy: Copy) -> None:
        assert self._publisher is not None
        self._took(self._publisher.publish(copy.live(), step=one.number, metadata=_metadata(one)))

    def _took(self, manifest: Manifest) -> None:
        said = manifest.metadata
        self._at = _Place(int(said[_NUMBER]), manifest.version, said.get(_IDENTITY, ""), said.get(_MANIFEST, ""))
        self._resume = self._new_lineage = False


def _metadata(one: WireVersion) -> dict[str, str]:
    said = {_NUMBER: str(one.number), _IDENTITY: one.identity}
    if one.sidecar is not None:
        said[_MANIFEST] = one.sidecar.manifest
    return said
