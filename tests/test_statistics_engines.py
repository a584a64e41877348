"""Statistics of rows in real engines and jobs: vLLM, Megatron-core on one and two ranks, transformers, a plain job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from activation_tools import clean_environment, python
from checkpoints import make_checkpoint

from probe.compare.run import compare_dumps
from probe.store.reader import open_dump
from probe.store.statistics import COUNT, INF, LARGEST, NAN, NORM, SMALLEST, merged

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PROMPTS = [[5, 9, 33, 101, 7, 60], [150, 2, 2, 88, 61, 30, 12, 190, 4, 3], [17, 42, 8]]
MODELS: dict[str, dict[str, Any]] = {"qwen2": {}, "qwen2_moe": {}}
SIZES: dict[str, Any] = {"layers": 3, "hidden": 128, "intermediate": 160}


def dump(*words: str | Path, cwd: Path) -> Path:
    """Run ``probe dump --task statistics`` in a process of its own, as vLLM needs."""
    command = [sys.executable, "-m", "probe", "-q", "dump", "--task", "statistics", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, env=clean_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return Path(words[-1])


@pytest.fixture(scope="module", params=MODELS)
def engines(request, tmp_path_factory) -> dict[str, Path]:
    """A bf16 vLLM rollout, and what Megatron-core and transformers recompute of it in fp32."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder / "model", request.param, **SIZES, **MODELS[request.param])
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": ids}) for ids in PROMPTS))
    given = ("--prompts", prompts, "--max-tokens", "6", "--ignore-eos", "--dtype", "bfloat16")
    rollout = dump("--stage", "rollout", "--model", model, *given, "-o", folder / "vllm", cwd=folder)
    again = ("--stage", "actor", "--from", rollout)
    found = {"vllm": rollout, "model": model}
    for engine in ("transformers", "megatron"):
        found[engine] = dump(*again, "--engine", engine, "-o", folder / engine, cwd=folder)
    return found


@pytest.mark.parametrize(
    "pair", [("vllm", "transformers"), ("vllm", "megatron"), ("transformers", "megatron")], ids=str
)
def test_healthy_engines_agree(engines, pair):
    report = compare_dumps(*(engines[name] for name in pair))
    assert report["verdict"] == "consistent", report["summary"]
    assert {layer["verdict"] for layer in report["layers"]} <= {"consistent", "identical"}
    names = {layer["name"] for layer in report["layers"]}
    fused = {f"layers.{i}.self_attn.q_proj+k_proj+v_proj" for i in range(3)}
    assert names >= fused | {f"layers.{i}" for i in range(3)}  # vLLM's sum from the norm behind
    assert report["coverage"]["shares"]["tensors"] == 1.0


def test_a_fault_is_found_against_vllm(engines, tmp_path):
    """GIVEN an actor whose weight is scaled, WHEN compared with vLLM by statistics, THEN its module comes first."""
    from safetensors.numpy import load_file, save_file

    model = tmp_path / "model"
    model.mkdir()
    for path in engines["model"].iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] *= 1.25
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = ("--stage", "actor", "--from", engines["vllm"], "--engine", "transformers", "--model", model)
    report = compare_dumps(engines["vllm"], dump(*words, "-o", tmp_path / "actor", cwd=tmp_path))
    assert report["verdict"] == "divergent"
    assert report["first_divergence"]["name"] == "layers.1.self_attn.o_proj"


def test_the_ranks_of_megatron_merge_to_the_statistics_of_one(engines, tmp_path):
    """fp32 products added up over two ranks: 2e-5 of a row's norm, as in test_megatron_parallel."""
    words = ("--stage", "actor", "--from", engines["vllm"], "--engine", "megatron", "--tp", "2", "--sp")
    split = dump(*words, "-o", tmp_path / "tp2", cwd=tmp_path)
    shared = 0
    with open_dump(engines["megatron"]) as one, open_dump(split) as many:
        for key, info in one.tensors.items():
            other = many.tensors.get(key)
            if not (info.reduced and info.has_rows and other and other.reduced and other.rows == info.rows):
                continue
            if other.shard == "partial":
                continue
            left, right = (merged(side.read_statistics(*key)) for side in (one, many))
            order = [np.lexsort([side.rows(*key)[name] for name in ("position", "sequence")]) for side in (one, many)]
            if len(left) != len(right) or not np.array_equal(left[:, COUNT], right[:, COUNT]):
                continue  # padding of the vocabulary, and rows of experts
            left, right = left[order[0]], right[order[1]]
            shared += other.ranks > 1 and other.shard == "columns"
            assert np.array_equal(left[:, [NAN, INF]], right[:, [NAN, INF]])
            for column in (NORM, LARGEST, SMALLEST):
                assert (np.abs(left[:, column] - right[:, column]) <= 2e-5 * left[:, NORM]).all(), key
    assert shared >= 12  # q, k and v fused, and what lies between the two linears of MLP and attention
    report = compare_dumps(engines["megatron"], split)
    assert report["verdict"] == "consistent", report["summary"]


def test_a_job_records_statistics_of_both_its_stages(tmp_path):
    environ = clean_environment(DUMP_ON="1", PROBE_TASK="statistics", PROBE_DUMP_DIR=str(tmp_path / "d"))
    plain = python(HERE / "activation_job.py", "plain", cwd=tmp_path, environ=clean_environment())
    assert python(HERE / "activation_job.py", "plain", cwd=tmp_path, environ=environ) == plain
    for stage in ("rollout", "actor"):
        with open_dump(tmp_path / "d" / stage) as found:
            assert found.tasks == {"statistics"} and found.manifest["budget"]["rows"] == 256
            assert found.tensors["model.layers.1.mlp", "output.0"].reduced
            assert len(found.tokens) and np.isfinite(found.tokens["logprob_recomputed"]).any()
    report = compare_dumps(tmp_path / "d")
    assert report["verdict"] == "consistent", report["summary"]
    assert sum(layer["bound"] for layer in report["layers"]) > 20
