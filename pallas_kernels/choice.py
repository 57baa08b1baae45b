"""Resolve the backend of each operation once, when an engine starts, and keep the reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# backends by platform, most preferred first; other platforms have xla only
ORDER: Mapping[str, tuple[str, ...]] = {"gpu": ("mosaic_gpu", "xla"), "tpu": ("tpu", "xla")}


class Unsupported(ValueError):
    """Raised if the requested backend cannot run here, or if no backend can."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """The device an engine runs on; each operation's Spec adds what it needs to know."""

    platform: str  # JAX's name: cpu, gpu, tpu
    device: str = ""  # device kind, such as "NVIDIA H200"
    capability: str = ""  # compute capability of a GPU, such as "9.0"
    cores: int = 132  # streaming multiprocessors of a GPU
    interpret: bool = False  # tests only: run the kernels of any platform with JAX's interpreters on a CPU


Supports = Callable[[Any], str | None]  # from a spec to None, or the reason why a backend cannot run it


def anywhere(spec: Here) -> str | None:
    """Return None: XLA runs everything."""
    return None


@dataclass(frozen=True)
class Choice:
    """A resolved backend, with the reasons for refusing the preferred ones."""

    backend: str
    spec: Any  # the spec it was resolved for
    refusals: tuple[tuple[str, str], ...] = ()  # (backend, reason), in the order they were tried

    def __str__(self) -> str:
        return self.backend + (" (interpreted)" if self.spec.interpret and self.backend != "xla" else "")


def resolve(spec: Here, name: str, backends: Mapping[str, Supports], what: str) -> Choice:
    """Return the backend called `name`, or for "auto" the platform's first one that supports `spec`.

    `backends` are those of the operation `what`, by name. Raises Unsupported, with the reason and the
    alternatives, if the named backend or, for "auto", every backend refuses.
    """
    if name != "auto":
        return _named(spec, name, backends, what)
    refusals: list[tuple[str, str]] = []
    for candidate in ORDER.get(spec.platform, ("xla",)):
        if candidate not in backends:
            continue
        reason = backends[candidate](spec)
        if reason is None:
            return Choice(candidate, spec, tuple(refusals))
        refusals.append((candidate, reason))
    raise Unsupported(f"no {what} backend can run here: " + "; ".join(f"{backend}: {why}" for backend, why in refusals))


def _named(spec: Here, name: str, backends: Mapping[str, Supports], what: str) -> Choice:
    if name not in backends:
        raise Unsupported(f"{what} backend {name!r} is unknown; allowed: auto, {', '.join(backends)}")
    reason = backends[name](spec)
    if reason is not None:
        able = [other for other, supports in backends.items() if supports(spec) is None]
        raise Unsupported(f"{what} backend {name!r} cannot run here: {reason}; allowed: auto, {', '.join(able)}")
    return Choice(name, spec)
