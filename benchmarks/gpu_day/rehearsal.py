"""Rehearse the day without a card: all of it dry, with the packages of the borrowed machine and the carried wheels.

    python -m benchmarks.gpu_day.rehearsal --carried carried --work DIR

Run it with Python 3.12 in an environment of packages of machine.txt. Whatever else is installed is refused at import.
Then the day is repeated with faults, several in a day, and each may cost its own part only. Prints a table; exits 1 if
a part ended in another way than its fault explains.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

from benchmarks.common import ROOT
from jaxserve.report.table import markdown

from .child import FAULTS
from .part import GOOD
from .parts import parts
from .state import State, best

HERE = Path(__file__).parent
CHECKED = ("check 0", "sweep decode", "sweep prefill")  # parts that compare numbers with a reference
HANG = 15.0  # seconds of a part in a day in which every part has a fault
SERVE = """
from jaxserve import LLM, SamplingParams
from jaxserve.demo import model_path
(out,) = LLM(str(model_path()), mesh="1x1").generate(["def f("], SamplingParams(max_tokens=4))
print(repr(out.outputs[0].text))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--carried", type=Path, required=True, metavar="DIR", help="the folder that --pack made")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for states, made anew")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    refused = not_there()
    print(f"refused, though installed here: {', '.join(refused) or 'nothing'}", flush=True)
    rehearsal = Rehearsal(args.carried, args.work, refused)
    rehearsal.serve()
    names = [part.name for part in parts(dry=True)]
    rehearsal.day("no fault", {})
    for number, kind in enumerate(("abort", "hang")):
        other = ("abort", "hang")[1 - number]
        rehearsal.day(f"{kind} and {other}", {name: (kind, other)[at % 2] for at, name in enumerate(names)})
    rehearsal.day("wrong numbers", dict.fromkeys(CHECKED, "wrong"), ("first", *CHECKED))
    rest = ("check 0", "headlines others")  # the next call tries them again
    rehearsal.day("the first kernel is wrong", {"first": "wrong"}, ("first", *rest, "engine 8b"), costs=rest)
    rehearsal.day("a wheel is missing", {}, ("first", "engine 8b", "peers"), without="msgspec")
    print(markdown(["day", "parts", "faults", "lost", "seconds"], rehearsal.rows))
    if rehearsal.bad:
        raise SystemExit("\n".join(rehearsal.bad))


def not_there() -> list[str]:
    """Return the names of installed modules whose packages are not on the machine's list."""
    plain = [re.split(r"[=\s]", line)[0] for line in (HERE / "machine.txt").read_text(encoding="utf-8").splitlines()]
    listed = {normal(name) for name in plain if name and not name.startswith("#")}
    ours = {"jaxserve-llm"}
    return sorted(
        module
        for module, found in packages_distributions().items()
        if not {normal(name) for name in found} & (listed | ours)
    )


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Rehearsal:
    """The days of a rehearsal, and what went wrong in them."""

    def __init__(self, carried: Path, work: Path, refused: Sequence[str]) -> None:
        self.carried, self.work = carried, work
        self.rows: list[list[object]] = []
        self.bad: list[str] = []
        self._environment = {
            **os.environ,
            "JAXSERVE_REFUSED": ",".join(refused),
            "PYTHONPATH": str(HERE / "refusing"),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),  # days after the first load what it compiled
            "JAXSERVE_CACHE_DIR": str(work / "compiled"),
        }

    def serve(self) -> None:
        """Start `LLM` with nothing but the machine's packages and the carried wheels."""
        from . import carry

        site = carry.unpack(self.carried, self.work / "site")
        path = os.pathsep.join([str(site), str(ROOT), self._environment["PYTHONPATH"]])
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", SERVE], cwd=self.work, env={**self._environment, "PYTHONPATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        print(f"LLM: {done.stdout.strip() or done.stderr[-2000:]}, {time.monotonic() - began:.0f} s", flush=True)
        if done.returncode:
            self.bad.append("LLM did not start with the machine's packages")

    def day(
        self, name: str, faults: Mapping[str, str], only: Sequence[str] | None = None, *, without: str = "",
        costs: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Run a dry day, or some of its parts, and compare each outcome with what its fault may cost.

        without: a wheel that is not carried. costs: parts that may fail because another one did.
        """
        carried, folder = self.carried, self.work / name.replace(" ", "-")
        if without:
            carried = folder / "carried"
            shutil.copytree(self.carried, carried, ignore=shutil.ignore_patterns(f"{without}-*"))
        command = [sys.executable, "-m", "benchmarks.gpu_day", "--dry", "--state", str(folder / "state")]
        command += ["--out", str(folder / "out"), "--carried", str(carried), "--minutes", "60"]
        chosen = [part for part in parts(dry=True) if only is None or part.name in only]
        command += ["--only", ",".join(part.name for part in chosen)]
        command += ["--most", str(HANG if "hang" in faults.values() else 600)]
        environment = {**self._environment, FAULTS: ";".join(f"{part}={kind}" for part, kind in faults.items())}
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        took = time.monotonic() - began
        print(f"== {name}\n{done.stdout}{done.stderr if done.returncode else ''}", flush=True)
        if done.returncode:
            self.bad.append(f"{name}: the call ended with status {done.returncode}")
            return
        found = {part: best(runs) for part, runs in State(folder / "out" / "dry").attempts().items()}
        lost = [part for part, run in found.items() if run.outcome not in GOOD]
        for part in chosen:
            run, expected = found.get(part.name), faults.get(part.name)
            if run is None:
                self.bad.append(f"{name}: {part.name} was not started")
            elif (expected == "hang" and run.outcome != "hung") or (expected == "abort" and run.outcome != "failed"):
                self.bad.append(f"{name}: {part.name} with {expected} ended as {run.outcome}")
            elif expected == "wrong" and run.outcome == "done":
                self.bad.append(f"{name}: {part.name} took wrong numbers for right ones")
            elif not expected and part.name not in costs and run.outcome not in GOOD:
                self.bad.append(f"{name}: {part.name} {run.outcome}: {run.reason}")
        missing = [f"{part}: {run.reason}" for part, run in found.items() if without and run.outcome == "skipped"]
        faulty = len(faults) + bool(without)
        self.rows.append([name, len(found), faulty, ", ".join(lost + missing) or "nothing", round(took)])


if __name__ == "__main__":
    main()
