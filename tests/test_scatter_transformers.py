"""Scatter plans for models of transformers, at toy size, whose loader renames, stacks and ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltackpt.follow import Follower
from deltackpt.layout import Layout
from deltackpt.live import Live
from deltackpt.planned import PlannedTarget
from deltackpt.publish import Publisher
from deltackpt.scatter import make_plan
from deltackpt.tensors import describe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

SMALL = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 4,
}  # fmt: skip
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}

MODELS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "gemma2": {},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "gpt_oss": FEW,
    "jamba": {"num_experts": 4, "mamba_dt_rank": 4},
    "llama": {},
    "mamba": {"state_size": 4},
    "mixtral": FEW,
    "olmo2": {},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "phi3": {"pad_token_id": 0},
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    "starcoder2": {},
}  # fmt: skip

CASES = [(name, tied) for name in MODELS for tied in ((False, True) if name in ("llama", "qwen2", "gpt2") else (None,))]


def fresh_load(model: Any, weights: dict[str, Any]) -> Any:
    """What transformers makes of a checkpoint."""
    made = type(model).from_pretrained(None, config=model.config, state_dict=dict(weights), dtype=torch.bfloat16)
    return made.eval()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(1, 7)[None], use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "tied", "memory"),
    [
        *((*case, "address") for case in CASES),
        *((name, tied, "torch") for name, tied in (("llama", True), ("gpt2", False), ("qwen3_moe", None))),
    ],
)
def test_live_model_follows_to_the_logits_of_a_fresh_load(
    name: str, tied: bool | None, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory == "torch":
        monkeypatch.setattr("deltackpt.memory.BY_ADDRESS", frozenset())
    options = SMALL | MODELS[name] | ({} if tied is None else {"tie_word_embeddings": tied})
    config = transformers.AutoConfig.for_model(name, **options)
    torch.manual_seed(1)
    random = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    random.save_pretrained(tmp_path / "first")
    first = load_file(tmp_path / "first" / "model.safetensors")
    model = fresh_load(random, first)
    made = np.random.default_rng(1)
    second = {n: w.clone() for n, w in first.items()}
    for weight in second.values():
        weight += torch.from_numpy(made.random(tuple(weight.shape)) < 0.2).to(weight.dtype) * 0.25
    with Publisher(str(tmp_path / "store"), anchors=False, run_id="r") as publisher:
        publisher.publish(first)
        publisher.publish(second)

    def load(weights: Any) -> None:
        model.load_state_dict(fresh_load(model, dict(weights)).state_dict())

    described = [describe(n, w) for n, w in first.items()]
    plan = make_plan(model, load, Layout(list(first), [d for d, _ in described], [s for _, s in described]))
    assert plan.whole.all()
    assert plan.coverage.planned + plan.coverage.constant == plan.coverage.live
    prepared = Follower(str(tmp_path / "store"), PlannedTarget(model, plan)).prepare()
    assert prepared is not None
    assert prepared.previous == 0
    before = logits(model)
    prepared.apply()
    expected = fresh_load(model, second)
    assert torch.equal(logits(model), logits(expected))
    assert not torch.equal(logits(model), before)
    assert [r.read().tobytes() for r in Live(model).regions] == [r.read().tobytes() for r in Live(expected).regions]
