"""Structured outputs through OpenAI's client, on a real engine in front of which another process could be."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from jaxserve.structured import compiler

MODEL = "jaxserve-demo"
CHAT = [{"role": "user", "content": "Describe a pet."}]


class Pet(BaseModel, extra="forbid"):
    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]
    tame: bool


FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema(), "strict": True}}


def complete(live: Any, **fields: Any) -> str:
    made = live.http.post("/v1/completions", json={"prompt": "A:", "max_tokens": 60, "temperature": 1.0, **fields})
    assert made.status_code == 200, made.text
    return str(made.json()["choices"][0]["text"])


def test_parse(live: Any) -> None:
    """Several outputs share a constraint."""
    made = live.client.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Pet, temperature=1.0, n=3)
    assert [choice.finish_reason for choice in made.choices] == ["stop"] * 3
    assert all(isinstance(choice.message.parsed, Pet) for choice in made.choices)


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"structured_outputs": {"regex": "[0-9]{4}-[a-f]{1,6}!"}}, r"[0-9]{4}-[a-f]{1,6}!"),
        ({"guided_regex": "[xyz]{3}"}, r"[xyz]{3}"),
        ({"guided_choice": ["north", "south"]}, "north|south"),
        ({"guided_json": {"enum": ["cat", "dog"]}}, '"(cat|dog)"'),
        ({"guided_grammar": 'root ::= "<" [a-c] ">"'}, "<[a-c]>"),
        ({"structured_outputs": {"choice": ["a", "b"]}, "temperature": 0.0}, "a|b"),
        ({"guided_regex": "(ab){1,4}", "repetition_penalty": 1.3, "logprobs": 2}, "(ab){1,4}"),
    ],
    ids=str,
)
def test_fields_of_vllm(live: Any, fields: dict[str, Any], right: str) -> None:
    assert re.fullmatch(right, complete(live, **fields))


def test_each_request_has_its_own_constraint(live: Any) -> None:
    """Constrained and free requests run together, and nothing is compiled for them."""
    compiled = live.engine.stats().compilations_after_warmup
    wanted = [{"guided_regex": "[ab]{30}"}, {}, {"response_format": {"type": "json_object"}}, {"guided_choice": ["c"]}]
    with ThreadPoolExecutor(12) as pool:
        texts = list(
            pool.map(lambda number: complete(live, seed=number, ignore_eos=False, **wanted[number % 4]), range(12))
        )
    for number, text in enumerate(texts):
        if number % 4 == 0:
            assert re.fullmatch("[ab]{30}", text)
        if number % 4 == 2:
            assert text.startswith("{")
        if number % 4 == 3:
            assert text == "c"
    assert live.engine.stats().compilations_after_warmup == compiled


def test_a_hostile_schema_hurts_no_other_request(live: Any) -> None:
    hostile = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(20_000)}}

    def refused(_: int) -> int:
        return int(live.http.post("/v1/completions", json={"prompt": "A:", "guided_json": hostile}).status_code)

    with ThreadPoolExecutor(8) as pool:
        codes = pool.map(refused, range(4))
        texts = list(pool.map(lambda _: complete(live, guided_choice=["fine"]), range(4)))
        assert list(codes) == [400] * 4
    assert texts == ["fine"] * 4


CHAIN = {
    "type": "object",
    "$defs": {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(2000)}
    | {"d2000": {"type": "string"}},
    "properties": {"a": {"$ref": "#/$defs/d0"}},
}
CALL = {"type": "function", "function": {"name": "f", "parameters": CHAIN}}
TAG = {"type": "structural_tag", "structures": [{"begin": "<a", "schema": CHAIN, "end": ">"}], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "x", "guided_json": CHAIN}),
        ("completions", {"prompt": "x", "structured_outputs": {"json": CHAIN}}),
        ("completions", {"prompt": "x", "response_format": {**FORMAT, "json_schema": {"name": "a", "schema": CHAIN}}}),
        ("completions", {"prompt": "x", "response_format": TAG}),
        ("completions", {"prompt": "x", "guided_grammar": "\n".join(f"r{at}: r{at + 1}" for at in range(4000))}),
        ("chat/completions", {"messages": CHAT, "tools": [CALL], "tool_choice": "required"}),
        ("chat/completions", {"messages": CHAT, "tools": [CALL], "tool_choice": CALL}),
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": CHAIN}}}),
        ("messages",
         {"messages": CHAT, "max_tokens": 9, "tools": [{"name": "f", "input_schema": CHAIN}],
          "tool_choice": {"type": "any"}}),
    ],
)  # fmt: skip
def test_no_api_compiles_a_chain_of_thousands(plain: Any, path: str, fields: dict[str, Any]) -> None:
    made = plain.http.post(f"/v1/{path}", json={"model": MODEL, **fields})
    assert made.status_code == 400 and "at most 1000 are allowed" in made.text, made.text


def test_constraints_that_must_wait_get_503(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "PENDING", 0)
    made = live.http.post("/v1/completions", json={"prompt": "x", "guided_regex": "[a-z]{9}"})
    assert made.status_code == 503 and int(made.headers["retry-after"]) > 0 and "try again later" in made.text
    monkeypatch.undo()
    assert complete(live, guided_regex="[a-z]{9}").isalpha()
