"""Coefficients of a model that nobody published step times of, from its size and the device's data sheet."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..api.errors import InvalidValue
from .model import Coefficients

SHARES = ("compute", "memory", "p_moe", "hidden")


@dataclass(frozen=True, slots=True)
class Derived:
    """What a step does, and how fast the devices that hold the model together do it.

    A step reads the weights once and the KV of its decode rows, and computes 2 FLOP a parameter for each new token,
    of a prompt or not, beside the attention of chunks. Reading and arithmetic do not overlap, but for the share
    `hidden` of what decode rows compute: all of it where they are fewer than the ridge of the roofline, at which
    their arithmetic takes as long as reading the weights.

    flops, bandwidth: FLOP/s and bytes/s of the data sheets, added up. compute, memory: shares of them that are
    reached. parameters: those that a token uses, embeddings left out. weights: bytes that each step reads; experts:
    bytes of the experts, of which a token uses the share p_moe. attention: FLOP for each pair of a new token and one
    that it attends to: 4 x layers x heads x head size. kv: bytes that a decode row reads for each token of context.
    overhead: seconds of a step beside all that; row: seconds of a decode row beside them (sampling); draft: seconds
    of a step of the draft model.
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
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in SHARES and not 0 <= value <= 1:
                raise InvalidValue(f"{one.name}={value!r} must be between 0 and 1", one.name)
            if not 0 <= value < float("inf"):
                raise InvalidValue(f"{one.name}={value!r} must be 0 or more", one.name)
        for name in ("flops", "bandwidth", "compute", "memory"):
            if getattr(self, name) == 0:
                raise InvalidValue(f"{name}=0 must be more than 0", name)
        if self.experts and not self.p_moe:
            raise InvalidValue("experts needs p_moe, the share of them that a token uses", "p_moe")

    def coefficients(self) -> Coefficients:
        """The general form: both slopes of decode are the time to read KV, as in FairBatching's line."""
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
