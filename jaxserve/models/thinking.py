"""Which tokens end a model's thinking: a fact of its tokenizer, read without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDS = frozenset({"</think>", "</thinking>", "<|end_of_thought|>", "[/THINK]"})  # as published families write it


def end_thinking(folder: Path) -> frozenset[int]:
    """Ids of the tokens after which the answer begins; empty for a model that does not think aloud."""
    return frozenset(id for content, id in _added(folder) if content in ENDS)


def _added(folder: Path) -> Iterator[tuple[str, int]]:
    """(content, id) of the tokens added to the vocabulary, from either file that may list them."""
    for token in _read(folder / "tokenizer.json").get("added_tokens", ()):
        yield token["content"], int(token["id"])
    for id, token in _read(folder / "tokenizer_config.json").get("added_tokens_decoder", {}).items():
        yield token["content"], int(id)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
