"""Row checksums: what a rank stores of a tensor that another stores in full, to show later that both were equal."""

from __future__ import annotations

import math

import numpy as np
import xxhash


def row_checksums(array: np.ndarray) -> np.ndarray:
    """Return the xxh3_64 hash of each row's stored bytes.

    ``array`` is [rows, *features] in the carrier of its dtype (:mod:`probe.store.dtypes`); the result is uint64 [rows].
    """
    width = math.prod(array.shape[1:]) * array.dtype.itemsize
    rows = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), width)
    return np.fromiter((xxhash.xxh3_64_intdigest(row.data) for row in rows), np.uint64, len(rows))
