"""Tables of stored cases: attainment, served and simulated, and errors of predictions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.report.table import markdown

Case = Mapping[str, Any]
CLOSE = 0.02  # attained shares that differ by at most this count as equal
KINDS = ("decode", "prefill", "mixed")


class Table(NamedTuple):
    """A table of the page. name: of its marker. verdict: a line below it."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: str = ""


def tables(
    cases: Sequence[Case], scales: Mapping[str, Any], models: Sequence[str], mixes: Sequence[str],
    policies: Sequence[str],
) -> Iterator[Table]:  # fmt: skip
    """Yield the tables of all models and mixes that have cases."""
    for model in models:
        for mix in mixes:
            some = [[one for one in cases if (one["model"], one["mix"], one["policy"]) == (model, mix, policy)]
                    for policy in policies]  # fmt: skip
            if some := [ones for ones in some if ones]:
                yield _scaled(model, mix, scales[model]["mixes"][mix])
                yield _attained(model, mix, some)
        if mine := [one for one in cases if one["model"] == model]:
            yield _predicted(model, mine, policies)


def write(page: Path, made: Sequence[Table]) -> None:
    """Write tables and verdicts between `<!-- table: NAME -->` and `<!-- end -->`.

    Raises SystemExit if the page lacks these lines.
    """
    text = page.read_text(encoding="utf-8")
    for one in made:
        mark = re.compile(rf"(<!-- table: {re.escape(one.name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not mark.search(text):
            raise SystemExit(f"{page} has no lines '<!-- table: {one.name} -->' and '<!-- end -->'")
        body = markdown(one.columns, one.rows) + "\n" + (f"\n{one.verdict}\n" if one.verdict else "")
        text = mark.sub(lambda found, body=body: found[1] + body + found[2], text)
    page.write_text(text, encoding="utf-8")


def _scaled(model: str, mix: str, scale: Mapping[str, Any]) -> Table:
    rows = [
        [one["name"], str(one["prompt"]), str(one["output"]), f"{one['ttft']:.2f}", f"{1e3 * one['tpot']:.0f}"]
        for one in scale["shapes"]
    ]
    says = f"{scale['rate']:.2f} requests/s; capacity by profile: {scale['capacity']:.2f}."
    columns = ["task", "prompt, tokens", "output", "TTFT, s", "TPOT, ms"]
    return Table(f"{model} {mix} load", f"{model}, {mix}: load and objectives, means", columns, rows, says)


def _mean(cases: Sequence[Case], *path: str) -> float:
    """Return the mean of a figure over rounds."""
    total = 0.0
    for case in cases:
        value: Any = case
        for key in path:
            value = value[key]
        total += value
    return total / len(cases)


def _attained(model: str, mix: str, some: Sequence[Sequence[Case]]) -> Table:
    classes = list(some[0][0]["served"]["classes"])
    rows = []
    for ones in some:
        paths = [(("attained",), ("attained",)), (("ttft",), ("ttft",)), (("tpot",), ("tpot",))]
        paths += [(("classes", one, "attained"), ("classes", one)) for one in classes]  # type: ignore[list-item]
        shares = [
            f"{100 * _mean(ones, 'served', *path):.0f} / {100 * _mean(ones, 'simulated', *way):.0f}"
            for path, way in paths
        ]
        goodputs = " ".join(f"{_mean(ones, 'served', 'classes', one, 'goodput'):.2f}" for one in classes)
        goodput = f"{_mean(ones, 'served', 'goodput'):.2f} / {_mean(ones, 'simulated', 'goodput'):.2f}"
        busy = " ".join(f"{100 * share:.0f}" for share in ones[0]["busy"].values())
        rows.append([ones[0]["policy"], ones[0]["roles"], *shares, goodput, goodputs, busy])
    columns = ["policy", "roles", "all", "TTFT", "TPOT", *classes, "goodput, 1/s", "of classes", "busy, %"]
    return Table(f"{model} {mix}", f"{model}, {mix}: attained, served / simulated, %", columns, rows, _verdict(some))


def _verdict(some: Sequence[Sequence[Case]]) -> str:
    shares = {ones[0]["policy"]: _mean(ones, "served", "attained") for ones in some}
    if (mine := shares.get("unified")) is None:
        return ""
    best = max(shares, key=shares.__getitem__)
    within = "within" if shares[best] - mine <= CLOSE + 1e-9 else "not within"
    return f"`unified` attains {mine:.1%}; the best, `{best}`, {shares[best]:.1%} ({within} {CLOSE:.0%})."


def _predicted(model: str, cases: Sequence[Case], policies: Sequence[str]) -> Table:
    """Return errors by policy: of step times over all mixes, of first tokens at half and at full load."""
    rows = []
    for policy in policies:
        mine = [one for one in cases if one["policy"] == policy]
        found = [one["steps"] for one in mine]
        other = [one["table"] for one in found if "table" in one]
        errors = [_beside(_pooled(found, kind), _pooled(other, kind)) for kind in KINDS]
        half, full = (_first([one for one in mine if one["mix"] == mix]) for mix in ("half", "chat"))
        rows.append([policy, *errors, half, full])
    title = (
        f"{model}: errors of predictions, %: mean of step times once learned, and by the form `table` (steps); median "
        "of first tokens, and of the later half (of)"
    )
    return Table(f"{model} predicted", title, ["policy", *KINDS, "first token, half load", "full load"], rows)


def _pooled(found: Sequence[Mapping[str, Any]], kind: str) -> tuple[float, int]:
    """Return the mean error and the number of steps."""
    some = [one[kind] for one in found if kind in one]
    count = sum(one["steps"] for one in some)
    return (sum(one["mape"] * one["steps"] for one in some) / count if count else 0.0), count


def _beside(mine: tuple[float, int], other: tuple[float, int]) -> str:
    if not mine[1]:
        return "–"
    beside = f" / {100 * other[0]:.1f}" if other[1] else ""
    return f"{100 * mine[0]:.1f}{beside} ({mine[1]})"


def _first(cases: Sequence[Case]) -> str:
    some = [one["first_tokens"] for one in cases if one["first_tokens"]["requests"]]
    if not some:
        return "–"
    error, later = (sum(one.get(name, 0.0) for one in some) / len(some) for name in ("median_error", "later"))
    beside = f" / {100 * later:.1f}" if later else ""
    return f"{100 * error:.1f}{beside} ({sum(one['requests'] for one in some)})"
