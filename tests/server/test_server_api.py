"""The API through OpenAI's own client, on a real engine with one prefill and one decode instance."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
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


def test_models_health_and_version(live):
    (model,) = live.client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 256)
    assert live.client.models.retrieve(MODEL).id == MODEL
    assert live.http.get("/health").status_code == 200
    assert live.http.get("/version").json()["version"]


def test_completion(live):
    made = complete(live)
    (choice,) = made.choices
    assert choice.text and choice.finish_reason == "length"
    assert made.usage.completion_tokens == 8 and made.usage.prompt_tokens == len(live.service.tokenizer.encode(PROMPT))
    assert made.usage.total_tokens == made.usage.prompt_tokens + 8
    assert made.id.startswith("cmpl-")


def test_a_stream_equals_the_whole_answer(live):
    whole = complete(live, max_tokens=20)
    chunks = list(complete(live, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_done(live):
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "ignore_eos": True}
    with live.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert "usage" not in json.loads(lines[0][6:])


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


def test_concurrent_async_requests(live):
    alone = complete(live).choices[0].text

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", timeout=120) as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0.0, stream=True, logit_bias=NO_SPECIAL
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(12)))

    assert asyncio.run(main()) == [alone] * 12


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


def test_objectives_reach_the_engine(live):
    headers = {"x-llm-d-slo-ttft-ms": "1500", "x-slo-tpot-ms": "70"}
    body = {"prompt": PROMPT, "max_tokens": 2, "tpot_slo_ms": 30, "service_tier": "interactive", "priority": -3}
    made = live.http.post("/v1/completions", json=body, headers={**headers, "X-Request-Id": "abc"})
    assert made.headers["X-Request-Id"] == "abc" and made.json()["id"] == "cmpl-abc"
    assert made.json()["service_tier"] == "interactive"
    assert live.http.get("/health").headers["X-Request-Id"]


def test_tokenize_and_detokenize(live):
    made = live.http.post("/tokenize", json={"prompt": "héllo 🎉", "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == 256
    assert live.http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "héllo 🎉"}
    chat = live.http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["count"] > made["count"]


def test_unknown_fields_are_ignored(live, caplog):
    for _ in range(2):
        body = {"prompt": PROMPT, "max_tokens": 1, "zebra_mode": 3}
        assert live.http.post("/v1/completions", json=body).status_code == 200
    assert sum("zebra_mode" in record.getMessage() for record in caplog.records) == 1


def test_docs_describe_the_bodies(live):
    made = live.http.get("/openapi.json").json()
    schema = made["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    assert "ttft_slo_ms" in made["components"]["schemas"][name]["properties"]
