"""Take the pictures of docs/guide/dashboard.md: `.ci/browser --pictures`, some minutes.

They show a server of the demo model under load, its journal, and a simulation, so no two runs are alike.
A picture with an empty plot is an error.
"""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.browser import Page

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
WIDTH = 1100
COLORS = 128  # the most frequent ones
PLOTS = ("#plot-attainment path.line", "#plot-slack path.line", "#plot-ttft circle", "#plot-tokens path.line")
TIERS = "tiers: {interactive: {ttft: 2s, tpot: 300ms}, batch: {ttft: 60s, tpot: 1s}}"  # also for a slow machine
CLASSES = (
    "--slo-class chat=0.5,tier:interactive,ttft:2000,tpot:300 --slo-class batch=0.25,tier:batch,ttft:60000,tpot:1000"
)
LOAD = f"""bench --num-prompts 500 --request-rate 12 --random-input-len 120 --random-output-len 40
  {CLASSES} --slo-class custom=0.25,ttft:200,tpot:100"""
SIMULATION = "simulate --policy unified --workload flowprefill-llama3-8b --latency llama3-8b-a800 --mesh 2x1 --qps 7"
Run = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def run() -> Iterator[Run]:
    """Start a command of jaxserve; it is interrupted at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(text: str, *more: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-m", "jaxserve", *text.split(), *more]))
        return started[-1]

    yield start
    for one in started:
        end(one)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command, as Ctrl-C does."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.wait(60)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def reached(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait longer than tests do: a start compiles programs."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.5)


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


def save(page: Page, name: str, height: int) -> None:
    """Save what the page shows as an image of few colors."""
    page.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    page.size(WIDTH, height)
    shot = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    ranked: list[Any] = sorted(shot.getcolors(1 << 24) or [], reverse=True)[:COLORS]
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for _, color in ranked for value in color])
    shot.quantize(palette=palette, dither=Image.Dither.NONE).save(FOLDER / f"dashboard-{name}.png", optimize=True)


def played(page: Page, url: str, name: str) -> None:
    """Save a recorded run, two thirds through."""
    reached(lambda: answers(url))
    page.open(url)
    page.run("moment.value = Math.round(2 * moment.max / 3); moment.dispatchEvent(new Event('input'))")
    assert all(page.all(plot) for plot in PLOTS)
    save(page, name, 980)


def test_simulation(page: Page, run: Run) -> None:
    port = str(free_port())
    run(f"{SIMULATION} --num-requests 400 --dashboard {port}")
    played(page, f"http://127.0.0.1:{port}/", "simulation")


@pytest.mark.timeout(0)
def test_server_and_journal(page: Page, run: Run, tmp_path: Path) -> None:
    page.size(WIDTH, 980)
    journal, port = str(tmp_path / "run.jsonl"), str(free_port())
    url = f"http://127.0.0.1:{port}"
    tiers = tmp_path / "tiers.yaml"
    tiers.write_text(TIERS)
    server = run("serve --mesh 2x1 --policy unified --slo-tiers", str(tiers), "--port", port, "--journal", journal)
    reached(lambda: answers(f"{url}/health"))
    page.open(url)
    page.run("document.querySelector('#max-tokens').value = 40")
    page.say("How do I join two paths?")
    page.get("#document-form button").click()
    page.say("And how do I split one?")
    reached(lambda: "on time" in page.text("#document-log .kept") or "late" in page.text("#document-log .kept"))
    save(page, "chat", 660)

    page.choose("live")
    load = run(LOAD, "--base-url", url)
    reached(lambda: len(page.all("#plot-ttft circle")) > 150)
    assert all(page.all(plot) for plot in PLOTS) and load.poll() is None
    save(page, "live", 980)
    assert load.wait(300) == 0

    page.choose("requests")
    page.get("#late-only").click()
    listed = httpx.get(f"{url}/v1/requests?limit=200").json()["data"]
    late = [one["id"] for one in listed if not one["attained"] and one["tier"] == "best_effort"]
    told = {id: httpx.get(f"{url}/v1/requests/{id}").json()["lines"] for id in late[:20]}
    shortest = min(told, key=lambda id: len("".join(told[id])))
    page.run(f"document.querySelector('#ended-requests button[data-request=\"{shortest}\"]').click()")
    reached(lambda: page.all("#timeline rect") and "became best effort" in page.text("#words-of"))
    page.size(WIDTH, 600)
    page.run("document.querySelector('tr.chosen').scrollIntoView({block: 'center'}); scrollTo(0, 0)")
    save(page, "requests", 600)
    end(server)

    port = str(free_port())
    run(f"replay {journal} --no-simulate --dashboard {port}")
    played(page, f"http://127.0.0.1:{port}/", "journal")
