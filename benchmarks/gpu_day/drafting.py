"""Prompt lookup on repetitive text, with the demo model and its weights."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

from . import engine
from .environment import prepare
from .part import Run

SCRIPTS = str(Path(__file__).resolve().parents[1])  # speculation.py imports its neighbors by bare names
REPEATS = 3  # copies of a function's head in a prompt
POOL = 2 << 30  # bytes of each engine's pool
SIDES = ("none", "fixed")


def measure(run: Run) -> None:
    """Fill the table `speculation`: tokens per second with and without drafts, and how many are accepted."""
    prepare(run)
    if SCRIPTS not in sys.path:
        sys.path.append(SCRIPTS)
    import speculation

    # Each engine needs a pool of its own: by default the first would take the whole device.
    given: dict[str, Any] = {"kv_cache_memory": POOL}
    words = ["--turns", "8", "--tokens", "128", "--batch", "1", "8", "32"]
    if run.dry:
        given = {"kv_cache_memory": engine.SMALL, "profile_time": 0.2, "load_format": "dummy"}
        given |= {"max_num_batched_tokens": 64, "preempt_boundary": "chunk"}  # few programs
        words = ["--turns", "2", "--tokens", "8", "--batch", "1", "--draft-tokens", "1", "--model", engine.name_of(run)]
    args = speculation.parser().parse_args(["--method", "ngram", *words])

    def texts(count: int, seed: int) -> list[str]:
        return [REPEATS * f"{text}\n" for text in speculation.prompts_of(count, seed)]

    engines = {side: speculation.engine(side, args, **given) for side in SIDES}
    for size in args.batch:
        found = speculation.measured(engines, size, args, texts)
        rates, fixed = found["rates"], found["fixed"]
        run.row(
            "speculation", rows=size, draft_tokens=args.draft_tokens, speedup=speculation.ratio(rates, "fixed", "none"),
            accepted=fixed["accepted"] / max(1, fixed["drafted"]), tokens_per_step=fixed["tokens_per_step"],
            tokens_s=median(rates["fixed"]), tokens_s_without=median(rates["none"]),
        )  # fmt: skip
