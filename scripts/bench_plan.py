"""Plan a mixture of experts of many tensors; then follow it, through the plan and, beside it, without one.

Prints how long planning, proving and staging take, and how long the module stands still, against the bare apply of the
same versions to the checkpoint's own tensors (`TensorTarget`). Same process, same threads, taken in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch

from deltackpt.follow import Follower, Prepared
from deltackpt.layout import Layout
from deltackpt.planned import PlannedTarget, StagedPlan
from deltackpt.publish import Publisher
from deltackpt.scatter import cached_plan
from deltackpt.tensors import TensorTarget, describe

EXPERTS = 100
Tensors = dict[str, torch.Tensor]


class Experts(torch.nn.Module):
    """Layers of stacked experts, gate over up, and down transposed, as engines lay them out."""

    def __init__(self, layers: int, width: int, device: str) -> None:
        super().__init__()
        self.w13 = torch.nn.ParameterList(_zeros(EXPERTS, 2 * width, width, device=device) for _ in range(layers))
        self.w2 = torch.nn.ParameterList(_zeros(EXPERTS, width, width, device=device) for _ in range(layers))
        self.width = width

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint in."""
        for name, weight in weights:
            layer, expert, kind = name.split(".")
            if kind == "down":
                self.w2[int(layer)][int(expert)].copy_(weight.t())
            else:
                self.w13[int(layer)][int(expert)].narrow(0, self.width * (kind == "up"), self.width).copy_(weight)


def _zeros(*shape: int, device: str) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device), requires_grad=False)


def checkpoint(layers: int, width: int) -> Tensors:
    """Random weights."""
    names = [f"{i}.{e}.{k}" for i in range(layers) for e in range(EXPERTS) for k in ("gate", "up", "down")]
    values = torch.randn(len(names), width, width, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return {n: values[i] for i, n in enumerate(names)}


def change(weights: Tensors, share: float, seed: int) -> None:
    """Flip the lowest bit of a share of the values, in place."""
    made = np.random.default_rng(seed)
    bits = next(iter(weights.values())).untyped_storage()
    flat = torch.empty(0, dtype=torch.int16).set_(bits)
    flat[torch.from_numpy(made.integers(0, len(flat), int(share * len(flat))))] ^= 1


def timed(what: Callable[[], object]) -> str:
    """Return the seconds that a call takes, and those of CPU time: other work may run beside it."""
    began, cpu = time.perf_counter(), time.process_time()
    what()
    return f"{time.perf_counter() - began:.1f} s ({time.process_time() - cpu:.1f} s of CPU)"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=60_000)
    parser.add_argument("--width", type=int, default=64, help="rows and columns of each")
    parser.add_argument("--share", type=float, default=0.01, help="values that a version changes")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--device", default="cpu", help="of the live tensors; bare ones on `cuda` need its extra")
    options = parser.parse_args()
    layers = max(1, options.tensors // (3 * EXPERTS))
    weights, module = checkpoint(layers, options.width), Experts(layers, options.width, options.device)
    module.load_weights(weights.items())
    described = [describe(n, t) for n, t in weights.items()]
    layout = Layout(list(weights), [d for d, _ in described], [s for _, s in described])
    print(f"{len(layout.names):,} tensors, {layout.total_bytes / 1e9:.2f} GB, {options.share:.2%} changed a version")
    with tempfile.TemporaryDirectory() as folder:
        plans = [
            lambda: cached_plan(f"{folder}/plans", module, module.load_weights, layout, setting="bench")
            for _ in range(2)
        ]
        print(f"planned in {timed(plans[0])}, read again in {timed(plans[1])}")
        plan = plans[1]()
        print(f"{sum(len(m.source) for m in plan.maps):,} boxes; {plan.coverage}")
        bare = {n: t.to(options.device, copy=True) for n, t in weights.items()}
        planned_ms: list[float] = []
        bare_ms: list[float] = []
        with Publisher(f"{folder}/store", anchors=False, run_id="bench") as publisher:
            publisher.publish(weights)
            target = PlannedTarget(module, plan)
            through, beside = Follower(f"{folder}/store", target), Follower(f"{folder}/store", TensorTarget(bare))
            print(f"proven in {timed(lambda: through.prepare(0))}")
            beside.prepare(0)
            for version in range(1, options.versions + 1):
                change(weights, options.share, version)
                publisher.publish(weights)
                for follower, times in ((through, planned_ms), (beside, bare_ms)):
                    prepared = follower.prepare(version)
                    assert isinstance(prepared, Prepared)
                    prepared.apply()
                    times.append(prepared.times["apply_ms"])
                    staged = prepared.times["stage_ms"]
                    more = ""
                    if isinstance(prepared.staging, StagedPlan):
                        more = f", forecast {prepared.staging.forecast_ms:.1f} ms"
                    name = "plan" if follower is through else "bare"
                    print(f"version {version} {name}: staged {staged:.0f} ms, stood still {times[-1]:.1f} ms{more}")
            target.prove(weights.items())
    with_plan, without = statistics.median(planned_ms), statistics.median(bare_ms)
    print(f"median: {with_plan:.1f} ms with a plan, {without:.1f} ms bare: {with_plan / without:.2f} times")


if __name__ == "__main__":
    main()
