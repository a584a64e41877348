"""The sampling gate: what the log-probs of both sides mean, as the runs declare it and as the numbers show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from probe.compare.align import RowAligner
from probe.compare.gates import SHOWN, Gate, GateFinding
from probe.compare.judge import TOKEN_SUSPECT
from probe.compare.report.model import counted
from probe.compare.sampling_fits import (
    FEW,
    SHIFT_NATS,
    SHIFT_SHARE,
    explain,
    logit_rows,
    one_signed,
    shift_between,
    zero_filled,
)
from probe.compare.sequences import SequenceJoin, sequence_labels
from probe.compare.side import Side
from probe.compare.tokens.batch import infinite_tokens, not_finite_findings, origin_of
from probe.compare.tokens.declared import SUBJECT, declared_apart, held_against, in_words, misdeclared, unfit_for_ratio
from probe.compare.tokens.fills import OTHER, zero_filled_finding
from probe.compare.tokens.join import JoinedTokens, join_tokens
from probe.compare.tokens.meaning import SOURCES, Sources, choose_sources
from probe.compare.tokens.semantics import multiple_finding
from probe.sampling import Semantics, drawn_from, engine_semantics
from probe.store.reader import Dump

OTHER_DISTRIBUTION = ("temperature-semantics", "renormalised-top-p")
"""Causes that leave the logits comparable and a PPO ratio of the two sides' log-probs wrong: suspect, not divergent."""


def sampling_gate(a: Side, b: Side, join: SequenceJoin) -> Gate:
    """Compare what the log-probs mean: temperature, top-p, raw or processed, off by one token, filled with zeros.

    The declared meaning is checked against the numbers wherever logits are stored. Fails where the log-probs of a side
    are not what it declares, or where both sides' belong to different distributions; warns about what leaves the
    comparison valid but not a PPO ratio.
    """
    sides = {"a": a, "b": b}
    findings = [*_zeros(a, b, join), *(f for name, side in sides.items() for f in _against_own_logits(name, side))]
    sources = choose_sources(a.dump, b.dump)
    if sources is None:
        if findings:
            return _failed(findings)
        return Gate("sampling", "skipped", "a side holds no log-probs of response tokens")
    tokens = join_tokens(a.dump, b.dump, RowAligner(join, a.dump.sequences, b.dump.sequences), sources)
    findings = [] if _of_the_model(findings, tokens) else findings
    infinite = not_finite_findings(infinite_tokens(tokens, join.pairs))
    findings = [*infinite, *(findings or _between(sides, sources, tokens))]
    if findings:
        return _failed(findings)
    origins = origin_of(a.dump, sources.a), origin_of(b.dump, sources.b)
    if apart := declared_apart(origins):
        gate = _failed(apart)
        return replace(gate, detail=f"{gate.detail}; set one logprobs_mode and temperature on both sides")
    warned = unfit_for_ratio(origins)
    copies = _copies(a.dump, b.dump, sources, tokens)
    if warned:
        text = "; ".join([*(finding.text for finding in warned), *copies])
        return Gate("sampling", "warn", text, tuple(warned))
    text = f"both sides' log-probs are {in_words(origins[0].meaning or Semantics())}"
    return Gate("sampling", "pass", "; ".join([text, *copies]))


def _of_the_model(findings: list[GateFinding], tokens: JoinedTokens) -> bool:
    """Tell whether both sides' log-probs are of scaled logits and agree: the model scales them after the head.

    Granite's logits_scaling and Cohere's logit_scale are applied to what lm_head returns.
    """
    causes = sorted((finding.side, finding.cause) for finding in findings)
    alike = causes == [("a", "temperature-semantics"), ("b", "temperature-semantics")]
    return alike and len(tokens.a) > 0 and float(np.mean(np.abs(tokens.a - tokens.b))) <= TOKEN_SUSPECT


def _failed(findings: list[GateFinding]) -> Gate:
    more = f" and {len(findings) - SHOWN} more" if len(findings) > SHOWN else ""
    text = "; ".join(finding.text for finding in findings[:SHOWN]) + more
    return Gate("sampling", "fail", text, tuple(findings))


def _copies(a: Dump, b: Dump, sources: Sources, tokens: JoinedTokens) -> list[str]:
    """Note log-probs of two engines that are equal to the last bit: no two compute so, one side's were copied."""
    equal = len(tokens.a) >= FEW and np.array_equal(tokens.a, tokens.b) and bool(np.any(tokens.a != 0))
    if not equal or a.engine == b.engine or "recomputed" in (sources.a, sources.b):
        return []
    note = f"the log-probs of {counted(len(tokens.a), 'token')} have the same bits on both sides"
    return [f"{note}: one side's are a copy of the other's, so that their difference says nothing"]


# -- what the numbers show --------------------------------------------------------------------------------------------


def shifted_by(dump: Dump) -> int:
    """Return +1 or -1 when the engine's log-probs fit those of its own logits only after moving by one token, else 0.

    Needs both columns on at least 8 response tokens, so that chance does not decide.
    """
    table = dump.tokens[dump.tokens["response"]]
    columns = table[SOURCES["engine"]], table[SOURCES["recomputed"]]
    return shift_between(table["sequence"], table["position"], *columns)


def _shift_finding(name: str, shift: int, whose: str) -> GateFinding:
    text = f"the log-probs of {name} fit {whose} only when moved by {shift:+d} token"
    side = name if name in OTHER else "unknown"
    return GateFinding(
        "logprob-shift", SUBJECT, side, f"{text}: they are assigned to the wrong tokens", {"shift": shift}
    )


def _against_own_logits(name: str, side: Side) -> Iterator[GateFinding]:
    """Yield what an engine's log-probs are, where its own logits say something else than it declares."""
    shift = shifted_by(side.dump)
    if shift:
        yield _shift_finding(name, shift, "its own logits")
        return
    table = side.dump.tokens[side.dump.tokens["response"]]
    engine, own = table[SOURCES["engine"]], table[SOURCES["recomputed"]]
    known = np.isfinite(engine) & np.isfinite(own) & ~zero_filled(engine, own)
    if known.sum() < FEW:
        return
    declared = engine_semantics(side.dump.manifest)
    apart = float(np.abs(engine - own)[known].mean())
    if apart < 1e-3 and declared == Semantics():
        return
    rows = logit_rows(side, table["sequence"][known], table["position"][known], engine[known])
    if rows is not None:
        yield from held_against(name, rows, declared, drawn_from(side.dump.manifest.get("sampling") or {}))
    elif apart > SHIFT_NATS and declared == Semantics():
        text = f"the log-probs of {name} lie {apart:.2g} nats from those of its own logits"
        yield GateFinding("logprob-source", SUBJECT, name, text, {"nats": apart})


def _zeros(a: Side, b: Side, join: SequenceJoin) -> Iterator[GateFinding]:
    """Yield sequences whose log-probs were never filled in: exact zeros where the token was not certain."""
    partner = {pair.a: pair.b for pair in join.pairs}
    for name, side, other, paired in (("a", a, b, partner), ("b", b, a, {v: k for k, v in partner.items()})):
        table = side.dump.tokens[side.dump.tokens["response"]]
        values, own = table[SOURCES["engine"]], table[SOURCES["recomputed"]]
        reference = np.where(np.isfinite(own), own, _others(other.dump, table, paired))
        zero = zero_filled(values, reference)
        labels, sequences, first = sequence_labels(side.dump.sequences), 0, ""
        for number in np.unique(table["sequence"][zero]).tolist():
            mine = table["sequence"] == number
            known = bool(np.isfinite(reference[mine & zero]).any())
            if zero[mine].sum() >= FEW // 2 and (known or zero[mine].all()):
                sequences += 1
                first = first or labels[number]
        if sequences:
            yield zero_filled_finding(name, int(zero.sum()), sequences, first)


def _others(dump: Dump, table: np.ndarray, paired: dict[int, int]) -> np.ndarray:
    """Return the other side's log-probs of a side's tokens, NaN where it has none."""
    column = np.where(
        np.isfinite(dump.tokens[SOURCES["recomputed"]]),
        dump.tokens[SOURCES["recomputed"]],
        dump.tokens[SOURCES["engine"]],
    )
    known = {(s, p): v for s, p, v in zip(dump.tokens["sequence"].tolist(), dump.tokens["position"].tolist(), column)}
    cells = zip(table["sequence"].tolist(), table["position"].tolist())
    return np.array([known.get((paired.get(s, -1), p), np.nan) for s, p in cells], np.float64)


def _between(sides: dict[str, Side], sources: Sources, tokens: JoinedTokens) -> Iterator[GateFinding]:
    """Yield what sets both sides' log-probs apart where no side's own logits told: a shift, a temperature, a top-p."""
    if len(tokens.a) < FEW or not sources.comparable:
        return
    trusted = [name for name, source in zip("ab", (sources.a, sources.b)) if _is_own(sides[name].dump, source)]
    doubted = OTHER[trusted[0]] if len(trusted) == 1 else ""
    shift = shift_between(tokens.pair, tokens.position, tokens.a, tokens.b)
    if shift:
        moved = -shift if doubted == "b" else shift
        yield _shift_finding(doubted or "one side", moved, "those of the other side")
        return
    apart = float(np.abs(tokens.a - tokens.b).mean())
    if apart < SHIFT_NATS / 10:
        return
    if doubted:
        yield from _against_other_logits(doubted, sides, tokens)
    else:
        yield from _without_logits(sides, tokens)


def _is_own(dump: Dump, source: str) -> bool:
    """Tell whether a side's log-probs are those of its own logits."""
    if source == "recomputed":
        return True
    table = dump.tokens[dump.tokens["response"]]
    gap = np.abs(table[SOURCES["engine"]] - table[SOURCES["recomputed"]])
    gap = gap[np.isfinite(gap)]
    return len(gap) >= FEW and float(gap.mean()) < SHIFT_NATS


def _against_other_logits(name: str, sides: dict[str, Side], tokens: JoinedTokens) -> Iterator[GateFinding]:
    """Yield what a side's log-probs are, given the other side's logits; only what clearly explains the difference."""
    values, other = (tokens.a, tokens.b) if name == "a" else (tokens.b, tokens.a)
    owner = tokens.owners[1 if name == "a" else 0]
    rows = logit_rows(sides[OTHER[name]], owner, tokens.position, values)
    if rows is None:
        return
    declared = engine_semantics(sides[name].dump.manifest)
    fit = explain(rows, (declared.temperature,) if declared.temperature != 1 else ())
    apart = float(np.abs(values - other).mean())
    if fit is not None and fit.left < max(SHIFT_SHARE * apart, rows.tolerance):
        yield from misdeclared(name, fit, declared, apart, f" of {OTHER[name]}")


def _without_logits(sides: dict[str, Side], tokens: JoinedTokens) -> Iterator[GateFinding]:
    """Yield what two columns of log-probs alone show: one is a multiple of the other, or larger throughout."""
    multiple = multiple_finding(tokens.a, tokens.b)
    if multiple is not None:
        yield multiple
        return
    mean = one_signed(tokens.a, tokens.b, SHIFT_NATS / 10)
    name = "a" if mean > 0 else "b"
    top_p = float((sides[name].dump.manifest.get("sampling") or {}).get("top_p") or 1.0)
    bound = float(np.abs(tokens.a - tokens.b).max())
    if mean and top_p < 1 and bound < SHIFT_NATS - np.log(top_p):
        text = f"the log-probs of {name} are larger throughout, by {abs(mean):.2g} nats and at most {bound:.2g}"
        figures = {"mean": abs(mean), "max": bound, "top_p": top_p}
        more = f"{text}: renormalised over the tokens that top-p {top_p:g} kept"
        yield GateFinding("renormalised-top-p", SUBJECT, name, more, figures)
