"""A latency preset: what is known of a model on a device, and the simulated instance that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from ..api.errors import InvalidValue
from ..api.preemption import DEPTH, WHOLE, Boundary
from ..perf.buckets import NONE, Buckets
from ..perf.derive import Derived
from ..perf.fit import Point, solve
from ..perf.model import Coefficients
from .executor import Device


@dataclass(frozen=True, slots=True)
class Assumed:
    """Coefficients that no published point tells, see perf.model.Coefficients; what is None is solved for."""

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
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """What step times were measured of, as a server names it; empty where nothing says."""

    model: str = ""
    device: str = ""

    def known(self) -> dict[str, str]:
        return {name: value for name, value in (("model", self.model), ("device", self.device)) if value}


@dataclass(frozen=True, slots=True)
class Latency:
    """One instance: `tensor_parallel` devices that hold the model together.

    Step times come from `points` and `assumed`, from `coefficients`, or are `derived` from data sheets. Times in
    seconds, bandwidth in bytes/s. kv_tokens: what the KV pool holds. chunk: tokens in the chunks of the published
    prefill points. noise: standard deviation of a step's lognormal factor. buckets: what the engine pads its steps to.
    measured_on: a server takes the preset for its step-time model where it has the same.
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
    operators: int = 5  # of a layer, as FlowPrefill counts them; the engine cuts a layer less often (boundary.py)
    noise: float = 0.0
    buckets: Buckets = NONE
    measured_on: MeasuredOn = field(default_factory=MeasuredOn)

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "page_size", "chunk", "layers", "operators", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise InvalidValue(f"{name}={getattr(self, name)!r} must be at least 1", name)
        given = [bool(self.points), self.coefficients is not None, self.derived is not None]
        if sum(given) != 1:
            raise InvalidValue(
                "a latency preset has one of points (with what is assumed), coefficients and derived", "points"
            )
        if not self.points and self.assumed.given():
            raise InvalidValue("what is assumed has no meaning without points to solve for the rest", "assumed")
        self.device()

    def solve(self) -> Coefficients:
        """The step-time model. Raises InvalidValue where the points do not determine it."""
        if self.derived is not None:
            return self.derived.coefficients()
        return self.coefficients or solve(self.points, self.assumed.given(), self.chunk)

    def with_coefficients(self, values: Mapping[str, float]) -> Latency:
        """The same with other coefficients, by name, in seconds (p_moe is a share); for sensitivity studies.

        What the preset assumes is assumed otherwise and the published points still hold: the rest is solved again.
        What was solved for, derived or given is replaced, and the points then no longer hold. Raises InvalidValue
        for an unknown name, or where no other coefficients can make the points hold.
        """
        allowed = [one.name for one in fields(Coefficients)]
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

    def device(
        self,
        boundary: str = "layer",
        *,
        depth: int = DEPTH,
        pages: int | None = None,
        page_size: int | None = None,
    ) -> Device:
        """The simulated instance: steps are cut at `boundary` and dispatched `depth` segments deep, as the engine does.
        `pages` and `page_size` instead of the preset's for experiments."""
        size = page_size or self.page_size
        return Device(
            pages=pages or self.kv_tokens // size,
            page_size=size,
            kv_bytes_per_token=self.kv_bytes_per_token,
            bandwidth=self.link_bandwidth,
            latency=self.link_latency,
            segments=self.segments(boundary),
            ahead=depth - 1,
            short=WHOLE,
            noise=self.noise,
        )

    def segments(self, boundary: str) -> int:
        """Equal pieces of a step at whose ends it may stop: `op`, `layer`, `layers:k` or `chunk`."""
        return Boundary.parse(boundary).segments(self.layers)
