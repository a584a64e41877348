"""The report's model, the writing of files, and the CSV, Markdown and terminal forms (HTML: test_report_html)."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_fixture
from report_fixture import HOSTILE_NAME
from rich.console import Console

from probe.compare.report import FORMS, findings, model, write_report
from probe.errors import UsageError

FIXTURES = ("identical", "consistent", "divergent", "weights_failed", "incomparable", "empty", "hostile")


def fixture(name: str) -> dict[str, Any]:
    return dict(getattr(report_fixture, name)())


def rendered(name: str, form: str) -> str:
    return str(FORMS[form].render(model.clean_floats(fixture(name))))


# --- the model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FIXTURES, "large"])
def test_fixture_reports_are_valid(name: str) -> None:
    model.validate(model.clean_floats(fixture(name)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verdict": "fine"}, "verdict is 'fine'"),
        ({"schema": 2}, "schema is 2, expected 1"),
        ({"layers": None}, "'layers' is NoneType, expected list"),
        ({"gates": [{"name": "tokens", "status": "ok", "detail": ""}]}, "gate 'tokens' has status 'ok'"),
        ({"layers": [{"name": "norm"}]}, r"layers\[0\] lacks slot, order, verdict"),
        (
            {"suspects": [{"name": "norm", "side": "left"}]},
            r"suspects\[0\] lacks cause, .*; suspects\[0\] has side 'left'",
        ),
        ({"located": {"jumps": [{"name": "norm"}]}}, r"located.jumps\[0\] lacks slot, before, after, factor"),
        ({"replay": {"modules": [{"name": "norm", "slot": "output.0", "a": None, "b": None}]}}, "lacks kind"),
        (
            {"action": {"word": "pray", "text": "", "figures": [{}]}},
            r"action.figures\[0\] lacks name.*action is 'pray'",
        ),
        (
            {"gates": [{"name": "tokens", "status": "pass", "detail": "", "findings": [{"side": "a"}]}]},
            r"gates\[0\].findings\[0\] lacks cause, subject, text, figures",
        ),
    ],
)
def test_validate_names_the_problem(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model.validate({**fixture("consistent"), **change})


def test_validate_lists_missing_keys() -> None:
    report = fixture("consistent")
    del report["tokens"], report["a"]
    with pytest.raises(ValueError, match="missing key 'a'; missing key 'tokens'"):
        model.validate(report)


def test_clean_floats_makes_strict_json() -> None:
    value = {
        "a": float("nan"),
        "b": [math.inf, 1.5],
        "c": np.float32(2.5),
        "d": np.array([1.0, np.nan]),
        "e": (1, True),
    }
    assert model.clean_floats(value) == {"a": None, "b": [None, 1.5], "c": 2.5, "d": [1.0, None], "e": [1, True]}


def test_focus_starts_just_before_the_first_divergence() -> None:
    names = [model.label(layer) for layer in model.focus(fixture("divergent"), limit=6)]
    assert names == [
        "layers.1.self_attn.q_proj",
        "layers.1.self_attn.k_proj",
        "layers.1.self_attn.v_proj",
        "layers.1.self_attn.rotary_emb",
        "layers.1.self_attn.rotary_emb:output.1",
        "layers.1.self_attn.o_proj:input.0",
    ]


def test_focus_of_a_healthy_pair_is_what_is_nearest_to_the_floor() -> None:
    report = fixture("consistent")
    shown = model.focus(report, limit=5)
    assert (
        sorted((layer["ratio"] for layer in shown), reverse=True)
        == sorted((layer["ratio"] for layer in report["layers"]), reverse=True)[:5]
    )
    assert [layer["order"] for layer in shown] == sorted(layer["order"] for layer in shown)


def test_visible_spells_out_what_a_terminal_would_obey() -> None:
    assert model.visible("\x1b[31m\n\t\u202ex\ud800") == "\\x1b[31m\\n\\t\\u202ex\\ud800"
    assert model.visible("naïve 答案") == "naïve 答案"
    assert model.visible("abcdef", 4) == "abc…"


# --- writing -----------------------------------------------------------------------------------------------------


def test_write_report_writes_one_file_per_form(tmp_path: Path) -> None:
    paths = write_report(fixture("divergent"), ["html", "json", "csv", "markdown", "terminal"], tmp_path / "new")
    assert {form: path.name for form, path in paths.items()} == {
        "html": "report.html", "json": "report.json", "csv": "report.csv", "markdown": "report.md",
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in paths.values())


def test_json_form_is_the_report_itself(tmp_path: Path) -> None:
    report = fixture("weights_failed")
    paths = write_report(report, ["json"], tmp_path)
    read = json.loads(paths["json"].read_text(), parse_constant=lambda word: pytest.fail(f"{word} in report.json"))
    assert read == model.clean_floats(report)


def test_unknown_form_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'pdf': choose from terminal, json, html, csv, markdown"):
        write_report(fixture("empty"), ["json", "pdf"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_form_that_fails_leaves_the_earlier_report(tmp_path: Path) -> None:
    write_report(fixture("consistent"), ["json", "csv"], tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    broken = fixture("divergent")
    broken["layers"][3]["verdict"] = "unheard of"
    del broken["gates"]
    with pytest.raises(KeyError, match="gates"):
        write_report(broken, ["json", "csv", "markdown"], tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "report.csv").mkdir()
    with pytest.raises(UsageError, match="cannot write the report"):
        write_report(fixture("consistent"), ["csv"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.csv"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        write_report(fixture("consistent"), ["csv"], tmp_path / "file")


def test_without_text_no_form_holds_token_text(tmp_path: Path) -> None:
    report = fixture("divergent")
    for sequence in report["tokens"]["sequences"]:
        for token in sequence["strip"]:
            token["text"] = " zebra"
    for token in report["tokens"]["worst"]:
        token.update(text=" zebra", context="a zebra crossed")
    forms = ["json", "html", "csv", "markdown"]
    kept = write_report(report, forms, tmp_path / "with")
    assert "zebra" in kept["html"].read_text() and "zebra" in kept["json"].read_text()
    for path in write_report(report, forms, tmp_path / "without", text=False).values():
        assert "zebra" not in path.read_text()
    assert report["tokens"]["worst"][0]["text"] == " zebra", "the caller's report was changed"


# --- CSV ---------------------------------------------------------------------------------------------------------


def test_csv_has_one_flat_row_per_module() -> None:
    report = fixture("weights_failed")
    rows = list(csv.DictReader(io.StringIO(rendered("weights_failed", "csv"))))
    assert [row["name"] for row in rows] == [layer["name"] for layer in report["layers"]]
    assert [float(row["rmse"]) for row in rows] == [layer["rmse"] for layer in report["layers"]]
    assert rows[3]["max_abs_sequence"] == "p0.s0" and rows[3]["max_abs_feature"] == "12"
    assert rows[3]["a_tensors"] == "model.layers.0.self_attn.k_proj:output.0" and rows[3]["b_norm"] == "15.3"
    assert rows[-1]["rel_l2"] == rows[-1]["a_dtype"] == rows[-1]["max_abs_position"] == ""
    assert rows[-2]["rel_l2"] == "" and rows[-2]["nan_b"] == "17"


@pytest.mark.parametrize(
    ("start", "cell"),
    [("=1+1", "'=1+1"), ("+1", "'+1"), ("-1", "'-1"), ("@SUM(A1)", "'@SUM(A1)"), ("\t=1", "\\t=1"), ("\r=1", "\\r=1")],
)
def test_csv_text_is_never_a_formula(start: str, cell: str) -> None:
    report = fixture("consistent")
    report["layers"][0]["name"] = start
    report["layers"][0]["rmse"] = -1.5
    row = next(csv.DictReader(io.StringIO(FORMS["csv"].render(report), newline="")))
    assert row["name"] == cell
    assert row["rmse"] == "-1.5", "a negative number stays a number"


# --- Markdown ----------------------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_markdown_names_verdict_versions_and_first_modules() -> None:
    text = rendered("divergent", "markdown")
    lines = text.splitlines()
    headline = "divergent in 40 of 59 tensors; 1 norm not comparable (fused)"
    assert lines[0] == f"### probe compare, vllm vs megatron: {headline}" and headline not in lines[2]
    assert "| B | not executed by the other side (prefix cache) | 16 |" in lines
    assert "**First divergence:** `layers.1.self_attn.rotary_emb`, position 3 of `p0.s0`" in lines
    assert "| version | 0.32.0 | 0.16.1 |" in lines
    assert "| model | tiny-qwen2 | tiny-qwen2 |" in lines and "/models" not in text
    assert "| tokens | pass | the same 248 token ids in 6 sequences |" in lines
    assert any(
        cells(line)[:2] == ["`layers.1.self_attn.rotary_emb`", "divergent"] for line in lines if line[:2] == "| "
    )
    assert "probe show probe-demo/rollout layers.1.self_attn.rotary_emb" in lines


@pytest.mark.parametrize("name", FIXTURES)
def test_markdown_tables_are_rectangular(name: str) -> None:
    widths: list[int] = []
    for line in [*rendered(name, "markdown").splitlines(), ""]:
        if line.startswith("|"):
            widths.append(len(cells(line)))
        else:
            assert len(set(widths)) <= 1, widths
            widths = []


def test_markdown_escapes_markup_and_leaves_token_text_out() -> None:
    report = fixture("hostile")
    report["layers"][model.in_order(report["layers"]).index(report["layers"][5])]["verdict"] = "divergent"
    report["first_divergence"] = {"name": HOSTILE_NAME, "slot": "output.0", "position": 1, "sequence": "a`b"}
    text = FORMS["markdown"].render(report)
    assert "`` layers.0.</script><b>\\|`x` ``" in text
    assert "of `` a`b ``" in text
    assert "\\<img src=x onerror" in text and "\x1b" not in text
    assert "HYPERLINK" not in text, "token text stays out of a public issue"


# --- terminal ----------------------------------------------------------------------------------------------------


def printed(report: dict[str, Any], **options: Any) -> str:
    out = io.StringIO()
    FORMS["terminal"].render(model.clean_floats(report), Console(file=out, width=80, **options))
    return out.getvalue()


@pytest.mark.parametrize("name", FIXTURES)
def test_terminal_fits_80_columns_and_is_plain_when_piped(name: str) -> None:
    text = printed(fixture(name))
    head, _, commands = text.partition("\nNext\n")
    assert max(map(len, head.splitlines())) <= 80
    assert "\x1b" not in text
    assert commands.split("\n")[:-1] == ["  " + model.visible(c) for c in fixture(name)["next_commands"]]


def test_terminal_says_the_verdict_in_words() -> None:
    text = " ".join(printed(fixture("divergent")).split())
    headline = "divergent in 40 of 59 tensors; 1 norm not comparable (fused)"
    assert text.startswith(f"verdict: {headline} rollout (vllm 0.32.0) vs actor (megatron 0.16.1) The runs part")
    assert "first divergence: layers.1.self_attn.rotary_emb at position 3 of p0.s0" in text
    assert "> layers.1.self_attn.rotary_emb divergent" in text
    assert "40 divergent, 18 consistent, 1 identical; 15 of 59, around the first divergence" in text
    assert "59 tensors matched; 0 only in A, 1 only in B, 1 unavailable. 242 rows joined." in text
    assert "6 B not executed by the other side (last generated token)" in text
    assert "192 compared; log-probs of A as the engine returned them, of B recomputed from the logits" in text
    assert "torch 2.13.0 2.12.1 warn" in text and "3.11.7" not in text
    assert "PPO update Old log-probs are the rollout's (a), recomputed ones the actor's (b)." in text


def test_every_form_gives_suspects_replays_and_the_action() -> None:
    text, page = " ".join(printed(fixture("divergent")).split()), rendered("divergent", "markdown")
    assert "action: Stop. Training on these log-probs follows a fault." in text
    assert "k3 2.1e-05 pass at most 0.001" in text and "| k3 | 2.1e-05 | at most 0.001 | NeMo-RL |" in page
    assert "1. rope-base in layers.1.self_attn.rotary_emb on B 93 %" in text
    assert "1. **rope-base** in `layers.1.self_attn.rotary_emb` on B, confidence 93 %" in page
    assert page.index("**Suspects**") < page.index("The runs part") < page.index("**Action:**")
    for form in (text, page.replace("\\", "")):
        assert "side b is 250 roundings off where 4.5 are allowed (side a: 0.9)" in form
        assert "Print rope_theta in both engines' configs." in form
        assert "The error jumps at layers.1.self_attn.rotary_emb, from 1 to 8.1e+04 noise floors." in form
        assert "every row from position 3 on: 190 of 242" in form
        assert "B: rope-base, the base is 1.05 times the config's; 1.2 roundings are left" in form
    assert "B: 58 modules replayed, 1 broken, 57 fine." in text
    assert re.search(r"layers.1.self_attn.rotary_emb [01]\.\d+ of 4.5 250 of 4.5", text)
    assert "> layers.1.self_attn.rotary_emb divergent" in text and "100% B " in text
    assert "| attention backend | CPU\\_ATTN | local core attention |" in page


def test_without_a_suspect_the_forms_say_so() -> None:
    for name, words in (
        ("consistent", "No suspect: no gate, replay or tensor shows a fault."),
        ("incomparable", "No suspect: too little was compared."),
    ):
        assert words in " ".join(printed(fixture(name)).split())
        assert words in rendered(name, "markdown")
    divergent = fixture("divergent") | {"suspects": []}
    assert "No suspect: what differs points to no cause that is known." in printed(divergent)


def test_why_nothing_was_replayed_is_said() -> None:
    text = " ".join(printed(fixture("weights_failed")).split())
    assert "A: not replayed: the checkpoint is not at hand. B: not replayed: its weights are stale." in text


def test_local_folders_stay_out_of_a_public_issue() -> None:
    report = fixture("divergent")
    report["a"]["path"] = "/home/someone/private/rollout"
    report["suspects"][0]["next_check"] = "probe show /home/someone/private/rollout norm"
    assert "private" not in str(FORMS["markdown"].render(report))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ({"kind": "one-row", "rows": 1, "of": 40, "figures": {"first_position": 7}}, "at position 7: 1 of 40"),
        ({"kind": "decode-only", "rows": 9, "of": 40, "figures": {}}, "response rows only (decode): 9 of 40"),
        ({"kind": "from-position", "rows": 9, "of": 40, "figures": {"position": 97}}, "from position 97 on: 9 of 40"),
        ({"kind": "few-rows", "rows": 9, "of": 40, "figures": {}}, "the first at position ?: 9 of 40"),
        ({"kind": "all", "rows": 40, "of": 40, "figures": {"share": 1.0}}, "all rows: 40 of 40"),
    ],
)
def test_patterns_of_rows_have_words(pattern: dict[str, Any], words: str) -> None:
    assert findings.row_words(pattern).endswith(words)


def test_the_figure_that_exceeds_its_band_most_is_shown() -> None:
    figures = {"error": 1.4, "band": 1.5, "worst_row": 5.0, "row_band": 5.0, "worst_column": 30.0, "column_band": 3.0}
    assert findings.against_band(figures) == "30 of 3 in the worst column"
    assert findings.against_band(figures | {"error": None}) == "- of 1.5"
    assert findings.against_band(None) == "-"


def test_floor_sources_are_counted() -> None:
    report = fixture("consistent")
    assert findings.floor_words(report) == "modelled from the dtype and the depth"
    report["layers"][3]["floor_source"] = "measured"
    assert "for 58 tensors" in findings.floor_words(report) and "(--floor) for 1 tensors" in findings.floor_words(
        report
    )
    report["layers"][3]["golden"] = {"error_a": 1e-3, "error_b": 9e-3, "ratio": 9.0, "side": "b", "verdict": "bug"}
    assert findings.golden_words(report["layers"][3]) == "9, B is farther"
    row = list(csv.DictReader(io.StringIO(FORMS["csv"].render(report))))[3]
    assert (row["floor_source"], row["golden_ratio"], row["side"]) == ("measured", "9.0", "")


def test_terminal_of_identical_runs_lists_no_zeros() -> None:
    text = printed(fixture("identical"))
    assert "Modules  59 identical\n" in text
    assert "relL2" not in text and "logp A" not in text
    assert "mean |dlogp| 0, max |dlogp| 0" in text


def test_terminal_of_an_incomparable_pair_says_why() -> None:
    text = " ".join(printed(fixture("incomparable")).split())
    assert text.startswith("verdict: incomparable")
    assert "tokens fail 0 of 6 sequences agree" in text
    assert "not compared: every tensor: no common sequence" in text
    assert "Modules none compared" in text and "Tokens no log-probs compared" in text


def test_terminal_obeys_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[(?:\d+;)*[349]\d")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert colour.search(printed(fixture("divergent"), force_terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(printed(fixture("divergent"), force_terminal=True))


def test_terminal_without_unicode_still_prints() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    FORMS["terminal"].render(fixture("hostile"), Console(file=stream, width=80))
    stream.flush()
    assert b"verdict: divergent" in raw.getvalue()
