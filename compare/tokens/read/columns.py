"""Advantages and what else the PPO update needs, from a file or dump of its own, joined to the tokens of a batch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from probe.compare.align import pack
from probe.compare.report.model import counted
from probe.compare.tokens.batch import COLUMNS, TokenBatch
from probe.compare.tokens.read.assemble import cells_of, labels_of
from probe.compare.tokens.read.pair import identities, pair_tables, shared_names
from probe.compare.tokens.read.table import Table
from probe.errors import TokensError

_NUMBERED = re.compile(r"(step \d+ )?s\d+")
"""Labels that sequences get for want of a uid; in a dump, uids that only number its sequences look alike."""


def add_columns(table: Table, batch: TokenBatch) -> None:
    """Set ``batch.columns`` to what a table has of COLUMNS; NaN where it lacks a token of the batch.

    Sequences join by token ids, else by uid, else by their order. Raises TokensError where the table has none of the
    columns, CompareError where its sequences are others.
    """
    found = [column for column in COLUMNS if column in table.cells]
    if not found:
        raise TokensError(
            f"{table.path} holds none of {', '.join(COLUMNS)}", "name its columns so, or store tensors of the module rl"
        )
    if not len(batch):
        batch.notes.append(f"no token was compared: nothing of {table.path} was joined")
        return
    own, other = _named_alike(batch, table)
    _fit(own, other, batch)
    pairs = pair_tables(own, other)
    pair = np.full(len(batch.labels), -1, np.int64)
    pair[pairs.rows[0]] = np.arange(len(pairs.prefix))
    owner = pair[batch.sequence]
    if table.per_row:
        known, at = owner >= 0, pairs.rows[1][owner[owner >= 0]]
    else:
        cells = cells_of(other, pairs, 1)
        wanted = pack(owner, batch.position + pairs.before[0][owner])
        known = (owner >= 0) & np.isin(wanted, cells.key)
        at = cells.at[np.searchsorted(cells.key, wanted[known])]
    if not known.any():
        raise TokensError(f"{table.path} holds none of the compared tokens", "give those of the same responses")
    for column in found:
        values = np.full(len(batch), np.nan)
        values[known] = table.cells[column][at]
        batch.columns[column] = values
    batch.notes += [note for note in (*table.notes, *pairs.notes, *pairs.left_out) if note not in batch.notes]
    if not known.all():
        batch.notes.append(f"{table.path} lacks {counted(int((~known).sum()), 'token')} of {len(batch)}")


def _named_alike(batch: TokenBatch, table: Table) -> tuple[Table, Table]:
    """Return the sequences of a batch as a table, and the other one, both named in one way."""
    own, other = _as_table(batch), replace(table, mask=None)
    if batch.uids is not None:
        own.uid, own.sample = batch.uids, batch.samples
        own.step = batch.step if (batch.step >= 0).all() else None
        return own, other
    found = identities(table)
    distinct = table.sample is not None or len({name[:2] for name in found}) == len(found)
    if not any(_NUMBERED.fullmatch(label) for label in batch.labels):
        own.uid = list(batch.labels)
    other.uid = labels_of(table, np.arange(len(table))) if table.uid and distinct else None
    other.sample = other.step = None
    return own, other


def _as_table(batch: TokenBatch) -> Table:
    """Return the sequences of a batch, without names; as long as their ids, or as far as they were compared."""
    responses = [ids[start:] for ids, start in zip(batch.ids, batch.start)]
    known = any(map(len, responses))
    reach = np.zeros(len(batch.labels), np.int64)
    np.maximum.at(reach, batch.sequence, batch.position + 1)
    return Table(
        path=Path(batch.origins[0].path),
        kind="batch",
        width=np.array([len(ids) for ids in responses], np.int64) if known else reach,
        cells={},
        names={},
        token=np.concatenate(responses) if known else None,
        prompts=[ids[:start] for ids, start in zip(batch.ids, batch.start)],
        whole=bool(known and batch.start.any()),
    )


def _fit(own: Table, other: Table, batch: TokenBatch) -> None:
    """Make a batch as wide as a table whose rows cover its tokens in order, where no token ids can join the two."""
    reach = np.zeros(len(own), np.int64)
    np.maximum.at(reach, batch.sequence, batch.position + 1)
    by_tokens = own.token is not None and other.token is not None
    names = shared_names(own, other)
    if by_tokens or names[0] != names[1]:
        return
    if other.per_row or (reach <= (other.width if other.lengths is None else other.lengths)).all():
        own.lengths = None if other.per_row else own.width
        own.width = other.width
