"""Compare the planner's search with trying every set-up, on six questions.

Every candidate of every number of devices up to the answer serves all requests; the search must cost at most 5 % more
than the cheapest that keeps the goal. Cells are stored as they end, so that a run continues where the last one stopped.

    python benchmarks/planner.py --trace AzureLLMInferenceTrace_conv.csv
    python benchmarks/planner.py --only minimax            # questions whose name contains this
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import common

from jaxserve.capacity import fit as fitting
from jaxserve.capacity.devices import devices
from jaxserve.capacity.search import Searcher, candidates
from jaxserve.capacity.trial import Load, Runner, Trial
from jaxserve.cli.plan.load import Fits
from jaxserve.cli.simulate.workloads import find_workload
from jaxserve.engine.memory import kv
from jaxserve.models.published import published_spec
from jaxserve.report.table import print_table
from jaxserve.sched.sim import load_trace

POLICIES = ("unified", "distserve", "kairos", "sarathi", "vllm", "fairbatching")
CHUNKS = (8192, 2048, 4096, 1024)
LEAST = 60  # set-ups to compare; with fewer of two sizes of steps, four are tried
# name: model, device, number, workload (None: --trace), rate, objectives
QUESTIONS: dict[str, tuple[str, str, int, str | None, float, dict[str, float]]] = {
    "llama3-70b on H100": ("llama3-70b", "h100", 8, None, 20.0, {"ttft": 1.0, "tpot": 0.04}),
    "llama3-70b on H200": ("llama3-70b", "h200", 8, None, 20.0, {"ttft": 1.0, "tpot": 0.04}),
    "minimax-m2 on H200": ("minimax-m2", "h200", 8, "K128", 10.0, {}),
    "qwen3-14b on H100": ("qwen3-14b", "h100", 4, "K32", 18.0, {}),
    "mixed classes, 8B": ("llama3-8b", "h100", 4, "flowprefill-llama3-8b", 72.0, {}),
    "mixed classes, 70B": ("llama3-70b", "h200", 8, "flowprefill-llama3-70b", 20.0, {}),
}


class Question:
    """A question, its set-ups by number of devices, and the outcomes that are known of them. Writer of the file."""

    def __init__(self, name: str, args: argparse.Namespace, cells: dict[str, Any]) -> None:
        model, device, self.count, workload, rate, slo = QUESTIONS[name]
        self.name = name
        self._cells = cells.setdefault(name, {})
        spec = published_spec(model)
        source = find_workload(workload) if workload else tuple(load_trace(args.trace, num_prompts=args.num_requests))
        self.load = Load(source, rate, args.num_requests, slo=slo, longest=spec.max_positions)
        kind = devices()[device]
        setting = fitting.Setting(
            kind, device, self.count, spec.max_positions, 256, 8192, kv.default_page_size(kind.platform), 0.9, None,
            "bfloat16", "auto", 2048, 2048, 0.05,
        )  # fmt: skip
        arrivals, _ = self.load.arrivals(args.num_requests, rate)
        self._fits = Fits(spec, setting, [model], None, arrivals)
        for number in range(1, self.count + 1):
            self._fits.of(number, None)
        self.runner = Runner(self.load, {tp: times.latency for tp, times in self._fits.times.items()}, 256)
        self._chunks = CHUNKS[:2]
        few = sum(len(self.of(number)) for number in range(1, self.count + 1)) < LEAST
        self._chunks = CHUNKS if few else CHUNKS[:2]

    def of(self, number: int) -> list[Any]:
        return list(candidates(number, self._fits.of(number, None), POLICIES, self._chunks))

    def searched(self) -> dict[str, Any]:
        """Search, and return the answer and its cost."""
        if "search" not in self._cells:
            began = time.process_time()
            told: list[Any] = []
            searcher = Searcher(self.load, lambda trials: map(self.runner, trials), self.runner.bound, told.append)
            step = list(searcher.fewest(range(1, self.count + 1), self.of))[-1]
            best = step.best
            self._cells["search"] = {
                "devices": step.devices if step.keeps(self.load.goal) else None,
                "set_up": str(best.candidate) if best else None, "attained": step.attained,
                "cpu_s": time.process_time() - began,
            }  # fmt: skip
        return dict(self._cells["search"])

    def whole(self, store: Any) -> dict[str, Any]:
        """Try every set-up up to the first number of devices that keeps the goal, and return the best."""
        for number in range(1, self.count + 1):
            found = []
            for one in self.of(number):
                if str(one) not in self._cells:
                    began = time.process_time()
                    outcome = self.runner(Trial(one, self.load.requests, self.load.rate))
                    self._cells[str(one)] = {"attained": outcome.attained, "cpu_s": time.process_time() - began}
                    print(f"{self.name}: {one}: {outcome.attained:.3f}", flush=True)
                    store()
                found.append((self._cells[str(one)]["attained"], str(one)))
            if found and max(found)[0] >= self.load.goal:
                return {"devices": number, "attained": max(found)[0], "set_up": max(found)[1]}
        return {"devices": None, "attained": max((one["attained"] for one in self._cells.values()), default=0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Azure conversations, for the first two questions")
    parser.add_argument("--only", default="", metavar="TEXT", help="questions whose name contains this")
    parser.add_argument("--num-requests", type=int, default=400, metavar="N", help="per simulation [400]")
    parser.add_argument("--search-only", action="store_true", help="do not try every set-up")
    common.add_output(parser, "planner")
    args = parser.parse_args()
    stored = json.loads(args.output.read_text()) if args.output.is_file() else {}
    cells = stored.get("cells", {}) if stored.get("num_requests") == args.num_requests else {}

    def store() -> None:
        whole = {"origin": common.origin(), "note": args.note, "num_requests": args.num_requests, "cells": cells}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(whole, indent=1) + "\n")

    rows = []
    for name, (*_, workload, _, _) in QUESTIONS.items():
        if args.only not in name or (workload is None and args.trace is None):
            continue
        question = Question(name, args, cells)
        found = question.searched()
        store()
        print(f"{name}: search: {found}", flush=True)
        best = {} if args.search_only else question.whole(store)
        every = sum(one["cpu_s"] for one in cells[name].values()) - found["cpu_s"]
        rows.append(
            [
                name, found["devices"], found["set_up"], found["attained"], best.get("devices"), best.get("set_up"),
                best.get("attained"), found["cpu_s"], every,
            ]
        )  # fmt: skip
    print_table(
        "Search beside trying everything (CPU seconds of both)",
        ["question", "devices", "set-up", "attained", "devices, all", "set-up, all", "attained, all", "s", "s, all"],
        rows,
    )


if __name__ == "__main__":
    main()
