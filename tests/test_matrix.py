"""A part of the matrix of tests/matrix.py: every setting at least once, spread over the families.

``make matrix`` runs all of it. Dumps go through the command line, so each takes a process or two of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import ACTORS, FAMILIES, GENERATED, ROLLOUTS, Matrix, by_name

pytestmark = pytest.mark.slow

PAIRS = (
    ("qwen2", GENERATED, "Megatron TP2"),
    ("qwen2", "vLLM TP1", "Megatron TP2"),
    ("qwen2", GENERATED, "Megatron PP2"),
    ("qwen3", GENERATED, "Megatron TP2+SP"),
    ("qwen3", "vLLM TP2", "Megatron TP2+SP"),
    ("qwen3", "vLLM TP2", "Megatron CP2 packed"),
    ("qwen3", "vLLM TP2", "HF"),
    ("llama", GENERATED, "Megatron PP2+VPP2"),
    ("llama", "vLLM chunked prefill", "Megatron PP2+VPP2"),
    ("llama", "vLLM chunked prefill", "FSDP2"),
    ("llama", "vLLM chunked prefill", "Megatron TP1 packed"),
    ("mixtral", "vLLM TP2", "Megatron EP2"),
    ("mixtral", "vLLM TP2", "Megatron TP1 padded"),
    ("mixtral", GENERATED, "HF"),
)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize(("family", "rollout", "actor"), PAIRS, ids=lambda value: value.replace(" ", "-"))
def test_every_canonical_tensor_meets_on_every_row(matrix: Matrix, family: str, rollout: str, actor: str) -> None:
    cell = matrix.cell(family, by_name(ROLLOUTS, rollout), by_name(ACTORS, actor))
    assert cell.good, str(cell)
    assert cell.tensors >= 12 * 4


def test_the_chosen_pairs_cover_every_setting_and_family() -> None:
    assert {rollout for _, rollout, _ in PAIRS} == {setting.name for setting in ROLLOUTS}
    assert {actor for _, _, actor in PAIRS} == {setting.name for setting in ACTORS}
    assert {family for family, _, _ in PAIRS} == set(FAMILIES)


def test_the_committed_table_is_that_of_the_whole_matrix() -> None:
    """docs/matrix.md must name every setting and family, and say of every cell how it went."""
    text = (Path(__file__).parents[1] / "docs" / "matrix.md").read_text()
    for family in FAMILIES:
        section = text.split(f"## {family}\n")[1].split("\n## ")[0]
        assert all(setting.name in section for setting in ROLLOUTS)
        for setting in ACTORS:
            if family in setting.families:
                row = next(line for line in section.splitlines() if line.startswith(f"| {setting.name} |"))
                assert all(cell.strip() for cell in row.strip("|").split("|")), row
