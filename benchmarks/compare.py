"""Compare jaxserve with other engines on this machine: the same weights and prompts, alternating in one run.

Greedy, float32, fixed lengths, every engine ("side") on the same cores; sides that are not being measured are stopped.
Two models: the demo model, and a Llama of 185 M random parameters that is written for the run (hidden 1024, 16 layers,
16 heads of 64, 4 kv heads, feed-forward 2816, vocabulary 4096).

    python benchmarks/compare.py --python vllm=/opt/vllm/bin/python        # jaxserve, transformers and vLLM
    python benchmarks/compare.py --sides jaxserve transformers             # needs only the extra `test`

Sides: `jaxserve`; `vllm`, which needs a Python of its own (docs/guide/compare.md says how to build one for CPUs);
`transformers`, batched `generate`; `continuous`, transformers' continuous batching. Figures, medians of `--repeats`:

    tokens/s   requests * tokens / seconds of the whole call
    step, ms   (seconds for `tokens` tokens - seconds for 1 token) / (tokens - 1): one token of every request
    prompt, s  one prompt with one output token
    start, s   imports, loading, compilation and anything else before the first possible request
    memory     peak RSS of the process, GB

    python benchmarks/compare.py --http --python vllm=/opt/vllm/bin/python # OpenAI servers of jaxserve and vLLM

`--http` starts each side's server with its own defaults and sends the same requests to one side after another, at
Poisson times of `--rates` requests/s: half of class `chat` (32 to 128 tokens in, 32 to 64 out, TTFT 0.5 s, TPOT 60 ms),
half of class `documents` (256 to 512 in, 16 to 32 out, 8 s, 200 ms). `--slo-scale` multiplies all objectives. Every
request body carries its objectives: jaxserve schedules by them, vLLM ignores unknown fields. Reported are percentiles
of TTFT and TPOT, the share of sent requests that attained both objectives, seconds from the command to the first 200
of /health, and peak RSS summed over the processes of a server. The load generator runs on the same cores.

    python benchmarks/compare.py --http --server llamacpp=build/bin/llama-server # jaxserve and llama.cpp

llama.cpp's server gets the same weights as a float32 GGUF file that is written for the run, 32 slots of 1024 tokens, a
float32 KV cache and no prompt cache. docs/guide/compare.md says how to build the server.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import common
from compare_bench import online, page
from compare_bench.models import llama
from compare_bench.sides import Side
from compare_bench.worker import SIDES

from jaxserve.report.table import print_table


def turns(sides: Sequence[Side], requests: int, prompt: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Run all sides in turns, and return `repeats` times in seconds by side.

    One extra run first, which compiles and allocates, is not counted.
    """
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for seed in range(repeats + 1):
        firsts = set()
        for side in sides:
            answer = side.run(requests, prompt, tokens, seed)
            found[side.name].append(answer["seconds"])
            firsts.add(tuple(answer["first"]))
        if len(firsts) > 1:
            print(f"{requests} x {prompt}, seed {seed}: the sides chose {len(firsts)} different first tokens")
    return {name: seconds[1:] for name, seconds in found.items()}


def decoding(sides: Sequence[Side], requests: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    whole = turns(sides, requests, args.prompt, args.tokens, args.repeats)
    first = turns(sides, requests, args.prompt, 1, args.repeats)
    return [
        {
            "side": side.name,
            "requests": requests,
            "tokens_per_s": requests * args.tokens / median(whole[side.name]),
            "step_ms": 1e3 * (median(whole[side.name]) - median(first[side.name])) / (args.tokens - 1),
            "seconds": whole[side.name],
            "seconds_first": first[side.name],
        }
        for side in sides
    ]


def prompting(sides: Sequence[Side], length: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    found = turns(sides, 1, length, 1, args.repeats)
    return [
        {"side": name, "prompt": length, "prompt_s": median(seconds), "seconds": seconds}
        for name, seconds in found.items()
    ]


def compared(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides on one model, and return its figures."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    longest = min(config["max_position_embeddings"], max(args.prompt + args.tokens, *args.prompts) + 2)
    settings = {
        "model": str(folder), "vocabulary": config["vocab_size"], "threads": args.threads,
        "rows": max(args.requests), "length": longest, "options": {"policy": args.policy},
    }  # fmt: skip
    sides: list[Side] = []
    try:
        sides += [Side(side, args.python.get(side, ""), settings) for side in args.sides]
        rows = [row for requests in args.requests for row in decoding(sides, requests, args)]
        lengths = [length for length in args.prompts if length < longest]
        prompts = [row for length in lengths for row in prompting(sides, length, args)]
        ends = {side.name: side.run(1, 16, 1, 0)["memory"] for side in sides}
        starts = {side.name: side.start for side in sides}
    finally:
        for side in sides:
            side.close()
    return {"model": name, "decode": rows, "prefill": prompts, "start_s": starts, "memory": ends}


def show(found: dict[str, Any], sides: Sequence[str]) -> None:
    """Print a table with a column for each side and the ratios of the first side to the others."""

    def line(what: str, values: Sequence[float], less: bool) -> list[str]:
        ratios = [value / values[0] if less else values[0] / value for value in values[1:]]
        return [what, *(f"{value:.4g}" for value in values), *(f"{ratio:.2f}" for ratio in ratios)]

    def of(rows: Sequence[dict[str, Any]], key: str, value: str, less: bool) -> list[list[str]]:
        kinds = list(dict.fromkeys(row[key] for row in rows))
        return [
            line(
                f"{value}, {kind} {key}",
                [row[value] for side in sides for row in rows if row[key] == kind and row["side"] == side],
                less,
            )
            for kind in kinds
        ]

    rows = of(found["decode"], "requests", "tokens_per_s", False) + of(found["decode"], "requests", "step_ms", True)
    rows += of(found["prefill"], "prompt", "prompt_s", True)
    rows.append(line("start_s", [found["start_s"][side] for side in sides], True))
    rows.append(line("memory, GB", [found["memory"][side] / 1e9 for side in sides], True))
    print_table(found["model"], ["", *sides, *(f"{sides[0]} over {side}" for side in sides[1:])], rows)


def by_side(parser: argparse.ArgumentParser, flag: str, texts: Sequence[str], sides: Sequence[str]) -> dict[str, str]:
    """Return the files given to `--python` or `--server` by side."""
    if unknown := [text for text in texts if text.partition("=")[0] not in sides or not text.partition("=")[2]]:
        parser.error(f"{flag} {unknown[0]!r} must be SIDE=FILE with a side of {', '.join(sides)}")
    return dict(text.split("=", 1) for text in texts)


def add_online(group: Any) -> None:
    add = group.add_argument
    add("--http", action="store_true", help="compare OpenAI servers under open-loop load")
    add(
        "--server",
        nargs="+",
        default=[],
        metavar="SIDE=FILE",
        help="server program of a side that is not written in Python",
    )
    add("--rates", nargs="+", type=float, default=[0.5, 1.0, 2.0], metavar="RPS",
        help=f"requests/s; the demo model gets {online.RATE_FACTORS['demo']:g} times as many [0.5 1 2]")  # fmt: skip
    add("--duration", type=float, default=40.0, metavar="S", help="load duration per rate, side and repeat [40]")
    add("--slo-scale", type=float, default=1.0, metavar="X", help="factor that multiplies all objectives [1]")
    add("--starts", type=int, default=2, help="starts per server; the last one has warm caches [2]")
    add("--warmups", type=int, default=8, metavar="N", help="uncounted requests to each server [8]")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    choices = [*SIDES, *online.BINARIES]
    add("--sides", nargs="+", choices=choices, help="[jaxserve, those of --python and --server, transformers]")
    add("--python", nargs="+", default=[], metavar="SIDE=FILE", help="Python interpreter with the side's packages")
    add("--models", nargs="+", default=["demo", "llama"], help="demo, llama, or a folder with safetensors [demo llama]")
    add("--requests", nargs="+", type=int, default=[1, 8, 16, 32], metavar="N")
    add("--prompt", type=int, default=128, metavar="TOKENS", help="prompt length of each request [128]")
    add("--tokens", type=int, default=128, metavar="TOKENS", help="output length of each request [128]")
    add(
        "--prompts",
        nargs="+",
        type=int,
        default=[128, 512, 2048],
        metavar="TOKENS",
        help="prompt lengths that are measured alone",
    )
    add("--policy", default="unified", help="jaxserve's policy [unified]")
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=3)
    add_online(parser.add_argument_group("servers"))
    add("--page", type=Path, metavar="FILE", help="write the tables between the markers of this page")
    common.add_output(parser, "compare")
    args = parser.parse_args(argv)
    if args.http:
        common.name_output(parser, args, "compare_http")
    if not (min(args.rates) > 0 < args.slo_scale and min(args.starts, args.warmups, args.repeats) > 0 < args.duration):
        parser.error("--rates, --slo-scale, --duration, --starts, --warmups and --repeats must be positive")
    if args.tokens < 2:
        parser.error(
            f"--tokens {args.tokens} must be at least 2: the step time is measured on the tokens after the first"
        )
    args.python = by_side(parser, "--python", args.python, list(SIDES))
    args.server = by_side(parser, "--server", args.server, online.BINARIES)
    args.sides = args.sides or ["jaxserve", *args.python, *args.server, "transformers"]
    if not args.http and (only := [side for side in args.sides if side in online.BINARIES]):
        parser.error(f"{only[0]} can only be compared as a server: add --http")
    found = []
    with tempfile.TemporaryDirectory() as room:
        for name in args.models:
            folder = common.DEMO if name == "demo" else llama(Path(room) / name) if name == "llama" else Path(name)
            title = name if name in ("demo", "llama") else folder.name
            if args.http:
                found.append(online.compared(title, folder, args))
                online.show(found[-1])
            else:
                found.append(compared(title, folder, args))
                show(found[-1], args.sides)
    if args.page is not None:
        page.write(args.page, found, args.sides)
    # Paths of this machine are not part of the result.
    args.python, args.server = sorted(args.python), sorted(args.server)
    args.models = [Path(name).name for name in args.models]
    common.save(args, {"models": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
