"""Histories and plans."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.chain import Entry, History, Plan, Step, check_link, newest_with_state, plan, since_anchor
from deltackpt.errors import ChainError, FormatError
from deltackpt.manifest import Manifest, Totals

A, B = "aa" * 32, "bb" * 32


def entry(version: int, kind: str = "delta", base: int | None = None, stored: int = 10, **fields: object) -> Entry:
    """A version; digest and prev are its number and the one before."""
    if base is None and kind != "full":
        base = version - 1
    values: dict[str, object] = {
        "format": 1, "store_id": "s", "lineage": "l", "version": version, "kind": kind, "layout": A, "placement": A,
        "state": f"{version:016x}", "nonce": "n" * 16, "prev": f"digest {version - 1}" if version else "", "base": base,
        "totals": Totals(4, 1, 8, stored),
    }  # fmt: skip
    return Entry(Manifest(**(values | fields)), f"digest {version}")  # type: ignore[arg-type]  # fields by name


def history(*entries: Entry) -> History:
    return {e.manifest.version: e for e in entries}


# ---------------------------------------------------------------- links


def test_next_version_follows() -> None:
    check_link(entry(4, epoch=2), entry(5, epoch=2))
    check_link(entry(4, epoch=2), entry(5, epoch=3))


def test_full_version_may_change_lineage_and_layout() -> None:
    check_link(entry(4), entry(5, "full", lineage="other", layout=B))


def test_fork_is_a_chain_error() -> None:
    with pytest.raises(ChainError, match=r"version 5 follows a manifest .*: the stream was forked or edited"):
        check_link(entry(4), entry(5, prev=B))


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (entry(5, store_id="t"), "version 5 belongs to store t, expected s"),
        (entry(5, epoch=1), "version 5 has epoch 1, version 4 already had 2"),
        (entry(5, epoch=2, lineage="m"), "version 5 changes lineage or layout without being a full version"),
        (entry(5, epoch=2, layout=B), "version 5 changes lineage or layout without being a full version"),
        (entry(5, "rewind", 1, epoch=2, layout=B), "version 5 changes lineage or layout"),
    ],
)
def test_version_that_breaks_a_rule_is_a_format_error(after: Entry, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        check_link(entry(4, epoch=2), after)


# ---------------------------------------------------------------- plans

STRAIGHT = history(entry(0, "full"), *(entry(v, stored=10 * v) for v in range(1, 6)))


def steps(*versions: int) -> tuple[Step, ...]:
    """Steps; a negative version is undone."""
    return tuple(Step(abs(v), undo=v < 0) for v in versions)


def test_forwards_applies_each_delta_in_order() -> None:
    assert plan(STRAIGHT, 4, local=1, anchors={}) == Plan(4, None, steps(2, 3, 4), 90)


def test_backwards_undoes_each_delta_in_order() -> None:
    assert plan(STRAIGHT, 2, local=5, anchors={}) == Plan(2, None, steps(-5, -4, -3), 120)


def test_nothing_to_do_at_the_wanted_version() -> None:
    assert plan(STRAIGHT, 3, local=3, anchors={3: 0}) == Plan(3, None, (), 0)


def test_empty_versions_cost_nothing_and_need_no_step() -> None:
    chain = history(entry(0, "full"), entry(1), entry(2, "empty"), entry(3))
    assert plan(chain, 3, local=1, anchors={}) == Plan(3, None, steps(3), 10)
    assert plan(chain, 1, local=2, anchors={}) == Plan(1, None, (), 0)


def test_rewind_undoes_the_abandoned_deltas_and_skips_them_for_others() -> None:
    chain = history(entry(0, "full"), entry(1), entry(2), entry(3), entry(4, "rewind", 1), entry(5))
    assert plan(chain, 5, local=3, anchors={}) == Plan(5, None, steps(-3, -2, 5), 30)
    assert plan(chain, 5, local=1, anchors={}) == Plan(5, None, steps(5), 10)
    assert plan(chain, 3, local=5, anchors={}) == Plan(3, None, steps(-5, 2, 3), 30)


def test_reseed_takes_the_anchor_with_the_fewest_bytes_in_all() -> None:
    assert plan(STRAIGHT, 5, local=None, anchors={0: 1000, 3: 1000}) == Plan(5, 3, steps(4, 5), 1090)
    assert plan(STRAIGHT, 5, local=None, anchors={0: 100, 3: 1000}) == Plan(5, 0, steps(1, 2, 3, 4, 5), 250)
    # Backwards from a later anchor, where that is cheaper.
    assert plan(STRAIGHT, 4, local=None, anchors={0: 100, 5: 100}) == Plan(4, 5, steps(-5), 150)


def test_anchor_beats_deltas_that_cost_more() -> None:
    assert plan(STRAIGHT, 5, local=0, anchors={5: 149}) == Plan(5, 5, (), 149)
    assert plan(STRAIGHT, 5, local=0, anchors={5: 151}) == Plan(5, None, steps(1, 2, 3, 4, 5), 150)


def test_missing_delta_is_crossed_by_an_anchor_beyond_it() -> None:
    assert plan(STRAIGHT, 5, local=0, anchors={0: 500, 4: 500}, missing={2, 3}) == Plan(5, 4, steps(5), 550)


def test_no_way_names_what_is_missing() -> None:
    with pytest.raises(ChainError, match=r"no way from version 0 to version 5: .* store: 2, 3; anchors: 0; restore"):
        plan(STRAIGHT, 5, local=0, anchors={0: 500}, missing={3, 2})
    with pytest.raises(ChainError, match=r"no way from nothing to version 5: .* store: none; anchors: none"):
        plan(STRAIGHT, 5, local=None, anchors={})


def test_full_version_is_not_reached_by_deltas() -> None:
    chain = history(entry(0, "full"), entry(1), entry(2, "full"), entry(3))
    with pytest.raises(ChainError, match="no way from version 1 to version 3"):
        plan(chain, 3, local=1, anchors={})
    assert plan(chain, 3, local=1, anchors={2: 7}) == Plan(3, 2, steps(3), 17)


def test_unknown_versions_are_no_start() -> None:
    with pytest.raises(ChainError, match="version 9 is not in the store, which ends at 5"):
        plan(STRAIGHT, 9, local=0, anchors={})
    with pytest.raises(ChainError, match="version 0 is not in the store, which ends at nothing"):
        plan({}, 0, local=None, anchors={})
    assert plan(STRAIGHT, 5, local=77, anchors={5: 1, 99: 0}) == Plan(5, 5, (), 1)


def test_equally_cheap_ways_prefer_what_the_target_holds() -> None:
    """Comparing a way from the target with one from an anchor raised TypeError."""
    chain = history(entry(0, "full"), entry(1, stored=10), entry(2, stored=5))
    assert plan(chain, 2, local=0, anchors={1: 10}) == Plan(2, None, steps(1, 2), 15)
    assert plan(chain, 1, local=1, anchors={1: 0}) == Plan(1, None, (), 0)


def test_equally_cheap_ways_from_one_start_are_no_error() -> None:
    """Steps cannot be compared: two ways around a diamond raised TypeError."""
    chain = history(
        entry(0, "full"), entry(1, stored=0), entry(2, stored=0), entry(3, "rewind", 0), entry(4, "rewind", 1),
        entry(5, stored=0),
    )  # fmt: skip
    for local, want in itertools.product(range(6), repeat=2):
        assert plan(chain, want, local=local, anchors={}).nbytes == 0


def test_plan_over_2000_versions_has_2000_steps() -> None:
    chain = history(entry(0, "full"), *(entry(v) for v in range(1, 2001)))
    assert plan(chain, 2000, local=0, anchors={}).nbytes == 20_000


@st.composite
def histories(draw: st.DrawFn) -> History:
    entries = [entry(0, "full")]
    for version in range(1, draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["delta", "delta", "delta", "empty", "rewind", "full"]))
        base = draw(st.integers(0, version - 1)) if kind == "rewind" else None
        entries.append(entry(version, kind, base, stored=draw(st.integers(0, 3))))
    return history(*entries)


def cheapest(chain: History, want: int, starts: dict[int, int], missing: set[int]) -> int | None:
    """Bytes of the cheapest way, by relaxing every tie until nothing changes."""
    cost = {v: n for v, n in starts.items() if v in chain}
    for _ in chain:
        for version, e in chain.items():
            base, kind = e.manifest.base, e.manifest.kind
            if base is None or (kind == "delta" and version in missing):
                continue
            price = e.manifest.totals.stored if kind == "delta" else 0
            for one, other in ((base, version), (version, base)):
                if one in cost:
                    cost[other] = min(cost.get(other, 1 << 60), cost[one] + price)
    return cost.get(want)


def walk(chain: History, found: Plan, start: int) -> int:
    """Walk the steps; where a step does not fit, only ties without a delta may lead on."""
    at = {start}

    def free(at: set[int]) -> set[int]:
        while True:
            more = set(at)
            for version, e in chain.items():
                base = e.manifest.base
                if e.manifest.kind in ("empty", "rewind") and base is not None and {base, version} & more:
                    more |= {base, version}
            if more == at:
                return at
            at = more

    nbytes = 0
    for step in found.steps:
        manifest = chain[step.version].manifest
        assert manifest.kind == "delta"
        assert manifest.base is not None
        here, there = (step.version, manifest.base) if step.undo else (manifest.base, step.version)
        assert here in free(at)
        at = {there}
        nbytes += manifest.totals.stored
    assert found.version in free(at)
    return nbytes


@given(histories(), st.data())
def test_plan_is_a_way_and_no_way_is_cheaper(chain: History, data: st.DataObject) -> None:
    versions = st.sampled_from(sorted(chain))
    want, local = data.draw(versions), data.draw(st.none() | versions)
    anchors = data.draw(st.dictionaries(versions, st.integers(0, 4)))
    missing = data.draw(st.sets(versions))
    starts = dict(anchors)
    if local is not None:
        starts[local] = 0
    best = cheapest(chain, want, starts, missing)
    if best is None:
        with pytest.raises(ChainError, match=f"to version {want}"):
            plan(chain, want, local=local, anchors=anchors, missing=missing)
        return
    found = plan(chain, want, local=local, anchors=anchors, missing=missing)
    start = local if found.anchor is None else found.anchor
    assert start is not None
    fetched = 0 if found.anchor is None else anchors[found.anchor]
    assert (found.version, found.nbytes, walk(chain, found, start) + fetched) == (want, best, best)
    assert not missing & {s.version for s in found.steps}


# ---------------------------------------------------------------- looking back


def test_newest_with_state_needs_layout_and_state() -> None:
    same = "0" * 16
    chain = history(entry(0, "full", state=same), entry(1), entry(2, "rewind", 0, state=same), entry(3))
    assert newest_with_state(chain, A, same) == 2
    assert newest_with_state(chain, B, same) is None
    assert newest_with_state(chain, A, "f" * 16) is None


def test_since_anchor_follows_the_bases_back_to_an_anchor() -> None:
    chain = history(entry(0, "full"), entry(1), entry(2), entry(3), entry(4, "rewind", 1), entry(5))
    assert [m.version for m in since_anchor(chain, {0}, 5)] == [5, 4, 1]
    assert [m.version for m in since_anchor(chain, {0, 4}, 5)] == [5]
    assert [m.version for m in since_anchor(chain, {5}, 5)] == []
    assert [m.version for m in since_anchor(chain, set(), 3)] == [3, 2, 1, 0]
