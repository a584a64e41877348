"""Floors that are measured, modelled or follow from declared quantisation, and a reference that names the side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_dumps import Scenario, actor, prompts, write_dump
from synthetic_model import Tiny

from probe.compare.floors.quantised import STEP, declared
from probe.compare.floors.ratio import golden_ratio
from probe.compare.judge import MEASURED, MODELLED, QUANTISED, REPEATED
from probe.compare.merge import CanonicalReader
from probe.compare.run import compare_dumps
from probe.errors import UsageError
from probe.store.dtypes import round_to

DEEP = Tiny(layers=5)
NOISE = {"noise": {"seed": 1}}
ROLLOUT, ACTOR = Scenario(model=DEEP), actor(model=DEEP, noise=3)
FAULTY = "layers.2.mlp.down_proj:output.0"


@pytest.fixture
def compare(tmp_path):
    """Write a pair of scenarios and third ones by option, and compare the pair; nothing is replayed here."""

    def run(a: Scenario, b: Scenario, **third: Scenario) -> dict[str, Any]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        paths = {name: write_dump(folder / name, scenario) for name, scenario in {"a": a, "b": b, **third}.items()}
        return compare_dumps(paths["a"], paths["b"], replay=False, **{name: paths[name] for name in third})

    return run


def layer(report: dict[str, Any], label: str) -> dict[str, Any]:
    return next(entry for entry in report["layers"] if f"{entry['name']}:{entry['slot']}" == label)


def gate(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in report["gates"] if entry["name"] == name)


def sources(report: dict[str, Any]) -> set[str]:
    return {entry["floor_source"] for entry in report["layers"] if entry["floor_source"]}


def scaled(factor: float, label: str = FAULTY) -> dict[str, Any]:
    return {label: lambda values: values * factor}


# -- measured floors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_noise_dump_measures_the_floors(compare, dtype):
    a, b = replace(ROLLOUT, dtype=dtype), replace(ACTOR, dtype=dtype)
    report = compare(a, b, floor=replace(a, noise=7, manifest=NOISE))
    assert report["verdict"] == "consistent" and sources(report) == {MEASURED}
    assert gate(report, "floor")["status"] == "pass" and "side a re-rounded" in gate(report, "floor")["detail"]
    evidence = [entry["evidence"] for entry in report["layers"] if entry["evidence"] is not None]
    assert 0.3 < np.median(evidence) < 2  # both are one Monte Carlo run away from the plain one


def test_measured_floors_find_a_fault_that_the_modelled_ones_take_for_noise(compare):
    a, b = replace(ROLLOUT, dtype="bfloat16"), replace(ACTOR, dtype="bfloat16", faults=scaled(1.03))
    assert layer(compare(a, b), FAULTY)["verdict"] == "consistent"
    report = compare(a, b, floor=replace(a, noise=7, manifest=NOISE))
    assert layer(report, FAULTY)["verdict"] in ("suspect", "divergent")
    assert layer(report, "layers.2.mlp.down_proj:input.0")["verdict"] == "consistent"


def test_a_bit_identical_repeat_leaves_the_modelled_floors(compare):
    report = compare(ROLLOUT, ACTOR, floor=ROLLOUT)
    assert report["verdict"] == "consistent" and sources(report) == {MODELLED}
    assert "the same bits" in gate(report, "floor")["detail"]


def test_a_repeat_that_moves_less_than_the_model_says_does_not_tighten_it(compare):
    report = compare(ROLLOUT, ACTOR, floor=replace(ROLLOUT, noise=7))
    assert sources(report) == {MODELLED}


def test_a_repeat_raises_the_floor_where_the_model_amplifies(compare):
    """Every layer of these runs adds noise of its own, a little more from layer to layer, as sharp attention does."""

    def drift(seed: int) -> dict[str, Any]:
        def noisy(layer: int) -> Any:
            return lambda x: x * (1 + 2e-6 * 2**layer * np.random.default_rng(seed).normal(size=x.shape))

        return {f"layers.{i}:output.0": noisy(i) for i in range(DEEP.layers)}

    a, b = replace(ROLLOUT, faults=drift(1)), replace(ACTOR, faults=drift(2))
    report = compare(a, b, floor=replace(a, faults=drift(3)))
    assert report["verdict"] == "consistent" and REPEATED in sources(report)
    assert layer(report, "layers.4:output.0")["floor_gain"] > 4


def test_a_repeat_that_parts_by_a_jump_is_a_finding_and_hides_nothing(compare):
    a = replace(ROLLOUT, faults=scaled(1.03))
    report = compare(a, ACTOR, floor=ROLLOUT)  # the run without the fault stands for one whose batch hides it
    assert report["verdict"] == "divergent" and layer(report, FAULTY)["verdict"] == "divergent"
    found = gate(report, "floor")
    assert found["status"] == "warn" and FAULTY in found["detail"]
    assert [(f["cause"], f["subject"], f["side"]) for f in found["findings"]] == [
        ("batch-variance", "layers.2.mlp.down_proj", "a")
    ]


def test_a_measured_gain_carries_over_to_the_coarser_dtype_of_a_mixed_pair(compare):
    a, b = ROLLOUT, replace(ACTOR, dtype="bfloat16")
    report = compare(a, b, floor=replace(a, noise=7, manifest=NOISE))
    assert report["verdict"] == "consistent" and sources(report) == {MEASURED}
    assert layer(report, "layers.4:output.0")["floor"] > 1e-3


@pytest.mark.parametrize(
    ("third", "words"),
    [
        (replace(ROLLOUT, dtype="float16"), "is of neither side"),
        (replace(ROLLOUT, layout="transformers"), "is of neither side"),
        (replace(ROLLOUT, weights_seed=9), "was run from other weights"),
    ],
    ids=["dtype", "engine", "weights"],
)
def test_a_floor_dump_that_fits_no_side_is_refused(compare, third, words):
    with pytest.raises(UsageError, match=words):
        compare(ROLLOUT, ACTOR, floor=third)


@pytest.mark.parametrize("option", ["floor", "golden"])
def test_a_third_dump_of_other_tokens_is_refused(tmp_path, option):
    paths = [write_dump(tmp_path / name, scenario) for name, scenario in (("a", ROLLOUT), ("b", ACTOR))]
    other = replace(ROLLOUT, dtype="float64") if option == "golden" else ROLLOUT
    third = write_dump(tmp_path / "third", other, prompts(seed=99))
    with pytest.raises(UsageError, match="no sequence of"):
        compare_dumps(*paths, **{option: third})


@pytest.mark.parametrize(
    ("third", "side"),
    [
        (ROLLOUT, "a"),
        (replace(ROLLOUT, stage="actor"), "a"),  # another stage, but the engine decides
        (ACTOR, "b"),
        (replace(ACTOR, manifest={"backends": {"attention": "another"}}), "b"),
    ],
)
def test_the_engine_says_whose_floor_it_is(compare, third, side):
    assert f"of side {side} " in gate(compare(ROLLOUT, ACTOR, floor=replace(third, noise=5)), "floor")["detail"]


def test_between_two_sides_of_one_engine_the_kernels_decide(compare):
    eager = {"backends": {"attention": "eager"}}
    sides = actor("transformers", model=DEEP), actor("transformers", model=DEEP, manifest=eager)
    third = replace(sides[1], noise=5, manifest={**eager, **NOISE})
    assert "of side b " in gate(compare(*sides, floor=third), "floor")["detail"]


# -- a reference in higher precision ----------------------------------------------------------------------------------

GOLDEN = Scenario(layout="transformers", stage="reference", dtype="float64", model=DEEP, engine_logprobs=False)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_two_healthy_sides_are_equally_far_from_the_golden_dump(compare, dtypes):
    a, b = replace(ROLLOUT, dtype=dtypes[0], noise=5), replace(ACTOR, dtype=dtypes[1])
    report = compare(a, b, golden=GOLDEN)
    assert report["verdict"] == "consistent" and gate(report, "golden")["status"] == "pass"
    assert {entry["golden"]["verdict"] for entry in report["layers"] if entry["golden"]} == {"normal"}
    assert not any(entry["golden"]["side"] for entry in report["layers"] if entry["golden"])


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_golden_dump_names_the_side(compare, side, dtype):
    a, b = replace(ROLLOUT, dtype=dtype, noise=5), replace(ACTOR, dtype=dtype)
    faults = scaled(1.5)
    a, b = (replace(a, faults=faults), b) if side == "a" else (a, replace(b, faults=faults))
    report = compare(a, b, golden=GOLDEN)
    found = layer(report, FAULTY)
    assert found["golden"]["verdict"] == "bug" and found["golden"]["side"] == side and found["golden"]["ratio"] > 3
    assert layer(report, "layers.2.mlp.down_proj:input.0")["golden"]["side"] == ""
    assert f"side {side} is farther" in gate(report, "golden")["detail"] and FAULTY in gate(report, "golden")["detail"]


def test_the_ratio_and_its_bands():
    assert golden_ratio(1.4e-6, 1e-6, 1e-6, 1e-6).verdict == "normal"
    assert golden_ratio(1.9e-6, 1e-6, 1e-6, 1e-6).side == ""
    assert (golden_ratio(1e-6, 2.2e-6, 1e-6, 1e-6).side, golden_ratio(1e-6, 2.2e-6, 1e-6, 1e-6).verdict) == (
        "b",
        "suspect",
    )
    assert (golden_ratio(4e-6, 1e-6, 1e-6, 1e-6).side, golden_ratio(4e-6, 1e-6, 1e-6, 1e-6).verdict) == ("a", "bug")
    # errors far below rounding say nothing, and a coarser dtype may err more
    assert golden_ratio(4e-8, 1e-9, 1e-6, 1e-6).verdict == "normal"
    assert golden_ratio(1.9e-2, 1e-6, 1e-2, 1e-6).verdict == "normal"


def test_the_ratio_of_two_dtypes():
    # sharp attention amplifies in both; the coarse side's error ends where nothing is left to lose
    assert golden_ratio(0.9, 2e-5, 0.1, 1e-6).verdict == "normal"
    assert golden_ratio(9e-2, 1e-6, 1e-2, 1e-6).side == "a"
    # a finer side that lies farther than the coarser one, in absolute terms
    assert golden_ratio(1e-2, 5e-2, 1e-2, 1e-6).side == "b"
    assert golden_ratio(5e-2, 1e-2, 1e-6, 1e-2).side == "a"


@pytest.mark.parametrize(
    ("dtypes", "golden", "refused"),
    [
        (("float32", "float32"), "float32", True),
        (("float32", "float32"), "bfloat16", True),
        (("bfloat16", "float32"), "float16", True),
        (("bfloat16", "bfloat16"), "float32", False),
        (("bfloat16", "float32"), "float32", False),
    ],
)
def test_a_golden_dump_must_be_of_higher_precision(compare, dtypes, golden, refused):
    sides = replace(ROLLOUT, dtype=dtypes[0], noise=5), replace(ACTOR, dtype=dtypes[1])
    if refused:
        with pytest.raises(UsageError, match="no higher precision"):
            compare(*sides, golden=replace(GOLDEN, dtype=golden))
    else:
        assert gate(compare(*sides, golden=replace(GOLDEN, dtype=golden)), "golden")["status"] == "pass"


def test_a_golden_dump_of_other_weights_is_said_to_be_one(compare):
    report = compare(ROLLOUT, ACTOR, golden=replace(GOLDEN, weights_seed=9))
    assert report["verdict"] == "consistent"
    assert gate(report, "golden")["status"] == "warn" and "both sides are far" in gate(report, "golden")["detail"]


# -- declared quantisation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manifest", "linear", "attention"),
    [
        ({}, 0, 0),
        ({"backends": {"quantization": None, "kv_cache": "torch.bfloat16"}}, 0, 0),
        ({"backends": {"quantization": "fp8", "kv_cache": "auto"}}, STEP["fp8"] * 2**0.5, 0),
        ({"backends": {"kv_cache": "fp8_e5m2"}}, 0, STEP["fp8_e5m2"] * 2**0.5),
        ({"backends": {"kv_cache": "torch.uint8"}}, 0, STEP["fp8"] * 2**0.5),
        ({"model": {"config": {"quantization_config": {"quant_method": "awq", "bits": 4}}}}, STEP["int4"], 0),
        ({"model": {"config": {"quantization_config": {"quant_method": "gptq", "bits": 8}}}}, STEP["int8"], 0),
        ({"model": {"config": {"quantization_config": {"quant_method": "fp8"}}}}, STEP["fp8"] * 2**0.5, 0),
        ({"model": {"config": {"quantization_config": "nonsense"}}}, 0, 0),
    ],
)
def test_what_a_manifest_declares(manifest, linear, attention):
    found = declared(manifest)
    assert (found.linear, found.attention) == pytest.approx((linear, attention))
    assert bool(found) == bool(linear or attention) == bool(found.words)


def fp8_weights(weights: dict[str, np.ndarray]) -> None:
    """Round the linears' weights to fp8 with one scale per output channel, as an FP8 rollout does."""
    for name, value in weights.items():
        if "_proj.weight" in name:
            scale = np.abs(value).max(1, keepdims=True) / 448
            weights[name] = round_to(value / scale, "float8_e4m3fn").astype(np.float64) * scale


def test_declared_fp8_weights_are_consistent_and_undeclared_ones_are_not(compare):
    plain, quantised = actor(model=DEEP), Scenario(model=DEEP, change_weights=fp8_weights, sketched=lambda w: None)
    # the sketches are those of the checkpoint: an engine that quantises while loading has them from before
    report = compare(replace(quantised, manifest={"backends": {"quantization": "fp8"}}), plain)
    words = {entry["verdict"] for entry in report["layers"]}
    assert words <= {"identical", "consistent"}, words
    assert sources(report) == {MODELLED, QUANTISED}
    assert layer(report, "layers.0.input_layernorm:output.0")["floor_source"] == MODELLED
    assert layer(report, "layers.0.self_attn.q_proj:output.0")["floor_source"] == QUANTISED
    assert "divergent" in {entry["verdict"] for entry in compare(quantised, plain)["layers"]}


def test_a_declared_fp8_cache_allows_for_attention_and_not_for_what_comes_before(compare):
    coarse = {f"layers.{i}.o_proj:input.0": round_fp8 for i in range(DEEP.layers)}
    a = Scenario(model=DEEP, faults=coarse, manifest={"backends": {"kv_cache": "fp8"}})
    report = compare(a, actor(model=DEEP))
    assert layer(report, "layers.0.self_attn.v_proj:output.0")["floor_source"] == MODELLED
    assert layer(report, "layers.0.self_attn.o_proj:input.0")["floor_source"] == QUANTISED


def round_fp8(values: np.ndarray) -> np.ndarray:
    return round_to(values, "float8_e4m3fn").astype(np.float64)


def test_a_folder_that_is_no_dump_is_refused(tmp_path):
    paths = [write_dump(tmp_path / name, scenario) for name, scenario in (("a", ROLLOUT), ("b", ACTOR))]
    from probe.errors import DumpError

    for option in ("floor", "golden"):
        with pytest.raises(DumpError):
            compare_dumps(*paths, **{option: Path(tmp_path / "nowhere")})


@pytest.mark.parametrize("option", ["floor", "golden"])
def test_a_third_dump_is_read_block_by_block(compare, monkeypatch, option):
    third = {"floor": replace(ROLLOUT, noise=4), "golden": GOLDEN}[option]
    want = compare(ROLLOUT, ACTOR, **{option: third})
    sizes, read_bits = [], CanonicalReader.read_bits

    def watched(self, source, rows=None):
        values, bits = read_bits(self, source, rows)
        sizes.append((len(values), values.size))
        return values, bits

    monkeypatch.setattr(CanonicalReader, "read_bits", watched)
    monkeypatch.setattr("probe.compare.figures.BLOCK_VALUES", 256)
    got = compare(ROLLOUT, ACTOR, **{option: third})
    assert all(rows <= 2 or values <= 256 for rows, values in sizes)
    for left, right in zip(got["layers"], want["layers"], strict=True):
        assert left["floor"] == pytest.approx(right["floor"], rel=1e-6) and left["verdict"] == right["verdict"]
        assert (left["golden"] is None) == (right["golden"] is None)
        if left["golden"]:
            assert left["golden"]["error_a"] == pytest.approx(right["golden"]["error_a"], rel=1e-6)
