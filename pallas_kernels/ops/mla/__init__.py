"""Attention to a latent KV cache (MLA)."""
