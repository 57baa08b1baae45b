"""Load weights onto meshes from a folder of safetensors, one parameter at a time.

Every parameter is read once, built from its tensors, cast or quantized, and put on each distinct mesh
before the next one is read, so that the host holds about one fused matrix. Instances on the same mesh
share one copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError

from jaxserve.models.hub import other_format
from jaxserve.models.json_file import object_in, parsed
from jaxserve.models.layers import Info, Source, Tree, is_info
from jaxserve.models.names import renamed
from jaxserve.models.narrow import SCALE, Dequantized, quantize
from jaxserve.models.packed import methods
from jaxserve.models.quantized import Quantized
from jaxserve.models.registry import abstract_weights
from jaxserve.models.spec import ModelSpec
from jaxserve.models.tensor_file import TensorFile
from jaxserve.models.transposed import Transposed
from jaxserve.sched.api.errors import JaxserveError, short

Progress = Callable[[int, int], None]
Array = npt.NDArray[Any]
Param = Info | Quantized | Transposed  # the latter two hold `Info`s
Tensors = dict[str, tuple[Path, Any]]  # tensor name -> (path, open file)

FLOATS = ("F32", "F16", "BF16")
log = logging.getLogger(__name__)

NARROW = {"float8_e4m3fn": "F8_E4M3", "int8": "I8"}  # safetensors' names of the 8-bit dtypes
OTHERS = ("adapter", "consolidated", "optimizer", "training")  # beginnings of files beside those of a model
EXPECTED = "model.safetensors, or model.safetensors.index.json and the files it names"
NAMED = 200  # tensors that do not fit, in a message
VISION = ("vision_tower.", "multi_modal_projector.")  # of models with images, whose text is served
ALIGNED = 64  # bytes; XLA on a CPU uses arrays of this alignment without copying them


class WeightsError(JaxserveError):
    """Raised for a checkpoint that is missing, damaged, or of another model."""


def shardings(spec: ModelSpec, mesh: Mesh) -> Tree:
    """Return the tree of the weights' NamedShardings. `spec` must come from `for_tp(mesh.shape["tp"])`."""
    _check_tp(spec, mesh.shape["tp"])
    return _shardings(abstract_weights(spec, "float32"), mesh)


def _shardings(tree: Tree, mesh: Mesh) -> Tree:
    tp = mesh.shape["tp"]
    return jax.tree.map(lambda info: NamedSharding(mesh, info.partition(tp)), tree, is_leaf=is_info)


def load_weights(
    path: Path, spec: ModelSpec, dtype: Any, meshes: Sequence[Mesh], *, progress: Progress | None = None
) -> list[Tree]:
    """Load the model's weights onto each mesh, in the order of `meshes`. Equal meshes get the same arrays.

    `progress(done, total)` counts parameters. Raises WeightsError that names every missing, unexpected or
    misshapen tensor, or the file that cannot be read.
    """
    with reader(path, spec, dtype) as (abstract, build):
        return _place(abstract, spec, meshes, build, progress)


@contextmanager
def reader(path: Path, spec: ModelSpec, dtype: Any) -> Iterator[tuple[Tree, Callable[[Param], Any]]]:
    """Open a checkpoint; yield the description of its tree and a function that builds a parameter on the host.

    Raises WeightsError as `load_weights` does.
    """
    abstract = abstract_weights(spec, dtype)
    with ExitStack() as open_files:
        wanted = {source.name: source.shape for info in _infos(abstract) for source in info.sources}
        given = methods.given_in(path)
        tensors = methods.unpacked(_index(path, open_files), given)
        if given and not (spec.quantized is not None and spec.quantized.stored):
            kind = np.dtype(dtype) if spec.quantized is None else spec.quantized.dtype
            log.info("%s: its %s weights are widened as they are read, to %s", path, given.get("quant_method"), kind)
        tensors = _widened(renamed(tensors, wanted), abstract, spec)
        _check_names(path, tensors, _infos(abstract), spec)

        def read(source: Source) -> Array:
            file, handle = tensors[source.name]
            try:
                tensor: Array = handle.get_tensor(source.name)
            except (SafetensorError, OSError, ValueError) as error:
                raise WeightsError(f"{file}: tensor {source.name!r} cannot be read: {error}") from error
            return tensor

        def build(param: Param) -> Any:
            if isinstance(param, Info):
                return on_host(param, map(read, param.sources))
            if isinstance(param, Transposed):
                return replace(param, values=build(param.values))
            if param.scale.sources:
                parts = [list(map(read, info.sources)) for info in (param.values, param.scale)]
            else:
                assert spec.quantized is not None
                pairs = [quantize(read(source), spec.quantized) for source in param.values.sources]
                parts = [[pair[i] for pair in pairs] for i in (0, 1)]
            return Quantized(on_host(param.values, parts[0]), on_host(param.scale, parts[1]), param.axis)

        yield abstract, build


def on_host(info: Info, tensors: Iterable[Array]) -> Array:
    """Build a weight from its tensors, in an array that no file backs."""
    built = np.ascontiguousarray(info.build(*tensors)).astype(info.dtype, copy=False)
    if built.shape != info.shape:
        raise WeightsError(f"{info.sources}: built {built.shape}, but the parameter is {info.shape}")
    return built if built.flags.writeable else _copied(built)


def _copied(view: Array) -> Array:
    """Copy a view of the file, which XLA on a CPU would keep reading, to aligned memory."""
    room = np.empty(view.nbytes + ALIGNED, np.uint8)
    start = -room.ctypes.data % ALIGNED
    copy = room[start : start + view.nbytes].view(view.dtype).reshape(view.shape)
    np.copyto(copy, view)
    return copy


def _place(
    abstract: Tree,
    spec: ModelSpec,
    meshes: Sequence[Mesh],
    build: Callable[[Param], Any],
    progress: Progress | None,
) -> list[Tree]:
    """Build every parameter and put it on each distinct mesh."""
    distinct = list(dict.fromkeys(meshes))
    for mesh in distinct:
        _check_tp(spec, mesh.shape["tp"])
    params, structure = jax.tree.flatten(abstract, is_leaf=lambda x: isinstance(x, (Info, Quantized, Transposed)))
    placed: dict[Mesh, list[Any]] = {mesh: [] for mesh in distinct}
    for done, param in enumerate(params, start=1):
        built = build(param)
        for mesh in distinct:
            placed[mesh].append(jax.device_put(built, _shardings(param, mesh)))
        del built  # free it before the next parameter is built
        jax.block_until_ready([leaves[-1] for leaves in placed.values()])  # otherwise host copies accumulate
        if progress is not None:
            progress(done, len(params))
    return [jax.tree.unflatten(structure, placed[mesh]) for mesh in meshes]


def _index(path: Path, open_files: ExitStack) -> Tensors:
    """Open all files of the folder and return their tensors."""
    tensors: Tensors = {}
    for file in _files(path):
        try:
            handle = open_files.enter_context(TensorFile(file))
            tensors |= dict.fromkeys(handle.keys(), (file, handle))
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsError(f"{file} cannot be read as safetensors: {error}{_first_cut(file)}") from error
    return tensors


def _widened(tensors: Tensors, abstract: Tree, spec: ModelSpec) -> Tensors:
    """Dequantize on reading those tensors that are 8-bit in the file but not in the tree."""
    if spec.quantized is None or not spec.quantized.stored:
        return tensors
    narrow = {source.name for info in _infos(abstract) for source in info.sources if _is_narrow(info)}
    widened = dict(tensors)
    for name, (path, file) in tensors.items():
        if name + SCALE in tensors and name not in narrow and file.get_slice(name).get_dtype() in NARROW.values():
            widened[name] = path, Dequantized(file, widened.pop(name + SCALE)[1], spec.quantized.block)
    return widened


def _is_narrow(info: Info) -> bool:
    return np.dtype(info.dtype).name in NARROW


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        raise WeightsError(f"model folder {str(path)!r} does not exist; expected {EXPECTED} in it")
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return _without_index(path)
    try:
        where = dict(object_in(index)["weight_map"])
        names = sorted(set(where.values()))
        if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"{short(outside[0])} is not in the folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not a safetensors index: {error!r}; expected a 'weight_map'") from error
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        lost = [name for name, file in where.items() if file in absent]
        raise WeightsError(
            f"{index} names missing files: {', '.join(absent)}, with {len(lost)} tensors, the first of them {lost[0]}; "
            "download them, or the whole model again"
        )
    return [path / name for name in names]


def _without_index(path: Path) -> list[Path]:
    """Return the files of a model without an index: model*.safetensors if there are any, else all but other things."""
    every = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    files = [file for file in every if file.name.startswith("model")]
    files = files or [file for file in every if not file.name.startswith(OTHERS)]
    if not files:
        remedy = other_format(path) or f"expected {EXPECTED}"
        raise WeightsError(f"no *.safetensors of a model in {str(path)!r}; {remedy}")
    if passed_over := [file.name for file in every if file not in files]:
        log.info("%s: not read, as they are no weights of the model: %s", path, ", ".join(passed_over))
    return files


def _first_cut(file: Path) -> str:
    """Return the end of an error message: the first incomplete tensor of a truncated file."""
    try:
        with file.open("rb") as stream:
            head = stream.read(8)
            if head == b"version ":
                return "; it is a Git LFS pointer instead of the tensors: run `git lfs pull` or `hf download`"
            size = int.from_bytes(head, "little")
            if size > file.stat().st_size:
                return "; the header itself is cut off"
            header = parsed(stream.read(size))
        room = file.stat().st_size - 8 - size
        cut = [(info["data_offsets"], name) for name, info in header.items() if name != "__metadata__"]
        (_, end), name = min((item for item in cut if item[0][1] > room), default=((0, 0), ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return f"; tensor {name!r} ends at byte {end} of {room}: the file is truncated" if name else ""


def _check_names(path: Path, tensors: Tensors, infos: Sequence[Info], spec: ModelSpec) -> None:
    wanted = {source.name: source.shape for info in infos for source in info.sources}
    stored = spec.quantized is not None and spec.quantized.stored
    narrow = {source.name: info for info in infos for source in info.sources if stored and _is_narrow(info)}
    problems = [f"missing {name} {list(shape)}" for name, shape in wanted.items() if name not in tensors]
    for name, (file, handle) in tensors.items():
        part = handle.get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if name not in wanted:
            if not (_harmless(name, spec) or _no_bias(name, handle)):
                problems.append(f"unexpected {name} {list(shape)} in {file.name}")
        elif shape != wanted[name]:
            problems.append(f"misshapen {name}: {list(shape)} in {file.name}, the config says {list(wanted[name])}")
        elif name in narrow and dtype != NARROW[np.dtype(narrow[name].dtype).name]:
            problems.append(f"{name} is {dtype} in {file.name}; config.json's quantization_config says it is 8-bit")
        elif name not in narrow and dtype not in FLOATS:
            problems.append(f"{name} is {dtype} in {file.name}; supported are {', '.join(FLOATS)}")
    if problems:
        count = len(problems)
        problems[NAMED:] = [f"and {count - NAMED} more"] if count > NAMED else []
        lines = "\n  ".join(problems)
        raise WeightsError(f"{path} does not fit {spec.architecture}, {count} tensors:\n  {lines}")


def _harmless(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor may be ignored: RoPE tables, a tied head, a score head, vision, ..."""
    others = [f"layers.{spec.layers + i}." for i in range(spec.guessing)]
    if spec.delta is not None:
        others.append("mtp.")  # the multi-token prediction of Qwen3-Next
    if spec.architecture.endswith("ForConditionalGeneration"):
        others += VISION
    tied = spec.tied and name == "lm_head.weight"
    scores = not spec.generates and name == "score.weight"  # read by `score_head`
    return (
        tied or scores or name.endswith("rotary_emb.inv_freq") or name.removeprefix("model.").startswith(tuple(others))
    )


def _no_bias(name: str, file: Any) -> bool:
    """Return whether a tensor is a bias of zeros, which some tools write for every module."""
    return name.endswith(".bias") and len(file.get_slice(name).get_shape()) == 1 and not np.any(file.get_tensor(name))


def _check_tp(spec: ModelSpec, tp: int) -> None:
    if spec.for_tp(tp) != spec:
        raise WeightsError(
            f"the spec holds {spec.kv_copies} copies of each kv head and {spec.vocab_padding} rows of padding in its "
            f"tables; use spec.for_tp({tp}) on this mesh"
        )


def _infos(abstract: Tree) -> list[Info]:
    leaves: list[Info] = jax.tree.leaves(abstract, is_leaf=is_info)
    return leaves
