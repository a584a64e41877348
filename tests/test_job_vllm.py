"""A user's vLLM program is recorded by environment variables alone: in its process, out of it, and on two ranks.

Real vLLM on a CPU. What the dump says is compared with what vLLM told the program, to the bit, and with what the
program is told when nothing records it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_checkpoint

from probe.compare.run import compare_dumps
from probe.hooks.jobs.log import TROUBLE, read_lines
from probe.hooks.runners.job import DumpJob
from probe.hooks.runners.run import run_dump
from probe.store.reader import Dump, open_dump, open_files
from probe.store.sketches import sketch_rows

pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "vllm_job.py"
ENGINE = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
CELLS = {
    "in-process": (IN_PROCESS, {}),
    "out-of-process": ({}, {}),
    "two-ranks": ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, {"tensor_parallel_size": 2}),
}
"""Name -> (environment, arguments of LLM) of each way in which vLLM runs its workers."""
SWITCHES = {"off": {}, "on": {"DUMP_ON": "1"}, "prompts": {"DUMP_ON": "1", "PROMPTS_ONLY": "1"}}


@dataclass
class Run:
    """One run of the program: the dump's folder, and what vLLM answered."""

    dump: Path
    told: list


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of one shape, as before and after an update."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden": 128, "intermediate": 256, "head_dim": 32, "vocab": 197}
    return [make_checkpoint(folder / f"m{seed}", seed=seed, **sizes) for seed in (0, 7)]


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A function that runs the program once per set of arguments."""
    made: dict[tuple[str, ...], Run] = {}

    def once(scenario="generate", environment=None, arguments=None, switch="on", wanted=None):
        environment = {**SWITCHES[switch], **(environment or {}), **(wanted or {})}
        key = (scenario, json.dumps(environment), json.dumps(arguments))
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            (folder / "dump").mkdir()
            clean = {k: v for k, v in os.environ.items() if not k.startswith(("PROBE_", "DUMP_ON", "PROMPTS_ONLY"))}
            environment = {**clean, **ENGINE, "PROBE_DUMP_DIR": str(folder / "dump"), **environment}
            given = ",".join(map(str, models)) if scenario == "updates" else str(models[0])
            command = [
                sys.executable,
                str(JOB),
                scenario,
                given,
                str(folder / "told.json"),
                json.dumps(arguments or {}),
            ]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
            assert done.returncode == 0, done.stderr[-4000:]
            made[key] = Run(folder / "dump", json.loads((folder / "told.json").read_text()))
        return made[key]

    return once


def assert_told_alike(dump: Dump, told: list) -> None:
    """Assert that the dump has every sequence that vLLM returned, with the log-probs to the bit, and no other."""
    found = {}
    for sequence in dump.sequences:
        rows = dump.tokens[dump.tokens["sequence"] == sequence.index]
        assert np.array_equal(rows["response"], np.arange(len(rows)) >= sequence.prompt_len)
        assert np.isnan(rows["logprob"][: sequence.prompt_len]).all()
        found[sequence.uid] = (sequence.prompt_len, rows["token"].tolist(), rows["logprob"].tolist())
    assert len(found) == len(told)
    expected = [(len(prompt), prompt + tokens, logprobs) for prompt, tokens, logprobs in told]
    assert sorted((n, ids, logprobs[n:]) for n, ids, logprobs in found.values()) == sorted(expected)


def assert_sketched(dump: Dump, model: Path) -> None:
    """Assert that the dump's sketches are those of a checkpoint: of every parameter, none left out as unavailable."""
    from safetensors.numpy import load_file

    held = load_file(next(model.glob("*.safetensors")))
    name = "model.layers.1.self_attn.o_proj.weight"
    assert np.allclose(dump.weights[name].rows, sketch_rows(held[name]), rtol=0, atol=1e-9)
    assert all(weight.rows.size or weight.alias for weight in dump.weights.values())


@pytest.mark.parametrize("cell", CELLS)
def test_the_program_is_told_the_same(run, cell):
    told = {switch: run("generate", *CELLS[cell], switch).told for switch in SWITCHES}
    assert told["on"] == told["off"] and told["prompts"] == told["off"]
    assert list(run("generate", *CELLS[cell], "off").dump.iterdir()) == []


@pytest.mark.parametrize("cell", CELLS)
def test_every_sequence_is_recorded_as_vllm_returned_it(run, models, cell):
    done = run("generate", *CELLS[cell], "on")
    with open_dump(done.dump) as dump:
        assert dump.complete and dump.engine == "vllm"
        assert_told_alike(dump, done.told)
        assert_sketched(dump, models[0])
        assert {s.weight_version for s in dump.sequences} == {0}
        assert sorted(s.sample for s in dump.sequences) == [0] * 5 + [1] * 5
        assert dump.manifest["sampling"]["temperature"] == 0.8
        assert dump.manifest["logprobs_mode"] == "raw_logprobs" and dump.manifest["backends"]["attention"]
        assert dump.manifest["topology"]["tp"] == (2 if cell == "two-ranks" else 1)


@pytest.mark.parametrize("cell", CELLS)
def test_prompts_only_leaves_the_rows_of_responses_out(run, cell):
    done = run("generate", *CELLS[cell], "prompts")
    with open_dump(done.dump) as dump:
        assert_told_alike(dump, done.told)
        rows = dump.rows("model.layers.1.mlp.down_proj", "output.0")
        assert len(rows)
        assert all(row["position"] < dump.sequences[row["sequence"]].prompt_len for row in rows)


@pytest.mark.parametrize("cell", CELLS)
def test_the_rollout_is_consistent_with_an_actor_on_its_tokens(run, models, tmp_path, cell):
    done = run("generate", *CELLS[cell], "on")
    run_dump(DumpJob("actor", "transformers", models[0], tmp_path / "actor", source=done.dump, dtype="float32"))
    report = compare_dumps(done.dump, tmp_path / "actor")
    assert report["verdict"] == "consistent"
    assert (report["coverage"]["only_a"], report["coverage"]["only_b"]) == ([], [])
    assert {g["name"]: g["status"] for g in report["gates"]}["weights"] == "pass"


def test_sequences_pieces_and_sketches_follow_the_weights(run, models):
    """Weights are replaced between requests and within them, a request is aborted, and the trainer goes on a step."""
    done = run("updates", IN_PROCESS, None, "on", {"PROBE_STEPS": "0,1"})
    files = sorted((done.dump / "rollout" / "step0").glob("*.h5"))
    found, served = {}, {}
    for file in files:
        with open_files(file.parent, [file]) as dump:
            (version,) = {s.weight_version for s in dump.sequences}
            found[version] = {s.uid: s for s in dump.sequences}
            served[version] = dump.weights["model.layers.0.mlp.down_proj.weight"].rows
            assert_sketched(dump, models[1] if version == 1 else models[0])
    assert sorted(found) == [0, 1, 2]
    assert np.array_equal(served[0], served[2]) and not np.array_equal(served[0], served[1])
    # what ran under one version is as vLLM returned it
    whole = {version: [s.tokens.tolist() for s in by_uid.values()] for version, by_uid in found.items()}
    for version in ("0", "1"):
        assert all(prompt + tokens in whole[int(version)] for prompt, tokens, _ in done.told[version])
    # requests that new weights met end once under the old ones and begin again, with those tokens as their prompt
    pieces = {uid: s for uid, s in found[2].items() if "#" in uid}
    assert sorted(uid.partition("-")[0] for uid in pieces) == ["r0", "r1"]
    for uid, newer in pieces.items():
        older = found[1][uid.partition("#")[0]]
        assert older.length == newer.prompt_len and newer.tokens.tolist()[: older.length] == older.tokens.tolist()
        assert newer.trajectory == older.trajectory
    assert sorted(s.tokens.tolist() for s in pieces.values()) == sorted(p + t for p, t, _ in done.told["1-2"])
    # the aborted request is there as far as it came, the other as it was returned
    aborted = [s for uid, s in found[2].items() if "#" not in uid]
    assert sorted(s.length for s in aborted) == [5, 14]
    with open_dump(done.dump, step=1) as dump:
        assert_told_alike(dump, done.told["later"])
        assert {s.weight_version for s in dump.sequences} == {2}


def test_tokens_need_no_eager_mode(run, models):
    """Compiled as vLLM does by default: no tensor, one line that says what to set, and all the rest."""
    compiled = {"TORCHDYNAMO_DISABLE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    done = run("generate", {**IN_PROCESS, **compiled}, {"enforce_eager": False})
    with open_dump(done.dump) as dump:
        assert not dump.tensors and dump.manifest["task"] == "tokens"
        assert_told_alike(dump, done.told)
        assert_sketched(dump, models[0])
    troubles = [line.text for line in read_lines(done.dump) if line.kind == TROUBLE]
    assert len(troubles) == 1 and "enforce_eager=True" in troubles[0]
