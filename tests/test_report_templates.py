"""Templates are compiled once per machine, and again where they changed or what was kept of them is damaged."""

from __future__ import annotations

import pwd

import pytest
from jinja2 import Environment

from probe import files
from probe.compare.report.shared import templates
from probe.compare.report.shared.templates import environment


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Return the names of the templates that are compiled from now on."""
    names: list[str] = []
    plain = Environment.compile

    def compile_one(self, source, name=None, *more, **others):
        names.append(str(name))
        return plain(self, source, name, *more, **others)

    monkeypatch.setattr(Environment, "compile", compile_one)
    return names


def render(folder) -> str:
    return environment(folder).get_template("page.html").render(x="<b>")


def test_a_template_is_compiled_once_and_again_when_it_changes(tmp_path, compiled):
    (tmp_path / "page.html").write_text("one {{ x }}")
    assert [render(tmp_path) for _ in range(3)] == ["one &lt;b&gt;"] * 3 and compiled == ["page.html"]
    (tmp_path / "page.html").write_text("two {{ x }}")
    assert [render(tmp_path) for _ in range(2)] == ["two &lt;b&gt;"] * 2 and compiled == ["page.html"] * 2


def test_what_was_kept_and_is_damaged_is_compiled_again(tmp_path, compiled):
    (tmp_path / "page.html").write_text("one {{ x }}")
    render(tmp_path)
    (kept,) = (tmp_path / "__pycache__").iterdir()
    whole = kept.read_bytes()
    flipped = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
    for content in (*(whole[:size] for size in range(0, len(whole), 7)), b"j2", b"nonsense" * 100, flipped):
        kept.write_bytes(content)
        before = len(compiled)
        assert [render(tmp_path) for _ in range(2)] == ["one &lt;b&gt;"] * 2 and len(compiled) == before + 1
        assert kept.read_bytes() == whole


def test_what_is_whole_but_no_code_is_compiled_again(tmp_path, compiled):
    (tmp_path / "page.html").write_text("one {{ x }}")
    render(tmp_path)
    (path,) = (tmp_path / "__pycache__").iterdir()
    (content,) = files.kept([path.parent], path.name)
    for size in range(len(content)):  # in the mark of the format, the pickled checksum, the marshalled code
        files.keep([path.parent], path.name, content[:size])
        before = len(compiled)
        assert [render(tmp_path) for _ in range(2)] == ["one &lt;b&gt;"] * 2 and len(compiled) == before + 1


@pytest.mark.parametrize("mode", [0o777, 0o775], ids=oct)
def test_code_that_others_can_write_is_neither_run_nor_kept(tmp_path, compiled, monkeypatch, mode):
    (tmp_path / "page.html").write_text("one {{ x }}")
    render(tmp_path)
    (tmp_path / "__pycache__").chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert [render(tmp_path) for _ in range(2)] == ["one &lt;b&gt;"] * 2 and len(compiled) == 2
    assert len(list((tmp_path / "cache" / "probe").iterdir())) == 1


def test_a_user_without_a_home_folder_gets_a_page(tmp_path, compiled, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as for a number that no user has
    (tmp_path / "__pycache__").write_text("a file in its place")
    (tmp_path / "page.html").write_text("one {{ x }}")
    assert [render(tmp_path) for _ in range(2)] == ["one &lt;b&gt;"] * 2 and len(compiled) == 2


def test_without_a_folder_that_can_be_written_every_process_compiles(tmp_path, compiled, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(templates, "cache_folders", lambda beside: [tmp_path / "file" / "folder"])
    (tmp_path / "page.html").write_text("one {{ x }}")
    assert [render(tmp_path) for _ in range(2)] == ["one &lt;b&gt;"] * 2 and len(compiled) == 2


def test_the_users_folder_is_taken_where_that_beside_the_templates_cannot_be(tmp_path, compiled, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "__pycache__").write_text("a file in its place")
    (folder / "page.html").write_text("one {{ x }}")
    assert [render(folder) for _ in range(2)] == ["one &lt;b&gt;"] * 2 and len(compiled) == 1
    assert [path.suffix for path in (tmp_path / "cache" / "probe").iterdir()] == [".bin"]
