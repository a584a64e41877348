"""The sampling gate: log-probs that are not what a side declares are fitted to the logits, or to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, opened
from test_gates import set_logprobs

from probe.compare.align import RowAligner
from probe.compare.judge import ROUNDING
from probe.compare.sampling_fits import (
    Rows,
    explain,
    one_rounding,
    processed_scores,
    rows_of,
    scores,
    shift_between,
    zero_filled,
)
from probe.compare.sampling_gate import sampling_gate
from probe.compare.sequences import join_sequences
from probe.compare.side import Side, read_sides
from probe.compare.tokens.batch import batch_of_dumps
from probe.compare.tokens.semantics import find_semantics
from probe.metrics import logprobs_from_logits
from probe.sampling import Semantics
from probe.store.dtypes import round_to

LONG = [(f"p{n}", np.random.default_rng(n).integers(0, 50, 40), 8) for n in range(4)]


class Case:
    """A rollout with its own logits and an actor, 128 response tokens, whose engines' log-probs a test sets."""

    def __init__(self, folder: Path, a: Scenario, b: Scenario) -> None:
        self.a, self.b = opened(folder / "a", a, LONG), opened(folder / "b", b, LONG)
        self.sides = read_sides(self.a, self.b)
        self.join = join_sequences(self.a, self.b)

    def without_logits(self, *sides: Side) -> Case:
        for side in sides:
            side.dump.tokens["logprob_recomputed"] = np.nan
            side.resolution.sources.pop("lm_head:output.0")
        return self

    @property
    def gate(self) -> Any:
        return sampling_gate(*self.sides, self.join)


@pytest.fixture
def make(tmp_path):
    """Make a Case; its files are closed when the test ends."""
    made: list[Case] = []

    def factory(a: dict[str, Any] | None = None, **b: Any) -> Case:
        made.append(Case(tmp_path / str(len(made)), Scenario(manifest=a or {}), actor(engine_logprobs=True, **b)))
        return made[-1]

    yield factory
    for case in made:
        case.a.close()
        case.b.close()


def declared(temperature: float, mode: str = "processed_logprobs", top_p: float = 1.0) -> dict[str, Any]:
    return {"logprobs_mode": mode, "sampling": {"temperature": temperature, "top_p": top_p}}


def top_p(p: float):
    def process(logits: np.ndarray) -> np.ndarray:
        order = np.argsort(-logits, axis=1)
        likely = np.exp(logits - logits.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        before = np.cumsum(np.take_along_axis(likely, order, 1), axis=1) - np.take_along_axis(likely, order, 1)
        kept = np.zeros(logits.shape, bool)
        np.put_along_axis(kept, order, before < p, 1)
        # what is scored here was not sampled: tokens outside the kept set keep a logit of their own
        return np.where(kept, logits, logits - 60)

    return process


def top_k(k: int):
    def process(logits: np.ndarray) -> np.ndarray:
        least = -np.sort(-logits, axis=1)[:, k - 1 : k]
        return np.where(logits >= least, logits, logits - 60)

    return process


def renormalised(side: Side, process: Any) -> None:
    """Return log-probs renormalised over kept tokens, for all tokens: raw minus the log of the kept mass."""
    set_logprobs(side, lambda logits: logits)
    table = side.dump.tokens
    raw = table["logprob"].copy()
    values = side.dump.read(*side.natives[side.resolution.sources["lm_head:output.0"].native[0]]).astype(np.float64)
    rows = side.dump.rows(*side.natives[side.resolution.sources["lm_head:output.0"].native[0]])
    logits = values[:, : side.shape.vocab]
    likely = np.exp(logits - logits.max(axis=1, keepdims=True))
    mass = np.where(process(logits) > logits - 30, likely, 0).sum(axis=1) / likely.sum(axis=1)
    for row, kept in zip(rows, mass):
        at = (table["sequence"] == row["sequence"]) & (table["position"] == row["position"] + 1) & table["response"]
        table["logprob"][at] = raw[at] - np.log(kept)


# -- healthy ----------------------------------------------------------------------------------------------------------


def test_the_untouched_and_the_declared_pass(make):
    assert make().gate.status == "pass"
    case = make(declared(0.6))
    set_logprobs(case.sides[0], lambda logits: logits / 0.6)
    gate = case.gate
    assert gate.status == "warn" and "recomputed" in gate.detail
    assert [(f.cause, f.side) for f in gate.findings] == [("temperature-semantics", "a")]


@pytest.mark.parametrize("noise", [1, 2, 3])
def test_rounding_is_no_temperature(tmp_path, noise):
    sides = Scenario(dtype="bfloat16", noise=noise), actor(dtype="bfloat16", noise=noise + 10, engine_logprobs=True)
    case = Case(tmp_path, *sides)
    with case.a, case.b:
        assert case.gate.status == "pass"
        case.without_logits(case.sides[0])
        assert case.gate.status == "pass"


# -- with logits of its own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 0.6, 0.9, 1.4])
def test_an_undeclared_temperature_is_fitted(make, temperature):
    case = make()
    set_logprobs(case.sides[0], lambda logits: logits / temperature)
    found = case.gate.findings[0]
    assert (case.gate.status, found.cause, found.side) == ("fail", "temperature-semantics", "a")
    assert found.figures["temperature"] == pytest.approx(temperature, rel=0.01)


def test_log_probs_divided_by_a_temperature_instead_of_logits(make):
    case = make()
    set_logprobs(case.sides[1], lambda logits: logits, lambda logprob: logprob / 0.8)
    found = case.gate.findings[0]
    assert (found.cause, found.side) == ("temperature-semantics", "b") and "not the logits" in found.text
    assert found.figures["factor"] == pytest.approx(1.25, rel=1e-3)


def test_raw_log_probs_declared_as_processed(make):
    case = make(declared(0.6))
    found = case.gate.findings[0]
    assert (case.gate.status, found.cause, found.side) == ("fail", "raw-logprobs", "a")


@pytest.mark.parametrize(("process", "figure", "value"), [(top_k(5), "top_k", 5), (top_p(0.8), "top_p", 0.8)])
def test_renormalised_over_kept_tokens(make, process, figure, value):
    case = make()
    renormalised(case.sides[0], process)
    found = case.gate.findings[0]
    assert (case.gate.status, found.cause, found.side) == ("fail", "renormalised-top-p", "a")
    assert found.figures[figure] == pytest.approx(value, abs=0.06)


def test_log_probs_of_another_pass_lie_beyond_fp32(make):
    """GIVEN fp32 logits, WHEN log-probs are a few hundredths of a nat from them, THEN no rounding explains it."""
    case = make()
    rng = np.random.default_rng(0)
    set_logprobs(case.sides[0], lambda logits: logits, lambda logprob: logprob + 0.05 * rng.normal(size=logprob.shape))
    found = case.gate.findings[0]
    assert (case.gate.status, found.cause, found.side) == ("fail", "logprob-source", "a")


@pytest.mark.parametrize(("nats", "status"), [(0.02, "pass"), (0.5, "fail")])
def test_log_probs_of_another_pass_lie_beyond_the_rounding_of_bf16_logits(tmp_path, nats, status):
    """GIVEN bf16 logits, one rounding of which moves a log-prob by some 0.01 nats, WHEN log-probs are further off."""
    case = Case(tmp_path, Scenario(dtype="bfloat16"), actor(dtype="bfloat16", engine_logprobs=True))
    rng = np.random.default_rng(0)
    with case.a, case.b:
        set_logprobs(case.sides[0], lambda logits: logits, lambda value: value + nats * rng.normal(size=value.shape))
        assert case.gate.status == status
        assert [finding.cause for finding in case.gate.findings] == ["logprob-source"] * (status == "fail")


def test_one_rounding_of_logits_and_log_probs_is_what_rounding_them_measures():
    rng = np.random.default_rng(0)
    logits, tokens = 6 * rng.normal(size=(500, 200)), rng.integers(0, 200, 500)
    rounded = round_to(scores(round_to(logits, "bfloat16").astype(np.float64), tokens), "bfloat16")
    measured = float(np.sqrt(np.mean(np.square(rounded - scores(logits, tokens)))))
    assert one_rounding(logits, tokens, ROUNDING["bfloat16"]) == pytest.approx(measured, rel=0.25)


def test_log_probs_of_something_else_are_told_as_such(make):
    case = make()
    rng = np.random.default_rng(0)
    set_logprobs(case.sides[0], lambda logits: logits + rng.normal(size=logits.shape))
    found = case.gate.findings[0]
    assert (found.cause, found.side) == ("logprob-source", "a") and found.figures["nats"] > 0.1


# -- with the other side's logits, or none ----------------------------------------------------------------------------


def test_a_temperature_is_fitted_to_the_other_sides_logits(make):
    case = make()
    set_logprobs(case.sides[0], lambda logits: logits / 0.7)
    found = case.without_logits(case.sides[0]).gate.findings[0]
    assert (found.cause, found.side) == ("temperature-semantics", "a")
    assert found.figures["temperature"] == pytest.approx(0.7, rel=0.01)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shift_between_two_sides_without_logits(make, shift):
    case = make()
    table = case.a.tokens
    for number in range(len(LONG)):
        mine = np.flatnonzero((table["sequence"] == number) & table["response"])
        moved = np.roll(table["logprob"][mine], shift)
        moved[0 if shift > 0 else -1] = np.nan
        table["logprob"][mine] = moved
    gate = case.without_logits(*case.sides).gate
    assert gate.status == "fail" and gate.findings[0].cause == "logprob-shift"
    assert abs(gate.findings[0].figures["shift"]) == 1


def test_a_factor_between_two_sides_without_logits(make):
    case = make()
    case.a.tokens["logprob"] /= 0.6
    found = case.without_logits(*case.sides).gate.findings[0]
    assert found.cause == "temperature-semantics" and found.side == "unknown"
    assert found.figures["factor"] == pytest.approx(1 / 0.6, rel=1e-3)


def test_one_sign_throughout_with_a_declared_top_p(make):
    case = make(declared(1.0, "raw_logprobs", 0.9))
    renormalised(case.sides[0], top_p(0.9))
    gate = case.without_logits(*case.sides).gate
    assert gate.findings and (gate.findings[0].cause, gate.findings[0].side) == ("renormalised-top-p", "a")


# -- zeros and copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_zero_filled_log_probs_are_named_with_their_sequence(make, whole):
    case = make()
    table = case.b.tokens
    at = np.flatnonzero((table["sequence"] == 2) & table["response"])
    table["logprob"][at if whole else at[-6:]] = 0.0
    found = case.gate.findings[0]
    assert (case.gate.status, found.cause, found.side) == ("fail", "zero-filled-logprobs", "b")
    assert found.figures["first"] == "p2" and found.figures["tokens"] == (32 if whole else 6)


def test_a_certain_token_may_have_a_log_prob_of_zero():
    values, reference = np.zeros(4), np.array([-1e-9, 0.0, -2.0, np.nan])
    assert zero_filled(values, reference).tolist() == [False, False, True, True]


def test_copied_log_probs_are_noted(make):
    case = make()
    case.b.tokens["logprob"] = case.a.tokens["logprob"]
    gate = case.gate
    assert gate.status == "pass" and "a copy of the other's" in gate.detail


# -- the pieces -------------------------------------------------------------------------------------------------------


def test_nothing_is_fitted_to_equal_log_probs():
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(20, 30)), rng.integers(0, 30, 20)
    assert explain(Rows(logits, tokens, logprobs_from_logits(logits, tokens), 1e-3)) is None


def test_a_shift_does_not_cross_sequences():
    x = np.arange(20.0) * 3
    sequence, position = np.repeat([0, 1], 10), np.tile(np.arange(10), 2)
    assert shift_between(sequence, position, x, np.roll(x, 1)) == 1
    assert shift_between(sequence, position, x, x + 1) == 0
    assert shift_between(np.arange(20), position, x, np.roll(x, 1)) == 0


# -- temperature and top-p together -----------------------------------------------------------------------------------

COOL = 0.7


def nucleus(logits: np.ndarray) -> np.ndarray:
    """Return logits over the temperature, without what top-p 0.9 drops."""
    return top_p(0.9)(logits / COOL)


def test_both_semantics_are_named_where_logits_stand_in_for_processed_log_probs(make):
    case = make(declared(COOL, top_p=0.9))
    set_logprobs(case.sides[0], nucleus)
    gate = case.gate
    assert gate.status == "warn" and "recomputed" in gate.detail
    assert [(f.cause, f.side) for f in gate.findings] == [("temperature-semantics", "a"), ("renormalised-top-p", "a")]
    assert gate.findings[0].figures == {"temperature": COOL} and gate.findings[1].figures == {"top_p": 0.9}


def test_both_semantics_are_named_without_logits(make):
    case = make(declared(COOL, top_p=0.9))
    set_logprobs(case.sides[0], nucleus)
    gate = case.without_logits(*case.sides).gate
    assert gate.status == "fail" and "logprobs_mode" in gate.detail
    assert [(f.cause, f.side) for f in gate.findings] == [("temperature-semantics", "a"), ("renormalised-top-p", "a")]


def test_log_probs_processed_alike_on_both_sides_pass(make):
    case = make(declared(COOL, top_p=0.9), manifest=declared(COOL, top_p=0.9))
    for side in case.sides:
        set_logprobs(side, nucleus)
    gate = case.gate
    assert gate.status == "pass" and "temperature 0.7 and top-p 0.9" in gate.detail


def test_raw_log_probs_name_the_temperature_and_the_top_p_of_their_sampling(make):
    gate = make(declared(COOL, "raw_logprobs", 0.9)).gate
    assert [(f.cause, f.side) for f in gate.findings] == [("raw-logprobs", "a")]
    assert "temperature 0.7 and top-p 0.9" in gate.detail


def test_greedy_decoding_draws_from_no_distribution(make):
    assert make(declared(0.0, top_p=0.9)).gate.status == "pass"


def sampled_rows(meaning: Semantics, seed: int = 0) -> Rows:
    """Return 64 rows with tokens drawn at a temperature and top-p, and their processed log-probs."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(64, 400)) * rng.choice([1.5, 3.0, 6.0], 64)[:, None]
    kept = top_p(meaning.top_p)(logits / meaning.temperature)
    likely = np.exp(kept - kept.max(axis=1, keepdims=True))
    tokens = np.array([rng.choice(400, p=row / row.sum()) for row in likely])
    return rows_of(logits, tokens, logprobs_from_logits(kept, tokens), "float32")


@pytest.mark.parametrize("meaning", [Semantics(0.7, 0.9), Semantics(0.6, 0.95), Semantics(1.4, 0.8)])
@pytest.mark.parametrize("stated", [True, False])
def test_a_temperature_and_a_top_p_are_fitted_together(meaning, stated):
    fit = explain(sampled_rows(meaning), (meaning.temperature,) if stated else ())
    assert fit is not None
    assert [cause for cause, _ in fit.parts] == ["temperature-semantics", "renormalised-top-p"]
    # a grid refined to 1 % leaves the masses that much off
    assert fit.figures["temperature"] == pytest.approx(meaning.temperature, rel=0.01)
    assert fit.figures["top_p"] == pytest.approx(meaning.top_p, abs=0.02)


def test_one_parameter_is_not_fitted_with_two():
    for meaning, cause in ((Semantics(0.7), "temperature-semantics"), (Semantics(1.0, 0.8), "renormalised-top-p")):
        fit = explain(sampled_rows(meaning))
        assert fit is not None and [part for part, _ in fit.parts] == [cause]


@pytest.mark.parametrize("meaning", [Semantics(), Semantics(0.7), Semantics(0.7, 0.9), Semantics(1.3, 0.5)])
def test_processed_scores_keep_a_token_that_top_p_drops(meaning):
    rows = sampled_rows(meaning)
    expected = logprobs_from_logits(top_p(meaning.top_p)(rows.logits / meaning.temperature), rows.tokens)
    np.testing.assert_allclose(processed_scores(rows.logits, rows.tokens, meaning), expected, atol=1e-9)
    least = rows.logits.argmin(axis=1)
    raw = scores(rows.logits, least, meaning.temperature)
    kept = processed_scores(rows.logits, least, meaning)
    assert np.isfinite(kept).all() and (kept >= raw - 1e-12).all()
    assert (kept <= raw - np.log(meaning.top_p) + 1e-12).all()  # the kept mass is top-p at least


def test_tokens_that_top_p_left_alone_are_not_zero_filled():
    """GIVEN exact zeros only where a token has most of the probability, THEN none was left out."""
    likely = np.log(np.array([0.92, 0.95, 0.91, 0.98, 0.85, 0.93, 0.2, 0.5]))
    values = np.where(likely > np.log(0.8), 0.0, likely)
    assert not zero_filled(values, likely).any()
    values[6] = 0.0
    assert zero_filled(values, likely).sum() == 7


def test_sequences_that_one_dump_ends_earlier_are_counted(make):
    """GIVEN an actor without the log-prob of each last token, THEN the batch says in how many sequences."""
    case = make()
    aligner = RowAligner(case.join, case.a.sequences, case.b.sequences)
    whole = batch_of_dumps(case.a, case.b, aligner)
    assert whole is not None and whole.lone_last == (0, 0) and find_semantics(whole) == []
    table = case.b.tokens
    last = np.append(np.diff(table["sequence"]) != 0, True)
    table["logprob"][last] = np.nan
    batch = batch_of_dumps(case.a, case.b, aligner)
    assert batch is not None and batch.lone_last == (len(LONG), 0)
    assert [(f.cause, f.side) for f in find_semantics(batch)] == [("length-mismatch", "b")]
