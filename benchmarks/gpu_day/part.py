"""A part of the day: one child process with a time limit, and what its function receives."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Skip(Exception):
    """Raised by what cannot run here, with the reason; it counts as skipped, not as failed."""


@dataclass(frozen=True)
class Part:
    """One process that can fail, hang or be repeated without the others."""

    name: str  # unique; a part with a result under this name is not run again
    seconds: float  # limit of its process, start of Python and compilation included
    call: str  # "module:function"; called as function(run, **arguments). A module without a dot is in this package
    arguments: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    needs: tuple[str, ...] = ()  # modules without which the part is skipped, with their names as the reason
    beside: bool = False  # runs at the same time as its neighbors of this kind, which share the device by its lock
    restarts: bool = False  # if an item kills its process, the part goes on behind that item
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of its process


@dataclass
class Run:
    """What the function of a part receives: where to put its figures, and how long it may take."""

    part: Part
    dry: bool  # on a CPU with tiny shapes: tests the script, measures nothing
    output: Path  # JSONL file of the records of all parts
    folder: Path  # files that a part returns (tuned configs, failed programs) and that later parts read
    facts: Mapping[str, Any]  # facts of parts that have finished, such as the ceilings
    deadline: float  # by time.monotonic

    @property
    def scratch(self) -> Path:
        """The folder of files that do not come back."""
        return self.output.parent / "scratch"

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
        append(self.output, {"part": self.part.name, **record})

    def items(self) -> dict[str, dict[str, Any]]:
        """Return the newest row of every item that any part has begun; its key `part` names the part.

        What an earlier attempt of a part left begun or bad is left out: it is to be done again.
        """
        found: dict[str, dict[str, Any]] = {}
        for record in records(self.output):
            part = record.get("part")
            if "begin" in record:
                for name in [name for name, row in found.items() if row["part"] == part and _again(row)]:
                    del found[name]
            elif record.get("table") == ITEMS:
                found[record["row"]["item"]] = {**record["row"], "part": part}
        return found

    def each(self, work: Mapping[str, Callable[[], Mapping[str, Any] | None]], claim: bool = False) -> None:
        """Do the items that are left, each with a row before and after; one that fails costs itself.

        An item that ended this process at the last attempt is recorded as killed. claim: other parts do the same
        items, and each item is done by the first to reach it. Raises RuntimeError at the end if an item failed.
        """
        before = self.items()
        mine = {item: row["outcome"] for item, row in before.items() if row["part"] == self.part.name}
        bad = [item for item, outcome in mine.items() if outcome not in GOOD]
        for item in (item for item in bad if mine[item] == BEGUN):
            self.row(ITEMS, item=item, outcome="killed", reason="ended its process: a hang, or an abort")
        for item, call in work.items():
            if item in before or (claim and not self._claim(item)):
                continue
            if self.left() < LEAST:
                raise RuntimeError(f"no time left for {item} and what follows")
            if not self._item(item, call):
                bad.append(item)
        if not bad and any(row.get("reason") == NO_MOSAIC for item, row in self.items().items() if item in work):
            raise RuntimeError(NO_MOSAIC)
        if bad:
            raise RuntimeError(f"{len(bad)} of {len(work)} items: {', '.join(bad)}"[:400])

    def _item(self, item: str, call: Callable[[], Mapping[str, Any] | None]) -> bool:
        began = time.monotonic()
        self.row(ITEMS, item=item, outcome=BEGUN)
        outcome, reason, more = "done", "", None
        try:
            more = call()
        except Skip as why:
            outcome, reason = "skipped", str(why)
        except AssertionError as error:
            outcome, reason = "wrong", in_a_line(error)
        except Exception as error:
            outcome, reason = "failed", in_a_line(error)
        took = round(time.monotonic() - began, 2)
        self.row(ITEMS, item=item, outcome=outcome, reason=reason, seconds=took, **(more or {}))
        return outcome in GOOD

    def _claim(self, item: str) -> bool:
        folder = self.scratch / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / slug(item)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


NO_MOSAIC = "the first kernel is not right on this device"  # reason of a skip that another call may find mended
ITEMS, BEGUN = "items", "begun"
GOOD = ("done", "skipped")
LEAST = 3.0  # seconds that must be left to begin another item


def _again(row: Mapping[str, Any]) -> bool:
    """Return whether another attempt may do better."""
    return row["outcome"] not in GOOD or row.get("reason") == NO_MOSAIC


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as one line, and return once it is on disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def records(path: Path) -> list[dict[str, Any]]:
    """Return all records, without lines that were cut off."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def in_a_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    words = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {words[0][:300]}"


def slug(name: str) -> str:
    """Return a name that is fit for a file."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)
