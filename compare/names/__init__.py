"""Canonical names: one table per engine, as data."""

from __future__ import annotations

from collections.abc import Collection

from probe.compare.names.base import EngineTable, resolve, strip_native
from probe.compare.names.megatron import TABLE as MEGATRON
from probe.compare.names.sglang import TABLE as SGLANG
from probe.compare.names.transformers import TABLE as TRANSFORMERS
from probe.compare.names.vllm import TABLE as VLLM

TABLES = {table.engine: table for table in (VLLM, SGLANG, MEGATRON, TRANSFORMERS)}


def table_for(engine: str, labels: Collection[str] = ()) -> EngineTable:
    """Return the table of an engine; for any other model, the one whose rules give most canonical tensors.

    ``labels``: the dump's own labels. Where tables give equally many, the one that reads more of the dump's tensors for
    it decides (vLLM's, where layers return two), then Hugging Face's.
    """
    if engine in TABLES:
        return TABLES[engine]
    return max((TRANSFORMERS, MEGATRON, VLLM), key=lambda table: _explained(table, labels))


def _explained(table: EngineTable, labels: Collection[str]) -> tuple[int, int]:
    """Return how many canonical tensors a table gives, and of how many native ones."""
    stripped = [strip_native(label, table.prefixes) for label in labels]
    found = resolve(table.tensors, stripped, stripped)
    return len(found.sources), len(found.used)
