"""One call of a model's ``generate``: whether its rows can be followed, and the sequences that come of it."""

from __future__ import annotations

from typing import Any

import torch

from probe.hooks.jobs.log import trouble
from probe.hooks.jobs.recorder import Recorder
from probe.hooks.jobs.trail import Trail
from probe.hooks.rows import CallRows

UNFOLLOWED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "guidance_scale": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_model": (None,),
    "token_healing": (None, False),
}
"""Settings of ``generate`` -> the values with which each row of its batch goes on with its own sequence. With others it
swaps rows, or runs the model on further ones in between."""


class Generation:
    """A ``generate`` that runs: the recorder that its first forward begins, and what the forwards showed.

    ``asked``: that first forward was seen. ``compiled``: the decode steps run compiled, out of sight.
    """

    def __init__(self, model: Any, stops: frozenset[int]) -> None:
        self.model = model
        self.recorder: Recorder | None = None
        self.stops = stops
        self.trail = Trail()
        self.asked = self.compiled = False
        self._order: list[int] = []

    def add(self, rows: CallRows, logits: torch.Tensor | None) -> None:
        """Take on a forward; the first one says in which row of the batch each sequence is."""
        if not self.trail.width:
            self._order = rows.grid["sequence"].max(axis=1).tolist()
        self.trail.add(rows, logits)

    def store(self, output: Any) -> None:
        """Store the sequences, each up to the token with which it stopped; ``output`` is what ``generate`` returned."""
        recorder = self.recorder
        if recorder is None:
            return
        sequences = output if isinstance(output, torch.Tensor) else getattr(output, "sequences", None)
        if isinstance(sequences, torch.Tensor) and sequences.dim() == 2:
            missed = self.trail.finish(sequences, self._order, self.stops, recorder.prompt_len)
            if missed and not self.compiled:
                trouble("rollout: some forwards of generate were not seen; of their tokens only the ids are stored")
        for number, trace in self.trail.traces.items():
            tokens, logprobs = trace.tokens(), trace.logprobs()
            first = recorder.prompt_len(number)
            length = next((n + 1 for n in range(first, len(tokens)) if tokens[n] in self.stops), len(tokens))
            recorder.add_known(number, tokens[:length], logprobs[:length])


def stops_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """Return the ids with which a ``generate`` ends a sequence."""
    found = next((ids for ids in _given(model, args, kwargs, "eos_token_id") if ids is not None), ())
    if isinstance(found, torch.Tensor):
        found = found.reshape(-1).tolist()
    return frozenset(int(number) for number in (found if isinstance(found, list | tuple) else [found]))


def is_followed(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a ``generate`` goes on with the same sequence in each row of its batch; say it where not."""
    odd = []
    for name, plain in UNFOLLOWED.items():
        value = next((value for value in _given(model, args, kwargs, name) if value is not None), None)
        if not any(value is one or (isinstance(value, int | float) and value == one) for one in plain):
            odd.append(name)
    if odd:
        trouble(
            f"rollout: a generate with {', '.join(odd)} is not recorded: "
            "it swaps the rows of its batch, or runs the model for others in between"
        )
    return not odd


def _given(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> list[Any]:
    """Return a setting of ``generate`` as its arguments, their configuration and the model's say it, in this order."""
    own = args[1] if len(args) > 1 else kwargs.get("generation_config")
    configs = (own, getattr(model, "generation_config", None))
    return [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
