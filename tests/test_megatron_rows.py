"""Rows, shards and parameters of a Megatron rank, from arguments alone: no Megatron, no other rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probe.errors import CaptureError
from probe.hooks.engines import megatron_parallel
from probe.hooks.engines.megatron import MegatronAdapter
from probe.hooks.engines.megatron_parallel import Ranks, expert_rows, parallel_axis, shard_of, zigzag
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.rows import Announced, foreign_rows
from probe.hooks.runners.megatron_batch import Form, make_batch
from probe.store.writer import DumpWriter


class Stage(torch.nn.Module):
    """A pipeline stage as far as an adapter asks: Megatron's names for its facts, and nothing that computes."""

    def __init__(self, *, last: bool = True, sp: bool = False, hidden: torch.Tensor | None = None) -> None:
        super().__init__()
        self.post_process = last
        self.config = SimpleNamespace(sequence_parallel=sp, tensor_model_parallel_size=2)
        self.decoder = SimpleNamespace(input_tensor=hidden)


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Return a function that makes the adapter of a rank; its dump is thrown away."""
    writers = []

    def make(**place: int) -> MegatronAdapter:
        monkeypatch.setattr(megatron_parallel, "ranks", lambda: Ranks(**place))
        writers.append(DumpWriter(tmp_path / f"rank{len(writers)}.h5", {"schema": 1}))
        return MegatronAdapter(SequenceBook(writers[-1]))

    yield make
    for writer in writers:
        writer.discard()


def cells(call: Any) -> list[tuple[int, int, int]]:
    """Return (sequence, position, token) of every cell of a call's grid, in flat order."""
    return [(int(c["sequence"]), int(c["position"]), int(c["token"])) for c in call.grid.reshape(-1)]


def packed(*bounds: int) -> Any:
    return SimpleNamespace(cu_seqlens_q=torch.tensor(bounds), cu_seqlens_q_padded=torch.tensor(bounds))


PAD = (-1, -1, -1)


# -- context parallelism -----------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 5))
def test_zigzag_chunks_of_all_ranks_are_the_sequence(size, half):
    length = 2 * size * half
    shares = [zigzag(length, size, r) for r in range(size)]
    assert sorted(np.concatenate(shares)) == list(range(length))
    # under a causal mask every rank then attends equally often
    assert len({int(share.sum()) for share in shares}) == 1
    assert size == 1 or shares[0].tolist() == [*range(half), *range(length - half, length)]


@settings(deadline=None)  # packing imports Megatron the first time
@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=11), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from(["padded", "packed"]),
    st.integers(0, 8),
)
def test_the_batches_of_all_ranks_hold_every_token_once(sequences, size, layout, extra):
    multiple = 2 * size if size > 1 else 1
    needed = Form(layout, multiple).lengths(sequences)
    width = extra and (sum(needed) if layout == "packed" else max(needed)) + extra * multiple
    form = {"layout": layout, "multiple": multiple, "rows": 0 if layout == "packed" else len(sequences) + extra}
    held: list[dict[int, int]] = [{} for _ in sequences]
    for cp in range(size):
        batch = make_batch(sequences, Form(**form, width=width, cp=cp, cp_size=size))
        assert batch.input_ids.shape == batch.position_ids.shape == batch.sequence.shape
        for number in range(len(sequences)):
            where = batch.rows(number)
            tokens = batch.input_ids[where].tolist()
            assert not set(held[number]) & set(batch.position[where].tolist())
            held[number].update(zip(batch.position[where].tolist(), tokens))
    assert [[row[p] for p in range(len(row))] for row in held] == sequences


def test_a_packed_share_holds_two_chunks_of_each_sequence(rank):
    adapter = rank(cp=1, cp_size=2)
    adapter.announce([Announced("a", length=7), Announced("b", length=3)])
    ids = torch.tensor([[12, 13, 14, 15, 21, 22]])  # chunks 1 and 2 of each sequence, padded to 8 and 4
    call = adapter.begin_call(Stage(), (), {"input_ids": ids, "packed_seq_params": packed(0, 8, 12)})
    assert cells(call) == [(0, 2, 12), (0, 3, 13), (0, 4, 14), (0, 5, 15), (1, 1, 21), (1, 2, 22)]
    adapter = rank(cp=0, cp_size=2)
    adapter.announce([Announced("a", length=7), Announced("b", length=3)])
    call = adapter.begin_call(Stage(), (), {"input_ids": ids, "packed_seq_params": packed(0, 8, 12)})
    assert [cell[:2] for cell in cells(call)] == [(0, 0), (0, 1), (0, 6), (-1, -1), (1, 0), (-1, -1)]


def test_a_padded_share_of_a_script_that_announces_nothing(rank):
    adapter = rank(cp=0, cp_size=2)
    call = adapter.begin_call(Stage(), (), {"input_ids": torch.tensor([[5, 8], [15, 18]])})
    assert cells(call) == [(0, 0, 5), (0, 3, 8), (1, 0, 15), (1, 3, 18)]
    assert [s.length for s in adapter.book.sequences] == [4, 4]


# -- pipeline stages ---------------------------------------------------------------------------------------------------


def test_a_stage_without_ids_takes_the_tokens_that_were_announced(rank):
    adapter = rank(pp=1, pp_size=2)
    adapter.announce([Announced("a", 1, 3, tokens=(4, 5, 6)), Announced("b", 1, 2, tokens=(7, 8))])
    stage = Stage(hidden=torch.zeros(4, 2, 16))
    assert cells(adapter.begin_call(stage, (), {"input_ids": None})) == [
        *((0, 0, 4), (0, 1, 5), (0, 2, 6), PAD, (1, 0, 7), (1, 1, 8), PAD, PAD),
    ]


@pytest.mark.parametrize("sp", [False, True])
def test_a_stage_that_is_told_nothing_counts_its_hidden_states(rank, sp):
    adapter = rank(pp=1, pp_size=2, tp_size=2)
    stage = Stage(hidden=torch.zeros(2 if sp else 4, 1, 16), sp=sp)
    assert cells(adapter.begin_call(stage, (), {})) == [(0, p, -1) for p in range(4)]
    with pytest.raises(CaptureError, match="nothing in this forward says how many tokens it has"):
        adapter.begin_call(Stage(), (), {})


def test_a_stage_says_whose_the_whole_models_names_are(rank):
    adapter = rank(pp=1, pp_size=2)
    first, last = Stage(last=False), Stage()
    first.vp_stage = 1
    assert [adapter.module_path(path, first) for path in ("", "decoder")] == ["stage3", "stage3.decoder"]
    assert [adapter.module_path(path, last) for path in ("", "decoder")] == ["", "decoder"]


def test_rows_that_fill_up_a_batch_and_batches_that_keep_company(rank):
    adapter = rank()
    adapter.announce([Announced("a", length=2), Announced("", length=0)])
    call = adapter.begin_call(Stage(), (), {"input_ids": torch.tensor([[4, 5, 0], [0, 0, 0]])})
    assert cells(call) == [(0, 0, 4), (0, 1, 5), *[PAD] * 4]
    assert [s.uid for s in adapter.book.sequences] == ["a"]
    adapter.paused = True
    assert adapter.begin_call(Stage(), (), {"input_ids": torch.tensor([[4]])}) is None


# -- sequence parallelism ----------------------------------------------------------------------------------------------


def test_sequence_parallel_tensors_hold_the_ranks_own_positions(rank):
    adapter = rank(tp=1, tp_size=2)
    call = adapter.begin_call(Stage(sp=True), (), {"input_ids": torch.arange(8).reshape(2, 4)})
    whole = torch.arange(8).reshape(2, 4).T[:, :, None] * torch.ones(3)  # [s, b, h]: each row is its token
    rows = adapter.partial_rows("decoder.layers.0", "output.0", whole[2:])
    for part in (whole[2:], whole[2:].reshape(4, 3)):  # as a layer's output and as a router's
        place = call.place_of(part.shape, (), adapter.partial_rows("decoder.layers.0", "output.0", part))
        taken, segment = call.take(part, place)
        assert taken[:, 0].tolist() == segment.rows["token"].tolist() == [2, 6, 3, 7]
    assert rows.tolist() == [2, 6, 3, 7]
    assert adapter.partial_rows("decoder.layers.0.mlp.linear_fc1", "output.0", whole) is None


# -- tensor parallelism ------------------------------------------------------------------------------------------------

LAYER = "decoder.layers.3."


@pytest.mark.parametrize(
    ("path", "slot", "shard"),
    [
        ("self_attention.linear_qkv", "output.0", "columns"),
        ("self_attention.linear_qkv", "input.0", "rest"),
        ("self_attention.q_layernorm", "output.0", "columns"),
        ("self_attention.core_attention", "input.1", "columns"),
        ("self_attention.core_attention", "output.0", "columns"),
        ("self_attention.core_attention.scale_mask_softmax", "output.0", "columns"),
        ("self_attention.linear_proj", "input.0", "columns"),
        ("self_attention.linear_proj", "output.0", "rest"),
        ("mlp.linear_fc1", "output.0", "columns"),
        ("mlp.linear_fc2", "input.0", "columns"),
        ("mlp.linear_fc2", "output.0", "rest"),
        ("mlp.router", "logits.0", "rest"),
        ("mlp.shared_experts.linear_fc1", "output.0", "columns"),
        ("mlp.experts.local_experts.5.linear_fc1", "output.0", "columns"),
        ("mlp.experts.local_experts.5.linear_fc2", "input.0", "columns"),
        ("mlp.experts.local_experts.5.linear_fc2", "output.0", "partial"),
        ("pre_mlp_layernorm", "output.0", "rest"),
    ],
)
def test_what_a_tensor_parallel_rank_holds(path, slot, shard):
    here = Ranks(tp_size=2, etp_size=2)
    for split_rows, rest in ((False, "replicated"), (True, "")):
        wanted = rest if shard == "rest" else shard
        assert shard_of(LAYER + path, slot, here, split_rows, latent=False) == wanted


def test_norms_of_latents_are_not_split():
    for norm in ("q_layernorm", "kv_layernorm"):
        path = f"{LAYER}self_attention.{norm}"
        assert shard_of(path, "output.0", Ranks(tp_size=2), False, latent=True) == "replicated"


def test_logits_are_columns_and_losses_are_not(rank):
    adapter = rank(tp_size=2)
    ids = torch.tensor([[1, 2]])
    for more, shard in (({}, "columns"), ({"labels": ids}, ""), ({"runtime_gather_output": True}, "")):
        adapter.begin_call(Stage(), (), {"input_ids": ids, **more})
        assert adapter.shard_of("", "output.0") == shard
    assert adapter.shard_of("output_layer", "output.0") == "columns"
    assert adapter.shard_of("stage0", "output.0") == adapter.shard_of("", "kwargs.input_ids") == ""


def test_parameters_say_how_they_are_split(monkeypatch):
    monkeypatch.setattr(megatron_parallel, "ranks", lambda: Ranks(tp=1, tp_size=2, etp=0, etp_size=1))
    matrix = torch.nn.Parameter(torch.zeros(6, 4))
    assert parallel_axis("decoder.layers.0.self_attention.linear_qkv.weight", matrix) == (0, 0)
    assert parallel_axis("decoder.layers.0.mlp.linear_fc2.weight", matrix) == (1, 4)
    assert parallel_axis("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", matrix) == (-1, 0)
    assert parallel_axis("decoder.final_layernorm.weight", torch.zeros(4)) == (-1, 0)
    matrix.tensor_model_parallel, matrix.partition_dim = True, 1  # Megatron's own mark goes first
    assert parallel_axis("someone.elses.weight", matrix) == (1, 4)
    monkeypatch.setattr(megatron_parallel, "ranks", Ranks)
    assert parallel_axis("decoder.layers.0.mlp.linear_fc2.weight", matrix) == (-1, 0)


# -- experts -----------------------------------------------------------------------------------------------------------


def test_experts_have_the_numbers_of_the_whole_model(rank):
    adapter = rank(ep=1, ep_size=2)
    experts = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
    assert adapter.module_path("mlp.experts.local_experts", experts) is None
    assert adapter.module_path("mlp.experts.local_experts.2", experts[2]) == "mlp.experts.local_experts.5"


@given(st.data())
def test_an_experts_rows_are_the_tokens_routed_to_it(data):
    batch, length, tp, ep = 2, 4, data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2]))
    split = tp > 1 and data.draw(st.booleans())
    mine = {"tp": tp - 1, "tp_size": tp, "etp": tp - 1, "etp_size": tp, "ep": ep - 1, "ep_size": ep}
    part = length // tp if split else length
    sharing = mine["sharing"] = tuple(range(8, 8 + tp * ep))  # global ranks
    tokens = []  # what the all-gather collects: of every rank, its positions in turn, each with the batch
    for peer_ep in range(ep):
        for peer_tp in range(tp):
            positions = range(peer_tp * part, (peer_tp + 1) * part) if split else range(length)
            if not split and peer_tp != tp - 1:
                tokens += [-1] * (length * batch)  # the same tokens again
            elif peer_ep == ep - 1:
                tokens += [row * length + place for place in positions for row in range(batch)]
            else:
                cells = np.arange(part * batch)
                tokens += foreign_rows(np.full(len(cells), sharing[peer_ep * tp + peer_tp]), cells).tolist()
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))))
    local_map = torch.from_numpy(np.stack([~chosen, chosen], axis=1))
    rows = expert_rows(SimpleNamespace(local_map=local_map), 1, (batch, length), Ranks(**mine), split)
    assert rows.tolist() == np.array(tokens)[chosen].tolist()


class Block(torch.nn.Module):
    """A block of experts as far as an adapter asks."""

    token_dispatcher = None


@pytest.mark.parametrize("sp", [False, True])
def test_a_batch_that_keeps_company_counts_and_stores_what_other_ranks_gave_its_experts(rank, sp):
    adapter = rank(ep=1, ep_size=2, dp=1, dp_size=2, tp=1, tp_size=2, etp=1, etp_size=2)
    adapter.module_path("decoder.layers.0.mlp", Block())
    adapter.paused = True
    call = adapter.begin_call(Stage(sp=sp), (), {"input_ids": torch.zeros(2, 4, dtype=torch.int64)})
    assert call.call == 0 and call.company and set(cells(call)) == {PAD}
    assert adapter.expert_cells().tolist() == ([2, 6, 3, 7] if sp else [0, 4, 1, 5, 2, 6, 3, 7])
    rows = np.array([1, -1, *foreign_rows(np.array([5, 5]), np.array([3, 0]))])
    taken, segment = call.take(torch.arange(4.0)[:, None], call.place_of((4, 1), (), rows))
    assert taken[:, 0].tolist() == [2, 3]
    assert segment.rows.tolist() == [(-7, 3, -1, 0), (-7, 0, -1, 0)]
    adapter.paused = False
    call = adapter.begin_call(Stage(sp=sp), (), {"input_ids": torch.tensor([[4, 5], [6, 7]])})
    assert call.call == 1 and not call.company
    taken, segment = call.take(torch.arange(4.0)[:, None], call.place_of((4, 1), (), rows))
    assert taken[:, 0].tolist() == [0, 2, 3]
    assert segment.rows.tolist() == [(0, 1, 5, 1), (-7, 3, -1, 1), (-7, 0, -1, 1)]


def test_tensors_over_pairs_of_token_and_expert_have_no_rows(rank):
    adapter = rank()
    adapter.begin_call(Stage(), (), {"input_ids": torch.tensor([[1, 2]])})
    assert len(adapter.partial_rows("decoder.layers.0.mlp.experts", "output.0", torch.zeros(2, 3))) == 0
