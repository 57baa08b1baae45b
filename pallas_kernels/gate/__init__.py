"""The compile gate: kernels and engine steps, compiled for a device that is not there, and held to recorded bounds.

Run it with `python -m pallas_kernels.gate`; docs/reference/kernels.md says what it checks. Nothing here imports jax
before `__main__` has set its environment.
"""
