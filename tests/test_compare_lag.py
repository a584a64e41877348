"""A rollout that lags by design, as its trainer declares: told from stale weights, with the rows that can be judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_folders import compared, with_versions, without_tensors, write_stage
from sequence_tools import seq, side
from synthetic_dumps import Scenario, actor, prompts
from synthetic_model import Tensors, make_weights

from probe.compare.run import exit_status
from probe.compare.sequences import join_sequences
from probe.compare.tokens.read.dumps import read_dumps
from probe.compare.versions import lag_of, row_versions
from probe.errors import DumpError
from probe.store.reader import open_dump
from probe.store.schema import TOKEN, Sequence, Versions
from probe.store.writer import DumpWriter

SEQUENCES = prompts(4)
ALL = range(len(SEQUENCES))


def updated(times: int) -> Callable[[Tensors], None]:
    """Return what so many updates do to the weights that a scenario begins with."""

    def change(weights: Tensors) -> None:
        for update in range(times):
            rng = np.random.default_rng(update + 1)
            for name, value in weights.items():
                weights[name] = value + 0.02 * rng.normal(size=value.shape)

    return change


def trainer(job: Path, version: int, declared: Any, step: int | None = None, held: int | None = None) -> Path:
    """Write the log-prob pass of a step on weights of a version; ``declared``: (first, last) of each sequence.

    ``held``: the version whose weights it holds in truth.
    """
    change = updated(version if held is None else held)
    scenario = actor(stage="logprob", engine_logprobs=True, change_weights=change)
    folder = write_stage(job, scenario, version + 1 if step is None else step, SEQUENCES)
    with_versions(folder, {n: (*declared[n], version) for n in range(len(declared))})
    return folder


def rollout(job: Path, step: int, version: int, **changes: Any) -> Path:
    """Write a rollout that holds the weights of a version."""
    return write_stage(job, Scenario(change_weights=updated(version), **changes), step, SEQUENCES)


def gate(report: dict[str, Any]) -> dict[str, Any]:
    return next(entry for entry in report["gates"] if entry["name"] == "weights")


def causes(report: dict[str, Any]) -> set[str]:
    return {suspect["cause"] for suspect in report["suspects"]}


# -- what a lag explains ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 2])
def test_a_declared_lag_warns_and_says_how_many_versions_it_is(tmp_path, lag):
    # GIVEN a job whose trainer declares that all it trains on is of older weights, which the rollout holds
    rollout(tmp_path / "job", 4, 3 - lag)
    trainer(tmp_path / "job", 3, [(3 - lag, 3 - lag)] * 4)
    report = compared(tmp_path / "job")

    # THEN nothing is stale, and no row can be judged
    assert gate(report)["status"] == "warn" and {f["cause"] for f in gate(report)["findings"]} == {"lagged-weights"}
    older = f"4 of 4 sequences of a ran with weights {lag} version{'s' if lag > 1 else ''} older than its own"
    assert older in gate(report)["detail"] and "not checked" in gate(report)["detail"]
    assert (report["verdict"], exit_status(report)) == ("incomparable", 2)
    assert "of another weight version" in report["headline"] and "stale-weights" not in causes(report)
    rows = report["coverage"]["rows"]
    assert rows["joined"] == 0 and set(rows["a"]) <= {"other_version", "not_executed"} and rows["a"]["other_version"]
    assert report["next_commands"][0].endswith("--across-versions")

    # AND asked for, they are compared, and what differs is put down to the lag
    report = compared(tmp_path / "job", across_versions=True)
    assert report["coverage"]["rows"]["joined"] and report["tokens"]["compared"]
    assert "lagged-weights" in causes(report) and "stale-weights" not in causes(report)


def test_rows_of_the_trainers_own_version_are_judged(tmp_path):
    # GIVEN an engine that got an update after two of four sequences, and a trainer that declares just that
    rollout(tmp_path / "job", 4, 3, sketched=lambda w: w.update(older()))
    with_versions(tmp_path / "job" / "rollout" / "step4", {}, dict.fromkeys((2, 3), 1))
    trainer(tmp_path / "job", 3, [(2, 2), (2, 2), (3, 3), (3, 3)])
    report = compared(tmp_path / "job", min_coverage=0.1)

    # THEN the sketches, which are of before the update, lag; the others' rows are compared and agree
    assert gate(report)["status"] == "warn" and "2 of 4 sequences" in gate(report)["detail"]
    rows, tokens = report["coverage"]["rows"], [len(ids) - 1 for _, ids, _ in SEQUENCES]
    assert rows["joined"] == sum(tokens[2:]) and rows["a"]["other_version"] == sum(tokens[:2])
    assert report["verdict"] == "consistent" and "stale-weights" not in causes(report)
    assert compared(tmp_path / "job")["verdict"] == "incomparable"  # by default too few


def older() -> Tensors:
    """Return the weights of version 2."""
    weights = make_weights(Scenario().model, 0)
    updated(2)(weights)
    return weights


def test_a_step_is_compared_with_the_earlier_one_that_generated_for_it(tmp_path):
    # GIVEN sequences that were generated in step 3 and trained on in step 4, by the same weights
    rollout(tmp_path / "job", 3, 3)
    trainer(tmp_path / "job", 3, [(3, 3)] * 4)
    report = compared(tmp_path / "job/rollout/step3", tmp_path / "job/logprob/step4")
    assert report["verdict"] == "consistent"


@pytest.mark.parametrize("later", [(), (2, 3)])
def test_weights_that_lag_in_number_only_are_compared(tmp_path, later):
    # GIVEN a lag of one version of weights that no update has changed yet, as in a job's first step
    rollout(tmp_path / "job", 1, 0)
    trainer(tmp_path / "job", 1, [(0, 0)] * 4, step=1, held=0)
    with_versions(tmp_path / "job/rollout/step1", {}, dict.fromkeys(later, 1))
    report = compared(tmp_path / "job", min_coverage=0.1)

    # THEN rows of the weights that both hold sketches of are compared, those of after an update that the engine got not
    assert report["verdict"] == "consistent" and gate(report)["status"] == "warn"
    assert "39 parameters agree" in gate(report)["detail"] and "1 version older" in gate(report)["detail"]
    rows = report["coverage"]["rows"]
    assert rows["a"].get("other_version", 0) == sum(len(SEQUENCES[n][1]) - 1 for n in later)
    assert rows["joined"] and report["tokens"]["compared"]


def test_no_lag_and_equal_weights_pass_whatever_the_engine_counted(tmp_path):
    rollout(tmp_path / "job", 4, 3)
    with_versions(tmp_path / "job" / "rollout" / "step4", {}, dict.fromkeys(ALL, 3))
    trainer(tmp_path / "job", 3, [(3, 3)] * 4)
    report = compared(tmp_path / "job")
    assert report["verdict"] == "consistent" and gate(report)["status"] == "pass"


# -- what it does not -------------------------------------------------------------------------------------------------


def assert_stale(report: dict[str, Any], *words: str) -> None:
    assert gate(report)["status"] == "fail" and report["verdict"] == "divergent", report["headline"]
    assert report["suspects"][0]["cause"] == "stale-weights"
    assert all(word in gate(report)["detail"] for word in words), gate(report)["detail"]


@pytest.mark.parametrize("declared", [[], [(-1, -1)] * 4])
def test_other_weights_without_a_declaration_are_stale(tmp_path, declared):
    rollout(tmp_path / "job", 4, 2)
    trainer(tmp_path / "job", 3, declared)
    assert_stale(compared(tmp_path / "job"))


def test_a_sync_that_never_arrived_is_stale_whatever_verl_believes(tmp_path):
    # GIVEN a rollout that is declared to hold the trainer's weights, and holds those of the step before
    rollout(tmp_path / "job", 4, 2)
    trainer(tmp_path / "job", 3, [(3, 3)] * 4)
    trainer(tmp_path / "job", 2, [(2, 2)] * 4)
    assert_stale(compared(tmp_path / "job", step=4), "declares that they are its own, version 3", "version 2 (step 3)")


@pytest.mark.parametrize("held", [1, 2])
def test_a_sync_that_never_arrived_under_a_declared_lag_is_stale_where_the_version_was_recorded(tmp_path, held):
    # GIVEN a lag of one version by design, and the weights of the trainer's earlier steps
    job = tmp_path / "job"
    rollout(job, 4, held)
    for version in (1, 2, 3):
        trainer(job, version, [(version - 1, version - 1)] * 4)
    report = compared(job, step=4)

    # THEN a rollout that holds them is fine, and one that holds still older ones is not
    if held == 2:
        assert gate(report)["status"] == "warn" and "version 2 (step 3), as declared" in gate(report)["detail"]
        assert "stale-weights" not in causes(report)
    else:
        assert_stale(report, "not the declared version 2 as recorded in step 3", "version 1 (step 2)")


def test_sequences_of_two_versions_cannot_have_run_with_one(tmp_path):
    # GIVEN an engine that counted no update, where sequences are declared to be of before and after a sync
    rollout(tmp_path / "job", 5, 2)
    trainer(tmp_path / "job", 4, [(2, 2), (2, 2), (3, 3), (3, 3)])
    assert_stale(compared(tmp_path / "job"), "sequences of several versions ran with these weights")


def test_declarations_of_both_sides_are_no_lag(tmp_path):
    trainer(tmp_path / "one", 2, [(2, 2)] * 4)
    trainer(tmp_path / "two", 3, [(3, 3)] * 4)
    assert_stale(compared(tmp_path / "one" / "logprob", tmp_path / "two" / "logprob"))


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_log_probs_of_a_declared_lag_are_what_an_update_corrects(tmp_path):
    # GIVEN a lagging job, WHEN its log-probs are read for the update THEN they are compared, and the lag is said
    rollout(tmp_path / "job", 4, 2)
    trainer(tmp_path / "job", 3, [(2, 2)] * 4)
    batch, _ = read_dumps((tmp_path / "job",))
    assert len(batch) == sum(len(ids) - prompt for _, ids, prompt in SEQUENCES)
    assert any("1 version older" in note for note in batch.notes)


def test_a_lagging_job_of_tokens_only_is_incomparable_and_not_stale(tmp_path):
    job = tmp_path / "job"
    for folder in (rollout(job, 4, 2), trainer(job, 3, [(2, 2)] * 4)):
        without_tensors(folder)
    report = compared(job)
    assert report["verdict"] == "incomparable" and gate(report)["status"] == "warn"
    assert "stale-weights" not in causes(report)


# -- the table --------------------------------------------------------------------------------------------------------


def test_what_a_trainer_declares_is_read_back(tmp_path):
    folder = trainer(tmp_path / "job", 3, [(2, 3), (3, 3)])
    with open_dump(folder) as dump:
        assert [s.declared for s in dump.sequences] == [Versions(2, 3, 3), Versions(3, 3, 3), None, None]


@pytest.mark.parametrize("killed", [False, True])
def test_a_writer_keeps_what_is_declared(tmp_path, killed):
    """GIVEN two files of one step, THEN each sequence has what its own file declares, of a killed process too."""
    for rank, declared in ((0, Versions(2, 3, 3)), (1, None)):
        path = tmp_path / "logprob" / "step1" / f"rank{rank}.h5"
        writer = DumpWriter(path, {"schema": 1, "stage": "logprob", "engine": {"name": "x"}})
        ids = np.arange(4) + rank
        sequence = Sequence(0, f"u{rank}", prompt_len=2, length=4, tokens=ids)
        number = writer.add_sequence(sequence)
        sequence.declared = declared
        writer.end_sequence(sequence, ids)
        tokens = [(number, p, token, p > 1, -1.0, np.nan) for p, token in enumerate(ids)]
        writer.add_tokens(np.array(tokens, TOKEN))
        if killed:
            writer.flush()
            writer.abandon()
        else:
            writer.close()
    with open_dump(tmp_path / "logprob" / "step1") as dump:
        assert {s.uid: s.declared for s in dump.sequences} == {"u0": Versions(2, 3, 3), "u1": None}


def test_a_declaration_of_no_sequence_is_refused(tmp_path):
    folder = rollout(tmp_path / "job", 4, 2)
    with_versions(folder, {9: (1, 1, 1)})
    with pytest.raises(DumpError, match="names a sequence"):
        open_dump(folder)


# -- any pieces -------------------------------------------------------------------------------------------------------


@st.composite
def trajectory(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], Versions]:
    """Draw a trajectory's ids, its pieces in the rollout (tokens, engine's count), and what is declared of it.

    Each piece is of the version that its count says, counted from the trajectory's first.
    """
    length = draw(st.integers(4, 8))
    ends = sorted(draw(st.sets(st.integers(3, length), min_size=1, max_size=3)))
    counts = sorted(draw(st.lists(st.integers(0, 2), min_size=len(ends), max_size=len(ends), unique=True)))
    first = draw(st.integers(0, 3))
    last = first + counts[-1] - counts[0] + (0 if ends[-1] == length else draw(st.integers(0, 1)))
    trained = last + draw(st.integers(0, 2))
    return list(range(100, 100 + length)), list(zip(ends, counts)), Versions(first, last, trained)


@given(trajectory())
@settings(deadline=None, max_examples=300)
def test_a_lag_is_never_said_to_be_less_than_it_is(drawn):
    """GIVEN any pieces of known versions, THEN each one's true lag lies within the bounds that are found."""
    ids, pieces, declared = drawn
    rows = [seq(f"r{n}", ids[:end], 2, trajectory="t", weight_version=c) for n, (end, c) in enumerate(pieces)]
    one, two = side(*rows), side(seq("x", ids, 2, declared=declared))
    join = join_sequences(one, two)
    found = lag_of(join, one.sequences, two.sequences)
    assert found is not None and found.side == 1 and {n for n, *_ in found.pieces} == set(range(len(pieces)))
    for number, few, most, _ in found.pieces:
        true = declared.trained - (declared.first + pieces[number][1] - pieces[0][1])
        assert few <= true <= most
    earliest = declared.trained - declared.first
    assert found.sketched[0] <= earliest <= found.sketched[1]
    behind, own = row_versions(join, one.sequences, two.sequences)
    assert own == [0] and all((lag == 0) <= (declared.last == declared.trained) for lag in behind)
    mirrored = lag_of(join_sequences(two, one), two.sequences, one.sequences)
    assert mirrored is not None and mirrored.side == 0 and mirrored.rows == found.rows
