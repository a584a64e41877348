"""The ``tokens`` section of the report: figures, groups, corrections, the worst tokens, and strips of text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.corrections import corrections
from probe.compare.tokens.entries import entry_in_context, named, token_entry
from probe.compare.tokens.groups import (
    by_position,
    by_probability,
    by_step,
    by_token,
    gaps,
    grid,
    grouped,
    largest,
    quantiles,
)
from probe.compare.tokens.text import Decoder
from probe.logprobs import (
    RATIO_METRICS,
    SEQUENCE_COLUMNS,
    SEQUENCE_METRICS,
    TOKEN_METRICS,
    prob_diff_metrics,
    ratio_metrics,
    sequence_metrics,
    token_metrics,
)

WORST_TOKENS = 20
STRIP_TOKENS = 20_000
"""Tokens in all strips together; sequences beyond it (the least divergent ones) are counted as truncated."""
MAX_SEQUENCES = 500
"""Entries of ``sequences``: those of the worst tokens, then those with the largest mean."""
SAMPLES, POSITIONS = 8, 10
"""Rows and columns of the grid, as the monitor in training prints them."""


def token_section(
    batch: TokenBatch | None, decode: Decoder | None, samples: int = SAMPLES, positions: int = POSITIONS
) -> dict[str, Any]:
    """Return the ``tokens`` section of the report (docs/report.md); figures are None where no token could be compared.

    ``samples`` and ``positions``: the size of the grid. A batch that knows probability differences only leaves every
    figure of log-probs None.
    """
    report: dict[str, Any] = {
        "compared": 0,
        "lone": {"a": 0, "b": 0},
        "not_finite": [],
        "source_a": batch.origins[0].key if batch is not None else None,
        "source_b": batch.origins[1].key if batch is not None else None,
        **dict.fromkeys((*TOKEN_METRICS, *RATIO_METRICS, *SEQUENCE_METRICS, "quantiles", "grid")),
        "text": decode is not None,
        **{name: [] for name in ("by_position", "by_probability", "by_token", "by_step", "corrections", "worst")},
        **{"sequences": [], "sequences_left_out": 0, "strip_truncated": 0, "left_out": {}},
    }
    if batch is None:
        return report
    known = {"lone": dict(zip("ab", batch.lone)), "not_finite": [asdict(entry) for entry in batch.not_finite]}
    report |= {"compared": len(batch), **known, "grid": grid(batch, samples, positions)}
    report["by_step"], earlier = by_step(batch)
    figures, of_sequences = _figures(batch)
    report |= figures
    report["quantiles"] = {"abs_logprob_diff": quantiles(gaps(batch)), "prob_diff": quantiles(batch.prob_diff)}
    report["by_position"], size = by_position(batch)
    report["by_probability"] = by_probability(batch)
    report["by_token"], ids = by_token(batch, decode)
    report["corrections"] = corrections(batch)
    report["left_out"] = {"token_ids": ids, "steps": earlier, "positions_per_bin": size}
    worst = largest(_size(batch), WORST_TOKENS)
    report["worst"] = [entry_in_context(batch, int(at), decode) for at in worst]
    return report | _sequences(batch, of_sequences, np.unique(batch.sequence[worst]), decode)


def _figures(batch: TokenBatch) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Return the figures of all tokens together, and those of each sequence as columns (SEQUENCE_COLUMNS)."""
    total = len(batch.labels)
    if batch.a is None or batch.b is None:
        return prob_diff_metrics(batch.prob_diff), {name: [None] * total for name in SEQUENCE_COLUMNS}
    figures, columns = sequence_metrics(batch.a, batch.b, batch.sequence, total)
    figures |= token_metrics(batch.a, batch.b) | ratio_metrics(batch.a, batch.b)
    return figures, {name: columns[name].tolist() for name in SEQUENCE_COLUMNS}


def _size(batch: TokenBatch) -> np.ndarray:
    """Return what ranks tokens: |D|, or |p - q| where nothing else is known."""
    gap = gaps(batch)
    return batch.prob_diff if gap is None else gap


# -- sequences --------------------------------------------------------------------------------------------------------


def _sequences(
    batch: TokenBatch, known: dict[str, list[Any]], first: np.ndarray, decode: Decoder | None
) -> dict[str, Any]:
    """Return ``sequences``, with strips for the most divergent ones, and how many have no entry and no strip.

    ``known``: columns over all sequences; ``first``: numbers of the sequences that have an entry in any case.
    """
    total = len(batch.labels)
    columns = {"step": [None if step < 0 else step for step in batch.step.tolist()]}
    figures = grouped(gaps(batch), batch.prob_diff, batch.sequence, total)
    columns |= {"compared": figures.pop("count"), **figures, **known}
    rank = np.array([mean or 0.0 for mean in figures["mean_abs" if batch.a is not None else "mean_prob_diff"]])
    rank[first] = np.inf
    kept = np.sort(np.argsort(-rank, kind="stable")[:MAX_SEQUENCES])
    lengths = [_length(batch, number) for number in kept]
    strips, truncated = _strips(batch, kept, lengths, decode)
    entries = [
        {
            "sequence": batch.labels[number],
            "prompt_len": int(batch.start[number]),
            "length": length,
            **{name: values[number] for name, values in columns.items()},
            "strip": strips.get(number, []),
        }
        for number, length in zip(kept.tolist(), lengths)
    ]
    left_out = total - len(kept)
    return {"sequences": entries, "sequences_left_out": left_out, "strip_truncated": truncated + left_out}


def _members(batch: TokenBatch, number: int) -> slice:
    start, end = np.searchsorted(batch.sequence, (number, number + 1))
    return slice(int(start), int(end))


def _length(batch: TokenBatch, number: int) -> int:
    """Return the tokens of a sequence, prompt included; where no ids are known, up to the last one compared."""
    if len(batch.ids[number]):
        return len(batch.ids[number])
    return int(batch.start[number] + batch.position[_members(batch, number)].max(initial=-1)) + 1


def _strips(
    batch: TokenBatch, kept: np.ndarray, lengths: list[int], decode: Decoder | None
) -> tuple[dict[int, list[dict[str, Any]]], int]:
    """Return the strips that STRIP_TOKENS allow, by sequence, and how many of ``kept`` go without.

    The sequences of the largest single differences come first.
    """
    size = _size(batch)
    top = [float(size[_members(batch, number)].max(initial=0.0)) for number in kept]
    strips: dict[int, list[dict[str, Any]]] = {}
    budget = STRIP_TOKENS
    for place in sorted(range(len(kept)), key=lambda place: -top[place]):
        budget -= lengths[place]
        if budget < 0:
            continue
        strips[int(kept[place])] = _strip(batch, int(kept[place]), lengths[place], decode)
    return strips, len(kept) - len(strips)


def _strip(batch: TokenBatch, number: int, length: int, decode: Decoder | None) -> list[dict[str, Any]]:
    start, members = int(batch.start[number]), _members(batch, number)
    ids = batch.ids[number].tolist() or [-1] * length
    compared = {
        start + int(batch.position[n]): token_entry(batch, n, decode) for n in range(members.start, members.stop)
    }
    blank = dict.fromkeys(("logprob_a", "logprob_b", "diff", "prob_diff"))
    return [
        compared.get(position, {"position": position, **named(token, decode), **blank})
        | {"response": position >= start}
        for position, token in enumerate(ids)
    ]
