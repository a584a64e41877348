"""Run any stage on Hugging Face transformers: generate a rollout, or recompute another dump's tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

from probe.checkpoint import Checkpoint
from probe.errors import EngineError
from probe.hooks.device import pick_device
from probe.hooks.engines.transformers import BatchAdapter
from probe.hooks.runners.inprocess import announce, capturing, micro_batches, token_logprobs, torch_dtype
from probe.hooks.runners.job import DumpJob, Observer, TokenSequence
from probe.sampling import Semantics, engine_semantics


def run(
    job: DumpJob, checkpoint: Checkpoint, sequences: list[TokenSequence], manifest: dict[str, Any], observer: Observer
) -> list[TokenSequence]:
    """Run the job and return its sequences with tokens and log-probs; ``manifest`` gains what only the engine knows."""
    observer("loading the model", 0, 1)
    device = pick_device(job.device)
    model = load(job, manifest["dtype"]).to(device).eval()
    manifest["engine"]["version"] = transformers.__version__
    manifest["device"] = device
    manifest["backends"] = {"attention": getattr(model.config, "_attn_implementation", None)}
    meaning = engine_semantics(manifest)
    with capturing(job, manifest, model, BatchAdapter) as rows, torch.no_grad(), precision(manifest["dtype"]):
        if job.source is None:
            return _generate(job, model, sequences, rows, observer, meaning)
        return score(model, list(micro_batches(sequences, job.micro_batch_size)), rows, device, observer, meaning)


class KeepFloat64(TorchFunctionMode):
    """Keep values in float64 where a model's code asks for float32.

    Norms, softmax and routers of transformers compute in float32 so that a model in bf16 does not lose precision there;
    in a model that runs in float64 the same lines would round it, and the reference would be no better than fp32. What
    is float32 from the start (the angles of the rotary embedding, which every engine computes so) stays as it is.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, its request for float32 dropped where its first argument is float64."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if function is torch.Tensor.float:
                return first
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(*args, **kwargs)


def precision(dtype: str) -> AbstractContextManager[Any]:
    """Return the context in which a forward in ``dtype`` keeps its precision."""
    return KeepFloat64() if dtype == "float64" else nullcontext()


def load(job: DumpJob, dtype: str) -> Any:
    """Return the job's model on the CPU; raise EngineError where transformers cannot load it."""
    arguments = job.engine_args
    if dtype == "float64" and hasattr(transformers.PreTrainedModel, "get_correct_experts_implementation"):
        arguments = {"experts_implementation": "eager", **arguments}  # torch's grouped kernel knows no float64
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(job.model), dtype=torch_dtype(dtype), local_files_only=True, **arguments
        )
    except (OSError, ValueError, KeyError, TypeError) as error:  # TypeError: an --engine-arg that no model takes
        reason = " ".join(str(error).split())[:300]
        fix = "check --engine-arg" if job.engine_args else ""
        raise EngineError(f"transformers could not load {job.model} ({reason})", fix) from error


def score(
    model: Any,
    batches: list[list[TokenSequence]],
    rows: BatchAdapter,
    device: str,
    observer: Observer,
    meaning: Semantics,
) -> list[TokenSequence]:
    """Recompute sequences in right-padded micro-batches and return them with log-probs of this ``meaning``.

    An empty micro-batch is run but not captured: it keeps ranks company that have more.
    """
    done, total = 0, sum(map(len, batches))
    for batch in batches:
        tokens = [sequence.tokens for sequence in batch] or [[0]]
        longest = max(map(len, tokens))
        ids = torch.tensor([t + [0] * (longest - len(t)) for t in tokens], device=device)
        mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in tokens], device=device)
        rows.paused = not batch
        rows.announce(announce(batch, whole=True))
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, sequence in enumerate(batch):
            mine = logits[row, : len(sequence.tokens)]
            sequence.logprobs = token_logprobs(mine, sequence.tokens, meaning=meaning)
        done += len(batch)
        observer("recomputing", done, total)
    return [sequence for batch in batches for sequence in batch]


def _generate(
    job: DumpJob,
    model: Any,
    sequences: list[TokenSequence],
    rows: BatchAdapter,
    observer: Observer,
    meaning: Semantics,
) -> list[TokenSequence]:
    """Generate one sequence at a time, so that no finished sequence runs on as padding."""
    wanted, of_model = job.sampling, model.generation_config
    model.generation_config = transformers.GenerationConfig()  # what ours leaves open would be taken from the model's
    greedy = wanted.temperature == 0
    chosen = {"do_sample": False} if greedy else {"temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": 0}
    settings = transformers.GenerationConfig(
        max_new_tokens=wanted.max_tokens,
        eos_token_id=None if wanted.ignore_eos else of_model.eos_token_id,
        pad_token_id=of_model.pad_token_id,
        return_dict_in_generate=True,
        output_logits=True,
        **({"do_sample": True} | chosen),
    )
    for number, sequence in enumerate(sequences):
        torch.manual_seed(wanted.seed + number)
        rows.announce(announce([sequence], whole=False))
        ids = torch.tensor([sequence.tokens], device=model.device)
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        sequence.tokens = output.sequences[0].tolist()
        logits = torch.cat(output.logits)
        sequence.logprobs = token_logprobs(logits, sequence.tokens, sequence.prompt_len - 1, meaning)
        observer("generating", number + 1, len(sequences))
    return sequences
