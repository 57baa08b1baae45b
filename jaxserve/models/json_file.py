"""JSON of a model's folder, which anybody may have written: reading it ends with its content, or a named error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.sched.api.errors import InvalidValue

LARGEST = 256 << 20  # bytes of a file; tokenizers and indexes of published models are below 40 MB


def parsed(text: str | bytes) -> Any:
    """Return the value that JSON describes. Raises ValueError, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises InvalidValue."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
        read = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidValue(f"{str(path)!r} is not valid JSON: {error}", "model") from error
    if not isinstance(read, dict):
        raise InvalidValue(f"{str(path)!r} must hold a JSON object, not {type(read).__name__}", "model")
    return read
