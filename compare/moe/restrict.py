"""Judge tensors in execution order on the tokens that no flip of experts has reached.

Before the first flip this is :func:`probe.compare.judge.judge` with the level that the tensors before had reached.
After one, the tokens that it reached differ by more than rounding without any fault: the others decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe.compare.judge import Floor, Judgement, judge
from probe.compare.moe.flips import ALIKE, OWN
from probe.metrics import PairMetrics

WORDS = {
    ALIKE: "tokens that no other choice of experts has reached",
    OWN: "tokens that kept their own experts",
}
FINE = ("identical", "consistent")


@dataclass(frozen=True)
class Restricted:
    """The figures on which a tensor was judged: ``rows`` of its joined rows, and which of :data:`WORDS` they are.

    ``at``: bool, which of the tensor's joined rows they are.
    """

    rows: int
    rel_l2: float
    tokens: str
    at: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        """Return what a report says of it."""
        return {"rows": self.rows, "rel_l2": self.rel_l2, "tokens": self.tokens}


class Levels:
    """The most modelled floors that the tensors so far have reached, on all tokens and on those after flips.

    Tokens that only attend to flipped ones carry more than rounding: how much more is learnt from tensors that are fine
    on better tokens, and a tensor that rises far above it is at fault all the same.
    """

    def __init__(self) -> None:
        self.level = 1.0
        self._reached: dict[str, float] = {}

    def judge(
        self,
        metrics: PairMetrics,
        floor: Floor,
        left: Mapping[str, np.ndarray],
        measure: Callable[[np.ndarray], PairMetrics],
    ) -> tuple[Judgement, Restricted | None]:
        """Judge a tensor; ``left`` says which rows flips have left, ``measure`` gives the figures of some rows.

        Returns the judgement, and the figures on the best rows that flips have left, if any did.
        """
        if not left:
            return self._note(judge(metrics, floor, self.level), floor), None
        whole = judge(metrics, floor, self.level)
        distinct = {kind: rows for kind, rows in left.items() if kind == ALIKE or not np.array_equal(rows, left[ALIKE])}
        found = {kind: measure(rows) for kind, rows in distinct.items() if rows.any()}
        judged = {kind: self._on(kind, part, floor) for kind, part in found.items()}
        kind = next(iter(judged), None)
        if kind is None or (judged[kind].verdict == "incomparable" and whole.verdict in FINE):
            return _on_all(whole), None
        judgement, part = judged[kind], found[kind]
        if judgement.verdict != "divergent":
            self._learn(judged, floor)
        shown = Restricted(part.rows, part.rel_l2, WORDS[kind], left[kind])
        if judgement.verdict in FINE and whole.verdict in FINE:
            return replace(judgement, verdict=whole.verdict, reason=""), shown
        return replace(judgement, reason=_reason(judgement, part.rows, metrics.rows, WORDS[kind])), shown

    def _on(self, kind: str, metrics: PairMetrics, floor: Floor) -> Judgement:
        """Judge some rows; of tokens whose noise is not known yet nothing can be said."""
        if kind == ALIKE:
            return judge(metrics, floor, self.level)
        reached = self._reached.get(kind)
        verdict = judge(metrics, floor.times(reached or 1.0))
        return verdict if reached or verdict.verdict in FINE else replace(verdict, verdict="incomparable")

    def _learn(self, judged: Mapping[str, Judgement], floor: Floor) -> None:
        for kind, judgement in judged.items():
            if kind == ALIKE:
                self._note(judgement, floor)
            else:
                reached = judgement.evidence * judgement.floor / floor.value
                self._reached[kind] = max(self._reached.get(kind, 1.0), reached)

    def _note(self, judgement: Judgement, floor: Floor) -> Judgement:
        if judgement.verdict != "divergent":
            self.level = max(self.level, judgement.evidence * floor.gain)
        return judgement


def _on_all(whole: Judgement) -> Judgement:
    """Return the judgement of a tensor of which no row can be judged by itself: only an agreement counts."""
    if whole.verdict in FINE:
        return whole
    return replace(whole, verdict="incomparable", reason="another choice of experts has reached every token")


def _reason(judgement: Judgement, rows: int, of: int, words: str) -> str:
    why = {"identical": "the same bits", "consistent": "rounding only"}.get(judgement.verdict, judgement.reason)
    return f"judged on {rows} of {of} rows, the {words}: {why}"
