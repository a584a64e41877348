"""PrecisionDebugger on real engines: Megatron-core chunks and vLLM, against transformers on the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from capture_tools import by_row, hook_count
from checkpoints import make_checkpoint
from torch import nn

from probe.checkpoint import Checkpoint
from probe.hooks.debugger import PrecisionDebugger
from probe.hooks.engines.vllm_model_runner import find_runner
from probe.store.reader import open_dump

pytestmark = pytest.mark.slow

# fp32 engines against transformers on the same tokens: facts measured 5.5e-6 (vLLM) and 1.1e-5 absolute on a tensor of
# magnitude 14 (Megatron). An overwritten or misplaced tensor is off by more than 0.1.
TOLERANCE = 1e-5
SEQUENCES = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17, 18], [21, 22, 23]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small Qwen2 checkpoint with a head size that vLLM's CPU attention knows."""
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, hidden=128, intermediate=256, head_dim=32, vocab=197)


@pytest.fixture(scope="module")
def reference(checkpoint, tmp_path_factory):
    """A function that dumps sequences on transformers, one by one, under the uids given."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()

    def dump(sequences):
        folder = tmp_path_factory.mktemp("reference") / "d"
        debugger = PrecisionDebugger(enabled=True, dump_path=str(folder))
        for number, tokens in enumerate(sequences):
            debugger.start(model, uids=[f"s{number}"])
            with torch.no_grad():
                model(input_ids=torch.tensor([tokens]), use_cache=False)
            debugger.stop()
        debugger.step()
        return open_dump(folder)

    return dump


def rel_l2(found, expected):
    """Return the relative L2 error over rows that are in both, all of which ``found`` must hold."""
    assert found and set(found) <= set(expected)
    x, y = (np.stack([rows[place].reshape(-1).astype(np.float64) for place in found]) for rows in (found, expected))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


class Wrapper(nn.Module):
    """What Megatron's DDP and Float16Module look like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


MEGATRON_NAMES = {
    "embedding": "model.embed_tokens",
    "decoder.layers.0.self_attention.linear_proj": "model.layers.0.self_attn.o_proj",
    "decoder.layers.1.self_attention.linear_proj": "model.layers.1.self_attn.o_proj",
    "decoder.layers.0.mlp.linear_fc2": "model.layers.0.mlp.down_proj",
    "decoder.layers.0": "model.layers.0",
    "decoder.layers.1": "model.layers.1",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}


@pytest.mark.parametrize("layout", ["padded", "packed", "square"])
def test_a_list_of_megatron_chunks(tmp_path, checkpoint, reference, layout):
    from probe.hooks.runners import megatron_batch
    from probe.hooks.runners.megatron_model import build_model

    sequences = [[n, n + 1, n + 2] for n in (3, 30, 60)] if layout == "square" else SEQUENCES
    model = build_model(Checkpoint(checkpoint), dtype="float32")
    batch = (megatron_batch.packed if layout == "packed" else megatron_batch.padded)(sequences, 1)
    inner = [Wrapper(Wrapper(model))]
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    lengths = None if layout == "packed" else [len(s) for s in sequences]
    with debugger.start(inner, lengths=lengths), torch.no_grad():
        inner[0](
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            packed_seq_params=batch.packed_seq_params,
        )
    assert hook_count(inner[0]) == 0
    expected = reference(sequences)
    with open_dump(tmp_path / "d") as dump:
        assert dump.engine == "megatron"
        assert [s.tokens.tolist() for s in dump.sequences] == sequences
        assert "decoder.layers.0.mlp.linear_fc1.weight" in dump.weights
        for name, canonical in MEGATRON_NAMES.items():
            found, wanted = by_row(dump, name, "output.0"), by_row(expected, canonical, "output.0")
            assert len(found) == sum(map(len, sequences)), name
            vocabulary = next(iter(wanted.values())).shape[-1]
            cut = {place: row.reshape(-1)[:vocabulary] for place, row in found.items()}
            assert rel_l2(cut, wanted) <= TOLERANCE, name


@pytest.fixture(scope="module")
def vllm_folder(checkpoint, tmp_path_factory):
    """The folder of dumps that vllm_debugger.py leaves, and what it reports."""
    folder = tmp_path_factory.mktemp("vllm")
    script = Path(__file__).with_name("vllm_debugger.py")
    ran = subprocess.run([sys.executable, str(script), str(checkpoint), str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder, json.loads((folder / "facts.json").read_text())


VLLM_NAMES = {
    "model.embed_tokens": "model.embed_tokens",
    "model.layers.0.self_attn.o_proj": "model.layers.0.self_attn.o_proj",
    "model.layers.1.self_attn.o_proj": "model.layers.1.self_attn.o_proj",
    "model.layers.0.post_attention_layernorm": "model.layers.0.post_attention_layernorm",
    "model.layers.1.input_layernorm": "model.layers.1.input_layernorm",
    "model.layers.0.mlp.down_proj": "model.layers.0.mlp.down_proj",
    "model.layers.1.mlp.down_proj": "model.layers.1.mlp.down_proj",
    "model.norm": "model.norm",
    "logits_processor": "lm_head",
}


@pytest.mark.parametrize("name", ["llm", "bare"])
def test_vllm_in_the_same_process(vllm_folder, reference, name):
    folder, facts = vllm_folder
    assert facts[name]["hooks"] == 0
    tokens = facts[name]["tokens"]
    expected = reference(tokens)
    with open_dump(folder / name) as dump:
        assert (dump.engine, dump.stage, dump.complete) == ("vllm", "rollout", True)
        order = [
            next(n for n, t in enumerate(tokens) if t[: len(s.tokens)] == s.tokens.tolist()) for s in dump.sequences
        ]
        executed = 0 if name == "bare" else 4  # of 5 generated tokens the last never enters the model
        assert [s.prompt_len for s in dump.sequences] == [len(tokens[n]) - 5 for n in order]
        assert [len(s.tokens) for s in dump.sequences] == [len(tokens[n]) - 5 + executed for n in order]
        uids = {f"{s.uid}": f"s{order[s.index]}" for s in dump.sequences}

        def rows(module, slot):
            return {(uids[uid], position): row for (uid, position), row in by_row(dump, module, slot).items()}

        for module, canonical in VLLM_NAMES.items():
            found = rows(module, "output.0")
            if module != "logits_processor":
                assert len(found) == sum(len(s.tokens) for s in dump.sequences), module
            assert rel_l2(found, by_row(expected, canonical, "output.0")) <= TOLERANCE, module
        for layer in ("model.layers.0", "model.layers.1"):  # vLLM returns the residual beside the MLP's output
            delta, residual = rows(layer, "output.0"), rows(layer, "output.1")
            stream = {place: delta[place] + residual[place] for place in delta}
            assert rel_l2(stream, by_row(expected, layer, "output.0")) <= TOLERANCE, layer


def test_vllm_with_a_cached_prefix(vllm_folder, reference):
    """Rows of the cached block are missing, their ids are not; what ran is what a model without a cache computes."""
    folder, facts = vllm_folder
    tokens, hits = facts["cached"]["tokens"], facts["cached"]["hits"]
    assert hits == [0, 32]
    expected = reference(tokens)
    with open_dump(folder / "cached") as dump:
        assert [s.cached for s in dump.sequences] == hits
        assert [s.tokens.tolist() for s in dump.sequences] == [t[:-1] for t in tokens]
        names = {s.uid: f"s{number}" for number, s in enumerate(dump.sequences)}
        found = {(names[uid], p): row for (uid, p), row in by_row(dump, "model.norm", "output.0").items()}
        assert {p for name, p in found if name == "s1"} == set(range(32, len(tokens[1]) - 1))
        assert rel_l2(found, by_row(expected, "model.norm", "output.0")) <= TOLERANCE


def test_vllm_that_receives_weights_within_a_request(vllm_folder, reference):
    """The response is in two pieces of one trajectory, each with the version of the weights that ran it."""
    folder, facts = vllm_folder
    tokens = facts["synced"]["tokens"]
    expected = by_row(reference([tokens]), "model.norm", "output.0")
    with open_dump(folder / "synced") as dump:
        first, second = dump.sequences
        assert second.uid == f"{first.uid}#1" and second.trajectory == first.trajectory
        assert (first.weight_version, second.weight_version) == (0, 1)
        assert (first.prompt_len, second.prompt_len) == (8, 10)
        assert second.tokens.tolist() == tokens[:-1]
        found = by_row(dump, "model.norm", "output.0")
        assert {p for uid, p in found if uid == first.uid} == set(range(9))
        assert {p for uid, p in found if uid == second.uid} == set(range(9, 12))
        assert rel_l2({("s0", p): row for (_, p), row in found.items()}, expected) <= TOLERANCE


def test_vllm_knows_its_own_sequences(vllm_folder):
    assert vllm_folder[1]["announced"].startswith("vllm knows its sequences by itself")
    assert not (vllm_folder[0] / "no").exists()


def test_what_is_no_vllm_model():
    assert find_runner(nn.Linear(2, 2)) is None and find_runner([1]) is None
