"""One list of sequences out of the files of a dump.

The process that ran the prompts knows their identity and log-probs; the worker that ran the model knows rows by the
engine's request id, to which vLLM appends a random suffix. Both tables describe the same sequences.
"""

from __future__ import annotations

import numpy as np

from probe.errors import DumpError
from probe.store.schema import Sequence
from probe.store.validate import DAMAGED, text_of


def sequences_of(table: np.ndarray, tokens: np.ndarray, where: str) -> list[Sequence]:
    """Return the sequences of one file with the ids that its token table lists (in any order).

    Raises DumpError about the file ``where`` unless sequences are numbered 0, 1, ... and the token table holds each
    sequence's positions 0, 1, ... once.
    """
    if not np.array_equal(np.sort(table["id"]), np.arange(len(table))):
        raise DumpError(f"{where}:/sequences does not number its sequences 0 to {len(table) - 1}", DAMAGED)
    if len(table) and min(table["prompt_len"].min(), table["length"].min()) < 0:
        raise DumpError(f"{where}:/sequences holds a negative length", DAMAGED)
    tokens = tokens[np.lexsort((tokens["position"], tokens["sequence"]))]
    numbers, starts, counts = np.unique(tokens["sequence"], return_index=True, return_counts=True)
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < len(table):
        raise DumpError(f"{where}:/tokens names a sequence that the file does not list", DAMAGED)
    if not np.array_equal(tokens["position"], np.arange(len(tokens)) - np.repeat(starts, counts)):
        raise DumpError(f"{where}:/tokens does not hold the positions 0, 1, ... of each sequence once", DAMAGED)
    chunks = np.split(tokens["token"].astype(np.int64), starts[1:])
    ids = {int(number): chunk for number, chunk in zip(numbers, chunks)}
    return [_sequence(record, ids) for record in table]


def _sequence(record: np.void, ids: dict[int, np.ndarray]) -> Sequence:
    text = {name: text_of(record[name]) for name in ("uid", "request_id", "trajectory")}
    number = int(record["id"])
    return Sequence(
        index=number,
        **text,
        sample=int(record["sample"]),
        prompt_len=int(record["prompt_len"]),
        length=int(record["length"]),
        tokens=ids.get(number, np.zeros(0, np.int64)),
        weight_version=int(record["weight_version"]),
    )


def merge_sequences(files: list[list[Sequence]]) -> tuple[list[Sequence], list[np.ndarray]]:
    """Merge the lists of several files; return them with, per file, the map from its numbers to the merged ones.

    Files that know token ids come first. Two entries are one sequence when their request ids agree (with or without the
    engine's suffix) or, where there is no request id, their uids.
    """
    merged: list[Sequence] = []
    by_key: dict[str, int] = {}
    maps = [np.full(max((s.index for s in sequences), default=-1) + 1, -1, np.int32) for sequences in files]
    known_first = sorted(range(len(files)), key=lambda i: -sum(len(s.tokens) for s in files[i]))
    for number in known_first:
        for sequence in files[number]:
            keys = _keys(sequence)
            found = next((by_key[key] for key in keys if key in by_key), None)
            if found is None:
                found = len(merged)
                merged.append(Sequence(**{**vars(sequence), "index": found}))
                by_key[keys[0]] = found
            merged[found].length = max(merged[found].length, sequence.length)
            maps[number][sequence.index] = found
    return merged, maps


def _keys(sequence: Sequence) -> list[str]:
    if not sequence.request_id:
        return [f"uid:{sequence.uid}"]
    stem, _, suffix = sequence.request_id.rpartition("-")
    return [f"request:{sequence.request_id}"] + ([f"request:{stem}"] if stem and suffix else [])
