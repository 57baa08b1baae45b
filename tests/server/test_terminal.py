"""`jaxserve chat` and `jaxserve top` with a real engine."""

from __future__ import annotations

import io
import re

import pytest

from jaxserve.cli.main import main
from tests.support.server.live import MODEL, Live


def test_an_answer_has_its_times_beside_what_was_promised_and_top_counts_it(
    live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a queue?"))
    words = ["chat", "--url", live.url, "--ttft-slo", "90s", "--tpot-slo", "80s", "--max-tokens", "8"]
    assert main([*words, "--temperature", "0"]) == 0
    said = capsys.readouterr()
    assert said.out.strip() and re.search(r"TTFT .* of 90\.00 s promised +TPOT .* of 80\.00 s promised", said.err)

    assert main(["top", "--once", "--interval", "0.05", "--url", live.url]) == 0
    printed = capsys.readouterr().out
    assert f"{MODEL} at {live.url}" in printed and "default SLO" in printed
    assert re.search(r"^ prefill-0 +0 +0 ", printed, re.M) and re.search(r"^ decode-1 +0 +0 ", printed, re.M)
