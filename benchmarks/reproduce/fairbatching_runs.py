"""Simulations for FairBatching's tables: a system on a workload at a rate.

Effective requests/s are the rate times the share of requests whose TTFT and worst mean time per token (the paper's max
over k of (t_k - t_0)/k) attain the SLO; refused requests do not. Step times are those of the presets with 1.3 % noise;
the schedulers know the presets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # import this checkout, installed or not

import numpy as np
import page

from jaxserve.config import preset
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.metrics import FINISHED, ROUNDING
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.sim import NAMED, Arrival, Latency, Mesh, Options, Report, Workload, load_trace, simulate
from jaxserve.yamlio import load_yaml

H20, A800 = "qwen3-14b-h20", "llama3-8b-a800"
MODELS = {  # Table 1
    "Llama3.1-8B, A800": A800,
    "Qwen3-14B, H20": H20,
    "Qwen3-32B, 2 H20": "qwen3-32b-h20-tp2",
    "Llama3.3-70B, 4 H20": "llama3.3-70b-h20-tp4",
}
WORKLOADS = {"burstgpt": "BurstGPT", "qwen": "QwenTrace", "azure": "Azure"}
SLOS = {"burstgpt": (0.5, 0.05), "qwen": (0.5, 0.05), "azure": (2.0, 0.05)}  # Table 2: TTFT, TPOT
PROMPTS = {"burstgpt": 688.0, "qwen": 892.0, "azure": 1604.0}  # Table 2: mean tokens
SHARES = (0.35, 0.5, 0.65, 0.8)  # of the rate that prefill alone would allow
TUNED = ("sarathi", "sarathi:share=0.8", "sarathi:share=1.0")  # token budgets; the paper tunes them for each case
MAIN = {"vLLM": "vllm", "Sarathi": "sarathi", "FB": "fairbatching", "FB-PAB": "fairbatching/pab:refuse"}
NOISE = 0.013


class Job(NamedTuple):
    """One simulation. `system` is POLICY, POLICY/ADMISSION or POLICY/ADMISSION/ROUTER."""

    system: str
    workload: str
    rate: float
    requests: int
    model: str = H20
    slo: tuple[float, float] = (0.5, 0.05)
    instances: int = 1
    trace: str = ""


class Result(NamedTuple):
    job: Job
    ttft: tuple[float, ...]  # seconds; infinite if refused
    tpot: tuple[float, ...]  # worst mean time per token of each request; 0 if it has one token

    def effective(self, slo: tuple[float, float] | None = None) -> float:
        """Return the requests per second that attain `slo`, by default the job's own."""
        ttft, tpot = slo or self.job.slo
        kept = (np.array(self.ttft) <= ttft + ROUNDING) & (np.array(self.tpot) <= tpot + ROUNDING)
        return self.job.rate * float(kept.mean())


def report(job: Job, recorder: Recorder | None = None) -> Report:
    policy, admission, routing = (*job.system.split("/"), "", "")[:3]
    latency = load_yaml(preset("latency", job.model), Latency)
    options = Options(
        noise=NOISE,
        admission=admission or "none",
        routing=routing or "least_work",
        stale=0.1 if job.instances > 1 else 0.0,
        routing_delay=0.005 if job.instances > 1 else 0.0,
    )
    mesh = Mesh(job.instances, latency.tensor_parallel, colocated=True)
    return simulate(
        arrivals(job), policy, mesh, latency, qps=job.rate, num_requests=job.requests, options=options,
        recorder=recorder,
    )  # fmt: skip


def run(job: Job) -> Result:
    measured = report(job).measured
    over = [one if one.reason in FINISHED else one._replace(ttft=float("inf")) for one in measured]
    return Result(job, tuple(one.ttft for one in over), tuple(np.nan_to_num([one.worst_tpot for one in over]).tolist()))


def every(args: argparse.Namespace, jobs: Sequence[Job]) -> list[Result]:
    return page.spread(args, run, jobs)


def arrivals(job: Job) -> Workload | list[Arrival]:
    ttft, tpot = job.slo
    if job.trace:
        return load_trace(job.trace, slo=SLO(ttft, tpot), num_prompts=job.requests)
    drawn = NAMED[f"fairbatching-{job.workload}"]
    assert isinstance(drawn, Workload)
    return replace(drawn, ttft=ttft, tpot=tpot)


def rates(workload: str, model: str, shares: Iterable[float], instances: int = 1) -> list[float]:
    """Return `shares` of the rate (requests/s) at which prefill of mean-length prompts saturates the instances."""
    truth = load_yaml(preset("latency", model), Latency).solve()
    alone = float(truth.prefill_times(np.array([PROMPTS[workload]]), np.zeros(1), 8192)[0])
    return [round(share * instances / alone, 2) for share in shares]


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs))
