"""The load generator for OpenAI-compatible servers, and its results. It never imports jax."""
