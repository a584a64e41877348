"""The pictures of the HTML report as bokeh documents, ready to be embedded as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from probe.compare.report.model import VERDICTS, Layer, is_first_divergence, label, number, visible
from probe.compare.report.shared.bokeh import Model, Plot, reference, script

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
    return script()


def layer_curve(report: Mapping[str, Any], layers: Sequence[Layer]) -> dict[str, Any] | None:
    """Return the layer curve: relL2 of every tensor in execution order over the noise floor, or None if none has one.

    The x axis is the index in ``layers``; y is the relative L2 error, without unit, on a log scale. Zero is drawn on a
    line of its own under the data.
    """
    drawn = [(index, layer) for index, layer in enumerate(layers) if layer.get("rel_l2") is not None]
    if not drawn:
        return None
    low = zero_line([layer[key] for _, layer in drawn for key in ("rel_l2", "floor") if layer.get(key)])
    plot = _figure(low, max(_top(layer) for _, layer in drawn), "relative L2 error", 360, *_layer_axis(layers))
    _floor_band(plot, drawn, low)
    points = [found for verdict in VERDICTS if (found := _points(plot, drawn, verdict, low))]
    tips = [("module", "@name"), ("verdict", "@verdict"), ("relL2", "@rel_l2"), ("noise floor", "@floor")]
    plot.hover(points, tips)
    for index, layer in drawn:
        if is_first_divergence(dict(report), layer):
            look = {"line_color": "#d55e00", "line_dash": [6]}
            plot.add("Span", location=index, dimension="height", **look)
            plot.add("Label", **_first_label(index, len(layers)))
    return plot.item()


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
    mean, top = keys
    entries = [entry for entry in found if entry.get(mean) is not None]
    if not entries:
        return None
    values = [entry[key] for entry in entries for key in keys if entry.get(key)]
    low = zero_line(values)
    plot = _figure(low, max(values, default=low * _ZERO_GAP), y_label, 260, x[1])
    source = plot.source(
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
        plot.line(source, "x", key, color, alpha=0.5)
        source = reference(source)
        dots = plot.scatter(source, "x", key, color, marker, 6)
    tips = [(x[0], "@x"), ("tokens", "@count"), ("mean", "@mean_text"), ("max", "@max_text")]
    plot.hover([dots], tips, mode="vline")
    return plot.item()


def zero_line(values: Sequence[float]) -> float:
    """Return the power of ten, well under the smallest positive value, at which zero is drawn."""
    positive = [value for value in values if value > 0]
    return 10.0 ** math.floor(math.log10(min(positive, default=1e-8) / _ZERO_GAP))


def _top(layer: Layer) -> float:
    return max(layer["rel_l2"], layer.get("floor") or 0.0)


def _figure(
    low: float, top: float, y_label: str, height: int, x_label: str, x_ticks: Mapping[int, str] | None = None
) -> Plot:
    """Return an empty chart with a logarithmic y axis, transparent and quiet: the page sets the colours of text and
    lines, and holds the legend. ``x_ticks``: the places on the x axis that have a label, where not all do."""
    high = 10.0 ** math.ceil(math.log10(max(top, low * 100)) + 0.2)
    first, last = round(math.log10(low)), round(math.log10(high))
    step = max(1, math.ceil((last - first) / 8))
    # The lowest decade holds nothing but the zero line; the one above it stays unlabelled as the gap.
    decades = [10.0**power for power in range(first + 1, last + 1, step)]
    y_ticks = {low: "0", **{tick: _decade(tick) for tick in decades}}
    return Plot(height, (low / 2, high), (x_label, x_ticks), (y_label, y_ticks), _FONT)


def _decade(tick: float) -> str:
    return f"{tick:g}" if 0.01 <= tick <= 1000 else f"1e{round(math.log10(tick))}"


def _layer_axis(layers: Sequence[Layer]) -> tuple[str, dict[int, str]]:
    """Return the label of the x axis, and its ticks: where each transformer layer begins, as far as there is room."""
    shown: dict[int, str] = {}
    gap, free, previous = len(layers) / _X_LABELS, 0.0, None
    for index, layer in enumerate(layers):
        match = re.match(r"layers\.(\d+)\b", layer["name"])
        number_here = match[1] if match else None
        if number_here is not None and number_here != previous and index >= free:
            shown[index] = f"L{number_here}"
            free = index + gap
        previous = number_here
    return "execution order (L = first tensor of that layer)", shown


def _floor_band(plot: Plot, drawn: Sequence[tuple[int, Layer]], low: float) -> None:
    known = [(index, layer["floor"]) for index, layer in drawn if layer.get("floor")]
    if not known:
        return
    # Half a step to each side, so that a single tensor still has a band.
    x = [known[0][0] - 0.5, *(index for index, _ in known), known[-1][0] + 0.5]
    y = [known[0][1], *(floor for _, floor in known), known[-1][1]]
    plot.area(plot.source({"x": x, "y2": y}), "x", low / 2, "y2", _FLOOR_COLOR, alpha=0.18)
    plot.line(plot.source({"x": x, "y": y}), "x", "y", _FLOOR_COLOR, width=1.5)


def _points(plot: Plot, drawn: Sequence[tuple[int, Layer]], verdict: str, low: float) -> Model | None:
    chosen = [(index, layer) for index, layer in drawn if layer["verdict"] == verdict]
    if not chosen:
        return None
    color, marker = MARKS[verdict]
    source = plot.source(
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
    return plot.scatter(source, "x", "y", color, marker, size, fill_alpha=0.75)


def _first_label(index: int, count: int) -> dict[str, Any]:
    on_left = index > count / 2
    return {
        "x": index,
        "y": 12,
        "y_units": "screen",
        "x_offset": -6 if on_left else 6,
        "text": "first divergence",
        **({"text_align": "right"} if on_left else {}),
        "text_font": _FONT,
        "text_font_size": "12px",
    }
