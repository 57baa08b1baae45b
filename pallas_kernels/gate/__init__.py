"""The compile gate: compile kernels and engine steps for an absent device, and check them against recorded bounds.

Run it with `python -m pallas_kernels.gate`; docs/reference/kernels.md says what it checks. Nothing
here imports jax before `__main__` has set its environment.
"""
