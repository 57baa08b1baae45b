"""How often Mosaic guesses a layout while it lowers a kernel. `python -m tests.support.kernels.guesses [CASE...]`

Prints, per case of the gate (all usual ones): seconds of CPU to trace and lower, guesses, and values without a layout.
A search that goes back guesses more often than there are values: say the layout of a load or an iota.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

from pallas_kernels.gate.cases import GPU, mesh_of
from pallas_kernels.gate.targets import TARGETS, prepare


def main(wanted: list[str]) -> None:
    target = TARGETS["h200"]
    prepare(target)

    import jax
    from jax.experimental.mosaic.gpu import layout_inference

    search: Any = layout_inference.find_assignments_for
    depth, kernels = 0, list[list[int]]()  # per kernel: guesses, values

    def counted(unknowns: Any, system: Any, **options: Any) -> Any:
        nonlocal depth
        if not depth:
            kernels.append([0, len(unknowns)])
        kernels[-1][0] += 1
        depth += 1
        try:
            return search(unknowns, system, **options)
        finally:
            depth -= 1

    layout_inference.find_assignments_for = counted
    for case in [case for name in GPU for case in importlib.import_module(name).cases()]:
        if case.name in wanted or (not wanted and case.usual):
            mesh, began = mesh_of(target.devices()[: case.devices]), time.process_time()
            kernels.clear()
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                case.lower(mesh)
            seconds = round(time.process_time() - began, 2)
            print(json.dumps({"case": case.name, "seconds": seconds, "kernels": kernels}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
