"""Run the parts: each in a process with a time limit, within the minutes of one call."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Lock

from benchmarks.common import ROOT

from .part import ITEMS, Part, slug
from .processes import Processes
from .state import COUNTED, State, finished

SHARE = 0.5  # a part is started if this share of its limit is left
Show = Callable[..., None]


@dataclass
class Call:
    """One call: which parts, for how long, and what has happened so far."""

    state: State
    parts: Sequence[Part]
    dry: bool
    until: float  # by time.monotonic
    module: str  # whose parts() these are
    out: Path
    site: Path | None = None  # folder of unpacked wheels
    most: float = float("inf")  # seconds of any part, for rehearsals
    ended: list[tuple[str, str]] = field(default_factory=list)  # (part, outcome)
    _lock: Lock = field(default_factory=Lock)
    _processes: Processes = field(default_factory=Processes)

    def run(self, show: Show) -> None:
        """Run the parts, neighbors that may run beside each other together."""
        for beside, group in groupby(self.parts, key=lambda part: part.beside):
            parts = list(group)
            with ThreadPoolExecutor(len(parts) if beside else 1) as pool:
                for _ in pool.map(lambda part: self._start(part, show), parts):
                    pass

    def stop(self) -> None:
        """End the parts that run, and start no others."""
        self.until = -1.0
        self._processes.end_all()

    def not_started(self) -> list[str]:
        """Return the names of the parts that this call left for the next."""
        over = {name for name, _ in self.ended}
        return [part.name for part in self.parts if part.name not in over]

    def _start(self, part: Part, show: Show) -> None:
        whole = min(part.seconds, self.most)
        limit = min(whole, self.until - time.monotonic())
        if limit < SHARE * whole:
            return
        show(len(self.ended), len(self.parts), part.name)
        self.state.append({"part": part.name, "begin": True})
        if absent := [name for name in part.needs if not present(name)]:
            self._end(part, "skipped", f"not installed: {', '.join(absent)}", 0.0)
        else:
            self._run(part, limit, whole)
        show(len(self.ended), len(self.parts), part.name)
        self.state.export_lines(self.out)

    def _run(self, part: Part, limit: float, whole: float) -> None:
        began = time.monotonic()
        log = self.state.logs / f"{slug(part.name)}.log"
        command = [sys.executable, "-m", __package__, "--run-part", part.name, "--state", str(self.state.folder)]
        command += ["--deadline", str(began + limit), "--module", self.module, *(["--dry"] * self.dry)]
        status, items = -1, -1
        while status and (items < 0 or (part.restarts and self._items(part) > items)):  # it goes on while it gets on
            items = self._items(part)
            left = max(0.0, began + limit - time.monotonic())
            status = self._processes.run(command, left, cwd=ROOT, env=self._environment(part), log=log)
        took = time.monotonic() - began
        run = self.state.attempts()[part.name][-1]
        if run.outcome != "interrupted":  # the part has recorded its end
            self._say(part, run.outcome, run.reason, took)
        elif self.until < 0:
            self._end(part, "cut", "the call was stopped", took)
        elif status is not None:
            self._end(part, "failed", f"crashed with status {status}: {last_line(log)}", took)
        elif limit < whole:
            self._end(part, "cut", f"stopped after the {limit:.0f} s that were left of the call", took)
        else:
            self._end(part, "hung", f"stopped after {limit:.0f} s: {last_line(log)}", took)

    def _items(self, part: Part) -> int:
        """Return how many items the part has begun or ended."""
        return sum(one["part"] == part.name for one in self.state.records() if one.get("table") == ITEMS)

    def _end(self, part: Part, outcome: str, reason: str, seconds: float) -> None:
        self.state.append({"part": part.name, "outcome": outcome, "reason": reason, "seconds": round(seconds, 2)})
        self._say(part, outcome, reason, seconds)

    def _say(self, part: Part, outcome: str, reason: str, seconds: float) -> None:
        with self._lock:
            self.ended.append((part.name, outcome))
            print(f"{outcome:8} {seconds:5.1f} s  {part.name}{': ' if reason else ''}{reason}", flush=True)

    def _environment(self, part: Part) -> dict[str, str]:
        """Return the variables of a part's process: it finds this checkout, and writes only to the state folder."""
        scratch = self.state.scratch
        found = dict(os.environ)
        paths = [*([str(self.site)] if self.site else []), str(ROOT), *filter(None, [found.get("PYTHONPATH")])]
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        for name in ("TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR"):
            found[name] = str(scratch)
        for name in ("JAX_COMPILATION_CACHE_DIR", "JAXSERVE_CACHE_DIR", "PYTHONPYCACHEPREFIX"):
            found.setdefault(name, str(scratch / name.lower()))
        if self.dry:
            found["JAX_PLATFORMS"] = "cpu"
        else:  # what XLA tries out comes back, so that the next day need not
            tuned = self.state.files / "autotune"
            tuned.mkdir(exist_ok=True)
            flags = found.get("XLA_FLAGS", ""), f"--xla_gpu_per_fusion_autotune_cache_dir={tuned}"
            found["XLA_FLAGS"] = " ".join(flags).strip()
            found["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"  # jax would put another folder in its place
        return {**found, **part.environment}


def todo(parts: Iterable[Part], state: State, again: Collection[str] = ()) -> Iterator[Part]:
    """Yield the parts that a call runs: those that were never tried first, then those that failed once."""
    attempts = state.attempts()
    left = [part for part in parts if part.name in again or not finished(attempts.get(part.name, []))]

    def failed(part: Part) -> bool:
        return part.name not in again and any(run.outcome in COUNTED for run in attempts.get(part.name, []))

    yield from sorted(left, key=failed)


def present(module: str) -> bool:
    """Return whether a module can be imported, without doing so."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing, or refused
        return False


def last_line(log: Path) -> str:
    """Return the last line that a part printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"
