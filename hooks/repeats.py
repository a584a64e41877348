"""Modules that run more than once in one forward: the same rows again are another tensor, other rows are not."""

from __future__ import annotations

import numpy as np

from probe.hooks.rows import Place


class Repeats:
    """Name the runs of the modules of one call.

    The first run of ``path`` keeps its name. A later one over rows that were all recorded under that name is
    ``path#1``, and so on; one that holds other rows (a head run in chunks, a logits processor) goes on under it, and
    so does one whose rows nothing tells (an activation run expert by expert).
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[np.ndarray | None]] = {}
        """Per path and repeat, the rows recorded so far: row numbers in the call's flattened grid, None for all."""

    def clear(self) -> None:
        """Forget the last call."""
        self._seen.clear()

    def name(self, path: str, places: list[Place]) -> str | None:
        """Return the name of a run of ``path`` whose tensors hold these rows, None where none of them has rows."""
        held = next((place for place in places if place.has_rows), None)
        if held is None:
            return None
        seen = self._seen.setdefault(path, [])
        for number, known in enumerate(seen):
            if known is not None and (held.flat_rows is None or not np.isin(held.flat_rows, known).all()):
                seen[number] = None if held.flat_rows is None else np.union1d(known, held.flat_rows)
                return _numbered(path, number)
        seen.append(held.flat_rows)
        return _numbered(path, len(seen) - 1)


def _numbered(path: str, number: int) -> str:
    return f"{path}#{number}" if number else path
