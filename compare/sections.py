"""The sections of a report that list tensors and rows: what each dump is, coverage, and one entry per tensor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from probe.compare.coverage import FewerRows
from probe.compare.evidence import Evidence
from probe.compare.locate.sides import which_side
from probe.compare.match import Entry
from probe.compare.measure import Measured
from probe.compare.names.base import RECOMPUTED, Source, key_of
from probe.compare.side import Side
from probe.store.reader import Dump

FIGURES = ("rel_l2", "rmse", "max_abs", "one_minus_cos", "ulp_p50", "ulp_p99", "norm_ratio")
JUDGED = ("floor", "floor_source", "floor_gain", "ratio", "evidence", "golden", "own_error", "inherited_error")


def dump_summary(dump: Dump) -> dict[str, Any]:
    """Return what a report says about one dump."""
    engine, model = dump.manifest.get("engine") or {}, dump.manifest.get("model") or {}
    return {
        "path": str(dump.path),
        "stage": dump.stage,
        "engine": dump.engine,
        "engine_version": engine.get("version"),
        "model": model.get("path"),
        "dtype": dump.manifest.get("dtype"),
        "device": dump.manifest.get("device"),
        "sequences": len(dump.sequences),
        "prompt_tokens": sum(s.prompt_len for s in dump.sequences),
        "response_tokens": sum(max(0, len(s.tokens) - s.prompt_len) for s in dump.sequences),
        "tensors": len(dump.tensors),
        "complete": dump.complete,
        "prompts_only": bool(dump.manifest.get("prompts_only")),
    }


def coverage_section(evidence: Evidence) -> dict[str, Any]:
    """Return what was compared, and each tensor and row that was not, with its reason."""
    a, b, matching, rows = evidence.side_a, evidence.side_b, evidence.matching, evidence.rows
    shares = {"tensors": evidence.tensor_share, "rows": rows.covered, "asked": evidence.min_coverage}
    auxiliary = {name: [_entry(e) for e in getattr(matching, name)] for name in ("auxiliary_a", "auxiliary_b")}
    return {
        "matched": sum(entry.metrics is not None for entry in evidence.measured),
        "proposed": sum(entry.match.proposal is not None for entry in evidence.measured),
        "only_a": [_entry(e) | _natives(e, a) for e in matching.only_a],
        "only_b": [_entry(e) | _natives(e, b) for e in matching.only_b],
        "unavailable": [_entry(e) | {"side": e.side} | _natives(e, a, b) for e in matching.unavailable],
        **auxiliary,
        "rows": rows.as_dict(),
        "fewer_rows": [_fewer(entry) for entry in evidence.fewer],
        "shares": shares | ({} if evidence.token_share is None else {"tokens": evidence.token_share}),
    }


def _natives(entry: Entry, *sides: Side) -> dict[str, list[str]]:
    """Return the native tensors that a side stored of a canonical tensor that the other side lacks."""
    sources = [(side, side.resolution.sources.get(entry.label)) for side in sides]
    return {"tensors": [label for side, source in sources if source for label in side.native_labels(source)]}


def _fewer(entry: FewerRows) -> dict[str, Any]:
    name, slot = key_of(entry.label)
    lacking = {"lacking_a": entry.lacking_a, "lacking_b": entry.lacking_b}
    return {"name": name, "slot": slot, "rows": entry.joined, "missing": entry.missing, **lacking}


def _entry(entry: Entry) -> dict[str, str]:
    name, slot = key_of(entry.label)
    return {"name": name, "slot": slot, "reason": entry.reason}


def layers_section(evidence: Evidence) -> list[dict[str, Any]]:
    """Return one entry per compared tensor in execution order, then those of one side."""
    layers = [_layer(entry, evidence) for entry in evidence.measured]
    for side, only in (("a", evidence.matching.only_a), ("b", evidence.matching.only_b)):
        for entry in only:
            layers.append(_missing(entry, len(layers), side))
    return layers


def _layer(entry: Measured, evidence: Evidence) -> dict[str, Any]:
    a, b, pairs = evidence.side_a, evidence.side_b, evidence.join.pairs
    metrics, join = entry.metrics, entry.join
    layer = _blank(entry.match.label, entry.order, entry.judgement.verdict, _reason(entry))
    layer |= {"floor": entry.judgement.floor, "ratio": entry.judgement.ratio}
    if entry.floor is not None:
        layer |= {"floor_source": entry.floor.source, "floor_gain": entry.floor.gain}
        layer |= {"evidence": entry.judgement.evidence, "golden": entry.golden and asdict(entry.golden)}
    own = evidence.located.own.get(entry.match.label)
    layer |= {"own_error": own.own, "inherited_error": own.inherited} if own else {}
    layer["side"] = which_side(evidence, entry.match.label)
    if entry.match.proposal is not None:
        layer |= {"proposed": True, "proposal": asdict(entry.match.proposal)}
    layer["a"], layer["b"] = _origin(a, entry.match.source_a), _origin(b, entry.match.source_b)
    if metrics is None or join is None:
        return layer
    layer |= {name: getattr(metrics, name) for name in FIGURES} | {"bound": metrics.is_bound}
    layer |= {"nan_a": metrics.nan_x, "nan_b": metrics.nan_y, "inf_a": metrics.inf_x, "inf_b": metrics.inf_y}
    layer["rows"] = metrics.rows
    layer["a"]["norm"], layer["b"]["norm"] = metrics.norm_x, metrics.norm_y

    def where(row: int) -> dict[str, Any]:
        return {"sequence": pairs[int(join.pair[row])].label, "position": int(join.position[row])}

    layer["restricted"] = None if entry.restricted is None else entry.restricted.as_dict()
    row, feature = metrics.max_abs_at
    worst = metrics.worst_row
    layer["max_abs_at"] = None if metrics.is_bound else where(row) | {"feature": feature}
    layer["worst_row"] = where(worst) | {"rel_l2": float(metrics.row_rel_l2[worst])}
    return layer


def _reason(entry: Measured) -> str:
    """Return why a tensor has its verdict, and what to know of a pair that was proposed or a side recomputed."""
    match = entry.match
    notes = [entry.judgement.reason] if entry.judgement.reason else []
    if match.proposal is not None:
        notes.append(f"proposed pair, in no table of names: {match.proposal.reason}")
    for side, source in (("a", match.source_a), ("b", match.source_b)):
        if source.operation in RECOMPUTED:
            notes.append(f"recomputed in {side} from {' and '.join((*source.native, *source.parameters))}")
    return "; ".join(notes)


def _blank(label: str, order: int, verdict: str, reason: str) -> dict[str, Any]:
    name, slot = key_of(label)
    empty = dict.fromkeys((*FIGURES, *JUDGED, "max_abs_at", "worst_row", "restricted"))
    counts = dict.fromkeys(("nan_a", "nan_b", "inf_a", "inf_b", "rows"), 0)
    head = {"name": name, "slot": slot, "order": order, "verdict": verdict, "side": "", "reason": reason}
    head |= {"proposed": False, "bound": False}
    nothing: dict[str, Any] = {"tensors": [], "operation": None, "recomputed": False, "dtype": None, "norm": None}
    return {**head, **empty, **counts, "a": nothing, "b": dict(nothing)}


def _missing(entry: Entry, order: int, side: str) -> dict[str, Any]:
    return _blank(entry.label, order, "missing", f"only {side} has it: {entry.reason}")


def _origin(side: Side, source: Source) -> dict[str, Any]:
    how = {"operation": source.operation, "recomputed": source.operation in RECOMPUTED}
    return {"tensors": side.native_labels(source), **how, "dtype": side.dtype_of(source), "norm": None}
