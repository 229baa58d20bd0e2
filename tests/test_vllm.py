"""The plug-in for vLLM, on a worker's double: a model with fused and tied weights, and stubs of vLLM's modules."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICE
from safetensors.torch import load_file, save_file

from deltackpt import vllm as plugin
from deltackpt.errors import ChainError, ConfigError, Poisoned
from deltackpt.publish import publish_folder
from deltackpt.sidecar import Sidecar
from deltackpt.store import open_store


class Model(torch.nn.Module):
    """q and k are fused, the head is tied, experts are packed when they are loaded, as a kernel wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16), requires_grad=False)
        self.embed = torch.nn.Parameter(torch.zeros(600, 4, dtype=torch.bfloat16), requires_grad=False)
        self.head = self.embed
        self.experts = Experts()
        self.kv_cache = torch.zeros(3)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("q", "k"):
                self.qk[4 * (name == "k") :][:4].copy_(tensor)
            elif name == "experts":
                self.experts.loaded = tensor
            else:
                getattr(self, name).copy_(tensor)


class Method:
    """Packs when its kernel is built, and builds it once: what vLLM's experts on a CPU do."""

    def __init__(self) -> None:
        self.moe_kernel: object | None = None

    def process(self, layer: Experts) -> None:
        layer.weight.copy_(layer.loaded)
        if self.moe_kernel is None:
            layer.weight.copy_(layer.loaded.t().reshape(layer.weight.shape))
            self.moe_kernel = object()


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Method()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16), requires_grad=False)
        self.loaded = torch.empty(0)


class Cast(Model):
    """Holds one tensor in a dtype that has other bits for the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(600, 4, dtype=torch.float16), requires_grad=False)
        self.head = self.embed


class Part(Model):
    """Holds the second half of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(300, 4, dtype=torch.bfloat16), requires_grad=False)
        self.head = self.embed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((n, t[300:] if n == "embed" else t) for n, t in weights)


class Vllm:
    """Stubs of the modules that the plug-in imports."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.open = False

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self.registered:
            raise ValueError("already registered")
        self.registered.append(name)
        assert getattr(plugin, class_name) is plugin.DeltaEngine
        assert module == "deltackpt.vllm"

    def initialize_layerwise_reload(self, model: Model) -> None:
        assert not self.open
        self.open = True

    def finalize_layerwise_reload(self, model: Model, _config: object) -> None:
        assert self.open
        self.open = False
        if model.experts.loaded.numel():
            model.experts.quant_method.process(model.experts)
            model.experts.loaded = torch.empty(0)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    stub = Vllm()
    root = types.ModuleType("vllm")
    root.__version__ = "0.32.0"  # type: ignore[attr-defined]  # a made-up module
    parts: dict[str, dict[str, Any]] = {
        "vllm.config": {"set_current_vllm_config": lambda _: contextlib.nullcontext()},
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": stub},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": stub.initialize_layerwise_reload,
            "finalize_layerwise_reload": stub.finalize_layerwise_reload,
        },
    }
    monkeypatch.setitem(sys.modules, "vllm", root)
    for name, members in parts.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return stub


class Run:
    """Checkpoints v0 to v3, a store with the first two, and a worker that was started from v0."""

    def __init__(self, root: Path, model: Model) -> None:
        self.root, self.model, self.store = root, model, str(root / "store")
        torch.manual_seed(0)
        shapes = {"q": (4, 4), "k": (4, 4), "embed": (600, 4), "experts": (4, 6)}
        weights = {n: torch.randn(s).bfloat16() for n, s in shapes.items()}
        for version in range(4):
            (root / f"v{version}").mkdir()
            save_file(weights, root / f"v{version}" / "model.safetensors")
            for tensor in weights.values():
                tensor[-1, version] += 1
        for version in (0, 1):
            self.publish(version)
        self.sidecar = Sidecar(open_store(self.store), str(root / "own"))
        model.load_weights(load_file(root / "v0" / "model.safetensors").items())
        model.experts.quant_method.process(model.experts)
        model.experts.loaded = torch.empty(0)
        (root / "current").symlink_to("v0")
        self.config = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(data_parallel_index=1, world_size=2, rank=1, enable_eplb=False),
            model_config=types.SimpleNamespace(model=str(root / "current"), dtype="torch.bfloat16", quantization=None),
            device_config=types.SimpleNamespace(device_type="cpu"),
            lora_config=None,
        )
        self.engine = plugin.DeltaEngine(None, self.config, "cpu", model)

    def publish(self, version: int) -> None:
        publish_folder(self.root / f"v{version}", self.store, run_id="r", anchors=False)

    def init(self) -> dict[str, str]:
        info = {"layout": self.sidecar.layout(0), "folder": str(self.root / "own"), "token": "i"}
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))
        return self.report()

    def report(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.root / "own" / "worker-3.json").read_text())
        return found

    def update(self, **info: object) -> None:
        self.engine.start_weight_update()
        self.engine.update_weights(info)
        self.engine.finish_weight_update()

    def handed_over(self, version: int) -> str:
        """What the sidecar gives for what the worker says that it holds."""
        return self.sidecar.changes(version, {int(self.init()["weights"], 16)})

    def stage(self, version: int) -> dict[str, str]:
        return self.stage_file(self.handed_over(version), f"s{version}")

    def stage_file(self, path: str, token: str) -> dict[str, str]:
        self.update(stage=path, token=token)
        thread = self.engine._thread
        assert thread is not None
        thread.join(60)
        self.sidecar.sweep()
        assert self.report()["token"] == token
        return self.report()

    def require(self, version: int) -> None:
        """Assert that the model holds what a fresh load would."""
        given = load_file(self.root / f"v{version}" / "model.safetensors")
        qk, experts, embed = (t.cpu() for t in (self.model.qk, self.model.experts.weight, self.model.embed))
        assert torch.equal(qk, torch.cat([given["q"], given["k"]]))
        assert torch.equal(experts, given["experts"].t().reshape(4, 6))
        assert torch.equal(embed, given["embed"].to(embed.dtype))
        assert self.model.head is self.model.embed


@pytest.fixture(params=["address", "torch"] if DEVICE == "cpu" else ["torch"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, vllm: Vllm, tmp_path: Path) -> Iterator[Run]:
    """On a CPU also as if its memory were a device's."""
    if request.param == "torch":
        monkeypatch.setattr("deltackpt.memory.BY_ADDRESS", frozenset())
    with torch.device(DEVICE):
        model = Model()
    made = Run(tmp_path, model)
    yield made
    made.engine._join()


def test_registering_twice_is_registering_once(vllm: Vllm) -> None:
    plugin.register()
    plugin.register()
    assert vllm.registered == ["deltackpt"]


def test_plan_covers_fused_tied_and_packed_weights_and_changes_nothing(run: Run) -> None:
    report = run.init()
    assert report["state"] == "planned"
    assert report["text"].endswith("100.00 % of the checkpoint is here")
    run.require(0)
    # A second sidecar, or one that was restarted, plans nothing again.
    run.model.load_weights = None  # type: ignore[assignment,method-assign]  # would fail
    assert run.init()["state"] == "planned"


def test_version_is_staged_without_a_change_and_applied_in_place(run: Run) -> None:
    run.init()
    where = [p.data_ptr() for p in run.model.parameters()]
    assert run.stage(1)["state"] == "staged"
    run.require(0)
    run.update(apply="s1")
    run.require(1)
    for version in (2, 3):
        run.publish(version)
    run.stage(3)
    run.update(apply="s3")
    run.require(3)
    run.stage(0)
    run.update(apply="s0")
    run.require(0)
    assert where == [p.data_ptr() for p in run.model.parameters()]


def test_version_that_is_there_already_is_staged_and_applied_as_nothing(run: Run) -> None:
    run.init()
    assert run.stage(0)["state"] == "staged"
    run.update(apply="s0")
    run.require(0)


def test_folder_is_loaded_whole_and_followed_on_from_there(run: Run) -> None:
    run.init()
    run.publish(2)
    run.update(path=str(run.root / "v2"))
    run.require(2)
    run.publish(3)
    assert run.stage(3)["state"] == "staged"
    run.update(apply="s3")
    run.require(3)


def test_worker_that_holds_no_version_is_loaded_whole_and_followed_on_from_there(vllm: Vllm, tmp_path: Path) -> None:
    run = Run(tmp_path, Model())
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "v3", other)  # not published
    run.config.model_config.model = "org/model"
    run.engine = plugin.DeltaEngine(None, run.config, "cpu", run.model)
    run.engine._load(load_file(other / "model.safetensors").items())
    assert run.init()["state"] == "planned"
    with pytest.raises(ChainError, match="what the workers hold is no version of"):
        run.stage(1)
    run.update(path=str(tmp_path / "v1"))
    assert run.stage(0)["state"] == "staged"
    run.require(1)
    run.update(apply="s0")
    run.require(0)


def test_cast_is_no_plan_and_the_folder_is_loaded(vllm: Vllm, tmp_path: Path) -> None:
    run = Run(tmp_path, Cast())
    report = run.init()
    assert report["state"] == "refused"
    assert "embed (float16[600, 4]) is computed from the weights" in report["text"]
    run.require(0)
    run.update(path=str(tmp_path / "v1"))
    run.require(1)


def test_changes_that_do_not_begin_with_what_the_worker_holds_are_refused(run: Run) -> None:
    path = run.handed_over(1)
    run.update(path=str(run.root / "v1"))
    report = run.stage_file(path, "s1")
    assert report["state"] == "reload"
    assert "does not hold what the changes begin with" in report["text"]
    with pytest.raises(ConfigError, match="nothing is staged under s1"):
        run.update(apply="s1")
    run.require(1)


def test_stage_of_a_file_that_is_gone_is_reported_and_the_weights_stay(run: Run) -> None:
    path = run.handed_over(1)
    run.sidecar.sweep()
    report = run.stage_file(path, "s1")
    assert (report["state"], report["text"][:19]) == ("failed", "FileNotFoundError: ")
    run.require(0)


def test_apply_that_is_asked_for_too_early_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.handed_over(1)
    go_on = threading.Event()
    whole = plugin.map_changes

    def slow(path: str) -> Any:
        assert go_on.wait(60)
        return whole(path)

    monkeypatch.setattr(plugin, "map_changes", slow)
    run.update(stage=path, token="s1")
    with pytest.raises(ConfigError, match="still being staged"):
        run.update(apply="s1")
    go_on.set()
    assert run.engine._thread is not None
    run.engine._thread.join(60)
    run.update(apply="s1")
    run.require(1)


def test_apply_that_fails_midway_is_mended_through_the_plan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.stage(1)

    def broken(*_: object) -> bool:
        run.model.qk.zero_()
        raise OSError("injected")

    with monkeypatch.context() as patched:
        for memory in ("Host", "Device"):
            patched.setattr(f"deltackpt.memory.{memory}Exchange.run", broken)
        with pytest.raises(OSError, match="injected"):
            run.update(apply="s1")
    assert run.init() == {
        "token": "i", "state": "planned", "text": "an earlier apply did not finish", "weights": None
    }  # fmt: skip
    run.model.load_weights = None  # type: ignore[assignment,method-assign]  # would fail
    run.update(path=str(run.root / "v1"))
    run.require(1)
    run.stage(0)
    run.update(apply="s0")
    run.require(0)


def test_tensors_that_were_put_elsewhere_are_loaded_by_the_engine_and_followed_on(run: Run) -> None:
    run.stage(1)
    run.model.qk = torch.nn.Parameter(torch.zeros_like(run.model.qk), requires_grad=False)
    assert run.init()["state"] == "planned"
    run.update(path=str(run.root / "v1"))
    run.require(1)
    run.stage(0)
    run.update(apply="s0")
    run.require(0)


@pytest.mark.parametrize("info", [{}, {"stage": "x"}])
def test_update_before_a_layout_was_named_is_refused(run: Run, info: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="call init_weight_transfer_engine first"):
        run.engine.update_weights(info)


def test_update_of_unknown_fields_is_refused_as_vllm_expects(run: Run) -> None:
    with pytest.raises(ValueError, match="InitInfo"):
        run.engine.parse_init_info({"layout": "s"})
    with pytest.raises(ValueError, match="UpdateInfo"):
        run.engine.update_weights({"names": []})


def test_adapters_moving_experts_and_drafts_are_refused(run: Run) -> None:
    run.config.lora_config = object()
    with pytest.raises(ConfigError, match="LoRA"):
        run.init()
    run.config.lora_config = None
    run.config.parallel_config.enable_eplb = True
    with pytest.raises(ConfigError, match="EPLB"):
        run.init()
    with pytest.raises(ConfigError, match="draft"):
        run.engine.set_weight_update_target(None, None)
    assert plugin.DeltaEngine.supports_draft_weight_update is False


def test_worker_that_holds_parts_is_told_by_the_folder_that_it_was_started_from(vllm: Vllm, tmp_path: Path) -> None:
    run = Run(tmp_path, Part())
    run.stage(1)
    run.update(apply="s1")
    given = load_file(tmp_path / "v1" / "model.safetensors")
    assert torch.equal(run.model.embed, given["embed"][300:])


def test_worker_that_holds_parts_of_unknown_weights_is_told_by_the_folder_that_it_loads(
    vllm: Vllm, tmp_path: Path
) -> None:
    run = Run(tmp_path, Part())
    run.config.model_config.model = "org/model"
    run.engine = plugin.DeltaEngine(None, run.config, "cpu", run.model)
    report = run.init()
    assert (report["state"], report["weights"]) == ("planned", None)
    assert "1200 of 2400 elements of embed are in this module" in report["text"]
    run.update(path=str(tmp_path / "v1"))
    run.stage(0)
    run.update(apply="s0")
    given = load_file(tmp_path / "v0" / "model.safetensors")
    assert torch.equal(run.model.embed, given["embed"][300:])


def test_weights_that_planning_cannot_put_back_are_loaded_again_before_anything_is_answered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(_folder: str, module: Model, *_: object, **_options: object) -> None:
        module.qk.zero_()
        raise Poisoned("injected: other tensors")

    monkeypatch.setattr(plugin, "cached_plan", plan)
    assert run.init() == {"token": "i", "state": "refused", "text": "injected: other tensors", "weights": None}
    run.require(0)


def test_engine_may_be_started_from_a_link_that_moves(run: Run) -> None:
    (run.root / "current").unlink()
    (run.root / "current").symlink_to("v1")
    assert run.init()["state"] == "planned"
    run.stage(1)
    run.update(apply="s1")
    run.require(1)
