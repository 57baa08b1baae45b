"""Simulation: the scheduler that serves, on a virtual clock and a model of the devices."""

from .latency import Latency
from .options import Mesh, Options
from .simulate import Report, simulate
from .sweep import sweep
from .traces import load_trace
from .workload import NAMED, Arrival, Workload

__all__ = ["NAMED", "Arrival", "Latency", "Mesh", "Options", "Report", "Workload", "load_trace", "simulate", "sweep"]
