"""``probe compare A B --explain NAME``: how one tensor's pair was found, merged and aligned, or why it has none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from probe.compare.align import RowAligner
from probe.compare.coverage import count_rows
from probe.compare.floors.floors import noise_model
from probe.compare.job import open_sides
from probe.compare.judge import modelled_floor
from probe.compare.mapping import load_map, read_mapped
from probe.compare.match import Entry, Match, Matching, match_tensors
from probe.compare.merge import CanonicalReader
from probe.compare.names.base import RECOMPUTED, Source, key_of, label_of
from probe.compare.report.model import ROW_REASONS, clean_floats
from probe.compare.sequences import join_sequences
from probe.compare.side import Side
from probe.compare.weights_gate import settle_lag
from probe.errors import ProbeError, UsageError

OPERATION_WORDS = {
    "whole": "as it is",
    "kv_heads": "as it is, heads that several tensor-parallel ranks hold taken once",
    "split_qkv": "one part of [q | k | v], split on each rank",
    "split_qkv_groups": "one part of Megatron's groups (queries, key, value of each), de-interleaved",
    "split_gate_up": "one half of [gate | up], split on each rank",
    "split_q_a_kv_a": "one part of the fused down-projections of latent attention",
    "split_experts": "one expert of the stacked ones",
    "split_experts_gate_up": "one half of [gate | up] of one expert of the stacked ones",
    "chosen_experts": "the experts that the router's map marks",
    "chosen_weights": "the dense weights of the experts that the router's map marks",
    "route": "derived from the router's logits by the model's rule",
    "sum": "their sum in float32, rounded to the dump's dtype",
    "rms_norm": "recomputed: x / sqrt(mean(x^2) + eps) * weight, because no module returned it",
    "cut_vocabulary": "padding entries of the vocabulary cut off",
}
"""What an operation does, for a reader."""


ROUTING_STATUS = {"ids": "compared as sets", "weights": "compared expert by expert"}
"""How the tensors that follow a token's choice of experts are compared, by slot."""


@dataclass
class _View:
    """Everything that explaining any name needs."""

    a: Side
    b: Side
    matching: Matching
    aligner: RowAligner


def explain(
    path_a: str | Path,
    path_b: str | Path | None,
    name: str,
    *,
    step: int | None = None,
    mapping: str | Path | None = None,
    across_versions: bool = False,
) -> dict[str, Any]:
    """Return how the tensors called ``name`` are compared: ``{"name", "entries": [...]}`` (docs/names.md).

    ``name``: a canonical name or one of either dump, with or without ``:slot``; paths and ``step`` are those of
    :func:`probe.compare.run.compare_dumps`. Raises UsageError, with the nearest
    names, where neither side knows it.
    """
    if not name.strip():
        raise UsageError("the name to explain is empty", "give one, such as layers.0.self_attn.q_proj")
    given = load_map(mapping) if mapping is not None else None
    with open_sides(path_a, path_b, step) as (a, b, _):
        side_a, side_b = read_mapped(a, b, given)
        join = join_sequences(a, b)
        settle_lag(join, side_a, side_b)
        aligner = RowAligner(join, a.sequences, b.sequences, across_versions=across_versions)
        view = _View(side_a, side_b, match_tensors(side_a, side_b), aligner)
        entries = [*_pairs(view, name), *_unpaired(view, name)]
        if not entries:
            raise UsageError(f"neither dump has a tensor called {name!r}", _nearest(view, name))
        return dict(clean_floats({"name": name, "entries": entries}))


def _names(view: _View, match: Match) -> set[str]:
    """Return every spelling under which a user may ask for a matched tensor."""
    names = {match.label}
    for side, source in ((view.a, match.source_a), (view.b, match.source_b)):
        names |= {*source.native, *side.native_labels(source)}
    return names


def _is(name: str, label: str) -> bool:
    return name in (label, label.removesuffix(":output.0")) or (":" not in name and label.rpartition(":")[0] == name)


def _pairs(view: _View, name: str) -> list[dict[str, Any]]:
    entries = []
    for match in (*view.matching.matched, *view.matching.routing):
        if any(_is(name, label) for label in _names(view, match)):
            entries.append(_pair(view, match, ROUTING_STATUS.get(key_of(match.label)[1], "compared")))
    canonical = [entry for entry in entries if _is(name, entry["name"])]
    return canonical or entries


def _pair(view: _View, match: Match, status: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": match.label, "status": "proposed" if match.proposal else status, "reason": ""}
    if match.proposal:
        entry |= {"proposal": asdict(match.proposal)}
    place: dict[str, Any] = {"rank": list(match.place.rank), "operations_before": match.place.ops}
    if status == "compared":
        model = noise_model(view.a, view.b, match)
        place |= {"dtype": model[0], "floor": modelled_floor(*model)}
    rows = _rows(view, match)
    if not rows["joined"]:
        entry |= {"status": "not compared", "reason": rows.pop("problem", "no row of it was stored on both sides")}
    return entry | {
        "place": place,
        "a": _origin(view.a, match.source_a),
        "b": _origin(view.b, match.source_b),
        "rows": rows,
    }


def _origin(side: Side, source: Source) -> dict[str, Any]:
    infos = [side.dump.tensors[side.natives[label]] for label in source.native]
    return {
        "dump": str(side.dump.path),
        "engine": side.dump.engine,
        "table": side.table.engine,
        "tensors": side.native_labels(source),
        "rule": re.sub("^table:", f"{side.table.engine} table:", source.origin),
        "operation": source.operation,
        "part": source.part,
        "how": OPERATION_WORDS.get(source.operation, source.operation),
        "recomputed": source.operation in RECOMPUTED,
        "dtype": infos[0].dtype,
        "features": [list(info.feature_shape) for info in infos],
        "shards": [{"over_ranks": info.over_ranks, "left_out": info.left_out} for info in infos],
    }


def _rows(view: _View, match: Match) -> dict[str, Any]:
    """Return how many rows joined and why the others did not, as in the report's ``coverage.rows``."""
    try:
        tables = [CanonicalReader(s).rows(o) for s, o in ((view.a, match.source_a), (view.b, match.source_b))]
    except ProbeError as error:  # rows that cannot be made whole: the comparison says the same of the tensor
        return {"joined": 0, "a": {}, "b": {}, "problem": str(error)}
    join = view.aligner.rows(tables[0], tables[1])
    return count_rows(view.aligner, [join], view.a.dump, view.b.dump).as_dict()


def _unpaired(view: _View, name: str) -> list[dict[str, Any]]:
    """Return the entries of tensors that have no pair."""
    m = view.matching
    lists: tuple[tuple[str, str, list[Entry]], ...] = (
        ("only a", "a", m.only_a),
        ("only b", "b", m.only_b),
        ("unavailable", "", m.unavailable),
        ("not compared", "a", m.auxiliary_a),
        ("not compared", "b", m.auxiliary_b),
    )
    found = []
    for status, side, entries in lists:
        for entry in entries:
            spellings = {entry.label, *_stripped(view, side, entry.label)}
            if any(_is(name, label) for label in spellings):
                found.append(
                    {"name": entry.label, "status": status, "side": side or entry.side, "reason": entry.reason}
                )
    exact = [entry for entry in found if name in (entry["name"], entry["name"].removesuffix(":output.0"))]
    return exact or found


def _stripped(view: _View, side: str, label: str) -> Iterable[str]:
    return [reader.strip(label) for which, reader in (("a", view.a), ("b", view.b)) if which == side]


def _nearest(view: _View, name: str) -> str:
    known: dict[str, None] = {}
    known |= dict.fromkeys(match.label for match in (*view.matching.matched, *view.matching.routing))
    for side in (view.a, view.b):
        known |= dict.fromkeys(label_of(key) for key in side.dump.tensors)
    short = [label.removesuffix(":output.0") for label in known]
    inside = [label for label in short if f".{label}".partition(":")[0].endswith(f".{name}")]
    close = inside[:3] or get_close_matches(name, short, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}" if close else "see what each dump holds with 'probe show'"


# -- for a reader -----------------------------------------------------------------------------------------------------


def in_words(explained: dict[str, Any]) -> list[str]:
    """Return the explanation as lines of text."""
    lines: list[str] = []
    for entry in explained["entries"]:
        lines += [f"{entry['name']}: {entry['status']}" + (f" (side {entry['side']})" if entry.get("side") else "")]
        if entry["reason"]:
            lines.append(f"  why: {entry['reason']}")
        if entry.get("proposal"):
            proposal = entry["proposal"]
            lines.append(f"  proposed: {proposal['reason']} (confidence {proposal['confidence']:g})")
        for side in ("a", "b"):
            lines += _side_in_words(side, entry[side]) if side in entry else []
        lines += _place_in_words(entry) if "place" in entry else []
    return lines


def _side_in_words(side: str, origin: dict[str, Any]) -> list[str]:
    lines = [f"  {side}: {' + '.join(origin['tensors'])}  ({origin['dtype']}, engine {origin['engine']})"]
    lines.append(f"     by: {origin['rule']}")
    part = f" (part {origin['part'] + 1})" if origin["operation"].startswith("split_") else ""
    lines.append(f"     merged: {origin['how']}{part}")
    spread = dict.fromkeys(shard["over_ranks"] for shard in origin["shards"] if shard["over_ranks"])
    lines += [f"     stored: {words}" for words in spread]
    for shard in origin["shards"]:
        if shard["left_out"]:
            lines.append(f"     left out: {shard['left_out']} rows that could not be made whole")
    return lines


def _place_in_words(entry: dict[str, Any]) -> list[str]:
    place, rows = entry["place"], entry["rows"]
    lines = []
    if "floor" in place:
        lines.append(
            f"  place: {place['operations_before']} operations before it; noise floor {place['floor']:.2e} "
            f"(relative L2) in {place['dtype']}"
        )
    lines.append(f"  rows: {rows['joined']} joined by (sequence, position)")
    for side in ("a", "b"):
        for reason, count in rows[side].items():
            lines.append(f"     {count} only in {side}: {ROW_REASONS.get(reason, reason)}")
    return lines
