"""Files that appear whole, and files that are kept: never read from where another user could have put them."""

from __future__ import annotations

import os
import pwd
import threading
from pathlib import Path

import pytest

from probe import files
from probe.files import cache_folders, keep, kept, replace_all, shared_folders

ROOT = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
ANOTHER = 54321


def test_processes_of_the_same_number_write_the_same_file_at_once(tmp_path, monkeypatch):
    # GIVEN two containers that share a folder, in which this process has the same number
    monkeypatch.setattr(os, "getpid", lambda: 7)
    problems: list[Exception] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(200):
                replace_all({tmp_path / "file": content})
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(letter * 50_000,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # THEN none is in the other's way, and the file is one of the two
    assert not problems and os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() in (b"a" * 50_000, b"b" * 50_000)


def test_reports_get_the_rights_that_the_user_gives_files(tmp_path):
    before = os.umask(0o002)
    try:
        replace_all({tmp_path / "report": b""})
        keep([tmp_path / "kept"], "code", b"")
    finally:
        os.umask(before)
    rights = [path.stat().st_mode & 0o777 for path in (tmp_path / "report", tmp_path / "kept" / "code")]
    assert rights == [0o664, 0o644] and (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


def test_what_is_kept_is_found_again_unless_it_is_damaged(tmp_path):
    keep([tmp_path], "code", b"content")
    whole = (tmp_path / "code").read_bytes()
    assert list(kept([tmp_path / "none", tmp_path], "code")) == [b"content"] and not list(kept([tmp_path], "other"))
    for size in range(len(whole)):
        (tmp_path / "code").write_bytes(whole[:size])
        assert not list(kept([tmp_path], "code"))


def another_folder(folder: Path) -> None:
    os.chown(folder, ANOTHER, -1)


def another_file(folder: Path) -> None:
    os.chown(folder / "code", ANOTHER, -1)


def anybodys_folder(folder: Path) -> None:
    folder.chmod(0o1777)


def the_groups_folder(folder: Path) -> None:
    folder.chmod(0o770)


def the_groups_file(folder: Path) -> None:
    (folder / "code").chmod(0o664)


GIVEN_AWAY = [pytest.param(change, marks=ROOT) for change in (another_folder, another_file)]


@pytest.mark.parametrize("change", [*GIVEN_AWAY, anybodys_folder, the_groups_folder, the_groups_file])
def test_what_another_could_have_written_is_not_read(tmp_path, change):
    folder = tmp_path / "folder"
    keep([folder], "code", b"content")
    assert list(kept([folder], "code")) == [b"content"]
    change(folder)
    assert not list(kept([folder], "code"))


@pytest.mark.parametrize("change", [*GIVEN_AWAY[:1], anybodys_folder, the_groups_folder])
def test_where_others_can_write_nothing_is_kept_but_in_a_folder_of_ones_own(tmp_path, change):
    named = tmp_path / "named"
    named.mkdir()
    change(named)
    keep(shared_folders(named), "code", b"content")
    (own,) = named.iterdir()
    assert own.is_dir() and own.stat().st_mode & 0o777 == 0o700
    assert list(kept(shared_folders(named), "code")) == [b"content"]


def test_the_users_folder_is_left_out_where_there_is_none(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as for a number that no user has
    assert cache_folders(tmp_path) == [tmp_path / "__pycache__"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folders(tmp_path)[1:] == [tmp_path / ".cache" / "probe"]


def test_files_have_no_owners_where_the_system_knows_none(tmp_path, monkeypatch):
    monkeypatch.delattr(files.os, "geteuid")
    folder = tmp_path / "folder"
    folder.mkdir(0o777)
    keep(shared_folders(folder), "code", b"content")
    assert list(kept(shared_folders(folder), "code")) == [b"content"] and os.listdir(folder) == ["code"]
