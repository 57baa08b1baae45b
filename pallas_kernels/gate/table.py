"""Print the gate's table: with rich if it is installed, otherwise in plain columns."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.gate.figures import Figures

HEAD = (
    "case",
    "regs",
    "spill",
    "SMEM KB",
    "blocks",
    "est. KB in flight",
    "est. % of copies",
    "est. loop cycles",
    "shared",
    "instructions",
    "temp MB",
    "alias MB",
    "GB",
    "moved GB",
    "of floor",
    "launches",
    "a layer",
    "graphs",
    "s",
    "cpu s",
    "",
)
LEFT = {0, HEAD.index("instructions"), len(HEAD) - 1}  # text columns


def row(name: str, outcome: Figures | str, verdict: str, bandwidth: float) -> tuple[str, ...]:
    """Return the cells of a case; `bandwidth` of the device in bytes/s."""
    if isinstance(outcome, str):
        return (name, *[""] * (len(HEAD) - 2), verdict)
    mix = " ".join(f"{count} {what}" for what, count in outcome.instructions.items())
    most = outcome.largest
    graphs = "" if outcome.buffers is None else f"{outcome.buffers}+{outcome.loose}"
    return (
        name,
        str(outcome.registers) if outcome.kernels else "",
        str(outcome.spills) if outcome.kernels else "",
        f"{outcome.smem / 1024:.0f}" if outcome.smem else "",
        str(most.blocks) if most else "",
        f"{most.in_flight / 1024:.0f}" if most and most.copies else "",
        f"{100 * most.share(bandwidth):.0f}" if most and most.copies else "",
        f"{most.cycles:.0f}" if most and most.loop else "",
        f"{outcome.shared}+{outcome.narrow}" if outcome.kernels else "",
        mix,
        f"{outcome.temp / 1e6:.2f}",
        f"{outcome.alias / 1e6:.1f}" if outcome.alias else "",
        f"{outcome.memory / 1e9:.2f}",
        f"{outcome.moved / 1e9:.2f}",
        f"{outcome.moved / outcome.floor:.3f}" if outcome.layers else "",
        str(outcome.launches),
        f"{outcome.per_layer:.1f}" if outcome.per_layer else "",
        graphs,
        f"{outcome.seconds:.1f}",
        f"{outcome.processor:.1f}",
        verdict,
    )


def show(rows: Sequence[Sequence[str]], title: str) -> None:
    """Print the table."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _plain(rows, title)
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(HEAD):
        table.add_column(name, justify="left" if index in LEFT else "right", no_wrap=True)
    for each in rows:
        table.add_row(*each, style="red" if each[-1] not in ("ok", "recorded") else None)
    console = Console()
    if not console.is_terminal:  # without a terminal the width is unknown, and rich would truncate the table
        console = Console(width=300)
    console.print(table)


def _plain(rows: Sequence[Sequence[str]], title: str) -> None:
    print(title)
    wide = [max(len(line[index]) for line in (HEAD, *rows)) for index in range(len(HEAD))]
    for line in (HEAD, *rows):
        cells = zip(line, wide, strict=True)
        print("  ".join(cell.ljust(w) if at in LEFT else cell.rjust(w) for at, (cell, w) in enumerate(cells)).rstrip())
