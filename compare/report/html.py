"""The report as report.html: one self-contained page without a single network request.

``view`` reduces the report to what the page shows, as plain data; ``render`` puts it into the template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from probe.compare.report import charts, markdown
from probe.compare.report.curves import heat_data, worst_rows
from probe.compare.report.findings import (
    REPLAY_FIGURES,
    SIDES,
    action_title,
    against_band,
    channel_words,
    explained,
    floor_words,
    golden_words,
    largest_own,
    located_words,
    no_suspect,
    not_replayed,
    percent,
    replay_words,
    replays_to_read,
    row_words,
    severity,
    sides_known,
)
from probe.compare.report.model import (
    ROUTING_MARGINS,
    VERDICTS,
    Layer,
    Report,
    clean_floats,
    details,
    differing_environment,
    focus,
    in_order,
    is_first_divergence,
    label,
    logprob_sources,
    routing_words,
    row_reasons,
    verdict_counts,
    visible,
    worst_first,
)
from probe.compare.report.shared.page import MAX_BYTES, MAX_NAME, render_page, short, strips

#: Columns of the module table: key in an entry of ``layers``, heading, what it means.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("order", "#", "execution order"),
    ("name", "module", "canonical name; the slot follows the colon where it is not output.0"),
    ("verdict", "verdict", "judged against the noise floor"),
    ("rel_l2", "relL2", "relative L2 error"),
    ("floor", "floor", "noise floor of the relative L2 error"),
    ("ratio", "ratio", "relL2 / floor"),
    ("inherited_error", "inherited", "relative L2 error that the inputs explain"),
    ("own_error", "own error", "relative L2 error that the inputs do not explain"),
    ("side", "which side", "the side that a replay, the golden reference or the weights show to be wrong"),
    ("golden", "golden ratio", "error of the farther side over the nearer one's, against the reference (--golden)"),
    ("floor_source", "floor from", "where the noise floor comes from"),
    ("max_abs", "max |Δ|", "largest absolute difference"),
    ("one_minus_cos", "1 − cos", "one minus the cosine similarity"),
    ("ulp_p99", "ULP p99", "99th percentile of the distance in units in the last place"),
    ("norm_ratio", "norm ratio", "norm of B / norm of A"),
    ("bad", "NaN, Inf", "values that are not finite, both sides"),
    ("rows", "rows", "tokens compared"),
    ("worst", "worst row", "sequence and position with the largest error"),
    ("reason", "note", "why the tensor could not be compared, or what to know about it"),
)

WORDS = ("name", "verdict", "side", "golden", "floor_source", "worst", "reason")
"""Columns of words: left-aligned, and sorted from the first on."""


@dataclass(frozen=True)
class Caps:
    """How much a page may hold: table rows, sequences in the token strip, tokens per sequence, entries of a list, and
    tokens in the heat map."""

    modules: int = 5000
    sequences: int = 64
    tokens: int = 512
    listed: int = 200
    heat: int = 400

    def smaller(self) -> Caps:
        """Return the next smaller caps: the token strip gives way first, then everything is halved."""
        if self.tokens > 128:
            return replace(self, sequences=self.sequences // 2, tokens=self.tokens // 2)
        return Caps(*(max(1, getattr(self, cap.name) // 2) for cap in fields(self)))


def render(report: Report) -> str:
    """Return the page as text; if it is larger than MAX_BYTES, again with less in it, and the page says so."""
    caps = Caps()
    page = _page(report, caps)
    while len(page.encode("utf-8", "replace")) > MAX_BYTES and caps.tokens > 8:
        caps = caps.smaller()
        page = _page(report, caps)
    return page


def view(report: Report, caps: Caps | None = None) -> dict[str, Any]:
    """Return the data embedded in the page: module table, token strips, and what was left out, all strict JSON."""
    caps = caps or Caps()
    kept = _kept_layers(report, caps)
    heat, columns = heat_data(report, caps.heat)
    shown, without = strips(report["tokens"], caps.sequences, caps.tokens, columns)
    data = {
        "schema": report["schema"],
        "probe": report["probe"],
        "created": report["created"],
        "verdict": report["verdict"],
        "text": bool(report["tokens"].get("text")),
        "verdicts": VERDICTS,
        "words": WORDS,
        "modules": {"columns": [key for key, _, _ in COLUMNS], "rows": [_table_row(report, layer) for layer in kept]},
        "strips": shown,
        "heat": heat,
        "left_out": {
            "modules": len(report["layers"]) - len(kept),
            "sequences": without,
            "tokens": sum(strip["left_out"] for strip in shown) + (report["tokens"].get("strip_truncated") or 0),
        },
    }
    return dict(clean_floats(data))


def _page(report: Report, caps: Caps) -> str:
    kept = _kept_layers(report, caps)
    tokens = report["tokens"]
    positions = (tokens.get("by_position") or [])[: 4 * caps.tokens]
    figures = {"layer-curve": charts.layer_curve(report, kept), "position-curve": charts.position_curve(positions)}
    filters = {"label": label, "module": _module_name, "percent": percent, "against": against_band}
    filters |= {"explained": explained, "golden": golden_words}
    context = dict(
        report=report,
        tokens=tokens,
        worst=worst_rows(report, caps.listed, heat_data(report, caps.heat)[1]),
        positions=positions,
        columns=COLUMNS,
        words=WORDS,
        counts=verdict_counts(report["layers"]),
        curve=[(layer, is_first_divergence(report, layer)) for layer in kept],
        focus=[(layer, is_first_divergence(report, layer)) for layer in focus(report, 8)],
        environment=differing_environment(report),
        listed=caps.listed,
        colors={verdict: color for verdict, (color, _) in charts.MARKS.items()},
        left_out=len(report["layers"]) - len(kept),
        sides=_sides(report),
        backends=sorted({key for side in report["backends"].values() for key in side}),
        issue=markdown.render(report),
        headline=report["headline"].removeprefix(report["verdict"]),
        details=details(report),
        reasons=row_reasons(report),
        routing=routing_words(report["moe"]) if report["moe"] else "",
        margins=ROUTING_MARGINS,
        sources=logprob_sources(tokens) if tokens.get("compared") else "",
        **_findings(report, caps),
    )
    return render_page("template.html", "page.js", view(report, caps), figures, context, filters)


def _findings(report: Report, caps: Caps) -> dict[str, Any]:
    """Return what the sections on suspects, places and replays show."""
    return {
        "side_words": SIDES,
        "action_title": action_title(report),
        "no_suspect": no_suspect(report),
        "located": located_words(report),
        "patterns": [(entry, row_words(entry)) for entry in (report["located"].get("rows") or [])[: caps.listed]],
        "channels": [(e, channel_words(e)) for e in (report["located"].get("channels") or [])[: caps.listed]],
        "own": largest_own(report),
        "sided": sides_known(focus(report, 8)),
        "floor_words": floor_words(report),
        "replay_words": replay_words(report),
        "replay_keys": REPLAY_FIGURES,
        "replays": replays_to_read(report),
        "all_replays": sorted(report["replay"]["modules"], key=severity)[: caps.listed],
        "not_replayed": not_replayed(report, caps.listed),
    }


def _module_name(entry: Mapping[str, Any]) -> Any:
    """Return the name of a tensor as markup that may break after each dot."""
    from markupsafe import Markup, escape

    name = str(escape(visible(label(entry), MAX_NAME)))
    return Markup(name.replace(".", ".<wbr>"))


def _kept_layers(report: Report, caps: Caps) -> list[Layer]:
    """Return the layers in execution order; over the cap, the worst ones."""
    layers = report["layers"]
    return in_order(layers if len(layers) <= caps.modules else worst_first(layers)[: caps.modules])


def _table_row(report: Report, layer: Layer) -> list[Any]:
    derived = {
        "name": visible(label(layer), MAX_NAME),
        "bad": sum(layer.get(key) or 0 for key in ("nan_a", "nan_b", "inf_a", "inf_b")),
        "worst": _place(layer.get("worst_row")),
        "reason": visible(layer.get("reason") or "", MAX_NAME),
        "side": SIDES.get(layer["side"], ""),
        "golden": golden_words(layer) or None,
    }
    # The page shows three digits; six are kept so that it does not round twice.
    cells = [derived[key] if key in derived else short(layer.get(key), 6) for key, _, _ in COLUMNS]
    return [*cells, 1] if is_first_divergence(report, layer) else cells


def _place(row: Mapping[str, Any] | None) -> str | None:
    return f"{visible(row.get('sequence'), 40)} @ {row.get('position')}" if row else None


def _sides(report: Report) -> list[tuple[str, Any, Any]]:
    rows = (
        ("stage", "stage"), ("engine", "engine"), ("version", "engine_version"), ("model", "model"),
        ("dtype", "dtype"), ("device", "device"), ("sequences", "sequences"), ("prompt tokens", "prompt_tokens"),
        ("response tokens", "response_tokens"), ("tensors", "tensors"), ("complete", "complete"),
        ("prompts only", "prompts_only"), ("dump", "path"),
    )  # fmt: skip
    words = {True: "yes", False: "no"}
    values = [[report[side].get(key) for side in ("a", "b")] for _, key in rows]
    shown = [[words[value] if isinstance(value, bool) else value for value in pair] for pair in values]
    return [(title, a, b) for (title, _), (a, b) in zip(rows, shown)]
