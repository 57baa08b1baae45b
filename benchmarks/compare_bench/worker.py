"""Run one engine in a process of its own, driven by lines on stdin.

    python worker.py SIDE SETTINGS      SETTINGS: a JSON object with the fields of `Settings`

Answers each line `requests prompt tokens seed` with a JSON object: seconds, the first tokens and the peak memory of the
process. Runs in any Python that has the engine; only the side `jaxserve` imports jaxserve.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MARK = "@@"  # prefix of lines that the parent reads
Generate = Callable[[list[list[int]], int], list[list[int]]]


@dataclass(frozen=True)
class Settings:
    model: str  # a folder with safetensors
    vocabulary: int
    threads: int
    rows: int  # maximum number of concurrent requests
    length: int  # maximum of prompt plus output, tokens
    options: Mapping[str, Any]  # further arguments of jaxserve's `LLM`


def jaxserve(settings: Settings) -> Generate:
    from jaxserve import LLM, SamplingParams

    llm = LLM(
        settings.model,
        mesh="1x1",
        dtype="float32",
        max_num_seqs=settings.rows,
        max_model_len=settings.length,
        enable_prefix_caching=False,
        **settings.options,
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return [list(found.outputs[0].token_ids) for found in llm.generate(prompts, params, use_tqdm=False)]

    return generate


def vllm(settings: Settings) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        settings.model,
        dtype="float32",
        max_num_seqs=settings.rows,
        max_model_len=settings.length,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(found.outputs[0].token_ids) for found in llm.generate(asked, params, use_tqdm=False)]

    return generate


def _torch_model(settings: Settings) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings.threads)
    return AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, attn_implementation="sdpa").eval()


def transformers(settings: Settings) -> Generate:
    """Return batched `generate` over prompts of equal length."""
    import torch

    loaded = _torch_model(settings)

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        out = loaded.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return rows

    return generate


def continuous(settings: Settings) -> Generate:
    """Return transformers' continuous batching."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    loaded = _torch_model(settings)
    page = 32
    pool = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=settings.rows * -(-max(512, settings.length) // page) + 1,
        max_batch_tokens=2048,
        allow_block_sharing=False,
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        config = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        found = loaded.generate_batch(
            inputs=prompts,
            generation_config=config,
            continuous_batching_config=pool,
            persistent_manager=True,
            progress_bar=False,
            warmup=False,
        )
        return [list(one.generated_tokens) for one in found.values()]

    return generate


SIDES: Mapping[str, Callable[[Settings], Generate]] = {
    "jaxserve": jaxserve,
    "vllm": vllm,
    "transformers": transformers,
    "continuous": continuous,
}


def prompts_of(count: int, length: int, seed: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of random ids, without the first sixteen ids, which are often special tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(16, vocabulary) for _ in range(length)] for _ in range(count)]


def main(side: str, text: str) -> None:
    settings = Settings(**json.loads(text))
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: settings.threads]))
    began = time.perf_counter()
    generate = SIDES[side](settings)
    print(MARK, json.dumps({"start": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        requests, prompt, tokens, seed = map(int, line.split())
        prompts = prompts_of(requests, prompt, seed, settings.vocabulary)
        began = time.perf_counter()
        out = generate(prompts, tokens)
        seconds = time.perf_counter() - began
        if [len(row) for row in out] != [tokens] * requests:
            raise SystemExit(f"{side} gave {[len(row) for row in out]} tokens, not {tokens} for each of {requests}")
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(MARK, json.dumps({"seconds": seconds, "first": out[0][:8], "memory": memory}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
