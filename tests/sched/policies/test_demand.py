"""Costs of prompts in the SLOs-Serve dynamic program."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched.perf.buckets import Buckets, Padded
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.policies.slos_serve.commitments import demand


@pytest.mark.parametrize("chunk", [512, 2048, 8192])
def test_padded_prompts_of_similar_size_cost_about_the_same(chunk: int) -> None:
    """Two sizes with the same padding must not make tokens free or attention expensive."""
    truth = Coefficients(fixed=10e-3, prefill=1e-4, decode=5e-5, quadratic=3e-10, longest=0, context=0)
    tokens, context = np.array([100.0, 700.0, 3000.0, 8000.0]), np.array([0.0, 4000.0, 0.0, 60_000.0])
    smooth = demand(GeneralModel(truth, correct=False), tokens, context, chunk)
    sizes = (64, 128, 512, 2048, 8192)
    stairs = demand(GeneralModel(Padded(truth, Buckets((), sizes)), correct=False), tokens, context, chunk)
    padded = np.ceil(tokens / chunk) * chunk
    assert (tokens <= stairs).all() and (stairs <= 1.5 * smooth + padded).all()
