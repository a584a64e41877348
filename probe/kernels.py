"""The compiled inner loops of measuring a tensor pair: loaded where it pays, compiled by numba once per machine.

:func:`load` loads them (:mod:`probe.machine`); until it has, :func:`compiled` returns None and numpy does the same work
(:mod:`probe.metrics`). All sums are float64.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from probe import machine
from probe.errors import first_line

WORTH_LOADING = 6_000_000
"""Pairs from which loading pays: numpy measured 45 ns per pair, the loops 1 to 3 ns and 0.1 s until they are loaded."""

CARRIERS = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16}
"""Kinds of values that the sums are compiled for, and the dtype of the arrays: of bfloat16 its bits."""

NAN_X, NAN_Y, INF_X, INF_Y, MISMATCH, EXCLUDED, MAX_ROW, MAX_FEATURE, SHOWN, COUNTS = range(10)
"""What the int64 array of counts holds: ``EXCLUDED`` pairs with a non-finite member, of which ``MISMATCH`` are not the
same on both sides and ``SHOWN`` have their place kept; where the largest |x - y| is. ``COUNTS``: how many there are."""

EXACT_ULPS = 1 << 16
LOG_SHIFT = 52 - 10
LOG_BASE = (1023 + 16) << 10
"""ULP distances below EXACT_ULPS have a bin each. Above, the leading bits of the distance as a float64, its exponent
and 10 of its mantissa, number bins of relative width 2^-10; those of EXACT_ULPS itself are LOG_BASE."""
ULP_BINS = EXACT_ULPS + ((64 - 16 + 1) << 10)

GROUP, STRIP = 64, 1024
"""Rows and columns that are summed together: three float64 for each of 1024 columns fill half of a small L1 cache."""

LANES = 4
"""Histograms that take turns, so that equal distances one after another do not wait for each other's store."""
CHUNK = 512
"""Pairs whose distances are computed in one vectorised loop before they are counted."""


Arrays = tuple[np.ndarray, ...]

_ROWS = ("float64*",) * 4 + ("uint8*",)
_COLUMNS = ("float64*",) * 3
_COUNTED = ("int64*", "int64*")
_SHAPE = ("int64",) * 3


def _loop_of_sums(kind: str) -> machine.Loop:
    value = f"{np.dtype(CARRIERS[kind]).name}*"
    room = (value,) * 3 + ("float64*",) * 2
    arguments = (value, value, *_ROWS, *_COLUMNS, *_COUNTED, *room, *_SHAPE, "int64", "float64")
    return machine.Loop("_sums", kind, arguments, "float64")


def _loop_of_ulps(bits: int) -> machine.Loop:
    arguments = (f"uint{bits}*",) * 2 + ("int64*", "uint32*", "int64", "int64")
    return machine.Loop(f"_ulps{bits}", "bits", arguments, "int64")


_SUMS = {kind: _loop_of_sums(kind) for kind in CARRIERS}
_ULPS = {bits: _loop_of_ulps(bits) for bits in (16, 32)}
_RANKS = machine.Loop("_ranks", "bins", ("int64*",) * 3 + ("int64",) * 2, "int64")


class Compiled:
    """The compiled loops over a pair of blocks; they release the interpreter lock.

    A loop that :func:`load` was not asked for is loaded, or compiled, when it is first used.
    """

    def __init__(self) -> None:
        self._loops: dict[machine.Loop, Callable[..., Any]] = {}

    def loop(self, wanted: machine.Loop, say: Callable[[], None] | None = None) -> Callable[..., Any]:
        """Return a loop, loaded from where it is kept or compiled; before that ``say`` is called."""
        if wanted not in self._loops:
            found = machine.kept(wanted)
            if found is None:
                if say:
                    say()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # numba's own
                    found = machine.compiled(wanted)
            self._loops[wanted] = found
        return self._loops[wanted]

    def sums(
        self,
        kind: str,
        x: np.ndarray,
        y: np.ndarray,
        rows: Arrays,
        columns: Arrays,
        counts: np.ndarray,
        places: np.ndarray,
        first_row: int,
        best: float,
    ) -> float:
        """Take blocks x and y [rows, features] of one of CARRIERS: fill in their rows, add to columns and to counts.

        ``rows``: d2, x2, y2 and largest |d|, float64 [rows], and whether a value is non-finite on one side only,
        bool [rows]; ``columns``: d2, y2 and largest |d|, float64 [features]; ``best``: the largest |d| so far, and what
        is returned.
        """
        x, y = (np.require(values, CARRIERS[kind], ("C", "A")) for values in (x, y))
        spare = *np.empty((2, GROUP, STRIP), x.dtype), np.zeros(STRIP, x.dtype)
        strip = np.empty((3, STRIP)), np.empty((GROUP, 4))
        held = x, y, *rows, *columns, counts, places, *spare, *strip  # as long as the loop works on them
        return float(self.loop(_SUMS[kind])(*map(_address, held), *x.shape, len(places), first_row, best))

    def ulps(self, x: np.ndarray, y: np.ndarray, histograms: np.ndarray) -> int:
        """Count the ULP distances of two arrays of bits, uint16 or uint32 [chunks, n]; return the largest one.

        ``histograms``: int64 [LANES, ULP_BINS], whose sum is the histogram; n is at most CHUNK.
        """
        x, y = (np.require(bits, None, ("C", "A")) for bits in (x, y))
        held = x, y, histograms, np.empty(CHUNK, np.uint32)  # as long as the loop works on them
        return int(self.loop(_ULPS[8 * x.itemsize])(*map(_address, held), *x.shape))

    def ranks(self, histograms: np.ndarray, targets: np.ndarray, last: int) -> np.ndarray:
        """Return for each of rising ``targets``, int64, the first of ``last`` bins up to which so many are counted."""
        found = np.zeros(len(targets), np.int64)
        self.loop(_RANKS)(*map(_address, (histograms, targets, found)), last, len(targets))
        return found


def _address(values: np.ndarray) -> int:
    return int(values.__array_interface__["data"][0])


_compiled: list[Compiled] = []
_refused: list[str] = []


def compiled() -> Compiled | None:
    """Return the compiled loops where :func:`load` has loaded them."""
    return _compiled[0] if _compiled else None


def why_not() -> str:
    """Return why the loops cannot be used here, an empty string where nothing is known against it."""
    return _refused[0] if _refused else ""


def load(kinds: Iterable[str] = CARRIERS, say: Callable[[], None] | None = None) -> Compiled | None:
    """Load the loops for ``kinds`` of values; return None where they cannot be compiled (:func:`why_not`).

    Compiled code is kept beside this file, else in the user's cache folder, or where NUMBA_CACHE_DIR says; where
    nothing can be written each process compiles anew. ``say`` is called before something is compiled.
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0" and not _refused:
        _refused.append("NUMBA_DISABLE_JIT is set")
    if _refused:
        return None
    found = _compiled[0] if _compiled else Compiled()
    said: list[bool] = []

    def once() -> None:
        if say and not said:
            said.append(True)
            say()

    try:
        found.loop(_RANKS, once)
        for kind in kinds:
            found.loop(_SUMS[kind], once)
            size = np.dtype(CARRIERS[kind]).itemsize
            for bits in _ULPS if size == 4 else [16] if size == 2 else []:  # of float32 in steps of a 16-bit dtype too
                found.loop(_ULPS[bits], once)
    except Exception as error:  # a numba that does not fit the installed numpy or LLVM: numpy does the work
        _refused.append(f"the loops cannot be compiled ({first_line(error)})")
        return None
    _compiled[:] = [found]
    return found
