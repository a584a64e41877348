"""What a trainer stored beside a dump's tensors for the PPO update: the tensors of the module ``rl``."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listing

import numpy as np

from probe.compare.align import NO_ROWS, RowAligner, last_of_equals, pack, read_table, split
from probe.compare.sequences import NUMBERED, SequencePair, join_sequences
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
    return {column: read_column(dump, column) for column in RL_COLUMNS if (RL, column) in dump.tensors}


def read_column(dump: Dump, column: str) -> Cells:
    """Return one column that a dump stores, as :func:`read_rl` does all."""
    info = dump.tensors[RL, column]
    if not info.has_rows or math.prod(info.feature_shape) != 1 or info.dtype not in MANTISSA_BITS:
        shape = [info.rows, *info.feature_shape]
        problem = f"{dump.path}: {RL}:{column} is {info.dtype} {shape}, not one float for each token"
        raise DumpError(problem, "store it as [tokens]")
    table = read_table(dump.rows(RL, column))
    values = dump.read(RL, column).reshape(-1).astype(np.float64)
    return (*split(table.cells), values[table.last])


MASK = "response_mask"
"""The slot of :data:`RL` that is 0 for tokens which no policy chose: what a tool returned between two turns."""


def mask_responses(dumps: Listing[Dump], update: Dump) -> None:
    """Take the tokens that the trainer's update masks out of the responses of other dumps of the same tokens."""
    if (RL, MASK) not in update.tensors:
        return
    cells = read_column(update, MASK)
    for dump in dumps:
        sequence, position, kept = _renumbered({MASK: cells}, dump, update)[MASK]
        masked = pack(sequence, position)[(kept == 0) & (sequence >= 0)]
        table = dump.tokens
        table["response"] &= ~np.isin(pack(table["sequence"], table["position"]), masked)


def rl_columns(
    dumps: Listing[Dump], aligner: RowAligner, tokens: np.ndarray, update: Dump | None = None
) -> dict[str, np.ndarray]:
    """Return the columns that the dumps (a, b) store for joined tokens, float64 [n] each, NaN where unknown.

    ``tokens``: their (pair, position), packed (:func:`probe.compare.align.pack`), ascending. Where both dumps know a
    value, b's counts: the trainer is side b. ``update``: a third dump, of the trainer's update, which counts before
    both.
    """
    found = [(side, read_rl(dump)) for side, dump in enumerate(dumps)]
    if update is not None:
        found.append((1, _renumbered(read_rl(update), dumps[1], update)))
    columns: dict[str, np.ndarray] = {}
    for side, cells in found:
        for column, (sequence, position, values) in cells.items():
            _, position, pair, rank = aligner.places(pack(sequence, position), side)
            keys = pack(pair, position)
            order = np.lexsort((rank, keys))
            order = order[last_of_equals(keys[order])]  # of several pieces of a trajectory the last counts
            known = order[np.isfinite(values[order]) & np.isin(keys[order], tokens)]
            into = columns.setdefault(column, np.full(len(tokens), np.nan))
            into[np.searchsorted(tokens, keys[known])] = values[known]
    return columns


def _renumbered(cells: dict[str, Cells], dump: Dump, other: Dump) -> dict[str, Cells]:
    """Return the cells of ``other`` by the sequences of ``dump``, as far as the tokens of both are the same.

    A sequence that ``dump`` holds in several pieces gets them in each. What another sample of a prompt got is nobody
    else's, however many tokens begin alike (:func:`_same`).
    """
    pairs = [pair for pair in join_sequences(dump, other).pairs if _same(pair, dump, other)]
    most = max((len(pair.pieces(0)) for pair in pairs), default=0)
    number, prefix = (np.full((most, len(other.sequences)), fill, np.int64) for fill in (-1, 0))
    for pair in pairs:
        for place, own in enumerate(pair.pieces(0)):
            held = min(pair.prefix, len(dump.sequences[own].tokens))
            for piece in pair.pieces(1):
                number[place, piece], prefix[place, piece] = own, held
    found = {}
    for column, (sequence, position, values) in cells.items():
        known = [np.flatnonzero(position < prefix[place][sequence]) for place in range(most)]
        owners = [NO_ROWS, *(number[place][sequence[at]] for place, at in enumerate(known))]
        at = np.concatenate([NO_ROWS, *known])
        found[column] = (np.concatenate(owners), position[at], values[at])
    return found


def _same(pair: SequencePair, dump: Dump, other: Dump) -> bool:
    """Tell whether two sequences are one: one continues the other, or they alone have the name that they share."""
    one, two = dump.sequences[pair.a], other.sequences[pair.b]
    if pair.prefix >= min(len(one.tokens), len(two.tokens)):
        return True
    if not one.uid or one.uid != two.uid or NUMBERED.fullmatch(one.uid):
        return False
    sides = ((dump, pair.pieces(0)), (other, pair.pieces(1)))
    return not any(s.uid == one.uid and s.index not in mine for side, mine in sides for s in side.sequences)
