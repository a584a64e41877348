"""Values in a column that are no log-probs: copies, zeros and other fills, clamps, ends that one side lacks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from probe.compare.gates import GateFinding
from probe.compare.report.model import counted
from probe.compare.sampling_fits import ALONE, CERTAIN, FEW, SHIFT_NATS
from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.declared import SUBJECT
from probe.store.dtypes import round_to

OTHER = {"a": "b", "b": "a"}
FILLED = FEW // 2
"""Equal values in one sequence, or at the floor of all, below which they may be chance."""
ROUNDED_ABOVE = 1e-3
"""Nats that rounding may lift a log-prob above 0: an fp32 sum over 150,000 probabilities is off by 1e-5 at most."""
FLOOR_BIN = 2.0**-7
"""Relative spacing of bf16 values, at most: the width of the bin beside the lowest value."""
TELLING = -1e-4
"""Log-prob above which two engines may well agree to the last bit: the token is certain."""
COPIED, ROUNDED = 0.99, 0.999
"""Share of the telling tokens with the same bits, or the same once rounded, that makes one side a copy. Two engines
that part by 0.001 nats fall into one bf16 cell for 98.7 % of the tokens at most (cells of 1/16, at 2,981 tokens to
choose from)."""
GLANCE = 4096
"""Tokens that are looked at first: where those are no copy, the others are not looked at."""
ODD = 0.2
"""Share of a sequence's zeros that must have likelihoods below ALONE on the other side: noise lifts few so far."""
CHANCE = 1e-3
"""Expected number of sequences of zeros alone, by the share of zeros in the others, below which one was not filled."""
RUN = 3
"""Equal values in a row that make a fill."""
FILL_NATS = 0.3
"""Mean |D| of a fill: three times what makes a search worth while."""
EDGE = 8
"""Tokens at the start of sequences that are tried one after the other."""

Found = Iterator[tuple[GateFinding, np.ndarray]]
"""A finding, and which tokens it takes out of the search that follows: bool [N]."""


def copied(batch: TokenBatch) -> Iterator[GateFinding]:
    """Yield bypass mode: both sides are one array. Two dumps of one engine may well agree to the last bit."""
    if len(batch) < FEW or {origin.kind for origin in batch.origins} == {"dump"}:
        return
    if batch.a is None or batch.b is None:
        found = None if np.any(batch.prob_diff) else (1.0, "all differences of the probabilities are exactly 0")
    else:
        step = max(1, len(batch) // GLANCE)
        found = _copy(batch.a[::step], batch.b[::step]) and _copy(batch.a, batch.b)
    if found is not None:
        text = f"{found[1]}: one is a copy of the other (bypass mode), so that their difference says nothing"
        figures: dict[str, float | int | str] = {"tokens": len(batch), "share": found[0]}
        yield GateFinding("bypassed-logprobs", SUBJECT, "both", text, figures)


def _copy(a: np.ndarray, b: np.ndarray) -> tuple[float, str] | None:
    """Return the share of tokens in which one side is a copy of the other, and what was copied; None for no copy."""
    if np.array_equal(a, b) and np.any(a):
        return 1.0, f"the log-probs of all {counted(len(a), 'token')} have the same bits on both sides"
    telling = np.minimum(a, b) < TELLING
    if telling.sum() < FEW:
        return None
    a, b = a[telling], b[telling]
    share = float((a == b).mean())
    grids = {name: (round_to(a, name) == a, round_to(b, name) == b) for name in ("bfloat16", "float16")}
    coarse = any(on_a.all() and on_b.all() for on_a, on_b in grids.values())
    if share >= COPIED and not coarse:
        return share, f"{share:.1%} of the log-probs have the same bits on both sides"
    for name, (on_a, on_b) in grids.items():
        for side, on_grid, x, y in (("a", on_a, a, b), ("b", on_b, b, a)):
            share = float((round_to(y, name) == x).mean()) if on_grid.all() and not coarse else 0.0
            if share >= ROUNDED:
                return share, f"the log-probs of {side} are those of {OTHER[side]} rounded to {name} ({share:.1%})"
    return None


def lengths(batch: TokenBatch) -> Iterator[GateFinding]:
    """Yield sequences that one side ends earlier than the other: an end-of-text token that it leaves out."""
    for name, sequences in zip("ab", batch.lone_last):
        if sequences >= max(2, len(batch.labels) // 2):
            text = (
                f"{counted(sequences, 'sequence')} of {len(batch.labels)} end one token or more later in {name}: "
                f"{OTHER[name]} has no log-prob of their last tokens (the end-of-text token)"
            )
            yield GateFinding("length-mismatch", SUBJECT, OTHER[name], text, {"sequences": sequences})


def sides_of(batch: TokenBatch) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield each side's name, its log-probs and the other's."""
    assert batch.a is not None and batch.b is not None
    yield "a", batch.a, batch.b
    yield "b", batch.b, batch.a


def above_zero(batch: TokenBatch, aside: np.ndarray) -> Found:
    for name, values, _ in sides_of(batch):
        above = values > ROUNDED_ABOVE
        if above.any():
            count, most = int(above.sum()), float(values.max())
            what = "likelihoods, or losses" if count > len(values) // 2 else "ids of padding, or a mask that lets it in"
            are = "is" if count == 1 else "are"
            text = f"{counted(count, 'value')} of {name} {are} above 0 (up to {most:.4g}), which no log-prob is: {what}"
            yield GateFinding("not-logprobs", SUBJECT, name, text, {"tokens": count, "highest": most}), above


def zeros(batch: TokenBatch, aside: np.ndarray) -> Found:
    """Yield sequences with exact zeros that were never filled in: on both sides alike, or where the other is unsure."""
    assert batch.a is not None and batch.b is not None
    both = (batch.a == 0) & (batch.b == 0)
    if both.any():
        rows = _whole(batch, both)
        if rows.any():
            tokens = both & rows[batch.sequence]
            yield _zeros_finding(batch, "both", tokens, rows), tokens
    for name, values, other in sides_of(batch):
        zero = (values == 0) & (other < np.log(CERTAIN)) & ~aside
        if zero.any():
            rows = _filled(batch, values == 0, zero, other < np.log(ALONE))
            if rows.any():
                tokens = zero & rows[batch.sequence]
                yield _zeros_finding(batch, name, tokens, rows), tokens


def _zeros_finding(batch: TokenBatch, name: str, tokens: np.ndarray, rows: np.ndarray) -> GateFinding:
    return zero_filled_finding(name, int(tokens.sum()), int(rows.sum()), batch.labels[int(np.argmax(rows))])


def _count(batch: TokenBatch, tokens: np.ndarray) -> np.ndarray:
    """Return how many of the tokens (bool [N]) each sequence has, [S]."""
    return np.bincount(batch.sequence[tokens], minlength=len(batch.labels))


def _whole(batch: TokenBatch, zero: np.ndarray) -> np.ndarray:
    """Return bool [S]: sequences of zeros alone, longer than the share of zeros in the other sequences lets expect."""
    size = np.bincount(batch.sequence, minlength=len(batch.labels))
    counts = _count(batch, zero)
    whole, others = (counts == size) & (size >= FEW), (counts < size) & (size > 0)
    usual = float(np.quantile(counts[others] / size[others], 0.9)) if others.any() else 0.0
    return np.asarray(whole & (int((size > 0).sum()) * usual ** size.astype(np.float64) < CHANCE))


def _filled(batch: TokenBatch, zero: np.ndarray, unsure: np.ndarray, unlikely: np.ndarray) -> np.ndarray:
    """Return bool [S]: sequences whose zeros are no tokens that top-p left alone.

    ``unsure``: zeros where the other side is not certain; ``unlikely``: tokens that the other side gives less than
    ALONE. Where other sequences have such zeros too top-p may be at work, and a few odd ones are noise.
    """
    many, odd, low = _count(batch, unsure), _count(batch, unsure & unlikely), _count(batch, unlikely)
    clean = odd == 0
    alone = not clean.any() or int(many[clean].sum()) >= FILLED
    enough = (odd >= RUN) & (odd >= 0.25 * low) if alone else odd >= 1
    rows = (many >= FILLED) & (odd >= ODD * many) & enough
    size = np.bincount(batch.sequence, minlength=len(batch.labels))
    sure = (odd >= RUN) | (size >= 4 * FEW) | bool((_count(batch, zero) < size).any())
    return np.asarray(rows | (_whole(batch, zero) & (many >= FILLED) & sure))


def zero_filled_finding(name: str, tokens: int, sequences: int, first: str) -> GateFinding:
    """Return the finding that a side (``name``, or ``both``) has log-probs of exactly zero, what a new array holds.

    ``tokens`` and ``sequences``: how many; ``first``: the label of the first of the sequences.
    """
    side = "both sides" if name == "both" else name
    text = f"{counted(tokens, 'log-prob')} of {side} in {counted(sequences, 'sequence')} are exactly zero"
    figures: dict[str, float | int | str] = {"tokens": tokens, "sequences": sequences, "first": first}
    more = f"{text} (first {first}): never filled in"
    return GateFinding("zero-filled-logprobs", SUBJECT, name, more, figures)


def floors(batch: TokenBatch, aside: np.ndarray) -> Found:
    """Yield a clamp from below: many values at exactly the lowest, of which the other side says less, or the same.

    Of a tail that falls off, the bin next to the lowest value holds more than the lowest value itself.
    """
    for name, values, other in sides_of(batch):
        low = float(np.where(aside, 0.0, values).min())
        at = (values == low) & ~aside
        count = int(at.sum())
        beside = int(((values > low) & (values <= low - low * FLOOR_BIN) & ~aside).sum())
        if low > -1.0 or count < FILLED or count < 2 * beside:
            continue
        below = float(np.maximum(low - other[at], 0.0).mean())
        same = float((other[at] == low).mean())
        if below > SHIFT_NATS or (same > 0.9 and count >= FEW):
            text = f"{counted(count, 'log-prob')} of {name} are exactly {low:.6g}, the lowest value: clipped"
            more = f"{text}, while those of {OTHER[name]} lie {below:.2g} nats lower on average" if below else text
            figures: dict[str, float | int | str] = {"floor": low, "tokens": count, "nats": below}
            yield GateFinding("clipped-logprobs", SUBJECT, name, more, figures), at


def constants(batch: TokenBatch, aside: np.ndarray) -> Found:
    """Yield a value below 0 that fills runs of tokens (-1, -100) of which the other side says different things.

    Log-probs repeat where a coarse format leaves few values: the other side is then near the value, here as far off as
    any other token's would be.
    """
    for name, values, other in sides_of(batch):
        same = (np.diff(values) == 0) & (np.diff(batch.sequence) == 0) & (values[1:] < TELLING)
        same &= ~aside[1:] & ~aside[:-1]
        runs = np.flatnonzero(same[1:] & same[:-1])
        if not len(runs):
            continue
        inside = np.zeros(len(values), bool)
        for step in range(RUN):
            inside[runs + step] = True
        off = inside & (np.abs(other - values) > FILL_NATS)
        found, times = np.unique(values[off], return_counts=True)
        if not len(found) or times.max() <= off.sum() // 2:  # sums repeat too, each a value of its own
            continue
        value = float(found[times.argmax()])
        at = inside & (values == value)
        gap, usual = float(np.abs(other[at] - value).mean()), float(np.abs(other[~aside] - value).mean())
        if gap >= max(FILL_NATS, usual / 2) and np.ptp(other[at]) >= SHIFT_NATS:
            yield _constant_finding(batch, name, value, at, _count(batch, at) > 0), at


def _constant_finding(
    batch: TokenBatch, name: str, value: float, at: np.ndarray, rows: np.ndarray, where: str = ""
) -> GateFinding:
    count, sequences, first = int(at.sum()), int(rows.sum()), batch.labels[int(np.argmax(rows))]
    text = (
        f"{counted(count, 'log-prob')} of {name} {where}in {counted(sequences, 'sequence')} (first {first}) are all "
        f"{value:.6g}, while those of {OTHER[name]} vary: never filled in, or padding inside the mask"
    )
    figures: dict[str, float | int | str] = {"tokens": count, "sequences": sequences, "first": first, "value": value}
    return GateFinding("zero-filled-logprobs", SUBJECT, name, text, figures)


def starts(batch: TokenBatch, aside: np.ndarray) -> Found:
    """Yield one value at the first tokens of many sequences."""
    first = np.append(True, np.diff(batch.sequence) != 0)
    for name, values, other in sides_of(batch):
        at, place = np.zeros(len(values), bool), first.copy()
        value = 0.0
        for _ in range(EDGE):
            odd, found = _one_value(values, other, place & ~aside)
            if not odd.any() or (at.any() and found != value):
                break
            at, value = at | odd, found
            place = np.append(False, place[:-1]) & ~first
        if at.any():
            yield _constant_finding(batch, name, value, at, _count(batch, at) > 0, "at the first tokens "), at


def ends(batch: TokenBatch, aside: np.ndarray) -> Found:
    """Yield one value at the last token of many sequences: a side that has no log-prob of the end-of-text token."""
    last = np.append(np.diff(batch.sequence) != 0, True) & ~aside
    for name, values, other in sides_of(batch):
        odd, filler = _one_value(values, other, last)
        if odd.any():
            count = int(odd.sum())
            text = f"the log-probs of {name} at the last token of {counted(count, 'sequence')} are all {filler:.6g}"
            more = f"{text}: it has none of the end-of-text token, or is one token short"
            figures: dict[str, float | int | str] = {"sequences": count, "value": filler}
            yield GateFinding("length-mismatch", SUBJECT, name, more, figures), odd


def _one_value(values: np.ndarray, other: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, float]:
    """Return which tokens of ``at`` (one of each sequence) share a value that the other side does not have: bool [N].

    The value must be rare elsewhere and fill half of the places, 4 at least; the other side varies there, or is far
    away. A zero may be a token that top-p left alone: of those, some must be unlikely on the other side.
    """
    none = np.zeros(len(values), bool)
    ends, told = values[at], other[at]
    if len(ends) < FILLED:
        return none, 0.0
    value, times = np.unique(ends, return_counts=True)
    filler = float(value[times.argmax()])
    gap = np.abs(told - filler)
    odd = (ends == filler) & (gap > SHIFT_NATS)
    count = int(odd.sum())
    if count < max(FILLED, len(ends) // 2) or int((ends == filler).sum()) > 2 * count:
        return none, 0.0
    differ = float(np.ptp(told[odd])) > FILL_NATS or float(gap[odd].mean()) > 2.0
    if not differ or (filler == 0 and float((told[odd] < np.log(ALONE)).mean()) < ODD):
        return none, 0.0
    found = none.copy()
    found[np.flatnonzero(at)[odd]] = True
    return found, filler
