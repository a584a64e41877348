"""What distribution log-probs belong to, read off the numbers: temperature, kept mass, shift, zeros, a bare factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from probe.compare.judge import ROUNDING
from probe.compare.names.canonical import LOGITS
from probe.compare.side import Side
from probe.metrics import MANTISSA_BITS

SHIFT_SHARE = 0.1
"""Log-probs count as shifted, and a fit as found, when it leaves less than this share of the disagreement."""

SHIFT_NATS = 0.1
"""Mean disagreement (nats) of log-probs with those that logits give that makes a search for its reason worth while
between two sides: two healthy computations of one bf16 log-prob differ by about 0.01."""

FEW = 8
"""Tokens below which chance could decide."""

ROWS = 64
"""Logit rows that are fitted at most: 64 of 150,000 entries are 77 MB in float64, and one parameter needs no more."""

TEMPERATURES = np.geomspace(0.05, 5.0, 41)
"""Temperatures that are tried before the best is refined between its neighbours."""

SAME_TEMPERATURE = 0.02
"""Relative difference of a fitted temperature from the declared one that still is the declared one."""

ONE_SIGNED = 0.98
"""Share of the differences that must have one sign: rounding gives both alike."""


@dataclass(frozen=True)
class Rows:
    """Scored tokens with the logits that scored them: float64 [n, vocab], int64 [n], and log-probs float64 [n].

    ``tolerance``: nats that a mean over tokens may be off by the largest rounding of the logits, in every token;
    ``rounding``: by one rounding of them as large as it is in the root mean square.
    """

    logits: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    tolerance: float
    rounding: float = 0.0


@dataclass(frozen=True)
class Fit:
    """A distribution that explains log-probs: ``cause`` (a slug), in words with numbers, and what it leaves (nats)."""

    cause: str
    text: str
    left: float
    figures: dict[str, float] = field(default_factory=dict)


def logit_rows(side: Side, sequence: np.ndarray, position: np.ndarray, logprobs: np.ndarray) -> Rows | None:
    """Return the stored logits that score tokens of a side, ROWS of them at most, evenly spread; None without.

    ``sequence`` and ``position`` are those of the scored tokens in the side's dump; the row before scores a token.
    """
    source = side.resolution.sources.get(LOGITS)
    if source is None or not len(position):
        return None
    key = side.natives[source.native[0]]
    wanted = {
        (int(s), int(p) - 1): float(value) for s, p, value in zip(sequence, position, logprobs) if np.isfinite(value)
    }
    step = max(1, -(-len(wanted) // ROWS))
    kept = dict(list(wanted.items())[::step])
    tokens = {(int(row["sequence"]), int(row["position"])): int(row["token"]) for row in side.dump.tokens}
    found: dict[tuple[int, int], np.ndarray] = {}
    for values, rows in side.dump.iter_blocks(*key):
        flat = values.reshape(len(values), -1)[:, : side.shape.vocab or None]
        for number, cell in enumerate(zip(rows["sequence"].tolist(), rows["position"].tolist())):
            if cell in kept:
                found[cell] = flat[number].astype(np.float64)
    cells = [cell for cell in found if (cell[0], cell[1] + 1) in tokens]
    if len(cells) < FEW:
        return None
    logits = np.stack([found[cell] for cell in cells])
    ids = np.array([tokens[cell[0], cell[1] + 1] for cell in cells])
    dtype = side.dump.tensors[key].dtype
    unit = 2.0 ** -(MANTISSA_BITS.get(dtype, 23) + 1)
    # a log-prob moves by the rounding of its own logit and of the largest ones
    tolerance = max(1e-4, 2 * unit * float(np.abs(logits).max(axis=1).mean()))
    rounding = one_rounding(logits, ids, ROUNDING.get(dtype, ROUNDING["float32"]))
    return Rows(logits, ids, np.array([kept[cell] for cell in cells]), tolerance, rounding)


def one_rounding(logits: np.ndarray, tokens: np.ndarray, relative: float) -> float:
    """Return the mean over tokens of the deviation in nats that one rounding of logits and log-probs makes.

    A log-prob l_t - log sum exp l moves by the error of its own logit, and by that of the others as their probabilities
    p weigh them: sqrt(l_t^2 (1 - p_t)^2 + sum of p_j^2 l_j^2 of the others) times the RMS ``relative`` error; if it is
    rounded itself, by its own. Independent errors add in squares.
    """
    at = np.arange(len(tokens))
    shifted = logits - logits.max(axis=1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    moved = probabilities * logits
    moved[at, tokens] -= logits[at, tokens]
    squares = np.square(moved).sum(axis=1) + np.square(scores(logits, tokens))
    return float(relative * np.sqrt(squares).mean())


def scores(logits: np.ndarray, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return log softmax(logits / temperature) at tokens, float64 [n]."""
    scaled = logits / temperature
    scaled = scaled - scaled.max(axis=1, keepdims=True)
    chosen = scaled[np.arange(len(scaled)), tokens]
    return np.asarray(chosen - np.log(np.exp(scaled, out=scaled).sum(axis=1)))


def explain(rows: Rows, sampled_at: tuple[float, ...] = ()) -> Fit | None:
    """Return what log-probs are, where they are not those of the untouched logits: None where nothing fits.

    ``sampled_at``: temperatures that the run declares. The plainest explanation that leaves less than SHIFT_SHARE of
    the disagreement, or no more than rounding, is taken.
    """
    raw = scores(rows.logits, rows.tokens)
    disagreement = float(np.abs(rows.logprobs - raw).mean())
    allowed = max(SHIFT_SHARE * disagreement, rows.tolerance)
    fits = [_temperature(rows, disagreement), _factor(rows, raw)]
    fits += [_kept(rows, temperature) for temperature in (1.0, *sampled_at)]
    good = [fit for fit in fits if fit is not None and fit.left < min(allowed, disagreement / 2)]
    return min(good, key=lambda fit: fit.left, default=None)


def _temperature(rows: Rows, disagreement: float) -> Fit | None:
    few = slice(None, None, max(1, len(rows.tokens) // 16))

    def left(temperature: float, at: slice = few) -> float:
        return float(np.abs(scores(rows.logits[at], rows.tokens[at], temperature) - rows.logprobs[at]).mean())

    errors = [left(float(temperature)) for temperature in TEMPERATURES]
    best = int(np.argmin(errors))
    low, high = TEMPERATURES[max(best - 1, 0)], TEMPERATURES[min(best + 1, len(TEMPERATURES) - 1)]
    fitted = _minimum(left, float(low), float(high))
    if abs(fitted - 1) < SAME_TEMPERATURE:
        return None
    text = f"of the logits divided by {fitted:.3g} (a temperature)"
    return Fit("temperature-semantics", text, left(fitted, slice(None)), {"temperature": fitted})


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one valley is least, by golden section (Kiefer, 1953) to 1e-4 of the interval."""
    golden = (np.sqrt(5) - 1) / 2
    while high - low > 1e-4 * high:
        left, right = high - golden * (high - low), low + golden * (high - low)
        if function(left) < function(right):
            high = right
        else:
            low = left
    return (low + high) / 2


def _factor(rows: Rows, raw: np.ndarray) -> Fit | None:
    """The log-probs themselves were divided, not the logits."""
    found = bare_factor(rows.logprobs, raw)
    if found is None:
        return None
    text = f"those of the logits times {found:.3g}: the log-probs were divided by a temperature, not the logits"
    left = float(np.abs(rows.logprobs - found * raw).mean())
    return Fit("temperature-semantics", text, left, {"factor": found, "temperature": 1 / found})


def bare_factor(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return the s for which x = s y best, None where it is 1 or meaningless."""
    square = float(y @ y)
    factor = float(x @ y) / square if square else 1.0
    return factor if factor > 0 and abs(factor - 1) > SAME_TEMPERATURE else None


def _kept(rows: Rows, temperature: float) -> Fit | None:
    """The probabilities are renormalised over the most likely tokens: log-prob = raw - log(kept mass).

    The kept mass of each row is then the sum of its k largest probabilities: with one k for all rows it is top-k, with
    one p between the sums of k - 1 and k it is top-p.
    """
    gain = rows.logprobs - scores(rows.logits, rows.tokens, temperature)
    tolerance = max(rows.tolerance, 1e-4)
    if float(gain.min()) < -2 * tolerance or float(gain.max()) < tolerance or gain.mean() < tolerance / 2:
        return None
    scaled = rows.logits / temperature
    probabilities = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    sums = np.cumsum(-np.sort(-probabilities, axis=1), axis=1)
    mass = np.exp(-gain)
    nearest = np.abs(sums - mass[:, None]).argmin(axis=1)
    at = np.arange(len(mass))
    left = float(np.abs(np.log(sums[at, nearest]) - np.log(mass)).mean())
    counts, times = np.unique(nearest, return_counts=True)
    figures = {"mean kept mass": float(mass.mean()), "temperature": temperature}
    if times.max() > 0.9 * len(mass):
        k = int(counts[times.argmax()]) + 1
        left = float(np.abs(np.log(sums[:, k - 1]) - np.log(mass)).mean())
        return Fit(
            "renormalised-top-p", f"renormalised over the {k} most likely tokens (top-k)", left, {**figures, "top_k": k}
        )
    below = np.where(nearest > 0, sums[at, np.maximum(nearest - 1, 0)], 0.0)
    low, high = float(np.quantile(below, 0.95)), float(np.quantile(sums[at, nearest], 0.05))
    if low > high + tolerance:
        return None
    text = f"renormalised over the kept tokens (top-p between {low:.3g} and {high:.3g}; D = -log of the kept mass)"
    return Fit("renormalised-top-p", text, left, {**figures, "top_p": high})


# -- without logits ---------------------------------------------------------------------------------------------------


def shift_between(sequence: np.ndarray, position: np.ndarray, x: np.ndarray, y: np.ndarray) -> int:
    """Return +1 or -1 when x fits y only after moving by one token within its sequence, else 0.

    All arrays are of tokens sorted by (sequence, position); NaN where a value is not known. +1: x at p - 1 is y's at p.
    """
    same = np.isfinite(x) & np.isfinite(y)
    if same.sum() < FEW:
        return 0
    disagreement = float(np.abs(x - y)[same].mean())
    if disagreement < SHIFT_NATS:
        return 0
    for shift in (1, -1):
        moved = np.roll(x, shift)
        follows = (np.roll(sequence, shift) == sequence) & (np.roll(position, shift) + shift == position)
        usable = np.isfinite(y) & np.isfinite(moved) & follows
        if usable.sum() >= FEW and float(np.abs(moved - y)[usable].mean()) < SHIFT_SHARE * disagreement:
            return shift
    return 0


def zero_filled(values: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return bool [n]: log-probs that are exactly zero where the reference (NaN: unknown) says a likelihood below 0.99.

    A certain token has a log-prob of zero; in fp32 it rounds to it from a likelihood of 1 - 3e-8 on.
    """
    unlikely = ~np.isfinite(reference) | (reference < np.log(0.99))
    return np.asarray((values == 0) & unlikely)


def one_signed(x: np.ndarray, y: np.ndarray, noise: float) -> float:
    """Return the mean of x - y where all but a few differences beyond ``noise`` have one sign, else 0."""
    difference = x - y
    clear = difference[np.abs(difference) > noise]
    if len(clear) < 4 * FEW or len(clear) < 0.2 * len(difference):
        return 0.0
    share = max(float((clear > 0).mean()), float((clear < 0).mean()))
    return float(difference.mean()) if share >= ONE_SIGNED else 0.0
