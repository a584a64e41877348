"""Activation in one process: off costs nothing, on patches modules as they load, and no failure reaches the program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from activation_tools import clean_environment, python, run_python, write_library

from probe.hooks.activate import OFF, PATCHES
from probe.hooks.jobs.log import HOOKED, NAME, TROUBLE, read_lines

OURS = "import sys; print([m for m in sys.modules if m.split('.')[0] in ('probe', 'wrapt')])"
SETUP = """
import os, sys
sys.path.insert(0, os.getcwd())
from probe.hooks import activate
activate.PATCHES = {patches!r}
os.environ["DUMP_ON"] = "1"
{before}
activate.start()
activate.start()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_library(tmp_path)
    return tmp_path


def activated(folder: Path, code: str, before: str = "", patches: dict[str, str] | None = None, **environ: str) -> str:
    """Run code under a table of patches, in a process where nothing was activated before."""
    table = {"somelib": "somepatch:patch"} if patches is None else patches
    return python(
        "-c", SETUP.format(patches=table, before=before) + code, cwd=folder, environ=clean_environment(**environ)
    )


def said(folder: Path) -> list[tuple[str, str]]:
    return [(line.kind, line.text) for line in read_lines(folder / "probe-dump")]


# -- off ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", [None, *OFF, " OFF ", "No"])
def test_off_imports_nothing_of_ours(tmp_path: Path, switch: str | None) -> None:
    environ = clean_environment(**({} if switch is None else {"DUMP_ON": switch}))
    assert json.loads(python("-c", OURS, cwd=tmp_path, environ=environ).replace("'", '"')) == []
    assert list(tmp_path.iterdir()) == []


def test_on_imports_nothing_heavy_and_says_nothing_where_nothing_is_patched(tmp_path: Path) -> None:
    code = "import sys; print(sorted({m.split('.')[0] for m in sys.modules} & {'probe', 'torch', 'numpy', 'ray'}))"
    done = run_python("-c", code, cwd=tmp_path, environ=clean_environment(DUMP_ON="1"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "['probe']\n", "")
    assert list(tmp_path.iterdir()) == []


def test_isolated_python_obeys_the_switch_and_python_without_site_is_left_alone(tmp_path: Path) -> None:
    environ = clean_environment(DUMP_ON="1")
    assert "probe.hooks.activate" in python("-I", "-c", OURS, cwd=tmp_path, environ=environ)
    assert python("-S", "-c", OURS, cwd=tmp_path, environ=environ) == "[]\n"


def test_the_start_up_line_survives_a_package_that_is_gone(tmp_path: Path) -> None:
    """GIVEN the line where probe cannot be imported, WHEN Python starts with DUMP_ON=1, THEN nothing is said."""
    line = (Path(__file__).parent.parent / "hooks" / "start.pth").read_text().splitlines()[-1]
    code = f"import sys; sys.modules['probe'] = None; exec({line!r}); print('fine')"
    done = run_python("-S", "-c", code, cwd=tmp_path, environ=clean_environment(DUMP_ON="1"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_the_line_and_the_module_agree_on_what_off_is() -> None:
    line = (Path(__file__).parent.parent / "hooks" / "start.pth").read_text().splitlines()[-1]
    words = line.partition(" in (")[2].partition(")")[0]
    assert {word.strip().strip('"') for word in words.split(",")} == set(OFF)


# -- on ----------------------------------------------------------------------------------------------------------------


def test_a_module_is_patched_when_it_is_imported_and_only_once(folder: Path) -> None:
    assert activated(folder, "import somelib; activate.start(); print(somelib.answer())") == "42\n"
    assert said(folder) == [(HOOKED, "somelib 1.2")]


def test_a_module_that_is_there_already_is_patched_too(folder: Path) -> None:
    assert activated(folder, "print(somelib.answer())", before="import somelib") == "42\n"


def test_an_entry_point_switches_on_what_the_program_set_itself(folder: Path) -> None:
    code = """
import os, sys
sys.path.insert(0, os.getcwd())
os.environ["DUMP_ON"] = "1"
import probe.hooks.activate
probe.hooks.activate.PATCHES = {"somelib": "somepatch:patch"}
from probe.hooks.plugin import start
start()
import somelib
print(somelib.answer())
"""
    assert python("-c", code, cwd=folder, environ=clean_environment()) == "42\n"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("somepatch:fail", "RuntimeError: no such method"),
        ("somepatch:gone", "AttributeError: module 'somepatch' has no attribute 'gone'"),
        ("nopatch:patch", "ModuleNotFoundError: No module named 'nopatch'"),
    ],
)
def test_a_patch_that_fails_is_one_line_and_the_program_goes_on(folder: Path, target: str, reason: str) -> None:
    patches = {"somelib": target, "otherlib": "somepatch:patch"}
    assert activated(
        folder, "import somelib, otherlib; print(somelib.answer(), otherlib.answer())", patches=patches
    ) == ("41 8\n")
    assert said(folder) == [(TROUBLE, f"somelib is not recorded ({reason})"), (HOOKED, "otherlib")]


def test_a_setting_that_cannot_work_is_said_once_and_nothing_is_patched(folder: Path) -> None:
    patches = {"somelib": "somepatch:patch", "otherlib": "somepatch:patch"}
    code = "import somelib, otherlib; print(somelib.answer(), otherlib.answer())"
    assert activated(folder, code, patches=patches, PROBE_TASK="everything") == "41 7\n"
    ((kind, text),) = said(folder)
    assert kind == TROUBLE and text.startswith("nothing is recorded: task 'everything' is not supported: use tokens")


def test_a_switch_that_is_no_switch_is_said(folder: Path) -> None:
    done = run_python("-c", "pass", cwd=folder, environ=clean_environment(DUMP_ON="maybe"))
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert done.stderr.endswith("DUMP_ON is 'maybe': use 1 or 0; nothing is recorded\n")


def test_without_wrapt_one_line_says_what_to_install(folder: Path) -> None:
    before = "sys.modules['wrapt.importer'] = None"
    assert activated(folder, "import somelib; print(somelib.answer())", before=before) == "41\n"
    ((kind, text),) = said(folder)
    assert kind == TROUBLE and "pip install wrapt" in text


def test_a_dump_folder_that_cannot_be_written_does_not_stop_the_program(folder: Path) -> None:
    (folder / "file").write_text("")
    environ = clean_environment(PROBE_DUMP_DIR=str(folder / "file" / "d"))
    code = SETUP.format(patches={"somelib": "somepatch:patch"}, before="") + "import somelib; print(somelib.answer())"
    done = run_python("-c", code, cwd=folder, environ=environ)
    assert (done.returncode, done.stdout) == (0, "42\n")
    assert done.stderr.endswith("hooked somelib 1.2\n") and done.stderr.count("\n") == 1


def test_children_in_other_folders_write_into_the_same_dump(folder: Path) -> None:
    (folder / "below").mkdir()
    child = "import os; print(os.environ['PROBE_DUMP_DIR'], os.environ['PROBE_CONFIG'])"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], cwd='below', check=True)"
    environ = clean_environment(DUMP_ON="1", PROBE_DUMP_DIR="d", PROBE_CONFIG="c.json")
    assert python("-c", code, cwd=folder, environ=environ).split() == [str(folder / "d"), str(folder / "c.json")]


def test_a_config_file_may_say_where_the_dump_is(folder: Path) -> None:
    (folder / "c.json").write_text('{"dump_path": "elsewhere"}')
    activated(folder, "import somelib", PROBE_CONFIG="c.json")
    assert [line.text for line in read_lines(folder / "elsewhere")] == ["somelib 1.2"]


def test_the_program_s_own_logging_gets_the_lines(folder: Path) -> None:
    code = SETUP.format(
        patches={"somelib": "somepatch:patch"},
        before="import logging; logging.basicConfig(level='INFO', format='mine: %(message)s')",
    )
    done = run_python("-c", code + "import somelib", cwd=folder, environ=clean_environment())
    assert done.stderr == "mine: hooked somelib 1.2\n"


def test_a_forked_child_says_its_own_lines(folder: Path) -> None:
    code = """
import somelib
from probe.hooks.jobs.log import note, read_lines, folder
note("once")
note("once")
child = os.fork()
if not child:
    note("once")
    os._exit(0)
os.waitpid(child, 0)
print(len({line.process for line in read_lines(folder())}))
"""
    assert activated(folder, code) == "2\n"
    assert [text for _, text in said(folder)] == ["somelib 1.2", "once", "once"]


def test_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("2026-01-01T00:00:00\thost:1\t-\thooked\tsomelib\tpython\n2026-01-01T00:00:00\tho")
    assert [line.process for line in read_lines(tmp_path)] == ["host:1"]
    assert read_lines(tmp_path / "gone") == []


def test_the_doctor_tells_whether_programs_are_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from probe.cli import doctor

    assert doctor._activation() == {"ready": True, "missing": []}
    monkeypatch.setattr(doctor.sys, "executable", str(without_site(tmp_path)))
    assert doctor._activation()["missing"] == [
        "the start-up line zz_probe_rl.pth is not in site-packages: install probe-rl again"
    ]
    monkeypatch.setitem(sys.modules, "wrapt", None)
    assert doctor._activation()["missing"] == ["the package wrapt is missing: pip install wrapt"]


def without_site(folder: Path) -> Path:
    """Return a Python that runs no start-up line."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    return script


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", sorted(set(PATCHES.values())))
def test_every_patch_is_there(target: str) -> None:
    import importlib

    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_probe_command_is_not_recorded(tmp_path: Path) -> None:
    """GIVEN DUMP_ON=1 in the shell, WHEN probe itself runs, THEN it and its children are left alone."""
    code = """
import contextlib, os, sys
from probe.cli.main import main
with contextlib.suppress(SystemExit):
    main(["--version"])
from probe.hooks import activate
print(activate.State.started, activate.State.standing_down, os.environ.get("DUMP_ON"))
"""
    out = python("-c", code, cwd=tmp_path, environ=clean_environment(DUMP_ON="1"))
    assert out.splitlines()[-1] == "True True None"
