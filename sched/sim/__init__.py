"""Simulation: the serving scheduler on a virtual clock, with modeled devices."""

from .latency import Latency
from .options import Mesh, Options
from .scenarios import NAMED
from .simulate import Report, simulate
from .sweep import goodput_search, sweep
from .traces import load_trace
from .workload import Arrival, Mix, Workload

__all__ = [
    "NAMED",
    "Arrival",
    "Latency",
    "Mesh",
    "Mix",
    "Options",
    "Report",
    "Workload",
    "goodput_search",
    "load_trace",
    "simulate",
    "sweep",
]
