"""Calls of a job's models that are easily mistaken: whose they are, other threads, tracing, captured graphs."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from capture_tools import by_row, hook_count
from checkpoints import make_checkpoint
from job_patches import expected_logprobs, patched_job, said, stages

from probe.hooks.debugger import PrecisionDebugger
from probe.hooks.jobs import models
from probe.hooks.jobs.optimizers import OptimizerSteps
from probe.store.reader import open_dump


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen2 checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def load(checkpoint):
    """A function that returns the checkpoint on transformers, a new object each time."""
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture
def model(load):
    """The checkpoint on transformers."""
    return load()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Patch transformers for one test, in a session whose settings the test gives; the folder is ``tmp_path / d``."""
    return patched_job(tmp_path, monkeypatch)


# -- a debugger of the script's own ------------------------------------------------------------------------------------


def test_a_debugger_that_is_older_than_the_patches(tmp_path, model, job):
    # GIVEN a debugger made before transformers is imported, and so patched
    debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    job()
    # WHEN the model is called before and after the debugger starts
    model(input_ids=torch.tensor([[1, 2, 3]]))
    with debugger.start(model):
        model(input_ids=torch.tensor([[4, 5]]))
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
    # THEN it alone records
    assert stages(tmp_path) == ["actor"]
    with open_dump(tmp_path / "d") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == [[4, 5]] and len(dump.files) == 1 + bool(dump.tokens.size)


def test_trouble_while_standing_aside_is_not_the_scripts(tmp_path, job, monkeypatch):
    session = job()

    def broken():
        raise RuntimeError("no room")

    monkeypatch.setattr(session, "discard_plain", broken)
    PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d"))
    assert "no room" in said()


# -- tracing and graphs ------------------------------------------------------------------------------------------------


class _Scorer(torch.nn.Module):
    """A user's module around a language model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False)


def test_torch_fx_traces_models_as_if_nothing_was_patched(tmp_path, model, job):
    job()

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module, path):
            return path == "model"

    graph = Leaves().trace(_Scorer(model))
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "output"]
    assert not (tmp_path / "d" / "actor").exists()


def test_what_others_put_in_the_place_of_modules_call_is_called(tmp_path, model, job, monkeypatch):
    session = job()
    original, met = torch.nn.Module.__call__, []

    def counting(self, *args, **kwargs):
        met.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", counting)
    model(input_ids=torch.tensor([[1, 2, 3]]))
    session.close()
    assert met[0] is model and stages(tmp_path) == ["actor"]


def test_a_graph_is_captured_undisturbed(tmp_path, model, job, monkeypatch):
    # GIVEN a device whose stream captures a graph
    session = job()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        model(input_ids=ids)
        assert not session._recorders
        # WHEN it does no more
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        model(input_ids=ids)
    session.close()
    assert stages(tmp_path) == ["actor"] and said().count("captured as a graph") == 1


def test_compiled_modules_that_are_no_language_models(tmp_path, model, job, monkeypatch):
    from torch._dynamo import eval_frame

    session = job()
    monkeypatch.setattr(eval_frame.OptimizedModule, "__call__", eval_frame.OptimizedModule.__call__)
    models.patch_compiled(eval_frame)
    torch.compile(torch.nn.Linear(3, 2), backend="eager")(torch.ones(4, 3))
    assert not session._recorders and "Linear" not in said()
    for _ in range(2):
        torch.compile(_Scorer(model), backend="eager")(torch.tensor([[1, 2, 3]]))
    session.close()
    assert not (tmp_path / "d" / "actor").exists()
    assert said().count("inside a compiled _Scorer is not recorded") == 1


# -- models that share a stage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("old_logprobs", [False, True])
def test_a_reference_that_is_called_before_the_policy(tmp_path, model, load, job, old_logprobs):
    session, policy = job(), load()
    batch = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.no_grad():
        model(input_ids=batch)
        if old_logprobs:
            policy(input_ids=batch)
    policy(input_ids=batch).logits.sum().backward()
    with torch.no_grad():
        model(input_ids=torch.tensor([[7, 8]]))
    session.clock.count()
    policy(input_ids=batch)
    with torch.no_grad():
        model(input_ids=batch)
    session.close()
    # THEN each has a stage of its own, with all that it did in the first step
    assert stages(tmp_path) == ["actor", "reference"]
    for stage, ids in (("reference", [*batch.tolist(), [7, 8]]), ("actor", batch.tolist() * (1 + old_logprobs))):
        assert [p.name for p in (tmp_path / "d" / stage).iterdir()] == ["step0"]
        with open_dump(tmp_path / "d" / stage) as dump:
            assert dump.stage == stage and dump.complete and len(dump.files) == 1
            assert [s.tokens.tolist() for s in dump.sequences] == ids


def test_a_file_that_changes_its_stage_survives_a_kill(tmp_path, model, load, job):
    session, policy = job(), load()
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    policy(input_ids=torch.tensor([[4, 5]])).logits.sum().backward()
    for recorder in session._recorders.values():
        recorder._file.writer.abandon()
        recorder._file = None
    with open_dump(tmp_path / "d" / "reference") as dump:
        assert dump.stage == "reference" and not dump.complete
        assert [s.tokens.tolist() for s in dump.sequences] == [[1, 2, 3]]


@pytest.mark.parametrize("how", ["trained", "generating", "named"])
def test_two_models_of_one_stage_keep_their_sequences_apart(tmp_path, model, load, job, how):
    session, other = job(stage="reference" if how == "named" else ""), load()
    for one, ids in ((model, [1, 2, 3]), (other, [4, 5, 6]), (model, [7, 8])):
        if how == "generating":
            one.generate(torch.tensor([ids]), max_new_tokens=2, do_sample=False)
        else:
            one(input_ids=torch.tensor([ids])).logits.sum().backward()
    session.close()
    with open_dump(tmp_path / "d") as dump:
        assert [(s.uid, s.tokens.tolist()[:2]) for s in dump.sequences] == [
            ("s0", [1, 2]),
            ("s1", [7, 8]),
            ("m1.s0", [4, 5]),
        ]
    assert "several models run as this" in said()


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["tensor", "tokens"])
def test_threads_that_share_a_model(tmp_path, model, job, task):
    # GIVEN a call that waits in the middle while another thread calls the same model
    session = job(task=task)
    inside, go_on = threading.Event(), threading.Event()
    first = [11, 12, 13, 14]

    def wait(module, args):
        if threading.current_thread().name == "first":
            inside.set()
            assert go_on.wait(60)

    handle = model.model.layers[1].register_forward_pre_hook(wait)

    def call():
        with torch.no_grad():
            model(input_ids=torch.tensor([first]))

    thread = threading.Thread(target=call, name="first")
    thread.start()
    assert inside.wait(60)
    with torch.no_grad():
        model(input_ids=torch.tensor([[21, 22]]))
    go_on.set()
    thread.join()
    handle.remove()
    # and one more after both
    with torch.no_grad():
        model(input_ids=torch.tensor([[31, 32]]))
    session.close()
    # THEN the one beside is left out, whole
    assert hook_count(model) == 0 and "threads call the model at the same time" in said()
    with open_dump(tmp_path / "d" / "actor") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == [first, [31, 32]]
        scores = dump.tokens["logprob_recomputed"][dump.tokens["sequence"] == 0]
        assert scores[1:] == pytest.approx(expected_logprobs(model, first)[1:], abs=1e-5)
        if task == "tensor":
            assert len(by_row(dump, "model.layers.0", "output.0")) == 6


# -- trouble -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["_note_tokens", "_begin", "store"])
def test_trouble_that_words_itself_anew_is_said_once(tmp_path, model, job, monkeypatch, where):
    session, tries = job(), []

    def broken(*args):
        tries.append(1)
        raise RuntimeError(f"attempt {len(tries)}")

    broken.__name__ = where
    monkeypatch.setattr(models.Generation if where == "store" else models, where, broken)
    for _ in range(3):
        with torch.no_grad():
            model(input_ids=torch.tensor([[1, 2, 3]]))
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False)
    session.close()
    assert hook_count(model) == 0
    assert sum("attempt" in line for line in said().splitlines()) == (1 if where == "_begin" else 2)
    assert where != "_note_tokens" or len(tries) == 2  # the recorders have stopped


def test_offloaded_models_are_passed_over_and_it_is_said(tmp_path, model, job):
    session = job()
    model.hf_device_map = {"": "disk"}
    held = model.lm_head.weight
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(held.new_empty(1, device="meta"))
    assert not models._records(model) and "meta device" in said()
    session.close()


# -- optimizer steps ---------------------------------------------------------------------------------------------------


def test_optimizers_that_are_made_anew(tmp_path):
    weight, critic = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))

    def counted(steps):
        total = []
        count = OptimizerSteps(lambda: total.append(1))
        steps(lambda optimizer: count.stepped(optimizer, (), {}))
        return len(total)

    def sgd(*parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    def alone(step):
        for _ in range(3):  # one per epoch
            optimizer = sgd(weight)
            for _ in range(4):
                step(optimizer)
            del optimizer
            gc.collect()

    def each_step(step):
        for _ in range(5):
            one, two = sgd(weight), sgd(critic)
            step(one)
            step(two)
            del one, two
            gc.collect()

    def one_anew(step):
        kept = sgd(critic)
        for _ in range(3):
            optimizer = sgd(weight)
            for _ in range(2):
                step(optimizer)
                step(kept)
            del optimizer
            gc.collect()

    def per_layer(step):
        parts = [sgd(weight), sgd(critic)]
        for _ in range(4):
            for part in parts:
                step(part)

    assert [counted(case) for case in (alone, each_step, one_anew, per_layer)] == [12, 5, 6, 4]
