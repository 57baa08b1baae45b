"""Serve the same arrivals over HTTP under every policy, and simulate each run with its own step times.

    python benchmarks/served_policies.py --page docs/research/served.md     # all: two models, four mixes, every policy
    python benchmarks/served_policies.py --models demo --mixes chat --policies "unified sarathi unified@mixed"

Models: `llama`, with 104 M random parameters, and `demo`, which is part of jaxserve. Two instances, of one CPU core
each on two cores. A policy that is made of two halves or has its own router gets a prefill and a decode instance;
others get two mixed instances. `NAME@split` and `NAME@mixed` override this.

Mixes: `chat`, chats and long documents; `tasks`, four tasks with their own objectives, which are tiers of the server;
`bursts`, like chat, but with four documents at once and bursty chats; `half`, like chat at half the load, to compare
TTFT predictions. Lengths, objectives and rates follow from a profile of the idle machine: output lengths make decoding
and prefill equal work, and `--load` is a share of the capacity that the profile predicts. They are printed and stored.

Each finished case is stored; cases that are already in the output file are not run again. A case is a fresh scheduler
on warm executors, a server in this process, and clients in another. The simulator gets the same requests, with step
times and noise fitted to the journal of the run; its schedulers use the server's step-time model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common import add_output, save
from policy_bench import judge, tables
from policy_bench.mixes import MIXES, Scale, calls, scaled
from policy_bench.systems import MODELS, System

from jaxserve.errors import InvalidValue
from jaxserve.report.table import print_table
from jaxserve.sched import policies
from jaxserve.sched.perf import KINDS
from jaxserve.sched.perf.recipe import DEFAULT
from jaxserve.sched.sim import Mesh

MESH = "2x1"
KEPT = ("requests", "seed", "load", "mesh", "perf", "routing", "tbt")  # settings that all cases of a file must share


def main(argv: Sequence[str] | None = None) -> int:
    args = _parsed(argv)
    found = _stored(args)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as clients, tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            _model(name, args, found, clients, Path(folder))
    made = list(tables.tables(found["cases"], found["scales"], args.models, args.mixes, args.policies))
    for one in made:
        print_table(one.title, one.columns, one.rows)
        print(one.verdict)
    save(args, found)
    if args.page is not None:
        tables.write(args.page, made)
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", type=str.split, default=["llama", "demo"], help="[llama demo]")
    add("--mixes", type=str.split, default=["chat", "tasks", "bursts", "half"], help="[chat tasks bursts half]")
    add("--policies", type=str.split, default=policies.names(), help="[all of the registry]")
    add("--requests", type=int, default=60, help="per case at full load; twice as many for the demo model [60]")
    add("--seed", type=int, default=0)
    add("--rounds", type=int, default=1, help="rounds, each with other arrivals [1]")
    add(
        "--load", type=float, default=0.8, metavar="SHARE", help="share of the capacity that the profile predicts [0.8]"
    )
    add("--mesh", default=MESH, help="[%(default)s]")
    add("--perf", default=DEFAULT, choices=KINDS, help="step-time model of servers and simulations [%(default)s]")
    add("--routing", default="auto", help="router of all policies [auto: the policy's own]")
    add("--tbt", type=float, metavar="SHARE", help="also ask for a TBT of this share of the TPOT; not for `tasks`")
    add("--profile-time", type=float, default=None, metavar="S", help="duration of the profile")
    add("--page", type=Path, metavar="FILE", help="write the tables between the markers of this page")
    add_output(parser, "served_policies")
    args = parser.parse_args(argv)
    for flag, given, known in (("models", args.models, MODELS), ("mixes", args.mixes, MIXES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"--{flag} {unknown[0]!r} must be one of {', '.join(known)}")
    try:
        _ = [System.parse(text) for text in args.policies]
    except InvalidValue as error:
        parser.error(f"--policies: {error}")
    return args


def _stored(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of an earlier run. Raises SystemExit if its settings differ."""
    if not args.output.exists():
        return {"scales": {}, "cases": []}
    kept = json.loads(args.output.read_text(encoding="utf-8"))
    for name in KEPT:
        before, now = kept["settings"].get(name), getattr(args, name)
        if before != now:
            raise SystemExit(
                f"{args.output} has {name}={before!r}, not {now!r}, so its cases are not comparable; choose another "
                "--output"
            )
    return {"scales": kept["scales"], "cases": kept["cases"]}


def _key(case: Mapping[str, Any]) -> tuple[Any, ...]:
    return case["model"], case["mix"], case["policy"], case["round"]


def _model(name: str, args: argparse.Namespace, found: dict[str, Any], clients: Executor, folder: Path) -> None:
    """Run the missing cases of one model."""
    done = set(map(_key, found["cases"]))
    todo = [
        {"model": name, "mix": mix, "policy": policy, "round": number}
        for number in range(args.rounds)
        for mix in args.mixes
        for policy in args.policies
    ]
    todo = [case for case in todo if _key(case) not in done]
    if not todo:
        return
    from policy_bench.served import Host  # imported here because the clients' process imports this file without jax

    settings = {"perf": args.perf, "routing": args.routing, "profile_time": args.profile_time}
    host = Host(name, args.mesh, folder, **settings)
    host.machine.measure()  # a cached profile may be from a time with other load on the machine
    instances = len(host.machine.executors)
    if name not in found["scales"]:
        step_time = host.machine.recipe.make().step_time
        found["scales"][name] = {
            "parameters": host.parameters,
            "chunk": host.model.chunk,
            "mixes": {
                mix: scaled(one, step_time, host.model.chunk, instances, args.load).record()
                for mix, one in MIXES.items()
            },
        }
    for case in todo:
        scale = Scale.of(found["scales"][name]["mixes"][case["mix"]])
        found["cases"].append(_rounded(case | _case(host, case, scale, args, clients)))
        save(args, found, quiet=True)
        case = found["cases"][-1]
        served, again = case["served"], case["simulated"]
        print(
            f"{name} {case['mix']} {case['policy']}: {served['attained']:.0%} served, "
            f"{again['attained']:.0%} simulated, {served['seconds']:.0f} s; first tokens off by {_off(case)}",
            flush=True,
        )


def _off(case: Mapping[str, Any]) -> str:
    """Return the median error of predicted first tokens by path, with the number of requests."""
    paths = case["first_tokens"]["paths"].items()
    return ", ".join(f"{100 * one['median_error']:.0f} % ({one['requests']}, {path})" for path, one in paths)


def _case(
    host: Any, case: Mapping[str, Any], scale: Any, args: argparse.Namespace, clients: Executor
) -> dict[str, Any]:
    mix, system = MIXES[case["mix"]], System.parse(case["policy"])
    count, seed = round(args.requests * host.model.times), args.seed + case["round"]
    made = calls(mix, scale, count, seed, host.model.length, None if mix.tiers else args.tbt)
    served = host.serve(system, made, scale if mix.tiers else None, clients)
    mesh = Mesh.parse(args.mesh, colocated=system.mixed)
    counters = served.stats.counters
    return {
        "roles": "mixed" if system.mixed else "split",
        "served": judge.attained(served.run),
        "simulated": judge.simulated(
            made, served.journal, system.policy, mesh, host.layers, args.routing, args.perf, seed
        ),
        "busy": judge.busy(served.journal, served.run),
        "steps": judge.steps(served.journal),
        "first_tokens": judge.first_tokens(served.first_tokens),
        "counts": {
            "steps": counters.steps,
            "stops": counters.suspended,
            "drops": counters.preemptions,
            "demotions": counters.demotions,
            "deflections": served.stats.deflections,
            "replay_differences": len(served.journal.differences),
            "compiled_while_serving": served.stats.compilations_after_warmup,
        },
    }


def _rounded(value: Any) -> Any:
    """Round floats to four significant digits, to keep the file small."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    raise SystemExit(main())
