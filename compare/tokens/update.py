"""The ``ppo`` section of a report: the update with the rollout's log-probs as old ones, and what the mismatch adds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from probe.compare.ppo import SCALARS as UPDATE_SCALARS
from probe.compare.ppo import PPOConfig, Update, ppo_update
from probe.compare.tokens.batch import COLUMNS, TokenBatch
from probe.compare.tokens.entries import entry_in_context
from probe.compare.tokens.groups import largest
from probe.compare.tokens.text import Decoder

CARRIERS = 20
"""Tokens that are listed as carrying the mismatch."""
FLOAT32_LOG_MAX = float(np.log(np.finfo(np.float32).max))
"""Log-ratios above it overflow in the float32 of a trainer."""
SCALARS = (
    *UPDATE_SCALARS,
    *("approx_kl_recomputed", "clipfrac_recomputed", "clipfrac_verl_recomputed", "early_stop_recomputed"),
    *("policy_loss_recomputed", "policy_loss_mismatch", "ref_max_abs_diff", "overflows"),
)


@dataclass(frozen=True)
class _Known:
    """What is known of each token: both sides' log-probs, ``columns`` that have any number, and the two masks.

    ``given``: names of the columns that the source had; new and old values stand for each other where one is missing.
    """

    a: np.ndarray
    b: np.ndarray
    new: np.ndarray
    columns: dict[str, np.ndarray]
    given: list[str]
    mask: np.ndarray
    value_mask: np.ndarray


def ppo_section(batch: TokenBatch | None, config: PPOConfig, decode: Decoder | None) -> dict[str, Any]:
    """Return the ``ppo`` section of a report (docs/ppo.md lists its keys).

    The trainer's update uses the rollout's log-probs (a) as old ones; ``*_recomputed`` is the same update with the
    actor's (b), and what remains is the mismatch. Without ``new_log_probs`` the new ones are b: no update has happened
    yet. Figures are None where their inputs are missing. Cheap: O(n log n) at most.
    """
    section: dict[str, Any] = {
        "config": asdict(config),
        **{"scalars": dict.fromkeys(SCALARS), "gradient": None, "clipped": None, "carriers": [], "given": []},
        "detail": "No token has a log-prob on both sides: nothing of the update is known.",
    }
    if batch is None or batch.a is None or batch.b is None or not len(batch):
        return section
    known = _known(batch, batch.a, batch.b)
    section |= {"given": known.given, "clipped": _clipped(batch.sequence, known, config)}
    if not known.mask.any():
        return section | {"detail": f"No token has all of {', '.join(known.given)}: nothing of the update is known."}
    update, recomputed = _updates(known, config)
    slopes = [np.where(known.mask, found.policy.slope, 0.0) for found in (update, recomputed) if found.policy]
    section["scalars"] = _scalars(known, update, recomputed)
    section["gradient"] = _gradient(slopes[0], slopes[1], int(known.mask.sum())) if slopes else None
    section["carriers"] = _carriers(batch, known, slopes, update, decode)
    section["detail"] = " ".join(_sentences(known, section))
    return section


def _known(batch: TokenBatch, rollout: np.ndarray, actor: np.ndarray) -> _Known:
    """Sort out what was given; a token of which one of the policy's columns lacks its number is outside the mask."""
    finite = {name: np.isfinite(values) for name, values in batch.columns.items()}
    columns = {name: batch.columns[name] for name in COLUMNS if name in finite and finite[name].any()}
    given = list(columns)
    for name, other in (("values", "old_values"), ("old_values", "values")):
        if name not in columns and other in columns:  # no update yet: both are the same
            columns[name], finite[name] = columns[other], finite[other]
    masks = []
    for names in (("new_log_probs", "advantages", "ref_log_probs"), ("values", "old_values", "returns")):
        masks.append(np.logical_and.reduce([np.ones(len(batch), bool), *(finite[n] for n in names if n in columns)]))
    return _Known(rollout, actor, columns.get("new_log_probs", actor), columns, given, masks[0], masks[1])


def _updates(known: _Known, config: PPOConfig) -> tuple[Update, Update]:
    """Return the update with the rollout's old log-probs, and its policy part with the actor's."""
    get = known.columns.get
    policy = partial(
        ppo_update,
        known.new,
        config=config,
        mask=known.mask,
        advantages=get("advantages"),
        reference=get("ref_log_probs"),
    )
    whole = policy(
        old=known.a,
        values=get("values"),
        old_values=get("old_values"),
        returns=get("returns"),
        value_mask=known.value_mask,
    )
    return whole, policy(old=known.b)


def _scalars(known: _Known, update: Update, recomputed: Update) -> dict[str, Any]:
    """Return the update's scalars, those of the same update with recomputed old log-probs, and their difference."""
    again = ("approx_kl", "clipfrac", "clipfrac_verl", "early_stop", "policy_loss")
    scalars = dict.fromkeys(SCALARS) | update.scalars
    scalars |= {f"{name}_recomputed": recomputed.scalars[name] for name in again}
    if update.policy is not None and recomputed.policy is not None:
        scalars["policy_loss_mismatch"] = _difference(
            update.scalars["policy_clip_loss"], recomputed.scalars["policy_clip_loss"]
        )
    reference = known.columns.get("ref_log_probs")
    if reference is not None:
        scalars["ref_max_abs_diff"] = float(np.abs(known.b - reference)[known.mask].max())
    scalars["overflows"] = int(np.sum(update.log_ratio[known.mask] > FLOAT32_LOG_MAX))
    return scalars


def _gradient(actual: np.ndarray, recomputed: np.ndarray, tokens: int) -> dict[str, Any]:
    """Return how much of the policy loss's gradient weight the mismatch adds and takes.

    The arguments are the slopes of the surrogate by each token's new log-prob, float64 [N], with the rollout's and with
    the actor's old log-probs, 0 outside the mask, which holds ``tokens`` tokens, 1 at least. Weights are per token of
    it. Signs agree, so that weight_total = weight_recomputed + gained - lost, weight_mismatch = gained + lost.
    """
    total, clean = np.abs(actual), np.abs(recomputed)
    with np.errstate(invalid="ignore"):
        change = total - clean
    gained, lost = (float(np.maximum(part, 0).sum()) / tokens for part in (change, -change))
    weight, mismatch = float(clean.sum()) / tokens, gained + lost
    sizes = np.sort(np.abs(change))[::-1]
    reached = np.cumsum(sizes)
    whole = float(reached[-1])
    return {
        "weight_total": float(total.sum()) / tokens,
        "weight_recomputed": weight,
        "weight_mismatch": mismatch,
        **{"gained": gained, "lost": lost},
        "share": mismatch / (weight + mismatch) if 0 < weight + mismatch < np.inf else None,
        "tokens": int(np.count_nonzero(change)),
        "half": int(np.searchsorted(reached, whole / 2) + 1) if 0 < whole < np.inf else None,
        "carriers_share": float(reached[min(CARRIERS, len(sizes)) - 1]) / whole if 0 < whole < np.inf else None,
    }


def _clipped(sequence: np.ndarray, known: _Known, config: PPOConfig) -> dict[str, Any]:
    """Return what the ratio actor / rollout already clips while no update has happened yet."""
    with np.errstate(over="ignore"):
        ratio = np.exp(known.b - known.a)
    outside = np.abs(ratio - 1) > config.clip_epsilon
    above = outside & (ratio > 1)
    sequences = len(np.unique(sequence[outside]))
    found = {
        "tokens": int(outside.sum()),
        "share_tokens": float(outside.mean()),
        "share_above": float(above.mean()),
        "share_below": float((outside & ~above).mean()),
        "sequences": sequences,
        "share_sequences": sequences / len(np.unique(sequence)),
        "share_gradient": None,
    }
    advantages = known.columns.get("advantages")
    if advantages is not None:
        weights = np.where(np.isfinite(advantages), advantages, 0.0)
        stopped = (above & (weights > 0)) | (outside & ~above & (weights < 0))
        total = float(np.abs(weights).sum())
        found["share_gradient"] = float(np.abs(weights[stopped]).sum()) / total if total else 0.0
    return found


def _carriers(
    batch: TokenBatch, known: _Known, slopes: list[np.ndarray], update: Update, decode: Decoder | None
) -> list[dict[str, Any]]:
    """Return the tokens whose gradient weight the mismatch changes most; without advantages, whose ratio it does.

    ``share`` is of the sum over all tokens.
    """
    sizes = np.where(known.mask, np.abs(update.ratio - 1), 0.0)
    if slopes:
        with np.errstate(invalid="ignore"):
            sizes = np.nan_to_num(np.abs(slopes[0] - slopes[1]), nan=0.0, posinf=np.inf)
    whole, entries = float(sizes.sum()), []
    for at in (at for at in largest(sizes, CARRIERS).tolist() if sizes[at] > 0):
        entry = entry_in_context(batch, at, decode)
        entry |= {"ratio": float(update.ratio[at]), "advantage": None, "slope": None, "slope_recomputed": None}
        if slopes:
            entry |= {"slope": float(slopes[0][at]), "slope_recomputed": float(slopes[1][at])}
            entry["advantage"] = float(known.columns["advantages"][at])
        entry["clipped"] = bool((update.policy.clipped if update.policy else update.outside)[at])
        entries.append(entry | {"share": float(sizes[at]) / whole if whole < np.inf else None})
    return entries


def _difference(left: Any, right: Any) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.subtract(left, right))


def _sentences(known: _Known, section: dict[str, Any]) -> list[str]:
    """Return in words what the figures rest on."""
    scalars, columns, given = section["scalars"], known.columns, known.given
    words = ["Old log-probs are the rollout's (a), recomputed ones the actor's (b)."]
    if np.array_equal(known.a, known.b):
        words.append("They are the same numbers: nothing can come from a mismatch.")
    if "new_log_probs" not in columns:
        words.append("New log-probs were not given and are the actor's: no update has happened yet.")
    if "advantages" not in columns:
        words.append("Without advantages there is no policy loss: what the ratio alone clips is listed.")
    elif not columns["advantages"][known.mask].any():
        words.append("All advantages are zero: nothing moves the policy but the reference penalty.")
    missing = int(np.count_nonzero(~known.mask))
    if missing:
        words.append(
            f"{missing} of {len(known.mask)} tokens lack a number that others have: they are in no figure here."
        )
    if scalars["value_loss"] is not None:
        absent = [name for name in ("values", "old_values") if name not in given]
        words += [f"{absent[0]} were not given: new and old values are the same."] if absent else []
        missing = int(np.count_nonzero(~known.value_mask))
        words += [f"{missing} tokens lack a value or return: they are not in the value loss."] if missing else []
    elif any(name in given for name in ("values", "old_values", "returns")):
        words.append("There is no value loss: it needs values and returns.")
    if scalars["overflows"]:
        words.append(f"{scalars['overflows']} ratios overflow float32: a trainer that does not clamp gets inf or NaN.")
    if scalars["early_stop"]:
        only = " with recomputed log-probs it would run" if not scalars["early_stop_recomputed"] else ""
        limit = f"above early_stop_kl {section['config']['early_stop_kl']:g}"
        words.append(
            f"approx_kl {scalars['approx_kl']:.3g} is {limit}: the loss is multiplied by 0{';' * bool(only)}{only}."
        )
    return words
