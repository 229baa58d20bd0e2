"""Sidecar: fetches, verifies and decodes versions for the engines of its host, in a process and environment of its own.

What it hands over are files in a folder that both see, best in memory (/dev/shm): a layout to plan, and the changes
of a version, mapped by every worker. At most one version is there, and no larger than the weights; it is swept when it
is staged, and before the next one, so that nothing of a sidecar that was killed stays.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Set
from pathlib import Path

from deltackpt.changes import write_changes
from deltackpt.errors import ChainError, NotFound
from deltackpt.layout import Layout
from deltackpt.reader import Reader
from deltackpt.store import Store, store_error
from deltackpt.walk import walk


class Sidecar:
    """Hands versions of a store over in `folder`."""

    def __init__(self, store: Store, folder: str) -> None:
        self.folder, self._reader = folder, Reader(store)

    def layout(self, version: int) -> str:
        """Write the layout of a version, unless it is there; returns the path, another one for each layout."""
        layout = self._layout(version)
        path = Path(self.folder) / f"layout-{layout.digest}.json"
        if not path.exists():
            beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                beside.write_bytes(layout.encoded)
                beside.replace(path)
            except OSError as exc:
                raise store_error(exc, f"writing {path}") from exc
        return str(path)

    def changes(self, version: int, states: Set[int]) -> str:
        """Write what brings workers that hold weights of these states to a version; returns the path.

        Raises ChainError, saying why, where the weights have to be loaded whole.
        """
        self.sweep()
        layout = self._layout(version)
        if len(states) != 1:
            raise ChainError(f"the workers hold weights of {len(states)} states")
        (state,) = states
        held = self._reader.identify(layout.digest, state)
        if held is None:
            raise ChainError(f"what the workers hold is no version of {self._reader.store.url}")
        plan = self._reader.plan(version, local=held)
        if plan.anchor is not None:
            raise ChainError(f"no deltas lead from version {held} to {version} that are smaller than the weights")
        try:
            changes = walk(self._reader, plan, state)
        except NotFound as exc:
            raise ChainError(f"no deltas lead from version {held} to {version}: {exc}") from exc
        if changes.nbytes > layout.total_bytes:
            raise ChainError(f"what changes from version {held} to {version} is larger than the weights")
        path = os.path.join(self.folder, f"changes-{secrets.token_hex(8)}")
        try:
            write_changes(changes, path)
        except OSError as exc:
            self.sweep()
            raise store_error(exc, f"writing {path}") from exc
        return path

    def sweep(self) -> None:
        """Remove what was handed over; who has mapped it keeps it."""
        for path in Path(self.folder).glob("changes-*"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _layout(self, version: int) -> Layout:
        # What the workers hold may be newer than all that was read of the store so far.
        if self._reader.history:
            self._reader.refresh()
        else:
            self._reader.load()
        return self._reader.layout(self._reader.manifest(version).layout)
