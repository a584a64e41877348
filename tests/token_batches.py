"""Batches of tokens for tests: from arrays [sequences, width], and at random with holes, empty rows and equal sides."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from probe.compare.tokens.batch import Origin, TokenBatch

ORIGINS = (Origin("r.npz", "npz", "rollout_log_probs"), Origin("a.npz", "npz", "old_log_probs"))

PER_TOKEN = ("token",)


def batch_of(
    a: np.ndarray, b: np.ndarray, mask: np.ndarray | None = None, *, monitor: bool = False, **known: Any
) -> TokenBatch:
    """Return the batch of log-probs [S, R] with a mask (None: all); ``known``: other fields, those PER_TOKEN [S, R]."""
    mask = np.ones(np.shape(a), bool) if mask is None else np.asarray(mask, bool)
    sequence, position = np.nonzero(mask)
    rows, width = mask.shape
    left, right = np.asarray(a, float)[mask], np.asarray(b, float)[mask]
    fields: dict[str, Any] = {
        "token": np.full(len(sequence), -1),
        "labels": [f"s{row}" for row in range(rows)],
        "step": np.full(rows, -1),
        "start": np.zeros(rows, np.int64),
        "ids": [np.zeros(0, np.int64)] * rows,
        "origins": ORIGINS,
    }
    return TokenBatch(
        sequence=sequence.astype(np.int64),
        position=position.astype(np.int64),
        prob_diff=np.abs(np.exp(left) - np.exp(right)),
        a=None if monitor else left,
        b=None if monitor else right,
        valid=mask.sum(axis=1).astype(np.int64),
        width=width,
        **fields | {name: value[mask] if name in PER_TOKEN else value for name, value in known.items()},
    )


@st.composite
def token_batches(draw: st.DrawFn, *, monitor: bool = False, max_rows: int = 5, max_width: int = 9) -> TokenBatch:
    """Draw a batch: up to five sequences of nine places, any mask, few distinct values (ties), ids, steps, prompts."""
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, max_width))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = rng.random((rows, width)) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    mask &= rng.random((rows, 1)) < draw(st.sampled_from([0.5, 1.0]))
    a = -rng.choice([1e-6, 0.05, 0.3, 1.0, 3.0, 7.0, 12.0], (rows, width))
    size = draw(st.sampled_from([0.0, 0.02, 1.0, 10.0]))
    b = np.minimum(a + size * rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], (rows, width)), 0.0)
    prompt, ids = int(rng.integers(0, 4)), rng.integers(0, 6, (rows, 4 + width))
    known: dict[str, Any] = {"token": ids[:, prompt : prompt + width], "start": np.full(rows, prompt)}
    known["ids"] = [row[: prompt + width] for row in ids]
    if draw(st.booleans()):
        known["step"] = rng.integers(-1, 3, rows)
    return batch_of(a, b, mask, monitor=monitor, **known)
