"""Start an engine on a checkpoint and dump its forward.

``run`` takes a ``job`` from start to end: ``parallel`` refuses splits that cannot work, ``prompts`` reads what to run,
a runner runs it, and ``tokens`` writes the ids and log-probs beside it.

- Runners: ``vllm``, ``transformers``, ``fsdp``, ``megatron``. All but vLLM's hold the model in their own process and
  share ``inprocess``.
- Several processes: ``launch`` starts them with torchrun and gathers what they return; ``rank`` is what each runs.
- Megatron-core: ``megatron_config`` reads a checkpoint's configuration, ``megatron_model`` builds the model,
  ``megatron_weights`` loads it, ``megatron_cpu`` makes it run without a GPU; ``megatron_batch`` lays out one
  micro-batch and ``megatron_pipeline`` runs all of them through Megatron's schedules.
"""
