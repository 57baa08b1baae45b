"""`jaxserve fit`: compare step-time models on measured steps, and write a latency preset."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from jaxserve.errors import InvalidValue
from jaxserve.report.table import print_table
from jaxserve.sched.api.perf import Load
from jaxserve.sched.perf.buckets import NONE, Padded
from jaxserve.sched.perf.compare import Score, compare
from jaxserve.sched.perf.fit import Fit, fit, to_total
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.sched.perf.registry import KINDS, Step
from jaxserve.yamlio import nearest, text_of

DESCRIPTION = "Fit step-time models to measured steps, report their errors, and write a latency preset."
EPILOG = """examples:
  jaxserve serve --journal run.jsonl                  # serve something, then
  jaxserve fit run.jsonl --out mine.yaml              # print errors, write a preset for the simulator
  jaxserve simulate --latency mine.yaml --qps 2,3,4
  jaxserve serve --perf mine.yaml                     # no profile at start: use the preset from the first step
  jaxserve fit profile.csv --p-moe 0.03125 --out mine.yaml --kv-tokens 1000000 --kv-bytes-per-token 253952

PROFILE is a journal, or a CSV or JSONL file with one step per row: `seconds`, and the load of the step:
  prefill    prompt tokens               decode    tokens of running decodes, including drafted ones
  prefix     sum over chunks of the context before them      longest   the longest context of a running decode
  quadratic  sum over chunks of k*c + k*k/2, k tokens after c     context   sum of the contexts of running decodes
  drafts     steps of the draft model
Missing columns are 0, except that quadratic defaults to that of one chunk, and context and longest to each other's,
with equally long rows.
"""
COLUMNS = (*Load._fields, "seconds")
PAGE_SIZE = 64  # tokens, by default


class Profile(NamedTuple):
    """Measured steps in order, with the KV pool and the step-time recipe if the file has them."""

    steps: list[Step]
    kv_tokens: int | None = None
    page_size: int | None = None
    recipe: Recipe = Recipe()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="journal, CSV or JSONL of steps")
    parser.add_argument("--p-moe", type=float, default=0.0, metavar="P", help="share of experts that a token uses [0]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a latency preset to this file")
    preset = parser.add_argument_group("other fields of the preset")
    preset.add_argument("--kv-tokens", type=int, metavar="N", help="tokens in the KV pool [the journal's]")
    preset.add_argument("--page-size", type=int, metavar="N", help="tokens per page [the journal's, or 64]")
    preset.add_argument("--kv-bytes-per-token", type=int, default=0, metavar="N", help="for KV transfers [0]")
    preset.add_argument("--tensor-parallel", type=int, default=1, metavar="T", help="devices per instance [1]")
    preset.add_argument("--layers", type=int, default=1, metavar="N", help="boundaries for preemption in a step [1]")


def main(args: argparse.Namespace) -> int:
    """Run the fit. Raises InvalidValue for invalid settings or files."""
    if not 0 <= args.p_moe <= 1:
        raise InvalidValue(f"p-moe={args.p_moe!r} must be between 0 and 1", "p_moe")
    profile = read(args.profile)
    p_moe, buckets = args.p_moe or profile.recipe.p_moe, profile.recipe.buckets
    scores = compare(profile.steps, [name for name in KINDS if name != "exact"], p_moe=p_moe, buckets=buckets)
    result = fit(profile.steps, p_moe, buckets)
    print_table(
        f"{args.profile}: {result.steps} steps; error in % of the measured time",
        ["model", "MAPE", "prefill", "decode", "mixed", "median", "worst", "online"],
        [_row(score) for score in scores],
    )
    for score in scores:
        if score.problem:
            print(f"{score.name}: {score.problem}")
    fitted = {name: value for name, value in asdict(result.coefficients).items() if value}
    print("general: " + ", ".join(f"{name} {value:.4g}" for name, value in fitted.items()))
    if args.out is not None:
        tokens = args.kv_tokens or profile.kv_tokens
        if tokens is None:
            raise InvalidValue(
                "the profile has no kv-tokens: set --kv-tokens N, the tokens in the KV pool", "kv_tokens"
            )
        text = preset_text(
            args.out.stem,
            profile.steps,
            result,
            profile.recipe,
            source=args.profile.name,
            tensor_parallel=args.tensor_parallel,
            kv_bytes_per_token=args.kv_bytes_per_token,
            kv_tokens=tokens,
            page_size=args.page_size or profile.page_size or PAGE_SIZE,
            layers=args.layers,
        )
        args.out.write_text(text, encoding="utf-8")
        print(f"wrote {args.out}")
    return 0


def _row(score: Score) -> list[object]:
    kinds = score.by_kind or {}
    shares = [score.mape, *(kinds.get(kind) for kind in ("prefill", "decode", "mixed"))]
    shares += [score.median, score.worst, score.online]
    return [score.name, *(None if share is None else 100 * share for share in shares)]


def read(path: Path) -> Profile:
    """Read the steps of a journal, CSV or JSONL file. Raises InvalidValue naming line and column."""
    if not path.is_file():
        raise InvalidValue(f"profile {str(path)!r} does not exist", "profile")
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, restkey="beyond the header")
            steps = [_step(row, f"{path}:{rows.line_num}") for row in rows]
    else:
        lines = list(_objects(path))
        if lines and "kind" in lines[0][1]:
            return _journal(path)
        steps = [_step(row, where) for where, row in lines]
    if not steps:
        raise InvalidValue(f"{path} has no steps", "profile")
    return Profile(steps)


def _objects(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text_of(path).splitlines(), 1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidValue(f"{where} is not JSON: {error}", "profile") from None
        if not isinstance(row, dict):
            raise InvalidValue(f"{where} must be an object with {', '.join(COLUMNS)}", "profile")
        yield where, row


def _journal(path: Path) -> Profile:
    from jaxserve.cli.replay import perf_of  # it knows the records of an engine, and imports the engine
    from jaxserve.sched.journal import replay

    with path.open(encoding="utf-8") as lines:
        replayed = replay(lines, perf_of)
    if not replayed.steps:
        raise InvalidValue(f"no step of the journal {path} has ended", "profile")
    first = next(iter(replayed.instances.values()))
    limits = first["limits"]
    return Profile(replayed.timed, limits["pages"] * limits["page_size"], limits["page_size"], Recipe.of(first["perf"]))


def _step(row: Mapping[str, Any], where: str) -> Step:
    """Convert a row to (load, seconds)."""
    columns: dict[str, float] = {}
    for name, value in row.items():
        if name not in COLUMNS:
            raise InvalidValue(f"{where}: unknown column {name!r}; {nearest(str(name), COLUMNS)}", "profile")
        if value not in (None, ""):
            columns[name] = _number(name, value, where)
    if not columns.get("seconds"):
        raise InvalidValue(f"{where}: column 'seconds' is missing", "seconds")
    seconds = columns.pop("seconds")
    prefill, decode, prefix = (int(columns.get(name, 0)) for name in ("prefill", "decode", "prefix"))
    if not prefill and not decode:
        raise InvalidValue(f"{where}: a step needs prefill or decode tokens", "prefill")
    if decode and "longest" not in columns and "context" not in columns:
        raise InvalidValue(f"{where}: decode={decode} needs 'longest' or 'context'", "longest")
    longest = columns.get("longest", columns.get("context", 0.0) / max(decode, 1))
    return Load(
        prefill=prefill,
        decode=decode,
        quadratic=columns.get("quadratic", prefill * prefix + prefill * prefill / 2),
        longest=round(longest),
        context=int(columns.get("context", decode * longest)),
        prefix=prefix,
        drafts=int(columns.get("drafts", 0)),
    ), seconds


def _number(name: str, value: Any, where: str) -> float:
    real = name in ("seconds", "quadratic")
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < float("inf") or (name == "seconds" and not number):
        allowed = "a positive number" if name == "seconds" else "a number, 0 or more"
        raise InvalidValue(f"{where}: column {name!r}={value!r} must be {allowed}", name)
    if not real and number != int(number):
        raise InvalidValue(f"{where}: column {name!r}={value!r} must be a whole number", name)
    return number


def preset_text(name: str, steps: Sequence[Step], result: Fit, recipe: Recipe, *, source: str, **fields: int) -> str:
    """Return a latency preset as YAML: the fit, scaled to the total time, and `fields` of Latency."""
    truth = to_total(result.coefficients, steps, recipe.buckets)
    form = Padded(truth, recipe.buckets)
    errors = [np.log(seconds / form.step_time(load)) for load, seconds in steps]
    whole: dict[str, Any] = {"name": name, "coefficients": asdict(truth)}
    whole["noise"] = round(min(float(np.std(errors)), 0.99), 4)
    whole |= fields
    if recipe.buckets != NONE:
        whole["buckets"] = {key: list(sizes) for key, sizes in asdict(recipe.buckets).items()}
    if recipe.model or recipe.device:
        whole["measured_on"] = {"model": recipe.model, "device": recipe.device}
    kinds = ", ".join(f"{kind} {error:.1%}" for kind, error in result.by_kind.items())
    head = [
        f"# MEASURED: the coefficients, from {result.steps} steps of {source}.",
        f"# Fitted to the usual step, off by {result.mape:.1%} on average ({kinds}), {result.worst:.0%} at worst;",
        "# then scaled to the time that all steps took together. noise is what they leave.",
        "# ASSUMED: the link, which a profile says nothing about, and what the command line gave.",
    ]
    return "\n".join([*head, yaml.safe_dump(whole, sort_keys=False)])
