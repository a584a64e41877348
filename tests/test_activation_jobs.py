"""The matrix of activation: every way to start a process x off, on, prompts only; with real Ray and torchrun.

The job (activation_job.py) does not know of probe and only its environment changes. vLLM's cells: test_job_vllm.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from activation_tools import clean_environment, python, run_python

from probe import open_dump
from probe.hooks.jobs.log import HOOKED, read_lines

pytestmark = pytest.mark.slow
JOB = Path(__file__).parent / "activation_job.py"
PROMPT, WHOLE = 4, 7
"""Tokens of each prompt of the job, and with its response."""
SWITCHES = {"off": {"DUMP_ON": "0"}, "on": {"DUMP_ON": "1"}, "prompts only": {"DUMP_ON": "1", "PROMPTS_ONLY": "1"}}
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A home of its own for Ray, with a path short enough for its sockets."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[str]:
    """The address of a Ray cluster that was started without any variable of ours."""
    port = free_port()
    words = ("start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--include-dashboard=false")
    words += ("--object-store-memory=100000000", f"--temp-dir={home}/cluster", "--disable-usage-stats")
    ray = Path(sys.executable).with_name("ray")
    log = (home / "cluster.log").open("w")
    environ = clean_environment(HOME=str(home), **RAY)
    head = subprocess.Popen([ray, *words], env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(port, head)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(timeout=60)
        head.kill()
        log.close()


def wait_for(port: int, head: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert head.poll() is None, "the Ray cluster did not start"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            time.sleep(2)
            return
        time.sleep(0.2)
    raise AssertionError("the Ray cluster did not answer")


def words_of(how: str, request: pytest.FixtureRequest) -> tuple[str | Path, ...]:
    """Return how Python is called to run the job in one of the ways."""
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master-port", str(free_port()))
    return {
        "plain": lambda: (JOB, "plain"),
        "spawn": lambda: (JOB, "spawn"),
        "torchrun": lambda: (*launch, JOB, "plain"),
        "ray new": lambda: (JOB, "ray"),
        "ray existing": lambda: (JOB, "ray", request.getfixturevalue("cluster")),
    }[how]()


def results(output: str) -> list[Any]:
    return [r for line in output.splitlines() if line.startswith("RESULT ") for r in json.loads(line[7:])]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the job computes where probe has never been heard of: not even its start-up line."""
    folder = tmp_path_factory.mktemp("expected")
    hidden = "import sys, runpy; assert 'probe' not in sys.modules; sys.argv = sys.argv[1:]; "
    hidden += "runpy.run_path(sys.argv[0], run_name='__main__')"
    (result,) = results(python("-c", hidden, JOB, "plain", cwd=folder, environ=clean_environment(**RAY)))
    return result


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("how", ["plain", "spawn", "torchrun", "ray new", "ray existing"])
def test_matrix(
    how: str, switch: str, tmp_path: Path, home: Path, expected: Any, request: pytest.FixtureRequest
) -> None:
    """GIVEN a job, WHEN only variables change, THEN it computes the same to the bit, and is recorded as they say."""
    dump = tmp_path / "d"
    environ = clean_environment(HOME=str(home), PROBE_DUMP_DIR=str(dump), **RAY, **SWITCHES[switch])
    done = run_python(*words_of(how, request), cwd=tmp_path, environ=environ, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    processes = 2 if how == "torchrun" else 1
    assert results(done.stdout) == [expected] * processes
    if switch == "off":
        assert not dump.exists() and "probe" not in done.stderr
        return
    stored = PROMPT if switch == "prompts only" else WHOLE - 1  # the last token never enters the rollout's forward
    with open_dump(dump / "rollout") as rollout:
        assert positions(rollout) == set(range(stored))
        assert {tuple(s.tokens.tolist()) for s in rollout.sequences} >= {tuple(ids) for ids in expected["ids"]}
    with open_dump(dump / "actor") as actor:
        assert positions(actor) == set(range(WHOLE))
    files = sorted(path.name for path in (dump / "rollout" / "step0").iterdir() if path.suffix != ".journal")
    if how.startswith("ray"):  # a worker gets 100 ms to end (Ray's kill_worker_timeout_milliseconds), then is killed
        files = [name.removesuffix(".partial") for name in files]
    assert files == [f"rank{rank}.h5" for rank in range(processes)]
    assert_the_log_names_the_processes_that_ran_the_model(dump, processes)


def positions(dump: Any) -> set[int]:
    tensors = [name for name, tensor in dump.tensors.items() if tensor.has_rows]
    return {int(p) for module, slot in tensors for p in dump.rows(module, slot)["position"] if p >= 0}


def assert_the_log_names_the_processes_that_ran_the_model(dump: Path, processes: int) -> None:
    """Drivers, launchers and Ray's daemons run no model: they say nothing."""
    hooked = [line for line in read_lines(dump) if line.kind == HOOKED]
    assert len(hooked) == processes and all(line.text.startswith("transformers ") for line in hooked)
    assert {line.process for line in read_lines(dump)} == {line.process for line in hooked}


def test_probe_dump_runs_the_job(tmp_path: Path, home: Path) -> None:
    """GIVEN an unchanged job on Ray, WHEN probe dump runs it, THEN it says what it recorded and what comes next."""
    command = [
        sys.executable,
        "-m",
        "probe",
        "dump",
        "--stage",
        "all",
        "-o",
        "d",
        "--",
        sys.executable,
        str(JOB),
        "ray",
    ]
    environ = clean_environment(HOME=str(home), **RAY)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "probe: rollout step 0: 2 sequences (8 prompt + 6 response tokens)" in done.stderr
    assert done.stderr.splitlines()[-1] == "probe: next: probe compare d"
    assert os.path.isdir(tmp_path / "d" / "actor")
    compared = python("-m", "probe", "compare", "d", cwd=tmp_path, environ=clean_environment())
    assert compared.startswith("verdict: ")
