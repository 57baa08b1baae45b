"""The state folder: what every part recorded in this call and in earlier ones, one JSON line each."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .part import append, records

TRIES = 2  # a part that failed or hung is started once more by a later call
OUTCOMES = ("done", "failed", "hung", "interrupted", "cut", "skipped")
COUNTED = ("failed", "hung", "interrupted")  # ends that use up a try; a part cut by the end of the call does not
LOGS, LOGGED = "logs", 200_000  # folder in the packed files, bytes of each log that come back
ZIP, LIMIT = "files.zip", 16 << 20  # bytes of a file that comes back


@dataclass
class Attempt:
    """One run of a part, with everything that it recorded before its end."""

    part: str
    outcome: str = "interrupted"  # one of OUTCOMES; this one if nothing recorded its end
    reason: str = ""
    seconds: float = 0.0
    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # (table, figures)
    facts: dict[str, Any] = field(default_factory=dict)


class State:
    """A folder that is carried from call to call: `state.jsonl` and the files that parts returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.path = self.folder / "state.jsonl"
        self.files = self.folder / "files"
        self.logs = self.folder / "logs"
        self.scratch = self.folder / "scratch"  # caches and temporary files of the parts
        for made in (self.folder, self.files, self.logs, self.scratch):
            made.mkdir(parents=True, exist_ok=True)
        self.cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        if self.cut:  # in the middle of a line, when the machine went away
            with self.path.open("ab") as file:
                file.write(b"\n")
        if (packed := self.folder / ZIP).exists() and not any(self.files.iterdir()):
            with zipfile.ZipFile(packed) as archive:
                archive.extractall(self.files, [name for name in archive.namelist() if not name.startswith(f"{LOGS}/")])

    def append(self, record: Mapping[str, Any]) -> None:
        append(self.path, record)

    def records(self) -> list[dict[str, Any]]:
        return records(self.path)

    def calls(self) -> list[dict[str, Any]]:
        """Return what is known of each call: commit, device, what was missing."""
        return [record["call"] for record in self.records() if "call" in record]

    def attempts(self) -> dict[str, list[Attempt]]:
        """Return the runs of each part, oldest first."""
        found: dict[str, list[Attempt]] = {}
        for record in self.records():
            if "part" not in record:
                continue
            runs = found.setdefault(record["part"], [])
            if "begin" in record:
                runs.append(Attempt(record["part"]))
            elif runs:
                _add(runs[-1], record)
        return found

    def facts(self) -> dict[str, Any]:
        """Return every fact, of the newest run that recorded it."""
        found: dict[str, Any] = {}
        for runs in self.attempts().values():
            for run in runs:
                found |= run.facts
        return found

    def export(self, out: Path) -> list[str]:
        """Copy the state into `out`, packed files included. Returns the names of files that do not fit."""
        out.mkdir(parents=True, exist_ok=True)
        self.export_lines(out)
        left_out, size = [], 0
        with zipfile.ZipFile(out / ZIP, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(self.logs.glob("*.log")):  # first of all: why a part ended
                archive.writestr(f"{LOGS}/{path.name}", path.read_bytes()[-LOGGED:])
            for path in sorted(self.files.rglob("*")):
                name = str(path.relative_to(self.files))
                if path.is_file() and size + path.stat().st_size <= LIMIT:
                    archive.write(path, name)
                    size = sum(one.compress_size for one in archive.infolist())
                elif path.is_file():
                    left_out.append(name)
        return left_out

    def export_lines(self, out: Path) -> None:
        """Copy `state.jsonl` into `out`; cheap enough to be done after every part."""
        if not self.path.exists() or out.resolve() == self.folder:
            return
        out.mkdir(parents=True, exist_ok=True)
        partial = out / "state.jsonl.part"
        partial.write_bytes(self.path.read_bytes())
        os.replace(partial, out / "state.jsonl")


def _add(run: Attempt, record: Mapping[str, Any]) -> None:
    """Add one record of a part to its newest run."""
    if "table" in record:
        run.rows.append((record["table"], record["row"]))
    elif "fact" in record:
        run.facts[record["fact"]] = record["value"]
    elif "outcome" in record:
        run.outcome, run.reason, run.seconds = record["outcome"], record["reason"], record["seconds"]


def best(runs: list[Attempt]) -> Attempt:
    """Return the run whose rows count: the newest that is done, else the newest with rows, else the newest."""
    done = [run for run in runs if run.outcome == "done"]
    rows = [run for run in runs if run.rows]
    return (done or rows or runs)[-1]


def finished(runs: list[Attempt]) -> bool:
    """Return whether no later call starts the part again."""
    return any(run.outcome == "done" for run in runs) or sum(run.outcome in COUNTED for run in runs) >= TRIES
