"""vLLM's names (and vllm-ascend's: the paths are the same, only classes differ)."""

from probe.compare.names.base import EngineTable, Rule, Unavailable

Q, K, V = (f"layers.{{i}}.self_attn.{name}_proj:output.0" for name in "qkv")
GATE, UP = (f"layers.{{i}}.mlp.{name}_proj:output.0" for name in ("gate", "up"))
ROPE = ("layers.{i}.self_attn.rotary_emb:output.0", "layers.{i}.self_attn.rotary_emb:output.1")
ATTENTION = "layers.{i}.self_attn.o_proj:input.0"


def _same(label: str) -> Rule:
    return Rule((label,), (label,))


TENSORS = (
    _same("embed_tokens:output.0"),
    # a fused add + norm returns (norm, residual) from the second layer on: output.0 is the norm in both cases
    _same("layers.{i}.input_layernorm:output.0"),
    Rule(("layers.{i}.self_attn.qkv_proj:output.0",), (Q, K, V), "split_qkv"),
    _same("layers.{i}.self_attn.q_norm:output.0"),
    _same("layers.{i}.self_attn.k_norm:output.0"),
    _same(ROPE[0]),
    _same(ROPE[1]),
    Rule(("layers.{i}.self_attn.attn:input.0",), (ROPE[0],)),
    Rule(("layers.{i}.self_attn.attn:input.1",), (ROPE[1],)),
    _same(ATTENTION),
    Rule(("layers.{i}.self_attn.attn:output.0",), (ATTENTION,)),
    _same("layers.{i}.self_attn.o_proj:output.0"),
    _same("layers.{i}.post_attention_layernorm:output.0"),
    Rule(("layers.{i}.mlp.gate_up_proj:output.0",), (GATE, UP), "split_gate_up"),
    _same("layers.{i}.mlp.down_proj:input.0"),
    Rule(("layers.{i}.mlp.act_fn:output.0",), ("layers.{i}.mlp.down_proj:input.0",)),
    _same("layers.{i}.mlp.down_proj:output.0"),
    Rule(("layers.{i}.mlp:output.0",), ("layers.{i}.mlp.down_proj:output.0",)),
    # a layer returns its MLP's output and the residual apart; only their sum is what other engines call its output
    Rule(("layers.{i}:output.0", "layers.{i}:output.1"), ("layers.{i}:output.0",), "sum"),
    _same("norm:output.0"),
    Rule(("logits_processor:output.0",), ("lm_head:output.0",), "cut_vocabulary"),
    Rule(("lm_head:output.0",), ("lm_head:output.0",), "cut_vocabulary"),
)

PARAMETERS = (
    Rule(("embed_tokens.weight",), ("embed_tokens.weight",), "cut_vocabulary"),
    _same("layers.{i}.input_layernorm.weight"),
    _same("layers.{i}.post_attention_layernorm.weight"),
    Rule(
        ("layers.{i}.self_attn.qkv_proj.{p}",),
        tuple(f"layers.{{i}}.self_attn.{name}_proj.{{p}}" for name in "qkv"),
        "split_qkv",
    ),
    *(_same(f"layers.{{i}}.self_attn.{name}_proj.{{p}}") for name in "qkvo"),
    _same("layers.{i}.self_attn.q_norm.weight"),
    _same("layers.{i}.self_attn.k_norm.weight"),
    Rule(
        ("layers.{i}.mlp.gate_up_proj.{p}",),
        ("layers.{i}.mlp.gate_proj.{p}", "layers.{i}.mlp.up_proj.{p}"),
        "split_gate_up",
    ),
    *(_same(f"layers.{{i}}.mlp.{name}_proj.{{p}}") for name in ("gate", "up", "down")),
    _same("norm.weight"),
    Rule(("lm_head.weight",), ("lm_head.weight",), "cut_vocabulary"),
)

TABLE = EngineTable(
    engine="vllm",
    tensors=TENSORS,
    parameters=PARAMETERS,
    prefixes=("language_model.model.", "language_model.", "model."),
    unavailable=(
        Unavailable(("layers.{i}:output.0",), "the residual (output.1) of the layer was not stored, so no sum exists"),
        Unavailable(ROPE, "neither rotary_emb nor the inputs of attn were stored"),
    ),
    auxiliary=(
        (r".*:(input\.\d+|kwargs\..*)", "input of a module: compared as the output that feeds it"),
        (r"(.*\.)?(input_layernorm|post_attention_layernorm|norm):output\.1", "residual: compared as a layer's output"),
        (r"layers\.\d+\.self_attn:output\.0", "container: the same tensor as o_proj output.0"),
        (r"layers\.\d+:output\.[01]", "half of the layer's output without the other half"),
    ),
)
