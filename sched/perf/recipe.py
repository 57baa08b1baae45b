"""How to make a scheduler's step-time model, as plain data that a server writes to its journal for replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..api.errors import InvalidValue
from ..api.perf import Load, PerfModel
from .buckets import NONE, Buckets
from .drafted import Drafted
from .learned import LearnedModel
from .model import Coefficients
from .registry import Perf, Step, make

DEFAULT: Perf = "learned"


@dataclass(frozen=True)
class Recipe:
    """A kind of `registry.make`, fitted to points or made from known coefficients.

    points: measured (load, seconds). If coefficients are given, `learned` uses the points as its anchor.
    buckets: sizes that the engine pads steps to. p_moe: share of the experts that a token uses.
    drafts: whether rows may draft. model, device: what the points were measured on.
    """

    kind: str = DEFAULT
    points: tuple[Step, ...] = ()
    coefficients: Coefficients | None = None
    buckets: Buckets = NONE
    p_moe: float = 0.0
    drafts: bool = False
    model: str = ""
    device: str = ""

    def make(self) -> PerfModel:
        """Create the model. Raises InvalidValue if the points do not determine it."""
        plain = [step for step in self.points if not step[0].drafts]
        model: PerfModel
        if self.coefficients is not None and self.kind == "learned":
            model = LearnedModel(plain, self.buckets, coefficients=self.coefficients)
        elif self.coefficients is not None:
            model = make(self.kind, self.coefficients, buckets=self.buckets)
        else:
            model = make(self.kind, points=plain, p_moe=self.p_moe, buckets=self.buckets)
        return Drafted(model, self.points) if self.drafts else model

    def padded(self, buckets: Buckets) -> Recipe:
        """Return the recipe for an engine that pads steps to other sizes.

        Points that it would pad differently say nothing about it, unless there are no others.
        """
        alike = [point for point in self.points if buckets.placed(point[0])[1] == self.buckets.placed(point[0])[1]]
        return replace(self, points=tuple(alike) or self.points, buckets=buckets)

    def record(self) -> dict[str, Any]:
        """Return the recipe as JSON-compatible data."""
        return asdict(self) | {"points": self.points}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Recipe:
        """Create a recipe from a `record`. Raises InvalidValue if the record is of another version."""
        try:
            fields = dict(record)
            known = fields.pop("coefficients")
            return cls(
                points=tuple((Load(*load), seconds) for load, seconds in fields.pop("points")),
                coefficients=None if known is None else Coefficients(**known),
                buckets=Buckets.of(fields.pop("buckets")),
                **fields,
            )
        except (KeyError, TypeError) as error:
            said = ", ".join(f"{name}={str(value)[:30]}" for name, value in record.items())
            raise InvalidValue(f"step-time model ({said}) is of another version: {error}", "perf") from None
