"""Canonical modules as the table writes them, ``{i}`` being the layer at fault."""

FP32 = ("float32",)
ATTENTION, ROPE = ("layers.{i}.self_attn",), ("layers.{i}.self_attn", "layers.{i}.self_attn.rotary_emb")
Q, K, V, O_PROJ = (f"layers.{{i}}.self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"layers.{{i}}.mlp.{name}_proj" for name in ("gate", "up", "down"))
NORM, POST = "layers.{i}.input_layernorm", "layers.{i}.post_attention_layernorm"
ROUTER, EXPERTS = "layers.{i}.mlp.router", "layers.{i}.mlp.experts"
