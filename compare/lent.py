"""Token ids of sequences that one side ran without seeing any: a pipeline stage is given hidden states only."""

from __future__ import annotations

from typing import Any

from probe.store.reader import Dump


def lend_tokens(a: Dump, b: Dump) -> dict[str, int]:
    """Give sequences without ids those of the other side's sequence of the same name and sample.

    Only where that one is as long. Returns how many sequences of ``a`` and of ``b`` were lent ids.
    """
    return {"a": _lend(b, a), "b": _lend(a, b)}


def _lend(giver: Dump, taker: Dump) -> int:
    known = {(s.uid, s.sample): s for s in giver.sequences if s.uid and len(s.tokens)}
    lent = 0
    for sequence in taker.sequences:
        other = known.get((sequence.uid, sequence.sample))
        if other is not None and not len(sequence.tokens) and sequence.length == len(other.tokens):
            sequence.tokens = other.tokens
            lent += 1
    return lent


def noted(gates: list[dict[str, Any]], lent: dict[str, int]) -> list[dict[str, Any]]:
    """Return the gates, the tokens gate saying which ids are assumed."""
    words = [f"{count} sequences of {side}" for side, count in lent.items() if count]
    if not words:
        return gates
    note = f"{' and '.join(words)} hold no token ids and were joined by name: their ids are assumed to be the same"
    return [
        gate | {"status": "warn" if gate["status"] == "pass" else gate["status"], "detail": f"{note}; {gate['detail']}"}
        if gate["name"] == "tokens"
        else gate
        for gate in gates
    ]
