"""What the compile gate compiles: an operation lists its own cases (`ops/<op>/cases.py`), the gate collects them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Modules that offer `cases()`. The ones that come with jaxserve offer whole engine steps: they are named, not
# imported, because kernels do not know engines.
GPU = (
    "pallas_kernels.ops.paged_attention.cases",
    "pallas_kernels.ops.mla.cases",
    "pallas_kernels.ops.kv_write.cases",
    "pallas_kernels.ops.grouped_matmul.cases",
    "pallas_kernels.ops.quantized_matmul.cases",
    "pallas_kernels.ops.sampling_threshold.cases",
    "pallas_kernels.ops.kv_pages.cases",
    "jaxserve.engine.startup.aot",
)
TPU = ("pallas_kernels.ops.paged_attention.tpu.cases", "pallas_kernels.attention.cases")
KERNELS_HOLD, STEPS_HOLD = 1 << 26, 1 << 20


class Compilable(Protocol):
    """What the gate asks of a case."""

    @property
    def name(self) -> str:
        """What it is told by; bounds are recorded under it."""

    @property
    def needs(self) -> frozenset[str]:
        """Instructions that the machine code must contain: "wgmma", "mma", "tma"."""

    @property
    def least_jax(self) -> tuple[int, int]:
        """Versions before it lack what the case uses."""

    @property
    def usual(self) -> bool:
        """Compiled in every run; the others with `--all`."""

    @property
    def devices(self) -> int:
        """Size of the mesh."""

    @property
    def held(self) -> int:
        """An argument of more bytes is a pool or a weight, which may not be copied."""

    @property
    def most_temp(self) -> int | None:
        """Bytes of temporaries it may have whatever was recorded; None: as recorded."""

    @property
    def command_buffers(self) -> int | None:
        """The most CUDA graphs it may be cut into; None: any number."""

    @property
    def most_moved(self) -> int | None:
        """Bytes that its kernels may read and write, all together; None: any number."""

    @property
    def flags(self) -> tuple[str, ...]:
        """For XLA, as XLA_FLAGS takes them, where it is to be compiled with more than the defaults."""

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """The program on `devices` devices, lowered."""


@dataclass(frozen=True)
class Case:
    """One kernel to compile for a device that is not there.

    `arguments` are shapes and dtypes; the gate puts shardings on them. `donate` names those by position that the
    program changes in place: it must alias all of them, and have no temporaries beyond `scratch` bytes. `needs` and
    `least_jax` as in `Compilable`.
    """

    name: str  # e.g. "decode wgmma bf16 page64 q1"
    program: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donate: tuple[int, ...] = ()
    needs: frozenset[str] = frozenset()
    least_jax: tuple[int, int] = (0, 10)
    usual: bool = True
    scratch: int = 0
    held: int = KERNELS_HOLD
    devices: int = 1
    command_buffers: int | None = None
    most_moved: int | None = None
    flags: tuple[str, ...] = ()

    @property
    def most_temp(self) -> int | None:
        return self.scratch if self.donate else None

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        whole = NamedSharding(mesh, PartitionSpec())
        placed = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=whole) for one in self.arguments]
        return jax.jit(partial(self.program), donate_argnums=self.donate).lower(*placed)


@dataclass(frozen=True)
class Step:
    """A program of an engine. `program(mesh)` lowers it, shardings and donation as the engine has them."""

    name: str  # e.g. "llama3-8b tp1 decode 64"
    program: Callable[[Mesh], jax.stages.Lowered]
    devices: int = 1
    needs: frozenset[str] = frozenset()
    least_jax: tuple[int, int] = (0, 10)
    usual: bool = True
    command_buffers: int | None = None
    held: int = STEPS_HOLD
    most_temp: int | None = None
    most_moved: int | None = None
    flags: tuple[str, ...] = ()

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        return self.program(mesh)


def shapes(*pairs: tuple[Sequence[int], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments from (shape, dtype) pairs."""
    return tuple(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in pairs)


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A mesh over the axis `tp`."""
    return Mesh(np.array(devices), ("tp",))


def collect(modules: Iterable[str]) -> list[Compilable]:
    """The cases of all modules, in order. Raises ValueError where two have one name."""
    found: list[Compilable] = [case for module in modules for case in import_module(module).cases()]
    names = [case.name for case in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"cases of one name: {', '.join(twice)}")
    return found


def installed(modules: Iterable[str]) -> list[str]:
    """Those of `modules` whose package is there: kernels without jaxserve have no engine steps."""
    return [module for module in modules if find_spec(module.split(".")[0]) is not None]
