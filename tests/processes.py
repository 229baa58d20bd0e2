"""Real processes for tests: commands in children of one warm process, which may be told to fail, to stop or to die.

A forked child costs a tenth of an interpreter that starts from nothing, so that every place of a run can be a place to
die at. Run as a script, this module is the warm process.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_cases

REPOSITORY = Path(__file__).parent.parent


def fsync(fd: int) -> None:
    """Stand in for os.fsync where nobody pulls a plug: an open descriptor is all it asks for."""
    os.fstat(fd)


FAULTS = make_cases.FAULTS.replace('("KILL", "TERM")', '("KILL", "TERM", "STOP")')
"""Faults of the cases, and one action more: STOP halts the process until somebody kills it or lets it go on."""


@dataclass
class Child:
    """A command that was started. pid is its own: signals may be sent to it."""

    server: Server
    pid: int
    output: Path
    exit_code: int | None = None

    def wait(self) -> int:
        """Return its exit code; minus the signal that killed it."""
        if self.exit_code is None:
            self.exit_code = self.server.ask({"wait": self.pid})
        return self.exit_code

    def wait_stopped(self) -> None:
        """Return when it is stopped by SIGSTOP."""
        assert self.server.ask({"stopped": self.pid}) == signal.SIGSTOP

    @property
    def text(self) -> str:
        """All that it wrote to stdout and stderr."""
        return self.output.read_text()


class Server:
    """The warm process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, *arguments: str | Path, uid: int | None = None, umask: int = 0o022, **env: str) -> Child:
        """Start a command.

        env: FAULT, FAULT_MATCH, FAULT_FSIZE; CLOCK: seconds that its clock is ahead; STOP_AFTER, STOP_HOW and
        STOP_MODE: see `torn_apply`; INTERRUPT_AT and INTERRUPT_TIMES: see `interrupt`.
        """
        self.count += 1
        output = self.folder / f"output-{self.count}"
        variables = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"], **env}
        order = {"run": [*map(str, arguments)], "env": variables, "uid": uid, "umask": umask, "output": str(output)}
        return Child(self, self.ask(order), output)

    def run(self, *arguments: str | Path, **options: Any) -> Child:
        """Run a command and wait for its end."""
        child = self.start(*arguments, **options)
        child.wait()
        return child

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


# ---------------------------------------------------------------- in the warm process and its children


def _serve() -> None:
    import deltackpt.cli
    import deltackpt.folder
    import deltackpt.follow
    import deltackpt.publish
    import deltackpt.tensors
    import deltackpt.verify  # noqa: F401  # all of them loaded, for the children

    for line in sys.stdin:
        order = json.loads(line)
        if "run" in order:
            answer = os.fork()
            if answer == 0:
                _child(order)
        elif "stopped" in order:
            answer = os.WSTOPSIG(os.waitpid(order["stopped"], os.WUNTRACED)[1])
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        print(answer, flush=True)


def _child(order: dict[str, Any]) -> None:
    exit_code = 70
    try:
        fd = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.umask(order["umask"])
        # Whoever starts the tests in the background of a script has them ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if order["uid"] is not None:
            os.setgroups([])
            os.setgid(order["uid"])
            os.setuid(order["uid"])
        os.environ.update(order["env"])
        exit_code = _command(order["run"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _command(arguments: list[str]) -> int:
    from deltackpt.cli import cli

    if "STOP_AFTER" in os.environ:
        torn_apply(
            int(os.environ["STOP_AFTER"]),
            lambda: stop(os.environ["STOP_HOW"]),
            in_place=os.environ["STOP_MODE"] == "in-place",
        )
    if "INTERRUPT_AT" in os.environ:
        interrupt(int(os.environ["INTERRUPT_AT"]), int(os.environ.get("INTERRUPT_TIMES", "1")))
    if "CLOCK" in os.environ:
        real, ahead = time.time, float(os.environ["CLOCK"])
        time.time = lambda: real() + ahead
    os.fsync = fsync
    exec(compile(FAULTS, "faults", "exec"), {})
    try:
        cli(arguments, prog_name="deltackpt")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    return 0


def interrupt(number: int, times: int) -> None:
    """Send SIGINT from the n-th piece of work that a thread of a pool does on the weights, and then go on with it.

    Before it goes on, the main thread gets the time to do what it must not do yet. times: each is sent when the one
    before has been noticed.
    """
    from deltackpt import backend, pool

    count = itertools.count(1)
    signal.signal(signal.SIGUSR1, lambda *_: None)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread() and next(count) == number:
                for _ in range(times):
                    handler = signal.getsignal(signal.SIGINT)
                    os.kill(os.getpid(), signal.SIGINT)
                    while signal.getsignal(signal.SIGINT) is handler:
                        # One that came just before it began to wait does not wake it.
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                threading.Event().wait(0.02)
            return real(*args, **options)

        return work

    for module, name in ((backend, "apply_slice"), (backend, "check"), (backend, "extract"), (pool, "fingerprint")):
        setattr(module, name, watched(getattr(module, name)))


class Stopped(Exception):
    """An error in the middle of an apply."""


def stop(how: str) -> None:
    """End here: by SIGKILL, by SIGTERM or by an exception."""
    if how == "RAISE":
        raise Stopped("stopped by the test")
    os.kill(os.getpid(), getattr(signal, f"SIG{how}"))


def torn_apply(tensors: int, then: Callable[[], None], *, in_place: bool = True) -> None:
    """Make the next apply that writes, to the files in place or to new ones, stop after so many tensors.

    All others have their old bytes then, as if it had not come to them.
    """
    from deltackpt import backend

    real = backend.apply
    wanted = backend.SET if in_place else backend.XOR

    def torn(layout: Any, staged: Any, where: Any, *, mode: int = backend.XOR, threads: int | None = None) -> Any:
        if mode != wanted:
            return real(layout, staged, where, mode=mode, threads=threads)
        import numpy as np

        from deltackpt.kernels import view

        backend.apply = real
        held = [(int(a), int(n)) for a, n in zip(where, np.asarray(layout.nbytes), strict=True) if n]
        before = [bytes(view(a, n)) for a, n in held]
        found = real(layout, staged, where, mode=mode, threads=threads)
        for (a, n), raw in list(zip(held, before, strict=True))[tensors:]:
            view(a, n)[:] = np.frombuffer(raw, np.uint8)
        then()
        return found

    backend.apply = torn


if __name__ == "__main__":
    _serve()
