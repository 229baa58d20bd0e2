"""The plug-in for vLLM: a weight-transfer engine named `deltackpt`, one in every worker.

The sidecar (`deltackpt watch --engine`) asks, and hands files over: a layout to plan, changes to map. Changes become
values for live memory in a thread while the engine samples, and are written inside `update_weights`, through a plan
of where vLLM has put each element (`scatter`). Where there is none the worker loads a folder, whole, and says why.
What a worker has to say is in its report, a small file, since vLLM's calls answer with nothing. Runs in vLLM's
environment: torch and numpy are all it needs, and importing it needs neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from deltackpt.changes import map_changes
from deltackpt.digest import fp_hex
from deltackpt.errors import Busy, ConfigError, DeltaError, IntegrityError, Poisoned
from deltackpt.ids import as_tensor
from deltackpt.layout import Layout
from deltackpt.module import PlannedModule, StagedChanges, hold
from deltackpt.scatter import cached_plan

if TYPE_CHECKING:
    import torch

BACKEND = "deltackpt"
T = TypeVar("T")
_END_S = 120.0
"""A stage that is not wanted any more ends by itself: it waits for nothing."""
_STATE = ("*kv_cache*",)
"""Live tensors that are working memory."""


def register() -> None:
    """Tell vLLM of the engine: the entry point in the group `vllm.general_plugins`, called in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "deltackpt.vllm", "DeltaEngine")
    except ValueError:
        return  # it is known already: vLLM calls this several times in a process


@dataclass(frozen=True)
class InitInfo:
    """layout: file that describes the checkpoint; folder: for reports and plans; token: comes back in the report."""

    layout: str
    folder: str
    token: str


@dataclass(frozen=True)
class UpdateInfo:
    """One of three. stage: file of changes to prepare, by a thread; apply: token of what was staged; path: checkpoint
    folder to load as a whole. token: comes back in the report on a stage.
    """

    stage: str | None = None
    apply: str | None = None
    path: str | None = None
    token: str = ""


class DeltaEngine:
    """What a worker of vLLM 0.28 or newer calls. Methods and class attributes are those of its WeightTransferEngine.

    Every failure is raised, and with it the worker's session ends. After a failure while staging the weights are as
    they were; after one while applying or loading they may be anything, until a later apply or load has ended well.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: torch.nn.Module) -> None:
        self._vllm, self._model = vllm_config, model
        # Now: it may be a link that moves.
        self._started_from = os.path.realpath(vllm_config.model_config.model)
        parallel = vllm_config.parallel_config
        self._rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._info: InitInfo | None = None
        self._layout: Layout | None = None
        self._planned: PlannedModule | None = None
        self._why_not = ""
        self._thread: threading.Thread | None = None
        self._staged: tuple[str, StagedChanges] | None = None

    # ------------------------------------------------------------ called by the worker

    def parse_init_info(self, info: dict[str, Any]) -> InitInfo:
        """Read an init_info."""
        return _parse(InitInfo, info)

    def init_transfer_engine(self, info: InitInfo) -> None:
        """Plan, once for a layout; weights are the same afterwards. Reports `planned`, or `refused` with the reason.

        Raises ConfigError for what would go stale: adapters, and experts that are moved while it runs.
        """
        self._require_alone()
        self._join()
        if self._info is None or self._info.layout != info.layout:
            from vllm.config import set_current_vllm_config

            self._info, self._staged, self._planned = None, None, None
            with set_current_vllm_config(self._vllm):
                self._plan(_layout(info.layout), info)
        self._info = info
        if self._planned is None:
            self._report(info.token, "refused", self._why_not)
            return
        text, state = str(self._planned.plan.coverage), None
        try:
            state = self._planned.identify()
            if state is None:
                text = "an earlier apply did not finish"
        except DeltaError as exc:
            text = str(exc)
        self._report(info.token, "planned", text, None if state is None else fp_hex(state))

    def start_weight_update(self) -> None:
        """Nothing: each update is whole."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage, apply or load."""
        info = _parse(UpdateInfo, update_info)
        if self._info is None or self._layout is None:
            raise ConfigError("no layout is named yet; call init_weight_transfer_engine first")
        if info.stage is not None:
            self._join()
            self._staged = None
            self._thread = threading.Thread(target=self._stage, args=(info.stage, info.token), daemon=True)
            self._thread.start()
        elif info.apply is not None:
            self._apply(info.apply)
        elif info.path is not None:
            self._reload(info.path, self._layout)
        else:
            raise ConfigError("an update has neither stage, apply nor path")

    def finish_weight_update(self) -> None:
        """Nothing: each update is whole."""

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """Refuse: a draft model has no part in the store."""
        raise ConfigError("a draft model is not updated by deltackpt; say --draft none to let it stay")

    def reset_weight_update_target(self) -> None:
        """Nothing: there is one target only."""

    def drain_pending(self) -> None:
        """Nothing is pending after an update."""

    def shutdown(self) -> None:
        """Forget what is staged; a thread that stages ends with the process."""
        self._staged = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: the trainer publishes to a store."""
        raise ConfigError("nothing is sent to the engine; publish to the store instead")

    # ------------------------------------------------------------ planning and loading

    def _require_alone(self) -> None:
        if self._vllm.lora_config is not None:
            raise ConfigError("the engine serves LoRA adapters, which belong to the weights before; start it without")
        if getattr(self._vllm.parallel_config, "enable_eplb", False):
            raise ConfigError("the engine moves experts while it runs (EPLB), so that no plan stays true; turn it off")

    def _plan(self, layout: Layout, info: InitInfo) -> None:
        """Make the plan, or note why there is none. A rank with parts of tensors is told what vLLM has loaded."""
        self._layout = layout
        try:
            plan = cached_plan(
                os.path.join(info.folder, "plans"), self._model, self._load, layout,
                setting=self._setting(), state=_STATE, threads=1,
            )  # fmt: skip
            self._planned = PlannedModule(self._model, plan)
        except Poisoned as exc:
            # Planning could not put the weights back. Nothing is answered before this call returns.
            self._load(checkpoint(self._started_from, layout))
            self._why_not = str(exc)
            return
        except DeltaError as exc:
            self._why_not = str(exc)
            return
        if not plan.whole.all():
            # Else it is told by the first load of a folder.
            with contextlib.suppress(DeltaError):
                self._planned.prove(checkpoint(self._started_from, layout))

    def _setting(self) -> str:
        import vllm

        config = self._vllm
        return json.dumps([
            vllm.__version__, str(config.model_config.dtype), str(config.model_config.quantization), self._rank,
            str(config.parallel_config.world_size),
        ])  # fmt: skip

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run vLLM's whole way from checkpoint tensors to a module that is ready."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._vllm.device_config.device_type == "cpu":
            # Experts on a CPU are packed where their kernel is built, and it is built once: a second load would leave
            # them unpacked under a kernel for packed ones. Without a kernel the load is the one of the start.
            for layer in self._model.modules():
                method: Any = getattr(layer, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        initialize_layerwise_reload(self._model)
        try:
            self._model.load_weights(weights)  # type: ignore[operator]  # a method of every model of vLLM
        finally:
            finalize_layerwise_reload(self._model, self._vllm.model_config)

    def _reload(self, path: str, layout: Layout) -> None:
        """Bring the weights to those of a folder: through the plan if it is proven, else by vLLM's own loader."""
        self._join()
        self._staged = None
        planned = self._planned
        if planned is not None and planned.proven:
            held = hold(layout, checkpoint(path, layout))
            try:
                planned.reseed(held.addresses)
            except (ConfigError, Poisoned):
                pass  # vLLM has put other tensors there, or they do not keep what is written
            else:
                return
        self._load(checkpoint(path, layout))
        if planned is not None:
            try:
                planned.prove(checkpoint(path, layout))
            except DeltaError as exc:
                self._planned, self._why_not = None, str(exc)

    # ------------------------------------------------------------ versions

    def _stage(self, path: str, token: str) -> None:
        """Prepare changes and report it: the whole life of a thread."""
        if self._planned is None:
            self._report(token, "reload", self._why_not)
            return
        try:
            staged = self._planned.stage(map_changes(path))
        except (ConfigError, IntegrityError) as exc:
            self._report(token, "reload", str(exc))
        except Exception as exc:  # told to the sidecar, which decides
            self._report(token, "failed", f"{type(exc).__name__}: {exc}")
        else:
            self._staged = (token, staged)
            self._report(token, "staged", "")

    def _apply(self, token: str) -> None:
        thread = self._thread
        if thread is not None and thread.is_alive():
            raise ConfigError("changes are still being staged; wait for the report")
        if self._staged is None or self._staged[0] != token:
            raise ConfigError(f"nothing is staged under {token}; stage it first")
        staged, self._staged = self._staged[1], None
        staged.apply()

    def _join(self) -> None:
        """Wait for the thread to end: nothing may change under it."""
        if self._thread is not None:
            self._thread.join(_END_S)
            if self._thread.is_alive():
                raise Busy(f"changes are still being staged after {_END_S:.0f} s; try again")
            self._thread = None

    def _report(self, token: str, state: str, text: str, weights: str | None = None) -> None:
        """Say so. weights: state fingerprint of what the worker holds; where it is not known, the text says why."""
        assert self._info is not None
        path = report_path(self._info.folder, self._rank)
        os.makedirs(self._info.folder, exist_ok=True)
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump({"token": token, "state": state, "text": text, "weights": weights}, file)
        os.replace(f"{path}.tmp", path)


def report_path(folder: str, rank: int) -> str:
    """Return where a worker writes what it has to say."""
    return os.path.join(folder, f"worker-{rank}.json")


def checkpoint(path: str, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layout from a checkpoint folder, file by file: mapped, so that writes go nowhere."""
    if not os.path.isdir(path):
        raise ConfigError(f"{path} is no local folder; start the engine from a folder that holds a version")
    for name in sorted(os.listdir(path)):
        if not name.endswith(".safetensors"):
            continue
        raw = np.asarray(np.memmap(os.path.join(path, name), np.uint8, "c"))
        begin = 8 + int(raw[:8].view("<u8")[0])
        for key, tensor in json.loads(raw[8:begin].tobytes()).items():
            if key in layout.position:
                first, end = tensor["data_offsets"]
                mine = raw[begin + first : begin + end]
                if mine.ctypes.data % 8:
                    mine = mine.copy()  # torch wants whole elements to be aligned
                yield key, as_tensor(mine, tensor["dtype"], tensor["shape"])


def _layout(path: str) -> Layout:
    tensors = json.loads(Path(path).read_text(encoding="utf-8"))["tensors"]
    return Layout([t[0] for t in tensors], [t[1] for t in tensors], [t[2] for t in tensors])


def _parse(record: type[T], info: dict[str, Any]) -> T:
    try:
        return record(**info)
    except TypeError as exc:
        raise ValueError(f"{record.__name__}: {exc}") from exc
