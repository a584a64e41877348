"""Gate: whatever several ranks stored of one row, in full or as a checksum, must be the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from probe.compare.gates import Gate
from probe.compare.sequences import sequence_labels
from probe.store.reader import Dump

SHOWN = 3
"""Disagreements that the gate's sentence spells out."""


@dataclass(frozen=True)
class Checked:
    """One rank's copy of a tensor: how many rows were compared with the rank whose values count, and which differ.

    ``differing`` are rows of the row table (sequence, position, ...), in its order.
    """

    tensor: str
    rank: str
    reference: str
    rows: int
    differing: np.ndarray


def check_replicas(dump: Dump) -> Iterator[Checked]:
    """Yield one entry per tensor and rank that holds another rank's rows again."""
    for module, slot in dump.tensors:
        replicas = dump.replicas(module, slot)
        if not replicas:
            continue
        wanted = np.unique(np.concatenate([replica.at for replica in replicas]))
        checksums = dump.row_checksums(module, slot, wanted)
        for replica in replicas:
            same = checksums[np.searchsorted(wanted, replica.at)] == replica.checksums
            name = f"{module}:{slot}"
            yield Checked(name, replica.rank, replica.reference, len(same), replica.rows[~same])


def replicas_gate(a: Dump, b: Dump) -> Gate:
    """Check that ranks of one side which hold the same rows hold the same values."""
    rows, tensors, wrong = 0, 0, []
    for side, dump in (("a", a), ("b", b)):
        for checked in check_replicas(dump):
            rows, tensors = rows + checked.rows, tensors + 1
            if len(checked.differing):
                wrong.append((side, dump, checked))
    if not rows:
        return Gate("replicas", "skipped", "no row is stored by more than one rank")
    if not wrong:
        return Gate("replicas", "pass", f"{rows} rows that several ranks hold are the same on each of them")
    shown = "; ".join(_described(*entry) for entry in wrong[:SHOWN])
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return Gate("replicas", "fail", f"{shown}{more} ({len(wrong)} of {tensors} copies of tensors differ)")


def _described(side: str, dump: Dump, checked: Checked) -> str:
    first = checked.differing[0]
    where = f"call {int(first['call'])}"
    if first["sequence"] >= 0:
        where = f"{sequence_labels(dump.sequences)[first['sequence']]} position {int(first['position'])}"
    return (
        f"{checked.tensor} of {side} is not the same on {checked.reference} and {checked.rank}: "
        f"{len(checked.differing)} of {checked.rows} rows differ, first {where}"
    )
