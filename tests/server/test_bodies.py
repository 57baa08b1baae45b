"""Parsing of request bodies without a server: accepted, refused and ignored fields."""

from __future__ import annotations

import json

import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.server.objectives import objectives_of
from jaxserve.server.openai import ChatBody, CompletionBody, params_of, parse
from jaxserve.server.prompts import messages_of, prompts_of

VOCAB = 100


def completion(**fields):
    return parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)


def chat(**fields):
    return parse(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode(), ChatBody)


def test_unsupported_fields_without_effect_are_accepted():
    """The older form of tools has none with `function_call` "none"."""
    params_of(
        chat(tools=[], tool_choice="none", response_format={"type": "text"}, functions=None, n=2, best_of=2), VOCAB
    )
    params_of(chat(functions=[{"name": "look"}], function_call="none"), VOCAB)


def test_defaults_depend_on_the_endpoint():
    assert params_of(completion(), VOCAB).max_tokens == 16
    assert params_of(chat(), VOCAB).max_tokens is None
    assert params_of(chat(max_tokens=5, max_completion_tokens=7), VOCAB).max_tokens == 7
    assert params_of(chat(logprobs=True), VOCAB).logprobs == 0
    made = params_of(completion(stop="a", logit_bias={"3": -2.5}, top_k=4, min_p=0.1, repetition_penalty=1.2), VOCAB)
    assert (made.stop, made.logit_bias, made.top_k) == (("a",), ((3, -2.5),), 4)


def test_prompts():
    assert prompts_of("a") == ["a"]
    assert prompts_of(["a", "b"]) == ["a", "b"]
    assert prompts_of([1, 2]) == [[1, 2]]
    assert prompts_of([[1], [2]]) == [[1], [2]]
    for wrong in ([], 3, None, [True], ["a", 1], [[]], [["a"]], {"a": 1}):
        with pytest.raises(InvalidValue, match="prompt="):
            prompts_of(wrong)


def test_objectives():
    config = ServeConfig(ttft_slo=4.0, tpot_slo=0.1)
    assert objectives_of(completion(), {}, config) == (SLO(4.0, 0.1), 0, "standard", False, False)
    assert objectives_of(completion(ttft_slo_ms=500), {}, config).slo == SLO(0.5, 0.1)
    headers = {"x-slo-ttft-ms": "100", "x-llm-d-slo-ttft-ms": "200", "x-slo-tpot-ms": "20"}
    assert objectives_of(completion(), headers, config).slo == SLO(0.2, 0.02)
    assert objectives_of(completion(ttft_slo_ms=500), headers, config).slo == SLO(0.5, 0.02)
    assert objectives_of(completion(tbt_slo_ms=40), {}, config).slo.tbt == pytest.approx(0.04)
    assert objectives_of(completion(service_tier="interactive"), {}, config).slo.ttft == 1.0
    assert objectives_of(completion(service_tier="batch"), {}, config).priority == 1
    assert objectives_of(completion(service_tier="batch", priority=-5), {}, config).priority == -5
    for name in ("flex", "best_effort"):
        assert objectives_of(completion(service_tier=name), {}, config) == (NO_SLO, 0, "best_effort", False, True)
    assert objectives_of(completion(pace_tokens=True), {}, config).pace
    always = ServeConfig(pace_tokens=True)
    assert objectives_of(completion(), {}, always).pace
    assert not objectives_of(completion(pace_tokens=False), {}, always).pace, "the request's own objective comes first"
    staged = completion(stage_slo={"thinking": {"tpot_slo_ms": 20}, "answer": {"tpot_slo_ms": 50}})
    assert dict(objectives_of(staged, {}, config).slo.stages) == {"thinking": 0.02, "answer": 0.05}


def test_stages_of_a_request_replace_those_of_the_server():
    config = ServeConfig(ttft_slo=8.0, tpot_slo=0.05, thinking_tpot_slo=0.02)
    assert objectives_of(completion(), {}, config).slo == config.slo
    own = objectives_of(completion(stage_slo={"answer": {"tpot_slo_ms": 40}}), {}, config).slo
    assert dict(own.stages) == {"thinking": 0.02, "answer": 0.04} and own.tpot == 0.05
    assert objectives_of(completion(tpot_slo_ms=100), {}, config).slo == SLO(tpot=0.1), (
        "a TPOT of the request applies to every stage"
    )
    assert objectives_of(completion(), {"x-slo-tpot-ms": "100"}, config).slo == SLO(tpot=0.1)
    both = completion(tpot_slo_ms=100, stage_slo={"answer": {"tpot_slo_ms": 40}})
    assert objectives_of(both, {}, config).slo == SLO(tpot=0.1, stages=(("answer", 0.04),))


def test_messages():
    assert messages_of([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])[
        0
    ] == {"role": "user", "content": "a\nb"}
    for wrong, said in (
        ([], "at least one"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "user", "content": 3}], "content=3"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input_audio"),
        ([{"role": "user", "content": [{"type": "text"}]}], "with a text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "tool_calls"),
    ):
        with pytest.raises(InvalidValue, match=said):
            messages_of(wrong)
