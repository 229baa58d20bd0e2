"""Servers on the loopback device for the tests, the demo and the bench; SeaweedFS (`weed mini`) as the S3 server.

Each is started on free ports and stopped by its own process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

KEY, SECRET, BUCKET = "testkey", "testsecret123", "bucket"
READY_S = 60.0

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    # Nothing of the user's, and no look-up of an instance's role.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What a client needs, but for AWS_ENDPOINT_URL."""


class NotStarted(Exception):
    """A server is not installed or did not come up."""


def client(endpoint: str) -> Any:  # boto3 has no types
    """Return a plain S3 client, for what the package itself never does."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(
            max_pool_connections=16,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )


def make_bucket(endpoint: str, name: str = BUCKET) -> None:
    """Make a bucket."""
    with contextlib.closing(client(endpoint)) as made:
        made.create_bucket(Bucket=name)


def program(name: str) -> str:
    """Return a program that pip has put beside this Python, or one on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise NotStarted(f"{name} is not installed; see the dev extra of pyproject.toml")
    return found


def _free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Return ports below those that the system hands out by itself; each is free, and so is the one 10000 above."""
    found: list[int] = []
    chooser = random.Random(os.urandom(8))
    while len(found) < count:
        port = chooser.randrange(11000, 22000)
        if port not in found and _free(port) and _free(port + 10000):
            found.append(port)
    return found


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=5).close()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code < 500
    except OSError:
        return False
    return True


def _wait(process: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    """Wait until a server answers anything at all."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        if _answers(endpoint):
            return
        time.sleep(0.05)
    said = log.read_text(errors="replace").strip().rpartition("\n")[2][-500:]
    raise NotStarted(f"the server at {endpoint} did not start: {said}")


@contextlib.contextmanager
def running(arguments: Sequence[str], endpoint: str, folder: Path, *, stop: int = signal.SIGKILL) -> Iterator[None]:
    """Run a server until the end of the block. stop: the signal that ends it; hard, as there is nothing to keep."""
    log = folder / "server.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [program(arguments[0]), *arguments[1:]],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, "HOME": str(folder)},
            # Ctrl-C is for those that use it, which then end it.
            start_new_session=True,
        )  # fmt: skip
    try:
        _wait(process, endpoint, log)
        yield
    finally:
        process.send_signal(stop)
        try:
            process.wait(READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _weed(folder: Path, s3: int) -> list[str]:
    """Return the command of a SeaweedFS with all data and settings in a folder."""
    (folder / "data").mkdir(parents=True)
    identity = {
        "name": "test",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, admin = free_ports(4)
    return [
        "weed", "mini", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
        f"-admin.port={admin}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}",
        "-webdav=false", "-s3.autoCreateBucket=false", "-admin.ui=false", "-master.telemetry=false",
    ]  # fmt: skip


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """Run SeaweedFS, a real S3 server whose conditional writes are atomic, with one bucket; yields its endpoint."""
    for attempt in range(3):
        (s3,) = free_ports(1)
        endpoint, where = f"http://127.0.0.1:{s3}", folder / str(attempt)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(running(_weed(where, s3), endpoint, where))
                make_bucket(endpoint)
            except Exception:
                # Another process may have taken a port since.
                if attempt == 2:
                    raise
                continue
            yield endpoint
            return


@contextlib.contextmanager
def environment(endpoint: str, state: Path) -> Iterator[None]:
    """Let this process and its children reach the server by the usual AWS environment, and keep no state elsewhere."""
    added = {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint, "XDG_STATE_HOME": str(state)}
    # The user's own settings would be preferred.
    others = ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_PROFILE", "AWS_SESSION_TOKEN", "DELTACKPT_STORAGE_OPTION")
    before = {name: os.environ.get(name) for name in (*added, *others)}
    for name in others:
        os.environ.pop(name, None)
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
