"""Make random weights on the devices (`--load-format dummy`).

A number depends only on the seed, the name of its checkpoint tensor and its place in it, so that every
sharding holds the same model. It is computed where it is kept, by integers and one multiplication:
devices of a mesh exchange nothing, hosts hold nothing, and backends agree to the bit. Layers of a kind
share one program.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import Mesh

from jaxserve.models.layers import Info, Source, Tree, is_info
from jaxserve.models.quantization import LARGEST
from jaxserve.models.quantized import Quantized
from jaxserve.models.registry import abstract_weights
from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import on_host, shardings

Keys = npt.NDArray[np.uint32]  # [sources of a weight, 2]
Program = Callable[[list[Keys]], list[jax.Array]]

MEAN = 4 * 255 // 2  # of the sum of four bytes
STD = (4 * (256**2 - 1) / 12) ** 0.5
WIDEST = 6  # standard deviations: the largest value of an 8-bit weight


def random_weights(spec: ModelSpec, dtype: Any, meshes: Sequence[Mesh], *, seed: int = 0) -> list[Tree]:
    """Make the weights on each mesh, in the order of `meshes`. Equal meshes get the same arrays.

    Matrices are near normal, the sum of four uniform bytes; norms are 1 and biases 0.
    """
    trees = {mesh: _made(spec, dtype, mesh, seed) for mesh in dict.fromkeys(meshes)}
    return [trees[mesh] for mesh in meshes]


def _made(spec: ModelSpec, dtype: Any, mesh: Mesh, seed: int) -> Tree:
    described, places = jax.tree.map(_scaled, abstract_weights(spec, dtype), is_leaf=_is_param), shardings(spec, mesh)
    layers, programs = [], dict[int, Program]()
    for kind, part, place in zip(spec.kinds, described.pop("layers"), places.pop("layers"), strict=True):
        if kind not in programs:
            programs[kind] = _program(part, place)
        layers.append(_part(part, place, programs[kind], seed))
    return {**_part(described, places, _program(described, places), seed), "layers": layers}


def _is_param(x: Any) -> bool:
    return isinstance(x, (Info, Quantized))


def _scaled(param: Info | Quantized) -> Info | Quantized:
    """Replace the scales of an 8-bit weight, which a checkpoint has or its values give, by a constant."""
    if isinstance(param, Info):
        return param
    most = param.values.init * WIDEST / LARGEST[np.dtype(param.values.dtype).name]
    fixed = partial(np.full, param.scale.shape, most, np.float32)
    return replace(param, scale=replace(param.scale, sources=(), build=fixed))


def _program(part: Tree, places: Tree) -> Program:
    """Return a program that makes the random weights of a part of the tree, in the order of its leaves."""
    infos = jax.tree.leaves(part, is_leaf=is_info)
    drawn = [pair for pair in zip(infos, jax.tree.leaves(places), strict=True) if _is_drawn(pair[0])]

    def make(keys: list[Any]) -> list[jax.Array]:
        return [_drawn(info, key) for (info, _), key in zip(drawn, keys, strict=True)]

    return jax.jit(make, out_shardings=[place for _, place in drawn])


def _part(part: Tree, places: Tree, program: Program, seed: int) -> Tree:
    infos, structure = jax.tree.flatten(part, is_leaf=is_info)
    drawn = iter(program([_keys(info, seed) for info in infos if _is_drawn(info)]))
    leaves = [
        next(drawn) if _is_drawn(info) else jax.device_put(_constant(info), place)
        for info, place in zip(infos, jax.tree.leaves(places), strict=True)
    ]
    jax.block_until_ready(leaves)  # otherwise the temporaries of several parts may be held at a time
    return jax.tree.unflatten(structure, leaves)


def _is_drawn(info: Info) -> bool:
    return bool(info.init and info.sources)


def _constant(info: Info) -> npt.NDArray[Any]:
    return on_host(info, (np.full(source.shape, info.fill, np.float32) for source in info.sources))


def _keys(info: Info, seed: int) -> Keys:
    def key(source: Source) -> Keys:
        words = np.random.SeedSequence((seed, zlib.crc32(source.name.encode()))).generate_state(2)
        return words.astype(np.uint32, copy=False)

    return np.stack([key(source) for source in info.sources])


def _drawn(info: Info, keys: jax.Array) -> jax.Array:
    """Build a weight from random tensors; one of many experts expert by expert, so that shards hold whole tensors."""
    experts = info.shape[0] if info.axes[0] == "experts" and len(info.sources) % info.shape[0] == 0 else 1
    sources = info.sources[: len(info.sources) // experts]

    def build(keys: jax.Array) -> Any:
        return info.build(*(_tensor(info, source, key) for source, key in zip(sources, keys, strict=True)))

    weight: jax.Array = jax.vmap(build)(keys.reshape(experts, len(sources), 2)).reshape(info.shape)
    return weight


def _tensor(info: Info, source: Source, key: jax.Array) -> Any:
    name = np.dtype(info.dtype).name
    unit = LARGEST[name] / WIDEST if name in LARGEST else info.init
    drawn = sums(key, source.shape).astype(jnp.float32) * np.float32(unit / STD)
    return (jnp.rint(drawn) if name == "int8" else drawn).astype(info.dtype)


def sums(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return sums of four random bytes less their mean, int32 of that shape with deviation STD; key: two uint32."""
    place, count = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(count % 2**32)
        count *= shape[axis]
    word = _mixed(_mixed(place ^ key[0]) + key[1])
    pairs = (word & 0x00FF00FF) + (word >> 8 & 0x00FF00FF)
    return ((pairs & 0xFFFF) + (pairs >> 16)).astype(jnp.int32) - MEAN


def _mixed(word: jax.Array) -> jax.Array:
    """Permute 32-bit words so that each bit depends on all of them (lowbias32 of C. Wellons' hash prospector)."""
    word = (word ^ word >> 16) * np.uint32(0x7FEB352D)
    word = (word ^ word >> 15) * np.uint32(0x846CA68B)
    return word ^ word >> 16
