"""Compare two dumps and return the report as plain data: gates, then layers, then tokens."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from probe._version import __version__
from probe.compare.align import RowAligner, RowCoverage, SequenceJoin, SequencePair, count_rows, join_sequences
from probe.compare.gates import gates_of
from probe.compare.judge import overall
from probe.compare.locate import first_divergence
from probe.compare.match import Entry, Matching, Side, match_tensors, read_side, share_vocabulary
from probe.compare.measure import Measured, Measurer, Observer
from probe.compare.names.base import LOGITS, Source, key_of
from probe.compare.report.model import clean_floats
from probe.compare.settings_gates import config_gate, environment_entries, environment_gate
from probe.compare.summary import Evidence, next_commands, not_compared, summary
from probe.compare.tokens import compare_tokens, drop_padding_from_logprobs, unexplained_difference
from probe.errors import CompareError
from probe.store.reader import Dump, open_dump

SCHEMA = 1
EXIT_STATUS = {"consistent": 0, "suspect": 1, "divergent": 1, "incomparable": 2}
MIN_COVERAGE = 0.9
"""Share of tensors and of rows that must have been compared before two dumps can be called consistent."""


def compare_dumps(
    path_a: str | Path,
    path_b: str | Path,
    *,
    min_coverage: float = MIN_COVERAGE,
    observer: Observer | None = None,
    text: bool = True,
) -> dict[str, Any]:
    """Compare two dumps of one stage each and return the report (the content of ``report.json``).

    ``min_coverage``: share of tensors and rows below which the verdict is ``incomparable``; ``observer``: called with
    (what, done, total); ``text``: decode tokens through the checkpoint's tokenizer. Raises DumpError for a dump that
    cannot be read, CompareError for two dumps that have nothing in common.
    """
    with open_dump(path_a) as a, open_dump(path_b) as b:
        return compare_open(a, b, min_coverage=min_coverage, observer=observer, text=text)


def compare_open(
    a: Dump, b: Dump, *, min_coverage: float = MIN_COVERAGE, observer: Observer | None = None, text: bool = True
) -> dict[str, Any]:
    """Compare two open dumps (see :func:`compare_dumps`)."""
    side_a, side_b = read_side(a), read_side(b)
    share_vocabulary(side_a, side_b)
    for side in (side_a, side_b):
        drop_padding_from_logprobs(side)
    _require_same_model(side_a, side_b)
    join = join_sequences(a, b)
    _require_joined(a, b, join)
    matching = match_tensors(side_a, side_b)
    environment = environment_entries(a, b)
    gates = gates_of(side_a, side_b, join, (config_gate(side_a, side_b), environment_gate(environment)))
    aligner = RowAligner(join, len(a.sequences), len(b.sequences))
    measurer = Measurer(side_a, side_b, aligner, observer)
    measured = measurer.run(matching)
    tokens = compare_tokens(a, b, join, text=text)
    _require_something(a, b, measured, tokens)
    rows = count_rows(aligner, measurer.joins, a, b)
    share = _tensor_share(matching, measured)
    verdict = overall(
        [entry.judgement.verdict for entry in measured],
        {gate["name"]: gate["status"] for gate in gates},
        unexplained_difference(a, b, tokens["mean_abs_logprob_diff"], _logits_agree(measured)),
        min(share, rows.covered),
        min_coverage,
    )
    first = first_divergence(measured, join.pairs)
    evidence = Evidence(a, b, verdict, gates, matching, measured, rows, tokens, first, share, min_coverage)
    report = {
        "schema": SCHEMA,
        "probe": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "a": dump_summary(a),
        "b": dump_summary(b),
        "verdict": verdict,
        "summary": summary(evidence),
        "not_compared": not_compared(evidence),
        "gates": gates,
        "coverage": _coverage(matching, measured, rows),
        "layers": _layers(side_a, side_b, measured, matching, join.pairs),
        "first_divergence": first,
        "suspects": not_built("causes are not ranked yet"),
        "tokens": tokens,
        "ppo": not_built("the effect on the PPO update is not computed yet"),
        "environment": environment,
        "backends": {"a": a.manifest.get("backends") or {}, "b": b.manifest.get("backends") or {}},
        "action": not_built("no recommendation is derived yet"),
        "next_commands": next_commands(evidence),
    }
    return dict(clean_floats(report))


def exit_status(report: Mapping[str, Any]) -> int:
    """Return the exit status of a report: 0 consistent, 1 suspect or divergent, 2 incomparable."""
    return EXIT_STATUS[report["verdict"]]


def not_built(detail: str) -> dict[str, str]:
    """Return the section of a report whose content this version does not produce."""
    return {"status": "not built", "detail": detail}


# -- two dumps that have nothing in common ----------------------------------------------------------------------------


def _require_same_model(a: Side, b: Side) -> None:
    for what in ("hidden", "layers"):
        left, right = getattr(a.shape, what), getattr(b.shape, what)
        if left and right and left != right:
            words = {"hidden": "hidden size", "layers": "number of layers"}[what]
            problem = (
                f"the dumps are of different models: {words} is {left} in {a.dump.path} and {right} in {b.dump.path}"
            )
            raise CompareError(problem, "compare two dumps of one checkpoint")


def _require_joined(a: Dump, b: Dump, join: SequenceJoin) -> None:
    if not join.pairs:
        problem = f"no sequence of {a.path} is one of {b.path}: their prompts' token ids differ"
        raise CompareError(problem, "dump both sides from the same prompts and tokenizer (probe dump --from)")


def _require_something(a: Dump, b: Dump, measured: list[Measured], tokens: Mapping[str, Any]) -> None:
    if not tokens["compared"] and all(entry.metrics is None for entry in measured):
        problem = f"{a.path} and {b.path} have no tensor and no response log-prob in common"
        raise CompareError(problem, "see what each holds with 'probe show'")


def _logits_agree(measured: list[Measured]) -> bool:
    return any(m.match.label == LOGITS and m.judgement.verdict in ("identical", "consistent") for m in measured)


def _tensor_share(matching: Matching, measured: list[Measured]) -> float:
    """Return the share of canonical tensors that were compared; those a spec makes unavailable do not count."""
    compared = sum(entry.metrics is not None for entry in measured)
    total = len(measured) + len(matching.only_a) + len(matching.only_b)
    return compared / total if total else 1.0


# -- sections ---------------------------------------------------------------------------------------------------------


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


def _coverage(matching: Matching, measured: list[Measured], rows: RowCoverage) -> dict[str, Any]:
    lists = {name: [_entry(e) for e in getattr(matching, name)] for name in ("only_a", "only_b")}
    auxiliary = {name: [_entry(e) for e in getattr(matching, name)] for name in ("auxiliary_a", "auxiliary_b")}
    return {
        "matched": sum(entry.metrics is not None for entry in measured),
        **lists,
        "unavailable": [_entry(e) | {"side": e.side} for e in matching.unavailable],
        **auxiliary,
        "rows_joined": rows.joined,
        "rows_only_a": rows.only_a,
        "rows_only_b": rows.only_b,
        "rows_not_executed": rows.not_executed,
    }


def _entry(entry: Entry) -> dict[str, str]:
    name, slot = key_of(entry.label)
    return {"name": name, "slot": slot, "reason": entry.reason}


def _layers(
    a: Side, b: Side, measured: list[Measured], matching: Matching, pairs: list[SequencePair]
) -> list[dict[str, Any]]:
    layers = [_layer(entry, a, b, pairs) for entry in measured]
    for side, only in (("a", matching.only_a), ("b", matching.only_b)):
        for entry in only:
            layers.append(_missing(entry, len(layers), side))
    return layers


FIGURES = ("rel_l2", "rmse", "max_abs", "one_minus_cos", "ulp_p50", "ulp_p99", "norm_ratio")


def _layer(entry: Measured, a: Side, b: Side, pairs: list[SequencePair]) -> dict[str, Any]:
    metrics, join = entry.metrics, entry.join
    layer = _blank(entry.match.label, entry.order, entry.judgement.verdict, entry.judgement.reason)
    layer |= {"floor": entry.judgement.floor, "ratio": entry.judgement.ratio}
    layer["a"], layer["b"] = _origin(a, entry.match.source_a), _origin(b, entry.match.source_b)
    if metrics is None or join is None:
        return layer
    layer |= {name: getattr(metrics, name) for name in FIGURES}
    layer |= {"nan_a": metrics.nan_x, "nan_b": metrics.nan_y, "inf_a": metrics.inf_x, "inf_b": metrics.inf_y}
    layer["rows"] = metrics.rows
    layer["a"]["norm"], layer["b"]["norm"] = metrics.norm_x, metrics.norm_y

    def where(row: int) -> dict[str, Any]:
        return {"sequence": pairs[int(join.pair[row])].label, "position": int(join.position[row])}

    row, feature = metrics.max_abs_at
    worst = metrics.worst_row
    layer["max_abs_at"] = where(row) | {"feature": feature}
    layer["worst_row"] = where(worst) | {"rel_l2": float(metrics.row_rel_l2[worst])}
    return layer


def _blank(label: str, order: int, verdict: str, reason: str) -> dict[str, Any]:
    name, slot = key_of(label)
    empty = dict.fromkeys((*FIGURES, "floor", "ratio", "own_error", "max_abs_at", "worst_row"))
    counts = dict.fromkeys(("nan_a", "nan_b", "inf_a", "inf_b", "rows"), 0)
    head = {"name": name, "slot": slot, "order": order, "verdict": verdict, "reason": reason}
    nothing: dict[str, Any] = {"tensors": [], "dtype": None, "norm": None}
    return {**head, **empty, **counts, "a": nothing, "b": dict(nothing)}


def _missing(entry: Entry, order: int, side: str) -> dict[str, Any]:
    return _blank(entry.label, order, "missing", f"only {side} has it: {entry.reason}")


def _origin(side: Side, source: Source) -> dict[str, Any]:
    return {"tensors": side.native_labels(source), "dtype": side.dtype_of(source), "norm": None}
