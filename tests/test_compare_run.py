"""compare_dumps, whole, on engine-shaped synthetic dumps: no alarm without a fault, and each fault found first."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, prompts, write_dump
from synthetic_model import Tiny, make_weights

from probe.cli.compare import compare as compare_command
from probe.compare.align import RowAligner
from probe.compare.report import model as report_model
from probe.compare.run import Options, compare_dumps, exit_status
from probe.compare.sequences import SequenceJoin, SequencePair
from probe.compare.tokens.explained import unexplained_difference
from probe.errors import CompareError, DumpError
from probe.store.schema import TOKEN, Sequence

DEEP = Tiny(layers=5)


@pytest.fixture
def compare(tmp_path):
    """Write two scenarios and compare them; the report must be valid whatever they hold."""

    def run(a: Scenario, b: Scenario, *, sequences_a: Any = None, sequences_b: Any = None, **options: Any) -> dict:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        paths = write_dump(folder / "a", a, sequences_a), write_dump(folder / "b", b, sequences_b)
        report = compare_dumps(*paths, **options)
        report_model.validate(report)
        json.dumps(report, allow_nan=False)
        return report

    return run


def verdicts(report: dict) -> set[str]:
    return {layer["verdict"] for layer in report["layers"]}


# -- healthy pairs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["megatron", "megatron-te", "transformers"])
def test_the_same_forward_in_another_layout_is_identical(compare, layout):
    report = compare(Scenario(), actor(layout))
    assert report["verdict"] == "consistent" and exit_status(report) == 0
    # the vLLM layout's residual sum can be one fp32 rounding off
    assert all(layer["verdict"] == "identical" or layer["rel_l2"] < 1e-7 for layer in report["layers"])
    assert report["first_divergence"] is None
    assert report["coverage"]["only_a"] == report["coverage"]["only_b"] == []
    assert report["tokens"]["max_abs_logprob_diff"] == 0


def test_bitwise_equal_dumps_are_said_to_be_identical(compare):
    report = compare(actor(), actor())
    assert report["verdict"] == "consistent" and verdicts(report) == {"identical"}
    assert "identical" in report["summary"] and "same bits" in report["summary"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("dtype_a", "dtype_b"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")],
)
@pytest.mark.parametrize("layout", ["megatron", "megatron-te", "transformers"])
def test_healthy_kernels_never_alarm(compare, dtype_a, dtype_b, layout, seed):
    a = Scenario(model=DEEP, dtype=dtype_a, noise=2 * seed + 1, weights_seed=seed)
    b = actor(layout, model=DEEP, dtype=dtype_b, noise=2 * seed + 2, weights_seed=seed)
    report = compare(a, b)
    assert report["verdict"] == "consistent", report["summary"]
    assert not verdicts(report) & {"suspect", "divergent", "missing", "incomparable"}
    weights = next(gate for gate in report["gates"] if gate["name"] == "weights")
    assert weights["status"] == "pass", weights


def test_qwen3_norms_of_queries_and_keys_are_compared(compare):
    qwen3 = Tiny(qk_norm=True)
    report = compare(Scenario(model=qwen3, noise=1), actor(model=qwen3, noise=2))
    assert report["verdict"] == "consistent"
    assert sum("q_norm" in layer["name"] for layer in report["layers"]) == 3


# -- faults -----------------------------------------------------------------------------------------------------------


def scaled(x: np.ndarray) -> np.ndarray:
    return x * 1.03


def one_row(x: np.ndarray) -> np.ndarray:
    x[3:4] *= 1.5
    return x


def dead_columns(x: np.ndarray) -> np.ndarray:
    x.reshape(len(x), -1)[:, :2] = 0
    return x


def swapped_halves(x: np.ndarray) -> np.ndarray:
    return np.roll(x, x.shape[-1] // 2, axis=-1)


def one_nan(x: np.ndarray) -> np.ndarray:
    x.reshape(len(x), -1)[2, 1] = np.nan
    return x


PLACES = (
    "embed_tokens:output.0",
    "layers.0.input_layernorm:output.0",
    "layers.1.self_attn.q_proj:output.0",
    "layers.1.self_attn.v_proj:output.0",
    "layers.2.self_attn.rotary_emb:output.1",
    "layers.2.self_attn.o_proj:input.0",
    "layers.2.self_attn.o_proj:output.0",
    "layers.2.post_attention_layernorm:output.0",
    "layers.3.mlp.up_proj:output.0",
    "layers.3.mlp.down_proj:input.0",
    "layers.3.mlp.down_proj:output.0",
    "layers.4:output.0",
    "norm:output.0",
    "lm_head:output.0",
)


@pytest.mark.parametrize("fault", [scaled, one_row, dead_columns, one_nan])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_is_found_first_where_it_is(compare, place, fault):
    sequences = prompts()
    a = Scenario(model=DEEP, noise=1)
    b = actor(model=DEEP, noise=2, faults={place: fault})
    report = compare(a, b, sequences_a=sequences, sequences_b=sequences)
    assert report["verdict"] == "divergent" and exit_status(report) == 1
    first = report["first_divergence"]
    assert f"{first['name']}:{first['slot']}" == place
    # all sequences are faulty from the same position on, so the first of them is named
    expected = {scaled: 0, one_row: 3, dead_columns: 0, one_nan: 2}[fault]
    lengths = [len(ids) for _, ids, _ in sequences]
    assert first["position"] == expected
    assert first["sequence"] == next(uid for (uid, _, _), n in zip(sequences, lengths) if n - 1 > expected)
    assert first["name"] in report["summary"]


def test_a_scaled_weight_is_named_by_the_gate_and_found_first_by_the_tensors(compare):
    def stale(weights):
        weights["layers.3.self_attn.o_proj.weight"] *= 1.03

    report = compare(Scenario(model=DEEP, noise=1), actor(model=DEEP, noise=2, change_weights=stale))
    assert report["verdict"] == "divergent"
    weights = next(gate for gate in report["gates"] if gate["name"] == "weights")
    assert weights["status"] == "fail" and "scaled: b = 1.03 x a" in weights["detail"]
    assert report["first_divergence"]["name"] == "layers.3.self_attn.o_proj"
    assert "weights gate fails" in report["summary"]


def test_nan_counts_are_in_the_report_and_figures_stay_finite(compare):
    report = compare(Scenario(), actor(faults={"layers.1.mlp.down_proj:output.0": one_nan}))
    layer = next(x for x in report["layers"] if x["name"] == "layers.1.mlp.down_proj" and x["slot"] == "output.0")
    assert (layer["nan_a"], layer["nan_b"], layer["verdict"]) == (0, 4, "divergent")
    assert layer["rel_l2"] == 0.0


def test_swapped_halves_in_bf16_are_found(compare):
    place = "layers.0.self_attn.rotary_emb:output.0"
    a = Scenario(dtype="bfloat16", noise=1)
    report = compare(a, actor(dtype="bfloat16", noise=2, faults={place: swapped_halves}))
    assert report["verdict"] == "divergent"
    assert report["first_divergence"]["name"] == "layers.0.self_attn.rotary_emb"


# -- what was not compared --------------------------------------------------------------------------------------------


def test_prompt_rows_against_a_full_dump_are_consistent_and_say_what_was_not_seen(compare):
    report = compare(Scenario(prompts_only=True, noise=1), actor(noise=2))
    assert report["verdict"] == "consistent"
    assert any("decode" in sentence and "prompt rows only" in sentence for sentence in report["not_compared"])
    assert report["a"]["prompts_only"] and not report["b"]["prompts_only"]


def test_last_generated_tokens_are_listed_as_not_executed(compare):
    report = compare(Scenario(), actor())
    rows = report["coverage"]["rows"]
    assert (rows["a"], rows["b"]) == ({}, {"not_executed": 4})
    assert any("not executed" in sentence for sentence in report["not_compared"])


def test_fused_norms_do_not_lower_the_coverage_and_are_said(compare):
    report = compare(Scenario(), actor("megatron-te"))
    assert report["verdict"] == "consistent"
    assert len(report["coverage"]["unavailable"]) == 6
    assert any("TransformerEngine" in sentence for sentence in report["not_compared"])


def test_too_little_in_common_is_incomparable_with_exit_status_2(compare):
    report = compare(Scenario(), actor(drop=("mlp", "self_attention")))
    assert report["verdict"] == "incomparable" and exit_status(report) == 2
    assert "90%" in report["summary"]
    assert "missing" in verdicts(report)
    missing = [layer for layer in report["layers"] if layer["verdict"] == "missing"]
    assert len(missing) == len(report["coverage"]["only_a"])


def test_tensors_of_other_sizes_are_incomparable_with_the_sizes(compare):
    report = compare(Scenario(), actor("transformers", model=Tiny(ffn=64)))
    layers = {(layer["name"], layer["slot"]): layer for layer in report["layers"]}
    activation = layers["layers.0.mlp.down_proj", "input.0"]
    assert activation["verdict"] == "incomparable" and "48 and 64 features" in activation["reason"]
    assert activation["rel_l2"] is None and activation["a"]["tensors"]
    assert report["verdict"] == "divergent"  # the config gate fails: intermediate_size differs
    assert any("48 and 64" in sentence for sentence in report["not_compared"])


def test_less_can_be_asked_for(compare):
    report = compare(Scenario(), actor(drop=("mlp", "self_attention")), min_coverage=0.1)
    assert report["verdict"] == "consistent"


def test_a_killed_dump_is_compared_and_said_to_be_incomplete(compare):
    report = compare(Scenario(complete=False), actor())
    assert not report["a"]["complete"]
    assert any(sentence.startswith("a is incomplete") for sentence in report["not_compared"])
    assert report["coverage"]["matched"] == 45


def test_tokens_alone_can_be_compared(compare):
    bare = {"drop": ("",), "manifest": {"task": "tokens"}}
    report = compare(Scenario(noise=1, **bare), actor(noise=2, **bare))
    assert report["verdict"] == "consistent"
    assert any("module tensors" in sentence for sentence in report["not_compared"])
    assert report["tokens"]["compared"] > 0


# -- nothing in common ------------------------------------------------------------------------------------------------


def test_dumps_of_different_prompts_are_refused_in_one_sentence(compare):
    with pytest.raises(CompareError, match="no sequence of"):
        compare(Scenario(), actor(), sequences_b=prompts(seed=99))


def test_dumps_of_different_models_are_refused_in_one_sentence(compare):
    with pytest.raises(CompareError, match=r"hidden size is 32 .* and 64"):
        compare(Scenario(), actor(model=Tiny(hidden=64, heads=8)))
    with pytest.raises(CompareError, match="number of layers"):
        compare(Scenario(), actor(model=Tiny(layers=2)))


def test_dumps_without_anything_to_compare_are_refused(compare):
    silent = {"engine_logprobs": False, "drop": ("",)}
    with pytest.raises(CompareError, match="have no tensor"):
        compare(Scenario(**silent), actor(drop=("",)), sequences_a=prompts_only(), sequences_b=prompts_only())


def prompts_only() -> list[tuple[str, np.ndarray, int]]:
    return [(uid, ids[:prompt_len], prompt_len) for uid, ids, prompt_len in prompts()]


def test_a_path_without_a_dump_is_a_dump_error(tmp_path):
    with pytest.raises(DumpError, match="no dump"):
        compare_dumps(tmp_path / "nowhere", tmp_path / "nowhere")


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_token_figures_positions_and_strips(compare):
    sequences = prompts()
    b = actor(noise=2, faults={"lm_head:output.0": lambda x: x * 1.1})
    report = compare(Scenario(noise=1), b, sequences_a=sequences, sequences_b=sequences)
    tokens = report["tokens"]
    responses = [len(ids) - prompt_len for _, ids, prompt_len in sequences]
    assert tokens["compared"] == sum(responses)
    assert (tokens["source_a"], tokens["source_b"]) == ("engine", "recomputed")
    assert [entry["count"] for entry in tokens["by_position"]] == [
        sum(r > p for r in responses) for p in range(max(responses))
    ]
    worst = tokens["worst"][0]
    assert abs(worst["diff"]) == tokens["max_abs_logprob_diff"]
    assert worst["diff"] == pytest.approx(worst["logprob_b"] - worst["logprob_a"])
    for (uid, ids, prompt_len), entry in zip(sequences, tokens["sequences"]):
        assert entry["sequence"] == uid and entry["length"] == len(ids)
        assert [cell["token"] for cell in entry["strip"]] == ids.tolist()
        assert [cell["response"] for cell in entry["strip"]] == [p >= prompt_len for p in range(len(ids))]
        assert all((cell["diff"] is not None) == cell["response"] for cell in entry["strip"])


def test_log_probs_far_apart_are_suspect_even_without_a_tensor(compare):
    bare = {"drop": ("",), "manifest": {"task": "tokens"}}
    sharper = actor(noise=2, faults={"lm_head:output.0": lambda x: 3 * x}, **bare)
    report = compare(Scenario(noise=1, **bare), sharper)
    assert report["tokens"]["mean_abs_logprob_diff"] > 0.1
    assert report["verdict"] == "suspect" and exit_status(report) == 1


@pytest.mark.parametrize(
    ("own_gap", "logits_agree", "expected"),
    [(0.0, True, 0.0), (0.5, True, 0.5), (0.0, False, 0.3), (0.5, False, 0.3)],
)
def test_log_probs_that_agreeing_logits_explain_raise_no_suspicion(own_gap, logits_agree, expected):
    """GIVEN log-probs 0.3 nats apart, THEN only what the logits do not account for is left."""
    tokens = np.zeros(5, TOKEN)
    tokens["position"], tokens["response"] = np.arange(5), np.arange(5) > 0
    tokens["logprob"], tokens["logprob_recomputed"] = -1.0, -1.0 - own_gap
    other = tokens.copy()
    other["logprob"], other["logprob_recomputed"] = -1.3, -1.3
    a, b = (SimpleNamespace(manifest={}, tokens=table) for table in (tokens, other))
    sequences = [Sequence(0, "s", prompt_len=1, length=5, tokens=np.zeros(5, np.int64))]
    aligner = RowAligner(SequenceJoin([SequencePair(0, 0, 5, "s")]), sequences, sequences)
    join = SimpleNamespace(pair=np.zeros(5, np.int64), position=np.arange(5))
    logits = SimpleNamespace(join=join, metrics=SimpleNamespace(max_abs=0.2)) if logits_agree else None
    found = unexplained_difference(a, b, aligner, logits)
    assert found.mean == pytest.approx(expected)
    assert found.worst == pytest.approx(expected if logits_agree else 0.0)
    tokens["logprob"] = tokens["logprob_recomputed"] = np.nan
    assert unexplained_difference(a, b, aligner, logits).mean is None


def test_text_is_decoded_through_the_checkpoints_tokenizer(compare, tmp_path):
    import tokenizers

    words = {f"w{n}": n for n in range(50)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    manifest = {"model": {"path": str(checkpoint), "config": Tiny().config()}}
    report = compare(Scenario(manifest=manifest), actor(manifest=manifest))
    assert report["tokens"]["text"] is True
    cell = report["tokens"]["sequences"][0]["strip"][0]
    assert cell["text"] == f"w{cell['token']}"
    silent = compare(Scenario(manifest=manifest), actor(manifest=manifest), text=False)
    assert silent["tokens"]["text"] is False
    assert silent["tokens"]["sequences"][0]["strip"][0]["text"] is None


# -- the rest of the report -------------------------------------------------------------------------------------------


def test_blocks_of_any_size_give_the_same_report(compare):
    whole = compare(Scenario(noise=1), actor(noise=2))
    small = compare(Scenario(noise=1, block_bytes=256), actor(noise=2, block_bytes=64))
    assert whole["layers"] and whole["layers"] == small["layers"]


def test_observer_hears_of_every_tensor(compare):
    heard: list[tuple[str, int, int]] = []
    report = compare(Scenario(), actor(), observer=lambda *step: heard.append(step))
    assert [done for _, done, _ in heard] == list(range(report["coverage"]["matched"]))


def test_next_commands_show_the_first_divergence_on_both_sides(compare):
    place = "layers.1.mlp.down_proj:output.0"
    report = compare(Scenario(noise=1), actor(noise=2, faults={place: scaled}))
    show_a, show_b, again = report["next_commands"]
    assert show_a.startswith("probe show ") and show_a.endswith(" model.layers.1.mlp.down_proj")
    assert show_b.endswith(" decoder.layers.1.mlp.linear_fc2")
    assert again.startswith("probe compare ")


def test_layers_name_their_native_tensors(compare):
    report = compare(Scenario(), actor())
    layers = {(layer["name"], layer["slot"]): layer for layer in report["layers"]}
    total = layers["layers.0", "output.0"]
    assert total["a"]["tensors"] == ["model.layers.0:output.0", "model.layers.0:output.1"]
    assert total["b"]["tensors"] == ["decoder.layers.0:output.0"]
    assert [layer["order"] for layer in report["layers"]] == list(range(len(report["layers"])))


def test_compare_never_imports_torch(tmp_path):
    paths = write_dump(tmp_path / "a", Scenario()), write_dump(tmp_path / "b", actor())
    script = (
        "import sys; from probe.compare.run import compare_dumps; "
        "assert compare_dumps(*sys.argv[1:])['verdict'] == 'consistent'; "
        "print(sorted({'torch', 'click', 'rich', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script, *map(str, paths)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_synthetic_weights_differ_by_seed():
    one, other = make_weights(Tiny(), 0), make_weights(Tiny(), 1)
    assert not np.array_equal(one["norm.weight"], other["norm.weight"])


def test_the_repeated_command_carries_every_option_that_decides():
    values = {"mapping": "my map.yaml", "floor": "f", "golden": "g h", "weights": "w", "min_coverage": 0.25}
    values["ray"] = "auto"
    chosen = Options(**values, across_versions=True, replay=False, text=False, jobs=3)
    context = compare_command.make_context("compare", ["a", "b", *shlex.split(chosen.words())])
    parsed = {name: str(value) if isinstance(value, Path) else value for name, value in context.params.items()}
    given = {**parsed, "replay": not parsed["no_replay"]}
    free = {"text", "jobs"}  # how it is shown, and how fast
    for field in dataclasses.fields(Options):
        if field.name not in free:
            assert given[field.name] == getattr(chosen, field.name) != field.default, field.name
    assert Options().words() == ""
