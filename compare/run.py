"""Compare two dumps and return the report as plain data: gates, then layers, then tokens."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from probe._version import __version__
from probe.checkpoint import Checkpoint
from probe.compare.align import RowAligner
from probe.compare.cluster import figure_maker
from probe.compare.coverage import FewerRows, RowCoverage, count_rows, fewer_rows, held_rows, token_share
from probe.compare.diagnose.run import diagnose, recommend
from probe.compare.environment_gate import environment_entries
from probe.compare.evidence import Evidence, Replays
from probe.compare.figures import Observer
from probe.compare.findings import located_section, replay_section
from probe.compare.floors.golden import measure_golden
from probe.compare.floors.measured import measure_floors
from probe.compare.gaps import ALONE, NO_VALUES, not_compared, tokens_only, without_tensors
from probe.compare.job import open_sides
from probe.compare.judge import overall
from probe.compare.locate.first import first_divergence, worst_rows
from probe.compare.locate.run import locate
from probe.compare.locate.token_layers import join_layers
from probe.compare.logprobs import complete_logprobs
from probe.compare.mapping import load_map, read_mapped
from probe.compare.match import SAME_NAME, Match, Matching, match_tensors
from probe.compare.measure import Measured, Measurer
from probe.compare.merge import CanonicalReader
from probe.compare.moe.experts import excuse_idle, is_expert
from probe.compare.moe.flips import Routing
from probe.compare.moe.section import section as moe_section
from probe.compare.names.canonical import LOGITS
from probe.compare.ppo import PPOConfig
from probe.compare.preflight import preflight
from probe.compare.replay.run import replay_sides
from probe.compare.replay.verdicts import apply_replays, scaled_after_the_head
from probe.compare.report.model import SCHEMA, clean_floats
from probe.compare.sampling_gate import OTHER_DISTRIBUTION
from probe.compare.sections import coverage_section, dump_summary, layers_section
from probe.compare.sequences import SequenceJoin, join_sequences
from probe.compare.side import Side
from probe.compare.summary import headline, next_commands, summary
from probe.compare.tokens.batch import batch_of_dumps
from probe.compare.tokens.explained import unexplained_difference
from probe.compare.tokens.section import token_section
from probe.compare.tokens.text import load_decoder
from probe.compare.tokens.update import ppo_section
from probe.compare.versions import lag_of
from probe.compare.visibility import leave_out_unlike, saw_unlike
from probe.compare.weights_gate import declared_lag, settle_lag
from probe.errors import CompareError
from probe.store.reader import Dump

EXIT_STATUS = {"consistent": 0, "suspect": 1, "divergent": 1, "incomparable": 2}
MIN_COVERAGE = 0.9
"""Share of tensors and of rows that must have been compared before two dumps can be called consistent."""


@dataclass(frozen=True)
class Options:
    """How two dumps are compared.

    ``mapping``: a file of names that go before the tables (docs/names.md); ``min_coverage``: share of tensors and rows
    below which the verdict is ``incomparable``; ``across_versions``: join rows of different weight versions too;
    ``text``: decode tokens through the checkpoint's tokenizer; ``floor``: a dump of one side's engine run again;
    ``golden``: a dump of the same tokens in a higher precision; ``weights``: the checkpoint to replay modules with
    (None: the one that the manifest names, where its weights match); ``replay``: whether to replay at all; ``jobs``:
    tensors measured at the same time (0: one per core); ``ray``: the address of a Ray cluster that measures them.
    """

    mapping: str | Path | None = None
    min_coverage: float = MIN_COVERAGE
    across_versions: bool = False
    text: bool = True
    floor: str | Path | None = None
    golden: str | Path | None = None
    weights: str | Path | None = None
    replay: bool = True
    jobs: int = 0
    ray: str | None = None

    def words(self) -> str:
        """Return the options as a command line repeats them."""
        given = {"--map": self.mapping, "--floor": self.floor, "--golden": self.golden, "--weights": self.weights}
        given |= {"--ray": self.ray}
        words = [f"{name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None]
        words += ["--across-versions"] if self.across_versions else []
        words += [f"--min-coverage {self.min_coverage:g}"] if self.min_coverage != MIN_COVERAGE else []
        return " ".join(words + ([] if self.replay else ["--no-replay"]))


def compare_dumps(
    path_a: str | Path,
    path_b: str | Path | None = None,
    *,
    step: int | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compare two dumps of one stage each and return the report (the content of ``report.json``).

    Without ``path_b`` the first path is a job's folder, whose own stages are compared (:mod:`probe.compare.job`).
    ``step``: the training step of both, by default the first; ``observer``: called with (what, done, total);
    ``options``: the fields of :class:`Options`. Raises DumpError for a dump that cannot be read, CompareError for two
    dumps that have nothing in common, UsageError for a mapping that does not fit them, or a folder that is no job's.
    """
    with open_sides(path_a, path_b, step) as (a, b, job):
        operands, update = (job.pair.operands, job.update) if job else ("", None)
        return compare_open(a, b, observer=observer, operands=operands, update=update, **options)


def compare_open(
    a: Dump,
    b: Dump,
    *,
    observer: Observer | None = None,
    update: Dump | None = None,
    operands: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Compare two open dumps (see :func:`compare_dumps`).

    ``update``: a third dump of the same tokens that holds what the trainer knows of them (advantages, ...);
    ``operands``: what the command line names instead of the two dumps' paths.
    """
    chosen = Options(**options)
    if chosen.weights is not None:
        Checkpoint(chosen.weights)  # one that cannot be read is refused before anything is measured
    mapping = load_map(chosen.mapping) if chosen.mapping is not None else None
    side_a, side_b = read_mapped(a, b, mapping)
    for side in (side_a, side_b):
        complete_logprobs(side)
    _require_same_model(side_a, side_b)
    join = join_sequences(a, b)
    _require_joined(a, b, join)
    settle_lag(join, side_a, side_b)
    (matching, reader), environment = _pair(side_a, side_b, join, chosen), environment_entries(a, b)
    gates = preflight(side_a, side_b, join, environment, chosen.weights)
    aligner = RowAligner(join, a.sequences, b.sequences, across_versions=chosen.across_versions)
    floors, floor_gate = measure_floors(side_a, side_b, matching.matched, chosen.floor)
    with figure_maker(chosen.ray, a, b, mapping) as maker:
        measurer = Measurer(side_a, side_b, aligner, matching, floors, observer, chosen.jobs, maker, reader)
        measured = measurer.run()
    gates += [*floor_gate, *measure_golden(side_a, side_b, measured, chosen.golden)]
    batch = batch_of_dumps(a, b, aligner, update)
    decode = load_decoder(a, b) if chosen.text else None
    tokens = token_section(batch, decode)
    rows = count_rows(aligner, measurer.joins, a, b, measurer.recomputed, measurer.left_out())
    _require_something(aligner, a, b, measured, tokens, rows)
    excuse_idle(matching, measurer.routing)
    fewer = _count_fewer(aligner, measured, rows)
    evidence = Evidence(
        side_a,
        side_b,
        join,
        gates,
        matching,
        measured,
        rows,
        fewer,
        tokens,
        batch,
        ppo_section(batch, PPOConfig(), decode),
        environment,
        _tensor_share(side_a, side_b, matching, measured),
        chosen.min_coverage,
        chosen.words(),
        operands,
    )
    _conclude(evidence, aligner, chosen)
    return dict(clean_floats(_report(evidence, measurer.routing)))


def _pair(a: Side, b: Side, join: SequenceJoin, options: Options) -> tuple[Matching, type[CanonicalReader]]:
    """Return which tensors are compared, and what reads them."""
    matching, reader = match_tensors(a, b), CanonicalReader
    if a.dump.reduced or b.dump.reduced:
        from probe.compare.statistics import StatisticsReader, by_statistics, refuse_options

        reduced = a.dump if a.dump.reduced else b.dump
        refuse_options(reduced, floor=options.floor, golden=options.golden, ray=options.ray)
        matching, reader = by_statistics(a, b, matching), StatisticsReader
    leave_out_unlike(matching, a.dump, b.dump, join)
    return matching, reader


def _count_fewer(aligner: RowAligner, measured: list[Measured], rows: RowCoverage) -> list[FewerRows]:
    """Return the tensors that were compared on fewer rows than others, and note in ``rows`` what share they hold."""
    joins = [(entry.match.label, entry.join) for entry in measured if entry.join is not None]
    fewer = fewer_rows(aligner, [(label, join) for label, join in joins if not is_expert(label)])
    rows.held = held_rows(joins, fewer, {entry.match.label for entry in measured if _has_every_row(entry.match)})
    return fewer


def _conclude(e: Evidence, aligner: RowAligner, options: Options) -> None:
    """Replay, judge the whole, locate and diagnose: what rests on everything measured."""
    if e.a.reduced or e.b.reduced:
        e.replays = Replays(why_not={name: NO_VALUES if d.reduced else ALONE for name, d in (("a", e.a), ("b", e.b))})
    elif options.replay:
        e.replays = replay_sides(e.side_a, e.side_b, options.weights, worst_rows(e.measured))
    unexplained = unexplained_difference(e.a, e.b, aligner, _agreeing_logits(e.measured))
    apply_replays(e)
    if scaled_after_the_head(e.replays):  # logits do not say what such log-probs are: they explain themselves
        known = e.tokens["mean_abs_logprob_diff"], e.tokens["max_abs_logprob_diff"]
        unexplained = replace(unexplained, mean=known[0], worst=known[1])
    e.tokens |= {"unexplained_mean": unexplained.mean, "unexplained_max": unexplained.worst}
    statuses = {gate.name: gate.status for gate in e.gates}
    words = [entry.judgement.verdict for entry in e.measured]
    if any(without_tensors(dump) for dump in (e.a, e.b)):
        e.token_share = token_share(aligner, e.a, e.b, e.batch)
    coverage = min(e.tensor_share, e.rows.covered, 1.0 if e.token_share is None else e.token_share)
    other = any(finding.cause in OTHER_DISTRIBUTION for finding in e.gate("sampling").findings)
    e.verdict = overall(words, statuses, unexplained.mean, coverage, e.min_coverage, unexplained.worst, other)
    e.first = first_divergence(e.measured, e.join.pairs)
    e.located = locate(e)
    join_layers(e)
    e.suspects = diagnose(e)


def _report(e: Evidence, routing: Routing) -> dict[str, Any]:
    """Put the report together."""
    return {
        "schema": SCHEMA,
        "probe": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "a": dump_summary(e.a),
        "b": dump_summary(e.b),
        "verdict": e.verdict,
        "headline": headline(e),
        "summary": summary(e),
        "not_compared": not_compared(e),
        "gates": [gate.as_dict() for gate in e.gates],
        "coverage": coverage_section(e),
        "layers": layers_section(e),
        "first_divergence": e.first,
        "located": located_section(e),
        "replay": replay_section(e),
        "suspects": [suspect.as_dict() for suspect in e.suspects],
        "moe": moe_section(routing, [pair.label for pair in e.join.pairs]),
        "tokens": e.tokens,
        "ppo": e.ppo,
        "environment": e.environment,
        "backends": {"a": e.a.manifest.get("backends") or {}, "b": e.b.manifest.get("backends") or {}},
        "action": recommend(e),
        "next_commands": next_commands(e),
    }


def exit_status(report: Mapping[str, Any]) -> int:
    """Return the exit status of a report: 0 consistent, 1 suspect or divergent, 2 incomparable."""
    return EXIT_STATUS[report["verdict"]]


# -- two dumps that have nothing in common ----------------------------------------------------------------------------


def _require_same_model(a: Side, b: Side) -> None:
    for what in ("hidden", "layers"):
        left, right = getattr(a.shape, what), getattr(b.shape, what)
        if left and right and left != right:
            words = {"hidden": "hidden size", "layers": "number of layers"}[what]
            problem = (
                f"the dumps are of different models: {words} is {left} in {a.dump.path} and {right} in {b.dump.path}"
            )
            raise CompareError(problem, "compare two dumps of one checkpoint")


def _require_joined(a: Dump, b: Dump, join: SequenceJoin) -> None:
    for dump in (a, b) if not join.pairs else ():
        if not any(len(sequence.tokens) for sequence in dump.sequences):
            problem = f"the sequences of {dump.path} hold no token ids (a later pipeline stage sees hidden states only)"
            raise CompareError(f"{problem} and no name says which they are", "announce the same uids on both sides")
    if not join.pairs:
        problem = f"no sequence of {a.path} is one of {b.path}: their prompts' token ids differ"
        raise CompareError(problem, "dump both sides from the same prompts and tokenizer (probe dump --from)")


def _require_something(
    aligner: RowAligner, a: Dump, b: Dump, measured: list[Measured], tokens: Mapping[str, Any], rows: RowCoverage
) -> None:
    if tokens["compared"] or any(entry.metrics is not None for entry in measured) or saw_unlike(a, b, aligner.join)[0]:
        return
    lag = lag_of(aligner.join, a.sequences, b.sequences)
    if lag is not None and any(lag.rows.values()):  # nothing to measure, but the weights gate has something to say
        return
    if rows.count("other_version") or declared_lag(a, b):
        versions = [", ".join(map(str, sorted({s.weight_version for s in dump.sequences}))) for dump in (a, b)]
        problem = f"no row of {a.path} (weight version {versions[0]}) and {b.path} ({versions[1]}) has the same weights"
        raise CompareError(problem, "compare dumps of one weight version, or add --across-versions")
    problem = f"{a.path} and {b.path} have no tensor and no response log-prob in common"
    raise CompareError(problem, "see what each holds with 'probe show'")


def _has_every_row(match: Match) -> bool:
    """Tell whether a tensor should have a row of every token: logits are made where they are asked for."""
    known = match.proposal is None and match.source_a.origin != SAME_NAME
    return known and match.label != LOGITS and not is_expert(match.label)


def _agreeing_logits(measured: list[Measured]) -> Measured | None:
    """Return the logits where both sides' agree within rounding, with figures that say by how much they differ."""
    whole = (m for m in measured if m.match.label == LOGITS and m.metrics is not None and not m.metrics.is_bound)
    fine = (m for m in whole if m.judgement.verdict in ("identical", "consistent"))
    return next(fine, None)


def _tensor_share(a: Side, b: Side, matching: Matching, measured: list[Measured]) -> float:
    """Return the share of canonical tensors that were compared; those a spec makes unavailable do not count.

    Dumps that both hold tensors of which none has a canonical name share none. Where a side says that it recorded
    tokens only there is no tensor to miss; one that should hold tensors and has none lost them.
    """
    bare = [side.dump for side in (a, b) if without_tensors(side.dump)]
    if bare and all(map(tokens_only, bare)):
        return 1.0
    compared = sum(entry.metrics is not None for entry in measured)
    total = len(measured) + len(matching.only_a) + len(matching.only_b)
    if not total:
        return 0.0
    return compared / total
