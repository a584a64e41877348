"""vLLM's names (and vllm-ascend's: the paths are the same, only classes differ)."""

from __future__ import annotations

from probe.compare.names.base import EngineTable, Rule, Unavailable
from probe.compare.names.canonical import EMBEDDING, FINAL_NORM, LOGITS
from probe.compare.names.common import (
    AUXILIARY,
    CORRECTION,
    EXPERT_DOWN,
    EXPERT_PARAMETERS,
    EXPERT_TENSORS,
    EXPERTS,
    GATE,
    KNOWN_RULE,
    LAYER_NORMS,
    MLA,
    MLA_NAMES,
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
    same,
    to,
)

BLOCKS = ("layers.{i}.mlp", "layers.{i}.block_sparse_moe")
"""Where a block of experts lies: Mixtral's under its own name."""
SHARED_NAMES = (
    *("layers.{i}.mlp.experts._shared_experts._layer", "layers.{i}.mlp.experts.shared_experts"),
    *("layers.{i}.mlp.shared_expert", "layers.{i}.mlp.shared_experts"),
)
"""A shared expert is a child of its block and, since 0.30 or so, also of the fused experts, which run it."""
ATTENTION = ("layers.{i}.self_attn", "layers.{i}.self_attn.mla_attn")
LATENT = tuple(f"{at}.{name}:output.0" for at in ATTENTION for name in ("kv_a_proj_with_mqa", "fused_qkv_a_proj"))
"""Labels that only multi-head latent attention has."""
SHARED_HERE = tuple(f"{module}.down_proj:output.0" for module in SHARED_NAMES)
SCALED = ("gemma", "gemma2", "gemma3", "gemma3_text")
"""Families that scale embeddings outside the embedding module: the scaled ones enter the first norm."""
UNSCALED = tuple(f"config.model_type={name}" for name in SCALED)
SCALES = ("config.routed_scaling_factor",)
"""DeepSeek multiplies the routed output with a factor: vLLM after its router, others within the router's weights."""
FIRST_INPUT = "layers.0.input_layernorm:input.0"


def _experts(block: str) -> tuple[Rule, ...]:
    gates = f"{block}.gate", f"{block}.experts.gate"  # since 0.30 or so the fused experts have it too, and run it
    return (
        *(to(f"{gate}:output.0", ROUTER) for gate in gates),
        *(to(f"{block}.{at}:ids", ROUTER_IDS) for at in ("experts", "experts.router")),
        *(to(f"{block}.{at}:weights", ROUTER_WEIGHTS, unless=SCALES) for at in ("experts", "experts.router")),
        # kernels that pick the experts themselves return no ids: they follow from the logits by the model's rule
        *(to(f"{gate}:output.0", ROUTER_IDS, ROUTER_WEIGHTS, operation="route", needs=(KNOWN_RULE,)) for gate in gates),
        to(f"{block}.experts:routed", EXPERTS),
        # with a shared expert inside, the experts' output is the whole block's
        to(f"{block}.experts:output.0", EXPERTS, unless=SHARED_HERE),
        to(f"{block}:output.0", MLP, needs=(f"{block}.experts:output.0",)),
    )


def _shared(module: str) -> tuple[Rule, ...]:
    return (
        to(f"{module}.gate_up_proj:output.0", *SHARED, operation="split_gate_up"),
        to(f"{module}.down_proj:input.0", SHARED_INPUT),
        to(f"{module}.act_fn:output.0", SHARED_INPUT),
        to(f"{module}.down_proj:output.0", SHARED_OUTPUT),
        to(f"{module}.expert_gate:output.0", SHARED_GATE),
    )


def _latent(at: str) -> tuple[Rule, ...]:
    return (
        to(f"{at}.fused_qkv_a_proj:output.0", MLA[0], MLA[3], operation="split_q_a_kv_a"),
        *(to(f"{at}.{name}:output.0", label) for name, label in zip(MLA_NAMES, MLA)),
        to(f"{at}.q_proj:output.0", Q),
        to(f"{at}.o_proj:input.0", O_INPUT),
        to(f"{at}.o_proj:output.0", "layers.{i}.self_attn.o_proj:output.0"),
    )


TENSORS = (
    to(FIRST_INPUT, EMBEDDING, needs=UNSCALED[:1]),
    *(to(FIRST_INPUT, EMBEDDING, needs=(kind,)) for kind in UNSCALED[1:]),
    same(EMBEDDING, unless=UNSCALED),
    # a fused add + norm returns (norm, residual) from the second layer on: output.0 is the norm in both cases
    *(same(f"layers.{{i}}.{name}:output.0") for name in LAYER_NORMS),
    to("layers.{i}.self_attn.qkv_proj:output.0", Q, K, V, operation="split_qkv"),
    same("layers.{i}.self_attn.q_norm:output.0"),
    same("layers.{i}.self_attn.k_norm:output.0", "kv_heads"),
    *(rule for at in ATTENTION for rule in _latent(at)),
    *(to(f"{at}.rotary_emb:output.0", ROPE[0]) for at in ATTENTION),
    # under latent attention the one rope head is on every rank in full
    *(to(f"{at}.rotary_emb:output.1", ROPE[1], operation="kv_heads") for at in ATTENTION),
    to("layers.{i}.self_attn.attn:input.0", ROPE[0], unless=LATENT),
    to("layers.{i}.self_attn.attn:input.1", ROPE[1], operation="kv_heads", unless=LATENT),
    # latent attention pads its heads' outputs inside attn
    to("layers.{i}.self_attn.attn:output.0", O_INPUT, unless=LATENT),
    to("layers.{i}.mlp.gate_up_proj:output.0", GATE, UP, operation="split_gate_up"),
    same("layers.{i}.mlp.down_proj:input.0"),
    to("layers.{i}.mlp.act_fn:output.0", "layers.{i}.mlp.down_proj:input.0"),
    same("layers.{i}.mlp.down_proj:output.0"),
    *(rule for block in BLOCKS for rule in _experts(block)),
    *(rule for module in SHARED_NAMES for rule in _shared(module)),
    to("layers.{i}.mlp.shared_expert_gate:output.0", SHARED_GATE),
    to("layers.{i}.mlp:output.0", "layers.{i}.mlp.down_proj:output.0", unless=("layers.{i}.mlp.experts:output.0",)),
    # a layer returns its MLP's output and the residual apart; only their sum is what other engines call its output
    Rule(("layers.{i}:output.0", "layers.{i}:output.1"), ("layers.{i}:output.0",), "sum"),
    same(FINAL_NORM),
    to("logits_processor:output.0", LOGITS, operation="cut_vocabulary"),
    same(LOGITS, "cut_vocabulary"),
)


def _shared_parameters(module: str) -> tuple[Rule, ...]:
    return (
        to(f"{module}.gate_up_proj.{{p}}", *SHARED_PARAMETERS, operation="split_gate_up"),
        to(f"{module}.down_proj.{{p}}", "layers.{i}.mlp.shared_expert.down_proj.{p}"),
        to(f"{module}.expert_gate.weight", "layers.{i}.mlp.shared_expert_gate.weight"),
    )


PARAMETERS = (
    same("embed_tokens.weight", "cut_vocabulary"),
    *(same(f"layers.{{i}}.{name}.weight") for name in LAYER_NORMS),
    to("layers.{i}.self_attn.qkv_proj.{p}", *QKV_PARAMETERS, operation="split_qkv"),
    *(same(f"layers.{{i}}.self_attn.{name}_proj.{{p}}") for name in "qkvo"),
    *(same(f"layers.{{i}}.self_attn.{name}_norm.weight") for name in "qk"),
    *(same(label) for label in MLA_PARAMETERS),
    to(
        "layers.{i}.self_attn.fused_qkv_a_proj.{p}",
        *("layers.{i}.self_attn.q_a_proj.{p}", "layers.{i}.self_attn.kv_a_proj_with_mqa.{p}"),
        operation="split_q_a_kv_a",
    ),
    to("layers.{i}.mlp.gate_up_proj.{p}", *MLP_PARAMETERS, operation="split_gate_up"),
    *(same(f"layers.{{i}}.mlp.{name}_proj.{{p}}") for name in ("gate", "up", "down")),
    *(
        to(f"{block}{at}.weight", "layers.{i}.mlp.router.weight")
        for block in BLOCKS
        for at in (".gate", ".experts.gate")
    ),
    to("layers.{i}.mlp.gate.e_score_correction_bias", CORRECTION),
    *(
        rule
        for block in BLOCKS
        for at in (f"{block}.experts.routed_experts", f"{block}.experts")
        for rule in (
            to(f"{at}.w13_weight", *EXPERT_PARAMETERS, operation="split_experts_gate_up"),
            to(f"{at}.w2_weight", EXPERT_DOWN, operation="split_experts"),
        )
    ),
    *(rule for module in SHARED_NAMES for rule in _shared_parameters(module)),
    same("layers.{i}.mlp.shared_expert_gate.weight"),
    same("norm.weight"),
    same("lm_head.weight", "cut_vocabulary"),
)

TABLE = EngineTable(
    engine="vllm",
    tensors=TENSORS,
    parameters=PARAMETERS,
    prefixes=("language_model.model.", "language_model.", "model."),
    unavailable=(
        Unavailable(("layers.{i}:output.0",), "the residual (output.1) of the layer was not stored, so no sum exists"),
        Unavailable(
            (LOGITS,),
            "no logits were computed in the calls that were stored (vLLM's forward returns hidden states)",
            unless=("module logits_processor", "module lm_head"),
        ),
        Unavailable(ROPE, "neither rotary_emb nor the inputs of attn were stored"),
        *(
            Unavailable(
                (EXPERTS,), "vLLM's fused experts add the shared expert: only their sum, mlp output.0, exists", (label,)
            )
            for label in SHARED_HERE
        ),
        Unavailable(
            (ROUTER_WEIGHTS,), "vLLM applies the routed scaling factor after its router, other engines in it", SCALES
        ),
        Unavailable((ROUTER_IDS, ROUTER_WEIGHTS), "vLLM picks experts inside a fused kernel, which returns no ids"),
        Unavailable(EXPERT_TENSORS, "vLLM runs all experts in one fused kernel, without a tensor per expert"),
        Unavailable((SHARED_GATE,), "vLLM applies the shared expert's gate inside a fused kernel"),
        *(
            Unavailable((MLA[5],), "vLLM absorbs kv_b_proj into the attention of decode steps", needs=(label,))
            for label in LATENT
        ),
        *(
            Unavailable((EMBEDDING,), "the scaled embeddings (input of the first norm) were not stored", needs=(kind,))
            for kind in UNSCALED
        ),
    ),
    auxiliary=(
        *AUXILIARY,
        (r"(.*\.)?(\w+_layernorm|norm):output\.1", "residual: compared as a layer's output"),
        (r"layers\.\d+\.self_attn(\.mla_attn)?:output\.0", "container: the same tensor as o_proj output.0"),
        (r"layers\.\d+\.self_attn\.mla_attn\.mla_attn:output\.0", "attention before the value projection of its heads"),
        (r"layers\.\d+\.mlp\.(.*\.)?_?shared_experts?(\._layer)?:output\.0", "shared expert after its gate"),
        (r"layers\.\d+\.(.+\.)?act_fn:output\.0", "input of down_proj"),
        (r"layers\.\d+:output\.[01]", "half of the layer's output without the other half"),
        (r"(model)?:output\..*", "output of the whole model: compared as norm output.0"),
    ),
)
