"""``run_dump`` on a tiny checkpoint with transformers: tokens, log-probs, output folders, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from capture_tools import by_row
from checkpoints import make_checkpoint
from dump_tools import write_dump

from probe.errors import (
    CheckpointError,
    DumpError,
    EngineError,
    OutputExistsError,
    ProbeError,
    PromptsError,
    UsageError,
)
from probe.hooks.runners.inprocess import token_logprobs
from probe.hooks.runners.job import DumpJob, Sampling, TokenSequence, batching, check_positions, positions_needed
from probe.hooks.runners.run import run_dump
from probe.store.reader import open_dump

PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16], [21]]
# fp32: a batch of one against a padded micro-batch, and a float64 log-softmax against one in float32
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen2 checkpoint without tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """The prompts as token ids, under ids of their own."""
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"q{n}", "token_ids": ids}) for n, ids in enumerate(PROMPTS)))
    return path


def rollout_job(checkpoint, prompts, output, **arguments):
    sampling = Sampling(max_tokens=5, n=2, seed=3, temperature=0.8, top_p=0.9)
    job = DumpJob("rollout", "transformers", checkpoint, output, prompts=prompts, sampling=sampling, device="cpu")
    return replace(job, **arguments)


@pytest.fixture(scope="module")
def rollout(checkpoint, prompts, tmp_path_factory):
    """A rollout of two samples per prompt."""
    return run_dump(rollout_job(checkpoint, prompts, tmp_path_factory.mktemp("r") / "rollout"))


@pytest.fixture(scope="module")
def actor(checkpoint, rollout, tmp_path_factory):
    """The rollout's tokens recomputed in micro-batches of four."""
    output = tmp_path_factory.mktemp("a") / "actor"
    return run_dump(DumpJob("actor", "transformers", checkpoint, output, source=rollout, device="cpu"))


def test_a_rollout(rollout, checkpoint):
    assert sorted(p.name for p in rollout.iterdir()) == ["manifest.json", "rollout"]
    assert sorted(p.name for p in (rollout / "rollout" / "step0").iterdir()) == ["driver.h5", "rank0.h5"]
    with open_dump(rollout) as dump:
        assert (dump.stage, dump.engine, dump.complete) == ("rollout", "transformers", True)
        assert [(s.uid, s.trajectory, s.sample) for s in dump.sequences] == [
            (f"q{n}.s{k}", f"q{n}", k) for n in range(3) for k in range(2)
        ]
        for sequence in dump.sequences:
            prompt = PROMPTS[int(sequence.trajectory[1:])]
            assert sequence.tokens[: sequence.prompt_len].tolist() == prompt
            assert sequence.length == len(sequence.tokens) == len(prompt) + 5
        assert dump.manifest["sampling"]["temperature"] == 0.8 and dump.manifest["source_dump"] is None
        assert dump.manifest["model"]["path"] == str(checkpoint) and dump.manifest["dtype"] == "float32"
        rows = by_row(dump, "model.layers.1", "output.0")
        executed = {(s.uid, p) for s in dump.sequences for p in range(s.length - 1)}
        assert set(rows) == executed  # the last generated token never enters the model


def test_logprobs_are_those_of_the_logits(rollout, checkpoint):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with open_dump(rollout) as dump:
        for sequence in dump.sequences:
            mine = dump.tokens[dump.tokens["sequence"] == sequence.index]
            assert np.array_equal(mine["response"], mine["position"] >= sequence.prompt_len)
            # the engine gives the log-probs of what it generated: raw, whatever the temperature
            assert np.array_equal(np.isfinite(mine["logprob"]), mine["response"])
            assert np.array_equal(np.isfinite(mine["logprob_recomputed"]), mine["response"])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor(sequence.tokens[None])).logits[0].double()
            expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(sequence.tokens[1:, None]))[:, 0]
            for column in ("logprob", "logprob_recomputed"):
                found = mine[column][mine["response"]]
                assert np.abs(found - expected.numpy()[sequence.prompt_len - 1 :]).max() <= TOLERANCE


def test_the_actor_recomputes_the_rollouts_tokens(rollout, actor):
    with open_dump(rollout) as before, open_dump(actor) as after:
        assert (after.stage, after.manifest["source_dump"]) == ("actor", str(rollout))
        for old, new in zip(before.sequences, after.sequences):
            assert (old.uid, old.prompt_len, old.sample, old.trajectory) == (
                *(new.uid, new.prompt_len, new.sample, new.trajectory),
            )
            assert np.array_equal(old.tokens, new.tokens)
        for key in (("model.layers.0.mlp.down_proj", "input.0"), ("model.norm", "output.0"), ("lm_head", "output.0")):
            ours, theirs = by_row(before, *key), by_row(after, *key)
            assert len(theirs) == sum(s.length for s in after.sequences) and set(ours) <= set(theirs)
            for place, values in ours.items():
                assert np.abs(values - theirs[place]).max() <= TOLERANCE * max(1, np.abs(values).max())
        scored = after.tokens["position"] > 0
        assert np.array_equal(np.isfinite(after.tokens["logprob"]), scored)
        for column in ("logprob", "logprob_recomputed"):
            both = np.isfinite(before.tokens["logprob"])
            assert np.abs(before.tokens["logprob"] - after.tokens[column])[both].max() <= TOLERANCE
        assert np.abs(after.tokens["logprob"] - after.tokens["logprob_recomputed"])[scored].max() <= TOLERANCE


def test_the_reference_in_another_dtype(tmp_path, checkpoint, actor):
    job = DumpJob(
        "reference", "transformers", checkpoint, tmp_path / "ref", source=actor, dtype="bfloat16", device="cpu"
    )
    with open_dump(run_dump(job)) as dump:
        assert (dump.stage, dump.manifest["dtype"]) == ("reference", "bfloat16")
        assert dump.tensors[("model.norm", "output.0")].dtype == "bfloat16"


def test_seeds_reproduce_a_rollout(tmp_path, checkpoint, prompts, rollout):
    job = rollout_job(checkpoint, prompts, tmp_path / "again")
    assert tokens_of(run_dump(job)) == tokens_of(rollout)
    other = replace(job, output=tmp_path / "other", sampling=replace(job.sampling, seed=4))
    assert tokens_of(run_dump(other)) != tokens_of(rollout)
    greedy = [
        run_dump(replace(job, output=tmp_path / f"g{s}", sampling=replace(job.sampling, temperature=0.0, seed=s)))
        for s in (1, 2)
    ]
    assert tokens_of(greedy[0]) == tokens_of(greedy[1])


def with_generation_config(checkpoint, folder, **entries):
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").write_text(json.dumps(entries))
    return folder


def tokens_of(folder):
    with open_dump(folder) as dump:
        return [s.tokens.tolist() for s in dump.sequences]


def test_ignore_eos_generates_max_tokens(tmp_path, checkpoint, prompts):
    model = with_generation_config(checkpoint, tmp_path / "model", eos_token_id=list(range(197)))  # every token ends
    for ignore, length in ((False, 1), (True, 4)):
        sampling = Sampling(max_tokens=4, ignore_eos=ignore)
        done = run_dump(rollout_job(model, prompts, tmp_path / str(ignore), sampling=sampling))
        assert [len(t) for t in tokens_of(done)] == [len(p) + length for p in PROMPTS]


def test_the_checkpoints_generation_config_changes_no_sampling(tmp_path, checkpoint, prompts, rollout):
    changes = {"repetition_penalty": 9.0, "top_k": 2, "no_repeat_ngram_size": 1, "min_p": 0.5, "temperature": 5.0}
    model = with_generation_config(checkpoint, tmp_path / "model", do_sample=True, **changes)
    assert tokens_of(run_dump(rollout_job(model, prompts, tmp_path / "out"))) == tokens_of(rollout)


def test_batching_is_recorded_where_there_are_batches(rollout, actor):
    assert "batching" not in open_dump(rollout).manifest
    assert open_dump(actor).manifest["batching"] == {"micro_batch_size": 4}
    expected = {"vllm": {}, "megatron": {"batching": {"micro_batch_size": 4, "layout": "padded"}}}
    for engine, entry in expected.items():
        assert batching(DumpJob("actor", engine, Path("m"), Path("o"), source=Path("s"))) == entry


def test_positions_that_the_model_lacks(tmp_path, checkpoint, prompts, rollout):
    job = rollout_job(checkpoint, prompts, tmp_path / "out", sampling=Sampling(max_tokens=123))
    with pytest.raises(EngineError, match=r"needs 129 positions, but .* has 128: .*--max-tokens"):
        run_dump(job)  # transformers would run on, past what the model was made for
    check_positions(job, [TokenSequence("s", [1] * 5, 5)], {"max_position_embeddings": 128})
    known = [TokenSequence("short", [1], 1), TokenSequence("s", [1] * 128, 5)]
    unfinished = [TokenSequence("s", [1] * 128, 128)]
    for engine, force_decode, sequences, needed in (
        ("transformers", False, known, 128),
        ("megatron", False, known, 128),
        ("vllm", True, known, 128),
        ("vllm", False, known, 129),
        ("vllm", True, unfinished, 129),
    ):
        taken = replace(job, engine=engine, force_decode=force_decode, prompts=None, source=rollout)
        assert positions_needed(taken, sequences) == needed
    with pytest.raises(EngineError, match="use a model with more positions"):
        run_dump(
            DumpJob(
                "actor",
                "transformers",
                make_checkpoint(tmp_path / "m", max_position_embeddings=8),
                tmp_path / "o",
                source=rollout,
            )
        )


def test_an_argument_that_transformers_does_not_take(tmp_path, checkpoint, prompts):
    job = rollout_job(checkpoint, prompts, tmp_path / "out", engine_args={"foo": "bar"})
    with pytest.raises(EngineError, match=r"could not load .*foo.*: check --engine-arg"):
        run_dump(job)
    assert not (tmp_path / "out").exists()


def test_prompts_only(tmp_path, checkpoint, rollout, actor):
    job = DumpJob("actor", "transformers", checkpoint, tmp_path / "p", source=rollout, prompts_only=True, device="cpu")
    with open_dump(run_dump(job)) as only, open_dump(actor) as every:
        assert only.manifest["prompts_only"] is True
        prompt_len = np.array([s.prompt_len for s in every.sequences])
        for key, info in only.tensors.items():
            if info.has_rows:
                rows = every.rows(*key)
                prompt = rows["position"] < prompt_len[rows["sequence"]]
                assert only.read_raw(*key).tobytes() == every.read_raw(*key)[prompt].tobytes()
        assert [s.tokens.tolist() for s in only.sequences] == [s.tokens.tolist() for s in every.sequences]


def test_one_token_has_nothing_to_score(tmp_path, checkpoint):
    assert np.isnan(token_logprobs(torch.zeros(1, 7), [3])).all()
    scores = token_logprobs(torch.log_softmax(torch.eye(7)[[1, 2]], -1), [0, 1, 2, 3], start=2)
    assert np.isnan(scores[:3]).all() and scores[3] == pytest.approx(torch.log_softmax(torch.eye(7)[1], -1)[3].item())


# -- output folders ----------------------------------------------------------------------------------------------------


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_output_is_not_overwritten_unless_forced(tmp_path, checkpoint, prompts):
    output = write_dump(tmp_path / "old").parent
    before = files_below(output)
    job = rollout_job(checkpoint, prompts, output, sampling=Sampling(max_tokens=1))
    with pytest.raises(OutputExistsError, match="already exists: choose another -o or add --force"):
        run_dump(job)
    assert files_below(output) == before
    run_dump(replace(job, force=True))
    assert len(open_dump(output).sequences) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


def test_force_deletes_dumps_only(tmp_path, checkpoint, prompts):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("thesis", "file"):
        with pytest.raises(OutputExistsError, match="is not a dump, so --force does not delete it"):
            run_dump(rollout_job(checkpoint, prompts, tmp_path / name, force=True))
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "x"


def broken_prompts(tmp_path, text='{"token_ids": [999]}'):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    return path


def test_a_failure_restores_what_was_to_be_replaced(tmp_path, checkpoint):
    output = write_dump(tmp_path / "old").parent
    before = files_below(output)
    with pytest.raises(PromptsError, match="holds token 999"):
        run_dump(rollout_job(checkpoint, broken_prompts(tmp_path), output, force=True))
    assert files_below(output) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "old"]


def test_a_failure_leaves_no_folder(tmp_path, checkpoint, prompts, monkeypatch):
    with pytest.raises(PromptsError):
        run_dump(rollout_job(checkpoint, broken_prompts(tmp_path), tmp_path / "deep" / "deeper" / "out"))
    assert not (tmp_path / "deep").exists()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("probe.hooks.runners.inprocess.Capture.detach", interrupted)  # after the model has run
    with pytest.raises(KeyboardInterrupt):
        run_dump(rollout_job(checkpoint, prompts, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_and_a_relative_one_will_do(tmp_path, checkpoint, prompts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    one = Sampling(max_tokens=1)
    for output in (Path("empty"), Path("new/out")):
        assert open_dump(run_dump(rollout_job(checkpoint, prompts, output, sampling=one))).complete
    monkeypatch.chdir("new")
    with pytest.raises(OutputExistsError):
        run_dump(rollout_job(checkpoint, prompts, Path("."), sampling=one))


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"engine": "sglang"}, EngineError, "unknown engine 'sglang'"),
        ({"stage": "critic"}, EngineError, "cannot run stage 'critic'"),
        ({"engine": "megatron"}, EngineError, "engine megatron cannot run stage 'rollout'"),
        ({"prompts": None}, UsageError, "give --prompts FILE or --from DUMP"),
        ({"source": Path("x")}, UsageError, "give --prompts FILE or --from DUMP"),
        ({"stage": "actor"}, UsageError, "give --from ROLLOUT_DUMP"),
        ({"force_decode": True}, UsageError, "--force-decode"),
        ({"dtype": "int4"}, EngineError, "cannot run a model in dtype 'int4'"),
        ({"device": "tpu"}, EngineError, "unknown device 'tpu'"),
        ({"model": Path("nowhere")}, CheckpointError, "nowhere"),
        ({"sampling": Sampling(max_tokens=0)}, UsageError, "max_tokens 0 cannot work"),
        ({"sampling": Sampling(n=0)}, UsageError, "n 0 cannot work"),
        ({"sampling": Sampling(top_p=0.0)}, UsageError, "top_p 0.0 cannot work"),
        ({"sampling": Sampling(temperature=-1)}, UsageError, "temperature -1 cannot work"),
        ({"sampling": Sampling(temperature=float("inf"))}, UsageError, "temperature inf cannot work"),
        ({"sampling": Sampling(temperature=float("nan"))}, UsageError, "temperature nan cannot work"),
        ({"sampling": Sampling(seed=2**32 - 1)}, UsageError, "seed 4294967295 cannot work"),
        ({"micro_batch_size": 0}, UsageError, "micro_batch_size 0 cannot work"),
    ],
    ids=range(18),
)
def test_jobs_that_cannot_work_write_nothing(tmp_path, checkpoint, prompts, change, error, problem):
    with pytest.raises(error) as caught:
        run_dump(replace(rollout_job(checkpoint, prompts, tmp_path / "out"), **change))
    assert problem in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, ProbeError) and not (tmp_path / "out").exists()


def test_sources_that_cannot_work(tmp_path, checkpoint, rollout):
    def job(source, **change):
        return replace(
            DumpJob("actor", "transformers", checkpoint, tmp_path / "out", source=source, device="cpu"), **change
        )

    with pytest.raises(DumpError, match="there is no dump at"):
        run_dump(job(tmp_path / "none"))
    untold = write_dump(tmp_path / "untold", [("m", "output.0", np.zeros((1, 2), np.float32), "float32")], sequences=2)
    with pytest.raises(UsageError, match="does not hold the token ids of its sequences"):
        run_dump(job(untold))
    small = make_checkpoint(tmp_path / "small", vocab=20)
    with pytest.raises(UsageError, match="has a vocabulary of 20"):
        run_dump(job(rollout, model=small))
    with pytest.raises(UsageError, match="is both the source and the output"):
        run_dump(job(rollout, output=rollout, force=True))
    assert open_dump(rollout).complete and not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        run_dump(job(rollout, output=tmp_path / "file" / "out"))
