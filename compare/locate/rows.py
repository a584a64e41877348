"""Which rows of a tensor carry its error: all, one, decode rows, those from a position on, after a cached prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from probe.compare.align import RowJoin
from probe.compare.evidence import Replayed, RowPattern
from probe.compare.judge import DIVERGENT_RISE, ROW_FACTOR
from probe.compare.measure import Measured
from probe.compare.sequences import SequencePair
from probe.metrics import median
from probe.store.schema import Sequence

ALL_SHARE = 0.9
"""Share of rows above which an error is of all rows: a few rows may agree by chance."""

PRECISION, RECALL = 0.9, 0.75
"""Least share of the bad rows that a pattern must hold, and least share of the pattern's rows that must be bad: errors
fade (a token attends to a bad one by a small weight), but hardly spread to rows outside."""

BULK = 3.0
"""Where most rows are bad, one counts as bad down to this part of the median row: healthy rows of one tensor spread
within a factor of 6 around it (docs/verdicts.md), so that the bulk stays together."""


@dataclass(frozen=True)
class RowFacts:
    """What is known of the rows of a join, one entry per row: position, prompt or response, sequence, cached tokens."""

    position: np.ndarray
    pair: np.ndarray
    response: np.ndarray
    cached: np.ndarray

    def on(self, rows: np.ndarray) -> RowFacts:
        """Return the facts of some rows (bool [rows])."""
        return RowFacts(self.position[rows], self.pair[rows], self.response[rows], self.cached[rows])


@dataclass
class RowReader:
    """Say what is known of joined rows; ``a`` and ``b`` are the dumps' sequences."""

    pairs: list[SequencePair]
    a: list[Sequence]
    b: list[Sequence]
    _prompt: np.ndarray = field(init=False)
    _cached: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._prompt = np.array([pair.prompt_len for pair in self.pairs], np.int64)
        cached = [
            max(side[piece].cached for number, side in enumerate((self.a, self.b)) for piece in pair.pieces(number))
            for pair in self.pairs
        ]
        self._cached = np.array(cached, np.int64)

    def facts(self, join: RowJoin) -> RowFacts:
        """Return the facts of a join's rows."""
        return self.facts_at(join.pair, join.position)

    def facts_at(self, pair: np.ndarray, position: np.ndarray) -> RowFacts:
        """Return the facts of rows at (number of the sequence pair, position), int64 each."""
        return RowFacts(position, pair, position >= self._prompt[pair], self._cached[pair])

    def pair_of(self, side: int, sequence: np.ndarray) -> np.ndarray:
        """Return the sequence pair of each sequence number of side 0 (a) or 1 (b), -1 for those that did not join."""
        number = {piece: n for n, pair in enumerate(self.pairs) for piece in pair.pieces(side)}
        return np.array([number.get(int(piece), -1) for piece in sequence], np.int64)

    def named(self, pattern: RowPattern) -> RowPattern:
        """Return a pattern with the name of its sequence in place of its number."""
        owner = pattern.figures.get("sequence")
        named = {} if owner is None else {"sequence": self.pairs[int(owner)].label}
        return replace(pattern, figures={**pattern.figures, **named})


def row_pattern(entry: Measured, reader: RowReader) -> RowPattern | None:
    """Return which rows of a measured tensor are bad and what they have in common; None where none stands out.

    Only rows that can be at fault count: not those that a choice of other experts has reached.
    """
    if entry.metrics is None or entry.join is None or not entry.metrics.rows:
        return None
    errors = np.where(entry.metrics.row_mismatch, np.inf, entry.metrics.row_rel_l2)
    facts = reader.facts(entry.join)
    if entry.among is not None:
        errors, facts = errors[entry.among], facts.on(entry.among)
    bad = bad_rows(errors, healthy_level(entry))
    if not bad.any():
        return None
    return reader.named(pattern_of(bad, facts))


def replayed_pattern(found: Replayed, reader: RowReader) -> RowPattern | None:
    """Return which of the replayed rows are bad by themselves; None where none is, or nothing is known of single rows.

    A row of a healthy module stays near the band of the whole tensor, as the same roundings made both.
    """
    side = 0 if found.side == "a" else 1
    pair = reader.pair_of(side, found.keys[:, 0])
    known = ~np.isnan(found.each_row) & (pair >= 0)
    if not known.any():
        return None
    position = found.keys[known, 1]
    bad = bad_rows(found.each_row[known], found.band, spread=1.0)
    if not bad.any():
        return None
    pattern = reader.named(pattern_of(bad, reader.facts_at(pair[known], position)))
    return replace(pattern, figures={**pattern.figures, "source": "replay"})


def healthy_level(entry: Measured) -> float:
    """Return the row error (relative L2) that the tensors before this one lead to expect of it: its noise floor times
    the level that they had reached."""
    return entry.judgement.floor * max(1.0, entry.judgement.band / DIVERGENT_RISE)


def bad_rows(errors: np.ndarray, healthy: float, spread: float = ROW_FACTOR) -> np.ndarray:
    """Return bool [rows]: whose error (relative L2, infinity for non-finite) is beyond what rounding explains."""
    return errors > bad_above(errors, healthy, spread)


def bad_above(errors: np.ndarray, healthy: float, spread: float = ROW_FACTOR) -> float:
    """Return the error above which a row is bad, given the errors of all rows and the healthy level.

    The threshold lies midway, in logarithms, between the healthy level and the largest error, but not below ``spread``
    times the former, which a healthy row may reach. Where the median row itself is bad the threshold is at most 1 /
    BULK of it, so that an error of all rows, however faint, is not taken for one of some.
    """
    finite = errors[np.isfinite(errors)]
    top = float(finite.max(initial=0.0))
    threshold = max(spread * healthy, float(np.sqrt(healthy * top)))
    middle = median(errors) if len(errors) else 0.0
    return min(threshold, middle / BULK) if middle > BULK * healthy else threshold


def pattern_of(bad: np.ndarray, facts: RowFacts) -> RowPattern:
    """Return the pattern that describes the bad rows best.

    Of the patterns that hold at least PRECISION of the bad rows and are bad in at least RECALL of theirs, the one with
    the largest F1 score; the more specific cause goes first where several describe the same rows. ``figures``: the
    ``share`` of bad rows and the ``first_position`` of one; ``position`` from which on rows are bad; ``cached`` tokens;
    ``sequence`` (its number) and ``from_position``; ``response_only`` where no prompt row was compared.
    """
    count, of = int(bad.sum()), len(bad)
    figures: dict[str, float | int | str] = {"share": count / of, "first_position": int(facts.position[bad].min())}
    if count == 1 and of > 1:
        return RowPattern("one-row", 1, of, figures)
    if count >= ALL_SHARE * of:
        return RowPattern("all", count, of, figures | _shared(facts))
    best, best_score = None, 0.0
    for kind, rows, more in _candidates(bad, facts):
        both = float((bad & rows).sum())
        precision, recall = both / count, both / max(1, int(rows.sum()))
        score = 2 * precision * recall / (precision + recall) if both else 0.0
        if precision >= PRECISION and recall >= RECALL and score > best_score:
            best, best_score = RowPattern(kind, count, of, figures | more), score
    if best is not None:
        return best
    return RowPattern("few-rows" if count <= of / 2 else "all", count, of, figures)


def _shared(facts: RowFacts) -> dict[str, float | int | str]:
    """Return what all rows have in common that a cause may need: each of them is of one kind, so no pattern shows."""
    shared: dict[str, float | int | str] = {}
    if facts.response.all():
        shared["response_only"] = 1
    if (facts.cached > 0).all():
        shared["cached"] = int(facts.cached.min())
    return shared


def _candidates(bad: np.ndarray, facts: RowFacts) -> Iterator[tuple[str, np.ndarray, dict[str, float | int | str]]]:
    """Yield (kind, its rows, figures), the more specific first."""
    if (facts.cached > 0).any() and not (facts.cached > 0).all():
        cached = facts.cached > 0
        yield "cached-prefix", cached, {"cached": int(facts.cached[cached & bad].max(initial=0))}
    if facts.response.any() and not facts.response.all():
        yield "decode-only", facts.response, {}
        yield "prompt-only", ~facts.response, {}
    position = _first_bad_position(bad, facts.position)
    if position > int(facts.position.min()):
        yield "from-position", facts.position >= position, {"position": position}
    sequences = np.unique(facts.pair)
    if len(sequences) > 1:
        owner = int(np.bincount(facts.pair[bad]).argmax())
        inside = facts.pair == owner
        first = int(facts.position[bad & inside].min())
        figures: dict[str, float | int | str] = {"sequence": owner, "from_position": first}
        yield "one-sequence", inside & (facts.position >= first), figures


def _first_bad_position(bad: np.ndarray, position: np.ndarray) -> int:
    """Return the position from which on the rows are best told bad from healthy (the largest F1 score)."""
    order = np.argsort(position, kind="stable")
    at, hits = position[order], bad[order].astype(np.int64)
    starts = np.flatnonzero(np.r_[True, at[1:] != at[:-1]])
    after = hits.sum() - np.r_[0, np.cumsum(hits)][starts]
    score = 2 * after / (hits.sum() + len(at) - starts)
    return int(at[starts[int(score.argmax())]])
