"""Tables, plots and progress bars of `jaxserve simulate`."""

import io
import re
from math import inf, log10, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from jaxserve.cli.simulate.report import _goodput, goodput
from jaxserve.cli.simulate.results import Results
from jaxserve.cli.simulate.workloads import common_slo, describe
from jaxserve.report import colors, origin, plot, progress, table
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim import NAMED


def test_table_shows_every_cell_and_refuses_ragged_rows() -> None:
    out = io.StringIO()
    table.print_table("T", ["name", "value"], [["a", 0.12345], ["b", None]], console=Console(file=out))
    text = out.getvalue()
    assert all(piece in text for piece in ("T", "name", "0.1235", "–"))
    with pytest.raises(ValueError, match="1 cells in a table of 2"):
        table.table("T", ["a", "b"], [["x"]])


def test_wide_table_is_not_cut_in_a_log() -> None:
    out = io.StringIO()
    columns = [f"column{i}" for i in range(12)]
    table.print_table("", columns, [[float(i) for i in range(12)]], console=Console(file=out))
    assert "column11" in out.getvalue()


def test_markdown() -> None:
    assert table.markdown(["a", "b"], [[1, 2.5]]).splitlines()[-1] == "| 1 | 2.5 |"


def test_the_progress_bar_appears_only_for_slow_runs() -> None:
    for patience, spoken in ((60.0, False), (0.0, True)):
        out = io.StringIO()
        with progress.bar("work", patience=patience, console=Console(file=out)) as tick:
            tick(1, 4, "note")
        assert ("work: 1/4" in out.getvalue()) is spoken


def test_the_progress_bar_redraws_on_a_terminal() -> None:
    out = io.StringIO()
    with progress.bar("work", patience=0.0, console=Console(file=out, force_terminal=True)) as tick:
        tick(1, 4)
        tick(4, 4, "end")
    assert "4/4" in out.getvalue()


def test_plots_write_pictures(tmp_path: Path) -> None:
    series = {"a": plot.Series([1, 2], [0.5, 0.9], low=[0.4, 0.8], high=[0.6, 1.0]), "b": plot.Series([1, 2], [1, 1])}
    panel = plot.Panel("attainment", "QPS", "share", series, ylim=(0, 1), level=0.9)
    for path in (
        plot.lines(tmp_path / "one.png", panel),
        plot.lines(tmp_path / "sub" / "three.png", [panel] * 3, title="x"),
        plot.cdf(tmp_path / "cdf.png", {"a": [3, 1, 2, float("nan")], "empty": []}, level=2),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would be saved."""
    made: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: made.append(figure))
    return made


def test_bars_mark_lower_bounds(tmp_path: Path, drawn: list[Any]) -> None:
    """Bounds from above are outlined."""
    goodput = {"kairos": 5.0, "edf": 3.0, "unified": 5.0, "fcfs": 2.0}
    plot.bars(tmp_path / "goodput.png", goodput, below={"fcfs"}, at_least={"kairos", "unified"})
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == ["≥ 5", "≥ 5", "3", "< 2"], "unified first"
    assert [bar.get_hatch() for bar in axes.patches] == ["//", "//", None, None]
    assert [bar.get_fill() for bar in axes.patches] == [True, True, True, False]
    assert [(line.get_label(), line.get_marker()) for line in axes.lines] == [("at least", "^"), ("below", "v")]


@pytest.mark.parametrize(
    ("label", "policy"),
    [
        ("SLOs-Serve", "slos_serve"),
        ("FairBatching, repaired", "fairbatching"),
        ("kairos:literal", "kairos"),
        ("flowprefill as written", "flowprefill"),
        ("unified@mixed", "unified"),
        ("distserve/draft", "distserve"),
        ("deflection (faster)", "deflection"),
        ("DistServe-CP2K (EDF)", "distserve"),
        ("FB-PAB", "fairbatching"),
        ("S-EDF", None),
        ("all requests", None),
        ("chat", None),
    ],
)
def test_a_label_tells_its_policy(label: str, policy: str | None) -> None:
    assert colors.policy_of(label) == policy


def test_a_policy_has_its_color_in_every_plot(tmp_path: Path, drawn: list[Any]) -> None:
    """Its forms differ by their lines, and other names get colors that no policy of the plot has."""
    found = colors.styles(["chat", "unified", "kairos", "kairos:literal", "code", "bound"])
    assert len({found[name].color for name in ("chat", "unified", "kairos", "code", "bound")}) == 5
    assert found["kairos"][::2] == (colors.POLICIES["kairos"], 0) and found["kairos:literal"].variant == 1
    lines = {name: plot.Series([1, 2], [1, 2]) for name in ("kairos", "unified")}
    plot.lines(tmp_path / "x.png", plot.Panel("t", "x", "y", lines))
    plot.cdf(tmp_path / "x.png", {"unified": [1.0, 2.0], "kairos": [1.0]})
    blue = {line.get_color() for figure in drawn for line in figure.axes[0].lines if line.get_label() == "unified"}
    assert blue == {colors.POLICIES["unified"]}


def test_unified_is_first(tmp_path: Path, drawn: list[Any]) -> None:
    assert colors.own_first(["b", "unified:x", "a"]) == ["unified:x", "b", "a"]
    lines = {name: plot.Series([1, 2], [1, 2]) for name in ("kairos", "unified")}
    plot.lines(tmp_path / "x.png", plot.Panel("t", "x", "y", lines))
    plot.cdf(tmp_path / "x.png", {"kairos": [1.0], "unified": [1.0, 2.0]})
    plot.bars(tmp_path / "x.png", {"edf": 1.0, "unified": 2.0})
    inside, outside = drawn[1].axes[0].get_legend(), drawn[0].legends[0]
    texts = (inside.get_texts(), outside.get_texts(), drawn[2].axes[0].get_xticklabels())
    assert [each[0].get_text() for each in texts] == ["unified"] * 3


def test_a_panel_without_a_point_is_left_out(tmp_path: Path, drawn: list[Any]) -> None:
    full = plot.Panel("full", "x", "y", {"a": plot.Series([1, 2], [1, 2])})
    void = plot.Panel("void", "x", "y", {"a": plot.Series([1, 2], [nan, nan])})
    plot.lines(tmp_path / "x.png", [void, full, void])
    plot.lines(tmp_path / "x.png", [void])
    assert [axes.get_title() for axes in drawn[0].axes] == ["full"]
    assert [text.get_text() for text in drawn[1].axes[0].texts] == ["nothing was measured"]


@pytest.mark.parametrize("values", [(0.03, 9.0), (1.2, 4.5), (0.001, 2.0), (7.0, 90.0), (0.3, 0.35), (1e-4, 1e3)])
def test_a_logarithmic_axis_has_labels(values: tuple[float, float], tmp_path: Path, drawn: list[Any]) -> None:
    plot.cdf(tmp_path / "x.png", {"a": values}, log_x=True)
    (axes,) = drawn[0].axes
    drawn[0].canvas.draw()
    low, high = axes.get_xlim()
    labels = [text.get_text() for text in axes.get_xticklabels() if low <= text.get_position()[0] <= high]
    assert 2 <= len([label for label in labels if label]) <= 15
    if 1.3 < log10(high / low) < 4:
        assert {f"{float(label):.0e}"[0] for label in labels if label} == {"1", "2", "5"}


def test_goodput_at_the_highest_rate_is_a_lower_bound() -> None:
    reports = [SimpleNamespace(rate=rate) for rate in (2.0, 5.0)]
    found = {"kairos": 5.0, "edf": 2.0, "sjf": None}
    assert Results("", reports, found).at_least == {"kairos"}  # type: ignore[arg-type]
    assert Results("", reports, found, searched=True).at_least == frozenset()  # type: ignore[arg-type]


def test_a_goal_missed_at_a_lower_rate_bounds_goodput_from_above() -> None:
    def report(rate: float, attained: float) -> Any:
        return SimpleNamespace(policy="kairos", rate=rate, seed=0, summary=SimpleNamespace(attained=attained))

    dips = [report(2.0, 0.82), report(3.0, 0.74), report(5.0, 0.93)]
    found = goodput(dips)
    results = Results("", dips, found)
    assert found == {"kairos": None} and results.below == {"kairos"} and not results.at_least
    assert _goodput(results, "kairos", None) == "below 2 requests/s (misses 90% at 2, though it reaches it at 5)"
    later = [report(1.0, 0.95), *dips]
    results = Results("", later, goodput(later))
    assert _goodput(results, "kairos", 1.0) == "1 requests/s (misses 90% at 2, though it reaches it at 5)"
    steady = [report(2.0, 0.95), report(3.0, 0.91)]
    assert _goodput(Results("", steady, goodput(steady)), "kairos", 3.0) == "at least 3 requests/s"
    never = [report(2.0, 0.5)]
    assert _goodput(Results("", never, goodput(never)), "kairos", None) == "no rate here reaches 90%"


def test_objectives_and_steps_are_drawn(tmp_path: Path, drawn: list[Any]) -> None:
    steps = plot.Series([1.0, 10.0], [0.5, 1.0], steps=True)
    plot.lines(tmp_path / "x.png", plot.Panel("t", "ms", "share", {"a": steps}, log_x=True, marks={"a": (5.0,)}))
    plot.cdf(tmp_path / "x.png", {"a": [1.0, 2.0]}, level=8.0, log_x=True)
    for figure, mark in zip(drawn, (5.0, 8.0), strict=True):
        (axes,) = figure.axes
        assert axes.get_xscale() == "log" and axes.lines[0].get_drawstyle() == "steps-post"
        assert list(axes.lines[1].get_xdata()) == [mark, mark]


def test_every_built_in_workload_is_explained() -> None:
    for name, workload in NAMED.items():
        text = describe(workload)
        assert text.startswith(f"{name}: ") and "tokens" in text and "TPOT" in text
    assert common_slo(NAMED["K128"]) == SLO(8.0, 0.05)
    assert common_slo(NAMED["slos-serve-mixed"]) == SLO(inf, inf)


def test_results_name_their_source() -> None:
    found = origin.commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{12}\+?", found)
