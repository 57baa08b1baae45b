"""What the process of one part does: call its function, and record how it ended."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from .part import Part, Run, Skip, in_a_line
from .state import State

FAULTS = "JAXSERVE_GPU_DAY_FAULTS"  # of a rehearsal: "first=abort;cases 0=hang"


def function_of(part: Part) -> Callable[..., Any]:
    """Return the function of a part. Modules without a dot are in this package."""
    module, _, name = part.call.partition(":")
    found: Callable[..., Any] = getattr(
        importlib.import_module(module if "." in module else f"{__package__}.{module}"), name
    )
    return found


def run_part(part: Part, state: State, *, dry: bool, deadline: float) -> NoReturn:
    """Call the part's function, record the outcome, and end the process without the exit handlers of libraries.

    After a sticky CUDA error those handlers may fail or hang.
    """
    began = time.monotonic()
    run = Run(part, dry, state.path, state.files, state.facts(), deadline)
    outcome, reason = "done", ""
    try:
        if dry:
            inject(dict(one.split("=") for one in os.environ.get(FAULTS, "").split(";") if one).get(part.name))
        function_of(part)(run, **part.arguments)
    except Skip as why:
        outcome, reason = "skipped", str(why)
    except Exception as error:
        traceback.print_exc()
        outcome, reason = "failed", in_a_line(error)
    state.append(
        {"part": part.name, "outcome": outcome, "reason": reason, "seconds": round(time.monotonic() - began, 2)}
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def inject(fault: str | None) -> None:
    """Do to this process what a device may do to it: a rehearsal shows that only this part is lost."""
    if fault == "abort":
        os.abort()
    if fault == "hang":
        time.sleep(3600)
    if fault == "wrong":
        from tests.support.kernels import reference

        reference.error = lambda *_, **__: 1.0  # type: ignore[assignment]
