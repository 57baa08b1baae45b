"""Signals end a server whatever hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

SCRIPT = """
import threading
from jaxserve.server import signals

class Loop:
    def call_soon_threadsafe(self, heard):
        heard()

signals.GRACE = 0.5
one = signals.Signals()
with one.handled():
    one.serve(Loop(), lambda: print("drain", flush=True), lambda: print("now", flush=True))
    print("ready", flush=True)
    if %r:
        one.served()
    threading.Event().wait(60)
"""


@pytest.fixture(params=[False])
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that hears signals and hangs; with the parameter True its server is over, and what hangs is closed."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT % request.param], stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None and made.stdout.readline() == "ready\n"
        yield made
        made.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_signal_ends_the_process_though_all_hangs(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert line(process) == "drain"
    process.send_signal(signal.SIGTERM)
    assert line(process) == "now"
    began = time.monotonic()
    assert process.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 5


def test_a_third_signal_ends_it_at_once(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    assert line(process) == "now"
    process.send_signal(signal.SIGINT)
    assert line(process) == "now"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGINT


@pytest.mark.parametrize("process", [True], indirect=True)
def test_a_signal_ends_what_hangs_while_it_is_closed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
