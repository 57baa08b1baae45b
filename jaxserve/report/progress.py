"""A progress bar that appears only if the work takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

Callback = Callable[..., None]  # (done, total, note="")

PATIENCE = 2.0  # seconds before the bar appears
PLAIN_EVERY = 10.0  # seconds between lines if stderr is not a terminal


@contextmanager
def bar(label: str, *, patience: float = PATIENCE, console: Console | None = None) -> Iterator[Callback]:
    """Yield a callable `(done, total, note="")` that draws a bar on stderr after `patience` seconds.

    `total` may grow between calls; 0 means unknown. If stderr is not a terminal, a plain line is
    printed every ten seconds instead, so that log files stay readable.
    """
    drawn = _Bar(label, patience, console or Console(file=sys.stderr))
    try:
        yield drawn.update
    finally:
        drawn.close()


class _Bar:
    def __init__(self, label: str, patience: float, console: Console) -> None:
        self._label = label
        self._console = console
        self._began = monotonic()
        self._next = self._began + patience  # time of the first line or the bar
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def update(self, done: float, total: float, note: str = "") -> None:
        now = monotonic()
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total or None, note=note)
        elif now >= self._next and not done >= total > 0:  # no bar if the work is done
            if self._console.is_terminal:
                self._show(done, total, note)
            else:
                self._next = now + PLAIN_EVERY
                share = f"{done:.3g}/{total:.3g}" if total else f"{done:.3g}"
                line = f"{self._label}: {share} after {now - self._began:.0f} s {note}".rstrip()
                print(line, file=self._console.file, flush=True)

    def _show(self, done: float, total: float, note: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            Remaining(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
        )
        self._task = self._progress.add_task(self._label, completed=done, total=total or None, note=note)  # type: ignore[arg-type]
        self._progress.start()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
