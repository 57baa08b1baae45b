"""Which tokens begin and end a model's thinking: a fact of its tokenizer's files, mostly without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from jaxserve.sched.api.thinking import Marker, ThinkingMarkers

# (beginning, end) as published families write them.
PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("[THINK]", "[/THINK]"),
)
# Harmony (gpt-oss): every message names its channel, and the answer is the channel `final`.
CHANNEL = "<|channel|>"
THOUGHT, FINAL = f"{CHANNEL}analysis", f"{CHANNEL}final"
# What begins a turn: marks of earlier turns say nothing of this one.
TURNS = frozenset(
    {
        "<|im_start|>",
        "<|start|>",
        "<|start_header_id|>",
        "<start_of_turn>",
        "<|user|>",
        "<|assistant|>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "[INST]",
        "[/INST]",
        "]~b]",
    }
)
# What may stand beside a marker that is plain text: its first and last token may hold some of that.
BEFORE = ("", " ", "\n", "\n\n", "a", ".", ".\n", ".\n\n")
AFTER = ("", " ", "\n", "\n\n", "a")


def thinking_markers(folder: Path, eos: Iterable[int] = ()) -> ThinkingMarkers:
    """Markers of the model in `folder`; none for one that does not think aloud.

    A marker is a token of its own, or plain text that the chat template writes: then every sequence of tokens that it
    may become. `eos`: ids that end a turn.
    """
    added = dict(_added(folder))
    template = _template(folder)
    opens, closes = set[Marker](), set[Marker]()
    for first, last in PAIRS:
        if last in added:
            closes.add((added[last],))
            opens.update({(added[first],)} if first in added else ())
        elif last in template and (tokens := _load(folder)) is not None:
            closes.update(_spelled(tokens, last))
            opens.update(_spelled(tokens, first))
    if CHANNEL in added and (tokens := _load(folder)) is not None:  # special tokens follow the name: nothing joins it
        opens.add(tuple(tokens.encode(THOUGHT, add_special_tokens=False).ids))
        closes.add(tuple(tokens.encode(FINAL, add_special_tokens=False).ids))
    if not closes:
        return ThinkingMarkers()
    opens.update((id,) for content, id in added.items() if content in TURNS)
    opens.update((id,) for id in eos)
    return ThinkingMarkers(tuple(sorted(opens - closes)), tuple(sorted(closes)))


def _spelled(tokens: Any, marker: str) -> set[Marker]:
    """Every sequence of tokens that a marker becomes between other text."""
    made = set[Marker]()
    for before, after in product(BEFORE, AFTER):
        found = tokens.encode(before + marker + after, add_special_tokens=False)
        start, end = len(before), len(before) + len(marker)
        spans = zip(found.ids, found.offsets, strict=True)
        made.add(tuple(id for id, (low, high) in spans if high > start and low < end))
    return made


def _load(folder: Path) -> Any:
    """The fast tokenizer of a folder; None where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _added(folder: Path) -> Iterator[tuple[str, int]]:
    """(content, id) of the tokens added to the vocabulary, from either file that may list them."""
    for token in _read(folder / "tokenizer.json").get("added_tokens", ()):
        yield token["content"], int(token["id"])
    for id, token in _read(folder / "tokenizer_config.json").get("added_tokens_decoder", {}).items():
        yield token["content"], int(id)


def _template(folder: Path) -> str:
    """The chat template of a folder as text: a file of its own, or in the settings (a list of several too), or ""."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return json.dumps(_read(folder / "tokenizer_config.json").get("chat_template") or "", ensure_ascii=False)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
