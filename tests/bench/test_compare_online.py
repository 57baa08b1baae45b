"""The HTTP part of benchmarks/compare.py: requests sent, and figures of the results."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from argparse import Namespace
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.client import Outcome
from jaxserve.bench.load import Call, Objective
from tests.support.bench.endpoint import Endpoint

VOCABULARY = range(16, 400)


@pytest.fixture
def online(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    from compare_bench import online

    return online


def test_the_load_has_half_of_each_class_and_depends_on_the_seed_only(online: Any) -> None:
    calls = online.mixed(41, 2.0, 7, 3.0, VOCABULARY)
    assert calls == online.mixed(41, 2.0, 7, 3.0, VOCABULARY) != online.mixed(41, 2.0, 8, 3.0, VOCABULARY)
    assert [call.at for call in calls] == sorted(call.at for call in calls)
    assert calls[-1].at == pytest.approx(len(calls) / 2.0)
    for one, slo in zip(online.CLASSES, ((1500, 180), (24000, 600)), strict=True):
        mine = [call for call in calls if call.slo.name == one.name]
        assert len(mine) == 21, "an odd number is rounded up"
        assert all(one.prompt[0] <= len(call.prompt) == call.prompt_tokens <= one.prompt[1] for call in mine)
        assert all(one.output[0] <= call.output_tokens <= one.output[1] for call in mine)
        assert {(call.slo.ttft_slo_ms, call.slo.tpot_slo_ms) for call in mine} == {slo}
    assert {call.at for call in online.mixed(4, inf, 7, 1.0, VOCABULARY)} == {0.0}


def test_figures_of_a_server_with_known_delays(online: Any) -> None:
    with Endpoint(ttft=0.05, gap=0.002, fail=5).running() as endpoint:
        calls = online.mixed(10, 100.0, 0, 100.0, VOCABULARY)
        outcomes = asyncio.run(online.send(endpoint.url, "toy", calls)).outcomes
    rows = {row["class"]: row for row in online.by_class(outcomes)}
    chat, documents, whole = (rows[name] for name in ("chat", "documents", "all"))
    for name in ("requests", "failed", "output_tokens"):
        assert chat[name] + documents[name] == whole[name]
    assert (whole["requests"], whole["failed"], whole["attained"]) == (10, 2, 0.8)
    assert whole["output_tokens"] == sum(one.call.output_tokens for one in outcomes if one.ok)
    assert 50 <= whole["ttft_p50_ms"] <= whole["ttft_p99_ms"] and 2 <= whole["tpot_p50_ms"] <= whole["tpot_p99_ms"]
    body = endpoint.bodies[0]
    assert body["ignore_eos"] and body["temperature"] == 0 and {"ttft_slo_ms", "tpot_slo_ms"} <= set(body)


def test_a_request_attains_if_it_meets_both_objectives(online: Any) -> None:
    call = Call(0.0, (1, 2), 2, 3, Objective(100.0, 10.0, "chat"))
    times = [(0.09, 0.108), (0.11, 0.12), (0.09, 0.12)]  # seconds of TTFT and latency: on time, late, slow
    outcomes = [Outcome(call, ttft=ttft, latency=latency, output_tokens=3) for ttft, latency in times]
    assert online.figures(outcomes)["attained"] == pytest.approx(1 / 3)
    failed = online.figures([Outcome(call, error="HTTP 503")])
    assert (failed["failed"], failed["attained"], failed["ttft_p50_ms"]) == (1, 0.0, None)


def test_memory_is_that_of_the_process_tree(online: Any) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert set(online.process_tree(child.pid)) == {child.pid} < set(online.process_tree(os.getpid()))
        assert online.peak_memory(os.getpid()) > online.peak_memory(child.pid) >= 0
    finally:
        child.communicate(b"\n")


def test_the_llama_cpp_server_gets_a_converted_file(
    online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online.gguf_file, "write", lambda folder, path: path.write_bytes(b"GGUF") and path)
    args = Namespace(python={}, server={"llamacpp": "llama-server"}, threads=3)
    with ExitStack() as stack:
        program, *flags = online.command_of("llamacpp", tmp_path, args, stack)
        values = dict(zip(flags[::2], flags[1::2], strict=False))
        weights = Path(values["--model"])
        assert weights.read_bytes() == b"GGUF"
    assert not weights.exists() and program == "llama-server"
    longest = max(one.prompt[1] + one.output[1] for one in online.CLASSES)
    assert int(values["--ctx-size"]) // int(values["--parallel"]) >= longest, "a slot fits any request of the load"
    assert values["--threads"] == "3" and "--no-cache-prompt" in flags


def test_sides_that_cannot_start_give_a_reason(online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "llama-server")
    monkeypatch.setattr(online.gguf_file, "write", lambda folder, path: path)
    for server in ({}, {"llamacpp": missing}):
        args = Namespace(python={}, server=server, threads=1, starts=1, sides=["llamacpp", "transformers"])
        with ExitStack() as stack, pytest.raises(RuntimeError, match="no side starts") as failure:
            online.started(tmp_path, args, stack)
        assert str(tmp_path) not in str(failure.value)
        assert ("No such file" if server else "--server llamacpp=FILE is missing") in str(failure.value)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_compare_http(repo: Path, tmp_path: Path) -> None:
    """Run the demo model's server through to the table; sides without a server, or that fail to start, are left out."""
    path = tmp_path / "compare.json"
    flags = "--http --sides jaxserve transformers vllm --models demo --rates 0.25 0.5 --duration 2 --repeats 1"
    command = [sys.executable, "-W", "error", "benchmarks/compare.py", *flags.split(), "--starts", "1"]
    command += ["--python", f"vllm={sys.executable}", "--output", str(path)]  # this interpreter has no vLLM
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(path.read_text())["models"]
    assert set(found["left_out"]) == {"transformers", "vllm"} and "No module named" in found["left_out"]["vllm"]
    assert "transformers is left out" in done.stdout and "vllm is left out" in done.stdout
    assert [(row["rate"], row["class"]) for row in found["online"]] == [
        (rate, name) for rate in (2.0, 4.0) for name in ("chat", "documents", "all")
    ]
    assert all(row["failed"] == 0 < row["ttft_p50_ms"] and 0 <= row["attained"] <= 1 for row in found["online"])
    server = found["servers"]["jaxserve"]
    assert len(server["start_s"]) == 1 and server["start_s"][0] > 0 and server["memory"] > 1e8
