"""What runs inside vLLM's worker process: named by ``worker_extension_cls``, reached by ``collective_rpc``.

Importing this module, which vLLM does before it loads the model, makes the loader sketch every parameter just before
the engine repacks its weights (afterwards fused linears are empty on a CPU and reordered elsewhere).
"""

from __future__ import annotations

import json
from pathlib import Path

from probe.hooks.capture import Capture
from probe.hooks.engines.sequences import SequenceBook
from probe.hooks.engines.vllm import VllmAdapter
from probe.hooks.engines.vllm_model_runner import (
    backends_of,
    model_of,
    prepare_stage,
    record_schedule,
    refuse_unsupported,
)
from probe.hooks.engines.vllm_parallel import place_of
from probe.hooks.engines.vllm_weights import loaded_sketches, loaded_values, sketch_before_repacking
from probe.hooks.noise import add_noise
from probe.hooks.parameters import store_parameters
from probe.settings import Settings
from probe.store.writer import DumpWriter

sketch_before_repacking()


class ProbeWorker:
    """Methods mixed into a vLLM worker; every argument and result is plain JSON, so that any RPC can carry it."""

    def probe_start(self, options: str) -> str:
        """Start capturing into ``options['folder']/rank{R}.h5`` and return what the engine runs, as JSON."""
        wanted = json.loads(options)
        runner = self.model_runner  # type: ignore[attr-defined]
        refuse_unsupported(runner)
        place = place_of(runner)
        manifest = {**wanted["manifest"], "world_size": place.world_size}
        manifest |= {"topology": place.topology, "coordinates": place.coordinates}
        path = Path(wanted["folder"]) / f"rank{place.rank}.h5"
        writer = DumpWriter(path, manifest, block_bytes=wanted["block_bytes"])
        model = model_of(runner)
        prepare_stage(runner)
        known = {"prompts_only": wanted["prompts_only"], "prompt_lens": wanted["prompt_lens"]}
        adapter = VllmAdapter(SequenceBook(writer), runner, place=place, **known)
        self._probe = capture = Capture(writer, adapter, Settings(task=manifest["task"]))
        for weight in loaded_sketches(model):
            writer.add_weight(weight)
        store_parameters(writer, loaded_values(model))
        if wanted["noise"] is not None:
            add_noise(model, wanted["noise"], manifest["dtype"])
        hooked = capture.attach(model)
        self._probe_undo = record_schedule(runner, adapter)
        facts = {"rank": place.rank, "hooked": hooked, "backends": backends_of(runner)}
        return json.dumps({**facts, "topology": place.topology, "world_size": place.world_size})

    def probe_stop(self) -> str:
        """Stop capturing, complete the file, and return counts as JSON."""
        capture = self._probe
        self._probe_undo()
        capture.detach()
        path = capture.writer.close()
        unknown = {name: getattr(capture.adapter, name) for name in ("logits_rows_unknown", "passes_unknown")}
        counts = {"calls": capture.calls, "fired": len(capture.fired), "rows": capture.writer.tensor_rows}
        return json.dumps({"path": str(path), **unknown, **counts})
