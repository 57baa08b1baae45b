"""Stage D: preemption, two instances on one device, speculation, HTTP, and goodput on real steps."""

from __future__ import annotations

from typing import Any

from .part import Part

HTTP = ("fastapi", "uvicorn", "pydantic", "httptools", "prometheus_client", "aiohttp", "matplotlib")
STOPS: dict[str, dict[str, Any]] = {
    "preemption layer, op": {"chunk": 2048, "boundaries": ["layer", "op"], "depths": [2, 1, 4]},
    "preemption layers:4, chunk": {"chunk": 2048, "boundaries": ["layers:4", "chunk"], "depths": [2, 1, 4]},
    "preemption chunk of 8192": {"chunk": 8192, "boundaries": ["layer"], "depths": [2]},
}
DRY_STOPS = {"preemption layer, op": {"chunk": 64, "boundaries": ["layer", "op"], "depths": [1]}}
MODELS = ("demo", "llama3-8b")  # served over HTTP


def parts(dry: bool) -> list[Part]:
    """Return the parts in the order of their importance."""
    return [
        *(Part(name, "D", 240, "stopping:measure", given) for name, given in (DRY_STOPS if dry else STOPS).items()),
        Part("shared 2x1", "D", 180, "migration:measure"),
        Part("goodput", "D", 240, "serving:goodput"),
        Part("speculation", "D", 180, "drafting:measure", needs=("transformers", "tokenizers")),
        *(
            Part(f"http {model}", "D", 240, "streams:measure", {"model": model}, needs=HTTP)
            for model in MODELS[: 1 if dry else None]
        ),
    ]
