"""What a comparison of a job's stages excuses, and what it misses: dumps of tokens only, budgets, replicas, updates."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from job_folders import compared, ranks, with_budget, without_tensors, write_job, write_stage
from synthetic_dumps import Scenario, actor, prompts

from probe.store.budget import within_rows
from probe.store.reader import open_dump

# -- dumps of tokens only ---------------------------------------------------------------------------------------------


def test_two_dumps_of_tokens_only_are_compared_by_log_probs_and_weights(tmp_path):
    job = write_job(tmp_path / "job")
    for stage in ("rollout", "logprob"):
        without_tensors(job / stage / "step0")
    report = compared(job)
    assert report["verdict"] == "consistent" and "no tensor was recorded" in report["headline"]
    assert {gate["name"]: gate["status"] for gate in report["gates"]}["weights"] == "pass"
    assert any("a and b recorded tokens only" in sentence for sentence in report["not_compared"])


def test_stale_weights_show_in_tokens_only(tmp_path):
    job = write_job(tmp_path / "job", weights_seed=1)
    for stage in ("rollout", "logprob"):
        without_tensors(job / stage / "step0")
    report = compared(job)
    assert report["verdict"] == "divergent" and report["suspects"][0]["cause"] == "stale-weights"


def test_tensors_of_one_side_only_are_no_missing_tensors(tmp_path):
    job = write_job(tmp_path / "job")
    without_tensors(job / "rollout" / "step0")
    report = compared(job)
    assert report["verdict"] == "consistent" and "a recorded no tensor" in report["headline"]
    assert "tensors only in" not in report["headline"]


@pytest.mark.parametrize("sides", [("rollout",), ("logprob",), ("rollout", "logprob")])
def test_a_dump_that_lost_its_tensors_is_no_dump_of_tokens_only(tmp_path, sides):
    # GIVEN stages that were told to record tensors, of which no file holds one
    job = write_job(tmp_path / "job")
    for stage in ("rollout", "logprob"):
        without_tensors(job / stage / "step0", "tensor" if stage in sides else "tokens")

    # WHEN they are compared THEN equal log-probs alone are not enough, and the sides that lost them are named
    report = compared(job)
    assert report["verdict"] == "incomparable" and report["coverage"]["shares"]["tensors"] == 0.0
    lost = " and ".join(side for side, stage in zip("ab", ("rollout", "logprob")) if stage in sides)
    assert f"module tensors: {lost} lost them all: told to record them, no file holds any" in report["not_compared"]


@pytest.mark.parametrize("common", [1, 5, 6])
def test_tokens_only_are_consistent_only_where_most_of_them_were_compared(tmp_path, common, capsys):
    # GIVEN tokens of six sequences on one side, and of some of them on the other
    sequences = prompts(6)
    for scenario, held in ((Scenario(), sequences), (actor(stage="logprob"), sequences[:common])):
        without_tensors(write_stage(tmp_path / "job", scenario, 0, held))
    report = compared(tmp_path / "job")

    # THEN the tokens of the others count as not compared, and their sequences are named
    response = [len(ids) - length for _, ids, length in sequences]
    share = report["coverage"]["shares"]["tokens"]
    assert share == pytest.approx(sum(response[:common]) / sum(response))
    assert report["verdict"] == ("consistent" if share >= 0.9 else "incomparable")
    lone = f"{6 - common} sequence{'s' if common < 5 else ''}"
    named = f"{lone} that only a has (first {sequences[common % 6][0]})"
    assert (named in report["not_compared"]) == (common < 6)
    assert (f"{lone} only in a" in report["headline"]) == (common < 6)
    assert ("% of the response tokens could be compared" in report["headline"]) == (share < 0.9)


def test_log_probs_that_one_side_lacks_are_not_compared(tmp_path):
    # GIVEN tokens only, of which one side has the log-probs of one sequence of six
    job = write_job(tmp_path / "job", sequences=prompts(6))
    for stage in ("rollout", "logprob"):
        without_tensors(job / stage / "step0")
    for path in (job / "logprob/step0").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            tokens = file["tokens"][()]
            for column in ("logprob", "logprob_recomputed"):
                tokens[column][tokens["sequence"] > 0] = np.nan
            file["tokens"][...] = tokens

    # WHEN the job is compared THEN that is too little
    report = compared(job)
    assert report["verdict"] == "incomparable" and "% of the response tokens" in report["headline"]


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_sequences_that_a_budget_left_out_are_said_and_not_missed(tmp_path):
    # GIVEN a rollout of all sequences and a log-prob pass that stored the tensors of one of four
    job = write_job(tmp_path / "job")
    with_budget(job / "logprob" / "step0", lambda sequence, position: sequence == 1, seqs=1)
    report = compared(job)

    # THEN what was compared is enough, and what was left out is said
    assert report["verdict"] == "consistent", report["headline"]
    assert report["coverage"]["rows"]["a"]["budget"] > 0 and "not_stored" not in report["coverage"]["rows"]["a"]
    assert "rows left out by the budget" in report["headline"]
    assert any("left out by the other side's budget" in sentence for sentence in report["not_compared"])
    assert report["tokens"]["compared"] == compared(write_job(tmp_path / "whole"))["tokens"]["compared"]


def test_the_same_rows_without_a_budget_are_missed(tmp_path):
    job = write_job(tmp_path / "job")
    with_budget(job / "logprob" / "step0", lambda sequence, position: sequence == 1)
    assert compared(job)["verdict"] == "incomparable"


def test_rows_beyond_the_budget_and_rows_that_are_lost_are_told_apart(tmp_path):
    # GIVEN a side that stores the first 4 rows of each sequence, and lost row 2 of them all
    job = write_job(tmp_path / "job")
    prompt = {n: length for n, (_, _, length) in enumerate(prompts())}

    def kept(sequence, position):
        return bool(within_rows(np.array([position]), prompt[sequence], 4)[0]) and position != 2

    with_budget(job / "logprob" / "step0", kept, rows=4)
    rows = compared(job)["coverage"]["rows"]["a"]
    assert rows["budget"] > 0
    lost = sum(bool(within_rows(np.array([2]), length, 4)[0]) for length in prompt.values())
    assert rows.get("not_stored", 0) == lost


@pytest.mark.parametrize("spared", [0, 1, 9, 100])
def test_a_full_file_excuses_as_many_rows_as_it_dropped(tmp_path, spared):
    # GIVEN a file that lost all rows but three of each sequence, and dropped so many rows less than that
    job = write_job(tmp_path / "job")
    with open_dump(job / "rollout") as dump:
        total = len(dump.rows(*next(key for key in dump.tensors if "layers.0" in key[0])))
    lost = total - 3 * len(prompts())
    dropped = max(0, lost - spared)
    kept = {"max_bytes": 1000, "dropped_rows": dropped} if dropped else {"max_bytes": 1000}
    with_budget(job / "logprob" / "step0", lambda sequence, position: position < 3, **kept)

    # WHEN the job is compared THEN these are excused, and the others are missed
    report = compared(job)
    rows = report["coverage"]["rows"]["a"]
    assert (rows.get("budget", 0), rows.get("not_stored", 0)) == (dropped, lost - dropped)
    assert (report["verdict"] == "consistent") == (spared < 2)


CHOICES = [(4, 4, 0), (4, 1, 3), (4, 3, 1), (2, 1, 1), (1, 1, 0), (9, 3, 1)]


@pytest.mark.parametrize(("chosen", "held", "missed"), CHOICES)
def test_a_budget_excuses_no_more_sequences_than_it_may_have_left_out(tmp_path, chosen, held, missed):
    # GIVEN two sides that were both to store so many of four sequences, of which one lost some
    job = write_job(tmp_path / "job", sequences=prompts(4))
    with_budget(job / "rollout" / "step0", None, seqs=chosen)
    with_budget(job / "logprob" / "step0", lambda sequence, position: sequence < held, seqs=chosen)
    report = compared(job)
    rows = report["coverage"]["rows"]["a"]

    # THEN those that it should have chosen besides are missed, and those that it was not to choose are said
    per_sequence = {s: len(ids) - 1 for s, (_, ids, _) in enumerate(prompts(4))}
    lone = sorted((per_sequence[s] for s in range(held, 4)), reverse=True)
    assert rows.get("not_stored", 0) == sum(lone[:missed]) and rows.get("budget", 0) == sum(lone[missed:])
    assert (report["verdict"] == "consistent") == (not missed), report["headline"]


@pytest.mark.parametrize(("listed", "enough"), [(1, True), (2, False), (6, False)])
def test_a_list_excuses_the_other_sequences_only_where_it_was_run_whole(tmp_path, listed, enough):
    # GIVEN the dump of a list of sequences, which holds one
    write_stage(tmp_path / "a", Scenario(), 0, prompts(4))
    write_stage(tmp_path / "b", actor(manifest={"budget": {"listed": listed}}), 0, prompts(4)[:1])
    report = compared(tmp_path / "a" / "rollout", tmp_path / "b" / "actor")
    reason = "budget" if enough else "other_sequence"
    assert set(report["coverage"]["rows"]["a"]) == {reason}
    assert report["verdict"] == ("consistent" if enough else "incomparable")


def test_layers_that_a_budget_left_out_are_unavailable(tmp_path):
    job = tmp_path / "job"
    write_stage(job, Scenario())
    write_stage(job, actor(stage="logprob", drop=("layers.1.",), manifest={"budget": {"layers": [0]}}))
    report = compared(job)
    assert report["coverage"]["only_a"] == [] and report["verdict"] == "consistent"
    reasons = {entry["reason"] for entry in report["coverage"]["unavailable"]}
    assert "left out by the budget: PROBE_LAYERS was 0" in reasons


def test_budgets_without_a_common_sequence_compare_no_tensor(tmp_path):
    job = write_job(tmp_path / "job")
    with_budget(job / "rollout" / "step0", lambda sequence, position: sequence == 0, seqs=1)
    with_budget(job / "logprob" / "step0", lambda sequence, position: sequence == 1, seqs=1)
    report = compared(job)
    assert report["verdict"] == "incomparable" and "left out by the budget" in report["headline"]


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 40])
def test_the_rows_of_a_budget(prompt_len):
    kept = np.flatnonzero(within_rows(np.arange(100), prompt_len, 8)).tolist()
    if prompt_len <= 4:
        assert kept == list(range(8))
    else:
        assert kept == sorted({*range(4), *range(prompt_len - 1, prompt_len + 3)})


# -- weights that change within a step --------------------------------------------------------------------------------


@pytest.mark.parametrize("coordinates", [True, False])
@pytest.mark.parametrize("stale", [True, False])
def test_a_replica_with_other_weights_fails_the_gate_whatever_version_it_counts(tmp_path, coordinates, stale):
    # GIVEN two processes of one rank's coordinates (or none); one counts more updates and may hold other weights
    sequences, about = prompts(4), {"manifest": ranks(0) if coordinates else {"note": "no coordinates"}}
    job = tmp_path / "job"
    first = write_stage(job, Scenario(**about), 0, sequences[:2])
    (first / "rank0.h5").rename(first / "vllm-host-11-rank0.h5")
    other = write_stage(tmp_path / "other", Scenario(**about, weights_seed=int(stale)), 0, sequences[2:])
    with_budget(other, version=3)
    (other / "rank0.h5").rename(first / "vllm-host-12-rank0.h5")
    write_stage(job, actor(stage="logprob"), 0, sequences)

    # WHEN the job is compared THEN copies that differ are found
    with open_dump(first) as dump:
        assert any(joined.conflict for joined in dump.joined_weights.values()) == stale
    gates = {gate["name"]: gate["status"] for gate in compared(job)["gates"]}
    assert (gates["weights"] == "fail") == stale


def test_an_update_within_a_step_is_no_conflict_of_copies(tmp_path):
    # GIVEN an engine that received weights within a step and went on in a second file of the same coordinates
    sequences = prompts(4)
    first = write_stage(tmp_path / "job", Scenario(manifest=ranks(0)), 0, sequences[:2])
    later = write_stage(tmp_path / "later", Scenario(manifest=ranks(0), weights_seed=1), 0, sequences[2:])
    with_budget(later, version=1)
    (later / "rank0.h5").rename(first / "rank0-2.h5")

    # WHEN the step is read
    with open_dump(first) as dump:
        # THEN the sketches are those that the step began with, and nothing is wrong with them
        assert {s.weight_version for s in dump.sequences} == {0, 1}
        assert not any(joined.conflict for joined in dump.joined_weights.values())
    with open_dump(first) as whole, open_dump(write_stage(tmp_path / "one", Scenario(), 0, sequences[:2])) as one:
        assert all(np.array_equal(whole.weights[name].rows, one.weights[name].rows) for name in one.weights)
