"""`jaxserve bench` against a server that accepts OpenAI's fields and texts only."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from jaxserve.bench import backends, result
from jaxserve.bench.client import Outcome, refusal
from jaxserve.bench.drive import NOT_SENT
from jaxserve.bench.load import Call
from jaxserve.cli.main import main as jaxserve
from jaxserve.tokenizer import Tokenizer
from tests.support.bench.endpoint import Endpoint
from tests.support.bench.strict_server import StrictServer

pytestmark = pytest.mark.usefixtures("no_plots")
SMALL = "--num-prompts 3 --random-input-len 12 --random-output-len 4"


def bench(url: str, *flags: str, out: Path | None = None) -> int:
    saving = ["--save-result", "--result-dir", str(out), "--result-filename", "r.json"] if out else []
    return jaxserve(["bench", "--base-url", url, *SMALL.split(), *flags, *saving])


def read(out: Path) -> dict[str, Any]:
    found = json.loads((out / "r.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("completions", [True, False])
def test_an_unknown_server_gets_what_it_takes_without_a_flag(
    completions: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StrictServer(completions=completions).running() as server:
        assert bench(server.url, "--ttft-slo", "5s", out=tmp_path) == 0
    name = "openai" if completions else "openai-chat"
    assert f"backend {name} (standard fields and text)" in capsys.readouterr().out
    found = read(tmp_path)
    assert (found["backend"], found["completed"], found["failed"]) == (name, 3, 0)
    assert found["slo_attainment"] == 1.0 and found["total_output_tokens"] == 12


@pytest.mark.parametrize(
    ("owner", "chat", "chosen"),
    [
        ("jaxserve", False, "jaxserve"),
        ("vllm", False, "vllm"),
        ("sglang", True, "sglang-chat"),
        ("llamacpp", False, "openai"),
        ("", True, "openai-chat"),
    ],
)
def test_the_owner_of_a_model_tells_the_backend(owner: str, chat: bool, chosen: str) -> None:
    assert backends.choose({"owned_by": owner}, completions=True, chat=chat) == chosen
    assert chosen in backends.BACKENDS


def test_a_forced_backend_shows_the_servers_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    with StrictServer().running() as server:
        assert bench(server.url, "--backend", "vllm") == 1
    out = capsys.readouterr().out
    assert "3 × HTTP 422: body.prompt: Input should be a valid string" in out
    assert "body.ignore_eos: Extra inputs are not permitted" in out


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ('{"error": {"message": "no such model", "code": 1}}', "HTTP 400: no such model"),
        ('{"error": "busy"}', "HTTP 400: busy"),
        ('{"detail": "Not Found"}', "HTTP 400: Not Found"),
        ('{"detail": [{"loc": ["body", "n"], "msg": "bad"}]}', "HTTP 400: body.n: bad"),
        ("<html>gateway</html>", "HTTP 400: <html>gateway</html>"),
        ("", "HTTP 400"),
        ("[3]", "HTTP 400: [3]"),
    ],
)
def test_error_bodies_of_every_form_are_read(body: str, shown: str) -> None:
    assert refusal(400, body) == shown


def test_tokens_are_counted_by_the_tokenizer_where_the_server_does_not(repo: Path, tmp_path: Path) -> None:
    folder = repo / "jaxserve" / "demo" / "model"
    with StrictServer().running() as server:
        assert bench(server.url, "--tokenizer", str(folder), out=tmp_path) == 0
    tokens = len(Tokenizer.load(folder).encode("w0 w1 w2 w3 ", False))
    found = read(tmp_path)
    assert tokens > 4
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (36, 3 * tokens)


def test_a_conversation_grows_by_the_servers_answers(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "one"}]
    messages += [{"role": "assistant", "content": "never said"}, {"role": "user", "content": "two"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    flags = ["--dataset-name", "multi-turn", "--dataset-path", str(path), "--num-prompts", "1", "--output-len", "2"]
    with StrictServer().running() as server:
        assert bench(server.url, *flags, "--think-time", "1ms", out=tmp_path) == 0
        assert bench(server.url, *flags, "--backend", "openai") == 0
    said = [[(one["role"], one["content"]) for one in body["messages"]] for body in server.bodies[:2]]
    start = [("system", "short"), ("user", "one")]
    assert said == [start, [*start, ("assistant", "w0 w1 "), ("user", "two")]]
    assert [body["prompt"] for body in server.bodies[2:]] == ["short\none", "short\none\nw0 w1 \ntwo"]
    assert (read(tmp_path)["dataset_name"], read(tmp_path)["num_prompts"]) == ("multi-turn", 2)


def test_turns_after_a_refused_one_are_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": text} for text in "abc"]}))
    flags = ["--dataset-name", "multi-turn", "--dataset-path", str(path), "--num-prompts", "1"]
    with StrictServer(refuse=2).running() as server:
        assert bench(server.url, *flags) == 0
    assert len(server.bodies) == 2
    out = capsys.readouterr().out
    assert "HTTP 429: too many requests of you" in out and NOT_SENT in out


def test_stages_are_judged_where_the_stream_tells_them(tmp_path: Path) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("classes: {reason: {ttft: 9s, stages: {thinking: {tpot: 8s}, answer: {tpot: 1us}}}}")
    with StrictServer(completions=False, thinks=True).running() as server:
        assert bench(server.url, "--slo-file", str(slo), out=tmp_path) == 0
    one = read(tmp_path)["by_class"]["reason"]
    assert one["slo_attainment_by_metric"] == {"answer": 0.0, "thinking": 1.0, "ttft": 1.0}
    assert one["slos_ms"] == {"ttft": 9000.0, "thinking": 8000.0, "answer": pytest.approx(0.001)}


def test_the_gap_before_the_first_answer_token_is_the_answers() -> None:
    outcome = Outcome(Call(0.0, "x", 1, 5), 0.0, 1.0, 1.6, [0.1, 0.3, 0.1, 0.1], 1, 5, thoughts=2)
    assert result.milliseconds(outcome, "thinking") == pytest.approx(100.0)
    assert result.milliseconds(outcome, "answer") == pytest.approx(500 / 3)
    twice = Outcome(Call(0.0, "x", 1, 10), 0.0, 1.0, 1.6, [0.1, 0.3, 0.1, 0.1], 1, 10, thoughts=2)
    assert result.milliseconds(twice, "thinking") == pytest.approx(50.0), "a chunk of two tokens"
    planned = Outcome(Call(0.0, "x", 1, 5, thinking_tokens=3), 0.0, 1.0, 1.6, [0.1] * 4, 1, 5)
    assert result.thoughts(planned) == 3


def test_classes_have_rows_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("classes: {chat: {share: 2, ttft: 5s, tbt: 9s}, night: {best_effort: true}}")
    with StrictServer().running() as server:
        assert bench(server.url, "--slo-file", str(slo), "--num-prompts", "12", out=tmp_path) == 0
    classes = read(tmp_path)["by_class"]
    assert classes["chat"]["requests"] + classes["night"]["requests"] == 12
    assert classes["chat"]["slo_attainment"] == 1.0 and classes["night"]["slo_attainment"] is None
    assert classes["night"]["tier"] == "best_effort"
    assert 0 < classes["chat"]["p50_ttft_ms"] <= classes["chat"]["p99_ttft_ms"]
    assert "by class" in capsys.readouterr().out


def test_a_scenario_sends_its_rounds_in_order(tmp_path: Path) -> None:
    flags = "--workload slos-serve-toolllm --request-rate 40 --prompt-scale 40 --output-scale 40 --num-prompts 3"
    with Endpoint(ttft=0.0, gap=0.0).running() as server:
        assert bench(server.url, *flags.split(), "--own-slowdown", "--seed", "24", out=tmp_path) == 0
    found = read(tmp_path)
    assert found["workload"] == "slos-serve-toolllm" and found["num_prompts"] > 3
    assert found["by_class"]["toolllm"]["requests"] == found["num_prompts"]
    assert all(body["ttft_slo_ms"] > 0 and body["tpot_slo_ms"] in (50.0, 100.0) for body in server.bodies[6:])


def test_runs_are_repeated_with_other_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StrictServer().running() as server:
        assert bench(server.url, "--num-runs", "3", out=tmp_path) == 0
    found = read(tmp_path)
    assert len({body["prompt"] for body in server.bodies}) == 9
    assert found["num_runs"] == len(found["runs"]) == 3
    assert found["median_ttft_ms"] == pytest.approx(sum(one["median_ttft_ms"] for one in found["runs"]) / 3)
    assert "3 runs" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [[{"id": "strict"}], [], None, 3, "strict", {"data": 3}, {"data": {"id": "strict"}}])
def test_odd_answers_about_models_give_a_name_or_one_line(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with StrictServer(listed=answer).running() as server:
        if answer == [{"id": "strict"}]:
            assert bench(server.url) == 0
        else:
            assert bench(server.url) == 2
            assert "lists no model: set --model" in capsys.readouterr().err


def test_a_list_of_models_that_is_no_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Nested(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[" * 100_000)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Nested) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        assert jaxserve(["chat", "--url", f"http://127.0.0.1:{server.server_address[1]}"]) == 2
        server.shutdown()
        thread.join()
    assert "nested too deeply" in capsys.readouterr().err


def test_a_server_without_models_needs_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    with StrictServer(models=False).running() as server:
        assert bench(server.url) == 2
        assert "lists no model: set --model" in capsys.readouterr().err
        assert bench(server.url, "--model", "mine") == 0
    assert {body["model"] for body in server.bodies} == {"mine"}
