"""Per-token divergence of log-probabilities on response tokens, by position, by sequence, and the worst tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probe.compare.align import NO_ROWS, RowAligner, RowTable, pack
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
    """Response tokens whose log-prob both sides have: arrays [tokens], ``pair`` indexing the sequence pairs."""

    pair: np.ndarray
    position: np.ndarray
    token: np.ndarray
    a: np.ndarray
    b: np.ndarray


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
    rows = []
    for key, values, side_cells in zip(keys, columns, cells):
        kept = np.flatnonzero(np.isfinite(values) & np.isin(key, generated))
        rows.append(RowTable(side_cells[kept], kept, NO_ROWS, NO_ROWS, 0))
    join = aligner.join_tables(*rows)
    tokens = a.tokens["token"][join.index_a]
    return JoinedTokens(join.pair, join.position, tokens, columns[0][join.index_a], columns[1][join.index_b])


def compare_tokens(a: Dump, b: Dump, aligner: RowAligner, *, text: bool = True) -> dict[str, Any]:
    """Return the ``tokens`` section of the report; figures are None where no token could be compared."""
    sources = choose_sources(a, b)
    decode = load_decoder(a, b) if text else None
    report: dict[str, Any] = {
        "compared": 0,
        "source_a": sources.a if sources else None,
        "source_b": sources.b if sources else None,
        **dict.fromkeys(TOKEN_METRICS),
        "text": decode is not None,
        **{"by_position": [], "worst": [], "sequences": [], "strip_truncated": 0},
    }
    if not sources:
        return report
    join, tokens = aligner.join, join_tokens(a, b, aligner, sources)
    report |= {"compared": len(tokens.a), **token_metrics(tokens.a, tokens.b)}
    report["by_position"] = _by_position(join, tokens)
    report["worst"] = _worst(a, join, tokens, decode)
    report["sequences"], report["strip_truncated"] = _sequences(a, join, tokens, decode)
    return report


def unexplained_difference(a: Dump, b: Dump, mean_difference: float | None, logits_agree: bool) -> float | None:
    """Return the mean absolute log-prob difference that the tensors do not already account for.

    Where both sides' logits were compared and agree within rounding, so do their log-probs, however far a model that
    amplifies rounding carries them; what remains is how far an engine's own log-probs lie from its own logits.
    """
    if mean_difference is None or not logits_agree:
        return mean_difference
    return max(_from_own_logits(a), _from_own_logits(b))


def _from_own_logits(dump: Dump) -> float:
    """Return the mean absolute difference of an engine's raw log-probs from those of the logits it stored."""
    if engine_semantics(dump.manifest) != Semantics():
        return 0.0
    tokens = dump.tokens[dump.tokens["response"]]
    gap = np.abs(tokens["logprob"] - tokens["logprob_recomputed"])
    return float(np.mean(gap[np.isfinite(gap)])) if np.isfinite(gap).any() else 0.0


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
