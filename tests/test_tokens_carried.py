"""A job whose rollout engine is not recorded: the log-probs that the rollout gave the trainer stand for it."""

from __future__ import annotations

import numpy as np
import pytest
from job_folders import write_stage, write_update
from synthetic_dumps import actor, prompts

from probe.compare.run import compare_dumps
from probe.compare.tokens.read import read_sources
from probe.compare.tokens.run import compare_token_sources
from probe.errors import CompareError, UsageError
from probe.store.reader import open_dump

GIVEN = "rollout_log_probs"


@pytest.fixture
def job(tmp_path):
    """A function that writes a job of a log-prob pass and an update that stores the columns given."""

    def write(**columns):
        folder = tmp_path / "job"
        write_stage(folder, actor(stage="logprob", engine_logprobs=True), 3)
        write_update(folder, columns, 3)
        return folder

    return write


def test_what_the_rollout_gave_is_compared_with_the_trainers_own(job):
    """GIVEN an update that stores rollout_log_probs and no rollout, THEN a is what it stores, b the log-prob pass."""
    folder = job(rollout_log_probs=-4.0)
    batch, _ = read_sources([folder])
    with open_dump(folder / "logprob" / "step3") as dump:
        of = {s.uid: s for s in dump.sequences}
        known = {(r["sequence"], r["position"]): r["logprob"] for r in dump.tokens}
    assert sorted(batch.labels) == sorted(uid for uid, _, _ in prompts())
    assert len(batch) == sum(len(ids) - prompt_len for _, ids, prompt_len in prompts())
    uid = [batch.labels[number] for number in batch.sequence]
    # the k-th response token of a sequence was stored as -4 + k, in float32
    np.testing.assert_array_equal(batch.a, -4.0 + batch.position)
    own = [known[of[u].index, of[u].prompt_len + place] for u, place in zip(uid, batch.position)]
    np.testing.assert_array_equal(batch.b, own)
    assert batch.origins[0].key == GIVEN and any("not recorded" in note for note in batch.notes)


def test_the_report_names_where_they_are_from(job):
    folder = job(rollout_log_probs=-4.0, advantages=0.5)
    report = compare_token_sources([folder], step=3)
    assert report["a"]["key"] == GIVEN and report["a"]["path"] == str(folder / "update" / "step3")
    assert not any(command.startswith("probe compare") for command in report["next_commands"])


def test_an_update_without_them_says_what_to_set(job):
    """GIVEN a rollout that returned no log-probs, THEN the error names the setting of verl's that makes it."""
    with pytest.raises(CompareError, match="calculate_log_probs=True") as raised:
        read_sources([job(advantages=1.0)])
    assert GIVEN in str(raised.value)


def test_compare_points_to_the_log_probs(job):
    """GIVEN no rollout, WHEN tensors are to be compared, THEN the error says what can be compared instead."""
    with pytest.raises(UsageError, match="probe tokens"):
        compare_dumps(job(rollout_log_probs=-4.0))


def test_another_step_is_refused(job):
    with pytest.raises(UsageError):
        read_sources([job(rollout_log_probs=-4.0)], step=4)
