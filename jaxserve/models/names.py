"""Read checkpoints that name their tensors otherwise than Llama does, or fuse several of them into one.

`renamed` maps the tensors of a checkpoint to the names that the modules describe: prefixes of models with images
and of bare decoders, and `qkv_proj` and `gate_up_proj` split by rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from jaxserve.models.narrow import SCALE
from jaxserve.models.tensor_file import header_of

PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))
FUSED = {"qkv_proj.": ("q_proj.", "k_proj.", "v_proj."), "gate_up_proj.": ("gate_proj.", "up_proj.")}
Tensors = Mapping[str, tuple[Path, Any]]  # by name: path and open file


def lacks_head(folder: Path) -> bool:
    """Return whether the files of a folder have the tensors of a decoder, but no output head."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        if not path.is_file():
            continue
        with suppress(OSError, ValueError):  # reported when it is loaded
            names |= header_of(path)[0].keys()
    return any(name.endswith("embed_tokens.weight") for name in names) and not any("lm_head." in name for name in names)


@dataclass(frozen=True)
class Rows:
    """A view of an open file that has one tensor, some rows of another, and its description."""

    file: Any
    name: str  # of the tensor in the file
    first: int = 0
    rows: int | None = None  # None: all

    def get_shape(self) -> list[int]:
        shape = list(self.file.get_slice(self.name).get_shape())
        return shape if self.rows is None else [self.rows, *shape[1:]]

    def get_dtype(self) -> str:
        return str(self.file.get_slice(self.name).get_dtype())

    def get_slice(self, name: str) -> Rows:
        return self

    def get_tensor(self, name: str) -> npt.NDArray[Any]:
        tensor: npt.NDArray[Any] = self.file.get_tensor(self.name)
        return tensor if self.rows is None else tensor[self.first : self.first + self.rows]


def renamed(tensors: Tensors, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Path, Any]]:
    """Return the tensors by the names of `wanted`, which maps names to shapes, where they have others."""
    found: dict[str, tuple[Path, Any]] = {}
    for name, (path, file) in tensors.items():
        own = _own(name, wanted)
        parts = _parts(own, wanted)
        if parts and sum(wanted[part][0] for part in parts) == file.get_slice(name).get_shape()[0]:
            first = 0
            for part in parts:
                found[part] = path, Rows(file, name, first, wanted[part][0])
                first += wanted[part][0]
        else:
            found[own] = path, file if own == name else Rows(file, name)
    return found


def _own(name: str, wanted: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name with the prefix that the modules expect; the name itself if that is not known."""
    for prefix, ours in PREFIXES:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    whole = f"model.{name}"
    known = whole.removesuffix(SCALE) in wanted or bool(_parts(whole, wanted))
    return whole if known and name not in wanted else name


def _parts(name: str, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the wanted tensors that a fused one holds; [] if it is none."""
    for fused, leaves in FUSED.items():
        parts = [name.replace(fused, leaf) for leaf in leaves]
        if fused in name and name not in wanted and all(part in wanted for part in parts):
            return parts
    return []
