"""What a capture must know about an engine, with what all adapters share: numbered sequences and calls, kept rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from probe.errors import UsageError
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.rows import Announced, CallRows
from probe.store.schema import Sequence

if TYPE_CHECKING:
    from probe.hooks.budget import RowBudget
    from probe.hooks.engines.vllm_requests import Piece


class EngineAdapter:
    """Base of the adapters: turns a row grid into the rows of a call, restricted to what is recorded.

    ``prompts_only`` keeps rows before each sequence's prompt length; ``token_range`` keeps a closed range of positions;
    ``budget`` keeps some sequences and some rows of each.
    ``logits`` names the tensor that holds the logits. ``runs_after_forward``: modules that belong to a call run after
    the model's own forward has returned. ``tp_rank`` and ``tp_size`` say which of how many tensor-parallel ranks this
    process is. ``sequence_prefix`` goes before the names that sequences get for want of a uid. ``chunks``
    counts the modules that are called with the same batches (0: not known). While ``paused``,
    forwards only keep other ranks company and are not recorded.
    """

    name = "module"
    layouts: tuple[str, ...] = ("bs", "flat", "sb")
    logits = ("lm_head", "output.0")
    runs_after_forward = False
    tp_rank = 0
    tp_size = 1
    sequence_prefix = ""
    chunks = 0
    paused = False

    def __init__(self, book: SequenceBook, *, prompts_only: bool = False) -> None:
        self.book, self.prompts_only = book, prompts_only
        self.token_range: tuple[int, int] | None = None
        self.budget: RowBudget | None = None
        self.calls = 0

    def announce(self, sequences: list[Announced]) -> None:
        """Refuse: an engine that schedules requests by itself knows which rows they are."""
        if sequences:
            raise UsageError(f"{self.name} knows its sequences by itself", "leave out prompt_lens, lengths and uids")

    def module_path(self, path: str, module: torch.nn.Module) -> str | None:
        """Return the module's path in the dump, None for one that is not hooked: containers never run themselves."""
        return None if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict) else path

    def begin_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of the forward that starts now, None (as here) where it serves no real request."""
        return None

    def preferred_layouts(self, path: str, slot: str) -> tuple[str, ...]:
        """Return the layouts to try first for a tensor, which decide where batch and length are equal: none."""
        return ()

    def partial_rows(self, path: str, slot: str, tensor: torch.Tensor) -> np.ndarray | None:
        """Return the call's row numbers that a tensor holds where it holds only some: None, it holds all."""
        return None

    def expert_cells(self) -> np.ndarray | None:
        """Return the call's row numbers in the order in which other ranks' experts number them: there are none."""
        return None

    def shard_of(self, path: str, slot: str) -> str:
        """Return how a tensor lies over the TP ranks (probe.store.schema.SHARDS, never CHECKSUM): not declared."""
        return ""

    def taps(self, path: str, module: torch.nn.Module) -> dict[str, str]:
        """Return the methods of a module whose results are recorded, and the slot of each: none."""
        return {}

    def facts(self, path: str) -> dict[str, Any]:
        """Return what the engine knows of a module's runs beyond its scalars (JSON values): nothing."""
        return {}

    def weight_split(self, name: str, parameter: torch.Tensor, module: torch.nn.Module) -> tuple[int, int]:
        """Return (-1, 0): the TP ranks do not share the parameter.

        Else (0, 0) where each holds output rows, and (1, c) where it holds the input columns from the global column c.
        ``name`` is the parameter's path in the dump, ``module`` the one that owns it.
        """
        return -1, 0

    def known_tokens(self) -> dict[str, list[int]]:
        """Return, by uid, the token ids of sequences that rows alone may not give: none."""
        return {}

    def end_call(self, output: Any) -> None:
        """Take note of the output of a forward that has ended: nothing needs it."""

    def rows_of_call(self, grid: np.ndarray) -> CallRows:
        """Number the call and return its rows."""
        call, self.calls = self.calls, self.calls + 1
        return CallRows(grid, call, self.layouts, keep=self._keep(grid), company=self.paused)

    def takes_no_row(self, spans: Iterable[tuple[Piece, int, int]]) -> bool:
        """Tell, and count, that the budget takes no row of a pass: then nothing is copied from the device for it.

        ``spans``: of each request of the pass its piece, and the first and the number of the positions that run.
        """
        if self.budget is None:
            return False
        left = 0
        for piece, first, count in spans:
            asked = max(0, min(count, piece.prompt_len - first)) if self.prompts_only else count
            number = self.book.known(piece.uid, piece.version)
            if asked and self.budget.may_keep(number, piece.prompt_len, first, asked):
                return False
            left += asked
        self.budget.leave(left)
        return True

    def ids_at_first(self, sequence: Sequence, grid: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return the ids of a sequence known at its first call, int64 [n], and whether they are all it will have.

        Those announced, else those of the call's rows from the first token on; of a sequence that began elsewhere
        nothing but its name is known, which then stands for them.
        """
        known = self.book.announced_ids(sequence.index)
        if known is not None:
            return known, len(known) > sequence.prompt_len
        rows = grid[grid["sequence"] == sequence.index]
        rows = rows[np.argsort(rows["position"], kind="stable")]
        unbroken = (
            len(rows) > 0 and np.array_equal(rows["position"], np.arange(len(rows))) and (rows["token"] >= 0).all()
        )
        if not unbroken or len(rows) < sequence.prompt_len:
            return np.frombuffer(sequence.uid.encode().ljust(8), np.uint8).astype(np.int64), False
        return rows["token"].astype(np.int64), True

    def _keep(self, grid: np.ndarray) -> np.ndarray | None:
        if not self.prompts_only and self.token_range is None and self.budget is None:
            return None
        keep = np.ones(grid.shape, bool)
        if self.prompts_only:
            prompt_len = np.array([s.prompt_len for s in self.book.sequences] or [0])
            keep &= grid["position"] < prompt_len[np.maximum(grid["sequence"], 0)]
        if self.token_range is not None:
            first, last = self.token_range
            keep &= (grid["position"] >= first) & (grid["position"] <= last)
        if self.budget is not None:
            keep = self.budget.keep(grid, keep, self.book.sequences, lambda s: self.ids_at_first(s, grid))
        return keep
