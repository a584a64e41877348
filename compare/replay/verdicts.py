"""Let replays speak in the verdicts of tensors."""

from __future__ import annotations

from dataclasses import replace

from probe.compare.evidence import BROKEN, FINE, SUSPECT, UNMODELLED, Evidence, Replayed
from probe.compare.measure import Measured

ALIKE = 3.0
"""Two sides' errors within this factor of each other are of one kind: the replay's own, if the sides agree."""

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
        if entry is not None and _shared(entry, sides):
            for name, found in sides.items():
                text = "both sides compute the same, and neither what the replay expects"
                replays[name][label] = replace(found, verdict=UNMODELLED, reason=f"{text}: {found.reason}")
        elif entry is not None:
            _raise_verdict(entry, sides)


def _shared(entry: Measured, sides: dict[str, Replayed]) -> bool:
    if len(sides) < 2 or any(found.verdict == FINE for found in sides.values()):
        return False
    low, high = sorted(found.excess for found in sides.values())
    return entry.judgement.verdict in AGREEING and high <= ALIKE * low


def _raise_verdict(entry: Measured, sides: dict[str, Replayed]) -> None:
    wrong = [(name, found) for name, found in sides.items() if found.verdict in SHOWN]
    if not wrong or entry.judgement.verdict not in RANKS:
        return
    name, found = max(wrong, key=lambda item: item[1].excess)
    word, other = SHOWN[found.verdict], sides.get("b" if name == "a" else "a")
    beside = f" (side {other.side}: {other.error:.2g})" if other is not None else ""
    if RANKS.index(word) >= RANKS.index(entry.judgement.verdict):
        reason = f"replay of side {name}: {found.reason}{beside}"
        entry.judgement = replace(entry.judgement, verdict=word, reason=reason)
