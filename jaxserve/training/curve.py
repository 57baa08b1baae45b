"""Plot the training curve of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot(history: Sequence[Mapping[str, float]], file: Path, names: Mapping[str, str], ylabel: str) -> None:
    """Plot entries of the history against the tokens read. `names` maps an entry's key to its legend."""
    from matplotlib.figure import Figure  # pyplot would keep global state

    figure = Figure(figsize=(7, 4), dpi=80, layout="constrained")
    axes = figure.add_subplot()
    tokens = [entry["tokens"] / 1e6 for entry in history]
    for width, (key, name) in enumerate(names.items(), start=1):
        axes.plot(tokens, [entry[key] for entry in history], label=name, linewidth=width)
    axes.set_xlabel("million tokens")
    axes.set_ylabel(ylabel)
    axes.set_ylim(top=min(6.0, max(entry[key] for entry in history for key in names)))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)
