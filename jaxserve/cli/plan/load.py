"""`jaxserve plan --qps`: find the fewest devices that serve a load within its objectives."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import floor
from pathlib import Path
from typing import Any

import yaml

from jaxserve.capacity import fit as fitting
from jaxserve.capacity.answer import Answer, complete
from jaxserve.capacity.fit import Fit, Setting
from jaxserve.capacity.manifest import manifest
from jaxserve.capacity.search import CHUNKS, POLICIES, Searcher, candidates
from jaxserve.capacity.show_answer import Rows, as_json, lines, plot
from jaxserve.capacity.step_times import StepTimes, load_preset, step_times
from jaxserve.capacity.trial import AS_IT_IS, Candidate, Load, Outcome, Runner, Trial
from jaxserve.cli.plan.flags import OBJECTIVES
from jaxserve.cli.simulate.command import parse_policies
from jaxserve.cli.simulate.pool import processes
from jaxserve.cli.simulate.workloads import describe, find_workload
from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.models.spec import ModelSpec
from jaxserve.report import progress
from jaxserve.sched import policies
from jaxserve.sched.sim import Arrival, Mix, Workload, load_trace

SECONDS, QUEUE = 30.0, 8.0  # of load to simulate: at least, and in multiples of the longest TTFT
LEAST, MOST = 400, 800  # requests that this may be
GRAIN = 1024  # tokens to which a length limit is rounded
SERVED = (  # settings of the plan that the server needs too
    "dtype", "quantization", "kv_cache_dtype", "kv_cache_memory", "gpu_memory_utilization", "max_num_seqs",
    "block_size",
)  # fmt: skip


def read_load(args: argparse.Namespace, positions: int) -> Load:
    slo = {name: getattr(args, f"{name}_slo") for name in OBJECTIVES if getattr(args, f"{name}_slo") is not None}
    kind, _, path = args.workload.partition(":")
    source: Workload | Mix | tuple[Arrival, ...]
    if kind == "trace" and path:
        if not {"ttft", "tpot"} <= set(slo):
            raise InvalidValue("a trace has no objectives: add --ttft-slo and --tpot-slo", "workload")
        with progress.bar(f"reading {path}") as tick:
            source = tuple(load_trace(path, num_prompts=args.num_requests or MOST, progress=tick))
    else:
        source = find_workload(args.workload)
    load = Load(source, args.qps, LEAST, slo=slo, longest=positions, goal=args.attainment or 0.9)
    requests = args.num_requests or int(min(MOST, max(LEAST, args.qps * max(SECONDS, QUEUE * load.longest_ttft()))))
    return replace(load, requests=min(requests, len(source)) if isinstance(source, tuple) else requests)


class Fits:
    """The fits of a model by T, computed when first asked for, with their step times. Writer of both.

    arrivals: all requests. Simulated pools hold no more than these: a pool of a small model has millions of pages.
    """

    def __init__(
        self,
        spec: ModelSpec,
        setting: Setting,
        names: Sequence[str],
        preset: str | None,
        arrivals: Sequence[Arrival],
    ) -> None:
        self._most = sum(arrival.prompt_tokens + arrival.output_tokens + setting.page_size for arrival in arrivals)
        self._spec = spec
        self._setting = setting
        self._names = names
        self._given = None if preset is None else load_preset(preset)
        self.times: dict[int, StepTimes] = {}
        self._fits: dict[int, Fit] = {}

    def of(self, devices: int, only: tuple[int, int] | None) -> Mapping[int, Fit]:
        """Return the fits of every T that divides `devices`, or of one mesh only."""
        fits = {}
        for tp in range(1, min(devices, fitting.MOST) + 1):
            if devices % tp == 0 and only in (None, (devices // tp, tp)):
                fits[tp] = self._fit(tp, devices // tp)
        return fits

    def _fit(self, tp: int, instances: int) -> Fit:
        if self._setting.kv_cache_memory is not None:  # shared by the instances
            self._fits.pop(tp, None)
        if tp not in self._fits:
            fit = fitting.fit(self._spec, self._setting, instances, tp)
            self._fits[tp] = fit
            if fit.fits:
                times = step_times(self._names, self._setting, fit, self._given)
                tokens = min(times.latency.kv_tokens, self._most)
                self.times[tp] = replace(times, latency=replace(times.latency, kv_tokens=tokens))
        return self._fits[tp]

    def remedy(self) -> str:
        return fitting.remedy(self._spec, self._setting, list(self._fits.values()))


def run(
    args: argparse.Namespace,
    config: ServeConfig,
    spec: ModelSpec,
    names: Sequence[str],
    setting: Setting,
    only: tuple[int, int] | None,
) -> int:
    """Answer the question; return 0 if a set-up keeps the objectives, 1 if none does, 130 after Ctrl-C."""
    load = read_load(args, setting.max_model_len)
    arrivals, kept = load.arrivals(load.requests, load.rate)
    longest = max((arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals), default=1)
    if config.max_model_len is None:
        setting = replace(setting, max_model_len=min(setting.max_model_len, -(-longest // GRAIN) * GRAIN))
    mean = sum(arrival.prompt_tokens + arrival.output_tokens / 2 for arrival in arrivals) / max(1, len(arrivals))
    setting = replace(setting, context=max(1, min(setting.max_model_len, round(mean))))
    fits = Fits(spec, setting, names, args.latency, arrivals)
    chosen = parse_policies(args.policies) if args.policies else POLICIES
    for name in chosen:
        policies.make(name)
    limit = config.max_num_batched_tokens
    chunks = (limit,) if limit else tuple(dict.fromkeys(min(chunk, setting.max_num_batched_tokens) for chunk in CHUNKS))
    quiet = bool(args.json)

    where = ""

    def candidates_of(devices: int) -> list[Candidate]:
        return list(candidates(devices, fits.of(devices, only), chosen, chunks))

    say = _nothing if quiet else print
    say(_question(args, load, setting))
    if kept < 1:
        say(f"note: {1 - kept:.1%} of the requests exceed the model's {load.longest} positions and count as missed")
    if kept < load.goal:
        share = floor(100 * kept) / 100
        longer = "choose a model with a longer context" if config.max_model_len is None else "raise --max-model-len"
        raise InvalidValue(
            f"{1 - kept:.1%} of the requests exceed the model's {load.longest} positions: no set-up keeps "
            f"{load.goal:.0%}; {longer}, or give a workload of shorter requests"
            + (f", or --attainment {share:g}" if share else ""),
            "workload",
        )
    lasting, needed = load.requests / load.rate, QUEUE / 2 * load.longest_ttft()
    if lasting < needed:
        say(
            f"note: {load.requests} {load.unit} come within {lasting:.3g} s, less than {QUEUE / 2:g} times the longest "
            f"TTFT: a queue that grows slowly is not seen; --num-requests {round(needed * load.rate)} would show it"
        )
    answer, began = Answer(load.goal, load.rate, setting.count), time.process_time()
    with progress.bar("runs simulated") as draw, processes(args.jobs, lambda done: draw(done, 0, where)) as pool:
        run_all: Callable[..., Any] = pool  # whose type is that of `jaxserve simulate`

        def simulate(trials: Sequence[Trial]) -> Iterable[Outcome]:
            nonlocal where
            where = _where(trials[0], load, setting.count)
            yield from run_all(_runner(load, fits, setting, trials), trials)

        def bound(trial: Trial) -> float:
            return _runner(load, fits, setting, [trial]).bound(trial)

        searcher = Searcher(load, simulate, bound, _nothing if quiet else Rows(load, setting.count))
        try:
            complete(answer, searcher, candidates_of, lambda tp: fits.times[tp].error)
        except KeyboardInterrupt:
            answer.interrupted = True
    command = _serve(args, config, setting, answer)
    typed = [shlex.quote(word) for word in command]
    sources = {f"T={tp}": times.source for tp, times in sorted(fits.times.items()) if tp <= setting.count}
    if quiet:
        given = {"model": args.model, "device": setting.name, "count": setting.count, "step_times": sources}
        json.dump(as_json(answer, typed, args.price, given), sys.stdout, indent=1)
        print()
    else:
        for name, source in _grouped(sources):
            print(f"step times, {name}: {source}")
        if answer.closest is None and not answer.interrupted:
            print(f"memory: {fits.remedy()}")
        print("\n".join(lines(answer, typed, args.price, load.unit)))
        if answer.interrupted:
            print("interrupted: what stands above is not the whole search")
        took = time.process_time() - began
        print(f"simulated: {load.requests} {load.unit} a set-up; this process took {took:.0f} s CPU")
    _write(args, answer, load, command, setting)
    return 130 if answer.interrupted else 0 if answer.best is not None else 1


def _where(trial: Trial, load: Load, most: int) -> str:
    """Say what a run is about: its devices, and what differs from the question."""
    told = f"on {trial.candidate.devices} of up to {most} devices"
    if trial.rate != load.rate:
        told += f", at {trial.rate:.3g}/s"
    return told if trial.scale == AS_IT_IS else f"{told}, with other step times or KV"


def _write(args: argparse.Namespace, answer: Answer, load: Load, command: Sequence[str], setting: Setting) -> None:
    if args.plot is not None:
        drawn = plot(args.plot, answer, _question(args, load, setting), load.rate * load.rounds)
        print(f"wrote {drawn}", file=sys.stderr)
    if args.manifest is not None and answer.best is not None:
        written = manifest(command, setting.device.platform, answer.best.candidate.devices)
        # by way of JSON: yaml would write equal parts as anchors and aliases
        args.manifest.write_text(yaml.safe_dump_all(json.loads(json.dumps(written)), sort_keys=False))
        print(f"wrote {args.manifest}", file=sys.stderr)


def _runner(load: Load, fits: Fits, setting: Setting, trials: Sequence[Trial]) -> Runner:
    wanted = {trial.candidate.tp for trial in trials}
    return Runner(load, {tp: fits.times[tp].latency for tp in sorted(wanted)}, setting.max_num_seqs)


def _question(args: argparse.Namespace, load: Load, setting: Setting) -> str:
    source = list(load.source) if isinstance(load.source, tuple) else load.source
    slo = ", ".join(f"{name.upper()} {value:g} s" for name, value in load.slo.items())
    what = Path(args.workload.removeprefix("trace:")).name
    rate = f"{load.rate:g}/s of {what}"
    if load.unit == "sessions":
        rate = f"{load.rate:g} sessions/s of {what}, about {load.rate * load.rounds:.3g} requests/s"
    return (
        f"{args.model} on up to {setting.count} {setting.name}: {rate}, {load.goal:.0%} of the "
        f"requests within {slo or 'the objectives of the workload'}\n{describe(source)}"
    )


def _serve(args: argparse.Namespace, config: ServeConfig, setting: Setting, answer: Answer) -> list[str]:
    if answer.best is None:
        return []
    candidate = answer.best.candidate
    words = ["jaxserve", "serve", "--model", args.model, "--mesh", str(candidate.mesh), "--policy", candidate.policy]
    if candidate.instances > 1:
        words += ["--mode", "colocated"] if candidate.prefill is None else ["--prefill", str(candidate.prefill)]
    words += ["--max-num-batched-tokens", str(candidate.chunk), "--max-model-len", str(setting.max_model_len)]
    for name in ("ttft", "tpot"):
        value = getattr(args, f"{name}_slo")
        if value is not None:
            words += [f"--{name}-slo", f"{value:g}s"]
    for name in SERVED:
        value = getattr(args, name, None)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _grouped(sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Join names with equal sources."""
    for source in dict.fromkeys(sources.values()):
        yield ", ".join(name for name, other in sources.items() if other == source), source


def _nothing(*_: object) -> None:
    """Take what is not printed."""
