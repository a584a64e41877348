"""Run micro-batches through Megatron's own schedules: one stage, a pipeline of stages, or interleaved chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from probe.hooks.engines.megatron import MegatronAdapter
from probe.hooks.engines.megatron_parallel import ranks
from probe.hooks.rows import Announced
from probe.hooks.runners.inprocess import announce, logprobs_at, micro_batches
from probe.hooks.runners.job import DumpJob, Observer, Parallel, TokenSequence
from probe.hooks.runners.megatron_batch import PACKED, Batch, Form, forward, make_batch
from probe.sampling import Semantics, engine_semantics

NOBODY = Announced("", length=0)
"""A batch row that only fills up the batch."""
FILLER = [0]
"""The tokens of a micro-batch that only keeps other ranks company."""


@dataclass(frozen=True)
class Plan:
    """The micro-batches of one rank (an empty one is run but not captured) and how each is laid out."""

    micro_batches: list[list[TokenSequence]]
    form: Form

    @property
    def sequences(self) -> int:
        """Return how many sequences there are in all."""
        return sum(map(len, self.micro_batches))


def make_plan(job: DumpJob, sequences: list[TokenSequence], dp: int = 0, cp: int = 0) -> Plan:
    """Return what data-parallel rank ``dp`` and context-parallel rank ``cp`` run.

    Sequences are dealt out to the data-parallel ranks in turn. Pipeline stages exchange tensors of one shape, and
    expert-parallel ranks gather each other's tokens: then every micro-batch has the same shape and every rank the same
    number of them. Interleaving needs a multiple of the number of stages.
    """
    split = job.parallel
    shares = [list(micro_batches(sequences[rank :: split.dp], job.micro_batch_size)) for rank in range(split.dp)]
    mine = shares[dp]
    count = max(map(len, shares)) if split.ep > 1 else len(mine)
    if split.vpp > 1:
        count = -(-count // split.pp) * split.pp
    form = Form(job.layout, position_multiple(split), cp=cp, cp_size=split.cp)
    if split.pp > 1 or split.ep > 1:
        form = _uniform(form, [batch for share in shares for batch in share])
    return Plan(mine + [[] for _ in range(count - len(mine))], form)


def position_multiple(split: Parallel) -> int:
    """Return what sequence lengths are padded to: each rank takes equal parts, with cp two chunks of equal length."""
    return (split.tp if split.sp else 1) * (2 * split.cp if split.cp > 1 else 1)


def _uniform(form: Form, batches: list[list[TokenSequence]]) -> Form:
    lengths = [form.lengths([sequence.tokens for sequence in batch]) for batch in batches]
    if form.layout == PACKED:
        return Form(form.layout, form.multiple, 1, max(map(sum, lengths)), form.cp, form.cp_size)
    return Form(form.layout, form.multiple, max(map(len, lengths)), max(map(max, lengths)), form.cp, form.cp_size)


def run_plan(
    plan: Plan, chunks: list[Any], rows: MegatronAdapter, manifest: dict[str, Any], device: str, observer: Observer
) -> list[TokenSequence]:
    """Run the plan and return the sequences that this rank scored, with log-probs where it holds the logits' rows.

    ``manifest`` says how many columns are the vocabulary, and whether the log-probs are processed. Only the last
    pipeline stage returns any, and of its tensor-parallel ranks only the first.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    done = itertools.accumulate(map(len, plan.micro_batches))
    scored_as = manifest["layout"]["vocab_size"], engine_semantics(manifest)

    def step(batches: Iterator[tuple[Batch, list[TokenSequence]]], chunk: Any) -> tuple[torch.Tensor, Any]:
        batch, members = next(batches)
        rows.paused = not members
        rows.announce(_announced(batch, members))
        output = forward(chunk, batch)
        if chunk is chunks[-1] and members:
            observer("recomputing", next(done), plan.sequences)
        return output, partial(_scored, batch, members, *scored_as)

    def batches() -> Iterator[tuple[Batch, list[TokenSequence]]]:
        for members in plan.micro_batches:
            yield make_batch([s.tokens for s in members] or [FILLER], plan.form, device), members

    iterators = [batches() for _ in chunks]
    several = len(chunks) > 1
    with torch.no_grad():
        scored = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if several else iterators[0],
            model=chunks if several else chunks[0],
            num_microbatches=len(plan.micro_batches),
            seq_length=plan.form.width,
            micro_batch_size=plan.form.rows,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return [sequence for batch in scored for sequence in batch]


def _announced(batch: Batch, members: list[TokenSequence]) -> list[Announced]:
    empty = 0 if batch.layout == PACKED else len(batch.input_ids) - len(members)
    return announce(members, whole=True) + [NOBODY] * empty


def _scored(
    batch: Batch,
    members: list[TokenSequence],
    vocab_size: int,
    meaning: Semantics,
    output: torch.Tensor,
    non_loss_data: bool,
) -> list[TokenSequence]:
    """Return the sequences of a micro-batch with the log-probs that the rows of its logits give."""
    if not members:
        return []
    logits = _whole_vocabulary(output)[..., :vocab_size]
    if ranks().tp:
        return []
    for index, sequence in enumerate(members):
        cells = batch.rows(index)
        sequence.logprobs = logprobs_at(logits[cells], sequence.tokens, np.asarray(batch.position[cells]), meaning)
    return members


def _whole_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """Gather ``[b, s, vocabulary / tp]`` from the tensor-parallel ranks, each of which holds a part of the columns."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(size)]
    torch.distributed.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)
