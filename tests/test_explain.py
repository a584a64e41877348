"""``probe compare --explain NAME``: how a pair came about, or why a tensor has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_dumps import Scenario, actor, write_dump

from probe.cli.main import run
from probe.compare.explain import OPERATION_WORDS, explain, in_words
from probe.compare.merge import OPERATIONS
from probe.errors import UsageError


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dumps")
    return write_dump(folder / "a", Scenario()), write_dump(folder / "b", actor("megatron-te"))


def one(dumps, name, **options):
    entries = explain(*dumps, name, **options)["entries"]
    assert len(entries) == 1, entries
    return entries[0]


def test_every_operation_has_words():
    assert set(OPERATIONS) == set(OPERATION_WORDS)


@pytest.mark.parametrize("name", ["layers.0.self_attn.k_proj", "layers.0.self_attn.k_proj:output.0"])
def test_a_canonical_name_is_traced_to_both_sides(dumps, name):
    entry = one(dumps, name)
    assert entry["status"] == "compared" and entry["name"] == "layers.0.self_attn.k_proj:output.0"
    assert entry["a"]["tensors"] == ["model.layers.0.self_attn.qkv_proj:output.0"]
    assert entry["a"]["operation"] == "split_qkv" and entry["a"]["part"] == 1
    assert entry["b"]["operation"] == "split_qkv_groups" and entry["b"]["rule"].startswith("megatron table: ")
    assert entry["place"]["operations_before"] == 2 and 0 < entry["place"]["floor"] < 1e-5
    assert entry["rows"]["joined"] > 0 and entry["rows"]["b"], "the last generated tokens ran in b only"


def test_a_native_name_gives_everything_that_is_made_of_it(dumps):
    entries = explain(*dumps, "decoder.layers.1.self_attention.linear_qkv:output.0")["entries"]
    assert [entry["name"] for entry in entries] == [f"layers.1.self_attn.{n}_proj:output.0" for n in "qkv"]


def test_a_tensor_that_a_spec_rules_out_says_so(dumps):
    entry = one(dumps, "layers.0.input_layernorm")
    assert entry["status"] == "unavailable" and entry["side"] == "b"
    assert entry["reason"].startswith("norm fused into linear_qkv")


def test_a_tensor_outside_the_tables_says_why(dumps):
    entry = one(dumps, "model.layers.0.post_attention_layernorm:output.1")
    assert entry["status"] == "not compared" and entry["reason"] == "residual: compared as a layer's output"


def test_a_tensor_of_one_side_says_so(tmp_path, dumps):
    b = write_dump(tmp_path / "b", actor(drop=("linear_proj",)))
    entry = one((dumps[0], b), "layers.0.self_attn.o_proj:output.0")
    assert entry["status"] == "only a" and "stored nothing that gives it" in entry["reason"]


def test_a_mapping_is_named_as_the_rule(tmp_path, dumps):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"layers.{i}.mlp.down_proj": "decoder.layers.{i}.mlp.linear_fc2"}))
    assert one(dumps, "layers.0.mlp.down_proj:output.0", mapping=path)["b"]["rule"].startswith(str(path))


def test_an_unknown_name_is_refused_with_the_nearest(dumps):
    with pytest.raises(UsageError, match=r"did you mean layers\.0\.mlp\.down_proj"):
        explain(*dumps, "layers.0.mlp.dwn_proj")


def test_words_hold_the_same_facts(dumps):
    text = "\n".join(in_words(explain(*dumps, "layers.0.self_attn.k_proj")))
    for fact in (
        "model.layers.0.self_attn.qkv_proj:output.0",
        "de-interleaved",
        "joined by",
        "noise floor",
        "only in b",
    ):
        assert fact in text


def test_the_command_prints_words_or_json_and_exits_0_or_2(dumps, capsys):
    command = ["compare", *map(str, dumps), "--explain"]
    assert run([*command, "layers.0.mlp.gate_proj"]) == 0
    assert "merged: one half of [gate | up]" in capsys.readouterr().out
    assert run([*command, "layers.0.mlp.gate_proj", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["status"] == "compared"
    for name in ("layers.0.mlp.gate_prj", "gate_proj"):
        assert run([*command, name]) == 2
        assert "did you mean layers.0.mlp.gate_proj" in capsys.readouterr().err
    assert run([*command, ""]) == 2
    assert "the name to explain is empty" in capsys.readouterr().err
