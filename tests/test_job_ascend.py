"""vllm-ascend's ``dump_config`` with our PrecisionDebugger: its calls, in its order, on a real vLLM worker."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from activation_tools import clean_environment, python
from capture_tools import by_row
from checkpoints import make_checkpoint

from probe import open_dump
from probe.hooks.debugger import PrecisionDebugger

pytestmark = pytest.mark.slow

CALLS = Path(__file__).with_name("ascend_calls.py")
TOLERANCE = 1e-5
"""fp32 vLLM against transformers: as in test_debugger_engines."""
NAMES = {
    "model.embed_tokens": "model.embed_tokens",
    "model.layers.0.self_attn.o_proj": "model.layers.0.self_attn.o_proj",
    "model.layers.1.mlp.down_proj": "model.layers.1.mlp.down_proj",
    "model.norm": "model.norm",
    "logits_processor": "lm_head",
}
GUIDE = {
    "task": "tensor",
    "dump_path": "saved",
    "rank": [],
    "step": [],
    "level": "L0",
    "async_dump": False,
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
}
"""The eager example of vllm-ascend's msprobe guide, with the task and level that hold module tensors."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, hidden=128, intermediate=256, head_dim=32, vocab=197)


def generated(folder: Path, version: str, checkpoint: Path, **config: object) -> list[list[int]]:
    """Run the calls of a version in ``folder`` and return each prompt with its response."""
    (folder / "config.json").write_text(json.dumps(GUIDE | config))
    environ = clean_environment(PROBE_AS_MSPROBE="1", OMP_NUM_THREADS="1")
    lines = python(CALLS, version, checkpoint, "config.json", cwd=folder, environ=environ).splitlines()
    return json.loads(next(line for line in lines if line.startswith("RETURNED")).partition(" ")[2])


@pytest.mark.parametrize("version", ["0.23.0", "main"])
def test_every_pass_of_a_runner_is_one_dump(tmp_path, checkpoint, version):
    """GIVEN vllm-ascend's start, stop and step in each pass, WHEN requests run, THEN one dump holds all their rows

    under the names and with the values of the same sequences on transformers.
    """
    sequences = generated(tmp_path, version, checkpoint)
    with open_dump(tmp_path / "saved" / "rollout") as dump:
        assert dump.complete and dump.engine == "vllm"
        assert sorted(s.tokens.tolist() for s in dump.sequences) == sorted(s[:-1] for s in sequences)
        of = {tuple(s.tokens.tolist()): s.uid for s in dump.sequences}
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        for tokens in sequences:
            expected = reference(tmp_path / "reference", model, tokens)
            for name, canonical in NAMES.items():
                rows = {p: row for (s, p), row in by_row(dump, name, "output.0").items() if s == of[tuple(tokens[:-1])]}
                wanted = {p: row for (_, p), row in by_row(expected, canonical, "output.0").items()}
                ran = range(len(tokens) - 1)
                assert set(rows) == (set(ran[len(tokens) - 6 :]) if name == "logits_processor" else set(ran)), name
                x, y = (np.stack([side[p].reshape(-1) for p in rows]).astype(np.float64) for side in (rows, wanted))
                assert np.linalg.norm(x - y) <= TOLERANCE * np.linalg.norm(y), name


def reference(folder: Path, model: torch.nn.Module, tokens: list[int]):
    """Return the dump of one sequence on transformers."""
    debugger = PrecisionDebugger(enabled=True, dump_path=str(folder / "-".join(map(str, tokens))))
    with debugger.start(model), torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return open_dump(folder / "-".join(map(str, tokens)))


def test_a_step_of_its_configuration_is_a_pass(tmp_path, checkpoint):
    """GIVEN ``step: [1]``, WHEN requests run, THEN the dump holds the first decode pass: one row of each request."""
    sequences = generated(tmp_path, "main", checkpoint, step=[1])
    with open_dump(tmp_path / "saved" / "rollout", 1) as dump:
        rows = by_row(dump, "model.norm", "output.0")
        prompts = {len(tokens) - 5 for tokens in sequences}
        assert len(rows) == len(sequences) and {position for _, position in rows} == prompts


def test_graph_mode_is_told_what_to_do(tmp_path):
    """GIVEN vLLM with graphs, WHEN vllm-ascend asks for msProbe's dumper of graphs, THEN the error says what to set."""
    code = dedent("""
        import probe.hooks.plugin
        try:
            from msprobe.pytorch import AclGraphDumper
        except ImportError as error:
            print(error)
    """)
    told = python("-c", code, cwd=tmp_path, environ=clean_environment(PROBE_AS_MSPROBE="1"))
    assert "enforce_eager=True" in told
