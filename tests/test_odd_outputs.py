"""Outputs and batches of every odd form: captured, and the rows of two dumps aligned on the same tokens by compare."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import numpy as np
import pytest
import torch
from capture_tools import by_row, captured
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from probe.compare.run import compare_dumps
from probe.hooks.engines.batches import read_cells, read_mask, read_positions
from probe.hooks.rows import Announced

SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16, 17, 18], [21, 22, 23]]
TOKENS = sum(map(len, SEQUENCES))


@dataclasses.dataclass
class Parts:
    """A plain dataclass, as some models return."""

    hidden: torch.Tensor
    more: dict
    nothing: None = None
    count: int = 3


Pair = namedtuple("Pair", "left right")


def model_output(x):
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=(x + 1, x + 2))


def strided(x):
    wide = x.repeat_interleave(3, -1)
    return wide[..., ::3]


class Returning(nn.Module):
    """Return whatever it was made to return."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Model(nn.Module):
    """A value per token, a module with an odd output, and another module after it."""

    def __init__(self, make, times=1):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.odd, self.after, self.times = nn.Embedding(64, 4), Returning(make), nn.Linear(4, 4), times

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        x = self.embed(input_ids)
        for _ in range(self.times):
            self.odd(x)
            x = self.after(x)
        return x


def padded(side="right", multiple=1):
    """Return ids and mask of the sequences in one batch, whose width is a multiple."""
    width = -(-max(map(len, SEQUENCES)) // multiple) * multiple
    fill = [[0] * (width - len(s)) for s in SEQUENCES]
    ids = torch.tensor([f + s if side == "left" else s + f for s, f in zip(SEQUENCES, fill)])
    ones = [[1] * len(s) for s in SEQUENCES]
    return ids, torch.tensor([f + o if side == "left" else o + f for o, f in zip(ones, fill)])


def as_batch(model, rows):
    ids, mask = padded("left")
    model(ids, attention_mask=mask)


def one_by_one(model, rows):
    for number in (2, 0, 1):
        model(torch.tensor([SEQUENCES[number]]))


def compared(tmp_path, make, **arguments):
    """Return the report that compares a padded batch with the sequences one by one, and the two dumps."""
    dumps = []
    for name, run in (("a", as_batch), ("b", one_by_one)):
        model = Model(make, **arguments)
        dumps.append(captured(tmp_path / name, model, lambda rows, m=model, run=run: run(m, rows)))
    report = compare_dumps(tmp_path / "a", tmp_path / "b")
    return report, *dumps


ODD = {
    "transposed": (lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2), {"output.0"}),
    "expanded": (lambda x: x.sum(-1, keepdim=True).expand_as(x), {"output.0"}),
    "strided": (strided, {"output.0"}),
    "sliced": (lambda x: torch.cat([x, x], -1)[..., 2:6], {"output.0"}),
    "dict": (lambda x: {"hidden": x, "twice": x * 2, "none": None}, {"output.hidden", "output.twice"}),
    "dataclass": (lambda x: Parts(x, {"deep": [x + 1]}), {"output.hidden", "output.more.deep.0"}),
    "dataclass in a tuple": (lambda x: (x, Parts(x, {})), {"output.0", "output.1.hidden"}),
    "ModelOutput": (
        model_output,
        {"output.last_hidden_state", "output.hidden_states.0", "output.hidden_states.1"},
    ),
    "namedtuple": (lambda x: Pair(x, x + 1), {"output.0", "output.1"}),
    "nested list": (lambda x: [x, [x + 1, (x + 2, None)]], {"output.0", "output.1.0", "output.1.1.0"}),
    "None": (lambda x: None, set()),
    "one value per token": (lambda x: x.sum(-1), {"output.0"}),
    "more axes": (lambda x: x[..., None, None].repeat(1, 1, 1, 2, 3), {"output.0"}),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_outputs_are_captured_and_aligned(tmp_path, name):
    make, slots = ODD[name]
    report, a, b = compared(tmp_path, make)
    assert report["verdict"] == "consistent"
    measured = {layer["slot"]: layer for layer in report["layers"] if layer["name"] == "odd"}
    assert set(measured) == slots
    for slot, layer in measured.items():
        assert layer["rows"] == TOKENS, slot
        # one embedding and one sum: the same numbers whatever the batch, but for a rounding or two of fp32
        assert layer["verdict"] in ("identical", "consistent") and layer["rel_l2"] <= 1e-6
    assert ("odd", "input.0") in a.tensors and ("odd", "input.0") in b.tensors
    assert {layer["name"] for layer in report["layers"]} == ({"odd"} if slots else set()) | {"embed", "after"}


def test_the_comparison_above_notices_rows_of_other_tokens(tmp_path):
    dumps = []
    for name, shift in (("a", 0), ("b", 1)):
        model = Model(lambda x, s=shift: x.roll(s, 1))
        dumps.append(captured(tmp_path / name, model, lambda rows, m=model: one_by_one(m, rows)))
    report = compare_dumps(tmp_path / "a", tmp_path / "b")
    assert report["verdict"] == "divergent" and report["first_divergence"]["name"] == "odd"


def test_a_module_called_twice_is_aligned_call_by_call(tmp_path):
    report, a, _ = compared(tmp_path, lambda x: x, times=2)
    assert report["verdict"] == "consistent"
    measured = {layer["name"]: layer["rows"] for layer in report["layers"]}
    assert measured == dict.fromkeys(("embed", "odd", "odd#1", "after", "after#1"), TOKENS)
    assert a.modules["odd#1"].cls == "Returning" and not np.array_equal(
        a.read("odd", "output.0"), a.read("odd#1", "output.0")
    )


def test_outputs_without_rows_are_listed_and_break_nothing(tmp_path):
    def make(x):
        nested = torch.nested.nested_tensor([x[0, :1], x[0, :2]], layout=torch.jagged)
        return x.mean(), torch.zeros(0, 4), x[:, :0], nested, x.to_sparse(), 5

    report, a, b = compared(tmp_path, make)
    assert report["verdict"] == "consistent"
    for dump in (a, b):
        assert dump.modules["odd"].info["left_out"].keys() == {"output.3", "output.4"}
        assert not dump.tensors[("odd", "output.0")].has_rows  # a scalar: one per call
        assert dump.read("odd", "output.0").shape == (dump.rows("odd", "output.0").shape[0],)
        assert dump.read("odd", "output.1").shape[1:] == (0, 4)  # no row at all
    assert {layer["name"] for layer in report["layers"]} >= {"embed", "after"}


# -- batches of every form ---------------------------------------------------------------------------------------------


def additive(mask):
    """Return Hugging Face's 4-D causal mask [batch, 1, query, key]: 0 where a key is seen, else the least float."""
    causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
    seen = causal & mask.bool()[:, None, None]
    seen = seen | ~seen.any(-1, keepdim=True)  # rows that see nothing are opened, as for torch's attention kernels
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def mrope(length, image=(2, 2, 2), before=1):
    """Return M-RoPE's positions [3, length] of a sequence with an image of time x height x width patches inside.

    The patches share time positions, and the text after them goes on behind the largest (Qwen2-VL's scheme).
    """
    t, h, w = image
    if length < before + t * h * w:
        return torch.arange(length).expand(3, -1)
    patches = torch.stack([axis.reshape(-1) for axis in torch.meshgrid(*map(torch.arange, image), indexing="ij")])
    rest = torch.arange(length - before - t * h * w).expand(3, -1) + before + max(image)
    return torch.cat([torch.arange(before).expand(3, -1), patches + before, rest], 1)


def mrope_batch(side):
    """Return positions [3, batch, width] of the padded batch; padding has position 1, as in Hugging Face's models."""
    ids, mask = padded(side)
    positions = torch.ones(3, *ids.shape, dtype=torch.long)
    for row, tokens in enumerate(SEQUENCES):
        positions[:, row, mask[row].bool()] = mrope(len(tokens), (1, 2, 2))
    return positions


def with_text_row(positions, mask):
    return torch.cat([(mask.cumsum(1) - 1).clamp(min=0)[None], positions])


def batch(side="right", kind=lambda mask: mask, positions=None, multiple=1):
    ids, mask = padded(side, multiple)
    place = positions(ids, mask) if positions else None
    return lambda model: model(ids, attention_mask=kind(mask), position_ids=place)


def packed(positions, rows=1):
    """Run the sequences concatenated in ``rows`` rows of one length (the second repeats the first's)."""
    ids = torch.tensor([[token for tokens in SEQUENCES for token in tokens]] * rows)
    return lambda model: model(ids, position_ids=positions(ids))


def restarting(ids):
    return torch.cat([torch.arange(len(s)) for s in SEQUENCES]).expand(len(ids), -1)


def numbered():
    """Return a mask that numbers packed sequences 1, 2, ..., as some trainers' packing does."""
    return torch.cat([torch.full((len(s),), n + 1) for n, s in enumerate(SEQUENCES)])[None]


BATCHES = {
    "right, int mask": batch(),
    "left, int mask": batch("left"),
    "left, float mask": batch("left", lambda mask: mask.float()),
    "left, bfloat16 mask": batch("left", lambda mask: mask.bfloat16()),
    "left, bool mask": batch("left", lambda mask: mask.bool()),
    "left, additive 2-D mask": batch("left", lambda mask: (1 - mask.float()) * -10000.0),
    "right, additive 4-D mask": batch("right", additive),
    "left, additive 4-D mask": batch("left", additive),
    "left, bool 4-D mask": batch("left", lambda mask: additive(mask) == 0),
    "left, int 4-D mask": batch("left", lambda mask: (additive(mask) == 0).int()),
    "left, 4-D mask in bfloat16": batch("left", lambda mask: additive(mask).bfloat16()),
    "length padded to a multiple": batch(multiple=16),
    "left, padded to a multiple": batch("left", multiple=8),
    "left, positions count padding": batch("left", positions=lambda i, m: torch.arange(i.shape[1]).expand_as(i)),
    "left, positions skip padding": batch("left", positions=lambda i, m: (m.cumsum(1) - 1).masked_fill(m == 0, 1)),
    "M-RoPE, right": batch("right", positions=lambda ids, mask: mrope_batch("right")),
    "M-RoPE, left": batch("left", positions=lambda ids, mask: mrope_batch("left")),
    "M-RoPE and the text index": batch("left", positions=lambda i, m: with_text_row(mrope_batch("left"), m)),
    "packed": packed(restarting),
    "packed M-RoPE": packed(lambda ids: torch.cat([mrope(len(s), (1, 2, 2)) for s in SEQUENCES], 1)[:, None]),
    "packed M-RoPE and text index": packed(
        lambda ids: torch.cat([restarting(ids)[None], torch.cat([mrope(len(s)) for s in SEQUENCES], 1)[:, None]])
    ),
    "packed, 1-D positions": packed(lambda ids: restarting(ids)[0]),
    "packed, numbered by the mask": lambda model: model(
        torch.tensor([[token for tokens in SEQUENCES for token in tokens]]), attention_mask=numbered()
    ),
    "batches of one": lambda model: [
        model(torch.tensor([[0] * 3 + tokens]), attention_mask=torch.tensor([[0] * 3 + [1] * len(tokens)]))
        for tokens in SEQUENCES
    ],
}


@pytest.mark.parametrize("name", BATCHES)
def test_every_batch_aligns_with_its_sequences_alone(tmp_path, name):
    model = Model(lambda x: x * 2)
    dump = captured(tmp_path / "a", model, lambda rows: BATCHES[name](model))
    captured(tmp_path / "b", model, lambda rows: one_by_one(model, rows))
    assert [s.tokens.tolist() for s in dump.sequences] == SEQUENCES
    report = compare_dumps(tmp_path / "a", tmp_path / "b")
    assert report["verdict"] in ("consistent", "identical")
    assert {layer["name"]: layer["rows"] for layer in report["layers"]} == dict.fromkeys(
        ("embed", "odd", "after"), TOKENS
    )


def test_rows_of_packed_sequences_in_several_batch_rows(tmp_path):
    model = Model(lambda x: x)
    dump = captured(tmp_path, model, lambda rows: packed(restarting, rows=2)(model))
    assert [s.tokens.tolist() for s in dump.sequences] == SEQUENCES * 2


def test_images_share_rope_positions_but_not_rows(tmp_path):
    model, tokens = Model(lambda x: x), list(range(1, 15))

    def run(rows):
        rows.announce([Announced("image")])
        model(torch.tensor([tokens]), position_ids=mrope(len(tokens))[:, None])

    dump = captured(tmp_path, model, run)
    assert len(set(mrope(len(tokens))[0].tolist())) < len(tokens)  # they do share
    assert sorted(position for _, position in by_row(dump, "embed", "output.0")) == list(range(len(tokens)))


def test_a_trainer_that_announces_rows_of_which_one_is_padding(tmp_path):
    ids, mask = padded()
    model = Model(lambda x: x)

    def run(rows):
        rows.announce([Announced(uid) for uid in "abcd"])
        model(torch.cat([ids, ids[:1] * 0]), attention_mask=torch.cat([mask, mask[:1] * 0]))

    dump = captured(tmp_path, model, run)
    assert [(s.uid, s.tokens.tolist()) for s in dump.sequences] == list(zip("abc", SEQUENCES))


# -- the same by its formula -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 4), st.data())
@settings(deadline=None, max_examples=60)
def test_packed_rows_are_told_apart_by_positions_or_bounds(lengths, pad, data):
    positions = np.concatenate([np.arange(n) for n in lengths])
    real = np.ones((1, len(positions) + pad), bool)
    real[0, len(positions) :] = False
    given_positions = torch.tensor([[*positions, *[0] * pad]])
    bounds = np.cumsum([0, *lengths])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    by_position = read_cells(real, read_positions(given_positions, real.shape))
    by_bounds = read_cells(real, None, bounds=bounds)
    for cells in (by_position, by_bounds):
        assert cells.owner[0][real[0]].tolist() == owner.tolist() and cells.count == len(lengths)
        assert cells.position[0][real[0]].tolist() == positions.tolist()
        assert (cells.owner[~real] == -1).all() and (cells.position[~real] == -1).all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans(), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_padding_is_read_off_square_masks(pads, left, causal, opened):
    width = 6
    real = np.array([[(s >= p) if left else (s < width - p) for s in range(width)] for p in pads])
    seen = np.broadcast_to(real[:, None], (len(pads), width, width)).copy()
    if causal:
        seen &= np.tril(np.ones((width, width), bool))
    if opened:
        seen |= ~seen.any(-1, keepdims=True)
    mask = torch.tensor(seen)[:, None]
    assert np.array_equal(read_mask(mask, real.shape), real)
    assert np.array_equal(read_mask(~mask, real.shape, true_hides=True), real)
    assert np.array_equal(read_mask(torch.where(mask, 0.0, -torch.inf), real.shape), real)
