"""``probe show JOB``: stages and steps, budgets, what the job's processes said, and what to run next."""

from __future__ import annotations

import json
import subprocess
import sys

from job_folders import with_budget, write_job, write_stage
from synthetic_dumps import Scenario

from probe.cli.main import run
from probe.cli.show_job import MAX_STEPS

LOG = (
    "2026-01-01T00:00:00\thost:1\t-\thooked\tvllm 0.14\t-m vllm\n"
    "2026-01-01T00:00:00\thost:2\t-\thooked\tvllm 0.14\t-m vllm\n"
    "2026-01-01T00:00:00\thost:2\t-\ttrouble\tno tensors: the model is compiled; set enforce_eager=True\t-m vllm\n"
)


def test_a_job_is_listed_by_stage_and_step(tmp_path, capsys):
    # GIVEN a job of two steps, one stage with a budget, one file damaged, and what its processes said
    job = write_job(tmp_path / "job", (0, 2))
    with_budget(job / "rollout" / "step0", seqs=4, rows=256)
    (job / "logprob" / "step2" / "rank0.h5").write_bytes(b"nothing")
    (job / "activation.log").write_text(LOG)

    # WHEN it is shown
    assert run(["show", str(job)]) == 0
    printed = capsys.readouterr().out

    # THEN there is a line for each, the trouble is said, and the next command compares the job
    assert "a job of 2 stages" in printed and "unreadable" in printed
    assert "budget of rollout: 4 sequences, 256 rows of each" in printed
    assert "hooked vllm 0.14 in 2 processes" in printed and "enforce_eager=True (1 process)" in printed
    assert f"next: probe compare {job}" in printed


def test_as_json(tmp_path, capsys):
    job = write_job(tmp_path / "job")
    assert run(["show", str(job), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rollout = next(entry for entry in data["stages"] if entry["stage"] == "rollout")
    assert rollout["sequences"] == 4 and rollout["logprobs"] > 0 and rollout["complete"]


def test_many_steps_are_counted(tmp_path, capsys):
    folder = write_stage(tmp_path / "job", Scenario(), 0)
    for step in range(1, MAX_STEPS + 3):
        (folder.with_name(f"step{step}")).symlink_to(folder)
    write_stage(tmp_path / "job", Scenario(stage="logprob"), 0)
    assert run(["show", str(tmp_path / "job")]) == 0
    assert "and 3 more steps of rollout" in capsys.readouterr().out


def test_one_stage_and_a_module_are_shown_as_ever(tmp_path, capsys):
    job = write_job(tmp_path / "job")
    assert run(["show", str(job / "rollout")]) == 0
    assert "rollout on vllm" in capsys.readouterr().out
    assert run(["show", str(job), "layers.0.mlp"]) == 2
    assert run(["show", str(job / "rollout"), "layers.0.mlp.down_proj"]) == 0


def test_showing_a_job_needs_no_torch(tmp_path):
    job = write_job(tmp_path / "job")
    code = f"import sys; from probe.cli.main import run; run(['show', {str(job)!r}]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
