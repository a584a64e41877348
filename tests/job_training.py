"""A training script that knows nothing of probe, for tests/test_job_models.py: ``job_training.py MODEL RESULT``.

It generates with the model, trains it on what it got (dropout on, two micro-batches per step), and writes every loss
and gradient to RESULT, bit by bit.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

STEPS, PROMPTS = 3, [[5, 6, 7], [9, 10, 11], [5, 6, 8]]


def main(checkpoint: str, result: str) -> None:
    """Train for some steps."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attention_dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept = []
    for _ in range(STEPS):
        model.eval()
        prompts = torch.tensor(PROMPTS)
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, do_sample=True)
        model.train()
        for micro_batch in ids.split(2):
            labels = micro_batch.clone()
            labels[:, : prompts.shape[1]] = -100
            loss = model(input_ids=micro_batch, labels=labels).loss
            loss.backward()
            kept.append(loss.detach().clone())
        kept += [ids, *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    torch.save(kept, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
