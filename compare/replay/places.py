"""Where a module lies in the model, from the label that is replayed."""

from __future__ import annotations

from probe.compare.replay.base import Context

ATTENTION, MLP = "layers.{i}.self_attn", "layers.{i}.mlp"


def module_of(context: Context) -> str:
    """Return the canonical module of a context's label: of a shared expert's output, its last linear."""
    module = context.label.rpartition(":")[0]
    return f"{module}.down_proj" if module.endswith(".shared_expert") else module


def kind_of(context: Context) -> str:
    """Return the last part of the module's name (``q_proj``)."""
    return module_of(context).rpartition(".")[2]


def form_of(context: Context) -> str:
    """Return the module's name with ``{i}`` for its layer and ``{e}`` for its expert."""
    module = module_of(context)
    if context.expert is not None:
        module = module.replace(f".experts.{context.expert}.", ".experts.{e}.")
    return module if context.layer is None else "layers.{i}" + module[len(f"layers.{context.layer}") :]
