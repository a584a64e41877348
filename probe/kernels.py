"""The compiled inner loops of measuring a tensor pair: numba, imported where it pays, compiled once per machine.

:func:`load` imports numba and compiles; until it has, :func:`compiled` returns None and numpy does the same work
(:mod:`probe.metrics`). All sums are float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

WORTH_LOADING = 6_000_000
"""Pairs from which numba pays: numpy measured 45 ns per pair, numba 1 to 3 ns and 0.25 s until its code is loaded."""

CARRIERS = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16}
"""Kinds of values that the sums are compiled for, and the dtype of the arrays: of bfloat16 its bits."""
EXPONENTS: dict[str, Any] = {
    "float32": np.uint32(0xFF << 23),
    "float64": np.uint64(0x7FF << 52),
    "bfloat16": np.uint16(0xFF << 7),
}

NAN_X, NAN_Y, INF_X, INF_Y, MISMATCH, EXCLUDED, MAX_ROW, MAX_FEATURE, SHOWN, COUNTS = range(10)
"""What the int64 array of counts holds: ``EXCLUDED`` pairs with a non-finite member, of which ``MISMATCH`` are not the
same on both sides and ``SHOWN`` have their place kept; where the largest |x - y| is. ``COUNTS``: how many there are."""

EXACT_ULPS = 1 << 16
LOG_SHIFT = 52 - 10
LOG_BASE = (1023 + 16) << 10
"""ULP distances below EXACT_ULPS have a bin each. Above, the leading bits of the distance as a float64, its exponent
and 10 of its mantissa, number bins of relative width 2^-10; those of EXACT_ULPS itself are LOG_BASE."""
ULP_BINS = EXACT_ULPS + ((64 - 16 + 1) << 10)

LANES = 4
"""Histograms that take turns, so that equal distances one after another do not wait for each other's store."""
CHUNK = 512
"""Pairs whose distances are computed in one vectorised loop before they are counted."""


@dataclass(frozen=True)
class Compiled:
    """The compiled :func:`_sums`, and the counting of ULP distances of 16 and of 32 bits; all release the GIL."""

    sums: Any
    ulps16: Any
    ulps32: Any


_compiled: list[Compiled] = []
_refused: list[str] = []


def compiled() -> Compiled | None:
    """Return the compiled functions where :func:`load` has loaded them."""
    return _compiled[0] if _compiled else None


def why_not() -> str:
    """Return why numba cannot be used here, an empty string where nothing is known against it."""
    return _refused[0] if _refused else ""


def load(kinds: Iterable[str] = CARRIERS, say: Callable[[], None] | None = None) -> Compiled | None:
    """Import numba and compile for ``kinds`` of values; return None where numba cannot be used (:func:`why_not`).

    Compiled code is kept beside this file, else in the user's cache folder, or where NUMBA_CACHE_DIR says; where
    nothing can be written each process compiles anew. ``say`` is called when something is compiled.
    """
    if not _compiled and not _refused:
        try:
            import numba
        except Exception as error:  # a numba that does not fit the installed numpy or LLVM
            _refused.append(f"numba cannot be imported ({error})")
        else:
            if numba.config.DISABLE_JIT:
                _refused.append("NUMBA_DISABLE_JIT is set")
            else:
                _compiled.append(_decorated(numba, cache=True))
    if _refused:
        return None
    try:
        _compile(_compiled[0], kinds, say)
    except OSError:  # its folder cannot be written after all, or the disk is full
        import numba

        _compiled[0] = _decorated(numba, cache=False)
        _compile(_compiled[0], kinds, say)
    return _compiled[0]


def _decorated(numba: Any, *, cache: bool) -> Compiled:
    """Return the functions as numba compiles them when they are called."""
    overload = numba.extending.overload
    overload(_number, inline="always")(_number_of)
    overload(_narrow, inline="always")(_narrow_of)
    overload(_larger, inline="always")(_larger_of)
    for inline, functions in _PARTS.items():
        for function in functions:
            overload(function, inline=inline, strict=False)(partial(_itself, function))
    # not nnan and ninf: values that are not finite must be found
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return Compiled(*(numba.njit(function, cache=cache, **options) for function in (_sums, _ulps16, _ulps32)))
    except RuntimeError:  # there is no folder that compiled code could be kept in
        return Compiled(*(numba.njit(function, **options) for function in (_sums, _ulps16, _ulps32)))


def _itself(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return function


def _compile(found: Compiled, kinds: Iterable[str], say: Callable[[], None] | None) -> None:
    """Compile both functions for ``kinds``, or load what is in the cache, by calling them with no rows."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for kind in kinds:
        none, exponent = np.zeros((0, 1), CARRIERS[kind]), EXPONENTS[kind]
        words = none.view(exponent.dtype)
        sums, integers = np.zeros(1), np.zeros(COUNTS, np.int64)
        rows = *(sums[:0] for _ in range(4)), np.zeros(0, bool)
        columns = sums, sums.copy(), sums.copy()
        for function, bits in ((found.ulps16, np.uint16), (found.ulps32, np.uint32)):
            if np.dtype(bits).itemsize <= none.itemsize < 8:  # float32 may be measured in steps of a 16-bit dtype
                calls.append((function, (none.astype(bits), none.astype(bits), np.zeros((LANES, ULP_BINS), np.int64))))
        calls.append(
            (
                found.sums,
                (
                    none,
                    none,
                    words,
                    words,
                    exponent,
                    *rows,
                    *columns,
                    integers,
                    np.zeros((0, 2), np.int64),
                    0,
                    0.0,
                ),
            )
        )
    for function, arguments in calls:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numba's own
            function(*arguments)
        if say and function.stats.cache_misses:
            say()
            say = None


# -- what numba compiles ----------------------------------------------------------------------------------------------


def _number(value):  # no annotations here: numba wants those of the two functions to be equal
    """Return a stored value as float64; uint16 are the bits of a bfloat16. Compiled as :func:`_number_of` says."""
    raise NotImplementedError


def _number_of(value):
    import numba

    if value == numba.types.uint16:
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
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba import types
    from numba.extending import intrinsic

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


def _sums(
    x: np.ndarray,
    y: np.ndarray,
    bits_x: np.ndarray,
    bits_y: np.ndarray,
    exponent: np.unsignedinteger,
    row_d2: np.ndarray,
    row_x2: np.ndarray,
    row_y2: np.ndarray,
    row_max: np.ndarray,
    row_mismatch: np.ndarray,
    column_d2: np.ndarray,
    column_y2: np.ndarray,
    column_max: np.ndarray,
    counts: np.ndarray,
    places: np.ndarray,
    first_row: int,
    best: float,
) -> float:
    """Take blocks x and y [rows, features] in one pass: fill in their rows, add to the columns and to the counts.

    ``bits_x``, ``bits_y``: the blocks as integers; ``exponent``: those of the exponent, all set where a value is not
    finite. ``best``: the largest |x - y| so far, and what is returned. Two rows go together, so that each column is
    loaded and stored once for both.
    """
    rows, features = x.shape
    zero_x, zero_y = np.zeros(features, x.dtype), np.zeros(features, y.dtype)
    for row in range(0, rows, 2):
        two = row + 1 < rows
        x0, y0 = x[row], y[row]
        x1, y1 = (x[row + 1], y[row + 1]) if two else (zero_x, zero_y)
        if _any_odd(bits_x[row], bits_y[row], exponent):
            x0, y0 = x0.copy(), y0.copy()
            row_mismatch[row] = _take_out(x0, y0, counts, places, first_row + row)
        if two and _any_odd(bits_x[row + 1], bits_y[row + 1], exponent):
            x1, y1 = x1.copy(), y1.copy()
            row_mismatch[row + 1] = _take_out(x1, y1, counts, places, first_row + row + 1)
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


def _take_out(x, y, counts, places, row):
    """Set a row's pairs with a non-finite member to zero and count them; tell whether any is so on one side only."""
    mismatch = False
    for column in range(len(x)):
        p, q = _number(x[column]), _number(y[column])
        if np.isfinite(p) and np.isfinite(q):
            continue
        x[column] = y[column] = 0
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


def _ulps16(x: np.ndarray, y: np.ndarray, histograms: np.ndarray) -> np.int64:
    """Count the ULP distances of 16-bit floats given as their bits, uint16 [chunks, n]; return the largest one.

    ``histograms``: int64 [LANES, ULP_BINS], whose sum is the histogram; n is at most CHUNK.
    """
    chunks, length = x.shape
    bins = np.empty(CHUNK, np.uint32)
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


def _ulps32(x: np.ndarray, y: np.ndarray, histograms: np.ndarray) -> np.int64:
    """Count the ULP distances of float32 given as their bits, uint32 [chunks, n]; see :func:`_ulps16`."""
    chunks, length = x.shape
    bins = np.empty(CHUNK, np.uint32)
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


_PARTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "always": (_count,),
    "never": (_any_odd, _take_out, _where),
}
"""Functions that the compiled ones call, by whether their text is put in the place of the call."""
