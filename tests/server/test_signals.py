"""Signals end a server even if it hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
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
    if %r:
        one.served()
    print("ready", flush=True)
    threading.Event().wait(60)
"""


@pytest.fixture(params=[False])
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that handles signals and hangs; with the parameter True, its server has ended and closing hangs."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT % request.param], stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None and made.stdout.readline() == "ready\n"
        yield made
        made.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_signal_ends_a_hung_process(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert line(process) == "drain"
    process.send_signal(signal.SIGTERM)
    assert line(process) == "now"
    assert process.wait(50) == 128 + signal.SIGTERM


def test_a_third_signal_ends_it_at_once(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    assert line(process) == "now"
    process.send_signal(signal.SIGINT)
    assert line(process) == "now"
    process.send_signal(signal.SIGINT)
    assert process.wait(50) == 128 + signal.SIGINT


@pytest.mark.parametrize("process", [True], indirect=True)
def test_a_signal_ends_a_process_that_hangs_while_closing(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(50) == 128 + signal.SIGTERM
