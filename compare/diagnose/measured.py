"""What the free-running comparison says: the first tensor that parts, routing, and log-probs that the logits do not
explain."""

from __future__ import annotations

from dataclasses import replace

from probe.compare.diagnose.causes import LIKELY, PATTERN, PLACE, PLAIN
from probe.compare.diagnose.leads import ASIDE, GATE, MEASURED, Lead, rank_of
from probe.compare.diagnose.observe import Observed, observe
from probe.compare.diagnose.patterns import RULES, sentence
from probe.compare.diagnose.replays import exonerated
from probe.compare.evidence import BROKEN, Evidence
from probe.compare.judge import TOKEN_SUSPECT, TOKEN_WORST
from probe.compare.locate.token_layers import LOG_PROB
from probe.compare.measure import Measured
from probe.compare.names.canonical import LOGITS, module_at_fault
from probe.compare.report.findings import log_prob_words

OWN_PATTERNS = frozenset({"nan", "inf", "row-corruption", "column-corruption"})
"""Causes that show in a tensor whatever came before it."""

SUSPECT_SHARE = 0.6
"""How much of its confidence a rule keeps where the tensor is only suspect: its error may be rounding."""

INHERITED_SHARE = 0.5
"""Likewise where replays on both sides say that the module adds nothing of its own."""


def first_parting(e: Evidence) -> Measured | None:
    """Return the first divergent tensor in execution order, else the first suspect one."""
    for word in ("divergent", "suspect"):
        for entry in e.measured:
            if entry.judgement.verdict == word and entry.metrics is not None:
                return entry
    return None


def measured_leads(e: Evidence, gates: list[Lead]) -> list[Lead]:
    """Return the leads of the first tensor that parts or, where replays clear it, of the last one that none clears.

    ``gates``: the leads of failed gates; one that precedes the tensor explains it, although each side's replay, done
    with its own parameters and config, is healthy.
    """
    first = first_parting(e)
    if first is None:
        return []
    share = 1.0 if first.judgement.verdict == "divergent" else SUSPECT_SHARE
    layers = e.side_a.shape.layers
    at = rank_of(module_at_fault(first.match.label), layers)
    explained = any(gate.source == GATE and rank_of(gate.module, layers) <= at for gate in gates)
    if explained or not exonerated(e, first.match.label):
        return _at(e, first.match.label, share)
    inherited = [
        replace(lead, source=ASIDE, evidence=(*lead.evidence, "replays on both sides find the module itself healthy"))
        for lead in _at(e, first.match.label, share * INHERITED_SHARE)
        if lead.cause in OWN_PATTERNS
    ]
    return [*inherited, *_before(e, first)]


def _at(e: Evidence, label: str, share: float) -> list[Lead]:
    seen = observe(e, label)
    return [] if seen is None else _fired(e, seen, share)


def _fired(e: Evidence, seen: Observed, share: float) -> list[Lead]:
    best: dict[str, Lead] = {}
    side, module = side_of(e, seen), module_at_fault(seen.label)
    for rule in RULES:
        if rule.fires(seen) and (rule.cause not in best or best[rule.cause].confidence < rule.confidence * share):
            text = (sentence(rule, seen), *_golden(seen))
            best[rule.cause] = Lead(rule.cause, module, side, rule.confidence * share, text, MEASURED, seen.label)
    plain = any(lead.confidence >= PLAIN * share for lead in best.values())
    return [lead for lead in best.values() if not plain or lead.confidence > PLACE * share]


def _before(e: Evidence, first: Measured) -> list[Lead]:
    """Return leads for a first divergent tensor whose module replays as healthy on both sides: something before it."""
    open_ = [
        entry
        for entry in e.measured
        if entry.order < first.order and entry.metrics is not None and not exonerated(e, entry.match.label)
    ]
    inherited = f"{first.match.label} parts, but replays on both sides find its module healthy"
    if not open_:
        text = (inherited, "every compared tensor before it was replayed and is healthy: rounding is amplified")
        return [
            Lead("rounding", module_at_fault(first.match.label), "unknown", PATTERN, text, MEASURED, first.match.label)
        ]
    nearest = open_[-1]
    text = (inherited, f"{nearest.match.label} is the last tensor before it that no replay clears")
    module = module_at_fault(nearest.match.label)
    return [Lead("unknown", module, "unknown", PLACE, text, MEASURED, nearest.match.label)]


def side_of(e: Evidence, seen: Observed) -> str:
    """Return the side at fault of a tensor that parts, as its replays, the golden dump or its NaN say; else unknown."""
    broken = [side for side, found in e.replays.by_side.items() if _verdict(found.get(seen.label)) == BROKEN]
    if broken:
        return "both" if len(broken) > 1 else broken[0]
    nan_a, nan_b, inf_a, inf_b = seen.nonfinite
    if nan_a + inf_a != nan_b + inf_b and 0 in (nan_a + inf_a, nan_b + inf_b):
        return "a" if nan_a + inf_a else "b"
    golden = getattr(seen.entry, "golden", None)
    return (golden.side if golden is not None else "") or _marked(seen) or "unknown"


def _marked(seen: Observed) -> str:
    """Return the side whose values bear a mark: dropped, zero rows, a coarser dtype, a prefix cache."""
    fits = seen.fits
    return fits.dropped_side or seen.start_fits.dropped_side or fits.zero_side or fits.coarse_side or seen.behind_prefix


def _verdict(found: object) -> str:
    return getattr(found, "verdict", "")


def _golden(seen: Observed) -> tuple[str, ...]:
    golden = getattr(seen.entry, "golden", None)
    if golden is None or not golden.side:
        return ()
    return (
        f"against the golden dump {seen.label} errs by {golden.error_a:.2g} in a and {golden.error_b:.2g} in b "
        f"({golden.ratio:.3g} times)",
    )


def routing_leads(e: Evidence) -> list[Lead]:
    """Return a lead for flips of experts that rounding explains, for a comparison that is not consistent."""
    for entry in e.measured:
        label = entry.match.label
        if label.endswith("router:ids") and entry.judgement.verdict == "consistent":
            text = (f"{label}: {entry.judgement.reason}",)
            return [Lead("router-flip", module_at_fault(label), "unknown", PLACE, text, ASIDE, label)]
    return []


def token_leads(e: Evidence) -> list[Lead]:
    """Return a lead where log-probs part although the logits do not say so, and no failed gate says why."""
    mean, worst = e.tokens.get("unexplained_mean") or 0.0, e.tokens.get("unexplained_max") or 0.0
    if mean <= TOKEN_SUSPECT and worst <= TOKEN_WORST:
        return []
    logits = e.entry(LOGITS)
    agree = logits is not None and logits.judgement.verdict in ("identical", "consistent")
    if not agree and first_parting(e) is not None:  # what parts before the log-probs moves them
        return []
    text = f"log-probs part by {mean:.2g} nats on average and {worst:.2g} at most beyond what the logits account for"
    where = [token["lies_in"] for token in e.tokens["worst"]]
    outside = where.count(LOG_PROB)
    more = (log_prob_words(outside, len(where)),) if outside else ()
    sure = PLAIN if agree else LIKELY
    return [Lead("logprob-source", "log-probs", "unknown", sure, (text, *more), MEASURED)]
