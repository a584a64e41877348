"""The semantics detector: each thing that log-probs can be instead of one distribution's, planted and found.

The model is a table of random logits: rows are peaked as a language model's are (some all but certain, some with many
likely tokens), tokens are drawn from them at the temperature and top-p of the case. Noise on one side stands for two
engines in bf16, which part by 0.01 to 0.05 nats.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe.compare.report.shared.words import origin_words
from probe.compare.sampling_fits import ROWS, rows_of, scores
from probe.compare.tokens.batch import Origin, TokenBatch
from probe.compare.tokens.declared import declared_apart
from probe.compare.tokens.semantics import find_semantics
from probe.sampling import Semantics
from probe.store.dtypes import round_to

VOCAB = 200
RAW = Semantics()
FIT = settings(max_examples=12, deadline=None)


class World:
    """S responses of random lengths over one table of logits, with the tokens' raw log-probs and any others of them."""

    def __init__(self, seed: int = 0, sequences: int = 12, length: int = 40, meaning: Semantics = RAW) -> None:
        self.rng = np.random.default_rng(seed)
        lengths = self.rng.integers(length // 2, length + 1, sequences)
        self.sequence = np.repeat(np.arange(sequences), lengths)
        self.position = np.concatenate([np.arange(n) for n in lengths])
        n = len(self.sequence)
        spread = self.rng.choice([1.5, 3.0, 6.0], n)[:, None]
        self.logits = self.rng.normal(size=(n, VOCAB)) * spread
        self.token = np.array([self._draw(row, meaning) for row in self.logits])
        self.raw = scores(self.logits, self.token)

    def _draw(self, row: np.ndarray, meaning: Semantics) -> int:
        order, kept = nucleus(row, meaning)
        return int(self.rng.choice(order[: len(kept)], p=kept / kept.sum()))

    def processed(self, meaning: Semantics) -> np.ndarray:
        """Return log-probs after temperature and top-p, one row at a time."""
        result = []
        for row, token in zip(self.logits, self.token):
            order, kept = nucleus(row, meaning)
            inside = order[: len(kept)].tolist()
            tempered = np.exp((row - row.max()) / meaning.temperature)
            mass = kept.sum() + (0.0 if token in inside else tempered[token] / tempered.sum())
            result.append(np.log(tempered[token] / tempered.sum() / mass))
        return np.array(result)

    def noisy(self, values: np.ndarray, nats: float) -> np.ndarray:
        """Return log-probs that are off by ``nats``, less where a token is all but certain: noise of the log-odds."""
        with np.errstate(divide="ignore"):
            odds = values - np.log(-np.expm1(values))
        return -np.log1p(np.exp(-(odds + nats * self.rng.normal(size=len(values)))))

    def batch(self, a: np.ndarray, b: np.ndarray, keep: np.ndarray | None = None, rows_of_side: str = "", **more: Any):
        """Return the batch of two columns; ``keep`` leaves holes; ``rows_of_side`` adds logits."""
        keep = np.ones(len(a), bool) if keep is None else keep
        count = int(self.sequence.max()) + 1
        batch = TokenBatch(
            sequence=self.sequence[keep],
            position=self.position[keep],
            token=self.token[keep],
            prob_diff=np.abs(np.exp(a) - np.exp(b))[keep],
            a=a[keep],
            b=b[keep],
            labels=[f"s{n}" for n in range(count)],
            step=np.full(count, -1),
            start=np.zeros(count, np.int64),
            valid=np.bincount(self.sequence[keep], minlength=count),
            ids=[self.token[self.sequence == n] for n in range(count)],
            width=int(self.position.max()) + 1,
            origins=(Origin("f", "npz", "rollout_log_probs"), Origin("f", "npz", "old_log_probs")),
        )
        if rows_of_side:
            at = np.linspace(0, len(batch) - 1, ROWS).astype(int)
            logits = self.logits[keep][at]
            batch.rows = rows_of(logits, batch.token[at], getattr(batch, rows_of_side)[at], "float32")
            batch.rows_of, batch.rows_at = rows_of_side, at
        return replace(batch, **more)


def nucleus(row: np.ndarray, meaning: Semantics) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids from the likeliest on, and the probabilities of those that top-p keeps."""
    likely = np.exp((row - row.max()) / meaning.temperature)
    likely /= likely.sum()
    order = np.argsort(-likely, kind="stable")
    sums = np.cumsum(likely[order])
    return order, likely[order][: int((sums < meaning.top_p).sum()) + 1]


def causes(batch: TokenBatch) -> list[tuple[str, str]]:
    return [(finding.cause, finding.side) for finding in find_semantics(batch)]


# -- healthy ----------------------------------------------------------------------------------------------------------


@FIT
@given(st.integers(0, 10_000), st.floats(0.0, 0.05), st.sampled_from(["", "b"]), st.booleans())
def test_healthy_pairs_give_no_finding(seed, nats, rows, holes):
    world = World(seed)
    keep = world.rng.random(len(world.raw)) < (0.7 if holes else 2.0)
    a = world.noisy(world.raw, nats) if nats > 1e-6 else world.raw + 1e-7 * world.rng.normal(size=len(world.raw))
    assert causes(world.batch(a, world.raw, keep, rows)) == []


@pytest.mark.parametrize("nats", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_noise_beyond_healthy_is_no_semantics_either(seed, nats):
    """A bad pair is the verdict's matter: no distribution may be read into its noise."""
    world = World(seed)
    assert causes(world.batch(world.noisy(world.raw, nats), world.noisy(world.raw, nats))) == []


@pytest.mark.parametrize("meaning", [Semantics(0.7, 0.9), Semantics(1.0, 0.9), Semantics(0.6)])
def test_matching_processing_gives_no_finding(meaning):
    """GIVEN both sides processed alike, WHEN top-p leaves many tokens alone (log-prob 0), THEN nothing was left out."""
    world = World(1, sequences=20, meaning=meaning)
    processed = world.processed(meaning)
    origins = tuple(Origin("f", "dump", "engine", meaning, meaning) for _ in "ab")
    batch = world.batch(processed, world.noisy(processed, 0.01), origins=origins)
    assert causes(batch) == []
    assert not any(processed[processed == 0] < 0)


@pytest.mark.parametrize("size", [20.0, 60.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_coarse_log_softmax_is_no_semantics(seed, size):
    """GIVEN one side's log-softmax in bf16: likely tokens score exactly 0, the others multiples of 1/8."""
    world = World(seed, sequences=20)
    total = round_to(size + 0 * world.raw, "bfloat16")
    coarse = round_to(round_to(total + world.raw, "bfloat16") - total, "bfloat16").astype(np.float64)
    assert (coarse == 0).sum() >= 8
    assert causes(world.batch(coarse, world.raw)) == []
    assert causes(world.batch(world.raw, coarse)) == []


def test_few_tokens_say_nothing():
    world = World(0, sequences=1, length=6)
    assert causes(world.batch(world.raw, world.raw * 2)) == []
    empty = np.zeros(len(world.raw), bool)
    assert find_semantics(world.batch(world.raw, world.raw, empty)) == []


# -- another distribution ---------------------------------------------------------------------------------------------


@FIT
@given(st.integers(0, 10_000), st.sampled_from([0.3, 0.6, 0.7, 1.5]), st.sampled_from(["a", "b"]))
def test_a_temperature_is_fitted_to_logits(seed, temperature, side):
    world = World(seed, meaning=Semantics(temperature))
    tempered = world.processed(Semantics(temperature))
    columns = {"a": world.noisy(world.raw, 1e-6), "b": world.raw} | {side: tempered}
    found = find_semantics(world.batch(columns["a"], columns["b"], None, "b"))
    assert [(f.cause, f.side) for f in found] == [("temperature-semantics", side)]
    assert found[0].figures["temperature"] == pytest.approx(temperature, rel=0.02)


@pytest.mark.parametrize("meaning", [Semantics(0.7, 0.9), Semantics(0.6, 0.8)])
@pytest.mark.parametrize("nats", [0.0, 0.003])
def test_a_temperature_with_top_p_is_named_as_both(meaning, nats):
    world = World(3, sequences=20, meaning=meaning)
    found = find_semantics(world.batch(world.processed(meaning), world.noisy(world.raw, nats), None, "b"))
    assert {(f.cause, f.side) for f in found if f.side == "a"} == {
        ("temperature-semantics", "a"),
        ("renormalised-top-p", "a"),
    }
    assert found[0].figures["temperature"] == pytest.approx(meaning.temperature, rel=0.05)


@pytest.mark.parametrize("rows", ["", "b"])
@pytest.mark.parametrize("seed", range(3))
def test_top_p_is_found_with_and_without_logits(seed, rows):
    world = World(seed, sequences=20, meaning=Semantics(1.0, 0.8))
    batch = world.batch(world.processed(Semantics(1.0, 0.8)), world.raw, None, rows)
    assert causes(batch) == [("renormalised-top-p", "a")]


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.5])
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_temperature_shows_in_two_columns_alone(temperature, side):
    world = World(2, sequences=30)
    columns = {"a": world.raw, "b": world.raw} | {side: world.noisy(world.processed(Semantics(temperature)), 0.02)}
    found = find_semantics(world.batch(columns["a"], columns["b"]))
    assert [f.cause for f in found] == ["temperature-semantics"]
    sharp = side if temperature < 1 else {"a": "b", "b": "a"}[side]
    assert f"the log-probs of {sharp} spread more" in found[0].text


def test_log_probs_divided_by_a_temperature():
    world = World(4)
    found = find_semantics(world.batch(world.raw / 0.7, world.raw))
    assert [f.cause for f in found] == ["temperature-semantics"]
    assert found[0].figures["factor"] == pytest.approx(1 / 0.7, rel=1e-3)


def test_log_probs_that_their_own_logits_do_not_give():
    world = World(5)
    odd = world.noisy(world.raw, 0.3)
    assert causes(world.batch(world.raw, odd, None, "b")) == [("logprob-source", "b")]


# -- declared ---------------------------------------------------------------------------------------------------------


def test_declared_distributions_that_differ_are_each_named():
    world = World(6)
    said = Semantics(0.7, 0.9)
    origins = Origin("a", "dump", "engine", said, said), Origin("b", "dump", "engine", Semantics())
    batch = world.batch(world.noisy(world.raw, 0.01), world.raw, origins=origins)
    assert causes(batch) == [("temperature-semantics", "a"), ("renormalised-top-p", "a")]
    aside = Origin("a", "dump", "recomputed", Semantics(), said, said), origins[1]
    assert causes(replace(batch, origins=aside)) == [("temperature-semantics", "a"), ("renormalised-top-p", "a")]
    raw = Origin("a", "dump", "engine", Semantics(), said), origins[1]
    found = find_semantics(replace(batch, origins=raw))
    assert [(f.cause, f.side) for f in found] == [("raw-logprobs", "a")]
    assert "temperature 0.7 and top-p 0.9" in found[0].text


# -- moved, filled, clipped, copied -----------------------------------------------------------------------------------


@FIT
@given(st.integers(0, 10_000), st.sampled_from([1, -1]), st.booleans(), st.sampled_from(["a", "b"]))
def test_a_shift_by_one_is_found_within_sequences_and_holes(seed, shift, holes, side):
    world = World(seed)
    keep = world.rng.random(len(world.raw)) < (0.8 if holes else 2.0)
    moved = np.concatenate([np.roll(world.raw[world.sequence == n], shift) for n in range(12)])
    columns = {"a": world.noisy(world.raw, 0.02), "b": world.noisy(world.raw, 0.02)} | {side: moved}
    found = find_semantics(world.batch(columns["a"], columns["b"], keep))
    # a was moved on by `shift`, or b was: a then fits b only when moved by the opposite
    assert [f.cause for f in found] == ["logprob-shift"]
    assert found[0].figures["shift"] == (-shift if side == "a" else shift)


@pytest.mark.parametrize("side", ["a", "b"])
def test_zeros_are_found_and_do_not_hide_what_else_there_is(side):
    world = World(7)
    fitted = {"a": world.processed(Semantics(0.6)), "b": world.raw.copy()}
    fitted[side][world.sequence == 3] = 0.0
    found = find_semantics(world.batch(fitted["a"], fitted["b"], None, "b"))
    assert {f.cause for f in found} == {"zero-filled-logprobs", "temperature-semantics"}
    zeros = next(f for f in found if f.cause == "zero-filled-logprobs")
    assert zeros.side == side and zeros.figures["first"] == "s3"
    other = fitted["b" if side == "a" else "a"]
    assert zeros.figures["tokens"] == int(((world.sequence == 3) & (other < np.log(0.99))).sum())


@FIT
@given(st.integers(0, 10_000), st.sampled_from([-20.0, -100.0, float(np.log(1e-4)), -4.0]), st.sampled_from("ab"))
def test_a_floor_is_found(seed, floor, side):
    world = World(seed, sequences=20)
    raw = world.raw.copy()
    unlikely = world.rng.choice(len(raw), 12, replace=False)
    raw[unlikely] = 1.3 * floor - world.rng.random(12) * 5  # what the clamp hides
    columns = {"a": world.noisy(raw, 0.02), "b": world.noisy(raw, 0.02)}
    columns[side] = np.maximum(columns[side], floor)
    found = find_semantics(world.batch(columns["a"], columns["b"]))
    assert [(f.cause, f.side) for f in found] == [("clipped-logprobs", side)]
    assert found[0].figures["floor"] == floor and found[0].figures["tokens"] >= 12


def test_values_that_are_no_log_probs():
    world = World(8)
    assert ("not-logprobs", "a") in causes(world.batch(np.exp(world.raw), world.raw))
    padded = world.raw.copy()
    padded[-1] = 613.0  # an id
    found = find_semantics(world.batch(world.noisy(world.raw, 0.01), padded))
    assert [(f.cause, f.side) for f in found] == [("not-logprobs", "b")] and found[0].figures["tokens"] == 1


@pytest.mark.parametrize("filler", [0.0, -1.0, -100.0])
def test_a_side_without_the_last_tokens_log_prob(filler):
    world = World(9)
    short = world.raw.copy()
    short[np.append(np.diff(world.sequence) != 0, True)] = filler
    found = find_semantics(world.batch(world.noisy(world.raw, 0.02), short))
    assert ("length-mismatch", "b") in [(f.cause, f.side) for f in found]


def test_sequences_that_end_a_token_later_on_one_side():
    world = World(10)
    batch = world.batch(world.noisy(world.raw, 0.02), world.raw, lone=(12, 0), lone_last=(12, 0))
    assert causes(batch) == [("length-mismatch", "b")]
    assert causes(replace(batch, lone_last=(1, 0))) == []


def test_one_array_on_both_sides_is_a_bypass():
    world = World(11)
    batch = world.batch(world.raw, world.raw.copy())
    assert causes(batch) == [("bypassed-logprobs", "both")]
    assert causes(replace(batch, a=None, b=None)) == [("bypassed-logprobs", "both")]
    engines = tuple(Origin(name, "dump", "engine", Semantics()) for name in "ab")
    assert causes(replace(batch, origins=engines)) == []
    other = replace(batch, prob_diff=np.full(len(batch), 1e-6), a=None, b=None)
    assert causes(other) == []


# -- what an adversary found ------------------------------------------------------------------------------------------


def text_like(seed: int, kind: str, tokens: int, width: int = 50) -> World:
    """Return a world of equally long responses whose text is peaked, flat or both; raw log-probs only, any number."""
    world = World(seed, sequences=2)
    rng, n = world.rng, tokens // width * width
    world.sequence, world.position = np.repeat(np.arange(n // width), width), np.tile(np.arange(width), n // width)
    world.token = rng.integers(0, VOCAB, n)
    peaked, flat = -rng.exponential(1.0, n) * rng.choice([1e-9, 1e-4, 0.05, 1.0], n), -rng.normal(5.0, 1.0, n).clip(1)
    mixed = np.where(rng.random(n) < 0.5, peaked, -rng.exponential(2.0, n))
    world.raw = {"peaked": peaked, "flat": flat, "mixed": mixed}[kind]
    return world


@FIT
@given(
    st.integers(0, 10_000),
    st.sampled_from(["peaked", "flat", "mixed"]),
    st.sampled_from([50, 200, 1000, 5000]),
    st.sampled_from([0.001, 0.003, 0.01, 0.03, 0.1]),
    st.booleans(),
)
def test_healthy_text_of_any_kind_gives_no_finding(seed, kind, tokens, nats, heavy):
    world = text_like(seed, kind, tokens)
    noise = world.rng.standard_t(2, len(world.raw)) if heavy else world.rng.normal(size=len(world.raw))
    assert causes(world.batch(np.minimum(world.raw + nats * noise, 0.0), world.raw)) == []


@pytest.mark.parametrize("meaning", [Semantics(1.0, 0.9), Semantics(0.7, 0.8)])
@pytest.mark.parametrize("seed", range(3))
def test_top_p_text_with_real_zeros_on_both_sides_gives_no_finding(seed, meaning):
    world = World(seed, sequences=20, meaning=meaning)
    processed = world.processed(meaning)
    assert (processed == 0).sum() > 40
    assert causes(world.batch(processed, world.noisy(processed, 0.02))) == []


def test_zeros_on_both_sides_are_a_fill():
    world = World(21)
    zeros = np.zeros(len(world.raw))
    assert causes(world.batch(zeros, zeros)) == [("zero-filled-logprobs", "both")]
    row = world.sequence == 4
    found = find_semantics(world.batch(np.where(row, 0.0, world.noisy(world.raw, 0.02)), np.where(row, 0.0, world.raw)))
    assert [(f.cause, f.side) for f in found] == [("zero-filled-logprobs", "both")]
    assert found[0].figures == {"tokens": int(row.sum()), "sequences": 1, "first": "s4"}


@pytest.mark.parametrize("nats", [0.003, 0.02])
def test_matched_processing_that_nothing_declares_is_no_finding_with_logits(nats):
    meaning = Semantics(0.7)
    world = World(22, meaning=meaning)
    processed = world.processed(meaning)
    batch = world.batch(world.noisy(processed, nats), processed, None, "b")
    assert causes(batch) == []
    found = find_semantics(world.batch(world.noisy(processed, nats), world.raw, None, "b"))
    assert [(f.cause, f.side) for f in found] == [("temperature-semantics", "a")]
    assert "declared" not in found[0].text


@pytest.mark.parametrize("drawn", [Semantics(0.7), Semantics(1.0, 0.9)])
def test_logits_prove_log_probs_raw_of_a_file_that_says_how_it_sampled(drawn):
    world = World(23, sequences=20, meaning=drawn)
    origins = tuple(Origin("f", "npz", "x", None, drawn) for _ in "ab")
    found = find_semantics(world.batch(world.noisy(world.raw, 0.01), world.raw, None, "b", origins=origins))
    assert [(f.cause, f.side) for f in found] == [("raw-logprobs", "a")]
    processed = world.processed(drawn)
    assert causes(world.batch(processed, world.noisy(processed, 0.003), None, "b", origins=origins)) == []


def test_the_declaration_is_printed():
    drawn = {"temperature": 0.7, "top_p": 0.9}
    assert "temperature 0.7, top-p 0.9" in origin_words({"meaning": None, "sampled_at": drawn})
    assert origin_words({"meaning": None, "sampled_at": None}) == "distribution not declared"


def test_one_unlikely_token_makes_no_fill_of_what_top_p_left_alone():
    meaning = Semantics(1.0, 0.8)
    world = World(24, sequences=20, meaning=meaning)
    processed, other = world.processed(meaning), world.raw.copy()
    alone = np.flatnonzero((processed == 0) & (other < np.log(0.99)))
    other[alone[0]] = np.log(0.2)
    assert ("renormalised-top-p", "a") in causes(world.batch(processed, other))
    assert "zero-filled-logprobs" not in dict(causes(world.batch(processed, other)))
    filled = np.where(world.sequence == 2, 0.0, processed)
    found = find_semantics(world.batch(filled, other))
    assert ("zero-filled-logprobs", "a", "s2") in [(f.cause, f.side, f.figures.get("first")) for f in found]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["flat", "mixed"])
@pytest.mark.parametrize("shift", [1, -1])
def test_a_shift_in_a_part_of_the_sequences_is_named(share, kind, shift):
    world = text_like(25, kind, 1000)
    count = int(20 * share)
    moved = world.raw.reshape(20, -1).copy()
    moved[:count] = np.roll(moved[:count], shift, axis=1)
    found = find_semantics(world.batch(np.minimum(moved.ravel() + world.rng.normal(0, 0.03, 1000), 0.0), world.raw))
    assert [f.cause for f in found] == ["logprob-shift"]
    assert found[0].figures == {"shift": -shift, "sequences": count, "first": "s0"}
    assert f"in {count} of 20 sequences" in found[0].text


def test_an_odd_token_at_an_end_is_no_shift():
    world = text_like(26, "peaked", 1000)
    for at in (0, 49, 50):
        odd = world.raw.copy()
        odd[at] = -9.0
        assert causes(world.batch(world.noisy(odd, 0.01), world.raw)) == []


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["peaked", "flat", "mixed"])
def test_a_rounded_copy_is_a_bypass(name, kind):
    world = text_like(27, kind, 2000)
    coarse = round_to(world.raw, name).astype(np.float64)
    for a, b in ((coarse, world.raw), (world.raw, coarse)):
        assert causes(world.batch(a, b)) == [("bypassed-logprobs", "both")]
    near = np.minimum(world.raw + world.rng.normal(0, 0.001, 2000), 0.0)
    assert causes(world.batch(round_to(near, name).astype(np.float64), world.raw)) == []
    assert causes(world.batch(round_to(near, name).astype(np.float64), coarse)) == []


def test_a_copy_but_for_a_few_tokens_is_a_bypass():
    world = text_like(28, "mixed", 2000)
    almost = world.raw.copy()
    almost[::200] -= 0.01
    found = find_semantics(world.batch(almost, world.raw))
    assert [(f.cause, f.side) for f in found] == [("bypassed-logprobs", "both")]
    assert 0.98 < found[0].figures["share"] < 1
    half = np.where(np.arange(2000) < 1000, world.raw, world.noisy(world.raw, 0.02))
    assert causes(world.batch(half, world.raw)) == []


@pytest.mark.parametrize("value", [-1.0, -100.0])
@pytest.mark.parametrize("where", ["row", "run"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_another_constant_is_a_fill(value, where, side):
    world = text_like(29, "mixed", 2000)
    columns = {"a": world.noisy(world.raw, 0.02), "b": world.raw.copy()}
    at = world.sequence == 3 if where == "row" else (world.position >= 20) & (world.position < 23)
    columns[side][at] = value
    found = find_semantics(world.batch(columns["a"], columns["b"]))
    assert [(f.cause, f.side) for f in found] == [("zero-filled-logprobs", side)]
    assert found[0].figures["value"] == value and found[0].figures["tokens"] == int(at.sum())
    if value == -1:  # -100 is a floor of both sides
        assert causes(world.batch(np.where(at, value, columns["a"]), np.where(at, value, columns["b"]))) == []


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_filled_first_tokens_are_found(first, value):
    world = text_like(30, "flat", 2000)
    filled = np.where(world.position < first, value, world.noisy(world.raw, 0.02))
    found = find_semantics(world.batch(filled, world.raw))
    assert [(f.cause, f.side) for f in found] == [("zero-filled-logprobs", "a")]
    assert found[0].figures["tokens"] == 40 * first


def test_first_and_last_tokens_that_top_p_left_alone_are_no_fill():
    world = text_like(31, "mixed", 2000)
    world.raw[(world.position == 0) | (world.position == 49)] = np.log(0.85)
    world.raw += 0.02 * world.rng.normal(size=2000) * (world.raw < -0.1)
    world.raw = np.minimum(world.raw, 0.0)
    kept = np.where(world.raw > np.log(0.8), 0.0, world.raw + np.log(1 / 0.95))
    assert {cause for cause, _ in causes(world.batch(np.minimum(kept, 0.0), world.raw))} <= {"renormalised-top-p"}


@pytest.mark.parametrize("nats", [0.003, 0.03])
@pytest.mark.parametrize("meaning", [Semantics(0.9), Semantics(1.0, 0.9), Semantics(0.7, 0.9)])
def test_logits_find_no_less_than_two_columns_do(nats, meaning):
    world = World(32, sequences=30, meaning=meaning)
    batch = world.batch(world.processed(meaning), world.noisy(world.raw, nats), None, "b")
    with_logits, without = causes(batch), causes(replace(batch, rows=None))
    assert with_logits and {cause for cause, _ in without} <= {cause for cause, _ in with_logits}


def test_words_of_one_value_above_zero():
    world = World(33)
    odd = world.raw.copy()
    odd[5] = 0.3
    found = find_semantics(world.batch(world.noisy(world.raw, 0.01), odd))
    assert "1 value of b is above 0" in found[0].text and "?" not in found[0].text


def test_a_million_healthy_tokens_have_no_finding():
    rng = np.random.default_rng(0)
    world = World(0, sequences=2)
    n = 1_000_000
    world.sequence, world.position = np.repeat(np.arange(1000), 1000), np.tile(np.arange(1000), 1000)
    world.token, world.raw = np.zeros(n, np.int64), -rng.exponential(1.0, n)
    batch = world.batch(world.noisy(world.raw, 0.03), world.raw)
    assert find_semantics(batch) == []


@pytest.mark.parametrize(
    ("a", "b", "side"),
    [
        (Semantics(0.7), RAW, "a"),
        (RAW, Semantics(0.7), "b"),
        (Semantics(0.7), Semantics(0.9), "unknown"),
        (Semantics(0.7, 0.9), Semantics(0.7, 0.8), "unknown"),
    ],
)
def test_the_side_that_declares_another_distribution_is_named_where_the_other_declares_none(a, b, side):
    origins = [Origin("x", "dump", "engine", meaning) for meaning in (a, b)]
    assert {finding.side for finding in declared_apart(origins)} == {side}
