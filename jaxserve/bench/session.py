"""A benchmark run: asks the server for its model, sends the load, prints tables and writes files."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import inf, isinf
from pathlib import Path
from typing import Any

import aiohttp

from jaxserve.bench import load, result, texts
from jaxserve.bench.backends import BACKENDS
from jaxserve.bench.client import Sender, Target, open_sender
from jaxserve.bench.drive import Probe, Run, drive, find_goodput
from jaxserve.errors import InvalidValue
from jaxserve.report.plot import Panel, Series, lines
from jaxserve.report.progress import bar
from jaxserve.report.table import print_table

FALLBACK = range(32, 256)  # token ids if the server has no /tokenize


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send and how to judge it, with the names of the flags."""

    backend: str = "jaxserve"
    tokenizer: str | None = None
    dataset_name: str = "random"
    dataset_path: Path | None = None
    num_prompts: int | None = 100
    random_input_len: int = 128
    random_output_len: int = 32
    random_range_ratio: float = 0.0
    vocabulary: Sequence[int] = ()
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    seed: int = 0
    request_rate: float = inf
    burstiness: float = 1.0
    time_scale: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    find_goodput: bool = False
    attainment: float = 0.9
    ttft_slo: float | None = None  # s
    tpot_slo: float | None = None  # s
    slo_class: tuple[load.SloClass, ...] = ()
    goodput: tuple[str, ...] = ()
    percentile_metrics: tuple[str, ...] = result.METRICS
    metric_percentiles: tuple[float, ...] = (99.0,)
    save_result: bool = False
    save_detailed: bool = False
    result_dir: Path = Path(".")
    result_filename: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def calls(self, vocabulary: Sequence[int], seed: int) -> list[load.Call]:
        """Build the calls at the plan's rate; another seed gives other prompts, which no cache has."""
        if self.dataset_name == "trace":
            assert self.dataset_path is not None
            calls = load.trace_calls(
                self.dataset_path,
                count=self.num_prompts,
                vocabulary=vocabulary,
                time_scale=self.time_scale,
                prompt_scale=self.prompt_scale,
                output_scale=self.output_scale,
                seed=seed,
            )
        else:
            count = self.num_prompts or 100
            if self.dataset_name == "custom":
                assert self.dataset_path is not None
                calls = load.custom_calls(self.dataset_path, count, self.random_output_len)
            else:
                calls = load.random_calls(
                    count,
                    input_len=self.random_input_len,
                    output_len=self.random_output_len,
                    range_ratio=self.random_range_ratio,
                    vocabulary=vocabulary,
                    seed=seed,
                )
            calls = load.schedule(calls, load.arrivals(count, self.request_rate, self.burstiness, seed))
        return load.with_classes(calls, self.classes, self.seed)

    def writer(self) -> texts.Writer | None:
        """Return what converts prompts to text; None if token ids are sent. Raises InvalidValue."""
        if self.tokenizer is None and not BACKENDS[self.backend].text:
            return None
        if self.vocabulary:
            raise InvalidValue("--random-ids names token ids, but this backend sends prompts as text", "random_ids")
        return texts.WordWriter() if self.tokenizer is None else texts.TokenizerWriter.load(self.tokenizer)

    @property
    def classes(self) -> tuple[load.SloClass, ...]:
        if self.slo_class or (self.ttft_slo is None and self.tpot_slo is None):
            return self.slo_class
        ttft, tpot = (None if value is None else value * 1e3 for value in (self.ttft_slo, self.tpot_slo))
        return (load.SloClass(1.0, load.Objective(ttft, tpot)),)

    def rate(self, calls: Sequence[load.Call]) -> float:
        """Return the requests per second of the calls."""
        if self.dataset_name != "trace":
            return self.request_rate
        span = calls[-1].at - calls[0].at
        return (len(calls) - 1) / span if span > 0 else inf


async def discover(target: Target, vocabulary: Sequence[int]) -> tuple[Target, Sequence[int]]:
    """Ask the server for the model's name and for token ids of its vocabulary, if they are not given.

    Raises InvalidValue if the server cannot be reached.
    """
    headers = {"Authorization": f"Bearer {target.api_key}", **target.headers}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30.0)) as http:
        try:
            if not target.model:
                async with http.get(target.base_url + "/v1/models", raise_for_status=True) as answer:
                    target = replace(target, model=str((await answer.json())["data"][0]["id"]))
            if not vocabulary:
                body = {"model": target.model, "prompt": texts.SAMPLE, "add_special_tokens": False}
                async with http.post(target.base_url + "/tokenize", json=body) as answer:
                    found = (await answer.json()).get("tokens") if answer.status == 200 else None
                vocabulary = sorted(set(found)) if found else FALLBACK
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise InvalidValue(f"no OpenAI-compatible server responds at {target.base_url} ({problem})") from error
    return target, vocabulary


class Session:
    """A run of a plan against a server."""

    def __init__(self, plan: Plan, target: Target, client: str = "auto") -> None:
        self.plan = plan
        self.target = target
        self.client = client
        self.goals = result.Goals.parse(plan.goodput)
        self.vocabulary = plan.vocabulary
        self.writer = plan.writer()

    async def run(self) -> int:
        plan = self.plan
        known = plan.vocabulary if self.writer is None else self.writer.vocabulary
        self.target, self.vocabulary = await discover(self.target, known)
        async with open_sender(self.client, self.target) as sender:
            if plan.num_warmups:
                warm = replace(plan, dataset_name="random", num_prompts=plan.num_warmups, request_rate=inf)
                await drive(self._calls(plan.seed + 1_000_003, warm), sender, max_concurrency=8)
            if plan.find_goodput:
                return await self._search(sender)
            calls = self._calls(plan.seed)
            run = await self._drive(calls, sender, "requests")
        found = self.result(run, plan.rate(calls))
        self.show(run, found)
        self._save(found, [run])
        return 0 if found["completed"] else 1

    def _calls(self, seed: int, plan: Plan | None = None) -> list[load.Call]:
        """Build the calls of a plan, with prompts in the server's form."""
        calls = (plan or self.plan).calls(self.vocabulary, seed)
        return calls if self.writer is None else texts.as_text(calls, self.writer)

    async def _drive(self, calls: Sequence[load.Call], sender: Sender, label: str | None) -> Run:
        with bar(label) if label else nullcontext() as progress:
            return await drive(calls, sender, max_concurrency=self.plan.max_concurrency, progress=progress)

    async def _search(self, sender: Sender) -> int:
        plan = self.plan
        if not (self.goals.limits or plan.classes or plan.dataset_name != "random"):
            raise InvalidValue("--find-goodput needs objectives: --goodput, --ttft-slo, --slo-class", "goodput")
        runs: list[Run] = []
        tried: list[dict[str, Any]] = []

        async def measure(rate: float) -> float:
            calls = self._calls(plan.seed + len(runs))
            own = plan.rate(calls)
            if isinf(own):
                times = load.arrivals(len(calls), rate, plan.burstiness, plan.seed + len(runs))
                calls = load.schedule(calls, times)
            else:
                calls = load.faster(calls, rate / own)
            runs.append(await self._drive(calls, sender, f"{rate:.3g} requests/s"))
            tried.append(self.result(runs[-1], rate))
            if "slo_attainment" not in tried[-1]:
                raise InvalidValue("--find-goodput: no request has an objective", "goodput")
            return float(tried[-1]["slo_attainment"])

        start = plan.rate(plan.calls(self.vocabulary, plan.seed))
        peak, probes = await find_goodput(measure, start=1.0 if isinf(start) else start, target=plan.attainment)
        best = max((i for i, probe in enumerate(probes) if probe.rate <= peak), key=lambda i: probes[i].rate, default=0)
        self.show(runs[best], tried[best])
        self._show_probes(peak, probes, tried)
        found = {**tried[best], "goodput_rate": peak, "goodput_attainment": plan.attainment}
        found["probes"] = [{"rate": probe.rate, "slo_attainment": probe.attainment} for probe in probes]
        self._save(found, [runs[best]], probes)
        return 0 if peak else 1

    def result(self, run: Run, rate: float) -> dict[str, Any]:
        """Return the JSON of a run, without details."""
        plan = self.plan
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "backend": plan.backend,
            "model_id": self.target.model,
            "dataset_name": plan.dataset_name,
            "num_prompts": len(run.outcomes),
            "request_rate": "inf" if isinf(rate) else rate,
            "burstiness": plan.burstiness,
            "max_concurrency": plan.max_concurrency,
            "seed": plan.seed,
            **({"time_scale": plan.time_scale} if plan.dataset_name == "trace" else {}),
            **({"prompt_scale": plan.prompt_scale} if plan.dataset_name == "trace" else {}),
            **({"output_scale": plan.output_scale} if plan.dataset_name == "trace" else {}),
            **plan.metadata,
            **result.summary(
                run.outcomes,
                run.duration,
                goals=self.goals,
                percentiles=plan.metric_percentiles,
                metrics=plan.percentile_metrics,
            ),
        }

    def show(self, run: Run, found: dict[str, Any]) -> None:
        plan = self.plan
        names = ["mean", "median", "std", *map(result.percentile_name, plan.metric_percentiles)]
        table = result.rows(found, plan.percentile_metrics, plan.metric_percentiles)
        print_table(f"{self.target.model} at {self.target.base_url}, ms", ["", *names], table)
        facts = [
            ["requests completed / failed", f"{found['completed']} / {found['failed']}"],
            ["duration, s", found["duration"]],
            ["requests per s, offered / done", f"{found['request_rate']} / {found['request_throughput']:.4g}"],
            ["input / output tokens", f"{found['total_input_tokens']} / {found['total_output_tokens']}"],
            [
                "output tokens per s, mean / peak",
                f"{found['output_throughput']:.4g} / {found['max_output_tokens_per_s']}",
            ],
            ["most requests at once", found["max_concurrent_requests"]],
        ]
        if "slo_attainment" in found:
            facts.append(["on time, share of requests sent", found["slo_attainment"]])
            facts.append(["on time per s (request_goodput)", found["request_goodput"]])
            facts += [[f"  {m} kept", share] for m, share in found["slo_attainment_by_metric"].items()]
            facts += [[f"  class {name}", share] for name, share in found["slo_attainment_by_class"].items()]
        print_table("", ["", ""], facts)
        for line in result.errors(run.outcomes):
            print(f"error: {line}")

    def _show_probes(self, peak: float, probes: Sequence[Probe], tried: Sequence[dict[str, Any]]) -> None:
        order = sorted(range(len(probes)), key=lambda i: probes[i].rate)
        table = [
            [probes[i].rate, probes[i].attainment, tried[i].get("p99_ttft_ms"), tried[i].get("p99_tpot_ms")]
            for i in order
        ]
        title = f"{self.plan.attainment:.0%} on time up to {peak:.4g} requests/s"
        print_table(title, ["requests/s", "on time", "p99 TTFT, ms", "p99 TPOT, ms"], table)

    def _save(self, found: dict[str, Any], runs: Sequence[Run], probes: Sequence[Probe] = ()) -> None:
        plan = self.plan
        if not plan.save_result:
            return
        if plan.save_detailed:
            found = found | result.detail(runs[0].outcomes)
        rate = found["request_rate"] if isinstance(found["request_rate"], str) else f"{found['request_rate']:.4g}"
        name = f"{plan.backend}-{rate}qps-{self.target.model.split('/')[-1]}-{found['date']}.json"
        path = plan.result_dir / (plan.result_filename or name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1 if not plan.save_detailed else None) + "\n", encoding="utf-8")
        plot(path.with_suffix(".png"), runs[0], self.goals, probes, plan.attainment)
        print(f"wrote {path} and {path.with_suffix('.png').name}")


def distribution(values: Sequence[float]) -> Series:
    """Return a cumulative distribution with at most fifty points."""
    ordered = sorted(values)
    marks = sorted({round(i * (len(ordered) - 1) / 49) for i in range(50)}) if ordered else []
    return Series([ordered[i] for i in marks], [(i + 1) / len(ordered) for i in marks])


def plot(path: Path, run: Run, goals: result.Goals, probes: Sequence[Probe], target: float) -> None:
    """Plot TTFT and TPOT distributions, and attainment over rates or scaled objectives."""
    panels = [
        Panel(title, "ms", "share of requests", {metric: distribution(result.samples(run.outcomes, metric))}, (0, 1.02))
        for metric, title in (("ttft", "time to first token"), ("tpot", "time per output token"))
    ]
    if probes:
        ordered = sorted(probes, key=lambda probe: probe.rate)
        line = Series([probe.rate for probe in ordered], [probe.attainment for probe in ordered])
        panels.append(Panel("on time", "requests/s", "share", {"on time": line}, (0, 1.02), target))
    elif any(goals.of(outcome) for outcome in run.outcomes):
        scales = [0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0]
        shares = [share_at(run, goals, scale) for scale in scales]
        line = Series(scales, shares)
        panels.append(Panel("on time", "objectives multiplied by", "share", {"on time": line}, (0, 1.02), target))
    lines(path, panels, columns=3)


def share_at(run: Run, goals: result.Goals, scale: float) -> float:
    """Return the attainment if every objective were `scale` times as long."""
    held = [(outcome, limits) for outcome in run.outcomes if (limits := goals.of(outcome))]
    kept = [o.ok and all(result.milliseconds(o, m) <= v * scale for m, v in limits.items()) for o, limits in held]
    return sum(kept) / len(kept)
