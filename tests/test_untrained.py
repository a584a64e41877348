"""Sequences of a job's rollout that its trainer never saw are said and not missed; the trainer's own are missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_folders import Prompts, compared, with_budget, without_tensors, write_stage
from sequence_tools import aligner_of, seq, side, table
from synthetic_dumps import Scenario, actor, prompts

from probe.compare.coverage import count_rows
from probe.compare.run import exit_status
from probe.compare.untrained import untrained

RUN = {"run": "17.0-abcd"}
SEQUENCES = prompts(12)
ROWS = [len(ids) - 1 for _, ids, _ in SEQUENCES]


def job_of(
    folder: Path, rolled: Prompts, trained: Prompts, *, run: str = RUN["run"], whole: Any = True, tokens: bool = False
) -> Path:
    """Write a job whose rollout ran some sequences and whose log-prob pass listed others, as its manifest says."""
    given: dict[str, Any] = {"run": run} | ({} if whole is None else {"whole_batch": whole})
    stages = (
        (Scenario(manifest=RUN), rolled),
        (actor(stage="logprob", engine_logprobs=True, manifest=given), trained),
    )
    for scenario, sequences in stages:
        made = write_stage(folder, scenario, 1, sequences)
        if tokens:
            without_tensors(made)
    return folder


# -- not trained on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("trained", [1, 4, 11])
def test_what_a_trainer_was_not_given_is_said_and_not_missed(tmp_path, trained, tokens):
    # GIVEN a rollout of twelve sequences, of which the trainer was given some, whole batch listed
    report = compared(job_of(tmp_path / "job", SEQUENCES, SEQUENCES[:trained], tokens=tokens))

    # THEN what it was given is compared in full, and the others are counted under a reason of their own
    left = 12 - trained
    assert report["verdict"] == "consistent" and report["coverage"]["shares"]["rows"] == 1.0
    assert report["coverage"]["shares"].get("tokens", 1.0) == 1.0
    named = f"{left} sequence{'s' if left > 1 else ''} of a that the trainer did not train on (first p{trained}.s0)"
    assert named in report["not_compared"]
    if tokens:
        assert f"{left} sequence{'s' if left > 1 else ''} of a not trained on" in report["headline"]
    else:
        assert report["coverage"]["rows"]["a"] == {"not_trained": sum(ROWS[trained:])}
        assert "rows of sequences not trained on" in report["headline"]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    "without", [{"whole": False}, {"whole": None}, {"whole": "true"}, {"run": "17.0-other"}, {"run": ""}]
)
def test_without_a_whole_batch_of_the_same_run_they_are_missed(tmp_path, without, tokens):
    report = compared(job_of(tmp_path / "job", SEQUENCES, SEQUENCES[:4], tokens=tokens, **without))
    assert (report["verdict"], exit_status(report)) == ("incomparable", 2)
    assert "8 sequences that only a has (first p4.s0)" in report["not_compared"]
    if not tokens:
        assert report["coverage"]["rows"]["a"]["other_sequence"] == sum(ROWS[4:])


def test_a_trainers_file_that_was_lost_leaves_no_whole_batch(tmp_path):
    # GIVEN the first of two data-parallel ranks of the trainer, each of which listed its own batch in full
    job = job_of(tmp_path / "job", SEQUENCES, SEQUENCES[:4])
    path = job / "logprob/step1/rank0.h5"
    with h5py.File(path, "r+") as file:
        at = dict.fromkeys(("tp", "pp", "cp", "ep", "dp"), 0)
        place = {"topology": {axis: 1 + (axis == "dp") for axis in at}, "coordinates": at, "world_size": 2}
        manifest = json.loads(file["manifest"][()]) | place
        del file["manifest"]
        file.create_dataset("manifest", data=json.dumps(manifest), dtype=h5py.string_dtype())
    report = compared(job)
    assert "not_trained" not in report["coverage"]["rows"]["a"] and report["verdict"] == "incomparable"


@pytest.mark.parametrize("stages", [("rollout", "rollout"), ("logprob", "logprob"), ("rollout", "update")])
def test_only_a_rollout_and_its_trainer_are_asked(tmp_path, stages):
    # GIVEN two stages of one run that are not a rollout and what recomputes it
    scenarios = [Scenario(stage=stages[0], manifest=RUN), actor(stage=stages[1], manifest={**RUN, "whole_batch": True})]
    folders = [
        write_stage(tmp_path / name, scenario, 1, sequences)
        for name, scenario, sequences in zip("ab", scenarios, (SEQUENCES, SEQUENCES[:4]))
    ]
    rows = compared(*folders)["coverage"]["rows"]["a"]
    assert rows == {"other_sequence": sum(ROWS[4:])}


def test_padding_that_a_trainer_adds_is_not_missed(tmp_path):
    # GIVEN a batch that was filled up with two sequences without a response
    padding = [(f"pad{n}", np.full(6, 49), 6) for n in range(2)]
    report = compared(job_of(tmp_path / "job", SEQUENCES[:4], [*SEQUENCES[:4], *padding]))
    assert report["verdict"] == "consistent" and report["coverage"]["rows"]["b"]["not_trained"] == 12
    assert any(said.startswith("2 sequences of b that the trainer did not train on") for said in report["not_compared"])


# -- the trainer's own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(("rolled", "trained"), [((0, 9), (8, 12)), ((0, 4), (2, 6)), ((0, 11), (10, 12))])
def test_a_trainers_sequences_without_their_rollout_are_missed(tmp_path, rolled, trained, tokens):
    # GIVEN a trainer that lists its whole batch, most of which the rollout does not hold
    job = job_of(tmp_path / "job", SEQUENCES[slice(*rolled)], SEQUENCES[slice(*trained)], tokens=tokens)
    report = compared(job)

    # THEN they are missed, and as many of the rollout's may be their lost partners
    missing, spare = trained[1] - rolled[1], trained[0] - rolled[0]
    assert report["verdict"] == "incomparable"
    assert f"{missing} sequence{'s' if missing > 1 else ''} that only b has" in " ".join(report["not_compared"])
    if not tokens:
        lone = sorted(ROWS[rolled[0] : trained[0]], reverse=True)
        rows = report["coverage"]["rows"]
        assert rows["a"].get("other_sequence", 0) == sum(lone[:missing])
        assert rows["a"].get("not_trained", 0) == sum(lone[missing:])
        assert rows["b"]["other_sequence"] == sum(ROWS[rolled[1] : trained[1]]) + missing  # and their last tokens
    assert spare > missing or not any("did not train on" in said for said in report["not_compared"])


def test_ids_that_should_match_and_do_not_are_missed(tmp_path):
    # GIVEN a trainer whose tokenizer has changed a prompt's second token, of every sequence but one
    edited = [(uid, np.where(np.arange(len(ids)) == 1, (ids + 1) % 50, ids), n) for uid, ids, n in SEQUENCES[1:]]
    report = compared(job_of(tmp_path / "job", SEQUENCES, [SEQUENCES[0], *edited]))
    assert report["verdict"] == "divergent"  # the tokens gate
    assert "not_trained" not in report["coverage"]["rows"]["a"]
    assert report["coverage"]["shares"]["rows"] < 0.1


def test_a_budget_on_the_trainers_side_hides_no_missing_rollout(tmp_path):
    # GIVEN a trainer that stores the rows of two sequences of a whole batch of eight, of which the rollout holds these
    job = job_of(tmp_path / "job", [*SEQUENCES[:2], *SEQUENCES[8:]], SEQUENCES[:8])
    with_budget(job / "logprob" / "step1", lambda sequence, position: sequence < 2, seqs=2)
    rows = compared(job)["coverage"]["rows"]["a"]
    assert rows == {"other_sequence": sum(ROWS[8:])}


def test_budgets_that_chose_before_the_trainer_was_asked_are_believed(tmp_path):
    # GIVEN a rollout that stored the rows of four sequences, two of which the trainer was given and stored
    job = job_of(tmp_path / "job", SEQUENCES, [*SEQUENCES[:2], *SEQUENCES[6:]])
    with_budget(job / "rollout" / "step1", lambda sequence, position: sequence < 4, seqs=4)
    with_budget(job / "logprob" / "step1", lambda sequence, position: sequence < 2, seqs=4)
    report = compared(job)
    assert report["verdict"] == "consistent", report["headline"]
    assert report["coverage"]["rows"]["a"] == {"not_trained": sum(ROWS[2:4])}


# -- any job ----------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 7), min_size=1), st.sets(st.integers(0, 7), min_size=1), st.integers(0, 2), st.booleans())
@settings(deadline=None, max_examples=200)
def test_no_more_is_excused_than_the_trainers_side_allows(rolled, trained, padding, swapped):
    """GIVEN any rollout and any whole batch of one run, THEN the trainer's side alone says how much was compared.

    All sequences have as many rows, so that the share is that of the trainer's sequences, lost partners counted too.
    """
    ids = {n: [n, n + 10, *range(20, 26)] for n in range(8)}
    a = side(*(seq(f"r{n}", ids[n]) for n in sorted(rolled)), stage="rollout", **RUN)
    pads = [seq(f"pad{n}", [60 + n] * 8, 8) for n in range(padding)]
    b = side(*(seq(f"t{n}", ids[n]) for n in sorted(trained)), *pads, stage="logprob", whole_batch=True, **RUN)
    cells = [[(n, p) for n in range(len(one.sequences)) for p in range(8)] for one in (a, b)]
    if swapped:
        (a, b), cells = (b, a), cells[::-1]
    aligner = aligner_of(a, b)
    coverage = count_rows(aligner, [aligner.rows(*map(table, cells))], a, b)
    both, missing, spare = len(rolled & trained), len(trained - rolled), len(rolled - trained)
    lost = min(missing, spare)
    assert coverage.joined == 8 * both
    assert coverage.count("other_sequence") == 8 * (missing + lost)
    assert coverage.count("not_trained") == 8 * (spare - lost + padding)
    total = both + missing + lost
    assert coverage.covered == (both / total if total else 1.0) and coverage.covered <= both / len(trained)
    assert sum(untrained(aligner.join, a, b)) == spare - lost + padding
