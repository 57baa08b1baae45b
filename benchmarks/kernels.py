"""Benchmark the kernels on this device against its ceilings and other implementations.

In order: correctness of the device (eager and jit against numpy); the copy and bfloat16 matmul ceilings; every kernel
against float64 on random data; times of the kernels and their peers; the two slopes of decode; design questions that
only a device answers; a sweep of kernel configs in the remaining time. A part that fails adds one line to the report.
`--dry` tests the script on a CPU with tiny shapes and interpreted kernels; its figures are meaningless.
"""

from __future__ import annotations

import os

# Leave memory to torch, and allocate pools on demand. Must be set before jax is imported.
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

RESERVE = 100.0  # seconds that the peers leave for the sweep
PARTS = 150  # estimate for the progress bar, which grows if there are more


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = common.RESULTS / f"kernels-{time.strftime('%Y-%m-%d')}"
    parser.add_argument("--output", type=Path, default=default, metavar="FOLDER", help="JSON and table [%(default)s]")
    parser.add_argument("--note", default="", help="stored in the JSON file")
    parser.add_argument("--dry", action="store_true", help="test the script on a CPU with tiny shapes")
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="skip parts that would start later, unless --dry [%(default)s]"
    )
    parser.add_argument("--only", type=sections, default=list(SECTIONS), metavar="A,B", help=", ".join(SECTIONS))
    parser.add_argument("--executable", type=Path, metavar="FILE", help="run an executable of --build-executable")
    parser.add_argument(
        "--build-executable", type=Path, metavar="FILE", help="compile for an H200 without one, and exit"
    )
    return parser.parse_args()


def ceilings(session: Session) -> None:
    session.part("copy ceiling", lambda: first.copy_ceiling(session))
    session.part("matmul ceiling", lambda: first.matmul_ceiling(session))


def writes(session: Session) -> None:
    for tokens, rows in ((16, 2), (3, 3)) if session.dry else ((8192, 4), (256, 256)):
        session.part(f"kv write {tokens}", lambda tokens=tokens, rows=rows: times.kv_write(session, tokens, rows))


# Ordered: the ceilings that other sections need, then the most important ones, in case the run is interrupted.
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
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is no section; choose from {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names]


def measure(session: Session, args: argparse.Namespace) -> None:
    if args.executable is not None:
        session.part("traveled executable", lambda: questions.load(session, args.executable))
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
        raise SystemExit(f"needs a GPU, but the backend is {jax.default_backend()}; --dry tests the script without one")
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
