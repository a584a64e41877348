"""Leave out prompt rows that saw responses where the other side's did not, in a model that is not causal."""

from __future__ import annotations

from probe.compare.match import Entry, Matching
from probe.compare.sequences import SequenceJoin
from probe.store.reader import Dump


def leave_out_unlike(matching: Matching, a: Dump, b: Dump, join: SequenceJoin) -> None:
    """Make every matched tensor unavailable where two sides' prompt rows did not see alike.

    Only where a side holds nothing but prompts: with responses on both sides the difference is the models' own.
    """
    side, seen = saw_unlike(a, b, join)
    if side:
        reason = f"its model is not causal ({seen}): its prompt rows saw the responses, the other side's did not"
        reason += " (PROMPTS_ONLY=1 runs the prompts alone where it can; activation.log says where not, and why)"
        matching.unavailable += [Entry(m.label, reason, side) for m in (*matching.matched, *matching.routing)]
        matching.matched, matching.routing = [], []


def saw_unlike(a: Dump, b: Dump, join: SequenceJoin) -> tuple[str, str]:
    """Return the side whose prompt rows alone saw responses, and what declares it; both empty where none did."""
    said = [_saw_responses((a, b), join, side) for side in (0, 1)]
    if all(said) or not any(dump.manifest.get("prompts_only") for dump in (a, b)):
        return "", ""
    return next(((side, seen) for side, seen in zip("ab", said) if seen), ("", ""))


def _saw_responses(dumps: tuple[Dump, Dump], join: SequenceJoin, side: int) -> str:
    """Return what declares that a side's prompt rows depend on the responses behind them, empty where nothing does.

    A rollout that generates has run each prompt before there was a response. So has a forward of prompts alone: one
    of sequences that are no longer than the prompts, of which the side with the shorter ones knows the end.
    """
    dump = dumps[side]
    if dump.stage == "rollout" and dump.manifest.get("forced") != "prefill":
        return ""
    both = [[[each.sequences[n] for n in pair.pieces(k)] for k, each in enumerate(dumps)] for pair in join.pairs]
    longer = any(
        max(max(len(s.tokens), s.length) for s in pieces[side]) > min(s.prompt_len for s in pieces[0] + pieces[1])
        for pieces in both
    )
    return str(dump.manifest.get("not_causal") or "") if longer and dump.prompts != {"shadow"} else ""
