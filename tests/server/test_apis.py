"""The APIs through their vendors' clients, on a real engine with one prefill and one decode instance."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from jaxserve import LLM, BeamSearchParams, SamplingParams
from jaxserve.errors import InvalidValue

MODEL = "jaxserve-demo"
PROMPT = "def main(args):\n"
NO_SPECIAL = {
    str(token): -100 for token in range(4)
}  # ends of text and turns: lengths are then exactly those requested
CHAT = [{"role": "user", "content": "What does os.path.join do?"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]


@pytest.fixture(scope="module")
def llm(engine: Any, tokenizer: Any) -> LLM:
    return LLM(engine=engine, tokenizer_object=tokenizer, max_model_len=256)


def complete(live: Any, **more: Any) -> Any:
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0.0, "logit_bias": NO_SPECIAL, **more}
    return live.client.completions.create(**given)


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


def choice_of(live: Any, **fields: Any) -> Any:
    made = live.http.post("/v1/completions", json={"prompt": "def main(", "max_tokens": 12, "seed": 3, **fields})
    assert made.status_code == 200, made.text
    return made.json()["choices"][0]


def test_responses_are_the_answers_of_chat(live: Any) -> None:
    given = {"model": MODEL, "temperature": 0.0}
    chat = live.client.chat.completions.create(
        messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=9, **given
    )
    made = live.client.responses.create(input="Hello", max_output_tokens=9, **given)
    assert made.output_text == chat.choices[0].message.content
    assert made.usage.input_tokens == chat.usage.prompt_tokens


def test_responses_are_parsed(live: Any) -> None:
    made = live.client.responses.parse(model=MODEL, input="A pet.", text_format=Pet, store=False)
    assert isinstance(made.output_parsed, Pet) and made.status == "completed"
    with live.client.responses.stream(model=MODEL, input="A pet.", text_format=Pet, store=False) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Pet)


def test_messages_are_the_answers_of_chat(live: Any) -> None:
    chat = live.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=9, temperature=0.0
    )
    made = live.anthropic.messages.create(
        model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "Hello"}], extra_body={"temperature": 0}
    )
    assert made.content[0].text == chat.choices[0].message.content
    schema = {"type": "json_schema", "schema": {**Pet.model_json_schema(), "additionalProperties": False}}
    made = live.anthropic.messages.create(
        model=MODEL, max_tokens=60, messages=[{"role": "user", "content": "A pet."}],
        output_config={"format": schema},
    )  # fmt: skip
    assert made.stop_reason == "end_turn" and Pet.model_validate_json(made.content[0].text)


def test_demanded_calls(live: Any) -> None:
    schema = {
        "type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"],
        "additionalProperties": False,  # or the demo model may add some until max_tokens
    }  # fmt: skip
    tool = {"type": "function", "name": "buy", "parameters": schema, "strict": True}
    made = live.client.responses.create(
        model=MODEL, input="A pet.", tools=[tool], tool_choice="required", parallel_tool_calls=False, store=False
    )
    assert made.output[-1].name == "buy" and json.loads(made.output[-1].arguments)["kind"] in ("cat", "dog")
    body = {
        "messages": [{"role": "user", "content": "A pet."}], "max_tokens": 60,
        "tools": [{"name": "buy", "input_schema": schema}], "tool_choice": {"type": "tool", "name": "buy"},
    }  # fmt: skip
    told = live.http.post("/v1/messages", json=body).json()
    assert told["stop_reason"] == "tool_use" and told["content"][-1]["input"]["kind"] in ("cat", "dog")


def test_filtered_tokens(live: Any, tokenizer: Any) -> None:
    allowed = sorted({token for word in (" a", " b", " c") for token in tokenizer.encode(word, False)})
    text = choice_of(live, allowed_token_ids=allowed, temperature=1.0)["text"]
    assert set(tokenizer.encode(text, False)) <= set(allowed)
    free = choice_of(live, temperature=0.0)["text"]
    word = free.split()[0]
    other = choice_of(live, temperature=0.0, bad_words=[word])["text"]
    assert word in free and word not in other
    told = live.http.post("/v1/completions", json={"prompt": "x", "allowed_token_ids": [10**6]})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_prompts_are_truncated(live: Any) -> None:
    ids = list(range(20, 400))
    long = {"prompt": ids, "temperature": 0.0, "truncate_prompt_tokens": 30}
    assert choice_of(live, **long)["text"] == choice_of(live, prompt=ids[-30:], temperature=0.0)["text"]
    made = live.http.post("/v1/completions", json={"prompt": ids, "max_tokens": 6, "truncate_prompt_tokens": -1})
    assert made.json()["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 250, "completion_tokens": 6, "total_tokens": 256, "prompt_tokens_details": None,
    }  # fmt: skip


@pytest.mark.parametrize("echo", [False, True])
def test_streams_score_the_prompt(live: Any, echo: bool) -> None:
    given = {"prompt": "def main(", "max_tokens": 2, "temperature": 0.0, "echo": echo}
    whole = choice_of(live, **given, prompt_logprobs=1)["prompt_logprobs"]
    stream = live.client.completions.create(model=MODEL, stream=True, **given, extra_body={"prompt_logprobs": 1})
    choices = [chunk.choices[0] for chunk in stream]
    assert choices[0].prompt_logprobs == whole
    assert not any(hasattr(choice, "prompt_logprobs") for choice in choices[1:])


def test_beam_search(llm: LLM, tokenizer: Any) -> None:
    prompts = ["def main(", "import"]
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=4))
    greedy = llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0, logprobs=0), use_tqdm=False)
    for prompt, output, plain in zip(prompts, found, greedy, strict=True):
        beams = output.sequences
        scores = [beam.cum_logprob / len(beam.tokens) for beam in beams if beam.finish_reason == "length"]
        assert len(beams) == 3 and scores == sorted(scores, reverse=True)
        assert len({tuple(beam.tokens) for beam in beams}) == 3
        assert plain.outputs[0].cumulative_logprob is not None
        assert beams[0].cum_logprob >= plain.outputs[0].cumulative_logprob - 1e-3
        assert all(beam.text is not None and beam.text.startswith(prompt) for beam in beams)
        for beam in beams:
            new = beam.tokens[len(tokenizer.encode(prompt)) :]
            told = sum(at[token].logprob for at, token in zip(beam.logprobs, new, strict=True))
            assert told == pytest.approx(beam.cum_logprob)
    one = llm.beam_search("def main(", BeamSearchParams(beam_width=1, max_tokens=4))[0].sequences[0]
    assert one.tokens == [*tokenizer.encode("def main("), *greedy[0].outputs[0].token_ids]
    with pytest.raises(InvalidValue, match="beam_width=11"):
        BeamSearchParams(beam_width=11, max_tokens=4)


def test_no_token_left_is_the_requests_fault(live: Any) -> None:
    """Which is known only when the constraint and the filter meet."""
    body = {"prompt": "x", "guided_regex": "[0-9]+", "allowed_token_ids": [5]}
    told = live.http.post("/v1/completions", json=body)
    assert (told.status_code, told.json()["error"]["code"]) == (400, "rejected")
    assert "allowed_token_ids" in told.json()["error"]["message"]


def test_prompt_logprobs(live):
    made = complete(live, max_tokens=1, extra_body={"prompt_logprobs": 1})
    listed = made.choices[0].prompt_logprobs
    assert listed[0] is None and len(listed) == made.usage.prompt_tokens
    ids = live.service.tokenizer.encode(PROMPT)
    for token, position in zip(ids[1:], listed[1:], strict=True):
        assert position[str(token)]["logprob"] <= 0 and position[str(token)]["rank"] >= 1
