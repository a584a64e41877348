"""Token figures by group: by position, rollout probability, token id, training step and sequence; tails; the grid.

Everything is a numpy reduction over the flat batch, so that a million tokens take tenths of a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.text import Decoder
from probe.logprobs import prob_diff_metrics, token_metrics

MAX_POSITIONS = 512
"""Entries of ``by_position``; longer responses are cut into equal bins of positions."""

MAX_TOKENS = 50
"""Entries of ``by_token``: the ids with the largest summed |D|."""

MAX_STEPS = 1000
"""Entries of ``by_step``: the latest steps."""

PROBABILITY_EDGES = (0.0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
"""Edges of the bins of the rollout's probability; each but the last excludes its upper edge. They are narrow at both
ends: low-probability tokens carry most of a mismatch, and most tokens are near certain."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}

STEP_FIGURES = (
    *("mean_abs_logprob_diff", "max_prob_diff", "mean_prob_diff", "std_prob_diff"),
    *("pearson", "k3"),
)
GROUP_FIGURES = ("mean_abs", "max_abs", "mean_prob_diff", "max_prob_diff")


def gaps(batch: TokenBatch) -> np.ndarray | None:
    """Return |D| of each token, float64 [N]; None where only the probability differences are known."""
    return None if batch.a is None or batch.b is None else np.abs(batch.b - batch.a)


def quantiles(values: np.ndarray | None) -> dict[str, float] | None:
    """Return the QUANTILES of values, float [N], linear between order statistics; None without values."""
    if values is None or not len(values):
        return None
    return dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values())).tolist()))


def largest(size: np.ndarray, count: int) -> np.ndarray:
    """Return the numbers of the ``count`` largest of ``size``, float [N], the largest first, equal ones in their order.

    O(N): only the ones that are returned are sorted.
    """
    at = np.arange(len(size))
    if 0 < count < len(size):
        least = np.partition(size, len(size) - count)[len(size) - count]
        above = np.flatnonzero(size > least)
        at = np.concatenate([above, np.flatnonzero(size == least)[: count - len(above)]])
    return np.asarray(at[np.lexsort((at, -size[at]))][:count])


def grouped(gap: np.ndarray | None, prob_diff: np.ndarray, group: np.ndarray, groups: int) -> dict[str, list[Any]]:
    """Return ``count`` and the GROUP_FIGURES of each group of tokens, as columns of length ``groups``.

    ``gap`` (|D|, None where unknown) and ``prob_diff``: float [n]; ``group``: int64 [n], each token's group. Figures of
    a group without tokens are None.
    """
    count = np.bincount(group, minlength=groups)
    columns: dict[str, list[Any]] = {"count": count.tolist()}
    for values, mean, top in ((gap, *GROUP_FIGURES[:2]), (prob_diff, *GROUP_FIGURES[2:])):
        if values is None:
            columns |= {mean: [None] * groups, top: [None] * groups}
            continue
        means = np.bincount(group, values, groups) / np.maximum(count, 1)
        largest = np.zeros(groups)
        np.maximum.at(largest, group, values)
        for name, figures in ((mean, means), (top, largest)):
            columns[name] = [figure if number else None for figure, number in zip(figures.tolist(), count.tolist())]
    return columns


def _entries(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def by_position(batch: TokenBatch) -> tuple[list[dict[str, Any]], int]:
    """Return the figures per place in the response, and how many places each entry covers.

    ``position`` and ``last`` (both inclusive) are the places of an entry; those without a token are left out.
    """
    length = int(batch.position.max(initial=-1)) + 1
    size = max(1, -(-length // MAX_POSITIONS))
    bins = -(-length // size)
    columns = grouped(gaps(batch), batch.prob_diff, batch.position // size, bins)
    first = [number * size for number in range(bins)]
    last = [min(start + size, length) - 1 for start in first]
    return [entry for entry in _entries({"position": first, "last": last, **columns}) if entry["count"]], size


def by_probability(batch: TokenBatch) -> list[dict[str, Any]]:
    """Return the figures per bin of the rollout's probability exp(a), and each bin's share of the summed |D|.

    A probability above 1 (a log-prob rounded upwards) counts as 1. The share is None where all |D| are 0.
    """
    gap = gaps(batch)
    if batch.a is None or gap is None or not len(batch):
        return []
    bins = len(PROBABILITY_EDGES) - 1
    group = np.searchsorted(np.array(PROBABILITY_EDGES[1:-1]), np.exp(batch.a), side="right")
    sums = np.bincount(group, gap, bins)
    edges = {"low": list(PROBABILITY_EDGES[:-1]), "high": list(PROBABILITY_EDGES[1:])}
    return _entries({**edges, **grouped(gap, batch.prob_diff, group, bins), "share": _shares(sums)})


def _shares(sums: np.ndarray) -> list[float | None]:
    total = float(sums.sum())
    return (sums / total).tolist() if total else [None] * len(sums)


def by_token(batch: TokenBatch, decode: Decoder | None) -> tuple[list[dict[str, Any]], int]:
    """Return the figures of the MAX_TOKENS token ids with the largest summed |D|, and how many other ids differ.

    The largest come first; ids that never differ and tokens of unknown id are in neither.
    """
    gap = gaps(batch)
    if gap is None:
        return [], 0
    ids, group = np.unique(batch.token, return_inverse=True)
    sums = np.bincount(group, gap, len(ids))
    order = np.lexsort((ids, -sums))
    order = order[(sums[order] > 0) & (ids[order] >= 0)]
    kept = order[:MAX_TOKENS]
    place = np.full(len(ids), -1)
    place[kept] = np.arange(len(kept))
    inside = place[group] >= 0
    columns = grouped(gap[inside], batch.prob_diff[inside], place[group][inside], len(kept))
    names = {"token": ids[kept].tolist(), "text": [decode([int(i)]) if decode else None for i in ids[kept]]}
    share = (sums[kept] / sums.sum()).tolist()  # of ids that differ: the sum is above 0
    entries = _entries({**names, **columns, "sum_abs": sums[kept].tolist(), "share": share})
    return entries, len(order) - len(kept)


def by_step(batch: TokenBatch) -> tuple[list[dict[str, Any]], int]:
    """Return the STEP_FIGURES per training step in rising order, and how many earlier steps were left out.

    Sequences of an unknown step (-1) are in none. A step of which no token was compared has None for every figure.
    """
    known = np.unique(batch.step[batch.step >= 0])
    kept = known[-MAX_STEPS:]
    step = batch.step[batch.sequence] if len(batch) else batch.step[:0]
    order = np.argsort(step, kind="stable")
    starts = np.searchsorted(step[order], kept, "left")
    ends = np.searchsorted(step[order], kept, "right")
    entries = []
    for number, start, end in zip(kept.tolist(), starts, ends):
        counts = {"sequences": int((batch.step == number).sum()), "compared": int(end - start)}
        entries.append({"step": number, **counts, **_step_figures(batch, order[start:end])})
    return entries, len(known) - len(kept)


def _step_figures(batch: TokenBatch, at: np.ndarray) -> dict[str, Any]:
    figures: dict[str, Any] = dict.fromkeys(STEP_FIGURES)
    if len(at):
        known = prob_diff_metrics(batch.prob_diff[at])
        if batch.a is not None and batch.b is not None:
            known |= token_metrics(batch.a[at], batch.b[at])
        figures |= {name: known[name] for name in STEP_FIGURES if name in known}
    return figures


def grid(batch: TokenBatch, samples: int, positions: int) -> dict[str, Any]:
    """Return |p - q| of the first ``samples`` sequences x ``positions`` places, None where no token was compared.

    The same cells that the monitor in training logs as ``training/rollout_probs_diff/s{S}_p{PPPP}``.
    """
    rows, columns = min(samples, len(batch.labels)), min(positions, batch.width)
    values: list[list[float | None]] = [[None] * columns for _ in range(rows)]
    inside = np.flatnonzero((batch.sequence < rows) & (batch.position < columns))
    for row, column, value in zip(
        batch.sequence[inside].tolist(), batch.position[inside].tolist(), batch.prob_diff[inside].tolist()
    ):
        values[row][column] = value
    return {"labels": batch.labels[:rows], "positions": list(range(columns)), "values": values}
