"""verl's training workers (>= 0.7): each pass of an engine is recorded, whatever verl cuts its batch into.

verl's trainer calls workers, a worker its engine: ``infer_batch`` for log-probs (stages ``logprob`` and ``reference``),
``train_batch`` per mini-batch of an update (stage ``update``). The engine cuts the batch into micro-batches, and for
each calls ``prepare_model_inputs``, the model, and ``prepare_model_outputs``: FSDP, Megatron and what derives from them
alike. So these methods are wrapped: the passes bracket the recording, the first of the two says which rows the model
is about to see, the last which log-probs came of them. Nothing is added to a batch and no tensor of verl's is changed.

Of an update only the first mini-batch has its tensors recorded: what comes later runs on other weights, so that a
comparison with the log-prob pass would blame the update itself. Log-probs and the trainer's columns are recorded for
each sequence when an epoch first sees it.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from probe.hooks.jobs.log import note, trouble
from probe.hooks.jobs.session import session
from probe.hooks.jobs.shadow import own_forward
from probe.hooks.jobs.verl_batch import (
    Rows,
    Twins,
    packed_cells,
    read_rows,
    sequence_logprobs,
    temperature_of,
    trainer_columns,
)
from probe.hooks.jobs.verl_versions import UNKNOWN, note_update, noting_syncs, version_of
from probe.store.schema import AXES, Versions

STAGES = LOGPROB, REFERENCE, UPDATE = "logprob", "reference", "update"
VALUE_MODEL = "value_model"
NEW_LOG_PROBS = "new_log_probs"

_reference: contextvars.ContextVar[bool] = contextvars.ContextVar("probe_verl_reference", default=False)
_update: contextvars.ContextVar[Update | None] = contextvars.ContextVar("probe_verl_update", default=None)
_pass: contextvars.ContextVar[Pass | None] = contextvars.ContextVar("probe_verl_pass", default=None)
_finished: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Engine -> the step in which it was updated: a trainer that updates several times in a step is recorded once."""


# -- what is wrapped ---------------------------------------------------------------------------------------------------


def patch_workers(module: ModuleType) -> None:
    """Wrap the workers of ``verl.workers.engine_workers``: they know the reference pass, an update's extent, syncs."""
    wrap(module.TrainingWorker, "infer_batch", functools.partial(_as_reference, always=False))
    wrap(module.TrainingWorker, "train_mini_batch", _in_update)
    wrap(module.ActorRolloutRefWorker, "compute_ref_log_prob", functools.partial(_as_reference, always=True))
    wrap(module.ActorRolloutRefWorker, "update_weights", noting_syncs)


def patch_passes(module: ModuleType) -> None:
    """Wrap the passes of ``verl.workers.engine.base``, which every engine inherits."""
    wrap(module.BaseEngine, "infer_batch", functools.partial(_in_pass, forward_only=True))
    wrap(module.BaseEngine, "train_batch", functools.partial(_in_pass, forward_only=False))


def patch_engine(module: ModuleType) -> None:
    """Wrap what the engines of ``verl.workers.engine.*.transformer_impl`` do with a micro-batch."""
    found = 0
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            found += wrap(cls, "prepare_model_inputs", _before_model)
            wrap(cls, "prepare_model_outputs", _after_model)
    if not found:
        trouble(f"{module.__name__} has no engine that prepares model inputs: its passes have no rows; tell us")


def wrap(owner: type, name: str, make: Callable[[Any], Any]) -> bool:
    """Replace a method that the class itself defines by what ``make`` makes of it; tell whether it did.

    The wrapper keeps the attributes of the original: verl's ``@register`` leaves its dispatch mode in one.
    """
    original = vars(owner).get(name)
    if original is None or getattr(original, "_probe_wraps", False):
        return False
    wrapped: Any = functools.wraps(original)(make(original))
    wrapped._probe_wraps = True
    setattr(owner, name, wrapped)
    return True


def _as_reference(original: Any, *, always: bool) -> Any:
    """Wrap a method whose passes are the reference model's: ``always``, or where its batch asks for no LoRA adapter."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data")
        token = _reference.set(always or _reference.get() or _without_adapter(data))
        try:
            return original(self, *args, **kwargs)
        finally:
            _reference.reset(token)

    return method


def _in_update(original: Any) -> Any:
    def train_mini_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        update = _safely(Update)
        token = _update.set(update)
        try:
            return original(self, *args, **kwargs)
        finally:
            _update.reset(token)
            if update is not None:
                _safely(lambda: update.finish(self.engine))

    return train_mini_batch


def _in_pass(original: Any, *, forward_only: bool) -> Any:
    def run(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        running = _safely(_begin, self, data, forward_only)
        token = _pass.set(running)
        here = _safely(session)
        if here is not None:
            here.others += 1
        try:
            return original(self, data, *args, **kwargs)
        finally:
            if here is not None:
                here.others -= 1
            _pass.reset(token)
            if running is not None:
                running.guarded(running.end)
                if running.update is not None and running.update is not _update.get():
                    _safely(running.update.finish, self)

    return run


def _before_model(original: Any) -> Any:
    def prepare_model_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = _pass.get()
        if running is not None and running.engine is self:
            running.guarded(running.before_model, _batch_of(args, kwargs, 0))
        return original(self, *args, **kwargs)

    return prepare_model_inputs


def _after_model(original: Any) -> Any:
    def prepare_model_outputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        running = _pass.get()
        if running is not None and running.engine is self:
            running.guarded(running.after_model, _batch_of(args, kwargs, None), found)
        return found

    return prepare_model_outputs


def _safely(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of ours; its failure is said once, and None."""
    try:
        return function(*args)
    except Exception as error:
        trouble(f"a pass of verl's engine is not recorded ({type(error).__name__}: {error})")
        return None


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | None) -> Any:
    """Return the micro-batch among the arguments of an engine's method, which engines name and place differently."""
    for name in ("micro_batch", "batch", "data"):
        if name in kwargs:
            return kwargs[name]
    if place is not None:
        return args[place] if len(args) > place else None
    return next((value for value in reversed(args) if hasattr(value, "batch_size")), None)


def _without_adapter(data: Any) -> bool:
    """Tell whether a batch (or verl's description of one that lies elsewhere) asks for the model without LoRA."""
    try:
        extra = getattr(data, "extra_info", None)
        value = extra.get("no_lora_adapter") if isinstance(extra, dict) else data.get("no_lora_adapter", None)
        return bool(getattr(value, "data", value))
    except Exception:  # not a batch as we know them: verl will say so if it minds
        return False


# -- a pass ------------------------------------------------------------------------------------------------------------


class Update:
    """One update of a model: whether it is recorded, and which sequences its mini-batches have shown so far."""

    def __init__(self) -> None:
        self.recorded: bool | None = None
        self.seen: set[str] = set()
        self.step = session().step

    def finish(self, engine: Any) -> None:
        """Complete the files of the step: what this model computes from now on is of other weights."""
        note_update(engine)
        if self.recorded is None:
            return
        _finished[engine] = self.step
        if self.recorded:
            for stage in STAGES:
                session().close_stage(stage)


class Pass:
    """One pass of an engine over a batch, from the recorder's ``begin`` to its ``end``.

    ``version``: of the weights that it runs with (:func:`probe.hooks.jobs.verl_versions.version_of`).
    """

    def __init__(
        self, engine: Any, recorder: Any, update: Update | None, *, tensors: bool, version: int = UNKNOWN
    ) -> None:
        self.engine, self.recorder, self.tensors = engine, recorder, tensors
        self.update, self.version = update, version
        self._batch: set[str] | None = None
        self._seen: set[str] = update.seen if update is not None else set()
        self._current: tuple[Any, Rows | None] = (None, None)
        self._shown, self._returned = Twins(), Twins()
        self._scored: list[tuple[Rows, Any]] = []
        self._columns: tuple[Rows, dict[str, list[np.ndarray]]] | None = None
        self._off = False

    def guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step of the recording; trouble with it is said once and ends this recording, not the job."""
        if self._off:
            return
        try:
            step(*args)
        except Exception as error:
            self._off = True
            trouble(f"a pass of verl's engine is not recorded any further ({type(error).__name__}: {error})")
            if self.tensors:
                self.recorder.end()

    def begin(self, batch: Any) -> None:
        """Say which sequences the whole batch has, and take from it what the trainer knows of their tokens."""
        rows = read_rows(batch)
        if rows is None:
            return
        self._shown, self._returned = Twins(rows), Twins(rows)
        if self.tensors:
            self.recorder.expect(list(zip(rows.tokens, rows.prompt_lens)))
        if not self.engine.is_mp_src_rank_with_outputs():
            return
        if self.update is not None:
            self._columns = rows, trainer_columns(batch, rows)
        else:
            self._batch = set(rows.names)
            self.recorder.update_manifest(whole_batch=False)

    def before_model(self, batch: Any) -> None:
        """Say which rows the model's next forward has."""
        rows = self._rows(batch)
        if rows is None or not self.tensors:
            return
        rows = rows.numbered(self._shown)
        self.recorder.announce(rows.announced())
        cells = _cells(self.engine, batch, rows)
        adapter = self.recorder.adapter
        if cells is not None and adapter is not None:
            adapter.told = cells

    def after_model(self, batch: Any, outputs: Any) -> None:
        """Keep the log-probs that the engine made of a micro-batch; they are read when the pass is over."""
        log_probs = outputs.get("log_probs") if isinstance(outputs, dict) else None
        rows = self._rows(batch)
        if rows is not None and log_probs is not None and self.engine.is_mp_src_rank_with_outputs():
            self._scored.append((rows.numbered(self._returned), log_probs.detach().clone()))

    def end(self) -> None:
        """Write log-probs and the trainer's columns of the sequences that this update has not shown yet; unhook."""
        if self.tensors:
            self.recorder.end()
        fresh: set[str] = set()
        for rows, log_probs in self._scored:
            for name, ids, prompt, weights, values in zip(*_lists(rows), sequence_logprobs(log_probs, rows)):
                if name in self._seen:
                    continue
                fresh.add(name)
                self.recorder.add_tokens(name, ids, prompt, values, declared=Versions(*weights, self.version))
                if self.update is not None:
                    self.recorder.add_rl(name, NEW_LOG_PROBS, values[prompt:], prompt_len=prompt)
        if self._columns is not None:
            rows, columns = self._columns
            for column, each in columns.items():
                for name, prompt, own in zip(rows.names, rows.prompt_lens, each):
                    if name in fresh:
                        self.recorder.add_rl(name, column, own, prompt_len=prompt)
        self._seen |= fresh
        if self._batch is not None:
            self.recorder.update_manifest(whole_batch=self._batch <= fresh)

    def _rows(self, batch: Any) -> Rows | None:
        if self._current[0] is not batch:
            self._current = (batch, read_rows(batch) if batch is not None else None)
        return self._current[1]


def _lists(rows: Rows) -> tuple[list[str], list[np.ndarray], list[int], list[tuple[int, int]]]:
    return rows.names, rows.tokens, rows.prompt_lens, rows.versions


def _begin(engine: Any, batch: Any, forward_only: bool) -> Pass | None:
    """Begin the recording of a pass, or return None where it is not recorded."""
    if _is_critic(engine):
        note("the critic's passes are not recorded: what it said is in the update's columns")
        return None
    update = None if forward_only else _update.get() or Update()
    if _finished.get(engine) == (session().step if update is None else update.step):
        return None
    stage, first = _stage(engine, forward_only), update is None or update.recorded is None
    recorder = session().recorder(stage, engine.module)
    recording = not first and update is not None and bool(update.recorded)
    if first and session().records(stage, session().step):
        recorder.update_manifest(**_facts(engine, batch))
        recording = recorder.begin()
        own_forward(recorder, engine.module, "verl cuts and packs its batches itself")
    if first and update is not None:
        update.recorded = recording
    if not recording:
        return None
    version = UNKNOWN if stage == REFERENCE else version_of(engine, updating=not forward_only)
    running = Pass(engine, recorder, update, tensors=first, version=version)
    running.guarded(running.begin, batch)
    return running


def _stage(engine: Any, forward_only: bool) -> str:
    if not forward_only:
        return UPDATE
    return REFERENCE if _reference.get() or getattr(engine.engine_config, "forward_only", False) else LOGPROB


def _is_critic(engine: Any) -> bool:
    kind = getattr(engine.model_config, "model_type", "")
    return kind == VALUE_MODEL or "ValueHead" in type(engine).__name__


def _facts(engine: Any, batch: Any) -> dict[str, Any]:
    """Return what verl knows for the manifest: the temperature in its log-probs, and how ranks share sequences."""
    temperature = temperature_of(batch)
    facts: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
    facts["sampling"] = {"temperature": temperature, "top_p": 1.0} if temperature is not None else {}
    if temperature is None:
        note("rows of this batch have different temperatures: the sampling gate cannot judge them")
    chunk = engine.module[0] if isinstance(engine.module, list | tuple) else engine.module
    attention = getattr(getattr(chunk, "config", None), "_attn_implementation", None)
    facts["backends"] = {"attention": attention, "trainer": f"verl {getattr(engine.engine_config, 'strategy', '')}"}
    parts, part = _sequence_parts(engine)
    if parts > 1:
        place = {"cp": (parts, part), "dp": (engine.get_data_parallel_size(), engine.get_data_parallel_rank())}
        facts["topology"] = {axis: place.get(axis, (1, 0))[0] for axis in AXES}
        facts["coordinates"] = {axis: place.get(axis, (1, 0))[1] for axis in AXES}
    return facts


def _sequence_parts(engine: Any) -> tuple[int, int]:
    """Return over how many ranks an FSDP engine's sequence parallelism (Ulysses) cuts a batch, and the part here."""
    mesh = getattr(engine, "ulysses_device_mesh", None)
    if mesh is None:
        return 1, 0
    return int(engine.ulysses_sequence_parallel_size), int(mesh["sp"].get_local_rank())


def _cells(engine: Any, batch: Any, rows: Rows) -> Any:
    """Return where the rows lie in an FSDP engine's packed forward where its arguments do not tell: cut or padded."""
    parts, part = _sequence_parts(engine)
    padding = 0
    if getattr(engine, "pad_to_length", False) and hasattr(engine, "_get_packed_pad_size"):
        padding = int(engine._get_packed_pad_size(sum(len(ids) for ids in rows.tokens)))
    return packed_cells(rows, padding=padding, parts=parts, part=part) if parts > 1 or padding else None
