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
from probe.compare.tokens.read.pair import pair_tables
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
    rows = np.arange(len(table))
    named = replace(table, uid=labels_of(table, rows) if table.uid else None, sample=None, step=None, mask=None)
    own = _as_table(batch, table)
    pairs = pair_tables(own, named)
    cells = cells_of(named, pairs, 1)
    pair = np.full(len(batch.labels), -1, np.int64)
    pair[pairs.rows[0]] = np.arange(len(pairs.prefix))
    owner = pair[batch.sequence]
    wanted = pack(owner, batch.position + pairs.before[0][owner])
    known = (owner >= 0) & np.isin(wanted, cells.key)
    if not known.any():
        raise TokensError(f"{table.path} holds none of the compared tokens", "give those of the same responses")
    at = cells.at[np.searchsorted(cells.key, wanted[known])]
    for column in found:
        values = np.full(len(batch), np.nan)
        values[known] = table.cells[column][at]
        batch.columns[column] = values
    batch.notes += [note for note in (*table.notes, *pairs.notes) if note not in batch.notes]
    if not known.all():
        batch.notes.append(f"{table.path} lacks {counted(int((~known).sum()), 'token')} of {len(batch)}")


def _as_table(batch: TokenBatch, table: Table) -> Table:
    """Return the sequences of a batch as a table that can be paired with another one."""
    responses = [ids[start:] for ids, start in zip(batch.ids, batch.start)]
    named = batch.named or not any(_NUMBERED.fullmatch(label) for label in batch.labels)
    known = any(map(len, responses))
    own = Table(
        path=Path(batch.origins[0].path),
        kind="batch",
        width=np.array([len(ids) for ids in responses], np.int64),
        cells={},
        names={},
        token=np.concatenate(responses) if known else None,
        prompts=[ids[:start] for ids, start in zip(batch.ids, batch.start)],
        whole=bool(known and batch.start.any()),
        uid=list(batch.labels) if named else None,
    )
    reach = np.zeros(len(batch.labels), np.int64)
    np.maximum.at(reach, batch.sequence, batch.position + 1)
    room = table.width if table.lengths is None else table.lengths
    if not (known and table.token is not None) and len(own) == len(table) and (reach <= room).all():
        own.width = table.width  # as wide, padding and all: where no uid joins them, their order does
    return own
