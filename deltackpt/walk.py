"""Walks from version to version: the deltas between them, fetched, decoded and joined, as changes of elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np

from deltackpt.chain import Plan
from deltackpt.changes import WIDTHS, Changes, Flips
from deltackpt.digest import U64
from deltackpt.folder import signed
from deltackpt.kernels import in_tensors, positions
from deltackpt.layout import I64, Layout
from deltackpt.places import Numbering
from deltackpt.reader import Delta, Reader


def walk(reader: Reader, plan: Plan, base: int) -> Changes:
    """Return what a plan without an anchor changes. base: state fingerprint of the version that it begins with."""
    manifest = reader.manifest(plan.version)
    layout = reader.layout(manifest.layout)
    numbering = Numbering(layout)
    added = np.zeros(len(layout.names), np.uint64)
    groups: dict[int, list[tuple[I64, U64]]] = {}
    with closing(reader.deltas([step.version for step in plan.steps])) as deltas:
        for step, delta in zip(plan.steps, deltas, strict=True):
            added += signed(delta, step)
            for group, found in _changes(numbering, delta, reader.threads):
                groups.setdefault(group, []).append(found)
    flips = tuple(_flips(layout, groups, width) for width in WIDTHS)
    return Changes(layout.digest, base, int(manifest.state, 16), added, flips)


def _changes(numbering: Numbering, delta: Delta, threads: int | None) -> Iterator[tuple[int, tuple[I64, U64]]]:
    """Yield each group's number, and its changes: elements of the checkpoint, counted through, and flips."""
    for staged in delta.staged(threads=threads):
        segments = delta.tiling.groups[staged.group]
        at, values = positions(segments, staged.columns)
        at, values = at[values != 0], values[values != 0]
        if segments.boxes is None:
            yield staged.group, (at + numbering.of_group[staged.group], values)
            continue
        # A group of a part has elements of any groups of the layout, in an order of its own.
        tensor, element = in_tensors(segments, at)
        elements = numbering.of_tensor[tensor] + element
        order = np.argsort(elements)
        elements, values = elements[order], values[order]
        cuts = np.searchsorted(elements, numbering.of_group)
        for group in np.flatnonzero(np.diff(cuts)).tolist():
            mine = slice(int(cuts[group]), int(cuts[group + 1]))
            yield group, (elements[mine], values[mine])


def _flips(layout: Layout, groups: dict[int, list[tuple[I64, U64]]], width: int) -> Flips:
    """Join the changes of all groups of one width; groups follow each other as elements are counted."""
    mine = [_merged(found) for group, found in sorted(groups.items()) if layout.groups[group].width == width]
    nothing = np.empty(0, np.int64), np.empty(0, np.uint64)
    elements, bits = (np.concatenate(c) for c in zip(nothing, *mine, strict=True))
    return Flips(elements, bits.astype(f"<u{width}"))


def _merged(changes: Sequence[tuple[I64, U64]]) -> tuple[I64, U64]:
    """Join the changes of several deltas to one group: flips of one element meet."""
    if len(changes) == 1:
        return changes[0]
    elements, values = (np.concatenate(c) for c in zip(*changes, strict=True))
    order = np.argsort(elements, kind="stable")
    elements, values = elements[order], values[order]
    first = np.flatnonzero(np.diff(elements, prepend=-1))
    values = np.bitwise_xor.reduceat(values, first)
    return elements[first][values != 0], values[values != 0]
