"""Charts in the JSON that BokehJS reads, written without bokeh's Python, which takes longer to import than to compare.

Only what the reports' charts use: one figure with a logarithmic y axis. tests/test_report_charts.py makes the same
charts with bokeh itself.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Model = dict[str, Any]
"""An object of BokehJS: its class (``name``), ``id`` and ``attributes``."""

_numbers = itertools.count(1001)
"""Numbers of the objects: no two of a page have the same."""


def script() -> str:
    """Return the JavaScript of the installed bokeh's core, to be inlined."""
    found = importlib.util.find_spec("bokeh")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'bokeh'", name="bokeh")
    text = (Path(found.origin).parent / "server" / "static" / "js" / "bokeh.min.js").read_text(encoding="utf-8")
    return f'{text}\nBokeh.set_log_level("error");'


def model(name: str, /, **attributes: Any) -> Model:
    """Return a new object of a class of BokehJS."""
    made = {"type": "object", "name": name, "id": f"p{next(_numbers)}"}
    return made | ({"attributes": attributes} if attributes else {})


def reference(known: Model) -> Model:
    """Return what stands for an object that occurs before in the document."""
    return {"id": known["id"]}


def _field(name: str) -> dict[str, str]:
    return {"type": "field", "field": name}


def _value(value: Any) -> dict[str, Any]:
    return {"type": "value", "value": value}


def _map(entries: Mapping[Any, Any]) -> dict[str, Any]:
    return {"type": "map", "entries": [[key, value] for key, value in entries.items()]}


class Plot:
    """One chart: marks are added to it in the order in which they are drawn.

    ``y_range``: of a logarithmic axis; ``x``, ``y``: the label of an axis, and place -> label of its ticks (None: as
    bokeh chooses them); ``font`` of both.
    """

    def __init__(
        self,
        height: int,
        y_range: tuple[float, float],
        x: tuple[str, Mapping[int, str] | None],
        y: tuple[str, Mapping[float, str]],
        font: str,
    ) -> None:
        self._tools = [model(name) for name in ("PanTool", "BoxZoomTool", "ResetTool", "SaveTool")]
        self._marks: list[Model] = []
        axes = _axis("LinearAxis", "BasicTickFormatter", *x, font), _axis("LogAxis", "LogTickFormatter", *y, font)
        self._center = [_grid(axis, dimension) for dimension, axis in enumerate(axes)]
        self._figure: dict[str, Any] = {
            "height": height,
            "sizing_mode": "stretch_width",
            "x_range": model("DataRange1d"),
            "y_range": model("Range1d", start=y_range[0], end=y_range[1]),
            "x_scale": model("LinearScale"),
            "y_scale": model("LogScale"),
            "title": model("Title"),
            "outline_line_color": None,
            "toolbar_location": "above",
            "below": [axes[0]],
            "left": [axes[1]],
            "background_fill_color": None,
            "border_fill_color": None,
        }

    def source(self, columns: Mapping[str, Sequence[Any]]) -> Model:
        """Return a source of marks: name of a column -> its values. A second mark takes a reference to it."""
        selected = model("Selection", indices=[], line_indices=[])
        return model(
            "ColumnDataSource", selected=selected, selection_policy=model("UnionRenderers"), data=_map(columns)
        )

    def line(self, source: Model, x: str, y: str, color: str, *, width: float = 1, alpha: float = 1.0) -> Model:
        """Draw a line."""
        look = {"x": _field(x), "y": _field(y), "line_color": color} | ({"line_width": width} if width != 1 else {})
        plain = {"line_alpha": alpha} if alpha != 1 else {}
        return self._draw(source, "Line", look | plain, lambda faint: look | {"line_alpha": faint})

    def area(self, source: Model, x: str, y1: float, y2: str, color: str, *, alpha: float) -> Model:
        """Draw the area between a level and a line."""
        look = {"x": _field(x), "y1": _value(y1), "y2": _field(y2), "fill_color": color}
        dim = ("fill_alpha", "hatch_alpha")
        return self._draw(
            *(source, "VArea", look | {"fill_alpha": alpha}),
            lambda faint: look | dict(zip(dim, (faint, _value(faint)))),
        )

    def scatter(
        self, source: Model, x: str, y: str, color: str, marker: str, size: int, *, fill_alpha: float = 1.0
    ) -> Model:
        """Draw markers."""
        look = {"x": _field(x), "y": _field(y), "size": _value(size)}
        look |= {f"{part}_color": _value(color) for part in ("line", "fill", "hatch")}
        look |= {"marker": _value(marker)} if marker != "circle" else {}
        plain = {"fill_alpha": _value(fill_alpha)} if fill_alpha != 1 else {}
        dim = ("line_alpha", "fill_alpha", "hatch_alpha")
        return self._draw(source, "Scatter", look | plain, lambda faint: look | dict.fromkeys(dim, _value(faint)))

    def hover(self, marks: Sequence[Model], tips: Sequence[tuple[str, str]], **more: Any) -> None:
        """Show the columns of marks under the pointer."""
        known = [reference(mark) for mark in marks]
        words = [list(tip) for tip in tips]
        self._tools.append(model("HoverTool", visible=False, renderers=known, tooltips=words, **more))

    def add(self, name: str, /, **attributes: Any) -> None:
        """Add an annotation."""
        self._center.append(model(name, **attributes))

    def item(self) -> dict[str, Any]:
        """Return the chart as ``Bokeh.embed.embed_item`` takes it."""
        toolbar = model("Toolbar", tools=self._tools, logo=None, active_drag=None)
        release = version("bokeh")
        root = model("Figure", **self._figure, renderers=self._marks, toolbar=toolbar, center=self._center)
        return {
            "target_id": None,
            "root_id": root["id"],
            "doc": {"version": release, "title": "", "roots": [root]},
            "version": release,
        }

    def _draw(self, source: Model, glyph: str, look: Mapping[str, Any], faint: Any) -> Model:
        mark = model(
            "GlyphRenderer",
            data_source=source,
            view=model("CDSView", filter=model("AllIndices")),
            glyph=model(glyph, **look),
            nonselection_glyph=model(glyph, **faint(0.1)),
            muted_glyph=model(glyph, **faint(0.2)),
        )
        self._marks.append(mark)
        return mark


def _axis(name: str, formatter: str, label: str, ticks: Mapping[Any, str] | None, font: str) -> Model:
    ticker, labels = model("BasicTicker", mantissas=[1, 2, 5]), {}
    if ticks is not None:
        ticker, labels = model("FixedTicker", ticks=list(ticks), minor_ticks=[]), {"major_label_overrides": _map(ticks)}
    return model(
        name,
        ticker=ticker,
        formatter=model(formatter),
        axis_label=label,
        axis_label_text_font=font,
        axis_label_text_font_size="12px",
        axis_label_text_font_style="normal",
        **labels,
        major_label_policy=model("AllLabels"),
        major_label_text_font=font,
        major_label_text_font_size="12px",
        minor_tick_line_color=None,
    )


def _grid(axis: Model, dimension: int) -> Model:
    """Return the lines of a grid at the ticks of an axis, where these are chosen here."""
    known = {"axis": reference(axis)} | ({"dimension": dimension} if dimension else {})
    ticker = axis["attributes"]["ticker"]
    return model("Grid", **known, **({"ticker": reference(ticker)} if ticker["name"] == "FixedTicker" else {}))
