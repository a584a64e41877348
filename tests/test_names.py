"""Tables of names: every engine's tensors and parameters reach the same canonical ones, and nothing is dropped."""

from __future__ import annotations

import re

import numpy as np
import pytest
from synthetic_dumps import LAYOUTS, Scenario, actor, opened, prompts
from synthetic_model import Forward, Tiny, make_weights

from probe.compare.align import RowAligner
from probe.compare.figures import measure_rows
from probe.compare.match import match_tensors
from probe.compare.merge import OPERATIONS, CanonicalReader
from probe.compare.names import TABLES, table_for
from probe.compare.names.base import ModelShape, Rule, fill, key_of, pattern, resolve, strip_native
from probe.compare.names.canonical import LAYER_TENSORS, place_of
from probe.compare.sequences import join_sequences
from probe.compare.side import read_side
from probe.compare.weights import canonical_weights

ROPE = "rotary_emb"


@pytest.mark.parametrize("engine", TABLES)
def test_every_rule_names_a_known_operation_and_canonical_labels(engine):
    table = TABLES[engine]
    for rule in (*table.tensors, *table.parameters):
        assert rule.operation in OPERATIONS
    for rule in table.tensors:
        for label in rule.canonical:
            assert place_of(fill(label, {"i": "0", "e": "0"}), layers=2) is not None, label


@pytest.mark.parametrize("engine", TABLES)
def test_no_entry_of_a_table_is_written_twice(engine):
    table = TABLES[engine]
    for entries in (table.tensors, table.parameters, table.unavailable, table.auxiliary):
        assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("engine", TABLES)
def test_every_table_gives_every_canonical_tensor_of_a_family_that_it_runs_or_says_why_not(engine):
    table = TABLES[engine]
    given = {label for rule in table.tensors for label in rule.canonical}
    excused = {label for entry in table.unavailable for label in entry.canonical}
    wanted = {"embed_tokens:output.0", "norm:output.0", "lm_head:output.0", *(label for label, _ in LAYER_TENSORS)}
    gemma = {f"layers.{{i}}.{name}_feedforward_layernorm:output.0" for name in ("pre", "post")}
    assert wanted - (gemma if engine == "megatron" else set()) <= given | excused


def test_canonical_tensors_are_in_execution_order():
    labels = [fill(label, {"i": str(i), "e": "0"}) for i in range(2) for label, _ in LAYER_TENSORS]
    labels = ["embed_tokens:output.0", *labels, "norm:output.0", "lm_head:output.0"]
    places = [place_of(label, layers=2) for label in labels]
    assert places == sorted(places)
    assert [place.ops for place in places] == sorted(place.ops for place in places)
    assert place_of("layers.0.mlp.unknown:output.0", layers=2) is None


@pytest.mark.parametrize(
    ("native", "expected"),
    [
        ("model.layers.0.mlp:output.0", "layers.0.mlp:output.0"),
        ("module.module.decoder.layers.0:output.0", "decoder.layers.0:output.0"),
        ("_orig_mod.model.layers.3._fsdp_wrapped_module.mlp:output.0", "layers.3.mlp:output.0"),
        ("lm_head:output.0", "lm_head:output.0"),
        ("base_model.model.model.layers.0.mlp.up_proj:output.0", "layers.0.mlp.up_proj:output.0"),
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight", "layers.0.mlp.up_proj.weight"),
        ("module.module.base_model.model.lm_head:output.0", "lm_head:output.0"),
        ("model.layers.0._checkpoint_wrapped_module.mlp:output.0", "layers.0.mlp:output.0"),
        # a base layer's output is not the adapted layer's: it keeps its own name
        ("model.layers.0.mlp.up_proj.base_layer:output.0", "layers.0.mlp.up_proj.base_layer:output.0"),
    ],
)
def test_wrappers_and_prefixes_are_stripped(native, expected):
    assert strip_native(native, ("model.",)) == expected


def test_layer_numbers_are_matched_whole_and_dots_literally():
    assert pattern("layers.{i}:output.0").match("layers.12:output.0").groupdict() == {"i": "12"}
    assert pattern("layers.{i}:output.0").match("layers.12.mlp:output.0") is None
    assert pattern("layers.{i}:output.0").match("layersx12:output.0") is None


def test_the_first_rule_that_applies_wins_and_the_others_are_spare():
    rules = (Rule(("a:x",), ("t:output.0",)), Rule(("b:x",), ("t:output.0",)))
    both = resolve(rules, ["b:x", "a:x"])
    assert both.sources["t:output.0"].native == ("a:x",)
    assert both.spare == {"b:x": "t:output.0"}
    assert resolve(rules, ["b:x"]).sources["t:output.0"].native == ("b:x",)


def test_a_sum_needs_all_of_its_parts():
    rules = (Rule(("a:output.0", "a:output.1"), ("t:output.0",), "sum"),)
    assert not resolve(rules, ["a:output.0"]).sources
    assert resolve(rules, ["a:output.1", "a:output.0"]).sources["t:output.0"].operation == "sum"


# -- on synthetic dumps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qk_norm", [False, True], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_canonical_tensors_of_every_layout_equal_the_models(tmp_path, layout, qk_norm):
    model = Tiny(qk_norm=qk_norm)
    scenario = Scenario(layout=layout, model=model, block_bytes=512)
    weights = make_weights(model)
    sequences = prompts()
    truth = [Forward(model, weights).run(ids) for _, ids, _ in sequences]
    with opened(tmp_path / "d", scenario) as dump:
        side = read_side(dump)
        reader = CanonicalReader(side)
        for label, source in side.resolution.sources.items():
            rows, values = reader.rows(source), reader.read(source)
            for at in range(len(rows)):
                expected = truth[rows["sequence"][at]][label][rows["position"][at]].ravel()
                # the vLLM layout stores MLP output and residual apart: their fp32 sum is one rounding off
                np.testing.assert_allclose(values[at], expected, rtol=1e-6, atol=1e-6, err_msg=label)
        missing = set(truth[0]) - set(side.resolution.sources) - {f"layers.{i}.residual" for i in range(model.layers)}
        excused = {"megatron-te": ("layernorm",), "transformers": (ROPE,)}.get(layout, ())
        assert all(any(word in label for word in excused) for label in missing), missing


@pytest.mark.parametrize("layout", ["megatron", "megatron-te", "transformers", "vllm"])
def test_every_canonical_tensor_of_two_layouts_matches_with_no_difference(tmp_path, layout):
    with opened(tmp_path / "a", Scenario()) as a, opened(tmp_path / "b", actor(layout)) as b:
        side_a, side_b = read_side(a), read_side(b)
        matching = match_tensors(side_a, side_b)
        assert not matching.only_a and not matching.only_b
        excused = {"megatron-te": 6, "transformers": 6}.get(layout, 0)
        assert len(matching.matched) == 45 - excused and len(matching.unavailable) == excused
        aligner = RowAligner(join_sequences(a, b), a.sequences, b.sequences)
        readers = CanonicalReader(side_a), CanonicalReader(side_b)
        for match in matching.matched:
            join = aligner.rows(readers[0].rows(match.source_a), readers[1].rows(match.source_b))
            got = measure_rows(readers[0].read(match.source_a), readers[1].read(match.source_b), join, "float32")
            assert got.rel_l2 < 1e-7, match.label  # vLLM's residual sum is rounded once more


def test_nothing_of_either_dump_is_dropped_silently(tmp_path):
    with opened(tmp_path / "a", Scenario()) as a, opened(tmp_path / "b", actor("megatron-te")) as b:
        matching = match_tensors(side_a := read_side(a), side_b := read_side(b))
        for side, listed in ((side_a, matching.auxiliary_a), (side_b, matching.auxiliary_b)):
            read = {name for source in side.resolution.sources.values() for name in side.native_labels(source)}
            named = {entry.label for entry in listed}
            assert {f"{module}:{slot}" for module, slot in side.dump.tensors} == read | named
            assert all(entry.reason for entry in listed)


def test_a_fused_norm_is_unavailable_and_its_passed_through_residual_is_never_compared(tmp_path):
    with opened(tmp_path / "a", Scenario()) as a, opened(tmp_path / "b", actor("megatron-te")) as b:
        matching = match_tensors(read_side(a), read_side(b))
        assert not any("layernorm" in match.label for match in matching.matched)
        reasons = {entry.label: (entry.side, entry.reason) for entry in matching.unavailable}
        side, reason = reasons["layers.0.input_layernorm:output.0"]
        assert side == "b" and reason.startswith("norm fused into linear_qkv (TransformerEngine spec), and its input")
        assert "linear_fc1" in reasons["layers.2.post_attention_layernorm:output.0"][1]
        fused = [e for e in matching.auxiliary_b if e.label == "decoder.layers.0.input_layernorm:output.0"]
        assert "TransformerEngine" in fused[0].reason


def test_half_a_layer_output_is_unavailable_rather_than_wrong(tmp_path):
    with (
        opened(tmp_path / "a", Scenario(drop=("layers.1:output.1",))) as a,
        opened(tmp_path / "b", actor()) as b,
    ):
        matching = match_tensors(read_side(a), read_side(b))
        assert "layers.1:output.0" not in {match.label for match in matching.matched}
        entry = next(e for e in matching.unavailable if e.label == "layers.1:output.0")
        assert entry.side == "a" and "residual" in entry.reason


def test_tensors_that_one_side_did_not_store_are_listed_with_the_reason(tmp_path):
    with opened(tmp_path / "a", Scenario()) as a, opened(tmp_path / "b", actor(drop=("linear_proj",))) as b:
        matching = match_tensors(read_side(a), read_side(b))
        assert {e.label for e in matching.only_a} == {f"layers.{i}.self_attn.o_proj:output.0" for i in range(3)}
        assert all("actor (megatron)" in e.reason for e in matching.only_a)


def test_unknown_modules_of_one_engine_are_matched_by_their_own_name(tmp_path):
    scenario = Scenario()
    with opened(tmp_path / "a", scenario) as a, opened(tmp_path / "b", scenario) as b:
        for dump in (a, b):
            for slot in ("output.0", "input.0"):
                dump.tensors["model.layers.1.mlp.router", slot] = dump.tensors["model.layers.1.mlp.down_proj", slot]
        matching = match_tensors(read_side(a), read_side(b))
        labels = [match.label for match in matching.matched]
        assert "layers.1.mlp.router:output.0" in labels and "layers.1.mlp.router:input.0" not in labels


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_every_layout_have_the_same_canonical_sketches(tmp_path, layout):
    model = Tiny(qk_norm=True)
    with opened(tmp_path / "a", Scenario(layout="transformers", model=model)) as a:
        reference = canonical_weights(read_side(a))
    with opened(tmp_path / "b", Scenario(layout=layout, model=model)) as b:
        weights = canonical_weights(read_side(b))
    assert set(weights) == set(reference) == set(make_weights(model))
    for name, weight in weights.items():
        assert weight.shape == reference[name].shape
        # fused weights are summed in the same order per row; products of a larger matrix may use another kernel
        np.testing.assert_allclose(weight.rows, reference[name].rows, rtol=1e-12, atol=1e-12)


def test_a_tied_head_is_the_embedding(tmp_path):
    tied = {"config": Tiny().config() | {"tie_word_embeddings": True}, "path": ""}
    scenario = Scenario(layout="transformers", manifest={"model": tied})
    with opened(tmp_path / "a", scenario) as dump:
        del dump.weights["lm_head.weight"]
        weights = canonical_weights(read_side(dump))
    assert np.array_equal(weights["lm_head.weight"].rows, weights["embed_tokens.weight"].rows)


def test_model_shape_prefers_the_engines_layout_and_derives_what_is_missing():
    manifest = {
        "layout": {"num_layers": 2, "vocab_size": 100},
        "model": {"config": {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99, "num_hidden_layers": 9}},
    }
    shape = ModelShape.of(manifest)
    assert (shape.layers, shape.vocab, shape.head_dim, shape.kv_heads) == (2, 100, 16, 4)
    assert ModelShape.of({}).layers == 0


def test_key_of_splits_at_the_last_colon():
    assert key_of("a:b:output.0") == ("a:b", "output.0")


@pytest.mark.parametrize("leaf", ["lora_A.default", "lora_B.default", "lora_dropout.default", "base_layer"])
@pytest.mark.parametrize("engine", TABLES)
def test_parts_of_an_adapter_are_listed_as_such(engine, leaf):
    label = f"layers.0.self_attn.q_proj.{leaf}:output.0"
    reasons = [reason for regex, reason in TABLES[engine].auxiliary if re.fullmatch(regex, label)]
    assert reasons and "LoRA" in reasons[0]


def test_conditions_of_a_rule_are_facts_with_its_placeholders_filled():
    rule = Rule(("n.{i}:output.0",), ("c.{i}:output.0",), needs=("module m.{i}",), unless=("config.x",))
    both = ["n.0:output.0", "n.1:output.0"]
    assert list(resolve([rule], both, {"module m.1"}).sources) == ["c.1:output.0"]
    blocked = resolve([rule], both, {"module m.1", "config.x"})
    assert not blocked.sources and blocked.spare == {"n.1:output.0": "c.1:output.0"}


def test_stacked_experts_yield_their_parts_one_expert_after_the_other():
    rule = Rule(("x.{i}.w13",), ("x.{i}.{e}.gate", "x.{i}.{e}.up"), "split_experts_gate_up")
    sources = resolve([rule], ["x.4.w13"], experts={"x.4.w13": 2}).sources
    assert {label: source.part for label, source in sources.items()} == {
        "x.4.0.gate": 0,
        "x.4.0.up": 1,
        "x.4.1.gate": 2,
        "x.4.1.up": 3,
    }


def test_the_table_of_an_unknown_engine_is_the_one_that_explains_most():
    megatron = ["decoder.layers.0.mlp.linear_fc1:output.0", "output_layer:output.0"]
    vllm = ["model.layers.0.self_attn.qkv_proj:output.0", "model.layers.0:output.0", "model.layers.0:output.1"]
    plain = ["model.layers.0.self_attn.q_proj:output.0", "model.layers.0:output.0"]
    assert [table_for("module", labels).engine for labels in (megatron, vllm, plain, [])] == [
        "megatron",
        "vllm",
        "transformers",
        "transformers",
    ]
    assert table_for("vllm", megatron).engine == "vllm"
    halves = ["model.layers.0:output.0", "model.layers.0:output.1"]
    assert table_for("module", halves).engine == "vllm", "the sum of both halves is the layer's output"
