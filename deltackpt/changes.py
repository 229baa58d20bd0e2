"""Changes: what brings a checkpoint's weights from one state to another, as flips of single elements; and as a file.

The file is how a sidecar hands a version over to the engines of its host: written once, mapped by every worker. It is
no stored format: both ends are of one release. Needs numpy alone, as what runs in an engine must.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.digest import U64
from deltackpt.errors import IntegrityError
from deltackpt.layout import I64
from deltackpt.memory import Elements

WIDTHS = (1, 2, 4, 8)
LEVEL = 1
"""Of the files; another level is another release's."""


@dataclass(frozen=True)
class Flips:
    """Flips of elements of one width. elements: counted through (`places.Numbering`), rising; bits: of each, not 0."""

    elements: I64
    bits: Elements


@dataclass(frozen=True)
class Changes:
    """From the weights of one state fingerprint to those of another. layout: digest; flips: one for each of WIDTHS.

    added: what that adds to the fingerprint of each tensor, as published.
    """

    layout: str
    base: int
    state: int
    added: U64
    flips: tuple[Flips, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in _arrays(self))


def write_changes(changes: Changes, path: str) -> None:
    """Write changes to a file that no reader sees in part. Not durable: it lives as long as the processes."""
    arrays = list(_arrays(changes))
    head = {
        "level": LEVEL, "layout": changes.layout, "base": changes.base, "state": changes.state,
        "lengths": [len(a) for a in arrays],
    }  # fmt: skip
    raw = json.dumps(head).encode()
    beside = f"{path}.tmp"
    with open(beside, "wb") as file:
        for part in (np.array([len(raw)], "<u8"), np.frombuffer(raw, np.uint8), *arrays):
            file.write(memoryview(np.ascontiguousarray(part)).cast("B") if len(part) else b"")
            file.write(bytes(-part.nbytes % 8))
    os.replace(beside, path)


def map_changes(path: str) -> Changes:
    """Map a file of changes, which may be removed meanwhile. Raises IntegrityError for any other file."""
    raw = np.memmap(path, np.uint8, "r")
    try:
        size = int(raw[:8].view("<u8")[0])
        head = json.loads(raw[8 : 8 + size].tobytes())
        if head["level"] != LEVEL:
            raise IntegrityError(f"{path} was written by another release; install the same one beside engine and store")
        at, arrays = 8 + size + -size % 8, []
        for dtype, length in zip(_dtypes(), head["lengths"], strict=True):
            part = raw[at : at + length * dtype.itemsize].view(dtype)
            if len(part) != length:
                raise ValueError("it ends early")
            arrays.append(part)
            at += part.nbytes + -part.nbytes % 8
        flips = tuple(Flips(elements, bits) for elements, bits in zip(arrays[1::2], arrays[2::2], strict=True))
        return Changes(head["layout"], head["base"], head["state"], arrays[0], flips)
    except (KeyError, TypeError, ValueError) as exc:
        raise IntegrityError(f"{path} holds no changes ({exc}); stage the version again") from exc


def _arrays(changes: Changes) -> Iterator[npt.NDArray[Any]]:
    yield changes.added
    for one in changes.flips:
        yield one.elements
        yield one.bits


def _dtypes() -> Iterator[np.dtype[Any]]:
    yield np.dtype("<u8")
    for width in WIDTHS:
        yield np.dtype("<i8")
        yield np.dtype(f"<u{width}")
