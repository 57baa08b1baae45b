"""Measure the cost and savings of 8-bit weights and KV cache for the demo model: perplexity and bytes.

Perplexity is measured on code that is not in the model's training data, from the log-probabilities of prompt tokens.
Prompts of a thousand tokens are computed in chunks, so that keys and values are read from the cache.
With `--checkpoints` the forms are folders of the model as other tools quantized it, as they are and in int8.
"""

from __future__ import annotations

import argparse
import inspect
import math
import textwrap
from pathlib import Path
from typing import Any

import common
import jax

from jaxserve import LLM, SamplingParams
from jaxserve.models.registry import load_spec
from jaxserve.report.table import print_table

PROMPT = 1000
FORMS: tuple[dict[str, str], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"kv_cache_dtype": "bfloat16"},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"quantization": "fp8"},
    {"quantization": "fp8_per_block"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
)


def measure(form: dict[str, str]) -> dict[str, Any]:
    """Return the perplexity of one form, the bytes of its weights, and its KV bytes per token."""
    sizes: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 256}
    with LLM(**sizes, kv_cache_memory=64 << 20, enable_prefix_caching=False, **form) as llm:
        tokens = llm.tokenizer.encode(inspect.getsource(textwrap))
        prompts = [tokens[at : at + PROMPT] for at in range(0, len(tokens), PROMPT)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        state = llm.engine._machine.executors[0].state
        layers = sum(leaf.nbytes for leaf in jax.tree.leaves(state.weights["layers"]))
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state.weights))
        limits = state.programs.limits
        cache = sum(part.nbytes for pool in state.pools for part in pool) // (limits.pages * limits.page_size)
    losses = [
        -told[token].logprob
        for output in outputs
        for token, told in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
        if told is not None
    ]
    perplexity = math.exp(sum(losses) / len(losses))
    return {"form": form, "perplexity": perplexity, "layers": layers, "weights": whole, "kv_token": cache}


def _forms(folders: list[str]) -> list[dict[str, str]]:
    """Return the forms to measure: FORMS, or the float model and folders, those that are widened also in int8."""
    if not folders:
        return list(FORMS)
    forms: list[dict[str, str]] = [{"dtype": "float32"}]
    for folder in folders:
        forms.append({"dtype": "float32", "model": folder})
        if load_spec(Path(folder)).quantized is None:
            forms.append({"dtype": "float32", "model": folder, "quantization": "int8"})
    return forms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_output(parser, "quantization")
    parser.add_argument("--checkpoints", nargs="+", default=[], help="folders of the demo model in other forms")
    args = parser.parse_args()
    if args.checkpoints:
        common.name_output(parser, args, "quantized_checkpoints")
    found = [measure(form) for form in _forms(args.checkpoints)]
    rows = []
    for one in found:
        change = one["perplexity"] / found[0]["perplexity"] - 1
        words = ", ".join(f"{name} {Path(value).name}" for name, value in one["form"].items())
        mb = (f"{one[name] / 1e6:.2f}" for name in ("layers", "weights"))
        rows.append([words, f"{one['perplexity']:.4f}", f"{change:+.3%}", *mb, one["kv_token"]])
    titles = ["form", "perplexity", "change", "layers, MB", "all weights, MB", "KV bytes per token"]
    print_table("the demo model in 8 bits", titles, rows)
    args.checkpoints = [Path(folder).name for folder in args.checkpoints]
    for one in found:
        one["form"] = {name: Path(value).name for name, value in one["form"].items()}
    common.save(args, {"forms": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
