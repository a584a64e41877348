"""The weights gate: which parameters differ, in what way, and, where a checkpoint can be read, on which side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from probe.compare.gates import SHOWN, Gate, GateFinding
from probe.compare.names.canonical import layer_of, module_at_fault
from probe.compare.report.model import counted
from probe.compare.sequences import SequenceJoin
from probe.compare.side import Side
from probe.compare.versions import Lag, lag_of
from probe.compare.weights import CheckpointWeights, Finding, Weight, canonical_weights, compare_weights
from probe.compare.weights.changes import Change, agree
from probe.compare.weights.checkpoint import open_checkpoint
from probe.compare.weights.explain import explain_weight
from probe.compare.weights.history import recorded_versions
from probe.compare.weights.settle import settled
from probe.errors import ProbeError
from probe.store.reader import Dump

WEIGHTS_UNSEEN = "weights were not compared"
"""How the weights gate's sentence ends where it saw none on both sides."""

MANY = 12
"""Differing parameters from which on one finding tells of them all: a decoder layer with biases has 12."""

WORST = 4
"""Parameters that have a finding of their own beside the one that tells of many."""

CHECKED = 24
"""Differing parameters that are looked up in a checkpoint at most, evenly spread over them: a whole model's would take
as long as loading it."""

QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32")
"""Dtypes in which an engine that declares quantisation holds codes, whose scales are parameters of their own."""

EXPLAINED = 6
"""Parameters of which the checkpoint's values are read to find what was done to them."""

_VAGUE = ("stale-weights", "permuted-weights", "weight-precision", "missing-shard")
"""Causes that a closer look at the checkpoint's values may make more exact."""

_CONTENT = ("stale-weights", "weight-precision", "scaled-weight", "wrong-bias")
"""Causes that an update between two declared weight versions explains."""


def weights_gate(a: Side, b: Side, checkpoint: str | Path | None = None, lag: Lag | None = None) -> Gate:
    """Compare parameter sketches within the rounding of the coarser dtype.

    ``checkpoint``: what both sides should hold, so that the gate says which of them does not; by default the one that
    a manifest names, where it can be read; ``lag``: what a trainer declares of its rollout. Raises CheckpointError for
    a given checkpoint that cannot be read.
    """
    left, right = canonical_weights(a), canonical_weights(b)
    lacking = [name for name, weights in (("a", left), ("b", right)) if not weights]
    if lacking:
        return Gate("weights", "skipped", f"no parameter sketches in {' and '.join(lacking)}: {WEIGHTS_UNSEEN}")
    found = settled(compare_weights(left, right))
    if not found:
        return Gate("weights", "warn", f"no parameter has a canonical name on both sides: {WEIGHTS_UNSEEN}")
    by_status: dict[str, list[Finding]] = {status: [] for status in ("equal", "rounded", "different", "missing")}
    quantised = _declared_quantisation(a, b, left, right)
    for finding in found:
        status = "rounded" if finding.status == "different" and finding.name in quantised else finding.status
        by_status[status].append(finding)
    lone = [name for name in left if name not in right] + [name for name in right if name not in left]
    findings = _lone_findings(lone, left)
    versions = lag_words(lag) if lag is not None else _weight_versions(a.dump, b.dump)
    if not by_status["different"]:
        return _agreeing(by_status, lone, versions, quantised, findings)
    different = by_status["different"]
    lagged, held = declared_lag(a.dump, b.dump), ""
    if lag is not None:
        lagged, held = _lag_holds(lag, (a, b)[lag.side], (right, left)[lag.side])
    if lagged:
        different = [replace(f, cause="lagged-weights") if f.cause in _CONTENT else f for f in different]
    references = _references(a, b, checkpoint)
    different = _sided(different, left, right, references)
    findings = [*_gathered(different, len(found), bool(checkpoint)), *findings]
    first = different[0]
    source = f"{left[first.name].native} in a, {right[first.name].native} in b"
    more = f"{len(different)} of {len(found)} parameters differ{_blame(different, references)}"
    text = f"{first.name} {first.detail} ({source}); {more}{versions}{held}"
    return Gate("weights", "warn" if lagged else "fail", text, tuple(findings))


def _agreeing(
    by_status: Mapping[str, list[Finding]],
    lone: list[str],
    versions: str,
    quantised: Mapping[str, str],
    findings: list[GateFinding],
) -> Gate:
    missing = by_status["missing"]
    rounded = [finding for finding in by_status["rounded"] if finding.name not in quantised]
    notes = [f"{counted(len(by_status['equal']) + len(by_status['rounded']), 'parameter')} agree"]
    if rounded:
        notes.append(f"{len(rounded)} of them within one rounding to {rounded[0].detail} (the dtypes differ)")
    if quantised:
        name = next(iter(quantised))
        notes.append(f"{len(quantised)} are quantised as declared (first {name}: {quantised[name]}): not compared")
    if lone:
        notes.append(f"{len(lone)} are on one side only (first {lone[0]})")
    if missing:
        notes.append(f"{len(missing)} could not be made whole ({missing[0].name} {missing[0].detail})")
    warned = lone or versions or missing or quantised
    return Gate("weights", "warn" if warned else "pass", "; ".join(notes) + versions, tuple(findings))


def declared_lag(a: Dump, b: Dump) -> bool:
    """Tell whether the sides declare different weight updates, so that other weights are no surprise."""
    versions = [{s.weight_version for s in dump.sequences} for dump in (a, b)]
    return all(any(known) for known in versions) and not versions[0] & versions[1]


def settle_lag(join: SequenceJoin, a: Side, b: Side) -> None:
    """Note in a join whether sketched weights that are declared to lag are the same, as before the first update."""
    lag = lag_of(join, a.dump.sequences, b.dump.sequences)
    if lag is not None and any(lag.rows.values()):
        found = settled(compare_weights(canonical_weights(a), canonical_weights(b)))
        join.same_weights = bool(found) and all(finding.status in ("equal", "rounded") for finding in found)


def lag_words(lag: Lag) -> str:
    """Return a clause on the sequences that are declared to lag, empty where none is."""
    behind = sorted(most for most in lag.rows.values() if most)
    if not behind:
        return ""
    versions = counted(behind[0], "version") if behind[0] == behind[-1] else f"{behind[0]} to {behind[-1]} versions"
    trainer, rollout = "ab"[lag.side], "ba"[lag.side]
    return (
        f"; {trainer} declares that {len(behind)} of {counted(len(lag.rows), 'sequence')} of {rollout} ran with "
        f"weights {versions} older than its own"
    )


def _lag_holds(lag: Lag, trainer: Side, weights: Mapping[str, Weight]) -> tuple[bool, str]:
    """Tell whether a declared lag explains that a rollout's ``weights`` differ, and in a clause what they are.

    It does unless some sequence that ran with them is declared to have run with the trainer's own, sequences of several
    versions ran with them, or the trainer recorded that version in another step and it is not what the rollout holds.
    """
    if not lag.declared and lag.sketched[0] > lag.sketched[1]:
        return False, f"; {'ab'[lag.side]} declares that sequences of several versions ran with these weights of one"
    recorded = recorded_versions(trainer, weights)
    held = [f"version {one.version} (step {one.step})" for one in recorded if one.held]
    are = f"they are those that it recorded as {' and '.join(held)}" if held else ""
    if not lag.declared:
        may = "are" if lag.version is not None else "may be"
        said = f"; {'ab'[lag.side]} declares that they {may} its own, version {lag.first[0][2].trained}"
        return False, said + (f", but {are}" if are else "")
    meant = next((one for one in recorded if one.version == lag.version), None)
    if meant is None:
        which = "which one is not certain" if lag.version is None else f"version {lag.version}"
        return True, f"; the older weights ({which}) are in no other step that was recorded: not checked"
    if meant.held:
        return True, f"; {are}, as declared"
    return False, f"; they are not the declared version {meant.version} as recorded in step {meant.step}" + (
        f": {are}" if are else ""
    )


def _weight_versions(a: Dump, b: Dump) -> str:
    versions = [sorted({s.weight_version for s in d.sequences}) for d in (a, b)]
    return "" if versions[0] == versions[1] else f"; declared weight versions differ (a {versions[0]}, b {versions[1]})"


def declared_quantisation(dump: Dump) -> str:
    """Return how a run says that its weights are quantised, empty where it says nothing."""
    stated = (dump.manifest.get("backends") or {}).get("quantization")
    config = (dump.manifest.get("model") or {}).get("config") or {}
    method = (config.get("quantization_config") or {}).get("quant_method") if isinstance(config, Mapping) else None
    return str(stated or method or "")


def _declared_quantisation(a: Side, b: Side, left: Mapping[str, Weight], right: Mapping[str, Weight]) -> dict[str, str]:
    """Return the parameters that a side holds as codes and says so -> how."""
    found: dict[str, str] = {}
    for side, weights in ((a, left), (b, right)):
        how = declared_quantisation(side.dump)
        found |= {name: how for name, weight in weights.items() if how and weight.dtype in QUANTISED}
    return {name: how for name, how in found.items() if name in left and name in right}


# -- which side -------------------------------------------------------------------------------------------------------


def _references(a: Side, b: Side, given: str | Path | None) -> list[CheckpointWeights]:
    """Return the checkpoints to ask: the given one, else those that the manifests name and that can be read.

    A manifest's says nothing of a run that has received weight updates since.
    """
    if given is not None:
        return [open_checkpoint(given, a.shape)]
    found: dict[str, CheckpointWeights] = {}
    for side in (a, b):
        path = str((side.dump.manifest.get("model") or {}).get("path") or "")
        if not path or path in found or any(s.weight_version for s in side.dump.sequences):
            continue
        try:
            found[path] = open_checkpoint(path, side.shape)
        except (ProbeError, OSError):  # moved or deleted since, or a name on a hub
            continue
    return list(found.values())


def _sided(
    different: list[Finding],
    left: Mapping[str, Weight],
    right: Mapping[str, Weight],
    references: list[CheckpointWeights],
) -> list[Finding]:
    """Return the findings with the side whose parameter is not the checkpoint's, where the other's is."""
    step = max(1, -(-len(different) // CHECKED))
    fitting: dict[str, set[str]] = {}
    explained: dict[str, tuple[Change, str]] = {}
    for reference in references:
        for finding in different[::step]:
            truth = reference.weight(finding.name)
            fits = [truth is not None and bool(agree(truth, side[finding.name])) for side in (left, right)]
            fitting.setdefault(finding.name, set()).update(side for side, fit in zip("ab", fits) if fit)
            if sum(fits) == 1 and finding.cause in _VAGUE and len(explained) < EXPLAINED:
                other = "b" if fits[0] else "a"
                change = explain_weight(reference, finding.name, (right if fits[0] else left)[finding.name])
                explained |= {finding.name: (change, other)} if change is not None else {}
    return [_told(finding, fitting.get(finding.name), explained.get(finding.name)) for finding in different]


def _told(finding: Finding, fitting: set[str] | None, explained: tuple[Change, str] | None) -> Finding:
    """Return a finding with what the checkpoints say of it: the side that holds none of them, and what was done to it.

    Where each side holds a checkpoint of its own, the one whose parameter lost something is still the wrong one.
    """
    wrong = {"a", "b"} - (fitting or {"a", "b"})
    side = finding.side or (next(iter(wrong)) if len(wrong) == 1 else "")
    if explained is None:
        return replace(finding, side=side)
    change, other = explained
    lost = other if change.cause in ("weight-precision", "missing-shard") else ""
    return replace(finding, cause=change.cause, detail=f"{change.detail} in {other}", side=side or lost)


def _blame(different: Iterable[Finding], references: list[CheckpointWeights]) -> str:
    """Return a clause that says which side differs from the checkpoint, where one and the same does throughout."""
    sides = {finding.side for finding in different}
    if len(references) > 1 and sides == {""}:
        return f" (a was loaded from {references[0].checkpoint.path}, b from {references[1].checkpoint.path})"
    return f", those of {next(iter(sides))} are wrong" if len(sides) == 1 and sides != {""} else ""


# -- findings ---------------------------------------------------------------------------------------------------------


def _as_gate_findings(found: Iterable[Finding]) -> list[GateFinding]:
    return [
        GateFinding(
            finding.cause,
            module_at_fault(finding.name),
            finding.side or "unknown",
            f"{finding.name} {finding.detail}",
            {"parameter": finding.name, **finding.figures},
        )
        for finding in found
    ]


def _gathered(different: list[Finding], total: int, checked: bool) -> list[GateFinding]:
    """Return a finding per parameter, or where many differ one for them all and those of the worst.

    ``checked``: whether the checkpoint was given by the user, and so is what both sides should hold. One that a
    manifest names may be the one from before training: where all parameters differ, either side may then be right.
    """
    if len(different) < MANY:
        return _as_gate_findings(different)
    if len({layer_of(f"{finding.name}:") for finding in different}) == 1:  # one layer, perhaps with many experts
        return _as_gate_findings(different[:MANY])
    findings: list[GateFinding] = []
    causes = [finding.cause for finding in different]
    for cause in dict.fromkeys(causes):
        group = [finding for finding in different if finding.cause == cause]
        worst = sorted(group, key=lambda finding: -float(finding.figures.get("relative", 0.0)))
        if len(group) >= MANY:
            findings.append(_whole(group, worst[0], total, checked))
        findings += _as_gate_findings(worst[:WORST] if len(group) >= MANY else group[: 2 * SHOWN])
    order = {cause: causes.count(cause) for cause in causes}
    return sorted(findings, key=lambda finding: -order[finding.cause])


def _whole(group: list[Finding], worst: Finding, total: int, checked: bool) -> GateFinding:
    sides = {finding.side for finding in group if finding.side}
    side = sides.pop() if len(sides) == 1 else "unknown"
    relative = [float(finding.figures["relative"]) for finding in group if "relative" in finding.figures]
    text = f"{len(group)} of {total} parameters differ, the worst {worst.name}, which {worst.detail}"
    if side in ("a", "b") and not checked and 2 * len(group) > total:
        holds = "a" if side == "b" else "b"
        text += f"; {holds} holds the checkpoint's, so {side} is wrong, or {holds} is stale if {side} was trained on"
        side = "unknown"
    figures: dict[str, float | int | str] = {"parameters": len(group), "of": total, "worst": worst.name}
    figures |= {"median relative": float(np.median(relative))} if relative else {}
    return GateFinding(worst.cause, "weights", side, text, figures)


def _lone_findings(lone: list[str], left: Mapping[str, Weight]) -> list[GateFinding]:
    """Return findings about parameters that one side did not sketch: biases may be missing, others were not seen."""
    biases = [name for name in lone if name.endswith(".bias")]
    return [
        GateFinding(
            "wrong-bias",
            module_at_fault(name),
            "b" if name in left else "a",
            f"{name} is on one side only: {'b' if name in left else 'a'} has none",
            {"parameter": name, "parameters": len(biases)},
        )
        for name in biases[:1]
    ]
