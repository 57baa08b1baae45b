"""jaxserve: LLM serving under per-request latency objectives, in JAX.

    from jaxserve import LLM, SamplingParams

Public names are loaded on first use, so importing jaxserve does not import jax.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("jaxserve.sched") is None:
    raise ImportError(
        f"jaxserve/sched is missing in {__path__[0]!r}. It is a symbolic link to ../sched, and this copy of the tree "
        "dropped it (zip archives and some file systems do). Restore it with `ln -s ../sched jaxserve/sched`, or "
        "clone with git, or install the wheel."
    )

if TYPE_CHECKING:
    from jaxserve.errors import InvalidValue, JaxserveError, QueueFull
    from jaxserve.generation.beam_search import BeamSearchParams
    from jaxserve.llm import LLM, AsyncLLM, RequestOutput
    from jaxserve.sched.api.params import SamplingParams
    from jaxserve.sched.api.slo import SLO
    from jaxserve.sched.api.structured_outputs import StructuredOutputs

from jaxserve.version import __version__

__all__ = [
    "LLM",
    "SLO",
    "AsyncLLM",
    "BeamSearchParams",
    "InvalidValue",
    "JaxserveError",
    "QueueFull",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_HOME = {
    "LLM": "jaxserve.llm",
    "AsyncLLM": "jaxserve.llm",
    "BeamSearchParams": "jaxserve.generation.beam_search",
    "RequestOutput": "jaxserve.llm",
    "SamplingParams": "jaxserve.sched.api.params",
    "SLO": "jaxserve.sched.api.slo",
    "StructuredOutputs": "jaxserve.sched.api.structured_outputs",
    "InvalidValue": "jaxserve.errors",
    "JaxserveError": "jaxserve.errors",
    "QueueFull": "jaxserve.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
