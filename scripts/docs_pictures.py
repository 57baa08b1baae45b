"""Draw the pictures of the README: goodput by policy, and a timeline of two requests.

    python scripts/docs_pictures.py

The first shows committed results of `benchmarks/unified.py`, the second a simulation of two requests.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jaxserve.config import load_yaml, preset
from jaxserve.report.colors import styles
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.recorded.timeline import decodes, prompt_lengths
from jaxserve.sched.sim import Arrival, Latency, simulate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "images"
OLDER, NEWER = "unified-2026-11-22-e.json", "unified-2026-11-24.json"  # the newer file has only some systems
SYSTEMS = {  # label -> name in the results; as published unless the label says otherwise
    "unified": "unified",
    "DistServe": "distserve",
    "Kairos": "kairos as written",
    "FairBatching": "fairbatching as written",
    "SLOs-Serve": "slos_serve",
    "FlowPrefill": "flowprefill as written",
    "FairBatching, repaired": "fairbatching",
    "FlowPrefill, repaired": "flowprefill",
}
WORKLOADS = {"K128": "K128 (Kairos)", "azure-conversation": "Azure conversation, TTFT 2 s"}
BLUE, ORANGE, RED = "#1f6feb", "#d97706", "#b42318"  # prefill, decode, due
STYLE = {
    "svg.hashsalt": "jaxserve",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def goodput() -> dict[str, float]:
    """Return requests per second by `workload | mesh | system`; newer results override older ones."""
    found: dict[str, float] = {}
    for name in (OLDER, NEWER):
        found |= json.loads((RESULTS / name).read_text(encoding="utf-8"))["goodput"]
    return found


def save(figure: plt.Figure, name: str) -> None:
    """Write an SVG without a date, so that equal figures give equal files."""
    figure.tight_layout()
    figure.savefig(FOLDER / name, metadata={"Date": None, "Creator": "scripts/docs_pictures.py"})
    plt.close(figure)


def draw_goodput() -> None:
    """Draw goodput by system, with a panel for each workload."""
    rates = goodput()
    figure, axes = plt.subplots(1, len(WORKLOADS), figsize=(8.4, 2.7), sharey=True)
    for panel, (workload, title) in zip(axes, WORKLOADS.items(), strict=True):
        values = [rates[f"{workload} | 2x4 | {system}"] for system in SYSTEMS.values()]
        bars = panel.barh(list(SYSTEMS), values, color=[style.color for style in styles(SYSTEMS).values()])
        panel.bar_label(bars, fmt="%.1f", padding=2)
        panel.set(title=title, xlabel="goodput, requests/s (simulated)", xlim=(0, 1.14 * max(values)))
    axes[0].set_ylim(len(SYSTEMS) - 0.5, -0.5)
    save(figure, "goodput.svg")


def stretches(recorder: Recorder, request: int) -> list[tuple[str, float, float]]:
    """Return the intervals (color, start, end) in which a request was computed; consecutive equal steps are merged."""
    found: list[tuple[str, float, float]] = []
    lengths = prompt_lengths(recorder)
    for step in recorder.stretches:
        for span in step.plan.spans:
            if span.request != request:
                continue
            color, start = ORANGE if decodes(span, lengths) else BLUE, step.start
            if found and found[-1][0] == color and start - found[-1][2] < 1e-3:
                start = found.pop()[1]
            found.append((color, start, step.end))
    return found


def draw_slack() -> None:
    """Draw when a mixed instance computes a long and a short prompt: first come, first served, and by slack."""
    latency = load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    loose, tight = SLO(ttft=8.0, tpot=0.1), SLO(ttft=0.6, tpot=0.05)
    arrivals = [Arrival(0.0, 65536, 40, loose), Arrival(0.5, 1024, 40, tight)]
    figure, axes = plt.subplots(2, 1, figsize=(8.4, 3.1), sharex=True)
    titles = {"sarathi": "first come, first served (sarathi)", "unified": "by slack (unified)"}
    for panel, (policy, title) in zip(axes, titles.items(), strict=True):
        recorder = Recorder()
        simulate(arrivals, policy, "1x4", latency, recorder=recorder)
        for request in range(len(arrivals)):
            for color, start, end in stretches(recorder, request):
                panel.barh(request, end - start, left=start, height=0.5, color=color)
        for number, one in enumerate(arrivals):
            panel.plot([one.time] * 2, [number - 0.4, number + 0.4], color="black", linewidth=1)
            panel.plot([one.time + one.slo.ttft] * 2, [number - 0.4, number + 0.4], color=RED, linestyle=":")
        panel.set_yticks([0, 1], ["65,536 tokens,\nTTFT 8 s", "1,024 tokens,\nTTFT 0.6 s"])
        panel.set_title(title, loc="left", fontsize=9)
        panel.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=BLUE), plt.Rectangle((0, 0), 1, 1, color=ORANGE)]
    handles += [plt.Line2D([], [], color="black"), plt.Line2D([], [], color=RED, linestyle=":")]
    axes[1].legend(handles, ["prefill", "decode", "arrival", "first token due"], ncols=4, fontsize=8, loc="lower right")
    axes[1].set_xlabel("seconds (simulated)")
    save(figure, "slack.svg")


def main() -> None:
    """Draw both pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        draw_goodput()
        draw_slack()


if __name__ == "__main__":
    main()
