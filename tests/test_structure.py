"""The house keeps its shape: one import direction, modules and functions of a size, heavy imports only where needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("probe", "hooks", "compare", "cli")
ALLOWED = {
    "probe": {"probe"},
    "hooks": {"probe", "hooks"},
    "compare": {"probe", "compare"},
    "cli": {"probe", "hooks", "compare", "cli"},
}
SOURCES = sorted(
    path
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
    if not any(part.is_symlink() for part in path.parents if part != ROOT and ROOT in part.parents)
)
TORCH_FREE = ("probe", "compare")


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import at line {node.lineno}"
        return [node.module or ""]
    return []


def room_of_import(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "probe":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "probe"


def lazily_public(path: Path, node: ast.AST, tree: ast.Module) -> bool:
    """probe/__init__.py names PrecisionDebugger for type checkers, and python -m probe starts the command line."""
    return path.name in ("__init__.py", "__main__.py") and path.parent == ROOT / "probe"


def test_sources_are_found_in_every_room() -> None:
    assert {room_of(path) for path in SOURCES} == set(ROOMS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for name in imported(node):
            room = room_of_import(name)
            if room is not None and not lazily_public(path, node, tree):
                assert room in ALLOWED[room_of(path)], f"{path}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name} is too long"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_command_line_knows_click_and_only_reports_know_rich(path: Path) -> None:
    names = {name.split(".")[0] for node in ast.walk(ast.parse(path.read_text())) for name in imported(node)}
    if room_of(path) != "cli":
        assert "click" not in names
    if room_of(path) != "cli" and path.name != "terminal.py":
        assert "rich" not in names
    if room_of(path) in TORCH_FREE:
        assert "torch" not in names


@pytest.mark.parametrize("room", ["hooks", "compare", "cli"])
def test_a_linked_folder_cannot_be_imported_twice(room: str) -> None:
    result = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"import this package as probe.{room}" in result.stderr


@pytest.mark.parametrize("module", ["probe", "probe.store.reader", "probe.compare.run", "probe.compare.report"])
def test_reading_and_comparing_never_import_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'vllm', 'transformers', 'megatron'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_repository_speaks_only_of_the_project() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    suffixes = (".py", ".md", ".cfg", ".toml", ".txt", ".html", ".css", ".js", "Makefile")
    forbidden = ("/wo" + "rk/", "/ro" + "ot/", "../sha" + "red")
    for name in filter(None, files):
        path = ROOT / name
        if name.endswith(suffixes) and path.is_file():
            text = path.read_text()
            assert not [word for word in forbidden if word in text], name
