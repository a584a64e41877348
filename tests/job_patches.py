"""A job in the test's own process: transformers patched for one test, as activation patches it for a whole process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from probe.hooks.jobs import log as log_module
from probe.hooks.jobs import models
from probe.hooks.jobs import session as session_module
from probe.hooks.jobs.session import Session
from probe.settings import Settings


def patched_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """Return what starts a job with the given settings, in ``tmp_path / d``; the patches go with ``monkeypatch``."""
    from torch.optim import optimizer
    from transformers import modeling_utils
    from transformers.generation import utils

    owner = modeling_utils.PreTrainedModel
    monkeypatch.setenv("PROBE_DUMP_DIR", str(tmp_path / "d"))
    monkeypatch.setattr(log_module, "_said", set())
    monkeypatch.setattr(optimizer, "_global_optimizer_post_hooks", optimizer._global_optimizer_post_hooks.copy())
    monkeypatch.setattr(models._Aside, "stands", False)
    monkeypatch.setattr(models, "_failures", set())
    monkeypatch.setattr(models, "_owners", [])
    monkeypatch.setattr(utils.GenerationMixin, "generate", utils.GenerationMixin.generate)
    monkeypatch.setattr(owner, "get_compiled_call", owner.get_compiled_call)
    monkeypatch.setattr(owner, "__call__", owner.__call__)
    del owner.__call__  # until it is patched; monkeypatch then leaves the class without one, as it was

    def start(**settings: object) -> Session:
        session = Session(Settings(dump_path=str(tmp_path / "d"), enabled=True, **settings))
        monkeypatch.setattr(session_module, "_session", session)
        models.patch_transformers(modeling_utils)
        models.patch_generation(utils)
        return session

    return start


def said() -> str:
    """Return what this test's job has said so far."""
    return "\n".join(text for _, _, text in log_module._said)


def stages(tmp_path: Path) -> list[str]:
    """Return the stages that this test's job has recorded."""
    return sorted(p.name for p in (tmp_path / "d").iterdir() if p.is_dir() and p.name != "chosen")


def expected_logprobs(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Return the log-prob of each token of ``ids`` [n], NaN for the first."""
    with torch.no_grad():
        scores = torch.log_softmax(model.forward(input_ids=torch.tensor([ids])).logits.double(), -1)[0]
    return [float("nan"), *(scores[p - 1, ids[p]].item() for p in range(1, len(ids)))]
