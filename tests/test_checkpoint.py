"""Reading Hugging Face checkpoints: values and dtypes, shards, and refusals of what cannot be read safely."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from checkpoints import make_checkpoint

from probe.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from probe.errors import CheckpointError


def write_safetensors(file, header, data=b""):
    """Write a safetensors file from a header object (or raw header bytes) and its data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def directory(tmp_path):
    """Return a checkpoint directory with a config.json and no weights."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 4}))
    return tmp_path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    """Return one header entry."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_single_file(directory):
    data = np.arange(6, dtype=np.float32).tobytes() + np.array([1, -2], np.int64).tobytes()
    header = {
        "__metadata__": {"format": "pt"},
        "w": entry(shape=(2, 3), offsets=(0, 24)),
        "n": entry("I64", (2,), (24, 40)),
    }
    write_safetensors(directory / SINGLE_FILE, header, data)
    checkpoint = Checkpoint(directory)
    assert checkpoint.architecture == "Qwen2ForCausalLM"
    assert checkpoint.config["vocab_size"] == 4
    assert checkpoint.names() == ["n", "w"]
    assert checkpoint.shape("w") == (2, 3)
    assert np.array_equal(checkpoint.tensor("w"), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert checkpoint.tensor("n").dtype == np.int64 and checkpoint.tensor("n").tolist() == [1, -2]


def test_every_bfloat16_is_widened_exactly(directory):
    bits = np.arange(1 << 16, dtype="<u2")
    write_safetensors(directory / SINGLE_FILE, {"w": entry("BF16", (256, 256), (0, 1 << 17))}, bits.tobytes())
    checkpoint = Checkpoint(directory)
    assert checkpoint.dtype("w") == "bfloat16"
    values = checkpoint.tensor("w")
    assert values.dtype == np.float32
    assert np.array_equal(values.reshape(-1).view(np.uint32), bits.astype(np.uint32) << 16)


def test_empty_and_scalar_tensors(directory):
    header = {"none": entry(shape=(0, 3), offsets=(0, 0)), "one": entry(shape=(), offsets=(0, 4))}
    write_safetensors(directory / SINGLE_FILE, header, np.float32(2.5).tobytes())
    checkpoint = Checkpoint(directory)
    assert checkpoint.tensor("none").shape == (0, 3)
    assert checkpoint.tensor("one").shape == () and checkpoint.tensor("one") == 2.5


@pytest.mark.parametrize(("dtype", "size"), [("float32", "5GB"), ("bfloat16", "5GB"), ("bfloat16", "30KB")])
def test_agrees_with_the_safetensors_library(tmp_path, dtype, size):
    import safetensors.torch as safetensors
    import torch

    make_checkpoint(tmp_path, "qwen2", dtype=dtype, max_shard_size=size)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (size == "30KB") == (tmp_path / INDEX_FILE).is_file()
    expected = {name: value for file in files for name, value in safetensors.load_file(file).items()}
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names() == sorted(expected)
    for name, value in expected.items():
        assert checkpoint.dtype(name) == dtype
        assert torch.equal(torch.from_numpy(checkpoint.tensor(name)), value.float())


def test_unknown_tensor(directory):
    write_safetensors(directory / SINGLE_FILE, {"w": entry()}, bytes(8))
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        Checkpoint(directory).tensor("x")


def test_missing_directory(tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint(tmp_path / "none")


def test_missing_config(tmp_path):
    write_safetensors(tmp_path / SINGLE_FILE, {"w": entry()}, bytes(8))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", '"x"'])
def test_unreadable_config(directory, text):
    (directory / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(directory)


@pytest.mark.parametrize("architectures", [None, [], [3], "Qwen2ForCausalLM"])
def test_config_without_architecture(directory, architectures):
    (directory / "config.json").write_text(json.dumps({"architectures": architectures}))
    write_safetensors(directory / SINGLE_FILE, {"w": entry()}, bytes(8))
    with pytest.raises(CheckpointError, match="names no architecture"):
        _ = Checkpoint(directory).architecture


def test_missing_weights(directory):
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(directory)


def test_pickled_weights_are_refused_with_the_way_out(directory):
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pickled.*safe_serialization"):
        Checkpoint(directory)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        {"w": 3},
        {"w": {"dtype": "F32", "shape": [2]}},
        {"w": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]}},
        {"w": entry("F4096")},
        {"w": entry(None)},
        {"w": entry(shape=(-2,))},
        {"w": entry(shape=(True, 2))},
        {"w": entry(shape=(3,))},
        {"w": entry(offsets=(8, 0))},
        {"w": entry(offsets=(4, 12))},
        {"w": entry(offsets=(-8, 0))},
        {"w": entry(offsets=(0, 8, 16))},
        {"w": entry(shape=(1 << 62, 1 << 62), offsets=(0, 1 << 126))},
    ],
    ids=lambda header: repr(header)[:60],
)
def test_corrupt_header(directory, header):
    write_safetensors(directory / SINGLE_FILE, header, bytes(8))
    with pytest.raises(CheckpointError, match=SINGLE_FILE):
        Checkpoint(directory)


@pytest.mark.parametrize("content", [b"", b"\x01\x02", struct.pack("<Q", 1 << 60), struct.pack("<Q", 9) + b"{}"])
def test_corrupt_header_length(directory, content):
    (directory / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="header length"):
        Checkpoint(directory)


def test_file_shortened_after_opening(directory):
    file = directory / SINGLE_FILE
    write_safetensors(file, {"w": entry()}, bytes(8))
    checkpoint = Checkpoint(directory)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.tensor("w")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ({}, "weight_map"),
        ({"weight_map": {"w": 1}}, "weight_map"),
        ({"weight_map": {"w": "absent.safetensors"}}, "absent"),
        ({"weight_map": {"w": "../a.safetensors"}}, "not a file of"),
        ({"weight_map": {"w": "a.safetensors", "x": "a.safetensors"}}, "lacks tensor 'x'"),
    ],
)
def test_broken_index(directory, index, match):
    write_safetensors(directory / "a.safetensors", {"w": entry()}, bytes(8))
    (directory / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=match):
        Checkpoint(directory)
