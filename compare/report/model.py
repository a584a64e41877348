"""The report as plain data: what ``report.json`` holds, and the small questions every form asks of it.

Nothing here measures or judges; ``probe.compare.run`` makes the dictionary, the forms render it.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Report = dict[str, Any]
Layer = dict[str, Any]

SCHEMA = 1

#: Verdict words of one module, the worst first. The order is the sort order of every table.
VERDICTS = ("divergent", "suspect", "incomparable", "missing", "consistent", "identical")
#: Verdict words of the whole comparison.
OVERALL = ("consistent", "suspect", "divergent", "incomparable")
GATE_STATUSES = ("pass", "warn", "fail", "skipped")
#: Where a side's log-probs come from -> the words a reader sees.
LOGPROB_SOURCES = {"engine": "as the engine returned them", "recomputed": "recomputed from the logits"}

#: Why a row of one side did not join -> the words a reader sees; the order is the order in which reasons are tried.
ROW_REASONS = {
    "padding": "padding",
    "computed_again": "computed again in a later piece of the trajectory",
    "not_trained": "of a sequence that the job's trainer did not train on",
    "other_sequence": "of a sequence that only this side has",
    "other_version": "of another weight version",
    "prefix_cache": "not executed by the other side (prefix cache)",
    "not_executed": "not executed by the other side (last generated token)",
    "prompts_only": "response rows that the other side was told not to store",
    "budget": "left out by the other side's budget (PROBE_SEQS, PROBE_ROWS, PROBE_MAX_BYTES, or a list of sequences)",
    "beyond_prefix": "after the point where the two sides' tokens part",
    "part_of_shards": "stored by some tensor-parallel ranks only",
    "not_stored": "not stored by the other side",
}

_TYPES: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "probe": (str,),
    "created": (str,),
    "a": (dict,),
    "b": (dict,),
    "verdict": (str,),
    "headline": (str,),
    "summary": (str,),
    "not_compared": (list,),
    "gates": (list,),
    "coverage": (dict,),
    "layers": (list,),
    "first_divergence": (dict, type(None)),
    "located": (dict,),
    "replay": (dict,),
    "suspects": (list,),
    "moe": (dict, type(None)),
    "tokens": (dict,),
    "ppo": (dict,),
    "environment": (list,),
    "backends": (dict,),
    "action": (dict,),
    "next_commands": (list,),
}
_PLACE = ("name", "slot")
#: Path to a list of entries -> the keys that each of them has.
_ENTRY_KEYS = {
    "gates": ("name", "status", "detail", "findings"),
    "gates.findings": ("cause", "subject", "side", "text", "figures"),
    "layers": (*_PLACE, "order", "verdict", "side"),
    "environment": ("key", "a", "b", "severity"),
    "suspects": ("name", "side", "cause", "confidence", "evidence", "next_check"),
    "action.figures": ("name", "value", "healthy", "source", "ok"),
    "located.jumps": (*_PLACE, "before", "after", "factor"),
    "located.deltas": (*_PLACE, "rel_l2", "rounding", "norm_ratio", "rows"),
    "located.tokens": (*_PLACE, "sequence", "position", "token", "rel_l2", "band"),
    "located.rows": (*_PLACE, "kind", "rows", "of", "figures"),
    "located.channels": (*_PLACE, "columns", "count", "of", "share"),
    "replay.modules": (*_PLACE, "kind", "a", "b"),
    "replay.skipped": (*_PLACE, "side", "count", "reason"),
}
ACTION_WORDS = ("continue", "correct", "stop")
SIDES = ("", "a", "b", "both", "unknown")


def clean_floats(value: Any) -> Any:
    """Return a copy that JSON can hold: NaN and infinities become None, numpy values become Python ones."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): clean_floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean_floats(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, recognised without importing numpy
        return clean_floats(value.tolist())
    return str(value)


def dumps(value: Any) -> str:
    """Return indented, ASCII-only, strict JSON text; non-finite floats are written as null."""
    return json.dumps(clean_floats(value), indent=2, allow_nan=False)


def validate(report: Mapping[str, Any]) -> None:
    """Check the top-level keys, their types and the words they may hold.

    Raises ValueError that lists every problem: a report that does not validate is a programming error, not a user's.
    """
    problems = [f"missing key {key!r}" for key in _TYPES if key not in report]
    for key, types in _TYPES.items():
        if key in report and not isinstance(report[key], types):
            names = " or ".join(kind.__name__ for kind in types)
            problems.append(f"{key!r} is {type(report[key]).__name__}, expected {names}")
    if not problems:
        problems = list(_word_problems(report))
    if problems:
        raise ValueError("not a valid report: " + "; ".join(problems))


def _word_problems(report: Mapping[str, Any]) -> Iterable[str]:
    if report["schema"] != SCHEMA:
        yield f"schema is {report['schema']}, expected {SCHEMA}"
    if report["verdict"] not in OVERALL:
        yield f"verdict is {report['verdict']!r}, expected one of {', '.join(OVERALL)}"
    for path, keys in _ENTRY_KEYS.items():
        for where, entry in _entries(report, path):
            absent = [key for key in keys if key not in entry]
            if absent:
                yield f"{where} lacks {', '.join(absent)}"
            if entry.get("side", "") not in SIDES:
                yield f"{where} has side {entry['side']!r}"
    for gate in report["gates"]:
        if gate.get("status") not in GATE_STATUSES:
            yield f"gate {gate.get('name')!r} has status {gate.get('status')!r}"
    for layer in report["layers"]:
        if layer.get("verdict") not in VERDICTS:
            yield f"layer {layer.get('name')!r} has verdict {layer.get('verdict')!r}"
    if report["action"].get("word") not in ACTION_WORDS:
        yield f"action is {report['action'].get('word')!r}, expected one of {', '.join(ACTION_WORDS)}"
    for suspect in report["suspects"]:
        if not 0 <= suspect.get("confidence", 0) <= 1:
            yield f"suspect {suspect.get('name')!r} has confidence {suspect['confidence']!r}"


def _entries(report: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place in words, entry) of every entry of the list at a path of keys."""
    found: list[tuple[str, Any]] = [("", report)]
    for key in path.split("."):
        step = [(f"{where}.{key}".lstrip("."), value.get(key) or []) for where, value in found]
        found = []
        for where, value in step:
            many = isinstance(value, list)
            found += [(f"{where}[{index}]", item) for index, item in enumerate(value)] if many else [(where, value)]
    yield from found


def details(report: Report) -> str:
    """Return the summary without its first sentence, the headline, for forms that show the headline by itself."""
    return str(report["summary"]).removeprefix(headline_sentence(report["headline"])).strip()


def headline_sentence(headline: str) -> str:
    """Return the headline as the sentence that opens the summary."""
    return f"{headline[:1].upper()}{headline[1:]}."


#: Median margins that the forms show of a layer's routing: of its flips on each side, and of all its tokens.
ROUTING_MARGINS = (("margin", "a"), ("margin", "b"), ("margin_all", "b"))


def routing_words(moe: Mapping[str, Any]) -> str:
    """Return the figures of the report's ``moe`` in one line."""
    derived = [side.upper() for side in ("a", "b") if moe["ids"][side] != "used"]
    if moe["flips"]:
        parts = [
            f"{moe['exact_set_rate']:.2%} of the choices are the same set",
            f"overlap {moe['overlap']:.4f}",
            f"{moe['flip_rate']:.1%} of {moe['tokens']} tokens use another expert in some layer",
            f"{moe['unexplained']} of {moe['flips']} flips not explained by rounding",
        ]
    else:
        layers = counted(len(moe["layers"]), "layer")
        parts = [f"{counted(moe['tokens'], 'token')} use the same experts on both sides in {layers}"]
    parts += [f"ids of {' and '.join(derived)} derived from logits"] if derived else []
    return ", ".join(parts)


def row_reasons(report: Report) -> list[tuple[str, str, int]]:
    """Return (side, reason in words, rows) for every reason why rows did not join."""
    rows = report["coverage"].get("rows") or {}
    return [
        (side, words, rows[side][reason])
        for side in ("a", "b")
        for reason, words in ROW_REASONS.items()
        if (rows.get(side) or {}).get(reason)
    ]


def label(entry: Mapping[str, Any]) -> str:
    """Return the name a reader sees for a tensor: the slot is left out where it is the usual ``output.0``."""
    slot = entry.get("slot") or "output.0"
    return str(entry["name"]) if slot == "output.0" else f"{entry['name']}:{slot}"


def in_order(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers in execution order; entries without an order come last."""
    return sorted(layers, key=lambda layer: (layer.get("order") is None, layer.get("order") or 0))


def worst_first(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers by verdict, then by ratio to the noise floor, the worst first."""

    def key(layer: Layer) -> tuple[int, float, int]:
        return (VERDICTS.index(layer["verdict"]), -(layer.get("ratio") or 0.0), layer.get("order") or 0)

    return sorted(layers, key=key)


def is_first_divergence(report: Report, layer: Layer) -> bool:
    """Tell whether ``layer`` is the first divergent tensor."""
    first = report["first_divergence"]
    return bool(first) and (first["name"], first.get("slot")) == (layer["name"], layer.get("slot"))


def focus(report: Report, limit: int = 15, before: int = 3) -> list[Layer]:
    """Return the few layers worth reading first, in execution order.

    With a first divergence: ``before`` tensors before it, itself, and the flagged ones that follow. Without one: the
    ``limit`` tensors nearest to (or furthest above) their noise floor, bit-identical ones left out.
    """
    ordered = in_order(report["layers"])
    start = next((index for index, layer in enumerate(ordered) if is_first_divergence(report, layer)), None)
    if start is None:
        return in_order(worst_first(layer for layer in ordered if layer["verdict"] != "identical")[:limit])
    flagged = [layer for layer in ordered[start + 1 :] if layer["verdict"] in ("divergent", "suspect")]
    return (ordered[max(0, start - before) : start + 1] + flagged)[:limit]


def verdict_counts(layers: Iterable[Layer]) -> dict[str, int]:
    """Count the layers per verdict, the worst first, leaving out verdicts that do not occur."""
    words = [layer["verdict"] for layer in layers]
    return {word: words.count(word) for word in VERDICTS if word in words}


def differing_environment(report: Report) -> list[dict[str, Any]]:
    """Return the environment entries whose two sides differ, warnings first."""
    entries = [entry for entry in report["environment"] if entry["a"] != entry["b"]]
    return sorted(entries, key=lambda entry: entry["severity"] != "warn")


def logprob_sources(tokens: Mapping[str, Any]) -> str:
    """Return where the log-probs of each side come from, for the ``tokens`` of a report that compared any."""
    a, b = (LOGPROB_SOURCES.get(name, f"of the column {name}") for name in (tokens["source_a"], tokens["source_b"]))
    return f"log-probs of both {a}" if a == b else f"log-probs of A {a}, of B {b}"


def worst_tokens(report: Report) -> list[dict[str, Any]]:
    """Return the worst tokens, the worst first, without those whose two log-probs are the same."""
    return [token for token in report["tokens"].get("worst") or [] if token.get("diff")]


def without_text(report: Report) -> Report:
    """Return a copy of the report with every token text and context removed (``--no-text``)."""
    tokens, ppo = dict(report["tokens"]), dict(report["ppo"])
    if "compared" in tokens:
        tokens["text"] = False
    for section, key in ((tokens, "worst"), (tokens, "by_token"), (ppo, "carriers")):
        if section.get(key):
            section[key] = [_drop_text(token) for token in section[key]]
    tokens["sequences"] = [
        {**sequence, "strip": [_drop_text(token) for token in sequence.get("strip") or []]}
        for sequence in tokens.get("sequences") or []
    ]
    return {**report, "tokens": tokens, "ppo": ppo}


_TEXTS = ("text", "context", "after")
"""Keys of a token that spell it or its neighbours out."""


def _drop_text(token: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if key in _TEXTS else value for key, value in token.items()}


def visible(text: Any, limit: int = 0) -> str:
    """Return ``text`` safe to print: control, bidirectional-override and lone-surrogate characters are spelled out.

    ``limit`` > 0 cuts to that many characters, with an ellipsis. Token text comes from a model and may hold terminal
    escape sequences.
    """
    shown = str(text)
    if limit:
        shown = shown[: limit + 1]
    if not shown.isprintable():  # most text is, and this test is fast
        shown = "".join(map(_spell, shown))
    return shown if not limit or len(shown) <= limit else shown[: limit - 1] + "…"


def _spell(char: str) -> str:
    if unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return char
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char, f"\\x{ord(char):02x}" if ord(char) < 256 else _long(char))


def _long(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural where it is not 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def number(value: Any, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits, and a dash for None."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, int):
        return str(value)
    # Adding zero turns -0.0 into 0.0.
    return f"{value + 0.0:.{digits}g}" if isinstance(value, float) else str(value)
