"""vLLM: concatenated tokens of many requests per pass, told apart by the scheduler's own bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from probe.errors import CaptureError
from probe.hooks.engines import vllm_moe
from probe.hooks.engines.base import EngineAdapter
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.vllm_parallel import RankPlace, ShardMap, weight_split
from probe.hooks.engines.vllm_requests import Piece
from probe.hooks.rows import Announced, CallRows, grid_of

LOGITS_MODULE = "logits_processor"


class VllmAdapter(EngineAdapter):
    """Rows of a vLLM model runner's passes.

    A pass concatenates the scheduled tokens of each request in the order of the runner's input batch. A row's request
    follows from ``num_scheduled_tokens`` and its position from ``num_computed_tokens``, not from the ``positions``
    argument, in which the tokens of an image share a position (M-RoPE). Passes outside ``execute_model`` (profiling,
    warm-up, graph capture) serve no request and are not captured.
    """

    name = "vllm"
    layouts = ("flat", "bs")
    logits = (LOGITS_MODULE, "output.0")
    runs_after_forward = True

    def __init__(
        self,
        book: SequenceBook,
        runner: Any,
        *,
        prompts_only: bool = False,
        prompt_lens: dict[str, int] | None = None,
        place: RankPlace | None = None,
    ) -> None:
        super().__init__(book, prompts_only=prompts_only)
        self.runner = runner
        self.prompt_lens = prompt_lens or {}
        self.shards = ShardMap()
        if place is not None:
            self.tp_rank, self.tp_size = place.coordinates["tp"], place.topology["tp"]
        self.scheduled: dict[str, int] | None = None
        self.started: dict[str, int] = {}
        self.weight_version = 0
        self.weights_changed = False
        self.logits_rows_unknown = self.passes_unknown = 0
        self.tokens: dict[str, list[int]] = {}
        self._pieces: dict[str, Piece] = {}
        self._given: dict[str, Piece] = {}
        self._stops: dict[str, int] = {}
        self._last_rows: np.ndarray = np.zeros(0, np.int64)
        self._logits_rows: np.ndarray = np.zeros(0, np.int64)
        self._hidden: torch.Tensor | None = None
        self._hidden_copy: torch.Tensor | None = None

    # -- which part of a tensor this rank holds -----------------------------------------------------------------------

    def module_path(self, path: str, module: torch.nn.Module) -> str | None:
        """Return the module's path; None for containers and for layers that another pipeline stage holds."""
        self.shards.modules[path] = module
        return None if type(module).__name__.endswith("PPMissingLayer") else super().module_path(path, module)

    def shard_of(self, path: str, slot: str) -> str:
        """Return how a tensor lies over the tensor-parallel ranks (:data:`probe.store.schema.SHARDS`)."""
        if self.tp_size == 1:
            return ""
        return vllm_moe.shard_of(self.shards.modules.get(path), slot) or self.shards.lies(path, slot)

    def taps(self, path: str, module: torch.nn.Module) -> dict[str, str]:
        """Return the methods of fused experts whose results pass through no module."""
        return vllm_moe.taps(module)

    def weight_split(self, name: str, parameter: torch.Tensor, module: torch.nn.Module) -> tuple[int, int]:
        """Return how the tensor-parallel ranks share a parameter (:func:`vllm_parallel.weight_split`)."""
        return weight_split(name, parameter, module)

    # -- what the scheduler says --------------------------------------------------------------------------------------

    def begin_pass(
        self, scheduled: dict[str, int], started: dict[str, int], pieces: dict[str, Piece] | None = None
    ) -> None:
        """Note which requests the next forward serves, with how many tokens each.

        ``started`` holds those scheduled for the first time and how many of their tokens came from the prefix cache.
        ``pieces`` names the sequences where the caller follows requests itself; else any number of weight loads
        between two passes is one weight update.
        """
        self.scheduled, self.started, self._given = scheduled, started, pieces or {}
        if scheduled and self.weights_changed:
            self.weight_version, self.weights_changed = self.weight_version + 1, False

    def end_pass(self) -> None:
        """Note that the forward is over: what runs until the next pass serves no request."""
        self.scheduled = None

    def forget(self, requests: Iterable[str]) -> None:
        """Drop what is known of requests that have ended."""
        for request in requests:
            self._stops.pop(request, None)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def begin_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRows | None:
        """Return the rows of this pass, or None for a pass that serves no real request."""
        self._hidden = self._hidden_copy = None
        if not self.scheduled or self._is_idle():
            return None
        positions = _argument(args, kwargs, "positions", 1)
        if positions is None:
            raise CaptureError("this vLLM model takes no 'positions', so its rows cannot be told apart")
        ids = _argument(args, kwargs, "input_ids", 0)
        grid = self._grid(positions.shape[-1], self._ids() if ids is None else ids.cpu().numpy())
        known = grid["sequence"][0] >= 0
        if positions.dim() == 1 and (positions.cpu().numpy()[known] != grid["position"][0][known]).any():
            self.passes_unknown += 1
            return None
        return self.rows_of_call(grid)

    def _is_idle(self) -> bool:
        """Tell whether the budget takes no row of this pass.

        Only where the caller follows requests itself: else every row's id is noted.
        """
        if self.budget is None or not self._given or self.scheduled is None:
            return False
        if not self.scheduled.keys() <= self._given.keys():
            return False
        batch = self.runner.input_batch
        firsts = {name: int(batch.num_computed_tokens_cpu[batch.req_id_to_index[name]]) for name in self.scheduled}
        return self.takes_no_row((self._given[name], firsts[name], count) for name, count in self.scheduled.items())

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
            return np.full(len(hidden), -1)
        candidates = [self._last_rows]
        if hidden.untyped_storage().data_ptr() == self._hidden.untyped_storage().data_ptr():
            first = (hidden.storage_offset() - self._hidden.storage_offset()) // max(self._hidden.stride(0), 1)
            candidates.insert(0, np.arange(first, first + len(hidden)))
        for rows in candidates:
            if len(rows) == len(hidden) and torch.equal(self._hidden_copy[torch.from_numpy(rows)], hidden):
                return rows
        self.logits_rows_unknown += len(hidden)
        return np.full(len(hidden), -1)

    def _ids(self) -> np.ndarray:
        """Return the token ids of a pass that is given embeddings instead: the runner keeps them beside."""
        ids: torch.Tensor = self.runner.input_ids.gpu
        return ids.cpu().numpy()

    def _grid(self, count: int, ids: np.ndarray) -> np.ndarray:
        # rows beyond the scheduled tokens are padding
        sequence, position, token = np.full(count, -1, np.int64), np.zeros(count, np.int64), np.full(count, -1)
        assert self.scheduled is not None
        batch = self.runner.input_batch
        start, last = 0, []
        for request in batch.req_ids:
            index, wanted = batch.req_id_to_index[request], self.scheduled[request]
            rows = slice(start, start + wanted)
            first = int(batch.num_computed_tokens_cpu[index])
            token[rows] = ids[rows]
            if getattr(self.runner, "enable_prompt_embeds", False):
                token[rows][~batch.is_token_ids[index, first : first + wanted]] = -1
            position[rows] = np.arange(first, first + wanted)
            real = wanted - self._past_stop(request, token[rows], first)
            if real:
                sequence[start : start + real] = self._number(request, index, token[start : start + real], first)
            start += wanted
            last.append(start - 1)
        self._last_rows = np.array(last, np.int64)
        return grid_of(sequence[None], position[None], token[None])

    def _past_stop(self, request: str, token: np.ndarray, first: int) -> int:
        """Return how many trailing rows a request that had ended ran, because it was scheduled before that was known.

        An engine that knows (no async scheduling) never feeds the token with which a request stops.
        """
        state = self.runner.requests[request]
        if request in self.started or first < self._stops.get(request, -1):
            self._stops.pop(request, None)  # the id is used again, or the request was set back before its stop
        params = getattr(state, "sampling_params", None)
        stops = [getattr(params, "eos_token_id", None), *(getattr(params, "stop_token_ids", None) or ())]
        own = np.arange(first, first + len(token)) >= int(state.num_prompt_tokens)
        found = np.flatnonzero(own & np.isin(token, [t for t in stops if t is not None]))
        if len(found):
            self._stops.setdefault(request, first + int(found[0]))
        return len(token) - min(len(token), max(0, self._stops.get(request, first + len(token)) - first))

    def _number(self, request: str, index: int, token: np.ndarray, first: int) -> int:
        """Return the number of the sequence to which a request's rows belong, and note its tokens."""
        piece = self._given.get(request) or self._piece(request)
        if not self._given:  # else the caller knows them
            self._note_tokens(piece.uid, index, token, first)
        announced = Announced(piece.uid, piece.prompt_len, sample=piece.sample, trajectory=request)
        announced.tokens = piece.prompt or None
        return self.book.number(
            announced,
            length=first + len(token),
            request_id=piece.uid,
            weight_version=piece.version,
            cached=self.started.get(request, 0),
        )

    def _piece(self, request: str) -> Piece:
        piece, state = self._pieces.get(request), self.runner.requests[request]
        prompt_len = self.prompt_lens.get(request.rpartition("-")[0] or request, int(state.num_prompt_tokens))
        fresh = request in self.started
        if piece is None:
            piece = Piece(request, 0, self.weight_version)
        elif fresh or piece.version != self.weight_version:  # an id used again, or new weights within the request
            piece = Piece(f"{request}#{piece.number + 1}", piece.number + 1, self.weight_version)
        if piece.number and not fresh:
            prompt_len = max(prompt_len, int(state.num_tokens))  # what older weights generated is this one's prompt
        piece.prompt_len = prompt_len
        self._pieces[request] = piece
        return piece

    def known_tokens(self) -> dict[str, list[int]]:
        """Return the token ids of every sequence by uid, as far as rows are recorded."""
        if not self.prompts_only:
            return self.tokens
        return {s.uid: self.tokens[s.uid][: s.prompt_len] for s in self.book.sequences}

    def _note_tokens(self, uid: str, index: int, token: np.ndarray, first: int) -> None:
        """Keep a sequence's ids: rows cannot give those of a cached prefix, nor of an earlier weight version."""
        if uid not in self.tokens:
            self.tokens[uid] = self.runner.input_batch.token_ids_cpu[index, :first].tolist()
        self.tokens[uid][first:] = token.tolist()


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, place: int) -> torch.Tensor | None:
    value = kwargs.get(name, args[place] if len(args) > place else None)
    return value if isinstance(value, torch.Tensor) else None
