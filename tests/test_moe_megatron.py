"""Megatron models with experts built from Hugging Face checkpoints, against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import make_checkpoint

from probe.checkpoint import Checkpoint
from probe.errors import CheckpointError
from probe.hooks.engines import megatron_moe
from probe.hooks.runners import megatron_batch, megatron_model

pytestmark = pytest.mark.slow

SEQUENCES = [[5, 9, 33, 101, 7], [150, 2, 2, 88, 61, 30, 12, 190, 4], [17, 42]]
TOLERANCE = 1e-5
"""fp32 logits of these models reach about 4; correct implementations differ by 2e-6 to 3e-6 (measured)."""
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral"},
    "mixtral, three experts per token": {"family": "mixtral", "kv_heads": 1, "num_experts_per_tok": 3},
    "qwen3": {"family": "qwen3_moe"},
    "qwen3, weights not normalised": {"family": "qwen3_moe", "norm_topk_prob": False},
    "qwen3, one expert per token": {"family": "qwen3_moe", "norm_topk_prob": False, "num_experts_per_tok": 1},
    "qwen3, a dense layer": {"family": "qwen3_moe", "mlp_only_layers": [0]},
    "qwen2, shared expert": {"family": "qwen2_moe"},
}


def reference(path: Path) -> Any:
    """Return transformers' model in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def worst_error(path: Path, expected: Any) -> float:
    """Return the largest difference of Megatron's logits, padded and packed, from transformers'."""
    model = megatron_model.build_model(Checkpoint(path), dtype="float32")
    errors = []
    with torch.no_grad():
        wanted = [expected(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES]
    for batch in (megatron_batch.padded(SEQUENCES), megatron_batch.packed(SEQUENCES, 4)):
        logits = megatron_batch.forward(model, batch)
        for index, theirs in enumerate(wanted):
            ours = logits[batch.rows(index)][:, : theirs.shape[-1]]
            errors.append((ours - theirs).abs().max().item())
    return max(errors)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_match_transformers(tmp_path: Path, case: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, **case)
    assert worst_error(tmp_path, reference(tmp_path)) <= TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_stacked_experts_of_a_transformers_5_checkpoint_are_read(tmp_path: Path, family: str) -> None:
    from safetensors.torch import save_file

    make_checkpoint(tmp_path, family)
    model = reference(tmp_path)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert worst_error(tmp_path, model) <= TOLERANCE


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, "qwen3_moe")
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks the parameter model\.layers\.1\.mlp\.experts\.2\.up_proj"):
        megatron_model.build_model(Checkpoint(tmp_path), dtype="float32")


def test_one_entry_of_a_stacked_tensor_is_read_alone(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    make_checkpoint(tmp_path, "mixtral")
    stacked = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    save_file({"stacked": stacked}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert np.array_equal(checkpoint.tensor("stacked", entry=1), stacked[1].float().numpy())


def test_a_replaying_router_is_noticed() -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    class Router:
        router_replay: Any = None

    router = Router()
    assert not megatron_moe.replays(router)
    router.router_replay = RouterReplay()
    try:
        for action in RouterReplayAction:
            router.router_replay.set_router_replay_action(action)
            assert megatron_moe.replays(router) is (action is not RouterReplayAction.RECORD)
        router.router_replay.clear_router_replay_action()
        assert not megatron_moe.replays(router)
    finally:
        RouterReplay.clear_global_router_replay_instances()
