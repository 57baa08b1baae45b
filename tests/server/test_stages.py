"""Stages of an output over HTTP on a real engine: the end of thinking, and the objective of each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.config import ServeConfig
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import ANSWER, THINKING
from jaxserve.sched.api.thinking import Marker, ThinkingMarkers

TURN, OPEN = 5, 6  # tokens that begin a turn and thinking
TOKENS = 16
STAGES = {"thinking": {"tpot_slo_ms": 2000}, "answer": {"tpot_slo_ms": 9000}}


@pytest.fixture
def requests(live, monkeypatch) -> Iterator[list[Request]]:
    """The engine's requests that end during the test."""
    made: list[Request] = []
    finished = live.engine._cluster._finished
    monkeypatch.setattr(live.engine._cluster, "_finished", lambda one: (made.append(one), finished(one)))
    yield made


def ask(live: Any, prompt: list[int], **more: Any) -> None:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 2.0, "seed": 3, "ignore_eos": True}
    answer = live.http.post("/v1/completions", json={**body, **more})
    assert answer.status_code == 200, answer.text
    live.quiet()


def served(live: Any, monkeypatch: Any, closes: Marker) -> None:
    """Configure `closes` as the end of thinking of this engine's model."""
    markers = ThinkingMarkers(((TURN,), (OPEN,)), (closes,))
    monkeypatch.setattr(live.engine, "info", replace(live.engine.info, thinking=markers))


@pytest.mark.parametrize("size", [1, 3])
def test_thinking_ends_at_its_marker(live, monkeypatch, requests, size):
    prompt = [TURN, 40, 41, OPEN, 42]
    ask(live, prompt, stage_slo=STAGES)
    output = requests.pop().output
    assert len(output) == TOKENS
    place = next(at for at in range(4, TOKENS) if output[at] not in output[:at]) + 1 - size
    marker = tuple(output[place : place + size])
    first = next(at for at in range(TOKENS) if tuple(output[at : at + size]) == marker) + size
    served(live, monkeypatch, marker)
    ask(live, prompt, stage_slo=STAGES)
    one = requests.pop()
    assert one.output == output and one.stage == ANSWER
    # The tokens after the first up to the end of the marker are thinking; the others and the next one
    # are the answer.
    assert one.budget == pytest.approx((first - 1) * 2.0 + (TOKENS - first + 1) * 9.0)

    ask(live, [*prompt, *marker, 50], stage_slo=STAGES)  # the prompt has closed its thinking
    one = requests.pop()
    assert one.stage == ANSWER and one.thinking is None and one.budget == pytest.approx(TOKENS * 9.0)

    ask(live, [*prompt, *marker, 50, *prompt], stage_slo=STAGES, max_tokens=1)  # the marker is of an earlier turn
    assert requests.pop().stage == (ANSWER if size == 1 and marker[0] == output[0] else THINKING)


def test_stages_of_the_server_config_apply_offline(live, tokenizer, monkeypatch, requests):
    served(live, monkeypatch, (9,))
    config = ServeConfig.load(thinking_tpot_slo="2s", tpot_slo="9s")
    llm = LLM(config=config, engine=live.engine, tokenizer_object=tokenizer)
    llm.generate([[TURN, OPEN, 40], [OPEN, 9, 40]], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    made = {one.prompt: one for one in requests}
    thinks, answers = made[TURN, OPEN, 40], made[OPEN, 9, 40]
    assert thinks.slo == answers.slo == config.slo and 9 not in thinks.output
    assert (thinks.stage, answers.stage) == (THINKING, ANSWER)
    assert (thinks.budget, answers.budget) == pytest.approx((3 * 2.0, 3 * 9.0))


def test_without_stages_no_marker_is_searched_for(live, monkeypatch, requests):
    served(live, monkeypatch, (9,))
    ask(live, [TURN, 40])
    one = requests.pop()
    assert one.stage == ANSWER and one.thinking is None
