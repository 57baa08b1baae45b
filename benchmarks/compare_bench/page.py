"""Write the tables of a comparison as Markdown between the markers of a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.report.table import markdown


def write(page: Path, models: Sequence[Mapping[str, Any]], sides: Sequence[str]) -> None:
    """Replace the text between `<!-- table: KIND MODEL -->` and `<!-- end -->` for each measured table.

    KIND is `offline` or `online`. Raises SystemExit if the page lacks these lines.
    """
    text = page.read_text(encoding="utf-8")
    for found in models:
        kind, made = ("online", online(found)) if "online" in found else ("offline", offline(found, sides))
        mark = re.compile(rf"(<!-- table: {kind} {re.escape(found['model'])} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not mark.search(text):
            raise SystemExit(f"{page} has no lines '<!-- table: {kind} {found['model']} -->' and '<!-- end -->'")
        text = mark.sub(lambda old, made=made: f"{old[1]}{made}\n{old[2]}", text)
    page.write_text(text, encoding="utf-8")


def offline(found: Mapping[str, Any], sides: Sequence[str]) -> str:
    """Return a table with a row per figure. A ratio above 1 means that the first side is faster or uses less."""

    def line(what: str, values: Sequence[float], less: bool) -> list[str]:
        ratios = [value / values[0] if less else values[0] / value for value in values[1:]]
        return [what, *(f"{value:,.4g}" for value in values), *(f"{ratio:.2f}" for ratio in ratios)]

    def rows(part: str, key: str, value: str, says: str, less: bool) -> list[list[str]]:
        kinds = dict.fromkeys(row[key] for row in found[part])
        by = {(row["side"], row[key]): row[value] for row in found[part]}
        return [line(says.format(kind), [by[side, kind] for side in sides], less) for kind in kinds]

    made = rows("decode", "requests", "tokens_per_s", "tokens/s, {} concurrent", False)
    made += rows("decode", "requests", "step_ms", "decode step, batch {}, ms", True)
    made += rows("prefill", "prompt", "prompt_s", "prefill, {} tokens, s", True)
    made.append(line("start, s", [found["start_s"][side] for side in sides], True))
    made.append(line("memory, GB", [found["memory"][side] / 1e9 for side in sides], True))
    return markdown(["", *sides, *(f"{sides[0]} / {side}" for side in sides[1:])], made)


def online(found: Mapping[str, Any]) -> str:
    """Return a table with a row for each rate, class and side, and one of the servers."""
    names = ["ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"]
    rows = sorted(found["online"], key=lambda row: (row["rate"], row["class"]))
    cells = [
        [
            f"{row['rate']:g}",
            row["class"],
            row["side"],
            *(_whole(row[name]) for name in names),
            f"{row['attained']:.2f}",
        ]
        for row in rows
    ]
    heads = ["requests/s", "class", "side", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99", "attained"]
    servers = [
        [name, ", ".join(f"{seconds:.0f}" for seconds in one["start_s"]), f"{one['memory'] / 1e9:.2f}"]
        for name, one in found["servers"].items()
    ]
    return f"{markdown(heads, cells)}\n\n{markdown(['side', 'starts, s', 'peak memory, GB'], servers)}"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
