"""Model and cache sizes shared by the capacity tests."""

from __future__ import annotations

from typing import Any

# V=96, E=32, L=2, H=4, K=2, D=8, F=64
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
KV = 2 * 2 * 2 * 8 * 4  # k and v, L, K, D, float32
