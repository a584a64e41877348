"""Replays of routers and experts: healthy models of several families stay in their bands, and each fault is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, SETTINGS
from replay_tools import Captured, in_dtype, run_model

from probe.compare.replay.base import Recipe
from probe.compare.replay.explain import bands_of, explain, read_best
from probe.compare.replay.figures import BROKEN_EXCESS
from probe.compare.replay.recipes import RECIPES

LAYER, LENGTH, EXPERTS = 1, 64, 8
DTYPES = ("float32", "bfloat16")
BLOCK = "layers.{i}.mlp"
LABELS = {
    "logits": f"{BLOCK}.router:output.0",
    "ids": f"{BLOCK}.router:ids",
    "weights": f"{BLOCK}.router:weights",
    "experts": f"{BLOCK}.experts:output.0",
    "block": f"{BLOCK}:output.0",
    "shared": f"{BLOCK}.shared_expert:output.0",
    "shared input": f"{BLOCK}.shared_expert.down_proj:input.0",
}
NAMES = (
    *(("mlp.gate:output.0", "mlp.router:output.0"), ("mlp.gate:output.1", "mlp.router:weights")),
    *(("mlp.gate:output.2", "mlp.router:ids"), ("shared_experts.", "shared_expert.")),
    ("shared_expert.down_proj:output.0", "shared_expert:output.0"),
)
MODULES = {
    "post_attention_layernorm": ("out",),
    "mlp.gate": ("out.0", "out.1", "out.2"),
    "mlp.experts": ("out",),
    "mlp": ("out",),
    "mlp.shared_expert_gate": ("out",),
    **{f"mlp.{shared}.{name}": slots for shared in ("shared_expert", "shared_experts") for name, slots in (
        ("gate_proj", ("out",)), ("up_proj", ("out",)), ("down_proj", ("in", "out")))},
}  # fmt: skip


@cache
def model(family: str, **config: Any) -> Any:
    """Return a small random mixture of experts."""
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in FAMILIES[family])
    sizes = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYER + 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    settings = {**sizes, **SETTINGS[family]}
    settings |= {key: EXPERTS for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in settings}
    settings["num_experts_per_tok"] = 3
    built = model_class(config_class(**{**settings, **config})).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5, generator=generator)
        for name, buffer in built.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0, 0.3, generator=generator)
    return built


def parameters(built: Any) -> dict[str, np.ndarray]:
    """Return the weights under canonical names, one expert's after the other."""
    result = {}
    for name, values in [*built.named_parameters(), *built.named_buffers()]:
        array, name = values.detach().float().numpy().copy(), name.removeprefix("model.")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(array):
                for part, half in zip(("gate", "up"), np.split(both, 2)):
                    result[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(array):
                result[name.replace("down_proj", f"{expert}.down_proj.weight")] = down
        else:
            result[name.replace("mlp.gate.", "mlp.router.").replace("shared_experts.", "shared_expert.")] = array
    return result


def run(built: Any, dtype: str, break_it: Callable[[Any], Any] | None = None) -> Captured:
    """Run a model, perhaps with a faulty second layer; the weights kept are those of the healthy one."""
    other = in_dtype(built, dtype)
    weights = parameters(other)
    if break_it is not None:
        with torch.no_grad():
            break_it(other.model.layers[LAYER].mlp)  # type: ignore[union-attr,index]
    ids = torch.randint(0, 200, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    found = run_model(other, ids, MODULES)
    renamed = {}
    for label, values in found.tensors.items():
        for native, canonical in NAMES:
            label = label.replace(native, canonical)
        renamed[label] = values
    found.tensors, found.parameters = renamed, weights
    return found


def recipe_of(what: str) -> Recipe:
    """Return the recipe of a tensor."""
    return RECIPES[LABELS[what]][0]


def excess(found: Captured, what: str) -> float:
    """Return by how many times a tensor of the second layer reaches its bands."""
    recipe = recipe_of(what)
    reading = read_best(recipe, found.context(recipe, LAYER))
    assert reading is not None
    return reading.figures.excess(bands_of(recipe, found.computed_in))


def causes(found: Captured, what: str) -> list[tuple[str, str]]:
    """Return the explanations of a tensor, best first."""
    recipe = recipe_of(what)
    context = found.context(recipe, LAYER)
    reading = read_best(recipe, context)
    assert reading is not None
    return [(entry.cause, entry.text) for entry in explain(recipe, context, reading)]


HEALTHY = {
    "mixtral": {},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_moe": {},
    "deepseek_v3": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "kv_lora_rank": 16},
}
SHARING = ("qwen2_moe", "deepseek_v3")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", HEALTHY)
def test_healthy_experts_are_within_their_bands(family: str, dtype: str) -> None:
    found = run(model(family, **HEALTHY[family]), dtype)
    for what in LABELS:
        if family in SHARING or "shared" not in what:
            assert excess(found, what) < 1, what


def test_ids_that_rounding_may_exchange_are_no_fault() -> None:
    found = run(model("qwen3_moe"), "bfloat16")
    logits, ids = (found.tensors[LABELS[what].replace("{i}", str(LAYER))] for what in ("logits", "ids"))
    chosen = np.sort(logits, axis=1)[:, -3]
    row = int(np.argmin(chosen - np.sort(logits, axis=1)[:, -4]))
    order = np.argsort(-logits[row])
    logits[row, order[3]] = logits[row, order[2]] * (1 - 2.0**-9)  # one rounding below the last one chosen
    ids[row][ids[row] == order[2]] = order[3]
    assert excess(found, "ids") < 1
    other = (row + 1) % len(ids)
    ids[other][ids[other] == np.argsort(-logits[other])[0]] = np.argsort(logits[other])[0]
    assert excess(found, "ids") > BROKEN_EXCESS


def swap_experts(block: Any) -> None:
    """Exchange the weights of two experts."""
    for weight in (block.experts.gate_up_proj, block.experts.down_proj):
        weight[[1, 2]] = weight[[2, 1]].clone()


def swap_gate_up(block: Any) -> None:
    """Exchange gate and up of all experts."""
    half = block.experts.gate_up_proj.shape[1] // 2
    block.experts.gate_up_proj.copy_(block.experts.gate_up_proj.roll(half, 1))


def one_stale(block: Any) -> None:
    """Give one expert the weights of another."""
    for weight in (block.experts.gate_up_proj, block.experts.down_proj):
        weight[1] = weight[2]


def without_shared(block: Any) -> None:
    """Leave the shared expert out of the sum, which its own modules do not show."""
    shared = getattr(block, "shared_expert", None) or block.shared_experts
    block.forward = lambda hidden, forward=block.forward: forward(hidden) - _added(block, shared, hidden)


def _added(block: Any, shared: Any, hidden: Any) -> Any:
    gate = getattr(block, "shared_expert_gate", None)
    flat = hidden.reshape(-1, hidden.shape[-1])
    output = shared(flat) * (torch.sigmoid(gate(flat)) if gate is not None else 1.0)
    return output.reshape(hidden.shape)


def set_router(**attributes: Any) -> Callable[[Any], None]:
    """Return a fault of the router's settings."""

    def change(block: Any) -> None:
        for name, value in attributes.items():
            setattr(block.gate, name, value)

    return change


def no_bias(block: Any) -> None:
    """Forget the bias that corrects the choice."""
    block.gate.e_score_correction_bias.zero_()


FAULTS: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "two experts swapped": ("qwen3_moe", "experts", swap_experts, "expert-swapped"),
    "an expert's weights of another": ("qwen3_moe", "experts", one_stale, "expert-swapped"),
    "gate and up swapped": ("qwen2_moe", "experts", swap_gate_up, "gate-up-swapped"),
    "no shared expert": ("qwen2_moe", "block", without_shared, "shared-expert-missing"),
    "no shared expert, no gate": ("deepseek_v3", "block", without_shared, "shared-expert-missing"),
    "not normalised": ("qwen3_moe", "weights", set_router(norm_topk_prob=False), "norm-topk"),
    "normalised": ("qwen2_moe", "weights", set_router(norm_topk_prob=True), "norm-topk"),
    "no scaling factor": ("deepseek_v3", "weights", set_router(routed_scaling_factor=1.0), "router-scale"),
    "no correction bias": ("deepseek_v3", "ids", no_bias, "router-bias"),
    "all groups": ("deepseek_v3", "ids", set_router(topk_group=4), "router-fault"),
    "router's weight scaled": ("qwen3_moe", "logits", lambda block: block.gate.weight.mul_(1.05), "scale"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_experts_are_named(name: str, dtype: str) -> None:
    family, what, break_it, cause = FAULTS[name]
    found = run(model(family, **HEALTHY[family]), dtype, break_it)
    assert excess(found, what) > BROKEN_EXCESS
    assert causes(found, what)[0][0] == cause
    for other in ("logits", "ids", "weights", "experts", "block"):
        if other != what and not (what == "experts" and other == "block"):
            assert excess(found, other) < 1, other
