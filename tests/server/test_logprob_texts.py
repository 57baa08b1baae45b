"""The texts, bytes and offsets of log-probabilities, with every kind of tokenizer: they are those of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.generation.batch import Names, add_piece, blank_output
from jaxserve.generation.generate import Choice, Piece, Submission, submit_all
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Delta, TokenLogprobs
from jaxserve.sched.api.slo import SLO
from jaxserve.server.answers import Answer
from jaxserve.tokenizer import Tokenizer, common
from tests.support.examples import examples
from tests.support.server.double import Double
from tests.support.tokenizers import KINDS, tokenizer_of

BROKEN = "\ufffd"


class Ended:
    """The part of an engine that an output needs at its end."""

    def record(self, request: int) -> None:
        return None

    def cancel(self, request: int, reason: str = "abort") -> None:
        """Do nothing: all tokens are there."""


def scored(tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -0.5, 1, ((token, -0.5),)) for token in tokens)


def answers(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], text: str | None = None, *,
    chat: bool = False, echo: bool = False, **params: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """Return the choice of a whole answer, and those of the chunks of a streamed one, a token each."""
    job = Submission(NewRequest(tuple(prompt), SamplingParams(logprobs=1, **params), SLO()), text)
    whole, stream = (Answer("r", "m", chat, [job], tokenizer, 1, False, echo) for _ in range(2))
    for answer, cuts in ((whole, [tuple(output)]), (stream, [(token,) for token in output])):
        choice = Choice(Ended(), tokenizer, job, 0)  # type: ignore[arg-type]
        chunks = []
        for at, tokens in enumerate(cuts):
            before = scored(prompt[1:]) if echo and at == 0 else ()
            delta = Delta(0, tokens, scored(tokens), before, "length" if at == len(cuts) - 1 else None)
            piece = choice.feed(delta)
            if answer is stream:
                chunks += [chunk["choices"][0] for chunk in answer.chunks(0, piece)]
            else:
                answer.add(0, piece)
            if piece.finish_reason:
                break
    return whole.whole()["choices"][0], chunks


def raw(names: Sequence[str]) -> bytes:
    """Return the bytes that the names of tokens stand for."""
    return b"".join(
        bytes(int(byte, 16) for byte in name.split("\\x")[1:]) if name.startswith("bytes:\\x") else name.encode()
        for name in names
    )


def joined(chunks: list[dict[str, Any]], key: str) -> list[Any]:
    return [item for chunk in chunks for item in (chunk["logprobs"] or {}).get(key, ())]


@st.composite
def drawn(draw: st.DrawFn, kind: str) -> tuple[Tokenizer, list[int], list[int], bool]:
    """Draw a prompt with some text, which no character leaves, an output, and whether special tokens are skipped."""
    tokenizer = tokenizer_of(kind)
    some = st.integers(0, len(tokenizer) - 1).map(lambda id: [id]) | st.integers(0, 3).map(lambda id: [id])
    characters = st.sampled_from("é日🎉 a").map(lambda one: tokenizer.encode(one, add_special_tokens=False))
    one = some.filter(lambda ids: ids[0] not in tokenizer.byte_fallback) | characters
    flat = st.lists(one, min_size=1, max_size=10).map(lambda lists: [id for ids in lists for id in ids])
    skip = draw(st.booleans())
    prompt = draw(flat.filter(lambda ids: not tokenizer.decode(ids, skip).endswith(BROKEN)))
    return tokenizer, prompt, draw(flat.filter(bool)), skip


def shown(tokenizer: Tokenizer, names: Sequence[str], tokens: Sequence[int], skip: bool) -> list[str]:
    """Return the names of tokens, empty for those that the text leaves out."""
    return ["" if skip and id in tokenizer.special else name for name, id in zip(names, tokens, strict=True)]


def check_slices(text: str, names: Sequence[str], offsets: Sequence[int]) -> None:
    """Assert that each name stands in the text at its offset, up to that of the next one."""
    assert list(offsets) == sorted(offsets)
    for name, (start, end) in zip(names, pairwise([*offsets, len(text)]), strict=True):
        if name and not name.startswith("bytes:"):
            assert text[start:end] == name, (start, end)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150))
@given(data=st.data())
def test_names_and_offsets_are_those_of_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer, prompt, output, skip = data.draw(drawn(kind))
    whole, chunks = answers(tokenizer, prompt, output, skip_special_tokens=skip)
    lists, text = whole["logprobs"], whole["text"]
    names = shown(tokenizer, lists["tokens"], output, skip)
    assert raw(names).decode("utf-8", "replace") == text
    check_slices(text, names, lists["text_offset"])
    assert "".join(chunk["text"] for chunk in chunks) == text
    assert {key: joined(chunks, key) for key in lists} == lists


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(100))
@given(data=st.data())
def test_bytes_of_chat_and_tokens_of_offline_outputs_add_up(kind: str, data: st.DataObject) -> None:
    tokenizer, prompt, output, skip = data.draw(drawn(kind))
    whole, chunks = answers(tokenizer, prompt, output, chat=True, skip_special_tokens=skip)
    entries = whole["logprobs"]["content"]
    assert joined(chunks, "content") == entries
    hidden = tokenizer.special if skip else frozenset()
    parts = [bytes(entry["bytes"]) for entry, id in zip(entries, output, strict=True) if id not in hidden]
    assert b"".join(parts).decode("utf-8", "replace") == whole["message"]["content"]
    assert all(entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace") for entry in entries)
    assert [entry["top_logprobs"][0]["bytes"] for entry in entries] == [entry["bytes"] for entry in entries]
    job = Submission(
        NewRequest(tuple(prompt), SamplingParams(logprobs=1, prompt_logprobs=1, skip_special_tokens=skip), SLO())
    )
    offline, names = blank_output(job), Names(job, tokenizer)
    for token in output:
        add_piece(offline, offline.outputs[0], Piece(0, tokens=(token,), logprobs=scored([token])), names)
    assert offline.outputs[0].logprobs is not None
    decoded = [at[token].decoded_token for at, token in zip(offline.outputs[0].logprobs, output, strict=True)]
    assert decoded == [entry["token"] for entry in entries]
    add_piece(offline, offline.outputs[0], Piece(0, prompt_logprobs=scored(prompt[1:])), names)
    listed = zip(offline.prompt_logprobs[1:] if offline.prompt_logprobs else (), prompt[1:], strict=True)
    texts = "".join(str(at[token].decoded_token) for at, token in listed if at is not None)
    assert BROKEN in texts or tokenizer.decode(prompt).endswith(texts)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(100))
@given(data=st.data())
def test_echo_has_the_prompt_and_its_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer, _, output, _ = data.draw(drawn(kind))
    words = st.lists(st.sampled_from(["a", "cat", "sat", "France", "  if", "in", "naïve", "."]), min_size=2, max_size=5)
    given, ids = " ".join(data.draw(words)), data.draw(st.booleans())
    prompt = tokenizer.encode(given)
    text = tokenizer.decode(prompt) if ids else given
    whole, chunks = answers(tokenizer, prompt, output, None if ids else given, echo=True, prompt_logprobs=1)
    lists, alone = whole["logprobs"], answers(tokenizer, prompt, output)[0]
    assert whole["text"] == text + alone["text"] == "".join(chunk["text"] for chunk in chunks)
    assert {key: joined(chunks, key) for key in lists} == lists
    assert lists["text_offset"][len(prompt) :] == [len(text) + at for at in alone["logprobs"]["text_offset"]]
    names, offsets = lists["tokens"][: len(prompt)], lists["text_offset"][: len(prompt)]
    if "".join(names) == text:
        check_slices(text, names, offsets)
    assert offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= len(text)
    assert raw(names).decode("utf-8", "replace").lstrip() == tokenizer.decode(prompt).lstrip()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_tokens_up_to_a_stop_string_are_those_of_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer, prompt, output, _ = data.draw(drawn(kind))
    text = answers(tokenizer, prompt, output)[0]["text"].rstrip(BROKEN)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 4))] or "never"
    whole, chunks = answers(tokenizer, prompt, output, stop=(stop,))
    lists = whole["logprobs"]
    names = shown(tokenizer, lists["tokens"], output[: len(lists["tokens"])], True)
    cut = whole["text"] + (stop if stop in text else "")
    assert raw(names).decode("utf-8", "replace").startswith(cut)
    assert joined(chunks, "tokens") == lists["tokens"]


@pytest.mark.parametrize("kind", ["byte_level", "tekken", "sentencepiece", "gemma", "metaspace"])
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("ends", ["as it began", "as another character"])
def test_a_character_that_the_prompt_begins_counts_once(kind: str, cut: int, ends: str) -> None:
    tokenizer = tokenizer_of(kind)
    parts, (a, cat) = byte_ids(tokenizer, "🎉"), (tokenizer.encode(word)[-1] for word in ("a", "cat"))
    output = [*(parts[cut:] if ends == "as it began" else ()), a, cat]
    whole, chunks = answers(tokenizer, parts[:cut], output)
    offsets, text = whole["logprobs"]["text_offset"], whole["text"]
    check_slices(text, whole["logprobs"]["tokens"], offsets)
    assert text.startswith("🎉") == (ends == "as it began") and joined(chunks, "text_offset") == offsets


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma", "metaspace"])
@pytest.mark.parametrize("run", [b"\xff", b"\xe4\xbd", "é".encode() + b"\x80", b"a\xc3"])
def test_offsets_are_right_again_behind_bytes_that_are_no_text(kind: str, run: bytes) -> None:
    """Byte-fallback decoders show each byte of such a run as U+FFFD, which is known at its end."""
    tokenizer = tokenizer_of(kind)
    cat = tokenizer.encode("a cat")[-1]
    by_byte = {tokenizer.piece_bytes(id): id for id in tokenizer.byte_fallback}
    output = [cat, *(by_byte[bytes([byte])] for byte in run), cat, cat]
    whole, chunks = answers(tokenizer, [cat], output)
    offsets, text = whole["logprobs"]["text_offset"], whole["text"]
    assert text == f" cat{BROKEN * len(run)} cat cat" and joined(chunks, "text_offset") == offsets
    assert offsets[0] == 0 and offsets[-2:] == [4 + len(run), 8 + len(run)] and offsets == sorted(offsets)


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of single bytes."""
    by_byte = {tokenizer.piece_bytes(id): id for id in tokenizer.byte_fallback or range(len(tokenizer))}
    return [by_byte[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("kind", KINDS)
def test_continued_messages_and_prompts_join_their_answers(fake: Any, kind: str) -> None:
    """The engine repeats its prompt: the text is what the tokenizer decodes for both, less the prompt."""
    tokenizer = tokenizer_of(kind)
    live = fake(own=tokenizer)
    live.engine.unlucky = None
    talk = [{"role": "user", "content": "in"}, {"role": "assistant", "content": "a cat"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    text = "[user] in [assistant] a cat"
    ids = tokenizer.encode(text)
    body = {"max_tokens": len(ids), "logprobs": 1}
    before, both = (tokenizer.hf.decode(some, skip_special_tokens=True) for some in (ids, ids + ids))
    expected = both[common(before, both) :]
    chat = live.http.post("/v1/chat/completions", json={**body, "messages": talk, "logprobs": True, **more}).json()
    choice = chat["choices"][0]
    assert choice["message"]["content"] == expected
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == expected
    whole = live.http.post("/v1/completions", json={**body, "prompt": text, "echo": True}).json()["choices"][0]
    assert whole["text"] == text + expected
    check_slices(whole["text"], whole["logprobs"]["tokens"][len(ids) :], whole["logprobs"]["text_offset"][len(ids) :])
    stop = expected[len(expected) // 2 :][:3]
    cut = live.http.post("/v1/completions", json={**body, "prompt": text, "stop": [stop]}).json()["choices"][0]
    assert cut["text"] == expected.split(stop)[0]
    made = live.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert "".join(made["token_strs"]) == tokenizer.decode(made["tokens"])


class Counting(Tokenizer):
    """A tokenizer that counts how often it is asked whether a token has text."""

    asked = 0

    def has_text(self, token: int, skip_special_tokens: bool = False) -> bool:
        self.asked += 1
        return super().has_text(token, skip_special_tokens)


def test_the_end_of_a_prompt_is_sought_once_for_all_outputs() -> None:
    """A prompt may end in many tokens without text, and 128 outputs then held the event loop for seconds."""
    tokenizer = Counting(tokenizer_of("byte_level").hf)
    params = SamplingParams(logprobs=1, n=50)
    job = Submission(NewRequest((min(tokenizer.special),) * 1000, params, SLO()), None)
    submit_all(Double(), tokenizer, job, lambda choice, delta: None)
    assert 1000 <= tokenizer.asked < 2000
    Answer("r", "m", True, [job], tokenizer, 1, False)
    assert tokenizer.asked < 3000
    Names(job, tokenizer)
    assert tokenizer.asked < 4500


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_output_has_the_scores_of_the_echo_whichever_comes_first(
    tokenizer: Tokenizer, order: tuple[int, ...]
) -> None:
    prompt, output = tuple(tokenizer.encode("def f")), tuple(tokenizer.encode(" x"))
    job = Submission(NewRequest(prompt, SamplingParams(n=3, logprobs=1), SLO()), "def f")
    answer = Answer("r", "m", False, [job], tokenizer, 1, False, True)
    chunks = []
    for index in order:
        before = scored(prompt[1:]) if index == 0 else ()  # the first output computes them
        choice = Choice(Ended(), tokenizer, job, index)  # type: ignore[arg-type]
        piece = choice.feed(Delta(0, output, scored(output), before, "length"))
        chunks += [chunk["choices"][0] for chunk in answer.chunks(0, piece)]
    for index in range(3):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert joined(own, "token_logprobs") == [None, *[-0.5] * (len(prompt) - 1 + len(output))]
        assert own[-1]["finish_reason"] == "length"
