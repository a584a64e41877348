"""Batches of verl's (TensorDicts) as the recording reads them: names, prompts, log-probs, packed cells, columns."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probe.hooks.jobs import verl as verl_module
from probe.hooks.jobs.log import TROUBLE, read_lines
from probe.hooks.jobs.verl import Pass, patch_engine, patch_passes, wrap
from probe.hooks.jobs.verl_batch import (
    packed_cells,
    read_rows,
    sequence_logprobs,
    temperature_of,
    trainer_columns,
)

tensordict = pytest.importorskip("tensordict")

PROMPTS = [[10, 11, 12], [20, 21], [10, 11, 12]]
RESPONSES = [[50, 51], [60, 61, 62], [70]]
UIDS = ["p0", "p1", "p0"]


def jagged(rows: list[list[Any]], dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(r, dtype=dtype) for r in rows], layout=torch.jagged)


def padded(rows: list[list[Any]], width: int, *, left: bool = False) -> torch.Tensor:
    return torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows])


def batch(order: tuple[int, ...] = (0, 1, 2), *, form: str = "nested") -> Any:
    """Return a batch as verl's trainers make them: v1 keeps all nested, the legacy one only ids, 0.6.1 nothing."""
    prompts, responses = [PROMPTS[i] for i in order], [RESPONSES[i] for i in order]
    whole = [p + r for p, r in zip(prompts, responses)]
    uids = tensordict.NonTensorStack.from_list([tensordict.NonTensorData(UIDS[i]) for i in order])
    if form == "nested":
        columns = {"prompts": jagged(prompts), "input_ids": jagged(whole)}
        columns["advantages"] = jagged([[float(t) for t in r] for r in responses], torch.float32)
    else:
        real_prompt, real = ([[1] * len(r) for r in rows] for rows in (prompts, responses))
        columns = {"prompts": padded(prompts, 4, left=True)}
        columns["attention_mask"] = torch.cat([padded(real_prompt, 4, left=True), padded(real, 3)], 1)
        columns["advantages"] = padded(responses, 3).float()
        dense = torch.cat([columns["prompts"], padded(responses, 3)], 1)
        columns["input_ids"] = jagged(whole) if form == "mixed" else dense
    return tensordict.TensorDict({**columns, "uid": uids}, batch_size=[len(order)])


@pytest.mark.parametrize("form", ["nested", "mixed", "dense"])
def test_a_row_is_known_by_its_uid_and_ids_wherever_it_stands(form: str) -> None:
    """GIVEN a batch in any of verl's forms, WHEN its rows are reordered, THEN each keeps its name, ids and prompt."""
    given, reordered = read_rows(batch(form=form)), read_rows(batch((2, 0, 1), form=form))
    assert given is not None and reordered is not None
    assert [t.tolist() for t in given.tokens] == [p + r for p, r in zip(PROMPTS, RESPONSES)]
    assert given.prompt_lens == [3, 2, 3]
    assert [given.names[i] for i in (2, 0, 1)] == reordered.names
    assert len(set(given.names)) == 3 and given.names[0].startswith("p0.") and given.names[2].startswith("p0.")


def test_equal_rows_are_told_apart() -> None:
    rows = read_rows(batch((0, 0, 1)))
    assert rows is not None
    assert rows.names[1] == f"{rows.names[0]}.2"


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("cut", [[(0, 1, 0)], [(0,), (1, 0)], [(0,), (1,), (0,)]])
def test_equal_rows_are_told_apart_however_a_batch_is_cut(cut: list[tuple[int, ...]], chunks: int) -> None:
    """GIVEN a batch that holds a row twice, WHEN micro-batches hold them apart, THEN each has what is its own."""
    told: dict[str, list[Any]] = {"announced": [], "tokens": [], "advantages": []}
    recorder = types.SimpleNamespace(
        adapter=None,
        expect=lambda sequences: None,
        end=lambda: None,
        announce=lambda rows: told["announced"].append([row.uid for row in rows]),
        add_tokens=lambda name, *given, declared: told["tokens"].append(name),
        add_rl=lambda name, column, *given, prompt_len: told.setdefault(column, []).append(name),
    )
    engine = types.SimpleNamespace(is_mp_src_rank_with_outputs=lambda: True)
    running = Pass(engine, recorder, types.SimpleNamespace(seen=set()), tensors=True)  # type: ignore[arg-type]
    whole = read_rows(batch((0, 1, 0)))
    assert whole is not None
    running.begin(batch((0, 1, 0)))
    # a model in two chunks, as a pipeline's stage may hold it, has every micro-batch twice
    for turn in range(chunks):
        for micro in (batch(part) for part in cut):
            running.before_model(micro)
            if turn == chunks - 1:
                running.after_model(micro, {"log_probs": torch.zeros(len(micro["input_ids"].values()))})
    running.end()
    assert [name for names in told["announced"] for name in names] == whole.names * chunks
    assert told["tokens"] == told["advantages"] == told["new_log_probs"] == whole.names
    assert len(set(whole.names)) == 3


def test_trouble_of_an_update_is_not_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a session that cannot be made, or fails at the end of an update, THEN verl's methods run as they do."""
    monkeypatch.setenv("PROBE_DUMP_DIR", str(tmp_path))

    class Worker:
        engine = None

        def train_mini_batch(self) -> int:
            return 3

        def infer_batch(self, data: Any) -> int:
            return 4

    wrap(Worker, "train_mini_batch", verl_module._in_update)
    wrap(Worker, "infer_batch", functools.partial(verl_module._in_pass, forward_only=True))

    def fails(*given: Any) -> None:
        raise RuntimeError("no session")

    monkeypatch.setattr(verl_module, "session", fails)
    assert (Worker().train_mini_batch(), Worker().infer_batch(None)) == (3, 4)
    monkeypatch.setattr(verl_module, "session", lambda: types.SimpleNamespace(step=0))
    monkeypatch.setattr(verl_module.Update, "finish", fails)
    assert Worker().train_mini_batch() == 3
    assert any(line.kind == TROUBLE and "no session" in line.text for line in read_lines(tmp_path))


def test_rows_without_a_uid_are_named_by_their_ids() -> None:
    data = batch()
    del data["uid"]
    rows = read_rows(data)
    assert rows is not None and len({*rows.names}) == 3 and all(len(name) == 16 for name in rows.names)


def test_a_fine_tuning_batch_has_its_prompts_before_the_loss() -> None:
    ids, mask = jagged([[1, 2, 3, 4], [5, 6]]), jagged([[0, 0, 1, 1], [0, 1]])
    rows = read_rows(tensordict.TensorDict({"input_ids": ids, "loss_mask": mask}, batch_size=[2]))
    assert rows is not None and rows.prompt_lens == [2, 1]


def test_log_probs_move_to_the_token_that_they_score() -> None:
    """GIVEN verl's values, each of the next token, THEN a token has its own and the first of a sequence has none."""
    rows = read_rows(batch())
    assert rows is not None
    values = jagged([[-0.1, -0.2, -0.3, -0.4, -9.0], [-1.0, -2.0, -3.0, -4.0, -9.0], [-5.0, -6.0, -7.0, -9.0]])
    values = torch.nested.nested_tensor_from_jagged(values.values().double(), values.offsets())
    found = sequence_logprobs(
        torch.nested.nested_tensor_from_jagged(
            torch.tensor([-0.1, -0.2, -0.3, -0.4, -9, -1, -2, -3, -4, -9, -5, -6, -7, -9]), values.offsets()
        ),
        rows,
    )
    assert np.isnan([own[0] for own in found]).all()
    assert [own[1:].round(6).tolist() for own in found] == [[-0.1, -0.2, -0.3, -0.4], [-1, -2, -3, -4], [-5, -6, -7]]


@pytest.mark.parametrize("form", ["nested", "mixed"])
def test_a_trainers_columns_are_cut_to_the_response(form: str) -> None:
    data = batch(form=form)
    rows = read_rows(data)
    assert rows is not None
    columns = trainer_columns(data, rows)
    assert [own.tolist() for own in columns["advantages"]] == RESPONSES


def test_sequence_parallel_ranks_share_a_packed_batch() -> None:
    """GIVEN 14 tokens over 4 ranks, THEN each has 4 cells, the last ones padding, in the order of the tokens."""
    rows = read_rows(batch())
    assert rows is not None
    parts = [packed_cells(rows, parts=4, part=part) for part in range(4)]
    assert all(cells.owner.shape == (1, 4) and cells.count == 3 for cells in parts)
    owner = np.concatenate([cells.owner[0] for cells in parts]).tolist()
    position = np.concatenate([cells.position[0] for cells in parts]).tolist()
    assert owner == [0] * 5 + [1] * 5 + [2] * 4 + [-1] * 2
    assert position == [*range(5), *range(5), *range(4), -1, -1]
    assert packed_cells(rows, padding=6).owner.shape == (1, 20)


@pytest.mark.parametrize(
    ("given", "expected"), [(0.7, 0.7), (torch.tensor([0.5, 0.5]), 0.5), (torch.tensor([0.5, 1.0]), None)]
)
def test_the_temperature_is_one_for_all_rows_or_not_known(given: Any, expected: float | None) -> None:
    data = batch()
    value = given if not isinstance(given, torch.Tensor) else given.repeat(2)[:3].clone()
    if isinstance(given, torch.Tensor):
        data["temperature"] = value
    else:
        data.set_non_tensor("temperature", value)
    assert temperature_of(data) == expected
    assert temperature_of(batch()) == 1.0


# -- what is wrapped ---------------------------------------------------------------------------------------------------


def test_a_wrapped_method_keeps_its_dispatch_mode_and_is_wrapped_once() -> None:
    """GIVEN a method with attributes, as verl's ``@register`` leaves them, THEN the wrapper has them too."""

    class Worker:
        def work(self) -> str:
            return "done"

    Worker.work.dispatch = {"mode": 1}  # type: ignore[attr-defined]
    assert wrap(Worker, "work", lambda original: lambda self: original(self) + "!")
    assert not wrap(Worker, "work", lambda original: lambda self: original(self) + "!")
    assert Worker.work.dispatch == {"mode": 1}  # type: ignore[attr-defined]
    assert Worker().work() == "done!" and Worker.work.__name__ == "work"


def test_trouble_of_the_recording_never_reaches_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN an engine that the recording cannot make sense of, WHEN its passes run, THEN they return what they did.

    What the job itself raises still reaches it.
    """
    monkeypatch.setattr("probe.hooks.jobs.session._session", None)
    monkeypatch.setenv("DUMP_ON", "1")
    monkeypatch.setenv("PROBE_DUMP_DIR", str(tmp_path))

    class BaseEngine:
        module = "no module"
        engine_config = model_config = None

        def infer_batch(self, data: Any, loss_function: Any = None) -> Any:
            if data is None:
                raise KeyError("the job's own")
            return self.prepare_model_inputs(data)

        def train_batch(self, data: Any, loss_function: Any) -> Any:
            return self.prepare_model_inputs(data)

        def prepare_model_inputs(self, micro_batch: Any) -> Any:
            return micro_batch

    module = types.ModuleType(BaseEngine.__module__)
    module.BaseEngine = BaseEngine  # type: ignore[attr-defined]
    patch_passes(module)
    patch_engine(module)
    engine, data = BaseEngine(), batch()
    assert engine.infer_batch(data) is data
    assert engine.train_batch(data, None) is data
    with pytest.raises(KeyError, match="the job's own"):
        engine.infer_batch(None)
    assert [line.kind for line in read_lines(tmp_path)] == [TROUBLE]
