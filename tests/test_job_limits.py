"""What a budget that is met, or a job that never ends, still costs: bytes, tables, hooks, memory."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
import torch
import xxhash
from test_job_session import model, new_session, own_log, run_pass  # noqa: F401
from test_job_vllm_requests import new, order, result, step
from test_vllm_rows import Session as Engine

from probe.hooks.budget import RowBudget
from probe.hooks.debugger import PrecisionDebugger
from probe.hooks.engines import vllm_requests
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.engines.vllm_requests import Piece, RequestLedger
from probe.hooks.jobs.selection import Selection
from probe.store import writer as writer_module
from probe.store.reader import open_dump
from probe.store.writer import DumpWriter

IDS = torch.tensor([[*range(n, n + 8)] for n in range(3)])


def sizes(dump):
    return {key: info.rows for key, info in dump.tensors.items() if info.has_rows}


def test_a_debuggers_rows_are_measured_without_its_sketches(tmp_path, model):  # noqa: F811
    """Else the first call's few rows would seem to have taken the sketches' bytes, and rows that fit are dropped."""
    sketches = sum(3 * 8 * len(p) if p.dim() > 1 else 8 * len(p) for p in model.parameters())

    def debugged(name, **limits):
        debugger = PrecisionDebugger(enabled=True, dump_path=str(tmp_path / name), **limits).start(model)
        with torch.no_grad():
            model(input_ids=IDS[:1, :1], use_cache=False)
            model(input_ids=IDS[1:2], use_cache=False)
        debugger.stop()
        stored = debugger._writer.stored_bytes
        debugger.step()
        return open_dump(tmp_path / name), stored

    whole, stored = debugged("whole")
    limited, _ = debugged("limited", max_bytes=sketches + int(1.3 * (stored - sketches)))
    with whole, limited:
        assert sizes(limited) == sizes(whole)


def test_modules_are_listed_once_and_again_only_when_they_changed(tmp_path, model):  # noqa: F811
    session = new_session(tmp_path)
    recorder = session.recorder("rollout", model)
    for n in range(6):  # each pass is flushed
        run_pass(recorder, model, {f"u{n}": [1, 2, 3 + n]}, tokens=False)
    session.close()
    (path,) = (tmp_path / "d").glob("rollout/*/*.h5")
    with h5py.File(path) as file:
        paths = [row["path"] for row in file["modules"]]
    assert len(paths) == len(set(paths)) > 10


def test_a_call_without_a_row_to_store_reads_no_tensor(tmp_path, model, monkeypatch):  # noqa: F811
    # GIVEN a budget of one sequence of four rows, which its first forward has met
    session = new_session(tmp_path, seqs=1, rows=4)
    recorder = session.recorder("actor", model)
    run_pass(recorder, model, {"a": [1, 2, 3, 4, 5, 6]}, prompt_len=1, tokens=False)
    read = []
    monkeypatch.setattr(recorder._file.capture, "_placed", lambda *given: read.append(given) or [])
    # WHEN other sequences follow
    chosen = recorder._file.adapter.budget.selection
    chosen._keys = [(0, 0)]  # no prompt has a smaller hash
    run_pass(recorder, model, {"b": [7, 8, 9]}, prompt_len=1, tokens=False)
    # THEN no hook looks at a tensor, and the rows are counted
    assert not read and recorder._file.adapter.budget.rows_left == 2 + 3
    session.close()


def test_vllms_passes_outside_the_budget_copy_nothing_from_the_device(tmp_path, monkeypatch):
    # GIVEN an engine whose caller follows requests, and a budget of one sequence of four rows
    engine = Engine(tmp_path)
    engine.adapter.budget = budget = RowBudget(Selection(1), 4, 0, engine.writer, 1.0)
    run, begin, read = engine.runner, engine.adapter.begin_pass, []
    pieces = {"a": Piece("a", 0, 0, 2, 0, (5, 6)), "b": Piece("b", 0, 0, 2, 0, (7, 8))}
    monkeypatch.setattr(engine.adapter, "begin_pass", lambda scheduled, started: begin(scheduled, started, pieces))
    monkeypatch.setattr(Selection, "admit", lambda self, met: [prompt.tolist() == [5, 6] for prompt, _ in met])
    grid = engine.adapter._grid
    monkeypatch.setattr(engine.adapter, "_grid", lambda *given: read.append(len(read)) or grid(*given))
    run.add("a", [5, 6], stop_token_ids=[9])
    run.add("b", [7, 8])
    passes = []
    # WHEN both run on
    run.step({"a": 2, "b": 2}, {"a": 11, "b": 12})
    for n in range(4):
        run.step({"a": 1, "b": 1}, {"a": 20 + n, "b": 30 + n})
        passes.append(len(read))
    # THEN passes are read while one of them has rows to store, and no ids of them are kept
    assert passes == [2, 3, 3, 3] and not engine.adapter.tokens
    assert (budget.rows_kept, budget.rows_left) == (4, 4 + 4 + 0)
    with engine.done() as dump:
        assert dump.rows("embed_tokens", "output.0")["token"].tolist() == [5, 6, 11, 20]


def test_a_server_forgets_requests(monkeypatch):
    monkeypatch.setattr(vllm_requests, "MOST_KNOWN", 3)
    ledger = RequestLedger()
    for n in range(20):
        step(ledger, order([new(f"r{n}", [n], max_tokens=1)], **{f"r{n}": 1}), result(**{f"r{n}": [3]}))
        step(ledger, order(finished=[f"r{n}"]), None)
    assert not ledger._open and len(ledger._pieces) == len(ledger._samples) == 3
    # an id and a prompt that are used again soon are known
    (again,) = step(ledger, order([new("r19", [19], max_tokens=1)], r19=1), result(r19=[3]))
    assert (again.piece.uid, again.piece.sample) == ("r19#1", 1)


def test_a_folder_that_another_writer_takes_away_is_made_again(tmp_path, monkeypatch):
    """One that discards its file deletes the empty folder, between this one's mkdir and its file."""
    create, taken = h5py.File, []

    def racing(path, *given, **more):
        if not taken:
            taken.append(os.rmdir(path.parent))
        return create(path, *given, **more)

    monkeypatch.setattr(writer_module.h5py, "File", racing)
    writer = DumpWriter(tmp_path / "actor" / "step0" / "rank0.h5", {"schema": 1})
    writer.discard()
    assert taken and not (tmp_path / "actor").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "parent").write_text("a file")
    with pytest.raises(OSError):
        DumpWriter(tmp_path / "parent" / "rank0.h5", {"schema": 1})


def test_files_of_models_that_a_job_has_dropped_are_completed(tmp_path):
    session, opened = new_session(tmp_path), []
    for _ in range(8):
        module = torch.nn.Linear(2, 2)
        recorder = session.recorder("actor", module)
        assert recorder.begin()
        module(torch.ones(1, 2))
        recorder.end()
        opened.append(sum(path.suffix == ".partial" for path in (tmp_path / "d").rglob("*")))
        del module, recorder
    assert max(opened) <= 2 and len(session._recorders) == 1
    session.close()
    assert len(list((tmp_path / "d" / "actor" / "step0").glob("*.h5"))) == 8


def test_a_forked_child_leaves_its_parents_file_alone(tmp_path):
    """Also where the step has gone on, for which the parent would complete the file."""
    session, module = new_session(tmp_path, step=(0, 1)), torch.nn.Linear(2, 2)
    recorder = session.recorder("actor", module)
    assert recorder.begin()
    module(torch.ones(1, 2))
    recorder.end()
    child = os.fork()
    if not child:
        session.clock._said = 1
        os._exit(0 if not recorder.begin() and recorder.file is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert recorder.file.with_name(recorder.file.name + ".partial").exists()
    session.close()
    with open_dump(tmp_path / "d" / "actor") as dump:
        assert dump.complete and dump.read("", "output.0").shape == (1, 2)


@pytest.mark.parametrize("noted", [[], [9], [0, 9]])
def test_passes_of_a_step_share_one_choice(tmp_path, noted):
    """A trainer may compute its log-probs in several passes: together they record no more than one would."""
    ids = [[n, n + 1, n + 2] for n in range(12)]
    for number in noted:
        Selection(2, tmp_path).note(ids[number])
    selection = Selection(2, tmp_path, follows=True)
    admitted = []
    for part in (ids[:4], ids[4:8], ids[8:], ids[:4]):  # the first one once more
        selection.expect([(whole, 2) for whole in part])
        admitted.append(selection.admit([(whole[:2], whole) for whole in part]))
    assert admitted[0] == admitted[3]
    chosen = [n for n, wanted in enumerate([*admitted[0], *admitted[1], *admitted[2]]) if wanted]
    assert set(noted) <= set(chosen) and len(chosen) <= (2 if len(noted) != 1 else 3)


@pytest.mark.parametrize("task", ["tokens", "tensor"])
def test_a_step_that_never_ends_keeps_no_ids(tmp_path, model, task):  # noqa: F811
    session = new_session(tmp_path, task=task)
    recorder = session.recorder("actor", model)
    for n in range(5):
        assert recorder.begin()
        ids = torch.tensor([[n, 1, 2]])
        rows = recorder.rows_before(model, (), {"input_ids": ids})
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        rows = recorder.rows_after() if rows is None else rows
        recorder.add_known(int(rows.grid["sequence"][0, 0]), [n, 1, 2], [np.nan, -1.0, -1.0])
        recorder.end()
    adapter = recorder._file.adapter
    kept = [*adapter._batches, *adapter.book._announced, *(t for s in adapter.book.sequences for t in s.tokens)]
    assert kept == [] and len(adapter.book.sequences) == 5
    session.close()
    with open_dump(tmp_path / "d" / "actor") as dump:
        assert [s.tokens.tolist() for s in dump.sequences] == [[n, 1, 2] for n in range(5)]
    (path,) = (tmp_path / "d").glob("actor/*/*.h5")
    with h5py.File(path) as file:
        digests = [row["token_hash"].decode() for row in file["sequences"]]
    assert digests == [xxhash.xxh3_128_hexdigest(np.array([n, 1, 2], "<i8").data) for n in range(5)]


@pytest.mark.parametrize("order_of_calls", ["010101", "000111", "001011"])
def test_chunks_of_a_pipeline_share_sequences_until_all_have_seen_them(tmp_path, order_of_calls):
    adapter = BatchAdapter(SequenceBook(DumpWriter(tmp_path / "actor" / "step0" / "rank0.h5", {"schema": 1})))
    adapter.chunks, chunks, seen = 2, [torch.nn.Identity(), torch.nn.Identity()], {0: [], 1: []}
    for number in map(int, order_of_calls):
        ids = torch.tensor([[len(seen[number]), 5]])
        grid = adapter.begin_call(chunks[number], (), {"input_ids": ids}).grid
        seen[number].append(int(grid["sequence"][0, 0]))
    assert seen == {0: [0, 1, 2], 1: [0, 1, 2]} and not adapter._batches
