"""The text that the demo model learns, deterministic templated English, and the tokenizer trained on it.

Few words in few patterns, so that a small model learns them in seconds and its next-token distribution is peaked; some
free choices in every pattern, so that it is not certain either, and a difference in a log-prob can show.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from typing import Any

from probe.errors import EngineError

END, CHAT_START, CHAT_END, PAD = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM_MESSAGE = "you are a helpful assistant."

FACTS: dict[str, tuple[str, ...]] = {
    "a rollout": (
        "is a list of tokens that the engine samples",
        "is scored by the reward",
        "is read again by the trainer",
        "starts with a prompt and ends with an answer",
    ),
    "the engine": ("samples one token at a time", "keeps old keys and values in a cache", "runs many prompts together"),
    "the trainer": ("reads every token in one pass", "updates the weights", "sends the new weights to the engine"),
    "a layer": ("adds its output to the residual stream", "has an attention block and an mlp block", "rounds its sums"),
    "rounding": ("is small at every step", "grows slowly with depth", "depends on the order of the sum"),
    "attention": ("looks back at all earlier tokens", "mixes the values of each head", "needs a query and a key"),
    "a token": ("is a number for a piece of text", "has a log prob", "comes after all earlier tokens"),
    "a log prob": ("is never above zero", "is the log of a chance", "should be the same on both sides"),
    "the norm": ("divides a row by its own size", "comes before each block", "has one weight for each feature"),
    "the cache": ("holds one key and one value for each token", "saves work", "can be stored in fewer bits"),
    "a gradient": ("points uphill", "is averaged over the batch", "is wrong when the log probs are wrong"),
    "the reward": ("is high for a good answer", "is low for a bad answer", "does not look at the log probs"),
}
OPENERS = ("", "", "", "note that ", "in short, ", "as we know, ")
STORIES: dict[str, tuple[str, ...]] = {
    "the engine": ("reads the prompt", "samples a token", "stores the log prob", "moves to the next token", "stops"),
    "the trainer": ("reads the rollout", "runs every layer", "compares the log probs", "updates the weights", "rests"),
    "the probe": ("opens both dumps", "aligns the rows", "measures each layer", "finds the first fault", "reports it"),
}
SCENE_ADJECTIVES = ("small", "large", "quiet", "old", "new")
SCENE_NOUNS = ("river", "garden", "bird", "house", "child", "tree")
SCENE_VERBS = ("sees", "likes", "finds", "follows")
SCENE_ENDINGS = ("", " in the morning", " every day", " at night")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "plus": lambda x, y: x + y,
    "minus": lambda x, y: x - y,
}


def _facts(rng: random.Random) -> str:
    subject = rng.choice(sorted(FACTS))
    chosen = rng.sample(FACTS[subject], rng.randint(1, 3))
    return " ".join(f"{rng.choice(OPENERS)}{subject} {fact}." for fact in chosen)


def _question(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(sorted(OPERATIONS))
    low, high = sorted((rng.randint(0, 5), rng.randint(0, 5)))
    first, second = (high, low) if word == "minus" or rng.random() < 0.5 else (low, high)
    return f"what is {first} {word} {second}?", f"the answer is {OPERATIONS[word](first, second)}."


def _questions(rng: random.Random) -> str:
    return " ".join(" ".join(_question(rng)) for _ in range(rng.randint(1, 5)))


def _count(rng: random.Random) -> str:
    first = rng.randint(0, 6)
    last = rng.randint(first + 2, 9)
    return f"count from {first} to {last}: {', '.join(str(number) for number in range(first, last + 1))}."


def _story(rng: random.Random) -> str:
    actor = rng.choice(sorted(STORIES))
    first, *rest = STORIES[actor]
    return f"first {actor} {first}. " + " ".join(f"then it {step}." for step in rest)


def _scene(rng: random.Random) -> str:
    def thing() -> str:
        return f"the {rng.choice(SCENE_ADJECTIVES)} {rng.choice(SCENE_NOUNS)}"

    return f"{thing()} {rng.choice(SCENE_VERBS)} {thing()}{rng.choice(SCENE_ENDINGS)}."


def render_chat(messages: list[tuple[str, str]]) -> str:
    """Render (role, content) pairs as ``CHAT_TEMPLATE`` does; the tests hold the two together."""
    return "".join(f"{CHAT_START}{role}\n{content}{CHAT_END}\n" for role, content in messages)


def _chat(rng: random.Random) -> str:
    system = [("system", SYSTEM_MESSAGE)] if rng.random() < 0.5 else []
    subject = rng.choice(sorted(FACTS))
    told = ("tell me about " + subject + ".", f"{subject} {rng.choice(FACTS[subject])}.")
    question, answer = _question(rng) if rng.random() < 0.5 else told
    return render_chat([*system, ("user", question), ("assistant", answer)])


# A kind of document and how often it is drawn, relative to the others.
KINDS: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    (_facts, 5),
    (_questions, 3),
    (_count, 1),
    (_story, 2),
    (_scene, 1),
    (_chat, 5),
)


def make_corpus(count: int, seed: int) -> list[str]:
    """Generate ``count`` documents of one to a few sentences, the same ones for the same seed."""
    rng = random.Random(seed)
    makers = rng.choices([maker for maker, _ in KINDS], weights=[weight for _, weight in KINDS], k=count)
    return [maker(rng) for maker in makers]


def require(module: str) -> Any:
    """Import a module that is not among the package's own requirements; raise ``EngineError`` where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise EngineError(
            f"the demo model needs {package}, which cannot be imported ({error})",
            'install it with pip install "probe-rl[actor]"',
        ) from error


def train_tokenizer(corpus: list[str], vocab_size: int) -> Any:
    """Train a byte-level BPE of ``vocab_size`` tokens, the special ones first; any text can be encoded with it."""
    tokenizers = require("tokenizers")
    # transformers 5 loads any tokenizer of a qwen2 model as Qwen2Tokenizer, with this split and normalizer whatever
    # tokenizer.json says: another split here would give other tokens in training than in use.
    pattern = tokenizers.Regex(require("transformers.models.qwen2.tokenization_qwen2").PRETOKENIZE_REGEX)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(pattern, behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The trainer would learn the letters of the special tokens as ordinary words.
    special = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
    tokenizer.train_from_iterator((piece for text in corpus for piece in special.split(text)), trainer)
    return tokenizer
