"""What a run sends and how it is judged, with the names of the flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from jaxserve.bench import load, result, texts
from jaxserve.bench.backends import AUTO, BACKENDS
from jaxserve.bench.datasets import Reading, Source, estimate
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.sim.workload import Mix, Workload, for_server
from jaxserve.whole_file import check_output

TIMED = ("trace", "workload")  # data sets with lengths and objectives of their own, and --prompt-scale
FILES = ("custom", "sharegpt", "hf", "multi-turn")  # data sets that need --dataset-path
DATASETS = ("random", *FILES, *TIMED)
SHAREGPT_LEN = 2048  # tokens of prompt and output, as in vLLM


@dataclass(frozen=True, slots=True)
class Plan(Reading):
    """What to send and how to judge it, with the names of the flags; `Reading` has those of a file.

    workload: for `--workload`; with own_slowdown its slowdowns refer to the server's times. tokenizer: a model
    folder or name. Times in seconds.
    """

    backend: str = "jaxserve"
    ready_check_timeout_sec: float = 600.0
    tokenizer: str | None = None
    dataset_name: str = "random"
    dataset_path: Path | None = None
    workload: Workload | Mix | None = None
    own_slowdown: bool = False
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
    num_runs: int = 1
    time_limit: float | None = None
    find_goodput: bool = False
    attainment: float = 0.9
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    slo_class: tuple[load.SloClass, ...] = ()
    goodput: tuple[str, ...] = ()
    percentile_metrics: tuple[str, ...] = result.METRICS
    metric_percentiles: tuple[float, ...] = (99.0,)
    save_result: bool = False
    save_detailed: bool = False
    result_dir: Path = Path(".")
    result_filename: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise InvalidValue for what would end the run after it was measured."""
        if unknown := set(self.percentile_metrics) - set(result.METRICS):
            why = f"percentile_metrics: unknown {sorted(unknown)}; allowed: {result.METRICS}"
            raise InvalidValue(why, "percentile_metrics")
        for percentile in self.metric_percentiles:
            if not 0 <= percentile <= 100:
                raise InvalidValue(f"metric_percentiles={percentile:g} must be from 0 to 100", "metric_percentiles")
        result.Goals.parse(self.goodput)
        if self.save_result:
            check_output(self.result_dir / (self.result_filename or "result.json"), "result_dir")

    def calls(self, vocabulary: Sequence[int], seed: int, tokens: Callable[[str], int] = estimate) -> list[load.Call]:
        """Build the calls at the plan's rate; another seed gives other prompts, which no cache has.

        tokens: counts the tokens of a text of a file. Raises InvalidValue.
        """
        shared: dict[str, Any] = {"vocabulary": vocabulary, "seed": seed}
        shared |= {"prompt_scale": self.prompt_scale, "output_scale": self.output_scale}
        if self.dataset_name == "trace":
            assert self.dataset_path is not None
            calls = load.trace_calls(self.dataset_path, count=self.num_prompts, time_scale=self.time_scale, **shared)
        elif self.dataset_name == "workload":
            assert self.workload is not None
            count = self.num_prompts or 100
            calls = load.workload_calls(self.workload, count=count, rate=self.request_rate, **shared)
        else:
            calls = self._untimed(vocabulary, seed, tokens)
            times = load.arrivals(load.starts(calls), self.request_rate, self.burstiness, seed)
            calls = load.schedule(calls, times)
        return load.with_classes(calls, self.classes, self.seed)

    def _untimed(self, vocabulary: Sequence[int], seed: int, tokens: Callable[[str], int]) -> list[load.Call]:
        count = self.num_prompts or 100
        if self.dataset_name == "random":
            return load.random_calls(
                count,
                input_len=self.random_input_len,
                output_len=self.output_len or self.random_output_len,
                range_ratio=self.random_range_ratio,
                vocabulary=vocabulary,
                seed=seed,
            )
        assert self.dataset_path is not None
        source = Source(
            self.dataset_path, tokens, **{field.name: getattr(self, field.name) for field in fields(Reading)}
        )
        if self.dataset_name == "sharegpt" and self.max_len is None:
            source = replace(source, max_len=SHAREGPT_LEN)
        if self.dataset_name == "custom":
            return source.custom(count, self.random_output_len)
        if self.dataset_name == "sharegpt":
            return source.sharegpt(count, seed)
        if self.dataset_name == "hf":
            return source.hugging_face(count, seed, self.random_output_len)
        return source.conversations(count, seed)

    def writer(self) -> texts.Writer | None:
        """Return what converts prompts to text; None if token ids are sent. Raises InvalidValue."""
        if self.backend == AUTO or (self.tokenizer is None and not BACKENDS[self.backend].text):
            return None
        if self.vocabulary:
            raise InvalidValue("--random-ids names token ids, but this backend sends prompts as text", "random_ids")
        return texts.WordWriter() if self.tokenizer is None else texts.TokenizerWriter.load(self.tokenizer)

    def check_backend(self) -> None:
        """Raise InvalidValue for classes with objectives that neither the server gets nor the client can judge."""
        backend = BACKENDS[self.backend]
        for slo in () if backend.objectives else (slo_class.slo for slo_class in self.slo_class):
            lost = "stages" if slo.stages and not backend.chat else ""  # a chat stream tells thinking from answer
            if slo.service_tier not in (None, BEST_EFFORT) and not slo.limits:
                lost = "only a tier"
            if lost:
                what = f"class {slo.name!r} has {lost}, which the server judges"
                raise InvalidValue(
                    f"{what}, and --backend {self.backend} sends no objectives: use jaxserve", "slo_class"
                )

    @property
    def classes(self) -> tuple[load.SloClass, ...]:
        if self.slo_class or (self.ttft_slo is None and self.tpot_slo is None):
            return self.slo_class
        ttft, tpot = (None if value is None else value * 1e3 for value in (self.ttft_slo, self.tpot_slo))
        return (load.SloClass(1.0, load.Objective(ttft, tpot)),)

    @property
    def fields(self) -> dict[str, object]:
        """The settings of the data set, for the JSON of a result."""
        named: dict[str, object] = {"dataset_name": self.dataset_name}
        if self.workload is not None:
            named["workload"] = self.workload.name
        if self.dataset_name == "trace":
            named["time_scale"] = self.time_scale
        if self.dataset_name in TIMED:
            named |= {"prompt_scale": self.prompt_scale, "output_scale": self.output_scale}
        if self.dataset_name == "multi-turn":
            named |= {"think_time": self.think_time, "max_turns": self.max_turns}
        return named

    def rate(self, calls: Sequence[load.Call]) -> float:
        """Return the requests per second of the calls; of the sessions, if they have several calls."""
        if self.dataset_name != "trace":
            return self.request_rate
        span = calls[-1].at - calls[0].at
        return (len(calls) - 1) / span if span > 0 else inf

    def slowed(self, alone: Callable[[float], float]) -> Workload | Mix | None:
        """Return the workload with slowdowns of a server that takes `alone(tokens)` seconds for a prompt."""
        if self.workload is None:
            return None
        return for_server(self.workload, lambda tokens: alone(tokens / self.prompt_scale))
