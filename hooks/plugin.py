"""Entry point of ``verl.plugins`` (loaded by ``import verl``) and ``vllm.general_plugins`` (called in every process).

A second way in, where the start-up line did not run or DUMP_ON was set later: by the program itself, before it imports
the engine. Also where ``PROBE_AS_MSPROBE=1`` takes effect, which needs no DUMP_ON.
"""

from probe.hooks.activate import start
from probe.hooks.jobs.msprobe import offer

__all__ = ["start"]

start()
offer()
