"""The small model that ships with the product, built on the spot, and a way to damage a checkpoint on purpose.

The model is a Qwen2-shaped causal language model with a byte-level BPE tokenizer, both trained on the text of
``probe.hooks.demo_corpus``. It is small enough to build while a person waits and trained far enough that its next-token
distribution is peaked, as that of a real model is: a random model has near-uniform logits, which make a poor example.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from probe.errors import CheckpointError, OutputExistsError, UsageError
from probe.hooks.demo_corpus import (
    CHAT_END,
    CHAT_TEMPLATE,
    END,
    PAD,
    SPECIAL_TOKENS,
    make_corpus,
    require,
    train_tokenizer,
)

MARKER = "probe_demo_model.json"
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

DEMO_PROMPTS: tuple[str, ...] = (
    "a rollout is",
    "what is 3 plus 4?",
    "count from 2 to 9:",
    "note that the trainer",
    "first the engine reads the prompt. then it samples a token.",
    "what is 2 plus 5? the answer is 7. what is 5 minus 1? the answer is 4. what is 3 plus 3? the answer is 6. "
    "what is 4 minus 0? the answer is 4. what is 5 minus 3?",
)

Observer = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Recipe:
    """Name every number that shapes the model; raise ``version`` when the training code itself changes.

    ``length`` is in tokens, ``documents`` in texts. ``threads`` is part of the recipe because the split of a matrix
    product over threads changes the order of its sums, and so the last bits of the weights. One thread is enough at
    this size, and on a busy machine several are far slower: every product waits for the thread that lost its core.
    """

    version: int = 1
    steps: int = 280
    batch: int = 4
    length: int = 128
    documents: int = 4000
    vocab_size: int = 700
    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    learning_rate: float = 4e-3
    warmup: int = 20
    threads: int = 1


DEFAULT_RECIPE = Recipe()
ADAMW = {"betas": (0.9, 0.98), "weight_decay": 0.01}

# --- the configuration ------------------------------------------------------------------------------------------------


def _config(recipe: Recipe, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,  # near 1/sqrt(hidden_size); the usual 0.02 trains slowly at this width
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_theta": 1e6,  # transformers 4 reads this name, 5 the one above
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "dtype": "float32",
        "torch_dtype": "float32",
    }


# --- training ---------------------------------------------------------------------------------------------------------


@contextmanager
def _deterministic(torch: Any, seed: int, threads: int) -> Iterator[None]:
    """Fix every global setting of torch that changes the result of the training, and put each one back."""
    with ExitStack() as restore:
        restore.callback(torch.set_num_threads, torch.get_num_threads())
        restore.callback(torch.set_default_dtype, torch.get_default_dtype())
        restore.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        restore.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        # Only the CPU generator is used and seeded; torch.manual_seed would also reset those of the accelerators.
        restore.callback(torch.default_generator.set_state, torch.default_generator.get_state())
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(True)
        torch.default_generator.manual_seed(seed)
        for context in (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
        ):
            restore.enter_context(context)
        yield


def _pack(encoded: list[list[int]], recipe: Recipe, rng: random.Random) -> list[list[int]]:
    """Draw one batch: every row starts at the start of a document and is filled up with further ones."""
    rows = []
    for _ in range(recipe.batch):
        row: list[int] = []
        while len(row) <= recipe.length:
            row += rng.choice(encoded)
        rows.append(row[: recipe.length + 1])
    return rows


def _rate(step: int, recipe: Recipe) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine down to a twentieth."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def _train(config: dict[str, Any], encoded: list[list[int]], recipe: Recipe, seed: int, observer: Observer) -> Any:
    """Train from scratch with AdamW on the next-token cross entropy; return the model in float32, in eval mode."""
    torch, transformers = require("torch"), require("transformers")
    with _deterministic(torch, seed, recipe.threads):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config)).train()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at first in Qwen2: a bias that an engine forgets would go unseen
                torch.nn.init.normal_(parameter, std=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, fused=True, **ADAMW)
        rng = random.Random(seed + 1)
        for step in range(recipe.steps):
            rows = torch.tensor(_pack(encoded, recipe, rng))
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = _rate(step, recipe)
            optimizer.step()
            observer(step + 1, recipe.steps, loss.item())
    return model.eval()


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to ``target`` that takes its place when the block ends without an error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as staging:
            fresh = Path(staging, "new")
            fresh.mkdir()
            yield fresh
            if target.exists():
                target.replace(Path(staging, "old"))
            fresh.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {target} ({error})", "name a folder on a disk that can be written") from error


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _build(folder: Path, corpus: list[str], recipe: Recipe, seed: int, observer: Observer) -> None:
    """Train the tokenizer and the model and write the checkpoint directory."""
    safetensors = require("safetensors.torch")
    tokenizer = train_tokenizer(corpus, recipe.vocab_size)
    config = _config(recipe, tokenizer.get_vocab_size())
    end = config["eos_token_id"]
    encoded = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(corpus)]
    model = _train(config, encoded, recipe, seed, observer)
    weights = {name: value.contiguous() for name, value in sorted(model.state_dict().items())}
    # save() and not save_file(), which makes a file that only its owner can read.
    (folder / "model.safetensors").write_bytes(safetensors.save(weights, metadata={"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config)
    stops = [end, SPECIAL_TOKENS.index(CHAT_END)]
    _write_json(folder / "generation_config.json", {"eos_token_id": stops, "pad_token_id": config["pad_token_id"]})
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": config["max_position_embeddings"],
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _files_digest(folder: Path) -> str:
    return hashlib.sha256(b"\0".join((folder / name).read_bytes() for name in MODEL_FILES)).hexdigest()


def _read_marker(folder: Path) -> dict[str, Any]:
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) else {}


def _is_current(folder: Path, recipe_digest: str) -> bool:
    marker = _read_marker(folder)
    complete = all((folder / name).is_file() for name in MODEL_FILES)
    return complete and marker.get("made_by") == recipe_digest and marker.get("files") == _files_digest(folder)


def make_demo_model(
    path: Path, *, seed: int = 0, observer: Observer | None = None, recipe: Recipe = DEFAULT_RECIPE
) -> Path:
    """Build the demo model in the directory ``path`` and return it; reuse one that the same recipe and seed made.

    ``observer(step, total, loss)`` hears of every training step; the loss is in nats per token. On one machine the same
    seed gives the same bytes. The directory appears complete or not at all, and torch's global state (generator,
    threads, default dtype, determinism) is left as it was. Raises ``EngineError`` without torch or transformers,
    ``OutputExistsError`` where ``path`` holds something this function did not make, ``UsageError`` where it cannot
    write.
    """
    path = Path(path)
    corpus = make_corpus(recipe.documents, seed)
    facts = {"recipe": asdict(recipe), "seed": seed, "config": _config(recipe, recipe.vocab_size)}
    described = json.dumps([facts, ADAMW, CHAT_TEMPLATE, corpus], sort_keys=True)
    recipe_digest = hashlib.sha256(described.encode()).hexdigest()
    if _is_current(path, recipe_digest):
        return path
    if path.exists() and not (path.is_dir() and (_read_marker(path) or not any(path.iterdir()))):
        raise OutputExistsError(f"{path} already exists and is not a demo model", "name a new folder")
    with _staged(path) as folder:
        _build(folder, corpus, recipe, seed, observer or (lambda step, total, loss: None))
        _write_json(folder / MARKER, {"made_by": recipe_digest, "files": _files_digest(folder), **facts})
    return path


# --- damage on purpose ------------------------------------------------------------------------------------------------

# safetensors dtype name -> torch dtype name
SCALABLE_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# What opening, unpacking, parsing and looking things up in a damaged safetensors file can raise.
UNREADABLE = (OSError, struct.error, ValueError, OverflowError, MemoryError, LookupError, TypeError, AttributeError)


def _read_header(shard: Path) -> tuple[dict[str, Any], int]:
    """Return the table of tensors of a safetensors file and the byte at which its data starts."""
    try:
        with shard.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        data = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if shard.stat().st_size != 8 + size + data:
            raise ValueError(f"{data} bytes of data announced, {shard.stat().st_size - 8 - size} there")
    except UNREADABLE as error:
        raise CheckpointError(f"{shard} is not a readable safetensors file ({error})", "fetch it again") from error
    return header, 8 + size


def _shards(checkpoint: Path) -> dict[str, Path]:
    """Map every parameter of a checkpoint directory to the file that holds it."""
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} has no readable weight_map ({error})", "fetch it again") from error
        return {name: checkpoint / file for name, file in weight_map.items()}
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{checkpoint} holds no *.safetensors file", "name a Hugging Face checkpoint directory")
    return {name: file for file in files for name in _read_header(file)[0]}


def _locate(shard: Path, parameter: str) -> tuple[str, int, int]:
    """Return the torch dtype name of a stored tensor and the first byte and the end of its values in the file."""
    header, start = _read_header(shard)
    if parameter not in header:
        raise CheckpointError(f"{shard} does not hold {parameter}, though the index says so", "fetch it again")
    stored = header[parameter]["dtype"]
    if stored not in SCALABLE_DTYPES:
        known = ", ".join(SCALABLE_DTYPES)
        raise CheckpointError(f"{parameter} is stored as {stored}, which has no plain scale", f"choose one of {known}")
    begin, end = header[parameter]["data_offsets"]
    return SCALABLE_DTYPES[stored], start + begin, start + end


def _scale_in_file(shard: Path, place: tuple[str, int, int], scale: float) -> bool:
    """Multiply the values at ``place`` in float32 or wider and round back to their dtype; say whether any changed."""
    torch = require("torch")
    dtype, begin, end = place
    with shard.open("r+b") as file:
        file.seek(begin)
        before = bytearray(file.read(end - begin))
        if not before:
            return False
        values = torch.frombuffer(before, dtype=getattr(torch, dtype))
        wide = torch.float64 if dtype == "float64" else torch.float32
        after = (values.to(wide) * scale).to(values.dtype).view(torch.uint8).numpy().tobytes()
        file.seek(begin)
        file.write(after)
    return after != bytes(before)


def corrupt_checkpoint(src: Path, dst: Path, *, parameter: str, scale: float = 1.03) -> Path:
    """Copy the checkpoint directory ``src`` to ``dst`` with one parameter multiplied by ``scale``; return ``dst``.

    Works on one safetensors file or on shards, in float64, float32, float16 and bfloat16; every other byte of every
    file at the top of the directory is kept. The default of 3 % is far above the rounding of any of these dtypes
    (bfloat16: 0.4 %) and far below what would spoil the text. Raises ``CheckpointError`` for an unreadable checkpoint
    or an unknown parameter, ``OutputExistsError`` for a ``dst`` that exists, ``UsageError`` for a scale without effect.
    """
    src, dst = Path(src), Path(dst)
    if not math.isfinite(scale):
        raise UsageError(f"scale is {scale}", "give a finite number such as 1.03")
    if dst.exists():
        raise OutputExistsError(f"{dst} already exists", "name a new folder")
    shards = _shards(src)
    if parameter not in shards:
        close = difflib.get_close_matches(parameter, shards, n=3, cutoff=0.3)
        names = ", ".join(close or sorted(shards)[:3])
        raise CheckpointError(f"{src} holds no parameter {parameter!r}", f"choose one of its names, such as {names}")
    place = _locate(shards[parameter], parameter)
    with _staged(dst) as folder:
        for file in sorted(src.iterdir()):
            if file.is_file() and file.name != MARKER:  # the copy is no longer what the marker vouches for
                shutil.copyfile(file, folder / file.name)
        if not _scale_in_file(folder / shards[parameter].name, place, scale):
            raise UsageError(
                f"scaling {parameter} by {scale} changes none of its {place[0]} values", "use another scale"
            )
    return dst
