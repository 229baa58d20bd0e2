"""Fixtures of all tests: nothing leaves the test's own folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import make_cases
import pytest
from hypothesis import settings

# Shared and slow machines: a time limit per example would fail at random.
settings.register_profile("deltackpt", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("deltackpt")


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
