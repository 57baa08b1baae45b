"""The manifest of a folder that `jaxserve convert` creates, written after the weights.

config.json, tokenizer files ...     copied from the model
jaxserve.json                        this manifest; it exists only if the conversion has finished
weights/PART/                        an Orbax checkpoint for each layer and each other top-level part of the tree
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxserve.models.json_file import object_in
from jaxserve.models.quantization import Quantization
from jaxserve.sched.api.errors import InvalidValue

NAME, FOLDER, FORMAT = "jaxserve.json", "weights", 1

Shape = tuple[tuple[int, ...], str]  # shape and dtype


@dataclass(frozen=True, slots=True)
class Manifest:
    """The arrays of a converted model."""

    architecture: str
    kv_copies: int  # of each kv head; see `ModelSpec.for_tp`
    quantized: Quantization | None
    parts: Mapping[str, Mapping[str, Shape]]  # by part, then by name within the part

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        (folder / NAME).write_text(text + "\n", encoding="utf-8")


def find(folder: Path) -> Manifest | None:
    """Read the manifest of a folder; None if the folder is not a converted model.

    Raises InvalidValue if the conversion is unfinished or was made by another version.
    """
    if not (folder / NAME).is_file():
        if (folder / FOLDER).is_dir():
            raise InvalidValue(
                f"{str(folder)!r} is an unfinished conversion: it has {FOLDER}/ but no {NAME}; run "
                "`jaxserve convert` again with the same --out",
                "model",
            )
        return None
    try:
        read = object_in(folder / NAME)
        if read["format"] != FORMAT:
            raise InvalidValue(
                f"{str(folder / NAME)!r} has format {read['format']!r}; this version reads {FORMAT}: convert again",
                "model",
            )
        how = read["quantized"]
        if how is not None:
            block = None if how["block"] is None else (int(how["block"][0]), int(how["block"][1]))
            how = Quantization(how["dtype"], block, how["stored"], tuple(how["kept"]))
        parts = {
            part: {name: (tuple(shape), dtype) for name, (shape, dtype) in held.items()}
            for part, held in read["parts"].items()
        }
        return Manifest(read["architecture"], int(read["kv_copies"]), how, parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidValue(f"{str(folder / NAME)!r} cannot be read: {error!r}; convert again", "model") from error
