"""Locating a divergence: own against inherited error, growth, patterns of rows and channels, outlier tokens, heat."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_dumps import Scenario, actor, opened, prompts
from synthetic_model import Tiny

import probe.compare.run as compare_run
from probe.compare.evidence import BROKEN, FINE, Evidence, Located, Replayed
from probe.compare.gates import Gate, GateFinding
from probe.compare.judge import Judgement, judge
from probe.compare.locate import heat as heat_module
from probe.compare.locate.channels import few_channels
from probe.compare.locate.growth import growth
from probe.compare.locate.heat import NON_FINITE, heat_map
from probe.compare.locate.inputs import ADDS, COMBINES, INPUTS, Way, inputs_of
from probe.compare.locate.own import inherited_error
from probe.compare.locate.run import locate
from probe.compare.locate.sides import which_side
from probe.compare.names.canonical import EMBEDDING, FINAL_NORM, LAYER_TENSORS, LOGITS
from probe.metrics import measure_pair

LAYERS = 4
MODEL = Tiny(layers=LAYERS)
SEQUENCES = prompts(count=6, vocab=MODEL.vocab, seed=5)


@pytest.fixture
def evidence_of(tmp_path, monkeypatch):
    """Compare a healthy rollout with an actor that has faults; return the evidence, its dumps open."""
    stack = ExitStack()

    def run(faults: dict[str, Any] | None = None, dtype: str = "float32", **changes: Any) -> Evidence:
        found: list[Evidence] = []

        def note(evidence: Evidence) -> Located:
            found.append(evidence)
            return locate(evidence)

        monkeypatch.setattr(compare_run, "locate", note)
        sides = Scenario(dtype=dtype, model=MODEL), actor(dtype=dtype, model=MODEL, faults=faults or {}, **changes)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        dumps = [stack.enter_context(opened(folder / name, side, SEQUENCES)) for name, side in zip("ab", sides)]
        compare_run.compare_open(*dumps, replay=False)
        return found[0]

    with stack:
        yield run


def scaled(factor: float):
    return lambda x: x * factor


def from_row(start: int, factor: float = 1.2):
    """Return a fault of the rows from ``start`` on."""

    def fault(x: np.ndarray) -> np.ndarray:
        x[start:] *= factor
        return x

    return fault


# -- the table of inputs ----------------------------------------------------------------------------------------------


def test_every_canonical_tensor_but_the_embedding_has_inputs_that_are_canonical_too():
    labels = {label for label, _ in LAYER_TENSORS} | {FINAL_NORM, LOGITS}
    assert set(INPUTS) == labels
    named = {name for ways in INPUTS.values() for way in ways for name in way.inputs} - {"{stream}"}
    assert named <= labels


def test_inputs_come_before_their_tensor():
    order = {label: number for number, (label, _) in enumerate(LAYER_TENSORS)} | {FINAL_NORM: 99, LOGITS: 100}
    for label, ways in INPUTS.items():
        assert all(order[name] < order[label] for way in ways for name in way.inputs if name != "{stream}"), label


def test_the_fullest_known_way_is_taken():
    known = {"layers.1:output.0", "layers.2.self_attn.q_proj:output.0"}
    assert inputs_of("layers.2.self_attn.q_proj:output.0", 4, known.__contains__) == Way(("layers.1:output.0",))
    known.add("layers.2.input_layernorm:output.0")
    assert inputs_of("layers.2.self_attn.q_proj:output.0", 4, known.__contains__) == Way(
        ("layers.2.input_layernorm:output.0",)
    )
    assert inputs_of("layers.0.input_layernorm:output.0", 4, lambda name: True) == Way((EMBEDDING,))
    assert inputs_of(FINAL_NORM, 4, lambda name: True) == Way(("layers.3:output.0",))
    assert inputs_of(EMBEDDING, 4, lambda name: True) is None
    expert = inputs_of("layers.2.mlp.experts.17.down_proj:input.0", 4, lambda name: True)
    assert expert is not None and expert.inputs[0] == "layers.2.mlp.experts.17.gate_proj:output.0"


def test_gemma_norms_the_output_of_its_attention():
    label = "layers.1.post_attention_layernorm:output.0"
    with_norm = inputs_of(label, 4, lambda name: True)
    without = inputs_of(label, 4, lambda name: "feedforward" not in name)
    assert with_norm == Way(("layers.1.self_attn.o_proj:output.0",))
    assert without == Way(("layers.0:output.0", "layers.1.self_attn.o_proj:output.0"), ADDS)


# -- own against inherited error --------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.floats(1e-6, 1e-2))
def test_an_exact_module_inherits_all_of_its_error(seed, size):
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(2, 256, 64))
    noisy = [values * (1 + size * rng.choice([-1, 1], values.shape)) for values in (left, right)]
    inputs = [measure_pair(x, y) for x, y in zip(noisy, (left, right))]
    product = measure_pair(noisy[0] * noisy[1], left * right)
    assert inherited_error(product, inputs, Way((), COMBINES)) == pytest.approx(product.rel_l2, rel=0.1)
    total = measure_pair(noisy[0] + noisy[1], left + right)
    assert inherited_error(total, inputs, Way((), ADDS)) == pytest.approx(total.rel_l2, rel=0.1)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_the_faulty_module_has_the_largest_own_error(evidence_of, layer, part):
    label = f"layers.{layer}.{part}:output.0"
    own = locate(evidence_of({label: scaled(1.1)}, noise=1)).own
    assert max(own, key=lambda name: own[name].own) == label
    assert own[label].own == pytest.approx(0.1 / 1.1, rel=1e-3) and own[label].inherited < 1e-5  # of b, the faulty side


# -- growth -----------------------------------------------------------------------------------------------------------


def entries(*floors: float, per_layer: int = 1) -> list[Any]:
    """Return measured tensors with the given noise floors, ``per_layer`` of them in each layer."""
    return [
        SimpleNamespace(
            match=SimpleNamespace(label=f"layers.{n // per_layer}.t{n % per_layer}:output.0"),
            metrics=SimpleNamespace(nonfinite_mismatch=0),
            judgement=Judgement("consistent", 1e-3, value, value),
        )
        for n, value in enumerate(floors)
    ]


def test_a_healthy_pair_neither_jumps_nor_drifts(evidence_of):
    for dtype in ("float32", "bfloat16"):
        located = locate(evidence_of(None, dtype, noise=1))
        assert located.growth == "none" and located.jumps == [] and located.tokens == []
        assert located.rows == located.channels == {} and located.deltas == []


def test_a_drift_is_no_jump():
    word, jumps = growth(entries(*(1.12**n for n in range(60))))
    assert word == "drift" and jumps == []


def test_per_layer_noise_is_a_drift(evidence_of):
    """A norm in low precision in every layer (sglang#27540): the cosine falls layer by layer, no module jumps."""
    rng = np.random.default_rng(0)

    def noisy(size: float):
        return lambda x: x * (1 + size * rng.uniform(-1, 1, x.shape))

    faults = {
        f"layers.{i}.{name}:output.0": noisy(2.0**-21 * 3**i)
        for i in range(LAYERS)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    located = locate(evidence_of(faults))
    assert located.growth == "drift" and located.jumps == []


def test_jumps_are_named_in_order_and_what_inherits_them_is_none():
    word, jumps = growth(entries(0.5, 0.8, 1.0, 40.0, 38.0, 30.0, 20.0, 300.0, 290.0))
    assert word == "jump"
    assert [(jump.label, jump.before, jump.after) for jump in jumps] == [
        ("layers.3.t0:output.0", 1.0, 40.0),
        ("layers.7.t0:output.0", 20.0, 300.0),
    ]
    assert jumps[1].factor == pytest.approx(15.0)


def test_a_non_finite_value_is_a_jump():
    curve = entries(0.5, 0.5, 0.5)
    curve[1].metrics.nonfinite_mismatch = 3
    word, jumps = growth(curve)
    assert word == "jump" and math.isinf(jumps[0].after)


@given(st.lists(st.floats(0.0, 1.93), min_size=1, max_size=80))
def test_whatever_healthy_curve_never_jumps(values):
    assert growth(entries(*values, per_layer=5)) == ("none", [])


# -- patterns of rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_from_a_position_on_is_found_in_dumps(evidence_of, dtype):
    label = "layers.1.mlp.up_proj:output.0"
    located = locate(evidence_of({label: from_row(5, 1.5)}, dtype, noise=2))
    assert located.rows[label].kind == "from-position" and located.rows[label].figures["position"] == 5
    assert located.jumps[0].label == label


def test_sequences_taken_from_a_prefix_cache_are_told_apart(evidence_of):
    label = "layers.1.self_attn.o_proj:input.0"
    evidence = evidence_of({}, noise=1)
    entry = evidence.entry(label)
    for number in (1, 3):
        evidence.a.sequences[evidence.join.pairs[number].a].cached = 2
    hit = np.isin(entry.join.pair, (1, 3))
    entry.metrics.row_rel_l2[hit] = 0.3
    entry.judgement = judge(entry.metrics, entry.judgement.floor)
    found = locate(evidence).rows[label]
    assert found.kind == "cached-prefix" and found.figures["cached"] == 2


# -- outlier tokens ---------------------------------------------------------------------------------------------------


def test_an_outlier_token_is_named_with_the_first_tensor_where_it_departs(evidence_of):
    label = "layers.2.self_attn.o_proj:output.0"

    def one_row(x: np.ndarray) -> np.ndarray:
        if len(x) == len(SEQUENCES[3][1]):
            x[2] = np.random.default_rng(0).normal(size=x.shape[1:])
        return x

    lengths = [len(ids) for _, ids, _ in SEQUENCES]
    struck = [(uid, int(ids[2])) for uid, ids, _ in SEQUENCES if len(ids) == lengths[3]]
    located = locate(evidence_of({label: one_row}, noise=1))
    first = [token for token in located.tokens if token.label == label]
    assert sorted((token.sequence, token.token) for token in first) == sorted(struck)
    assert {token.position for token in first} == {2} and located.tokens[: len(first)] == first
    assert all(token.rel_l2 > token.band > 0 for token in located.tokens)
    assert located.rows[label].kind == ("one-row" if len(struck) == 1 else "few-rows")


def test_where_every_row_is_off_no_token_stands_out(evidence_of):
    assert locate(evidence_of({"layers.1.mlp.down_proj:output.0": scaled(1.2)}, noise=1)).tokens == []


# -- channels ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 5))
def test_a_few_zeroed_columns_are_found(seed, count):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(64, 128)) * rng.lognormal(0, 1, 128)  # some columns are much larger than others
    x = y * (1 + 1e-3 * rng.uniform(-1, 1, y.shape))
    zeroed = rng.choice(128, count, replace=False)
    x[:, zeroed] = 0
    found = few_channels(measure_pair(x, y), 1e-2)
    assert found is not None and sorted(found.columns) == sorted(zeroed.tolist())
    assert (found.count, found.of) == (count, 128) and found.share > 0.9


@given(st.integers(0, 1000))
def test_large_columns_alone_are_no_pattern(seed):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(64, 128)) * np.where(np.arange(128) < 2, 1000.0, 1.0)
    assert few_channels(measure_pair(y * (1 + 0.02 * rng.uniform(-1, 1, y.shape)), y), 1e-4) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_zeroed_column_is_found_in_dumps(evidence_of, dtype):
    label = "layers.1.mlp.up_proj:output.0"

    def zero(x: np.ndarray) -> np.ndarray:
        x[:, [5, 9]] = 0
        return x

    found = locate(evidence_of({label: zero}, dtype, noise=1)).channels
    assert sorted(found[label].columns) == [5, 9] and found[label].of == MODEL.ffn
    assert label.replace("up_proj", "gate_proj") not in found


# -- block deltas -----------------------------------------------------------------------------------------------------


def test_the_delta_of_the_faulty_block_stands_out(evidence_of):
    located = locate(evidence_of({"layers.2.mlp.down_proj:output.0": scaled(1.5)}, noise=1))
    deltas = {delta.label: delta for delta in located.deltas}
    assert list(deltas) == [f"layers.{i}:output.0" for i in range(LAYERS)]
    assert deltas["layers.1:output.0"].rel_l2 < 1e-5 < 0.1 < deltas["layers.2:output.0"].rel_l2
    assert abs(math.log(deltas["layers.2:output.0"].norm_ratio)) > 0.05
    assert all(0 < delta.rounding < 1e-6 for delta in located.deltas)


# -- heat -------------------------------------------------------------------------------------------------------------


def test_heat_holds_every_token_and_layer(evidence_of):
    evidence = evidence_of({"layers.1.mlp.down_proj:output.0": from_row(5)}, noise=1)
    heat = heat_map(evidence.measured, evidence.join.pairs, evidence.a.sequences)
    assert heat is not None
    assert heat["layers"] == ["embed_tokens", *(f"layers.{i}" for i in range(LAYERS)), "lm_head"]
    assert len(heat["tokens"]) == len(heat["cells"]) == heat["of_tokens"] == heat["worst"]
    cells = np.array(heat["cells"])
    late = np.array([token["position"] >= 5 for token in heat["tokens"]])
    assert (cells[late][:, 2] > 100).all() and (cells[~late] < 10).all() and (cells[:, :2] < 10).all()
    ids = {(uid, p): int(token) for uid, tokens, _ in SEQUENCES for p, token in enumerate(tokens)}
    assert all(ids[token["sequence"], token["position"]] == token["token"] for token in heat["tokens"])


def test_heat_is_capped_and_keeps_the_worst(evidence_of, monkeypatch):
    evidence = evidence_of({"layers.2.mlp.down_proj:output.0": from_row(5)}, noise=1)
    monkeypatch.setattr(heat_module, "MAX_TOKENS", 12)
    monkeypatch.setattr(heat_module, "MAX_LAYERS", 3)
    heat = heat_map(evidence.measured, evidence.join.pairs, evidence.a.sequences)
    assert heat is not None and len(heat["cells"]) == 12 and heat["worst"] == 6 and heat["of_layers"] == LAYERS + 2
    assert "layers.2" in heat["layers"] and len(heat["layers"]) == 3
    assert sum(max(row) > 100 for row in heat["cells"]) >= 6


def test_heat_of_a_non_finite_row(evidence_of):
    evidence = evidence_of({}, noise=1)
    evidence.entry("layers.1:output.0").metrics.row_mismatch[3] = True
    heat = heat_map(evidence.measured, evidence.join.pairs, evidence.a.sequences)
    assert heat is not None and heat["cells"][3][2] == NON_FINITE


# -- which side -------------------------------------------------------------------------------------------------------


def replayed(label: str, side: str, verdict: str, **figures: Any) -> Replayed:
    given = {"error": 1.0, "worst_row": 1.0, "worst_column": 1.0} | figures
    return Replayed(
        label, "linear", side, 32, given["error"], 1.5, given["worst_row"], 5.0, (0, 4), given["worst_column"], 3.0, 7,
        verdict,
    )  # fmt: skip


def test_the_side_comes_from_replay_then_golden_then_weights(evidence_of):
    label = "layers.1.mlp.down_proj:output.0"
    evidence = evidence_of({label: scaled(1.2)}, noise=1)
    assert which_side(evidence, label) == ""
    finding = GateFinding("stale-weights", "layers.1.mlp.down_proj.weight", "b", "stale")
    evidence.gates = [Gate("weights", "fail", "stale", (finding,))]
    assert which_side(evidence, label) == "b"
    evidence.entry(label).golden = SimpleNamespace(side="a", verdict="bug")
    assert which_side(evidence, label) == "a"
    evidence.replays.by_side["a"][label] = replayed(label, "a", FINE)
    evidence.replays.by_side["b"][label] = replayed(label, "b", BROKEN)
    assert which_side(evidence, label) == "b"


def test_the_rows_and_the_column_of_a_replay_speak_where_noise_covers_them(evidence_of):
    evidence = evidence_of({}, "bfloat16", noise=1)
    row, column = "layers.1.mlp.down_proj:output.0", "layers.2.self_attn.v_proj:output.0"
    pair = evidence.join.pairs[2]
    keys = np.array([(pair.b, p) for p in range(6)] + [(evidence.join.pairs[4].b, p) for p in range(6)])
    each = np.array([6.2, 5.9, 6.0, 6.1, 6.0, 5.8, 1.0, 1.1, 0.9, 1.0, np.nan, 1.2])
    evidence.replays.by_side["b"] = {
        row: replace(replayed(row, "b", BROKEN, error=4.0), keys=keys, each_row=each),
        column: replayed(column, "b", BROKEN, worst_column=30.0),
    }
    located = locate(evidence)
    assert (located.rows[row].kind, located.rows[row].rows, located.rows[row].of) == ("one-sequence", 6, 11)
    assert located.rows[row].figures["sequence"] == pair.label and located.rows[row].figures["source"] == "replay"
    assert located.channels[column].columns == (7,) and row not in located.channels and column not in located.rows
