"""Preflight gates: what must hold before any tensor is worth comparing. Each says pass, warn, fail or skipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from probe.compare.report.model import counted
from probe.compare.sequences import SequenceJoin, SequencePair, sequence_labels
from probe.compare.trajectories import common_prefix
from probe.store.reader import Dump

NAMES = ("tokens", "positions", "weights", "replicas", "sampling", "config", "environment")

SHOWN = 3
"""Examples that a gate's sentence spells out."""


@dataclass(frozen=True)
class GateFinding:
    """One thing that a gate found, for the diagnosis.

    ``cause``: a slug of docs/diagnosis.md; ``subject``: the canonical module or parameter, or ``config``, ``log-probs``
    and the like; ``side``: a, b, both or unknown; ``text``: a sentence; ``figures``: its numbers.
    """

    cause: str
    subject: str
    side: str
    text: str
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gate:
    """One gate's outcome; ``detail`` is a sentence, ``findings`` the same as data."""

    name: str
    status: str
    detail: str
    findings: tuple[GateFinding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report's entry."""
        return asdict(self)


def tokens_gate(a: Dump, b: Dump, join: SequenceJoin) -> Gate:
    """Compare token ids: prompts that differ fail; responses that part, lone sequences and assumed ids warn."""
    takers = " and ".join(f"{counted(count, 'sequence')} of {side}" for side, count in zip("ab", join.lent) if count)
    assumed = [f"{takers} hold no token ids and were joined by name: their ids are assumed to be the same"]
    notes = assumed if takers else []
    if join.conflicts:
        left, right = (d.sequences[i] for d, i in zip((a, b), join.conflicts[0]))
        at = common_prefix(left.tokens, right.tokens)
        ids = [int(s.tokens[at]) if at < len(s.tokens) else None for s in (left, right)]
        name = sequence_labels(a.sequences)[left.index]
        problem = f"the prompt of {name} differs from position {at} on (token {ids[0]} in a, {ids[1]} in b)"
        differ = f"{len(join.conflicts)} such prompts in all were not compared"
        return Gate("tokens", "fail", "; ".join([*notes, problem, differ]), _conflict_findings(a, b, join))
    status, findings = "pass", list[GateFinding]()
    for found_status, finding in _partings(a, b, join):
        status = found_status if status != "fail" else status
        notes.append(finding.text)
        findings.append(finding)
    lone = (("a", join.only_a), ("b", join.only_b))
    notes += [f"{counted(len(found), 'sequence')} only in {side}" for side, found in lone if found]
    total = sum(pair.prefix for pair in join.pairs)
    equal = f"{counted(len(join.pairs), 'sequence')}, {counted(total, 'token id')} equal"
    status = status if status == "fail" else "warn" if notes else "pass"
    return Gate("tokens", status, "; ".join([*notes, equal]), tuple(findings))


def _partings(a: Dump, b: Dump, join: SequenceJoin) -> list[tuple[str, GateFinding]]:
    """Return what the gate says of responses that part: those that go on apart warn, two rollouts do; those that agree
    again are one text with other ids in its middle, and fail.
    """
    apart: list[SequencePair] = []
    edited: list[SequencePair] = []
    for pair in join.pairs:
        tails = [d.sequences[i].tokens[pair.prefix :] for d, i in ((a, pair.a), (b, pair.b))]
        if all(map(len, tails)):
            (edited if _agree_again(*tails) else apart).append(pair)
    found = []
    for pairs, status, words in (
        (edited, "fail", "differ in the middle and agree again: other ids of the same text (first {} at position {})"),
        (apart, "warn", "part (first {} at position {}), so later rows were not compared"),
    ):
        if pairs:
            first = pairs[0]
            said = words.format(first.label, first.prefix)
            text = f"the responses of {len(pairs)} of {len(join.pairs)} sequences {said}"
            figures: dict[str, float | int | str] = {
                "sequences": len(pairs),
                "first": first.label,
                "position": first.prefix,
            }
            found.append((status, GateFinding("token-mismatch", "tokens", "unknown", text, figures)))
    return found


AGAIN = 8
"""Equal ids at the end of two responses that parted from which on they are one text: two samples of a model that part
agree in so many successive tokens, and to the very end, by repetition at most."""


def _agree_again(left: np.ndarray, right: np.ndarray) -> bool:
    suffix = common_prefix(left[::-1], right[::-1])
    return suffix >= max(AGAIN, min(len(left), len(right)) // 2)


def _conflict_findings(a: Dump, b: Dump, join: SequenceJoin) -> tuple[GateFinding, ...]:
    """Return a finding per prompt that differs under one name, SHOWN at most, with the first position and both ids."""
    found = []
    for number_a, number_b in join.conflicts[:SHOWN]:
        left, right = a.sequences[number_a].tokens, b.sequences[number_b].tokens
        at = common_prefix(left, right)
        ids = [int(tokens[at]) if at < len(tokens) else -1 for tokens in (left, right)]
        name = sequence_labels(a.sequences)[number_a]
        text = f"the prompt of {name} differs from position {at} on (token {ids[0]} in a, {ids[1]} in b)"
        figures: dict[str, float | int | str] = {"sequence": name, "position": at, "token a": ids[0], "token b": ids[1]}
        figures |= {"lengths": f"{len(left)} and {len(right)}", "sequences": len(join.conflicts)}
        found.append(GateFinding("token-mismatch", "tokens", "unknown", text, figures))
    return tuple(found)


def in_order(gates: Iterable[Gate]) -> list[Gate]:
    """Return the gates in their fixed order."""
    by_name = {gate.name: gate for gate in gates}
    return [by_name[name] for name in NAMES]
