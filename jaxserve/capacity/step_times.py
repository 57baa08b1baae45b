"""Step times of a model on T devices, for simulations: fitted if a preset fits, otherwise derived from data sheets.

A derived step has the form of `sched/perf/derive.py`. Its efficiencies and their error are ASSUMED, and have the
sources that `EFFICIENCIES` states. What is known of them (tests/capacity/test_step_times.py): the form of a dense model
meets the one loaded TPOT that FairBatching publishes to 5 %; of MiniMax-M2.5 on four H200, the derived times are 0.51
(prefill of 8K), 1.05 (of 128K), 0.54 and 0.20 (decode at 8K and 128K) of those that Kairos publishes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from jaxserve.capacity.costs import Costs
from jaxserve.capacity.fit import Fit, Setting
from jaxserve.config import load_yaml, preset
from jaxserve.errors import InvalidValue
from jaxserve.sched.perf.derive import Derived
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.sim.latency import Assumed, Latency

ALL_REDUCE = 15e-6  # seconds of one, twice a layer; ASSUMED as in the presets of configs/latency


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a device's peaks that steps reach, and seconds beside them.

    compute, memory: shares. launches: seconds per step. error: of the step times, see `Latency`.
    """

    compute: float
    memory: float
    launches: float
    error: float
    source: str


ROW = 10e-6  # seconds of a running decode: the head and sampling; ASSUMED as in the presets

EFFICIENCIES = {
    "dense": Efficiency(
        0.6, 0.8, 2e-3, 0.25,
        "ASSUMED: 0.6 of FLOP/s and 0.8 of bytes/s, as the presets of dense models have it; 0.5 to 0.75 and 0.65 to "
        "1 are as plausible, hence up to 1.25 times as short or as long",
    ),
    "experts": Efficiency(
        0.3, 0.7, 3e-3, 1.0,
        "ASSUMED: 0.3 of FLOP/s (attention 0.6) and 0.7 of bytes/s, as the presets of mixtures of experts have it; "
        "published times of MiniMax-M2.5 are 0.95 to 1.95 times as long (4.9 times for decode at 128K), hence "
        "up to twice as short or as long",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A simulated instance of one mesh, and where its step times come from."""

    latency: Latency
    source: str

    @property
    def error(self) -> float:
        return self.latency.error


def step_times(names: Sequence[str], setting: Setting, fit: Fit, given: Latency | None = None) -> StepTimes:
    """Return the step times of an instance that fits.

    names: of the model, as a preset's `measured_on` may spell it. given: a preset to use instead of those of
    configs/latency. A preset of another T is scaled by what the derived times change from its T to this one.

    Raises InvalidValue if the model cannot be split over the devices of the preset.
    """
    assert fit.costs is not None
    fitted = [given] if given is not None else list(_fitted(names, setting.name))
    derived = _derived(setting, fit.costs)
    kind = EFFICIENCIES[_kind(fit.costs)]
    if not fitted:
        latency, source = derived, f"derived from data sheets: {kind.source}"
    else:
        base = min(fitted, key=lambda candidate: (abs(candidate.tensor_parallel - fit.tp), candidate.name))
        latency, source = (
            base,
            f"preset {base.name}, up to {1 + base.error:g} times as short or as long, as its file says",
        )
        if base.tensor_parallel != fit.tp:
            latency = _scaled(base, derived, setting, fit.costs)
            source = f"preset {base.name}, scaled from T={base.tensor_parallel} as derived times are; {kind.source}"
    latency = replace(latency, kv_tokens=fit.tokens, page_size=fit.page_size)
    return StepTimes(latency, source)


def _kind(costs: Costs) -> str:
    return "dense" if costs.spec.moe is None else "experts"


def _derived(setting: Setting, costs: Costs) -> Latency:
    """Derive an instance. All-reduces slow the arithmetic of a token, and add a fixed time to a step."""
    device, tp, spec, kind = setting.device, costs.tp, costs.spec, EFFICIENCIES[_kind(costs)]
    token, sent = costs.token / (device.flops * kind.compute), 0.0
    if tp > 1:
        sent = 2 * spec.layers * spec.dim * 2 * (2 * (tp - 1) / tp) / device.link
    compute = kind.compute * token / (token + sent)
    first, last = costs.decode(1, 1), costs.decode(1, setting.context)
    slope = tp / max(1, setting.context - 1)
    pair = (last.flops - first.flops) * slope  # FLOP for a token of context; less with sliding windows
    times = Derived(
        flops=device.flops * tp,
        bandwidth=device.bandwidth * tp,
        compute=compute,
        memory=kind.memory,
        parameters=costs.token * tp / 2,
        weights=(costs.every + costs.head) * tp,
        attention=pair * kind.compute / EFFICIENCIES["dense"].compute,  # attention is no narrow matrix
        kv=(last.bytes - first.bytes) * slope,
        experts=costs.experts * tp,
        p_moe=0.0 if spec.moe is None else spec.moe.chosen / spec.moe.experts,
        overhead=kind.launches + (2 * spec.layers * ALL_REDUCE if tp > 1 else 0.0),
        hidden=1.0,
        row=ROW,
    )
    return Latency(
        f"derived-{setting.name}-tp{tp}",
        kv_bytes_per_token=round(costs.kv_token * tp),
        kv_tokens=1,
        page_size=1,
        tensor_parallel=tp,
        derived=times,
        link_bandwidth=device.link,
        layers=spec.layers,
        error=kind.error,
    )


def _scaled(base: Latency, derived: Latency, setting: Setting, costs: Costs) -> Latency:
    """Scale each coefficient of a fitted preset by what it changes from the preset's T to another."""
    there = Costs.of(costs.spec, base.tensor_parallel, costs.dtype, costs.cache_dtype)
    measured, old, new = base.solve(), _derived(setting, there).solve(), derived.solve()
    values = {}
    for coefficient in fields(Coefficients):
        was, now = getattr(old, coefficient.name), getattr(new, coefficient.name)
        values[coefficient.name] = getattr(measured, coefficient.name) * (now / was if was else 1.0)
    return replace(
        derived,
        name=f"{base.name}-as-tp{costs.tp}",
        points=(),
        assumed=Assumed(),
        derived=None,
        coefficients=Coefficients(**values),
        error=max(base.error, derived.error),
    )


@cache
def _presets() -> tuple[Latency, ...]:
    folder = preset("latency", "minimax-m2.5-h200-tp4").parent
    return tuple(load_yaml(path, Latency) for path in sorted(folder.glob("*.yaml")))


def _fitted(names: Sequence[str], device: str) -> Iterator[Latency]:
    """Yield the presets whose step times were measured or published for this model on this device."""
    wanted = {name.lower() for name in names}
    for latency in _presets():
        known = latency.measured_on
        if latency.derived is None and known.model.lower() in wanted and known.device.lower() == device:
            yield latency


def load_preset(text: str) -> Latency:
    """Read a latency preset by name or file. Raises InvalidValue."""
    path = Path(text) if Path(text).suffix in (".yaml", ".yml") else preset("latency", text)
    try:
        return load_yaml(path, Latency)
    except FileNotFoundError as error:
        raise InvalidValue(f"latency preset {text} does not exist", "latency") from error
