"""Timings of kernels and of other implementations, for stages A and B."""
