"""Listen to a vLLM model runner: which requests each pass serves, and when its weights are replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from probe.hooks.engines.vllm import VllmAdapter


def record_schedule(runner: Any, adapter: VllmAdapter) -> Callable[[], None]:
    """Let the adapter know which requests each ``execute_model`` serves, and of every weight load; return the undo."""
    model = runner.get_model() if hasattr(runner, "get_model") else runner.model
    undo = [_wrap(runner, "execute_model", functools.partial(_announcing, adapter))]
    for owner, name in ((model, "load_weights"), (runner, "reload_weights")):
        if hasattr(owner, name):
            undo.append(_wrap(owner, name, functools.partial(_marking, adapter)))

    def restore() -> None:
        for step in undo:
            step()

    return restore


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Wrap one bound method of one object and return the undo."""
    own = vars(owner).get(name)
    setattr(owner, name, wrapper(getattr(owner, name)))
    return functools.partial(setattr, owner, name, own) if own is not None else functools.partial(delattr, owner, name)


def _announcing(adapter: VllmAdapter, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        started = {r.req_id: int(r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs}
        adapter.begin_pass(dict(scheduler_output.num_scheduled_tokens), started)
        try:
            return original(scheduler_output, *args, **kwargs)
        finally:
            adapter.end_pass()

    return execute_model


def _marking(adapter: VllmAdapter, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        adapter.weights_changed = True
        return original(*args, **kwargs)

    return load
