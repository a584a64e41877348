"""Dumps as a source of log-probs: two of them, one against its own logits, or one beside a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from probe.compare.align import RowAligner, pack, read_table
from probe.compare.diagnose.action import loose_ranges
from probe.compare.job import carried_pair, is_job, open_sides
from probe.compare.logprobs import complete_logprobs
from probe.compare.names.canonical import LOGITS
from probe.compare.sampling_fits import rows_of, some_of
from probe.compare.sequences import join_sequences
from probe.compare.side import Side, read_side, read_sides
from probe.compare.tokens.batch import TokenBatch, batch_of_dumps, origin_of
from probe.compare.tokens.meaning import SOURCES
from probe.compare.tokens.read.assemble import Reading, assemble
from probe.compare.tokens.read.pair import pair_tables, pair_with_itself
from probe.compare.tokens.read.table import Table
from probe.compare.tokens.rl import Cells, mask_responses, read_column, read_rl
from probe.compare.tokens.text import Decoder, load_decoder
from probe.compare.tokens.worst import record_of
from probe.compare.trajectories import name_of
from probe.compare.versions import lag_of
from probe.compare.weights_gate import lag_words
from probe.errors import CompareError
from probe.store.reader import Dump, open_dump
from probe.store.schema import RL

NO_LOGPROBS = "no log-prob of a response token"
FIX = "dump a stage with log-probs, or with its logits, to compute them from"


def read_dumps(paths: tuple[Path, ...], step: int | None = None) -> tuple[TokenBatch, Decoder | None]:
    """Return the tokens of two dumps (rollout, actor), of a job's stages, or of one dump against its own logits.

    ``step``: the training step, by default the first. The batch has logits of some tokens where a side stored them.
    Raises DumpError for a dump that cannot be read, UsageError for a job without that step, CompareError for dumps
    without log-probs or without a sequence in common.
    """
    carried = carried_pair(paths[0], step) if len(paths) == 1 else None
    if carried is not None:
        return _carried(*carried)
    with ExitStack() as stack:
        update = None
        if len(paths) == 1 and not is_job(paths[0]):
            dumps = [stack.enter_context(open_dump(paths[0], step))]
        else:
            *dumps, job = stack.enter_context(open_sides(paths[0], paths[1] if len(paths) == 2 else None, step))
            update = job.update if job is not None else None
        sides = read_sides(dumps[0], dumps[1]) if len(dumps) == 2 else (read_side(dumps[0]),)
        for side in sides:
            complete_logprobs(side)
        batch, numbers = _two(*sides, update) if len(sides) == 2 else _one(sides[0])
        batch.records = [record_of(dumps[0], int(number)) for number in numbers[0]]
        batch.loose = loose_ranges(sides[0], sides[-1])
        for dump in dumps:
            if dump.unread:
                folders = ", ".join(folder.name for folder in dump.unread)
                batch.notes.append(
                    f"{dump.path} also holds {folders}: add --step or name a step's folder to compare it"
                )
        _add_rows(batch, sides, numbers)
        return batch, load_decoder(*dumps)


def _two(a: Side, b: Side, update: Dump | None = None) -> tuple[TokenBatch, tuple[np.ndarray, ...]]:
    """Return the batch of two dumps, and for each side the dump's number of each sequence of the batch."""
    join = join_sequences(a.dump, b.dump)
    if not join.pairs:
        raise CompareError(
            f"{a.dump.path} and {b.dump.path} have no sequence in common", "dump the same tokens: probe dump --from"
        )
    lag = lag_of(join, a.dump.sequences, b.dump.sequences)
    aligner = RowAligner(join, a.dump.sequences, b.dump.sequences, across_versions=lag is not None)
    batch = batch_of_dumps(a.dump, b.dump, aligner, update)
    if batch is None:
        raise CompareError(f"{a.dump.path} or {b.dump.path} holds {NO_LOGPROBS}", FIX)
    if lag is not None and lag_words(lag):  # what an update has to correct: it is compared, and said
        batch.notes.append(f"{lag_words(lag).lstrip('; ')}: their log-probs differ by the updates in between too")
    alone = len(join.only_a), len(join.only_b)
    for dump, count in zip((a.dump, b.dump), alone):
        if count:
            batch.left_out.append(f"{count} of {len(dump.sequences)} sequences of {dump.path}: no partner")
    return batch, (np.array([p.a for p in join.pairs]), np.array([p.b for p in join.pairs]))


GIVEN = "rollout_log_probs"


def _carried(path_a: Path, path_b: Path) -> tuple[TokenBatch, Decoder | None]:
    """Return the batch of a job whose rollout was not recorded: a is what it gave the trainer, b the trainer's own.

    ``path_a`` is the update, which stores the former beside its tokens, ``path_b`` the log-prob pass.
    """
    with open_dump(path_a) as update, open_dump(path_b) as trainer:
        if (RL, GIVEN) not in update.tensors:
            raise CompareError(
                f"{path_a} holds no {GIVEN}, and the job no rollout",
                "record the rollout, or let it return them (verl: actor_rollout_ref.rollout.calculate_log_probs=True)",
            )
        mask_responses((update, trainer), update)
        tables = [table_of_dump(dump) for dump in (update, trainer)]
        _add_column(tables[0], GIVEN, read_column(update, GIVEN))
        tables[0].mask = tables[0].mask & np.isfinite(tables[0].cells[GIVEN])
        pairs = pair_tables(*tables)
        batch = assemble(Reading(tables[0], GIVEN), Reading(tables[1], "engine"), pairs)
        batch.records = [record_of(update, int(number)) for number in pairs.rows[0]]
        batch.notes.append("the rollout was not recorded: a is what it gave the trainer (rollout_log_probs of update)")
        return batch, load_decoder(update, trainer)


def _one(side: Side) -> tuple[TokenBatch, tuple[np.ndarray, ...]]:
    """Return the batch of one dump: a is what the engine returned, b what its logits say."""
    table = table_of_dump(side.dump)
    known = {name: bool((table.mask & np.isfinite(table.cells[name])).any()) for name in SOURCES}
    if not all(known.values()):
        held = "only " + next(name for name, any_ in known.items() if any_) if any(known.values()) else "neither"
        raise CompareError(
            f"{side.dump.path} holds {held} of its engine's log-probs and those of its logits",
            "give a second source to compare with",
        )
    table.mask = table.mask & ~np.isnan(table.cells["engine"]) & ~np.isnan(table.cells["recomputed"])
    table.origins["recomputed"] = replace(table.origins["recomputed"], set_aside=None)  # here they are what is compared
    batch = assemble(Reading(table, "engine"), Reading(table, "recomputed"), pair_with_itself(table))
    return batch, (np.arange(len(table)),)


# -- a dump as a table ------------------------------------------------------------------------------------------------


@contextmanager
def dump_table(path: Path) -> Iterator[tuple[Table, Decoder | None]]:
    """Open a dump as a table whose ``log_probs`` are its engine's, or those of its logits where it has none."""
    with open_dump(path) as dump:
        complete_logprobs(read_side(dump))
        table = table_of_dump(dump)
        source = next((name for name in SOURCES if np.isfinite(table.cells[name][table.mask]).any()), None)
        if source is not None:
            table.cells["log_probs"], table.names["log_probs"] = table.cells[source], source
            table.origins["log_probs"] = table.origins[source]
            table.mask = table.mask & ~np.isnan(table.cells[source])
        yield table, load_decoder(dump)


def table_of_dump(dump: Dump) -> Table:
    """Return a dump's tokens after each prompt as cells; ``engine`` and ``recomputed`` are NaN where unknown."""
    tokens = dump.tokens
    prompt = np.array([sequence.prompt_len for sequence in dump.sequences], np.int64)
    kept = tokens[tokens["position"] >= prompt[tokens["sequence"]]] if len(tokens) else tokens
    table = Table(
        path=dump.path,
        kind="dump",
        width=np.bincount(kept["sequence"], minlength=len(prompt)).astype(np.int64),
        cells={name: kept[column] for name, column in SOURCES.items()},
        names={name: name for name in SOURCES},
        mask=kept["response"].astype(bool),
        masked_by="response",
        token=kept["token"].astype(np.int64),
        prompts=[sequence.tokens[: sequence.prompt_len] for sequence in dump.sequences],
        whole=True,
        uid=[name_of(sequence) for sequence in dump.sequences],
        sample=np.array([sequence.sample for sequence in dump.sequences], np.int64),
        origins={name: origin_of(dump, name) for name in SOURCES},
    )
    for column, cells in read_rl(dump).items():
        _add_column(table, column, cells)
    return table


def _add_column(table: Table, column: str, cells: Cells) -> None:
    """Add a column of a trainer's to the table of its dump, NaN where it says nothing."""
    sequence, position, values = cells
    row, place = table.place(np.arange(int(table.width.sum())))
    keys, found = pack(row, table.start[row] + place), pack(sequence, position)
    known = np.isin(found, keys)
    table.cells[column] = np.full(len(keys), np.nan)
    table.cells[column][np.searchsorted(keys, found[known])] = values[known]


# -- logits -----------------------------------------------------------------------------------------------------------


def _add_rows(batch: TokenBatch, sides: tuple[Side, ...], numbers: tuple[np.ndarray, ...]) -> None:
    """Add stored logits of some tokens: of a side whose log-probs are its engine's, else of one that computed them."""
    if batch.a is None or batch.b is None or not len(batch):
        return
    order = sorted(range(len(sides)), key=lambda side: batch.origins[side].key != "engine")
    picked = some_of(len(batch))
    for number in order:
        side = sides[number]
        source = side.resolution.sources.get(LOGITS)
        if source is None or side.dump.tensors[side.natives[source.native[0]]].reduced:
            continue
        key = side.natives[source.native[0]]
        table = read_table(side.dump.rows(*key))
        owner = batch.sequence[picked]
        wanted = pack(numbers[number][owner], batch.start[owner] + batch.position[picked] - 1)
        known = np.isin(wanted, table.cells)
        if not known.any():
            continue
        rows = table.last[np.searchsorted(table.cells, wanted[known])]
        parts = [part.reshape(len(rows), -1) for part in side.dump.read_shards(*key, rows)]
        logits = np.concatenate(parts, axis=1)[:, : side.shape.vocab or None]
        at, scores = picked[known], (batch.a, batch.b)[number]
        inside = (batch.token[at] < logits.shape[1]) & np.isfinite(logits).all(axis=1)
        if inside.any():
            batch.rows_of, batch.rows_at = "ab"[number], at[inside]
            dtype = side.dump.tensors[key].dtype
            batch.rows = rows_of(logits[inside], batch.token[at[inside]], scores[at[inside]], dtype)
            return
