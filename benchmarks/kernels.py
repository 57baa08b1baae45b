"""Our attention kernels on the device that is here, against its ceilings and what others offer. One command.

In order: does the device compute rightly (eager and jit against numpy); the two ceilings, copy and bfloat16 products;
every kernel against float64 on random data; times, ours and the peers'; the two slopes of decode; the questions that
only a device answers; a sweep of the kernels' configs, in the time that is left. A part that fails costs one line.
`--dry` runs all of it on a CPU with tiny shapes: interpreted kernels, and no figure that means anything.
"""

from __future__ import annotations

import os

# torch wants memory of its own, and pools come and go: set before jax starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jax
from kernel_bench import experts, first, latent, narrow, questions, sampling, times, tune
from kernel_bench.session import Session

from jaxserve.report.progress import bar

RESERVE = 100.0  # seconds that the peers leave to the sweep
PARTS = 150  # about as many as there are; the bar learns the rest


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = common.RESULTS / f"kernels-{time.strftime('%Y-%m-%d')}"
    parser.add_argument("--output", type=Path, default=default, metavar="FOLDER", help="JSON and table [%(default)s]")
    parser.add_argument("--note", default="", help="kept in the JSON file")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU: does the script work?")
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="skip what would begin later, unless dry [%(default)s]"
    )
    parser.add_argument("--only", type=sections, default=list(SECTIONS), metavar="A,B", help=", ".join(SECTIONS))
    parser.add_argument("--executable", type=Path, metavar="FILE", help="run what --build-executable made elsewhere")
    parser.add_argument("--build-executable", type=Path, metavar="FILE", help="compile for a H200 without one, and end")
    return parser.parse_args()


def ceilings(session: Session) -> None:
    session.part("copy ceiling", lambda: first.copy_ceiling(session))
    session.part("matmul ceiling", lambda: first.matmul_ceiling(session))


def writes(session: Session) -> None:
    for tokens, rows in ((16, 2), (3, 3)) if session.dry else ((8192, 4), (256, 256)):
        session.part(f"kv write {tokens}", lambda tokens=tokens, rows=rows: times.kv_write(session, tokens, rows))


# In this order: what other parts divide by, then what matters most, so that a run that is cut off has it.
SECTIONS: dict[str, Callable[[Session], Any]] = {
    "sanity": lambda session: session.part("sanity", lambda: first.sanity(session)),
    "ceilings": ceilings,
    "numerics": first.all_numerics,
    "attention": times.attention,
    "latent": latent.times,
    "narrow": narrow.times,
    "slopes": lambda session: session.part("slopes", lambda: times.slopes(session)),
    "writes": writes,
    "experts": experts.measure,
    "sampling": sampling.measure,
    "pages": lambda session: session.part("pages", lambda: times.pages_out_and_in(session)),
    "registers": questions.registers,
    "peers": lambda session: times.others(session, RESERVE),
    "questions": lambda session: session.part("questions", lambda: questions.answers(session), least=0.0),
    "sweep": lambda session: session.part("sweep", lambda: tune.sweep(session)),
}


def sections(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} unknown; there are {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names]


def measure(session: Session, args: argparse.Namespace) -> None:
    if args.executable is not None:
        session.part("travelled executable", lambda: questions.load(session, args.executable))
    for name in args.only:
        began, before = time.perf_counter(), session.parts
        SECTIONS[name](session)
        session.facts.setdefault("sections_s", {})[name] = round(time.perf_counter() - began, 1)
        session.facts.setdefault("sections_parts", {})[name] = session.parts - before


def main() -> None:
    args = arguments()
    if args.build_executable is not None:
        questions.build(args.build_executable)
        return
    if jax.default_backend() != "gpu" and not args.dry:
        raise SystemExit(f"no GPU here, only {jax.default_backend()}: --dry tries the script with tiny shapes")
    began = time.perf_counter()
    with bar("kernels") as show:
        deadline = math.inf if args.dry else began + 60 * args.minutes
        session = Session(args.dry, args.output, deadline, show)
        session.expect(PARTS)
        session.facts |= {
            "dry": args.dry,
            "sections": list(SECTIONS),
            "note": args.note,
            **common.origin(),
            **first.machine(),
        }
        measure(session, args)
    session.facts["seconds"] = time.perf_counter() - began
    session.save()
    session.close()


if __name__ == "__main__":
    main()
