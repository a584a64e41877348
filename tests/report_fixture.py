"""Realistic report dictionaries for the tests of the report forms; deterministic, no dump is read."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

from report_blocks import by_probability, corrections, group, no_update, quantiles, update
from report_findings import action, join_layers, located, replay, suspect

Report = dict[str, Any]

#: Token texts that would break out of a page, a terminal, a spreadsheet or a Markdown table.
HOSTILE_TEXTS = (
    "</script><img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "\x1b[31mred\x1b[0m",
    "=HYPERLINK(1)",
    "a|b`c`",
    "{{ 7*7 }}",
    "$$\\frac{1}{2}$$",
    "‮abc",
    "\ud800",
    "</textarea>'\"&amp;",
    "\n",
    "\t ",
)
HOSTILE_NAME = "layers.0.</script><b>|`x`"

_PER_LAYER = (
    ("input_layernorm", "output.0"),
    ("self_attn.q_proj", "output.0"),
    ("self_attn.k_proj", "output.0"),
    ("self_attn.v_proj", "output.0"),
    ("self_attn.rotary_emb", "output.0"),
    ("self_attn.rotary_emb", "output.1"),
    ("self_attn.o_proj", "input.0"),
    ("self_attn.o_proj", "output.0"),
    ("post_attention_layernorm", "output.0"),
    ("mlp.gate_proj", "output.0"),
    ("mlp.up_proj", "output.0"),
    ("mlp.down_proj", "input.0"),
    ("mlp.down_proj", "output.0"),
    ("", "output.0"),
)
_WORDS = (
    " the", " model", " answer", " is", " 42", ",", " because", " we", " add", " both", " sides", ".", "\n", " So",
    " x", " =", " 7", " and", " therefore", " 答案", " naïve", " step", " by", " remaining",
)  # fmt: skip


def tensor_names(layers: int) -> list[tuple[str, str]]:
    """Return canonical (name, slot) keys in execution order."""
    names = [("embed_tokens", "output.0")]
    for index in range(layers):
        names += [(f"layers.{index}.{part}".rstrip("."), slot) for part, slot in _PER_LAYER]
    return [*names, ("norm", "output.0"), ("lm_head", "output.0")]


def _layer(rng: random.Random, order: int, name: str, slot: str, broken_from: int | None) -> dict[str, Any]:
    floor = 1.2e-6 * math.sqrt(1 + order / 4)
    rel_l2 = 0.0 if name == "embed_tokens" else floor * rng.uniform(0.25, 0.7)
    if broken_from is not None and order >= broken_from:
        rel_l2 = 0.31 * rng.uniform(0.5, 1.0) / (1 + 0.02 * (order - broken_from))
    ratio = rel_l2 / floor
    verdict = "identical" if rel_l2 == 0 else "divergent" if ratio > 10 else "suspect" if ratio > 1 else "consistent"
    own = rel_l2 if order == broken_from else floor * 0.3 if rel_l2 else None
    inherited = None if own is None else math.sqrt(max(rel_l2**2 - own**2, 0.0))
    at = {"sequence": "p0.s0", "position": 3 + order % 7, "feature": 12}
    side = {"dtype": "float32", "norm": 12.3 + order}
    return {
        "name": name, "slot": slot, "order": order, "verdict": verdict, "rel_l2": rel_l2, "rmse": rel_l2 * 0.8,
        "max_abs": rel_l2 * 4.1, "max_abs_at": at, "one_minus_cos": rel_l2**2 / 2, "ulp_p50": round(ratio),
        "ulp_p99": round(ratio * 9), "norm_ratio": 1 + rel_l2 / 3, "floor": floor, "ratio": ratio, "own_error": own,
        "inherited_error": inherited, "floor_source": "modelled", "golden": None,
        "side": "b" if order == broken_from else "",
        "worst_row": {"sequence": "p0.s0", "position": at["position"], "rel_l2": rel_l2 * 2},
        "nan_a": 0, "nan_b": 0, "inf_a": 0, "inf_b": 0, "rows": 200, "reason": "",
        "a": {"tensors": [f"model.{name}:{slot}"], **side}, "b": {"tensors": [f"decoder.{name}:{slot}"], **side},
    }  # fmt: skip


def _strip(rng: random.Random, prompt_len: int, length: int, scale: float) -> list[dict[str, Any]]:
    tokens = []
    for position in range(length):
        a = -abs(rng.gauss(0.6, 0.8)) if position else None
        diff = rng.gauss(0, 1) * scale * math.exp(rng.gauss(0, 1.2)) if position else None
        b = None if a is None or diff is None else min(a + diff, 0.0)
        diff = None if a is None or b is None else b - a
        tokens.append(
            {"position": position, "token": rng.randrange(50000), "text": rng.choice(_WORDS),
             "response": position >= prompt_len, "logprob_a": a, "logprob_b": b, "diff": diff}
        )  # fmt: skip
    return tokens


def _sequence(rng: random.Random, name: str, prompt_len: int, length: int, scale: float) -> dict[str, Any]:
    strip = _strip(rng, prompt_len, length, scale)
    diffs = [abs(token["diff"]) for token in strip if token["response"]]
    return {
        "sequence": name, "prompt_len": prompt_len, "length": length,
        "mean_abs": sum(diffs) / len(diffs), "max_abs": max(diffs), "strip": strip,
    }  # fmt: skip


def _tokens(rng: random.Random, sequences: list[dict[str, Any]]) -> dict[str, Any]:
    scored = [(s["sequence"], t) for s in sequences for t in s["strip"] if t["response"]]
    diffs = [abs(token["diff"]) for _, token in scored]
    grouped: dict[int, list[float]] = {}
    for sequence in sequences:
        for token in sequence["strip"][sequence["prompt_len"] :]:
            grouped.setdefault(token["position"] - sequence["prompt_len"], []).append(abs(token["diff"]))
    worst = sorted(scored, key=lambda pair: -abs(pair[1]["diff"]))[:10]
    keys = ("position", "token", "text", "logprob_a", "logprob_b", "diff")
    return {
        "compared": len(scored), "source_a": "engine", "source_b": "recomputed", "text": True,
        "mean_abs_logprob_diff": sum(diffs) / len(diffs), "max_abs_logprob_diff": max(diffs),
        "mean_prob_diff": 0.3 * sum(diffs) / len(diffs), "max_prob_diff": 0.6 * max(diffs), "std_prob_diff": 0.001,
        "pearson": 0.9996, "k1": 1e-5, "k2": 2e-5, "k3": 2.1e-5,
        "by_position": [
            {"position": p, "count": len(v), "mean_abs": sum(v) / len(v), "max_abs": max(v)}
            for p, v in sorted(grouped.items())
        ],
        "worst": [
            {"sequence": name, **{key: token[key] for key in keys}, "prob_diff": group([token])["max_prob_diff"],
             "context": "… we add both" + str(token["text"])}
            for name, token in worst
        ],
        "sequences": sequences, "strip_truncated": 0,
        "quantiles": {"abs_logprob_diff": quantiles(diffs), "prob_diff": quantiles([0.3 * gap for gap in diffs])},
        "by_probability": by_probability([token for _, token in scored]), "corrections": corrections(0.01),
    }  # fmt: skip


def _side(stage: str, engine: str, version: str, tensors: int) -> dict[str, Any]:
    return {
        "path": f"probe-demo/{stage}", "stage": stage, "engine": engine, "engine_version": version,
        "model": "/models/tiny-qwen2", "dtype": "float32", "device": "cpu", "sequences": 6, "prompt_tokens": 50,
        "response_tokens": 192, "tensors": tensors, "complete": True, "prompts_only": False,
    }  # fmt: skip


def _gates(**changed: tuple[str, str]) -> list[dict[str, Any]]:
    details = {
        "tokens": "the same 248 token ids in 6 sequences", "positions": "the same positions",
        "weights": "51 of 51 parameters equal within the rounding of float32",
        "sampling": "temperature 1.0, top-p 1.0, raw log-probs on both sides",
        "config": "no difference that changes the result", "environment": "3 differences, none known to matter",
    }  # fmt: skip
    gates: list[dict[str, Any]] = [
        {"name": name, "status": "pass", "detail": detail, "findings": []} for name, detail in details.items()
    ]
    for gate in gates:
        if gate["name"] in changed:
            gate["status"], gate["detail"] = changed[gate["name"]]
    return gates


def _basis(entries: list[dict[str, Any]], total: int) -> str:
    divergent = sum(entry["verdict"] == "divergent" for entry in entries)
    return f"divergent in {divergent} of {total} tensors" if divergent else f"consistent on {total} tensors"


def _words(headline: str, details: str) -> dict[str, str]:
    return {"headline": headline, "summary": f"{headline.capitalize()}. {details}"}


def make_report(
    *, layers: int = 4, broken: str | None = None, sequences: int = 6, length: int = 41, seed: int = 7
) -> Report:
    """Build a report; ``broken`` names the tensor (canonical name) from which every later one is divergent."""
    rng = random.Random(seed)
    names = tensor_names(layers)
    first = next((i for i, (name, _) in enumerate(names) if name == broken), None) if broken else None
    entries = [_layer(rng, order, name, slot, first) for order, (name, slot) in enumerate(names)]
    scale = 0.12 if broken else 2e-6
    strips = [_sequence(rng, f"p{i // 2}.s{i % 2}", 9, length, scale) for i in range(sequences)]
    report = {
        "schema": 1, "probe": "0.1.0", "created": "2026-03-04T05:06:07+00:00",
        "a": _side("rollout", "vllm", "0.32.0", len(names) - 4), "b": _side("actor", "megatron", "0.16.1", len(names)),
        "verdict": "divergent" if broken else "consistent",
        **_words(
            f"{_basis(entries, len(names))}; 1 norm not comparable (fused)",
            "All compared tensors lie within the noise of float32: the two engines agree, and what differs in the "
            "log-probs is rounding.",
        ),
        "not_compared": ["The last generated token of each sequence never enters the rollout's forward (6 rows)."],
        "gates": _gates(environment=("warn", "torch differs: 2.13.0 against 2.12.1")),
        "coverage": {
            "matched": len(names), "only_a": [],
            "only_b": [{"name": "decoder.layers.0.self_attention.core_attention", "slot": "output.0",
                        "reason": "the rollout runs attention inside one kernel"}],
            "unavailable": [{"name": "layers.0.input_layernorm", "slot": "output.0", "side": "b",
                             "reason": "fused into the next linear layer by Transformer Engine"}],
            "auxiliary_a": [{"name": f"model.layers.{i}.self_attn.attn", "slot": "output.0",
                             "reason": "the same tensor as o_proj input.0"} for i in range(layers)],
            "auxiliary_b": [],
            "rows": {"joined": 242, "a": {}, "b": {"not_executed": 6, "prefix_cache": 16},
                     "recomputed": {"a": {"rows": 0, "differing": 0}, "b": {"rows": 0, "differing": 0}}},
            "fewer_rows": [{"name": "lm_head", "slot": "output.0", "rows": 192, "missing": 50, "lacking_a": 50,
                            "lacking_b": 0}],
            "shares": {"tensors": 0.98, "rows": 1.0, "asked": 0.9},
        },
        "layers": entries, "first_divergence": None, "moe": None,
        "located": located(rng, entries, first), "replay": replay(rng, entries, first),
        "suspects": [], "tokens": _tokens(rng, strips),
        "ppo": update(strips),
        "environment": [
            {"key": "torch", "a": "2.13.0", "b": "2.12.1", "severity": "warn"},
            {"key": "python", "a": "3.11.7", "b": "3.11.7", "severity": "info"},
            {"key": "env.VLLM_USE_V1", "a": "1", "b": None, "severity": "info"},
        ],
        "backends": {"a": {"attention": "CPU_ATTN", "moe": None, "kv_cache": "auto"},
                     "b": {"attention": "local core attention", "moe": None, "kv_cache": None}},
        "action": action(bool(broken)),
        "next_commands": ["probe show probe-demo/rollout", "probe show probe-demo/actor"],
    }  # fmt: skip
    join_layers(report)
    return _mark_broken(report, names[first]) if first is not None else report


def _mark_broken(report: Report, key: tuple[str, str]) -> Report:
    name, slot = key
    report["first_divergence"] = {"name": name, "slot": slot, "position": 3, "sequence": "p0.s0"}
    report |= _words(
        report["headline"],
        f"The runs part at {name} ({slot}), first at position 3 of p0.s0: relative L2 error 0.2 against a noise floor "
        "of 2e-06. Everything before it is consistent and the weights are equal, so look at the configuration and the "
        "kernel of this module.",
    )
    report["suspects"] = [suspect(name)]
    report["next_commands"] = [f"probe show probe-demo/{stage} {name}" for stage in ("rollout", "actor")]
    return report


def consistent() -> Report:
    """A healthy pair of a 4-layer model."""
    return make_report()


def divergent() -> Report:
    """A 4-layer model that parts at the rotary embedding of layer 1."""
    return make_report(broken="layers.1.self_attn.rotary_emb")


def identical() -> Report:
    """Two runs with the same bits."""
    report = make_report()
    for layer in report["layers"]:
        layer.update(verdict="identical", rel_l2=0.0, rmse=0.0, max_abs=0.0, one_minus_cos=0.0, ratio=0.0)
    for entry in report["tokens"]["by_position"]:
        entry.update(mean_abs=0.0, max_abs=0.0)
    for token in report["tokens"]["worst"]:
        token.update(logprob_b=token["logprob_a"], diff=0.0)
    report["tokens"].update(mean_abs_logprob_diff=0.0, max_abs_logprob_diff=0.0, k1=-0.0)
    return report


def weights_failed() -> Report:
    """A divergent pair whose weights gate failed, with missing and incomparable modules and non-finite values."""
    report = make_report(broken="layers.2.mlp.down_proj")
    text = "layers.2.mlp.down_proj.weight is stale on side b"
    report["gates"] = _gates(weights=("fail", text))
    finding = {"cause": "stale-weights", "subject": "layers.2.mlp.down_proj.weight", "side": "b", "text": text}
    report["gates"][2]["findings"] = [finding | {"figures": {"parameters": 1}}]
    report["suspects"][0].update(name="layers.2.mlp.down_proj", cause="stale-weights")
    report["replay"].update(modules=[], why_not={"a": "the checkpoint is not at hand", "b": "its weights are stale"})
    report["layers"][-1].update(verdict="missing", rel_l2=None, floor=None, ratio=None, a=None, max_abs_at=None)
    report["layers"][-2].update(
        verdict="incomparable", rel_l2=float("nan"), ratio=float("inf"), nan_b=17, reason="not finite on side b"
    )
    return report


def incomparable() -> Report:
    """Two dumps without a common token: nothing was measured."""
    report = empty()
    report["verdict"] = "incomparable"
    report |= _words("incomparable: nothing was compared", "The two dumps share no token sequence.")
    report["not_compared"] = ["every tensor: no common sequence", "log-probs: no common sequence"]
    report["gates"] = _gates(tokens=("fail", "0 of 6 sequences agree"), weights=("skipped", "no sketch on side a"))
    return report


def empty() -> Report:
    """A report in which every section that may be empty is."""
    report = make_report(layers=1, sequences=1)
    report.update(not_compared=[], layers=[], environment=[], next_commands=[], first_divergence=None)
    report["tokens"] = {"compared": 0, "text": False, "by_position": [], "worst": [], "sequences": []}
    report["ppo"] = no_update()
    report["coverage"] = {"matched": 0, "only_a": [], "only_b": [], "unavailable": []}
    report["backends"] = {"a": {}, "b": {}}
    report["located"] = located(random.Random(1), [], None)
    report["replay"] = {"weights": {}, "why_not": {"a": "no tensor is stored", "b": "no tensor is stored"}}
    report["replay"] |= {"modules": [], "skipped": []}
    report["action"]["figures"] = []
    return report


def hostile() -> Report:
    """A divergent report whose names and token texts try to escape from every form."""
    report = divergent()
    report["layers"][5]["name"] = HOSTILE_NAME
    report["summary"] += HOSTILE_TEXTS[0]
    report["next_commands"].append("probe show '" + HOSTILE_TEXTS[0] + "'")
    report["a"]["path"] = HOSTILE_TEXTS[0]
    report["suspects"][0].update(
        name=HOSTILE_NAME, evidence=[text for text in HOSTILE_TEXTS if text[0] != "="], next_check=HOSTILE_TEXTS[0]
    )
    report["action"]["text"] = HOSTILE_TEXTS[0]
    report["located"]["heat"]["tokens"][0]["sequence"] = HOSTILE_TEXTS[0]
    report["located"]["rows"][0]["name"] = report["replay"]["modules"][3]["name"] = HOSTILE_NAME
    report["replay"]["why_not"] = {"a": HOSTILE_TEXTS[0]}
    report["environment"].append({"key": HOSTILE_TEXTS[0], "a": "x", "b": HOSTILE_TEXTS[2], "severity": "warn"})
    for sequence in report["tokens"]["sequences"]:
        for token, text in zip(sequence["strip"][9:], HOSTILE_TEXTS):
            token["text"] = text
    for token, text in zip(report["tokens"]["worst"], HOSTILE_TEXTS):
        token.update(text=text, context=text * 2)
    return report


def large() -> Report:
    """64 layers, 70 sequences of which one has 2000 tokens."""
    report = make_report(layers=64, broken="layers.40.self_attn.o_proj", sequences=70, length=600)
    longest = _sequence(random.Random(3), "long.s0", 100, 2000, 0.3)
    report["tokens"]["sequences"].append(longest)
    report["located"] = located(random.Random(4), report["layers"], 40 * len(_PER_LAYER) + 8, 400)
    for row, token in zip(report["located"]["heat"]["tokens"], report["tokens"]["worst"]):
        row.update(sequence=token["sequence"], position=token["position"] - 1)
    join_layers(report)
    return report


def huge() -> Report:
    """More modules and more text than a page may hold."""
    report = large()
    template = report["layers"][-1]
    start = len(report["layers"])
    report["layers"] += [
        {**copy.deepcopy(template), "name": f"experts.{i}.a_rather_long_name_for_a_projection", "order": start + i}
        for i in range(6000)
    ]
    for sequence in report["tokens"]["sequences"]:
        for token in sequence["strip"]:
            token["text"] = "答案" * 40
    return report
