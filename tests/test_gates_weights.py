"""The weights gate: every kind of wrong weight has its cause and parameter, and a checkpoint says which side errs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from synthetic_dumps import Scenario, actor, opened
from synthetic_model import Tensors, Tiny, make_weights

from probe.checkpoint import Checkpoint
from probe.compare.side import read_sides
from probe.compare.weights import CheckpointWeights, agreement, canonical_weights, compare_weights
from probe.compare.weights.canonical import Weight
from probe.compare.weights_gate import CHECKED, MANY, weights_gate
from probe.errors import CheckpointError
from probe.store.dtypes import round_to
from probe.store.sketches import sketch_rows

Change = Callable[[Tensors], None]
MODEL = Tiny()
LAYER = "layers.1"
Q, K, V, OUT = (f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkvo")
GATE, UP, DOWN = (f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


def checkpoint(folder: Path, model: Tiny = MODEL, change: Change | None = None) -> Path:
    """Write the synthetic model's weights as a Hugging Face checkpoint and return its folder."""
    weights = make_weights(model)
    if change:
        change(weights)
    folder.mkdir(parents=True)
    named = {
        ("" if name.startswith("lm_head") else "model.") + name: w.astype(np.float32) for name, w in weights.items()
    }
    save_file({name: np.ascontiguousarray(w) for name, w in named.items()}, folder / "model.safetensors")
    config = {**model.config(), "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def gate_of(tmp_path):
    """Return the weights gate of two synthetic sides, one of which (b) has its weights changed."""

    def run(change: Change | None, layout: str = "megatron", model: Tiny = MODEL, given: Path | None = None, **more):
        a = opened(tmp_path / "a", Scenario(model=model, sketched=fine, **more))
        b = opened(
            tmp_path / "b", actor(layout, model=model, sketched=lambda w: (fine(w), change and change(w)), **more)
        )
        with a, b:
            return weights_gate(*read_sides(a, b), given)

    return run


def fine(weights: Tensors) -> None:
    """Give the weights, which bf16 holds exactly, the digits that only fp32 holds."""
    rng = np.random.default_rng(5)
    for name in weights:
        weights[name] = (weights[name] * rng.uniform(1, 1.1, weights[name].shape)).astype(np.float32).astype(np.float64)


# -- what was changed -------------------------------------------------------------------------------------------------


def scaled(w: Tensors) -> None:
    w[DOWN] = w[DOWN] * 1.03


def rows_moved(w: Tensors) -> None:
    w[OUT] = w[OUT][[1, 0, *range(2, len(w[OUT]))]]


def columns_moved(w: Tensors) -> None:
    w[DOWN] = w[DOWN][:, [1, 0, *range(2, w[DOWN].shape[1])]]


def transposed(w: Tensors) -> None:
    w[OUT] = w[OUT].T.copy()


def gate_up(w: Tensors) -> None:
    w[GATE], w[UP] = w[UP], w[GATE]


def key_value(w: Tensors) -> None:
    w[K], w[V] = w[V], w[K]


def qkv_dealt_otherwise(w: Tensors) -> None:
    fused = np.concatenate([w[Q], w[K], w[V]])
    order = np.arange(len(fused)).reshape(-1, 2).T.ravel()
    sizes = np.cumsum([len(w[Q]), len(w[K])])
    w[Q], w[K], w[V] = np.split(fused[order], sizes)


def rope_pairing_of_rows(w: Tensors) -> None:
    order = np.arange(len(w[Q])).reshape(-1, 2, 4).transpose(0, 2, 1).ravel()
    w[Q] = w[Q][order]


def norm_plus_one(w: Tensors) -> None:
    w[f"{LAYER}.input_layernorm.weight"] = w[f"{LAYER}.input_layernorm.weight"] + 1


def large_norm_plus_one_in_bf16(w: Tensors) -> None:
    name = "layers.2.input_layernorm.weight"
    w[name] = round_to(w[name] + 1, "bfloat16").astype(np.float64)


def shard_of_rows_missing(w: Tensors) -> None:
    w[DOWN] = w[DOWN].copy()
    w[DOWN][len(w[DOWN]) // 2 :] = 0


def shard_of_columns_missing(w: Tensors) -> None:
    w[DOWN] = w[DOWN].copy()
    w[DOWN][:, : w[DOWN].shape[1] // 2] = 0


def shards_swapped(w: Tensors) -> None:
    half = len(w[GATE]) // 2
    w[GATE] = np.roll(w[GATE], half, axis=0)


def through(dtype: str) -> Change:
    def change(w: Tensors) -> None:
        w[DOWN] = round_to(w[DOWN], dtype).astype(np.float64)

    return change


def norm_through_bf16(w: Tensors) -> None:
    w["norm.weight"] = round_to(w["norm.weight"], "bfloat16").astype(np.float64)


def bias(w: Tensors) -> None:
    w[Q.replace("weight", "bias")] = w[Q.replace("weight", "bias")] * 0.9


def all_zero(w: Tensors) -> None:
    w[UP] = np.zeros_like(w[UP])


def stale(w: Tensors) -> None:
    w[DOWN] = w[DOWN] + 0.05 * np.random.default_rng(1).normal(size=w[DOWN].shape)


CASES = [
    (scaled, "scaled-weight", "layers.1.mlp.down_proj"),
    (rows_moved, "permuted-weights", "layers.1.self_attn.o_proj"),
    (columns_moved, "permuted-weights", "layers.1.mlp.down_proj"),
    (transposed, "transposed-weight", "layers.1.self_attn.o_proj"),
    (gate_up, "gate-up-swapped", "layers.1.mlp.gate_proj"),
    (key_value, "kv-swapped", "layers.1.self_attn.k_proj"),
    (qkv_dealt_otherwise, "permuted-qkv", "layers.1.self_attn.q_proj"),
    (rope_pairing_of_rows, "permuted-qkv", "layers.1.self_attn.q_proj"),
    (norm_plus_one, "norm-weight-offset", "layers.1.input_layernorm"),
    (large_norm_plus_one_in_bf16, "norm-weight-offset", "layers.2.input_layernorm"),
    (shard_of_rows_missing, "missing-shard", "layers.1.mlp.down_proj"),
    (shard_of_columns_missing, "missing-shard", "layers.1.mlp.down_proj"),
    (all_zero, "missing-shard", "layers.1.mlp.up_proj"),
    (shards_swapped, "tp-shards-swapped", "layers.1.mlp.gate_proj"),
    (through("bfloat16"), "weight-precision", "layers.1.mlp.down_proj"),
    (through("float16"), "weight-precision", "layers.1.mlp.down_proj"),
    (through("float8_e4m3fn"), "weight-precision", "layers.1.mlp.down_proj"),
    (norm_through_bf16, "weight-precision", "norm"),
    (bias, "wrong-bias", "layers.1.self_attn.q_proj"),
    (stale, "stale-weights", "layers.1.mlp.down_proj"),
]


@pytest.mark.parametrize(("change", "cause", "subject"), CASES, ids=[f"{c}-{n}" for n, (_, c, _) in enumerate(CASES)])
@pytest.mark.parametrize("layout", ["megatron", "vllm"])
def test_each_kind_of_change_has_its_cause_and_its_parameter(gate_of, change, cause, subject, layout):
    gate = gate_of(change, layout)
    assert gate.status == "fail"
    first = gate.findings[0]
    assert (first.cause, first.subject) == (cause, subject), gate.findings
    assert str(first.figures["parameter"]).startswith(subject) and subject in first.text


def alone(x: np.ndarray, dtype: str) -> dict[str, Weight]:
    return {DOWN: Weight(DOWN, DOWN, x.shape, dtype, sketch_rows(round_to(x, dtype).astype(np.float64)))}


@pytest.mark.parametrize("factor", [0.5, 0.97, 1.03, 2.0, -1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scaled_copy_is_scaled_to_within_one_rounding(dtype, factor):
    x = round_to(np.random.default_rng(0).normal(size=(64, 128)), dtype).astype(np.float64)
    found = compare_weights(alone(x, dtype), alone(factor * x, dtype))[0]
    assert found.cause == "scaled-weight" and found.figures["factor"] == pytest.approx(factor, rel=1e-3)


@pytest.mark.parametrize("size", [0.02, 0.1, 0.2, 0.38, 0.58, 0.8])  # 0.38 and 0.58: squares grow to 8/7 and 4/3
def test_noise_on_a_weight_is_no_missing_shard(size):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(64, 128))
    noisy = x + size * rng.normal(size=x.shape)
    assert compare_weights(alone(x, "bfloat16"), alone(noisy, "bfloat16"))[0].cause == "stale-weights"


def test_equal_weights_and_a_difference_of_dtype_give_no_finding(gate_of, tmp_path):
    assert gate_of(None).findings == ()
    a = opened(tmp_path / "c", Scenario(sketched=fine))
    b = opened(tmp_path / "d", actor(sketched=fine, weights_dtype="bfloat16"))
    with a, b:
        gate = weights_gate(*read_sides(a, b))
    assert gate.status == "pass" and not gate.findings


def test_a_head_that_is_tied_on_one_side_and_an_older_copy_on_the_other(gate_of):
    def tied(w: Tensors) -> None:
        w["lm_head.weight"] = w["embed_tokens.weight"]

    def untied(w: Tensors) -> None:
        w["lm_head.weight"] = w["embed_tokens.weight"] + 0.01

    sketches = []
    for edit in (tied, untied):
        w = make_weights(MODEL)
        edit(w)
        sketches.append(
            {n: Weight(n, n, x.shape, "float32", sketch_rows(x) if x.ndim > 1 else x[:, None]) for n, x in w.items()}
        )
    different = [f for f in compare_weights(*sketches) if f.status == "different"]
    assert [(f.name, f.cause, f.side) for f in different] == [("lm_head.weight", "untied-head", "b")]


def test_exchanged_experts_are_named():
    rng = np.random.default_rng(0)
    names = [f"layers.0.mlp.experts.{e}.up_proj.weight" for e in range(3)]
    tables = {n: sketch_rows(rng.normal(size=(8, 6))) for n in names}
    a = {n: Weight(n, n, (8, 6), "float32", rows) for n, rows in tables.items()}
    b = {**a, names[0]: a[names[2]], names[2]: a[names[0]]}
    found = {f.name: f for f in compare_weights(a, b) if f.status == "different"}
    assert {f.cause for f in found.values()} == {"expert-swapped"} and set(found) == {names[0], names[2]}
    assert found[names[0]].figures == {"expert": 0, "with": 2}


def test_other_weights_of_two_declared_versions_are_lagged(tmp_path):
    a, b = opened(tmp_path / "a", Scenario()), opened(tmp_path / "b", actor(sketched=stale))
    with a, b:
        for dump, version in ((a, 3), (b, 4)):
            for sequence in dump.sequences:
                sequence.weight_version = version
        gate = weights_gate(*read_sides(a, b))
    assert gate.status == "warn" and {f.cause for f in gate.findings} == {"lagged-weights"}


def test_many_differences_are_one_finding_and_the_worst(gate_of):
    def all_of_them(w: Tensors) -> None:
        rng = np.random.default_rng(2)
        for n, name in enumerate(w):
            w[name] = w[name] + (0.2 if n == 7 else 0.03) * rng.normal(size=w[name].shape)

    gate = gate_of(all_of_them)
    whole = gate.findings[0]
    assert (whole.cause, whole.subject, whole.figures["parameters"]) == ("stale-weights", "weights", 39)
    assert len(gate.findings) < MANY + 2 and whole.figures["of"] == 39
    assert {f.cause for f in gate.findings} == {"stale-weights"}


def test_a_whole_layer_is_told_parameter_by_parameter(gate_of):
    def one_layer(w: Tensors) -> None:
        rng = np.random.default_rng(2)
        for name in w:
            if name.startswith("layers.2."):
                w[name] = w[name] + 0.01 * rng.normal(size=w[name].shape)

    gate = gate_of(one_layer)
    assert {f.subject for f in gate.findings} >= {"layers.2.input_layernorm", "layers.2.mlp.down_proj"}
    assert "weights" not in {f.subject for f in gate.findings}


# -- a checkpoint as the judge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_the_side_that_is_not_the_checkpoint_is_named(tmp_path, wrong):
    folder = checkpoint(tmp_path / "hf")
    changes = {"a": {"sketched": scaled} if wrong == "a" else {}, "b": {"sketched": scaled} if wrong == "b" else {}}
    manifest = {"model": {"path": str(folder), "config": MODEL.config()}}
    a = opened(tmp_path / "a", Scenario(manifest=manifest, **changes["a"]))
    b = opened(tmp_path / "b", actor(manifest=manifest, **changes["b"]))
    with a, b:
        given, named = weights_gate(*read_sides(a, b), folder), weights_gate(*read_sides(a, b))
    for gate in (given, named):
        assert gate.findings[0].side == wrong
        assert f"those of {wrong} are wrong" in gate.detail


def test_a_checkpoint_that_fits_neither_side_or_cannot_be_read_says_nothing(tmp_path):
    other = checkpoint(tmp_path / "other", change=lambda w: w.update({DOWN: w[DOWN] + 1}))
    for path in (str(other), str(tmp_path / "gone")):
        manifest = {"model": {"path": path, "config": MODEL.config()}}
        a = opened(tmp_path / "x" / path[-4:] / "a", Scenario(manifest=manifest))
        b = opened(tmp_path / "x" / path[-4:] / "b", actor(manifest=manifest, sketched=scaled))
        with a, b:
            gate = weights_gate(*read_sides(a, b))
        assert gate.findings[0].side == "unknown" and "wrong" not in gate.detail


def test_a_checkpoint_that_the_user_gives_must_be_readable(gate_of, tmp_path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        gate_of(scaled, given=tmp_path / "none")


def test_two_checkpoints_are_both_named_where_each_side_holds_its_own(tmp_path):
    right, broken = checkpoint(tmp_path / "right"), checkpoint(tmp_path / "broken", change=scaled)
    manifests = [{"model": {"path": str(folder), "config": MODEL.config()}} for folder in (right, broken)]
    a = opened(tmp_path / "a", Scenario(manifest=manifests[0]))
    b = opened(tmp_path / "b", actor(manifest=manifests[1], sketched=scaled))
    with a, b:
        gate = weights_gate(*read_sides(a, b))
    assert gate.findings[0].side == "unknown"
    assert f"a was loaded from {right}, b from {broken}" in gate.detail


def test_after_weight_updates_the_checkpoint_of_the_manifest_does_not_judge(tmp_path):
    manifest = {"model": {"path": str(checkpoint(tmp_path / "hf")), "config": MODEL.config()}}
    a = opened(tmp_path / "a", Scenario(manifest=manifest))
    b = opened(tmp_path / "b", actor(manifest=manifest, sketched=scaled))
    with a, b:
        for sequence in [*a.sequences, *b.sequences]:
            sequence.weight_version = 2
        assert weights_gate(*read_sides(a, b)).findings[0].side == "unknown"


def swapped_columns(w: Tensors) -> None:
    w[DOWN] = np.roll(w[DOWN], w[DOWN].shape[1] // 2, axis=1)


def through_scaled_fp8(w: Tensors) -> None:
    scale = np.abs(w[DOWN]).max() / 448.0
    w[DOWN] = round_to(w[DOWN] / scale, "float8_e4m3fn") * scale


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        (swapped_columns, "tp-shards-swapped", "0 and 1 are exchanged of 2"),
        (through_scaled_fp8, "weight-precision", "rounded to float8_e4m3fn with a scale per tensor"),
        (shard_of_columns_missing, "missing-shard", "lacks part 0 of 2 of its input columns"),
    ],
)
def test_the_checkpoint_says_what_was_done_to_a_parameter(tmp_path, change, cause, words):
    folder = checkpoint(tmp_path / "hf")
    a, b = opened(tmp_path / "a", Scenario()), opened(tmp_path / "b", actor(sketched=change))
    with a, b:
        found = weights_gate(*read_sides(a, b), folder).findings[0]
    assert (found.cause, found.side) == (cause, "b") and words in found.text


def test_agreement_tells_equal_rounded_different_and_unseen(tmp_path):
    def partly(w: Tensors) -> None:
        scaled(w)
        del w["norm.weight"]

    folder = checkpoint(tmp_path / "hf", change=fine)

    def sketched(w: Tensors) -> None:
        fine(w)
        partly(w)

    with opened(tmp_path / "a", Scenario(sketched=sketched)) as dump, opened(tmp_path / "b", actor()) as other:
        side, _ = read_sides(dump, other)
        found = agreement(side, folder)
        assert found.different.keys() == {DOWN} and "scaled" in found.different[DOWN]
        assert len(found.equal) == 37 and not found.rounded and not found.unseen and found.mostly
        assert agreement(side, Checkpoint(folder), [DOWN, Q, "norm.weight"]).unseen == {"norm.weight"}
    rounded = Scenario(sketched=fine, weights_dtype="bfloat16")
    with opened(tmp_path / "c", rounded) as dump, opened(tmp_path / "d", actor()) as other:
        side, _ = read_sides(dump, other)
        found = agreement(side, folder)
        assert len(found.rounded) == 39 and not found.different


def test_a_checkpoint_gives_values_and_sketches_of_canonical_parameters(tmp_path):
    folder, weights = checkpoint(tmp_path / "hf"), make_weights(MODEL)
    with opened(tmp_path / "a", Scenario()) as dump, opened(tmp_path / "b", actor()) as other:
        side, _ = read_sides(dump, other)
        known = CheckpointWeights(Checkpoint(folder), side.shape)
        sketched = canonical_weights(side)
        for name, value in weights.items():
            assert np.array_equal(known.values(name), value)
            assert np.allclose(known.weight(name).rows, sketched[name].rows, rtol=1e-12, atol=1e-12)
    assert known.values("layers.9.mlp.up_proj.weight") is None
    assert len(range(0, 39, -(-39 // CHECKED))) <= CHECKED
