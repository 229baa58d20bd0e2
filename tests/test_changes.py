"""Changes as a file: what comes back, and other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltackpt.changes import Changes, Flips, map_changes, write_changes
from deltackpt.errors import IntegrityError


def changes() -> Changes:
    flips = [Flips(np.empty(0, np.int64), np.empty(0, f"<u{width}")) for width in (1, 4, 8)]
    flips.insert(1, Flips(np.array([3, 9], np.int64), np.array([0x8001, 7], np.uint16)))
    return Changes("ab" * 32, 1 << 63, 5, np.array([0, 1 << 63], np.uint64), tuple(flips))


def test_mapped_changes_are_those_that_were_written_and_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "changes"
    write_changes(changes(), str(path))
    found = map_changes(str(path))
    path.unlink()
    assert (found.layout, found.base, found.state) == ("ab" * 32, 1 << 63, 5)
    assert found.added.tolist() == [0, 1 << 63]
    assert [(one.elements.tolist(), one.bits.tolist()) for one in found.flips] == [
        ([], []), ([3, 9], [0x8001, 7]), ([], []), ([], [])
    ]  # fmt: skip
    assert [one.bits.itemsize for one in found.flips] == [1, 2, 4, 8]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "expected"),
    [(lambda raw: raw[:-8], "it ends early"), (lambda raw: raw[8:], "holds no changes"),
     (lambda raw: raw.replace(b'"level": 1', b'"level": 2'), "was written by another release")],
)  # fmt: skip
def test_file_of_other_bytes_is_refused(what: object, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "changes"
    write_changes(changes(), str(path))
    assert callable(what)
    path.write_bytes(what(path.read_bytes()))
    with pytest.raises(IntegrityError, match=expected):
        map_changes(str(path))
