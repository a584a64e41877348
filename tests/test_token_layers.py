"""Tokens joined with layers: the first tensor where the row that scores a token leaves the noise band."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_dumps import Scenario, actor, prompts, write_dump
from synthetic_model import Tiny

import probe.compare.run as compare_run
from probe.compare.align import pack
from probe.compare.diagnose.measured import token_leads
from probe.compare.evidence import Evidence
from probe.compare.judge import Floor, Judgement
from probe.compare.locate import heat as heat_module
from probe.compare.locate.token_layers import LAYER, LOG_PROB, NOISE, UNKNOWN, departures, row_band
from probe.compare.names.canonical import layer_of
from probe.compare.report.findings import first_words, worst_words
from probe.compare.report.model import clean_floats

LAYERS = 4
MODEL = Tiny(layers=LAYERS)
SEQUENCES = prompts(count=6, vocab=MODEL.vocab, seed=5)
LENGTHS = [len(ids) for _, ids, _ in SEQUENCES]
STREAMS = ["embed_tokens", *(f"layers.{i}" for i in range(LAYERS)), "lm_head"]

STRUCK, ROW = 0, 9
"""The sequence, the longest and the only one of its length, and the row of it that a planted fault strikes."""


def struck(x: np.ndarray) -> np.ndarray:
    """Replace one row of one sequence by noise of its size."""
    if len(x) == LENGTHS[STRUCK]:
        x[ROW] = np.random.default_rng(0).normal(size=x.shape[1:]) * np.abs(x).mean()
    return x


def compared(folder: Path, faults: dict[str, Any] | None = None, rollout: Any = None, **changes: Any) -> dict[str, Any]:
    """Compare a healthy rollout (or ``rollout``) with an actor that has faults."""
    a = write_dump(folder / "a", rollout or Scenario(model=MODEL, **changes), SEQUENCES)
    b = write_dump(folder / "b", actor(model=MODEL, faults=faults or {}, noise=1, **changes), SEQUENCES)
    return compare_run.compare_dumps(a, b, replay=False)


def place(token: dict[str, Any]) -> str | None:
    """Return the canonical label of a worst token's first layer."""
    first = token["first_layer"]
    return first and f"{first['name']}:{first['slot']}"


# -- the worst tokens of two dumps ------------------------------------------------------------------------------------


def test_the_struck_row_is_one_of_a_response_and_of_one_sequence() -> None:
    assert LENGTHS.count(LENGTHS[STRUCK]) == 1 and max(LENGTHS) == LENGTHS[STRUCK]
    assert SEQUENCES[STRUCK][2] <= ROW + 1 < LENGTHS[STRUCK] - 1  # tokens around it are scored too


@pytest.mark.parametrize(
    ("layer", "part", "dtype"),
    [
        (0, "input_layernorm", "float32"),
        (0, "self_attn.v_proj", "bfloat16"),
        (2, "self_attn.o_proj", "bfloat16"),
        (2, "mlp.down_proj", "float32"),
    ],
)
def test_the_token_that_a_broken_row_scores_names_the_module(tmp_path: Path, layer: int, part: str, dtype: str) -> None:
    label = f"layers.{layer}.{part}:output.0"
    report = compared(tmp_path, {label: struck}, dtype=dtype)
    uid = SEQUENCES[STRUCK][0]
    tokens = {(token["sequence"], token["position"]): token for token in report["tokens"]["worst"]}
    scored = tokens[uid, ROW + 1]
    assert place(scored) == label and scored["lies_in"] == LAYER
    assert scored["first_layer"]["rel_l2"] > scored["first_layer"]["band"] > 0
    for (sequence, position), token in tokens.items():
        if sequence != uid or position <= ROW:  # attention is causal: rows before it and other sequences are healthy
            assert place(token) is None and token["lies_in"] == NOISE
        elif position > ROW + 1 and place(token):  # those behind it attend to it, in its own layer at the earliest
            assert layer_of(place(token) or "") in (layer, layer + 1) or part == "mlp.down_proj"
            assert (layer_of(place(token) or "") or LAYERS) >= layer
    assert any(f"the earliest in {label.removesuffix(':output.0')} (" in words for words in worst_words(report))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_healthy_tokens_depart_nowhere(tmp_path: Path, dtype: str) -> None:
    report = compared(tmp_path, dtype=dtype)
    heat, worst = report["located"]["heat"], report["tokens"]["worst"]
    assert heat["layers"] == STREAMS and len(worst) == 20
    assert [token["first_layer"] for token in worst] == [None] * 20
    assert {token["lies_in"] for token in worst} == {NOISE} and worst_words(report) == []
    assert heat["first"] == [None] * len(heat["tokens"])
    rows = {(at["sequence"], at["position"]): cells for at, cells in zip(heat["tokens"], heat["cells"])}
    for token in worst:
        assert token["curve"] == rows[token["sequence"], token["position"] - 1]
        assert len(token["curve"]) == len(STREAMS) and max(token["curve"]) < heat["row_band"]


def test_a_curve_rises_where_the_fault_is(tmp_path: Path) -> None:
    report = compared(tmp_path, {"layers.2.mlp.down_proj:output.0": struck})
    token = next(t for t in report["tokens"]["worst"] if t["position"] == ROW + 1 and t["first_layer"])
    before, after = token["curve"][: STREAMS.index("layers.2")], token["curve"][STREAMS.index("layers.2") :]
    assert max(before) < report["located"]["heat"]["row_band"] < 100 < min(after)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_that_is_finite_on_one_side_only_departs(tmp_path: Path) -> None:
    def poisoned(x: np.ndarray) -> np.ndarray:
        if len(x) == LENGTHS[STRUCK]:
            x[ROW, 1] = np.inf
        return x

    heat = clean_floats(compared(tmp_path, {"layers.1.mlp.gate_proj:output.0": poisoned}))["located"]["heat"]
    at = next(n for n, token in enumerate(heat["tokens"]) if token["position"] == ROW)
    assert heat["tokens"][at]["sequence"] == SEQUENCES[STRUCK][0] and heat["cells"][at][2] == heat_module.NON_FINITE
    first = heat["first"][at]
    assert first["name"] == "layers.1.mlp.gate_proj" and first["rel_l2"] is None and first["band"] > 0


def test_without_any_tensor_nothing_is_known(tmp_path: Path) -> None:
    drop = ("model.", "logits", "decoder", "embedding", "output_layer")
    report = compared(tmp_path, drop=drop)
    worst = report["tokens"]["worst"]
    assert report["tokens"]["compared"] and report["located"]["heat"] is None
    assert {(t["first_layer"], t["curve"], t["lies_in"]) for t in worst} == {(None, None, UNKNOWN)}
    assert first_words(worst[0]) == "not known" and worst_words(report) == []


# -- a difference that no layer makes ---------------------------------------------------------------------------------


def test_log_probs_of_other_tokens_lie_in_no_layer(tmp_path: Path) -> None:
    report = compared(tmp_path, rollout=Scenario(model=MODEL, logprob_shift=1))
    words = [token["lies_in"] for token in report["tokens"]["worst"]]
    assert words == [LOG_PROB] * 20 and {token["first_layer"] is None for token in report["tokens"]["worst"]} == {True}
    (sentence,) = worst_words(report)
    assert sentence.startswith("Of the 20 worst tokens 20 have hidden states and logits that agree within rounding")
    assert first_words(report["tokens"]["worst"][0]) == "log-prob only"


def test_the_diagnosis_says_so_where_no_gate_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Evidence] = []
    monkeypatch.setattr(compare_run, "diagnose", lambda evidence: found.append(evidence) or [])
    compared(tmp_path, rollout=Scenario(model=MODEL, logprob_shift=1))
    (lead,) = token_leads(found[0])
    assert lead.cause == "logprob-source" and lead.evidence[-1].endswith("not in a layer.")


def test_logits_that_were_not_stored_leave_it_open(tmp_path: Path) -> None:
    report = compared(tmp_path, rollout=Scenario(model=MODEL, logprob_shift=1), drop=("output_layer",))
    assert {token["lies_in"] for token in report["tokens"]["worst"]} == {UNKNOWN}
    assert all(len(token["curve"]) == len(STREAMS) - 1 for token in report["tokens"]["worst"])


# -- departures against a row by row search ---------------------------------------------------------------------------


def entry(label: str, errors: Any, rows: Any, verdict: str = "consistent", **known: Any) -> Any:
    """Return a measured tensor of one sequence with these row errors at these positions; its floor is 1e-3."""
    errors, rows = np.asarray(errors, float), np.asarray(rows, np.int64)
    mismatch = np.isinf(errors)
    metrics = SimpleNamespace(row_rel_l2=np.where(mismatch, 0.0, errors), row_mismatch=mismatch, rows=len(rows))
    join = SimpleNamespace(pair=np.zeros(len(rows), np.int64), position=rows)
    judgement = Judgement(verdict, 1e-3, 1.0, 1.0)
    match = SimpleNamespace(label=label, proposal=known.get("proposal"))
    return SimpleNamespace(
        match=match, metrics=metrics, join=join, judgement=judgement, floor=Floor(1e-3), among=known.get("among")
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_departures_are_those_of_a_search_row_by_row(data: st.DataObject) -> None:
    sizes = st.sampled_from([0.0, 5e-4, 5e-3, 0.019, 0.021, 1.0, np.inf])
    tensors = []
    for number in range(data.draw(st.integers(0, 5))):
        rows = sorted(data.draw(st.sets(st.integers(0, 12), max_size=8)))
        errors = data.draw(st.lists(sizes, min_size=len(rows), max_size=len(rows)))
        tensors.append(entry(f"layers.{number}:output.0", errors, rows))
    wanted = data.draw(st.lists(st.integers(0, 12), max_size=6))
    found = departures(tensors, pack(np.zeros(len(wanted), np.int64), np.array(wanted, np.int64)))
    expected: dict[int, str | None] = {}
    for tensor in tensors:
        for row, error, bad in zip(tensor.join.position, tensor.metrics.row_rel_l2, tensor.metrics.row_mismatch):
            if row in wanted:
                expected.setdefault(int(row), None)
                if expected[int(row)] is None and (bad or error > 0.02):  # 5 x 4 floors of 1e-3
                    expected[int(row)] = tensor.match.label
    assert {cell: departure and departure.label for cell, departure in found.items()} == expected


def test_the_band_of_a_flagged_tensor_follows_its_bad_rows() -> None:
    healthy, bad = [1e-3] * 30, [0.012] * 30
    assert row_band(entry("layers.0:output.0", healthy, range(30))) == pytest.approx(0.02)
    # every row is 12 floors off: none strays from the others, all of them are beyond rounding
    whole = entry("layers.0:output.0", bad, range(30), "divergent")
    assert row_band(whole) == pytest.approx(0.012 / 3)
    # half a tensor far off does not make the healthy half depart
    half = entry("layers.0:output.0", healthy + [0.5] * 29, range(59), "divergent")
    assert 1e-3 < row_band(half) <= 0.02


def test_rows_that_a_flip_has_reached_do_not_set_the_band() -> None:
    errors = [1e-3] * 10 + [3.0] * 20
    judged = np.arange(30) < 10
    reached = entry("layers.0.mlp.experts:output.0", errors, range(30), "suspect", among=judged)
    assert row_band(reached) == pytest.approx(5e-3)
    cells = pack(np.zeros(2, np.int64), np.array([3, 20]))
    found = departures([reached], cells)
    assert found[3] is None and found[20] is not None  # its hidden state did leave: the experts differ


def test_proposed_pairs_and_routing_do_not_count() -> None:
    proposed = entry("layers.0.odd:output.0", [1.0], [2], "suspect", proposal=object())
    ids = entry("layers.0.mlp.router:ids", [1.0], [2], "divergent")
    assert departures([proposed, ids], np.array([2])) == {}


# -- which rows are kept ----------------------------------------------------------------------------------------------


def test_the_rows_of_the_worst_tokens_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat_module, "MAX_TOKENS", 16)
    report = compared(tmp_path, {"layers.3.mlp.down_proj:output.0": struck})
    heat, worst = report["located"]["heat"], report["tokens"]["worst"]
    kept = [(at["sequence"], at["position"]) for at in heat["tokens"]]
    assert len(kept) == len(set(kept)) == 16 and heat["worst"] == 8 < heat["of_tokens"]
    assert {(token["sequence"], token["position"] - 1) for token in worst[:4]} <= set(kept)
    with_curve = [token["curve"] is not None for token in worst]
    assert with_curve == [(token["sequence"], token["position"] - 1) in kept for token in worst] and not all(with_curve)
