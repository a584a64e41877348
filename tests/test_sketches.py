"""Weight sketches of several ranks are joined: tensor-parallel shards, FSDP slices, experts, copies that must agree."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from dump_tools import open_rank, segment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probe.compare.side import read_side
from probe.compare.weights import Weight, canonical_weights, compare_weights
from probe.compare.weights_gate import weights_gate
from probe.errors import DumpError
from probe.hooks.weights import sketch
from probe.store.reader import open_dump
from probe.store.schema import WeightSketch


def matrix(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def part(name, weight, *, axis=-1, column=0, start=0, whole=None):
    """Return the sketch of a rank's part of a parameter, as its hooks would make it."""
    made = sketch(name, weight, axis, column)
    whole = len(weight) if whole is None else whole
    return WeightSketch(name, made.shape, made.dtype, made.rows, made.quad, "", axis, start, whole)


def write(folder, ranks, sizes, engine="transformers"):
    """Write one file per entry of ``ranks``: (coordinates, sketches)."""
    for at, weights in ranks:
        writer = open_rank(folder, sizes=sizes, at=at, manifest={"engine": {"name": engine, "version": "1"}})
        for weight in weights:
            writer.add_weight(weight)
        writer.append("m", "output.0", np.zeros((1, 1), np.float32), "float32", segment(1))
        writer.close()
    return folder


def close(found, expected):
    # float64 sums of some dozen products of size about 1, in another order
    return found.shape == expected.shape and np.allclose(found, expected, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 1]), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shards_and_slices_of_any_sizes_give_the_whole_sketch(tmp_path_factory, tp, dp, axis, data):
    """Tensor parallelism cuts evenly, FSDP slices each shard's rows unevenly, some ranks holding none."""
    folder = tmp_path_factory.mktemp("dump")
    out, columns = (size * tp for size in data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4))))
    weight, ranks = matrix(out, columns, seed=out + columns), []
    for number, shard in enumerate(weight.chunk(tp, dim=axis)):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(shard)), min_size=dp - 1, max_size=dp - 1)))
        for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(shard)])):
            column = shard.shape[1] * number if axis else 0
            lies = {"axis": axis, "column": column, "start": start, "whole": len(shard)}
            mine = [part("w", shard[start:stop], **lies)] if stop > start else []
            ranks.append(({"tp": number, "dp": rank}, mine))
    write(folder, data.draw(st.permutations(ranks)), {"tp": tp, "dp": dp})
    with open_dump(folder) as dump:
        joined = dump.joined_weights["w"]
        assert (joined.gap, joined.conflict) == ("", "") and len(joined.shards) == tp
        assert dump.weights["w"].shape == (out, columns) and (joined.whole.start, joined.whole.whole) == (0, out)
        assert close(dump.weights["w"].rows, sketch("w", weight).rows)


def test_biases_and_replicated_parameters(tmp_path):
    bias, norm = matrix(6), matrix(4)
    ranks = [
        ({"tp": tp}, [part("bias", bias[3 * tp : 3 * tp + 3], axis=0), part("norm", norm), part("odd", norm + tp)])
        for tp in range(2)
    ]
    with open_dump(write(tmp_path, ranks, {"tp": 2})) as dump:
        assert close(dump.weights["bias"].rows[:, 0], bias.double().numpy())
        assert close(dump.weights["norm"].rows[:, 0], norm.double().numpy())
        assert dump.joined_weights["norm"].conflict == ""
        assert dump.joined_weights["odd"].conflict == "rank tp 0 and rank tp 1 hold different copies of it"


def experts_of(weights):
    return {name: weight for name, weight in weights.items() if "experts" in name}


@pytest.mark.parametrize("how", ["tensor parallel", "expert parallel", "fsdp"])
def test_stacked_experts_of_ranks_are_compared_one_by_one(tmp_path, how):
    """vLLM stacks [gate | up] of each rank's part, transformers the whole ones; both give the same experts."""
    gate, up, down = matrix(4, 6, 5), matrix(4, 6, 5, seed=1), matrix(4, 5, 6, seed=2)
    stacked = torch.cat([gate, up], dim=1)
    at, names = "model.layers.0.mlp.experts", ("w13_weight", "w2_weight")
    ranks = []
    for rank in range(2):
        half, two = slice(3 * rank, 3 * rank + 3), slice(2 * rank, 2 * rank + 2)
        if how == "tensor parallel":
            w13 = part("", torch.cat([gate[:, half], up[:, half]], dim=1), axis=0)
            w2 = part("", down[:, :, half], axis=1, column=3 * rank)
        else:
            w13, w2 = (part("", w[two], start=2 * rank, whole=4) for w in (stacked, down))
        named = [WeightSketch(**{**vars(w), "name": f"{at}.{name}"}) for w, name in zip((w13, w2), names)]
        ranks.append(({"dp" if how == "fsdp" else "tp": rank}, named))
    write(tmp_path / "many", ranks, {"dp" if how == "fsdp" else "tp": 2}, engine="vllm")
    alone = [
        part("model.layers.0.mlp.experts.gate_up_proj", stacked),
        part("model.layers.0.mlp.experts.down_proj", down),
    ]
    write(tmp_path / "one", [({}, alone)], {})
    with open_dump(tmp_path / "many") as many, open_dump(tmp_path / "one") as one:
        a, b = (experts_of(canonical_weights(read_side(dump))) for dump in (many, one))
        assert set(a) == set(b) and len(a) == 4 * 3
        name = "layers.0.mlp.experts.2.up_proj.weight"
        assert a[name].shape == b[name].shape == (6, 5)
        assert close(a[name].rows, sketch("w", up[2]).rows)
        assert {finding.status for finding in compare_weights(a, b)} == {"equal"}


# -- what is wrong ----------------------------------------------------------------------------------------------------


def test_a_missing_slice_is_named_and_not_compared(tmp_path):
    weight = matrix(6, 4)
    name = "model.layers.0.mlp.down_proj.weight"
    slices = [part(name, weight[2 * n : 2 * n + 2], start=2 * n, whole=6) for n in range(3)]
    write(tmp_path / "a", [({"dp": n}, [slices[n]]) for n in (0, 2)], {"dp": 3})
    write(tmp_path / "b", [({}, [part(name, weight)])], {})
    with open_dump(tmp_path / "a") as a, open_dump(tmp_path / "b") as b:
        assert a.joined_weights[name].gap == "rows 2 to 3 of 6 are in no file"
        gate = weights_gate(read_side(a), read_side(b))
        assert gate.status == "warn"
        assert "down_proj.weight lacks a shard in a: rows 2 to 3 of 6 are in no file" in gate.detail


def test_copies_that_differ_fail_the_gate_with_their_ranks(tmp_path):
    weight, name = matrix(6, 4), "model.norm.weight"
    other = weight.clone()
    other[3, 2] += 1e-3
    write(tmp_path / "a", [({"dp": 0}, [part(name, weight)]), ({"dp": 1}, [part(name, other)])], {"dp": 2})
    write(tmp_path / "b", [({}, [part(name, weight)])], {})
    with open_dump(tmp_path / "a") as a, open_dump(tmp_path / "b") as b:
        gate = weights_gate(read_side(a), read_side(b))
    assert gate.status == "fail"
    assert "norm.weight is not the same on all ranks of a: rank dp 0 and rank dp 1 hold different copies" in gate.detail


def test_a_side_that_sketched_one_shard_only_is_told_from_another_shape():
    weight = sketch("w", matrix(8, 4)).rows
    a = {"w": Weight("w", "w", (8, 4), "float32", weight)}
    half = {"w": Weight("w", "w", (4, 4), "float32", weight[4:])}
    other = {"w": Weight("w", "w", (4, 4), "float32", weight[:4] + 1)}
    assert "lacks a shard in b, which holds rows 4 to 7 of 8 only" in compare_weights(a, half)[0].detail
    assert "lacks a shard in a" in compare_weights(half, a)[0].detail
    assert "has another shape ([8, 4] in a, [4, 4] in b)" in compare_weights(a, other)[0].detail


def test_parameters_that_no_rank_could_sketch_are_left_out(tmp_path):
    flat = WeightSketch("model.norm.weight", (), "float32", np.zeros((0, 3)))
    write(tmp_path, [({"dp": n}, [flat]) for n in range(2)], {"dp": 2})
    with open_dump(tmp_path) as dump:
        assert not len(dump.weights["model.norm.weight"].rows) and not canonical_weights(read_side(dump))


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ((0, 2, 6, -1), (1, 3, 6, -1), "do not fit together"),
        ((0, 2, 6, -1), (2, 4, 8, -1), "do not fit together"),
        ((0, 2, 2, 0), (0, 2, 2, 1), "disagree about how ranks share w"),
    ],
    ids=["overlap", "sizes", "axes"],
)
def test_slices_that_contradict_each_other_are_refused(tmp_path, first, second, problem):
    weight = matrix(8, 4)
    ranks = [
        ({"dp": n}, [part("w", weight[start:stop], axis=axis, start=start, whole=whole)])
        for n, (start, stop, whole, axis) in enumerate((first, second))
    ]
    write(tmp_path, ranks, {"dp": 2})
    with pytest.raises(DumpError, match=problem):
        open_dump(tmp_path)


@pytest.mark.parametrize("columns", [{"axis": 2}, {"axis": -2}, {"start": -1}, {"start": 3}, {"whole": 1}])
def test_forged_places_of_a_parameter_are_refused(tmp_path, columns):
    write(tmp_path, [({}, [part("w", matrix(2, 4))])], {})
    with h5py.File(tmp_path / "rollout" / "step0" / "rank0.h5", "r+") as file:
        record = file["weights"][0]
        for name, value in columns.items():
            record[name] = value
        file["weights"][0] = record
    with pytest.raises(DumpError, match="/weights w lies as no parameter does"):
        open_dump(tmp_path)
