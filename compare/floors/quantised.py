"""What a side says about its quantisation, and the rounding that this alone explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

STEP = {
    "fp8": 2.66e-2,
    "fp8_e5m2": 5.3e-2,
    "int8": 9.1e-3,
    "int4": 1.1e-1,
}
"""RMS relative error of one quantised operand. fp8: one rounding (0.425 * 2^-(mantissa bits + 1), as
:data:`probe.compare.judge.ROUNDING`), whatever the scale. Integers: an error that is uniform over a step of
max|x| / (2^(bits-1) - 1) has the RMS step / sqrt(12); the largest of some thousand normal values is at 4 sigma
(8 bits, by channel), that of a group of 128 is 2.7 sigma (4 bits, by group)."""

METHODS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "modelopt": "fp8",
    "compressed-tensors": "fp8",
    "int8": "int8",
    "w8a8": "int8",
    "ascend": "int8",
    "bitsandbytes": "int8",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    "torchao": "int8",
}
"""An engine's or a checkpoint's word for its quantisation -> what weights become where no number of bits is given."""

WEIGHTS_ONLY = ("awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes")
"""Methods that leave the activations as they are."""

CACHES = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_inc", "float8_e4m3fn", "uint8"), "fp8"),
    **dict.fromkeys(("fp8_e5m2", "float8_e5m2"), "fp8_e5m2"),
    "int8": "int8",
}
"""An engine's word for the dtype of its KV cache -> the step (vLLM keeps fp8 as bytes); other words add nothing."""

LINEARS = (2, 6, 9, 11)
"""Operations of a layer (see :data:`probe.compare.names.canonical.LAYER_TENSORS`) whose weights are quantised: the q, k
and v projections, the output projection, gate and up, down. Embedding and head stay as they are."""
ATTENTION = (5,)


@dataclass(frozen=True)
class Quantisation:
    """The RMS relative error that one quantised linear and one attention over a quantised cache add; 0 for none."""

    linear: float = 0.0
    attention: float = 0.0
    words: str = ""

    def __bool__(self) -> bool:
        return bool(self.linear or self.attention)

    def error(self, ops: int, per_layer: int) -> float:
        """Return the relative L2 error that the quantised operations among the first ``ops`` leave, unamplified.

        Each of them errs by the root of the sum of its operands' squared errors; independent ones add likewise.
        """
        layers, rest = divmod(ops, per_layer)
        linears = layers * len(LINEARS) + sum(rest >= at for at in LINEARS)
        attentions = layers * len(ATTENTION) + sum(rest >= at for at in ATTENTION)
        return float(np.sqrt(linears * self.linear**2 + attentions * self.attention**2))


def declared(manifest: Mapping[str, Any]) -> Quantisation:
    """Return the quantisation that a dump's manifest declares.

    Read from ``backends.quantization`` and ``backends.kv_cache`` (vLLM's words), and from the checkpoint's
    ``quantization_config`` (``quant_method``, ``bits`` or ``weight_bits``). A run that only behaves as if it were
    quantised declares nothing: that stays a fault.
    """
    backends = manifest.get("backends") or {}
    config = ((manifest.get("model") or {}).get("config") or {}).get("quantization_config") or {}
    config = config if isinstance(config, Mapping) else {}
    method = str(backends.get("quantization") or config.get("quant_method") or "").lower()
    bits = next((config[key] for key in ("bits", "weight_bits", "w_bit") if isinstance(config.get(key), int)), 0)
    kind = METHODS.get(method, "")
    if kind.startswith("int") and f"int{bits}" in STEP:
        kind = f"int{bits}"
    weight = STEP.get(kind, 0.0)
    operands = 1 if method in WEIGHTS_ONLY else 2
    cache = CACHES.get(str(backends.get("kv_cache") or "").lower().removeprefix("torch."), "")
    words = [f"{kind} weights" + (" and activations" if operands == 2 else "")] if weight else []
    words += [f"{cache} KV cache"] if cache else []
    attention = STEP.get(cache, 0.0) * float(np.sqrt(2))  # keys and values
    return Quantisation(weight * float(np.sqrt(operands)), attention, " and ".join(words))
