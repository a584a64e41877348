"""SGLang's names: vLLM's, from which its layers come, except for the head, the experts and a key's norm."""

from __future__ import annotations

from dataclasses import replace

from probe.compare.names.base import Rule, Unavailable
from probe.compare.names.canonical import LOGITS
from probe.compare.names.common import EXPERT_TENSORS, ROPE, ROUTER_IDS, ROUTER_WEIGHTS, to
from probe.compare.names.vllm import SCALES
from probe.compare.names.vllm import TABLE as VLLM

HEAD_NORMS = tuple(f"layers.{{i}}.self_attn.{name}_norm:output.0" for name in "qk")

TENSORS: tuple[Rule, ...] = (
    to("logits_processor:output.next_token_logits", LOGITS, operation="cut_vocabulary"),
    to("layers.{i}.mlp.topk:output.0", ROUTER_WEIGHTS, unless=SCALES),
    to("layers.{i}.mlp.topk:output.1", ROUTER_IDS),
    *VLLM.tensors,
)

TABLE = replace(
    VLLM,
    engine="sglang",
    tensors=TENSORS,
    unavailable=(
        Unavailable(
            (LOGITS,),
            "SGLang computes logits only where it samples, and no such row was stored",
            unless=("module logits_processor", "module lm_head"),
        ),
        Unavailable(ROPE, "neither rotary_emb nor the inputs of attn were stored"),
        Unavailable((ROUTER_IDS, ROUTER_WEIGHTS), "SGLang picks experts inside a fused kernel, which returns no ids"),
        Unavailable(HEAD_NORMS, "SGLang norms each head as a row of its own, which names no token"),
        Unavailable(EXPERT_TENSORS, "SGLang runs all experts in one fused kernel, without a tensor per expert"),
        *(entry for entry in VLLM.unavailable if "vLLM" not in entry.reason and entry.canonical != ROPE),
    ),
    auxiliary=(
        *VLLM.auxiliary,
        (r"layers\.\d+\.mlp\.topk:output\.2", "the router's logits: compared as mlp.gate output.0"),
        (r"logits_processor:output\..*", "what SGLang returns beside the logits of the tokens it samples"),
    ),
)
