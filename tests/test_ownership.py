"""Who owns which element: each exactly once, by one who holds it, as evenly as the holders allow."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltackpt.errors import ConfigError
from deltackpt.layout import Layout
from deltackpt.ownership import Inventory, Part, divide, join_layout
from deltackpt.partition import Box, Partition


def inventory(*held: tuple[str, tuple[int, ...], Box], dtype: str = "I16") -> Inventory:
    return Inventory([h[0] for h in held], [dtype] * len(held), [h[1] for h in held], [h[2] for h in held])


def owned(parts: list[Part], ranks: int, width: int = 2) -> list[int]:
    """Bytes that each rank owns."""
    found = [0] * ranks
    for part in parts:
        found[part.holders[0]] += width * sum(math.prod(e - b for b, e in box) for _, box in part.boxes)
    return found


def test_a_replicated_tensor_is_cut_in_equal_rows_and_every_holder_can_take_over() -> None:
    held = inventory(("w", (1000, 1000), ((0, 1000), (0, 1000))))
    parts = divide(join_layout({0: held, 1: held, 2: held, 3: held}), {r: held for r in range(4)})
    assert parts == [
        Part(((0, ((0, 250), (0, 1000))),), (0, 1, 2, 3)),
        Part(((0, ((250, 500), (0, 1000))),), (1, 2, 3, 0)),
        Part(((0, ((500, 750), (0, 1000))),), (2, 3, 0, 1)),
        Part(((0, ((750, 1000), (0, 1000))),), (3, 0, 1, 2)),
    ]


def test_ranks_with_experts_of_unequal_size_own_equal_bytes_with_what_all_hold() -> None:
    dense = ("dense", (3000, 100), ((0, 3000), (0, 100)))
    held = {
        rank: inventory(dense, (f"expert.{rank}", (rows, 100), ((0, rows), (0, 100))))
        for rank, rows in enumerate((1000, 500, 2000, 700))
    }
    found = owned(divide(join_layout(held), held), 4)
    assert sum(found) == 2 * 100 * 7200
    assert max(found) / (sum(found) / 4) < 1.12  # expert 2 alone is more than a quarter
    assert min(found[0], found[1], found[3]) / max(found[0], found[1], found[3]) > 0.95


def test_overlapping_boxes_are_cut_where_their_holders_change() -> None:
    held = {
        0: inventory(("w", (4, 6), ((0, 4), (0, 6)))),
        1: inventory(("w", (4, 6), ((0, 4), (0, 3)))),
        2: inventory(("w", (4, 6), ((0, 4), (3, 6)))),
    }
    parts = divide(join_layout(held), held)
    assert {part.boxes: sorted(part.holders) for part in parts} == {
        ((0, ((0, 4), (0, 3))),): [0, 1],
        ((0, ((0, 4), (3, 6))),): [0, 2],
    }


def test_elements_that_no_rank_holds_are_named() -> None:
    held = {0: inventory(("w", (4, 6), ((0, 2), (0, 6)))), 1: inventory(("w", (4, 6), ((3, 4), (0, 6))))}
    with pytest.raises(ConfigError, match=r"tensor w, \[4, 6\]: no rank holds its elements \[\[2, 3\], \[0, 6\]\]"):
        divide(join_layout(held), held)


def test_ranks_that_differ_about_a_tensor_are_named() -> None:
    held = {0: inventory(("w", (4,), ((0, 4),))), 3: inventory(("w", (5,), ((0, 5),)))}
    with pytest.raises(ConfigError, match=r"tensor w is I16\[4\] on rank 0 and I16\[5\] on rank 3"):
        join_layout(held)


def test_tensors_that_no_rank_holds_are_the_last_part() -> None:
    layout = Layout(["frozen", "w"], ["I16", "I16"], [(2, 3), (4,)])
    held = {0: inventory(("w", (4,), ((0, 4),)))}
    assert divide(layout, held)[-1] == Part(((0, ((0, 2), (0, 3))),), ())


def test_packed_elements_are_cut_between_whole_bytes() -> None:
    held = inventory(("w", (300001, 3), ((0, 300001), (0, 3))), ("x", (2,), ((0, 2),)), dtype="F4")
    # 300,001 rows of 12 bits are no whole bytes: the layout itself would refuse them.
    held = inventory(("w", (300000, 3), ((0, 300000), (0, 3))), dtype="F4")
    parts = divide(join_layout({0: held, 1: held, 2: held}), {r: held for r in range(3)})
    cuts = [box[0] for part in parts for _, box in part.boxes]
    assert all(begin % 2 == 0 and end % 2 == 0 for begin, end in cuts)
    Partition(join_layout({0: held}), [part.boxes for part in parts])


@st.composite
def holdings(draw: st.DrawFn) -> dict[int, Inventory]:
    """Some tensors, each cut in rows or columns for some ranks, which may hold the same piece."""
    ranks = draw(st.integers(1, 5))
    held: dict[int, list[tuple[str, tuple[int, ...], Box]]] = {rank: [] for rank in range(ranks)}
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 400), min_size=1, max_size=3)))
        axis, pieces = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
        cuts = [round(shape[axis] * k / pieces) for k in range(pieces + 1)]
        for begin, end in itertools.pairwise(cuts):
            box = tuple((begin, end) if d == axis else (0, n) for d, n in enumerate(shape))
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append((f"t{i}", shape, box))
    return {rank: inventory(*sorted(mine)) for rank, mine in held.items()}


@given(holdings())
@settings(derandomize=True, max_examples=60)
def test_every_element_has_one_owner_who_holds_it(held: dict[int, Inventory]) -> None:
    layout = join_layout(held)
    parts = divide(layout, held)
    Partition(layout, [part.boxes for part in parts])  # covers every tensor exactly once, or raises
    for part in parts:
        for t, box in part.boxes:
            for rank in part.holders:
                mine = [b for n, b in zip(held[rank].names, held[rank].boxes, strict=True) if n == layout.names[t]]
                assert any(
                    all(low <= begin and end <= high for (begin, end), (low, high) in zip(box, of, strict=True))
                    for of in mine
                )
    assert sum(owned(parts, len(held))) == int(np.sum(layout.nbytes))
