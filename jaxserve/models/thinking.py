"""The tokens that begin and end a model's thinking, read from its tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from jaxserve.models.json_file import object_in
from jaxserve.sched.api.thinking import Marker, ThinkingMarkers
from jaxserve.yamlio import text_of

# (beginning, end) of published model families.
PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("[THINK]", "[/THINK]"),
    ("Here is my thought process:", "Here is my response:"),
)
OTHERS = {  # spellings that a family writes though it is told the first one
    "Here is my thought process:": "Here's my thought process:",
    "Here is my response:": "Here's my response:",
}
# How the instructions of Granite 3.2 and 3.3 name the tags. Without them in its prompt an output does not think.
ASKS = (" 'Here is my thought process:' and", " <think></think> and")
# Harmony (gpt-oss): every message names its channel, and the answer is in the channel `final`.
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
THOUGHT, FINAL = f"{CHANNEL}analysis", f"{CHANNEL}final"
# Tokens that begin a turn. Markers of earlier turns do not apply to the current one.
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
# Text that may surround a marker in plain text, and become part of its first and last token.
BEFORE = ("", " ", "\n", "\n\n", "a", ".", ".\n", ".\n\n")
AFTER = ("", " ", "\n", "\n\n", "a")


def thinking_markers(folder: Path, eos: Iterable[int] = (), template: str | None = None) -> ThinkingMarkers:
    """Return the thinking markers of the model in `folder`; none if it has no thinking stage.

    A marker is a single token, or plain text in the chat template. Plain text gives one marker for each
    sequence of tokens that it may be encoded as. eos: token ids that end a turn. template: replaces the folder's.
    """
    added = dict(_added(folder))
    template = _template(folder) if template is None else template
    opens, closes = set[Marker](), set[Marker]()
    for first, last in PAIRS:
        if last in added:
            closes.add((added[last],))
            opens.update({(added[first],)} if first in added else ())
        elif (first in template or last in template) and (tokens := _load(folder)) is not None:
            closes.update(_spelled(tokens, last))
            opens.update(_spelled(tokens, first))
    if CHANNEL in added and (tokens := _load(folder)) is not None:  # encodes one way: special tokens surround the name
        opens.add(tuple(tokens.encode(THOUGHT, add_special_tokens=False).ids))
        closes.add(tuple(tokens.encode(FINAL, add_special_tokens=False).ids))
    if not closes:
        return ThinkingMarkers()
    starts = tuple(sorted(opens - closes))
    asks = tuple(filter(None, (_words(folder, ask) for ask in ASKS if ask in template)))
    opens.update((id,) for content, id in added.items() if content in TURNS)
    opens.update((id,) for id in eos)
    header_end = added.get(MESSAGE) if CHANNEL in added else None
    return ThinkingMarkers(tuple(sorted(opens - closes)), tuple(sorted(closes)), starts, header_end, asks)


def _spelled(tokens: Any, marker: str) -> set[Marker]:
    """Return every sequence of tokens that a marker may be encoded as within other text."""
    markers = set[Marker]()
    for before, text, after in product(BEFORE, (marker, OTHERS.get(marker, marker)), AFTER):
        encoded = tokens.encode(before + text + after, add_special_tokens=False)
        start, end = len(before), len(before) + len(text)
        spans = zip(encoded.ids, encoded.offsets, strict=True)
        markers.add(tuple(id for id, (low, high) in spans if high > start and low < end))
    return markers


def _words(folder: Path, words: str) -> Marker:
    """Return the tokens of words as they stand in a prompt, without the last, which may be longer there."""
    tokens = _load(folder)
    return () if tokens is None else tuple(tokens.encode(words, add_special_tokens=False).ids[:-1])


def _load(folder: Path) -> Any:
    """Load the fast tokenizer of a folder; None if there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _added(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield (content, id) of the tokens added to the vocabulary, from both files that may list them."""
    for token in _read(folder / "tokenizer.json").get("added_tokens", ()):
        yield token["content"], int(token["id"])
    for id, token in _read(folder / "tokenizer_config.json").get("added_tokens_decoder", {}).items():
        yield token["content"], int(id)


def _template(folder: Path) -> str:
    """Return the chat templates of a folder as one text: from their file or tokenizer_config.json, or ""."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return text_of(path)
    return json.dumps(_read(folder / "tokenizer_config.json").get("chat_template") or "", ensure_ascii=False)


def _read(path: Path) -> dict[str, Any]:
    return object_in(path) if path.is_file() else {}
