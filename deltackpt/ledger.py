"""What pull and watch keep on disk beside a target: log of applies, hook that is owed, heartbeat. Never weights."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping

import msgspec

from deltackpt.chain import Entry, Plan
from deltackpt.checkpoint import replace_file
from deltackpt.errors import DeltaError
from deltackpt.follow import Prepared, weight_version
from deltackpt.manifest import decode
from deltackpt.store import store_error, sync_folder, write_all

_TAIL = 64 << 10
"""Bytes, more than a few lines of the log: a full disk may have torn the last one."""


class _Line(msgspec.Struct, frozen=True):
    version: int
    weight_version: str = ""


class ApplyLog:
    """`.deltackpt/apply.log` of a target: one line of JSON an apply, only ever appended to.

    A line that could not be written is kept and written first next time.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def last(self) -> str | None:
        """Return the weight version of the last whole line, None where there is none."""
        try:
            with open(self.path, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise store_error(exc, f"reading {self.path}") from exc
        for line in reversed(lines):
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.json.decode(line, type=_Line).weight_version
        return None

    def add(self, fields: Mapping[str, object]) -> None:
        """Append a line, durably."""
        self._waiting.append(json.dumps(fields).encode() + b"\n")
        self.flush()

    def found(self, entry: Entry, now: float) -> None:
        """Append a line for what is held but was not noted: brought by somebody else, or the line was lost."""
        if self.last() != weight_version(entry):
            self.add({"time": now, "way": "found", **_identity(entry)})

    def flush(self) -> None:
        """Append what could not be written before."""
        if not self._waiting:
            return
        try:
            folder = os.path.dirname(self.path)
            os.makedirs(folder, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                end = os.fstat(fd).st_size
                # A torn line, of a crash, must not swallow the next one.
                torn = end > 0 and os.pread(fd, 1, end - 1) != b"\n"
                write_all(fd, memoryview((b"\n" if torn else b"") + b"".join(self._waiting)))
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_folder(folder)
        except OSError as exc:
            raise store_error(exc, f"writing {self.path}") from exc
        self._waiting.clear()


def applied(prepared: Prepared, entry: Entry, now: float) -> dict[str, object]:
    """Return the line of an apply. entry: of the version; now: seconds since 1970."""
    plan = prepared.plan
    return {
        "time": now, "way": way(plan), **_identity(entry), "previous": prepared.previous, "anchor": plan.anchor,
        "deltas": len(plan.steps), "bytes_fetched": plan.nbytes,
        **{name: round(ms, 3) for name, ms in prepared.times.items()},
    }  # fmt: skip


def way(plan: Plan) -> str:
    """Name the way to a version: anchor, deltas, undo, several of them, or tie where nothing was to be fetched."""
    parts = [] if plan.anchor is None else ["anchor"]
    if any(not step.undo for step in plan.steps):
        parts.append("deltas")
    if any(step.undo for step in plan.steps):
        parts.append("undo")
    return "+".join(parts) or "tie"


def _identity(entry: Entry) -> dict[str, object]:
    manifest = entry.manifest
    return {
        "version": manifest.version, "lineage": manifest.lineage, "digest12": entry.digest[:12],
        "weight_version": weight_version(entry), "step": manifest.step,
    }  # fmt: skip


class HookFailed(DeltaError):
    """The user's command failed; the version stays applied."""


class Owed(msgspec.Struct, frozen=True):
    """A hook that has to run for a version. previous: the version that the hook was last run for."""

    version: int
    previous: int | None


class Hook:
    """Runs a command after each apply, at least once: what is owed is on disk before the apply begins."""

    def __init__(self, command: str, dest: str, path: str) -> None:
        self.command, self.dest, self._path = command, dest, path
        self._process: subprocess.Popen[bytes] | None = None

    def owed(self) -> Owed | None:
        """Return what is owed, None for nothing."""
        try:
            with open(self._path, "rb") as file:
                return decode(file.read(), Owed, self._path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise store_error(exc, f"reading {self._path}") from exc

    def owe(self, version: int, previous: int | None) -> None:
        """Note, before an apply, that the hook has to run after it."""
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
        except OSError as exc:
            raise store_error(exc, f"writing {self._path}") from exc
        replace_file(self._path, msgspec.json.encode(Owed(version, previous)) + b"\n")

    def forget(self) -> None:
        """Owe nothing."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def run(self, owed: Owed) -> None:
        """Run the command by the shell and wait for its end. Raises HookFailed unless it ends with 0."""
        previous = "" if owed.previous is None else str(owed.previous)
        env = {"DELTACKPT_VERSION": str(owed.version), "DELTACKPT_PREVIOUS": previous, "DELTACKPT_DEST": self.dest}
        what = f"the hook (--exec) for version {owed.version}"
        try:
            # Its stdout is for people: ours may be read by a program.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", self.command],
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        except OSError as exc:
            raise HookFailed(f"{what} cannot be started: {exc.strerror}; it runs again with the next poll") from exc
        try:
            code = self._process.wait()
        finally:
            self._process = None
        if code:
            how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
            raise HookFailed(f"{what} {how}, 0 was expected; it runs again with the next poll")
        self.forget()

    def terminate(self) -> None:
        """Ask the running command to end; it stays owed."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


class Heartbeat:
    """A file that is written anew with every sign of life; its age is how long there was none."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)

    def beat(self, fields: Mapping[str, object]) -> None:
        """Write one line of JSON. No reader sees it half; it need not survive a crash of the machine."""
        beside = f"{self.path}.{os.getpid()}.tmp"
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")
            os.replace(beside, self.path)
        except OSError as exc:
            raise store_error(exc, f"writing {self.path}") from exc
