"""`jaxserve serve`: serve a model over HTTP with OpenAI's API."""

from __future__ import annotations

import argparse
import atexit
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.cli import flags
from jaxserve.config import ServeConfig

if TYPE_CHECKING:
    from jaxserve.fleet.processes import EngineProcess

DESCRIPTION = "Serve a model with OpenAI's API under per-request latency objectives."

BEGIN = """
examples
  python -m jaxserve.run
      the demo model on this machine, at http://127.0.0.1:8000
  python -m jaxserve.run --model Qwen/Qwen3-8B --mesh 4x2 --ttft-slo 8s --tpot-slo 50ms
      8 accelerators: two instances of 2 devices prefill, two decode
"""
THEN = """then
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "Hello", "max_tokens": 20, "ttft_slo_ms": 500, "tpot_slo_ms": 30}'
"""
EXAMPLES = f"""{BEGIN}  python -m jaxserve.run --mesh 8x1 --prefill 3 --policy kairos
      three prefill, five decode
  python -m jaxserve.run --mesh 2x1 --mode colocated --policy sarathi
      each instance prefills and decodes
  python -m jaxserve.run --replicas 2
      two engines; a stream whose engine dies continues on the other one with the same tokens
  python -m jaxserve.run --mesh 2x1 --replicas 2 --ray local
      the same with engines that Ray starts, places and watches; --ray auto: in the cluster of this machine
  python -m jaxserve.run --config configs/serve/example.yaml --port 9000
      settings from a file; flags override it

{THEN}
Requests can set their own objectives, in the body fields ttft_slo_ms, tpot_slo_ms, stage_slo, service_tier, priority
(lower is earlier), or in the headers x-llm-d-slo-ttft-ms and x-llm-d-slo-tpot-ms.
"""
FIRST = (
    "model", "mesh", "ttft_slo", "tpot_slo", "policy", "max_model_len", "quantization", "gpu_memory_utilization",
    "replicas", "host", "port", "api_key_file", "config",
)  # fmt: skip


def add_arguments(parser: flags.TeachingParser) -> None:
    parser.first, parser.first_epilog = FIRST, BEGIN + THEN
    parser.description, parser.epilog, parser.usage = DESCRIPTION, EXAMPLES, "%(prog)s [MODEL] [--mesh RxT] [flags]"
    flags.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Serve until told to stop, and return the exit status. Raises InvalidValue for invalid settings."""
    status = serve(flags.config_of(args))
    _leave(status)
    return status


def _leave(status: int) -> None:
    """Exit without Python's teardown: freeing everything that jax and the model hold takes seconds."""
    from jaxserve.server.signals import end_process

    atexit._run_exitfuncs()
    end_process(status)


def serve(config: ServeConfig) -> int:
    """Load, warm up, and serve until SIGTERM or SIGINT."""
    ahead = None
    if config.ray is None and config.api_server_count:
        from jaxserve.fleet.processes import EngineProcess

        ahead = EngineProcess()  # imports jax while this process imports the server and checks the settings
    try:
        return _run(config, ahead)
    finally:
        if ahead is not None:
            ahead.close()


def _run(config: ServeConfig, ahead: EngineProcess | None) -> int:
    from jaxserve.models.source import check_names

    check_names(config)
    from jaxserve.server.main import run  # late: --help must not wait for it

    if config.ray is not None:
        from jaxserve.ray.engines import RayEngines

        return run(config, RayEngines)
    from jaxserve.fleet.processes import EngineProcesses

    return run(config, partial(EngineProcesses, ahead=ahead))
