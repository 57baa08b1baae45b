"""Outputs of gpt-oss are read as openai-harmony reads them.

openai-harmony needs the vocabulary file o200k_base.tiktoken in the directory TIKTOKEN_ENCODINGS_BASE; without
that it would download the file.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.tools.families import Parsers

harmony = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed")
VOCABULARY = "o200k_base.tiktoken"
if not (Path(os.environ.get("TIKTOKEN_ENCODINGS_BASE", "")) / VOCABULARY).is_file():
    pytest.skip(f"TIKTOKEN_ENCODINGS_BASE has no {VOCABULARY}", allow_module_level=True)

BEGIN = "<|start|>assistant"  # the end of a prompt
texts = st.text(alphabet='ab {}"\\\n<|>é', min_size=1, max_size=20).filter(str.strip)
objects = st.dictionaries(st.text(max_size=4), st.none() | st.integers() | texts, max_size=3).map(json.dumps)
messages = st.lists(
    st.tuples(st.sampled_from(["analysis", "commentary", "final"]), st.none(), texts)
    | st.tuples(st.just("commentary"), st.sampled_from(["functions.weather", "functions.get_time"]), objects),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def encoding() -> Any:
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def rendered(encoding: Any, written: list[tuple[str, str | None, str]]) -> str:
    """Return the output of a model that writes these messages, by openai-harmony."""
    made = []
    for channel, recipient, text in written:
        one = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)
        made.append(one if recipient is None else one.with_recipient(recipient).with_content_type("<|constrain|>json"))
    config = harmony.RenderConversationConfig(auto_drop_analysis=False)
    tokens = encoding.render_conversation(harmony.Conversation.from_messages(made), config)
    return encoding.decode_utf8(tokens).removeprefix(BEGIN)


def read(encoding: Any, text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the thinking, the content and the calls of an output, by openai-harmony."""
    parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
    for token in encoding.encode(text, allowed_special="all"):
        parser.process(token)
    parser.process_eos()
    thinking, content, calls = "", "", []
    for one in parser.messages:
        body = "".join(part.text for part in one.content)
        if one.recipient is not None and one.recipient.startswith("functions."):
            calls.append((one.recipient.removeprefix("functions."), body))
        elif one.channel == "analysis":
            thinking += body
        else:
            content += body
    return thinking, content, calls


def parsed(text: str, points: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the same by our parser, which gets the output in pieces."""
    parser = Parsers("gpt_oss", "gpt_oss").start(None, "")
    ends = sorted({min(point, len(text)) for point in points} | {0, len(text)})
    events = [event for low, high in pairwise(ends) for event in parser.feed(text[low:high])] + parser.finish()
    thinking, content, calls = "", "", list[tuple[str, str]]()
    for kind, piece in events:
        if kind == "call":
            calls.append((piece, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + piece)
        elif kind == "reasoning":
            thinking += piece
        else:
            content += piece
    return thinking, content, calls


@given(messages, st.lists(st.integers(0, 300), max_size=8))
def test_messages_are_those_of_openai_harmony(encoding, written, points):
    text = rendered(encoding, written)
    assert parsed(text, points) == read(encoding, text)


@pytest.mark.parametrize(
    "text",
    [
        # a recipient in the role's part of the header, as gpt-oss also writes it
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.time "
        "<|constrain|>json<|message|>{}<|call|>",
        "<|channel|>final<|message|>cut off in the mid",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Pa',
    ],
)
def test_outputs_of_models_are_read_as_openai_harmony_does(encoding, text):
    text = text.removeprefix(BEGIN)
    assert parsed(text, list(range(len(text)))) == read(encoding, text)
