"""Response tokens with both sides' log-probs, flat: what every figure about tokens is computed from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from probe.compare.align import RowAligner
from probe.compare.sampling_fits import Rows
from probe.compare.tokens.join import join_tokens
from probe.compare.tokens.meaning import Semantics, choose_sources, engine_semantics
from probe.store.reader import Dump

COLUMNS = ("advantages", "returns", "values", "old_values", "ref_log_probs", "new_log_probs")
"""What else a batch may know of each token, for the PPO update: critic, reference, and the updated actor's log-prob."""


@dataclass(frozen=True)
class Origin:
    """Where one side's log-probs come from.

    ``path``: the file or folder; ``kind``: ``dump``, ``monitor``, ``npz``, ``parquet``, ``jsonl`` or ``verl-batch``;
    ``key``: the column that was read; ``meaning``: the distribution that they are declared to be of, None where nothing
    says it; ``sampled_at``: the distribution that the tokens were drawn from, None where nothing says it.
    """

    path: str
    kind: str
    key: str
    meaning: Semantics | None = None
    sampled_at: Semantics | None = None


@dataclass(frozen=True)
class NotFinite:
    """Tokens inside the mask whose log-prob is NaN or infinite on one ``side``: they are in no figure.

    ``kind``: ``nan``, ``+inf`` or ``-inf``; ``sequence`` (label) and ``position`` of the first of ``count``.
    """

    side: str
    kind: str
    count: int
    sequence: str
    position: int


@dataclass
class TokenBatch:
    """N response tokens of S sequences, sorted by (sequence, position); those outside the mask are not in it.

    ``sequence`` int64 [N] counts from 0 to S - 1; ``position`` int64 [N] is the place in the response, from 0;
    ``token`` int64 [N] is the id, -1 where unknown; ``a`` (rollout) and ``b`` (actor) float64 [N] are log-probs, all
    finite, both None where a monitor stored only their ``prob_diff`` |exp(a) - exp(b)|, float64 [N].

    Of the sequences: ``labels`` [S]; ``step`` int64 [S], -1 where unknown; ``start`` int64 [S] is the length of the
    prompt, 0 where unknown; ``valid`` int64 [S] counts the tokens inside the mask, finite or not; ``ids`` are all known
    token ids of each, the prompt's first, empty where unknown. ``width`` is the length of the longest response, padding
    included. ``columns`` (names: COLUMNS) float64 [N] are NaN where unknown. ``rows`` are logits of some of the tokens,
    of side ``rows_of``. ``lone`` counts for each side tokens of which only it has a log-prob.
    """

    sequence: np.ndarray
    position: np.ndarray
    token: np.ndarray
    prob_diff: np.ndarray
    a: np.ndarray | None
    b: np.ndarray | None
    labels: list[str]
    step: np.ndarray
    start: np.ndarray
    valid: np.ndarray
    ids: list[np.ndarray]
    width: int
    origins: tuple[Origin, Origin]
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    not_finite: list[NotFinite] = field(default_factory=list)
    rows: Rows | None = None
    rows_of: str = ""
    lone: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sequence)


def batch_of_dumps(a: Dump, b: Dump, aligner: RowAligner) -> TokenBatch | None:
    """Return the response tokens that two dumps have in common; None where a side has no log-prob of any.

    Sequences are the aligner's pairs, in its order.
    """
    sources = choose_sources(a, b)
    if sources is None:
        return None
    tokens, pairs = join_tokens(a, b, aligner, sources), aligner.join.pairs
    start = np.array([pair.prompt_len for pair in pairs], np.int64)
    place = tokens.position - start[tokens.pair] if len(tokens.pair) else np.zeros(0, np.int64)
    return TokenBatch(
        sequence=tokens.pair.astype(np.int64),
        position=place,
        token=tokens.token.astype(np.int64),
        prob_diff=np.abs(np.exp(tokens.a) - np.exp(tokens.b)),
        a=tokens.a,
        b=tokens.b,
        labels=[pair.label for pair in pairs],
        step=np.full(len(pairs), -1),
        start=start,
        valid=np.bincount(tokens.pair, minlength=len(pairs)).astype(np.int64),
        ids=[a.sequences[pair.a].tokens for pair in pairs],
        width=int(place.max(initial=-1)) + 1,
        origins=(_origin(a, sources.a), _origin(b, sources.b)),
        lone=tokens.lone,
    )


def _origin(dump: Dump, source: str) -> Origin:
    sampling = dump.manifest.get("sampling") or {}
    sampled = Semantics(float(sampling.get("temperature") or 1.0), float(sampling.get("top_p") or 1.0))
    meaning = engine_semantics(dump.manifest) if source == "engine" else Semantics()
    return Origin(str(dump.path), "dump", source, meaning, sampled if sampling else None)
