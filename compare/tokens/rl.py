"""What a trainer stored beside a dump's tensors for the PPO update: the tensors of the module ``rl``."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listing

import numpy as np

from probe.compare.align import RowAligner, last_of_equals, pack, read_table, split
from probe.errors import DumpError
from probe.metrics import MANTISSA_BITS
from probe.store.reader import Dump
from probe.store.schema import RL, RL_COLUMNS

Cells = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(sequence number in the dump, position in the whole sequence, value), int64, int64 and float64 [n]."""


def read_rl(dump: Dump) -> dict[str, Cells]:
    """Return the columns (names: RL_COLUMNS) that a dump stores, sorted by (sequence, position), each token once.

    Of a token that was stored twice the last call counts. Raises DumpError where a tensor has not one float per token.
    """
    found = {}
    for column in RL_COLUMNS:
        if (RL, column) not in dump.tensors:
            continue
        info = dump.tensors[RL, column]
        if not info.has_rows or math.prod(info.feature_shape) != 1 or info.dtype not in MANTISSA_BITS:
            shape = [info.rows, *info.feature_shape]
            problem = f"{dump.path}: {RL}:{column} is {info.dtype} {shape}, not one float for each token"
            raise DumpError(problem, "store it as [tokens]")
        table = read_table(dump.rows(RL, column))
        values = dump.read(RL, column).reshape(-1).astype(np.float64)
        found[column] = (*split(table.cells), values[table.last])
    return found


def rl_columns(dumps: Listing[Dump], aligner: RowAligner, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns that either dump (a, b) stores for joined tokens, float64 [n] each, NaN where unknown.

    ``tokens``: their (pair, position), packed (:func:`probe.compare.align.pack`), ascending. Where both dumps know a
    value, b's counts: the trainer is side b.
    """
    columns: dict[str, np.ndarray] = {}
    for side, dump in enumerate(dumps):
        for column, (sequence, position, values) in read_rl(dump).items():
            _, position, pair, rank = aligner.places(pack(sequence, position), side)
            keys = pack(pair, position)
            order = np.lexsort((rank, keys))
            order = order[last_of_equals(keys[order])]  # of several pieces of a trajectory the last counts
            known = order[np.isfinite(values[order]) & np.isin(keys[order], tokens)]
            into = columns.setdefault(column, np.full(len(tokens), np.nan))
            into[np.searchsorted(tokens, keys[known])] = values[known]
    return columns
