"""How far the rollout's and the actor's probabilities are apart, computed inside a trainer on a batch of verl's.

Names, arguments, metrics and files are those of verl's ``calculate_debug_metrics`` and of the per-token monitor beside
it, so a trainer changes one import. verl itself is not needed: a batch is a DataProto, a TensorDict, or any mapping of
torch tensors (of any device) or numpy arrays.
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probe.errors import UsageError
from probe.files import replace_all
from probe.logprobs import pearson, prob_diff_metrics

log = logging.getLogger("probe")

METRIC = "training/rollout_probs_diff"
PEARSON_METRIC = "training/rollout_actor_probs_pearson_corr"
LOG_PROBS = ("rollout_log_probs", "old_log_probs")
REQUIRED = (*LOG_PROBS, "responses")
MASKS = ("response_mask", "attention_mask")
"""In the order in which they are looked for."""


def calculate_token_level_prob_diff(
    data: Any,
    save_dir: str | Path | None = None,
    step: int | None = None,
    token_max_print: int = 10,
    sample_max_print: int = 8,
) -> dict[str, float]:
    """Return each token's probability difference |exp(rollout) - exp(actor)| as metrics, and store all of them.

    ``data`` holds ``rollout_log_probs`` and ``old_log_probs`` (the actor's), float [batch, response], ``responses`` of
    the same shape, and ``response_mask`` or ``attention_mask`` (its last columns count); {} where one is missing.
    Metrics: ``training/rollout_probs_diff/s{sample}_p{position:04d}``, for tokens inside the mask of the first
    ``sample_max_print`` rows and ``token_max_print`` positions. With ``save_dir`` (made where missing) two files of the
    whole batch: ``prob_diff_step_{step}.npy``, float32, 0 outside the mask whatever the padding holds, and
    ``prob_mask_step_{step}.npy``, bool; without ``step`` no ``_step_``. Both are renamed into place.

    A log-prob inside the mask that is NaN shows as NaN. The difference is taken in float64 for float64 log-probs, else
    in float32, on the device where they are. Raises UsageError for shapes that do not fit each other and a folder that
    cannot be written.
    """
    batch = _read(data)
    if batch is None or batch.mask is None:
        return {}
    gap = torch.where(batch.mask, (batch.rollout.exp() - batch.actor.exp()).abs(), 0.0)
    diff, mask = _host(gap.float()), _host(batch.mask)
    if save_dir is not None:
        suffix = "" if step is None else f"_step_{int(step)}"
        _save(Path(save_dir), {f"prob_diff{suffix}.npy": diff, f"prob_mask{suffix}.npy": mask})
    shown = np.argwhere(mask[: max(sample_max_print, 0), : max(token_max_print, 0)])
    return {f"{METRIC}/s{row}_p{position:04d}": float(diff[row, position]) for row, position in shown.tolist()}


def calculate_debug_metrics(data: Any) -> dict[str, float]:
    """Return verl's ``training/rollout_probs_diff_{valid,max,mean,std}`` and its Pearson correlation of probabilities.

    ``data``: as for calculate_token_level_prob_diff; {} without log-probs or ``responses`` (verl raises KeyError).
    Without any mask every token counts, padding too, and the log says so. ``valid`` is 1, or 0 (and the others NaN)
    where the mask is empty. With one token std and correlation are NaN, as is what a NaN inside the mask reaches.
    Computed in float64. Raises UsageError for shapes that do not fit each other.
    """
    batch = _read(data)
    if batch is None:
        return {}
    if batch.mask is None:
        log.warning("neither %s: every token counts in %s", " nor ".join(MASKS), METRIC)
    inside = torch.ones_like(batch.rollout, dtype=torch.bool) if batch.mask is None else batch.mask
    sides = _host(torch.stack([batch.rollout[inside], batch.actor[inside]]))
    with np.errstate(over="ignore", invalid="ignore"):  # what an engine reports inside the mask may be anything
        p, q = np.exp(sides.astype(np.float64))
        gap = np.abs(p - q)
    figures = prob_diff_metrics(gap)
    return {
        f"{METRIC}_valid": int(p.size > 0),
        **{f"{METRIC}_{name}": figures[f"{name}_prob_diff"] for name in ("max", "mean", "std")},
        PEARSON_METRIC: pearson(p, q),
    }


@dataclass(frozen=True)
class _Batch:
    """Log-probs float32 or float64 [batch, response] and the mask, bool, None where there is none: on one device."""

    rollout: torch.Tensor
    actor: torch.Tensor
    mask: torch.Tensor | None


def _read(data: Any) -> _Batch | None:
    """Return what of a batch is needed, or None where log-probs or responses are missing."""
    columns = getattr(data, "batch", data)
    if columns is None:
        return None
    if not hasattr(columns, "get"):
        raise UsageError(
            f"a batch of log-probs cannot be a {type(columns).__name__}", "give a DataProto, a TensorDict or a dict"
        )
    given = {key: columns.get(key, None) for key in (*REQUIRED, *MASKS)}
    if any(given[key] is None for key in REQUIRED):
        return None
    name = next((key for key in MASKS if given[key] is not None), None)
    used = {key: _tensor(given[key], key) for key in (*REQUIRED, *([name] if name else []))}
    width = used["responses"].shape[-1] if used["responses"].ndim else 0
    if name is not None and used[name].ndim == 2:
        # the last ``width`` columns; [:, -width:] would be all of them for a width of 0
        used[name] = used[name][:, max(used[name].shape[1] - width, 0) :]
    if len({tensor.shape for tensor in used.values()}) > 1 or used["responses"].ndim != 2:
        shapes = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in used.items())
        raise UsageError(f"the batch does not fit together: {shapes}", "all are [batch, response length]")
    device = used[LOG_PROBS[0]].device
    sides = [used[key].to(device) for key in LOG_PROBS]
    rollout, actor = (side if side.dtype == torch.float64 else side.float() for side in sides)
    return _Batch(rollout, actor, None if name is None else used[name].to(device).bool())


def _tensor(value: Any, key: str) -> torch.Tensor:
    """Return a column as a dense tensor without a gradient; rows of different lengths are padded with 0 at the end."""
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.from_numpy(np.require(value, requirements=("C", "W")))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{key} of the batch is no array of numbers ({error})", "give tensors") from error
    value = value.detach()
    if not value.is_nested:
        return value
    if key == "attention_mask":
        raise UsageError("attention_mask has rows of different lengths", "give response_mask")
    return torch.nested.to_padded_tensor(value, 0)


def _host(values: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.cpu().numpy())


def _save(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    contents = {}
    for name, array in arrays.items():
        buffer = io.BytesIO()
        np.save(buffer, array)
        contents[folder / name] = buffer.getvalue()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_all(contents)
    except OSError as error:
        raise UsageError(f"cannot write to {folder} ({error.strerror or error})", "choose another save_dir") from error
