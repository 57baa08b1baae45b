"""Design questions that only a device answers, as ratios of measured times: page size, axis order, kind of product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BASE = "decode B64 ctx4096"


def answers(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return one ratio per question whose rows were measured. Above 1: the first is slower."""

    def us(case: str, *kernels: str) -> float | None:
        found = [row["us"] for row in rows if row["case"] == case and row["kernel"] in kernels and row.get("us")]
        return min(found, default=None)

    def ours(case: str) -> float | None:
        return us(case, "mosaic mma", "mosaic wgmma")

    asked = {
        "page 16 / page 64": (ours(f"{BASE} page16"), ours(BASE)),
        "page 128 / page 64": (ours(f"{BASE} page128"), ours(BASE)),
        "tokens before heads / heads before tokens (one kv head, same bytes)": (
            ours(BASE),
            ours("decode B64 ctx32768 H4K1"),
        ),
        "the same, fp8, whose rows are 128 bytes": (ours(f"{BASE} fp8"), ours("decode B64 ctx32768 H4K1 fp8")),
        "a TMA copy a page / cp.async of jax's Triton kernel, page 64": (ours(BASE), us(BASE, "jax triton paged")),
        "the same, page 16": (ours(f"{BASE} page16"), us(f"{BASE} page16", "jax triton paged")),
        "mma of 16 rows / wgmma of 64": (us(BASE, "mosaic mma"), us(BASE, "mosaic wgmma")),
        "verify of 4 tokens / decode of 1": (ours(f"{BASE} T4"), ours(BASE)),
        "fp8 / bf16": (ours(f"{BASE} fp8"), ours(BASE)),
        "decode, weights through shared memory / in registers": (
            us(BASE, "mosaic wgmma"),
            us(BASE, "mosaic wgmma P in registers"),
        ),
        "prefill, weights through shared memory / in registers": (
            us("prefill 8192", "mosaic"),
            us("prefill 8192", "mosaic P in registers"),
        ),
    }
    return {question: first / second for question, (first, second) in asked.items() if first and second}
