"""``probe dump -- COMMAND``: what the program gets, how it ends, what is said about what it recorded."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from activation_tools import clean_environment
from job_folders import write_stage
from synthetic_dumps import Scenario, actor, write_dump

from probe.cli.job import captured, next_command
from probe.cli.main import run as cli

PROBE = (sys.executable, "-m", "probe")
PYTHON = sys.executable


def dump(folder: Path, *words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``probe dump`` in a folder; the words after -- are the program's."""
    command = [*PROBE, "dump", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=clean_environment(**environ), timeout=120
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a job leaves: a rollout and an actor's forward."""
    folder = tmp_path_factory.mktemp("made")
    for name, scenario in (("rollout", Scenario(noise=1)), ("actor", actor(noise=2))):
        path = write_dump(folder / "each" / name, scenario)
        stage = next(p for p in path.rglob("step*") if p.is_dir())
        shutil.copytree(stage, folder / "job" / name / stage.name)
    return folder / "job"


def copying(made: Path, *stages: str, then: str = "") -> list[str]:
    """Return a program that leaves dumps of stages where it is told to."""
    code = f"""
import os, shutil
for stage in {stages!r}:
    shutil.copytree({str(made)!r} + "/" + stage, os.environ["PROBE_DUMP_DIR"] + "/" + stage)
{then}
"""
    return [PYTHON, "-c", code]


SHOW = """
import json, os
print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(("PROBE", "DUMP", "PROMPTS"))}))
"""


# -- what the program gets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ((), {}, {}),
        ((), {"PROBE_SEQS": "7", "PROBE_STAGE": "actor"}, {"PROBE_SEQS": "7", "PROBE_STAGE": "actor"}),
        (("--stage", "all"), {"PROBE_STAGE": "actor"}, {}),
        (("--stage", "rollout", "--prompts-only"), {}, {"PROBE_STAGE": "rollout", "PROMPTS_ONLY": "1"}),
        (
            (
                "--task",
                "tokens",
                "--steps",
                "0, 10",
                "--seqs",
                "0",
                "--rows",
                "64",
                "--layers",
                "1",
                "--max-bytes",
                "9",
            ),
            {"PROBE_ROWS": "5"},
            {
                "PROBE_TASK": "tokens",
                "PROBE_STEPS": "0,10",
                "PROBE_SEQS": "0",
                "PROBE_ROWS": "64",
                "PROBE_LAYERS": "1",
                "PROBE_MAX_BYTES": "9",
            },
        ),
    ],
)
def test_the_program_gets_the_variables_and_nothing_else(
    tmp_path: Path, words: tuple[str, ...], environ: dict[str, str], expected: dict[str, str]
) -> None:
    done = dump(tmp_path, *words, "-o", "d", "--", PYTHON, "-S", "-c", SHOW, **environ)
    assert json.loads(done.stdout) == {"DUMP_ON": "1", "PROBE_DUMP_DIR": str(tmp_path / "d"), **expected}


def test_the_program_s_own_options_and_input_are_its_own(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:], sys.stdin.read())"
    command = [*PROBE, "dump", "-o", "d", "--", PYTHON, "-c", code, "--stage", "x", "--", "-o", "-h"]
    done = subprocess.run(command, input="typed", capture_output=True, text=True, cwd=tmp_path, env=clean_environment())
    assert done.stdout == "['--stage', 'x', '--', '-o', '-h'] typed\n"


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_what_was_recorded_is_summed_up_and_the_next_command_said(tmp_path: Path, made: Path) -> None:
    done = dump(tmp_path, "--stage", "all", "-o", "d", "--", *copying(made, "rollout", "actor", then="print('out')"))
    assert (done.returncode, done.stdout) == (0, "out\n")
    rollout, actor_, following = done.stderr.splitlines()
    assert rollout.startswith("probe: rollout step 0: 4 sequences (") and " tensors, " in rollout
    assert actor_.startswith("probe: actor step 0: 4 sequences (")
    assert following == "probe: next: probe compare d"


@pytest.mark.parametrize(
    ("stage", "expected"),
    [("rollout", "probe dump --stage actor --from d/rollout -o d-actor"), ("actor", "probe show d/actor")],
)
def test_one_stage_alone_leads_to_another_command(tmp_path: Path, made: Path, stage: str, expected: str) -> None:
    done = dump(tmp_path, "-o", "d", "--", *copying(made, stage))
    assert done.stderr.splitlines()[-1] == f"probe: next: {expected}"


JOBS = {
    "both sides": ({"rollout": (0,), "logprob": (0,)}, "probe compare {job}"),
    "rollout and update": ({"rollout": (0,), "update": (0,)}, None),
    "rollout and reference": ({"rollout": (0,), "reference": (0,)}, None),
    "no common step": ({"rollout": (0,), "logprob": (1,)}, None),
    "log-probs and update": ({"logprob": (0,), "update": (0,)}, None),
    "a later common step": ({"rollout": (0, 2), "actor": (2, 3)}, "probe compare {job}"),
}


@pytest.mark.parametrize("case", JOBS)
def test_the_next_command_is_one_that_is_not_refused(tmp_path: Path, case: str, capsys: pytest.CaptureFixture) -> None:
    # GIVEN a job of some stages and steps
    stages, expected = JOBS[case]
    job = tmp_path / "job"
    for stage, steps in stages.items():
        for step in steps:
            write_stage(job, Scenario(stage=stage), step)

    # WHEN what follows is asked for after the job, and by looking at it
    after = next_command(job, captured(job))
    assert cli(["show", str(job)]) == 0
    shown = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")

    # THEN both say to compare it where that can be done, and else something that can
    if expected is not None:
        assert after == shown == expected.format(job=job)
        assert cli(["-q", "compare", str(job)]) == 0
    else:
        assert not any(said.startswith("probe compare") for said in (after, shown))
        assert cli(["-q", "compare", str(job)]) == 2
    assert cli(["-q", *shlex.split(shown)[1:]]) == 0


def test_a_status_of_the_program_is_kept_and_so_is_the_dump(tmp_path: Path, made: Path) -> None:
    done = dump(tmp_path, "-o", "d", "--", *copying(made, "actor", then="raise SystemExit(3)"))
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == "probe: the command ended with status 3"
    assert list((tmp_path / "d" / "actor").iterdir())


def test_a_program_that_fails_before_it_recorded_keeps_its_status(tmp_path: Path) -> None:
    done = dump(tmp_path, "-o", "d", "--", PYTHON, "-c", "raise SystemExit(5)")
    assert done.returncode == 5 and "the command recorded nothing" in done.stderr


def test_nothing_recorded_is_an_error_that_says_where_probe_must_be_installed(tmp_path: Path) -> None:
    done = dump(tmp_path, "-o", "d", "--", PYTHON, "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (2, "ran\n")
    assert done.stderr.startswith(
        "probe: error: the command recorded nothing: none of its processes imported an engine"
    )
    assert done.stderr.count("\n") == 1 and not (tmp_path / "d").exists()


def test_nothing_recorded_tells_the_reasons_of_the_processes(tmp_path: Path) -> None:
    code = """
import subprocess, sys
from probe.hooks.jobs.log import trouble
trouble("somelib 1.2 is not recorded: set enforce_eager=True")
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "child"])
"""
    (tmp_path / "job.py").write_text(code)
    done = dump(tmp_path, "-o", "d", "--", PYTHON, "job.py")
    assert done.returncode == 2
    expected = "the command recorded nothing: somelib 1.2 is not recorded: set enforce_eager=True (2 processes)."
    assert done.stderr.splitlines()[-1] == f"probe: error: {expected}"


def test_nothing_recorded_although_a_library_was_hooked(tmp_path: Path) -> None:
    code = "import types; from probe.hooks.jobs.log import hooked; hooked(types.ModuleType('somelib.inner'))"
    done = dump(tmp_path, "-o", "d", "--", PYTHON, "-c", code)
    assert done.returncode == 2 and "it imported somelib, but no forward of a model was seen" in done.stderr


def test_a_file_that_cannot_be_read_is_said_beside_the_others(tmp_path: Path, made: Path) -> None:
    damage = "import pathlib; p = next(pathlib.Path('d/actor').rglob('*.h5')); p.write_bytes(b'x')"
    done = dump(tmp_path, "-o", "d", "--", *copying(made, "rollout", "actor", then=damage))
    assert done.returncode == 0
    assert any(line.startswith("probe: actor step 0: cannot be read") for line in done.stderr.splitlines())


# -- signals -----------------------------------------------------------------------------------------------------------


def counting(name: str) -> list[str]:
    """Return a program that says it is ready, waits for a signal, and ends with 40 + how often it has got it."""
    code = f"""
import signal, sys, time, pathlib
heard = []
signal.signal(signal.{name}, lambda *_: heard.append(1))
pathlib.Path("ready").touch()
deadline = time.monotonic() + 60
while not heard and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(40 + len(heard))
"""
    return [*PROBE, "-q", "dump", "-o", "d", "--", PYTHON, "-c", code]


def started(folder: Path, command: list[str], **keywords: Any) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own and wait until its program is ready."""
    errors = subprocess.DEVNULL
    running = subprocess.Popen(
        command, cwd=folder, env=clean_environment(), start_new_session=True, stderr=errors, **keywords
    )
    while not (folder / "ready").exists():
        assert running.poll() is None
        time.sleep(0.01)
    return running


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_reaches_the_program_once(tmp_path: Path, name: str) -> None:
    """GIVEN a program that counts a signal, WHEN probe gets it, THEN the program does, and its status is probe's."""
    running = started(tmp_path, counting(name))
    os.kill(running.pid, getattr(signal, name))
    assert running.wait(timeout=60) == 41


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")])
def test_a_key_of_the_terminal_reaches_the_program_once(tmp_path: Path, key: bytes, name: str) -> None:
    """GIVEN a terminal, WHEN Ctrl-C is pressed, THEN the program, in the same group, has it once and not forwarded."""
    ours, theirs = pty.openpty()
    try:
        take = functools.partial(fcntl.ioctl, theirs, termios.TIOCSCTTY, 0)
        running = started(tmp_path, counting(name), stdin=theirs, preexec_fn=take, pass_fds=[theirs])
        os.write(ours, key)
        assert running.wait(timeout=60) == 41
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_program_killed_by_a_signal_ends_as_a_shell_says(tmp_path: Path) -> None:
    done = dump(tmp_path, "-o", "d", "--", PYTHON, "-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == 137 and "the command ended with status 137 (SIGKILL)" in done.stderr


def test_the_program_has_the_signals_that_a_shell_would_give_it(tmp_path: Path) -> None:
    code = (
        "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT).__name__)"
    )
    assert dump(tmp_path, "-o", "d", "--", PYTHON, "-c", code).stdout == "set() default_int_handler\n"


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-o", "d", "--"), "there is no command after --"),
        (("-o", "d", "--", "no-such-program"), "no-such-program cannot be run (No such file or directory)"),
        (("-o", "d", "--model", "m", "--", "true"), "--model has no effect on a program of your own"),
        (("-o", "d", "--stage", "actor", "--tp", "2", "--", "true"), "--tp has no effect on a program of your own"),
        (("-o", "d", "--stage", "all"), "--stage all records a program of your own: add -- COMMAND"),
        (("-o", "d", "--stage", "rollout", "--task", "tokens"), "--task tokens has no effect without a program"),
        (("-o", "d", "--stage", "logprob", "--", "true"), "'logprob'"),
        (("-o", "d", "--steps", "1,x", "--", "true"), "'1,x' is not a list of whole numbers"),
        (("-o", "d", "--task", "everything", "--", "true"), "'everything'"),
        (("--", "true"), "-o"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = dump(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_without_force_and_replaced_with_it(tmp_path: Path, made: Path) -> None:
    program = copying(made, "rollout", then="from probe.hooks.jobs.log import note; note('ran')")
    assert dump(tmp_path, "-o", "d", "--", *program).returncode == 0
    (tmp_path / "d" / "step").write_text("3")
    (tmp_path / "d" / "chosen" / "step0").mkdir(parents=True)
    (tmp_path / "d" / "chosen" / "step0" / "00ff").write_text("")
    refused = dump(tmp_path, "-o", "d", "--", "true")
    assert refused.returncode == 2 and "d already exists: choose another -o or add --force" in refused.stderr
    assert dump(tmp_path, "-o", "d", "--force", "--", *program).returncode == 0
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["activation.log", "rollout"]
    nothing = dump(tmp_path, "-o", "d", "--force", "--", "true")
    assert nothing.returncode == 2 and (tmp_path / "d" / "rollout").is_dir()


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "step").write_text("mine")
    done = dump(tmp_path, "-o", "d", "--force", "--", "true")
    assert done.returncode == 2 and (tmp_path / "d" / "step").read_text() == "mine"
