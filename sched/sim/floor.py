"""The throughput floor: saturated loads with unattainable objectives, and the throughput of policies on them.

A policy may leave decodes out of a step, or shorten a step, only if that lets some other row keep its
objective. If not, it must serve as many tokens per second as plain batching does on the same load.
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

# About a Llama of 185 M parameters in float32 on a few CPU cores: 36 ms per decode step plus 3 ms per row, 0.6 s for a
# chunk of 256 prompt tokens. Not a preset: it provides steps that are long relative to common objectives.
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

LEAST = 0.95  # of the tokens per second of plain batching
REGIMES = ("none", "below", "above", "between", "first", "both", "default", "classes")


class FloorCase(NamedTuple):
    """A load that saturates `rows` rows. Lengths in tokens."""

    rows: int
    tokens: int  # limit of a step
    requests: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]

    @property
    def prompt(self) -> float:
        """Length of a typical prompt."""
        return sqrt(self.prompts[0] * self.prompts[1])

    @property
    def output(self) -> float:
        return sum(self.outputs) / 2


ACCELERATOR = FloorCase(rows=32, tokens=8192, requests=128, prompts=(128, 4096), outputs=(32, 96))
SMALL = FloorCase(rows=16, tokens=256, requests=64, prompts=(16, 512), outputs=(24, 72))


class Floor(NamedTuple):
    """The outcome of one run."""

    tokens: float  # output tokens per second
    attained: float  # requests per second that had objectives and attained them
    gap: float  # seconds: the longest time since its last token that any running decode had waited
    full: float  # seconds of a step of all rows and a whole chunk of prompt tokens


def shape_of(latency: Latency) -> FloorCase:
    return SMALL if latency is CPU else ACCELERATOR


def decode_step(latency: Latency, shape: FloorCase, rows: int) -> float:
    """Predict the seconds of a step that decodes `rows` typical rows."""
    context = int(shape.prompt + shape.output / 2)
    load = Load(0, rows, 0.0, context, rows * context)
    return float(latency.solve().step_time(latency.buckets.placed(load)[1]))


def alone(latency: Latency, shape: FloorCase, tokens: float) -> float:
    """Predict the seconds that a prompt takes on an idle instance."""
    return float(latency.solve().prefill_times(np.array([tokens]), np.zeros(1), shape.tokens)[0])


def objectives(regime: str, latency: Latency, shape: FloorCase) -> tuple[SLO, ...]:
    """Return the classes of objectives of a regime, all equally frequent.

    A TTFT combined with an unattainable TPOT is ample, and vice versa.

    none: no objectives. below: TPOT of half a step of one row. above: TPOT just above a step of one row.
    between: TPOT halfway between steps of one row and of all rows. first: TTFT of half the time of the
    shortest prompt alone. both: below and first. default: the default SLO of a server. classes: between
    and none.
    """
    single, every = decode_step(latency, shape, 1), decode_step(latency, shape, shape.rows)
    ample, late = 40.0 * shape.rows * alone(latency, shape, shape.prompt), 0.5 * alone(latency, shape, shape.prompts[0])
    between = SLO(ample, (single + every) / 2)
    return {
        "none": (NO_SLO,),
        "below": (SLO(ample, 0.5 * single),),
        "above": (SLO(ample, single + 0.1 * (every - single)),),
        "between": (between,),
        "first": (SLO(late, 4.0 * every),),
        "both": (SLO(late, 0.5 * single),),
        "default": (SLO(),),
        "classes": (between, NO_SLO),
    }[regime]


def arrivals(regime: str, latency: Latency, shape: FloorCase, instances: int = 1, seed: int = 0) -> list[Arrival]:
    """Draw requests at one and a half times the rate at which plain batching serves them."""
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
    """A policy that records how long the running decodes have waited. Writer of `waits`."""

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

    watched.__name__ = policy  # selects the router
    report = simulate(load, watched, mesh, latency, options=options)
    attained = sum(request.attained and request.promised for request in report.measured)
    context = int(np.mean([request.prompt for request in report.measured]))
    rows = options.rows
    full = latency.solve().step_time(Load(options.tokens, rows, 0.0, context, rows * context))
    tokens = sum(request.output for request in report.measured)
    return Floor(tokens / report.ended, attained / report.ended, max(waits, default=0.0), full)


def floor(policy: str, latency: Latency, regime: str, *, split: bool = False, seed: int = 0) -> Floor:
    """Run one policy in one regime, on one mixed instance or on two prefill and two decode instances."""
    shape = shape_of(latency)
    mesh = Mesh(4 if split else 1, latency.tensor_parallel)
    load = arrivals(regime, latency, shape, 2 if split else 1, seed)
    need = shape.rows * (shape.prompts[1] + shape.outputs[1])  # room for all rows: the floor does not test KV pressure
    pages = max(latency.kv_tokens, need) // latency.page_size + shape.rows
    options = Options(rows=shape.rows, tokens=shape.tokens, noise=0.0, pages=pages)
    return serve(policy, latency, load, mesh, options)


def plain(split: bool) -> str:
    """Return the policy that leaves nothing out. With prefill and decode split, `vllm` would do the same."""
    return "distserve" if split else "vllm"


def kept(result: Floor, base: Floor) -> bool:
    """Return whether the law holds: as many tokens as plain batching, or more attained requests."""
    return result.tokens >= LEAST * base.tokens or result.attained > base.attained
