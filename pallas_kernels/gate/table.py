"""Print the gate's table: with rich if it is installed, otherwise in plain columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pallas_kernels.gate.figures import Figures

# What a column shows of the figures and the bandwidth of the device in bytes/s.
COLUMNS: Mapping[str, Callable[[Figures, float], str]] = {
    "regs": lambda f, _: str(f.registers) if f.kernels else "",
    "spill": lambda f, _: str(f.spills) if f.kernels else "",
    "SMEM KB": lambda f, _: f"{f.smem / 1024:.0f}" if f.smem else "",
    "blocks": lambda f, _: str(f.largest.blocks) if f.largest else "",
    "est. KB in flight": lambda f, _: f"{f.largest.in_flight / 1024:.0f}" if f.largest and f.largest.copies else "",
    "est. % of copies": lambda f, b: f"{100 * f.largest.share(b):.0f}" if f.largest and f.largest.copies else "",
    "est. loop cycles": lambda f, _: f"{f.largest.cycles:.0f}" if f.largest and f.largest.loop else "",
    "shared": lambda f, _: f"{f.shared}+{f.narrow}" if f.kernels else "",
    "instructions": lambda f, _: " ".join(f"{count} {what}" for what, count in f.instructions.items()),
    "temp MB": lambda f, _: f"{f.temp / 1e6:.2f}",
    "alias MB": lambda f, _: f"{f.alias / 1e6:.1f}" if f.alias else "",
    "GB": lambda f, _: f"{f.memory / 1e9:.2f}",
    "moved GB": lambda f, _: f"{f.moved / 1e9:.2f}",
    "of floor": lambda f, _: f"{f.moved / f.floor:.3f}" if f.layers else "",
    "launches": lambda f, _: str(f.launches),
    "a layer": lambda f, _: f"{f.per_layer:.1f}" if f.per_layer else "",
    "graphs": lambda f, _: "" if f.buffers is None else f"{f.buffers}+{f.loose}",
    "s": lambda f, _: f"{f.seconds:.1f}",
    "cpu s": lambda f, _: f"{f.processor:.1f}",
}
HEAD = ("case", *COLUMNS, "")
LEFT = {0, HEAD.index("instructions"), len(HEAD) - 1}  # text columns


def row(name: str, outcome: Figures | str, verdict: str, bandwidth: float) -> tuple[str, ...]:
    """Return the cells of a case; `bandwidth` of the device in bytes/s."""
    if isinstance(outcome, str):
        return (name, *[""] * len(COLUMNS), verdict)
    return (name, *(cell(outcome, bandwidth) for cell in COLUMNS.values()), verdict)


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
