"""verl's ``gen_batch.dp``: a pickled DataProto, which is read without running what is in it wherever that is possible.

verl 0.9.1 pickles (batch, non_tensor_batch, meta_info); the batch is a torch archive of a consolidated TensorDict
(protocol.py ``DataProto.__getstate__``), or plain bytes with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy. Both are laid
out here from their bytes: neither verl nor torch is needed.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from probe.compare.tokens.read.names import FILE_COLUMNS, LOGITS, resolve
from probe.compare.tokens.read.npz import as_column
from probe.compare.tokens.read.table import MAX_CELLS, Logits, Ragged, RawFile
from probe.errors import TokensError, UsageError, first_line
from probe.store.dtypes import widen

DTYPES = {
    **{name: name for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")},
    "bfloat16": "uint16",
}
"""torch dtype -> the numpy dtype that holds its bits."""
META = {"temperature": "temperature", "top_p": "top_p", "global_steps": "step"}
"""What DataProto.meta_info may say of the whole batch -> the column that it is."""
_TEXT = frozenset(FILE_COLUMNS["uid"].names)
"""Names in DataProto.non_tensor_batch that are read: its other arrays hold objects."""


def read_verl_batch(path: Path, trust: bool) -> RawFile:
    """Read the columns of a pickled DataProto; raise UsageError unless ``trust``.

    What only a full unpickling can read (a class that is not verl's, torch's or numpy's own plain array) is unpickled
    in full, which may run code; ``notes`` say which of the two it was.
    """
    if not trust:
        raise UsageError(
            f"{path} is a Python pickle (a verl batch), and reading one can run any code that its writer put in",
            "add --trust if you wrote it or trust who did, or save the arrays as npz",
        )
    note = f"{path} is a pickle (--trust): only arrays were built from it, nothing in it was run"
    try:
        batch, extra, meta = _plain(path.read_bytes())
    except _Foreign as foreign:
        note = f"WARNING: {path} was unpickled in full (--trust; it names {foreign}): it could run any code here"
        batch, extra, meta = _unpickled(path)
    except Exception as error:  # a damaged pickle raises whatever its opcodes hit
        raise TokensError(f"{path} cannot be read as a verl batch ({first_line(error)})", "write it again") from None
    return _raw(path, batch, extra, meta, note)


def _raw(path: Path, batch: Mapping[str, Any], extra: Mapping[str, Any], meta: Mapping[str, Any], note: str) -> RawFile:
    known: dict[str, Any] = {META[name]: np.asarray(value) for name, value in meta.items() if _is_number(name, value)}
    known |= {name: np.array([str(v) for v in values]) for name, values in extra.items() if name in _TEXT}
    known |= batch
    columns: dict[str, Ragged | np.ndarray] = {}
    logits = None
    for column, name in resolve(known).found.items():
        value = known[name]
        if FILE_COLUMNS[column].lies == LOGITS:
            logits = _logits(value)
        elif isinstance(value, Ragged):
            columns[name] = value
        else:
            values = _bits(*value) if isinstance(value, tuple) else np.asarray(value)
            if values.size > MAX_CELLS:
                raise TokensError(f"{name} of {path} has {values.size} cells", f"at most {MAX_CELLS} can be read")
            columns[name] = as_column(values, f"{name} of {path}")
    return RawFile(path, "verl-batch", columns or dict.fromkeys(batch, np.zeros(0)), logits, (note,))


def _is_number(name: str, value: Any) -> bool:
    return name in META and isinstance(value, int | float) and not isinstance(value, bool)


def _bits(dtype: str, bits: np.ndarray) -> np.ndarray:
    """Return an array as numbers; ``bits`` may be in the numpy dtype that holds them (DTYPES)."""
    return widen(bits, dtype) if dtype == "bfloat16" and bits.dtype == np.uint16 else bits


def _logits(value: Any) -> Logits | None:
    dtype, bits = value if isinstance(value, tuple) else ("", np.zeros(0))
    if bits.ndim != 3 or bits.dtype.kind not in "fu":
        return None
    return Logits(bits.shape, dtype, lambda sequence, place: _bits(dtype, bits[sequence, place]).astype(np.float64))


# -- without running anything -----------------------------------------------------------------------------------------


class _Foreign(Exception):
    """A name in a pickle that is not among those which only build arrays."""


class _Proto:
    """In place of verl's DataProto: keeps the state that it was pickled with."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DType:
    """In place of numpy's dtype."""

    def __init__(self, text: str, *more: Any) -> None:
        self.text = text

    def __setstate__(self, state: Any) -> None:
        self.text = state[1].replace("|", "") + self.text

    def plain(self) -> np.dtype:
        """Return the dtype where it is one of numbers or text."""
        if not re.fullmatch(r"[<>]?[fiubSU]\d+", self.text):
            raise ValueError(f"an array of the type {self.text}")
        return np.dtype(self.text)


class _Array:
    """In place of numpy's array, whose memory a pickle could fill with pointers; ``values`` of objects is a list."""

    values: Any = ()

    def __init__(self, *arguments: Any) -> None:
        if arguments[1:] != ((0,), b"b"):  # what numpy writes before the state, which says all
            raise ValueError("an array built by hand")

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, _, data = state
        self.values = data if isinstance(data, list) else np.frombuffer(data, dtype.plain()).reshape(shape)


def _named(*arguments: Any) -> Any:
    """Stand for numpy's ndarray, which a pickle names as what to build (see _Array) and never calls."""
    raise ValueError("an array built by hand")


def _scalar(dtype: _DType, data: bytes) -> Any:
    return np.frombuffer(data, dtype.plain())[0].item()


def _tensor(storage: np.ndarray, offset: int, size: Any, stride: Any, *more: Any) -> np.ndarray:
    """Return a contiguous tensor of a storage (torch._utils._rebuild_tensor_v2)."""
    return storage[offset : offset + int(np.prod(size))].reshape(tuple(size))


def _consolidated(metadata: dict[str, Any], storage: np.ndarray) -> dict[str, Any]:
    """Return the tensors of a consolidated TensorDict: name -> (dtype, bits), or Ragged where it is jagged."""
    found: dict[str, Any] = {}
    for name, (dtype, shape, start, stop, _) in metadata["leaves"].items():
        kind = dtype.removeprefix("torch.")
        bits = storage[start:stop].view(DTYPES[kind])[: int(np.prod(shape))].reshape(shape)
        found[name] = kind, bits
    for name in [n for n in found if n.startswith("<NJT_OFFSETS>")]:
        bare = name.removeprefix("<NJT_OFFSETS>")
        values, offsets = found.pop(f"<NJT_VALUES>{bare}"), found.pop(name)[1]
        if f"<NJT_LENGTHS>{bare}" not in found and values[1].ndim == 1:
            found[bare] = Ragged(_bits(*values), np.diff(offsets).astype(np.int64))
    return {name: value for name, value in found.items() if not name.startswith("<NJT")}


PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("verl.protocol", "DataProto"): _Proto,
    ("numpy", "ndarray"): _named,
    ("numpy", "dtype"): _DType,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch", "ByteStorage"): np.uint8,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"): _consolidated,
}
"""All that a verl batch of arrays names, and what is built in its place."""


class _Reader(pickle.Unpickler):
    """Build what PLAIN lists, nothing else; storages come from a torch archive where there is one."""

    def __init__(self, data: bytes, archive: zipfile.ZipFile | None = None) -> None:
        super().__init__(io.BytesIO(data))
        self._archive = archive

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PLAIN:
            raise _Foreign(f"{module}.{name}")
        return PLAIN[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, dtype, key, _, size = pid
        if self._archive is None or dtype is not np.uint8:
            raise _Foreign("a storage that is not bytes")
        folder = self._archive.namelist()[0].partition("/")[0]
        if self._archive.getinfo(f"{folder}/data/{key}").file_size != size:
            raise ValueError("a storage is cut short")
        return np.frombuffer(self._archive.read(f"{folder}/data/{key}"), np.uint8)


def _plain(data: bytes) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Return (batch, non_tensor_batch, meta_info) of a pickled DataProto; raise _Foreign for what is no plain array."""
    proto = _Reader(data).load()
    if not isinstance(proto, _Proto) or len(proto.state) != 3:
        raise ValueError("it is not a DataProto")
    batch, extra, meta = proto.state
    if isinstance(batch, bytes):
        with zipfile.ZipFile(io.BytesIO(batch)) as archive:
            folder = archive.namelist()[0].partition("/")[0]
            batch = _Reader(archive.read(f"{folder}/data.pkl"), archive).load()
    elif batch is not None:
        batch = {name: _encoded(value) for name, value in batch[2].items()}
    arrays = {name: value.values for name, value in (extra or {}).items() if isinstance(value, _Array)}
    return batch or {}, arrays, meta or {}


def _encoded(value: Any) -> Any:
    """Return a tensor that was pickled as (dtype, shape, bytes), or a jagged one, (layout, those of its rows)."""
    if len(value) == 3:
        dtype, shape, data = value
        content = data.values.tobytes() if isinstance(data, _Array) else bytes(data)
        return dtype, np.frombuffer(content, DTYPES[dtype]).reshape(shape)
    rows = [_bits(*_encoded(row)) for row in value[1]]
    return Ragged(np.concatenate(rows), np.array([len(row) for row in rows], np.int64))


# -- in full ----------------------------------------------------------------------------------------------------------


def _unpickled(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    try:
        with path.open("rb") as stream:
            proto = pickle.load(stream)
        tensors = dict(proto.batch.items()) if proto.batch is not None else {}
        batch = {name: _bits_of(tensor) for name, tensor in tensors.items()}
        return batch, dict(proto.non_tensor_batch), dict(proto.meta_info)
    except ImportError as error:
        raise TokensError(f"{path} needs the package {error.name} to be read", f"install {error.name}") from None
    except Exception as error:  # unpickling may raise anything
        raise TokensError(f"{path} cannot be read as a verl batch ({first_line(error)})", "write it again") from None


def _numbers(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return np.asarray((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy())


def _bits_of(tensor: Any) -> tuple[str, np.ndarray] | Ragged:
    if tensor.is_nested:
        rows = [_numbers(row) for row in tensor.unbind()]
        return Ragged(np.concatenate(rows), np.array([len(row) for row in rows], np.int64))
    return str(tensor.dtype).removeprefix("torch."), _numbers(tensor)
