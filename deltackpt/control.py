"""HTTP beside a watcher: its state, its metrics, and orders from this host. Never reads or writes weights.

Orders are taken on a loopback address or a Unix socket only; what all interfaces serve can be read and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import ipaddress
import json
import os
import socket
import socketserver
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from deltackpt.errors import Busy, ConfigError, FormatError
from deltackpt.manifest import Version, decode
from deltackpt.watch import SILENT_S, State, Watcher

_MAX_BODY = 64 << 10
_IDLE_S = 10.0
"""A client that sends nothing for so long is hung up on: it holds a thread."""


@dataclass(frozen=True)
class Answer:
    """What a request is answered with."""

    status: HTTPStatus
    body: bytes
    kind: str = "application/json"


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Version | None


def answer(watcher: Watcher, method: str, path: str, body: bytes, *, orders: bool) -> Answer:
    """Answer one request. orders: whether POST is allowed here."""
    path = path.partition("?")[0]
    reads: dict[str, Callable[[], Answer]] = {
        "/state": lambda: Answer(HTTPStatus.OK, msgspec.json.encode(watcher.state) + b"\n"),
        "/metrics": lambda: Answer(HTTPStatus.OK, metrics(watcher.state).encode(), "text/plain; version=0.0.4"),
        "/healthz": lambda: _health(watcher),
        "/readyz": lambda: _readiness(watcher.state),
    }
    writes = {"/apply": lambda: _apply(watcher, body), "/wake": lambda: _wake(watcher)} if orders else {}
    if method == "GET" and path in reads:
        return reads[path]()
    if method == "POST" and path in writes:
        return writes[path]()
    if path in reads or path in writes:
        expected = "GET" if path in reads else "POST"
        return _error(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} {path}: expected {expected}")
    known = " ".join([*reads, *writes])
    return _error(HTTPStatus.NOT_FOUND, f"{path} is not served here; expected one of {known}")


def _error(status: HTTPStatus, message: str) -> Answer:
    return Answer(status, json.dumps({"error": message}).encode() + b"\n")


def _health(watcher: Watcher) -> Answer:
    silent = watcher.silent_s
    body = json.dumps({"silent_s": round(silent, 3), "last_error": watcher.state.last_error}).encode() + b"\n"
    return Answer(HTTPStatus.OK if silent < SILENT_S else HTTPStatus.SERVICE_UNAVAILABLE, body)


def _readiness(state: State) -> Answer:
    body = json.dumps({"applied": state.applied, "last_error": state.last_error}).encode() + b"\n"
    return Answer(HTTPStatus.SERVICE_UNAVAILABLE if state.applied is None else HTTPStatus.OK, body)


def _apply(watcher: Watcher, body: bytes) -> Answer:
    try:
        order = decode(body, _Order, "the body")
    except FormatError as exc:
        return _error(HTTPStatus.BAD_REQUEST, f'{exc}; expected {{"version": n}}, or null to end an order')
    watcher.order(order.version)
    return Answer(HTTPStatus.ACCEPTED, json.dumps({"ordered": order.version}).encode() + b"\n")


def _wake(watcher: Watcher) -> Answer:
    watcher.wake()
    return Answer(HTTPStatus.ACCEPTED, b"{}\n")


_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("applied_version", "applied", "Version that the folder holds."),
    ("goal_version", "goal", "Version that it shall hold."),
    ("head_version", "head", "Newest version seen in the store."),
    ("staged_version", "staged", "Version that is staged, or being staged."),
    ("poll_timestamp_seconds", "poll_time", "When the last poll began."),
    ("applied_timestamp_seconds", "applied_time", "When the last apply ended."),
    ("error_timestamp_seconds", "error_time", "When a poll last failed."),
    ("start_timestamp_seconds", "since", "When the watcher was started."),
    ("stage_ms", "stage_ms", "Fetching and decoding of the last applied version."),
    ("apply_ms", "apply_ms", "The last apply."),
    ("pause_ms", "pause_ms", "How long the engine stood still for the last load."),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("polls_total", "polls", "Polls begun."),
    ("failures_total", "failures", "Polls that failed."),
    ("applies_total", "applies", "Versions applied."),
    ("hook_failures_total", "hook_failures", "Runs of the hook that failed."),
    ("bytes_fetched_total", "bytes_fetched", "Bytes fetched for applied versions."),
    ("stage_ms_total", "stage_ms_total", "Time of all stages."),
    ("apply_ms_total", "apply_ms_total", "Time of all applies."),
)


def metrics(state: State) -> str:
    """Write a state in the text format of Prometheus; what is not known is left out."""
    lines = []
    for kind, table in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for name, field, words in table:
            value = getattr(state, field)
            if value is not None:
                name = f"deltackpt_{name}"
                lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}", f"{name} {value}"]
    for name, true, words in (
        ("ready", state.applied is not None, "Whether a version is applied."),
        ("failing", state.last_error is not None, "Whether the last poll failed, or a version cannot be had."),
        ("hook_owed", state.hook_owed is not None, "Whether the hook has to run again."),
    ):
        lines += [f"# HELP deltackpt_{name} {words}", f"# TYPE deltackpt_{name} gauge", f"deltackpt_{name} {int(true)}"]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- servers


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _IDLE_S
    server: _Tcp | _Unix

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit() and int(length) <= _MAX_BODY):
            self._send(_error(HTTPStatus.BAD_REQUEST, f"Content-Length {length!r}: expected at most {_MAX_BODY}"))
            return
        self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        server = self.server
        self._send(answer(server.watcher, self.command, self.path, body, orders=server.orders))

    def _send(self, found: Answer) -> None:
        self.send_response(found.status)
        self.send_header("Content-Type", found.kind)
        self.send_header("Content-Length", str(len(found.body)))
        self.end_headers()
        self.wfile.write(found.body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: probes come every second."""


class _Quiet(socketserver.ThreadingMixIn):
    daemon_threads = True
    block_on_close = False
    watcher: Watcher
    orders: bool

    def handle_error(self, request: object, client_address: object) -> None:
        """Forget a client that hung up; an error of one request is no matter to the watcher."""


class _Tcp(_Quiet, socketserver.TCPServer):
    allow_reuse_address = True


class _Tcp6(_Tcp):
    address_family = socket.AF_INET6


class _Unix(_Quiet, socketserver.UnixStreamServer):
    pass


@contextlib.contextmanager
def serve_control(watcher: Watcher, address: str) -> Iterator[str]:
    """Serve state and orders at 127.0.0.1:PORT, [::1]:PORT or unix:PATH; yields the address with the real port."""
    if address.startswith("unix:"):
        with _unix(watcher, address.removeprefix("unix:")):
            yield address
        return
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or not _loopback(host):
        raise ConfigError(f"control address {address!r}: expected 127.0.0.1:PORT, [::1]:PORT or unix:PATH")
    with _tcp(watcher, "127.0.0.1" if host == "localhost" else host, int(port), orders=True) as bound:
        yield f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"


@contextlib.contextmanager
def serve_metrics(watcher: Watcher, port: int) -> Iterator[int]:
    """Serve state and metrics, no orders, on all interfaces; yields the real port."""
    with _tcp(watcher, "0.0.0.0", port, orders=False) as bound:
        yield bound


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _tcp(watcher: Watcher, host: str, port: int, *, orders: bool) -> Iterator[int]:
    try:
        server = (_Tcp6 if ":" in host else _Tcp)((host, port), _Handler)
    except OSError as exc:
        raise _cannot_listen(f"{host}:{port}", exc) from exc
    with _running(server, watcher, orders):
        yield int(server.server_address[1])


@contextlib.contextmanager
def _unix(watcher: Watcher, path: str) -> Iterator[None]:
    try:
        _remove_dead(path)
        server = _Unix(path, _Handler)
        os.chmod(path, 0o600)
    except OSError as exc:
        raise _cannot_listen(path, exc) from exc
    try:
        with _running(server, watcher, True):
            yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _cannot_listen(where: str, exc: OSError) -> ConfigError | Busy:
    if exc.errno == errno.EADDRINUSE:
        return Busy(f"{where} is served by another process; name another address")
    return ConfigError(f"{where} cannot be listened on: {exc.strerror or exc}; name another address")


def _remove_dead(path: str) -> None:
    """Remove a socket that nobody listens on."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is no socket; name another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


@contextlib.contextmanager
def _running(server: _Tcp | _Unix, watcher: Watcher, orders: bool) -> Iterator[None]:
    server.watcher, server.orders = watcher, orders
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, name="control", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
