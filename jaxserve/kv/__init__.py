"""KV pages that engine processes give to each other."""
