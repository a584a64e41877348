"""The table of faults, continued: modules, experts, tokens and log-probs."""

from __future__ import annotations

from faults import arithmetic as ar
from faults import attention as at
from faults import experts as ex
from faults import tokens as to
from faults.base import Fault
from faults.names import ATTENTION, DOWN, EXPERTS, FP32, GATE, NORM, O_PROJ, POST, ROPE, ROUTER, UP, K, Q, V

SAME_SOFTMAX = "torch sums in fp32 on a CPU, and bf16 scores and results are what the model has anyway"
SAID_PROCESSED = {"logprobs_mode": "processed_logprobs"}
SAMPLED_COLD = {"sampling": {"temperature": to.TEMPERATURE, "top_p": 1.0}}
SAMPLED_LIKELY = {"sampling": {"temperature": 1.0, "top_p": to.TOP_P}}

MODULES = (
    Fault("output x1.03", ("scale",), (DOWN,), ar.output("mlp.down_proj", ar.scaled(1.03))),
    Fault("output x1.005", ("scale",), (O_PROJ,), ar.output("self_attn.o_proj", ar.scaled(1.005))),
    Fault(
        "embedding scaled",
        ("scale",),
        ("embed_tokens",),
        ar.model_output("model.embed_tokens", ar.scaled(11.3125)),
        placed=False,
    ),
    Fault("no residual after attention", ("missing-residual",), ("layers.{i}", POST), ar.residual(0, 1)),
    Fault("no residual after the MLP", ("missing-residual",), ("layers.{i}",), ar.residual(1, 0)),
    Fault(
        "missing all-reduce (MLP)", ("missing-all-reduce",), (DOWN,), ar.output("mlp.down_proj", ar.first_shard_only)
    ),
    Fault(
        "missing all-reduce (attention)",
        ("missing-all-reduce",),
        (O_PROJ,),
        ar.output("self_attn.o_proj", ar.first_shard_only),
    ),
    Fault("duplicated all-reduce", ("duplicated-all-reduce",), (DOWN,), ar.output("mlp.down_proj", ar.scaled(2.0))),
    Fault("partial sums in bf16", ("partial-sums",), (DOWN,), ar.output("mlp.down_proj", ar.bf16_partial_sums)),
    Fault(
        "fp8 weight inside the kernel", ("weight-precision",), (O_PROJ,), ar.output("self_attn.o_proj", ar.fp8_weight)
    ),
    Fault("norm in bf16", ("norm-precision",), (NORM,), ar.output("input_layernorm", ar.bf16_norm)),
    Fault(
        "softmax in bf16",
        ("softmax-precision",),
        ATTENTION,
        at.with_steps(softmax=at.bf16_softmax),
        invisible={
            "bfloat16": "torch sums in fp32 on a CPU, and bf16 scores and results are what the model has anyway"
        },
    ),
    Fault(
        "lm_head in bf16",
        ("head-precision",),
        ("lm_head",),
        ar.model_output("lm_head", ar.bf16_inputs),
        placed=False,
        dtypes=FP32,
    ),
    Fault("undeclared autocast", ("precision",), ("*",), ar.autocast, placed=False, dtypes=FP32),
    Fault("dropout on", ("dropout-on",), ATTENTION, at.with_steps(softmax=at.dropped(0.1))),
    Fault("NaN at one place", ("nan",), (DOWN,), ar.output("mlp.down_proj", ar.at_one_place(float("nan")))),
    Fault("Inf at one place", ("inf",), (UP,), ar.output("mlp.up_proj", ar.at_one_place(float("inf")))),
    Fault(
        "one row in 2,000 random",
        ("row-corruption",),
        (O_PROJ,),
        ar.output("self_attn.o_proj", ar.random_row),
        texts="long",
    ),
    Fault("2 of 512 columns zero", ("column-corruption",), (GATE,), ar.output("mlp.gate_proj", ar.dead_columns)),
    Fault("2 value columns zero", ("column-corruption",), (V,), ar.output("self_attn.v_proj", ar.dead_columns)),
    Fault("bias added twice", ("wrong-bias",), (Q,), ar.output("self_attn.q_proj", ar.twice_biased)),
    Fault("bias left out by the kernel", ("wrong-bias",), (K,), ar.output("self_attn.k_proj", ar.without_bias)),
    Fault(
        "norm weight + 1 inside the kernel",
        ("norm-weight-offset",),
        (POST,),
        ar.output("post_attention_layernorm", ar.offset_norm),
    ),
    Fault("vocab offset (embedding)", ("vocab-offset",), ("embed_tokens",), ar.embedding_offset, placed=False),
    Fault("vocab offset (head)", ("vocab-offset",), ("lm_head",), ar.head_offset, placed=False),
    Fault(
        "missing all-reduce (embedding)",
        ("missing-all-reduce", "missing-shard"),
        ("embed_tokens",),
        ar.embedding_shard_missing,
        placed=False,
    ),
    Fault("kernel of one batch shape", ("batch-variance",), (DOWN,), ar.output("mlp.down_proj", ar.lone_sequences)),
    Fault(
        "KV cache in fp8",
        ("kv-cache-dtype",),
        ATTENTION,
        at.with_steps(cache=at.fp8_cache),
        how="decode",
        healthy="score",
        texts="short",
        sides="a",
    ),
    Fault(
        "decode kernel off",
        ("decode-kernel",),
        ATTENTION,
        at.with_steps(context=at.where_rows(at.decoded, 1.03)),
        how="decode",
        healthy="score",
        texts="short",
        sides="a",
    ),
    Fault(
        "attention wrong from position 97",
        ("position-range",),
        ATTENTION,
        at.with_steps(context=at.where_rows(at.from_position(97), 1.1)),
    ),
    Fault("rope table ends at position 97", ("position-range",), ROPE, at.with_steps(rope=at.scrambled_from(97))),
    Fault(
        "stale prefix cache",
        ("stale-prefix-cache",),
        ("layers.0.self_attn",),
        to.stale_prefix,
        placed=False,
        how="prefix",
        healthy="score",
        sides="a",
    ),
)

EXPERT_FAULTS = (
    Fault("top-k weights not normalised", ("norm-topk",), (ROUTER,), ex.with_router(normalise=False), family="experts"),
    Fault(
        "norm_topk off in the config",
        ("norm-topk",),
        ("config", "layers.0.mlp.router"),
        lambda run: run.reconfigure(norm_topk_prob=False),
        family="experts",
        placed=False,
        gate="config",
    ),
    Fault("router bias", ("router-bias",), (ROUTER,), ex.with_router(ex.biased_logits), family="experts"),
    Fault(
        "router logits x1.2", ("router-scale", "scale"), (ROUTER,), ex.with_router(ex.scaled_logits), family="experts"
    ),
    Fault("expert weights x1.5", ("router-scale",), (ROUTER,), ex.with_router(scale=1.5), family="experts"),
    Fault(
        "router in bf16",
        ("precision", "partial-sums"),
        (ROUTER,),
        ex.with_router(ex.bf16_logits),
        family="experts",
        dtypes=FP32,
    ),
    Fault("top-k takes the third", ("router-fault",), (ROUTER,), ex.with_router(choice=ex.runner_up), family="experts"),
    Fault(
        "top-k ties fall otherwise",
        ("router-flip",),
        (ROUTER,),
        ex.with_router(choice=ex.ties_swapped),
        family="ties",
        benign=True,
    ),
    Fault(
        "shared expert missing",
        ("shared-expert-missing",),
        ("layers.{i}.mlp",),
        ex.block_with(shared=False),
        family="experts",
    ),
    Fault("experts dispatched to each other", ("expert-swapped",), (EXPERTS,), ex.permuted_ids, family="experts"),
    Fault("one expert x1.1", ("scale", "router-scale"), (EXPERTS,), ex.expert_scaled, family="experts"),
)

TOKENS = (
    Fault("prompt retokenised", ("token-mismatch",), ("tokens",), to.retokenised, placed=False, gate="tokens"),
    Fault(
        "response retokenised",
        ("token-mismatch",),
        ("tokens",),
        to.retokenised_response,
        placed=False,
        gate="tokens",
    ),
    Fault(
        "log-probs over T, undeclared",
        ("temperature-semantics",),
        ("log-probs",),
        to.with_logprobs(to.tempered),
        placed=False,
        gate="sampling",
    ),
    Fault(
        "log-probs after temperature",
        ("temperature-semantics", "raw-logprobs"),
        ("log-probs",),
        to.with_logprobs(to.tempered, **SAMPLED_COLD, **SAID_PROCESSED),
        placed=False,
        gate="sampling",
        sides="a",
    ),
    Fault(
        "log-probs before temperature",
        ("raw-logprobs", "temperature-semantics"),
        ("log-probs",),
        to.with_logprobs(to.token_logprobs, **SAMPLED_COLD),
        placed=False,
        gate="sampling",
        sides="a",
        invisible=dict.fromkeys(
            ("float32", "bfloat16"), "both sides' log-probs are raw; the ratio of PPO would need processed ones"
        ),
    ),
    Fault(
        "renormalised over top-p",
        ("renormalised-top-p",),
        ("log-probs",),
        to.with_logprobs(to.kept, **SAMPLED_LIKELY),
        placed=False,
        gate="sampling",
        sides="a",
    ),
    Fault(
        "renormalised over top-k",
        ("renormalised-top-p",),
        ("log-probs",),
        to.with_logprobs(to.top_k),
        placed=False,
        gate="sampling",
        sides="a",
    ),
    Fault(
        "log-probs shifted",
        ("logprob-shift",),
        ("log-probs",),
        to.with_logprobs(to.shifted),
        placed=False,
        gate="sampling",
    ),
    Fault(
        "log-probs zero-filled",
        ("zero-filled-logprobs",),
        ("log-probs",),
        to.with_logprobs(to.zeroed(0.2)),
        placed=False,
        gate="sampling",
    ),
    Fault(
        "log-probs of another pass",
        ("logprob-source",),
        ("log-probs",),
        to.with_logprobs(to.of_other_pass),
        placed=False,
    ),
)
