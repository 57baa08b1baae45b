"""Coefficients derived from a model's size and the device's data sheet, for models without published step times."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..api.errors import InvalidValue
from .model import Coefficients

SHARES = ("compute", "memory", "p_moe", "hidden")


@dataclass(frozen=True, slots=True)
class Derived:
    """What a step computes and reads, and how fast the devices of the model together do it.

    A step reads the weights once and the KV of its decodes. It computes 2 FLOP per parameter for each new
    token, of a prompt or not, and the attention of chunks. Reading and arithmetic do not overlap, except
    for the share `hidden` of the arithmetic of decodes: all if the decodes are fewer than the ridge
    of the roofline, at which their arithmetic takes as long as reading the weights.

    flops, bandwidth: FLOP/s and bytes/s of the data sheets, summed over devices.
    compute, memory: shares of these peaks that are reached.
    parameters: parameters that a token uses, without embeddings.
    weights: bytes that each step reads, without experts.
    experts: bytes of all experts. p_moe: share of the experts that a token uses.
    attention: FLOP per pair of a new token and a token it attends to: 4 x layers x heads x head size.
    kv: bytes that a decode reads per token of context.
    overhead: further seconds of a step. row: further seconds of a decode (sampling).
    draft: seconds of a step of the draft model.
    """

    flops: float
    bandwidth: float
    compute: float
    memory: float
    parameters: float
    weights: float
    attention: float
    kv: float
    experts: float = 0.0
    p_moe: float = 0.0
    overhead: float = 0.0
    hidden: float = 0.0
    row: float = 0.0
    draft: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in SHARES and not 0 <= value <= 1:
                raise InvalidValue(f"{field.name}={value!r} must be between 0 and 1", field.name)
            if not 0 <= value < float("inf"):
                raise InvalidValue(f"{field.name}={value!r} must be 0 or more", field.name)
        for name in ("flops", "bandwidth", "compute", "memory"):
            if getattr(self, name) == 0:
                raise InvalidValue(f"{name}=0 must be more than 0", name)
        if self.experts and not self.p_moe:
            raise InvalidValue("experts > 0 requires p_moe > 0, the share of experts that a token uses", "p_moe")

    def coefficients(self) -> Coefficients:
        """Convert to the general form. Both slopes of decode are the time to read KV, as in FairBatching's model."""
        flops, read = self.flops * self.compute, self.bandwidth * self.memory
        token = 2 * self.parameters / flops
        return Coefficients(
            fixed=self.overhead + self.weights / read,
            prefill=token,
            decode=(1 - self.hidden) * token + self.row,
            quadratic=self.attention / flops,
            longest=self.kv / read,
            context=self.kv / read,
            w_moe=self.experts / read,
            p_moe=self.p_moe,
            draft=self.draft,
        )
