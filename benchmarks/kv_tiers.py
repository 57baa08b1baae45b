"""Simulate KV tiers on Mooncake's traces: the share of prompt tokens found in each tier, TTFT and goodput.

    python benchmarks/kv_tiers.py --requests 2000       # tables and JSON
    python benchmarks/kv_tiers.py --served              # also what tiers cost on this machine

hbm, host, disk: share of the prompt tokens found in the prefix caches alone, and fetched from host memory and from disk.
best: the share that a cache without limit would find. Bandwidths are those of `sched.sim.tiers.Tiers` (ASSUMED).

served: output tokens/s of the demo model without any hit, without and with host memory, in alternating rounds; and TTFT
of a returning prompt that is computed, or fetched from host memory or disk.
"""

from __future__ import annotations

import argparse
import gzip
import json
import queue
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import add_output, save

from jaxserve.config import ServeConfig, load_yaml, preset
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.assemble import Machine, assemble
from jaxserve.report.table import print_table
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Delta
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.sim import Arrival
from jaxserve.sched.sim.latency import Latency
from jaxserve.sched.sim.options import Options
from jaxserve.sched.sim.simulate import simulate
from jaxserve.sched.sim.tiers import Tiers
from jaxserve.sched.sim.traces import load_trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake"
FILES = {
    "conversation": TRACES / "conversation_trace.head40min.jsonl.gz",
    "synthetic": TRACES / "synthetic_trace.head12min.jsonl.gz",
}
GB, TB = 10**9, 10**12
SIZES = {
    "HBM alone": Tiers(),
    "+ 256 GB": Tiers(256 * GB),
    "+ 1 TB": Tiers(1 * TB),
    "+ 1 TB + 8 TB disk": Tiers(1 * TB, 8 * TB),
}


def best(arrivals: Sequence[Arrival]) -> float:
    """Return the share of prompt tokens that a cache without limit finds."""
    seen: set[Any] = set()
    found = total = 0
    for one in arrivals:
        total += one.prompt_tokens
        for name in one.hash_ids:
            found += int(one.block) if name in seen else 0
            seen.add(name)
    return found / total
