"""Request mixes to compare policies: tasks, lengths, arrival times and objectives, scaled to a machine's step times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np

from jaxserve.bench.load import Call, Objective
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim import Arrival

ROWS = 8  # batch size at which the cost of a decode token is computed
VOCABULARY = (8, 4000)  # range of token ids in prompts
SPREAD = {"prompt": 0.4, "output": 0.5}  # lengths are uniform within this share of their mean


@dataclass(frozen=True)
class Task:
    """A class of requests.

    prompt: mean length, in chunks of a full step. output: mean length, relative to the other tasks. ttft: multiple of a
    full step or of the prompt's time alone, whichever is longer. tpot: multiple of a step of ROWS running decodes.
    """

    name: str
    share: float
    prompt: float
    output: float
    ttft: float
    tpot: float


@dataclass(frozen=True)
class Mix:
    """A mixture of tasks.

    load: factor on `--load`. tiers: whether tasks are tiers of the server, named by requests; otherwise requests carry
    their objectives. burst: number of requests of the last task that arrive at once. shape: of the gamma-distributed
    gaps between the others; 1 is Poisson.
    """

    tasks: tuple[Task, ...]
    load: float = 1.0
    tiers: bool = False
    burst: int = 1
    shape: float = 1.0


CHAT, DOCUMENT = Task("chat", 0.85, 0.25, 1.0, 3.0, 4.0), Task("document", 0.15, 2.5, 0.5, 6.0, 6.0)
MIXES = {
    "chat": Mix((CHAT, DOCUMENT)),
    "tasks": Mix(
        (
            Task("code", 0.35, 0.5, 0.4, 2.0, 3.0),
            Task("chat", 0.35, 0.25, 1.0, 3.0, 4.0),
            Task("summary", 0.15, 2.5, 0.7, 6.0, 6.0),
            Task("batch", 0.15, 1.0, 1.5, 40.0, 10.0),
        ),
        tiers=True,
    ),
    "bursts": Mix((CHAT, DOCUMENT), burst=4, shape=0.3),
    "half": Mix((CHAT, DOCUMENT), load=0.5),
}


@dataclass(frozen=True)
class Shape:
    """One task on one machine: mean tokens, and objectives in seconds."""

    name: str
    prompt: int
    output: int
    ttft: float
    tpot: float


@dataclass(frozen=True)
class Scale:
    """A mix on one machine. rate: requests/s sent. capacity: requests/s of all instances, predicted by the profile."""

    shapes: tuple[Shape, ...]
    rate: float
    capacity: float

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Scale:
        """Restore a scale from `record`."""
        return cls(tuple(Shape(**one) for one in record["shapes"]), record["rate"], record["capacity"])


def scaled(mix: Mix, step_time: Callable[[Load], float], chunk: int, instances: int, load: float) -> Scale:
    """Scale a mix to a machine.

    Output lengths are chosen so that decoding and prefill are equal work, one half of the instances each. The rate is
    `load` times the capacity of all instances according to `step_time`.
    """
    prompts = {task.name: round(task.prompt * chunk) for task in mix.tasks}
    alone = {name: _alone(step_time, tokens, chunk) for name, tokens in prompts.items()}
    work = sum(task.share * alone[task.name] for task in mix.tasks)
    context = round(sum(task.share * prompts[task.name] for task in mix.tasks))
    step = step_time(Load(decode=ROWS, longest=context, context=ROWS * context))
    unit = work / (step / ROWS) / sum(task.share * task.output for task in mix.tasks)
    full = step_time(Load().add_chunk(chunk, 0))
    shapes = tuple(
        Shape(
            task.name, prompts[task.name], max(4, round(task.output * unit)),
            task.ttft * max(full, alone[task.name]), task.tpot * step,
        )
        for task in mix.tasks
    )  # fmt: skip
    capacity = instances / (2 * work)
    return Scale(shapes, load * mix.load * capacity, capacity)


def _alone(step_time: Callable[[Load], float], tokens: int, chunk: int) -> float:
    """Return the seconds of a prompt that is computed alone."""
    starts = range(0, tokens, chunk)
    return sum(step_time(Load().add_chunk(min(chunk, tokens - start), start)) for start in starts)


def calls(mix: Mix, scale: Scale, count: int, seed: int, longest: int, tbt: float | None = None) -> list[Call]:
    """Draw the requests of a mix, the same for every policy.

    count: at full load; scaled by the mix's load. longest: maximum of prompt plus output, tokens. tbt: a TBT to ask
    for in addition, as a share of the TPOT.
    """
    count = max(len(mix.tasks), round(count * mix.load))
    draw = np.random.default_rng(seed)
    numbers = _numbers(mix, count)
    kinds = draw.permutation(np.repeat(np.arange(len(numbers)), numbers))
    gaps = draw.gamma(mix.shape, 1.0 / mix.shape, count)
    times = np.cumsum(gaps) * (count / scale.rate) / gaps.sum()
    if mix.burst > 1:
        last = np.flatnonzero(kinds == len(mix.tasks) - 1)
        bursts = -(-len(last) // mix.burst)
        times[last] = (np.arange(len(last)) // mix.burst + 0.5) * (count / scale.rate) / bursts
    made = [_call(scale.shapes[kind], float(at), draw, longest) for kind, at in zip(kinds, times, strict=True)]
    if tbt is not None:
        made = [replace(call, slo=replace(call.slo, tbt_slo_ms=tbt * (call.slo.tpot_slo_ms or inf))) for call in made]
    return sorted(made, key=lambda call: call.at)


def _numbers(mix: Mix, count: int) -> list[int]:
    """Return the number of requests of each task: exact shares, so that the load does not depend on the draw."""
    numbers = [max(1, round(task.share * count)) for task in mix.tasks]
    numbers[0] = max(1, count - sum(numbers[1:]))
    return numbers


def _call(shape: Shape, at: float, draw: np.random.Generator, longest: int) -> Call:
    prompt, output = (
        max(1, round(mean * draw.uniform(1 - SPREAD[what], 1 + SPREAD[what])))
        for what, mean in (("prompt", shape.prompt), ("output", shape.output))
    )
    prompt = min(prompt, longest - 2)
    ids = tuple(draw.integers(*VOCABULARY, prompt).tolist())
    slo = Objective(1e3 * shape.ttft, 1e3 * shape.tpot, shape.name)
    return Call(at, ids, prompt, max(2, min(output, longest - prompt)), slo)


def arrivals(made: Sequence[Call]) -> list[Arrival]:
    """Convert the calls to arrivals of the simulator."""
    return [
        Arrival(call.at, call.prompt_tokens, call.output_tokens, _slo(call.slo), call.slo.name) for call in made
    ]  # fmt: skip


def _slo(objective: Objective) -> SLO:
    assert objective.ttft_slo_ms is not None and objective.tpot_slo_ms is not None
    tbt = None if objective.tbt_slo_ms is None else objective.tbt_slo_ms / 1e3
    return SLO(objective.ttft_slo_ms / 1e3, objective.tpot_slo_ms / 1e3, tbt)
