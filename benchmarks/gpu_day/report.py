"""Tables and plots of the day, from the state: whatever a part recorded under a table's name becomes that table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxserve.report.table import markdown

from .part import ITEMS, Part
from .state import Attempt, State, best

Rows = dict[str, list[dict[str, Any]]]
CALL = ("date", "commit", "note", "nvidia_smi", "cuda_runtime", "ptxas", "jax", "jaxlib", "python")


def tables(state: State, parts: Sequence[Part], out: Path) -> Path:
    """Write `report.md`: machine, what did not run and why, and every table."""
    attempts = state.attempts().values()
    rows = rows_of(best(runs) for runs in attempts)
    rows[ITEMS] = rows_of(run for runs in attempts for run in runs).get(ITEMS, [])
    blocks = [f"# The day of the GPU: {state.facts().get('device', 'no device yet')}", *_calls(state)]
    blocks += [*_outcomes(parts, state), *_items(rows.pop(ITEMS, []))]
    if facts := state.facts():
        blocks += ["## Facts", markdown(["fact", "value"], [list(one) for one in facts.items()])]
    for name, found in rows.items():
        columns = list(dict.fromkeys(key for row in found for key in row))
        blocks += [f"## {name}", markdown(columns, [[row.get(key) for key in columns] for row in found])]
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.md"
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return path


def write(state: State, parts: Sequence[Part], out: Path) -> None:
    """Write tables, plots and the files of the parts."""
    from . import plots

    made = [tables(state, parts, out)]
    rows = rows_of([best(runs) for runs in state.attempts().values()])
    made += plots.draw(rows, out)
    for path in sorted(state.files.glob("*.json")):
        made.append(out / path.name)
        made[-1].write_bytes(path.read_bytes())
    print("wrote " + ", ".join(str(path) for path in made))


def rows_of(attempts: Any) -> Rows:
    """Return the rows of each table, in the order of the parts."""
    found: Rows = {}
    for run in attempts:
        for table, figures in run.rows:
            found.setdefault(table, []).append(figures)
    return found


def _calls(state: State) -> Iterator[str]:
    calls = state.calls()
    if any(call["dry"] for call in calls):
        yield "**A dry run on a CPU with tiny shapes: none of these figures means anything.**"
    columns = [key for key in CALL if any(call.get(key) for call in calls)]
    yield markdown(columns, [[call.get(key) for key in columns] for call in calls])
    lacks = dict.fromkeys(f"{what}: excludes {excludes}" for call in calls for what, excludes in call["missing"])
    if lacks:
        yield "Missing in at least one call:\n\n" + "\n".join(f"* {line}" for line in lacks)


def _outcomes(parts: Sequence[Part], state: State) -> Iterator[str]:
    """Yield how many parts are done, and the reason of each that is not."""
    attempts = state.attempts()
    rows: list[list[Any]] = []
    for part in parts:
        runs = attempts.get(part.name)
        if runs is None:
            rows.append([part.name, "not started", ""])
        elif (run := best(runs)).outcome != "done":
            rows.append([part.name, run.outcome, reasons(runs)])
    yield f"{len(parts) - len(rows)} of {len(parts)} parts are done."
    if rows:
        yield markdown(["part", "outcome", "reason"], rows)


def _items(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield how many items ended in which way, and each that is not done, with its reason."""
    newest = {row["item"]: row for row in rows}
    if not newest:
        return
    outcomes = [row["outcome"] for row in newest.values()]
    counted = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
    yield f"## Items\n\n{len(newest)} begun: {counted}."
    bad = [
        [row["item"], row["outcome"], row.get("seconds"), str(row.get("reason", "")).replace("|", "/")]
        for row in newest.values()
        if row["outcome"] != "done"
    ]
    if bad:
        yield markdown(["item", "outcome", "seconds", "reason"], bad)


def reasons(runs: Sequence[Attempt]) -> str:
    """Return the different reasons of a part's runs, without what would break a table."""
    return "; ".join(dict.fromkeys(run.reason for run in runs if run.reason)).replace("|", "/")
