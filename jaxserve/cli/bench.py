"""`jaxserve bench`: open-loop load on an OpenAI-compatible server, with flags of `vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import json
from math import inf
from pathlib import Path
from typing import Any

from jaxserve.bench.backends import AUTO, BACKENDS
from jaxserve.bench.client import Target
from jaxserve.bench.load import SloClass, parse_slo_class
from jaxserve.bench.plan import DATASETS, FILES, Plan
from jaxserve.bench.result import METRICS
from jaxserve.bench.session import Session
from jaxserve.bench.slo_file import load_slo_file
from jaxserve.cli.flags import add_flags, checked
from jaxserve.cli.simulate.workloads import find_workload
from jaxserve.errors import InvalidValue
from jaxserve.yamlio import seconds, seed_of

_SECONDS = checked(seconds)
EPILOG = """examples:
  jaxserve bench --base-url http://other:8080 --num-prompts 50 --request-rate 2 --tokenizer FOLDER
  jaxserve bench --dataset-name multi-turn --dataset-path chats.json --think-time 5s --request-rate 1
  jaxserve bench --workload slos-serve-toolllm --own-slowdown --request-rate 2 --prompt-scale 4 --output-scale 4
  jaxserve bench --dataset-name random --num-prompts 100 --request-rate 4 --goodput ttft:500 tpot:50
  jaxserve bench --trace azure_conv.csv --num-prompts 200 --prompt-scale 8 --ttft-slo 2s --tpot-slo 50ms
  jaxserve bench --slo-class chat=0.7,ttft:500,tpot:50 --slo-class batch=0.3,ttft:8000,tpot:200 --find-goodput
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Send load to a running server and report latencies, attainment and goodput."
    parser.epilog = EPILOG
    _add_server(parser.add_argument_group("server"))
    _add_requests(parser.add_argument_group("requests"))
    _add_load(parser.add_argument_group("load"))
    _add_objectives(parser.add_argument_group("objectives"))
    _add_results(parser.add_argument_group("results"))


def _add_server(group: Any) -> None:
    add_flags(
        group,
        ("--backend", (AUTO, *BACKENDS), AUTO, None, "request format: openai has standard fields and text only; vllm "
         "and sglang add token ids and ignore_eos; jaxserve adds objectives; -chat uses /v1/chat/completions with "
         "text; auto asks the server what it is, and is openai or openai-chat if it does not say [auto]"),
        ("--base-url", None, None, "URL", "instead of --host and --port"),
        ("--host", None, "127.0.0.1", None, ""),
        ("--port", int, 8000, None, ""),
        ("--endpoint", None, None, "PATH", "instead of /v1/completions or /v1/chat/completions"),
        ("--model", None, None, None, "model name in requests [the first of /v1/models]"),
        ("--tokenizer", None, None, "NAME", "model folder or Hugging Face name: random prompts are texts of exact "
         "lengths, and tokens are counted where the server does not report them. Without it, the -chat and openai "
         "backends send common words, about one token each, the others send token ids, and texts of files are taken "
         "to have a token for four characters"),
        ("--ready-check-timeout-sec", _SECONDS, 600.0, "TIME", "longest wait for a jaxserve server that says that it "
         "starts; 0: do not look [600]"),
        ("--api-key", None, "none", None, ""),
    )  # fmt: skip
    group.add_argument(
        "--header", nargs="+", default=[], type=_pair, metavar="NAME=VALUE", help="sent with every request"
    )
    add_flags(group, ("--extra-body", _object, {}, "JSON", "fields added to every request"))


def _add_requests(group: Any) -> None:
    add_flags(
        group,
        ("--dataset-name", DATASETS, "random", None, "custom, sharegpt, hf and multi-turn read --dataset-path; trace "
         "and workload have flags of their own [random]"),
        ("--dataset-path", Path, None, "FILE", "JSON list or JSON lines; hf and multi-turn also parquet. custom: "
         "prompt and optional output_tokens, ttft_slo_ms, tpot_slo_ms, tbt_slo_ms, service_tier, class. sharegpt and "
         "multi-turn: conversations of {from, value} or messages of {role, content}, with an optional delay in "
         "seconds before a question"),
        ("--trace", Path, None, "FILE", "Azure, Mooncake or plain CSV; implies --dataset-name trace"),
        ("--workload", None, None, "NAME|FILE", "lengths, objectives, classes and rounds (tool calls) of a workload "
         "of `jaxserve simulate`, as in slos-serve-toolllm; implies --dataset-name workload and needs "
         "--request-rate"),
        ("--own-slowdown", bool, None, None, "workload: base objectives that are slowdowns on the TTFT of this "
         "server when idle, which is measured first, instead of the paper's"),
        ("--output-len", int, None, "TOKENS", "output length of all requests, not that of the data set"),
        ("--max-len", int, None, "TOKENS", "files: skip longer prompts with outputs [sharegpt: 2048]"),
        ("--prompt-column", None, "prompt", "NAME", "hf: column of texts or conversations [prompt]"),
        ("--output-column", None, None, "NAME", "hf: column of answers, or of numbers of output tokens"),
        ("--think-time", _SECONDS, 0.0, "TIME", "multi-turn: mean time before each further question, exponential, as "
         "in 5s; the file's delays come first [0]"),
        ("--max-turns", int, None, "N", "multi-turn: most questions of a conversation [all]"),
        ("--num-prompts", int, None, "N", "requests; of multi-turn and workload, sessions [100; trace: all]"),
        ("--random-input-len", int, 128, "TOKENS", ""),
        ("--random-output-len", int, 32, "TOKENS", ""),
        ("--random-range-ratio", float, 0.0, "R", "lengths uniform in mean·(1±R) [0]"),
        ("--random-ids", _range, None, "LOW:HIGH", "token ids of prompts [those of a text, from /tokenize]"),
        ("--prompt-scale", float, 1.0, "X", "trace, workload: divide prompt lengths by X"),
        ("--output-scale", float, 1.0, "X", "trace, workload: divide output lengths by X"),
        ("--ignore-eos", argparse.BooleanOptionalAction, None, None, "generate outputs of the requested length; not "
         "in OpenAI's API [on, except for openai and openai-chat]"),
        ("--seed", seed_of, 0, None, ""),
    )  # fmt: skip


def _add_load(group: Any) -> None:
    add_flags(
        group,
        ("--request-rate", float, inf, "RPS", "requests, or sessions, per second [inf: all at once]"),
        ("--burstiness", float, 1.0, "SHAPE", "shape of gamma gaps; 1 is Poisson [1]"),
        ("--time-scale", float, 1.0, "X", "trace: multiply arrival times by X (0.5: twice as fast)"),
        ("--max-concurrency", int, None, "N", "most concurrent calls; waits count as the client's delay"),
        ("--num-warmups", int, 0, "N", "requests sent first, not counted"),
        ("--num-runs", int, 1, "N", "repeat with other prompts and arrival times [1]"),
        ("--time-limit", _SECONDS, None, "TIME", "end then, as with Ctrl-C, with what has been measured"),
        ("--find-goodput", bool, None, None, "search for the highest rate that reaches --attainment"),
        ("--attainment", float, 0.9, "SHARE", ""),
    )  # fmt: skip


def _add_objectives(group: Any) -> None:
    add_flags(
        group,
        ("--ttft-slo", _SECONDS, None, "8s", "TTFT objective of requests without their own; sent to jaxserve, and "
         "judged here for any backend"),
        ("--tpot-slo", _SECONDS, None, "50ms", "TPOT objective, likewise"),
    )  # fmt: skip
    group.add_argument(
        "--slo-class",
        type=checked(parse_slo_class),
        action="append",
        default=[],
        metavar="NAME=SHARE,ttft:MS,tpot:MS",
        help="objectives of a share of the requests; repeat for each class. Also tbt:MS, thinking:MS and answer:MS "
        "(TPOT of a stage, judged by the server) and tier:NAME (sent; judged here by the other objectives)",
    )
    add_flags(
        group,
        ("--slo-file", Path, None, "FILE", "YAML with `classes`, each with share, ttft, tpot, tbt, stages, tier, or "
         "best_effort; or the server's file of tiers. Requests that name a class (custom, trace, workload) get its "
         "objectives"),
    )  # fmt: skip
    text = "objectives of requests without their own: ttft, tpot, tbt, e2el; not sent"
    group.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=text)


def _add_results(group: Any) -> None:
    add_flags(
        group,
        ("--percentile-metrics", None, "ttft,tpot,itl,e2el", "NAMES", f"from {','.join(METRICS)}"),
        ("--metric-percentiles", None, "99", "NUMBERS", "for example 50,90,99 [99]"),
        ("--save-result", bool, None, None, "write a JSON file and a plot"),
        ("--save-detailed", bool, None, None, "with an entry for each request"),
        ("--result-dir", Path, Path("."), "DIR", ""),
        ("--result-filename", None, None, "NAME", "[backend-rate-model-time.json]"),
    )
    group.add_argument(
        "--metadata", nargs="+", default=[], type=_pair, metavar="NAME=VALUE", help="saved in the JSON file"
    )


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} must read NAME=VALUE")
    return name, value


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value


def _range(text: str) -> range:
    low, _, high = text.partition(":")
    try:
        lengths = range(int(low), int(high))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must read LOW:HIGH") from error
    if not (lengths and lengths.start >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: LOW must be at least 0 and below HIGH")
    return lengths


def plan_of(args: argparse.Namespace) -> Plan:
    """Build the plan from the flags. Raises InvalidValue."""
    dataset = _dataset(args)
    _check_numbers(args)
    try:
        percentiles = tuple(float(number) for number in args.metric_percentiles.split(","))
    except ValueError as error:
        raise InvalidValue(f"metric_percentiles={args.metric_percentiles!r}: {error}", "metric_percentiles") from error
    own = {name: getattr(args, name) for name in Plan.__dataclass_fields__ if hasattr(args, name)}
    own |= {
        "dataset_name": dataset,
        "dataset_path": args.trace or args.dataset_path,
        "num_prompts": args.num_prompts or (None if dataset == "trace" else 100),
        "workload": find_workload(args.workload) if args.workload else None,
        "slo_class": _classes(args),
        "goodput": tuple(args.goodput),
        "percentile_metrics": tuple(args.percentile_metrics.split(",")),
        "metric_percentiles": percentiles,
        "metadata": dict(args.metadata),
        "vocabulary": args.random_ids or (),
    }
    return Plan(**own)


def _dataset(args: argparse.Namespace) -> str:
    """Return the data set that the flags name together. Raises InvalidValue."""
    implied = {"trace": args.trace, "workload": args.workload}
    named = [name for name, value in implied.items() if value is not None]
    dataset = str(named[0] if named else args.dataset_name)
    if len(named) > 1 or (named and args.dataset_name not in ("random", dataset)):
        given = f"--{named[0]}" + (
            f" and --{named[1]}" if len(named) > 1 else f" and --dataset-name {args.dataset_name}"
        )
        raise InvalidValue(f"{given} name two data sets: give one", "dataset_name")
    if dataset == "trace" and args.trace is None and args.dataset_path is None:
        raise InvalidValue("--dataset-name trace needs --trace FILE", "trace")
    if dataset == "workload" and args.workload is None:
        raise InvalidValue("--dataset-name workload needs --workload NAME", "workload")
    if dataset in FILES and args.dataset_path is None:
        raise InvalidValue(f"--dataset-name {dataset} needs --dataset-path FILE", "dataset_path")
    if args.own_slowdown and dataset != "workload":
        raise InvalidValue("--own-slowdown needs --workload NAME", "own_slowdown")
    return dataset


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("num_prompts", "max_concurrency", "num_runs", "output_len", "max_len", "max_turns"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InvalidValue(f"{name}={getattr(args, name)} must be at least 1", name)
    if not 0 <= args.think_time < inf:
        raise InvalidValue(f"think_time={args.think_time:g} must be at least 0 seconds", "think_time")
    if args.num_runs > 1 and args.find_goodput:
        raise InvalidValue(f"num_runs={args.num_runs} repeats a run, --find-goodput searches: give one", "num_runs")


def _classes(args: argparse.Namespace) -> tuple[SloClass, ...]:
    if args.slo_file is None:
        return tuple(args.slo_class)
    if args.slo_class:
        raise InvalidValue("--slo-file and --slo-class both define classes: give one", "slo_file")
    return load_slo_file(args.slo_file)


def target_of(args: argparse.Namespace) -> Target:
    """Build the target from the flags. `Session` settles the model, if it is "", and what the backend sends."""
    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    return Target(
        base_url=base,
        model=args.model or "",
        endpoint=args.endpoint,
        headers=dict(args.header),
        extra_body=args.extra_body,
        api_key=args.api_key,
    )


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; return 0 if at least one request succeeded."""
    plan, target = plan_of(args), target_of(args)
    plan.check()
    session = Session(plan, target, args.ignore_eos)
    return asyncio.run(session.run())
