"""How far the start of an engine is, as the engine's process tells it and as the server shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LAUNCHING, LOADING, WARMING, MEASURING, CONNECTING = (
    "starting the engine",
    "loading weights",
    "warming up",
    "measuring step times",
    "connecting",
)
STEPS = (LAUNCHING, LOADING, WARMING, MEASURING, CONNECTING)  # in their order
UNITS = {LOADING: "tensors", WARMING: "programs"}
LABELS = {"weights": LOADING, "measuring step times": MEASURING}  # of the engine's progress; others name programs


class StartProgress(NamedTuple):
    """What a start does now, and how much of that is done."""

    step: str = LAUNCHING
    done: int = 0
    total: int = 0  # 0: unknown

    @classmethod
    def of(cls, done: float, total: float, label: str) -> StartProgress:
        """Return the progress that an engine reports with these arguments."""
        return cls(LABELS.get(label, WARMING), int(done), int(total))

    def __str__(self) -> str:
        if not self.total:
            return self.step
        if self.step == MEASURING:
            return f"{self.step}, {self.done} %"
        return f"{self.step}, {self.done} of {self.total} {UNITS[self.step]}"


def slowest(several: Iterable[StartProgress]) -> StartProgress:
    """Return the progress of the engine that is furthest from ready; with no engine, all have started."""
    return min(
        several,
        key=lambda progress: (STEPS.index(progress.step), progress.done / (progress.total or 1)),
        default=StartProgress(CONNECTING),
    )
