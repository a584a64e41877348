"""The sequences that differ most, as lines that ``probe dump --from`` runs again (``probe tokens --worst N -o``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.groups import gaps
from probe.errors import CompareError
from probe.files import replace_all
from probe.store.reader import Dump

SAMPLING = ("temperature", "top_p")
"""What of a manifest's sampling a dump of the same tokens follows."""


def record_of(dump: Dump, number: int) -> dict[str, Any]:
    """Return what it takes to run a dump's sequence again, without its token ids."""
    sequence, manifest = dump.sequences[number], dump.manifest
    stated = manifest.get("sampling") or {}
    return {
        "uid": sequence.uid or sequence.request_id or f"s{sequence.index}",
        "sample": sequence.sample,
        "trajectory": sequence.trajectory,
        "weight_version": sequence.weight_version,
        "model": (manifest.get("model") or {}).get("path") or "",
        "sampling": {name: stated[name] for name in SAMPLING if name in stated},
    }


def worst_sequences(batch: TokenBatch, count: int) -> np.ndarray:
    """Return the numbers of the ``count`` sequences whose log-probs differ most in a single token, the worst first.

    Those of which a side's log-prob of some token is no finite number come before all others. Of equals the larger mean
    difference counts, then their order; sequences of which nothing is known are none of them.
    """
    gap, total = _gap(batch), len(batch.labels)
    most, tokens = np.zeros(total), np.bincount(batch.sequence, minlength=total)
    np.maximum.at(most, batch.sequence, gap)
    mean = np.bincount(batch.sequence, gap, minlength=total) / np.maximum(tokens, 1)
    broken = _not_finite(batch) > 0
    order = np.lexsort((np.arange(total), -mean, -most, ~broken))
    return order[((tokens > 0) | broken)[order]][:count]


def _not_finite(batch: TokenBatch) -> np.ndarray:
    """Return per sequence how many tokens have an infinite log-prob, or one on one side only: NaN on the other."""
    infinite = batch.valid - np.bincount(batch.sequence, minlength=len(batch.labels))
    return infinite + (0 if batch.lacking is None else batch.lacking)


def _gap(batch: TokenBatch) -> np.ndarray:
    gap = gaps(batch)
    return batch.prob_diff if gap is None else gap


def write_worst(batch: TokenBatch, count: int, path: Path) -> int:
    """Write the worst sequences to a JSON lines file (docs/tokens.md) and return how many they are.

    Raises CompareError where nothing says what the sequences' token ids are, no token was compared, or the file cannot
    be written.
    """
    if not batch.records:
        raise CompareError("--worst needs whole sequences, prompts included", "give dumps, or a job's folder")
    numbers = worst_sequences(batch, count)
    if not len(numbers):
        raise CompareError("no token was compared, so that no sequence is the worst", "see the report without --worst")
    lines = [json.dumps(_line(batch, number)) + "\n" for number in numbers.tolist()]
    try:
        replace_all({path: "".join(lines).encode()})
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror or error})"
        raise CompareError(problem, "choose another file") from None
    return len(numbers)


def _line(batch: TokenBatch, number: int) -> dict[str, Any]:
    gap = _gap(batch)[batch.sequence == number]
    worst = {"max": float(gap.max()), "mean": float(gap.mean())} if len(gap) else {"max": None, "mean": None}
    return batch.records[number] | {
        "prompt_len": int(batch.start[number]),
        "max_abs_logprob_diff": worst["max"],
        "mean_abs_logprob_diff": worst["mean"],
        "not_finite": int(_not_finite(batch)[number]),
        "tokens": batch.ids[number].tolist(),
    }
