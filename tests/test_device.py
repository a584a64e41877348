"""Devices: the same dump from another device, clear refusals, and no silent fallback."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from probe.errors import EngineError
from probe.hooks import device as device_module
from probe.hooks.device import HostTransfer, pick_device, to_numpy
from probe.hooks.device import device_module as require_device
from probe.store.reader import open_dump
from probe.store.schema import TOKEN

TESTS = Path(__file__).parent


def on_fake_npu(script: str, *arguments: str) -> str:
    """Run a script in a process that has the pretend device, and return what it prints."""
    prelude = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import fake_npu; fake_npu.install()\n"
    command = [sys.executable, "-c", prelude + textwrap.dedent(script), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


DUMP_ON_BOTH = """
    import torch
    from torch import nn
    from probe import PrecisionDebugger
    from probe.hooks.device import pick_device

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.o_proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            x = x + self.o_proj((q @ k.transpose(-1, -2)).softmax(-1) @ v)
            return self.mlp(x).add_(x), x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens, self.lm_head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, input_ids, attention_mask):
            x = self.embed_tokens(input_ids)
            for layer in self.layers:
                x, _ = layer(x)
            return self.lm_head(x)

    assert pick_device() == pick_device("npu") == "npu" and pick_device("cpu") == "cpu"
    for device, dtype in ((d, t) for d in ("cpu", "npu") for t in ("float32", "bfloat16")):
        torch.manual_seed(0)
        model = Model().to(getattr(torch, dtype)).to(device)
        model.lm_head.weight = model.embed_tokens.weight  # moving a module to the pretend device unties its weights
        ids = torch.tensor([[0, 0, 5, 6, 7], [11, 12, 13, 14, 15]]).to(device)
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).to(device)
        folder = f"{sys.argv[1]}/{device}-{dtype}"
        with PrecisionDebugger(enabled=True, dump_path=folder).start(model), torch.no_grad():
            logits = model(ids, mask)
            assert logits.device.type == device and next(model.parameters()).device.type == device
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """The folder of dumps of one model on both devices, in two dtypes."""
    folder = tmp_path_factory.mktemp("devices")
    on_fake_npu(DUMP_ON_BOTH, str(folder))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_npu_dump_equals_the_cpu_dump(dumps, dtype):
    with open_dump(dumps / f"cpu-{dtype}") as cpu, open_dump(dumps / f"npu-{dtype}") as npu:
        assert (cpu.manifest["device"], npu.manifest["device"]) == ("cpu", "npu")
        assert list(cpu.tensors) == list(npu.tensors) and len(cpu.tensors) > 30
        for key, info in cpu.tensors.items():
            assert info.dtype == npu.tensors[key].dtype
            assert cpu.read_raw(*key).tobytes() == npu.read_raw(*key).tobytes(), key
            assert np.array_equal(cpu.rows(*key), npu.rows(*key))
        assert {cpu.tensors[key].dtype for key in cpu.tensors if key[1].startswith("output")} == {dtype}
        for column in TOKEN.fields or ():
            assert np.array_equal(cpu.tokens[column], npu.tokens[column], equal_nan=column.startswith("logprob"))
        for name, weight in cpu.weights.items():
            assert np.array_equal(weight.rows, npu.weights[name].rows) and weight.alias == npu.weights[name].alias


def test_what_is_missing_is_an_error_not_another_device():
    for kind in ("cuda", "npu"):
        if getattr(torch, kind, None) is not None and getattr(torch, kind).is_available():
            continue
        with pytest.raises(EngineError, match=f"device '{kind}' is not available to torch .*--device cpu"):
            pick_device(kind)
        with pytest.raises(EngineError, match=f"device '{kind}' is not available"):
            require_device(kind)
    with pytest.raises(EngineError, match="unknown device 'tpu': use cpu, cuda, npu or auto"):
        pick_device("tpu")


def test_auto_takes_what_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device() == pick_device("cuda") == "cuda"


def test_a_torch_npu_that_does_not_load_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for requested in ("npu", "auto"):
        with pytest.raises(EngineError, match=r"torch_npu cannot be imported \(libhccl\.so.*set_env\.sh"):
            pick_device(requested)
    assert pick_device("cpu") == "cpu"


def test_a_torch_npu_that_torch_has_not_loaded_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text(
        "import torch, types\ntorch.npu = types.SimpleNamespace(is_available=lambda: True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "npu", None, raising=False)
    monkeypatch.delattr(torch, "npu")
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert pick_device("npu") == "npu"


@pytest.mark.parametrize(
    ("dtype", "carrier"),
    [(torch.bfloat16, "uint16"), (torch.float8_e4m3fn, "uint8"), (torch.float8_e5m2, "uint8"), (torch.bool, "uint8")],
)
def test_bits_of_dtypes_that_numpy_lacks(dtype, carrier):
    values = torch.tensor([[0.0, 1.0], [-2.0, 0.5]]).to(dtype).t()  # not contiguous
    bits = to_numpy(values)
    assert bits.dtype == carrier and bits.shape == (2, 2)
    assert torch.equal(torch.from_numpy(bits.view(bits.dtype.str.replace("u", "i"))).view(dtype), values)


class Recorder:
    """A device runtime whose streams write down what is asked of them."""

    def __init__(self):
        self.log = []

    def Stream(self, device):
        return self

    def current_stream(self, device):
        return "the model's stream"

    def stream(self, stream):
        return self

    def __enter__(self):
        self.log.append("enter")

    def __exit__(self, *exc):
        self.log.append("leave")

    def wait_stream(self, other):
        self.log.append(f"wait for {other}")

    def record_event(self):
        self.log.append("event")
        return self

    def synchronize(self):
        self.log.append("synchronize")


class Recorded(torch.Tensor):
    """A tensor whose allocator is told which streams use it."""

    def record_stream(self, stream):
        stream.log.append("keep memory")


def test_transfers_run_on_a_side_stream(monkeypatch):
    runtime, real_empty, pinned = Recorder(), torch.empty, []

    def empty(*args, pin_memory=False, **kwargs):
        pinned.append(pin_memory)
        return real_empty(*args, **kwargs)

    monkeypatch.setattr(device_module.torch, "empty", empty)
    transfer, tensor = HostTransfer(), torch.arange(4.0).as_subclass(Recorded)
    arrival = transfer._send_on_side_stream(runtime, tensor)
    order = ["wait for the model's stream", "enter", "event", "leave", "keep memory"]
    assert runtime.log == order and pinned == [True]  # nothing has been waited for on the host
    assert transfer.arrive(arrival).tolist() == [0, 1, 2, 3]
    assert runtime.log == [*order, "synchronize"]
