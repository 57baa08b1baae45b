"""The objectives that a server promises by default: given ones, or multiples of what the model does on this mesh."""

from __future__ import annotations

from math import ceil, floor, log10

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.info import Promise
from jaxserve.sched.api.perf import Load, PerfModel
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.api.slo import SLO
from jaxserve.settings.tiers import AUTO

DECODE = 2.0  # decode steps of all rows: the other half is for prompts that come between them
PREFILL = 4.0  # prefills of the longest prompt, alone: three may come before it
LONGEST = 8192  # tokens of a prompt that the default still has in mind; longer ones bring their own objective
LEAST = SLO(ttft=0.5, tpot=0.025)  # seconds; below these the host's own pauses decide, and nobody sees the difference
USEFUL = 4  # rows: an objective that fewer can keep makes a server of one request at a time


def promise(config: ServeConfig, perf: PerfModel, limits: Limits, max_model_len: int) -> Promise:
    """What is promised to requests that bring no objective, and which of it cannot be kept at any useful batch.

    `ttft_slo` auto: PREFILL times the prefill of the longest prompt; `tpot_slo` auto: DECODE times a decode step at
    full batch, each row at half of the context that fits; both rounded up to two digits, and at least LEAST.
    """
    auto = SLO(
        max(LEAST.ttft, _rounded(PREFILL * _prefill(perf, limits, min(max_model_len, LONGEST)))),
        max(LEAST.tpot, _rounded(DECODE * _decode(perf, limits, max_model_len, limits.rows))),
    )
    given = {"ttft": config.ttft_slo, "tpot": config.tpot_slo}
    automatic = frozenset(name for name, value in given.items() if value == AUTO)
    return Promise(config.promising(auto).slo, automatic, _broken(config, perf, limits, max_model_len))


def _broken(config: ServeConfig, perf: PerfModel, limits: Limits, max_model_len: int) -> dict[str, str]:
    """Why, by objective, for those given that this machine cannot keep."""
    broken = dict[str, str]()
    if config.tpot_slo != AUTO:
        rows = min(USEFUL, limits.rows)
        step = _decode(perf, limits, max_model_len, rows)
        if step > config.tpot_slo:
            broken["tpot"] = (
                f"tpot_slo={_time(config.tpot_slo)} cannot be kept: a decode step of {rows} "
                f"request{'s' * (rows > 1)} takes {_time(step)} here"
            )
    if config.ttft_slo != AUTO:
        tokens = min(limits.tokens, max_model_len - 1)
        step = perf.step_time(Load().add_chunk(tokens, 0))
        if step > config.ttft_slo:
            broken["ttft"] = (
                f"ttft_slo={_time(config.ttft_slo)} cannot be kept: a prompt of {tokens} tokens alone takes "
                f"{_time(step)} here"
            )
    return broken


def _decode(perf: PerfModel, limits: Limits, max_model_len: int, rows: int) -> float:
    """Seconds of a decode step of that many rows."""
    context = max(1, min(max_model_len, limits.pages * limits.page_size // limits.rows) // 2)
    return perf.step_time(Load().add_rows(rows, context, rows * context))


def _prefill(perf: PerfModel, limits: Limits, prompt: int) -> float:
    """Seconds of the steps of one prompt."""
    starts = range(0, prompt, limits.tokens)
    return sum(perf.step_time(Load().add_chunk(min(limits.tokens, prompt - start), start)) for start in starts)


def _rounded(seconds: float) -> float:
    """Up to two digits."""
    digits = 1 - floor(log10(max(seconds, 1e-6)))
    return round(ceil(round(seconds * 10.0**digits, 6)) / 10.0**digits, max(digits, 0))


def _time(seconds: float) -> str:
    return f"{seconds:.3g}s" if seconds >= 1 else f"{1000 * seconds:.3g}ms"
