"""The result of a step: what the host reads from the arrays that the devices computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.engine.programs.inputs import Batch, Int32
from jaxserve.engine.programs.processors import EMPTY
from jaxserve.engine.programs.sampling import BAD, Column
from jaxserve.engine.programs.speculate import NONE
from jaxserve.engine.runtime.device_state import StepOutputs
from jaxserve.sched.api.params import MAX_LOGPROBS
from jaxserve.sched.api.plan import StepPlan, StepResult, TokenLogprobs
from jaxserve.sched.api.pooling import Sum

NOT_FINITE = "the model's logits are not finite"
NO_TOKEN = "no token is left to sample after logits_processors"
NO_VECTOR = "the model's hidden states are not finite"


def read(plan: StepPlan, batch: Batch, drawn: StepOutputs, started: float, finished: float) -> StepResult:
    """Build the result of a step from its computed arrays."""
    result = _drawn(plan, batch, drawn, started, finished)
    if not drawn.pooled:
        return result
    sums: dict[int, Sum] = {
        index: row for indices, rows in drawn.pooled for index, row in zip(indices, np.asarray(rows), strict=False)
    }
    bad = {index: NO_VECTOR for index, row in sums.items() if not np.isfinite(row).all()}
    return result._replace(pooled=sums, failed={**bad, **result.failed})


def _drawn(plan: StepPlan, batch: Batch, drawn: StepOutputs, started: float, finished: float) -> StepResult:
    if drawn.verified is not None:
        return _verified(plan, batch, drawn, started, finished)
    if drawn.tokens is None:
        return StepResult(plan.step, started, finished, ((),) * len(plan.spans), prompt_logprobs=_prompts(plan, drawn))
    ids: list[int] = np.asarray(drawn.tokens).tolist()
    tokens: tuple[tuple[int, ...], ...]
    failed: dict[int, str] = {}
    ended: dict[int, str] = {}
    if min(ids) > BAD and all(span.samples for span in plan.spans):
        tokens = tuple((token,) for token in ids[: len(plan.spans)])
    else:
        gained = []
        for index, (span, token) in enumerate(zip(plan.spans, ids, strict=False)):
            if span.samples and token == BAD:
                failed[index] = NOT_FINITE
            elif span.samples and token == EMPTY:
                ended[index] = NO_TOKEN
            gained.append((token,) if span.samples and token >= 0 else ())
        tokens = tuple(gained)
    logprobs = {} if drawn.logprobs is None else _logprobs(batch.logprobs, ids, np.asarray(drawn.logprobs))
    return StepResult(plan.step, started, finished, tokens, failed, logprobs, _prompts(plan, drawn), ended=ended)


def _verified(plan: StepPlan, batch: Batch, drawn: StepOutputs, started: float, finished: float) -> StepResult:
    """Build the result of a step in which rows drafted: several tokens of a row, or one sampled alone."""
    assert batch.drafts is not None and drawn.verified is not None
    slots, several = batch.drafts.sampling[:, Column.SLOT].tolist(), np.asarray(drawn.verified).tolist()
    alone = None if drawn.tokens is None else np.asarray(drawn.tokens).tolist()
    gained: list[tuple[int, ...]] = []
    failed: dict[int, str] = {}
    ended: dict[int, str] = {}
    for index, span in enumerate(plan.spans):
        mine = several[index] if slots[index] == span.slot or alone is None else [alone[index]]
        tokens = tuple(token for token in mine if token != NONE) if span.samples else ()
        if BAD in tokens:
            failed[index] = NOT_FINITE
            tokens = ()
        elif EMPTY in tokens:
            ended[index] = NO_TOKEN
            tokens = ()
        gained.append(tokens)
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = {}
    if alone is not None and drawn.logprobs is not None:
        logprobs = _logprobs(batch.logprobs, alone, np.asarray(drawn.logprobs))
    return StepResult(plan.step, started, finished, tuple(gained), failed, logprobs, _prompts(plan, drawn), ended=ended)


def _logprobs(wanted: tuple[int, ...], ids: list[int], packed: Int32) -> Mapping[int, tuple[TokenLogprobs, ...]]:
    return {
        index: (unpack(packed[index], ids[index], count),)
        for index, count in enumerate(wanted)
        if count >= 0 and ids[index] >= 0
    }


def _prompts(plan: StepPlan, drawn: StepOutputs) -> Mapping[int, tuple[TokenLogprobs, ...]]:
    entries: dict[int, tuple[TokenLogprobs, ...]] = {}
    for index, (count, blocks) in drawn.scores.items():
        entries[index] = tuple(
            unpack(row, target, count)
            for targets, block in blocks
            for target, row in zip(targets.tolist(), np.asarray(block), strict=False)
        )
    return entries


def unpack(packed: npt.NDArray[Any], token: int, count: int) -> TokenLogprobs:
    """Unpack one row of `sampling.logprobs_of`, with `count` alternatives."""
    floats = packed.view(np.float32)
    ids: list[int] = packed[2 : 2 + count].tolist()
    best: list[float] = floats[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + count].tolist()
    top = tuple((i, value) for i, value in zip(ids, best, strict=True) if i >= 0)
    return TokenLogprobs(token, float(floats[0]), int(packed[1]), top)
