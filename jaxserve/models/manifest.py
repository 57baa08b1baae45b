"""What lies in a folder that `jaxserve convert` made: read before the weights are, and written after them.

config.json, tokenizer files ...     as the model has them
jaxserve.json                        this manifest: the conversion came to its end
weights/PART/                        an Orbax checkpoint for each top-level part of the tree, and for each layer
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxserve.models.quantisation import Quantisation
from jaxserve.sched.api.errors import InvalidValue

NAME, FOLDER, FORMAT = "jaxserve.json", "weights", 1

Shape = tuple[tuple[int, ...], str]  # and dtype


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which arrays there are."""

    architecture: str
    kv_copies: int  # of each kv head, as `ModelSpec.for_tp`
    quantised: Quantisation | None
    parts: Mapping[str, Mapping[str, Shape]]  # by part, then by name in it

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        (folder / NAME).write_text(text + "\n", encoding="utf-8")


def find(folder: Path) -> Manifest | None:
    """The manifest of a converted folder; None: it is not one.

    Raises InvalidValue for one whose conversion did not end, or that another version made.
    """
    if not (folder / NAME).is_file():
        if (folder / FOLDER).is_dir():
            raise InvalidValue(
                f"{str(folder)!r} is a conversion that did not come to its end: it has {FOLDER}/ and no {NAME}; run "
                "`jaxserve convert` again with the same --out",
                "model",
            )
        return None
    try:
        read = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if read["format"] != FORMAT:
            raise InvalidValue(
                f"{str(folder / NAME)!r} is of format {read['format']!r}; this version reads {FORMAT}: convert again",
                "model",
            )
        how = read["quantised"]
        if how is not None:
            block = None if how["block"] is None else (int(how["block"][0]), int(how["block"][1]))
            how = Quantisation(how["dtype"], block, how["stored"], tuple(how["kept"]))
        parts = {
            part: {name: (tuple(shape), dtype) for name, (shape, dtype) in held.items()}
            for part, held in read["parts"].items()
        }
        return Manifest(read["architecture"], int(read["kv_copies"]), how, parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidValue(f"{str(folder / NAME)!r} cannot be read: {error!r}; convert again", "model") from error
