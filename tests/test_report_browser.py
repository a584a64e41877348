"""The HTML report in a real browser: it loads nothing, complains about nothing, and its controls work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_fixture
from chromium_driver import Page

from probe.compare.report import model, write_report
from probe.compare.report.findings import first_words

pytestmark = pytest.mark.slow

FIXTURES = ("identical", "consistent", "divergent", "weights_failed", "incomparable", "empty", "hostile", "large")

# Bokeh draws each figure on canvases inside shadow roots; ink counts what is painted on them.
INK = """(() => {
  const canvases = [];
  const walk = (node) => {
    for (const element of node.querySelectorAll("*")) {
      if (element.tagName === "CANVAS") canvases.push(element);
      if (element.shadowRoot) walk(element.shadowRoot);
    }
  };
  walk(document.getElementById(ID));
  return canvases.reduce((sum, canvas) => {
    if (!canvas.width || !canvas.height) return sum;
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return sum + pixels.filter((value, index) => index % 4 === 3 && value > 0).length;
  }, 0);
})()"""
NAMES = """[...document.querySelectorAll('#module-table tbody tr')]
  .map((row) => row.cells[1].textContent.replace(/ first divergence$/, ""))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    return {name: write_report(getattr(report_fixture, name)(), ["html"], folder / name)["html"] for name in FIXTURES}


def ink(page: Page, chart: str) -> int:
    return int(page.run(INK.replace("ID", json.dumps(chart))))


def press(page: Page, key: str) -> None:
    code = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37}[key]
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)


def column(page: Page, key: str) -> list[str]:
    index = f"[...document.querySelectorAll('#module-table th')].findIndex((th) => th.dataset.key === '{key}')"
    return list(page.run(f"(() => {{ const i = {index}; return [...document.querySelectorAll("
                         "'#module-table tbody tr')].map((row) => row.cells[i].textContent); })()"))  # fmt: skip


def type_filter(page: Page, text: str) -> None:
    page.run("(() => { const box = document.getElementById('module-filter'); box.value = ''; box.focus(); })()")
    page.call("Input.insertText", text=text)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", FIXTURES)
def test_page_asks_for_nothing_and_reports_no_error(
    browser: Page, reports: dict[str, Path], name: str, dark: bool
) -> None:
    browser.open(reports[name], dark=dark)
    if name not in ("incomparable", "empty"):
        browser.wait(
            "typeof Bokeh !== 'undefined' && Bokeh.documents.length === 2 && Bokeh.documents.every((d) => d.is_idle)"
        )
    outside = [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))]
    assert outside == []
    assert [url for url in browser.requests if url.startswith("file:")] == [reports[name].as_uri()]
    assert browser.console == []


def test_the_check_above_would_notice_a_request(browser: Page, tmp_path: Path) -> None:
    page = tmp_path / "loads.html"
    page.write_text('<!DOCTYPE html><title>x</title><img src="http://host.invalid/x.png"><script>nothing()</script>')
    browser.open(page)
    assert "http://host.invalid/x.png" in browser.requests
    assert any("nothing is not defined" in line for line in browser.console)
    assert any("ERR_NAME_NOT_RESOLVED" in line for line in browser.console)


@pytest.mark.parametrize("width", [1200, 420])
@pytest.mark.parametrize("name", FIXTURES)
def test_page_does_not_scroll_sideways(browser: Page, reports: dict[str, Path], name: str, width: int) -> None:
    browser.open(reports[name], width=width)
    browser.run("document.querySelectorAll('details').forEach((block) => { block.open = true; })")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    # Nothing may hang over the edge unseen either, other than what a scrolling container holds.
    over = browser.run(
        "[...document.querySelectorAll('main *')]"
        ".filter((e) => !e.closest('.scroll, .command pre, nav, .strip, .chart'))"
        ".filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert over == []


@pytest.mark.parametrize("chart", ["layer-curve", "position-curve"])
def test_charts_are_drawn_and_redrawn_for_the_dark_scheme(browser: Page, reports: dict[str, Path], chart: str) -> None:
    browser.open(reports["divergent"])
    # Axes, labels and 59 points paint some thousand pixels; an empty canvas has none.
    browser.wait(f"{INK.replace('ID', json.dumps(chart))} > 2000")
    light = browser.run("Bokeh.documents[0].roots()[0].below[0].major_label_text_color.value")
    browser.set_dark(True)
    dark = "Bokeh.documents[0].roots()[0].below[0].major_label_text_color.value"
    browser.wait(f"{dark} !== {json.dumps(light)}")
    assert ink(browser, chart) > 2000


def test_tables_show_the_figures_as_the_other_forms_do(browser: Page, reports: dict[str, Path]) -> None:
    report = report_fixture.divergent()
    browser.open(reports["divergent"])
    assert browser.run(NAMES) == [model.label(layer) for layer in report["layers"]]
    for key in ("rel_l2", "ratio", "max_abs"):
        expected = [model.number(layer[key]) for layer in report["layers"]]
        assert column(browser, key) == expected


def test_sorting_by_mouse_and_keyboard(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["divergent"])
    sorted_by = "[...document.querySelectorAll('#module-table th[aria-sort]')].map((h) => [h.dataset.key, h.ariaSort])"
    assert browser.run(sorted_by) == [["order", "ascending"]]
    browser.run("document.querySelector('th[data-key=rel_l2] button').click()")
    assert browser.run(sorted_by) == [["rel_l2", "descending"]]
    figures = [float(cell) for cell in column(browser, "rel_l2")]
    assert figures == sorted(figures, reverse=True) and figures[0] > figures[-1]
    browser.run("document.querySelector('th[data-key=rel_l2] button').focus()")
    press(browser, "Enter")
    assert browser.run(sorted_by) == [["rel_l2", "ascending"]]
    assert [float(cell) for cell in column(browser, "rel_l2")] == figures[::-1]
    browser.run("document.querySelector('th[data-key=verdict] button').click()")
    words = column(browser, "verdict")
    assert words == sorted(words, key=model.VERDICTS.index) and words[0] == "divergent"


def test_missing_figures_sort_last_either_way(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["weights_failed"])
    for _ in range(2):
        browser.run("document.querySelector('th[data-key=rel_l2] button').click()")
        figures = column(browser, "rel_l2")
        assert figures[-2:] == ["-", "-"] and "-" not in figures[:-2]


def test_filters_narrow_the_table_and_say_how_far(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["divergent"])
    status = "document.getElementById('module-status').textContent"
    type_filter(browser, "Layers.2 MLP")
    expected = [f"layers.2.mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj:input.0", "down_proj")]
    assert browser.run(NAMES) == expected
    assert browser.run(status) == "4 of 59 modules"
    type_filter(browser, "embed")
    browser.run(
        "(() => { const s = document.getElementById('verdict-filter'); s.value = 'divergent';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    assert browser.run(NAMES) == [] and browser.run(status) == "0 of 59 modules"
    browser.run("document.getElementById('module-filter').value = ''")
    type_filter(browser, "rotary_emb:")
    assert browser.run(NAMES) == [f"layers.{layer}.self_attn.rotary_emb:output.1" for layer in (1, 2, 3)]


def test_long_table_grows_on_request(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["large"])
    assert len(browser.run(NAMES)) == 200
    browser.run("document.getElementById('module-more').click()")
    assert len(browser.run(NAMES)) == 899
    assert browser.run("document.getElementById('module-more').hidden") is True


def test_token_strip_selects_sequences_and_steps_with_arrow_keys(browser: Page, reports: dict[str, Path]) -> None:
    sequences = report_fixture.divergent()["tokens"]["sequences"]
    browser.open(reports["divergent"])
    spans = "[...document.querySelectorAll('#strip span')]"
    worst = max(range(len(sequences)), key=lambda index: sequences[index]["max_abs"])
    assert browser.run("document.getElementById('strip-sequence').value") == str(worst)
    browser.run(
        "(() => { const s = document.getElementById('strip-sequence'); s.value = '2';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    expected = [model.visible(token["text"]) for token in sequences[2]["strip"]]
    assert browser.run(f"{spans}.map((span) => span.textContent)") == expected
    assert browser.run(f"{spans}.filter((span) => span.classList.contains('prompt')).length") == 9
    assert browser.run(f"{spans}.filter((span) => span.tabIndex === 0).length") == 1
    browser.run(f"{spans}[0].focus()")
    press(browser, "ArrowRight")
    press(browser, "ArrowRight")
    press(browser, "ArrowLeft")
    assert browser.run("document.activeElement.dataset.index") == "1"
    readout = browser.run("document.getElementById('strip-readout').textContent")
    assert readout.startswith(f"position 1 (prompt), token {sequences[2]['strip'][1]['token']}")


def test_token_colour_follows_the_size_of_the_difference(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["divergent"])
    index = int(browser.run("document.getElementById('strip-sequence').value"))
    strip = report_fixture.divergent()["tokens"]["sequences"][index]["strip"]
    steps = (0.001, 0.01, 0.03, 0.1, 1)
    expected = [sum(abs(token["diff"] or 0) >= step for step in steps) for token in strip]
    shown = browser.run(
        "[...document.querySelectorAll('#strip span')].map((s) => Number((s.className.match(/h(\\d)/) || [0, 0])[1]))"
    )
    assert shown == expected and len(set(shown)) > 2
    browser.open(reports["consistent"])
    assert browser.run("document.querySelectorAll('#strip [class*=h1], #strip [class*=h5]').length") == 0


def test_hostile_text_runs_nothing(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["hostile"])
    assert browser.run("document.title") == "divergent: rollout (vllm) vs actor (megatron) - probe"
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert report_fixture.HOSTILE_NAME in browser.run(NAMES)


def test_page_without_scripts_still_shows_the_figures(browser: Page, reports: dict[str, Path]) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(reports["divergent"])
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    names = " ".join(str(node.get("name", {}).get("value", "")) for node in tree)
    assert "Scripts are off" in names and "First divergence:" in names
    assert "torch differs: 2.13.0 against 2.12.1" in names


def test_copy_button_answers(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["divergent"])
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    button = "document.querySelector('.verdict button.copy')"
    assert browser.run(f"{button}.hidden") is False
    browser.call("Runtime.evaluate", expression=f"{button}.click()", userGesture=True)
    browser.wait(f"{button}.textContent === 'Copied'")


def test_heat_map_is_drawn_and_walked_with_the_keyboard(browser: Page, reports: dict[str, Path]) -> None:
    heat = report_fixture.divergent()["located"]["heat"]
    browser.open(reports["divergent"])
    pixels = """(() => { const c = document.getElementById("heat-map");
      const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
      return new Set(Array.from({length: data.length / 4}, (_, i) => data.slice(4 * i, 4 * i + 4).join())).size; })()"""
    assert browser.run(pixels) > 6
    cells = {
        (row, column): cell for column, row_cells in enumerate(heat["cells"]) for row, cell in enumerate(row_cells)
    }
    row, column = max(cells, key=lambda at: (cells[at], -at[1]))
    readout = "document.getElementById('heat-readout').textContent"

    def told(row: int, column: int) -> str:
        token = heat["tokens"][column]
        place = f"position {token['position']} of {token['sequence']}, token {token['token']}"
        return f"{heat['layers'][row]}, {place}: {model.number(cells[row, column])} noise floors"

    browser.run("document.getElementById('heat-map').focus()")
    assert browser.run(readout) == told(row, column)
    step = "ArrowRight" if column + 1 < len(heat["tokens"]) else "ArrowLeft"
    press(browser, step)
    assert browser.run(readout) == told(row, column + (1 if step == "ArrowRight" else -1))
    browser.run("document.getElementById('heat-details').open = true")
    browser.wait(f"document.querySelectorAll('#heat-data tbody tr').length === {len(heat['tokens'])}")
    first = browser.run("[...document.querySelectorAll('#heat-data tbody tr')[0].cells].map((c) => c.textContent)")
    assert first[3:] == [model.number(cell) for cell in heat["cells"][0]]


def test_heat_map_is_redrawn_for_the_dark_scheme(browser: Page, reports: dict[str, Path]) -> None:
    corner = """(() => { const c = document.getElementById("heat-map");
      return [...c.getContext("2d").getImageData(c.width - 3, 8, 1, 1).data].join(); })()"""
    browser.open(reports["divergent"])
    light = browser.run(corner)
    browser.set_dark(True)
    browser.wait(f"{corner} !== {json.dumps(light)}")


# -- layer curves -----------------------------------------------------------------------------------------------------

TITLE, WORDS = (f"document.getElementById('curve-{name}').textContent" for name in ("title", "words"))
HIDDEN = "document.getElementById('curve-panel').hidden"
POINTS = "[...document.querySelectorAll('#curve-chart circle title')].map((title) => title.textContent)"


def column_of(heat: dict[str, Any], token: dict[str, Any], sequence: str) -> int:
    """Return which token of the heat map is the row that scores a token."""
    places = [(at["sequence"], at["position"]) for at in heat["tokens"]]
    return places.index((sequence, token["position"] - 1))


def points(heat: dict[str, Any], column: int) -> list[str]:
    pairs = zip(heat["layers"], heat["cells"][column])
    return [f"{layer}: {model.number(cell)} noise floors" for layer, cell in pairs if cell is not None]


def test_a_worst_token_opens_its_layer_curve(browser: Page, reports: dict[str, Path]) -> None:
    report = report_fixture.divergent()
    heat = report["located"]["heat"]
    browser.open(reports["divergent"])
    assert browser.run(HIDDEN) is True
    with_curve = [token for token in report["tokens"]["worst"] if token["curve"]]
    names = browser.run("[...document.querySelectorAll('#worst-tokens button')].map((b) => b.textContent)")
    assert names == [first_words(token) for token in with_curve] and 0 < len(names) < len(report["tokens"]["worst"])
    for number, token in enumerate(with_curve):
        browser.run(f"document.querySelectorAll('#worst-tokens button')[{number}].click()")
        assert browser.run(HIDDEN) is False
        place = f"“{token['text']}” at position {token['position']} of {token['sequence']}"
        assert browser.run(TITLE) == f"Layer curve of {place}"
        assert browser.run(POINTS) == points(heat, column_of(heat, token, token["sequence"]))
        departs = f"leaves the noise band first in {first_words(token)}: relative L2 0.4, where 2e-05 is allowed"
        assert (departs if token["first_layer"] else "stays within the noise band") in browser.run(WORDS)
    # it stands below the table that was clicked, and its data are in a table too
    assert browser.run("document.getElementById('curve-panel').previousElementSibling.querySelector('table').id") == (
        "worst-tokens"
    )
    rows = browser.run("[...document.querySelectorAll('#curve-table tbody tr')].map((r) => r.cells[0].textContent)")
    assert rows == heat["layers"]


def test_a_token_of_the_strip_opens_its_curve_by_mouse_and_by_keyboard(browser: Page, reports: dict[str, Path]) -> None:
    report = report_fixture.divergent()
    heat, strip = report["located"]["heat"], report["tokens"]["sequences"][0]["strip"]
    browser.open(reports["divergent"])
    browser.run(
        "(() => { const s = document.getElementById('strip-sequence'); s.value = '0';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    spans = "[...document.querySelectorAll('#strip span')]"
    # position 0 is scored by no row; the fixture's heat map holds rows 0 to 39 of this sequence
    clickable = browser.run(f"{spans}.filter((s) => s.classList.contains('has-curve')).map((s) => s.dataset.index)")
    assert clickable == [str(index) for index in range(1, 41)]
    browser.run(f"{spans}[20].scrollIntoView({{ block: 'center', behavior: 'instant' }})")
    box = browser.run(f"(() => {{ const r = {spans}[20].getBoundingClientRect(); return [r.left + 5, r.top + 5]; }})()")
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
    assert browser.run(HIDDEN) is False
    assert browser.run(POINTS) == points(heat, column_of(heat, strip[20], "p0.s0"))
    assert browser.run("document.getElementById('curve-panel').previousElementSibling.id") == "strip"
    browser.run(f"{spans}[20].focus()")
    press(browser, "ArrowRight")
    press(browser, "Enter")
    assert f"at position 21 of {report['tokens']['sequences'][0]['sequence']}" in browser.run(TITLE)
    assert browser.run(POINTS) == points(heat, column_of(heat, strip[21], "p0.s0"))
    browser.run("document.getElementById('curve-close').focus()")
    press(browser, "Escape")
    assert browser.run(HIDDEN) is True and browser.run("document.activeElement.dataset.index") == "21"


def test_a_token_without_a_curve_says_so(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["divergent"])
    browser.run("document.querySelectorAll('#strip span')[0].click()")
    assert browser.run(HIDDEN) is True
    assert "No layer curve" in browser.run("document.getElementById('strip-readout').textContent")


def test_a_healthy_curve_names_no_layer(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["consistent"])
    browser.run("document.querySelector('#worst-tokens button').click()")
    assert "stays within the noise band" in browser.run(WORDS)
    assert browser.run("document.querySelectorAll('#curve-chart .first-line').length") == 0


@pytest.mark.parametrize("width", [1200, 420])
def test_an_open_curve_fits_the_page(browser: Page, reports: dict[str, Path], width: int) -> None:
    browser.open(reports["large"], width=width)
    browser.run("document.querySelector('#worst-tokens button, #strip .has-curve').click()")
    assert browser.run(HIDDEN) is False
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    right = (
        "Math.max(...[...document.querySelectorAll('#curve-chart text')].map((t) => t.getBoundingClientRect().right))"
    )
    assert browser.run(right) <= width
