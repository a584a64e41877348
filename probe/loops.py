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
    GROUP,
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
    STRIP,
    ULP_BINS,
)


def _number(value):  # no annotations here: numba wants those of the two functions to be equal
    """Return a stored value as float64; uint16 are the bits of a bfloat16. Compiled as :func:`_number_of` says."""
    raise NotImplementedError


def _number_of(value):
    if value == types.uint16:
        return lambda value: np.float64(np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32))
    return lambda value: np.float64(value)


def _finite(value):
    """Tell whether a float64 is finite; compiled as :func:`_finite_of` says."""
    raise NotImplementedError


def _finite_of(value):
    # not numba's isfinite, value - value == 0: LLVM takes that to be so where terms may be reordered and value is a sum
    return lambda value: np.abs(value) < np.inf


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


def _fused(a, b, c):
    """Return a * b + c, rounded once where the processor can; compiled as :func:`_fused_of` says."""
    raise NotImplementedError


def _fused_of(a, b, c):
    @intrinsic
    def fused(context, a, b, c):
        def call(context, builder, signature, arguments):
            double = ir.DoubleType()
            kind = ir.FunctionType(double, [double] * 3)
            # LLVM fuses no product that is used twice, though two fused ones cost less than a product and two sums
            function = builder.module.declare_intrinsic("llvm.fmuladd", [double], kind)
            return builder.call(function, arguments, fastmath=("contract", "reassoc", "nsz"))

        return types.float64(a, b, c), call

    return lambda a, b, c: fused(a, b, c)


def _wide():
    """Let the calling function use the processor's widest vectors; compiled as :func:`_wide_of` says."""
    raise NotImplementedError


def _wide_of():
    @intrinsic
    def wide(context):
        def call(context, builder, signature, arguments):
            # without it LLVM takes half of AVX-512, for code with few vectors; llvmlite's own add() takes no values
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
            return context.get_dummy_value()

        return types.none(), call

    return lambda: wide()


def _sums(
    x, y, row_d2, row_x2, row_y2, row_max, row_mismatch, column_d2, column_y2, column_max, counts, places,
    spare_x, spare_y, zeros, strip_columns, strip_rows, rows, features, shown, first_row, best,
):  # fmt: skip
    """Take blocks x and y [rows, features] in one pass: fill in their rows, add to the columns and to the counts.

    All but the last five are pointers. ``spare_x``, ``spare_y``: room for [GROUP, STRIP] values; ``zeros``: STRIP
    values of zero; ``strip_columns``, ``strip_rows``: room for float64 [3, STRIP] and [GROUP, 4]; ``shown``: for how
    many ``places`` there is room; ``best``: the largest |x - y| so far, what is returned.
    """
    blocks = _array(x, (rows, features)), _array(y, (rows, features))
    per_row = _array(row_d2, rows), _array(row_x2, rows), _array(row_y2, rows), _array(row_max, rows)
    per_column = _array(column_d2, features), _array(column_y2, features), _array(column_max, features)
    odd = _array(row_mismatch, rows), _array(counts, COUNTS), _array(places, (shown, 2))
    spare = _array(spare_x, (GROUP, STRIP)), _array(spare_y, (GROUP, STRIP)), _array(zeros, STRIP)
    strip = _array(strip_columns, (3, STRIP)), _array(strip_rows, (GROUP, 4))
    return _pass(blocks, per_row, per_column, odd, spare, strip, first_row, best)


def _pass(blocks, per_row, per_column, odd, spare, strip, first_row, best):
    """Do what :func:`_sums` says, by strips of GROUP rows and STRIP columns, whose sums stay in the nearest cache.

    A value that is not finite shows in the squares of its row: these are looked at before a strip is added.
    """
    (x, y), (row_d2, row_x2, row_y2, row_max), (row_mismatch, counts, places) = blocks, per_row, odd
    (column_d2, column_y2, column_max), (spare_x, spare_y, zeros), (of_columns, of_rows) = per_column, spare, strip
    rows, features = x.shape
    for row in range(rows):
        row_d2[row] = row_x2[row] = row_y2[row] = row_max[row] = 0.0
        row_mismatch[row] = False
    for first in range(0, rows, GROUP):
        last = min(first + GROUP, rows)
        for start in range(0, features, STRIP):
            stop = min(start + STRIP, features)
            if not _strip(x, y, zeros, first, last, start, stop, of_columns, of_rows):
                for row in range(first, last):
                    n = row - first
                    if not _finite(of_rows[n, 1] + of_rows[n, 2]):
                        row_mismatch[row] = True  # so it may be: see below
                    _clean(x[row][start:stop], y[row][start:stop], spare_x[n], spare_y[n])
                _strip(spare_x, spare_y, zeros, 0, last - first, 0, stop - start, of_columns, of_rows)
            _add(of_columns, column_d2[start:stop], column_y2[start:stop], column_max[start:stop])
            for n in range(last - first):
                row_d2[first + n] += of_rows[n, 0]
                row_x2[first + n] += of_rows[n, 1]
                row_y2[first + n] += of_rows[n, 2]
                row_max[first + n] = _larger(row_max[first + n], of_rows[n, 3])
    at = -1
    for row in range(rows):
        if row_mismatch[row]:
            row_mismatch[row] = _count_row(x[row], y[row], counts, places, first_row + row)
        if row_max[row] > best:
            best, at = row_max[row], row
    if at >= 0:
        counts[MAX_ROW], counts[MAX_FEATURE] = first_row + at, _where(x[at], y[at], best)
    return best


def _strip(x, y, zeros, first, last, start, stop, of_columns, of_rows):
    """Fill in the sums of a strip, at most [GROUP, STRIP] values; tell whether its squares are finite.

    ``of_columns``: d2, y2 and largest |d| of its columns; ``of_rows``: d2, x2, y2 and largest |d| of its rows.
    """
    width, squares = stop - start, 0.0
    columns = of_columns[0][:width], of_columns[1][:width], of_columns[2][:width]
    for values in columns:
        for column in range(width):
            values[column] = 0.0
    for row in range(first, last, 4):
        n = row - first
        pairs = (
            (_part(x, zeros, row, last, start, stop), _part(y, zeros, row, last, start, stop)),
            (_part(x, zeros, row + 1, last, start, stop), _part(y, zeros, row + 1, last, start, stop)),
            (_part(x, zeros, row + 2, last, start, stop), _part(y, zeros, row + 2, last, start, stop)),
            (_part(x, zeros, row + 3, last, start, stop), _part(y, zeros, row + 3, last, start, stop)),
        )
        _four(pairs, columns, of_rows[n : n + 4])
        for row_of_four in range(n, n + 4):
            squares += of_rows[row_of_four, 1] + of_rows[row_of_four, 2]
    return _finite(squares)


def _part(values, zeros, row, last, start, stop):
    """Return columns ``start ... stop`` of a row; zeros where it is not before row ``last``."""
    return values[row][start:stop] if row < last else zeros[: stop - start]


def _four(pairs, columns, rows):
    """Add four rows of a strip to its columns, each of which is loaded and stored once; fill in their own sums."""
    _wide()
    ((x0, y0), (x1, y1), (x2, y2), (x3, y3)), (column_d2, column_y2, column_max) = pairs, columns
    row0 = row1 = row2 = row3 = (0.0, 0.0, 0.0, 0.0)
    for n in range(len(x0)):
        column = column_d2[n], column_y2[n], column_max[n]
        row0, column = _pair(_number(x0[n]), _number(y0[n]), row0, column)
        row1, column = _pair(_number(x1[n]), _number(y1[n]), row1, column)
        row2, column = _pair(_number(x2[n]), _number(y2[n]), row2, column)
        row3, column = _pair(_number(x3[n]), _number(y3[n]), row3, column)
        column_d2[n], column_y2[n], column_max[n] = column
    rows[0, 0], rows[0, 1], rows[0, 2], rows[0, 3] = row0
    rows[1, 0], rows[1, 1], rows[1, 2], rows[1, 3] = row1
    rows[2, 0], rows[2, 1], rows[2, 2], rows[2, 3] = row2
    rows[3, 0], rows[3, 1], rows[3, 2], rows[3, 3] = row3


def _pair(p, q, row, column):
    """Return the sums d2, x2, y2, largest |d| of a row and d2, y2, largest |d| of a column, with one pair more."""
    d = p - q
    size = np.abs(d)
    more = _fused(d, d, row[0]), _fused(p, p, row[1]), _fused(q, q, row[2]), _larger(row[3], size)
    return more, (_fused(d, d, column[0]), _fused(q, q, column[1]), _larger(column[2], size))


def _add(strip, d2, y2, largest):
    """Add what a strip says of its columns to what is known of them so far."""
    strip_d2, strip_y2, strip_max = strip[0], strip[1], strip[2]
    for column in range(len(d2)):
        d2[column] += strip_d2[column]
        y2[column] += strip_y2[column]
        largest[column] = _larger(largest[column], strip_max[column])


def _clean(x, y, clean_x, clean_y):
    """Copy two rows of a strip with zeros in the place of each pair with a non-finite member."""
    for column in range(len(x)):
        finite = _finite(_number(x[column])) and _finite(_number(y[column]))
        clean_x[column] = x[column] if finite else 0
        clean_y[column] = y[column] if finite else 0


def _count_row(x, y, counts, places, row):
    """Count a row's pairs with a non-finite member; tell whether any is so on one side only."""
    mismatch = False
    for column in range(len(x)):
        p, q = _number(x[column]), _number(y[column])
        if _finite(p) and _finite(q):
            continue
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
    """Return the first column of two rows where both are finite and |x - y| is ``size``."""
    for column in range(len(x)):
        p, q = _number(x[column]), _number(y[column])
        if np.abs(p - q) == size and _finite(p) and _finite(q):
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
    "always": (_count, _pair),
    "never": (_count_row, _clean, _where, _add, _part, _four, _strip, _pass, _each16, _each32),
}
"""Functions that the compiled ones call, by whether their text is put in the place of the call."""


def _itself(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return function


_STUBS: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (_number, _number_of),
    (_finite, _finite_of),
    (_larger, _larger_of),
    (_fused, _fused_of),
    (_wide, _wide_of),
    (_array, _array_of),
)

for _stub, _made in _STUBS:
    overload(_stub, inline="always")(_made)
for _inline, _functions in _PARTS.items():
    for _function in _functions:
        overload(_function, inline=_inline, strict=False)(partial(_itself, _function))
