"""Deciding: requests, plans, policies, and the loop that turns one into the other.

The standard library and numpy, never jax, never a socket, never a clock but `Executor.now`. The folder is
imported as `jaxserve.sched`, because the standard library owns the name `sched`.
"""
