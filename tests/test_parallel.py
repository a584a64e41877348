"""Which splits are refused, what each rank is given to run, and how several ranks' answers become one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probe.errors import CheckpointError, EngineError, UsageError
from probe.hooks.runners import launch
from probe.hooks.runners.job import ENGINES, DumpJob, Parallel, Sampling, TokenSequence
from probe.hooks.runners.megatron_pipeline import make_plan, position_multiple
from probe.hooks.runners.parallel import check_parallel, completed

DENSE = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4, "intermediate_size": 96}
MOE = DENSE | {"num_experts": 4}


def job(engine="megatron", **sizes) -> DumpJob:
    return DumpJob("actor", engine, Path("model"), Path("out"), source=Path("rollout"), parallel=Parallel(**sizes))


def check(engine, config, **sizes) -> None:
    check_parallel(job(engine, **sizes), ENGINES[engine], config)


@pytest.mark.parametrize(
    ("engine", "config", "sizes", "problem"),
    [
        ("megatron", DENSE, {"tp": 3}, "8 attention heads of model cannot be split evenly over --tp 3.*1, 2, 4, 8"),
        ("megatron", DENSE | {"intermediate_size": 97}, {"tp": 2}, "97 MLP features"),
        ("megatron", DENSE | {"num_attention_heads": 6, "num_key_value_heads": 3}, {"tp": 2}, "key-value heads"),
        ("megatron", DENSE, {"pp": 2, "vpp": 4}, "4 layers .* --pp 2 stages of --vpp 4 chunks"),
        ("megatron", DENSE, {"pp": 3}, "over --pp 3 stages: numbers that fit"),
        ("megatron", DENSE, {"vpp": 2}, "--vpp 2 .* add --pp"),
        ("megatron", DENSE, {"sp": True}, "--sp .* add --tp 2"),
        ("megatron", DENSE, {"ep": 2}, "--ep 2 needs experts"),
        ("megatron", MOE, {"ep": 3, "dp": 3}, "4 experts cannot be spread evenly over --ep 3"),
        ("megatron", MOE, {"ep": 2, "dp": 3}, "--ep 2 does not divide --dp 3"),
        ("megatron", DENSE, {"tp": 0}, "--tp 0 cannot work"),
        ("vllm", MOE, {"ep": 2}, "vLLM spreads experts over all --tp 1 ranks"),
        ("vllm", DENSE, {"tp": 3}, "8 attention heads of model cannot be split evenly over --tp 3"),
        ("vllm", DENSE, {"dp": 2}, "it is for megatron, fsdp and fsdp1"),
        ("vllm", DENSE, {"cp": 2}, "--cp has no effect on engine vllm: it is for megatron"),
        ("transformers", DENSE, {"tp": 2}, "--tp has no effect on engine transformers: it is for vllm and megatron"),
        ("fsdp", DENSE, {"sp": True}, "--sp has no effect on engine fsdp"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_splits_that_cannot_work_are_refused_in_a_sentence(engine, config, sizes, problem):
    with pytest.raises(UsageError, match=problem) as caught:
        check(engine, config, **sizes)
    assert "\n" not in str(caught.value)


def test_splits_that_work():
    for sizes in ({}, {"tp": 4}, {"tp": 2, "sp": True, "pp": 2, "vpp": 2, "cp": 2, "dp": 3}):
        check("megatron", DENSE, **sizes)  # two key-value heads on four ranks: Megatron shares them
    check("megatron", MOE, ep=2, dp=4)
    check("vllm", MOE, tp=2, pp=2, ep=2)
    check("fsdp1", DENSE, dp=2)


def test_experts_are_spread_over_ranks_that_exist_for_data_parallelism():
    assert completed("megatron", Parallel(ep=2)) == Parallel(ep=2, dp=2)
    assert completed("megatron", Parallel(ep=2, dp=4)).world == 4
    assert completed("vllm", Parallel(tp=2, ep=2)).world == 2
    assert Parallel(tp=2, pp=2, vpp=2, cp=2, sp=True).world == 8


# -- what each rank runs -----------------------------------------------------------------------------------------------

SIZES = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 2, 3]),
        "vpp": st.sampled_from([1, 2]),
        "cp": st.sampled_from([1, 2]),
        "dp": st.sampled_from([1, 2, 3]),
        "sp": st.booleans(),
        "experts": st.booleans(),
    }
)


@given(SIZES, st.lists(st.integers(1, 20), min_size=3, max_size=12), st.integers(1, 4))
def test_every_sequence_is_run_by_one_data_parallel_rank(sizes, lengths, micro_batch_size):
    experts = sizes.pop("experts")
    split = Parallel(**{**sizes, "ep": sizes["dp"] if experts else 1, "vpp": sizes["vpp"] if sizes["pp"] > 1 else 1})
    work = job(**vars(split))
    work.micro_batch_size = micro_batch_size
    sequences = [TokenSequence(f"s{n}", [1] * length, 1) for n, length in enumerate(lengths)]
    for layout in ("padded", "packed"):
        work.layout = layout
        plans = [make_plan(work, sequences, dp) for dp in range(split.dp)]
        run = [s.uid for plan in plans for batch in plan.micro_batches for s in batch]
        assert sorted(run) == sorted(s.uid for s in sequences)
        assert sum(plan.sequences for plan in plans) == len(sequences)
        if split.ep > 1:  # they wait for each other in every layer
            assert len({len(plan.micro_batches) for plan in plans}) == 1
        for plan in plans:
            assert split.vpp == 1 or len(plan.micro_batches) % split.pp == 0
            assert plan.form == plans[0].form and plan.form.multiple == position_multiple(split)
            assert plan.form.width % plan.form.multiple == 0
            for batch in filter(None, plan.micro_batches):
                needed = plan.form.lengths([s.tokens for s in batch])
                if plan.form.width:
                    assert plan.form.width >= (sum(needed) if layout == "packed" else max(needed))
                    assert layout == "packed" or plan.form.rows >= len(batch)
                else:
                    assert split.pp == split.ep == 1


@pytest.mark.parametrize(
    ("split", "multiple"),
    [({}, 1), ({"tp": 4}, 1), ({"tp": 4, "sp": True}, 4), ({"cp": 2}, 4), ({"tp": 2, "cp": 2, "sp": True}, 8)],
)
def test_lengths_are_padded_to_what_the_ranks_share(split, multiple):
    assert position_multiple(Parallel(**split)) == multiple


# -- what crosses the processes ----------------------------------------------------------------------------------------


def test_a_job_reaches_the_ranks_as_it_is(tmp_path):
    work = job(tp=2, sp=True)
    work.sampling, work.engine_args = Sampling(n=3, temperature=0.5), {"a": [1]}
    known = TokenSequence("q.s0", [1, 2, 3], 2, 1, "q", "r", np.array([np.nan, -1.25, -0.1]))
    sent = {"job": launch.dataclasses.asdict(work), "sequences": [launch._packed(known)]}
    (tmp_path / launch.WORK).write_text(json.dumps(sent, default=str))
    _, told, sequences = launch.read_work(tmp_path)
    assert told == work
    assert np.array_equal(sequences[0].logprobs, known.logprobs, equal_nan=True)
    assert {**vars(sequences[0]), "logprobs": 0} == {**vars(known), "logprobs": 0}


def test_too_few_sequences_or_devices_are_refused_before_anything_starts(monkeypatch):
    sequences = [TokenSequence("a", [1], 1)]
    with pytest.raises(UsageError, match="1 sequences cannot be dealt out to 2 data-parallel ranks: lower --dp"):
        launch.launch(job(dp=2), sequences, {}, None, entry="")
    monkeypatch.setattr(launch, "pick_device", lambda wanted: "cuda")
    monkeypatch.setattr(launch, "device_module", lambda kind: SimpleNamespace(device_count=lambda: 3))
    with pytest.raises(EngineError, match="4 processes need 4 devices, but there are 3: lower --tp, --pp"):
        launch.launch(job(tp=2, pp=2), sequences, {}, None, entry="")


def test_log_probs_of_several_ranks_are_put_together():
    def part(uid, *values):
        return TokenSequence(uid, [1, 2, 3], 1, logprobs=np.array(values))

    asked = [TokenSequence("b", [1, 2, 3], 1), TokenSequence("a", [1, 2, 3], 1)]
    joined = launch._joined(asked, [part("a", np.nan, np.nan, -2), part("b", np.nan, -3, -4), part("a", np.nan, -1, 7)])
    assert [s.uid for s in joined] == ["b", "a"]
    assert joined[1].logprobs.tolist()[1:] == [-1, -2]
    with pytest.raises(EngineError, match=r"no rank returned sequence a \(1 are missing\)"):
        launch._joined(asked, [part("b", 0, 0, 0)])


def write_errors(folder, *errors):
    for rank, (slug, problem, time) in enumerate(errors):
        error = {"rank": rank, "slug": slug, "problem": problem, "fix": "", "time": time}
        (folder / launch.ERROR.format(rank=rank)).write_text(json.dumps(error))


def test_the_rank_that_knows_why_is_heard_before_those_that_lost_it(tmp_path):
    write_errors(tmp_path, ("", "RuntimeError: connection closed", 1.0), ("bad-checkpoint", "it lacks a tensor", 2.0))
    error = launch._failure(tmp_path, 2, job(), 1)
    assert isinstance(error, CheckpointError) and str(error) == "it lacks a tensor."


def test_a_failure_that_nobody_explains_is_an_engine_error(tmp_path):
    (tmp_path / launch.OUTPUT).write_text("one\nthe last line\n")
    error = launch._failure(tmp_path, 2, job(), -9)
    assert isinstance(error, EngineError) and "status -9: the last line" in str(error) and error.fix.endswith("-v")
    write_errors(tmp_path, ("", "ValueError: x", 2.0), ("", "RuntimeError: y", 1.0))
    assert "rank 1 of 2 failed on model (RuntimeError: y)" in str(launch._failure(tmp_path, 2, job(), 1))


def test_events_and_output_are_passed_on_line_by_line(tmp_path, caplog):
    events, output = launch._Tail(tmp_path / "e"), launch._Tail(tmp_path / "o")
    seen = []
    launch._report(events, output, lambda *what: seen.append(what))  # nothing is there yet
    (tmp_path / "o").write_bytes(b"a line\nhalf a")
    (tmp_path / "e").write_text('{"what": "w", "done": 1, "total": 2}\n{"level": 30, "text": "t"}\n{"what"')
    with caplog.at_level(logging.INFO, logger="probe"):
        launch._report(events, output, lambda *what: seen.append(what))
        launch._report(events, output, lambda *what: seen.append(what))
        (tmp_path / "o").write_bytes(b"a line\nhalf a line\n")
        launch._report(events, output, lambda *what: seen.append(what))
    assert seen == [("w", 1, 2)]
    assert [(r.levelname, r.message) for r in caplog.records] == [
        *(("INFO", "a line"), ("WARNING", "t"), ("INFO", "half a line")),
    ]
