"""Apply the rules to the evidence and rank what they find."""

from __future__ import annotations

import shlex

from probe.compare.diagnose.action import recommend
from probe.compare.diagnose.causes import CAUSES
from probe.compare.diagnose.gates import gate_leads
from probe.compare.diagnose.leads import Lead, output_of
from probe.compare.diagnose.measured import measured_leads, routing_leads, token_leads
from probe.compare.diagnose.merge import merged
from probe.compare.diagnose.replays import replay_leads, suspicious
from probe.compare.evidence import Evidence, Suspect
from probe.compare.side import Side

__all__ = ["diagnose", "recommend"]

MOST = 12
"""Suspects that a report lists."""


def diagnose(evidence: Evidence) -> list[Suspect]:
    """Return the suspects, the likeliest first: at most one per (module, side, cause).

    They stand in the order in which the model executes, gates that name no module before all: what is wrong first is
    what to look at first. Agreeing sides have suspects only where a gate warns of something that matters.
    """
    leads = gate_leads(evidence)
    if evidence.verdict == "incomparable":  # of what no tensor could show, a module's own input still can
        leads += replay_leads(evidence)
    if evidence.verdict not in ("consistent", "incomparable"):
        leads += (
            replay_leads(evidence) + suspicious(evidence) + measured_leads(evidence, leads) + routing_leads(evidence)
        )
        leads += [] if any(lead.module == "log-probs" for lead in leads) else token_leads(evidence)
    return [_suspect(evidence, lead) for lead in merged(leads, evidence.side_a.shape.layers)[:MOST]]


def _suspect(e: Evidence, lead: Lead) -> Suspect:
    return Suspect(
        name=lead.module,
        side=lead.side,
        cause=lead.cause,
        confidence=round(lead.confidence, 2),
        evidence=lead.evidence,
        next_check=_next_check(e, lead),
        label=lead.label,
    )


def _next_check(e: Evidence, lead: Lead) -> str:
    a, b = shlex.quote(str(e.a.path)), shlex.quote(str(e.b.path))
    label = lead.label or output_of(lead.module)
    show = "; ".join(
        f"probe show {path} {_native(side, label)}".strip() for path, side in ((a, e.side_a), (b, e.side_b))
    )
    return CAUSES.get(lead.cause, CAUSES["unknown"]).check.format(module=lead.module, a=a, b=b, show=show)


def _native(side: Side, label: str) -> str:
    """Return the dump's own name of the module that gives a canonical tensor, empty where it has none."""
    source = side.resolution.sources.get(label)
    return shlex.quote(side.natives[source.native[0]][0]) if source is not None else ""
