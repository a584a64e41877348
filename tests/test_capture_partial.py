"""Tensors that hold only some rows of a call, or hold them in another order: chunked heads, shards, experts."""

from __future__ import annotations

import numpy as np
import torch
from capture_tools import MANIFEST, by_row, captured
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from probe.hooks.capture import Capture
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.rows import CallRows, grid_of
from probe.store.reader import open_dump
from probe.store.schema import AXES, COLUMNS
from probe.store.writer import DumpWriter


class Times(nn.Module):
    """Multiply by ten."""

    def forward(self, x):
        return x * 10


class Head(nn.Module):
    """Run a head on chunks of the positions, then once more on the first chunk."""

    def __init__(self):
        super().__init__()
        self.head = Times()

    def forward(self, input_ids):
        x = input_ids[..., None].float()
        for first, last in ((0, 2), (2, 5), (0, 2)):
            self.head(x[:, first:last])
        return x


class ChunkedHead(BatchAdapter):
    """Know which positions the head sees by its first token: row b * 5 + s of a batch of 2 x 5."""

    def partial_rows(self, path, slot, tensor):
        if path != "head":
            return None
        first = int(tensor.reshape(-1)[0]) % 10 - 1 if slot == "input.0" else self.first
        self.first = first
        return (np.arange(2)[:, None] * 5 + first + np.arange(tensor.shape[1])).reshape(-1)


def test_a_head_run_in_chunks_is_one_tensor_and_its_repeat_another(tmp_path):
    model = Head()
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    dump = captured(tmp_path, model, lambda rows: model(ids), adapter=ChunkedHead)
    found = by_row(dump, "head", "output.0")
    assert len(dump.rows("head", "output.0")) == 10  # every row once
    assert {place: int(v[0]) for place, v in found.items()} == {
        (f"s{b}", s): 10 * (s + 1) for b in range(2) for s in range(5)
    }
    assert set(by_row(dump, "head#1", "output.0")) == {(f"s{b}", s) for b in range(2) for s in range(2)}


class Unsure(ChunkedHead):
    """Claim more rows than a tensor has."""

    def partial_rows(self, path, slot, tensor):
        return np.zeros(7, np.int64) if path == "head" else None


def test_rows_that_do_not_fit_are_left_out_not_guessed(tmp_path):
    model = Head()
    dump = captured(tmp_path, model, lambda rows: model(torch.tensor([[1, 2, 3, 4, 5]])), adapter=Unsure)
    assert not [key for key in dump.tensors if key[0] == "head"]
    assert set(dump.modules["head"].info["left_out"]) == {"input.0", "output.0"}


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from(["bs", "sb", "flat", "flat_sb"]), st.data())
@settings(deadline=None, max_examples=40)
def test_every_layout_gives_the_same_rows(batch, length, layout, data):
    sequence, position = np.indices((batch, length))
    pads = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=batch, max_size=batch)))
    sequence[position < pads[:, None]] = -1
    call = CallRows(grid_of(sequence, position, position), 0, (layout,))
    values = torch.arange(batch * length * 2.0).reshape(batch, length, 2)
    shaped = values if layout in ("bs", "flat") else values.transpose(0, 1)
    shaped = shaped if layout in ("bs", "sb") else shaped.reshape(batch * length, 2)
    rows, segment = call.take(shaped, call.place_of(shaped.shape))
    assert rows.tolist() == values[torch.from_numpy(sequence >= 0)].tolist()
    assert (segment.rows["sequence"] >= 0).all() and len(segment.rows) == len(rows)
    # the same with some rows only, in an order of their own: sequence parallelism, experts
    flat = np.array(data.draw(st.lists(st.integers(-1, batch * length - 1), max_size=6)), np.int64)
    some = values.reshape(-1, 2)[torch.from_numpy(np.maximum(flat, 0))]
    for form in (some, some[:, None], some.reshape(1, -1, 2) if len(flat) else some):
        place = call.place_of(form.shape, flat_rows=flat)
        if form.shape[0] == len(flat) or place is not None:
            rows, segment = call.take(form, place)
            kept = [row for row in flat if row >= 0 and sequence.reshape(-1)[row] >= 0]
            assert rows.tolist() == values.reshape(-1, 2)[kept].tolist()
            assert segment.rows["position"].tolist() == position.reshape(-1)[kept].tolist()


class Experts(nn.Module):
    """Run one activation expert by expert, on rows that no argument tells."""

    def __init__(self):
        super().__init__()
        self.act_fn = Times()

    def forward(self, input_ids):
        x = input_ids.reshape(-1, 1).float()
        return sum(self.act_fn(x[first::3]).sum() for first in range(3))


def test_runs_on_unknown_rows_are_no_repeats(tmp_path):
    model = Experts()
    dump = captured(tmp_path, model, lambda rows: model(torch.tensor([[1, 2, 3, 4, 5]])))
    assert set(dump.modules) == {"", "act_fn"} and not dump.tensors[("act_fn", "output.0")].has_rows


# -- chunks of a pipeline that see no ids ------------------------------------------------------------------------------


class Stage(nn.Module):
    """A pipeline chunk: the first one is given ids, the others the hidden states of the one before."""

    def __init__(self):
        super().__init__()
        self.layer = Times()

    def forward(self, input_ids=None, inputs_embeds=None):
        return self.layer(input_ids[..., None].float() if inputs_embeds is None else inputs_embeds)


def test_a_later_chunk_without_ids_has_the_sequences_of_the_first(tmp_path):
    chunks = [Stage(), Stage()]
    batches = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])]

    def run(rows):
        for hidden in [chunks[0](batch) for batch in batches]:  # interleaved: chunk by chunk
            chunks[1](inputs_embeds=hidden)

    dump = captured(tmp_path, chunks, run)
    assert [s.tokens.tolist() for s in dump.sequences] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    found = by_row(dump, "chunk1.layer", "output.0")
    assert found[("s2", 1)].tolist() == [600] and len(found) == 8


class Attention(nn.Module):
    """Hold two of four heads, as a tensor-parallel rank does: values [b, s, 2], probabilities [b, 2, s, s]."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, input_ids):
        batch, length = input_ids.shape
        heads = 2.0 * self.rank + torch.arange(2)
        return heads.expand(batch, length, 2), heads[:, None, None].expand(batch, 2, length, length)


class ColumnsOnTwoRanks(BatchAdapter):
    """Declare every tensor split over two ranks."""

    tp_size = 2

    def shard_of(self, path, slot):
        return COLUMNS


def test_only_tensors_with_rows_are_joined_from_columns(tmp_path):
    """Without rows the first axis is the batch, not the heads: joined along it, probabilities would be nonsense."""
    topology = {**dict.fromkeys(AXES, 1), "tp": 2, "vpp": 1, "sp": False}
    for rank in range(2):
        place = {"world_size": 2, "topology": topology, "coordinates": {**dict.fromkeys(AXES, 0), "tp": rank}}
        writer = DumpWriter(tmp_path / "actor" / "step0" / f"rank{rank}.h5", MANIFEST | place)
        adapter, model = ColumnsOnTwoRanks(SequenceBook(writer)), Attention(rank)
        adapter.tp_rank = rank
        capture = Capture(writer, adapter)
        capture.attach(model)
        model(torch.tensor([[1, 2, 3], [4, 5, 6]]))
        capture.detach()
        writer.close()
    dump = open_dump(tmp_path)
    assert dump.read("", "output.0").tolist() == [[0, 1, 2, 3]] * 6
    probabilities = dump.read("", "output.1")
    assert probabilities.shape == (2, 2, 2, 3, 3)  # one per rank: batch, heads, queries, keys
    assert [np.unique(of_rank).tolist() for of_rank in probabilities] == [[0, 1], [2, 3]]
    assert dump.replicas("", "output.1") == []
