"""Models inside wrappers: hooks fire once per real forward, and names come out as without the wrapper."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from capture_tools import by_row, captured, hook_count
from checkpoints import make_checkpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from probe.errors import CaptureError
from probe.hooks.debugger import PrecisionDebugger
from probe.hooks.engines.base import EngineAdapter
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.weights import named_sketches
from probe.hooks.wrappers import entries, unwrap
from probe.store.reader import open_dump

IDS = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15]]


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    """A tiny Qwen2 checkpoint with tied embeddings."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def model(checkpoint_folder):
    """The checkpoint on transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint_folder, dtype=torch.float32, attn_implementation="eager")


def run(model, rows=None):
    return model(input_ids=torch.tensor(IDS), use_cache=False)


def plain(folder, model):
    return captured(folder, model, functools.partial(run, model))


def assert_same_dump(found, expected, *, but=()):
    """Compare two dumps tensor by tensor, bit for bit."""
    names = {key for key in found.tensors if key[0] not in but and not key[1].startswith("kwargs")}
    assert names >= {key for key in expected.tensors if key[0] not in but and not key[1].startswith("kwargs")}
    for key in expected.tensors:
        if key in names:
            assert np.array_equal(found.rows(*key)["position"], expected.rows(*key)["position"]), key
            assert found.read_raw(*key).tobytes() == expected.read_raw(*key).tobytes(), key


# -- recomputed forwards -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer whose forward is recomputed in backward."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.norm, self.how = nn.Linear(6, 6), nn.LayerNorm(6), how

    def work(self, x):
        return x + self.norm(self.linear(x)).tanh()

    def forward(self, x):
        return self.work(x) if self.how is None else checkpoint(self.work, x, **self.how)


class Stack(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self, how=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 6), nn.Linear(6, 32)
        self.layers = nn.ModuleList([Block(how) for _ in range(2)])

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model, rows):
    """Run three micro-batches as a pipeline does: a backward only after further forwards have begun and ended."""
    with torch.enable_grad():
        waiting = [model(torch.tensor(ids)[None]) for ids in ([1, 2, 3], [4, 5])]
        waiting[0].square().mean().backward()
        waiting.append(model(torch.tensor([[6, 7, 8, 9]])))
        for logits in waiting[1:]:
            logits.square().mean().backward()


HOW = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "without early stop": {"use_reentrant": False, "early_stop": False},
}


@pytest.mark.parametrize("how", HOW)
def test_recomputed_forwards_are_not_dumped(tmp_path, how):
    checkpointed, model = Stack(HOW[how]), Stack()
    ran = []
    checkpointed.layers[0].linear.register_forward_hook(lambda *_: ran.append(1))
    found = captured(tmp_path / "a", checkpointed, functools.partial(train, checkpointed))
    expected = captured(tmp_path / "b", model, functools.partial(train, model))
    assert len(ran) == 6  # three forwards and three recomputations of them
    assert_same_dump(found, expected)
    assert [name for name in found.modules if "#" in name] == []
    for one, other in zip(checkpointed.parameters(), model.parameters()):
        assert torch.equal(one.grad, other.grad)
    assert hook_count(checkpointed) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_hugging_face_gradient_checkpointing(tmp_path, model, reentrant):
    def step(rows):
        with torch.enable_grad():
            run(model).logits.square().mean().backward()
            run(model).logits.square().mean().backward()

    model.train()  # no dropout in this family: train() only lets the checkpointing act
    expected = captured(tmp_path / "plain", model, step)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = captured(tmp_path / "checkpointed", model, step)
    assert len(expected.read("model.layers.1.mlp.down_proj", "output.0")) == 20
    assert_same_dump(found, expected)


@pytest.mark.parametrize("impl", list(CheckpointImpl))
def test_checkpoint_wrappers_leave_no_name(tmp_path, model, impl):
    def step(rows):
        with torch.enable_grad():
            run(model).logits.square().mean().backward()

    expected = captured(tmp_path / "plain", model, step)
    weights = {s.name: s.alias for s in named_sketches(model, BatchAdapter(SequenceBook(None)))}
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer, checkpoint_impl=impl)
    found = captured(tmp_path / "wrapped", model, step)
    assert list(found.modules) == list(expected.modules)
    assert_same_dump(found, expected)
    assert {s.name: s.alias for s in named_sketches(model, BatchAdapter(SequenceBook(None)))} == weights
    assert weights["lm_head.weight"] == "model.embed_tokens.weight"


# -- around the model --------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group():
    """A gloo group of this one process; a test of Megatron may have left one."""
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_in_one_process(tmp_path, model, process_group):
    expected = plain(tmp_path / "plain", model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert unwrap(wrapped) is model and entries(wrapped) == [model]
    with PrecisionDebugger(enabled=True, dump_path=str(tmp_path / "d")).start(wrapped):
        run(wrapped).logits.sum().backward()
    with open_dump(tmp_path / "d") as found:
        assert found.engine == "transformers" and found.complete
        assert found.weights.keys() == {name for name, _ in model.named_parameters(remove_duplicate=False)}
        assert [s.uid for s in found.sequences] == ["s0", "s1"]
        assert_same_dump(found, expected)
    assert hook_count(wrapped) == 0


def test_data_parallel_and_nested_wrappers(tmp_path, model):
    wrapped = nn.DataParallel(checkpoint_wrapper(model))
    assert unwrap(wrapped) is model
    assert_same_dump(captured(tmp_path / "a", wrapped, functools.partial(run, wrapped)), plain(tmp_path / "b", model))


# -- PEFT --------------------------------------------------------------------------------------------------------------


class PeftLinear(nn.Module):
    """Double of peft.tuners.lora.Linear (peft 0.21): the adapted layer in ``base_layer``, adapters in ModuleDicts."""

    def __init__(self, base_layer, rank=4):
        super().__init__()
        self.base_layer = base_layer
        sizes = {"lora_A": (base_layer.in_features, rank), "lora_B": (rank, base_layer.out_features)}
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        for name, (columns, out) in sizes.items():
            setattr(self, name, nn.ModuleDict({"default": nn.Linear(columns, out, bias=False)}))

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))


class PeftTuner(nn.Module):
    """Double of peft.tuners.lora.LoraModel: runs the model's ``forward`` itself, past the model's own hooks."""

    def __init__(self, model):
        super().__init__()
        self.model, self.peft_config = model, {"default": None}
        for layer in model.model.layers:
            layer.self_attn.q_proj = PeftLinear(layer.self_attn.q_proj)
        model.peft_config = self.peft_config

    def forward(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)


class PeftModel(nn.Module):
    """Double of peft.PeftModel: a tuner in ``base_model``; ``generate`` is the model's own."""

    def __init__(self, model):
        super().__init__()
        self.base_model, self.peft_config = PeftTuner(model), {"default": None}

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    def generate(self, **kwargs):
        return self.base_model.model.generate(**kwargs)


def test_peft_models_have_the_names_of_the_model_inside(tmp_path, model):
    expected = plain(tmp_path / "plain", model)
    names = {s.name: s.alias for s in named_sketches(model, BatchAdapter(SequenceBook(None)))}
    adapted = PeftModel(model).eval()
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.q_proj.lora_B["default"].weight)  # as PEFT initialises it
    assert entries(adapted) == [adapted, adapted.base_model, model]
    found = captured(tmp_path / "peft", adapted, lambda rows: adapted(torch.tensor(IDS), use_cache=False))
    assert [s.tokens.tolist() for s in found.sequences] == IDS
    # the model's own forward is not called as a module, so that it has no tensors
    assert_same_dump(found, expected, but=("",))
    inner = {name for name, _ in found.tensors if "q_proj." in name}
    assert {name.rpartition("q_proj.")[2] for name in inner} == {
        *("base_layer", "lora_dropout.default", "lora_A.default", "lora_B.default"),
    }
    weights = {s.name: s.alias for s in named_sketches(unwrap(adapted), BatchAdapter(SequenceBook(None)))}
    assert {name: alias for name, alias in weights.items() if "lora_" not in name} == names
    assert "model.layers.0.self_attn.q_proj.lora_A.default.weight" in weights


def test_peft_models_generate_and_train_in_one_capture(tmp_path, model):
    adapted = PeftModel(model).eval()

    def both(rows):
        adapted(torch.tensor(IDS[:1]), use_cache=False)
        adapted.generate(input_ids=torch.tensor(IDS[1:]), max_new_tokens=3, min_new_tokens=3, do_sample=False)

    dump = captured(tmp_path, adapted, both)
    assert [(s.prompt_len, len(s.tokens)) for s in dump.sequences] == [(5, 5), (5, 7)]
    assert len(by_row(dump, "model.layers.0.self_attn.q_proj", "output.0")) == 12
    assert hook_count(adapted) == 0


# -- torch.compile -----------------------------------------------------------------------------------------------------

DISABLED = """
import torch
from torch import nn
from probe import PrecisionDebugger
model = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
model[0].compile()
with PrecisionDebugger(enabled=True, dump_path="d").start(model):
    model(torch.ones(2, 3))
"""


def test_compiled_models_are_refused_with_the_way_out(tmp_path):
    inner = nn.Sequential(nn.Linear(3, 3), torch.compile(nn.Linear(3, 3)))
    with pytest.raises(CaptureError, match=r"module 1 is compiled, so hooks .* TORCHDYNAMO_DISABLE=1"):
        captured(tmp_path, inner, lambda rows: None)
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", DISABLED], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    with open_dump(tmp_path / "d") as dump:
        assert ("0", "output.0") in dump.tensors and ("", "output.0") in dump.tensors


# -- what adapters declare ---------------------------------------------------------------------------------------------


class Sharded(BatchAdapter):
    """An adapter of a pretend tensor-parallel rank."""

    tp_size = 2

    def shard_of(self, path, slot):
        return {"embed": "replicated", "head": "columns"}.get(path, "") if slot.startswith("output") else ""

    def taps(self, path, module):
        return {"work": "inner.0"} if path.startswith("layers.") and path.count(".") == 1 else {}


class SecondRank(Sharded):
    tp_rank = 1


def index_of(folder):
    import h5py

    with h5py.File(folder / "actor" / "step0" / "rank0.h5") as file:
        return {
            (r["module"].decode(), r["slot"].decode()): (r["shard"].decode(), r["dtype"].decode())
            for r in file["index"]
        }


@pytest.mark.parametrize("adapter", [Sharded, SecondRank])
def test_shards_are_declared_and_replicas_are_checksums(tmp_path, adapter):
    from probe.store.checksums import row_checksums

    model = Stack()
    ids = torch.tensor([[1, 2, 3]])
    captured(tmp_path / "d", model, lambda rows: model(ids), adapter=adapter).close()
    entries = index_of(tmp_path / "d")
    assert entries["head", "output.0"] == ("columns", "float32")
    assert entries["layers.0.linear", "output.0"] == ("", "float32")
    second = adapter is SecondRank
    assert entries["embed", "output.0"] == (("checksum", "uint64") if second else ("replicated", "float32"))
    if second:
        import h5py

        with h5py.File(tmp_path / "d" / "actor" / "step0" / "rank0.h5") as file:
            stored = file["/embed/output.0/block0"][:]
        assert np.array_equal(stored, row_checksums(model.embed(ids)[0].detach().numpy()))


def test_taps_record_what_a_method_returns_and_are_undone(tmp_path):
    model = Stack()
    before = model.layers[0].work
    dump = captured(tmp_path, model, lambda rows: model(torch.tensor([[1, 2, 3]])), adapter=Sharded)
    for number in range(2):
        name = f"layers.{number}"
        assert np.array_equal(dump.read(name, "inner.0"), dump.read(name, "output.0"))
        assert "work" not in model.layers[number].__dict__
    assert model.layers[0].work == before
    assert EngineAdapter.taps(None, "", model) == {}


# -- distributed tensors -----------------------------------------------------------------------------------------------


class Distributed(nn.Module):
    """Return the input as distributed tensors."""

    def __init__(self, mesh):
        super().__init__()
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        self.forms = [
            functools.partial(distribute_tensor, device_mesh=mesh, placements=[p]) for p in (Replicate(), Shard(2))
        ]
        rows, columns = (distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [p]) for p in (Shard(0), Shard(1)))
        self.rows, self.columns = nn.Parameter(rows), nn.Parameter(columns)
        self.copies = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))

    def forward(self, x):
        return [form(x) for form in self.forms]


def test_distributed_tensors_are_read_without_a_collective(tmp_path, process_group):
    from torch.distributed.device_mesh import init_device_mesh

    model = Distributed(init_device_mesh("cpu", (1,)))
    x = torch.arange(12.0).reshape(1, 3, 4)
    dump = captured(tmp_path, model, lambda rows: model(x))
    assert dump.tensors[("", "output.0")].rows and np.array_equal(dump.read("", "output.0").reshape(3, 4), x[0])
    assert dump.modules[""].info["left_out"] == {"output.1": [1, 3, 4]}
    found = {s.name: s for s in named_sketches(model, BatchAdapter(SequenceBook(None)))}
    assert (found["rows"].start, found["rows"].whole, len(found["rows"].rows)) == (0, 2, 2)
    assert len(found["copies"].rows) == 2 and not np.isnan(found["copies"].quad)
    assert found["columns"].shape == (2, 3) and not len(found["columns"].rows) and not found["columns"].alias
