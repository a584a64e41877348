"""Real Megatron-core in several processes, one test per way of splitting the model, against transformers in fp32."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from megatron_debugger import SEQUENCES

from probe.compare.run import compare_dumps
from probe.hooks.runners.job import DumpJob, Parallel
from probe.hooks.runners.run import run_dump
from probe.store.reader import open_dump

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PROMPTS = [[5, 9, 33, 101, 7, 60], [150, 2, 2, 88, 61, 30, 12, 190, 4, 3], [17, 42, 8], [9, 8, 7, 6, 5, 4, 3], [77]]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "tied": {"family": "qwen3", "tied": True},
    "llama": {"family": "llama"},
    "mixtral": {"family": "mixtral"},
}
# fp32, and 4 layers: TP adds up the same products in another order, some 1e-6 of the values (seen: 1e-6 relative L2,
# 3e-6 in log-probs that reach 10). A wrong slice, row or order is off by the values themselves.
LOGPROBS, REL_L2 = 1e-5, 2e-5


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Any:
    """Return a function that gives a checkpoint, a rollout of it and transformers' dump of the same tokens."""
    made: dict[str, tuple[Path, Path]] = {}
    folder = tmp_path_factory.mktemp("references")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": ids}) for ids in PROMPTS))

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            model = make_checkpoint(folder / name, layers=4, **CHECKPOINTS[name])
            job = DumpJob("rollout", "transformers", model, folder / f"{name}-rollout", prompts=prompts, device="cpu")
            job.sampling.max_tokens = 4
            rollout = run_dump(job)
            again = replace(job, stage="actor", prompts=None, source=rollout, output=folder / f"{name}-actor")
            made[name] = rollout, run_dump(again)
        return made[name]

    return of


CASES = {
    "tp2": ("llama", {"tp": 2}, "padded"),
    "tp2 sp": ("tied", {"tp": 2, "sp": True}, "padded"),
    "tp2 sp packed": ("qwen2", {"tp": 2, "sp": True}, "packed"),
    "tp4, two key-value heads": ("qwen2", {"tp": 4}, "padded"),
    "pp2": ("tied", {"pp": 2}, "padded"),
    "pp2 vpp2": ("llama", {"pp": 2, "vpp": 2}, "packed"),
    "cp2 packed": ("qwen2", {"cp": 2}, "packed"),
    "cp2 padded": ("llama", {"cp": 2}, "padded"),
    "dp2": ("qwen2", {"dp": 2}, "padded"),
    "ep2": ("mixtral", {"ep": 2}, "padded"),
    "tp2 pp2": ("tied", {"tp": 2, "pp": 2}, "padded"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tensors_of_all_ranks_are_those_of_one_process(references, tmp_path, case):
    name, sizes, layout = CASES[case]
    rollout, reference = references(name)
    model = Path(open_dump(rollout).manifest["model"]["path"])
    job = DumpJob("actor", "megatron", model, tmp_path / "actor", source=rollout, device="cpu", layout=layout)
    job.parallel, job.micro_batch_size = Parallel(**sizes), 2
    dump = run_dump(job)
    check_files(dump, replace(job.parallel, dp=max(job.parallel.dp, job.parallel.ep)))
    with open_dump(reference) as one, open_dump(dump) as many:
        assert [s.tokens.tolist() for s in one.sequences] == [s.tokens.tolist() for s in many.sequences]
        scored = one.tokens["position"] > 0
        for column in ("logprob", "logprob_recomputed"):
            assert np.abs(one.tokens["logprob"] - many.tokens[column])[scored].max() <= LOGPROBS, column
        tokens = len(one.tokens)
    check_report(compare_dumps(reference, dump), tokens)


def check_files(dump: Path, parallel: Parallel) -> None:
    """Check that each rank has a file that says which it is, and that the driver is no rank."""
    files = {file.stem: file for file in (dump / "actor" / "step0").iterdir()}
    assert sorted(files) == ["driver", *(f"rank{rank}" for rank in range(parallel.world))]
    found = set()
    for stem, file in files.items():
        manifest = json.loads(read_manifest(file))
        assert manifest["topology"] == parallel.sizes() and manifest["world_size"] == parallel.world
        if stem == "driver":
            assert not manifest.get("coordinates")
        else:
            found.add(tuple(manifest["coordinates"].values()))
    assert len(found) == parallel.world


def read_manifest(file: Path) -> str:
    import h5py

    with h5py.File(file) as opened:
        text = opened.attrs["manifest"] if "manifest" in opened.attrs else opened["manifest"][()]
    return text if isinstance(text, str) else text.decode()


def check_report(report: dict[str, Any], tokens: int) -> None:
    """Check that every canonical tensor agrees on every row."""
    assert report["verdict"] == "consistent", report["summary"]
    assert not [gate for gate in report["gates"] if gate["status"] == "fail"]
    coverage = report["coverage"]
    assert (coverage["only_a"], coverage["only_b"]) == ([], [])
    assert {layer["rows"] for layer in report["layers"]} == {tokens}
    assert max(layer["rel_l2"] for layer in report["layers"] if layer["rel_l2"] is not None) <= REL_L2


@pytest.mark.parametrize("sizes", [{"pp": 2, "vpp": 2}, {"cp": 2, "tp": 2, "sp": True}], ids=str)
def test_a_users_own_parallel_script(references, tmp_path, sizes):
    """Ids on the first stage only, shares of every sequence on context-parallel ranks, and nothing announced."""
    rollout, _ = references("qwen2")
    model = Path(open_dump(rollout).manifest["model"]["path"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": ids}) for ids in SEQUENCES))
    job = DumpJob("rollout", "transformers", model, tmp_path / "one", prompts=prompts, device="cpu")
    job.sampling.max_tokens = 1
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")
    words = (str(Parallel(**sizes).world), "megatron_debugger.py", model, tmp_path / "dump", json.dumps(sizes))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, *torchrun, *map(str, words)]
    made = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    with open_dump(tmp_path / "dump") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == SEQUENCES
        assert {key: dump.manifest["topology"][key] for key in sizes} == sizes
    report = compare_dumps(run_dump(job), tmp_path / "dump")
    assert not [gate for gate in report["gates"] if gate["status"] == "fail"], report["summary"]
    assert (report["coverage"]["only_a"], report["coverage"]["only_b"]) == ([], [])
    rows = {(layer["name"] == "lm_head", layer["rows"]) for layer in report["layers"]}
    assert rows == {(False, sum(map(len, SEQUENCES))), (True, len(SEQUENCES))}  # a rollout's head sees the last rows
    assert max(layer["rel_l2"] for layer in report["layers"]) <= REL_L2


def test_a_failing_rank_is_one_sentence_and_leaves_nothing(references, tmp_path):
    from safetensors.torch import load_file, save_file

    rollout, _ = references("qwen2")
    model = tmp_path / "model"
    shutil.copytree(open_dump(rollout).manifest["model"]["path"], model)
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]  # only the second stage needs it
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = ("dump", "--stage", "actor", "--from", rollout, "--model", model, "--device", "cpu", "--pp", "2")
    command = [sys.executable, "-m", "probe", "-q", *map(str, words), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "lacks the parameter model.layers.3.mlp.up_proj.weight" in done.stderr
    assert done.stderr.startswith("probe: error: ") and done.stderr.count("\n") == 1
