"""The HTML form, checked on its data: the elements, the embedded JSON and the tables; no browser is needed."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_fixture
from report_fixture import HOSTILE_NAME, HOSTILE_TEXTS

from probe.compare.report import charts, html, model

FIXTURES = ("identical", "consistent", "divergent", "weights_failed", "incomparable", "empty", "hostile")


def fixture(name: str) -> dict[str, Any]:
    return dict(getattr(report_fixture, name)())


def rendered(name: str) -> str:
    return html.render(model.clean_floats(fixture(name)))


class Parsed(HTMLParser):
    """The elements of a page, the text under each script id, and the cells of each table with an id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text: list[str] = []
        self._table: str | None = None
        self._in: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag == "script":
            self.scripts.append((attributes, ""))
        if tag == "table":
            self._table = attributes.get("id")
            self.tables.setdefault(self._table or "", [])
        if tag == "tr" and self._table:
            self.tables[self._table].append([])
        if tag in ("td", "th") and self._table:
            self.tables[self._table][-1].append("")
        self._in = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._in = None
        if tag == "table":
            self._table = None

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._in is None:
            self.text.append(data)
            if self._table and self.tables[self._table] and self.tables[self._table][-1]:
                self.tables[self._table][-1][-1] += data

    def data(self, name: str = "report-data") -> Any:
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == name))

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def pages() -> dict[str, Parsed]:
    return {name: Parsed(rendered(name)) for name in FIXTURES}


@pytest.mark.parametrize("name", FIXTURES)
def test_page_loads_nothing(pages: dict[str, Parsed], name: str) -> None:
    targets = [
        value
        for _, attributes in pages[name].elements
        for key, value in attributes.items()
        if key in ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "formaction", "background")
    ]
    assert targets, "the page has links to its own sections"
    assert all(target is not None and (target.startswith("#") or target == "data:,") for target in targets), targets
    style = (Path(html.__file__).parent / "page.css").read_text()
    assert "url(" not in style and "@import" not in style
    for script in Path(html.__file__).parent.rglob("*.js"):
        assert not re.search(r"fetch\(|XMLHttpRequest|https?:|import\(", script.read_text()), script


@pytest.mark.parametrize("name", FIXTURES)
def test_policy_allows_exactly_the_scripts_of_the_page(pages: dict[str, Parsed], name: str) -> None:
    page = pages[name]
    policy = next(a["content"] or "" for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    runnable = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    digests = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in runnable}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy and "*" not in policy


def test_page_is_a_document_a_screen_reader_can_walk(pages: dict[str, Parsed]) -> None:
    page = pages["divergent"]
    assert ("html", {"lang": "en"}) in page.elements
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    tags = {tag for tag, _ in page.elements}
    assert {"noscript", "main", "nav", "title", "figcaption"} <= tags
    labelled = {attributes.get("for") for tag, attributes in page.elements if tag == "label"}
    controls = {attributes.get("id") for tag, attributes in page.elements if tag in ("input", "select")}
    assert controls == labelled


def test_page_says_what_to_do_first(pages: dict[str, Parsed]) -> None:
    words = pages["divergent"].words()
    assert "First divergence: layers.1.self_attn.rotary_emb" in words.replace(
        "layers. 1. self_attn. ", "layers.1.self_attn."
    )
    assert "Do this first probe show probe-demo/rollout layers.1.self_attn.rotary_emb" in words
    assert "The last generated token of each sequence never enters the rollout's forward" in words
    assert "Stop. Training on these log-probs follows a fault." in words
    assert "rope-base in layers.1.self_attn.rotary_emb on B 93 % confidence" in words
    assert "Next check: Print rope_theta in both engines' configs." in words


def test_embedded_table_holds_every_module(pages: dict[str, Parsed]) -> None:
    report, data = fixture("divergent"), pages["divergent"].data()
    at = {key: index for index, key in enumerate(data["modules"]["columns"])}
    rows = data["modules"]["rows"]
    assert [row[at["order"]] for row in rows] == [layer["order"] for layer in report["layers"]]
    assert [row[at["name"]] for row in rows] == [model.label(layer) for layer in report["layers"]]
    # Six significant digits are kept.
    assert [row[at["rel_l2"]] for row in rows] == pytest.approx(
        [layer["rel_l2"] for layer in report["layers"]], rel=1e-5
    )
    marked = [row[at["name"]] for row in rows if len(row) > len(at)]
    assert marked == ["layers.1.self_attn.rotary_emb"]
    assert data["verdict"] == "divergent" and data["left_out"] == {"modules": 0, "sequences": 0, "tokens": 0}


def test_page_shows_own_errors_replays_and_why_not(pages: dict[str, Parsed]) -> None:
    tables = pages["divergent"].tables
    assert [row[0] for row in tables["own-errors"][1:]] == ["layers.1.self_attn.rotary_emb"]
    assert tables["own-errors"][1][-1].strip() == "B"
    (worst,) = tables["replays"][1:]
    assert worst[0] == "layers.1.self_attn.rotary_emb" and worst[3:5] == ["broken", "250 of 4.5"] and worst[1] == "fine"
    assert len(tables["all-replays"]) == 59 and tables["all-replays"][1][0] == "layers.1.self_attn.rotary_emb"
    assert [row[0] for row in tables["action-figures"][1:]] == ["mean |log-prob difference|", "k3"]
    assert "A: not replayed: the checkpoint is not at hand." in pages["weights_failed"].words()
    assert "stale-weights layers.2.mlp.down_proj.weight on B" in pages["weights_failed"].words()


def test_a_page_without_a_suspect_says_so(pages: dict[str, Parsed]) -> None:
    assert "No suspect: no gate, replay or tensor shows a fault." in pages["consistent"].words()
    assert "suspects" not in [attributes.get("class") for _, attributes in pages["consistent"].elements]


def test_heat_map_holds_tokens_by_layers(pages: dict[str, Parsed]) -> None:
    heat, data = fixture("divergent")["located"]["heat"], pages["divergent"].data()["heat"]
    assert data["layers"] == heat["layers"] and data["cells"] == heat["cells"]
    assert data["positions"] == [token["position"] for token in heat["tokens"]]
    assert pages["empty"].data()["heat"] is None
    assert "The residual stream after a layer was not compared" in pages["empty"].words()


def test_embedded_table_counts_values_that_are_not_finite(pages: dict[str, Parsed]) -> None:
    data = pages["weights_failed"].data()
    at = {key: index for index, key in enumerate(data["modules"]["columns"])}
    assert data["modules"]["rows"][-2][at["bad"]] == 17
    assert data["modules"]["rows"][-2][at["reason"]] == "not finite on side b"
    assert data["modules"]["rows"][-2][at["rel_l2"]] is None
    assert data["modules"]["rows"][-1][at["verdict"]] == "missing"


def test_strip_tells_prompt_from_response(pages: dict[str, Parsed]) -> None:
    strip = pages["divergent"].data()["strips"][0]
    assert strip["response"] == "0" * 9 + "1" * 32
    assert {len(strip[key]) for key in ("position", "token", "text", "logprob_a", "logprob_b", "diff")} == {41}
    assert strip["diff"][0] is None


def test_strip_without_text_holds_ids() -> None:
    report = fixture("divergent")
    data = Parsed(html.render(model.without_text(report))).data()
    assert data["text"] is False
    for strip, sequence in zip(data["strips"], report["tokens"]["sequences"]):
        assert set(strip["text"]) == {None}
        assert strip["token"] == [token["token"] for token in sequence["strip"]]


def test_picture_has_a_table_behind_it(pages: dict[str, Parsed]) -> None:
    report, tables = fixture("divergent"), pages["divergent"].tables
    assert [row[1] for row in tables["curve-data"][1:]] == [model.label(layer) for layer in report["layers"]]
    assert [row[3] for row in tables["curve-data"][1:]] == [model.number(layer["rel_l2"]) for layer in report["layers"]]
    assert len(tables["position-data"]) == 1 + len(report["tokens"]["by_position"])
    assert [row[2] for row in tables["worst-tokens"][1:]] == [str(t["token"]) for t in report["tokens"]["worst"]]
    assert [row[0] for row in tables["environment"][1:]] == ["torch", "env.VLLM_USE_V1"]


def sources(figure: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the column data of every source with names in a bokeh JSON item."""
    found: list[dict[str, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("name") == "ColumnDataSource":
                found.append(dict(node["attributes"]["data"]["entries"]))
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(figure)
    return found


def test_curve_draws_zero_below_everything_else(pages: dict[str, Parsed]) -> None:
    report = fixture("divergent")
    curve = sources(pages["divergent"].data("figure-data")["layer-curve"])
    points = {
        name: (x, y) for source in curve if "name" in source
        for name, x, y in zip(source["name"], source["x"], source["y"])
    }  # fmt: skip
    assert len(points) == len(report["layers"])
    smallest = min(layer["rel_l2"] for layer in report["layers"] if layer["rel_l2"] > 0)
    x, y = points["embed_tokens"]
    assert x == 0 and 0 < y < smallest
    assert points["lm_head"] == (len(points) - 1, report["layers"][-1]["rel_l2"])


def test_identical_pair_has_a_chart_and_no_worst_list() -> None:
    report = report_fixture.identical()
    page = Parsed(html.render(report))
    assert set(page.data("figure-data")) == {"layer-curve", "position-curve"}
    assert "worst-tokens" not in page.tables
    assert "Nearest to the noise floor" not in page.words()


def test_zero_line_without_any_positive_value() -> None:
    assert 0 < charts.zero_line([]) < 1e-8
    assert charts.zero_line([0.0, 1e-3]) == pytest.approx(1e-5)


def test_page_without_measurements_has_no_chart_and_no_bokeh(pages: dict[str, Parsed]) -> None:
    page = pages["empty"]
    assert page.data("figure-data") == {} and page.data()["modules"]["rows"] == []
    own = [text for attributes, text in page.scripts if not attributes.get("type")]
    assert own and sum(map(len, own)) < 50_000 < len(charts.bokeh_script())
    assert "No tensor was compared" in page.words() and "No log-probs were compared." in page.words()


def test_hostile_text_stays_text(pages: dict[str, Parsed]) -> None:
    page, quiet = pages["hostile"], pages["divergent"]
    assert [tag for tag, _ in page.elements if tag in ("img", "b", "textarea")].count("img") == 0
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]
    assert len(page.scripts) == len(quiet.scripts)
    for attributes, text in page.scripts:
        if attributes.get("type") == "application/json":
            assert "<" not in text and ">" not in text
    strip = page.data()["strips"][0]["text"]
    assert strip[9:21] == [model.visible(text, 48) for text in HOSTILE_TEXTS]
    assert HOSTILE_NAME in [row[1] for row in page.data()["modules"]["rows"]]
    assert "\x1b" not in page.words() and "\u202e" not in page.words()


def test_large_report_is_capped_and_says_so() -> None:
    page = rendered("large")
    data = Parsed(page).data()
    assert len(page.encode()) < html.MAX_BYTES
    assert len(data["modules"]["rows"]) == 899 and len(data["strips"]) == 64
    assert data["left_out"]["sequences"] == 7
    # 63 sequences of 600 tokens and one of 2000, of which 512 each are kept.
    assert data["left_out"]["tokens"] == 63 * (600 - 512) + 2000 - 512
    longest = next(strip for strip in data["strips"] if strip["sequence"] == "long.s0")
    assert len(longest["token"]) == 512 and longest["left_out"] == 1488
    assert longest["position"][0] == 36 and longest["response"][:64] == "0" * 64 and longest["response"][64] == "1"


def test_huge_report_stays_below_the_limit_and_keeps_the_worst() -> None:
    page = rendered("huge")
    parsed = Parsed(page)
    data = parsed.data()
    assert len(page.encode()) < html.MAX_BYTES
    assert data["left_out"]["modules"] == 6899 - len(data["modules"]["rows"]) > 0
    assert {row[2] for row in data["modules"]["rows"]} == {"divergent"}
    assert f"{data['left_out']['modules']} modules with the smallest error are left out." in parsed.words()
