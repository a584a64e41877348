"""What sources declare of their log-probs, held against each other and against logits that should give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from probe.compare.gates import GateFinding
from probe.compare.sampling_fits import SAME_TEMPERATURE, Fit, Rows, explain, processed_scores, scores
from probe.compare.tokens.batch import Origin
from probe.sampling import Semantics

SUBJECT = "log-probs"
LOST_NATS = 1e-3
"""Mean disagreement (nats) of an engine's log-probs with its own fp32 logits that is a fault: both come from the same
numbers, so that healthy ones lie within 1e-5 (fp32 sums over the vocabulary); coarser logits allow their rounding."""
LOST_ROUNDINGS = 4.0
"""Roundings of those logits (sampling_fits.one_rounding) that the mean disagreement may reach: an engine may compute
its log-probs from logits before they were rounded, from ones rounded once more, and round them."""

CAUSES = {"temperature": "temperature-semantics", "top_p": "renormalised-top-p"}
"""Which cause a distribution has that differs in this."""
WORDS = {"temperature": "temperature {:g}", "top_p": "top-p {:g}"}


def in_words(semantics: Semantics) -> str:
    """Return what log-probs are of, as a clause."""
    if semantics == Semantics():
        return "of the untouched logits (temperature 1)"
    return f"processed with temperature {semantics.temperature:g} and top-p {semantics.top_p:g}"


def distinct(x: Semantics, y: Semantics) -> list[str]:
    """Return in what two distributions differ: names of CAUSES."""
    return [name for name in CAUSES if getattr(x, name) != getattr(y, name)]


def declared_apart(origins: Sequence[Origin]) -> list[GateFinding]:
    """Return one finding for each thing in which both sides' declared distributions differ: temperature, top-p."""
    a, b = (origin.meaning for origin in origins)
    if a is None or b is None:
        return []
    side = "a" if b == Semantics() else "b" if a == Semantics() else "unknown"
    found = []
    for name in distinct(a, b):
        values = [getattr(a, name), getattr(b, name)]
        figures: dict[str, float | int | str] = {f"{name} {letter}": value for letter, value in zip("ab", values)}
        said = " and ".join(WORDS[name].format(value) for value in values)
        text = f"the log-probs are of different distributions: {said} (a is {in_words(a)}, b {in_words(b)})"
        found.append(GateFinding(CAUSES[name], SUBJECT, side, text, figures))
    return found


def unfit_for_ratio(origins: Sequence[Origin]) -> list[GateFinding]:
    """Return what leaves the comparison valid but not a PPO ratio: raw log-probs of tokens drawn from another
    distribution than the untouched logits, and processed ones that were set aside for recomputed ones.
    """
    found = []
    for letter, origin in zip("ab", origins):
        drawn, aside = origin.sampled_at or Semantics(), origin.set_aside or Semantics()
        for name in distinct(aside, Semantics()):
            value = getattr(aside, name)
            text = (
                f"{letter}'s processed log-probs ({WORDS[name].format(value)}) were set aside for ones recomputed from "
                "its logits: the other side's are of the untouched logits, and a PPO ratio of the two is not 1"
            )
            found.append(GateFinding(CAUSES[name], SUBJECT, letter, text, {name: value}))
        # of one dump b is what its logits say: it was not returned by an engine that could have processed it
        own = letter == "b" and origin.path == origins[0].path
        if drawn != Semantics() and aside == Semantics() and origin.meaning == Semantics() and not own:
            figures: dict[str, float | int | str] = {"temperature": drawn.temperature, "top_p": drawn.top_p}
            text = (
                f"{letter} sampled with temperature {drawn.temperature:g} and top-p {drawn.top_p:g} but returned raw "
                "log-probs: a PPO ratio over its samples needs processed_logprobs"
            )
            found.append(GateFinding("raw-logprobs", SUBJECT, letter, text, figures))
    return found


def raw_though_drawn(name: str, rows: Rows, drawn: Semantics) -> Iterator[GateFinding]:
    """Yield a finding where logits prove log-probs raw whose tokens were ``drawn`` from another distribution.

    For log-probs of which nothing declares what they are of: those of a file that says what the rollout sampled with.
    """
    raw, stated = scores(rows.logits, rows.tokens), processed_scores(rows.logits, rows.tokens, drawn)
    lies, expected = (float(np.abs(rows.logprobs - values).mean()) for values in (raw, stated))
    if lies <= rows.tolerance and lies < expected / 2 and expected > rows.tolerance:
        text = (
            f"{name} sampled with temperature {drawn.temperature:g} and top-p {drawn.top_p:g}, but its log-probs are "
            "those of the untouched logits: a PPO ratio over its samples needs processed_logprobs"
        )
        figures: dict[str, float | int | str] = {"temperature": drawn.temperature, "top_p": drawn.top_p}
        yield GateFinding("raw-logprobs", SUBJECT, name, text, {**figures, "nats": expected})


def held_against(name: str, rows: Rows, said: Semantics | None, drawn: Semantics) -> Iterator[GateFinding]:
    """Yield a finding where a side's log-probs are not what it declares, given its own logits.

    ``name``: the side; ``said``: what it declares, None where nothing does; ``drawn``: the distribution that the run
    says it drew from, which its log-probs may be of.
    """
    declared = said or Semantics()
    apart = float(np.abs(rows.logprobs - scores(rows.logits, rows.tokens)).mean())
    if declared != Semantics():
        stated = processed_scores(rows.logits, rows.tokens, declared)
        expected = float(np.abs(stated - scores(rows.logits, rows.tokens)).mean())
        if float(np.abs(rows.logprobs - stated).mean()) <= _allowed(rows) and apart > rows.tolerance:
            return
        if apart <= rows.tolerance:
            if expected > 4 * rows.tolerance:
                text = f"{name} declares log-probs {in_words(declared)}, but they are those of the untouched logits"
                yield GateFinding("raw-logprobs", SUBJECT, name, text, {"nats": expected})
            return
    elif apart <= rows.tolerance:
        yield from _lost(name, rows, apart)
        return
    fit = explain(rows, tuple({declared.temperature, drawn.temperature} - {1.0}))
    if fit is not None:
        yield from misdeclared(name, fit, said, apart, drawn=drawn)
    elif declared.top_p == 1:
        yield from _lost(name, rows, apart)


def _allowed(rows: Rows) -> float:
    """Return how far (nats, mean over tokens) rounding may carry log-probs from those of their own logits."""
    return max(LOST_NATS, LOST_ROUNDINGS * rows.rounding)


def _lost(name: str, rows: Rows, apart: float) -> Iterator[GateFinding]:
    """Yield a finding where log-probs do not come from the logits and no other distribution explains them."""
    if apart > _allowed(rows):
        text = (
            f"the log-probs of {name} lie {apart:.2g} nats from those of its own logits (rounding allows "
            f"{_allowed(rows):.2g}), and no temperature or top-p explains it"
        )
        yield GateFinding("logprob-source", SUBJECT, name, text, {"nats": apart, "rounding": rows.rounding})


def misdeclared(
    name: str, fit: Fit, said: Semantics | None, apart: float, of: str = "", drawn: Semantics | None = None
) -> Iterator[GateFinding]:
    """Yield one finding for each part of a fitted distribution, unless it is the one that the run declares (``said``,
    None where nothing does). ``of``: whose logits were fitted, where they are the other side's.
    """
    if _as_declared(fit.figures, said or Semantics()):
        return
    as_drawn = drawn is not None and drawn != Semantics() and _as_declared(fit.figures, drawn)
    sampled = "as its tokens were sampled and " if as_drawn else ""
    against = f"{sampled}unlike those of the other side" if said is None else f"not as declared {_declared(said)}"
    for cause, words in fit.parts:
        text = f"the log-probs of {name} are {words}{of}, {against}"
        yield GateFinding(cause, SUBJECT, name, text, {**fit.figures, "nats": apart})


def _as_declared(figures: dict[str, float], declared: Semantics) -> bool:
    """Tell whether a fit is the distribution that the run declares."""
    if "factor" in figures:
        return False
    same = abs(figures.get("temperature", 1.0) / declared.temperature - 1) <= SAME_TEMPERATURE
    kept = "top_p" in figures or "top_k" in figures
    return same and kept == (declared.top_p < 1)


def _declared(semantics: Semantics) -> str:
    if semantics == Semantics():
        return "of the untouched logits"
    return f"with temperature {semantics.temperature:g} and top-p {semantics.top_p:g}"
