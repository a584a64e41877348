"""Environment variables that change numbers, with the values that make runs repeatable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """An environment variable that changes numbers: on which device, and what makes runs repeatable.

    ``values`` empty: any value, as long as both sides have the same.
    """

    device: str
    values: tuple[str, ...]
    why: str


SWITCHES = {
    "CUBLAS_WORKSPACE_CONFIG": Switch("cuda", (":4096:8", ":16:8"), "cuBLAS may sum in another order on each run"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": Switch("cuda", ("0",), "Transformer Engine may pick varying kernels"),
    "NCCL_ALGO": Switch("cuda", ("Ring",), "the order of sums over ranks varies"),
    "FLASH_ATTENTION_DETERMINISTIC": Switch("cuda", ("1",), "the backward of flash attention varies"),
    "HCCL_DETERMINISTIC": Switch("npu", ("true", "strict"), "the order of sums over ranks varies"),
    "LCCL_DETERMINISTIC": Switch("npu", ("1",), "the order of sums over ranks varies"),
    "ATB_LLM_LCOC_ENABLE": Switch("npu", ("0",), "communication overlapped with matmul varies"),
    "ATB_MATMUL_SHUFFLE_K_ENABLE": Switch("npu", ("0",), "matmul sums in a shuffled order (the default is 1)"),
    "CLOSE_MATMUL_K_SHIFT": Switch("npu", ("1",), "matmul sums in a shifted order"),
    "INF_NAN_MODE_ENABLE": Switch("npu", ("1",), "overflow saturates instead of giving Inf"),
    "INF_NAN_MODE_FORCE_DISABLE": Switch("npu", ("0",), "overflow saturates instead of giving Inf"),
    "VLLM_ASCEND_ENABLE_NZ": Switch("npu", ("0",), "weights change their layout, and matmul its order of sums"),
    "HCCL_OP_EXPANSION_MODE": Switch("npu", (), "it decides where sums over ranks are made"),
    "VERL_DISABLE_FLASH_ATTN_CE": Switch("any", ("1",), "the log-prob of a token comes from another kernel"),
    "TASK_QUEUE_ENABLE": Switch("npu", (), "it decides how operators are queued and fused"),
    "VLLM_BATCH_INVARIANT": Switch("any", (), "it swaps vLLM's kernels"),
}
"""Switches whose repeatable value the vendors document: ``probe doctor`` checks them in this process's environment, and
``probe compare`` warns where two dumps differ in any."""


@dataclass(frozen=True)
class Setting:
    """A framework setting that a manifest records.

    ``values``: those that make runs repeatable, empty: any; ``device``: on which it acts.
    """

    values: tuple[str, ...]
    why: str
    device: str = "any"


SETTINGS = {
    "torch.deterministic_algorithms": Setting(("True",), "kernels may add in another order on each run"),
    "torch.cuda.matmul.allow_tf32": Setting(("False",), "float32 matmul rounds its inputs to 10 mantissa bits", "cuda"),
    "torch.cudnn.allow_tf32": Setting(
        ("False",), "float32 convolutions round their inputs to 10 mantissa bits", "cuda"
    ),
    "torch.cudnn.deterministic": Setting(("True",), "convolutions may add in another order on each run", "cuda"),
    "torch.cudnn.benchmark": Setting(("False",), "the kernel is whichever was fastest in this run", "cuda"),
    "torch.bf16_reduced_precision_reduction": Setting((), "bf16 matmul may add its parts in bf16", "cuda"),
    "npu.matmul.allow_hf32": Setting(("False",), "float32 matmul rounds its inputs to 11 mantissa bits (HF32)", "npu"),
    "npu.conv.allow_hf32": Setting(
        ("False",), "float32 convolutions round their inputs to 11 mantissa bits (HF32)", "npu"
    ),
    "npu.allow_internal_format": Setting(
        ("False",), "weights change their layout (NZ), and matmul its order of sums", "npu"
    ),
}
"""Settings of torch and torch-npu, by their key in a manifest's ``environment``."""


def repeatable(name: str) -> tuple[str, ...]:
    """Return the values of a switch (``env.NAME``) or setting that make runs repeatable, empty where none is known."""
    found = SWITCHES.get(name.removeprefix("env.")) if name.startswith("env.") else SETTINGS.get(name)
    return found.values if found else ()


def reason(name: str) -> str:
    """Return in words why a switch (``env.NAME``) or setting changes numbers, empty where that is not known."""
    found = SWITCHES.get(name.removeprefix("env.")) if name.startswith("env.") else SETTINGS.get(name)
    return found.why if found else ""
