"""Orbax checkpoints of weights in the layout of the engine, which shards read directly.

Each part of the tree is a checkpoint of its own, so that writing holds one layer in memory and loading
reports its progress.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.install import needs
from jaxserve.models.hub import FILES
from jaxserve.models.layers import Info, Tree, is_info
from jaxserve.models.manifest import FOLDER, NAME, Manifest, find
from jaxserve.models.quantized import Quantized
from jaxserve.models.registry import abstract_weights
from jaxserve.models.spec import ModelSpec
from jaxserve.models.transposed import Transposed
from jaxserve.models.weights import Progress, WeightsError, reader
from jaxserve.sched.api.errors import InvalidValue

CHUNK = 8 << 20  # bytes; a shard reads only the chunks that it overlaps


def save(source: Path, out: Path, spec: ModelSpec, dtype: Any, *, progress: Progress | None = None) -> None:
    """Convert the safetensors of folder `source` to folder `out`, for the shards of `spec` (see `for_tp`).

    Raises InvalidValue if `out` is neither empty nor an unfinished conversion, and WeightsError as
    `load_weights` does.
    """
    ocp = _orbax()
    with reader(source, spec, dtype) as (abstract, build):
        parts = parts_of(abstract)
        _make_room(out)
        (out / FOLDER).mkdir(parents=True)
        with ocp.PyTreeCheckpointer() as checkpointer:
            for done, (part, tree) in enumerate(parts.items(), start=1):
                held = {name: build(info) for name, info in _params(tree).items()}
                arrays = {name: np.asarray(leaf) for name, leaf in _named(held).items()}
                chunks = {name: ocp.SaveArgs(chunk_byte_size=CHUNK) for name in arrays}
                checkpointer.save((out / FOLDER / part).absolute(), arrays, save_args=chunks)
                if progress is not None:
                    progress(done, len(parts))
    for pattern in FILES:
        for file in source.glob(pattern):
            if not file.name.endswith((".safetensors", ".safetensors.index.json")) and file.name != NAME:
                shutil.copy(file, out / file.name)
    held_shapes = {part: _shapes(_named(tree)) for part, tree in parts.items()}
    Manifest(spec.architecture, spec.kv_copies, spec.quantized, held_shapes).write(out)


def load(
    path: Path, spec: ModelSpec, dtype: Any, meshes: Sequence[Mesh], *, progress: Progress | None = None
) -> list[Tree]:
    """Load the weights onto each mesh, as `weights.load_weights` does. `progress(done, total)` counts parts.

    Raises InvalidValue if the folder is not a finished conversion, and WeightsError that names every
    mismatch if it holds another model.
    """
    manifest = find(path)
    if manifest is None:
        raise InvalidValue(
            f"{str(path)!r} is not an Orbax checkpoint of jaxserve: it has no {NAME}; create one with `jaxserve "
            f"convert --model {path} --out DIR`, or omit --load-format",
            "load_format",
        )
    kept = parts_of(abstract_weights(spec, dtype))  # the layout to return; checkpoints are [in, out]
    spec = replace(spec, transposed=False, whole=False)
    parts = parts_of(abstract_weights(spec, dtype))
    saved = parts_of(abstract_weights(replace(spec, kv_scales=False), dtype))
    measured = {part: set(_named(tree)) - set(_named(saved[part])) for part, tree in parts.items()}  # never saved
    _check(path, manifest, parts, spec, measured)
    distinct = list(dict.fromkeys(meshes))
    loaded: dict[Mesh, dict[str, Tree]] = {mesh: {} for mesh in distinct}
    total = len(parts) * len(distinct)
    with _orbax().PyTreeCheckpointer() as checkpointer:
        for i, mesh in enumerate(distinct):
            for done, (part, tree) in enumerate(parts.items(), start=1 + i * len(parts)):
                restored = _restored(checkpointer, path / FOLDER / part, tree, mesh, measured[part])
                loaded[mesh][part] = _laid(restored, kept[part], mesh)
                if progress is not None:
                    progress(done, total)
    return [_whole(loaded[mesh]) for mesh in meshes]


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise InvalidValue(
            f"Orbax checkpoints need a missing package ({error}): {needs('orbax')}", "load_format"
        ) from error
    return ocp


def _make_room(out: Path) -> None:
    """Remove an unfinished conversion. Raises InvalidValue if the folder holds anything else."""
    if out.is_dir() and any(out.iterdir()):
        unfinished = (out / FOLDER).is_dir() and not (out / NAME).exists()
        others = sorted(file.name for file in out.iterdir() if file.name != FOLDER)
        if not unfinished or others:
            what = "holds a finished conversion" if (out / NAME).exists() else f"is not empty: {', '.join(others[:5])}"
            raise InvalidValue(f"--out {str(out)!r} {what}; give a new or empty folder", "out")
        shutil.rmtree(out / FOLDER)


def _restored(checkpointer: Any, path: Path, tree: Tree, mesh: Mesh, measured: set[str]) -> Tree:
    ocp, tp = _orbax(), mesh.shape["tp"]
    named, arrays = _named(tree), {}
    wanted = {}
    for name, info in named.items():
        sharding = NamedSharding(mesh, info.partition(tp))
        if name in measured:
            arrays[name] = jax.device_put(info.build().astype(info.dtype), sharding)
        else:  # not strict, because the number of padding rows of the vocabulary depends on the mesh
            wanted[name] = ocp.ArrayRestoreArgs(
                sharding=sharding, global_shape=info.shape, dtype=info.dtype, strict=False
            )
    try:
        arrays |= checkpointer.restore(path.absolute(), restore_args=wanted)
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"{path} cannot be restored: {error}; convert again") from error
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_info)
    assert len(leaves) == len(named)
    return jax.tree.unflatten(structure, [arrays[name] for name in named])


def _laid(tree: Tree, wanted: Tree, mesh: Mesh) -> Tree:
    """Return the tree with those weights transposed that are transposed in `wanted`."""

    def laid(param: Any, held: Any) -> Any:
        def moved(array: jax.Array, info: Info) -> jax.Array:
            sharding = NamedSharding(mesh, info.partition(mesh.shape["tp"]))
            placed: jax.Array = jax.device_put(jnp.moveaxis(array, 0, -1), sharding)
            return placed

        if isinstance(param, Transposed):
            return replace(param, values=moved(held, param.values))
        if isinstance(param, Quantized) and param.transposed:
            return Quantized(moved(held.values, param.values), moved(held.scale, param.scale), param.axis)
        return held

    return jax.tree.map(laid, wanted, tree, is_leaf=lambda x: isinstance(x, (Quantized, Transposed)))


def _check(
    path: Path, manifest: Manifest, parts: Mapping[str, Tree], spec: ModelSpec, measured: Mapping[str, set[str]]
) -> None:
    if manifest.architecture != spec.architecture:
        raise WeightsError(f"{path} holds {manifest.architecture}, config.json says {spec.architecture}")
    if spec.latent is None and manifest.kv_copies != spec.kv_copies:  # MLA copies latents, not weights
        tp = spec.kv_copies * spec.kv_heads
        raise WeightsError(
            f"{path} holds {manifest.kv_copies} copies of each kv head, this mesh needs {spec.kv_copies}: convert with "
            f"--mesh 1x{tp if spec.kv_copies > 1 else 1}, or load the safetensors"
        )
    problems = []
    for part in [*parts, *(part for part in manifest.parts if part not in parts)]:
        held = manifest.parts.get(part, {})
        infos = _named(parts[part]) if part in parts else {}
        wanted = {name: shape for name, shape in _shapes(infos).items() if name not in measured.get(part, ())}
        problems += [f"missing {part}/{name} {list(shape)}" for name, (shape, _) in wanted.items() if name not in held]
        for name, (shape, dtype) in held.items():
            if name not in wanted:
                problems.append(f"unexpected {part}/{name} {list(shape)}")
            elif not _fits(shape, wanted[name][0], infos[name]) or _bits(dtype) != _bits(wanted[name][1]):
                problems.append(f"{part}/{name} is {dtype} {list(shape)}, the config says {wanted[name]}")
    if problems:
        lines = "\n  ".join(problems)
        raise WeightsError(f"{path} does not fit {spec.architecture}, {len(problems)} arrays:\n  {lines}")


def _fits(held: Sequence[int], wanted: Sequence[int], info: Info) -> bool:
    """Return whether two shapes are equal except for the padding of the vocabulary."""
    pairs = zip(held, wanted, info.axes, strict=False)
    return len(held) == len(wanted) and all(a == b or axis == "vocab" for a, b, axis in pairs)


def _bits(dtype: str) -> str:
    """Return the kind of a dtype: floats of 16 and 32 bits are one kind, because loading casts between them."""
    return "float" if dtype in ("float32", "float16", "bfloat16") else dtype


def parts_of(tree: Tree) -> dict[str, Tree]:
    """Return the top-level parts of the tree by name, with one part per layer."""
    layers = {f"layers.{i}": layer for i, layer in enumerate(tree["layers"])}
    return {name: part for name, part in tree.items() if name != "layers"} | layers


def _whole(parts: Mapping[str, Tree]) -> Tree:
    """Return the tree from its parts, the inverse of `parts_of`."""
    layers = [part for name, part in parts.items() if name.startswith("layers.")]
    return {name: part for name, part in parts.items() if not name.startswith("layers.")} | {"layers": layers}


def _named(tree: Tree) -> dict[str, Any]:
    """Return the leaves by path, in the order of the tree."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_info)}


def _params(tree: Tree) -> dict[str, Any]:
    """Return each `Info` or `Quantized` by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: is_info(x) or isinstance(x, Quantized))
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path) or "array"


def _shapes(infos: Mapping[str, Info]) -> dict[str, Any]:
    return {name: (tuple(info.shape), np.dtype(info.dtype).name) for name, info in infos.items()}
