"""vLLM: concatenated tokens of many requests per pass, told apart by the scheduler's own bookkeeping."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from probe.errors import CaptureError
from probe.hooks.engines.base import EngineRows
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.rows import Announced, CallRows, grid_of

LOGITS_MODULE = "logits_processor"


class VllmAdapter(EngineRows):
    """Rows of a vLLM model runner's passes.

    A pass concatenates the scheduled tokens of each request in the order of the runner's input batch, so that a row's
    request follows from ``num_scheduled_tokens`` and its position from the ``positions`` argument. Passes outside
    ``execute_model`` (profiling, warm-up, graph capture) serve no request and are not captured.
    """

    name = "vllm"
    layouts = ("flat", "bs")
    logits = (LOGITS_MODULE, "output.0")
    runs_after_forward = True

    def __init__(
        self, book: SequenceBook, runner: Any, *, prompts_only: bool = False, prompt_lens: dict[str, int] | None = None
    ) -> None:
        super().__init__(book, prompts_only=prompts_only)
        self.runner = runner
        self.prompt_lens = prompt_lens or {}
        self.scheduled: dict[str, int] | None = None
        self.logits_rows_unknown = 0
        self._last_rows: np.ndarray = np.zeros(0, np.int64)
        self._logits_rows: np.ndarray = np.zeros(0, np.int64)
        self._hidden: torch.Tensor | None = None
        self._hidden_copy: torch.Tensor | None = None

    def begin_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of this pass, or None for a pass that serves no real request."""
        self._hidden = self._hidden_copy = None
        if not self.scheduled:
            return None
        ids, positions = _argument(args, kwargs, "input_ids", 0), _argument(args, kwargs, "positions", 1)
        if positions is None:
            raise CaptureError("this vLLM model takes no 'positions', so its rows cannot be told apart")
        positions = positions[0] if positions.dim() == 2 else positions  # M-RoPE: the first row is the text position
        return self.rows_of_call(self._grid(positions.cpu().numpy(), None if ids is None else ids.cpu().numpy()))

    def partial_rows(self, path: str, slot: str, tensor: torch.Tensor) -> np.ndarray | None:
        """Return which rows of the pass a tensor of the logits processor holds, None for every other module.

        The logits processor runs after the forward on some rows only. Prompt log-probs hand it a view of the model's
        output, whose offset is the first row; sampling hands it a copy of each request's last row. Both are verified
        against the remembered output, so that no row is guessed; rows that fit neither are counted and not stored.
        """
        if path != LOGITS_MODULE:
            return None
        if not slot.startswith("output"):
            self._logits_rows = self._find_rows(tensor)
        return self._logits_rows

    def end_call(self, output: Any) -> None:
        """Remember the model's output, from which the logits processor later picks rows."""
        if isinstance(output, torch.Tensor):
            self._hidden, self._hidden_copy = output, output.detach().clone()

    def _find_rows(self, hidden: torch.Tensor) -> np.ndarray:
        if self._hidden is None or self._hidden_copy is None or not len(hidden):
            return np.zeros(0, np.int64)
        candidates = [self._last_rows]
        if hidden.untyped_storage().data_ptr() == self._hidden.untyped_storage().data_ptr():
            first = (hidden.storage_offset() - self._hidden.storage_offset()) // max(self._hidden.stride(0), 1)
            candidates.insert(0, np.arange(first, first + len(hidden)))
        for rows in candidates:
            if len(rows) == len(hidden) and torch.equal(self._hidden_copy[torch.from_numpy(rows)], hidden):
                return rows
        self.logits_rows_unknown += len(hidden)
        return np.zeros(0, np.int64)

    def _grid(self, positions: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
        sequence = np.full(positions.shape, -1, np.int64)  # rows beyond the scheduled tokens are padding
        assert self.scheduled is not None
        order = [name for name in self.runner.input_batch.req_ids if name in self.scheduled]
        start, last = 0, []
        for request in order:
            stop = start + self.scheduled[request]
            sequence[start:stop] = self._number(request, int(positions[stop - 1]) + 1)
            last.append(stop - 1)
            start = stop
        self._last_rows = np.array(last, np.int64)
        token = np.full(positions.shape, -1) if ids is None else ids
        return grid_of(sequence[None], positions[None], token[None])

    def _number(self, request: str, length: int) -> int:
        stem = request.rpartition("-")[0] or request
        prompt_len = self.prompt_lens.get(stem)
        if prompt_len is None:
            prompt_len = int(self.runner.requests[request].num_prompt_tokens)
        return self.book.number(Announced(uid=request, prompt_len=prompt_len), length=length, request_id=request)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, place: int) -> torch.Tensor | None:
    value = kwargs.get(name, args[place] if len(args) > place else None)
    return value if isinstance(value, torch.Tensor) else None


def find_runner(model: Any) -> Any:
    """Return the vLLM model runner that holds ``model`` (an in-process ``LLM`` or a bare model), None for others."""
    executor = getattr(getattr(model, "llm_engine", None), "model_executor", None)
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    if worker is not None:
        return worker.model_runner
    if not type(model).__module__.startswith(("vllm.", "vllm_ascend.")):
        return None
    if hasattr(model, "llm_engine"):
        raise CaptureError(
            "this vllm.LLM runs its model in another process",
            "set VLLM_ENABLE_V1_MULTIPROCESSING=0, or use 'probe dump --stage rollout'",
        )
    # vLLM's model does not know its runner, whose batch bookkeeping says which row is which request
    candidates = (o for o in _live_objects() if type(o).__name__.endswith("ModelRunner"))
    return next((o for o in candidates if getattr(o, "model", None) is model), None)


def _live_objects() -> list[Any]:
    """Return what the garbage collector tracks, with what vLLM has frozen to spare it work (its runner is there)."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        if frozen:
            gc.freeze()


def record_schedule(runner: Any, adapter: VllmAdapter) -> Callable[[], None]:
    """Let the adapter know which requests each ``execute_model`` serves, and none outside it; return the undo."""
    original = runner.execute_model

    @functools.wraps(original)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        adapter.scheduled = dict(scheduler_output.num_scheduled_tokens)
        try:
            return original(scheduler_output, *args, **kwargs)
        finally:
            adapter.scheduled = None

    runner.execute_model = execute_model
    return functools.partial(setattr, runner, "execute_model", original)
