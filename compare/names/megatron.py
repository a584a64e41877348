"""Megatron-core's names: the local spec, the TransformerEngine spec (norms fused into linears) and MindSpeed's."""

from probe.compare.names.base import EngineTable, Rule, Unavailable

LAYER, ATTENTION = "decoder.layers.{i}", "decoder.layers.{i}.self_attention"
Q, K, V = (f"layers.{{i}}.self_attn.{name}_proj:output.0" for name in "qkv")
GATE, UP = (f"layers.{{i}}.mlp.{name}_proj:output.0" for name in ("gate", "up"))
ROPE = ("layers.{i}.self_attn.rotary_emb:output.0", "layers.{i}.self_attn.rotary_emb:output.1")
O_INPUT = "layers.{i}.self_attn.o_proj:input.0"
INPUT_NORM, POST_NORM = "layers.{i}.input_layernorm:output.0", "layers.{i}.post_attention_layernorm:output.0"
FUSED = "norm fused into {} (TransformerEngine spec)"


def _to(native: str, *canonical: str, operation: str = "whole") -> Rule:
    return Rule((native,), canonical, operation)


TENSORS = (
    _to("embedding:output.0", "embed_tokens:output.0"),
    _to("embedding.word_embeddings:output.0", "embed_tokens:output.0"),
    _to(f"{LAYER}.input_layernorm:output.0", INPUT_NORM),
    _to(f"{ATTENTION}.linear_qkv:output.0", Q, K, V, operation="split_qkv_groups"),
    _to(f"{ATTENTION}.q_layernorm:output.0", "layers.{i}.self_attn.q_norm:output.0"),
    _to(f"{ATTENTION}.k_layernorm:output.0", "layers.{i}.self_attn.k_norm:output.0"),
    # rope is a function here, not a module: its results are the inputs of the attention
    _to(f"{ATTENTION}.core_attention:input.0", ROPE[0]),
    _to(f"{ATTENTION}.core_attention:input.1", ROPE[1]),
    _to(f"{ATTENTION}.linear_proj:input.0", O_INPUT),
    _to(f"{ATTENTION}.core_attention:output.0", O_INPUT),
    _to(f"{ATTENTION}.linear_proj:output.0", "layers.{i}.self_attn.o_proj:output.0"),
    _to(f"{LAYER}.pre_mlp_layernorm:output.0", POST_NORM),
    _to(f"{LAYER}.mlp.linear_fc1:output.0", GATE, UP, operation="split_gate_up"),
    _to(f"{LAYER}.mlp.linear_fc2:input.0", "layers.{i}.mlp.down_proj:input.0"),
    _to(f"{LAYER}.mlp.linear_fc2:output.0", "layers.{i}.mlp.down_proj:output.0"),
    _to(f"{LAYER}:output.0", "layers.{i}:output.0"),
    _to("decoder.final_layernorm:output.0", "norm:output.0"),
    _to("output_layer:output.0", "lm_head:output.0", operation="cut_vocabulary"),
)

PARAMETERS = (
    _to("embedding.word_embeddings.weight", "embed_tokens.weight", operation="cut_vocabulary"),
    _to(f"{LAYER}.input_layernorm.weight", "layers.{i}.input_layernorm.weight"),
    _to(f"{ATTENTION}.linear_qkv.layer_norm_weight", "layers.{i}.input_layernorm.weight"),
    _to(
        f"{ATTENTION}.linear_qkv.{{p}}",
        *(f"layers.{{i}}.self_attn.{name}_proj.{{p}}" for name in "qkv"),
        operation="split_qkv_groups",
    ),
    _to(f"{ATTENTION}.q_layernorm.weight", "layers.{i}.self_attn.q_norm.weight"),
    _to(f"{ATTENTION}.k_layernorm.weight", "layers.{i}.self_attn.k_norm.weight"),
    _to(f"{ATTENTION}.linear_proj.{{p}}", "layers.{i}.self_attn.o_proj.{p}"),
    _to(f"{LAYER}.pre_mlp_layernorm.weight", "layers.{i}.post_attention_layernorm.weight"),
    _to(f"{LAYER}.mlp.linear_fc1.layer_norm_weight", "layers.{i}.post_attention_layernorm.weight"),
    _to(
        f"{LAYER}.mlp.linear_fc1.{{p}}",
        *(f"layers.{{i}}.mlp.{name}_proj.{{p}}" for name in ("gate", "up")),
        operation="split_gate_up",
    ),
    _to(f"{LAYER}.mlp.linear_fc2.{{p}}", "layers.{i}.mlp.down_proj.{p}"),
    _to("decoder.final_layernorm.weight", "norm.weight"),
    _to("output_layer.weight", "lm_head.weight", operation="cut_vocabulary"),
)

TABLE = EngineTable(
    engine="megatron",
    tensors=TENSORS,
    parameters=PARAMETERS,
    unavailable=(
        Unavailable(
            (INPUT_NORM,),
            FUSED.format("linear_qkv"),
            identity=f"{LAYER}.input_layernorm",
            parameter=f"{ATTENTION}.linear_qkv.layer_norm_weight",
        ),
        Unavailable(
            (POST_NORM,),
            FUSED.format("linear_fc1"),
            identity=f"{LAYER}.pre_mlp_layernorm",
            parameter=f"{LAYER}.mlp.linear_fc1.layer_norm_weight",
        ),
        Unavailable(ROPE, "the inputs of core_attention were not stored, and rope is a function here, not a module"),
    ),
    auxiliary=(
        (r".*:(input\.\d+|kwargs\..*)", "input of a module: compared as the output that feeds it"),
        (r"decoder\.layers\.\d+\.self_attention:output\.0", "container: the same tensor as linear_proj output.0"),
        (r"decoder\.layers\.\d+\.mlp:output\.0", "container: the same tensor as linear_fc2 output.0"),
        (r"decoder:output\.0", "container: the same tensor as decoder.final_layernorm output.0"),
        (r"embedding\..*:output\.0", "part of the embedding module"),
        (r".*\.(\w+_bda|scale_mask_softmax|attention_dropout|\w*dropout):.*", "inner step of a fused module"),
        (r"rotary_pos_emb:.*", "table of rope angles, one per position and not per token"),
        (r":output\.\d+", "output of the whole model: compared as output_layer"),
    ),
)
