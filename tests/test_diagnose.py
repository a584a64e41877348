"""The diagnosis: which suspects follow from which evidence, in which order, and what it recommends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, prompts, write_dump
from synthetic_model import Fault, Tiny

from probe.compare import run as compare_run
from probe.compare.diagnose.action import HEALTHY, healthy_figures, recommend
from probe.compare.diagnose.causes import CAUSES
from probe.compare.diagnose.fits import Fits, relate
from probe.compare.diagnose.leads import LAST, joined, rank_of
from probe.compare.diagnose.patterns import RULES
from probe.compare.diagnose.run import diagnose
from probe.compare.evidence import BROKEN, FINE, Evidence, Explanation, Located, Replayed, Replays, RowPattern
from probe.compare.gates import Gate, GateFinding
from probe.compare.names.canonical import module_at_fault
from probe.compare.replay.recipes import RECIPES
from probe.compare.settings_gates import CAUSES as CONFIG_CAUSES
from probe.logprobs import ratio_metrics, token_metrics
from probe.store.dtypes import round_to

DOC = (Path(__file__).parents[1] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
MODEL = Tiny(layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16)


# -- names ------------------------------------------------------------------------------------------------------------

AT_FAULT = {
    "embed_tokens:output.0": "embed_tokens",
    "layers.3.self_attn.o_proj:input.0": "layers.3.self_attn",
    "layers.3.self_attn.o_proj:output.0": "layers.3.self_attn.o_proj",
    "layers.3.self_attn.rotary_emb:output.1": "layers.3.self_attn.rotary_emb",
    "layers.3.mlp.down_proj:input.0": "layers.3.mlp.act_fn",
    "layers.3.mlp.router:ids": "layers.3.mlp.router",
    "layers.3.mlp.experts.7.down_proj:output.0": "layers.3.mlp.experts.7.down_proj",
    "layers.11:output.0": "layers.11",
    "layers.3.self_attn.k_proj.bias": "layers.3.self_attn.k_proj",
    "norm.weight": "norm",
    "lm_head:output.0": "lm_head",
    "config": "config",
    "log-probs": "log-probs",
}


@pytest.mark.parametrize(("label", "module"), AT_FAULT.items())
def test_the_module_at_fault_is_the_one_that_computes_the_tensor(label, module):
    assert module_at_fault(label) == module


def test_modules_are_ranked_in_execution_order():
    order = [
        "config",
        "embed_tokens",
        "layers.0.input_layernorm",
        "layers.0.self_attn.rotary_emb",
        "layers.0.self_attn",
    ]
    order += ["layers.0.self_attn.o_proj", "layers.0.mlp.up_proj", "layers.0.mlp.act_fn", "layers.0.mlp.down_proj"]
    order += ["layers.0", "layers.1.input_layernorm", "norm", "lm_head", "log-probs"]
    ranks = [rank_of(module, 2) for module in order]
    assert ranks == sorted(ranks) and ranks[-1] == LAST and len(set(ranks)) == len(ranks)


# -- the document and the tables --------------------------------------------------------------------------------------


def test_the_document_explains_exactly_the_causes_of_the_code():
    section = DOC.split("## 3. Causes")[1].split("## 4.")[0]
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", section, re.M)) == sorted(CAUSES)


def test_the_document_lists_exactly_the_figures_of_the_action():
    section = DOC.split("## 4.")[1]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.M)) == sorted(HEALTHY)


def test_every_rule_names_a_known_cause_and_every_check_can_be_filled_in():
    assert {rule.cause for rule in RULES} <= set(CAUSES)
    for slug, cause in CAUSES.items():
        filled = cause.check.format(module="layers.0.mlp", a="A", b="B", show="probe show A")
        assert filled and "{" not in filled, slug


# -- evidence made by hand --------------------------------------------------------------------------------------------


def capture(folder: Path, a: Scenario, b: Scenario, sequences: Any = None) -> Evidence:
    """Compare two scenarios and return the evidence that the diagnosis saw."""
    seen: list[Evidence] = []
    before = compare_run.diagnose
    compare_run.diagnose = lambda e: seen.append(e) or before(e)
    try:
        compare_run.compare_dumps(
            write_dump(folder / "a", a, sequences), write_dump(folder / "b", b, sequences), replay=False
        )
    finally:
        compare_run.diagnose = before
    return seen[0]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Evidence:
    a, b = Scenario(model=MODEL, noise=1), actor(model=MODEL, noise=2)
    found = capture(tmp_path_factory.mktemp("healthy"), a, b, prompts(5))
    assert found.verdict == "consistent" and not found.suspects
    return found


def replayed(label: str, error: float = 50.0, side: str = "b", verdict: str = BROKEN, **more: Any) -> Replayed:
    bands = {"band": 2.0, "row_band": 4.0, "column_band": 4.0}
    worst = {"worst_row": error, "row": (0, 3), "worst_column": error, "column": 1}
    given = bands | worst | {"verdict": verdict, "rows": 40} | more
    return Replayed(label=label, kind="kind", side=side, error=error, **given)


def made(healthy: Evidence, *replays: Replayed, gates: tuple[Gate, ...] = (), **changes: Any) -> Evidence:
    """Return the healthy evidence with these replays and gates in place of its own, and the verdict they lead to."""
    by_side: dict[str, dict[str, Replayed]] = {"a": {}, "b": {}}
    for found in replays:
        by_side[found.side][found.label] = found
    named = {gate.name: gate for gate in gates}
    gates_ = [named.get(gate.name, gate) for gate in healthy.gates]
    return replace(healthy, **({"verdict": "divergent", "replays": Replays(by_side), "gates": gates_} | changes))


def fit(cause: str, error: float = 1.0, value: float | None = None) -> Explanation:
    return Explanation(cause, error, f"{cause} is assumed", value)


def test_agreeing_sides_have_no_suspects_and_training_goes_on(healthy):
    assert recommend(healthy)["word"] == "continue"
    assert {figure["name"] for figure in recommend(healthy)["figures"]} <= set(HEALTHY)
    assert all(figure["ok"] and figure["source"] for figure in recommend(healthy)["figures"])


def test_a_replay_that_a_hypothesis_fits_names_module_side_and_cause(healthy):
    label = "layers.2.self_attn.rotary_emb:output.0"
    found = replayed(label, explanations=(fit("rope-base", 0.9), fit("rope-scaling", 30.0)))
    first, second = diagnose(made(healthy, found, replayed(label, 1.1, "a", FINE)))[:2]
    assert (first.name, first.side, first.cause) == ("layers.2.self_attn.rotary_emb", "b", "rope-base")
    assert first.confidence == 0.95 and second.cause == "rope-scaling" and second.confidence < 0.5
    assert "50 roundings" in first.evidence[0] and "side a: 1.1" in first.evidence[0]


def test_a_broken_replay_without_a_hypothesis_is_still_the_module(healthy):
    first = diagnose(made(healthy, replayed("layers.1.mlp.down_proj:output.0")))[0]
    assert (first.name, first.side, first.cause) == ("layers.1.mlp.down_proj", "b", "unknown")


def test_one_row_of_a_healthy_tensor_is_row_corruption_and_one_column_column_corruption(healthy):
    row = replayed("layers.1.self_attn.o_proj:output.0", 1.0, worst_row=90.0, worst_column=3.0)
    column = replayed("layers.2.self_attn.v_proj:output.0", 1.0, worst_row=3.0, worst_column=600.0)
    suspects = diagnose(made(healthy, row, column))
    assert [(s.name, s.cause) for s in suspects[:2]] == [
        ("layers.1.self_attn.o_proj", "row-corruption"),
        ("layers.2.self_attn.v_proj", "column-corruption"),
    ]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("decode-only", "decode-kernel"), ("from-position", "position-range"), ("cached-prefix", "stale-prefix-cache")],
)
def test_the_rows_of_a_broken_replay_name_its_cause(healthy, kind, cause):
    label = "layers.1.self_attn.o_proj:input.0"
    located = Located(rows={label: RowPattern(kind, 9, 40, {"position": 7})})
    first = diagnose(made(healthy, replayed(label), located=located))[0]
    assert (first.name, first.cause, first.side) == ("layers.1.self_attn", cause, "b")


def test_the_first_broken_module_in_execution_order_comes_first(healthy):
    late = replayed("layers.3.mlp.down_proj:output.0", 900.0, explanations=(fit("scale", 1.0),))
    early = replayed("layers.0.input_layernorm:output.0", 5.0, explanations=(fit("norm-precision", 1.9),))
    assert [s.name for s in diagnose(made(healthy, late, early))[:2]] == [
        "layers.0.input_layernorm",
        "layers.3.mlp.down_proj",
    ]


def test_one_fault_in_every_layer_is_one_suspect(healthy):
    labels = [
        f"layers.{i}.{name}:output.0" for i in range(4) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    found = [replayed(label, explanations=(fit("norm-eps", 1.1, 10.0),)) for label in labels]
    suspects = diagnose(made(healthy, *found))
    assert len(suspects) == 1 and suspects[0].name == "layers.0.input_layernorm"
    assert "the same in 8 modules" in suspects[0].evidence[-1]


def test_a_gate_and_a_replay_that_say_the_same_are_one_surer_suspect(healthy):
    finding = GateFinding("norm-eps", "config", "unknown", "rms_norm_eps is 1e-06 in a, 1e-05 in b")
    gate = Gate("config", "fail", finding.text, (finding,))
    replays = [replayed(f"layers.{i}.input_layernorm:output.0", explanations=(fit("norm-eps"),)) for i in range(4)]
    suspects = diagnose(made(healthy, *replays, gates=(gate,)))
    assert [(s.name, s.side, s.cause) for s in suspects] == [("layers.0.input_layernorm", "b", "norm-eps")]
    assert suspects[0].confidence == 0.99 and finding.text in suspects[0].evidence
    alone = diagnose(made(healthy, gates=(gate,)))
    assert [(s.name, s.confidence) for s in alone] == [("config", 0.9)]


def test_parameters_that_differ_explain_the_replay_of_their_module(healthy):
    finding = GateFinding("stale-weights", "layers.1.mlp.up_proj.weight", "b", "other content")
    gate = Gate("weights", "fail", finding.text, (finding,))
    broken = replayed("layers.1.mlp.up_proj:output.0", explanations=(fit("scale", 20.0),))
    suspects = diagnose(made(healthy, broken, gates=(gate,)))
    assert [(s.name, s.side, s.cause) for s in suspects] == [("layers.1.mlp.up_proj", "b", "stale-weights")]
    assert len(suspects[0].evidence) == 3


def test_findings_of_one_cause_are_one_suspect_at_the_first_module(healthy):
    names = ["layers.3.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"] * 3
    findings = tuple(GateFinding("stale-weights", name, "unknown", f"{name} differs") for name in names)
    suspects = diagnose(made(healthy, gates=(Gate("weights", "fail", "", findings),)))
    assert [s.name for s in suspects] == ["layers.0.self_attn.q_proj"] and "5 more" in suspects[0].evidence[-1]


def test_what_fails_before_the_model_goes_before_broken_modules(healthy):
    gate = Gate("tokens", "fail", "ids differ", (GateFinding("token-mismatch", "tokens", "unknown", "ids differ"),))
    suspects = diagnose(made(healthy, replayed("layers.0.self_attn.q_proj:output.0"), gates=(gate,)))
    assert [s.cause for s in suspects] == ["token-mismatch", "unknown"]


def test_a_failed_gate_without_findings_still_names_something(healthy):
    suspects = diagnose(made(healthy, gates=(Gate("positions", "fail", "rows hold other tokens"),)))
    assert [(s.name, s.cause, s.evidence) for s in suspects] == [
        ("positions", "position-offset", ("rows hold other tokens",))
    ]


def test_warnings_count_for_agreeing_sides_only_where_they_matter(healthy):
    real = GateFinding("raw-logprobs", "log-probs", "a", "a returned raw log-probs at temperature 0.6")
    env = GateFinding("environment", "environment", "unknown", "torch differs")
    gates = (Gate("sampling", "warn", real.text, (real,)), Gate("environment", "warn", env.text, (env,)))
    suspects = diagnose(made(healthy, gates=gates, verdict="consistent"))
    assert [(s.cause, s.side, s.confidence) for s in suspects] == [("raw-logprobs", "a", 0.5)]
    action = recommend(made(healthy, gates=gates, verdict="consistent", suspects=suspects))
    assert action["word"] == "correct"
    assert [s.cause for s in diagnose(made(healthy, gates=gates))] == ["raw-logprobs", "environment"]


def test_nothing_is_suspected_where_nothing_could_be_judged(healthy):
    assert diagnose(made(healthy, verdict="incomparable")) == []
    broken = replayed("layers.1.mlp.down_proj:output.0", explanations=(fit("nan"),))
    assert [suspect.cause for suspect in diagnose(made(healthy, broken, verdict="incomparable"))] == ["nan"]
    assert recommend(made(healthy, verdict="incomparable"))["word"] == "stop"


def test_confidence_joins_as_independent_doubts_and_is_never_certain():
    assert joined([0.5, 0.5]) == 0.75 and joined([0.9] * 9) == 0.99


# -- evidence of the free-running comparison --------------------------------------------------------------------------


def noisy(row: slice | int, seed: int = 5) -> Fault:
    def fault(values: np.ndarray) -> np.ndarray:
        values[row] = np.random.default_rng(seed).normal(size=values[row].shape) * values.std()
        return values

    return fault


def put(value: float, *where: Any) -> Fault:
    def fault(values: np.ndarray) -> np.ndarray:
        values[where] = value
        return values

    return fault


def coarse(values: np.ndarray) -> np.ndarray:
    return round_to(values, "bfloat16").astype(np.float64)


AT = "layers.2"
FREE: dict[str, tuple[str, Fault, str, str]] = {
    "scale": (f"{AT}.mlp.down_proj:output.0", lambda v: v * 1.03, f"{AT}.mlp.down_proj", "scale"),
    "twice": (f"{AT}.self_attn.o_proj:output.0", lambda v: v * 2, f"{AT}.self_attn.o_proj", "duplicated-all-reduce"),
    "row": (f"{AT}.self_attn.o_proj:output.0", noisy(3), f"{AT}.self_attn.o_proj", "row-corruption"),
    "nan": (f"{AT}.post_attention_layernorm:output.0", put(np.nan, 2, 3), f"{AT}.post_attention_layernorm", "nan"),
    "inf": (f"{AT}.mlp.gate_proj:output.0", put(np.inf, 2, 3), f"{AT}.mlp.gate_proj", "inf"),
    "bf16 norm": (f"{AT}.input_layernorm:output.0", coarse, f"{AT}.input_layernorm", "norm-precision"),
    "bf16 head": ("lm_head:output.0", coarse, "lm_head", "head-precision"),
    "bf16 linear": (f"{AT}.self_attn.o_proj:output.0", coarse, f"{AT}.self_attn.o_proj", "partial-sums"),
    "late rows": (
        f"{AT}.self_attn.o_proj:input.0",
        lambda v: np.concatenate([v[:3], v[3:] * 1.3]),
        f"{AT}.self_attn",
        "position-range",
    ),
    "later rope": (
        f"{AT}.self_attn.rotary_emb:output.0",
        lambda v: np.concatenate([v[:1], np.roll(v[1:], 1, -1)]),
        f"{AT}.self_attn.rotary_emb",
        "rope-pairing",
    ),
    "whole rope": (
        f"{AT}.self_attn.rotary_emb:output.1",
        lambda v: np.roll(v, 1, 0),
        f"{AT}.self_attn.rotary_emb",
        "position-offset",
    ),
    "embedding": ("embed_tokens:output.0", lambda v: np.roll(v, 1, 0), "embed_tokens", "vocab-offset"),
    "activation": (f"{AT}.mlp.down_proj:input.0", np.tanh, f"{AT}.mlp.act_fn", "activation"),
    "columns": (
        f"{AT}.self_attn.v_proj:output.0",
        put(0.0, slice(None), [2, 9]),
        f"{AT}.self_attn.v_proj",
        "column-corruption",
    ),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinity over infinity, in the faulty model
@pytest.mark.parametrize("case", FREE)
def test_without_replays_the_first_tensor_that_parts_and_its_pattern_speak(tmp_path, case):
    label, fault, module, cause = FREE[case]
    a, b = Scenario(model=MODEL, layout="megatron", noise=1), actor(model=MODEL, noise=2, faults={label: fault})
    found = capture(tmp_path, a, b, prompts(5))
    assert found.verdict == "divergent"
    assert found.suspects[0].name == module
    assert cause in [suspect.cause for suspect in found.suspects[:3] if suspect.name == module]
    assert recommend(found)["word"] == "stop"


def test_bf16_on_one_side_from_the_embedding_on_is_precision(tmp_path):
    labels: list[str] = []
    run_: Callable[[np.ndarray], np.ndarray] = coarse
    a, b = Scenario(model=MODEL, layout="megatron", noise=1), actor(model=MODEL, noise=2)
    for i in range(MODEL.layers):
        labels += [f"layers.{i}.{name}_layernorm:output.0" for name in ("input", "post_attention")]
        labels += [f"layers.{i}.self_attn.{name}_proj:output.0" for name in "qkvo"]
        labels += [f"layers.{i}.mlp.{name}_proj:output.0" for name in ("gate", "up", "down")] + [f"layers.{i}:output.0"]
    b = replace(b, faults=dict.fromkeys([*labels, "norm:output.0", "lm_head:output.0"], run_))
    found = capture(tmp_path, a, b, prompts(5))
    assert found.suspects[0].cause in ("precision", "norm-precision")
    assert "precision" in [suspect.cause for suspect in found.suspects[:3]]


# -- actions ----------------------------------------------------------------------------------------------------------


def test_ratio_metrics_of_equal_log_probs_and_of_known_ratios():
    equal = ratio_metrics(np.zeros(4), np.zeros(4))
    assert equal == {"tme": 1.0, "mean_ratio": 1.0, "ess": 1.0, "chi2_token": 0.0}
    two = ratio_metrics(np.zeros(2), np.log([2.0, 0.5]))
    assert two["tme"] == pytest.approx(2.0) and two["mean_ratio"] == pytest.approx(1.25)
    assert two["ess"] == pytest.approx(1.25**2 / 2.125) and two["chi2_token"] == pytest.approx(1.125)
    assert np.isnan(ratio_metrics(np.zeros(0), np.zeros(0))["ess"])
    assert ratio_metrics(np.zeros(2), np.array([800.0, 800.0]))["ess"] == pytest.approx(1.0)


def test_noise_that_moves_ratios_is_corrected_and_a_bug_is_not(healthy):
    tokens = healthy.tokens | {"mean_abs_logprob_diff": 0.06, "k3": 4e-3}
    action = recommend(made(healthy, tokens=tokens, verdict="consistent", suspects=[]))
    assert action["word"] == "correct"
    assert [figure["name"] for figure in action["figures"] if not figure["ok"]] == ["mean_abs_logprob_diff", "k3"]
    assert "0.06" in action["text"] and recommend(made(healthy, suspects=[]))["word"] == "stop"


def test_without_log_probs_the_action_says_that_ratios_are_unseen(healthy):
    action = recommend(made(healthy, tokens=healthy.tokens | {"compared": 0}, verdict="consistent", suspects=[]))
    assert action == {"word": "continue", "text": action["text"], "figures": []} and "unseen" in action["text"]


# -- replays that clear a module --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parting(tmp_path_factory) -> Evidence:
    """Return evidence whose first divergent tensor is layers.2.mlp.down_proj:output.0."""
    label = "layers.2.mlp.down_proj:output.0"
    a, b = Scenario(model=MODEL, noise=1), actor(model=MODEL, noise=2, faults={label: lambda v: v * 1.03})
    found = capture(tmp_path_factory.mktemp("parting"), a, b, prompts(5))
    assert found.first is not None and found.first["name"] == "layers.2.mlp.down_proj"
    return found


def cleared(e: Evidence, *labels: str, rows: int = 40) -> list[Replayed]:
    return [replayed(label, 1.0, side, FINE, rows=rows) for label in labels for side in "ab"]


def test_what_parts_although_its_module_replays_as_healthy_is_inherited(parting):
    entry = parting.entry("layers.2.mlp.down_proj:output.0")
    assert entry is not None and entry.metrics is not None
    rows = entry.metrics.rows
    suspects = diagnose(made(parting, *cleared(parting, entry.match.label, rows=rows)))
    assert [(s.name, s.cause) for s in suspects] == [("layers.2.mlp.act_fn", "unknown")]
    assert "no replay clears" in suspects[0].evidence[1]
    before = [m.match.label for m in parting.measured if m.order <= entry.order]
    suspects = diagnose(made(parting, *cleared(parting, *before, rows=rows)))
    assert [(s.name, s.cause) for s in suspects] == [("layers.2.mlp.down_proj", "rounding")]


def test_a_replay_clears_only_the_rows_that_it_recomputed(parting):
    suspects = diagnose(made(parting, *cleared(parting, "layers.2.mlp.down_proj:output.0", rows=3)))
    assert (suspects[0].name, suspects[0].cause) == ("layers.2.mlp.down_proj", "scale")


def test_parameters_that_differ_explain_a_tensor_that_each_side_replays_as_healthy(parting):
    finding = GateFinding("scaled-weight", "layers.2.mlp.down_proj", "unknown", "b = 1.03 x a")
    gate = Gate("weights", "fail", finding.text, (finding,))
    entry = parting.entry("layers.2.mlp.down_proj:output.0")
    assert entry is not None and entry.metrics is not None
    replays = cleared(parting, entry.match.label, rows=entry.metrics.rows)
    suspects = diagnose(made(parting, *replays, gates=(gate,)))
    assert [(s.name, s.cause) for s in suspects[:1]] == [("layers.2.mlp.down_proj", "scaled-weight")]


# -- how the two sides of a tensor relate -----------------------------------------------------------------------------


def values(rows: int = 48, features: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, features))


def test_relations_of_two_tensors_are_told_apart():
    y = values()
    noise = 1e-4 * values(seed=1)
    row, column = 1 + 0.1 * values(48, 1, 2), 1 + 0.1 * values(1, 32, 3)
    assert relate(y * row + noise, y).row_factors > 0.95 > 0.8 > relate(y * row + noise, y).column_factors
    assert relate(y * column + noise, y).column_factors > 0.95 > 0.8 > relate(y * column + noise, y).row_factors
    assert relate(y + 0.2 * values(1, 32, 4) + noise, y).offset > 0.95
    unrelated = relate(values(seed=9), y)
    assert max(unrelated.offset, unrelated.row_factors, unrelated.column_factors) < 0.5 and unrelated.moved == 0
    assert relate(y, y) == Fits()


def test_features_in_another_place_are_seen_and_halves_told_apart():
    y = values()
    order = np.arange(32)
    order[[3, 4, 5, 6, 7, 8, 9, 10]] = order[[10, 9, 8, 7, 6, 5, 4, 3]]
    moved = relate(y[:, order], y)
    assert moved.moved == pytest.approx(0.25) and not moved.halves
    halves = relate(np.roll(y, 16, axis=1), y)
    assert halves.moved == 1.0 and halves.halves


def test_dropped_elements_zero_rows_and_coarse_values_mark_their_side():
    y = values()
    kept = np.random.default_rng(5).random(y.shape) > 0.1
    dropped = relate(y, np.where(kept, y / 0.9, 0.0))
    assert dropped.dropped == pytest.approx(float((~kept).mean())) and dropped.dropped_side == "b"
    half = y.copy()
    half[::2] = 0
    assert relate(half, y).zero_rows == 0.5 and relate(half, y).zero_side == "a"
    fine = y.astype(np.float32)
    assert relate(fine, round_to(fine, "bfloat16")).coarse_side == "b"
    assert relate(round_to(fine, "bfloat16"), round_to(1.5 * fine, "bfloat16")).coarse_side == ""


def test_replays_and_gates_name_known_causes_only():
    hypotheses = [h.cause for recipes in RECIPES.values() for recipe in recipes for h in recipe.hypotheses]
    assert hypotheses and set(hypotheses) <= set(CAUSES)
    assert set(CONFIG_CAUSES.values()) <= set(CAUSES)


def test_the_wider_ranges_of_experts_hold_together():
    """Normal differences of the mean |D| that a mixture of experts may have pass the ranges of the other figures of D
    too (Pearson depends on how sure the model is)."""
    rng = np.random.default_rng(0)
    rollout = np.log(rng.uniform(0.05, 1.0, 20_000))
    tokens = [
        token_metrics(rollout, rollout + noise) | ratio_metrics(rollout, rollout + noise)
        for noise in (rng.normal(0.0, mean * np.sqrt(np.pi / 2), len(rollout)) for mean in (0.099, 0.115))
    ]
    narrow, wide, beyond = (
        {figure["name"] for figure in healthy_figures(figures, loose=loose) if not figure["ok"]} - {"pearson"}
        for figures, loose in ((tokens[0], False), (tokens[0], True), (tokens[1], True))
    )
    assert narrow == {"mean_abs_logprob_diff", "k3", "tme"} and not wide
    assert beyond == {"mean_abs_logprob_diff", "k3", "tme"}
