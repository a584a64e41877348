"""Rows of tokens that other expert-parallel ranks gave to an expert: which tokens they are, the other ranks' files say.

No hook may ask another rank, so an expert's rank writes "token c that rank r gave in call n", and every rank numbers
its own tokens of each call (:data:`probe.store.schema.CELLS`). Reading the files together joins the two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from probe.errors import DumpError
from probe.store.schema import FOREIGN, PARTIAL_SUFFIX
from probe.store.shards import Plan
from probe.store.validate import DAMAGED

NOBODY, LOST = -2, -3
"""``sequence`` of a resolved row that is no stored token of its rank, and of one that only a lost file could name."""
_RANK = re.compile(r"rank(\d{1,9})\.h5")


class Peers:
    """The tokens of each rank of a dump by their number in a call; ``files`` are all those of the dump.

    ``allowed``: whether the dump says that it has expert parallelism; else no row may be of another rank's token.
    """

    def __init__(self, files: Sequence[Path], allowed: bool) -> None:
        self.allowed = allowed
        self._file_of: dict[int, Path] = {}
        for file in files:
            if (found := _RANK.match(file.name)) is not None:
                self._file_of.setdefault(int(found[1]), file)
        self._tokens: dict[Path, tuple[np.ndarray, np.ndarray]] = {}
        self._missing: set[int] = set()

    def add(self, file: Path, cells: np.ndarray, rows: np.ndarray) -> None:
        """Take note of a rank's tokens: their numbers [n] or [n, 1] and their rows, numbered as in the whole dump."""
        where = f"{file}:/index moe:cells"
        if cells.dtype != np.int32 or cells.size != len(rows) or (cells < 0).any() or (rows["sequence"] < 0).any():
            raise DumpError(f"{where} does not number tokens", DAMAGED)
        keys = _keys(rows["call"], cells.reshape(-1))
        order = np.argsort(keys)
        if (np.diff(keys[order]) == 0).any():
            raise DumpError(f"{where} gives one number to two tokens of a call", DAMAGED)
        self._tokens[file] = keys[order], rows[order]

    def resolve(self, rows: np.ndarray, where: str) -> np.ndarray:
        """Return rows whose tokens are all of this dump: those of other ranks with their own sequence and position.

        What cannot be is NOBODY's or LOST. A token that several ranks gave (each ran the same sequence) counts once.
        Raises DumpError for rows of other ranks in a dump without expert parallelism.
        """
        foreign = rows["sequence"] <= FOREIGN
        if not foreign.any():
            return rows
        if not self.allowed:
            raise DumpError(f"{where} holds rows of other ranks' tokens without expert parallelism", DAMAGED)
        result = rows.copy()
        for number in np.unique(rows["sequence"][foreign]):
            mine = np.flatnonzero(rows["sequence"] == number)
            result[mine] = self._named(FOREIGN - int(number), rows[mine])
        result["sequence"][foreign & (result["sequence"] >= 0) & _repeats(result, foreign)] = NOBODY
        return result

    def _named(self, rank: int, rows: np.ndarray) -> np.ndarray:
        result = rows.copy()
        file = self._file_of.get(rank)
        if file is None:
            self._missing.add(rank)
            result["sequence"] = LOST
            return result
        wanted = _keys(rows["call"], rows["position"])
        keys, tokens = self._tokens.get(file, (np.zeros(0, np.int64), rows[:0]))
        at = np.searchsorted(keys, wanted)
        known = at < len(keys)
        known[known] = keys[at[known]] == wanted[known]
        result["sequence"] = NOBODY
        if file.name.endswith(PARTIAL_SUFFIX):  # calls that it had not flushed
            result["sequence"][~np.isin(rows["call"], tokens["call"])] = LOST
        result[known] = tokens[at[known]]
        return result

    def without_strangers(self, found: Plan) -> Plan:
        """Return a plan without the rows that are no known token, the LOST ones counted as left out."""
        sequence = found.rows["sequence"]
        keep = sequence > FOREIGN
        if keep.all():
            return found
        lost = int((sequence == LOST).sum())
        final = np.cumsum(keep) - 1
        copies = []
        for copy in found.copies:
            kept = keep[copy.at]
            copies.append(replace(copy, take=[take[kept] for take in copy.take], at=final[copy.at[kept]]))
        takes: list[np.ndarray | None] = [np.flatnonzero(keep) if take is None else take[keep] for take in found.take]
        reason = found.lacking or (self._reason() if lost else "")
        shards = found.shards if keep.any() or not lost else []
        return Plan(shards, takes, found.rows[keep], copies, found.left_out + lost, reason)

    def _reason(self) -> str:
        lost = f"the file of rank {min(self._missing)} is missing" if self._missing else "a rank's file is unfinished"
        return f"which tokens of other expert-parallel ranks they are is in no file: {lost}"


def _repeats(rows: np.ndarray, foreign: np.ndarray) -> np.ndarray:
    """Tell which rows are of the same token and call as another one, of which the rank's own comes first."""
    identity = [rows[name] for name in ("call", "position", "sequence")]
    order = np.lexsort((foreign, *identity))
    repeats = np.zeros(len(rows), bool)
    repeats[order[1:]] = np.all([np.diff(column[order]) == 0 for column in identity], axis=0)
    return repeats


def _keys(call: np.ndarray, cell: np.ndarray) -> np.ndarray:
    return call.astype(np.int64) << 32 | cell.astype(np.int64)
