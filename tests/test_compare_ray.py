"""``probe compare --ray``: a real Ray cluster measures the tensors, and the report is the same, number for number."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_folders import write_job
from synthetic_dumps import Scenario, actor, write_dump

from probe import kernels
from probe.cli.main import run
from probe.compare.cluster import Failed, connected, measure_there, sides_of
from probe.compare.run import compare_dumps
from probe.errors import UsageError
from probe.store.reader import open_dump

pytest.importorskip("ray")
RAY = Path(sys.executable).with_name("ray")


def test_without_a_cluster_the_sentence_says_how_to_start_one(monkeypatch, tmp_path):
    import ray

    def refuse(**options):
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(UsageError, match=r"no Ray cluster can be reached at auto \(Could not .*'ray start --head'"):
        compare_dumps(write_job(tmp_path / "job"), ray="auto")


def test_without_ray_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UsageError, match="--ray needs Ray, which is not installed: pip install 'probe-rl"),
        connected("x"),
    ):
        pass


def test_a_worker_of_another_version_refuses(tmp_path):
    import dataclasses

    job = write_job(tmp_path / "job")
    with open_dump(job / "rollout") as a, open_dump(job / "logprob") as b:
        told = dataclasses.replace(sides_of(a, b, None), version="9")
        with pytest.raises(RuntimeError, match=r"here, 9 where"):
            measure_there(told, None, (None, None))  # type: ignore[arg-type]
    assert Failed(True, "p", "f").features


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of a Ray cluster of one node with two workers, stopped after the tests."""
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"pr{os.getpid()}"  # Ray's sockets allow short paths only
    words = ["start", "--head", "--port=0", "--num-cpus=2", "--disable-usage-stats", "--include-dashboard=false"]
    words += [f"--temp-dir={folder}", "--object-store-memory=100000000"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run([RAY, *words], capture_output=True, text=True, timeout=300, env=environ)
    assert made.returncode == 0, made.stderr
    found = re.search(r"--address='([^']+)'", made.stdout)
    assert found, made.stdout
    yield found[1]
    stop(folder)
    shutil.rmtree(folder, ignore_errors=True)


def stop(folder: Path) -> None:
    """End the processes of the cluster whose folder this is, and no others."""
    for signal_number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        for pid in processes_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        deadline = time.monotonic() + patience
        while processes_of(folder) and time.monotonic() < deadline:
            time.sleep(0.1)


def processes_of(folder: Path) -> list[int]:
    """Return the processes that have a cluster's folder in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.fixture
def loops(monkeypatch):
    """Have all tensors measured by the compiled loops, here and on the cluster: small ones are left to numpy else.

    A process that has loaded them before uses them for small tensors too, whose sums then differ in the last digits.
    """
    monkeypatch.setattr(kernels, "WORTH_LOADING", 0)


def figures(report: dict) -> str:
    """Return a report as text, without what says when and how it was made."""
    drop = ("created", "next_commands")
    return json.dumps({key: value for key, value in report.items() if key not in drop})


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [False, True], ids=["healthy", "stale"])
@pytest.mark.usefixtures("loops")
def test_the_report_is_the_same(cluster, tmp_path, faulty):
    job = write_job(tmp_path / "job", weights_seed=int(faulty))
    here, there = compare_dumps(job), compare_dumps(job, ray=cluster)
    assert figures(here) == figures(there) and here["verdict"] == ("divergent" if faulty else "consistent")
    assert all(f"--ray {cluster}" in c for c in there["next_commands"] if c.startswith("probe compare"))


@pytest.mark.slow
@pytest.mark.usefixtures("loops")
def test_tensors_that_cannot_be_paired_are_so_there_too(cluster, tmp_path):
    # GIVEN two sides whose MLP is of different widths
    from synthetic_model import Tiny

    paths = [
        write_dump(tmp_path / "a", Scenario()),
        write_dump(tmp_path / "b", actor(model=Tiny(ffn=40))),
    ]
    here, there = (compare_dumps(*paths, **options) for options in ({}, {"ray": cluster}))
    assert figures(here) == figures(there)
    assert any(layer["verdict"] == "incomparable" for layer in there["layers"])


@pytest.mark.slow
def test_the_command_line(cluster, tmp_path, capsys):
    job = write_job(tmp_path / "job")
    assert run(["-q", "compare", str(job), "--ray", cluster, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "consistent"
    # a dump that the workers cannot see
    with connected(cluster) as ray:
        with open_dump(job / "rollout") as a, open_dump(job / "logprob") as b:
            sides = sides_of(a, b, None)
        (job / "logprob/step0/rank0.h5").rename(tmp_path / "gone.h5")
        with pytest.raises(Exception, match="rank0"):
            ray.get(ray.remote(measure_there).remote(sides, None, (None, None)))
