"""One list of sequences out of the files of a dump.

The process that ran the prompts knows their identity and log-probs; the worker that ran the model knows rows by the
engine's request id, to which vLLM appends a random suffix. Both tables describe the same sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from probe.errors import DumpError
from probe.store.parts import Part
from probe.store.places import Place
from probe.store.schema import Sequence, Versions
from probe.store.validate import DAMAGED, text_of


def sequences_of(tables: Mapping[str, np.ndarray], where: str) -> list[Sequence]:
    """Return the sequences of one file with the ids that its token table lists (in any order).

    ``tables``: those of the file by name. Raises DumpError about the file ``where`` unless sequences are numbered 0, 1,
    ... and the token table holds each sequence's positions 0, 1, ... once.
    """
    table, tokens = tables["sequences"], tables["tokens"]
    if not np.array_equal(np.sort(table["id"]), np.arange(len(table))):
        raise DumpError(f"{where}:/sequences does not number its sequences 0 to {len(table) - 1}", DAMAGED)
    if len(table) and min(table[name].min() for name in ("prompt_len", "length", "cached")) < 0:
        raise DumpError(f"{where}:/sequences holds a negative length", DAMAGED)
    tokens = tokens[np.lexsort((tokens["position"], tokens["sequence"]))]
    numbers, starts, counts = np.unique(tokens["sequence"], return_index=True, return_counts=True)
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < len(table):
        raise DumpError(f"{where}:/tokens names a sequence that the file does not list", DAMAGED)
    if not np.array_equal(tokens["position"], np.arange(len(tokens)) - np.repeat(starts, counts)):
        raise DumpError(f"{where}:/tokens does not hold the positions 0, 1, ... of each sequence once", DAMAGED)
    chunks = np.split(tokens["token"].astype(np.int64), starts[1:])
    ids = {int(number): chunk for number, chunk in zip(numbers, chunks)}
    declared = {number: Versions(*versions) for number, *versions in tables["versions"].tolist()}
    if not declared.keys() <= set(table["id"].tolist()):
        raise DumpError(f"{where}:/versions names a sequence that the file does not list", DAMAGED)
    return [_sequence(record, ids, declared) for record in table]


def _sequence(record: np.void, ids: dict[int, np.ndarray], declared: dict[int, Versions]) -> Sequence:
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
        cached=int(record["cached"]),
        declared=declared.get(number),
    )


def name_apart(found: list[list[Sequence]], parts: list[Part], places: list[Place]) -> None:
    """Give sequences of two files different names where their tokens show that they are different.

    This is for files without a driver's, which would know: one uid (of engines that number their requests, one request
    id) whose files hold other tokens names two sequences.
    """
    owners: dict[tuple[str, str, int, int], list[tuple[Place, dict[int, int]]]] = {}
    for sequences, part, place in zip(found, parts, places):
        tokens, times = _tokens_of_rows(part), Counter[tuple[str, str, int]]()
        for sequence in sequences:
            mine = dict(enumerate(sequence.tokens.tolist())) | tokens.get(sequence.index, {})
            name = (sequence.request_id, "" if sequence.request_id else sequence.uid, sequence.sample)
            known = owners.setdefault((*name, times[name]), [])  # the k-th of one name in each file
            times[name] += 1
            same = (n for n, (_, theirs) in enumerate(known) if all(theirs.get(p, t) == t for p, t in mine.items()))
            number = next(same, len(known))
            if number == len(known):
                known.append((place, {}))
            known[number][1].update(mine)
            if number:
                _rename(sequence, known[number][0])


def _rename(sequence: Sequence, owner: Place) -> None:
    """Add the place of its first file to a sequence's name: the request id where it has one, else the uid."""
    suffix = f"@{owner.label.replace(' ', '')}" if owner.dp is None else f"@dp{owner.dp}"
    if sequence.request_id:
        sequence.request_id += suffix
        return
    uid = sequence.uid
    sequence.uid = uid + suffix
    sequence.trajectory = sequence.uid if sequence.trajectory == uid else sequence.trajectory


def _tokens_of_rows(part: Part) -> dict[int, dict[int, int]]:
    """Return position -> token per sequence number of a file, from the rows of its tensors."""
    found: dict[int, dict[int, int]] = {}
    for name in sorted({text_of(record["rows"]) for record in part.tables["index"]}):
        rows = part.row_table(name)
        rows = rows[(rows["sequence"] >= 0) & (rows["position"] >= 0) & (rows["token"] >= 0)]
        for sequence in np.unique(rows["sequence"]):
            mine = rows[rows["sequence"] == sequence]
            found.setdefault(int(sequence), {}).update(zip(mine["position"].tolist(), mine["token"].tolist()))
    return found


def merge_sequences(files: list[list[Sequence]]) -> tuple[list[Sequence], list[np.ndarray]]:
    """Merge the lists of several files; return them with, per file, the map from its numbers to the merged ones.

    Files that know token ids come first. Two entries are one sequence when their request ids agree (with or without the
    engine's suffix) or, where there is no request id, their uids and samples. Entries of one file are never one
    sequence: a prompt that ran twice under one name is two, which other files list in the same order.
    """
    merged: list[Sequence] = []
    by_key: dict[str, list[int]] = {}
    maps = [np.full(max((s.index for s in sequences), default=-1) + 1, -1, np.int32) for sequences in files]
    known_first = sorted(range(len(files)), key=lambda i: -sum(len(s.tokens) for s in files[i]))
    for number in known_first:
        mine: set[int] = set()
        for sequence in files[number]:
            keys = _keys(sequence)
            found = next((n for key in keys for n in by_key.get(key, ()) if n not in mine), None)
            if found is None:
                found = len(merged)
                merged.append(Sequence(**{**vars(sequence), "index": found}))
                by_key.setdefault(keys[0], []).append(found)
            mine.add(found)
            for name in ("length", "cached", "weight_version"):  # a file that does not know one says 0
                setattr(merged[found], name, max(getattr(merged[found], name), getattr(sequence, name)))
            merged[found].declared = merged[found].declared or sequence.declared
            maps[number][sequence.index] = found
    return merged, maps


def _keys(sequence: Sequence) -> list[str]:
    if not sequence.request_id:
        return [f"uid:{sequence.uid}:{sequence.sample}"]
    stem, _, suffix = sequence.request_id.rpartition("-")
    return [f"request:{sequence.request_id}"] + ([f"request:{stem}"] if stem and suffix else [])
