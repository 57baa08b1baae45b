"""What a model is asked, so that its answers can be learnt: a file's lines, the demo's corpus, its own beginnings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.errors import InvalidValue
from jaxserve.tokenizer import Tokenizer

FEWEST = 16  # prompts of a file; some are held out
LONGEST_BEGINNING = 48  # tokens that a model draws as a prompt for itself

Prompt = list[int]
Asked = tuple[int, Prompt]  # number of the prompt, its tokens
Prompts = Callable[[LLM, int, int], list[Asked]]  # of samples `first` to `last`, without the last


def of_file(path: Path, tokenizer: Tokenizer, longest: int) -> Prompts:
    """Each line a prompt; of a `.jsonl` a string, {"prompt": text} or {"messages": [...]}. Repeated as often as needed.

    `longest`: tokens; of longer prompts the end is kept. Raises InvalidValue naming file and line.
    """
    if not path.is_file():
        raise InvalidValue(f"prompts={str(path)!r} does not exist; expected a text file, or JSONL", "prompts")
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            made = _of_line(line, f"{path}:{number}", tokenizer) if path.suffix == ".jsonl" else tokenizer.encode(line)
            found.append(made[-longest:])
    if len(found) < FEWEST:
        raise InvalidValue(
            f"{path} has {len(found)} prompts; a draft needs at least {FEWEST}, better hundreds", "prompts"
        )
    return lambda llm, first, last: [(n % len(found), found[n % len(found)]) for n in range(first, last)]


def _of_line(line: str, where: str, tokenizer: Tokenizer) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidValue(f"{where} is not JSON: {error}", "prompts") from None
    row = {"prompt": row} if isinstance(row, str) else row
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return tokenizer.encode(row["prompt"])
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return tokenizer.encode(tokenizer.chat(row["messages"]), add_special_tokens=False)
    raise InvalidValue(f'{where} must be a string, {{"prompt": text}} or {{"messages": [...]}}', "prompts")


def of_demo(tokenizer: Tokenizer, longest: int, seed: int) -> Prompts:
    """Beginnings of what the demo model was trained on: of chats their question, of files some lines from anywhere."""
    from jaxserve.demo import corpus

    documents = corpus.build().train

    def chosen(n: int) -> Prompt:
        rng = np.random.default_rng((seed, n))
        text = documents[int(rng.integers(len(documents)))]
        if corpus.ASSISTANT in text and corpus.END_OF_TEXT in text:
            chats = text.split(corpus.END_OF_TEXT)
            question, _, _ = chats[int(rng.integers(len(chats)))].partition(f"{corpus.ASSISTANT}\n")
            text = f"{question}{corpus.ASSISTANT}\n"
            return tokenizer.encode(corpus.END_OF_TEXT + text, add_special_tokens=False)[:longest]
        lines = text.splitlines(keepends=True) or [""]  # some modules are empty
        begin = int(rng.integers(len(lines))) if rng.random() < 0.8 else 0
        ids = tokenizer.encode("".join(lines[begin : begin + 40]).rstrip(), add_special_tokens=False)
        return tokenizer.encode(corpus.END_OF_TEXT) + ids[: int(rng.integers(4, longest))]

    return lambda llm, first, last: [(n, chosen(n)) for n in range(first, last)]


def of_model(begin: int, longest: int, seed: int) -> Prompts:
    """What the model itself says at temperature 1 after its first token `begin`: some tokens of it are a prompt."""

    def drawn(llm: LLM, first: int, last: int) -> list[Asked]:
        rng = np.random.default_rng((seed, first))
        params = [
            SamplingParams(
                max_tokens=int(rng.integers(1, min(longest, LONGEST_BEGINNING))), seed=seed + n, ignore_eos=True
            )
            for n in range(first, last)
        ]
        outputs = llm.generate([[begin]] * (last - first), params, use_tqdm=False)
        return [(first + n, [begin, *output.outputs[0].token_ids]) for n, output in enumerate(outputs)]

    return drawn
