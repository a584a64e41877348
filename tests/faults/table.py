"""The table of faults: what each is, where it can be, what names it rightly, what can show it."""

from __future__ import annotations

import torch

from faults import arithmetic as ar
from faults import attention as at
from faults import tokens as to
from faults import weights as we
from faults.base import DTYPES, Fault
from faults.models import WINDOW
from faults.names import ATTENTION, DOWN, EXPERTS, FP32, GATE, NORM, O_PROJ, POST, ROPE, ROUTER, UP, K, Q, V
from faults.table_modules import EXPERT_FAULTS, MODULES, TOKENS

RELATIVE = "scores depend on the distance of two positions only, and transformers shows no rope"
SMALL_EPS = "eps is a thousandth of the variance or less: the norm moves by a fraction of a rounding"

WEIGHTS = (
    Fault("stale weights of one layer", ("stale-weights",), ("layers.{i}.*",), we.stale_block, gate="weights"),
    Fault("stale weights of all", ("stale-weights",), ("*",), we.stale_model, placed=False, gate="weights"),
    Fault(
        "weights of another declared version",
        ("lagged-weights",),
        ("*",),
        we.lagged_model,
        placed=False,
        gate="weights",
        options={"across_versions": True},
        other=we.version_two,
    ),
    Fault("stale norm weight", ("stale-weights",), (NORM,), we.of_block("input_layernorm", we.drift), gate="weights"),
    Fault(
        "permuted q heads", ("permuted-qkv",), (Q,), we.of_block("self_attn.q_proj", we.permuted_heads), gate="weights"
    ),
    Fault("qkv interleave", ("permuted-qkv",), (Q, K, V), we.interleaved_qkv, gate="weights"),
    Fault(
        "k and v swapped",
        ("kv-swapped",),
        (K, V),
        we.swapped("self_attn.k_proj", "self_attn.v_proj", ("weight", "bias")),
        gate="weights",
    ),
    Fault(
        "gate and up swapped",
        ("gate-up-swapped",),
        (GATE, UP),
        we.swapped("mlp.gate_proj", "mlp.up_proj"),
        gate="weights",
    ),
    Fault(
        "transposed square weight",
        ("transposed-weight",),
        (O_PROJ,),
        we.of_block("self_attn.o_proj", lambda weight: weight.T),
        gate="weights",
    ),
    Fault(
        "input columns permuted",
        ("permuted-weights", "tp-shards-swapped"),
        (DOWN,),
        we.of_block("mlp.down_proj", lambda weight: weight.roll(3, 1)),
        gate="weights",
    ),
    Fault(
        "TP shards swapped (columns)",
        ("tp-shards-swapped",),
        (UP,),
        we.of_block("mlp.up_proj", we.halves_swapped(0)),
        gate="weights",
    ),
    Fault(
        "TP shards swapped (rows)",
        ("tp-shards-swapped", "permuted-weights"),
        (O_PROJ,),
        we.of_block("self_attn.o_proj", we.halves_swapped(1)),
        gate="weights",
    ),
    Fault(
        "scaled weight x1.03",
        ("scaled-weight",),
        (DOWN,),
        we.of_block("mlp.down_proj", lambda weight: weight * 1.03),
        gate="weights",
    ),
    Fault(
        "one weight row 5 % off",
        ("stale-weights", "scaled-weight"),
        (UP,),
        we.of_block("mlp.up_proj", we.rows_scaled),
        gate="weights",
    ),
    Fault(
        "half a weight missing", ("missing-shard",), (GATE,), we.of_block("mlp.gate_proj", we.half_zero), gate="weights"
    ),
    Fault(
        "bias not loaded",
        ("wrong-bias",),
        (Q,),
        we.of_block("self_attn.q_proj", torch.zeros_like, "bias"),
        gate="weights",
    ),
    Fault(
        "stale bias x0.9",
        ("wrong-bias", "scaled-weight", "stale-weights"),
        (K,),
        we.of_block("self_attn.k_proj", lambda bias: bias * 0.9, "bias"),
        gate="weights",
    ),
    Fault(
        "norm weight + 1",
        ("norm-weight-offset",),
        (POST,),
        we.of_block("post_attention_layernorm", lambda weight: weight + 1),
        gate="weights",
    ),
    Fault(
        "fp8 weight rounding",
        ("weight-precision",),
        (O_PROJ,),
        we.of_block("self_attn.o_proj", we.through(torch.float8_e4m3fn)),
        gate="weights",
    ),
    Fault(
        "bf16 weight rounding of a layer",
        ("weight-precision",),
        ("layers.{i}.*",),
        we.block_through_bf16,
        dtypes=FP32,
        gate="weights",
    ),
    Fault(
        "untied copy of the head",
        ("untied-head",),
        ("lm_head",),
        we.untied_head,
        family="tied",
        placed=False,
        gate="weights",
    ),
    Fault(
        "experts swapped", ("expert-swapped",), (EXPERTS + "*",), we.experts_swapped, family="experts", gate="weights"
    ),
    Fault(
        "stale router",
        ("stale-weights",),
        (ROUTER,),
        we.of_block("mlp.gate", we.drift),
        family="experts",
        gate="weights",
    ),
)

SETTINGS = (
    Fault(
        "eps x10",
        ("norm-eps",),
        (NORM,),
        ar.attribute("input_layernorm", "variance_epsilon", lambda x: x * 10),
        gate="config",
        invisible={"bfloat16": SMALL_EPS},
    ),
    Fault(
        "eps x1000",
        ("norm-eps",),
        (NORM,),
        ar.attribute("input_layernorm", "variance_epsilon", lambda x: x * 1000),
        gate="config",
        invisible={"bfloat16": SMALL_EPS},
    ),
    Fault(
        "eps x1000 of the model",
        ("norm-eps",),
        ("config", "*norm*"),
        lambda run: run.reconfigure(rms_norm_eps=1e-3),
        placed=False,
        gate="config",
        invisible={"bfloat16": SMALL_EPS},
    ),
    Fault(
        "eps x1000 inside the kernel",
        ("norm-eps",),
        (NORM,),
        ar.output("input_layernorm", ar.norm_with_eps(1e-3)),
        invisible={"bfloat16": SMALL_EPS},
    ),
    Fault(
        "q norm's eps x1000",
        ("norm-eps",),
        ("layers.{i}.self_attn.q_norm",),
        ar.attribute("self_attn.q_norm", "variance_epsilon", lambda x: x * 1000),
        family="normed",
        gate="config",
        invisible={"bfloat16": SMALL_EPS},
    ),
    Fault(
        "rope base of the model",
        ("rope-base",),
        ("config", "layers.0.self_attn", "layers.0.self_attn.rotary_emb"),
        lambda run: run.reconfigure(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        placed=False,
        gate="config",
    ),
    Fault("rope base +5 % in one layer", ("rope-base",), ROPE, at.with_steps(rope=at.rope_base(1.05))),
    Fault("rope base x50 in one layer", ("rope-base",), ROPE, at.with_steps(rope=at.rope_base(50.0))),
    Fault(
        "rope scaling of the model",
        ("rope-scaling",),
        ("config", "layers.0.self_attn", "layers.0.self_attn.rotary_emb"),
        lambda run: run.reconfigure(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
        placed=False,
        gate="config",
    ),
    Fault("rope scaling in one layer", ("rope-scaling",), ROPE, at.with_steps(rope=at.rope_positions(lambda p: p / 4))),
    Fault("rope pairing", ("rope-pairing",), ROPE, at.with_steps(rope=at.rope_pairing)),
    Fault(
        "q one position late", ("position-offset",), ROPE, at.with_steps(rope=at.rope_positions(lambda p: p - 1, "q"))
    ),
    Fault(
        "k one position late", ("position-offset",), ROPE, at.with_steps(rope=at.rope_positions(lambda p: p - 1, "k"))
    ),
    Fault(
        "q and k one position late",
        ("position-offset",),
        ROPE,
        at.with_steps(rope=at.rope_positions(lambda p: p - 1)),
        invisible=dict.fromkeys(
            DTYPES, "scores depend on the distance of two positions only, and transformers shows no rope"
        ),
    ),
    Fault(
        "position ids from 1",
        ("position-offset",),
        ("positions", "config", "layers.0.self_attn", "layers.0.self_attn.rotary_emb"),
        to.positions_from_one,
        placed=False,
        gate="positions",
    ),
    Fault(
        "attention scale +2 % (attribute)", ("attention-scale",), ATTENTION, at.scaling_attribute(1.02), gate="config"
    ),
    Fault("attention scale +2 % (kernel)", ("attention-scale",), ATTENTION, at.with_steps(scale=1.02)),
    Fault("attention scale missing", ("attention-scale",), ATTENTION, at.without_scale),
    Fault("causal mask off by one", ("causal-mask",), ATTENTION, at.with_steps(mask=at.sees_next)),
    Fault("no causal mask", ("causal-mask",), ATTENTION, at.with_steps(mask=at.sees_all)),
    Fault("a token hidden from itself", ("causal-mask",), ATTENTION, at.with_steps(mask=at.sees_not_itself)),
    Fault("sliding window off", ("sliding-window",), ATTENTION, at.with_steps(mask=at.window(None)), family="window"),
    Fault(
        "sliding window off by one",
        ("sliding-window",),
        ATTENTION,
        at.with_steps(mask=at.window(WINDOW + 1)),
        family="window",
    ),
    Fault(
        "sliding window off in the config",
        ("sliding-window",),
        ("config", "layers.0.self_attn"),
        lambda run: run.reconfigure(sliding_window=None),
        family="window",
        placed=False,
        gate="config",
    ),
    Fault("gelu instead of silu", ("activation",), ("layers.{i}.mlp.act_fn",), ar.activation(ar.gelu)),
    Fault("hard silu", ("activation",), ("layers.{i}.mlp.act_fn",), ar.activation(ar.quick_silu)),
    Fault(
        "exact gelu for its approximation",
        ("activation",),
        ("layers.{i}.mlp.act_fn",),
        ar.activation(ar.gelu),
        family="capped",
        invisible={"bfloat16": "the two differ by less than a rounding"},
    ),
    Fault("attention soft cap missing", ("softcap",), ATTENTION, at.with_steps(cap=False), family="capped"),
    Fault(
        "final soft cap missing",
        ("softcap",),
        ("lm_head", "config"),
        ar.without_final_cap,
        family="capped",
        placed=False,
    ),
    Fault("padding seen by attention", ("padding-leak",), ATTENTION, to.padding_seen, how="left", healthy="score"),
)

GROUPS: dict[str, tuple[Fault, ...]] = {
    "Weights": WEIGHTS,
    "Settings, rope and attention": SETTINGS,
    "Modules": MODULES,
    "Experts": EXPERT_FAULTS,
    "Tokens and log-probs": TOKENS,
}
FAULTS = tuple(fault for group in GROUPS.values() for fault in group)
"""Every fault, in the order of docs/faults.md."""
