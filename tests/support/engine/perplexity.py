"""Perplexity of the embedded demo model on held-out code, through the serving executor."""

from __future__ import annotations

import inspect
import math
import textwrap
from functools import cache
from typing import Any

from jaxserve.demo import model_path
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.sched.api.params import SamplingParams
from tests.support.engine.steps import PAGE, Job, executors, generate, run

LENGTH, CHUNK = 1024, 256
PROMPT = 1000


def demo(**options: Any) -> JaxExecutor:
    """Return an executor of the demo model on one device with programs compiled on demand."""
    sizes = {"max_model_len": LENGTH, "max_num_batched_tokens": CHUNK, "kv_cache_memory": 32 << 20, "warm": False}
    return executors(model_path(), "1x1", **sizes | options)[0]


@cache
def held_out() -> tuple[int, ...]:
    """Return the tokens of a module outside the training corpus."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path(), local_files_only=True)
    return tuple(tokenizer.encode(inspect.getsource(textwrap), verbose=False))


def perplexity(executor: JaxExecutor, pieces: int) -> float:
    """Compute the perplexity of `pieces` prompts of `PROMPT` tokens, each in chunks."""
    losses: list[float] = []
    for at in range(pieces):
        prompt = held_out()[at * PROMPT : (at + 1) * PROMPT]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        job = Job(prompt, params, pages=tuple(range(LENGTH // PAGE)))
        run(generate(executor, [job], 1, chunk=lambda: CHUNK))
        told = [found.logprob for found in job.prompt_logprobs]
        assert len(told) == len(prompt) - 1
        losses += told
    return math.exp(-sum(losses) / len(losses))


@cache
def unquantized(pieces: int) -> float:
    """Return the perplexity with weights and cache in float32."""
    return perplexity(demo(), pieces)
