"""Messages survive encoding, and values of other types do not."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.runtime.activity import Activity, RunningStep
from jaxserve.engine.runtime.flight_recorder import EndedRequest, Event, Recent, RequestLife
from jaxserve.engine.runtime.info import EngineInfo, InstanceInfo, InstanceStats, Promise, Stats
from jaxserve.engine.runtime.step_record import Step
from jaxserve.fleet.messages import (
    Answer,
    Cancel,
    EndSession,
    Failure,
    Follow,
    FromEngine,
    FromFront,
    GetLife,
    GetRecent,
    GetStats,
    Hello,
    LifeAnswer,
    Outputs,
    Prefetch,
    RecentAnswer,
    Refused,
    Repeat,
    Report,
    ResetPrefixCache,
    SetRoles,
    State,
    Submit,
    decode_from_engine,
    decode_from_front,
)
from jaxserve.fleet.reports import Columns, InstanceReport
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.errors import InvalidValue, JaxserveError, QueueFull, StepFailed, Unavailable
from jaxserve.sched.api.new_request import NewRequest, Progress
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Delta, TokenLogprobs
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.slo import NO_SLO, SLO, THINKING
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.sched.instance.stats import Counters
from jaxserve.sched.recorded.record import Moved, Placed
from jaxserve.wire.connection import encode


def as_decoded(value: object) -> object:
    """Return a description as a receiver gets it: with lists."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


IDS = st.integers(0, 2**62)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
SECONDS = st.floats(0.0, 1e9)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 9999),
    temperature=st.floats(0.0, 2.0),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=TOKENS,
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=4),
    logprobs=st.none() | st.integers(0, 5),
    logits_processors=st.dictionaries(st.text(min_size=1, max_size=5), st.floats(-9, 9), max_size=2).map(
        lambda given: tuple(given.items())
    ),
)
SLOS = st.builds(
    SLO,
    ttft=st.floats(1e-3, 1e3) | st.just(inf),
    tbt=st.none() | st.floats(1e-3, 1e3),
    stages=st.just(()) | st.just((("thinking", 0.1),)),
)
LOGPROBS = st.builds(TokenLogprobs, IDS, st.floats(-99, 0), IDS, st.just(((1, -0.5), (2, -inf))))
DELTAS = st.builds(
    Delta,
    IDS,
    TOKENS,
    st.lists(LOGPROBS, max_size=2).map(tuple),
    st.just(()),
    finish_reason=st.sampled_from((None, "stop", "unavailable")),
    error=st.none() | st.text(),
    stop_token=st.none() | IDS,
)
METRICS = st.builds(RequestMetrics, SECONDS, st.none() | SECONDS, SECONDS, SECONDS, st.lists(SECONDS).map(tuple), IDS)
ROLES = st.dictionaries(st.integers(0, 9), st.sampled_from(Role))
REQUEST = st.builds(
    NewRequest,
    TOKENS,
    PARAMS,
    SLOS,
    st.integers(-9, 9),
    st.text(),
    st.text(),
    st.binary(max_size=32),
    st.text(),
    st.text(),
    SECONDS,
    st.none() | st.builds(Progress, TOKENS, SECONDS, SECONDS, IDS),
    st.booleans(),
    st.text(),
    IDS,
)
FRONT = (
    st.builds(Submit, IDS, REQUEST)
    | st.builds(Prefetch, TOKENS, st.binary(max_size=32), st.text())
    | st.builds(Cancel, IDS, st.text())
    | st.builds(Repeat, IDS, st.text(), st.none() | IDS, st.none() | st.integers(0, 20), SECONDS)
    | st.builds(GetStats, IDS)
    | st.builds(GetRecent, IDS, IDS)
    | st.builds(GetLife, IDS, IDS, st.none() | st.text())
    | st.builds(SetRoles, IDS, ROLES)
    | st.builds(ResetPrefixCache, IDS)
    | st.builds(EndSession, IDS, st.text())
    | st.just(Follow())
)
ACTIVITY = Activity(RunningStep(64, 3, 0.02, -0.01), {"default": 1}, {"best_effort": 2})
STATS = st.builds(
    Stats,
    st.just((InstanceStats("p0", "prefill", 1, 2, 3, 4, 5, activity=ACTIVITY),)),
    st.builds(Counters, steps=IDS),
    IDS,
    IDS,
    SECONDS,
)
STATE = st.builds(State, STATS, st.none() | st.text(), st.none() | IDS)
INFO = EngineInfo(
    "model", 256, 4096, "float32", (InstanceInfo("p0", "prefill", ("cpu:0",), 8, 16),), "unified", "deflect",
    frozenset({1, 2}), ThinkingMarkers((), ((5, 6),)), 1.0,
    promise=Promise(NO_SLO, frozenset({"ttft"}), {"tpot": "slow"}),
)  # fmt: skip
REPORT = st.builds(
    InstanceReport, IDS, SECONDS, st.sampled_from(Role), st.sampled_from(Role), SECONDS, st.booleans(), st.booleans(),
    IDS, IDS, IDS, IDS, IDS, IDS, IDS, IDS, SECONDS, SECONDS, st.booleans(),
    st.just(Columns(2, 1, (0.5, b"B\x01\x02"))), st.just(Columns(0, 0, ())), st.just(()),
    st.sampled_from((None, (("Coefficients", 1.0, 2.0), 1.0, 5.0, 7))).map(as_decoded), st.binary(), st.binary(),
    st.booleans(),
)  # fmt: skip
REPORTS = st.lists(REPORT, max_size=2).map(tuple)
LIMITS = st.just((Limits(stairs=(1, 2)),))
FAILURE = st.builds(Failure, st.just("InvalidValue"), st.text(), st.none() | st.text())
EVENTS = st.builds(Event, IDS, SECONDS, st.text(), st.text(), st.none() | IDS, st.text(), st.text(), IDS)
ENDED = st.builds(
    EndedRequest, IDS, SECONDS, IDS, st.text(), st.text(), st.text(), st.text(), IDS, IDS, SECONDS, SECONDS, SECONDS,
    SECONDS, SECONDS, SECONDS, st.booleans(), st.text(),
)  # fmt: skip
CHUNKS = st.lists(st.tuples(IDS, IDS, IDS, st.booleans()), max_size=2).map(tuple)
STEPS = st.builds(Step, st.text(), SECONDS, SECONDS, st.booleans(), CHUNKS, st.binary(), st.binary(), IDS)


def life(steps: list[Step]) -> RequestLife:
    """Return a request that has these steps."""
    placed, moves = (Placed(1.0, "p0", 7, 1, 2),), (Moved(2.0, 7, "p0", "d1", 1.5),)
    return RequestLife(
        7, "a", "me", "default", "standard", SLO(1.0, 0.5, stages=((THINKING, 0.1),)), 1.0, 20, 3, 0, (1.5, 1.75), 1.5,
        "stop", None, 2.0, None, tuple(steps), placed, moves, {7: 20, 8: 4}, (8,),
    )  # fmt: skip


ENGINE = (
    st.builds(Hello, st.text(), st.just(INFO), st.none() | IDS, STATE, LIMITS, REPORTS)
    | st.builds(Report, IDS, REPORTS)
    | STATE
    | st.builds(Outputs, st.lists(DELTAS, max_size=3).map(tuple), st.dictionaries(IDS, METRICS, max_size=2))
    | st.builds(Refused, IDS, FAILURE)
    | st.builds(Answer, IDS, st.booleans(), st.none() | FAILURE)
    | st.builds(RecentAnswer, IDS, st.builds(Recent, IDS, st.lists(EVENTS).map(tuple), st.lists(ENDED).map(tuple)))
    | st.builds(LifeAnswer, IDS, st.none() | st.builds(life, st.lists(STEPS, max_size=3)))
)


@given(FRONT)
def test_a_message_of_a_front_survives(message: FromFront) -> None:
    assert decode_from_front(encode(message)) == message


@given(ENGINE)
def test_a_message_of_an_engine_survives(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", encode([]), encode(["Unknown", 1]), encode(["Cancel", "1", "abort"]), encode(["Cancel", 1])],
    ids=["empty", "no msgpack", "no type", "unknown type", "wrong field", "missing field"],
)
def test_other_values_are_refused(frame: bytes) -> None:
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        decode_from_front(frame)


def test_values_are_checked_as_they_arrive() -> None:
    frame = encode(Submit(1, NewRequest((1,), SamplingParams(), SLO())))
    hostile = msgspec.msgpack.decode(frame)
    hostile[2]["params"]["top_p"] = 7.0
    with pytest.raises(msgspec.ValidationError, match=r"top_p=7.0 must be above 0 and at most 1"):
        decode_from_front(encode(hostile))


@pytest.mark.parametrize(
    "error",
    [InvalidValue("n=0 must be 1", "n"), QueueFull("full", 3.0), Unavailable("hung", 7.0), JaxserveError("closed")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_it_was_raised(error: JaxserveError) -> None:
    (found,) = (decode_from_engine(encode(Refused(1, Failure.of(error)))).failure.error(),)
    assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error)


def test_an_error_of_a_subclass_arrives_as_the_nearest_known_one() -> None:
    found = Failure.of(StepFailed("a step failed")).error()
    assert type(found) is JaxserveError and str(found) == "a step failed"


@given(REQUEST, IDS, st.none() | st.integers(0, 2**63 - 1))
def test_an_output_of_the_same_prompt_is_told_without_it(last: NewRequest, id: int, seed: int | None) -> None:
    params = replace(last.params, seed=seed, prompt_logprobs=None)
    request = replace(last, key="k-1", params=params, waited=1.0)
    repeat = Repeat.of(last, id, request)
    assert repeat is not None and repeat.request(last) == request and repeat.id == id
    assert Repeat.of(None, id, request) is None
    assert Repeat.of(last, id, replace(request, priority=last.priority + 1)) is None
    assert Repeat.of(last, id, replace(request, prompt=(*last.prompt, 1))) is None
