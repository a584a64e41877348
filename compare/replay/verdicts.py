"""Let replays speak in the verdicts of tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from probe.compare.align import pack
from probe.compare.evidence import BROKEN, FINE, SUSPECT, UNMODELLED, Evidence, Replayed, Replays
from probe.compare.judge import TOKEN_SUSPECT
from probe.compare.measure import Measured
from probe.compare.replay.inputs import LOG_PROBS

ALIKE = 3.0
"""Two sides' errors within this factor of each other are of one kind: the replay's own, if the sides agree."""

SHARED = "both sides compute the same, and not what the replay expects"
AGREEING = ("identical", "consistent")
RANKS = ("identical", "consistent", "suspect", "divergent")
SHOWN = {BROKEN: "divergent", SUSPECT: "suspect"}


def apply_replays(evidence: Evidence) -> None:
    """Make tensors divergent whose module one side's replay shows to be broken, and at least suspect those in doubt.

    Where both sides' replays fail alike and the sides agree with each other, the model does something that the replay
    does not know: both become ``unmodelled``, which is no alarm.
    """
    replays = evidence.replays.by_side
    for label in dict.fromkeys([*replays["a"], *replays["b"]]):
        entry = evidence.entry(label)
        sides = {name: replays[name][label] for name in "ab" if label in replays[name]}
        if _shared(entry, sides) if entry is not None else label == LOG_PROBS and _scaled_alike(sides, evidence):
            for name, found in sides.items():
                replays[name][label] = replace(found, verdict=UNMODELLED, reason=f"{SHARED}: {found.reason}")
        elif entry is not None:
            _raise_verdict(entry, sides)


def scaled_after_the_head(replays: Replays) -> bool:
    """Tell whether log-probs are of logits that the model scales after its head (Granite, Cohere)."""
    found = [side[LOG_PROBS].verdict for side in replays.by_side.values() if LOG_PROBS in side]
    return found == [UNMODELLED] * 2


def _scaled_alike(sides: dict[str, Replayed], evidence: Evidence) -> bool:
    """Tell whether both sides' log-probs agree and are of logits that the model scales after its head."""
    if (evidence.tokens.get("mean_abs_logprob_diff") or 0.0) > TOKEN_SUSPECT:
        return False
    causes = [explanation.cause for found in sides.values() for explanation in found.explanations[:1]]
    return causes == ["temperature-semantics"] * 2 and all(found.verdict != FINE for found in sides.values())


def _shared(entry: Measured, sides: dict[str, Replayed]) -> bool:
    """Tell whether what a replay calls wrong is what both sides do, so that the replay is not of this model.

    The sides agree, and either both replays fail alike, or in the rows that fail the two sides lie ALIKE times closer
    to each other than the failing one lies to its replay: then the other one is as far from it, whether the rounding of
    its dtype lets its own replay show it or not.
    """
    wrong = [found for found in sides.values() if found.verdict != FINE]
    known = any(found.verdict == UNMODELLED for found in wrong)  # by its parameters, which says more
    if known or len(sides) < 2 or not wrong or entry.judgement.verdict not in AGREEING:
        return False
    if any(not np.isfinite(found.worst_row) for found in wrong):
        return False
    low, high = sorted(found.excess for found in sides.values())
    return (len(wrong) == 2 and high <= ALIKE * low) or all(_closer(entry, found) for found in wrong)


def _closer(entry: Measured, found: Replayed) -> bool:
    """Tell whether the two sides agree better with each other than one of them with its replay, in its worst rows."""
    metrics, join = entry.metrics, entry.join
    if metrics is None or join is None or not len(found.relative_rows):
        return False
    cells = join.cells(int(found.side == "b"))
    order = np.argsort(cells)
    keys = pack(found.keys[:, 0], found.keys[:, 1])
    place = np.minimum(np.searchsorted(cells[order], keys), len(cells) - 1)
    joined = cells[order][place] == keys
    beyond = joined & (found.each_row >= np.nanquantile(found.each_row, 0.75))
    if not beyond.any():
        return False
    apart = metrics.row_rel_l2[order[place[beyond]]]
    return bool(ALIKE * np.sqrt(np.mean(apart**2)) <= np.sqrt(np.mean(found.relative_rows[beyond] ** 2)))


def _raise_verdict(entry: Measured, sides: dict[str, Replayed]) -> None:
    wrong = [(name, found) for name, found in sides.items() if found.verdict in SHOWN]
    if not wrong or entry.judgement.verdict not in RANKS:
        return
    name, found = max(wrong, key=lambda item: item[1].excess)
    word, other = SHOWN[found.verdict], sides.get("b" if name == "a" else "a")
    beside = f" (side {other.side}: {other.error:.2g} roundings)" if other is not None else ""
    if RANKS.index(word) >= RANKS.index(entry.judgement.verdict):
        reason = f"replay of side {name}: {found.reason}{beside}"
        entry.judgement = replace(entry.judgement, verdict=word, reason=reason)
