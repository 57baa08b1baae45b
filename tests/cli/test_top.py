"""`jaxserve top` on the metrics of vLLM and of jaxserve."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf, isnan
from threading import Thread

import pytest
from rich.console import Console

from jaxserve.cli.main import main
from jaxserve.cli.top.command import Away, Reader, Screen, _title
from jaxserve.cli.top.sample import Histogram, Interval, Sample
from jaxserve.cli.top.view import view
from jaxserve.errors import InvalidValue
from tests.support.pty import terminal
from tests.support.timing import PATIENCE


def histogram(name: str, counts: dict[str, int], total: float, labels: str = "") -> str:
    """Return a histogram of cumulative counts by bound."""
    lines = [f'{name}_bucket{{le="{bound}"{labels and ","}{labels}}} {count}' for bound, count in counts.items()]
    given = f"{{{labels}}}" if labels else ""
    return "\n".join([f"# TYPE {name} histogram", *lines, f"{name}_sum{given} {total}",
                      f"{name}_count{given} {counts['+Inf']}", ""])  # fmt: skip


def vllm(ended: int = 0, running: int = 3) -> str:
    """Return metrics as vLLM writes them, after a number of requests with TTFTs of 0.1 to 0.25 s."""
    label = 'engine="0",model_name="Qwen/Qwen3-8B"'
    text = f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{label}}} {running}.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{label}}} 7.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{label}}} 0.25
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{{label}}} {1000 * ended}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{{label}}} {50 * ended}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{{label},finished_reason="stop"}} {ended}
vllm:request_success_total{{{label},finished_reason="length"}} 0.0
"""
    counts = {"0.1": 0, "0.25": ended, "0.5": ended, "+Inf": ended}
    text += histogram("vllm:time_to_first_token_seconds", counts, 0.2 * ended, label)
    return text + histogram("vllm:inter_token_latency_seconds", {"0.01": 0, "0.025": ended, "+Inf": ended}, 1, label)


def jaxserve(ended: int = 0, late: int = 0, started: float = 1.0) -> str:
    """Return metrics of two jaxserve instances; of the interactive requests that ended some were late."""
    roles = ("prefill-0", "decode-1")
    gauges = {"num_requests_running": 2, "num_requests_waiting": 5, "kv_cache_usage_perc": 0.5,
              "prefill_backlog_tokens": 900, "prefill_queue_seconds": 0.25, "instance_slack_seconds": -0.5}  # fmt: skip
    lines = [f'jaxserve:{name}{{engine="{role}",model_name="m"}} {value}' for name, value in gauges.items()
             for role in roles]  # fmt: skip
    for phase, missed in (("all", late), ("ttft", late), ("tpot", 0)):
        for name, count in (("interactive", ended), ("\x1b[31mbatch", 0)):
            labels = f'phase="{phase}",slo_class="{name}",model_name="m"'
            lines.append(f"jaxserve:slo_requests_total{{{labels}}} {count}")
            lines.append(f"jaxserve:slo_attained_total{{{labels}}} {count and count - missed}")
    lines += ['jaxserve:slo_seconds{objective="ttft"} 2.0', 'jaxserve:slo_seconds{objective="tpot"} 0.05',
              'jaxserve:ready{model_name="m"} 0', f"process_start_time_seconds {started}",
              f'jaxserve:predicted_ttft_seconds_count{{path="prefill"}} {ended}',
              f'jaxserve:predicted_ttft_seconds_sum{{path="prefill"}} {0.3 * ended}']  # fmt: skip
    counts = {"0.5": ended - late, "1.0": ended - late, "+Inf": ended}
    return "\n".join(lines) + "\n" + histogram("jaxserve:time_to_first_token_seconds", counts, 0.4 * ended)


def shown(now: str, before: str | None = None, width: int = 200, seconds: float = 2.0) -> str:
    """Return the tables of an interval as text."""
    file = io.StringIO()
    console = Console(file=file, width=width)
    console.print(view(Interval(Sample(now, seconds), None if before is None else Sample(before, 0.0)), console))
    return file.getvalue()


def cells(text: str, first: str) -> list[str]:
    """Return the cells of the row that begins so."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [first])


def test_a_quantile_is_even_within_its_bucket() -> None:
    found = Histogram(10, 4.0, {0.1: 0, 0.3: 5, 0.5: 9, inf: 10})
    assert (found.quantile(0.5), found.mean, found.last) == (pytest.approx(0.3), 0.4, 0.5)
    assert found.quantile(0.7) == pytest.approx(0.4) and found.quantile(0.95) == inf
    assert isnan(Histogram(0, 0.0, {0.1: 0, inf: 0}).quantile(0.5)) and isnan(Histogram(0, 0.0, {}).mean)


def test_a_vllm_server_has_load_and_latency_of_the_interval() -> None:
    text = shown(vllm(ended=110), vllm(ended=100))
    assert cells(text, "3") == ["3", "7", "25.0%", "5", "5,000", "250", "–", "–"]
    assert cells(text, "TTFT") == ["TTFT", "175", "ms", "243", "ms", "200", "ms", "10"]
    assert cells(text, "TPOT")[1:3] == ["17.5", "ms"]
    assert "instance" not in text and "attained" not in text and "SLO" not in text


def test_a_jaxserve_server_has_instances_attainment_and_predictions() -> None:
    text = shown(jaxserve(ended=30, late=8), jaxserve(ended=10, late=3))
    assert cells(text, "prefill-0") == ["prefill-0", "2", "5", "50.0%", "900", "250", "ms", "-500", "ms"]
    assert cells(text, "interactive") == ["interactive", "75.0%", "75.0%", "100%", "20"]
    assert cells(text, "TTFT") == ["TTFT", "333", "ms", ">", "1.00", "s", "400", "ms", "20", "2.00", "s", "300", "ms"]
    assert "batch" not in text, "none of that class ended"
    assert "␛[31mbatch" in shown(jaxserve(1).replace('batch",model_name="m"} 0', 'batch",model_name="m"} 4'))


def test_a_server_that_started_again_is_counted_from_its_start() -> None:
    assert cells(shown(vllm(ended=4), vllm(ended=100)), "TTFT")[-1] == "4"
    again = shown(jaxserve(ended=40, started=9.0), jaxserve(ended=10))
    assert cells(again, "interactive")[-1] == "40", "also where its counters have passed the old ones"


@pytest.mark.parametrize("width", range(30, 120, 10))
def test_a_narrow_terminal_keeps_what_matters_most(width: int) -> None:
    text = shown(jaxserve(ended=30, late=8), jaxserve(ended=10), width)
    assert all(len(line) <= width for line in text.splitlines())
    heads = [line.split()[0] for line in text.splitlines() if line[:2] not in ("", "  ", " ─")]
    assert {"running", "latency", "instance", "class"} <= set(heads)
    assert "p95" in text and "attained" in text
    if width >= 40:
        assert "…" not in text


@pytest.mark.parametrize("text", ["", "<html>", "a{", "process_cpu_seconds_total 3\n"])
def test_what_is_no_metrics_of_vllms_names_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        Sample(text, 0.0)


def test_a_server_that_starts_is_named_as_such() -> None:
    with pytest.raises(InvalidValue, match="the model is not ready yet"):
        Sample('process_cpu_seconds_total 1\njaxserve:ready{model_name="m"} 0.0\n', 0.0)


class Pages:
    """What a small server answers: the last page stays. Writer: the test."""

    def __init__(self, *pages: str) -> None:
        self.pages = list(pages)
        self.url = ""
        self.keys: list[str | None] = []


@contextmanager
def answering(*pages: str) -> Iterator[Pages]:
    made = Pages(*pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.keys.append(self.headers["Authorization"])
            page = made.pages.pop(0) if len(made.pages) > 1 else made.pages[0]
            self.send_response(200 if page else 401)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield made
        server.shutdown()
        thread.join()


def test_once_prints_one_table_or_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["top", "--once", "--interval", "0.01", "--api-key", "k", "--url"]
    with answering(vllm(ended=100), vllm(ended=110)) as pages:
        assert main([*asked, pages.url]) == 0
        printed = capsys.readouterr().out
        assert f"Qwen/Qwen3-8B at {pages.url}, last " in printed and pages.keys == ["Bearer k"] * 2
        pages.pages[:] = [""]
        assert main([*asked, pages.url]) == 1
    assert "/metrics answers HTTP 401: set --api-key" in capsys.readouterr().err
    assert main([*asked, pages.url]) == 1 and pages.url in capsys.readouterr().err
    assert main(["top", "--once", "--interval", "0"]) == 2 and "must be above 0" in capsys.readouterr().err


def test_names_are_lines_and_tables_end() -> None:
    many = "".join(f'vllm:num_requests_running{{engine="e{n}",model_name="m{n}"}} 1\n' for n in range(2000))
    text = shown(many)
    assert cells(text, "e0") == ["e0", "1", "–", "–"] and len(text.splitlines()) < 300
    forged = shown('vllm:num_requests_running{engine="a\\nb"} 1\nvllm:num_requests_running{engine="c"} 1\n')
    assert cells(forged, "a␊b") and cells(forged, "c")
    title = _title("x", Interval(Sample(many + 'vllm:num_requests_running{model_name="a\\nb"} 1\n', 0.0)), False).plain
    assert title == "m0, m1, m2, m3 and 1997 more at x, since start"


def test_an_error_repeats_the_beginning_of_what_is_wrong() -> None:
    with pytest.raises(InvalidValue) as error:
        Sample("x" * 100_000, 0.0)
    assert len(str(error.value)) < 300


def test_a_key_leaves_a_server_that_does_not_answer() -> None:
    class Silent(Reader):
        async def read(self) -> Sample:
            await asyncio.Event().wait()
            raise AssertionError

    async def leave() -> None:
        screen = Screen(Silent("x", "none"), 2.0, Console(file=io.StringIO()))
        asyncio.get_running_loop().call_soon(screen.press, "q")
        await asyncio.wait_for(screen.look_or_leave(), PATIENCE)

    asyncio.run(leave())


def test_a_server_that_is_away_is_shown_as_such_and_comes_back() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100)

    async def looks() -> None:
        with answering(vllm(ended=100), vllm(ended=110)) as pages:
            screen = Screen(Reader(pages.url, "none"), 2.0, console)
            for page in (None, vllm(ended=110), "", vllm(ended=120)):
                pages.pages[:] = pages.pages if page is None else [page]
                await screen.look()
                console.print(screen.draw())
        with pytest.raises(Away):
            await Reader(pages.url, "none").read()

    asyncio.run(looks())
    first, second, away, back = file.getvalue().split("every 2 s")[:4]
    assert "since start" in first and "last 0." in second
    assert "is away: /metrics answers HTTP 401" in away and "next try in 2 s" in away
    assert cells(away, "TTFT") == cells(second, "TTFT"), "the last tables stay"
    assert "away" not in back and "TTFT" in back


def test_keys_change_what_is_shown_and_leave() -> None:
    with answering(jaxserve(ended=5)) as pages, terminal("top", "--url", pages.url, "--interval", "500ms") as screen:
        screen.until("prefill-0")
        screen.until("every 0.5 s")
        screen.type("+")
        screen.until("every 1 s")
        screen.type(" ")
        screen.until("paused")
        screen.type("s")
        screen.until("since start")
        screen.type("q")
        assert screen.status() == 0
