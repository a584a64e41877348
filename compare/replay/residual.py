"""Embeddings, residual additions and the gated activation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from probe.compare.names.canonical import EMBEDDING
from probe.compare.replay.bands import ACTIVATION, FINE_DTYPES, RESIDUAL
from probe.compare.replay.bands import EMBEDDING as EMBEDDING_BANDS
from probe.compare.replay.base import Context, Hypothesis, Recipe, Unreplayable
from probe.compare.replay.faults import GENERIC, OFFSET, TINY
from probe.compare.replay.norm import added_by_attention, added_by_mlp, stream_before
from probe.compare.replay.places import MLP

SCALED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
"""Families that multiply embeddings with the square root of the hidden size."""


# -- embedding --------------------------------------------------------------------------------------------------------


def embed(context: Context) -> Iterable[np.ndarray]:
    """Yield the rows of the embedding matrix of the tokens, scaled where the family does so."""
    shape = context.parameter_shape("embed_tokens.weight")
    if shape is None:
        raise Unreplayable("the weights at hand hold no embed_tokens.weight")
    tokens = context.tokens() + context.assume("shift", 0)
    known = (tokens >= 0) & (tokens < shape[0])
    values = np.full((len(tokens), shape[1]), np.nan)
    for at in np.flatnonzero(known):
        values[at] = context.parameter_rows("embed_tokens.weight", int(tokens[at]), int(tokens[at]) + 1)[0]
    if context.setting("model_type") in SCALED and not context.assume("unscaled", False):
        root = np.sqrt(float(shape[1]))
        yield values * root
        yield values * context.rounded(np.full(1, root))
        return
    yield values


def _lost_shard(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Tell whether exactly the ids of some vocabulary shards have embeddings of zero: the ranks' sum is missing."""
    plain, tokens = context.plain(), context.tokens()
    zero = (stored == 0).all(axis=1) & (plain != 0).any(axis=1)
    shape = context.parameter_shape("embed_tokens.weight")
    if not zero.any() or zero.all() or shape is None:
        return None
    for ranks in (2, 4, 8):
        lost = np.isin(tokens * ranks // shape[0], np.unique(tokens[zero] * ranks // shape[0]))
        if np.array_equal(lost, zero):
            return {"replaced": np.where(zero[:, None], 0.0, plain), "value": float(zero.sum())}
    return None


EMBEDDING_FAULTS = (
    Hypothesis(
        "missing-all-reduce",
        {},
        "{value:.0f} of its rows are zero, all of ids in a part of the vocabulary",
        solve=_lost_shard,
    ),
    Hypothesis("vocab-offset", {"shift": 1}, "each token has the embedding of the next id"),
    Hypothesis("vocab-offset", {"shift": -1}, "each token has the embedding of the previous id"),
    Hypothesis("scale", {"unscaled": True}, "it is not scaled with the square root of the hidden size"),
    *GENERIC,
)


# -- residual additions -----------------------------------------------------------------------------------------------


def add(context: Context) -> Iterator[np.ndarray]:
    """Yield stream + attention + MLP: rounded at the end only, and after the attention too."""
    stream, attention, mlp = stream_before(context), added_by_attention(context), added_by_mlp(context)
    first = context.assume("stream", 1.0) * stream + context.assume("attention", 1.0) * attention
    last = context.assume("mlp", 1.0) * mlp
    first = context.assume("sum", 1.0) * first
    yield first + last
    yield context.rounded(first) + last
    if not context.assumptions:
        yield context.rounded(stream + context.rounded(attention)) + last


PARTS = {"stream": "the stream that enters the layer", "attention": "the attention's output", "mlp": "the MLP's output"}
RESIDUAL_FAULTS = (
    *(Hypothesis("missing-residual", {part: 0.0}, f"{text} is not added") for part, text in list(PARTS.items())[:1]),
    Hypothesis("missing-residual", {"sum": 0.0}, "what enters the MLP is not added to its output"),
    *(Hypothesis("missing-residual", {part: 0.0}, f"{text} is not added") for part, text in list(PARTS.items())[1:]),
    *(Hypothesis("residual-not-summed", {part: 2.0}, f"{text} is added twice") for part, text in PARTS.items()),
    Hypothesis("residual-not-summed", {"sum": 2.0}, "what enters the MLP is added twice"),
    *GENERIC,
)


# -- activation -------------------------------------------------------------------------------------------------------


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))  # 0 where the exponential overflows, below -709


def _erf(x: np.ndarray) -> np.ndarray:
    """Return the error function to 1e-15: its Maclaurin series below 3, a continued fraction beyond (DLMF 7.6, 7.9)."""
    size = np.minimum(np.abs(x), 6.0)
    term, total = size.copy(), size.copy()
    for n in range(1, 80):
        term = term * (-size * size / n)
        total = total + term / (2 * n + 1)
    series = 2 / np.sqrt(np.pi) * total
    large = np.maximum(size, 3.0)
    fraction = np.zeros_like(large)
    for n in range(60, 0, -1):
        fraction = n / 2 / (large + fraction)
    tail = 1 - np.exp(-large * large) / np.sqrt(np.pi) / (large + fraction)
    return np.sign(x) * np.where(size < 3.0, series, tail)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))),
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
}
"""Name in a configuration -> function. GELU: D. Hendrycks and K. Gimpel, 2016; SiLU: S. Elfwing and others, 2018."""

NAMES = {
    "swish": "silu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_tanh": "gelu_pytorch_tanh",
}
SAID_BUT_TANH = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
"""Families that use the tanh form whatever their old ``hidden_act`` says."""


def activation_of(context: Context) -> str:
    """Return the model's activation, a key of :data:`ACTIVATIONS`."""
    name = str(context.setting("hidden_activation", "hidden_act", "activation_function", default=""))
    name = NAMES.get(name, name)
    if context.setting("model_type") in SAID_BUT_TANH and name in ("", "gelu"):
        name = "gelu_pytorch_tanh"
    if not name and context.setting("rms_norm_eps") is not None:
        name = "silu"  # the default of every family with gate and up projections but Gemma
    if name not in ACTIVATIONS:
        raise Unreplayable(f"the activation {name!r} is not known" if name else "the model's activation is not known")
    return name


def activate(context: Context) -> Iterator[np.ndarray]:
    """Yield act(gate) * up: rounded at the end only, and between the two too."""
    gate, up = (context.value(f"{MLP}.{name}_proj:output.0") for name in ("gate", "up"))
    if context.assume("swapped", False):
        gate, up = up, gate
    function = ACTIVATIONS[context.assume("function", None) or activation_of(context)]
    active = function(gate)
    yield active * up
    yield context.rounded(active) * up


CANCELLING = ("gelu", "gelu_pytorch_tanh")
"""Activations x / 2 * (1 + f(x)) whose sum cancels where x is negative: an error of f is then relative to x / 2.

Float32 libraries compute f to about 2 units in the last place, so that x itself is the magnitude (torch's erf was
measured to be up to 1.5e-7 off)."""


def activation_size(context: Context, computed: np.ndarray) -> np.ndarray:
    """Return the magnitudes that errors are relative to: in float32 what the activation's sum saw, where it is larger.

    In 16 bits kernels compute the activation in float32, far below a rounding of the result.
    """
    if context.dtype not in FINE_DTYPES or activation_of(context) not in CANCELLING:
        return computed
    gate, up = (context.value(f"{MLP}.{name}_proj:output.0") for name in ("gate", "up"))
    return np.hypot(computed, gate * up)


def _other_than(name: str) -> Callable[[Context], bool]:
    return lambda context: activation_of(context) != name


def _clamped(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Tell whether large values were cut to one bound."""
    bound = float(np.abs(stored).max(initial=0.0))
    if bound < TINY or (np.abs(stored) == bound).sum() < 2:
        return None
    return {"replaced": np.clip(context.plain(), -bound, bound), "value": bound}


KNOTS = 64
"""Parts of the gate's range in which a function is read off: at 128 rows of 512 features, 1,000 values in each."""


def _another_function(context: Context, stored: np.ndarray) -> Mapping[str, Any] | None:
    """Read off the values by how much the function differs: (stored - recomputed) / up, by least squares in each of
    KNOTS parts of the gate's range with as many values, and a line from each to the next.

    Whatever the function is, its output then depends on the gate alone; no fault of rows or features does.
    """
    gate, up = (context.value(f"{MLP}.{name}_proj:output.0") for name in ("gate", "up"))
    recomputed = ACTIVATIONS[activation_of(context)](gate) * up
    order = np.argsort(gate, axis=None)
    x, u, y = (values.ravel()[order] for values in (gate, up, stored - recomputed))
    if not np.isfinite([x, u, y]).all() or x.size < 4 * KNOTS:
        return None
    parts = [slice(*ends) for ends in pairwise(np.linspace(0, x.size, KNOTS + 1).astype(np.int64))]
    weights = np.array([np.square(u[part]).sum() for part in parts]) + TINY
    at = np.array([np.square(u[part]) @ x[part] for part in parts]) / weights
    off = np.array([u[part] @ y[part] for part in parts]) / weights
    return {"replaced": recomputed + np.interp(gate, at, off) * up, "value": float(np.abs(off).max())}


ACTIVATION_FAULTS = (
    Hypothesis("gate-up-swapped", {"swapped": True}, "gate and up are exchanged"),
    *(
        Hypothesis("activation", {"function": name}, f"the activation is {name}", when=_other_than(name))
        for name in ACTIVATIONS
    ),
    Hypothesis("activation", {}, "its values are cut at {value:.6g}", solve=_clamped),
    Hypothesis(
        *("activation", {}, "it is another function of the gate, up to {value:.2g} off"), solve=_another_function
    ),
    *GENERIC,
    OFFSET,
)

RECIPES = (
    Recipe("embedding", EMBEDDING, embed, *EMBEDDING_BANDS, hypotheses=EMBEDDING_FAULTS),
    Recipe(
        "activation",
        f"{MLP}.down_proj:input.0",
        activate,
        *ACTIVATION,
        hypotheses=ACTIVATION_FAULTS,
        size=activation_size,
    ),
    Recipe("residual", "layers.{i}:output.0", add, *RESIDUAL, hypotheses=RESIDUAL_FAULTS),
)
