"""`jaxserve bench`, from its flags to its files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import bench as cli
from jaxserve.cli.flags import TeachingParser
from jaxserve.cli.main import main as jaxserve
from jaxserve.tokenizer import Tokenizer
from tests.support.bench.endpoint import Endpoint
from tests.support.bench.strict_server import StrictServer

FAST = Endpoint(ttft=0.02, gap=0.002)


def bench(endpoint: Endpoint | StrictServer, *flags: str) -> int:
    return jaxserve(["bench", "--base-url", endpoint.url, *flags])


def saved(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


# Keys read by tools written for `vllm bench serve`.
VLLM_KEYS = {
    *("date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration"),
    *("completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_concurrent_requests", "max_output_tokens_per_s"),
    *(f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl", "e2el")),
}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors"}


def test_a_run_writes_all_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-prompts 12 --random-input-len 9 --random-output-len 4 --request-rate 60 --num-warmups 2"
    flags += " --goodput ttft:5000 tpot:5000 --metric-percentiles 50,99 --save-result --save-detailed"
    with Endpoint(ttft=0.02, gap=0.002, fail=7).running() as endpoint:
        status = bench(endpoint, *flags.split(), "--result-dir", str(tmp_path), "--metadata", "engine=toy")
    assert status == 0
    found = saved(tmp_path)
    assert set(found) >= VLLM_KEYS | DETAILS
    assert (found["completed"], found["failed"], found["engine"]) == (10, 2, "toy")
    assert found["total_input_tokens"] == 90 and found["total_output_tokens"] == 40
    assert found["slo_attainment"] == pytest.approx(10 / 12)
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert 20 <= found["median_ttft_ms"] < found["median_e2el_ms"] and found["median_tpot_ms"] >= 2
    assert [bool(error) for error in found["errors"]].count(True) == 2
    assert len(endpoint.bodies) == 14  # two warm-ups
    assert all(set(body["prompt"]) <= {10, 11, 12} for body in endpoint.bodies)  # tokens listed by /tokenize
    out = capsys.readouterr().out
    assert "time to first token" in out and "10 / 2" in out and "the queue is full" in out


def test_a_trace_with_classes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i},{i * 0.05},40,{3 + i % 3},{'0.001' if i % 4 == 0 else ''}\n" for i in range(12))
    trace.write_text("id,arrival_s,input_tokens,output_tokens,ttft_slo_s\n" + rows)
    flags = f"--trace {trace} --prompt-scale 4 --time-scale 0.5 --slo-class chat=1,ttft:4000,tpot:4000"
    with FAST.running() as endpoint:
        assert bench(endpoint, *flags.split(), "--save-result", "--result-dir", str(tmp_path)) == 0
    found = saved(tmp_path)
    assert found["num_prompts"] == 12 and found["prompt_scale"] == 4.0
    assert found["request_rate"] == pytest.approx(40, rel=0.01)
    assert found["slo_attainment"] == pytest.approx(9 / 12)
    assert found["slo_attainment_by_class"] == {"chat": 1.0}
    asked = [body.get("ttft_slo_ms") for body in sorted(endpoint.bodies[-12:], key=lambda body: len(body["prompt"]))]
    assert sorted(asked) == [1.0] * 3 + [4000.0] * 9


@pytest.mark.full
def test_find_goodput_finds_the_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # One request at a time, 20 ms each: 50/s. At two thirds of that, most waits meet the objective.
    flags = "--num-prompts 30 --random-input-len 4 --random-output-len 1 --request-rate 20 --ttft-slo 100ms"
    with Endpoint(ttft=0.02, gap=0.0, slots=1).running() as endpoint:
        command = [*flags.split(), "--find-goodput", "--save-result", "--result-dir", str(tmp_path)]
        assert bench(endpoint, *command) == 0
    found = saved(tmp_path)
    assert 15 < found["goodput_rate"] < 80
    assert found["slo_attainment"] >= 0.9
    rates = [probe["rate"] for probe in found["probes"]]
    assert rates[0] == 20.0 and found["goodput_rate"] in rates
    assert "on time up to" in capsys.readouterr().out


def test_chat_and_custom_prompts(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "one two three", "output_tokens": 3}\n')
    with FAST.running() as endpoint:
        flags = ["--backend", "jaxserve-chat", "--dataset-name", "custom", "--dataset-path", str(path)]
        assert bench(endpoint, *flags, "--num-prompts", "3", "--tpot-slo", "5s") == 0
        assert endpoint.bodies[-1]["messages"] == [{"role": "user", "content": "one two three"}]
        assert endpoint.bodies[-1]["tpot_slo_ms"] == 5000.0


STRICT = "--num-prompts 4 --random-input-len 40 --random-output-len 3 --ttft-slo 5s --slo-class a=1,tpot:5000"


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_openai_servers_get_standard_fields_and_text(backend: str, tmp_path: Path) -> None:
    flags = [*STRICT.split(), "--backend", backend, "--save-result", "--result-dir", str(tmp_path)]
    with StrictServer().running() as server:
        assert bench(server, *flags) == 0
    found = saved(tmp_path)
    assert (found["completed"], found["failed"]) == (4, 0)
    assert found["slo_attainment"] == 1.0, "objectives are evaluated though they are not sent"
    for body in server.bodies:
        text = body["messages"][0]["content"] if "chat" in backend else body["prompt"]
        assert len(text.split()) == 40


@pytest.mark.usefixtures("no_plots")
def test_a_tokenizer_makes_text_of_exact_lengths(repo: Path, tmp_path: Path) -> None:
    folder = repo / "jaxserve" / "demo" / "model"
    flags = f"--num-prompts 4 --random-input-len 40 --random-output-len 2 --tokenizer {folder} --save-result"
    with StrictServer().running() as server:
        command = [*flags.split(), "--backend", "openai", "--result-dir", str(tmp_path)]
        assert bench(server, *command) == 0
    encode = Tokenizer.load(folder).encode
    assert [len(encode(body["prompt"], False)) for body in server.bodies] == [40] * 4
    assert len({body["prompt"] for body in server.bodies}) == 4
    assert saved(tmp_path)["total_input_tokens"] == 160


def test_explicit_fields_are_sent_to_openai_servers() -> None:
    with Endpoint(ttft=0.0, gap=0.0).running() as endpoint:
        flags = ["--backend", "openai", "--ignore-eos", "--extra-body", '{"top_k": 3}']
        assert bench(endpoint, "--num-prompts", "1", *flags) == 0
    assert endpoint.bodies[0]["ignore_eos"] is True and endpoint.bodies[0]["top_k"] == 3


@pytest.mark.parametrize("backend", ["vllm", "jaxserve"])
def test_other_servers_get_their_own_fields(backend: str) -> None:
    with Endpoint(ttft=0.0, gap=0.0).running() as endpoint:
        assert bench(endpoint, *STRICT.split(), "--backend", backend) == 0
    for body in endpoint.bodies:
        assert body["ignore_eos"] is True and isinstance(body["prompt"], list)
        assert ("tpot_slo_ms" in body) is (backend == "jaxserve")


@pytest.mark.parametrize(("flag", "sent"), [("--goodput", False), ("--ttft-slo", True)])
def test_the_first_line_says_that_goodput_is_not_sent(
    flag: str, sent: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Endpoint(ttft=0.0, gap=0.0).running() as endpoint:
        assert bench(endpoint, "--num-prompts", "1", flag, "5s" if sent else "ttft:5000") == 0
    assert ("ttft_slo_ms" in endpoint.bodies[0]) is sent
    first = capsys.readouterr().out.splitlines()[0]
    assert "objectives are sent with requests" in first and ("use --ttft-slo" in first) is not sent


def test_without_tokenize_token_ids_are_guessed_or_given() -> None:
    with Endpoint(ttft=0.0, gap=0.0, tokenize=False).running() as endpoint:
        assert bench(endpoint, "--num-prompts", "2") == 0
        assert bench(endpoint, "--num-prompts", "2", "--random-ids", "7:9") == 0
    assert all(32 <= token < 256 for body in endpoint.bodies[:2] for token in body["prompt"])
    assert all(token in (7, 8) for body in endpoint.bodies[2:] for token in body["prompt"])


def test_status_is_1_if_no_request_succeeded(capsys: pytest.CaptureFixture[str]) -> None:
    with Endpoint(fail=1).running() as endpoint:
        assert bench(endpoint, "--num-prompts", "2") == 1
    assert "2 × " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--dataset-name trace", "--trace FILE"),
        ("--dataset-name custom", "--dataset-path FILE"),
        ("--dataset-name sharegpt", "needs --dataset-path FILE"),
        ("--dataset-name workload", "needs --workload NAME"),
        ("--dataset-name hf --dataset-path nowhere.json", "dataset_path='nowhere.json' is not a file"),
        ("--workload slos-serve-nothing", "slos-serve-nothing"),
        ("--workload K32 --request-rate 0", "request_rate=0.0 must be positive"),
        ("--workload K32 --trace x.csv", "--trace and --workload name two data sets"),
        ("--trace x.csv --dataset-name custom", "--trace and --dataset-name custom name two data sets"),
        ("--own-slowdown", "--own-slowdown needs --workload"),
        ("--num-runs 0", "num_runs=0 must be at least 1"),
        ("--num-runs 2 --find-goodput --goodput ttft:5", "num_runs=2 repeats a run"),
        ("--output-len 0", "output_len=0 must be at least 1"),
        ("--max-len 0", "max_len=0 must be at least 1"),
        ("--max-turns 0", "max_turns=0 must be at least 1"),
        ("--think-time=-1s", "think_time=-1 must be at least 0"),
        ("--slo-file nowhere.yaml", "slo_file='nowhere.yaml' is not a file"),
        ("--slo-file x.yaml --slo-class a=1,ttft:5", "both define classes"),
        ("--slo-class a=1,thinking:5 --backend openai", "stages, which the server judges"),
        ("--num-prompts 0", "num_prompts=0"),
        ("--metric-percentiles x", "metric_percentiles"),
        ("--goodput itl:5", "goodput"),
        ("--find-goodput", "objectives"),
        ("--request-rate 0", "request_rate"),
        ("--backend openai --random-ids 3:9", "sends prompts as text"),
        ("--backend openai --slo-class a=1,tier:batch", "--backend openai sends no objectives"),
        ("--tokenizer nowhere/at/all", "no tokenizer could be loaded"),
    ],
)
def test_invalid_arguments_are_one_line(flags: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FAST.running() as endpoint:
        assert bench(endpoint, *flags.split()) == 2
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--header x",
        "--extra-body [1]",
        "--extra-body {",
        "--random-ids 5",
        "--random-ids 9:3",
        "--slo-class chat",
        "--ttft-slo fast",
    ],
)
def test_flags_are_checked(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        jaxserve(["bench", *flags.split()])
    assert flags.split()[1] in capsys.readouterr().err


def test_an_unreachable_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with FAST.running() as endpoint:
        pass
    assert bench(endpoint) == 2
    assert "no OpenAI-compatible server responds" in capsys.readouterr().err


def test_the_commands_of_the_guide_are_parsed(repo: Path) -> None:
    pages = [repo / "README.md", *sorted((repo / "docs" / "guide").glob("*.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    commands = re.findall(r"(?m)^jaxserve bench (.*)$", text) + re.findall(r"(?m)^  jaxserve bench (.*)$", cli.EPILOG)
    assert len(commands) >= 4
    for command in commands:
        parser = TeachingParser()
        cli.add_arguments(parser)
        cli.plan_of(parser.parse_args(shlex.split(command)))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--metric-percentiles 101", "metric_percentiles=101 must be from 0 to 100"),
        ("--percentile-metrics ttft,speed", "unknown ['speed']"),
        ("--goodput speed:3", "goodput='speed:3'"),
        ("--save-result --result-dir {file}", "cannot be written: "),
        ("--save-result --result-dir {folder} --result-filename sub", "cannot be written: Is a directory"),
    ],
)
def test_what_would_lose_the_results_is_refused_first(
    flags: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("here")
    (tmp_path / "sub").mkdir()
    with Endpoint(ttft=0.0).running() as endpoint:
        assert bench(endpoint, *flags.format(file=tmp_path / "file", folder=tmp_path).split()) == 2
    assert named in capsys.readouterr().err and not endpoint.bodies


@pytest.mark.parametrize("more", ["", "--find-goodput --ttft-slo 5s --request-rate 1000", "--num-runs 3"])
@pytest.mark.parametrize("how", ["ctrl-c", "time limit"])
def test_a_run_that_is_cut_off_reports_what_there_is(
    how: str, more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Two requests end, the third never does."""
    if "--find-goodput" not in more:
        request.getfixturevalue("no_plots")

    def interrupt(number: int) -> None:
        if number == 3 and how == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)

    flags = f"--num-prompts 9 --random-output-len 1 --max-concurrency 1 --save-result --result-dir {tmp_path} {more}"
    if how == "time limit":
        flags += " --time-limit 300ms"
    with Hanging(ttft=0.0, gap=0.0, on_request=interrupt).running() as endpoint:
        assert bench(endpoint, *flags.split()) in ((130,) if how == "ctrl-c" else (0, 1))
    found = saved(tmp_path)
    assert found["completed"] <= 2 and found["failed"] == 0  # a slow machine has less when the time is over
    assert found["completed"] == 2 or how == "time limit"
    assert found["unanswered"] == 9 - found["completed"]
    assert f"stopped: {found['unanswered']} of 9 requests" in capsys.readouterr().out


class Hanging(Endpoint):
    """An endpoint that never answers the third request."""

    async def _stream(self, *given: Any) -> None:
        if len(self.bodies) == 3:
            await asyncio.sleep(3600)
        await super()._stream(*given)
