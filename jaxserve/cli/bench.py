"""`jaxserve bench`: open-loop load on an OpenAI-compatible server, with flags of `vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from jaxserve.bench.backends import BACKENDS
from jaxserve.bench.client import Target
from jaxserve.bench.load import parse_slo_class
from jaxserve.bench.result import METRICS
from jaxserve.bench.session import Plan, Session
from jaxserve.errors import InvalidValue
from jaxserve.yamlio import seconds

EPILOG = """examples:
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
    add = group.add_argument
    add(
        "--backend",
        choices=BACKENDS,
        default="jaxserve",
        help="request format: openai has standard fields and text only; vllm and sglang add token ids and "
        "ignore_eos; jaxserve adds objectives; -chat uses /v1/chat/completions with text [jaxserve]",
    )
    add("--base-url", metavar="URL", help="instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", metavar="PATH", help="instead of /v1/completions or /v1/chat/completions; needs --client http")
    add("--model", help="model name in requests [the first of /v1/models]")
    add(
        "--tokenizer",
        metavar="NAME",
        help="model folder or Hugging Face name, for text prompts of exact lengths. Without it, the -chat and openai "
        "backends send common words, about one token each, and the others send token ids",
    )
    add("--api-key", default="none")
    add("--header", nargs="+", default=[], type=_pair, metavar="NAME=VALUE", help="sent with every request")
    add("--extra-body", type=_object, default={}, metavar="JSON", help="fields added to every request")
    add(
        "--client",
        choices=("auto", "openai", "http"),
        default="auto",
        help="the official openai client, or plain HTTP, with less work per token [openai if installed]",
    )


def _add_requests(group: Any) -> None:
    add = group.add_argument
    add("--dataset-name", choices=("random", "custom", "trace"), default="random")
    add(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="custom: JSON lines with prompt and optional output_tokens",
    )
    add("--trace", type=Path, metavar="FILE", help="Azure, Mooncake or plain CSV; implies --dataset-name trace")
    add("--num-prompts", type=int, default=None, metavar="N", help="[100; trace: all]")
    add("--random-input-len", type=int, default=128, metavar="TOKENS")
    add("--random-output-len", type=int, default=32, metavar="TOKENS")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths uniform in mean·(1±R) [0]")
    add("--random-ids", type=_range, metavar="LOW:HIGH", help="token ids of prompts [those of a text, from /tokenize]")
    add("--prompt-scale", type=float, default=1.0, metavar="X", help="trace: divide prompt lengths by X")
    add("--output-scale", type=float, default=1.0, metavar="X", help="trace: divide output lengths by X")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate outputs of the requested length; not in OpenAI's API [on, except for openai and openai-chat]",
    )
    add("--seed", type=int, default=0)


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--request-rate", type=float, default=inf, metavar="RPS", help="[inf: all at once]")
    add("--burstiness", type=float, default=1.0, metavar="SHAPE", help="shape of gamma gaps; 1 is Poisson [1]")
    add(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="trace: multiply arrival times by X (0.5: twice as fast)",
    )
    add("--max-concurrency", type=int, metavar="N", help="most concurrent calls; waits count as the client's delay")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests sent first, not counted")
    add("--find-goodput", action="store_true", help="search for the highest rate that reaches --attainment")
    add("--attainment", type=float, default=0.9, metavar="SHARE")


def _add_objectives(group: Any) -> None:
    add = group.add_argument
    add(
        "--ttft-slo",
        type=_seconds,
        metavar="8s",
        help="TTFT objective of requests without their own; sent to jaxserve, and judged here for any backend",
    )
    add("--tpot-slo", type=_seconds, metavar="50ms", help="TPOT objective, likewise")
    add(
        "--slo-class",
        type=_checked(parse_slo_class),
        action="append",
        default=[],
        metavar="NAME=SHARE,ttft:MS,tpot:MS",
        help="objectives of a share of the requests; repeat for each class. Also tbt:MS, thinking:MS and answer:MS "
        "(TPOT of a stage, judged by the server) and tier:NAME (sent; judged here by the other objectives)",
    )
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="objectives of requests without their own: ttft, tpot, tbt, e2el; not sent",
    )


def _add_results(group: Any) -> None:
    add = group.add_argument
    add("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES", help=f"from {','.join(METRICS)}")
    add("--metric-percentiles", default="99", metavar="NUMBERS", help="for example 50,90,99 [99]")
    add("--save-result", action="store_true", help="write a JSON file and a plot")
    add("--save-detailed", action="store_true", help="with an entry for each request")
    add("--result-dir", type=Path, default=Path("."), metavar="DIR")
    add("--result-filename", metavar="NAME", help="[backend-rate-model-time.json]")
    add("--metadata", nargs="+", default=[], type=_pair, metavar="NAME=VALUE", help="saved in the JSON file")


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        try:
            return parse(text)
        except InvalidValue as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _seconds(text: str) -> float:
    return float(_checked(seconds)(text))


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
        made = range(int(low), int(high))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must read LOW:HIGH") from error
    if not (made and made.start >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: LOW must be at least 0 and below HIGH")
    return made


def plan_of(args: argparse.Namespace) -> Plan:
    """Build the plan from the flags. Raises InvalidValue."""
    dataset = "trace" if args.trace else args.dataset_name
    if dataset == "trace" and args.trace is None and args.dataset_path is None:
        raise InvalidValue("--dataset-name trace needs --trace FILE", "trace")
    if dataset == "custom" and args.dataset_path is None:
        raise InvalidValue("--dataset-name custom needs --dataset-path FILE", "dataset_path")
    for name in ("num_prompts", "max_concurrency"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InvalidValue(f"{name}={getattr(args, name)} must be at least 1", name)
    try:
        percentiles = tuple(float(number) for number in args.metric_percentiles.split(","))
    except ValueError as error:
        raise InvalidValue(f"metric_percentiles={args.metric_percentiles!r}: {error}", "metric_percentiles") from error
    for one in args.slo_class:
        if not BACKENDS[args.backend].objectives and (one.slo.service_tier or one.slo.stages):
            what = f"slo_class of {one.slo.name!r} has a tier or a stage, which the server judges"
            raise InvalidValue(f"{what}, and --backend {args.backend} sends no objectives: use jaxserve", "slo_class")
    own = {name: getattr(args, name) for name in Plan.__dataclass_fields__ if hasattr(args, name)}
    own |= {
        "dataset_name": dataset,
        "dataset_path": args.trace or args.dataset_path,
        "num_prompts": args.num_prompts or (None if dataset == "trace" else 100),
        "slo_class": tuple(args.slo_class),
        "goodput": tuple(args.goodput),
        "percentile_metrics": tuple(args.percentile_metrics.split(",")),
        "metric_percentiles": percentiles,
        "metadata": dict(args.metadata),
        "vocabulary": args.random_ids or (),
    }
    return Plan(**own)


def target_of(args: argparse.Namespace) -> Target:
    """Build the target from the flags; the model may still be "", see `Session`."""
    backend = BACKENDS[args.backend]
    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    return Target(
        base_url=base,
        model=args.model or "",
        chat=backend.chat,
        endpoint=args.endpoint,
        headers=dict(args.header),
        extra_body=args.extra_body,
        ignore_eos=backend.ignore_eos if args.ignore_eos is None else args.ignore_eos,
        objectives=backend.objectives,
        api_key=args.api_key,
    )


def main(args: argparse.Namespace) -> int:
    """Run the benchmark; return 0 if at least one request succeeded."""
    plan, target = plan_of(args), target_of(args)
    session = Session(plan, target, args.client)
    return asyncio.run(session.run())
