"""``probe show``: what a dump holds, or one module of it, as tables or as JSON. Never imports torch."""

from __future__ import annotations

import fnmatch
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from probe.cli import common

if TYPE_CHECKING:
    from probe.store.reader import Dump
    from probe.store.schema import Sequence, TensorInfo, WeightSketch

MAX_SEQUENCES, MAX_TENSORS, MAX_MODULES = 12, 400, 8
"""Lines shown before a note says how many were left out (--all shows them, --json always does)."""
HEAD_ROWS, TAIL_ROWS, FEATURES = 3, 1, 6
STATISTICS = ("min", "max", "mean", "norm")
OF_ROWS = ("norm", "sum", "largest", "smallest", "NaN", "Inf")
"""What is shown of a row of which only statistics are stored, as :mod:`probe.store.statistics` numbers them."""


@click.command(
    cls=common.Command,
    examples="""
    probe show d/rollout
    probe show job
    probe show d/rollout layers.2.mlp.down_proj
    probe show d/actor 'decoder.layers.*.mlp.linear_fc2'
    probe show d/rollout --json | jq '.tensors[] | select(.nan > 0)'
    """,
)
@click.argument("dump", metavar="DUMP", type=click.Path(path_type=Path))
@click.argument("module", metavar="[MODULE]", required=False)
@click.option("--all", "everything", is_flag=True, cls=common.GroupedOption, help="Show every line, however many.")
@click.option("--json", "as_json", is_flag=True, cls=common.GroupedOption, help="Print JSON on standard output.")
def show(dump: Path, module: str | None, everything: bool, as_json: bool) -> None:
    """Show what a dump holds, or one module of it.

    Without MODULE: the run, its sequences and its tensors; of a job's folder (DUMP_ON=1) its stages and steps. MODULE
    is a module's path, a part of one, or a pattern with * and ?; append :SLOT to see one slot. Shown are its tensors
    with statistics and values, and its weights.
    """
    from probe.compare.job import is_job
    from probe.store.reader import open_dump

    if module is None and is_job(dump):
        show_job(dump, everything, as_json)
        return
    with open_dump(dump) as opened:
        data = describe_dump(opened) if module is None else describe_modules(opened, module)
    if as_json:
        from probe.compare.report.model import dumps

        sys.stdout.write(dumps(data) + "\n")
    elif module is None:
        _print_dump(data, everything)
    else:
        _print_modules(data, everything)


def show_job(path: Path, everything: bool, as_json: bool) -> None:
    """Print the stages and steps of a job's folder."""
    from probe.cli.show_job import describe_job, print_job

    data = describe_job(path, everything=everything or as_json)
    if as_json:
        from probe.compare.report.model import dumps

        sys.stdout.write(dumps(data) + "\n")
    else:
        print_job(data)


# -- plain data -------------------------------------------------------------------------------------------------------


def describe_dump(dump: Dump) -> dict[str, Any]:
    """Return the manifest, sequences, tensors and weights of a dump as plain data."""
    return {
        "path": str(dump.path),
        "complete": dump.complete,
        "lost": dump.lost,
        "manifest": dump.manifest,
        "sequences": [_sequence(s) for s in dump.sequences],
        "tensors": [_tensor(t) for t in dump.tensors.values()],
        "weights": [_weight(w) for w in dump.weights.values()],
    }


def describe_modules(dump: Dump, pattern: str) -> dict[str, Any]:
    """Return the modules that ``pattern`` names as plain data: class, scalars, tensors with values, weights.

    Raises UsageError with the closest names when nothing matches.
    """
    wanted, _, slot = pattern.partition(":")
    paths = find_modules(dump, wanted)
    slots = sorted({s for module, s in dump.tensors if module in paths})
    if slot and slot not in slots:
        raise common.unknown_name("slot", slot, slots, f"{wanted} has {', '.join(slots) or 'no tensor'}")
    return {"path": str(dump.path), "modules": [_module(dump, path, slot) for path in paths]}


def find_modules(dump: Dump, pattern: str) -> list[str]:
    """Return the module paths that ``pattern`` names: itself, else by wildcard, whole components, or part of a path."""
    known = list(dict.fromkeys([*dump.modules, *(module for module, _ in dump.tensors)]))
    rules = (
        lambda path: path == pattern,
        lambda path: fnmatch.fnmatchcase(path, pattern),
        lambda path: f".{path}".endswith(f".{pattern}"),
        lambda path: f".{pattern}." in f".{path}.",
        lambda path: pattern in path,
    )
    for rule in rules:
        found = [path for path in known if rule(path)]
        if found:
            return found
    raise common.unknown_name("module", pattern, known, f"see 'probe show {dump.path}'")


def _sequence(sequence: Sequence) -> dict[str, Any]:
    response = max(0, sequence.length - sequence.prompt_len)
    return {"uid": sequence.uid, "prompt": sequence.prompt_len, "response": response, "sample": sequence.sample}


def _tensor(info: TensorInfo) -> dict[str, Any]:
    shape = {"rows": info.rows, "features": list(info.feature_shape), "per_token": info.has_rows}
    numbers = {name: float(getattr(info, name)) for name in STATISTICS}
    return {"module": info.module, "slot": info.slot, "dtype": info.dtype, **shape, **numbers} | {
        "nan": info.nan,
        "inf": info.inf,
        "ranks": info.over_ranks,
        "left_out": info.left_out,
        "lacking": info.lacking,
        "reduced": info.reduced,
    }


def _weight(sketch: WeightSketch) -> dict[str, Any]:
    squares = sketch.rows[:, 2] if sketch.rows.shape[1:] == (3,) else sketch.rows**2
    norm = float(squares.sum()) ** 0.5 if sketch.rows.size else math.nan
    alias = {"alias": sketch.alias} if sketch.alias else {}
    return {"name": sketch.name, "shape": list(sketch.shape), "dtype": sketch.dtype, "norm": norm, **alias}


def _module(dump: Dump, path: str, slot: str) -> dict[str, Any]:
    info = dump.modules.get(path)
    tensors = [t for key, t in dump.tensors.items() if key[0] == path and slot in ("", key[1])]
    return {
        "module": path,
        "class": info.cls if info else "",
        "scalars": {k: v for k, v in (info.info if info else {}).items() if k != "parameters"},
        "tensors": [_tensor(t) | {"values": _values(dump, t)} for t in tensors],
        "weights": [_weight(w) for name, w in dump.weights.items() if name.rpartition(".")[0] == path],
    }


def _values(dump: Dump, info: TensorInfo) -> list[dict[str, Any]]:
    """Return the first features (or the statistics) of the first and last rows, a stored block at a time."""
    if info.reduced:
        return _statistics(dump, info)
    head: list[dict[str, Any]] = []
    tail: list[dict[str, Any]] = []
    for values, rows in dump.iter_blocks(info.module, info.slot) if info.rows else ():
        flat = values.reshape(len(values), -1)[:, :FEATURES]
        missing = HEAD_ROWS - len(head)
        head += [_row(dump, *pair) for pair in zip(flat[:missing], rows[:missing])]
        last = max(missing, len(flat) - TAIL_ROWS, 0)
        tail = [_row(dump, *pair) for pair in zip(flat[last:], rows[last:])] or tail
    return head + tail


def _statistics(dump: Dump, info: TensorInfo) -> list[dict[str, Any]]:
    from probe.store.statistics import merged

    if not info.rows or (info.ranks > 1 and info.shard == "partial"):
        return []
    values = merged(dump.read_statistics(info.module, info.slot))[:, : len(OF_ROWS)]
    pairs = list(zip(values, dump.rows(info.module, info.slot)))
    last = max(HEAD_ROWS, len(pairs) - TAIL_ROWS)
    return [_row(dump, *pair) for pair in pairs[:HEAD_ROWS] + pairs[last:]]


def _row(dump: Dump, values: Any, row: Any) -> dict[str, Any]:
    number = int(row["sequence"])
    uid = dump.sequences[number].uid if number >= 0 else ""
    return {"sequence": uid, "position": int(row["position"]), "token": int(row["token"]), "values": values.tolist()}


# -- tables -----------------------------------------------------------------------------------------------------------


def _print_dump(data: dict[str, Any], everything: bool) -> None:
    manifest = data["manifest"]
    engine, model = manifest.get("engine") or {}, manifest.get("model") or {}
    common.say(f"{data['path']}: {manifest.get('stage')} on {engine.get('name')} {engine.get('version')}", "bold")
    if not data["complete"]:
        common.say(f"incomplete: {'; '.join(data['lost'])}", "yellow")
    log_probs = manifest.get("logprobs_mode") or ""
    facts = {
        "model": f"{model.get('architecture')} at {model.get('path')}",
        "numbers": f"{manifest.get('dtype')} on {manifest.get('device')}{log_probs and f', log-probs {log_probs}'}",
        "parallel": _parallel(manifest.get("topology") or {}),
        "tokens": manifest.get("source_dump") and f"those of {manifest['source_dump']}",
        "sampling": ", ".join(f"{k} {v}" for k, v in (manifest.get("sampling") or {}).items()),
        "batching": ", ".join(f"{k} {v}" for k, v in (manifest.get("batching") or {}).items()),
        "backends": ", ".join(f"{k} {v}" for k, v in (manifest.get("backends") or {}).items() if v is not None),
        "rows": "prompt tokens only" if manifest.get("prompts_only") else "",
        "task": manifest.get("task") if manifest.get("task") != "tensor" else "",
        "created": f"{manifest.get('created')} by probe {manifest.get('probe')}",
    }
    for name, text in facts.items():
        if text:
            common.say(f"  {name:<9} {text}")
    sequences = _cut(data["sequences"], MAX_SEQUENCES, everything)
    common.table(
        f"{len(data['sequences'])} sequences",
        {"sequence": "left", "prompt": "right", "response": "right"},
        [(s["uid"], s["prompt"], s["response"]) for s in sequences],
        left_out=len(data["sequences"]) - len(sequences),
    )
    _print_tensors(data["tensors"], everything)
    common.say("")
    common.say(f"{len(data['weights'])} weights. One module: probe show {data['path']} MODULE")


def _parallel(topology: dict[str, Any]) -> str:
    """Return the sizes above 1 of a topology, and whether sequence parallelism is on; empty for one rank."""
    sizes = [f"{axis} {size}" for axis, size in topology.items() if axis != "sp" and size and size > 1]
    return ", ".join([*sizes, *(["sequence parallel"] if topology.get("sp") else [])])


def _cut(entries: list[Any], limit: int, everything: bool) -> list[Any]:
    return entries if everything else entries[:limit]


TENSOR_COLUMNS = {
    **{"module": "left", "slot": "left", "dtype": "left", "rows": "right", "features": "right"},
    **{"norm": "right", "nan/inf": "right"},
}


def _print_tensors(tensors: list[dict[str, Any]], everything: bool) -> None:
    shown = _cut(tensors, MAX_TENSORS, everything)
    rows: list[tuple[str, ...]] = [
        (t["module"] or "(model)", t["slot"], t["dtype"], *_shape(t), number(t["norm"]), f"{t['nan']}/{t['inf']}")
        for t in shown
    ]
    columns = TENSOR_COLUMNS
    if any(t["ranks"] for t in shown):
        columns, rows = {**columns, "ranks": "left"}, [(*row, t["ranks"]) for row, t in zip(rows, shown)]
    common.table(f"{len(tensors)} tensors", columns, rows, left_out=len(tensors) - len(shown))
    lacking = [t for t in tensors if t["lacking"]]
    if lacking:
        common.say(f"{len(lacking)} tensors are not whole ({lacking[0]['module']}: {lacking[0]['lacking']})", "yellow")
    reduced = sum(t["reduced"] for t in tensors)
    if reduced:
        common.say(f"of {reduced} of {len(tensors)} tensors statistics of each row are stored, not the values", "dim")
    if not all(t["per_token"] for t in shown):
        common.say("* one row per call: no axis of it runs along tokens", "dim")


def _shape(tensor: dict[str, Any]) -> tuple[str, str]:
    star = "" if tensor["per_token"] else "*"
    return f"{tensor['rows']}{star}", "x".join(map(str, tensor["features"])) or "1"


def number(value: float | int | bool) -> str:
    """Return a value of a tensor in at most 11 characters."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _print_modules(data: dict[str, Any], everything: bool) -> None:
    modules = _cut(data["modules"], MAX_MODULES, everything)
    for module in modules:
        common.say(f"{module['module'] or '(model)'}  {module['class']}".rstrip(), "bold")
        for name, value in module["scalars"].items():
            common.say(f"  {name} = {value}")
        for tensor in module["tensors"]:
            _print_values(tensor)
        for weight in module["weights"]:
            shape = "x".join(map(str, weight["shape"]))
            alias = f", shared with {weight['alias']}" if "alias" in weight else ""
            common.say(f"  weight {weight['name']}: {weight['dtype']} {shape}, norm {number(weight['norm'])}{alias}")
        common.say("")
    if len(modules) < len(data["modules"]):
        common.say(f"... and {len(data['modules']) - len(modules)} more modules that match (--all shows them)", "dim")


def _print_values(tensor: dict[str, Any]) -> None:
    rows, features = _shape(tensor)
    statistics = ", ".join(f"{name} {number(tensor[name])}" for name in STATISTICS)
    trouble = f", {tensor['nan']} NaN, {tensor['inf']} Inf" if tensor["nan"] or tensor["inf"] else ""
    ranks = f", {tensor['ranks']}" if tensor["ranks"] else ""
    common.say(f"  {tensor['slot']}: {tensor['dtype']} {rows} rows x {features}, {statistics}{trouble}{ranks}")
    if tensor["lacking"]:
        common.say(f"    {tensor['left_out']} rows are left out: {tensor['lacking']}", "yellow")
    if tensor["reduced"]:
        common.say(f"    {'of each row':<14}{''.join(f'{name:>12}' for name in OF_ROWS)}", "dim")
    gap = tensor["rows"] > HEAD_ROWS + TAIL_ROWS
    for place, row in enumerate(tensor["values"]):
        if gap and place == HEAD_ROWS:
            common.say("    ...", "dim")
        where = f"{row['sequence']} {row['position']}" if tensor["per_token"] else "call"
        values = "".join(f"{number(v):>12}" for v in row["values"])
        more = " ..." if math.prod(tensor["features"]) > FEATURES and not tensor["reduced"] else ""
        common.say(f"    {where:<14}{values}{more}")
