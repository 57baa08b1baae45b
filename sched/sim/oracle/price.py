"""The least cost of a request in shared steps: its part of the overhead, and of the longest context."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...api.perf import Array
from .work import Jobs, Server

LEVELS = 48  # context lengths at which concurrent requests are counted


class Costs(NamedTuple):
    """Seconds of each request's prompt and outputs. Summed over any set, at most the time of their steps."""

    prompt: Array
    decode: Array


def prompts_alone(jobs: Jobs, server: Server) -> Array:
    """Price prompts on servers that do nothing else. The overhead is concave, so full steps have the least."""
    return jobs.prompt + server.overhead(server.tokens) / server.tokens * jobs.fresh


def decodes_alone(jobs: Jobs, server: Server, arrival: Array) -> Array:
    """Price outputs if prompts may use the rest of each step for free."""
    return _marginal(jobs, server, arrival) + _batched(jobs, server, arrival) * jobs.outputs


def shared(jobs: Jobs, server: Server, arrival: Array) -> Costs:
    """Price prompts and outputs that may share steps: the higher price of all requests together."""
    return max(shared_prices(jobs, server, arrival), key=lambda costs: float(costs.prompt.sum() + costs.decode.sum()))


def shared_prices(jobs: Jobs, server: Server, arrival: Array) -> tuple[Costs, Costs]:
    """Return two prices, each valid for any set of requests.

    A step of n prompt tokens and d decoded tokens has overhead(n + d) >= x·n + y·d if this holds at the
    corners of n + d <= tokens, d <= rows. The two prices are full chunks, x = y = overhead(tokens) / tokens,
    and full batches of rows, y = overhead(rows) / rows, with the x that a full step leaves.
    """
    tokens, whole = server.tokens, server.overhead(server.tokens)
    batched = _batched(jobs, server, arrival)
    rows = int(_rows(server, _crowds(jobs, server, arrival)).max(initial=1.0))
    rest = (whole - server.overhead(rows)) / (tokens - rows) if rows < tokens else whole / tokens
    marginal = _marginal(jobs, server, arrival)
    chunked = Costs(prompts_alone(jobs, server), marginal + whole / tokens * jobs.outputs)
    full = Costs(jobs.prompt + rest * jobs.fresh, marginal + batched * jobs.outputs)
    return chunked, full


def _batched(jobs: Jobs, server: Server, arrival: Array) -> Array:
    """Return the overhead per decoded token if every step of a request holds all that can decode beside it."""
    rows = _rows(server, _crowds(jobs, server, arrival))
    each = np.array([server.overhead(count) / count for count in range(1, int(rows.max(initial=1)) + 1)])
    result: Array = each[rows.astype(int) - 1]
    return result


def _rows(server: Server, crowd: Array) -> Array:
    """Return the tokens that `crowd` decoding requests can have in a step."""
    return np.minimum(crowd * (1 + server.draft), server.tokens)


def _crowds(jobs: Jobs, server: Server, arrival: Array) -> Array:
    """Return for each request the most requests that can decode at once, itself included, while it can.

    Closer arrivals never make this smaller.
    """
    ready, end = arrival + jobs.alone, arrival + jobs.span
    starts = np.sort(ready)
    present = np.arange(1, len(starts) + 1) - np.searchsorted(np.sort(end), starts, side="left")
    first = np.searchsorted(starts, ready, side="left")
    last = np.searchsorted(starts, end, side="right")
    spans = np.stack((first, last), axis=1).ravel()
    most = np.maximum.reduceat(np.append(present, 0), spans)[::2]
    return np.minimum(most, server.rows).astype(float)


def _marginal(jobs: Jobs, server: Server, arrival: Array) -> Array:
    """Price decode steps without overhead.

    Contexts L cost context·ΣL + (longest - context)·max L. If no more than A(θ) requests with a prompt of θ or more
    can be decoding at once, then max L >= ∫ 1[max L >= θ] dθ >= Σ φ(prompt) with φ(p) = ∫ dθ / A(θ) over [0, p].
    """
    coefficients = server.coefficients
    if coefficients.longest <= coefficients.context or not len(jobs):
        return jobs.decode + coefficients.longest * jobs.attended
    top = float(jobs.length.max())
    levels = np.unique(np.concatenate(([0.0], np.geomspace(min(16.0, top), top, LEVELS))))
    area = [0.0]
    for low, high in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        long = jobs.take(np.flatnonzero(jobs.length >= low))
        crowd = _crowds(long, server, arrival[jobs.length >= low]).max()
        area.append(area[-1] + (high - low) / float(crowd))
    part = np.interp(jobs.length, levels, area)
    return (
        jobs.decode
        + coefficients.context * jobs.attended
        + (coefficients.longest - coefficients.context) * part * jobs.steps
    )
