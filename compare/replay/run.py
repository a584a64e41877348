"""Replay one side, or both sides of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from probe.compare.copies import Beside
from probe.compare.evidence import BROKEN, FINE, SUSPECT, UNMODELLED, Replayed, Replays, RowKeys
from probe.compare.names.base import pattern
from probe.compare.names.canonical import place_of
from probe.compare.replay.base import Context, Recipe, Unreplayable
from probe.compare.replay.explain import Reading, bands_of, explain, read_best, settled
from probe.compare.replay.figures import relative_rows, words_of
from probe.compare.replay.inputs import LOG_PROBS, StoredTensors, choose_keys
from probe.compare.replay.recipes import RECIPES
from probe.compare.replay.weights import Found, changed_since, find_parameters
from probe.compare.sequences import sequence_labels
from probe.compare.side import Side
from probe.errors import CheckpointError

MULTIPLICATIONS = 2e11
"""Multiplications of one side's replay: about 20 s of one core. A larger model is replayed on fewer rows."""

LEAST_ROWS = 24
FEATURES = 1 << 22
"""Elements of one output that are recomputed at once, 32 MiB: a large vocabulary is replayed on fewer rows."""

EXPLAINED = 32
"""Modules of a side that hypotheses are tried on: half of them the first in execution order, half the worst."""


OTHER_CHECKPOINT = "give the checkpoint that ran; two runs of other weights agree or not without it"


@dataclass
class SideReplay:
    """What replaying one side gave: the modules, why others were not, and where the parameters came from."""

    modules: dict[str, Replayed]
    skipped: dict[str, str]
    found: Found


def replay_sides(
    a: Side, b: Side, weights: str | Path | None, prefer: tuple[Mapping[str, RowKeys], Mapping[str, RowKeys]]
) -> Replays:
    """Replay every canonical tensor of both sides whose inputs are stored.

    ``weights``: the checkpoint, None for the one that the manifest names; ``prefer``: for each side canonical label ->
    the rows to replay before others. Raises CheckpointError for ``weights`` that cannot be read.
    """
    result, foreign, read = Replays(), dict[str, str](), list[tuple[Side, Found]]()
    for name, side, done in zip("ab", (a, b), _both(a, b, weights, prefer)):
        result.by_side[name], result.skipped[name] = done.modules, done.skipped
        if done.found.words:
            result.weights[name] = done.found.words
        if done.found.why_not:
            result.why_not[name] = done.found.why_not
        foreign[name] = done.found.foreign
        read.append((side, done.found))
    if all(foreign.values()):
        raise CheckpointError(f"{weights} holds the weights of neither side: {foreign['a']}", OTHER_CHECKPOINT)
    for (name, modules), (side, found), (other, _) in zip(result.by_side.items(), read, reversed(read)):
        result.by_side[name] = _without_changed(modules, side, other, found, weights)
    return result


def _both(
    a: Side, b: Side, weights: str | Path | None, prefer: tuple[Mapping[str, RowKeys], Mapping[str, RowKeys]]
) -> tuple[SideReplay, SideReplay]:
    """Replay both sides at once where a copy of the process can do side b; its parameters stay there."""

    def other() -> SideReplay:
        done = replay_side(b, "b", weights, prefer[1])
        return replace(done, found=replace(done.found, parameters=None))

    copy = Beside(other)
    try:
        return replay_side(a, "a", weights, prefer[0]), copy.result()
    finally:
        copy.close()


def _without_changed(
    modules: dict[str, Replayed], side: Side, other: Side, found: Found, weights: str | Path | None
) -> dict[str, Replayed]:
    """Return a side's replays, of those that do not fit the ones whose parameters are not the checkpoint's unmodelled.

    Where both sides hold one value and the checkpoint another, the file is not what ran: written over since, or of
    another step. Where the sides' values differ, the weights gate says so.
    """
    wrong = {label: label.rpartition(":")[0] for label, replayed in modules.items() if replayed.verdict != FINE}
    if not wrong:
        return modules
    if found.parameters is None and not found.why_not:
        found = find_parameters(side, weights)  # those of side b stayed where it was replayed
    names = [f"{module}.{kind}" for module in wrong.values() for kind in ("weight", "bias")]
    changed = {name.rpartition(".")[0] for name in changed_since(side, other, found, names)}
    words = "the checkpoint's parameters are not those that both sides ran with"
    return modules | {
        label: replace(modules[label], verdict=UNMODELLED, reason=f"{words}: {modules[label].reason}")
        for label, module in wrong.items()
        if module in changed
    }


def replay_side(
    side: Side, name: str, weights: str | Path | None, prefer: Mapping[str, RowKeys] | None = None
) -> SideReplay:
    """Replay one dump (see :func:`replay_sides`); ``name``: what the results call its side."""
    found = find_parameters(side, weights)
    tensors = StoredTensors(side)
    skipped: dict[str, str] = {}
    read: dict[str, tuple[Recipe, Context, Reading]] = {}
    settled_at: dict[str, float] = {}
    for label, recipe, values in _targets(side, tensors):
        try:
            context = _context(side, label, recipe, values, found, tensors, (prefer or {}).get(label))
            enough = settled_at.get(recipe.output, 0.0)
            reading = read_best(recipe, context, enough)
        except Unreplayable as why:
            skipped[label] = str(why)
            continue
        if reading is None:
            skipped[label] = "no row was stored with all its inputs"
        else:
            read[label] = recipe, replace(context, memory={}), replace(reading, values=np.zeros(0))
            if reading.first > enough:  # all readings were tried
                settled_at[recipe.output] = settled(reading)
    return SideReplay(_judged(name, read), skipped, found)


def _targets(side: Side, tensors: StoredTensors) -> Iterator[tuple[str, Recipe, dict[str, str]]]:
    """Yield what can be replayed in execution order: label, recipe, and its layer and expert."""
    labels = [*side.resolution.sources, *([LOG_PROBS] if tensors.has(LOG_PROBS) else [])]
    for label in sorted(labels, key=lambda label: _order(label, side.shape.layers)):
        if not tensors.independent(label):
            continue
        for recipe, values in _recipes_of(label):
            if recipe.applies(side):
                yield label, recipe, values
                break


def _order(label: str, layers: int) -> tuple[tuple[int, ...], str]:
    place = place_of(label, layers)
    return (place.rank if place else (1 << 30,)), label


def _recipes_of(label: str) -> Iterator[tuple[Recipe, dict[str, str]]]:
    for output, recipes in RECIPES.items():
        match = pattern(output).match(label)
        if match:
            yield from ((recipe, match.groupdict()) for recipe in recipes)


def _context(
    side: Side,
    label: str,
    recipe: Recipe,
    values: Mapping[str, str],
    found: Found,
    tensors: StoredTensors,
    prefer: RowKeys | None,
) -> Context:
    rows = min(recipe.rows, _affordable(side), max(LEAST_ROWS, FEATURES // max(tensors.features(label), 1)))
    prompts = np.array([sequence.prompt_len for sequence in side.dump.sequences], np.int64)
    keys = choose_keys(tensors.keys(label), prefer, prompts, rows, recipe.sequences)
    if not len(keys):
        raise Unreplayable("no row of it belongs to a sequence")
    layer, expert = (int(values[name]) if name in values else None for name in ("i", "e"))
    given: dict[str, Any] = {"config": found.config, "tensors": tensors, "parameters": found.parameters}
    return Context(
        side, label, layer, expert, keys, tensors.dtype(label), why_no_parameters=found.why_not or "no weights", **given
    )


def _affordable(side: Side) -> int:
    """Return how many rows of every module can be recomputed: the model's linears cost their parameters per row."""
    shape = side.shape
    parameters = shape.layers * shape.hidden * (4 * shape.hidden + 3 * shape.intermediate)
    return int(max(LEAST_ROWS, MULTIPLICATIONS // max(parameters, 1)))


# -- words ------------------------------------------------------------------------------------------------------------


def _judged(side: str, read: Mapping[str, tuple[Recipe, Context, Reading]]) -> dict[str, Replayed]:
    """Give every replayed module its word, and explain those that do not fit."""
    words: dict[str, str] = {}
    for members in _by_kind(read).values():
        bands = [bands_of(read[label][0], read[label][1].dtype) for label in members]
        errors = np.array([read[label][2].figures.error / band[0] for label, band in zip(members, bands)])
        excesses = np.array([read[label][2].excess for label in members])
        words |= zip(members, words_of(errors, excesses))
    chosen = _to_explain({label: read[label] for label in read if words[label] != FINE})
    return {label: _replayed(side, label, *read[label], words[label], label in chosen) for label in read}


def _by_kind(read: Mapping[str, tuple[Recipe, Context, Reading]]) -> dict[str, list[str]]:
    """Group labels whose errors are alike in every layer: those of one canonical module."""
    groups: dict[str, list[str]] = {}
    for label, (recipe, _, _) in read.items():
        groups.setdefault(recipe.output, []).append(label)
    return groups


def _to_explain(wrong: Mapping[str, tuple[Recipe, Context, Reading]]) -> set[str]:
    worst = sorted(wrong, key=lambda label: -wrong[label][2].excess)
    return {*list(wrong)[: EXPLAINED // 2], *worst[: EXPLAINED // 2]}


def _replayed(
    side: str, label: str, recipe: Recipe, context: Context, reading: Reading, word: str, explained: bool
) -> Replayed:
    figures, bands = reading.figures, bands_of(recipe, context.dtype)
    sequence, position = (int(number) for number in context.keys[figures.row])
    explanations = explain(recipe, context, reading) if explained else ()
    found = Replayed(
        label=label,
        kind=recipe.kind,
        side=side,
        rows=figures.rows,
        error=figures.error,
        band=bands[0],
        worst_row=figures.worst_row,
        row_band=bands[1],
        row=(sequence, position),
        worst_column=figures.worst_column,
        column_band=bands[2],
        column=figures.column,
        verdict=word,
        explanations=explanations,
        toward_zero=reading.toward_zero,
        keys=context.keys,
        each_row=figures.each_row,
        relative_rows=np.zeros(0) if word == FINE else relative_rows(context.value(label), reading.difference),
    )
    return replace(found, reason=_reason(found, context.side)) if word in (BROKEN, SUSPECT) else found


def _reason(found: Replayed, side: Side) -> str:
    """Say by how much a module misses its band, in the figure that misses it most, and what would explain it."""
    position = f"position {found.row[1]} of sequence {sequence_labels(side.dump.sequences)[found.row[0]]}"
    figures: Iterable[tuple[float, float, str]] = (
        (found.error, found.band, ""),
        (found.worst_row, found.row_band, f" at {position}"),
        (found.worst_column, found.column_band, f" in feature {found.column}"),
    )
    value, band, where = max(figures, key=lambda entry: entry[0] / entry[1])
    text = f"{value:.3g} roundings{where} where {band:.3g} are allowed"
    if found.kind == "router ids":  # a number of roundings says nothing of an id
        text = f"other experts than its own logits choose, not by rounding, at {position}"
    if found.explanations:
        text += f": {found.explanations[0].text}"
    return text
