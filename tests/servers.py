"""S3 servers on this host for the tests, and a proxy that breaks what passes it. Nothing leaves the loopback device."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

# Shared with the demo and the bench.
sys.path.append(str(Path(__file__).parent.parent / "scripts"))
import weed
from weed import BUCKET, ENVIRONMENT, KEY, READY_S, SECRET

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

__all__ = ["BUCKET", "ENVIRONMENT", "Fault", "Proxy", "Server", "moto", "proxy", "rclone", "seaweedfs"]


@dataclass(frozen=True)
class Server:
    """A running S3 server. name: what it is; endpoint: its URL; unsafe: it ignores conditional writes."""

    name: str
    endpoint: str
    unsafe: bool = False

    def client(self) -> Any:  # boto3 has no types
        """Return a plain client, for what the package itself never does."""
        return weed.client(self.endpoint)

    def make_bucket(self, name: str = BUCKET) -> str:
        """Make a bucket and return its name."""
        weed.make_bucket(self.endpoint, name)
        return name


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[Server]:
    """Run SeaweedFS: a real S3 server whose conditional writes are atomic."""
    with weed.seaweedfs(folder) as endpoint:
        yield Server("seaweedfs", endpoint)


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """Run `rclone serve s3`: it answers 200 to a conditional write, and overwrites."""
    (folder / "data" / BUCKET).mkdir(parents=True)
    (port,) = weed.free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    arguments = [
        "rclone", "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}",
        "--vfs-cache-mode", "off", "--config", os.devnull, str(folder / "data"),
    ]  # fmt: skip
    with weed.running(arguments, endpoint, folder):
        yield Server("rclone", endpoint, unsafe=True)


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """Run moto: a mock in this process that starts at once.

    Its own threads share dictionaries without a lock: two exclusive creates could both win, and a listing could fail.
    Here it answers one request at a time.
    """
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        assert server._server is not None
        application, lock = server._server.app, threading.Lock()

        def one_at_a_time(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
            with lock:
                return list(application(environ, start_response))

        server._server.app = one_at_a_time
        host, port = server.get_host_and_port()
        found = Server("moto", f"http://{host}:{port}")
        found.make_bucket()
        yield found
    finally:
        server.stop()


# ---------------------------------------------------------------- faults

Fault = Literal["", "busy", "denied", "expired", "refuse", "reset", "lost", "truncate", "splice", "delay"]
"""What happens to a request.

busy: 503 SlowDown; denied: 403; expired: 400 ExpiredToken; refuse: closed and reset: closed hard, all before the server
has seen it. lost: the server does it, and the connection closes without a reply. truncate: half of the body arrives.
splice: the second half of the body is another one's. delay: the reply comes late.
"""

_ERRORS: Mapping[str, tuple[int, str]] = {
    "busy": (503, "SlowDown"),
    "denied": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
}


@dataclass
class Proxy:
    """A proxy before an S3 server. choose: which fault meets a request, by its number from 1 on and its first line."""

    server: Server
    choose: Callable[[int, str], Fault] = lambda _number, _line: ""
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)
    replies: list[int] = field(default_factory=list)
    delay_s: float = 0.3

    def reset(self, choose: Callable[[int, str], Fault] | None = None) -> None:
        """Count from one again."""
        self.requests.clear()
        self.replies.clear()
        self.choose = choose or (lambda _number, _line: "")

    def open(self) -> Server:
        """Return the server as it is seen through the proxy."""
        return Server(self.server.name, self.endpoint, self.server.unsafe)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        line, fields = _parse(head)
        if fields.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        self.requests.append(line.rpartition(" ")[0])
        fault = self.choose(len(self.requests), self.requests[-1])
        if fault in ("refuse", "reset"):
            return _close(writer, hard=fault == "reset")
        if fault in _ERRORS:
            status, code = _ERRORS[fault]
            text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            body = b"" if line.startswith("HEAD") else text
            lines = (f"HTTP/1.1 {status} {code}", "Content-Type: application/xml", f"Content-Length: {len(body)}")
            writer.write("\r\n".join((*lines, "", "")).encode() + body)
            await writer.drain()
            return True
        status, answer_head, answer = await self._forward(line, head, body)
        if fault == "lost":
            return _close(writer)
        if fault == "delay":
            await asyncio.sleep(self.delay_s)
        half = len(answer) // 2
        if fault == "splice" and answer:
            answer = answer[:half] + bytes(b ^ 0x55 for b in answer[half:])
        writer.write(answer_head + (answer[:half] if fault == "truncate" else answer))
        await writer.drain()
        self.replies.append(status)
        return _close(writer) if fault == "truncate" else True

    async def _forward(self, line: str, head: bytes, body: bytes) -> tuple[int, bytes, bytes]:
        host, _, port = self.server.endpoint.removeprefix("http://").partition(":")
        upstream, out = await asyncio.open_connection(host, int(port))
        try:
            return await self._answer(upstream, out, line, head, body)
        finally:
            # Also when this connection is given up: a writer that is left open is closed by its destructor, which
            # fails once the loop has ended.
            out.transport.abort()

    async def _answer(
        self, upstream: asyncio.StreamReader, out: asyncio.StreamWriter, line: str, head: bytes, body: bytes
    ) -> tuple[int, bytes, bytes]:
        drop = (b"connection:", b"expect:")
        kept = [one for one in head.split(b"\r\n") if one and not one.lower().startswith(drop)]
        out.write(b"\r\n".join([*kept, b"Connection: close", b"", b""]) + body)
        await out.drain()
        answer_head = await upstream.readuntil(b"\r\n\r\n")
        while answer_head.startswith(b"HTTP/1.1 100"):
            answer_head = await upstream.readuntil(b"\r\n\r\n")
        status, fields = _parse(answer_head)
        number = int(status.split(" ")[1])
        answer = b""
        if not line.startswith("HEAD") and number not in (204, 304):
            if "content-length" in fields:
                answer = await upstream.readexactly(int(fields["content-length"]))
            elif fields.get("transfer-encoding", "").lower() == "chunked":
                answer = await _chunks(upstream)
            else:
                answer = await upstream.read()
        plain = (b"connection:", b"transfer-encoding:", b"content-length:")
        lines = [one for one in answer_head.split(b"\r\n") if one and not one.lower().startswith(plain)]
        nbytes = fields.get("content-length", "0") if line.startswith("HEAD") else str(len(answer))
        if number != 204:
            lines.append(f"Content-Length: {nbytes}".encode())
        return number, b"\r\n".join([*lines, b"", b""]), answer


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    line, *rest = head.decode("latin-1").split("\r\n")
    pairs = (one.partition(":") for one in rest if one)
    return line, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = []
    while nbytes := int((await reader.readline()).split(b";")[0], 16):
        found.append(await reader.readexactly(nbytes))
        await reader.readline()
    await reader.readline()
    return b"".join(found)


def _close(writer: asyncio.StreamWriter, *, hard: bool = False) -> bool:
    if hard:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
    return False


@contextlib.contextmanager
def proxy(server: Server) -> Iterator[Proxy]:
    """Run a proxy before a server, in a thread."""
    made = Proxy(server)
    loop = asyncio.new_event_loop()
    ready, tasks = threading.Event(), set[asyncio.Task[None]]()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await made.serve(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()
            tasks.discard(task)

    async def main(stop: asyncio.Event) -> None:
        listener = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 20)
        made.endpoint = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listener.close()
        # A connection that has just come has to reach `accept`, or nobody closes it.
        await asyncio.sleep(0)
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports say goodbye in the next round

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main(stop)), name="fault-proxy")
    thread.start()
    ready.wait(READY_S)
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
