"""A plain Megatron-core script: MODEL STATE.pt ROLLOUT.jsonl -> the mean log-prob of the responses.

Nothing in it knows of probe. MODEL's config.json says what the model looks like; STATE.pt is a state dict of GPTModel.
"""

import json
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def build(hf: dict) -> GPTModel:
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    layers = [layer] * config.num_layers
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm),
        vocab_size=-(-hf["vocab_size"] // 128) * 128,
        max_sequence_length=hf["max_position_embeddings"],
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf["rope_theta"],
    )


def main() -> None:
    folder, state, rollout = map(Path, sys.argv[1:4])
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model = build(json.loads((folder / "config.json").read_text())).eval()
    model.load_state_dict(torch.load(state))

    rows = [json.loads(line) for line in rollout.read_text().splitlines()]
    whole = [row["prompt"] + row["response"] for row in rows]
    length = max(map(len, whole))
    ids = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens in whole])
    positions = torch.arange(length).expand(len(ids), -1)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)  # Megatron's True hides a key
    hidden = hidden | (torch.arange(length) >= torch.tensor([[len(tokens)] for tokens in whole])[..., None])
    with torch.no_grad():
        logits = model(ids, positions, hidden[:, None])
    scores = torch.log_softmax(logits.float(), -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    found = [s[len(row["prompt"]) - 1 : len(t) - 1] for s, row, t in zip(scores, rows, whole)]
    print("mean log-prob of the responses", torch.cat(found).mean().item())


if __name__ == "__main__":
    main()
