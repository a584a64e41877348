"""Kernels that round toward zero: no fault, and said; small faults do not hide behind it."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from probe import PrecisionDebugger
from probe.cli.main import run as run_cli
from probe.compare.evidence import FINE
from probe.compare.replay.rope import rotate, rotation
from probe.compare.replay.run import SideReplay, replay_side
from probe.compare.report.findings import replay_words
from probe.compare.run import compare_dumps
from probe.compare.side import read_side
from probe.store.dtypes import round_to, truncate_to
from probe.store.reader import open_dump

IDS = torch.randint(0, 197, (1, 72), generator=torch.Generator().manual_seed(1))
LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def model(request, tmp_path_factory) -> Any:
    """A small Qwen2 checkpoint, loaded in half precision."""
    path = make_checkpoint(tmp_path_factory.mktemp("m") / "model", layers=3, hidden=128, intermediate=256)
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, request.param)).eval()


def cut(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 numbers toward zero, as kernels do that drop the low bits."""
    name = str(dtype).removeprefix("torch.")
    return torch.from_numpy(truncate_to(values.double().numpy(), name)).to(dtype)


def exactly(module: Any, x: torch.Tensor) -> torch.Tensor:
    bias = 0 if module.bias is None else module.bias.float()
    return x.float() @ module.weight.float().T + bias


def replayed(folder: Path, model: Any) -> SideReplay:
    with torch.no_grad(), PrecisionDebugger(dump_path=folder, stage="actor", enabled=True).start(model):
        model(IDS, use_cache=False)
    with open_dump(folder) as opened:
        return replay_side(read_side(opened), "a", None)


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_that_rounds_toward_zero_is_fine_and_said(tmp_path, model, name):
    broken = copy.deepcopy(model)
    module = broken.model.layers[1].get_submodule(name)
    module.register_forward_hook(lambda m, x, out: cut(exactly(m, x[0]), out.dtype))
    found = replayed(tmp_path / "dump", broken).modules
    label = f"layers.1.{name}:output.0"
    assert found[label].verdict == FINE and found[label].error <= 0.5
    assert [at for at, module in found.items() if module.toward_zero] == [label]
    assert {module.verdict for module in found.values()} == {FINE}


def test_a_side_that_rounds_toward_zero_is_consistent_and_the_report_says_it(tmp_path, model, capsys):
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda m, x, out: cut(exactly(m, x[0]), out.dtype))
    replayed(tmp_path / "cut", other)
    assert run_cli(["replay", str(tmp_path / "cut")]) == 0
    assert "3 results rounded toward zero, not to the nearest number" in capsys.readouterr().out
    replayed(tmp_path / "nearest", model)
    report = compare_dumps(tmp_path / "cut", tmp_path / "nearest")
    assert report["verdict"] == "consistent", report["summary"]
    assert "a rounds 3 tensors toward zero instead of to the nearest number" in report["summary"]
    assert "3 results rounded toward zero" in replay_words(report)[0]


def test_a_fused_rope_reads_a_rounded_table_and_rounds_its_result_only():
    """The kernel of vLLM: cosine and sine in the model's dtype, products and sums in float32."""
    positions, x = np.arange(40), np.random.default_rng(0).standard_normal((40, 2, 16))
    turn = rotation({"rope_theta": 10000.0}, 16, "full_attention", 40)
    table = SimpleNamespace(rounded=lambda values: round_to(values, "bfloat16").astype(np.float64))
    angle = positions[:, None, None] * turn.inverse
    cos, sin = table.rounded(np.cos(angle)), table.rounded(np.sin(angle))
    left, right = x[..., :8], x[..., 8:]
    expected = np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
    assert np.allclose(rotate(x, turn, positions, table, fused=True), expected, rtol=0, atol=1e-12)
    assert np.abs(rotate(x, turn, positions, table) - expected).max() > 1e-3, "each step rounded"


@pytest.mark.parametrize("factor", [0.9975, 0.99, 1.0025, 1.01])
def test_a_scale_is_not_taken_for_rounding_toward_zero(tmp_path, model, factor):
    broken = copy.deepcopy(model)
    module = broken.model.layers[1].mlp.down_proj
    module.register_forward_hook(lambda m, x, out: (exactly(m, x[0]) * factor).to(out.dtype))
    found = replayed(tmp_path / "dump", broken).modules
    assert not [at for at, entry in found.items() if entry.toward_zero]
    assert found["layers.1.mlp.down_proj:output.0"].verdict != FINE


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@given(st.lists(st.floats(-65519, 65519), min_size=1, max_size=20))
def test_truncation_is_the_largest_number_of_the_dtype_that_is_not_beyond(name, values):
    values = np.array(values)
    found = truncate_to(values, name)
    assert np.array_equal(round_to(found, name).astype(np.float64), found), "a number of the dtype"
    assert np.all(np.abs(found) <= np.abs(values)) and np.all(found * values >= 0)
    spacing = torch.from_numpy(found).abs().to(getattr(torch, name))
    above = torch.nextafter(spacing, torch.full_like(spacing, float("inf"))).double().numpy()
    assert np.all(above > np.abs(values))
