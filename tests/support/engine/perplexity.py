"""Perplexity of the embedded demo model on code held out of its training, through the executor that serves."""

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
    """The demo model on one device, its programs compiled as they are needed."""
    sizes = {"max_model_len": LENGTH, "max_num_batched_tokens": CHUNK, "kv_cache_memory": 32 << 20, "warm": False}
    return executors(model_path(), "1x1", **sizes | options)[0]


@cache
def held_out() -> tuple[int, ...]:
    """Tokens of a module that the corpus leaves out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path(), local_files_only=True)
    return tuple(tokenizer.encode(inspect.getsource(textwrap), verbose=False))


def perplexity(executor: JaxExecutor, pieces: int) -> float:
    """Over `pieces` prompts of `PROMPT` tokens, each computed in chunks."""
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
def unquantised(pieces: int) -> float:
    """Of weights and cache in float32."""
    return perplexity(demo(), pieces)
