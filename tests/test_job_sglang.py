"""A user's SGLang program is recorded by environment variables alone: SGLang 0.5.12 on a CPU (``make sglang``).

What the dump says is compared with what SGLang told the program, to the bit, with what the program is told when nothing
records it, and with the same sequences on transformers.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from activation_tools import clean_environment, python
from capture_tools import by_row
from checkpoints import make_checkpoint
from synthetic_dumps import Scenario, write_dump

from probe.compare.run import compare_dumps
from probe.compare.tokens.batch import origin_of
from probe.compare.tokens.declared import declared_apart
from probe.hooks.engines.sglang_runner import UNSUPPORTED, WITHOUT_GRAPHS, call_through_hooks, why_tokens_only
from probe.hooks.jobs.log import TROUBLE, read_lines
from probe.hooks.jobs.sglang import MODES
from probe.hooks.runners.job import DumpJob
from probe.hooks.runners.run import run_dump
from probe.sampling import Semantics, engine_semantics
from probe.store.reader import open_dump, open_files

ROOT = Path(__file__).parent.parent
SGLANG = ROOT / ".sglang"
PATHS = ":".join(map(str, (SGLANG, ROOT / "tests" / "sglang_cpu", ROOT / "tests")))
OPTIONS = {"disable_radix_cache": True, "chunked_prefill_size": 4}
"""Prompts longer than 4 are cut into several prefills."""
RESPONSE = 4


@dataclass
class Run:
    """One run of the program: the dump's folder, and what SGLang answered before and after the update."""

    dump: Path
    told: list


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of each family; of an intermediate size that SGLang need not pad for a CPU's ranks."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(folder / name, name, intermediate=128) for name in ("qwen2", "qwen3_moe")}


@pytest.fixture(scope="module")
def run(checkpoints, tmp_path_factory):
    """A function that runs the program with options and variables, once each."""
    if not (SGLANG / ".ready").is_file():
        pytest.fail("SGLang is not installed for these tests: run 'make sglang', as 'make test' does")
    done = {}

    def once(name: str, options: dict, family: str = "qwen2", job: str = "sglang_job.py", **variables: str) -> Run:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            paths = {"PYTHONPATH": PATHS, "SGLANG_USE_CPU_ENGINE": "1"}
            own = {"PROBE_DUMP_DIR": str(folder / "dump"), "OMP_NUM_THREADS": "1", **paths, **variables}
            words = ("-P", ROOT / "tests" / job, checkpoints[family], json.dumps(options))
            lines = python(*words, cwd=folder, environ=clean_environment(**own)).splitlines()
            told = next(line for line in lines if line.startswith("RETURNED")).partition(" ")[2]
            done[name] = Run(folder / "dump", json.loads(told))
        return done[name]

    return once


@pytest.fixture(scope="module")
def recorded(run):
    """The program, recorded."""
    return run("on", OPTIONS, DUMP_ON="1")


def files_of(run: Run):
    """Return the rollout's files by the weight version of their sequences."""
    paths = sorted((run.dump / "rollout" / "step0").glob("*.h5"))
    found = [open_files(path.parent, [path]) for path in paths]
    return {dump.sequences[0].weight_version: dump for dump in found}


@pytest.mark.slow
def test_a_recording_changes_nothing(run, recorded):
    """GIVEN the same program off and on, THEN ids and log-probs are equal to the bit, and off nothing is written."""
    off = run("off", OPTIONS, DUMP_ON="0")
    assert off.told == recorded.told
    assert not off.dump.exists()


@pytest.mark.slow
def test_sequences_are_what_the_engine_returned(recorded):
    """GIVEN a weight update between two rounds, THEN each round is a file of its own, of another weight version,

    whose ids and log-probs are those that the program was given.
    """
    files = files_of(recorded)
    assert sorted(files) == [0, 1] and not [x for x in read_lines(recorded.dump) if x.kind == TROUBLE]
    for version, told in enumerate(recorded.told):
        dump = files[version]
        assert dump.complete and dump.engine == "sglang"
        found = {tuple(s.tokens.tolist()[: s.prompt_len]): s for s in dump.sequences}
        assert len(found) == len(told) == len(dump.sequences)
        for answer in told:
            sequence = found[tuple(answer["prompt"])]
            assert sequence.tokens.tolist() == answer["prompt"] + answer["ids"]
            rows = dump.tokens[dump.tokens["sequence"] == sequence.index]
            assert np.isnan(rows["logprob"][: sequence.prompt_len]).all()
            assert rows["logprob"][sequence.prompt_len :].tolist() == answer["logprobs"]


@pytest.mark.slow
def test_every_token_that_ran_is_a_row(recorded):
    """GIVEN chunked prefills and decode passes, THEN each position of each sequence is there, with its own id.

    The last token is sampled and need not run: an engine that schedules ahead runs it before it knows.
    """
    for dump in files_of(recorded).values():
        rows = dump.rows("model.norm", "output.0")
        for sequence in dump.sequences:
            mine = np.sort(rows[rows["sequence"] == sequence.index], order="position")
            length = len(sequence.tokens)
            assert mine["position"].tolist() in (list(range(length - 1)), list(range(length)))
            assert mine["token"].tolist() == sequence.tokens[: len(mine)].tolist()
        logits = dump.rows("logits_processor", "output.next_token_logits")
        last = {(s.index, p) for s in dump.sequences for p in range(s.prompt_len - 1, s.prompt_len + RESPONSE - 1)}
        assert last <= {(int(r["sequence"]), int(r["position"])) for r in logits}


EXPERTS = {f"layers.1.mlp{at}" for at in (":output.0", ".experts:output.0", ".router:output.0", ".router:ids")}
COMMON = {"lm_head:output.0", "layers.1:output.0", "norm:output.0"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "labels"), [("qwen2", COMMON), ("qwen3_moe", COMMON | EXPERTS)])
def test_the_rollout_agrees_with_transformers(run, recorded, checkpoints, tmp_path, family, labels):
    """GIVEN the rollout of the first weights, WHEN its tokens run on transformers, THEN no module differs.

    Every tensor that transformers has is matched, and the one gate that fails is the temperature, which only the
    rollout's log-probs have in them.
    """
    rollout = recorded if family == "qwen2" else run(family, OPTIONS, family, DUMP_ON="1")
    checkpoint, run = checkpoints[family], tmp_path / "run"
    shutil.copytree(rollout.dump, run)
    for path in (run / "rollout" / "step0").glob("*.h5"):
        with open_files(path.parent, [path]) as dump:
            newer = dump.sequences[0].weight_version > 0
        if newer:
            path.unlink()
    actor = tmp_path / "actor"
    run_dump(DumpJob("actor", "transformers", checkpoint, actor, source=run / "rollout", dtype="float32"))
    report = compare_dumps(run / "rollout", actor)
    verdicts = {f"{layer['name']}:{layer['slot']}": layer["verdict"] for layer in report["layers"]}
    fine = {label for label, verdict in verdicts.items() if verdict in ("identical", "consistent")}
    assert {label for label, verdict in verdicts.items() if verdict != "unavailable"} == fine
    assert labels <= fine
    assert {gate["name"] for gate in report["gates"] if gate["status"] == "fail"} == {"sampling"}


@pytest.mark.slow
def test_the_weights_that_arrived_are_sketched(recorded):
    """GIVEN the norm and the embedding times 1.5, THEN the sketches of those alone differ between the two files."""
    old, new = (files_of(recorded)[version] for version in (0, 1))
    for name, weight in old.weights.items():
        if weight.alias:
            continue
        factor = 1.5 if name in ("model.norm.weight", "model.embed_tokens.weight") else 1.0
        # float64 sums over float32 weights; their rounded products are relative 2^-24 each
        np.testing.assert_allclose(new.weights[name].rows[:, 0], weight.rows[:, 0] * factor, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_two_ranks_join_to_one_model(run, recorded):
    """GIVEN two tensor-parallel ranks and PROMPTS_ONLY=1, THEN both rounds' files join to whole tensors of prompts."""
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    both = run("ranks", {**OPTIONS, "tp_size": 2}, DUMP_ON="1", PROMPTS_ONLY="1", **cores)
    assert len(list((both.dump / "rollout" / "step0").glob("*.h5"))) == 4
    one = files_of(recorded)[0]
    with open_dump(both.dump) as joined:
        assert joined.complete and joined.manifest["topology"]["tp"] == 2
        for module in ("model.layers.0.mlp.gate_up_proj", "model.layers.1.self_attn.o_proj", "model.norm"):
            rows = by_row(joined, module, "output.0")
            assert len(rows) == 2 * sum(s.prompt_len for s in one.sequences)
            assert {row.shape for row in rows.values()} == {
                row.shape for row in by_row(one, module, "output.0").values()
            }


ROUGH = {**OPTIONS, "enable_mixed_chunk": True, "max_total_tokens": 160}
"""Prefills run beside decode passes, and six requests of 45 tokens do not fit at once."""
TAKEN_BACK = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
"""SGLang's own switch: every so many passes it takes requests back, as where its cache is full."""


@pytest.fixture(scope="module")
def rough(run):
    """The rough program, recorded in both of its steps."""
    limits = {"PROBE_STEPS": "0,1", "PROBE_SEQS": "0", "PROBE_ROWS": "0"}
    return run("rough", ROUGH, job="sglang_rough_job.py", DUMP_ON="1", **limits, **TAKEN_BACK)


def in_step(run: Run, step: int):
    """Yield (sequence, its rows of the token table, its rows of the last norm by position) of a step of the rollout."""
    for path in sorted((run.dump / "rollout" / f"step{step}").glob("*.h5")):
        with open_files(path.parent, [path]) as dump:
            ran = dump.rows("model.norm", "output.0")
            for sequence in dump.sequences:
                mine = dump.tokens[dump.tokens["sequence"] == sequence.index]
                yield sequence, mine, ran[ran["sequence"] == sequence.index]


@pytest.mark.slow
def test_only_what_generates_is_a_sequence(rough):
    """GIVEN two samples per prompt, a request for no token, one that is refused, some aborted and some taken back,

    THEN each that generates is one sequence with what the program was told, and samples of a prompt count from 0.
    """
    assert not [line for line in read_lines(rough.dump) if line.kind == TROUBLE] and rough.told["refused"]
    told = [a for name in ("samples", "mixed", "many", "aborted") for a in rough.told[name] if a["ids"]]
    assert {a["reason"] for a in told} == {"length", "stop", "abort"}
    found = [(s, rows) for s, rows, _ in in_step(rough, 0) if s.tokens.tolist()[0] != 72]
    kept = sorted((s.tokens.tolist(), s.prompt_len, rows["logprob"][s.prompt_len :].tolist()) for s, rows in found)
    wanted = sorted((a["prompt"] + a["ids"], len(a["prompt"]), a["logprobs"]) for a in told)
    assert [entry[:2] for entry in kept] == [entry[:2] for entry in wanted]
    for (*_, ours), (*_, theirs) in zip(kept, wanted):
        assert ours == theirs or (not theirs and np.isnan(ours).all())
    for prompt, samples in (([5, 6, 7, 8, 9], [0, 1]), ([10, 11, 12], [0, 1])):
        assert sorted(s.sample for s, _ in found if s.tokens.tolist()[: s.prompt_len] == prompt) == samples


@pytest.mark.slow
def test_what_is_taken_back_runs_again_as_the_same_rows(rough):
    """GIVEN requests that are taken back, THEN what ran twice is two rows of one position, and none is wrong."""
    again = 0
    for sequence, _, ran in in_step(rough, 0):
        positions = ran["position"]
        assert set(range(len(sequence.tokens) - 1)) <= set(positions.tolist())
        inside = positions < len(sequence.tokens)
        assert ran["token"][inside].tolist() == sequence.tokens[positions[inside]].tolist()
        again += len(positions) - len(np.unique(positions))
    assert again > 0


@pytest.mark.slow
def test_newer_weights_do_not_claim_older_log_probs(rough):
    """GIVEN a request that goes on under newer weights in the next step, THEN each step has what its weights made."""
    answer = rough.told["updated"][0]
    whole = answer["prompt"] + answer["ids"]
    (old, old_rows, _), *more = [entry for entry in in_step(rough, 0) if entry[0].tokens.tolist()[0] == 72]
    (new, new_rows, ran), *others = in_step(rough, 1)
    assert not more and not others
    assert (old.weight_version, new.weight_version) == (0, 1) and new.uid == f"{old.uid}#1"
    assert new.tokens.tolist() == whole and old.tokens.tolist() == whole[: new.prompt_len]
    logprobs, cut = np.array([np.nan] * len(answer["prompt"]) + answer["logprobs"]), new.prompt_len
    assert len(answer["prompt"]) < cut < len(whole)
    np.testing.assert_array_equal(old_rows["logprob"], logprobs[:cut])
    np.testing.assert_array_equal(new_rows["logprob"], np.where(np.arange(len(whole)) < cut, np.nan, logprobs))
    assert set(range(len(whole) - 1)) <= set(ran["position"].tolist())


def runner(**arguments):
    """Return what stands for a model runner: the arguments of its server."""
    fine = {name: value for name, value, *_ in UNSUPPORTED}
    return SimpleNamespace(server_args=SimpleNamespace(**fine | arguments), graph_runner=None)


@pytest.mark.parametrize(("name", "fine", "why", "fix"), UNSUPPORTED)
def test_what_would_mix_up_rows_is_not_recorded(name, fine, why, fix):
    """GIVEN an argument under which rows cannot be told apart, THEN only tokens are recorded, and it is said why."""
    assert why_tokens_only(runner()) == ""
    told = why_tokens_only(runner(**{name: "another"}))
    assert name in told and why in told and fix in told


def test_its_log_probs_hold_the_temperature_alone():
    """GIVEN top-p below 1, THEN SGLang's log-probs are of the logits over the temperature."""
    manifest = {"logprobs_mode": "temperature_logprobs", "sampling": {"temperature": 0.7, "top_p": 0.9}}
    assert engine_semantics(manifest) == Semantics(0.7, 1.0)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_its_log_probs_mean_what_a_trainers_do(tmp_path, temperature):
    """GIVEN a trainer that scales its logits by the rollout's temperature, THEN both mean the same, top-p or not;

    raw ones (SGLANG_RETURN_ORIGINAL_LOGPROB) do at a temperature of 1 alone.
    """
    trainer = {"logprobs_mode": "processed_logprobs", "sampling": {"temperature": temperature, "top_p": 1.0}}
    drawn = {"temperature": temperature, "top_p": 0.9, "top_k": -1, "min_p": 0.0}
    origins = {}
    for name, manifest in (
        ("trainer", trainer),
        *((mode, {"logprobs_mode": mode, "sampling": drawn}) for mode in MODES.values()),
    ):
        with open_dump(write_dump(tmp_path / name, Scenario(manifest=manifest))) as dump:
            origins[name] = origin_of(dump, "engine")
    assert declared_apart((origins[MODES[False]], origins["trainer"])) == []
    assert bool(declared_apart((origins[MODES[True]], origins["trainer"]))) == (temperature != 1)


def test_graphs_are_not_recorded():
    """GIVEN a runner with graphs, THEN it is said which options switch them off, of SGLang and of verl."""
    graphs = runner()
    graphs.graph_runner = object()
    assert why_tokens_only(graphs) == WITHOUT_GRAPHS


def test_a_forward_that_is_called_by_name_runs_the_hooks():
    """GIVEN a model whose ``forward`` SGLang calls directly, THEN its hooks see the call once, and undo restores it."""
    model, seen = torch.nn.Linear(2, 2), []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    undo = call_through_hooks(model)
    assert torch.equal(model.forward(torch.ones(1, 2)), seen[0]) and len(seen) == 1
    assert torch.equal(model(torch.ones(1, 2)), seen[1]) and len(seen) == 2
    undo()
    model.forward(torch.ones(1, 2))
    assert len(seen) == 2
