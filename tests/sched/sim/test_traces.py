"""Traces are read in their published formats, and rows that cannot be used are skipped."""

from __future__ import annotations

import gzip
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim import traces
from jaxserve.sched.sim.traces import load_trace
from tests.support.examples import cases

TRACES = Path(__file__).resolve().parents[3].parent / "shared" / "traces"
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
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n5,GPT-4,10,0,10,API log\n5,GPT-4,0,0,0,API log\n7,GPT-4,9,2,11,API log\n"
)
LATER_BURST = (  # a later release: other columns, in another order
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5.0,s1,2.5,ChatGPT,472,18,490,Conversation log\n"
)
QWEN = (  # written for these tests, since the real files are not available
    '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132, '
    '"type": "text", "turn": 1, "hash_ids": [1089, 1090, 7]}\n'
    '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 40, "output_length": 20, '
    '"type": "search", "turn": 2, "hash_ids": [1089, 1090, 1091, 8]}\n'
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


def test_mooncake_blocks_become_tokens_with_shared_prefixes(tmp_path: Path) -> None:
    a, b, _ = load_trace(write(tmp_path, MOONCAKE, "t.jsonl.gz"))
    first, second = a.prompt(0), b.prompt(1)
    assert first[:1024] == second[:1024] and first[1024] != second[1024]
    assert len(first) == 1030 and [x.time for x in (a, b)] == [0.0, 0.0]


def test_batches_are_spread_only_on_request(tmp_path: Path) -> None:
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


def test_burstgpt_follows_the_header_and_reports_ignored_failures(tmp_path: Path) -> None:
    told: list[str] = []
    first, last = load_trace(write(tmp_path, BURST, "t.csv.gz"), tell=told.append)
    assert (first.time, first.prompt_tokens, first.output_tokens) == (0.0, 472, 18)
    assert (first.class_, last.class_, last.time) == ("ChatGPT/Conversation log", "GPT-4/API log", 2.0)
    assert len(told) == 1 and "2 of 4 requests failed" in told[0] and "left out" in told[0]
    [later] = load_trace(write(tmp_path, LATER_BURST))
    assert (later.prompt_tokens, later.output_tokens, later.class_) == (472, 18, "ChatGPT/Conversation log")


def test_burstgpt_failures_can_be_kept_and_ties_are_real(tmp_path: Path) -> None:
    kept = load_trace(write(tmp_path, BURST), keep_failed=True)
    assert [(a.time, a.prompt_tokens, a.output_tokens) for a in kept] == [
        (0, 472, 18),
        (0, 10, 1),
        (0, 1, 1),
        (2, 9, 2),
    ]
    parted = load_trace(write(tmp_path, BURST), keep_failed=True, spread=1.0)
    assert [a.time for a in parted] == pytest.approx([0, 1 / 3, 2 / 3, 2])


def test_qwen_has_seconds_types_and_blocks_of_16(tmp_path: Path) -> None:
    a, b = load_trace(write(tmp_path, QWEN, "t.jsonl"))
    assert (a.time, b.time) == (0.0, pytest.approx(1.386))
    assert (a.class_, a.key, b.class_, b.key) == ("text", "159", "search", "160")
    assert b.hash_ids == (1089, 1090, 1091)  # the name of the next block belongs to no prompt
    first, second = a.prompt(0), b.prompt(1)
    assert first[:32] == second[:32] and first[32] != second[32]


def test_ties_are_reported_and_separated_only_on_request(tmp_path: Path) -> None:
    told: list[str] = []
    text = MOONCAKE.replace("3000", "0") + MOONCAKE
    load_trace(write(tmp_path, text, "t.jsonl"), tell=told.append)
    assert len(told) == 1 and "6 requests share 2 timestamps" in told[0]


def test_unsorted_rows_are_sorted_and_ties_keep_their_order(tmp_path: Path) -> None:
    text = "id,arrival_s,input_tokens,output_tokens\nc,2,1,1\na,1,1,1\nb,1,1,1\n"
    assert [(a.key, a.time) for a in load_trace(write(tmp_path, text))] == [("a", 0.0), ("b", 0.0), ("c", 1.0)]


def test_a_time_window_selects_requests(tmp_path: Path) -> None:
    text = "id,arrival_s,input_tokens,output_tokens\n" + "".join(f"r{t},{t + 7},1,1\n" for t in range(10))
    path = write(tmp_path, text)
    assert [a.key for a in load_trace(path, start=3, duration=4)] == ["r3", "r4", "r5", "r6"]
    assert [a.time for a in load_trace(path, start=8)] == [0.0, 1.0]
    with pytest.raises(InvalidValue, match="the trace has no requests in that interval"):
        load_trace(path, start=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"spread": -1.0}, "spread=-1.0"),
        ({"start": float("nan")}, "start=nan"),
        ({"duration": 0.0}, "duration=0.0"),
        ({"time_scale": 0.0}, "time_scale=0.0"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        load_trace(write(tmp_path, PLAIN), **options)


def test_options_cut_and_rescale(tmp_path: Path) -> None:
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
        (PLAIN + "c,-1,1,1,,,\n", "t.csv", r"t.csv:4: column 'arrival_s': '-1' must be a number, 0 or more"),
        (PLAIN + "c,1,1,1,0,,\n", "t.csv", r"t.csv:4: column 'ttft_slo_s': '0' must be a positive"),
        (PLAIN + "c,1,1,1,,0.0,\n", "t.csv", r"t.csv:4: column 'tpot_slo_s': '0.0' must be a positive"),
        (
            PLAIN + "c,1,0,1,,,\n",
            "t.csv",
            r"t.csv:4: column 'input_tokens': '0' must be a whole number of tokens, 1 to",
        ),
        (PLAIN + "c,1,1,0,,,\n", "t.csv", r"t.csv:4: column 'output_tokens': '0'"),
        (PLAIN + '"c,1,1,1,,,\n', "t.csv", r"t.csv:4"),
        (BURST + "-1,GPT-4,1,1,2,API log\n", "t.csv", r"t.csv:6: column 'Timestamp': '-1'"),
        (BURST + "8,GPT-4,0,1,2,API log\n", "t.csv", r"t.csv:6: column 'Request tokens': '0' must be .* 1 to"),
        (BURST + "8,GPT-4,1,-1,2,API log\n", "t.csv", r"t.csv:6: column 'Response tokens': '-1' must be .* 0 to"),
        (BURST + "8,GPT-4,x,0,2,API log\n", "t.csv", r"t.csv:6: column 'Request tokens': 'x'"),
        (MOONCAKE.replace("3000", "-3000"), "t.jsonl", r"t.jsonl:3: column 'timestamp': -3000"),
        (QWEN.replace("62.5", "-62.5"), "t.jsonl", r"t.jsonl:2: column 'timestamp': -62.5"),
        (QWEN.replace('"search"', "3"), "t.jsonl", r"t.jsonl:2: column 'type': 3 must be a text"),
        (QWEN.replace('"turn": 2', '"turn": 0'), "t.jsonl", r"t.jsonl:2: column 'turn': 0"),
        (QWEN.replace(": 160", ": null"), "t.jsonl", r"t.jsonl:2: column 'chat_id': None"),
        (QWEN.replace("1091", "-2"), "t.jsonl", r"t.jsonl:2: column 'hash_ids': .* must be a list of whole numbers"),
        (
            QWEN.replace('"output_length": 20', '"output_length": 1'),
            "t.jsonl",
            r"t.jsonl:2: column 'hash_ids': .* at most 3 blocks for 40 tokens",
        ),
        (QWEN + "[1]\n", "t.jsonl", r"t.jsonl:3: '\[1\]' must be a JSON object"),
        ("a,b\n1,2\n", "t.csv", r"t.csv:1: columns \['a', 'b'\] match no known format: Azure"),
        (AZURE_2024.splitlines()[0] + "\n", "t.csv", "no requests"),
    ],
)
def test_rows_that_cannot_be_used_are_named_by_file_line_and_column(
    tmp_path: Path, text: str, name: str, message: str
) -> None:
    told: list[str] = []
    path = write(tmp_path, text, name)
    try:
        load_trace(path, tell=told.append)
    except InvalidValue as error:
        told.append(str(error))
    [said] = [sentence for sentence in told if re.search(message, sentence)]
    assert len(said) < 1000


@pytest.mark.parametrize(
    ("text", "name", "lengths"),
    [
        (AZURE_2023 + "\r\n2023-11-16 18:15:51,9,0", "t.csv", [(374, 44), (396, 109)]),
        (AZURE_2023.replace("374,44", "374.0,44.0"), "t.csv", [(374, 44), (396, 109)]),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 0}',
            "t.jsonl",
            [(1030, 5), (1500, 9), (10, 1)],
        ),
        ("[" + MOONCAKE.strip().replace("\n", ",") + "]", "t.json", [(1030, 5), (1500, 9), (10, 1)]),
        ("[\n" + QWEN.strip().replace("\n", ",\n") + "\n]", "t.json", [(33, 132), (40, 20)]),
        ("\ufeff" + MOONCAKE, "t.jsonl", [(1030, 5), (1500, 9), (10, 1)]),
        (MOONCAKE, "t.jsonl.gz", [(1030, 5), (1500, 9), (10, 1)]),
        (MOONCAKE + "[1]\n\n{oops\n", "t.jsonl", [(1030, 5), (1500, 9), (10, 1)]),
        (BURST.replace("472,18", "472.0,18.0"), "t.csv", [(472, 18), (9, 2)]),
        (PLAIN + "c,1,1\n", "t.csv", [(20, 3), (10, 2)]),
        (PLAIN + '"c,1,1', "t.csv", [(20, 3), (10, 2)]),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,7,3\n0.25,9,0\n0.75,8,1\n", "t.csv", [(7, 3), (8, 1)]),
        (
            "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
            "0,2,0,0.0,1,374,44\n1,2,0,4.3,1,396.0,109\n",
            "t.csv",
            [(374, 44), (396, 109)],
        ),
        (" TIMESTAMP , ContextTokens, GeneratedTokens\n2024-05-12 01:00:00,5,6\n", "t.csv", [(5, 6)]),
    ],
)
def test_published_files_are_read_and_rows_that_cannot_be_used_skipped(
    tmp_path: Path, text: str, name: str, lengths: list[tuple[int, int]]
) -> None:
    arrivals = load_trace(write(tmp_path, text, name))
    assert [(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals] == lengths


def test_skipped_rows_are_counted_by_reason_in_one_line(tmp_path: Path) -> None:
    told: list[str] = []
    bad = ["2024-05-12 01:00:00,5,0"] * 3 + ["2024-05-12 01:00:00,x,5", "soon,5,5", "2024-05-12 01:00:00,5", "1,2,3,4"]
    load_trace(write(tmp_path, AZURE_2024 + "\n".join(bad)), tell=told.append)
    [said] = told
    assert (
        "7 of the 9 rows read cannot be used and are skipped: 3 as" in said
        and "trace.csv:4: column 'GeneratedTokens'" in said
    )
    assert "1 as" in said and said.endswith("; 2 for other reasons") and "\n" not in said


@pytest.mark.parametrize("rows", cases([100_000], [1_000_000]))
def test_many_bad_rows_after_good_ones_are_one_line_in_little_memory(tmp_path: Path, rows: int) -> None:
    told: list[str] = []
    path = write(tmp_path, AZURE_2024)
    with path.open("a") as file:
        file.writelines(f"2024-05-12 01:00:00,{at},0\n" for at in range(1, rows + 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load_trace(path, tell=told.append)
    # In KiB; the file has 33 bytes a row, and a message for each would take about twice that.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (4 << 10) + rows * 60 / 1024
    [said] = told
    assert f"{rows} of the {rows + 2} rows read cannot be used and are skipped: {rows} as" in said and len(said) < 1000


class Endless:
    """Lines that are no rows, counted."""

    lines = 0

    def readline(self) -> str:
        self.lines += 1
        return AZURE_2024.splitlines(True)[0] if self.lines == 1 else f"{'x' * 5000},1,1\n"

    __next__ = readline

    def __iter__(self) -> Endless:
        return self

    def __enter__(self) -> Endless:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_a_file_of_bad_rows_alone_ends_early_with_a_bounded_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Endless()
    monkeypatch.setattr(traces, "_open", lambda path: file)
    with pytest.raises(
        InvalidValue, match=r"none of its first 10000 rows can be used: 10000 as .*'TIMESTAMP'"
    ) as raised:
        load_trace(tmp_path / "trace.csv")
    assert file.lines < 10_100 and len(str(raised.value)) < 600
    with pytest.raises(InvalidValue, match=r"none of its 1 rows can be used: 1 as .*:2: column 'GeneratedTokens': '0'"):
        monkeypatch.undo()
        load_trace(write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 01:00:00,5,0\n"))


def test_missing_and_malformed_files(tmp_path: Path) -> None:
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
        ("azure/AzureLLMInferenceTrace_code.head38min.csv", 7_015, 3.076, 2033, 27.6),
        ("azure/AzureLLMInferenceTrace_conv_1week.excerpt_0512T0100.csv", 1_576, 26.05, 1627, 116),
        ("mooncake/synthetic_trace.head12min.jsonl.gz", 2_752, 3.821, 13_344, 181),
        ("mooncake/arxiv_mooncake_trace.head1000.jsonl", 1_000, 5.641, 9_792, 199),
        ("burstgpt/BurstGPT_1.days0-4.csv.gz", 11_810, 0.02734, 690, 268),
        ("burstgpt/BurstGPT_1.dense120.csv", 120, 29.75, 284, 2.767),
    ],
)
def test_real_traces_have_the_recorded_statistics(
    file: str, rows: int, rate: float, prompt: float, output: float
) -> None:
    arrivals = load_trace(TRACES / file)
    assert len(arrivals) == rows
    assert (rows - 1) / arrivals[-1].time == pytest.approx(rate, rel=2e-3)
    assert np.mean([a.prompt_tokens for a in arrivals]) == pytest.approx(prompt, rel=1e-3)
    assert np.mean([a.output_tokens for a in arrivals]) == pytest.approx(output, rel=5e-3)
