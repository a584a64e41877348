"""Stored parameters (PROBE_WEIGHTS=layers): the values that a model held, whole again from any number of ranks."""

from __future__ import annotations

import logging

import h5py
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from dump_tools import open_rank, segment
from torch import nn

from probe import PrecisionDebugger
from probe.compare.side import read_side
from probe.compare.weights import canonical_parameter
from probe.errors import DumpError, UsageError
from probe.settings import Settings, load_settings, weights_settings
from probe.store.reader import open_dump
from probe.store.schema import StoredParameter, WeightSketch
from probe.store.sketches import sketch_rows

CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 12,
}


def write(folder, ranks, sizes, engine="vllm"):
    """Write the files of ranks, each {axis: number} with its parameters (StoredParameter, values)."""
    manifest = {"engine": {"name": engine, "version": "1"}, "model": {"config": CONFIG}, "world_size": len(ranks)}
    for at, parameters in ranks:
        writer = open_rank(folder, sizes=sizes, at=at, manifest=manifest)
        writer.append("model.layers.0.mlp", "output.0", np.ones((4, 8), np.float32), "float32", segment(4))
        for about, values in parameters:
            rows = sketch_rows(values.reshape(len(values), -1)) if values.ndim > 1 else values[:, None].astype(float)
            lies = {"axis": about.axis, "start": about.start, "whole": about.whole}
            writer.add_weight(WeightSketch(about.name, values.shape, about.dtype, rows, **lies))
            writer.add_parameter(about, values)
        writer.close()
    return folder / "rollout"


def stored(name, values, **lies):
    return StoredParameter(name, values.shape, "float32", **lies), values


def matrix(rows, columns, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_tensor_parallel_shards_are_split_rank_by_rank_and_joined(tmp_path):
    q, k, v = matrix(8, 8, 1), matrix(4, 8, 2), matrix(4, 8, 3)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    shards = [np.concatenate([part[n * len(part) // 2 :][: len(part) // 2] for part in (q, k, v)]) for n in (0, 1)]
    down = matrix(8, 16, 4)
    columns = "model.layers.0.mlp.down_proj.weight"
    ranks = [
        (
            {"tp": n},
            [stored(name, shards[n], axis=0), stored(columns, down[:, 8 * n : 8 * n + 8].copy(), axis=1)],
        )
        for n in (0, 1)
    ]
    with open_dump(write(tmp_path, ranks, {"tp": 2})) as dump:
        side = read_side(dump)
        for label, expected in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            found = canonical_parameter(side, f"layers.0.self_attn.{label}.weight")
            assert found is not None and found.dtype == np.float64 and np.array_equal(found, expected)
        assert np.array_equal(canonical_parameter(side, "layers.0.mlp.down_proj.weight"), down)
        assert np.array_equal(dump.parameter_values(columns), down)
        assert [shard.shape for shard in dump.parameter_shards(name)] == [(8, 8), (8, 8)]
        assert dump.parameter_values("model.norm.weight") is None
        assert canonical_parameter(side, "norm.weight") is None


def test_slices_of_fsdp_are_put_together_and_a_lost_one_gives_none(tmp_path):
    weight = matrix(6, 4)
    ranks = [
        ({"dp": n}, [stored("model.layers.0.mlp.up_proj.weight", weight[2 * n : 2 * n + 2], start=2 * n, whole=6)])
        for n in range(3)
    ]
    with open_dump(write(tmp_path / "all", ranks, {"dp": 3}, "transformers")) as dump:
        assert np.array_equal(canonical_parameter(read_side(dump), "layers.0.mlp.up_proj.weight"), weight)
    with open_dump(write(tmp_path / "two", [ranks[0], ranks[2]], {"dp": 3}, "transformers")) as dump:
        assert dump.parameter_values("model.layers.0.mlp.up_proj.weight") is None


def test_a_file_without_the_table_has_no_parameters(tmp_path):
    folder = write(tmp_path, [({}, [stored("w", matrix(2, 4))])], {})
    with h5py.File(folder / "step0" / "rank0.h5", "r+") as file:
        del file["parameters"]
    with open_dump(folder) as dump:
        assert dump.parameters == {} and dump.parameter_values("w") is None


@pytest.mark.parametrize("columns", [{"axis": 2}, {"start": 3}, {"whole": 1}, {"dtype": "float31"}])
def test_forged_entries_are_refused(tmp_path, columns):
    folder = write(tmp_path, [({}, [stored("w", matrix(2, 4))])], {})
    with h5py.File(folder / "step0" / "rank0.h5", "r+") as file:
        record = file["parameters"][0]
        for name, value in columns.items():
            record[name] = value
        file["parameters"][0] = record
    with pytest.raises(DumpError, match="/parameters w"):
        open_dump(folder)


def test_a_dataset_of_another_size_is_refused(tmp_path):
    folder = write(tmp_path, [({}, [stored("w", matrix(2, 4))])], {})
    with h5py.File(folder / "step0" / "rank0.h5", "r+") as file:
        del file["values/w"]
        file.create_dataset("values/w", data=np.zeros((2, 3), np.float32))
    with open_dump(folder) as dump, pytest.raises(DumpError, match="has shape"):
        dump.parameter_values("w")


# -- capture ----------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Two linears of which one shares its weight, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.again = nn.Linear(4, 6)
        self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) + self.again(x))


def record(folder, model, **settings):
    debugger = PrecisionDebugger(dump_path=folder, enabled=True, **settings)
    with debugger.start(model):
        model(torch.ones(3, 4, dtype=next(model.parameters()).dtype))
    return open_dump(folder / "actor")


def test_nothing_is_stored_unless_asked_for(tmp_path):
    with record(tmp_path, Small()) as dump:
        assert dump.parameters == {} and set(dump.weights) >= {"up.weight", "down.bias"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_those_before_the_forward_in_their_own_dtype(tmp_path, dtype):
    model = Small().to(dtype)
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    model.register_forward_pre_hook(lambda module, args: module.up.weight.data.zero_())
    with record(tmp_path, model, weights="layers") as dump:
        assert set(dump.parameters) == set(kept)  # the shared weight once
        assert {p.dtype for p in dump.parameters.values()} == {str(dtype).removeprefix("torch.")}
        for name, value in kept.items():
            assert np.array_equal(dump.parameter_values(name), value.float().numpy())


def test_only_recorded_modules_are_stored_within_the_budget(tmp_path, caplog):
    with record(tmp_path / "list", Small(), weights="layers", list=["down"]) as dump:
        assert set(dump.parameters) == {"down.weight", "down.bias"}
    with caplog.at_level(logging.INFO, "probe"):
        dump = record(tmp_path / "bytes", Small(), weights="layers", weights_bytes=130)
    with dump:
        assert set(dump.parameters) == {"up.weight", "up.bias"}
    assert "3 parameters were not stored: more than 130 bytes" in caplog.text and "stored 0.0 MB" in caplog.text


def test_a_hugging_face_model_gives_canonical_parameters(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path / "hf", layers=1, hidden=16, intermediate=24))
    debugger = PrecisionDebugger(dump_path=tmp_path / "dump", enabled=True, weights="layers")
    with debugger.start(model), torch.no_grad():
        model(input_ids=torch.arange(5)[None])
    with open_dump(tmp_path / "dump" / "actor") as dump:
        side = read_side(dump)
        q = canonical_parameter(side, "layers.0.self_attn.q_proj.weight")
        assert np.array_equal(q, model.model.layers[0].self_attn.q_proj.weight.detach().numpy())
        head = canonical_parameter(side, "lm_head.weight")
        assert head is not None and head.shape == (197, 16)


def test_the_settings_come_from_the_environment_or_a_keyword():
    assert load_settings(None, {}, {"PROBE_WEIGHTS": "layers", "PROBE_WEIGHTS_BYTES": "10"}).weights_bytes == 10
    assert weights_settings({"PROBE_WEIGHTS": "layers"}).weights == "layers"
    assert weights_settings({}) == Settings()
    with pytest.raises(UsageError, match="weights 'all' is not supported"):
        load_settings(None, {"weights": "all"}, {})
