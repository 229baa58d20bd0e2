"""What a rank holds: known again when it is given again, and described anew when it is not the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import raw_of

from deltackpt.errors import ConfigError
from deltackpt.holding import Held, Slice, hold


def given() -> dict[str, torch.Tensor]:
    return {"b": torch.arange(12, dtype=torch.int16).reshape(3, 4), "a": torch.ones(5), "e": torch.zeros(0, 7)}


def contents(held: Held) -> dict[str, bytes]:
    return {name: raw_of(torch.as_tensor(kept)) for name, kept in zip(held.inventory.names, held.kept, strict=True)}


def test_what_is_given_again_is_read_where_it_lies_now() -> None:
    first = given()
    held = hold(first)
    first["b"] += 1
    again = hold(first, held.told())
    assert again.inventory is held.inventory
    assert contents(again) == contents(hold(first))
    moved = first | {"b": first["b"] * 3}
    third = hold(moved, again.told())
    assert third.inventory is held.inventory
    assert contents(third) == contents(hold(moved))
    assert third.kept[1] is moved["b"]


def test_slices_are_known_again() -> None:
    whole = torch.arange(20, dtype=torch.int16).reshape(5, 4)
    cut = [Slice("w", (5, 4), [(1, 3), (0, 4)], whole[1:3]), Slice("w", (5, 4), [(3, 5), (0, 4)], whole[3:])]
    held = hold(cut)
    whole += 5
    again = hold(cut, held.told())
    assert again.inventory is held.inventory
    assert contents(again)["w"] == whole[3:].numpy().tobytes()
    other = [Slice("w", (5, 4), [(0, 2), (0, 4)], whole[:2]), cut[1]]
    assert hold(other, held.told()).inventory.boxes == [((0, 2), (0, 4)), ((3, 5), (0, 4))]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"b": t["b"].to(torch.int32)},
        lambda t: t | {"b": t["b"].reshape(4, 3)},
        lambda t: t | {"b": t["b"].reshape(4, 3).T},
        lambda t: t | {"c": torch.ones(1)},
        lambda t: {"a": t["a"], "e": t["e"]},
        lambda t: {"c" if n == "b" else n: v for n, v in t.items()},
        lambda t: dict(reversed(t.items())),
        lambda t: t | {"b": torch.nn.Parameter(t["b"].float(), requires_grad=False)},
        lambda t: t | {"a": torch.ones(5).numpy()},
        lambda t: iter(t.items()),
    ],
)
def test_what_is_not_the_same_is_described_anew(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> None:
    held = hold(given())
    found = hold(change(given()), held.told())
    fresh = hold(change(given()))
    assert found.inventory == fresh.inventory
    assert contents(found) == contents(fresh)


def test_a_negated_view_is_refused_as_it_is_the_first_time() -> None:
    real = torch.ones(2, dtype=torch.complex64)
    held = hold({"a": real.clone()})
    with pytest.raises(ConfigError, match="conjugate or negated view"):
        hold({"a": real.conj()}, held.told())


def test_a_stream_is_copied_each_time() -> None:
    buffer = torch.ones(4)
    held = hold(iter([("a", buffer)]))
    buffer += 1
    again = hold(iter([("a", buffer)]), held.told())
    assert contents(held) == {"a": torch.ones(4).numpy().tobytes()}
    assert contents(again) == {"a": (torch.ones(4) * 2).numpy().tobytes()}
