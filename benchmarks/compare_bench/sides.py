"""Engines in processes that take turns.

While one computes, the others are stopped (SIGSTOP), so that their thread pools take no core from it. Alternating also
spreads other load on the machine evenly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import ROOT

from .worker import MARK

WORKER = Path(__file__).with_name("worker.py")
ALONE = {  # a single process per side, because only that process is stopped
    "vllm": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "all"},
    "jaxserve": {"PYTHONPATH": str(ROOT)},
}


def environment_of(name: str, threads: int) -> dict[str, str]:
    """Return the environment of a side's process: offline, `threads` threads, which sleep while they wait."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    environment |= {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    return environment | {"HF_HUB_OFFLINE": "1", **ALONE.get(name, {})}


class Side:
    """An engine in a subprocess, stopped between calls of `run`."""

    def __init__(self, name: str, python: str, settings: Mapping[str, Any]) -> None:
        """Start the engine with the interpreter `python`. Raises RuntimeError if it does not start."""
        self.name = name
        environment = environment_of(name, settings["threads"])
        self._told = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python or sys.executable, str(WORKER), name, json.dumps(dict(settings))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._told, text=True, env=environment,
        )  # fmt: skip
        self.start = float(self._answer()["start"])  # seconds from the imports to the first possible request
        os.kill(self._process.pid, signal.SIGSTOP)

    def run(self, requests: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        os.kill(self._process.pid, signal.SIGCONT)
        print(requests, prompt, tokens, seed, file=self._process.stdin, flush=True)
        found = self._answer()
        os.kill(self._process.pid, signal.SIGSTOP)
        return found

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line[len(MARK) :])
                return found
        self._told.seek(0)
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}:\n{self._told.read()[-2000:]}")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # SIGKILL also ends a stopped process
        self._process.wait()
        self._told.close()
