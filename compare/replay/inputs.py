"""Read the rows that a replay needs: chosen (sequence, position) of stored tensors, and which to choose."""

from __future__ import annotations

import math

import numpy as np
import xxhash

from probe.compare.align import RowTable, pack, read_table, split
from probe.compare.evidence import RowKeys
from probe.compare.merge import CanonicalReader
from probe.compare.names.base import RECOMPUTED, Source
from probe.compare.names.canonical import LOGITS
from probe.compare.replay.base import History, Unreplayable
from probe.compare.side import Side
from probe.errors import ProbeError
from probe.metrics import coarser_dtype

LOG_PROBS = "log-probs"
"""The label under which the engine's own log-probs are replayed, each at the position of the token that it scores."""

KEPT_TABLES = 8
"""Row tables that are kept sorted: the tensors of one layer share one or two."""


class StoredTensors:
    """The stored tensors of one side by canonical label; see :class:`probe.compare.replay.base.Tensors`.

    Of a row that was computed several times (a preempted request) the last call counts.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self._reader = CanonicalReader(side, keep=4)
        self._tables: dict[int, RowTable] = {}

    def has(self, label: str) -> bool:
        """Tell whether a tensor was stored."""
        return label in self.side.resolution.sources or (label == LOG_PROBS and len(self._scored()) > 0)

    def independent(self, label: str) -> bool:
        """Tell whether a module returned the tensor: what a rule recomputes says nothing about the engine."""
        return label == LOG_PROBS or self._source(label).operation not in RECOMPUTED

    def dtype(self, label: str) -> str:
        """Return the dtype that a tensor's values were computed in: the coarser of its own and the model's."""
        stored = self.side.dtype_of(self._source(LOGITS if label == LOG_PROBS else label))
        model = str(self.side.dump.manifest.get("dtype") or stored)
        try:
            return coarser_dtype(stored, model)
        except KeyError:
            return stored

    def features(self, label: str) -> int:
        """Return how many numbers a row of a tensor is made from, at most."""
        natives = self._source(LOGITS if label == LOG_PROBS else label).native
        return max(math.prod(self.side.dump.tensors[self.side.natives[native]].feature_shape) for native in natives)

    def rows(self, label: str, keys: RowKeys) -> np.ndarray:
        """Return float64 [n, features] at keys, NaN where a row was not stored."""
        if label == LOG_PROBS:
            return self._log_probs(keys)
        source = self._source(label)
        table = self._table(source)
        cells, at = table.cells, table.last
        wanted = pack(keys[:, 0], keys[:, 1])
        place = np.minimum(np.searchsorted(cells, wanted), max(len(cells) - 1, 0))
        found = cells[place] == wanted if len(cells) else np.zeros(len(keys), bool)
        values = self._values(label, source, at[place[found]])
        if found.all():
            return values
        result = np.full((len(keys), values.shape[1]), np.nan)
        result[found] = values
        return result

    def history(self, label: str, sequences: np.ndarray) -> History:
        """Return all rows of the given sequences in order of (sequence, position)."""
        source = self._source(label)
        table = self._table(source)
        sequence, position = split(table.cells)
        mine = np.isin(sequence, sequences)
        return History(self._values(label, source, table.last[mine]), sequence[mine], position[mine])

    def keys(self, label: str) -> RowKeys:
        """Return the (sequence, position) of every stored row of a tensor, sorted."""
        if label == LOG_PROBS:
            scored = self._scored()
            return np.stack([scored["sequence"], scored["position"]], 1).astype(np.int64)
        return np.stack(split(self._table(self._source(label)).cells), 1)

    def tokens(self, keys: RowKeys) -> np.ndarray:
        """Return the token ids at keys, -1 where not known."""
        result = np.full(len(keys), -1, np.int64)
        for sequence in np.unique(keys[:, 0]):
            ids, mine = self.side.dump.sequences[sequence].tokens, keys[:, 0] == sequence
            position = keys[mine, 1]
            inside = position < len(ids)
            result[np.flatnonzero(mine)[inside]] = ids[position[inside]]
        return result

    def _scored(self) -> np.ndarray:
        """Return the rows of the token table that have a log-prob of the engine."""
        tokens = self.side.dump.tokens
        return tokens[~np.isnan(tokens["logprob"]) & (tokens["position"] > 0)]

    def _log_probs(self, keys: RowKeys) -> np.ndarray:
        scored = self._scored()
        cells, wanted = pack(scored["sequence"], scored["position"]), pack(keys[:, 0], keys[:, 1])
        place = np.minimum(np.searchsorted(cells, wanted), max(len(cells) - 1, 0))
        found = cells[place] == wanted if len(cells) else np.zeros(len(keys), bool)
        return np.where(found, scored["logprob"][place] if len(cells) else np.nan, np.nan)[:, None]

    def _source(self, label: str) -> Source:
        source = self.side.resolution.sources.get(label)
        if source is None:
            raise Unreplayable(f"{label} was not stored")
        return source

    def _table(self, source: Source) -> RowTable:
        try:
            rows = self._reader.rows(source)
        except ProbeError as error:
            raise Unreplayable(str(error)) from error
        digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows).view(np.uint8).data)
        if digest not in self._tables:
            while len(self._tables) >= KEPT_TABLES:
                self._tables.pop(next(iter(self._tables)))
            self._tables[digest] = read_table(rows)
        return self._tables[digest]

    def _values(self, label: str, source: Source, at: np.ndarray) -> np.ndarray:
        try:
            return self._reader.read(source, at).astype(np.float64).reshape(len(at), -1)
        except ProbeError as error:
            raise Unreplayable(f"{label} cannot be read: {error}") from error


# -- which rows -------------------------------------------------------------------------------------------------------


def choose_keys(
    stored: RowKeys, prefer: RowKeys | None, prompt_lengths: np.ndarray, rows: int, sequences: int = 0
) -> RowKeys:
    """Return at most ``rows`` of the stored keys, sorted: the preferred ones, then a spread over all.

    The spread takes prompt and decode positions in turn, in the order of a hash of (sequence, position), so that both
    sides of a comparison and every run choose alike. ``sequences``: of at most so many sequences (0: any), the
    preferred ones' first.
    """
    if len(stored) <= rows and (not sequences or len(np.unique(stored[:, 0])) <= sequences):
        return stored
    cells = pack(stored[:, 0], stored[:, 1])
    wanted = np.zeros(0, np.int64) if prefer is None else pack(prefer[:, 0], prefer[:, 1])
    wanted = wanted[np.isin(wanted, cells)]
    if sequences:
        owners = np.concatenate([split(wanted)[0], _hashed(np.unique(stored[:, 0]))])
        first = owners[np.sort(np.unique(owners, return_index=True)[1])][:sequences]
        cells, wanted = (some[np.isin(split(some)[0], first)] for some in (cells, wanted))
    if len(cells) > rows:
        rest = _hashed(np.setdiff1d(cells, wanted))
        sequence, position = split(rest)
        decode = position >= prompt_lengths[sequence]
        turn = np.empty(len(rest), np.int64)
        for kind in (decode, ~decode):
            turn[kind] = np.arange(kind.sum())
        cells = np.sort(np.concatenate([wanted, rest[np.argsort(turn, kind="stable")]])[:rows])
    return np.stack(split(cells), 1)


def _hashed(cells: np.ndarray) -> np.ndarray:
    """Return integers in the order of their splitmix64 hash (Steele, Lea and Flood, 2014)."""
    z = cells.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return cells[np.argsort(z ^ (z >> np.uint64(31)), kind="stable")]
