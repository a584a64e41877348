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
    Rows,
    bare_factor,
    explain,
    one_signed,
    scores,
    sloped,
)
from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.declared import (
    SUBJECT,
    declared_apart,
    held_against,
    misdeclared,
    raw_though_drawn,
    unfit_for_ratio,
)
from probe.compare.tokens.fills import (
    OTHER,
    above_zero,
    constants,
    copied,
    ends,
    floors,
    lengths,
    sides_of,
    starts,
    zeros,
)
from probe.compare.tokens.shifts import shifted
from probe.sampling import Semantics

HEALTHY_NATS = 0.05
"""Mean |D| of two healthy bf16 engines, 0.01 to 0.04 (docs/tokens.md), rounded up: what a distribution fitted to the
other side's logits may leave."""
TOGETHER = 0.25
"""Share of their distance from the raw log-probs that two sides may part by where both are of one and the same other
distribution."""
RARE = 0.01
"""Share of the tokens that may be as far off as they like: one odd token decides nothing."""
SHARP = 0.9
"""Share of the tokens beyond a likelihood whose log-prob is 0 where top-p leaves the likeliest token alone from there
on; of values that noise lifts to 0, some half."""


def find_semantics(batch: TokenBatch) -> list[GateFinding]:
    """Return what sets both sides' log-probs apart other than arithmetic; empty where nothing does.

    Causes are slugs of docs/diagnosis.md. With a monitor's batch, which holds only |p - q|, a copy is all that shows.
    """
    found = [*copied(batch), *lengths(batch)]
    if (
        not len(batch)
        or batch.a is None
        or batch.b is None
        or any(finding.cause == "bypassed-logprobs" for finding in found)
    ):
        return found
    aside = np.zeros(len(batch), bool)
    for look in (above_zero, shifted, zeros, floors, constants, starts, ends):
        for finding, tokens in look(batch, aside):
            found.append(finding)
            aside |= tokens
    named = {finding.cause for finding in found}
    if "logprob-shift" not in named:
        found += _distributions(batch, ~aside)
    named = {finding.cause for finding in found}
    return found + [finding for finding in _declared(batch) if finding.cause not in named]


# -- another distribution ---------------------------------------------------------------------------------------------


def _distributions(batch: TokenBatch, kept: np.ndarray) -> list[GateFinding]:
    """Return a shift by one token, else what the logits say, else what the two columns alone show."""
    assert batch.a is not None and batch.b is not None
    a, b = batch.a[kept], batch.b[kept]
    if len(a) < FEW:
        return []
    # once more where what was no log-prob is left out now
    shift = None if kept.all() else next(shifted(batch, ~kept), None)
    if shift is not None:
        return [shift[0]]
    found = []
    if batch.rows is not None and kept[batch.rows_at].sum() >= FEW:
        found = _given_logits(batch, batch.rows, kept)
    return found or ([] if declared_apart(batch.origins) else [*_alone(batch, a, b)])


def _given_logits(batch: TokenBatch, rows: Rows, kept: np.ndarray) -> list[GateFinding]:
    """Return what each side's log-probs are, given logits of one side.

    What nothing declares is held against the other side alone: both may be of one distribution, whichever it is.
    """
    use = kept[batch.rows_at]
    logits, tokens = rows.logits[use], rows.tokens[use]
    raw = scores(logits, tokens)
    found: list[GateFinding] = []
    sides = [
        replace(rows, logits=logits, tokens=tokens, logprobs=values[batch.rows_at[use]])
        for _, values, _ in sides_of(batch)
    ]
    lies = [float(np.abs(side.logprobs - raw).mean()) for side in sides]
    between = float(np.abs(sides[0].logprobs - sides[1].logprobs).mean())
    alike = between <= TOGETHER * min(lies)
    for name, side, lie, origin in zip("ab", sides, lies, batch.origins):
        own = name == batch.rows_of
        if not own:
            side = replace(side, tolerance=max(rows.tolerance, HEALTHY_NATS))
        drawn = origin.sampled_at or Semantics()
        unsaid = origin.meaning is None
        if unsaid and name == "a" and drawn != Semantics():  # the rollout's side: the actor draws nothing
            found += raw_though_drawn(name, side, drawn)
        if (unsaid and alike) or any(finding.cause == "raw-logprobs" and finding.side == name for finding in found):
            continue
        if own:
            found += held_against(name, side, origin.meaning, drawn)
        elif lie > rows.tolerance:
            declared = origin.meaning or Semantics()
            fit = explain(side, tuple({declared.temperature, drawn.temperature} - {1.0}))
            if fit is not None:
                found += misdeclared(name, fit, origin.meaning, lie, f" of {batch.rows_of}", drawn)
    return found


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
        most = float(np.quantile(gain, 1 - RARE))
        bound = SHIFT_NATS - np.log(stated or ALONE)
        larger = any(one_signed(values, other, noise) > 0 for noise in (SHIFT_NATS / 10, HEALTHY_NATS / 2))
        alone = (values == 0) & (other < np.log(0.99))
        least = float(np.exp(np.quantile(other[alone], RARE))) if alone.any() else 0.0
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
