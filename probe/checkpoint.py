"""Read a Hugging Face checkpoint directory without torch.

A checkpoint is ``config.json`` plus ``model.safetensors`` or the shards that ``model.safetensors.index.json`` names.
The safetensors format is an 8-byte little-endian header length, a JSON header that maps each tensor name to its dtype,
shape and byte range, and the raw little-endian data. It is read here directly because numpy has no bfloat16 for the
safetensors package to return. Pickled weights are refused: unpickling runs code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from probe.errors import CheckpointError
from probe.store.dtypes import stored_dtype, widen

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "consolidated*.pth")

# The safetensors library refuses longer headers too: no real model comes near, a corrupt length field does.
MAX_HEADER_BYTES = 100_000_000

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Safetensors dtype names and what this package calls them."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: its file, dtype (numpy/torch spelling), shape and first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class Checkpoint:
    """Open a Hugging Face checkpoint directory and read its configuration and headers.

    Attributes: ``path``, ``config`` (config.json as a dict). No tensor data is read before :meth:`tensor`.
    Raises CheckpointError for a directory that is missing, incomplete, corrupt or holds only pickled weights.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().resolve()
        if not self.path.is_dir():
            raise CheckpointError(
                f"checkpoint {self.path} is not a directory",
                "give the local directory that holds config.json and the safetensors files; download hub models first",
            )
        self.config = _read_json(self.path / "config.json", "copy the model's config.json next to its weights")
        self._tensors = _read_tensors(self.path)

    @property
    def architecture(self) -> str:
        """Return the first entry of ``architectures`` in config.json, e.g. ``Qwen2ForCausalLM``."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(
                f"{self.path / 'config.json'} names no architecture", 'add e.g. "architectures": ["Qwen2ForCausalLM"]'
            )
        return names[0]

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._tensors)

    def dtype(self, name: str) -> str:
        """Return the stored dtype of a tensor, e.g. ``bfloat16``, which :meth:`tensor` may return widened."""
        return self._stored(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its data."""
        return self._stored(name).shape

    def entries(self, name: str) -> int:
        """Return the number of entries of a tensor without reading its data."""
        return math.prod(self._stored(name).shape)

    def tensor(self, name: str, entry: int | None = None) -> np.ndarray:
        """Read one tensor into memory, or only one ``entry`` of its first axis.

        bfloat16 and float8 are widened exactly to float32; every other dtype is returned as stored.
        Raises CheckpointError for an unknown name or a file shortened since it was opened.
        """
        shape = self._stored(name).shape
        if entry is not None:
            return self.rows(name, entry, entry + 1).reshape(shape[1:])
        return self.rows(name, 0, shape[0] if shape else 1).reshape(shape)

    def rows(self, name: str, first: int, stop: int) -> np.ndarray:
        """Read entries ``first .. stop`` of a tensor's first axis, converted as by :meth:`tensor`."""
        stored = self._stored(name)
        carrier = stored_dtype(stored.dtype).carrier.newbyteorder("<")
        shape = (max(stop - first, 0), *stored.shape[1:])
        count = math.prod(shape)
        start = stored.start + first * math.prod(shape[1:]) * carrier.itemsize
        data = np.fromfile(stored.file, carrier, count=count, offset=start)
        if data.size != count:
            raise CheckpointError(f"{stored.file} is truncated inside tensor {name!r}", "copy the file again")
        native = data.astype(carrier.newbyteorder("="), copy=False)
        return widen(native, stored.dtype).reshape(shape)

    def _stored(self, name: str) -> StoredTensor:
        """Look a tensor up by name."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"checkpoint {self.path} has no tensor {name!r}", "check its architecture") from None


def _read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Find the weight files of a directory and read their headers."""
    if (directory / SINGLE_FILE).is_file():
        return _read_header(directory / SINGLE_FILE)
    if (directory / INDEX_FILE).is_file():
        return _read_shards(directory)
    if any(file for pattern in PICKLE_PATTERNS for file in directory.glob(pattern)):
        raise CheckpointError(
            f"checkpoint {directory} holds only pickled weights, which run code when loaded",
            "convert it in a trusted environment with transformers' save_pretrained(..., safe_serialization=True)",
        )
    raise CheckpointError(
        f"checkpoint {directory} has neither {SINGLE_FILE} nor {INDEX_FILE}", "download the model's safetensors files"
    )


def _read_shards(directory: Path) -> dict[str, StoredTensor]:
    """Read the headers of every shard that the index names and keep the tensors it maps."""
    index = directory / INDEX_FILE
    mapping = _read_json(index, "download the index again").get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(file, str) for file in mapping.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to files", "download the index again")
    shards = {file: _read_header(_shard_path(directory, file)) for file in sorted(set(mapping.values()))}
    missing = sorted(name for name, file in mapping.items() if name not in shards[file])
    if missing:
        raise CheckpointError(
            f"{directory / mapping[missing[0]]} lacks tensor {missing[0]!r}, which {INDEX_FILE} places there",
            "download the shard and the index from the same revision",
        )
    return {name: shards[file][name] for name, file in mapping.items()}


def _shard_path(directory: Path, file: str) -> Path:
    """Return the path of a shard, which must be a plain file of the checkpoint directory."""
    path = directory / file
    if Path(file).name != file or not path.is_file():
        raise CheckpointError(f"{directory / INDEX_FILE} names {file!r}, which is not a file of {directory}")
    return path


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Read and check one safetensors header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _corrupt(file, f"the header length {length} does not fit a file of {size} bytes")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, "the header is not JSON") from error
    if not isinstance(header, dict):
        raise _corrupt(file, "the header is not a JSON object")
    begin = 8 + length
    return {name: _entry(file, name, entry, begin, size) for name, entry in header.items() if name != "__metadata__"}


def _entry(file: Path, name: str, entry: Any, begin: int, size: int) -> StoredTensor:
    """Check one header entry: known dtype, sane shape, a byte range inside the file and of the right length."""
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise _corrupt(file, f"the entry of tensor {name!r} lacks a shape or two data_offsets")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r} has the dtype {dtype!r}, which is not read",
            f"use a checkpoint stored as one of {', '.join(SAFETENSORS_DTYPES)}",
        )
    first, last = offsets
    expected = math.prod(shape) * stored_dtype(SAFETENSORS_DTYPES[dtype]).carrier.itemsize
    if last - first != expected or begin + last > size:
        raise _corrupt(file, f"tensor {name!r} of {expected} bytes claims bytes {first} to {last} of {size - begin}")
    return StoredTensor(file, SAFETENSORS_DTYPES[dtype], tuple(shape), begin + first)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    """Tell whether a JSON value is a list of non-negative integers."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _read_json(file: Path, fix: str) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}", fix) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error})", fix) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object", fix)
    return value


def _corrupt(file: Path, what: str) -> CheckpointError:
    """Build the error for a file that does not follow the safetensors format."""
    return CheckpointError(f"{file} is not a readable safetensors file: {what}", "download or save the file again")
