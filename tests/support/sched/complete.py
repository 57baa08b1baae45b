"""Roles of small clusters, and a check of complete outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from jaxserve.sched.api.policy import Role
from tests.support.sched.harness import Job, Outcome

PD = (Role.PREFILL, Role.DECODE)
ROLES = {"1x1": (Role.MIXED,), "2x1": PD, "4x1": (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)}


def check_told(outcome: Outcome) -> None:
    """Check that every request receives exactly the tokens of its output, once and in order."""
    for request in outcome.requests:
        assert [token for delta in outcome.deltas[request.id] for token in delta.tokens] == request.output


def check_complete(outcome: Outcome, jobs: Sequence[Job], *, cancelled: bool = False, refuses: bool = False) -> None:
    """Check that every request receives exactly its tokens, once and in order, and one finish reason."""
    assert [request.id for request in outcome.requests] == list(range(len(jobs)))
    check_told(outcome)
    for request, job in zip(outcome.requests, jobs, strict=True):
        reasons = [delta.finish_reason for delta in outcome.deltas[request.id] if delta.finish_reason]
        assert reasons == [request.finish_reason]
        assert request.token_times == sorted(request.token_times) and len(request.token_times) == len(request.output)
        assert all(time > request.arrival for time in request.token_times)
        if request.finish_reason == "refused":
            assert refuses and not request.output
        elif request.finish_reason == "abort":
            assert cancelled
        else:
            assert len(request.output) == min(job.output, request.limit)
            assert request.finish_reason == ("stop" if job.output <= request.limit else "length")


JOB = st.builds(
    lambda start, prompt, output, arrival, cancel: Job(
        range(start, start + prompt), output, arrival, cancel_at=None if cancel is None else arrival + cancel
    ),
    start=st.sampled_from([0, 0, 1000, 2000]),  # equal starts share prefixes
    prompt=st.integers(1, 20),
    output=st.integers(1, 14),
    arrival=st.floats(0, 0.05),
    cancel=st.none() | st.floats(0, 0.05),
)
