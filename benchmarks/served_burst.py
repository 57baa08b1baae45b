"""Compare served and simulated attainment by policy under bursts of long prompts among short requests.

    python benchmarks/served_burst.py            # the demo model on --mesh 4x2: a table and JSON

The load is relative to the current speed of this machine: before each run the engine serves a batch of short requests
and a batch of long prompts; let t be the time of the latter. Short requests then arrive as a Poisson process at
`--short` times the rate at which the first batch was served. A burst of long prompts, the size of the second batch,
arrives every t / `--long`. The TTFT objective is t / 2 for short and 2.5 t for long prompts; the TPOT objective is 4
times the TPOT in the batch of short requests.

The arrivals of each served run are then simulated with step times fitted (a) to a profile of the idle engine taken just
before the run, and (b) to the steps of that run. (a) does not include the effect of instances that share cores, nor the
time between steps; (b) includes their means. Each of `--rounds` rounds runs every system, all in one process on the
same executors.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import add_output, clustered, save, submit

from jaxserve.cli.replay import perf_of
from jaxserve.config import ServeConfig
from jaxserve.engine.startup.assemble import Machine, assemble
from jaxserve.report.table import print_table
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.journal import replay
from jaxserve.sched.metrics import Measured, measure, stage_allowance, summarize
from jaxserve.sched.perf.fit import fit
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim import Arrival, Mesh, Options, simulate
from jaxserve.sched.sim.latency import Latency

MESH, LENGTH, CHUNK, ROWS, PAGE = "4x2", 2048, 512, 32, 16
SHORT, LONG = (48, 24), (1400, 8)  # tokens of prompt and output
PILE = 48, 6  # short requests and long prompts of the calibration batches


@dataclass(frozen=True)
class System:
    """A policy with its routing. preempts: whether its steps can be stopped between layers."""

    policy: str
    routing: str = "least_work"
    preempts: bool = False


SYSTEMS = {
    "distserve": System("distserve"),
    "kairos": System("kairos"),
    "flowprefill, chunk": System("flowprefill:no-preempt"),
    "flowprefill, layer": System("flowprefill", preempts=True),
    "deflect:slo": System("distserve", "deflect:slo"),
    "deflect:faster": System("distserve", "deflect:faster"),
    "unified": System("unified", "unified", preempts=True),
}


@dataclass
class Run:
    """One served run."""

    measured: list[Measured]
    steps: list[tuple[Load, float]]
    move: float  # minimum seconds from a first token to the decode instance's next plan; others also wait for a step
    deflections: int
    mape: dict[str, float]


class Bench:
    """Warm executors that serve one system after another."""

    def __init__(self, instances: str, sizes: tuple[int, int, int]) -> None:
        length, chunk, rows = sizes
        self._config = ServeConfig(
            mesh=instances, max_model_len=length, max_num_seqs=rows, max_num_batched_tokens=chunk,
            preempt_boundary="layer", enable_prefix_caching=False,
        )  # fmt: skip
        self._machine = assemble(self._config, lambda *told: None)

    @property
    def points(self) -> list[tuple[Load, float]]:
        return list(self._machine.recipe.points)

    @property
    def pages(self) -> int:
        return self._machine.limits.pages

    def profile(self) -> None:
        """Measure step times again, because other load on the machine may have changed them."""
        self._machine.measure()

    def serve(self, system: System, arrivals: Sequence[Arrival]) -> Run:
        """Serve every arrival at its time."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal"
            config = replace(self._config, policy=system.policy, routing=system.routing, journal=str(path))
            limits = self._machine.limits
            limits = replace(limits, preemptible=system.preempts and limits.preemptible)
            found = asyncio.run(_serve(self._machine.serving(config, limits), arrivals))
            outcome = replay(path.read_text(encoding="utf-8").splitlines(), perf_of)
        assert not outcome.differences, "replaying the journal gives other plans"
        return replace(found, steps=outcome.timed, move=min(outcome.moves, default=0.0))


async def _serve(machine: Machine, arrivals: Sequence[Arrival]) -> Run:
    over: list[Request] = []
    try:
        async with clustered(machine, over) as cluster:
            await submit(cluster, machine.now, arrivals)
    finally:
        await machine.close()
    return Run(
        [measure(one, arrivals[one.id].class_, stage_allowance(one)) for one in over],
        [],
        0.0,
        cluster.deflections,
        {path: one.mape for path, one in cluster.ttft_predictions.accuracy.items() if one.count},
    )


def pile(count: int, shape: tuple[int, int], name: str) -> list[Arrival]:
    return [Arrival(0.0, *shape, NO_SLO, name) for _ in range(count)]


@dataclass(frozen=True)
class Scale:
    """The measured capacity of this machine."""

    short_rate: float  # requests/s
    burst: float  # seconds to the last first token of a batch of long prompts
    tpot: float  # seconds, in a batch of short requests
    move: float

    @classmethod
    def of(cls, bench: Bench) -> Scale:
        bench.serve(SYSTEMS["distserve"], pile(4, SHORT, "short"))  # warm up
        shorts = bench.serve(SYSTEMS["distserve"], pile(PILE[0], SHORT, "short"))
        longs = bench.serve(SYSTEMS["distserve"], pile(PILE[1], LONG, "long"))
        ended = max(one.ended for one in shorts.measured) - shorts.measured[0].arrival
        burst = max(one.ttft for one in longs.measured)
        return cls(PILE[0] / ended, burst, median(one.tpot for one in shorts.measured), longs.move)


def burst(scale: Scale, args: argparse.Namespace, seed: int) -> list[Arrival]:
    """Return Poisson arrivals of short requests, and bursts of long prompts."""
    draw, period = np.random.default_rng(seed), scale.burst / args.long
    short = SLO(0.5 * scale.burst, 4 * scale.tpot)
    long = SLO(2.5 * scale.burst, 4 * scale.tpot)
    made = [
        Arrival((n + 0.5) * period + 1e-4 * k, *LONG, long, "long") for n in range(args.bursts) for k in range(PILE[1])
    ]
    at = 0.0
    while (at := at + draw.exponential(1 / (args.short * scale.short_rate))) < args.bursts * period:
        made.append(Arrival(at, *SHORT, short, "short"))
    return sorted(made, key=lambda one: one.time)


def simulated(
    system: System,
    arrivals: Sequence[Arrival],
    truth: Coefficients,
    bench: Bench,
    move: float,
    sizes: tuple[int, int, int],
) -> list[Measured]:
    """Simulate the same arrivals with the step times `truth`."""
    instances, tensor_parallel = Mesh.parse(MESH).instances, Mesh.parse(MESH).tensor_parallel
    latency = Latency(
        "this engine", kv_bytes_per_token=0, kv_tokens=bench.pages * PAGE, tensor_parallel=tensor_parallel,
        page_size=PAGE, coefficients=truth, link_latency=move, layers=6,
    )  # fmt: skip
    options = Options(
        tokens=sizes[1], rows=sizes[2], routing=system.routing, prefix_caching=False,
        boundary="layer" if system.preempts else "chunk",
    )  # fmt: skip
    report = simulate(list(arrivals), system.policy, Mesh(instances, tensor_parallel), latency, options=options)
    return list(report.measured)


KINDS = ("served", "profile", "steps")


@dataclass(frozen=True)
class Cell:
    """One system in one round."""

    scale: Scale
    run: Run
    measured: dict[str, list[Measured]]  # by kind
    slower: float  # median ratio of measured to profiled step times
    fits: tuple[float, float]  # MAPE of the fits to the profile and to the run's steps


def cell(bench: Bench, system: System, args: argparse.Namespace, seed: int, sizes: tuple[int, int, int]) -> Cell:
    scale = Scale.of(bench)
    bench.profile()
    idle = fit(bench.points)
    arrivals = burst(scale, args, seed)
    run = bench.serve(system, arrivals)
    own = fit(run.steps)
    measured = {
        "served": run.measured,
        "profile": simulated(system, arrivals, idle.coefficients, bench, scale.move, sizes),
        "steps": simulated(system, arrivals, own.coefficients, bench, run.move, sizes),
    }
    predicted = [(idle.coefficients.step_time(load), seconds) for load, seconds in run.steps]
    slower = median(seconds / told for told, seconds in predicted if told > 0)  # a poor fit may predict 0
    return Cell(scale, run, measured, slower, (idle.mape, own.mape))


def shares(measured: Sequence[Measured]) -> dict[str, float]:
    """Return attained shares by class and phase."""
    whole = summarize(measured)
    of = {name: [one for one in measured if one.class_ == name] for name in ("short", "long")}
    return {
        "attained": whole.attained,
        **{name: float(np.mean([one.attained for one in ones])) for name, ones in of.items()},
        "ttft": whole.ttft_attained,
        "tpot": whole.tpot_attained,
        "short_ttft_p90": float(np.quantile([one.ttft for one in of["short"]], 0.9)),
        "long_ttft_p90": float(np.quantile([one.ttft for one in of["long"]], 0.9)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--short", type=float, default=0.35, help="load of short requests, share of capacity [%(default)s]"
    )
    parser.add_argument(
        "--long", type=float, default=0.35, help="load of long prompts, share of capacity [%(default)s]"
    )
    parser.add_argument("--bursts", type=int, default=4, help="bursts per run [%(default)s]")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--systems", default=";".join(SYSTEMS), help="systems to run, separated by ;")
    add_output(parser, "served_burst")
    args = parser.parse_args(argv)
    names, sizes = args.systems.split(";"), (LENGTH, CHUNK, ROWS)
    bench = Bench(MESH, sizes)
    cells: dict[str, list[Cell]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names:
            cells[name].append(cell(bench, SYSTEMS[name], args, number, sizes))
            last = cells[name][-1]
            print(f"round {number + 1} {name}: " + ", ".join(
                f"{kind} {shares(ones)['attained']:.0%}" for kind, ones in last.measured.items()
            ), last.scale, flush=True)  # fmt: skip
    table: dict[str, dict[str, Any]] = {
        name: {
            **{kind: shares([one for each in ones for one in each.measured[kind]]) for kind in KINDS},
            "deflections": sum(each.run.deflections for each in ones),
            "forecast_mape": [each.run.mape for each in ones],
            "scale": [vars(each.scale) for each in ones],
            "steps_by_profile": [each.slower for each in ones],
            "fit_mape": {"profile": [each.fits[0] for each in ones], "steps": [each.fits[1] for each in ones]},
        }
        for name, ones in cells.items()
    }
    rows = [
        (
            name,
            *(f"{one[kind][what]:.0%}" for what in ("attained", "short", "long") for kind in KINDS),
        )
        for name, one in table.items()
    ]
    kinds = ("served", "sim. (a)", "sim. (b)")
    print_table(
        "attained: all, short, long", ("system", *(f"{w} {k}" for w in ("all", "short", "long") for k in kinds)), rows
    )
    slower = [each.slower for ones in cells.values() for each in ones]
    print(f"served steps take {min(slower):.2f} to {max(slower):.2f} times (medians) as long as in the idle profile")
    save(args, {"mesh": MESH, "table": table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
