"""What healthy modules reach in a replay, in roundings: whole tensor, worst row, worst column; and the rounding itself.

docs/replay.md says on which models the bands were measured.
"""

from __future__ import annotations

import numpy as np

from probe.compare.judge import ROUNDING

Bands = tuple[float, float, float]

LINEAR: Bands = (1.5, 3.5, 3.5)
NORM: Bands = (1.5, 4.0, 3.0)
EMBEDDING: Bands = (1.2, 2.5, 2.5)
ACTIVATION: Bands = (1.5, 3.0, 3.5)
RESIDUAL: Bands = (1.5, 2.5, 2.5)
HEAD: Bands = (1.5, 3.0, 3.0)
ROPE: Bands = (1.5, 4.0, 4.0)
ATTENTION: Bands = (1.5, 4.0, 4.0)
ROUTING: Bands = (1.5, 4.0, 4.0)
ROUTED: Bands = (1.5, 4.0, 4.0)
LOGPROBS: Bands = (2.0, 5.0, 5.0)

FINE_DTYPES = ("float32", "float64")
"""Dtypes in which the accumulator's rounding counts beside the result's."""

FINE_FACTOR = 2.0
"""The bands are so many times wider in float32 and float64, where the order of a sum and the few last bits of an
exponential function count beside the rounding of the result; faults are thousands of roundings there."""

ACCUMULATION = 0.7
"""float32 roundings per square root of the terms of a dot product: a linear of 256 to 768 inputs measured 8.8."""

SMALLEST = {"float16": 2.0**-24 * 12**-0.5, "float8_e4m3fn": 2.0**-9 * 12**-0.5, "float8_e5m2": 2.0**-16 * 12**-0.5}
"""RMS error of rounding a number below the smallest normal one: the spacing there over the square root of 12."""


def rounding(dtype: str, length: int, steps: float = 1.0) -> float:
    """Return the relative error that one module of ``dtype`` with dot products of ``length`` terms may make.

    One rounding of the result (or ``steps``), and the accumulator's: float32 for every dtype but float64, its error
    growing with the square root of the length (Higham and Mary, 2019).
    """
    own = steps * ROUNDING.get(dtype, ROUNDING["float32"])
    accumulator = "float64" if dtype == "float64" else "float32"
    return float(np.hypot(own, ROUNDING[accumulator] * ACCUMULATION * np.sqrt(max(length, 1))))
