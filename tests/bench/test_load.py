"""Arrival times, lengths, prompts and objectives of the benchmark load."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.bench import load
from jaxserve.bench.datasets import Source
from jaxserve.bench.load import Call, Objective, SloClass
from jaxserve.errors import InvalidValue

VOCABULARY = range(100, 164)


@given(st.integers(1, 300), st.floats(0.1, 100), st.floats(0.1, 10), st.integers(0, 5))
def test_arrivals_ascend_at_the_requested_rate(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = load.arrivals(count, rate, burstiness, seed)
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(count / rate)
    assert (times == load.arrivals(count, rate, burstiness, seed)).all()


def test_burstiness_is_the_shape_of_the_gap_distribution() -> None:
    for shape in (0.25, 1.0, 4.0):
        gaps = np.diff(load.arrivals(20_000, 10.0, shape, 0))
        assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)


@given(st.integers(1, 200), st.floats(0, 0.99), st.integers(0, 5))
def test_lengths_stay_within_their_range(mean: int, ratio: float, seed: int) -> None:
    drawn = load.lengths(50, mean, ratio, np.random.default_rng(seed))
    assert drawn.min() >= max(1, round(mean * (1 - ratio))) and drawn.max() <= max(1, round(mean * (1 + ratio)))


def test_random_prompts_have_the_stated_length() -> None:
    calls = load.random_calls(20, input_len=30, output_len=9, range_ratio=0.5, vocabulary=VOCABULARY, seed=3)
    assert all(len(call.prompt) == call.prompt_tokens and set(call.prompt) <= set(VOCABULARY) for call in calls)
    assert len({call.prompt for call in calls}) == 20
    exact = load.random_calls(5, input_len=30, output_len=9, vocabulary=VOCABULARY)
    assert {(call.prompt_tokens, call.output_tokens) for call in exact} == {(30, 9)}


@pytest.mark.parametrize(
    ("action", "param"),
    [
        (lambda: load.arrivals(3, 0.0, 1.0, 0), "request_rate"),
        (lambda: load.arrivals(3, 1.0, 0.0, 0), "burstiness"),
        (lambda: load.random_calls(1, input_len=0, output_len=1, vocabulary=VOCABULARY), "random_input_len"),
        (
            lambda: load.random_calls(1, input_len=1, output_len=1, range_ratio=1.0, vocabulary=VOCABULARY),
            "random_range_ratio",
        ),
        (lambda: load.faster([], 0.0), "time_scale"),
        (lambda: load.parse_slo_class("chat,ttft:5"), "slo_class"),
        (lambda: load.parse_slo_class("chat=1,e2el:5"), "slo_class"),
        (lambda: load.parse_slo_class("chat=1,ttft:-5"), "slo_class"),
        (lambda: load.parse_slo_class("=1,ttft:5"), "slo_class"),
        (lambda: load.parse_slo_class("chat=1,thinking:0"), "slo_class"),
        (lambda: load.parse_slo_class("chat=1,dreaming:5"), "slo_class"),
        (lambda: load.parse_slo_class("chat=1,tier:"), "slo_class"),
    ],
)
def test_invalid_arguments_are_refused(action: object, param: str) -> None:
    assert callable(action)
    with pytest.raises(InvalidValue) as caught:
        action()
    assert caught.value.param == param


def test_custom_prompts(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    rows = [{"prompt": "a b"}, {"prompt": "c", "output_tokens": 7, "ttft_slo_ms": 100}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    calls = Source(path).custom(3, 4)
    assert [(call.prompt, call.output_tokens) for call in calls] == [("a b", 4), ("c", 7), ("a b", 4)]
    assert calls[1].slo == Objective(100, None)


def test_plain_traces_provide_objectives(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "id,arrival_s,input_tokens,output_tokens,ttft_slo_s,tpot_slo_s,class\n"
        "a,10,100,20,0.5,0.05,chat\nb,12,50,10,,,\nc,14,8,1,2,,batch\n"
    )
    calls = load.trace_calls(
        path, count=None, vocabulary=VOCABULARY, time_scale=0.5, prompt_scale=4, output_scale=2, seed=1
    )
    assert [call.at for call in calls] == [0.0, 1.0, 2.0]
    assert [(len(call.prompt), call.output_tokens) for call in calls] == [(25, 10), (13, 5), (2, 1)]
    assert [call.slo for call in calls] == [
        Objective(500.0, 50.0, "chat"),
        Objective(None, None, ""),
        Objective(2000.0, None, "batch"),
    ]
    assert set(calls[0].prompt) <= set(VOCABULARY)


def test_prefixes_shared_in_the_trace_are_shared_in_prompts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 5, "input_length": 1024, "output_length": 5, "hash_ids": [1, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    one, two = load.trace_calls(path, count=2, vocabulary=VOCABULARY, prompt_scale=8)
    assert len(one.prompt) == len(two.prompt) == 128
    assert one.prompt[:64] == two.prompt[:64] and one.prompt[64:] != two.prompt[64:]
    other, _ = load.trace_calls(path, count=2, vocabulary=VOCABULARY, prompt_scale=8, seed=1)
    assert other.prompt != one.prompt


def test_a_public_trace(traces: Path) -> None:
    path = traces / "azure" / "AzureLLMInferenceTrace_conv.head40min.csv.gz"
    calls = load.trace_calls(path, count=200, vocabulary=VOCABULARY, prompt_scale=8, output_scale=8)
    assert len(calls) == 200 and calls[0].at == 0.0
    assert all(earlier.at <= later.at for earlier, later in itertools.pairwise(calls))
    assert len({call.prompt for call in calls}) == 200


def test_classes_are_drawn_by_share_and_keep_a_requests_own_objective() -> None:
    classes = [load.parse_slo_class("chat=3,ttft:500,tpot:50"), SloClass(1.0, Objective(name="batch"))]
    calls = [Call(0.0, "x", 1, 1) for _ in range(4000)] + [Call(0.0, "x", 1, 1, Objective(7.0))]
    drawn = load.with_classes(calls, classes, 0)
    assert sum(call.slo.name == "chat" for call in drawn) == pytest.approx(3000, rel=0.05)
    assert drawn[-1].slo == Objective(7.0)
    assert drawn == load.with_classes(calls, classes, 0)
    assert load.with_classes(calls, [], 0) == calls


def test_a_class_may_have_gaps_stages_and_a_tier() -> None:
    made = load.parse_slo_class("chat=0.5,ttft:500,tbt:100,thinking:20,answer:50,tier:interactive")
    assert made == SloClass(
        0.5, Objective(500.0, None, "chat", 100.0, "interactive", (("thinking", 20.0), ("answer", 50.0)))
    )
    body = {name: value for name, value in made.slo.body().items() if value is not None}
    assert body == {
        "ttft_slo_ms": 500.0,
        "tbt_slo_ms": 100.0,
        "service_tier": "interactive",
        "stage_slo": {"thinking": {"tpot_slo_ms": 20.0}, "answer": {"tpot_slo_ms": 50.0}},
    }
    assert set(load.NONE.body().values()) == {None}


def test_speedup_keeps_order_and_burstiness() -> None:
    calls = load.schedule([Call(0.0, "x", 1, 1)] * 3, [0.0, 1.0, 4.0])
    assert [call.at for call in load.faster(calls, 4.0)] == [0.0, 0.25, 1.0]
