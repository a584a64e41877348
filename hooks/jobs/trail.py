"""Ids and log-probs of a pass's sequences, gathered from each forward's rows and logits: no hook is needed for them."""

from __future__ import annotations

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
    """The sequences of one pass, by their number in the recorder's file."""

    def __init__(self) -> None:
        self.traces: dict[int, Trace] = {}

    def add(self, rows: CallRows, logits: torch.Tensor | None) -> None:
        """Take on a forward: its rows [batch, position], its logits [batch, position or last ones, vocabulary]."""
        grid = rows.grid
        batch, length = grid.shape
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

    def finish(self, sequences: torch.Tensor | None, order: list[int], stops: frozenset[int]) -> None:
        """Score the last token of each sequence, which no forward was given: the last column of ``sequences``.

        ``order`` lists the traces by row of the batch; one that had ended before (with one of ``stops``) got padding.
        """
        for row, number in enumerate(order[: 0 if sequences is None else len(sequences)]):
            trace = self.traces.get(number)
            if trace is None or trace.last is None or sequences is None:
                continue
            known = trace.tokens()
            if trace.last[0] + 1 == len(known) and known[-1] not in stops:
                trace.ids[len(known)] = int(sequences[row, -1])
                self._score(trace, trace.ids[len(known)])

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


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """Return the log-prob of each token [n] under its logits [n, vocabulary]; NaN for an id outside of it."""
    wide = logits.to(torch.float64 if logits.device.type in FLOAT64_DEVICES else torch.float32)
    known = (tokens >= 0) & (tokens < wide.shape[1])
    chosen = wide.gather(1, tokens.clamp(0, wide.shape[1] - 1).to(wide.device)[:, None])[:, 0]
    found = (chosen - torch.logsumexp(wide, 1)).to("cpu", torch.float64)
    return torch.where(known, found, torch.full_like(found, torch.nan)).tolist()
