"""Rows of vLLM passes, on a stand-in of the model runner's batch bookkeeping (no engine is started).

``StandInRunner`` has the attributes that vLLM 0.32's GPUModelRunner has and the adapter reads, and runs passes composed
as vLLM's scheduler composes them: chunked prefill mixed with decode rows, requests that leave, are preempted and come
back, cached prefixes, padding. Its model returns what it was given, so that a misplaced row shows.
"""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from probe.errors import CaptureError
from probe.hooks.capture import Capture
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.vllm import VllmAdapter
from probe.hooks.engines.vllm_model_runner import record_schedule, refuse_unsupported
from probe.store.reader import open_dump
from probe.store.writer import DumpWriter

VOCAB, MAX_LEN = 97, 64
MANIFEST = {"schema": 1, "stage": "rollout", "engine": {"name": "vllm", "version": ""}}


class StandInModel(nn.Module):
    """A model whose hidden states are (token, row of the pass) and whose logits are hidden states of chosen rows."""

    def __init__(self):
        super().__init__()
        self.embed_tokens, self.logits_processor = nn.Identity(), nn.Identity()

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        tokens = inputs_embeds if input_ids is None else input_ids.to(torch.float32)
        return self.embed_tokens(torch.stack([tokens, torch.arange(len(tokens), dtype=torch.float32)], 1))

    def load_weights(self, weights):
        return {name for name, _ in weights}


class StandInRunner:
    """The bookkeeping of vLLM's model runner that rows are read from, driven by hand instead of by a scheduler."""

    def __init__(self):
        self.model, self.requests, self.alive = StandInModel(), {}, []
        self.input_batch = types.SimpleNamespace(
            req_ids=[],
            req_id_to_index={},
            num_computed_tokens_cpu=np.zeros(8, np.int32),
            token_ids_cpu=np.zeros((8, MAX_LEN), np.int32),
            is_token_ids=np.ones((8, MAX_LEN), bool),
        )
        self.input_ids = types.SimpleNamespace(gpu=torch.zeros(MAX_LEN, dtype=torch.int32))
        self.vllm_config = types.SimpleNamespace(
            speculative_config=None,
            parallel_config=types.SimpleNamespace(prefill_context_parallel_size=1, enable_dbo=False),
        )
        self.padding, self.mrope, self.embeds, self.shift = 0, False, False, 0

    def execute_model(self, output):
        batch, ids, positions = self.input_batch, [], []
        batch.req_ids = list(output.num_scheduled_tokens)
        batch.req_id_to_index = {name: i for i, name in enumerate(batch.req_ids)}
        for name, wanted in output.num_scheduled_tokens.items():
            index, state = batch.req_id_to_index[name], self.requests[name]
            batch.num_computed_tokens_cpu[index] = state.num_computed_tokens
            batch.token_ids_cpu[index, : len(state.tokens)] = state.tokens
            stop = state.num_computed_tokens + wanted
            ids += state.tokens[state.num_computed_tokens : stop]
            positions += range(state.num_computed_tokens, stop)
            state.num_computed_tokens = stop
        ids, positions = ids + [0] * self.padding, positions + [0] * self.padding
        tokens = torch.tensor(ids, dtype=torch.int32)
        self.input_ids.gpu[: len(ids)] = tokens
        where = torch.tensor(positions) + self.shift
        where = torch.stack([where // 3] * 3) if self.mrope else where  # an image's tokens share a position
        hidden = self.model(
            input_ids=None if self.embeds else tokens,
            positions=where,
            inputs_embeds=tokens.to(torch.float32) if self.embeds else None,
        )
        last = np.cumsum(list(output.num_scheduled_tokens.values())) - 1
        self.model.logits_processor(hidden[torch.from_numpy(last)])
        return hidden

    def add(self, name, prompt, cached=0, **params):
        """Register a new request; ``cached`` of its tokens are taken from the prefix cache."""
        settings = {"eos_token_id": None, "stop_token_ids": [], **params}
        self.requests[name] = types.SimpleNamespace(
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=cached,
            sampling_params=types.SimpleNamespace(**settings),
        )
        self.fresh = [*getattr(self, "fresh", []), types.SimpleNamespace(req_id=name, num_computed_tokens=cached)]

    def step(self, scheduled, sampled=()):
        """Run one pass of ``scheduled`` (request -> number of tokens), then append the tokens that were sampled."""
        for name in scheduled:
            self.requests[name].num_tokens = len(self.requests[name].tokens)
        output = types.SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_new_reqs=getattr(self, "fresh", []))
        self.fresh = []
        hidden = self.execute_model(output)
        for name, token in dict(sampled).items():
            self.requests[name].tokens.append(token)
        return hidden


class Session:
    """A running capture of a stand-in runner."""

    def __init__(self, folder: Path, **options):
        self.folder, self.runner = folder, StandInRunner()
        self.writer = DumpWriter(folder / "rollout" / "step0" / "rank0.h5", MANIFEST)
        self.adapter = VllmAdapter(SequenceBook(self.writer), self.runner, **options)
        self.capture = Capture(self.writer, self.adapter)
        self.capture.attach(self.runner.model)
        self.undo = record_schedule(self.runner, self.adapter)

    def done(self):
        self.undo()
        self.capture.detach()
        self.writer.close()
        return open_dump(self.folder)


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path)


def stored(dump, module="embed_tokens", slot="output.0"):
    """Return (uid, position) -> token, after checking that each row's value is the token that its row table names."""
    rows, values = dump.rows(module, slot), dump.read(module, slot)
    assert np.array_equal(values[:, 0], rows["token"])
    return {(dump.sequences[r["sequence"]].uid, int(r["position"])): int(r["token"]) for r in rows}


def tokens_of(*named):
    """Return what ``stored`` returns when every token of these (uid, tokens) ran."""
    return {(uid, position): token for uid, tokens in named for position, token in enumerate(tokens)}


def test_chunked_prefill_mixed_with_decode(session):
    run, long, short = session.runner, list(range(10, 53)), [5, 6, 7]
    run.add("0-aa", long)
    run.add("1-bb", short)
    run.step({"0-aa": 13, "1-bb": 3}, {"1-bb": 60})
    run.step({"1-bb": 1, "0-aa": 15}, {"1-bb": 61})
    run.step({"0-aa": 15, "1-bb": 1}, {"0-aa": 70, "1-bb": 62})
    run.step({"0-aa": 1}, {"0-aa": 71})
    with session.done() as dump:
        assert stored(dump) == tokens_of(("0-aa", [*long, 70]), ("1-bb", [*short, 60, 61]))
        assert [(s.prompt_len, s.length, s.cached) for s in dump.sequences] == [(43, 44, 0), (3, 5, 0)]
        logits = stored(dump, "logits_processor")
        assert logits == {("0-aa", p): t for p, t in ((12, 22), (27, 37), (42, 52), (43, 70))} | {
            ("1-bb", p): t for p, t in ((2, 7), (3, 60), (4, 61))
        }


def test_padding_rows_belong_to_nobody(session):
    session.runner.padding = 5
    session.runner.add("0-aa", [5, 6, 7])
    session.runner.step({"0-aa": 3})
    with session.done() as dump:
        assert stored(dump) == tokens_of(("0-aa", [5, 6, 7]))


def test_positions_of_images_are_no_row_numbers(session):
    session.runner.mrope = True
    session.runner.add("0-aa", [5, 6, 7, 8, 9])
    session.runner.step({"0-aa": 3})
    session.runner.step({"0-aa": 2})
    with session.done() as dump:
        assert stored(dump) == tokens_of(("0-aa", [5, 6, 7, 8, 9]))


def test_embeddings_instead_of_ids(session):
    """The runner keeps the ids beside the embeddings; positions given as embeddings only have no id."""
    run = session.runner
    run.embeds, run.enable_prompt_embeds = True, True
    run.add("0-aa", [5, 6, 7, 8])
    run.input_batch.is_token_ids[0, 1] = False
    run.step({"0-aa": 4})
    with session.done() as dump:
        rows = dump.rows("embed_tokens", "output.0")
        assert rows["token"].tolist() == [5, -1, 7, 8]
        assert dump.read("embed_tokens", "output.0")[:, 0].tolist() == [5, 6, 7, 8]


def test_preemption_runs_rows_again_under_the_same_keys(session):
    run = session.runner
    run.add("0-aa", [5, 6, 7])
    run.add("1-bb", [8, 9])
    run.step({"0-aa": 3, "1-bb": 2}, {"0-aa": 20, "1-bb": 30})
    run.step({"0-aa": 1}, {"0-aa": 21})  # 1-bb lost its blocks
    run.requests["1-bb"].num_computed_tokens = 0
    run.step({"0-aa": 1, "1-bb": 2}, {"0-aa": 22})
    run.step({"1-bb": 1}, {"1-bb": 31})
    with session.done() as dump:
        assert len(dump.sequences) == 2
        assert [s.cached for s in dump.sequences] == [0, 0]
        assert [s.prompt_len for s in dump.sequences] == [3, 2]
        assert stored(dump) == tokens_of(("0-aa", [5, 6, 7, 20, 21]), ("1-bb", [8, 9, 30]))
        assert len(dump.rows("embed_tokens", "output.0")) == 5 + 2 + 3


def test_a_cached_prefix_is_counted_and_its_ids_are_known(session):
    run, prompt = session.runner, list(range(10, 30))
    run.add("0-aa", prompt)
    run.step({"0-aa": 20})
    run.add("1-bb", prompt, cached=16)
    run.step({"1-bb": 3})
    run.step({"1-bb": 1}, {"1-bb": 50})
    run.step({"1-bb": 1})
    known = session.adapter.known_tokens()
    with session.done() as dump:
        assert [s.cached for s in dump.sequences] == [0, 16]
        rows = stored(dump)
        assert {p for uid, p in rows if uid == "1-bb"} == {16, 17, 18, 19, 20}
    assert known == {"0-aa": prompt, "1-bb": [*prompt, 50]}


def test_the_same_prompt_several_times_is_several_sequences(session):
    names = ["0-aa", "1-bb", "2-cc"]
    for name in names:
        session.runner.add(name, [5, 6, 7])
    session.runner.step(dict.fromkeys(names, 3), {name: 20 + i for i, name in enumerate(names)})
    session.runner.step({"2-cc": 1, "0-aa": 1})  # one has ended, the others changed places
    with session.done() as dump:
        assert stored(dump) == tokens_of(("0-aa", [5, 6, 7, 20]), ("1-bb", [5, 6, 7]), ("2-cc", [5, 6, 7, 22]))


@pytest.mark.parametrize("params", [{"eos_token_id": 40}, {"stop_token_ids": [39, 40]}], ids=["eos", "stop"])
def test_rows_past_the_stop_are_not_stored(session, params):
    """Async scheduling has the next pass under way when a request turns out to have ended."""
    run = session.runner
    run.add("0-aa", [5, 40, 7], **params)
    run.add("1-bb", [8, 9], **params)
    run.step({"0-aa": 3, "1-bb": 2}, {"0-aa": 20, "1-bb": 30})
    run.step({"0-aa": 1, "1-bb": 1}, {"0-aa": 40, "1-bb": 31})
    run.step({"0-aa": 1, "1-bb": 1}, {"0-aa": 50, "1-bb": 32})
    run.step({"0-aa": 1, "1-bb": 1}, {"1-bb": 33})
    with session.done() as dump:
        assert stored(dump) == tokens_of(("0-aa", [5, 40, 7, 20]), ("1-bb", [8, 9, 30, 31, 32]))
        assert dump.sequences[0].length == 4
        assert max(p for uid, p in stored(dump, "logits_processor") if uid == "0-aa") == 3


def test_new_weights_within_a_request_begin_another_piece(session):
    run = session.runner
    run.model.load_weights([])  # before any pass: the weights that the first pass runs with
    run.add("0-aa", [5, 6, 7])
    run.step({"0-aa": 3}, {"0-aa": 20})
    run.step({"0-aa": 1}, {"0-aa": 21})
    run.model.load_weights([("a", 1)])
    run.model.load_weights([("b", 1)])  # one update that arrives in two buckets
    run.step({"0-aa": 1}, {"0-aa": 22})
    run.add("1-bb", [8, 9])
    run.step({"0-aa": 1, "1-bb": 2}, {"0-aa": 23})
    known = session.adapter.known_tokens()
    with session.done() as dump:
        assert [s.uid for s in dump.sequences] == ["0-aa", "0-aa#1", "1-bb"]
        assert [s.trajectory for s in dump.sequences] == ["0-aa", "0-aa", "1-bb"]
        assert [s.weight_version for s in dump.sequences] == [1, 2, 2]
        assert [s.prompt_len for s in dump.sequences] == [3, 5, 2]
        assert stored(dump) == tokens_of(("0-aa", [5, 6, 7, 20]), ("1-bb", [8, 9])) | {
            ("0-aa#1", 4): 21,
            ("0-aa#1", 5): 22,
        }
    assert known["0-aa#1"] == [5, 6, 7, 20, 21, 22]


def test_new_weights_after_a_preemption_count_what_was_generated_as_prompt(session):
    run = session.runner
    run.add("0-aa", [5, 6, 7])
    run.step({"0-aa": 3}, {"0-aa": 20})
    run.step({"0-aa": 1}, {"0-aa": 21})
    run.model.load_weights([])
    run.requests["0-aa"].num_computed_tokens = 0
    run.step({"0-aa": 2})
    run.step({"0-aa": 3}, {"0-aa": 22})
    with session.done() as dump:
        assert [(s.uid, s.prompt_len, s.length) for s in dump.sequences] == [("0-aa", 3, 4), ("0-aa#1", 5, 5)]


def test_an_id_used_again_is_another_sequence(session):
    run = session.runner
    run.add("0-aa", [5, 6, 7])
    run.step({"0-aa": 3})
    run.add("0-aa", [8, 9])
    run.step({"0-aa": 2})
    with session.done() as dump:
        assert stored(dump) == tokens_of(("0-aa", [5, 6, 7]), ("0-aa#1", [8, 9]))
        assert [s.prompt_len for s in dump.sequences] == [3, 2]


def test_passes_outside_execute_model_are_not_captured(session):
    session.runner.model(input_ids=torch.zeros(4, dtype=torch.int32), positions=torch.arange(4))
    session.runner.add("0-aa", [5, 6])
    session.runner.step({"0-aa": 2})
    with session.done() as dump:
        assert stored(dump) == tokens_of(("0-aa", [5, 6]))


def test_a_pass_at_other_positions_than_scheduled_is_left_out_and_counted(session):
    session.runner.add("0-aa", [5, 6])
    session.runner.step({"0-aa": 2})
    session.runner.shift = 1
    session.runner.add("1-bb", [7, 8, 9])
    session.runner.step({"1-bb": 3})
    assert session.adapter.passes_unknown == 1
    with session.done() as dump:
        assert stored(dump) == tokens_of(("0-aa", [5, 6]))


def test_logits_of_unknown_rows_are_left_out_and_counted(session):
    session.runner.add("0-aa", [5, 6, 7])
    hidden = session.runner.step({"0-aa": 3})
    session.runner.model.logits_processor(hidden[:2])  # a view: prompt log-probs
    session.runner.model.logits_processor(hidden[[1, 0]])
    assert session.adapter.logits_rows_unknown == 2
    with session.done() as dump:
        assert stored(dump, "logits_processor") == tokens_of(("0-aa", [5, 6, 7]))


def test_the_runner_is_left_as_it_was(session):
    session.runner.add("0-aa", [5, 6])
    session.runner.step({"0-aa": 2})
    session.done().close()
    assert "execute_model" not in vars(session.runner)
    assert "load_weights" not in vars(session.runner.model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda runner: setattr(runner, "input_batch", None), "second-generation model runner"),
        (lambda runner: setattr(runner.vllm_config, "speculative_config", object()), "speculative decoding"),
        (
            lambda runner: setattr(runner.vllm_config.parallel_config, "prefill_context_parallel_size", 2),
            "prefill context parallelism",
        ),
        (lambda runner: setattr(runner.vllm_config.parallel_config, "enable_dbo", True), "dual batch overlap"),
    ],
    ids=["v2", "speculative", "context-parallel", "dual-batch"],
)
def test_runners_whose_rows_are_not_certain_are_refused(change, said):
    runner = StandInRunner()
    refuse_unsupported(runner)
    change(runner)
    with pytest.raises(CaptureError, match=said):
        refuse_unsupported(runner)
