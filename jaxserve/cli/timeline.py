"""The flags `--timeline`, `--explain` and `--dashboard`, and what they show of simulated and of served runs."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxserve.cli.flags import add_flags
from jaxserve.errors import InvalidValue
from jaxserve.report.recorded_server import show_run
from jaxserve.sched.metrics import Measured
from jaxserve.sched.recorded.explain import explain
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.recorded.timeline import trace
from jaxserve.whole_file import check_output

DASHBOARD = 8100  # port


def add_arguments(group: Any, of: str = "") -> None:
    """Add the flags. `of` begins their help texts."""
    add_flags(
        group,
        ("--timeline", Path, None, "FILE", f"{of}write its steps as a trace for ui.perfetto.dev (JSON, gzipped if "
         "FILE ends in .gz)"),
        ("--explain", None, None, "REQUEST", f"{of}print the events of a request, by its number or its id; or "
         "`missed`: the first that missed its SLO"),
    )  # fmt: skip
    text = f"{of}show the run on a page at this port of this machine until Ctrl-C [{DASHBOARD}; 0: a free one]"
    group.add_argument("--dashboard", nargs="?", type=int, const=DASHBOARD, metavar="PORT", help=text)


def recorder_of(args: argparse.Namespace) -> Recorder | None:
    """Return a recorder if a flag asks for one. Raises InvalidValue if the file cannot be written."""
    if all(flag is None for flag in (args.timeline, args.explain, args.dashboard)):
        return None
    if args.dashboard is not None and not 0 <= args.dashboard <= 65535:
        raise InvalidValue(f"dashboard={args.dashboard} must be a port, 0 to 65535", "dashboard")
    if args.timeline is not None:
        check_output(args.timeline, "timeline")
    return Recorder(slack=args.dashboard is not None)


def tell(args: argparse.Namespace, recorder: Recorder, measured: Iterable[Measured]) -> None:
    """Write the timeline and print the events. `measured`: the requests among which `missed` looks."""
    if args.timeline is not None:
        text = json.dumps(trace(recorder), separators=(",", ":")).encode()
        args.timeline.write_bytes(gzip.compress(text) if args.timeline.suffix == ".gz" else text)
        print(f"wrote {args.timeline}: open it on https://ui.perfetto.dev")
    if args.explain is not None:
        id = _asked(args.explain, recorder, measured)
        print(*(["", *explain(recorder, id)] if id is not None else ["\nno request missed its SLO"]), sep="\n")


def show(args: argparse.Namespace, recorder: Recorder | None, title: str, measured: Iterable[Measured]) -> None:
    """Serve the dashboard of a run until Ctrl-C, if it is asked for."""
    if recorder is not None and args.dashboard is not None:
        show_run(recorder, title, args.dashboard, {request.id: request.class_ for request in measured})


def _asked(text: str, recorder: Recorder, measured: Iterable[Measured]) -> int | None:
    """Return the request of --explain: by number, by id, or the first that missed its SLO."""
    if text == "missed":
        return min((request.id for request in measured if not request.attained), default=None)
    if text.isdecimal() and int(text) in recorder.requests:
        return int(text)
    for id, request in recorder.requests.items():
        if request.key == text:
            return id
    numbers = f"{min(recorder.requests)} to {max(recorder.requests)}" if recorder.requests else "of which there is none"
    raise InvalidValue(f"explain={text!r} must be a request's number, {numbers}, its id, or missed", "explain")
