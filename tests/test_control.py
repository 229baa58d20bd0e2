"""HTTP beside a watcher: what it answers, and to whom."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import make_cases
import pytest
from watching import Script

from deltackpt.control import metrics, serve_control, serve_metrics
from deltackpt.errors import Busy, ConfigError
from deltackpt.publish import publish_folder
from deltackpt.watch import SILENT_S, State, Watcher


@dataclass
class Answered:
    status: int
    kind: str | None
    text: str

    @property
    def fields(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.text)
        return found


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("unix")
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def ask(address: str, method: str, path: str, body: str | None = None, **headers: str) -> Answered:
    """Send one request."""
    connection: http.client.HTTPConnection
    if address.startswith("unix:"):
        connection = UnixConnection(address.removeprefix("unix:"))
    else:
        connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return Answered(response.status, response.getheader("Content-Type"), response.read().decode())
    finally:
        connection.close()


@pytest.fixture
def pace() -> Script:
    return Script()


@pytest.fixture
def watcher(tmp_path: Path, pace: Script) -> Iterator[Watcher]:
    make_cases.chain(tmp_path, 2)
    for version in range(2):
        publish_folder(tmp_path / f"v{version}", tmp_path / "store", step=version, anchors=False)
    made = Watcher(str(tmp_path / "store"), str(tmp_path / "dest"), pace=pace)
    yield made
    made.close()


@pytest.fixture
def control(watcher: Watcher) -> Iterator[str]:
    with serve_control(watcher, "127.0.0.1:0") as address:
        yield address


def test_state_says_what_is_applied_and_what_is_newest(watcher: Watcher, control: str, tmp_path: Path) -> None:
    before = ask(control, "GET", "/state")
    assert (before.status, before.kind, before.fields["applied"], before.fields["head"]) == (
        200, "application/json", None, None
    )  # fmt: skip
    watcher.step()
    after = ask(control, "GET", "/state").fields
    assert {name: after[name] for name in ("applied", "head", "goal", "staged", "channel", "last_error", "dest")} == {
        "applied": 1, "head": 1, "goal": 1, "staged": None, "channel": None, "last_error": None,
        "dest": str(tmp_path / "dest"),
    }  # fmt: skip


def test_order_is_applied_by_the_next_poll(watcher: Watcher, control: str) -> None:
    watcher.step()
    answer = ask(control, "POST", "/apply", '{"version": 0}')
    assert (answer.status, answer.fields) == (202, {"ordered": 0})
    watcher.step()
    found = ask(control, "GET", "/state").fields
    assert (found["applied"], found["ordered"]) == (0, 0)
    assert ask(control, "POST", "/apply", '{"version": null}').fields == {"ordered": None}
    watcher.step()
    assert ask(control, "GET", "/state").fields["applied"] == 1


@pytest.mark.parametrize(
    "body", ["", "0", "{}", "null", '{"version": -1}', '{"version": "1"}', '{"version": 1.5}', '{"version": 1, "x": 2}']
)
def test_order_that_is_none_is_refused_and_changes_nothing(watcher: Watcher, control: str, body: str) -> None:
    watcher.step()
    answer = ask(control, "POST", "/apply", body)
    assert answer.status == 400
    assert answer.text.endswith('expected {\\"version\\": n}, or null to end an order"}\n')
    watcher.step()
    assert (watcher.state.ordered, watcher.state.applied) == (None, 1)


def test_body_without_an_honest_length_is_refused(control: str) -> None:
    for length in ("-1", "x", "1000000000"):
        assert ask(control, "POST", "/apply", None, **{"Content-Length": length}).status == 400


def test_unknown_path_and_wrong_method_name_what_is_expected(control: str) -> None:
    lost = ask(control, "GET", "/nowhere")
    assert (lost.status, lost.fields) == (404, {
        "error": "/nowhere is not served here; "
        "expected one of /state /metrics /healthz /readyz /apply /wake"
    })  # fmt: skip
    assert ask(control, "GET", "/apply").fields == {"error": "GET /apply: expected POST"}
    assert ask(control, "POST", "/state", "{}").status == 405
    assert ask(control, "GET", "/state?x=1").status == 200


def test_readiness_is_an_applied_version(watcher: Watcher, control: str) -> None:
    assert ask(control, "GET", "/readyz").status == 503
    watcher.step()
    assert ask(control, "GET", "/readyz").status == 200


def test_health_ends_without_signs_of_life(watcher: Watcher, control: str, pace: Script) -> None:
    watcher.step()
    assert ask(control, "GET", "/healthz").status == 200
    pace.seconds += SILENT_S
    answer = ask(control, "GET", "/healthz")
    assert (answer.status, answer.fields) == (503, {"silent_s": 900.0, "last_error": None})


def test_metrics_are_read_by_anybody_and_orders_taken_from_nobody(watcher: Watcher) -> None:
    watcher.step()
    with serve_metrics(watcher, 0) as port:
        address = f"127.0.0.1:{port}"
        found = ask(address, "GET", "/metrics")
        assert (found.status, found.kind) == (200, "text/plain; version=0.0.4")
        assert "deltackpt_applied_version 1\n" in found.text
        assert ask(address, "POST", "/apply", '{"version": 0}').status == 404
        assert ask(address, "POST", "/wake", "").status == 404
    watcher.step()
    assert watcher.state.applied == 1


def test_metrics_are_in_the_text_format_and_leave_out_what_is_not_known() -> None:
    state = State(store="s", dest="d", mode="switch", channel=None, since=5.0, applied=7, polls=3, last_error="e")
    lines = metrics(state).splitlines()
    assert lines[:3] == [
        "# HELP deltackpt_applied_version Version that the folder holds.",
        "# TYPE deltackpt_applied_version gauge",
        "deltackpt_applied_version 7",
    ]
    values = dict(line.split(" ") for line in lines if not line.startswith("#"))
    assert values == {
        "deltackpt_applied_version": "7", "deltackpt_start_timestamp_seconds": "5.0", "deltackpt_stage_ms": "0.0",
        "deltackpt_apply_ms": "0.0", "deltackpt_polls_total": "3", "deltackpt_failures_total": "0",
        "deltackpt_applies_total": "0", "deltackpt_hook_failures_total": "0", "deltackpt_bytes_fetched_total": "0",
        "deltackpt_stage_ms_total": "0.0", "deltackpt_apply_ms_total": "0.0", "deltackpt_ready": "1",
        "deltackpt_failing": "1", "deltackpt_hook_owed": "0",
    }  # fmt: skip
    assert len([line for line in lines if line.startswith("# TYPE ")]) == len(values)


def test_unix_socket_is_for_its_owner_and_gone_afterwards(watcher: Watcher, tmp_path: Path) -> None:
    path = tmp_path / "control"
    with serve_control(watcher, f"unix:{path}") as address:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ask(address, "GET", "/state").status == 200
        with pytest.raises(Busy, match="is served by another process"), serve_control(watcher, address):
            pass
        assert ask(address, "POST", "/wake", "").status == 202
    assert not path.exists()


def test_socket_of_a_dead_process_is_taken_over(watcher: Watcher, tmp_path: Path) -> None:
    path = tmp_path / "control"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serve_control(watcher, f"unix:{path}") as address:
        assert ask(address, "GET", "/state").status == 200


def test_file_in_the_place_of_a_socket_is_left_alone(watcher: Watcher, tmp_path: Path) -> None:
    path = tmp_path / "control"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"), serve_control(watcher, f"unix:{path}"):
        pass
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "address", ["", "0.0.0.0:80", "10.0.0.1:80", "example.com:80", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", ":80"]
)
def test_orders_are_taken_on_this_host_only(watcher: Watcher, address: str) -> None:
    expected = r"expected 127\.0\.0\.1:PORT, \[::1\]:PORT or unix:PATH$"
    with pytest.raises(ConfigError, match=expected), serve_control(watcher, address):
        pass


def test_port_that_is_taken_is_busy(watcher: Watcher, control: str) -> None:
    expected = "is served by another process; name another address"
    with pytest.raises(Busy, match=expected), serve_control(watcher, control):
        pass


def test_client_that_hangs_up_is_no_matter(watcher: Watcher, control: str) -> None:
    host, port = control.split(":")
    for sent in (b"", b"GET /sta", b"POST /apply HTTP/1.0\r\nContent-Length: 5\r\n\r\n{"):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(sent)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert ask(control, "GET", "/state").status == 200
    assert watcher.state.ordered is None


def test_descriptors_do_not_pile_up(watcher: Watcher, control: str) -> None:
    ask(control, "GET", "/state")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        ask(control, "GET", "/state")
    assert len(os.listdir("/proc/self/fd")) <= before + 2
