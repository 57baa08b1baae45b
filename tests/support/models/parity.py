"""Logits of a small model in chunks, token by token, and on pages that were used before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.support.models.configs import TOKENS
from tests.support.models.driver import Driver

Logits = npt.NDArray[np.float32]


def in_steps(folder: Path, tp: int) -> tuple[Logits, Logits]:
    """Return the logits of TOKENS, and those of its first 16 once more on the same pages."""
    driver = Driver.of(folder, tp)
    first = driver.feed(TOKENS[:11], padded=16)
    rest = [driver.feed(TOKENS[11:16], padded=16), *(driver.feed(TOKENS[i : i + 1]) for i in range(16, 48))]
    driver.done = 0  # the same pages again: their contents must not matter
    return np.concatenate([first, *rest]), driver.feed(TOKENS[:16])
