"""What of a run is stored: which sequences, which of their rows, and how many bytes of tensors per file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from probe.hooks.jobs.selection import Selection
from probe.settings import STATISTICS, Settings
from probe.store.budget import within_rows
from probe.store.dtypes import DTYPES
from probe.store.schema import Sequence
from probe.store.statistics import WIDTH, accumulator
from probe.store.writer import DumpWriter

FEWEST_ROWS = 64
"""Rows per sequence to which a budget of bytes goes down before it takes sequences away."""
LAYER_HIDDEN, LAYER_KV, LAYER_INTERMEDIATE = 8, 2, 4
"""How many distinct tensors of a decoder layer are as wide as the hidden state (its input, two norms, queries, values
mixed, the attention's and the MLP's output, the sum between), as a key, and as the MLP inside."""


class RowBudget:
    """Says which rows of a call are stored, and counts those that are not.

    ``rows`` per sequence, as :func:`probe.store.budget.within_rows` places them. Within ``max_bytes`` of the writer's
    file, 0 for any number; ``per_row`` is what a row is expected to take until one was measured. Made when the file
    holds its sketches: what it takes on from then on is taken by rows.

    ``rows_left`` counts rows that the choice of sequences and rows left out, ``rows_cut`` those among them that the
    bytes did, ``copies_dropped`` tensors of a call that did not fit any more.
    """

    def __init__(self, selection: Selection, rows: int, max_bytes: int, writer: DumpWriter, per_row: float) -> None:
        self.selection, self.rows, self.max_bytes = selection, rows, max_bytes
        self.rows_kept = self.rows_left = self.rows_cut = self.copies_dropped = 0
        self._lost: Counter[tuple[str, str]] = Counter()
        self._writer, self._per_row = writer, per_row
        self._admitted: dict[int, bool] = {}
        self._before = (0, writer.stored_bytes)

    def takes(self, more: int) -> bool:
        """Tell whether so many more bytes may be stored."""
        return not self.max_bytes or self._writer.stored_bytes + more <= self.max_bytes

    def drop(self, tensor: tuple[str, str], rows: int) -> None:
        """Count a call's tensor (its module and slot) that is not stored for want of bytes, with its rows."""
        self.copies_dropped += 1
        self._lost[tensor] += rows

    @property
    def rows_dropped(self) -> int:
        """Return how many rows the bytes left out of the tensor that lost the most.

        A row that is in no tensor at all is one of them: no more than these are missing for want of bytes.
        """
        return self.rows_cut + max(self._lost.values(), default=0)

    def is_recorded(self, number: int) -> bool:
        """Tell whether a sequence that was met has its tensors stored."""
        return self._admitted.get(number, False)

    def may_keep(self, number: int | None, prompt_len: int, first: int, count: int) -> bool:
        """Tell whether any of ``count`` rows from a position on may be stored; None: a sequence that was never met."""
        if number is None or number not in self._admitted:
            return True
        if not self._admitted[number] or not self.takes(1):
            return False
        return bool(within_rows(np.arange(first, first + count), prompt_len, self.rows).any())

    def leave(self, rows: int) -> None:
        """Count rows of a call of which nothing is stored, and that was not read therefore."""
        self.rows_left += rows

    def keep(
        self,
        grid: np.ndarray,
        asked: np.ndarray,
        sequences: list[Sequence],
        ids_of: Callable[[Sequence], tuple[np.ndarray, bool]],
    ) -> np.ndarray:
        """Return which cells of a call's grid [batch, position] are stored, of those ``asked`` for.

        ``ids_of`` gives the ids of a sequence that are known at its first call, and whether they are all.
        """
        real = (grid["sequence"] >= 0) & asked
        keep = np.zeros(grid.shape, bool)
        here = np.unique(grid["sequence"][real]).tolist()
        fresh = [number for number in here if number not in self._admitted]
        met = []
        for number in fresh:
            ids, whole = ids_of(sequences[number])
            met.append((ids[: sequences[number].prompt_len or None], ids if whole else None))
        self._admitted.update(zip(fresh, self.selection.admit(met)))
        for number in here:
            sequence = sequences[number]
            if self._admitted[number]:
                mine = grid["sequence"] == number
                keep |= mine & asked & within_rows(grid["position"], sequence.prompt_len, self.rows)
        self._cut(keep)
        self.rows_kept += int(keep.sum())
        self.rows_left += int((real & ~keep).sum())
        return keep

    def _cut(self, keep: np.ndarray) -> None:
        """Take rows away at the end, as many as would go beyond the bytes."""
        if not self.max_bytes:
            return
        rows, stored = self.rows_kept, self._writer.stored_bytes
        if rows > self._before[0]:  # what the rows of the last call took
            self._per_row = (stored - self._before[1]) / (rows - self._before[0])
            self._before = (rows, stored)
        allowed = max(0, int((self.max_bytes - stored) / max(self._per_row, 1)))
        cells = np.flatnonzero(keep)
        keep.reshape(-1)[cells[allowed:]] = False
        self.rows_cut += len(cells[allowed:])


def chosen_folder(folder: Path, step: int) -> Path:
    """Return where the rollouts of a step note which sequences they recorded."""
    return folder / "chosen" / f"step{step}"


def limits_of(settings: Settings, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's ``budget``: the limits that are set, with as many rows and sequences as the bytes allow."""
    seqs, rows, most = settings.seqs, settings.rows, settings.max_bytes
    per_row = bytes_per_row({**manifest, "budget": {"layers": list(settings.layers)}})
    if seqs and rows and 0 < most < per_row * seqs * rows:
        seqs, rows = fitting(seqs, rows, most, per_row)
    limits = {"seqs": seqs, "rows": rows, "max_bytes": most, "layers": list(settings.layers)}
    return {name: value for name, value in limits.items() if value}


def make_budget(manifest: Mapping[str, Any], writer: DumpWriter, chosen: Path) -> RowBudget | None:
    """Return the budget of one file, None where its manifest states no limit of rows or bytes."""
    limits = manifest.get("budget") or {}
    if not limits.keys() - {"layers"}:
        return None
    selection = Selection(limits.get("seqs", 0), chosen, follows=manifest["stage"] != "rollout")
    return RowBudget(selection, limits.get("rows", 0), limits.get("max_bytes", 0), writer, bytes_per_row(manifest))


def fitting(seqs: int, rows: int, max_bytes: int, per_row: float) -> tuple[int, int]:
    """Return how many sequences and rows of each fit into the bytes: fewer rows first, then fewer sequences."""
    fit = int(max_bytes / per_row)
    rows = min(rows, max(FEWEST_ROWS, fit // seqs))
    return max(1, min(seqs, fit // rows)), rows


def bytes_per_row(manifest: Mapping[str, Any]) -> float:
    """Return about how many bytes a token's tensors take in the recorded layers, 0 where no size is known."""
    layout, config = manifest.get("layout") or {}, (manifest.get("model") or {}).get("config") or {}
    size = DTYPES[manifest["dtype"]].carrier.itemsize if manifest.get("dtype") in DTYPES else 4
    experts = int(config.get("num_experts_per_tok") or 0)
    inside = int(layout.get("intermediate_size") or 0)
    if experts and config.get("moe_intermediate_size"):
        inside = experts * int(config["moe_intermediate_size"])
    kv = int(layout.get("num_key_value_heads") or 0) * int(layout.get("head_dim") or 0)
    if manifest.get("task") == STATISTICS:
        kept = np.dtype(accumulator(str(manifest.get("dtype")))).itemsize * WIDTH
        layers = len((manifest.get("budget") or {}).get("layers") or ()) or int(layout.get("num_layers") or 0)
        return float(kept * (layers * (LAYER_HIDDEN + LAYER_KV + LAYER_INTERMEDIATE * max(1, experts)) + 1))
    layer = LAYER_HIDDEN * int(layout.get("hidden_size") or 0) + LAYER_KV * kv + LAYER_INTERMEDIATE * inside
    layers = len((manifest.get("budget") or {}).get("layers") or ()) or int(layout.get("num_layers") or 0)
    return float(size * (layers * layer + int(layout.get("vocab_size") or 0)))


def estimate_line(manifest: Mapping[str, Any]) -> str:
    """Return one line that says how much a recorded step of a stage will store per process."""
    per_row, limits = bytes_per_row(manifest), manifest.get("budget") or {}
    what = "statistics of tensors" if manifest.get("task") == STATISTICS else "tensors"
    line = f"{manifest['stage']}: {what} take about {_size(per_row)} per token"
    if limits.get("seqs") and limits.get("rows"):
        rows, seqs = limits["rows"], limits["seqs"]
        line += f" x {rows} rows x {seqs} sequences = {_size(per_row * rows * seqs)}"
    line += f" per recorded step and process, at most {_size(limits['max_bytes'])}" if limits.get("max_bytes") else ""
    return f"{line} (PROBE_SEQS, PROBE_ROWS, PROBE_LAYERS, PROBE_MAX_BYTES)"


def _size(size: float) -> str:
    scale, unit = next((entry for entry in SIZES if size >= entry[0]), SIZES[-1])
    return f"{size / scale:.3g} {unit}"


SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
