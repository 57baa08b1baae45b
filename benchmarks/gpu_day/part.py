"""A part of a stage: one child process with a time limit, and what its function receives."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """One measurement that can fail, hang or be repeated without the others."""

    name: str  # unique among all stages; a part with a result under this name is not run again
    stage: str  # A, B, C or D
    seconds: float  # limit of its process, start of Python and compilation included
    call: str  # "module:function" in this package; called with a `Run` and `arguments`
    arguments: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    needs: tuple[str, ...] = ()  # modules without which the part is skipped, with their names as the reason


@dataclass
class Run:
    """What the function of a part receives: where to put its figures, and how long it may take."""

    part: Part
    dry: bool  # on a CPU with tiny shapes: tests the script, measures nothing
    output: Path  # JSONL file of this part's records
    folder: Path  # files that a part returns (profiles, tuned configs) and that later parts read
    facts: Mapping[str, Any]  # facts of parts that have finished, such as the ceilings
    deadline: float  # by time.monotonic

    def left(self) -> float:
        """Return the seconds until the process is stopped."""
        return self.deadline - time.monotonic()

    def row(self, table: str, **figures: Any) -> None:
        """Append a row to one of the report's tables; kept even if the part fails later."""
        self._append({"table": table, "row": figures})

    def fact(self, name: str, value: Any) -> None:
        """Record a single value under a name, for the report and for later parts."""
        self._append({"fact": name, "value": value})

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps({"part": self.part.name, **record}, default=str)
        with self.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
