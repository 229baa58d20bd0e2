"""Callbacks of other projects' trainers publish what they train, on one process, every k steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import manifest_of, visible

from deltackpt import Follower, TensorTarget
from deltackpt.callbacks import gathered_weights, lightning_callback, serving_weights, transformers_callback
from deltackpt.errors import ConfigError


class Tied(torch.nn.Module):
    """A model with a tied head, a saved buffer and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def train(model: torch.nn.Module) -> None:
    """One step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0


def steps_of(store: Path) -> list[int | None]:
    return [manifest_of(store, v).step for v in visible(store)]


def follows(store: Path, model: torch.nn.Module) -> None:
    """A sampler gets the newest version, bit for bit."""
    live = {name: torch.zeros_like(t) for name, t in serving_weights(model).items()}
    prepared = Follower(str(store), TensorTarget(live)).prepare(reseed=True)
    assert prepared is not None
    prepared.apply()
    for name, tensor in serving_weights(model).items():
        assert torch.equal(live[name], tensor), name


def test_tied_names_are_published_once_and_unsaved_buffers_never() -> None:
    assert sorted(serving_weights(Tied())) == ["embed.weight", "scale"]


def handler(callback: Any, model: torch.nn.Module, *, main: bool = True) -> tuple[Any, Any]:
    """What transformers' Trainer calls its callbacks through."""
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState

    state = TrainerState(is_world_process_zero=main, global_step=0)
    calls = CallbackHandler([DefaultFlowCallback(), callback], model, None, None, None)
    args = SimpleNamespace(
        logging_strategy="no", eval_strategy="no", save_strategy="no", logging_first_step=False, max_steps=99
    )
    return state, lambda event: getattr(calls, event)(args, state, TrainerControl())


def test_transformers_callback_publishes_begin_every_k_steps_and_end(tmp_path: Path) -> None:
    store, model = tmp_path / "store", Tied()
    state, call = handler(transformers_callback(str(store), every=3, run_id="run"), model)
    call("on_train_begin")
    for _ in range(7):
        train(model)
        state.global_step += 1
        call("on_step_end")
    assert steps_of(store) == [0, 3, 6]
    call("on_train_end")
    assert steps_of(store) == [0, 3, 6, 7]
    follows(store, model)


def test_end_that_was_published_already_is_not_published_again(tmp_path: Path) -> None:
    store, model = tmp_path / "store", Tied()
    state, call = handler(transformers_callback(str(store), every=2, run_id="run"), model)
    call("on_train_begin")
    for _ in range(2):
        train(model)
        state.global_step += 1
        call("on_step_end")
    call("on_train_end")
    assert steps_of(store) == [0, 2]


def test_training_that_is_resumed_goes_on_with_the_stream(tmp_path: Path) -> None:
    store, model = tmp_path / "store", Tied()
    for begin in (0, 2):
        state, call = handler(transformers_callback(str(store), run_id="run"), model)
        state.global_step = begin
        call("on_train_begin")
        for _ in range(2):
            train(model)
            state.global_step += 1
            call("on_step_end")
        call("on_train_end")
    # The second publisher claims the stream, and finds by fingerprint that it holds its head.
    assert [manifest_of(store, v).kind for v in visible(store)] == [
        "full", "delta", "delta", "empty", "empty", "delta", "delta",
    ]  # fmt: skip
    assert steps_of(store)[-2:] == [3, 4]
    follows(store, model)


def test_only_the_main_process_publishes_but_all_take_part(tmp_path: Path) -> None:
    asked = []

    def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        asked.append(1)
        return serving_weights(model)

    state, call = handler(transformers_callback(str(tmp_path / "store"), weights=weights), Tied(), main=False)
    call("on_train_begin")
    state.global_step = 1
    call("on_step_end")
    call("on_train_end")
    assert not (tmp_path / "store").exists()
    assert len(asked) == 2


def test_options_are_those_of_the_publisher(tmp_path: Path) -> None:
    model = Tied()
    _, call = handler(transformers_callback(str(tmp_path / "a"), run_id="mine"), model)
    call("on_train_begin")
    assert manifest_of(tmp_path / "a", 0).run_id == "mine"
    _, call = handler(transformers_callback(str(tmp_path / "a"), run_id="other"), model)
    with pytest.raises(ConfigError, match="written by run 'mine'"):
        call("on_train_begin")
    with pytest.raises(ConfigError, match="every is 0"):
        transformers_callback(str(tmp_path / "b"), every=0)


@pytest.fixture
def alone() -> Any:
    """A process group of this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters_are_refused_by_name_or_gathered(alone: Any, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    plain, model = Tied(), Tied()
    model.load_state_dict(plain.state_dict())
    fully_shard(model, mesh=alone)
    _, call = handler(transformers_callback(str(tmp_path / "no"), run_id="run"), model)
    with pytest.raises(ConfigError, match=r"parameter embed\.weight is sharded.*weights=gathered_weights"):
        call("on_train_begin")
    _, call = handler(transformers_callback(str(tmp_path / "store"), weights=gathered_weights, run_id="run"), model)
    call("on_train_begin")
    follows(tmp_path / "store", plain)


def test_lightning_callback_publishes_by_the_steps_of_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a double: the hooks that Lightning calls, in its order, two batches to a step."""
    import sys

    class Callback:
        pass

    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace())  # type: ignore[arg-type]  # a double
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=Callback))  # type: ignore[arg-type]
    store, module = tmp_path / "store", torch.nn.Module()
    module.model = Tied()
    callback = lightning_callback(str(store), every=2, weights=lambda m: serving_weights(m.model), run_id="run")
    trainer = SimpleNamespace(global_step=0, is_global_zero=True)
    callback.on_train_start(trainer, module)
    for batch in range(10):
        if batch % 2:
            train(module)
            trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, batch)
    callback.on_train_end(trainer, module)
    assert isinstance(callback, Callback)
    assert steps_of(store) == [0, 2, 4, 5]
    follows(store, module.model)


def test_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)  # type: ignore[arg-type]  # what a missing module is
    with pytest.raises(ConfigError, match=r"lightning is not installed .*; pip install lightning"):
        lightning_callback("store")
