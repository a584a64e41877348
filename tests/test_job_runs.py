"""Runs of a job into one folder: what an earlier run left is neither added to nor believed."""

from __future__ import annotations

import json
import os
import time

import pytest
from test_job_session import model, new_session, own_log, recorded, run_pass, said  # noqa: F401

from probe.hooks import activate
from probe.hooks.jobs import run as run_module
from probe.hooks.jobs.ray import variables
from probe.hooks.jobs.run import run_id
from probe.hooks.jobs.selection import Selection, hash_of
from probe.manifest import write_manifest
from probe.store.reader import open_dump


@pytest.fixture
def begin(monkeypatch):
    """Return a function that makes this process one of a run that begins now."""

    def begin(name="", at=None):
        monkeypatch.setenv("PROBE_RUN", f"{time.time() if at is None else at:.3f}-{name or os.urandom(4).hex()}")
        return run_id()

    return begin


def age(folder, seconds=3600.0):
    """Make everything in a folder older, as if it had been written that long ago."""
    for path in folder.rglob("*"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def test_a_step_of_an_earlier_run_is_not_added_to(tmp_path, model, begin):  # noqa: F811
    # GIVEN a folder in which a run has recorded a step of one stage
    first = begin()
    session = new_session(tmp_path, step=(0, 1))
    run_pass(session.recorder("actor", model), model, {"a": [1, 2, 3]})
    session.close()
    age(tmp_path / "d")
    # WHEN another run comes to the same step
    begin()
    session = new_session(tmp_path, step=(0, 1))
    recorder = session.recorder("actor", model)
    assert not recorder.begin() and not recorder.begin()
    # THEN it is said once what to do, and what is not in the way is recorded
    assert said().count("holds steps of an earlier run") == 1 and "use a new PROBE_DUMP_DIR" in said()
    run_pass(session.recorder("logprob", model), model, {"b": [1, 2, 3]})
    session.clock.advance_to(1)
    run_pass(recorder, model, {"b": [4, 5, 6]})
    session.close()
    with open_dump(tmp_path / "d" / "actor", step=0) as dump:
        assert recorded(dump) == ["a"] and dump.manifest["run"] == first
    with open_dump(tmp_path / "d" / "actor", step=1) as dump:
        assert recorded(dump) == ["b"] and dump.manifest["run"] == run_id() != first


def test_ranks_that_were_launched_one_by_one_share_a_step(tmp_path, model, begin):  # noqa: F811
    """Their runs have names of their own, but no file of the job is older than any of them."""
    start = time.time()
    for _ in range(2):
        begin(at=start)
        session = new_session(tmp_path)
        run_pass(session.recorder("actor", model), model, {"a": [1, 2, 3]})
        session.close()
    assert len(list((tmp_path / "d" / "actor" / "step0").glob("*.h5"))) == 2 and "earlier run" not in said()


def test_a_clock_that_is_behind_makes_no_earlier_run(tmp_path, monkeypatch, begin):
    """A file server's minutes are not this machine's."""
    begin()
    (tmp_path / "rank0.h5").touch()
    age(tmp_path, 600)
    assert run_module.is_earlier(tmp_path / "rank0.h5") and run_module.holds_earlier(tmp_path)
    monkeypatch.setattr(run_module, "_lag", {tmp_path: 600.0})
    assert not run_module.is_earlier(tmp_path / "rank0.h5") and not run_module.holds_earlier(tmp_path)


def test_the_step_of_an_earlier_run_is_none_of_ours(tmp_path, begin):
    begin()
    new_session(tmp_path).clock.advance_to(100)
    assert new_session(tmp_path).clock.said == 100  # another process of the same run
    age(tmp_path / "d")
    assert new_session(tmp_path).clock.said == 100  # however long ago
    begin()
    after = new_session(tmp_path)
    assert after.clock.said is None and after.step == 0
    # WHEN a trainer that was launched beside says it
    begin("trainer")
    new_session(tmp_path).clock.advance_to(3)
    begin(at=time.time() - 60)
    assert after.step == 3


def test_what_an_earlier_run_chose_counts_only_with_its_rollout(tmp_path, begin):
    begin()
    chosen, rollout = tmp_path / "chosen" / "step0", tmp_path / "rollout" / "step0"
    Selection(1, chosen).note([1, 2, 3])
    rollout.mkdir(parents=True)
    (rollout / "rank0.h5").touch()
    age(tmp_path)
    begin()
    # a rollout and a training by two commands, one after the other
    assert Selection(1, chosen, follows=True).noted() == {hash_of([1, 2, 3])}
    # WHEN only the notes were left
    (rollout / "rank0.h5").unlink()
    selection = Selection(1, chosen, follows=True)
    assert not selection.noted() and selection.admit([([4], [4, 5])]) == [True]
    Selection(1, chosen).note([7, 8])
    assert Selection(1, chosen, follows=True).noted() == {hash_of([7, 8])}


@pytest.mark.parametrize(
    ("command", "given", "named"),
    [("train.py", "", True), ("/usr/bin/torchrun", "", True), ("/bin/ray", "", False), ("child.py", "7.5-a", True)],
)
def test_the_first_process_names_the_run(monkeypatch, command, given, named):
    monkeypatch.setenv("PROBE_RUN", given)
    monkeypatch.setattr(activate.sys, "argv", [command])
    activate._name_run()
    name = os.environ["PROBE_RUN"]
    assert bool(name) is named and (not given or name == given)
    assert variables().get("PROBE_RUN") == name  # Ray hands it on
    if named:
        assert run_id() == name


def test_a_run_without_activation_has_one_name(monkeypatch):
    monkeypatch.delenv("PROBE_RUN", raising=False)
    assert run_id() == run_id() and float(run_id().partition("-")[0]) <= time.time()


def test_nodes_with_equal_process_numbers_write_one_manifest(tmp_path, monkeypatch):
    """Each runs into the other between the writing and the linking of its temporary file."""
    link, met = os.link, []

    def meeting(source, target):
        if not met:
            met.append(source)
            write_manifest(tmp_path, {"node": 2})
        link(source, target)

    monkeypatch.setattr(os, "link", meeting)
    write_manifest(tmp_path, {"node": 1})
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"node": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
