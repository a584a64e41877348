"""PrecisionDebugger: record what passes through a model in the user's own script."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probe.errors import CaptureError, UsageError
from probe.settings import TOKENS, Settings, load_settings

if TYPE_CHECKING:
    import torch

    from probe.hooks.capture import Capture
    from probe.hooks.rows import Announced
    from probe.store.writer import DumpWriter

log = logging.getLogger("probe")
_said_inert = False
_running: list[PrecisionDebugger] = []
on_created: list[Callable[[], None]] = []
"""What the recording of whole jobs wants to do when a script turns out to have a debugger of its own."""
created = False
"""Whether one was made already that records."""


class PrecisionDebugger:
    """Dump the inputs and outputs of every module between ``start(model)`` and ``stop()``.

    Inert unless ``DUMP_ON=1`` (or ``enabled=True``): nothing is hooked, nothing is imported, nothing is written. Every
    keyword is a field of :class:`probe.settings.Settings`; ``config_path`` names a json or yaml file with the same
    keys. Inert too under task ``tokens``, which is for whole jobs. ``step()`` completes the dump of one training step.
    ``with debugger.start(model): ...`` stops and completes.
    """

    def __init__(self, config_path: str | Path | None = None, **keywords: Any) -> None:
        self.settings: Settings = load_settings(config_path, keywords)
        self.current_step = 0
        self._writer: DumpWriter | None = None
        self._capture: Capture | None = None
        self._adapter: Any = None
        self._manifest: dict[str, Any] = {}
        self._undo: Any = None
        if self.settings.enabled and self.settings.task != TOKENS:
            global created
            created = True
            for stand_aside in on_created:
                stand_aside()

    @property
    def enabled(self) -> bool:
        """Return whether this process records the current step."""
        wanted = self.settings
        return (
            wanted.enabled
            and wanted.task != TOKENS
            and (not wanted.step or self.current_step in wanted.step)
            and (not wanted.rank or global_rank() in wanted.rank)
        )

    def start(
        self,
        model: torch.nn.Module | SequenceOf[torch.nn.Module] | Any = None,
        token_range: tuple[int, int] | None = None,
        *,
        prompt_lens: SequenceOf[int] | None = None,
        lengths: SequenceOf[int] | None = None,
        uids: SequenceOf[str] | None = None,
    ) -> PrecisionDebugger:
        """Hook ``model`` (a module, a list of Megatron chunks, a vLLM model or an in-process ``vllm.LLM``).

        ``prompt_lens``, ``lengths`` and ``uids`` describe the batch rows of the forwards that follow, where the
        forward's own arguments do not say it; without ``prompt_lens`` a whole sequence counts as prompt.
        ``token_range`` (first, last) keeps positions in that closed range. Raises CaptureError when the model cannot
        be captured.
        """
        if not self.enabled:
            self._say_inert()
            return self
        if model is None:
            raise UsageError("PrecisionDebugger.start was given no model", "call start(model)")
        if self._capture is not None:
            raise CaptureError("PrecisionDebugger.start was called twice", "call stop() between")
        self._open(model)
        _running.append(self)
        self._adapter.token_range = token_range
        self._adapter.announce([])  # forget what was announced for an earlier start
        if prompt_lens is not None or lengths is not None or uids is not None:
            try:
                self.announce(prompt_lens=prompt_lens, lengths=lengths, uids=uids)
            except UsageError:
                self.stop()
                raise
        return self

    def announce(
        self,
        *,
        prompt_lens: SequenceOf[int] | None = None,
        lengths: SequenceOf[int] | None = None,
        uids: SequenceOf[str] | None = None,
        samples: SequenceOf[int] | None = None,
        trajectories: SequenceOf[str] | None = None,
        weight_version: int = 0,
    ) -> None:
        """Say which sequences the batch rows of the next forwards are; lists have one entry per row.

        ``samples`` number the responses to one prompt, whose ``uids`` are then equal; ``trajectories`` name what
        several sequences are pieces of; ``weight_version`` counts the weight updates that the model had received.
        """
        if self._capture is None:
            return
        from probe.hooks.rows import Announced

        given = [x for x in (prompt_lens, lengths, uids, samples, trajectories) if x is not None]
        if not given:
            raise UsageError("announce was told nothing", "give prompt_lens, lengths or uids")
        if len({len(x) for x in given}) != 1:
            raise UsageError("prompt_lens, lengths and uids differ in length", "give one entry per batch row")
        first = len(self._adapter.book.sequences)
        rows: list[Announced] = []
        for i in range(len(given[0])):
            uid = str(uids[i]) if uids is not None else f"{self._adapter.sequence_prefix}s{first + i}"
            sample = int(samples[i]) if samples is not None else 0
            rows.append(
                Announced(
                    uid=f"{uid}.s{sample}" if uids is not None and samples is not None else uid,
                    prompt_len=int(prompt_lens[i]) if prompt_lens is not None else None,
                    length=int(lengths[i]) if lengths is not None else None,
                    sample=sample,
                    trajectory=str(trajectories[i]) if trajectories is not None else uid,
                    weight_version=weight_version,
                )
            )
        self._adapter.announce(rows)

    def stop(self) -> None:
        """Remove every hook and write what was recorded; the model runs as before."""
        if self._capture is None:
            return
        self._capture.detach()
        if self._undo is not None:
            self._undo()
        if not self._capture.fired:
            log.warning("nothing ran through the model between start() and stop(), so nothing was recorded")
        self._capture = self._undo = None
        _running.remove(self)
        if self._writer is not None:
            self._writer.flush()

    def step(self) -> None:
        """Complete the dump of this training step and go on to the next."""
        self._finish()
        self.current_step += 1

    def __enter__(self) -> PrecisionDebugger:
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop and complete the step; under an exception, which goes on, what ran before it is kept in the dump."""
        self.stop()
        self.step()

    def save(self, tensor: torch.Tensor, name: str) -> None:
        """Store one tensor of the caller's under ``save.NAME`` in the running dump."""
        if self._capture is not None:
            self._capture.store(f"save.{name}", "output.0", tensor)

    def _open(self, model: Any) -> None:
        from probe.hooks.attach import attach

        atexit.unregister(self._finish)
        atexit.register(self._finish)  # after h5py's own handler, so that it runs before: exit handlers run backwards
        if self._writer is None:
            self._adapter = None
        opened = attach(model, self.settings, self.current_step, global_rank(), self._writer, self._adapter)
        self._writer, self._adapter, self._capture = opened.writer, opened.adapter, opened.capture
        self._manifest, self._undo = opened.manifest, opened.undo
        if self._manifest.get("not_causal") and self.settings.prompts_only:
            said = self._manifest["not_causal"]
            log.warning("%s: prompt rows are of your own forwards: give them no response beside the prompts", said)

    def _finish(self) -> None:
        self.stop()
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        from probe.hooks.attach import complete

        complete(writer, self._adapter, self._manifest)

    def _say_inert(self) -> None:
        global _said_inert
        if _said_inert or (self.settings.enabled and self.settings.task != TOKENS):
            return
        _said_inert = True
        if not self.settings.enabled:
            log.warning("PrecisionDebugger is off: set DUMP_ON=1 (or pass enabled=True) to record")
        else:
            log.warning("PrecisionDebugger is off: it records tensors, and task 'tokens' is for whole jobs")


def save(tensor: torch.Tensor, name: str) -> None:
    """Store one tensor under ``save.NAME`` in every running PrecisionDebugger; do nothing when none runs."""
    for debugger in _running:
        debugger.save(tensor, name)


def seed_all(seed: int = 1234, mode: bool = False) -> None:
    """Seed Python, numpy and torch; ``mode`` also asks torch and the vendor libraries for deterministic kernels."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if mode:
        for name, value in (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("HCCL_DETERMINISTIC", "true")):
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def global_rank() -> int:
    """Return this process's rank in its job, without importing torch."""
    import sys

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))
