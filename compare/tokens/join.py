"""Response tokens whose log-prob both dumps have, joined by sequence and position."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from probe.compare.align import NO_ROWS, RowAligner, RowTable, pack, split
from probe.compare.tokens.meaning import SOURCES, Sources
from probe.store.reader import Dump


@dataclass(frozen=True)
class JoinedTokens:
    """Response tokens whose log-prob both sides have: arrays [tokens], ``pair`` indexing the sequence pairs.

    ``lone`` counts for each side the tokens of both sides' sequences of which only it has a finite log-prob.
    ``owners``: for each side the number of the sequence in its dump, [tokens]. ``infinite``: for each side the tokens
    of both sides' sequences whose log-prob is infinite on it, as packed (pair, position) in order, and these values.
    ``lone_last``: for each side the sequences, equal until then, in which it has a log-prob past the other side's last.
    ``lacking``: [pairs], the tokens of which one side alone has a log-prob, but for such a last one.
    """

    pair: np.ndarray
    position: np.ndarray
    token: np.ndarray
    a: np.ndarray
    b: np.ndarray
    lone: tuple[int, int] = (0, 0)
    owners: tuple[np.ndarray, np.ndarray] = (NO_ROWS, NO_ROWS)
    infinite: tuple[tuple[np.ndarray, np.ndarray], ...] = ((NO_ROWS, NO_ROWS), (NO_ROWS, NO_ROWS))
    lone_last: tuple[int, int] = (0, 0)
    lacking: np.ndarray = field(default_factory=lambda: NO_ROWS)


def join_tokens(a: Dump, b: Dump, aligner: RowAligner, sources: Sources) -> JoinedTokens:
    """Join the two token tables by (sequence, position) within the common prefixes, response tokens only.

    A token of a later turn's prompt that an earlier piece of its trajectory generated is a response token. A log-prob
    that is NaN is one that the engine did not return (docs/format.md); an infinite one is known, and not compared.
    """
    tables = a.tokens, b.tokens
    columns = a.tokens[SOURCES[sources.a]], b.tokens[SOURCES[sources.b]]
    cells = [pack(table["sequence"], table["position"]) for table in tables]
    places = [aligner.places(side_cells, side) for side, side_cells in enumerate(cells)]
    keys = [pack(pair, position) for _, position, pair, _ in places]
    generated = np.unique(np.concatenate([key[table["response"]] for key, table in zip(keys, tables)]))
    rows, scored, infinite, ends = [], [], [], []
    for key, values, side_cells, (_, position, pair, _) in zip(keys, columns, cells, places):
        response = np.isin(key, generated)
        kept = np.flatnonzero(np.isfinite(values) & response)
        rows.append(RowTable(side_cells[kept], kept, NO_ROWS, NO_ROWS, 0))
        shared = (pair >= 0) & (position < aligner.prefix[pair]) if len(aligner.prefix) else np.zeros(len(pair), bool)
        scored.append(np.unique(key[kept[shared[kept]]]))
        ends.append(np.full(len(aligner.prefix), -1, np.int64))
        np.maximum.at(ends[-1], pair[kept[pair[kept] >= 0]], position[kept[pair[kept] >= 0]])
        broken = np.flatnonzero(np.isinf(values) & response & shared)
        found, at = np.unique(key[broken], return_index=True)
        infinite.append((found, values[broken[at]]))
    join = aligner.join_tables(*rows)
    known = [np.union1d(finite, found) for finite, (found, _) in zip(scored, infinite)]
    alone = [np.setdiff1d(scored[side], known[1 - side]) for side in (0, 1)]
    later = [(x > y) & (y >= 0) & (aligner.prefix > y) for x, y in (ends, ends[::-1])]
    counts = [np.bincount(split(keys)[0], minlength=len(aligner.prefix)) for keys in alone]
    lacking = np.sum([np.maximum(count - last, 0) for count, last in zip(counts, later)], axis=0)
    tokens = a.tokens["token"][join.index_a]
    scores = columns[0][join.index_a], columns[1][join.index_b]
    owners = split(join.cells_a)[0], split(join.cells_b)[0]
    lone, lone_last = (len(alone[0]), len(alone[1])), (int(later[0].sum()), int(later[1].sum()))
    joined = join.pair, join.position, tokens, *scores
    return JoinedTokens(*joined, lone, owners, tuple(infinite), lone_last, lacking)
