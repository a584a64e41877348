"""The charts of the pages are those that bokeh itself makes, without its Python being imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bokeh_charts
import pytest
import report_fixture

from probe.compare.report import charts

POSITIONS = [
    {"position": 0, "mean_abs": 0.1, "max_abs": 0.2, "count": 3},
    {"position": 1, "mean_abs": 0.0, "max_abs": None, "count": 2},
    {"position": 2, "mean_abs": None, "count": 0},
]
STEPS = [{"step": step, "mean_prob_diff": 10.0**-step, "max_prob_diff": 0.3, "compared": 5} for step in range(1, 4)]


KNOWN = {
    "AllIndices": "",
    "AllLabels": "",
    "BasicTickFormatter": "",
    "BasicTicker": "mantissas",
    "BoxZoomTool": "",
    "CDSView": "filter",
    "ColumnDataSource": "data selected selection_policy",
    "DataRange1d": "",
    "Figure": "background_fill_color below border_fill_color center height left outline_line_color renderers "
    "sizing_mode title toolbar toolbar_location x_range x_scale y_range y_scale",
    "FixedTicker": "minor_ticks ticks",
    "GlyphRenderer": "data_source glyph muted_glyph nonselection_glyph view",
    "Grid": "axis dimension ticker",
    "HoverTool": "mode renderers tooltips visible",
    "Label": "text text_align text_font text_font_size x x_offset y y_units",
    "Line": "line_alpha line_color line_width x y",
    **dict.fromkeys(
        ("LinearAxis", "LogAxis"),
        "axis_label axis_label_text_font axis_label_text_font_size axis_label_text_font_style formatter "
        "major_label_overrides major_label_policy major_label_text_font major_label_text_font_size "
        "minor_tick_line_color ticker",
    ),
    "LinearScale": "",
    "LogScale": "",
    "LogTickFormatter": "",
    "PanTool": "",
    "Range1d": "end start",
    "ResetTool": "",
    "SaveTool": "",
    "Scatter": "fill_alpha fill_color hatch_alpha hatch_color line_alpha line_color marker size x y",
    "Selection": "indices line_indices",
    "Span": "dimension line_color line_dash location",
    "Title": "",
    "Toolbar": "active_drag logo tools",
    "UnionRenderers": "",
    "VArea": "fill_alpha fill_color hatch_alpha x y1 y2",
}
"""Classes of bokeh 3.4.0, the oldest that setup.cfg takes, and those of their attributes that the charts use.

BokehJS draws no chart that has an attribute it does not know: whatever is new here must be looked up in that release.
"""


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a chart."""
    if isinstance(node, dict) and node.get("type") == "object":
        yield node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from objects(value)


def normal(item: dict[str, Any]) -> Any:
    """Return a chart with each object named by where it is, without what bokeh says of it that is a default anyway.

    The configuration of notifications, the look of the zoom's box and the order of tips are BokehJS's own; so is a
    range's end at 1.
    """
    places: dict[str, str] = {}

    def note(node: Any, path: str) -> None:
        if isinstance(node, dict):
            places.update({node["id"]: path} if node.get("type") == "object" else {})
        for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            note(value, f"{path}/{key}")

    def named(node: Any) -> Any:
        if isinstance(node, list):
            return [named(value) for value in node]
        if not isinstance(node, dict):
            return node
        node = {key: places.get(v, v) if key in ("id", "root_id") else named(v) for key, v in node.items()}
        if node.get("name") == "BoxZoomTool":
            node.pop("attributes", None)
        if node.get("name") == "HoverTool" and node["attributes"].get("sort_by", "") is None:
            del node["attributes"]["sort_by"]  # not known before bokeh 3.8
        if node.get("name") == "Range1d":
            node["attributes"].setdefault("end", 1.0)
        return node

    item = json.loads(json.dumps(item))
    item["doc"].pop("config", None)
    note(item, "")
    return named(item)


@pytest.mark.parametrize("name", ["divergent", "identical"])
def test_the_layer_curve_is_the_one_that_bokeh_makes(name):
    report = report_fixture.identical() if name == "identical" else report_fixture.divergent()
    made = [of.layer_curve(report, report["layers"]) for of in (charts, bokeh_charts)]
    assert normal(made[0]) == normal(made[1])


def test_the_curves_over_positions_and_steps_are_those_that_bokeh_makes():
    for name, entries in (("position_curve", POSITIONS), ("step_curve", STEPS)):
        made = [getattr(of, name)(entries) for of in (charts, bokeh_charts)]
        assert made[0] and normal(made[0]) == normal(made[1])
    assert charts.position_curve(POSITIONS[2:]) is None and charts.step_curve(STEPS[:1]) is None


def test_charts_hold_only_what_every_allowed_bokeh_knows():
    import bokeh.models
    from bokeh.plotting import figure

    reports = report_fixture.divergent(), report_fixture.identical()
    made = [charts.layer_curve(report, report["layers"]) for report in reports]
    for found in objects([*made, charts.position_curve(POSITIONS), charts.step_curve(STEPS)]):
        used = set(found.get("attributes", {}))
        assert used <= set(KNOWN[found["name"]].split()), found["name"]
        installed = figure if found["name"] == "Figure" else getattr(bokeh.models, found["name"])
        assert used <= set(installed.properties()), found["name"]


def test_no_two_charts_share_an_object():
    texts = [json.dumps(charts.position_curve(POSITIONS)) for _ in range(2)]
    ids = [{part.split('"')[0] for part in text.split('"id": "')[1:]} for text in texts]
    assert ids[0] and not ids[0] & ids[1]


def test_the_script_is_what_bokeh_inlines():
    from bokeh.resources import Resources

    text = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw)
    lines = [line for line in text.split("\n") if line not in ("/* BEGIN bokeh.min.js */", "/* END bokeh.min.js */")]
    assert [line for line in charts.bokeh_script().split("\n") if line] == [line for line in lines if line]


def test_a_page_is_made_without_importing_bokeh():
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import report_fixture
from probe.compare.report import html
assert "Bokeh" in html.render(report_fixture.divergent())
print("bokeh" in sys.modules)
"""
    folder = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
