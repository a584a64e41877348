"""Log-probs that a dump does not bring along, or that count padding, from the logits that it does bring."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from probe.compare.names.canonical import LOGITS
from probe.compare.side import Side
from probe.metrics import BLOCK_VALUES, logprobs_from_logits
from probe.store.reader import Dump
from probe.store.schema import TOKEN


def complete_logprobs(side: Side) -> None:
    """Fill in a side's token table what its logits say, so that both sides' log-probs mean the same.

    Sequences that no process listed (ranks of a user's script, a killed run) are added with the ids of their rows.
    Where the dump summed over padding of the vocabulary, its log-probs are recomputed within what both sides share.
    """
    dump, source = side.dump, side.resolution.sources.get(LOGITS)
    added = _add_sequences(dump)
    stated = int((dump.manifest.get("layout") or {}).get("vocab_size") or 0)
    wanted = set(range(len(dump.sequences))) if stated > side.shape.vocab else added
    if source is None or not wanted:
        return
    held = dump.tensors[side.natives[source.native[0]]]
    if held.reduced or not held.rows:
        return
    vocab = side.shape.vocab or None
    bounds = np.searchsorted(dump.tokens["sequence"], np.arange(len(dump.sequences) + 1))
    spans = [slice(int(start), int(stop)) for start, stop in pairwise(bounds)]
    for values, rows in dump.iter_blocks(*side.natives[source.native[0]]):
        for number in wanted & set(np.unique(rows["sequence"]).tolist()):
            mine = dump.tokens[spans[number]]  # a view: what is assigned below lands in the table
            here = np.nonzero((rows["sequence"] == number) & (rows["position"] < len(mine) - 1))[0]
            step = max(1, BLOCK_VALUES // max(1, values.shape[1]))
            for at in (here[start : start + step] for start in range(0, len(here), step)):
                scored = rows["position"][at] + 1
                logits = values[at][:, :vocab]
                mine["logprob_recomputed"][scored] = logprobs_from_logits(logits, mine["token"][scored])


def _add_sequences(dump: Dump) -> set[int]:
    """Add the sequences without token rows to the token table and return their numbers."""
    listed = set(np.unique(dump.tokens["sequence"]).tolist())
    added = [sequence for sequence in dump.sequences if sequence.index not in listed and len(sequence.tokens)]
    tables = [dump.tokens]
    for sequence in added:
        rows = np.zeros(len(sequence.tokens), TOKEN)
        rows["sequence"], rows["position"] = sequence.index, np.arange(len(rows))
        rows["token"], rows["response"] = sequence.tokens, rows["position"] >= sequence.prompt_len
        rows["logprob"] = rows["logprob_recomputed"] = np.nan
        tables.append(rows)
    if added:
        table = np.concatenate(tables)
        dump.tokens = table[np.lexsort((table["position"], table["sequence"]))]
    return {sequence.index for sequence in added}
