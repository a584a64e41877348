"""Log-probs from wherever they lie: dumps, a monitor's folder, npz, parquet or jsonl files, verl's pickled batches.

A path becomes a batch in steps:

- ``sniff`` tells its kind
- ``npz``, ``parquet``, ``jsonl`` and ``verl_batch`` read columns under the file's own names (``RawFile``)
- ``names`` says what these mean, and ``table`` makes of them one row per sequence and one cell per response token
  (``Table``); ``dumps`` does so of a dump
- ``pair`` tells which sequences of two tables are the same, and ``assemble`` takes the tokens inside both masks

A ``monitor``'s folder and two dumps give a batch without a table. ``columns`` joins advantages and the like to a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from probe.compare.tokens.batch import TokenBatch
from probe.compare.tokens.read.assemble import Reading, assemble
from probe.compare.tokens.read.columns import add_columns
from probe.compare.tokens.read.dumps import dump_table, read_dumps
from probe.compare.tokens.read.jsonl import read_jsonl
from probe.compare.tokens.read.monitor import read_monitor
from probe.compare.tokens.read.names import BOTH_SCORES, SCORES, SIDE_SCORES
from probe.compare.tokens.read.npz import read_npz
from probe.compare.tokens.read.pair import pair_tables, pair_with_itself
from probe.compare.tokens.read.parquet import read_parquet
from probe.compare.tokens.read.sniff import sniff
from probe.compare.tokens.read.table import RawFile, Table, make_table
from probe.compare.tokens.read.verl_batch import read_verl_batch
from probe.compare.tokens.text import Decoder, decoder_of
from probe.errors import TokensError, UsageError
from probe.sampling import Semantics

READERS: dict[str, Callable[[Path, bool], RawFile]] = {
    "npz": read_npz,
    "parquet": read_parquet,
    "jsonl": read_jsonl,
    "verl-batch": read_verl_batch,
}
"""Kind of a file -> what reads it, given the path and whether pickles are trusted (of use to verl-batch only)."""


def read_sources(
    paths: Sequence[Path],
    *,
    trust: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    tokenizer: Path | None = None,
    step: int | None = None,
) -> tuple[TokenBatch, Decoder | None]:
    """Read one source that holds both sides, or the rollout's and then the actor's, and return (tokens, decoder).

    ``step``: the training step of dumps; ``trust``: pickles may be read; ``temperature`` and ``top_p``: what the
    rollout of files sampled with; ``tokenizer``: a tokenizer.json, or a folder with one, for ids of files. Sides, masks
    and joins are those of docs/tokens.md; what was decided on the way is in the batch's ``notes``. Raises UsageError,
    TokensError, DumpError or CompareError with one sentence.
    """
    if not 1 <= len(paths) <= 2:
        raise UsageError(
            f"{len(paths)} sources were given", "give one that holds both sides, or the rollout's and the actor's"
        )
    kinds = [sniff(path) for path in paths]
    sampled_at = _sampled_at(temperature, top_p)
    if kinds[0] == "dump" and sampled_at is not None:
        raise UsageError("--temperature and --top-p are for files", "a dump's manifest says what it sampled with")
    if step is not None and set(kinds) != {"dump"}:
        raise UsageError("--step is for dumps", "leave it out: the report lists the steps of files")
    if "monitor" in kinds and (len(paths) > 1 or sampled_at is not None):
        raise UsageError(
            "a monitor's folder holds differences, no log-probs", "give it alone, without sampling options"
        )
    decode = None if tokenizer is None else decoder_of(tokenizer)
    if kinds == ["monitor"]:
        return read_monitor(paths[0]), decode
    if set(kinds) == {"dump"}:
        batch, own = read_dumps(tuple(paths), step)
        return batch, decode or own
    with ExitStack() as stack:
        read = [_table(path, kind, trust, stack) for path, kind in zip(paths, kinds)]
        batch = _batch([table for table, _ in read])
    if sampled_at is not None:
        batch.origins = (replace(batch.origins[0], sampled_at=sampled_at), batch.origins[1])
    return batch, decode or next((own for _, own in read if own), None)


def read_columns(path: Path, batch: TokenBatch, *, trust: bool = False) -> None:
    """Set ``batch.columns`` from a file or dump of advantages, values, ... (``probe tokens --ppo FILE``).

    NaN where the source lacks a token of the batch. Raises what :func:`read_sources` does.
    """
    kind = sniff(path)
    if kind == "monitor":
        raise UsageError(f"{path} is a monitor's folder", "--ppo needs a file with advantages")
    with ExitStack() as stack:
        add_columns(_table(path, kind, trust, stack, scores=False)[0], batch)


def _table(
    path: Path, kind: str, trust: bool, stack: ExitStack, *, scores: bool = True
) -> tuple[Table, Decoder | None]:
    if kind == "dump":
        return stack.enter_context(dump_table(path))
    return make_table(READERS[kind](path, trust), scores=scores), None


def _batch(tables: list[Table]) -> TokenBatch:
    if len(tables) == 1:
        return assemble(*_both(tables[0]), pair_with_itself(tables[0]))
    readings = [_side(table, names) for table, names in zip(tables, SIDE_SCORES)]
    return assemble(readings[0], readings[1], pair_tables(*tables))


def _both(table: Table) -> tuple[Reading, Reading]:
    """Return the two sides of a file that holds both."""
    first, others = BOTH_SCORES
    second = next((name for name in others if name in table.cells), None)
    if first not in table.cells or second is None:
        held = [table.names[name] for name in SCORES if name in table.cells]
        said = f"{table.path} holds {' and '.join(held)}" if held else f"{table.path} holds no log-probs"
        raise TokensError(f"{said}, not both {first} and {others[0]}", "add what is missing, or give both sides' files")
    _note_unused(table, (first, second))
    return Reading(table, first), Reading(table, second)


def _side(table: Table, names: tuple[str, ...]) -> Reading:
    key = next((name for name in names if name in table.cells), None)
    if key is None:
        raise TokensError(f"{table.path} holds no log-probs", f"name them {' or '.join(names)}")
    _note_unused(table, (key,))
    return Reading(table, key)


def _note_unused(table: Table, used: tuple[str, ...]) -> None:
    unused = [table.names[name] for name in SCORES if name in table.cells and name not in used]
    if unused:
        read = " and ".join(table.names[name] for name in used)
        table.notes.append(f"of {table.path} {read} was read, {' and '.join(unused)} was not")


def _sampled_at(temperature: float | None, top_p: float | None) -> Semantics | None:
    for name, value, most in (("--temperature", temperature, float("inf")), ("--top-p", top_p, 1.0)):
        if value is not None and not 0 < value <= most:
            raise UsageError(f"{name} {value:g} is not above 0" + (f" and at most {most:g}" if most == 1 else ""), "")
    if temperature is None and top_p is None:
        return None
    return Semantics(1.0 if temperature is None else temperature, 1.0 if top_p is None else top_p)
