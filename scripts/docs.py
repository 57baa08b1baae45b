"""Generate the reference pages of flags, metrics, and names of policies, routers and admissions from the code.

python scripts/docs.py            write docs/reference/{flags,metrics,names}.md
python scripts/docs.py --check    name the pages that are out of date, and exit with 1
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.metrics_core import Metric

from jaxserve.cli.flags import TeachingParser
from jaxserve.cli.main import COMMANDS
from jaxserve.engine.runtime.classes import ERRORS, PHASES, SLACK, ClassStats, Spread
from jaxserve.engine.runtime.headroom import Headroom
from jaxserve.engine.runtime.info import EngineInfo, InstanceInfo, InstanceStats, Promise, Stats, TierTotals
from jaxserve.sched import admission, policies, routing
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.sched.cluster.ttft_predictions import Accuracy
from jaxserve.sched.instance.stats import Counters
from jaxserve.sched.perf import KINDS
from jaxserve.sched.registry import factory
from jaxserve.server.client_metrics import StageCollector
from jaxserve.server.fairness import Client
from jaxserve.server.limits import ClientLimits
from jaxserve.server.metrics import PREFIX, Metrics

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Written by scripts/docs.py from the code: edit that, not this page. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with bars inside cells escaped."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines] + [""]


def flags_page() -> str:
    """Return the page of every command's flags, from its argument parser."""
    lines = ["# Flags", "", NOTE, ""]
    lines += [
        "Every flag of `jaxserve serve` is also a key of a `--config` file and an argument of `LLM(...)`:",
        "`--max-model-len` becomes `max_model_len`. Brackets hold defaults.",
        "",
    ]
    for command, (module, summary) in COMMANDS.items():
        parser = TeachingParser(prog=f"jaxserve {command}", add_help=False)
        importlib.import_module(module).add_arguments(parser)
        lines += [f"## jaxserve {command}", "", f"{summary[0].upper()}{summary[1:]}.", ""]
        groups: dict[str, list[tuple[str, str]]] = {}
        for group in parser._action_groups:
            title = "" if group.title in (None, "options", "positional arguments") else f"{group.title}"
            groups.setdefault(title, []).extend(flag_row(parser, one) for one in group._group_actions)
        for title, rows in groups.items():
            if rows:
                lines += [f"**{title[0].upper()}{title[1:]}**", ""] if title else []
                lines += table(("flag", "what it does"), rows)
    return "\n".join(lines)


def flag_row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    """Return the cells of one flag, with Markdown characters in its help text escaped."""
    value = action.metavar or ""
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    elif not value and action.nargs != 0 and action.option_strings:
        value = action.dest.upper()
    names = action.option_strings or [str(action.metavar or action.dest)]
    shown = f"{', '.join(names)} {value if action.option_strings and action.nargs != 0 else ''}".strip()
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    text = " ".join(text.split())
    parts = text.split("`")
    parts[::2] = [part.replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_") for part in parts[::2]]
    # A bar inside backticks ends the cell on GitHub, and shows its backslash on the site.
    code = f"<code>{shown.replace('|', '&#124;')}</code>" if "|" in shown else f"`{shown}`"
    return code, "`".join(parts)


def sample_stats() -> Stats:
    """Return statistics in which every metric family has at least one sample."""
    once = dict.fromkeys(PHASES, 1)
    slack = {phase: Spread((1,) * (len(SLACK) + 1), 1.0) for phase in PHASES[:3]}
    classes = {"default": ClassStats(once, once, slack, Spread((1,) * (len(ERRORS) + 1), 1.0))}
    return Stats(
        instances=(InstanceStats("0", "mixed", 0, 0, 1, 0, 0, headroom=Headroom({"default": 0.0})),),
        counters=Counters(accepted_at=[1]),
        transferring=0,
        transfers=0,
        transfer_seconds=0.0,
        classes=classes,
        ttft_predictions={"prefill": Accuracy(1, 1.0, 1.0, 0.0, 0.0)},
        kv_tiers={"host": TierTotals()},
    )


def families() -> list[Metric]:
    """Return every metric family of `/metrics`, except those of the Python process."""
    info = EngineInfo(
        model="model",
        max_model_len=1024,
        vocab_size=2,
        dtype="float32",
        instances=(InstanceInfo("0", "mixed", ("cpu",), 1, 16),),
        policy="unified",
        routing="unified",
        eos=frozenset(),
        thinking=ThinkingMarkers(),
        startup_seconds=0.0,
        promise=Promise(SLO(1.0, 0.1)),
    )
    metrics = Metrics(SimpleNamespace(info=info, stats=sample_stats, ailment=None), "model")
    stage: Any = SimpleNamespace(clients={"key-1": Client(ClientLimits(), 0.0)})
    metrics.registry.register(StageCollector(stage, "model"))
    return [family for family in metrics.registry.collect() if family.name.startswith(PREFIX)]


def metrics_page() -> str:
    """Return the page of every metric family, from the collectors of the server."""
    lines = ["# Metrics", "", NOTE, ""]
    lines += [
        "`GET /metrics` returns Prometheus' text format, with vLLM's names after the prefix `jaxserve:`.",
        "Every series has the label `model_name`; the table lists other labels. A counter ends in `_total`,",
        "a histogram has `_bucket`, `_sum` and `_count`, a summary `_sum` and `_count`. For attainment and",
        "queries for dashboards, see [objectives](../guide/objectives.md#metrics).",
        "",
    ]
    rows = []
    for family in sorted(families(), key=lambda one: one.name):
        labels = {name for sample in family.samples for name in sample.labels} - {"model_name", "le", "quantile"}
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append(
            (f"`{name}`", family.type, ", ".join(f"`{label}`" for label in sorted(labels)), family.documentation)
        )
    return "\n".join(lines + table(("name", "type", "labels", "what it is"), rows))


def options_of(make: Callable[..., Any], given: Sequence[str] = ()) -> str:
    """Return the options of a factory as typed after the colon, with their defaults."""
    shown = []
    for one in inspect.signature(make).parameters.values():
        if one.name in given:
            continue
        name = one.name.replace("_", "-") if one.default is True else one.name
        text = {True: f"no-{name}", False: name}.get(one.default, f"{name}={one.default}")
        shown.append(f"`{name}`" if one.default is None else f"`{text}`")
    return ", ".join(shown)


def names_page() -> str:
    """Return the page of policies, routers, admissions and step-time models, from the registries."""

    def rows(entries: Mapping[str, str], package: str, given: Sequence[str] = ()) -> list[tuple[str, str]]:
        return [(f"`{name}`", options_of(factory(entries, name, package), given)) for name in sorted(entries)]

    own = policies.__name__
    lines = ["# Names and options", "", NOTE, ""]
    lines += [
        "Options follow a colon and are joined by `+`: `kairos:literal`, `sarathi:tokens=512`. An option",
        "without a value is a switch. [Policies](policies.md) describes them.",
        "",
    ]
    lines += ["## Policies (`--policy`)", "", "Whole policies:", ""]
    lines += table(("name", "options"), rows(policies.WHOLE, own))
    lines += ["Policies of a prefill half and a decode half, with the options of both:", ""]
    pairs = [(f"`{name}`", f"`{first}`", f"`{second}`") for name, (first, second) in sorted(policies.HALVES.items())]
    lines += table(("name", "prefill half", "decode half"), pairs)
    lines += ["Halves, combined as `prefill=X,decode=Y`:", ""]
    lines += table(("prefill half", "options"), rows(policies.PREFILL, own))
    lines += table(("decode half", "options"), rows(policies.DECODE, own))
    lines += ["`NAME/draft` adds speculation to any policy:", ""]
    lines += table(("name", "options"), rows(policies.DRAFTING, own, ("policy",)))
    lines += ["## Routing (`--routing`)", ""]
    lines += table(("name", "options"), rows(routing.ROUTERS, routing.__name__, ("admission",)))
    lines += ["## Admission (`--admission`)", ""]
    lines += table(("name", "options"), rows(admission.ADMISSIONS, admission.__name__))
    lines += ["## Step-time models (`--perf`)", ""]
    lines += [", ".join(f"`{kind}`" for kind in KINDS) + ": see [step times](step-times.md).", ""]
    return "\n".join(lines)


PAGES = {"flags.md": flags_page, "metrics.md": metrics_page, "names.md": names_page}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or with --check compare them with the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(argv).check
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run python scripts/docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
