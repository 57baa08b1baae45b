"""Scheduling: requests, policies, plans, and the loop that turns requests into plans.

Imports the standard library and numpy, never jax or a socket, and reads no clock but
`Executor.now`. The folder is imported as `jaxserve.sched`, because the standard library owns the
name `sched`.
"""
