"""A real vLLM, failed at every request of an update. Run by ./scripts/test_engines --faults.

A proxy stands between the driver and the server. At each request of an update, in turn: it is refused; done, and the
answer is lost; the driver is killed before or after it; the driver is stopped for a while. Then a new driver goes on.
With the plug-in, an apply also fails midway and leaves what no version has. All the while requests for one token are
answered: each answer must be, to the bit, that of a version, and after each mending all must be of the version wanted.
"""

import functools
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
from engines import PATIENCE_S, PLUGIN, PROMPTS, Wrong, ask, compare, complete, extend, prepare, served

WAYS = ("refused", "lost", "killed before", "killed after", "stopped")
STALE = {
    "lora": (["--enable-lora"], "serves LoRA adapters"),
    "draft": (
        ["--speculative-config", '{"method": "draft_model", "model": "SMALL", "num_speculative_tokens": 2}'],
        "has a draft model",
    ),
}
INJECTED = """
import os

def register():
    from deltackpt.memory import HostExchange

    whole = HostExchange.run

    def run(self):
        done = whole(self)
        if os.path.exists({flag!r}):
            os.unlink({flag!r})
            self.memory.elements(2)[next(p.at for p in self.pieces if p.old.itemsize == 2)[:2]] += 1
            raise OSError("injected: the apply failed midway")
        return done

    HostExchange.run = run
"""


class Proxy(ThreadingHTTPServer):
    """Hands requests on to a server, notes them, and fails at one of them."""

    daemon_threads = True

    def __init__(self, server: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.seen, self.at, self.way = server, list[str](), -1, ""
        self.driver: subprocess.Popen[str] | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def arm(self, at: int, way: str) -> None:
        """Fail at request number `at` from now."""
        self.seen, self.at, self.way = [], at, way


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        self._hand_on()

    def do_POST(self) -> None:
        self._hand_on()

    def _hand_on(self) -> None:
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        way = proxy.way if len(proxy.seen) == proxy.at else ""
        proxy.seen.append(f"{self.command} {self.path.partition('?')[0]}")
        if way == "refused":
            self._send(500, b"injected")
            return
        if way == "killed before":
            self._signal(signal.SIGKILL)
            return
        if way == "stopped":
            self._signal(signal.SIGSTOP)
        connection = http.client.HTTPConnection("127.0.0.1", proxy.behind, timeout=PATIENCE_S)
        connection.request(self.command, self.path, body or None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        raw = answer.read()
        connection.close()
        if way == "killed after":
            self._signal(signal.SIGKILL)
        elif way != "lost":
            self._send(answer.status, raw)
        if way == "stopped":
            threading.Timer(1.0, self._signal, [signal.SIGCONT]).start()

    def _signal(self, number: int) -> None:
        assert self.server.driver is not None
        self.server.driver.send_signal(number)

    def _send(self, status: int, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Asking(threading.Thread):
    """Asks for one token, again and again; every answer must be one of `known`."""

    def __init__(self, port: int, known: set[str]) -> None:
        super().__init__(daemon=True)
        self.port, self.known, self.over, self.lock = port, known, threading.Event(), threading.Lock()
        self.odd: list[str] = []
        self.answered = 0

    def run(self) -> None:
        while not self.over.is_set():
            with self.lock:  # alone in its batch: another one may be summed in another order
                found = json.dumps(complete(self.port, PROMPTS[0], 1))
            self.answered += 1
            if found not in self.known:
                self.odd.append(found)
            self.over.wait(0.02)


def drive(proxy: Proxy, work: Path, root: Path, version: int) -> tuple[int, str]:
    """Bring the engine to a version by a process of its own; returns its exit code, and what it said."""
    code = (
        "import sys\n"
        "from deltackpt.engine import Engine\n"
        "from deltackpt.errors import DeltaError\n"
        "from deltackpt.sidecar import Sidecar\n"
        "from deltackpt.store import open_store\n"
        "url, own, store, version, folder = sys.argv[1:]\n"
        "try:\n"
        "    loaded = Engine(url, Sidecar(open_store(store), own), kv='reset', draft=None).reach("
        "int(version), f'l.{version}.d', folder)\n"
        "except DeltaError as exc:\n"
        "    print(exc)\n"
        "    sys.exit(1)\n"
        "print(loaded.how)\n"
    )
    arguments = [
        f"vllm+http://127.0.0.1:{proxy.server_address[1]}", str(work / "own"), str(work / "store"), str(version),
        str(root / f"v{version}"),
    ]  # fmt: skip
    proxy.driver = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    said, _ = proxy.driver.communicate(timeout=PATIENCE_S)
    return proxy.driver.returncode, said.strip()


def faults(root: Path, route: str) -> dict[str, Any]:
    """Fail at every request of one route; returns what was counted. Raises Wrong."""
    from deltackpt import publish_folder

    work = root / f"faults-{route}"
    work.mkdir()
    for version in range(3):
        publish_folder(str(root / f"v{version}"), str(work / "store"), run_id="r", step=version)
    flag = work / "fail"
    injected = extend(work / "injected", "injected", INJECTED.format(flag=str(flag)))
    fresh = [json.loads((root / f"fresh-{v}.json").read_text())["answers"][0] for v in range(3)]
    known = {json.dumps([tokens[:1], chances[:1]]) for tokens, chances in fresh}
    counted: Counter[str] = Counter()
    options = PLUGIN if route == "plugin" else []
    with served(root, work / "server.log", *options, path=injected) as (port, _):
        proxy, asking = Proxy(port), Asking(port, known)
        code, said = drive(proxy, work, root, 1)
        if code:
            raise Wrong(f"without a fault: {said}")
        arm: dict[str, Callable[[], None]] = {
            f"{way} at {number} {request}": functools.partial(proxy.arm, number, way)
            for way in WAYS
            for number, request in enumerate(proxy.seen)
        }
        if route == "plugin":
            arm["failed midway"] = flag.touch
        asking.start()
        for number, (what, inject) in enumerate(arm.items()):
            version = 2 - number % 2
            proxy.arm(-1, "")
            inject()
            code, said = drive(proxy, work, root, version)
            if (code < 0) != what.startswith("killed") or (code > 0 and "tries again" not in said):
                raise Wrong(f"{what}: the driver ended with {code}: {said}")
            counted["killed" if code < 0 else "said" if code else "overcome"] += 1
            paused = ask(port, "GET", "/is_paused")["is_paused"]
            counted["left paused" if paused else "left sampling"] += 1
            proxy.arm(-1, "")
            code, said = drive(proxy, work, root, version)
            if code:
                raise Wrong(f"{what}: the next driver failed: {said}")
            with asking.lock:
                compare(root, port, version)
            if asking.odd:
                raise Wrong(f"{what}: an answer of no version: {asking.odd[0]}")
        asking.over.set()
        asking.join(PATIENCE_S)
        proxy.shutdown()
    return {"faults": len(arm), **counted, "answers": asking.answered}


def refused(root: Path, name: str) -> str:
    """Return what the driver says of a server that holds more than the model. Raises Wrong where it goes ahead."""
    options, text = STALE[name]
    work = root / name
    work.mkdir()
    options = [o.replace("SMALL", str(root / "v0")) for o in options]
    with served(root, work / "server.log", *PLUGIN, *options) as (port, _):
        proxy = Proxy(port)
        code, said = drive(proxy, work, root, 1)
        proxy.shutdown()
    if code <= 0 or text not in said or [r for r in proxy.seen if r.startswith("POST")]:
        raise Wrong(f"{name}: the driver ended with {code} after {proxy.seen}: {said}")
    return said


@click.command()
@click.option("--model", "models", multiple=True, default=("llama-untied", "qwen3-moe"), show_default=True)
@click.option("--route", "routes", multiple=True, default=("plugin", "reload"), show_default=True)
def main(models: tuple[str, ...], routes: tuple[str, ...]) -> None:
    """Fail at every request to a real vLLM, and hold what it serves against fresh loads."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the server ends with its test
    failed = False
    with tempfile.TemporaryDirectory() as top:
        for kind in models:
            root = Path(top) / kind
            prepare(kind, root, 2)
            for route in routes:
                if (kind, route) == ("qwen3-moe", "reload"):
                    continue  # refused by the driver
                try:
                    click.echo(f"{kind}, {route}: never a mix, always mended; {json.dumps(faults(root, route))}")
                except Wrong as exc:
                    failed = True
                    click.echo(f"{kind}, {route}: {exc}")
            for name in STALE:
                try:
                    click.echo(f"{kind}, {name}: {refused(root, name)}")
                except Wrong as exc:
                    failed = True
                    click.echo(f"{kind}, {name}: {exc}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
