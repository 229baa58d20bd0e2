"""Scatter plans: where every element of a checkpoint is in a live module, and how plans are kept on disk.

How they are found out: `scatter`.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from deltackpt.digest import U64, sha256
from deltackpt.errors import ConfigError, FormatError, IntegrityError
from deltackpt.layout import I64, Layout
from deltackpt.live import Region
from deltackpt.places import Mask, Numbering, PlaceMap

Refresh: TypeAlias = Callable[[], object]

UNSIGNED = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
LEVEL = 1
"""Of the files; another level is another release's."""


@dataclass(frozen=True)
class Row:
    """A live region as elements of one width: a tensor of the live layout."""

    region: str
    width: int
    count: int

    @property
    def name(self) -> str:
        """Its name in the live layout."""
        return f"{self.region}:{self.width}"


@dataclass(frozen=True)
class Coverage:
    """Bytes of live memory by what they are, and of the checkpoint by whether they are here."""

    live: int
    planned: int
    constant: int
    derived: int
    checkpoint: int
    landed: int

    def __str__(self) -> str:
        parts = [f"{100 * n / max(1, self.live):.2f} % {what}" for what, n in (
            ("planned", self.planned), ("constant", self.constant), ("derived", self.derived))]  # fmt: skip
        here = 100 * self.landed / max(1, self.checkpoint)
        return f"{self.live} live bytes: {', '.join(parts)}; {here:.2f} % of the checkpoint is here"


@dataclass(frozen=True)
class ScatterPlan:
    """Where the elements of a checkpoint are in a module whose tensors have `signature`.

    maps: the first has every element that is here, once; the others further copies. derived: live tensors that a
    refresh call recomputes. setting: the caller's words for what else the plan depends on (engine, version, ranks).
    """

    layout: Layout
    signature: str
    setting: str
    state: tuple[str, ...]
    derived: tuple[str, ...]
    rows: tuple[Row, ...]
    maps: tuple[PlaceMap, ...] = field(repr=False)
    coverage: Coverage

    @cached_property
    def live(self) -> Layout:
        """The live layout: regions as unsigned integers."""
        return Layout(
            [r.name for r in self.rows], [UNSIGNED[r.width] for r in self.rows], [(r.count,) for r in self.rows]
        )

    @cached_property
    def source_numbering(self) -> Numbering:
        """How the elements of the checkpoint are counted through."""
        return Numbering(self.layout)

    @cached_property
    def live_numbering(self) -> Numbering:
        """How live elements are counted through."""
        return Numbering(self.live)

    @cached_property
    def landed(self) -> I64:
        """How many elements of each tensor are here."""
        owner = self.source_numbering.owner(self.maps[0].source)
        return np.bincount(owner, weights=self.maps[0].extent, minlength=len(self.layout.names)).astype(np.int64)

    @cached_property
    def whole(self) -> Mask:
        """Which tensors are here with all their elements."""
        whole: Mask = self.landed == self.layout.count
        return whole

    def addresses(self, regions: Iterable[Region]) -> U64:
        """Return the address of each tensor of the live layout. The regions are those of the plan's signature."""
        where = {r.name: r for r in regions}
        for row in self.rows:
            if row.region not in where or row.width * row.count > where[row.region].nbytes:
                raise IntegrityError(f"the plan has a row outside of {row.region}; make it again")
        by_name = {row.name: where[row.region].address for row in self.rows}
        return np.array([by_name[n] for n in self.live.names], np.uint64)


def refresh_all(refreshes: Mapping[str, Refresh]) -> None:
    """Call each refresh once, in the order of names."""
    called: list[Refresh] = []
    for name in sorted(refreshes):
        if refreshes[name] not in called:
            called.append(refreshes[name])
            refreshes[name]()


def save_plan(plan: ScatterPlan, path: str | Path) -> None:
    """Write a plan to a file, whole or not at all."""
    head = {
        "level": LEVEL, "layout": plan.layout.digest, "signature": plan.signature, "setting": plan.setting,
        "state": plan.state, "derived": plan.derived, "rows": [[r.region, r.width, r.count] for r in plan.rows],
        "coverage": vars(plan.coverage), "maps": len(plan.maps),
    }  # fmt: skip
    out = io.BytesIO()
    arrays = {
        f"{n}.{key}": getattr(m, key) for n, m in enumerate(plan.maps) for key in ("source", "live", "kind", "shapes")
    }
    np.savez_compressed(out, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
    body = out.getvalue()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".plan-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(sha256(body).encode() + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_plan(path: str | Path, layout: Layout) -> ScatterPlan:
    """Read a plan from a file. Raises IntegrityError where the file is damaged, ConfigError for another layout."""
    raw = Path(path).read_bytes()
    if sha256(raw[64:]).encode() != raw[:64]:
        raise IntegrityError(f"{path} is damaged; remove it, and the plan is made again")
    try:
        with np.load(io.BytesIO(raw[64:]), allow_pickle=False) as file:
            head = json.loads(file["head"].tobytes())
            if head["level"] != LEVEL:
                raise ConfigError(f"{path} was written by another release; remove it, and the plan is made again")
            maps = tuple(
                PlaceMap(*(file[f"{n}.{k}"] for k in ("source", "live", "kind", "shapes"))) for n in range(head["maps"])
            )
        if head["layout"] != layout.digest:
            raise ConfigError(f"{path} is a plan for layout {head['layout'][:12]}, not {layout.digest[:12]}")
        rows = tuple(Row(*r) for r in head["rows"])
        plan = ScatterPlan(
            layout, head["signature"], head["setting"], tuple(head["state"]), tuple(head["derived"]), rows, maps,
            Coverage(**head["coverage"]),
        )  # fmt: skip
        for one in maps:
            one.require_inside(plan.source_numbering, plan.live_numbering)
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile, FormatError) as exc:
        raise IntegrityError(f"{path} is no plan ({exc}); remove it, and the plan is made again") from exc
    return plan
