"""Reports of people who compared a rollout with its training: each symptom shows as what it was.

``ELSEWHERE`` names the tests that cover a report in other files; the others are below, each with its report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, opened, prompts, write_dump
from synthetic_model import Tensors, Tiny
from test_gates import set_logprobs

from probe.compare.run import compare_open
from probe.compare.side import read_side
from probe.store.dtypes import round_to
from probe.store.reader import Dump, open_dump

ELSEWHERE = {
    "nnsight 630: (mlp_out, residual) tuple, positions as first argument, in-place mutation": (
        "test_merge.py::test_a_sum_joins_its_terms_first",
        "test_odd_outputs.py::test_odd_outputs_are_captured_and_aligned",
        "test_capture.py::test_tensors_are_copied_before_they_are_overwritten",
    ),
    "Megatron-Bridge 1776: rope index over packed ids": (
        "test_gates_settings.py::test_other_ids_of_one_axis_fail_before_any_tensor",
        "test_gates_settings.py::test_position_ids_that_a_model_was_given_are_checked",
    ),
    "verl 3653: 2-D, 3-row and 4-row position ids": (
        "test_gates_settings.py::test_two_three_and_four_rows_of_position_ids_are_accepted",
        "test_odd_outputs.py::test_images_share_rope_positions_but_not_rows",
    ),
    "Megatron-LM 4168: a tenth of the routers' choices differ": (
        "test_moe_compare.py::test_a_flip_that_rounding_explains_accuses_no_module",
        "test_moe_compare.py::test_ids_that_do_not_follow_from_the_logits_are_a_fault_of_the_router",
        "test_moe_compare.py::test_every_form_shows_the_experts",
    ),
    "pytorch 110285: bf16 to numpy": ("test_store.py::test_every_bfloat16_code_is_kept",),
}
"""Report -> the tests that show its outcome."""

PROMPT = 8
LONG = [(f"p{n}", np.random.default_rng(n).integers(0, 50, 32), PROMPT) for n in range(4)]
DEEP = Tiny(layers=6)


@pytest.fixture
def compare(tmp_path):
    """Return the report of two scenarios; ``edit`` changes the opened dumps before they are compared."""

    def run(a: Scenario, b: Scenario, sequences: Any = LONG, other: Any = None, edit: Any = None) -> dict[str, Any]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with opened(folder / "a", a, sequences) as left, opened(folder / "b", b, other or sequences) as right:
            if edit:
                edit(left, right)
            return compare_open(left, right)

    return run


def gate(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in report["gates"] if entry["name"] == name)


def causes(report: dict[str, Any], count: int = 3) -> list[str]:
    return [suspect["cause"] for suspect in report["suspects"][:count]]


def layer(report: dict[str, Any], label: str) -> dict[str, Any]:
    return next(entry for entry in report["layers"] if f"{entry['name']}:{entry['slot']}" == label)


# -- log-probs --------------------------------------------------------------------------------------------------------


def test_log_probs_before_temperature(compare):
    """trl 4159. Raw log-probs of a rollout at 0.6 meet a trainer's of logits / 0.6: the ratio is far from 1."""

    def edit(a: Dump, b: Dump) -> None:
        set_logprobs(read_side(b), lambda logits: logits / 0.6)

    rollout = Scenario(manifest={"sampling": {"temperature": 0.6, "top_p": 1.0}})
    report = compare(rollout, actor(engine_logprobs=True), edit=edit)
    found = gate(report, "sampling")
    assert report["verdict"] == "divergent" and found["status"] == "fail"
    assert found["findings"][0]["cause"] == "temperature-semantics" and found["findings"][0]["side"] == "b"
    assert found["findings"][0]["figures"]["temperature"] == pytest.approx(0.6, rel=0.01)
    assert causes(report, 1) == ["temperature-semantics"]


def test_log_probs_renormalised_over_kept_tokens(compare):
    """trl 6789. The sampler scores among 5 tokens: every log-prob is larger, by -log of the kept mass."""

    def edit(a: Dump, b: Dump) -> None:
        side = read_side(a)
        set_logprobs(side, lambda logits: logits)
        raw = a.tokens["logprob"].copy()
        source = side.natives[side.resolution.sources["lm_head:output.0"].native[0]]
        logits = a.read(*source).astype(np.float64)
        shares = -np.sort(-np.exp(logits), axis=1)
        mass = shares[:, :5].sum(axis=1) / shares.sum(axis=1)
        for row, kept in zip(a.rows(*source), mass):
            here = (a.tokens["sequence"] == row["sequence"]) & (a.tokens["position"] == row["position"] + 1)
            a.tokens["logprob"][here] = raw[here] - np.log(kept)

    report = compare(Scenario(), actor(), edit=edit)
    found = gate(report, "sampling")["findings"][0]
    assert (found["cause"], found["side"], found["figures"]["top_k"]) == ("renormalised-top-p", "a", 5)
    assert report["verdict"] == "divergent" and causes(report, 1) == ["renormalised-top-p"]


# -- weights ----------------------------------------------------------------------------------------------------------


def test_a_wrong_weight_conversion_is_seen_before_any_tensor(compare):
    """vime 274. Megatron's query groups read as [q | k | v]: the weights gate names it first."""

    def regrouped(w: Tensors) -> None:
        for i in range(3):
            names = [f"layers.{i}.self_attn.{x}_proj.weight" for x in "qkv"]
            fused = np.concatenate([w[name] for name in names])
            rows = np.arange(len(fused)).reshape(2, -1, 8)  # two groups of (two queries, key, value), heads of 8
            order = np.concatenate([rows[:, :2].ravel(), rows[:, 2].ravel(), rows[:, 3].ravel()])
            for name, part in zip(names, np.split(fused[order], np.cumsum([len(w[n]) for n in names[:2]]))):
                w[name] = part

    report = compare(Scenario(), actor(change_weights=regrouped, sketched=None))
    found = gate(report, "weights")
    assert found["status"] == "fail" and report["verdict"] == "divergent"
    assert {f["cause"] for f in found["findings"]} == {"permuted-qkv"}
    assert causes(report, 1) == ["permuted-qkv"]


def stale(w: Tensors) -> None:
    """An older checkpoint: every matrix as it was before some updates."""
    rng = np.random.default_rng(9)
    for name in w:
        w[name] = w[name] + 5e-3 * rng.normal(size=w[name].shape)


def test_stale_weights_of_one_step(tmp_path):
    """trl 5312. Weights that an engine kept through its sleep: step 0 is fine, at step 1 the fingerprints differ."""
    for step, change in enumerate((None, stale)):
        for name, scenario in (("a", Scenario(change_weights=change)), ("b", actor())):
            folder = write_dump(tmp_path / f"{name}{step}", scenario)
            target = tmp_path / name / scenario.stage / f"step{step}"
            target.parent.mkdir(parents=True, exist_ok=True)
            (folder / scenario.stage / "step0").rename(target)
    statuses, found = [], []
    for step in (0, 1):
        with open_dump(tmp_path / "a", step) as a, open_dump(tmp_path / "b", step) as b:
            report = compare_open(a, b)
        statuses.append(gate(report, "weights")["status"])
        found.append(report)
    assert statuses == ["pass", "fail"] and found[0]["verdict"] == "consistent"
    whole = gate(found[1], "weights")["findings"][0]
    assert (whole["cause"], whole["subject"], whole["figures"]["parameters"]) == ("stale-weights", "weights", 39)
    assert causes(found[1], 1) == ["stale-weights"]


def test_weights_of_a_resumed_run_at_step_0(compare):
    """slime 1695. A run that resumed from another checkpoint differs before any update explains it."""
    report = compare(Scenario(weights_seed=1), actor(weights_seed=0))
    found = gate(report, "weights")
    assert found["status"] == "fail" and found["findings"][0]["subject"] == "weights"
    assert causes(report, 1) == ["stale-weights"]


def test_norm_weights_cast_to_a_coarser_dtype(compare):
    """vllm 42379. Norm weights rounded to 8 bits move every norm by some 3 %: the gate names them."""

    def fine(w: Tensors) -> None:
        rng = np.random.default_rng(1)
        for name in w:
            if "norm" in name:
                w[name] = w[name] * rng.uniform(0.9, 1.1, w[name].shape)

    def cast(w: Tensors) -> None:
        fine(w)
        for name in w:
            if "norm" in name:
                w[name] = round_to(w[name], "float8_e4m3fn").astype(np.float64)

    report = compare(Scenario(change_weights=fine), actor(change_weights=cast))
    found = gate(report, "weights")
    assert {f["cause"] for f in found["findings"]} == {"weight-precision"} and report["verdict"] == "divergent"
    assert {f["side"] for f in found["findings"]} == {"b"}
    assert report["first_divergence"]["name"] == "layers.0.input_layernorm"
    assert 0.01 < layer(report, "layers.0.input_layernorm:output.0")["rel_l2"] < 0.06


# -- noise or fault ---------------------------------------------------------------------------------------------------


def test_other_micro_batches_are_noise(compare):
    """verl 6280. Batches of other sizes sum in another order: a ratio that is not exactly 1, no fault."""
    report = compare(Scenario(layout="vllm", noise=1), actor("transformers", noise=2))
    assert report["verdict"] == "consistent" and not report["suspects"]
    assert report["tokens"]["mean_abs_logprob_diff"] > 0  # what a clip fraction above 0 comes from


def test_noise_of_every_layer_drifts_and_one_fault_jumps(compare):
    """sglang 27540. A fused norm of low precision in every layer drifts; one broken module jumps."""

    def noisy(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        return lambda x: x * (1 + 2e-3 * rng.uniform(-1, 1, x.shape))

    drift = {
        f"layers.{i}.{name}_layernorm:output.0": noisy(i) for i in range(6) for name in ("input", "post_attention")
    }
    found = compare(Scenario(model=DEEP), actor(model=DEEP, faults=drift))
    assert found["verdict"] != "consistent" and found["first_divergence"]["name"] == "layers.0.input_layernorm"
    one = {"layers.3.input_layernorm:output.0": noisy(3)}
    jump = compare(Scenario(model=DEEP, noise=1), actor(model=DEEP, noise=2, faults=one))
    assert jump["located"]["growth"] == "jump"
    assert jump["first_divergence"]["name"] == "layers.3.input_layernorm"
    assert jump["suspects"][0]["name"] == "layers.3.input_layernorm"


def test_a_rope_that_changes_norms(compare):
    """vllm-ascend 12723. A rope kernel that does not keep norms shows in the ratio of the norms."""
    fault = {"layers.1.self_attn.rotary_emb:output.0": lambda x: x * np.linspace(0.9, 1.2, x.shape[-1])}
    report = compare(Scenario(), actor(faults=fault))
    found = layer(report, "layers.1.self_attn.rotary_emb:output.0")
    assert abs(found["norm_ratio"] - 1) > 0.01 and report["verdict"] == "divergent"
    assert report["suspects"][0]["name"] == "layers.1.self_attn.rotary_emb"


def test_one_exploding_token_is_in_the_tail_not_the_mean(compare):
    """NeMo-RL 1801. Rope fused in bf16 explodes at one token, which the mean over all hides."""

    def explode(x: np.ndarray) -> np.ndarray:
        if len(x) > 30:
            x[20] = x[20] * 4
        return x

    report = compare(
        Scenario(dtype="bfloat16", noise=1),
        actor(dtype="bfloat16", noise=2, faults={"layers.1.self_attn.rotary_emb:output.0": explode}),
        sequences=[LONG[0], *((uid, ids[:20], n) for uid, ids, n in LONG[1:])],
    )
    assert report["verdict"] == "divergent"
    assert report["first_divergence"]["name"] == "layers.1.self_attn.rotary_emb"
    assert report["first_divergence"]["position"] == 20


def test_decode_prefill_and_actor_three_ways(compare):
    """NeMo-RL 2141. Decode is off while the engine's own prefill fits the actor: the decode kernel."""

    def decode_only(x: np.ndarray) -> np.ndarray:
        x[PROMPT:] = x[PROMPT:] * 1.05
        return x

    broken = {"layers.1.self_attn.o_proj:input.0": decode_only}
    decode = Scenario(faults=broken, noise=1)
    prefill, training = Scenario(decode=False, noise=2), actor(noise=3)
    against_actor = compare(decode, training)
    assert against_actor["verdict"] == "divergent" and "decode-kernel" in causes(against_actor)
    against_prefill = compare(decode, Scenario(layout="megatron", stage="rollout", noise=2))
    assert against_prefill["verdict"] == "divergent"
    assert against_prefill["first_divergence"]["name"] == against_actor["first_divergence"]["name"]
    assert compare(Scenario(layout="transformers", noise=2), training)["verdict"] == "consistent"
    assert compare(prefill, training)["verdict"] in ("consistent", "incomparable")  # prompt rows only


# -- rows and ids -----------------------------------------------------------------------------------------------------


def test_cached_rows_are_reported_as_not_executed(compare):
    """vllm 3251. Five tokens came from the prefix cache: their rows are listed, and the rest is compared."""
    report = compare(Scenario(cached={1: 5}), actor())
    assert report["verdict"] == "consistent" and "5 rows not executed (prefix cache)" in report["headline"]
    assert report["coverage"]["rows"]["b"]["prefix_cache"] == 5


def test_the_same_prompt_twice_with_a_stale_cache(compare):
    """vllm 42245. The second of two equal prompts is served from a cache that was never filled."""
    ids = LONG[0][1]
    twice = [("p0", ids, PROMPT), ("p1", np.concatenate([ids[:PROMPT], LONG[1][1][PROMPT:]]), PROMPT)]
    second: list[int] = []

    def stale_keys(x: np.ndarray) -> np.ndarray:
        second.append(1)
        if len(second) % 2 == 0:
            x[5:] = x[5:] * 1.2
        return x

    report = compare(
        Scenario(faults={"layers.0.self_attn.o_proj:input.0": stale_keys}, cached={1: 5}),
        actor(),
        sequences=twice,
    )
    assert report["verdict"] == "divergent"
    assert report["first_divergence"]["sequence"].startswith("p1")
    assert report["coverage"]["rows"]["b"]["prefix_cache"] == 5
    kinds = {(found["name"], found["kind"]) for found in report["located"]["rows"]}
    assert ("layers.0.self_attn.o_proj", "cached-prefix") in kinds
    assert "stale-prefix-cache" in causes(report)


def test_a_padded_vocabulary_is_cut_and_compared(compare):
    """Megatron-Bridge 2602. Of 64 columns of Megatron's logits 50 are tokens: those are compared."""
    report = compare(Scenario(), actor("megatron"))
    head = layer(report, "lm_head:output.0")
    assert head["verdict"] in ("identical", "consistent") and head["b"]["operation"] == "cut_vocabulary"
    broken = compare(Scenario(), actor("megatron", faults={"lm_head:output.0": lambda x: np.roll(x, 1, axis=-1)}))
    assert broken["verdict"] == "divergent"
    assert layer(broken, "lm_head:output.0")["verdict"] == "divergent"


def test_retokenised_turns_fail_before_any_number(compare):
    """trl 5224. The trainer tokenises the text of two turns again: one token of the later prompt becomes two."""
    other = prompts()
    uid, ids, size = other[2]
    other[2] = (uid, np.concatenate([ids[: size - 1], [3, 4], ids[size:]]), size + 1)
    report = compare(Scenario(), actor(), sequences=prompts(), other=other)
    found = gate(report, "tokens")
    assert found["status"] == "fail" and report["verdict"] == "divergent"
    figures = found["findings"][0]["figures"]
    assert (figures["sequence"], figures["position"]) == (uid, size - 1) and figures["lengths"].count(" and ") == 1
    assert causes(report, 1) == ["token-mismatch"]


@pytest.mark.parametrize("name", [name for names in ELSEWHERE.values() for name in names])
def test_the_tests_of_other_reports_exist(name: str) -> None:
    file, _, test = name.partition("::")
    assert f"def {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")
