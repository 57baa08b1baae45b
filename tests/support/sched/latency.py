"""Latency models shared by the policy tests."""

from __future__ import annotations

from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim.latency import Latency

TRUTH = Coefficients(fixed=0.002, prefill=1e-4, decode=1e-5, quadratic=0.0, longest=1e-7, context=0.0)
LATENCY = Latency("toy", kv_bytes_per_token=1000, kv_tokens=400_000, coefficients=TRUTH, layers=10)
