"""Sketches of a vLLM model's parameters as they were loaded: before the engine repacks them, and after every update.

After loading, fused linears are empty on a CPU and reordered on other devices. So every way in which weights arrive is
met just before vLLM turns them into its kernels' format: the whole model after a load or a trainer's update, or one
layer at a time while weights are reloaded. Weights written without any of these are sketched where they lie, if the
engine left them as loaded; else they are listed as unavailable, never as equal.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from probe.hooks.engines.vllm_parallel import weight_split
from probe.hooks.parameters import parameter_values
from probe.hooks.taps import wrap_method
from probe.hooks.weights import sketch, sketches, unavailable
from probe.settings import weights_settings
from probe.store.schema import StoredParameter, WeightSketch

log = logging.getLogger("probe")

LOADERS = "vllm.model_executor.model_loader."
WHOLE_MODEL = (LOADERS + "utils", LOADERS + "base_loader")
"""Modules that name the function which repacks a whole model: where it is defined, and where it was imported."""
LAYERWISE = LOADERS + "reload.layerwise"


@dataclass
class LoadedWeights:
    """What is known of one model's parameters.

    ``kept`` names those that repacking left as they were; ``outdated`` says that weights were written since the
    sketches were made.
    """

    sketches: dict[str, WeightSketch] = field(default_factory=dict)
    values: list[tuple[StoredParameter, np.ndarray]] = field(default_factory=list)
    kept: frozenset[str] = frozenset()
    outdated: bool = False


_models: WeakKeyDictionary[torch.nn.Module, LoadedWeights] = WeakKeyDictionary()
_layers: WeakKeyDictionary[torch.nn.Module, dict[str, WeightSketch]] = WeakKeyDictionary()
"""Layers that were reloaded since their model was last asked for -> sketches by the parameter's own name."""
_wanted: Callable[[], bool] = lambda: True  # noqa: E731
_keeps_values = True


def sketch_before_repacking(wanted: Callable[[], bool] | None = None) -> None:
    """Make vLLM's loaders sketch every parameter just before they repack it; calling it again changes nothing more.

    ``wanted`` tells, each time that weights arrive, whether sketches will be asked for at all: they take a pass over
    the weights. Where it is given, nobody asks for copies of the parameters (:func:`loaded_values`).
    """
    global _wanted, _keeps_values
    if wanted is not None:
        _wanted, _keeps_values = wanted, False
    for name in WHOLE_MODEL:
        _patch(name, "process_weights_after_loading", _sketching)
    _patch(LAYERWISE, "_layerwise_process", _sketching_layer)


def _patch(module: str, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    try:
        home = importlib.import_module(module)
    except ImportError:  # versions of vLLM that have no such way to load
        return
    original = getattr(home, name, None)
    if original is not None and not getattr(original, "sketches_first", False):
        patched = wrapper(original)
        patched.sketches_first = True  # type: ignore[attr-defined]
        setattr(home, name, patched)


def _sketching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_weights_after_loading(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _attempt(_take, model)
        result = original(model, *args, **kwargs)
        if before is not None:
            _attempt(_note_kept, model, before)
        return result

    return process_weights_after_loading


def _sketching_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _layerwise_process(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        method: Any = getattr(layer, "quant_method", None)
        if not _wanted() or not hasattr(method, "process_weights_after_loading"):
            result = original(layer, *args, **kwargs)
            if _wanted():
                _attempt(_take_layer, layer)  # nothing repacks it
            return result

        def first(repack: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(repack)
            def process_weights_after_loading(*args: Any, **kwargs: Any) -> Any:
                _attempt(_take_layer, layer)
                return repack(*args, **kwargs)

            return process_weights_after_loading

        undo = wrap_method(method, "process_weights_after_loading", first)
        try:
            return original(layer, *args, **kwargs)
        finally:
            undo()

    return _layerwise_process


def _attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns; None, with a warning, where it fails: weights must load all the same."""
    try:
        return function(*args)
    except Exception as error:  # whatever a model's parameters may be
        log.warning("the weights of vLLM's model could not be sketched (%s: %s)", type(error).__name__, error)
        return None


Held = dict[str, tuple[Any, ...]]


def _take(model: torch.nn.Module) -> Held | None:
    """Sketch a model whose weights have just arrived; return where they lie."""
    known = _models.setdefault(model, LoadedWeights())
    if not _wanted():
        known.outdated = True
        return None
    for module in model.modules():
        _layers.pop(module, None)
    known.sketches = {weight.name: weight for weight in sketches(model, weight_split)}
    known.values = list(parameter_values(model, weight_split, weights_settings())) if _keeps_values else []
    known.outdated = False
    return _held(model)


def _note_kept(model: torch.nn.Module, before: Held) -> None:
    after = _held(model)
    _models[model].kept = frozenset(name for name, where in before.items() if after.get(name) == where)


def _held(model: torch.nn.Module) -> Held:
    """Return, per parameter, what changes when it is replaced, moved, reordered or written to."""
    return {
        name: (p.data_ptr(), p.shape, p.stride(), p.dtype, 0 if p.is_inference() else p._version)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def _take_layer(layer: torch.nn.Module) -> None:
    found = {
        leaf: sketch(leaf, parameter, *weight_split(leaf, parameter, layer))
        for leaf, parameter in layer.named_parameters(recurse=False)
        if parameter.numel() and parameter.device.type != "meta"
    }
    if found:
        _layers[layer] = found


def mark_outdated(model: torch.nn.Module) -> None:
    """Note that a model's weights are being written, in whatever way."""
    _models.setdefault(model, LoadedWeights()).outdated = True


def loaded_sketches(model: torch.nn.Module) -> Iterator[WeightSketch]:
    """Yield the sketch of every parameter as it was last loaded; without rows where that can no longer be known."""
    known = _models.get(model)
    if known is None:
        yield from sketches(model, weight_split)
        return
    reloaded = {
        f"{path}.{leaf}".lstrip("."): weight
        for path, module in model.named_modules()
        for leaf, weight in _layers.pop(module, {}).items()
    }
    if known.outdated:
        live = {weight.name: weight for weight in sketches(model, weight_split)}
        for name, old in known.sketches.items():
            if not old.alias and name not in reloaded:
                kept = name in known.kept and name in live
                known.sketches[name] = live[name] if kept else unavailable(name, old.shape, old.dtype, old.axis)
        if not known.sketches:  # nothing was sketched when they were loaded
            known.sketches = {n: unavailable(n, weight.shape, weight.dtype, weight.axis) for n, weight in live.items()}
        known.outdated = False
    known.sketches |= {name: replace(weight, name=name) for name, weight in reloaded.items()}
    yield from known.sketches.values()


def loaded_values(model: torch.nn.Module) -> list[tuple[StoredParameter, np.ndarray]]:
    """Return copies of the parameters where ``PROBE_WEIGHTS=layers`` asks for them, once."""
    known = _models.get(model)
    if known is None:
        return []
    values, known.values = known.values, []
    return values
