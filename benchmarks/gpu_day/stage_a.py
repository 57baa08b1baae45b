"""Stage A: is the device right, what are its ceilings, are the kernels right, and how fast are the main ones?"""

from __future__ import annotations

from typing import Any

from .numerics import FAMILIES, LAW, MODELS, NUMERICS
from .part import Part

SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes, or torch beside jax, use one device
HEADLINES: tuple[tuple[str, str, dict[str, Any]], ...] = (  # (name, function, arguments)
    ("decode bf16", "attention:decode", {"cases": ["decode B64 ctx4096"], "xla": True}),
    ("prefill 8192", "attention:prefill", {"cases": ["prefill 8192"]}),
    ("decode fp8", "attention:decode", {"cases": ["decode B64 ctx4096 fp8"]}),
    ("mla 16 heads", "mla:measure", {"cases": ["latent B64 ctx4096 H16"]}),
    ("experts 64 tokens", "experts:measure", {"cases": ["experts 64 tokens"]}),
    ("sampling", "sampling:measure", {"kinds": ["zipf"], "asks": ["k50 p0.9"]}),
)


def parts(dry: bool) -> list[Part]:
    """Return the parts, most important first; a dry run has one of each kind, and times nothing."""
    found = [
        kernel_part("probe", "A", 60, "ceilings:device", beside=dry),
        kernel_part("sanity", "A", 60, "ceilings:sanity", beside=dry),
        kernel_part("copy ceiling", "A", 60, "ceilings:copy", beside=dry),
        kernel_part("matmul ceiling", "A", 60, "ceilings:matmul", beside=dry),
    ]
    found += [tests_part(f"numerics {family}", NUMERICS, family) for family in (FAMILIES[:1] if dry else FAMILIES)]
    found.append(kernel_part("traveled executable", "A", 60, "executable:load", beside=dry))
    if not dry:
        found.append(Part("memcheck", "A", 120, "numerics:memcheck", {"family": "kv_write"}, environment=SHARED))
        found += [kernel_part(f"headline {name}", "A", 75, call, **given) for name, call, given in HEADLINES]
        found += [tests_part(f"law {model}", LAW, model) for model in MODELS]
    else:
        found.append(
            kernel_part("headline decode", "A", 75, "attention:decode", beside=True, cases=["decode B2"], xla=True)
        )
    return found


def tests_part(name: str, file: str, family: str) -> Part:
    """Return a part that runs the test of a family."""
    needs, given = ("pytest", "xdist", "pytest_timeout", "hypothesis"), {"file": file, "family": family}
    return Part(name, "A", 200, "numerics:tests", given, needs, beside=True, environment=SHARED)


def kernel_part(
    name: str, stage: str, seconds: float, call: str, needs: tuple[str, ...] = (), beside: bool = False, **given: Any
) -> Part:
    """Return a part whose function is in the folder of kernels."""
    return Part(name, stage, seconds, f"{__package__}.kernels.{call}", given, needs, beside, SHARED)
