"""The charts of the pages as bokeh makes them: what those that are written without it are compared with."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from probe.compare.report.model import VERDICTS, Layer, is_first_divergence, label, number, visible

#: Colour and marker of each verdict. The colours are Okabe and Ito's palette, made for colour-blind readers (Color
#: Universal Design, 2008), which keeps its contrast on white and on black; the marker repeats the information.
MARKS: dict[str, tuple[str, str]] = {
    "divergent": ("#d55e00", "diamond"),
    "suspect": ("#e69f00", "triangle"),
    "incomparable": ("#cc79a7", "square_x"),
    "missing": ("#999999", "x"),
    "consistent": ("#009e73", "circle"),
    "identical": ("#56b4e9", "circle_dot"),
}
_FLOOR_COLOR = "#7f8792"
_MEAN, _MAX = ("#0072b2", "circle"), ("#d55e00", "diamond")
PROBABILITIES = ("mean_prob_diff", "max_prob_diff"), "|difference of probabilities|"
"""Keys of mean and maximum, and what they are."""
_FONT = "system-ui, sans-serif"
_X_LABELS = 9  # more would overlap on a phone

#: Room under the smallest drawn value, as a factor: where an error of exactly zero is put on the log axis.
_ZERO_GAP = 30.0


def bokeh_script() -> str:
    """Return the JavaScript of the installed bokeh's core, to be inlined."""
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw)


def layer_curve(report: Mapping[str, Any], layers: Sequence[Layer]) -> dict[str, Any] | None:
    """Return the layer curve: relL2 of every tensor in execution order over the noise floor, or None if none has one.

    The x axis is the index in ``layers``; y is the relative L2 error, without unit, on a log scale. Zero is drawn on a
    line of its own under the data.
    """
    from bokeh.embed import json_item
    from bokeh.models import HoverTool, Label, Span

    drawn = [(index, layer) for index, layer in enumerate(layers) if layer.get("rel_l2") is not None]
    if not drawn:
        return None
    low = zero_line([layer[key] for _, layer in drawn for key in ("rel_l2", "floor") if layer.get(key)])
    figure = _figure(low, max(_top(layer) for _, layer in drawn), "relative L2 error", 360)
    _layer_axis(figure, layers)
    _floor_band(figure, drawn, low)
    renderers = [_points(figure, drawn, verdict, low) for verdict in VERDICTS]
    figure.add_tools(
        HoverTool(
            visible=False,
            renderers=[renderer for renderer in renderers if renderer],
            tooltips=[("module", "@name"), ("verdict", "@verdict"), ("relL2", "@rel_l2"), ("noise floor", "@floor")],
        )
    )
    for index, layer in drawn:
        if is_first_divergence(dict(report), layer):
            figure.add_layout(Span(location=index, dimension="height", line_color="#d55e00", line_dash="dashed"))
            figure.add_layout(_first_label(Label, index, len(layers)))
    _finish(figure)
    return dict(json_item(figure))


def position_curve(by_position: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return mean and maximum absolute difference per position within the response, or None where nothing is known.

    Of log-probs in nats; of probabilities where a monitor knows nothing else.
    """
    if any(entry.get("mean_abs") is not None for entry in by_position):
        keys, label = ("mean_abs", "max_abs"), "|log-prob difference| (nats)"
    else:
        keys, label = PROBABILITIES
    return _mean_and_max(by_position, ("position", "position in the response"), keys, label, "count")


def step_curve(by_step: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return mean and maximum absolute difference of probabilities per training step, None below two steps."""
    return _mean_and_max(by_step, ("step", "training step"), *PROBABILITIES, "compared") if len(by_step) > 1 else None


def _mean_and_max(
    found: Sequence[Mapping[str, Any]], x: tuple[str, str], keys: tuple[str, str], y_label: str, count: str
) -> dict[str, Any] | None:
    """Return a chart of two lines over ``x`` (key, label); ``keys``: of the mean and of the maximum, in ``found``."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, HoverTool

    mean, top = keys
    entries = [entry for entry in found if entry.get(mean) is not None]
    if not entries:
        return None
    values = [entry[key] for entry in entries for key in keys if entry.get(key)]
    low = zero_line(values)
    figure = _figure(low, max(values, default=low * _ZERO_GAP), y_label, 260)
    figure.xaxis.axis_label = x[1]
    source = ColumnDataSource(
        {
            "x": [entry[x[0]] for entry in entries],
            "mean": [entry[mean] or low for entry in entries],
            "max": [entry.get(top) or low for entry in entries],
            "mean_text": [number(entry[mean]) for entry in entries],
            "max_text": [number(entry.get(top)) for entry in entries],
            "count": [entry.get(count) for entry in entries],
        }
    )
    for key, (color, marker) in (("max", _MAX), ("mean", _MEAN)):
        figure.line("x", key, source=source, color=color, alpha=0.5)
        dots = figure.scatter("x", key, source=source, color=color, marker=marker, size=6)
    tips = [(x[0], "@x"), ("tokens", "@count"), ("mean", "@mean_text"), ("max", "@max_text")]
    figure.add_tools(HoverTool(visible=False, renderers=[dots], mode="vline", tooltips=tips))
    _finish(figure)
    return dict(json_item(figure))


def zero_line(values: Sequence[float]) -> float:
    """Return the power of ten, well under the smallest positive value, at which zero is drawn."""
    positive = [value for value in values if value > 0]
    return 10.0 ** math.floor(math.log10(min(positive, default=1e-8) / _ZERO_GAP))


def _top(layer: Layer) -> float:
    return max(layer["rel_l2"], layer.get("floor") or 0.0)


def _figure(low: float, top: float, y_label: str, height: int) -> Any:
    from bokeh.models import FixedTicker
    from bokeh.plotting import figure

    high = 10.0 ** math.ceil(math.log10(max(top, low * 100)) + 0.2)
    plot = figure(
        sizing_mode="stretch_width",
        height=height,
        y_axis_type="log",
        y_range=(low / 2, high),
        tools="pan,box_zoom,reset,save",
        active_drag=None,
        toolbar_location="above",
    )
    first, last = round(math.log10(low)), round(math.log10(high))
    step = max(1, math.ceil((last - first) / 8))
    # The lowest decade holds nothing but the zero line; the one above it stays unlabelled as the gap.
    decades = [10.0**power for power in range(first + 1, last + 1, step)]
    plot.yaxis.ticker = FixedTicker(ticks=[low, *decades])
    plot.yaxis.major_label_overrides = {low: "0", **{tick: _decade(tick) for tick in decades}}
    plot.ygrid.ticker = plot.yaxis[0].ticker
    plot.yaxis.axis_label = y_label
    return plot


def _decade(tick: float) -> str:
    return f"{tick:g}" if 0.01 <= tick <= 1000 else f"1e{round(math.log10(tick))}"


def _layer_axis(figure: Any, layers: Sequence[Layer]) -> None:
    """Label the x axis where each transformer layer begins, as far as there is room."""
    from bokeh.models import FixedTicker

    shown: dict[int, str] = {}
    gap, free, previous = len(layers) / _X_LABELS, 0.0, None
    for index, layer in enumerate(layers):
        match = re.match(r"layers\.(\d+)\b", layer["name"])
        number_here = match[1] if match else None
        if number_here is not None and number_here != previous and index >= free:
            shown[index] = f"L{number_here}"
            free = index + gap
        previous = number_here
    figure.xaxis.ticker = FixedTicker(ticks=list(shown))
    figure.xaxis.major_label_overrides = shown
    figure.xgrid.ticker = figure.xaxis[0].ticker
    figure.xaxis.axis_label = "execution order (L = first tensor of that layer)"


def _floor_band(figure: Any, drawn: Sequence[tuple[int, Layer]], low: float) -> None:
    known = [(index, layer["floor"]) for index, layer in drawn if layer.get("floor")]
    if not known:
        return
    # Half a step to each side, so that a single tensor still has a band.
    x = [known[0][0] - 0.5, *(index for index, _ in known), known[-1][0] + 0.5]
    y = [known[0][1], *(floor for _, floor in known), known[-1][1]]
    figure.varea(x=x, y1=low / 2, y2=y, fill_color=_FLOOR_COLOR, fill_alpha=0.18)
    figure.line(x=x, y=y, line_color=_FLOOR_COLOR, line_width=1.5)


def _points(figure: Any, drawn: Sequence[tuple[int, Layer]], verdict: str, low: float) -> Any:
    from bokeh.models import ColumnDataSource

    chosen = [(index, layer) for index, layer in drawn if layer["verdict"] == verdict]
    if not chosen:
        return None
    color, marker = MARKS[verdict]
    source = ColumnDataSource(
        {
            "x": [index for index, _ in chosen],
            "y": [layer["rel_l2"] or low for _, layer in chosen],
            "name": [visible(label(layer), 120) for _, layer in chosen],
            "verdict": [verdict] * len(chosen),
            "rel_l2": [number(layer["rel_l2"]) for _, layer in chosen],
            "floor": [number(layer.get("floor")) for _, layer in chosen],
        }
    )
    size = 9 if verdict in ("divergent", "suspect") else 6
    return figure.scatter("x", "y", source=source, color=color, marker=marker, size=size, fill_alpha=0.75)


def _first_label(label_class: Any, index: int, count: int) -> Any:
    on_left = index > count / 2
    return label_class(
        x=index,
        y=12,
        y_units="screen",
        x_offset=-6 if on_left else 6,
        text="first divergence",
        text_align="right" if on_left else "left",
        text_font=_FONT,
        text_font_size="12px",
    )


def _finish(figure: Any) -> None:
    """Make the chart transparent and quiet: the page sets the colours of text and lines, and holds the legend."""
    figure.background_fill_color = None
    figure.border_fill_color = None
    figure.outline_line_color = None
    figure.toolbar.logo = None
    for axis in (*figure.xaxis, *figure.yaxis):
        axis.axis_label_text_font = axis.major_label_text_font = _FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = "12px"
        axis.major_label_text_font_size = "12px"
        axis.minor_tick_line_color = None
