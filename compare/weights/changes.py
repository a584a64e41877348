"""How two sketches of one parameter differ: equal, rounded, scaled, permuted, transposed, exchanged, of other content.

What each test rests on is said in docs/gates.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from probe.compare.judge import ROUNDING
from probe.compare.weights.canonical import EMBEDDING, HEAD, Weight
from probe.compare.weights.sizes import (
    EXACT,
    RMS_ROWS,
    SAME,
    WORST_ROW,
    close,
    exact_scale,
    in_order,
    rounding_scale,
    within,
)
from probe.metrics import MANTISSA_BITS, coarser_dtype
from probe.store.dtypes import round_to
from probe.store.sketches import column_vector

SHARD_COUNTS = (2, 4, 8)
"""Numbers of tensor-parallel ranks that blocks of rows are tried for."""

ROUNDING_SPREAD = 0.05
"""How far the size of one rounding, in units of the expected one, may lie from 1: the expected one assumes mantissas
that are evenly spread in the logarithm; 2,048 x 1,024 normal weights of any scale measured 0.96 to 1.02. Chance adds
three standard errors of the 2 n sketch entries that it is measured on."""

MISSING_SHARE = 1 / 64
"""A run of zero rows is a missing shard from this share of the rows on (64 ranks), else rows that were zeroed."""

HALF_NEAR = 0.02
"""How far the squares of half of the columns may lie from half of all squares, beside three standard deviations of
chance, 0.7 / sqrt(entries) each: columns differ in size."""

Figures = Mapping[str, float | int | str]


@dataclass(frozen=True)
class Finding:
    """What one parameter's comparison says.

    ``status``: equal, rounded, different or missing; ``detail`` in words; of what is different or missing ``cause`` (a
    slug of docs/diagnosis.md), ``side`` where the sketches alone say it (a or b), and ``figures``.
    """

    name: str
    status: str
    detail: str = ""
    cause: str = ""
    side: str = ""
    figures: Figures = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """In what way b's copy of a parameter differs from a's."""

    cause: str
    detail: str
    figures: Figures = field(default_factory=dict)
    side: str = ""


def compare_weights(a: Mapping[str, Weight], b: Mapping[str, Weight]) -> list[Finding]:
    """Return one finding per parameter that both sides sketched, in the order of ``a``, each by itself.

    :func:`probe.compare.weights.settle.settled` reads them together.
    """
    return [_compare(Pair(name, a, b)) for name in a if name in b]


class Pair:
    """One parameter on both sides, among all others of each side."""

    def __init__(self, name: str, all_a: Mapping[str, Weight], all_b: Mapping[str, Weight]) -> None:
        self.name, self.all_a, self.all_b = name, all_a, all_b
        self.a, self.b = all_a[name], all_b[name]
        self.x, self.y = self.a.rows, self.b.rows

    @cached_property
    def changed(self) -> np.ndarray:
        """Return the numbers of the rows that differ."""
        return np.flatnonzero(np.abs(self.x - self.y).max(axis=1) > EXACT * exact_scale(self.x).max(axis=1))

    @cached_property
    def relative(self) -> float:
        """Return the relative difference of the products, which is about that of the parameters."""
        return float(np.linalg.norm(self.x[:, 0] - self.y[:, 0]) / (np.linalg.norm(self.y[:, 0]) or 1.0))

    @property
    def is_matrix(self) -> bool:
        """Tell whether the sketch is of a matrix: of a vector it is the values."""
        return self.x.shape[1] == 3

    def twins(self, other: str) -> bool:
        """Tell whether both sides hold the parameter ``other``, each what the other side holds of this one."""
        return (
            other in self.all_a
            and other in self.all_b
            and same(self.a, self.all_b[other])
            and same(self.all_a[other], self.b)
        )


def _compare(pair: Pair) -> Finding:
    a, b = pair.a, pair.b
    for side, weight in (("a", a), ("b", b)):
        if weight.conflict:
            detail = f"is not the same on all ranks of {side}: {weight.conflict}"
            return Finding(a.name, "different", detail, "stale-weights", side)
        if weight.gap:
            return Finding(a.name, "missing", f"lacks a shard in {side}: {weight.gap}", "missing-shard", side)
    if a.shape != b.shape:
        change = _other_shape(a, b)
        detail = f"{change.detail} ({list(a.shape)} in a, {list(b.shape)} in b)"
        return Finding(a.name, "different", detail, change.cause, change.side)
    status = agree(a, b)
    if status:
        return Finding(a.name, status, coarser_dtype(a.dtype, b.dtype) if status == "rounded" else "")
    change = next(found for test in TESTS if (found := test(pair)) is not None)
    cause = "wrong-bias" if a.name.endswith(".bias") and change.cause in _OF_A_BIAS else change.cause
    return Finding(a.name, "different", change.detail, cause, change.side, change.figures)


_OF_A_BIAS = ("scaled-weight", "stale-weights", "permuted-weights", "missing-shard")
"""Changes that are told as a wrong bias where a bias has them."""


def agree(a: Weight, b: Weight) -> str:
    """Return how two parameters agree: ``equal``, ``rounded`` (to the coarser of their dtypes), empty: not at all."""
    if a.shape != b.shape or a.rows.shape != b.rows.shape:
        return ""
    if within(a.rows, b.rows, exact_scale(a.rows), EXACT, EXACT):
        return "equal"
    coarser = coarser_dtype(a.dtype, b.dtype)
    if a.dtype != b.dtype and within(a.rows, b.rows, rounding_scale(a.rows, coarser), RMS_ROWS, WORST_ROW):
        return "rounded"
    return ""


def same(a: Weight, b: Weight) -> bool:
    """Tell whether two parameters, of any names, hold the same rows."""
    return a.shape == b.shape and close(a.rows, b.rows)


def _other_shape(a: Weight, b: Weight) -> Change:
    """Say how two parameters of different shapes are related: transposed, one a shard of the other, or not at all."""
    if a.shape == b.shape[::-1]:
        return Change("transposed-weight", "is transposed")
    (side, small), (_, large) = sorted((("a", a), ("b", b)), key=lambda entry: len(entry[1].rows))
    count, total = len(small.rows), len(large.rows)
    if a.shape[1:] == b.shape[1:] and count:
        for start in range(0, total - count + 1, count):
            if close(small.rows, large.rows[start : start + count]):
                lies = f"which holds rows {start} to {start + count - 1} of {total} only"
                return Change("missing-shard", f"lacks a shard in {side}, {lies}", side=side)
    return Change("stale-weights", "has another shape")


# -- the tests, the most specific first -------------------------------------------------------------------------------

_EXCHANGES = (("gate_proj", "up_proj", "gate-up-swapped"), ("k_proj", "v_proj", "kv-swapped"))


def _exchanged(pair: Pair) -> Change | None:
    """Two parameters of one shape hold each other's content."""
    for one, other, cause in _EXCHANGES:
        for left, right in ((one, other), (other, one)):
            twin = pair.name.replace(f".{left}.", f".{right}.")
            if twin != pair.name and pair.twins(twin):
                return Change(cause, f"is exchanged with {twin}", {"with": twin})
    head, found, rest = pair.name.partition(".experts.")
    if found:
        number, _, tail = rest.partition(".")
        for name, weight in pair.all_b.items():
            begins = name.startswith(f"{head}.experts.") and name.endswith(f".{tail}") and name != pair.name
            if begins and same(pair.a, weight):
                other = name.removeprefix(f"{head}.experts.").partition(".")[0]
                figures = {"expert": int(number), "with": int(other)}
                return Change("expert-swapped", f"is expert {other}'s in b: experts are exchanged", figures)
    return None


def _qkv(pair: Pair) -> Change | None:
    """The rows of a layer's q, k and v are all there, dealt out otherwise: a wrong split of the fused projection."""
    names = next(
        ([pair.name.replace(f".{x}_proj.", f".{y}_proj.") for y in "qkv"] for x in "qkv" if f".{x}_proj." in pair.name),
        None,
    )
    if names is None or not all(name in side for name in names for side in (pair.all_a, pair.all_b)):
        return None
    tables = [[side[name].rows for name in names] for side in (pair.all_a, pair.all_b)]
    if len({table.shape[1] for side in tables for table in side}) > 1:
        return None
    x, y = (in_order(np.concatenate(side)) for side in tables)
    if not close(x, y):
        return None
    own = close(in_order(pair.x), in_order(pair.y))
    how = (
        "has its rows permuted" if own else "has rows of the layer's other projections: q, k and v are split otherwise"
    )
    return Change("permuted-qkv", f"{how} ({len(pair.changed)} of {len(pair.x)} moved)", {"rows": len(pair.changed)})


def _scaled(pair: Pair) -> Change | None:
    """y = s x to within 1 % of |s - 1|, or to one rounding of s x where that is a third of the change at most."""
    x, y = pair.x[:, 0], pair.y[:, 0]
    square = float(x @ x)
    if not square:
        return None
    factor = float(x @ y) / square
    residual = float(np.linalg.norm(y - factor * x)) / np.sqrt(square)
    if residual >= max(0.01 * abs(factor - 1), EXACT) and not _rounded_multiple(pair, factor, residual):
        return None
    if abs(factor) < EXACT:
        return Change("missing-shard", "is all zeros in b", {"rows": len(x)}, "b")
    return Change("scaled-weight", f"is scaled: b = {factor:.6g} x a", {"factor": factor})


def _rounded_multiple(pair: Pair, factor: float, residual: float) -> bool:
    if residual > abs(factor - 1) / 3:
        return False
    wanted = pair.x * ([factor, factor, factor**2] if pair.is_matrix else factor)
    scale = rounding_scale(wanted, coarser_dtype(pair.a.dtype, pair.b.dtype))
    return within(wanted, pair.y, scale, RMS_ROWS, WORST_ROW)


def _offset(pair: Pair) -> Change | None:
    """A norm's weights differ by 1 everywhere: w on one side, 1 + w on the other (Gemma's, zero-centred gamma)."""
    if pair.is_matrix or "norm" not in pair.name or not pair.name.endswith(".weight"):
        return None
    offset = pair.y[:, 0] - pair.x[:, 0]
    mean = float(offset.mean())
    larger = np.maximum(np.abs(pair.x[:, 0]), np.abs(pair.y[:, 0]))  # of which one bf16 rounding is at most 2^-8
    if abs(abs(mean) - 1) > 0.01 or (np.abs(offset - np.sign(mean)) > 2.0**-7 * larger).any():
        return None
    more = "b" if mean > 0 else "a"
    return Change("norm-weight-offset", f"is larger by 1 in {more} (w against 1 + w)", {"offset": mean})


def _untied(pair: Pair) -> Change | None:
    """A head that the other side ties to the embedding is a copy with other content."""
    if pair.name != HEAD:
        return None
    for tied, copy, weights in (("a", "b", pair.all_a), ("b", "a", pair.all_b)):
        others = pair.all_b if tied == "a" else pair.all_a
        embedding = weights.get(EMBEDDING)
        if embedding is None or EMBEDDING not in others or not same(embedding, weights[HEAD]):
            continue
        if agree(embedding, others[EMBEDDING]):
            text = f"is the embedding in {tied} and a copy with other content in {copy}"
            return Change("untied-head", text, {"relative": pair.relative}, copy)
    return None


def _blocks(pair: Pair) -> Change | None:
    """The rows of the shards of tensor-parallel ranks are joined in another order."""
    heads = any(f".{name}_proj." in pair.name for name in "qkv") and max(pair.a.ranks, pair.b.ranks) == 1
    for count in SHARD_COUNTS:
        if heads or len(pair.x) % count or len(pair.x) == count:  # without ranks, blocks of q, k and v are heads
            continue
        left, right = (np.split(rows, count) for rows in (pair.x, pair.y))
        order = [next((n for n, block in enumerate(left) if close(block, part)), -1) for part in right]
        if sorted(order) == list(range(count)) and order != list(range(count)):
            text = f"has its rows in blocks of another order: of {count} equal parts b holds {order}"
            return Change("tp-shards-swapped", text, {"parts": count})
    return None


def _permuted_rows(pair: Pair) -> Change | None:
    if not close(in_order(pair.x), in_order(pair.y)):
        return None
    moved = f"has its rows permuted ({len(pair.changed)} of {len(pair.x)} moved)"
    return Change("permuted-weights", moved, {"rows": len(pair.changed)})


def _transposed(pair: Pair) -> Change | None:
    """A square matrix and its transpose share r'Wr, the sum of all entries and the sum of their squares."""
    if not pair.is_matrix or len(pair.x) != pair.a.shape[-1] or len(pair.a.shape) != 2:
        return None
    r = column_vector(len(pair.x))
    quads, scale = [float(r @ rows[:, 0]) for rows in (pair.x, pair.y)], float(np.sqrt(pair.x[:, 2].sum()))
    sums = [rows.sum(axis=0) for rows in (pair.x, pair.y)]
    close = abs(quads[0] - quads[1]) < SAME * scale * np.sqrt(len(r))
    close &= abs(sums[0][1] - sums[1][1]) < SAME * scale * len(r)
    close &= abs(sums[0][2] - sums[1][2]) < SAME * scale**2
    return Change("transposed-weight", "is transposed (equal r'Wr, sum and norm, other rows)") if close else None


def _permuted_columns(pair: Pair) -> Change | None:
    if not pair.is_matrix or not close(pair.x[:, 1:], pair.y[:, 1:]):
        return None
    text = "has its input columns permuted (equal row sums and norms, other products)"
    ranks = max((weight.ranks for weight in (pair.a, pair.b) if weight.axis == 1), default=1)
    if ranks > 1:
        return Change("tp-shards-swapped", f"{text}: shards of {ranks} ranks in another order", {"parts": ranks})
    return Change("permuted-weights", text)


def _zeroed(pair: Pair) -> Change | None:
    """Rows are all zeros on one side, or the sums of squares say that a share of the input columns is."""
    for side, rows, other in (("a", pair.x, pair.y), ("b", pair.y, pair.x)):
        zero = np.flatnonzero(~rows.any(axis=1) & other.any(axis=1))
        if len(zero) and np.array_equal(zero, pair.changed):
            run = int(zero[-1]) - int(zero[0]) + 1 == len(zero)
            where = f"rows {zero[0]} to {zero[-1]}" if run else f"{len(zero)} rows (first {zero[0]})"
            cause = "missing-shard" if run and len(zero) >= MISSING_SHARE * len(rows) else "stale-weights"
            text = f"has {where} of {len(rows)} all zeros in {side}"
            return Change(cause, text, {"rows": len(zero), "first": int(zero[0])}, side)
    return _zeroed_columns(pair)


def _zeroed_columns(pair: Pair) -> Change | None:
    """Half of the input columns is zero on one side. Of a smaller part sketches do not say whether it is missing here
    or an update added it there: explain_weight tells, from a checkpoint's values."""
    if not pair.is_matrix or len(pair.changed) < len(pair.x):
        return None
    near, alike = HALF_NEAR + 2 / np.sqrt(np.prod(pair.a.shape)), min(0.35, 2 / np.sqrt(len(pair.x)))
    for side, rows, other in (("a", pair.x, pair.y), ("b", pair.y, pair.x)):
        left, right = rows[:, 2], other[:, 2]
        share = float(left.sum() / (right.sum() or 1.0))
        # what is left of W r when a part of the columns is zero is the other part of it: a slope of 1
        slope = float(rows[:, 0] @ other[:, 0] / (rows[:, 0] @ rows[:, 0] or 1.0))
        if abs(share - 0.5) < near and (left < right).all() and abs(slope - 1) < alike:
            text = f"lacks half of its input columns in {side}: its squares sum to {share:.3g} of the other side's"
            return Change("missing-shard", text, {"share": share}, side)
    return None


def _coarser(pair: Pair) -> Change | None:
    """The size of the difference is that of one rounding to a dtype coarser than either side's."""
    finer = coarser_dtype(pair.a.dtype, pair.b.dtype)
    for dtype in ("float16", "bfloat16", "float8_e4m3fn"):  # nothing keeps weights in e5m2
        if MANTISSA_BITS[dtype] >= MANTISSA_BITS.get(finer, 0):
            continue
        side = _rounded_side(pair, dtype)
        if side is None:
            continue
        text = f"differs by the size of one rounding to {dtype}, relative difference {pair.relative:.1e}"
        through = f"{text}: {f'the weights of {side}' if side else 'they'} passed through it"
        return Change("weight-precision", through, {"dtype": dtype, "relative": pair.relative}, side)
    return None


def _rounded_side(pair: Pair, dtype: str) -> str | None:
    """Return the side that was rounded to ``dtype``, empty where one was and the sketch does not say which, or None."""
    if pair.is_matrix:
        scale = rounding_scale(pair.x, dtype)
        spread = float(np.sqrt(np.mean(((pair.x - pair.y) / scale)[:, :2] ** 2)))
        allowed = ROUNDING_SPREAD + 3 / np.sqrt(4 * len(pair.x))
        near = allowed < 0.5 and any(abs(spread / expected - 1) < allowed for expected in (1.0, _unscaled(pair, dtype)))
        fits = near and within(pair.x, pair.y, scale, RMS_ROWS, WORST_ROW)
        return "" if fits and len(pair.changed) > 0.9 * len(pair.x) else None
    x, y = pair.x[:, 0], pair.y[:, 0]
    if np.array_equal(round_to(x, dtype), y.astype(np.float32)):
        return "b"
    return "a" if np.array_equal(round_to(y, dtype), x.astype(np.float32)) else None


def _unscaled(pair: Pair, dtype: str) -> float:
    """Return the size of a cast without a scale of normal weights as small as these, in units of one rounding.

    Where weights reach below the smallest normal number of 8-bit floats their error no longer shrinks with them.
    """
    size = float(np.sqrt(pair.x[:, 2].sum() / max(1, np.prod(pair.a.shape))))
    sample = size * np.random.default_rng(0).standard_normal(4096)
    error = round_to(sample, dtype) - sample
    return float(np.sqrt(np.mean(error**2) / np.mean(sample**2))) / ROUNDING[dtype]


def _some_rows(pair: Pair) -> Change | None:
    if len(pair.changed) == len(pair.x):
        return None
    first = int(pair.changed[0]) if len(pair.changed) else 0
    text = f"differs in {len(pair.changed)} of {len(pair.x)} rows (first {first})"
    figures = {"rows": len(pair.changed), "first": first, "relative": pair.relative}
    return Change("stale-weights", f"{text}, relative difference {pair.relative:.1e}", figures)


def _content(pair: Pair) -> Change | None:
    text = f"has other content, relative difference {pair.relative:.1e}"
    return Change("stale-weights", text, {"relative": pair.relative})


TESTS: tuple[Callable[[Pair], Change | None], ...] = (
    *(_exchanged, _blocks, _qkv, _scaled, _offset, _untied, _permuted_rows, _transposed, _permuted_columns),
    *(_zeroed, _coarser, _some_rows, _content),
)
"""Ways in which two copies of a parameter differ: the first that fits names the change; the last always does."""
