"""What each engine's model, rows and topology look like.

One adapter per engine, on a common ``base`` that numbers sequences in a book (``sequences``):

- ``transformers``: batches of Hugging Face models and plain modules; ``batches`` reads masks, positions and bounds
- ``megatron``: a batch or packed sequences on one rank; ``megatron_parallel``: what that rank holds of every tensor and
  parameter, and whose tokens its experts serve; ``megatron_moe``: methods of experts to record
- ``vllm``: passes of a scheduler; ``vllm_model_runner``: the object that runs them; ``vllm_parallel``: what a rank
  holds of every tensor and parameter; ``vllm_moe``: methods of experts to record

``verl`` is no adapter: it records nothing and computes figures of log-probs in a training loop, from verl's batches
(docs/training.md).

Two modules run inside vLLM's own processes, by name: ``vllm_worker`` starts and stops the capture, ``vllm_forced``
makes the sampler choose given tokens.
"""
