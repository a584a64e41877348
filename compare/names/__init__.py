"""Canonical names: one table per engine, as data."""

from probe.compare.names.base import EngineTable
from probe.compare.names.megatron import TABLE as MEGATRON
from probe.compare.names.transformers import TABLE as TRANSFORMERS
from probe.compare.names.vllm import TABLE as VLLM

TABLES = {table.engine: table for table in (VLLM, MEGATRON, TRANSFORMERS)}


def table_for(engine: str) -> EngineTable:
    """Return the table of an engine; a bare module (or an engine without one) is read by transformers' names."""
    return TABLES.get(engine, TRANSFORMERS)
