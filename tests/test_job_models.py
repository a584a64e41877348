"""Plain scripts under DUMP_ON: what their models do is recorded, and nothing that they compute changes by a bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from capture_tools import by_row, hook_count
from checkpoints import make_checkpoint
from job_patches import patched_job, said

from probe.hooks import debugger as debugger_module
from probe.hooks.jobs import models
from probe.store.reader import open_dump

JOB = Path(__file__).parent / "job_training.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen2 checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(checkpoint):
    """The checkpoint on transformers, a new object for each test."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Patch transformers for one test, in a session whose settings the test gives; the folder is ``tmp_path / d``."""
    return patched_job(tmp_path, monkeypatch)


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_forwards_are_the_actors_and_generate_is_the_rollout(tmp_path, model, job):
    session = job()
    prompts = torch.tensor([[5, 6, 7], [9, 10, 11]])
    ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    assert hook_count(model) == 0
    session.close()
    expected = torch.log_softmax(logits.double(), -1)
    with open_dump(tmp_path / "d" / "rollout") as rollout, open_dump(tmp_path / "d" / "actor") as actor:
        for dump in (rollout, actor):
            assert [s.tokens.tolist() for s in dump.sequences] == ids.tolist()
            assert set(dump.weights) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
        assert [s.prompt_len for s in rollout.sequences] == [3, 3]
        for number in range(2):
            scores = [t["logprob_recomputed"] for t in rollout.tokens[rollout.tokens["sequence"] == number]]
            assert np.isnan(scores[:3]).all()  # generate computes no logits of the prompt but the last
            wanted = [expected[number, p - 1, ids[number, p]].item() for p in range(3, 7)]
            assert scores[3:] == pytest.approx(wanted, abs=1e-5)
        first = actor.tokens[(actor.tokens["sequence"] == 0) & (actor.tokens["position"] == 1)]
        assert first["logprob_recomputed"] == pytest.approx(expected[0, 0, 6].item(), abs=1e-6)
        assert np.array_equal(by_row(actor, "lm_head", "output.0")[("s1", 2)], logits[1, 2].numpy())
        # the token generated last enters no forward of the rollout
        assert len(by_row(rollout, "model.layers.1", "output.0")) == 2 * 6


@pytest.mark.parametrize("task", ["tensor", "tokens"])
def test_a_sequence_that_ends_before_the_batch_does(tmp_path, model, job, task):
    # GIVEN two prompts, one of them padded on the left, and a stop that the second response meets first
    prompts = torch.tensor([[0, 6, 7], [9, 10, 11]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    free = model.generate(prompts, attention_mask=mask, max_new_tokens=6, do_sample=False)
    stop = next(int(token) for token in free[1, 3:6] if token not in free[0, 3:])
    end = 3 + free[1, 3:].tolist().index(stop) + 1
    session = job(task=task)
    # WHEN they are generated together
    made = model.generate(
        prompts, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=stop, pad_token_id=0
    )
    session.close()
    # THEN the padding that follows the stop is nobody's
    assert made[1].tolist() == [*free[1, :end].tolist(), *[0] * (9 - end)]
    with open_dump(tmp_path / "d" / "rollout") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == [free[0, 1:].tolist(), free[1, :end].tolist()]
        assert [s.length for s in dump.sequences] == [8, end]
        assert [s.prompt_len for s in dump.sequences] == [2, 3]
        if task == "tensor":
            rows = by_row(dump, "model.layers.1", "output.0")
            assert sorted(rows) == [*(("s0", p) for p in range(7)), *(("s1", p) for p in range(end))]
        else:
            assert not dump.tensors


def test_steps_are_counted_and_only_the_first_is_recorded(tmp_path, model, job):
    session = job()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
        optimizer.step()
        other.step()  # a critic's, in the same step
    assert session.step == 3
    session.close()
    assert [p.name for p in (tmp_path / "d" / "actor").iterdir()] == ["step0"]


def test_steps_that_are_asked_for_and_every_step_of_tokens(tmp_path, model, job):
    session = job(step=(1, 2))
    for step in range(4):
        model(input_ids=torch.tensor([[step, 2, 3]]))
        session.clock.count()
    session.close()
    assert sorted(p.name for p in (tmp_path / "d" / "actor").iterdir()) == ["step1", "step2"]
    with open_dump(tmp_path / "d" / "actor", step=2) as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == [[2, 2, 3]] and dump.complete


def test_a_second_model_that_is_only_evaluated_is_the_reference(tmp_path, model, checkpoint, job):
    from transformers import AutoModelForCausalLM

    session = job()
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model(input_ids=torch.tensor([[1, 2, 3]]))
    with torch.no_grad():
        reference(input_ids=torch.tensor([[1, 2, 3]]))
    session.close()
    assert sorted(p.name for p in (tmp_path / "d").iterdir() if p.is_dir()) == ["actor", "reference"]


def test_the_stage_that_the_environment_names(tmp_path, model, job):
    session = job(stage="reference")
    model(input_ids=torch.tensor([[1, 2, 3]]))
    session.close()
    with open_dump(tmp_path / "d") as dump:
        assert dump.stage == "reference"


# -- what is left alone ------------------------------------------------------------------------------------------------


def test_passes_and_models_of_other_patches(tmp_path, model, job):
    session = job()
    session.others += 1
    model(input_ids=torch.tensor([[1, 2, 3]]))
    session.others -= 1
    recorder = session.recorder("logprob", model)  # now it is a trainer's model, whatever else calls it
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert recorder.begin()
    model(input_ids=torch.tensor([[1, 2, 3]]))
    recorder.end()
    session.close()
    assert sorted(p.name for p in (tmp_path / "d").iterdir() if p.is_dir()) == ["logprob"]
    with open_dump(tmp_path / "d") as dump:
        assert len(dump.read("model.layers.0", "output.0")) == 3


def test_a_script_with_a_debugger_of_its_own_records_once(tmp_path, model, job):
    job()
    model(input_ids=torch.tensor([[1, 2, 3]]))  # before anything shows that there will be a debugger
    with debugger_module.PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d")).start(model):
        model(input_ids=torch.tensor([[4, 5]]))
    model(input_ids=torch.tensor([[1, 2, 3]]))
    with open_dump(tmp_path / "d") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == [[4, 5]] and dump.complete


def test_beams_and_models_without_a_head(tmp_path, model, job):
    session = job()
    model.model(input_ids=torch.tensor([[1, 2, 3]]))
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, num_beams=2, do_sample=False)
    session.close()
    assert not (tmp_path / "d" / "rollout").exists() and not (tmp_path / "d" / "actor").exists()
    assert "generate with num_beams" in said() and "has no output embeddings" in said()


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_compiled_model_leaves_its_tokens_and_says_so(tmp_path, model, job, monkeypatch, how):
    from torch._dynamo import eval_frame

    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        plain = model(input_ids=ids).logits
    session = job()
    monkeypatch.setattr(eval_frame.OptimizedModule, "__call__", eval_frame.OptimizedModule.__call__)
    models.patch_compiled(eval_frame)
    if how == "in place":
        model.compile(backend="eager")
    runs = model if how == "in place" else torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.equal(runs(input_ids=ids).logits, plain)
    session.close()
    with open_dump(tmp_path / "d") as dump:
        assert not dump.tensors and dump.manifest["task"] == "tokens" and len(dump.weights) > 20
        expected = torch.log_softmax(plain.double(), -1)[0, 2, 4].item()
        assert dump.tokens["logprob_recomputed"][3] == pytest.approx(expected, abs=1e-6)
    assert "is compiled" in said()


# -- what the job never feels ------------------------------------------------------------------------------------------


def test_trouble_of_ours_is_one_line_and_the_job_goes_on(tmp_path, model, job, monkeypatch):
    from probe.hooks.capture import Capture

    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        plain = model(input_ids=ids).logits

    def broken(*args, **kwargs):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(Capture, "_record", broken)
    session = job()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain)
        assert torch.equal(model(input_ids=ids).logits, plain)
    session.close()
    assert hook_count(model) == 0
    assert said().count("disk on fire") == 1


def test_the_jobs_own_exceptions_are_its_own(tmp_path, model, job):
    session = job()
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[1, 10**6]]))
    assert hook_count(model) == 0
    model(input_ids=torch.tensor([[1, 2]]))
    session.close()
    assert "nothing more" not in said()


def run_job(tmp_path, checkpoint, name, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PROBE_", "DUMP_ON", "PROMPTS_ONLY"))}
    clean |= {"OMP_NUM_THREADS": "1", "PROBE_DUMP_DIR": str(tmp_path / name), **environment}
    command = [sys.executable, str(JOB), str(checkpoint), str(tmp_path / f"{name}.pt")]
    ran = subprocess.run(command, env=clean, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    return torch.load(tmp_path / f"{name}.pt")


CASES = {
    "on": {"DUMP_ON": "1"},
    "prompts": {"DUMP_ON": "1", "PROMPTS_ONLY": "1"},
    "tokens": {"DUMP_ON": "1", "PROBE_TASK": "tokens"},
    "small": {"DUMP_ON": "1", "PROBE_SEQS": "1", "PROBE_ROWS": "2", "PROBE_STEPS": "0,1,2"},
}


@pytest.fixture(scope="module")
def plain_run(checkpoint, tmp_path_factory):
    """What the job computes with nothing switched on."""
    folder = tmp_path_factory.mktemp("plain")
    result = run_job(folder, checkpoint, "off")
    assert not (folder / "off").exists()
    return result


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_samples_are_bit_identical(tmp_path, checkpoint, plain_run, case):
    result = run_job(tmp_path, checkpoint, case, **CASES[case])
    assert len(result) == len(plain_run) and all(torch.equal(a, b) for a, b in zip(result, plain_run))
    steps = 3 if case in ("tokens", "small") else 1
    for stage in ("rollout", "actor"):
        assert len(list((tmp_path / case / stage).glob("step*/rank0.h5"))) == steps
        with open_dump(tmp_path / case / stage) as dump:
            assert dump.complete and len(dump.sequences) == 3 and len(dump.tokens)
            assert bool(dump.tensors) == (case != "tokens")
            rows = dump.rows("model.layers.0", "output.0") if dump.tensors else np.zeros(0)
        if case == "small":
            assert len(rows) == 2
        if case == "prompts" and stage == "rollout":
            assert len(rows) == 9 and rows["position"].max() == 2


def test_data_parallel_ranks(tmp_path, checkpoint):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PROBE_", "DUMP_ON", "PROMPTS_ONLY"))}
    clean |= {"OMP_NUM_THREADS": "1", "PROBE_DUMP_DIR": str(tmp_path / "d"), "DUMP_ON": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(JOB.with_name("job_ddp.py")), str(checkpoint)]
    ran = subprocess.run([*launch, *script], env=clean, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert sorted(p.name for p in (tmp_path / "d" / "actor" / "step0").iterdir()) == ["rank0.h5", "rank1.h5"]
    with open_dump(tmp_path / "d" / "actor") as dump:
        assert dump.complete and dump.manifest["topology"]["dp"] == 2
        assert sorted(s.tokens.tolist() for s in dump.sequences) == [[5, 6, 7, 8], [6, 6, 7, 8]]
        assert dump.tensors["model.layers.1", "output.0"].rows == 8 and len(dump.weights) > 20
        assert np.isfinite(dump.tokens["logprob_recomputed"]).sum() == 6


@pytest.mark.parametrize("task", ["tensor", "tokens"])
def test_adapted_models(tmp_path, model, job, task):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()
    session = job(task=task)
    patched = peft.PeftModel.__call__
    try:
        models.patch_peft(peft.peft_model)
        with torch.no_grad():
            logits = adapted(torch.tensor([[1, 2, 3]])).logits
        adapted.generate(input_ids=torch.tensor([[4, 5]]), max_new_tokens=2, do_sample=False)
    finally:
        del peft.PeftModel.__call__
        assert peft.PeftModel.__call__ is patched
    session.close()
    with open_dump(tmp_path / "d" / "actor") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == [[1, 2, 3]]
        expected = torch.log_softmax(logits.double(), -1)[0, 1, 3].item()
        assert dump.tokens["logprob_recomputed"][2] == pytest.approx(expected, abs=1e-6)
        assert ("model.layers.0.mlp", "output.0") in dump.tensors or task == "tokens"
    with open_dump(tmp_path / "d" / "rollout") as dump:
        assert [len(s.tokens) for s in dump.sequences] == [4]
