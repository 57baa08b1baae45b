"""Programs for a GPU are kept like those for a CPU: a second process finds them all, and traces nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.gate.targets import TARGETS

# One of each kind: Mosaic kernels, XLA's own, donated arguments.
PROGRAMS = ("decode 256", "step 64", "draw 8", "draw fully 8", "score", "remember", "export 64", "import 64")


@pytest.mark.skipif(TARGETS["h200"].missing() is not None, reason=str(TARGETS["h200"].missing()))
def test_a_second_process_finds_the_programs_of_a_gpu(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        command = [
            sys.executable,
            "-m",
            "tests.support.engine.kept_ahead",
            str(tmp_path),
            "--layers",
            "2",
            "--programs",
        ]
        done = subprocess.run([*command, *PROGRAMS], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found == [
        {"kept": 0, "programs": len(PROGRAMS), "traces": len(PROGRAMS)},
        {"kept": len(PROGRAMS), "programs": len(PROGRAMS), "traces": 0},
    ]
