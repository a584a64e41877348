"""The environment gate: differences in what the two runs ran on, those that can change numbers first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from probe.compare.gates import SHOWN, Gate, GateFinding
from probe.store.reader import Dump
from probe.switches import SETTINGS, SWITCHES, reason, repeatable

RANKS: tuple[tuple[str, str], ...] = (
    (r"dtype|device", "the model ran in another dtype or on another device"),
    (r"env\.(?:HCCL|LCCL|ATB|CLOSE_MATMUL|NCCL_ALGO|CUBLAS_WORKSPACE|NVTE_ALLOW|FLASH_ATTENTION)\w*", ""),
    (r"env\.(?:VLLM_BATCH_INVARIANT|VLLM_ASCEND_ENABLE_NZ|INF_NAN)\w*|torch\..*|npu\..*|.*tf32|.*deterministic.*", ""),
    (r"vllm.*|megatron[_-]core|transformers|transformer[_-]engine|mindspeed|flash[_-]attn|triton", "another engine"),
    (r"torch|torch[_-]npu|cuda|cudnn|cann|driver|gpu|soc", "another framework, driver or chip"),
    (r"topology\..*", "sums over ranks are made in another order"),
    (r"env\.(?:VLLM|NVTE|NCCL|HCCL|CUDA|NVIDIA|TORCH|PYTORCH|ASCEND|ACL|MKL|ONEDNN|TASK|VERL)\w*|matmul.*", ""),
)
"""What can change numbers, the most likely first: a regular expression on an environment entry's key, and why (switches
say it themselves). Entries that match none are listed and not warned about."""

DEVICES = {"cpu", "cuda", "npu"}
LISTED_ONLY = re.compile(r"topology\..*|env\.(?:CUDA_VISIBLE_DEVICES|ASCEND_RT_VISIBLE_DEVICES|VLLM_ENABLE_V1\w*)")
"""Entries that differ between healthy runs on purpose: they keep their rank in the list and do not warn."""


def rank_of(key: str) -> int:
    """Return the place of an environment entry in the ranking, len(RANKS) for one that changes no numbers."""
    return next((n for n, (known, _) in enumerate(RANKS) if re.fullmatch(known, key, re.IGNORECASE)), len(RANKS))


def environment_entries(a: Dump, b: Dump) -> list[dict[str, Any]]:
    """Return every known fact about both runs, ranked; differences that can change numbers have severity ``warn``.

    A fact that only one side states counts between runs of one engine; another engine has switches of its own, but
    those of the device are for both.
    """
    facts = [_environment(dump) for dump in (a, b)]
    devices = {str(dump.manifest.get("device")) for dump in (a, b)}
    entries = []
    for key in {**facts[0], **facts[1]}:
        left, right = facts[0].get(key), facts[1].get(key)
        comparable = a.engine == b.engine or None not in (left, right) or _of_both(key, devices)
        differs = comparable and not _alike(key, left, right)
        warn = differs and rank_of(key) < len(RANKS) and LISTED_ONLY.fullmatch(key) is None and not _idle(key, devices)
        entries.append({"key": key, "a": left, "b": right, "severity": "warn" if warn else "info"})
    return sorted(entries, key=lambda e: (e["severity"] != "warn", e["a"] == e["b"], rank_of(e["key"])))


def _idle(key: str, devices: set[str]) -> bool:
    """Tell whether a framework's setting, which has a value everywhere, acts on a device that neither side ran on."""
    setting = SETTINGS.get(key)
    return setting is not None and devices <= DEVICES and setting.device not in ("any", *devices)


def _of_both(key: str, devices: set[str]) -> bool:
    """Tell whether a switch is the device's, so that it acts on both engines that run on that device."""
    switch = SWITCHES.get(key.removeprefix("env."))
    return switch is not None and devices == {switch.device}


def _alike(key: str, left: str | None, right: str | None) -> bool:
    """Tell whether two values mean the same: letter case does not matter, nor which of the repeatable values it is."""
    if left is None or right is None:
        return left == right
    good = [value.lower() for value in repeatable(key)]
    return left.lower() == right.lower() or (left.lower() in good and right.lower() in good)


def _environment(dump: Dump) -> dict[str, str | None]:
    engine = dump.manifest.get("engine") or {}
    facts: dict[str, Any] = {name: dump.manifest.get(name) for name in ("dtype", "device")}
    facts |= {str(engine.get("name") or "engine"): engine.get("version")} if engine else {}
    facts |= {f"topology.{key}": value for key, value in (dump.manifest.get("topology") or {}).items()}
    facts |= dump.manifest.get("environment") or {}
    return {key: None if value is None else str(value) for key, value in facts.items()}


def environment_gate(entries: Sequence[Mapping[str, Any]]) -> Gate:
    """Warn about differences that can change numbers, the likeliest first."""
    relevant = [entry for entry in entries if entry["severity"] == "warn"]
    if not relevant:
        return Gate("environment", "pass", "nothing that is known to change numbers differs")
    findings = tuple(_finding(entry) for entry in relevant)
    more = f" and {len(findings) - SHOWN} more" if len(findings) > SHOWN else ""
    return Gate("environment", "warn", "; ".join(f.text for f in findings[:SHOWN]) + more, findings)


def _finding(entry: Mapping[str, Any]) -> GateFinding:
    key, left, right = (entry[name] for name in ("key", "a", "b"))
    why = reason(key) or RANKS[rank_of(key)][1]
    good = [value.lower() for value in repeatable(key)]
    fits = [str(value).lower() in good for value in (left, right)]
    side = {(True, False): "b", (False, True): "a"}.get((fits[0], fits[1]), "unknown")
    text = f"{key} is {left} in a, {right} in b"
    advice = f"; {' or '.join(repeatable(key))} makes runs repeatable" if good else ""
    figures: dict[str, float | int | str] = {"rank": rank_of(key), "a": str(left), "b": str(right)}
    return GateFinding("environment", key, side, f"{text}{f' ({why}{advice})' if why else ''}", figures)
