"""The ``tokens`` section of the report: figures, positions, the worst tokens, and strips of text."""

from __future__ import annotations

from typing import Any

import numpy as np

from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.text import Decoder
from probe.logprobs import RATIO_METRICS, TOKEN_METRICS, ratio_metrics, token_metrics

WORST_TOKENS = 20
CONTEXT_TOKENS = 16
STRIP_TOKENS = 20_000
"""Tokens in all strips together; sequences beyond it (the least divergent ones) are counted as truncated."""


def token_section(batch: TokenBatch | None, decode: Decoder | None) -> dict[str, Any]:
    """Return the ``tokens`` section of the report; figures are None where no token could be compared."""
    report: dict[str, Any] = {
        "compared": 0,
        "lone": {"a": 0, "b": 0},
        "source_a": batch.origins[0].key if batch else None,
        "source_b": batch.origins[1].key if batch else None,
        **dict.fromkeys((*TOKEN_METRICS, *RATIO_METRICS)),
        "text": decode is not None,
        **{"by_position": [], "worst": [], "sequences": [], "strip_truncated": 0},
    }
    if batch is None or batch.a is None or batch.b is None:
        return report
    report |= {"compared": len(batch), "lone": dict(zip("ab", batch.lone)), **token_metrics(batch.a, batch.b)}
    report |= ratio_metrics(batch.a, batch.b)
    report["by_position"] = _by_position(batch)
    report["worst"] = _worst(batch, decode)
    report["sequences"], report["strip_truncated"] = _sequences(batch, decode)
    return report


def _gap(batch: TokenBatch) -> np.ndarray:
    assert batch.a is not None and batch.b is not None
    return np.abs(batch.b - batch.a)


def _by_position(batch: TokenBatch) -> list[dict[str, Any]]:
    order = np.argsort(batch.position, kind="stable")
    places, starts = np.unique(batch.position[order], return_index=True)
    groups = np.split(_gap(batch)[order], starts[1:]) if len(places) else []
    return [
        {"position": int(p), "count": len(gap), "mean_abs": float(gap.mean()), "max_abs": float(gap.max())}
        for p, gap in zip(places, groups)
    ]


def _worst(batch: TokenBatch, decode: Decoder | None) -> list[dict[str, Any]]:
    entries = []
    for at in np.argsort(-_gap(batch), kind="stable")[:WORST_TOKENS]:
        owner = int(batch.sequence[at])
        place = int(batch.start[owner] + batch.position[at])
        before = batch.ids[owner][max(0, place - CONTEXT_TOKENS) : place].tolist()
        context = decode(before) if decode else " ".join(map(str, before))
        entries.append({"sequence": batch.labels[owner], **_token(batch, int(at), decode), "context": context})
    return entries


def _token(batch: TokenBatch, at: int, decode: Decoder | None) -> dict[str, Any]:
    assert batch.a is not None and batch.b is not None
    token = int(batch.token[at])
    return {
        "position": int(batch.start[batch.sequence[at]] + batch.position[at]),
        "token": token,
        "text": decode([token]) if decode else None,
        "logprob_a": float(batch.a[at]),
        "logprob_b": float(batch.b[at]),
        "diff": float(batch.b[at] - batch.a[at]),
    }


def _sequences(batch: TokenBatch, decode: Decoder | None) -> tuple[list[dict[str, Any]], int]:
    """Return one entry per sequence, with strips for the most divergent ones, and how many go without."""
    gap = _gap(batch)
    entries: list[dict[str, Any]] = []
    bounds = np.searchsorted(batch.sequence, np.arange(len(batch.labels) + 1))
    members = [np.arange(bounds[number], bounds[number + 1]) for number in range(len(batch.labels))]
    for number, at in enumerate(members):
        figures = {"mean_abs": float(gap[at].mean()), "max_abs": float(gap[at].max())} if len(at) else {}
        entries.append(
            {
                "sequence": batch.labels[number],
                "prompt_len": int(batch.start[number]),
                "length": len(batch.ids[number]),
                **{"mean_abs": None, "max_abs": None, **figures, "strip": []},
            }
        )
    budget, truncated = STRIP_TOKENS, 0
    for number in sorted(range(len(entries)), key=lambda n: -(entries[n]["max_abs"] or 0.0)):
        budget -= entries[number]["length"]
        if budget < 0:
            truncated += 1
            continue
        entries[number]["strip"] = _strip(batch, number, members[number], decode)
    return entries, truncated


def _strip(batch: TokenBatch, number: int, at: np.ndarray, decode: Decoder | None) -> list[dict[str, Any]]:
    start = int(batch.start[number])
    compared = {start + int(batch.position[n]): _token(batch, int(n), decode) for n in at}
    blank = {"logprob_a": None, "logprob_b": None, "diff": None}
    return [
        compared.get(
            position,
            {"position": position, "token": token, "text": decode([token]) if decode else None, **blank},
        )
        | {"response": position >= start}
        for position, token in enumerate(batch.ids[number].tolist())
    ]
