"""Devices by name, with what their makers publish of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

from jaxserve.config import preset
from jaxserve.errors import InvalidValue
from jaxserve.yamlio import load_yaml


@dataclass(frozen=True, slots=True)
class Device:
    """A line of configs/device/published.yaml."""

    title: str
    platform: Literal["gpu", "tpu", "cpu"]
    memory: float  # bytes
    bandwidth: float  # bytes/s to read them
    flops: float  # FLOP/s of dense matrix products
    source: str
    target: str | None = None  # of the compile gate
    note: str | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, float) and not 0 < value < float("inf"):
                raise InvalidValue(f"{one.name}={value!r} must be more than 0", one.name)

    @property
    def dtype(self) -> str:
        """What an engine computes in there unless it is told otherwise."""
        return "float32" if self.platform == "cpu" else "bfloat16"


@dataclass(frozen=True, slots=True)
class _Table:
    devices: Mapping[str, Device]


@cache
def devices() -> Mapping[str, Device]:
    """The table, by name."""
    return load_yaml(preset("device", "published"), _Table).devices


def parse_devices(text: str) -> tuple[str, int]:
    """`h200:8` as (name, count); without a count it is 1. Raises InvalidValue naming what is allowed."""
    name, colon, count = text.strip().lower().partition(":")
    if name not in devices():
        raise InvalidValue(f"devices={text!r}: no device {name!r} is known; allowed: {', '.join(devices())}", "devices")
    if colon and not (count.isdecimal() and int(count) > 0):
        raise InvalidValue(f"devices={text!r} must be a device and how many of them, as in {name}:8", "devices")
    return name, int(count) if colon else 1


def meshes(count: int) -> Iterator[tuple[int, int]]:
    """All (R, T) that use `count` devices, the smallest T first."""
    return ((count // tp, tp) for tp in range(1, count + 1) if count % tp == 0)
