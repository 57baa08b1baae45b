"""The devices that the gate compiles for, described to XLA; neither a device nor a driver is needed.

GPU: jaxlib's CUDA plugin runs the whole pipeline, including `ptxas`, from a target description.
TPU: libtpu.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pallas_kernels import ptxas

# The driver and runtime versions matter: below CUDA 12.3, the default without them, XLA keeps kernels of other
# compilers out of its command buffers and cuts a buffer at each.
HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  {memory} clock_rate_ghz: 1.98
  cuda_compute_capability {{ major: 9 minor: 0 }}
  driver_version: "13.0.0" runtime_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{kind}"
"""
H200 = "memory_bandwidth: 4800000000000 device_memory_size: 150000000000 l2_cache_size: 62914560"
H100 = "memory_bandwidth: 3350000000000 device_memory_size: 85000000000 l2_cache_size: 52428800"
PLUGIN = (
    "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-nvdisasm", "absl-py"
)  # fmt: skip
GB = 10**9


@dataclass(frozen=True)
class Target:
    """A kind of device to compile for."""

    name: str
    kind: str  # device kind as its devices report it
    platform: str  # JAX's name for topologies: cuda, tpu
    topology: str
    memory: int  # bytes of one device
    packages: tuple[str, ...]  # packages that compile for it
    advice: str  # how to install them
    bounds: str  # whose recorded bounds it is checked against
    description: str = ""  # of a GPU, for XLA
    bandwidth: float = 0.0  # bytes/s of a GPU's memory

    def missing(self) -> str | None:
        """Return None, or the reason why nothing can be compiled for it here."""
        absent = [name for name in self.packages if not _version(name)]
        if absent:
            return f"{self.name}: {', '.join(absent)} not installed; {self.advice}"
        return None

    def compiler(self) -> str:
        """Return the compiler's name and version, which the figures depend on."""
        return f"ptxas {self.ptxas()}" if self.platform == "cuda" else f"libtpu {_version('libtpu')}"

    def ptxas(self) -> str:
        """Return the release of the ptxas that compiles for it; "" for a TPU."""
        return ptxas.release(ptxas.found()) if self.platform == "cuda" else ""

    def devices(self) -> list[Any]:
        """Return devices for a mesh; programs on it can be compiled but not run."""
        from jax.experimental import topologies

        if self.platform == "tpu":
            return list(topologies.get_topology_desc(platform="tpu", topology_name=self.topology).devices)
        topology = topologies.get_topology_desc(platform="cuda", topology=self.topology, target_config=self.description)
        return list(topology.devices)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _hopper(name: str, kind: str, memory: int, bandwidth: float, described: str) -> Target:
    # The plugin requires its own version of jaxlib. --no-deps, because some dependencies only serve to run programs.
    plugin = [f"{package}=={_version('jaxlib')}" if package.startswith("jax-") else package for package in PLUGIN[:-1]]
    advice = f"pip install absl-py && pip install --no-deps {' '.join(plugin)}"
    # Hopper GPUs of as many multiprocessors run the same machine code, so that their bounds are the same.
    return Target(
        name,
        kind,
        "cuda",
        "1x1x8",
        memory,
        PLUGIN,
        advice,
        "h200",
        HOPPER.format(kind=kind, memory=described),
        bandwidth,
    )


def _tpu(name: str, kind: str, topology: str, memory: int) -> Target:
    advice = 'pip install "jax[tpu]" for the libtpu of this jax'
    return Target(name, kind, "tpu", topology, memory, ("libtpu",), advice, name)


TARGETS = {
    target.name: target
    for target in (
        _hopper("h200", "NVIDIA H200", 141 * GB, 4.8e12, H200),
        _hopper("h100", "NVIDIA H100 80GB HBM3", 80 * GB, 3.35e12, H100),
        _tpu("tpu:v5e", "TPU v5 lite", "v5e:2x2", 16 * GB),
        _tpu("tpu:v6e", "TPU v6 lite", "v6e:2x2", 32 * GB),
    )
}


def memory_of(kind: str) -> int:
    """Return the bytes of memory of a device of that kind."""
    return next(target.memory for target in TARGETS.values() if target.kind == kind)


def prepare(target: Target) -> None:
    """Set the environment variables of this process; call it before jax is imported."""
    if target.platform == "cuda":
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver to check
    else:
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # this is no TPU machine, so there is no metadata server
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # otherwise only one process at a time may load it
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # programs loaded from the cache write no reports
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would not survive a fork


def dump_into(folder: Path, target: Target, more: Sequence[str] = ()) -> None:
    """Make XLA dump its reports to `folder`, with `more` flags set.

    XLA reads its flags once, at a process's first compilation.
    """
    flags = [*more, f"--xla_dump_to={folder}", "--xla_dump_emitter_re=thunk"]
    if target.platform == "cuda":
        flags.append("--xla_gpu_fail_ptx_compilation_on_register_spilling=true")  # for XLA's own kernels
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
