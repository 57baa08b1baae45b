"""The throughput floor: saturated loads whose objectives cannot be kept, and what policies make of them.

A policy may leave decoding rows out of a step, or cut a step short, only where that makes some other row keep its
objective. Where it does not, a policy must serve as many tokens per second as plain batching does on the same load.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt
from typing import NamedTuple

import numpy as np

from .. import policies
from ..api.perf import Load
from ..api.policy import Decision, Policy, View
from ..api.slo import NO_SLO, SLO
from ..perf.buckets import Buckets
from ..perf.model import Coefficients
from .latency import Latency
from .options import Mesh, Options
from .simulate import simulate
from .workload import Arrival

# About a Llama of 185 M parameters in float32 on a few CPU cores: a decode step of 36 ms and 3 ms a row, 0.6 s for a
# chunk of 256 prompt tokens. Not a preset: it is there for steps that are long beside common objectives.
CPU = Latency(
    "cpu-185m",
    kv_bytes_per_token=49152,
    kv_tokens=65536,
    page_size=16,
    chunk=256,
    coefficients=Coefficients(0.036, 2.2e-3, 3e-3, 0.0, 5e-8, 5e-8),
    layers=12,
    buckets=Buckets((1, 2, 4, 8, 16, 32)),
)

LEAST = 0.95  # of plain batching's tokens per second
REGIMES = ("none", "below", "above", "between", "first", "both", "default", "classes")


class Shape(NamedTuple):
    """What is served: requests to saturate `rows` rows. Lengths in tokens."""

    rows: int
    tokens: int  # of a step, at most
    requests: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]

    @property
    def prompt(self) -> float:
        """Of a typical request."""
        return sqrt(self.prompts[0] * self.prompts[1])

    @property
    def output(self) -> float:
        return sum(self.outputs) / 2


ACCELERATOR = Shape(rows=32, tokens=8192, requests=128, prompts=(128, 4096), outputs=(32, 96))
SMALL = Shape(rows=16, tokens=256, requests=64, prompts=(16, 512), outputs=(24, 72))


class Floor(NamedTuple):
    """What came out of one run."""

    tokens: float  # output tokens per second
    attained: float  # requests per second that were promised something and got it
    gap: float  # seconds: the longest that a row which could decode had waited since its last token
    full: float  # seconds of a step of all rows and a whole chunk of prompts


def shape_of(latency: Latency) -> Shape:
    return SMALL if latency is CPU else ACCELERATOR


def decode_step(latency: Latency, shape: Shape, rows: int) -> float:
    """Predicted seconds of a step that decodes so many typical rows."""
    context = int(shape.prompt + shape.output / 2)
    load = Load(0, rows, 0.0, context, rows * context)
    return float(latency.solve().step_time(latency.buckets.placed(load)[1]))


def alone(latency: Latency, shape: Shape, tokens: float) -> float:
    """Predicted seconds of a prompt on an idle instance."""
    return float(latency.solve().prefill_times(np.array([tokens]), np.zeros(1), shape.tokens)[0])


def objectives(regime: str, latency: Latency, shape: Shape) -> tuple[SLO, ...]:
    """The classes of objectives of a regime, as often as one another. TTFT beside a hopeless TPOT is ample, and the
    other way round.

    none: no objectives. below: TPOT of half a step of one row. above: just above a step of one row. between: halfway
    between steps of one row and of all. first: TTFT of half what the prompt takes alone. both: as below and first.
    default: the SLO that a server promises by default. classes: as between, and none.
    """
    one, every = decode_step(latency, shape, 1), decode_step(latency, shape, shape.rows)
    ample, late = 40.0 * shape.rows * alone(latency, shape, shape.prompt), 0.5 * alone(latency, shape, shape.prompts[0])
    between = SLO(ample, (one + every) / 2)
    return {
        "none": (NO_SLO,),
        "below": (SLO(ample, 0.5 * one),),
        "above": (SLO(ample, one + 0.1 * (every - one)),),
        "between": (between,),
        "first": (SLO(late, 4.0 * every),),
        "both": (SLO(late, 0.5 * one),),
        "default": (SLO(),),
        "classes": (between, NO_SLO),
    }[regime]


def arrivals(regime: str, latency: Latency, shape: Shape, instances: int = 1, seed: int = 0) -> list[Arrival]:
    """Requests that come at one and a half times the rate at which plain batching serves them."""
    random, slos = np.random.default_rng(seed), objectives(regime, latency, shape)
    count = shape.requests * instances
    prompts = np.exp(random.uniform(log(shape.prompts[0]), log(shape.prompts[1]), count)).astype(int).tolist()
    outputs = random.integers(*shape.outputs, count).tolist()
    each = float(np.mean([alone(latency, shape, prompt) for prompt in prompts]))
    each += shape.output * decode_step(latency, shape, shape.rows) / shape.rows
    times = np.cumsum(random.exponential(each / 1.5 / instances, count)).tolist()
    drawn = zip(times, prompts, outputs, strict=True)
    return [Arrival(time, prompt, output, slos[id % len(slos)]) for id, (time, prompt, output) in enumerate(drawn)]


class _Watched:
    """A policy, and how long the rows that it sees decoding had waited at most. Writer of `waits`."""

    def __init__(self, policy: Policy, waits: list[float]) -> None:
        self._policy = policy
        self._waits = waits

    def decide(self, view: View) -> Decision:
        if view.running is None and len(view.decode):
            last = view.decode.last(np.arange(len(view.decode)))
            self._waits.append(float(view.start - np.nanmin(last, initial=view.start)))
        return self._policy.decide(view)


def serve(policy: str, latency: Latency, load: Sequence[Arrival], mesh: Mesh, options: Options) -> Floor:
    """Serve a load to its end."""
    waits: list[float] = []

    def watched() -> Policy:
        return _Watched(policies.make(policy), waits)

    watched.__name__ = policy  # what its routing goes by
    report = simulate(load, watched, mesh, latency, options=options)
    attained = sum(one.attained and one.promised for one in report.measured)
    context = int(np.mean([one.prompt for one in report.measured]))
    rows = options.rows
    full = latency.solve().step_time(Load(options.tokens, rows, 0.0, context, rows * context))
    tokens = sum(one.output for one in report.measured)
    return Floor(tokens / report.ended, attained / report.ended, max(waits, default=0.0), full)


def floor(policy: str, latency: Latency, regime: str, *, split: bool = False, seed: int = 0) -> Floor:
    """One policy in one regime: on one mixed instance, or on two that prefill and two that decode."""
    shape = shape_of(latency)
    mesh = Mesh(4 if split else 1, latency.tensor_parallel)
    load = arrivals(regime, latency, shape, 2 if split else 1, seed)
    need = shape.rows * (shape.prompts[1] + shape.outputs[1])  # a pool for all rows: what KV costs is not asked here
    pages = max(latency.kv_tokens, need) // latency.page_size + shape.rows
    options = Options(rows=shape.rows, tokens=shape.tokens, noise=0.0, pages=pages)
    return serve(policy, latency, load, mesh, options)


def plain(split: bool) -> str:
    """The policy that leaves nothing out. Where prefill and decode are split `vllm` would do the same."""
    return "distserve" if split else "vllm"


def kept(found: Floor, base: Floor) -> bool:
    """The law: as many tokens as plain batching, or fewer for the sake of requests that attain their objectives."""
    return found.tokens >= LEAST * base.tokens or found.attained > base.attained
