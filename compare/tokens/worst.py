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

    Of equals the larger mean difference counts, then their order; sequences without a compared token are none of them.
    """
    gap, total = _gap(batch), len(batch.labels)
    most, tokens = np.zeros(total), np.bincount(batch.sequence, minlength=total)
    np.maximum.at(most, batch.sequence, gap)
    mean = np.bincount(batch.sequence, gap, minlength=total) / np.maximum(tokens, 1)
    order = np.lexsort((np.arange(total), -mean, -most))
    return order[tokens[order] > 0][:count]


def _gap(batch: TokenBatch) -> np.ndarray:
    gap = gaps(batch)
    return batch.prob_diff if gap is None else gap


def write_worst(batch: TokenBatch, count: int, path: Path) -> int:
    """Write the worst sequences to a JSON lines file (docs/tokens.md) and return how many they are.

    Raises CompareError where nothing says what the sequences' token ids are, or no token was compared.
    """
    if not batch.records:
        raise CompareError("--worst needs whole sequences, prompts included", "give dumps, or a job's folder")
    numbers = worst_sequences(batch, count)
    if not len(numbers):
        raise CompareError("no token was compared, so that no sequence is the worst", "see the report without --worst")
    lines = [json.dumps(_line(batch, number)) + "\n" for number in numbers.tolist()]
    replace_all({path: "".join(lines).encode()})
    return len(numbers)


def _line(batch: TokenBatch, number: int) -> dict[str, Any]:
    gap = _gap(batch)[batch.sequence == number]
    return batch.records[number] | {
        "prompt_len": int(batch.start[number]),
        "max_abs_logprob_diff": float(gap.max()),
        "mean_abs_logprob_diff": float(gap.mean()),
        "tokens": batch.ids[number].tolist(),
    }
