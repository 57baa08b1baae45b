"""Choose the backend of the first product of dense feed-forwards once, when an engine starts.

XLA computes gate and up as one product, writes it, and combines the halves in a second kernel. The
kernel for Hopper combines them before it writes. Whether its product is as fast as XLA's is not
known before a GPU has compared them (`python -m benchmarks.gpu_day`), so `auto` is XLA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.choice import Choice, Here, anywhere, resolve
from pallas_kernels.mosaic.support import interpreter_of, unfit
from pallas_kernels.ops.grouped_matmul.api import Gate

CURVE = 1.5957691216057308  # 2 sqrt(2 / pi), of the approximation of GELU by tanh


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Apply GELU as approximated by tanh, through e^x because `tanh.approx` has only 11 bits of precision."""
    return gate * jax.nn.sigmoid(CURVE * (gate + 0.044715 * gate * gate * gate)) * up


GATES: Mapping[str, Gate] = {"silu": swiglu, "gelu_pytorch_tanh": geglu}


@dataclass(frozen=True)
class GatedSpec(Here):
    """The dense feed-forwards of an engine's model."""

    dtype: str  # of activations
    dim: int  # E
    ff_dim: int  # F, of one shard
    activation: str
    weights: str = ""  # dtype of 8-bit weights; "": `dtype`
    biased: bool = False  # gate and up have biases
    shards: int = 1  # devices that F is split over


@dataclass(frozen=True)
class GatedMatmul:
    """The gated product of dense feed-forwards by `hopper.py`. With several devices, each has a slice of F."""

    spec: GatedSpec
    mesh: Mesh | AbstractMesh | None = None

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array | None:
        """Multiply x [T, E] by weight [E, 2, F] and gate: [T, F] in the dtype of x; None: left to XLA."""
        from pallas_kernels.ops.gated_matmul import hopper

        (tokens, inputs), results = x.shape, weight.shape[2] // self.spec.shards
        shape = hopper.spec_of(tokens, inputs, 2 * results, x.dtype, self.spec.cores)
        if hopper.supports(shape) is not None:
            return None
        config = hopper.heuristic(shape)

        def local(x: jax.Array, weight: jax.Array) -> jax.Array:
            gate, flat = GATES[self.spec.activation], weight.reshape(inputs, 2 * results)
            return hopper.gated_matmul(x, flat, gate=gate, config=config, interpret=interpreter_of(self.spec))

        if self.mesh is None or self.spec.shards == 1:
            return local(x, weight)
        split = P(None, None, "tp")
        # check_vma=False, because Pallas kernels do not declare what they replicate.
        run = jax.shard_map(local, mesh=self.mesh, in_specs=(P(), split), out_specs=P(None, "tp"), check_vma=False)
        out: jax.Array = run(x, weight)
        return out


def supports(spec: GatedSpec) -> str | None:
    """Return None, or the reason why the Hopper kernel cannot run `spec`."""
    from pallas_kernels.ops.gated_matmul import hopper

    if (reason := unfit(spec)) is not None:
        return reason
    if spec.weights:
        return f"weights are {spec.weights}; it takes 16 bits"
    if spec.biased:
        return "gate and up have biases"
    if spec.activation not in GATES:
        return f"the activation is {spec.activation}; it takes {', '.join(GATES)}"
    return hopper.supports(hopper.spec_of(hopper.MOST, spec.dim, 2 * spec.ff_dim, jnp.dtype(spec.dtype), spec.cores))


def resolve_gated_matmul(spec: GatedSpec, name: str = "auto") -> Choice:
    """Resolve the backend of gated products; see `choice.resolve`. "auto" is XLA."""
    backends = {"mosaic_gpu": supports, "xla": anywhere}  # layers write XLA's products themselves
    return resolve(spec, "xla" if name == "auto" else name, backends, "mlp")


def gated(choice: Choice | None = None, mesh: Mesh | AbstractMesh | None = None) -> GatedMatmul | None:
    """Build the gated product that `choice` resolved to, over the devices of `mesh`; None: XLA."""
    return None if choice is None or choice.backend == "xla" else GatedMatmul(choice.spec, mesh)
