"""Load on any OpenAI-compatible endpoint, and what came of it. A client: it never imports jax."""
