"""From a step's device arrays to a StepResult. Runs on the waiter's thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.engine.inputs import Batch, Int32
from jaxserve.engine.sampling import BAD, Column
from jaxserve.engine.speculate import NONE
from jaxserve.engine.state import Drawn
from jaxserve.sched.api.params import MAX_LOGPROBS
from jaxserve.sched.api.plan import StepPlan, StepResult, TokenLogprobs

NOT_FINITE = "the model's logits are not finite"


def read(plan: StepPlan, batch: Batch, drawn: Drawn, started: float, finished: float) -> StepResult:
    """The result of a step whose arrays are computed."""
    if drawn.verified is not None:
        return _verified(plan, batch, drawn, started, finished)
    if drawn.tokens is None:
        return StepResult(plan.step, started, finished, ((),) * len(plan.spans), prompt_logprobs=_prompts(plan, drawn))
    ids: list[int] = np.asarray(drawn.tokens).tolist()
    tokens: tuple[tuple[int, ...], ...]
    failed: dict[int, str] = {}
    if min(ids) > BAD and all(span.samples for span in plan.spans):
        tokens = tuple((token,) for token in ids[: len(plan.spans)])
    else:
        gained = []
        for index, (span, token) in enumerate(zip(plan.spans, ids, strict=False)):
            if span.samples and token == BAD:
                failed[index] = NOT_FINITE
            gained.append((token,) if span.samples and token != BAD else ())
        tokens = tuple(gained)
    logprobs = {} if drawn.logprobs is None else _logprobs(batch.logprobs, ids, np.asarray(drawn.logprobs))
    return StepResult(plan.step, started, finished, tokens, failed, logprobs, _prompts(plan, drawn))


def _verified(plan: StepPlan, batch: Batch, drawn: Drawn, started: float, finished: float) -> StepResult:
    """As `read`, of a step in which rows drafted: several tokens of a row, or one that was drawn alone."""
    assert batch.drafts is not None and drawn.verified is not None
    slots, several = batch.drafts.sampling[:, Column.SLOT].tolist(), np.asarray(drawn.verified).tolist()
    alone = None if drawn.tokens is None else np.asarray(drawn.tokens).tolist()
    gained: list[tuple[int, ...]] = []
    failed: dict[int, str] = {}
    for index, span in enumerate(plan.spans):
        mine = several[index] if slots[index] == span.slot or alone is None else [alone[index]]
        tokens = tuple(token for token in mine if token != NONE) if span.samples else ()
        if BAD in tokens:
            failed[index] = NOT_FINITE
            tokens = ()
        gained.append(tokens)
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = {}
    if alone is not None and drawn.logprobs is not None:
        logprobs = _logprobs(batch.logprobs, alone, np.asarray(drawn.logprobs))
    return StepResult(plan.step, started, finished, tuple(gained), failed, logprobs, _prompts(plan, drawn))


def _logprobs(wanted: tuple[int, ...], ids: list[int], packed: Int32) -> Mapping[int, tuple[TokenLogprobs, ...]]:
    return {
        index: (unpack(packed[index], ids[index], count),)
        for index, count in enumerate(wanted)
        if count >= 0 and ids[index] != BAD
    }


def _prompts(plan: StepPlan, drawn: Drawn) -> Mapping[int, tuple[TokenLogprobs, ...]]:
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    for index, (count, blocks) in drawn.scores.items():
        found[index] = tuple(
            unpack(row, target, count)
            for targets, block in blocks
            for target, row in zip(targets.tolist(), np.asarray(block), strict=False)
        )
    return found


def unpack(packed: npt.NDArray[Any], token: int, count: int) -> TokenLogprobs:
    """One row of `sampling.logprobs_of`, with `count` alternatives."""
    floats = packed.view(np.float32)
    ids: list[int] = packed[2 : 2 + count].tolist()
    best: list[float] = floats[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + count].tolist()
    top = tuple((i, value) for i, value in zip(ids, best, strict=True) if i >= 0)
    return TokenLogprobs(token, float(floats[0]), int(packed[1]), top)
