"""What failed and warning gates say: the findings already name their causes."""

from __future__ import annotations

from collections import defaultdict

from probe.compare.diagnose.causes import EXACT, PATTERN, WEAK
from probe.compare.diagnose.leads import ASIDE, GATE, Lead, first_of
from probe.compare.evidence import Evidence
from probe.compare.gates import Gate, GateFinding
from probe.compare.names.canonical import module_at_fault

# What a gate's failure means where it has no findings: (cause, subject).
_DEFAULTS: dict[str, tuple[str, str]] = {
    "tokens": ("token-mismatch", "tokens"),
    "positions": ("position-offset", "positions"),
    "weights": ("stale-weights", "weights"),
    "replicas": ("unknown", "replicas"),
    "sampling": ("temperature-semantics", "log-probs"),
    "config": ("other-config", "config"),
    "environment": ("environment", "environment"),
}

_CONFIDENCE = {"fail": EXACT, "warn": PATTERN, "pass": WEAK}
"""A gate's checks are exact: one that fails is as good as certain; a warning says that there may be a reason."""

REAL_WARNINGS = frozenset({"weights", "sampling", "positions"})
"""Gates whose findings matter to training although the two sides agree: weights that lag, log-probs of another
distribution. Differing responses, settings without effect and environments do not."""

SHOWN = 4
"""Findings of one cause that a suspect quotes."""


def gate_leads(e: Evidence) -> list[Lead]:
    """Return one lead per (gate, cause, side) that a gate found."""
    leads: list[Lead] = []
    for gate in e.gates:
        if gate.status == "skipped" or (e.verdict in ("consistent", "incomparable") and not _matters(gate)):
            continue
        groups: dict[tuple[str, str], list[GateFinding]] = defaultdict(list)
        for finding in _findings(gate):
            groups[finding.cause, finding.side].append(finding)
        leads += [_lead(gate, found, e.side_a.shape.layers) for found in groups.values()]
    return leads


def _matters(gate: Gate) -> bool:
    return gate.status == "fail" or (gate.status == "warn" and gate.name in REAL_WARNINGS)


def _findings(gate: Gate) -> tuple[GateFinding, ...]:
    if gate.findings or gate.status == "pass":
        return tuple(finding for finding in gate.findings if finding.cause)
    if gate.status == "warn" and gate.name != "environment":  # a warning without findings names no cause
        return ()
    cause, subject = _DEFAULTS.get(gate.name, ("unknown", gate.name))
    return (GateFinding(cause, subject, "unknown", gate.detail),)


def _lead(gate: Gate, found: list[GateFinding], layers: int) -> Lead:
    modules = first_of((module_at_fault(finding.subject) for finding in found), layers)
    confidence = WEAK if found[0].cause == "environment" else _CONFIDENCE[gate.status]
    texts = [finding.text for finding in found[:SHOWN]]
    if len(found) > SHOWN:
        texts.append(f"and {len(found) - SHOWN} more findings of the {gate.name} gate like these")
    source = GATE if gate.status == "fail" and found[0].cause != "environment" else ASIDE
    values = [value for value in found[0].figures.values() if isinstance(value, float)]
    value = values[0] if len(values) == 1 else None
    return Lead(found[0].cause, modules[0], found[0].side, confidence, tuple(texts), source, "", modules, value)
