"""Run the prompts of a forward alone, before the forward itself, where a model is not causal and PROMPTS_ONLY asks.

A rollout engine's prefill has seen the prompt alone, a trainer's forward the response too. For a causal model the rows
of the prompt are the same; for others (:mod:`probe.hooks.causality`) only a forward of the prompts gives them. It runs
under no_grad with the job's mode and autocast, on the same batch cut behind its longest prompt, and leaves no trace:
random states, and whatever the modules hold, are put back. The job's own forward then runs without hooks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probe.hooks.attach import world_size
from probe.hooks.causality import not_causal, text_config
from probe.hooks.engines.transformers import bind_arguments
from probe.hooks.jobs.log import note, trouble
from probe.hooks.jobs.recorder import Recorder
from probe.hooks.rows import CallRows
from probe.hooks.wrappers import unwrap

SLICE, SHADOW = "slice", "shadow"
"""How prompt rows came: cut from a forward of the whole sequence, or from one of the prompts alone."""
MASK = "attention_mask"
DROPPED = (
    *("labels", "shift_labels", "num_items_in_batch", "return_loss"),
    *("past_key_values", "cache_position", "cache_params", "use_cache"),
)
"""Arguments that a forward of the prompts does without: what losses are made of, and caches, which it would fill."""
WHOLE = ("pixel_", "image_", "video_", "audio_", "input_features", "feature_attention_mask")
"""How arguments begin that have no axis of tokens: what a prompt shows beside its text."""
KEPT = ("logits_to_keep", "num_logits_to_keep")
"""Arguments that say of which positions logits are made: those of one suffice where the job does not want all."""
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "packed_seq_params")
"""Arguments that say that a row of the batch holds several sequences."""
HOOK_HOMES = ("probe", "torch", "torch_npu", "transformers", "accelerate", "peft")
"""Packages whose forward hooks compute a part of the forward (shards, offloading, casts) and may run in a shadow.
Whatever else hangs on a model is the user's, and nobody knows what a second call of it changes."""
ELSEWHERE = {
    **dict.fromkeys(
        ("megatron", "mindspeed"), "Megatron schedules the stages of its pipeline and the parts of a sequence itself"
    ),
    "transformer_engine": "TransformerEngine keeps amax histories outside of its modules",
    "deepspeed": "DeepSpeed's modules keep state of their own",
}
"""Packages of modules that cannot be run alone, or whose state cannot be put back -> why."""
NOT_STATE = ("_parameters", "_modules")
"""Attributes of a module that a forward under no_grad leaves alone."""
DEPTH = 3
"""How deep the containers that modules hold are looked into."""


# -- a call ------------------------------------------------------------------------------------------------------------


def run_prompts(
    recorder: Recorder, call: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallRows | None:
    """Run a shadow of the forward ``call(*args, **kwargs)`` of ``model`` that is about to run, if it needs one.

    Return the forward's own rows where it did: no hook is left to see them. None where the forward itself is recorded,
    because its model is causal, or because no shadow is safe, which the manifest and activation.log say.
    """
    adapter = recorder.adapter
    inner = unwrap(getattr(model, "_orig_mod", model))
    if adapter is None or not recorder.session.settings.prompts_only:
        return None
    said = "is_causal=False" if kwargs.get("is_causal") is False else not_causal(inner)
    if not said:
        return None
    named = bind_arguments(model, args, kwargs)
    reason = _together(recorder) or _unsafe(model, named)
    if not reason:
        adapter.known = rows = adapter.begin_call(inner, (), named)
        shadow = _Shadow(inner, named, rows, adapter.book.sequences)
        reason = shadow.reason
    if reason:
        own_forward(recorder, inner, reason, said)
        return None
    _state_how(recorder, said, SHADOW)
    note(f"{recorder.stage}: {said}: the prompts of a forward are run alone before it, and only that is recorded")
    adapter.known = shadow.rows
    try:
        if len(shadow.rows.segment.rows):
            with undisturbed(model), torch.no_grad():
                call(**shadow.arguments)
    finally:
        recorder.flush()
    return rows


def own_forward(recorder: Recorder, model: Any, reason: str, said: str = "") -> None:
    """Say of a model (or of chunks) that is not causal that its prompt rows are of the job's own forward, and why.

    ``said``: what declares it, where that is known.
    """
    if not recorder.session.settings.prompts_only or recorder.adapter is None:
        return
    said = said or not_causal(unwrap(model[0] if isinstance(model, list | tuple) else model))
    if said:
        _state_how(recorder, said, SLICE)
        words = "prompt rows are of the full forward, which saw the responses, and not comparable with a rollout's"
        trouble(f"{recorder.stage}: {said}: {words}: {reason}")


_how: dict[Path, str] = {}
"""File -> how its prompt rows came; one slice makes it a slice."""


def _state_how(recorder: Recorder, said: str, how: str) -> None:
    file = recorder.file
    if file is not None and _how.get(file) not in (how, SLICE):
        _how[file] = how
        recorder.update_manifest(not_causal=said, prompts=how)


# -- what is run -------------------------------------------------------------------------------------------------------


@dataclass
class _Cut:
    """A batch of ``shape`` [batch, length], cut behind its longest prompt; ``seen`` (bool) are cells of prompts."""

    shape: tuple[int, int]
    end: int
    seen: np.ndarray

    def argument(self, name: str, value: Any) -> Any:
        """Return an argument of the full forward as one of the prompts; raise ValueError for one of unknown form."""
        if name in KEPT:
            return 0 if isinstance(value, int) and value == 0 else 1
        if isinstance(value, torch.Tensor):  # copies: a model may write into what it is given
            if tuple(value.shape[:2]) == self.shape:
                return value[:, : self.end].clone()
            if name == "position_ids" and value.dim() and value.shape[-1] == self.shape[1]:
                return value[..., : self.end].clone()
            if name.startswith(WHOLE) or self.shape[1] not in value.shape:
                return value.clone()
        elif isinstance(value, bool | int | float | str):
            return value
        raise ValueError(name)


class _Shadow:
    """The forward of a batch's prompts: ``arguments``, and the ``rows`` to store; or the ``reason`` why there is none.

    The batch keeps its rows and its padding on the left. Cells behind a prompt are padding; of a row without a prompt
    the first cell stays visible, for attention to nothing has no values.
    """

    def __init__(self, model: torch.nn.Module, named: dict[str, Any], rows: CallRows, sequences: list[Any]) -> None:
        self.arguments: dict[str, Any] = {}
        self.rows = rows
        grid = rows.grid
        real = grid["sequence"] >= 0
        prompt_len = np.array([sequence.prompt_len for sequence in sequences] or [0])
        mine = real & (grid["position"] < prompt_len[np.maximum(grid["sequence"], 0)])
        self.reason = _unknown_rows(grid, real, mine)
        if self.reason:
            return
        columns = np.flatnonzero(mine.any(axis=0))
        end = int(columns[-1]) + 1 if len(columns) else 1
        seen = mine[:, :end].copy()
        seen[~seen.any(axis=1), 0] = True
        try:
            self._cut(model, named, _Cut((grid.shape[0], grid.shape[1]), end, seen), real)
        except ValueError as odd:
            self.reason = f"which of its argument {odd} belongs to the prompts is not known"
            return
        cells = grid[:, :end].copy()
        for field in ("sequence", "position", "token"):
            cells[field][~mine[:, :end]] = -1
        self.rows = CallRows(cells, rows.call, rows.layouts, None if rows.keep is None else rows.keep[:, :end])

    def _cut(self, model: torch.nn.Module, named: dict[str, Any], cut: _Cut, real: np.ndarray) -> None:
        for name, value in named.items():
            if name not in DROPPED and value is not None:
                self.arguments[name] = cut.argument(name, value)
        first = next(v for v in self.arguments.values() if isinstance(v, torch.Tensor))
        seen = torch.from_numpy(cut.seen).to(first.device)
        mask = self.arguments.get(MASK)
        if mask is not None and (mask.dim() != 2 or bool((mask < 0).any())):
            raise ValueError(MASK)
        if mask is not None or not cut.seen.all():
            self.arguments[MASK] = seen.long() if mask is None else mask * seen.to(mask)
        config = text_config(model)
        pad = getattr(config, "pad_token_id", None)
        known = isinstance(pad, int) and 0 <= pad < (getattr(config, "vocab_size", None) or 0)  # some say -1
        if known and "input_ids" in self.arguments:
            ids = self.arguments["input_ids"]
            response = torch.from_numpy(real[:, : cut.end] & ~cut.seen).to(ids.device)
            self.arguments["input_ids"] = ids.masked_fill(response, pad)
        if "use_cache" in inspect.signature(model.forward).parameters:
            self.arguments["use_cache"] = False


def _unknown_rows(grid: np.ndarray, real: np.ndarray, mine: np.ndarray) -> str:
    """Return why the rows of a batch do not tell what its prompts alone would be, empty where they do."""
    for sequence, position, own in zip(grid["sequence"], grid["position"], real):
        if len(np.unique(sequence[own])) > 1:
            return "a row of its batch holds several sequences"
        if own.any() and position[own].min() > 0:
            return "it goes on with sequences over a cache"
    if (mine == real).all():
        return "nothing says where its prompts end (labels of -100 on the prompt do)"
    return ""


def _together(recorder: Recorder) -> str:
    """Return why the ranks of a job may need each other in a forward; empty where each computes its own.

    Shards, experts or parts of a sequence are exchanged in it. A shadow that failed on one rank alone (out of memory)
    would leave the others a collective ahead: the job would hang, or go on with the values of another layer.
    """
    world, outer = world_size(), recorder.model[0]
    own = isinstance(outer, torch.nn.parallel.DistributedDataParallel) and outer.process_group.size() == world
    if world == 1 or own:
        return ""
    return "its ranks may need each other in a forward, and one could fail alone (under DDP each computes its own)"


def _unsafe(model: torch.nn.Module, named: dict[str, Any]) -> str:
    """Return why a second forward of a model could change its training, or fail; empty where it cannot."""
    if any(named.get(name) is not None for name in PACKED):
        return "a row of its batch holds several sequences"
    if any(name.startswith("input") and name[5:].isdigit() for name in named):
        return "its arguments have no names"
    for module in model.modules():
        package = type(module).__module__.partition(".")[0]
        if package in ELSEWHERE:
            return ELSEWHERE[package]
        if type(module).__name__ == "FullyShardedDataParallel":
            return "FSDP1 keeps the order of forwards in its modules"
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return ELSEWHERE["deepspeed"]
    if getattr(text_config(unwrap(model)), "_attn_implementation", None) == "flex_attention":
        return "flex attention is compiled, and for other lengths anew"
    if sum(b.nbytes for b in model.buffers()) > sum(p.nbytes for p in model.parameters()):
        return "it holds more in buffers (quantized weights) than in parameters, and they would be copied"
    hook = _foreign_hook(model)
    return f"the forward hook {hook} would be called twice" if hook else ""


def _foreign_hook(model: torch.nn.Module) -> str:
    """Return the name of a forward hook that nobody in HOOK_HOMES has put on a model, empty where there is none."""
    everywhere: Any = torch.nn.modules.module
    held = [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
    held += [hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    for hook in (hook for hooks in held for hook in hooks.values()):
        while isinstance(hook, functools.partial):
            hook = hook.func
        home = getattr(hook, "__module__", None) or type(hook).__module__
        if home.partition(".")[0] not in HOOK_HOMES:
            return f"{home}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
    return ""


# -- without a trace ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Put back, at the end, random states and what the modules hold beside their parameters.

    That is buffers, tensors, numbers, and lists, dicts and sets of them. Autocast keeps no weight that it casts
    meanwhile: under no_grad the copy has no gradient, with which the job's forward would go on (pytorch issue 112583).
    """
    keepers = [_random_states(model), *(_module_keeper(module) for module in model.modules())]
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for put_back in keepers:
            put_back()


def _random_states(model: torch.nn.Module) -> Callable[[], None]:
    """Return what puts back the states of Python's, numpy's and torch's generators, on the model's devices too."""
    devices = {parameter.device for parameter in model.parameters()}
    backends: list[tuple[Any, torch.device]] = [(getattr(torch, d.type, None), d) for d in devices]
    kept = [(backend, d, backend.get_rng_state(d)) for backend, d in backends if hasattr(backend, "get_rng_state")]
    host, python, array = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def put_back() -> None:
        torch.set_rng_state(host)
        random.setstate(python)
        np.random.set_state(array)
        for backend, device, state in kept:
            backend.set_rng_state(state, device)

    return put_back


def _module_keeper(module: torch.nn.Module) -> Callable[[], None]:
    """Return what puts a module's attributes back as they are now.

    Hooks and functions that came meanwhile go; those that a recorder has taken off, failing, do not come back.
    """
    before = dict(vars(module))
    hooks = {name: set(value) for name, value in before.items() if "_hooks" in name and isinstance(value, dict)}
    state = {name: v for name, v in before.items() if name not in (*NOT_STATE, *hooks) and not callable(v)}
    keepers = [keeper for value in state.values() if (keeper := _keeper(value, DEPTH)) is not None]

    def put_back() -> None:
        now = vars(module)
        for owner, names in [(now, before.keys()), *((before[name], held) for name, held in hooks.items())]:
            for name in owner.keys() - names:
                del owner[name]
        now.update(state)
        for keeper in keepers:
            keeper()

    return put_back


def _keeper(value: Any, depth: int) -> Callable[[], None] | None:
    """Return what puts a value back as it is now, None for one that is not looked into."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, torch.Tensor):
        return _tensor_keeper(getattr(value, "_local_tensor", value))
    if not depth or not isinstance(value, dict | list | deque | set | tuple):
        return None
    items = [*value.items()] if isinstance(value, dict) else [*value]
    inside = [*value.values()] if isinstance(value, dict) else items
    keepers = [keeper for item in inside if (keeper := _keeper(item, depth - 1)) is not None]

    def put_back() -> None:
        now = [*value.items()] if isinstance(value, dict) else [*value]
        if not _same_objects(now, items):
            value.clear()  # type: ignore[union-attr]
            getattr(value, "update" if isinstance(value, dict | set) else "extend")(items)
        for keeper in keepers:
            keeper()

    return put_back


def _same_objects(now: list[Any], before: list[Any]) -> bool:
    pairs = [pair for one, two in zip(now, before) for pair in (zip(one, two) if type(one) is tuple else [(one, two)])]
    return len(now) == len(before) and all(one is two for one, two in pairs)


def _tensor_keeper(tensor: torch.Tensor) -> Callable[[], None] | None:
    if isinstance(tensor, torch.nn.Parameter) or tensor.is_meta or tensor.is_nested:
        return None
    before = tensor.detach().clone()

    def put_back() -> None:
        if tensor.shape != before.shape:
            tensor.data = before
        elif tensor.device != before.device or tensor.dtype != before.dtype or not torch.equal(tensor, before):
            tensor.data.copy_(before)

    return put_back
