"""Which side is wrong, per tensor: from replays, from a reference in higher precision, from the weights."""

from __future__ import annotations

from probe.compare.evidence import BROKEN, Evidence
from probe.compare.floors.ratio import BUG
from probe.compare.gates import GateFinding

PARAMETER_ENDINGS = (".weight", ".bias")


def which_side(evidence: Evidence, label: str) -> str:
    """Return ``a``, ``b`` or ``both`` for a tensor that one thing at least shows to be wrong there, else "".

    A replay speaks first (it needs no other side), then the ratio of errors to the golden reference, then the weights
    gate where it knows the side of the module's parameter.
    """
    replayed = [side for side, labels in evidence.replays.by_side.items() if _is_broken(labels.get(label))]
    if replayed:
        return "both" if len(replayed) > 1 else replayed[0]
    entry = evidence.entry(label)
    flagged = entry is not None and entry.judgement.verdict in ("divergent", "suspect")
    if entry is not None and entry.golden is not None and (flagged or entry.golden.verdict == BUG):
        return entry.golden.side
    if not flagged:
        return ""
    named = {finding.side for finding in _weight_findings(evidence) if _module(finding) == label.rpartition(":")[0]}
    return named.pop() if len(named) == 1 and named <= {"a", "b", "both"} else ""


def _is_broken(found: object) -> bool:
    return getattr(found, "verdict", "") == BROKEN


def _weight_findings(evidence: Evidence) -> tuple[GateFinding, ...]:
    return next((gate.findings for gate in evidence.gates if gate.name == "weights"), ())


def _module(finding: GateFinding) -> str:
    name = finding.subject
    for ending in PARAMETER_ENDINGS:
        name = name.removesuffix(ending)
    return name
