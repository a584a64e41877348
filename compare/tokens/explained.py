"""Log-prob differences that the tensors do not account for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probe.compare.align import RowAligner, pack
from probe.compare.measure import Measured
from probe.compare.tokens.join import join_tokens
from probe.compare.tokens.meaning import Sources, choose_sources
from probe.sampling import Semantics, engine_semantics
from probe.store.reader import Dump


@dataclass(frozen=True)
class Unexplained:
    """Absolute log-prob differences that the tensors do not account for.

    ``mean``: over all tokens, None where none was compared; ``worst``: of the one that is furthest off, 0 where nothing
    says what its logits allow.
    """

    mean: float | None
    worst: float = 0.0


def unexplained_difference(a: Dump, b: Dump, aligner: RowAligner, logits: Measured | None) -> Unexplained:
    """Return the log-prob differences that the tensors do not already account for.

    ``logits``: the measured logits where they agree within rounding. Then so do the log-probs, however far a model that
    amplifies rounding carries them: logits that differ by d at most give log-probs that differ by 2 d at most. What
    remains is what lies beyond, and how far an engine's own log-probs lie from its own logits.
    """
    sources = choose_sources(a, b)
    tokens = join_tokens(a, b, aligner, sources) if sources else None
    if sources is None or tokens is None or not len(tokens.a):
        return Unexplained(None)
    gap = np.abs(tokens.a - tokens.b)
    if logits is None or logits.metrics is None or logits.join is None:
        return Unexplained(float(gap.mean()))
    scored = pack(tokens.pair, tokens.position - 1)
    known = np.isin(scored, pack(logits.join.pair, logits.join.position))
    gap[known] = np.maximum(gap[known] - _explained(a, b, sources, logits.metrics.max_abs), 0.0)
    gaps = [(gap, known), *((own, np.ones(len(own), bool)) for own in map(_from_own_logits, (a, b)))]
    means = [float(beyond.mean()) for beyond, _ in gaps if len(beyond)]
    return Unexplained(max(means), max(float(beyond[sure].max(initial=0.0)) for beyond, sure in gaps))


def _explained(a: Dump, b: Dump, sources: Sources, max_abs: float) -> float:
    sides = ((a, sources.a), (b, sources.b))
    meanings = [engine_semantics(dump.manifest) for dump, name in sides if name == "engine"] or [Semantics()]
    return explained_by_logits(meanings, max_abs)


def explained_by_logits(meanings: Sequence[Semantics], max_abs: float) -> float:
    """Return how far log-probs may part, in nats, where logits do by ``max_abs`` at most.

    Logits that differ by d give log-probs that differ by 2 d at most. Processed ones are of logits over the
    temperature, and summed over at least the share top-p of the probabilities.
    """
    coldest, least = (min(getattr(meaning, name) for meaning in meanings) for name in ("temperature", "top_p"))
    return 2 * max_abs / coldest - float(np.log(least))


def _from_own_logits(dump: Dump) -> np.ndarray:
    """Return the absolute differences of an engine's raw log-probs from those of the logits it stored.

    A log-prob that is missing is NaN; one of minus infinity, of a token that was sampled, is infinitely far off.
    """
    if engine_semantics(dump.manifest) != Semantics():
        return np.zeros(0)
    tokens = dump.tokens[dump.tokens["response"]]
    with np.errstate(invalid="ignore"):
        gap = np.abs(tokens["logprob"] - tokens["logprob_recomputed"])
    return gap[~np.isnan(gap)]
