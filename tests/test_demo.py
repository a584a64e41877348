"""``probe demo`` end to end: real vLLM, real Megatron-core, a broken weight, and a report that names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("demo") / "probe-demo"
    # PROMPTS_ONLY and PROBE_DUMP_N are for a user's own dumps; the demo must not follow them.
    environment = {**os.environ, "PROMPTS_ONLY": "1", "PROBE_DUMP_N": "3"}
    command = [sys.executable, "-m", "probe", "demo", "-o", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment), folder


def report_of(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / "report.json").read_text())


def test_the_demo_succeeds_and_says_so(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = demo
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert "healthy: consistent" in lines
    assert "broken: divergent" in lines
    assert f"injected: model.layers.2.mlp.down_proj.weight x 1.03 in {folder / 'model-broken'}" in lines
    assert "named by the report: scaled-weight in layers.2.mlp.down_proj of side b, which is what was broken" in lines


def test_the_demo_shows_the_commands_it_runs(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = demo
    assert done.stderr.count("probe: $ probe dump --stage ") == 3
    assert done.stderr.count(" took ") == 5


def test_the_healthy_pair_is_consistent(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    report = report_of(demo[1], "report")
    assert report["verdict"] == "consistent"
    assert (report["a"]["engine"], report["b"]["engine"]) == ("vllm", "megatron")
    assert report["first_divergence"] is None
    assert report["tokens"]["compared"] > 0
    assert not report["a"]["prompts_only"]


def test_the_broken_pair_diverges_first_where_the_weight_was_broken(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    report = report_of(demo[1], "report-broken")
    assert report["verdict"] == "divergent"
    first = report["first_divergence"]
    assert (first["name"], first["slot"]) == ("layers.2.mlp.down_proj", "output.0")


@pytest.mark.parametrize("report", ["report", "report-broken"])
@pytest.mark.parametrize("name", ["report.json", "report.html", "report.md", "report.csv"])
def test_every_form_of_both_reports_is_there(
    demo: tuple[subprocess.CompletedProcess[str], Path], report: str, name: str
) -> None:
    assert (demo[1] / report / name).stat().st_size > 0


def test_a_second_demo_is_refused_without_force(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = demo
    command = [sys.executable, "-m", "probe", "demo", "-o", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == f"probe: error: {folder} holds an earlier demo: choose another -o or add --force.\n"
