"""The output folder of a dump: what --force may replace, links, what a failure deletes and what it leaves."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from dump_tools import write_dump

from probe.errors import OutputExistsError, UsageError
from probe.hooks.runners.run import is_dump_folder, output_folder

MANIFEST = {"schema": 1, "probe": "0.1.0", "stage": "rollout"}


class Failure(Exception):
    """What a run that fails raises here."""


def old_dump(folder: Path) -> Path:
    """Write a dump as ``probe dump -o`` leaves it, and return its folder."""
    output = write_dump(folder).parent
    (output / "manifest.json").write_text(json.dumps(MANIFEST))
    return output


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def fill(path: Path, force: bool = False) -> None:
    with output_folder(path, force):
        (path / "new").write_text("x")


def fail(path: Path, force: bool = False) -> None:
    with pytest.raises(Failure), output_folder(path, force):
        (path / "rollout").mkdir()
        (path / "rollout" / "new").write_text("x")
        raise Failure


# -- what --force may replace ------------------------------------------------------------------------------------------

FOREIGN = {
    "notes.txt": "notes.txt",
    "rollout/notes.txt": "rollout/notes.txt",
    "rollout/step0/notes.txt": "rollout/step0/notes.txt",
    "rollout/step0/deep/rank0.h5": "rollout/step0/deep",
    "rollout/stepx/rank0.h5": "rollout/stepx",
    "src/step0/rank0.h5": "src",
    ".git/config": ".git",
    ".replaced-x/notes.txt": ".replaced-x/notes.txt",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_force_keeps_a_dump_that_holds_something_else(tmp_path: Path, name: str) -> None:
    output = old_dump(tmp_path / "old")
    (output / name).parent.mkdir(parents=True, exist_ok=True)
    (output / name).write_text("mine")
    before = files_below(output)
    assert not is_dump_folder(output)
    with pytest.raises(OutputExistsError) as caught:
        fill(output, force=True)
    assert f"{output} also holds {FOREIGN[name]}, so --force does not delete it" in str(caught.value)
    assert files_below(output) == before


@pytest.mark.parametrize("text", ['{"manifest_version": 3, "name": "an extension"}', "[1]", "{", '{"schema": 1}'])
def test_a_manifest_of_another_program_makes_no_dump(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(OutputExistsError, match="is not a dump, so --force does not delete it"):
        fill(tmp_path, force=True)
    assert files_below(tmp_path) == {"manifest.json": text.encode()}


def test_a_link_in_a_dump_is_foreign(tmp_path: Path) -> None:
    output = old_dump(tmp_path / "old")
    (tmp_path / "elsewhere").mkdir()
    (output / "actor").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputExistsError, match="also holds actor"):
        fill(output, force=True)


@pytest.mark.parametrize("extra", ["rollout/step3/rank1.h5.partial", "rollout/step0/x.journal", ".manifest.json.12"])
def test_force_replaces_what_a_killed_run_left(tmp_path: Path, extra: str) -> None:
    output = old_dump(tmp_path / "old")
    (output / extra).parent.mkdir(exist_ok=True)
    (output / extra).write_text("x")
    fill(output, force=True)
    assert files_below(tmp_path) == {"old/new": b"x"}


def test_a_dump_without_manifest_is_known_by_its_files(tmp_path: Path) -> None:
    output = write_dump(tmp_path / "old").parent
    assert is_dump_folder(output)
    fail(output, force=True)
    fill(output, force=True)
    assert files_below(tmp_path) == {"old/new": b"x"}


# -- links and folders that are there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [fill, fail])
def test_a_link_stays_and_its_target_is_filled(tmp_path: Path, run: Callable[..., None]) -> None:
    before = files_below(old_dump(tmp_path / "disk" / "old"))
    (tmp_path / "disk" / "empty").mkdir()
    for name, force in (("old", True), ("empty", False)):
        link = tmp_path / name
        link.symlink_to(tmp_path / "disk" / name)
        run(link, force)
        assert link.is_symlink() and (tmp_path / "disk" / name).is_dir()
        failed = before if force else {}
        assert files_below(tmp_path / "disk" / name) == ({"new": b"x"} if run is fill else failed)
    assert sorted(p.name for p in (tmp_path / "disk").iterdir()) == ["empty", "old"]


def test_a_link_to_nothing_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UsageError, match=r"link is a link to .*gone, which is not there: make it or choose another -o"):
        fill(tmp_path / "link")
    for path in (tmp_path / "loop", tmp_path / "loop" / "out"):
        with pytest.raises(UsageError, match="choose another -o"):
            fill(path)
    assert not (tmp_path / "gone").exists()


def test_the_working_directory_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(old_dump(tmp_path / "old"))
    fill(Path("."), force=True)
    assert files_below(tmp_path) == {"old/new": b"x"}


def test_a_failure_deletes_only_what_the_run_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fail(tmp_path / "empty")
    assert (tmp_path / "empty").is_dir() and not any((tmp_path / "empty").iterdir())
    fail(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(Failure), output_folder(tmp_path / "shared" / "one", False):
        (tmp_path / "shared" / "other").mkdir()  # a run at the same time
        raise Failure
    assert [p.name for p in (tmp_path / "shared").iterdir()] == ["other"]


def test_an_interruption_while_setting_aside_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = old_dump(tmp_path / "old")
    before, rename, calls = files_below(output), Path.rename, []

    def interrupted(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(output, force=True)
    assert len(calls) == 3 and files_below(output) == before
    assert sorted(p.name for p in output.iterdir()) == ["manifest.json", "rollout"]


def test_what_cannot_be_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    output = old_dump(tmp_path / "old")
    monkeypatch.setattr(shutil, "rmtree", denied)
    monkeypatch.setattr(logging.getLogger("probe"), "propagate", True)
    fill(output, force=True)
    (left,) = [p for p in output.iterdir() if p.name != "new"]
    assert f"{left} could not be deleted (Permission denied)" in caplog.text
    assert "rollout/step0/rank0.h5" in files_below(left)
