"""Put a comparison into words: the summary, what was not compared, and the commands to run next."""

from __future__ import annotations

import math
import shlex

from probe.compare.coverage import FewerRows
from probe.compare.evidence import Evidence
from probe.compare.gates import WEIGHTS_UNSEEN
from probe.compare.judge import SUSPECT_RISE, TOKEN_SUSPECT, TOKEN_WORST
from probe.compare.locate.first import first_divergent
from probe.compare.match import UNKNOWN, Entry
from probe.compare.measure import Measured
from probe.compare.names.canonical import LOGITS
from probe.compare.report.model import ROW_REASONS, counted, headline_sentence
from probe.store.reader import Dump

OPENINGS = {
    "consistent": "agree: what differs is rounding",
    "suspect": "differ by more than rounding is expected to explain, but not clearly",
    "divergent": "do not compute the same thing",
    "incomparable": "cannot be judged",
}

ROW_GAPS = {
    "other_sequence": "of sequences on one side only",
    "other_version": "of another weight version",
    "prefix_cache": "not executed (prefix cache)",
    "beyond_prefix": "after the tokens part",
    "part_of_shards": "without all their shards",
    "not_stored": "stored by one side only",
}
"""Reasons that the headline counts (:data:`probe.compare.report.model.ROW_REASONS`), in its words."""

SILENT = ("padding", "computed_again", "prompts_only", "part_of_shards")
"""Reasons that need no sentence: nothing is lost, or another sentence says it."""


def headline(e: Evidence) -> str:
    """Return the verdict line: the verdict word, what it rests on, and in a few words what was not compared."""
    return "; ".join([f"{e.verdict}{_basis(e)}", *_gaps(e)])


def _basis(e: Evidence) -> str:
    if e.verdict == "incomparable":
        return f": {_shortfall(e)}"
    words = [entry.judgement.verdict for entry in e.measured if entry.metrics is not None]
    if not words:
        return f" on {e.tokens['compared']} log-probs" if e.tokens["compared"] else ""
    rows = "prompt rows of " if any(dump.manifest.get("prompts_only") for dump in (e.a, e.b)) else ""
    flagged = words.count(e.verdict) if e.verdict in ("suspect", "divergent") else 0
    return f" in {flagged} of {_tensors(len(words))}" if flagged else f" on {rows}{_tensors(len(words))}"


def _gaps(e: Evidence) -> list[str]:
    """Return what was not compared, each in a few words; :func:`not_compared` says it in full."""
    gaps = ["decode not seen"] if any(d.manifest.get("prompts_only") for d in (e.a, e.b)) else []
    if e.matching.unavailable:
        labels = [entry.label for entry in e.matching.unavailable]
        kind = "norm" if all("norm" in label for label in labels) else "tensor"
        why = "fused" if all("fuse" in entry.reason for entry in e.matching.unavailable) else "unavailable"
        gaps.append(f"{counted(len(labels), kind)} not comparable ({why})")
    proposed = sum(entry.match.proposal is not None for entry in e.measured)
    gaps += [f"{counted(proposed, 'pair')} only proposed"] if proposed else []
    figures = [entry.metrics for entry in e.measured if entry.metrics is not None]
    zero = sum(not found.norm_x and not found.norm_y for found in figures)
    gaps += [f"{_tensors(zero)} of zeros only"] if zero else []
    stated = sum(bool(entry.match.source_a.stated or entry.match.source_b.stated) for entry in e.measured)
    gaps += [f"{counted(stated, 'pair')} as --map states"] if stated else []
    failed = sum(entry.metrics is None for entry in e.measured)
    gaps += [f"{_tensors(failed)} could not be paired"] if failed else []
    only = {"a": e.matching.only_a, "b": e.matching.only_b}
    gaps += [f"{_tensors(len(entries))} only in {side}" for side, entries in only.items() if entries]
    gaps += [
        f"{counted(e.rows.count(reason), 'row')} {words}" for reason, words in ROW_GAPS.items() if e.rows.count(reason)
    ]
    part = sum(entry.label != LOGITS for entry in e.fewer)
    gaps += [f"{_tensors(part)} on part of the rows"] if part else []
    unknown = sum(len(entries) for entries in _unknown(e).values())
    gaps += [f"{_tensors(unknown)} of unknown name"] if unknown else []
    lone = sum(e.tokens["lone"].values())
    gaps += [f"{counted(lone, 'log-prob')} on one side only"] if lone else []
    gaps += ["weights not compared"] if _unseen_weights(e) else []
    for side, broken in _broken_weights(e).items():
        gaps += [f"{counted(len(broken), 'parameter')} of {side} without all shards"] if broken else []
    gaps += [f"{side} incomplete" for side, dump in (("a", e.a), ("b", e.b)) if not dump.complete]
    gaps += [f"first step of {side} only" for side, dump in (("a", e.a), ("b", e.b)) if dump.unread]
    return gaps


def _unknown(e: Evidence) -> dict[str, list[Entry]]:
    """Return for each side the tensors that no table of names knows."""
    listed = {"a": e.matching.auxiliary_a, "b": e.matching.auxiliary_b}
    return {side: [entry for entry in entries if entry.reason.startswith(UNKNOWN)] for side, entries in listed.items()}


def _unseen_weights(e: Evidence) -> list[str]:
    """Return why no weights were compared, if none were."""
    return [g.detail for g in e.gates if g.name == "weights" and g.detail.endswith(WEIGHTS_UNSEEN)]


def _broken_weights(e: Evidence) -> dict[str, dict[str, str]]:
    """Return for each side the parameters of which a shard is in no file, and which."""
    sides = {"a": e.a, "b": e.b}
    return {
        side: {name: joined.gap for name, joined in dump.joined_weights.items() if joined.gap}
        for side, dump in sides.items()
    }


def summary(e: Evidence) -> str:
    """Return one paragraph: the headline, what was found, on what evidence, and what to do or to keep in mind."""
    opening = [headline_sentence(headline(e)), _opening(e)]
    return " ".join(
        part for part in (*opening, *_failed_gates(e), *_modules(e), *_tokens(e), *_warned_gates(e)) if part
    )


def _opening(e: Evidence) -> str:
    pair = f"{_name(e.a, 'a')} and {_name(e.b, 'b')}"
    words = [entry.judgement.verdict for entry in e.measured]
    if e.verdict == "consistent" and words and set(words) == {"identical"}:
        return f"{pair} are identical: every value of all {len(words)} compared tensors has the same bits."
    return f"{pair} {OPENINGS[e.verdict]}."


def _shortfall(e: Evidence) -> str:
    if not e.measured and not e.tokens["compared"]:
        return "no tensor and no log-prob is on both sides"
    shares = {"tensors": e.tensor_share, "rows": e.rows.covered}
    # rounded down: 99.96 % must not read as 100 %
    short = [
        f"{math.floor(share * 1000) / 10:g}% of the {what}" for what, share in shares.items() if share < e.min_coverage
    ]
    return f"only {' and '.join(short)} could be compared, less than the {e.min_coverage:.0%} asked for"


def _name(dump: Dump, side: str) -> str:
    engine = dump.manifest.get("engine") or {}
    words = [str(engine.get("name") or ""), str(engine.get("version") or ""), str(dump.manifest.get("dtype") or "")]
    return f"{dump.stage or 'dump'} {side} ({' '.join(word for word in words if word)})"


def _failed_gates(e: Evidence) -> list[str]:
    return [f"The {g.name} gate fails: {g.detail}." for g in e.gates if g.status == "fail"]


def _warned_gates(e: Evidence) -> list[str]:
    warned = [f"{g.name} ({g.detail})" for g in e.gates if g.status == "warn" and g.name != "environment"]
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
    mean, worst = e.tokens["mean_abs_logprob_diff"], e.tokens["max_abs_logprob_diff"]
    words = f"differ by {mean:.1e} on average and {worst:.1e} at most" if worst else "are equal"
    return [f"Log-probs of {e.tokens['compared']} response tokens {words}.", *_unexplained(e)]


def _unexplained(e: Evidence) -> list[str]:
    """Say where log-probs are off although the logits that they come from are not."""
    mean, worst = e.tokens["unexplained_mean"], e.tokens["unexplained_max"]
    if not worst or (mean <= TOKEN_SUSPECT and worst <= TOKEN_WORST):
        return []
    return [
        f"The logits account for all but {mean:.1e} on average and {worst:.1e} at most: log-probs are assigned to "
        "wrong tokens, or are of another distribution."
    ]


# -- what was not compared --------------------------------------------------------------------------------------------


def _not_whole(side: str, dump: Dump) -> list[str]:
    """Say which rows of a side's tensors some rank's file lacks."""
    partly = [info for info in dump.tensors.values() if info.lacking and info.rows]
    if not partly:
        return []
    first = f"{partly[0].module}:{partly[0].slot}"
    rows = sum(info.left_out for info in partly)
    return [f"{rows} rows of {_tensors(len(partly))} of {side} (first {first}): {partly[0].lacking}"]


def not_compared(e: Evidence) -> list[str]:
    """Return one sentence per kind of thing that this comparison did not see."""
    sentences = [
        f"{side} is incomplete ({'; '.join(dump.lost)}): only what had reached the disk was read"
        for side, dump in (("a", e.a), ("b", e.b))
        if not dump.complete
    ]
    sentences += [
        f"{counted(len(dump.unread), 'later step')} of {side}: name a step's folder to compare it ({dump.unread[0]})"
        for side, dump in (("a", e.a), ("b", e.b))
        if dump.unread
    ]
    sentences += _unseen_rows(e)
    sentences += _unseen_tensors(e)
    if not e.tokens["compared"]:
        sentences.append("log-probs: no response token has one on both sides")
    for side, count in e.tokens["lone"].items():
        sentences += [f"{counted(count, 'response token')}: only {side} has a finite log-prob of it"] if count else []
    sentences += _unseen_weights(e)
    for side, broken in _broken_weights(e).items():
        for name, gap in list(broken.items())[:1]:
            sentences.append(f"{counted(len(broken), 'parameter')} of {side} (first {name}): {gap}")
    if not e.measured:
        sentences.append("module tensors: none is stored on both sides")
    return sentences


def _unseen_rows(e: Evidence) -> list[str]:
    sides = [side for side, dump in (("a", e.a), ("b", e.b)) if dump.manifest.get("prompts_only")]
    sentences = [f"response rows (decode): {' and '.join(sides)} stored prompt rows only"] if sides else []
    for side, counts in (("a", e.rows.a), ("b", e.rows.b)):
        sentences += [
            f"{counted(counts[reason], 'row')} of {side}: {words}"
            for reason, words in ROW_REASONS.items()
            if counts[reason] and reason not in SILENT
        ]
    for side, again in zip("ab", e.rows.recomputed):
        if again.differing:
            rows = f"{len(again.differing)} of {counted(len(again.again), 'row')}"
            problem = f"{rows} that {side} computed more than once came out with other bits"
            sentences.append(f"{problem}: only the last computation was compared")
    return sentences + _fewer_rows(e)


def _fewer_rows(e: Evidence) -> list[str]:
    """Return one sentence per group of tensors that lack the same number of rows."""
    groups: dict[tuple[int, int, int], list[FewerRows]] = {}
    for entry in e.fewer:
        groups.setdefault((entry.missing, entry.lacking_a, entry.lacking_b), []).append(entry)
    sentences = []
    for (missing, *lacking), entries in groups.items():
        who = " and ".join(f"{side} lacks {count}" for side, count in zip("ab", lacking) if count)
        more = f" and {len(entries) - 1} more tensors" if len(entries) > 1 else ""
        sentences.append(f"{entries[0].label}{more}: {missing} of {e.rows.joined} rows ({who or 'in no common row'})")
    return sentences


def _unseen_tensors(e: Evidence) -> list[str]:
    sentences = [sentence for side, dump in (("a", e.a), ("b", e.b)) for sentence in _not_whole(side, dump)]
    for reason in dict.fromkeys(entry.reason for entry in e.matching.unavailable):
        entries = [entry for entry in e.matching.unavailable if entry.reason == reason]
        sentences.append(f"{_tensors(len(entries))} unavailable in {entries[0].side} (as {entries[0].label}): {reason}")
    for side, only in (("a", e.matching.only_a), ("b", e.matching.only_b)):
        if only:
            sentences.append(f"{_tensors(len(only))} that only {side} has (first {only[0].label})")
    for side, unknown in _unknown(e).items():
        if unknown:
            first = unknown[0].label
            sentences.append(f"{_tensors(len(unknown))} of {side} that no table of names knows (first {first})")
    failed = [entry for entry in e.measured if entry.metrics is None]
    if failed:
        text = failed[0].judgement.reason.rstrip(".")
        sentences.append(f"{_tensors(len(failed))} that could not be paired (first {failed[0].match.label}: {text})")
    return sentences


def _tensors(count: int) -> str:
    return counted(count, "tensor")


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
