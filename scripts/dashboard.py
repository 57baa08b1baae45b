"""Write the Grafana dashboard, deploy/grafana/jaxserve.json, from the list of its panels.

python scripts/dashboard.py                              # the dashboard of this repository
python scripts/dashboard.py --prefix vllm: --out FILE    # for servers with --metrics-prefix vllm:
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "jaxserve.json"
PREFIX = "jaxserve:"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = 'model_name=~"$model"'
EVERY = "$__rate_interval"
PERCENTILES = (0.5, 0.9, 0.99)
WIDE, HIGH = 12, 8  # grid units of a panel; a row of the dashboard is 24 wide
SCHEMA_VERSION = 39  # Grafana 11 and later read it


class Query(NamedTuple):
    """A PromQL expression, with P for the prefix of metrics, and the legend of its series."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A graph."""

    title: str
    text: str
    unit: str
    queries: Sequence[Query]
    most: float | None = None  # end of the axis


def rate(name: str, by: str = "", **labels: str) -> str:
    """Return the sum of rates of a counter."""
    where = ", ".join([WHERE, *(f'{key}="{value}"' for key, value in labels.items())])
    return f"sum{f' by ({by})' if by else ''} (rate(P{name}{{{where}}}[{EVERY}]))"


def level(name: str, function: str = "sum", by: str = "", **labels: str) -> str:
    """Return a gauge, summed up or the like."""
    where = ", ".join([WHERE, *(f'{key}="{value}"' for key, value in labels.items())])
    return f"{function}{f' by ({by})' if by else ''} (P{name}{{{where}}})"


def percentiles(name: str) -> list[Query]:
    """Return the percentiles of a histogram."""
    return [
        Query(f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})", f"p{100 * share:g}")
        for share in PERCENTILES
    ]


def objective(which: str) -> Query:
    """Return the objective of requests that set none."""
    return Query(level("slo_seconds", "min", objective=which), "objective of requests that set none")


def mean(name: str) -> str:
    """Return the mean of a summary or histogram."""
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


ROWS: dict[str, Sequence[Panel]] = {
    "Objectives": (
        Panel(
            "SLO attainment by class", "Share of ended requests that attained every objective that they have.",
            "percentunit",
            [Query(f"{rate('slo_attained_total', 'slo_class', phase='all')} / "
                   f"{rate('slo_requests_total', 'slo_class', phase='all')}", "{{slo_class}}")], 1.0,
        ),
        Panel(
            "SLO attainment by objective", "ttft, tpot (mean) and tbt (largest gap), over all classes.", "percentunit",
            [Query(f"{rate('slo_attained_total', 'phase')} / {rate('slo_requests_total', 'phase')}", "{{phase}}")], 1.0,
        ),
        Panel("Time to first token", "Against the objective of requests that set none.", "s",
              [*percentiles("time_to_first_token_seconds"), objective("ttft")]),
        Panel("Time per output token", "Mean of each request, against the objective of requests that set none.", "s",
              [*percentiles("request_time_per_output_token_seconds"), objective("tpot")]),
        Panel(
            "Slack at the first token", "Time left until the deadline: negative if late. The slowest tenth, by class.",
            "s",
            [Query(f"histogram_quantile(0.1, {rate('request_slack_seconds_bucket', 'le, slo_class', phase='ttft')})",
                   "{{slo_class}}")],
        ),
        Panel("Error of predicted TTFT", "Median of |predicted - measured| / measured, by class.", "percentunit",
              [Query(f"histogram_quantile(0.5, {rate('ttft_prediction_error_bucket', 'le, slo_class')})",
                     "{{slo_class}}")]),
    ),
    "Load": (
        Panel("Requests", "Running: they hold KV pages. Waiting: for their first step.", "short",
              [Query(level("num_requests_running", by="engine"), "running on {{engine}}"),
               Query(level("num_requests_waiting", by="engine"), "waiting for {{engine}}")]),
        Panel("Time in the queue", "From arrival to the first step.", "s", percentiles("request_queue_time_seconds")),
        Panel("Prefill admission budget (PAB)",
              "Prompt tokens that each instance can still take within the TTFT of a class; negative if overcommitted.",
              "short",
              [Query(level("prefill_budget_tokens", "min", "engine, slo_class"), "{{engine}}, {{slo_class}}")]),
        Panel("Slack and queue of the instances",
              "Slack: until the next token would be late. Queue: predicted time of prompts to compute.", "s",
              [Query(level("instance_slack_seconds", "min", "engine"), "slack of {{engine}}"),
               Query(level("prefill_queue_seconds", "max", "engine"), "queue of {{engine}}"),
               Query(level("instance_predicted_ttft_seconds", "max", "engine"), "TTFT of a new prompt, {{engine}}")]),
        Panel("Ended requests", "By reason, and refusals by API key.", "reqps",
              [Query(rate("request_success_total", "finished_reason"), "{{finished_reason}}"),
               Query(rate("client_refusals_total", "reason"), "refused: {{reason}}")]),
        Panel("Preemptions and demotions", "Dropped KV is computed again. Demoted requests become best effort.", "ops",
              [Query(rate("num_preemptions_total"), "KV dropped"),
               Query(rate("preempted_steps_total"), "steps stopped"),
               Query(rate("demotions_total"), "demoted"), Query(rate("deflections_total"), "deflected")]),
    ),
    "Throughput": (
        Panel("Tokens", "Prompt tokens of requests, and generated ones.", "short",
              [Query(rate("prompt_tokens_total"), "prompt/s"), Query(rate("generation_tokens_total"), "generated/s"),
               Query(rate("computed_prompt_tokens_total"), "prompt tokens computed/s")]),
        Panel("Time of a step", "Measured, and as the scheduler predicted it.", "s",
              [Query(mean("measured_step_seconds"), "measured"), Query(mean("predicted_step_seconds"), "predicted")]),
        Panel("Tokens of a step", "Mean number of tokens.", "short",
              [Query(mean("iteration_tokens_total"), "tokens")]),
        Panel("Accepted draft tokens", "Of those that speculation proposed.", "percentunit",
              [Query(f"{rate('spec_decode_num_accepted_tokens_total')} / "
                     f"{rate('spec_decode_num_draft_tokens_total')}", "accepted")], 1.0),
    ),
    "KV cache": (
        Panel("KV cache in use", "Share of the pages of each instance.", "percentunit",
              [Query(level("kv_cache_usage_perc", "max", "engine"), "{{engine}}")], 1.0),
        Panel("Prefix cache hits", "Share of prompt tokens found in the prefix cache.", "percentunit",
              [Query(f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}", "hits")], 1.0),
        Panel("Tiers", "KV that prefix caches evicted, in host memory and on disk.", "bytes",
              [Query(level("kv_tier_bytes", by="tier"), "{{tier}}")]),
        Panel("Traffic of the tiers", "Pages found, stored and evicted.", "ops",
              [Query(rate("kv_tier_hits_total", "tier"), "found, {{tier}}"),
               Query(rate("kv_tier_stores_total", "tier"), "stored, {{tier}}"),
               Query(rate("kv_tier_evictions_total", "tier"), "evicted, {{tier}}")]),
    ),
    "Health": (
        Panel("Engines that take requests", "And requests that continued on another one.", "short",
              [Query(level("replicas_ready"), "engines"), Query(rate("continued_requests_total"), "continued/s")]),
        Panel("Faults", "All are expected to be 0.", "ops",
              [Query(rate("hung_steps_total"), "hung steps"), Query(rate("pool_rebuilds_total"), "rebuilt pools"),
               Query(rate("compilations_after_warmup_total"), "compilations while serving"),
               Query(rate("event_loop_stalls_total"), "stalls of the event loop")]),
    ),
}  # fmt: skip


def dashboard(prefix: str = PREFIX) -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(_placed({"type": "row", "title": title, "collapsed": False, "panels": []}, panels, 0, top, 24, 1))
        top += 1
        for at, one in enumerate(row):
            x, y = at % 2 * WIDE, top + at // 2 * HIGH
            panels.append(_placed(_graph(one, prefix), panels, x, y, WIDE, HIGH))
        top += -(-len(row) // 2) * HIGH
    return {
        "uid": "jaxserve",
        "title": "jaxserve",
        "description": "Objectives, load, throughput and KV cache of jaxserve. Written by scripts/dashboard.py.",
        "tags": ["jaxserve", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables(prefix)},
        "panels": panels,
    }


def _placed(panel: dict[str, Any], before: Sequence[Any], x: int, y: int, w: int, h: int) -> dict[str, Any]:
    return {"id": len(before) + 1, "gridPos": {"x": x, "y": y, "w": w, "h": h}, **panel}


def _graph(one: Panel, prefix: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": one.unit,
        "custom": {"drawStyle": "line", "lineWidth": 2, "fillOpacity": 8, "showPoints": "never", "spanNulls": False},
    }
    if one.most is not None:
        defaults |= {"min": 0, "max": one.most}
    dashed = [{"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}}]
    overrides = [{"matcher": {"id": "byRegexp", "options": "/^objective/"}, "properties": dashed}]
    return {
        "type": "timeseries",
        "title": one.title,
        "description": one.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": _named(query.expression, prefix),
                "legendFormat": query.legend,
                "range": True,
            }
            for at, query in enumerate(one.queries)
        ],
    }


def _named(expression: str, prefix: str) -> str:
    """Return an expression with the prefix of its metrics: P stands right after a parenthesis."""
    return expression.replace("(P", "(" + prefix)


def _variables(prefix: str) -> list[dict[str, Any]]:
    query = f"label_values({prefix}num_requests_running, model_name)"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "model"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dashboard, or with --check compare it with the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", default=PREFIX, help=f"as --metrics-prefix of the servers [{PREFIX}]")
    parser.add_argument("--out", type=Path, default=FILE, metavar="FILE", help="where to write it")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    args = parser.parse_args(argv)
    text = json.dumps(dashboard(args.prefix), indent=2) + "\n"
    if args.check:
        if not args.out.is_file() or args.out.read_text(encoding="utf-8") != text:
            print(f"{args.out} is out of date; run python scripts/dashboard.py", file=sys.stderr)
            return 1
        return 0
    args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
