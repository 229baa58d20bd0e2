"""A fast read-only HTTP server for a folder, on the loopback device: nginx, or one of our own where there is none.

It answers what S3 clients ask of objects without a signature (HEAD, GET, ranges), lists nothing and notes each request.
"""

from __future__ import annotations

import contextlib
import getpass
import grp
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from weed import free_ports, running

NGINX = """
user {user} {group};
worker_processes 2;
pid {work}/nginx.pid;
error_log stderr error;
events {{ worker_connections 1024; }}
http {{
    log_format line '$request_method $request_uri $status';
    access_log {work}/requests.log line;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000;
    client_body_temp_path {work}/t1; proxy_temp_path {work}/t2; fastcgi_temp_path {work}/t3;
    uwsgi_temp_path {work}/t4; scgi_temp_path {work}/t5;
    server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@dataclass(frozen=True)
class Server:
    """A running server. requests_log: one line for each request, "GET /path 206"."""

    name: str
    endpoint: str
    requests_log: Path

    def requests(self) -> list[str]:
        """Return what was asked so far, as lines; the server may be a moment behind."""
        time.sleep(0.1)
        return self.requests_log.read_text().splitlines()


@contextlib.contextmanager
def serving(root: Path, work: Path) -> Iterator[Server]:
    """Serve a folder until the end of the block; `work` takes settings and logs."""
    (port,) = free_ports(1)
    endpoint, log = f"http://127.0.0.1:{port}", work / "requests.log"
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if nginx is not None:
        group = grp.getgrgid(os.getgid()).gr_name
        settings = NGINX.format(user=getpass.getuser(), group=group, work=work, port=port, root=root)
        (work / "nginx.conf").write_text(settings)
        command = [nginx, "-p", str(work), "-e", "stderr", "-c", str(work / "nginx.conf"), "-g", "daemon off;"]
    else:
        command = [sys.executable, __file__, str(root), str(port), str(log)]
    # By a signal that lets nginx end its workers.
    with running(command, endpoint, work, stop=signal.SIGTERM):
        yield Server("nginx" if nginx else "Python's http.server with sendfile", endpoint, log)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root, log = "", -1

    def log_request(self, code: object = "-", size: object = "-") -> None:
        os.write(self.log, f"{self.command} {self.path} {int(str(code))}\n".encode())

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        try:
            file = open(self.root + self.path.partition("?")[0], "rb")  # noqa: SIM115  # closed below
        except OSError:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        with file:
            nbytes = os.fstat(file.fileno()).st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            begin, end = (int(asked[1]), min(int(asked[2]) + 1, nbytes)) if asked else (0, nbytes)
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{nbytes}")
            self.send_header("Content-Length", str(end - begin))
            self.send_header("Last-Modified", self.date_time_string(os.fstat(file.fileno()).st_mtime))
            self.send_header("ETag", f'"{nbytes:x}"')
            self.end_headers()
            while body and begin < end:
                begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)


def main() -> None:
    """Run the server of our own: folder, port, log."""
    _Handler.root = sys.argv[1]
    _Handler.log = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), _Handler).serve_forever()


if __name__ == "__main__":
    main()
