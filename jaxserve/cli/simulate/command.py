"""`jaxserve simulate`: simulate policies on workloads, in seconds and without a device."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.cli import timeline
from jaxserve.cli.simulate.flags import add_arguments
from jaxserve.cli.simulate.pool import count, processes
from jaxserve.cli.simulate.report import goodput, print_report, write_report
from jaxserve.cli.simulate.results import VALUES, Results
from jaxserve.cli.simulate.workloads import common_slo, describe, find_workload
from jaxserve.config import preset
from jaxserve.errors import InvalidValue
from jaxserve.report import progress
from jaxserve.sched import admission, policies, routing
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.sim import Arrival, Latency, Mesh, Mix, Options, Report, Workload, load_trace, simulate, sweep
from jaxserve.sched.sim.bounds import STAYING, bounds, goodput_bounds
from jaxserve.sched.sim.simulate import check_mesh
from jaxserve.sched.sim.sweep import Case, Cell, Run, goodput_search
from jaxserve.sched.sim.tiers import Tiers
from jaxserve.sched.sim.workload import for_server
from jaxserve.whole_file import check_output
from jaxserve.yamlio import load_yaml

__all__ = ["add_arguments", "main", "parse_policies", "parse_rates", "processes"]


PATIENCE = 0.5  # seconds before the first line, which an error of the settings should not follow


class Study(NamedTuple):
    """The simulations that a command line describes."""

    policies: list[str]
    workload: Workload | Mix | list[Arrival]
    mesh: Mesh
    latency: Latency
    options: Options
    rates: list[float | None]
    seeds: range
    num_requests: int | None

    @property
    def cases(self) -> int:
        """The simulations of a sweep."""
        return len(self.policies) * len(self.rates) * len(self.seeds)


class _Tick:
    """Draws the progress of all simulations: those that ended, and the shares of those that run.

    Prints a line first that says what runs, if it does not end at once.
    """

    def __init__(self, draw: Callable[..., None], announcement: str, total: int) -> None:
        self._bar = draw
        self._announcement = announcement
        self._began = time.monotonic()
        self._total = total

    def __call__(self, done: float, total: int = 0) -> None:
        """Take the number of simulations done, with parts of running ones, and of those known to be needed."""
        self._total = max(total, self._total)
        if self._announcement and time.monotonic() - self._began > PATIENCE:
            print(self._announcement, file=sys.stderr, flush=True)
            self._announcement = ""
        self._bar(done, self._total)


def _announcement(args: argparse.Namespace, study: Study) -> str:
    what = f"{', '.join(study.policies)} on {args.workload}, {study.mesh} of {study.latency.name}"
    if args.goodput:
        return f"searching for the goodput of {what}; each step simulates {len(study.seeds)} seeds of each policy"
    workers = min(count(args.jobs), study.cases)
    number = f"{study.cases} simulation{'s' * (study.cases > 1)}"
    return f"simulating {what}: {number} on {workers} process{'es' * (workers > 1)}"


def _run(args: argparse.Namespace, study: Study, recorder: Recorder | None, tick: _Tick) -> tuple[list[Report], bool]:
    """Return the reports, and whether Ctrl-C ended the run: then those of the simulations that had ended.

    Each is shown as it ends. Raises KeyboardInterrupt if none had.
    """
    if not args.goodput and study.cases == 1:
        report = simulate(
            study.workload,
            study.policies[0],
            study.mesh,
            study.latency,
            study.seeds[0],
            qps=study.rates[0],
            num_requests=study.num_requests,
            options=study.options,
            progress=lambda done, total: tick(done / total),
            recorder=recorder,
        )
        return [report], False
    ended: list[Report] = []
    with processes(args.jobs, tick) as run:

        def shown(cell: Cell, cases: Sequence[Case]) -> Iterator[Report]:
            for report in run(cell, cases):
                ended.append(report)
                share = VALUES[args.attain](report.summary)
                print(f"{report.policy} at {report.rate:g}/s, seed {report.seed}: {share:.3f}", file=sys.stderr)
                yield report

        try:
            return _all(args, study, tick, shown), False
        except KeyboardInterrupt:
            if not ended:
                raise
            return ended, True


def main(args: argparse.Namespace) -> int:
    """Run the simulations. Raises InvalidValue for invalid settings."""
    study = _study(args)
    recorder = _recorder(args, study)
    if args.out is not None:
        check_output(args.out / "results.json", "out")
    with progress.bar("simulating") as draw:
        tick = _Tick(draw, _announcement(args, study), 0 if args.goodput else study.cases)
        reports, interrupted = _run(args, study, recorder, tick)
    name = args.workload.removeprefix("trace:")  # without the folders of a file
    title = f"{Path(name).name} on {study.mesh} of {study.latency.name}"
    results = Results(
        title,
        reports,
        goodput(reports, args.attain, args.goal),
        args.goal,
        args.attain,
        args.goodput,
        slo=common_slo(study.workload),
        legend=(describe(study.workload),),
    )
    if args.bound and not interrupted:
        results = _bounded(args, study, results)
    print_report(results)
    if args.out is not None:
        settings = {name: _plain(value) for name, value in sorted(vars(args).items()) if name != "out"}
        settings["coefficients"] = asdict(study.latency.solve())
        for path in write_report(args.out, settings, results):
            print(f"wrote {path}")
    if recorder is not None:
        timeline.tell(args, recorder, reports[0].measured)
        timeline.show(
            args, recorder, f"{reports[0].policy} at {reports[0].rate:g}/s, {title}, simulated", reports[0].measured
        )
    return 130 if interrupted else 0


def _study(args: argparse.Namespace) -> Study:
    names = parse_policies(args.policy)
    for name in names:
        policies.make(name)  # report invalid names before anything is simulated
        routing.make(policies.routing(name, args.routing), admission.make(args.admission))
    if args.seeds < 1:
        raise InvalidValue(f"seeds={args.seeds} must be at least 1", "seeds")
    latency = _latency(args)
    mesh = Mesh.parse(args.mesh or f"2x{latency.tensor_parallel}", args.prefill, colocated=args.mode == "colocated")
    same = {field.name: getattr(args, field.name) for field in fields(Options) if hasattr(args, field.name)}
    options = Options(
        **same,
        tokens=args.max_num_batched_tokens,
        rows=args.max_num_seqs,
        prompts=args.max_prompts,
        boundary=args.preempt_boundary,
        lead=args.preempt_lead,
        stop_within=args.preempt_within,
        behind=args.kv_behind_steps,
        suspended=args.max_suspended,
        cascade=args.cascade_attention == "on",
        stale=args.stale_state,
        prefix_caching=args.enable_prefix_caching,
        pages=args.num_pages,
        page_size=args.block_size,
        tiers=Tiers(args.kv_host_memory, args.kv_disk_size, args.kv_host_bandwidth, args.kv_disk_bandwidth),
        timer=time.process_time,
    )
    options.device(latency)
    check_mesh(mesh, latency)
    rates: list[float | None] = [*parse_rates(args.qps)] if args.qps else [None]
    seeds = range(args.seed, args.seed + args.seeds)
    return Study(names, _read_workload(args, latency), mesh, latency, options, rates, seeds, args.num_requests)


def _recorder(args: argparse.Namespace, study: Study) -> Recorder | None:
    """Return a recorder if a timeline, an explanation or the dashboard is requested."""
    asked = any(flag is not None for flag in (args.timeline, args.explain, args.dashboard))
    if asked and (study.cases != 1 or args.goodput):
        raise InvalidValue(
            "--timeline, --explain and --dashboard need a single simulation: one policy, one rate, one seed, and no "
            f"--goodput; this is {'a search' if args.goodput else f'{study.cases} simulations'}",
            "timeline",
        )
    return timeline.recorder_of(args)


def _all(args: argparse.Namespace, study: Study, tick: Callable[..., None], run: Run) -> list[Report]:
    """Run the sweep, or the search for the goodput."""
    given = study.workload, study.policies, study.mesh, study.latency
    more: dict[str, Any] = {"seeds": study.seeds, "num_requests": study.num_requests, "options": study.options}
    more |= {"progress": tick, "run": run}
    if not args.goodput:
        return sweep(*given, rates=study.rates, **more)
    searches = goodput_search(
        *given,
        goal=args.goal,
        value=VALUES[args.attain],
        tolerance=args.tolerance,
        start=study.rates[0] or 1.0,
        **more,
    )
    return [report for search in searches.values() for report in search.reports]


def _bounded(args: argparse.Namespace, study: Study, results: Results) -> Results:
    given = (study.workload, study.mesh, study.latency)
    routers = {policies.routing(name, study.options.routing).partition(":")[0] for name in study.policies}
    loosest = min(routers, key=lambda name: (name in STAYING, name))  # the loosest bound holds for all policies
    options = replace(study.options, routing=loosest)
    more: dict[str, Any] = {"seeds": study.seeds, "num_requests": study.num_requests, "options": options}
    rates = list(dict.fromkeys(report.rate for report in results.reports)) if args.qps or args.goodput else [None]
    bounded = tuple(bounds(*given, rates=rates, **more))
    highest = goodput_bounds(*given, goal=args.goal, **more)
    return results._replace(bounds=bounded, goodput_bound=sum(highest) / len(highest))


def parse_policies(text: str) -> list[str]:
    """Split policies at commas, except those of `prefill=x,decode=y`."""
    halves = r"prefill=[^,]*,decode=[^,]*|decode=[^,]*,prefill=[^,]*"
    names = [name.strip() for name in re.findall(rf"{halves}|[^,]+", text) if name.strip()]
    if not names:
        raise InvalidValue("policy must name at least one policy", "policy")
    return list(dict.fromkeys(names))


def parse_rates(text: str) -> list[float]:
    """Parse `3`, `2,3,4` or `first:last:step`, which includes both ends."""
    try:
        if ":" in text:
            first, last, step = (float(part) for part in text.split(":"))
            if step <= 0 or last < first:
                raise ValueError
            rates = [round(first + i * step, 9) for i in range(int((last - first) / step + 1e-9) + 1)]
        else:
            rates = [float(part) for part in text.split(",")]
        if not rates or not all(0 < rate < float("inf") for rate in rates):
            raise ValueError
    except ValueError as error:
        raise InvalidValue(f"qps={text!r} must be positive rates, as in 3, 2,3,4 or 2.0:5.0:0.2", "qps") from error
    return rates


def _latency(args: argparse.Namespace) -> Latency:
    path = Path(args.latency)
    if path.suffix not in (".yaml", ".yml"):
        path = preset("latency", args.latency)
    latency = load_yaml(path, Latency)
    values: dict[str, float] = {}
    for text in args.coefficient:
        name, _, value = text.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            raise InvalidValue(
                f"coefficient={text!r} must be NAME=SECONDS, as in context=40e-9", "coefficient"
            ) from None
    return latency.with_coefficients(values) if values else latency


def _read_workload(args: argparse.Namespace, latency: Latency) -> Workload | Mix | list[Arrival]:
    given = {name: getattr(args, f"{name}_slo") for name in ("ttft", "tpot")}
    given = {name: value for name, value in given.items() if value is not None}
    kind, _, path = args.workload.partition(":")
    if kind == "trace" and path:
        with progress.bar(f"reading {path}") as tick:
            return load_trace(
                path,
                slo=SLO(**given),
                num_prompts=args.num_requests,
                time_scale=args.time_scale,
                prompt_scale=args.prompt_scale,
                output_scale=args.output_scale,
                spread=args.spread,
                start=args.start,
                duration=args.duration,
                keep_failed=args.keep_failed,
                seed=args.seed,
                progress=tick,
                tell=lambda sentence: print(sentence, file=sys.stderr),
            )
    workload = find_workload(args.workload)
    if not args.qps and not args.goodput:
        raise InvalidValue(f"workload {args.workload} needs a rate, as in --qps 3 or --qps 2.0:5.0:0.2", "qps")
    if args.own_slowdown:
        devices = latency.solve()
        workload = for_server(workload, lambda tokens: devices.step_time(Load().add_chunk(tokens, 0)))
    return replace(workload, **given)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
