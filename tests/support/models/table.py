"""Print the tables of docs/guide/models.md: `python -m tests.support.models.table families` or `keys`, and families."""

from __future__ import annotations

import ast
import logging
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
import torch

from jaxserve.models import dense
from jaxserve.models.published import published
from jaxserve.models.registry import FAMILIES
from pallas_kernels.gate import bounds
from pallas_kernels.gate.targets import TARGETS
from tests.support.models.config_keys import SMALL_ONES, trials, verdict
from tests.support.models.configs import CASES, FULL, TOKENS
from tests.support.models.driver import expected, peer
from tests.support.models.parity import in_steps

MESHES = (1, 2, 4)
JAX = "0.11"  # the newest minor version that the gate has bounds for
DEVICE = "h200"
STEP = re.compile(r"(?P<what>(?P<model>\S+) tp\d+( \d+ layers)?) decode")


def differences(family: str) -> Iterator[float]:
    """Yield the largest difference of a logit from transformers, for each small config and mesh."""
    for kind, changes in (CASES | FULL).values():
        if kind == family:
            with tempfile.TemporaryDirectory() as folder:
                model = peer(family, **changes)
                model.save_pretrained(folder)  # type: ignore[operator]
                want = expected(model, TOKENS)
                for tp in MESHES:
                    got, again = in_steps(Path(folder), tp)
                    yield float(max(np.abs(got - want).max(), np.abs(again - want[:16]).max()))


def lines(architecture: str) -> str:
    """Return the lines of a family's row in the table of dense families, or of its file."""
    file = Path(str(import_module(FAMILIES[architecture]).__file__))
    source = file.read_text()
    if architecture not in dense.FAMILIES:
        return f"{len(source.splitlines())}, `{file.name}`"
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict))
    rows = (row for table in calls for row in zip(table.keys, table.values, strict=True))
    row = next(row for key, row in rows if isinstance(key, ast.Constant) and key.value == architecture)
    return f"{(row.end_lineno or row.lineno) - row.lineno + 1}, a row"


@cache
def gated() -> dict[str, str]:
    """Return for each architecture the decode step of the compile gate, and the least time of the bytes it moves."""
    cases, _ = bounds.load(DEVICE, JAX)
    steps: dict[str, str] = {}
    for name, bound in cases.items():
        step = STEP.fullmatch(name)
        if step is not None and step["model"] in published() and bound.moved:
            (architecture,) = published()[step["model"]].config["architectures"]
            least = 1e3 * bound.moved / TARGETS[DEVICE].bandwidth
            steps.setdefault(architecture, f"{step['what']}: {least:.1f} ms, {bound.launches} launches")
    return steps


def table(*rows: Iterable[object]) -> None:
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def families(names: Iterable[str]) -> None:
    table(("model type", "configs", "largest difference", "decode step of the gate", "lines"), ["---"] * 5)
    for name in names:
        architecture = f"{name}ForCausalLM"
        found = list(differences(name))
        step = gated().get(architecture, "")
        table((name, len(found) // len(MESHES), f"{max(found):.1e}", step, lines(architecture)))


def keys(names: Iterable[str]) -> None:
    head = ("model type", "keys", "values", "implemented", "refused by name", "no effect found", "silent")
    table(head, ["---"] * len(head))
    kinds: dict[str, Counter[str]] = defaultdict(Counter)  # by key
    for name in names:
        found: dict[str, list[str]] = defaultdict(list)
        for key, value in trials(name):
            found[key].append(verdict(name, key, value)[0])
        for key, verdicts in found.items():
            kinds[key][_kind(verdicts)] += 1
        count = Counter(map(_kind, found.values()))
        values = sum(map(len, found.values()))
        table((name, len(found), values, *(count[kind] for kind in ("compared", "refused", "ignored", "silent"))))
    idle = {key: f"`{key}`" for key in sorted(kinds) if kinds[key]["ignored"]}
    print(f"\nWithout effect: {', '.join(text for key, text in idle.items() if len(kinds[key]) == 1)}.")
    print(f"\nWithout effect in some families: {', '.join(text for key, text in idle.items() if len(kinds[key]) > 1)}.")


def _kind(verdicts: list[str]) -> str:
    """Return what becomes of a key, whose values have verdicts."""
    if set(verdicts) - {"compared", "refused", "ignored"}:
        return "silent"
    return next(kind for kind in ("compared", "refused", "ignored") if kind in verdicts)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", MESHES[-1])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    {"families": families, "keys": keys}[sys.argv[1]](sys.argv[2:] or SMALL_ONES)
