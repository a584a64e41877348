"""Which ways of splitting a model an engine can honour, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from probe.errors import UsageError
from probe.hooks.runners.job import ENGINES, DumpJob, Engine, Parallel
from probe.manifest import layout_facts

OPTIONS = {field.name: f"--{field.name}" for field in fields(Parallel)}
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Where the families write the number of routed experts into config.json."""


def listed(engines: Sequence[str]) -> str:
    """Return names as a sentence counts them up: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(engines[:-1]), *engines[-1:])))


def completed(engine: str, parallel: Parallel) -> Parallel:
    """Return the sizes with what follows from them: Megatron spreads experts over data-parallel ranks."""
    if engine == "megatron" and parallel.dp == 1 and parallel.ep > 1:
        return replace(parallel, dp=parallel.ep)
    return parallel


def check_parallel(job: DumpJob, engine: Engine, config: dict[str, Any]) -> None:
    """Raise UsageError where the engine or the model (its ``config.json``) cannot be split as the job wants."""
    wanted, default = job.parallel, Parallel()
    for name, option in OPTIONS.items():
        value = getattr(wanted, name)
        if value < 1 and name != "sp":
            raise UsageError(f"{option} {value} cannot work", "give at least 1")
        if value != getattr(default, name) and name not in engine.parallel:
            able = [other for other, entry in ENGINES.items() if name in entry.parallel]
            raise UsageError(f"{option} has no effect on engine {job.engine}", f"it is for {listed(able)}")
    if wanted.ep > 1:
        _check_experts(job, config)
    if job.engine in CHECKS:
        CHECKS[job.engine](job, config)


def _check_experts(job: DumpJob, config: dict[str, Any]) -> None:
    experts = next((int(config[key]) for key in EXPERT_KEYS if config.get(key)), 0)
    if not experts:
        raise UsageError(f"--ep {job.parallel.ep} needs experts, but {job.model} has none", "leave it out")
    if experts % job.parallel.ep:
        raise UsageError(f"{experts} experts cannot be spread evenly over --ep {job.parallel.ep}", _even(experts))


def _check_megatron(job: DumpJob, config: dict[str, Any]) -> None:
    wanted, sizes = job.parallel, layout_facts(config)
    stages = wanted.pp * wanted.vpp
    over = f"--pp {wanted.pp} stages" + (f" of --vpp {wanted.vpp} chunks" if wanted.vpp > 1 else "")
    if wanted.sp and wanted.tp == 1:
        raise UsageError("--sp splits the positions between the tensor-parallel ranks, and there is one", "add --tp 2")
    if wanted.vpp > 1 and wanted.pp == 1:
        raise UsageError(f"--vpp {wanted.vpp} interleaves chunks between pipeline stages, and there is one", "add --pp")
    if wanted.dp % wanted.ep:
        problem = f"--ep {wanted.ep} does not divide --dp {wanted.dp}"
        raise UsageError(problem, "Megatron spreads experts over the data-parallel ranks: leave out --dp")
    _check_heads(job, config)
    for what, count, parts, option in (
        ("MLP features", sizes["intermediate_size"], wanted.tp, f"--tp {wanted.tp}"),
        ("layers", sizes["num_layers"], stages, over),
    ):
        if count % parts:
            raise UsageError(f"the {count} {what} of {job.model} cannot be split evenly over {option}", _even(count))


def _check_heads(job: DumpJob, config: dict[str, Any]) -> None:
    tp, sizes = job.parallel.tp, layout_facts(config)
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads and heads % tp:
        raise UsageError(
            f"the {heads} attention heads of {job.model} cannot be split evenly over --tp {tp}", _even(heads)
        )
    if groups and groups % tp and tp % groups:
        problem = f"the {groups} key-value heads of {job.model} neither divide --tp {tp} nor are a multiple of it"
        raise UsageError(problem, _even(groups))


def _check_vllm(job: DumpJob, config: dict[str, Any]) -> None:
    if job.parallel.ep not in (1, job.parallel.tp):
        problem = f"vLLM spreads experts over all --tp {job.parallel.tp} ranks, not over --ep {job.parallel.ep}"
        raise UsageError(problem, f"give --ep {job.parallel.tp} or leave it out")
    _check_heads(job, config)


def _even(count: int) -> str:
    divisors = [str(n) for n in range(1, min(count, 64) + 1) if count % n == 0]
    return f"numbers that fit: {', '.join(divisors)}"


CHECKS: dict[str, Callable[[DumpJob, dict[str, Any]], None]] = {"megatron": _check_megatron, "vllm": _check_vllm}
