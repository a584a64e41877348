"""Own error against inherited error: how much of a tensor's difference its inputs do not explain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from probe.compare.evidence import OwnError
from probe.compare.locate.inputs import ADDS, Way, inputs_of
from probe.compare.measure import Measured
from probe.compare.names.canonical import is_routing, layer_of
from probe.metrics import PairMetrics


def own_errors(measured: Iterable[Measured]) -> dict[str, OwnError]:
    """Return canonical label -> (inherited, own) relative L2 of every tensor whose inputs were measured too.

    With e the relative L2 of the tensor and e_k, |d_k| those of its inputs:

    * inherited = sqrt(sum e_k^2) where the inputs combine (independent relative errors of factors add as squares);
      inherited = sqrt(sum |d_k|^2) / |y| where they are added up;
    * own = sqrt(max(0, e^2 - inherited^2)): the two are independent where rounding is the cause.

    Limits: a module is taken to pass a relative error on as it is, so that one that amplifies its input's error (sharp
    attention, a linear whose input lies in its weak directions) seems to have an error of its own, and one that damps
    it hides one; and terms that share an error (a stream that was off before) count as independent. It ranks modules;
    verdicts rest on noise floors and replays.
    """
    found = {m.match.label: m.metrics for m in measured if m.metrics is not None and not is_routing(m.match.label)}
    found = {label: metrics for label, metrics in found.items() if not metrics.is_bound}  # of which no share is known
    usable = {label: metrics for label, metrics in found.items() if metrics.pairs and np.isfinite(metrics.rel_l2)}
    layers = count_layers(usable)
    errors = {}
    for label, metrics in usable.items():
        way = inputs_of(label, layers, usable.__contains__)
        if way is not None:
            inherited = inherited_error(metrics, [usable[name] for name in way.inputs], way)
            errors[label] = OwnError(inherited, float(np.sqrt(max(0.0, metrics.rel_l2**2 - inherited**2))))
    return errors


def inherited_error(metrics: PairMetrics, inputs: list[PairMetrics], way: Way) -> float:
    """Return the relative L2 that a tensor's inputs explain (see :func:`own_errors`)."""
    if way.how == ADDS:
        # root mean squares, because an input may have been compared on other rows than the sum
        norm = metrics.norm_y / np.sqrt(metrics.pairs)
        return float(np.sqrt(sum(found.rmse**2 for found in inputs)) / norm) if norm else 0.0
    return float(np.sqrt(sum(found.rel_l2**2 for found in inputs)))


def count_layers(labels: Iterable[str] | Mapping[str, object]) -> int:
    """Return one more than the largest layer number among canonical labels; 0 where there is none."""
    return max((layer + 1 for layer in map(layer_of, labels) if layer is not None), default=0)
