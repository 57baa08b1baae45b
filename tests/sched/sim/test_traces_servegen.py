"""ServeGen workloads have the rates, gaps and lengths of their tables, and malformed files are named."""

import gzip
import json
from math import gamma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim.traces import load_trace
from jaxserve.sched.sim.traces.servegen import _weibull_shape

SERVEGEN = Path(__file__).resolve().parents[3].parent / "shared" / "traces" / "servegen" / "data"
real = pytest.mark.skipif(not SERVEGEN.is_dir(), reason=f"the public traces are not beside the repository ({SERVEGEN})")

LANGUAGE = {"input_tokens": "{10: 0.25, 30: 0.75}", "output_tokens": "{0: 0.5, 4: 0.25, 8: 0.25}"}
REASON = LANGUAGE | {"reason_ratio": "{0.0: 0.0, 0.5: 1.0}"}
IMAGES = {
    "text_tokens": "{100: 1.0}",
    "image_tokens": "{7: 1.0}",
    "audio_tokens": "{0: 1.0}",
    "video_tokens": "{0: 1.0}",
    "image_count": "{0: 0.5, 3: 0.5}",
    "audio_count": "{0: 1.0}",
    "video_count": "{0: 1.0}",
    "output_tokens": "{5: 1.0}",
}


def client(folder: Path, number: int, rows: str, tables: Any, *, zipped: bool = False) -> Path:
    (folder / f"chunk-{number}-trace.csv").write_text(rows)
    text = tables if isinstance(tables, str) else json.dumps(tables)
    if zipped:
        (folder / f"chunk-{number}-dataset.json.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (folder / f"chunk-{number}-dataset.json").write_text(text)
    return folder


@pytest.mark.parametrize(("pattern", "cv"), [("Gamma", 0.5), ("Gamma", 3.0), ("Weibull", 0.5), ("Weibull", 3.0)])
def test_rate_and_variation_match_the_table(tmp_path: Path, pattern: str, cv: float) -> None:
    folder = client(tmp_path, 1, f"0,30,{cv},{pattern},9,9\n", {"0": LANGUAGE})
    arrivals = load_trace(folder, duration=600)
    assert len(arrivals) == 18_000
    gaps = np.diff([a.time for a in arrivals])
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.07)
    assert gaps.mean() == pytest.approx(1 / 30, rel=0.01)


def test_lengths_follow_the_table_and_outputs_are_never_empty(tmp_path: Path) -> None:
    arrivals = load_trace(client(tmp_path, 3, "0,50,1,Gamma,1,1\n", {"0": LANGUAGE}, zipped=True), duration=600)
    prompts = [a.prompt_tokens for a in arrivals]
    assert set(prompts) == {10, 30} and np.mean(prompts) == pytest.approx(25, rel=0.02)
    outputs = [a.output_tokens for a in arrivals]
    assert set(outputs) == {4, 8} and np.mean(outputs) == pytest.approx(6, rel=0.02)
    assert {(a.class_, a.thinking_tokens) for a in arrivals} == {("client-3", 0)}


def test_reasoning_has_thinking_tokens(tmp_path: Path) -> None:
    arrivals = load_trace(client(tmp_path, 0, "0,1,1,Gamma,1,1\n", {"0": REASON}), duration=600)
    assert {(a.output_tokens, a.thinking_tokens) for a in arrivals} == {(4, 2), (8, 4)}


def test_each_image_has_its_tokens(tmp_path: Path) -> None:
    arrivals = load_trace(client(tmp_path, 0, "0,10,1,Gamma,1,1\n", {"0": IMAGES}), duration=600)
    prompts = [a.prompt_tokens for a in arrivals]
    assert set(prompts) == {100, 121} and np.mean(prompts) == pytest.approx(110.5, rel=0.01)


def test_windows_clients_and_tables_each_have_their_time(tmp_path: Path) -> None:
    later = {"input_tokens": "{99: 1.0}", "output_tokens": "{1: 1.0}"}
    client(tmp_path, 1, "0,1,1,Gamma,1,1\n600,0,0,,0,0\n21600,2,1,Weibull,1,1\n", {"0": LANGUAGE, "21600": later})
    client(tmp_path, 2, "600,3,1,Gamma,1,1\n", {"0": later})
    for start, expected in (
        (0, {"client-1": 600}),
        (600, {"client-2": 1800}),
        (1200, {}),
        (21_600, {"client-1": 1200}),
    ):
        if not expected:
            with pytest.raises(InvalidValue, match="the trace has no requests in that interval"):
                load_trace(tmp_path, start=start, duration=600)
            continue
        arrivals = load_trace(tmp_path, start=start, duration=600)
        assert {a.class_ for a in arrivals} == set(expected) and len(arrivals) == sum(expected.values())
        assert {a.prompt_tokens for a in arrivals} == ({10, 30} if start == 0 else {99})
    assert len(load_trace(tmp_path, duration=22_200)) == 3600


def test_the_seed_decides_and_a_shorter_draw_is_a_prefix_of_a_longer_one(tmp_path: Path) -> None:
    folder = client(tmp_path, 1, "0,2,2,Gamma,1,1\n600,2,2,Gamma,1,1\n", {"0": LANGUAGE})
    told: list[str] = []
    many = load_trace(folder, num_prompts=1500, tell=told.append)
    assert many == load_trace(folder, num_prompts=1500) and many[:700] == load_trace(folder, num_prompts=700)
    assert many != load_trace(folder, num_prompts=1500, seed=1)
    assert len(told) == 1 and "1500 requests drawn with seed 0 from the statistics of 1 clients" in told[0]
    assert {a.slo for a in load_trace(folder, num_prompts=5, slo=SLO(1, 2))} == {SLO(1, 2)}


@settings(deadline=None)
@given(cv=st.floats(0.05, 40))
def test_the_weibull_shape_gives_the_requested_variation(cv: float) -> None:
    shape = _weibull_shape(cv)
    assert (gamma(1 + 2 / shape) / gamma(1 + 1 / shape) ** 2 - 1) ** 0.5 == pytest.approx(cv, rel=1e-3)


GOOD = "0,1,1,Gamma,1,1\n"


@pytest.mark.parametrize(
    ("rows", "tables", "message"),
    [
        (GOOD + "600,1,1,Gamma,1\n", {"0": LANGUAGE}, r"trace\.csv:2: 5 columns, but a ServeGen window has 6"),
        (GOOD + "600,-1,1,Gamma,1,1\n", {"0": LANGUAGE}, r"trace\.csv:2: column 2: '-1' must be a number, 0 or more"),
        (GOOD + "-600,1,1,Gamma,1,1\n", {"0": LANGUAGE}, r"trace\.csv:2: column 1: '-600'"),
        (GOOD + "601,1,1,Gamma,1,1\n", {"0": LANGUAGE}, r"trace\.csv:2: column 1: '601' must be a multiple of 600"),
        (GOOD + "0,1,1,Gamma,1,1\n", {"0": LANGUAGE}, r"trace\.csv:2: column 1: window 0 is given twice"),
        (GOOD + "600,x,1,Gamma,1,1\n", {"0": LANGUAGE}, r"trace\.csv:2: column 2: 'x'"),
        ("0,1,0,Gamma,1,1\n", {"0": LANGUAGE}, r"trace\.csv:1: column 3: '0' must be more than 0"),
        ("0,1,1,Pareto,1,1\n", {"0": LANGUAGE}, r"trace\.csv:1: column 4: 'Pareto' must be Gamma or Weibull"),
        ("0,1,1,,1,1\n", {"0": LANGUAGE}, r"trace\.csv:1: column 4: ''"),
        (GOOD, {"21600": LANGUAGE}, r"dataset\.json: no tables for the window 0"),
        (
            GOOD,
            {"0": {"input_tokens": "{}", "output_tokens": "{1: 1}"}},
            r"window 0: 'input_tokens': the table is empty",
        ),
        (
            GOOD,
            {"0": {"input_tokens": "{1: -1}", "output_tokens": "{}"}},
            r"'input_tokens': must be a string .* negative",
        ),
        (GOOD, {"0": {"input_tokens": "{1: 1}"}}, r"window 0: 'output_tokens': must be a string with a table"),
        (GOOD, {"0": {"input_tokens": {"1": 1}, "output_tokens": "{1: 1}"}}, r"'input_tokens': must be a string"),
        (GOOD, {"0": {"input_tokens": "{1: exit()}", "output_tokens": "{1: 1}"}}, r"'input_tokens': not a table"),
        (GOOD, '{"0": \n oops}', r"dataset\.json:2: column 2: not JSON"),
        (GOOD, "[]", r"dataset\.json: must be a JSON object"),
    ],
)
def test_errors_name_their_place(tmp_path: Path, rows: str, tables: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        load_trace(client(tmp_path, 1, rows, tables), duration=600)


def test_incomplete_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"has no chunk-N-trace\.csv"):
        load_trace(tmp_path, num_prompts=1)
    with pytest.raises(InvalidValue, match="describes 600 requests of 1 clients: give the number"):
        load_trace(client(tmp_path, 1, GOOD, {"0": LANGUAGE}))
    (tmp_path / "chunk-1-dataset.json").unlink()
    with pytest.raises(InvalidValue, match=r"has no chunk-1-dataset\.json beside it"):
        load_trace(tmp_path, num_prompts=1)


# An hour from noon of the first day. The published tables are of all hours, so the expectation is computed
# from the files: rate times table, client by client.
@real
@pytest.mark.parametrize("model", ["reason/deepseek-r1", "multimodal/mm-image"])
def test_real_clients_match_their_measurements(model: str) -> None:
    start, duration = 43_200, 3_600
    arrivals = load_trace(SERVEGEN / model, start=start, duration=duration)
    expected, outputs = 0.0, 0.0
    for trace in (SERVEGEN / model).glob("chunk-*-trace.csv"):
        rows = [line.split(",") for line in trace.read_text().split()]
        requests = 600 * sum(float(r[1]) for r in rows if start <= float(r[0]) < start + duration)
        if requests:
            with gzip.open(trace.parent / trace.name.replace("trace.csv", "dataset.json.gz"), "rt") as file:
                table = _table(json.load(file)[str(start)]["output_tokens"])
            expected += requests
            outputs += requests * sum(t * p for t, p in table.items()) / sum(table.values())
    assert len(arrivals) == pytest.approx(expected, abs=200)
    assert np.mean([a.output_tokens for a in arrivals]) == pytest.approx(outputs / expected, rel=0.03)
    assert all(0 <= a.thinking_tokens <= a.output_tokens for a in arrivals)
    assert any(a.thinking_tokens for a in arrivals) == model.startswith("reason")


def _table(text: str) -> dict[int, float]:
    pairs = (pair.split(":") for pair in text.strip("{}").split(",") if pair)
    return {int(tokens): float(share) for tokens, share in pairs if int(tokens) >= 1}
