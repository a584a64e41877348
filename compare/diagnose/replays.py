"""What replays say: the broken side is known, the hypothesis that fits names the cause."""

from __future__ import annotations

from probe.compare.diagnose.causes import FITS, LIKELY, PATTERN, PLACE, PLAIN
from probe.compare.diagnose.leads import REPLAY, Lead, family_of
from probe.compare.evidence import FINE, Evidence, Replayed
from probe.compare.names.canonical import module_at_fault
from probe.compare.replay.base import ROWS, explained

NEARLY = 2.0
"""Times its band down to which a hypothesis that explains most of an error is good: the rest is another kernel's."""

LATER = 0.7
"""How much of its confidence a hypothesis keeps when another one fits the same module better."""

# Row patterns of a broken tensor that name a cause by themselves: (kind, families (empty: all), cause, confidence).
ROW_CAUSES: tuple[tuple[str, str, str, float], ...] = (
    ("one-row", "", "row-corruption", LIKELY),
    ("few-rows", "", "row-corruption", PATTERN),
    ("decode-only", "", "decode-kernel", LIKELY),
    ("from-position", "", "position-range", LIKELY),
    ("cached-prefix", "", "stale-prefix-cache", LIKELY),
    ("one-sequence", "", "batch-variance", PLACE),
)


# What a few roundings too many, all over a tensor, usually are.
PRECISION_CAUSES: dict[str, str] = {
    "linear": "partial-sums",
    "norm": "norm-precision",
    "attention": "softmax-precision",
    "head": "head-precision",
}

FEW_ROUNDINGS = 10.0
"""Times its band that the error of a module may reach which rounds more often than it should: partial sums rounded
after every 16 of 512 terms measured 3 times."""


def _like_rounding(found: Replayed) -> bool:
    """Tell whether a module errs by a few roundings, and by as much in its worst row and feature as all over."""
    over = found.error / found.band
    apart = max(found.worst_row / found.row_band, found.worst_column / found.column_band)
    return 1 < over < FEW_ROUNDINGS and apart < 1.5 * over


def replay_leads(e: Evidence) -> list[Lead]:
    """Return the leads of every broken replay: its hypotheses, or the pattern of its errors, or no cause at all."""
    leads: list[Lead] = []
    for found in e.replays.broken():
        leads += _of_module(e, found)
    return leads


def _of_module(e: Evidence, found: Replayed) -> list[Lead]:
    said = sentence(e, found)
    causes = _hypotheses(found)
    share = LATER if causes else 1.0  # what a hypothesis says of the values outranks which rows are off
    for cause, confidence, text in _patterns(e, found):
        causes.setdefault(cause, (confidence * share, text, None))
    if not causes:
        causes["unknown"] = (PATTERN, "no hypothesis that was tried fits", None)
    module = module_at_fault(found.label)
    return [
        Lead(cause, module, found.side, confidence, tuple(filter(None, (said, text))), REPLAY, found.label, (), value)
        for cause, (confidence, text, value) in causes.items()
    ]


def sentence(e: Evidence, found: Replayed) -> str:
    """Say how far a replay is off, in the worst of its figures, and how far the other side's is."""
    figures = {
        "": (found.error, found.band),
        f" in the row at position {found.row[1]}": (found.worst_row, found.row_band),
        f" in feature {found.column}": (found.worst_column, found.column_band),
    }
    where = next((key for key in figures if figures[key][0] > figures[key][1]), "")
    error, band = figures[where]
    other = e.replays.by_side["b" if found.side == "a" else "a"].get(found.label)
    beside = f" (side {other.side}: {other.error:.2g} roundings)" if other is not None else ""
    return (
        f"recomputed from its own input, {found.label} of side {found.side} is off by {error:.3g} roundings{where} "
        f"where {band:.2g} are allowed{beside}"
    )


def _hypotheses(found: Replayed) -> dict[str, tuple[float, str, float | None]]:
    """Return cause -> (confidence, text, value) of the hypotheses that explain the module, the best first."""
    causes: dict[str, tuple[float, str, float | None]] = {}
    for place, explanation in enumerate(found.explanations):
        fits = explanation.fits or explanation.error <= found.band < found.error
        partly = explained(found.error / found.band, explanation.error / found.band)
        nearly = partly and explanation.error <= NEARLY * found.band
        confidence = FITS if fits else PLAIN if nearly else LIKELY if partly else PLACE
        text = f"it fits to {explanation.error:.2g} roundings if {explanation.text}"
        if explanation.cause not in causes:
            causes[explanation.cause] = (confidence * LATER**place, text, explanation.value)
    return causes


def _patterns(e: Evidence, found: Replayed) -> list[tuple[str, float, str]]:
    """Return (cause, confidence, text) of what the rows and features that are off have in common."""
    patterns = []
    rows = e.located.rows.get(found.label)
    for kind, families, cause, confidence in ROW_CAUSES:
        if rows is not None and rows.kind == kind and (not families or family_of(found.label) in families.split()):
            patterns.append((cause, confidence, f"{rows.rows} of {rows.of} compared rows are off ({kind})"))
    if _like_rounding(found) and family_of(found.label) in PRECISION_CAUSES:
        cause = PRECISION_CAUSES[family_of(found.label)]
        patterns.append((cause, PATTERN, "a few roundings more, all over the tensor"))
    if found.error <= found.band:
        if found.worst_column > found.column_band >= found.worst_row / found.row_band * found.column_band:
            patterns.append(("column-corruption", LIKELY, "the whole tensor's error is within its band"))
        elif found.worst_row > found.row_band and rows is None:
            patterns.append(("row-corruption", PATTERN, "the whole tensor's error is within its band"))
    return patterns


def suspicious(e: Evidence) -> list[Lead]:
    """Return leads of replays that are suspect but not broken, where a hypothesis fits them."""
    leads = []
    for side in e.replays.by_side.values():
        for found in side.values():
            if found.verdict == "suspect" and found.explanations:
                best = found.explanations[0]
                text = f"it fits to {best.error:.2g} roundings if {best.text}"
                module = module_at_fault(found.label)
                evidence = (sentence(e, found), text)
                leads.append(Lead(best.cause, module, found.side, PLACE, evidence, REPLAY, found.label))
    return leads


def exonerated(e: Evidence, label: str) -> bool:
    """Tell whether a tensor's replays on both sides leave nothing to explain: its difference is inherited.

    A replay clears only rows that it recomputed: not those behind a cached prefix, whose history is not stored.
    """
    entry = e.entry(label)
    rows = min(ROWS, entry.metrics.rows) if entry is not None and entry.metrics is not None else 0
    both = [side.get(label) for side in e.replays.by_side.values()]
    return all(found is not None and found.verdict == FINE and found.rows >= rows for found in both)
