"""What is tapped of an engine's experts; doubles stand in for what no CPU engine reaches (EPLB, fused kernels)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from probe.hooks.engines import megatron_moe, megatron_parallel, vllm_moe
from probe.hooks.engines.megatron_parallel import Ranks
from probe.hooks.rows import foreign_rows
from probe.hooks.taps import tap
from probe.hooks.tensors import results_of


class PickingRouter:
    """A router as vLLM's: no module, with ``select_experts``."""

    def __init__(self, eplb_state: object = None) -> None:
        self.eplb_state = eplb_state

    def select_experts(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the ids of the two best experts."""
        return torch.topk(logits, 2, dim=-1)


class FusedExperts(torch.nn.Module):
    """Fused experts as vLLM's, which hold a router."""

    def __init__(self, router: object, *, shared: bool = False, monolithic: bool = False) -> None:
        super().__init__()
        self.router, self.is_monolithic = router, monolithic
        self._shared_experts = torch.nn.Identity() if shared else None

    def apply_routed_output_transform(self, routed: torch.Tensor) -> torch.Tensor:
        """Return the routed sum as it is."""
        return routed

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Pick experts."""
        weights, _ = self.router.select_experts(logits)
        return weights


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (FusedExperts(PickingRouter()), {"router.select_experts": "weights ids"}),
        (
            FusedExperts(PickingRouter(), shared=True),
            {"router.select_experts": "weights ids", "apply_routed_output_transform": "routed"},
        ),
        (FusedExperts(PickingRouter(), monolithic=True), {}),
        (FusedExperts(PickingRouter(eplb_state=object())), {}),  # it would return numbers of replicas
        (torch.nn.Linear(2, 2), {}),
    ],
)
def test_vllm_experts_are_tapped_where_they_pick(module, expected):
    assert vllm_moe.taps(module) == expected


def test_the_routed_sum_is_one_of_a_sum_over_ranks_unless_the_kernel_reduced_it():
    module = FusedExperts(PickingRouter(), shared=True)
    assert vllm_moe.shard_of(module, "routed") == "partial"
    assert vllm_moe.shard_of(module, "ids") is None
    module._fused_output_is_reduced = True
    assert vllm_moe.shard_of(module, "routed") is None


def test_a_method_of_an_object_that_a_module_holds_is_tapped_and_put_back():
    module, seen = FusedExperts(PickingRouter()), []
    undo = tap(module, "router.select_experts", lambda result: seen.extend(results_of(result, vllm_moe.PICKS)))
    module(torch.tensor([[0.1, 0.9, 0.5]]))
    undo()
    module(torch.tensor([[0.1, 0.9, 0.5]]))
    assert [slot for slot, _ in seen] == ["weights", "ids"]
    assert seen[1][1].tolist() == [[1, 2]]
    assert "select_experts" not in vars(module.router)


def test_megatron_blocks_that_add_the_shared_expert_in_combine_are_not_tapped():
    class Block(torch.nn.Module):
        """A block of experts as Megatron's."""

        token_dispatcher = None

        def combine(self, output):
            """Return the combined output."""
            return output

    class OlderBlock(Block):
        """Megatron before 0.15 added the shared expert in ``combine``."""

        def combine(self, output, shared_expert_output):
            """Return the sum."""
            return output + shared_expert_output

    assert megatron_moe.taps("decoder.layers.0.mlp", Block()) == {"combine": "combined.0"}
    assert megatron_moe.taps("decoder.layers.0.mlp", OlderBlock()) == {}
    assert megatron_moe.taps("decoder.layers.0.mlp", torch.nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("split_rows", [False, True])
@pytest.mark.parametrize(("ep_size", "etp_size"), [(1, 1), (2, 1), (2, 2)])
def test_rows_of_an_expert_are_the_ranks_own_tokens_in_position_major_order(split_rows, ep_size, etp_size):
    batch, length, rng = 3, 8, np.random.default_rng(0)
    tp_size = etp_size if split_rows else 1
    part = length // tp_size
    for ep in range(ep_size):
        for etp in range(etp_size):
            here = Ranks(tp=etp if split_rows else 0, tp_size=tp_size, ep=ep, ep_size=ep_size, etp=etp,
                         etp_size=etp_size)  # fmt: skip
            gathered = rng.random((ep_size * etp_size * part * batch, 2)) < 0.5
            dispatcher = type("Dispatcher", (), {"local_map": torch.from_numpy(gathered)})()
            rows = megatron_parallel.expert_rows(dispatcher, 1, (batch, length), here, split_rows)
            expected = []
            for token in np.flatnonzero(gathered[:, 1]):
                rank, cell = divmod(token, part * batch)
                owner_ep, owner_tp = divmod(rank, etp_size)
                position, row = divmod(cell, batch)
                if not split_rows and owner_tp != etp:
                    expected.append(-1)  # another rank of that tensor-parallel group gave the same token
                elif owner_ep == ep:
                    expected.append(row * length + position + (owner_tp * part if split_rows else 0))
                else:
                    expected.append(int(foreign_rows(rank, cell)))
            assert rows.tolist() == expected
