"""Compare the log-probs of tokens from dumps or files, and return the report of ``probe tokens`` as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from probe._version import __version__
from probe.compare.ppo import PPOConfig
from probe.compare.report.model import SCHEMA, clean_floats
from probe.compare.tokens.batch import TokenBatch, not_finite_findings
from probe.compare.tokens.read import read_columns, read_sources
from probe.compare.tokens.section import POSITIONS, SAMPLES, token_section
from probe.compare.tokens.semantics import find_semantics
from probe.compare.tokens.text import Decoder
from probe.compare.tokens.update import ppo_section
from probe.compare.tokens.verdict import held_figures, verdict
from probe.compare.tokens.words import headline, next_commands, not_compared, summary
from probe.compare.tokens.worst import write_worst


def compare_token_sources(
    paths: Sequence[str | Path],
    *,
    ppo: str | Path | None = None,
    config: PPOConfig | None = None,
    trust: bool = False,
    loose: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    tokenizer: str | Path | None = None,
    text: bool = True,
    samples: int = SAMPLES,
    positions: int = POSITIONS,
    words: str = "",
    step: int | None = None,
    worst: int = 0,
    worst_file: str | Path | None = None,
) -> dict[str, Any]:
    """Compare the log-probs of one or two sources and return the report (the content of ``tokens.json``).

    ``paths``: the rollout's source, then the actor's where it is another one, or a job's folder; ``ppo``: a source of
    advantages and what else the update needs, ``config``: the update's numbers; ``trust``: unpickle verl's batches;
    ``loose``: the healthy ranges are those of mixtures of experts and quantised rollouts; ``temperature`` and
    ``top_p``: what the rollout of files sampled with; ``tokenizer``: decodes ids (``text``: whether to at all);
    ``samples`` and ``positions``: size of the grid; ``words``: the options as a command line repeats them; ``step``:
    the training step of dumps; ``worst_file``: a file for the ``worst`` sequences of dumps
    (:mod:`probe.compare.tokens.worst`). Raises UsageError for sources that do not go together, CompareError where they
    have no sequence in common or no log-probs, TokensError or DumpError for one that cannot be read.
    """
    batch, decode = read_sources(
        [Path(path) for path in paths],
        trust=trust,
        temperature=temperature,
        top_p=top_p,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        step=step,
    )
    batch.loose = batch.loose or loose
    if ppo is not None:
        read_columns(Path(ppo), batch, trust=trust)
    made = token_report(batch, decode if text else None, config or PPOConfig(), samples, positions)
    if worst_file is not None:
        write_worst(batch, worst, Path(worst_file))
    return made | {"next_commands": next_commands(made, [str(path) for path in paths], words)}


def token_report(
    batch: TokenBatch,
    decode: Decoder | None,
    config: PPOConfig,
    samples: int = SAMPLES,
    positions: int = POSITIONS,
) -> dict[str, Any]:
    """Return the report of a batch that was read (see :func:`compare_token_sources`), its floats finite or None."""
    with np.errstate(over="ignore", invalid="ignore"):  # a masked logit of -1e308 overflows sums: such figures are None
        return dict(clean_floats(_report(batch, decode, config, samples, positions)))


def _report(
    batch: TokenBatch, decode: Decoder | None, config: PPOConfig, samples: int, positions: int
) -> dict[str, Any]:
    """Put the report together."""
    findings = [*not_finite_findings(batch.not_finite), *find_semantics(batch)]
    tokens = token_section(batch, decode, samples, positions)
    figures = held_figures(batch, tokens)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "tokens",
        "probe": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **{side: asdict(origin) for side, origin in zip("ab", batch.origins)},
        "verdict": verdict(batch, findings, figures),
        "headline": "",
        "summary": "",
        "not_compared": [*not_compared(batch), *batch.left_out],
        "notes": list(batch.notes),
        "findings": [asdict(finding) for finding in findings],
        "counts": counts(batch),
        "figures": figures,
        "tokens": tokens,
        "ppo": ppo_section(batch, config, decode),
        "next_commands": [],
    }
    report["headline"] = headline(report)
    report["summary"] = summary(report)
    return report


def counts(batch: TokenBatch) -> dict[str, Any]:
    """Return how many sequences, tokens and steps a batch has.

    ``tokens``: inside the mask of both sides; ``compared``: those of them that are finite on both; ``masked_out``: the
    other places of the sequences, each as wide as the longest response, padding included; ``empty_sequences``: those
    without a token inside the mask; ``steps``: training steps, of sequences whose step is known.
    """
    tokens = int(batch.valid.sum())
    return {
        "sequences": len(batch.labels),
        "empty_sequences": int((batch.valid == 0).sum()),
        "tokens": tokens,
        "compared": len(batch),
        "masked_out": len(batch.labels) * batch.width - tokens,
        "width": batch.width,
        "steps": len(set(batch.step[batch.step >= 0].tolist())),
        "not_finite": [asdict(entry) for entry in batch.not_finite],
    }
