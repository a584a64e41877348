"""A stock TRL GRPO script: nothing in it knows of probe."""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model, output = sys.argv[1:3]
prompts = ["the cat sat on", "a dog ran to", "one two three", "red green blue"]


def longer_is_better(completions, **kwargs):
    return [float(len(text)) for text in completions]


settings = GRPOConfig(
    output_dir=output,
    max_steps=2,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    learning_rate=1e-4,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    bf16=False,
)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
    processing_class=AutoTokenizer.from_pretrained(model),
    reward_funcs=longer_is_better,
    args=settings,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
)
trainer.train()
trainer.save_model(output)
