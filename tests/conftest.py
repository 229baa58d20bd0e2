"""Fixtures of all tests: nothing leaves the test's own folder."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import make_cases
import processes
import pytest
import servers
from hypothesis import settings

# Shared and slow machines: a time limit per example would fail at random.
settings.register_profile("deltackpt", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("deltackpt")


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Let nobody wait for a disk: processes die in these tests, machines do not. It is still called and counted."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", processes.fsync)
        yield


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the package's state folder away from the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture
def cases(tmp_path: Path) -> Callable[[str], Path]:
    """Build one of the real-world failure cases by name and return its folder."""

    def build(name: str) -> Path:
        make_cases.build(make_cases.CASES, tmp_path, [name])
        return tmp_path / name

    return build


# ---------------------------------------------------------------- S3 servers, started when the first test needs them


@pytest.fixture(scope="session")
def s3_described() -> Iterator[None]:
    """Let boto3 and s3fs read what S3's requests look like once, not for every client: it took most of their time."""
    import botocore.session

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


def _server(
    start: Callable[[Path], contextlib.AbstractContextManager[servers.Server]], factory: pytest.TempPathFactory
) -> Iterator[servers.Server]:
    with start(factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory, s3_described: None) -> Iterator[servers.Server]:
    """SeaweedFS: a real S3 server."""
    yield from _server(servers.seaweedfs, tmp_path_factory)


@pytest.fixture(scope="session")
def moto(s3_described: None) -> Iterator[servers.Server]:
    """moto: a mock of S3."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory, s3_described: None) -> Iterator[servers.Server]:
    """A server that ignores conditional writes."""
    yield from _server(servers.rclone, tmp_path_factory)
