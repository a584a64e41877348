"""What verl declares of a rollout's weights, in the batches that its own classes make, reaches the trainer's rows."""

from __future__ import annotations

import asyncio
import inspect
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from probe.hooks.jobs import verl as verl_module
from probe.hooks.jobs import verl_versions
from probe.hooks.jobs.log import TROUBLE, read_lines
from probe.hooks.jobs.verl import Pass, wrap
from probe.hooks.jobs.verl_batch import read_rows
from probe.hooks.jobs.verl_versions import UNKNOWN, note_update, noting_syncs, version_of
from probe.store.schema import Versions

tensordict = pytest.importorskip("tensordict")

IDS = [[1, 2, 3, 4], [5, 6, 7], [1, 2, 9]]


def jagged(rows: list[list[int]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(rows: int = 3, **columns: list[Any]) -> Any:
    """Return a batch of the first sequences with further entries per row, as verl's DataProto stacks them."""
    data = {"input_ids": jagged(IDS[:rows]), "prompts": jagged([row[:2] for row in IDS[:rows]])}
    stack = tensordict.NonTensorStack
    for name, values in {"uid": ["a", "b", "a"], **columns}.items():
        data[name] = stack.from_list([tensordict.NonTensorData(value) for value in values[:rows]])
    return tensordict.TensorDict(data, batch_size=[rows])


def versions(data: Any) -> list[tuple[int, int]]:
    rows = read_rows(data)
    assert rows is not None
    return rows.versions


# -- what a batch declares --------------------------------------------------------------------------------------------


def test_a_batch_declares_the_versions_of_each_row() -> None:
    own = {"min_global_steps": [3, 4, 4], "max_global_steps": [4, 4, 5]}
    assert versions(batch(**own)) == [(3, 4), (4, 4), (4, 5)]
    extra = [{"min_global_steps": low, "max_global_steps": high, "other": 1} for low, high in [(3, 4), (4, 4), (4, 5)]]
    assert versions(batch(extra_fields=extra)) == [(3, 4), (4, 4), (4, 5)]


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"min_global_steps": [None] * 3, "max_global_steps": [None] * 3},
        {"min_global_steps": [1, 2, 3]},
        {"extra_fields": [{}, None, {"min_global_steps": 3}]},
        {"extra_fields": [{"min_global_steps": None, "max_global_steps": None}] * 3},
    ],
)
def test_what_verl_does_not_say_is_unknown(columns: dict[str, list[Any]]) -> None:
    assert versions(batch(**columns)) == [(UNKNOWN, UNKNOWN)] * 3


def test_a_pass_stores_what_its_batch_and_its_trainer_declare() -> None:
    """GIVEN a log-prob pass on version 5, THEN each sequence has its rollout's versions, and the batch is whole."""
    told: dict[str, Any] = {"declared": [], "whole": []}
    recorder = types.SimpleNamespace(
        adapter=None,
        expect=lambda sequences: None,
        end=lambda: None,
        announce=lambda rows: None,
        add_tokens=lambda *given, declared: told["declared"].append(declared),
        update_manifest=lambda whole_batch: told["whole"].append(whole_batch),
    )
    engine = types.SimpleNamespace(is_mp_src_rank_with_outputs=lambda: True)
    declared = {"min_global_steps": [3, 4, 4], "max_global_steps": [4, 4, 5]}
    data = batch(**declared)
    for micro in ([data], [batch(2, **declared)]):
        running = Pass(engine, recorder, None, tensors=True, version=5)
        running.begin(data)
        for part in micro:
            running.after_model(part, {"log_probs": torch.zeros(len(part["input_ids"].values()))})
        running.end()
    assert told["declared"][:3] == [Versions(3, 4, 5), Versions(4, 4, 5), Versions(4, 5, 5)]
    assert told["whole"] == [False, True, False, False]  # of the second pass a sequence never came back


# -- which version the trainer's weights are --------------------------------------------------------------------------


class Worker:
    """A worker with an engine and verl's method, which fails without a number in this class only."""

    def __init__(self) -> None:
        self.actor = types.SimpleNamespace(engine=type("Engine", (), {})())

    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> str:
        return f"{global_steps} {mode}"


wrap(Worker, "update_weights", noting_syncs)


def test_the_version_is_the_number_under_which_weights_were_sent() -> None:
    """GIVEN a worker whose weights are sent, THEN its passes have verl's number, updates only the first.

    Weights that are sent again without a number, as after a validation, are still those of before.
    """
    worker = Worker()
    engine = worker.actor.engine
    assert version_of(engine, updating=False) == UNKNOWN
    assert asyncio.run(worker.update_weights(3, mode="naive")) == "3 naive"
    assert asyncio.run(worker.update_weights()) == "None auto"
    assert version_of(engine, updating=False) == version_of(engine, updating=True) == 3
    note_update(engine)
    assert (version_of(engine, updating=False), version_of(engine, updating=True)) == (3, UNKNOWN)
    assert asyncio.run(worker.update_weights(global_steps=4)) == "4 auto"
    assert version_of(engine, updating=True) == 4
    assert version_of(Worker().actor.engine, updating=False) == UNKNOWN


def test_trouble_with_a_number_is_not_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probe.hooks.jobs.session._session", None)
    monkeypatch.setenv("PROBE_DUMP_DIR", str(tmp_path))
    worker = Worker()
    assert asyncio.run(worker.update_weights(global_steps="late")) == "late auto"  # type: ignore[arg-type]
    assert [line.kind for line in read_lines(tmp_path)] == [TROUBLE]


# -- verl's own classes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batches_of_the_transfer_queue_declare_versions() -> None:
    """GIVEN outputs of verl's agent loops, WHEN the transfer queue packs them, THEN all parts of a batch have both."""
    pytest.importorskip("verl")
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.utils import tensordict_utils as tu

    fields = []
    for number, ids in enumerate(IDS):
        output = AgentLoopOutput(
            prompt_ids=ids[:2],
            response_ids=ids[2:],
            response_mask=[1] * len(ids[2:]),
            metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": number, "max_global_steps": number + 1},
        )
        fields.append({**output.as_dict(), "input_ids": torch.tensor(ids), "uid": f"u{number}"})
    packed = {key: AsyncSimpleStorageManager._pack_field_values([row[key] for row in fields]) for key in fields[0]}
    data = tensordict.TensorDict(packed, batch_size=[3])
    assert versions(data) == [(0, 1), (1, 2), (2, 3)]
    assert versions(tu.index_select_tensor_dict(data, [2, 0])) == [(2, 3), (0, 1)]
    for count, part in enumerate(tu.chunk_tensordict(data, 3)):
        assert versions(part) == [(count, count + 1)]


@pytest.mark.slow
def test_batches_of_the_other_trainers_declare_versions() -> None:
    """GIVEN a DataProto as verl's agent loop manager fills it, WHEN its trainer hands it on, THEN rows have both."""
    pytest.importorskip("verl")
    import numpy as np
    from verl.workers.utils.padding import left_right_2_no_padding
    from verl_worker import Rolled, batch_of

    proto = batch_of([Rolled(ids[:2], ids[2:], [-1.0] * len(ids[2:]), "u") for ids in IDS])
    for key, values in (("min_global_steps", [1, None, 2]), ("max_global_steps", [1, None, 4])):
        proto.non_tensor_batch[key] = np.array(values, dtype=object)
    assert versions(left_right_2_no_padding(proto.to_tensordict())) == [(1, 1), (UNKNOWN, UNKNOWN), (2, 4)]


@pytest.mark.slow
def test_padding_of_verls_trainer_has_no_response() -> None:
    """GIVEN the row that verl's v1 trainer fills a batch up with, THEN it is known for what it is."""
    pytest.importorskip("verl")
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    source = {"input_ids": torch.tensor(IDS[0]), "prompts": torch.tensor(IDS[0][:2]), "uid": "real"}
    source |= {"responses": torch.tensor(IDS[0][2:]), "response_mask": torch.ones(2, dtype=torch.long)}
    pad, _ = construct_minimal_padding_template(source, {}, 7)
    pad["uid"] = "pad0123456789abcdef0123456789abcdef"
    rows = read_rows(list_of_dict_to_tensordict([source, {key: pad[key] for key in source}]))
    assert rows is not None
    assert [len(ids) - prompt for ids, prompt in zip(rows.tokens, rows.prompt_lens)] == [2, 0]
    template = inspect.getsource(inspect.getmodule(construct_minimal_padding_template))  # type: ignore[arg-type]
    assert 'pad_uid = f"pad{uuid.uuid4().hex}"' in template  # the name that read_rows knows it by


@pytest.mark.slow
def test_verls_own_sync_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN verl's ActorRolloutRefWorker, WHEN it sends weights under a number, THEN the engine's version is that."""
    pytest.importorskip("verl")
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers import engine_workers

    for cls in (engine_workers.TrainingWorker, engine_workers.ActorRolloutRefWorker):
        for name in ("infer_batch", "train_mini_batch", "compute_ref_log_prob", "update_weights"):
            if name in vars(cls):
                monkeypatch.setattr(cls, name, vars(cls)[name])  # as it was, when this test is over
    original = engine_workers.ActorRolloutRefWorker.update_weights
    verl_module.patch_workers(engine_workers)
    wrapped = engine_workers.ActorRolloutRefWorker.update_weights
    assert wrapped is not original and inspect.iscoroutinefunction(wrapped)
    assert getattr(wrapped, MAGIC_ATTR) == getattr(original, MAGIC_ATTR)
    sent: list[Any] = []

    class Checkpoint:
        async def send_weights(self, weights: Any, global_steps: int) -> None:
            sent.append((weights, global_steps))

    class Engine:
        def get_per_tensor_param(self) -> tuple[list[str], None]:
            return ["weights"], None

    worker = types.SimpleNamespace(
        actor=types.SimpleNamespace(engine=Engine()),
        checkpoint_engine=Checkpoint(),
        config=types.SimpleNamespace(),
    )
    asyncio.run(wrapped(worker, global_steps=7, mode="nccl"))
    assert sent == [(["weights"], 7)]
    assert verl_versions.version_of(worker.actor.engine, updating=False) == 7
