"""Monte Carlo arithmetic on a running model: re-round what every leaf module returns, at random, by up to one ulp.

One such run against the plain one measures, tensor by tensor, what rounding alone does to this model, with the model's
own amplification in it (D. S. Parker, Monte Carlo Arithmetic, 1997; Verificarlo, arXiv 1509.01347).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xxhash

from probe.errors import EngineError
from probe.hooks.device import dtype_name
from probe.metrics import MANTISSA_BITS

PASSING = ("IdentityOp", "IdentityFuncOp", "Identity", "Dropout")
"""Classes that hand on what they are given and round nothing."""
WIDER = {"bfloat16": torch.float32, "float16": torch.float32, "float32": torch.float64}
"""Dtype of an output -> the dtype in which it is perturbed before it is rounded back; float64 has no wider one."""


def add_noise(
    models: torch.nn.Module | list[torch.nn.Module],
    seed: int,
    dtype: str,
    name: Callable[[str, torch.nn.Module], str | None] = lambda path, module: path,
) -> Callable[[], None]:
    """Make every leaf module of a model (or of its chunks) return randomly re-rounded values; return the undo.

    Attach it before the capture, whose hooks then see the perturbed values. An output x becomes round(x (1 + u e)) with
    e uniform in [-1, 1] and u = 2^-(mantissa bits + 1): one ulp where the mantissa is largest, half of one where it is
    smallest. The draws follow from ``seed``, the module's ``name`` and the number of its run, so that ranks that
    hold the same tensor keep the same bits. Raises EngineError for a model in float64.
    """
    if dtype not in WIDER:
        raise EngineError(f"noise cannot be drawn below the rounding of {dtype}", f"use --dtype {', '.join(WIDER)}")
    undo = []
    for chunk in models if isinstance(models, list) else [models]:
        for path, module in chunk.named_modules():
            known = name(path, module)
            if known is not None and _rounds(module):
                undo.append(module.register_forward_hook(_Noise(seed, known)).remove)

    def remove() -> None:
        for one in undo:
            one()

    return remove


def _rounds(module: torch.nn.Module) -> bool:
    """Tell whether a module computes something itself: a leaf that is not there to pass its input on."""
    return next(module.children(), None) is None and type(module).__name__ not in PASSING


class _Noise:
    """The forward hook of one leaf module."""

    def __init__(self, seed: int, name: str) -> None:
        self.seed, self.name, self.runs = seed, name, 0

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        self.runs += 1
        digest = xxhash.xxh3_64_intdigest(f"{self.seed} {self.name} {self.runs}".encode())
        generator = torch.Generator().manual_seed(digest >> 1)  # torch takes seeds below 2^63
        if not isinstance(output, tuple):
            return reround(output, generator)
        own = 1 if "Norm" in type(module).__name__ else len(output)  # after its result a norm hands on the residual
        return (*(reround(value, generator) for value in output[:own]), *output[own:])


def reround(value: Any, generator: torch.Generator) -> Any:
    """Return a tensor re-rounded at random by up to one ulp of its dtype; anything else as it is.

    The random numbers are drawn on the CPU: a seed then means the same on every device.
    """
    wide = WIDER.get(dtype_name(value)) if isinstance(value, torch.Tensor) else None
    if wide is None:
        return value
    unit = 2.0 ** -(MANTISSA_BITS[dtype_name(value)] + 1)
    draw = torch.rand(value.shape, generator=generator, dtype=torch.float32).to(value.device)
    return (value.to(wide) * (1 + unit * (2 * draw.to(wide) - 1))).to(value.dtype)
