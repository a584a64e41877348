"""One token as the report shows it: its place, id and text, what both sides say of it, and the text around it."""

from __future__ import annotations

from typing import Any

from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.text import Decoder

CONTEXT_TOKENS = 16
"""Tokens of context before a token, and after it."""


def entry_in_context(batch: TokenBatch, at: int, decode: Decoder | None) -> dict[str, Any]:
    """Return the entry of token ``at`` with its sequence and the text of the CONTEXT_TOKENS before and after it."""
    owner = int(batch.sequence[at])
    place = int(batch.start[owner] + batch.position[at])
    ids = batch.ids[owner]
    around = ids[max(0, place - CONTEXT_TOKENS) : place], ids[place + 1 : place + 1 + CONTEXT_TOKENS]
    before, after = (decode(part.tolist()) if decode else " ".join(map(str, part.tolist())) for part in around)
    return {"sequence": batch.labels[owner], **token_entry(batch, at, decode), "context": before, "after": after}


def token_entry(batch: TokenBatch, at: int, decode: Decoder | None) -> dict[str, Any]:
    """Return place, id, text and both sides of token ``at`` of a batch; ``position`` counts from the prompt's first."""
    token = int(batch.token[at])
    sides = (None, None) if batch.a is None or batch.b is None else (float(batch.a[at]), float(batch.b[at]))
    return {
        "position": int(batch.start[batch.sequence[at]] + batch.position[at]),
        **named(token, decode),
        "logprob_a": sides[0],
        "logprob_b": sides[1],
        "diff": None if sides[0] is None or sides[1] is None else sides[1] - sides[0],
        "prob_diff": float(batch.prob_diff[at]),
    }


def named(token: int, decode: Decoder | None) -> dict[str, Any]:
    """Return a token id (-1: unknown) and its text, None where they are not known."""
    known = token >= 0
    return {"token": token if known else None, "text": decode([token]) if decode and known else None}
