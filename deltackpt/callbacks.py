"""Callbacks for the training loops of transformers and Lightning: publish every k steps, and what came last.

Their packages are imported when a callback is made. A callback publishes what one process holds; it gathers nothing
unless it is told how.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from deltackpt.errors import ConfigError
from deltackpt.publish import Publisher
from deltackpt.store import Store

if TYPE_CHECKING:
    import torch

    from deltackpt.tensors import Params

    Weights: TypeAlias = Callable[[torch.nn.Module], Params]


def serving_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and saved buffers by name, tied ones once, under their first name, as checkpoints have them.

    Views of the model's memory; nothing is cast. Raises ConfigError for parameters that are sharded over processes.
    """
    for name, parameter in model.named_parameters():
        # DTensors (FSDP2, tensor parallelism), flat parameters (FSDP1), emptied ones (ZeRO-3).
        if any(hasattr(parameter, mark) for mark in ("device_mesh", "_is_flat_param", "ds_id")):
            raise ConfigError(
                f"parameter {name} is sharded over processes, and one of them publishes; "
                "give the callback weights=gathered_weights"
            )
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    once = {name for name, _ in model.named_parameters()}
    return {name: t for name, t in model.state_dict().items() if name in once or name not in every}


def gathered_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the same of a model that FSDP shards, gathered in the memory of the main process's host.

    A collective: every process calls it, and all but the main one get nothing.
    """
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    once = {name for name, _ in model.named_parameters()}
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    tensors = {name: t for name, t in found.items() if isinstance(t, torch.Tensor)}
    return {name: t for name, t in tensors.items() if name in once or name not in every}


class _Publishing:
    """What both callbacks do. `weights` is called on every process, since it may be a collective; one publishes."""

    def __init__(self, store: str | Store, every: int, weights: Weights, options: dict[str, Any]) -> None:
        if every < 1:
            raise ConfigError(f"every is {every}; expected a number of steps, at least 1")
        self._store, self._every, self._weights, self._options = store, every, weights, options
        self._publisher: Publisher | None = None
        self._main = False
        self._last: int | None = None

    def begin(self, model: torch.nn.Module, step: int, *, main: bool) -> None:
        """Publish what training begins with."""
        self._main, self._last = main, None
        if main:
            self._publisher = Publisher(self._store, **self._options)
        self._publish(model, step)

    def step(self, model: torch.nn.Module, step: int) -> None:
        """Publish if it is time to; called with one step several times it publishes once."""
        if step % self._every == 0:
            self._publish(model, step)

    def end(self, model: torch.nn.Module, step: int) -> None:
        """Publish what training ends with, and wait for an anchor that is being made."""
        self._publish(model, step)
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            publisher.close()

    def _publish(self, model: torch.nn.Module, step: int) -> None:
        if step == self._last:
            return
        params = self._weights(model)
        if self._publisher is not None:
            self._publisher.publish(params, step=step)
        self._last = step


def transformers_callback(
    store: str | Store, *, every: int = 1, weights: Weights = serving_weights, **options: Any
) -> Any:
    """Return a TrainerCallback for the Trainer of transformers, and for those of TRL, which are made of it.

    It publishes at the beginning of the training, after every k-th step, and at the end. weights: returns what is
    published of a model (names, dtypes and shapes of the serving checkpoint). options: of Publisher.
    """
    base = _base("transformers", "TrainerCallback", "transformers")
    publishing = _Publishing(store, every, weights, options)

    class PublishCallback(base):  # type: ignore[misc, valid-type]  # its package may not be there when types are checked
        """Publishes the model that is being trained."""

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            publishing.begin(model, state.global_step, main=state.is_world_process_zero)

        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            publishing.step(model, state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            publishing.end(model, state.global_step)

    return PublishCallback()


def lightning_callback(
    store: str | Store, *, every: int = 1, weights: Weights = serving_weights, **options: Any
) -> Any:
    """Return a Callback for the Trainer of Lightning; see transformers_callback.

    weights gets the LightningModule, whose names begin with those of its attributes: pass for example
    `lambda module: serving_weights(module.model)`. Steps are those of the optimizer.
    """
    base = _base("lightning.pytorch", "Callback", "lightning")
    publishing = _Publishing(store, every, weights, options)

    class PublishCallback(base):  # type: ignore[misc, valid-type]  # as above
        """Publishes the module that is being trained."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            publishing.begin(pl_module, trainer.global_step, main=trainer.is_global_zero)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            publishing.step(pl_module, trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            publishing.end(pl_module, trainer.global_step)

    return PublishCallback()


def _base(module: str, name: str, package: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as exc:
        raise ConfigError(f"{package} is not installed ({exc}); pip install {package}") from exc
