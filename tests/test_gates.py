"""Preflight gates: each finds the fault that it is there for, names it, and passes without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, opened, prompts, sketch
from synthetic_model import Tiny

from probe.compare.environment_gate import environment_entries, environment_gate
from probe.compare.gates import tokens_gate
from probe.compare.names.canonical import LOGITS
from probe.compare.positions_gate import positions_gate
from probe.compare.sampling_gate import sampling_gate, shifted_by
from probe.compare.sequences import join_sequences
from probe.compare.settings_gates import config_gate, flat_config
from probe.compare.side import Side, read_side
from probe.compare.weights import Weight, compare_weights
from probe.compare.weights_gate import weights_gate
from probe.metrics import logprobs_from_logits


class Pair:
    """Two open dumps with their sides and joined sequences."""

    def __init__(
        self, folder: Path, a: Scenario, b: Scenario, sequences_a: Any = None, sequences_b: Any = None
    ) -> None:
        self.a = opened(folder / "a", a, sequences_a)
        self.b = opened(folder / "b", b, sequences_b)
        self.sides = read_side(self.a), read_side(self.b)
        self.join = join_sequences(self.a, self.b)


@pytest.fixture
def make(tmp_path):
    """Make a Pair; its files are closed when the test ends."""
    made: list[Pair] = []

    def factory(a: Scenario | None = None, b: Scenario | None = None, **sequences: Any) -> Pair:
        made.append(Pair(tmp_path / str(len(made)), a or Scenario(), b or actor(), **sequences))
        return made[-1]

    yield factory
    for pair in made:
        pair.a.close()
        pair.b.close()


# -- tokens and positions ---------------------------------------------------------------------------------------------


def test_equal_tokens_pass(make):
    pair = make()
    gate = tokens_gate(pair.a, pair.b, pair.join)
    assert gate.status == "pass" and "4 sequences" in gate.detail


def test_another_prompt_under_the_same_uid_fails_and_is_named(make):
    other = prompts()
    other[1][1][0] = (other[1][1][0] + 1) % 50
    pair = make(sequences_b=other)
    gate = tokens_gate(pair.a, pair.b, pair.join)
    assert gate.status == "fail"
    assert "p1.s0" in gate.detail and "position 0" in gate.detail


def test_responses_that_part_only_warn(make):
    other = prompts()
    uid, ids, prompt_len = other[2]
    ids[prompt_len] = (ids[prompt_len] + 1) % 50
    pair = make(sequences_b=other)
    gate = tokens_gate(pair.a, pair.b, pair.join)
    assert gate.status == "warn"
    assert f"first {uid} at position {prompt_len}" in gate.detail


def test_sequences_of_one_side_only_warn(make):
    pair = make(sequences_b=prompts()[:2])
    gate = tokens_gate(pair.a, pair.b, pair.join)
    assert gate.status == "warn" and "2 sequences only in a" in gate.detail


def test_rows_that_hold_their_tokens_pass_and_a_position_offset_fails(make):
    pair = make()
    assert positions_gate(*pair.sides).status == "pass"
    rows_of = pair.b.rows

    def moved(module: str, slot: str) -> np.ndarray:
        rows = rows_of(module, slot).copy()
        rows["position"] += 1
        return rows

    pair.b.rows = moved
    gate = positions_gate(*pair.sides)
    assert gate.status == "fail"
    assert "in b" in gate.detail and "moved by -1" in gate.detail


# -- weights ----------------------------------------------------------------------------------------------------------


def test_equal_weights_pass_across_layouts(make):
    gate = weights_gate(*make(b=actor("megatron-te")).sides)
    assert gate.status == "pass" and "39 parameters agree" in gate.detail


def test_a_difference_of_dtype_passes_with_a_note(make):
    def fine(weights):
        rng = np.random.default_rng(5)
        for name in weights:
            weights[name] = weights[name] + rng.normal(size=weights[name].shape) * 1e-4

    pair = make(Scenario(sketched=fine), actor(sketched=fine, weights_dtype="bfloat16"))
    gate = weights_gate(*pair.sides)
    assert gate.status == "pass" and "within one rounding to bfloat16" in gate.detail


def scale(weights):
    weights["layers.1.mlp.down_proj.weight"] *= 1.03


def swap_rows(weights):
    w = weights["layers.1.self_attn.o_proj.weight"]
    w[[3, 7]] = w[[7, 3]]


def swap_columns(weights):
    w = weights["layers.1.self_attn.o_proj.weight"]
    w[:, [3, 7]] = w[:, [7, 3]]


def other_content(weights):
    w = weights["layers.2.self_attn.q_proj.weight"]
    weights["layers.2.self_attn.q_proj.weight"] = w + np.random.default_rng(0).normal(size=w.shape)


def one_row(weights):
    weights["lm_head.weight"][11] *= -1


def stale_norm(weights):
    weights["norm.weight"][4] += 0.5


def exchange(weights):
    gate, up = (f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (scale, "layers.1.mlp.down_proj.weight", "scaled: b = 1.03 x a"),
        (swap_rows, "layers.1.self_attn.o_proj.weight", "rows permuted (2 of 32"),
        (swap_columns, "layers.1.self_attn.o_proj.weight", "columns permuted"),
        (other_content, "layers.2.self_attn.q_proj.weight", "other content"),
        (one_row, "lm_head.weight", "differs in 1 of 50 rows (first 11)"),
        (stale_norm, "norm.weight", "differs in 1 of 32 rows (first 4)"),
        (exchange, "layers.0.mlp.gate_proj.weight", "exchanged with layers.0.mlp.up_proj.weight"),
    ],
)
@pytest.mark.parametrize("layout", ["megatron", "megatron-te", "transformers"])
def test_a_changed_weight_fails_and_is_named_with_the_kind_of_change(make, change, name, words, layout):
    pair = make(Scenario(), actor(layout, sketched=change))
    gate = weights_gate(*pair.sides)
    assert gate.status == "fail"
    assert gate.detail.startswith(name) and words in gate.detail


def test_a_change_within_bf16_rounding_still_fails_between_two_fp32_sides(make):
    def fine(weights):
        rng = np.random.default_rng(5)
        for name in weights:
            weights[name] = weights[name] * (1 + 1e-3 * rng.uniform(-1, 1, weights[name].shape))

    def through_bf16(weights):
        fine(weights)
        for name in weights:
            weights[name] = (weights[name].astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
            weights[name] = weights[name].astype(np.float64)

    gate = weights_gate(*make(Scenario(sketched=fine), actor(sketched=through_bf16)).sides)
    assert gate.status == "fail"


def test_a_transposed_weight_is_told_apart_from_other_content():
    w = np.random.default_rng(0).normal(size=(4, 6))
    one, other = sketch("w", w, "float32"), sketch("w", np.ascontiguousarray(w.T), "float32")
    a, b = (Weight("w", "w", s.shape, s.dtype, s.rows) for s in (one, other))
    assert "is transposed" in compare_weights({"w": a}, {"w": b})[0].detail


def test_a_parameter_of_one_side_warns_and_no_sketch_at_all_is_skipped(make):
    def drop_bias(weights):
        for name in [n for n in weights if n.endswith("bias")]:
            del weights[name]

    pair = make(b=actor("transformers", sketched=drop_bias))
    gate = weights_gate(*pair.sides)
    assert gate.status == "warn" and "9 are on one side only" in gate.detail
    pair.b.weights.clear()
    assert weights_gate(*pair.sides).status == "skipped"


def test_declared_weight_versions_that_differ_are_said(make):
    pair = make()
    pair.b.sequences[0].weight_version = 3
    gate = weights_gate(*pair.sides)
    assert gate.status == "warn" and "versions differ" in gate.detail


def test_other_weights_of_a_declared_lag_warn_and_undeclared_ones_fail(make):
    pair = make(Scenario(), actor(sketched=one_row))
    assert weights_gate(*pair.sides).status == "fail"
    for dump, version in ((pair.a, 3), (pair.b, 4)):
        for sequence in dump.sequences:
            sequence.weight_version = version
    gate = weights_gate(*pair.sides)
    assert gate.status == "warn" and "versions differ (a [3], b [4])" in gate.detail


# -- sampling ---------------------------------------------------------------------------------------------------------


def sampled(temperature: float, mode: str, top_p: float = 1.0) -> dict[str, Any]:
    return {"logprobs_mode": mode, "sampling": {"temperature": temperature, "top_p": top_p}}


def set_logprobs(side: Side, processed: Callable[[np.ndarray], np.ndarray], finish: Any = lambda x: x) -> None:
    """Let a side's engine have returned log-probs of its logits after ``processed`` did something to them."""
    table = side.dump.tokens
    source = side.resolution.sources[LOGITS]
    values, rows = (getattr(side.dump, what)(*side.natives[source.native[0]]) for what in ("read", "rows"))
    for row, logits in zip(rows, processed(values.astype(np.float64)[:, : side.shape.vocab])):
        at = np.flatnonzero((table["sequence"] == row["sequence"]) & (table["position"] == row["position"] + 1))
        if len(at) and table["response"][at[0]]:
            table["logprob"][at] = finish(logprobs_from_logits(logits[None], table["token"][at]))


def test_log_probs_of_one_distribution_pass(make):
    pair = make()
    assert sampling_gate(*pair.sides, pair.join).status == "pass"


def test_raw_log_probs_at_another_temperature_warn_about_the_ppo_ratio(make):
    pair = make(Scenario(manifest=sampled(0.7, "raw_logprobs")))
    gate = sampling_gate(*pair.sides, pair.join)
    assert gate.status == "warn" and "temperature 0.7" in gate.detail and "processed_logprobs" in gate.detail


def test_processed_log_probs_are_replaced_by_recomputed_ones_where_the_other_side_is_raw(make):
    pair = make(Scenario(manifest=sampled(0.7, "processed_logprobs")))
    set_logprobs(pair.sides[0], lambda logits: logits / 0.7)
    gate = sampling_gate(*pair.sides, pair.join)
    assert gate.status == "warn" and "recomputed" in gate.detail


def test_log_probs_of_different_distributions_fail_where_nothing_can_be_recomputed(make):
    pair = make(Scenario(manifest=sampled(0.7, "processed_logprobs", 0.9)))
    pair.a.tokens["logprob_recomputed"] = np.nan
    gate = sampling_gate(*pair.sides, pair.join)
    assert gate.status == "fail" and "different distributions" in gate.detail


@pytest.mark.parametrize("shift", [1, -1])
def test_log_probs_shifted_by_one_token_fail(make, shift):
    long = [(f"p{n}", np.random.default_rng(n).integers(0, 50, 24), 4) for n in range(2)]
    pair = make(Scenario(logprob_shift=shift), actor(), sequences_a=long, sequences_b=long)
    assert shifted_by(pair.a) == -shift
    gate = sampling_gate(*pair.sides, pair.join)
    assert gate.status == "fail" and "wrong tokens" in gate.detail


def test_no_log_probs_are_skipped(make):
    pair = make()
    for column in ("logprob", "logprob_recomputed"):
        pair.b.tokens[column] = np.nan
    assert sampling_gate(*pair.sides, pair.join).status == "skipped"


# -- config and environment -------------------------------------------------------------------------------------------


def with_config(**changes: Any) -> dict[str, Any]:
    return {"model": {"path": "", "config": Tiny().config() | changes}}


def test_equal_configs_pass(make):
    assert config_gate(*make().sides).status == "pass"


@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", 1e-5), ("rope_theta", 5e5), ("num_key_value_heads", 4), ("hidden_act", "gelu")]
)
def test_a_config_difference_that_changes_the_function_fails(make, key, value):
    gate = config_gate(*make(b=actor("transformers", manifest=with_config(**{key: value}))).sides)
    assert gate.status == "fail" and key in gate.detail


def test_a_config_read_off_a_live_model_may_state_every_default(make):
    """GIVEN a config.json and a config object of one model, THEN what only the object states is no difference."""
    spelled_out = {
        "layer_types": ["full_attention"] * 3,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "hidden_act": "silu",
    }
    live = with_config(**spelled_out)
    live["model"]["config_source"] = "object"
    gate = config_gate(*make(b=actor("transformers", manifest=live)).sides)
    assert gate.status == "pass" and "hidden_act" in gate.detail
    live["model"]["config"]["rms_norm_eps"] = 1e-4
    assert config_gate(*make(b=actor("transformers", manifest=live)).sides).status == "fail"


def test_other_config_differences_warn_and_bookkeeping_is_ignored(make):
    gate = config_gate(*make(b=actor(manifest=with_config(max_position_embeddings=4096))).sides)
    assert gate.status == "warn"
    gate = config_gate(*make(b=actor(manifest=with_config(torch_dtype="bfloat16", transformers_version="5"))).sides)
    assert gate.status == "pass"


def test_nested_rope_parameters_equal_the_flat_key():
    flat = flat_config({"model": {"config": {"rope_theta": 1e4}}})
    nested = flat_config({"model": {"config": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}}})
    assert flat == nested == {"rope_theta": 1e4}


def test_an_eps_that_only_the_module_knows_fails(make):
    pair = make()
    path = "decoder.layers.1.pre_mlp_layernorm"
    pair.b.modules[path] = replace(pair.b.modules[path], info={"eps": 1e-3})
    gate = config_gate(*pair.sides)
    assert gate.status == "fail"
    assert "eps of layers.1.post_attention_layernorm is 1e-06 in a, 0.001 in b" in gate.detail


def test_differences_of_the_environment_only_warn_and_only_where_they_can_matter(make):
    pair = make(
        Scenario(manifest={"environment": {"torch": "2.8", "host": "x", "env.NVTE_FUSED_ATTN": "1"}}),
        actor(manifest={"environment": {"torch": "2.9", "host": "y"}}),
    )
    entries = environment_entries(pair.a, pair.b)
    warned = [entry["key"] for entry in entries if entry["severity"] == "warn"]
    assert warned == ["torch"]  # a switch that only one of two engines knows is listed, not warned about
    gate = environment_gate(entries)
    assert gate.status == "warn" and "torch is 2.8 in a, 2.9 in b" in gate.detail


def test_a_switch_set_in_one_of_two_runs_of_one_engine_warns(make):
    pair = make(Scenario(manifest={"environment": {"env.VLLM_X": "1"}}), Scenario(manifest={"environment": {}}))
    assert environment_gate(environment_entries(pair.a, pair.b)).status == "warn"
