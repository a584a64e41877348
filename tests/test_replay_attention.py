"""Replays of attention: healthy models of every kind stay in their band, and each fault is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_faults import (
    DTYPES,
    FAULTS,
    FAULTY,
    LAYERS,
    LENGTH,
    RECIPE,
    excesses,
    model,
    named,
    replay,
    run,
    run_faulty,
)
from replay_tools import in_dtype

from probe.compare.replay.explain import bands_of, explain
from probe.compare.replay.figures import BROKEN_EXCESS

YARN = (("rope_type", "yarn"), ("rope_theta", 1e4), ("factor", 4.0), ("original_max_position_embeddings", 1024))
LLAMA3 = (
    *(("rope_type", "llama3"), ("rope_theta", 5e5), ("factor", 8.0), ("low_freq_factor", 1.0)),
    *(("high_freq_factor", 4.0), ("original_max_position_embeddings", 64)),
)
HALF = (("rope_theta", 1e4), ("partial_rotary_factor", 0.5))
DYNAMIC = (("rope_type", "dynamic"), ("rope_theta", 1e4), ("factor", 4.0))
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
HEALTHY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "q and k norms": ("Qwen3", {}),
    "one kv head": ("Qwen3", {"num_key_value_heads": 1}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
    "window": ("Mistral", {"sliding_window": 40}),
    "window by layer": ("Gemma3", {"sliding_window": 40, "query_pre_attn_scalar": 64}),
    "cap": ("Gemma2", {"sliding_window": 40, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}),
    "latent": ("DeepseekV3", {**LATENT, "num_key_value_heads": 4, "first_k_dense_replace": LAYERS}),
    "interleaved, partial": ("Glm", {"rope_parameters": HALF, "pad_token_id": 0}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_attention_is_within_its_band(name: str, dtype: str) -> None:
    family, config = HEALTHY[name]
    built = model(family, **config)
    kernels = ("eager",) if "cap" in name else ("eager", "sdpa")  # sdpa does not apply a cap
    for kernel in kernels:
        assert max(excesses(run(built, dtype, kernel=kernel))) < 1, kernel


@pytest.mark.parametrize("dtype", (*DTYPES, "float16"))
@pytest.mark.parametrize("sharp", (0.2, 8.0))
def test_sharp_and_flat_attention_is_within_its_band(sharp: float, dtype: str) -> None:
    built = in_dtype(model("Qwen3"), "float32")
    for name, parameter in built.named_parameters():
        parameter.data *= sharp if "q_norm" in name else 1.0
    assert max(excesses(run(built, dtype, length=300, batch=1))) < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAULTS)
def test_faulty_attention_is_found_in_its_layer_and_named(name: str, dtype: str) -> None:
    cause, wrap = FAULTS[name]
    found = run_faulty(model(), dtype, wrap)
    reached = excesses(found)
    assert max(reached[:FAULTY] + reached[FAULTY + 1 :]) < 1
    if dtype == "bfloat16" and name in UNSEEN:
        assert reached[FAULTY] < 1
    else:
        assert reached[FAULTY] > BROKEN_EXCESS
        assert named(found)[0] == cause, named(found)


UNSEEN = ("softmax in bf16", "bf16 frequencies")
"""What eager torch does in bfloat16 anyway; coarse frequencies turn so few positions by less than rounding."""


def test_fitted_numbers_are_near_the_true_ones() -> None:
    for name, value in (("base +5 %", 1.05), ("scale +2 %", 1.02)):
        found = run_faulty(model(), "bfloat16", FAULTS[name][1])
        context, reading = replay(found, FAULTY)
        assert explain(RECIPE, context, reading)[0].value == pytest.approx(value, rel=4e-3)


def test_facts_of_the_trial_are_reproduced() -> None:
    """The table of the first trial (one 12-layer model, bf16): healthy layers 2.6 to 4.7, these faults above."""
    healthy = [replay(run(model(), "bfloat16"), layer)[1].figures.error for layer in range(LAYERS)]
    for name in ("q one earlier", "base +5 %", "pairing", "scale +2 %", "one future key"):
        found = run_faulty(model(), "bfloat16", FAULTS[name][1])
        errors = [replay(found, layer)[1].figures.error for layer in range(LAYERS)]
        assert int(np.argmax(errors)) == FAULTY
        assert errors[FAULTY] > 2.5 * max(healthy), name


@pytest.mark.parametrize(
    ("family", "config", "assumed", "cause"),
    [
        ("Mistral", {"sliding_window": 40}, {"sliding_window": None}, "sliding-window"),
        ("Mistral", {"sliding_window": 40}, {"sliding_window": 41}, "sliding-window"),
        ("Mistral", {"sliding_window": 40}, {"sliding_window": 24}, "sliding-window"),
        ("Mistral", {"sliding_window": None}, {"sliding_window": 32}, "sliding-window"),
        ("Gemma2", {"sliding_window": 40, "query_pre_attn_scalar": 4}, {"attn_logit_softcapping": None}, "softcap"),
        ("Llama", {"rope_parameters": LLAMA3}, {"rope_parameters": {"rope_theta": 5e5}}, "rope-scaling"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_with_another_setting_is_named(
    family: str, config: dict[str, Any], assumed: dict[str, Any], cause: str, dtype: str
) -> None:
    cap = {"attn_logit_softcapping": 5.0} if cause == "softcap" else {}
    right = model(family, **config, **cap)
    wrong = model(
        family, **{**config, **cap, **{k: tuple(v.items()) if isinstance(v, dict) else v for k, v in assumed.items()}}
    )
    found = run(wrong, dtype)
    found.config = right.config.to_dict()
    assert replay(found, 0)[1].figures.excess(bands_of(RECIPE, dtype)) > BROKEN_EXCESS
    assert named(found, 0)[0] == cause


def test_faults_of_some_rows_are_named_by_the_rows() -> None:
    for cause, start in (("decode-kernel", 40), ("position-range", 40)):
        found = run(model(), "bfloat16")
        found.prompt = 40 if cause == "decode-kernel" else 1 << 30
        label = f"layers.{FAULTY}.self_attn.o_proj:input.0"
        late = np.arange(found.count()) % LENGTH >= start
        noise = np.random.default_rng(0).normal(size=found.tensors[label].shape)
        found.tensors[label][late] *= 1 + 0.05 * noise[late]
        assert named(found)[0] == cause
