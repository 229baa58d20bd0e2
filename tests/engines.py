"""Doubles of the servers of vLLM and SGLang: what they answer, what they hold, and ways to fail at any request.

Their routes and state rules are those of vLLM 0.32 and of SGLang as its trainers use it. They note every broken rule:
weights loaded while sampling, and sampling begun on weights that are a mix.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from deltackpt.errors import ChainError

Fault = Literal["before", "half", "after"]
"""Refused before anything was done; half done and refused; done, and the answer lost."""

MIX = "a mix"


class Double:
    """An engine that samples from `weights`, the content of a folder's `weights` file."""

    scheme = ""

    def __init__(self) -> None:
        self.weights, self.version, self.pauses, self.is_paused = "as started", "default", 0, False
        self.calls: list[str] = []
        self.broken: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.faults: dict[int, Fault] = {}
        self.kv_of = self.weights
        self.url = ""

    def fail(self, at: int, how: Fault) -> None:
        """Fail at the request number `at` from now, from 0 on."""
        self.faults = {len(self.calls) + at: how}

    def load(self, folder: str, half: bool) -> None:
        if not self.is_paused:
            self.broken.append("loaded while sampling")
        self.weights = MIX
        if not half:
            self.weights = (Path(folder) / "weights").read_text()

    def pause(self) -> None:
        self.is_paused = True
        self.pauses += 1

    def resume(self) -> None:
        if self.weights == MIX:
            self.broken.append("resumed with a mix")
        self.is_paused = False

    def restart(self) -> None:
        """Be a new process, with the weights that it was first started with."""
        self.weights, self.version, self.is_paused = "as started", "default", False

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, object], half: bool) -> object:
        """Do what is asked and return the JSON answer; None: no such route."""
        raise NotImplementedError


class VllmDouble(Double):
    scheme = "vllm"

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, object] = {"lora_config": None, "speculative_config": None}

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, object], half: bool) -> object:
        match method, path:
            case "GET", "/weight_info":
                return {"weight_version": self.version}
            case "GET", "/server_info":
                return {"vllm_config": self.config if query.get("config_format") == "json" else str(self.config)}
            case "GET", "/is_paused":
                return {"is_paused": self.is_paused}
            case "POST", "/pause":
                assert query == {"mode": "keep", "clear_cache": "false"}
                self.pause()
                return {"status": "paused"}
            case "POST", "/resume":
                self.resume()
                return {"status": "resumed"}
            case "POST", "/collective_rpc":
                assert body["method"] == "reload_weights"
                kwargs = body["kwargs"]
                assert isinstance(kwargs, dict)
                self.load(kwargs["weights_path"], half)
                return {"results": [None]}
            case "POST", "/reset_prefix_cache":
                assert query == {"reset_running_requests": "true"}
                self.kv_of = self.weights
                return {"success": True}
            case "POST", "/update_weight_version":
                self.version = str(body["new_version"])
                return {"success": True, "new_version": self.version}
        return None


class SidecarDouble:
    """Hands over files that name a version. why_whole: why there are none."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.states = str(folder), set[int]()
        self.why_whole: str | None = None

    def layout(self, version: int) -> str:
        return f"layout of {version}"

    def changes(self, version: int, states: Set[int]) -> str:
        self.states = set(states)
        if self.why_whole is not None:
            raise ChainError(self.why_whole)
        path = Path(self.folder) / f"changes-{version}"
        path.write_text(str(version))
        return str(path)

    def sweep(self) -> None:
        for path in Path(self.folder).glob("changes-*"):
            path.unlink()


class PluginDouble(VllmDouble):
    """A vLLM of two workers with the plug-in: what is staged is the word of the folder v<version> in `versions`.

    refused: why worker 1 has no plan; why_whole: what it says instead of staging; failed: for a failed stage.
    """

    def __init__(self, versions: Path) -> None:
        super().__init__()
        self.versions, self.staged, self.open = versions, ("", -1), False
        self.refused: str | None = None
        self.why_whole: str | None = None
        self.failed: str | None = None
        self.folder = Path()
        self.config["weight_transfer_config"] = {"backend": "deltackpt"}

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, object], half: bool) -> object:
        match method, path:
            case "POST", "/init_weight_transfer_engine":
                info = body["init_info"]
                assert isinstance(info, dict)
                assert str(info["layout"]).startswith("layout of ")
                self.folder = Path(info["folder"])
                if not half:
                    self._report(0, str(info["token"]), "planned", "")
                    one = ("planned", "") if self.refused is None else ("refused", self.refused)
                    self._report(1, str(info["token"]), *one)
                return {"message": "Weight transfer initialized"}
            case "POST", "/start_weight_update":
                if self.open:
                    self.broken.append("started twice")
                self.open = True
                return {"message": "Weight update started"}
            case "POST", "/update_weights":
                info = body["update_info"]
                assert isinstance(info, dict)
                assert self.open
                self.open = not half
                self._update(info, half)
                return {"message": "Weights updated"}
            case "POST", "/finish_weight_update":
                self.open = False
                self.version = str(body.get("weight_version", self.version))
                return {"message": "Weight update finished"}
            case "GET", "/get_world_size":
                return {"world_size": 2}
        return super().answer(method, path, query, body, half)

    def _update(self, info: dict[str, object], half: bool) -> None:
        if "stage" in info:
            token = str(info["token"])
            self.staged = ("", -1) if half else (token, int(Path(str(info["stage"])).read_text()))
            if not half:
                self._report(0, token, "staged", "")
                one = ("staged", "") if self.why_whole is None else ("reload", self.why_whole)
                self._report(1, token, *(one if self.failed is None else ("failed", self.failed)))
        elif "apply" in info:
            assert info["apply"] == self.staged[0]
            self.load(str(self.versions / f"v{self.staged[1]}"), half)
        else:
            self.load(str(info["path"]), half)

    def _report(self, rank: int, token: str, state: str, text: str) -> None:
        weights = None if state == "refused" else "00000000000000ff"
        report = {"token": token, "state": state, "text": text, "weights": weights}
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"worker-{rank}.json").write_text(json.dumps(report))


class SglangDouble(Double):
    scheme = "sglang"

    def __init__(self) -> None:
        super().__init__()
        self.server_info: dict[str, object] = {"lora_paths": None, "speculative_draft_model_path": None}
        self.busy_flushes = 0

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, object], half: bool) -> object:
        match method, path:
            case "GET", "/model_info":
                return {"model_path": "m", "weight_version": self.version}
            case "GET", "/server_info":
                return self.server_info
            case "POST", "/pause_generation":
                self.pause()
                self.mode = body["mode"]
                return {}
            case "POST", "/continue_generation":
                self.resume()
                return {}
            case "GET", "/flush_cache":
                if self.busy_flushes:
                    self.busy_flushes -= 1
                    return "busy"
                assert self.mode == "retract", "requests keep their blocks"
                self.kv_of = "nothing"
                return {}
            case "POST", "/update_weights_from_disk":
                assert body["flush_cache"] == (self.mode == "retract")
                self.load(str(body["model_path"]), half)
                self.version = str(body["weight_version"])
                return {"success": True, "message": "done", "num_paused_requests": 0}
        return None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    double: Double


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = 60

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        double, parts = self.server.double, urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        body = json.loads(raw) if raw else {}
        fault = double.faults.pop(len(double.calls), None)
        double.calls.append(f"{self.command} {parts.path}")
        double.bodies.append(body)
        if fault == "before":
            self._send(500, {"error": "injected"})
            return
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        answer = double.answer(self.command, parts.path, query, body, fault == "half")
        if fault == "half":
            self._send(500, {"error": "injected"})
        elif fault is None:
            status = 404 if answer is None else 400 if answer == "busy" else 200
            self._send(status, answer)
        # Else the answer is lost: the connection ends without one.

    def _send(self, status: int, answer: object) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(double: Double) -> Iterator[Double]:
    """Serve a double on a free port; its url is set."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.double = double
        double.url = f"{double.scheme}+http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield double
        finally:
            server.shutdown()
            thread.join(60)
