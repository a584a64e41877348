"""Log-probs processed as a rollout's are: the formula against vLLM's own sampler, and dumps that follow a rollout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from probe.cli.main import cli
from probe.cli.next import next_command
from probe.compare.run import compare_dumps
from probe.compare.sampling_fits import processed_scores as reference
from probe.errors import UsageError
from probe.hooks.runners import inprocess
from probe.hooks.runners.inprocess import logprobs_at, processed_scores, token_logprobs
from probe.hooks.runners.job import PROCESSED, DumpJob, Sampling, check_job
from probe.hooks.runners.run import run_dump
from probe.sampling import Semantics, drawn_from, engine_semantics
from probe.store.reader import open_dump

MEANINGS = st.builds(Semantics, st.sampled_from([0.3, 0.7, 1.0, 1.5]), st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]))
FP32 = 1e-5
"""Nats that fp32 sums over the vocabulary, in another order, may differ by."""


def peaked(seed: int, rows: int = 12, vocab: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)) * rng.choice([1.0, 3.0, 8.0], rows)[:, None]
    return torch.from_numpy(logits).float(), torch.from_numpy(rng.integers(0, vocab, rows))


# -- the formula ------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # importing vLLM alone takes some ten seconds
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), MEANINGS)
def test_tokens_inside_the_nucleus_have_vllms_processed_log_probs(seed, meaning):
    """GIVEN any logits, THEN every token that vLLM could draw has the log-prob that its sampler gives it."""
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    logits, _ = peaked(seed)
    top_p = torch.full((len(logits),), meaning.top_p)
    processed = sampler.apply_top_k_top_p_pytorch(logits.clone() / meaning.temperature, None, top_p)
    expected = processed.log_softmax(-1)
    for token in range(logits.shape[1]):
        tokens = torch.full((len(logits),), token)
        ours = processed_scores(logits, tokens, meaning)
        drawable = torch.isfinite(expected[:, token])
        torch.testing.assert_close(ours[drawable], expected[drawable, token], atol=FP32, rtol=0)
        assert torch.isfinite(ours).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), MEANINGS)
def test_the_recorder_and_the_comparison_have_one_formula(seed, meaning):
    logits, tokens = peaked(seed)
    expected = reference(logits.double().numpy(), tokens.numpy(), meaning)
    ours = processed_scores(logits, tokens, meaning).double().numpy()
    # a token at the very edge of the nucleus may be in one set and not in the other: fp32 against float64
    assert (np.abs(ours - expected) < FP32).mean() > 0.9
    np.testing.assert_array_less(ours, FP32)


def test_a_token_outside_the_nucleus_is_kept_beside_it():
    """probabilities 0.5, 0.3, 0.15, 0.05 and top-p 0.6 keep two; the third one scores 0.15 / (0.5 + 0.3 + 0.15)."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = Semantics(1.0, 0.6)
    for token, expected in ((0, 0.5 / 0.8), (1, 0.3 / 0.8), (2, 0.15 / 0.95), (3, 0.05 / 0.85)):
        assert processed_scores(logits, torch.tensor([token]), kept).exp().item() == pytest.approx(expected, rel=1e-6)


def test_a_lone_token_and_equal_ones():
    certain = torch.tensor([[9.0, 0.0, 0.0]])
    assert processed_scores(certain, torch.tensor([0]), Semantics(1.0, 0.5)).item() == 0.0
    equal = torch.zeros(1, 4)
    for token in range(4):  # whichever of them count as the kept two
        assert processed_scores(equal, torch.tensor([token]), Semantics(1.0, 0.5)).exp().item() == pytest.approx(0.5)


def test_a_token_of_no_probability_in_fp32_stays_finite():
    logits = torch.tensor([[0.0, -300.0]])
    assert processed_scores(logits, torch.tensor([1]), Semantics(0.5, 0.9)).item() == pytest.approx(-600.0)


@pytest.mark.parametrize("meaning", [Semantics(), Semantics(0.7, 0.9)])
def test_rows_are_scored_in_chunks(monkeypatch, meaning):
    """GIVEN room for two rows at a time, THEN no more are processed at once and the result is the same to the bit."""
    logits, tokens = peaked(0, 9)
    ids = [0, *tokens.tolist()]
    whole = token_logprobs(logits, ids, meaning=meaning)
    seen: list[int] = []

    def counting(rows: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(len(rows))
        return processed_scores(rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(inprocess, "CHUNK_VALUES", 2 * logits.shape[1])
    monkeypatch.setattr(inprocess, "processed_scores", counting)
    np.testing.assert_array_equal(token_logprobs(logits, ids, meaning=meaning), whole)
    assert seen == [2, 2, 2, 2, 1]
    assert np.isnan(logprobs_at(logits[:0], ids, np.zeros(0, int), meaning)).all()


def test_what_manifests_say():
    assert drawn_from({"temperature": 0.7, "top_p": 0.9}) == Semantics(0.7, 0.9)
    assert drawn_from({"temperature": 0.0, "top_p": 0.9}) == drawn_from({}) == Semantics()
    said = {"sampling": {"temperature": 0.7, "top_p": 0.9}}
    assert engine_semantics(said) == engine_semantics({**said, "logprobs_mode": "raw_logprobs"}) == Semantics()
    assert engine_semantics({**said, "logprobs_mode": PROCESSED}) == Semantics(0.7, 0.9)


# -- dumps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> dict[str, Path]:
    """A raw and a processed rollout of transformers at temperature 0.7 and top-p 0.9."""
    folder = tmp_path_factory.mktemp("processed")
    model = make_checkpoint(folder / "model")
    prompts = folder / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": [5 + n, 6, 7]}) for n in range(4)))
    made = {"model": model}
    for mode in ("raw_logprobs", PROCESSED):
        sampling = Sampling(max_tokens=12, temperature=0.7, top_p=0.9, ignore_eos=True, logprobs_mode=mode)
        job = DumpJob("rollout", "transformers", model, folder / mode, prompts=prompts, sampling=sampling)
        made[mode] = run_dump(job)
    return made


def follow(rollouts: dict[str, Path], source: str, output: Path, **changes: object) -> DumpJob:
    job = DumpJob("actor", "transformers", rollouts["model"], output, source=rollouts[source])
    job.sampling = Sampling(logprobs_mode=PROCESSED)
    for name, value in changes.items():
        setattr(job, name, value)
    return job


def sampling(report: dict) -> dict:
    return next(gate for gate in report["gates"] if gate["name"] == "sampling")


def test_an_actor_that_processes_alike_is_consistent(rollouts, tmp_path):
    actor = run_dump(follow(rollouts, PROCESSED, tmp_path / "actor"))
    with open_dump(actor) as dump:
        assert dump.manifest["logprobs_mode"] == PROCESSED
        assert dump.manifest["sampling"] == {"temperature": 0.7, "top_p": 0.9}
    report = compare_dumps(rollouts[PROCESSED], actor)
    assert report["verdict"] == "consistent" and sampling(report)["status"] == "pass"
    assert report["tokens"]["source_a"] == report["tokens"]["source_b"] == "engine"
    assert report["tokens"]["compared"] == 48 and report["tokens"]["max_abs_logprob_diff"] < FP32


def test_a_raw_actor_names_both_semantics(rollouts, tmp_path):
    actor = run_dump(follow(rollouts, PROCESSED, tmp_path / "actor", sampling=Sampling()))
    report = compare_dumps(rollouts[PROCESSED], actor)
    found = [(finding["cause"], finding["side"]) for finding in sampling(report)["findings"]]
    assert report["verdict"] == "suspect"
    assert found == [("temperature-semantics", "a"), ("renormalised-top-p", "a")]
    assert {suspect["cause"] for suspect in report["suspects"]} >= {"temperature-semantics", "renormalised-top-p"}


def test_processed_log_probs_may_follow_a_raw_rollout_or_one_that_followed(rollouts, tmp_path):
    first = run_dump(follow(rollouts, "raw_logprobs", tmp_path / "first"))
    again = run_dump(follow({**rollouts, "first": first}, "first", tmp_path / "again"))
    with open_dump(first) as one, open_dump(again) as other:
        assert one.manifest["sampling"] == other.manifest["sampling"] == {"temperature": 0.7, "top_p": 0.9}
        np.testing.assert_array_equal(one.tokens["logprob"], other.tokens["logprob"])


def test_a_source_that_does_not_say_how_it_sampled_is_refused(rollouts, tmp_path):
    raw = run_dump(follow(rollouts, PROCESSED, tmp_path / "raw", sampling=Sampling()))
    job = follow({**rollouts, "raw": raw}, "raw", tmp_path / "out")
    with pytest.raises(UsageError, match="does not say with which temperature and top-p"):
        run_dump(job)
    assert not (tmp_path / "out").exists()


def test_vllm_rescores_from_stored_logits_only(rollouts, tmp_path):
    pytest.importorskip("vllm")
    job = follow(rollouts, PROCESSED, tmp_path / "out", stage="rollout", engine="vllm", prompts_only=True)
    with pytest.raises(UsageError, match="prompts-only"):
        check_job(job)


def test_the_command_line_takes_the_mode_for_every_engine_and_hands_it_on(rollouts, tmp_path):
    arguments = ["--stage", "actor", "--engine", "transformers", "--from", str(rollouts[PROCESSED])]
    made = CliRunner().invoke(cli, ["dump", *arguments, "--logprobs-mode", PROCESSED, "-o", str(tmp_path / "actor")])
    assert made.exit_code == 0, made.output
    with open_dump(tmp_path / "actor") as dump:
        assert engine_semantics(dump.manifest) == Semantics(0.7, 0.9)
    job = DumpJob("rollout", "transformers", rollouts["model"], rollouts[PROCESSED], prompts=tmp_path / "p")
    with open_dump(rollouts[PROCESSED]) as dump:
        assert "logprobs-mode" not in next_command(dump, job)
        job.sampling = Sampling(logprobs_mode=PROCESSED)
        assert f"--from {rollouts[PROCESSED]} --logprobs-mode {PROCESSED}" in next_command(dump, job)
