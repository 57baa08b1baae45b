"""Small latency presets and workloads."""

from __future__ import annotations

from pathlib import Path

from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import Latency, Workload
from jaxserve.sched.sim.workload import Lengths

ROOT = Path(__file__).resolve().parents[3]
TINY = Latency(
    name="tiny",
    kv_bytes_per_token=1000,
    kv_tokens=160,
    page_size=4,
    coefficients=Coefficients(1e-3, 1e-4, 1e-5, 1e-8, 1e-7, 1e-8),
    link_bandwidth=1e9,
    noise=0.05,
)
CHAT = Workload("chat", Lengths("uniform", low=1, high=60), Lengths("uniform", low=1, high=30), ttft=0.1, tpot=0.01)
