"""The page of ``probe tokens`` in a real browser: it loads nothing, complains about nothing, and its controls work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import report_tokens_fixture
from chromium_driver import Page
from test_report_browser import ink, press

from probe.compare.report import write_report
from probe.compare.report.model import number, visible
from probe.compare.report.tokens import TOKEN_FORMS

pytestmark = pytest.mark.slow

FIXTURES = ("consistent", "suspect", "steps", "monitor", "incomparable", "hostile", "large")
NAMES = "[...document.querySelectorAll('#sequence-table tbody tr')].map((row) => row.cells[0].textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    return {
        name: write_report(getattr(report_tokens_fixture, name)(), ["html"], folder / name, table=TOKEN_FORMS)["html"]
        for name in FIXTURES
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", FIXTURES)
def test_page_asks_for_nothing_and_reports_no_error(
    browser: Page, reports: dict[str, Path], name: str, dark: bool
) -> None:
    browser.open(reports[name], dark=dark)
    browser.wait("typeof Bokeh === 'undefined' || Bokeh.documents.every((d) => d.is_idle)")
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [reports[name].as_uri()]
    assert browser.console == []


@pytest.mark.parametrize("width", [1200, 420])
@pytest.mark.parametrize("name", FIXTURES)
def test_page_does_not_scroll_sideways(browser: Page, reports: dict[str, Path], name: str, width: int) -> None:
    browser.open(reports[name], width=width)
    browser.run("document.querySelectorAll('details').forEach((block) => { block.open = true; })")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]


def test_charts_are_drawn(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["steps"])
    browser.wait("Bokeh.documents.length === 2 && Bokeh.documents.every((d) => d.is_idle)")
    # Axes, labels and lines paint some thousand pixels; an empty canvas has none.
    assert min(ink(browser, chart) for chart in ("step-curve", "position-curve")) > 2000


def test_sequences_are_sorted_from_the_worst_down_and_by_any_column(browser: Page, reports: dict[str, Path]) -> None:
    sequences = report_tokens_fixture.suspect()["tokens"]["sequences"]
    browser.open(reports["suspect"])
    worst = sorted(sequences, key=lambda s: -s["mean_abs"])
    assert browser.run(NAMES) == [s["sequence"] for s in worst]
    cells = "[...document.querySelectorAll('#sequence-table tbody tr')].map((row) => row.cells[2].textContent)"
    assert browser.run(cells) == [number(s["mean_abs"]) for s in worst]
    browser.run("document.querySelector('#sequence-table th[data-key=mean_abs] button').click()")
    assert browser.run(NAMES) == [s["sequence"] for s in worst[::-1]]
    browser.run("document.querySelector('#sequence-table th[data-key=sequence] button').click()")
    assert browser.run(NAMES) == sorted(s["sequence"] for s in sequences)
    assert browser.run("document.querySelector('#sequence-table th[aria-sort]').dataset.key") == "sequence"


def test_filter_narrows_the_table(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["large"])
    assert browser.run("document.getElementById('sequence-status').textContent").startswith("500 of 500 sequences")
    browser.run("document.getElementById('sequence-filter').focus()")
    browser.call("Input.insertText", text="p249.")
    assert sorted(browser.run(NAMES)) == ["p249.s0", "p249.s1"]
    note = browser.run("document.getElementById('sequence-note').textContent")
    assert note == "24500 sequences with smaller differences are left out."


def test_a_sequence_leads_to_its_text(browser: Page, reports: dict[str, Path]) -> None:
    sequences = report_tokens_fixture.suspect()["tokens"]["sequences"]
    browser.open(reports["suspect"])
    browser.run(
        "[...document.querySelectorAll('#sequence-table button.link')].find((b) => b.textContent === 'p3.s0').click()"
    )
    shown = browser.run("[...document.querySelectorAll('#strip span')].map((span) => span.textContent)")
    strip = next(s["strip"] for s in sequences if s["sequence"] == "p3.s0")
    assert shown == [visible(token["text"]) for token in strip]
    assert browser.run("document.activeElement.id") == "strip-sequence"
    browser.run("document.querySelectorAll('#strip span')[0].focus()")
    for _ in range(6):
        press(browser, "ArrowRight")
    readout = browser.run("document.getElementById('strip-readout').textContent")
    assert readout.startswith(f"position 6 (response), token {strip[6]['token']}")
    assert f"difference {number(strip[6]['diff'])}" in readout


def test_a_monitor_has_no_strip_and_says_nothing_of_log_probs(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["monitor"])
    assert browser.run("document.getElementById('strip-block').hidden") is True
    heads = browser.run("[...document.querySelectorAll('#sequence-table th')].map((head) => head.dataset.key)")
    assert heads == ["sequence", "step", "compared", "mean_prob_diff", "max_prob_diff"]
    assert "log-prob A" not in browser.run("document.getElementById('sequence-table').textContent")


def test_hostile_text_runs_nothing(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["hostile"])
    assert browser.run("document.title").startswith("divergent: ")
    assert browser.run("document.querySelectorAll('img').length") == 0
