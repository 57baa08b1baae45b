"""The flags and the help text of `jaxserve simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.report import timeline
from jaxserve.sched.admission import ADMISSIONS
from jaxserve.sched.api.preemption import LEAD
from jaxserve.sched.perf import KINDS
from jaxserve.sched.policies import names
from jaxserve.sched.routing import ROUTERS
from jaxserve.sched.sim import NAMED
from jaxserve.sched.sim.tiers import NO_TIERS
from jaxserve.yamlio import seconds, seed_of, size

SHARES = ("both", "ttft", "tpot", "worst", "window", "tokens")  # values of --attain

EXAMPLES = """
examples:
  # Two policies at 16 rates with three seeds; prints a table, writes JSON, CSV and plots to DIR
  jaxserve simulate --policy distserve,kairos --qps 2.0:5.0:0.2 --seeds 3 --out DIR

  # Each policy's highest rate with 90 % attainment, by bisection, and an upper bound for all policies
  jaxserve simulate --policy distserve,kairos --goodput --bound

  # One rate in steady state: do not count the first and last 500 of 4000 requests
  jaxserve simulate --policy kairos --qps 3 --num-requests 4000 --skip 500

  # Why was a request late? A timeline for ui.perfetto.dev, and the events of request 41
  jaxserve simulate --policy kairos --qps 3 --num-requests 300 --timeline steps.json.gz --explain 41

  # A public trace at its own rate, with the shared prefixes that it names
  jaxserve simulate --workload trace:conversation_trace.jsonl.gz --num-prompts 2000 --ttft-slo 8s

  # The same trace at three rates, prompts a fourth as long, on one prefill and three decode instances
  jaxserve simulate --mesh 4x4 --prefill 1 --workload trace:conversation_trace.jsonl.gz --prompt-scale 4 --qps 2,4,6

  # Options of a policy, router or admission follow its name; two policies can each decide one half
  jaxserve simulate --policy kairos,kairos:literal,unified --routing round_robin --qps 3
  jaxserve simulate --policy prefill=kairos,decode=continuous --workload my.yaml --qps 3

  # What if? Half the KV pool; steps predicted a fifth too short; a slower decode kernel for long contexts
  jaxserve simulate --qps 3 --kv-scale 0.5
  jaxserve simulate --qps 3 --prediction-error -0.2 --noise 0.2
  jaxserve simulate --qps 3 --coefficient context=40e-9

A latency preset gives the step times (configs/latency/*.yaml), a workload preset the arrivals
(configs/workload/*.yaml). docs/guide/simulator.md describes what the model leaves out.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jaxserve simulate`."""
    parser.description = "Serve a workload in virtual time with the scheduler that serves in real time."
    parser.epilog = EXAMPLES
    _what(parser.add_argument_group("policies and rates"))
    _cluster(parser.add_argument_group("devices", "instances and their step times"))
    _scheduling(parser.add_argument_group("scheduling", "everything besides the policy"))
    _replicas(parser.add_argument_group("imperfect knowledge", "for studies of robustness"))
    _workload(parser.add_argument_group("workload"))
    _output(parser.add_argument_group("output"))


def _what(group: Any) -> None:
    group.add_argument(
        "--policy",
        default="distserve,kairos,unified",
        metavar="NAME[,NAME…]",
        help=f"policies to compare: {', '.join(names())}, prefill=NAME,decode=NAME, or a class of yours, "
        "as in file:./mine.py:Mine [%(default)s]",
    )
    group.add_argument("--qps", metavar="RATES", help="requests per second: 3, or 2,3,4, or first:last:step")
    group.add_argument("--seeds", type=int, default=1, metavar="N", help="repeat with N seeds, starting at --seed [1]")
    group.add_argument("--seed", type=seed_of, default=0, metavar="N", help="first seed [0]")
    group.add_argument(
        "--goodput",
        action="store_true",
        help="search for each policy's highest rate at which attainment, as a mean over seeds, reaches --goal; the "
        "search starts at the first rate of --qps, if given",
    )
    group.add_argument("--goal", type=float, default=0.9, metavar="SHARE", help="attainment required for goodput [0.9]")
    group.add_argument("--tolerance", type=float, default=0.02, metavar="SHARE", help="precision of the search [0.02]")
    group.add_argument(
        "--attain",
        choices=SHARES,
        default="both",
        help="requests that count as attained for goodput: both objectives; TTFT or TPOT alone; TTFT and the worst "
        "mean TPOT from the first token on (FairBatching); TTFT and the worst mean over 10 tokens (SLOs-Serve); both, "
        "weighted by prompt tokens [both]",
    )
    group.add_argument(
        "--bound",
        action="store_true",
        help="also compute an upper bound on the attainment of any policy on these instances",
    )


def _cluster(group: Any) -> None:
    group.add_argument(
        "--mesh", help="RxT: R instances of T devices; with two or more, half prefill [2xT, T from the latency preset]"
    )
    group.add_argument("--prefill", type=int, metavar="N", help="number of instances that prefill [half]")
    group.add_argument("--mode", choices=("auto", "colocated"), default="auto", help="colocated: no roles [auto]")
    group.add_argument(
        "--latency", default="minimax-m2.5-h200-tp4", metavar="NAME|FILE", help="latency preset [%(default)s]"
    )
    group.add_argument(
        "--coefficient",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a step-time coefficient of the preset, as in context=40e-9 (seconds); repeatable",
    )
    group.add_argument("--noise", type=float, metavar="S", help="relative standard deviation of step times [preset's]")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per page of KV [the preset's]")
    group.add_argument("--num-pages", type=int, metavar="N", help="pages per instance [from the preset's KV tokens]")
    group.add_argument("--kv-scale", type=float, default=1.0, metavar="X", help="multiply the number of pages by X [1]")
    group.add_argument(
        "--kv-host-memory",
        type=size,
        default=0,
        metavar="SIZE",
        help="host memory for KV that leaves the pools, of all instances together, as in 1TiB [0]",
    )
    group.add_argument(
        "--kv-disk-size", type=size, default=0, metavar="SIZE", help="disk for KV that leaves that memory [0]"
    )
    group.add_argument(
        "--kv-host-bandwidth",
        type=float,
        default=NO_TIERS.host_bandwidth,
        metavar="BYTES",
        help="bytes per second between host memory and devices [%(default)g, PCIe Gen5 x16]",
    )
    group.add_argument(
        "--kv-disk-bandwidth",
        type=float,
        default=NO_TIERS.disk_bandwidth,
        metavar="BYTES",
        help="bytes per second of the disk [%(default)g, two NVMe drives]",
    )
    group.add_argument(
        "--preempt-boundary",
        default="layer",
        metavar="WHERE",
        help="points at which a prefill can be preempted: op, layer, layers:K, or chunk (only at its end) [layer]",
    )
    group.add_argument(
        "--preempt-within",
        type=seconds,
        metavar="TIME",
        help="cut chunks of prompts so that a step that is asked to stop does so in this time, as in 10ms [no bound]",
    )
    group.add_argument(
        "--preempt-lead",
        type=seconds,
        default=LEAD,
        metavar="TIME",
        help="before a segment's end, when the next one is dispatched and no longer stopped [2ms]",
    )
    group.add_argument(
        "--kv-behind-steps",
        action="store_true",
        help="KV transfers wait for the dispatched segments of a step, as in the engine, instead of running in "
        "parallel",
    )
    group.add_argument(
        "--acceptance", type=float, default=0.7, metavar="SHARE", help="chance that a drafted token is accepted [0.7]"
    )


def _scheduling(group: Any) -> None:
    group.add_argument(
        "--routing",
        default="auto",
        metavar="NAME",
        help=f"router of requests to instances: {', '.join(sorted(ROUTERS))}, or auto: the policy's default [auto]",
    )
    group.add_argument(
        "--admission",
        default="none",
        metavar="NAME",
        help=f"admission control: {', '.join(sorted(ADMISSIONS))}; requests that are not admitted become best "
        "effort, or with :refuse are refused [none]",
    )
    group.add_argument(
        "--queue-timeout",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="waiting requests are refused after this time without a first token; 0: never [0]",
    )
    group.add_argument("--first-token", choices=("prefill", "decode"), default="prefill", help="sent by [prefill]")
    group.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="tokens in a step [8192]")
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="running per instance [256]")
    pack = group.add_mutually_exclusive_group()
    pack.add_argument("--max-prompts", type=int, metavar="N", help="most prompts with chunks in one step [no limit]")
    pack.add_argument("--no-pack", dest="max_prompts", action="store_const", const=1, help="same as --max-prompts 1")
    group.add_argument("--max-suspended", type=int, default=4, metavar="N", help="most suspended steps [4]")
    group.add_argument(
        "--draft", type=int, default=0, metavar="N", help="most tokens that a row drafts and verifies in a step [0]"
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="[on for traces that name shared prefixes]",
    )
    group.add_argument(
        "--cascade-attention",
        choices=("on", "off"),
        default="off",
        help="rows of a step that share a prefix in the prefix cache read it once [off]",
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
        help="constant relative error of all its predictions: 0.2 is a fifth too long [0]",
    )
    group.add_argument(
        "--routing-delay", type=seconds, default=0.0, metavar="TIME", help="from arrival to instance, as in 5ms [0]"
    )
    group.add_argument(
        "--stale-state",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="age of the router's view of the instances, as in 100ms [0]",
    )
    group.add_argument(
        "--fronts",
        type=int,
        default=0,
        metavar="N",
        help="processes that route requests in turn, on state of this age, and do not see what the others sent since; "
        "0: the router of one engine [0]",
    )


def _workload(group: Any) -> None:
    group.add_argument(
        "--workload",
        default="K128",
        metavar="NAME|FILE|trace:FILE",
        help=f"synthetic: {', '.join(NAMED)}, a preset or YAML file; or a trace, also gzipped: CSV of Azure, BurstGPT "
        "or plain, JSON lines of Mooncake or Qwen-Bailian, a folder of ServeGen's clients [K128]",
    )
    group.add_argument("--num-requests", "--num-prompts", type=int, metavar="N", help="[1000; all of a trace]")
    group.add_argument("--ttft-slo", type=seconds, metavar="TIME", help="replaces the workload's, as in 8s")
    group.add_argument("--tpot-slo", type=seconds, metavar="TIME", help="replaces the workload's, as in 50ms")
    group.add_argument(
        "--own-slowdown",
        action="store_true",
        help="base slowdown objectives of a workload on the prompt times of the simulated devices instead of the "
        "paper's",
    )
    group.add_argument(
        "--start", type=seconds, default=0.0, metavar="TIME", help="trace: skip everything before, as in 10min [0]"
    )
    group.add_argument("--duration", type=seconds, metavar="TIME", help="trace: length of the part to use [to its end]")
    group.add_argument("--keep-failed", action="store_true", help="trace: keep BurstGPT's failed requests")
    group.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="trace: multiply times by X [1]")
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
        help="trace: spread requests with equal timestamps over this time; Mooncake's resolution is about 3s [0]",
    )


def _output(group: Any) -> None:
    group.add_argument(
        "--skip", type=int, default=0, metavar="N", help="do not count the first and last N requests [0]"
    )
    group.add_argument(
        "--horizon",
        type=seconds,
        metavar="TIME",
        help="stop after this time; unfinished requests count as missed",
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="write results.json, results.csv and plots")
    timeline.add_arguments(group, "single simulation: ")
    group.add_argument("--jobs", type=int, metavar="N", help="processes [all cores, at most one per simulation]")
