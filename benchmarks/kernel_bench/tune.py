"""Time candidate configs of important specs, and write the best in the format of pallas_kernels/tuned/."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels import tuned

from . import ours, times
from .cases import Case, decode_cases, prefill_cases
from .ours import Kernel
from .session import Session

SWEPT = ("decode B64 ctx4096", "decode B64 ctx4096 T4", "prefill 8192", "decode B64 ctx4096 page16")


def _candidates(case: Case, op: str, dry: bool) -> Iterator[Any]:
    if op == "decode":
        from pallas_kernels.ops.paged_attention.hopper import decode as module
    else:
        from pallas_kernels.ops.paged_attention.hopper import prefill as module  # type: ignore[no-redef]
    yield from module.candidates(ours.spec_of(case, dry=dry))


def sweep(session: Session) -> None:
    """Tune each spec for an equal share of the remaining time. The first candidate is the heuristic's."""
    todo: list[tuple[str, Case]] = [("decode", case) for case in decode_cases(session.dry)]
    todo += [("prefill", case) for case in prefill_cases(session.dry)]
    todo = [(op, case) for op, case in todo if session.dry or case.name in SWEPT]
    entries = []
    for index, (op, case) in enumerate(todo):
        share = (session.deadline - time.perf_counter()) / (len(todo) - index)
        entry = session.part(
            f"sweep of {case.name}", lambda op=op, case=case, share=share: one(session, op, case, share)
        )
        if entry is not None:
            entries.append(entry)
    device = jax.devices()[0].device_kind
    measured = {"date": time.strftime("%Y-%m-%d"), "jax": jax.__version__, "ptxas": session.facts.get("ptxas", "")}
    whole = {"device": device, "measured": None if session.dry else measured, "entries": entries}
    path = session.folder / f"{'dry' if session.dry else tuned.name_of(device)}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    session.facts["tuned"] = path.name


def one(session: Session, op: str, case: Case, seconds: float) -> dict[str, Any] | None:
    """Return the fastest candidate of one spec as an entry of the file, or None if all failed."""
    make: Callable[..., Kernel] = ours.decode if op == "decode" else ours.prefill
    best: tuple[float, Any] | None = None
    first, tried, until = None, 0, time.perf_counter() + seconds
    for index, config in enumerate(_candidates(case, op, session.dry)):
        if (session.dry and index >= 1) or time.perf_counter() > until:
            break
        label = f"{case.name} {config}"
        found = session.part(
            label, lambda config=config: times.attend(session, case, make(case, config, op, dry=session.dry), samples=7)
        )
        if found is None:
            continue
        tried += 1
        first = first or min(found)
        if best is None or min(found) < best[0]:
            best = min(found), config
    if best is None or first is None:
        return None  # `part` has recorded every failure
    session.facts.setdefault("sweep", {})[case.name] = {
        "tried": tried,
        "heuristic_us": first * 1e6,
        "best_us": best[0] * 1e6,
        "best": str(best[1]),
    }
    key = tuned.key_of(ours.spec_of(case))
    return {"op": op, **key, "config": dataclasses.asdict(best[1]), "us": best[0] * 1e6}
