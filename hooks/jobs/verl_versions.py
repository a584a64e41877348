"""Which weights an engine of verl's holds, by verl's own number of them.

``update_weights(global_steps=N)`` of a trainer's worker sends the engine's weights to the rollout as version N, and the
rollout's server stamps what it generates with the N that it was told last (:data:`VERSIONS` of a sequence). Both are
verl's word and none is counted here: where a sync that verl believes in never arrived, the numbers agree and the
weights do not, which is what a comparison has to find.
"""

from __future__ import annotations

import weakref
from typing import Any

from probe.hooks.jobs.log import trouble

VERSIONS = ("min_global_steps", "max_global_steps")
"""verl's keys of a sequence: the versions that generated its first and its last token."""
UNKNOWN = -1

_sent: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Engine -> the version under which its weights were sent last."""
_moved: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines that were updated since."""


def noting_syncs(original: Any) -> Any:
    """Wrap ``ActorRolloutRefWorker.update_weights(global_steps)``, an async method, so that the version is noted."""

    async def update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _note(self, args[0] if args else kwargs.get("global_steps"))
        except Exception as error:
            trouble(f"the version of verl's weights is not known ({type(error).__name__}: {error})")
        return await original(self, *args, **kwargs)

    return update_weights


def _note(worker: Any, version: Any) -> None:
    engine = getattr(getattr(worker, "actor", None), "engine", None)
    if engine is not None and version is not None:  # without a number the weights are sent again
        _sent[engine] = int(version)
        _moved.discard(engine)


def note_update(engine: Any) -> None:
    """Note that an engine's weights are no longer those that were sent."""
    _moved.add(engine)


def version_of(engine: Any, *, updating: bool) -> int:
    """Return the version of the weights that a pass of an engine runs with, UNKNOWN where verl has not said it.

    A trainer that updates several times between two syncs gives log-probs of the weights that it sent, which it puts
    back for that pass; its further updates (``updating``) run on weights that have no number.
    """
    if updating and engine in _moved:
        return UNKNOWN
    return _sent.get(engine, UNKNOWN)
