"""What else of verl 0.9.1 the recording meets: its trainers' steps, and its profiler with our PrecisionDebugger."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest
from activation_tools import clean_environment, python

from probe import open_dump

pytestmark = pytest.mark.slow
pytest.importorskip("verl")


def test_the_trainers_step_reaches_every_process(tmp_path: Path) -> None:
    """GIVEN a trainer of verl's, WHEN it begins a training step, THEN the dump's folder says so to all processes.

    Before the first one, and while it validates, it is at no step that could be recorded.
    """
    code = dedent("""
        from pathlib import Path
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
        from verl.utils.skip import SkipManager
        from omegaconf import OmegaConf
        said = lambda: Path("dump/step").read_text().split()[0]
        mode = {"trainer_mode": "sync", "sync": {"parameter_sync_step": 1}}
        config = {"skip": {}, "trainer": {"v1": mode}, "data": {}, "actor_rollout_ref": {"rollout": {}}}
        SkipManager.init(OmegaConf.create(config))
        found = [said()]
        SkipManager.set_step(7)
        found.append(said())
        for trainer in (RayPPOTrainer, PPOTrainer):
            inside = []
            asked = {"__getattr__": lambda self, name: inside.append(said()) or 1 / 0}
            bare = type("Trainer", (trainer,), asked)
            bare.__abstractmethods__ = frozenset()
            bare = object.__new__(bare)
            try:
                bare._validate()
            except ZeroDivisionError:
                pass
            found += [inside[0], said()]
        print("FOUND", *found)
    """)
    environ = clean_environment(DUMP_ON="1", PROBE_DUMP_DIR=str(tmp_path / "dump"))
    lines = python("-c", code, cwd=tmp_path, environ=environ).splitlines()
    assert next(line for line in lines if line.startswith("FOUND")) == "FOUND -1 7 -1 7 -1 7"


def test_steps_of_trainers_with_separate_rollouts(tmp_path: Path) -> None:
    """GIVEN trainers of verl.experimental, WHEN they begin a step, THEN it is said, though no SkipManager hears of it.

    The fully asynchronous rollouter begins before the trainer does: what it generates is for the first step.
    """
    code = dedent("""
        from pathlib import Path
        from omegaconf import OmegaConf
        from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
        from verl.utils.skip import SkipManager
        said = lambda: Path("dump/step").read_text().split()[0]
        name = "verl.experimental.fully_async_policy.fully_async_rollouter"
        rollouter = {"__name__": name, "SkipManager": SkipManager}
        exec("def init_workers(config): SkipManager.init(config)", rollouter)
        mode = {"trainer_mode": "sync", "sync": {"parameter_sync_step": 1}}
        config = {"skip": {}, "trainer": {"v1": mode}, "data": {}, "actor_rollout_ref": {"rollout": {}}}
        rollouter["init_workers"](OmegaConf.create(config))
        found = [said()]
        for step in (2, 3):
            ready = {"_fit_prepare_step": lambda self: None}
            trainer = object.__new__(type("Trainer", (SeparateRayPPOTrainer,), ready))
            trainer.global_steps, trainer.epoch = step, 0
            try:
                trainer.fit_step()
            except Exception:
                pass  # it says its step, and then misses all that a whole trainer has
            found.append(said())
        print("FOUND", *found)
    """)
    environ = clean_environment(DUMP_ON="1", PROBE_DUMP_DIR=str(tmp_path / "dump"))
    lines = python("-c", code, cwd=tmp_path, environ=environ).splitlines()
    assert next(line for line in lines if line.startswith("FOUND")) == "FOUND 1 2 3"
    assert "share few" in (tmp_path / "dump" / "activation.log").read_text()


def test_verls_own_profiler_records_with_our_debugger(tmp_path: Path) -> None:
    """GIVEN verl's tool ``precision_debugger`` and PROBE_AS_MSPROBE=1, with no msProbe installed,

    WHEN stages of two steps run, THEN its folder is one dump with the stages and steps under our names.
    """
    (tmp_path / "config.json").write_text('{"task": "tensor", "level": "L0"}')
    code = dedent("""
        import types, torch
        from verl.utils.profiler import DistProfiler, ProfilerConfig
        from verl.utils.profiler.config import PrecisionDebuggerToolConfig
        import transformers
        config = transformers.Qwen2Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                          num_attention_heads=2, num_key_value_heads=1)
        model = transformers.Qwen2ForCausalLM(config)
        tool = PrecisionDebuggerToolConfig(config_path="config.json", strict=True)
        profiler = ProfilerConfig(enable=True, tool="precision_debugger", save_path="saved")

        class Worker:
            def __init__(self):
                self.profiler = DistProfiler(rank=0, config=profiler, tool_config=tool)
                self.actor = types.SimpleNamespace(engine=types.SimpleNamespace(module=model))

            @DistProfiler.annotate(role="actor_compute_log_prob")
            def compute_log_prob(self, ids):
                return model(input_ids=ids)

            @DistProfiler.annotate(role="actor_update")
            def update_actor(self, ids):
                return model(input_ids=ids)

        worker = Worker()
        for step in (3, 4):
            worker.profiler.start(role="train", profile_step=step)
            worker.compute_log_prob(torch.arange(6)[None])
            worker.update_actor(torch.arange(6)[None])
            worker.profiler.stop()
    """)
    python("-c", code, cwd=tmp_path, environ=clean_environment(PROBE_AS_MSPROBE="1"))
    for stage in ("logprob", "update"):
        for step in (3, 4):
            dump = open_dump(tmp_path / "saved" / stage, step)
            assert dump.complete and dump.tensors["model.layers.0", "output.0"].rows == 6


def test_without_the_switch_msprobe_is_not_there(tmp_path: Path) -> None:
    code = "import probe.hooks.plugin, importlib.util; print(importlib.util.find_spec('msprobe'))"
    assert python("-c", code, cwd=tmp_path, environ=clean_environment()).strip() == "None"


def test_vllm_ascends_way_of_importing_it_works(tmp_path: Path) -> None:
    """GIVEN PROBE_AS_MSPROBE=1, WHEN a worker imports what vllm-ascend does for ``dump_config``, THEN it records."""
    (tmp_path / "config.json").write_text('{"dump_path": "saved", "task": "tensor"}')
    code = dedent("""
        import probe.hooks.plugin, torch
        from msprobe.pytorch import PrecisionDebugger
        debugger = PrecisionDebugger("config.json")
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        debugger.start(model); model(torch.ones(3, 2)); debugger.stop(); debugger.step()
    """)
    python("-c", code, cwd=tmp_path, environ=clean_environment(PROBE_AS_MSPROBE="1"))
    assert open_dump(tmp_path / "saved" / "actor").complete
    assert "msprobe" not in sys.modules
