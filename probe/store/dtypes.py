"""How each tensor dtype is held in numpy and in HDF5.

bfloat16 is stored bit for bit in HDF5's own bfloat16 layout: a custom IEEE-like float type that HDF5 2.0 considers
equal to its native one. HDF5's conversions are avoided in both directions (they are slow and drop NaN payloads), so
data is always read and written with the file's own type. fp8 and fp4 are bytes whose dtype the index records.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import h5py
import numpy as np
from h5py import h5t

from probe.errors import DumpError


@dataclass(frozen=True)
class StoredDtype:
    """One tensor dtype: its name in the index, its numpy carrier and whether the carrier holds raw bits."""

    name: str
    carrier: np.dtype
    raw_bits: bool = False


_PLAIN = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
DTYPES: dict[str, StoredDtype] = {name: StoredDtype(name, np.dtype(name)) for name in _PLAIN} | {
    "bool": StoredDtype("bool", np.dtype("uint8")),
    "bfloat16": StoredDtype("bfloat16", np.dtype("uint16"), raw_bits=True),
    "float8_e4m3fn": StoredDtype("float8_e4m3fn", np.dtype("uint8"), raw_bits=True),
    "float8_e5m2": StoredDtype("float8_e5m2", np.dtype("uint8"), raw_bits=True),
    "float4_e2m1fn_x2": StoredDtype("float4_e2m1fn_x2", np.dtype("uint8"), raw_bits=True),
}


def stored_dtype(name: str) -> StoredDtype:
    """Return the storage of the dtype ``name`` (numpy/torch spelling without ``torch.``)."""
    try:
        return DTYPES[name]
    except KeyError:
        raise DumpError(f"tensor dtype {name!r} is not one this version can store", "update probe") from None


@cache
def bfloat16_type() -> h5t.TypeID:
    """Return the HDF5 float type with bfloat16's fields: sign 15, exponent 7..14 (bias 127), mantissa 0..6."""
    tid = h5t.IEEE_F32LE.copy()
    tid.set_fields(15, 7, 8, 0, 7)
    tid.set_size(2)
    tid.set_precision(16)
    tid.set_ebias(127)
    return tid


@cache
def file_type(name: str) -> h5t.TypeID:
    """Return the HDF5 type under which tensors of dtype ``name`` are stored."""
    dtype = stored_dtype(name)
    return bfloat16_type() if name == "bfloat16" else h5t.py_create(dtype.carrier)


def type_matches(tid: h5t.TypeID, name: str) -> bool:
    """Tell whether a dataset's type is the one that dtype ``name`` is stored under."""
    return bool(tid.equal(file_type(name)))


def widen(array: np.ndarray, name: str) -> np.ndarray:
    """Return stored bits as numbers, exactly: bf16 and fp8 become float32, other dtypes stay as they are."""
    if name == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if name.startswith("float8"):
        return _float8_values(name)[array]
    if name == "bool":
        return array.astype(bool)
    return array


@cache
def _float8_values(name: str) -> np.ndarray:
    """Return the 256 float32 values of an OCP 8-bit float (OFP8 specification, revision 1.0)."""
    exponent_bits, bias = (4, 7) if name == "float8_e4m3fn" else (5, 15)
    mantissa_bits = 7 - exponent_bits
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1.0 + fraction) * np.exp2(exponent.astype(np.float64) - bias)
    value = np.where(exponent == 0, fraction * np.exp2(1.0 - bias), normal)
    if name == "float8_e4m3fn":
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    else:
        top = exponent == (1 << exponent_bits) - 1
        value = np.where(top, np.where(fraction == 0, np.inf, np.nan), value)
    return (sign * value).astype(np.float32)


def round_to(values: np.ndarray, name: str) -> np.ndarray:
    """Return float values rounded to nearest even in dtype ``name``, carried as float32 (or float64 for float64)."""
    if name == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isfinite(values), rounded.view(np.float32), values).astype(np.float32)
    if name == "float16":
        return np.asarray(values, np.float16).astype(np.float32)
    if name.startswith("float8"):
        return _round_float8(np.asarray(values, np.float64), name)
    return np.asarray(values, np.float64 if name == "float64" else np.float32)


def truncate_to(values: np.ndarray, name: str) -> np.ndarray:
    """Return float64 values rounded toward zero in dtype ``name``, bfloat16 or float16, as float64.

    So round kernels that cut the low bits of a float32 off. NaN and infinities stay.
    """
    nearest = round_to(values, name)
    beyond = np.isfinite(values) & (np.abs(nearest.astype(np.float64)) > np.abs(values))
    if name == "bfloat16":
        cut = (nearest.view(np.uint32) - (beyond.astype(np.uint32) << 16)).view(np.float32)
    else:
        cut = np.where(beyond, np.nextafter(nearest.astype(np.float16), np.float16(0)), nearest)
    return cut.astype(np.float64)


def _round_float8(values: np.ndarray, name: str) -> np.ndarray:
    """Round to an 8-bit float; beyond its largest number values saturate, as engines cast weights."""
    grid = _float8_values(name)[:128].astype(np.float64)
    grid = grid[np.isfinite(grid)]  # entry n is the n-th non-negative number, so that even entries are even
    size = np.minimum(np.abs(values), grid[-1])
    upper = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    middle = (grid[upper - 1] + grid[upper]) / 2
    above = (size > middle) | ((size == middle) & (upper % 2 == 0))
    rounded = np.copysign(np.where(above, grid[upper], grid[upper - 1]), values)
    return np.where(np.isnan(values), values, rounded).astype(np.float32)


def narrow(values: np.ndarray, name: str) -> np.ndarray:
    """Return numbers that dtype ``name`` can hold exactly as its stored bits; :func:`widen` undoes it.

    Raises DumpError for 8- and 4-bit floats, in which no engine sums.
    """
    if name == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if stored_dtype(name).raw_bits:
        raise DumpError(f"numbers cannot be turned back into {name}", "dump this tensor in a wider dtype")
    return np.asarray(values, stored_dtype(name).carrier)


TEXT = h5py.string_dtype("utf-8")
