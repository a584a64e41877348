"""Put a comparison into words: the summary, what was not compared, and the commands to run next."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from probe.compare.evidence import BROKEN, UNMODELLED, Evidence, Replayed
from probe.compare.gaps import by_statistics, in_brief, tensors
from probe.compare.judge import BANDS, MODELLED, TOKEN_SUSPECT, TOKEN_WORST
from probe.compare.locate.first import first_divergent
from probe.compare.measure import Measured
from probe.compare.names.canonical import layer_of
from probe.compare.report.model import counted, headline_sentence
from probe.store.reader import Dump

_STEP = re.compile(r"step\d+")
OPENINGS = {
    "consistent": "agree: what differs is rounding",
    "suspect": "differ by more than rounding is expected to explain, but not clearly",
    "divergent": "do not compute the same thing",
    "incomparable": "cannot be judged",
}


def headline(e: Evidence) -> str:
    """Return the verdict line: the verdict word, what it rests on, and in a few words what was not compared."""
    return "; ".join([f"{e.verdict}{_basis(e)}", *in_brief(e)])


def _basis(e: Evidence) -> str:
    if e.verdict == "incomparable":
        return f": {_shortfall(e)}"
    words = [entry.judgement.verdict for entry in e.measured if entry.metrics is not None]
    if not words:
        return f" on {e.tokens['compared']} log-probs" if e.tokens["compared"] else ""
    rows = "prompt rows of " if any(dump.manifest.get("prompts_only") for dump in (e.a, e.b)) else ""
    flagged = words.count(e.verdict) if e.verdict in ("suspect", "divergent") else 0
    return f" in {flagged} of {tensors(len(words))}" if flagged else f" on {rows}{tensors(len(words))}"


def summary(e: Evidence) -> str:
    """Return one paragraph: the headline, what was found, on what evidence, and what to do or to keep in mind."""
    found = _cause(e) + _failed_gates(e) + _modules(e) + _replays(e) + _tokens(e) + _warned_gates(e)
    return " ".join(part for part in (headline_sentence(headline(e)), _opening(e), *found) if part)


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
    shares |= {} if e.token_share is None else {"response tokens": e.token_share}
    # rounded down: 99.96 % must not read as 100 %
    short = [
        f"{math.floor(share * 1000) / 10:g}% of the {what}" for what, share in shares.items() if share < e.min_coverage
    ]
    return f"only {' and '.join(short)} could be compared, less than the {e.min_coverage:.0%} asked for"


def _name(dump: Dump, side: str) -> str:
    engine = dump.manifest.get("engine") or {}
    words = [str(engine.get("name") or ""), str(engine.get("version") or ""), str(dump.manifest.get("dtype") or "")]
    return f"{dump.stage or 'dump'} {side} ({' '.join(word for word in words if word)})"


def _cause(e: Evidence) -> list[str]:
    """Name the likeliest cause, where the diagnosis found one in a comparison that is not consistent."""
    if not e.suspects or e.verdict == "consistent":
        return []
    top = e.suspects[0]
    side = {"a": " of a", "b": " of b", "both": " of both sides"}.get(top.side, "")
    also = ", ".join(f"{suspect.cause} ({suspect.name})" for suspect in e.suspects[1:3])
    more = f" Also possible: {also}." if also else ""
    evidence = f": {top.evidence[0].rstrip('.')}" if top.evidence else ""
    return [f"Likeliest cause (confidence {top.confidence:.0%}): {top.cause} in {top.name}{side}{evidence}.{more}"]


def _replays(e: Evidence) -> list[str]:
    """Say what recomputing the modules of each side from their own inputs showed."""
    parts = []
    for side, found in e.replays.by_side.items():
        wrong = [replayed for replayed in found.values() if replayed.verdict == BROKEN]
        worst = max(wrong, key=lambda replayed: replayed.excess, default=None)
        said = worst is None or (e.first is not None and worst.label == f"{e.first['name']}:{e.first['slot']}")
        reach = "" if said or worst is None else f" (worst {worst.label}: {worst.reason})"
        parts += [f"{len(wrong) or 'none'} of {counted(len(found), 'tensor')} of {side}{reach}"] if found else []
    alike = {label for found in e.replays.by_side.values() for label, r in found.items() if r.verdict == UNMODELLED}
    both = f" {tensors(len(alike))} computed alike by both sides, but not as the replay does." if alike else ""
    if not parts:
        return []
    cut = [words for side, found in e.replays.by_side.items() if (words := _toward_zero(side, found))]
    return [f"Recomputed from their own inputs, beyond rounding: {' and '.join(parts)}.{both}", *cut]


def _toward_zero(side: str, replayed: Mapping[str, Replayed]) -> str:
    """Say which results of a side are rounded toward zero, empty where none are."""
    labels = [label for label, found in replayed.items() if found.toward_zero]
    if not labels:
        return ""
    return (
        f"{side} rounds {tensors(len(labels))} toward zero instead of to the nearest number (first {labels[0]}): no "
        "fault of the model, but every value of them is up to one spacing too small."
    )


def _failed_gates(e: Evidence) -> list[str]:
    """Say which gates fail; of one that the likeliest cause quotes, the name is enough."""
    quoted = {sentence for suspect in e.suspects[:1] for sentence in suspect.evidence[:1]}
    failed = [gate for gate in e.gates if gate.status == "fail"]
    known = [any(finding.text in quoted for finding in gate.findings) for gate in failed]
    return [f"The {g.name} gate fails{'' if said else f': {g.detail}'}." for g, said in zip(failed, known)]


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
    least = ">= " if top.metrics.is_bound else ""
    source = top.floor.source if top.floor is not None else MODELLED
    return [
        f"Of {len(compared)} tensors {counts}; the largest difference is {top.match.label} with relative L2 "
        f"{least}{top.metrics.rel_l2:.1e}, {top.judgement.ratio:.2g} times the {source} noise floor "
        f"(up to {BANDS[source].suspect_rise:g} raise no suspicion)."
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
        least = ">= " if first.metrics.is_bound else ""
        size = f"relative L2 {least}{first.metrics.rel_l2:.1e} where rounding explains {first.judgement.floor:.1e}, "
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


def next_commands(e: Evidence) -> list[str]:
    """Return commands to paste, the most useful one first."""
    a, b = shlex.quote(str(e.a.path)), shlex.quote(str(e.b.path))
    first = first_divergent(e.measured)
    commands = _in_full(e, first) or (_which_side(e, a) if e.verdict in ("suspect", "divergent") else [])
    if first is None:
        across = [f"{e.again} --across-versions"] if e.operands and e.rows.count("other_version") else []
        again = [*across, f"{e.again} --report html --force"] if e.operands else []
        return [*commands, *again, f"probe show {a}", f"probe show {b}"]
    for path, source, dump in ((a, first.match.source_a, e.a), (b, first.match.source_b, e.b)):
        module = _native_module(source.native[0], dump)
        commands.append(f"probe show {path} {shlex.quote(module)}")
    return [*commands, f"{e.again} --report html --force"]


def _in_full(e: Evidence, first: Measured | None) -> list[str]:
    """Return what records the values of which a side stored statistics: of the layer where they part, else of all."""
    commands = []
    for dump in (e.a, e.b) if by_statistics(e) else ():
        folder = _beside(dump)
        output = shlex.quote(str(folder.with_name(f"{folder.name}-tensors")))
        layer = None if first is None else layer_of(first.match.label)
        if not dump.reduced:
            continue
        if not dump.manifest.get("driver"):
            layers = "" if layer is None else f" --layers {layer}"
            commands.append(f"probe dump --task tensor{layers} -o {output} -- COMMAND...")
            continue
        sizes = (dump.manifest.get("topology") or {}).items()
        split = "".join(f" --{axis}{'' if size is True else f' {size}'}" for axis, size in sizes if size and size != 1)
        how = f"--stage {dump.stage} --engine {dump.engine} --dtype {dump.manifest.get('dtype')}{split}"
        commands.append(f"probe dump {how} --from {shlex.quote(str(dump.path))} -o {output}")
    return list(dict.fromkeys(commands))


def _which_side(e: Evidence, a: str) -> list[str]:
    """Return the commands that would tell which side is at fault, where that is not known."""
    if e.suspects and e.suspects[0].side != "unknown":
        return []
    checkpoint = (e.a.manifest.get("model") or {}).get("path")
    if checkpoint and all(gate.name != "golden" for gate in e.gates):
        reference = shlex.quote(str(_beside(e.a).with_name("reference")))
        made = f"probe dump --stage reference --dtype float64 --from {a} -o {reference}"
        weights = [] if "--weights" in e.options else [f"{e.again} --weights {shlex.quote(str(checkpoint))}"]
        return [*weights, made, f"{e.again} --golden {reference}"]
    return []


def _beside(dump: Dump) -> Path:
    """Return the folder beside which a dump of the same tokens may lie: the job's own holds its steps and stages."""
    folder = dump.roots[0]
    return folder.parents[1] if _STEP.fullmatch(folder.name) and folder.parent.name == dump.stage else folder


def _native_module(label: str, dump: Dump) -> str:
    """Return the dump's own spelling of the module of a stripped label."""
    stripped = label.rpartition(":")[0]
    return next((module for module, _ in dump.tensors if module.endswith(stripped)), stripped)
