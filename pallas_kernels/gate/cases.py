"""The cases of the compile gate: each operation lists its own (`ops/<op>/cases.py`), and the gate collects them."""

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

# Modules that offer `cases()`. jaxserve's, with whole engine steps, is named and not imported, because kernels do not
# depend on the engine.
GPU = (
    "pallas_kernels.ops.paged_attention.cases",
    "pallas_kernels.ops.mla.cases",
    "pallas_kernels.ops.kv_write.cases",
    "pallas_kernels.ops.grouped_matmul.cases",
    "pallas_kernels.ops.gated_matmul.cases",
    "pallas_kernels.ops.quantized_matmul.cases",
    "pallas_kernels.ops.sampling_threshold.cases",
    "pallas_kernels.ops.kv_pages.cases",
    "jaxserve.engine.startup.aot",
)
TPU = ("pallas_kernels.ops.paged_attention.tpu.cases", "pallas_kernels.attention.cases")
KERNELS_HOLD, STEPS_HOLD = 1 << 26, 1 << 20


class Compilable(Protocol):
    """A program that the gate can compile and check."""

    @property
    def name(self) -> str:
        """The name in reports, under which bounds are recorded."""

    @property
    def needs(self) -> frozenset[str]:
        """Instructions that the machine code must contain: "wgmma", "mma", "tma"."""

    @property
    def least_jax(self) -> tuple[int, int]:
        """The oldest jax version that supports the case."""

    @property
    def least_memory(self) -> int:
        """The bytes of the smallest device that holds the program."""

    @property
    def usual(self) -> bool:
        """Whether every run compiles it; other cases need `--all`."""

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""

    @property
    def held(self) -> int:
        """Arguments of more bytes than this are pools or weights, which must not be copied."""

    @property
    def most_temp(self) -> int | None:
        """Maximum bytes of temporaries, whatever is recorded; None: as recorded."""

    @property
    def command_buffers(self) -> int | None:
        """Maximum number of CUDA graphs it may be cut into; None: any."""

    @property
    def most_moved(self) -> int | None:
        """Maximum bytes that its kernels read and write together; None: any."""

    @property
    def layers(self) -> int:
        """Layers of the model that it is a step of; 0: it is no step."""

    @property
    def flags(self) -> tuple[str, ...]:
        """XLA flags beyond the defaults, as in XLA_FLAGS."""

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """Lower the program for `devices` devices."""


@dataclass(frozen=True)
class Case:
    """One kernel to compile for a device that is not present.

    `arguments` are shapes and dtypes; the gate adds shardings. `donate` lists the positions of
    arguments that the program updates in place: it must alias all of them, and have at most
    `scratch` bytes of temporaries. `needs` and `least_jax` are as in `Compilable`.
    """

    name: str  # e.g. "decode wgmma bf16 page64 q1"
    program: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donate: tuple[int, ...] = ()
    needs: frozenset[str] = frozenset()
    least_jax: tuple[int, int] = (0, 10)
    least_memory: int = 0
    usual: bool = True
    scratch: int = 0
    held: int = KERNELS_HOLD
    devices: int = 1
    command_buffers: int | None = None
    most_moved: int | None = None
    layers: int = 0
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
    """A program of an engine; `program(mesh)` lowers it with the engine's shardings and donation."""

    name: str  # e.g. "llama3-8b tp1 decode 64"
    program: Callable[[Mesh], jax.stages.Lowered]
    devices: int = 1
    needs: frozenset[str] = frozenset()
    least_jax: tuple[int, int] = (0, 10)
    least_memory: int = 0
    usual: bool = True
    command_buffers: int | None = None
    held: int = STEPS_HOLD
    most_temp: int | None = None
    most_moved: int | None = None
    layers: int = 0
    flags: tuple[str, ...] = ()

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        return self.program(mesh)


def shapes(*pairs: tuple[Sequence[int], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Make arguments from (shape, dtype) pairs."""
    return tuple(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in pairs)


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """Make a mesh over the axis `tp`."""
    return Mesh(np.array(devices), ("tp",))


def collect(modules: Iterable[str]) -> list[Compilable]:
    """Return the cases of all modules, in order; raise ValueError if two have the same name."""
    found: list[Compilable] = [case for module in modules for case in import_module(module).cases()]
    names = [case.name for case in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"duplicate case names: {', '.join(twice)}")
    return found


def installed(modules: Iterable[str]) -> list[str]:
    """Return the modules whose package is installed; without jaxserve there are no engine steps."""
    return [module for module in modules if find_spec(module.split(".")[0]) is not None]
