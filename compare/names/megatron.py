"""Megatron-core's names: the local spec, the TransformerEngine spec (norms fused into linears) and MindSpeed's.

MindSpeed replaces classes and keeps attribute names, so that its modules are found by the same paths.
"""

from __future__ import annotations

from probe.compare.names.base import EngineTable, Rule, Unavailable
from probe.compare.names.canonical import EMBEDDING, FINAL_NORM, LOGITS
from probe.compare.names.common import (
    AUXILIARY,
    CORRECTION,
    EXPERT,
    EXPERT_DOWN,
    EXPERT_INPUT,
    EXPERT_PARAMETERS,
    EXPERTS,
    GATE,
    MLA,
    MLA_PARAMETERS,
    MLP,
    MLP_PARAMETERS,
    O_INPUT,
    QKV_PARAMETERS,
    ROPE,
    ROUTER,
    ROUTER_IDS,
    ROUTER_WEIGHTS,
    SHARED,
    SHARED_GATE,
    SHARED_INPUT,
    SHARED_OUTPUT,
    SHARED_PARAMETERS,
    UP,
    K,
    Q,
    V,
    to,
)

LAYER, ATTENTION = "decoder.layers.{i}", "decoder.layers.{i}.self_attention"
INPUT_NORM, POST_NORM = "layers.{i}.input_layernorm:output.0", "layers.{i}.post_attention_layernorm:output.0"
LATENT = (f"{ATTENTION}.linear_kv_down_proj:output.0",)
MOE = (f"{LAYER}.mlp.router:output.0",)
SHARED_HERE = (f"{LAYER}.mlp.shared_experts.linear_fc2:output.0",)
FUSED = {
    INPUT_NORM: (f"{LAYER}.input_layernorm", (f"{ATTENTION}.linear_qkv",)),
    POST_NORM: (f"{LAYER}.pre_mlp_layernorm", (f"{LAYER}.mlp.linear_fc1",)),
    MLA[1]: (f"{ATTENTION}.q_layernorm", (f"{ATTENTION}.linear_q_up_proj",)),
    MLA[4]: (f"{ATTENTION}.kv_layernorm", (f"{ATTENTION}.linear_kv_up_proj",)),
}
"""Canonical norm -> its module under the local spec, and the linears that TransformerEngine fuses it into."""
NEITHER_RMS_NOR_PLAIN = ("config.layernorm_zero_centered_gamma", "config.normalization=LayerNorm")


def _norm(label: str, module: str, linears: tuple[str, ...], *, unless: tuple[str, ...] = ()) -> tuple[Rule, ...]:
    """Return the rules of one norm: its module, or the fused linear's input and ``layer_norm_weight``.

    Under the TransformerEngine spec the module is an IdentityOp, whose output is the un-normed residual.
    """
    fused = tuple(f"{linear}.layer_norm_weight" for linear in linears)
    recomputed = tuple(
        to(
            *(f"{linear}:input.0", label),
            operation="rms_norm",
            parameters=(f"{linear}.layer_norm_weight",),
            needs=("config.eps",),
            unless=(f"{linear}.layer_norm_bias", *NEITHER_RMS_NOR_PLAIN),
        )
        for linear in linears
    )
    return (to(f"{module}:output.0", label, unless=(f"identity {module}", *fused, *unless)), *recomputed)


TENSORS = (
    to("embedding:output.0", EMBEDDING),
    to("embedding.word_embeddings:output.0", EMBEDDING),
    *_norm(INPUT_NORM, *FUSED[INPUT_NORM]),
    to(f"{ATTENTION}.linear_qkv:output.0", Q, K, V, operation="split_qkv_groups"),
    to(f"{ATTENTION}.q_layernorm:output.0", "layers.{i}.self_attn.q_norm:output.0", unless=LATENT),
    to(f"{ATTENTION}.k_layernorm:output.0", "layers.{i}.self_attn.k_norm:output.0", operation="kv_heads"),
    # multi-head latent attention
    to(f"{ATTENTION}.linear_q_proj:output.0", Q),
    to(f"{ATTENTION}.linear_q_down_proj:output.0", MLA[0]),
    *(
        Rule(rule.native, rule.canonical, rule.operation, rule.parameters, (*rule.needs, *LATENT), rule.unless)
        for label in (MLA[1], MLA[4])
        for rule in _norm(label, *FUSED[label])
    ),
    to(f"{ATTENTION}.linear_q_up_proj:output.0", MLA[2]),
    to(f"{ATTENTION}.linear_kv_down_proj:output.0", MLA[3]),
    to(f"{ATTENTION}.linear_kv_up_proj:output.0", MLA[5]),
    # rope is a function here, not a module: its results are the inputs of the attention
    to(f"{ATTENTION}.core_attention:input.0", ROPE[0], unless=LATENT),
    to(f"{ATTENTION}.core_attention:input.1", ROPE[1], operation="kv_heads", unless=LATENT),
    to(f"{ATTENTION}.linear_proj:input.0", O_INPUT),
    to(f"{ATTENTION}.core_attention:output.0", O_INPUT),
    to(f"{ATTENTION}.linear_proj:output.0", "layers.{i}.self_attn.o_proj:output.0"),
    *_norm(POST_NORM, *FUSED[POST_NORM]),
    to(f"{LAYER}.mlp.linear_fc1:output.0", GATE, UP, operation="split_gate_up"),
    to(f"{LAYER}.mlp.linear_fc2:input.0", "layers.{i}.mlp.down_proj:input.0"),
    to(f"{LAYER}.mlp.linear_fc2:output.0", "layers.{i}.mlp.down_proj:output.0"),
    # mixture of experts; the block's output is the routed experts' sum where no shared expert is added to it
    to(f"{LAYER}.mlp.router:logits.0", ROUTER),
    to(f"{LAYER}.mlp.router:output.1", ROUTER_IDS, operation="chosen_experts"),
    Rule(tuple(f"{LAYER}.mlp.router:output.{n}" for n in (0, 1)), (ROUTER_WEIGHTS,), "chosen_weights"),
    to(f"{LAYER}.mlp.shared_experts.linear_fc1:output.0", *SHARED, operation="split_gate_up"),
    to(f"{LAYER}.mlp.shared_experts.linear_fc2:input.0", SHARED_INPUT),
    to(f"{LAYER}.mlp.shared_experts.linear_fc2:output.0", SHARED_OUTPUT),
    to(f"{LAYER}.mlp.experts.local_experts.{{e}}.linear_fc1:output.0", *EXPERT[:2], operation="split_gate_up"),
    to(f"{LAYER}.mlp.experts.local_experts.{{e}}.linear_fc2:input.0", EXPERT_INPUT),
    to(f"{LAYER}.mlp.experts.local_experts.{{e}}.linear_fc2:output.0", EXPERT[2]),
    to(f"{LAYER}.mlp:combined.0", EXPERTS),
    to(f"{LAYER}.mlp:output.0", EXPERTS, needs=MOE, unless=SHARED_HERE),
    to(f"{LAYER}.mlp:output.0", MLP, needs=MOE),
    to(f"{LAYER}:output.0", "layers.{i}:output.0"),
    to("decoder.final_layernorm:output.0", FINAL_NORM),
    to("output_layer:output.0", LOGITS, operation="cut_vocabulary"),
)

_LATENT_PARAMETERS = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")

PARAMETERS = (
    to("embedding.word_embeddings.weight", "embed_tokens.weight", operation="cut_vocabulary"),
    to(f"{LAYER}.input_layernorm.weight", "layers.{i}.input_layernorm.weight"),
    to(f"{ATTENTION}.linear_qkv.layer_norm_weight", "layers.{i}.input_layernorm.weight"),
    to(f"{ATTENTION}.linear_qkv.{{p}}", *QKV_PARAMETERS, operation="split_qkv_groups"),
    to(f"{ATTENTION}.linear_q_proj.{{p}}", QKV_PARAMETERS[0]),
    *(to(f"{ATTENTION}.{name}.{{p}}", label) for name, label in zip(_LATENT_PARAMETERS, MLA_PARAMETERS)),
    to(f"{ATTENTION}.q_layernorm.weight", MLA_PARAMETERS[4], needs=(f"{ATTENTION}.linear_q_down_proj.weight",)),
    to(f"{ATTENTION}.linear_q_up_proj.layer_norm_weight", MLA_PARAMETERS[4]),
    to(f"{ATTENTION}.kv_layernorm.weight", MLA_PARAMETERS[5]),
    to(f"{ATTENTION}.linear_kv_up_proj.layer_norm_weight", MLA_PARAMETERS[5]),
    to(
        f"{ATTENTION}.q_layernorm.weight",
        "layers.{i}.self_attn.q_norm.weight",
        unless=(f"{ATTENTION}.linear_q_down_proj.weight",),
    ),
    to(f"{ATTENTION}.k_layernorm.weight", "layers.{i}.self_attn.k_norm.weight"),
    to(f"{ATTENTION}.linear_proj.{{p}}", "layers.{i}.self_attn.o_proj.{p}"),
    to(f"{LAYER}.pre_mlp_layernorm.weight", "layers.{i}.post_attention_layernorm.weight"),
    to(f"{LAYER}.mlp.linear_fc1.layer_norm_weight", "layers.{i}.post_attention_layernorm.weight"),
    to(f"{LAYER}.mlp.linear_fc1.{{p}}", *MLP_PARAMETERS, operation="split_gate_up"),
    to(f"{LAYER}.mlp.linear_fc2.{{p}}", "layers.{i}.mlp.down_proj.{p}"),
    to(f"{LAYER}.mlp.router.weight", "layers.{i}.mlp.router.weight"),
    to(f"{LAYER}.mlp.router.expert_bias", CORRECTION),
    # SequentialMLP has a module per expert, TransformerEngine's grouped linear a numbered parameter per expert
    *(
        rule
        for one, two in (
            ("local_experts.{e}.linear_fc1.weight", "local_experts.{e}.linear_fc2.weight"),
            ("linear_fc1.weight{e}", "linear_fc2.weight{e}"),
        )
        for rule in (
            to(f"{LAYER}.mlp.experts.{one}", *EXPERT_PARAMETERS, operation="split_gate_up"),
            to(f"{LAYER}.mlp.experts.{two}", EXPERT_DOWN),
        )
    ),
    to(f"{LAYER}.mlp.shared_experts.linear_fc1.{{p}}", *SHARED_PARAMETERS, operation="split_gate_up"),
    to(f"{LAYER}.mlp.shared_experts.linear_fc2.{{p}}", "layers.{i}.mlp.shared_expert.down_proj.{p}"),
    to(f"{LAYER}.mlp.shared_experts.gate_weight", "layers.{i}.mlp.shared_expert_gate.weight"),
    to("decoder.final_layernorm.weight", "norm.weight"),
    to("output_layer.weight", "lm_head.weight", operation="cut_vocabulary"),
)


def _fused(label: str) -> tuple[Unavailable, ...]:
    module, linears = FUSED[label]
    reason = (
        "norm fused into {} (TransformerEngine spec), and its input, its layer_norm_weight or the model's eps was not "
        "stored to recompute it"
    )
    first = linears[0]
    name = first.rpartition(".")[2]
    return tuple(
        Unavailable((label,), reason.format(name), needs=(fact,))
        for fact in (f"{first}.layer_norm_weight", f"identity {module}")
    )


TABLE = EngineTable(
    engine="megatron",
    tensors=TENSORS,
    parameters=PARAMETERS,
    unavailable=(
        *(entry for label in FUSED for entry in _fused(label)),
        Unavailable(
            ROPE,
            "rope covers a part of each head in multi-head latent attention, and is a function here, not a module",
            needs=LATENT,
        ),
        Unavailable(ROPE, "the inputs of core_attention were not stored, and rope is a function here, not a module"),
        Unavailable((EXPERTS,), "Megatron adds the shared expert inside its block of experts", needs=SHARED_HERE),
        Unavailable((SHARED_GATE,), "Megatron applies the shared expert's gate in a function, not a module"),
        Unavailable(
            (*EXPERT, EXPERT_INPUT), "Megatron's grouped experts run in one kernel, without a tensor per expert"
        ),
    ),
    auxiliary=(
        *AUXILIARY,
        (r"decoder\.layers\.\d+\.self_attention:output\.0", "container: the same tensor as linear_proj output.0"),
        (r"decoder\.layers\.\d+\.mlp:output\.0", "container: the same tensor as linear_fc2 output.0"),
        (r"decoder\.layers\.\d+\.mlp\.router:output\.[01]", "dense probabilities and map of the experts used"),
        (r"decoder\.layers\.\d+\.mlp\.shared_experts:output\.0", "shared expert after its gate"),
        (r"decoder\.layers\.\d+\.mlp\.(experts|token_dispatcher)\b.*:.*", "inside the experts: in routed order"),
        (r"decoder:output\.0", "container: the same tensor as decoder.final_layernorm output.0"),
        (r"embedding\..*:output\.0", "part of the embedding module"),
        (r".*\.(\w+_bda|scale_mask_softmax|attention_dropout|\w*dropout):.*", "inner step of a fused module"),
        (r"rotary_pos_emb:.*", "table of rope angles, one per position and not per token"),
        (r"decoder\.layers\.\d+\.self_attention\.rotary_pos_emb:.*", "table of rope angles, not per token"),
        (r":output\..*", "output of the whole model: compared as output_layer"),
        (r"(stage|chunk)\d+(\.decoder)?:output\..*", "what a pipeline stage hands on: compared as its last layer"),
        (r"chunk\d+\.rotary_pos_emb:.*", "table of rope angles, one per position and not per token"),
    ),
)
