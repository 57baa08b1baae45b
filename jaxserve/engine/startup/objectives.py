"""Default SLOs of a server: configured values, or multiples of what the model achieves on this mesh."""

from __future__ import annotations

from math import ceil, floor, log10

from jaxserve.config import ServeConfig
from jaxserve.engine.runtime.info import Promise
from jaxserve.sched.api.perf import Load, PerfModel
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.api.slo import SLO
from jaxserve.settings.tiers import AUTO

DECODE = 2.0  # times a full decode step: half of the time is left for prompts between decodes
PREFILL = 4.0  # times the prefill of the longest prompt alone: three prompts may precede it
LONGEST = 8192  # longest prompt that the default covers, in tokens; longer ones should set their own objective
LEAST = SLO(ttft=0.5, tpot=0.025)  # seconds; below these, pauses of the host dominate and users see no difference
USEFUL = 4  # rows; an objective that fewer rows cannot meet leaves a server of one request at a time


def promise(config: ServeConfig, perf: PerfModel, limits: Limits, max_model_len: int) -> Promise:
    """Compute the SLO of requests that set none, and what of it cannot be met at any useful batch.

    `ttft_slo` auto: PREFILL times the prefill of the longest prompt. `tpot_slo` auto: DECODE times a
    decode step at full batch, each row at half of the context that fits. Both are rounded up to two
    digits and are at least LEAST.
    """
    auto = SLO(
        max(LEAST.ttft, _rounded(PREFILL * _prefill(perf, limits, min(max_model_len, LONGEST)))),
        max(LEAST.tpot, _rounded(DECODE * _decode(perf, limits, max_model_len, limits.rows))),
    )
    given = {"ttft": config.ttft_slo, "tpot": config.tpot_slo}
    automatic = frozenset(name for name, value in given.items() if value == AUTO)
    return Promise(config.promising(auto).slo, automatic, _broken(config, perf, limits, max_model_len))


def _broken(config: ServeConfig, perf: PerfModel, limits: Limits, max_model_len: int) -> dict[str, str]:
    """Return the reason, by objective, why this machine cannot meet a configured value."""
    broken = dict[str, str]()
    if config.tpot_slo != AUTO:
        rows = min(USEFUL, limits.rows)
        step = _decode(perf, limits, max_model_len, rows)
        if step > config.tpot_slo:
            broken["tpot"] = (
                f"tpot_slo={_time(config.tpot_slo)} cannot be met: a decode step of {rows} "
                f"request{'s' * (rows > 1)} takes {_time(step)} here"
            )
    if config.ttft_slo != AUTO:
        tokens = min(limits.tokens, max_model_len - 1)
        step = perf.step_time(Load().add_chunk(tokens, 0))
        if step > config.ttft_slo:
            broken["ttft"] = (
                f"ttft_slo={_time(config.ttft_slo)} cannot be met: a prompt of {tokens} tokens alone takes "
                f"{_time(step)} here"
            )
    return broken


def _decode(perf: PerfModel, limits: Limits, max_model_len: int, rows: int) -> float:
    """Return the seconds of a decode step of `rows` rows."""
    context = max(1, min(max_model_len, limits.pages * limits.page_size // limits.rows) // 2)
    return perf.step_time(Load().add_rows(rows, context, rows * context))


def _prefill(perf: PerfModel, limits: Limits, prompt: int) -> float:
    """Return the seconds of all steps of one prompt."""
    starts = range(0, prompt, limits.tokens)
    return sum(perf.step_time(Load().add_chunk(min(limits.tokens, prompt - start), start)) for start in starts)


def _rounded(seconds: float) -> float:
    """Round up to two digits."""
    digits = 1 - floor(log10(max(seconds, 1e-6)))
    return round(ceil(round(seconds * 10.0**digits, 6)) / 10.0**digits, max(digits, 0))


def _time(seconds: float) -> str:
    return f"{seconds:.3g}s" if seconds >= 1 else f"{1000 * seconds:.3g}ms"
