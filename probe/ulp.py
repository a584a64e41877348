"""Distances in units in the last place (ULP), and the histogram that gives their quantiles in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from probe.kernels import CHUNK, EXACT_ULPS, LANES, LOG_BASE, LOG_SHIFT, ULP_BINS, compiled
from probe.store.dtypes import narrow, round_to

NEAR = 1024
"""Bins that numpy looks through first for a quantile."""

_spare: list[np.ndarray] = []
"""A table of counts, all zero, that a histogram left: to clear what was used of it costs less than a new one."""

_CARRIERS = {"float64": (np.float64, np.uint64), "float32": (np.float32, np.uint32), "float16": (np.float16, np.uint16)}


def ulp_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bits of values rounded to ``dtype``: uint64, uint32 or uint16; of bfloat16 for 8-bit floats."""
    if dtype not in _CARRIERS:
        return narrow(round_to(values, "bfloat16"), "bfloat16")
    carrier, bits = _CARRIERS[dtype]
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, carrier).view(bits)


def ulp_distance(x: np.ndarray, y: np.ndarray, dtype: str) -> np.ndarray:
    """Count the representable numbers of ``dtype`` between x and y, after rounding both to it.

    Finite values of one shape; +0 and -0 coincide. Returns int64 (float64 for dtype float64, where opposite signs may
    exceed int64). fp8 is counted in bfloat16 steps. Source: the ordered-integer view of IEEE 754 numbers.
    """
    left, right = _ordinals(ulp_bits(x, dtype)), _ordinals(ulp_bits(y, dtype))
    if dtype == "float64" and ((left < 0) != (right < 0)).any():
        return np.abs(left.astype(np.float64) - right)
    return np.abs(left - right)


def _ordinals(bits: np.ndarray) -> np.ndarray:
    """Map the bits of floats (sign and magnitude) to int64 so that neighbours differ by one."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    magnitude = (bits & ~sign).astype(np.int64)
    return np.where(bits & sign, -magnitude, magnitude)


class UlpHistogram:
    """Count ULP distances so that quantiles need no second pass.

    Exact up to 65,535; above that, bins of relative width 2^-10 (a quantile there is low by at most 0.1 %).
    ``largest``: the largest distance counted, exact.
    """

    EXACT = EXACT_ULPS

    def __init__(self) -> None:
        try:
            self._counts = _spare.pop()
        except IndexError:
            self._counts = np.zeros((LANES, ULP_BINS), np.int64)
        self.largest = -1.0
        self._total = 0

    def add(self, distances: np.ndarray) -> None:
        """Count an array of non-negative distances."""
        flat = distances.ravel()
        if flat.size:
            far = (flat.astype(np.float64).view(np.int64) >> LOG_SHIFT) - (LOG_BASE - EXACT_ULPS)
            counts = np.bincount(np.where(flat < EXACT_ULPS, flat, far).astype(np.int64))
            self._counts[0, : len(counts)] += counts
            self.largest = max(self.largest, float(flat.max()))
            self._total += flat.size

    def add_bits(self, x: np.ndarray, y: np.ndarray) -> None:
        """Count the distances of two arrays of :func:`ulp_bits` (16 or 32 of them), by the compiled loop."""
        kernels, x, y = compiled(), x.reshape(-1), y.reshape(-1)
        assert kernels is not None
        self._total += len(x)
        whole = len(x) // CHUNK * CHUNK
        for part, length in ((slice(0, whole), CHUNK), (slice(whole, None), len(x) - whole)):
            if length and len(x[part]):
                found = kernels.ulps(x[part].reshape(-1, length), y[part].reshape(-1, length), self._counts)
                self.largest = max(self.largest, float(found))

    def add_zeros(self, count: int) -> None:
        """Count ``count`` pairs of equal values."""
        self._counts[0, 0] += count
        self._total += count
        if count:
            self.largest = max(self.largest, 0.0)

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Return for each share the smallest counted distance with at least it at or below; NaN when empty."""
        if self.largest < 0:
            return [float("nan")] * len(shares)
        targets = np.maximum(1, np.ceil(np.array(shares) * self._total)).astype(np.int64)
        last, kernels = _bin(self.largest) + 1, compiled()
        if kernels is not None:
            order = np.argsort(targets)
            found = kernels.ranks(self._counts, targets[order], last)
            return [_distance(int(number)) for number in found[np.argsort(order)]]
        for bins in (NEAR, last):  # mostly the first few hold them all
            cumulative = np.cumsum(self._counts[:, :bins].sum(axis=0))
            if cumulative[-1] >= targets.max():
                break
        return [_distance(int(number)) for number in np.searchsorted(cumulative, targets)]

    def close(self) -> None:
        """End the histogram: another one may use its memory."""
        counts, self._counts = self._counts, np.zeros((LANES, 0), np.int64)
        if not _spare and counts.size:
            counts[:, : _bin(max(self.largest, 0.0)) + 1] = 0
            _spare.append(counts)


def _bin(distance: float) -> int:
    far = int(np.float64(distance).view(np.int64) >> LOG_SHIFT) - (LOG_BASE - EXACT_ULPS)
    return int(distance) if distance < EXACT_ULPS else far


def _distance(number: int) -> float:
    """Return the smallest distance of a bin."""
    if number < EXACT_ULPS:
        return float(number)
    return float(np.int64((number + LOG_BASE - EXACT_ULPS) << LOG_SHIFT).view(np.float64))
