"""Native tensors of several ranks become the canonical ones, bit for bit; on a model without any engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic_dumps import Scenario, actor, opened, prompts
from synthetic_model import Tiny
from synthetic_ranks import Ranks, write_ranks

from probe.compare.merge import OPERATIONS, CanonicalReader
from probe.compare.names.base import ModelShape
from probe.compare.replicas import replicas_gate
from probe.compare.run import compare_dumps
from probe.compare.side import read_side
from probe.compare.weights import canonical_weights, compare_weights
from probe.errors import ProbeError
from probe.layout import fuse_qkv_groups
from probe.store.reader import open_dump

SHAPE = ModelShape(
    layers=1, hidden=4, intermediate=6, heads=4, kv_heads=2, head_dim=3, vocab=5, tied=False, eps=1e-6,
    q_lora_rank=4, kv_lora_rank=3, rope_dim=2,
)  # fmt: skip


# -- whole dumps ------------------------------------------------------------------------------------------------------


def by_row(side, source):
    """Return (sequence, position, call) -> value of each row of a canonical tensor."""
    reader = CanonicalReader(side)
    rows, values = reader.rows(source), reader.read(source)
    assert len(rows) == len(values)
    return {(int(r["sequence"]), int(r["position"]), int(r["call"])): v.tobytes() for r, v in zip(rows, values)}


CASES = [
    ("vllm", 2, 2, False, "float32", False),
    ("vllm", 4, 2, True, "bfloat16", False),
    ("vllm", 4, 1, False, "float32", False),
    ("megatron", 2, 2, False, "float32", False),
    ("megatron", 2, 2, True, "bfloat16", True),
    ("megatron", 4, 2, True, "float32", True),
    ("megatron", 4, 1, False, "float32", False),
]


@pytest.mark.parametrize(("layout", "tp", "kv_heads", "qk_norm", "dtype", "sp"), CASES)
def test_ranks_give_the_canonical_tensors_of_one_process(tmp_path, layout, tp, kv_heads, qk_norm, dtype, sp):
    model = Tiny(kv_heads=kv_heads, qk_norm=qk_norm)
    scenario = Scenario(layout=layout, model=model, dtype=dtype, block_bytes=2048)
    folder = write_ranks(tmp_path / "many", scenario, Ranks(tp, sp))
    with opened(tmp_path / "one", scenario) as one, open_dump(folder) as many:
        whole, joined = read_side(one), read_side(many)
        assert set(whole.resolution.sources) == set(joined.resolution.sources)
        for label, source in whole.resolution.sources.items():
            assert by_row(whole, source) == by_row(joined, joined.resolution.sources[label]), label
        findings = compare_weights(canonical_weights(whole), canonical_weights(joined))
        assert {finding.status for finding in findings} == {"equal"}, findings
        assert len(findings) == len(canonical_weights(whole))


@st.composite
def spreads(draw):
    """Draw an engine's layout, sizes of the model, a number of ranks, a dtype and sequences, some of one content."""
    heads = {"heads": 4, "kv_heads": draw(st.sampled_from([1, 2, 4])), "head_dim": draw(st.sampled_from([2, 4, 6]))}
    ffn, qk_norm = 4 * draw(st.integers(1, 3)), draw(st.booleans())
    model = Tiny(layers=1, hidden=8, ffn=ffn, vocab=11, padded_vocab=16, qk_norm=qk_norm, **heads)
    layout, dtype = draw(st.sampled_from(["vllm", "megatron"])), draw(st.sampled_from(["float32", "bfloat16"]))
    scenario = Scenario(layout=layout, model=model, dtype=dtype, block_bytes=draw(st.sampled_from([1, 200, 1 << 20])))
    sequences = prompts(draw(st.integers(1, 3)), vocab=11, seed=draw(st.integers(0, 99)))
    sequences += [(f"again {uid}", ids, length) for uid, ids, length in sequences[: draw(st.integers(0, 2))]]
    sp = layout == "megatron" and draw(st.booleans())
    return scenario, Ranks(draw(st.sampled_from([1, 2, 4])), sp, shuffle=draw(st.integers(0, 99))), sequences


@given(spreads())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_spread_over_ranks_gives_the_tensors_of_one_process(tmp_path_factory, drawn):
    scenario, ranks, sequences = drawn
    folder = tmp_path_factory.mktemp("spread")
    many = write_ranks(folder / "many", scenario, ranks, sequences)
    with opened(folder / "one", scenario, sequences) as one, open_dump(many) as several:
        assert [s.uid for s in one.sequences] == [s.uid for s in several.sequences]
        whole, joined = read_side(one), read_side(several)
        assert set(whole.resolution.sources) == set(joined.resolution.sources)
        for label, source in whole.resolution.sources.items():
            assert by_row(whole, source) == by_row(joined, joined.resolution.sources[label]), label
        assert replicas_gate(one, several).status == ("pass" if ranks.tp > 1 and not ranks.sp else "skipped")


@pytest.mark.parametrize("driver", [True, False], ids=["driver", "no driver"])
def test_two_engines_over_ranks_are_consistent(tmp_path, driver):
    a = write_ranks(tmp_path / "a", Scenario(), Ranks(2))
    b = write_ranks(tmp_path / "b", actor(), Ranks(4, sp=True, driver=driver))
    report = compare_dumps(a, b)
    assert report["verdict"] == "consistent", report["summary"]
    gates = {gate["name"]: gate for gate in report["gates"]}
    assert all(gate["status"] == "pass" for gate in gates.values()), gates
    assert report["coverage"]["matched"] == 45 and not report["coverage"]["only_a"] + report["coverage"]["only_b"]
    assert "rows that several ranks hold are the same on each of them" in gates["replicas"]["detail"]
    # without a driver's file the log-probs come from the logits of the ranks
    assert report["tokens"]["compared"] > 0 and report["tokens"]["mean_abs_logprob_diff"] < 1e-5
    assert report["tokens"]["source_b"] == "recomputed"


def test_a_lost_rank_is_never_compared_in_half(tmp_path):
    a = write_ranks(tmp_path / "a", Scenario(), Ranks(2))
    b = write_ranks(tmp_path / "b", actor(), Ranks(2, lost=(1,)))
    report = compare_dumps(a, b)
    assert report["verdict"] == "incomparable"
    assert not report["b"]["complete"] and any("rank 1 of 2 is missing" in text for text in report["not_compared"])
    layers = {f"{layer['name']}:{layer['slot']}": layer for layer in report["layers"]}
    for label in ("layers.0.self_attn.q_proj:output.0", "lm_head:output.0"):
        assert layers[label]["verdict"] == "incomparable"
        assert "that of tensor-parallel rank 1 of 2 is missing" in layers[label]["reason"]
    assert layers["layers.0.input_layernorm:output.0"]["verdict"] in ("identical", "consistent")
    weights = next(gate for gate in report["gates"] if gate["name"] == "weights")
    assert weights["status"] == "warn"
    assert "lacks a shard in b: the shard of tensor-parallel rank 1 of 2 is in no file" in weights["detail"]


def test_only_the_ranks_whose_copies_count_being_lost_loses_those_tensors(tmp_path):
    a = write_ranks(tmp_path / "a", Scenario(), Ranks(2))
    b = write_ranks(tmp_path / "b", actor(), Ranks(2, lost=(0,)))
    layers = {f"{layer['name']}:{layer['slot']}": layer for layer in compare_dumps(a, b)["layers"]}
    reason = layers["layers.0.input_layernorm:output.0"]["reason"]
    assert "only checksums of it are stored" in reason


# -- operations -------------------------------------------------------------------------------------------------------


def columns(count, rows=2):
    """Return an array [rows, count] whose entries say where they are."""
    return np.arange(count, dtype=np.float32) + 100 * np.arange(rows, dtype=np.float32)[:, None]


def run(operation, arrays, part=0, axis=-1):
    arrays = [[a if axis == -1 else a.T for a in shards] for shards in arrays]
    found = OPERATIONS[operation](arrays, part, SHAPE, axis)
    return found if axis == -1 else found.T


@pytest.mark.parametrize("axis", [-1, 0], ids=["activations", "weights"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_qkv_of_ranks_is_split_into_whole_projections(tp, axis):
    q, k, v = columns(12), 20 + columns(6), 40 + columns(6)
    kv = [np.split(x, 2, axis=1) for x in (k, v)]  # two heads, each on tp / 2 ranks, or both on one
    ranks = []
    for rank in range(tp):
        heads = [np.concatenate(x, axis=1) if tp == 1 else x[rank * 2 // tp] for x in kv]
        ranks.append(np.concatenate([np.split(q, tp, axis=1)[rank], *heads], axis=1))
    grouped = np.split(fuse_qkv_groups(q, k, v, 4, 2, 3), tp, axis=1)
    for part, expected in enumerate((q, k, v)):
        assert np.array_equal(run("split_qkv", [ranks], part, axis), expected)
        assert np.array_equal(run("split_qkv_groups", [grouped], part, axis), expected)
    copies = [kv[0][rank * 2 // tp] for rank in range(tp)] if tp > 1 else [k]
    assert np.array_equal(run("kv_heads", [copies], 0, axis), k)


def test_gate_and_up_of_ranks():
    gate, up = columns(6), 50 + columns(6)
    ranks = [np.concatenate(pair, axis=1) for pair in zip(np.split(gate, 3, axis=1), np.split(up, 3, axis=1))]
    assert np.array_equal(run("split_gate_up", [ranks], 0), gate)
    assert np.array_equal(run("split_gate_up", [ranks], 1), up)


def test_padding_of_the_vocabulary_is_cut_after_the_shards_are_joined():
    assert np.array_equal(run("cut_vocabulary", [np.split(columns(8), 2, axis=1)]), columns(5))


def test_latent_projections_are_split_by_their_ranks():
    assert np.array_equal(run("split_q_a_kv_a", [[columns(9)]], 0), columns(4))
    assert np.array_equal(run("split_q_a_kv_a", [[columns(9)]], 1), columns(9)[:, 4:])


def test_stacked_experts_are_taken_apart():
    experts, out, tp = 3, 4, 2
    tables = np.arange(experts * 2 * out * 3, dtype=np.float64).reshape(experts, 2 * out, 3)
    gate, up = tables[:, :out], tables[:, out:]
    ranks = [np.concatenate([gate[:, r], up[:, r]], axis=1) for r in (slice(0, 2), slice(2, 4))]
    for expert in range(experts):
        assert np.array_equal(OPERATIONS["split_experts_gate_up"]([ranks], 2 * expert, SHAPE, 0), gate[expert])
        assert np.array_equal(OPERATIONS["split_experts_gate_up"]([ranks], 2 * expert + 1, SHAPE, 0), up[expert])
        halves = np.split(tables, tp, axis=1)
        assert np.array_equal(OPERATIONS["split_experts"]([halves], expert, SHAPE, 0), tables[expert])


def test_a_norm_is_recomputed_from_its_input_and_weight():
    x, weight = columns(4) + 1, np.array([[1.0], [2.0], [0.5], [-1.0]])
    found = OPERATIONS["rms_norm"]([[x], [weight]], 0, SHAPE, -1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + SHAPE.eps) * weight[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == np.float32


def test_a_sum_joins_its_terms_first():
    halves = np.split(columns(6), 2, axis=1)
    assert np.array_equal(run("sum", [halves, [columns(6)]]), 2 * columns(6))


def test_sizes_that_do_not_fit_are_refused():
    for operation, part in itertools.product(("split_qkv", "split_qkv_groups"), range(3)):
        with pytest.raises(ProbeError, match="must have 24 entries"):
            run(operation, [[columns(23)]], part)
