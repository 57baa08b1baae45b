"""Traces are read as published, and what is malformed is named by file, line and column."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from jaxserve.sched.errors import InvalidValue
from jaxserve.sched.sim.traces import load_trace
from jaxserve.sched.slo import SLO

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
real = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public traces are not beside the repository ({TRACES})")

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 01:00:00.088263+00:00,1948,3\n2024-05-12 01:00:01+00:00,5,6\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 0, "input_length": 1500, "output_length": 9, "hash_ids": [0, 1, 3]}\n'
    '{"timestamp": 3000, "input_length": 10, "output_length": 1, "hash_ids": [4]}\n'
)
PLAIN = (
    "id,arrival_s,input_tokens,output_tokens,ttft_slo_s,tpot_slo_s,class\na,1.5,10,2,0.5,0.02,chat\nb,1.25,20,3,,,\n"
)


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, newline="")
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_azure_2023_keeps_seven_digits(tmp_path: Path, name: str) -> None:
    first, second = load_trace(write(tmp_path, AZURE_2023, name))
    assert (first.time, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.time == pytest.approx(4.314579, abs=1e-8)


def test_azure_2024_has_zones_and_whole_seconds(tmp_path: Path) -> None:
    text = AZURE_2024 + "2024-05-12 03:00:02.5+02:00,7,8\n"
    assert [a.time for a in load_trace(write(tmp_path, text))] == pytest.approx([0.0, 0.911737, 2.411737])


def test_mooncake_blocks_become_tokens_that_share_prefixes(tmp_path: Path) -> None:
    a, b, _ = load_trace(write(tmp_path, MOONCAKE, "t.jsonl.gz"))
    first, second = a.prompt(0), b.prompt(1)
    assert first[:1024] == second[:1024] and first[1024] != second[1024]
    assert len(first) == 1030 and [x.time for x in (a, b)] == [0.0, 0.0]


def test_spreading_a_batch_is_off_unless_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE, "t.jsonl")
    assert [a.time for a in load_trace(path)] == [0.0, 0.0, 3.0]
    assert [a.time for a in load_trace(path, spread=2.0)] == [0.0, 1.0, 3.0]
    assert [a.time for a in load_trace(path, spread=60.0)] == [0.0, 1.5, 3.0]


def test_scaled_prompts_still_share_their_prefix(tmp_path: Path) -> None:
    a, b, _ = load_trace(write(tmp_path, MOONCAKE, "t.jsonl"), prompt_scale=8)
    assert (a.prompt_tokens, b.prompt_tokens) == (129, 188)
    assert a.prompt(0)[:128] == b.prompt(1)[:128]


def test_plain_csv_has_an_slo_and_a_class_per_request(tmp_path: Path) -> None:
    b, a = load_trace(write(tmp_path, PLAIN), slo=SLO(ttft=9, tpot=0.1))
    assert (a.key, a.time, a.slo, a.class_) == ("a", 0.25, SLO(ttft=0.5, tpot=0.02), "chat")
    assert (b.key, b.time, b.slo, b.class_) == ("b", 0.0, SLO(ttft=9, tpot=0.1), "")


def test_options_cut_and_stretch(tmp_path: Path) -> None:
    arrivals = load_trace(write(tmp_path, PLAIN), num_prompts=1, time_scale=2, prompt_scale=2, output_scale=2)
    assert [(a.key, a.prompt_tokens, a.output_tokens) for a in arrivals] == [("b", 10, 2)]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (AZURE_2024 + "2024-13-12 01:00:00,1,1\n", "t.csv", r"t.csv:4: column 'TIMESTAMP'"),
        (AZURE_2024 + "yesterday,1,1\n", "t.csv", r"t.csv:4: column 'TIMESTAMP': 'yesterday' must be a time"),
        (AZURE_2024 + "2024-05-12 01:00:00,1\n", "t.csv", r"t.csv:4: 2 columns, but the first line names 3"),
        (AZURE_2023 + "\r\n2023-11-16 18:15:51,0,5", "t.csv", r"t.csv:4: column 'ContextTokens': '0'"),
        (PLAIN + "c,nan,1,1,,,\n", "t.csv", r"t.csv:4: column 'arrival_s': 'nan'"),
        (PLAIN + "c,1,1,1,-3,,\n", "t.csv", r"column 'ttft_slo_s': '-3' must be a positive"),
        (PLAIN + "c,1,1,2.5,,,\n", "t.csv", r"column 'output_tokens': '2.5' must be a whole number"),
        (MOONCAKE + "{oops\n", "t.jsonl", r"t.jsonl:4: column 2: not JSON"),
        (MOONCAKE + '{"timestamp": 0, "input_length": 5}\n', "t.jsonl", r"t.jsonl:4: column 'output_length': None"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}',
            "t.jsonl",
            r"t.jsonl:1: column 'hash_ids': \[1, 2\] must be at most 1",
        ),
        ('{"timestamp": "x", "input_length": 5, "output_length": 1}', "t.jsonl", "column 'timestamp': 'x'"),
        ("a,b\n1,2\n", "t.csv", r"t.csv:1: columns \['a', 'b'\] are of no known format: Azure"),
        (AZURE_2024.splitlines()[0] + "\n", "t.csv", "no requests"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        load_trace(write(tmp_path, text, name))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"nothing\.csv does not exist"):
        load_trace(tmp_path / "nothing.csv")
    (tmp_path / "bad.csv.gz").write_bytes(b"not gzip")
    with pytest.raises(InvalidValue, match=r"bad\.csv\.gz"):
        load_trace(tmp_path / "bad.csv.gz")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(AZURE_2024.encode())[:-12])
    with pytest.raises(InvalidValue, match=r"cut\.csv\.gz"):
        load_trace(tmp_path / "cut.csv.gz")


@real
@pytest.mark.parametrize(
    ("file", "rows", "rate", "prompt", "output"),
    [
        ("azure/AzureLLMInferenceTrace_conv.head40min.csv.gz", 14_176, 5.906, 1195, 202),
        ("azure/AzureLLMInferenceTrace_code.head38min.csv", 7_015, 3.076, 2033, 27.6),
        ("azure/AzureLLMInferenceTrace_conv_1week.excerpt_0512T0100.csv", 1_576, 26.05, 1627, 116),
        ("mooncake/conversation_trace.head40min.jsonl.gz", 7_851, 3.275, 12_428, 347),
        ("mooncake/synthetic_trace.head12min.jsonl.gz", 2_752, 3.821, 13_344, 181),
        ("mooncake/arxiv_mooncake_trace.head1000.jsonl", 1_000, 5.641, 9_792, 199),
    ],
)
def test_real_traces_have_the_statistics_on_record(
    file: str, rows: int, rate: float, prompt: float, output: float
) -> None:
    arrivals = load_trace(TRACES / file)
    assert len(arrivals) == rows
    assert (rows - 1) / arrivals[-1].time == pytest.approx(rate, rel=2e-3)
    assert np.mean([a.prompt_tokens for a in arrivals]) == pytest.approx(prompt, rel=1e-3)
    assert np.mean([a.output_tokens for a in arrivals]) == pytest.approx(output, rel=5e-3)
