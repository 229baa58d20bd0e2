"""Reckon publish time, egress, requests and dollars for fleets that no machine here could run.

What a core does is measured on this machine, or given; networks, sizes and prices are given. All of it is printed with
the tables. All ranks are alike and so are all samplers, so that shares of a link are divisions; nothing is
drawn at random, nothing fails, and no other traffic uses the links.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltackpt import Publisher
from deltackpt.backend import Cpu, encode
from deltackpt.layout import Layout
from deltackpt.reader import Reader
from deltackpt.store import LocalStore

RANKS = (8, 64, 512)
SAMPLERS = (1, 10, 100, 1000, 10_000)
DAY_S = 86400
SHARD, CHUNK = 32 << 20, 16 << 20
"""Bytes of a shard and of one request for it, as writer and reader have them."""


class Costs(NamedTuple):
    """What one core does, in seconds per GB of weights, and what is stored, as a share of the weights."""

    encode: float
    decode: float
    apply: float
    stored: float


class World(NamedTuple):
    """What is given."""

    model_gb: float = 445.0
    changed: float = 0.01
    interval_s: float = 60.0
    poll_s: float = 1.0
    per_host: int = 8
    rank_cores: int = 8
    sampler_cores: int = 8
    host_gbs: float = 12.5
    store_gbs: float = 100.0
    latency_s: float = 0.05
    mirrors: int = 4
    egress_usd: float = 0.02
    get_usd: float = 0.40e-6
    put_usd: float = 5.0e-6


class Publish(NamedTuple):
    """One version published. metadata_s: two rounds of the group and the commit."""

    encode_s: float
    upload_s: float
    metadata_s: float

    @property
    def total_s(self) -> float:
        """Uploads run while the next shard is encoded."""
        return max(self.encode_s, self.upload_s) + self.metadata_s


class Fleet(NamedTuple):
    """What one store bears, and what all of it costs. egress_gb: of a version, out of the origin."""

    egress_gb: float
    requests_s: float
    staged_s: float
    usd_day: float


def publish(world: World, costs: Costs, ranks: int) -> Publish:
    """Ranks hold equal parts; those of a host share its link, all of them the store's."""
    stored_gb = world.model_gb * costs.stored
    hosts = math.ceil(ranks / world.per_host)
    encode_s = world.model_gb / ranks * costs.encode / world.rank_cores
    upload_s = stored_gb / min(hosts * world.host_gbs, world.store_gbs) + world.latency_s
    return Publish(encode_s, upload_s, 3 * world.latency_s)


def fleet(world: World, costs: Costs, samplers: int, *, cache: bool, mirrors: int) -> Fleet:
    """Followers poll a mirror where there are mirrors, else the origin; with a cache one of each host fetches."""
    stored_gb = world.model_gb * costs.stored
    shards = math.ceil(stored_gb * 1e9 / SHARD)
    gets = math.ceil(SHARD / CHUNK) * shards
    hosts = math.ceil(samplers / world.per_host)
    fetchers, places = (hosts if cache else samplers), max(1, mirrors)
    # Of one version: each sampler its manifest, each fetcher the shards; a cache reads the manifest once more.
    data = samplers + fetchers * gets + (hosts if cache else 0)
    polls = samplers * world.interval_s / world.poll_s
    copies = mirrors * (gets + 1)
    copy_polls = mirrors * world.interval_s / world.poll_s
    at_origin = copies + copy_polls if mirrors else data + polls
    link_s = stored_gb * (1 if cache else min(samplers, world.per_host)) / world.host_gbs
    store_s = stored_gb * math.ceil(fetchers / places) / world.store_gbs
    copy_s = world.poll_s + stored_gb / world.host_gbs + 2 * world.latency_s if mirrors else 0.0
    decode_s = world.model_gb * costs.decode / world.per_host / world.sampler_cores
    staged_s = copy_s + world.poll_s + max(link_s, store_s) + 2 * world.latency_s + decode_s
    versions = DAY_S / world.interval_s
    egress_gb = stored_gb * (mirrors or fetchers)
    gets_day = versions * (data + polls + copies + copy_polls)
    puts_day = versions * mirrors * (shards + 1)
    usd = versions * egress_gb * world.egress_usd + gets_day * world.get_usd + puts_day * world.put_usd
    return Fleet(egress_gb, at_origin / world.interval_s, staged_s, usd)


def measure(changed: float, *, nbytes: int = 256 << 20, repeats: int = 3) -> Costs:
    """Encode, stage and apply weights of two bytes on one core, in memory; CPU time, the best of some tries of each."""
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 16, nbytes // 2, np.uint16)
    # One step up or down in the last place, as rounding an optimiser's step does.
    new = old + (rng.random(len(old)) < changed) * rng.choice(np.array([1, 0xFFFF], np.uint16), len(old))
    layout = Layout(["w"], ["U16"], [(len(old),)])
    before, after = (np.array([w.__array_interface__["data"][0]], np.uint64) for w in (old, new))
    folder = Path(tempfile.mkdtemp(prefix="deltackpt-simulate-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    device, took = Cpu(1), []
    try:
        with Publisher(str(folder), anchors=False, run_id="simulate", threads=1) as publisher:
            publisher.publish({"w": old})
            stored = publisher.publish({"w": new}).totals.stored
        reader = Reader(LocalStore(folder), threads=1)
        reader.load()
        for _ in range(repeats):
            times = [time.process_time()]
            deque(encode(layout, before, after, threads=1), maxlen=0)
            times.append(time.process_time())
            delta = reader.delta(1)
            staged = device.stage_groups(delta.tiling, delta.groups())
            times.append(time.process_time())
            device.apply(delta.tiling, staged, before)
            device.apply(delta.tiling, staged, before)  # and back: the next try finds the weights as they were
            times.append(time.process_time())
            took.append(np.diff(times))
    finally:
        shutil.rmtree(folder)
    encoded, decoded, applied = (float(t) / (nbytes / 1e9) for t in np.min(took, axis=0))
    return Costs(encoded, decoded, applied / 2, stored / nbytes)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return rows as a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def report(world: World, costs: Costs, source: str) -> str:
    """Return the assumptions and both tables."""
    said = [
        f"costs of one core, {source}: encode {costs.encode:.3f}, fetch from memory, check and decode "
        f"{costs.decode:.3f}, apply {costs.apply:.3f} s per GB of weights; stored {costs.stored:.3%} of the weights",
        f"model {world.model_gb:g} GB, {world.changed:.1%} of the elements changed, a version every "
        f"{world.interval_s:g} s, a poll every {world.poll_s:g} s",
        f"{world.per_host} ranks or samplers a host with {world.host_gbs:g} GB/s of network; {world.rank_cores} cores "
        f"a rank, {world.sampler_cores} a sampler",
        f"a rank encodes its part alone; a sampler fetches every shard and decodes 1/{world.per_host} of the model",
        f"a store gives and takes {world.store_gbs:g} GB/s; {world.latency_s * 1e3:g} ms a request",
        f"with mirrors: {world.mirrors} other regions, samplers spread evenly, only the mirrors read the origin",
        f"prices: egress out of the origin ${world.egress_usd:g} a GB, GET ${world.get_usd * 1e6:g} and PUT "
        f"${world.put_usd * 1e6:g} a million; storage is not counted",
        "no faults, no retries, no other traffic; encoding overlaps with uploads",
    ]
    published = [(n, publish(world, costs, n)) for n in RANKS]
    rows = [[str(n), *(f"{s:.2f}" for s in (p.encode_s, p.upload_s, p.metadata_s, p.total_s))] for n, p in published]
    lines = ["assumptions:", *(f"- {s}" for s in said), ""]
    lines += [table(["ranks", "encode s", "upload s", "metadata s", "published after s"], rows), ""]
    rows = []
    for samplers in SAMPLERS:
        for cache, mirrors in ((False, 0), (True, 0), (False, world.mirrors), (True, world.mirrors)):
            found = fleet(world, costs, samplers, cache=cache, mirrors=mirrors)
            how = " + ".join(w for w, used in (("caches", cache), (f"{mirrors} mirrors", mirrors)) if used) or "neither"
            numbers = [f"{found.egress_gb:,.1f}", f"{found.requests_s:,.1f}", f"{found.staged_s:.1f}"]
            rows.append([f"{samplers:,}", how, *numbers, f"{found.usd_day:,.2f}"])
    head = ["samplers", "with", "egress GB a version", "requests/s at the origin", "staged after s", "$ a day"]
    return "\n".join([*lines, table(head, rows)])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in World._field_defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar="N")
    parser.add_argument(
        "--costs", nargs=4, type=float, metavar=("ENCODE", "DECODE", "APPLY", "STORED"),
        help="of one core in s per GB of weights, and the share that is stored. [default: measured here]",
    )  # fmt: skip
    options = vars(parser.parse_args())
    given = options.pop("costs")
    world = World(**options)
    costs = measure(world.changed) if given is None else Costs(*given)
    print(report(world, costs, "measured here" if given is None else "given"))


if __name__ == "__main__":
    main()
