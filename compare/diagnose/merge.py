"""Merge leads that say the same, drop those that another explains, and put the rest in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from probe.compare.diagnose.causes import LIKELY, PATTERN, PLACE, PLAIN
from probe.compare.diagnose.leads import (
    ASIDE,
    FIRST,
    GATE,
    LAST,
    MEASURED,
    REPLAY,
    Lead,
    family_of,
    first_of,
    joined,
    rank_of,
)

WEIGHT_CAUSES = frozenset(
    {
        *("stale-weights", "lagged-weights", "permuted-qkv", "permuted-weights", "transposed-weight", "scaled-weight"),
        *("gate-up-swapped", "kv-swapped", "expert-swapped", "missing-shard", "tp-shards-swapped", "weight-precision"),
        *("untied-head", "wrong-bias"),
    }
)
"""Causes found in parameters: whatever the replay of such a module looks like, its parameters explain it."""

SAME_LEVEL = 0.6
"""Leads of one cause and side form a group down to this share of the surest one's confidence."""

SHOWN = 4
"""Modules of a group that its evidence names."""


def merged(leads: Iterable[Lead], layers: int) -> list[Lead]:
    """Return leads merged and in order: at most one per (module, side, cause)."""
    by_source: dict[str, list[Lead]] = defaultdict(list)
    for lead in leads:
        by_source[lead.source].append(lead)
    replays = _grouped(by_source[REPLAY], layers)
    named = _with_replays([*by_source[GATE], *by_source[ASIDE]], replays, layers)
    everything = _with_measured(named, by_source[MEASURED], layers)
    return sorted(_once(everything), key=lambda lead: _order(lead, layers))


def _order(lead: Lead, layers: int) -> tuple[bool, tuple[int, ...], float]:
    """Execution order decides, and at one module confidence; what stands on the side comes last, the surest first."""
    aside = lead.source == ASIDE
    return aside, () if aside else rank_of(lead.module, layers), -lead.confidence


# -- one fault in many modules ----------------------------------------------------------------------------------------


def _grouped(leads: list[Lead], layers: int) -> list[Lead]:
    """Join replays of one family that are broken alike: one fault in every layer is one suspect."""
    groups: dict[tuple[str, str, str], list[Lead]] = defaultdict(list)
    for lead in leads:
        groups[lead.side, lead.cause, family_of(lead.label)].append(lead)
    result = []
    for found in groups.values():
        sure = max(lead.confidence for lead in found)
        alike = [lead for lead in found if lead.confidence >= SAME_LEVEL * sure]
        result.append(_group(alike, layers))
        result += [lead for lead in found if lead not in alike]
    return result


def _group(leads: list[Lead], layers: int) -> Lead:
    modules = first_of((lead.module for lead in leads), layers)
    if len(modules) == 1:
        return max(leads, key=lambda lead: lead.confidence)
    first = next(lead for lead in leads if lead.module == modules[0])
    shown = ", ".join(modules[:SHOWN])
    more = f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else ""
    text = f"the same in {len(modules)} modules: {shown}{more}"
    sure = max(lead.confidence for lead in leads)
    return replace(first, confidence=sure, evidence=(*first.evidence, text), modules=modules)


# -- gates and replays ------------------------------------------------------------------------------------------------


def _with_replays(gates: list[Lead], replays: list[Lead], layers: int) -> list[Lead]:
    result, left = [], list(replays)
    for gate in gates:
        said = [lead for lead in left if _explains(gate, lead, layers)]
        left = [lead for lead in left if lead not in said]
        for lead in said:
            gate = _joined(gate, lead)
        result.append(gate)
    return result + left


def _explains(gate: Lead, replay: Lead, layers: int) -> bool:
    """Tell whether a gate's finding and a replay are about one thing."""
    here = _overlap(gate, replay)
    if here and gate.cause in WEIGHT_CAUSES:
        return True
    if gate.side != replay.side and "unknown" not in (gate.side, replay.side):
        return False
    nowhere = rank_of(gate.module, layers) == FIRST
    return (gate.cause == replay.cause and (here or nowhere)) or (here and replay.cause == "unknown")


def _overlap(gate: Lead, lead: Lead) -> bool:
    """Tell whether two leads concern one module; an expert is one of its experts' module."""
    modules = set(lead.all_modules)
    return any(name in modules or name.partition(".experts.")[0] + ".experts" in modules for name in gate.all_modules)


def _joined(gate: Lead, lead: Lead) -> Lead:
    """Return a lead with what another one adds: its module where the first names none, its side, its sentences."""
    bare = not _overlap(gate, lead)
    sure = lead.confidence if lead.cause == gate.cause else min(lead.confidence, PATTERN)
    return replace(
        gate,
        module=lead.module if bare else gate.module,
        modules=lead.modules if bare else gate.modules,
        label=gate.label or lead.label,
        # two sides' parameters that differ do not say which is right; a replay does
        side=lead.side if gate.side == "unknown" or lead.source == REPLAY else gate.side,
        confidence=joined((gate.confidence, sure)),
        evidence=(*gate.evidence, *(text for text in lead.evidence if text not in gate.evidence)),
        source=lead.source if gate.source == ASIDE and lead.source != ASIDE else gate.source,
    )


# -- the free-running comparison --------------------------------------------------------------------------------------


def _with_measured(named: list[Lead], measured: list[Lead], layers: int) -> list[Lead]:
    """Add the free-running comparison's leads: to leads of the same module, or on their own where nothing explains
    them."""
    result = list(named)
    for lead in measured:
        at = rank_of(lead.module, layers)
        same = next((n for n in result if n.cause == lead.cause and lead.module in n.all_modules), None)
        if same is not None:
            result[result.index(same)] = _joined(same, lead)
            continue
        here = [n for n in result if n.source != ASIDE and lead.module in n.all_modules]
        gate = next((n for n in here if n.source == GATE), None)
        if gate is not None:  # a difference of parameters or settings shows in their module's output
            result[result.index(gate)] = _joined(gate, lead) if lead.confidence >= PLAIN else gate
            continue
        nameless = next((n for n in named if n in here and n.cause == "unknown"), None)
        if nameless is not None and lead.confidence >= PLACE:
            result.append(_named(nameless, lead))
            continue
        before = [n for n in result if n.source in (GATE, REPLAY) and _rank(n, layers) <= at != LAST]
        if not before or (here and lead.confidence > PLACE and all(n.confidence < LIKELY for n in named if n in here)):
            result.append(lead)
        elif lead.confidence >= PLAIN:
            result.append(replace(lead, source=lead.source if here else ASIDE))
    return [lead for lead in result if not _renamed(lead, result)]


def _rank(lead: Lead, layers: int) -> tuple[int, ...]:
    return rank_of(lead.module, layers)


def _named(replay: Lead, pattern: Lead) -> Lead:
    """Return a broken replay without a cause under the cause that the pattern of its difference names."""
    evidence = (*replay.evidence, *pattern.evidence)
    sure = joined((pattern.confidence, PLACE))
    return replace(replay, cause=pattern.cause, confidence=sure, evidence=evidence, modules=())


def _renamed(lead: Lead, leads: list[Lead]) -> bool:
    """Tell whether a nameless lead stands beside one that names its cause as surely, of the same module or, where
    parameters differ, of any: which tensor parts first then says nothing more."""
    if lead.cause != "unknown":
        return False
    if lead.source == MEASURED and any(n.source == GATE and n.cause in WEIGHT_CAUSES for n in leads):
        return True
    beside = (other for other in leads if other is not lead and other.module == lead.module and other.source != ASIDE)
    return any(other.cause != "unknown" and other.confidence >= PLACE for other in beside)


def _once(leads: list[Lead]) -> list[Lead]:
    """Keep the surest lead of each (module, side, cause)."""
    best: dict[tuple[str, str, str], Lead] = {}
    for lead in leads:
        key = lead.module, lead.side, lead.cause
        if key not in best or best[key].confidence < lead.confidence:
            best[key] = lead
    return list(best.values())
