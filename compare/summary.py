"""Put a comparison into words: the summary, what was not compared, and the commands to run next."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from probe.compare.align import RowCoverage
from probe.compare.judge import SUSPECT_RISE
from probe.compare.locate import first_divergent
from probe.compare.match import Matching
from probe.compare.measure import Measured
from probe.compare.names.base import LOGITS
from probe.store.reader import Dump


@dataclass
class Evidence:
    """Everything a summary rests on."""

    a: Dump
    b: Dump
    verdict: str
    gates: list[dict[str, Any]]
    matching: Matching
    measured: list[Measured]
    rows: RowCoverage
    tokens: dict[str, Any]
    first: dict[str, Any] | None
    tensor_share: float
    min_coverage: float


def summary(e: Evidence) -> str:
    """Return one paragraph: what was found, on what evidence, and what to do or to keep in mind."""
    parts = [_opening(e), *_failed_gates(e), *_modules(e), *_tokens(e), *_warned_gates(e)]
    return " ".join(part for part in parts if part)


def _opening(e: Evidence) -> str:
    pair = f"{_name(e.a, 'a')} and {_name(e.b, 'b')}"
    words = [entry.judgement.verdict for entry in e.measured]
    if e.verdict == "consistent" and words and set(words) == {"identical"}:
        return f"{pair} are identical: every value of all {len(words)} compared tensors has the same bits."
    if e.verdict == "consistent":
        return f"{pair} agree: what differs is rounding."
    if e.verdict == "suspect":
        return f"{pair} differ by more than rounding is expected to explain, but not clearly."
    if e.verdict == "divergent":
        return f"{pair} do not compute the same thing."
    return f"{pair} cannot be judged: {_shortfall(e)}."


def _shortfall(e: Evidence) -> str:
    if not e.measured and not e.tokens["compared"]:
        return "no tensor and no log-prob is on both sides"
    shares = f"{e.tensor_share:.0%} of the tensors and {e.rows.covered:.0%} of the rows"
    return f"only {shares} could be compared, less than the {e.min_coverage:.0%} asked for"


def _name(dump: Dump, side: str) -> str:
    engine = dump.manifest.get("engine") or {}
    words = [str(engine.get("name") or ""), str(engine.get("version") or ""), str(dump.manifest.get("dtype") or "")]
    return f"{dump.stage or 'dump'} {side} ({' '.join(word for word in words if word)})"


def _failed_gates(e: Evidence) -> list[str]:
    return [f"The {g['name']} gate fails: {g['detail']}." for g in e.gates if g["status"] == "fail"]


def _warned_gates(e: Evidence) -> list[str]:
    warned = [f"{g['name']} ({g['detail']})" for g in e.gates if g["status"] == "warn" and g["name"] != "environment"]
    return [f"Warnings: {'; '.join(warned)}."] if warned else []


def _modules(e: Evidence) -> list[str]:
    compared = [entry for entry in e.measured if entry.metrics is not None]
    if not compared:
        return []
    first = first_divergent(compared)
    if first is not None and e.first is not None:
        return [_divergence(e, first)]
    words = [entry.judgement.verdict for entry in compared]
    if set(words) == {"identical"}:
        return []
    top = max(compared, key=lambda entry: entry.judgement.ratio)
    counts = ", ".join(f"{words.count(w)} {w}" for w in ("identical", "consistent", "suspect") if w in words)
    assert top.metrics is not None
    return [
        f"Of {len(compared)} tensors {counts}; the largest difference is {top.match.label} with relative L2 "
        f"{top.metrics.rel_l2:.1e}, {top.judgement.ratio:.2g} times the modelled noise floor "
        f"(up to {SUSPECT_RISE:g} raise no suspicion)."
    ]


def _divergence(e: Evidence, first: Measured) -> str:
    assert e.first is not None and first.metrics is not None
    before = [entry for entry in e.measured if entry.order < first.order and entry.metrics is not None]
    quiet = sum(entry.judgement.verdict in ("identical", "consistent") for entry in before)
    words = [entry.judgement.verdict for entry in e.measured]
    place = f"{e.first['name']} {e.first['slot']}"
    if e.first["position"] is not None:
        place += f", first at position {e.first['position']} of sequence {e.first['sequence']}"
    size = ""
    if not first.metrics.nonfinite_mismatch:
        size = f"relative L2 {first.metrics.rel_l2:.1e} where rounding explains {first.judgement.floor:.1e}, "
    return (
        f"They part in {place}: {size}{first.judgement.reason}. {quiet} of {len(before)} tensors before it agree; "
        f"{words.count('divergent')} of {len(words)} diverge in all: look at this module before those after it."
    )


def _tokens(e: Evidence) -> list[str]:
    if not e.tokens["compared"]:
        return []
    return [
        f"Log-probs of {e.tokens['compared']} response tokens differ by {e.tokens['mean_abs_logprob_diff']:.1e} on "
        f"average and {e.tokens['max_abs_logprob_diff']:.1e} at most."
    ]


# -- what was not compared --------------------------------------------------------------------------------------------


def not_compared(e: Evidence) -> list[str]:
    """Return one sentence per kind of thing that this comparison did not see."""
    sentences = [
        f"{side} is incomplete (its run was killed or is still going): only what had reached the disk was read"
        for side, dump in (("a", e.a), ("b", e.b))
        if not dump.complete
    ]
    sentences += _unseen_rows(e)
    sentences += _unseen_tensors(e)
    if not e.tokens["compared"]:
        sentences.append("log-probs: no response token has one on both sides")
    if not e.measured:
        sentences.append("module tensors: none is stored on both sides")
    return sentences


def _unseen_rows(e: Evidence) -> list[str]:
    sides = [side for side, dump in (("a", e.a), ("b", e.b)) if dump.manifest.get("prompts_only")]
    sentences = []
    if sides:
        sentences.append(f"response rows (decode): {' and '.join(sides)} stored prompt rows only")
    if e.rows.beyond_prefix:
        sentences.append(f"{e.rows.beyond_prefix} rows after the point where the two sides' tokens part")
    lone_a, lone_b = e.rows.only_a, e.rows.only_b
    if lone_a + lone_b > e.rows.beyond_prefix + e.rows.prompts_only:
        sentences.append(f"{lone_a} rows that only a stored and {lone_b} that only b stored")
    if e.rows.not_executed:
        sentences.append(
            f"{e.rows.not_executed} rows of last generated tokens: not executed by the side that generated them"
        )
    logits = next((m for m in e.measured if m.match.label == LOGITS and m.join is not None), None)
    if logits is not None and logits.join is not None and len(logits.join.index_a) < e.rows.joined:
        sentences.append(f"logits of {e.rows.joined - len(logits.join.index_a)} of {e.rows.joined} rows: not computed")
    return sentences


def _unseen_tensors(e: Evidence) -> list[str]:
    sentences = []
    for reason in dict.fromkeys(entry.reason for entry in e.matching.unavailable):
        entries = [entry for entry in e.matching.unavailable if entry.reason == reason]
        sentences.append(f"{_tensors(len(entries))} unavailable in {entries[0].side} (as {entries[0].label}): {reason}")
    for side, only in (("a", e.matching.only_a), ("b", e.matching.only_b)):
        if only:
            sentences.append(f"{_tensors(len(only))} that only {side} has (first {only[0].label})")
    failed = [entry for entry in e.measured if entry.metrics is None]
    if failed:
        first = failed[0]
        text = first.judgement.reason.rstrip(".")
        sentences.append(f"{_tensors(len(failed))} that could not be paired (first {first.match.label}: {text})")
    return sentences


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def next_commands(e: Evidence) -> list[str]:
    """Return commands to paste, the most useful one first."""
    a, b = shlex.quote(str(e.a.path)), shlex.quote(str(e.b.path))
    first = first_divergent(e.measured)
    if first is None:
        return [f"probe show {a}", f"probe show {b}"]
    commands = []
    for path, source, dump in ((a, first.match.source_a, e.a), (b, first.match.source_b, e.b)):
        module = _native_module(source.native[0], dump)
        commands.append(f"probe show {path} {shlex.quote(module)}")
    return [*commands, f"probe compare {a} {b} --report html"]


def _native_module(label: str, dump: Dump) -> str:
    """Return the dump's own spelling of the module of a stripped label."""
    stripped = label.rpartition(":")[0]
    return next((module for module, _ in dump.tensors if module.endswith(stripped)), stripped)
