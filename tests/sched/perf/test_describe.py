"""A step-time model and what is made from its description predict the same, whatever it has learned."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.perf import Load, PerfModel
from jaxserve.sched.perf import KINDS, make
from jaxserve.sched.perf.buckets import NONE, Buckets
from jaxserve.sched.perf.describe import describe, restore
from jaxserve.sched.perf.drafted import Drafted
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.perf.scaled import Scaled
from tests.support.examples import examples

TRUTH = Coefficients(8.7e-3, 4.5e-5, 2e-5, 3e-10, 2.4e-7, 1.5e-8, 11.5e-3, 8 / 256)
LOADS = [
    Load(decode=4, longest=50, context=120),
    Load(decode=70, longest=900, context=30_000),
    Load().add_chunk(700, 64),
    Load(decode=9, longest=400, context=2_000).add_chunk(9000, 128),
    Load(decode=12, longest=400, context=2_000, drafts=3),
]
ROWS = np.array([1.0, 7.0, 300.0])


def predictions(model: PerfModel) -> list[float]:
    alone = model.prefill_times(100 * ROWS, ROWS, 512).tolist()
    return [
        *map(model.step_time, LOADS),
        *model.decode_times(ROWS, 10 * ROWS, 30 * ROWS).tolist(),
        *alone,
        model.prefill_rate,
        float(model.version),
    ]


@given(
    kind=st.sampled_from(KINDS),
    buckets=st.sampled_from([NONE, Buckets((4, 16), (64, 1024))]),
    drafts=st.booleans(),
    error=st.sampled_from([0.0, 0.3]),
    steps=st.lists(st.tuples(st.sampled_from(LOADS), st.floats(1e-4, 1.0)), max_size=6),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_description_predicts_as_its_model(kind, buckets, drafts, error, steps) -> None:  # type: ignore[no-untyped-def]
    model = make(kind, TRUTH, buckets=buckets, loads=LOADS[:4] * 3)
    model = Drafted(model) if drafts else model
    model = Scaled(model, 1.0 + error) if error else model
    for load, seconds in steps:
        if drafts or not load.drafts:
            model.observe(load, seconds)
    assert predictions(restore(json.loads(json.dumps(describe(model))))) == predictions(model)


def test_what_has_no_description_is_an_error() -> None:
    with pytest.raises(InvalidValue, match="describes no step-time model"):
        restore(["what", 1])
    with pytest.raises(InvalidValue, match="describes no form"):
        restore([["what"], 1.0, 1.0, 0])
    with pytest.raises(InvalidValue, match="object has no description"):
        describe(object())  # type: ignore[arg-type]
