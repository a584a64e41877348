"""Hugging Face transformers' names, which are the canonical ones up to the ``model.`` prefix (and FSDP's: the same)."""

from __future__ import annotations

from probe.compare.names.base import EngineTable, Rule, Unavailable
from probe.compare.names.canonical import EMBEDDING, FINAL_NORM, LAYER_TENSORS, LOGITS
from probe.compare.names.common import (
    AUXILIARY,
    CORRECTION,
    EXPERT_DOWN,
    EXPERT_PARAMETERS,
    EXPERT_TENSORS,
    EXPERTS,
    KNOWN_RULE,
    LAYER_NORMS,
    MLA_PARAMETERS,
    MLP,
    ROPE,
    ROUTER,
    ROUTER_IDS,
    ROUTER_WEIGHTS,
    SHARED,
    SHARED_INPUT,
    SHARED_OUTPUT,
    same,
    to,
)

MOE_BLOCKS = ("layers.{i}.mlp", "layers.{i}.block_sparse_moe")
"""Where a block of experts lies: everywhere in transformers 5, and Mixtral's before it."""
SHARED_NAMES = ("layers.{i}.mlp.shared_expert", "layers.{i}.mlp.shared_experts")
SOFT_CAP = "config.final_logit_softcapping"
_ELSEWHERE = (*ROPE, MLP, EXPERTS, ROUTER, ROUTER_WEIGHTS, ROUTER_IDS, *SHARED, SHARED_INPUT, SHARED_OUTPUT)


def _experts(block: str) -> tuple[Rule, ...]:
    """Return the rules of one block of experts: its router, the routed output and the block's own."""
    gate, routed = f"{block}.gate:output", f"{block}.experts:output.0"
    topk = (f"{gate}.2",)
    return (
        # a router module returns (logits, weights, ids); the plain linear of older versions returns logits
        to(f"{gate}.0", ROUTER, needs=topk),
        to(f"{gate}.0", ROUTER, unless=(f"{gate}.1",)),
        to(f"{gate}.1", ROUTER_WEIGHTS, needs=topk),
        to(f"{gate}.2", ROUTER_IDS, needs=topk),
        to(f"{gate}.0", ROUTER_IDS, ROUTER_WEIGHTS, operation="route", needs=(KNOWN_RULE,), unless=(f"{gate}.1",)),
        to(routed, EXPERTS, needs=(f"{gate}.0",)),
        to(f"{block}:output.0", MLP, needs=(f"{gate}.0",)),
    )


def _shared(module: str) -> tuple[Rule, ...]:
    """Return the rules of a shared expert; its output is taken before the gate that Qwen2-MoE multiplies it with."""
    return (
        *(to(f"{module}.{name}_proj:output.0", label) for name, label in zip(("gate", "up"), SHARED)),
        to(f"{module}.down_proj:input.0", SHARED_INPUT),
        to(f"{module}.down_proj:output.0", SHARED_OUTPUT),
    )


TENSORS = (
    same(EMBEDDING),
    *(same(label) for label, _ in LAYER_TENSORS if label not in _ELSEWHERE and label not in EXPERT_TENSORS),
    *(rule for block in MOE_BLOCKS for rule in _experts(block)),
    *(rule for module in SHARED_NAMES for rule in _shared(module)),
    same(FINAL_NORM),
    # Gemma 2 caps its logits after the head, as every engine does that returns them
    to(":output.logits", LOGITS, operation="cut_vocabulary", needs=(SOFT_CAP,)),
    same(LOGITS, "cut_vocabulary", unless=(SOFT_CAP,)),
)

_OLD_EXPERT = {"w1": EXPERT_PARAMETERS[0], "w3": EXPERT_PARAMETERS[1], "w2": EXPERT_DOWN}

PARAMETERS = (
    same("embed_tokens.weight", "cut_vocabulary"),
    *(same(f"layers.{{i}}.{name}.weight") for name in LAYER_NORMS),
    *(same(f"layers.{{i}}.self_attn.{name}_proj.{{p}}") for name in "qkvo"),
    *(same(f"layers.{{i}}.self_attn.{name}_norm.weight") for name in "qk"),
    *(same(label) for label in MLA_PARAMETERS),
    *(same(f"layers.{{i}}.mlp.{name}_proj.{{p}}") for name in ("gate", "up", "down")),
    *(to(f"{block}.gate.weight", "layers.{i}.mlp.router.weight") for block in MOE_BLOCKS),
    to("layers.{i}.mlp.gate.e_score_correction_bias", CORRECTION),
    to("layers.{i}.mlp.experts.gate_up_proj", *EXPERT_PARAMETERS, operation="split_experts_gate_up"),
    to("layers.{i}.mlp.experts.down_proj", EXPERT_DOWN, operation="split_experts"),
    *(same(label) for label in (*EXPERT_PARAMETERS, EXPERT_DOWN)),
    *(to(f"layers.{{i}}.block_sparse_moe.experts.{{e}}.{name}.weight", label) for name, label in _OLD_EXPERT.items()),
    *(
        to(f"{module}.{name}_proj.{{p}}", f"layers.{{i}}.mlp.shared_expert.{name}_proj.{{p}}")
        for module in SHARED_NAMES
        for name in ("gate", "up", "down")
    ),
    same("layers.{i}.mlp.shared_expert_gate.weight"),
    same("norm.weight"),
    same("lm_head.weight", "cut_vocabulary"),
)

TABLE = EngineTable(
    engine="transformers",
    tensors=TENSORS,
    parameters=PARAMETERS,
    prefixes=("model.language_model.", "language_model.model.", "model."),
    unavailable=(
        Unavailable(ROPE, "rope is a function in transformers, not a module"),
        Unavailable(EXPERT_TENSORS, "the experts of transformers run in one module, without a tensor per expert"),
        Unavailable(
            ("layers.{i}.self_attn.kv_b_proj:output.0",),
            "transformers expands keys and values in a layout without token rows",
            needs=("layers.{i}.self_attn.kv_a_proj_with_mqa:output.0",),
        ),
        Unavailable(
            (LOGITS,),
            "the capped logits (output of the whole model) were not stored, lm_head gives them uncapped",
            needs=(SOFT_CAP,),
        ),
    ),
    auxiliary=(
        *AUXILIARY,
        (r"layers\.\d+\.self_attn:output\.0", "container: the same tensor as o_proj output.0"),
        (r"layers\.\d+\.self_attn:output\.1", "attention probabilities: other engines do not form them"),
        (r"layers\.\d+\.mlp:output\.0", "container: the same tensor as down_proj output.0"),
        (r"layers\.\d+\.mlp\.shared_experts?:output\.0", "container: the same tensor as down_proj output.0"),
        (r"layers\.\d+\.(mlp|block_sparse_moe)\.experts\..*:.*", "inside the experts: one row per routed token"),
        (r"layers\.\d+\.(.+\.)?act_fn:output\.0", "activation of the gate before it is multiplied with up"),
        (r"(layers\.\d+\.self_attn\.)?rotary_emb:.*", "table of rope angles, one per position and not per token"),
        (r"(model|language_model)?:output\..*", "output of the whole model: compared as norm or lm_head"),
    ),
)
