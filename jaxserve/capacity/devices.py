"""Devices by name, with their makers' specifications."""

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
    """An entry of configs/device/published.yaml."""

    title: str
    platform: Literal["gpu", "tpu", "cpu"]
    memory: float  # bytes
    bandwidth: float  # bytes/s of reads
    flops: float  # FLOP/s of dense matmuls
    link: float  # bytes/s to other devices, in one direction
    source: str
    target: str | None = None  # name in the compile gate
    note: str | None = None
    bfloat16: bool = True  # False: matrix units for float16 only

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not 0 < value < float("inf"):
                raise InvalidValue(f"{field.name}={value!r} must be above 0", field.name)

    @property
    def dtype(self) -> str:
        """The engine's default dtype on this device."""
        return "float32" if self.platform == "cpu" else "bfloat16" if self.bfloat16 else "float16"


@dataclass(frozen=True, slots=True)
class _Table:
    devices: Mapping[str, Device]


@cache
def devices() -> Mapping[str, Device]:
    return load_yaml(preset("device", "published"), _Table).devices


def parse_devices(text: str) -> tuple[str, int]:
    """Parse `h200:8` into (name, count), the count defaulting to 1. Raises InvalidValue."""
    name, colon, count = text.strip().lower().partition(":")
    if name not in devices():
        raise InvalidValue(f"devices={text!r}: unknown device {name!r}; allowed: {', '.join(devices())}", "devices")
    if colon and not (count.isdecimal() and int(count) > 0):
        raise InvalidValue(f"devices={text!r} must be a device and a count above 0, as in {name}:8", "devices")
    return name, int(count) if colon else 1


def meshes(count: int) -> Iterator[tuple[int, int]]:
    """Yield all (R, T) that use `count` devices, the smallest T first."""
    return ((count // tp, tp) for tp in range(1, count + 1) if count % tp == 0)
