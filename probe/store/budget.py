"""What a job's dump was told to leave out: the budget that its files state, and the rows that it still wants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Budget:
    """The limits under which a dump recorded tensors, 0 or empty where there was none.

    ``seqs``: sequences; ``rows``: rows of each sequence; ``max_bytes``: bytes of a file; ``layers``: numbers of the
    recorded layers. ``dropped``: rows that full files left out, at most; ranks that share their rows are full of the
    same ones. ``listed``: as many sequences of another run were picked to be run again, and no others.
    """

    seqs: int = 0
    rows: int = 0
    max_bytes: int = 0
    layers: tuple[int, ...] = ()
    dropped: int = 0
    listed: int = 0

    @property
    def limits_rows(self) -> bool:
        """Tell whether rows of a sequence, or whole sequences, may be left out."""
        return bool(self.seqs or self.rows or self.dropped)


def budget_of(manifests: Sequence[Mapping[str, Any]]) -> Budget:
    """Return the budget that the files of a dump state: a limit of any of them is one of the dump."""
    stated = [entry for manifest in manifests if isinstance(entry := manifest.get("budget"), Mapping)]

    def most(name: str) -> int:
        return max((entry[name] for entry in stated if type(entry.get(name)) is int), default=0)

    layers = {n for entry in stated for n in _entries(entry.get("layers")) if type(n) is int}
    dropped = _dropped(manifests)
    return Budget(most("seqs"), most("rows"), most("max_bytes"), tuple(sorted(layers)), dropped, most("listed"))


def _dropped(manifests: Sequence[Mapping[str, Any]]) -> int:
    """Return the rows that full files dropped: of ranks that hold the same rows the most, of others the sum."""
    seen: Counter[str] = Counter()
    found: dict[Any, int] = {}
    for number, manifest in enumerate(manifests):
        budget, at = manifest.get("budget"), manifest.get("coordinates")
        count = budget.get("dropped_rows") if isinstance(budget, Mapping) else None
        key: Any = number
        if isinstance(at, Mapping):
            rank = repr(sorted(at.items(), key=str))
            key = repr([at.get(axis) for axis in ("dp", "cp")]), seen[rank]  # a rank's later files are of other rows
            seen[rank] += 1
        if type(count) is int and count > 0:
            found[key] = max(found.get(key, 0), count)
    return sum(found.values())


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def within_rows(position: np.ndarray, prompt_len: np.ndarray | int, rows: int) -> np.ndarray:
    """Tell (bool [n]) which positions of a sequence ``rows`` rows reach; 0 rows reach all.

    A short prompt (at most half of the rows) leaves the first ``rows`` positions; a longer one half of them at its
    start and half from its last token on, whose row scores the first token of the response.
    """
    if not rows:
        return np.ones(np.shape(position), bool)
    half, prompt = rows // 2, np.asarray(prompt_len)
    last = prompt - 1
    split = (position < half) | ((position >= last) & (position < last + half))
    return np.where(prompt <= half, position < rows, split)
