"""The layers that dense families share, as flax.nnx modules whose parameters are first descriptions.

A module is built with an `Info` in every `nnx.Param`: shape, logical axes, and the tensors of a Hugging Face
checkpoint it is made of. That one tree gives shardings, random weights and the checkpoint map. `tree_of` takes
it out as plain dicts and lists; `bind` puts arrays in the same places, under `jit` too.

Letters: see the table in CONTRIBUTING. K is the kv heads of the pool (copies for tensor parallelism included),
G = H / K the query heads that share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import PartitionSpec

from jaxserve.models.spec import ModelSpec, Rope
from pallas_kernels.dispatch import Attention as Kernel
from pallas_kernels.dispatch import Pool
from pallas_kernels.rope import Turn

M = TypeVar("M", bound=nnx.Module)
Array = npt.NDArray[Any]
Tree = Any  # nested dicts and lists of Info, of arrays or of shardings

SHARDED = ("vocab", "heads", "ff")  # logical axes that are split over the mesh axis `tp`


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Info:
    """A weight before it has values."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical axis of each dimension
    sources: tuple[Source, ...]
    build: Callable[..., Array]  # the sources' arrays, in order -> the weight
    init: float = 0.02  # std of a random weight; 0: constant `fill`
    fill: float = 0.0
    dtype: Any = None

    def partition(self, tp: int) -> PartitionSpec:
        """Split over `tp`; a vocabulary that does not divide is kept whole on each device."""
        named = zip(self.axes, self.shape, strict=True)
        return PartitionSpec(*("tp" if axis in SHARDED and size % tp == 0 else None for axis, size in named))


def same(x: Array) -> Array:
    return x


def transposed(x: Array) -> Array:
    return x.T


def stacked(*parts: Array) -> Array:
    """[F, E] each -> [E, parts, F]: each shard of F holds its own slice of every part."""
    return np.stack([part.T for part in parts], axis=-2)


def vector(name: str, size: int, axis: str = "dim", fill: float = 1.0) -> nnx.Param[Info]:
    return nnx.Param(Info((size,), (axis,), (Source(name, (size,)),), same, 0.0, fill))


def matrix(name: str, inputs: int, outputs: int, axes: tuple[str, str]) -> nnx.Param[Info]:
    """A projection stored [in, out]; the checkpoint has [out, in]."""
    return nnx.Param(Info((inputs, outputs), axes, (Source(name, (outputs, inputs)),), transposed))


def tree_of(module: nnx.Module) -> Tree:
    """The descriptions in a module's parameters, as plain dicts and lists."""
    return _lists(nnx.to_pure_dict(nnx.split(module)[1]))


def bind(module: M, weights: Tree) -> M:
    """The module with arrays in the place of descriptions."""
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


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis in float32, returned in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + eps) * _like(weight, x).astype(jnp.float32)).astype(x.dtype)


def _like(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`weight` with leading axes of 1, to the rank of `x`."""
    return weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


def angles(rope: Rope, dim: int, positions: jax.Array) -> Turn:
    """cos and sin of each token's turns, [T, 1, D / 2] float32; computed once for all layers."""
    turn = positions.astype(jnp.float32)[:, None, None] * rope.frequencies(dim)[None, None, :]  # [T, 1, D/2]
    both = jnp.concatenate([jnp.cos(turn), jnp.sin(turn)], axis=-1) * rope.scale  # [T, 1, D]
    # XLA on CPU would compute cosines again inside every layer's fusions, head by head (optimization_barrier does
    # not survive there). The result of a product is kept, and one with the identity is exact.
    both = jnp.einsum("tod,de->toe", both, jnp.eye(dim, dtype=jnp.float32), precision="highest")
    return both[..., : dim // 2], both[..., dim // 2 :]


class Attention(nnx.Module):
    """Grouped-query attention with one matrix for queries, keys and values.

    That matrix is [E, K, (G + 2) * D]: each kv head with its own queries, so that a split over K is local.
    """

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        self.spec = spec
        e, d, k, g = spec.dim, spec.head_dim, spec.pool_heads, spec.group
        self.qkv = nnx.Param(
            Info((e, k, (g + 2) * d), ("dim", "heads", "pack"), self._sources(prefix, "weight", e), self._pack)
        )
        bias = Info((k, (g + 2) * d), ("heads", "pack"), self._sources(prefix, "bias"), self._pack, 0.0)
        self.qkv_bias = nnx.Param(bias) if spec.qkv_bias else None
        self.q_norm = vector(prefix + "q_norm.weight", d) if spec.qk_norm else None
        self.k_norm = vector(prefix + "k_norm.weight", d) if spec.qk_norm else None
        self.out = matrix(prefix + "o_proj.weight", spec.heads * d, e, ("heads", "dim"))
        self.out_bias = vector(prefix + "o_proj.bias", e, fill=0.0) if spec.out_bias else None

    def _sources(self, prefix: str, leaf: str, *rest: int) -> tuple[Source, ...]:
        sizes = (self.spec.heads, self.spec.kv_heads, self.spec.kv_heads)
        return tuple(
            Source(f"{prefix}{name}_proj.{leaf}", (size * self.spec.head_dim, *rest))
            for name, size in zip("qkv", sizes, strict=True)
        )

    def _pack(self, q: Array, k: Array, v: Array) -> Array:
        """[H * D, ...], [K * D, ...] twice -> [..., K, (G + 2) * D]."""
        spec, rest = self.spec, q.shape[1:]
        heads = [q.reshape(spec.pool_heads, spec.group * spec.head_dim, *rest)]
        for part in (k, v):
            part = part.reshape(spec.kv_heads, spec.head_dim, *rest)
            heads.append(np.repeat(part, spec.kv_copies, axis=0))
        packed = np.concatenate(heads, axis=1)  # [K, (G + 2) * D, ...]
        return np.moveaxis(packed, -1, 0) if rest else packed

    def __call__(
        self, x: jax.Array, turn: Turn, pool: Pool, work: Any, kernel: Kernel
    ) -> tuple[jax.Array, Pool]:  # x [T, E] -> [T, E]
        spec, tokens, d = self.spec, x.shape[0], self.spec.head_dim
        qkv = jnp.einsum("te,ekp->tkp", x, self.qkv[...])  # [T, K, (G + 2) * D]
        if self.qkv_bias is not None:
            qkv = qkv + _like(self.qkv_bias[...], qkv)
        q, k, v = jnp.split(qkv, [spec.group * d, (spec.group + 1) * d], axis=-1)
        q = q.reshape(tokens, spec.heads, d)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm[...], spec.norm_eps)
            k = rms_norm(k, self.k_norm[...], spec.norm_eps)
        mixed, pool = kernel(q, k, v, turn, pool, work, scale=d**-0.5)  # [T, H, D]
        out = mixed.reshape(tokens, spec.heads * d) @ self.out[...]
        return (out if self.out_bias is None else out + _like(self.out_bias[...], out)), pool


class Mlp(nnx.Module):
    """SwiGLU with one matrix [E, 2, F] for gate and up."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        e, f = spec.dim, spec.ff_dim
        names = (prefix + "gate_proj.", prefix + "up_proj.")
        sources = tuple(Source(name + "weight", (f, e)) for name in names)
        self.gate_up = nnx.Param(Info((e, 2, f), ("dim", "pack", "ff"), sources, stacked))
        self.down = matrix(prefix + "down_proj.weight", f, e, ("ff", "dim"))
        bias = Info((2, f), ("pack", "ff"), tuple(Source(name + "bias", (f,)) for name in names), stacked, 0.0)
        self.gate_up_bias = nnx.Param(bias) if spec.mlp_bias else None
        self.down_bias = vector(prefix + "down_proj.bias", e, fill=0.0) if spec.mlp_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:  # [T, E] -> [T, E]
        gate_up = jnp.einsum("te,epf->tpf", x, self.gate_up[...])  # [T, 2, F]
        if self.gate_up_bias is not None:
            gate_up = gate_up + _like(self.gate_up_bias[...], gate_up)
        out: jax.Array = (jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]) @ self.down[...]
        return out if self.down_bias is None else out + _like(self.down_bias[...], out)


class Block(nnx.Module):
    """One layer: normalised attention and feed-forward, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        self.eps = spec.norm_eps
        self.attention_norm = vector(prefix + "input_layernorm.weight", spec.dim)
        self.attention = Attention(spec, prefix + "self_attn.")
        self.mlp_norm = vector(prefix + "post_attention_layernorm.weight", spec.dim)
        self.mlp = Mlp(spec, prefix + "mlp.")

    def __call__(
        self, x: jax.Array, turn: Turn, pool: Pool, work: Any, kernel: Kernel
    ) -> tuple[jax.Array, Pool]:  # x [T, E] -> [T, E]
        with jax.named_scope("attention"):
            mixed, pool = self.attention(rms_norm(x, self.attention_norm[...], self.eps), turn, pool, work, kernel)
            x = x + mixed
        with jax.named_scope("mlp"):
            return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps)), pool


class Decoder(nnx.Module):
    """Embedding, layers, final norm, output head. A family that differs inside a layer passes its own block."""

    def __init__(self, spec: ModelSpec, block: Callable[[ModelSpec, str], Block] = Block) -> None:
        self.spec = spec
        table = ("vocab", "dim")
        self.embed = self._table("model.embed_tokens.weight", table)
        self.layers = nnx.List([block(spec, f"model.layers.{i}.") for i in range(spec.layers)])
        self.norm = vector("model.norm.weight", spec.dim)
        self.head = None if spec.tied else self._table("lm_head.weight", table)

    def _table(self, name: str, axes: tuple[str, str]) -> nnx.Param[Info]:
        shape = (self.spec.vocab, self.spec.dim)
        return nnx.Param(Info(shape, axes, (Source(name, shape),), same))
