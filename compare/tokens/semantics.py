"""What the log-probs of a batch of tokens are, read off the numbers and off what their sources declare.

Everything is vectorised over the tokens. First what was never a log-prob (copies, fills, clamps, values above zero),
whose tokens are then left aside; then whether one side is a token off; then which distribution each side's are of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from probe.compare.gates import GateFinding
from probe.compare.report.model import counted
from probe.compare.sampling_fits import (
    ALONE,
    FEW,
    SHIFT_NATS,
    SHIFT_SHARE,
    bare_factor,
    explain,
    one_signed,
    scores,
    shift_between,
    sloped,
    zero_filled,
)
from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.declared import SUBJECT, declared_apart, held_against, misdeclared, unfit_for_ratio
from probe.sampling import Semantics

OTHER = {"a": "b", "b": "a"}
FILLED = FEW // 2
"""Equal values in one sequence, or at the floor of all, below which they may be chance."""
ROUNDED_ABOVE = 1e-3
"""Nats that rounding may lift a log-prob above 0: an fp32 sum over 150,000 probabilities is off by 1e-5 at most."""
HEALTHY_NATS = 0.05
"""Mean |D| of two healthy bf16 engines, 0.01 to 0.04 (docs/tokens.md), rounded up: what a distribution fitted to the
other side's logits may leave."""
SHARP = 0.9
"""Share of the tokens beyond a likelihood whose log-prob is 0 where top-p leaves the likeliest token alone from there
on; of values that noise lifts to 0, some half."""
FLOOR_BIN = 2.0**-7
"""Relative spacing of bf16 values, at most: the width of the bin beside the lowest value."""


def find_semantics(batch: TokenBatch) -> list[GateFinding]:
    """Return what sets both sides' log-probs apart other than arithmetic; empty where nothing does.

    Causes are slugs of docs/diagnosis.md. With a monitor's batch, which holds only |p - q|, a copy is all that shows.
    """
    found = [*_copied(batch), *_lengths(batch)]
    if (
        not len(batch)
        or batch.a is None
        or batch.b is None
        or any(finding.cause == "bypassed-logprobs" for finding in found)
    ):
        return found
    aside = np.zeros(len(batch), bool)
    for look in (_above_zero, _zeros, _floors, _ends):
        for finding, tokens in look(batch, aside):
            found.append(finding)
            aside |= tokens
    found += _distributions(batch, ~aside)
    named = {finding.cause for finding in found}
    return found + [finding for finding in _declared(batch) if finding.cause not in named]


# -- values that are no log-probs -------------------------------------------------------------------------------------

Found = Iterator[tuple[GateFinding, np.ndarray]]
"""A finding, and which tokens it takes out of the search that follows: bool [N]."""


def _copied(batch: TokenBatch) -> Iterator[GateFinding]:
    """Yield bypass mode: both sides are one array. Two dumps of one engine may well agree to the last bit."""
    if len(batch) < FEW or {origin.kind for origin in batch.origins} == {"dump"}:
        return
    if batch.a is None or batch.b is None:
        same, what = not np.any(batch.prob_diff), "all differences of the probabilities are exactly 0"
    else:
        same = np.array_equal(batch.a, batch.b) and bool(np.any(batch.a))
        what = f"the log-probs of all {counted(len(batch), 'token')} have the same bits on both sides"
    if same:
        text = f"{what}: one is a copy of the other (bypass mode), so that their difference says nothing"
        yield GateFinding("bypassed-logprobs", SUBJECT, "both", text, {"tokens": len(batch)})


def _lengths(batch: TokenBatch) -> Iterator[GateFinding]:
    """Yield sequences that one side ends earlier than the other: an end-of-text token that it leaves out."""
    for name, sequences in zip("ab", batch.lone_last):
        if sequences >= max(2, len(batch.labels) // 2):
            text = (
                f"{counted(sequences, 'sequence')} of {len(batch.labels)} end one token or more later in {name}: "
                f"{OTHER[name]} has no log-prob of their last tokens (the end-of-text token?)"
            )
            yield GateFinding("length-mismatch", SUBJECT, OTHER[name], text, {"sequences": sequences})


def _sides(batch: TokenBatch) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield each side's name, its log-probs and the other's."""
    assert batch.a is not None and batch.b is not None
    yield "a", batch.a, batch.b
    yield "b", batch.b, batch.a


def _above_zero(batch: TokenBatch, aside: np.ndarray) -> Found:
    for name, values, _ in _sides(batch):
        above = values > ROUNDED_ABOVE
        if above.any():
            count, most = int(above.sum()), float(values.max())
            what = "likelihoods, or losses" if count > len(values) // 2 else "ids of padding, or a mask that lets it in"
            text = f"{counted(count, 'value')} of {name} are above 0 (up to {most:.4g}), which no log-prob is: {what}?"
            yield GateFinding("not-logprobs", SUBJECT, name, text, {"tokens": count, "highest": most}), above


def _zeros(batch: TokenBatch, aside: np.ndarray) -> Found:
    """Yield sequences with exact zeros where the other side is far from certain."""
    for name, values, other in _sides(batch):
        zero = zero_filled(values, other) & ~aside
        counts = np.bincount(batch.sequence[zero], minlength=len(batch.labels))
        dense = counts >= FILLED
        if not dense.any():
            continue
        zero &= dense[batch.sequence]
        first = batch.labels[int(np.argmax(dense))]
        yield zero_filled_finding(name, int(zero.sum()), int(dense.sum()), first), zero


def zero_filled_finding(name: str, tokens: int, sequences: int, first: str) -> GateFinding:
    """Return the finding that a side (``name``) has log-probs of exactly zero, what an array holds when it is made.

    ``tokens`` and ``sequences``: how many; ``first``: the label of the first of the sequences.
    """
    text = f"{counted(tokens, 'log-prob')} of {name} in {counted(sequences, 'sequence')} are exactly zero"
    figures: dict[str, float | int | str] = {"tokens": tokens, "sequences": sequences, "first": first}
    more = f"{text} (first {first}): never filled in"
    return GateFinding("zero-filled-logprobs", SUBJECT, name, more, figures)


def _floors(batch: TokenBatch, aside: np.ndarray) -> Found:
    """Yield a clamp from below: many values at exactly the lowest, of which the other side says less, or the same.

    Of a tail that falls off, the bin next to the lowest value holds more than the lowest value itself.
    """
    for name, values, other in _sides(batch):
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


def _ends(batch: TokenBatch, aside: np.ndarray) -> Found:
    """Yield one value at the last token of many sequences: a side that has no log-prob of the end-of-text token."""
    last = np.append(np.diff(batch.sequence) != 0, True) & ~aside
    for name, values, other in _sides(batch):
        ends, told = values[last], other[last]
        if not len(ends):
            continue
        value, times = np.unique(ends, return_counts=True)
        filler = float(value[times.argmax()])
        odd = last & (values == filler) & (np.abs(other - filler) > SHIFT_NATS)
        rare = int((values == filler).sum()) <= 2 * int(odd.sum())
        if odd.sum() >= max(FILLED, len(ends) // 2) and rare and not np.all(told == told[0]):
            count = int(odd.sum())
            text = f"the log-probs of {name} at the last token of {counted(count, 'sequence')} are all {filler:.6g}"
            more = f"{text}: it has none of the end-of-text token, or is one token short"
            figures: dict[str, float | int | str] = {"sequences": count, "value": filler}
            yield GateFinding("length-mismatch", SUBJECT, name, more, figures), odd


# -- another distribution ---------------------------------------------------------------------------------------------


def _distributions(batch: TokenBatch, kept: np.ndarray) -> list[GateFinding]:
    """Return a shift by one token, else what the logits say, else what the two columns alone show."""
    assert batch.a is not None and batch.b is not None
    sequence, position, a, b = (values[kept] for values in (batch.sequence, batch.position, batch.a, batch.b))
    if len(a) < FEW:
        return []
    shift = shift_between(sequence, position, a, b)
    if shift:
        text = f"the log-probs of a fit those of b only when moved by {shift:+d} token: one side's are assigned to the"
        return [GateFinding("logprob-shift", SUBJECT, "unknown", f"{text} wrong tokens", {"shift": shift})]
    if batch.rows is not None and kept[batch.rows_at].sum() >= FEW:
        return [*_given_logits(batch, kept)]
    return [*_alone(batch, a, b)]


def _given_logits(batch: TokenBatch, kept: np.ndarray) -> Iterator[GateFinding]:
    """Yield what each side's log-probs are, given logits of one side."""
    assert batch.rows is not None
    use = kept[batch.rows_at]
    for (name, values, _), origin in zip(_sides(batch), batch.origins):
        own = name == batch.rows_of
        rows = replace(
            batch.rows,
            logits=batch.rows.logits[use],
            tokens=batch.rows.tokens[use],
            logprobs=values[batch.rows_at[use]],
            tolerance=batch.rows.tolerance if own else max(batch.rows.tolerance, HEALTHY_NATS),
        )
        declared, drawn = origin.meaning or Semantics(), origin.sampled_at or Semantics()
        if own:
            yield from held_against(name, rows, declared, drawn)
            continue
        apart = float(np.abs(rows.logprobs - scores(rows.logits, rows.tokens)).mean())
        fit = explain(rows, tuple({declared.temperature, drawn.temperature} - {1.0})) if apart > HEALTHY_NATS else None
        if fit is not None:
            yield from misdeclared(name, fit, declared, apart, f" of {batch.rows_of}")


def _alone(batch: TokenBatch, a: np.ndarray, b: np.ndarray) -> Iterator[GateFinding]:
    """Yield what two columns of log-probs show: a factor, one sign throughout, or a slope as a temperature gives it."""
    apart = float(np.abs(b - a).mean())
    if apart < SHIFT_NATS / 10:
        return
    multiple = multiple_finding(a, b)
    if multiple is not None:
        yield multiple
        return
    kept = [*_renormalised(a, b, batch)]
    yield from kept
    slope = sloped(a, b) if apart >= SHIFT_NATS and not kept else 0.0
    if slope:
        sharp, cool = ("a", "b") if slope > 1 else ("b", "a")
        text = (
            f"the log-probs of {sharp} spread more than those of {cool}, as over a temperature that is lower by a "
            f"factor of {max(slope, 1 / slope):.2g} at least: one side's are taken after the temperature, the other's "
            "before"
        )
        yield GateFinding("temperature-semantics", SUBJECT, "unknown", text, {"slope": slope, "nats": apart})


def multiple_finding(a: np.ndarray, b: np.ndarray) -> GateFinding | None:
    """Return the finding that one side's log-probs, float64 [n], are a multiple of the other's; None where not."""
    factor, apart = bare_factor(a, b), float(np.abs(a - b).mean())
    if factor is None or float(np.abs(a - factor * b).mean()) >= SHIFT_SHARE * apart:
        return None
    text = f"the log-probs of a are {factor:.4g} times those of b: one side's were divided by a temperature"
    return GateFinding("temperature-semantics", SUBJECT, "unknown", text, {"factor": factor, "nats": apart})


def _renormalised(a: np.ndarray, b: np.ndarray, batch: TokenBatch) -> Iterator[GateFinding]:
    """Yield a side whose log-probs are larger throughout, or exactly 0 wherever the other's are likely enough.

    Log-probs that are renormalised gain -log of the kept mass, at most -log of top-p; a token kept alone has one of 0.
    """
    for name, values, other, origin in (("a", a, b, batch.origins[0]), ("b", b, a, batch.origins[1])):
        gain = values - other
        stated = next((m.top_p for m in (origin.meaning, origin.sampled_at) if m is not None and m.top_p < 1), 0.0)
        most = float(gain.max())
        bound = SHIFT_NATS - np.log(stated or ALONE)
        larger = any(one_signed(values, other, noise) > 0 for noise in (SHIFT_NATS / 10, HEALTHY_NATS / 2))
        alone = (values == 0) & (other < np.log(0.99))
        least = float(np.exp(other[alone].min())) if alone.any() else 0.0
        sharp = alone.sum() >= FEW and float((values[other >= np.quantile(other[alone], 0.1)] == 0).mean()) >= SHARP
        if larger and most < bound:
            text = f"the log-probs of {name} are larger throughout, by {gain.mean():.2g} nats and at most {most:.2g}"
            figures: dict[str, float | int | str] = {"mean": float(gain.mean()), "max": most}
        elif sharp and least >= ALONE and gain[~alone].mean() > gain[alone].mean() / 2:  # rounding to 0 lifts no other
            text = f"{counted(int(alone.sum()), 'log-prob')} of {name} are exactly 0 where {OTHER[name]} gives"
            text += f" likelihoods from {least:.2g} on"
            figures = {"tokens": int(alone.sum()), "least": least}
        else:
            continue
        said = f" (it declares top-p {stated:g})" if stated else ""
        more = f"{text}: renormalised over the tokens that top-p or top-k kept{said}"
        yield GateFinding("renormalised-top-p", SUBJECT, name, more, figures)


def _declared(batch: TokenBatch) -> list[GateFinding]:
    return declared_apart(batch.origins) or unfit_for_ratio(batch.origins)
