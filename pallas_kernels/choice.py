"""The choice of a backend: made once at an engine's start for each operation, told with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ORDER: Mapping[str, tuple[str, ...]] = {"gpu": ("mosaic_gpu", "xla"), "tpu": ("tpu", "xla")}  # elsewhere: xla


class Unsupported(ValueError):
    """A backend that was asked for by name cannot run here."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """Where an engine runs. What it asks of an operation comes on top."""

    platform: str  # as jax names it: cpu, gpu, tpu
    device: str = ""  # kind, as in "NVIDIA H200"
    capability: str = ""  # of a GPU, as in "9.0"
    cores: int = 132  # streaming multiprocessors of a GPU
    interpret: bool = False  # tests only: kernels of any platform, run by jax's interpreters on a CPU


@dataclass(frozen=True)
class Choice:
    """What was resolved, and why not what comes before it."""

    backend: str
    spec: Any  # what was asked for
    refusals: tuple[tuple[str, str], ...] = ()  # (backend, reason), in the order they were asked

    def __str__(self) -> str:
        return self.backend + (" (interpreted)" if self.spec.interpret and self.backend != "xla" else "")


def resolve(spec: Here, name: str, backends: Mapping[str, Any], what: str) -> Choice:
    """The first backend of the platform's order that supports `spec`. One that is named is taken or refused.

    `backends`: those of the operation `what`, each with `supports`. Raises Unsupported with the reason and what there
    is instead.
    """
    if name != "auto":
        return _named(spec, name, backends, what)
    refusals: list[tuple[str, str]] = []
    for candidate in ORDER.get(spec.platform, ("xla",)):
        if candidate not in backends:
            continue
        reason = backends[candidate].supports(spec)
        if reason is None:
            return Choice(candidate, spec, tuple(refusals))
        refusals.append((candidate, reason))
    raise Unsupported(f"no {what} backend can run here: " + "; ".join(f"{one}: {why}" for one, why in refusals))


def _named(spec: Here, name: str, backends: Mapping[str, Any], what: str) -> Choice:
    if name not in backends:
        raise Unsupported(f"{what} backend {name!r} is unknown; there are: auto, {', '.join(backends)}")
    reason = backends[name].supports(spec)
    if reason is not None:
        able = [other for other, backend in backends.items() if backend.supports(spec) is None]
        raise Unsupported(f"{what} backend {name!r} cannot run here: {reason}; allowed: auto, {', '.join(able)}")
    return Choice(name, spec)
