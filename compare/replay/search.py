"""Fit one number of a faulty module: a grid of factors, then a golden section search, on a few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from probe.compare.replay.base import Compute, Context

BASES = tuple(float(2.0**power) for power in np.arange(-10, 10.5, 0.5))
"""Factors on the rope's base that are tried: from 1,000 times less to 1,000 times more in steps of 41 %."""
STRETCHES = tuple(float(2.0**power) for power in np.arange(-3, 6.5, 0.5))
"""Factors by which positions may be divided: scaling of up to 64 that should not be, and 1/8 of one that should."""
SCALES = tuple(float(2.0**power) for power in np.arange(-4, 4.25, 0.25))
"""Factors on the attention's scale that are tried: 1/16 to 16 (a scale by 1/d, not its root, among them)."""

ROWS = 24
"""Rows that a number is fitted on."""
STEPS = 26
"""Steps of the golden section search: an interval of a factor 2 shrinks to 2.5e-6 of its logarithm."""
GOLDEN = (np.sqrt(5) - 1) / 2
SLACK = 1.05
"""A rounder number is taken where it costs no more than 5 % of the error: the fit's own uncertainty."""
Solve = Callable[[Context, np.ndarray], Mapping[str, Any] | None]


def searched(compute: Compute, key: str, factors: tuple[float, ...]) -> Solve:
    """Return the solution of a hypothesis whose assumption ``key`` is a factor: the best one, and it as ``value``.

    The first of the readings serves: they differ by roundings. Source of the search: J. Kiefer, 1953, on the factor's
    logarithm, between the neighbours of the grid's best.
    """

    def solve(context: Context, stored: np.ndarray) -> Mapping[str, Any]:
        rows = np.unique(np.linspace(0, len(stored) - 1, min(ROWS, len(stored))).astype(np.int64))
        kept = {name: values for name, values in context.memory.items() if name.startswith("history ")}
        few, wanted = replace(context, keys=context.keys[rows], memory=kept), stored[rows]

        def error(factor: float) -> float:
            values = next(iter(compute(few.assuming({key: factor}))))
            return float(np.nansum(np.square(wanted - values)))

        errors = [error(factor) for factor in factors]
        at = int(np.argmin(errors))
        low, high = factors[max(at - 1, 0)], factors[min(at + 1, len(factors) - 1)]
        least, best = min((errors[at], factors[at]), *_golden(error, low, high))
        value = next((number for number in _rounder(best) if error(number) <= SLACK * least), best)
        return {key: value, "value": value}

    return solve


def _rounder(value: float) -> Iterator[float]:
    """Yield a number with 1, 2, 3, 4 digits."""
    for digits in range(1, 5):
        yield float(f"{value:.{digits}g}")


def _golden(error: Callable[[float], float], low: float, high: float) -> Iterator[tuple[float, float]]:
    """Yield (error, factor) of each step of the search between two factors."""
    a, b = np.log(low), np.log(high)
    at = [b - GOLDEN * (b - a), a + GOLDEN * (b - a)]
    errors = [error(float(np.exp(x))) for x in at]
    yield from zip(errors, np.exp(at).tolist())
    for _ in range(STEPS):
        left = errors[0] < errors[1]
        if left:
            b, at[1], errors[1] = at[1], at[0], errors[0]
        else:
            a, at[0], errors[0] = at[0], at[1], errors[1]
        new = 0 if left else 1
        at[new] = b - GOLDEN * (b - a) if left else a + GOLDEN * (b - a)
        errors[new] = error(float(np.exp(at[new])))
        yield errors[new], float(np.exp(at[new]))
