"""The layers that dense families share, as flax.nnx modules with descriptions for parameters.

A module is built with an `Info` in every `nnx.Param`: its shape, its logical axes, and the tensors of a
Hugging Face checkpoint that it is built from. This one tree gives shardings, random weights and the
checkpoint map. `tree_of` returns it as plain dicts and lists; `bind` puts arrays in the same places and
works under `jit`.

Letters: see the table in CONTRIBUTING. K is the number of kv heads of the pool, including copies for
tensor parallelism; G = H / K is the number of query heads per kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import PartitionSpec

from jaxserve.models.quantized import einsum
from jaxserve.models.rope import Rope
from jaxserve.models.spec import ModelSpec
from jaxserve.models.transposed import product
from jaxserve.sched.api.errors import InvalidValue
from pallas_kernels.attention.api import Attention as Kernel
from pallas_kernels.attention.api import AttentionInputs, Pool
from pallas_kernels.layout import Scales
from pallas_kernels.norms import HeadNorms, like, rms_norm
from pallas_kernels.rope import Turn

M = TypeVar("M", bound=nnx.Module)
Array = npt.NDArray[Any]
Turns = tuple[Turn | None, ...]  # (cos, sin) of each kind of RoPE that a model has
Tree = Any  # nested dicts and lists of Info, of arrays or of shardings


class Stream(NamedTuple):
    """The state of a step between layers."""

    x: jax.Array  # [T, E]
    turns: Turns  # see `Decoder.turns`
    work: Any  # see `Attention.plan`
    rows: Any = None  # see `delta_net.rows_of`; None without such layers


SHARDED = ("vocab", "heads", "ff", "experts")  # logical axes that are split over the mesh axis `tp`


@dataclass(frozen=True, slots=True)
class Source:
    """The name and shape of a checkpoint tensor."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Info:
    """The description of a weight."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical axis of each dimension
    sources: tuple[Source, ...]
    build: Callable[..., Array]  # maps the sources' arrays, in order, to the weight; see `library`
    init: float = 0.02  # std of a random weight; 0: constant `fill`
    fill: float = 0.0
    dtype: Any = None  # None: the model's
    contract: int | None = None  # axis that products sum over, if the sources are matrices [out, in]

    def __post_init__(self) -> None:
        split = [axis for axis in self.axes if axis in SHARDED]
        if len(self.axes) != len(self.shape) or len(split) > 1:
            what = (
                f"axes {' and '.join(map(repr, split))} would both be split over the mesh axis 'tp'; at most one may be"
            )
            lengths = f"{len(self.axes)} axes {self.axes} for {len(self.shape)} dimensions; the numbers must be equal"
            names = ", ".join(source.name for source in self.sources[:3])
            raise InvalidValue(f"weight {self.shape} of {names}: {what if len(split) > 1 else lengths}")

    def partition(self, tp: int) -> PartitionSpec:
        """Return the split over `tp`. An axis that `tp` does not divide is replicated (see `ModelSpec.for_tp`)."""
        named = zip(self.axes, self.shape, strict=True)
        return PartitionSpec(*("tp" if axis in SHARDED and size % tp == 0 else None for axis, size in named))

    def size_per_device(self, tp: int) -> int:
        """Return the elements on one device of `tp`."""
        split = zip(self.shape, self.partition(tp), strict=True)
        return prod(size // tp if axis else size for size, axis in split)

    def inputs_last(self) -> Info:
        """Return the description with the first axis, which must be `contract`, moved to the end."""
        (inputs, *outputs), (axis, *axes) = self.shape, self.axes

        def build(*tensors: Array) -> Array:
            built = self.build(*tensors)
            return library(built).moveaxis(built, 0, -1)  # type: ignore[no-any-return]

        return replace(self, shape=(*outputs, inputs), axes=(*axes, axis), build=build, contract=len(outputs))


def is_info(x: Any) -> bool:
    return isinstance(x, Info)


def library(x: Array) -> Any:
    """Return numpy or jax.numpy, whichever x is an array of.

    The functions that build weights use it: they get arrays of a checkpoint, or tracers of random ones.
    """
    return x.__array_namespace__()


def same(x: Array) -> Array:
    return x


def transposed(x: Array) -> Array:
    return x.T


def stacked(*parts: Array) -> Array:
    """Stack parts [F, E] to [E, parts, F], so that each shard of F holds its slice of every part."""
    return library(parts[0]).stack([part.T for part in parts], axis=-2)  # type: ignore[no-any-return]


def vector(name: str, size: int, axis: str = "dim", fill: float = 1.0) -> nnx.Param[Info]:
    return nnx.Param(Info((size,), (axis,), (Source(name, (size,)),), same, 0.0, fill))


def matrix(name: str, inputs: int, outputs: int, axes: tuple[str, str], contract: int | None = 0) -> nnx.Param[Info]:
    """Describe a projection, [in, out] here and [out, in] in the checkpoint. `contract` None: never quantized."""
    return nnx.Param(Info((inputs, outputs), axes, (Source(name, (outputs, inputs)),), transposed, contract=contract))


def kv_scale(size: int, axis: str = "heads") -> nnx.Param[Info]:
    """Describe the divisors of keys or values in an 8-bit pool, one per kv head or latent column.

    They are measured by `calibrate`, not read from the checkpoint.
    """
    ones = partial(np.ones, size, np.float32)
    return nnx.Param(Info((size,), (axis,), (), ones, dtype=jnp.dtype(jnp.float32)))


def tree_of(module: nnx.Module) -> Tree:
    """Return the parameters of a module as plain dicts and lists."""
    return _lists(nnx.to_pure_dict(nnx.split(module)[1]))


def bind(module: M, weights: Tree) -> M:
    """Return the module with arrays in place of descriptions."""
    bound: M = nnx.merge(nnx.graphdef(module), _dicts(weights))
    return bound


def _lists(tree: Tree) -> Tree:
    if not isinstance(tree, Mapping):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_lists(tree[i]) for i in range(len(tree))]
    return {key: _lists(value) for key, value in tree.items()}


def _dicts(tree: Tree) -> Tree:
    if isinstance(tree, list | tuple):
        return {i: _dicts(value) for i, value in enumerate(tree)}
    return {key: _dicts(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def angles(rope: Rope, dim: int, positions: jax.Array) -> Turn:
    """Return cos and sin of RoPE's angles, each [T, 1, D / 2] float32; computed once for all layers."""
    turn = positions.astype(jnp.float32)[:, None, None] * rope.frequencies(dim)[None, None, :]  # [T, 1, D/2]
    both = jnp.concatenate([jnp.cos(turn), jnp.sin(turn)], axis=-1)  # [T, 1, D]
    if rope.scale != 1.0:
        both *= np.tile(rope.scales(dim), 2)[None, None]
    # XLA on CPU would recompute the cosines inside every layer's fusions for every head, and removes
    # optimization_barrier. It does not recompute a matrix product, and one with the identity is exact.
    both = jnp.einsum("tod,de->toe", both, jnp.eye(dim, dtype=jnp.float32), precision="highest")
    return both[..., : dim // 2], both[..., dim // 2 :]


class Attention(nnx.Module):
    """Grouped-query attention with one matrix for queries, keys and values.

    The matrix is [E, K, (G + 2) * D] and keeps each kv head together with its query heads, so that
    splitting it over K needs no communication.
    """

    def __init__(self, spec: ModelSpec, prefix: str, index: int, out: str = "o_proj.") -> None:
        self.spec = spec
        self.window = spec.window_of(index)
        e, d, k, g = spec.dim, spec.head_dim, spec.pool_heads, spec.group
        self.qkv = nnx.Param(
            Info(
                (e, k, (g + 2) * d),
                ("dim", "heads", "pack"),
                self._sources(prefix, "weight", e),
                self._pack,
                contract=0,
            )
        )
        bias = Info((k, (g + 2) * d), ("heads", "pack"), self._sources(prefix, "bias"), self._pack, 0.0)
        self.qkv_bias = nnx.Param(bias) if spec.qkv_bias else None
        self.q_norm = self._norm(prefix + "q_norm.weight", spec.heads, 1) if spec.qk_norm else None
        self.k_norm = self._norm(prefix + "k_norm.weight", spec.kv_heads, spec.kv_copies) if spec.qk_norm else None
        self.out = matrix(prefix + out + "weight", spec.heads * d, e, ("heads", "dim"))
        self.out_bias = vector(prefix + out + "bias", e, fill=0.0) if spec.out_bias else None
        self.k_scale = kv_scale(k) if spec.kv_scales else None
        self.v_scale = kv_scale(k) if spec.kv_scales else None
        self.sinks = vector(prefix + "sinks", spec.heads, "heads", 0.0) if spec.sinks else None

    def _sources(self, prefix: str, leaf: str, *rest: int) -> tuple[Source, ...]:
        sizes = (self.spec.heads, self.spec.kv_heads, self.spec.kv_heads)
        return tuple(
            Source(f"{prefix}{name}_proj.{leaf}", (size * self.spec.head_dim, *rest))
            for name, size in zip("qkv", sizes, strict=True)
        )

    def _norm(self, name: str, heads: int, copies: int) -> nnx.Param[Info]:
        """Describe the weights of a norm over each head, [D], or over all heads of a token, [H, D]."""
        d, order = self.spec.head_dim, self.spec.rope.order(self.spec.head_dim)
        if self.spec.qk_norm == "head":
            return nnx.Param(Info((d,), ("pack",), (Source(name, (d,)),), lambda x: x[order], 0.0, self.spec.unit_norm))

        def build(x: Array) -> Array:
            return np.repeat(x.reshape(heads, d)[:, order], copies, axis=0)

        source = Source(name, (heads * d,))
        return nnx.Param(Info((heads * copies, d), ("heads", "pack"), (source,), build, 0.0, self.spec.unit_norm))

    def _pack(self, q: Array, k: Array, v: Array) -> Array:
        """Pack [H * D, ...] and twice [K * D, ...] into [..., K, (G + 2) * D]."""
        spec, rest, xp = self.spec, q.shape[1:], library(q)
        order = spec.rope.order(spec.head_dim)
        q = q.reshape(spec.heads, spec.head_dim, *rest)[:, order]
        heads = [q.reshape(spec.pool_heads, spec.group * spec.head_dim, *rest)]
        for part, dims in ((k, order), (v, slice(None))):
            part = part.reshape(spec.kv_heads, spec.head_dim, *rest)[:, dims]
            heads.append(xp.repeat(part, spec.kv_copies, axis=0))
        packed: Array = xp.concatenate(heads, axis=1)  # [K, (G + 2) * D, ...]
        return xp.moveaxis(packed, -1, 0) if rest else packed

    def __call__(
        self, x: jax.Array, turn: Turn | None, pool: Pool, work: Any, kernel: Kernel
    ) -> tuple[jax.Array, Pool]:  # x [T, E] -> [T, E]
        spec, tokens, d = self.spec, x.shape[0], self.spec.head_dim
        qkv = einsum("te,ekp->tkp", x, self.qkv[...])  # [T, K, (G + 2) * D]
        if self.qkv_bias is not None:
            qkv = qkv + like(self.qkv_bias[...], qkv)
        q, k, v = jnp.split(qkv, [spec.group * d, (spec.group + 1) * d], axis=-1)
        q, norms, whole = q.reshape(tokens, spec.heads, d), None, True
        if self.q_norm is not None and self.k_norm is not None:
            weights, rest = (self.q_norm[...], self.k_norm[...]), (spec.norm_eps, spec.norm_offset)
            if whole := spec.qk_norm == "head":
                norms = HeadNorms(*weights, *rest)
                q, k = norms.apply(q, k)
            else:
                q, k = (rms_norm(x, weight, *rest, (-2, -1)) for x, weight in zip((q, k), weights, strict=True))
        scales = None
        if self.k_scale is not None and self.v_scale is not None:
            scales = Scales(self.k_scale[...], self.v_scale[...])
        cap, sinks = spec.softcap or None, None if self.sinks is None else self.sinks[...]
        inputs = AttentionInputs(
            q, k, v, turn, scale=spec.scale, window=self.window, softcap=cap, sinks=sinks, scales=scales,
            qkv=qkv if whole else None, norms=norms,
        )  # fmt: skip
        mixed, pool = kernel(inputs, pool, work)  # [T, H, D]
        out = self.gated(x, mixed).reshape(tokens, spec.heads * d) @ self.out[...]
        return (out if self.out_bias is None else out + like(self.out_bias[...], out)), pool

    def gated(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """Apply the gate of a family that has one to the heads' outputs [T, H, D]; x [T, E] is the layer's input."""
        return mixed


class Mlp(nnx.Module):
    """A gated feed-forward (SwiGLU or GeGLU) with one matrix [E, 2, F] for gate and up."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        e, f = spec.dim, spec.ff_dim
        self.activation = spec.activation
        names = (prefix + "gate_proj.", prefix + "up_proj.")
        sources = tuple(Source(name + "weight", (f, e)) for name in names)
        self.gate_up = nnx.Param(Info((e, 2, f), ("dim", "pack", "ff"), sources, stacked, contract=0))
        self.down = matrix(prefix + "down_proj.weight", f, e, ("ff", "dim"))
        bias = Info((2, f), ("pack", "ff"), tuple(Source(name + "bias", (f,)) for name in names), stacked, 0.0)
        self.gate_up_bias = nnx.Param(bias) if spec.mlp_bias else None
        self.down_bias = vector(prefix + "down_proj.bias", e, fill=0.0) if spec.mlp_bias else None

    def __call__(self, x: jax.Array, kernel: Kernel | None = None) -> jax.Array:  # [T, E] -> [T, E]
        hidden = None if kernel is None or kernel.mlp is None else kernel.mlp(x, self.gate_up[...])
        out: jax.Array = (self._gated(x) if hidden is None else hidden) @ self.down[...]
        return out if self.down_bias is None else out + like(self.down_bias[...], out)

    def _gated(self, x: jax.Array) -> jax.Array:  # [T, E] -> [T, F]
        gate_up = einsum("te,epf->tpf", x, self.gate_up[...])  # [T, 2, F]
        if self.gate_up_bias is not None:
            gate_up = gate_up + like(self.gate_up_bias[...], gate_up)
        return ACTIVATIONS[self.activation](gate_up[:, 0]) * gate_up[:, 1]


class Part(Enum):
    """The part of a layer to compute. Its two halves can be separate programs."""

    WHOLE = "layer"
    MIX = "attention"
    FEED = "feed-forward"


class Block(nnx.Module):
    """One layer: attention and feed-forward with norms, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, prefix: str, index: int) -> None:
        self.spec = spec
        self.rope = spec.rope_of(index)
        before, mixed, between, fed = (
            vector(f"{prefix}{name}.weight", spec.dim, fill=spec.unit_norm) if name else None for name in spec.norms
        )
        self.attention_norm: Any = before
        self.attention = self.attend(prefix + "self_attn.", index)
        self.mixed_norm, self.mlp_norm = mixed, between
        self.mlp = self.feed_forward(prefix, index)
        self.fed_norm = fed

    def mix(self, stream: Stream, pool: Pool, kernel: Kernel) -> tuple[jax.Array, Pool]:
        """Add the attention output to the stream's x, and return [T, E] with the updated pool."""
        x, turns, work, _ = stream
        with jax.named_scope("attention"):
            mixed, pool = self.attention(self.normed(x, self.attention_norm), turns[self.rope], pool, work, kernel)
            return self.added(x, mixed, self.mixed_norm), pool

    def feed(self, x: jax.Array, kernel: Kernel) -> jax.Array:  # x [T, E] -> [T, E]
        """Add the feed-forward output to x."""
        with jax.named_scope("mlp"):
            return self.added(x, self.mlp(self.normed(x, self.mlp_norm), kernel), self.fed_norm)

    def attend(self, prefix: str, index: int) -> Any:
        """Create the attention module, which is called as `Attention` is."""
        return Attention(self.spec, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Any:
        """Create the feed-forward module, which is called with x [T, E] and the kernel."""
        return Mlp(self.spec, prefix + "mlp.")

    def normed(self, x: jax.Array, weight: Any) -> jax.Array:
        return x if weight is None else rms_norm(x, weight[...], self.spec.norm_eps, self.spec.norm_offset)

    def added(self, x: jax.Array, out: jax.Array, norm: Any) -> jax.Array:
        """Add the output of a part to the stream, after its norm and times `residual_scale`."""
        out, scale = self.normed(out, norm), self.spec.residual_scale
        return x + (out if scale == 1.0 else out * jnp.asarray(scale, out.dtype))


class Decoder(nnx.Module):
    """A decoder: embedding, layers, final norm and output head.

    A family that differs inside a layer passes its own block. The methods take the weights as a plain
    tree, and each reads only the part that it needs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        block: Callable[[ModelSpec, str, int], nnx.Module] = Block,
        prefix: str = "model.",
    ) -> None:
        self.spec = spec
        self.embed = self.table(prefix + "embed_tokens.weight")
        self.layers = nnx.List([block(spec, f"{prefix}layers.{i}.", i) for i in range(spec.layers)])
        self.norm: nnx.Module | nnx.Param[Info] = vector(prefix + "norm.weight", spec.dim, fill=spec.unit_norm)
        self.head = None if spec.tied else self.table("lm_head.weight")

    def table(self, name: str) -> nnx.Param[Info]:
        """Describe a table with one row [E] per token id, followed by `vocab_padding` rows of zeros."""
        vocab, dim, padding = self.spec.vocab, self.spec.dim, self.spec.vocab_padding

        def padded(x: Array) -> Array:
            return library(x).pad(x, ((0, padding), (0, 0))) if padding else x

        return nnx.Param(Info((vocab + padding, dim), ("vocab", "dim"), (Source(name, (vocab, dim)),), padded))

    def embedded(self, weights: Tree, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embed tokens and positions [T] int32 as [T, E]. Ids outside the vocabulary are clipped."""
        x = jnp.take(weights["embed"], jnp.minimum(tokens, self.spec.vocab - 1), axis=0, mode="clip")
        return x * jnp.asarray(self.spec.embed_scale, x.dtype) if self.spec.embed_scale != 1.0 else x

    def turns(self, positions: jax.Array) -> Turns:
        """Return RoPE's cos and sin for each kind of RoPE, each [T, 1, D / 2] float32."""
        ropes = [self.spec.rope] if self.spec.local_rope is None else [self.spec.rope, self.spec.local_rope]
        turns = tuple(angles(rope, self.spec.head_dim, positions) for rope in ropes)
        return (*turns, None) if any(self.spec.unrotated) else turns

    def layer(
        self, kind: int, part: Part, leaves: Tree, pool: Pool, stream: Stream, kernel: Kernel
    ) -> tuple[jax.Array, Pool]:
        """Apply a layer, or a part of it, to the stream's x [T, E]; `kind` is an index (see `ModelSpec.kinds`)."""
        block: Any = bind(cast(nnx.Module, self.layers[kind]), leaves)
        x = stream.x
        if part is not Part.FEED:
            x, pool = block.mix(stream, pool, kernel)
        return (x if part is Part.MIX else cast(jax.Array, block.feed(x, kernel))), pool

    def finish(self, weights: Tree, x: jax.Array) -> jax.Array:
        """Apply the final norm, [T, E] -> [T, E]."""
        return rms_norm(x, weights["norm"], self.spec.norm_eps, self.spec.norm_offset)

    def logits(self, weights: Tree, hidden: jax.Array) -> jax.Array:
        """Compute logits [S, V] float32 from hidden [S, E], the output of `finish`."""
        table = weights["embed" if self.spec.tied else "head"]
        if self.spec.transposed:
            out = product(hidden, table, jnp.float32)
        else:
            out = jnp.einsum("se,ve->sv", hidden, table, preferred_element_type=jnp.float32)
        out, cap = out[:, : self.spec.vocab], self.spec.logit_softcap
        out = out if self.spec.logit_divisor == 1.0 else out / self.spec.logit_divisor
        return cap * jnp.tanh(out / cap) if cap else out
