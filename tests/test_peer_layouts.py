"""Engine-shaped stand-ins of identical weights, captured and compared: everything matches, nothing is mismatched."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_standins import (
    LAYERS,
    VOCAB,
    AscendRMSNorm,
    DistributedDataParallel,
    Float16Module,
    MegatronStandIn,
    PTNorm,
    VllmStandIn,
    make_weights,
)
from torch import nn

from probe import PrecisionDebugger
from probe.compare.match import match_tensors
from probe.compare.merge import CanonicalReader
from probe.compare.run import compare_dumps
from probe.compare.side import read_sides
from probe.store.reader import open_dump

TOKENS = 12
WEIGHTS = make_weights()
HEALTHY = {"identical", "consistent"}


def ids(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def dump(folder: Path, stage: str, model: Any, *inputs: torch.Tensor, **settings: Any) -> Path:
    debugger = PrecisionDebugger(dump_path=folder, stage=stage, enabled=True, **settings)
    with torch.no_grad(), debugger.start(model):
        (model[0] if isinstance(model, list) else model)(*inputs)
    return folder


@pytest.fixture(scope="module")
def rollout(tmp_path_factory) -> Path:
    model = VllmStandIn(WEIGHTS)
    return dump(tmp_path_factory.mktemp("vllm"), "rollout", model, ids()[0], torch.arange(TOKENS))


def verdicts(report: dict[str, Any]) -> Counter[str]:
    return Counter(layer["verdict"] for layer in report["layers"])


def assert_all_matched(report: dict[str, Any], matched: int) -> None:
    assert set(verdicts(report)) <= HEALTHY, verdicts(report)
    assert report["verdict"] == "consistent"
    coverage = report["coverage"]
    assert coverage["matched"] == matched and coverage["proposed"] == 0
    assert not coverage["only_a"] and not coverage["only_b"]
    assert not [entry for key in ("auxiliary_a", "auxiliary_b") for entry in coverage[key] if not entry["reason"]]
    assert not [e for key in ("auxiliary_a", "auxiliary_b") for e in coverage[key] if "not in the" in e["reason"]]


ALL = LAYERS * 14 + 3  # two norms, q, k, v, rope (2), o input and output, gate, up, down input and output, the layer


@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "ddp"])
def test_interleaved_megatron_stand_in_matches_the_vllm_stand_in_in_full(tmp_path, rollout, wrap):
    model: nn.Module = MegatronStandIn(WEIGHTS)
    if wrap:
        model = DistributedDataParallel(Float16Module(model))
    report = compare_dumps(rollout, dump(tmp_path, "actor", [model], ids()))
    assert_all_matched(report, ALL)
    assert max(layer["rel_l2"] for layer in report["layers"]) < 1e-6


def test_batches_of_the_megatron_stand_in_are_position_major(tmp_path, rollout):
    both = torch.cat([ids(2), ids()])
    folder = dump(tmp_path, "actor", MegatronStandIn(WEIGHTS), both)
    report = compare_dumps(rollout, folder, min_coverage=0.4)  # the rollout has one of the two sequences
    assert_all_matched(report, ALL)
    assert max(layer["rel_l2"] for layer in report["layers"]) < 1e-6


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("start", [1, 2])
def test_layers_of_a_last_pipeline_stage_are_the_models_last(tmp_path, rollout, start, numbered):
    with torch.no_grad():
        hidden = MegatronStandIn(WEIGHTS, range(start))(ids())
    stage = DistributedDataParallel(Float16Module(MegatronStandIn(WEIGHTS, range(start, LAYERS), numbered=numbered)))
    report = compare_dumps(rollout, dump(tmp_path, "actor", [stage], hidden))
    assert_all_matched(report, (LAYERS - start) * 14 + 2)
    tokens = next(gate for gate in report["gates"] if gate["name"] == "tokens")
    assert tokens["status"] == "warn" and "hold no token ids" in tokens["detail"]
    elsewhere = {entry["reason"] for entry in report["coverage"]["unavailable"]}
    assert elsewhere == {f"ran in another stage of the pipeline: this dump holds layers {start} to {LAYERS - 1}"}


def test_the_first_pipeline_stage_is_compared_and_the_rest_is_named(tmp_path, rollout):
    stage = MegatronStandIn(WEIGHTS, range(2), numbered=False)
    report = compare_dumps(rollout, dump(tmp_path, "actor", stage, ids()))
    assert_all_matched(report, 2 * 14 + 1)
    assert {"norm", "lm_head"} <= {entry["name"] for entry in report["coverage"]["unavailable"]}


def test_a_middle_stage_without_layer_numbers_is_listed_and_never_guessed(tmp_path, rollout):
    with torch.no_grad():
        hidden = MegatronStandIn(WEIGHTS, range(1))(ids())
    folder = dump(tmp_path, "actor", MegatronStandIn(WEIGHTS, range(1, 3), numbered=False), hidden)
    with open_dump(rollout) as a, open_dump(folder) as b:
        sides = read_sides(a, b)
        matching = match_tensors(*sides)
    assert not matching.matched
    reasons = [entry.reason for entry in matching.auxiliary_b if "layers" in entry.label]
    assert reasons and any("which layers these are is unknown" in reason for reason in reasons)


def test_a_middle_stage_with_layer_numbers_matches_its_layers(tmp_path, rollout):
    with torch.no_grad():
        hidden = MegatronStandIn(WEIGHTS, range(1))(ids())
    report = compare_dumps(rollout, dump(tmp_path, "actor", MegatronStandIn(WEIGHTS, range(1, 3)), hidden))
    assert_all_matched(report, 2 * 14)
    assert {layer["name"].split(".")[1] for layer in report["layers"]} == {"1", "2"}


# -- TransformerEngine, MindSpeed, vllm-ascend ------------------------------------------------------------------------


def test_norms_that_transformer_engine_fuses_are_recomputed_from_what_enters_the_linear(tmp_path, rollout):
    report = compare_dumps(rollout, dump(tmp_path, "actor", MegatronStandIn(WEIGHTS, fused=True), ids()))
    assert_all_matched(report, ALL)
    norms = [layer for layer in report["layers"] if layer["name"].endswith("layernorm")]
    assert len(norms) == 2 * LAYERS
    for layer in norms:
        assert layer["b"]["recomputed"] and not layer["a"]["recomputed"] and layer["rel_l2"] < 1e-6
        assert "recomputed in b from" in layer["reason"] and "layer_norm_weight" in layer["reason"]


def test_a_recomputed_norm_is_the_norm_and_not_the_residual(tmp_path, rollout):
    folder = dump(tmp_path, "actor", MegatronStandIn(WEIGHTS, fused=True), ids())
    with open_dump(rollout) as a, open_dump(folder) as b:
        side_a, side_b = read_sides(a, b)
        source = side_b.resolution.sources["layers.1.input_layernorm:output.0"]
        got = CanonicalReader(side_b).read(source)
        want = CanonicalReader(side_a).read(side_a.resolution.sources["layers.1.input_layernorm:output.0"])
        residual = b.read("decoder.layers.1.self_attention.linear_qkv", "input.0").reshape(TOKENS, -1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert np.abs(residual - want).max() > 0.1


@pytest.mark.parametrize("missing", ["inputs", "eps"])
def test_a_fused_norm_that_cannot_be_recomputed_is_unavailable(tmp_path, rollout, missing):
    model = MegatronStandIn(WEIGHTS, fused=True)
    settings = {"data_mode": "output"} if missing == "inputs" else {}
    if missing == "eps":
        del model.config.layernorm_epsilon
    report = compare_dumps(rollout, dump(tmp_path, "actor", model, ids(), **settings))
    assert not [layer for layer in report["layers"] if layer["name"].endswith("layernorm")]
    reasons = {e["name"]: e["reason"] for e in report["coverage"]["unavailable"] if "layernorm" in e["name"]}
    assert len(reasons) == 2 * LAYERS
    assert all(reason.startswith("norm fused into linear_") for reason in reasons.values())


def test_a_zero_centred_gamma_is_not_recomputed_as_a_plain_one(tmp_path, rollout):
    model = MegatronStandIn(WEIGHTS, fused=True)
    model.config.layernorm_zero_centered_gamma = True
    report = compare_dumps(rollout, dump(tmp_path, "actor", model, ids()))
    assert not [layer for layer in report["layers"] if layer["name"].endswith("layernorm")]


def test_mindspeeds_classes_change_nothing_because_paths_decide(tmp_path, rollout):
    report = compare_dumps(rollout, dump(tmp_path, "actor", MegatronStandIn(WEIGHTS, norm=PTNorm), ids()))
    assert_all_matched(report, ALL)


def test_vllm_ascends_classes_change_nothing_because_paths_decide(tmp_path):
    model = VllmStandIn(WEIGHTS)
    for layer in model.model.layers:
        layer.input_layernorm.__class__ = AscendRMSNorm
    a = dump(tmp_path / "a", "rollout", model, ids()[0], torch.arange(TOKENS))
    b = dump(tmp_path / "b", "actor", MegatronStandIn(WEIGHTS), ids())
    assert_all_matched(compare_dumps(a, b), ALL)


def test_a_fault_in_the_stand_in_is_still_found(tmp_path, rollout):
    wrong = dict(WEIGHTS)
    wrong["2.down"] = wrong["2.down"] * 1.05
    report = compare_dumps(rollout, dump(tmp_path, "actor", MegatronStandIn(wrong), ids()))
    assert report["verdict"] == "divergent"
    assert report["first_divergence"]["name"] == "layers.2.mlp.down_proj"
