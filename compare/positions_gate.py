"""The positions gate: rows hold the tokens of their positions, and models were given the ids of those positions."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from probe.compare.align import RowAligner
from probe.compare.gates import Gate, GateFinding
from probe.compare.report.model import counted
from probe.compare.sequences import SequenceJoin
from probe.compare.side import Side
from probe.store.reader import Dump
from probe.store.schema import ROW


def positions_gate(a: Side, b: Side, join: SequenceJoin | None = None) -> Gate:
    """Check on each side that the token of every row is the sequence's token at the row's position, and that the
    position ids which the model was given count on with the positions.
    """
    checked, notes, ids = 0, list[GateFinding](), list[_PositionIds | None]()
    for name, side in (("a", a), ("b", b)):
        rows = _widest_rows(side)
        sequence, position, token = rows["sequence"], rows["position"], rows["token"]
        known = (sequence >= 0) & (position >= 0) & (token >= 0)
        sequence, position, token = sequence[known], position[known], token[known]
        lookup = _Tokens(side.dump)
        wrong = int((lookup.at(sequence, position) != token).sum())
        offsets = {shift: int((lookup.at(sequence, position + shift) == token).sum()) for shift in (-1, 1)}
        total = int(known.sum())
        checked += total
        if wrong:
            shifted = next((s for s, hits in offsets.items() if hits > 0.9 * total), None)
            hint = f"; they fit when moved by {shifted:+d}: a position offset" if shifted else ""
            text = f"in {name}, {wrong} of {total} rows hold another token than theirs{hint}"
            figures = {"rows": wrong, "of": total, "shift": shifted or 0}
            return Gate("positions", "fail", text, (GateFinding("position-offset", "positions", name, text, figures),))
        ids.append(_PositionIds.of(side))
        found, broken = _position_ids(name, ids[-1]) if ids[-1] is not None else (_shared_ids(name, side), True)
        if found and broken:
            return Gate("positions", "fail", found[0].text, tuple(found))
        notes += found
    other = _other_ids(join, a, b, ids) if join is not None else []
    if other:
        return Gate("positions", "fail", other[0].text, tuple(other))
    if not checked:
        return Gate("positions", "skipped", "no tensor with token rows is stored")
    said = [f"all {checked} rows of both sides hold the token of their position", *(finding.text for finding in notes)]
    return Gate("positions", "warn" if notes else "pass", "; ".join(said), tuple(notes))


POSITION_IDS = re.compile(r".*:kwargs\.(position_ids|positions)$")
"""Slots of the ids of positions that a model was given, [rows] or with one column per axis (M-RoPE's 3 or 4)."""


@dataclass(frozen=True)
class _PositionIds:
    """The position ids that a side's model was given: [rows, axes], with their rows' table."""

    label: str
    rows: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, side: Side) -> _PositionIds | None:
        """Read the first that a side stores with token rows."""
        for (module, slot), info in side.dump.tensors.items():
            label = f"{module}:{slot}"
            if POSITION_IDS.match(label) and info.has_rows and info.dtype.startswith("int") and info.rows:
                ids = side.dump.read(module, slot).reshape(info.rows, -1).astype(np.int64)
                return cls(label, side.dump.rows(module, slot), ids)
        return None

    @property
    def of_text(self) -> bool:
        """Tell whether all axes count alike, as they do for text: those of images and videos do not."""
        return bool((self.ids == self.ids[:, :1]).all())


def _position_ids(name: str, found: _PositionIds | None) -> tuple[list[GateFinding], bool]:
    """Return what is odd about the position ids that a side's model was given, and whether it changes numbers.

    Ids that do not go up by one per token (packed sequences that share one count) do, and so may ids that start
    elsewhere than at 0 in all sequences. A start that differs between sequences comes of left padding, which relative
    position encodings do not see: it is only noted.
    """
    if found is None or not found.of_text:
        return [], False
    known = (found.rows["sequence"] >= 0) & (found.rows["position"] >= 0)
    sequence, off = found.rows["sequence"][known], found.ids[known, 0] - found.rows["position"][known]
    moved, starts = _moved(sequence, off)
    figures = {"rows": int(moved.sum()), "of": len(off), "largest offset": int(np.abs(off).max(initial=0))}
    everywhere = len(starts) > 1 and len(set(starts.tolist())) == 1  # left padding differs between sequences
    if moved.any():
        text = (
            f"in {name}, the position ids of {moved.sum()} of {len(off)} rows ({found.label}) do not follow the tokens"
        )
    elif starts.any():
        count = counted(int((starts != 0).sum()), "sequence")
        text = f"in {name}, {count} of {len(starts)} do not start at position id 0 but {starts[starts != 0][0]:g}"
        text = f"{text} ({found.label}); relative encodings hide it, others do not"
    else:
        return [], False
    return [GateFinding("position-offset", "positions", name, text, figures)], bool(moved.any()) or everywhere


def _shared_ids(name: str, side: Side) -> list[GateFinding]:
    """Return a finding where one line of ids serves all rows of a batch, [1, length], and does not count on from 0.

    Such ids have no token rows. Of a call that holds first tokens the line begins with 0, wherever the padding is.
    """
    first = np.unique(_widest_rows(side)[["call", "position"]][_widest_rows(side)["position"] == 0]["call"])
    for (module, slot), info in side.dump.tensors.items():
        if not POSITION_IDS.match(f"{module}:{slot}") or info.has_rows or info.feature_shape[:1] != (1,):
            continue
        if not info.dtype.startswith("int") or len(info.feature_shape) != 2:
            continue
        lines = side.dump.read(module, slot)[np.isin(side.dump.rows(module, slot)["call"], first), 0].astype(np.int64)
        wrong = lines[(lines != np.arange(lines.shape[1])).any(axis=1)]
        if len(wrong):
            begins = f"begin at {wrong[0, 0]}" if (np.diff(wrong) == 1).all() else "do not count on from token to token"
            text = f"in {name}, the position ids of {len(wrong)} of {len(lines)} calls ({module}:{slot}) {begins}"
            figures = {"calls": len(wrong), "of": len(lines), "first id": int(wrong[0, 0])}
            return [GateFinding("position-offset", "positions", name, text, figures)]
        return []
    return []


def _moved(owner: np.ndarray, off: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which offsets are not their owner's usual one (the median), and each owner's."""
    owners, place = np.unique(owner, return_inverse=True)
    usual = np.array([np.median(off[place == number]) for number in range(len(owners))])
    return off != usual[place] if len(off) else np.zeros(0, bool), usual


def _other_ids(join: SequenceJoin, a: Side, b: Side, ids: list[_PositionIds | None]) -> list[GateFinding]:
    """Return a finding where two sides gave their models other position ids along some axis (M-RoPE)."""
    first, second = ids
    if first is None or second is None or (first.of_text and second.of_text):
        return []
    rows = RowAligner(join, a.dump.sequences, b.dump.sequences).rows(first.rows, second.rows)
    axes = max(first.ids.shape[1], second.ids.shape[1])
    left, right = (
        np.broadcast_to(given.ids[index], (len(index), axes)) if given.ids.shape[1] in (1, axes) else given.ids[index]
        for given, index in ((first, rows.index_a), (second, rows.index_b))
    )
    axes = min(left.shape[1], right.shape[1])  # a fourth row of M-RoPE ids is the plain position
    moved = np.stack([_moved(rows.pair, left[:, -n] - right[:, -n])[0] for n in range(1, axes + 1)], axis=1)
    wrong = int(moved.any(axis=1).sum())
    if not wrong:
        return []
    text = f"the position ids of {wrong} of {len(left)} rows differ ({first.label} in a, {second.label} in b)"
    figures = {"rows": wrong, "of": len(left), "axes": int(moved.any(axis=0).sum())}
    return [GateFinding("position-offset", "positions", "unknown", text, figures)]


def _widest_rows(side: Side) -> np.ndarray:
    infos = [info for info in side.dump.tensors.values() if info.has_rows and info.rows]
    if not infos:
        return np.zeros(0, ROW)
    widest = max(infos, key=lambda info: info.rows)
    return side.dump.rows(widest.module, widest.slot)


class _Tokens:
    """The token ids of all sequences of a dump, end to end, so that any number of rows is looked up at once."""

    def __init__(self, dump: Dump) -> None:
        self._lengths = np.array([len(s.tokens) for s in dump.sequences], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._ids = np.concatenate([*(s.tokens for s in dump.sequences), np.full(1, -2, np.int64)])

    def at(self, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the token of each (sequence, position), -2 outside the sequence."""
        inside = (position >= 0) & (position < self._lengths[sequence])
        return self._ids[np.where(inside, self._starts[sequence] + position, -1)]
