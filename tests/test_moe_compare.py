"""Dumps of a model with experts: flips that rounding explains, flips that it does not, and faults beside them.

The tensors are made by hand under transformers' names, so that a flip's effect on its token and on later ones is known.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dump_tools import MANIFEST, open_rank, segment

from probe.compare.match import Entry, Matching, match_tensors
from probe.compare.moe.experts import excuse_idle
from probe.compare.moe.flips import ALIKE, OWN
from probe.compare.moe.restrict import WORDS
from probe.compare.moe.routing import RoutingRule, margin, route
from probe.compare.report import markdown, terminal
from probe.compare.report.html import render as render_html
from probe.compare.report.model import validate
from probe.compare.run import compare_dumps
from probe.compare.side import read_sides
from probe.store.reader import open_dump
from probe.store.schema import ROW, ModuleInfo, RowSegment, Sequence
from probe.store.writer import DumpWriter

LENGTHS, EXPERTS, LAYERS, HIDDEN = (6, 9, 5), 8, 2, 32
RULE = RoutingRule(2, True)
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 100,
}
NOISE = 2e-7
"""Relative error of a healthy fp32 tensor."""
FLIPPED = (1, 3)
"""The sequence and position of the token that the tests flip in layer 0."""
LABELS = ("input_layernorm:output.0", "self_attn.o_proj:input.0", "self_attn.o_proj:output.0",
          "post_attention_layernorm:output.0", "mlp.gate:output.0", "mlp.gate:output.1", "mlp.gate:output.2",
          "mlp.experts:output.0", "mlp:output.0", ":output.0")  # fmt: skip


def rows() -> np.ndarray:
    """Return the row table of all sequences, one after the other."""
    table = np.zeros(sum(LENGTHS), ROW)
    table["sequence"] = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    table["position"] = np.concatenate([np.arange(length) for length in LENGTHS])
    table["token"] = 10 * table["sequence"] + table["position"]
    return table


def row_of(sequence: int, position: int) -> int:
    """Return the row of a token."""
    return int(np.flatnonzero((rows()["sequence"] == sequence) & (rows()["position"] == position))[0])


def model_tensors() -> dict[str, np.ndarray]:
    """Return the reference side's tensors by label; the token of :data:`FLIPPED` is nearly a tie in layer 0."""
    rng, tensors = np.random.default_rng(4), {}
    count = sum(LENGTHS)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for label in LABELS:
            name = f"{at}.{label}" if not label.startswith(":") else f"{at}{label}"
            tensors[name] = rng.normal(size=(count, HIDDEN)).astype(np.float32)
        logits = rng.normal(size=(count, EXPERTS)).astype(np.float32)
        if layer == 0:
            order = np.argsort(-logits[row_of(*FLIPPED)])
            logits[row_of(*FLIPPED), order[2]] = logits[row_of(*FLIPPED), order[1]] - np.float32(1e-7)
        _set_routing(tensors, layer, logits)
    return tensors


def _set_routing(tensors: dict[str, np.ndarray], layer: int, logits: np.ndarray) -> None:
    ids, weights = route(logits, RULE)
    gate = f"model.layers.{layer}.mlp.gate"
    tensors |= {f"{gate}:output.0": logits, f"{gate}:output.1": weights, f"{gate}:output.2": ids.astype(np.int64)}


def noisy(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a healthy other side: rounding noise everywhere, and the routing that follows from the noisy logits."""
    rng = np.random.default_rng(9)
    other = {
        label: (values * (1 + NOISE * rng.normal(size=values.shape))).astype(values.dtype)
        for label, values in tensors.items()
    }
    for layer in range(LAYERS):
        label = f"model.layers.{layer}.mlp.gate:output.0"
        tied = margin(tensors[label], RULE.top_k) < 1e-6  # noise must not flip what the test flips itself
        other[label][tied] = tensors[label][tied]
        _set_routing(other, layer, other[label])
    return other


def swap_tie(tensors: dict[str, np.ndarray], *tokens: tuple[int, int]) -> None:
    """Move the second and third logit of tokens past each other in layer 0 by no more than rounding could."""
    logits = tensors["model.layers.0.mlp.gate:output.0"].copy()
    for token in tokens or (FLIPPED,):
        order = np.argsort(-logits[row_of(*token)])
        second, third = order[1], order[2]
        logits[row_of(*token), [second, third]] = logits[row_of(*token), [third, second]]
    _set_routing(tensors, 0, logits)


def spread_flips(tensors: dict[str, np.ndarray], *tokens: tuple[int, int], size: float = 0.5) -> None:
    """Give flipped tokens other values from layer 0's experts on, and tokens behind them from the next attention on."""
    rng, table = np.random.default_rng(3), rows()
    behind = np.zeros(len(table), bool)
    own = np.zeros(len(table), bool)
    for sequence, position in tokens or (FLIPPED,):
        own[row_of(sequence, position)] = True
        behind |= (table["sequence"] == sequence) & (table["position"] > position)
    for label in tensors:
        layer, late = int(label.split(".")[2].partition(":")[0]), "mlp.gate" not in label
        first = layer == 0 and ("mlp.experts" in label or "mlp:" in label or label == "model.layers.0:output.0")
        reached = own.copy() if first or layer > 0 else np.zeros(len(table), bool)
        attended = layer > 0 and "input_layernorm" not in label
        reached |= behind & attended
        if late and reached.any():
            tensors[label][reached] += size * rng.normal(size=(int(reached.sum()), HIDDEN)).astype(np.float32)


def write(folder: Path, tensors: dict[str, np.ndarray], left_out: tuple[str, ...] = (), replayed: bool = False) -> Path:
    """Write one side's dump and return its folder."""
    manifest = {**MANIFEST, "dtype": "float32", "engine": {"name": "transformers", "version": "5"}, "stage": "rollout"}
    manifest["model"] = {"config": CONFIG, "architecture": "Qwen3MoeForCausalLM", "path": ""}
    writer = DumpWriter(folder / "rollout" / "step0" / "rank0.h5", manifest)
    for number, length in enumerate(LENGTHS):
        writer.add_sequence(Sequence(0, uid=f"s{number}", prompt_len=length, length=length))
    for label, values in tensors.items():
        module, _, slot = label.rpartition(":")
        if not label.endswith(left_out or ("nothing",)):
            writer.append(module, slot, values, str(values.dtype), RowSegment(rows()))
    for layer in range(LAYERS if replayed else 0):
        writer.add_module(ModuleInfo(f"model.layers.{layer}.mlp.gate", "Router", layer, {"routing_replayed": True}))
    writer.close()
    return folder / "rollout"


def compare(tmp_path: Path, a: dict[str, np.ndarray], b: dict[str, np.ndarray], left_out: tuple[str, ...] = ()):
    """Return the report of two sides, of which b lacks the labels that end in ``left_out``, and its layers by label."""
    paths = [write(tmp_path / "a", a), write(tmp_path / "b", b, left_out)]
    report = compare_dumps(*paths)
    validate(report)
    return report, {f"{layer['name']}:{layer['slot']}": layer for layer in report["layers"]}


def test_without_flips_every_choice_is_the_same_set(tmp_path):
    a = model_tensors()
    report, layers = compare(tmp_path, a, noisy(a))
    moe = report["moe"]
    assert report["verdict"] == "consistent"
    assert (moe["exact_set_rate"], moe["overlap"], moe["flip_rate"], moe["flips"]) == (1.0, 1.0, 0.0, 0)
    assert layers["layers.0.mlp.router:ids"]["verdict"] == "identical"
    assert all(layer["restricted"] is None for layer in report["layers"])
    assert moe["ids"] == {"a": "used", "b": "used"}
    assert sum(moe["layers"][0]["load"]["a"]) == 2 * sum(LENGTHS)


def test_a_flip_that_rounding_explains_accuses_no_module(tmp_path):
    a = model_tensors()
    b = noisy(a)
    swap_tie(b)
    spread_flips(b)
    report, layers = compare(tmp_path, a, b)
    assert report["verdict"] == "consistent", report["summary"]
    moe = report["moe"]
    assert (moe["flips"], moe["unexplained"]) == (1, 0)
    assert moe["flip_rate"] == 1 / sum(LENGTHS)
    assert [(f["sequence"], f["position"], f["layer"]) for f in moe["first_flips"]] == [("s1", 3, 0)]
    assert moe["first_flips"][0]["explained"]
    assert moe["layers"][0]["margin"]["a"]["max"] < 1e-6 < moe["layers"][0]["margin_all"]["a"]["median"]
    # in its layer only the token itself counts as reached, from the next attention on those behind it too
    experts, attention = layers["layers.0.mlp.experts:output.0"], layers["layers.1.self_attn.o_proj:input.0"]
    assert experts["restricted"]["rows"] == layers["layers.1.input_layernorm:output.0"]["restricted"]["rows"] == 19
    assert attention["restricted"]["rows"] == 20 - (9 - 3)
    assert experts["rel_l2"] > 1e-2 > 1e-5 > experts["restricted"]["rel_l2"]
    assert "no other choice of experts has reached" in experts["reason"]
    assert layers["layers.0.self_attn.o_proj:input.0"]["restricted"] is None


@pytest.mark.parametrize("label", ["layers.0.mlp.experts:output.0", "layers.1.self_attn.o_proj:output.0"])
def test_a_fault_beside_a_flip_is_found(tmp_path, label):
    a = model_tensors()
    b = noisy(a)
    swap_tie(b)
    spread_flips(b)
    b[f"model.{label}"] *= np.float32(1.001)
    report, _ = compare(tmp_path, a, b)
    assert report["verdict"] == "divergent"
    assert f"{report['first_divergence']['name']}:{report['first_divergence']['slot']}" == label
    sequence, position = report["first_divergence"]["sequence"], report["first_divergence"]["position"]
    assert (sequence, position) != ("s1", 3)


def test_ids_that_do_not_follow_from_the_logits_are_a_fault_of_the_router(tmp_path):
    a = model_tensors()
    b = noisy(a)
    ids = b["model.layers.0.mlp.gate:output.2"]
    ids[4, 1] = next(e for e in range(EXPERTS) if e not in ids[4])
    spread_flips(b)
    report, layers = compare(tmp_path, a, b)
    assert report["verdict"] == "divergent"
    entry = layers["layers.0.mlp.router:ids"]
    assert entry["verdict"] == "divergent"
    assert "side b: other experts than its own logits choose, not by rounding, at position 4" in entry["reason"]
    assert report["first_divergence"] == {
        "name": "layers.0.mlp.router", "slot": "ids", "position": 4, "sequence": "s0",
    }  # fmt: skip
    assert report["moe"]["unexplained"] == 1
    assert layers["layers.0.mlp.experts:output.0"]["restricted"] is None


def test_scaled_router_is_a_fault_and_its_flips_are_not_excused(tmp_path):
    a = model_tensors()
    b = noisy(a)
    _set_routing(b, 0, b["model.layers.0.mlp.gate:output.0"] + np.linspace(0, 2, EXPERTS, dtype=np.float32))
    report, layers = compare(tmp_path, a, b)
    assert report["first_divergence"]["name"] == "layers.0.mlp.router"
    assert report["first_divergence"]["slot"] == "output.0"
    assert layers["layers.0.mlp.router:ids"]["verdict"] == "divergent"


def test_other_weights_for_the_same_experts_are_a_fault(tmp_path):
    a = model_tensors()
    b = noisy(a)
    b["model.layers.1.mlp.gate:output.1"] *= np.float32(0.9)
    report, layers = compare(tmp_path, a, b)
    assert report["first_divergence"]["name"] == "layers.1.mlp.router"
    assert report["first_divergence"]["slot"] == "weights"
    assert layers["layers.1.mlp.router:ids"]["verdict"] == "identical"
    assert report["moe"]["layers"][1]["weights_l1"] == pytest.approx(0.1, rel=1e-3)


def test_replayed_ids_must_be_those_of_the_other_side(tmp_path):
    a = model_tensors()
    b = noisy(a)
    swap_tie(b)
    report = compare_dumps(write(tmp_path / "a", a), write(tmp_path / "b", b, replayed=True))
    assert report["verdict"] == "divergent"
    assert report["first_divergence"]["slot"] == "ids"
    entry = next(layer for layer in report["layers"] if layer["slot"] == "ids")
    assert "although b replayed recorded ids" in entry["reason"]
    assert report["moe"]["layers"][0]["replayed"] == {"a": False, "b": True}
    report = compare_dumps(write(tmp_path / "c", a), write(tmp_path / "d", noisy(a), replayed=True))
    assert report["verdict"] == "consistent"


def test_order_of_the_ids_does_not_matter(tmp_path):
    a = model_tensors()
    b = noisy(a)
    for layer in range(LAYERS):
        for slot in (1, 2):
            label = f"model.layers.{layer}.mlp.gate:output.{slot}"
            b[label] = b[label][:, ::-1].copy()
    report, layers = compare(tmp_path, a, b)
    assert report["verdict"] == "consistent"
    assert report["moe"]["exact_set_rate"] == 1
    assert layers["layers.0.mlp.router:weights"]["rel_l2"] < 1e-5


def test_ids_are_derived_where_a_side_recorded_none(tmp_path):
    a = model_tensors()
    report, layers = compare(tmp_path, a, noisy(a), ("gate:output.1", "gate:output.2"))
    assert report["moe"]["ids"] == {"a": "used", "b": "derived"}
    assert report["moe"]["exact_set_rate"] == 1
    assert "recomputed in b from layers.0.mlp.gate:output.0" in layers["layers.0.mlp.router:ids"]["reason"]
    assert report["coverage"]["only_a"] == []


def test_tokens_that_attend_to_flipped_ones_are_judged_by_what_is_usual_for_them(tmp_path):
    # the first token of every sequence is flipped: from the next attention on no token is untouched
    tokens = tuple((sequence, 0) for sequence in range(len(LENGTHS)))
    a = model_tensors()
    for token in tokens:
        logits = a["model.layers.0.mlp.gate:output.0"]
        order = np.argsort(-logits[row_of(*token)])
        logits[row_of(*token), order[2]] = logits[row_of(*token), order[1]] - np.float32(1e-7)
    _set_routing(a, 0, a["model.layers.0.mlp.gate:output.0"])
    b = noisy(a)
    swap_tie(b, *tokens)
    spread_flips(b, *tokens, size=1e-3)
    report, layers = compare(tmp_path, a, b)
    assert report["verdict"] != "divergent"
    words = {layer["restricted"]["tokens"] for layer in report["layers"] if layer["restricted"]}
    assert words == {WORDS[ALIKE], WORDS[OWN]}
    assert layers["layers.1.mlp:output.0"]["verdict"] in ("consistent", "incomparable")
    b["model.layers.1.mlp:output.0"] *= np.float32(1.5)
    _, layers = compare(tmp_path / "broken", a, b)
    assert layers["layers.1.mlp:output.0"]["verdict"] == "divergent"


def test_every_form_shows_the_experts(tmp_path):
    from rich.console import Console

    a = model_tensors()
    b = noisy(a)
    swap_tie(b)
    spread_flips(b)
    report, _ = compare(tmp_path, a, b)
    console = Console(record=True, width=120, force_terminal=False)
    terminal.render(report, console)
    for text in (console.export_text(), markdown.render(report), render_html(report)):
        assert "use another expert in some layer" in text
    assert 'id="experts"' in render_html(report)
    report["moe"] = None
    validate(report)
    assert 'id="experts"' not in render_html(report)


def test_an_expert_without_tokens_on_one_side_is_not_missing_there():
    matching, label = Matching(), "layers.0.mlp.experts.{}.gate_proj:output.0"
    matching.only_a = [Entry(label.format(2), "b stored nothing that gives it"), Entry(label.format(1), "as well")]
    matching.only_b = [Entry(label.format(3), "a stored nothing that gives it")]
    served = np.array([[True, True, False, False]])
    routing = SimpleNamespace(layers={0: SimpleNamespace(sets_a=~served, sets_b=served)})
    excuse_idle(matching, routing)
    assert [entry.label for entry in matching.only_a] == [label.format(1)]  # it served tokens in b, but is not stored
    assert [entry.label for entry in matching.only_b] == [label.format(3)]  # as does this one in a
    found = [(entry.side, entry.reason) for entry in matching.unavailable]
    assert found == [("b", "expert 2 of layer 0 served no token there")]


@pytest.mark.parametrize("held", [(), (0,)], ids=["fused kernel", "a rank lost"])
def test_an_expert_that_a_lost_rank_held_is_not_excused_as_fused(tmp_path: Path, held: tuple[int, ...]) -> None:
    """The engine's way excuses a side that shows no single expert, never one that shows some of them."""
    sides = []
    for name, experts in (("a", (0, 1)), ("b", held)):
        manifest = {"engine": {"name": "megatron", "version": "0"}, "driver": True}
        writer = open_rank(tmp_path / name, manifest=manifest)
        writer.append("decoder.layers.0", "output.0", np.ones((4, 8), np.float32), "float32", segment(4))
        for expert in experts:
            module = f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc2"
            writer.append(module, "output.0", np.ones((4, 8), np.float32), "float32", segment(4))
        writer.close()
        sides.append(open_dump(tmp_path / name))
    with sides[0], sides[1]:
        matching = match_tensors(*read_sides(*sides))
    label = "layers.0.mlp.experts.1.down_proj:output.0"
    lone = {entry.label: entry.reason for entry in matching.only_a}
    excused = {entry.label: entry.reason for entry in matching.unavailable}
    assert (label in lone, label in excused) == (bool(held), not held)
    if held:
        assert "driver.h5 is missing" in lone[label]
