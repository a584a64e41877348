"""Suspects, replays and locations in the words that every form of the report uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from probe.compare.report.model import Report, counted, label, number, worst_tokens

#: Sides of a suspect or a tensor -> the words a reader sees.
SIDES = {"a": "A", "b": "B", "both": "A and B", "unknown": "unknown", "": ""}

#: Words of the recommended action -> what they mean.
ACTIONS = {"continue": "Continue", "correct": "Correct with importance sampling", "stop": "Stop"}

#: Patterns of rows -> words; what stands in braces comes from the pattern's figures.
ROW_PATTERNS = {
    "all": "all rows",
    "one-row": "one row alone, at position {first_position}",
    "few-rows": "a few rows, the first at position {first_position}",
    "decode-only": "response rows only (decode)",
    "prompt-only": "prompt rows only (prefill)",
    "from-position": "every row from position {position} on",
    "one-sequence": "one sequence alone ({sequence}), from position {from_position} on",
    "cached-prefix": "sequences that began from a cached prefix only",
}

#: Where a noise floor comes from -> words.
FLOOR_SOURCES = {
    "modelled": "modelled from the dtype and the depth",
    "measured": "measured on one side run again with random rounding (--floor)",
    "repeated": "measured on one side run again (--floor)",
    "quantised": "modelled from the declared quantisation",
}

#: What a word of a replay means, the worst first.
REPLAY_WORDS = {
    "broken": "rounding does not explain it",
    "suspect": "rounding may not explain it",
    "unmodelled": "both sides compute something else than the replay, and agree",
    "fine": "rounding explains it",
}
#: The three errors of a replay: key, key of its band, heading.
REPLAY_FIGURES = (
    ("error", "band", "all rows"),
    ("worst_row", "row_band", "worst row"),
    ("worst_column", "column_band", "worst column"),
)

CALM = {"consistent": "no gate, replay or tensor shows a fault", "incomparable": "too little was compared"}


def no_suspect(report: Report) -> str:
    """Return the sentence that stands in place of suspects, empty where there are some."""
    if report["suspects"]:
        return ""
    return f"No suspect: {CALM.get(report['verdict'], 'what differs points to no cause that is known')}."


def percent(confidence: Any) -> str:
    """Return a confidence (0 to 1) in percent."""
    return f"{100 * confidence:.0f} %" if isinstance(confidence, (int, float)) else "-"


def action_title(report: Report) -> str:
    """Return the recommended action in words, empty where there is none."""
    return ACTIONS.get(report["action"].get("word", ""), "")


#: Where the difference of a token lies -> words; a tensor's name stands in place of the first.
LIES_IN = {
    "layer": "a layer",
    "log-prob": "log-prob only",
    "noise": "rounding only",
    "unknown": "not known",
}


def first_words(token: Mapping[str, Any]) -> str:
    """Return where the row that scores a token first leaves the noise band, in words; empty where nobody looked."""
    first = token.get("first_layer")
    return label(first) if first else LIES_IN.get(token.get("lies_in", ""), "")


# -- where ------------------------------------------------------------------------------------------------------------


def row_words(pattern: Mapping[str, Any]) -> str:
    """Return a pattern of rows in words, with how many rows it is."""
    words = ROW_PATTERNS.get(pattern["kind"], pattern["kind"])
    figures = {**dict.fromkeys(("first_position", "position", "sequence", "from_position"), "?"), **pattern["figures"]}
    return f"{words.format_map(figures)}: {pattern['rows']} of {pattern['of']}"


def channel_words(pattern: Mapping[str, Any]) -> str:
    """Return a pattern of features in words."""
    shown = ", ".join(map(str, pattern["columns"])) + (", …" if pattern["count"] > len(pattern["columns"]) else "")
    of = f" of {pattern['of']}" if pattern["of"] else ""
    share = "" if pattern["share"] is None else f", with {pattern['share']:.0%} of the squared error"
    return f"{counted(pattern['count'], 'column')}{of} ({shown}){share}"


def first_pattern(report: Report, key: str) -> Mapping[str, Any] | None:
    """Return the pattern (``rows`` or ``channels``) of the first divergent tensor, else of the first that has one."""
    entries: Sequence[Mapping[str, Any]] = report["located"].get(key) or []
    first = report["first_divergence"] or {}
    wanted = (first.get("name"), first.get("slot"))
    return next((entry for entry in entries if (entry["name"], entry["slot"]) == wanted), next(iter(entries), None))


def located_words(report: Report) -> list[str]:
    """Return sentences on where the divergence is: growth, rows, columns, tokens; none where nothing stands out."""
    located = report["located"]
    sentences = []
    jumps = located.get("jumps") or []
    if jumps:
        more = f", and at {counted(len(jumps) - 1, 'later tensor')}" if len(jumps) > 1 else ""
        to = "values that are not finite" if jumps[0]["after"] is None else f"{number(jumps[0]['after'])} noise floors"
        sentences.append(f"The error jumps at {label(jumps[0])}, from {number(jumps[0]['before'])} to {to}{more}.")
    elif located.get("growth") == "drift":
        sentences.append("The error drifts: it grows with depth, and no single tensor makes it jump.")
    rows, channels = first_pattern(report, "rows"), first_pattern(report, "channels")
    sentences += [f"Rows that are off in {label(rows)}: {row_words(rows)}."] if rows else []
    sentences += [f"Columns that are off in {label(channels)}: {channel_words(channels)}."] if channels else []
    tokens = located.get("tokens") or []
    if tokens:
        more = f", and {len(tokens) - 1} more" if len(tokens) > 1 else ""
        place = f"position {tokens[0]['position']} of {tokens[0]['sequence']}"
        sentences.append(f"Tokens that stand out: {place}, first in {label(tokens[0])}{more}.")
    return sentences + worst_words(report)


def worst_words(report: Report) -> list[str]:
    """Return sentences on where the worst tokens come from: a layer, or no layer at all; none where rounding does."""
    worst = [token for token in worst_tokens(report) if "lies_in" in token]
    order = {(layer["name"], layer["slot"]): layer["order"] for layer in report["layers"]}
    first = [token["first_layer"] for token in worst if token["first_layer"]]
    sentences = []
    if first:
        earliest = min(first, key=lambda entry: order.get((entry["name"], entry["slot"]), len(order)))
        here = sum(label(entry) == label(earliest) for entry in first)
        sentences.append(
            f"{len(first)} of the {len(worst)} worst tokens are scored by rows that leave the noise band, the earliest "
            f"in {label(earliest)} ({counted(here, 'token')})."
        )
    outside = sum(token["lies_in"] == "log-prob" for token in worst)
    return sentences + ([log_prob_words(outside, len(worst))] if outside else [])


def log_prob_words(outside: int, of: int) -> str:
    """Return what it means that some of the worst tokens differ although their hidden states and logits agree."""
    return (
        f"Of the {of} worst tokens {outside} have hidden states and logits that agree within rounding: their log-probs "
        "part in how they are taken (temperature, top-p, a shift, the precision of the log-softmax), not in a layer."
    )


OWN_FLOORS = 4.0
"""Noise floors above which an own error is shown: the judge's band of a suspicion."""


def largest_own(report: Report, limit: int = 8) -> list[dict[str, Any]]:
    """Return the layers whose own error exceeds OWN_FLOORS noise floors, the largest first."""
    known = [layer for layer in report["layers"] if layer.get("own_error") and layer.get("floor")]
    above = [layer for layer in known if layer["own_error"] > OWN_FLOORS * layer["floor"]]
    return sorted(above, key=lambda layer: -layer["own_error"])[:limit]


def own_share(layer: Mapping[str, Any]) -> str:
    """Return the share of a tensor's squared error that its inputs do not explain, a dash where that is not known."""
    own, error = layer.get("own_error"), layer.get("rel_l2")
    return "-" if own is None or not error else f"{min(1.0, (own / error) ** 2):.0%}"


def floor_words(report: Report) -> str:
    """Return where the noise floors come from."""
    sources = [layer.get("floor_source") for layer in report["layers"] if layer.get("floor_source")]
    counts = {source: sources.count(source) for source in dict.fromkeys(sources)}
    bounds = sum(bool(layer.get("bound")) for layer in report["layers"])
    least = f"; relL2 of {bounds} tensors is what statistics of their rows say it is at least" if bounds else ""
    if len(counts) == 1:
        return "".join(FLOOR_SOURCES.get(source, source) for source in counts) + least
    words = (f"{FLOOR_SOURCES.get(source, source)} for {count} tensors" for source, count in counts.items())
    return ", ".join(words) + least


def golden_words(layer: Mapping[str, Any]) -> str:
    """Return how a tensor's two errors against the reference compare, empty without a reference."""
    golden = layer.get("golden")
    if not golden:
        return ""
    farther = f", {SIDES[golden['side']]} is farther" if golden.get("side") else ""
    return f"{number(golden['ratio'])}{farther}"


# -- replays ----------------------------------------------------------------------------------------------------------


def replay_words(report: Report) -> list[str]:
    """Return one sentence per side on what was replayed, with what, and why not."""
    replay = report["replay"]
    sentences = []
    for side in ("a", "b"):
        done = [entry[side] for entry in replay["modules"] if entry.get(side)]
        why = (replay.get("why_not") or {}).get(side)
        if done:
            counts = {word: sum(found["verdict"] == word for found in done) for word in REPLAY_WORDS}
            found = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
            source = (replay.get("weights") or {}).get(side)
            weights = f" Weights: {source}." if source else ""
            cut = sum(bool(found["toward_zero"]) for found in done)
            rounding = f" {counted(cut, 'result')} rounded toward zero." if cut else ""
            sentences.append(f"{side.upper()}: {counted(len(done), 'module')} replayed, {found}.{rounding}{weights}")
        if why:
            what = "modules with parameters were not replayed" if done else "not replayed"
            sentences.append(f"{side.upper()}: {what}: {why}.")
    return sentences


def severity(entry: Mapping[str, Any]) -> tuple[int, float]:
    """Return a sort key of a replayed module: its worst word, then how far it exceeds its band."""
    sides = [entry[side] for side in ("a", "b") if entry.get(side)]
    words = list(REPLAY_WORDS)
    return min(words.index(found["verdict"]) for found in sides), -max(_excess(found) for found in sides)


def _excess(found: Mapping[str, Any]) -> float:
    excess = found.get("excess")
    return float("inf") if excess is None else float(excess)


def replays_to_read(report: Report, limit: int = 8) -> list[Mapping[str, Any]]:
    """Return the replayed modules that are not fine, the worst first; without any those nearest to their band."""
    ranked = sorted(report["replay"]["modules"], key=severity)
    flagged = [entry for entry in ranked if severity(entry)[0] < list(REPLAY_WORDS).index("fine")]
    return (flagged or ranked[:3])[:limit]


def against_band(found: Mapping[str, Any] | None) -> str:
    """Return the error of one side's replay that exceeds its band most, in roundings, with the band."""
    if not found:
        return "-"
    error, band, heading = max(REPLAY_FIGURES, key=lambda keys: _share(found, keys))
    where = "" if error == "error" else f" in the {heading}"
    return f"{number(found[error])} of {number(found[band])}{where}"


def _share(found: Mapping[str, Any], keys: tuple[str, str, str]) -> float:
    value, band = found.get(keys[0]), found.get(keys[1])
    if value is None:
        return float("inf")
    return float(value) / band if band else 0.0


def explained(entry: Mapping[str, Any]) -> str:
    """Return the hypothesis that fits a broken module best, per side, empty without one."""
    parts = []
    for side in ("a", "b"):
        found = entry.get(side) or {}
        for best in (found.get("explanations") or [])[:1]:
            parts.append(f"{side.upper()}: {best['cause']}, {best['text']}; {number(best['error'])} roundings are left")
    return ". ".join(parts)


def not_replayed(report: Report, limit: int = 20) -> list[Mapping[str, Any]]:
    """Return the reasons why modules were not replayed, the commonest first."""
    return sorted(report["replay"].get("skipped") or [], key=lambda entry: -entry["count"])[:limit]


def sides_known(layers: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether it is known of any of the layers which side is wrong."""
    return any(layer.get("side") for layer in layers)
