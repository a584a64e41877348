"""The loops that numba compiles for :mod:`probe.kernels`: imported where they are compiled, once per machine.

They allocate nothing and raise nothing, so that their machine code needs nothing of numba's (:mod:`probe.machine`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from probe.kernels import (
    CHUNK,
    COUNTS,
    EXACT_ULPS,
    EXCLUDED,
    INF_X,
    INF_Y,
    LANES,
    LOG_BASE,
    LOG_SHIFT,
    MAX_FEATURE,
    MAX_ROW,
    MISMATCH,
    NAN_X,
    NAN_Y,
    SHOWN,
    ULP_BINS,
)


def _number(value):  # no annotations here: numba wants those of the two functions to be equal
    """Return a stored value as float64; uint16 are the bits of a bfloat16. Compiled as :func:`_number_of` says."""
    raise NotImplementedError


def _number_of(value):
    if value == types.uint16:
        return lambda value: np.float64(np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32))
    return lambda value: np.float64(value)


def _narrow(value, like):
    """Return an integer in another's type, for numba widens results to 64 bits; compiled as :func:`_narrow_of` says."""
    raise NotImplementedError


def _narrow_of(value, like):
    integer = getattr(np, str(like))

    def narrow(value, like):
        return integer(value)

    return narrow


def _larger(a, b):
    """Return the larger of two float64, of which none is NaN; compiled as :func:`_larger_of` says."""
    raise NotImplementedError


def _larger_of(a, b):
    @intrinsic
    def maximum(context, a, b):
        def call(context, builder, signature, arguments):
            double = ir.DoubleType()
            kind = ir.FunctionType(double, [double, double])
            # LLVM vectorises the maximum of a row in this form only, and only without NaN
            function = builder.module.declare_intrinsic("llvm.maxnum", [double], kind)
            return builder.call(function, arguments, fastmath=("nnan", "nsz"))

        return types.float64(a, b), call

    return lambda a, b: maximum(a, b)


def _array(pointer, shape):
    """Return the array of a shape that lies at a pointer; compiled as :func:`_array_of` says."""
    raise NotImplementedError


def _array_of(pointer, shape):
    from numba import carray

    return lambda pointer, shape: carray(pointer, shape)


def _sums(
    x, y, bits_x, bits_y, row_d2, row_x2, row_y2, row_max, row_mismatch, column_d2, column_y2, column_max, counts,
    places, spare_x, spare_y, rows, features, shown, exponent, first_row, best,
):  # fmt: skip
    """Take blocks x and y [rows, features] in one pass: fill in their rows, add to the columns and to the counts.

    All but the last six are pointers. ``bits_x``, ``bits_y``: the blocks as integers; ``spare_x``, ``spare_y``: zeros
    [3, features], of which the first row stays so; ``exponent``: the bits of the exponent, all set where a value is not
    finite; ``shown``: for how many ``places`` there is room; ``best``: the largest |x - y| so far, what is returned.
    """
    blocks = _array(x, (rows, features)), _array(y, (rows, features))
    words = _array(bits_x, (rows, features)), _array(bits_y, (rows, features))
    per_row = _array(row_d2, rows), _array(row_x2, rows), _array(row_y2, rows), _array(row_max, rows)
    per_column = _array(column_d2, features), _array(column_y2, features), _array(column_max, features)
    odd = _array(row_mismatch, rows), _array(counts, COUNTS), _array(places, (shown, 2))
    spare = _array(spare_x, (3, features)), _array(spare_y, (3, features))
    return _pass(blocks, words, per_row, per_column, odd, spare, exponent, first_row, best)


def _pass(blocks, words, per_row, per_column, odd, spare, exponent, first_row, best):
    """Do what :func:`_sums` says. Two rows go together, so that each column is loaded and stored once for both."""
    (x, y), (bits_x, bits_y), (row_mismatch, counts, places), (spare_x, spare_y) = blocks, words, odd, spare
    row_d2, row_x2, row_y2, row_max = per_row
    column_d2, column_y2, column_max = per_column
    rows, features = x.shape
    for row in range(0, rows, 2):
        two = row + 1 < rows
        x0, y0 = x[row], y[row]
        x1, y1 = (x[row + 1], y[row + 1]) if two else (spare_x[0], spare_y[0])
        if _any_odd(bits_x[row], bits_y[row], exponent):
            row_mismatch[row] = _take_out(x0, y0, spare_x[1], spare_y[1], counts, places, first_row + row)
            x0, y0 = spare_x[1], spare_y[1]
        if two and _any_odd(bits_x[row + 1], bits_y[row + 1], exponent):
            row_mismatch[row + 1] = _take_out(x1, y1, spare_x[2], spare_y[2], counts, places, first_row + row + 1)
            x1, y1 = spare_x[2], spare_y[2]
        d2_0 = x2_0 = y2_0 = d2_1 = x2_1 = y2_1 = 0.0
        max_0 = max_1 = 0.0
        for column in range(features):
            p, q = _number(x0[column]), _number(y0[column])
            size_0, d0, s0 = np.abs(p - q), (p - q) * (p - q), q * q
            d2_0, x2_0, y2_0 = d2_0 + d0, x2_0 + p * p, y2_0 + s0
            max_0 = _larger(max_0, size_0)
            p, q = _number(x1[column]), _number(y1[column])
            size_1, d1, s1 = np.abs(p - q), (p - q) * (p - q), q * q
            d2_1, x2_1, y2_1 = d2_1 + d1, x2_1 + p * p, y2_1 + s1
            max_1 = _larger(max_1, size_1)
            column_d2[column] += d0 + d1
            column_y2[column] += s0 + s1
            column_max[column] = _larger(column_max[column], _larger(size_0, size_1))
        row_d2[row], row_x2[row], row_y2[row], row_max[row] = d2_0, x2_0, y2_0, max_0
        if max_0 > best:
            best, counts[MAX_ROW], counts[MAX_FEATURE] = max_0, first_row + row, _where(x0, y0, max_0)
        if two:
            row_d2[row + 1], row_x2[row + 1], row_y2[row + 1], row_max[row + 1] = d2_1, x2_1, y2_1, max_1
            if max_1 > best:
                best, counts[MAX_ROW], counts[MAX_FEATURE] = max_1, first_row + row + 1, _where(x1, y1, max_1)
    return best


def _any_odd(x, y, exponent):
    """Tell whether a value of two rows, given as bits, is not finite."""
    largest = _narrow(0, exponent)
    for column in range(len(x)):
        p, q = _narrow(x[column] & exponent, exponent), _narrow(y[column] & exponent, exponent)
        p = q if q > p else p
        largest = p if p > largest else largest
    return largest == exponent


def _take_out(x, y, clean_x, clean_y, counts, places, row):
    """Count a row's pairs with a non-finite member; tell whether any is so on one side only.

    ``clean_x``, ``clean_y``: the row again, with zeros in the place of these pairs.
    """
    mismatch = False
    for column in range(len(x)):
        p, q = _number(x[column]), _number(y[column])
        clean_x[column], clean_y[column] = x[column], y[column]
        if np.isfinite(p) and np.isfinite(q):
            continue
        clean_x[column] = clean_y[column] = 0
        counts[EXCLUDED] += 1
        counts[NAN_X] += np.isnan(p)
        counts[NAN_Y] += np.isnan(q)
        counts[INF_X] += np.isinf(p)
        counts[INF_Y] += np.isinf(q)
        if p != q and not (np.isnan(p) and np.isnan(q)):
            mismatch = True
            counts[MISMATCH] += 1
            if counts[SHOWN] < len(places):
                places[counts[SHOWN], 0], places[counts[SHOWN], 1] = row, column
                counts[SHOWN] += 1
    return mismatch


def _where(x, y, size):
    """Return the first column of two rows where |x - y| is ``size``."""
    for column in range(len(x)):
        if np.abs(_number(x[column]) - _number(y[column])) == size:
            return column
    return 0


def _ulps16(x, y, histograms, bins, chunks, length):
    """Count the ULP distances of 16-bit floats given as their bits, uint16 [chunks, length]; return the largest one.

    All but the last two are pointers. ``histograms``: int64 [LANES, ULP_BINS], whose sum is the histogram; ``bins``:
    room for CHUNK uint32; ``length`` is at most CHUNK.
    """
    blocks = _array(x, (chunks, length)), _array(y, (chunks, length))
    return _each16(*blocks, _array(histograms, (LANES, ULP_BINS)), _array(bins, CHUNK))


def _each16(x, y, histograms, bins):
    chunks, length = x.shape
    largest = np.uint32(0)
    for chunk in range(chunks):
        for n in range(length):
            p, q = np.int32(x[chunk, n]), np.int32(y[chunk, n])
            # 0 or -1, which turns sign and magnitude into two's complement
            minus_p, minus_q = np.int32(-(p >> np.int32(15))), np.int32(-(q >> np.int32(15)))
            p = np.int32(((p & np.int32(0x7FFF)) ^ minus_p) - minus_p)
            q = np.int32(((q & np.int32(0x7FFF)) ^ minus_q) - minus_q)
            d = np.uint32(np.int32(p - q) if p > q else np.int32(q - p))
            largest = d if d > largest else largest
            bins[n] = d
        _count(bins, length, histograms)
    return np.int64(largest)


def _ulps32(x, y, histograms, bins, chunks, length):
    """Count the ULP distances of float32 given as their bits, uint32 [chunks, length]; see :func:`_ulps16`."""
    blocks = _array(x, (chunks, length)), _array(y, (chunks, length))
    return _each32(*blocks, _array(histograms, (LANES, ULP_BINS)), _array(bins, CHUNK))


def _each32(x, y, histograms, bins):
    chunks, length = x.shape
    largest = np.int64(0)
    for chunk in range(chunks):
        for n in range(length):
            p, q = np.int64(x[chunk, n]), np.int64(y[chunk, n])
            minus_p, minus_q = -(p >> 31), -(q >> 31)
            p, q = ((p & 0x7FFFFFFF) ^ minus_p) - minus_p, ((q & 0x7FFFFFFF) ^ minus_q) - minus_q
            d = p - q if p > q else q - p
            largest = d if d > largest else largest
            far = (np.float64(d).view(np.int64) >> LOG_SHIFT) - (LOG_BASE - EXACT_ULPS)
            bins[n] = np.uint32(d if d < EXACT_ULPS else far)
        _count(bins, length, histograms)
    return largest


def _count(bins, length, histograms):
    """Count the first ``length`` bins, each in the next of the histograms."""
    whole = length - length % LANES
    for n in range(0, whole, LANES):
        for lane in range(LANES):
            histograms[lane, bins[n + lane]] += 1
    for n in range(whole, length):
        histograms[0, bins[n]] += 1


def _ranks(histograms, targets, found, last, wanted):
    """Find for each target, rising int64 [wanted], the first bin up to which so many are counted, of ``last`` bins."""
    counts, goals, bins = _array(histograms, (LANES, ULP_BINS)), _array(targets, wanted), _array(found, wanted)
    total, at, number = 0, 0, 0
    while number < last and at < wanted:
        for lane in range(LANES):
            total += counts[lane, number]
        while at < wanted and total >= goals[at]:
            bins[at] = number
            at += 1
        number += 1
    return at


_PARTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "always": (_count,),
    "never": (_any_odd, _take_out, _where, _pass, _each16, _each32),
}
"""Functions that the compiled ones call, by whether their text is put in the place of the call."""


def _itself(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return function


for _stub, _made in ((_number, _number_of), (_narrow, _narrow_of), (_larger, _larger_of), (_array, _array_of)):
    overload(_stub, inline="always")(_made)
for _inline, _functions in _PARTS.items():
    for _function in _functions:
        overload(_function, inline=_inline, strict=False)(partial(_itself, _function))
