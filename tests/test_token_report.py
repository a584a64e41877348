"""The report of token sources: its verdict and words, the same figures as compare's, log-probs that are not finite."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from synthetic_dumps import Scenario, actor, opened, write_dump
from test_report_docs import NAMED, keys
from token_batches import batch_of, token_batches

from probe.compare.diagnose.action import HEALTHY, healthy_figures
from probe.compare.gates import GateFinding
from probe.compare.ppo import PPOConfig
from probe.compare.run import EXIT_STATUS, compare_dumps, compare_open, exit_status
from probe.compare.tokens.batch import NotFinite, find_not_finite
from probe.compare.tokens.run import compare_token_sources, counts, token_report
from probe.compare.tokens.verdict import verdict
from probe.errors import ProbeError

SHAPE = (16, 40)


@pytest.fixture
def rollout() -> dict[str, Any]:
    """Return arrays as verl has them: a healthy pair of log-probs (bf16-sized noise), mask, responses."""
    rng = np.random.default_rng(0)
    a = -rng.exponential(0.7, SHAPE) - 0.5
    return {
        "rollout_log_probs": a,
        "old_log_probs": a + rng.normal(0, 0.01, SHAPE),
        "response_mask": np.arange(SHAPE[1]) < rng.integers(10, SHAPE[1], SHAPE[0])[:, None],
        "responses": rng.integers(0, 1000, SHAPE),
    }


def report_of(folder: Path, arrays: dict[str, Any], **options: Any) -> dict[str, Any]:
    path = folder / "batch.npz"
    np.savez(path, **arrays)
    return compare_token_sources([path], **options)


def finding(cause: str) -> GateFinding:
    return GateFinding(cause, "log-probs", "a", f"something is {cause}")


# -- the verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causes", "word"),
    [
        ([], "consistent"),
        (["temperature-semantics"], "suspect"),
        (["renormalised-top-p"], "suspect"),
        (["raw-logprobs"], "suspect"),
        (["length-mismatch"], "suspect"),
        (["bypassed-logprobs"], "incomparable"),
        (["bypassed-logprobs", "temperature-semantics"], "incomparable"),
        (["logprob-shift"], "divergent"),
        (["zero-filled-logprobs"], "divergent"),
        (["nan"], "divergent"),
        (["bypassed-logprobs", "inf"], "divergent"),
        (["temperature-semantics", "logprob-shift"], "divergent"),
        (["a-cause-that-no-table-knows"], "divergent"),
    ],
)
def test_the_worst_finding_decides(causes, word):
    batch = batch_of(np.full((2, 9), -1.0), np.full((2, 9), -1.001))
    assert verdict(batch, [finding(cause) for cause in causes], [{"ok": True}]) == word


def test_a_figure_outside_its_range_is_suspect_and_nothing_compared_is_incomparable():
    batch = batch_of(np.full((2, 9), -1.0), np.full((2, 9), -1.001))
    assert verdict(batch, [], [{"ok": True}, {"ok": False}]) == "suspect"
    empty = batch_of(np.full((2, 9), -1.0), np.full((2, 9), -1.0), np.zeros((2, 9), bool))
    assert verdict(empty, [], []) == "incomparable"
    assert verdict(empty, [finding("nan")], []) == "divergent"


@pytest.mark.parametrize("name", HEALTHY)
def test_each_healthy_range_includes_its_ends_and_nothing_beyond(name):
    healthy = HEALTHY[name]
    for end, beyond in ((healthy.low, -1e-6), (healthy.high, 1e-6)):
        if math.isfinite(end):
            assert healthy_figures({name: end}, loose=False)[0]["ok"]
            assert not healthy_figures({name: end + beyond}, loose=False)[0]["ok"]
    assert healthy_figures({name: math.nan}, loose=False) == healthy_figures({name: None}, loose=False) == []


def test_a_mixture_of_experts_has_the_looser_range():
    a = -np.random.default_rng(0).exponential(1.0, (4, 64)) - 0.1
    for loose, word in ((False, "suspect"), (True, "consistent")):
        batch = batch_of(a, a + np.where(np.arange(64) % 2, 0.04, -0.04), loose=loose)  # k3 is 8e-4, mean 0.04
        assert token_report(batch, None, PPOConfig())["verdict"] == word


# -- whole reports ----------------------------------------------------------------------------------------------------


def test_a_healthy_pair_is_consistent(tmp_path, rollout):
    report = report_of(tmp_path, rollout)
    assert (report["verdict"], exit_status(report), report["findings"]) == ("consistent", 0, [])
    tokens = int(rollout["response_mask"].sum())
    assert report["headline"] == f"consistent on {tokens} tokens of 16 sequences"
    assert report["summary"].startswith(f"Consistent on {tokens} tokens of 16 sequences. Log-probs differ by 0.00")
    assert report["counts"] == {
        **{"sequences": 16, "empty_sequences": 0, "tokens": tokens, "compared": tokens, "steps": 0, "not_finite": []},
        **{"masked_out": 16 * 40 - tokens, "width": 40},
    }
    assert (report["a"]["kind"], report["a"]["key"], report["b"]["key"]) == (
        "npz",
        "rollout_log_probs",
        "old_log_probs",
    )
    assert report["next_commands"] == [f"probe tokens {tmp_path / 'batch.npz'} --report html --force"]
    json.dumps(report, allow_nan=False)


def test_noise_beyond_the_healthy_ranges_is_suspect_and_says_which(tmp_path, rollout):
    noise = np.random.default_rng(1).normal(0, 0.2, SHAPE)
    report = report_of(tmp_path, rollout | {"old_log_probs": rollout["rollout_log_probs"] + noise * 0.5})
    off = {figure["name"] for figure in report["figures"] if not figure["ok"]}
    assert report["verdict"] == "suspect" and {"mean_abs_logprob_diff", "k3"} <= off
    assert "mean_abs_logprob_diff 0.0" in report["headline"] and "Outside the healthy range" in report["summary"]


def test_log_probs_that_are_not_finite_are_divergent_and_in_no_figure(tmp_path, rollout):
    rollout["response_mask"][:] = True
    broken = rollout["old_log_probs"].copy()
    broken[3, 7], broken[5, 1], broken[5, 2] = np.nan, -np.inf, -np.inf
    report = report_of(tmp_path, rollout | {"old_log_probs": broken})
    kept = np.isfinite(broken)
    gap = np.abs(broken - rollout["rollout_log_probs"])[kept]
    assert report["verdict"] == "divergent"
    assert report["headline"].startswith("divergent: 3 log-probs not finite, on 637 tokens")
    assert report["tokens"]["mean_abs_logprob_diff"] == pytest.approx(gap.mean(), rel=1e-9)
    assert (report["counts"]["tokens"], report["counts"]["compared"]) == (640, 637)
    found = {entry["kind"]: entry for entry in report["counts"]["not_finite"]}
    assert {kind: (e["side"], e["count"], e["position"]) for kind, e in found.items()} == {
        "nan": ("b", 1, 7),
        "-inf": ("b", 2, 1),
    }
    assert [entry["cause"] for entry in report["findings"]] == ["nan", "inf"]
    assert report["tokens"]["not_finite"] == report["counts"]["not_finite"]


def test_one_array_on_both_sides_is_incomparable(tmp_path, rollout):
    report = report_of(tmp_path, rollout | {"old_log_probs": rollout["rollout_log_probs"]})
    assert (report["verdict"], exit_status(report)) == ("incomparable", EXIT_STATUS["incomparable"])
    assert "bypassed-logprobs" in report["headline"]


def test_an_empty_mask_is_incomparable(tmp_path, rollout):
    report = report_of(tmp_path, rollout | {"response_mask": np.zeros(SHAPE, bool)})
    assert (report["verdict"], report["counts"]["tokens"]) == ("incomparable", 0)
    assert report["headline"] == "incomparable: no token was compared"
    assert "16 sequences without a token inside the mask" in report["not_compared"]


def test_padding_never_matters(tmp_path, rollout):
    plain = report_of(tmp_path, rollout)
    for padding in (np.nan, np.inf, -np.inf, 0.0, -1.0, 151643.0):
        filled = {name: np.where(rollout["response_mask"], rollout[name], padding) for name in list(rollout)[:2]}
        report = report_of(tmp_path, rollout | filled)
        assert {**report, "created": ""} == {**plain, "created": ""}, padding


def test_an_update_is_described_where_its_inputs_are_given(tmp_path, rollout):
    path = tmp_path / "advantages.npz"
    np.savez(path, advantages=np.random.default_rng(2).normal(size=SHAPE), response_mask=rollout["response_mask"])
    report = report_of(tmp_path, rollout, ppo=path, config=PPOConfig(clip_epsilon=0.1))
    assert report["ppo"]["given"] == ["advantages"] and report["ppo"]["config"]["clip_epsilon"] == 0.1
    assert report["ppo"]["detail"] in report["summary"]
    assert report_of(tmp_path, rollout)["ppo"]["detail"] not in report_of(tmp_path, rollout)["summary"]


def test_a_monitor_says_what_it_cannot_see_and_steps_are_told_apart(tmp_path, rollout):
    gap = np.abs(np.exp(rollout["rollout_log_probs"]) - np.exp(rollout["old_log_probs"])).astype(np.float32)
    mask = rollout["response_mask"]
    for step, factor in ((3, 1.0), (4, 30.0)):
        np.save(tmp_path / f"prob_diff_step_{step}.npy", (gap * mask * factor).astype(np.float32))
        np.save(tmp_path / f"prob_mask_step_{step}.npy", mask)
    report = compare_token_sources([tmp_path])
    assert [entry["step"] for entry in report["tokens"]["by_step"]] == [3, 4]
    means = [entry["mean_prob_diff"] for entry in report["tokens"]["by_step"]]
    assert means == pytest.approx([gap[mask].mean(), 30 * gap[mask].mean()], rel=1e-5)  # float32 on disk
    assert (report["counts"]["steps"], report["counts"]["sequences"]) == (2, 32)
    assert report["verdict"] == "suspect" and "probability differences only" in report["headline"]
    assert [figure["name"] for figure in report["figures"]] == ["mean_prob_diff"]
    assert any("|p - q| only" in sentence for sentence in report["not_compared"])


@settings(deadline=None)
@given(token_batches())
def test_any_batch_makes_a_report(batch):
    report = token_report(batch, lambda ids: "<" + ",".join(map(str, ids)) + ">", PPOConfig())
    json.dumps(report, allow_nan=False)
    assert report["verdict"] in EXIT_STATUS
    assert report["headline"].startswith(report["verdict"])
    assert report["summary"].startswith(report["headline"][0].upper() + report["headline"][1:] + ".")
    assert counts(batch)["masked_out"] >= 0


def test_every_key_is_documented(tmp_path, rollout):
    rollout["old_log_probs"][0, 0] = np.nan
    rollout["response_mask"][0, 0] = True
    report = report_of(tmp_path, rollout | {"advantages": np.ones(SHAPE)}, ppo=tmp_path / "batch.npz", temperature=0.7)
    assert report["findings"] and report["ppo"]["gradient"] and report["a"]["sampled_at"]
    # the figures of a finding are the cause's own, and named in its sentence
    report["findings"] = [{**entry, "figures": {}} for entry in report["findings"]]
    assert sorted(set(keys(report)) - NAMED) == []


@pytest.mark.parametrize("masked", [-3.4028234663852886e38, -1.7976931348623157e308])  # the least float32, float64
def test_figures_that_overflow_are_null_and_the_words_say_so(masked):
    a = -np.random.default_rng(0).exponential(1.0, (2, 9)) - 0.1
    b = a.copy()
    b[1, 2], b[1, 3] = masked, masked
    a[0, 1] = masked
    report = token_report(batch_of(a, b), None, PPOConfig())
    json.dumps(report, allow_nan=False)
    assert report["tokens"]["k3"] is None and report["verdict"] in ("suspect", "divergent")
    assert "k3 is beyond float64" in report["summary"]


def test_a_source_that_is_not_there_is_one_sentence():
    with pytest.raises(ProbeError, match=r"^there is no nowhere\.npz"):
        compare_token_sources(["nowhere.npz"])


# -- not finite -------------------------------------------------------------------------------------------------------


def test_values_that_are_not_finite_are_counted_by_kind_with_the_first_of_each():
    values = np.array([0.0, np.inf, np.nan, -np.inf, np.nan])
    found = find_not_finite("a", values, np.array([0, 0, 0, 1, 1]), np.array([0, 3, 5, 2, 4]), ["x", "y"])
    assert found == [
        NotFinite("a", "nan", 2, "x", 5),
        NotFinite("a", "+inf", 1, "x", 3),
        NotFinite("a", "-inf", 1, "y", 2),
    ]
    assert find_not_finite("a", np.zeros(3), np.zeros(3, int), np.arange(3), ["x"]) == []


# -- dumps ------------------------------------------------------------------------------------------------------------


def test_tokens_of_two_dumps_have_the_figures_of_their_comparison(tmp_path):
    a = write_dump(tmp_path / "a", Scenario())
    b = write_dump(tmp_path / "b", actor(dtype="bfloat16"))
    whole, tokens = compare_dumps(a, b)["tokens"], compare_token_sources([a, b])["tokens"]
    # compare adds what rests on tensors: what they explain, and where each of the worst tokens first departs
    joined = {"unexplained_mean", "unexplained_max", "worst"}
    assert whole["compared"] and {name: whole[name] for name in whole.keys() - joined} == {
        name: tokens[name] for name in tokens.keys() - joined
    }
    shown = tokens["worst"][0].keys()
    assert [{name: entry[name] for name in shown} for entry in whole["worst"]] == tokens["worst"]


def test_infinite_log_probs_of_a_dump_are_listed_and_those_not_returned_are_not(tmp_path):
    with opened(tmp_path / "a", Scenario()) as a, opened(tmp_path / "b", actor()) as b:
        rows = np.flatnonzero(a.tokens["response"])
        a.tokens["logprob"][rows[2]], a.tokens["logprob"][rows[4]] = -np.inf, np.nan
        report = compare_open(a, b)
        row, prompts = a.tokens[rows[2]], [sequence.prompt_len for sequence in a.sequences]
    total = len(rows)
    tokens = report["tokens"]
    assert (tokens["compared"], tokens["lone"]) == (total - 2, {"a": 0, "b": 1})
    owner = int(row["sequence"])
    where = {"sequence": f"p{owner}.s0", "position": int(row["position"]) - prompts[owner]}
    assert tokens["not_finite"] == [{"side": "a", "kind": "-inf", "count": 1, **where}]
    assert report["verdict"] == "divergent" and "1 log-prob not finite" in report["headline"]
    assert any(sentence.startswith("1 log-prob of a: -inf") for sentence in report["not_compared"])


def test_tokens_that_do_not_belong_together_are_not_to_be_corrected(tmp_path, rollout):
    """GIVEN an actor's rows in another order, THEN importance sampling is no advice."""
    mixed = rollout | {"old_log_probs": rollout["old_log_probs"][::-1], "response_mask": np.ones(SHAPE, bool)}
    del mixed["responses"]
    report = report_of(tmp_path, mixed)
    assert report["verdict"] == "suspect" and report["findings"] == []
    assert "do not seem to belong together" in report["summary"] and "same order" in report["summary"]
    assert "correct them" not in report["summary"] and "Corrections would touch" not in report["summary"]


def test_plus_and_minus_infinity_get_their_own_advice(tmp_path, rollout):
    for value, words in ((np.inf, "no likelihood exceeds 1"), (-np.inf, "a likelihood above 0")):
        values = rollout["old_log_probs"].copy()
        values[2, 3] = value
        summary = report_of(tmp_path, rollout | {"old_log_probs": values})["summary"]
        assert words in summary


def test_no_dash_stands_for_probabilities_beyond_float64(tmp_path, rollout):
    values = rollout["old_log_probs"].copy()
    values[2, 3] = 800.0
    summary = report_of(tmp_path, rollout | {"old_log_probs": values})["summary"]
    assert "by -" not in summary and "1 value of b is above 0" in summary and "?." not in summary
