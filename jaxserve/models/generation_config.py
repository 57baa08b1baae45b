"""How a model wants its tokens sampled: the defaults in its generation_config.json, as vLLM takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidValue
from jaxserve.models.json_file import object_in
from jaxserve.sched.api.params import SamplingParams

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
AUTO, VLLM = "auto", "vllm"  # values of --generation-config; others are folders


def defaults_in(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters that the file in a folder sets, by name; {} without a file.

    `do_sample` and `max_new_tokens` do not count. Raises InvalidValue that names the file and the value.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        read = object_in(path)
        defaults = {name: read[name] for name in NAMES if read.get(name) is not None}
        SamplingParams(**defaults)
    except (ValueError, TypeError, AttributeError) as error:
        remedy = "--generation-config vllm serves without it"
        raise InvalidValue(f"{str(path)!r} cannot be used ({error}): {remedy}", "generation_config") from error
    return defaults


def defaults_of(name: str) -> dict[str, Any]:
    """Return the sampling parameters that --generation-config asks for, if that is not `auto`. Raises InvalidValue."""
    if name == VLLM:
        return {}
    if not (Path(name) / FILE).is_file():
        raise InvalidValue(
            f"generation_config={name!r} must be auto, vllm, or a folder with {FILE}", "generation_config"
        )
    return defaults_in(Path(name))
