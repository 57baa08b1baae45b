"""jaxserve plan: find the fewest devices that serve a load, or whether a model fits given devices.

Needs no weights and no devices: sizes come from a config.json, device specifications from their makers. With --qps
set-ups are simulated under the load; without it, every mesh is listed with an upper bound on its throughput.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxserve.cli.flags import add_flags, add_setting, settings_of
from jaxserve.cli.plan import flags
from jaxserve.config import ServeConfig, parse_mesh
from jaxserve.errors import InvalidValue
from jaxserve.report.progress import bar

if TYPE_CHECKING:
    from jaxserve.capacity.fit import Setting
    from jaxserve.capacity.show import Plan
    from jaxserve.models.spec import ModelSpec

EXAMPLES = """
examples:
  # Which set-up of up to eight H100s serves 20 requests/s of a trace within a TTFT of 1 s and a TPOT of 40 ms
  jaxserve plan --model llama3-70b --devices h100:8 --qps 20 --workload trace:conv.csv --ttft-slo 1s --tpot-slo 40ms

  # Conversations of a named workload with objectives of its own, and what a million tokens cost at 2.50 an hour
  jaxserve plan --model qwen3-14b --devices h100:8 --qps 4 --workload interactive-chat --price 2.5

  # Every mesh of eight H200s, and the recommended one
  jaxserve plan --model llama3-70b --devices h200:8

  # One mesh, a folder with a config.json, 30 ms per token at a context of 8K
  jaxserve plan --model ./my-model --devices a100-80:4 --mesh 2x2 --tpot-ms 30 --context 8192

  # With the step programs compiled for the device (needs the `gate` extra; takes minutes)
  jaxserve plan --model llama3-8b --devices h200:1 --compile

docs/guide/plan.md describes what is counted and what is not.
"""
# Engine settings that decide what fits, with the same meaning as in `jaxserve serve`.
SETTINGS = (
    "mesh", "dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "kv_cache_dtype", "gpu_memory_utilization", "kv_cache_memory",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__.split(": ", 1)[1] if __doc__ else None
    parser.epilog = EXAMPLES
    asked = parser.add_argument_group("model and devices")
    asked.add_argument(
        "--model", metavar="NAME|PATH",
        help="folder with a config.json, a published model by its short name, or a Hugging Face name [the demo model]",
    )  # fmt: skip
    asked.add_argument("--devices", required=True, metavar="KIND[:N]", help="N devices of one kind, as in h200:8")
    add_flags(
        asked,
        ("--tpot-ms", _positive(float), 50.0, "MS", "time per output token [50]"),
        ("--context", _positive(int), None, "N", "context of a running decode [2048]"),
        ("--prompt", _positive(int), None, "N", "tokens of a prompt [8192]"),
        ("--compile", bool, None, None, "measure activations on compiled programs of the mesh instead of estimating "
         "them"),
        ("--json", bool, None, None, "print JSON instead of tables"),
    )  # fmt: skip
    engine = parser.add_argument_group("engine settings", "as for jaxserve serve")
    for name in SETTINGS:
        add_setting(engine, name)
    flags.add_arguments(parser)


def _positive(kind: type) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{text!r} must be {'a whole number' if kind is int else 'a number'} above 0"
            )
        return value

    return parse


def main(args: argparse.Namespace) -> int:
    """Print the plan; return 0 if the model fits, 1 if it does not. Raises InvalidValue."""
    from jaxserve.capacity.devices import devices, parse_devices

    flags.check_arguments(args)
    name, count = parse_devices(args.devices)
    given = {key: value for key, value in settings_of(args).items() if key in SETTINGS}
    config = ServeConfig(**given | {"model": args.model})
    args.model = config.model_source
    if args.qps is not None:
        from jaxserve.cli.plan import load
        from jaxserve.models.published import repository_of

        spec, _, setting = _setting(args, config, name, count)
        hub = repository_of(args.model)
        only = None if config.mesh is None else parse_mesh(config.mesh)
        return load.run(args, config, spec, (args.model, hub, hub.rpartition("/")[2]), setting, only)
    asked = _asked(config.mesh, count, args.devices)
    if args.compile:
        if config.mesh is None and count > 1:
            raise InvalidValue(f"--compile needs one mesh: add --mesh, one of {_names(count)}", "mesh")
        _prepare(devices()[name].target, name)
    plan = make_plan(args, config, name, count, asked)
    from jaxserve.capacity import show

    if args.json:
        json.dump(show.as_json(plan), sys.stdout, indent=1)
        print()
    else:
        show.tables(plan)
    return 0 if plan.taken is not None else 1


def make_plan(
    args: argparse.Namespace, config: ServeConfig, name: str, count: int, asked: list[tuple[int, int]]
) -> Plan:
    """Compute the fit of every requested mesh, and choose one."""
    from jaxserve.capacity import fit, show

    spec, source, setting = _setting(args, config, name, count)
    measured = None
    if args.compile:
        from jaxserve.capacity.compiled import compiled

        with bar("compile") as progress:
            measured = compiled(spec, setting, asked[0][1], progress)
    fits = [fit.fit(spec, setting, instances, tp, measured) for instances, tp in asked]
    chosen = fit.choose(fits)
    if chosen is None:
        return show.Plan(args.model, source, spec, setting, fits, None, fit.remedy(spec, setting, fits))
    return show.Plan(args.model, source, spec, setting, fits, *chosen)


def _setting(args: argparse.Namespace, config: ServeConfig, name: str, count: int) -> tuple[ModelSpec, str, Setting]:
    """Return the model, the source of its config, and the devices with the engine's limits."""
    from jaxserve.capacity import fit
    from jaxserve.capacity.devices import devices
    from jaxserve.engine.memory import kv
    from jaxserve.models.published import find_config
    from jaxserve.models.registry import spec_from_config

    device = devices()[name]
    model_config, source = find_config(args.model)
    spec = spec_from_config(model_config).quantized_as(config.quantization)
    spec = replace(spec, kv_scales=kv.scaled(config.kv_cache_dtype))
    length = config.max_model_len or spec.max_positions
    if length > spec.max_positions:
        raise InvalidValue(
            f"max_model_len={length} is above the model's {spec.max_positions} positions", "max_model_len"
        )
    dtype = device.dtype if config.dtype == "auto" else config.dtype
    setting = fit.Setting(
        device=device,
        name=name,
        count=count,
        max_model_len=length,
        max_num_seqs=config.rows(device.platform),
        max_num_batched_tokens=config.step_tokens(device.platform),
        page_size=config.block_size or kv.default_page_size(device.platform),
        utilization=config.gpu_memory_utilization,
        kv_cache_memory=config.kv_cache_memory,
        dtype=dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        context=_within(length, args.context, 2048, "context"),
        prompt=_within(length, args.prompt, 8192, "prompt"),
        tpot=args.tpot_ms / 1000,
    )
    return spec, source, setting


def _within(length: int, given: int | None, usual: int, name: str) -> int:
    """Return the given number of tokens, or the usual one if it does not exceed `length`."""
    if given is not None and given > length:
        raise InvalidValue(f"{name}={given} is above max_model_len={length}, the longest request", name)
    return given or min(usual, length)


def _asked(mesh: str | None, count: int, devices: str) -> list[tuple[int, int]]:
    from jaxserve.capacity.devices import meshes

    if mesh is None:
        return list(meshes(count))
    instances, tp = parse_mesh(mesh)
    if instances * tp > count:
        raise InvalidValue(
            f"mesh={mesh!r} needs {instances * tp} devices, but {devices!r} has {count}; allowed: {_names(count)}",
            "mesh",
        )
    return [(instances, tp)]


def _names(count: int) -> str:
    from jaxserve.capacity.devices import meshes

    return ", ".join(f"{instances}x{tp}" for instances, tp in meshes(count))


def _prepare(target: str | None, name: str) -> None:
    """Set the environment for compilation, before jax is imported."""
    from jaxserve.capacity.devices import devices
    from pallas_kernels.gate.targets import TARGETS, prepare

    if target is None:
        able = ", ".join(other for other, device in devices().items() if device.target)
        raise InvalidValue(f"--compile cannot compile for {name!r}; allowed: {able}", "devices")
    missing = TARGETS[target].missing()
    if missing is not None:
        raise InvalidValue(f"--compile cannot run: {missing}", "compile")
    prepare(TARGETS[target])
