"""The flags and the help text of `jaxserve simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.cli import timeline
from jaxserve.cli.flags import add_flags
from jaxserve.cli.simulate.results import VALUES
from jaxserve.sched.admission import ADMISSIONS
from jaxserve.sched.api.preemption import LEAD
from jaxserve.sched.perf import KINDS
from jaxserve.sched.policies import names
from jaxserve.sched.routing import ROUTERS
from jaxserve.sched.sim import NAMED
from jaxserve.sched.sim.tiers import NO_TIERS
from jaxserve.yamlio import seconds, seed_of, size

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
    parser.description = "Serve a workload in virtual time with the scheduler that serves in real time."
    parser.epilog = EXAMPLES
    _what(parser.add_argument_group("policies and rates"))
    _cluster(parser.add_argument_group("devices", "instances and their step times"))
    _scheduling(parser.add_argument_group("scheduling", "everything besides the policy"))
    _replicas(parser.add_argument_group("imperfect knowledge", "for studies of robustness"))
    _workload(parser.add_argument_group("workload"))
    _output(parser.add_argument_group("output"))


def _what(group: Any) -> None:
    add_flags(
        group,
        ("--policy", None, "distserve,kairos,unified", "NAME[,NAME…]", f"policies to compare: {', '.join(names())}, "
         "prefill=NAME,decode=NAME, or a class of yours, as in file:./mine.py:Mine [%(default)s]"),
        ("--qps", None, None, "RATES", "requests per second: 3, or 2,3,4, or first:last:step"),
        ("--seeds", int, 1, "N", "repeat with N seeds, starting at --seed [1]"),
        ("--seed", seed_of, 0, "N", "first seed [0]"),
        ("--goodput", bool, None, None, "search for each policy's highest rate at which attainment, as a mean over "
         "seeds, reaches --goal; the search starts at the first rate of --qps, if given"),
        ("--goal", float, 0.9, "SHARE", "attainment required for goodput [0.9]"),
        ("--tolerance", float, 0.02, "SHARE", "precision of the search [0.02]"),
        ("--attain", VALUES, "both", None, "requests that count as attained for goodput: both objectives; TTFT or "
         "TPOT alone; TTFT and the worst mean TPOT from the first token on (FairBatching); TTFT and the worst mean "
         "over 10 tokens (SLOs-Serve); both, weighted by prompt tokens [both]"),
        ("--bound", bool, None, None, "also compute an upper bound on the attainment of any policy on these "
         "instances"),
    )  # fmt: skip


def _cluster(group: Any) -> None:
    add_flags(
        group,
        ("--mesh", None, None, None, "RxT: R instances of T devices; with two or more, half prefill [2xT, T from the "
         "latency preset]"),
        ("--prefill", int, None, "N", "number of instances that prefill [half]"),
        ("--mode", ("auto", "colocated"), "auto", None, "colocated: no roles [auto]"),
        ("--latency", None, "minimax-m2.5-h200-tp4", "NAME|FILE", "latency preset [%(default)s]"),
        ("--coefficient", list, None, "NAME=VALUE", "override a step-time coefficient of the preset, as in "
         "context=40e-9 (seconds); repeatable"),
        ("--noise", float, None, "S", "relative standard deviation of step times [preset's]"),
        ("--block-size", int, None, "N", "tokens per page of KV [the preset's]"),
        ("--num-pages", int, None, "N", "pages per instance [from the preset's KV tokens]"),
        ("--kv-scale", float, 1.0, "X", "multiply the number of pages by X [1]"),
        ("--kv-host-memory", size, 0, "SIZE", "host memory for KV that leaves the pools, of all instances together, "
         "as in 1TiB [0]"),
        ("--kv-disk-size", size, 0, "SIZE", "disk for KV that leaves that memory [0]"),
        ("--kv-host-bandwidth", float, NO_TIERS.host_bandwidth, "BYTES", "bytes per second between host memory and "
         "devices [%(default)g, PCIe Gen5 x16]"),
        ("--kv-disk-bandwidth", float, NO_TIERS.disk_bandwidth, "BYTES", "bytes per second of the disk [%(default)g, "
         "two NVMe drives]"),
        ("--preempt-boundary", None, "layer", "WHERE", "points at which a prefill can be preempted: op, layer, "
         "layers:K, or chunk (only at its end) [layer]"),
        ("--preempt-within", seconds, None, "TIME", "cut chunks of prompts so that a step that is asked to stop does "
         "so in this time, as in 10ms [no bound]"),
        ("--preempt-lead", seconds, LEAD, "TIME", "before a segment's end, when the next one is dispatched and no "
         "longer stopped [2ms]"),
        ("--kv-behind-steps", bool, None, None, "KV transfers wait for the dispatched segments of a step, as in the "
         "engine, instead of running in parallel"),
        ("--acceptance", float, 0.7, "SHARE", "chance that a drafted token is accepted [0.7]"),
    )  # fmt: skip


def _scheduling(group: Any) -> None:
    add_flags(
        group,
        ("--routing", None, "auto", "NAME", f"router of requests to instances: {', '.join(sorted(ROUTERS))}, or "
         "auto: the policy's default [auto]"),
        ("--admission", None, "none", "NAME", f"admission control: {', '.join(sorted(ADMISSIONS))}; requests that "
         "are not admitted become best effort, or with :refuse are refused [none]"),
        ("--queue-timeout", seconds, 0.0, "TIME", "waiting requests are refused after this time without a first "
         "token; 0: never [0]"),
        ("--first-token", ("prefill", "decode"), "prefill", None, "sent by [prefill]"),
        ("--max-num-batched-tokens", int, 8192, "N", "tokens in a step [8192]"),
        ("--max-num-seqs", int, 256, "N", "running per instance [256]"),
    )  # fmt: skip
    pack = group.add_mutually_exclusive_group()
    pack.add_argument("--max-prompts", type=int, metavar="N", help="most prompts with chunks in one step [no limit]")
    pack.add_argument("--no-pack", dest="max_prompts", action="store_const", const=1, help="same as --max-prompts 1")
    add_flags(
        group,
        ("--max-suspended", int, 4, "N", "most suspended steps [4]"),
        ("--draft", int, 0, "N", "most tokens that a row drafts and verifies in a step [0]"),
        ("--enable-prefix-caching", argparse.BooleanOptionalAction, None, None, "[on for traces that name shared "
         "prefixes]"),
        ("--cascade-attention", ("on", "off"), "off", None, "rows of a step that share a prefix in the prefix cache "
         "read it once [off]"),
    )  # fmt: skip


def _replicas(group: Any) -> None:
    add_flags(
        group,
        ("--perf", KINDS, "general", "NAME", f"the schedulers' step-time model: {', '.join(KINDS)}. general is the "
         "true one corrected online, exact the true one; table is Kairos's, linear FairBatching's, roofline "
         "SLOs-Serve's, poly FlowPrefill's [general]"),
        ("--prediction-error", float, 0.0, "SHARE", "constant relative error of all its predictions: 0.2 is a fifth "
         "too long [0]"),
        ("--routing-delay", seconds, 0.0, "TIME", "from arrival to instance, as in 5ms [0]"),
        ("--stale-state", seconds, 0.0, "TIME", "age of the router's view of the instances, as in 100ms [0]"),
        ("--fronts", int, 0, "N", "processes that route requests in turn, on state of this age, and do not see what "
         "the others sent since; 0: the router of one engine [0]"),
    )  # fmt: skip


def _workload(group: Any) -> None:
    group.add_argument(
        "--workload",
        default="K128",
        metavar="NAME|FILE|trace:FILE",
        help=f"synthetic: {', '.join(NAMED)}, a preset or YAML file; or a trace, also gzipped: CSV of Azure, BurstGPT "
        "or plain, JSON lines of Mooncake or Qwen-Bailian, a folder of ServeGen's clients [K128]",
    )
    group.add_argument("--num-requests", "--num-prompts", type=int, metavar="N", help="[1000; all of a trace]")
    add_flags(
        group,
        ("--ttft-slo", seconds, None, "TIME", "replaces the workload's, as in 8s"),
        ("--tpot-slo", seconds, None, "TIME", "replaces the workload's, as in 50ms"),
        ("--own-slowdown", bool, None, None, "base slowdown objectives of a workload on the prompt times of the "
         "simulated devices instead of the paper's"),
        ("--start", seconds, 0.0, "TIME", "trace: skip everything before, as in 10min [0]"),
        ("--duration", seconds, None, "TIME", "trace: length of the part to use [to its end]"),
        ("--keep-failed", bool, None, None, "trace: keep BurstGPT's failed requests"),
        ("--time-scale", float, 1.0, "X", "trace: multiply times by X [1]"),
        ("--prompt-scale", float, 1.0, "X", "trace: divide prompt lengths by X [1]"),
        ("--output-scale", float, 1.0, "X", "trace: divide output lengths by X [1]"),
        ("--spread", seconds, 0.0, "TIME", "trace: spread requests with equal timestamps over this time; Mooncake's "
         "resolution is about 3s [0]"),
    )  # fmt: skip


def _output(group: Any) -> None:
    add_flags(
        group,
        ("--skip", int, 0, "N", "do not count the first and last N requests [0]"),
        ("--horizon", seconds, None, "TIME", "stop after this time; unfinished requests count as missed"),
        ("--out", Path, None, "DIR", "write results.json, results.csv and plots"),
    )  # fmt: skip
    timeline.add_arguments(group, "single simulation: ")
    group.add_argument("--jobs", type=int, metavar="N", help="processes [all cores, at most one per simulation]")
