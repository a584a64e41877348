"""Hugging Face transformers' names, which are the canonical ones up to the ``model.`` prefix."""

from probe.compare.names.base import EMBEDDING, FINAL_NORM, LAYER_TENSORS, LOGITS, EngineTable, Rule, Unavailable

ROPE = ("layers.{i}.self_attn.rotary_emb:output.0", "layers.{i}.self_attn.rotary_emb:output.1")


def _same(label: str, operation: str = "whole") -> Rule:
    return Rule((label,), (label,), operation)


TENSORS = (
    _same(EMBEDDING),
    *(_same(label) for label, _ in LAYER_TENSORS if label not in ROPE),
    _same(FINAL_NORM),
    _same(LOGITS, "cut_vocabulary"),
)

PARAMETERS = (
    _same("embed_tokens.weight", "cut_vocabulary"),
    *(_same(f"layers.{{i}}.{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")),
    *(_same(f"layers.{{i}}.self_attn.{name}_proj.{{p}}") for name in "qkvo"),
    *(_same(f"layers.{{i}}.self_attn.{name}_norm.weight") for name in "qk"),
    *(_same(f"layers.{{i}}.mlp.{name}_proj.{{p}}") for name in ("gate", "up", "down")),
    _same("norm.weight"),
    _same("lm_head.weight", "cut_vocabulary"),
)

TABLE = EngineTable(
    engine="transformers",
    tensors=TENSORS,
    parameters=PARAMETERS,
    prefixes=("model.",),
    unavailable=(Unavailable(ROPE, "rope is a function in transformers, not a module"),),
    auxiliary=(
        (r".*:(input\.\d+|kwargs\..*)", "input of a module: compared as the output that feeds it"),
        (r"layers\.\d+\.self_attn:output\.0", "container: the same tensor as o_proj output.0"),
        (r"layers\.\d+\.self_attn:output\.1", "attention probabilities: other engines do not form them"),
        (r"layers\.\d+\.mlp:output\.0", "container: the same tensor as down_proj output.0"),
        (r"layers\.\d+\.mlp\.act_fn:output\.0", "activation of the gate before it is multiplied with up"),
        (r"rotary_emb:.*", "table of rope angles, one per position and not per token"),
    ),
)
