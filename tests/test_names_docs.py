"""docs/names.md: its worked example runs, and its lists are the code's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import probe.compare.names as names
from probe import PrecisionDebugger
from probe.compare.match import match_tensors
from probe.compare.merge import OPERATIONS, CanonicalReader
from probe.compare.names.canonical import LAYER_TENSORS
from probe.compare.side import read_side
from probe.store.reader import open_dump

DOC = (Path(__file__).parent.parent / "docs" / "names.md").read_text()
HEADS, DIM = 4, 8


@pytest.fixture
def example() -> dict[str, object]:
    code = re.search(r"```python\n(.*?)```", DOC, re.S)
    assert code is not None
    space: dict[str, object] = {}
    exec(code[1], space)
    return space


def test_the_worked_example_names_a_real_gpt_neox(tmp_path, monkeypatch, example):
    sizes = {"hidden_size": HEADS * DIM, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 64}
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=50, max_position_embeddings=32, **sizes)).eval()
    with torch.no_grad(), PrecisionDebugger(dump_path=tmp_path, enabled=True).start(model):
        model(torch.arange(7)[None], use_cache=False)
    table = names.TABLES["transformers"]
    rules = (*example["NEOX_TRANSFORMERS"], *table.tensors)
    added = replace(table, tensors=rules, prefixes=(example["PREFIX"], *table.prefixes))
    monkeypatch.setitem(names.TABLES, "transformers", added)
    with open_dump(tmp_path) as dump:
        side = read_side(dump)
        labels = {match.label for match in match_tensors(side, side).matched if match.proposal is None}
        kept = (*("input_layernorm", "post_attention_layernorm", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"),)
        wanted = {f"layers.1.{name}:output.0" for name in (*kept, *(f"self_attn.{n}_proj" for n in "qkv"))}
        assert wanted | {"embed_tokens:output.0", "norm:output.0", "lm_head:output.0", "layers.0:output.0"} <= labels
        fused = dump.read("gpt_neox.layers.1.attention.query_key_value", "output.0").reshape(7, HEADS, 3, DIM)
        for part, name in enumerate("qkv"):
            source = side.resolution.sources[f"layers.1.self_attn.{name}_proj:output.0"]
            np.testing.assert_array_equal(CanonicalReader(side).read(source), fused[:, :, part].reshape(7, -1))


def test_the_rules_of_the_example_name_known_operations(example):
    for rule in (*example["NEOX_TRANSFORMERS"], *example["NEOX_VLLM"]):
        assert rule.operation in OPERATIONS


def test_every_canonical_module_is_listed():
    for label, _ in LAYER_TENSORS:
        module, _, slot = label.rpartition(":")
        leaf = module.rpartition(".")[2] if "." in module else module
        assert f"`{leaf}" in DOC or f".{leaf}" in DOC, label
        assert slot == "output.0" or slot in DOC, label


def test_every_operation_that_a_map_may_ask_for_is_listed():
    derived = {"rms_norm", "route", "chosen_experts", "chosen_weights"}  # these need more than one kind of native
    for operation in set(OPERATIONS) - derived:
        assert f"`{operation}`" in DOC, operation


def test_the_mapping_example_is_valid_yaml(tmp_path):
    from probe.compare.mapping import load_map

    text = re.search(r"```yaml\n(.*?)```", DOC, re.S)
    assert text is not None
    path = tmp_path / "map.yaml"
    path.write_text(text[1])
    pairs = load_map(path).pairs
    assert len(pairs) == 4 and pairs[2].operations[1] == "split_qkv" and pairs[3].operations[0] == "sum"


def test_a_real_phi_3_is_compared_through_the_documented_map(tmp_path):
    from checkpoints import make_checkpoint
    from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

    from probe.compare.run import compare_dumps

    llama = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path / "llama", "llama")).eval()
    config = {k: v for k, v in llama.config.to_dict().items() if k not in ("architectures", "model_type")}
    phi = Phi3ForCausalLM(Phi3Config(**{**config, "pad_token_id": 0})).eval()
    state = llama.state_dict()
    for name in list(state):
        if name.endswith(("q_proj.weight", "gate_proj.weight")):
            group = ("q", "k", "v") if "q_proj" in name else ("gate", "up")
            kind = group[0]
            fused = name.replace(f"{kind}_proj", "qkv_proj" if kind == "q" else "gate_up_proj")
            state[fused] = torch.cat([state.pop(name.replace(f"{kind}_proj", f"{part}_proj")) for part in group])
    phi.load_state_dict(state)
    for folder, model, stage in (("a", llama, "rollout"), ("b", phi, "actor")):
        with torch.no_grad(), PrecisionDebugger(dump_path=tmp_path / folder, stage=stage, enabled=True).start(model):
            model(torch.arange(7)[None], use_cache=False)
    yaml = re.search(r"(layers\.\{i\}\.self_attn\.q_proj, .*?operation: split_qkv\n)", DOC, re.S)
    assert yaml is not None
    both = ", ".join(f"layers.{{i}}.mlp.{part}_proj" for part in ("gate", "up"))
    more = f"{both}:\n  b: model.layers.{{i}}.mlp.gate_up_proj\n  operation: split_gate_up\n"
    (tmp_path / "map.yaml").write_text(yaml[1] + more)
    without = compare_dumps(tmp_path / "a", tmp_path / "b", min_coverage=0)
    assert len(without["coverage"]["only_a"]) == 2 * 5
    report = compare_dumps(tmp_path / "a", tmp_path / "b", mapping=tmp_path / "map.yaml")
    assert not report["coverage"]["only_a"] and not report["coverage"]["only_b"]
    assert {layer["verdict"] for layer in report["layers"]} <= {"identical", "consistent"}
