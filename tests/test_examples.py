"""The scripts of docs/examples run as they are: dumped by environment variables, compared, consistent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from probe.compare.run import compare_dumps

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
ON_CPU = """
import runpy, sys
from probe.hooks.runners.megatron_cpu import apply_cpu_support
apply_cpu_support()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""What stands between Megatron-core, which assumes a GPU, and a script of its users."""
STATE = """
import sys, torch
from probe.checkpoint import Checkpoint
from probe.hooks.runners.megatron_model import build_model
model = build_model(Checkpoint(sys.argv[1]), dtype="float32")
torch.save({name: value for name, value in model.state_dict().items() if value is not None}, sys.argv[2])
"""


def run(*words: str | Path, **environment: str) -> str:
    """Run a Python command and return what it printed."""
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env={**env, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_trl_script_is_dumped_and_its_two_passes_agree(demo_model, tmp_path):
    # GIVEN the script of docs/trl.md, with nothing but two variables set
    folder = tmp_path / "dump"
    run(EXAMPLES / "trl_grpo.py", demo_model, tmp_path / "out", DUMP_ON="1", PROBE_DUMP_DIR=str(folder))

    # THEN what generate ran and what the trainer ran are two stages that agree on every row of both
    report = compare_dumps(folder / "rollout", folder / "actor")
    assert report["verdict"] == "consistent", report["summary"]
    assert len(report["layers"]) > 45
    assert {gate["name"]: gate["status"] for gate in report["gates"]}["positions"] == "pass"


def test_training_with_trl_gives_the_same_weights_with_and_without_a_dump(demo_model, tmp_path):
    for name, environment in (("off", {}), ("on", {"DUMP_ON": "1", "PROBE_DUMP_DIR": str(tmp_path / "dump")})):
        run(EXAMPLES / "trl_grpo.py", demo_model, tmp_path / name, **environment)
    trained = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("off", "on")]
    assert trained[0] == trained[1] != (demo_model / "model.safetensors").read_bytes()


def test_plain_vllm_and_megatron_scripts_are_dumped_and_agree(demo_model, tmp_path):
    # GIVEN a vLLM script and a Megatron script that share a file of token ids, and nothing else
    folder, tokens, state = tmp_path / "dump", tmp_path / "rollout.jsonl", tmp_path / "state.pt"
    run("-c", STATE, demo_model, state)
    on = {"DUMP_ON": "1", "PROBE_DUMP_DIR": str(folder)}

    # WHEN each runs under the two variables
    run(EXAMPLES / "rollout_vllm.py", demo_model, tokens, **on)
    run("-c", ON_CPU, EXAMPLES / "score_megatron.py", demo_model, state, tokens, **on)

    # THEN the two stages agree, log-probs too, and both sides' modules fit the checkpoint's weights
    assert len([json.loads(line) for line in tokens.read_text().splitlines()]) == 4
    report = compare_dumps(folder / "rollout", folder / "actor", weights=demo_model)
    assert report["verdict"] == "consistent", report["summary"]
    assert len(report["layers"]) >= 58
    assert report["a"]["engine_version"] and report["b"]["engine_version"]
    assert report["tokens"]["mean_abs_logprob_diff"] < 1e-5  # fp32 rounding: 6e-7 seen
    replayed = [entry[side]["verdict"] for entry in report["replay"]["modules"] for side in "ab" if entry[side]]
    assert set(replayed) == {"fine"}
