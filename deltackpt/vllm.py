"""The plug-in for vLLM: a weight-transfer engine named `deltackpt`, one in every worker.

A version is fetched and decoded in a thread while the engine samples, and applied by XOR inside `update_weights`,
through a plan of where vLLM has put each element (`scatter`). Where there is none the worker loads a folder, whole, and
says why. The sidecar (`deltackpt watch --engine`) asks; what a worker has to say is in its report, a small file,
since vLLM's calls answer with nothing. Importing this module needs neither torch nor vLLM.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from deltackpt.errors import Busy, ChainError, ConfigError, DeltaError, Poisoned, StoreError
from deltackpt.follow import Follower, Prepared
from deltackpt.layout import Layout
from deltackpt.planned import PlannedTarget
from deltackpt.scatter import cached_plan

if TYPE_CHECKING:
    import torch

BACKEND = "deltackpt"
T = TypeVar("T")
_END_S = 120.0
"""A stage that is not wanted any more ends with its reads, which have time limits of their own."""
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
    """store: URL of the store; folder: of this host, for reports and plans; token: comes back in the report."""

    store: str
    folder: str
    token: str


@dataclass(frozen=True)
class UpdateInfo:
    """One of three. stage: version to fetch and decode, by a thread; apply: version that was staged; path: checkpoint
    folder to load as a whole. token: comes back in the report on a stage.
    """

    stage: int | None = None
    apply: int | None = None
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
        self._follower: Follower | None = None
        self._target: PlannedTarget | None = None
        self._info: InitInfo | None = None
        self._why_not: str | None = None
        self._thread: threading.Thread | None = None
        self._staged: tuple[int, Prepared | None] | None = None

    # ------------------------------------------------------------ called by the worker

    def parse_init_info(self, info: dict[str, Any]) -> InitInfo:
        """Read an init_info."""
        return _parse(InitInfo, info)

    def init_transfer_engine(self, info: InitInfo) -> None:
        """Plan, once for a store; the weights are the same afterwards. Reports `planned`, or `refused` with the reason.

        Raises ConfigError for what would go stale: adapters, and experts that are moved while it runs.
        """
        self._require_alone()
        if self._info is None or self._info.store != info.store:
            from vllm.config import set_current_vllm_config

            self._join()
            self._info, self._staged, self._target, self._why_not = None, None, None, None
            self._follower = Follower(info.store, _Nothing())
            with set_current_vllm_config(self._vllm):
                self._plan(self._follower, info)
        self._info = info
        if self._target is None:
            self._report(info.token, "refused", self._why_not or "")
        else:
            self._report(info.token, "planned", str(self._target.plan.coverage))

    def start_weight_update(self) -> None:
        """Nothing: each update is whole."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage, apply or load."""
        info = _parse(UpdateInfo, update_info)
        if self._info is None or self._follower is None:
            raise ConfigError("no store is named yet; call init_weight_transfer_engine first")
        if info.stage is not None:
            self._join()
            self._staged = None
            self._thread = threading.Thread(target=self._stage, args=(info.stage, info.token), daemon=True)
            self._thread.start()
        elif info.apply is not None:
            self._apply(info.apply)
        elif info.path is not None:
            self._reload(info.path)
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

    def _plan(self, follower: Follower, info: InitInfo) -> None:
        """Make the plan, or note why there is none, and prove it on what the engine has loaded."""
        follower.reader.load()
        head = follower.reader.head
        if head is None:
            raise ConfigError(f"{info.store} has no version yet; publish one first")
        layout = follower.reader.layout(head.manifest.layout)
        try:
            plan = cached_plan(
                os.path.join(info.folder, "plans"), self._model, self._load, layout,
                setting=self._setting(), state=_STATE, threads=1,
            )  # fmt: skip
            target = PlannedTarget(self._model, plan)
            try:
                target.open(follower.reader)
            except (ChainError, ConfigError):
                # No version of the store, or parts of tensors.
                target.prove(checkpoint(self._started_from, layout))
        except StoreError:
            raise  # the next call may see more
        except Poisoned as exc:
            # Planning could not put the weights back. Nothing is answered before this call returns.
            self._load(checkpoint(self._started_from, layout))
            self._why_not = str(exc)
            return
        except DeltaError as exc:
            self._why_not = str(exc)
            return
        self._target = follower.target = target

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

    def _reload(self, path: str) -> None:
        self._join()
        self._staged = None
        assert self._follower is not None
        head = self._follower.reader.head
        assert head is not None
        layout = self._follower.reader.layout(head.manifest.layout)
        self._load(checkpoint(path, layout))
        if self._target is not None and self._target.plan.layout.digest == layout.digest:
            self._target.prove(checkpoint(path, layout))
        elif self._target is not None:
            self._info = None  # other tensors than before: plan again

    # ------------------------------------------------------------ versions

    def _stage(self, version: int, token: str) -> None:
        """Prepare a version and report it: the whole life of a thread."""
        follower = self._follower
        assert follower is not None
        if self._target is None:
            self._report(token, "reload", self._why_not or "")
            return
        try:
            # What the worker holds may be newer than all that was read of the store so far.
            follower.reader.refresh()
            prepared = follower.prepare(version)
        except (ChainError, ConfigError) as exc:
            self._report(token, "reload", str(exc))
        except Exception as exc:  # told to the sidecar, which decides
            self._report(token, "failed", f"{type(exc).__name__}: {exc}")
        else:
            self._staged = (version, prepared)
            self._report(token, "staged", "")

    def _apply(self, version: int) -> None:
        thread = self._thread
        if thread is not None and thread.is_alive():
            raise ConfigError(f"version {version} is still being staged; wait for the report")
        if self._staged is None or self._staged[0] != version:
            raise ConfigError(f"version {version} is not staged; stage it first")
        prepared, self._staged = self._staged[1], None
        if prepared is not None:
            prepared.apply()

    def _join(self) -> None:
        """Wait for the thread to end: nothing may change under it."""
        if self._thread is not None:
            self._thread.join(_END_S)
            if self._thread.is_alive():
                raise Busy(f"a version is still being staged after {_END_S:.0f} s; try again")
            self._thread = None

    def _report(self, token: str, state: str, text: str) -> None:
        assert self._info is not None
        path = report_path(self._info.folder, self._rank)
        os.makedirs(self._info.folder, exist_ok=True)
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump({"token": token, "state": state, "text": text}, file)
        os.replace(f"{path}.tmp", path)


class _Nothing:
    """The target of a follower before there is a plan."""

    settled = True

    def open(self, reader: object, *, reseed: bool = False) -> int | None:
        raise ConfigError("there is no plan; load a folder")

    def stage(self, reader: object, plan: object) -> Any:
        raise ConfigError("there is no plan; load a folder")

    def close(self) -> None:
        pass


def report_path(folder: str, rank: int) -> str:
    """Return where a worker writes what it has to say."""
    return os.path.join(folder, f"worker-{rank}.json")


def checkpoint(path: str, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layout from a checkpoint folder, file by file."""
    from safetensors import safe_open

    if not os.path.isdir(path):
        raise ConfigError(f"{path} is no local folder; start the engine from a folder that holds a version")
    for name in sorted(os.listdir(path)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(path, name), "pt") as file:
                for key in file.keys():  # noqa: SIM118  # no dict
                    if key in layout.position:
                        yield key, file.get_tensor(key)


def _parse(record: type[T], info: dict[str, Any]) -> T:
    try:
        return record(**info)
    except TypeError as exc:
        raise ValueError(f"{record.__name__}: {exc}") from exc
