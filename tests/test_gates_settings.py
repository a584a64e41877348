"""Positions, config and environment gates: one finding per difference, with its cause, module and side."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, opened, prompts
from synthetic_model import Tiny

from probe import manifest, switches
from probe.compare.environment_gate import environment_entries, environment_gate, rank_of
from probe.compare.gates import tokens_gate
from probe.compare.positions_gate import positions_gate
from probe.compare.sequences import join_sequences
from probe.compare.settings_gates import config_gate
from probe.compare.side import read_sides
from probe.store.schema import TensorInfo


@pytest.fixture
def sides_of(tmp_path):
    """Open two synthetic dumps and return their sides."""
    dumps = []

    def factory(a: Scenario | None = None, b: Scenario | None = None, sequences: Any = (None, None)):
        for scenario, listed in zip((a or Scenario(), b or actor()), sequences):
            dumps.append(opened(tmp_path / str(len(dumps)), scenario, listed))
        return read_sides(*dumps[-2:])

    yield factory
    for dump in dumps:
        dump.close()


# -- config -----------------------------------------------------------------------------------------------------------


def with_config(**changes: Any) -> dict[str, Any]:
    return {"model": {"path": "", "config": Tiny().config() | changes}}


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("rms_norm_eps", 1e-5, "norm-eps"),
        ("rope_theta", 5e5, "rope-base"),
        ("rope_scaling", {"rope_type": "linear", "factor": 4.0}, "rope-scaling"),
        ("partial_rotary_factor", 0.5, "rope-scaling"),
        ("tie_word_embeddings", True, "untied-head"),
        ("hidden_act", "gelu", "activation"),
        ("sliding_window", 64, "sliding-window"),
        ("final_logit_softcapping", 30.0, "softcap"),
        ("query_pre_attn_scalar", 64, "attention-scale"),
        ("norm_topk_prob", False, "norm-topk"),
        ("routed_scaling_factor", 2.5, "router-scale"),
        ("attention_bias", True, "wrong-bias"),
        ("vocab_size", 51, "other-config"),
        ("num_experts_per_tok", 4, "other-config"),
    ],
)
def test_each_setting_that_differs_has_a_finding_with_its_cause(sides_of, key, value, cause):
    gate = config_gate(*sides_of(b=actor("transformers", manifest=with_config(**{key: value}))))
    assert gate.status == "fail"
    assert {(f.cause, f.subject) for f in gate.findings} == {(cause, "config")}
    assert gate.findings[0].figures["b"] in (value, str(value), "linear", 4.0)


SCALAR_CASES = [
    ("eps", 1e-3, "norm-eps", "layers.1.post_attention_layernorm", "b"),
    ("eps", 1e-3, "norm-eps", "norm", "b"),
]


@pytest.mark.parametrize(("name", "value", "cause", "module", "side"), SCALAR_CASES)
def test_a_module_that_contradicts_its_own_config_names_its_side(sides_of, name, value, cause, module, side):
    a, b = sides_of()
    native = {"norm": "decoder.final_layernorm"}.get(module, "decoder.layers.1.pre_mlp_layernorm")
    b.dump.modules[native] = replace(b.dump.modules[native], info={name: value})
    gate = config_gate(a, b)
    assert gate.status == "fail"
    assert [(f.cause, f.subject, f.side) for f in gate.findings] == [(cause, module, side)]


def test_an_eps_that_one_side_alone_shows_is_compared_with_the_config(sides_of):
    a, b = sides_of()
    b.dump.modules.clear()
    path = "model.layers.0.input_layernorm"
    assert config_gate(a, b).status == "pass"
    a.dump.modules[path] = replace(a.dump.modules[path], info={"eps": 1e-5})
    gate = config_gate(a, b)
    assert [(f.cause, f.subject, f.side) for f in gate.findings] == [("norm-eps", "layers.0.input_layernorm", "a")]


@pytest.mark.parametrize(
    ("attribute", "values", "cause"),
    [
        (("scale", "softmax_scale"), (0.25, 0.5), "attention-scale"),
        (("sliding_window", "sliding_window"), (64, 32), "sliding-window"),
    ],
)
def test_attention_modules_without_a_canonical_output_are_compared_too(sides_of, attribute, values, cause):
    a, b = sides_of()
    for side, path, name, value in zip(
        (a, b), ("model.layers.2.self_attn.attn", "decoder.layers.2.self_attention.core_attention"), attribute, values
    ):
        side.dump.modules[path] = replace(next(iter(side.dump.modules.values())), path=path, info={name: value})
    gate = config_gate(a, b)
    assert [(f.cause, f.subject) for f in gate.findings] == [(cause, "layers.2.self_attn")]


def test_declared_quantisation_and_cache_dtypes_warn_with_their_side(sides_of):
    backends = {"backends": {"attention": "X", "quantization": "fp8", "kv_cache": "fp8"}}
    gate = config_gate(*sides_of(Scenario(manifest=backends)))
    assert gate.status == "warn"
    assert {(f.cause, f.side) for f in gate.findings} == {("weight-precision", "a"), ("kv-cache-dtype", "a")}


# -- environment ------------------------------------------------------------------------------------------------------


def environment(**facts: str) -> dict[str, Any]:
    return {"environment": {key.replace("__", "."): value for key, value in facts.items()}}


def test_what_can_change_numbers_comes_first(sides_of):
    a, b = sides_of(
        Scenario(
            dtype="bfloat16", manifest=environment(torch="2.8", host="x", env__HCCL_DETERMINISTIC="true", numpy="1")
        ),
        Scenario(manifest=environment(torch="2.9", host="y", env__HCCL_DETERMINISTIC="false", numpy="2")),
    )
    entries = environment_entries(a.dump, b.dump)
    warned = [entry["key"] for entry in entries if entry["severity"] == "warn"]
    assert warned == ["dtype", "env.HCCL_DETERMINISTIC", "torch"]
    gate = environment_gate(entries)
    assert [finding.subject for finding in gate.findings] == warned
    switch = gate.findings[1]
    assert switch.side == "b" and "true or strict makes runs repeatable" in switch.text


@pytest.mark.parametrize(
    ("left", "right", "status"),
    [
        (":4096:8", ":16:8", "pass"),
        (":4096:8", ":16:2", "warn"),
        (":4096:8", None, "warn"),
    ],
)
def test_two_repeatable_values_of_a_switch_are_alike(sides_of, left, right, status):
    values = [environment(**({"env__CUBLAS_WORKSPACE_CONFIG": v} if v else {})) for v in (left, right)]
    a, b = sides_of(*(Scenario(manifest=value) for value in values))
    assert environment_gate(environment_entries(a.dump, b.dump)).status == status


def test_a_switch_of_the_device_counts_for_two_engines(sides_of):
    npu = {"device": "npu"}
    a, b = sides_of(
        Scenario(manifest={**environment(env__HCCL_DETERMINISTIC="TRUE", env__VLLM_X="1"), **npu}),
        actor(manifest={**environment(), **npu}),
    )
    warned = [e["key"] for e in environment_entries(a.dump, b.dump) if e["severity"] == "warn"]
    assert warned == ["env.HCCL_DETERMINISTIC"]


@pytest.mark.parametrize(("device", "warns"), [("cpu", False), ("npu", False), ("cuda", True), (None, True)])
def test_a_setting_counts_only_on_the_device_on_which_it_acts(sides_of, device, warns):
    """cuDNN's switches change nothing on a CPU, however an earlier part of the program left them."""
    known = {"device": device}
    facts = [{"environment": {"torch.cudnn.deterministic": value}} for value in ("True", "False")]
    a, b = sides_of(Scenario(manifest={**facts[0], **known}), actor(manifest={**facts[1], **known}))
    entry = next(e for e in environment_entries(a.dump, b.dump) if e["key"] == "torch.cudnn.deterministic")
    assert (entry["severity"] == "warn") is warns


def test_every_switch_with_a_repeatable_value_is_recorded_and_ranked():
    assert set(switches.SWITCHES) <= set(manifest.SWITCHES)
    for name in switches.SWITCHES:
        assert rank_of(f"env.{name}") < 7, name
    for name in switches.SETTINGS:
        assert rank_of(name) < 7 and name in manifest.TORCH_SETTINGS


def test_torch_settings_are_recorded_where_torch_is_loaded():
    import torch

    found = manifest.environment()
    assert found["torch.deterministic_algorithms"] == str(torch.are_deterministic_algorithms_enabled())
    assert found["torch.cudnn.benchmark"] == "False" and "npu.matmul.allow_hf32" not in found
    assert os.environ.get("OMP_NUM_THREADS") == found.get("env.OMP_NUM_THREADS")


# -- tokens and positions ---------------------------------------------------------------------------------------------


def test_a_prompt_that_differs_has_the_position_and_both_ids(sides_of):
    other = prompts()
    ids = other[1][1]
    ids[1] = (ids[1] + 1) % 50
    a, b = sides_of(sequences=(prompts(), other))
    gate = tokens_gate(a.dump, b.dump, join_sequences(a.dump, b.dump))
    found = gate.findings[0]
    assert (gate.status, found.cause, found.subject) == ("fail", "token-mismatch", "tokens")
    assert found.figures["position"] == 1 and found.figures["token b"] == ids[1] != found.figures["token a"]


def test_a_response_with_other_ids_in_its_middle_fails_and_two_samples_that_part_warn(sides_of):
    long = [(f"p{n}", np.random.default_rng(n).integers(0, 50, 40), 4) for n in range(2)]
    edited = [long[0], ("p1", long[1][1].copy(), 4)]
    edited[1][1][20] = (edited[1][1][20] + 1) % 50
    a, b = sides_of(sequences=(long, edited))
    gate = tokens_gate(a.dump, b.dump, join_sequences(a.dump, b.dump))
    assert gate.status == "fail" and "agree again" in gate.detail
    assert gate.findings[0].figures == {"sequences": 1, "first": "p1", "position": 20}
    edited[1][1][21:] = np.random.default_rng(9).integers(0, 50, 19)
    a, b = sides_of(sequences=(long, edited))
    gate = tokens_gate(a.dump, b.dump, join_sequences(a.dump, b.dump))
    assert gate.status == "warn" and gate.findings[0].cause == "token-mismatch"


def with_position_ids(side: Any, change: Any, axes: int = 1) -> None:
    """Let a side's dump hold the position ids that its model was given: its rows' positions after ``change``."""
    dump = side.dump
    widest = max((info for info in dump.tensors.values() if info.has_rows), key=lambda info: info.rows)
    rows = dump.rows(widest.module, widest.slot)
    ids = np.repeat(change(rows).astype(np.int64)[:, None], axes, axis=1) if axes > 1 else change(rows)
    key = ("", "kwargs.position_ids")
    dump.tensors[key] = TensorInfo(*key, "int64", ids.shape[1:], len(rows))
    read, rows_of = dump.read, dump.rows
    dump.read = lambda *k: ids if k == key else read(*k)
    dump.rows = lambda *k: rows if k == key else rows_of(*k)
    side.test_ids = ids


def packed(rows: np.ndarray) -> np.ndarray:
    """One count over all sequences of a call, which goes on from one sequence into the next and is wrong from there."""
    return np.where(rows["sequence"] > 0, rows["position"] // 2, rows["position"])


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda rows: rows["position"], "pass"),
        (lambda rows: rows["position"] + 1, "fail"),
        (lambda rows: rows["position"] + rows["sequence"], "warn"),
        (packed, "fail"),
    ],
    ids=["right", "from 1", "left padding", "packed"],
)
def test_position_ids_that_a_model_was_given_are_checked(sides_of, change, status):
    a, b = sides_of()
    with_position_ids(b, change)
    gate = positions_gate(a, b, join_sequences(a.dump, b.dump))
    assert gate.status == status
    assert [(f.cause, f.side) for f in gate.findings] == ([] if status == "pass" else [("position-offset", "b")])


@pytest.mark.parametrize(("axes_a", "axes_b"), [(1, 1), (3, 3), (4, 3), (1, 3), (3, 4)])
def test_two_three_and_four_rows_of_position_ids_are_accepted(sides_of, axes_a, axes_b):
    a, b = sides_of()
    for side, axes in ((a, axes_a), (b, axes_b)):
        with_position_ids(side, lambda rows: rows["position"], axes)
    assert positions_gate(a, b, join_sequences(a.dump, b.dump)).status == "pass"


def test_other_ids_of_one_axis_fail_before_any_tensor(sides_of):
    """GIVEN packed M-RoPE ids of an image on both sides, WHEN one side counts its height otherwise, THEN it is told."""
    a, b = sides_of()
    for side in (a, b):
        with_position_ids(side, lambda rows: rows["position"], 3)
        side.test_ids[:, 1] //= 2
    join = join_sequences(a.dump, b.dump)
    assert positions_gate(a, b, join).status == "pass"
    b.test_ids[5:, 1] += np.arange(len(b.test_ids) - 5)
    gate = positions_gate(a, b, join)
    assert gate.status == "fail" and gate.findings[0].cause == "position-offset"
    assert gate.findings[0].figures["axes"] == 1
