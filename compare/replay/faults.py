"""Faults that any module may have: hypotheses about its output as a whole, its features and its rows; weight casts.

Each ``solve`` compares what was stored with :meth:`Context.plain`, the recomputed output without a fault, and returns
``replaced``: what the output would be with the fault in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from probe.compare.judge import ROUNDING
from probe.compare.replay.base import Context, Hypothesis
from probe.store.dtypes import round_to

TINY = 1e-300
FEW = 0.1
"""Rows or features that are wrong count as few up to this share."""

WRONG = 30.0
"""Roundings beyond which a row or feature counts as wrong where the others fit."""

ALIKE = 0.98
"""Cosine of a stored and a recomputed feature that are taken for the same one: over 64 rows chance reaches 0.5."""

# -- weights through a coarser dtype ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cast:
    """A weight rounded on its way: (part of it, largest magnitude of all of it if ``scaled``) -> rounded part."""

    apply: Callable[[np.ndarray, float | None], np.ndarray]
    text: str
    scaled: bool = False


FLOAT8 = {"float8_e4m3fn": (3, -6, 448.0), "float8_e5m2": (2, -14, 57344.0)}
"""Mantissa bits, exponent of the smallest normal number and largest number (OFP8 specification, revision 1.0)."""


def round_float8(values: np.ndarray, name: str) -> np.ndarray:
    """Return values rounded to nearest even in an 8-bit float, saturated at its largest number."""
    bits, smallest, largest = FLOAT8[name]
    _, exponent = np.frexp(values)
    quantum = np.exp2(np.maximum(exponent - 1, smallest) - bits)
    return np.clip(np.rint(values / quantum) * quantum, -largest, largest)


def round_tf32(values: np.ndarray) -> np.ndarray:
    """Return values rounded to the 10 mantissa bits of NVIDIA's TensorFloat-32."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(mantissa * 2**11) / 2**11, exponent))


ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": lambda values: round_to(values, "bfloat16").astype(np.float64),
    "TF32": round_tf32,
}
"""What an engine may round the inputs of float32 products to."""


def _through(name: str) -> Cast:
    return Cast(lambda part, peak: round_to(part, name).astype(np.float64), f"its weight passed through {name}")


def _float8(name: str) -> Cast:
    return Cast(lambda part, peak: round_float8(part, name), f"its weight passed through {name}")


def _float8_scaled(name: str) -> Cast:
    def apply(part: np.ndarray, peak: float | None) -> np.ndarray:
        scale = FLOAT8[name][2] / (peak or 1.0)
        return round_float8(part * scale, name) / scale

    return Cast(apply, f"its weight passed through {name} with one scale per tensor", scaled=True)


def _float8_rows(name: str) -> Cast:
    def apply(part: np.ndarray, peak: float | None) -> np.ndarray:
        scale = FLOAT8[name][2] / np.maximum(np.abs(part).max(axis=1, keepdims=True), TINY)
        return round_float8(part * scale, name) / scale

    return Cast(apply, f"its weight passed through {name} with one scale per output")


WEIGHT_CASTS: dict[str, Cast] = {
    "bfloat16": _through("bfloat16"),
    "float16": _through("float16"),
    **{name: _float8(name) for name in FLOAT8},
    **{f"{name} scaled": _float8_scaled(name) for name in FLOAT8},
    **{f"{name} rows": _float8_rows(name) for name in FLOAT8},
    "TF32": Cast(lambda part, peak: round_tf32(part), "its weight was rounded to TF32"),
}


# -- the output as a whole --------------------------------------------------------------------------------------------


def _scale(context: Context, stored: np.ndarray) -> Mapping[str, Any]:
    """Fit s in y = s x by least squares."""
    plain = context.plain()
    factor = float(np.vdot(plain, stored)) / max(float(np.vdot(plain, plain)), TINY)
    return {"replaced": factor * plain, "value": factor}


def _coarser(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Round the output to bfloat16 where the dump's dtype is finer."""
    if context.dtype == "bfloat16":
        return None
    return {"replaced": round_to(context.plain(), "bfloat16").astype(np.float64)}


def _dropout(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Find elements that are zero at random, and one factor 1 / (1 - share) on all others."""
    plain = context.plain()
    zero = (stored == 0) & (plain != 0)
    share = float(zero.mean())
    if not 0.005 < share < 0.95 or zero.all(axis=0).any() or zero.all(axis=1).any():
        return None
    kept = np.where(zero, 0.0, plain)
    factor = float(np.vdot(kept, stored)) / max(float(np.vdot(kept, kept)), TINY)
    return {"replaced": factor * kept, "value": share}


OUTPUT = (
    Hypothesis("dropout-on", {}, "a share {value:.3g} of its elements is zero, the others are scaled", solve=_dropout),
    Hypothesis("scale", {}, "its output is {value:.6g} times what it should be", solve=_scale),
    Hypothesis("precision", {}, "its output was rounded to bfloat16", solve=_coarser),
)


# -- features and rows ------------------------------------------------------------------------------------------------


def _zero_columns(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    plain = context.plain()
    zero = (stored == 0).all(axis=0) & (plain != 0).any(axis=0)
    return {"replaced": np.where(zero, 0.0, plain), "value": float(zero.sum())} if zero.any() else None


def _column_factors(context: Context, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least-squares factor of each feature, and what is left of it in roundings."""
    plain = context.plain()
    factors = (plain * stored).sum(0) / np.maximum((plain * plain).sum(0), TINY)
    return factors, _roundings(context, stored - factors * plain, plain)


def _roundings(context: Context, difference: np.ndarray, values: np.ndarray, axis: int = 0) -> np.ndarray:
    norm = np.linalg.norm(values, axis=axis)
    return np.asarray(np.linalg.norm(difference, axis=axis) / np.maximum(norm, TINY) / ROUNDING[context.dtype])


def _few_scaled(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Fit a factor to each of a few features that are wrong."""
    plain = context.plain()
    if len(stored) < 3:
        return None
    wrong = _wrong(_roundings(context, stored - plain, plain))
    factors, left = _column_factors(context, stored)
    wrong &= left < _roundings(context, stored - plain, plain) / 3
    if not wrong.any() or wrong.mean() > FEW:
        return None
    return {"replaced": np.where(wrong, factors * plain, plain), "value": float(factors[np.argmax(wrong)])}


def _wrong(roundings: np.ndarray) -> np.ndarray:
    """Tell which rows or features stand out from the others."""
    return roundings > np.maximum(3 * np.median(roundings), 3.0)


def _offset(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Find an offset of the features that is the same in all rows."""
    if len(stored) < 4:
        return None
    difference = stored - context.plain()
    return {"replaced": context.plain() + difference.mean(0), "value": float(np.linalg.norm(difference.mean(0)))}


def permuted_columns(stored: np.ndarray, candidates: np.ndarray) -> np.ndarray | None:
    """Return the candidate feature that each stored feature looks like, None where some look like none.

    Features are compared by their cosine over the rows, at least 16 of them.
    """
    if len(stored) < 16 or max(stored.shape[1], candidates.shape[1]) > 16384:
        return None
    norms = [np.maximum(np.linalg.norm(x, axis=0), TINY) for x in (stored, candidates)]
    unit = (candidates / norms[1]).astype(np.float32)
    result = np.empty_like(stored)
    for start in range(0, stored.shape[1], 256):
        part = slice(start, start + 256)
        cosine = (stored[:, part] / norms[0][part]).astype(np.float32).T @ unit
        best = cosine.argmax(axis=1)
        if (cosine.max(axis=1) < ALIKE).mean() > FEW:
            return None
        result[:, part] = candidates[:, best]
    return result


def _permuted(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    found = permuted_columns(stored, context.plain())
    return None if found is None else {"replaced": found}


def _few(axis: int) -> Callable[[Context, np.ndarray], Mapping[str, Any] | None]:
    """Return the solution that takes a few wrong features (axis 0) or rows (axis 1) as they are."""

    def solve(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
        plain = context.plain()
        wrong = _wrong(_roundings(context, stored - plain, plain, axis))
        if not wrong.any() or wrong.mean() > FEW or len(wrong) < 10:
            return None
        mask = wrong[None, :] if axis == 0 else wrong[:, None]
        return {"replaced": np.where(mask, stored, plain), "value": float(wrong.sum())}

    return solve


PERMUTED = Hypothesis("permuted-weights", {}, "its features are in another order", solve=_permuted)
OFFSET = Hypothesis("wrong-bias", {}, "every row is off by the same vector of norm {value:.3g}", solve=_offset)
CHANNELS = (
    Hypothesis("column-corruption", {}, "{value:.0f} of its features are zero", solve=_zero_columns),
    Hypothesis("scaled-weight", {}, "a few of its features are scaled, the first by {value:.6g}", solve=_few_scaled),
)
FEW_ONLY = (
    Hypothesis("row-corruption", {}, "{value:.0f} of its rows are wrong, the others fit", solve=_few(1)),
    Hypothesis("column-corruption", {}, "{value:.0f} of its features are wrong, the others fit", solve=_few(0)),
)
GENERIC = (*OUTPUT, *CHANNELS, *FEW_ONLY)
"""What is tried for every kind, after its own hypotheses."""
