"""What distribution log-probs belong to, and which of a dump's log-probs are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probe.sampling import Semantics, engine_semantics
from probe.store.reader import Dump

SOURCES = {"engine": "logprob", "recomputed": "logprob_recomputed"}


@dataclass(frozen=True)
class Sources:
    """Which log-probs each side contributes, and whether both are of one distribution."""

    a: str
    b: str
    comparable: bool


def choose_sources(a: Dump, b: Dump) -> Sources | None:
    """Return the log-probs to compare: the engine's where stored, both recomputed where those mean different things.

    None when a side has no log-prob of a response token.
    """
    stored = [{name for name, column in SOURCES.items() if _any(d, column)} for d in (a, b)]
    if not all(stored):
        return None
    first, second = ("engine" if "engine" in names else "recomputed" for names in stored)
    meanings = {
        (engine_semantics(d.manifest) if name == "engine" else Semantics()) for d, name in ((a, first), (b, second))
    }
    if len(meanings) > 1 and all("recomputed" in names for names in stored):
        return Sources("recomputed", "recomputed", True)
    return Sources(first, second, len(meanings) == 1)


def _any(dump: Dump, column: str) -> bool:
    """Tell whether a dump has log-probs of response tokens; of any where it does not know where prompts end."""
    response = dump.tokens["response"]
    return bool(np.isfinite(dump.tokens[column][response if response.any() else slice(None)]).any())
