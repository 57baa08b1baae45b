"""Worklists: who computes which tile of keys. Made once per step in plain jnp, shared by all layers, sizes static."""
