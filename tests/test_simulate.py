"""The reckoning of fleets: figures that can be checked by hand."""

from __future__ import annotations

import servers  # puts scripts/ on the path
import simulate
from simulate import Costs, World, fleet, publish

assert servers

WORLD = World(
    model_gb=100.0, interval_s=100.0, poll_s=2.0, per_host=4, rank_cores=2, sampler_cores=5, host_gbs=10.0,
    store_gbs=50.0, latency_s=0.1, mirrors=2, egress_usd=0.01, get_usd=1e-6, put_usd=1e-5,
)  # fmt: skip
COSTS = Costs(encode=0.5, decode=0.2, apply=0.1, stored=0.01)


def close(found: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    return all(abs(f - e) < 1e-9 * max(1.0, abs(e)) for f, e in zip(found, expected, strict=True))


def test_ranks_share_the_encoding_and_hosts_their_links() -> None:
    """100 GB on 8 ranks: 12.5 GB each at 2 cores; 1 GB stored, two hosts of 10 GB/s."""
    found = publish(WORLD, COSTS, 8)
    assert close(found, (12.5 * 0.5 / 2, 1.0 / 20 + 0.1, 0.3))
    assert found.total_s == found.encode_s + found.metadata_s
    # 512 ranks: the store is what is slow.
    assert close(publish(WORLD, COSTS, 512), (100 / 512 * 0.5 / 2, 1.0 / 50 + 0.1, 0.3))


def test_samplers_without_anything_each_fetch_everything() -> None:
    """1 GB is 30 shards of two requests; 8 samplers on 2 hosts, 50 polls each in 100 s."""
    found = fleet(WORLD, COSTS, 8, cache=False, mirrors=0)
    gets = 8 + 8 * 60 + 8 * 50
    staged = 2.0 + max(4 / 10, 8 / 50) + 0.2 + 100 * 0.2 / 4 / 5
    assert close(found, (8.0, gets / 100, staged, 864 * (8.0 * 0.01 + gets * 1e-6)))


def test_cache_fetches_once_a_host_and_reads_the_manifest_once_more() -> None:
    found = fleet(WORLD, COSTS, 8, cache=True, mirrors=0)
    gets = 8 + 2 * 60 + 2 + 8 * 50
    staged = 2.0 + 1 / 10 + 0.2 + 1.0
    assert close(found, (2.0, gets / 100, staged, 864 * (2.0 * 0.01 + gets * 1e-6)))


def test_mirrors_are_all_that_the_origin_sees() -> None:
    found = fleet(WORLD, COSTS, 8, cache=True, mirrors=2)
    origin = 2 * 61 + 2 * 50
    everywhere = origin + 8 + 2 * 60 + 2 + 8 * 50
    staged = (2.0 + 0.1 + 0.2) + 2.0 + 0.1 + 0.2 + 1.0
    assert close(found, (2.0, origin / 100, staged, 864 * (2.0 * 0.01 + everywhere * 1e-6 + 2 * 31 * 1e-5)))


def test_costs_are_measured_and_the_assumptions_are_printed() -> None:
    costs = simulate.measure(0.01, nbytes=1 << 20, repeats=1)
    assert min(costs) > 0
    assert 0.003 < costs.stored < 0.02
    text = simulate.report(WORLD, costs, "measured here")
    assert text.startswith("assumptions:\n- costs of one core, measured here: encode ")
    assert text.count("\n|") == 2 + 3 + 2 + 20
    assert "| 10,000 | caches + 2 mirrors | " in text
