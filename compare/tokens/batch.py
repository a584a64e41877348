"""Response tokens with both sides' log-probs, flat: what every figure about tokens is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from probe.compare.align import RowAligner, pack, split
from probe.compare.gates import GateFinding
from probe.compare.report.model import counted
from probe.compare.sampling_fits import Rows
from probe.compare.sequences import SequencePair
from probe.compare.tokens.join import JoinedTokens, join_tokens
from probe.compare.tokens.meaning import SOURCES, choose_sources
from probe.compare.tokens.rl import rl_columns
from probe.sampling import Semantics, drawn_from, engine_semantics
from probe.store.reader import Dump
from probe.store.schema import RL_COLUMNS

COLUMNS = RL_COLUMNS
"""What else a batch may know of each token, for the PPO update: critic, reference, and the updated actor's log-prob."""


@dataclass(frozen=True)
class Origin:
    """Where one side's log-probs come from.

    ``path``: the file or folder; ``kind``: ``dump``, ``monitor``, ``npz``, ``parquet``, ``jsonl`` or ``verl-batch``;
    ``key``: the column that was read; ``meaning``: the distribution that they are declared to be of, None where nothing
    says it; ``sampled_at``: the distribution that the tokens were drawn from, None where nothing says it;
    ``set_aside``: what the engine's own log-probs are of, where recomputed ones stand in for them.
    """

    path: str
    kind: str
    key: str
    meaning: Semantics | None = None
    sampled_at: Semantics | None = None
    set_aside: Semantics | None = None


@dataclass(frozen=True)
class NotFinite:
    """Tokens inside the mask whose log-prob is NaN or infinite on one ``side``: they are in no figure.

    ``side``: ``a``, ``b``, or ``unknown`` where a monitor stored differences; ``kind``: ``nan``, ``+inf`` or ``-inf``;
    ``sequence`` (label) and ``position`` (in the response) of the first of ``count``.
    """

    side: str
    kind: str
    count: int
    sequence: str
    position: int

    @property
    def subject(self) -> str:
        """Return what they are, counted: ``2 log-probs of a``."""
        return (
            counted(self.count, "value")
            if self.side == "unknown"
            else f"{counted(self.count, 'log-prob')} of {self.side}"
        )

    @property
    def first(self) -> str:
        """Return where the first one is."""
        return f"first at position {self.position} of the response of {self.sequence}"


NOT_FINITE: dict[str, Callable[[np.ndarray], np.ndarray]] = {"nan": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}


def find_not_finite(
    side: str, values: np.ndarray, sequence: np.ndarray, position: np.ndarray, labels: list[str]
) -> list[NotFinite]:
    """Return the values of one side that are not finite, one entry per kind; all arrays [n] are of tokens in order."""
    found = []
    for kind, test in NOT_FINITE.items():
        at = np.flatnonzero(test(values))
        if len(at):
            found.append(NotFinite(side, kind, len(at), labels[int(sequence[at[0]])], int(position[at[0]])))
    return found


def not_finite_findings(entries: Iterable[NotFinite]) -> list[GateFinding]:
    """Return a finding per kind of log-prob that is not finite: a token that was sampled has a finite one."""
    found = []
    for entry in entries:
        are = "is" if entry.count == 1 else "are"
        text = f"{entry.subject} inside the mask {are} {entry.kind} ({entry.first}), and in no figure"
        figures: dict[str, float | int | str] = {
            "tokens": entry.count,
            "first": entry.sequence,
            "position": entry.position,
        }
        found.append(GateFinding("nan" if entry.kind == "nan" else "inf", "log-probs", entry.side, text, figures))
    return found


@dataclass
class TokenBatch:
    """N response tokens of S sequences, sorted by (sequence, position); those outside the mask are not in it.

    ``sequence`` int64 [N] counts from 0 to S - 1; ``position`` int64 [N] is the place in the response, from 0;
    ``token`` int64 [N] is the id, -1 where unknown; ``a`` (rollout) and ``b`` (actor) float64 [N] are log-probs, all
    finite, both None where a monitor stored only their ``prob_diff`` |exp(a) - exp(b)|, float64 [N].

    Of the sequences: ``labels`` [S]; ``uids`` [S] and ``samples`` int64 [S] as a file has them, else None; ``step``
    int64 [S], -1 where unknown; ``start`` int64 [S] is the length of the prompt, 0 where unknown; ``valid`` int64 [S]
    counts the tokens inside the mask, finite or not; ``ids`` are all known token ids of each, the prompt's first, empty
    where unknown. ``width`` is the length of the longest response, padding included.

    ``columns`` (names: COLUMNS) float64 [N] are NaN where unknown. ``rows`` are logits of some of the tokens, of side
    ``rows_of``, and ``rows_at`` int64 says which. ``lone`` counts for each side tokens of which only it has a log-prob,
    ``lone_last`` the sequences whose last token inside either mask is one of these. ``lacking`` [S], of two dumps only:
    such tokens of each sequence, but for its last one. ``loose``: a side is a mixture of
    experts or quantised, so that the looser ends of healthy ranges hold (compare/diagnose/action.py). ``notes``: one
    sentence for each thing to know of how the sources were read and joined. ``left_out``: what of the sources is in no
    figure because the two do not share it. ``records`` [S], of dumps only: what it takes to run each sequence again
    (:mod:`probe.compare.tokens.worst`).
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
    rows_at: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    lone: tuple[int, int] = (0, 0)
    lone_last: tuple[int, int] = (0, 0)
    lacking: np.ndarray | None = None
    uids: list[str] | None = None
    samples: np.ndarray | None = None
    loose: bool = False
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sequence)


def batch_of_dumps(a: Dump, b: Dump, aligner: RowAligner, update: Dump | None = None) -> TokenBatch | None:
    """Return the response tokens that two dumps have in common; None where a side has no log-prob of any.

    Sequences are the aligner's pairs, in its order. ``update``: a third dump of the same tokens, whose columns of the
    update count before those of the two.
    """
    sources = choose_sources(a, b)
    if sources is None:
        return None
    tokens, pairs = join_tokens(a, b, aligner, sources), aligner.join.pairs
    start = _starts(tokens, pairs)
    place = tokens.position - start[tokens.pair] if len(tokens.pair) else np.zeros(0, np.int64)
    owner = np.concatenate([tokens.pair, split(np.union1d(*(found for found, _ in tokens.infinite)))[0]])
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
        valid=np.bincount(owner, minlength=len(pairs)).astype(np.int64),
        ids=[a.sequences[pair.a].tokens for pair in pairs],
        width=int(place.max(initial=-1)) + 1,
        origins=(origin_of(a, sources.a), origin_of(b, sources.b)),
        columns=rl_columns((a, b), aligner, pack(tokens.pair, tokens.position), update),
        not_finite=infinite_tokens(tokens, pairs),
        lone=tokens.lone,
        lone_last=tokens.lone_last,
        lacking=tokens.lacking,
    )


def infinite_tokens(tokens: JoinedTokens, pairs: list[SequencePair]) -> list[NotFinite]:
    """Return the infinite log-probs of the response tokens of two dumps; one that is NaN was not returned at all."""
    start, labels = _starts(tokens, pairs), [pair.label for pair in pairs]
    found = []
    for side, (keys, values) in zip("ab", tokens.infinite):
        owner, position = split(keys)
        found += find_not_finite(side, values, owner, position - start[owner] if len(keys) else position, labels)
    return found


def _starts(tokens: JoinedTokens, pairs: list[SequencePair]) -> np.ndarray:
    """Return the length of each pair's prompt: of the shorter one where the two sides drew the line elsewhere."""
    start = np.array([pair.prompt_len for pair in pairs], np.int64)
    for keys in (pack(tokens.pair, tokens.position), *(found for found, _ in tokens.infinite)):
        owner, position = split(keys)
        np.minimum.at(start, owner, position)
    return start


def origin_of(dump: Dump, source: str) -> Origin:
    """Return where a dump's log-probs come from; ``source``: a name of :data:`probe.compare.tokens.meaning.SOURCES`."""
    sampling, engine = dump.manifest.get("sampling") or {}, engine_semantics(dump.manifest)
    sampled = drawn_from(sampling) if sampling else None
    if source == "engine":
        return Origin(str(dump.path), "dump", source, engine, sampled)
    aside = engine if np.isfinite(dump.tokens[SOURCES["engine"]]).any() else None
    return Origin(str(dump.path), "dump", source, Semantics(), sampled, aside)
