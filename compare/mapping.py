"""``--map FILE``: pairs of names that a user states, which go before every table. docs/names.md has the schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from probe.compare.merge import OPERATIONS
from probe.compare.names import table_for
from probe.compare.names.base import EngineTable, Rule, Source, fill, label_of, pattern, strip_native
from probe.compare.names.canonical import place_of
from probe.compare.side import Given, Side, read_sides
from probe.errors import UsageError
from probe.settings import read_object
from probe.store.reader import Dump

SECTIONS = ("tensors", "parameters")
OPTIONS = ("a", "b", "operation", "operation_a", "operation_b")
FIRST = {"i": "0", "e": "0", "p": "weight"}
"""Values that turn a canonical pattern into a label of every model."""


@dataclass(frozen=True)
class Pair:
    """One entry of a mapping file.

    ``key`` as written; ``canonical``: the labels it speaks of; ``a`` and ``b``: native labels of each side, empty where
    the side's own table is to find them; ``operations``: how each side's natives are merged.
    """

    key: str
    section: str
    canonical: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    operations: tuple[str, str]


@dataclass(frozen=True)
class UserMap:
    """A mapping file, read and checked as far as it can be without the dumps."""

    path: Path
    pairs: tuple[Pair, ...]


def load_map(path: str | Path) -> UserMap:
    """Read a mapping file (json, or yaml with PyYAML installed); raise UsageError naming the entry that is wrong."""
    where = Path(path)
    values = read_object(where, "mapping", '{"layers.{i}.mlp": "decoder.layers.{i}.mlp"}')
    sections = values if values and set(values) <= set(SECTIONS) else {"tensors": values}
    pairs = []
    for section, entries in sections.items():
        if not isinstance(entries, Mapping):
            raise UsageError(f"section {section!r} of {where} is no object of names", "write NAME: NAME below it")
        pairs += [_pair(where, section, str(key), value) for key, value in entries.items()]
    if not pairs:
        raise UsageError(f"the mapping file {where} has no entry", "write at least one NAME: NAME")
    return UserMap(where, tuple(pairs))


def _pair(path: Path, section: str, key: str, value: Any) -> Pair:
    entry = value if isinstance(value, Mapping) else {"b": value}
    unknown = next((name for name in entry if name not in OPTIONS), None)
    if unknown is not None:
        raise _bad(path, key, f"has the option {unknown!r}", f"use {', '.join(OPTIONS)}")
    names = {side: _names(path, key, section, entry.get(side)) for side in "ab"}
    canonical = tuple(_label(part.strip(), section) for part in key.split(","))
    if not names["a"] and not names["b"]:
        raise _bad(path, key, "names no tensor of either side", "write a name of b, or {a: NAME, b: NAME}")
    if not all(_is_canonical(label, section) for label in canonical):
        if names["a"] or len(canonical) > 1:
            raise _bad(path, key, "is no canonical name", "docs/names.md lists them; or write A's NAME: B's NAME")
        names["a"] = canonical
    operations = []
    for side in "ab":
        operation = str(entry.get(f"operation_{side}", entry.get("operation", "")) or _usual(names[side]))
        if operation not in OPERATIONS:
            near = get_close_matches(operation, OPERATIONS, 1)
            fix = f"did you mean {near[0]!r}?" if near else f"use {', '.join(OPERATIONS)}"
            raise _bad(path, key, f"asks for the operation {operation!r}, which does not exist", fix)
        operations.append(operation if "operation" not in entry or len(canonical) > 1 or side == "b" else "whole")
    return Pair(key, section, canonical, names["a"], names["b"], (operations[0], operations[1]))


def _usual(names: tuple[str, ...]) -> str:
    return "sum" if len(names) > 1 else "whole"


def _names(path: Path, key: str, section: str, value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value] if value is not None else []
    if not all(isinstance(name, str) and name for name in names):
        raise _bad(path, key, f"has {value!r} where a name is expected", "write a name, or a list of names to add up")
    holes = [set(re.findall(r"\{(\w+)\}", name)) for name in (key, *names)]
    if any(hole - set(FIRST) for hole in holes) or any(hole != holes[0] for hole in holes[1:]):
        raise _bad(
            path, key, "does not have the same placeholders on both sides", "use {i} (layer), {e} (expert), {p} alike"
        )
    return tuple(_label(name, section) for name in names)


def _label(name: str, section: str) -> str:
    return name if section == "parameters" or ":" in name else f"{name}:output.0"


def _is_canonical(label: str, section: str) -> bool:
    label = re.sub(r"^model\.(?=layers\.|norm:|embed_tokens:)", "", label)
    return section == "parameters" or place_of(fill(label, FIRST), layers=1) is not None


def _bad(path: Path, key: str, problem: str, fix: str) -> UsageError:
    return UsageError(f"entry {key!r} of {path} {problem}", fix)


# -- against two dumps ------------------------------------------------------------------------------------------------


def read_mapped(a: Dump, b: Dump, given: UserMap | None) -> tuple[Side, Side]:
    """Read both sides with the user's pairs before the tables; raise UsageError for a pair that matches nothing."""
    if given is None:
        return read_sides(a, b)
    rules = tuple(_rules(given, dump, number) for number, dump in enumerate((a, b)))
    sides = read_sides(a, b, (rules[0], rules[1]))
    for pair in given.pairs:
        for number, side in enumerate(sides):
            _require_matched(given.path, pair, side, "ab"[number])
    return sides


def _rules(given: UserMap, dump: Dump, number: int) -> Given:
    table = table_for(dump.engine, [label_of(key) for key in dump.tensors])
    rules: dict[str, list[Rule]] = {section: [] for section in SECTIONS}
    for pair in given.pairs:
        names = (pair.a, pair.b)[number]
        canonical = tuple(strip_native(label, ("model.",)) for label in pair.canonical)
        if names:
            natives = tuple(strip_native(name, table.prefixes) for name in names)
            rule = Rule(natives, canonical, pair.operations[number], stated=str(given.path))
            rules[pair.section].append(rule)
    return Given(tuple(rules["tensors"]), tuple(rules["parameters"]))


def _require_matched(path: Path, pair: Pair, side: Side, name: str) -> None:
    sources = side.resolution.sources if pair.section == "tensors" else side.parameter_sources()
    canonical = [pattern(strip_native(label, ("model.",))) for label in pair.canonical]
    mine = [source for label, source in sources.items() if any(wanted.match(label) for wanted in canonical)]
    wanted = pair.a if name == "a" else pair.b
    natives = [pattern(strip_native(label, side.table.prefixes)) for label in wanted]
    if any(_reads(source, natives) for source in mine):
        return
    known = side.natives if pair.section == "tensors" else [side.strip(weight) for weight in side.dump.weights]
    shown = wanted[0] if wanted else pair.canonical[0]
    where = f"{name} ({side.dump.path})"
    problem = (
        f"names {shown}, which is not in {where}" if wanted else f"matches nothing in {where}, whose table gives none"
    )
    raise _bad(path, pair.key, problem, f"the nearest names there are {_nearest(shown, known, side.table)}")


def _reads(source: Source, natives: Iterable[re.Pattern[str]]) -> bool:
    return all(any(wanted.match(label) for label in source.native) for wanted in natives)


def _nearest(label: str, known: Iterable[str], table: EngineTable) -> str:
    general = list(dict.fromkeys(re.sub(r"(?<=layers\.)\d+|(?<=\.h\.)\d+", "{i}", name) for name in known))
    near = get_close_matches(strip_native(label, table.prefixes), general, 3, cutoff=0.0)
    return ", ".join(near) or "none"
