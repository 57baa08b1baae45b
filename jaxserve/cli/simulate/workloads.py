"""Workloads by name or file: the papers' workloads, presets of configs/workload, and YAML files."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

from jaxserve.config import preset
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim import NAMED, Arrival, Mix, Workload
from jaxserve.sched.sim.draws import Lengths
from jaxserve.sched.sim.workload import Slowdown
from jaxserve.yamlio import load_yaml, nearest, text_of


def find_workload(name: str) -> Workload | Mix:
    """Return the workload named in scenarios.NAMED, a preset, or FILE.yaml.

    A YAML file with `parts` at its top level is a mixture. Raises InvalidValue, with file and line if
    known.
    """
    if name in NAMED:
        return NAMED[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        try:
            path = preset("workload", name)
        except InvalidValue as error:
            hint = nearest(name, NAMED).removeprefix("allowed: ")
            raise InvalidValue(f"{error}; built in: {hint}; or FILE.yaml, or trace:FILE", "workload") from error
    try:
        mixture = re.search(r"(?m)^parts\s*:", text_of(path))
    except FileNotFoundError as error:
        raise InvalidValue(f"workload {path} does not exist", "workload") from error
    return load_yaml(path, Mix) if mixture else load_yaml(path, Workload)


def describe(source: Workload | Mix | list[Arrival]) -> str:
    """Explain a workload in a line or a few: lengths, arrivals and objectives."""
    if isinstance(source, list):
        tokens = [
            sum(getattr(request, name) for request in source) / len(source)
            for name in ("prompt_tokens", "output_tokens")
        ]
        return f"trace: {len(source)} requests of {tokens[0]:.0f} prompt and {tokens[1]:.0f} output tokens on average"
    if isinstance(source, Mix):
        total = sum(part.share for part in source.parts)
        parts = [f"  {part.share / total:.0%} {_kind(part.workload)}" for part in source.parts]
        return "\n".join([f"{source.name}: a mix of", *parts])
    return _kind(source)


def _kind(workload: Workload) -> str:
    prompts = f"prompts of {_lengths(workload.prompt)}"
    if workload.tail is not None:
        prompts += f" ({workload.tail.share:.1%} of {_lengths(workload.tail.lengths)})"
    parts = [prompts, f"outputs of {_lengths(workload.output)}"]
    if workload.thinking is not None:
        parts.append(f"thinking of {_lengths(workload.thinking)}")
    if workload.rounds is not None:
        opening = (
            "" if workload.rounds.opening is None else f", {_lengths(workload.rounds.opening)} before the first prompt"
        )
        parts.append(f"{workload.rounds.mean:g} ± {workload.rounds.std:g} rounds a session{opening}")
    parts.append(f"{workload.arrivals.kind} arrivals")
    ttft = f"{workload.ttft.times:g} × alone" if isinstance(workload.ttft, Slowdown) else _time(workload.ttft)
    return f"{workload.name}: {', '.join(parts)}; TTFT {ttft}, TPOT {_time(workload.tpot)}"


def _lengths(lengths: Lengths) -> str:
    if lengths.kind == "fixed":
        return f"{lengths.value} tokens"
    if lengths.mean is None and lengths.median is None:
        return f"{lengths.low:,.0f} to {lengths.high:,.0f} tokens"
    middle = f"mean {lengths.mean:,.0f}" if lengths.mean is not None else f"median {lengths.median:,.0f}"
    return f"{middle} tokens ({lengths.kind})"


def _time(seconds: float) -> str:
    if seconds == inf:
        return "none"
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"


def common_slo(source: Workload | Mix | list[Arrival]) -> SLO:
    """Return the objectives that all requests have; infinite (TBT: None) where they differ or have none."""
    if isinstance(source, list):
        slos = {request.slo for request in source}
        ttfts: set[float | Slowdown] = {slo.ttft for slo in slos}
        tpots, tbts = {slo.tpot for slo in slos}, {slo.tbt for slo in slos}
    else:
        kinds = [source] if isinstance(source, Workload) else [part.workload for part in source.parts]
        ttfts = {kind.ttft for kind in kinds}
        tpots, tbts = {kind.tpot for kind in kinds}, {kind.tbt for kind in kinds}
        if isinstance(source, Mix):
            ttfts = ttfts if source.ttft is None else {source.ttft}
            tpots = tpots if source.tpot is None else {source.tpot}
    ttft = ttfts.pop() if len(ttfts) == 1 else inf
    return SLO(
        inf if isinstance(ttft, Slowdown) else ttft,
        tpots.pop() if len(tpots) == 1 else inf,
        tbts.pop() if len(tbts) == 1 else None,
    )
