"""The context length that a model's config.json states. Imports no jax, so that a server knows it at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]  # the object in config.json
POSITIONS = 2048  # of a config that has no `max_position_embeddings`
EXTENDED = ("linear", "yarn")  # kinds of RoPE whose factor extends the context beyond `max_position_embeddings`
WHOLE = "Gemma3"  # models whose `max_position_embeddings` is the context after the extension


def rope_given(config: Config) -> dict[str, Any]:
    """Return the RoPE parameters of a config, from `rope_scaling` and `rope_parameters`."""
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def rope_kind(given: Mapping[str, Any]) -> str:
    """Return the kind of RoPE of these parameters; older configs of Phi-3 call longrope `su` or `yarn`."""
    return "longrope" if given.get("long_factor") else str(given.get("rope_type") or given.get("type") or "default")


def context_length(config: Config) -> int:
    """Return the maximum number of positions. Raises ValueError or TypeError for values of the wrong kind."""
    given = rope_given(config)
    positions = int(config.get("max_position_embeddings") or POSITIONS)
    names = config.get("architectures") or [""]
    if rope_kind(given) not in EXTENDED or given.get("factor") is None or str(names[0]).startswith(WHOLE):
        return positions
    original = int(given.get("original_max_position_embeddings") or positions)
    return max(positions, int(original * float(given["factor"])))
