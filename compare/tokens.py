"""Per-token divergence of log-probabilities on response tokens, by position, by sequence, and the worst tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probe.compare.align import NO_ROWS, RowAligner, RowTable, pack, split
from probe.compare.measure import Measured
from probe.compare.sequences import SequenceJoin
from probe.metrics import TOKEN_METRICS, token_metrics
from probe.store.reader import Dump

WORST_TOKENS = 20
CONTEXT_TOKENS = 16
STRIP_TOKENS = 20_000
"""Tokens in all strips together; sequences beyond it (the least divergent ones) are counted as truncated."""

SOURCES = {"engine": "logprob", "recomputed": "logprob_recomputed"}
Decoder = Callable[[list[int]], str]


@dataclass(frozen=True)
class Semantics:
    """What distribution a side's log-probs belong to: the temperature and top-p already in them."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Sources:
    """Which log-probs each side contributes, and whether both are of one distribution."""

    a: str
    b: str
    comparable: bool


def engine_semantics(manifest: Mapping[str, Any]) -> Semantics:
    """Return what an engine's own log-probs contain: processed ones have temperature and top-p in them, raw neither."""
    if not str(manifest.get("logprobs_mode") or "").startswith("processed"):
        return Semantics()
    sampling = manifest.get("sampling") or {}
    return Semantics(float(sampling.get("temperature") or 1.0), float(sampling.get("top_p") or 1.0))


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


@dataclass(frozen=True)
class JoinedTokens:
    """Response tokens whose log-prob both sides have: arrays [tokens], ``pair`` indexing the sequence pairs.

    ``lone`` counts for each side the tokens of both sides' sequences of which only it has a finite log-prob.
    ``owners``: for each side the number of the sequence in its dump, [tokens].
    """

    pair: np.ndarray
    position: np.ndarray
    token: np.ndarray
    a: np.ndarray
    b: np.ndarray
    lone: tuple[int, int] = (0, 0)
    owners: tuple[np.ndarray, np.ndarray] = (NO_ROWS, NO_ROWS)


RATIO_METRICS = ("tme", "mean_ratio", "ess", "chi2")


def ratio_metrics(logprob_a: np.ndarray, logprob_b: np.ndarray) -> dict[str, float]:
    """Return what the importance ratios rho = exp(b - a) of response tokens say, float [tokens] each, finite.

    ``tme`` = mean exp(|b - a|) (NeMo-RL's token multiplicative error); ``mean_ratio`` = mean rho; ``ess`` = effective
    sample size as a share of the tokens, 1 / mean((rho / mean rho)^2), and ``chi2`` = mean rho^2 - 1 (both as in verl's
    rollout correction). NaN without tokens, infinite where a ratio overflows.
    """
    if not logprob_a.size:
        return dict.fromkeys(RATIO_METRICS, float("nan"))
    difference = np.asarray(logprob_b, np.float64) - np.asarray(logprob_a, np.float64)
    with np.errstate(over="ignore"):
        ratio, squares = np.exp(difference), np.exp(2 * difference)
        weights = np.exp(difference - difference.max())  # any common factor cancels
        return {
            "tme": float(np.exp(np.abs(difference)).mean()),
            "mean_ratio": float(ratio.mean()),
            "ess": float(weights.mean() ** 2 / np.mean(weights**2)),
            "chi2": float(squares.mean() - 1),
        }


def join_tokens(a: Dump, b: Dump, aligner: RowAligner, sources: Sources) -> JoinedTokens:
    """Join the two token tables by (sequence, position) within the common prefixes, response tokens only.

    A token of a later turn's prompt that an earlier piece of its trajectory generated is a response token.
    """
    tables = a.tokens, b.tokens
    columns = a.tokens[SOURCES[sources.a]], b.tokens[SOURCES[sources.b]]
    cells = [pack(table["sequence"], table["position"]) for table in tables]
    places = [aligner.places(side_cells, side) for side, side_cells in enumerate(cells)]
    keys = [pack(pair, position) for _, position, pair, _ in places]
    generated = np.unique(np.concatenate([key[table["response"]] for key, table in zip(keys, tables)]))
    rows, scored = [], []
    for key, values, side_cells, (_, position, pair, _) in zip(keys, columns, cells, places):
        kept = np.flatnonzero(np.isfinite(values) & np.isin(key, generated))
        rows.append(RowTable(side_cells[kept], kept, NO_ROWS, NO_ROWS, 0))
        kept = kept[pair[kept] >= 0]
        scored.append(np.unique(key[kept[position[kept] < aligner.prefix[pair[kept]]]]))
    join = aligner.join_tables(*rows)
    lone = (len(np.setdiff1d(scored[0], scored[1])), len(np.setdiff1d(scored[1], scored[0])))
    tokens = a.tokens["token"][join.index_a]
    scores = columns[0][join.index_a], columns[1][join.index_b]
    owners = split(join.cells_a)[0], split(join.cells_b)[0]
    return JoinedTokens(join.pair, join.position, tokens, *scores, lone, owners)


def compare_tokens(a: Dump, b: Dump, aligner: RowAligner, *, text: bool = True) -> dict[str, Any]:
    """Return the ``tokens`` section of the report; figures are None where no token could be compared."""
    sources = choose_sources(a, b)
    decode = load_decoder(a, b) if text else None
    report: dict[str, Any] = {
        "compared": 0,
        "lone": {"a": 0, "b": 0},
        "source_a": sources.a if sources else None,
        "source_b": sources.b if sources else None,
        **dict.fromkeys((*TOKEN_METRICS, *RATIO_METRICS)),
        "text": decode is not None,
        **{"by_position": [], "worst": [], "sequences": [], "strip_truncated": 0},
    }
    if not sources:
        return report
    join, tokens = aligner.join, join_tokens(a, b, aligner, sources)
    report |= {"compared": len(tokens.a), "lone": dict(zip("ab", tokens.lone)), **token_metrics(tokens.a, tokens.b)}
    report |= ratio_metrics(tokens.a, tokens.b)
    report["by_position"] = _by_position(join, tokens)
    report["worst"] = _worst(a, join, tokens, decode)
    report["sequences"], report["strip_truncated"] = _sequences(a, join, tokens, decode)
    return report


@dataclass(frozen=True)
class Unexplained:
    """Absolute log-prob differences that the tensors do not account for.

    ``mean``: over all tokens, None where none was compared; ``worst``: of the one that is furthest off, 0 where nothing
    says what its logits allow.
    """

    mean: float | None
    worst: float = 0.0


def unexplained_difference(a: Dump, b: Dump, aligner: RowAligner, logits: Measured | None) -> Unexplained:
    """Return the log-prob differences that the tensors do not already account for.

    ``logits``: the measured logits where they agree within rounding. Then so do the log-probs, however far a model that
    amplifies rounding carries them: logits that differ by d at most give log-probs that differ by 2 d at most. What
    remains is what lies beyond, and how far an engine's own log-probs lie from its own logits.
    """
    sources = choose_sources(a, b)
    tokens = join_tokens(a, b, aligner, sources) if sources else None
    if sources is None or tokens is None or not len(tokens.a):
        return Unexplained(None)
    gap = np.abs(tokens.a - tokens.b)
    if logits is None or logits.metrics is None or logits.join is None:
        return Unexplained(float(gap.mean()))
    scored = pack(tokens.pair, tokens.position - 1)
    known = np.isin(scored, pack(logits.join.pair, logits.join.position))
    gap[known] = np.maximum(gap[known] - _explained(a, b, sources, logits.metrics.max_abs), 0.0)
    gaps = [(gap, known), *((own, np.ones(len(own), bool)) for own in map(_from_own_logits, (a, b)))]
    means = [float(beyond.mean()) for beyond, _ in gaps if len(beyond)]
    return Unexplained(max(means), max(float(beyond[sure].max(initial=0.0)) for beyond, sure in gaps))


def _explained(a: Dump, b: Dump, sources: Sources, max_abs: float) -> float:
    """Return how far log-probs may part where logits do by ``max_abs`` at most.

    Processed ones are of logits over the temperature, and summed over at least the share top-p of the probabilities.
    """
    sides = ((a, sources.a), (b, sources.b))
    meanings = [engine_semantics(dump.manifest) for dump, name in sides if name == "engine"] or [Semantics()]
    coldest, least = (min(getattr(meaning, name) for meaning in meanings) for name in ("temperature", "top_p"))
    return 2 * max_abs / coldest - float(np.log(least))


def _from_own_logits(dump: Dump) -> np.ndarray:
    """Return the absolute differences of an engine's raw log-probs from those of the logits it stored.

    A log-prob that is missing is NaN; one of minus infinity, of a token that was sampled, is infinitely far off.
    """
    if engine_semantics(dump.manifest) != Semantics():
        return np.zeros(0)
    tokens = dump.tokens[dump.tokens["response"]]
    with np.errstate(invalid="ignore"):
        gap = np.abs(tokens["logprob"] - tokens["logprob_recomputed"])
    return gap[~np.isnan(gap)]


def _by_position(join: SequenceJoin, tokens: JoinedTokens) -> list[dict[str, Any]]:
    prompt = np.array([pair.prompt_len for pair in join.pairs], np.int64)
    place = tokens.position - prompt[tokens.pair] if len(tokens.pair) else tokens.position
    order = np.argsort(place, kind="stable")
    places, starts = np.unique(place[order], return_index=True)
    groups = np.split(np.abs(tokens.b - tokens.a)[order], starts[1:]) if len(places) else []
    return [
        {"position": int(p), "count": len(gap), "mean_abs": float(gap.mean()), "max_abs": float(gap.max())}
        for p, gap in zip(places, groups)
    ]


def _worst(a: Dump, join: SequenceJoin, tokens: JoinedTokens, decode: Decoder | None) -> list[dict[str, Any]]:
    entries = []
    for at in np.argsort(-np.abs(tokens.b - tokens.a), kind="stable")[:WORST_TOKENS]:
        pair, position = join.pairs[int(tokens.pair[at])], int(tokens.position[at])
        before = a.sequences[pair.a].tokens[max(0, position - CONTEXT_TOKENS) : position].tolist()
        context = decode(before) if decode else " ".join(map(str, before))
        entries.append({"sequence": pair.label, **_token(tokens, int(at), decode), "context": context})
    return entries


def _token(tokens: JoinedTokens, at: int, decode: Decoder | None) -> dict[str, Any]:
    token = int(tokens.token[at])
    return {
        "position": int(tokens.position[at]),
        "token": token,
        "text": decode([token]) if decode else None,
        "logprob_a": float(tokens.a[at]),
        "logprob_b": float(tokens.b[at]),
        "diff": float(tokens.b[at] - tokens.a[at]),
    }


def _sequences(
    a: Dump, join: SequenceJoin, tokens: JoinedTokens, decode: Decoder | None
) -> tuple[list[dict[str, Any]], int]:
    """Return one entry per sequence, with strips for the most divergent ones, and how many go without."""
    gap = np.abs(tokens.b - tokens.a)
    entries: list[dict[str, Any]] = []
    members: list[np.ndarray] = []
    bounds = np.searchsorted(tokens.pair, np.arange(len(join.pairs) + 1))  # joined tokens are sorted by pair
    for number, pair in enumerate(join.pairs):
        sequence, at = a.sequences[pair.a], np.arange(bounds[number], bounds[number + 1])
        members.append(at)
        figures = {"mean_abs": float(gap[at].mean()), "max_abs": float(gap[at].max())} if len(at) else {}
        entries.append(
            {
                "sequence": pair.label,
                "prompt_len": pair.prompt_len,
                "length": len(sequence.tokens),
                **{"mean_abs": None, "max_abs": None, **figures, "strip": []},
            }
        )
    budget, truncated = STRIP_TOKENS, 0
    for number in sorted(range(len(entries)), key=lambda n: -(entries[n]["max_abs"] or 0.0)):
        budget -= entries[number]["length"]
        if budget < 0:
            truncated += 1
            continue
        ids = a.sequences[join.pairs[number].a].tokens
        entries[number]["strip"] = _strip(ids, entries[number]["prompt_len"], tokens, members[number], decode)
    return entries, truncated


def _strip(
    ids: np.ndarray, prompt_len: int, tokens: JoinedTokens, at: np.ndarray, decode: Decoder | None
) -> list[dict[str, Any]]:
    compared = {int(tokens.position[n]): _token(tokens, int(n), decode) for n in at}
    blank = {"logprob_a": None, "logprob_b": None, "diff": None}
    return [
        compared.get(
            position,
            {"position": position, "token": token, "text": decode([token]) if decode else None, **blank},
        )
        | {"response": position >= prompt_len}
        for position, token in enumerate(ids.tolist())
    ]


def load_decoder(*dumps: Dump) -> Decoder | None:
    """Return ids -> text through the tokenizer.json beside a dump's checkpoint, or None when there is none to use."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    for dump in dumps:
        path = Path(str((dump.manifest.get("model") or {}).get("path") or "")) / "tokenizer.json"
        if path.is_file():
            try:
                tokenizer = Tokenizer.from_file(str(path))
            except Exception:  # tokenizers raises bare Exception for a file that it cannot parse: ids will do
                return None
            return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    return None
