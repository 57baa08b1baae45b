"""Latency presets: what is known of a model on a device, and the simulated instance that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf

from ..api.errors import InvalidValue
from ..api.preemption import LEAD, WHOLE, Boundary
from ..perf.buckets import NONE, Buckets
from ..perf.derive import Derived
from ..perf.fit import Point, solve
from ..perf.model import Coefficients
from .executor import Device


@dataclass(frozen=True, slots=True)
class Assumed:
    """Coefficients that no published point determines (see perf.model.Coefficients). None: to be solved for."""

    fixed: float | None = None
    prefill: float | None = None
    decode: float | None = None
    quadratic: float | None = None
    longest: float | None = None
    context: float | None = None
    w_moe: float | None = None
    p_moe: float | None = None
    draft: float | None = None

    def given(self) -> dict[str, float]:
        values = {coefficient.name: getattr(self, coefficient.name) for coefficient in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """The model and device of measured step times, as a server names them. Empty if unknown."""

    model: str = ""
    device: str = ""

    def known(self) -> dict[str, str]:
        return {name: value for name, value in (("model", self.model), ("device", self.device)) if value}


@dataclass(frozen=True, slots=True)
class Latency:
    """One instance: `tensor_parallel` devices that hold one copy of the model.

    Step times come from `points` and `assumed`, from `coefficients`, or are `derived` from data sheets.
    Times are in seconds, bandwidths in bytes/s.

    kv_tokens: capacity of the KV pool. chunk: tokens per chunk of the published prefill points.
    noise: standard deviation of the lognormal factor on step times. buckets: sizes that steps are padded to.
    measured_on: a server with this model and device uses the preset as its step-time model.
    error: of the step times, which may be up to 1 + error times as long, or as short; for ranges of answers. ASSUMED
        unless the file says where it is from.
    """

    name: str
    kv_bytes_per_token: int
    kv_tokens: int
    tensor_parallel: int = 1
    page_size: int = 64
    chunk: int = 8192
    points: tuple[Point, ...] = ()
    assumed: Assumed = field(default_factory=Assumed)
    coefficients: Coefficients | None = None
    derived: Derived | None = None
    link_bandwidth: float = 450e9
    link_latency: float = 1e-3
    layers: int = 1
    operators: int = 5  # per layer, as FlowPrefill counts; the engine cuts a layer less often (boundary.py)
    noise: float = 0.0
    buckets: Buckets = NONE
    measured_on: MeasuredOn = field(default_factory=MeasuredOn)
    error: float = 0.25

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "page_size", "chunk", "layers", "operators", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise InvalidValue(f"{name}={getattr(self, name)!r} must be at least 1", name)
        if not 0 <= self.error < inf:
            raise InvalidValue(f"error={self.error!r} must be 0 or more", "error")
        given = [bool(self.points), self.coefficients is not None, self.derived is not None]
        if sum(given) != 1:
            raise InvalidValue(
                "a latency preset has exactly one of points (and assumed), coefficients and derived", "points"
            )
        if not self.points and self.assumed.given():
            raise InvalidValue("assumed must be empty without points to solve for the other coefficients", "assumed")
        self.device()

    def solve(self) -> Coefficients:
        """Return the step-time model. Raises InvalidValue if the points do not determine it."""
        if self.derived is not None:
            return self.derived.coefficients()
        return self.coefficients or solve(self.points, self.assumed.given(), self.chunk)

    def with_coefficients(self, values: Mapping[str, float]) -> Latency:
        """Replace coefficients by name, in seconds (p_moe is a share), for sensitivity studies.

        If the preset assumes a coefficient, the new value is assumed instead and the others are solved for
        again, so that the published points still hold. If a coefficient was solved for, derived or given,
        it is replaced, and the points no longer hold. Raises InvalidValue for an unknown name, or if no
        coefficients reproduce the points.
        """
        allowed = [coefficient.name for coefficient in fields(Coefficients)]
        for name in values:
            if name not in allowed:
                raise InvalidValue(f"coefficient {name!r} must be one of {', '.join(allowed)}", name)
        assumed = self.assumed.given()
        kept = replace(self, assumed=Assumed(**assumed | {k: v for k, v in values.items() if k in assumed}))
        solved = kept.solve()
        others = {name: value for name, value in values.items() if name not in assumed}
        if not others:
            return kept
        return replace(kept, points=(), assumed=Assumed(), derived=None, coefficients=replace(solved, **others))

    def scaled(self, *, prefill: float = 1.0, decode: float = 1.0) -> Latency:
        """Multiply the times of prompt tokens and of all else: reading weights and KV, launches, sampling."""
        truth = self.solve()
        values = {
            coefficient.name: getattr(truth, coefficient.name)
            * (prefill if coefficient.name in ("prefill", "quadratic") else decode)
            for coefficient in fields(Coefficients)
        }
        values["p_moe"] = truth.p_moe
        return replace(self, points=(), assumed=Assumed(), derived=None, coefficients=Coefficients(**values))

    def device(
        self,
        boundary: str = "layer",
        *,
        lead: float = LEAD,
        pages: int | None = None,
        page_size: int | None = None,
    ) -> Device:
        """Return the simulated instance.

        Steps are cut at `boundary`, as in the engine. lead: see Device. `pages` and `page_size` override the
        preset for experiments.
        """
        size = page_size or self.page_size
        return Device(
            pages=pages or self.kv_tokens // size,
            page_size=size,
            kv_bytes_per_token=self.kv_bytes_per_token,
            bandwidth=self.link_bandwidth,
            latency=self.link_latency,
            segments=self.segments(boundary),
            lead=lead,
            short=WHOLE,
            noise=self.noise,
        )

    def segments(self, boundary: str) -> int:
        """Return the number of segments of a step for a boundary: `op`, `layer`, `layers:k` or `chunk`."""
        return Boundary.parse(boundary).segments(self.layers)
