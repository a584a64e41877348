"""One self-contained page from a template, data and scripts: nothing is loaded, nothing else may run.

A Content Security Policy with the hash of every script forbids the browser to load or run anything that is not in the
file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from probe.compare.report import charts
from probe.compare.report.model import clean_floats, number, visible
from probe.compare.report.shared import words

REPORTS = Path(__file__).parent.parent
#: Largest page in bytes that stays easy to mail and quick to open; above it a page shows less and says so.
MAX_BYTES = 5_000_000
MAX_NAME, MAX_TEXT = 200, 48
SHARED_SCRIPTS = ("shared/base.js", "shared/curve.js", "shared/strip.js")


def render_page(
    template: str,
    script: str,
    data: Mapping[str, Any],
    figures: Mapping[str, Any],
    context: Mapping[str, Any],
    filters: Mapping[str, Any],
) -> str:
    """Return the page of a template and a script (paths below ``compare/report``) with its data and charts.

    ``figures``: id of an element -> bokeh item, None where there is nothing to draw; ``context``: the names that the
    template uses, beside ``policy``, ``scripts``, ``style``, ``data``, ``figures`` and ``has`` (ids of the charts).
    """
    from markupsafe import Markup

    from probe.compare.report.shared.templates import environment as make_environment

    drawn = {name: item for name, item in figures.items() if item}
    scripts = ["\n" + (REPORTS / name).read_text(encoding="utf-8") for name in (*SHARED_SCRIPTS, script)]
    if drawn:
        scripts.insert(0, "\n" + charts.bokeh_script() + "\n")
    environment = make_environment(REPORTS)
    environment.filters.update(num=number, visible=visible, **filters)
    environment.globals["tell"] = words
    return environment.get_template(template).render(
        **context,
        policy=_policy(scripts),
        scripts=[Markup(text) for text in scripts],
        style=Markup((REPORTS / "page.css").read_text(encoding="utf-8")),
        data=Markup(encode_json(data)),
        figures=Markup(encode_json(drawn)),
        has=drawn.keys(),
    )


def encode_json(value: Any) -> str:
    """Return compact strict JSON that is safe inside a script element: it holds no ``<``, ``>`` or ``&``."""
    # Not ASCII only: a page of Chinese text would double in size.
    text = json.dumps(clean_floats(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _policy(scripts: Sequence[str]) -> str:
    hashes = [base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    # Bokeh sets inline styles and draws its toolbar icons from data URLs; nothing comes from outside the file.
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def short(value: Any, digits: int = 4) -> Any:
    """Return a float with fewer digits, anything else as it is."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def strips(
    tokens: Mapping[str, Any], sequences: int, limit: int, curves: Mapping[tuple[str, int], int] | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Return the strips of the ``sequences`` most divergent sequences that have one, and how many go without.

    ``curves``: (sequence, position) of a token -> the column of its layer curve, where the page has some.
    """
    entries = tokens.get("sequences") or []
    worst = sorted(range(len(entries)), key=lambda index: -(entries[index].get("max_abs") or 0.0))
    chosen = [entries[index] for index in sorted(worst[:sequences])]
    return [_strip(entry, limit, curves or {}) for entry in chosen], len(entries) - len(chosen)


def _strip(sequence: Mapping[str, Any], limit: int, curves: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    """Return one sequence as columns; over ``limit`` tokens, the part around the start of the response."""
    tokens = sequence.get("strip") or []
    prompt = sequence.get("prompt_len") or 0
    start = min(max(0, prompt - limit // 8), max(0, len(tokens) - limit))
    shown = tokens[start : start + limit]
    columns = [curves.get((sequence["sequence"], token["position"])) for token in shown]
    return {
        "sequence": visible(sequence["sequence"], MAX_NAME),
        "length": sequence.get("length"),
        "mean_abs": short(sequence.get("mean_abs")),
        "max_abs": short(sequence.get("max_abs")),
        "left_out": len(tokens) - len(shown),
        "position": [token["position"] for token in shown],
        "token": [token.get("token") for token in shown],
        "text": [None if token.get("text") is None else visible(token["text"], MAX_TEXT) for token in shown],
        "curves": [[index, column] for index, column in enumerate(columns) if column is not None],
        "response": "".join("1" if token.get("response") else "0" for token in shown),
        **{key: [short(token.get(key)) for token in shown] for key in ("logprob_a", "logprob_b", "diff", "prob_diff")},
    }
