"""Checks of runs with drafts."""

from __future__ import annotations

from hypothesis import strategies as st

from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.sim.executor import EOS, FILLER
from tests.support.sched.complete import check_told
from tests.support.sched.harness import Job, Outcome


def check(outcome: Outcome, jobs: list[Job], draft: int, page_size: int) -> None:
    check_told(outcome)
    for request, job in zip(outcome.requests, jobs, strict=True):
        if request.finish_reason == "abort":
            continue
        count = min(job.output, request.limit)
        assert request.output == ([FILLER] * (job.output - 1) + [EOS])[:count]
        assert request.finish_reason == ("stop" if job.output <= request.limit else "length")
        assert request.inflight == 0
    check_plans(outcome.plans, jobs, draft, page_size)


def check_plans(plans: list[tuple[str, StepPlan]], jobs: list[Job], draft: int, page_size: int) -> None:
    """Check that every span has its pages, starts at the end of valid KV, and drafts only after a whole prompt."""
    pages: dict[tuple[str, int], int] = {}
    ends: dict[tuple[str, int], int] = {}
    for name, plan in plans:
        for span in plan.spans:
            at = (name, span.slot)
            if span.begin is not None:
                pages[at] = 0
            pages[at] += len(span.new_pages)
            assert pages[at] * page_size >= span.start + span.length, "a span without pages"
            assert 0 <= span.draft <= draft and span.length > span.draft
            if span.draft:
                assert span.start >= len(jobs[span.request].prompt), "drafted before the prompt was computed"
                assert span.samples
            if span.begin is None:
                assert span.start <= ends[at], "the cursor skipped tokens"
            ends[at] = span.start + span.length


JOB = st.builds(
    lambda start, prompt, output, arrival, cancel, most: Job(
        range(start, start + prompt),
        output,
        arrival,
        params=SamplingParams(max_tokens=most),
        cancel_at=None if cancel is None else arrival + cancel,
    ),
    start=st.sampled_from([0, 0, 1000, 2000]),
    prompt=st.integers(1, 20),
    output=st.integers(1, 24),
    arrival=st.floats(0, 0.05),
    cancel=st.none() | st.none() | st.floats(0, 0.05),
    most=st.none() | st.integers(1, 24),
)
