"""Detokenization and stop strings: no character is split, no text is lost, and the work per token is bounded."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from jaxserve.errors import InvalidValue
from jaxserve.generation.detokenize import Detokenizer, TextStream
from jaxserve.generation.stops import StopStrings, Thinking, Thoughts
from jaxserve.sched.api.params import SamplingParams
from jaxserve.tokenizer import Tokenizer, common, template_of
from jaxserve.tools.scan import Automaton
from tests.support.examples import examples
from tests.support.tokenizers import KINDS, tokenizer_of

WORDS = ["▁the", "▁cat", "s", "▁", "<s>", "</s>", "é"]


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """A SentencePiece-like tokenizer: byte fallback for unknown characters, and a mark for spaces."""
    vocab = {piece: id for id, piece in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + WORDS)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>"))


def streamed(tokenizer, ids, prompt=(), skip=True):
    detokenizer = Detokenizer(tokenizer, skip, prompt)
    parts = [detokenizer.add([id]) for id in ids]
    return [*parts, detokenizer.add([], final=True)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(100))
@given(data=st.data())
def test_text_is_what_transformers_decodes_less_the_prompt(kind, data):
    tokenizer, skip = tokenizer_of(kind), data.draw(st.booleans())
    ids = st.integers(0, 3) | st.integers(0, len(tokenizer) + 2)
    if tokenizer.byte_fallback:
        ids |= st.sampled_from(sorted(tokenizer.byte_fallback))
    prompt = data.draw(st.lists(ids, max_size=24) | st.text(max_size=8).map(tokenizer.encode))
    output = data.draw(st.lists(ids, max_size=40))
    before, whole = (
        tokenizer.hf.decode(some, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        for some in (prompt, prompt + output)
    )
    # The output may complete a character of the prompt, whose text is then no beginning of the whole.
    assert "".join(streamed(tokenizer, output, prompt, skip)) == whole[common(before, whole) :]
    stream, cut = Detokenizer(tokenizer, skip, prompt), data.draw(st.integers(0, len(output)))
    together = stream.add(output[:cut]) + stream.add(output[cut:], final=True)
    assert together == whole[common(before, whole) :], "tokens added together have another text"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_stop_strings_are_found_in_the_text_of_every_kind(kind, data):
    tokenizer = tokenizer_of(kind)
    ids = st.lists(st.integers(4, len(tokenizer) - 1), max_size=20)
    prompt, output = data.draw(ids), data.draw(ids)
    text = "".join(streamed(tokenizer, output, prompt))
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 5))] or "never"
    stream = TextStream(tokenizer, SamplingParams(stop=(stop,)), prompt=prompt)
    gains = [stream.add([id], final=at == len(output) - 1) for at, id in enumerate(output)]
    end = next((at for at, gain in enumerate(gains) if gain.stop), len(gains))
    assert "".join(gain.text for gain in gains[: end + 1]) == text.split(stop)[0]
    assert any(gain.stop for gain in gains) == (stop in text)


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma", "metaspace"])
def test_a_run_of_bytes_in_the_prompt_goes_on_behind_special_tokens(kind):
    tokenizer = tokenizer_of(kind)
    ids = sorted(tokenizer.byte_fallback)
    prompt, output = [ids[0xFF], 2, 1, *(ids[byte] for byte in b"abcde"), 2], [ids[0x41]]
    assert "".join(streamed(tokenizer, output, prompt)) == "\ufffd", "one byte that is not UTF-8 breaks the whole run"


@given(st.text(max_size=40))
def test_characters_are_emitted_whole(tokenizer, text):
    parts = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts), "part of a character was emitted"


def test_a_run_of_byte_tokens_is_emitted_at_its_end(fallback):
    run = list("你好".encode())
    parts = streamed(fallback, [257, *run, 256, *run[:2]])
    assert parts == [" cat".strip(), "", "", "", "", "", "", "你好 the", "", "", "\ufffd\ufffd"]


def test_the_work_per_token_is_bounded(tokenizer):
    sizes = []

    class Counting:
        byte_fallback = frozenset()
        has_text = tokenizer.has_text

        def decode(self, tokens, skip_special_tokens=False):
            sizes.append(len(tokens))
            return tokenizer.decode(tokens, skip_special_tokens)

    garbage = tokenizer.encode("é")[:1] if len(tokenizer.encode("é")) > 1 else [200]
    for ids in ([500 + i % 50 for i in range(3000)], garbage * 3000):
        sizes.clear()
        streamed(Counting(), ids)
        assert max(sizes) <= 16 and len(sizes) <= 2 * len(ids)


def test_pieces_are_the_bytes_of_tokens(tokenizer, fallback):
    for text in ("def main(args):", "héllo 🎉 你好"):
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.piece_bytes, ids)).decode() == text
    assert fallback.piece_bytes(0xE4) == b"\xe4" and fallback.piece_bytes(256, 257) == b" the"
    assert fallback.piece_bytes(256) == b"the", "a text begins without the space"
    assert tokenizer.piece_bytes(0) == b"<|endoftext|>" and tokenizer.piece_bytes(10**6) == b""


@given(st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.text("abc", max_size=30), st.randoms())
def test_streamed_stop_strings_match_a_single_search(stops, text, rng):
    finder, rest, out, found = StopStrings(stops), text, "", None
    while rest and found is None:
        cut = rng.randint(1, 4)
        new, found = finder.add(rest[:cut])
        out, rest = out + new, rest[cut:]
    if found is None:
        out += finder.flush()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (out, found) == (text, None)
    else:
        assert found in stops and text.startswith(out + found) and len(out + found) == min(ends)


PARTS = ["<t>", "<'t>", "</t>", "</'t>", "<", "/t>", "t", "'", " ", "\n"]


@pytest.mark.parametrize("begun", [False, True])
@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), st.randoms(), st.sampled_from([4, 40]))
@example("<t></'t></t>", Random(0), 40)  # both in one piece
def test_thinking_ends_at_its_tag_however_it_is_cut(begun, text, rng, most):
    finder, rest, thinking, answer = Thoughts(Thinking(("<t>", "<'t>"), ("</t>", "</'t>"), begun)), text, "", ""
    while rest:
        cut = rng.randint(1, most)
        new = finder.add(rest[:cut])
        assert not (answer and new[0]), "the answer comes last"
        thinking, answer, rest = thinking + new[0], answer + new[1], rest[cut:]
    answer += finder.flush()
    assert thinking + answer == text
    thinks = begun or text.lstrip().startswith(("<t>", "<'t>"))
    end = min((text.find(tag) + len(tag) for tag in ("</t>", "</'t>") if tag in text), default=len(text))
    assert thinking == (text[:end] if thinks else "")


def test_a_possible_start_of_a_stop_string_is_held_back():
    finder = StopStrings(["</end>"])
    assert finder.add("a </") == ("a ", None)
    assert finder.add("en") == ("", None)
    assert finder.add("try") == ("</entry", None)
    assert finder.add("</end> more") == ("", "</end>")
    assert StopStrings(["b"], include=True).add("abc") == ("ab", "b")


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (["x" * 1025], "the longest of 1025"),
        ([f"stop{number}" for number in range(65)], "there are 65"),
        ([f"stop{number}" for number in range(10_000)], "at most 64 strings of at most 1024 characters"),
        (["", "a"], "not empty"),
    ],
)
def test_too_many_or_too_long_stop_strings_are_refused_with_the_limits(plain, stop, says):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = plain.http.post(path, json={**body, "stop": stop})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "stop" and says in error["message"], error
        assert len(error["message"]) < 300
    with pytest.raises(InvalidValue, match="stop_token_ids"):
        SamplingParams(stop_token_ids=tuple(range(1025)))
    allowed = plain.http.post("/v1/completions", json={"prompt": "x", "stop": ["y" * 1024] * 64, "max_tokens": 2})
    assert allowed.status_code == 200


def test_work_per_character_does_not_grow_with_the_number_of_stop_strings():
    """Count visited states per character, over the worst text for the worst stop strings."""

    class Counting(Automaton):
        visited = 0

        def _find(self, node, character):
            self.visited += 1
            return super()._find(node, character)

    text = ("a" * 1023 + "b") * 20
    for stops in (["a" * 1024], [f"{'a' * 1000}{chr(200 + number)}" for number in range(64)]):
        automaton = Counting(stops)
        assert automaton.visited <= 3 * sum(map(len, stops)), "nor does that of building it"
        automaton.visited, state = 0, 0
        for character in text:
            state, _, found = automaton.scan(state, character)
            assert not found
        assert automaton.visited <= 2 * len(text)


def test_of_two_matches_at_one_end_the_longer_wins():
    for stops in (["b", "ab"], ["ab", "b"], ["b", "aab", "ab"]):
        assert StopStrings(stops).add("xaabc")[1] == max(stops, key=len)
    assert StopStrings(["abcd", "bc"]).add("abcd") == ("a", "bc")  # the first match to end


def test_outputs_of_a_request_share_one_automaton(fake, monkeypatch):
    made = []
    init = Automaton.__init__

    def counted(self, stops):
        made.append(tuple(stops))
        init(self, stops)

    monkeypatch.setattr(Automaton, "__init__", counted)
    live = fake()
    body = {"prompt": ["x y z", "z y x"], "stop": ["never"], "n": 5, "max_tokens": 3}
    assert live.http.post("/v1/completions", json=body).status_code == 200
    assert made.count(("never",)) == 1


def test_tokens_after_the_stop_are_dropped(tokenizer):
    ids = tokenizer.encode("one two three four")
    stream = TextStream(tokenizer, SamplingParams(stop=("two",)))
    gain = stream.add(ids, final=True)
    assert gain.text == "one " and gain.stop == "two" and gain.used < len(ids)
    assert tokenizer.decode(ids[: gain.used]).rstrip().endswith("two")


def test_stop_strings_before_min_tokens_are_ignored(tokenizer):
    ids = tokenizer.encode("two two two")
    stream = TextStream(tokenizer, SamplingParams(stop=("two",), min_tokens=len(ids), max_tokens=99))
    gain = stream.add(ids)
    assert gain.text == "two two " and gain.stop == "two"


def test_the_stop_token_is_not_in_the_text(tokenizer):
    ids = tokenizer.encode("one two")
    assert TextStream(tokenizer, SamplingParams()).add(ids, final=True, stop_token=ids[-1]).text == "one"
    kept = TextStream(tokenizer, SamplingParams(include_stop_str_in_output=True))
    assert kept.add(ids, final=True, stop_token=ids[-1]).text == "one two"


def test_chat_templates(tokenizer, fallback, tmp_path):
    talk = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat(talk).endswith("<|assistant|>\n")
    assert not tokenizer.chat(talk, add_generation_prompt=False).endswith("<|assistant|>\n")
    with pytest.raises(InvalidValue, match="no chat template"):
        fallback.chat(talk)
    with pytest.raises(InvalidValue, match="wizard"):
        tokenizer.chat([{"role": "wizard", "content": "x"}])
    with pytest.raises(InvalidValue, match="may not set tokenize"):
        tokenizer.chat(talk, arguments={"tokenize": True})
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}{{ mood }}!")
    loaded = Tokenizer.load(tokenizer._hf.name_or_path, chat_template=str(own))
    assert loaded.chat(talk, arguments={"mood": "?"}) == "hi?!"
    with pytest.raises(InvalidValue, match="neither a file nor a template"):
        Tokenizer.load("x", chat_template="nowhere.jinja")


@pytest.mark.parametrize(
    ("name", "raw", "template"),
    [
        ("chat_template.json", b'{"chat_template": "{{ messages }}"}', "{{ messages }}"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", '
         b'"template": "{{ d }}"}], "eos_token": "x"}', "{{ d }}"),
        ("own.jinja", b"\xef\xbb\xbf{{ messages }}", "{{ messages }}"),
        ("own.jinja", "café {{ x }}".encode("latin-1"), "is not UTF-8: save the file in that encoding"),
        ("chat_template.json", b'{"other": 1}', "no key 'chat_template' with a template"),
        ("chat_template.json", b"{{ messages }}", "is not JSON"),
    ],
)  # fmt: skip
def test_template_files_as_people_have_them(name, raw, template, tmp_path):
    path = tmp_path / name
    path.write_bytes(raw)
    try:
        read = template_of(str(path))
    except InvalidValue as error:
        assert "{{" not in template and template in str(error) and str(path) in str(error)
    else:
        assert read == template


@pytest.fixture(scope="module")
def repeating(fakes):
    """A server whose model repeats the prompt, with a tokenizer that strips the first space of a text."""
    return fakes(own=tokenizer_of("sentencepiece"))


def answers(live, path, **body):
    """Return the text of the whole answer and of the streamed one."""
    whole = live.http.post(path, json=body).json()["choices"][0]
    with live.http.stream("POST", path, json={**body, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    if "message" in whole:
        return whole["message"]["content"], "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
    return whole["text"], "".join(event["choices"][0]["text"] for event in events)


def test_an_answer_keeps_its_first_space(repeating):
    prompt = "The capital of France is"
    length = len(repeating.service.tokenizer.encode(prompt))
    ask = {"prompt": prompt, "max_tokens": length}
    assert answers(repeating, "/v1/completions", **ask) == (" " + prompt,) * 2
    assert answers(repeating, "/v1/completions", **ask, echo=True) == (f"{prompt} {prompt}",) * 2
    assert answers(repeating, "/v1/completions", **ask, stop=[" is"]) == (" The capital of France",) * 2
    assert answers(repeating, "/v1/completions", **ask, stop=[" The"]) == ("",) * 2
    ask["prompt"] = repeating.service.tokenizer.encode(prompt)
    assert answers(repeating, "/v1/completions", **ask, echo=True) == (f"{prompt} {prompt}",) * 2


def test_a_continued_message_keeps_its_first_space(repeating):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a cat"}]
    text = "[user] hi [assistant] a cat"
    more = {"continue_final_message": True, "add_generation_prompt": False}
    length = len(repeating.service.tokenizer.encode(text))
    got = answers(repeating, "/v1/chat/completions", messages=talk, max_tokens=length, **more)
    assert got == (" " + text,) * 2
