"""Engines in a Ray cluster: `jaxserve serve --ray ADDRESS`, and `build_app` for Ray Serve.

Ray starts, places, watches and restarts the engines. Requests and tokens travel over the same
connections as between processes of one machine (jaxserve/wire), not through Ray.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from jaxserve.errors import InvalidValue
from jaxserve.install import needs

__all__ = ["MissingRay", "build_app"]


class MissingRay(InvalidValue, ImportError):
    """Ray is not installed."""


if importlib.util.find_spec("ray") is None:
    raise MissingRay(f"ray is not installed: {needs('ray')}", "ray")


def build_app(settings: Any) -> Any:
    """Return a Ray Serve application with OpenAI's API, for `serve run` and RayService.

    settings: a ServeConfig, the path of a YAML file for `--config`, or a mapping with the same keys and,
    optionally, `config`, such a path, which the other keys override. Raises InvalidValue.
    """
    from jaxserve.ray.app import application  # imports jax and Ray Serve

    return application(settings)
