"""The API through OpenAI's own client, on a real engine with one prefill and one decode instance."""

from __future__ import annotations

from typing import Any

import pytest

MODEL = "jaxserve-demo"
PROMPT = "def main(args):\n"
NO_SPECIAL = {
    str(token): -100 for token in range(4)
}  # ends of text and turns: lengths are then exactly those requested
CHAT = [{"role": "user", "content": "What does os.path.join do?"}]


def complete(live: Any, **more: Any) -> Any:
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0.0, "logit_bias": NO_SPECIAL, **more}
    return live.client.completions.create(**given)


def test_a_stream_equals_the_whole_answer(live):
    whole = complete(live, max_tokens=20)
    chunks = list(complete(live, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(live):
    made = live.client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=8, temperature=0.0)
    message = made.choices[0].message
    assert message.role == "assistant" and isinstance(message.content, str)
    chunks = list(
        live.client.chat.completions.create(
            model=MODEL, messages=CHAT, max_completion_tokens=8, temperature=0.0, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    same = live.client.chat.completions.create(model=MODEL, messages=parts, max_completion_tokens=8, temperature=0.0)
    assert same.choices[0].message.content == message.content


def test_logprobs_in_both_formats(live):
    text = complete(live, logprobs=3).choices[0]
    lists = text.logprobs
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset) == 8
    assert "".join(lists.tokens) == text.text and lists.text_offset[1] == len(lists.tokens[0])
    for token, logprob, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True):
        assert logprob <= 0 and top[token] == pytest.approx(logprob)
        assert len(top) in (3, 4) and max(top.values()) >= logprob
    chat = live.client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=4,
        temperature=0.0,
        logprobs=True,
        top_logprobs=2,
        logit_bias=NO_SPECIAL,
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(bytes(entry.bytes).decode("utf-8", "replace") == entry.token for entry in content)


def test_prompt_logprobs(live):
    made = complete(live, max_tokens=1, extra_body={"prompt_logprobs": 1})
    listed = made.choices[0].prompt_logprobs
    assert listed[0] is None and len(listed) == made.usage.prompt_tokens
    ids = live.service.tokenizer.encode(PROMPT)
    for token, position in zip(ids[1:], listed[1:], strict=True):
        assert position[str(token)]["logprob"] <= 0 and position[str(token)]["rank"] >= 1


def test_echo_scores_the_prompt(live):
    made = complete(live, max_tokens=0, echo=True, logprobs=1)
    choice = made.choices[0]
    assert choice.text == PROMPT and made.usage.completion_tokens == 0
    assert "".join(choice.logprobs.tokens) == PROMPT and choice.logprobs.token_logprobs[0] is None
    echoed = complete(live, max_tokens=3, echo=True).choices[0].text
    assert echoed == PROMPT + complete(live, max_tokens=3).choices[0].text
    chunks = list(complete(live, max_tokens=3, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed


def test_several_outputs_and_prompts(live):
    made = complete(live, n=3, temperature=1.0, seed=7)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert len({choice.text for choice in made.choices}) > 1
    assert [c.text for c in complete(live, n=3, temperature=1.0, seed=7).choices] == [c.text for c in made.choices]
    ids = live.service.tokenizer.encode(PROMPT)
    assert complete(live, prompt=ids).choices[0].text == complete(live).choices[0].text
    both = complete(live, prompt=[PROMPT, "import os"], n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == complete(live).choices[0].text
    assert complete(live, prompt=[ids, ids]).choices[1].text == both.choices[0].text
    chunks = list(complete(live, prompt=[PROMPT, "import os"], stream=True))
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


def test_stop_strings_and_tokens(live):
    text = complete(live, max_tokens=40).choices[0].text
    stop = text[5:9]
    cut = complete(live, max_tokens=40, stop=[stop, "never there"])
    assert cut.choices[0].text == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop and cut.usage.completion_tokens < 40
    kept = complete(live, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(stop)] + stop
    chunks = list(complete(live, max_tokens=40, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    token = live.http.post("/tokenize", json={"prompt": text}).json()["tokens"][3]
    by_token = complete(live, max_tokens=40, extra_body={"stop_token_ids": [token]})
    assert by_token.choices[0].finish_reason == "stop" and by_token.choices[0].stop_reason == token
    assert text.startswith(by_token.choices[0].text)
    live.quiet()


def test_output_lengths(live):
    long = complete(live, max_tokens=30, extra_body={"ignore_eos": True, "min_tokens": 30})
    assert long.usage.completion_tokens == 30
    rest = live.client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0.0, extra_body={"ignore_eos": True}
    )
    assert rest.usage.total_tokens == 256 and rest.choices[0].finish_reason == "length"


def test_a_logit_bias_forces_a_token(live):
    (token,) = live.service.tokenizer.encode("import")
    made = complete(live, max_tokens=3, logit_bias={**NO_SPECIAL, str(token): 100})
    assert made.choices[0].text == "import" * 3
