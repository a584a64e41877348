"""Preflight gates: what must hold before any tensor is worth comparing. Each says pass, warn, fail or skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from probe.compare.report.model import counted
from probe.compare.sequences import SequenceJoin, sequence_labels
from probe.compare.side import Side
from probe.compare.tokens import SOURCES, Sources, choose_sources, engine_semantics
from probe.compare.trajectories import common_prefix
from probe.compare.weights import canonical_weights, compare_weights
from probe.store.reader import Dump

NAMES = ("tokens", "positions", "weights", "replicas", "sampling", "config", "environment")

SHIFT_SHARE = 0.1
"""Log-probs count as shifted when moving them by one token leaves less than this share of the disagreement."""

SHIFT_NATS = 0.1
"""Mean disagreement (nats) of an engine's log-probs with those of its own logits that makes a shift worth trying: two
healthy computations of one bf16 log-prob differ by about 0.01."""

WEIGHTS_UNSEEN = "weights were not compared"
"""How the weights gate's sentence ends where it saw none on both sides."""

SHOWN = 3
"""Examples that a gate's sentence spells out."""


@dataclass(frozen=True)
class GateFinding:
    """One thing that a gate found, for the diagnosis.

    ``cause``: a slug of docs/diagnosis.md; ``subject``: the canonical module or parameter, or ``config``, ``log-probs``
    and the like; ``side``: a, b, both or unknown; ``text``: a sentence; ``figures``: its numbers.
    """

    cause: str
    subject: str
    side: str
    text: str
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gate:
    """One gate's outcome; ``detail`` is a sentence, ``findings`` the same as data."""

    name: str
    status: str
    detail: str
    findings: tuple[GateFinding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report's entry."""
        return asdict(self)


def tokens_gate(a: Dump, b: Dump, join: SequenceJoin) -> Gate:
    """Compare token ids: prompts that differ fail; responses that part, lone sequences and assumed ids warn."""
    takers = " and ".join(f"{counted(count, 'sequence')} of {side}" for side, count in zip("ab", join.lent) if count)
    assumed = [f"{takers} hold no token ids and were joined by name: their ids are assumed to be the same"]
    notes = assumed if takers else []
    if join.conflicts:
        left, right = (d.sequences[i] for d, i in zip((a, b), join.conflicts[0]))
        at = common_prefix(left.tokens, right.tokens)
        ids = [int(s.tokens[at]) if at < len(s.tokens) else None for s in (left, right)]
        name = sequence_labels(a.sequences)[left.index]
        problem = f"the prompt of {name} differs from position {at} on (token {ids[0]} in a, {ids[1]} in b)"
        differ = f"{len(join.conflicts)} such prompts in all were not compared"
        return Gate("tokens", "fail", "; ".join([*notes, problem, differ]))
    parting = [
        pair
        for pair in join.pairs
        if pair.prefix < min(len(a.sequences[pair.a].tokens), len(b.sequences[pair.b].tokens))
    ]
    if parting:
        notes.append(
            f"the responses of {len(parting)} of {len(join.pairs)} sequences part (first {parting[0].label} at "
            f"position {parting[0].prefix}), so later rows were not compared"
        )
    lone = (("a", join.only_a), ("b", join.only_b))
    notes += [f"{counted(len(found), 'sequence')} only in {side}" for side, found in lone if found]
    total = sum(pair.prefix for pair in join.pairs)
    equal = f"{counted(len(join.pairs), 'sequence')}, {counted(total, 'token id')} equal"
    return Gate("tokens", "warn" if notes else "pass", "; ".join([*notes, equal]))


def positions_gate(a: Side, b: Side) -> Gate:
    """Check on each side that the token of every row is the sequence's token at the row's position."""
    checked = 0
    for name, side in (("a", a), ("b", b)):
        rows = _widest_rows(side)
        sequence, position, token = rows["sequence"], rows["position"], rows["token"]
        known = (sequence >= 0) & (position >= 0) & (token >= 0)
        sequence, position, token = sequence[known], position[known], token[known]
        lookup = _Tokens(side.dump)
        wrong = int((lookup.at(sequence, position) != token).sum())
        offsets = {shift: int((lookup.at(sequence, position + shift) == token).sum()) for shift in (-1, 1)}
        total = int(known.sum())
        checked += total
        if wrong:
            shifted = next((s for s, hits in offsets.items() if hits > 0.9 * total), None)
            hint = f"; they fit when moved by {shifted:+d}: a position offset" if shifted else ""
            return Gate("positions", "fail", f"in {name}, {wrong} of {total} rows hold another token than theirs{hint}")
    if not checked:
        return Gate("positions", "skipped", "no tensor with token rows is stored")
    return Gate("positions", "pass", f"all {checked} rows of both sides hold the token of their position")


def _widest_rows(side: Side) -> np.ndarray:
    infos = [info for info in side.dump.tensors.values() if info.has_rows and info.rows]
    if not infos:
        return np.zeros(0, [("sequence", "i8"), ("position", "i8"), ("token", "i8")])
    widest = max(infos, key=lambda info: info.rows)
    return side.dump.rows(widest.module, widest.slot)


class _Tokens:
    """The token ids of all sequences of a dump, end to end, so that any number of rows is looked up at once."""

    def __init__(self, dump: Dump) -> None:
        self._lengths = np.array([len(s.tokens) for s in dump.sequences], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._ids = np.concatenate([*(s.tokens for s in dump.sequences), np.full(1, -2, np.int64)])

    def at(self, sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the token of each (sequence, position), -2 outside the sequence."""
        inside = (position >= 0) & (position < self._lengths[sequence])
        return self._ids[np.where(inside, self._starts[sequence] + position, -1)]


def weights_gate(a: Side, b: Side) -> Gate:
    """Compare parameter sketches within the rounding of the coarser dtype."""
    left, right = canonical_weights(a), canonical_weights(b)
    lacking = [name for name, weights in (("a", left), ("b", right)) if not weights]
    if lacking:
        return Gate("weights", "skipped", f"no parameter sketches in {' and '.join(lacking)}: {WEIGHTS_UNSEEN}")
    findings = compare_weights(left, right)
    different = [finding for finding in findings if finding.status == "different"]
    rounded = [finding for finding in findings if finding.status == "rounded"]
    versions = _weight_versions(a.dump, b.dump)
    if different:
        first = different[0]
        more = f"{len(different)} of {len(findings)} parameters differ"
        source = f"{left[first.name].native} in a, {right[first.name].native} in b"
        lagged = declared_lag(a.dump, b.dump)
        return Gate(
            "weights", "warn" if lagged else "fail", f"{first.name} {first.detail} ({source}); {more}{versions}"
        )
    if not findings:
        return Gate("weights", "warn", f"no parameter has a canonical name on both sides: {WEIGHTS_UNSEEN}")
    lacking_shards = [finding for finding in findings if finding.status == "missing"]
    lone = [name for name in left if name not in right] + [name for name in right if name not in left]
    notes = [f"{counted(len(findings) - len(lacking_shards), 'parameter')} agree"]
    if rounded:
        notes.append(f"{len(rounded)} of them within one rounding to {rounded[0].detail} (the dtypes differ)")
    if lone:
        notes.append(f"{len(lone)} are on one side only (first {lone[0]})")
    if lacking_shards:
        first = lacking_shards[0]
        notes.append(f"{len(lacking_shards)} could not be made whole ({first.name} {first.detail})")
    warned = lone or versions or lacking_shards
    return Gate("weights", "warn" if warned else "pass", "; ".join(notes) + versions)


def declared_lag(a: Dump, b: Dump) -> bool:
    """Tell whether the sides declare different weight updates, so that other weights are no surprise."""
    versions = [{s.weight_version for s in dump.sequences} for dump in (a, b)]
    return all(any(known) for known in versions) and not versions[0] & versions[1]


def _weight_versions(a: Dump, b: Dump) -> str:
    versions = [sorted({s.weight_version for s in d.sequences}) for d in (a, b)]
    return "" if versions[0] == versions[1] else f"; declared weight versions differ (a {versions[0]}, b {versions[1]})"


def sampling_gate(a: Dump, b: Dump) -> Gate:
    """Compare what the log-probs mean: temperature, top-p, raw or processed, and whether they are off by one token."""
    for name, dump in (("a", a), ("b", b)):
        shift = shifted_by(dump)
        if shift:
            problem = f"the engine's log-probs of {name} fit its own logits only when moved by {shift:+d} token"
            return Gate("sampling", "fail", f"{problem}: they are assigned to the wrong tokens")
    sources = choose_sources(a, b)
    if sources is None:
        return Gate("sampling", "skipped", "a side holds no log-probs of response tokens")
    notes = _raw_notes(a, b, sources)
    if not sources.comparable:
        meant = " and ".join(_meaning(d, n) for d, n in ((a, sources.a), (b, sources.b)))
        problem = f"the log-probs are of different distributions: {meant}"
        return Gate("sampling", "fail", f"{problem}; set one logprobs_mode and temperature on both sides")
    if notes:
        return Gate("sampling", "warn", "; ".join(notes))
    return Gate("sampling", "pass", f"both sides' log-probs are {_meaning(a, sources.a)}")


def _meaning(dump: Dump, source: str) -> str:
    semantics = engine_semantics(dump.manifest)
    if source == "recomputed" or (semantics.temperature == 1 and semantics.top_p == 1):
        return "of the untouched logits (temperature 1)"
    return f"processed with temperature {semantics.temperature:g} and top-p {semantics.top_p:g}"


def _raw_notes(a: Dump, b: Dump, sources: Sources) -> list[str]:
    """Return warnings that leave the comparison valid but not the PPO ratio built on these log-probs."""
    notes = []
    for name, dump, source in (("a", a, sources.a), ("b", b, sources.b)):
        sampling = dump.manifest.get("sampling") or {}
        temperature, top_p = float(sampling.get("temperature") or 0.0), float(sampling.get("top_p") or 1.0)
        changed = temperature not in (0.0, 1.0) or top_p < 1.0
        if changed and str(dump.manifest.get("logprobs_mode") or "raw_logprobs").startswith("raw"):
            notes.append(
                f"{name} sampled with temperature {temperature:g} and top-p {top_p:g} but returned raw log-probs: a "
                "PPO ratio over its samples needs processed_logprobs"
            )
        elif changed and source == "recomputed":
            notes.append(f"{name}'s processed log-probs were set aside for ones recomputed from its logits")
    return notes


def shifted_by(dump: Dump) -> int:
    """Return +1 or -1 when the engine's log-probs fit those of its own logits only after moving by one token, else 0.

    Needs both columns on at least 8 response tokens, so that chance does not decide.
    """
    table = dump.tokens[dump.tokens["response"]]
    engine, own = table[SOURCES["engine"]], table[SOURCES["recomputed"]]
    same = np.isfinite(engine) & np.isfinite(own)
    if same.sum() < 8:
        return 0
    disagreement = float(np.abs(engine - own)[same].mean())
    if disagreement < SHIFT_NATS:
        return 0
    for shift in (1, -1):
        moved = np.roll(engine, shift)
        usable = same & np.isfinite(moved) & (np.roll(table["sequence"], shift) == table["sequence"])
        if usable.sum() >= 8 and float(np.abs(moved - own)[usable].mean()) < SHIFT_SHARE * disagreement:
            return shift
    return 0


def gates_of(a: Side, b: Side, join: SequenceJoin, extra: Sequence[Gate]) -> list[Gate]:
    """Return the gates in their fixed order; ``extra`` are those of other modules."""
    gates = {
        gate.name: gate
        for gate in (
            tokens_gate(a.dump, b.dump, join),
            positions_gate(a, b),
            weights_gate(a, b),
            sampling_gate(a.dump, b.dump),
            *extra,
        )
    }
    return [gates[name] for name in NAMES]
