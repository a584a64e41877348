"""SGLang: concatenated tokens of many requests per pass, told apart by the pass's own ``ForwardBatch``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from probe.errors import CaptureError
from probe.hooks.engines.base import EngineAdapter
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.sglang_runner import weight_split
from probe.hooks.engines.vllm_parallel import RankPlace, ShardMap
from probe.hooks.engines.vllm_requests import Piece
from probe.hooks.rows import Announced, CallRows, grid_of
from probe.store.schema import REPLICATED

LOGITS_MODULE, NEXT_LOGITS = "logits_processor", "output.next_token_logits"
WHOLE_INPUTS = ("input.0", "input.1")
"""What the logits processor is given for every row of the pass: the ids and the model's output."""


class SglangAdapter(EngineAdapter):
    """Rows of an SGLang model runner's passes.

    A pass concatenates the tokens of its requests in the order of ``ForwardBatch.rids``: in a decode pass one token of
    each, at the end of ``seq_lens``; else ``extend_seq_lens`` tokens from position ``extend_prefix_lens`` on. Passes
    that the scheduler did not announce (warm-up, profiling, graph capture) serve no request and are not captured.
    """

    name = "sglang"
    layouts = ("flat", "bs")
    logits = (LOGITS_MODULE, NEXT_LOGITS)

    def __init__(self, book: SequenceBook, place: RankPlace, *, prompts_only: bool = False) -> None:
        super().__init__(book, prompts_only=prompts_only)
        self.shards = ShardMap()
        self.tp_rank, self.tp_size = place.coordinates["tp"], place.topology["tp"]
        self.passes_unknown = 0
        self._pieces: dict[str, Piece] = {}
        self._last_rows: np.ndarray = np.zeros(0, np.int64)

    # -- which part of a tensor this rank holds -----------------------------------------------------------------------

    def module_path(self, path: str, module: torch.nn.Module) -> str | None:
        """Return the module's path; None for containers and for layers that another pipeline stage holds."""
        self.shards.modules[path] = module
        return None if type(module).__name__ == "PPMissingLayer" else super().module_path(path, module)

    def shard_of(self, path: str, slot: str) -> str:
        """Return how a tensor lies over the tensor-parallel ranks; SGLang gathers the logits on every rank."""
        if self.tp_size == 1:
            return ""
        return REPLICATED if path == LOGITS_MODULE else self.shards.lies(path, slot)

    def weight_split(self, name: str, parameter: torch.Tensor, module: torch.nn.Module) -> tuple[int, int]:
        """Return how the tensor-parallel ranks share a parameter (:func:`sglang_runner.weight_split`)."""
        return weight_split(name, parameter, module)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def begin_pass(self, pieces: dict[str, Piece]) -> None:
        """Note which requests the next forward serves, and the sequence of each; rows of others are not stored."""
        self._pieces = pieces

    def end_pass(self) -> None:
        """Note that the forward is over: what runs until the next pass serves no request."""
        self._pieces = {}

    def begin_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of this pass, or None for a pass that serves no request of the scheduler's."""
        if not self._pieces:
            return None
        given = (*args, *kwargs.values())
        batch = next((value for value in given if hasattr(value, "forward_mode") and hasattr(value, "rids")), None)
        if batch is None:
            raise CaptureError("this SGLang model takes no ForwardBatch, so its rows cannot be told apart")
        if batch.forward_mode.is_idle():
            return None
        firsts, counts = _spans(batch)
        self._last_rows = np.cumsum(counts) - 1
        served = zip(map(self._pieces.get, batch.rids), firsts.tolist(), counts.tolist())
        if self.takes_no_row((piece, first, count) for piece, first, count in served if piece is not None):
            return None
        grid = self._grid(batch.rids, firsts, counts, batch.input_ids.cpu().numpy())
        known = grid["sequence"][0] >= 0
        if batch.positions.shape != known.shape or (batch.positions.cpu().numpy() != grid["position"][0])[known].any():
            self.passes_unknown += 1
            return None
        return self.rows_of_call(grid)

    def _grid(self, requests: list[str], firsts: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
        # rows beyond the requests' tokens are padding
        sequence, position, token = (np.full(len(ids), -1, np.int64) for _ in range(3))
        start = 0
        for request, first, count in zip(requests, firsts.tolist(), counts.tolist()):
            rows, piece = slice(start, start + count), self._pieces.get(request)
            start += count
            if piece is None:
                continue
            position[rows], token[rows] = np.arange(first, first + count), ids[rows]
            announced = Announced(piece.uid, piece.prompt_len, sample=piece.sample, trajectory=request)
            announced.tokens = piece.prompt or None
            sequence[rows] = self.book.number(
                announced,
                length=first + count,
                request_id=piece.uid,
                weight_version=piece.version,
                cached=first if first < piece.prompt_len else 0,
            )
        return grid_of(sequence[None], position[None], token[None])

    def partial_rows(self, path: str, slot: str, tensor: torch.Tensor) -> np.ndarray | None:
        """Return which rows of the pass a tensor of the logits processor holds, None for every other module.

        Its logits are of the last token of each request. What else it returns (log-probs of prompts, cut where a
        request asks for them) is not stored: its rows are another selection.
        """
        if path != LOGITS_MODULE or slot in WHOLE_INPUTS:
            return None
        rows = self._last_rows
        return rows if slot == NEXT_LOGITS and len(rows) == len(tensor) else np.full(len(tensor), -1)


def _spans(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return each request's first position and number of tokens in a pass, int64 [requests] each."""
    if batch.forward_mode.is_decode():
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        firsts = lengths.cpu().numpy().astype(np.int64) - 1
        return firsts, np.ones_like(firsts)
    return np.array(batch.extend_prefix_lens_cpu, np.int64), np.array(batch.extend_seq_lens_cpu, np.int64)
