"""The forms of ``probe tokens``: page, terminal, csv, markdown, checked on their data; no browser is needed."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import report_tokens_fixture
from report_fixture import HOSTILE_TEXTS
from rich.console import Console
from test_report_html import Parsed

from probe.compare.report import write_report
from probe.compare.report.model import clean_floats, number, visible, without_text
from probe.compare.report.shared import words
from probe.compare.report.shared.page import MAX_BYTES
from probe.compare.report.tokens import TOKEN_FORMS, html

FIXTURES = ("consistent", "suspect", "steps", "monitor", "incomparable", "hostile", "large")


def fixture(name: str) -> dict[str, Any]:
    return dict(clean_floats(getattr(report_tokens_fixture, name)()))


@pytest.fixture(scope="module")
def pages() -> dict[str, Parsed]:
    return {name: Parsed(html.render(fixture(name))) for name in FIXTURES}


def terminal(report: dict[str, Any], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    TOKEN_FORMS["terminal"].render(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def table(page: Parsed, name: str) -> list[list[str]]:
    """Return the cells of a table of the page, the heads first."""
    return [[cell.strip() for cell in row] for row in page.tables[name]]


def text_of(name: str) -> str:
    return " ".join(terminal(fixture(name)).split())


# -- all forms --------------------------------------------------------------------------------------------------------


def test_every_form_of_every_report_is_written(tmp_path: Path) -> None:
    for name in ("consistent", "monitor", "incomparable"):
        paths = write_report(fixture(name), [*TOKEN_FORMS], tmp_path / name, table=TOKEN_FORMS)
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
            *("tokens.csv", "tokens.html", "tokens.json", "tokens.md")
        ]
        assert json.loads(paths["json"].read_text()) == fixture(name)
        for path in paths.values():
            assert 0 < path.stat().st_size < (MAX_BYTES if path.suffix == ".html" else 20_000_000)


@pytest.mark.parametrize("form", [form for form in TOKEN_FORMS if form != "json"])
def test_no_form_shows_token_text_where_that_is_not_wanted(form: str) -> None:
    report = without_text(fixture("suspect"))
    for entry in (*report["tokens"]["worst"], *report["tokens"]["by_token"], *report["ppo"]["carriers"]):
        assert {entry.get(key) for key in ("text", "context", "after")} == {None}
    shown = terminal(report) if form == "terminal" else TOKEN_FORMS[form].render(report)
    assert "we add both sides" not in shown and "remaining" not in shown.replace("remaining_", "")


@pytest.mark.parametrize("form", ["terminal", "csv", "markdown"])
def test_hostile_text_stays_on_its_line(form: str) -> None:
    report = fixture("hostile")
    shown = terminal(report) if form == "terminal" else TOKEN_FORMS[form].render(report)
    assert "\x1b" not in shown and "\u202e" not in shown and "\t" not in shown
    if form == "csv":
        rows = list(csv.reader(io.StringIO(shown)))
        assert {len(row) for row in rows} == {len(rows[0])}
        assert not [cell for row in rows for cell in row if re.match("[=@]", cell)]
    if form == "markdown":
        prose = re.sub("`[^`\n]*`", "", shown.split("```")[0])
        assert re.findall(r"(?<!\\)<\S*", prose) == []  # every bracket outside code is escaped


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1e-4, "below 0.0001"), (1e-4, 1e-3, "0.0001 to 0.001"), (0.5, 0.9, "0.5 to 0.9"), (0.99, 1, "0.99 and more")],
)
def test_a_range_of_probabilities_in_words(low: float, high: float, expected: str) -> None:
    bins = [{"low": low, "high": high, "count": 1}, {"low": low, "high": high, "count": 0}]
    assert [shown for shown, _ in words.probability_bins({"by_probability": bins})] == [expected]


def test_cells_of_the_grid_have_at_most_six_characters() -> None:
    values = [None, 0.0, 5e-324, 9.9e-5, 1e-4, 0.04567, 0.99996, 1.0]
    assert [words.grid_cell(v) for v in values] == [
        *("-", "0", "<1e-4", "<1e-4", "0.0001", "0.0457", "1.0000", "1.0000")
    ]
    assert [words.level(v) for v in (0.0, 0.001, 0.0099, 0.01, 0.05, 0.1, 0.3, 1.0)] == [0, 1, 1, 2, 3, 4, 5, 5]


def test_what_a_batch_holds_is_counted_in_words() -> None:
    one = {"compared": 1, "tokens": 1, "sequences": 1, "steps": 1, "empty_sequences": 0, "masked_out": 0}
    assert words.counts_words(one) == "1 of 1 response token compared in 1 sequence"
    many = {"compared": 1234, "tokens": 2000, "sequences": 30, "steps": 3, "empty_sequences": 1, "masked_out": 7000}
    assert words.counts_words(many) == (
        "1,234 of 2,000 response tokens compared in 30 sequences of 3 steps; 1 sequence without a token; "
        "7,000 places masked out"
    )


def test_every_figure_of_the_section_has_a_name() -> None:
    from probe.logprobs import RATIO_METRICS, SEQUENCE_METRICS, TOKEN_METRICS

    named = {key for figures in words.FIGURES.values() for key, *_ in figures}
    assert named == {*TOKEN_METRICS, *RATIO_METRICS, *SEQUENCE_METRICS}


def test_every_figure_of_the_update_has_a_name() -> None:
    from probe.compare.ppo import PPOConfig
    from probe.compare.tokens.update import SCALARS

    named = {key for key, *_ in words.UPDATE}
    again = {f"{key}_recomputed" for key in named}
    assert set(SCALARS) - named - again == {"early_stop", "early_stop_recomputed", "overflows"}  # in the sentences
    assert set(words.CONFIG) == set(vars(PPOConfig()))


def test_what_the_mismatch_does_is_said_in_figures() -> None:
    ppo = fixture("suspect")["ppo"]
    shown = " ".join(words.split_words(ppo))
    assert f"{number(100 * ppo['gradient']['share'])} % of the gradient weight" in shown
    assert f"on {number(100 * ppo['clipped']['share_tokens'])} % of the tokens" in shown
    assert words.split_words(fixture("incomparable")["ppo"]) == []
    ppo["clipped"] |= {"tokens": 0, "share_gradient": 0.0}
    assert words.split_words(ppo)[-1] == "Before any update no ratio actor / rollout is outside the clip range."


# -- terminal ---------------------------------------------------------------------------------------------------------


def test_terminal_shows_verdict_figures_grid_and_update() -> None:
    report, shown = fixture("suspect"), text_of("suspect")
    assert shown.startswith("verdict: divergent on 480 tokens of 12 sequences")
    assert "temperature-semantics on A: log-probs of a are of temperature 0.7" in shown
    row = report["tokens"]["grid"]["values"][1]
    assert f"p0.s1 {' '.join(map(words.grid_cell, row))}" in shown and row[3] is None
    for figure in report["figures"]:
        assert f"{figure['name']} {number(figure['value'])} {'pass' if figure['ok'] else 'warn'}" in shown
    worst = report["tokens"]["worst"][0]
    assert f"{worst['sequence']} {worst['position']} {worst['token']} {number(worst['logprob_a'])}" in shown
    assert "TIS, token rho above 2 2 % of the tokens clamped" in shown
    assert "policy loss 0.0123 0.0101" in shown
    carrier = report["ppo"]["carriers"][0]
    assert f"{carrier['sequence']} {carrier['position']} {carrier['token']} {number(carrier['diff'])}" in shown


def test_terminal_fits_80_columns() -> None:
    for name in FIXTURES:
        report = fixture(name)
        report["next_commands"] = []  # printed whole, so that they can be copied
        assert max(map(len, terminal(report, 80).splitlines())) <= 80


def test_terminal_shows_of_a_monitor_what_is_known() -> None:
    shown = text_of("monitor")
    assert "step tokens mean |dp| max |dp| std |dp| 0" in shown
    assert "sequence position |dp|" in shown
    for absent in ("logp A", "PPO update", "By the rollout's probability", "What corrections", "log ppl"):
        assert absent not in shown


def test_terminal_of_nothing_compared_is_short() -> None:
    shown = terminal(fixture("incomparable"))
    assert shown.startswith("verdict: incomparable: every token is masked out")
    assert len(shown.splitlines()) < 12


def test_terminal_without_unicode_is_ascii() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    console = Console(file=Ascii(), width=100, color_system=None)
    TOKEN_FORMS["terminal"].render(without_text(fixture("consistent")), console)
    assert console.file.getvalue().isascii()  # type: ignore[attr-defined]


# -- page -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXTURES)
def test_page_loads_nothing(pages: dict[str, Parsed], name: str) -> None:
    page = pages[name]
    targets = [value for _, attributes in page.elements for key, value in attributes.items() if key in ("src", "href")]
    assert targets and all(target is not None and (target[0] == "#" or target == "data:,") for target in targets)
    policy = next(a["content"] or "" for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "http" not in policy
    anchors = {attributes.get("id") for _, attributes in page.elements}
    assert {target[1:] for target in targets if target and target[0] == "#"} <= anchors


def test_tables_of_the_page_hold_the_figures(pages: dict[str, Parsed]) -> None:
    report, page = fixture("suspect"), pages["suspect"]
    tokens = report["tokens"]
    assert [row[1] for row in table(page, "healthy")[1:]] == [number(figure["value"]) for figure in report["figures"]]
    assert [row[1:] for row in table(page, "grid")[1:]] == [
        [words.grid_cell(value) for value in row] for row in tokens["grid"]["values"]
    ]
    bins = [entry for entry in tokens["by_probability"] if entry["count"]]
    assert [row[1:4] for row in table(page, "by-probability")[1:]] == [
        [str(entry["count"]), number(entry["mean_abs"]), number(entry["max_abs"])] for entry in bins
    ]
    assert [row[0] for row in table(page, "position-data")[1:]] == [str(n) for n in range(40)]
    assert [row[2] for row in table(page, "quantiles")[1:]] == [number(q["p90"]) for q in tokens["quantiles"].values()]
    assert [row[0] for row in table(page, "corrections")[1:]] == [entry["name"] for entry in tokens["corrections"]]
    assert [row[0] for row in table(page, "by-token")[1:]] == [str(entry["token"]) for entry in tokens["by_token"]]
    assert [row[2] for row in table(page, "worst-tokens")[1:]] == [str(token["token"]) for token in tokens["worst"]]
    assert len(table(page, "carriers")) == 21
    figures = {row[0]: row[1:3] for row in table(page, "ppo-figures")[1:]}
    assert figures["policy loss"] == ["0.0123", "0.0101"] and "value loss" not in figures


def test_page_of_steps_has_their_trend(pages: dict[str, Parsed]) -> None:
    report, page = fixture("steps"), pages["steps"]
    steps = report["tokens"]["by_step"]
    assert set(page.data("figure-data")) == {"position-curve", "step-curve"}
    assert [row[:4] for row in table(page, "by-step")[1:]] == [
        [str(step["step"]), "6", "240", number(step["mean_prob_diff"])] for step in steps
    ]
    assert set(pages["consistent"].data("figure-data")) == {"position-curve"}


def test_embedded_sequences_are_those_of_the_report(pages: dict[str, Parsed]) -> None:
    report, data = fixture("consistent"), pages["consistent"].data()
    columns = data["sequences"]["columns"]
    assert "step" not in columns and columns[:3] == ["sequence", "compared", "mean_abs"]
    rows = {row[0]: row for row in data["sequences"]["rows"]}
    for entry in report["tokens"]["sequences"]:
        assert rows[entry["sequence"]][1] == 40
        assert rows[entry["sequence"]][2] == pytest.approx(entry["mean_abs"], rel=1e-5)  # six digits are kept
    assert len(data["strips"]) == 12 and data["left_out"] == {"table": 0, "sequences": 0, "tokens": 0}


def test_page_of_a_monitor_knows_probabilities_only(pages: dict[str, Parsed]) -> None:
    page = pages["monitor"]
    data = page.data()
    assert data["strips"] == [] and data["sequences"]["columns"] == [
        *("sequence", "step", "compared", "mean_prob_diff", "max_prob_diff")
    ]
    assert table(page, "position-data")[0][2:] == ["mean |Δ prob|", "max |Δ prob|"]
    assert "ppo-figures" not in page.tables and "by-probability" not in page.tables
    assert "#ppo" not in [attributes.get("href") for _, attributes in page.elements]


def test_page_of_nothing_has_no_chart(pages: dict[str, Parsed]) -> None:
    page = pages["incomparable"]
    assert page.data("figure-data") == {} and page.data()["sequences"]["rows"] == []
    assert "every token is masked out" in page.words() and "where" not in [a.get("id") for _, a in page.elements]


def test_hostile_text_stays_text(pages: dict[str, Parsed]) -> None:
    page, quiet = pages["hostile"], pages["suspect"]
    assert not [tag for tag, _ in page.elements if tag in ("img", "textarea")]
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]
    assert len(page.scripts) == len(quiet.scripts)
    assert page.data()["strips"][0]["text"][4:16] == [visible(text, 48) for text in HOSTILE_TEXTS]
    assert "\x1b" not in page.words() and "\u202e" not in page.words()


def test_a_large_report_is_capped_and_says_so(pages: dict[str, Parsed]) -> None:
    data = pages["large"].data()
    assert len(data["sequences"]["rows"]) == 500 and len(data["strips"]) == 64
    assert data["left_out"] == {"table": 24_500, "sequences": 500 - 64 + 24_000, "tokens": 0}
    shown = pages["large"].words()
    assert "130000 other ids are left out." in shown and "Each point stands for 4 positions." in shown
    assert "1,000,000 of 1,000,000 response tokens compared in 25,000 sequences" in shown


def test_a_page_that_would_be_too_large_holds_less() -> None:
    report = fixture("large")
    for sequence in report["tokens"]["sequences"]:
        sequence["sequence"] += "x" * 3000
        for token in sequence["strip"]:
            token["text"] = "答案" * 40
    report["tokens"]["by_position"] = []
    for index, strip in enumerate(report["tokens"]["sequences"][:64]):
        strip["strip"] = strip["strip"] * 12
        strip["max_abs"] = 100 + index
    page = html.render(report)
    assert len(page.encode()) < MAX_BYTES
    data = Parsed(page).data()
    assert len(data["strips"]) < 64 and data["left_out"]["tokens"] > 0
