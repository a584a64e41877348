"""Compare the parameter sketches of two dumps: equal, rounded, scaled, permuted, transposed or of other content."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from probe.compare.judge import ROUNDING
from probe.compare.merge import OPERATIONS
from probe.compare.names.base import Source
from probe.compare.side import Side
from probe.errors import ProbeError
from probe.metrics import MANTISSA_BITS, coarser_dtype
from probe.store.sketches import JoinedSketch, by_output

EXACT = 1e-9
"""Relative difference of two float64 sketches of one weight: summation order only, 1e-16 times a row's length."""

WORST_ROW = 8.0
"""Standard deviations that one row of a rounded copy may differ by: a row's error is a sum of bounded terms, so that
none above 6 is expected among even 200,000 rows."""

RMS_ROWS = 2.0
"""Standard deviations that all rows of a rounded copy may differ by in the root mean square; 1 is expected."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Weight:
    """One canonical parameter of one side: the native name it comes from and the sketch of its rows.

    ``gap``: which shard of it is in no file; ``conflict``: which ranks hold copies of it that differ.
    """

    name: str
    native: str
    shape: tuple[int, ...]
    dtype: str
    rows: np.ndarray
    gap: str = ""
    conflict: str = ""


@dataclass(frozen=True)
class Finding:
    """What one parameter's comparison says: ``status`` is equal, rounded, different or missing, ``detail`` in words."""

    name: str
    status: str
    detail: str = ""


def canonical_weights(side: Side) -> dict[str, Weight]:
    """Return the side's sketched parameters by canonical name, in the model's order; unsketched ones are left out."""
    natives = {side.strip(name): name for name in side.dump.weights}
    order = {label: place for place, label in enumerate(natives)}
    sources = side.parameter_sources()
    found: dict[str, Weight] = {}
    for label, source in sorted(sources.items(), key=lambda item: (order[item[1].native[0]], item[1].part)):
        name = natives[source.native[0]]
        joined = side.dump.joined_weights[name]
        if joined.whole.alias in side.dump.joined_weights and not joined.whole.rows.size:
            joined = side.dump.joined_weights[joined.whole.alias]
        if joined.whole.rows.size:
            weight = _canonical(label, source, joined, side)
            found[weight.name] = replace(weight, native=name)
    if HEAD not in found and EMBEDDING in found and side.shape.tied:
        found[HEAD] = replace(found[EMBEDDING], name=HEAD)
    return found


def _canonical(label: str, source: Source, joined: JoinedSketch, side: Side) -> Weight:
    """Return the part of a native parameter that ``source`` names."""
    whole = joined.whole
    if joined.gap:
        return Weight(label, whole.name, whole.shape, whole.dtype, whole.rows, joined.gap, joined.conflict)
    by_rank = whole.axis == 0 and source.operation != "whole"
    tables = [by_output(sketch) for sketch in (joined.shards if by_rank else [whole])]
    try:
        rows = OPERATIONS[source.operation]([tables], source.part, side.shape, 0)
    except ProbeError:  # sizes that do not fit the config: compared as a whole, so that it shows as a difference
        label, rows = f"{label} (unsplit)", whole.rows
    is_expert = rows.ndim < tables[0].ndim
    rows = rows.reshape(-1, rows.shape[-1])
    shape = (len(rows), whole.shape[-1]) if is_expert else whole.shape
    if len(whole.shape) < 3:
        shape = (len(rows), *whole.shape[1:])
    return Weight(label, whole.name, shape, whole.dtype, rows, conflict=joined.conflict)


def compare_weights(a: dict[str, Weight], b: dict[str, Weight]) -> list[Finding]:
    """Return one finding per parameter that both sides sketched, in the order of ``a``."""
    findings = [_compare(a[name], b[name]) for name in a if name in b]
    return _explain_swaps(findings, a, b)


def _compare(a: Weight, b: Weight) -> Finding:
    for side, weight in (("a", a), ("b", b)):
        if weight.conflict:
            return Finding(a.name, "different", f"is not the same on all ranks of {side}: {weight.conflict}")
        if weight.gap:
            return Finding(a.name, "missing", f"lacks a shard in {side}: {weight.gap}")
    if a.shape != b.shape:
        return Finding(a.name, "different", f"{_other_shape(a, b)} ({list(a.shape)} in a, {list(b.shape)} in b)")
    if _within(a.rows, b.rows, _exact_scale(a.rows), EXACT, EXACT):
        return Finding(a.name, "equal")
    coarser = coarser_dtype(a.dtype, b.dtype)
    if a.dtype != b.dtype and _within(a.rows, b.rows, _rounding_scale(a.rows, coarser), RMS_ROWS, WORST_ROW):
        return Finding(a.name, "rounded", coarser)
    return Finding(a.name, "different", _describe(a, b))


def _other_shape(a: Weight, b: Weight) -> str:
    """Say how two parameters of different shapes are related: transposed, one a shard of the other, or not at all."""
    if a.shape == b.shape[::-1]:
        return "is transposed"
    (side, small), (_, large) = sorted((("a", a), ("b", b)), key=lambda entry: len(entry[1].rows))
    count, total = len(small.rows), len(large.rows)
    if a.shape[1:] == b.shape[1:] and count:
        for start in range(0, total - count + 1, count):
            if _close(small.rows, large.rows[start : start + count]):
                return f"lacks a shard in {side}, which holds rows {start} to {start + count - 1} of {total} only"
    return "has another shape"


def _exact_scale(rows: np.ndarray) -> np.ndarray:
    """Return the size of each sketch entry, against which summation error is measured."""
    if rows.shape[1] < 3:
        return np.maximum(np.abs(rows), np.finfo(np.float64).tiny)
    norm = np.sqrt(rows[:, 2:3])
    return np.maximum(np.hstack([norm, norm * np.sqrt(len(rows)), rows[:, 2:3]]), np.finfo(np.float64).tiny)


def _rounding_scale(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return the standard deviation that one rounding of every weight gives each sketch entry.

    With R the RMS relative rounding error and r uniform in (-1, 1), W @ r moves by R sqrt(sum w^2 / 3), the row sum by
    R sqrt(sum w^2); the sum of squares by at most 2 R times itself. A vector's values move by at most one unit
    2^-(mantissa bits + 1), a bound and not a deviation, so it is divided by the bound on the worst row.
    """
    rounding, tiny = ROUNDING[dtype], np.finfo(np.float64).tiny
    if rows.shape[1] < 3:
        return np.maximum(np.abs(rows) * 2.0 ** -(MANTISSA_BITS[dtype] + 1), tiny)
    squares = rows[:, 2:3]
    spread = np.hstack([np.sqrt(squares / 3), np.sqrt(squares), 2 * squares])
    return np.maximum(rounding * spread, tiny)


def _within(a: np.ndarray, b: np.ndarray, scale: np.ndarray, rms: float, worst: float) -> bool:
    with np.errstate(over="ignore"):  # against a weight that is zero any other is infinitely far
        deviation = np.abs(a - b) / scale
        return bool(np.sqrt(np.mean(deviation**2)) <= rms and deviation.max() <= worst)


def _describe(a: Weight, b: Weight) -> str:
    """Say in what way two sketches of one shape differ."""
    x, y = a.rows, b.rows
    changed = np.flatnonzero(np.abs(x - y).max(axis=1) > EXACT * _exact_scale(x).max(axis=1))
    relative = float(np.linalg.norm(x[:, 0] - y[:, 0]) / (np.linalg.norm(y[:, 0]) or 1.0))
    factor = _factor(x[:, 0], y[:, 0])
    if factor is not None:
        return f"is scaled: b = {factor:.6g} x a"
    if _close(_sorted(x), _sorted(y)):
        return f"has its rows permuted ({len(changed)} of {len(x)} moved)"
    if x.shape[1] == 3 and _close(x[:, 1:], y[:, 1:]):
        return "has its input columns permuted (equal row sums and norms, other products)"
    if len(changed) < len(x):
        return f"differs in {len(changed)} of {len(x)} rows (first {changed[0]}), relative difference {relative:.1e}"
    return f"has other content, relative difference {relative:.1e}{_rounding_hint(a, relative)}"


def _rounding_hint(a: Weight, relative: float) -> str:
    for name in ("bfloat16", "float16"):
        if MANTISSA_BITS.get(a.dtype, 0) > MANTISSA_BITS[name] and 0.5 < relative / ROUNDING[name] < 2:
            return f" (the size of one rounding to {name}: the weights may have passed through it)"
    return ""


def _factor(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return the s for which y = s x to within 1 % of |s - 1|, or None."""
    square = float(x @ x)
    if not square:
        return None
    factor = float(x @ y) / square
    residual = float(np.linalg.norm(y - factor * x)) / np.sqrt(square)
    return factor if residual < max(0.01 * abs(factor - 1), EXACT) else None


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T)]


def _close(x: np.ndarray, y: np.ndarray) -> bool:
    return bool(np.allclose(x, y, rtol=1e-7, atol=1e-7 * float(np.abs(x).max(initial=0.0))))


_SWAPS = (("gate_proj", "up_proj"), ("k_proj", "v_proj"))


def _explain_swaps(findings: list[Finding], a: dict[str, Weight], b: dict[str, Weight]) -> list[Finding]:
    """Reword two differences that are one exchange of equally shaped parameters."""
    explained = []
    for finding in findings:
        for one, other in _SWAPS:
            twin = finding.name.replace(one, other)
            if finding.status == "different" and twin != finding.name and twin in a and twin in b:
                swapped = _same(a[finding.name], b[twin]) and _same(a[twin], b[finding.name])
                if swapped:
                    finding = replace(finding, detail=f"is exchanged with {twin}")
        explained.append(finding)
    return explained


def _same(a: Weight, b: Weight) -> bool:
    return a.shape == b.shape and _close(a.rows, b.rows)
