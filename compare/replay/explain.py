"""Try hypotheses on a module whose replay does not fit: which fault would make it fit?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe.compare.evidence import Explanation
from probe.compare.replay.bands import FINE_DTYPES, FINE_FACTOR, rounding
from probe.compare.replay.base import PLAIN, Context, Hypothesis, Recipe, Unreplayable, explained
from probe.compare.replay.figures import Figures, figures_of, finite_rows
from probe.store.dtypes import truncate_to

ROWS_TRIED = 128
"""Rows on which hypotheses are tried: those that fit worst, then a spread."""

WORST_TRIED = 16
KEPT = 3
"""Explanations that are kept of a module."""

REFINEMENTS = 12
"""Steps of the golden section search (J. Kiefer, 1953) for a fitted number: an interval shrinks by 0.618 in each."""


@dataclass(frozen=True)
class Reading:
    """The best of a recipe's readings: its values, their difference from what was stored, and the figures
    and how many times their bands these reach; ``first``: how many times the recipe's first reading does;
    ``toward_zero``: the figures are of values that were rounded toward zero first."""

    values: np.ndarray
    difference: np.ndarray
    figures: Figures
    excess: float
    first: float = np.inf
    toward_zero: bool = False


def unit_of(recipe: Recipe, context: Context) -> float:
    """Return the relative error of one rounding of a module."""
    return rounding(context.dtype, recipe.length(context), recipe.steps(context))


def read_best(recipe: Recipe, context: Context, enough: float = 0.0) -> Reading | None:
    """Recompute a module and return the reading that fits best; None where no row has all its inputs.

    ``enough``: no other reading is tried where the first one reaches so many of its bands at most (:func:`settled`).
    A reading that fits only where results are rounded toward zero is taken when no other fits.
    Raises Unreplayable where an input or a parameter is not at hand.
    """
    unit = unit_of(recipe, context)  # before anything is read: most often it is a parameter that is lacking
    stored = context.value(context.label)
    best: Reading | None = None
    for values in _quietly(recipe.compute(context)):
        if values.shape != stored.shape:
            shapes = f"{values.shape[1]} features were recomputed, {stored.shape[1]} were stored"
            raise Unreplayable(f"{shapes}: the configuration does not fit the dump")
        found = _compared(recipe, context, stored, values, unit)
        if found is None:
            continue
        if best is None:
            best = replace(found, first=found.excess)
        elif found.excess < best.excess:
            best = replace(found, first=best.first)
        if best.first <= enough:
            break
    if best is None or best.excess <= 1 or context.dtype not in HALF_DTYPES:
        return best
    return _toward_zero(recipe, context, unit) or best


HALF_DTYPES = ("bfloat16", "float16")
TRUNCATED = 0.5
"""Roundings within which results of a kernel that rounds toward zero lie of replayed ones so rounded: one in 50 may be
the neighbour, where a float32 sum is off. Rounded to nearest such results are 2 roundings off, one spacing at most,
and always too small: vLLM's CPU kernels round so on processors without AVX512-BF16."""


def _toward_zero(recipe: Recipe, context: Context, unit: float) -> Reading | None:
    """Return the reading that fits when results are rounded toward zero, None where none does."""
    stored = context.value(context.label)
    for values in _quietly(recipe.compute(context)):
        found = _compared(recipe, context, stored, truncate_to(values, context.dtype), unit)
        if found is not None and found.figures.error <= TRUNCATED and found.excess <= 1:
            return replace(found, first=np.inf, toward_zero=True)
    return None


AS_GOOD, ALIKE = 1.01, 1.1
"""Of a healthy fp32 model of 24 layers the attention's first reading is within 0.1 % of the best one everywhere, and
the same reading's error differs by up to 40 % from layer to layer."""


def settled(reading: Reading) -> float:
    """Return ``enough`` of :func:`read_best` for the next layer's module of the same kind: one engine's kernel rounds
    alike in every layer.

    Where the first reading is as good as any here (within 1 %), one that lies within its bands and no more than 10 %
    farther from them need not be read otherwise; else 0.
    """
    first = reading.first
    return min(1.0, ALIKE * first) if first <= 1 and first <= AS_GOOD * reading.excess else 0.0


def _quietly(readings: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the readings without warnings about rows that hold NaN or infinities: they are counted."""
    iterator = iter(readings)
    while True:
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            values = next(iterator, None)
        if values is None:
            return
        yield values


def _compared(recipe: Recipe, context: Context, stored: np.ndarray, values: np.ndarray, unit: float) -> Reading | None:
    with np.errstate(invalid="ignore", over="ignore"):
        difference = recipe.distance(context, stored, values) if recipe.distance else stored - values
        size = recipe.size(context, values) if recipe.size else values
        known = finite_rows(values)
        size = size if known.all() else np.where(known[:, None], size, np.nan)
        figures = figures_of(stored, difference, size, unit, context.dtype)
    if figures is None:
        return None
    return Reading(values, difference, figures, figures.excess(bands_of(recipe, context.dtype)))


def bands_of(recipe: Recipe, dtype: str) -> tuple[float, float, float]:
    """Return a recipe's three bands, for a module that computes in ``dtype``."""
    factor = FINE_FACTOR if dtype in FINE_DTYPES else 1.0
    return recipe.band * factor, recipe.row_band * factor, recipe.column_band * factor


# -- hypotheses -------------------------------------------------------------------------------------------------------


def explain(recipe: Recipe, context: Context, plain: Reading) -> tuple[Explanation, ...]:
    """Return the hypotheses under which a module fits, best first, at most KEPT with one per cause.

    One that brings the module within its bands goes before one that only lowers its error, and among those the one
    that comes first in the recipe.
    """
    stored = context.value(context.label)
    wrong = plain.figures
    if np.isinf(wrong.worst_row):
        row = stored[wrong.row]
        cause = "nan" if np.isnan(row).any() else "inf"
        count = int((~np.isfinite(row)).sum())
        return (Explanation(cause, wrong.error, f"{count} of {len(row)} values of a row are not finite"),)
    narrowed = _narrowed(context, plain)
    start = read_best(recipe, narrowed)
    if start is None:
        return ()
    narrowed.memory[PLAIN] = start.values
    found: list[tuple[tuple[bool, float], Explanation]] = []
    for order, hypothesis in enumerate(recipe.hypotheses):
        tried = _try(recipe, narrowed, hypothesis)
        if tried is None:
            continue
        reading, value = tried
        excess, before = _measure(reading, recipe, hypothesis), _measure(start, recipe, hypothesis)
        fits = excess <= 1 and excess < before
        if fits or explained(before, excess, hypothesis.factor):
            text = hypothesis.text.format(value=value) if value is not None else hypothesis.text
            entry = Explanation(hypothesis.cause, reading.figures.error, text, value, fits)
            found.append(((not fits, order if fits else excess / max(before, 1e-300)), entry))
    found.sort(key=lambda item: item[0])
    if found and not found[0][0][0]:  # one that brings the error down only says little beside one that fits
        found = [item for item in found if not item[0][0]]
    return _one_per_cause([entry for _, entry in found])


def _measure(reading: Reading, recipe: Recipe, hypothesis: Hypothesis) -> float:
    return reading.figures.typical_row / recipe.band if hypothesis.typical else reading.excess


def _one_per_cause(found: list[Explanation]) -> tuple[Explanation, ...]:
    first = {entry.cause: entry for entry in reversed(found)}
    return tuple(entry for entry in found if first[entry.cause] is entry)[:KEPT]


def _narrowed(context: Context, plain: Reading) -> Context:
    """Return the context at ROWS_TRIED of its rows: the worst and a spread."""
    keys = context.keys
    if len(keys) > ROWS_TRIED:
        worst = np.argsort(-np.nan_to_num(np.linalg.norm(plain.difference, axis=1)), kind="stable")[:WORST_TRIED]
        spread = np.linspace(0, len(keys) - 1, ROWS_TRIED - WORST_TRIED).astype(np.int64)
        keys = keys[np.union1d(worst, spread)]
    return replace(context, keys=keys, memory={})


def _try(recipe: Recipe, context: Context, hypothesis: Hypothesis) -> tuple[Reading, float | None] | None:
    """Return the reading under a hypothesis and its fitted number, None where it does not apply."""
    try:
        if hypothesis.when is not None and not hypothesis.when(context):
            return None
        if hypothesis.fit is not None:
            return _fit(recipe, context, hypothesis, *hypothesis.fit)
        assumptions: Mapping[str, Any] = hypothesis.assumptions
        if hypothesis.solve is not None:
            with np.errstate(all="ignore"):
                solved = hypothesis.solve(context, context.value(context.label))
            if solved is None:
                return None
            assumptions = {**assumptions, **solved}
        reading = _under(recipe, context, assumptions)
    except (Unreplayable, np.linalg.LinAlgError, FloatingPointError):
        return None
    return None if reading is None else (reading, assumptions.get("value"))


def _under(recipe: Recipe, context: Context, assumptions: Mapping[str, Any]) -> Reading | None:
    if "replaced" in assumptions:
        stored, unit = context.value(context.label), unit_of(recipe, context)
        return _compared(recipe, context, stored, assumptions["replaced"], unit)
    return read_best(recipe, context.assuming(assumptions))


def _fit(
    recipe: Recipe, context: Context, hypothesis: Hypothesis, key: str, values: tuple[float, ...]
) -> tuple[Reading, float | None] | None:
    """Try every value of the grid and refine the best between its neighbours."""

    def score(value: float) -> float:
        reading = _under(recipe, context, {**hypothesis.assumptions, key: value})
        return np.inf if reading is None else reading.figures.error

    scores = [score(value) for value in values]
    best = int(np.argmin(scores))
    low, high = values[max(best - 1, 0)], values[min(best + 1, len(values) - 1)]
    chosen = min((score_, value) for score_, value in [(scores[best], values[best]), *_golden(score, low, high)])[1]
    reading = _under(recipe, context, {**hypothesis.assumptions, key: chosen})
    return None if reading is None else (reading, chosen)


def _golden(score: Callable[[float], float], low: float, high: float) -> Iterator[tuple[float, float]]:
    """Yield the scores of a golden section search, of the logarithm where both ends are positive."""
    ratio = (np.sqrt(5) - 1) / 2
    logarithmic = low > 0
    a, b = (np.log(low), np.log(high)) if logarithmic else (low, high)
    at = [b - ratio * (b - a), a + ratio * (b - a)]
    values = [float(np.exp(x)) if logarithmic else float(x) for x in at]
    scores = [score(value) for value in values]
    yield from zip(scores, values)
    for _ in range(REFINEMENTS):
        if scores[0] < scores[1]:
            b, at[1], scores[1] = at[1], at[0], scores[0]
            at[0] = b - ratio * (b - a)
            new = 0
        else:
            a, at[0], scores[0] = at[0], at[1], scores[1]
            at[1] = a + ratio * (b - a)
            new = 1
        value = float(np.exp(at[new])) if logarithmic else float(at[new])
        scores[new] = score(value)
        yield scores[new], value
