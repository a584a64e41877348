"""What corrections would touch: as plain loops say, and as verl's own rollout correction says of the same batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from token_batches import batch_of, token_batches
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.corrections import CORRECTIONS, corrections

CLOSE: dict[str, Any] = {"rel": 1e-9, "abs": 1e-12}
"""Counts over counts: equal but for the last bit of a quotient."""


def loop(batch: TokenBatch) -> list[dict[str, Any]]:
    """Return each token's sequence and difference as a plain dictionary."""
    return [{"sequence": int(s), "d": float(d)} for s, d in zip(batch.sequence, batch.b - batch.a)]


@given(token_batches())
def test_corrections_touch_what_a_loop_says(batch):
    tokens, entries = loop(batch), corrections(batch)
    if not tokens:
        assert entries == []
        return
    by_sequence = {t["sequence"]: [u for u in tokens if u["sequence"] == t["sequence"]] for t in tokens}
    statistics = {
        "product": lambda ds: math.exp(sum(ds)),
        "mean": lambda ds: math.exp(sum(ds) / len(ds)),
        "least": lambda ds: math.exp(min(ds)),
    }
    for correction, entry in zip(CORRECTIONS, entries, strict=True):
        low, high = correction.low or 0.0, correction.high or math.inf

        def out(ratio: float, low: float = low, high: float = high) -> bool:
            return ratio < low * (1 - 1e-12) or ratio > high * (1 + 1e-12)

        if correction.of == "token":
            touched = [t for t in tokens if out(math.exp(t["d"]))]
            sequences = {t["sequence"] for t in touched}
        else:
            measure = statistics[correction.of]
            sequences = {number for number, mine in by_sequence.items() if out(measure([t["d"] for t in mine]))}
            touched = [t for t in tokens if t["sequence"] in sequences]
        assert entry["share"] == pytest.approx(len(touched) / len(tokens), **CLOSE), correction.name
        assert entry["sequences_share"] == pytest.approx(len(sequences) / len(by_sequence), **CLOSE), correction.name


def test_a_ratio_on_the_bound_is_kept():
    for bound, kept in ((math.log(2.0), True), (math.log(2.0) + 1e-9, False)):
        a = np.full((1, 1), -1.0)
        batch = batch_of(a, a)
        batch.b = batch.a + bound  # a sum could round: the difference itself must be the bound
        batch.a, batch.b = np.zeros(1), np.array([bound])
        shares = {entry["name"]: entry["share"] for entry in corrections(batch)}
        assert (shares["TIS, token"] == 0.0) == kept


def test_a_single_token_vetoes_its_whole_sequence():
    a = np.full((2, 4), -0.1)
    b = a.copy()
    b[1, 2] = a[1, 2] - 10  # rho = 4.5e-5
    veto = next(entry for entry in corrections(batch_of(a, b)) if entry["name"] == "veto")
    assert (veto["share"], veto["sequences_share"], veto["level"], veto["kind"]) == (0.5, 0.5, "sequence", "veto")
    assert veto["bound"] == "any rho below 0.0001"


def test_huge_differences_overflow_nothing():
    a = np.array([[-1.0, -2000.0]])
    batch = batch_of(a, np.array([[-3000.0, -1.0]]))
    with np.errstate(all="raise"):
        shares = {entry["name"]: entry["share"] for entry in corrections(batch)}
    assert shares["TIS, token"] == 0.5 and shares["IcePop"] == 1.0 and shares["veto"] == 1.0


# -- verl -------------------------------------------------------------------------------------------------------------

VERL = {
    "TIS, token": ({"rollout_is": "token", "rollout_is_threshold": 2.0}, "rollout_is_ratio_fraction_high", None),
    "TIS, sequence": (
        {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        None,
        "rollout_is_ratio_fraction_high",
    ),
    "IcePop": ({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, "rollout_is_oob_ratio", None),
    "sequence rejection": (
        {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        "rollout_rs_seq_sum_k1_masked_fraction",
        "rollout_rs_seq_sum_k1_seq_masked_fraction",
    ),
    "geometric rejection": (
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
        "rollout_rs_seq_mean_k1_masked_fraction",
        "rollout_rs_seq_mean_k1_seq_masked_fraction",
    ),
}
"""Correction -> verl's settings of it, and its metrics for the shares of tokens and of sequences."""


@pytest.mark.parametrize("name", VERL)
@pytest.mark.parametrize("size", [0.001, 0.05, 0.6])
def test_verl_touches_as_many(name, size):
    rng = np.random.default_rng(0)
    mask = (np.arange(60) < rng.integers(1, 60, (50, 1))) & (rng.random((50, 60)) < 0.9)
    mask[:, 0] = True  # verl divides by sequences without a token too
    a = -rng.exponential(1.0, mask.shape)
    b = a + rng.normal(0, size, mask.shape)
    options, of_tokens, of_sequences = VERL[name]
    old, rollout, valid = (torch.from_numpy(values) for values in (b, a, mask.astype(np.int64)))
    _, _, metrics = compute_rollout_correction_and_rejection_mask(old, rollout, valid, **options)
    ours = next(entry for entry in corrections(batch_of(a, b, mask)) if entry["name"] == name)
    for share, key in (("share", of_tokens), ("sequences_share", of_sequences)):
        if key is not None:  # verl's shares are float32
            assert ours[share] == pytest.approx(metrics[f"rollout_corr/{key}"], abs=1e-6), key
