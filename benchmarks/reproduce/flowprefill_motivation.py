"""Reproduce FlowPrefill's motivation: the task mix (Figure 1, Table 1), cost of chunks (3), gain of batches (4).

Figures 3 and 4 come from the step-time model without simulation: Llama3-8B with the bandwidth of the paper's A100-40GB.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from flowprefill_systems import LLAMA_8B
from page import Table

from jaxserve.sched.api.perf import Load
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim.scenarios import flowprefill

TABLE1 = {  # mean, P99 and standard deviation of prompt lengths, share in %
    "text": (590, 3040, 652, 68),
    "image": (532, 2764, 510, 8),
    "search": (5976, 16635, 3456, 20),
    "file": (6833, 22390, 5186, 4),
}
DRAWN = 100_000  # requests
WINDOW = 10.0  # seconds of a window in which arrivals are counted
A100_40G = 1555e9  # bytes/s (data sheet)
PROMPT = 32_768  # tokens (Figure 3)
CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)


def tasks(args: argparse.Namespace) -> Table:
    """Make Figure 1 and Table 1: prompt lengths of the FlowPrefill mix as drawn, and burstiness of arrivals."""
    drawn = flowprefill(LLAMA_8B.model).draw(args.requests or DRAWN, 6.0, 0)
    rows: list[list[object]] = []
    for task, published in TABLE1.items():
        mine = [one for one in drawn if one.class_ == task]
        lengths = np.array([one.prompt_tokens for one in mine], dtype=float)
        counts = np.bincount((np.array([one.time for one in mine]) // WINDOW).astype(int))[:-1]
        ours = [lengths.mean(), np.percentile(lengths, 99), lengths.std(), 100 * len(mine) / len(drawn)]
        cells = [f"{one:.0f} ({there})" for one, there in zip(ours, published, strict=True)]
        rows.append([task, *cells, float(np.percentile(lengths, 50)), float(counts.var() / counts.mean())])
    titles = ["task", "mean (paper)", "P99 (paper)", "std (paper)", "share, % (paper)", "median"]
    return Table("The task mix (Figure 1, Table 1)", [*titles, f"variance / mean of arrivals in {WINDOW:.0f} s"], rows)


def model() -> Coefficients:
    derived = LLAMA_8B.latency.derived
    assert derived is not None
    return replace(derived, bandwidth=A100_40G).coefficients()


def chunk_efficiency(args: argparse.Namespace) -> Table:
    """Make Figure 3: throughput and latency of a 32K-token prompt by chunk size."""
    truth = model()
    rows = []
    for chunk in CHUNKS:
        steps = [truth.step_time(Load().add_chunk(chunk, done)) for done in range(0, PROMPT, chunk)]
        rows.append([chunk, len(steps), sum(steps), PROMPT / sum(steps), 1e3 * steps[0], 1e3 * steps[-1]])
    whole = float(rows[-1][2])
    titles = ["chunk", "chunks", "latency, s", "tokens/s", "first chunk, ms", "last chunk, ms", "latency × whole"]
    return Table("A prompt of 32K in chunks (Figure 3)", titles, [[*row, float(row[2]) / whole] for row in rows])


def batch_efficiency(args: argparse.Namespace) -> Table:
    """Make Figure 4: throughput and TTFT of batches by prompt length, the TTFT relative to a prompt alone."""
    truth = model()
    rows: list[list[object]] = []
    for length in LENGTHS:
        cells = []
        for batch in BATCHES:
            load = Load()
            for _ in range(batch):
                load = load.add_chunk(length, 0)
            seconds = truth.step_time(load)
            alone = truth.step_time(Load().add_chunk(length, 0))
            cells.append(f"{batch * length / seconds:,.0f} / {seconds / alone:.1f}")
        rows.append([length, *cells])
    titles = ["prompt", *(f"batch of {batch}" for batch in BATCHES)]
    return Table("Tokens/s and normalized TTFT of batches (Figure 4)", titles, rows)


MAKERS = (tasks, chunk_efficiency, batch_efficiency)
