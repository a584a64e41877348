"""verl 0.9.1's real TrainingWorker in a real Ray job, switched on by environment variables alone.

The job is tests/verl_job.py; only the device is a stand-in (tests/verl_cpu_platform). With ``PROBE_VERL_JOBS=DIR`` the
folders of the jobs are kept there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probe import open_dump
from probe.compare.run import compare_dumps
from probe.compare.tokens.rl import read_rl
from probe.hooks.jobs.log import TROUBLE, read_lines
from probe.store.schema import Versions

pytestmark = pytest.mark.slow
pytest.importorskip("verl")
pytest.importorskip("ray")

TESTS = Path(__file__).parent
PROMPTS = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23], [30, 31, 32], [40, 41, 42, 43, 44]]
LENGTH = 8
"""Tokens of the first response; each further one is a token shorter (tests/verl_job.py)."""
TIMEOUT = 540


@dataclass(frozen=True)
class Job:
    """A finished job: its dump's folder and what training came to."""

    dump: Path
    result: list[dict[str, Any]]


def run_job(folder: Path, model: Path, environ: dict[str, str], **options: Any) -> Job:
    """Run tests/verl_job.py as a program of a user's, with a Ray cluster of its own."""
    folder.mkdir(parents=True)
    (folder / "home").mkdir()
    result, given = folder / "result.json", folder / "options.json"
    given.write_text(json.dumps({"model": str(model), "prompts": PROMPTS, "result": str(result), **options}))
    mine = {
        "HOME": str(folder / "home"),
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "VERL_PLATFORM": "probe_cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")])),
        "PROBE_DUMP_DIR": str(folder / "dump"),
        "TORCHDYNAMO_DISABLE": "1",  # vLLM on a CPU would compile its sampler for minutes
        "VLLM_NO_USAGE_STATS": "1",
    }
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("PROBE_", "DUMP_ON", "PROMPTS_ONLY", "VLLM_"))
    }
    command = [sys.executable, str(TESTS / "verl_job.py"), str(given)]
    done = subprocess.run(
        command, env={**inherited, **mine, **environ}, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT
    )
    (folder / "job.log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return Job(folder / "dump", json.loads(result.read_text()))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("PROBE_VERL_JOBS")
    return Path(kept) if kept else tmp_path_factory.mktemp("verl")


@pytest.fixture(scope="module")
def plain(jobs: Path, demo_model: Path) -> Job:
    """One rank, two mini-batches, nothing recorded."""
    return run_job(jobs / "off", demo_model, {}, update={"mini_batch_size": 2})


@pytest.fixture(scope="module")
def recorded(jobs: Path, demo_model: Path) -> Job:
    """The same job under DUMP_ON=1."""
    return run_job(jobs / "on", demo_model, {"DUMP_ON": "1"}, update={"mini_batch_size": 2})


def rows_of(dump: Path, stage: str) -> Counter[str]:
    """Return how many rows of the model's first norm each sequence has in a stage."""
    opened = open_dump(dump / stage)
    rows = opened.rows("model.layers.0.input_layernorm", "output.0")
    return Counter(opened.sequences[n].uid for n in rows["sequence"])


def total(number: int) -> int:
    """Return how many tokens a prompt of PROMPTS and its response have."""
    return len(PROMPTS[number]) + LENGTH - number


# -- one rank ----------------------------------------------------------------------------------------------------------


def test_without_dump_on_nothing_is_written(plain: Job) -> None:
    assert not plain.dump.exists()


def test_training_is_bit_identical_with_and_without_dumping(
    plain: Job, recorded: Job, jobs: Path, demo_model: Path
) -> None:
    """GIVEN a job, WHEN it runs off, on and with PROMPTS_ONLY, THEN log-probs, losses and gradient norms are equal."""
    environ = {"DUMP_ON": "1", "PROMPTS_ONLY": "1"}
    prompts_only = run_job(jobs / "prompts-only", demo_model, environ, update={"mini_batch_size": 2})
    assert plain.result == recorded.result == prompts_only.result
    rows = rows_of(prompts_only.dump, "logprob")
    assert sorted(rows.values()) == sorted(map(len, PROMPTS))


def test_log_prob_and_update_passes_are_stages_of_one_dump(recorded: Job) -> None:
    """GIVEN a job of one step, THEN its dump has the rows of both passes, complete files, and nobody had trouble."""
    assert [line.text for line in read_lines(recorded.dump) if line.kind == TROUBLE] == []
    assert not list(recorded.dump.rglob("*.partial"))
    assert sorted(rows_of(recorded.dump, "logprob").values()) == sorted(total(n) for n in range(4))
    # only the first of two mini-batches ran on the weights of the log-prob pass
    assert sorted(rows_of(recorded.dump, "update").values()) == sorted(total(n) for n in range(2))


def test_log_probs_are_those_that_the_trainer_got(recorded: Job) -> None:
    """GIVEN old_log_probs [batch, response] of the job, THEN the dump holds the same numbers for the same tokens."""
    opened = open_dump(recorded.dump / "logprob")
    by_prompt = {tuple(s.tokens[: s.prompt_len].tolist()): s for s in opened.sequences}
    tokens = opened.tokens
    for prompt, old in zip(PROMPTS, recorded.result[0]["old_log_probs"]):
        sequence = by_prompt[tuple(prompt)]
        mine = tokens[(tokens["sequence"] == sequence.index) & tokens["response"]]
        assert np.array_equal(mine["logprob"], np.float64(old[: len(mine)]))
    assert opened.manifest["sampling"] == {"temperature": 0.8, "top_p": 1.0}
    assert opened.manifest["logprobs_mode"] == "processed_logprobs"


def test_the_trainers_columns_are_stored_for_all_mini_batches(recorded: Job) -> None:
    opened = open_dump(recorded.dump / "update")
    columns = read_rl(opened)
    assert {"advantages", "returns", "new_log_probs"} <= set(columns)
    _, _, values = columns["advantages"]
    assert len(values) == sum(LENGTH - n for n in range(4))
    assert set(np.unique(values)) == {-1.0, 1.0}
    for kept in ("response_mask", "rollout_log_probs", "old_log_probs"):
        assert opened.read("rl", kept).size == len(values)
    assert (opened.read("rl", "response_mask") == 1).all()


# -- ranks, packing, dynamic and shuffled batches ----------------------------------------------------------------------


def test_neither_ranks_nor_packing_nor_the_order_of_rows_matter(jobs: Path, recorded: Job, demo_model: Path) -> None:
    """GIVEN two FSDP2 ranks, packed and dynamic micro-batches, shuffled mini-batches in two epochs,

    WHEN the job is compared with that of one rank and padded batches, THEN all rows join and agree.
    """
    options = {"ranks": 2, "remove_padding": True, "dynamic": True}
    job = run_job(
        jobs / "ranks",
        demo_model,
        {"DUMP_ON": "1"},
        **options,
        update={"mini_batch_size": 2, "epochs": 2, "shuffle": True},
    )
    assert len(list((job.dump / "logprob" / "step0").glob("rank*.h5"))) == 2
    report = compare_dumps(recorded.dump / "logprob" / "step0", job.dump / "logprob" / "step0")
    assert report["verdict"] in ("consistent", "identical")
    assert report["coverage"]["rows"]["joined"] == sum(total(n) for n in range(4))
    assert report["coverage"]["rows"]["a"] == report["coverage"]["rows"]["b"] == {}
    assert not report["coverage"]["only_a"] and not report["coverage"]["only_b"]


# -- the rollout of a real vLLM in the same job ------------------------------------------------------------------------


def compared(dump: Path) -> dict[str, Any]:
    """Return the report of ``probe compare DUMP`` and, as ``status``, its exit status."""
    command = [sys.executable, "-m", "probe", "compare", str(dump), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=dump.parent)
    assert done.returncode in (0, 1, 2), done.stderr
    return {**json.loads(done.stdout), "status": done.returncode}


@pytest.mark.parametrize("ranks", [1, 2])
def test_rollout_and_log_prob_pass_of_one_job_are_consistent(jobs: Path, demo_model: Path, ranks: int) -> None:
    """GIVEN one Ray job whose vLLM runs in processes of its own and whose TrainingWorker shards with FSDP2,

    WHEN only environment variables switch capture on, THEN ``probe compare`` of its folder finds both sides in full
    and consistent in fp32.
    """
    folder = jobs / f"rollout{ranks}"
    job = run_job(folder, demo_model, {"DUMP_ON": "1"}, rollout_model=str(demo_model), ranks=ranks)
    report = compared(job.dump)
    assert (report["verdict"], report["status"]) == ("consistent", 0)
    assert report["a"]["stage"] == "rollout" and report["b"]["stage"] == "logprob"
    assert report["coverage"]["matched"] == len(report["layers"]) > 50
    assert report["coverage"]["only_a"] == report["coverage"]["only_b"] == []
    assert {entry["name"].rpartition(".")[2] for entry in report["coverage"]["unavailable"]} == {"rotary_emb"}
    assert {gate["name"]: gate["status"] for gate in report["gates"]}.items() >= {
        ("tokens", "pass"),
        ("weights", "pass"),
        ("sampling", "pass"),
    }


def test_a_rollout_of_an_older_checkpoint_is_stale_weights(jobs: Path, demo_model: Path) -> None:
    """GIVEN a rollout whose weights are of an earlier step, THEN ``stale-weights`` is the first suspect."""
    folder = jobs / "stale"
    old = older_checkpoint(demo_model, jobs / "older")
    job = run_job(folder, demo_model, {"DUMP_ON": "1"}, rollout_model=str(old))
    report = compared(job.dump)
    assert (report["verdict"], report["status"]) == ("divergent", 1)
    assert report["suspects"][0]["cause"] == "stale-weights"
    assert report["suspects"][0]["side"] in ("a", "unknown")


@pytest.fixture(scope="module")
def lagging(jobs: Path, demo_model: Path) -> Job:
    """A rollout of four prompts on older weights, as verl declares; two of its responses are trained on."""
    old = older_checkpoint(demo_model, jobs / "older-by-one")
    options = {"rollout_model": str(old), "versions": [2, 2, 3], "trained": 2, "update": {"mini_batch_size": 2}}
    return run_job(jobs / "lagging", demo_model, {"DUMP_ON": "1"}, **options)


def test_what_verl_declares_of_the_weights_is_stored_with_each_sequence(lagging: Job) -> None:
    """GIVEN a batch that names its weights and a trainer that sent its own under a number, THEN rows have both."""
    assert [line.text for line in read_lines(lagging.dump) if line.kind == TROUBLE] == []
    for stage in ("logprob", "update"):
        with open_dump(lagging.dump / stage) as dump:
            assert [s.declared for s in dump.sequences] == [Versions(2, 2, 3)] * 2
            assert dump.whole_batch == (stage == "logprob")


def test_a_declared_lag_of_older_weights_is_not_staleness(lagging: Job) -> None:
    """GIVEN the stale rollout's weights, WHEN verl declares them to be of the version before, THEN nothing is stale."""
    report = compared(lagging.dump)
    weights = next(gate for gate in report["gates"] if gate["name"] == "weights")
    assert weights["status"] == "warn" and "1 version older than its own" in weights["detail"]
    assert "stale-weights" not in {suspect["cause"] for suspect in report["suspects"]}
    assert (report["verdict"], report["status"]) == ("incomparable", 2)
    assert report["coverage"]["rows"]["joined"] == 0 and report["coverage"]["rows"]["b"]["other_version"]


def test_responses_that_were_not_trained_on_are_not_missed(lagging: Job) -> None:
    """GIVEN a rollout of which the trainer was given two of four sequences, THEN the others have their own reason."""
    report = compared(lagging.dump)
    rows = report["coverage"]["rows"]["a"]
    assert rows["not_trained"] == total(2) + total(3) - 2 and "other_sequence" not in rows
    assert any("2 sequences of a that the trainer did not train on" in said for said in report["not_compared"])


def older_checkpoint(model: Path, folder: Path) -> Path:
    """Return a copy of a checkpoint as it was some updates ago: every matrix a little different."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    seed = torch.Generator().manual_seed(3)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for name, value in weights.items():
            if value.dim() == 2:
                weights[name] = value + 0.02 * value.std() * torch.randn(value.shape, generator=seed)
        save_file(weights, path, metadata={"format": "pt"})
    return folder
