"""What a comparison did not see: in a few words for the verdict line, and one sentence per kind for the report."""

from __future__ import annotations

from probe.compare.coverage import FewerRows
from probe.compare.evidence import Evidence
from probe.compare.match import UNKNOWN, Entry
from probe.compare.names.canonical import LOGITS
from probe.compare.report.model import ROW_REASONS, counted
from probe.compare.sequences import sequence_labels
from probe.compare.untrained import untrained
from probe.compare.weights_gate import WEIGHTS_UNSEEN
from probe.settings import TOKENS
from probe.store.reader import Dump
from probe.store.schema import RL

ROW_GAPS = {
    "not_trained": "of sequences not trained on",
    "other_sequence": "of sequences on one side only",
    "other_version": "of another weight version",
    "prefix_cache": "not executed (prefix cache)",
    "budget": "left out by the budget",
    "beyond_prefix": "after the tokens part",
    "part_of_shards": "without all their shards",
    "not_stored": "stored by one side only",
}
"""Reasons that the headline counts (:data:`probe.compare.report.model.ROW_REASONS`), in its words."""

NO_VALUES = "only statistics of its tensors' rows are stored (PROBE_TASK=statistics)"
ALONE = "the other side holds statistics of rows; 'probe replay' recomputes this side alone"

SILENT = ("padding", "computed_again", "prompts_only", "part_of_shards")
"""Reasons that need no sentence: nothing is lost, or another sentence says it."""


def in_brief(e: Evidence) -> list[str]:
    """Return what was not compared, each in a few words; :func:`not_compared` says it in full."""
    gaps = ["statistics of rows in place of values"] if by_statistics(e) else []
    gaps += ["decode not seen"] if any(d.manifest.get("prompts_only") for d in (e.a, e.b)) else []
    bare = _without_tensors(e)
    for side, lone, spared in _lone_sequences(e) if bare else ():
        gaps += [f"{counted(spared, 'sequence')} of {side} not trained on"] if spared else []
        gaps += [f"{counted(len(lone) - spared, 'sequence')} only in {side}"] if len(lone) > spared else []
    gaps += ["no tensor was recorded" if len(bare) == 2 else f"{bare[0]} recorded no tensor"] if bare else []
    if e.matching.unavailable:
        labels = [entry.label for entry in e.matching.unavailable]
        kind = "norm" if all("norm" in label for label in labels) else "tensor"
        why = "fused" if all("fuse" in entry.reason for entry in e.matching.unavailable) else "unavailable"
        gaps.append(f"{counted(len(labels), kind)} not comparable ({why})")
    proposed = sum(entry.match.proposal is not None for entry in e.measured)
    gaps += [f"{counted(proposed, 'pair')} only proposed"] if proposed else []
    figures = [entry.metrics for entry in e.measured if entry.metrics is not None]
    zero = sum(found.pairs > 0 and not found.norm_x and not found.norm_y for found in figures)
    gaps += [f"{tensors(zero)} of zeros only"] if zero else []
    stated = sum(bool(entry.match.source_a.stated or entry.match.source_b.stated) for entry in e.measured)
    gaps += [f"{counted(stated, 'pair')} as --map states"] if stated else []
    failed = sum(entry.metrics is None for entry in e.measured)
    gaps += [f"{tensors(failed)} could not be paired"] if failed else []
    only = {"a": e.matching.only_a, "b": e.matching.only_b}
    gaps += [f"{tensors(len(entries))} only in {side}" for side, entries in only.items() if entries and not bare]
    gaps += [
        f"{counted(e.rows.count(reason), 'row')} {words}" for reason, words in ROW_GAPS.items() if e.rows.count(reason)
    ]
    part = sum(entry.label != LOGITS for entry in e.fewer)
    gaps += [f"{tensors(part)} on part of the rows"] if part else []
    unknown = sum(len(entries) for entries in _unknown(e).values())
    gaps += [f"{tensors(unknown)} of unknown name"] if unknown else []
    lone = sum(e.tokens["lone"].values())
    gaps += [f"{counted(lone, 'log-prob')} on one side only"] if lone else []
    broken = sum(entry["count"] for entry in e.tokens["not_finite"])
    gaps += [f"{counted(broken, 'log-prob')} not finite"] if broken else []
    gaps += ["weights not compared"] if _unseen_weights(e) else []
    for side, broken in _broken_weights(e).items():
        gaps += [f"{counted(len(broken), 'parameter')} of {side} without all shards"] if broken else []
    gaps += [f"{side} incomplete" for side, dump in (("a", e.a), ("b", e.b)) if not dump.complete]
    gaps += [f"first step of {side} only" for side, dump in (("a", e.a), ("b", e.b)) if dump.unread]
    return gaps


def without_tensors(dump: Dump) -> bool:
    """Tell whether a dump holds no tensor of a module."""
    return all(module == RL for module, _ in dump.tensors)


def tokens_only(dump: Dump) -> bool:
    """Tell whether a dump says that it was to hold none (``PROBE_TASK=tokens``, or a capture that had to do so)."""
    return without_tensors(dump) and dump.tasks == {TOKENS}


def _without_tensors(e: Evidence) -> list[str]:
    return [side for side, dump in (("a", e.a), ("b", e.b)) if without_tensors(dump)]


def _unknown(e: Evidence) -> dict[str, list[Entry]]:
    """Return for each side the tensors that no table of names knows."""
    listed = {"a": e.matching.auxiliary_a, "b": e.matching.auxiliary_b}
    return {side: [entry for entry in entries if entry.reason.startswith(UNKNOWN)] for side, entries in listed.items()}


def _unseen_weights(e: Evidence) -> list[str]:
    """Return why no weights were compared, if none were."""
    return [g.detail for g in e.gates if g.name == "weights" and g.detail.endswith(WEIGHTS_UNSEEN)]


def _broken_weights(e: Evidence) -> dict[str, dict[str, str]]:
    """Return for each side the parameters of which a shard is in no file, and which."""
    sides = {"a": e.a, "b": e.b}
    return {
        side: {name: joined.gap for name, joined in dump.joined_weights.items() if joined.gap}
        for side, dump in sides.items()
    }


def _not_whole(side: str, dump: Dump) -> list[str]:
    """Say which rows of a side's tensors some rank's file lacks."""
    partly = [info for info in dump.tensors.values() if info.lacking and info.rows]
    if not partly:
        return []
    first = f"{partly[0].module}:{partly[0].slot}"
    rows = sum(info.left_out for info in partly)
    return [f"{rows} rows of {tensors(len(partly))} of {side} (first {first}): {partly[0].lacking}"]


def not_compared(e: Evidence) -> list[str]:
    """Return one sentence per kind of thing that this comparison did not see."""
    sentences = [
        f"{side} is incomplete ({'; '.join(dump.lost)}): only what had reached the disk was read"
        for side, dump in (("a", e.a), ("b", e.b))
        if not dump.complete
    ]
    sentences += [
        f"{counted(len(dump.unread), 'later step')} of {side}: add --step or name a step's folder ({dump.unread[0]})"
        for side, dump in (("a", e.a), ("b", e.b))
        if dump.unread
    ]
    sentences += _unseen_values(e)
    sentences += _unseen_sequences(e)
    sentences += _unseen_rows(e)
    sentences += _unseen_tensors(e)
    if not e.tokens["compared"]:
        sentences.append("log-probs: no response token has one on both sides")
    for side, count in e.tokens["lone"].items():
        sentences += [f"{counted(count, 'response token')}: only {side} has a finite log-prob of it"] if count else []
    for entry in e.tokens["not_finite"]:
        where = f"first at position {entry['position']} of the response of {entry['sequence']}"
        sentences.append(f"{counted(entry['count'], 'log-prob')} of {entry['side']}: {entry['kind']} ({where})")
    sentences += _unseen_weights(e)
    for side, broken in _broken_weights(e).items():
        for name, gap in list(broken.items())[:1]:
            sentences.append(f"{counted(len(broken), 'parameter')} of {side} (first {name}): {gap}")
    if not e.measured and not _without_tensors(e):
        sentences.append("module tensors: none is stored on both sides")
    sentences += [f"modules of {side} from their own inputs: {why}" for side, why in e.replays.why_not.items()]
    return sentences


def by_statistics(e: Evidence) -> int:
    """Return how many tensors were compared by statistics of their rows."""
    return sum(entry.metrics is not None and entry.metrics.is_bound for entry in e.measured)


def _unseen_values(e: Evidence) -> list[str]:
    """Say what statistics cannot show, and what would."""
    count, sides = by_statistics(e), [side for side, dump in (("a", e.a), ("b", e.b)) if dump.reduced]
    if not count:
        return []
    return [
        f"values of {tensors(count)}: {' and '.join(sides)} recorded the norm, sum, largest and smallest value of each "
        "row. What differs by them differs, by as much as is said at least; features that changed places, and changes "
        "that leave all four as they were, are not seen. Record the tensors in doubt in full (task tensor)"
    ]


def _unseen_sequences(e: Evidence) -> list[str]:
    sentences = []
    for (side, lone, spared), dump in zip(_lone_sequences(e), (e.a, e.b)):
        first = f" (first {sequence_labels(dump.sequences)[lone[0]]})" if lone else ""
        if spared:
            more = first if spared == len(lone) else ""
            sentences.append(f"{counted(spared, 'sequence')} of {side} that the trainer did not train on{more}")
        if len(lone) > spared:
            sentences.append(f"{counted(len(lone) - spared, 'sequence')} that only {side} has{first}")
    return sentences


def _lone_sequences(e: Evidence) -> list[tuple[str, list[int], int]]:
    """Return for each side the sequences without a partner, and how many of them need none."""
    return list(zip("ab", (e.join.only_a, e.join.only_b), untrained(e.join, e.a, e.b)))


def _unseen_rows(e: Evidence) -> list[str]:
    sides = [side for side, dump in (("a", e.a), ("b", e.b)) if dump.manifest.get("prompts_only")]
    sentences = [f"response rows (decode): {' and '.join(sides)} stored prompt rows only"] if sides else []
    for side, counts in (("a", e.rows.a), ("b", e.rows.b)):
        sentences += [
            f"{counted(counts[reason], 'row')} of {side}: {words}"
            for reason, words in ROW_REASONS.items()
            if counts[reason] and reason not in SILENT
        ]
    for side, again in zip("ab", e.rows.recomputed):
        if again.differing:
            rows = f"{len(again.differing)} of {counted(len(again.again), 'row')}"
            problem = f"{rows} that {side} computed more than once came out with other bits"
            sentences.append(f"{problem}: only the last computation was compared")
    return sentences + _fewer_rows(e)


def _fewer_rows(e: Evidence) -> list[str]:
    """Return one sentence per group of tensors that lack the same number of rows."""
    groups: dict[tuple[int, int, int], list[FewerRows]] = {}
    for entry in e.fewer:
        groups.setdefault((entry.missing, entry.lacking_a, entry.lacking_b), []).append(entry)
    sentences = []
    for (missing, *lacking), entries in groups.items():
        who = " and ".join(f"{side} lacks {count}" for side, count in zip("ab", lacking) if count)
        more = f" and {len(entries) - 1} more tensors" if len(entries) > 1 else ""
        sentences.append(f"{entries[0].label}{more}: {missing} of {e.rows.joined} rows ({who or 'in no common row'})")
    return sentences


def _unseen_tensors(e: Evidence) -> list[str]:
    sentences = [sentence for side, dump in (("a", e.a), ("b", e.b)) for sentence in _not_whole(side, dump)]
    for reason in dict.fromkeys(entry.reason for entry in e.matching.unavailable):
        entries = [entry for entry in e.matching.unavailable if entry.reason == reason]
        sentences.append(f"{tensors(len(entries))} unavailable in {entries[0].side} (as {entries[0].label}): {reason}")
    bare = _without_tensors(e)
    meant = [side for side in bare if tokens_only({"a": e.a, "b": e.b}[side])]
    for sides, words in (
        (meant, "recorded tokens only (PROBE_TASK=tokens, or a model that is compiled)"),
        ([side for side in bare if side not in meant], "lost them all: told to record them, no file holds any"),
    ):
        sentences += [f"module tensors: {' and '.join(sides)} {words}"] if sides else []
    for side, only in (("a", e.matching.only_a), ("b", e.matching.only_b)):
        if only and not bare:
            sentences.append(f"{tensors(len(only))} that only {side} has (first {only[0].label})")
    for side, unknown in _unknown(e).items():
        if unknown:
            first = unknown[0].label
            sentences.append(f"{tensors(len(unknown))} of {side} that no table of names knows (first {first})")
    failed = [entry for entry in e.measured if entry.metrics is None]
    if failed:
        text = failed[0].judgement.reason.rstrip(".")
        sentences.append(f"{tensors(len(failed))} that could not be paired (first {failed[0].match.label}: {text})")
    return sentences


def tensors(count: int) -> str:
    """Return a number of tensors in words."""
    return counted(count, "tensor")
