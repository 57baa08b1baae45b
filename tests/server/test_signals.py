"""Signals end a server even if it hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


HUNG = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from double import Double
import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.server import main
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer

class Hung(Double):
    def close(self):
        return False

def start(config, told):
    threading.Thread(target=threading.Event().wait).start()  # alone it would keep the interpreter for ever
    return Service(Hung(), Tokenizer.load(jaxserve.demo.model_path()), config)

main.start_service = start
sys.exit(main.run(ServeConfig.load(port=0, api_server_count=0, disable_log_stats=True)))
"""


def test_an_engine_that_does_not_close_does_not_block_the_exit(repo: Path) -> None:
    command = [sys.executable, "-c", HUNG, str(repo / "tests" / "support" / "server")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("jaxserve is ready" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(50) == 1
        finally:
            process.kill()
