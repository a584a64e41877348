"""The charts of the pages are those that bokeh itself makes, without its Python being imported."""

from __future__ import annotations

import json
import subprocess
import sys
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


def normal(item: dict[str, Any]) -> Any:
    """Return a chart with each object named by where it is, without what bokeh says of it that is a default anyway.

    The configuration of notifications and the look of the zoom's box are BokehJS's own; so is a range's end at 1.
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
