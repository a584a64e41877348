"""What every engine's adapter shares: numbered sequences, numbered calls, and which rows are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from probe.errors import UsageError
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.rows import Announced, CallRows


class EngineRows:
    """Base of the adapters: turns a row grid into the rows of a call, restricted to what is recorded.

    ``prompts_only`` keeps rows before each sequence's prompt length; ``token_range`` keeps a closed range of positions.
    ``logits`` names the tensor that holds the logits.
    """

    name = "module"
    layouts: tuple[str, ...] = ("bs", "flat", "sb")
    logits = ("lm_head", "output.0")
    runs_after_forward = False

    def __init__(self, book: SequenceBook, *, prompts_only: bool = False) -> None:
        self.book, self.prompts_only = book, prompts_only
        self.token_range: tuple[int, int] | None = None
        self.calls = 0

    def announce(self, sequences: list[Announced]) -> None:
        """Refuse: an engine that schedules requests by itself knows which rows they are."""
        if sequences:
            raise UsageError(f"{self.name} knows its sequences by itself", "leave out prompt_lens, lengths and uids")

    def module_path(self, path: str, module: torch.nn.Module) -> str | None:
        """Return the module's path; None for containers, which never run themselves."""
        return None if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict) else path

    def preferred_layouts(self, path: str, slot: str) -> tuple[str, ...]:
        """Return no preference: the engine keeps one order throughout."""
        return ()

    def partial_rows(self, path: str, slot: str, tensor: torch.Tensor) -> np.ndarray | None:
        """Return None: every tensor with rows holds all of them."""
        return None

    def end_call(self, output: Any) -> None:
        """Do nothing: nothing runs after the model's own forward."""

    def rows_of_call(self, grid: np.ndarray) -> CallRows:
        """Number the call and return its rows."""
        call, self.calls = self.calls, self.calls + 1
        return CallRows(grid, call, self.layouts, keep=self._keep(grid))

    def _keep(self, grid: np.ndarray) -> np.ndarray | None:
        if not self.prompts_only and self.token_range is None:
            return None
        keep = np.ones(grid.shape, bool)
        if self.prompts_only:
            prompt_len = np.array([s.prompt_len for s in self.book.sequences] or [0])
            keep &= grid["position"] < prompt_len[np.maximum(grid["sequence"], 0)]
        if self.token_range is not None:
            first, last = self.token_range
            keep &= (grid["position"] >= first) & (grid["position"] <= last)
        return keep
