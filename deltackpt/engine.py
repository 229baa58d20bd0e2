"""Drives an engine that samples from a followed folder, over HTTP: pause, load, read the version back, resume.

An engine whose weights may be half of one version and half of another is never resumed: it is loaded again, whole,
until its version is the wanted one. What is owed to it is on disk before it is paused, so that a watcher that is killed
anywhere goes on with it. No weights pass through here. Longer than most modules:
two servers' routes, one order of calls, and what each failed call leaves.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from deltackpt.checkpoint import open_folder
from deltackpt.errors import ChainError, ConfigError, DeltaError
from deltackpt.manifest import decode
from deltackpt.store import store_error

Kv: TypeAlias = Literal["reset", "keep"]
Draft: TypeAlias = Literal["follow", "none"]
T = TypeVar("T")

_READ_S = 30.0
"""For answers that take no work; a busy engine answers between two steps."""
_WORK_S = 300.0
"""For a pause that waits for a step, and for loading weights: what vLLM's own client waits."""
_PLAN_S = 1800.0
"""For a worker that plans, once: it loads the model a few times."""
_LOOK_S = 0.05
"""Between two looks for the report of a worker."""
_FLUSHES = 60
"""SGLang refuses to flush while requests end; its trainers try so often, a second apart."""
_MAX_BODY = 8 << 20


class EngineFailed(DeltaError):
    """An engine did not do what it was asked for. The folder stays at its version; the next poll tries again."""


class _Refused(EngineFailed):
    """The engine answered, with another status than 200."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Loaded:
    """What an engine holds, as read back from it. pause_ms: how long it stood still; None: it held that already.

    how: in words, how it came there.
    """

    weight_version: str
    pause_ms: float | None
    how: str = ""


class Driver(Protocol):
    """How one kind of engine is asked. Every method raises EngineFailed, or ConfigError for what no retry mends.

    how: in words, how the last load was done.
    """

    how: str

    def require_fit(self, folder: str) -> None:
        """Refuse an engine that holds what an update would leave stale, or that would load the folder wrongly."""

    def held(self) -> str:
        """Return the weight version that the engine says it has."""

    def paused(self) -> bool:
        """Say whether somebody has paused it."""

    def stage(self, version: int) -> None:
        """Do what can be done while it samples."""

    def pause(self) -> None:
        """Let it stand still; doing it twice does no harm."""

    def load(self, version: int, weight_version: str, folder: str) -> None:
        """Bring the weights to the version; from its begin to its end they may be a mix."""

    def resume(self) -> None:
        """Let it go on."""


class Handover(Protocol):
    """What is handed over to the plug-in, as files in a folder of this host; see `sidecar`."""

    folder: str

    def layout(self, version: int) -> str:
        """Return the path of a version's layout."""

    def changes(self, version: int, states: Set[int]) -> str:
        """Return the path of what changes; ChainError, saying why, where weights have to be loaded whole."""

    def sweep(self) -> None:
        """Remove what was handed over."""


class _Owed(msgspec.Struct, frozen=True):
    """An engine that was asked to pause, and not resumed yet. resume: whether it sampled before."""

    url: str
    weight_version: str
    resume: bool


class Engine:
    """The engine at `url` that loads from a folder in switch mode; vllm+http://HOST:PORT or sglang+http://HOST:PORT.

    sidecar: hands versions over to the plug-in; its folder also has what is owed to the engine. kv: `reset` computes
    what running requests have cached again, with the new weights; `keep` lets them go on with what the old weights
    made. draft: what becomes of a draft model for speculative decoding.
    """

    def __init__(
        self,
        url: str,
        sidecar: Handover,
        *,
        kv: Kv,
        draft: Draft | None,
        sleep: Callable[[float], object] = time.sleep,
        driver: Driver | None = None,
    ) -> None:
        self.url, self._note = url, os.path.join(sidecar.folder, "owed.json")
        self._driver = driver or _driver_for(url, kv, draft, sidecar, sleep)

    def reach(self, version: int, weight_version: str, folder: str) -> Loaded:
        """Bring the engine to the version that the folder holds, unless it says that it has it.

        Raises EngineFailed, saying what state the engine was left in.
        """
        driver, owed = self._driver, self._owed()
        mixed = "it is paused, with weights that may be a mix of two versions"
        state = "it goes on with what it had" if owed is None else mixed
        held = self._ask("asking for its version", driver.held, state)
        if owed is None and held == weight_version:
            return Loaded(held, None)
        self._ask("asking what it serves", lambda: driver.require_fit(folder), state)
        resume = not self._ask("asking whether it is paused", driver.paused, state) if owed is None else owed.resume
        self._ask(f"staging version {version}", lambda: driver.stage(version), state)

        self._owe(_Owed(self.url, weight_version, resume))
        began = time.perf_counter()
        if owed is None:
            state = f"it may stand still, with weights {held} as before"
        self._ask("pausing it", driver.pause, state)
        self._ask(f"loading version {version}", lambda: driver.load(version, weight_version, folder), mixed)
        found = self._ask("asking for its version", driver.held, mixed)
        if found != weight_version:
            raise EngineFailed(
                f"{self.url}: asking for its version: {found} after loading {weight_version}; {mixed}; "
                "the next poll loads it again"
            )
        if resume:
            self._ask("resuming it", driver.resume, f"it may stand still, with version {version} whole")
        pause_ms = (time.perf_counter() - began) * 1e3
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._note)
        return Loaded(found, pause_ms, driver.how)

    def _ask(self, what: str, call: Callable[[], T], state: str) -> T:
        try:
            return call()
        except ConfigError as exc:
            raise ConfigError(f"{self.url}: {exc}") from exc
        except EngineFailed as exc:
            raise EngineFailed(f"{self.url}: {what}: {exc}; {state}; the next poll tries again") from exc

    def _owed(self) -> _Owed | None:
        try:
            with open(self._note, "rb") as file:
                owed = decode(file.read(), _Owed, self._note)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise store_error(exc, f"reading {self._note}") from exc
        # Another engine's: whoever named this one has taken that one away.
        return owed if owed.url == self.url else None

    def _owe(self, owed: _Owed) -> None:
        # Not durable: it must outlive this process, and a machine that goes down takes the engine with it.
        beside = f"{self._note}.{os.getpid()}.tmp"
        try:
            os.makedirs(os.path.dirname(self._note), exist_ok=True)
            with open(beside, "wb") as file:
                file.write(msgspec.json.encode(owed))
            os.replace(beside, self._note)
        except OSError as exc:
            raise store_error(exc, f"writing {self._note}") from exc


# ---------------------------------------------------------------- HTTP


class _Http:
    """Requests to one server; each on a connection of its own, since the engine may be restarted between two."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    def ask(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = _READ_S
    ) -> dict[str, object]:
        """Return the JSON object that a request is answered with. Raises EngineFailed; _Refused for other answers."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        headers = {} if body is None else {"Content-Type": "application/json"}
        what = f"{method} {path.partition('?')[0]}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            raw = response.read(_MAX_BODY)
        except (OSError, http.client.HTTPException) as exc:
            reason = "no answer in time" if isinstance(exc, TimeoutError) else str(exc) or type(exc).__name__
            raise EngineFailed(f"{what}: {reason}") from exc
        finally:
            connection.close()
        if response.status != 200:
            text = " ".join(raw[:300].decode("utf-8", "replace").split())
            raise _Refused(f"{what} was answered with {response.status} {text}", response.status)
        try:
            found = json.loads(raw) if raw.strip() else {}
        except ValueError:
            found = {}  # SGLang answers some requests with words
        return found if isinstance(found, dict) else {}


def _text(answer: Mapping[str, object], name: str) -> str:
    found = answer.get(name)
    if not isinstance(found, str):
        raise EngineFailed(f"no {name} in the answer")
    return found


def _driver_for(url: str, kv: Kv, draft: Draft | None, sidecar: Handover, sleep: Callable[[float], object]) -> Driver:
    usage = "expected vllm+http://HOST:PORT or sglang+http://HOST:PORT"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise ConfigError(f"engine {url!r}: {exc}; {usage}") from exc
    if not host or not port or parts.path not in ("", "/") or parts.query or parts.username:
        raise ConfigError(f"engine {url!r}: {usage}")
    client = _Http(host, port)
    if parts.scheme == "vllm+http":
        return Vllm(client, kv, draft, sidecar, sleep)
    if parts.scheme == "sglang+http":
        return Sglang(client, kv, draft, sleep)
    raise ConfigError(f"engine {url!r}: {usage}")


def _require_draft(draft: Draft | None, found: str | None, follows: bool) -> None:
    """Refuse a draft model about which nothing was said, and one that shall follow and cannot. found: its name."""
    if found is not None and draft is None:
        raise ConfigError(f"the engine has a draft model ({found}), which would go stale; say --draft none to let it")
    if draft == "follow" and found is None:
        raise ConfigError("the engine has no draft model that could follow; leave --draft out")
    if draft == "follow" and not follows:
        raise ConfigError(f"the draft model ({found}) cannot be updated by this route; say --draft none to let it stay")


# ---------------------------------------------------------------- vLLM


@dataclass(frozen=True)
class _Report:
    """What a worker has to say: see `deltackpt.vllm`. weights: state fingerprint of what it holds, if it can go on."""

    state: str
    text: str
    weights: int | None


class Vllm:
    """vLLM 0.28 and newer with VLLM_SERVER_DEV_MODE=1.

    With `--weight-transfer-config '{"backend": "deltackpt"}'` every worker maps what the sidecar hands over: staged
    while it samples, applied in place; where it has no plan it loads the folder, and says why. Else it loads the folder
    by vLLM's own reload.
    """

    def __init__(
        self, client: _Http, kv: Kv, draft: Draft | None, sidecar: Handover, sleep: Callable[[float], object]
    ) -> None:
        self._client, self._kv, self._draft, self._sidecar, self._sleep = client, kv, draft, sidecar, sleep
        self._plugged = False
        self._token = ""
        self._why_whole: str | None = None
        self.how = ""

    def require_fit(self, folder: str) -> None:
        """See Driver."""
        config = self._client.ask("GET", "/server_info?config_format=json", timeout_s=_WORK_S).get("vllm_config")
        if not isinstance(config, dict):
            raise EngineFailed("GET /server_info has no vllm_config in JSON")
        if config.get("lora_config") is not None:
            raise ConfigError("the engine serves LoRA adapters, which belong to the weights before; start it without")
        speculative = config.get("speculative_config")
        found = None
        if isinstance(speculative, dict) and speculative.get("draft_model_config") is not None:
            found = str(speculative.get("model") or speculative.get("method"))
        _require_draft(self._draft, found, follows=False)
        transfer = config.get("weight_transfer_config")
        self._plugged = isinstance(transfer, dict) and transfer.get("backend") == "deltackpt"
        if not self._plugged and config.get("device_config") == {"device": "cpu"}:
            _require_no_experts(folder)

    def held(self) -> str:
        """See Driver."""
        try:
            return _text(self._client.ask("GET", "/weight_info"), "weight_version")
        except _Refused as exc:
            if exc.status == 404:
                raise ConfigError(
                    "vLLM has no /weight_info; start it (0.28 or newer) with VLLM_SERVER_DEV_MODE=1"
                ) from exc
            raise

    def paused(self) -> bool:
        """See Driver."""
        return self._client.ask("GET", "/is_paused").get("is_paused") is True

    def stage(self, version: int) -> None:
        """See Driver. Without the plug-in nothing: all of it is the load."""
        if not self._plugged:
            return
        self._token = token = secrets.token_hex(8)
        init = {"layout": self._sidecar.layout(version), "folder": self._sidecar.folder, "token": token}
        self._client.ask("POST", "/init_weight_transfer_engine", {"init_info": init}, timeout_s=_PLAN_S)
        workers = self._client.ask("GET", "/get_world_size").get("world_size")
        if not isinstance(workers, int):
            raise EngineFailed("GET /get_world_size has no world_size")
        planned = [self._report(rank, "planned", "refused") for rank in range(workers)]
        self._why_whole = next((r.text for r in planned if r.weights is None), None)
        if self._why_whole is not None:
            return
        try:
            path = self._sidecar.changes(version, {r.weights for r in planned if r.weights is not None})
        except ChainError as exc:
            self._why_whole = str(exc)
            return
        try:
            # A session of its own, ended at once: the stage goes on in a thread.
            self._start()
            self._update({"stage": path, "token": token})
            self._client.ask("POST", "/finish_weight_update", {}, timeout_s=_WORK_S)
            staged = [self._report(rank, "staged", "reload", "failed") for rank in range(workers)]
        finally:
            self._sidecar.sweep()
        if failed := [r.text for r in staged if r.state == "failed"]:
            raise EngineFailed(failed[0])
        self._why_whole = next((r.text for r in staged if r.state == "reload"), None)

    def _start(self) -> None:
        try:
            self._client.ask("POST", "/start_weight_update", {}, timeout_s=_WORK_S)
        except _Refused:
            # Left open by a watcher that was killed; ending it touches no weights.
            with contextlib.suppress(_Refused):
                self._client.ask("POST", "/finish_weight_update", {}, timeout_s=_WORK_S)
            self._client.ask("POST", "/start_weight_update", {}, timeout_s=_WORK_S)

    def _update(self, info: dict[str, object]) -> None:
        self._client.ask("POST", "/update_weights", {"update_info": info}, timeout_s=_WORK_S)

    def _report(self, rank: int, *states: str) -> _Report:
        """Wait until a worker is in one of these states."""
        path = os.path.join(self._sidecar.folder, f"worker-{rank}.json")
        for _ in range(int(_WORK_S / _LOOK_S)):
            with contextlib.suppress(FileNotFoundError, ValueError), open(path, encoding="utf-8") as file:
                found = json.load(file)
                if found["token"] == self._token and found["state"] in states:
                    weights = found["weights"]
                    return _Report(found["state"], found["text"], None if weights is None else int(weights, 16))
            self._sleep(_LOOK_S)
        raise EngineFailed(
            f"worker {rank} has not {states[0]} within {_WORK_S:.0f} s, or does not share {path} with us"
        )

    def pause(self) -> None:
        """See Driver. Requests stay queued, with what they have made so far."""
        self._client.ask("POST", "/pause?" + urlencode({"mode": "keep", "clear_cache": "false"}), timeout_s=_WORK_S)

    def load(self, version: int, weight_version: str, folder: str) -> None:
        """See Driver."""
        if not self._plugged:
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}, "timeout": _WORK_S}
            self._client.ask("POST", "/collective_rpc", body, timeout_s=_WORK_S + _READ_S)
            self._reset_kv()
            self._client.ask("POST", "/update_weight_version", {"new_version": weight_version})
            self.how = "loaded whole, by vLLM's reload"
            return
        self._start()
        self._update({"apply": self._token} if self._why_whole is None else {"path": folder})
        self._reset_kv()
        self._client.ask("POST", "/finish_weight_update", {"weight_version": weight_version}, timeout_s=_WORK_S)
        self.how = "applied in place" if self._why_whole is None else f"loaded whole: {self._why_whole}"

    def _reset_kv(self) -> None:
        if self._kv == "reset":
            answer = self._client.ask("POST", "/reset_prefix_cache?reset_running_requests=true", timeout_s=_WORK_S)
            if answer.get("success") is not True:
                raise EngineFailed("POST /reset_prefix_cache: blocks are still held")

    def resume(self) -> None:
        """See Driver."""
        self._client.ask("POST", "/resume", timeout_s=_WORK_S)


def _require_no_experts(folder: str) -> None:
    """Refuse what vLLM 0.32.0 loads wrongly: a CPU's kernel for experts packs them once, when it is built, and a later
    load of the same engine leaves them as they are in the checkpoint.
    """
    name = next((n for n in open_folder(folder).checkpoint.layout.names if ".experts." in n), None)
    if name is not None:
        raise ConfigError(
            f"vLLM on a CPU does not pack experts ({name}) when it reloads, and would give wrong tokens; start it with "
            '--weight-transfer-config \'{"backend": "deltackpt"}\', which does'
        )


# ---------------------------------------------------------------- SGLang


class Sglang:
    """SGLang: pause, flush, /update_weights_from_disk, continue. It does not say whether somebody has paused it."""

    def __init__(self, client: _Http, kv: Kv, draft: Draft | None, sleep: Callable[[float], object]) -> None:
        self._client, self._kv, self._draft, self._sleep = client, kv, draft, sleep
        self.how = "loaded whole, from disk"

    def require_fit(self, folder: str) -> None:
        """See Driver."""
        server = self._client.ask("GET", "/server_info")
        if server.get("enable_lora") or server.get("lora_paths"):
            raise ConfigError("the engine serves LoRA adapters, which belong to the weights before; start it without")
        draft = server.get("speculative_draft_model_path")
        _require_draft(self._draft, draft if isinstance(draft, str) else None, follows=False)

    def held(self) -> str:
        """See Driver."""
        try:
            return _text(self._client.ask("GET", "/model_info"), "weight_version")
        except _Refused as exc:
            if exc.status == 404:
                raise ConfigError("SGLang has no /model_info; use a newer one") from exc
            raise

    def paused(self) -> bool:
        """No: it cannot be asked."""
        return False

    def stage(self, version: int) -> None:
        """Nothing: all of it is the load."""

    def pause(self) -> None:
        """See Driver. Only retracted requests give their cached tokens back, which a flush needs."""
        mode = "retract" if self._kv == "reset" else "in_place"
        self._client.ask("POST", "/pause_generation", {"mode": mode}, timeout_s=_WORK_S)

    def load(self, version: int, weight_version: str, folder: str) -> None:
        """See Driver."""
        if self._kv == "reset":
            self._flush()
        body = {
            "model_path": folder, "weight_version": weight_version, "flush_cache": self._kv == "reset",
            "abort_all_requests": False,
        }  # fmt: skip
        answer = self._client.ask("POST", "/update_weights_from_disk", body, timeout_s=_WORK_S)
        if answer.get("success") is not True:
            raise EngineFailed(f"POST /update_weights_from_disk: {answer.get('message')}")

    def _flush(self) -> None:
        for attempt in range(_FLUSHES):
            try:
                self._client.ask("GET", "/flush_cache")
                return
            except _Refused as exc:
                if exc.status != 400 or attempt == _FLUSHES - 1:
                    raise
            self._sleep(1.0)

    def resume(self) -> None:
        """See Driver."""
        self._client.ask("POST", "/continue_generation", {}, timeout_s=_WORK_S)
