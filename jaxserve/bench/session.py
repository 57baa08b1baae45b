"""A benchmark run: asks the server what it is, sends the load, prints tables and writes files."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from math import inf, isinf
from statistics import median
from typing import Any

from jaxserve.bench import load, result, tables, texts
from jaxserve.bench.backends import AUTO, BACKENDS
from jaxserve.bench.client import Outcome, Sender, Target, open_sender
from jaxserve.bench.datasets import estimate
from jaxserve.bench.discover import choose_backend, discover, wait_until_ready
from jaxserve.bench.drive import Probe, Run, drive, find_goodput
from jaxserve.bench.plan import Plan
from jaxserve.errors import InvalidValue
from jaxserve.report.progress import bar

WARM_SEED = 1_000_003  # prompts of warm-ups differ from those that are measured
ALONE = (256, 2048)  # tokens of the prompts that measure an idle server, before --prompt-scale
REPEATS = 3
SLOPE = 1e-9  # least seconds per token, where noise hides what a longer prompt takes


class Session:
    """A run of a plan against a server.

    ignore_eos: the value of the flag; None is the backend's default.
    """

    def __init__(self, plan: Plan, target: Target, ignore_eos: bool | None = None) -> None:
        self.plan = plan
        self.target = target
        self._ignore_eos = ignore_eos
        self.goals = result.Goals.parse(plan.goodput)
        self.vocabulary = plan.vocabulary
        self.writer = plan.writer()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Run the plan; return 0 if a request succeeded, or a rate reached the goal, and 130 after Ctrl-C.

        Ctrl-C and `--time-limit` end it with what there is; a second Ctrl-C ends it at once.
        """
        loop, interrupted = asyncio.get_running_loop(), False

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            self._stop.set()
            loop.remove_signal_handler(signal.SIGINT)

        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            status = await self._run()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        return 130 if interrupted else status

    async def _run(self) -> int:
        await wait_until_ready(self.target, self.plan.ready_check_timeout_sec)
        await self._know_server()
        plan = self.plan
        async with open_sender(self.target) as sender:
            if plan.num_warmups:
                warm = replace(plan, dataset_name="random", num_prompts=plan.num_warmups, request_rate=inf)
                await drive(self._calls(plan.seed + WARM_SEED, warm), sender, max_concurrency=8)
            if plan.own_slowdown:
                await self._measure_alone(sender)
            if plan.time_limit is not None:
                asyncio.get_running_loop().call_later(plan.time_limit, self._stop.set)
            if plan.find_goodput:
                return await self._search(sender)
            runs: list[Run] = []
            results: list[dict[str, Any]] = []
            for number in range(plan.num_runs):
                calls = self._calls(plan.seed + number)
                label = "requests" if plan.num_runs == 1 else f"run {number + 1} of {plan.num_runs}"
                runs.append(await self._drive(calls, sender, label))
                results.append(self.result(runs[-1], plan.rate(calls)))
                self.show(runs[-1], results[-1])
                if self._stop.is_set():
                    break
        saved = results[0]
        if len(runs) > 1:
            tables.show_runs(results)
            saved = {**tables.mean_of(results), "num_runs": len(runs), "runs": results}
        self._save(saved, runs)
        return 0 if any(run["completed"] for run in results) else 1

    async def _know_server(self) -> None:
        """Settle the backend, the model and the vocabulary."""
        plan = self.plan
        if plan.backend == AUTO:
            name = await choose_backend(self.target, chat=plan.dataset_name == "multi-turn")
            self.plan = plan = replace(plan, backend=name)
            self.writer = plan.writer()
            print(f"{self.target.base_url}: backend {name} ({_sends(name, bool(self.goals.limits))})")
        plan.check_backend()
        backend = BACKENDS[plan.backend]
        ignore = backend.ignore_eos if self._ignore_eos is None else self._ignore_eos
        self.target = replace(self.target, chat=backend.chat, objectives=backend.objectives, ignore_eos=ignore)
        known = plan.vocabulary if self.writer is None else self.writer.vocabulary
        self.target, self.vocabulary = await discover(self.target, known)

    async def _measure_alone(self, sender: Sender) -> None:
        """Base the slowdowns of the workload on the TTFT of two prompts on the idle server."""
        plan = self.plan
        times: dict[int, float] = {}
        for tokens in ALONE:
            length = max(1, round(tokens / plan.prompt_scale))
            alone = replace(plan, dataset_name="random", num_prompts=1, random_input_len=length, output_len=1)
            ttfts = []
            for turn in range(REPEATS):
                calls = self._calls(plan.seed + WARM_SEED + turn + 1, replace(alone, random_range_ratio=0.0))
                outcome = (await drive(calls, sender)).outcomes[0]
                if not outcome.ok:
                    raise InvalidValue(f"--own-slowdown: a prompt of {length} tokens failed: {outcome.error}")
                ttfts.append(outcome.ttft)
            times[length] = median(ttfts)
        (short, first), (long, last) = times.items()
        slope = max((last - first) / (long - short), SLOPE)
        self.plan = replace(plan, workload=plan.slowed(lambda tokens: first + slope * (tokens - short)))
        print(f"idle server: TTFT {first * 1e3:.3g} ms for {short} tokens, {last * 1e3:.3g} ms for {long}")

    def _calls(self, seed: int, plan: Plan | None = None) -> list[load.Call]:
        """Build the calls of a plan, with prompts in the server's form."""
        calls = (plan or self.plan).calls(self.vocabulary, seed, self._count or estimate)
        return calls if self.writer is None else texts.as_text(calls, self.writer)

    @property
    def _count(self) -> Callable[[str], int] | None:
        """Counts tokens with --tokenizer, if given."""
        return self.writer.count if isinstance(self.writer, texts.TokenizerWriter) else None

    async def _drive(self, calls: Sequence[load.Call], sender: Sender, label: str) -> Run:
        with bar(label) if label else nullcontext() as progress:
            limit = self.plan.max_concurrency
            run = await drive(calls, sender, max_concurrency=limit, progress=progress, stop=self._stop)
        if run.left:
            print(f"stopped: {run.left} of {len(calls)} requests were not sent, or have no answer")
        if self._count is not None:
            for outcome in run.outcomes:
                _recount(outcome, self._count)
        return run

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
                times = load.arrivals(load.starts(calls), rate, plan.burstiness, plan.seed + len(runs))
                calls = load.schedule(calls, times)
            else:
                calls = load.faster(calls, rate / own)
            runs.append(await self._drive(calls, sender, f"{rate:.3g} requests/s"))
            tried.append(self.result(runs[-1], rate))
            if self._stop.is_set():
                return 0.0
            if "slo_attainment" not in tried[-1]:
                raise InvalidValue("--find-goodput: no request has an objective", "goodput")
            return float(tried[-1]["slo_attainment"])

        start = plan.rate(plan.calls(self.vocabulary, plan.seed))
        first, stopped = 1.0 if isinf(start) else start, self._stop.is_set
        peak, probes = await find_goodput(measure, start=first, target=plan.attainment, stopped=stopped)
        best = max((i for i, probe in enumerate(probes) if probe.rate <= peak), key=lambda i: probes[i].rate, default=0)
        self.show(runs[best], tried[best])
        tables.show_probes(plan.attainment, peak, probes, tried)
        saved = {**tried[best], "goodput_rate": peak, "goodput_attainment": plan.attainment}
        saved["probes"] = [{"rate": probe.rate, "slo_attainment": probe.attainment} for probe in probes]
        self._save(saved, [runs[best]], probes)
        return 0 if peak else 1

    def result(self, run: Run, rate: float) -> dict[str, Any]:
        """Return the JSON of a run, without details."""
        plan = self.plan
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "backend": plan.backend,
            "model_id": self.target.model,
            **plan.fields,
            "num_prompts": len(run.outcomes),
            **({"unanswered": run.left} if run.left else {}),
            "request_rate": "inf" if isinf(rate) else rate,
            "burstiness": plan.burstiness,
            "max_concurrency": plan.max_concurrency,
            "seed": plan.seed,
            **plan.metadata,
            **result.summary(
                run.outcomes,
                run.duration,
                goals=self.goals,
                percentiles=plan.metric_percentiles,
                metrics=plan.percentile_metrics,
            ),
        }

    def show(self, run: Run, figures: dict[str, Any]) -> None:
        plan = self.plan
        title = f"{self.target.model} at {self.target.base_url}"
        tables.show(title, figures, plan.percentile_metrics, plan.metric_percentiles)
        for line in result.errors(run.outcomes):
            print(f"error: {line}")

    def _save(self, saved: dict[str, Any], runs: Sequence[Run], probes: Sequence[Probe] = ()) -> None:
        """Write the JSON, and a plot of the first run."""
        plan = self.plan
        if not plan.save_result:
            return
        from jaxserve.bench.plots import plot  # importing matplotlib takes a second

        if plan.save_detailed:
            saved = saved | result.detail(runs[0].outcomes)
        offered = saved["request_rate"]
        rate = offered if isinstance(offered, str) else f"{offered:.4g}"
        model = self.target.model.split("/")[-1]
        path = plan.result_dir / (plan.result_filename or f"{plan.backend}-{rate}qps-{model}-{saved['date']}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(saved, indent=1 if not plan.save_detailed else None) + "\n", encoding="utf-8")
        what = plan.fields.get("workload", plan.dataset_name)
        title = f"{model}, {len(runs[0].outcomes)} requests ({what}), {rate} requests/s"
        plot(path.with_suffix(".png"), runs[0], self.goals, probes, plan.attainment, title)
        print(f"wrote {path} and {path.with_suffix('.png').name}")


def _sends(name: str, goodput: bool) -> str:
    """Return what a backend sends, in words. `goodput`: whether there are objectives of `--goodput`."""
    backend = BACKENDS[name]
    if backend.objectives:
        judged = ", but those of --goodput are judged here only: to send them, use --ttft-slo and --tpot-slo"
        return "objectives are sent with requests" + judged * goodput
    if backend.ignore_eos:
        return "text and ignore_eos" if backend.text else "token ids and ignore_eos"
    return "standard fields and text"


def _recount(outcome: Outcome, count: Callable[[str], int]) -> None:
    """Count the tokens of a request with the tokenizer, if the server has not; thinking is not in the text."""
    if not outcome.ok or outcome.counted or outcome.thoughts is not None:
        return
    prompt = outcome.call.text
    outcome.prompt_tokens = count(prompt) if isinstance(prompt, str) else len(prompt)
    outcome.output_tokens = max(count(outcome.text), outcome.output_tokens)  # a chunk has at least one token
