"""Make the programs of an engine for a GPU that is not here, and see that a second process finds them all.

`python -m tests.support.engine.kept_ahead FOLDER` compiles what is missing in the folder, and prints one line per
program, then `kept`, `programs` and `traces`. The executables cannot be loaded without the GPU, and those of matrix
products are not the ones that XLA would choose on it, so they are of no use to a server.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from pallas_kernels.gate.targets import TARGETS, prepare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", type=int, help="of the model, the first ones [all]")
    parser.add_argument("--programs", nargs="*", metavar="LABEL", help="[all]")
    args = parser.parse_args()
    target = TARGETS[args.target]
    prepare(target)

    from jaxserve.engine.startup import aot
    from jaxserve.engine.startup.calls import rungs
    from jaxserve.engine.startup.compiled import compile_counter
    from jaxserve.engine.startup.executables import Executables
    from pallas_kernels.gate.cases import mesh_of

    mesh = mesh_of(target.devices()[:1])
    config = aot.config_of(aot.Served(args.model, 1, layers=args.layers), "mosaic_gpu")
    resolved, _ = aot.inputs(config, mesh)
    kept = Executables(args.folder, resolved.facts)
    state = aot.described(config, mesh)
    [rung] = rungs(state, early=False, alone=True)
    calls = [call for call in rung.calls if not args.programs or call.label in args.programs]
    there = sum(kept.has(call) for call in calls)
    before = compile_counter().traces_total
    for call in calls:
        if not kept.has(call):
            began = time.perf_counter()
            kept.compile(call)
            print(f"{call.label}: {time.perf_counter() - began:.1f} s", flush=True)
    traces = compile_counter().traces_total - before
    print(json.dumps({"kept": there, "programs": len(calls), "traces": traces}))
    return 0 if all(map(kept.has, calls)) else 1


if __name__ == "__main__":
    sys.exit(main())
