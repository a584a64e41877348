"""Ids and log-probs of a pass's sequences, gathered from each forward's rows and logits: no hook is needed for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from probe.hooks.rows import CallRows
from probe.hooks.weights import FLOAT64_DEVICES

CHUNK = 4 << 20
"""Logits that are widened at once."""


@dataclass
class Trace:
    """One sequence so far: its ids by position, the log-prob of each, and the logits that score the next token."""

    ids: dict[int, int] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    last: tuple[int, torch.Tensor] | None = None

    def tokens(self) -> list[int]:
        """Return the ids from the first token on, as far as they are known without a gap."""
        found: list[int] = []
        while len(found) in self.ids:
            found.append(self.ids[len(found)])
        return found

    def logprobs(self) -> list[float]:
        """Return the log-prob of each of :meth:`tokens`, NaN where no logits scored it."""
        return [self.scores.get(position, float("nan")) for position in range(len(self.tokens()))]


class Trail:
    """The sequences of one pass, by their number in the recorder's file; ``width`` is that of the first forward."""

    def __init__(self) -> None:
        self.traces: dict[int, Trace] = {}
        self.width = 0

    def add(self, rows: CallRows, logits: torch.Tensor | None) -> None:
        """Take on a forward: its rows [batch, position], its logits [batch, position or last ones, vocabulary]."""
        grid = rows.grid
        batch, length = grid.shape
        self.width = self.width or length
        if logits is not None and (logits.dim() != 3 or logits.shape[0] != batch or not 0 < logits.shape[1] <= length):
            logits = None
        for row, column in np.argwhere(grid["sequence"] >= 0).tolist():
            cell = grid[row, column]
            trace = self.traces.setdefault(int(cell["sequence"]), Trace())
            trace.ids[int(cell["position"])] = int(cell["token"])
            if trace.last is not None and trace.last[0] + 1 == int(cell["position"]):
                self._score(trace, int(cell["token"]))
        if logits is not None:
            self._score_inside(grid, logits.detach())

    def finish(
        self, sequences: torch.Tensor, order: list[int], stops: frozenset[int], prompt_len: Callable[[int], int]
    ) -> bool:
        """Take the responses from ``sequences`` [row, prompt and response], what a ``generate`` returned.

        No forward was given their last tokens, and a compiled one shows none of its own. ``order`` lists the traces by
        row of the batch; a response ends with one of ``stops`` or where the row ends, and what forwards were given
        beyond that is nobody's. Tell whether tokens are missing that some forward must have been given.
        """
        missed = False
        for row, number in zip(sequences.detach().to("cpu", torch.int64).tolist(), order):
            trace, first = self.traces.get(number), prompt_len(number)
            if trace is None or not 0 < self.width <= len(row) or trace.ids.get(first - 1) != row[self.width - 1]:
                continue  # its row holds no prompt, or another one
            response = row[self.width :]
            end = next((n + 1 for n, token in enumerate(response) if token in stops), len(response))
            for position, token in enumerate(response[:end], first):
                if position in trace.ids:
                    continue
                missed |= position + 1 < first + end
                trace.ids[position] = token
                if trace.last is not None and trace.last[0] + 1 == position:
                    self._score(trace, token)
            trace.ids = {position: token for position, token in trace.ids.items() if position < first + end}
        return missed

    def _score(self, trace: Trace, token: int) -> None:
        assert trace.last is not None
        position, logits = trace.last
        trace.last = None
        trace.scores[position + 1] = _logprobs(logits[None], torch.tensor([token]))[0]

    def _score_inside(self, grid: np.ndarray, logits: torch.Tensor) -> None:
        """Score every token whose logits are in the same forward; keep those of each sequence's last row."""
        first = grid.shape[1] - logits.shape[1]
        follows = np.zeros(grid.shape, bool)
        now, then = grid[:, :-1], grid[:, 1:]
        follows[:, :-1] = (now["sequence"] == then["sequence"]) & (now["position"] + 1 == then["position"])
        real = grid["sequence"] >= 0
        real[:, :first] = False
        at = np.argwhere(follows & real)
        step = max(1, CHUNK // logits.shape[2])
        for start in range(0, len(at), step):
            row, column = at[start : start + step].T
            scored = grid[row, column + 1]
            index = (torch.from_numpy(row).to(logits.device), torch.from_numpy(column - first).to(logits.device))
            scores = _logprobs(logits[index], torch.from_numpy(scored["token"].astype(np.int64)))
            for sequence, position, score in zip(scored["sequence"].tolist(), scored["position"].tolist(), scores):
                self.traces[sequence].scores[position] = score
        for row, column in np.argwhere(real & ~follows).tolist():
            cell = grid[row, column]
            self.traces[int(cell["sequence"])].last = int(cell["position"]), logits[row, column - first].clone()


class Continued:
    """The sequences of forwards that may be given more of them, over a cache that their caller keeps.

    They are over when a forward has none of them, or when nobody is left to go on.
    """

    def __init__(self) -> None:
        self._trail = Trail()

    def add(self, rows: CallRows, logits: torch.Tensor | None, *, may_go_on: bool) -> dict[int, Trace]:
        """Take on a forward (see :meth:`Trail.add`) and return the sequences that are over, by their number."""
        here = np.unique(rows.grid["sequence"][rows.grid["sequence"] >= 0]).tolist()
        over = {} if self._trail.traces.keys() & set(here) else self.finish()
        self._trail.add(rows, logits)
        return over if may_go_on else over | self.finish()

    def finish(self) -> dict[int, Trace]:
        """Return the sequences that were not over yet: nothing goes on with them."""
        traces, self._trail = self._trail.traces, Trail()
        return traces


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """Return the log-prob of each token [n] under its logits [n, vocabulary]; NaN for an id outside of it."""
    wide = logits.to(torch.float64 if logits.device.type in FLOAT64_DEVICES else torch.float32)
    known = (tokens >= 0) & (tokens < wide.shape[1])
    chosen = wide.gather(1, tokens.clamp(0, wide.shape[1] - 1).to(wide.device)[:, None])[:, 0]
    found = (chosen - torch.logsumexp(wide, 1)).to("cpu", torch.float64)
    return torch.where(known, found, torch.full_like(found, torch.nan)).tolist()
