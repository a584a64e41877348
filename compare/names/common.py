"""Parts of the tables that several engines share, as data."""

from __future__ import annotations

from typing import Any

from probe.compare.names.base import Rule
from probe.store.schema import RL

AUXILIARY: tuple[tuple[str, str], ...] = (
    (
        r".*\.(lora_\w+|base_layer|original_module|modules_to_save)(\..*)?:.*",
        "part of a LoRA adapter: compared as the output of the layer that it adapts",
    ),
    (r".*:(input\.\d+(\.\d+)*|kwargs\..*)", "input of a module: compared as the output that feeds it"),
    (r"save\..*:.*", "saved by the user's own script under a name of its own"),
    (rf"{RL}:.*", "numbers of the PPO update: read for the report's ppo section"),
)
"""Why tensors of any engine are not compared, by regular expression on the stripped label."""

Q, K, V = (f"layers.{{i}}.self_attn.{name}_proj:output.0" for name in "qkv")
GATE, UP = (f"layers.{{i}}.mlp.{name}_proj:output.0" for name in ("gate", "up"))
ROPE = ("layers.{i}.self_attn.rotary_emb:output.0", "layers.{i}.self_attn.rotary_emb:output.1")
O_INPUT = "layers.{i}.self_attn.o_proj:input.0"
MLP, EXPERTS = "layers.{i}.mlp:output.0", "layers.{i}.mlp.experts:output.0"
SHARED = tuple(f"layers.{{i}}.mlp.shared_expert.{name}_proj:output.0" for name in ("gate", "up"))
SHARED_INPUT, SHARED_OUTPUT = "layers.{i}.mlp.shared_expert.down_proj:input.0", "layers.{i}.mlp.shared_expert:output.0"
SHARED_GATE = "layers.{i}.mlp.shared_expert_gate:output.0"
ROUTER, ROUTER_WEIGHTS, ROUTER_IDS = (f"layers.{{i}}.mlp.router:{slot}" for slot in ("output.0", "weights", "ids"))
KNOWN_RULE = "config.routing"
"""The fact that a model's ids and weights follow from its router's logits by a rule that is known."""
EXPERT = tuple(f"layers.{{i}}.mlp.experts.{{e}}.{name}_proj:output.0" for name in ("gate", "up", "down"))
EXPERT_INPUT = "layers.{i}.mlp.experts.{e}.down_proj:input.0"
EXPERT_TENSORS = (*EXPERT, EXPERT_INPUT)
MLA_NAMES = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
MLA = tuple(f"layers.{{i}}.self_attn.{name}:output.0" for name in MLA_NAMES)

QKV_PARAMETERS = tuple(f"layers.{{i}}.self_attn.{name}_proj.{{p}}" for name in "qkv")
MLP_PARAMETERS = tuple(f"layers.{{i}}.mlp.{name}_proj.{{p}}" for name in ("gate", "up"))
SHARED_PARAMETERS = tuple(f"layers.{{i}}.mlp.shared_expert.{name}_proj.{{p}}" for name in ("gate", "up"))
EXPERT_PARAMETERS = tuple(f"layers.{{i}}.mlp.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up"))
EXPERT_DOWN = "layers.{i}.mlp.experts.{e}.down_proj.weight"
CORRECTION = "layers.{i}.mlp.router.e_score_correction_bias"
LAYER_NORMS = tuple(f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"))
MLA_PARAMETERS = (
    *(f"layers.{{i}}.self_attn.{name}.{{p}}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
    *(f"layers.{{i}}.self_attn.{name}_a_layernorm.weight" for name in ("q", "kv")),
)


def to(native: str, *canonical: str, operation: str = "whole", **more: Any) -> Rule:
    """Return the rule by which one native label gives canonical ones."""
    return Rule((native,), canonical, operation, **more)


def same(label: str, operation: str = "whole", **more: Any) -> Rule:
    """Return the rule of a label that the engine calls by its canonical name."""
    return Rule((label,), (label,), operation, **more)
