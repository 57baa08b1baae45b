"""`jaxserve fit`: from measured steps to a table of errors and a preset for the simulator."""

import csv
import json
from pathlib import Path

import pytest

from jaxserve.cli import fit
from jaxserve.cli import main as cli
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.log import Log
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.journal import Journal
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.sched.perf.registry import samples
from jaxserve.sched.sim import Arrival, simulate
from jaxserve.sched.sim.latency import Latency
from jaxserve.yamlio import load_yaml

TRUTH = Coefficients(8e-3, 4e-5, 2e-5, 3e-10, 2e-7, 2e-8, 4e-3, 0.125)


def run(*words: str) -> int:
    return cli.dispatch("fit", list(words))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Write 300 steps of TRUTH as CSV."""
    path = tmp_path / "steps.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Load._fields, "seconds"])
        writer.writerows([*load, TRUTH.step_time(load)] for load in samples(TRUTH, 1, 300))
    return path


def test_a_profile_becomes_a_table_and_a_preset(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    words = ("--p-moe", "0.125", "--kv-tokens", "50000", "--kv-bytes-per-token", "1000", "--out", str(out))
    assert run(str(profile), *words) == 0
    said = capsys.readouterr().out
    for name in ("general", "table", "table:ewma", "linear", "roofline", "roofline:published", "poly"):
        assert f" {name} " in said
    assert "300 steps" in said and "exact" not in said and "wrote" in said
    preset = load_yaml(out, Latency)
    for name in Coefficients.__slots__:
        assert getattr(preset.solve(), name) == pytest.approx(getattr(TRUTH, name), rel=1e-3)
    assert (preset.name, preset.kv_tokens, preset.page_size, preset.noise) == ("mine", 50_000, 64, 0.0)
    assert "# MEASURED" in out.read_text() and "# ASSUMED" in out.read_text()
    arrivals = [Arrival(0.1 * i, 500, 20, SLO(8.0, 0.05)) for i in range(10)]
    assert simulate(arrivals, "kairos", "2x1", preset).summary.attained == 1.0


def test_json_lines_equal_csv(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with profile.open() as rows:
        path.write_text("".join(json.dumps(row) + "\n" for row in csv.DictReader(rows)))
    assert fit.read(path) == fit.read(profile)


def test_a_journal_is_a_profile_with_a_kv_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "run.jsonl", tmp_path / "mine.yaml"
    served = Latency("a", 1000, 4096, page_size=16, coefficients=TRUTH)
    with path.open("w") as file:
        journal = Journal(file)

        def logs(name: str, policy: str, limits: Limits, role: Role, prefix_caching: bool) -> Log:
            perf = Recipe("general", coefficients=TRUTH).record()
            return journal.instance(
                name, policy=policy, limits=limits, role=role, prefix_caching=prefix_caching, perf=perf
            )

        arrivals = [Arrival(0.05 * i, 100 + 37 * i % 500, 5 + i % 20, SLO(8.0, 0.05)) for i in range(60)]
        simulate(arrivals, "kairos", "1x1", served, logs=logs)
    profile = fit.read(path)
    assert (profile.kv_tokens, profile.page_size) == (4096, 16)
    assert len(profile.steps) > 50
    for load, seconds in profile.steps:
        assert seconds == pytest.approx(TRUTH.step_time(load))
    assert run(str(path), "--p-moe", "0.125", "--out", str(out)) == 0
    again = load_yaml(out, Latency)
    assert (again.kv_tokens, again.page_size) == (4096, 16)
    assert f"{len(profile.steps)} steps" in capsys.readouterr().out


def test_a_journal_without_a_step_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        Journal(file).instance(
            "a",
            policy="kairos",
            limits=Limits(pages=10),
            role=Role.MIXED,
            prefix_caching=False,
            perf=Recipe("general", coefficients=TRUTH).record(),
        )
    with pytest.raises(InvalidValue, match="no step of the journal"):
        fit.read(path)


def test_missing_columns_get_their_implied_values(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"prefill": 100, "prefix": 50, "seconds": 0.1},
        {"decode": 4, "longest": 1000, "seconds": 0.1},
        {"decode": 4, "context": 2000, "drafts": 3, "seconds": 0.1},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert fit.read(path).steps == [
        (Load().add_chunk(100, 50), 0.1),
        (Load(decode=4, longest=1000, context=4000), 0.1),
        (Load(decode=4, longest=500, context=2000, drafts=3), 0.1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill,secs\n5,1\n", r"a.csv:2: unknown column 'secs'; .*allowed: .*seconds"),
        ("prefill,seconds\n5,soon\n", r"a.csv:2: column 'seconds'='soon' must be a positive number"),
        ("prefill,seconds\n5,1\n5,0\n", r"a.csv:3: column 'seconds'='0' must be a positive number"),
        ("prefill,seconds\n5,-1\n", r"must be a positive number"),
        ("prefill,seconds\n5,nan\n", r"must be a positive number"),
        ("prefill,seconds\n-5,1\n", r"a.csv:2: column 'prefill'='-5' must be a number, 0 or more"),
        ("prefill,seconds\n2.5,1\n", r"column 'prefill'='2.5' must be a whole number"),
        ("prefill,seconds\n5,\n", r"a.csv:2: column 'seconds' is missing"),
        ("prefill,seconds\n0,1\n", r"a.csv:2: a step needs prefill or decode tokens"),
        ("decode,seconds\n3,1\n", r"a.csv:2: decode=3 needs 'longest' or 'context'"),
        ("prefill,seconds\n5,1,7\n", r"unknown column 'beyond the header'"),
        ("prefill,seconds\n", r"a.csv has no steps"),
        ("", r"a.csv has no steps"),
    ],
)
def test_an_unreadable_file_is_a_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=message):
        fit.read(path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "a.jsonl:1 is not JSON"), ("[1]", "a.jsonl:1 must be an object"), ("", "has no steps")]
)
def test_invalid_rows_are_clear_errors(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=message):
        fit.read(path)


def test_invalid_flags_are_refused(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(profile), "--p-moe", "2") == 2
    assert "p-moe=2.0 must be between 0 and 1" in capsys.readouterr().err
    assert run(str(profile), "--out", str(tmp_path / "x.yaml")) == 2
    assert "--kv-tokens N" in capsys.readouterr().err and not (tmp_path / "x.yaml").exists()
    assert run(str(tmp_path / "none.csv")) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_model_that_the_profile_cannot_determine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text("decode,longest,seconds\n" + "".join(f"{n},1000,{0.01 + n / 1e4}\n" for n in range(1, 30)))
    assert run(str(path)) == 0
    said = capsys.readouterr().out
    assert "poly: no measured steps of prompt tokens alone" in said and "table: a table needs" in said
