"""How a model wants its tokens sampled: the defaults in its generation_config.json, as vLLM takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.models.hub import ModelNotFound
from jaxserve.models.source import model_folder
from jaxserve.sched.api.params import SamplingParams

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
AUTO, VLLM = "auto", "vllm"


def sampling_defaults(config: ServeConfig) -> dict[str, Any]:
    """Return the sampling parameters of requests that leave them out, by name; {}: those of SamplingParams.

    `do_sample` and `max_new_tokens` do not count. Raises InvalidValue that names the file and the value.
    """
    if config.generation_config == VLLM:
        return {}
    if config.generation_config == AUTO:
        try:
            path = model_folder(config.model_source, config.revision, weights=False) / FILE
        except ModelNotFound:  # random weights of a published model need no files
            return {}
        if not path.is_file():
            return {}
    else:
        path = Path(config.generation_config) / FILE
        if not path.is_file():
            raise InvalidValue(
                f"generation_config={config.generation_config!r} must be auto, vllm, or a folder with {FILE}",
                "generation_config",
            )
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        defaults = {name: read[name] for name in NAMES if read.get(name) is not None}
        SamplingParams(**defaults)
    except (ValueError, TypeError, AttributeError) as error:
        remedy = "--generation-config vllm serves without it"
        raise InvalidValue(f"{str(path)!r} cannot be used ({error}): {remedy}", "generation_config") from error
    return defaults
