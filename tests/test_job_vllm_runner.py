"""What is recorded of a vLLM model runner, with stand-ins for the runner and for what receives its sequences."""

from __future__ import annotations

import functools
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_job_vllm_requests import new, order, result

from probe.hooks import attach, debugger
from probe.hooks.engines.vllm_parallel import RankPlace
from probe.hooks.jobs import vllm as job
from probe.hooks.jobs.session import Session
from probe.hooks.jobs.vllm_settings import what_is_left_out, why_tokens_only
from probe.hooks.taps import wrap_method
from probe.settings import Settings
from probe.store.reader import open_dump


class Recorder:
    """Stands in for a recorder: notes what it is told, and of which step."""

    def __init__(self, session):
        self.session, self.adapter, self.told, self.degraded = session, None, [], ""
        self.file = None

    def begin(self):
        self.file = self.session.step if self.session.step in self.session.recorded else None
        return self.file is not None

    def end(self):
        self.told.append(("end", self.file))

    def close(self):
        if self.file is not None:
            self.told.append(("close", self.file))
        self.file = None

    def records_later(self):
        return True

    def tokens_only(self, reason):
        self.degraded = reason

    def update_manifest(self, **more):
        self.manifest = more

    def add_tokens(self, uid, tokens, prompt_len, logprobs, *, weight_version=0, **more):
        self.told.append((uid, tokens.tolist(), prompt_len, weight_version, self.file))

    @property
    def sequences(self):
        return [entry for entry in self.told if len(entry) > 2]


class Runner:
    """Stands in for a model runner of vLLM: executes a pass, then samples; ``later`` hands results out as futures."""

    def __init__(self, later=False):
        compilation = SimpleNamespace(mode=0, cudagraph_mode=0)
        self.model_config = SimpleNamespace(max_model_len=64, logprobs_mode="raw_logprobs", enforce_eager=True)
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config,
            compilation_config=compilation,
            scheduler_config=SimpleNamespace(async_scheduling=later),
            speculative_config=None,
            cache_config=SimpleNamespace(enable_prefix_caching=False),
        )
        self.input_batch, self.requests, self.later = object(), {}, later
        self.model = torch.nn.Linear(2, 2)
        self.results = []

    def load_model(self):
        self.model.load_weights = lambda weights: set()

    def execute_model(self, scheduler_output):
        return None

    def sample_tokens(self, grammar):
        output = self.results.pop(0)
        return SimpleNamespace(get_output=lambda: output) if self.later else output


@pytest.fixture
def session(monkeypatch):
    """A session whose steps 0 and 2 are recorded, and the one recorder that it hands out."""
    fake = SimpleNamespace(step=0, recorded={0, 2}, settings=Settings(), said=[])
    fake.made = Recorder(fake)
    fake.recorder = lambda stage, model, runner: fake.made
    monkeypatch.setattr(job, "session", lambda: fake)
    monkeypatch.setattr(job, "samples_here", lambda: True)
    monkeypatch.setattr(job, "sketch_before_repacking", lambda wanted: None)
    monkeypatch.setattr(job, "trouble", fake.said.append)
    monkeypatch.setattr(job, "note", lambda text: None)
    return fake


def started(later=False):
    runner = Runner(later)
    recording = job.RunnerRecording(runner, SimpleNamespace())
    runner.load_model()
    return runner, recording


def run(runner, ordered, sampled=None):
    """Run one pass as vLLM's executor does."""
    runner.execute_model(ordered)
    if sampled is not None:
        runner.results.append(sampled)
        return runner.sample_tokens(None)
    return None


def test_a_sequence_is_written_when_it_ends_and_the_hooks_come_off(session):
    runner, _ = started()
    run(runner, order([new("a", [5, 6], max_tokens=2)], a=2), result(a=[11]))
    assert session.made.told == []
    run(runner, order(going=[("a", 2, 1)], a=1), result(a=[12]))
    assert session.made.told == [("a", [5, 6, 11, 12], 2, 0, 0), ("end", 0)]
    assert session.made.manifest["logprobs_mode"] == "raw_logprobs"


def test_results_that_arrive_later_are_written_by_the_runners_thread(session):
    """With async scheduling another thread waits for the device, while the next pass runs already."""
    runner, recording = started(later=True)
    first = run(runner, order([new("a", [5], max_tokens=2)], a=1), result(a=[11]))
    second = run(runner, order(going=[("a", 1, 1)], a=1), result(a=[12]))
    assert first.get_output().sampled_token_ids == [[11]]
    assert second.get_output().sampled_token_ids == [[12]]
    assert session.made.told == []
    run(runner, order(finished=["a"]))
    assert session.made.told == [("a", [5, 11, 12], 1, 0, 0), ("end", 0)]
    recording.close()
    assert session.made.told[2:] == [("close", 0)]


def test_weight_updates_are_counted_from_the_first_pass_on(session):
    runner, _ = started()
    runner.model.load_weights([])  # how the engine gets its first weights
    run(runner, order([new("a", [5], max_tokens=3)], a=1), result(a=[11]))
    for _ in range(3):  # one update in three buckets
        runner.model.load_weights([])
    run(runner, order(going=[("a", 1, 1)], a=1), result(a=[12]))
    run(runner, order(going=[("a", 2, 2)], a=1), result(a=[13]))
    first, closed, second, _ = session.made.told
    assert first == ("a", [5, 11], 1, 0, 0) and closed == ("close", 0)
    assert second == ("a#1", [5, 11, 12, 13], 2, 1, 0)


def test_the_file_is_complete_once_the_rollout_is_over(session):
    """A trainer that puts its engine to sleep, or sends weights, may kill it later without a word."""
    worker = SimpleNamespace(sleep=lambda level=1: level)
    runner = Runner()
    recording = job.RunnerRecording(runner, worker)
    runner.load_model()
    run(runner, order([new("a", [5], max_tokens=2)], a=1), result(a=[11]))
    assert worker.sleep(2) == 2
    assert session.made.told == []  # a request runs
    run(runner, order(going=[("a", 1, 1)], a=1), result(a=[12]))
    worker.sleep()
    assert session.made.told[1:] == [("end", 0), ("close", 0)]
    run(runner, order([new("b", [6], max_tokens=1)], b=1), result(b=[13]))
    runner.model.load_weights([])
    assert session.made.told[3:] == [("b", [6, 13], 1, 0, 0), ("end", 0), ("close", 0)]
    recording.close()
    assert not {"load_model", "execute_model", "sample_tokens"} & vars(runner).keys() and "sleep" in vars(worker)


def test_an_engine_that_its_program_drops_is_gone(session):
    runner, _ = started()
    run(runner, order([new("a", [5])], a=1), result(a=[11]))
    known = weakref.ref(runner.model)
    del runner, _
    gc.collect()
    assert known() is None


def test_a_request_over_several_steps_is_in_every_recorded_one(session):
    runner, _ = started()
    run(runner, order([new("a", [5])], a=1), result(a=[11]))
    # WHEN the trainer goes on to a step that is not recorded, and then to one that is
    session.step = 1
    run(runner, order([new("b", [6], max_tokens=1)], [("a", 1, 1)], a=1, b=1), result(a=[12], b=[13]))
    assert session.made.told == [("a", [5, 11], 1, 0, 0), ("close", 0)]
    session.step = 2
    runner.requests["a"] = SimpleNamespace(
        prompt_token_ids=[5], output_token_ids=[11, 12], sampling_params=SimpleNamespace(max_tokens=3)
    )
    run(runner, order([new("c", [7], max_tokens=1)], [("a", 2, 2)], a=1, c=1), result(a=[14], c=[15]))
    # THEN what it generated in between is read from the runner
    assert sorted(session.made.sequences[1:]) == [("a#1", [5, 11, 12, 14], 1, 0, 2), ("c", [7, 15], 1, 0, 2)]


@pytest.mark.parametrize("later", [False, True])
def test_requests_that_have_ended_are_forgotten(session, later):
    """Also where the scheduler says so when nothing is recorded any more, or not yet again."""
    runner, recording = started(later)
    for n, name in enumerate("abcdef"):
        session.step = n // 2  # of which the middle one is not recorded
        finished = ["abcdef"[n - 1]] if n else []
        given = run(
            runner, order([new(name, [5], max_tokens=1)], finished=finished, **{name: 1}), result(**{name: [7]})
        )
        if later:
            given.get_output()
    run(runner, order(finished=["f"]))
    assert not recording.ledger._open and [entry[0] for entry in session.made.sequences] == ["a", "b", "e", "f"]


def test_shutting_down_keeps_what_is_unfinished(session):
    runner, recording = started()
    run(runner, order([new("a", [5])], a=1), result(a=[11]))
    recording.close()
    assert session.made.told == [("a", [5, 11], 1, 0, 0), ("close", 0)]
    run(runner, order(going=[("a", 1, 1)], a=1), result(a=[12]))
    assert len(session.made.told) == 2


@pytest.mark.parametrize("order_of_making", ["engine first", "debugger first"])
def test_a_scripts_own_debugger_is_left_alone_with_its_engine(session, monkeypatch, tmp_path, order_of_making):
    monkeypatch.setattr(debugger, "on_created", [])
    monkeypatch.setattr(debugger, "created", False)
    make = functools.partial(debugger.PrecisionDebugger, enabled=True, dump_path=str(tmp_path))
    session.made.discard = lambda: session.made.told.append("discarded")
    if order_of_making == "debugger first":
        make()
        runner, recording = started()
        run(runner, order([new("a", [5])], a=1), result(a=[11]))
        assert session.made.told == [] and recording.recorder is None and not recording.wants_sketches()
        return
    runner, recording = started()
    run(runner, order([new("a", [5])], a=1), result(a=[11]))
    make(task="tokens")  # records nothing by itself
    assert session.made.told == []
    for _ in range(2):
        make()
    run(runner, order(going=[("a", 1, 1)], a=1), result(a=[12]))
    recording.close()
    assert session.made.told == ["discarded"]


def test_trouble_ends_the_recording_and_not_the_job(session):
    runner, _ = started()
    broken = order([new("a", [5])], a=1)
    broken.scheduled_cached_reqs = None  # a vLLM whose scheduler says it in other words
    output = run(runner, broken, result(a=[11]))
    assert output.sampled_token_ids == [[11]]
    assert len(session.said) == 1 and "no longer recorded" in session.said[0]
    run(runner, order(going=[("a", 1, 1)], a=1), result(a=[12]))
    assert session.made.sequences == [] and len(session.said) == 1


def test_the_jobs_own_errors_are_its_own(session):
    def raising(original):
        def execute_model(scheduler_output):
            raise MemoryError("the job's")

        return execute_model

    runner = Runner()
    wrap_method(runner, "execute_model", raising)
    job.RunnerRecording(runner, SimpleNamespace())
    runner.load_model()
    with pytest.raises(MemoryError, match="the job's"):
        run(runner, order([new("a", [5])], a=1))
    assert session.said == []


def test_warm_up_serves_nobody(session):
    runner, _ = started()
    run(runner, order([new("_v2_mixed_warmup0", [5], max_tokens=1)], _v2_mixed_warmup0=1))
    assert session.made.told == [] and session.made.file is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, ""),
        ({"mode": 3}, "enforce_eager=True"),
        ({"cudagraph_mode": SimpleNamespace(value=(2, 1))}, "enforce_eager=True"),
        ({"input_batch": None}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"speculative_config": object()}, "speculative decoding"),
    ],
)
def test_why_there_are_no_tensors_is_said_with_what_to_set(change, words):
    runner = Runner()
    runner.model_config.enforce_eager = "mode" not in change and "cudagraph_mode" not in change
    for name, value in change.items():
        owner = next(
            (o for o in (runner, runner.vllm_config) if hasattr(o, name)), runner.vllm_config.compilation_config
        )
        setattr(owner, name, value)
    reason = why_tokens_only(runner)
    assert words in reason and bool(reason) == bool(words)


def test_a_prefix_cache_leaves_rows_out_and_says_so():
    runner = Runner()
    assert what_is_left_out(runner, Settings()) == []
    runner.vllm_config.cache_config.enable_prefix_caching = True
    assert "enable_prefix_caching=False" in what_is_left_out(runner, Settings())[0]


class Tiny(torch.nn.Module):
    """Stands in for a model of vLLM, which it is told by where its classes come from."""

    __module__ = "vllm.tiny"

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(4, 4, bias=False)

    def forward(self, input_ids, positions):
        return self.proj(torch.nn.functional.one_hot(input_ids, 4).float())


@pytest.mark.parametrize("task", ["tokens", "tensor"])
def test_what_the_real_recorder_writes(task, tmp_path, monkeypatch):
    """The file of a step, with its sketches, and rows for the tensors that the runner's batch places."""
    # GIVEN a job's own session, and a runner on one rank
    axes = dict.fromkeys(("tp", "pp", "cp", "ep", "dp"), 0)
    place = RankPlace({**dict.fromkeys(axes, 1), "vpp": 1, "sp": False}, axes, 0, 1)
    monkeypatch.setitem(attach.RUNNER_PLACES, "vllm", lambda runner: place)
    monkeypatch.setenv("PROBE_DUMP_DIR", str(tmp_path / "dump"))
    real = Session(Settings(enabled=True, dump_path=str(tmp_path / "dump"), task=task))
    monkeypatch.setattr(job, "session", lambda: real)
    monkeypatch.setattr(job, "samples_here", lambda: True)
    monkeypatch.setattr(job, "sketch_before_repacking", lambda wanted: None)
    runner = Runner()
    runner.model = Tiny()
    runner.model_config.hf_config, runner.model_config.model = SimpleNamespace(to_dict=dict), "tiny"
    runner.attn_groups = []
    batch = SimpleNamespace(req_ids=["a"], req_id_to_index={"a": 0}, num_computed_tokens_cpu=[0])
    batch.token_ids_cpu = np.array([[1, 2, 3]])
    runner.input_batch = batch
    runner.requests["a"] = SimpleNamespace(num_prompt_tokens=3, num_tokens=3, sampling_params=None)
    original = Runner.execute_model

    def execute_model(self, scheduler_output):
        self.model(input_ids=torch.tensor([1, 2, 3]), positions=torch.arange(3))
        return original(self, scheduler_output)

    monkeypatch.setattr(Runner, "execute_model", execute_model)
    recording = job.RunnerRecording(runner, SimpleNamespace())
    runner.load_model()
    # WHEN a prompt runs, is answered by one token, and the worker shuts down
    run(runner, order([new("a", [1, 2, 3], max_tokens=1)], a=3), result(a=[0]))
    recording.close()
    # THEN all of it is in the dump
    with open_dump(tmp_path / "dump") as dump:
        assert dump.complete and dump.engine == "vllm" and dump.manifest["task"] == task
        assert [s.tokens.tolist() for s in dump.sequences] == [[1, 2, 3, 0]]
        assert dump.sequences[0].uid == "a" and dump.sequences[0].prompt_len == 3
        assert dump.tokens["logprob"][3] == 0 and np.isnan(dump.tokens["logprob"][:3]).all()
        assert list(dump.weights) == ["proj.weight"] and dump.weights["proj.weight"].rows.size
        assert bool(dump.tensors) == (task == "tensor")
        if dump.tensors:
            assert dump.rows("proj", "output.0")["position"].tolist() == [0, 1, 2]
