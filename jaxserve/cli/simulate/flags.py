"""The flags of `jaxserve simulate`, and what its help teaches."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.sched.admission import ADMISSIONS
from jaxserve.sched.api.preemption import DEPTH
from jaxserve.sched.perf import KINDS
from jaxserve.sched.policies import names
from jaxserve.sched.routing import ROUTERS
from jaxserve.sched.sim import NAMED
from jaxserve.yamlio import seconds

SHARES = ("both", "ttft", "tpot", "worst", "window", "tokens")  # what --attain takes

EXAMPLES = """
examples:
  # Two policies over 16 rates with three seeds; table here, JSON, CSV and plots in DIR
  jaxserve simulate --policy distserve,kairos --qps 2.0:5.0:0.2 --seeds 3 --out DIR

  # The highest rate at which each attains 90 %, by bisection, beside what no policy could exceed
  jaxserve simulate --policy distserve,kairos --goodput --bound

  # One rate, steady state: the first and last 500 of 4000 requests are not counted
  jaxserve simulate --policy kairos --qps 3 --num-requests 4000 --skip 500

  # Why did it miss? A timeline for ui.perfetto.dev, and the life of request 41 in words
  jaxserve simulate --policy kairos --qps 3 --num-requests 300 --timeline steps.json.gz --explain 41

  # A public trace at its own rate; prefixes that it names are shared
  jaxserve simulate --workload trace:conversation_trace.jsonl.gz --num-prompts 2000 --ttft-slo 8s

  # The same trace at three rates, prompts a fourth as long, on four instances of which one prefills
  jaxserve simulate --mesh 4x4 --prefill 1 --workload trace:conversation_trace.jsonl.gz --prompt-scale 4 --qps 2,4,6

  # Options of a policy, routing or admission stand behind its name; halves of two policies make one
  jaxserve simulate --policy kairos,kairos:literal,unified --routing round_robin --qps 3
  jaxserve simulate --policy prefill=kairos,decode=continuous --workload my.yaml --qps 3

  # What if? Half the KV, steps predicted a fifth too short, a decode kernel that splits no row's KV
  jaxserve simulate --qps 3 --kv-scale 0.5
  jaxserve simulate --qps 3 --prediction-error -0.2 --noise 0.2
  jaxserve simulate --qps 3 --coefficient context=40e-9

A latency preset says how long a step takes (configs/latency/*.yaml), a workload preset what arrives
(configs/workload/*.yaml). docs/guide/simulator.md says what the model leaves out.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxserve simulate`."""
    parser.description = "Serve a workload in virtual time, by the scheduler that serves in real time."
    parser.epilog = EXAMPLES
    _what(parser.add_argument_group("what to try"))
    _cluster(parser.add_argument_group("devices", "instances, and how long they take for a step"))
    _scheduling(parser.add_argument_group("scheduling", "what stands beside the policy"))
    _replicas(parser.add_argument_group("what schedulers do not know", "for studies of robustness"))
    _workload(parser.add_argument_group("workload"))
    _output(parser.add_argument_group("output"))


def _what(group: Any) -> None:
    group.add_argument(
        "--policy",
        default="distserve,kairos,unified",
        metavar="NAME[,NAME…]",
        help=f"policies to compare: {', '.join(names())}, or prefill=NAME,decode=NAME [%(default)s]",
    )
    group.add_argument("--qps", metavar="RATES", help="requests per second: 3, or 2,3,4, or first:last:step")
    group.add_argument("--seeds", type=int, default=1, metavar="N", help="repeat with N seeds, from --seed on [1]")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="first seed [0]")
    group.add_argument(
        "--goodput",
        action="store_true",
        help="search each policy's highest rate whose attainment, as a mean over seeds, reaches --goal; the first "
        "rate of --qps, if given, is tried first",
    )
    group.add_argument("--goal", type=float, default=0.9, metavar="SHARE", help="attainment of a goodput [0.9]")
    group.add_argument("--tolerance", type=float, default=0.02, metavar="SHARE", help="how exact a search is [0.02]")
    group.add_argument(
        "--attain",
        choices=SHARES,
        default="both",
        help="what a goodput asks the share of: both objectives; TTFT or TPOT alone; TTFT and the worst mean TPOT from "
        "the first token on (FairBatching); TTFT and the worst mean over 10 tokens (SLOs-Serve); both, weighted by "
        "prompt tokens [both]",
    )
    group.add_argument(
        "--bound",
        action="store_true",
        help="beside the policies, the most that any policy could attain on these servers",
    )


def _cluster(group: Any) -> None:
    group.add_argument(
        "--mesh", help="RxT: R instances of T devices; from two on, half prefill [2xT, T of the latency preset]"
    )
    group.add_argument("--prefill", type=int, metavar="N", help="how many instances prefill")
    group.add_argument("--mode", choices=("auto", "colocated"), default="auto", help="colocated: all do both [auto]")
    group.add_argument(
        "--latency", default="minimax-m2.5-h200-tp4", metavar="NAME|FILE", help="latency preset [%(default)s]"
    )
    group.add_argument(
        "--coefficient",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another coefficient of the step time than the preset's, as in context=40e-9 (seconds); repeatable",
    )
    group.add_argument("--noise", type=float, metavar="S", help="relative standard deviation of step times [preset's]")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens in a page of KV [the preset's]")
    group.add_argument("--num-pages", type=int, metavar="N", help="pages of an instance [the preset's KV tokens]")
    group.add_argument("--kv-scale", type=float, default=1.0, metavar="X", help="times as many pages [1]")
    group.add_argument(
        "--preempt-boundary",
        default="layer",
        metavar="WHERE",
        help="where a step of prompt chunks can be stopped: op, layer, layers:K, or chunk (its end) [layer]",
    )
    group.add_argument(
        "--preempt-depth",
        type=int,
        default=DEPTH,
        metavar="N",
        help=f"pieces of a step that are sent to the devices before those ahead of them are done [{DEPTH}]",
    )
    group.add_argument(
        "--kv-behind-steps",
        action="store_true",
        help="KV leaves an instance behind the pieces of a step that are dispatched already, as in the engine, instead "
        "of beside them",
    )
    group.add_argument(
        "--acceptance", type=float, default=0.7, metavar="SHARE", help="chance that a drafted token is right [0.7]"
    )


def _scheduling(group: Any) -> None:
    group.add_argument(
        "--routing",
        default="auto",
        metavar="NAME",
        help=f"which instance takes a request: {', '.join(sorted(ROUTERS))}, or auto: the policy's own [auto]",
    )
    group.add_argument(
        "--admission",
        default="none",
        metavar="NAME",
        help=f"whom to admit: {', '.join(sorted(ADMISSIONS))}; what is not becomes best effort, or with :refuse is "
        "refused [none]",
    )
    group.add_argument("--first-token", choices=("prefill", "decode"), default="prefill", help="who sends it [prefill]")
    group.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="tokens in a step [8192]")
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="requests on an instance [256]")
    pack = group.add_mutually_exclusive_group()
    pack.add_argument("--max-prompts", type=int, metavar="N", help="prompts whose chunks may share a step [no limit]")
    pack.add_argument(
        "--no-pack", dest="max_prompts", action="store_const", const=1, help="as --max-prompts 1: one prompt a step"
    )
    group.add_argument("--max-suspended", type=int, default=4, metavar="N", help="stopped steps at once [4]")
    group.add_argument(
        "--draft", type=int, default=0, metavar="N", help="tokens that a row may draft and verify in a step [0]"
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="[on where a trace says which prefixes are shared]",
    )


def _replicas(group: Any) -> None:
    group.add_argument(
        "--perf",
        choices=KINDS,
        default="general",
        metavar="NAME",
        help=f"the schedulers' step-time model: {', '.join(KINDS)}. general is the true one corrected online, exact "
        "the true one; table is Kairos's, linear FairBatching's, roofline SLOs-Serve's, poly FlowPrefill's [general]",
    )
    group.add_argument(
        "--prediction-error",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="all that it predicts is off by this share, for good: 0.2 is a fifth too long [0]",
    )
    group.add_argument(
        "--routing-delay", type=seconds, default=0.0, metavar="TIME", help="from arrival to the instance, as in 5ms [0]"
    )
    group.add_argument(
        "--stale-state",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="age of what the router knows of the instances, as in 100ms [0]",
    )


def _workload(group: Any) -> None:
    group.add_argument(
        "--workload",
        default="K128",
        metavar="NAME|FILE|trace:FILE",
        help=f"drawn: {', '.join(NAMED)}, a preset or YAML file; or a trace, also gzipped: CSV of Azure, BurstGPT or "
        "plain, JSON lines of Mooncake or Qwen-Bailian, a folder of ServeGen's clients [K128]",
    )
    group.add_argument("--num-requests", "--num-prompts", type=int, metavar="N", help="how many [1000; all of a trace]")
    group.add_argument("--ttft-slo", type=seconds, metavar="TIME", help="instead of the workload's, as in 8s")
    group.add_argument("--tpot-slo", type=seconds, metavar="TIME", help="instead of the workload's, as in 50ms")
    group.add_argument(
        "--own-slowdown",
        action="store_true",
        help="objectives that a workload states as a slowdown are of the simulated devices' prompt times, not of those "
        "of the paper's",
    )
    group.add_argument(
        "--start", type=seconds, default=0.0, metavar="TIME", help="trace: leave out what comes before, as in 10min [0]"
    )
    group.add_argument("--duration", type=seconds, metavar="TIME", help="trace: only so much of it [to its end]")
    group.add_argument("--keep-failed", action="store_true", help="trace: BurstGPT's failed requests too")
    group.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="trace: arrival times times X [1]")
    group.add_argument(
        "--prompt-scale", type=float, default=1.0, metavar="X", help="trace: divide prompt lengths by X [1]"
    )
    group.add_argument(
        "--output-scale", type=float, default=1.0, metavar="X", help="trace: divide output lengths by X [1]"
    )
    group.add_argument(
        "--spread",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="trace: spread requests of one timestamp over this time; Mooncake batches some 3s into one [0: as it is]",
    )


def _output(group: Any) -> None:
    group.add_argument(
        "--skip", type=int, default=0, metavar="N", help="do not count the first and last N requests [0]"
    )
    group.add_argument(
        "--horizon",
        type=seconds,
        metavar="TIME",
        help="stop after this time; requests that run then have missed their SLO",
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="write results.json, results.csv and plots there")
    group.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="of a single simulation: its steps as a trace for ui.perfetto.dev (JSON, gzipped where FILE ends in .gz)",
    )
    group.add_argument(
        "--explain",
        metavar="REQUEST",
        help="of a single simulation: a request's life in words, by its number or its id in the trace; or `missed`: "
        "the first that missed its SLO",
    )
    group.add_argument("--jobs", type=int, metavar="N", help="processes [all cores, at most one a simulation]")
