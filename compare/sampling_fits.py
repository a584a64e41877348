"""What distribution log-probs belong to, read off the numbers: temperature, kept mass, shift, zeros, a bare factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from probe.compare.judge import ROUNDING
from probe.compare.names.canonical import LOGITS
from probe.compare.side import Side
from probe.metrics import MANTISSA_BITS
from probe.sampling import Semantics

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

ALONE = 0.3
"""Likelihood below which a token is hardly ever the only one that top-p keeps, whatever the temperature: one of 0.3 is
at temperature 0.7 and top-p 0.9 where the rest is spread over some thousand tokens."""

CERTAIN = 0.99
"""Likelihood from which an exact zero is no wonder."""

UNLIKELY_ZEROS = 0.1
"""Share of a side's zeros that must have likelihoods below ALONE: noise alone puts fewer there."""

SIMPLER = 3.0
"""How many times as much an explanation with one parameter may leave as one with two, and still be taken."""

FEW_ODD = 0.05
"""Share of tokens whose log-prob may be lower than the logits give: those outside the kept ones, by rounding."""

SLOPED = 0.05
"""Slope beyond 1 that matters: a temperature of 0.95, most of which shows."""

CHANCE = 4.0
"""Standard errors beyond which a slope is no chance."""

RELATED = 0.5
"""Correlation of the differences with one side's log-probs that a temperature gives; noise of both sides gives less."""

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
    """A distribution that explains log-probs, and what it leaves (nats).

    ``parts``: cause (a slug) and words with numbers, one each for a temperature and for kept tokens.
    """

    parts: tuple[tuple[str, str], ...]
    left: float
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Return all parts in words."""
        return " and ".join(text for _, text in self.parts)


def logit_rows(side: Side, sequence: np.ndarray, position: np.ndarray, logprobs: np.ndarray) -> Rows | None:
    """Return the stored logits that score tokens of a side, ROWS of them at most, evenly spread; None without.

    ``sequence`` and ``position`` are those of the scored tokens in the side's dump; the row before scores a token.
    """
    source = side.resolution.sources.get(LOGITS)
    if source is None or not len(position):
        return None
    key = side.natives[source.native[0]]
    if side.dump.tensors[key].reduced:
        return None
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
    ids = np.array([tokens[cell[0], cell[1] + 1] for cell in cells])
    values = np.array([kept[cell] for cell in cells])
    return rows_of(np.stack([found[cell] for cell in cells]), ids, values, side.dump.tensors[key].dtype)


def some_of(count: int) -> np.ndarray:
    """Return ROWS of the numbers below ``count`` at most, evenly spread, int64, rising."""
    return np.unique(np.linspace(0, count - 1, min(ROWS, count)).astype(np.int64))


def rows_of(logits: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, dtype: str) -> Rows:
    """Return rows of logits [n, vocab] that score tokens int64 [n], with log-probs [n] of them, stored in ``dtype``."""
    logits, logprobs = logits.astype(np.float64), logprobs.astype(np.float64)
    unit = 2.0 ** -(MANTISSA_BITS.get(dtype, 23) + 1)
    # a log-prob moves by the rounding of its own logit and of the largest ones
    tolerance = max(1e-4, 2 * unit * float(np.abs(logits).max(axis=1).mean()))
    rounding = one_rounding(logits, tokens, ROUNDING.get(dtype, ROUNDING["float32"]))
    return Rows(logits, tokens, logprobs, tolerance, rounding)


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


def processed_scores(logits: np.ndarray, tokens: np.ndarray, meaning: Semantics) -> np.ndarray:
    """Return what processed log-probs of tokens are, float64 [n]: over the temperature, over the tokens top-p keeps.

    A token outside the kept ones was put there by rounding and counts beside them (hooks.runners.inprocess).
    """
    chosen = scores(logits, tokens, meaning.temperature)
    if meaning.top_p == 1:
        return chosen
    sums = likely_sums(-np.sort(-logits, axis=1), meaning.temperature)
    kept = np.take_along_axis(sums, _count(sums, meaning.top_p)[:, None], 1)[:, 0]
    return np.asarray(chosen - np.log(np.minimum(kept + _outside(sums, kept, np.exp(chosen)), 1.0)))


def likely_sums(descending: np.ndarray, temperature: float) -> np.ndarray:
    """Return the sums of each row's k largest probabilities for all k, [n, vocab], from logits in descending order."""
    weights = np.exp((descending - descending[:, :1]) / temperature)
    sums = np.cumsum(weights, axis=1, out=weights)
    return np.asarray(sums / sums[:, -1:])


def _count(sums: np.ndarray, top_p: float) -> np.ndarray:
    """Return the index of the last token that top-p keeps: the first whose sum reaches it."""
    return np.asarray(np.minimum((sums < top_p).sum(axis=1), sums.shape[1] - 1))


def _outside(sums: np.ndarray, kept: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the probability of the chosen token where it is less likely than every kept one, else 0."""
    at = (sums < kept[:, None]).sum(axis=1)
    before = np.where(at > 0, sums[np.arange(len(sums)), np.maximum(at - 1, 0)], 0.0)
    return np.where(own < (kept - before) * (1 - 1e-9), own, 0.0)


def explain(rows: Rows, sampled_at: tuple[float, ...] = ()) -> Fit | None:
    """Return what log-probs are, where they are not those of the untouched logits: None where nothing fits.

    ``sampled_at``: temperatures that the run declares. Of the explanations that leave less than SHIFT_SHARE of the
    disagreement, or no more than rounding, the plainest is taken: two parameters only where one leaves several times
    as much.
    """
    raw = scores(rows.logits, rows.tokens)
    disagreement = float(np.abs(rows.logprobs - raw).mean())
    allowed = min(max(SHIFT_SHARE * disagreement, rows.tolerance), disagreement / 2)
    descending = -np.sort(-rows.logits, axis=1)
    plain = [_temperature(rows, disagreement), _factor(rows, raw), _kept(rows, 1.0, descending)]
    best = min((fit for fit in plain if fit is not None), key=lambda fit: fit.left, default=None)
    if best is not None and best.left <= min(rows.tolerance, allowed):
        return best
    both = [_kept(rows, temperature, descending) for temperature in sampled_at if temperature != 1]
    both.append(_both(rows, descending))
    fits = [*([best] if best is not None else []), *(fit for fit in both if fit is not None)]
    good = [fit for fit in fits if fit.left < allowed]
    return min(good, key=lambda fit: fit.left * (1.0 if len(fit.parts) == 1 else SIMPLER), default=None)


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
    return Fit((_divided(fitted),), left(fitted, slice(None)), {"temperature": fitted})


def _divided(temperature: float) -> tuple[str, str]:
    return "temperature-semantics", f"of the logits divided by {temperature:.3g} (a temperature)"


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
    return Fit((("temperature-semantics", text),), left, {"factor": found, "temperature": 1 / found})


def bare_factor(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return the s for which x = s y best, None where it is 1 or meaningless."""
    square = float(y @ y)
    factor = float(x @ y) / square if square else 1.0
    return factor if factor > 0 and abs(factor - 1) > SAME_TEMPERATURE else None


def _kept(rows: Rows, temperature: float, descending: np.ndarray) -> Fit | None:
    """The probabilities are renormalised over the most likely tokens: log-prob = raw - log(kept mass).

    The kept mass of each row is then the sum of its k largest probabilities: with one k for all rows it is top-k, with
    one p between the sums of k - 1 and k it is top-p.
    """
    gain = rows.logprobs - scores(rows.logits, rows.tokens, temperature)
    tolerance = max(rows.tolerance, 1e-4)
    if (
        float(np.quantile(gain, FEW_ODD)) < -2 * tolerance
        or float(gain.max()) < tolerance
        or gain.mean() < tolerance / 2
    ):
        return None
    sums = likely_sums(descending, temperature)
    mass = np.exp(-np.maximum(gain, -1.0))  # a token that lies far below the others says nothing of what was kept
    nearest = np.abs(sums - mass[:, None]).argmin(axis=1)
    at = np.arange(len(mass))
    figures = {"mean kept mass": float(mass.mean()), "temperature": temperature}
    divided = () if temperature == 1 else (_divided(temperature),)
    counts, times = np.unique(nearest, return_counts=True)
    if times.max() > 0.9 * len(mass):
        k = int(counts[times.argmax()]) + 1
        left = float(np.abs(np.log(sums[:, k - 1]) + gain).mean())
        part = "renormalised-top-p", f"renormalised over the {k} most likely tokens (top-k)"
        return Fit((*divided, part), left, {**figures, "top_k": k})
    below = np.where(nearest > 0, sums[at, np.maximum(nearest - 1, 0)], 0.0)
    low, high = float(np.quantile(below, 0.95)), float(np.quantile(sums[at, nearest], 0.05))
    if low > high + tolerance:
        return None
    left = float(np.abs(np.log(sums[at, nearest]) + gain).mean())
    words = f"renormalised over the kept tokens (top-p between {low:.3g} and {high:.3g}; D = -log of the kept mass)"
    return Fit((*divided, ("renormalised-top-p", words)), left, {**figures, "top_p": high})


def _both(rows: Rows, descending: np.ndarray) -> Fit | None:
    """Logits over a temperature, renormalised over the most likely tokens: both fitted, the temperature on a grid that
    is refined around its best.

    For one temperature the p that all rows share is among the kept masses; what it leaves tells how well both fit.
    """
    few = slice(None, None, max(1, len(rows.tokens) // 16))
    peaks = rows.logits[few].max(axis=1, keepdims=True)
    shifted, logprobs = descending[few] - peaks, rows.logprobs[few]
    own = (rows.logits[np.arange(len(rows.tokens)), rows.tokens])[few] - peaks[:, 0]

    def left(temperature: float) -> float:
        sums = np.cumsum(np.exp(shifted / temperature), axis=1)
        kept = own / temperature - logprobs  # log of what the probabilities were divided by
        shares = np.exp(np.minimum(kept - np.log(sums[:, -1]), 0.0))
        errors = []
        for share in np.quantile(shares, (0.0, 0.05, 0.1, 0.2)):
            at = [min(int(np.searchsorted(row, share * (1 - 1e-6) * row[-1])), len(row) - 1) for row in sums]
            errors.append(float(np.abs(np.log(sums[np.arange(len(at)), at]) - kept).mean()))
        return min(errors)

    grid = TEMPERATURES
    for _ in range(7):
        best = int(np.argmin([left(float(temperature)) for temperature in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        fitted, grid = float(grid[best]), np.geomspace(low, high, 9)
    return None if abs(fitted - 1) < SAME_TEMPERATURE else _kept(rows, fitted, descending)


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

    A certain token has a log-prob of zero; in fp32 it rounds to it from a likelihood of 1 - 3e-8 on. So has one that
    top-p kept alone: where hardly any of the zeros are below ALONE, nothing was left out.
    """
    known = np.isfinite(reference)
    zero = (values == 0) & (~known | (reference < np.log(CERTAIN)))
    told = reference[zero & known]
    return np.asarray(zero & (not len(told) or float((told < np.log(ALONE)).mean()) >= UNLIKELY_ZEROS))


def one_signed(x: np.ndarray, y: np.ndarray, noise: float) -> float:
    """Return the mean of x - y where all but a few differences beyond ``noise`` have one sign, else 0."""
    difference = x - y
    clear = difference[np.abs(difference) > noise]
    if len(clear) < 4 * FEW or len(clear) < 0.2 * len(difference):
        return 0.0
    share = max(float((clear > 0).mean()), float((clear < 0).mean()))
    return float(difference.mean()) if share >= ONE_SIGNED else 0.0


def sloped(x: np.ndarray, y: np.ndarray) -> float:
    """Return the slope of x on y where one side spreads clearly more, as over a lower temperature does; else 0.

    With one distribution sharper than the other, x = y / T + (1 / T - 1) H with H the Renyi entropy of order 1 / T of
    each row: the slope lies between 1 and 1 / T. Noise flattens the slopes of x on y and of y on x alike, so that one
    above 1 is no noise.
    """
    dx, dy = x - x.mean(), y - y.mean()
    gap, products, squares = dx - dy, float(dx @ dy), (float(dx @ dx), float(dy @ dy))
    if len(x) < 4 * FEW or products <= 0:
        return 0.0
    lengths = (np.sqrt(float(gap @ gap) * square) or 1.0 for square in squares)
    related = max(abs(float(gap @ side)) / length for side, length in zip((dx, dy), lengths))
    least = min(squares)
    slope = products / least
    error = np.sqrt(max(squares[0] + squares[1] - least - slope * products, 0.0) / len(x) / least)
    if related < RELATED or slope < 1 + max(SLOPED, CHANCE * error):
        return 0.0
    return slope if least == squares[1] else 1 / slope
